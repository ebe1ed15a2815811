"""Reads mutated pictures under a limit of memory, as a program: `picture_fuzz.py SEED COUNT MEBIBYTES`. Says what came
of them as JSON. Anything but a picture or a refusal ends it."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from picture_files import mutated, small_files

from quire.errors import InputError
from quire.text.images import ImageLimits, decode


def main() -> None:
    """Every file once as it is, so that all that is needed is loaded, then mutations of them under the limit."""
    seed, count, mebibytes = map(int, sys.argv[1:])
    limits = ImageLimits(pixels=1 << 20)
    for data in small_files().values():
        decode(data, limits)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20),) * 2)
    found, slowest = Counter[str](), 0.0
    for data in mutated(seed, count):
        began = time.perf_counter()
        try:
            image = decode(data, limits)
            assert image.mode == "RGB"
            assert 0 < image.width * image.height <= limits.pixels
            found["read"] += 1
        except InputError:
            found["refused"] += 1
        slowest = max(slowest, time.perf_counter() - began)
    print(json.dumps({**found, "slowest": slowest}))


main()
