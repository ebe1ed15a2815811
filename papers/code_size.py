"""Count the package's lines of code: blank lines, comments and docstrings are not counted."""

from __future__ import annotations

import tokenize
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import quire

ROOT = Path(quire.__file__).parent
OTHER, KERNELS, MEASURING = "text and Python API", "kernels", "measuring"
PARTS = {  # files and folders below the package; a file belongs to the longest name that it begins with
    "control plane": ("core", "memory", "protocol", "config", "errors"), "runner": ("worker",),
    "models": ("layers", "models", "weights"), KERNELS: ("kernels",),
    "server and command line": ("server", "cli", "__main__"), MEASURING: ("bench", "sim"),
}  # fmt: skip
SILENT = {tokenize.COMMENT, tokenize.NL}
LAYOUT = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}


def part_of(path: Path) -> str:
    """Return the part of a file, given its path below the package."""
    named = {name: part for part, names in PARTS.items() for name in names}
    above = (path.with_suffix(""), *path.parents)
    return next((named[str(folder)] for folder in above if str(folder) in named), OTHER)


def code_lines(path: Path) -> int:
    """Count the lines with any token of code. A string that is a whole statement is documentation."""
    with tokenize.open(path) as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in SILENT]
    held: set[int] = set()
    for i, token in enumerate(tokens):
        if token.type in LAYOUT or (token.type == tokenize.STRING and _alone(tokens, i)):
            continue
        held.update(range(token.start[0], token.end[0] + 1))
    return len(held)


def _alone(tokens: list[tokenize.TokenInfo], i: int) -> bool:
    before = i == 0 or tokens[i - 1].type in LAYOUT
    return before and tokens[i + 1].type in LAYOUT


def package(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the size of every part, in the order of PARTS; measuring code is last."""
    files: dict[str, list[Path]] = {part: [] for part in (*PARTS, OTHER)}
    for path in sorted(root.rglob("*.py")):
        files[part_of(path.relative_to(root))].append(path)
    return [_size(part, files[part]) for part in (*(part for part in PARTS if part != MEASURING), OTHER, MEASURING)]


def sizes(parts: Mapping[str, Sequence[str]], root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the size of each part, given by patterns of the names of files below the package."""
    return [_size(part, [path for name in names for path in root.glob(name)]) for part, names in parts.items()]


def _size(part: str, files: Iterable[Path]) -> dict[str, Any]:
    """Return the number of files, of all their lines, and of lines of code in Python."""
    files = list(files)
    lines = sum(len(path.read_text(errors="replace").splitlines()) for path in files)
    code = sum(code_lines(path) for path in files if path.suffix == ".py")
    return {"part": part, "files": len(files), "lines": lines, "code": code}
