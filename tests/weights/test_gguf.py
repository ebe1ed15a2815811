"""Reading GGUF files: what they hold, and what a stranger may have made of one."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
from gguf_files import floats, q8_0, write

from quire.errors import StartupError
from quire.models import read_spec
from quire.text.gguf_tokenizer import tokenizer_of
from quire.weights.gguf_config import open_hf_tensors, to_hf_config, to_hf_generation_config
from quire.weights.gguf_file import is_gguf, read_gguf

MUTATIONS = 400
SAID: dict[str, Any] = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 32,
    "llama.feed_forward_length": 64, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "Ġ", "ab", "é"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
}  # fmt: skip
SHAPES = {
    "token_embd.weight": (7, 32), "output_norm.weight": (32,), "output.weight": (7, 32),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32), "blk.0.attn_k.weight": (16, 32),
    "blk.0.attn_v.weight": (16, 32), "blk.0.attn_output.weight": (32, 32), "blk.0.ffn_gate.weight": (64, 32),
    "blk.0.ffn_up.weight": (64, 32), "blk.0.ffn_down.weight": (32, 64),
}  # fmt: skip


def small(path: Path, version: int = 3) -> Path:
    """A whole model of a few kilobytes."""
    rng = np.random.default_rng(3)
    numbers = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    tensors = {name: floats(n) if n.ndim == 1 else q8_0(n) for name, n in numbers.items()}
    return write(path, SAID, tensors, version)


def all_of(path: Path) -> None:
    """Everything but the model that a start makes of a file."""
    file = read_gguf(path)
    spec = read_spec(to_hf_config(file))
    to_hf_generation_config(file)
    stored = open_hf_tensors(file)
    for name in ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"):
        blocks = stored.get_tensor(name)
        assert blocks is None or blocks.slice_rows(0, 8).dequantize().dtype == np.float32
    tokenizer_of(file.metadata, str(path)).encode("ab a")
    assert spec.parameters > 0


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors(version: int, tmp_path: Path) -> None:
    said = {"a.text": "naïve", "a.flag": True, "a.number": 7, "a.large": 1 << 40, "a.small": 1e-5,
            "a.texts": ["x", "", "日本"], "a.numbers": [1, 2, 3], "a.floats": [0.5, -1.5], "a.none": []}  # fmt: skip
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = write(tmp_path / "a.gguf", said, {"m": floats(matrix), "v": floats(matrix[0], "bf16")}, version)
    file = read_gguf(path)
    assert {key: file.metadata[key] for key in ("a.text", "a.flag", "a.number", "a.large", "a.small")} == {
        "a.text": "naïve", "a.flag": True, "a.number": 7, "a.large": 1 << 40, "a.small": 1e-5
    }  # fmt: skip
    assert list(file.metadata["a.texts"]) == ["x", "", "日本"]
    assert (file.metadata["a.texts"][2], file.metadata["a.texts"][:2], len(file.metadata["a.texts"])) == (
        "日本",
        ["x", ""],
        3,
    )
    assert file.metadata["a.numbers"].tolist() == [1, 2, 3]
    assert file.metadata["a.floats"].tolist() == [0.5, -1.5]
    assert len(file.metadata["a.none"]) == 0
    assert np.array_equal(file.tensors["m"].dequantize(), matrix)
    assert file.tensors["v"][:3] == ("bf16", 1, 4)
    assert np.array_equal(file.tensors["v"].dequantize()[0], matrix[0])
    assert file.num_elements == 16
    assert not file.tensors["m"].data.flags.writeable


def test_a_file_of_the_formats_own_project(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf, the format's own project, is not installed")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "é"])
    writer.add_layer_norm_rms_eps(1e-5)
    matrix = np.random.default_rng(1).normal(size=(6, 256)).astype(np.float32)
    kinds = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16"]
    for kind in kinds:
        number = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(matrix, number)
        writer.add_tensor(kind, data, raw_shape=data.shape, raw_dtype=number)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    file = read_gguf(tmp_path / "a.gguf")
    assert (list(file.metadata["tokenizer.ggml.tokens"]), file.metadata["general.alignment"]) == (["a", "é"], 64)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert list(file.tensors) == kinds == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(file.tensors[tensor.name].dequantize(), np.asarray(theirs, np.float32))


def test_what_is_a_gguf_file(tmp_path: Path) -> None:
    small(tmp_path / "model.gguf").rename(tmp_path / "renamed")
    (tmp_path / "broken.gguf").write_bytes(b"")
    (tmp_path / "other").write_bytes(b"\x80")
    os.mkfifo(tmp_path / "pipe")
    named = {name: is_gguf(tmp_path / name) for name in ("renamed", "broken.gguf", "other", "pipe", "absent.gguf")}
    assert named == {"renamed": True, "broken.gguf": True, "other": False, "pipe": False, "absent.gguf": False}
    assert not is_gguf(tmp_path)


def header(tensors: int = 0, keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def info(name: str = "a", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return gguf_files.text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def key(name: str, value: bytes) -> bytes:
    return gguf_files.text(name) + value


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "other": (b"PK\x03\x04 a zip", "begins with"),
    "short": (b"GGUF\x03", "ends too soon"),
    "old": (header(version=1), "version is 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "which is big-endian"),
    "many tensors": (header(tensors=1 << 60), r"has 1152921504606846976 tensors"),
    "many keys": (header(keys=1 << 60), "keys"),
    "cut": (header(keys=1), "ends too soon"),
    "long key": (header(keys=1, rest=struct.pack("<Q", 1 << 62)), "says that it has"),
    "long text": (header(keys=1, rest=key("a", struct.pack("<IQ", 8, 1 << 62))), "says that it has"),
    "text of everything": (
        header(keys=1, rest=key("a", struct.pack("<IQ", 8, 1 << 25) + bytes(1 << 25))), "has 33554432 bytes",
    ),
    "unknown type": (header(keys=1, rest=key("a", struct.pack("<II", 13, 0))), "unknown type 13"),
    "array of arrays": (header(keys=1, rest=key("a", struct.pack("<IIQ", 9, 9, 1) + bytes(64))), "array of the type 9"),
    "long array": (header(keys=1, rest=key("a", struct.pack("<IIQ", 9, 4, 1 << 61))), "entries"),
    "long texts": (header(keys=1, rest=key("a", struct.pack("<IIQ", 9, 8, 1 << 40))), "entries"),
    "text behind": (header(keys=1, rest=key("a", struct.pack("<IIQQ", 9, 8, 1, 1 << 50))), "after the file's end"),
    "texts of everything": (
        header(keys=1, rest=key("a", struct.pack("<IIQQ", 9, 8, 1, (1 << 25) + 1) + bytes((1 << 25) + 1))),
        "texts in its arrays have 33554433 bytes",
    ),
    "many texts": (
        header(keys=1, rest=key("a", struct.pack("<IIQ", 9, 8, (1 << 20) + 1) + bytes(8 * ((1 << 20) + 1)))),
        "has 1048577 texts in arrays. At most 1,048,576",
    ),
    "twice": (header(keys=2, rest=key("a", struct.pack("<IB", 0, 1)) * 2), "key 'a' twice"),
    "alignment": (
        header(keys=1, rest=key("general.alignment", struct.pack("<II", 4, 33))), "alignment is 33",
    ),
    "part": (header(keys=1, rest=key("split.count", struct.pack("<IH", 2, 3))), "one of 3 parts.*Merge"),
    "no dimensions": (header(tensors=1, rest=info(shape=())), "0 dimensions"),
    "many dimensions": (header(tensors=1, rest=info(shape=(1,) * 9)), "9 dimensions"),
    "huge": (header(tensors=1, rest=info(shape=(1 << 63, 1 << 63))), "where they can't be"),
    "nothing": (header(tensors=1, rest=info(shape=(32, 0)) + bytes(999)), "has the shape"),
    "half a block": (header(tensors=1, rest=info(shape=(33,), kind=8) + bytes(999)), "has the shape"),
    "unread kind": (header(tensors=1, rest=info(kind=10)), "the type q2_k.*q4_k"),
    "unknown kind": (header(tensors=1, rest=info(kind=77)), "the type number 77"),
    "offset": (header(tensors=1, rest=info(offset=1 << 62) + bytes(999)), "where they can't be"),
    "odd offset": (header(tensors=1, rest=info(offset=4) + bytes(999)), "where they can't be"),
    "one on another": (header(tensors=2, rest=info() + info("b", offset=96) + bytes(999)), "where they can't be"),
    "tensor twice": (header(tensors=2, rest=info() + info(offset=128) + bytes(999)), "tensor 'a' twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(case: str, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(StartupError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", tmp_path / "absent.gguf"):
        with pytest.raises(StartupError, match="Give a GGUF file"):
            read_gguf(path)


def change(data: bytearray, rng: random.Random) -> None:
    """Flip a bit, put a number there, insert bytes, or cut the rest."""
    at = rng.randrange(min(len(data), rng.choice([64, 1500, 1500, len(data)])))
    match rng.randrange(5):
        case 0:
            del data[at:]
        case 1:
            data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 255, 1 << 31, 1 << 32, 1 << 48, (1 << 64) - 1]))
        case 2:
            data[at:at] = rng.randbytes(rng.choice([1, 4, 8, 100]))
        case _:
            data[at] ^= 1 << rng.randrange(8)


def test_mutated_files(tmp_path: Path) -> None:
    """Each is read, or is one line of a StartupError, at once and in little memory."""
    path = small(tmp_path / "whole.gguf")
    all_of(path)
    whole, said = path.read_bytes(), []
    for seed in range(MUTATIONS):
        rng, data = random.Random(seed), bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 3])):
            if len(data) > 16:
                change(data, rng)
        mutated = tmp_path / f"{seed}.gguf"
        mutated.write_bytes(data)
        tracemalloc.start()
        began = time.thread_time()
        try:
            all_of(mutated)
        except StartupError as error:
            said.append(str(error))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert time.thread_time() - began < 5, seed
        assert peak < 8 << 20, (seed, peak)
    assert all("\n" not in line and len(line) < 1000 for line in said), said
    assert MUTATIONS / 4 < len(said) < MUTATIONS, "the mutations are neither harmless nor all fatal"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"split.count": [1, 2]}, "parts"),
        ({"llama.expert_count": [1, 2]}, "expert_count"),
        ({"llama.block_count": 1 << 31}, "block_count"),
        ({"llama.attention.head_count": [4] * 99}, "head_count"),
        ({"tokenizer.ggml.tokens": ["x"] * 8}, "has 8 tokens, and its model knows 7"),
        ({"general.architecture": [1, 2]}, "architecture"),
        ({"general.architecture": "gemma3", "gemma3.block_count": 1 << 31}, "attention.head_count"),
    ],
)
def test_settings_of_strangers(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", SAID | changed, {"token_embd.weight": floats(np.ones((7, 32)))})
    with pytest.raises(StartupError, match=message):
        all_of(path)


def test_factors_of_strangers(tmp_path: Path) -> None:
    tensors = {name: floats(np.ones((7, 32))) for name in ("token_embd.weight", "output.weight")}
    path = write(tmp_path / "a.gguf", SAID, tensors | {"rope_freqs.weight": floats(np.ones(5000))})
    with pytest.raises(StartupError, match=r"no tensor rope_freqs\.weight of at most"):
        to_hf_config(read_gguf(path))
    with pytest.raises(StartupError, match=r"has no tensor token_embd\.weight"):
        to_hf_config(read_gguf(write(tmp_path / "b.gguf", SAID, {})))


def test_texts_stay_in_the_file(tmp_path: Path) -> None:
    """Reading takes eight bytes a text, which is no more than a text takes there. The file is large beside what threads
    of shared servers allocate meanwhile."""
    path = write(tmp_path / "model.gguf", {"a": ["xy"] * 1_000_000}, {})
    tracemalloc.start()
    file = read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(file.metadata["a"]) == 1_000_000
    assert peak < path.stat().st_size
