"""Applications for clusters that others manage. `quire deploy ray` runs one in Ray Serve."""
