"""Blocks of quantised weights: the numbers that they stand for, beside the reference of the format's own project."""

from __future__ import annotations

import numpy as np
import pytest

from quire.data.weights.blocks import KINDS, PIECE, Blocks, row_bytes

RANDOM = np.random.default_rng(7)


def random_blocks(kind: str, rows: int = 24, blocks: int = 3) -> Blocks:
    """Random bits; scales, and floats, are finite."""
    form = KINDS[kind]
    columns = form.numbers * blocks
    data = RANDOM.integers(0, 256, (rows, blocks, form.bytes), dtype=np.uint8)
    for at in form.scales:
        data[:, :, at + 1] &= 0xBB
    made = Blocks(kind, rows, columns, data.reshape(rows, -1))
    if made.plain:
        numbers = RANDOM.normal(size=(rows, columns)).astype(np.float32)
        whole = numbers.astype(np.float16) if kind == "f16" else numbers
        made = made._replace(data=whole.view(np.uint8).reshape(rows, -1))
        if kind == "bf16":
            made = made._replace(data=numbers.view(np.uint16)[:, 1::2].copy().view(np.uint8))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_formats_own_project(kind: str) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf, the format's own project, is not installed")
    blocks = random_blocks(kind)
    theirs = gguf.quants.dequantize(blocks.data, gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(blocks.numbers().view(np.uint32), np.asarray(theirs, np.float32).view(np.uint32))
    assert row_bytes(kind, blocks.columns) == gguf.quants.quant_shape_to_byte_shape(
        (1, blocks.columns), gguf.GGMLQuantizationType[kind.upper()]
    )[1]  # fmt: skip


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_a_block_by_hand(kind: str) -> None:
    """ggml-common.h: the scale, perhaps the least number, fifth bits, then numbers: i and i + 16 in one byte."""
    numbers = RANDOM.integers(0, 32 if "5" in kind else 16, 32)
    scale, least = np.float16(0.25), np.float16(-1.5)
    head = [scale.tobytes()] + [least.tobytes()] * kind.endswith("_1")
    if kind == "q8_0":
        numbers = RANDOM.integers(-128, 128, 32)
        body, expected = [numbers.astype(np.int8).tobytes()], numbers * 0.25
    else:
        fifth = [sum(int(n >> 4) << i for i, n in enumerate(numbers)).to_bytes(4, "little")] * ("5" in kind)
        body = [*fifth, bytes(int(a & 15 | (b & 15) << 4) for a, b in zip(numbers[:16], numbers[16:]))]
        middle = 16 if "5" in kind else 8
        expected = numbers * 0.25 - 1.5 if kind.endswith("_1") else (numbers - middle) * 0.25
    data = np.frombuffer(b"".join(head + body), np.uint8)[None]
    assert data.shape[1] == KINDS[kind].bytes
    assert Blocks(kind, 1, 32, data).numbers()[0].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_and_parts_are_rows_of_the_whole(kind: str) -> None:
    blocks = random_blocks(kind, rows=50, blocks=max(1, PIECE // 16 // KINDS[kind].numbers))
    whole = blocks.numbers()
    found = list(blocks.pieces())
    assert len(found) > 1
    assert np.array_equal(np.concatenate([piece for _, piece in found]), whole)
    assert [start for start, _ in found] == [16 * i for i in range(len(found))]
    assert np.array_equal(blocks.part(7, 9).numbers(), whole[7:9])
    order = RANDOM.permutation(50)
    assert np.array_equal(blocks.picked(order).numbers(), whole[order])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_a_scale_that_is_not_finite_is_found(kind: str, bits: int) -> None:
    blocks, form = random_blocks(kind), KINDS[kind]
    assert blocks.finite()
    for at in form.scales or (0,):
        data = blocks.data.copy().reshape(blocks.rows, -1, form.bytes)
        if blocks.plain:
            data[3, 1] = np.array([np.float32(np.uint16(bits).view(np.float16))]).view(np.uint8)[-form.bytes :]
            if kind == "f16":
                data[3, 1] = np.frombuffer(bits.to_bytes(2, "little"), np.uint8)
        else:
            data[3, 1, at : at + 2] = np.frombuffer(bits.to_bytes(2, "little"), np.uint8)
        assert not blocks._replace(data=data.reshape(blocks.rows, -1)).finite()
