"""Measures what the tests find: a seeded sample of small changes of the package, and how many of them fail a test.

    make mutants                                    # records reach with the gate, then runs 1,000 mutants
    python tools/mutants.py --reach FOLDER --out docs/measurements/mutants.json

A mutant changes one expression or statement within a function: a comparison, an operator, a number, a condition, a
returned value, a call or an assignment that is dropped, an exception that is not raised. It runs the tests that run
its block, quickest first, until one fails or they have taken the budget by their recorded times. It is killed by a test
that fails, or by a process that crashes or hangs; such a test must pass without the mutant. Left out are code outside
functions, asserts, messages of exceptions, and functions that Triton compiles."""

from __future__ import annotations

import argparse
import ast
import json
import queue
import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "planting"))

from planting import Planter  # type: ignore[import-not-found]  # noqa: E402  # of the path above

SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change: the text from `start` to `end` (bytes of the file) becomes `new`. `file` is relative to src/quire."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    old: str
    new: str

    def source(self) -> tuple[str, str]:
        """Return the file's path and its changed source."""
        path = ROOT / "src" / "quire" / self.file
        data = path.read_bytes()
        return str(path), (data[: self.start] + self.new.encode() + data[self.end :]).decode()


class Finder(ast.NodeVisitor):
    """Lists the mutants of one file."""

    def __init__(self, file: str, data: bytes) -> None:
        self.file, self.data, self.depth = file, data, 0
        self.found: list[Mutant] = []
        self.starts = [0]
        for line in data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def add(self, kind: str, node: Any, new: str) -> None:
        """Note a mutant of a node; `new` gets as many lines as the node has, so that others keep theirs."""
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        lines = "\n" * (node.end_lineno - node.lineno)
        new = f"({new}{lines})" if isinstance(node, ast.expr) else new + lines
        old = self.data[start:end].decode()
        self.found.append(Mutant(self.file, node.lineno, kind, start, end, old, new))

    def visit_FunctionDef(self, node: Any) -> None:
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            return
        self.depth += 1
        for statement in node.body:
            self.visit(statement)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        depth, self.depth = self.depth, 0
        for statement in node.body:
            self.visit(statement)
        self.depth = depth

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def skip(self, node: Any) -> None:
        """Nothing of it is changed."""

    visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = skip

    def visit(self, node: ast.AST) -> None:
        if self.depth:
            self.mutate(node)
        if not isinstance(node, ast.Raise):
            super().visit(node)

    def mutate(self, node: ast.AST) -> None:
        match node:
            case ast.Compare(ops=[op]) if type(op) in SWAPS:
                swapped = ast.Compare(node.left, [SWAPS[type(op)]()], node.comparators)
                self.add("comparison", node, ast.unparse(swapped))
            case ast.BinOp(op=op) if type(op) in SWAPS:
                self.add("operator", node, ast.unparse(ast.BinOp(node.left, SWAPS[type(op)](), node.right)))
            case ast.BoolOp(op=op):
                self.add("operator", node, ast.unparse(ast.BoolOp(SWAPS[type(op)](), node.values)))
            case ast.UnaryOp(op=ast.Not()):
                self.add("condition", node, ast.unparse(node.operand))
            case ast.Constant(value=bool() as value):
                self.add("constant", node, repr(not value))
            case ast.Constant(value=int() as value):
                self.add("constant", node, repr(value + 1))
            case ast.If(test=test) | ast.IfExp(test=test) if "TYPE_CHECKING" not in ast.unparse(test):
                self.add("condition", test, f"not ({ast.unparse(test)})")
            case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
                self.add("result", value, "None")
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise():
                self.add("dropped", node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                self.add("dropped", node, "pass")


def candidates() -> list[Mutant]:
    """Return every mutant of the package that compiles."""
    found = []
    for path in sorted((ROOT / "src" / "quire").rglob("*.py")):
        finder = Finder(str(path.relative_to(ROOT / "src" / "quire")), path.read_bytes())
        finder.visit(ast.parse(path.read_text()))
        found += finder.found
    return found


class Reach(NamedTuple):
    """What a run with probes recorded: seconds of each test, and the tests that run each block of each file."""

    seconds: dict[str, float]
    tests: dict[int, list[str]]
    files: dict[str, Any]
    covered: int

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the mutant's innermost block, quickest first."""
        entry = self.files[mutant.file]
        inside = [
            (last - first, -first, entry["base"] + i)
            for i, (first, last) in enumerate(entry["lines"])
            if first <= mutant.line <= last
        ]
        return self.tests.get(min(inside)[2], []) if inside else []


def reach(folder: Path) -> Reach:
    index = json.loads((folder / "index.json").read_text())
    files = {path.split("src/quire/")[1]: entry for path, entry in index.items()}
    seconds: dict[str, float] = {}
    tests: dict[int, list[str]] = defaultdict(list)
    for path in folder.rglob("tests-*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["test"].startswith("tests/planting/"):
                continue  # each starts processes that collect tests
            seconds[entry["test"]] = entry["seconds"]
            for block in entry["blocks"]:
                tests[block].append(entry["test"])
    for names in tests.values():
        names.sort(key=lambda name: (seconds[name], name))
    return Reach(seconds, dict(tests), files, len(tests))


def chosen(names: list[str], seconds: dict[str, float], budget: float, unsound: set[str]) -> list[str]:
    """Return as many of the quickest tests as the budget of seconds allows, one at least."""
    kept, spent = list[str](), 0.0
    for name in names:
        if name in unsound:
            continue
        spent += seconds[name]
        if kept and spent > budget:
            break
        kept.append(name)
    return kept


class Judge:
    """Runs mutants, and remembers which tests fail without one."""

    def __init__(self, reached: Reach, budget: float) -> None:
        self.reached, self.budget = reached, budget
        self.sound: dict[str, bool] = {}

    def verdict(self, planter: Planter, mutant: Mutant) -> dict[str, Any]:
        names, seconds = self.reached.of(mutant), self.reached.seconds
        if not names:
            return {"verdict": "not reached"}
        while True:
            unsound = {name for name, sound in self.sound.items() if not sound}
            tests = chosen(names, seconds, self.budget, unsound)
            limit = 20 + 4 * sum(seconds[name] for name in tests)
            outcome, text = planter.run(tests, dict([mutant.source()]), limit)
            if outcome == "passed":
                return {"verdict": "survived", "tests": len(tests)}
            if outcome == "failed":
                test = text.partition("\n")[0]
                if test not in self.sound:
                    begin = tests[: tests.index(test) + 1]  # an earlier one may have left something
                    self.sound[test] = planter.run(begin, {}, limit).outcome == "passed"
                if self.sound[test]:
                    return {"verdict": "killed", "by": test}
            elif outcome in ("crashed", "timeout"):
                if planter.run(tests, {}, limit).outcome == "passed":
                    return {"verdict": "killed", "by": outcome}
                for name in tests:
                    self.sound[name] = planter.run([name], {}, 20 + 4 * seconds[name]).outcome == "passed"
                if all(self.sound[name] for name in tests):
                    raise RuntimeError(f"{outcome}, and the tests do not pass together without the mutant")
            else:
                raise RuntimeError(text)


def judged(mutants: list[Mutant], judge: Judge, jobs: int, files: list[str]) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Yield each mutant with its verdict, as `jobs` processes find them."""
    waiting: queue.SimpleQueue[Mutant | None] = queue.SimpleQueue()
    ready: queue.SimpleQueue[tuple[Mutant, dict[str, Any]]] = queue.SimpleQueue()
    for mutant in [*mutants, *[None] * jobs]:
        waiting.put(mutant)

    def work(planter: Planter) -> None:
        with planter:
            while (mutant := waiting.get()) is not None:
                try:
                    ready.put((mutant, judge.verdict(planter, mutant)))
                except Exception as error:
                    ready.put((mutant, {"verdict": "error", "by": repr(error)}))

    planters = [Planter(files, "-m", "not soak and not gpu") for _ in range(jobs)]
    threads = [threading.Thread(target=work, args=(planter,), daemon=True) for planter in planters]
    for thread in threads:
        thread.start()
    for _ in mutants:
        yield ready.get()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a seeded sample of mutants against the tests that reach them.")
    parser.add_argument("--reach", type=Path, required=True, help="folder of a run of the tests with probes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--budget", type=float, default=4, help="recorded seconds of tests for each mutant")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    begin = time.monotonic()
    reached, every = reach(args.reach), candidates()
    sample = random.Random(args.seed).sample(every, args.count)
    judge = Judge(reached, args.budget)
    files = sorted({name.split("::")[0] for name in reached.seconds})
    rows, counts, folders = [], Counter[str](), defaultdict[str, Counter[str]](Counter)
    for mutant, verdict in judged(sample, judge, args.jobs, files):
        rows.append({**mutant._asdict(), **verdict})
        counts[verdict["verdict"]] += 1
        folders[mutant.file.split("/")[0] if "/" in mutant.file else "."][verdict["verdict"]] += 1
        if len(rows) % 50 == 0:
            print(f"{len(rows)} of {args.count} in {time.monotonic() - begin:.0f} s: {dict(counts)}", flush=True)
    if counts["error"]:
        errors = [row["by"] for row in rows if row["verdict"] == "error"]
        print(f"{len(errors)} mutants could not be judged, the first one for: {errors[0]}", file=sys.stderr)
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    blocks = sum(len(entry["lines"]) for entry in reached.files.values())
    document = {
        "revision": revision.strip(), "seed": args.seed, "candidates": len(every), "budget_s": args.budget,
        "seconds": round(time.monotonic() - begin), "blocks": {"all": blocks, "run": reached.covered},
        "tests": len(reached.seconds), "unsound": sorted(name for name, sound in judge.sound.items() if not sound),
        "verdicts": counts, "score": round(counts["killed"] / args.count, 4),
        "by_folder": {name: dict(folder) for name, folder in sorted(folders.items())},
        "mutants": sorted(rows, key=lambda row: (row["file"], row["start"], row["kind"])),
    }  # fmt: skip
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"killed {counts['killed']} of {args.count}; {blocks} blocks, of which tests run {reached.covered}")


if __name__ == "__main__":
    main()
