"""vAttention: contiguous addresses, with physical pages mapped on demand."""
