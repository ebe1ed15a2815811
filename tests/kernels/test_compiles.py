"""The kernels compile in bf16 for GPUs that aren't here, and need no more shared memory than those have. (In the
interpreter, which computes in fp32, neither shows.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOR_ALL = {
    "_decode", "_join", "_prompt", "_rope_write", "_norm", "_gate", "_act", "_softcap", "_peaks", "_choose",
    "_scores", "add_totals", "list_keys", "_search", "_copy", "_conv", "_conv_single", "_scan", "_unrolled",
    "_experts", "_one_token", "_parts", "_route", "_sum", "_recurrent", "_chunked", "_gated_norm",
    "_delta_rule", "_solve_chunks", "_scan_chunks", "_norm_gate", "_product", "_low_bit_token", "_expand",
    "_one_shot", "_two_shot", "_gather", "_carried", "_add_up", "_await_own", "_finish", "_best", "_merge",
    "_together", "_by_count", "_by_weight",
}  # fmt: skip
LARGE = {"_one", "_few", "_rounded"}  # for few rows, where there is room
FP8 = {"_rows_in_fp8", "_tile"}  # from Ada on
HOPPER = {"_prompt_hopper", "_tiles"}
# Are compiled anew for other numbers of rows.
DETERMINISTIC = {"_prompt", "_rope_write", "_norm", "_gate", "_act", "_conv", "_unrolled"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", [32, pytest.param(1, marks=pytest.mark.soak)], ids=["some", "all"])
@pytest.mark.parametrize(
    ("capability", "shared", "multiprocessors", "kernels"),
    [
        (90, 232_448, 132, FOR_ALL | LARGE | HOPPER | FP8),
        pytest.param(89, 101_376, 58, FOR_ALL | FP8, marks=pytest.mark.soak),
        pytest.param(86, 101_376, 82, FOR_ALL, marks=pytest.mark.soak),
    ],
    ids=["H200", "L4", "RTX 3090"],
)
def test_kernels_compile(
    capability: int, shared: int, multiprocessors: int, kernels: set[str], every: int, tmp_path: Path
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for.py")),
         *map(str, (capability, shared, multiprocessors, every))],
        capture_output=True, text=True, env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    launches = json.loads(done.stdout)
    assert {launch[0] for launch in launches} == kernels
    assert [(name, size) for name, size, _, _ in launches if size > shared] == []
    assert [(name, count) for name, _, count, _ in launches if count] == [], (
        "a ring's place is given away while it is read"
    )
    assert [(name, count) for name, _, _, count in launches if count and name in DETERMINISTIC] == [], (
        "what is rounded is up to the compiler"
    )


def test_ranks_compile_each_kernel_once(tmp_path: Path) -> None:
    """Together, and none waits for another one's work before it has done its own."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, str(Path(__file__).with_name("compile_for.py")), "90", "232448", "132", "1", "together"]
    ranks = [
        subprocess.Popen(program, env=env | {"TRITON_CACHE_DIR": str(tmp_path)}, text=True, stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE)
        for _ in range(2)
    ]  # fmt: skip
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for number, rank in enumerate(ranks):
        assert rank.stdin is not None
        rank.stdin.write(f"{number} 2\n")
        rank.stdin.flush()
    answers = [rank.communicate()[0] for rank in ranks]
    lines = [answer.split() for answer in answers]
    compiled, read = ([int(one[i]) for one in lines] for i in (0, 1))
    assert sum(compiled) == sum(read) == 10, "kernels, each compiled by one and read by the other"
    assert min(compiled) > 0
