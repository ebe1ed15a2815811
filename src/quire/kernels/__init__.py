"""Attention over paged keys and values: an obvious reference, and backends that must equal it."""
