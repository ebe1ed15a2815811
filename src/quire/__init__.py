"""quire serves large language models; its heart is the memory that holds the pages of every request's KV cache."""

__version__ = "0.1.0"
