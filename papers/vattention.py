"""The entries of "vAttention: Dynamic Memory Management for Serving LLMs without PagedAttention" (ASPLOS 2025)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from papers.call_latencies import CALL_INFOS, KIB, PAGE_SIZES, PAPER_BANDWIDTH
from papers.dummy_engines import PAGED, virtual
from papers.entry import (
    ARITHMETIC,
    MINUTES,
    Each,
    Entry,
    Pivot,
    Point,
    Points,
    Rows,
    Run,
    Whole,
    above,
    against,
    at_least,
    at_most,
    chosen,
    cited,
    effect,
    equal,
    grouped,
    having,
    highest,
    lowest,
    measured,
    near,
    one,
    same,
    truth,
)  # fmt: skip
from papers.plots import bars, lines, tall
from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("yi-6b", "llama3-8b", "yi-34b")
DECODES = {"yi-6b": (1, 8, 32), "llama3-8b": (1, 8, 32), "yi-34b": (1, 8, 16)}  # batch sizes, of Figure 9
ALL_DECODES = {"yi-6b": (1, 2, 4, 8, 16, 32), "llama3-8b": (1, 2, 4, 8, 16, 32), "yi-34b": (1, 2, 4, 8, 16)}
VLLM = "vllm 0.2.7"  # the memory and kernel of papers/vllm_paged.py
VLLM_NOTE = (
    "vLLM 0.2.7's kernel is one of the same structure in Triton: layouts, what a program, a warp and a thread\n"
    "compute, and the choice of v1 or v2. It is not vLLM's code: papers/vllm_paged.py lists what differs."
)
CLOSE = 0.03  # the tolerance of "about the same speed"
ENTRIES: dict[str, Entry] = {}


# Table 1: issues, with the paper's number, the same as an overhead in percent, and the entry that measures it here
_ISSUES: list[tuple[str, str, float | None, str, float | None, str, str]] = [
    ("vLLM", "decode kernel slower than FlashAttention's, up to", 2.85, "times", 185, "Figure 9b", "vattention-fig9"),
    ("vLLM", "effect of the block size on its kernel's time, up to", 3, "times", 200, "Figure 5", "vattention-fig5"),
    ("FlashAttention", "paged kernel slower than the vanilla one, up to", 12, "%", 12, "Figure 3", "vattention-fig3"),
    ("FlashAttention", "first attempts to add paging failed unit tests", None, "", None, "its [15]",
     "pytest tests/kernels"),
    ("TensorRT-LLM", "throughput lost in a Python front-end, more than", 10, "%", 10, "its [13]",
     "vattention-x2, step-overhead"),
    ("TensorRT-LLM", "latency with paging even in C++, up to", 5, "%", 5, "Table 1", "nothing"),
    ("FlashInfer", "paged prefill raises the time to the first token, up to", 45, "%", 45, "Table 6",
     "vattention-table6"),
]  # fmt: skip


def issues() -> list[Point]:
    """Return the issues of Table 1, as the paper cites them."""
    fields = ("system", "what", "number", "unit", "percent", "source", "here")
    return [{**dict(zip(fields, issue)), "name": f"{issue[0]}: {issue[1]}"} for issue in _ISSUES]


ENTRIES["vattention-table1"] = Entry(
    "vAttention Table 1: issues that paging brings, as cited",
    "vattention:issues",
    claims=[
        Each("V-T1", "{name}", "here", "{unit}", lambda point: point["number"], cited),
        Whole("V-X3", "TensorRT-LLM: throughput lost, 412 to 365 tokens/s", lambda points: "nothing", "%", 11, cited),
    ],
    tables=[Rows([
        "system", ("issue", "what"), ("paper", "number", "g"), "unit",
        ("its source", "source"), "here",
    ])],
    note="By the paper's own numbers Figure 5's largest label is 3.31; Table 6 has 59.91 s against 41.35, 44.9 %.\n"
         "Of TensorRT-LLM (§3.3.2): throughput fell from 412 to 365 tokens/s, 11.4 %. \"This issue was attributed to\n"
         "the Python runtime of TensorRT-LLM and moving to a C++ runtime can mitigate the CPU overhead.\" This engine\n"
         "plans in Python while the device computes, so its time shows only where a step is shorter than a plan.",
    plot=bars("vAttention Table 1: issues that paging brings, as cited", "name", "percent", horizontal=True,
              label="overhead as cited, %", of=lambda points: [p for p in points if p["percent"] is not None]),
)  # fmt: skip


# Table 2: the first three columns are the paper's
SYSTEMS = {
    "": ("memory management in user code", "KV-cache fragmentation", "KV-cache allocation", "portable wrt GPU code",
         "programming effort, GPU", "programming effort, CPU"),
    "vLLM": ("block tables", "low", "fast", "no", "high", "high"),
    "FlashInfer": ("compressed block tables", "low", "fast", "no", "high", "high"),
    "vAttention": ("none", "low", "slow", "yes", "none", "low"),
    "quire, paged": ("a ledger, page tables", "low", "fast", "no", "kernels of its own", "the ledger"),
    "quire, virtual": ("the same ledger", "low", "slow", "yes", "none", "the ledger, a driver"),
}  # fmt: skip
CHANGED = {  # lines that paging took, as reported in §7 (implementation effort)
    "FlashInfer's decode kernel into vLLM, over 15 files, more than": 600,
    "paging in FlashAttention's kernel, about": 280,
}


def _changed(row: str, where: str) -> list[Whole]:
    return [Whole(row, what, lambda points: where, "lines", count, cited) for what, count in CHANGED.items()]


def _lines_of_code(title: str, points: Points) -> Figure:
    paper = [{"name": what, "lines": count, "by": "paging, in the paper"} for what, count in CHANGED.items()]
    switches = [{"name": f"{p['before']} to {p['after']}", "lines": p["lines"], "by": "a switch of kernels"}
                for p in points if p.get("before") == "sdpa"]  # fmt: skip
    ours = [{"name": p["part"], "lines": p["code"], "by": "code here"} for p in points if "part" in p]
    return bars(title, "name", "lines", horizontal=True, bar="by", label="lines", form="%.0f", log=True)(
        [*paper, *switches, *ours]
    )


ENTRIES["vattention-table2"] = Entry(
    "vAttention Table 2: systems, and what managing memory takes",
    "code_size:sizes",
    {"parts": {"memory in user code: all memories' ledgers and policies": ["memory/**/*.py"],
               "drivers of virtual memory": ["worker/virtual/**/*.py"]}},
    claims=[*_changed("V-T2", "vattention-fig12"), Each("V-T2", "{part}", "code", "lines of code")],
    note=table([*SYSTEMS], [*zip(*SYSTEMS.values())]) + "\n\n"
         "The first three as the paper has them; TensorRT-LLM, LightLLM and FlashAttention page like vLLM, it says.\n"
         "quire's columns are its own judgement. One ledger counts pages for both memories, so prefixes, forks,\n"
         "preemption and swapping work over virtual memory too: it is not gone from user code, but no kernel reads\n"
         "its tables. Fragmentation: vattention-table8, c1; allocation: vattention-table3; portability:\n"
         "vattention-fig12.",
    plot=lambda points: _lines_of_code("vAttention Table 2, §7: what managing memory takes", points),
)  # fmt: skip


# Table 5: query heads, KV heads, layers
SHAPES = {"yi-6b": (32, 4, 32), "llama3-8b": (32, 8, 32), "yi-34b": (56, 8, 60)}

ENTRIES["vattention-table5"] = Entry(
    "vAttention Table 5: the models",
    "closed_forms:shapes",
    {"names": MODELS},
    claims=[
        Each("V-T5", f"{{model}}: {what}", field, "", {name: shape[i] for name, shape in SHAPES.items()}, equal,
             key="model")
        for i, (field, what) in enumerate((("heads", "query heads"), ("kv_heads", "KV heads"), ("layers", "layers")))
    ],
    tables=[Rows([
        "model", ("query heads a KV head", lambda p: p["heads"] // p["kv_heads"]), "head_dim", "parameters",
        ("GB of weights", lambda p: p["parameters"] * 2 / 1e9, ".1f"), ("KB a token", lambda p: p["token"] // 1024),
    ])],
    note="The paper's hardware: Yi-6B on one A100 of 80 GB, Llama-3-8B and Yi-34B on two (TP-2).\n"
         "One H200 keeps each of them. Weights and KV in numbers of two bytes.",
    by=ARITHMETIC,
)  # fmt: skip


# Table 8: for each page size, the tokens of a page, and the MB that a request wastes at most
KB_OF_PAGES = {"64 KB": 64, "128 KB": 128, "256 KB": 256, "2 MB": 2048}
WASTE = {  # (model, tensor-parallel workers)
    ("yi-6b", 1): ([64, 128, 256, 2048], [4, 8, 16, 128]),
    ("yi-6b", 2): ([128, 256, 512, 4096], [8, 16, 32, 256]),
    ("llama3-8b", 1): ([32, 64, 128, 1024], [4, 8, 16, 128]),
    ("llama3-8b", 2): ([64, 128, 256, 2048], [8, 16, 32, 256]),
    ("yi-34b", 1): ([32, 64, 128, 1024], [7.5, 15, 30, 240]),
    ("yi-34b", 2): ([64, 128, 256, 2048], [15, 30, 60, 480]),
}
OF_A_PAGE = (("tokens", f"tokens of a page of {', '.join(KB_OF_PAGES)}", ""), ("mb", "most waste of a request", "MB"))


def _by_page(points: Points) -> Points:
    """Return a point for each layout of a model, with lists over page sizes."""
    return [
        {**group[0], "tokens": [p["tokens"] for p in group], "mb": [p["mb"] for p in group]}
        for group in grouped(points, "model", "tensor", "layout")
    ]


def _draw_waste(points: Points) -> Figure:
    shown = [{**p, "workers": f"TP-{p['tensor']}", "way": f"{p['layout']}, {p['page']}"} for p in points
             if p["layout"] == "layer" or (p["layout"] == "sliced" and p["page"] == "2 MB")]  # fmt: skip
    return bars("vAttention Table 8: waste of a request by page size, and sliced", "workers", "mb",
                bar="way", panel="model", label="MB that a request wastes at most", log=True)(shown)  # fmt: skip


ENTRIES["vattention-table8"] = Entry(
    "vAttention Table 8: tokens of a page, waste of a request",
    "closed_forms:buffers",
    {"models": tuple(WASTE), "layouts": ("layer", "sliced:4", "sliced:8", "sliced"), "pages": KB_OF_PAGES,
     "requests": 200, "length": 200 * 1024},
    claims=[
        *(Each("V-T8", f"{{model}}, TP-{{tensor}}: {what}", field, unit,
               lambda point, i=i: WASTE[point["model"], point["tensor"]][i], equal, {"layout": "layer"},
               derive=_by_page)
          for i, (field, what, unit) in enumerate(OF_A_PAGE)),
        *(Each("V-T8", f"{{model}}, TP-{{tensor}}, {{layout}}: {what}", field, unit, where={"layout": layout},
               derive=_by_page)
          for layout in ("sliced:8", "sliced") for field, what, unit in OF_A_PAGE),
    ],
    tables=[
        Rows([
            "model", ("workers", "tensor"), "layout",
            "tokens", ("MB wasted", "mb"), ("pages mapped at once", "buffers"),
            ("empty %", lambda point: 100 * point["empty"], ".2f"),
            ("GB by 200 requests", lambda point: 200 * point["mb"] / 1024, ".2f"),
        ], {"page": "2 MB"}, title="Pages of 2 MB, by how many layers share a buffer (waste of all workers together; "
                                   "pages mapped on each):"),
        Pivot(("model", "tensor"), "page", lambda point: 200 * point["mb"] / 1024, ".1f", where={"layout": "layer"},
              title="GB that 200 requests waste at most with a buffer a layer, the paper's layout:"),
    ],
    note='The paper (§7.4): "even at such large batch sizes" (about 200) "the maximum theoretical memory waste is\n'
         'at most a few GBs". Where tokens of a page are not whole, a token may lie in two pages that are neighbours\n'
         "in addresses. Where layers don't fill the last buffer, part of each page stays empty.",
    plot=_draw_waste,
    by=ARITHMETIC,
)  # fmt: skip


# Figure 7 and Table 4: the library
PAGES_UNDER_REQIDS = {
    "(a) no physical memory": [0, 0], "(b) R1 comes": [1, 0], "(c) R1 grows, R2 comes": [2, 1],
    "(d) R1 has completed": [2, 1], "(e) R3 comes": [2, 1],
}  # fmt: skip


def _by_reqid(points: Points) -> list[Point]:
    """Return a point for each reqId and moment."""
    return [
        {"what": p["what"], "reqid": f"reqId {i}", "count": len(pages),
         "pages": f"{owner or '-'}: {', '.join(map(str, pages)) or '-'}"}
        for p in points for i, (owner, pages) in enumerate(zip(p["owners"], p["pages"]))
    ]  # fmt: skip


ENTRIES["vattention-fig7"] = Entry(
    "vAttention Figure 7: pages of two requests, (a) to (e)",
    "reqids:walk",
    claims=[
        Each("V-F7", "{what}: pages under reqIds 0 and 1", lambda point: [len(pages) for pages in point["pages"]], "",
             PAGES_UNDER_REQIDS, equal, key="what"),
        truth("V-F7", "(e): R3 has R1's reqId, and in it R1's pages",
              lambda points: points[4]["pages"][0] == points[2]["pages"][0]),
    ],
    tables=[Pivot(("what",), "reqid", "pages", derive=_by_reqid,
                  title="Pages of 16 tokens in a K-cache for 2 requests of at most 48 tokens:")],
    note="The figure shows demand alone. With `map_ahead` after each step (§6.2) a page more would lie under reqId 1\n"
         "in (b), for the next request, and under a request whose pages are full.",
    plot=bars("vAttention Figure 7: pages of two requests", "what", "count", horizontal=True, panel="reqid",
              label="pages", of=_by_reqid),
)  # fmt: skip


def _note_of_switches(points: Points) -> str:
    diff = "\n".join(one(points, before="sdpa", after="varlen_attn")["diff"])
    return (
        f"From sdpa to varlen_attn:\n\n{diff}\n\n"
        "That is a request at a time, as in the paper's figure. An engine also says which requests and tokens a step\n"
        "has: the adapters' lines are that, and the paged one's gather pages besides. A value of --attention is an\n"
        "adapter, its name in the config, and a line where the runner makes it; memory and scheduler know of none."
    )


ENTRIES["vattention-fig12"] = Entry(
    "vAttention Figure 12: lines that replacing a kernel takes",
    "kernel_switch:switches",
    also=[Run("code_size:sizes", {"parts": {
        "torch's attention over contiguous memory": ["kernels/contiguous.py"],
        "torch's attention over paged memory": ["kernels/sdpa.py"],
        "our kernels over both, without the kernels": ["kernels/triton/backend.py"],
    }})],
    claims=[
        Each("V-F12", "lines changed from {before} to {after} (limit: 10)", "lines", "lines", None,
             at_most(10), {"before": "sdpa"}),
        Each("V-F12", "the most of any switch, {before} to {after} (limit: 10)", "lines", "lines", None,
             at_most(10), derive=lambda points: highest([p for p in points if "before" in p], "lines")),
        Each("V-F12", "{call}: over virtual tensors to the bit what it gives over ordinary ones", "equal", "", None,
             same, having("call")),
        *_changed("V-F12", "see below"),
        Each("V-F12", "--attention: {part}", "code", "lines of code", where=having("part")),
    ],
    tables=[Pivot(("before",), "after", "lines", where=having("before"),
                  title="Lines that go and lines that come, each counted, imports too:")],
    note=_note_of_switches,
    plot=lambda points: _lines_of_code("vAttention Figure 12: what replacing a kernel takes", points),
)  # fmt: skip


# Row, what, field, the paper's value (None: measured only), unit. The paper writes N and H with marks and names neither
# a reqId nor lengths.
_CALLS: list[tuple[str, str, str, Any, str]] = [
    ("V-T4", "init: arguments that it needs", "init needs", ["N", "B", "L", "H", "D", "P", "page_size"], ""),
    ("V-T4", "alloc_reqid: arguments that it needs", "alloc_reqid needs", [], ""),
    ("V-T4", "free_reqid: arguments that it needs", "free_reqid needs", ["reqid"], ""),
    ("V-T4", "step: arguments that it needs", "step needs", ["seq_lens"], ""),
    ("V-M5", "init: tensors of 3 layers", "tensors", 6, ""),
    ("V-M5", "init: shape of each, B x L x H x D", "shapes", [[2, 256, 4, 32]], ""),
    ("V-M5", "init: pages mapped into them", "mapped", 0, ""),
    ("V-M6", "alloc_reqid: an integer from 0 to B - 1, of B = 2", "reqids", [0, 1], ""),
    ("V-M6", "alloc_reqid: with all active", "third", None, ""),
    ("V-M6", "free_reqid: the id is inactive, and given out again", "freed", 0, ""),
    ("V-M7", "step: success, with a page for each", "enough", 0, ""),
    ("V-M7", "step: failure, of 5 pages with 4 there", "short", -1, ""),
    ("V-M7", "step: failure has changed nothing", "unchanged", None, ""),
    ("V-M7", "step: success, when a request has been preempted", "after", 0, ""),
    ("V-M10", "pages that decoding waits for, mapped ahead", "decoding", 0, ""),
    ("V-M11", "pages mapped for a request no longer than the one before", "deferred", 0, ""),
    ("V-M12", "pages that a mean prompt waits for, mapped eagerly", "eager", 0, ""),
    ("V-M13", "cached pages are reclaimed when less is free than", "low", 10, "%"),
    ("V-T4", "init: arguments of our own", "extra", None, ""),
]

ENTRIES["vattention-table4"] = Entry(
    "vAttention Table 4: the interface to a serving framework",
    "reqids:interface",
    claims=[
        Each(row, what, field, unit, paper, measured if paper is None else equal, having("tensors"))
        for row, what, field, paper, unit in _CALLS
    ],
    tables=[Pivot(("call",), "reqid", "count", where=having("call"),
                  title="A session of three reqIds, with 8 pages of 16 tokens:")],
    note="`pages` are those made at start, of each buffer. Beside the four: `map_ahead`, for a caller that has\n"
         "launched an iteration and wants no thread; `counts`; `close`. What the paper leaves open: with all reqIds\n"
         "active alloc_reqid returns -1; wrong ids and lengths are InputErrors; a refused call changes nothing.",
    plot=bars("vAttention Table 4: a session through the interface, 8 pages of 16 tokens", "call", "count",
              horizontal=True, panel="reqid", label="pages", of=partial(chosen, where=having("call"))),
)  # fmt: skip


# Sections 4 and 5.1.1
TOKEN_KB = {"yi-6b": 64, "llama3-8b": 128, "yi-34b": 240}
_OF = {"model": "yi-34b", "layout": "layer"}

ENTRIES["vattention-x1"] = Entry(
    "vAttention §4, §5.1.1: KV of a token, addresses of a memory",
    "closed_forms:buffers",
    {"models": (("yi-6b", 1), ("llama3-8b", 1), ("yi-34b", 2)), "layouts": ("layer", "sliced"),
     "pages": {"2 MB": 2048}, "requests": 500, "length": 200 * 1024},
    claims=[
        Each("V-X1", "{model}: KV cache of a token", "token_kb", "KB", TOKEN_KB, equal, {"layout": "layer"}, "model"),
        Each("V-M2", "{model}, TP-{tensor}: a token in a buffer", "stride", "bytes", 4 * 128 * 2, equal, _OF),
        Each("V-M2", "{model}, TP-{tensor}: a request of 200K tokens in a buffer", "request_mb", "MB", 200, equal, _OF),
        Each("V-M2", "{model}, TP-{tensor}: of a worker", "buffers", "buffers", 120, equal, _OF),
        Each("V-M2", "{model}, TP-{tensor}: a buffer for 500 requests", lambda point: point["buffer_mb"] / 1000,
             "GB (1,000 MB)", 100, equal, _OF),
        Each("V-M2", "{model}, TP-{tensor}: addresses of a worker", lambda point: point["addresses_mb"] / 1e6,
             "TB (10^6 MB)", 12, equal, _OF),
    ],
    tables=[Rows([
        "model", ("workers", "tensor"), "layout",
        "buffers", ("bytes of a token", "stride"), ("MB of a request", "request_mb"),
        ("TiB of addresses", lambda point: point["addresses_mb"] / 2**20, ".2f"),
    ])],
    note="A request's place is whole pages here: 200,000 tokens take 196 MB of 2 MB pages instead of 195.3. A process\n"
         "has 128 TiB of addresses.",
    by=ARITHMETIC,
)  # fmt: skip


# Figures 3, 4, 5: one kernel source over pages and over contiguous keys and values, and in 5 also one in the structure
# of vLLM's. The paper compared the kernels of FlashAttention (3), FlashInfer (4) and vLLM (5) on an A100.
CONTEXTS = (2048, 4096, 8192, 16384, 32768)


def _paging_adds(points: Points, *same: str) -> list[Point]:
    """Return the points over pages with the `percent` that they take longer than contiguous ones."""
    found = against("us", {"memory": "contiguous"}, *same)(points)
    return [{**point, "percent": 100 * (point["ratio"] - 1)} for point in found]


def _by_context(points: Points) -> list[Point]:
    return [{**p, "line": f"batch {p['batch']}"} for p in _paging_adds(points, "batch", "context")]


def _less_where_large(points: Points) -> float:
    found = _by_context(points)
    return float(found[0]["percent"] - found[-1]["percent"])


ENTRIES["vattention-fig3"] = Entry(
    "vAttention Figure 3: what paging adds to decode attention",
    "attention_times:decodes",
    {"models": {"yi-6b": (1, 4, 8, 16, 32)}, "contexts": CONTEXTS, "memories": ("paged, 16", "contiguous")},
    claims=[
        Each("V-F3", "paging adds to a decode's attention, at most of all batches and contexts", "percent", "%", 12,
             near(), digits=1, derive=lambda points: highest(_by_context(points), "percent")),
        Each("V-F3", "batch {batch}: paging adds to a decode's attention, at most of all contexts", "percent", "%",
             digits=1, derive=lambda points: highest(_by_context(points), "percent", "batch")),
        Whole("V-F3", "paging adds less to the most and longest contexts than to one of 2K, by", _less_where_large,
              "points of %", "more than 0", above(0), digits=1),
    ],
    tables=[
        Pivot(("batch", "context"), "memory", "us", ".1f", ", us"),
        Pivot(("batch",), "context", "percent", "+.1f", derive=_by_context, title="What paging adds, in %:"),
    ],
    plot=lines("vAttention Figure 3: what paging adds to decodes, Yi-6B", "context", "percent", line="line",
               labels=("context, tokens", "% over contiguous memory"), log_x=True, bottom=None, of=_by_context),
    gpu=True, timed=True,
    takes=MINUTES,
    why="One sequence of 2K tokens is read in a few microseconds, of which its page table is a larger part than in "
        "the paper's kernels on an A100.",
)  # fmt: skip


def _best_of_prompts(points: Points) -> list[Point]:
    best = lowest(points, "us", "batch", "context", "memory")
    return highest(_paging_adds(best, "batch", "context"), "percent")


def _tflops(points: Points) -> list[Point]:
    """Return points with the rate of half of all token pairs, two products each, of 32 heads of 128."""
    return [{**p, "rate": 2 * 32 * 128 * p["batch"] * p["context"] ** 2 / p["us"] / 1e6,
             "panel": f"batch {p['batch']}"} for p in points]  # fmt: skip


ENTRIES["vattention-fig4"] = Entry(
    "vAttention Figure 4: what paging adds to prompt attention",
    "attention_times:prompts",
    {"model": "yi-6b", "batches": (1, 2, 4, 8, 16), "contexts": CONTEXTS, "memories": ("paged, 16", "contiguous"),
     "most": 2**17},
    {"most": 2**30},
    claims=[
        Each("V-F4", "{kernel}: paging adds to a prompt's attention, at most of all prompts", "percent", "%", digits=1,
             derive=lambda points: highest(_paging_adds(points, "batch", "context", "kernel"), "percent", "kernel")),
        Each("V-F4", "the best paged kernel takes longer than the best contiguous one, at most of all prompts",
             "percent", "%", 14, near(), digits=1, derive=_best_of_prompts),
    ],
    tables=[Pivot(("batch", "context"), "way", "us", ".0f", ", us")],
    note="FlashInfer's kernels are not run.",
    plot=lines("vAttention Figure 4: attention of prompts, Yi-6B", "context", "rate", line="way", panel="panel",
               labels=("tokens of a prompt", "TFLOP/s"), log_x=True, of=_tflops),
    gpu=True, timed=True,
    takes=MINUTES,
    why="The best contiguous kernel is cuDNN's, which has no twin over pages; between the same kernel over pages "
        "and over contiguous memory the difference is what the lines above say.",
)  # fmt: skip


def _page_sizes(kernel: str) -> Callable[[Points], list[Point]]:
    """Return a function of points that returns, for each page size, the largest ratio to pages of 16 of one kernel."""
    of_16 = against("us", {"memory": f"{kernel}, 16"}, "batch", where=lambda p: p["memory"].startswith(kernel))
    return lambda points: highest(of_16(points), "ratio", "memory")


def _large(points: Points, choose: Callable[[Iterable[float]], float]) -> float:
    """Choose from the ratios of pages of 64 and of 128 tokens to pages of 16, each the most of all batches."""
    return choose(p["ratio"] for p in _page_sizes(VLLM)(points) if p["memory"] in (f"{VLLM}, 64", f"{VLLM}, 128"))


ENTRIES["vattention-fig5"] = Entry(
    "vAttention Figure 5: decode attention by page size",
    "attention_times:decodes",
    {"models": {"yi-6b": (1, 2, 4, 8, 16)}, "contexts": (16384,),
     "memories": tuple(f"{kernel}, {page}" for kernel in (VLLM, "paged") for page in (16, 32, 64, 128))},
    claims=[
        Each("V-F5", "vLLM 0.2.7's kernel: pages of 32 tokens / pages of 16, the most of all batches", "ratio", "times",
             1.16, effect(), {"memory": f"{VLLM}, 32"}, derive=_page_sizes(VLLM)),
        *(Whole("V-F5", f"vLLM 0.2.7's kernel: the {which} of pages of 64 and of 128 / pages of 16",
                partial(_large, choose=choose), "times", paper, effect())
          for which, choose, paper in (("faster", min, 2.05), ("slower", max, 3.31))),
        *(Each("V-F5", f"our kernel: pages of {page} tokens / pages of 16, the most of all batches", "ratio", "times",
               where={"memory": f"paged, {page}"}, derive=_page_sizes("paged"))
          for page in (32, 64, 128)),
    ],
    tables=[Pivot(("batch",), "memory", "us", ".1f", ", us")],
    note=VLLM_NOTE,
    plot=lines("vAttention Figure 5: decodes by page size, Yi-6B, 16K tokens", "batch", "us",
               line="memory", labels=("batch", "us"), log_x=True, log_y=True),
    gpu=True, timed=True,
    why="The kernel has the structure of vLLM 0.2.7's, not its code, and runs on an H200; it slows down with the "
        "page as the paper's does, by less.",
)  # fmt: skip


GAIN_9B = {"yi-6b": 2.85, "llama3-8b": 1.45, "yi-34b": 2.62}  # vLLM's kernel / FlashAttention's, at most


def _largest_batches(points: Points) -> list[Point]:
    most = {point["model"]: point["batch"] for point in highest(points, "batch", "model")}
    return [point for point in points if point["batch"] == most[point["model"]]]


def _beside_best_pages(points: Points) -> list[Point]:
    return against("ms", lambda point: point["way"].startswith("paged"), "model")(_largest_batches(points))


def _over_contiguous(points: Points) -> list[Point]:
    """Return each kernel over pages where it takes the longest beside the fastest over contiguous memory."""
    found = against("ms", lambda point: "virtual" in point["way"], "model", "batch")(points)
    return highest(found, "ratio", "model", "way")


def _speed(point: Point) -> float:
    return 1 / float(point["ratio"])


ENTRIES["vattention-fig9b"] = Entry(
    "vAttention Figure 9b: attention of decode steps of 16K tokens",
    "attention_times:decodes",
    {"models": DECODES, "contexts": (16384,), "whole": True,
     "memories": (f"{VLLM}, 16", "paged, 16", "virtual, layer", "virtual, sliced")},
    {"models": ALL_DECODES,
     "memories": (f"{VLLM}, 16", f"{VLLM}, 128", "paged, 16", "paged, 128", "virtual, layer", "virtual, sliced")},
    claims=[
        *(Each("V-F9b", f"{{model}}, batch {{batch}}, {layout}: speed / the best paged kernel's (about 1, within 3 %)",
               _speed, "times", 1.0, near(CLOSE), {"way": f"virtual, {layout}"}, digits=3,
               derive=_beside_best_pages)
          for layout in ("layer", "sliced")),
        *(Each("V-F9b", f"{{model}}, batch {{batch}}, {layout}: torch's own kernel's speed / the best paged kernel's",
               _speed, "times", where={"way": f"torch, virtual, {layout}"}, digits=3, derive=_beside_best_pages)
          for layout in ("layer", "sliced")),
        Each("V-F9b", "{model}, batch {batch}: vLLM 0.2.7's kernel, pages of 16 / the fastest contiguous one",
             "ratio", "times", GAIN_9B, effect(), {"way": f"{VLLM}, 16"}, "model", derive=_over_contiguous),
        Each("V-F9b", "{model}, batch {batch}: our paged kernel, pages of 16 / the fastest contiguous one",
             "ratio", "times", where={"way": "paged, 16"}, derive=_over_contiguous),
    ],
    tables=[Pivot(("model", "batch"), "way", "ms", ".3f", ", ms")],
    note=VLLM_NOTE,
    plot=lines("vAttention Figure 9b: attention of a decode step, 16K tokens a sequence", "batch", "ms", line="way",
               panel="model", labels=("batch", "ms, all layers"), log_x=True, log_y=True),
    gpu=True, timed=True,
    takes=MINUTES,
    why="The baseline has the structure of vLLM 0.2.7's kernel, not its code, and an H200 has 2.4 times an A100's "
        "bandwidth, so instructions limit such a kernel sooner.",
)  # fmt: skip


# Figure 10: each sequence begins shortly before the end of a page of 1,024 tokens of a layer, one after another, so a
# short window has every spike of the paper's 3,500 steps.
SPIKE = 1.2  # of the median: a step above it is a spike


def _facts(points: Points) -> list[Point]:
    """Return runs with their `median`, `p99` and `most` ms, the steps that are `spikes`, and those that map."""
    found: list[Point] = []
    for run in points:
        ordered, middle = sorted(run["ms"]), median(run["ms"])
        found.append({
            **run, "median": middle, "p99": ordered[len(ordered) * 99 // 100], "most": ordered[-1],
            "spikes": sum(ms > SPIKE * middle for ms in ordered), "mapping": sum(map(bool, run["maps"])),
            "pages": sum(run["maps"]), "way": "map-ahead" if run["ahead"] else "synchronous",
        })  # fmt: skip
    return found


def _each_step(points: Points) -> list[Point]:
    return [
        {"panel": f"{p['layout']}, {p['depth']} in flight", "way": p["way"], "step": i, "ms": ms}
        for p in _facts(points)
        for i, ms in enumerate(p["ms"])
    ]


_WHERE = "{layout}, {depth} in flight, {way}"

ENTRIES["vattention-fig10"] = Entry(
    "vAttention Figure 10: decode steps that map pages, ahead and synchronously",
    "dummy_engines:step_times",
    {"model": "llama3-8b", "context": 32768, "page": 1024, "ends": (30, 70, 110, 150), "steps": 200,
     "layouts": ("layer", "sliced"), "depths": (2, 1)},
    {"steps": 3500},
    claims=[
        Each("V-F10", f"{_WHERE}: the slowest step / median (a spike is {SPIKE})",
             lambda point: point["most"] / point["median"], "times", round(41 / 25, 2), effect(),
             {"ahead": False, "layout": "layer"}, digits=3, derive=_facts),
        Each("V-F10", f"{_WHERE}: spikes, of 4 full pages", "spikes", where={"ahead": False, "layout": "layer"},
             derive=_facts),
        Each("V-F10", f"{_WHERE}: p99 / median", lambda point: point["p99"] / point["median"], "times",
             where={"ahead": False, "layout": "sliced"}, digits=3, derive=_facts),
        Each("V-F10", f"{_WHERE}: p99 of a step / median (at most 1.1)",
             lambda point: point["p99"] / point["median"], "times", "no spikes", at_most(1.1), {"ahead": True},
             digits=3, derive=_facts),
    ],
    tables=[Rows([
        "layout", ("pages are mapped", "way"), ("in flight", "depth"),
        ("median ms", "median", ".2f"), ("p99 ms", "p99", ".2f"), ("most ms", "most", ".2f"),
        "spikes", ("steps with maps in their way", "mapping"), "pages",
    ], derive=_facts)],
    plot=lines("vAttention Figure 10: decode steps, 4 sequences of 32K tokens, Llama-3-8B", "step", "ms", line="way",
               panel="panel", labels=("step", "ms"), markers=False, of=_each_step),
    gpu=True, timed=True,
    why="With two steps in flight the mapping of one overlaps the other's computation even without map-ahead; the "
        "paper's engine had one.",
)  # fmt: skip


# Tables 3 and 7: the paper's pages below 2 MB need a patched driver; here such pages are the CPU's
GB_S = {page // KIB: rate for page, rate in zip(PAGE_SIZES, PAPER_BANDWIDTH)}


def _named(points: Points) -> list[Point]:
    """Return the idle calls for single pages, with the name of the `call` and the `paper`'s microseconds."""
    found: list[Point] = []
    for p in points:
        if p["run"] == 1 and not p["loaded"]:
            info, cuda = CALL_INFOS[p["kind"]], p["device"] != "cpu"
            paper = info.paper[PAGE_SIZES.index(p["page"])]
            beside = "" if cuda or not info.vmem else f" (the paper: {info.vmem})"
            found.append({**p, "call": info.cuda if cuda else info.memfd, "about": info.description + beside,
                          "paper": paper, "judged": cuda and paper is not None})  # fmt: skip
    return found


def _draw_calls(points: Points) -> Figure:
    paper = [{"kind": kind, "kib": page // KIB, "p50": us, "line": "paper"} for kind, info in CALL_INFOS.items()
             for page, us in zip(PAGE_SIZES, info.paper) if us is not None]  # fmt: skip
    ours = [{**p, "line": f"{p['device']}, {p['load']}"} for p in points if p["run"] == 1]
    four = [p for kind in ("create", "map", "access", "unmap") for p in (*paper, *ours) if p["kind"] == kind]
    return lines("vAttention Table 3: latency of calls, median", "kib", "p50", line="line", panel="kind",
                 labels=("KB a page", "us a page"), log_x=True, log_y=True)(four)  # fmt: skip


ENTRIES["vattention-table3"] = Entry(
    "vAttention Table 3: latency of the calls that manage virtual memory",
    "mapping_costs:calls",
    {"pages": 256, "runs": (1, 16)},
    claims=[
        Each("V-T3", "{call}, {about}, pages of {kib:,} KB", "p50", "us", lambda point: point["paper"], rule,
             {"judged": judged}, derive=_named)
        for judged, rule in ((True, near()), (False, measured))
    ],
    tables=[Pivot(("device", "kib", "run", "load"), "kind", "p50", ".2f",
                  title="Medians, in microseconds a page (reserve and free: a call):")],
    plot=_draw_calls,
    timed=True,
    why="Another GPU and another driver.",
)  # fmt: skip


def _papers_rate(point: Point) -> Any:
    return round(point["workers"] * GB_S[point["kib"]], 2)


def _judged_rate(point: Point) -> bool:
    return bool(point["device"] != "cpu" and point["load"] == "idle")


def _draw_rates(points: Points) -> Figure:
    paper = [{"kib": kib, "gb_s": workers * rate, "line": f"paper, TP-{workers}"} for workers in (1, 2)
             for kib, rate in GB_S.items()]  # fmt: skip
    ours = [{**p, "line": f"{p['device']}, {p['workers']} workers, {p['load']}"} for p in points]
    return lines("vAttention Table 7: bytes mapped", "kib", "gb_s", line="line", labels=("KB a page", "GB/s"),
                 log_x=True, log_y=True)([*paper, *ours])  # fmt: skip


_MAPPED = "{device}, pages of {kib:,} KB, {workers} workers, {load}: mapped"

ENTRIES["vattention-table7"] = Entry(
    "vAttention Table 7: bytes a second that can be mapped",
    "mapping_costs:bandwidths",
    {"pages": 256, "alone": 0.5, "together": 2.0},
    claims=[
        Each("V-T7", _MAPPED, "gb_s", "GB/s", _papers_rate, near(), _judged_rate),
        Each("V-T7", _MAPPED, "gb_s", "GB/s", _papers_rate, where=lambda point: not _judged_rate(point)),
        # "more than an order of magnitude" above the most that decodes needed, Figure 6c
        Each("V-T7", "{device}: the least of these by one worker / 0.6 GB/s, the paper's most demand of decodes",
             lambda point: point["gb_s"] / 0.6, "times", "more than 10", at_least(10), digits=1,
             derive=lambda points: lowest([p for p in points if p["workers"] == 1], "gb_s", "device")),
    ],
    tables=[Pivot(("device", "kib", "workers"), "load", "gb_s", ".2f", ", GB/s")],
    plot=_draw_rates,
    timed=True,
    why="Another GPU and another driver.",
)  # fmt: skip


# Figure 6: decodes at 1K tokens. The paper ran Llama-3-8B and Yi-34B on two A100s; larger batches don't fit one GPU.
BATCHES_6 = {"yi-6b": (1, 40, 80, 160, 320), "llama3-8b": (1, 40, 80, 160, 320), "yi-34b": (1, 24, 48, 96, 192)}


def _largest(field: str, *base: int) -> Any:
    """Return a function to each model's largest batch, with one of the batch sizes `base` of this model as `base`."""
    return lambda points: highest(
        against(field, lambda point: point["batch"] in base, "model")(points), "batch", "model"
    )


ENTRIES["vattention-fig6"] = Entry(
    "vAttention Figure 6: decodes of 1K tokens by batch, and the memory they ask for",
    "dummy_engines:decodes",
    {"models": BATCHES_6, "ways": {"paged": PAGED}, "context": 1024, "steps": 30},
    claims=[
        Each("V-F6a", "{model}: tokens/s at batch {batch} / at {base[batch]} (a plateau: at most 1.25)", "ratio",
             "times", "plateaus", at_most(1.25), derive=_largest("tokens_s", 160, 96)),
        Each("V-F6b", "{model}: a step at batch {base[batch]} and {batch}",
             lambda point: [round(p["ms"], 2) for p in (point["base"], point)], "ms", derive=_largest("ms", 1)),
        Each("V-F6c", "{model}: new KV cache, the most of all batches", lambda point: round(point["mb_s"]), "MB/s",
             "at most 600", at_most(600), derive=lambda points: highest(points, "mb_s", "model")),
    ],
    tables=[Rows([
        "model", "batch", ("tokens/s", "tokens_s", ".1f"),
        ("ms a step", "ms", ".1f"), ("MB/s of new KV", "mb_s", ".1f"),
    ])],
    plot=lines("vAttention Figure 6: decodes at 1K tokens a sequence", "batch", "value", line="model", panel="panel",
               labels=("batch", ""), log_x=True,
               of=tall({"tokens_s": "(a) tokens/s", "ms": "(b) ms a step", "mb_s": "(c) MB/s of new KV"}, "panel")),
    gpu=True, timed=True,
    why="An H200 decodes faster than the paper's A100s, and its knee is at a larger batch; the memory asked for "
        "grows with the speed.",
)  # fmt: skip


# Figure 9a
GAIN_9A = {"yi-6b": 1.97, "llama3-8b": 1.3, "yi-34b": 1.6}  # tokens a second of vAttention / of vLLM, at most


def _over_pages(points: Points) -> list[Point]:
    """Return the largest batch that both have of each model, with the ratio of its tokens a second to that of pages."""
    return highest(against("tokens_s", {"way": "paged"}, "model", "batch")(points), "batch", "model", "way")


ENTRIES["vattention-fig9a"] = Entry(
    "vAttention Figure 9a: decodes of 16K tokens over pages and virtual memory",
    "dummy_engines:decodes",
    {"models": DECODES, "ways": {"paged": PAGED, "virtual, sliced": virtual("sliced")}, "context": 16384,
     "steps": 30},
    {"models": ALL_DECODES,
     "ways": {"paged": PAGED, "virtual, sliced": virtual("sliced"), "virtual, layer": virtual("layer")}},
    claims=[
        Each("V-F9a", "{model}, batch {batch}: tokens/s, {way} / paged (the paper: about 1, within 3 %)",
             "ratio", "times", 1.0, near(CLOSE), digits=3, derive=_over_pages),
        *(Each("V-F9a", "{model}, batch {batch}: the most over our pages; the paper's is over vLLM's kernel",
               "ratio", "times", gain, where={"model": model}, digits=3,
               derive=lambda points: highest(_over_pages(points), "ratio", "model"))
          for model, gain in GAIN_9A.items()),
    ],
    tables=[Pivot(("model", "batch"), "way", "tokens_s", ".1f", ", tokens/s")],
    plot=lines("vAttention Figure 9a: decodes of 16K tokens a sequence", "batch", "tokens_s", line="way",
               panel="model", labels=("batch", "tokens/s"), log_x=True),
    gpu=True, timed=True,
    takes=MINUTES,
    why="Our kernel over pages is as fast as over contiguous memory; the paper's gain is over vLLM's kernel, for "
        "which see vattention-fig9b.",
)  # fmt: skip


# Figure 11: a prompt with its pages mapped on demand ("sync"), and with pages already mapped ("all on")
LIMITS = {64: 1.15, 128: 1.07, 256: 1.03, 2048: 1.03}  # KB of a page -> the most, relative to no mapping
ON_GPU = {
    "models": MODELS, "lengths": (16384,), "repeats": 3, "depth": 1, "seqs": 4,
    "ways": {"paged": PAGED,
             **{f"2048 KB, {layout}, sync": virtual(layout, False) for layout in ("layer", "sliced")},
             **{f"2048 KB, {layout}, all on": virtual(layout) for layout in ("layer", "sliced")}},
}  # fmt: skip
ON_CPU = {  # a small shape, in page sizes that a GPU lacks
    "models": ("small",), "lengths": (2048,), "repeats": 3, "depth": 1, "seqs": 4, "threads": 1, "device": "cpu",
    "kv_tokens": 2**15,
    "ways": {"paged": PAGED,
             **{f"{kib} KB, layer, sync": {**virtual("layer", False), "virtual_page_kib": kib} for kib in LIMITS},
             "64 KB, layer, all on": {**virtual("layer"), "virtual_page_kib": 64}},
}  # fmt: skip


def _compared(points: Points) -> list[Point]:
    """Return the points with `ratio`, what it is `to`, and the paper's.

    For mapping on demand it is to all optimizations in the same layout, where kernels and addresses are equal; for
    these it is to paged memory. The small shape's times vary by more than the maps take, so its maps are subtracted."""
    ms = {(p["model"], p["way"]): p["ms"] for p in points}
    found: list[Point] = []
    for p in points:
        sync, small, base = p["way"].endswith("sync"), p["model"] == "small", p["way"].replace("sync", "all on")
        to = base if sync and (p["model"], base) in ms else "paged"
        less = {"to": "without its maps", "base": p["ms"] - p["stalled_ms"]}
        known = less if small and sync else {"to": to, "base": ms.get((p["model"], to))}
        if known["base"] is not None:
            paper = f"up to {LIMITS[int(p['way'].split()[0])]}" if sync else 1.0
            claim = "" if p["way"] == "paged" else "small" if small else "judged"
            found.append({**p, **known, "ratio": p["ms"] / known["base"], "paper": paper, "claim": claim})
    return found


ENTRIES["vattention-fig11"] = Entry(
    "vAttention Figure 11: a prompt whose pages are mapped first, by page size",
    "dummy_engines:first_tokens_here",
    {"on_gpu": ON_GPU, "on_cpu": ON_CPU},
    claims=[  # 1.03 is the paper's limit for pages of 2 MB, a GPU's, and ours for 1.00
        Each("V-F11", "{model}, {way}: a prompt / {to} (at most 1.03)", "ratio", "times",
             lambda point: point["paper"], rule, {"claim": claim}, digits=3, derive=_compared)
        for claim, rule in (("judged", at_most(1.03)), ("small", measured))
    ],
    tables=[Rows([
        "model", "way", ("prompt ms", "ms", ".1f"),
        ("ratio", "ratio", ".3f"), "to", ("pages mapped first", "maps"),
        ("ms for that", "stalled_ms", ".2f"),
    ], derive=_compared)],
    note="Prompts of 16,384 tokens; the small shape has 8 layers and prompts of 2,048.",
    plot=bars("vAttention Figure 11: a prompt, with pages mapped first and not", "way", "ms", horizontal=True,
              panel="model", label="ms until the first token", form="%.0f"),
    timed=True,
    takes=MINUTES,
    why="An H200 computes the prompt in less time than the paper's A100, so the same mapping is a larger share of "
        "it.",
)  # fmt: skip


# Figure 8 and Table 6: long prompts in chunks of 2,048
SECONDS = {  # model -> thousands of tokens -> FlashAttention paged, vAttention; FlashInfer paged, vAttention
    "yi-6b": {16: (2.44, 1.38, 1.51, 1.34), 32: (8.07, 3.50, 3.97, 3.4), 64: (30.46, 9.98, 11.85, 9.66),
              128: (119, 32.10, 39.17, 30.9), 192: (266, 67.81, 81.87, 65.03)},
    "llama3-8b": {16: (1.62, 1.0, 1.17, 0.97), 32: (5.19, 2.59, 3.06, 2.37), 64: (18.65, 6.84, 8.94, 6.50),
                  128: (71.16, 20.78, 28.98, 20.29), 192: (157.33, 42.31, 59.91, 41.35)},
}  # fmt: skip
KERNELS = ("paper, FlashAttention paged", "paper, FlashAttention vAttention", "paper, FlashInfer paged",
           "paper, FlashInfer vAttention")  # fmt: skip


def _best_of_chunks(points: Points) -> list[Point]:
    kinds = [{**p, "paged": p["memory"].startswith("paged"), "k": p["length"] // 1024} for p in points]
    best = lowest(kinds, "seconds", "model", "length", "paged")
    return against("seconds", {"paged": False}, "model", "length")(best)


ENTRIES["vattention-fig8"] = Entry(
    "vAttention Figure 8: attention of prompts of up to 192K tokens, in chunks",
    "attention_times:chunked_prompts",
    {"models": MODELS[:2], "lengths": tuple(1024 * k for k in (1, 2, 4, 8, 16, 32, 64, 128, 192)), "chunk": 2048,
     "timed": (0, 1, 3, 7, 15, 31, 63, 95), "memories": ("paged, 16", "virtual, sliced", "virtual, layer")},
    claims=[
        Each("V-F8", "{model}, {k}K tokens: attention, {way} / {base[way]}", "ratio", "times", digits=3,
             derive=_best_of_chunks),
    ],
    tables=[Pivot(("model", "length"), "way", lambda point: 1000 * point["seconds"], ".2f",
                  title="Attention of whole prompts, all layers, in ms:")],
    plot=lines("vAttention Figure 8: attention of prompts in chunks of 2,048", "length", "rate", line="way",
               panel="model", labels=("tokens of a prompt", "tokens/s, attention alone"), log_x=True, log_y=True,
               of=lambda points: [{**p, "rate": p["length"] / p["seconds"]} for p in points]),
    gpu=True, timed=True,
)  # fmt: skip


def _beside_pages(points: Points) -> list[Point]:
    thousands = [{**point, "k": point["length"] // 1024} for point in points]
    return against("ms", {"way": "paged"}, "model", "length")(thousands)


def _with_papers_seconds(points: Points) -> list[Point]:
    paper = [
        {"model": model, "length": 1024 * k, "way": way, "s": s}
        for model in dict.fromkeys(point["model"] for point in points)
        for k, seconds in SECONDS[model].items()
        for way, s in zip(KERNELS, seconds)
    ]
    return [*({**point, "s": point["ms"] / 1000} for point in points), *paper]


def _most_of_prompts(points: Points) -> float:
    return max(_speed(point) for point in _beside_pages(points))


def _papers_ratio(point: Point) -> float:
    _, _, paged, contiguous = SECONDS[point["model"]][point["k"]]
    return float(round(paged / contiguous, 2))


ENTRIES["vattention-table6"] = Entry(
    "vAttention Table 6: seconds to the first token of long prompts",
    "dummy_engines:first_tokens",
    {"models": MODELS[:2], "lengths": tuple(1024 * k for k in (16, 32, 64, 128, 192)), "repeats": 1, "chunk": 2048,
     "ways": {"paged": PAGED, "virtual": virtual("sliced"),
              "virtual, cudnn": {**virtual("sliced"), "attention": "cudnn"}}},
    claims=[
        Whole("V-F8", "prompt throughput of the engine, the best of virtual memory / paged, the most", _most_of_prompts,
              "times", 1.45, effect(), digits=3),
        Each("V-T6", "{model}, {k}K tokens: first token, {way}", lambda point: point["ms"] / 1000, "s", digits=3,
             derive=_beside_pages),
        Each("V-T6", "{model}, {k}K tokens: first token, paged / {way}", _speed, "times", _papers_ratio,
             effect(), digits=3, derive=_beside_pages),
    ],
    tables=[Pivot(("model", "length"), "way", "s", ".3f", derive=_with_papers_seconds,
                  title="Seconds to the first token:")],
    plot=lines("vAttention Table 6: seconds to the first token", "length", "s", line="way", panel="model",
               labels=("tokens of a prompt", "s"), log_x=True, log_y=True,
               of=lambda points: [p for p in _with_papers_seconds(points) if p["way"] not in KERNELS[:2]]),
    gpu=True, timed=True,
    takes=MINUTES,
    why="Our prompt kernel over pages is as fast as over contiguous memory. Only cuDNN's is faster, which has no "
        "twin over pages; the paper compared FlashInfer's kernels.",
)  # fmt: skip


# Section 3.3.2: whole tables in each step, padded to the longest, as in vLLM: from lists, later from arrays. Times of
# steps are those of `quire bench profile` on an H200, Llama-3-8B: 5.48 and 15.7 ms at 32 and 256 x 1,000 tokens.
TABLES = {  # way -> the paper's %, the rule and its words
    "padded lists": (30, near(), "30 in the paper"),
    "padded arrays": (10, near(), "as high as 10 in the paper"),
    "deltas": (None, at_most(1), "at most 1"),
    "none": (None, at_most(1), "at most 1"),
}

ENTRIES["vattention-x2"] = Entry(
    "vAttention §3.3.2: building page tables, as a share of a decode step",
    "table_building:tables",
    {"loads": {"32 x 1,000": [1000] * 32, "256 x 1,000": [1000] * 256, "16 x 16K": [16384] * 16,
               "4 x 32K beside 124 x 512": [32768] * 4 + [512] * 124},
     "step_ms": 3.93, "token_ms": 4.7e-5},
    claims=[
        Each("V-X2", f"tables as {{way}}: the most of a decode step ({{load}}; {words})", "share", "%", paper, rule,
             {"way": way}, derive=lambda points: highest(points, "share", "way"))
        for way, (paper, rule, words) in TABLES.items()
    ],
    tables=[
        Pivot(("load", "step_us"), "way", "us", ".0f", ", us"),
        Pivot(("load",), "way", "share", ".2f", ", %", title="Of a decode step:"),
    ],
    plot=bars("vAttention 3.3.2: building page tables, of a decode step", "load", "share", bar="way",
              label="% of a decode step", form="%.2g"),
    timed=True,
    why="The share depends on the lengths of the other sequences, which the paper does not give, and on the host's "
        "speed against the device's.",
)  # fmt: skip


def _speeds(points: Points) -> list[Point]:
    found = against("us", {"way": "mapped"}, "dtype", "kib", "context", "queries")(points)
    return [{**p, "line": f"{p['dtype']}, {p['kib']} KiB", "panel": f"{p['queries']} queries"} for p in found]


def _median_speeds(points: Points) -> list[Point]:
    groups: Sequence[list[Point]] = grouped(_speeds(points), "dtype", "kib")
    return [{**group[0], "ratio": median(point["ratio"] for point in group)} for group in groups]


ENTRIES["vattention-views"] = Entry(
    "vAttention §5.2: torch's attention over mapped pages, on a CPU",
    "attention_times:mapped_views",
    {"dtypes": ("float32", "bfloat16"), "kib": (64, 256), "contexts": (1024, 4096), "queries": (1, 256)},
    claims=[
        Each("V-M15", "{dtype}, pages of {kib} KiB: torch's attention over mapped pages / ordinary memory "
             "(about 1, within 3 %)", "ratio", "times the speed", 1.0, near(CLOSE), digits=3,
             derive=_median_speeds),
    ],
    tables=[Rows([
        ("numbers", "dtype"), ("KiB a page", "kib"), "context",
        "queries", ("ordinary us", "us", ".1f"),
        ("mapped us", lambda point: point["base"]["us"], ".1f"), ("speed", "ratio", ".3f"),
    ], derive=_speeds)],
    note="4 sequences, 8 heads of 64, a buffer a layer, one thread a core.",
    plot=lines("vAttention §5.2: torch's attention over mapped pages on a CPU", "context", "ratio", line="line",
               panel="panel", labels=("tokens", "times ordinary memory's speed"), log_x=True, bottom=None, of=_speeds),
    timed=True,
    why="Medians of alternating calls still vary by some per cent on a shared CPU.",
)  # fmt: skip
