"""`quire reproduce NAME`: a figure, a table or a claim of the papers, their number beside ours, as JSON and a picture.

An entry of ENTRIES is a function and a line; it needs no arguments and says whether the claim holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from quire.bench.document import document, table, write
from quire.cli.parser import Parser
from quire.errors import StartupError
from quire.reproduce.result import DIFFERS, Reproduction


class Entry(NamedTuple):
    """`function` is "module:name" below quire.reproduce; it is loaded when it runs. If it `samples`, it takes how much
    to run: False, or with --full True. `gpu`: it is nothing without one. `timed`: its numbers are times of this
    machine; others, which --simulated runs, are the same anywhere: closed forms, counts, simulations, and fig15 and c5,
    which run the bundled model. `part_of`: --all runs that entry instead."""

    function: str
    about: str
    samples: bool = False
    gpu: bool = False
    timed: bool = False
    part_of: str | None = None

    def run(self, full: bool = False) -> Reproduction:
        module, _, name = self.function.partition(":")
        function: Callable[..., Reproduction] = getattr(import_module(f"quire.reproduce.{module}"), name)
        return function(full) if self.samples else function()


PANELS = {
    "a": "OPT-13B, ShareGPT", "b": "OPT-66B, ShareGPT", "c": "OPT-175B, ShareGPT",
    "d": "OPT-13B, Alpaca", "e": "OPT-66B, Alpaca", "f": "OPT-175B, Alpaca",
}  # fmt: skip
ENTRIES = {
    "fig1": Entry("waste:figure_1", "PagedAttention Figure 1: memory of a 13B model, and its growth"),
    "fig2": Entry("waste:figure_2", "PagedAttention Figure 2: what the KV memory of each system holds", samples=True),
    "fig6": Entry("block_tables:figure_6", "PagedAttention Figure 6: the block table of one request"),
    "fig7": Entry("block_tables:figure_7", "PagedAttention Figure 7: the block tables of two requests"),
    "fig11": Entry("lengths:figure_11", "PagedAttention Figure 11: length distributions"),
    "fig12": Entry("basic_sampling:figure_12", "PagedAttention Figure 12: latency by request rate", samples=True),
    **{f"fig12{panel}": Entry(f"basic_sampling:figure_12{panel}", f"PagedAttention Figure 12{panel}: {title}",
                              samples=True, part_of="fig12") for panel, title in PANELS.items()},
    "fig13": Entry("batches:figure_13", "PagedAttention Figure 13: requests that run at once", samples=True),
    "fig12a-gpu": Entry(
        "serving_gpu:figure_12a_gpu",
        "PagedAttention Figure 12a on a GPU, every system",
        samples=True,
        gpu=True,
        timed=True,
    ),
    "fig13-gpu": Entry(
        "serving_gpu:figure_13_gpu",
        "PagedAttention Figure 13a on a GPU, every system",
        samples=True,
        gpu=True,
        timed=True,
    ),
    "fig14": Entry(
        "beams_serving:figure_14", "PagedAttention Figure 14: parallel sampling and beam search", samples=True
    ),
    "fig15": Entry("sharing:figure_15", "PagedAttention Figure 15: memory saved by sharing", samples=True),
    "fig16": Entry("shared_prefix:figure_16", "PagedAttention Figure 16: translation, a prefix shared", samples=True),
    "fig17": Entry("chat:figure_17", "PagedAttention Figure 17: chatbot", samples=True),
    "fig18a": Entry(
        "attention_blocks:figure_18a", "PagedAttention Figure 18a: what paging costs attention", gpu=True, timed=True
    ),
    "fig18b": Entry(
        "attention_blocks:figure_18b", "PagedAttention Figure 18b: latency by page size", samples=True, timed=True
    ),
    "fig19a": Entry(
        "swap_or_recompute:figure_19a", "PagedAttention Figure 19a: swapping and recomputing by page size", timed=True
    ),
    "fig19b": Entry(
        "preemption_serving:figure_19b", "PagedAttention Figure 19b: serving with swaps and with recomputation"
    ),
    "table1": Entry("closed_forms:table_1", "PagedAttention Table 1: model sizes and KV slots"),
    "x1": Entry("closed_forms:kv_of_a_request", "PagedAttention §3: KV bytes of a token and of a request"),
    "table-scope": Entry(
        "overheads:table_scope", "PagedAttention footnote 1: one page table, or one a layer", timed=True
    ),
    "step-overhead": Entry(
        "overheads:step_overhead", "PagedAttention: what the control plane costs a step", timed=True
    ),
    "x4": Entry("code_size:code_size", "PagedAttention §5: size of the code"),
    "r1": Entry("page_sizes:page_sizes", "A review of PagedAttention: page sizes from 1 to 256, by simulation"),
    "vattention-table1": Entry("paging_issues:table_1", "vAttention Table 1: issues that paging brings, as cited"),
    "vattention-table2": Entry("paging_issues:table_2", "vAttention Table 2: systems, and what managing memory takes"),
    "vattention-table5": Entry("contiguous_sizes:table_5", "vAttention Table 5: the models"),
    "vattention-table8": Entry("contiguous_sizes:table_8", "vAttention Table 8: tokens of a page, waste of a request"),
    "vattention-fig7": Entry("reqids:figure_7", "vAttention Figure 7: pages of two requests, (a) to (e)"),
    "vattention-fig12": Entry("kernel_switch:figure_12", "vAttention Figure 12: lines that replacing a kernel takes"),
    "vattention-table4": Entry("reqids:table_4", "vAttention Table 4: the interface to a serving framework"),
    "vattention-x1": Entry(
        "contiguous_sizes:token_and_addresses", "vAttention §4, §5.1.1: KV of a token, addresses of a memory"
    ),
    "c1": Entry("memories:every_memory", "One trace through every memory: waste, batches, latency", timed=True),
    "c5": Entry("equality:same_tokens", "The same greedy tokens by every memory, page size, batch and preemption"),
}  # fmt: skip


def main(args: list[str]) -> int:
    """Run entries. The exit status is 1 if a claim differs."""
    parser = Parser(prog="quire reproduce", description="Reproduce the papers' results.", allow_abbrev=False)
    parser.add_argument("name", nargs="*", metavar="NAME", help="what to reproduce")
    parser.add_argument("--list", action="store_true", help="show what there is to reproduce")
    parser.add_argument("--all", action="store_true", help="everything")
    parser.add_argument("--simulated", action="store_true", help="with --all: only what times nothing and needs no GPU")
    parser.add_argument("--full", action="store_true", help="larger samples, where a result is an average")
    parser.add_argument("--out", metavar="DIR", help="write NAME.json and NAME.png there")
    parser.add_argument("--report", metavar="FILE", help="write what the documents in --from say, as Markdown")
    parser.add_argument("--from", dest="folder", metavar="DIR", help="what was --out before")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    given = parser.parse_args(args)
    if (given.report is None) != (given.folder is None):
        raise StartupError("--report and --from belong together", "Give both")
    if given.simulated and not given.all:
        raise StartupError("--simulated is given without --all", "Give both, or the names only")
    names = _all(given.simulated) if given.all else given.name
    for name in names:
        if name not in ENTRIES:
            raise StartupError(f"there is nothing named {name[:40]!r} to reproduce", f"Known: {', '.join(ENTRIES)}")
    if given.list or not (names or given.report):
        print(table(("name", "what"), [(name, entry.about) for name, entry in ENTRIES.items()]))
        return 0
    if given.out and names:
        from quire.reproduce.plots import figure

        figure(1, 1)  # without matplotlib refused now, not behind the first entry
    done = [reproduce(name, args, Path(given.out) if given.out else None, given.full) for name in names]
    if given.report:
        from quire.reproduce.report import write_report

        write_report(ENTRIES, Path(given.folder), Path(given.report))
    return int(any(result.verdict == DIFFERS for reproduction in done for result in reproduction.results))


def _all(simulated: bool) -> list[str]:
    """Everything that this machine can reproduce, once; if `simulated`, only what any machine would find the same."""
    names = [name for name, entry in ENTRIES.items() if entry.part_of is None]
    if simulated:
        return [name for name in names if not ENTRIES[name].timed and not ENTRIES[name].gpu]
    import torch

    there = torch.cuda.is_available()
    left_out = [name for name in names if ENTRIES[name].gpu and not there]
    if left_out:
        print(f"{', '.join(left_out)}: left out, since torch finds no GPU", file=sys.stderr)
    return [name for name in names if name not in left_out]


def reproduce(name: str, args: list[str], out: Path | None, full: bool = False) -> Reproduction:
    """Run one entry, print it, and write NAME.json and NAME.png into `out`."""
    done = ENTRIES[name].run(full)
    rows = [
        (r.row, r.what, "-" if r.paper is None else r.paper, r.ours, r.unit, r.verdict, r.real_or_simulated)
        for r in done.results
    ]
    print(f"{name}: {ENTRIES[name].about}")
    if done.text:
        print(done.text)
    print(table(("row", "what", "paper", "ours", "unit", "verdict", "by"), rows), end="\n\n")
    if out is not None:
        real = all(result.real_or_simulated == "real" for result in done.results)
        results = [result._asdict() for result in done.results]
        content = document(name, "quire reproduce", args, results, real=real)
        content["text"] = done.text
        if done.data is not None:
            content["data"] = done.data
        write(out / f"{name}.json", content)
        from quire.reproduce.plots import save

        save(done.draw(), out / f"{name}.png")
        print(f"wrote {out / name}.json and .png", file=sys.stderr)
    return done
