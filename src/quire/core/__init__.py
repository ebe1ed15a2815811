"""The control plane: who is served next, and where its tokens are kept. Integers only: no torch, no I/O, no clock."""
