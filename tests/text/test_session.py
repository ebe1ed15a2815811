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
from quire.text.session import Node
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import Top

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
def assert_next(model: Any, tokens: list[int], top: Top) -> None:
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
            if way and step % 7 == 3 and scheduler.running and not scheduler.flight:
                scheduler._preempt(next(iter(scheduler.running)))
            scheduler.memory.check()
        for branch, tokens in branches.items():
            assert branch.tokens == tokens
            assert_next(model, ids + tokens, branch.next(3))
        if way:
            assert scheduler.preempted[way] > 3
    assert not llm.engine.unfinished
    assert scheduler.memory.account().usage.used == 0


def test_branches_share_their_pages(llm: quire.LLM) -> None:
    page = llm.engine.scheduler.memory.geometry.groups[0].page_bytes
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
    assert not llm.engine.unfinished


def test_an_exception_inside_leaves_the_llm_usable(llm: quire.LLM) -> None:
    with pytest.raises(ZeroDivisionError), llm.session(PROMPT) as root:
        root.fork().append(1 // 0)
    assert llm.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].finished


# The example


def test_diverse_beams_without_a_penalty_are_beam_search_in_each_group(llm: quire.LLM, example: Any) -> None:
    kinds: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    beams = SamplingParams(n=2, beam_width=2, **kinds)
    diverse = SamplingParams(n=6, method=lambda: example.DiverseBeams(3, 2, penalty=0.0), **kinds)
    apart = SamplingParams(n=6, method=lambda: example.DiverseBeams(3, 2, penalty=1e3), **kinds)
    plain, same, other = (
        [output.token_ids for output in result.outputs]
        for result in llm.generate([PROMPT] * 3, [beams, diverse, apart], use_tqdm=False)
    )
    assert sorted(same) == sorted(plain * 3)
    assert len({tuple(tokens) for tokens in other}) == 6
    assert all(tokens in other for tokens in plain)  # the first group is disturbed by none
    for at in range(1, 8):  # groups never take the same token in a step: at most the two beams of a group share one
        assert max(sum(tokens[at] == token[at] for tokens in other) for token in other) <= 2


def test_best_first_search_expands_the_best(llm: quire.LLM, example: Any) -> None:
    with llm.session(PROMPT, width=12, max_tokens=32) as root:
        mean, tokens = example.best_first(root, steps=20, branching=2, leaves=6)
    [scored] = llm.generate(
        [llm.encode(PROMPT) + tokens], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )
    told = [entry[token].logprob for entry, token in zip(scored.prompt_logprobs[-len(tokens) :], tokens) if entry]
    assert mean == pytest.approx(sum(told) / len(tokens), abs=1e-4)


def test_the_example_runs(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main("Once upon a time")
    shown = capsys.readouterr().out
    assert "diverse beams" in shown
    assert "best-first search" in shown


def test_the_docs_show_the_example() -> None:
    source, docs = EXAMPLE.read_text(), (EXAMPLE.parent.parent / "docs" / "decoding.md").read_text()
    blocks = [block.split("```")[0].strip() for block in docs.split("```python\n")[1:]]
    shown = [block for block in blocks if block.startswith(("class ", "def "))]
    assert len(shown) == 2
    assert all(block in source for block in shown)
