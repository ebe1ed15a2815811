"""The entries of "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023), and
those about this project's memories as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from papers import block_tables, routing
from papers.code_size import KERNELS, MEASURING
from papers.entry import (
    ARITHMETIC,
    MINUTES,
    SIMULATED,
    Each,
    Entry,
    Pivot,
    Point,
    Points,
    Rows,
    Run,
    Spread,
    Whole,
    above,
    against,
    at_least,
    at_most,
    between,
    chosen,
    effect,
    equal,
    every,
    falls,
    goal,
    having,
    measured,
    near,
    over,
    truth,
)
from papers.equality import Sweep
from papers.plots import Panels, bars, lines, row, tall
from papers.rank_prediction import MAX_ERROR
from papers.serving import HOUR, KINDS, LIMIT, SEARCHED, SECONDS, SEED, SHOWN, SYSTEMS, TOLERANCE, Case, Load
from papers.side_by_side import Place, every_system
from papers.unlike_serving import H100
from papers.unlike_serving import Case as Unlike
from quire.bench.workloads import TRANSLATION
from quire.config import MEMORIES, EngineConfig

# fmt: off
VLLM, ORACLE, POW2, MAX, FT = SYSTEMS.values()
ORCAS = (ORACLE, POW2, MAX)
NAMES = {label: system for system, label in SYSTEMS.items()}
SHAREGPT, ALPACA = Load("a100-13b", "sharegpt"), Load("a100-13b", "alpaca")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens of a page
PAGE = "tokens of a page"
LATENCY = "normalised latency, s a token"
MEMORY = {"used": "token states", "reserved": "reserved", "internal": "internal fragmentation", "external": "external"}


def ms(field: str) -> Callable[[Point], float]:
    """Return a reader of a field in seconds, as milliseconds."""
    return lambda point: float(1000 * point[field])


# Figures 1, 2, 6, 7, 11 and 13: arithmetic, memory, batches

GROWTH = {MAX: (1, 2, 4, 6, 8), VLLM: (1, 2, 4, 8, 12, 16, 24, 32, 40, 48)}  # running requests, at most


def _vllm_over_orca(read: Callable[[Points], float]) -> Callable[[Points], float]:
    return lambda points: read(chosen(points, {"system": VLLM})) / read(chosen(points, {"system": MAX}))


FIGURE_1 = Entry(
    "PagedAttention Figure 1: memory of a 13B model, and its growth",
    "serving:memory_parts", {"load": SHAREGPT},
    also=[Run("serving:growth", {"cases": [
        Case({"system": system}, SHAREGPT._replace(settings={"max_num_seqs": most}), NAMES[system])
        for system, sizes in GROWTH.items() for most in sizes
    ]})],
    claims=[
        Each("P-F1", "parameters", "percent", "%", 65, near(), {"part": "parameters"}, digits=1, by=ARITHMETIC),
        Each("P-F1", "KV memory: the paper's 12 GiB of its 40 GB", "percent", "%", 30, near(), {"part": "KV memory"},
             digits=1, by=ARITHMETIC),
        Whole("P-F1", "memory of a request: vLLM / Orca (Max)",
              _vllm_over_orca(lambda points: points[0]["memory"] / points[0]["running"]), "ratio", by=SIMULATED),
        Whole("P-F1", "throughput: vLLM / Orca (Max), each at its best",
              _vllm_over_orca(lambda points: max(p["throughput"] for p in points)), "ratio", by=SIMULATED),
    ],
    tables=[
        Rows([("of 40 GB", "part"), ("%", "percent", ".1f")], having("part")),
        Rows(["system", ("running", "running", ".1f"), ("KV memory GB", "memory", ".1f"),
              ("tokens/s", "throughput", ".1f")], having("system")),
    ],
    note="The parts are arithmetic on the paper's sizes (Table 1); growth and throughput are simulated.",
    plot=row(
        "Figure 1: memory of OPT-13B, its growth and throughput by batch (ShareGPT, simulated)",
        bars("parts of 40 GB", "device", "percent", bar="part", label="% of the memory", stacked=True,
             of=lambda points: [{**p, "device": "A100"} for p in points if "part" in p]),
        lines("KV memory", "running", "memory", line="system", labels=("requests that run at once", "GB")),
        lines("throughput", "running", "throughput", line="system", labels=("requests that run at once", "tokens/s")),
    ),
)

COMPARED = (MAX, POW2, ORACLE, VLLM)


def cases(panels: Mapping[str, Load], systems: Sequence[str], seconds: float, rate: float = 0.0) -> list[Case]:
    """Return a case for each panel, which names a load, and system."""
    return [Case({"panel": panel, "system": system}, load, NAMES[system], seconds, rate)
            for panel, load in panels.items() for system in systems]


def _of_the_orcas(points: Points, which: Callable[[Iterable[float]], float]) -> float:
    return which(point["used"] for point in points if point["system"] != VLLM)


FIGURE_2 = Entry(
    "PagedAttention Figure 2: what the KV memory of each system holds",
    "serving:steady", {"cases": cases({"": SHAREGPT}, COMPARED, SECONDS, 2.0)},
    full={"cases": cases({"": SHAREGPT}, COMPARED, HOUR, 2.0)},
    claims=[
        *(Whole("P-F2", f"{name} of the Orcas: token states", partial(_of_the_orcas, which=which), "%", paper,
                near(), 1) for name, which, paper in (("least", min, 20.4), ("most", max, 38.2))),
        Each("P-F2", "vLLM: token states", "used", "%", 96.3, near(), {"system": VLLM}, digits=1),
        truth("P-F2", "token states: Orca (Max) < Orca (Pow2) < Orca (Oracle) < vLLM",
              falls("used", [{"system": system} for system in reversed(COMPARED)])),
    ],
    tables=[Rows(["system", *((label, kind, ".1f") for kind, label in MEMORY.items())])],
    note="OPT-13B, 2 requests/s; % of the memory that isn't free.",
    plot=bars("Figure 2: KV memory that isn't free (OPT-13B, ShareGPT, simulated)\nthe paper's: least and most of "
              "Orca, and vLLM", "system", "value", bar="line", stacked=True, label="%", form="%.1f", of=tall(MEMORY),
              paper=lambda point: {MAX: 20.4, ORACLE: 38.2, VLLM: 96.3}.get(point["system"])),
    by=SIMULATED,
    why="Lengths are log-normal with the paper's means; their spread decides how much of a reservation is filled.",
)

A = ["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought", "forth"]
B = ["It", "was", "the", "best", "of", "times", "it", "was"]
TABLE = "(physical block, filled)"


def _replay(title: str, about: str, requests: list[block_tables.Scripted], free: list[int], *claims: Whole) -> Entry:
    return Entry(
        f"PagedAttention {title}: the block {about}",
        "block_tables:replay", {"requests": requests, "free": free, "steps": 3}, claims=claims,
        tables=[Rows(["step", "request", "logical", "physical", "filled", "tokens"])],
        plot=partial(block_tables.draw, f"{title}: the block {about}"),
    )


def _table_after(row: str, what: str, step: int, request: str, paper: list[list[int]]) -> Whole:
    def read(points: Points) -> list[list[int]]:
        return [[p["physical"], p["filled"]] for p in chosen(points, {"step": step, "request": request})]

    return Whole(row, f"block table {what}: {TABLE}", read, "", paper, equal)


FIGURE_6 = _replay(
    "Figure 6", "table of one request", [block_tables.Scripted("A", A, 7, 0)], [7, 1, 3, 0, 2, 4, 5, 6, 8],
    _table_after("P-F6", "after the prompt", 1, "A", [[7, 4], [1, 3]]),
    _table_after("P-F6", "after the 1st decoding step", 2, "A", [[7, 4], [1, 4]]),
    _table_after("P-F6", "after the 2nd decoding step", 3, "A", [[7, 4], [1, 4], [3, 1]]),
)
FIGURE_7 = _replay(
    "Figure 7", "tables of two requests", [block_tables.Scripted("A", A, 7, 0), block_tables.Scripted("B", B, 5, 1)],
    [7, 1, 5, 2, 3, 0, 4, 6, 8],
    _table_after("P-F7", "of request A", 3, "A", [[7, 4], [1, 4], [3, 1]]),
    _table_after("P-F7", "of request B", 3, "B", [[5, 4], [2, 2]]),
)

MEANS = {("sharegpt", "prompt"): 161, ("sharegpt", "output"): 338, ("alpaca", "prompt"): 19, ("alpaca", "output"): 58}


def _papers_mean(point: Point) -> int:
    return MEANS[point["workload"], point["length"]]


FIGURE_11 = Entry(
    "PagedAttention Figure 11: length distributions",
    "closed_forms:lengths", {"longest": {"sharegpt": 2000, "alpaca": 250}, "count": 50_000, "bins": 50},
    claims=[
        Each("P-F11", "{workload}: mean {length} length, chosen to match", "mean", "tokens", _papers_mean,
             where=having("mean"), digits=1)
    ],
    tables=[Rows(["workload", "length", ("paper's mean", _papers_mean), ("ours", "mean", ".1f")], having("mean"))],
    note="The data sets aren't used: log-normal lengths, cut to a context of 2,048 tokens, have their means.",
    plot=lines("Figure 11: lengths of prompts and outputs", "tokens", "density", line="length", panel="workload",
               labels=("tokens", "density"), of=lambda points: chosen(points, having("density"))),
)

BATCHES = {
    "ShareGPT": {VLLM: 30.42, ORACLE: 13.62, POW2: 9.81, MAX: 7.00},
    "Alpaca": {VLLM: 132.44, ORACLE: 72.75, POW2: 43.24, MAX: 7.00},
}
INPUT = "(its batch is an input)"


def _batches(seconds: float) -> list[Case]:
    return [*cases({"ShareGPT": SHAREGPT}, (VLLM, *ORCAS), seconds, 2.0),
            *cases({"Alpaca": ALPACA}, (VLLM, *ORCAS), seconds, 30.0)]


def _papers_batch(point: Point) -> float:
    return BATCHES[point["panel"]][point["system"]]


def _batch_ratio(panel: str, system: str) -> float:
    return round(BATCHES[panel][VLLM] / BATCHES[panel][system], 2)


# The A100's host times were derived from vLLM's batches by Little's law, with the paper's mean output of 338 tokens.
FIGURE_13 = Entry(
    "PagedAttention Figure 13: requests that run at once",
    "serving:steady", {"cases": _batches(SECONDS)}, full={"cases": _batches(HOUR)},
    claims=[
        Each("P-F13", f"{{panel}}: requests that run at once, {{system}} {INPUT}", "running", "requests", _papers_batch,
             where={"system": VLLM}),
        Each("P-F13", "{panel}: requests that run at once, {system}", "running", "requests", _papers_batch,
             near(), lambda point: point["system"] != VLLM),
        *(Whole("P-F13", f"{panel}: vLLM / {system} {INPUT}",
                over("running", {"panel": panel, "system": VLLM}, {"panel": panel, "system": system}), "ratio",
                _batch_ratio(panel, system)) for panel in BATCHES for system in (ORACLE, MAX)),
        *(Whole("P-F13", f"{panel}: vLLM > Orca (Oracle) > Orca (Pow2) > Orca (Max) {INPUT}",
                falls("running", [{"panel": panel, "system": system} for system in (VLLM, *ORCAS)]), "", True)
          for panel in BATCHES),
    ],
    tables=[Pivot(("system",), "panel", "running", ".2f")],
    note="OPT-13B: averages over time after the first tenth of the trace. The A100's host times were derived from\n"
         "vLLM's own two batches, so its rows, and ratios to them, say only that lengths agree.",
    plot=bars("Figure 13: requests that run at once (OPT-13B, simulated)", "system", "running", panel="panel",
              label="requests that run at once", paper=_papers_batch),
    by=SIMULATED,
)

# Figures 12, 14, 16 and 17: rates that systems sustain


def rate_ratio(panel: str, system: str, mine: str = VLLM) -> Callable[[Points], Any]:
    """Return a function that divides the rates that two systems sustain, seed by seed: both got the same requests."""
    return over("sustained", {"panel": panel, "system": mine}, {"panel": panel, "system": system})


def order(panels: Iterable[str], systems: Sequence[str], factor: float = 1.0) -> Callable[[Points], bool]:
    """Return a function that tells whether sustained rates fall from system to system in each panel."""
    return every(falls("sustained", [{"panel": panel, "system": system} for system in systems], factor)
                 for panel in panels)


def worst(which: Callable[[list[float]], float], panels: Sequence[str], system: str) -> Callable[[Points], Spread]:
    """Return a function that chooses from the panels' ratios of vLLM's rate to a system's, seed by seed."""

    def ours(points: Points) -> Spread:
        rates = {(p["panel"], p["system"]): p["sustained"] for p in points if "sustained" in p}
        ratios = [[a / b for a, b in zip(rates[panel, VLLM], rates[panel, system])] for panel in panels]
        return Spread.of([which(list(of)) for of in zip(*ratios)])

    return ours


SUSTAINED = Rows([
    "panel", "system", ("requests/s", lambda p: Spread.of(p["sustained"]).mean, ".3g"),
    ("by seed", lambda p: f"{min(p['sustained']):.3g}-{max(p['sustained']):.3g}"),
    (f"at {LIMIT / 2:g} s", "half", ".3g"), ("running", "running", ".1f"),
    ("ms a step", ms("step"), ".1f"), ("preempted", "preemptions"),
], having("sustained"))
SUSTAINED_NOTE = f"""Sustained: mean normalised latency of at most {LIMIT:g} s a token; means and ranges over seeds. The
rate at half of that latency is the first seed's, as are running requests and steps, at the sustained rate."""


def curves(title: str, top: float = SHOWN) -> Panels:
    """Plot latency by rate."""
    return lines(f"{title} (dotted: sustained up to here)", "rate", "latency", line="system", panel="panel",
                 labels=("requests/s", LATENCY), limit=LIMIT, top=top, of=lambda points: chosen(points, having("rate")))


PANELS = {  # the load, seconds of its traces, and with --full
    "(a) OPT-13B, ShareGPT": (SHAREGPT, SEARCHED, HOUR),
    "(b) OPT-66B, ShareGPT": (Load("a100-66b", "sharegpt"), SEARCHED, HOUR),
    "(c) OPT-175B, ShareGPT": (Load("a100-175b", "sharegpt"), SEARCHED, 900.0),
    "(d) OPT-13B, Alpaca": (ALPACA, SEARCHED / 2, HOUR),
    "(e) OPT-66B, Alpaca": (Load("a100-66b", "alpaca"), SEARCHED / 2, HOUR),
    "(f) OPT-175B, Alpaca": (Load("a100-175b", "alpaca"), SEARCHED / 2, 900.0),
}
A_TO_C, OTHERS = tuple(PANELS)[:3], tuple(PANELS)[3:]
DIVIDED: dict[str, Any] = {"tp": 4, "pp": 2}  # a stage of four GPUs on each of two nodes
ON_NODES = {
    f"({panel}) {model.upper()}, {name}, 2 x 4 H200s": (
        Load("h200-opt-13b", workload, model, settings={**DIVIDED, "kv_tokens": slots}), seconds
    )
    for panel, model, name, workload, slots, seconds in (
        ("b", "opt-66b", "ShareGPT", "sharegpt", 9_700, SEARCHED / 2),
        ("c", "opt-175b", "ShareGPT", "sharegpt", 60_100, SEARCHED / 2),
        ("e", "opt-66b", "Alpaca", "alpaca", 9_700, SEARCHED / 4),
        ("f", "opt-175b", "Alpaca", "alpaca", 60_100, SEARCHED / 4),
    )
}
RANGES = {ORACLE: (1.7, 2.7), MAX: (2.7, 8.0)}  # §6.2: vLLM's rate / another system's, of the ShareGPT panels
MOST_FT = 22.0  # of the ShareGPT panels


def _rates_of(panel: str, system: str) -> Whole:
    what, ours = f"{panel}: vLLM / {system}", rate_ratio(panel, system)
    if panel in A_TO_C and system in RANGES:
        low, high = RANGES[system]
        return Whole("P-F12", what, ours, "ratio", f"{low:g} - {high:g}", between(low, high))
    if panel == OTHERS[0] and system == ORACLE:
        return Whole("P-F12", what, ours, "ratio", 1.3, effect())  # §6.3
    return Whole("P-F12", what, ours, "ratio")


def _most_at_half(points: Points) -> float:
    return max(float(over("half", {"panel": p, "system": VLLM}, {"panel": p, "system": FT})(points)) for p in A_TO_C)


def _least_advantage(points: Points) -> bool:
    return min(PANELS, key=lambda panel: rate_ratio(panel, ORACLE)(points).mean) == OTHERS[-1]


OF_ALL = [
    Whole("P-F12", "the most of (a) to (c): vLLM / FasterTransformer", worst(max, A_TO_C, FT), "ratio",
          MOST_FT, effect()),
    Whole("P-F12", f"the same where latency is {LIMIT / 2:g} s a token, first seed", _most_at_half, "ratio"),
    truth("P-F12", "each panel: vLLM > Orca (Oracle) > Orca (Pow2) > Orca (Max) > FasterTransformer",
          order(PANELS, tuple(NAMES))),
    truth("P-F12", "(f): the least advantage over Orca (Oracle)", _least_advantage),
    *(Whole("P-X3", f"vLLM / {system}, median of all panels; the paper doesn't say which Orca",
            worst(median, tuple(PANELS), system), "ratio", "2 - 4", between(2.0, 4.0)) for system in ORCAS),
]


def _figure_12(about: str, panels: Sequence[str], part_of: str | None = None) -> Entry:
    """Return the entry of some panels. Statements about several panels are judged if all are run."""
    here, full = [], []
    for panel in panels:
        load, seconds, most = PANELS[panel]
        here += cases({panel: load}, tuple(NAMES), seconds)
        full += cases({panel: load}, tuple(NAMES), most)
    return Entry(
        f"PagedAttention Figure 12{about}", "serving:curves", {"cases": here}, full={"cases": full}, part_of=part_of,
        claims=[*(_rates_of(panel, system) for panel in panels for system in (*ORCAS, FT)),
                *([] if part_of else OF_ALL)],
        tables=[SUSTAINED],
        note=f"""{SUSTAINED_NOTE}
Memory decides how many requests run at once, the device what that is worth. Our A100s add matrix operations and the
host's time for each row in full to reading the weights, and count no latency of all-reduces between GPUs: with the
hundred rows of (c) a step takes so much longer that the advantage falls below that in requests. The paper doesn't say
whether its steps did. A static batch has no knee: its latency rises from the lowest rates on, so the gap to
FasterTransformer depends on the latency at which it is read, as it doesn't for the others. The host's time of vLLM's
steps is charged to FasterTransformer's too, which has no such scheduler.""",
        plot=curves("Figure 12: latency by request rate, simulated"),
        by=SIMULATED,
        takes=MINUTES,
        why="At 175B the cost model adds the host's time for each row, so a larger batch is worth less. A static batch "
            "has no knee, so FasterTransformer's factor depends on the latency at which it is read. Alpaca's lengths "
            "are log-normal.",
    )


FIGURE_12_NODES = Entry(
    "PagedAttention Figure 12b, c, e, f: OPT-66B and OPT-175B divided among two nodes of four H200s", "serving:curves",
    {"cases": [one for panel, (load, s) in ON_NODES.items() for one in cases({panel: load}, (VLLM, ORACLE), s)]},
    claims=[Whole("P-R3", f"{panel}: vLLM / {ORACLE}", rate_ratio(panel, ORACLE), "ratio") for panel in ON_NODES],
    tables=[SUSTAINED],
    note=f"""{SUSTAINED_NOTE}
KV has the slots of Table 1. The device is an H200 as quire was calibrated on, with our own host's time; the four ranks
of a stage add up over NVLink, as measured on two H200s, and stages exchange rows at NVLink's rate: a network between
nodes is slower, by 2 x 12,288 x 2 bytes a token.""",
    plot=curves("Figure 12 on two nodes of four H200s: latency by request rate, simulated"),
    by=SIMULATED,
    takes=MINUTES,
)


WIDTHS = (2, 4, 6)
BASIC = "basic sampling"
PARALLEL = [f"parallel sampling, {width} samples" for width in WIDTHS]
BEAM = [f"beam search, {width} beams" for width in WIDTHS]
DECODED = {
    BASIC: ALPACA,
    **{panel: ALPACA._replace(width=width) for width, panel in zip(WIDTHS, PARALLEL)},
    **{panel: ALPACA._replace(width=width, beams=True) for width, panel in zip(WIDTHS, BEAM)},
}
GAPS = {BASIC: 1.3, BEAM[-1]: 2.3}  # vLLM's rate / Orca (Oracle)'s
SAVED = dict(zip((*PARALLEL, *BEAM), (6.1, 8.5, 9.8, 37.6, 53.1, 55.2)))  # Figure 15, Alpaca: per cent of pages
ERROR = (1 + TOLERANCE) ** 2  # of a ratio of two gaps: each gap is a ratio of rates, each rate found to TOLERANCE


def gap(points: Points, panel: str) -> float:
    """Return vLLM's rate / Orca (Oracle)'s."""
    return float(rate_ratio(panel, ORACLE)(points).mean)


def _gap_grows(points: Points, panels: Sequence[str]) -> bool:
    gaps = [gap(points, panel) for panel in (BASIC, *panels)]
    return all(low <= high * ERROR for low, high in pairwise(gaps)) and gaps[-1] > gaps[0] * ERROR


def _prompts_share(points: Points) -> float:
    """Return the prompts' per cent of KV in parallel sampling: of n samples that share a prompt, n - 1 save it."""
    saved: dict[str, float] = {p["panel"]: p["saved"] for p in points if "saved" in p}
    return sum(saved[panel] * width / (width - 1) for width, panel in zip(WIDTHS, PARALLEL)) / len(WIDTHS)


FIGURE_14 = Entry(
    "PagedAttention Figure 14: parallel sampling and beam search",
    "serving:curves", {"cases": cases(DECODED, (VLLM, *ORCAS), 100.0), "seeds": (SEED,)},
    full={"cases": cases(DECODED, (VLLM, *ORCAS), SECONDS)},
    claims=[
        *(Whole("P-F14", f"{panel}: rate of vLLM / Orca (Oracle)", partial(gap, panel=panel), "times",
                GAPS.get(panel), effect() if panel in GAPS else measured)
          for panel in DECODED),
        *(truth("P-F14", f"{way}: the gap to Orca (Oracle) grows with the sequences, by more than the searches' error",
                partial(_gap_grows, panels=panels)) for way, panels in (("parallel", PARALLEL), ("beam", BEAM))),
        truth("P-F14", "beam search widens the gap more than parallel sampling",
              lambda points: all(gap(points, beams) > gap(points, samples) * ERROR
                                 for beams, samples in zip(BEAM, PARALLEL))),
        truth("P-F14", "vLLM > Orca (Oracle) > Orca (Pow2) > Orca (Max) everywhere",
              order(DECODED, (VLLM, *ORCAS), 1 + TOLERANCE)),
        Each("P-F15", "{panel}: pages saved while serving", "saved", "%", lambda p: SAVED[p["panel"]],
             near(), having("saved"), digits=1),
        Whole("P-X2", "parallel sampling: prompts' share of KV", _prompts_share, "%", 12.0, near(), 1),
    ],
    tables=[SUSTAINED],
    note=f"{SUSTAINED_NOTE} OPT-13B, Alpaca-like lengths, one seed. Beams\n"
         "fork as in real searches of the bundled model; Orca's memories hold the KV of every sequence separately and\n"
         "copy it where a beam forks (§4.4).",
    plot=curves("Figure 14: parallel sampling and beam search (OPT-13B, Alpaca, simulated)", 2 * LIMIT),
    by=SIMULATED,
    takes=MINUTES,
    why="Lengths are log-normal with Alpaca's means, and beams fork as in searches of the bundled model, not of "
        "OPT-13B.",
)

# LLaMA-13B in the memory of OPT-13B. In vLLM's memory the prefix is registered: computed in advance, and held once
# (§4.4, Figure 10). Orca holds and computes it for every request.
EXAMPLES = {"wmt1shot": ("one example", 1.67), "wmt5shot": ("five examples", 3.58)}  # vLLM's rate / Orca (Oracle)'s
TRANSLATED = {name: f"{about}, {TRANSLATION[name]} tokens" for name, (about, _) in EXAMPLES.items()}
REGISTERED, APART = f"{VLLM}, prefix registered", f"{VLLM}, each with its own prefix"


def _translations(seconds: float, ways: Sequence[str], stretches: Sequence[float] = (1.0,)) -> list[Case]:
    return [
        Case({"panel": TRANSLATED[name], "system": way, **({"stretch": stretch} if len(stretches) > 1 else {})},
             Load("a100-13b", name, "llama-13b", 12.0, TRANSLATION[name] if way == REGISTERED else 0, stretch),
             NAMES.get(way, "paged"), seconds)
        for stretch in stretches for name in EXAMPLES for way in ways
    ]


def _stretched(name: str, stretch: float) -> Whole:
    of = {"panel": TRANSLATED[name], "stretch": stretch}
    what = f"{EXAMPLES[name][0]}, sentences {stretch:g} times as long, all at once: vLLM / Orca (Oracle)"
    return Whole("P-F16", what, over("capacity", {**of, "system": REGISTERED}, {**of, "system": ORACLE}), "ratio")


FIGURE_16 = Entry(
    "PagedAttention Figure 16: translation, a prefix shared",  # requests take seconds here, not half a minute
    "serving:curves", {"cases": _translations(SEARCHED / 5, (REGISTERED, APART, ORACLE))},
    full={"cases": _translations(HOUR / 5, (REGISTERED, APART, ORACLE))},
    also=[Run("serving:bursts", {"cases": _translations(0.0, (REGISTERED, ORACLE), (1.0, 1.5))})],
    claims=[
        *(Whole("P-F16", f"{TRANSLATED[name]}: vLLM / Orca (Oracle)",
                rate_ratio(TRANSLATED[name], ORACLE, REGISTERED), "ratio", paper, effect())
          for name, (_, paper) in EXAMPLES.items()),
        *(Whole("P-F16", f"{panel}: vLLM / Orca (Oracle), each with its own prefix", rate_ratio(panel, ORACLE, APART),
                "ratio") for panel in TRANSLATED.values()),
        *(_stretched(name, stretch) for stretch in (1.0, 1.5) for name in EXAMPLES),
        truth("P-F16", "a longer prefix, more gain", lambda points: round(
            rate_ratio(TRANSLATED["wmt5shot"], ORACLE, REGISTERED)(points).mean, 2
        ) > round(rate_ratio(TRANSLATED["wmt1shot"], ORACLE, REGISTERED)(points).mean, 2)),
    ],
    tables=[SUSTAINED],
    note=f"{SUSTAINED_NOTE} The paper doesn't give the lengths of\n"
         "WMT16's sentences in tokens; ours have 28 on average, and translations 36. The longer they are, the less of\n"
         "a request is its prefix: see the ratios with longer ones.",
    plot=curves("Figure 16: translation with a shared prefix (LLaMA-13B, simulated)"),
    by=SIMULATED,
    why="The paper gives no sentence lengths, and the gain falls as they grow: with sentences half as long again it "
        "is about the paper's.",
)

CHAT = {"chat": Load("a100-13b", "chat")}


def _orcas_apart(points: Points) -> Spread:
    """Return (highest - lowest) / lowest of the Orcas' rates, in per cent."""
    rates = [p["sustained"] for p in points if "sustained" in p and p["system"] in ORCAS]
    return Spread.of([100 * (max(of) / min(of) - 1) for of in zip(*rates)])


# Prompts are the last 1,024 tokens of history and query, and no KV is kept between rounds (§6.5). The buddy allocator
# rounds 1,024 tokens and any output up to 2,048, so that Orca's knowledge of output lengths has no effect.
FIGURE_17 = Entry(
    "PagedAttention Figure 17: chatbot",
    "serving:curves", {"cases": cases(CHAT, (VLLM, *ORCAS), SEARCHED)},
    full={"cases": cases(CHAT, (VLLM, *ORCAS), HOUR)},
    claims=[
        *(Whole("P-F17", f"vLLM / {orca}", rate_ratio("chat", orca), "ratio", 2.0, effect())
          for orca in ORCAS),
        Whole("P-F17", "the three Orcas alike: their rates differ by (at most 10%)", _orcas_apart, "%", "similar",
              at_most(10.0), 1),
    ],
    tables=[SUSTAINED],
    note=f"{SUSTAINED_NOTE} Two thirds of the prompts have\n"
         "all 1,024 tokens. Long contexts are read in every step, and every system computes every prompt, so more\n"
         "requests at once make steps longer. The Orcas differ by the prompts that are shorter than 1,024 tokens.",
    plot=curves("Figure 17: chatbot (OPT-13B, simulated)"),
    by=SIMULATED,
    why="In the cost model the host's time and attention grow with the rows, so twice the batch brings less than "
        "twice the rate.",
)

# Figures 12a and 13a on a GPU: batches and ratios between systems can be compared with the paper

ON_A_GPU = Place(
    EngineConfig(
        model_config="opt-13b", dummy_weights=True, dtype="float16", device="cuda", kv_gib=12.0, max_num_seqs=128,
        enable_prefix_caching=False, preemption="recompute", swap_gib=0.0, skip_tokenizer_init=True,
    ),
    Load("h200-opt-13b", "sharegpt"),
)
OF_REAL, OF_SIMULATED = {"by": "real"}, {"by": "simulated"}
OFF = {"tokens_per_s": "throughput", "batch": "mean batch", "latency": "normalised latency"}


def _step_ms(point: Point) -> float:
    """Return the mean milliseconds of a step, of a run that always had requests."""
    return float(1000 * point["seconds"] / point["steps"])


def _within(capacity: bool) -> Callable[[Point], bool]:
    return lambda point: point["by"] == "real" and (point["share"] < 1) == capacity


def _errors(row: str) -> list[Each]:
    """Judge the simulation: above capacity by its throughput, within capacity by its latency, since throughput equals
    the offered rate there whatever a step costs."""
    return [
        Each(row, f"{{system}} at {{rate:.2f}}/s: simulated {what}, off by{' (limit: 0.15)' if judged else ''}",
             f"{name}_off", "share", None, between(-0.15, 0.15) if judged else measured, _within(within), digits=3)
        for within, which in ((True, "latency"), (False, "tokens_per_s"))
        for name, what in OFF.items() for judged in [name == which]
    ]


RUNS = Rows([
    "system", "by", ("requests/s", "rate", ".2f"), ("mean batch", "batch", ".2f"),
    ("running", "running", ".2f"), ("output tok/s", "tokens_per_s", ".0f"),
    ("normalised ms", ms("latency"), ".1f"), "requests", "unfinished", ("preempted", "preemptions"),
    *((f"{kind} %", kind, ".1f") for kind in (*KINDS, "free")),
])
PADDING = "FasterTransformer's batches compute their padding: prompts to the longest, ended sequences to the last."
FIGURE_13_GPU = Entry(
    "PagedAttention Figure 13a on a GPU, every system",
    "side_by_side:one_rate", {"ways": every_system(ON_A_GPU), "of": ("a100-13b", 2.0), "ramp": 8.0, "seconds": 60.0},
    full={"seconds": 180.0},
    claims=[
        Each("P-F13", "requests a second, scaled from 2", "rate", "/s", where={**OF_SIMULATED, "system": VLLM},
             by=SIMULATED),
        Each("P-F13", "{system}: mean batch", "batch", "rows", BATCHES["ShareGPT"], near(), OF_REAL, "system"),
        Each("P-F13", "{system}: mean batch", "batch", "rows", where=OF_SIMULATED, by=SIMULATED),
        *(Whole("P-F13", f"batch of vLLM (paged) / {orca}",
                over("batch", {**OF_REAL, "system": VLLM}, {**OF_REAL, "system": orca}), "times",
                _batch_ratio("ShareGPT", orca), effect()) for orca in ORCAS),
        *_errors("P-F13"),
        Each("P-F13", "{system}: KV memory with token states", "used", "%", where=OF_REAL, digits=1),
    ],
    tables=[RUNS],
    note=PADDING,
    plot=row(
        "Figure 13a: requests in a batch (mark: the paper's, on an A100)",
        bars("mean batch", "system", "batch", bar="by", label="rows a step", form="%.1f",
             paper=lambda point: BATCHES["ShareGPT"].get(point["system"]),
             of=lambda points: [p for p in points if p["by"] in ("real", "simulated")]),
        bars("KV memory (real)", "system", "value", bar="line", stacked=True, label="%", form="%.1f",
             of=lambda points: tall(MEMORY)(chosen(points, OF_REAL))),
    ),
    gpu=True, timed=True,
    takes=MINUTES,
    why="Lengths are log-normal with the paper's means: reservations for a known output, rounded up to a power of "
        "two, hold fewer of them.",
)


def _beyond(system: str, by: str, row: str = "P-F12", share: float = 1.3, workload: str = "sharegpt") -> Whole:
    """Compare the rates that are served at `share` times the capacity. The paper's ranges are of ShareGPT."""
    of = {"by": by, "share": share}
    ratio = over("served", {**of, "system": VLLM}, {**of, "system": system})

    def ours(points: Points) -> Any:
        ran = {point["system"] for point in chosen(points, of)}
        return ratio(points) if ran >= {VLLM, system} else None

    claim = Whole(row, f"rate of vLLM (paged) / {system}", ours, "times", by=by)
    if row == "P-F17" and by == "real" and system in ORCAS:
        return claim._replace(paper=2.0, rule=effect())
    if row != "P-F12" or workload != "sharegpt":
        return claim
    if by == "real" and system == FT:
        return claim._replace(paper=f"up to {MOST_FT:g}, of (a) to (c)")
    if by == "real" and system in RANGES:
        low, high = RANGES[system]
        return claim._replace(paper=f"{low:g}-{high:g}", rule=between(low, high))
    return claim


FIGURE_12A_GPU = Entry(
    "PagedAttention Figure 12a on a GPU, every system",
    "side_by_side:by_rate",
    {"ways": every_system(ON_A_GPU), "shares": (0.5, 0.8, 1.0, 1.15, 1.3), "real": (0.8, 1.3), "ramp": 8.0,
     "requests": 120, "least": 30.0, "most": 60.0, "drain": 6.0},
    full={"requests": 600, "least": 60.0, "most": 240.0},
    claims=[
        Each("P-F12", "{system}: requests/s served beyond capacity", "served", "/s", where={**OF_REAL, "share": 1.3}),
        Each("P-F12", "{system}: normalised latency at {rate:.2f}/s", ms("latency"), "ms",
             where={**OF_REAL, "share": 0.8}, digits=1),
        *(_beyond(system, by) for system in (*ORCAS, FT) for by in ("real", "simulated")),
        *_errors("P-F12"),
    ],
    tables=[RUNS],
    note=PADDING,
    plot=row("Figure 12a: OPT-13B, ShareGPT", *(
        lines(by, "rate", y, line="system", labels=("requests/s", label), of=partial(chosen, where={"by": by}))
        for y, label in (("latency", LATENCY), ("tokens_per_s", "output tokens/s")) for by in ("simulated", "real")
    ), columns=2),
    gpu=True, timed=True,
    takes=MINUTES,
    why="Near its capacity a system's latency multiplies a small error of the step's time.",
)



def _beyond_on_a_gpu(row_id: str, about: str, place: Place, simulated: bool = True) -> Entry:
    """Return an entry that compares the systems beyond the capacity of each: at 1.3 times what is simulated, or, if
    the calibration is that of a slower device, at BEYOND_ALL times."""
    share = 1.3 if simulated else BEYOND_ALL
    return Entry(
        f"PagedAttention {about}", "side_by_side:by_rate",
        {"ways": every_system(place), "shares": (share,), "real": (share,), "ramp": 8.0,
         "requests": 120, "least": 30.0, "most": 60.0, "drain": 6.0},
        full={"requests": 600, "least": 60.0, "most": 240.0},
        claims=[
            *(_beyond(system, by, row_id, share, place.load.workload) for system in (*ORCAS, FT)
              for by in ("real", "simulated")[: 1 + simulated]),
            *(_errors(row_id) if simulated else ()),
        ],
        tables=[RUNS],
        note=PADDING,
        plot=bars(about, "system", "served", bar="by", label="requests/s served", form="%.2f"),
        gpu=True, timed=True,
        takes=MINUTES,
        why="An H200 in the memory of the paper's A100 has more bandwidth for each request that runs.",
    )


BEYOND_ALL = 3.0  # two H200s have 1.5 times the bandwidth of four A100s of 40 GB, and more operations
OPT_66B = replace(ON_A_GPU.config, model_config="opt-66b", tp=2, kv_gib=21.0)
FIGURE_12B_GPU, FIGURE_12E_GPU = (
    _beyond_on_a_gpu("P-F12", f"{about} on two GPUs", Place(OPT_66B, Load("a100-66b", workload)), simulated=False)
    for about, workload in (("Figure 12b: OPT-66B, ShareGPT,", "sharegpt"), ("Figure 12e: OPT-66B, Alpaca,", "alpaca"))
)
# OPT-175B on eight H200s, with the KV slots of Table 1: every system in turn over one runner. The rate beyond capacity
# comes first, since runs for which no time is left are left out.
EIGHT: dict[str, Any] = {
    "model": "opt-175b", "workload": "sharegpt", "tp": 8, "kv_tokens": 60_112, "device": "cuda", "dtype": "float16",
    "calibration": "h200-opt-13b", "shares": (), "real": (1.3, 0.8), "ramp": 12.0, "seconds": 50.0, "drain": 5.0,
    "minutes": 9.0,
}
EIGHT_ALPACA = {**EIGHT, "workload": "alpaca", "seconds": 38.0, "drain": 3.0}
EIGHT_PREDICTED = {"shares": (0.5, 0.8, 1.0, 1.15, 1.3), "real": ()}
EIGHT_NAMES = {"sharegpt": "(c) ShareGPT", "alpaca": "(f) Alpaca"}
EIGHT_NOTE = """KV has the slots of the paper's Table 1, unless `--set` changed them. Runs are measured from the 12th
second on. The simulation's device is an H200 as calibrated with OPT-13B. Ranks add up as measured on two H200s; sums of
more of them take what `Links` says (sim/cost_model.py), which wasn't measured."""


def _knees(workload: str, system: str) -> Whole:
    """Compare the highest rates of vLLM and `system` that keep LIMIT, on eight GPUs."""
    of = {"workload": workload, "system": VLLM}
    return Whole("P-F12", f"{EIGHT_NAMES[workload]}: vLLM / {system}, at {LIMIT:g} s a token",
                 over("knee", of, {**of, "system": system}), "ratio")


FIGURE_12_TP8 = Entry(
    "PagedAttention Figure 12c, f: OPT-175B on eight H200s, before it ran",
    "side_by_side:panel", {**EIGHT, **EIGHT_PREDICTED, "knees": SEARCHED},
    also=[Run("side_by_side:panel", {**EIGHT_ALPACA, **EIGHT_PREDICTED, "knees": SEARCHED / 2})],
    claims=[_knees(workload, system) for workload in EIGHT_NAMES for system in ORCAS],
    tables=[
        Rows(["workload", "model", "tp", ("KV tokens", "kv_tokens"), "system",
              ("requests/s, all at once", "capacity", ".2f"), (f"at {LIMIT:g} s a token", "knee", ".2f")],
             having("knee")),
        Rows(["workload", "system", ("of capacity", "share"), ("requests/s", "rate", ".2f"),
              ("served", "served", ".2f"), ("running", "running", ".1f"), ("ms a step", _step_ms, ".1f"),
              ("normalised ms", ms("latency"), ".1f"), ("preempted", "preemptions")], having("share")),
    ],
    note=EIGHT_NOTE,
    plot=lines("OPT-175B on eight H200s: latency by request rate, simulated", "rate", "latency", line="system",
               panel="workload", labels=("requests/s", LATENCY), of=lambda points: chosen(points, having("share"))),
    by=SIMULATED,
    takes=MINUTES,
)


def _on_eight(letter: str, params: Mapping[str, Any], full: float) -> Entry:
    """Return the entry of a panel of Figure 12 on eight GPUs. `full`: the seconds of each run with --full."""
    return Entry(
        f"PagedAttention Figure 12{letter}: OPT-175B, {EIGHT_NAMES[params['workload']][4:]}, on eight GPUs",
        "side_by_side:panel", params, full={"seconds": full, "minutes": 60.0},
        claims=[
            *(_beyond(system, by, workload=params["workload"]) for system in ORCAS for by in ("real", "simulated")),
            Each("P-F12", "{system}: requests/s served at {rate:.2f}/s", "served", "/s",
                 where={**OF_REAL, "share": 1.3}),
            Each("P-F12", "{system}: normalised latency at {rate:.2f}/s", ms("latency"), "ms",
                 where={**OF_REAL, "share": 0.8}, digits=1),
            *_errors("P-F12"),
        ],
        tables=[RUNS],
        note=EIGHT_NOTE,
        plot=row(f"Figure 12{letter}: OPT-175B on eight H200s", *(
            lines(by, "rate", "latency", line="system", labels=("requests/s", LATENCY),
                  of=partial(chosen, where={"by": by}))
            for by in ("simulated", "real")
        )),
        gpu=True, timed=True,
        takes=MINUTES,
        why="An H200 has more bandwidth for each request that runs, and sums over eight ranks were predicted from two.",
    )


FIGURE_12C_GPU, FIGURE_12F_GPU = _on_eight("c", EIGHT, 180.0), _on_eight("f", EIGHT_ALPACA, 90.0)
FIGURE_14_GPU = _beyond_on_a_gpu(
    "P-F14", "Figure 14 on a GPU: parallel sampling, 6 samples",
    ON_A_GPU._replace(load=Load("h200-opt-13b", "alpaca", width=6)),
)
FIGURE_17_GPU = _beyond_on_a_gpu(
    "P-F17", "Figure 17 on a GPU: chatbot", ON_A_GPU._replace(load=Load("h200-opt-13b", "chat"))
)


def _translating(name: str) -> dict[str, Place]:
    """Return vLLM with a registered prefix, and Orca (Oracle), for the translations of Figure 16."""
    config = replace(ON_A_GPU.config, model_config="llama-13b")
    load, tokens = Load("h200-opt-13b", name), TRANSLATION[name]
    return {
        REGISTERED: Place(replace(config, prefix_tokens=tokens), load._replace(prefix=tokens)),
        ORACLE: Place(replace(config, memory="orca-oracle"), load),
    }


FIGURE_16_GPU = Entry(
    "PagedAttention Figure 16 on a GPU: translation, a prefix of five examples shared",
    "side_by_side:by_rate",
    {"ways": _translating("wmt5shot"), "shares": (1.3,), "real": (1.3,), "ramp": 4.0, "requests": 400,
     "least": 20.0, "most": 60.0, "drain": 6.0},
    full={"requests": 2000, "least": 60.0, "most": 240.0},
    claims=[
        Whole("P-F16", f"rate of {VLLM} / {ORACLE}",
              over("served", {**OF_REAL, "system": REGISTERED}, {**OF_REAL, "system": ORACLE}), "times",
              EXAMPLES["wmt5shot"][1], effect()),
        Whole("P-F16", f"rate of {VLLM} / {ORACLE}",
              over("served", {**OF_SIMULATED, "system": REGISTERED}, {**OF_SIMULATED, "system": ORACLE}), "times",
              by=SIMULATED),
        *_errors("P-F16"),
    ],
    tables=[RUNS],
    note=f"{TRANSLATED['wmt5shot']}; LLaMA-13B. The lengths of sentences are assumed: see fig16.",
    plot=bars("Figure 16 on a GPU", "system", "served", bar="by", label="requests/s served", form="%.2f"),
    gpu=True, timed=True,
    takes=MINUTES,
    why="The paper gives no sentence lengths, and the gain falls as they grow.",
)

PREEMPTED = ("recompute", "swap", "auto")


def _auto_over_better(points: Points, way: str) -> float:
    """Return the highest latency with auto over that of the better other policy, of pages of any size. `way` is the
    field that names the policy."""
    latencies = {(p.get("page"), p[way]): p["latency"] for p in points}
    return float(max(latencies[page, "auto"] / min(latencies[page, other] for other in ("swap", "recompute"))
                     for page in {page for page, _ in latencies}))


FIGURE_19B_GPU = Entry(
    "PagedAttention Figure 19b on a GPU: serving with swaps and with recomputation",
    "side_by_side:one_rate",
    {"ways": {way: ON_A_GPU._replace(config=replace(ON_A_GPU.config, preemption=way, swap_gib=24.0))
              for way in PREEMPTED},
     "of": ("a100-13b", 2.5), "ramp": 8.0, "seconds": 120.0},
    full={"seconds": 300.0},
    claims=[
        Whole("P-F19b", "latency with swaps / with recomputation (within 1.2)",
              over("latency", {"by": "real", "system": "swap"}, {"by": "real", "system": "recompute"}), "times",
              "comparable", between(1 / 1.2, 1.2), 3),
        Each("P-F19b", "{system}: preemptions", "preemptions", "requests", where=OF_REAL),
        Whole("C4", "latency with auto / with the better of both (at most 1.05)",
              lambda points: _auto_over_better(chosen(points, OF_REAL), "system"), "times",
              rule=at_most(1.05), digits=3),
        *_errors("P-F19b"),
    ],
    tables=[RUNS],
    note="OPT-13B, ShareGPT-like, pages of 16 tokens, at the share of the capacity that 2.5/s is on an A100. auto has\n"
         "no calibration.",
    plot=bars("Figure 19b on a GPU", "system", "value", bar="by", label=LATENCY, form="%.1f",
              of=lambda points: [{**p, "value": 1000 * p["latency"]} for p in points]),
    gpu=True, timed=True,
    takes=MINUTES,
    why="The costs of auto are those of a small model, unless a calibration is given.",
)

# Figures 15, 18 and 19a, and overheads: real engines

SHARED = {
    ("alpaca", "parallel"): (6.1, 8.5, 9.8), ("alpaca", "beam"): (37.6, 53.1, 55.2),
    ("sharegpt", "parallel"): (16.2, None, 30.5), ("sharegpt", "beam"): (44.3, None, 66.3),  # ranges: least and most
}


def _papers_sharing(point: Point) -> float | None:
    return SHARED[point["workload"], point["way"]][WIDTHS.index(point["width"])]


FIGURE_15 = Entry(
    "PagedAttention Figure 15: memory saved by sharing",
    "engines:sharing", {"workloads": {"alpaca": 60, "sharegpt": 2}, "widths": WIDTHS},
    full={"workloads": {"alpaca": 120, "sharegpt": 10}},
    claims=[
        Each("P-F15", "{workload}, {way} {width}: pages saved", "saved", "%", _papers_sharing, near(),
             lambda point: _papers_sharing(point) is not None, digits=1),
        *(truth("P-F15", f"{name}, {way}: more sequences save more", falls("saved", [
            {"workload": name, "way": way, "width": width} for width in (6, 4, 2)
        ])) for name, way in SHARED),
        *(truth("P-F15", f"{name}: beam search saves more than parallel sampling", every(falls("saved", [
            {"workload": name, "way": way, "width": width} for way in ("beam", "parallel")
        ]) for width in WIDTHS)) for name in ("alpaca", "sharegpt")),
        *(truth("P-F15", f"{way}: longer prompts save more", every(falls("saved", [
            {"workload": name, "way": way, "width": width} for name in ("sharegpt", "alpaca")
        ]) for width in WIDTHS)) for way in ("parallel", "beam")),
    ],
    tables=[Rows(["workload", "way", "width", ("paper %", _papers_sharing), ("ours %", "saved", ".1f")])],
    note="Pages of 16 tokens, seed 0. Another model's beams diverge elsewhere.",
    plot=bars("Figure 15: memory saved by sharing (bundled model)", "width", "saved", bar="workload", panel="way",
              label="pages saved, %", form="%.1f", paper=_papers_sharing),
    why="Stories and beams of the bundled model diverge elsewhere than OPT-13B's, and few requests are served.",
)


def _overhead(point: Point) -> float:
    return float(100 * (point["paged"] / point["contiguous"] - 1))


FIGURE_18A = Entry(
    "PagedAttention Figure 18a: what paging costs attention",
    "attention_times:paged_or_not",
    {"models": {"OPT-13B": (40, 40, 40), "Llama-3-8B": (32, 8, 32)}, "batches": (8, 32),
     "contexts": (64, 128, 256, 1024, 4096)},
    claims=[Each("P-F18a", "{model}, batch {batch}, context {context}: paging adds", _overhead, "%", "20-26",
                 between(20, 26), digits=1)],
    tables=[Rows(["model", "batch", "context", *((f"{name} us", name, ".1f") for name in
                  ("paged", "contiguous", "sdpa")), ("paging adds %", _overhead, "+.1f")])],
    note="One kernel source, with page tables and without. The paper compared its kernel with FasterTransformer's, on\n"
         "an A100.",
    plot=lines("Figure 18a: decode attention with page tables and without", "context", "value", line="line",
               panel="model", labels=("context, tokens", "us a layer"), log_x=True, log_y=True,
               of=tall({name: f"{name}, batch {{batch}}" for name in ("paged", "contiguous", "sdpa")})),
    gpu=True, timed=True,
    why="Our kernel reads its page table with little extra work and is compared with itself over contiguous "
        "memory; the paper's was compared with FasterTransformer's.",
)


def _beside_best(points: Points, trace: str, most: int) -> float:
    of = {point["page"]: point["latency"] for point in chosen(points, {"trace": trace})}
    return float(max(latency for page, latency in of.items() if 16 <= page <= most) / min(of.values()))


FIGURE_18B = Entry(
    "PagedAttention Figure 18b: latency by page size",
    "engines:page_sizes",
    {"sizes": (1, 8, 16, 32, 128, 256), "load": 0.9,
     "requests": {"cpu": {"sharegpt": 8, "alpaca": 24}, "cuda": {"sharegpt": 64, "alpaca": 600}},
     "runs": {"cpu": {"sharegpt": 3, "alpaca": 3}, "cuda": {"sharegpt": 1, "alpaca": 3}},
     "kv_tokens": {"cpu": 2304, "cuda": 15_700}},  # Table 1: OPT-13B has 12 GB for 15.7K tokens
    full={"sizes": SIZES,
          "requests": {"cpu": {"sharegpt": 64, "alpaca": 256}, "cuda": {"sharegpt": 400, "alpaca": 2000}}},
    claims=[
        Whole("P-F18b", "ShareGPT: pages of 16 to 128 tokens, slowest / best of all (at most 1.1)",
              partial(_beside_best, trace="sharegpt", most=128), "ratio", "the best", at_most(1.1), 3),
        Whole("P-F18b", "Alpaca: pages of 16 and 32 tokens, slower / best of all (at most 1.1)",
              partial(_beside_best, trace="alpaca", most=32), "ratio", "work well", at_most(1.1), 3),
        Whole("P-F18b", "Alpaca: pages of 256 tokens / pages of 16 (at least 1.2)",
              over("latency", {"trace": "alpaca", "page": 256}, {"trace": "alpaca", "page": 16}), "ratio", "slower",
              at_least(1.2), 3),
        Whole("P-F18b", "ShareGPT: pages of 1 token / pages of 16 (at least 1)",
              over("latency", {"trace": "sharegpt", "page": 1}, {"trace": "sharegpt", "page": 16}), "ratio", None,
              at_least(1.0), 3),
    ],
    tables=[Rows(["trace", "page", ("requests/s", "rate", ".3g"), ("normalised ms", ms("latency"), ".3g"),
                  ("slowest / fastest run", "apart", ".2f"), ("mean batch", "batch", ".1f"),
                  ("preemptions in all", "preemptions")])],
    note="OPT-13B with dummy weights in 15,700 tokens of KV on a GPU, the bundled model in 2,304 on a CPU: a KV\n"
         "memory as small as the paper's, so that pages too large for their sequences waste it.",
    plot=lines("Figure 18b: latency by page size, at a fixed request rate", "page", "latency", line="trace",
               labels=(PAGE, LATENCY), log_x=True, log_y=True),
    timed=True,
    why="Alpaca's latencies vary between runs by more than they do between these page sizes.",
)


def _by_pieces(compare: Callable[[list[float], list[float]], Any]) -> Callable[[Points], Any]:
    """Return a function that compares the times by pieces with those of recomputing; None if there are none."""

    def ours(points: Points) -> Any:
        pieces = [point["pieces"] for point in points]
        return None if None in pieces else compare(pieces, [point["recompute"] for point in points])

    return ours


# A CPU swaps by copying memory and computes far more slowly than a GPU, so recomputing may not be cheaper on it.
FIGURE_19A = Entry(
    "PagedAttention Figure 19a: swapping and recomputing by page size",
    "engines:swapping", {"sizes": SIZES, "tokens": 256, "repeats": 9},
    claims=[
        Whole("P-F19a", "recomputation is flat (slowest/fastest at most 1.2)",
              lambda points: max(p["recompute"] for p in points) / min(p["recompute"] for p in points), "ratio",
              "constant", at_most(1.2)),
        truth("P-F19a", "swapping is slowest with the smallest page",
              lambda points: points[0]["both"] == max(p["both"] for p in points)),
        Whole("P-F19a", "swapping in pages of 1 token / at best (more than 1.2)",
              lambda points: points[0]["both"] / min(p["both"] for p in points), "ratio", "excessive",
              above(1.2)),
        truth("P-F19a", "recomputing is cheaper than swapping in pages of 1 token",
              lambda points: points[0]["recompute"] < points[0]["both"]),
        truth("P-F19a", "by pieces: swapping is slowest with the smallest page",
              _by_pieces(lambda pieces, _: pieces[0] == max(pieces))),
        truth("P-F19a", "by pieces: recomputing is cheaper with pages of 1 token",
              _by_pieces(lambda pieces, computed: computed[0] < pieces[0])),
        Whole("P-F19a", "by pieces: recomputing / swapping, all pages (at most 1.2)",  # "never higher than 20%"
              _by_pieces(lambda pieces, computed: max(a / b for a, b in zip(computed, pieces))), "ratio", "at most 1.2",
              at_most(1.2)),
    ],
    tables=[Rows(["page", ("swap out ms", "out", ".3f"), ("swap in ms", "back", ".3f"),
                  ("out and in", "both", ".3f"), ("recompute ms", "recompute", ".3f"),
                  ("recompute / swap", lambda p: p["recompute"] / p["both"], ".1f"),
                  ("by pieces ms", "pieces", ".3f")])],
    note="256 tokens of OPT-13B on a GPU, of a small LLaMA on a CPU. quire moves whole pages, and all pages of a\n"
         "sequence at once. By pieces, for a GPU: as the paper's system, which copied each layer's keys and values of\n"
         "a page separately.",
    plot=lines("Figure 19a: swapping and recomputing by page size", "page", "value", line="line",
               labels=(PAGE, "ms for 256 tokens"), log_x=True, log_y=True,
               of=tall({"out": "swap out", "back": "swap in", "recompute": "recompute", "pieces": "by pieces"})),
    timed=True,
    takes=MINUTES,
    why="On a CPU computing is slow beside copying, and a step of swapping copies all pages of a sequence at once, "
        "so small pages cost little.",
)


def _layer_tables(points: Points) -> float:
    model, layer = (median(p["ms"] for p in chosen(points, {"scope": scope})) for scope in ("model", "layer"))
    return float(layer / model)


TABLE_SCOPE = Entry(
    "PagedAttention footnote 1: one page table, or one a layer",
    "engines:table_scopes", {"repeats": 5},
    claims=[
        Each("P-M9", "share of {requests} requests whose tokens are the same with one table a layer",
             lambda point: point["same"] / point["requests"], rule=at_least(1), where=having("same")),
        Whole("P-M9", "time with one table a layer / one for all, medians", _layer_tables, "ratio", 1.0, near(), 3),
    ],
    tables=[Pivot(("scope",), "run", "ms", ".1f", where=having("run"))],
    note="Tables by model or by layer, and the milliseconds of each run.",
    plot=lines("Page tables by model or by layer (footnote 1)", "run", "ms", line="scope", labels=("run", "ms")),
    timed=True,
    why="Each layer's table gets its own changes of every step from the host.",
)
LIMITS_US = {1: 100, 256: 2000, 1000: 6000}  # running sequences -> microseconds a step
STEP_OVERHEAD = Entry(
    "PagedAttention: what the control plane costs a step",
    "engines:control_plane", {"loads": [(1, 128), (256, 128), (1000, 128), (1, 32768), (256, 32768)], "steps": 200},
    claims=[
        Each("P-M33", f"control plane, {{sequences}} sequences of {{context}} tokens (limit: {limit})", "step",
             "us a step", rule=at_most(limit), where={"sequences": count}, digits=1)
        for count, limit in LIMITS_US.items()
    ],
    tables=[Rows(["sequences", "context", *((f"{part} us", part, ".1f") for part in
                  ("schedule", "update", "step"))])],
    plot=lines("What the control plane costs a step", "sequences", "step", line="context",
               labels=("running sequences", "median us a step"), log_x=True, log_y=True),
    timed=True,
)

# Figure 19b

PIECE = 5.2e-6
"""Seconds that a copy of one layer's keys or values of a page costs beside its bytes: on an H200, 20,480 of them out
and in took 220 ms, and 80 with as many bytes in all 8.2 (fig19a there). Sizes in between aren't on that line."""
WAYS = {
    "recompute": ("recompute", 0.0), "swap": ("swap", 0.0), "swap by pieces": ("swap", PIECE), "auto": ("auto", 0.0),
}  # fmt: skip


def _preempting(way: str, page: int) -> Load:
    preemption, copy = WAYS[way]
    settings = {"page_size": page, "preemption": preemption, "swap_gib": 24.0}  # enough for all requests
    return SHAREGPT._replace(settings=settings, copy_seconds=copy)


def _most_apart(points: Points, way: str) -> float:
    gaps = [over("latency", {"way": way, "page": page}, {"way": "recompute", "page": page})(points)
            for page in (16, 32, 64)]
    return float(max(max(gap, 1 / gap) for gap in gaps))


FIGURE_19B = Entry(  # 2.5 requests/s: about what 16-token pages sustain, and at times more than fits in memory
    "PagedAttention Figure 19b: serving with swaps and with recomputation",
    "serving:whole", {"cases": [Case({"way": way, "page": page}, _preempting(way, page), "paged", 300.0, 2.5)
                                for page in SIZES for way in WAYS]},
    claims=[
        # The paper says "comparable", and 20 % for 19a.
        Whole("P-F19b", "swap / recompute or the reverse, the most in pages of 16 to 64 (at most 1.2)",
              partial(_most_apart, way="swap"), "ratio", "comparable", at_most(1.2), 3),
        Whole("P-F19b", "swap by pieces / recompute or the reverse, the most in pages of 16 to 64",
              partial(_most_apart, way="swap by pieces"), "ratio", digits=3),
        Whole("P-F19b", "swap by pieces / recompute in pages of 1 token",
              over("latency", {"way": "swap by pieces", "page": 1}, {"way": "recompute", "page": 1}), "ratio"),
        Whole("C4", "auto / the better of swap and recompute, the most in any page size (at most 1)",
              partial(_auto_over_better, way="way"), "ratio", rule=at_most(1.0), digits=3),
        Whole("P-F19b", "preemptions, the fewest of all runs", lambda points: min(p["preemptions"] for p in points),
              "requests"),
    ],
    tables=[
        Pivot(("page",), "way", ms("latency"), ".1f", " ms"),
        Pivot(("page",), "way", lambda p: f"{p['preemptions']}, {p['swapped'] / 2**30:.1f}", "", ": preempted, GiB"),
    ],
    note="""Mean normalised latency a token; 2.5 requests/s for 300 s, OPT-13B, ShareGPT-like. By pieces: as in the
paper's system, each copy adds 5.2 us to its bytes' time, from the ends of one curve: pages of 1 and of 256 tokens on an
H200. The sizes in between, of which there is only the picture there, aren't on that line: about 111, 51 and 16.5 ms
for 256 tokens in pages of 4, 8 and 16, where it says 61, 35 and 21.5. So what is by pieces is measured, not judged:
pages of 4 and 8 would be slower, of 16 faster.""",
    plot=lines("Figure 19b: preemption at 2.5 requests/s (OPT-13B, ShareGPT, simulated)", "page", "latency",
               line="way", labels=(PAGE, LATENCY), log_x=True),
    by=SIMULATED,
)

# Arithmetic, and the size of the code

MODELS = {"opt-13b": (26, 12, 15.7), "opt-66b": (132, 21, 9.7), "opt-175b": (346, 264, 60.1)}  # GB, GiB of KV, slots
TABLE_1 = Entry(
    "PagedAttention Table 1: model sizes and KV slots",
    "closed_forms:shapes", {"names": tuple(MODELS)},
    claims=[claim for model, (size, kv_gib, slots) in MODELS.items() for claim in (
        Each("P-T1", "{model}: parameters (within 2 %)", lambda p: p["parameters"] * 2 / 1e9, "GB (10^9 bytes)", size,
             near(0.02), {"model": model}, digits=1),
        Each("P-T1", f"{{model}}: KV slots in {kv_gib} GiB (within 2 %)",
             lambda p: MODELS[p["model"]][1] * 2**30 / p["token"] / 1000, "thousands", slots, near(0.02),
             {"model": model}, digits=1),
    )],
    by=ARITHMETIC,
)
X1 = Entry(
    "PagedAttention §3: KV bytes of a token and of a request",
    "closed_forms:shapes", {"names": ("opt-13b",)},
    claims=[
        Each("P-X1", "{model}: KV cache of a token", lambda p: p["token"] // 1024, "KB (1,024 bytes)", 800, equal),
        Each("P-X1", "{model}: KV cache of 2,048 tokens", lambda p: p["token"] * p["max_len"] / 2**20 / 1000,
             "GB (1,000 MiB)", 1.6, equal),
    ],
    by=ARITHMETIC,
)
CODE = "thousand lines of code"


def _code(kernels: bool) -> Callable[[Points], float]:
    return lambda points: sum(
        p["code"] / 1000 for p in points if p["part"] != MEASURING and (p["part"] == KERNELS) == kernels
    )


X4 = Entry(
    "PagedAttention §5: size of the code",
    "code_size:package",
    claims=[
        Whole("P-X4", "serving, kernels aside (the paper: Python)", _code(False), CODE, 8.5, digits=1),
        Whole("P-X4", "kernels (the paper: C++ and CUDA; here Triton and torch)", _code(True), CODE, 2.0, digits=1),
        Each("P-X4", "{part}", lambda p: p["code"] / 1000, CODE, where=lambda p: p["part"] != KERNELS, digits=1),
    ],
    tables=[Rows(["part", "files", "lines", ("of code", "code")])],
    plot=bars("Size of the package by part", "part", "value", bar="line", horizontal=True, form="%.0f",
              label="lines (the paper's system: 8,500 of Python, 2,000 of C++ and CUDA)",
              of=tall({"lines": "all lines", "code": "code"})),
)

# A review: page sizes. Only fragmentation differs, since every size has the same step costs; the kernel's cost of small
# pages is Figure 18a.

SWEPT = {"sharegpt": (2.0, (16, 32, 64, 128)), "alpaca": (30.0, (16, 32))}  # the rate of Figure 13, best sizes of 18b
SWEEP = [Case({"workload": workload, "page": page}, Load("a100-13b", workload, settings={"page_size": page}), "paged",
              SEARCHED / 2, rate) for workload, (rate, _) in SWEPT.items() for page in SIZES]


def _sustained(point: Point) -> float:
    return float(point["sustained"][0])


def _of_workload(workload: str, field: str) -> Callable[[Point], bool]:
    return lambda point: point["workload"] == workload and field in point


def _page_claims(workload: str) -> list[Each | Whole]:
    rate, best = SWEPT[workload]

    def rates(points: Points, sizes: Callable[[int], bool]) -> list[float]:
        return [_sustained(p) for p in points if p["workload"] == workload and "sustained" in p and sizes(p["page"])]

    def good(points: Points) -> float:
        return min(rates(points, best.__contains__))

    def larger(points: Points) -> float:
        return max(rates(points, lambda page: page > max(best)))

    def least(points: Points) -> float:
        return 0.9 * max(rates(points, lambda _: True))

    name = f"{workload}, pages of {{page}}"
    return [
        truth("P-R1", f"{workload}: pages of {'/'.join(map(str, best))} sustain the best rate (all within 10 %)",
              lambda points: good(points) >= least(points)),
        truth("P-R1", f"{workload}: each larger size sustains less than those, beyond the searches' error",
              lambda points: larger(points) * (1 + TOLERANCE) < good(points)),
        truth("P-R1", f"{workload}: each larger size loses more than 10 % of the best",
              lambda points: larger(points) < least(points)),
        truth("P-R1", f"{workload}: larger pages waste more",
              falls("internal", [{"workload": workload, "page": page} for page in reversed(SIZES)])),
        *(Each("P-R1", f"{name}: {what}", ours, unit, where=_of_workload(workload, field))
          for what, field, ours, unit in (
              ("internal waste", "internal", "internal", "% of taken memory"),
              (f"mean batch at {rate:g}/s", "internal", "running", "requests"),
              ("highest rate", "sustained", _sustained, "requests/s"),
          )),
    ]


R1 = Entry(
    "A review of PagedAttention: page sizes from 1 to 256, by simulation",
    "serving:steady", {"cases": SWEEP},
    also=[Run("serving:curves", {"cases": SWEEP, "seeds": (SEED,), "below": ()})],
    claims=[one for workload in SWEPT for one in _page_claims(workload)],
    tables=[
        Rows(["workload", "page", ("internal waste %", "internal", ".2f"), ("mean batch", "running", ".2f"),
              ("preempted", "preemptions")], having("internal")),
        Pivot(("page",), "workload", _sustained, ".2f", ": highest rate", having("sustained")),
    ],
    note="""OPT-13B on an A100, 12 GiB of KV; waste and batches of sharegpt at 2/s and alpaca at 30/s for 150 s,
averaged over time after the first tenth until the last request came; seed 0. Highest rates: mean normalised latency up
to 200 ms, found to 2%, of traces of the same lengths: shorter ones end before a queue has grown, and sustain more.""",
    plot=row("Page sizes (OPT-13B on an A100 with 12 GiB of KV, simulated)", *(
        lines(title, "page", field, line="workload", labels=(PAGE, title), log_x=True, log_y=field != "internal",
              of=lambda points: [{**p, "batch": p["running"]} if "used" in p else {**p, "rate": _sustained(p)}
                                 for p in points if "used" in p or "sustained" in p])
        for title, field in (("internal waste, % of taken memory", "internal"), ("mean batch", "batch"),
                             ("highest rate, requests/s", "rate"))
    )),
    by=SIMULATED,
    takes=MINUTES,
    why="On short requests pages of 64 waste less than 10 % of what a batch needs.",
)

# All memories

ORDER = ("paged", "orca-oracle", "orca-pow2", "orca-max", "ft")  # the paper's order, best first


def _memory_claims(run: str, by: str) -> list[Each | Whole]:
    def order(row: str, what: str, field: str, memories: Sequence[str]) -> Whole:
        return goal(row, what, falls(field, [{"run": run, "memory": memory} for memory in memories]), by)

    claims = [
        order("C1", f"mean batch: {' > '.join(ORDER)}", "running", ORDER),
        order("C1", f"share of taken KV memory that holds tokens: {' > '.join(ORDER[:4])}", "used", ORDER[:4]),
        order("C1", f"normalised latency, ascending: {' > '.join(ORDER)}", "latency", ORDER[::-1]),
        order("V-F1", "a reservation wastes memory even if its length is known", "used", ORDER[:2]),
    ] if run != "windows" else [
        order("C1", f"windows: {what}: paged > uniform", field, ("paged", "uniform")) for what, field in
        (("share of taken KV memory that tokens need", "used"), ("mean batch that decodes", "running"))
    ]
    name = "windows, {memory}" if run == "windows" else "{memory}"
    return [
        *claims,
        *(Each("C1", f"{name}: {what}", ours, unit, where={"run": run}, digits=digits, by=by)
          for what, ours, unit, digits in (
              ("holds tokens", "used", "% of taken KV memory", 1), ("mean batch", "running", "requests", 2),
              ("mean normalised latency", ms("latency"), "ms a token", 1),
          )),
    ]


def _shares(points: Points, run: str) -> Points:
    return tall(MEMORY)(chosen(points, {"run": run}))


RAN = {"simulated": "simulated", "windows": "simulated", "real": "real"}
C1 = Entry(
    "One trace through every memory: waste, batches, latency",
    "serving:whole",
    {"cases": [Case({"run": "simulated", "memory": memory}, SHAREGPT, memory, 600.0, 2.0) for memory in MEMORIES]},
    also=[
        # A model of unlike layers: KV outside its windows counts as waste in every memory.
        Run("unlike_serving:memories", {"memories": MEMORIES, "case": Unlike("ministral-8b", H100, "longdoc@20")}),
        # At this rate requests always wait in every memory, so that memory limits the batch, not arrivals.
        Run("engines:memories", {"names": MEMORIES, "workload": "sharegpt", "requests": 48, "rate": 64.0,
                                 "kv_tokens": 8192, "max_len": 2048}),
    ],
    claims=[one for run, by in RAN.items() for one in _memory_claims(run, by)],
    tables=[Rows(["memory", "run", *((f"{kind} %", kind, ".1f") for kind in KINDS),
                  ("mean batch", "running", ".2f"), ("normalised ms", ms("latency"), ".4g"),
                  ("requests/s", "requests_per_s", ".4g"), ("preempted", "preemptions")])],
    note="""simulated: OPT-13B on an A100 with 12 GiB of KV; sharegpt@1200, Poisson at 2/s
windows: Ministral 8B in an H100's KV memory; longdoc@20, all at once, simulated
real: the bundled model, 8,192 tokens of KV, seconds of one thread's CPU time; sharegpt@48, Poisson at 64/s
Shares are of the KV memory that is neither free nor cached.""",
    plot=row("One trace through every memory", *(plot for run in RAN for plot in (
        bars(f"{run}: taken KV memory", "memory", "value", bar="line", stacked=True, label="%", horizontal=True,
             form="%.0f", of=partial(_shares, run=run)),
        bars(f"{run}: mean batch", "memory", "running", label="requests", horizontal=True,
             of=partial(chosen, where={"run": run})),
        bars(f"{run}: latency", "memory", "latency", label=LATENCY, horizontal=True, log=True,
             of=partial(chosen, where={"run": run})),
    ))),
    timed=True,
    takes=MINUTES,
)


def _beside_transformers(read: Callable[[Point], int]) -> Callable[[Points], int | None]:
    return lambda points: sum(map(read, points)) if any(p["known"] for p in points) else None


def _percent_equal(point: Point) -> float:
    return float(100 * point["equal"] / point["tokens"])


C5 = Entry(
    "The same greedy tokens by every memory, page size, batch and preemption",
    "equality:same_tokens", {"sweep": Sweep()},
    claims=[
        Each("C5", "{group}: {settings}: share of {tokens} tokens that are equal",
             lambda point: point["equal"] / point["tokens"], rule=at_least(1)),
        goal("C5", "little memory preempts requests in every way",
              lambda points: not any(p["missing"] for p in points)),
        Whole("C5", "unlike transformers' tokens, ties aside",
              _beside_transformers(lambda p: p["known"] - p["known_equal"]), "tokens", None, at_most(0)),
    ],
    tables=[Rows(["group", ("runs", "ways"), "settings", "tokens", "equal", "ties", ("swapped", "swap"),
                  ("recomputed", "recompute"), ("transformers'", "known_equal")])],
    note="Prompts of 1 to 190 tokens, 40 greedy tokens after each; bundled model, float32, CPU.",
    plot=bars("The same tokens by every way (bundled model, float32, CPU)", "group", "value", horizontal=True,
              label="% of greedy tokens that are equal",
              of=lambda points: [{**p, "value": _percent_equal(p)} for p in points]),
    takes=MINUTES,
)
def _beside(field: str, other: str, load: str) -> Callable[[Points], list[Point]]:
    """Return, of each number of replicas, the point of the policy "prefix" with its `ratio` to another's."""
    return against(field, {"policy": other}, "replicas", where={"load": load})


ROUTING = Entry(
    "Routing policies: prefix cache hits, throughput and time to first token of replicas",
    "routing:served", {"runs": routing.runs()},
    claims=[
        Each("C7", "{replicas} replicas, 64 prefixes, {policy}: hits / those of one cache that forgets nothing",
             lambda point: point["hits"] / point["one_cache"], "times", rule=at_least(0.95),
             where={"load": "64 prefixes", "policy": "prefix"}),
        Each("C7", "{replicas} replicas, 64 prefixes, overload: requests a second, prefix / round-robin", "ratio",
             "times", rule=at_least(2), derive=_beside("requests_per_s", "round-robin", "64 prefixes, overload")),
        Each("C7", "{replicas} replicas, a hot prefix: p99 of first tokens, prefix / least-loaded", "ratio",
             "times", rule=at_most(1.1), derive=_beside("first_token", "least-loaded", "a hot prefix")),
        Each("C7", "{replicas} replicas, nothing shared: p99 of first tokens, prefix / least-loaded", "ratio",
             "times", rule=at_most(1.02), derive=_beside("first_token", "least-loaded", "nothing shared")),
    ],
    tables=[Rows(["load", "replicas", "policy", ("hits %", lambda point: 100 * point["hits"], ".1f"),
                  ("requests/s", "requests_per_s", ".4g"), ("first token p99, ms", ms("first_token"), ".4g")])],
    note="""Llama-3-8B on H200s, each with 40,000 tokens of KV; prefixes of 2,048 tokens, as likely as each other
A hot prefix: 90 % of the requests have one of them. Overload: 80 requests a second a replica, else 15.""",
    plot=bars("Requests a second where 64 prefixes crowd the memory", "replicas", "requests_per_s", bar="policy",
              label="requests/s", log=True, form="%.0f",
              of=partial(chosen, where={"load": "64 prefixes, overload"})),
    by=SIMULATED, takes=MINUTES,
)
ENTRIES: dict[str, Entry] = {
    "fig1": FIGURE_1, "fig2": FIGURE_2, "fig6": FIGURE_6, "fig7": FIGURE_7, "fig11": FIGURE_11,
    "fig12": _figure_12(": latency by request rate", tuple(PANELS)),
    **{f"fig12{panel[1]}": _figure_12(f"{panel[1]}: {panel[4:]}", [panel], "fig12") for panel in PANELS},
    "fig12-nodes": FIGURE_12_NODES, "fig12-tp8": FIGURE_12_TP8,
    "fig13": FIGURE_13, "fig12a-gpu": FIGURE_12A_GPU, "fig12b-gpu": FIGURE_12B_GPU, "fig12c-gpu": FIGURE_12C_GPU,
    "fig12e-gpu": FIGURE_12E_GPU, "fig12f-gpu": FIGURE_12F_GPU, "fig13-gpu": FIGURE_13_GPU,
    "fig14-gpu": FIGURE_14_GPU, "fig16-gpu": FIGURE_16_GPU, "fig17-gpu": FIGURE_17_GPU,
    "fig19b-gpu": FIGURE_19B_GPU, "fig14": FIGURE_14,
    "fig15": FIGURE_15, "fig16": FIGURE_16, "fig17": FIGURE_17, "fig18a": FIGURE_18A, "fig18b": FIGURE_18B,
    "fig19a": FIGURE_19A, "fig19b": FIGURE_19B, "table1": TABLE_1, "x1": X1, "table-scope": TABLE_SCOPE,
    "step-overhead": STEP_OVERHEAD, "x4": X4, "r1": R1,
}
TP_WORKLOADS = ("fixed:128:128@1", "fixed:1000:128@1", "fixed:1000:128@32", "fixed:1024:128@512", "fixed:128:1024@256")
LLAMA_70B = Entry(
    "Llama-3-70B on two, four and eight H200s: predicted, and beside what was measured",
    "rank_prediction:llama_70b", {"ranks": (2, 4, 8), "workloads": TP_WORKLOADS, "rows": (1, 32, 256), "measured": ""},
    claims=[
        Each("P-M27", "{tp} ranks, {what}: simulated, off by (limit: 0.15)", "off", "share",
             rule=between(-MAX_ERROR, MAX_ERROR), where=OF_REAL, digits=3),
    ],
    tables=[Pivot(("what", "unit", "by"), "tp", "value", ".4g", " ranks")],
    note="""Prefix caches off, all requests at once; a request's time includes its prompt. Four and eight ranks weren't
measured. Simulated: the calibration h200-llama3-8b, and what `Links` adds for ranks (sim/cost_model.py).
From kernels: attention as measured for one of as many ranks; products as a + b / N through those of one of two and of
four; sums as measured over two, and what `Links` adds for more; a step takes as much longer than its parts as one of
two ranks did. Its sequences have 1,024 tokens. A sum is of rows of 8,192 numbers, with the norm.""",
    plot=lines("Llama-3-70B on several H200s, simulated", "tp", "value", line="by", panel="what",
               labels=("ranks", "tokens/s, or ms a token"), log_x=True,
               of=lambda points: [p for p in points if p["by"] != "from kernels"]),
    by=SIMULATED,
    why="Decodes of 256 sequences are faster than the calibration with Llama-3-8B says.",
)
OWN: dict[str, Entry] = {"c1": C1, "c5": C5, "routing": ROUTING, "llama-70b-tp": LLAMA_70B}
