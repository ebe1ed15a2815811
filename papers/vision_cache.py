"""Simulate prompts with images in chunks of 1,024 tokens, by the storage of their embeddings (Jenga Figure 18).

They are stored in pages of their own, in those of later keys and values, or nowhere: an engine without a cache encodes
again for every chunk. Encoder runs and memory are counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.result import DIFFERS, HOLDS, Reproduction, Result, equal, measured
from papers.serving import in_parallel
from papers.unlike_serving import H100, Case, assumed, burst, serve
from quire.bench.document import table
from quire.core.engine import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHUNK = 1024
MODES = ("off", "pages", "inside")
MODELS = {
    "LLaVA-OneVision 7B": "llava-onevision-7b", "InternVL2 8B": "internvl2-8b", "Phi-3-Vision 4B": "phi-3-vision-4b",
    "PaliGemma2 10B": "paligemma2-10b",
}  # fmt: skip
CROWD, ALONE = 200, 20  # requests that come at once, and requests that come one after another
THROUGHPUT, LATENCY = 1.88, 1.60  # ratios to a run without a cache, from the paper (apparently over all its models)


class Cached(NamedTuple):
    """The results of a model in a mode.

    Of simultaneous requests: requests a second, mean end-to-end latency in seconds, encoder runs. Of requests one after
    another: latency, encoder runs, the `chunks` that contain a part of an image, and bytes of allocated KV memory:
    `most`, the maximum, and `beyond`, the most beyond the keys and values of computed tokens."""

    model: str
    mode: str
    requests_per_s: float
    latency: float
    runs: int
    alone: float
    alone_runs: int
    chunks: int
    most: int
    beyond: int


class Watched:
    """Bytes of allocated KV memory after a step: the maximum, and the maximum beyond the pages of computed tokens."""

    def __init__(self) -> None:
        self.most = self.beyond = 0

    def __call__(self, engine: Engine) -> None:
        memory = engine.scheduler.memory
        usage, seqs = memory.account().usage, [seq for _, seq in engine.scheduler.by_slot.values()]
        bytes = usage.total - usage.free - usage.cached
        kept = [group for group in memory.kv_config.groups if group.kind != "vision"]
        filled = sum(group.num_pages(seq.planned) * group.page_bytes for group in kept for seq in seqs)
        self.most, self.beyond = max(self.most, bytes), max(self.beyond, bytes - filled)


def chunked(model: str, requests: int) -> Case:
    return Case(MODELS[model], H100, f"mmmu-pro@{requests}", chunk=CHUNK)


def cached(model: str, mode: str, crowd: int = CROWD, alone: int = ALONE) -> Cached:
    """Simulate both runs."""
    many, few = chunked(model, crowd), chunked(model, alone)
    all_at_once, one_by_one = burst(many.sketches(), many.eyes), burst(few.sketches(), few.eyes)
    run = serve(many.plant("jenga", vision_cache=mode).simulation().engine, all_at_once, many.spec)
    watched = Watched()
    engine = few.plant("jenga", vision_cache=mode).simulation().engine
    single = serve(engine, one_by_one, few.spec, concurrency=1, each=watched)
    chunks = sum(_chunks(medium.start, medium.end) for one in one_by_one for medium in one.media)
    return Cached(model, mode, run.requests_per_s, run.latency, run.encoder_runs, single.latency, single.encoder_runs,
                  chunks, watched.most, watched.beyond)  # fmt: skip


def _chunks(start: int, end: int) -> int:
    """Return the number of prompt chunks that contain any of the tokens start .. end - 1."""
    return (end - 1) // CHUNK - start // CHUNK + 1


def figure_18() -> Reproduction:
    """Simulate every model in every mode."""
    found: list[Cached] = in_parallel(cached, [(model, mode) for model in MODELS for mode in MODES])
    results = [result._replace(real_or_simulated="simulated") for result in judged(found)]
    data: Any = [one._asdict() for one in found]
    return Reproduction(results, text(found), lambda: draw(data), data)


def gains(found: Sequence[Cached], mode: str = "pages") -> dict[str, tuple[float, float]]:
    """Return model -> the factors of throughput and latency over a run without a cache."""
    of = {(one.model, one.mode): one for one in found}
    models = dict.fromkeys(one.model for one in found)
    return {
        model: (of[model, mode].requests_per_s / of[model, "off"].requests_per_s,
                of[model, "off"].latency / of[model, mode].latency)
        for model in models
    }  # fmt: skip


def judged(found: Sequence[Cached]) -> list[Result]:
    """Judge the gains: none is a loss, and the means against the paper's. Judge encoder runs: one a request, or one a
    chunk."""
    results = []
    by = gains(found)
    for model, (faster, sooner) in by.items():
        for what, ratio in (("throughput", faster), ("latency", sooner)):
            verdict = HOLDS if ratio >= 0.995 else DIFFERS
            said = f"{model}: {what}, times that of off (no loss)"
            results.append(Result("J-F18", said, None, round(ratio, 2), "times", verdict))
    for i, (what, paper) in enumerate((("throughput", THROUGHPUT), ("latency", LATENCY))):
        ours = round(mean(both[i] for both in by.values()), 2)
        results.append(measured("J-F18", f"mean of {len(by)} models: {what}", ours, "times")._replace(paper=paper))
    for one in found:
        wanted = one.chunks if one.mode == "off" else ALONE
        what = f"{one.model}, {one.mode}: encoder runs of {ALONE} requests, one by one"
        results.append(equal("J-F18", what, wanted, one.alone_runs, "runs"))
    of = {(one.model, one.mode): one for one in found}
    for model in by:
        for mode in ("inside", "pages"):
            one, off = of[model, mode], of[model, "off"]
            what = f"{model}, {mode}: peak of a request's memory, of off's"
            results.append(equal("J-F18", what, _mib(off.most), _mib(one.most), "MiB"))
            what = f"{model}, {mode}: most of a request's beside its computed tokens' (off: {_mib(off.beyond)})"
            results.append(measured("J-F18", what, _mib(one.beyond), "MiB"))
    return results


def _mib(bytes: int) -> float:
    return round(bytes / 2**20, 1)


def text(found: Sequence[Cached]) -> str:
    head = ("model", "embeddings", "requests/s", "latency s", "encoder runs", "alone: latency s", "encoder runs",
            "peak MiB", "beside tokens MiB")  # fmt: skip
    rows = [
        (one.model, one.mode, f"{one.requests_per_s:.3g}", f"{one.latency:.2f}", one.runs, f"{one.alone:.3f}",
         one.alone_runs, f"{_mib(one.most):,}", f"{_mib(one.beyond):,}")
        for one in found
    ]  # fmt: skip
    return (
        f"mmmu-pro, chunks of {CHUNK:,} tokens, an H100's memory; {CROWD} requests at once, and {ALONE} one by one\n"
        f"{table(head, rows)}\n"
        "Encoder runs of the crowd without a cache depend on how its chunks fall. PaliGemma2's prompts attend both\n"
        "ways, and are computed in one step: each encodes once, whatever is kept. Its pictures of 224 x 224 pixels\n"
        "have 256 rows, and the paper doesn't say which size it had. How long an encoder's part takes is not\n"
        f"measured, but follows from its operations. {assumed()}"
    )


def draw(data: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw throughput, latency and encoder runs by model and mode."""
    from quire.bench.plots import COLOURS, figure

    found = [Cached(**one) for one in data]
    models = list(dict.fromkeys(one.model for one in found))
    panels = {"requests/s, all at once": "requests_per_s", "latency, all at once, s": "latency",
              "encoder runs, one by one": "alone_runs", "beside computed tokens, MiB": "beyond"}  # fmt: skip
    fig = figure(13, 3.6)
    for axes, (label, name) in zip(fig.subplots(1, len(panels)), panels.items()):
        for i, mode in enumerate(MODES):
            size = 2**20 if name == "beyond" else 1
            of = {one.model: getattr(one, name) / size for one in found if one.mode == mode}
            places = [k + 0.27 * (i - 1) for k in range(len(models))]
            axes.bar(places, [of[model] for model in models], 0.25, color=COLOURS[i], label=mode)
        axes.set_xticks(range(len(models)), [model.replace(" ", "\n").replace("-O", "-\nO") for model in models],
                        fontsize=7)  # fmt: skip
        axes.set_ylabel(label)
    fig.axes[0].legend(fontsize=8)
    fig.suptitle("Jenga Figure 18: embeddings of pictures, kept and encoded again for each chunk")
    return fig
