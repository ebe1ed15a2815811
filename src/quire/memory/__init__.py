"""Manage the KV memory: which pages hold the keys and values of which sequence.

Read in this order:

- `interface.py`: KVMemory, the protocol that the scheduler calls.
- `page_pool.py`: PagePool, the reference counts of pages; a page is empty, used or cached.
- `policies.py`: one class for each layer type; it says which pages a computation reads and writes.
- `page_tables.py`: PageTables, the tables of the sequences in memory: allocation, copy-on-write, fork, free.
  `PageTables._drop_unneeded` frees the pages that a window has passed; `PagedMemory.commit` calls it after each step.
- `prefix_cache.py`: PrefixCache, which finds cached pages by the hash of their tokens.
- `paged.py`: PagedMemory, the default memory: admission, commit and accounting on top of these.

`encoder_cache.py` (images) and `swap.py` (host memory) are parts of PagedMemory. `jenga/`, `virtual/` and `baselines/`
hold the other systems; `build.py` selects one by `config.memory`."""
