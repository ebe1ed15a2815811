"""Checkpoints: locating and reading files in the Hugging Face format and in GGUF, and loading a model's parameters."""
