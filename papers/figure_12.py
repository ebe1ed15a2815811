"""Jenga's Figure 12: the pages of a request while its prompt, with an image, is computed in chunks. With the real
scheduler and memory, and an EchoRunner."""

from __future__ import annotations

from typing import NamedTuple

from bench.echo_runner import EchoRunner
from quire.config import EngineConfig, Experiment
from quire.core.engine import Engine
from quire.core.scheduler import Scheduler
from quire.core.validation import EngineLimits
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.memory.paged import PagedMemory
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.model_spec import LayerSpec, ModelSpec, VisionSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import ImageEncoding

PICTURE = bytes(32)
VOCAB = 64


class StepUsage(NamedTuple):
    """A step, and the pages of the request while it runs, in tokens."""

    tokens: int  # computed
    encodes: bool  # True if it encodes the image
    kv: int  # tokens with keys and values
    free_places: int  # for more of them
    embeddings: int  # of the image
    leftover_embeddings: int  # after the step


def figure_12(vision_cache: str, text: tuple[int, int] = (1, 1), picture: int = 4, chunk: int = 3) -> list[StepUsage]:
    """Return the steps of a request [t0 i0 i1 i2 i3 t1], in chunks of 3 tokens, and its first decode: with "pages" as
    in Figure 12a, with "inside" as in 12b, with "off" as in engines without cached embeddings. Pages hold one token."""
    layers = (LayerSpec(1, 8),)
    spec = ModelSpec("echo", layers, VOCAB, 64, 8, 1, 8, 1, vision=VisionSpec(8, 16, 1, part_tokens=1))
    config = EngineConfig(
        page_size=1, max_num_seqs=2, max_num_batched_tokens=chunk, swap_gib=0, enable_prefix_caching=False,
        experiment=Experiment(vision_cache=vision_cache),
    )  # fmt: skip
    memory = build_memory(config, spec, MemorySize(64, 32, 2))
    assert isinstance(memory, PagedMemory), "image embeddings are in pages"
    runner = EchoRunner(vocab_size=VOCAB)
    runner.bind(memory.kv_config)
    scheduler = Scheduler(memory, token_budget=chunk, max_seqs=2, max_len=64)
    engine = Engine(scheduler, runner, EngineLimits(VOCAB, 64, 4), clock=lambda: 0.0)
    media = (ImageItem(PICTURE, text[0], picture, picture, 1),)
    prompt = [1] * text[0] + [2] * picture + [3] * text[1]
    params = SamplingParams(max_tokens=2, ignore_eos=True, seed=1)
    engine.add("a", prompt, params, images=media, pixels=[ImagePixels(PICTURE, (1, 1, 1, 3), bytes(3))])
    steps: list[StepUsage] = []
    while engine.has_unfinished_requests:
        plan = scheduler.schedule()
        assert plan is not None, "there is a request to serve"
        [pages] = memory.seq_pages.values()
        tables = dict(zip((group.kind for group in memory.groups), pages.tables))
        embeddings = [page for page in tables.get("vision", []) if page]
        tokens = sum(len(row.tokens) for row in plan.slices)
        end = max((row.start + len(row.tokens) for row in plan.slices), default=0)
        encodes = any(isinstance(entry, ImageEncoding) for entry in plan.page_ops)
        scheduler.update(plan, runner.collect(runner.submit(plan)))
        left = sum(bool(page) for page in tables.get("vision", [])) if memory.seq_pages else 0
        steps.append(StepUsage(tokens, encodes, end, len(tables["full"]) - end, len(embeddings), left))
    return steps
