"""Checkpoints in the Hugging Face format: finding and reading them, and filling a model's parameters."""
