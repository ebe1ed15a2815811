"""Run the worked examples of Jenga's figures with the real page pool, memory and interface for layer types."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from papers.figure_12 import figure_12
from papers.unlike_serving import Run, simulations
from quire.jenga import Evictor, LayerSupportsPrefixCache, Request, access, longest_prefix, policy_of
from quire.memory.jenga.page_sizes import LayerType, plan_pages
from quire.memory.jenga.two_level_pool import ASSOCIATIONS, TwoLevelPagePool
from quire.memory.paged import PagedMemory
from quire.memory.policies import POLICIES
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sequence import Sequence as Seq

Points = list[dict[str, Any]]


def windowed_memory(pages: int, page_tokens: int, window: int, step_tokens: int, **settings: Any) -> PagedMemory:
    """Return a memory of one layer of self attention and one with a window, which share all pages."""
    size, ids = 16 * page_tokens, range(1, pages + 1)
    groups = tuple(
        KVCacheGroup((i,), size, 16, 64, ids, run_tokens=page_tokens, window=reach, kind=kind)
        for i, (kind, reach) in enumerate((("full", None), ("window", window)))
    )
    geometry = KVCacheConfig(KVCacheLayout.PAGED, (pages + 1) * size, 4, groups, 2)
    return PagedMemory(geometry, max_step_tokens=step_tokens, **settings)


def compute(memory: PagedMemory, seq: Seq) -> int:
    """Compute a prompt in chunks. Return the tokens found in the cache."""
    admitted = memory.admit([seq], memory.max_step_tokens)
    assert isinstance(admitted, list), "there is room for a prompt"
    seq.computed = seq.planned = admitted[0].reused_tokens
    while seq.computed < len(seq.tokens):
        length = min(seq.computed + memory.max_step_tokens, len(seq.tokens))
        assert memory.grow(seq, length), "there is room for its next tokens"
        seq.computed = seq.planned = length
        memory.commit(seq)
    memory.take_page_ops()
    return admitted[0].reused_tokens


# Eviction


def eviction(orders: Mapping[str, Mapping[str, Any]], length: int, runs: Sequence[Run]) -> Points:
    """Evict by each of the orders, settings of a page pool. In example "a" two texts of `length` tokens are read, then
    a third; in "b" one, then a part of a second. Points say how many tokens of each earlier text another request finds;
    those of the simulations `runs` follow."""
    points: Points = []
    for example, pages, window, order in (
        ("a", 78, 4, "balanced, aligned"), ("a", 78, 4, "not balanced"), ("b", 60, 64, "balanced, aligned"),
        ("b", 60, 64, "not aligned"),
    ):  # fmt: skip
        more = ({"aligned_pages": 1} if example == "b" else {}) | dict(orders[order])
        memory = windowed_memory(pages, 1, window, 4, retention="slack", slack=0, **more)
        texts = [list(range(first, first + length)) for first in (100, 200, 300)]
        if example == "b":
            texts = [texts[0], texts[1][:10]]
        for name, tokens in enumerate(texts, 1):
            compute(memory, seq := Seq(name, tokens))
            if example == "a" or name == 1:
                memory.free(seq)
        left = [memory.prefix_cache.find_cached(Seq(99, [*tokens, 7])).tokens for tokens in texts[:-1]]
        points.append({"example": example, "order": order, "left": left})
    return points + simulations(runs)


# Pages


def reserved(pages: TwoLevelPagePool, group: int, count: int, owner: int) -> list[int]:
    """Allocate `count` pages of a group; there must be room."""
    needs = [0] * len(pages.small_pages_per_large)
    needs[group] = count
    assert pages.reserve(needs), f"there is no room for {count} pages of group {group}"
    return pages.allocate(group, count, owner)


def pages_of_a_request(tokens: Sequence[tuple[str, str]], bytes: Mapping[str, int], num_large: int) -> Points:
    """Take a small page for each token, given by name and kind, and free all. Points, of which the first and the last
    are before and after the request, have the page's id within its kind, its large page, and the large pages that are
    free. The pool's large page 0 is scratch; numbers begin at the one after it."""
    plan = plan_pages([LayerType(kind, size) for kind, size in bytes.items()])
    pages = TwoLevelPagePool(plan.small_pages_per_large, num_large, "paper")
    start: dict[str, Any] = {"large_bytes": plan.large_bytes, "free": len(pages.free_large)}
    points, tables = [start], [list[int]() for _ in bytes]
    for kind, run in groupby(tokens, key=lambda token: token[1]):
        names, group = [name for name, _ in run], list(bytes).index(kind)
        ratio, ids = plan.small_pages_per_large[group], reserved(pages, group, len(names), owner=1)
        tables[group] += ids
        points += [
            {**start, "token": name, "kind": kind, "bytes": bytes[kind], "page": page - ratio,
             "large": page // ratio - 1, "free": len(pages.free_large)}
            for name, page in zip(names, ids)
        ]  # fmt: skip
    pages.decref_tables(tables)
    pages.remove_owner(1)
    return [*points, {**start, "free": len(pages.free_large)}]


def pages_of_two_requests(per_large: int, tokens: int) -> Points:
    """Let requests A and B take `tokens` small pages each, then end A, by every association of the pool. They take them
    "one by one", in turn, as requests decode, or "at once", as prompts are computed. Points have the owner of each
    small page, by large page, `before` and `after` A ended, and the large pages that came `back`, of `all`."""
    points = []
    for how, each in (("one by one", 1), ("at once", tokens)):
        for association in ASSOCIATIONS:
            pages = TwoLevelPagePool([per_large], 2 * tokens // per_large, association)
            held: dict[str, list[int]] = {"A": [], "B": []}
            for _ in range(0, tokens, each):
                for owner, mine in enumerate(held.values()):
                    mine += reserved(pages, 0, each, owner)
            before, whole = _owners(pages, held), pages.num_active[0]
            pages.decref_tables([held.pop("A")])
            pages.remove_owner(0)
            points.append({"association": association, "how": how, "before": before, "after": _owners(pages, held),
                           "back": whole - pages.num_active[0], "all": whole})  # fmt: skip
    return points


def _owners(pages: TwoLevelPagePool, held: Mapping[str, Sequence[int]]) -> str:
    of = {page: name for name, mine in held.items() for page in mine}
    ratio = pages.small_pages_per_large[0]
    return " ".join("".join(of.get(i * ratio + k, ".") for k in range(ratio)) for i in range(1, pages.num_large + 1))


def page_addresses(kinds: Mapping[str, int], layer_bytes: int, large: int, pages: int) -> Points:
    """Return where the pages of each layer are in `pages` large pages of `large` bytes: page p of a layer is at byte
    start + p * page, from the tensors that kernels receive here. `kinds` are numbers of layers."""
    import torch

    from quire.worker.cache_views import layer_caches

    count = sum(kinds.values())
    spec = ModelSpec("an example", (LayerSpec(1, layer_bytes // 4),) * count, 64, 32, 32, 1, 1, 1)
    groups, first = [], 0
    for layers in kinds.values():
        size = layers * layer_bytes
        ids = range(large // size, pages * large // size)
        groups.append(KVCacheGroup(tuple(range(first, first + layers)), size, size, 8, ids, run_tokens=1))
        first += layers
    geometry = KVCacheConfig(KVCacheLayout.PAGED, pages * large, 2, tuple(groups), 2, large_bytes=large)
    buffer = torch.zeros(pages * large // 2, dtype=torch.bfloat16)
    places = [(kind, i) for kind, layers in kinds.items() for i in range(layers)]
    return [
        {"layer": f"{kind}.{i + 1}", "kind": kind, "index": i, "layers": kinds[kind],
         "start": cache.keys.data_ptr() - buffer.data_ptr(), "page": cache.keys.stride(0) * cache.keys.itemsize}
        for (kind, i), cache in zip(places, layer_caches(buffer, geometry, spec).values())
    ]  # fmt: skip


# Layer types


class SlidingWindowLayer:
    """Figure 9b: a token attends to `sliding` tokens, itself included; a prefix needs its last `sliding` tokens. Near
    its start a request has fewer."""

    def __init__(self, sliding: int) -> None:
        self.sliding, self.evictor = sliding, Evictor()

    def update_last_access(self, r: Request, time: int) -> None:
        for i in range(max(r.len - self.sliding + 1, 1), r.len + 1):
            self.evictor.update_last_access(r.page[i], time)

    def set_prefix_length(self, r: Request) -> None:
        for i in range(1, r.len + 1):
            self.evictor.set_prefix_length(r.page[i], i)

    def get_possible_prefix(self, is_hit: Sequence[bool]) -> set[int]:
        lengths = range(1, len(is_hit) + 1)
        return {p for p in lengths if all(is_hit[max(p - self.sliding, 0) : p])}


def layer_types(window: int) -> dict[str, SlidingWindowLayer]:
    """Return self attention, as the same layer with an unlimited window, and a sliding window."""
    return {"self attention": SlidingWindowLayer(2**20), "sliding window": SlidingWindowLayer(window)}


def layer_interface(methods: Sequence[str], window: int) -> Points:
    """Return the arguments of the interface's methods; the lines of the paper's sliding window; and for two requests,
    of which the second begins with the first, the tokens found and the pages held in self attention and in the window,
    by the built-in policy and by the paper's.

    The built-in window contains the token itself, as the paper's does, but its prefix rule needs one token less: the
    paper's rule is that of a window longer by one."""
    points: Points = [
        {"method": name, "arguments": [*inspect.signature(getattr(LayerSupportsPrefixCache, name)).parameters][1:]}
        for name in methods
    ]
    points.append({"lines": len(inspect.getsource(SlidingWindowLayer).splitlines())})
    tokens = 4 * window
    papers = {**POLICIES, "window": policy_of(SlidingWindowLayer(tokens), horizon=64)}
    built_in, ours = _two_requests(tokens, POLICIES), _two_requests(tokens, papers)
    return points + [{"request": i, "built_in": a, "as_written": b} for i, (a, b) in enumerate(zip(built_in, ours), 1)]


def _two_requests(window: int, policies: Any) -> list[list[int]]:
    memory, found = windowed_memory(199, 4, window, 8, policies=policies), []
    for name, length in ((1, 40), (2, 49)):
        tokens = compute(memory, seq := Seq(name, list(range(length))))
        found.append([tokens, *(sum(page > 0 for page in pages) for pages in memory.get_placement(seq).tables)])
        memory.free(seq)
        memory.check()
    return found


def last_accesses(window: int, steps: Sequence[tuple[str, int, int]]) -> Points:
    """Run steps, given by the request's letters and the tokens before and after each, in self attention and a sliding
    window. Return the last access of each letter's page, its prefix length, and its rank in the order of eviction."""
    layers = layer_types(window)
    for time, (letters, start, end) in enumerate(steps, 1):
        access([*layers.values()], [[0, *map(ord, letters)]] * len(layers), start, end, time)
    return [
        {"layer": name, "token": chr(page), "last_access": time, "length": layer.evictor.prefix_length[page],
         "evicted": layer.evictor.order().index(page)}
        for name, layer in layers.items()
        for page, time in sorted(layer.evictor.last_access.items())
    ]  # fmt: skip


def valid_prefixes(window: int, text: str, cached: Mapping[str, str]) -> Points:
    """Return the prefixes of a text that are valid in each layer, of which the letters `cached` are cached, and the
    longest one that is valid in both."""
    layers = layer_types(window)
    hits = {name: [letter in cached[name] for letter in text] for name in layers}
    points: Points = [
        {"layer": name, "cached": cached[name],
         "valid": [text[:length] for length in sorted(layer.get_possible_prefix(hits[name]))]}
        for name, layer in layers.items()
    ]  # fmt: skip
    return [*points, {"layer": "both", "valid": [text[: longest_prefix([*layers.values()], [*hits.values()])]]}]


def steps_of_a_picture(ways: Sequence[str], text: tuple[int, int], picture: int, chunk: int) -> Points:
    """Return the steps of a prompt with an image between text tokens, computed in chunks, by how embeddings are kept:
    the tokens that each computes, whether it encodes the image, and in tokens: keys and values after it, places
    allocated for more, and embeddings during the step and after it (`behind`)."""
    return [
        {"way": way, "step": i, "tokens": step.tokens, "encodes": step.encodes, "kv": step.kv,
         "places": step.free_places, "embeddings": step.embeddings, "behind": step.leftover_embeddings}
        for way in ways for i, step in enumerate(figure_12(way, text, picture, chunk), 1)
    ]  # fmt: skip
