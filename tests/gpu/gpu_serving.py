"""What tests on a GPU share: engines with random weights, and what they say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import build

Request = tuple[list[int], SamplingParams]


def engine_of(**settings: Any) -> Engine:
    defaults: dict[str, Any] = {"dummy_weights": True, "dtype": "bfloat16", "device": "cuda"}
    if "model" in settings:
        defaults["skip_tokenizer_init"] = True
    return build(EngineConfig.of(**{**defaults, **settings})).engine


def prompt(seed: int, length: int, vocab: int = 30000) -> list[int]:
    return [(31 * seed + 7 * j) % vocab + 10 for j in range(length)]


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **more})


def answers(
    engine: Engine, requests: Iterable[Request], alone: bool = False, before: Callable[[], None] = lambda: None
) -> list[list[Any]]:
    """Each branch's tokens, in pairs with their log-probabilities where these are asked for; requests come together, or
    `alone`. `before` each step something may be done."""
    found: dict[tuple[str, int], list[Any]] = defaultdict(list)

    def drain() -> None:
        while engine.has_unfinished_requests:
            before()
            for output in engine.step():
                tops = [top.logprob for top in output.top_logprobs]
                answer = zip(output.tokens, tops, strict=True) if tops else output.tokens
                found[output.request_id, output.branch].extend(answer)

    for i, (tokens, params) in enumerate(requests):
        engine.add(str(i), tokens, params)
        if alone:
            drain()
    drain()
    return [found[key] for key in sorted(found, key=lambda key: (int(key[0]), key[1]))]


class Served(NamedTuple):
    tokens: list[list[Any]]
    preemptions: int
    mapped: Any  # of virtual memory


def served(requests: list[Request], *, every: int = 0, alone: bool = False, **settings: Any) -> Served:
    """By an engine of its own. With `every`, after each `every` steps the youngest request is preempted; `depth`
    must be 1."""
    engine, steps = engine_of(**settings), 0
    scheduler = engine.scheduler

    def before() -> None:
        nonlocal steps
        steps += 1
        if every and steps % every == 0 and scheduler.running:
            assert not scheduler.num_in_flight, "a step computes"
            scheduler._preempt(next(reversed(scheduler.running)))

    tokens = answers(engine, requests, alone, before)
    scheduler.memory.check()
    found = Served(tokens, scheduler.num_preemptions, getattr(engine.runner.store, "mapping_stats", None))
    engine.close()
    assert {len(one) for one in tokens} == {params.max_tokens for _, params in requests}
    return found


@contextmanager
def nothing_is_compiled() -> Iterator[None]:
    """Nobody waits for a kernel within."""
    import triton  # not before the kernels' tests have chosen between the interpreter and a GPU

    compiled: list[str] = []

    def seen(*, fn: Any, repr: str, **_: Any) -> None:
        compiled.append(f"{fn.name} {repr}")

    former = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = seen
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = former
    assert not compiled, "\n".join(compiled)
