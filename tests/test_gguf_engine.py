"""GGUF files as models, from start to tokens: the bundled model written as one says what it says from its folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import pytest

from quire import LLM, SamplingParams
from quire.cli import main
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.models.quantization import GGUF_BLOCKS_KEY
from quire.startup import dtypes
from quire.startup.checkpoint import read_checkpoint, read_tokenizer

TINY = Path(__file__).parents[1] / "src" / "quire" / "assets" / "tiny"
PROMPTS = ["Once upon a time", "The colour of the sky is", "A dog and a cat 123"]
CHAT = [{"role": "user", "content": "What is the colour of the sky?"}]
SETTINGS: dict[str, Any] = {"device": "cpu", "kv_tokens": 2048, "max_num_seqs": 4, "swap_gib": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in a file, in bfloat16 as it is."""
    state = json.loads((TINY / "tokenizer.json").read_text())
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    vocab = state["model"]["vocab"]
    added = {token["content"] for token in state["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    more = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in added else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": config["chat_template"], "general.sampling.temp": 0.5,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("gguf") / "Tiny.BF16.gguf"
    write = gguf_files.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "write", lambda path, said, tensors: write(path, {**said, **more}, tensors))
        return gguf_files.convert(TINY, "llama", path, "bf16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_says_what_the_folder_says(tiny: Path, dtype: str) -> None:
    said = []
    for model in ("tiny", str(tiny)):
        with LLM(model, dtype=dtype, **SETTINGS) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=24)
            results = [*llm.generate(PROMPTS, greedy), llm.chat(CHAT, greedy)[0]]
            said.append([(r.prompt_token_ids, r.outputs[0].token_ids, r.outputs[0].text) for r in results])
    assert said[0] == said[1]


def test_a_source(tiny: Path) -> None:
    source = read_checkpoint(EngineConfig(model=str(tiny)))
    assert (source.name, source.path, source.config["dtype"]) == ("Tiny.BF16", tiny, "bfloat16")
    assert (source.generation_config["eos_token_id"], source.default_sampling) == ([5], {"temperature": 0.5})
    assert read_checkpoint(EngineConfig(model=str(tiny), generation_config="vllm")).default_sampling == {}
    bundled = read_checkpoint(EngineConfig())
    assert replace(source.spec, eos_ids=()) == replace(bundled.spec, eos_ids=())
    tokenizer = read_tokenizer(EngineConfig(tokenizer=str(tiny)), None)
    assert tokenizer is not None
    assert tokenizer.eos_ids == (5, 1)


def test_a_plan(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny), "--device", "cpu", "--kv-tokens", "2048"]) == 0
    assert "Tiny.BF16" in capsys.readouterr().out


def test_what_is_no_such_file(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--revision is given"):
        read_checkpoint(EngineConfig(model=str(tiny), revision="main"))
    (tmp_path / "a.gguf").write_bytes(tiny.read_bytes()[:100_000])
    with pytest.raises(StartupError, match=r"a\.gguf is not a readable GGUF file"):
        read_checkpoint(EngineConfig(model=str(tmp_path / "a.gguf")))
    with pytest.raises(StartupError, match=r"no config\.json, but 'a\.gguf'. Give the GGUF file itself"):
        read_checkpoint(EngineConfig(model=str(tmp_path)))
    (tmp_path / "b.bin").write_bytes(b"PK")
    with pytest.raises(StartupError, match="no GGUF file"):
        read_checkpoint(EngineConfig(model=str(tmp_path / "b.bin")))


def test_settings_that_claim_more_than_the_file_has(tmp_path: Path) -> None:
    """No memory is asked for before."""
    path = gguf_files.convert(TINY, "llama", tmp_path / "a.gguf", "bf16", feed_forward_length=1 << 30)
    with pytest.raises(StartupError, match="parameters of its settings, and its tensors have"):
        read_checkpoint(EngineConfig(model=str(path)))


def test_a_path_that_is_there_goes_before_a_name(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file or a folder it is what was asked for, by its own settings, and a line at start says so."""
    monkeypatch.chdir(tmp_path)
    assert read_checkpoint(EngineConfig(model="tiny")).notices == ()
    (tmp_path / "smollm2").symlink_to(tiny)
    (tmp_path / "tiny-draft").symlink_to(TINY)
    for name in ("smollm2", "tiny-draft"):
        source = read_checkpoint(EngineConfig(model=name))
        assert source.notices == (f"{name} is {tmp_path / name}, and not quire's own model of that name",)
        assert source.spec.layers == read_checkpoint(EngineConfig()).spec.layers
    assert read_checkpoint(EngineConfig(model="smollm2")).default_sampling == {"temperature": 0.5}, "not the package's"
    with LLM("smollm2", **SETTINGS) as llm:
        assert any(notice.startswith(f"smollm2 is {tmp_path / 'smollm2'}") for notice in llm.built.notices)


def test_the_dtype_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 on a CPU where the model is narrow or kernels for blocks are missing; --dtype and a GPU come first."""

    def chosen(hidden: int, kernels: bool = True, device: str = "cpu", dtype: str = "auto") -> str:
        monkeypatch.setattr(dtypes, "_has_low_bit_kernels", lambda *_: kernels)
        config = {"hidden_size": hidden, "dtype": "bfloat16", GGUF_BLOCKS_KEY: True}
        return dtypes.choose_dtype(EngineConfig(dtype=dtype), config, device)

    assert [chosen(1023), chosen(1024), chosen(4096, kernels=False)] == ["float32", "bfloat16", "float32"]
    assert [chosen(576, device="cuda"), chosen(576, dtype="bfloat16")] == ["bfloat16"] * 2
