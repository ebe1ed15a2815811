"""Build the memory that a config names."""

from __future__ import annotations

import sys
from bisect import bisect_left

from quire.config import PAGE_TABLE_MEMORIES, EngineConfig
from quire.errors import StartupError
from quire.memory.baselines.reserved import RESERVATION_RULES, ReservedMemory
from quire.memory.interface import KVMemory
from quire.memory.page_layout import MemorySize
from quire.memory.paged import PagedMemory
from quire.memory.requirements import check_states, check_vision
from quire.memory.virtual.virtual_memory import VirtualMemory
from quire.protocol.model_spec import ModelSpec
from quire.protocol.shared_host import SharedHostMemory


def build_memory(
    config: EngineConfig, spec: ModelSpec, size: MemorySize, model_id: str = "",
    shared_host: SharedHostMemory | None = None,
) -> KVMemory:  # fmt: skip
    """Build the memory that `config.memory` names, of `size`. Settings without a value get the defaults of a CPU.
    `shared_host` is as in Swap.

    StartupError if a reserved memory has no room for the longest sequence, or a paged one for a sequence besides the
    registered prefixes."""
    config = config.with_device_defaults("cpu")
    if spec.min_budget:
        _check_prompt_pruning(config, spec)
    if spec.state_layers:
        check_states(config, spec)
    if spec.vision is not None:
        check_vision(config, spec, size.itemsize)
    if config.memory not in RESERVATION_RULES:
        kind = VirtualMemory if config.memory == "virtual" else PagedMemory
        paged = kind.build(config, spec, size, model_id, shared_host=shared_host)
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
    """Raise StartupError if the settings do not fit layers that prune the prompt (PyramidKV)."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    queries = spec.selection.observation_window
    if config.max_num_batched_tokens < queries:
        raise StartupError(
            f"--max-num-batched-tokens is {config.max_num_batched_tokens}, and the model's layers need the last "
            f"{queries} tokens of a prompt in one step, to choose what they keep of it",
            f"Use {queries} or more",
        )
    if config.prefix_tokens:
        raise StartupError(
            f"--prefix-tokens is {config.prefix_tokens}, and what the model's layers keep of a prompt depends on all "
            "of it: no prefix can be stored for others",
            "Leave --prefix-tokens out",
        )
    if config.memory == "virtual":
        raise StartupError(
            "--memory is virtual, and the model's layers keep a part of each prompt", "Use --memory paged"
        )


def max_seq_len(config: EngineConfig, spec: ModelSpec, size: MemorySize) -> int:
    """Return the most tokens, up to `size.max_len`, of a sequence that fits a memory of `size`.

    It builds the memory and asks `fits`, as the check of requests does. For a memory without page tables it is bounded
    by the tokens that every layer holds."""
    if size.tokens >= size.max_len or config.memory not in PAGE_TABLE_MEMORIES:
        return min(size.tokens, size.max_len)
    memory = build_memory(config, spec, size)
    longest = min(size.max_len, sys.maxsize - 1)  # the most that a range has
    return bisect_left(range(1, longest + 1), True, key=lambda length: not memory.fits([length]))
