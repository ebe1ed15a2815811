"""Replay of a plan log without its model, and comparison of two logs.

Table writes are applied to tables in NumPy, and all page operations by the Store of real models, in torch on a CPU,
with pages of a few bytes. After each step both page tables must be equal, and every slice must have real pages wherever
it reads and writes. Tokens are not used, so logs of any model can be replayed.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.plan_log import LoggedStep, PlanLog
from quire.protocol.step_plan import (
    LAST_SAMPLED,
    ImageEncoding,
    PageCopy,
    PageOp,
    Poison,
    SeqSlice,
    SlotInit,
    StepPlan,
    StepResult,
    SwapIn,
    SwapOut,
    TableWrite,
)

if TYPE_CHECKING:
    from quire.worker.store import Store

ITEM_BYTES = 2  # bytes of an element in the replayed pages
TOKEN_BYTES = 2 * ITEM_BYTES
PAGE_OPS_SHOWN = (TableWrite, PageCopy, SwapOut, SwapIn, Poison, ImageEncoding)
POSITIONAL_KINDS = ("full", "window", "chunked")  # of groups with a page at each position of a token


class ReplayError(ValueError):
    """An inconsistency in a step, with its place in the plan."""


class SlotContent(NamedTuple):
    """The images of the sequence in a slot, and whether its sampling parameters need the tokens so far."""

    images: tuple[ImageItem, ...]
    needs_history: bool


class PlanReplayer:
    """Replays steps on its own `tables`, one for each group, and on a Store. `step` raises ReplayError at the first
    inconsistency."""

    def __init__(self, kv_config: KVCacheConfig) -> None:
        self.kv_config = kv_config
        self.tables = [np.zeros((kv_config.slots, group.table_width), np.int64) for group in kv_config.groups]
        self.store = _make_store(_shrink(kv_config))
        self.slots: dict[int, SlotContent] = {}
        self.has_head = any(group.reads_hidden_states for group in kv_config.groups)
        self.counts: Counter[str] = Counter()
        self.op_counts: Counter[str] = Counter()

    def step(self, plan: StepPlan, result: StepResult | None) -> None:
        """Replay and check a step."""
        for i, init in enumerate(plan.new_slots):
            self._check_slot(init.slot, f"new_slots[{i}]")
            self._init_slot(init, f"new_slots[{i}]")
        self._replay(plan.page_ops, "page_ops")
        for i, seq_slice in enumerate(plan.slices):
            self._check_slice(seq_slice, f"slices[{i}]")
        draft_counts = {seq_slice.slot: len(seq_slice.draft_tokens) for seq_slice in plan.slices}
        for i, seq_slice in enumerate(plan.draft_slices):
            where = f"draft_slices[{i}]"
            if seq_slice.num_samples and seq_slice.slot not in draft_counts:
                raise ReplayError(f"{where}: slot {seq_slice.slot} has no slice that the proposals could follow")
            if self.has_head:
                self._check_head_slice(seq_slice, plan, where)
            else:
                self._check_slice(seq_slice, where, draft_counts.get(seq_slice.slot, 0))
        self._replay(plan.overlapped_page_ops, "overlapped_page_ops")
        self._compare_tables({op.slot for op in (*plan.page_ops, *plan.overlapped_page_ops) if type(op) is TableWrite})
        if result is not None:
            self._check_result(plan, result)
        self.counts.update(
            steps=1, slices=len(plan.slices), new_slots=len(plan.new_slots),
            forks=sum(init.parent_slot >= 0 for init in plan.new_slots),
            tokens=sum(len(seq_slice.tokens) for seq_slice in plan.slices), collected=result is not None,
        )  # fmt: skip

    def _init_slot(self, init: SlotInit, where: str) -> None:
        given, parent = init.sampling, self.slots.get(init.parent_slot)
        if parent is None and (given is None or init.parent_slot >= 0):
            raise ReplayError(
                f"{where}: slot {init.slot} inherits from slot {init.parent_slot}, which was never initialized"
            )
        has_parent_history = parent is not None and parent.needs_history
        needs_history = has_parent_history if given is None else given.needs_history
        if needs_history and not init.history and not has_parent_history:
            raise ReplayError(f"{where}: slot {init.slot} has penalties and no history")
        self.slots[init.slot] = SlotContent(init.images, needs_history)

    def _check_slot(self, slot: int, where: str) -> None:
        if not 0 < slot < self.kv_config.slots:
            raise ReplayError(f"{where}: slot {slot} is none of the {self.kv_config.slots}, or the scratch one")

    def _replay(self, page_ops: tuple[PageOp, ...], name: str) -> None:
        for i, op in enumerate(page_ops):
            self._check_op(op, f"{name}[{i}]")
            if isinstance(op, TableWrite):
                self.tables[op.group][op.slot, op.first_page : op.first_page + len(op.pages)] = op.pages
        self.store.apply_page_ops(tuple(op for op in page_ops if not isinstance(op, ImageEncoding)))
        self.op_counts.update(type(op).__name__ for op in page_ops)

    def _check_op(self, op: PageOp, where: str) -> None:
        """Check that the slots, table entries and pages of an operation exist in the geometry."""
        if isinstance(op, ImageEncoding):
            self._check_encoding(op, where)
            return
        if not 0 <= op.group < len(self.kv_config.groups):
            raise ReplayError(f"{where}: there is no group {op.group}")
        group = self.kv_config.groups[op.group]
        pages: Iterable[int] = ()
        hosts: Iterable[int] = ()
        if isinstance(op, TableWrite):
            self._check_slot(op.slot, where)
            if op.first_page < 0 or op.first_page + len(op.pages) > group.table_width:
                raise ReplayError(
                    f"{where}: places {op.first_page} on for {len(op.pages)} pages, of {group.table_width}"
                )
            pages = filter(None, op.pages)
        elif isinstance(op, PageCopy):
            pages = op.src, op.dst
        elif isinstance(op, SwapOut | SwapIn):
            pages, hosts = (op.page,), (op.host_page,)
        elif isinstance(op, Poison):
            pages = (op.page,)
        for page in pages:
            if page not in group.ids:
                raise ReplayError(f"{where}: page {page} is none of group {op.group}")
        for host in hosts:
            if host not in group.host_ids:
                raise ReplayError(f"{where}: host page {host} is none of group {op.group}")

    def _check_encoding(self, op: ImageEncoding, where: str) -> None:
        """Check that the slot has the image and its parts, and the group a table entry for it."""
        self._check_slot(op.slot, where)
        media = self.slots[op.slot].images if op.slot in self.slots else ()
        if not 0 <= op.image_index < len(media):
            raise ReplayError(f"{where}: slot {op.slot} has {len(media)} images, and not image {op.image_index}")
        if not 0 <= op.first_part < op.first_part + op.num_parts <= media[op.image_index].num_parts:
            raise ReplayError(
                f"{where}: {op.num_parts} parts from part {op.first_part} on, of {media[op.image_index].num_parts}"
            )
        if not -1 <= op.group < len(self.kv_config.groups):
            raise ReplayError(f"{where}: there is no group {op.group}")
        if op.group >= 0 and not 0 <= op.first_page < self.kv_config.groups[op.group].table_width:
            raise ReplayError(f"{where}: place {op.first_page}, of {self.kv_config.groups[op.group].table_width}")

    def _check_slice(self, seq_slice: SeqSlice, where: str, num_drafts: int | None = None) -> None:
        """Check that the slot is initialized and has real pages for all positions that the slice reads and writes. With
        `num_drafts` it is a draft slice, for the draft model's groups, after a slice with that many draft tokens."""
        self._check_slot(seq_slice.slot, where)
        if seq_slice.slot not in self.slots:
            raise ReplayError(f"{where}: slot {seq_slice.slot} was never initialized")
        if (
            seq_slice.start < 0
            or not (seq_slice.tokens or (num_drafts is not None and seq_slice.num_samples > 0))
            or seq_slice.num_samples < 0
            or min(seq_slice.tokens, default=0) < LAST_SAMPLED
        ):
            raise ReplayError(
                f"{where}: {len(seq_slice.tokens)} tokens from position {seq_slice.start} on, "
                f"{seq_slice.num_samples} samples"
            )
        end = seq_slice.start + len(seq_slice.tokens) + len(seq_slice.draft_tokens)
        if num_drafts is not None and seq_slice.num_samples:  # the accepted tokens and all proposals but the last one
            end += num_drafts + seq_slice.num_samples
        for g, group in enumerate(self.kv_config.groups):
            if group.kind not in POSITIONAL_KINDS or group.is_draft != (num_drafts is not None):
                continue
            first, last = group.num_full_pages(group.first_visible(seq_slice.start)), group.num_pages(end)
            pages = self.tables[g][seq_slice.slot, first:last]
            if last > group.table_width or not pages.all():
                raise ReplayError(
                    f"{where}: slot {seq_slice.slot} has no real page for some position below {end} in group {g}"
                )

    def _check_head_slice(self, seq_slice: SeqSlice, plan: StepPlan, where: str) -> None:
        """Check a draft slice of a head: it follows the slot's slice, and has one more token if that samples
        none. The head computes the slice's tokens, and all proposals but the last one."""
        row = next((row for row in plan.slices if row.slot == seq_slice.slot), None)
        if row is None:
            raise ReplayError(f"{where}: slot {seq_slice.slot} has no slice whose hidden states a head could read")
        end = row.start + len(row.tokens)
        if seq_slice.start != end or len(seq_slice.tokens) != (row.num_samples == 0) or seq_slice.draft_tokens:
            raise ReplayError(
                f"{where}: {len(seq_slice.tokens)} tokens from position {seq_slice.start} on, after a slice that ends "
                f"at {end} with {row.num_samples} samples"
            )
        written = max(seq_slice.num_samples - 1, 0)
        row = row._replace(tokens=row.tokens + (0,) * written, num_samples=0)
        self._check_slice(row, where, 0)

    def _compare_tables(self, slots: set[int]) -> None:
        """Check that our tables are those of the Store for these slots."""
        for g, table in enumerate(self.tables):
            for slot in slots:
                other = self.store.host_tables[g][slot][: table.shape[1]]
                if not np.array_equal(table[slot], other):
                    place = int(np.flatnonzero(table[slot] != other)[0])
                    raise ReplayError(
                        f"place {place} of slot {slot} in group {g} is one page here and another one there"
                    )

    def _check_result(self, plan: StepPlan, result: StepResult) -> None:
        if len(result.slice_results) != len(plan.slices):
            raise ReplayError(f"{len(result.slice_results)} samples for {len(plan.slices)} slices")
        for i, (seq_slice, sampled) in enumerate(zip(plan.slices, result.slice_results)):
            least, most = seq_slice.num_samples, seq_slice.num_samples + len(seq_slice.draft_tokens)
            if not least <= len(sampled.tokens) <= most:
                expected = f"{least} to {most}" if most > least else least
                raise ReplayError(f"samples[{i}]: {len(sampled.tokens)} tokens, and {expected} were to be drawn")

    def digest(self) -> str:
        """Return a digest of all tables. Raise ReplayError if those of the Store differ."""
        self._compare_tables(set(range(self.kv_config.slots)))
        digest = hashlib.sha256()
        for table in self.tables:
            digest.update(table.astype("<i8").tobytes())
        return digest.hexdigest()


def _shrink(kv_config: KVCacheConfig) -> KVCacheConfig:
    """Return the geometry with the same tables and page ids and the fewest bytes in a page: one token, or as many as
    keep the ratios to large pages."""
    ratios = [max(kv_config.large_bytes // group.page_bytes, 1) for group in kv_config.groups]
    whole = math.lcm(*ratios) * TOKEN_BYTES if kv_config.large_bytes else TOKEN_BYTES
    groups = tuple(
        replace(group, layers=(g,), page_bytes=whole // ratio, token_bytes=TOKEN_BYTES, run_tokens=1, run_pages=1,
                kind="full")
        for g, (group, ratio) in enumerate(zip(kv_config.groups, ratios))
    )  # fmt: skip
    return replace(
        kv_config, groups=groups, bytes=max(group.ids.stop * group.page_bytes for group in groups), large_bytes=0,
        host_bytes=max(group.host_ids.stop * group.page_bytes for group in groups), itemsize=ITEM_BYTES, sight="",
    )  # fmt: skip


def _make_store(kv_config: KVCacheConfig) -> Store:
    """Return the Store of real models, for layers with one head of one element."""
    import torch

    from quire.worker.store import Store

    layers = tuple(LayerSpec(1, 1, group.window) for group in kv_config.groups)
    spec = ModelSpec("none", layers, 1, 1, 1, 1, 1, 1)
    return Store(kv_config, spec, torch.float16, torch.device("cpu"))


def replay(log: PlanLog) -> PlanReplayer:
    """Replay a whole log. Raise LogError with the step and byte of the first inconsistency."""
    try:
        replayer = PlanReplayer(log.kv_config)
    except (MemoryError, ValueError, RuntimeError, AssertionError) as error:
        raise log.error(0, f"its geometry can't be replayed here: {error}") from error
    step = None
    try:
        for step in log:
            replayer.step(step.plan, step.result)
        replayer.digest()
    except (ReplayError, AssertionError) as error:  # Store raises AssertionError
        number, at = (step.number, step.offset) if step is not None else (0, 0)
        raise log.error(at, f"step {number}, {error}") from error
    return replayer


def summarize(log: PlanLog, replayer: PlanReplayer) -> list[str]:
    """Describe the content of a log, in lines."""
    kv_config, counts = log.kv_config, replayer.counts
    open_steps = counts["steps"] - counts["collected"]
    kinds = ", ".join(f"{kind.__name__} {replayer.op_counts[kind.__name__]:,}" for kind in PAGE_OPS_SHOWN)
    return [
        f"memory     {kv_config.bytes:,} bytes, {kv_config.slots} slots, {len(kv_config.groups)} groups of layers; "
        f"vocabulary {log.vocab_size:,}",
        f"steps      {counts['steps']:,}" + (f", {open_steps} of them without a result" if open_steps else ""),
        f"slices     {counts['slices']:,}, of {counts['tokens']:,} tokens",
        f"new slots  {counts['new_slots']:,}, {counts['forks']:,} of them inherit",
        f"page ops   {kinds}",
        f"tables     sha256 {replayer.digest()}, found by two replayers",
    ]


def first_difference(a: PlanLog, b: PlanLog) -> str | None:
    """Return the first step and field in which two logs differ, or None. Times of steps are ignored. Raise LogError if
    their geometries differ."""
    if (a.kv_config, a.vocab_size) != (b.kv_config, b.vocab_size):
        names = ["vocab_size", *iter_differences(a.kv_config, b.kv_config, "geometry")]
        name = names[0] if a.vocab_size != b.vocab_size else names[1]
        raise b.error(0, f"it is of another geometry than {a.path}: {name}")
    for step_a, step_b in zip_longest(a, b):
        if step_a is None or step_b is None:
            longer, step = (a, step_a) if step_b is None else (b, step_b)
            return f"step {step.number}: only {longer.path} has it"
        for difference in _step_differences(step_a, step_b):
            return f"step {step_a.number}: {difference}"
    return None


def _step_differences(a: LoggedStep, b: LoggedStep) -> Iterator[str]:
    yield from iter_differences(a.plan, b.plan, "plan")
    if a.result is None or b.result is None:
        if a.result is not b.result:
            yield f"only one of them has a result{': the second' if a.result is None else ': the first'}"
        return
    yield from iter_differences(a.result.slice_results, b.result.slice_results, "result.slice_results")


def iter_differences(a: Any, b: Any, name: str) -> Iterator[str]:
    """Yield the differences of two messages, or parts of them: the field's name and both values."""
    if type(a) is not type(b):
        yield f"{name} is {_short_repr(a)} and {_short_repr(b)}"
    elif hasattr(a, "_fields"):
        for field in a._fields:
            yield from iter_differences(getattr(a, field), getattr(b, field), f"{name}.{field}")
    elif hasattr(a, "__dataclass_fields__"):
        for field in a.__dataclass_fields__:
            yield from iter_differences(getattr(a, field), getattr(b, field), f"{name}.{field}")
    elif isinstance(a, tuple):
        for i, (one, other) in enumerate(zip(a, b)):
            yield from iter_differences(one, other, f"{name}[{i}]")
        if len(a) != len(b):
            yield f"{name} has {len(a)} and {len(b)} of them"
    elif a != b and not (a != a and b != b):  # NaN is NaN
        yield f"{name} is {_short_repr(a)} and {_short_repr(b)}"


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def compare_files(path: Path, against: Path) -> str | None:
    """Return the `first_difference` of the logs in two files."""
    with PlanLog(path) as a, PlanLog(against) as b:
        return first_difference(a, b)
