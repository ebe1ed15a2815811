"""A layer type of your own, by the method names of Jenga's paper (Figure 9a), in quire's memory beside full attention.

Block-local attention: tokens are in blocks of BLOCK, and one sees its own block and the one before it, up to itself.
So a block is released as soon as the next but one begins, and a prefix is found if at most two blocks of it are there.
The memory decides which pages a request gets, keeps and finds; what attends to them is a kernel's matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.jenga import Evictor, Request, policy_of
from quire.memory.paged import PagedMemory
from quire.memory.policies import POLICIES
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.sequence import Sequence as Branch

BLOCK, PAGE, TOKENS = 32, 16, 1024


def first_seen(token: int) -> int:
    """The first token that a token sees; both are counted from 1."""
    return max((token - 1) // BLOCK - 1, 0) * BLOCK + 1


class BlockLocalLayer:
    """Jenga's LayerSupportsPrefixCache."""

    def __init__(self) -> None:
        self.evictor = Evictor()

    def update_last_access(self, r: Request, time: int) -> None:
        for i in range(first_seen(r.len), r.len + 1):
            self.evictor.update_last_access(r.page[i], time)

    def set_prefix_length(self, r: Request) -> None:
        for i in range(1, r.len + 1):
            self.evictor.set_prefix_length(r.page[i], i)

    def get_possible_prefix(self, is_hit: Sequence[bool]) -> set[int]:
        lengths = range(1, len(is_hit) + 1)
        return {p for p in lengths if all(is_hit[i - 1] for i in range(first_seen(p + 1), p + 1))}


def memory() -> PagedMemory:
    """Two types of layers, whose pages have one size and are one pool."""
    ids = range(1, 2 * TOKENS // PAGE + 1)
    groups = tuple(
        KVCacheGroup((layer,), 64 * PAGE, 64, TOKENS // PAGE, ids, run_tokens=PAGE, kind=kind)
        for layer, kind in enumerate(("full", "block-local"))
    )
    policies = {**POLICIES, "block-local": policy_of(BlockLocalLayer(), horizon=4 * BLOCK, period=BLOCK)}
    geometry = KVCacheConfig(KVCacheLayout.PAGED, (ids.stop + 1) * 64 * PAGE, 8, groups, 2)
    return PagedMemory(geometry, max_step_tokens=64, policies=policies)


def served(memory: PagedMemory, id: int, tokens: list[int]) -> tuple[int, list[int]]:
    """A request comes and is computed in chunks: the tokens that it finds, and the pages that it holds at its end."""
    seq = Branch(id, tokens)
    [admitted] = memory.admit([seq], 64)  # type: ignore[misc]  # there is room
    seq.computed = seq.planned = admitted.reused_tokens
    while seq.computed < len(tokens):
        end = min(seq.computed + 64, len(tokens))
        assert memory.grow(seq, end)
        seq.computed = seq.planned = end
        memory.commit(seq)
    held = [sum(page > 0 for page in table) for table in memory.get_placement(seq).tables]
    memory.free(seq)
    memory.check()
    return admitted.reused_tokens, held


def main() -> list[tuple[int, list[int]]]:
    """Two questions about one document."""
    keys, document = memory(), list(range(400))
    results = [served(keys, id, [*document, 1000 + id, 2000 + id]) for id in (1, 2)]
    for found, (full, local) in results:
        print(f"found {found} of 402 tokens, and held {full} pages of full and {local} of block-local attention")
    return results


if __name__ == "__main__":
    main()
