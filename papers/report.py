"""Write docs/reproduction.md from the documents of `quire reproduce --out`.

For every entry it lists the numbers beside the paper's with verdicts, the machine, the command and the picture. A
document belongs to the entry that it names; NAME.json is the entry's own, others are runs on other machines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from papers.entry import DIFFERS, MISSED, VERDICTS
from quire.errors import StartupError

HEAD = ("row", "what", "paper", "ours", "unit", "verdict", "by")
FIGURES = 4  # significant figures of a number
INTRODUCTION = """# The papers' results, reproduced

Made by `quire reproduce --report FILE --from DIR` from the documents in that folder; not to be edited. An entry runs by
`quire reproduce NAME`. The column *paper* has what the paper says, and nothing else. A claim *holds* if ours is within
10 % of the paper's number, or of its effect (a ratio's distance from 1), or in its range, unless its line states
another tolerance. Else it *differs*, and a sentence says why. *By arithmetic*: it holds, and follows from a closed
form. A goal of our own is *met* or *missed*. *Measured* is a number without a claim, *cited* one of a paper's that is
judged elsewhere, if at all. *Simulated* is the engine on a device of which only the costs are known
([simulation.md](simulation.md)); *arithmetic* is a closed form; *real* is all
the rest."""


class Described(Protocol):
    """The metadata of an entry that the report uses."""

    @property
    def about(self) -> str:
        """Return a one-line description."""
        ...

    @property
    def part_of(self) -> str | None:
        """Return the entry that includes this one."""
        ...


class Found(NamedTuple):
    """A document and its path."""

    path: Path
    content: dict[str, Any]

    @property
    def own(self) -> bool:
        """Return True if this is the entry's own document, NAME.json."""
        return bool(self.path.stem == self.content["name"])

    def count(self, verdict: str) -> int:
        return sum(1 for result in self.content["results"] if result["verdict"] == verdict)


def report(entries: Mapping[str, Described], folder: Path, path: Path) -> str:
    """Return the text for a file at `path`, from which pictures are linked. StartupError if `folder` has no
    documents."""
    found = documents(folder)
    of = {name: [one for one in found if one.content["name"] == name] for name in entries}
    missing = [name for name, entry in entries.items() if not of[name] and entry.part_of is None]
    parts = [INTRODUCTION, _overview(entries, of)]
    for name, entry in entries.items():
        if of[name]:
            parts.append(f"## {name}\n\n{entry.about}.")
            parts += [_run(one, path) for one in of[name]]
    if missing:
        lines = [f"- `{name}`: {entries[name].about}" for name in missing]
        parts.append("\n".join(["## Not yet run", "", *lines]))
    return "\n\n".join(parts) + "\n"


def write_report(entries: Mapping[str, Described], folder: Path, path: Path) -> None:
    """Write the report to `path`. StartupError if it can't be written."""
    write_page(path, report(entries, folder, path), "--report")


def write_page(path: Path, text: str, flag: str) -> None:
    """Write a page. StartupError if it can't be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StartupError(f"{path} can't be written: {error.strerror}", f"Give another {flag}") from error


def documents(folder: Path) -> list[Found]:
    """Return the documents of `quire reproduce`, an entry's own before the others."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
            if str(content["command"]).startswith("quire reproduce"):
                found.append(Found(path, content))
        except (ValueError, KeyError, TypeError) as error:
            raise StartupError(
                f"{path} is not a document of quire reproduce: {error}", "Give another --from"
            ) from error
    if not found:
        raise StartupError(
            f"{folder} has no documents of quire reproduce", "Give the --out of quire reproduce as --from"
        )
    return sorted(found, key=lambda one: (not one.own, one.path.name))


def _overview(entries: Mapping[str, Described], of: Mapping[str, Sequence[Found]]) -> str:
    rows = []
    for name, entry in entries.items():
        for one in of[name]:
            where = "" if one.own else f" ({one.content['machine']['gpu'] or one.content['machine']['cpu']})"
            rows.append((f"[{name}](#{name}){where}", entry.about, *(one.count(verdict) or "" for verdict in VERDICTS)))
    return "\n".join(_table(("entry", "what", *VERDICTS), rows))


def _run(one: Found, path: Path) -> str:
    """Return the section of one document: results, text, machine, command and picture."""
    content = one.content
    rows = [
        (
            result["row"], result["what"], shown(result["paper"]), shown(result["ours"]), result["unit"],
            f"**{result['verdict']}**" if result["verdict"] in (DIFFERS, MISSED) else result["verdict"],
            result["real_or_simulated"],
        )
        for result in content["results"]
    ]  # fmt: skip
    lines = [f"### On {content['machine']['gpu']}\n" if content["machine"]["gpu"] and not one.own else ""]
    whys = dict.fromkeys(result["why"] for result in content["results"] if result.get("why"))
    lines += [
        *_table(HEAD, rows),
        "",
        *(f"Why: {why}\n" for why in whys),
        *_said(content),
        f"`{content['command']}`; {_machine(content)}.",
    ]
    picture = one.path.with_suffix(".png")
    if picture.exists():
        link = Path(os.path.relpath(picture, path.parent)).as_posix()
        lines += ["", f"![{one.path.stem}]({link})"]
    return "\n".join(lines).strip("\n")


def _machine(content: Mapping[str, Any]) -> str:
    """Return a description of the machine."""
    machine = content["machine"]
    parts = [machine["gpu"], f"{machine['cpu']}, {machine['logical_cores']} logical cores"]
    if machine["threads"]:
        parts.append("one thread" if machine["threads"] == 1 else f"{machine['threads']} threads")
    parts += [f"torch {machine['torch']}", str(content["date"])[:10], f"revision {machine['revision'] or 'unknown'}"]
    return ", ".join(part for part in parts if part)


def _said(content: Mapping[str, Any]) -> list[str]:
    """Return the text that the entry printed beside its numbers; older documents have none."""
    text = content.get("text")
    return ["```text", *str(text).strip("\n").splitlines(), "```", ""] if text else []


def shown(value: object) -> str:
    """Format a value for a cell: at most FIGURES significant figures, integers in full."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10 ** (FIGURES - 1) else f"{value:.{FIGURES}g}"
    if isinstance(value, list):
        return ", ".join(f"({shown(item)})" if isinstance(item, list) else shown(item) for item in value)
    return str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Return a Markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
