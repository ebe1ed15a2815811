"""Replaying a log of plans without its model, and comparing two logs.

Births and journal go through two data planes that share no code: EchoRunner's, which is NumPy's, and the Store of real
models, in torch on a CPU, with pages of a few bytes. After each step their page tables must be the same, and every row
must find real pages wherever it reads and writes. Tokens mean nothing here, so logs of any model can be replayed.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from quire.plan_log import PlanLog, Step
from quire.sim.echo import EchoRunner
from quire.vocabulary.media import Medium
from quire.vocabulary.plan import LAST, Copy, Encode, Entry, In, Out, Poison, Row, StepPlan, StepResult, Table
from quire.vocabulary.specs import Geometry, LayerSpec, ModelSpec

ITEM = 2  # bytes of a number in the replayed pages, and of a token's key and value
TOKEN = 2 * ITEM
KINDS_SAID = (Table, Copy, Out, In, Poison, Encode)
KINDS = ("full", "window", "chunked")  # of groups whose pages lie at the positions of their tokens


class Fault(ValueError):
    """What doesn't hold together in a step; it says where."""


class Replay:
    """Two replayers of one geometry, and what they were given. `step` raises Fault at the first thing that is wrong."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        tiny = _tiny(geometry)
        self.echo = EchoRunner()
        self.echo.bind(tiny)
        self.store = _store(tiny)
        self.media: dict[int, tuple[Medium, ...]] = {}
        self.counts: Counter[str] = Counter()
        self.entries: Counter[str] = Counter()

    def step(self, plan: StepPlan, result: StepResult | None) -> None:
        """Replay a step, and check what can be."""
        for i, birth in enumerate(plan.births):
            self._slot(birth.slot, f"births[{i}]")
            if birth.parent not in self.echo.slots and (birth.parent >= 0 or birth.sampling is None):
                raise Fault(f"births[{i}]: slot {birth.slot} inherits from slot {birth.parent}, which was never born")
            self.echo.birth(birth)
            self.media[birth.slot] = birth.media
        self._replay(plan.journal, "journal")
        for i, row in enumerate(plan.rows):
            self._row(row, f"rows[{i}]")
        self._replay(plan.ahead, "ahead")
        self._compare({entry.slot for entry in (*plan.journal, *plan.ahead) if type(entry) is Table})
        if result is not None:
            self._result(plan, result)
        self.counts.update(
            steps=1, rows=len(plan.rows), births=len(plan.births), forks=sum(b.parent >= 0 for b in plan.births),
            tokens=sum(len(row.tokens) for row in plan.rows), collected=result is not None,
        )  # fmt: skip

    def _slot(self, slot: int, where: str) -> None:
        if not 0 < slot < self.geometry.slots:
            raise Fault(f"{where}: slot {slot} is none of the {self.geometry.slots}, or the scratch one")

    def _replay(self, journal: tuple[Entry, ...], name: str) -> None:
        for i, entry in enumerate(journal):
            self._sound(entry, f"{name}[{i}]")
            if not isinstance(entry, Encode):
                self.echo.replay(entry)
        self.store.replay(tuple(entry for entry in journal if not isinstance(entry, Encode)))
        self.entries.update(type(entry).__name__ for entry in journal)

    def _sound(self, entry: Entry, where: str) -> None:
        """Its slots, places and pages are those of the geometry."""
        if isinstance(entry, Encode):
            self._encoded(entry, where)
            return
        if not 0 <= entry.group < len(self.geometry.groups):
            raise Fault(f"{where}: there is no group {entry.group}")
        group = self.geometry.groups[entry.group]
        pages: Iterable[int] = ()
        hosts: Iterable[int] = ()
        if isinstance(entry, Table):
            self._slot(entry.slot, where)
            if entry.at < 0 or entry.at + len(entry.pages) > group.table_width:
                raise Fault(f"{where}: places {entry.at} on for {len(entry.pages)} pages, of {group.table_width}")
            pages = filter(None, entry.pages)
        elif isinstance(entry, Copy):
            pages = entry.src, entry.dst
        elif isinstance(entry, Out | In):
            pages, hosts = (entry.page,), (entry.host,)
        elif isinstance(entry, Poison):
            pages = (entry.page,)
        for page in pages:
            if page not in group.ids:
                raise Fault(f"{where}: page {page} is none of group {entry.group}")
        for host in hosts:
            if host not in group.host_ids:
                raise Fault(f"{where}: host page {host} is none of group {entry.group}")

    def _encoded(self, entry: Encode, where: str) -> None:
        """The slot has that picture, of so many parts, and the group a place for it."""
        self._slot(entry.slot, where)
        media = self.media.get(entry.slot, ())
        if not 0 <= entry.medium < len(media):
            raise Fault(f"{where}: slot {entry.slot} has {len(media)} pictures, and not picture {entry.medium}")
        if not 0 <= entry.first < entry.first + entry.parts <= media[entry.medium].parts:
            raise Fault(f"{where}: {entry.parts} parts from part {entry.first} on, of {media[entry.medium].parts}")
        if not -1 <= entry.group < len(self.geometry.groups):
            raise Fault(f"{where}: there is no group {entry.group}")
        if entry.group >= 0 and not 0 <= entry.at < self.geometry.groups[entry.group].table_width:
            raise Fault(f"{where}: place {entry.at}, of {self.geometry.groups[entry.group].table_width}")

    def _row(self, row: Row, where: str) -> None:
        """Its slot is born, and has real pages for all that the row reads and writes."""
        self._slot(row.slot, where)
        if row.slot not in self.echo.slots:
            raise Fault(f"{where}: slot {row.slot} was never born")
        if row.start < 0 or not row.tokens or row.sample < 0 or min(row.tokens) < LAST:
            raise Fault(f"{where}: {len(row.tokens)} tokens from position {row.start} on, {row.sample} samples")
        end = row.start + len(row.tokens) + len(row.draft)
        for g, group in enumerate(self.geometry.groups):
            if group.kind not in KINDS:
                continue
            first, last = group.whole(group.oldest(row.start)), group.pages(end)
            held = self.echo.groups[g].table[row.slot, first:last]
            if last > group.table_width or not held.all():
                raise Fault(f"{where}: slot {row.slot} has no real page for some position below {end} in group {g}")

    def _compare(self, slots: set[int]) -> None:
        """Both replayers' tables are the same for these slots."""
        for g, table in enumerate(group.table for group in self.echo.groups):
            for slot in slots:
                found = self.store.host_tables[g][slot][: table.shape[1]]
                if not np.array_equal(table[slot], found):
                    place = int(np.flatnonzero(table[slot] != found)[0])
                    raise Fault(f"place {place} of slot {slot} in group {g} is one page here and another one there")

    def _result(self, plan: StepPlan, result: StepResult) -> None:
        if len(result.samples) != len(plan.rows):
            raise Fault(f"{len(result.samples)} samples for {len(plan.rows)} rows")
        for i, (row, sampled) in enumerate(zip(plan.rows, result.samples)):
            if not row.draft and len(sampled.tokens) != row.sample:
                raise Fault(f"samples[{i}]: {len(sampled.tokens)} tokens, and {row.sample} were to be drawn")

    def digest(self) -> str:
        """Of all tables, once both replayers have the same; Fault if they don't."""
        self._compare(set(range(self.geometry.slots)))
        digest = hashlib.sha256()
        for group in self.echo.groups:
            for row in group.table:
                digest.update(row.astype("<i8").tobytes())
        return digest.hexdigest()


def _tiny(geometry: Geometry) -> Geometry:
    """The same tables and page ids, and as few bytes in a page as there can be: one token; where pages are parts of
    large ones, so many that they still are."""
    ratios = [max(geometry.large_bytes // group.page_bytes, 1) for group in geometry.groups]
    whole = math.lcm(*ratios) * TOKEN if geometry.large_bytes else TOKEN
    alike = {"token_bytes": TOKEN, "run_tokens": 1, "run_pages": 1, "kind": "full"}
    groups = tuple(
        replace(group, layers=(g,), page_bytes=whole // ratio, **alike)
        for g, (group, ratio) in enumerate(zip(geometry.groups, ratios))
    )
    return replace(
        geometry, groups=groups, bytes=max(group.ids.stop * group.page_bytes for group in groups), large_bytes=0,
        host_bytes=max(group.host_ids.stop * group.page_bytes for group in groups), itemsize=ITEM, sight="",
    )  # fmt: skip


def _store(geometry: Geometry) -> Any:
    """The Store of real models, for layers of one head of one number."""
    import torch

    from quire.data.runner.store import Store

    layers = tuple(LayerSpec(1, 1, group.window) for group in geometry.groups)
    spec = ModelSpec("none", layers, 1, 1, 1, 1, 1, 1)
    return Store(geometry, spec, torch.float16, torch.device("cpu"))


def replay(log: PlanLog) -> Replay:
    """Replay a whole log. LogError names the step and the byte where it doesn't hold together."""
    try:
        done = Replay(log.geometry)
    except (MemoryError, ValueError, RuntimeError, AssertionError) as error:
        raise log.error(0, f"its geometry can't be replayed here: {error}") from error
    step = None
    try:
        for step in log:
            done.step(step.plan, step.result)
        done.digest()
    except (Fault, AssertionError) as error:  # a replayer asserts what it needs
        number, at = (step.number, step.at) if step is not None else (0, 0)
        raise log.error(at, f"step {number}, {error}") from error
    return done


def summary(log: PlanLog, done: Replay) -> list[str]:
    """What a log holds, in lines."""
    geometry, counts = log.geometry, done.counts
    open_steps = counts["steps"] - counts["collected"]
    kinds = ", ".join(f"{kind.__name__} {done.entries[kind.__name__]:,}" for kind in KINDS_SAID)
    return [
        f"memory   {geometry.bytes:,} bytes, {geometry.slots} slots, {len(geometry.groups)} groups of layers; "
        f"vocabulary {log.vocab_size:,}",
        f"steps    {counts['steps']:,}" + (f", {open_steps} of them without a result" if open_steps else ""),
        f"rows     {counts['rows']:,}, of {counts['tokens']:,} tokens",
        f"births   {counts['births']:,}, {counts['forks']:,} of them inherit",
        f"journal  {kinds}",
        f"tables   sha256 {done.digest()}, found by two replayers",
    ]


def difference(a: PlanLog, b: PlanLog) -> str | None:
    """The first step and field in which two logs differ, or None. How long steps took doesn't count. LogError if they
    are of different memories."""
    if (a.geometry, a.vocab_size) != (b.geometry, b.vocab_size):
        names = ["vocab_size", *differing(a.geometry, b.geometry, "geometry")]
        name = names[0] if a.vocab_size != b.vocab_size else names[1]
        raise b.error(0, f"it is of another geometry than {a.path}: {name}")
    for mine, other in zip_longest(a, b):
        if mine is None or other is None:
            longer, step = (a, mine) if other is None else (b, other)
            return f"step {step.number}: only {longer.path} has it"
        for what in _step_differs(mine, other):
            return f"step {mine.number}: {what}"
    return None


def _step_differs(a: Step, b: Step) -> Iterator[str]:
    yield from differing(a.plan, b.plan, "plan")
    if a.result is None or b.result is None:
        if a.result is not b.result:
            yield f"only one of them has a result{': the second' if a.result is None else ': the first'}"
        return
    yield from differing(a.result.samples, b.result.samples, "result.samples")


def differing(a: Any, b: Any, name: str) -> Iterator[str]:
    """Where two messages, or parts of them, differ: the field's name and both values."""
    if type(a) is not type(b):
        yield f"{name} is {_short(a)} and {_short(b)}"
    elif hasattr(a, "_fields"):
        for field in a._fields:
            yield from differing(getattr(a, field), getattr(b, field), f"{name}.{field}")
    elif isinstance(a, Geometry) or hasattr(a, "__dataclass_fields__"):
        for field in a.__dataclass_fields__:
            yield from differing(getattr(a, field), getattr(b, field), f"{name}.{field}")
    elif isinstance(a, tuple):
        for i, (one, other) in enumerate(zip(a, b)):
            yield from differing(one, other, f"{name}[{i}]")
        if len(a) != len(b):
            yield f"{name} has {len(a)} and {len(b)} of them"
    elif a != b and not (a != a and b != b):  # NaN is NaN
        yield f"{name} is {_short(a)} and {_short(b)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def compare(path: Path, against: Path) -> str | None:
    """`difference` of the logs in two files."""
    with PlanLog(path) as a, PlanLog(against) as b:
        return difference(a, b)
