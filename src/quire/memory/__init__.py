"""Where the keys and values of every sequence live: one interface, and the systems behind it."""
