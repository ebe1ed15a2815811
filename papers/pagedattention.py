"""The entries of "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023)."""

from __future__ import annotations

from papers.entry import Each, Entry, Pivot, Points, Whole, descending, near, one, ratio
from papers.plots import bars
from papers.serving import HOUR, SECONDS, SYSTEMS, Load

# Figure 13: requests that run at once. The A100's host times were derived from vLLM's batches by Little's law, with the
# paper's mean output of 338 tokens: rows of vLLM, and ratios to them, say only that lengths agree.
BATCHES = {
    "ShareGPT": {"paged": 30.42, "orca-oracle": 13.62, "orca-pow2": 9.81, "orca-max": 7.00},
    "Alpaca": {"paged": 132.44, "orca-oracle": 72.75, "orca-pow2": 43.24, "orca-max": 7.00},
}
BATCH_LOADS = {"ShareGPT": (Load("a100-13b", "sharegpt"), 2.0), "Alpaca": (Load("a100-13b", "alpaca"), 30.0)}
INPUT = "(its batch is an input)"


def _batches_beside_vllm(trace: str) -> list[Whole]:
    def over(system: str) -> Whole:
        paper = round(BATCHES[trace]["paged"] / BATCHES[trace][system], 2)
        of = {"trace": trace}
        return Whole(
            "P-F13", f"{trace}: vLLM / {SYSTEMS[system]} {INPUT}",
            lambda points: ratio(points, "running", {**of, "system": "paged"}, {**of, "system": system}),
            "ratio", paper, by="simulated",
        )  # fmt: skip

    def falls(points: Points) -> bool:
        return descending([one(points, trace=trace, system=system) for system in BATCHES[trace]], "running")

    order = f"{trace}: vLLM > Orca (Oracle) > Orca (Pow2) > Orca (Max) {INPUT}"
    return [over("orca-oracle"), over("orca-max"), Whole("P-F13", order, falls, "", True, by="simulated")]


FIGURE_13 = Entry(
    "PagedAttention Figure 13: requests that run at once",
    "serving:batches",
    {"loads": BATCH_LOADS, "systems": tuple(BATCHES["Alpaca"]), "seconds": SECONDS},
    full={"seconds": HOUR},
    claims=[
        Each("P-F13", "{trace}: requests that run at once, {label} " + INPUT, "running", "requests",
             lambda point: BATCHES[point["trace"]][point["system"]], where={"system": "paged"}, by="simulated"),
        Each("P-F13", "{trace}: requests that run at once, {label} (within 20%)", "running", "requests",
             lambda point: BATCHES[point["trace"]][point["system"]], near(0.2),
             where=lambda point: point["system"] != "paged", by="simulated"),
        *_batches_beside_vllm("ShareGPT"),
        *_batches_beside_vllm("Alpaca"),
    ],
    tables=[Pivot(("label",), "trace", "running", ".2f")],
    note="OPT-13B, simulated: averages over time after the first tenth of the trace. The A100's host times were\n"
         "derived from vLLM's own two batches, so its rows, and ratios to them, say only that lengths agree. Our\n"
         "outputs of ShareGPT are cut at 1,024 tokens, a mean of about 300 (see fig11): where a system isn't\n"
         "overloaded, as vLLM here, fewer requests run at once in the same proportion.",
    plot=bars("Figure 13: requests that run at once (OPT-13B, simulated)", "label", "running", panel="trace",
              label="requests that run at once"),
)  # fmt: skip

ENTRIES: dict[str, Entry] = {"fig13": FIGURE_13}
