"""How a memory is cut into pages: which layers share page tables, how large their pages are, and how many there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from quire.config import IN_PAGES, EngineConfig
from quire.control.memory.demands import check_eyes, check_rounded, check_states
from quire.control.memory.pages import WATERMARK
from quire.control.memory.sizes import ALIGNED, LayerType, equal_sets, large_limit, max_page, plan_pages
from quire.errors import StartupError
from quire.vocabulary.specs import Geometry, Group, Layout, ModelSpec, VisionSpec, lay_out

ANOTHER = "Use --page-sizes max, or another --page-size"


class Size(NamedTuple):
    """How large a memory is to be: `tokens` of capacity in every layer, for sequences of up to `max_len` tokens. Where
    all layers have all of the memory in common it has `bytes`, if they are given: what some don't use others may."""

    tokens: int
    max_len: int
    itemsize: int
    bytes: int = 0


class Sheet(NamedTuple):
    """The pages of some layers: `run_tokens` tokens fill one, `token_bytes` each; or a state of `token_bytes` bytes is
    one, after the latest of so many tokens. There are `fixed` of them, or 0: as many as tokens need."""

    layers: tuple[int, ...]
    token_bytes: int
    page_bytes: int
    run_tokens: int
    is_state: bool = False
    fixed: int = 0

    def pages(self, tokens: int, seqs: int = 0) -> int:
        """Pages for so many tokens, with a state for each of `seqs` sequences."""
        return self.fixed or max(-(-tokens // self.run_tokens), seqs if self.is_state else 0)


class Sheets(NamedTuple):
    """The pages of each group, of which a token takes a place in one of each; and the bytes of the large pages that all
    of them are parts of, or 0 where there are none."""

    pages: tuple[Sheet, ...]
    large_bytes: int = 0

    @property
    def ratios(self) -> list[int]:
        """Pages of a large one, a group."""
        return [self.large_bytes // sheet.page_bytes for sheet in self.pages]

    @property
    def step(self) -> int:
        """Tokens of the smallest run: a memory is for a multiple of so many."""
        return min(sheet.run_tokens for sheet in self.pages)

    @property
    def token_bytes(self) -> int:
        """Bytes of pages that a token takes, what pads them included. States are none of any token's, unless there is
        nothing else: then a token has its part of one."""
        sheets = [sheet for sheet in self.pages if not sheet.is_state] or self.pages
        return -(-sum(sheet.page_bytes * self.step // sheet.run_tokens for sheet in sheets) // self.step)

    def bytes(self, tokens: int, seqs: int = 0) -> int:
        """Bytes of a memory that holds so many tokens in every group, and states of so many sequences."""
        counts = [sheet.pages(tokens, seqs) for sheet in self.pages]
        if self.large_bytes:
            return sum(-(-count // ratio) for count, ratio in zip(counts, self.ratios)) * self.large_bytes
        return sum(count * sheet.page_bytes for count, sheet in zip(counts, self.pages))

    def most(self, pool: int) -> int:
        """The most tokens that every group holds at once in so many bytes: whole steps."""
        pool -= sum(sheet.fixed * sheet.page_bytes for sheet in self.pages)
        cost = sum(Fraction(sheet.page_bytes, sheet.run_tokens) for sheet in self.pages if not sheet.fixed)
        if not cost:
            return min(sheet.fixed * sheet.run_tokens for sheet in self.pages) if pool >= 0 else 0
        most, fixed = int(pool / cost) // self.step, self.bytes(0)
        while most > 0 and self.bytes(most * self.step) - fixed > pool:
            most -= 1
        return max(most, 0) * self.step


def uniform(spec: ModelSpec) -> ModelSpec:
    """The model as PagedAttention has it, of vLLM 0.6.3: every layer keeps every token. What layers look at stays what
    it is: the runner knows."""
    layers = (replace(one, window=None, chunk=None, budget=None, policy=None) for one in spec.layers)
    return replace(spec, layers=tuple(layers))


def page_layout(config: EngineConfig, spec: ModelSpec, itemsize: int, pool: int = 0) -> Sheets:
    """The pages of a memory of `pool` bytes, as `config.page_sizes` says. StartupError if layers can't be cut so, or if
    large pages were larger than the pool can have them."""
    [sheets] = joint_layout([(config, spec, itemsize)], pool)
    return sheets


def joint_layout(models: Sequence[tuple[EngineConfig, ModelSpec, int]], pool: int = 0) -> list[Sheets]:
    """The same for models that have the pool in common: (config, spec, itemsize) each. Pages are cut as the first one's
    config says."""
    config = models[0][0]
    parts = [layer_sets(*model) for model in models]
    types = [
        [LayerType(str(layers[:1]), _page_bytes(*model, layers), _row(*model, layers)) for layers in sets]
        for model, sets in zip(models, parts)
    ]
    every = [kind for own in types for kind in own]
    sizes, large = [-(-kind.page_bytes // kind.row) * kind.row for kind in every], 0
    if config.memory == "uniform":
        sizes = [
            size for model, sets, own in zip(models, parts, types) for size in _in_every_layer(model[1], sets, own)
        ]
    elif config.page_sizes == "max" or config.memory not in IN_PAGES:
        sizes = [max_page(every)] * len(every)
    elif config.page_sizes == "lcm" and len(set(sizes)) > 1:
        sizes, large = _large(every, large_limit(pool))
    left = iter(sizes)
    return [
        Sheets(tuple(_sheet(*model, layers, next(left)) for layers in sets), large)
        for model, sets in zip(models, parts)
    ]


def check_large(sheets: Sheets, pool: int) -> None:
    """StartupError if there are fewer large pages in so many bytes than groups, each of which needs one."""
    large, groups = sheets.large_bytes, len(sheets.pages)
    if large and pool // large < groups:
        least = plan_pages([LayerType("", sheet.page_bytes) for sheet in sheets.pages], 0).large_bytes
        padded = f" ({least:,} if pages were padded by at most 3 %)" if least < large else ""
        raise StartupError(
            f"a large page has {large:,} bytes{padded}, and {pool:,} bytes of KV memory are {pool // large} of them; "
            f"each of {groups} groups of layers needs one",
            f"{ANOTHER}, or a larger --kv-gib",
        )


def tokens_in(config: EngineConfig, spec: ModelSpec, itemsize: int, pool: int) -> int:
    """Tokens that a memory of so many bytes holds in every layer."""
    sheets = page_layout(config, spec, itemsize, pool)
    if not spec.stateful and (len(sheets.pages) == 1 or config.memory == "virtual"):
        return pool // spec.token_bytes(itemsize)
    return sheets.most(pool)


def layer_sets(config: EngineConfig, spec: ModelSpec, itemsize: int) -> list[tuple[int, ...]]:
    """The layers of each group: those that share page tables."""
    owners = spec.owners  # a layer that shares another's keys and values keeps none
    if spec.stateful:
        check_states(config, spec)
    rows: list[tuple[int, ...]] = [()] if keeps_rows(config, spec) else []  # pages of no layer
    if spec.vision is not None:
        check_eyes(config, spec, itemsize)
    if any(layer.rounded for layer in spec.layers):
        check_rounded(config, spec)
    if config.memory == "uniform":
        of = {i: (bool(spec.layers[i].state), spec.layers[i].cross) for i in owners}
        kinds = [tuple(i for i in owners if of[i] == kind) for kind in ((False, False), (False, True), (True, False))]
        return [layers for layers in kinds if layers] + rows
    if config.table_scope == "layer":
        return [(i,) for i in owners] + rows
    kept = {i: spec.layers[i].kept for i in owners}
    sets = [tuple(i for i in owners if kept[i] == kind) for kind in dict.fromkeys(kept.values())]
    if config.page_sizes == "gcd" and len(sets) > 1:
        sizes = [(len(layers), spec.layers[layers[0]].token_bytes(itemsize)) for layers in sets]
        counts = equal_sets(sizes)
        if counts is None:
            shown = ", ".join(f"{many} of {size:,} bytes a token" for many, size in sizes)
            raise StartupError(f"--page-sizes is gcd, and no sets of layers have equal bytes: {shown}"[:400], ANOTHER)
        return [layers[at : at + n] for layers, n in zip(sets, counts) for at in range(0, len(layers), n)]
    return sets + rows


def keeps_rows(config: EngineConfig, spec: ModelSpec) -> bool:
    """Whether rows that take the places of a picture's tokens have pages of their own."""
    return spec.takes_places and config.vision_cache == "pages"


def _is_state(spec: ModelSpec, layers: Sequence[int]) -> bool:
    return bool(layers) and bool(spec.layers[layers[0]].state)


def _in_every_layer(spec: ModelSpec, sets: Sequence[tuple[int, ...]], types: Sequence[LayerType]) -> list[int]:
    """The sizes of uniform pages: states are apart, and whatever else has a place, a picture's rows too, has one in
    every layer (so Llama 3.2 Vision wastes 79.6 % in vLLM 0.6.3: Jenga §3.2)."""
    whole = sum(kind.page_bytes for layers, kind in zip(sets, types) if layers and not _is_state(spec, layers))
    return [kind.page_bytes if _is_state(spec, layers) else whole for layers, kind in zip(sets, types)]


def _page_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int, layers: Sequence[int]) -> int:
    """Bytes of the tokens of these layers in a page; of their states, one after another."""
    if not layers:
        assert spec.vision is not None, "pages of no layer hold rows of pictures"
        return config.page_size * spec.vision.width * itemsize
    size = config.page_size * sum(spec.layers[i].token_bytes(itemsize) for i in layers)
    return size + sum(spec.layers[i].state_bytes for i in layers)


def _row(config: EngineConfig, spec: ModelSpec, itemsize: int, layers: Sequence[int]) -> int:
    """Bytes of a head's tokens in a page: pages are a whole number of them."""
    if not layers or spec.layers[layers[0]].state:
        return ALIGNED
    return math.lcm(*(spec.layers[i].cell_bytes(itemsize) * config.page_size for i in layers))


def _sheet(config: EngineConfig, spec: ModelSpec, itemsize: int, layers: tuple[int, ...], page_bytes: int) -> Sheet:
    held = _page_bytes(config, spec, itemsize, layers)
    if not _is_state(spec, layers):
        return Sheet(layers, held // config.page_size, page_bytes, config.page_size)
    # Uniform pages leave each sequence a state for good, which is apart from them (vLLM 0.6.3).
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    fixed = config.max_num_seqs + config.max_num_seqs // WATERMARK + 1 if config.memory == "uniform" else 0
    return Sheet(layers, held, page_bytes, state_run(config, spec), True, fixed)


def state_run(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens behind each of which there is a state: where none is ever found again a sequence has one alone."""
    if config.memory != "uniform" and (config.enable_prefix_caching or config.prefix_tokens):
        return config.state_tokens
    return -(-(config.max_model_len or spec.max_len) // config.page_size) * config.page_size


def _large(types: Sequence[LayerType], limit: int) -> tuple[list[int], int]:
    """The sizes of the types' pages, and that of the large ones; 0 where padding made them equal."""
    plan = plan_pages(types, limit)
    if plan.large_bytes > limit:
        exact = plan_pages(types, None).large_bytes
        raise StartupError(
            f"a large page would have {exact:,} bytes ({plan.large_bytes:,} with pages that are padded by at most 3 %) "
            f"for pages of {', '.join(f'{kind.page_bytes:,}' for kind in types)}"[:400]
            + f"; at most {limit:,}",
            f"{ANOTHER}, or a larger --kv-gib",
        )
    return list(plan.sizes), 0 if len(set(plan.sizes)) == 1 else plan.large_bytes


class Share(NamedTuple):
    """What a group of layers has of a memory: `many` pages, which other groups with pages of that size have too. The
    rest is as in Group."""

    layers: tuple[int, ...]
    page_bytes: int
    token_bytes: int
    many: int
    table_width: int
    run_tokens: int
    run_pages: int = 1
    parts: int = 1


def geometry_of(config: EngineConfig, spec: ModelSpec, size: Size, layout: Layout = Layout.PAGED) -> Geometry:
    """The pages for `size.tokens` tokens in every layer, or those in `size.bytes`."""
    pool = size.bytes or size.tokens * spec.token_bytes(size.itemsize)
    sheets = page_layout(config, spec, size.itemsize, pool)
    kept = uniform(spec) if config.memory == "uniform" else spec
    shares = _shares(sheets, config, size)
    if sheets.large_bytes:
        found = _in_large_pages(shares, sheets, config, kept, size)
    else:
        found = shared_out(shares, config, kept, size, layout)
    least, groups = spec.least_budget, found.groups
    if least and config.memory == "uniform":
        groups = tuple(replace(group, kind="uniform", budget=least) for group in groups)
    found = replace(found, groups=groups, budget=least, queries=spec.selection.queries if least else 0)
    return found if spec.vision is None else _with_eyes(found, config, spec, spec.vision)


def _with_eyes(found: Geometry, config: EngineConfig, spec: ModelSpec, vision: VisionSpec) -> Geometry:
    """The same for pictures: tables have places for as many as a request may have."""
    rows = vision.width * found.itemsize
    found = replace(
        found, sight=config.vision_cache if spec.takes_places else "", row_bytes=rows if spec.takes_places else 0,
        part_tokens=vision.part_tokens, part_rows=vision.part_rows, most_rows=vision.most_rows,
        both_ways=vision.both_ways,
    )  # fmt: skip
    widths = [group.table_width for group in found.groups]
    for g, group in enumerate(found.groups):
        if group.kind in ("cross", "vision"):
            widths[g] = max(config.max_images, 1) * group.pages(vision.most_rows)
    if found.sight == "inside":
        widths[found.host] += 1
    return replace(found, groups=tuple(replace(group, table_width=width) for group, width in zip(found.groups, widths)))


def _shares(sheets: Sheets, config: EngineConfig, size: Size) -> list[Share]:
    seqs = states_of(config, size.tokens)
    if size.bytes and sheets.bytes(size.tokens, seqs) > size.bytes:
        seqs = 0
    return [
        Share(
            sheet.layers, sheet.page_bytes, sheet.token_bytes, sheet.pages(size.tokens, seqs),
            -(-size.max_len // sheet.run_tokens), sheet.run_tokens,
        )
        for sheet in sheets.pages
    ]  # fmt: skip


def states_of(config: EngineConfig, tokens: int) -> int:
    """Sequences that are to have a state each, in a memory that is sized by its tokens: all of them, or as many as have
    a page of tokens."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    return min(config.max_num_seqs, -(-tokens // config.page_size))


def _in_large_pages(
    shares: Sequence[Share], sheets: Sheets, config: EngineConfig, spec: ModelSpec, size: Size
) -> Geometry:
    """All groups' pages in large pages, behind a scratch one (Jenga §4.1)."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    large = sheets.large_bytes
    count = (size.bytes or sheets.bytes(size.tokens, states_of(config, size.tokens))) // large
    check_large(sheets, count * large)
    hosts = min(int(config.swap_gib * 2**30) // large, count)
    groups = tuple(
        _group(share, spec, range(ratio, (count + 1) * ratio), range(1, hosts * ratio + 1))
        for share, ratio in zip(shares, sheets.ratios)
    )
    slots = config.max_num_seqs + 1
    return Geometry(Layout.PAGED, (count + 1) * large, slots, groups, size.itemsize, hosts * large, large)


def _group(share: Share, spec: ModelSpec, ids: range, host_ids: range) -> Group:
    if not share.layers:
        return Group(
            (), share.page_bytes, share.token_bytes, share.table_width, ids, host_ids, share.run_tokens, kind="vision"
        )
    first = spec.layers[share.layers[0]]
    return Group(
        share.layers, share.page_bytes, share.token_bytes, share.table_width, ids, host_ids, share.run_tokens,
        share.run_pages, first.window, first.kind, share.parts, first.chunk, first.budget,
    )  # fmt: skip


def shared_out(shares: list[Share], config: EngineConfig, spec: ModelSpec, size: Size, layout: Layout) -> Geometry:
    """Where these pages lie. Page ids begin behind the scratch page, which every group sees as its page 0; groups with
    pages of one size have them in common. Host pages are as many as `config.swap_gib` holds, in the same proportions,
    and never more than the device has (PagedAttention §4.5)."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    counts: dict[int, int] = {}  # page bytes -> pages; small ones first, so that ids are small numbers
    for share in sorted(shares, key=lambda share: share.page_bytes):
        counts[share.page_bytes] = counts.get(share.page_bytes, 0) + share.many
    ids, end = lay_out(list(counts.items()), max(counts))
    swap, whole = int(config.swap_gib * 2**30), sum(page_bytes * count for page_bytes, count in counts.items())
    hosts = [(page_bytes, min(swap * count // whole, count)) for page_bytes, count in counts.items()]
    host_rows, host_end = lay_out(hosts, 0)
    own = dict(zip(counts, ids))
    own_host = {page_bytes: range(rows.start + 1, rows.stop + 1) for page_bytes, rows in zip(counts, host_rows)}
    groups = tuple(_group(share, spec, own[share.page_bytes], own_host[share.page_bytes]) for share in shares)
    return Geometry(layout, end, config.max_num_seqs + 1, groups, size.itemsize, host_end)


def joint_geometries(models: Sequence[tuple[EngineConfig, ModelSpec, Size]], pool: int) -> list[Geometry]:
    """Geometries of models that have all of one buffer of `pool` bytes in common (Jenga §8), and host memory each of
    its own. Their pages are parts of the same large pages, or all of one size: then those are the large pages."""
    cut = joint_layout([(config, spec, size.itemsize) for config, spec, size in models], pool)
    sheets = tuple(sheet for one in cut for sheet in one.pages)
    large = cut[0].large_bytes or sheets[0].page_bytes
    check_large(Sheets(sheets, large), pool)
    made = []
    for one, (config, spec, size) in zip(cut, models):
        one, size = one._replace(large_bytes=large), size._replace(bytes=pool)
        geometry = _in_large_pages(_shares(one, config, size), one, config, spec, size)
        geometry = replace(geometry, large_bytes=cut[0].large_bytes)
        made.append(geometry if spec.vision is None else _with_eyes(geometry, config, spec, spec.vision))
    return made
