"""Sessions: what a branch may continue with is what the model says, whatever was forked, freed or preempted."""

from __future__ import annotations

import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import quire
from quire.errors import InputError
from quire.protocol.step_plan import TopLogprobs
from quire.text.session import Node

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_decoding.py"
PROMPT = "Once upon a time, there was a"


@pytest.fixture(scope="module")
def model() -> Any:
    folder = Path(quire.__file__).parent / "assets" / "tiny"
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def llm() -> Iterator[quire.LLM]:
    with quire.LLM(dtype="float32", kv_tokens=4096, page_size=4, debug=True, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def example() -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@torch.inference_mode()
def assert_next(model: Any, tokens: list[int], top: TopLogprobs) -> None:
    exact = model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)
    order = exact.argsort(descending=True).tolist()[: len(top.ids)]
    assert list(top.ids) == order
    assert list(top.logprobs) == pytest.approx(exact[order].tolist(), abs=1e-4)


@pytest.mark.parametrize("way", [None, "swap", "recompute"])
def test_random_trees_are_what_the_model_says(llm: quire.LLM, model: Any, way: str | None) -> None:
    """Forks, appends and frees in any order; `way`: the session is preempted again and again."""
    choose, ids = random.Random(5), llm.encode(PROMPT)
    scheduler = llm.engine.scheduler
    scheduler.preemption = way or "recompute"
    with llm.session(ids, width=5, max_tokens=40) as root:
        branches: dict[Node, list[int]] = {root: []}
        for step in range(60):
            branch = choose.choice(list(branches))
            action = choose.choice(["append", "append", "fork", "free", "next"])
            if action == "append" and len(branches[branch]) < 36:
                more = [choose.randrange(3072) for _ in range(choose.choice([1, 1, 3]))]
                branch.append(*more)
                branches[branch] = branches[branch] + more
            elif action == "fork" and len(branches) < 5:
                branches[branch.fork()] = branches[branch]
            elif action == "free" and len(branches) > 1:
                branch.free()
                del branches[branch]
            elif action == "next":
                assert_next(model, ids + branches[branch], branch.next(6))
            if way and step % 7 == 3 and scheduler.running and not scheduler.num_in_flight:
                scheduler._preempt(next(iter(scheduler.running)))
            scheduler.memory.check()
        for branch, tokens in branches.items():
            assert branch.tokens == tokens
            assert_next(model, ids + tokens, branch.next(3))
        if way:
            assert scheduler.preemption_counts[way] > 3
    assert not llm.engine.has_unfinished_requests
    assert scheduler.memory.account().usage.used == 0


def test_branches_share_their_pages(llm: quire.LLM) -> None:
    page = llm.engine.scheduler.memory.kv_config.groups[0].page_bytes
    with llm.session(list(range(10, 51)), width=8) as root:
        root.next(1)
        alone = llm.engine.scheduler.memory.account().usage.used
        children = [root.fork() for _ in range(7)]
        assert llm.engine.scheduler.memory.account().usage.used == alone
        for child in children:
            child.append(9)
            child.next(1)
        # Each writes into its own copy of the last page.
        assert llm.engine.scheduler.memory.account().usage.used <= alone + len(children) * page
        for child in children:
            child.free()
            child.free()
        assert llm.engine.scheduler.memory.account().usage.used == alone


def test_limits(llm: quire.LLM) -> None:
    with llm.session(PROMPT, width=2, max_tokens=5, top=4) as root:
        assert len(root.next(10).ids) == 4
        with pytest.raises(InputError, match="another call"):
            llm.generate(PROMPT)
        for bad in (-1, 3072, True, "a", 1.0):
            with pytest.raises(InputError, match="no token id"):
                root.append(bad)  # type: ignore[arg-type]
        root.append(1, 2, 3, 4)
        with pytest.raises(InputError, match="exceed the session's max_tokens by 1"):
            root.append(5, 6)
        with root.fork() as child:
            with pytest.raises(InputError, match="its width"):
                root.fork()
            child.append(7)
            child.next(1)
        with pytest.raises(InputError, match="was freed"):
            child.next(1)
        root.fork()
    with pytest.raises(InputError, match="its session closed"):
        root.next(1)
    for name in ("width", "top"):
        for bad in (0, 10**6, True, "1"):
            with pytest.raises(InputError, match=name), llm.session(PROMPT, **{name: bad}):
                raise AssertionError("the session opened")
    with pytest.raises(InputError, match="don't fit"), llm.session(PROMPT, width=100, max_tokens=3900):
        raise AssertionError("the session opened")
    assert not llm.engine.has_unfinished_requests


# The example


def test_the_example_runs(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main("Once upon a time")
    shown = capsys.readouterr().out
    assert "diverse beams" in shown
    assert "best-first search" in shown
