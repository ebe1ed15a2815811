"""Run `quire reproduce NAME`: reproduce a figure, a table or a claim of the papers, and write the paper's numbers and
ours as JSON and a picture.

An entry of ENTRIES is a function without arguments and a line of text; its result says whether the claim holds. Without
matplotlib, --no-pictures writes the documents alone; --draw makes their pictures on another machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from papers import entry, jenga, pagedattention
from papers.result import DIFFERS, Reproduction
from quire.bench.document import document, table, write
from quire.cli.parser import Parser
from quire.errors import StartupError


class Entry(NamedTuple):
    """`function` is "module:name" below papers, loaded when it runs. If it `samples`, it takes one argument:
    True with --full, else False. `gpu`: it needs a GPU. `timed`: its numbers are times of this machine. Other entries,
    which --simulated runs, are the same on any machine: closed forms, counts, simulations, and fig15 and c5, which run
    the bundled model. `part_of`: --all runs that entry instead. `draw`, like `function`, makes the picture of a
    document's data."""

    function: str
    about: str
    samples: bool = False
    gpu: bool = False
    timed: bool = False
    part_of: str | None = None
    draw: str | None = None

    def run(self, full: bool = False) -> Reproduction:
        function = _named(self.function)
        done: Reproduction = function(full) if self.samples else function()
        return done


def _named(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"papers.{module}"), name)
    return found


PANELS = {
    "a": "OPT-13B, ShareGPT", "b": "OPT-66B, ShareGPT", "c": "OPT-175B, ShareGPT",
    "d": "OPT-13B, Alpaca", "e": "OPT-66B, Alpaca", "f": "OPT-175B, Alpaca",
}  # fmt: skip
ENTRIES: dict[str, Entry | entry.Entry] = {
    "fig1": Entry("waste:figure_1", "PagedAttention Figure 1: memory of a 13B model, and its growth"),
    "fig2": Entry("waste:figure_2", "PagedAttention Figure 2: what the KV memory of each system holds", samples=True),
    "fig6": Entry("block_tables:figure_6", "PagedAttention Figure 6: the block table of one request"),
    "fig7": Entry("block_tables:figure_7", "PagedAttention Figure 7: the block tables of two requests"),
    "fig11": Entry("lengths:figure_11", "PagedAttention Figure 11: length distributions"),
    "fig12": Entry("basic_sampling:figure_12", "PagedAttention Figure 12: latency by request rate", samples=True),
    **{f"fig12{panel}": Entry(f"basic_sampling:figure_12{panel}", f"PagedAttention Figure 12{panel}: {title}",
                              samples=True, part_of="fig12") for panel, title in PANELS.items()},
    "fig13": pagedattention.ENTRIES["fig13"],
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
    "vattention-fig3": Entry(
        "paged_or_contiguous:figure_3", "vAttention Figure 3: what paging adds to decode attention", gpu=True,
        timed=True, draw="paged_or_contiguous:draw_3",
    ),
    "vattention-fig4": Entry(
        "paged_or_contiguous:figure_4", "vAttention Figure 4: what paging adds to prompt attention", samples=True,
        gpu=True, timed=True, draw="paged_or_contiguous:draw_4",
    ),
    "vattention-fig5": Entry(
        "paged_or_contiguous:figure_5", "vAttention Figure 5: decode attention by page size", gpu=True, timed=True,
        draw="paged_or_contiguous:draw_5",
    ),
    "vattention-fig9b": Entry(
        "attention_alone:figure_9b", "vAttention Figure 9b: attention of decode steps of 16K tokens",
        samples=True, gpu=True, timed=True, draw="attention_alone:draw",
    ),
    "vattention-fig10": Entry(
        "step_spikes:figure_10", "vAttention Figure 10: decode steps that map pages, ahead and synchronously",
        samples=True, gpu=True, timed=True, draw="step_spikes:draw",
    ),
    "vattention-table3": Entry(
        "mapping_costs:table_3", "vAttention Table 3: latency of the calls that manage virtual memory", timed=True,
        draw="mapping_costs:draw_3",
    ),
    "vattention-table7": Entry(
        "mapping_costs:table_7", "vAttention Table 7: bytes a second that can be mapped", timed=True,
        draw="mapping_costs:draw_7",
    ),
    "vattention-fig6": Entry(
        "decode_rates:figure_6", "vAttention Figure 6: decodes of 1K tokens by batch, and the memory they ask for",
        gpu=True, timed=True, draw="decode_rates:draw_6",
    ),
    "vattention-fig9a": Entry(
        "decode_rates:figure_9a", "vAttention Figure 9a: decodes of 16K tokens over pages and virtual memory",
        samples=True, gpu=True, timed=True, draw="decode_rates:draw_9a",
    ),
    "vattention-fig11": Entry(
        "prompt_mapping:figure_11", "vAttention Figure 11: a prompt whose pages are mapped first, by page size",
        timed=True, draw="prompt_mapping:draw",
    ),
    "vattention-fig8": Entry(
        "long_prompts:figure_8", "vAttention Figure 8: attention of prompts of up to 192K tokens, in chunks", gpu=True,
        timed=True, draw="long_prompts:draw_8",
    ),
    "vattention-table6": Entry(
        "long_prompts:table_6", "vAttention Table 6: seconds to the first token of long prompts", samples=True,
        gpu=True, timed=True, draw="long_prompts:draw_6",
    ),
    "vattention-x2": Entry(
        "table_building:table_building", "vAttention §3.3.2: building page tables, as a share of a decode step",
        timed=True, draw="table_building:draw",
    ),
    "vattention-views": Entry(
        "mapped_views:views", "vAttention §5.2: torch's attention over mapped pages, on a CPU", timed=True,
        draw="mapped_views:draw",
    ),
    **jenga.ENTRIES,
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
    parser.add_argument("--no-pictures", action="store_true", help="with --out: NAME.json only, without matplotlib")
    parser.add_argument("--draw", metavar="DIR", help="draw NAME.png of each NAME.json there that has all it needs")
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
    if given.list or not (names or given.report or given.draw):
        print(table(("name", "what"), [(name, entry.about) for name, entry in ENTRIES.items()]))
        return 0
    if (given.out and names and not given.no_pictures) or given.draw:
        from quire.bench.plots import figure

        figure(1, 1)  # without matplotlib, fail now, not after the first entry
    out = Path(given.out) if given.out else None
    done = [reproduce(name, args, out, given.full, pictures=not given.no_pictures) for name in names]
    if given.draw:
        draw(Path(given.draw))
    if given.report:
        from papers.report import write_report

        write_report(ENTRIES, Path(given.folder), Path(given.report))
    return int(any(result.verdict == DIFFERS for reproduction in done for result in reproduction.results))


def _all(simulated: bool) -> list[str]:
    """Return all entries that this machine can reproduce, once each; if `simulated`, only those that are the same on
    any machine."""
    names = [name for name, entry in ENTRIES.items() if entry.part_of is None]
    if simulated:
        return [name for name in names if not ENTRIES[name].timed and not ENTRIES[name].gpu]
    import torch

    there = torch.cuda.is_available()
    left_out = [name for name in names if ENTRIES[name].gpu and not there]
    if left_out:
        print(f"{', '.join(left_out)}: left out, since torch finds no GPU", file=sys.stderr)
    return [name for name in names if name not in left_out]


def draw(folder: Path) -> None:
    """Draw the pictures of the documents in `folder` whose entries have a `draw` function."""
    from quire.bench.plots import save

    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
            known = ENTRIES.get(content["name"])
        except (ValueError, KeyError, TypeError) as error:
            raise StartupError(
                f"{path} is not a document of quire reproduce: {error}", "Give another --draw"
            ) from error
        if known is None or content.get("data") is None:
            continue
        drawer = known.draw if isinstance(known, entry.Entry) else known.draw and _named(known.draw)
        if drawer:
            save(drawer(content["data"]), path.with_suffix(".png"))
            print(f"drew {path.with_suffix('.png')}", file=sys.stderr)


def reproduce(name: str, args: list[str], out: Path | None, full: bool = False, pictures: bool = True) -> Reproduction:
    """Run one entry, print it, and write NAME.json and, with `pictures`, NAME.png into `out`."""
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
        print(f"wrote {out / name}.json", file=sys.stderr)
        if pictures:
            from quire.bench.plots import save

            save(done.draw(), out / f"{name}.png")
    return done
