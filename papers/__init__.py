"""Run `quire reproduce NAME`: reproduce a figure, a table or a claim of the papers, and write the paper's numbers and
ours as JSON and a picture.

An entry of ENTRIES is data (see papers.entry). Without matplotlib only the documents are written; --draw makes their
pictures on another machine.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from papers import jenga, pagedattention, vattention
from papers.entry import ALL, DIFFERS, MISSED, SIMULATED, VERDICTS, Entry, Point, Reproduction
from quire.bench.document import document, grouped_table, table, write
from quire.bench.machine import ROOT, revision
from quire.bench.plots import figure, save
from quire.cli.parser import Parser
from quire.errors import StartupError

GROUPS = {
    "PagedAttention": pagedattention.ENTRIES, "vAttention": vattention.ENTRIES, "Jenga": jenga.ENTRIES,
    "quire": pagedattention.OWN,
}  # fmt: skip
ENTRIES = {name: entry for group in GROUPS.values() for name, entry in group.items()}
SHOWN_AFTER = 3.0  # seconds that an entry runs before a terminal shows how long


def main(args: list[str]) -> int:
    """Run entries. The exit status is 1 if a claim differs or a goal is missed."""
    parser = Parser(prog="quire reproduce", description="Reproduce the papers' results.", allow_abbrev=False)
    parser.add_argument("name", nargs="*", metavar="NAME", help="what to reproduce")
    parser.add_argument("--list", action="store_true", help="show what there is to reproduce")
    parser.add_argument("--all", action="store_true", help="everything")
    parser.add_argument(
        "--simulated", "--sim", action="store_true", help="with --all: only what times nothing and needs no GPU"
    )
    parser.add_argument("--full", action="store_true", help="larger samples, where a result is an average")
    parser.add_argument("--set", action="append", default=[], metavar="PARAMETER=VALUE",
                        help="change a parameter of the names' runners (papers/); may be repeated")  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="write NAME.json there, and NAME.png if matplotlib is installed")
    parser.add_argument("--no-pictures", action="store_true", help="with --out: NAME.json only")
    parser.add_argument("--draw", metavar="DIR", help="draw NAME.png of each NAME.json there that has all it needs")
    parser.add_argument("--judge", metavar="DIR", help="judge the claims of each NAME.json there again")
    parser.add_argument("--report", metavar="FILE", help="write what the documents in --from say, as Markdown")
    parser.add_argument("--rows", metavar="FILE", help="write the rows of the papers with their results in --from")
    parser.add_argument("--from", dest="folder", metavar="DIR", help="what was --out before")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    given = parser.parse_args(args)
    written = given.report or given.rows
    if (written is None) != (given.folder is None):
        raise StartupError("--report or --rows, and --from belong together", "Give both")
    if given.simulated and not given.all:
        raise StartupError("--simulated is given without --all", "Give both, or the names only")
    names = _all(given.simulated) if given.all else given.name
    for name in names:
        if name not in ENTRIES:
            raise StartupError(f"there is nothing named {name[:40]!r} to reproduce", f"Known: {', '.join(ENTRIES)}")
    if given.list or not (names or written or given.draw or given.judge):
        rows = {
            group: [
                (name, one.takes, "GPU" if one.gpu else "", one.about.removeprefix(f"{group} "))
                for name, one in entries.items()
            ]
            for group, entries in GROUPS.items()
        }
        print(grouped_table(("name", "takes", "needs", "what"), rows))
        return 0
    pictures = not given.no_pictures
    if (given.out and names and pictures) or given.draw:
        try:
            figure(1, 1)  # without matplotlib, say so before the first entry
        except StartupError as error:
            if given.draw:
                raise
            pictures = False
            print(f"no pictures: {error}; then --draw makes them", file=sys.stderr)
    out = Path(given.out) if given.out else None
    if out is not None and names:
        refuse_changed_tree(out)
    changes = {name: ENTRIES[name].parse_changes(given.set) for name in names}
    done = {name: reproduce(name, args, out, given.full, pictures, changes[name]) for name in names}
    if len(done) > 1:
        print(_verdicts(done))
    if given.judge:
        judge(Path(given.judge))
    if given.draw:
        draw(Path(given.draw))
    if given.report:
        from papers.report import write_report

        write_report(ENTRIES, Path(given.folder), Path(given.report))
    if given.rows:
        from papers.report import write_page
        from papers.rows import page

        write_page(Path(given.rows), page(ENTRIES, Path(given.folder)), "--rows")
    return int(
        any(result.verdict in (DIFFERS, MISSED) for reproduction in done.values() for result in reproduction.results)
    )


def refuse_changed_tree(out: Path) -> None:
    """Raise StartupError if a document would be written into this checkout while its code differs from the revision."""
    if (revision() or "").endswith("-dirty") and out.resolve().is_relative_to(ROOT):
        raise StartupError(
            "the code of this checkout is changed, so its revision would not say what was measured",
            "Commit it, or write outside the checkout",
        )


def _verdicts(done: Mapping[str, Reproduction]) -> str:
    """Return a table of how many claims of each entry have each verdict."""
    rows = []
    for name, reproduction in done.items():
        counts = Counter(result.verdict for result in reproduction.results)
        rows.append((name, *(counts[verdict] or "-" for verdict in VERDICTS)))
    return table(("entry", *VERDICTS), rows)


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
    """Draw the pictures of the documents in `folder` that have points."""
    for path, content, entry in _with_points(folder, "--draw"):
        save(entry.draw(content["data"]), path.with_suffix(".png"))
        print(f"drew {path.with_suffix('.png')}", file=sys.stderr)


def _judged(done: Reproduction) -> dict[str, Any]:
    """Return what a document says beside its points."""
    return {
        "real": all(result.real_or_simulated != SIMULATED for result in done.results),
        "results": [result._asdict() for result in done.results], "text": done.text,
    }  # fmt: skip


def judge(folder: Path) -> None:
    """Judge again the claims of the documents in `folder` that have points: entries may have changed since."""
    for path, content, entry in _with_points(folder, "--judge"):
        try:
            done = entry.judge(content["data"])
        except KeyError as error:
            raise StartupError(f"the points of {path} have no {error}", "Run its entry again") from error
        write(path, {**content, **_judged(done)})


def _with_points(folder: Path, flag: str) -> Iterator[tuple[Path, dict[str, Any], Entry]]:
    """Yield the documents in `folder` that have points, with their entries."""
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
            known = ENTRIES.get(content["name"])
        except (ValueError, KeyError, TypeError) as error:
            raise StartupError(
                f"{path} is not a document of quire reproduce: {error}", f"Give another {flag}"
            ) from error
        if known is not None and isinstance(content.get("data"), list):
            yield path, content, known


@contextmanager
def _elapsed_time(name: str) -> Iterator[None]:
    """Show on a terminal how long the entry has run and usually takes, once it has run for SHOWN_AFTER seconds."""
    if not sys.stderr.isatty():
        yield
        return
    began, ended = time.perf_counter(), threading.Event()

    def show() -> None:
        wait = SHOWN_AFTER
        while not ended.wait(wait):
            shown = f"{name}: {time.perf_counter() - began:.0f} s; it takes {ENTRIES[name].takes}"
            print(f"\r\x1b[K{shown}\r", end="", file=sys.stderr, flush=True)
            wait = 1.0

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def reproduce(
    name: str, args: list[str], out: Path | None, full: bool = False, pictures: bool = True, changes: Point = ALL
) -> Reproduction:
    """Run one entry, with `changes` of its parameters, print it, and write NAME.json and, with `pictures`, NAME.png
    into `out`."""
    with _elapsed_time(name):
        done = ENTRIES[name].run(full, changes)
    rows = [
        (r.row, r.what, "-" if r.paper is None else r.paper, r.ours, r.unit, r.verdict, r.real_or_simulated)
        for r in done.results
    ]
    print(f"{name}: {ENTRIES[name].about}")
    if done.text:
        print(done.text)
    print(table(("row", "what", "paper", "ours", "unit", "verdict", "by"), rows))
    for why in dict.fromkeys(result.why for result in done.results if result.why):
        print(f"Why: {why}")
    print()
    if out is not None:
        content = document(name, "quire reproduce", args, [])
        write(out / f"{name}.json", {**content, **_judged(done), "data": done.data})
        print(f"wrote {out / name}.json", file=sys.stderr)
        if pictures:
            save(done.draw(), out / f"{name}.png")
    return done
