"""The engine and its scheduler: which sequences compute which tokens in each step. No torch, no I/O, no clock."""
