"""Speculative decoding on a GPU, with graphs: the tokens of steps of one token, and none waits for a kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpu_serving import answers, engine_of, greedy, nothing_is_compiled, prompt

from quire.core.engine import Engine
from quire.core.speculation import Candidate, Speculator
from quire.protocol.structured_output import Structured

pytestmark = pytest.mark.gpu

KINDS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.8, "top_k": 50}, {"logprobs": 0},
    {"repetition_penalty": 1.2, "temperature": 0.7}, {"min_tokens": 30, "temperature": 1.0},
)  # fmt: skip
REQUESTS = [
    (prompt(i, length), greedy(48, seed=i, **KINDS[i % len(KINDS)]))
    for i, length in enumerate((5, 130, 17, 64, 300, 1, 33, 250, 90, 16, 71, 128, 40, 200, 9, 77, 150, 31, 48, 260))
]
SETTINGS: dict[str, Any] = {"model_config": "llama-125m", "kv_tokens": 32768, "max_model_len": 1024, "max_num_seqs": 16,
                            "max_num_batched_tokens": 512}  # fmt: skip


VOCAB = 32_000


@pytest.fixture(autouse=True)
def _all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are verified wherever there are some, at any cost."""

    def choose(self: Speculator, candidates: list[Candidate], *_: object) -> dict[int, int]:
        return {one.seq.id: one.most for one in candidates}

    monkeypatch.setattr(Speculator, "_most_valuable", choose)


class Parity:
    """A grammar and its matcher: a token is even after an odd one, and odd after an even one."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def new_matcher(self) -> Parity:
        return Parity()

    def copy(self) -> Parity:
        return Parity(self.last)

    def accept(self, token: int) -> str:
        refused, self.last = token % 2 == self.last % 2, token
        return f"token {token} can't follow" if refused else ""

    def forced_tokens(self) -> tuple[int, ...]:
        return ()

    def is_unconstrained(self) -> bool:
        return False

    def compute_masks(self, matchers: list[Parity]) -> list[bytes]:
        return [(b"\x55" if matcher.last % 2 else b"\xaa") * (VOCAB // 8) for matcher in matchers]


def a_speculating(**settings: Any) -> Engine:
    return engine_of(**{**SETTINGS, "speculative_model": "llama-125m", "num_speculative_tokens": 4, **settings})


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    engine = engine_of(**SETTINGS, deterministic=True)
    found = answers(engine, REQUESTS)
    engine.close()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cuda_graphs": False},
        {"speculative_method": "both", "num_speculative_tokens": 7},
        {"speculative_method": "ngram", "speculative_model": None},
        {"max_num_seqs": 3, "max_num_batched_tokens": 64},
        {"kv_tokens": 2048, "preemption": "recompute"},
        {"kv_tokens": 2048, "preemption": "swap"},
    ],
    ids=str,
)
def test_tokens_are_the_same(expected: list[Any], settings: dict[str, Any]) -> None:
    """To the bit with `deterministic`, where a row's numbers do not depend on the others."""
    engine = a_speculating(deterministic=True, **settings)
    assert answers(engine, REQUESTS) == expected
    engine.scheduler.memory.check()
    assert engine.stats.num_drafts > 0
    engine.close()


def test_a_draft_model_that_is_the_model_is_right() -> None:
    """Always, where it does not lack penalties or a least number of tokens; before and after a sleep."""
    plain = [(tokens, params) for i, (tokens, params) in enumerate(REQUESTS) if i % len(KINDS) < 4]
    engine = a_speculating(deterministic=True)
    with nothing_is_compiled():
        expected = answers(engine, plain)
    assert engine.stats.accepted_tokens == engine.stats.draft_tokens > 400
    engine.sleep(2)
    engine.wake()
    assert answers(engine, plain) == expected
    assert engine.stats.accepted_tokens == engine.stats.draft_tokens > 800
    engine.close()


@pytest.mark.parametrize("settings", [{}, {"depth": 1}, {"speculative_method": "both"}], ids=str)
def test_the_draft_model_drafts_under_grammars(settings: dict[str, Any]) -> None:
    """Masks follow its tokens while the model computes them; half of the requests have none."""
    form = {"structured": Structured("regex", "parity"), "grammar": Parity(), "ignore_eos": False, "min_tokens": 0}
    requests = [(tokens, replace(params, **form) if i % 2 else params) for i, (tokens, params) in enumerate(REQUESTS)]
    engine = engine_of(**SETTINGS, deterministic=True)
    expected = answers(engine, requests)
    engine.close()
    engine = a_speculating(deterministic=True, **settings)
    with nothing_is_compiled():
        assert answers(engine, requests[1::2]) == expected[1::2]
    assert engine.stats.accepted_tokens > 20
    assert answers(engine, requests) == expected
    engine.close()
