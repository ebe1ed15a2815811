"""The memories to which the papers compare: a contiguous reservation for each sequence."""
