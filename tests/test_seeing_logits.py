"""Models whose text has pictures' rows in place of tokens' embeddings, from checkpoints under their published names:
what the engine says of tokens is what transformers' logits say to 1e-4, whatever the chunks, pages, hits, preemptions,
forks, beams, neighbours and memories, and wherever rows lie; and greedy tokens are transformers'.
"""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import test_unlike_logits
import torch
from pictured_models import MODELS, TOKEN, VOCAB, Model, Prompt
from test_unlike_logits import assert_said, check_branches, engine_of, serving

from quire import SamplingParams
from quire.core.engine import Engine
from quire.errors import InputError, PromptTooLong
from quire.protocol.images import clip_at_image
from quire.protocol.step_plan import ImageEncoding, StepPlan

NEW = 6


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda case: MODELS[case](tmp_path_factory.mktemp("saved")))


def words(count: int, seed: int) -> list[int]:
    return [(7 * i * i + 3 * seed + i) % 60 for i in range(count)]


def prompts(model: Model, case: str) -> list[Prompt]:
    """A picture behind words and before others, a text, a picture at the beginning, two pictures of unlike shapes; and
    the first picture again behind another text."""
    first = model.shown(60, 50, 1)
    found = [
        model.prompt(words(5, 0), first, words(9, 1)),
        model.prompt(words(30, 2)),
        model.prompt(model.shown(28, 90, 2), words(7, 3)),
        model.prompt(words(8, 7), first, words(2, 8)),
    ]
    if case != "paligemma":
        pair = model.shown(60, 50, 5, alone=False), model.shown(20, 90, 6, alone=False)
        found.append(model.prompt(words(3, 4), pair[0], words(2, 5), pair[1], words(4, 6)))
    return found


def sampled(**params: Any) -> SamplingParams:
    """Without the token that stands for pictures, which transformers would look for one at."""
    return SamplingParams(max_tokens=NEW, ignore_eos=True, logit_bias={TOKEN: -100.0}, **params)


def request(prompt: Prompt) -> tuple[list[int], dict[str, Any]]:
    return prompt.tokens, {"images": prompt.media, "pixels": [one.pixels for one in prompt.pictures]}


run = partial(test_unlike_logits.run, request=request)


def encoded(engine: Engine) -> list[ImageEncoding]:
    """What the engine's plans say of pictures, from now on."""
    entries: list[ImageEncoding] = []
    submit = engine.runner.submit

    def noted(plan: StepPlan) -> Any:
        entries.extend(entry for entry in plan.page_ops if isinstance(entry, ImageEncoding))
        return submit(plan)

    engine.runner.submit = noted
    return entries


def long_prompts(model: Model, case: str) -> list[Prompt]:
    """Pictures that chunks of 512 and of 1,024 tokens cut, or that lie between two of them; one whose end is 1,024."""
    first, other = model.shown(60, 50, 1, alone=False), model.shown(28, 90, 2, alone=False)
    until = 1024 - 500 - first.rows - other.rows
    found = [model.prompt(words(500, 0), first, words(until, 1), other, words(70, 2))]
    if case != "paligemma":
        split = 512 - first.rows // 2
        found.append(model.prompt(words(split, 3), first, words(1024 - split - first.rows - 1, 4), other, words(60, 5)))
    return found


def check(
    model: Model, case: str, branches: int = 2, within: float = 1e-4, given: list[Prompt] | None = None,
    preemption: str | None = None, **settings: Any,
) -> list[ImageEncoding]:  # fmt: skip
    """Prompts, and pictures, may be found in memory. What was encoded."""
    given = prompts(model, case) if given is None else given
    hidden = {"logit_bias": {TOKEN: -100.0}, "max_tokens": NEW}
    with serving(model, preemption, **settings) as engine:
        entries = encoded(engine)
        check_branches(engine, model, given, branches, within, run, len(given) + 1, **hidden)
        if not {"tp", "pp"} & settings.keys():
            assert not engine.runner.image_inputs.pixels_by_key, "pictures are let go with their requests"
            assert not engine.runner.image_inputs.partial_images
    return entries


def chunk_of(case: str, chunk: int) -> int:
    """PaliGemma's prompts are computed in one step, and Gemma-3's images, and Gemma-4's of the larger models."""
    return max(chunk, {"paligemma": 64, "gemma3": 5, "gemma4": 7}.get(case, 1))


RANKS: list[tuple[str, dict[str, Any]]] = [
    (case, {"max_num_batched_tokens": chunk_of(case, chunk), "page_size": 4, **more})
    for case in MODELS
    for chunk, more in (
        (7, {}),
        (16, {"preemption": "recompute", "vision_cache": "off"}),
        # A rank's keys and values of a token of a Gemma are less than a row.
        (16, {"preemption": "swap", "vision_cache": "pages" if "gemma" in case else "inside"}),
    )
]


@pytest.mark.usefixtures("threads")
@pytest.mark.share(6)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("case", "settings"), RANKS, ids=str)
def test_ranks(saved: Any, ranks: int, case: str, settings: dict[str, Any]) -> None:
    """All eyes on each, and a part of the text; four are more than there are key heads."""
    check(saved(case), case, tp=ranks, **settings)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("case", "settings"), [
    ("llava", {"vision_cache": "pages"}), ("internvl", {"vision_cache": "off", "preemption": "recompute"}),
    ("phi3", {"vision_cache": "inside", "preemption": "swap"}), ("paligemma", {"vision_cache": "pages"}),
], ids=str)  # fmt: skip
def test_stages(saved: Any, case: str, settings: dict[str, Any]) -> None:
    """The first has the eyes, and puts rows in the places of embeddings; the others know of no picture."""
    check(saved(case), case, pp=2, page_size=4, max_num_batched_tokens=chunk_of(case, 16), **settings)


def test_a_device_that_encodes_does_not_wait(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step begins with its pictures: what a GPU waits for the host is counted up to them."""
    model = saved("llava")
    engine = engine_of(model)
    runner, events = engine.runner, list[str]()
    encode = runner.image_inputs.encode

    marks = SimpleNamespace(
        start_step=lambda: events.append("begin") or "mark",
        end_step=lambda began, replayed: events.append(f"{began}, {'replayed' if replayed else 'launched'}"),
        collect=lambda span: 0.0,
    )
    monkeypatch.setattr(runner, "idle_timer", marks)
    monkeypatch.setattr(runner.image_inputs, "encode", lambda entries: events.append("encode") or encode(entries))
    list(run(engine, prompts(model, "llava")[:1], sampled(temperature=0)))
    engine.close()
    assert events[:3] == ["begin", "encode", "mark, launched"]
    assert events[3:] == ["begin", "mark, replayed"] * (NEW - 1)


@pytest.mark.share(360)
@pytest.mark.parametrize("memory", ["paged", "uniform"])
@pytest.mark.parametrize("vision_cache", ["pages", "inside", "off"])
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, 512, 1024])
@pytest.mark.parametrize("case", MODELS)
def test_logits_of_branches(
    saved: Any, case: str, chunk: int, page_size: int, preemption: str | None, vision_cache: str, memory: str
) -> None:
    settings = {"memory": memory, "vision_cache": vision_cache, "page_size": page_size}
    check(saved(case), case, preemption=preemption, max_num_batched_tokens=chunk_of(case, chunk), **settings)


@pytest.mark.share(135)
@pytest.mark.parametrize("settings", [{}, {"memory": "uniform"}, {"enable_prefix_caching": False}], ids=str)
@pytest.mark.parametrize("vision_cache", ["pages", "inside", "off"])
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize("chunk", [512, 1024])
@pytest.mark.parametrize("case", MODELS)
def test_logits_of_long_prompts(
    saved: Any, case: str, chunk: int, preemption: str | None, vision_cache: str, settings: dict[str, Any]
) -> None:
    """Of more than 1,024 tokens. PaliGemma's are computed in one step, and off by 2e-4 from fp64 (transformers' fp32 by
    2.5e-5), with kernels of our own or without."""
    model, given = saved(case), long_prompts(saved(case), case)
    assert all(1024 < len(prompt.tokens) < 1200 for prompt in given)
    within, most = (3e-4, 2048) if case == "paligemma" else (1e-4, chunk)
    more = {"kv_tokens": 8192, "max_model_len": 2048, "max_num_batched_tokens": most, "vision_cache": vision_cache}
    check(model, case, within=within, given=given, preemption=preemption, **more, **settings)


@pytest.mark.share(8)
@pytest.mark.parametrize("vision_cache", ["pages", "inside", "off"])
@pytest.mark.parametrize("case", MODELS)
def test_logits_without_caching(saved: Any, case: str, vision_cache: str) -> None:
    """Nothing is found the second time: each picture is encoded for each request, or each chunk."""
    chunk, given = chunk_of(case, 7), prompts(saved(case), case)
    settings = {"vision_cache": vision_cache, "page_size": 4, "max_num_batched_tokens": chunk}
    entries = check(saved(case), case, enable_prefix_caching=False, **settings)
    parts = 2 * sum(one.parts for prompt in given for one in prompt.pictures)
    total = sum(entry.num_parts for entry in entries)
    assert total > parts if vision_cache == "off" and "gemma" not in case else total >= parts


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("settings", [{}, {"page_sizes": "max"}, {"memory": "uniform"}], ids=str)
@pytest.mark.parametrize("case", ["llava", "paligemma", "gemma3"])
def test_logits_in_other_memories(saved: Any, case: str, settings: dict[str, Any], attention: str) -> None:
    check(saved(case), case, 2, max_num_batched_tokens=64, attention=attention, **settings)


@pytest.mark.parametrize("case", MODELS)
def test_greedy_tokens(saved: Any, case: str) -> None:
    model = saved(case)
    engine = engine_of(model, max_num_batched_tokens=chunk_of(case, 16))
    for prompt, tokens, _ in run(engine, prompts(model, case), sampled(temperature=0)):
        assert tokens == model.generate(prompt, NEW)
    engine.close()


@pytest.mark.parametrize("vision_cache", ["pages", "inside"])
@pytest.mark.parametrize("case", ["llava", "internvl"])
def test_a_picture_is_encoded_once(saved: Any, case: str, vision_cache: str) -> None:
    """Each part of each picture of a prompt in its turn, though the prompt has many chunks; kept pages serve any
    request that shows it again."""
    model = saved(case)
    engine = engine_of(model, max_num_batched_tokens=8, vision_cache=vision_cache, enable_prefix_caching=True)
    entries = encoded(engine)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    shown = model.shown(60, 90, 1)
    assert shown.parts > 2
    for seed in (1, 2):
        list(run(engine, [model.prompt(words(3, seed), shown, words(3, 0))], params))
    spans = [(entry.first_part, entry.first_part + entry.num_parts) for entry in entries]
    once = [span for i, span in enumerate(spans) if i == 0 or span[0]]
    assert [start for start, _ in once[1:]] == [end for _, end in once[:-1]] or vision_cache == "inside"
    parts = sum(stop - start for start, stop in spans)
    assert parts == shown.parts * (1 if vision_cache == "pages" else 2)
    engine.close()


def test_parts_of_a_picture_are_let_go_with_its_request(saved: Any) -> None:
    model = saved("llava")
    engine = engine_of(model, max_num_batched_tokens=16, depth=1)
    given = model.prompt(words(3, 0), model.shown(60, 50, 1))
    engine.add("a", given.tokens, sampled(), images=given.media, pixels=[one.pixels for one in given.pictures])
    engine.step()
    engine.step()
    assert engine.runner.image_inputs.partial_images
    engine.abort("a")
    while engine.has_unfinished_requests:
        engine.step()
    assert not engine.runner.image_inputs.partial_images


@pytest.mark.share(30)
@pytest.mark.parametrize("vision_cache", ["pages", "inside", "off"])
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (16, 5), (4, 20), (16, 512)])
@pytest.mark.parametrize("case", MODELS)
def test_beams(saved: Any, case: str, page_size: int, chunk: int, preemption: str | None, vision_cache: str) -> None:
    model, width = saved(case), 3
    settings = {"max_num_batched_tokens": chunk_of(case, chunk), "page_size": page_size, "vision_cache": vision_cache}
    params = SamplingParams(n=width, beam_width=width, max_tokens=4, ignore_eos=True, logit_bias={TOKEN: -100.0})
    bias = torch.zeros(VOCAB).index_fill_(0, torch.tensor(TOKEN), -100.0)
    given = prompts(model, case)[:3]
    with serving(model, preemption, {3, 5}, max_num_seqs=16, **settings) as engine:
        answers = list(run(engine, given, params))
    for prompt in given:
        live = [(0.0, list[int]())]
        for _ in range(4):
            grown = [
                (total + float(row[token]), [*tokens, token])
                for total, tokens in live
                for row in [model.logprobs(prompt, tokens)[-1] + bias]
                for token in row.topk(2 * width).indices.tolist()
            ]
            live = sorted(grown, key=lambda one: -one[0])[:width]
        assert [tokens for one, tokens, _ in answers if one is prompt] == [tokens for _, tokens in live]


def test_longer_than_a_phi3_was_trained_for(saved: Any) -> None:
    """Where sequences may be longer, all are computed with the factors for long ones."""
    model = saved("phi3")
    engine = engine_of(model, max_model_len=2048, kv_tokens=4096, max_num_batched_tokens=512)
    prompt = model.prompt(words(1000, 0), model.shown(60, 50, 1), words(9, 1))
    params = sampled(temperature=0, logprobs=20)
    ((_, tokens, tops),) = run(engine, [prompt], params)
    assert len(prompt.tokens) > 1024
    assert_said(tops, model.following(prompt, tokens))
    engine.close()


def test_an_image_that_sees_all_of_itself_is_computed_in_one_step(saved: Any) -> None:
    model = saved("gemma3")
    prompt = model.prompt([1, 2, 3], model.shown(9, 9))
    engine = engine_of(model, max_num_batched_tokens=3)
    with pytest.raises(PromptTooLong, match=r"an image has 4 tokens, which attend to one another.* 3 at most"):
        engine.add("0", prompt.tokens, SamplingParams(max_tokens=1), images=prompt.media)
    engine.close()
    assert [clip_at_image(prompt.media, *at) for at in ((0, 9), (0, 7), (0, 6), (2, 2), (3, 3), (5, 2))] == [
        9,
        7,
        3,
        1,
        0,
        2,
    ]


def test_a_prompt_that_attends_both_ways_is_computed_in_one_step(saved: Any) -> None:
    model = saved("paligemma")
    engine = engine_of(model, max_num_batched_tokens=32)
    with pytest.raises(PromptTooLong, match=r"40 tokens, which attend to one another both ways.* 32 at most"):
        engine.add("0", words(40, 0), SamplingParams(max_tokens=1))
    with pytest.raises(InputError, match="prompt_logprobs is 1"):
        engine.add("0", words(20, 0), SamplingParams(max_tokens=1, prompt_logprobs=1))
    engine.close()
