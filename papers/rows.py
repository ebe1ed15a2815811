"""Write docs/rows.md: the rows of rows.toml, each with what the documents of `quire reproduce --out` say of it."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from papers import report
from papers.entry import Entry
from papers.report import Found

HEAD = ("row", "what", "where", "commands", "results")
INTRODUCTION = """# The papers, row by row

Made by `quire reproduce --rows docs/rows.md --from docs/measurements/reproduce` from `papers/rows.toml` and the
documents in that folder; not to be edited. It lists every mechanism, kernel, baseline, model, workload, metric, figure
and table of the papers that quire follows. *Not built* means that nothing of it is here yet; *in part* says what is.

Files are below `src/quire/`, others below the checkout. Commands run there after `make test` and `source
.venv/bin/activate`; `pytest` ones check the row, `quire` ones show it. Results count the verdicts about the row, and
[reproduction.md](reproduction.md) has the numbers beside the paper's; an entry without counts shows the row but judges
others. JSON files hold further [measurements](measurements/README.md)."""


class Row(NamedTuple):
    """A row of rows.toml, which describes the fields."""

    id: str
    what: str
    where: Sequence[str] = ()
    commands: Sequence[str] = ()
    note: str = ""
    measurements: Sequence[str] = ()

    @property
    def ids(self) -> list[str]:
        """Return the ids of the row."""
        return self.id.split(", ")


class Section(NamedTuple):
    """A heading and the rows below it."""

    title: str
    rows: Sequence[Row]


def read_rows() -> list[Section]:
    """Return the sections of rows.toml."""
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Section(one["title"], [Row(**row) for row in one.get("rows", ())]) for one in content["section"]]


def page(entries: Mapping[str, Entry], folder: Path) -> str:
    """Return the page. StartupError if `folder` has no documents."""
    found = report.documents(folder)
    documents = [one for name in entries for one in found if one.content["name"] == name]
    parts = [INTRODUCTION]
    for section in read_rows():
        parts.append(section.title)
        if section.rows:
            cells = [HEAD, ["---"] * len(HEAD), *(_cells(row, entries, documents) for row in section.rows)]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
    return "\n\n".join(parts) + "\n"


def _cells(row: Row, entries: Mapping[str, Entry], documents: Sequence[Found]) -> list[str]:
    claiming = [name for name, one in entries.items() if any(claim.row in row.ids for claim in one.claims)]
    names = [name for name in claiming if entries[name].part_of is None]
    runs = [run for name in names for run in entries[name].runs]
    where = row.where or dict.fromkeys(f"papers/{run.runner.partition(':')[0]}.py" for run in runs)
    commands = [f"quire reproduce {' '.join(names)}"] * bool(names) + [*row.commands]
    results = [_result(one, row) for one in documents if one.content["name"] in {*claiming, *_shown(commands)}]
    results += [f"[{name}](measurements/{name})" for name in row.measurements]
    if not (where or commands or row.note):
        results = ["not built"]
    return [
        row.id,
        row.what,
        ", ".join(map(_place, where)) or "-",
        "; ".join(f"`{command}`" for command in commands) or "-",
        "; ".join([row.note] * bool(row.note) + results) or "-",
    ]


def _shown(commands: Sequence[str]) -> Iterator[str]:
    """Return the entries that commands reproduce."""
    for command in commands:
        if command.startswith("quire reproduce "):
            yield from command.split()[2:]


def _result(one: Found, row: Row) -> str:
    """Return a link to a document's section and how many results about the row have each verdict, such as
    "[fig1](reproduction.md#fig1): 3 hold, 1 differs"."""
    name, machine = one.content["name"], one.content["machine"]
    link = f"[{name}](reproduction.md#{name})" + ("" if one.own else f" on {machine['gpu'] or machine['cpu']}")
    counts = Counter(result["verdict"] for result in one.content["results"] if result["row"] in row.ids)
    said = ", ".join(f"{n} {verdict if n == 1 else verdict.removesuffix('s')}" for verdict, n in counts.items())
    return f"{link}: {said}" if said else link


def _place(item: str) -> str:
    """Return a file, "file (symbol)" or "document.md#section" as Markdown."""
    path, _, inside = item.partition(" ")
    if ".md" in path:
        return f"[{path.partition('#')[0]}]({path})"
    return f"`{path}`" + (f" (`{inside.strip('()')}`)" if inside else "")
