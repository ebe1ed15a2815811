"""How a memory is cut into pages: which layers share page tables, how large their pages are, and how many there are."""

from __future__ import annotations

import math
from typing import NamedTuple

from quire.config import EngineConfig
from quire.vocabulary.specs import Geometry, Group, LayerSpec, Layout, ModelSpec, lay_out


class Size(NamedTuple):
    """How large a memory is to be: `tokens` of capacity, for sequences of up to `max_len` tokens."""

    tokens: int
    max_len: int
    itemsize: int


class Sheet(NamedTuple):
    """The pages of some layers: `token_bytes` are those of a token of all of them."""

    layers: tuple[int, ...]
    token_bytes: int
    page_bytes: int


def page_layout(config: EngineConfig, spec: ModelSpec, itemsize: int) -> list[Sheet]:
    """The pages of each group. A token takes a place in a page of each group. Where `config.page_sizes` is "one", all
    have the size of the largest, so that any page may be given to any group: smaller ones are padded, to a whole number
    of every group's head rows."""
    sets: list[tuple[int, ...]]
    if config.table_scope == "layer":
        sets = [(i,) for i in range(len(spec.layers))]
    else:
        kept = [layer.kept for layer in spec.layers]
        sets = [tuple(i for i, other in enumerate(kept) if other == kind) for kind in dict.fromkeys(kept)]
    tokens = [sum(spec.layers[i].token_bytes(itemsize) for i in layers) for layers in sets]
    sizes = [config.page_size * size for size in tokens]
    if config.page_sizes == "one":
        row = math.lcm(*(spec.layers[layers[0]].head_dim * config.page_size * itemsize for layers in sets))
        sizes = [-(-max(sizes) // row) * row] * len(sets)
    return list(map(Sheet, sets, tokens, sizes))


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
    """The pages for `size.tokens` tokens in every layer."""
    count, width = -(-size.tokens // config.page_size), -(-size.max_len // config.page_size)
    shares = [
        Share(sheet.layers, sheet.page_bytes, sheet.token_bytes, count, width, config.page_size)
        for sheet in page_layout(config, spec, size.itemsize)
    ]
    return shared_out(shares, config, spec, size, layout)


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
    groups = tuple(
        Group(
            share.layers, share.page_bytes, share.token_bytes, share.table_width, own[share.page_bytes],
            own_host[share.page_bytes], share.run_tokens, share.run_pages, layer.window, kind_of(layer), share.parts,
            layer.budget,
        )
        for share in shares
        for layer in [spec.layers[share.layers[0]]]
    )  # fmt: skip
    return Geometry(
        layout, end, config.max_num_seqs + 1, groups, size.itemsize, host_end,
        budget=spec.least_budget, queries=spec.selection.queries,
    )  # fmt: skip


def kind_of(layer: LayerSpec) -> str:
    """The kind of a group of such layers."""
    if layer.budget is not None:
        return "budget"
    return "full" if layer.window is None else "window"
