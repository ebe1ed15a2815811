"""Engines with speculation heads: what is drafted is what the published head drafts from transformers' hidden states,
and the tokens are transformers', whatever the chunks, pages, hits, preemptions and depths. Drafts that are right up to
a random one take the place of the head's, so that runs of every length are accepted and rejected."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from published_heads import HEAD, TARGET, VOCAB, PublishedEagle3, mimo, qwen, randomized, saved
from test_unlike_logits import finished, serving

from quire import SamplingParams
from quire.core.engine import Engine
from quire.protocol.seeds import branch_seed
from quire.worker.drafter import HeadDrafter
from quire.worker.gumbel import exponential_noise

NEW, DRAFTS = 24, 4
PROMPTS = [[(7 * i * i + 3 * k) % VOCAB for i in range(length)] for k, length in enumerate((31, 4, 18))]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
STEPS = frozenset({6, 9, 13, 17})


class Models:
    """A target and its head, transformers' and saved."""

    settings: dict[str, Any] = {"kv_tokens": 2048}  # noqa: RUF012

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder, self.kind = folder / "target", kind
        method = "eagle3" if kind == "eagle3" else "mtp"
        self.method: dict[str, Any] = {"speculative_method": method, "num_speculative_tokens": DRAFTS}
        if kind == "mtp":
            self.target, self.head = mimo(self.folder)
        elif kind == "mtp, states":
            self.target, self.head = qwen(self.folder)
            self.settings = {"kv_tokens": 4096, "state_tokens": 16}
        else:
            self.target = saved("llama", TARGET, self.folder)
            self.head = randomized(PublishedEagle3(HEAD, embeds=False))
            self.head.save(folder / "head", HEAD)
            self.method["speculative_model"] = str(folder / "head")
        self.texts = [self._generated(prompt) for prompt in PROMPTS]

    @torch.no_grad()
    def _generated(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        return self.target.generate(ids, **options, eos_token_id=None)[0].tolist()

    @torch.no_grad()
    def drafted(self, text: list[int], count: int, temperature: float, seed: int) -> list[int]:
        """What the head drafts after a text: each pass computes all rows anew."""
        embed, tokens = self.target.get_input_embeddings(), list(text)
        out = self.target.model(torch.tensor([text[:-1]]), output_hidden_states=True)
        if self.kind != "eagle3":
            states, logits_of = out.last_hidden_state[0], self.target.lm_head
        else:
            states = self.head.fc(torch.cat([out.hidden_states[layer][0] for layer in (2, 3, 3)], dim=-1))
            logits_of = self.head.logits
        for _ in range(count):
            x = self.head(embed(torch.tensor(tokens[1:])), states)[-1:]
            scores = logits_of(x)[0].double()
            if temperature:
                at = torch.tensor([len(tokens)])
                scores = scores / temperature - exponential_noise(torch.tensor([seed]), at, 0, VOCAB)[0].log()
            tokens.append(int(scores.argmax()))
            states = torch.cat((states, x))
        return tokens[len(text) :]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda kind: Models(kind, tmp_path_factory.mktemp("heads")))


class Drafting:
    """Records what the head drafts after which text, and drafts other tokens in its place: those of the request's
    `texts`, but for a wrong one at a place that depends on the length."""

    def __init__(self, engine: Engine, texts: dict[str, list[list[int]]], patch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[list[int], list[int], SamplingParams, int]] = []
        inner = HeadDrafter.propose

        def propose(drafter: HeadDrafter, plan: Any, verification: Any, accepted: Any) -> None:
            inner(drafter, plan, verification, accepted)
            counts = {}
            if verification is not None:
                counts = dict(zip(verification.slots.tolist(), accepted.tolist(), strict=True))
            for row in plan.draft_slices:
                if row.num_samples:
                    request, seq = engine.scheduler.by_slot[row.slot]
                    text = next(one for one in texts[request.id] if one[: len(seq.tokens)] == seq.tokens)
                    end = row.start + counts.get(row.slot, 0) + 1
                    drafts = drafter.drafts[: row.num_samples, row.slot]
                    self.found.append((text[:end], drafts.tolist(), request.params, seq.seed))
                    wrong = end * 7 % 6
                    for i, token in enumerate(text[end:][: row.num_samples]):
                        drafts[i] = (token + (i == wrong)) % VOCAB

        patch.setattr(HeadDrafter, "propose", propose)

    def check(self, models: Models, least: int, most_wrong: float = 0.0) -> None:
        """Those of requests that draw from all tokens, or greedily; the share `most_wrong` of them may differ."""
        found = [one for one in self.found if one[2].top_p == 1 and not one[2].min_p]
        assert len(found) >= least
        differ = []
        for text, drafts, params, seed in found:
            want = models.drafted(text, len(drafts), params.temperature, int(branch_seed(seed % 2**63, 0)))
            if drafts != want:
                differ.append((len(text), drafts, want))
        assert len(differ) <= most_wrong * len(found), differ


def check_greedy(
    models: Models, patch: pytest.MonkeyPatch, preemption: str | None = None, most_wrong: float = 0.0, **settings: Any
) -> None:
    """Twice, the second time with the prompts in memory. `most_wrong`: see Drafting.check."""
    given = {"page_size": 4, "max_num_batched_tokens": 24, "adaptive_speculation": False, **models.method, **settings}
    with serving(models, preemption, STEPS, **given) as engine, patch.context() as patched:
        drafting = Drafting(engine, {str(i): [text] for i, text in enumerate(models.texts)}, patched)
        for _ in range(2):
            for i, prompt in enumerate(PROMPTS):
                engine.add(str(i), prompt, GREEDY)
            for name, tokens, _ in finished(engine):
                assert [*PROMPTS[int(name)], *tokens] == models.texts[int(name)]
        stats, hits = engine.stats.copy(), engine.scheduler.memory.account().sharing.hits
    assert stats.draft_tokens > stats.accepted_tokens > 40
    assert min(stats.accepted_per_pos[:3]) > 0, "runs of several lengths are accepted"
    drafting.check(models, 20, most_wrong)
    assert (hits > 0) == settings.get("enable_prefix_caching", True)


@pytest.mark.share(6)
@pytest.mark.parametrize("hit", [True, False])
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (16, 20), (4, 64)])
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "mtp, states"])
def test_a_head_drafts_as_the_published_one(
    models: Any, kind: str, page_size: int, chunk: int, preemption: str | None, hit: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    settings = {"page_size": page_size, "max_num_batched_tokens": chunk, "enable_prefix_caching": hit}
    check_greedy(models(kind), monkeypatch, preemption, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_tokens": 160, "max_num_seqs": 3, "preemption": "recompute"},
        {"kv_tokens": 160, "max_num_seqs": 3, "preemption": "swap", "swap_gib": 0.01},
        {"depth": 2},
        {"depth": 3, "page_size": 1},
        {"tp": 2, "device": "cpu"},
        {"cuda_graphs": False},
        {"attention": "reference"},
        {"adaptive_speculation": True},
    ],
    ids=str,
)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "mtp, states"])
def test_other_engines(models: Any, kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check_greedy(models(kind), monkeypatch, **settings)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "mtp, states"])
def test_quantized_heads_draft(models: Any, kind: str) -> None:
    """Their layers are made without memory, and weights are rounded while they are loaded."""
    model, texts = models(kind), []
    for method in ({}, {**model.method, "adaptive_speculation": False}):
        with serving(model, quantization="int8", **method) as engine:
            for i, prompt in enumerate(PROMPTS):
                engine.add(str(i), prompt, GREEDY)
            texts.append(sorted(finished(engine)))
            assert (engine.stats.copy().draft_tokens > 0) == bool(method)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "mtp, states"])
def test_a_head_drafts_after_a_sleep(models: Any, kind: str, level: int) -> None:
    model, texts = models(kind), []
    with serving(model, adaptive_speculation=False, **model.method) as engine:
        for _ in range(2):
            drafted = engine.stats.copy().draft_tokens
            for i, prompt in enumerate(PROMPTS):
                engine.add(str(i), prompt, GREEDY)
            texts.append(sorted(finished(engine)))
            assert engine.stats.copy().draft_tokens > drafted
            engine.sleep(level)
            head = engine.runner.draft_runner.model
            assert head is None or not len(head.hidden), "hidden states take no memory while the engine sleeps"
            engine.wake()
    assert texts[0] == texts[1]


DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=NEW, ignore_eos=True)
KINDS = {
    "drawn": DRAWN,
    "of all tokens": replace(DRAWN, top_p=1.0),
    "branches": replace(DRAWN, n=3, logprobs=2),
    "penalties": replace(DRAWN, frequency_penalty=0.4, repetition_penalty=1.2, min_p=0.01),
    "stops": replace(DRAWN, stop_token_ids=[5, 17, 40], min_tokens=4, n=2),
    "scores": replace(DRAWN, prompt_logprobs=1, logprobs=0),
    "not drafted": replace(DRAWN, speculate=False),
    "beams": SamplingParams(beam_width=3, max_tokens=8),
}


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_tokens_are_those_without_a_head(models: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of requests at once, in a memory that is short. Nothing is found there: behind a prefix that another
    token followed the head drafts a little differently."""
    model, given = models(kind), {"page_size": 4, "max_num_batched_tokens": 24, "deterministic": True}

    def answers(engine: Engine) -> list[Any]:
        for name, params in KINDS.items():
            for i, prompt in enumerate(PROMPTS):
                engine.add(f"{name} {i}", prompt, params)
        return sorted(finished(engine))

    with serving(model, **given) as engine:
        want = answers(engine)
    texts: dict[str, list[list[int]]] = {}
    for name, tokens, _ in want:
        texts.setdefault(name, []).append([*PROMPTS[int(name[-1])], *tokens])
    short = {"kv_tokens": 300, "swap_gib": 0.01, "adaptive_speculation": False, "enable_prefix_caching": False}
    with serving(model, **given, **model.method, **short) as engine, monkeypatch.context() as patched:
        drafting = Drafting(engine, texts, patched)
        assert answers(engine) == want
        stats = engine.stats.copy()
    drafting.check(model, 20)
    assert stats.accepted_tokens > 100
    assert stats.draft_tokens > stats.accepted_tokens
