"""vAttention: contiguous virtual addresses, with physical pages mapped on demand."""
