"""Structured outputs: grammars, and which tokens they allow next."""
