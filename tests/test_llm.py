"""LLM: prompts in, results out, in order; nothing is left behind by a call that fails."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import echo_service
import pytest
from echo_oracle import expected_beams, expected_states, expected_tokens
from echo_service import MAX_LEN, VOCAB, Echo, tokenizer

import quire
from bench.echo_runner import fake_top
from quire.errors import EngineDead, InputError, PrefixesFull, PrefixTaken, PromptTooLong
from quire.llm import LLM, BeamSearchParams
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seeds import branch_seed
from quire.protocol.step_plan import StepResult
from quire.text.chat_template import ChatTemplate

PARAMS = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)


@pytest.fixture
def llm() -> LLM:
    return LLM.of(echo_service.built())  # type: ignore[arg-type]


def wanted(ids: list[int], params: SamplingParams = PARAMS, seed: int = 3) -> list[int]:
    return expected_tokens(ids, params, seed, vocab_size=VOCAB)


def test_public_names() -> None:
    assert list(quire.__all__) == sorted(quire.__all__)
    for name in quire.__all__:
        assert getattr(quire, name).__name__ == name
        assert name in dir(quire)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        quire.Nothing  # noqa: B018


def test_imports_stay_light() -> None:
    """`import quire.llm` and the engine's core need neither the server's libraries nor a tensor library."""
    heavy = ("torch", "pydantic", "fastapi", "uvicorn", "transformers", "tokenizers")
    light = "quire.llm, quire.cli, quire.core.engine, quire.memory.interface"
    code = f"import sys, {light}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_every_form_of_a_prompt(llm: LLM) -> None:
    text = "once upon a time"
    ids = tokenizer().encode(text)
    for prompt in (text, ids, {"prompt_token_ids": ids}, {"prompt": text}):
        [result] = llm.generate(prompt, sampling_params=PARAMS, use_tqdm=False)
        assert result.prompt_token_ids == ids
        assert result.outputs[0].token_ids == wanted(ids)
        assert result.outputs[0].text == tokenizer().decode(wanted(ids))
        assert result.outputs[0].finish_reason == "length"
        assert result.finished


def test_results_come_in_the_order_of_prompts() -> None:
    """Even if there are more than the queue holds."""
    llm = LLM.of(
        echo_service.built(max_num_queued_reqs=2)._replace(default_sampling={"temperature": 0.5, "unknown": 1})
    )  # type: ignore[arg-type]
    prompts = [[i + 1] * (1 + i % 7) for i in range(40)]
    params = [SamplingParams(max_tokens=1 + (7 * i) % 11, seed=i, ignore_eos=True) for i in range(40)]
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == prompts
    assert [r.outputs[0].token_ids for r in results] == [wanted(p, s, s.seed or 0) for p, s in zip(prompts, params)]
    assert llm.generate([], PARAMS) == []
    metrics = results[0].metrics
    assert metrics is not None
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert times == sorted(filter(None, times))
    assert (llm.prompts.make_params().temperature, llm.prompts.make_params(temperature=0.0).temperature) == (0.5, 0)
    llm.generate([[1]], None, use_tqdm=False)


@pytest.mark.parametrize(("terminal", "asked"), [(True, True), (True, False), (False, True)])
def test_a_progress_bar_counts_tokens_on_terminals_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, terminal: bool, asked: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    clock = SimpleNamespace(perf_counter=count(step=0.125).__next__)  # a step takes 0.125 s, and a bar is drawn in 0.2
    monkeypatch.setattr("quire.llm.time", clock)
    llm.generate([[1]], PARAMS, use_tqdm=asked)
    assert bool(stream.getvalue()) == (terminal and asked)
    speeds = re.findall(r"([01])/1 .*?input: (.*?) toks/s, output: (.*?) toks/s", stream.getvalue())
    drawn = [("0", "4.00", "8.00"), ("0", "2.00", "8.00"), ("0", "1.33", "8.00"), ("1", "1.00", "8.00")]
    assert list(dict.fromkeys(speeds)) == drawn * (terminal and asked)


def test_branches_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, seed=3, n=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    [result] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert [output.token_ids for output in result.outputs] == [
        wanted([5, 6, 7], params, branch_seed(3, i)) for i in range(3)
    ]
    first = result.outputs[0]
    assert first.logprobs is not None
    assert [next(iter(entry)) for entry in first.logprobs] == first.token_ids
    chosen = [entry[token].logprob for entry, token in zip(first.logprobs, first.token_ids)]
    assert first.cumulative_logprob == pytest.approx(sum(chosen))
    assert first.logprobs[0][first.token_ids[0]].decoded_token == tokenizer().token_text(first.token_ids[0])
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in result.prompt_logprobs[1:] if entry] == [6, 7]
    plain = llm.generate([[5]], PARAMS, use_tqdm=False)[0].outputs[0]
    assert plain.logprobs is None
    assert plain.cumulative_logprob is None


@pytest.mark.parametrize("more", [{"kv_tokens": 64}, {"memory": "virtual"}])
def test_a_prompt_of_the_model_s_length_is_scored(more: dict[str, Any]) -> None:
    """In a memory that holds just this prompt, too."""
    prompt, scored = [(7 * i) % 300 + 5 for i in range(64)], SamplingParams(max_tokens=0, prompt_logprobs=1, n=2)
    found = []
    for length, settings in ((64, more), (128, {})):
        with LLM("", device="cpu", dtype="float32", max_model_len=length, max_num_batched_tokens=24, **settings) as llm:
            [result] = llm.generate([prompt], scored, use_tqdm=False)
            assert [(output.token_ids, output.finish_reason) for output in result.outputs] == [([], "length")] * 2
            assert result.prompt_logprobs is not None
            found.append([entry[token].logprob for entry, token in zip(result.prompt_logprobs, prompt) if entry])
            for ids, params in (([5] * length, PARAMS), ([5] * (length + 1), scored)):
                with pytest.raises(PromptTooLong, match=f"^This model's maximum context length is {length} tokens"):
                    llm.generate([ids], params, use_tqdm=False)
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert len(found[0]) == 63


def test_named_logprobs(llm: LLM) -> None:
    ids = [3, 40, 7]
    params = SamplingParams(max_tokens=5, seed=3, n=2, logprob_token_ids=ids, prompt_logprobs=1, ignore_eos=True)
    kinds = [params, replace(params, logprobs=3), replace(params, best_of=4), PARAMS]
    named, counted, best, plain = llm.generate([[5, 6, 7]] * 4, kinds, use_tqdm=False)
    assert [output.logprobs for output in counted.outputs] == [output.logprobs for output in named.outputs]
    assert plain.outputs[0].logprobs is None
    for result in (named, best):
        assert result.prompt_logprobs == counted.prompt_logprobs
        for output in result.outputs:
            assert output.logprobs is not None
            known = expected_states([5, 6, 7, *output.token_ids])[2:]
            for token, state, entry in zip(output.token_ids, known, output.logprobs):
                top = fake_top(state, token, 0, VOCAB, tuple(ids))
                assert list(entry) == [token, *(id for id in ids if id != token)]
                assert [one.logprob for one in entry.values()] == [
                    top.logprob, *(value for id, value in zip(ids, top.logprobs) if id != token),
                ]  # fmt: skip
                assert [one.rank for one in entry.values()] == [top.rank] + [None] * (len(entry) - 1)
                assert [one.decoded_token for one in entry.values()] == [tokenizer().token_text(id) for id in entry]
            assert output.cumulative_logprob == sum(e[t].logprob for e, t in zip(output.logprobs, output.token_ids))
    tops = [top for output in llm.stream([5, 6, 7], params) for top in output.top_logprobs]
    assert {top.ids for top in tops} == {tuple(ids)}


def test_beam_search_and_best_of(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True, temperature=0.0, length_penalty=0.5)
    same = SamplingParams(beam_width=3, n=3, max_tokens=6, ignore_eos=True, length_penalty=0.5)
    prompts = [[5, 6], "once upon"]
    for prompt, found, result in zip(
        prompts, llm.beam_search(prompts, params), llm.generate(prompts, same, use_tqdm=False)
    ):
        ids = prompt if isinstance(prompt, list) else tokenizer().encode(prompt)
        beams = expected_beams(ids, same, vocab_size=VOCAB)
        assert [beam.tokens for beam in found.sequences] == [[*ids, *beam.tokens] for beam in beams]
        assert [beam.cum_logprob for beam in found.sequences] == [beam.logprob for beam in beams]
        assert [beam.text for beam in found.sequences] == [tokenizer().decode([*ids, *beam.tokens]) for beam in beams]
        assert [len(beam.logprobs) for beam in found.sequences] == [6] * 3
        assert [output.token_ids for output in result.outputs] == [beam.tokens for beam in beams]
        assert [output.cumulative_logprob for output in result.outputs] == [beam.logprob for beam in beams]
    best = SamplingParams(best_of=5, n=2, seed=3, max_tokens=6, ignore_eos=True)
    outputs = llm.generate([[5, 6]], best, use_tqdm=False)[0].outputs
    scores = [output.cumulative_logprob for output in outputs]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert [output.index for output in outputs] == [0, 1]
    steps = llm.engine.stats.steps
    for bad in ({"beam_width": 0}, {"beam_width": 65}, {"beam_width": 17}, {"beam_width": 2, "max_tokens": 0}):
        with pytest.raises(InputError, match=r"beam_width|max_tokens"):
            llm.beam_search([[1]], BeamSearchParams(**{"max_tokens": 4, **bad}))
    assert llm.engine.stats.steps == steps


def test_registered_prefixes() -> None:
    llm = LLM.of(echo_service.built(prefix_tokens=40, enable_prefix_caching=False))  # type: ignore[arg-type]
    ids = list(range(30, 52))
    assert llm.register_prefix("rules", ids) == 22
    assert llm.prefixes == {"rules": 22}
    [result] = llm.generate([[*ids, 3]], PARAMS, use_tqdm=False)
    assert result.num_cached_tokens == 22
    assert result.outputs[0].token_ids == wanted([*ids, 3])
    assert llm.generate([ids], PARAMS, use_tqdm=False)[0].num_cached_tokens == 20  # whole pages, not the last token
    with pytest.raises(PrefixTaken):
        llm.register_prefix("rules", [1])
    with pytest.raises(PrefixesFull):
        llm.register_prefix("more", [1] * 17)
    for name, bad in (("a b", [1]), ("", [1]), (5, [1]), ("x", []), ("x", [VOCAB]), ("x", None)):
        with pytest.raises(InputError):
            llm.register_prefix(name, bad)  # type: ignore[arg-type]
    assert llm.release_prefix("rules")
    assert not llm.release_prefix("rules")
    assert llm.register_prefix("text", "once upon") == len(tokenizer().encode("once upon"))
    assert llm.generate(["once upon a time"], PARAMS, use_tqdm=False)[0].num_cached_tokens > 0
    llm.engine.scheduler.memory.check()


@pytest.mark.parametrize(
    "bad", [[], [VOCAB], [-1], [1.5], ["1"], [True], "", "a" * 100_000, [1] * MAX_LEN, None, 5, b"bytes", {}]
)
def test_one_bad_prompt_stops_all_before_anything_is_computed(llm: LLM, bad: object) -> None:
    with pytest.raises(InputError):
        llm.generate([[1, 2], bad, [3]], PARAMS, use_tqdm=False)
    assert llm.engine.stats.steps == 0
    assert not llm.engine.has_unfinished_requests
    assert llm.generate([[1, 2]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == wanted([1, 2])


def test_bad_params(llm: LLM) -> None:
    with pytest.raises(InputError, match="2 prompts, but 1 sampling_params"):
        llm.generate([[1], [2]], [PARAMS])
    with pytest.raises(InputError, match="must be SamplingParams"):
        llm.generate([[1]], [{"max_tokens": 1}])  # type: ignore[list-item]
    with pytest.raises(PromptTooLong, match="don't fit"):
        llm.generate([[1]], SamplingParams(n=16, max_tokens=250))
    assert llm.engine.stats.steps == 0


def test_chat(llm: LLM) -> None:
    talk = [{"role": "user", "content": "once"}]
    prompt = "<|im_start|>user\nonce<|im_end|>\n<|im_start|>assistant\n"
    [single] = llm.chat(talk, sampling_params=PARAMS, use_tqdm=False)
    assert single.prompt == prompt
    assert single.outputs[0].token_ids == wanted(tokenizer().encode(prompt))
    several = llm.chat([talk, talk], PARAMS, use_tqdm=False, add_generation_prompt=False)
    assert [result.prompt for result in several] == [prompt.removesuffix("<|im_start|>assistant\n")] * 2
    tool = {"type": "function", "function": {"name": "weather"}}
    assert '"name": "weather"' in llm.chat(talk, PARAMS, use_tqdm=False, tools=[tool])[0].prompt
    with pytest.raises(InputError, match="1 to"):
        llm.chat([], PARAMS)


def test_without_a_tokenizer() -> None:
    llm = LLM.of(echo_service.built(text=False))  # type: ignore[arg-type]
    result = llm.generate({"prompt_token_ids": [4, 5]}, PARAMS, use_tqdm=False)[0]
    assert result.outputs[0].token_ids == wanted([4, 5])
    assert result.outputs[0].text == ""
    with pytest.raises(InputError, match="no tokenizer"):
        llm.generate("text", PARAMS)
    with pytest.raises(InputError, match="no chat template"):
        llm.chat([{"role": "user", "content": "a"}], PARAMS)


class Interrupted(Echo):
    """Ctrl-C is pressed in the tenth step."""

    def collect(self, ticket: int) -> StepResult:
        if ticket == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return super().collect(ticket)


@pytest.mark.parametrize("stream", [False, True])
def test_ctrl_c_aborts_all_and_leaves_the_llm_usable(stream: bool) -> None:
    llm = LLM.of(echo_service.built(Interrupted(pause=0.01)))  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream([1, 2], params)) if stream else llm.generate([[i + 1] for i in range(8)], params)
    assert not llm.engine.has_unfinished_requests
    usage = llm.engine.scheduler.memory.account().usage
    assert usage.free + usage.cached == usage.total
    assert llm.generate([[1, 2]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == wanted([1, 2])


def test_stream_yields_as_it_goes_and_can_be_left(llm: LLM) -> None:
    outputs = list(llm.stream([1, 2], PARAMS))
    assert [token for output in outputs for token in output.tokens] == wanted([1, 2])
    started = llm.stream([1, 2], SamplingParams(max_tokens=100, ignore_eos=True))
    next(started)
    with pytest.raises(InputError, match="under way"):
        llm.generate([[1]], PARAMS, use_tqdm=False)
    started.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_unfinished_requests


def test_a_failed_step_closes_the_llm() -> None:
    llm = LLM.of(echo_service.built(Echo(fail_at=3)))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="device is gone"):
        llm.generate([[1]], PARAMS, use_tqdm=False)
    with pytest.raises(EngineDead):
        llm.generate([[1]], PARAMS, use_tqdm=False)


def test_close_ends_the_chat_templates_process() -> None:
    llm = LLM.of(echo_service.built())  # type: ignore[arg-type]
    llm.prompts.replace_chat_template(ChatTemplate(echo_service.TEMPLATE, {}))  # that of all echoes stays
    process, _ = llm.prompts.chat_template._process._kill.peek()[2]  # type: ignore[union-attr]
    assert process.poll() is None
    llm.close()
    llm.close()
    assert process.poll() is not None
    with pytest.raises(EngineDead, match="closed"):
        llm.chat([{"role": "user", "content": "a"}], PARAMS)
    with LLM.of(echo_service.built(text=False)) as llm:  # type: ignore[arg-type]
        llm.generate([[1]], PARAMS, use_tqdm=False)
    with pytest.raises(EngineDead):
        llm.generate([[1]], PARAMS)
