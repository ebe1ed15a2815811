"""The import order of the package, over its syntax trees; and what no module may use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import quire

pytestmark = pytest.mark.xdist_group(name="imports")  # so that one worker parses all modules, once

ROOT = Path(quire.__file__).parent
CHECKOUT = Path(__file__).parents[1]
FILES = sorted(ROOT.rglob("*.py"))
BESIDE = sorted(path for folder in ("bench", "papers", "tools") for path in (CHECKOUT / folder).rglob("*.py"))

ORDER = (  # a part imports only from those before it, and from itself
    "old_names", "errors", "protocol", "config", "files", "client", "router", "memory", "core", "text", "kernels",
    "layers", "models", "weights", "worker", "ipc", "distributed", "sim", "startup", "jenga", "vattention", "pool",
    "llm", "async_llm", "server", "deploy", "cli", "bench", "__main__",
)  # fmt: skip
ORDER_BESIDE = ("quire", "bench", "papers", "tools")  # of the package and of the folders beside it
NOT_EVEN = {  # what a part must not import though it comes before
    "client": set(ORDER),  # the standard library: it is started as a program, many times
    "router": set(ORDER),  # pure
    "worker": {"core", "memory"},
}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "_pickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "Environment", "Template"}
FORBIDDEN_NAMES = {"torch.load", "yaml.load"}
UNSANDBOXED = {"jinja2.Environment", "jinja2.Template"}  # may be named in annotations, not called
REFUSED_NAMES = FORBIDDEN_NAMES | UNSANDBOXED
LAST_NAMES = {name.rpartition(".")[2] for name in REFUSED_NAMES}


def allowed(importer: str, imported_name: str) -> bool:
    """Whether one module may import another, given their names below the package."""
    mine, other = importer.partition(".")[0], imported_name.partition(".")[0]
    if mine == other:
        return True
    return ORDER.index(other) < ORDER.index(mine) and other not in NOT_EVEN.get(mine, ())


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
        elif isinstance(node, ast.Attribute) and node.attr in LAST_NAMES and ast.unparse(node) in REFUSED_NAMES:
            yield ast.unparse(node)


@cache
def found_in(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a module imports, and its breaches. The tree is not kept: the garbage collector would search it."""
    tree = ast.parse(path.read_text())
    return tuple(imported(tree)), tuple(breaches(tree))


def test_imports_go_one_way() -> None:
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if name == "__init__":
            continue  # the public names, loaded lazily
        assert name.partition(".")[0] in ORDER, f"quire.{name} has no place in the import order"
        for other in found_in(path)[0]:
            if other.startswith("quire.") and other != "quire.__version__":
                assert allowed(name, other.removeprefix("quire.")), f"quire.{name} must not import {other}"


def test_folders_beside_the_package_import_one_way() -> None:
    for path in BESIDE:
        later = ORDER_BESIDE[ORDER_BESIDE.index(path.relative_to(CHECKOUT).parts[0]) + 1 :]
        for other in found_in(path)[0]:
            assert other.partition(".")[0] not in later, f"{path.name} must not import {other}"


def circle(imports: dict[str, tuple[str, ...]]) -> list[str]:
    """Return modules that import each other in a circle, given what each imports; imports for types count."""
    graph = {
        name: {other if other in imports else other.rpartition(".")[0] for other in others} - {name}
        for name, others in imports.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    names = {path: ".".join(("quire", *path.relative_to(ROOT).with_suffix("").parts)) for path in FILES}
    names |= {path: ".".join(path.relative_to(CHECKOUT).with_suffix("").parts) for path in BESIDE}
    assert circle({name.removesuffix(".__init__"): found_in(path)[0] for path, name in names.items()}) == []
    sources = {"a.b": "from a.c import X", "a.c": "if TYPE_CHECKING:\n    from a import b"}
    assert circle({name: tuple(imported(ast.parse(text))) for name, text in sources.items()})


def test_nothing_in_the_package_imports_what_is_not_installed() -> None:
    for path in FILES:
        for other in found_in(path)[0]:
            assert other.partition(".")[0] not in ORDER_BESIDE[1:], f"{path.name} must not import {other}"


def test_nothing_runs_code_from_files() -> None:
    assert {path.name: found_in(path)[1] for path in (*FILES, *BESIDE) if found_in(path)[1]} == {}


def test_the_search_finds_what_it_looks_for() -> None:
    for source in ("import pickle", "from pickle import loads", "import cloudpickle as c", "eval('1')", "exec(text)",
                   "torch.load(path)", "from torch import load", "jinja2.Template(text)",
                   "from jinja2 import Environment\nEnvironment().from_string(text)"):  # fmt: skip
        assert list(breaches(ast.parse(source))), source
    for source in ("model.eval()", "re.compile('a')", "from jinja2 import Template"):
        assert not list(breaches(ast.parse(source))), source
