"""The import order of the package, over its syntax trees; and what no module may use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

GROUND = {"errors", "config"}
WORDS = GROUND | {"vocabulary"}
SAID = WORDS | {"control.request"}
KERNELS, LAYERS_OF, MODELS, WEIGHTS = "data.kernels", "data.layers", "data.models", "data.weights"
CONTROL = SAID | {"control"}
DATA = {KERNELS, LAYERS_OF, MODELS, WEIGHTS, "data.runner"}
JOINS = {
    "budget", "build", "formats", "source", "reserve", "llm", "async_llm", "plan_log", "plan_replay", "pool",
    "vattention", "jenga", "shard",
}  # fmt: skip
BELOW = CONTROL | DATA | {"files", "sim", "text", "link", "parallel", *JOINS}
TOP = {"server", "cli", "bench", "reproduce", "__main__"}
LAYERS: dict[str, set[str]] = {  # what each part of the package may import, itself aside; the longest name counts
    "errors": set(),
    "config": GROUND,
    "files": {"errors"},
    "vocabulary": SAID,
    "control.request": SAID,
    "control.costs": SAID,
    "control.memory": SAID,
    "control.matching": SAID,
    "control.decoding": SAID | {"control.matching"},
    "control": CONTROL,
    "sim": CONTROL,
    KERNELS: WORDS,
    LAYERS_OF: WORDS | {KERNELS},
    MODELS: WORDS | {KERNELS, LAYERS_OF},
    WEIGHTS: WORDS | {"files", KERNELS, LAYERS_OF, MODELS},
    "data.runner": WORDS | DATA,  # nothing of the control plane
    "data": set(),
    "client": set(),  # the standard library: it is started as a program, many times
    "text": CONTROL | {"build", "files"},
    "parallel": CONTROL | {"link", "shard", KERNELS},
    "link": CONTROL | {"build", "source", "reserve", "text"},
    **dict.fromkeys(JOINS, BELOW),
    **dict.fromkeys(TOP, BELOW | TOP | {"client"}),
}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "_pickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "Environment", "Template"}
FORBIDDEN_NAMES = {"torch.load", "yaml.load"}
UNSANDBOXED = {"jinja2.Environment", "jinja2.Template"}  # may be named in annotations, not called


def part(name: str) -> str:
    """The entry of LAYERS for a module, given its name below the package."""
    while name not in LAYERS and "." in name:
        name = name.rpartition(".")[0]
    return name


def within(name: str, parts: set[str]) -> bool:
    """Whether a module is one of these parts, or below one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaches(tree: ast.AST) -> Iterator[str]:
    """Uses of what could run code from a file, or of a template engine without its sandbox."""
    for name in imported(tree):
        if name.partition(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_NAMES:
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield node.func.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_NAMES | UNSANDBOXED:
            yield ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    tree, name = ast.parse(path.read_text()), ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if name == "__init__":
        return  # the public names, loaded lazily
    mine = part(name)
    assert mine in LAYERS, f"quire.{name} has no place in the import order"
    for other in imported(tree):
        if other.startswith("quire.") and other != "quire.__version__":
            below = other.removeprefix("quire.")
            assert within(below, LAYERS[mine] | {mine}), f"quire.{name} must not import {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_code_from_files(path: Path) -> None:
    assert list(breaches(ast.parse(path.read_text()))) == []


def test_the_search_finds_what_it_looks_for() -> None:
    for source in ("import pickle", "from pickle import loads", "import cloudpickle as c", "eval('1')", "exec(text)",
                   "torch.load(path)", "from torch import load", "jinja2.Template(text)",
                   "from jinja2 import Environment\nEnvironment().from_string(text)"):  # fmt: skip
        assert list(breaches(ast.parse(source))), source
    for source in ("model.eval()", "re.compile('a')", "from jinja2 import Template"):
        assert not list(breaches(ast.parse(source))), source
