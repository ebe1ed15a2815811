"""The protocol of a KV memory.

The scheduler calls a KVMemory and does not know the implementation. The runner replays the page operations that the
memory records."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from quire.memory.answers import Account, Admission, Deferred, EvictionLimit, Placement
from quire.memory.prefix_cache import PrefixCache
from quire.memory.prefix_demand import PrefixDemand
from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageOps


class KVMemory(Protocol):
    """The interface of every memory. Shortage is a return value, and a call that reports it has changed nothing.

    Lengths are in tokens. `free` and `fork` take only sequences that are not in flight. A memory is deterministic: the
    same calls give the same placements and page operations. `prefix_cache` is None if prefixes are not shared."""

    kv_config: KVCacheConfig

    @property
    def prefix_cache(self) -> PrefixCache | None: ...
    @property
    def prefix_demand(self) -> PrefixDemand | None: ...

    def fits(self, lengths: Seq[int], shared_prefix_len: int = 0, images: Seq[ImageItem] = ()) -> bool:
        """Return True if sequences of these lengths, with a common prefix of `shared_prefix_len` tokens that contains
        these images, could be held at once in a memory that is otherwise empty."""
        ...

    def admit(
        self, seqs: Seq[Sequence], budget: int, limit: EvictionLimit | None = None
    ) -> list[Admission] | Deferred | None:
        """Admit all live sequences of a request, and reuse cached prefixes and what the sequences have in common. All
        of them draft, or none does; a draft model may have computed less of what is reused.

        Make room for up to `budget` more tokens of one sequence, or for all tokens of several. At least one token of
        each is left to compute. A memory that holds sequences evicts prefixes that are waited for only within `limit`.
        None: there is no room, and the caller may wait until something is released; a memory that holds no sequence
        admits all that `fits`. DEFERRED: the next request may be tried; a later step will find more cached pages for
        this one. `free` undoes an admission."""
        ...

    def grow(self, seq: Sequence, length: int) -> bool:
        """Make tokens [seq.planned, length) writable and private, or return False. Monotone and idempotent."""
        ...

    def plan_encoding(self, seq: Sequence, length: int, max_parts: int) -> tuple[int, int]:
        """Plan up to `max_parts` more parts of the images that tokens [seq.planned, length) need; call `grow` first.

        Where encoded images are not stored, whole images are planned, and the first one of a step whatever its size.
        Return the length up to which tokens can be computed once the next page operations are replayed, and the number
        of parts that they encode."""
        ...

    def undo_encoding(self) -> None:
        """Undo the `plan_encoding` calls since the last `take_page_ops`: their step is not run."""
        ...

    def commit(self, seq: Sequence) -> None:
        """Record that tokens[:seq.computed] are valid: publish their full pages, and drop pages that no layer needs."""
        ...

    def commit_drafts(self, seq: Sequence) -> None:
        """Commit after a step with draft tokens or a draft model, in whose layers tokens[:seq.drafted] are valid.

        Tokens that were planned and rejected are taken back before: then seq.planned is less than a length that `grow`
        was given, and the pages stay for the next tokens."""
        ...

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Admit `child` with the parent's computed tokens; False if there is no room."""
        ...

    def free(self, seq: Sequence) -> None:
        """Release a sequence, in memory or swapped out; its cached pages may stay."""
        ...

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        """Move all sequences of a request, none in flight, to host memory. False if host memory has no room."""
        ...

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        """Move sequences that were swapped out together back, into new slots. False if there is no room."""
        ...

    def count_held(self, seqs: Seq[Sequence]) -> tuple[int, int]:
        """Return the bytes of the pages that these sequences hold, shared ones once, and the tokens in them."""
        ...

    def slot(self, seq: Sequence) -> int:
        """Return the slot, a dense index from 1, of a sequence in memory; slot 0 is scratch."""
        ...

    def take_page_ops(self) -> tuple[PageOps, PageOps]:
        """Return the page operations since the last call: those before the step's writes, and those during the step."""
        ...

    def discard_contents(self) -> None:
        """Forget all content: the runner has new, empty pages. No sequence and no registered prefix is in memory."""
        ...

    def get_placement(self, seq: Sequence) -> Placement:
        """Return what the runner's replayed tables must equal. For tests; not called in a step."""
        ...

    def account(self) -> Account:
        """Return the bytes by category, the sum of which is the memory's size, and sharing, swapping and pinning."""
        ...

    def check(self) -> None:
        """Assert every invariant."""
        ...
