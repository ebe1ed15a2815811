"""A draft model at the start: where it is found, what is refused, and what it takes of the memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import quire.startup.checkpoint
from quire.config import EngineConfig, Experiment
from quire.errors import StartupError
from quire.llm import LLM
from quire.pool import Pool
from quire.protocol.parallel_layout import Shard
from quire.protocol.step_plan import MAX_STEP_DRAFTS
from quire.startup.build import build_engine, describe_memory_plan
from quire.startup.checkpoint import read_checkpoint
from quire.startup.dtypes import kv_namespace, quantization_savings
from quire.startup.memory_plan import activation_bytes, graph_bytes, saved_input_bytes
from quire.startup.speculation import check_speculation
from quire.text.input_processor import engine_config

ASSETS = Path(quire.startup.checkpoint.__file__).parents[1] / "assets"


def edited(tmp_path: Path, name: str = "tiny-draft", /, **settings: Any) -> str:
    """Return a copy of a bundled model with other settings in its config.json."""
    folder = tmp_path / "copy"
    shutil.copytree(ASSETS / name, folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def checked(**settings: Any) -> Any:
    config = EngineConfig(device="cpu", **settings)
    return check_speculation(config, read_checkpoint(config, weights=False))


def plan_of(device_gib: float = 80.0, **settings: Any) -> dict[str, str]:
    """Return the lines of `quire plan` by their names."""
    return dict(line.split(maxsplit=1) if line.split()[0] not in ("draft",) else (line[:12].strip(), line[13:])
                for line in describe_memory_plan(EngineConfig(**settings), device_gib))  # fmt: skip


@pytest.mark.parametrize("name", ["tiny-draft", str(ASSETS / "tiny-draft")])
def test_a_draft_model_is_found_as_the_model_is(name: str) -> None:
    source = read_checkpoint(EngineConfig(speculative_model=name))
    assert (source.name, source.draft.name, source.draft.path) == ("tiny", "tiny-draft", ASSETS / "tiny-draft")
    assert source.draft.draft is None
    assert read_checkpoint(EngineConfig(speculative_method="ngram")).draft is None


def test_the_memory_has_both_models_layers() -> None:
    source = read_checkpoint(EngineConfig(speculative_model="tiny-draft"))
    assert [layer.is_draft for layer in source.pool_spec.layers] == [False] * 6 + [True] * 2
    assert source.pool_spec.parameters == source.spec.parameters + source.draft.spec.parameters
    assert read_checkpoint(EngineConfig()).pool_spec.parameters == source.spec.parameters
    config = EngineConfig(kv_cache_dtype="int8")
    assert all(layer.has_int8_kv for layer in source.with_stored_dtypes(config, 2).pool_spec.layers)
    assert kv_namespace(config, source, "float32") != kv_namespace(config, source._replace(draft=None), "float32")


def test_ranks_divide_the_draft_model_as_the_model() -> None:
    config = EngineConfig(model_config="llama3-8b", speculative_model="llama3.2-1b", dummy_weights=True)
    part = read_checkpoint(config).for_shard(Shard(1, 4))
    assert {layer.kv_heads for layer in part.pool_spec.layers} == {2}
    odd = EngineConfig(model="tiny", speculative_model="tiny-draft")
    with pytest.raises(StartupError, match=r"^the draft model: .*heads"):
        read_checkpoint(odd).for_shard(Shard(0, 4))


def test_the_plan_has_the_draft_models_weights_and_kv() -> None:
    few = {"device": "cuda", "model_config": "llama3.1-8b", "max_num_seqs": 64}
    alone, both = plan_of(**few), plan_of(**few, speculative_model="llama3.2-1b")
    assert both["model"] == alone["model"]
    assert both["weights"] == alone["weights"]
    assert both["draft model"] == "2.30 GiB: llama3.2-1b, 1,235,814,400 parameters"
    assert "tokens of 131,072 bytes" in alone["KV"]
    assert "tokens of 163,840 bytes" in both["KV"]
    assert both["draft KV"].startswith("32,768 bytes of each token's")
    assert "16 layers of the draft model, full, 524,288 bytes for 16 tokens" in "".join(
        describe_memory_plan(EngineConfig(**few, speculative_model="llama3.2-1b"), 80.0)
    )


def test_rows_of_logits_count_draft_tokens() -> None:
    """Each sequence has the logits of its draft tokens, too, up to the most that a step has."""
    config = EngineConfig(max_num_seqs=512, max_num_batched_tokens=8192)
    spec = read_checkpoint(EngineConfig(model_config="llama3-8b"), weights=False).spec
    speculating = EngineConfig(
        max_num_seqs=512, max_num_batched_tokens=8192, speculative_method="ngram", num_speculative_tokens=4
    )
    more = activation_bytes(speculating, spec, 2) - activation_bytes(config, spec, 2)
    assert more == MAX_STEP_DRAFTS * 16 * spec.vocab_size
    assert graph_bytes(speculating, spec, 2) > graph_bytes(config, spec, 2)


@pytest.mark.parametrize(("name", "token"), [("jamba-52b", 28 * 32_896), ("mamba-2.8b", 64 * 41_088)])
def test_the_plan_has_the_inputs_of_states(name: str, token: int) -> None:
    """Of 48 sequences of at most 4 draft tokens; of 128, no more than a step's 256 draft tokens, and one more each."""
    few = {"device": "cuda", "model_config": name, "max_num_seqs": 48}
    drafting = {**few, "speculative_method": "ngram", "num_speculative_tokens": 4}
    assert "states' inputs" not in plan_of(160.0, **few)["activations"]
    shown = plan_of(160.0, **drafting)["activations"]
    assert shown.endswith(f"at most, {token * 48 * 5 / 2**20:.1f} MiB of them the states' inputs of draft tokens")
    spec, many = read_checkpoint(EngineConfig(model_config=name), weights=False).spec, {**drafting, "max_num_seqs": 128}
    itemsize = 2 if name == "jamba-52b" else 4
    assert saved_input_bytes(EngineConfig(**many), spec, itemsize) == token * (256 + 128)
    assert saved_input_bytes(EngineConfig(**few), spec, itemsize) == 0


def test_stages_take_ngrams_and_no_running_states() -> None:
    assert checked(model_config="llama3-8b", speculative_method="ngram", pp=2).draft is None
    with pytest.raises(StartupError, match=r"--pp is 2, .* and mamba-2\.8b keeps running states"):
        checked(model_config="mamba-2.8b", speculative_method="ngram", pp=2)


def test_pruned_prompts_are_not_kept_whole() -> None:
    with pytest.raises(StartupError, match="--keep-all-tokens is given, and pyramidkv-8b keeps a part of each prompt"):
        checked(model_config="pyramidkv-8b", experiment=Experiment(keep_all_tokens=True))


def test_the_draft_models_weights_are_quantized_too() -> None:
    config = EngineConfig(quantization="int8", device="cpu", speculative_model="tiny-draft")
    source = read_checkpoint(config)
    parts = [
        quantization_savings(config, one, "bfloat16", "cpu") for one in (source._replace(draft=None), source.draft)
    ]
    assert quantization_savings(config, source, "bfloat16", "cpu") == sum(parts)
    assert min(parts) > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_config": "llama3-8b", "speculative_model": "llama-125m"},
         "the draft model llama-125m has 32000 tokens, and llama3-8b 128256"),
        ({"model": "tiny-draft", "speculative_model": "tiny"},
         "the draft model tiny has 5,213,440 parameters, and tiny-draft only 762,496"),
        ({"speculative_model": "tiny-vision"}, "the draft model tiny-vision takes images"),
        ({"model_config": "jamba-52b", "speculative_model": "jamba-52b"},
         "the draft model jamba-52b keeps running states"),
        ({"model_config": "pyramidkv-8b", "speculative_method": "ngram"}, "keeps a part of each prompt, which"),
        ({"model_config": "paligemma2-10b", "speculative_method": "ngram"}, "attends both ways in prompts"),
        ({"model_config": "llama3-8b", "speculative_model": "pyramidkv-8b"}, "keeps a part of each prompt"),
        ({"model_config": "llama3-8b", "speculative_model": "llama3.2-1x"},
         "--speculative-model 'llama3.2-1x' can't be used: .*Did you mean llama3.2-1b"),
        ({"speculative_model": "/nonexistent"}, "--speculative-model '/nonexistent' can't be used: there is no folder"),
        ({"speculative_model": str(ASSETS)}, "can't be used: .* has no config.json"),
        ({"model_config": "llama3.1-8b", "speculative_model": "llama3-8b", "max_model_len": 9000},
         "--max-model-len is 9000, and the draft model llama3-8b takes 8192 tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words) as error:
        checked(**settings)
    assert error.value.remedy


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    """Of the same number, too. Added tokens may differ, and a draft model without a tokenizer is taken."""
    folder = edited(tmp_path)
    file = Path(folder) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"][-1]["content"] = "<renamed>"
    file.write_text(json.dumps(content))
    assert checked(speculative_model=folder).draft.name == "copy"
    words = content["model"]["vocab"]
    first, second = list(words)[2000:2002]
    words[first], words[second] = words[second], words[first]
    file.write_text(json.dumps(content))
    with pytest.raises(StartupError, match=r"token \d+ is '.*' for the draft model copy, and '.*' for tiny"):
        checked(speculative_model=folder)
    file.unlink()
    (Path(folder) / "tokenizer_config.json").unlink()
    assert checked(speculative_model=folder).draft.name == "copy"


def test_a_model_of_embeddings_is_no_draft_model(tmp_path: Path) -> None:
    folder = Path(edited(tmp_path))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with pytest.raises(StartupError, match="the draft model copy makes embeddings"):
        checked(speculative_model=str(folder))


def test_a_draft_model_limits_sequences_to_its_length(tmp_path: Path) -> None:
    folder = edited(tmp_path, max_position_embeddings=1000)
    source = checked(speculative_model=folder)
    assert source.pool_spec.max_len == 1000
    assert "sequences may have 1,000 tokens, as many as the draft model was made for" in source.notices
    assert checked(speculative_model=folder, max_model_len=1000).notices == ()
    assert plan_of(device="cpu", speculative_model=folder)["longest"].startswith("1,000 tokens")


def test_an_engine_is_refused_before_it_is_built() -> None:
    config = EngineConfig(model="tiny-draft", device="cpu", speculative_model="tiny")
    with pytest.raises(StartupError, match="has 5,213,440 parameters"):
        build_engine(config, read_checkpoint(config), ())
    with pytest.raises(StartupError, match="tiny decodes speculatively, which no model of a pool does"):
        Pool([EngineConfig(device="cpu", speculative_method="ngram")], kv_gib=0.1)


def test_vllms_form_of_the_settings() -> None:
    config = engine_config("a/b", {"speculative_config": {"model": "c/d", "num_speculative_tokens": 2}})
    assert config == EngineConfig(model="a/b", speculative_model="c/d", num_speculative_tokens=2)
    two = {"method": "ngram", "draft_tensor_parallel_size": 2}
    assert engine_config(None, {"tensor_parallel_size": 2, "speculative_config": two}).speculation == "ngram"
    assert engine_config(None, {"speculative_config": None}) == EngineConfig()
    with pytest.raises(StartupError, match="speculative_config and speculative_model are both given"):
        engine_config(None, {"speculative_config": {"model": "c/d"}, "speculative_model": "c/d"})
    with pytest.raises(StartupError, match=r"--speculative-config is '\[3\]'. It must be an object"):
        LLM(speculative_config=[3])
    with pytest.raises(StartupError, match=r"an acceptance of 0\.5 is given, and there are no draft tokens"):
        EngineConfig(experiment=Experiment(synthetic_acceptance=0.5))
