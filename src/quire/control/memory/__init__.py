"""Memories: where the keys and values of every sequence live. One small protocol; one file an implementation.

The scheduler drives a KVMemory without knowing which one it is; the runner replays the journal that it writes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from typing import Protocol

from quire.config import PAGE_TABLE_MEMORIES, EngineConfig
from quire.control.memory.answers import DEFERRED, Account, Admission, Deferred, Placement, Sharing, TypeUsage, Usage
from quire.control.memory.demands import check_states, check_vision
from quire.control.memory.layout import MemorySize
from quire.control.memory.paged import PagedMemory
from quire.control.memory.prefix import PrefixCache
from quire.control.memory.reserved import RESERVATION_RULES, ReservedMemory
from quire.control.memory.virtual import VirtualMemory
from quire.control.request import Sequence
from quire.errors import StartupError
from quire.vocabulary.media import ImageItem
from quire.vocabulary.plan import PageOps
from quire.vocabulary.specs import KVCacheConfig, ModelSpec

__all__ = [
    "DEFERRED",
    "Account",
    "Admission",
    "Deferred",
    "KVMemory",
    "MemorySize",
    "Placement",
    "PrefixCache",
    "Sharing",
    "TypeUsage",
    "Usage",
    "build_memory",
    "max_seq_len",
]  # fmt: skip


class KVMemory(Protocol):
    """The interface of every memory. Shortage is a return value, and a call that reports it has changed nothing.

    Lengths are in tokens. `free` and `fork` take quiet sequences only. Deterministic: the same calls give the same
    placements and journal. `prefix_cache` is None where none is shared.
    """

    kv_config: KVCacheConfig

    @property
    def prefix_cache(self) -> PrefixCache | None: ...

    def fits(self, lengths: Seq[int], shared_prefix_len: int = 0, images: Seq[ImageItem] = ()) -> bool:
        """Could sequences of these lengths, with a common prefix of `shared_prefix_len` tokens and these pictures in
        it, be held
        at once if the memory were otherwise idle?"""
        ...

    def admit(self, seqs: Seq[Sequence], budget: int) -> list[Admission] | Deferred | None:
        """Birth of all live sequences of a request: reuse prefixes that are there, and what these sequences have in
        common, and make room for up to `budget` more tokens of one sequence, for all tokens of several. At least one
        token of each is left to compute. None: no room, and trying again is of use only once something left. LATER: the
        next request may be tried, this one will find more in a step to come. Undone by `free`."""
        ...

    def grow(self, seq: Sequence, length: int) -> bool:
        """Make tokens [seq.planned, length) writable and private to the sequence. Monotone and idempotent."""
        ...

    def plan_encoding(self, seq: Sequence, length: int, max_parts: int) -> tuple[int, int]:
        """Go on encoding the pictures that tokens [seq.planned, length) need, for which `grow` has made room, with at
        most `max_parts` parts; where nothing keeps them, whole pictures, and the first one of a step whatever it has.
        Returns how far the tokens can be computed, if a journal taken next comes first, and how many parts that one
        will have encoded."""
        ...

    def undo_encoding(self) -> None:
        """Take back what `plan_encoding` said since the last journal: the step that it was for isn't done."""
        ...

    def commit(self, seq: Sequence) -> None:
        """tokens[:seq.computed] are valid: publish full pages, drop what no layer needs any more."""
        ...

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """`child` starts with the parent's computed state."""
        ...

    def free(self, seq: Sequence) -> None:
        """Death, in memory or swapped out; cached pages may outlive the sequence."""
        ...

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        """Move quiet sequences, all of a request, to host memory; they leave their slots. False if that has no room."""
        ...

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        """Bring back sequences that were swapped out together, into new slots. False while memory is short."""
        ...

    def count_held(self, seqs: Seq[Sequence]) -> tuple[int, int]:
        """Bytes of the pages that these sequences hold, a shared one counted once, and the tokens in them."""
        ...

    def slot(self, seq: Sequence) -> int:
        """The dense index (from 1) of a resident sequence; 0 is scratch."""
        ...

    def take_page_ops(self) -> tuple[PageOps, PageOps]:
        """Effects since the last call: before the step's writes, and while it computes."""
        ...

    def discard_contents(self) -> None:
        """The runner's pages are new ones, in which nothing lies. No sequence is in memory, nor a registered prefix."""
        ...

    def get_placement(self, seq: Sequence) -> Placement:
        """What the replayed tables must equal. For tests; never called in a step."""
        ...

    def account(self) -> Account:
        """Bytes by category, which add up to the memory's size; and how much is shared, swapped and pinned."""
        ...

    def check(self) -> None:
        """Assert every invariant."""
        ...


def build_memory(config: EngineConfig, spec: ModelSpec, size: MemorySize, model_id: str = "") -> KVMemory:
    """The memory that `config.memory` names, of `size`; what the config doesn't size is sized as for a CPU.
    StartupError if it has no room for the longest sequence, where it reserves, or beside the registered prefixes."""
    config = config.with_device_defaults("cpu")
    if spec.min_budget:
        _check_prompt_pruning(config, spec)
    if spec.state_layers:
        check_states(config, spec)
    if spec.vision is not None:
        check_vision(config, spec, size.itemsize)
    if config.memory not in RESERVATION_RULES:
        kind = VirtualMemory if config.memory == "virtual" else PagedMemory
        paged = kind.build(config, spec, size, model_id)
        if config.prefix_tokens and not paged.fits([min(2, size.max_len)]):
            raise StartupError(
                f"--prefix-tokens is {config.prefix_tokens}, and the KV memory holds {size.tokens} tokens in all",
                "Keep fewer for registered prefixes, or use a larger --kv-gib or --kv-tokens",
            )
        return paged
    memory = ReservedMemory.build(config, spec, size)
    if not memory.fits([size.max_len]):
        raise StartupError(
            f"--memory {config.memory} finds no room for a sequence of {size.max_len} tokens in {size.tokens}",
            "Use a smaller --max-model-len, or a larger --kv-gib or --kv-tokens",
        )
    return memory


def _check_prompt_pruning(config: EngineConfig, spec: ModelSpec) -> None:
    """StartupError where layers keep a part of each prompt and the settings are for layers that keep all."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    queries = spec.selection.observation_window
    if config.max_num_batched_tokens < queries:
        raise StartupError(
            f"--max-num-batched-tokens is {config.max_num_batched_tokens}, and the model's layers need the last "
            f"{queries} tokens of a prompt in one step, which choose what is kept of it",
            f"Use {queries} or more",
        )
    if config.prefix_tokens:
        raise StartupError(
            f"--prefix-tokens is {config.prefix_tokens}, and what the model's layers keep of a prompt depends on all "
            "of it: no prefix of it can be kept for others",
            "Leave --prefix-tokens out",
        )
    if config.memory == "virtual":
        raise StartupError(
            "--memory is virtual, and the model's layers keep a part of each prompt", "Use --memory paged"
        )


def max_seq_len(config: EngineConfig, spec: ModelSpec, size: MemorySize) -> int:
    """Tokens of the longest sequence, of up to `size.max_len`, that a memory of `size` holds: what `fits` says, which
    is asked of requests too. What isn't known before it is built is bounded by the tokens that every layer holds."""
    if size.tokens >= size.max_len or config.memory not in PAGE_TABLE_MEMORIES:
        return min(size.tokens, size.max_len)
    memory = build_memory(config, spec, size)
    return bisect_left(range(1, size.max_len + 1), True, key=lambda length: not memory.fits([length]))
