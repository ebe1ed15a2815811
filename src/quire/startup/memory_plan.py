"""The memory plan: how much of a device weights, activations and KV pages will take, before anything is loaded
(PagedAttention Figure 1). It is arithmetic only; torch is only asked for the free memory of a GPU."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import psutil

from quire.config import RESERVED_MEMORIES, EngineConfig
from quire.core.shared_memory import SharedMemoryGroup
from quire.errors import StartupError
from quire.kernels.cpu.weight_arena import weight_arena
from quire.kernels.limits import (
    MAX_CPU_SPLITS,
    MAX_GRAPH_ROWS,
    MAX_GRAPH_TOKENS,
    MAX_SCORED_POSITIONS,
    MAX_SCORES,
    max_hidden_rows,
)
from quire.kernels.peer_memory_layout import peer_bytes
from quire.memory.build import build_memory, max_seq_len
from quire.memory.jenga.shared_pool import PoolView
from quire.memory.page_layout import (
    MemorySize,
    PageLayout,
    PageSpec,
    check_large_pages,
    count_states,
    group_layers,
    plan_page_layout,
    state_interval,
    stores_states,
)
from quire.memory.paged import PagedMemory
from quire.protocol.model_spec import ModelSpec, max_parts_per_step
from quire.protocol.parallel_layout import Shard
from quire.protocol.pipeline_stages import STAGE_BUFFER_STEPS
from quire.protocol.step_plan import max_sampled_rows, max_verified_tokens
from quire.startup.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

GIB = 2**30
CPU_KV_SHARE = 0.4  # of the free memory, without a configured size
MAX_CPU_KV_BYTES = 4 * GIB
SHOWN_LENGTHS = (1024, 8192, 32768, 131072)
"""Lengths, in tokens, of the requests that a plan counts."""
COMPARED_LENGTHS = (8192, 32768)
"""Lengths, in tokens, of the sequences for which a plan compares its pages with uniform ones."""


class DraftSizes(NamedTuple):
    """What the draft model of speculative decoding takes of a plan: the bytes of its weights, and those of a token's
    keys and values in its layers."""

    model: str
    spec: ModelSpec
    weight_bytes: int
    token_bytes: int


class MemoryPlan(NamedTuple):
    """Sizes in bytes and tokens, of one rank, with what `draft` takes of them. `parameters` are the model's alone.
    `max_len` is the maximum length of a sequence; `limit_note` names what reduced it, if anything. `kv_note` names what
    limits the KV cache, unless its size was given."""

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
    page_tokens: int  # 0: virtual memory, whose pages are in bytes
    max_len: int
    limit_note: str
    max_seqs: int
    state_bytes: int = 0  # of a sequence of any length
    state_interval: int = 0  # tokens between cached states; 0: none are cached
    quantization_savings: int = 0  # bytes that the weights take less than in `dtype`, by FP8 or few bits
    world_size: int = 1  # ranks; all bytes and parameters are those of one rank
    pp_size: int = 1  # stages; other stages may have fewer weights
    peer_bytes: int = 0  # exchange memory of ranks on GPUs; 0 if it is allocated already
    kv_note: str = ""
    draft: DraftSizes | None = None
    saved_input_bytes: int = 0  # of the activations: inputs of running states for draft tokens

    def to_lines(self) -> list[str]:
        """Return the plan as lines of text for one screen."""
        left = self.free_bytes - self.weight_bytes - self.activation_bytes - self.peer_bytes - self.kv_bytes
        at_full = self.kv_tokens / self.max_len
        rows = [
            ("model", f"{self.model}: {self.parameters:,} parameters in {self.dtype}"
                      + (" and fewer bits" if self.quantization_savings else "") + self._rank_text()),
            ("device", f"{self._device_text()}: {_format_bytes(self.free_bytes)} free of "
            f"{_format_bytes(self.device_bytes)}"),
            ("weights", _format_bytes(self.weight_bytes - (self.draft.weight_bytes if self.draft else 0))),
            *([("draft model", f"{_format_bytes(self.draft.weight_bytes)}: {self.draft.model}, "
                f"{self.draft.spec.parameters:,} parameters")] if self.draft else []),
            ("activations", f"{_format_bytes(self.activation_bytes)} at most"
                            + (f", {_format_bytes(self.saved_input_bytes)} of them the states' inputs of draft tokens"
                               if self.saved_input_bytes else "")),
            *([("exchange",
            f"{_format_bytes(self.peer_bytes)} that the other ranks' GPUs reach")] if self.peer_bytes else []),
            ("KV cache", f"{_format_bytes(self.kv_bytes)} = {self.kv_tokens:,} tokens of {self.token_bytes:,} bytes, "
                         + (f"in pages of {self.page_tokens}" if self.page_tokens else "in pages that are mapped")),
            *([("draft KV", f"{self.draft.token_bytes:,} bytes of each token's, in pages of the same memory")]
              if self.draft else []),
            *self._state_rows(),
            ("left over", _format_bytes(left) + self.kv_note if left >= 0 else
             f"-{_format_bytes(-left)}: this does not fit"),
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
        """Return the totals of all ranks."""
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
    draft: DraftSizes | None = None,
) -> MemoryPlan:
    """Divide the memory of the device, or of each rank's device: `config` and `spec` are a rank's. `spec` includes the
    layers and weights of `draft`.

    `quantization_savings`: bytes that the weights take less than `itemsize` each. `device_bytes`: the size of a device
    that is not queried, and all free. `measured`: total and free bytes of a rank's device, and a description of it, if
    ranks have been started and measured it; their exchange memory is allocated then. Raise StartupError with the
    numbers if the model or one token of KV does not fit."""
    config = config.with_device_defaults(device)
    assert config.max_num_seqs is not None
    peers = peer_bytes(config.tp) if measured is None and device != "cpu" else 0
    if device_bytes is not None:
        measured = device_bytes, device_bytes, device
    total, free, where = measured or (*rank_memory(config, device), device)
    weights = spec.weight_bytes(itemsize) - quantization_savings
    models = [spec] if draft is None else [spec, draft.spec]  # one after the other, so the larger step counts
    activations = max(activation_bytes(config, model, itemsize) for model in models)
    activations += 0 if draft is None else hidden_states_bytes(config, draft.spec, itemsize)
    saved_inputs = saved_input_bytes(config, spec, itemsize)
    activations += exchange_bytes(config, spec, itemsize, device) + saved_inputs
    if device != "cpu":
        activations += sum(graph_bytes(config, model, itemsize) for model in models)
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
    max_len, limit_note = max_seq_len(config, spec, MemorySize(kv.tokens, wanted_len, itemsize, kv.bytes)), ""
    if max_len < wanted_len:
        if config.max_model_len is not None:
            raise StartupError(
                f"--max-model-len is {config.max_model_len}, but the KV cache holds {max_len} tokens",
                f"Use --max-model-len {max_len} or less, or a larger --kv-gib",
            )
        limit_note = f" (the model allows {wanted_len:,}; a larger --kv-gib would too)"
    kv_note = ""
    if kv.capped:
        kv_note = f": KV is for {config.max_num_seqs:,} sequences (--max-num-seqs) of {wanted_len:,} tokens"
    elif not fixed and device != "cpu":
        kv_note = f": --gpu-memory-utilization is {config.gpu_memory_utilization:g}"
    elif not fixed and share < room:
        kv_note = (
            f": without --kv-gib, KV takes {CPU_KV_SHARE:.0%} of a CPU's free memory, and at most "
            f"{_format_bytes(MAX_CPU_KV_BYTES)}"
        )
    return MemoryPlan(
        name, spec.parameters - (draft.spec.parameters if draft else 0), dtype, device, total, free, weights,
        activations, kv.bytes, kv.tokens, kv.token_bytes, 0 if config.memory == "virtual" else config.page_size,
        max_len, limit_note, config.max_num_seqs, spec.state_bytes,
        state_interval(config, spec, kv.bytes) if stores_states(config) else 0, quantization_savings,
        config.world_size, config.pp, peers, kv_note, draft, saved_inputs,
    )  # fmt: skip


def default_cpu_kv_bytes(free: int) -> int:
    """Return the size of the KV memory on a CPU with `free` bytes, without a configured size."""
    return min(int(free * CPU_KV_SHARE), MAX_CPU_KV_BYTES)


def check_still_fits(config: EngineConfig, plan: MemoryPlan, measured: tuple[int, int, str]) -> None:
    """Raise StartupError if the plan no longer fits into the free memory; `measured` is as for plan_memory. The share
    that --gpu-memory-utilization leaves unused may be used here, since the free memory differs a little from start to
    start."""
    _, free, where = measured
    parts = plan.weight_bytes, plan.activation_bytes, plan.kv_bytes
    if sum(parts) > free:
        raise _out_of_memory(config, plan.device, parts, free, where)


def _out_of_memory(
    config: EngineConfig, device: str, needs: tuple[int, int, int], usable: int, where: str, peers: int = 0
) -> StartupError:
    """Return the error that `needs` bytes of weights, activations and KV, and `peers` of exchange memory, exceed
    `usable`."""
    weights, activations, kv = map(_format_bytes, needs)
    exchange = f", {_format_bytes(peers)} of exchange" if peers else ""
    return StartupError(
        f"out of memory: {weights} of weights, {activations} of activations{exchange} and {kv} of KV cache don't fit "
        f"into {_format_bytes(max(usable, 0))} on {where}"
        + (f", each of {config.world_size} ranks" if config.world_size > 1 else ""),
        "Use a smaller --kv-gib, --max-num-batched-tokens or model"
        + (", or a larger --gpu-memory-utilization" if device != "cpu" else ""),
    )


class PoolMember(NamedTuple):
    """One model of a pool (quire.pool): what its engine is built from. `get_buffer` returns the buffer that the pages
    of all models are in; `shared_memory_group` are the engines of the pool."""

    config: EngineConfig
    source: Checkpoint
    plan: MemoryPlan
    memory: PagedMemory
    view: PoolView
    shared_memory_group: SharedMemoryGroup
    get_buffer: Callable[[], torch.Tensor]


class KVSize(NamedTuple):
    """Bytes of the KV memory, the tokens that it holds in every layer, and the bytes of one token. `capped` is True if
    the tokens were limited to those that all sequences can use."""

    bytes: int
    tokens: int
    token_bytes: int
    capped: bool = False


def _kv_size(config: EngineConfig, spec: ModelSpec, itemsize: int, available: int, max_tokens: int) -> KVSize:
    """Return the size in the config, in whole pages; by default all of `available` bytes, but not more than
    `max_tokens` tokens need."""
    pool = available if config.kv_gib is None else int(config.kv_gib * GIB)
    if config.kv_tokens is not None:
        pool = config.kv_tokens * spec.token_bytes(itemsize)
    layout = plan_page_layout(config, spec, itemsize, pool)
    if config.memory == "virtual":  # pages have the size of the device's
        token = spec.token_bytes(itemsize)
        layout = PageLayout((PageSpec((), token, config.page_size * token, config.page_size),))
    if config.kv_tokens is not None:
        tokens = -(-config.kv_tokens // layout.token_granularity) * layout.token_granularity
        return KVSize(layout.total_bytes(tokens, count_states(config, tokens)), tokens, layout.token_bytes)
    if pool > 0:
        check_large_pages(layout, pool)
    tokens = layout.max_tokens(pool)
    capped = config.kv_gib is None and tokens > max_tokens
    if capped:
        tokens = max_tokens // layout.token_granularity * layout.token_granularity
        pool = layout.total_bytes(tokens, count_states(config, tokens))
    whole = pool // layout.large_bytes * layout.large_bytes if layout.large_bytes else layout.total_bytes(tokens)
    return KVSize(whole, tokens, layout.token_bytes, capped)


def describe_pages(config: EngineConfig, spec: ModelSpec, itemsize: int, plan: MemoryPlan) -> list[str]:
    """Describe the pages: for each group of layers what it keeps and the size of its pages, the large pages that these
    are parts of or, for virtual memory, the number of buffers of a page, how many requests of some lengths fit at once
    and, for layers of several types, the tokens in a GiB beside those in uniform pages. Return nothing for the
    baselines, which have no pages."""
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
            holds = f"{group.run_tokens} embeddings of an image"
        if group.run_pages > 1:
            holds = f"{group.run_tokens / group.run_pages:.2f} tokens"
        of_draft = " of the draft model" if group.is_draft else ""
        parts = [f"{len(group.layers)} layers{of_draft}", kind, f"{group.page_bytes:,} bytes for {holds}"]
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
    if isinstance(memory, PagedMemory) and _has_unlike_layers(config, memory):
        for length in sorted({min(length, plan.max_len) for length in COMPARED_LENGTHS}):
            ours, uniform = tokens_per_gib(memory, length), uniform_tokens_per_gib(config, spec, itemsize, length)
            text = f"{ours:,.0f} tokens of decoding sequences of {length:,}; uniform pages {uniform:,.0f} "
            text += f"({ours / uniform:.1f} x)"
            rows.append(("in a GiB", text))
    return [f"{name:<12} {text}" for name, text in rows]


def _has_unlike_layers(config: EngineConfig, memory: PagedMemory) -> bool:
    """Return True if layers keep unlike amounts, in pages of their own: then uniform pages hold another number of
    tokens."""
    kept = {(one.kind, one.window, one.chunk, one.budget) for one in memory.kv_config.groups if one.layers}
    return config.memory == "paged" and len(kept) > 1


def tokens_per_gib(memory: PagedMemory, length: int) -> float:
    """Return the tokens that a GiB of `memory` holds of sequences of `length` tokens that decode: what a sequence needs
    for the next token stays, and what its windows have passed is free for others. Cached prefixes do not count."""
    return length * GIB / memory.decoding_bytes(length)


def uniform_tokens_per_gib(config: EngineConfig, spec: ModelSpec, itemsize: int, length: int) -> float:
    """Return the same of uniform pages (`--memory uniform`, as in vLLM 0.6.3), in which every layer keeps every token,
    and a sequence has one running state."""
    uniform = EngineConfig.of(  # no more of `config`, which may have what uniform pages do not take
        memory="uniform", page_size=config.page_size, max_num_seqs=1, swap_gib=0, max_images=config.max_images,
        vision_cache=config.experiment.vision_cache,
    ).with_device_defaults("cpu")  # fmt: skip
    return tokens_per_gib(PagedMemory.build(uniform, spec, MemorySize(length, length, itemsize)), length)


def activation_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int) -> int:
    """Return the bytes of the largest tensors of a step of `max_num_batched_tokens`: residual, projections and the
    MLP's inner layer; attention's scores, weights and mask, and the keys and values gathered for them, or, for kernels
    on CPUs, which gather nothing, the partial results of each context split; logits of every sequence, or of as many
    prompt tokens as are scored at once, in float32 and in the sampler's working copies; the rotary tables. A sequence
    has logits of each of its draft tokens, too."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    assert config.max_num_seqs is not None, "a sized config"
    kv = max(layer.kv_heads * layer.head_dim for layer in spec.layers)
    step = config.max_num_batched_tokens * (6 * spec.hidden + 4 * kv + 3 * spec.intermediate) * itemsize
    logits = _logits_rows(config) * spec.vocab_size * 16
    head_dim = max(layer.head_dim for layer in spec.layers)
    gathered = MAX_SCORES * kv // max(spec.heads, 1)  # keys, for the positions of the scores
    attention = (
        MAX_SCORES * (2 * itemsize + 1) + 5 * min(gathered, config.max_num_seqs * spec.max_len * kv) * itemsize // 2
    )
    if config.attention == "native":
        attention = config.max_num_seqs * spec.heads * MAX_CPU_SPLITS * (-(-head_dim // 32) * 32 + 2) * 4
    if config.attention == "cudnn":  # two results of a chunk, and both in float32
        attention += (
            2 * config.max_num_batched_tokens * spec.heads * max(s.head_dim for s in spec.layers) * (itemsize + 4)
        )
    longest = min(config.max_model_len or spec.max_len, spec.max_len)
    if spec.vision is not None:  # a step's parts, a partial image, and an image's rows
        vision = spec.vision
        parts = max_parts_per_step(
            config.max_num_batched_tokens, vision.part_tokens, vision.part_embeds, vision.max_embeds
        )
        encoding = vision.activations + parts * vision.part_bytes + vision.partial_image_bytes
        step += encoding * itemsize // 2
        step += vision.max_embeds * vision.embed_dim * itemsize
    if spec.min_budget:
        attention = max(attention, _selection_bytes(spec, longest, itemsize))
    return int(step + logits + attention + spec.num_rope_tables * longest * head_dim * 4)


def saved_input_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int) -> int:
    """Return the bytes of the inputs of running states that the draft tokens of a step have: see
    kernels.mamba_states.SavedInputs."""
    assert config.max_num_seqs is not None, "a sized config"
    token = sum(one.token_bytes(itemsize) for layer in spec.layers for one in layer.saved_inputs)
    return token * max_verified_tokens(config.max_num_seqs, config.max_draft_tokens)


def hidden_states_bytes(config: EngineConfig, head: ModelSpec, itemsize: int) -> int:
    """Return the bytes of the hidden states of a step's tokens that a speculation head reads: as the model leaves them,
    as the input of `combine`, and as its result."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    return max_hidden_rows(config.max_num_batched_tokens) * (2 * head.captured_width + head.hidden) * itemsize


def _logits_rows(config: EngineConfig) -> int:
    """Return the most rows of logits over the vocabulary that a step has at once."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    assert config.max_num_seqs is not None, "a sized config"
    return min(max(_sampled_rows(config), MAX_SCORED_POSITIONS), config.max_num_batched_tokens)


def _sampled_rows(config: EngineConfig) -> int:
    """Return the most tokens that a step samples: one of each sequence, and one for each draft token."""
    assert config.max_num_seqs is not None, "a sized config"
    return max_sampled_rows(config.max_num_seqs, config.max_draft_tokens)


def _selection_bytes(spec: ModelSpec, longest: int, itemsize: int) -> int:
    """Return the bytes to select the tokens to keep of the longest prompt, some heads at once: scores and weights in
    float32, copies of keys and values, and keys in float32."""
    kv_heads, dim = spec.layers[0].kv_heads, spec.layers[0].head_dim
    scores = spec.heads // kv_heads * spec.selection.observation_window
    heads = min(max(MAX_SCORES // (scores * longest), 1), kv_heads)
    return heads * longest * (8 * scores + dim * (2 * itemsize + 4))


def graph_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int) -> int:
    """Return the additional bytes of graphs on a GPU: their logits, in their pool and copied; the sampler's lists; how
    often each sequence has each token, with room to double that; page tables."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    assert config.max_num_seqs is not None, "a sized config"
    rows = min(_sampled_rows(config), MAX_GRAPH_ROWS)
    longest = min(config.max_model_len or spec.max_len, spec.max_len)
    widths = []
    for layers in group_layers(config, spec, itemsize):
        is_state = layers and spec.layers[layers[0]].state_tensors
        run = state_interval(config, spec, sys.maxsize) if is_state else config.page_size
        width = -(-longest // run)
        if spec.vision is not None and (not layers or spec.layers[layers[0]].is_cross_attention):
            width = config.max_images * -(-spec.vision.max_embeds // config.page_size)
        widths.append(width)
    tables = (config.max_num_seqs + 1) * sum(widths) * 8
    kv = max(layer.kv_heads * layer.head_dim for layer in spec.layers)
    step = min(config.max_num_batched_tokens, MAX_GRAPH_TOKENS) * (8 * spec.hidden + 4 * kv + 3 * spec.intermediate)
    return rows * spec.vocab_size * (2 * itemsize + 4 + 6) + step * itemsize + tables


def exchange_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int, device: str) -> int:
    """Return the additional bytes of a rank to all-reduce a step's rows and to gather logits: on a CPU all ranks'
    tensors and the sum in float32, on a GPU one more tensor of each. With stages, add the previous stage's tensors."""
    if config.world_size == 1:
        return 0
    assert config.max_num_batched_tokens is not None, "a sized config"
    assert config.max_num_seqs is not None, "a sized config"
    stage_inputs = 2 * config.max_num_batched_tokens * spec.hidden * itemsize if config.pp > 1 else 0
    if device != "cpu":  # and the inputs and outputs of stages' graphs
        stage_inputs = STAGE_BUFFER_STEPS * stage_inputs + 4 * min(
            config.max_num_seqs, MAX_GRAPH_ROWS
        ) * spec.hidden * itemsize * (config.pp > 1)
    if config.tp == 1:
        return stage_inputs
    tokens, vocabulary = (
        config.max_num_batched_tokens,
        config.tp * Shard(0, config.tp).padded_vocab_rows(spec.vocab_size),
    )
    logits = _logits_rows(config) * vocabulary * 2 * itemsize
    return stage_inputs + logits + tokens * spec.hidden * (config.tp * itemsize + 4 if device == "cpu" else itemsize)


def usable_bytes(config: EngineConfig, device: str, total: int, free: int) -> int:
    """Return the bytes that may be used of `device`, given its total and free bytes: on a GPU, a share of the total
    that includes what other processes use."""
    return free if device == "cpu" else int(total * config.gpu_memory_utilization) - (total - free)


def rank_memory(config: EngineConfig, device: str) -> tuple[int, int]:
    """Return the total and the free bytes of a rank's device. Ranks on a CPU share it equally; of GPUs, one for each
    rank, the one with the least room is taken, since a page has the same id on all. Raise StartupError if there are
    more ranks than GPUs."""
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
    """Return the total and the free bytes of `device`; memory prefaulted for weights counts as free."""
    if device == "cpu":
        memory = psutil.virtual_memory()
        return memory.total, memory.available + weight_arena().prefaulted
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total, free


def _format_bytes(count: int) -> str:
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 or not count else f"{count / 2**10:.1f} KiB"
