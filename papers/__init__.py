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

from papers import entry, pagedattention, vattention
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


UNLIKE = {
    "ministral": "Ministral 8B in an H100's KV memory", "ministral-l4": "Ministral 8B in an L4's",
    "gemma-27b": "Gemma-2 27B in an H100's", "gemma-9b": "Gemma-2 9B in an L4's",
    "character": "character.ai 8B in an L4's", "pyramid": "PyramidKV 8B in an L4's", "llama": "Llama 8B in an L4's",
    "mllama": "Llama 3.2 11B Vision in an H100's", "jamba": "Jamba 52B in FP8 in an H100's",
}  # fmt: skip
PICTURED = {
    "llava": "LLaVA-OneVision 7B", "internvl": "InternVL2 8B", "phi3": "Phi-3-Vision 4B", "paligemma": "PaliGemma2 10B",
}  # fmt: skip
ENTRIES: dict[str, Entry | entry.Entry] = {
    **{name: one for name, one in pagedattention.ENTRIES.items() if name not in ("c1", "c5")},
    **vattention.ENTRIES,
    "jenga-fig3": Entry("unlike_layers:figure_3", "Jenga Figure 3, §3.2: what uniform pages waste"),
    "jenga-fig4": Entry("eviction_orders:figure_4", "Jenga Figure 4: balanced and aligned eviction, and without"),
    "jenga-fig6": Entry("large_pages:figure_6", "Jenga Figure 6: small pages of two kinds in large pages"),
    "jenga-fig7": Entry("unlike_layers:figure_7", "Jenga Figure 7: where pages of layers are, by two layouts"),
    "jenga-fig8": Entry("large_pages:figure_8", "Jenga Figure 8: large pages of requests, or of all"),
    "jenga-fig9": Entry("layer_interface:figure_9", "Jenga Figure 9: the interface for layer types, and its window"),
    "jenga-fig10": Entry("layer_interface:figure_10", "Jenga Figure 10: last access after two requests"),
    "jenga-fig11": Entry("layer_interface:figure_11", "Jenga Figure 11: prefixes that are valid for a layer type"),
    "jenga-fig12": Entry(
        "picture_steps:timelines", "Jenga Figure 12: memory of a prompt with a picture, step by step",
        draw="picture_steps:draw",
    ),
    "jenga-fig13": Entry(
        "unlike_throughput:figure_13", "Jenga Figure 13: throughput of models of unlike layers, on two devices"
    ),
    "jenga-fig14": Entry(
        "picture_latency:figure_14", "Jenga Figure 14: latency of Llama 3.2 Vision by request rate",
        draw="picture_latency:draw",
    ),
    "jenga-fig14-gpu": Entry(
        "picture_latency:figure_14_gpu", "Jenga Figure 14 on a GPU: a rate within capacity, and one beyond it",
        gpu=True, timed=True, draw="picture_latency:draw",
    ),
    "jenga-fig15": Entry(
        "decode_batches:figure_15", "Jenga Figure 15: requests that decode at once, by every allocation rule"
    ),
    "jenga-fig16": Entry("memory_timeline:figure_16", "Jenga Figure 16: memory by category over time"),
    "jenga-fig17": Entry(
        "articles:figure_17", "Jenga Figure 17: prefix caching by the number of articles, by each policy behind windows"
    ),
    **{f"jenga-fig13-{name}-gpu": Entry(
        f"unlike_gpu:{name.replace('-', '_')}", f"Jenga Figure 13 on a GPU: {about}", gpu=True, timed=True,
        draw="unlike_gpu:draw",
    ) for name, about in UNLIKE.items()},
    "jenga-fig15-gpu": Entry(
        "unlike_gpu:decode_batches", "Jenga Figure 15 on a GPU: 10 requests of 55K to 110K tokens", gpu=True,
        timed=True, draw="unlike_gpu:draw",
    ),
    "jenga-fig17-gpu": Entry(
        "unlike_gpu:articles", "Jenga Figure 17 on a GPU: 20 questions about 5 articles", gpu=True, timed=True,
        draw="unlike_gpu:draw",
    ),
    "jenga-fig18": Entry(
        "vision_cache:figure_18", "Jenga Figure 18: prompts with pictures in chunks, embeddings kept and encoded again",
        draw="vision_cache:draw",
    ),
    **{f"jenga-fig18-{name}-gpu": Entry(
        f"unlike_gpu:pictures_{name}", f"Jenga Figure 18 on a GPU: {about}", gpu=True, timed=True,
        draw="unlike_gpu:draw",
    ) for name, about in PICTURED.items()},
    "jenga-table1": Entry(
        "model_matrix:table_1", "Jenga Table 1: models, data sets and devices, planned", draw="model_matrix:draw"
    ),
    "jenga-x3": Entry("code_taken:code_taken", "Jenga §7: lines of code that it took"),
    "jenga-x5": Entry("decode_batches:longest_request", "Jenga §7.2: the longest request on an L4"),
    "jenga-x1": Entry("planned_pages:planner_table", "Jenga §4.4: compatible pages of the paper's models"),
    "jenga-x2": Entry("unlike_layers:kv_of_llama", "Jenga §2: KV of 10,000 tokens of Llama 3.1 8B"),
    "c1": pagedattention.ENTRIES["c1"],
    "c5": pagedattention.ENTRIES["c5"],
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
