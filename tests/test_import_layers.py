"""The import order of the package, over its syntax trees; what no module may use; and a control plane without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

VOCABULARY = {"errors", "specs", "request", "plan", "config", "method", "costs"}
CONTROL = VOCABULARY | {"memory", "decoding", "limits", "scheduler", "engine"}
DATA = {"kernels", "layers", "models", "weights"}
OFFLINE = {"build", "llm", "async_llm", "streams", "outputs", "prompts", "session"}
TEXT = {"text"}
BELOW = CONTROL | DATA | TEXT | {"sim", "runner"}
TOP = {"server", "cli", "bench", "reproduce", "collector", "__main__"}
LAYERS: dict[str, set[str]] = {  # what each part of the package may import, itself aside
    **dict.fromkeys(VOCABULARY, VOCABULARY),
    "memory": VOCABULARY,
    "decoding": VOCABULARY,
    "scheduler": VOCABULARY | {"memory", "decoding"},
    "limits": VOCABULARY | {"decoding"},
    "engine": VOCABULARY | {"memory", "decoding", "limits", "scheduler"},
    "sim": CONTROL,
    "kernels": VOCABULARY,
    "layers": VOCABULARY | {"kernels"},
    "models": VOCABULARY | {"kernels", "layers"},
    "weights": VOCABULARY | {"kernels", "layers", "models"},
    "text": CONTROL,
    "runner": CONTROL | DATA,
    **dict.fromkeys(OFFLINE, BELOW | OFFLINE),
    **dict.fromkeys(TOP, BELOW | OFFLINE | TOP),
}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "_pickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_NAMES = {("torch", "load"), ("yaml", "load")}
UNSANDBOXED = {"Environment", "Template"}  # of jinja2: may be named in annotations, not called


def part(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


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
        head, _, tail = name.partition(".")
        if head in FORBIDDEN_MODULES or (head, tail) in FORBIDDEN_NAMES:
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in FORBIDDEN_CALLS | UNSANDBOXED:
                yield node.func.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {f"jinja2.{name}" for name in UNSANDBOXED}:
            yield ast.unparse(node)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) in FORBIDDEN_NAMES
        ):
            yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    tree, mine = ast.parse(path.read_text()), part(path)
    if mine == "__init__":
        return  # the public names, loaded lazily
    assert mine in LAYERS, f"quire.{mine} has no place in the import order"
    for name in imported(tree):
        if name.startswith("quire."):
            other = name.split(".")[1]
            assert other == mine or other in LAYERS[mine] | {"__version__"}, f"quire.{mine} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_code_from_files(path: Path) -> None:
    assert list(breaches(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as c",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "from torch import load",
        "jinja2.Template(text)",
        "from jinja2 import Environment\nEnvironment().from_string(text)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(breaches(ast.parse(source)))


@pytest.mark.parametrize("source", ["model.eval()", "re.compile('a')", "from jinja2 import Template"])
def test_the_search_finds_nothing_else(source: str) -> None:
    assert not list(breaches(ast.parse(source)))


def test_the_control_plane_imports_no_torch() -> None:
    code = (
        "import sys, quire.engine, quire.sim.echo, quire.memory\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
