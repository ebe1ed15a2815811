"""The rules of targets.py: each still matches something."""

from __future__ import annotations

from pathlib import Path

from targets import GATE_CASES

ROOT = Path(__file__).parents[1]


def test_every_rule_names_tests_that_exist() -> None:
    for prefix in GATE_CASES:
        file, _, function = prefix.partition("::")
        found = [path for path in ROOT.glob(f"{file}*") if path.is_dir() or path.suffix == ".py"]
        assert found, f"no test file begins with {file}"
        assert not function or f"def {function}" in found[0].read_text(), f"{file} has no {function}"
