"""Kernels and attention backends over paged keys and values; every one must equal the slow reference."""
