"""Measure the cost of images: encoding one, and decoding with one in the prompt, compared with the same text alone.

Images have random colours and are preprocessed as a user's are; each request has its own. Steps are timed back to back,
so the times are those that a client observes. With --neighbours, also the times between tokens of decoding sequences
while images arrive, and while prompts arrive that fill a step.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from quire.bench.arguments import add_numbers
from quire.bench.calibrate import shape_of
from quire.bench.contexts import stop
from quire.bench.document import short, table
from quire.bench.shapes import built, local_runner
from quire.bench.steps import Timed, encoder, picture_steps
from quire.bench.workloads import Job
from quire.cli.flags import config_from
from quire.core.engine import Engine
from quire.errors import StartupError
from quire.kernels.limits import MAX_IMAGE_PARTS
from quire.models.vision.settings import PREPROCESSOR_KEY, VisionSettings
from quire.protocol.image_tiling import TileGrid
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.sampling_params import SamplingParams
from quire.sim.cost_model import CostModel, load_calibration
from quire.startup.checkpoint import read_checkpoint
from quire.startup.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from quire.text.images.preprocessor import ImagePreprocessor

ROUNDS = 5
TEXT_FIRST = 8
"""Tokens before the image."""
OTHER = 11  # a token

Sight = tuple[
    "ImagePreprocessor", bool, int
]  # how images are preprocessed, whether layers attend to them, their placeholder token
Asked = tuple[list[int], tuple[ImageItem, ...], tuple[ImagePixels, ...]]


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    group = add_numbers(
        parser, "measurement", rows=([1], "concurrent requests"), text=(43, "text tokens of each request"),
        parts=(MAX_IMAGE_PARTS, "image parts (tiles) in one launch of the encoder alone; the image's parts are "
               "repeated if it has fewer"),
        steps=(100, "decode steps"), neighbours=(0, "sequences that decode while images and prompts arrive"),
    )  # fmt: skip
    group.add_argument("--picture", type=int, nargs=2, default=[1120, 1120], metavar=("HEIGHT", "WIDTH"),
                       help="pixels of the image (default: 1120 1120)")  # fmt: skip
    group.add_argument("--against", metavar="NAME|FILE", help="calibration for which to fit the encoder's coefficient")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each number of rows: with text alone, and with images."""
    from quire.text.images.preprocessor import read_image_preprocessor

    if min(*args.rows, *args.picture, args.parts, args.steps) < 1 or args.text <= TEXT_FIRST:
        raise StartupError(
            "--rows, --picture, --parts, --steps and --text", f"Give numbers above 0, and {TEXT_FIRST} for --text"
        )
    config = config_from(args)
    source = read_checkpoint(config)
    said = source.config.get(PREPROCESSOR_KEY) or {}
    vision = VisionSettings.from_config(source.config, said)
    how = read_image_preprocessor(said, vision.tiling, vision.normalization.mean)
    with built(config) as made:
        results = []
        for rows in (1, *args.rows):  # the first is not reported: kernels of the encoder are compiled
            found: dict[str, Any] = {"model": made.name, "rows": rows, "text": args.text}
            found |= {f"text_{name}": value for name, value in _served(made.engine, rows, args, None).items()}
            sight = how, vision.uses_cross_attention, vision.image_token_id or 1
            found |= {f"picture_{name}": value for name, value in _served(made.engine, rows, args, sight).items()}
            found |= _encoded(made.engine, args, sight)
            results.append(found)
        if args.neighbours:
            results[-1]["neighbours"] = _neighbours(made.engine, args, sight)
        if args.against is not None:
            shape = shape_of(source, ITEMSIZE[made.memory_plan.dtype], made.memory_plan.quantization_savings)
            cost = CostModel(shape, load_calibration(args.against).coefficients)
            results[-1]["encoder"] = {"calibration": args.against, "times": _longer(made.engine, cost, args, sight)}
        return results[1:]


def _served(engine: Engine, rows: int, args: argparse.Namespace, sight: Sight | None) -> dict[str, Any]:
    """Return the seconds to each request's first token, of all requests together, and of a decoding step."""
    params = SamplingParams(temperature=0, max_tokens=args.steps + 2, ignore_eos=True, detokenize=False)
    count = 0
    prompts: list[tuple[str, Asked]] = []
    for i in range(rows):
        tokens = [(7 * i + 11 * j) % (engine.limits.vocab_size - 10) + 10 for j in range(args.text)]
        request: Asked = tokens, (), ()
        if sight is not None:
            request = _shown(tokens, args.picture, i, *sight)
            count = request[1][0].num_embeds
        prompts.append((f"{i}", request))
    salt = f"{time.perf_counter_ns()}"  # nothing is cached
    began, times, first, seen = time.perf_counter(), list[float](), 0.0, 0
    for id, (tokens, media, pixels) in prompts:
        engine.add(id, tokens, params, salt=salt, images=media, pixels=pixels)
    while engine.has_unfinished_requests:
        outputs = engine.step()
        seen += sum(bool(output.tokens) for output in outputs)
        if seen >= rows:
            first = first or time.perf_counter() - began
            times.append(time.perf_counter())
    gaps = [later - earlier for earlier, later in pairwise(times[2:-1])]
    return {"rows": count, "first_s": first, "step_ms": 1e3 * median(gaps) if gaps else None}


COMERS = 16  # requests that arrive while others decode, one after another
APART = 8  # steps between two of them
STAY = (COMERS + 4) * APART  # tokens that the other sequences generate, unless they are aborted


def _neighbours(engine: Engine, args: argparse.Namespace, sight: Sight) -> dict[str, Any]:
    """Return the milliseconds between tokens of decoding sequences: alone; while requests with an image arrive; and
    while text prompts arrive, each as long as a step permits besides the decodes."""
    rows = args.neighbours
    full = min(engine.scheduler.token_budget - rows, engine.limits.max_len - 2)
    pictures = [_shown([OTHER] * args.text, args.picture, i, *sight) for i in range(COMERS + 1)]
    prompts: list[Asked] = [([OTHER + i] * full, (), ()) for i in range(COMERS + 1)]
    _gaps(engine, rows, [pictures.pop(), prompts.pop()])  # compiles
    found = {"alone": _gaps(engine, rows, []), "pictures": _gaps(engine, rows, pictures)}
    return {"rows": rows, "prompt_tokens": full, **found, "prompts": _gaps(engine, rows, prompts)}


def _gaps(engine: Engine, rows: int, comers: Sequence[Asked]) -> dict[str, float]:
    """Return percentiles of the time between tokens while `comers` arrive and are computed."""
    salt = f"{time.perf_counter_ns()}"
    long, once = (
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for count in (STAY, 1)
    )
    for i in range(rows):
        engine.add(f"stays-{i}", [OTHER + i] * TEXT_FIRST, long, salt=salt)
    for _ in range(2 * APART):
        engine.step()
    times = []
    for i in range(COMERS):
        if i < len(comers):
            tokens, media, pixels = comers[i]
            engine.add(f"comes-{i}", tokens, once, salt=salt, images=media, pixels=pixels)
        for _ in range(APART):
            if any(output.tokens for output in engine.step() if output.request_id.startswith("stays")):
                times.append(time.perf_counter())
    stop(engine)
    gaps = sorted(1e3 * (later - earlier) for earlier, later in pairwise(times))
    return {f"p{p}_ms": gaps[min(len(gaps) * p // 100, len(gaps) - 1)] for p in (50, 90, 99, 100)}


def _longer(engine: Engine, cost: CostModel, args: argparse.Namespace, sight: Sight) -> float:
    """Return the coefficient `encoder` of this model, given the others of a calibration."""
    runner = engine.runner
    requests = [_shown([OTHER] * args.text, args.picture, i, *sight) for i in range(1 + ROUNDS)]
    jobs = [Job(tokens, 1, images, pixels) for tokens, images, pixels in requests]
    samples = picture_steps(Timed(engine, cost.shape), jobs)
    engine.runner = runner
    return encoder(cost, samples)


def _encoded(engine: Engine, args: argparse.Namespace, sight: Sight) -> dict[str, Any]:
    """Measure the encoder alone, with `args.parts` image parts in one launch, or one whole image if the encoder takes
    no parts. Return the number of parts, and the median of ROUNDS in milliseconds."""
    import torch

    runner = local_runner(engine)
    eyes, device = runner.model.vision_encoder, runner.device
    _, _, (picture,) = _shown([0] * (TEXT_FIRST + 1), args.picture, 0, *sight)
    grid, times = TileGrid(*picture.grid), list[float]()
    data = torch.frombuffer(bytearray(picture.data), dtype=torch.uint8).view(picture.shape)
    with torch.inference_mode():
        parts = eyes.preprocess(data.to(device), grid)
        if not eyes.encodes_whole_image:
            parts = parts[torch.arange(args.parts, device=device) % len(parts)]
        for _ in range(ROUNDS + 1):  # the first is not reported
            began = time.perf_counter()
            eyes.encode(parts, grid)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
    return {"encoded_parts": len(parts), "encode_ms": 1e3 * median(times[1:])}


def _shown(
    tokens: list[int], size: Sequence[int], number: int, how: ImagePreprocessor, cross: bool, token: int
) -> Asked:
    """Return a prompt with an image of its own."""
    import numpy as np
    from PIL import Image

    height, width = size
    colours = np.random.default_rng(time.perf_counter_ns()).integers(0, 256, (height, width, 3), dtype=np.uint8)
    tiles, grid = how.prepare(Image.fromarray(colours))
    data, rows = tiles.tobytes(), how.tiling.num_embeds(grid)
    pixels = ImagePixels(hashlib.sha256(data).digest(), tiles.shape, data, tuple(grid))
    places = 1 if cross else rows
    medium = ImageItem(pixels.key, TEXT_FIRST, places, rows, how.tiling.num_parts(grid))
    return [*tokens[:TEXT_FIRST], *[token] * places, *tokens[TEXT_FIRST:]], (medium,), (pixels,)


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the results, a line a number of rows."""
    head = ("requests", "text", "rows of a picture", "parts", "ms to encode them", "ms a step, text", "picture",
            "s to all first tokens", "picture")  # fmt: skip
    names = ("rows", "text", "picture_rows", "encoded_parts", "encode_ms", "text_step_ms", "picture_step_ms",
             "text_first_s", "picture_first_s")  # fmt: skip
    lines = [table(head, [[r[name] if i < 4 else short(r.get(name)) for i, name in enumerate(names)] for r in results])]
    if "neighbours" in results[-1]:
        beside = results[-1]["neighbours"]
        kinds = {
            "alone": "nothing",
            "pictures": "pictures",
            "prompts": f"prompts of {beside['prompt_tokens']:,} tokens",
        }
        rows = [(label, *(short(ms) for ms in beside[kind].values())) for kind, label in kinds.items()]
        lines.append(f"{beside['rows']} that decode while others come, ms between tokens:")
        lines.append(table(("what comes", "p50", "p90", "p99", "at most"), rows))
    if "encoder" in results[-1]:
        said = results[-1]["encoder"]
        lines.append(
            f"an encoder's operation takes {said['times']:.2f} times what {said['calibration']} says of others"
        )
    return "\n".join(lines)
