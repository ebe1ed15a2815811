"""The data plane: tensors only. It does what a plan says and decides nothing."""
