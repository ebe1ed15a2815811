"""`quire replay`: check a log of plans, or compare two logs."""

from __future__ import annotations

import argparse
from pathlib import Path

DIFFERENT = 1


def replay(args: argparse.Namespace) -> int:
    """Print a summary of the log, or with --against the first difference between two logs."""
    from quire.protocol.plan_log import PlanLog
    from quire.sim.plan_replay import compare_files, summarize
    from quire.sim.plan_replay import replay as replayed

    if args.against is not None:
        difference = compare_files(Path(args.file), Path(args.against))
        print("no difference" if difference is None else difference)
        return 0 if difference is None else DIFFERENT
    with PlanLog(Path(args.file)) as log:
        print("\n".join(summarize(log, replayed(log))))
    return 0
