"""`quire plan`: print the memory plan without loading the model."""

from __future__ import annotations

import argparse

from quire.cli.flags import config_from


def plan(args: argparse.Namespace) -> int:
    """Print the plan."""
    config = config_from(args)
    from quire.startup.build import describe_memory_plan

    print("\n".join(describe_memory_plan(config, args.device_gib)))
    return 0
