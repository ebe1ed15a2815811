"""A card has the tiles of its own table, or of the nearest one; an H200 has those that were recorded, and a malformed
table is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import StartupError
from quire.kernels.triton import decode, fused_moe, launch, low_bit
from quire.kernels.triton.linear_tiles import few_rows_tile, fp8_rows_tile
from quire.kernels.triton.tiles import CARDS, ENTRIES, Card, measured_card, nearest, read_card, shipped_cards

CPU = torch.device("cpu")  # has an H200's table
H200 = CARDS / "h200.json"
SIZES = ((4096, 14336), (4096, 4096), (6144, 4096), (28672, 4096), (128256, 4096))
MEANS = (8, 16, 32, 128, 512)

# By rows, for each of SIZES: rows, columns, depth, stages, warps, prefetch. Record them anew when an H200 is.
FEW_ROWS = {
    1: [(0, 8, 512, 3, 4, 3), (0, 8, 512, 3, 4, 2), (0, 8, 512, 3, 2, 1), (0, 4, 2048, 3, 4, 0), (0, 4, 2048, 3, 4, 0)],
    8: [(8, 32, 512, 4, 4, 1), (8, 32, 512, 3, 2, 2), (8, 16, 256, 6, 1, 1), (8, 32, 128, 4, 2, 2),
        (8, 32, 256, 3, 2, 0)],
    16: [(16, 32, 256, 6, 4, 0), (16, 64, 256, 4, 4, 1), (16, 64, 128, 6, 4, 1), (16, 64, 128, 4, 4, 1),
         (16, 128, 128, 3, 8, 0)],
    32: [(32, 64, 128, 6, 4, 0), (32, 64, 128, 6, 4, 0), (32, 64, 128, 5, 4, 0), (32, 64, 128, 4, 4, 1),
         (32, 128, 128, 4, 8, 0)],
}  # fmt: skip
FP8_ROWS = {
    1: [(0, 8, 1024, 3, 4, 0), (0, 4, 1024, 3, 2, 0), (0, 8, 512, 4, 2, 1), (0, 8, 512, 5, 4, 0)],
    32: [(32, 64, 256, 5, 4, 0), (32, 64, 256, 5, 4, 0), (32, 64, 256, 4, 4, 0), (32, 64, 256, 4, 4, 1)],
}
ROUNDED_ROWS = {
    16: [(16, 64, 256, 6, 4, 1), (16, 64, 256, 6, 4, 0), (16, 64, 256, 6, 4, 1), (16, 64, 256, 4, 4, 0)],
    32: [(64, 32, 256, 6, 4, 0), (64, 32, 256, 6, 4, 1), (32, 64, 256, 6, 4, 0), (32, 64, 256, 4, 4, 0)],
    64: [(64, 32, 256, 6, 4, 0), (64, 32, 256, 6, 4, 0), (64, 64, 256, 4, 4, 1), (64, 64, 128, 6, 4, 0)],
}
# For gate and up, and for another weight, by the mean number of pairs.
EXPERTS = {
    True: [(16, 32, 128, 4, 2), (32, 64, 64, 4, 4), (64, 64, 64, 4, 4), (128, 128, 64, 4, 8), (128, 128, 64, 4, 8)],
    False: [(16, 64, 128, 3, 4), (32, 64, 64, 4, 4), (32, 128, 64, 4, 4), (128, 256, 64, 4, 8), (256, 128, 64, 4, 8)],
}
LOW_BIT = {
    True: [(0, 16, 512, 3, 4), (8, 64, 256, 4, 4), (16, 32, 256, 4, 2), (32, 64, 128, 3, 4), (128, 64, 128, 3, 4),
           (128, 64, 128, 3, 4)],
    False: [(0, 8, 2048, 3, 8), (8, 32, 256, 4, 1), (16, 64, 256, 4, 2), (32, 64, 128, 4, 4), (128, 64, 128, 3, 4),
            (128, 64, 128, 3, 4)],
}  # fmt: skip
ONE_TOKEN = {768: (4, 1024, 3, 4, 0), 2048: (4, 1024, 3, 4, 0), 2880: (8, 1024, 4, 4, 0), 14336: (8, 512, 3, 4, 3)}
# Tokens, stages and warps by the size of a head and the programs of 132 multiprocessors.
DECODE = {
    (64, 264): (128, 4, 2), (64, 265): (128, 3, 2), (128, 264): (64, 4, 2), (128, 265): (64, 3, 2),
    (128, 1188): (64, 3, 2), (128, 1189): (32, 4, 1), (256, 1): (16, 3, 1), (512, 1): (16, 3, 2),
}  # fmt: skip


def test_an_h200_has_the_tiles_that_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, tiles in FEW_ROWS.items():
        assert [few_rows_tile(CPU, rows, *size) for size in SIZES] == tiles
    for rows, tiles in FP8_ROWS.items():
        assert [few_rows_tile(CPU, rows, *size, fp8=True) for size in SIZES[:4]] == tiles
    for rows, tiles in ROUNDED_ROWS.items():
        assert [fp8_rows_tile(CPU, rows, *size, False) for size in SIZES[:4]] == tiles
    x, weight = torch.empty(1, dtype=torch.bfloat16), torch.empty(16, 0, 0, dtype=torch.bfloat16)
    for gated, tiles in EXPERTS.items():
        assert [fused_moe.choose_tile(16 * mean, x, weight, gated)[:5] for mean in MEANS] == tiles
    matrix = low_bit.LowBitMatrix(weight, weight, "zeros", 4, 128, 4096)
    for gated, tiles in LOW_BIT.items():
        assert [low_bit.choose_tile(mean, x, matrix, gated, False)[:5] for mean in (0, *MEANS)] == tiles
    for depth, tile in ONE_TOKEN.items():
        assert fused_moe.one_token_tile(CPU, 4096, depth, -1)[1:] == tile
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)
    for (dim, programs), (tokens, stages, warps) in DECODE.items():
        assert decode.choose_tile(16, dim, 2, programs, CPU) == (0, tokens, 0, stages, warps, 0)


def test_deterministic_tiles_are_those_of_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for experts nor for FP8 weights."""
    x, weight = torch.empty(1, dtype=torch.bfloat16), torch.empty(16, 0, 0, dtype=torch.bfloat16)
    for module in (fused_moe, low_bit):
        monkeypatch.setattr(module, "card_tile", lambda *_: pytest.fail("of a card"))
    monkeypatch.setattr("quire.kernels.triton.linear_tiles.card_tile", lambda *_: pytest.fail("of a card"))
    matrix = low_bit.LowBitMatrix(weight, weight, "zeros", 4, 128, 4096)
    for number in (2, 32):
        fused_moe.choose_tile(number, x, weight, True, deterministic=True)
        low_bit.choose_tile(number, x, matrix, True, True)
        few_rows_tile(CPU, number, 4096, 4096, fp8=True)


def card(gpu: str, major: int, minor: int, bytes_per_s: float) -> Card:
    return Card(gpu, (major, minor), bytes_per_s, {})


def test_a_card_has_its_table_or_the_nearest_one() -> None:
    cards = [card("H100", 9, 0, 3.35e12), card("H200", 9, 0, 4.8e12), card("A100", 8, 0, 2e12)]

    def found(gpu: str, major: int, minor: int, bytes_per_s: float) -> str:
        return nearest(card(gpu, major, minor, bytes_per_s), cards).gpu

    assert found("H100", 9, 0, 9e12) == "H100", "by its name first"
    assert found("H100 PCIe", 9, 0, 2e12) == "H100", "by the capability before the bandwidth"
    assert found("GH200", 9, 0, 4.9e12) == "H200"
    assert found("B200", 10, 0, 8e12) == "H200"
    assert found("RTX 3090", 8, 6, 0.94e12) == "H100", "4 from 9.0, 6 from 8.0"
    assert found("A30", 8, 0, 0.0) == "A100"


def test_a_gpu_is_asked_for_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"mem_clock_rate": 2_619_000, "mem_bus_width": 5120}
    asked: list[int] = []
    driver = type("Driver", (), {"active": type("Active", (), {"utils": type("Utils", (), {})})})
    driver.active.utils.get_device_properties = staticmethod(lambda index: asked.append(index) or limits)
    monkeypatch.setattr("triton.runtime.driver", driver)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    measured_card.cache_clear()
    assert measured_card(torch.device("cuda", 3)) in shipped_cards()
    measured_card.cache_clear()
    assert asked == [3]


CHANGES: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "an entry is missing": (lambda lines: lines.pop(), "entries are missing"),
    "an unknown one": (lambda lines: lines[0].update(entry="linear/half/wide/1"), "entries are missing"),
    "not in order": (lambda lines: lines.insert(0, lines.pop(1)), "entries are missing"),
    "no name": (lambda lines: lines[0].pop("entry"), "KeyError: 'entry'"),
    "no number": (lambda lines: lines[0].update(warps="four"), "cannot be interpreted as an integer"),
    "a size is missing": (lambda lines: lines[0].pop("columns"), "numbers are at least 1"),
    "a field is misspelled": (lambda lines: lines[1].update(wraps=lines[1].pop("warps")), "numbers are at least 1"),
    "no power of two": (lambda lines: lines[0].update(columns=24), "powers of two"),
    "too few rows": (lambda lines: lines[1].update(rows=4), "linear/half/deep/8 is .*: a tile holds all rows"),
    "no depth": (lambda lines: lines[0].pop("depth"), "numbers are at least 1"),
}


def test_malformed_tables_are_refused(tmp_path: Path) -> None:
    content, path = H200.read_text(), tmp_path / "card.json"
    path.write_text(content)
    assert read_card(path) == read_card(H200)
    for change, message in CHANGES.values():
        document = json.loads(content)
        change(document["results"])
        path.write_text(json.dumps(document))
        with pytest.raises(StartupError, match=message):
            read_card(path)
    for bandwidth in (0, -1, math.nan, math.inf):
        document = json.loads(content)
        document["card"]["bytes_per_s"] = bandwidth
        path.write_text(json.dumps(document))
        with pytest.raises(StartupError, match="bytes_per_s is"):
            read_card(path)
    for text in ("", "[]", "{}", '{"card": {"gpu": "x", "capability": 9, "bytes_per_s": 1}}', content[:-20]):
        path.write_text(text)
        with pytest.raises(StartupError, match=r"card.json is not a table of tiles"):
            read_card(path)
    with pytest.raises(StartupError, match="FileNotFoundError"):
        read_card(tmp_path / "none.json")


def test_shipped_cards_have_an_entry_a_line_and_tiles_that_fit() -> None:
    """Largest tiles must fit in the shared memory that a linear layer's kernels ask for."""
    for one in shipped_cards():
        assert list(one.tiles) == list(ENTRIES)
    for path in CARDS.iterdir():
        lines = [line for line in path.read_text().splitlines() if '"entry"' in line]
        assert len(lines) == sum(map(len, ENTRIES.values()))
        assert all(json.loads(line.rstrip(",")) for line in lines)
    assert launch.shared_memory(CPU) == 232_448
