"""The tests of the kernels while AddressSanitizer and UndefinedBehaviorSanitizer watch. As a script it writes what came
of it: `python tests/kernels/cpu/sanitized.py docs/measurements/cpu_sanitized.json`.

They see what plain C++ does, vectors of the compiler's included; what instructions named by intrinsics read and write
(masked loads, tiles of AMX) they don't: pages that may not be touched watch those, in the tests themselves.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.bench.machine import machine
from quire.kernels.cpu.build import HERE as KERNELS
from quire.kernels.cpu.build import compile_source, compiler, link_library
from quire.kernels.cpu.library_loader import usable_features
from quire.kernels.cpu.variants import COMPILE_FLAGS, LINK_FLAGS, Variant, cpu_features, machine_variants, source_digest

HERE = Path(__file__).parent
NATIVE = KERNELS / "native"
FILES = (
    "test_small_kernels.py", "test_native_sampling.py", "test_native_attention.py", "test_cpu_linear.py",
    "test_cpu_quantised.py", "test_library.py", "test_fenced_rows.py", "test_common_pages.py",
)  # fmt: skip
LEFT_OUT = ("a_token_beyond", "processes_end_cleanly", "threads_that_there_are_not")
"""They start processes of their own, of which some are to die, or to lack memory."""
WATCHED = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def sanitized() -> dict[str, Any]:
    """What was run, and the first thing that a sanitizer, or a test, complained of, if any. LookupError where the
    compiler has no sanitizers."""
    cxx = compiler()
    if cxx is None:
        raise LookupError("there is no compiler")
    runtime = output_of([*cxx, "-print-file-name=libasan.so"])
    if not Path(runtime).is_absolute():
        raise LookupError(f"{cxx[0]} has no libasan.so")
    began = time.monotonic()
    kinds = [kind for kind in machine_variants() if kind.needs <= usable_features(cpu_features())]
    if not kinds:
        raise LookupError("this machine runs none of the kernels")
    kinds = kinds[:1] + kinds[1:][-1:]  # the most and the least instructions
    with tempfile.TemporaryDirectory() as folder:
        for variant in kinds:
            built(Path(folder), cxx, variant)
        (Path(folder) / "sources").write_text(source_digest())
        environment = {
            **os.environ, "CXX": " ".join((*cxx, *WATCHED)), "QUIRE_TEST_KERNELS": folder, "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        }  # fmt: skip
        chosen = " and ".join(f"not {name}" for name in LEFT_OUT)
        command = [sys.executable, "-m", "pytest", "-p", "elsewhere", "-p", "no:cacheprovider", "-x", "-k", chosen]
        done = subprocess.run(
            [*command, *(str(HERE / name) for name in FILES)], env=environment, capture_output=True, text=True
        )
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)
    complaint = re.search(r"^.*(ERROR: AddressSanitizer|runtime error:).*$", done.stdout + done.stderr, re.MULTILINE)
    return {
        "machine": machine(), "compiler": output_of([*cxx, "--version"]).splitlines()[0], "flags": WATCHED,
        "variants": [variant.name for variant in kinds], "files": FILES, "left_out": LEFT_OUT,
        **{what: int(count) for count, what in counts},
        "exit": done.returncode, "complaint": complaint and complaint[0],
        "seconds": round(time.monotonic() - began), "last_lines": (done.stdout + done.stderr)[-3000:].splitlines(),
    }  # fmt: skip


def built(folder: Path, cxx: tuple[str, ...], variant: Variant) -> None:
    """That variant's library, watched, in `folder`."""
    command = (*cxx, *COMPILE_FLAGS, *variant.flags, *WATCHED)
    objects = [
        compile_source(source, command, variant.name.encode(), folder) for source in sorted(NATIVE.glob("*.cpp"))
    ]
    link_library(folder / f"{variant.name}.so", (*cxx, *LINK_FLAGS, *WATCHED), objects)


def output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    report = sanitized()
    report["command"] = "python tests/kernels/cpu/sanitized.py " + " ".join(sys.argv[1:])
    if not report["exit"]:
        del report["last_lines"]
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")
