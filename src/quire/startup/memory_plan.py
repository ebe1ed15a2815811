"""The memory plan: what weights, activations and KV pages will take of a device, before anything is loaded
(PagedAttention Figure 1). Arithmetic only; torch is asked for the free memory of a GPU and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import psutil

from quire.config import RESERVED_MEMORIES, EngineConfig
from quire.errors import StartupError
from quire.kernels.cpu.weight_arena import weight_arena
from quire.kernels.limits import MAX_CPU_SPLITS, MAX_GRAPH_ROWS, MAX_GRAPH_TOKENS, MAX_SCORED_POSITIONS, MAX_SCORES
from quire.kernels.peer_memory_layout import peer_bytes
from quire.memory.build import build_memory, max_seq_len
from quire.memory.page_layout import (
    MemorySize,
    PageLayout,
    PageSpec,
    check_large_pages,
    count_states,
    group_layers,
    plan_page_layout,
    state_interval,
)
from quire.protocol.model_spec import ModelSpec, max_parts_per_step
from quire.protocol.parallel_layout import Shard
from quire.protocol.pipeline_stages import STAGE_BUFFER_STEPS

GIB = 2**30
CPU_KV_SHARE = 0.4  # of the memory that is free, when no size is given
MAX_CPU_KV_BYTES = 4 * GIB
SHOWN_LENGTHS = (1024, 8192, 32768, 131072)
"""Tokens of the requests that are counted in a plan."""


class MemoryPlan(NamedTuple):
    """Bytes, tokens and lengths. `max_len` is what one sequence may reach; `limit_note` says what cut it, if "
    "anything."""

    model: str
    parameters: int
    dtype: str
    device: str
    device_bytes: int
    free_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    kv_tokens: int
    token_bytes: int
    page_tokens: int  # 0: pages are of bytes
    max_len: int
    limit_note: str
    max_seqs: int
    state_bytes: int = 0  # of a sequence, whatever its length
    state_interval: int = 0  # after each of which it can be found again; 0: it can't
    quantization_savings: int = 0  # of the weights, by FP8 or few bits: so many bytes less than in `dtype`
    world_size: int = 1  # of which this is one's, as are all bytes, and the parameters; the others' are the same
    pp_size: int = 1  # that have so many ranks in all: others may have less of weights than this one
    peer_bytes: int = 0  # what ranks on GPUs will exchange through; 0 where it is there, and missing from what is free

    def to_lines(self) -> list[str]:
        """One screen."""
        left = self.free_bytes - self.weight_bytes - self.activation_bytes - self.peer_bytes - self.kv_bytes
        at_full = self.kv_tokens / self.max_len
        rows = [
            ("model", f"{self.model}: {self.parameters:,} parameters in {self.dtype}"
                      + (" and fewer bits" if self.quantization_savings else "") + self._rank_text()),
            ("device", f"{self._device_text()}: {_format_bytes(self.free_bytes)} free of "
            f"{_format_bytes(self.device_bytes)}"),
            ("weights", _format_bytes(self.weight_bytes)),
            ("activations", f"{_format_bytes(self.activation_bytes)} at most"),
            *([("exchange",
            f"{_format_bytes(self.peer_bytes)} that the other ranks' GPUs reach")] if self.peer_bytes else []),
            ("KV cache", f"{_format_bytes(self.kv_bytes)} = {self.kv_tokens:,} tokens of {self.token_bytes:,} bytes, "
                         + (f"in pages of {self.page_tokens}" if self.page_tokens else "in pages that are mapped")),
            *self._state_rows(),
            ("left over", _format_bytes(left) if left >= 0 else f"-{_format_bytes(-left)}: this does not fit"),
            ("longest", f"{self.max_len:,} tokens a sequence{self.limit_note}"),
            ("at once", ("" if self.state_bytes else f"{at_full:,.1f} sequences of that length, ")
                        + f"{self.max_seqs:,} sequences at most"),
            *self._all_ranks_rows(),
        ]  # fmt: skip
        return [f"{name:<12} {text}" for name, text in rows]

    def _device_text(self) -> str:
        return f"{self.device}, shared out" if self.world_size > 1 and self.device == "cpu" else self.device

    def _rank_text(self) -> str:
        if self.pp_size > 1:
            tp_size = self.world_size // self.pp_size
            return f" at most, on each of {self.world_size} ranks: {tp_size} for each of {self.pp_size} stages"
        return f", on each of {self.world_size} ranks" if self.world_size > 1 else ""

    def _all_ranks_rows(self) -> list[tuple[str, str]]:
        """What all ranks have."""
        if self.world_size == 1:
            return []
        weights, kv = _format_bytes(self.world_size * self.weight_bytes), _format_bytes(self.world_size * self.kv_bytes)
        weights = f"at most {weights}" if self.pp_size > 1 else weights
        token = self.world_size * self.token_bytes
        return [
            ("all ranks", f"{weights} of weights, {kv} of KV = the same {self.kv_tokens:,} tokens, of {token:,} bytes")
        ]

    def _state_rows(self) -> list[tuple[str, str]]:
        if not self.state_bytes:
            return []
        more = f"; one after every {self.state_interval} tokens can be found again" if self.state_interval else ""
        return [("state", f"{_format_bytes(self.state_bytes)} a sequence, however long it is{more}")]


def plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    name: str,
    dtype: str,
    itemsize: int,
    device: str,
    quantization_savings: int = 0,
    device_bytes: int | None = None,
    measured: tuple[int, int, str] | None = None,
) -> MemoryPlan:
    """How to divide the device; of several ranks, each one's: `config` and `spec` are a rank's. `quantization_savings`:
    bytes that the weights take less than `itemsize` each. `device_bytes`: those of a device that isn't asked, and of
    which all are free. `measured`: bytes of a rank's device in all, and free, and what to call it, where they are
    known: ranks have been started then, and have what they exchange through. StartupError if the model or one token of
    KV doesn't fit, naming the numbers."""
    config = config.with_device_defaults(device)
    assert config.max_num_seqs is not None
    peers = peer_bytes(config.tp) if measured is None and device != "cpu" else 0
    if device_bytes is not None:
        measured = device_bytes, device_bytes, device
    total, free, where = measured or (*rank_memory(config, device), device)
    weights = spec.weight_bytes(itemsize) - quantization_savings
    activations = activation_bytes(config, spec, itemsize) + exchange_bytes(config, spec, itemsize, device)
    if device != "cpu":
        activations += graph_bytes(config, spec, itemsize)
    usable = usable_bytes(config, device, total, free)
    room = usable - weights - activations - peers
    wanted_len = config.max_model_len or spec.max_len
    if config.max_model_len is not None and config.max_model_len > spec.max_len:
        raise StartupError(
            f"--max-model-len is {config.max_model_len}, but the model was made for {spec.max_len} tokens",
            f"Use at most {spec.max_len}",
        )
    share = min(int(free * CPU_KV_SHARE), MAX_CPU_KV_BYTES // config.world_size, room) if device == "cpu" else room
    kv = _kv_size(config, spec, itemsize, share, config.max_num_seqs * wanted_len)
    fixed = config.kv_tokens is not None or config.kv_gib is not None
    if kv.tokens < 2 or (fixed and kv.bytes > room):
        least = max(kv.bytes, config.page_size * kv.token_bytes)
        raise _out_of_memory(config, device, (weights, activations, least), usable, where, peers)
    max_len, clipped = max_seq_len(config, spec, MemorySize(kv.tokens, wanted_len, itemsize, kv.bytes)), ""
    if max_len < wanted_len:
        if config.max_model_len is not None:
            raise StartupError(
                f"--max-model-len is {config.max_model_len}, but the KV cache holds {max_len} tokens",
                f"Use --max-model-len {max_len} or less, or a larger --kv-gib",
            )
        clipped = f" (the model allows {wanted_len:,}; a larger --kv-gib would too)"
    return MemoryPlan(
        name, spec.parameters, dtype, device, total, free, weights, activations, kv.bytes, kv.tokens,
        kv.token_bytes, 0 if config.memory == "virtual" else config.page_size, max_len, clipped, config.max_num_seqs,
        spec.state_bytes, config.state_tokens if state_interval(config, spec) == config.state_tokens else 0,
        quantization_savings, config.world_size, config.pp, peers,
    )  # fmt: skip


def check_still_fits(config: EngineConfig, plan: MemoryPlan, measured: tuple[int, int, str]) -> None:
    """StartupError where what was planned at start doesn't fit into what is free by now; `measured` is as for
    plan_memory. What --gpu-memory-utilization leaves counts too: how much is free differs a little from start to
    start."""
    _, free, where = measured
    parts = plan.weight_bytes, plan.activation_bytes, plan.kv_bytes
    if sum(parts) > free:
        raise _out_of_memory(config, plan.device, parts, free, where)


def _out_of_memory(
    config: EngineConfig, device: str, needs: tuple[int, int, int], usable: int, where: str, peers: int = 0
) -> StartupError:
    """`needs` of memory, of weights, activations and KV, are more than `usable`, with `peers` to exchange through."""
    weights, activations, kv = map(_format_bytes, needs)
    exchange = f", {_format_bytes(peers)} of exchange" if peers else ""
    return StartupError(
        f"out of memory: {weights} of weights, {activations} of activations{exchange} and {kv} of KV cache don't fit "
        f"into {_format_bytes(max(usable, 0))} on {where}"
        + (f", each of {config.world_size} ranks" if config.world_size > 1 else ""),
        "Use a smaller --kv-gib, --max-num-batched-tokens or model"
        + (", or a larger --gpu-memory-utilization" if device != "cpu" else ""),
    )


class KVSize(NamedTuple):
    """Bytes of the KV memory, the tokens that it holds in every layer, and the bytes of one of those."""

    bytes: int
    tokens: int
    token_bytes: int


def _kv_size(config: EngineConfig, spec: ModelSpec, itemsize: int, available: int, max_tokens: int) -> KVSize:
    """The size that was asked for, in whole pages; else all of `available` bytes, as far as `max_tokens` tokens "
    "need them."""
    pool = available if config.kv_gib is None else int(config.kv_gib * GIB)
    if config.kv_tokens is not None:
        pool = config.kv_tokens * spec.token_bytes(itemsize)
    sheets = plan_page_layout(config, spec, itemsize, pool)
    if config.memory == "virtual":  # pages are the device's
        token = spec.token_bytes(itemsize)
        sheets = PageLayout((PageSpec((), token, config.page_size * token, config.page_size),))
    if config.kv_tokens is not None:
        tokens = -(-config.kv_tokens // sheets.token_granularity) * sheets.token_granularity
        return KVSize(sheets.total_bytes(tokens, count_states(config, tokens)), tokens, sheets.token_bytes)
    if pool > 0:
        check_large_pages(sheets, pool)
    tokens = sheets.max_tokens(pool)
    if config.kv_gib is None and tokens > max_tokens:
        tokens = max_tokens // sheets.token_granularity * sheets.token_granularity
        pool = sheets.total_bytes(tokens, count_states(config, tokens))
    whole = pool // sheets.large_bytes * sheets.large_bytes if sheets.large_bytes else sheets.total_bytes(tokens)
    return KVSize(whole, tokens, sheets.token_bytes)


def describe_pages(config: EngineConfig, spec: ModelSpec, itemsize: int, plan: MemoryPlan) -> list[str]:
    """The page plan: what each group of layers keeps, in pages of how many bytes, and the large pages that these are
    parts of; or of virtual memory, in how many buffers a page lies; and how many requests of some lengths fit at once.
    Nothing for the baselines, which have no pages."""
    if config.memory in RESERVED_MEMORIES:
        return []
    memory = build_memory(config, spec, MemorySize(plan.kv_tokens, plan.max_len, itemsize, plan.kv_bytes))
    large, rows = memory.kv_config.large_bytes, []
    for group in memory.kv_config.groups:
        length = group.window or group.chunk
        kind = group.kind if length is None else f"{group.kind} of {length:,}"
        holds = f"{group.run_tokens} tokens"
        if group.kind == "state":
            holds = "a sequence's state" if group.table_width == 1 else f"the state after {holds}"
        if group.kind in ("cross", "vision"):
            holds = f"{group.run_tokens} rows of a picture"
        if group.run_pages > 1:
            holds = f"{group.run_tokens / group.run_pages:.2f} tokens"
        parts = [f"{len(group.layers)} layers", kind, f"{group.page_bytes:,} bytes for {holds}"]
        if group.parts > 1:
            parts.append(f"{group.page_bytes // group.parts:,} in each of {group.parts} buffers")
        if config.world_size > 1:
            parts.append(f"{config.world_size * group.page_bytes:,} on all ranks")
        if padding := group.page_bytes - group.payload_bytes:
            parts.append(f"{padding / group.page_bytes:.1%} padding")
        if large:
            parts.append(f"{large // group.page_bytes} in a large page")
        rows.append(("pages", ", ".join(parts)))
    if large:
        rows.append(("large pages", f"{plan.kv_bytes // large:,} of {large:,} bytes, which any layer type may have"))
    lengths = sorted({n for n in SHOWN_LENGTHS if n < plan.max_len} | {plan.max_len})
    seqs = range(1, plan.max_seqs + 1)
    counts = [bisect_left(seqs, True, key=lambda count: not memory.fits([n] * count)) for n in lengths]
    rows.append(("requests", ", ".join(f"{count:,} of {n:,} tokens" for n, count in zip(lengths, counts))))
    return [f"{name:<12} {text}" for name, text in rows]


def activation_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int) -> int:
    """The largest tensors of a step of `max_num_batched_tokens`: residual, projections and the MLP's inner layer;
    attention's scores, weights and mask, and the keys and values gathered for them, or, by a CPU's kernels, which
    gather nothing, what the parts of each context give; logits of every sequence, or of as many prompt tokens as are
    scored at once, in float32 and in the sampler's working copies; the rotary tables."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    assert config.max_num_seqs is not None, "a sized config"
    kv = max(layer.kv_heads * layer.head_dim for layer in spec.layers)
    step = config.max_num_batched_tokens * (6 * spec.hidden + 4 * kv + 3 * spec.intermediate) * itemsize
    logits = min(max(config.max_num_seqs, MAX_SCORED_POSITIONS), config.max_num_batched_tokens) * spec.vocab_size * 16
    head_dim = max(layer.head_dim for layer in spec.layers)
    gathered = MAX_SCORES * kv // max(spec.heads, 1)  # keys, of as many positions as the scores have
    attention = (
        MAX_SCORES * (2 * itemsize + 1) + 5 * min(gathered, config.max_num_seqs * spec.max_len * kv) * itemsize // 2
    )
    if config.attention == "native":
        attention = config.max_num_seqs * spec.heads * MAX_CPU_SPLITS * (-(-head_dim // 32) * 32 + 2) * 4
    if config.attention == "cudnn":  # two answers for a chunk, and both in float32
        attention += (
            2 * config.max_num_batched_tokens * spec.heads * max(s.head_dim for s in spec.layers) * (itemsize + 4)
        )
    longest = min(config.max_model_len or spec.max_len, spec.max_len)
    if spec.vision is not None:  # as many parts as a step encodes, what it leaves of a picture, and a picture's rows
        eyes = spec.vision
        parts = max_parts_per_step(config.max_num_batched_tokens, eyes.part_tokens, eyes.part_embeds, eyes.max_embeds)
        encoding = eyes.activations + parts * eyes.part_bytes + eyes.partial_image_bytes
        step += encoding * itemsize // 2
        step += eyes.max_embeds * eyes.embed_dim * itemsize
    if spec.min_budget:
        attention = max(attention, _selection_bytes(spec, longest, itemsize))
    return int(step + logits + attention + spec.num_rope_tables * longest * head_dim * 4)


def _selection_bytes(spec: ModelSpec, longest: int, itemsize: int) -> int:
    """What chooses the tokens to keep of the longest prompt, some heads at once: scores and weights in float32, copies
    of keys and values, and of keys in float32."""
    kv_heads, dim = spec.layers[0].kv_heads, spec.layers[0].head_dim
    scores = spec.heads // kv_heads * spec.selection.observation_window
    heads = min(max(MAX_SCORES // (scores * longest), 1), kv_heads)
    return heads * longest * (8 * scores + dim * (2 * itemsize + 4))


def graph_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int) -> int:
    """What a GPU holds beside: logits that graphs leave, in their pool and kept; the sampler's lists; how often each
    sequence has said each token, and room to double that; page tables."""
    assert config.max_num_seqs is not None, "a sized config"
    rows = min(config.max_num_seqs, MAX_GRAPH_ROWS)
    longest = min(config.max_model_len or spec.max_len, spec.max_len)
    widths = []
    for layers in group_layers(config, spec, itemsize):
        run = state_interval(config, spec) if layers and spec.layers[layers[0]].state_tensors else config.page_size
        width = -(-longest // run)
        if spec.vision is not None and (not layers or spec.layers[layers[0]].is_cross_attention):
            width = config.max_images * -(-spec.vision.max_embeds // config.page_size)
        widths.append(width)
    tables = (config.max_num_seqs + 1) * sum(widths) * 8
    kv = max(layer.kv_heads * layer.head_dim for layer in spec.layers)
    step = min(config.max_num_batched_tokens, MAX_GRAPH_TOKENS) * (8 * spec.hidden + 4 * kv + 3 * spec.intermediate)
    return rows * spec.vocab_size * (2 * itemsize + 4 + 6) + step * itemsize + tables


def exchange_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int, device: str) -> int:
    """What a rank holds beside to add up a step's rows and to put logits together: on a CPU everybody's, and the sum in
    float32; on GPUs one more of each. Of stages, what the one before gives too."""
    if config.world_size == 1:
        return 0
    assert config.max_num_batched_tokens is not None, "a sized config"
    assert config.max_num_seqs is not None, "a sized config"
    given = 2 * config.max_num_batched_tokens * spec.hidden * itemsize if config.pp > 1 else 0
    if device != "cpu":  # and what stages' graphs read and leave
        given = STAGE_BUFFER_STEPS * given + 4 * min(config.max_num_seqs, MAX_GRAPH_ROWS) * spec.hidden * itemsize * (
            config.pp > 1
        )
    if config.tp == 1:
        return given
    tokens, vocabulary = (
        config.max_num_batched_tokens,
        config.tp * Shard(0, config.tp).padded_vocab_rows(spec.vocab_size),
    )
    logits = min(max(config.max_num_seqs, MAX_SCORED_POSITIONS), tokens) * vocabulary * 2 * itemsize
    return given + logits + tokens * spec.hidden * (config.tp * itemsize + 4 if device == "cpu" else itemsize)


def usable_bytes(config: EngineConfig, device: str, total: int, free: int) -> int:
    """What may be used of `device`, which has so many bytes: on a GPU a share of all, what others have included."""
    return free if device == "cpu" else int(total * config.gpu_memory_utilization) - (total - free)


def rank_memory(config: EngineConfig, device: str) -> tuple[int, int]:
    """Bytes of a rank's device in all, and free now. Ranks on a CPU share it out; of GPUs, of which each has one, that
    with the least room decides, since a page has the same id everywhere. StartupError for more ranks than GPUs."""
    if device == "cpu" or config.tp == 1:
        total, free = device_memory(device)
        return total // config.world_size, free // config.world_size
    import torch

    if config.tp > (count := torch.cuda.device_count()):
        raise StartupError(
            f"--tp is {config.tp}, and torch finds {count} GPU{'s' * (count > 1)}",
            "Use a smaller --tp; `quire plan --device-gib` plans for GPUs that aren't here",
        )
    there = [device_memory(f"{device}:{i}") for i in range(config.tp)]
    return min(there, key=lambda one: usable_bytes(config, device, *one))


def device_memory(device: str) -> tuple[int, int]:
    """Bytes of `device` in all, and free now, what is ready for weights included."""
    if device == "cpu":
        found = psutil.virtual_memory()
        return found.total, found.available + weight_arena().prefaulted
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total, free


def _format_bytes(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
