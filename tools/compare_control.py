"""What planning a step costs in two checkouts: `quire bench control` in turns, by process CPU time, which others on the
machine take nothing of. `compare_control.py BEFORE/src AFTER/src --rounds 9 --out FILE.json` prints the medians and the
median of the rounds' ratios; the first round isn't told."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

CASES: dict[str, tuple[str, ...]] = {
    "1 sequence": ("1", "128"), "256 sequences": ("256", "128"), "1000 sequences": ("1000", "128"),
    "256 sequences, four groups": ("256", "128", "4"),
    "256 sequences, two unlike groups": ("256", "128", "2", "unlike"), "64 requests of 4 beams": ("64", "512", "beams"),
}  # fmt: skip
PROGRAM = """
import json, sys, time
from types import SimpleNamespace
from bench import control
control.time = SimpleNamespace(perf_counter=time.process_time)
found = {}
for name, (count, context, *more) in json.loads(sys.argv[1]).items():
    if more == ["beams"]:
        cost = control.beams_cost(int(count), 4, int(context), int(sys.argv[2]))
    else:
        groups = int(more[0]) if more else 1
        cost = control.step_cost(int(count), int(context), int(sys.argv[2]), groups, more[1:] == ["unlike"])
    found[name] = cost["step_us"]["p50"]
print(json.dumps(found))
"""


def measured(source: Path, steps: int) -> dict[str, float]:
    """Median microseconds of CPU a step, by case, in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(CASES), str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
    folder = source.resolve().parent  # whose bench/ is imported
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compared(before: Path, after: Path, rounds: int, steps: int) -> list[dict[str, Any]]:
    """By case, all rounds; who goes first changes from round to round."""
    told: list[tuple[dict[str, float], dict[str, float]]] = []
    for i in range(rounds + 1):
        order = (before, after) if i % 2 else (after, before)
        by = {source: measured(source, steps) for source in order}
        told.append((by[before], by[after]))
    found = []
    for name in CASES:
        old, new = ([one[which][name] for one in told[1:]] for which in (0, 1))
        ratios = sorted(b / a for a, b in zip(old, new))
        found.append({"case": name, "before_us": old, "after_us": new, "median_before_us": median(old),
                      "median_after_us": median(new), "median_ratio": median(ratios), "ratios": ratios})  # fmt: skip
    return found


def revision(source: Path) -> str:
    done = subprocess.run(["git", "-C", source, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = compared(args.before, args.after, args.rounds, args.steps)
    for one in results:
        print(f"{one['case']:34} {one['median_before_us']:9.1f} {one['median_after_us']:9.1f} us "
              f"{one['median_ratio']:.3f} ({one['ratios'][0]:.3f} to {one['ratios'][-1]:.3f})")  # fmt: skip
    if args.out is not None:
        about = {"before": revision(args.before), "after": revision(args.after), "rounds": args.rounds}
        args.out.write_text(json.dumps({**about, "steps": args.steps, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
