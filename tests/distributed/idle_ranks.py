"""What the processes of a server with ranks use of a core while nothing is asked of them: `idle_ranks.py OUT`, a JSON
document of 20 seconds with 2 ranks and with 4."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from served_process import served

SETTLED = 5.0  # seconds after an answer before the measurement: what follows an answer is no idling


def measured(ranks: int, seconds: float, folder: Path) -> dict[str, float]:
    """Return the share of a core that each process uses during `seconds`, after one answer: frontend, ranks, others."""
    with served(folder, "--tp", str(ranks)) as server:
        server.ready().complete()
        numbered = server.ranks()
        others = [one for one in server.processes() if one not in numbered]
        named = {"front": server.process, **{f"rank {i}": one for i, one in enumerate(numbered)}}
        named |= {re.findall(r"quire\.(?!parallel)[a-z.]+", " ".join(one.cmdline()))[-1]: one for one in others}
        time.sleep(SETTLED)
        before, began = {name: sum(one.cpu_times()[:2]) for name, one in named.items()}, time.monotonic()
        time.sleep(seconds)  # what is measured
        passed = time.monotonic() - began
        return {name: (sum(one.cpu_times()[:2]) - before[name]) / passed for name, one in named.items()}


if __name__ == "__main__":
    from quire.bench.machine import machine

    with tempfile.TemporaryDirectory() as place:
        results = [{"ranks": ranks, "seconds": 20.0, "cores": measured(ranks, 20.0, Path(place))} for ranks in (2, 4)]
    document = {"name": "idle ranks", "command": "python tests/distributed/idle_ranks.py OUT", "machine": machine(),
                "other_load": "other work on both cores meanwhile", "results": results}  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
