"""logprob_token_ids: what comes is transformers' log_softmax of the same weights, whatever else is in the batch and
whatever happens to the request."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from quire.errors import InputError
from quire.llm import LLM
from quire.text.outputs import CompletionOutput
from quire.vocabulary.params import SamplingParams

VOCAB = 97
FEW, MANY = [3, 96, 41], list(range(96, -1, -1))
RULES: dict[str, Any] = {"repetition_penalty": 1.5, "logit_bias": {3: 9.0}, "bad_word_ids": ((41,),)}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprob_token_ids": FEW},
    {"logprobs": 2},
    {"seed": 4, "n": 3, "logprob_token_ids": MANY},
    {},
    {"seed": 5, "best_of": 4, "n": 2, "logprob_token_ids": [7]},
    {"seed": 6, "temperature": 0.5, "logprobs": 3, "logprob_token_ids": FEW, **RULES},
    {"temperature": 0, "beam_width": 2, "n": 2, "logprobs": 2},
)
NAMED = [kind for kind, values in enumerate(KINDS) if "logprob_token_ids" in values]


class Reference(NamedTuple):
    """A random model in transformers, saved to `folder`."""

    model: Any
    folder: Path

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Of what follows each position, [length, VOCAB]."""
        found: torch.Tensor = self.model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("named")
    model.save_pretrained(folder)
    return Reference(model, folder)


def llm_of(reference: Reference, **settings: Any) -> LLM:
    fixed = {"dtype": "float32", "skip_tokenizer_init": True, "page_size": 4, "threads": 1, "debug": True}
    return LLM(str(reference.folder), **(fixed | {"kv_tokens": 2048} | settings))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (9 + kind,), generator=generator).tolist() for kind in range(len(KINDS))]


def params_of(kind: int) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "ignore_eos": True, "detokenize": False} | KINDS[kind]))


def check(reference: Reference, prompt: list[int], ids: list[int], output: CompletionOutput) -> None:
    """Each entry is the chosen token and `ids`, in this order, with the model's own log-probabilities."""
    exact = reference.logprobs([*prompt, *output.token_ids])[len(prompt) - 1 :]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == 12
    for token, row, entry in zip(output.token_ids, exact, output.logprobs):
        assert list(entry) == list(dict.fromkeys([token, *ids]))
        assert [one.logprob for one in entry.values()] == pytest.approx(row[list(entry)].tolist(), abs=1e-4)
        assert [one.rank for one in entry.values()] == [1 + int((row > row[token]).sum())] + [None] * (len(entry) - 1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"attention": "reference", "enable_prefix_caching": False},
        {"kv_tokens": 128, "preemption": "swap"},
        {"kv_tokens": 128, "preemption": "recompute"},
    ],
    ids=str,
)
def test_named_tokens_have_the_log_probabilities_of_transformers(
    reference: Reference, settings: dict[str, Any]
) -> None:
    given = prompts()
    with llm_of(reference, **settings) as llm:
        results = llm.generate(given, [params_of(kind) for kind in range(len(KINDS))], use_tqdm=False)
        assert all(llm.engine.scheduler.preempted[way] > 0 for name, way in settings.items() if name == "preemption")
    assert results[3].outputs[0].logprobs is None
    for kind in NAMED:
        assert len(results[kind].outputs) == KINDS[kind].get("n", 1)
        for output in results[kind].outputs:
            check(reference, given[kind], KINDS[kind]["logprob_token_ids"], output)
    [plain] = results[1].outputs  # its mates change nothing of what it asked for
    assert plain.logprobs is not None
    exact = reference.logprobs([*given[1], *plain.token_ids])[len(given[1]) - 1 :]
    for token, row, entry in zip(plain.token_ids, exact, plain.logprobs):
        assert list(entry) == list(dict.fromkeys([token, *row.topk(2).indices.tolist()]))


def test_a_prefix_hit_changes_nothing(reference: Reference) -> None:
    prompt = prompts()[-1] * 2
    with llm_of(reference) as llm:
        first, second = (llm.generate(prompt, params_of(NAMED[1]), use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens > 8
    for output in (*first.outputs, *second.outputs):
        check(reference, prompt, MANY, output)


def test_a_token_beyond_the_vocabulary_is_refused(reference: Reference) -> None:
    with llm_of(reference) as llm:
        with pytest.raises(InputError, match=f"logprob_token_ids holds token {VOCAB}, but the vocabulary has {VOCAB}"):
            llm.generate([1], SamplingParams(logprob_token_ids=[5, VOCAB]), use_tqdm=False)
        assert llm.engine.stats.steps == 0
