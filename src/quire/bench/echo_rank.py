"""A rank without a model, whose tokens are constants: what is left is the way of a step there and back."""

from __future__ import annotations

from quire.parallel import rank
from quire.sim.echo import EchoRunner


def main() -> None:
    """See quire.parallel.rank."""
    rank.main(lambda hello: EchoRunner(blind=True))
