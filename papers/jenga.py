"""The entries of "Jenga: Effective Memory Management for Serving LLM with Heterogeneity" (SOSP 2025)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from papers.entry import (
    ALL,
    ARITHMETIC,
    MINUTES,
    REAL,
    SIMULATED,
    Each,
    Entry,
    Pivot,
    Point,
    Points,
    Read,
    Rows,
    Rule,
    Spread,
    Where,
    Whole,
    above,
    against,
    at_least,
    at_most,
    between,
    chosen,
    effect,
    equal,
    goal,
    grouped,
    having,
    measured,
    near,
    one,
    same,
    same_digits,
    truth,
)
from papers.jenga_examples import SlidingWindowLayer
from papers.plots import bars, blocks, lines, tall
from papers.unlike_latencies import Rate
from papers.unlike_serving import BESIDE, GB, H100, H200, L4, LABELS, RULES, SHARE, Case, Memory, Run, assumed
from quire.bench.plots import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
BOTH = ("uniform", "jenga")
GREY = "#e0e0e0"
ENTRIES: dict[str, Entry] = {}


def runs(*names: str, where: Where = ALL) -> Rows:
    """Return a table of runs with these names."""
    return Rows([
        *names, ("KV GiB", "kv_gib", ".2f"), "requests", ("requests/s", "requests_per_s", ".3g"),
        ("latency s", "latency", ".3g"), ("decode batch", "batch", ".2f"), ("decode steps", "decode_steps"),
        ("hits %", lambda p: 100 * p["hit_rate"], ".1f"), ("preempted", "preemptions"),
    ], where)  # fmt: skip


def assuming(text: str) -> Callable[[Points], str]:
    """Return a note that ends with the assumptions of the simulations."""
    return lambda points: f"{text}\n{assumed()}"


# Figure 3. Requests: the mean of MMMU-pro (§3.2), the longest of the models, and the mean of arXiv-QA (§7.2), for which
# the paper gives no number.
REQUESTS = {
    "Llama 3.2 11B Vision, 43 text and 6,193 image tokens": ("Llama 3.2 11B Vision", 43, 6193),
    "Gemma-2 9B, 8,192 tokens": ("Gemma-2 9B", 8192, 0),
    "Gemma-2 27B, 8,192 tokens": ("Gemma-2 27B", 8192, 0),
    "Ministral 8B, 131,072 tokens": ("Ministral 8B", 131_072, 0),
    "Ministral 8B, 92,408 tokens (arXiv-QA's mean)": ("Ministral 8B", 92_408, 0),
}
WASTED = dict(zip(REQUESTS, (79.6, 25.0, 25.0, 56.25)))
ENTRIES["jenga-fig3"] = Entry(
    "Jenga Figure 3, §3.2: what uniform pages waste",
    "layer_kinds:uniform_waste",
    {"requests": REQUESTS},
    claims=[Each("J-F3", "{request}: wasted", "share", "%", WASTED, same_digits, {"layers": "wasted"}, "request")],
    tables=[Rows(["request", "layers", "count", "needed", "held", ("% of its pages", "share", ".2f")])],
    note="Uniform pages hold all tokens in every layer. Shorter requests waste less, and those within a window\n"
         "nothing. What serving wastes over time: jenga-fig16.",
    by=ARITHMETIC,
    plot=bars("Jenga Figure 3, §3.2: memory that uniform pages waste", "request", "share", horizontal=True,
              bar="layers", stacked=True, label="% of what uniform pages take", form="%.1f",
              of=lambda points: sorted(points, key=lambda p: p["layers"] == "wasted")),
)  # fmt: skip

# Figure 4. The layer types of Gemma-2 have pages of one size: any layer can use any page, and only the order decides.
ORDERS: dict[str, dict[str, Any]] = {
    "balanced, aligned": {}, "not balanced": {"balanced": False}, "not aligned": {"aligned_pages": 0},
}  # fmt: skip
EVICTING = Case("gemma-2-9b", H100, "docqa:24:6000@144", kv_gib=24.0, caching=True)
RETENTIONS = ("paper", "boundary")


def _left(points: Points, example: str, order: str) -> list[int]:
    return list(one(points, example=example, order=order)["left"])


def _less_left(example: str, order: str) -> Callable[[Points], bool]:
    return lambda points: sum(_left(points, example, order)) < sum(_left(points, example, "balanced, aligned"))


def _found_again(points: Points) -> list[dict[str, Any]]:
    return [
        {"way": f"({p['example']}) {p['order']}", "found": 100 * sum(p["left"]) / (24 * len(p["left"]))}
        if "example" in p else
        {"way": f"simulated, retention {p['retention']}: {p['order']}", "found": 100 * p["hit_rate"]} for p in points
    ]  # fmt: skip


ENTRIES["jenga-fig4"] = Entry(
    "Jenga Figure 4: balanced and aligned eviction, and without",
    "jenga_examples:eviction",
    {
        "orders": ORDERS, "length": 24,
        "runs": [Run({"retention": retention, "order": order}, EVICTING, "jenga", {"retention": retention}, 1,
                     page_pool=settings) for retention in RETENTIONS for order, settings in ORDERS.items()],
    },
    claims=[
        Whole("J-F4", "(a) balanced: of two texts the later one is left whole",
              lambda points: _left(points, "a", "balanced, aligned"), "tokens", [0, 24], equal),
        truth("J-F4", "(a) not balanced: less is left", _less_left("a", "not balanced")),
        truth("J-F4", "(b) not aligned: less of a text is left", _less_left("b", "not aligned")),
        Each("J-F4", "({example}) {order}: of texts of 24 tokens is left", "left", "tokens", where=having("example")),
        Each("J-F4", "hit rate, retention {retention}: balanced and aligned / {order}", lambda p: 1 / p["ratio"],
             "times", where=lambda p: p["order"].startswith("not"), by=SIMULATED,
             derive=against("hit_rate", {"order": "balanced, aligned"}, "retention", where=having("retention"))),
    ],
    tables=[runs("order", "retention", where=having("retention"))],
    note=assuming(
        f"{EVICTING.model}, {EVICTING.workload}, one at a time. Not balanced: a type that is short evicts its own\n"
        "pages, however old others are. Not aligned: of pages used equally long ago all of one type go first."
    ),
    plot=bars("Jenga Figure 4: balanced and aligned eviction", "way", "found", horizontal=True,
              label="% of tokens that another request finds", of=_found_again),
)  # fmt: skip

# Figure 6: the request <IMG><IMG><IMG><IMG>Hello World of §4.1, with pages of one token.
TOKENS = [*[("<IMG>", "image")] * 3, ("Hello", "text"), ("World", "text"), ("<IMG>", "image")]


def _of_kind(kind: str, field: str) -> Callable[[Points], list[int]]:
    return lambda points: [p[field] for p in chosen(points, {"kind": kind})]


ENTRIES["jenga-fig6"] = Entry(
    "Jenga Figure 6: small pages of two kinds in large pages",
    "jenga_examples:pages_of_a_request",
    {"tokens": TOKENS, "bytes": {"image": 256, "text": 384}, "num_large": 3},
    claims=[
        Whole("J-F6", "compatible page of 256 and 384 bytes", lambda points: points[0]["large_bytes"], "bytes", 768,
              equal),
        Whole("J-F6", "large pages of the image tokens", _of_kind("image", "large"), "", [0, 0, 0, 2], equal),
        Whole("J-F6", "large pages of the text tokens", _of_kind("text", "large"), "", [1, 1], equal),
        Whole("J-F6", "small pages of text tokens, by their ids", _of_kind("text", "page"), "", [2, 3], equal),
        Whole("J-M2", "large pages free before the request, with it, and after it",
              lambda points: [points[i]["free"] for i in (0, -2, -1)], "", [3, 0, 3], equal),
    ],
    tables=[Rows(["token", "kind", ("large page", "large"), ("small page, by its kind", "page")], having("token"))],
    note="The figure doesn't say in which order pages were taken; here 3 images fill a large page, then the text.",
    plot=blocks(
        "Jenga Figure 6: small pages of image tokens (256 bytes) and of text tokens (384)",
        lambda points: [("", p["page"] * p["bytes"], p["bytes"], COLOURS[2 * (p["kind"] == "text")],
                         f"{p['token']}\nP{p['page']}") for p in points if "token" in p], ticks=range(0, 2305, 768),
    ),
)  # fmt: skip

# Figure 7, §4.1: 3 layers of self attention and 2 of cross attention, of 128 bytes a token, and 3 large pages. In (a)
# the memory is divided into layers and these into pages, in (b) the other way round.
LAYERS, LAYER, LARGE, PAGES = {"self": 3, "cross": 2}, 128, 768, 3
IN_A = PAGES * LARGE // (5 * LAYER)  # pages of each layer in (a)


def _consecutive(points: Points) -> bool:
    """Return True if page p of each kind begins where p - 1 ends, with its layers in order."""
    return all(
        [p["start"] + i * p["page"] for i in range(3) for p in chosen(points, {"kind": kind})]
        == [i * LAYER for i in range(3 * layers)]
        for kind, layers in LAYERS.items()
    )


def _layouts(points: Points) -> Iterator[tuple[str, float, float, str, str]]:
    for i, p in enumerate(points):
        small = LARGE // p["page"]
        mine = [large * small + k for large in ((1,) if p["kind"] == "self" else (0, 2)) for k in range(small)]
        for line, places in (
            ("(a) layer-page", {k: (i * IN_A + k) * LAYER for k in range(IN_A)}),
            ("(b) page-layer", {k: p["start"] + k * p["page"] for k in mine}),
        ):
            yield from ((line, at, LAYER, COLOURS[i], f"{p['layer']}\np{k}") for k, at in places.items())


ENTRIES["jenga-fig7"] = Entry(
    "Jenga Figure 7: where pages of layers are, by two layouts",
    "jenga_examples:page_addresses",
    {"kinds": LAYERS, "layer_bytes": LAYER, "large": LARGE, "pages": PAGES},
    claims=[
        Each("J-F7", "{layer}: start_ptr, page_size", lambda p: [p["start"], p["page"]], "bytes",
             lambda p: [p["index"] * LAYER, p["layers"] * LAYER], equal),
        truth("J-F7", "a small page is consecutive: its layers follow one another", _consecutive),
        Whole("J-F7", "bytes of a large page, by either kind",
              lambda points: [LARGE // p["page"] * p["page"] for p in chosen(points, {"index": 0})], "bytes",
              [LARGE, LARGE], equal),
    ],
    tables=[Rows(["layer", ("address of page p", lambda p: f"{p['start']} + {p['page']} p")])],
    note="That is (b): a page is one run of bytes. In (a) page p of layer i is at 384 i + 128 p: a slice in each\n"
         "layer's part, which can't go from one kind to another. The numbers are of the tensors that kernels read\n"
         "here.",
    plot=blocks("Jenga Figure 7: bytes of a layer's pages, in large pages of 768", _layouts, ticks=range(0, 2305, 384)),
)  # fmt: skip

# Figure 8: requests A and B take 8 small pages each, in large pages of 4; then A ends.
BACK = "large pages that come back with A"
ENTRIES["jenga-fig8"] = Entry(
    "Jenga Figure 8: large pages of requests, or of all",
    "jenga_examples:pages_of_two_requests",
    {"per_large": 4, "tokens": 8},
    claims=[
        Each("J-F8", f"(a) not request-aware: {BACK}", "back", "of 4 large pages", 0, equal,
             {"association": "none", "how": "one by one"}),
        Each("J-F8", f"(b) request-aware: {BACK}", "back", "of 4 large pages", 2, equal,
             {"association": "paper", "how": "one by one"}),
        Each("J-F8", f"{{association}}, pages taken {{how}}: {BACK}", "back", "of 4 large pages",
             where=lambda p: p["association"] == "bulk" or p["how"] == "at once"),
    ],
    tables=[Rows(["association", ("pages taken", "how"), ("A and B", "before"), ("after A", "after"), "back"])],
    note="bulk gives a request whole large pages of what it takes at once, and puts together what is taken one by\n"
         "one: where a large page has many small ones, every request's own tail costs more than it saves.",
    plot=blocks(
        "Jenga Figure 8: large pages of 4 small ones after A ended",
        lambda points: [(f"{p['association']}, {p['how']}", i, 1, {"B": COLOURS[1], ".": GREY}[owner], owner)
                        for p in points for i, owner in enumerate(p["after"]) if owner != " "],
    ),
)  # fmt: skip

# Figures 9 to 11: the interface for layer types, with a window of 2.
METHODS = {
    "update_last_access": ["r", "time"], "set_prefix_length": ["r"], "get_possible_prefix": ["is_hit"],
}  # fmt: skip
ENTRIES["jenga-fig9"] = Entry(
    "Jenga Figure 9: the interface for layer types, and its window",
    "jenga_examples:layer_interface",
    {"methods": list(METHODS), "window": 2},
    claims=[
        Each("J-F9", "{method}: arguments", "arguments", "", METHODS, equal, having("method"), "method"),
        Each("J-F9", "a layer type in fewer than 120 lines", lambda p: p["lines"] < 120, "", True, equal,
             having("lines")),
        Each("J-F9", "the paper's sliding window, lines", "lines", where=having("lines")),
        Each("J-F9", "as a policy of the memory, request {request}: it holds and finds as the built-in one",
             lambda p: p["as_written"] == p["built_in"], "", None, same, having("request")),
    ],
    note=lambda points: f"{inspect.getsource(SlidingWindowLayer)}\n"
         "Pages and lengths are counted from 1, as the paper's ranges are. A policy serves a prompt of 40 tokens and\n"
         "one that begins with it, over pages of 4: tokens found, pages held in full attention and in the window.",
    plot=bars("Jenga Figure 9: two requests by the paper's layer type and by ours", "what", "count", horizontal=True,
              bar="policy", label="",
              of=lambda points: [
                  {"what": f"request {p['request']}: {what}", "count": p[policy][i], "policy": policy} for p in points
                  if "request" in p
                  for i, what in enumerate(("tokens found", "pages of full attention", "pages of the window"))
                  for policy in ("built_in", "as_written")
              ]),
)  # fmt: skip

ACCESSED = {"self attention": [3, 3, 3, 3, 2, 3], "sliding window": [1, 1, 3, 3, 2, 3]}  # of A, B, C, D, E, G


def _by_token(points: Points, field: str, layer: str, tokens: str = "ABCDEG") -> list[int]:
    return [one(points, layer=layer, token=token)[field] for token in tokens]


def _accesses(layer: str) -> Whole:
    return Whole("J-F10", f"{layer}: last access of A, B, C, D, E, G",
                 lambda points: _by_token(points, "last_access", layer), "", ACCESSED[layer], equal)  # fmt: skip


def _evicted_before(first: str, others: str) -> Whole:
    def ours(points: Points) -> bool:
        ranks = [_by_token(points, "evicted", layer, first + others) for layer in ACCESSED]
        return all(rank[0] == min(rank) for rank in ranks)

    return truth("J-F10", f"[{first}] is evicted before [{' '.join(others)}], in both layers", ours)


ENTRIES["jenga-fig10"] = Entry(
    "Jenga Figure 10: last access after two requests",
    "jenga_examples:last_accesses",
    {"window": 2, "steps": [("ABCDEF", 0, 4), ("ABCDEF", 5, 5), ("ABCDGH", 4, 5)]},
    claims=[
        *map(_accesses, ACCESSED),
        Whole("J-F10", "lengths of A, B, C, D, G in either layer",
              lambda points: _by_token(points, "length", "sliding window", "ABCDG"), "", [1, 2, 3, 4, 5], equal),
        _evicted_before("E", "CDG"), _evicted_before("G", "CD"),
    ],
    tables=[Rows(["layer", "token", ("last access", "last_access"), ("prefix length", "length"), "evicted"])],
    note="Step 3 reads C D G where a window of 2 at G reads D G alone: the hit on ABCD asks for C and D.",
    plot=bars("Jenga Figure 10: last access after two requests", "token", "last_access", panel="layer",
              label="step of the last access"),
)  # fmt: skip

TEXT = "ABCDEFGHIJ"
CACHED = {"self attention": "ABCDEFGHI", "sliding window": "CDHIJ"}
VALID = {"self attention": [TEXT[:n] for n in range(1, 10)], "sliding window": ["ABCD", "ABCDEFGHI", "ABCDEFGHIJ"]}
ENTRIES["jenga-fig11"] = Entry(
    "Jenga Figure 11: prefixes that are valid for a layer type",
    "jenga_examples:valid_prefixes",
    {"window": 2, "text": TEXT, "cached": CACHED},
    claims=[
        Each("J-F11", "{layer}: valid prefixes", "valid", "", VALID, equal, having("cached"), "layer"),
        Each("J-F11", "the longest that is valid for both", lambda p: p["valid"][0], "", "ABCDEFGHI", equal,
             {"layer": "both"}),
    ],
    tables=[Rows(["layer", "cached", ("valid", lambda p: ", ".join(p["valid"]))], having("cached"))],
    note="What is cached follows from the prefixes that the paper's text names; of F in the window it says nothing.",
    plot=blocks(
        "Jenga Figure 11: cached tokens (green), and where valid prefixes end (|)",
        lambda points: [(p["layer"], i, 1, COLOURS[2] if letter in p["cached"] else GREY,
                         letter + " |" * (TEXT[: i + 1] in p["valid"]))
                        for p in points if "cached" in p for i, letter in enumerate(TEXT)],
    ),
)  # fmt: skip

# Figure 12: the request [t0 i0 i1 i2 i3 t1]. The paper's timelines have, for each step: tokens computed, tokens with
# keys and values after it, slots allocated for more, embeddings during the step and after it. (a) is the list of §6.2
# with steps (1) and (2) merged; for (b) the paper says that all slots are allocated at the first chunk, and that
# embeddings take none in addition. Without a cache each chunk that needs the image encodes it.
WAYS = {"pages": "(a) embeddings in pages of their own", "inside": "(b) in pages of keys and values to come",
        "off": "kept nowhere"}  # fmt: skip
STEPS = {"pages": ["3 3 0 4 2", "3 6 0 2 0", "1 7 0 0 0"], "inside": ["3 3 3 0 0", "3 6 0 0 0", "1 7 0 0 0"]}
ENCODED = {"pages": 1, "inside": 1, "off": 2}


def _timeline(way: str) -> Whole:
    fields = ("tokens", "kv", "places", "embeddings", "behind")
    return Whole("J-F12", f"{WAYS[way]}, by step: tokens, KV, places, embeddings during it and after it",
                 lambda points: [" ".join(str(p[field]) for field in fields) for p in chosen(points, {"way": way})],
                 "", STEPS[way], equal)  # fmt: skip


def _encodings(way: str) -> Whole:
    return Whole("J-F12", f"{WAYS[way]}: encoder runs",
                 lambda points: sum(p["encodes"] for p in chosen(points, {"way": way})), "runs", ENCODED[way],
                 equal)  # fmt: skip


def _peak(points: Points, way: str) -> int:
    """Return the most that is held after a step: keys, values and embeddings, in tokens."""
    return max(int(p["kv"] + p["places"] + p["behind"]) for p in chosen(points, {"way": way}))


ENTRIES["jenga-fig12"] = Entry(
    "Jenga Figure 12: memory of a prompt with a picture, step by step",
    "jenga_examples:steps_of_a_picture",
    {"ways": list(WAYS), "text": (1, 1), "picture": 4, "chunk": 3},
    claims=[
        *map(_timeline, STEPS), *map(_encodings, WAYS),
        Whole("J-F12", f"{WAYS['pages']}: peak after a step, of 6 prompt tokens (limit: 10)",
              lambda points: _peak(points, "pages"), "tokens", None, at_most(10)),
        Whole("J-F12", f"{WAYS['inside']}: peak, beyond what it is without embeddings",
              lambda points: _peak(points, "inside") - _peak(points, "off"), "tokens", 0, equal),
        Whole("J-F12", f"{WAYS['pages']}: peak in a step",
              lambda points: max(p["kv"] + p["embeddings"] for p in chosen(points, {"way": "pages"})), "tokens"),
    ],
    tables=[Rows([("embeddings", lambda p: WAYS[p["way"]]), "step", "tokens", "encodes", ("KV", "kv"), "places",
                 ("embeddings during it", "embeddings"), ("after it", "behind")])],
    note="[t0 i0 i1 i2 i3 t1], chunks of 3 tokens, pages of one token, then a decode.",
    plot=bars("Jenga Figure 12: keys and values, and a picture's embeddings", "step", "value", bar="part", panel="way",
              label="tokens", stacked=True, of=lambda points: tall({
                  "kv": "keys and values", "places": "places for more", "embeddings": "embeddings",
              }, "part")([{**p, "way": WAYS[p["way"]], "step": f"step {p['step']}{', encodes' * p['encodes']}"}
                          for p in points])),
)  # fmt: skip

# Figure 13: the models of Table 1, which is also planned by itself; data sets D3, D2 and D1. With larger steps on the
# smaller device, windows would take as much memory as whole requests. PyramidKV keeps a mean of 384 tokens of a prompt
# in a layer, an eighth of MMLU-pro's longest request; the paper gives no number.
ARTICLES, PICTURES, QUESTIONS = "arxiv-qa@40", "mmmu-pro@400", "mmlu-pro@400"
KEPT = (("pyramid_kv", {"average": 384}),)
CASES = {
    "Llama Vision": (Case("llama3.2-vision-11b", H100, PICTURES, caching=True),
                     Case("llama3.2-vision-11b", L4, PICTURES, halved=True, caching=True)),
    "Gemma-2": (Case("gemma-2-27b", H100, ARTICLES, caching=True),
                Case("gemma-2-9b", L4, ARTICLES, caching=True, longest=8000, chunk=2048)),
    "Ministral": (Case("ministral-8b", H100, ARTICLES, caching=True),
                  Case("ministral-8b", L4, ARTICLES, halved=True, caching=True, chunk=2048)),
    "Jamba": (Case("jamba-52b", H100, QUESTIONS, halved=True, caching=True),),
    "character.ai": (Case("characterai-70b", H100, QUESTIONS, halved=True, caching=True),
                     Case("characterai-8b", L4, QUESTIONS, caching=True)),
    "PyramidKV": (Case("pyramidkv-70b", H100, QUESTIONS, halved=True, caching=True, changes=KEPT),
                  Case("pyramidkv-8b", L4, QUESTIONS, caching=True, changes=KEPT)),
    "Llama": (Case("llama3-70b", H100, QUESTIONS, halved=True, caching=True),
              Case("llama3-8b", L4, QUESTIONS, caching=True)),
}  # fmt: skip
UNSHARED = "uniform, unshared"  # where layers share KV: the pages of a system without support for it


def _throughputs() -> Iterator[Run]:
    for model, cases in CASES.items():
        for case in cases:
            names = {"model": model, "device": case.device.name}
            yield from (Run({**names, "pages": rule}, case, rule, fitting=BOTH) for rule in BOTH)
            if model == "character.ai":
                unshared = case._replace(changes=(("kv_sharing", None),))
                yield Run({**names, "pages": UNSHARED}, unshared, "uniform")


GAINS = against("requests_per_s", {"pages": "uniform"}, "label")


def _papers_gains(points: Points) -> list[Point]:
    """Return LCM pages' gains over the pages of the paper's time, in which layers did not share KV."""
    unshared = {p["label"] for p in points if p["pages"] == UNSHARED}
    kept = [p for p in points if p["pages"] != "uniform" or p["label"] not in unshared]
    return against("requests_per_s", lambda p: p["pages"] in ("uniform", UNSHARED), "label")(kept)


def _over_models(device: str, what: str, of: Callable[[Iterator[float]], float], paper: float) -> Whole:
    return Whole("J-F13", f"{device}: {what}",
                 lambda points: of(p["ratio"] for p in chosen(_papers_gains(points), {"device": device})),
                 "times", paper, effect())  # fmt: skip


ENTRIES["jenga-fig13"] = Entry(
    "Jenga Figure 13: throughput of models of unlike layers, on two devices",
    "unlike_serving:simulations",
    {"runs": list(_throughputs())},
    claims=[
        Each("J-F13", "{label}: LCM pages / uniform (above 1)", "ratio", "times", None, above(1),
             lambda p: p["pages"] == "jenga" and p["model"] != "Llama", derive=GAINS,
             why="On an L4 the few requests that fit are limited by their prompts' arithmetic."),
        Each("J-F13", "{label}: LCM pages / uniform (within 3 %)", "ratio", "times", 1.0, near(0.03),
             {"pages": "jenga", "model": "Llama"}, derive=GAINS),
        Each("J-F13", f"{{label}}: LCM pages / {UNSHARED}", "ratio", "times", where={"pages": "jenga"},
             derive=against("requests_per_s", {"pages": UNSHARED}, "label")),
        _over_models("H100", "mean of 7 models", mean, 1.80),
        _over_models("H100", "the most of a model", max, 4.92),
        _over_models("L4", "mean of 6 models", mean, 1.69),
        _over_models("L4", "the most of a model", max, 3.29),
    ],
    tables=[runs("label", "pages", "left_out")],
    note=assuming(
        f"* weights of one byte. Gemma-2 and Ministral: {ARTICLES}, cut to the context; Llama Vision: {PICTURES};\n"
        f"others: {QUESTIONS}; all at once. KV GiB: 0.95 of the device less weights and 1.5 GB. Left out: requests\n"
        "that uniform pages can't hold, nor could the paper's vLLM. Which of the paper's bars is whose can't be\n"
        "read from its text. Long prompts are arithmetic, whatever the batch: there a larger batch saves little,\n"
        "and hits decide. Uniform pages hold states apart, one for each sequence that may run, as vLLM 0.6.3 did;\n"
        "with --max-num-seqs 256 both rules serve Jamba alike. Uniform pages know which layers of character.ai's\n"
        "model share, unless unshared: so the means, as vLLM did not at the paper's time."
    ),
    plot=bars("Jenga Figure 13: throughput of LCM pages, times that of uniform pages", "label", "ratio",
              horizontal=True, label="times", limit=1.0, of=lambda points: chosen(GAINS(points), {"pages": "jenga"})),
    by=SIMULATED,
    takes=MINUTES,
    why="The baseline is this engine with uniform pages, not vLLM 0.6.3.",
)  # fmt: skip

# Figure 14: rates within the capacity of uniform pages, between both capacities, and about that of two-level pages. The
# crowd that measures capacities is about five times what two-level pages hold.
SEEING = CASES["Llama Vision"][0]._replace(workload="mmmu-pro@1200", caching=False)
RATES = [*(Rate(share, 0, 600) for share in (0.25, 0.5, 0.7)), Rate(0.5, 0.5, 600), Rate(0, 0.95, 600),
         Rate(0, 1.2, 600)]  # fmt: skip


def _latency_claims(by: str) -> list[Whole]:
    def gains(points: Points, beyond: bool, field: str) -> list[float]:
        """Return uniform / two-level pages at each rate within or beyond uniform pages' capacity."""
        found = against(field, {"rule": "jenga"}, "rate", where={"by": by})(points)
        return [p["ratio"] for p in chosen(found, {"rule": "uniform"}) if (p["share"] > 1) == beyond]

    def sooner(what: str, field: str, paper: float) -> Whole:
        return Whole("J-F14", f"{what} beyond it: uniform / LCM pages, at most",
                     lambda points: max(gains(points, True, field)), "times", paper, effect(), by=by)  # fmt: skip

    return [
        Whole("J-F14", "end to end within capacity: LCM pages from uniform ones, mean (at most the paper's)",
              lambda points: mean(abs(1 / gain - 1) for gain in gains(points, False, "e2e")), "share", 0.026,
              at_most(0.026), 4, by),
        sooner("end to end", "e2e", 2.24), sooner("first token", "ttft", 29.43),
        Whole("J-F14", "each token after the first beyond it: LCM pages / uniform, mean (the paper: longer)",
              lambda points: mean(1 / gain for gain in gains(points, True, "tpot")), "times", "above 1", above(1),
              by=by),
    ]  # fmt: skip


LATENCIES = {"e2e": "end to end, s", "ttft": "first token, s", "tpot": "each token after it, s"}


def _latencies(about: str, claims: Sequence[Each | Whole], real: bool = False, **more: Any) -> Entry:
    return Entry(
        about, "unlike_latencies:latencies", {"case": SEEING, "rules": BOTH, "real": real, **more}, claims=claims,
        tables=[Rows([("requests/s", "rate", ".2f"), ("of uniform's capacity", "share", ".2f"), "rule", "by",
                     ("end to end s", "e2e", ".2f"), ("first token s", "ttft", ".3f"), ("each token s", "tpot", ".4f"),
                     "unfinished"])],
        note=assuming(
            f"{SEEING.model}, mmmu-pro, Poisson arrivals; an H100's KV memory. Latencies are means over all requests\n"
            "of a run; beyond a capacity they grow with its length: 600 requests, or 180 for real."
        ),
        plot=lines("Jenga Figure 14: latency of Llama 3.2 Vision by request rate", "rate", "value", line="way",
                   panel="measure", labels=("requests/s", ""), log_y=True,
                   of=lambda points: tall(LATENCIES, "measure")([
                       {**p, "way": f"{p['rule']}, {p['by']}"} for p in points
                   ])),
        gpu=real, timed=real,
        takes=MINUTES if real else "seconds",
        why="The ratios depend on the length of the overload, which the paper does not give: a queue grows for as long "
            "as requests come. Beyond capacity LCM pages run more requests at once, so each of them decodes for "
            "longer.",
    )  # fmt: skip


ENTRIES["jenga-fig14"] = _latencies(
    "Jenga Figure 14: latency of Llama 3.2 Vision by request rate",
    [
        Each("J-F14", "{rule}: capacity", "capacity", "requests/s", where=lambda p: round(p["share"], 6) == 0.25,
             by=SIMULATED),
        *_latency_claims(SIMULATED),
    ],
    rates=RATES,
)  # fmt: skip


def _latency_off(rule: str, i: int) -> Whole:
    def off(points: Points) -> float:
        real, simulated = (float(chosen(points, {"rule": rule, "by": by})[i]["e2e"]) for by in (REAL, SIMULATED))
        return abs(simulated / real - 1)

    return Whole("J-F14", f"{rule} at the {('lower', 'higher')[i]} rate: simulated end to end, off by (limit: 0.15)",
                 off, "share", None, at_most(0.15), 3)  # fmt: skip


ENTRIES["jenga-fig14-gpu"] = _latencies(
    "Jenga Figure 14 on a GPU: a rate within capacity, and one beyond it",
    [*_latency_claims(REAL), *_latency_claims(SIMULATED), *(_latency_off(rule, i) for i in range(2) for rule in BOTH)],
    real=True, rates=[Rate(0.5, 0, 60), Rate(0, 0.95, 180)], seconds=21.0,
)  # fmt: skip

# Figure 15: 20 requests of 55K to 110K tokens (D4). The paper doesn't give its KV memory's size; in 42 GiB uniform
# pages have nearly the paper's batch.
DECODING = Case("ministral-8b", H100, "longdoc@20")
BUDGETS = {"54.4 GiB": DECODING, "42.0 GiB": DECODING._replace(kv_gib=42.0)}
BATCH = {"jenga": 5.39, "uniform": 2.63}
DRAWS = range(6)  # seeds of the lengths
BATCH_RATIO = 1.95  # §7.3; the batches that it gives are 2.05 apart


def _over_seeds(points: Points) -> list[Point]:
    """Return a point for each budget and rule, with the batch, the steps and the batch of uniform pages' by seed."""
    found: list[Point] = []
    for group in grouped(points, "budget", "rule"):
        uniform = {p["seed"]: p["batch"] for p in chosen(points, {"budget": group[0]["budget"], "rule": "uniform"})}
        found.append({
            **group[0], "batch": Spread.of([p["batch"] for p in group]),
            "decode_steps": Spread.of([p["decode_steps"] for p in group]),
            "ratio": Spread.of([p["batch"] / uniform[p["seed"]] for p in group]),
        })  # fmt: skip
    return found


def _near_the_papers(what: str, field: str, unit: str, paper: float, pages: str, rule: Rule) -> Each:
    return Each("J-F15", f"{{pages}}, 54.4 GiB: {what}", field, unit, paper, rule,
                {"budget": "54.4 GiB", "rule": pages}, derive=_over_seeds)  # fmt: skip


ENTRIES["jenga-fig15"] = Entry(
    "Jenga Figure 15: requests that decode at once, by every allocation rule",
    "unlike_serving:simulations",
    {"runs": [Run({"budget": budget, "rule": rule, "pages": LABELS[rule], "seed": seed}, case._replace(seed=seed), rule,
                  sampled=0.5, series=() if seed else ("batches",))
              for budget, case in BUDGETS.items() for rule in RULES
              for seed in (DRAWS if rule in BATCH else DRAWS[:1])]},
    claims=[
        *(_near_the_papers("mean decode batch", "batch", "requests", paper, pages, near())
          for pages, paper in BATCH.items()),
        _near_the_papers("steps that decode (at most)", "decode_steps", "steps", 300, "jenga", at_most(300)),
        _near_the_papers("steps that decode", "decode_steps", "steps", 600, "uniform", near()),
        Each("J-F15", "batch of LCM pages / of uniform ones, {budget}", "ratio", "times", BATCH_RATIO,
             effect(), {"rule": "jenga"}, derive=_over_seeds),
        Each("J-F15", "{pages}, 54.4 GiB: mean decode batch", "batch", "requests",
             where=lambda p: p["budget"] == "54.4 GiB" and p["rule"] not in BATCH),
    ],
    tables=[Rows(["pages", "budget", ("mean decode batch", "batch", ".2f"), ("decode steps", "decode_steps"),
                 ("wasted %", lambda p: 100 * p["wasted"], ".2f")], {"seed": 0}, title="The first seed:")],
    note=assuming(
        f"{DECODING.model}, {DECODING.workload}, all at once; chunks of up to 8,192 tokens a step. Wasted: of what is\n"
        "allocated, what no token to come reads; of a static split most is never allocated, since windows don't fill\n"
        "their share. Of requests of 82,500 tokens uniform pages waste 45 %, so 1.82 times as many fit; the paper has\n"
        "1.95 times, and with so few requests whole ones decide. Here a prompt takes memory for 10 steps before it\n"
        "decodes, which makes either batch smaller than what fits. Costs matter only for who is admitted when."
    ),
    plot=lines("Jenga Figure 15: decode batch, Ministral 8B, 20 long requests (simulated)", "step", "size",
               line="pages", panel="budget", labels=("steps that decode", "requests"), markers=False,
               of=lambda points: [
                   {"budget": p["budget"], "pages": f"{p['pages']}: mean {p['batch']:.2f}", "step": step, "size": size}
                   for p in points if p["rule"] in ("jenga", "uniform", "max") and not p["seed"]
                   for step, size in enumerate(p["batches"])
               ]),
    by=SIMULATED,
    why="The paper gives neither the memory for KV nor its lengths beyond their range; with few requests whole "
        "ones decide.",
)  # fmt: skip

# Figure 16: requests of a constant mean length (D5), and of lengths that grow (D6). Shares are averaged over SMOOTH
# seconds, without EDGE of the time at either end.
TRACES = {
    "static": Case("ministral-8b", H100, "longdoc@60"), "dynamic": Case("ministral-8b", H100, "ramp:55000:110000@60"),
}  # fmt: skip
WASTE = {"uniform": 38.2, "jenga": 0.04}  # % of the KV memory
EDGE, SMOOTH = 0.1, 20.0
CATEGORIES = {"full": "used, self", "window": "used, window", "wasted": "wasted", "free": "unallocated"}


def _moments(point: Point, edge: float = 0.0) -> list[Memory]:
    """Return the samples of a run's memory, without a share of the time at either end, while it fills and empties."""
    found = [Memory(*moment) for moment in point["memory"]]
    last = found[-1].time
    return [moment for moment in found if edge * last <= moment.time <= (1 - edge) * last]


def _wasted(point: Point) -> float:
    """Return the wasted per cent of allocated memory, a mean over time."""
    found = _moments(point, EDGE)
    return 100 * sum(moment.wasted for moment in found) / sum(moment.allocated for moment in found)


def _mean_waste(rule: str) -> Whole:
    return Whole(
        "J-F16", f"{LABELS[rule]}: wasted, both traces",
        lambda points: mean(_wasted(p) for p in chosen(points, {"rule": rule})), "%", WASTE[rule], near(),
    )  # fmt: skip


def _share_of_self(which: str, choose: Callable[[Iterator[float]], float], paper: float) -> Whole:
    """Return a claim about the per cent of self attention in the memory that tokens of the dynamic trace need."""

    def ours(points: Points) -> float:
        moments = _moments(one(points, trace="dynamic", rule="jenga"), EDGE)
        near_by = ([x for x in moments if abs(x.time - moment.time) <= SMOOTH / 2] for moment in moments)
        return choose(100 * sum(x.full for x in some) / sum(x.full + x.window for x in some) for some in near_by)

    what = f"dynamic trace: {which} share of self attention"
    return Whole("J-F16", what, ours, "%", paper, near(), 1)


def _over_time(field: str) -> Callable[[Point], float]:
    """Return a function of the per cent that a category takes of the KV memory, a mean over time."""
    return lambda p: 100 * mean(getattr(m, field) / (m.allocated + m.free) for m in _moments(p, EDGE))


def _draw_16(points: Points) -> Figure:
    fig = figure(12, 6)
    case = TRACES["static"]
    fixed = {"weights": case.spec.parameters * 2 / GB, "reserved": ((1 - SHARE) * case.device.memory + BESIDE) / GB}
    colours = (COLOURS[4], "#bdbdbd", COLOURS[0], COLOURS[2], "#c62828", "#f0f0f0")
    for axes, p in zip(fig.subplots(2, 2).flat, points):
        moments = _moments(p)
        parts = {name: [size] * len(moments) for name, size in fixed.items()}
        parts |= {name: [getattr(m, field) / GB for m in moments] for field, name in CATEGORIES.items()}
        axes.stackplot([m.time for m in moments], *parts.values(), labels=list(parts), colors=colours)
        axes.set_title(f"{p['trace']} trace, {LABELS[p['rule']]}", fontsize=9)
        axes.set_xlabel("seconds")
        axes.set_ylabel("GB")
    fig.axes[0].legend(fontsize=7, loc="lower right")
    fig.suptitle("Jenga Figure 16: memory over time, Ministral 8B (simulated)")
    return fig


ENTRIES["jenga-fig16"] = Entry(
    "Jenga Figure 16: memory by category over time",
    "unlike_serving:simulations",
    {"runs": [Run({"trace": trace, "rule": rule, "pages": LABELS[rule]}, case, rule, sampled=0.5,
                  series=("memory",))
              for trace, case in TRACES.items() for rule in BOTH]},
    claims=[
        *map(_mean_waste, WASTE),
        Each("J-F16", "{pages}: wasted, {trace} trace", _wasted, "%"),
        _share_of_self("least", min, 27.8), _share_of_self("most", max, 54.5),
    ],
    tables=[Rows(["trace", "pages", *((f"{name} %", _over_time(field), ".2f") for field, name in CATEGORIES.items()),
                 ("requests that run", lambda p: mean(m.running for m in _moments(p, EDGE)), ".2f")])],
    note=assuming(
        f"Ministral 8B on an H100, 54.4 GiB for KV; {TRACES['static'].workload} and {TRACES['dynamic'].workload},\n"
        "all at once. Used: what tokens in flight and to come read. Wasted: what is allocated beside that. The\n"
        "paper gives no lengths of this figure; ours have the range of its Figure 15. 9 of 36 layers see all, so of\n"
        "L tokens self attention takes 9 L / (9 L + 27 min(L, 32,768)): 27.8 % would be 38,000 tokens, 54.5 % 118,000."
    ),
    plot=_draw_16,
    by=SIMULATED,
    why="The paper gives no lengths: the share of self attention follows from them, the waste from last pages and "
        "large pages.",
)  # fmt: skip

# Figure 17: questions about articles, in random order, one at a time. Assumed are 6 questions about each article, and
# its 92,000 tokens, give or take a quarter.
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10)
SPEEDS = {"hit_rate": ("hit rate", 1.60), "requests_per_s": ("throughput", 1.77)}  # times vLLM's, at most
RETAINING = {
    "uniform": "uniform (vLLM 0.6.3)", "paper": "LCM pages, retention paper", "slack": "LCM pages, retention slack",
    "boundary": "LCM pages, retention boundary (default)",
}  # fmt: skip


def _asking(articles: int, way: str) -> Run:
    case = Case("ministral-8b", H100, f"docqa:{articles}:92000@{6 * articles}", caching=True)
    rule, settings = ("uniform", {}) if way == "uniform" else ("jenga", {"retention": way})
    return Run({"articles": articles, "way": way, "pages": RETAINING[way]}, case, rule, settings, concurrency=1)


def _over_uniform(points: Points, way: str, field: str, most: int = max(COUNTS)) -> list[float]:
    """Return a number / that of uniform pages, for up to `most` articles."""
    found = against(field, {"way": "uniform"}, "articles")(points)
    return [p["ratio"] for p in chosen(found, {"way": way}) if p["articles"] <= most]


def _most_of_uniforms(way: str, field: str) -> Whole:
    what, paper = SPEEDS[field]
    said = f"{RETAINING[way]}: {what}, the most of uniform's"
    judge, rule = (paper, effect()) if way == "paper" else (None, measured)
    return Whole("J-F17", said, lambda points: max(_over_uniform(points, way, field)), "times", judge, rule)


ENTRIES["jenga-fig17"] = Entry(
    "Jenga Figure 17: prefix caching by the number of articles, by each policy behind windows",
    "unlike_serving:simulations",
    {"runs": [_asking(articles, way) for articles in COUNTS for way in RETAINING]},
    claims=[
        truth("J-F17", "up to 3 articles equal (within 5 %)", lambda points: all(
            abs(gain - 1) <= 0.05 for field in SPEEDS for gain in _over_uniform(points, "paper", field, 3)
        )),
        *(_most_of_uniforms(way, field) for way in RETAINING if way != "uniform" for field in SPEEDS),
    ],
    tables=[Pivot(["articles"], "way", lambda p: 100 * p["hit_rate"], ".1f", ": hits %"),
            Pivot(["articles"], "way", "requests_per_s", ".3f", ": requests/s")],
    note=assuming(
        "ministral-8b, an H100's 54.4 GiB for KV. The paper doesn't say how many questions are asked, in which\n"
        "order, how many at once, nor how large its memory is; the first question about an article never hits.\n"
        "retention: paper leaves what left a window as old as its last use, younger than the windows that others'\n"
        "hits need; slack empties it 512 tokens later; boundary keeps also the windows where prompts end or part."
    ),
    plot=lines("Jenga Figure 17: prefix caching by the number of articles, Ministral 8B", "articles", "value",
               line="pages", panel="measure", labels=("articles", ""),
               of=tall({"hit_rate": "share of prompts that is found", "requests_per_s": "requests/s"}, "measure")),
    by=SIMULATED,
    takes=MINUTES,
    why="The paper gives neither the number and order of questions nor its memory; ours asks six about each "
        "article.",
)  # fmt: skip

# Figures 13 to 18 on one GPU, with the KV memory left over on the paper's devices. Loads are shorter than the simulated
# entries', so that a run takes a minute. The second way is compared with the first.
Ways = Mapping[str, tuple[str, dict[str, Any]]]
PAGED: Ways = {rule: (rule, {}) for rule in BOTH}
EMBEDDED: Ways = {mode: ("jenga", {"vision_cache": mode}) for mode in ("off", "pages")}


def _compared(
    row: str, what: str, unit: str, read: Read, ways: Ways, paper: Any, rule: Rule, said: str = "above 1"
) -> list[Each | Whole]:
    """Compare a number of both ways, of which more is better, measured and simulated; judge the measured ratio."""
    less, more = ways
    named = f"{what}: {'LCM pages' if more == 'jenga' else more} / {less}"
    gains = against(read, {"way": less}, "by")
    return [
        *(Each(row, f"{{way}}: {what}", read, unit, where={"by": by}, digits=3, by=by) for by in (REAL, SIMULATED)),
        Each(row, named, "ratio", "times", where={"way": more, "by": SIMULATED}, by=SIMULATED, derive=gains),
        Each(row, f"{named} ({said})", "ratio", "times", paper, rule, {"way": more, "by": REAL}, derive=gains),
    ]


def _on_gpu(
    about: str, case: Case, claims: Sequence[Each | Whole], ways: Ways = PAGED, concurrency: int | None = None,
    fp8: bool = False,
) -> Entry:  # fmt: skip
    """Return an entry that serves a case in two ways on a GPU."""
    how = "all at once" if concurrency is None else f"at most {concurrency} at a time"
    measures = {"batch": "mean decode batch", "hit_rate": "hit rate"}
    if ways is EMBEDDED:
        measures = {"latency": "mean latency, s", "encoder_runs": "encoder runs"}
    return Entry(
        about, "unlike_gpu:beside", {"case": case, "ways": ways, "concurrency": concurrency, "fp8": fp8},
        claims=[
            *claims,
            Each(claims[0].row, "{way}: simulated time, of the real (within 0.15)", "ratio", "times", None,
                 between(0.85, 1.15), {"by": SIMULATED}, digits=3, derive=against("seconds", {"by": REAL}, "way"),
                 why="The calibration is of one model; the kernels of others are extrapolated."),
        ],
        tables=[runs("way", "by", "seconds")],
        note=assuming(f"{case.model}, {case.workload}, {how}; KV memory: what {case.label} has left, or is given."),
        plot=bars(about, "way", "value", bar="by", panel="measure", label="",
                  of=tall({"requests_per_s": "requests/s", **measures}, "measure")),
        gpu=True, timed=True,
        takes=MINUTES,
        why="PaliGemma2 encodes each picture once in either way. Without kept embeddings the same steps took 5 % "
            "longer in two runs; we don't know why." if ways is EMBEDDED else
            "In an L4's memory windows hold most of a request, so LCM pages save little.",
    )  # fmt: skip


def _throughput(name: str, about: str, model: str, device: int, workload: str, fp8: bool = False) -> None:
    paper, rule, said = (1.0, near(0.03), "within 3 %") if model == "Llama" else (None, above(1), "above 1")
    claims = _compared("J-F13", "throughput", "requests/s", "requests_per_s", PAGED, paper, rule, said)
    case = CASES[model][device]._replace(workload=workload)
    ENTRIES[f"jenga-fig13-{name}-gpu"] = _on_gpu(f"Jenga Figure 13 on a GPU: {about}", case, claims, fp8=fp8)


_throughput("ministral", "Ministral 8B in an H100's KV memory", "Ministral", 0, "arxiv-qa@24")
_throughput("ministral-l4", "Ministral 8B in an L4's", "Ministral", 1, "arxiv-qa@20")
_throughput("gemma-27b", "Gemma-2 27B in an H100's", "Gemma-2", 0, "arxiv-qa@40")
_throughput("gemma-9b", "Gemma-2 9B in an L4's", "Gemma-2", 1, "arxiv-qa@40")
_throughput("character", "character.ai 8B in an L4's", "character.ai", 1, "mmlu-pro@150")
_throughput("pyramid", "PyramidKV 8B in an L4's", "PyramidKV", 1, "mmlu-pro@150")
_throughput("llama", "Llama 8B in an L4's", "Llama", 1, "mmlu-pro@150")
_throughput("character-70b", "character.ai 70B in FP8 in an H100's", "character.ai", 0, "mmlu-pro@100", fp8=True)
_throughput("pyramid-70b", "PyramidKV 70B in FP8 in an H100's", "PyramidKV", 0, "mmlu-pro@60", fp8=True)
_throughput("llama-70b", "Llama 70B in FP8 in an H100's", "Llama", 0, "mmlu-pro@60", fp8=True)
_throughput("mllama", "Llama 3.2 11B Vision in an H100's", "Llama Vision", 0, "mmmu-pro@200")
_throughput("jamba", "Jamba 52B in FP8 in an H100's", "Jamba", 0, "mmlu-pro@200", fp8=True)

ENTRIES["jenga-fig15-gpu"] = _on_gpu(
    "Jenga Figure 15 on a GPU: 10 requests of 55K to 110K tokens",
    Case("ministral-8b", H200, "longdoc@10", kv_gib=30.0),
    [
        *_compared("J-F15", "mean decode batch", "requests", "batch", PAGED, None, above(1)),
        Each("J-F15", "{way}: steps that decode", "decode_steps", "steps", where={"by": REAL}),
    ],
)  # fmt: skip
ENTRIES["jenga-fig17-gpu"] = _on_gpu(
    "Jenga Figure 17 on a GPU: 20 questions about 5 articles",
    Case("ministral-8b", H200, "docqa:5:64000@20", kv_gib=32.0, caching=True),
    [
        *_compared("J-F17", "hit rate", "of prompts", "hit_rate", PAGED, None, above(1)),
        *_compared("J-F17", "throughput", "requests/s", "requests_per_s", PAGED, None, above(1)),
    ],
    concurrency=1,
)  # fmt: skip

# Figure 18: prompts with images, in chunks of 1,024 tokens; 200 requests at once, and 20 one by one. PaliGemma2
# computes a prompt in one step.
SIGHTED = {
    "LLaVA-OneVision 7B": "llava-onevision-7b", "InternVL2 8B": "internvl2-8b", "Phi-3-Vision 4B": "phi-3-vision-4b",
    "PaliGemma2 10B": "paligemma2-10b",
}  # fmt: skip
MODES = ("off", "pages", "inside")
LOADS = {"at once": (200, None), "one by one": (20, 1)}
SPEED: Read = "requests_per_s"
PROMPTNESS: Read = lambda p: 1 / p["latency"]  # noqa: E731
CACHE_GAINS = {"throughput": (SPEED, 1.88), "latency": (PROMPTNESS, 1.60)}  # times that without a cache


def _chunked(model: str, requests: int) -> Case:
    return Case(SIGHTED[model], H100, f"mmmu-pro@{requests}", chunk=1024)


def _cache_gains(what: str) -> list[Each | Whole]:
    read, paper = CACHE_GAINS[what]
    gains, kept = against(read, {"mode": "off"}, "model", where={"load": "at once"}), {"mode": "pages"}
    return [
        Each("J-F18", f"{{model}}: {what}, times that of off (no loss)", "ratio", "times", None, at_least(0.995), kept,
             derive=gains),
        Whole("J-F18", f"mean of 4 models: {what}",
              lambda points: mean(p["ratio"] for p in chosen(gains(points), kept)), "times", paper, effect()),
    ]  # fmt: skip


ENTRIES["jenga-fig18"] = Entry(
    "Jenga Figure 18: prompts with pictures in chunks, embeddings kept and encoded again",
    "unlike_serving:simulations",
    {"runs": [Run({"model": model, "mode": mode, "load": load}, _chunked(model, requests), "jenga",
                  {"vision_cache": mode}, concurrency, peaks=concurrency == 1)
              for model in SIGHTED for mode in MODES for load, (requests, concurrency) in LOADS.items()]},
    claims=[
        *_cache_gains("throughput"), *_cache_gains("latency"),
        Each("J-F18", "{model}, {mode}: encoder runs of {requests} requests, one by one", "encoder_runs", "runs",
             where={"load": "one by one"}),
        goal("J-F18", "one by one a picture is encoded once, without a cache in each chunk that has a part of it",
             lambda points: all(p["encoder_runs"] == p["image_chunks" if p["mode"] == "off" else "requests"]
                                for p in chosen(points, {"load": "one by one"}))),
        Each("J-F18", "{model}, {mode}: peak of a request's memory, of off's", "ratio", "times", None,
             between(0.9999, 1.0001), lambda p: p["mode"] != "off", digits=4,
             derive=against("most", {"mode": "off"}, "model", where={"load": "one by one"})),
        Each("J-F18", "{model}, {mode}: most of a request's beside its computed tokens'", lambda p: p["beyond"] / MIB,
             "MiB", where={"load": "one by one"}, digits=1),
    ],
    tables=[Rows(["model", ("embeddings", "mode"), "load", ("requests/s", "requests_per_s", ".3g"),
                 ("latency s", "latency", ".3f"), "encoder_runs",
                 ("peak MiB", lambda p: p["most"] / MIB if "most" in p else None, ",.1f")])],
    note=assuming(
        "mmmu-pro, chunks of 1,024 tokens, an H100's memory. Encoder runs at once without a cache depend on how\n"
        "chunks fall. PaliGemma2's prompts attend both ways, and are computed in one step: each encodes once,\n"
        "whatever is kept. Its pictures of 224 x 224 pixels have 256 rows; the paper doesn't say which size it had.\n"
        "The time of an encoder's part is not measured, but follows from its operations."
    ),
    plot=bars("Jenga Figure 18: embeddings of pictures, kept or encoded again", "model", "value", bar="mode",
              panel="measure", label="200 requests at once", of=lambda points: tall({
                  "requests_per_s": "requests/s", "latency": "latency, s", "encoder_runs": "encoder runs",
              }, "measure")(chosen(points, {"load": "at once"}))),
    by=SIMULATED,
    takes=MINUTES,
    why="The gain is the encoder's part of a request. Our encoders and prompts run closer to a GPU's peak than "
        "vLLM 0.6.3's, and the paper does not give the part of its own.",
)  # fmt: skip


def _pictures(name: str, model: str, requests: int) -> None:
    claims: list[Each | Whole] = []
    rule, said = (between(0.97, 1.03), "within 3 %") if model == "PaliGemma2 10B" else (above(1), "above 1")
    for what, unit, read in (("throughput", "requests/s", SPEED), ("1 / mean latency", "1/s", PROMPTNESS)):
        claims += _compared("J-F18", what, unit, read, EMBEDDED, None, rule, said)
    claims += [
        *(Each("J-F18", "off: encoder runs", "encoder_runs", "runs", where={"way": "off", "by": by}, by=by)
          for by in (REAL, SIMULATED)),
        Each("J-F18", "pages: encoder runs a request", lambda p: p["encoder_runs"] / p["requests"], "runs", None,
             between(1, 1), {"way": "pages", "by": REAL}),
    ]  # fmt: skip
    ENTRIES[f"jenga-fig18-{name}-gpu"] = _on_gpu(
        f"Jenga Figure 18 on a GPU: {model}", _chunked(model, requests), claims, EMBEDDED
    )


_pictures("llava", "LLaVA-OneVision 7B", 48)
_pictures("internvl", "InternVL2 8B", 96)
_pictures("phi3", "Phi-3-Vision 4B", 96)
_pictures("paligemma", "PaliGemma2 10B", 200)

# Figure 19: targets of Table 1, each on its device, with drafts of §7.4. Both of vLLM's ways keep every token in every
# layer of each model. SmartSpec's memory is divided once, by the bytes of a token in either model.
PAIRS = {
    "Gemma-2": CASES["Gemma-2"][0]._replace(draft="gemma-2-2b"),
    "Ministral": CASES["Ministral"][0]._replace(draft="ministral-1b"),
    "Llama 70B": CASES["Llama"][0]._replace(draft="llama3.2-1b"),
    "Llama 8B": CASES["Llama"][1]._replace(draft="llama3.2-1b"),
}  # fmt: skip
UNLIKE = ("Gemma-2", "Ministral")
MANAGED: Ways = {
    "vLLM-max": ("max", {"keep_all_tokens": True}), "vLLM-manual": ("own", {"keep_all_tokens": True}),
    "Jenga": ("jenga", {}),
}  # fmt: skip
MANUAL_GAINS = against("requests_per_s", {"way": "vLLM-manual"}, "label")
MAX_GAINS = against("requests_per_s", {"way": "vLLM-max"}, "label")


def _mean_of_unlike(way: str, gains: Callable[[Points], Points], paper: Any, rule: Rule, said: str) -> Whole:
    return Whole("J-F19", f"mean of models of unlike layers: Jenga / {way}{said}",
                 lambda points: mean(p["ratio"] for p in chosen(gains(points), {"way": "Jenga"})
                                     if p["model"] in UNLIKE), "times", paper, rule)  # fmt: skip


ENTRIES["jenga-fig19"] = Entry(
    "Jenga Figure 19: speculative decoding by three managers of the memory of two models",
    "unlike_serving:simulations",
    {"runs": [Run({"model": model, "way": way}, case, rule, settings)
              for model, case in PAIRS.items() for way, (rule, settings) in MANAGED.items()]},
    claims=[
        Each("J-F19", "{label}: Jenga / vLLM-manual (within 3 %)", "ratio", "times", 1.0, near(0.03),
             lambda p: p["way"] == "Jenga" and p["model"] not in UNLIKE, derive=MANUAL_GAINS),
        Each("J-F19", "{label}: Jenga / vLLM-manual (above 1)", "ratio", "times", None, above(1),
             lambda p: p["way"] == "Jenga" and p["model"] in UNLIKE, derive=MANUAL_GAINS),
        Each("J-F19", "{label}: Jenga / vLLM-max (above 1)", "ratio", "times", None, above(1), {"way": "Jenga"},
             derive=MAX_GAINS),
        _mean_of_unlike("vLLM-manual", MANUAL_GAINS, 1.58, effect(), ""),
        _mean_of_unlike("vLLM-max", MAX_GAINS, None, measured, ""),
        Each("J-F19", "{label}: mean decode batch, Jenga / vLLM-manual", "ratio", "times", where={"way": "Jenga"},
             derive=against("batch", {"way": "vLLM-manual"}, "label")),
        Each("J-F19", "{label}: tokens of a verification", lambda p: 1 + p["accepted"] / p["drafts"], "tokens",
             where={"way": "Jenga"}, by=SIMULATED),
    ],
    tables=[runs("label", "way")],
    note=assuming(
        "* weights of one byte, the draft's too. Drafts: gemma-2-2b, ministral-1b, llama3.2-1b; 3 draft tokens in\n"
        "each step that decodes, each accepted with a probability of 0.7 if those before it are. The paper gives\n"
        f"neither number, nor does its text say which models its bars are. Gemma-2 and Ministral: {ARTICLES}, cut\n"
        f"to the context; Llama: {QUESTIONS}; all at once. KV GiB: 0.95 of the device less the weights of both\n"
        "models and 1.5 GB. vLLM-max: pages of the target's size for both. vLLM-manual: a page of the target for\n"
        "each of the draft. Both keep every token in every layer. As in Figure 13 long prompts are arithmetic,\n"
        "whatever the batch."
    ),
    plot=bars("Jenga Figure 19: throughput with speculative decoding, times vLLM-manual's", "label", "ratio", bar="way",
              label="times", limit=1.0, of=MANUAL_GAINS),
    by=SIMULATED,
    takes=MINUTES,
    why="The paper gives neither draft tokens a step nor their acceptance. In ours prompts are most of the work, "
        "whatever the batch.",
)  # fmt: skip


def _managed(name: str, about: str, model: str, workload: str, kv_gib: float | None = None) -> None:
    """Add the entry of a pair of Figure 19 on a GPU."""
    judged: tuple[str, Any, Rule] = ("above 1", None, above(1)) if model in UNLIKE else ("within 3 %", 1.0, near(0.03))
    said, paper, rule = judged
    gain, ours = against("requests_per_s", {"way": "vLLM-manual"}, "by"), {"way": "Jenga", "by": REAL}
    claims: list[Each | Whole] = [
        Each("J-F19", f"throughput: Jenga / vLLM-manual ({said})", "ratio", "times", paper, rule, ours, derive=gain),
        *(
            Each("J-F19", "throughput: {way} / vLLM-manual", "ratio", "times", where={"by": by}, by=by, derive=gain)
            for by in (REAL, SIMULATED)
        ),
        *(
            Each("J-F19", "{way}: mean decode batch", "batch", "requests", where={"by": by}, digits=2, by=by)
            for by in (REAL, SIMULATED)
        ),
    ]
    case = PAIRS[model]._replace(workload=workload, kv_gib=kv_gib)
    ENTRIES[f"jenga-fig19-{name}-gpu"] = _on_gpu(f"Jenga Figure 19 on a GPU: {about}", case, claims, MANAGED)


_managed("ministral", "Ministral 8B and 1B, 40 GiB of KV", "Ministral", "arxiv-qa@10", 40.0)
_managed("gemma", "Gemma-2 27B and 2B in an H100's KV memory", "Gemma-2", "arxiv-qa@20")
_managed("llama", "Llama 8B and 1B in an L4's KV memory", "Llama 8B", "mmlu-pro@150")

ENTRIES["jenga-table1"] = Entry(
    "Jenga Table 1: models, data sets and devices, planned",
    "unlike_serving:budgets",
    {"cases": [*(case for cases in CASES.values() for case in cases), CASES["Jamba"][0]._replace(device=L4)]},
    claims=[
        Each("J-T1", "{label}, {workload}", lambda p: "plans" if p["fits"] else "OOM", "",
             lambda p: "OOM" if p["label"] == "jamba-52b*, L4" else "plans", equal, by=ARITHMETIC),
        Each("J-T1", "{label}: left for KV", lambda p: p["left"] / GB, "GB", where=lambda p: p["left"] > 0),
        Each("J-T1", "{label}: too much by", lambda p: -p["left"] / GB, "GB", where=lambda p: p["left"] <= 0),
    ],
    tables=[Rows(["label", "workload", ("weights GB", lambda p: p["weights"] / GB, ".2f"),
                 ("left GB", lambda p: p["left"] / GB, ".2f"), ("KV tokens", "tokens", ","),
                 ("large page KiB", lambda p: p["large"] / 1024, ",.0f"), ("longest fits", "fits"),
                 ("over uniform", "uniform")])],
    note="* in FP8, as --quantization fp8 has it: scales beside, embeddings, head and eyes in 16 bits. Left: 0.95 of\n"
         "the device less weights and 1.5 GB. KV tokens are in every layer. The longest request of the data set\n"
         "(Figure 13's sample) is alone. Figure 13's budgets count one byte for each weight instead.",
    plot=bars("Jenga Table 1: models, data sets and devices", "model", "GB", bar="of", horizontal=True, stacked=True,
              label="GB (of 80 and of 24)", form="%.1f", of=lambda points: [
                  {"model": f"{p['label']}: {'plans' if p['fits'] else 'OOM'}", "of": of, "GB": max(p[field], 0) / GB}
                  for p in points for field, of in (("weights", "weights"), ("left", "left for KV"))
              ]),
)  # fmt: skip

# §7: "about 4000 lines of Python code on top of vLLM", and no CUDA kernel changed: the files of this package that exist
# because layers keep different kinds of memory.
TAKEN = {
    "large pages, and pages in them": [
        "memory/jenga/two_level_pool.py", "memory/jenga/page_sizes.py", "memory/page_layout.py",
    ],
    "layer types and what they keep": [
        "memory/policies.py", "memory/requirements.py", "memory/jenga/retention.py", "memory/prefix_waiters.py",
    ],
    "pictures": ["memory/encoder_cache.py", "core/encoder_budget.py"],
    "several models in one pool": ["memory/jenga/shared_pool.py", "pool.py"],
    "the paper's own interface": ["jenga.py"],
    "the runner's side": [
        "worker/cache_views.py", "worker/prompt_lengths.py", "worker/image_inputs.py", "worker/cross_attention.py",
    ],
}  # fmt: skip
ENTRIES["jenga-x3"] = Entry(
    "Jenga §7: lines of code that it took",
    "code_size:sizes",
    {"parts": {**TAKEN, "CUDA": ["**/*.cu", "**/*.cuh"]}},
    claims=[
        Whole("J-X3", "lines of Python for layers that keep unlike things",
              lambda points: sum(p["code"] for p in points), "lines", "about 4000"),
        Whole("J-X3", "lines of CUDA for them, and in the package",
              lambda points: one(points, part="CUDA")["lines"], "lines", 0, equal),
        Each("J-X3", "{part}", "code", "lines", where=lambda p: p["part"] in TAKEN),
    ],
    tables=[Rows(["part", "files", "lines", ("of code", "code")])],
    note="Files that would not be there, or hardly, if all layers kept the same of every token; those of models, of\n"
         "their kernels (Triton) and of vision encoders are not among them, nor were they among the paper's.",
    plot=bars("Jenga: what it took, in lines of Python", "part", "code", horizontal=True, form="%d",
              label="lines of code (the paper's: about 4,000)",
              of=lambda points: [p for p in points if p["part"] in TAKEN]),
)  # fmt: skip

ENTRIES["jenga-x5"] = Entry(
    "Jenga §7.2: the longest request on an L4",
    "unlike_serving:longest_requests",
    {"case": Case("ministral-8b", L4, "arxiv-qa@1", halved=True), "rules": ("jenga", "uniform"), "output": 50},
    claims=[
        Each("J-X5", "{rule}: the model's longest request fits", lambda p: p["longest"] == p["context"], "",
             {"jenga": True, "uniform": False}, equal, key="rule", by=ARITHMETIC),
        Each("J-X5", "LCM pages: the longest request in {kv_gib:.2f} GiB", "longest", "tokens",
             where={"rule": "jenga"}),
        Each("J-X5", "uniform pages: the longest request in {kv_gib:.2f} GiB", "longest", "tokens",
             where={"rule": "uniform"}),
        Each("J-X5", "{rule}: such a request served, output tokens", "served", by=SIMULATED),
    ],
    note="0.95 of 24 GB, less weights of one byte and 1.5 GB, are for KV. A token takes 147,456 bytes in all 36\n"
         "layers; 27 of these keep only the last 32,768 tokens.",
    plot=bars("Jenga §7.2: the longest request on an L4 (dotted: the model's own)", "rule", "longest", horizontal=True,
              label="tokens", form="%d", limit=131_072),
)  # fmt: skip

# §4.4: the small pages in Jamba's large one, and the tokens of its MAX page.
LCM, MAX_TOKENS = 84, 1344


def _is_jamba(point: Point) -> bool:
    return str(point["model"]).startswith("Jamba")


def _pages(point: Point) -> str:
    found = list(dict.fromkeys(f"{name} {size / 1024:g}" for name, size in point["pages"]))
    return ", ".join(found if len(found) < 5 else [found[0], "...", found[-1]])


def _plan(name: str) -> list[tuple[str, Read]]:
    return [("large MiB", lambda p: f"{p[name + 'large'] / MIB:g}"),
            ("of small", lambda p: "/".join(map(str, dict.fromkeys(p[name + "ratios"]))))]  # fmt: skip


# How much of a common prefix a second request finds, by its length. Other engines unify block sizes upwards: vLLM's
# hybrid models find nothing of prefixes below 528 to 7,808 tokens.
UNLIKE_SHAPES = {
    "Gemma-2 9B": "gemma-2-9b", "Gemma-3 4B": "gemma-3-4b", "Ministral 8B": "ministral-8b", "Jamba 52B": "jamba-52b",
}  # fmt: skip
OWN_TOKENS, SHORT_OUTPUT = 256, 8
PREFIXES = (*(2**i for i in range(4, 13)), 7920)  # the last one fills the context of Gemma-2
ARRIVALS: dict[str, int | None] = {"one after the other": 1, "at once": None}


def _found(points: Points) -> Points:
    """Add the share of the prefix that the second request finds."""
    return [{**p, "found": 2 * p["hit_rate"] * (p["prefix"] + OWN_TOKENS) / p["prefix"]} for p in points]


AGAIN = 256  # tokens; vLLM's hybrid models compute up to 7,808 again


def _again(model: str, order: str) -> Whole:
    return Whole(
        "J-X6", f"{model}, {order}: tokens of a prefix that are computed again, at most (limit: {AGAIN})",
        lambda points: max(round(p["prefix"] * (1 - p["found"]))
                           for p in chosen(_found(points), {"model": model, "order": order})),
        "tokens", None, at_most(AGAIN),
    )  # fmt: skip


ENTRIES["jenga-x6"] = Entry(
    "Jenga: prefix hits by the length of a common prefix",
    "unlike_serving:simulations",
    {"runs": [Run({"model": model, "order": order, "prefix": prefix},
                  Case(shape, H200, f"shared:{prefix}:{OWN_TOKENS}:{SHORT_OUTPUT}@2", kv_gib=20.0, caching=True),
                  concurrency=concurrency)
              for model, shape in UNLIKE_SHAPES.items() for order, concurrency in ARRIVALS.items()
              for prefix in PREFIXES]},
    claims=[_again(model, order) for model in UNLIKE_SHAPES for order in ARRIVALS],
    tables=[Pivot(["prefix"], "model", lambda p: 100 * p["found"], ".0f", " %", {"order": order}, _found,
                  f"found by the second request, {order}") for order in ARRIVALS],
    note=assuming(
        f"Two requests with {OWN_TOKENS} tokens of their own, in 20 GiB. Jamba keeps a state after every 128\n"
        "tokens there, so of a prefix the part up to a multiple of 128 is found."
    ),
    plot=lines("Jenga: prefix hits by the length of a common prefix", "prefix", "found", line="model", panel="order",
               labels=("tokens of the prefix", "share that is found"), log_x=True, of=_found),
    by=SIMULATED,
    takes=MINUTES,
)  # fmt: skip

ENTRIES["jenga-x1"] = Entry(
    "Jenga §4.4: compatible pages of the paper's models",
    "layer_kinds:page_plans",
    {"tokens": 16},
    claims=[
        Whole("J-X1", "the model with the largest LCM, in its small pages",
              lambda points: max(points, key=lambda p: max(p["ratios"]))["model"].split()[0], "", "Jamba", equal),
        Each("J-X1", "{model}: LCM, exact", lambda p: max(p["ratios"]), "small pages", LCM, equal, _is_jamba),
        Each("J-X1", "{model}: LCM, padded by {padding:.1f} %", lambda p: max(p["chosen_ratios"]), "small pages",
             where=lambda p: _is_jamba(p) and p["chosen_large"] != p["large"]),
        Each("J-X1", "{model}: tokens of a MAX page", lambda p: round(p["max_tokens"]), "tokens", MAX_TOKENS, equal,
             _is_jamba),
    ],
    tables=[Rows(["model", ("pages, KiB", _pages), *_plan(""), ("padded by %", "padding", ".1f"), *_plan("chosen_"),
                 ("MAX KiB", lambda p: p["max"] / 1024, "g"), ("GCD KiB", lambda p: p["gcd"] / 1024, "g")])],
    note="bfloat16, pages of 16 tokens or of one state. The paper doesn't say in which formats Jamba's keys, values\n"
         "and states were. From the published shape (28 states of 8,192 channels, 16 numbers and 3 inputs each; 4\n"
         "layers of attention) 84 doesn't follow, in 16 bits or in 32; with KV in 8 bits and 48 bytes a channel it\n"
         "would. Where the LCM is above 16 MiB, pages are padded by at most 3 %.",
    by=ARITHMETIC,
    plot=bars("Jenga §4.4: compatible pages (dotted: the paper's Jamba)", "model", "small", bar="plan", limit=LCM,
              horizontal=True, label="small pages of the smallest kind in a large page", of=lambda points: [
                  {"model": p["model"], "plan": plan, "small": max(p[field])} for p in points for field, plan in (
                      ("ratios", "LCM, exact"), ("chosen_ratios", "as planned, padded where it is large"))
              ]),
    why="The paper does not give the formats of Jamba's keys, values and states; its 84 does not follow from the "
        "published shape in 16 or 32 bits.",
)  # fmt: skip

ENTRIES["jenga-x2"] = Entry(
    "Jenga §2: KV of 10,000 tokens of Llama 3.1 8B",
    "closed_forms:shapes",
    {"names": ["llama3.1-8b"]},
    claims=[
        Each("J-X2", "{model}: KV cache of 10,000 tokens", lambda p: 10_000 * p["token"] / 2**30, "GB (2^30 bytes)",
             1.2, same_digits),
        Each("J-X2", "{model}: KV cache of 10,000 tokens", lambda p: 10_000 * p["token"] / GB, "GB (10^9 bytes)"),
    ],
    by=ARITHMETIC,
)  # fmt: skip
