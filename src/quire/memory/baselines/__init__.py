"""Memories that the papers compare with: a contiguous reservation for each sequence."""
