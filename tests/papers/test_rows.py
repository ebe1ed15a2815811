"""docs/rows.md is what papers/rows.toml and the documents of reproductions make, and what its rows name is there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from papers import ENTRIES, main
from papers.entry import Each, Entry, Result
from papers.rows import Row, page, read_rows
from quire.cli import build_parsers
from quire.errors import StartupError

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROWS = [row for section in read_rows() for row in section.rows]
IDS = [name for row in ROWS for name in row.ids]


def headings(path: Path) -> set[str]:
    """Return the anchors of a document."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def missing(places: Iterable[str]) -> list[str]:
    """Return the places of rows that do not exist."""

    def is_there(place: str) -> bool:
        path, _, symbols = place.partition(" ")
        name, _, anchor = path.partition("#")
        found = next((home / name for home in (ROOT / "src" / "quire", ROOT, DOCS) if (home / name).exists()), None)
        if found is None or (anchor and anchor not in headings(found)):
            return False
        return all(re.search(rf"\b{symbol}\b", found.read_text()) for symbol in re.findall(r"\w+", symbols))

    return [place for place in places if not is_there(place)]


def unknown(command: str) -> list[str]:
    """Return the words of a command that name nothing here."""
    program, *words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    if program == "make":
        return [word for word in words if not re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE)]
    if program == "quire":
        names = words[1:] if words[0] == "reproduce" else []
        return [*({words[0]} - build_parsers()[1].keys()), *(name for name in names if name not in ENTRIES)]
    assert program in ("pytest", "python"), program
    return [word for word in words if re.match(r"(tests|examples)(/|$)", word) and not (ROOT / word).exists()]


def test_the_page_is_what_the_rows_and_documents_make() -> None:
    assert (DOCS / "rows.md").read_text(encoding="utf-8") == page(ENTRIES, DOCS / "measurements" / "reproduce")


def test_every_claim_has_a_row() -> None:
    assert len(IDS) == len(set(IDS)) > 250
    assert {claim.row for entry in ENTRIES.values() for claim in entry.claims} <= set(IDS)


def test_every_place_and_measurement_is_there() -> None:
    places = [place for row in ROWS for place in row.where]
    assert len(places) > 250
    assert missing(places) == []
    assert missing(["nowhere.py", "core/scheduler.py (nowhere)", "memories.md#nowhere"]) == [
        "nowhere.py", "core/scheduler.py (nowhere)", "memories.md#nowhere",
    ]  # fmt: skip
    assert missing(f"docs/measurements/{name}" for row in ROWS for name in row.measurements) == []


def test_every_command_names_what_is_there() -> None:
    commands = [command for row in ROWS for command in row.commands]
    assert len(commands) > 200
    assert not any("|" in cell for row in ROWS for cell in (row.what, row.note, *row.where, *row.commands))
    assert [command for command in commands if unknown(command)] == []
    for wrong in ("pytest tests/nowhere.py", "quire reproduce nothing", "quire nothing", "make nothing"):
        assert unknown(wrong), wrong


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for stem, gpu, verdicts in (
        ("fig1", None, ("met", "holds", "holds", "differs")),
        ("h200_fig1", "H200", ("holds",)),
    ):
        results = [Result("P-F1", "what", None, 1, "", verdict)._asdict() for verdict in verdicts]
        content = {"name": "fig1", "command": "quire reproduce fig1", "machine": {"gpu": gpu, "cpu": "a CPU"}}
        (tmp_path / f"{stem}.json").write_text(json.dumps({**content, "results": results}))
    return tmp_path


def test_any_verdicts_are_counted_by_document(folder: Path) -> None:
    known = {"fig1": Entry("A figure", "serving:growth", claims=[Each("P-F1", "what", "ours")])}
    line = next(line for line in page(known, folder).splitlines() if line.startswith("| P-F1 |"))
    assert line == (
        "| P-F1 | memory of a 13B model; growth of its KV | `papers/serving.py` | `quire reproduce fig1` "
        "| [fig1](reproduction.md#fig1): 1 met, 2 hold, 1 differs; [fig1](reproduction.md#fig1) on H200: 1 holds |"
    )


def test_what_has_nothing_is_not_built(folder: Path) -> None:
    assert Row("P-R1", "a review: page sizes, deeper than Figure 18b") in ROWS
    assert "| P-R1 | a review: page sizes, deeper than Figure 18b | - | - | not built |" in page({}, folder)


def test_the_command_writes_the_page(folder: Path) -> None:
    assert main(["--rows", str(folder / "rows.md"), "--from", str(folder)]) == 0
    assert (folder / "rows.md").read_text(encoding="utf-8") == page(ENTRIES, folder)
    with pytest.raises(StartupError, match="belong together"):
        main(["--rows", "rows.md"])
    with pytest.raises(StartupError, match="can't be written"):
        main(["--rows", str(folder / "none" / "rows.md"), "--from", str(folder)])
