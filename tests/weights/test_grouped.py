"""Checkpoints by AWQ and GPTQ: packed here by their formulas, number by number, they are read without loss; broken ones
are refused with the right words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_loading import blank, put, rewrite
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.models.quantization import LowBitScheme, resolve_scheme
from quire.protocol.parallel_layout import UNSHARDED, Shard
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import build
from quire.weights.checkpoint_files import read_config
from quire.weights.loader import load_weights
from quire.weights.low_bit import create_model

LLAMA = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "vocab_size": 97, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
Q = "model.layers.1.self_attn.q_proj"
Tensors = dict[str, Tensor]


def word(numbers: list[int], bits: int) -> int:
    """These numbers side by side in 32 bits, the first one in the lowest, as a signed integer."""
    found = sum(number << (bits * i) for i, number in enumerate(numbers))
    return found - (1 << 32) if found >= 1 << 31 else found


def packed(said: dict[str, Any], rows: int, columns: int) -> tuple[Tensors, Tensor]:
    """The tensors of a random weight [rows, columns], and the weight in fp64."""
    bits, group = said["bits"], said["group_size"]
    per, groups = 32 // bits, columns // group
    numbers = torch.randint(0, 1 << bits, (columns, rows))
    zeros = torch.randint(1, 1 << bits, (groups, rows))
    scales = (torch.rand(groups, rows) * 0.01 + 0.005).half()
    order = torch.arange(columns) // group
    if said.get("desc_act"):
        order = order[torch.randperm(columns)]
    meant = (numbers - zeros[order]).double() * scales[order].double()
    if said["quant_method"] == "awq":
        lanes = [0, 2, 4, 6, 1, 3, 5, 7]

        def across(table: Tensor) -> Tensor:
            return torch.tensor(
                [[word([int(row[i + lane]) for lane in lanes], 4) for i in range(0, rows, 8)] for row in table]
            )

        stored = {"qweight": across(numbers).int(), "qzeros": across(zeros).int(), "scales": scales}
        return stored, meant.T
    less = zeros if said.get("checkpoint_format") == "gptq_v2" else zeros - 1
    down = [[word(numbers[k : k + per, n].tolist(), bits) for n in range(rows)] for k in range(0, columns, per)]
    across_ = [[word(row[i : i + per].tolist(), bits) for i in range(0, rows, per)] for row in less]
    stored = {"qweight": torch.tensor(down).int(), "qzeros": torch.tensor(across_).int(), "scales": scales}
    return {**stored, "g_idx": order.int()}, meant.T


def publish(folder: Path, said: dict[str, Any]) -> transformers.PreTrainedModel:
    """A checkpoint in `folder`, and transformers' model of what it stands for."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **LLAMA)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    model.save_pretrained(folder)
    for name, meant in repack(folder, said, "_proj.weight").items():
        model.get_parameter(name).data.copy_(meant)
    return model


def repack(folder: Path, said: dict[str, Any], called: str) -> Tensors:
    """The checkpoint in `folder` with random weights in few bits where a name has `called` in it, and these in fp64."""
    path, stored, whole = folder / "model.safetensors", Tensors(), Tensors()
    for name, weight in load_file(path).items():
        stored[name] = weight.float()
        if re.search(called, name):
            del stored[name]
            tensors, whole[name] = packed(said, *weight.shape)
            stored |= {f"{name.removesuffix('weight')}{kind}": tensor for kind, tensor in tensors.items()}
    path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path, metadata={"format": "pt"})
    plain = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**plain, "dtype": "float16", "quantization_config": said}))
    return whole


def logprobs(folder: Path | str, tokens: list[int], **more: Any) -> Tensor:
    """What an engine of the model in `folder` says of a prompt."""
    settings = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "kv_tokens": 64, **more}
    engine = build(EngineConfig(model=str(folder), **settings)).engine
    engine.add("a", tokens, SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = []
    while engine.has_unfinished_requests:
        for output in engine.step():
            found += [top.logprob for top in output.prompt_logprobs or ()]
    engine.close()
    return torch.tensor(found, dtype=torch.float64)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("linear", "low_bit_linear"):
        monkeypatch.setattr(f"quire.kernels.cpu.{module}.library", lambda: None)


SAID = [
    AWQ, {**AWQ, "group_size": 128}, {**AWQ, "group_size": 32}, GPTQ, {**GPTQ, "bits": 8}, {**GPTQ, "group_size": 128},
    {**GPTQ, "desc_act": True}, {**GPTQ, "checkpoint_format": "gptq_v2"},
]  # fmt: skip


@pytest.mark.share(6)
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("said", SAID, ids=str)
def test_published_checkpoints(
    said: dict[str, Any], kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In few bits, or in the model's dtype where there are no kernels for them, the logits are transformers'."""
    if not kernels:
        without_kernels(monkeypatch)
    theirs = publish(tmp_path, said)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    found = logprobs(tmp_path, tokens.tolist())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    rounded = logprobs(tmp_path, tokens.tolist(), dtype="bfloat16")
    assert (rounded - expected).abs().max() < 0.2


def loaded(folder: Path, dtype: torch.dtype = torch.float32, part: Shard = UNSHARDED) -> Any:
    """Our model, or a rank's."""
    config = read_config(folder)
    scheme = resolve_scheme(config, None)
    assert isinstance(scheme, LowBitScheme)
    model = blank(create_model(config, dtype, torch.device("cpu"), scheme, shard=part))
    model.read_bytes = load_weights(model, folder, scheme=scheme).read_bytes
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{Q}.scales"), "lacks layers.1.self_attn.q_proj.scales"),
        (lambda t: t.pop(f"{Q}.qweight"), "lacks layers.1.self_attn.q_proj.qweight"),
        (put(f"{Q}.scales", lambda s: s.index_fill(0, torch.tensor([1]), torch.nan)), "q_proj.scales' .* isn't a fin"),
        (put(f"{Q}.scales", torch.ones(3, 128).half()), r"has shape \[3, 128\], but config.json makes it \[4, 128\]"),
        (put(f"{Q}.qweight", torch.zeros(16, 127).int()), r"has shape \[16, 127\]"),
        (put(f"{Q}.qzeros", torch.zeros(4, 16)), "qzeros' .* has dtype float32"),
        (put(f"{Q}.g_idx", torch.full((128,), 4).int()), "names a group that isn't there"),
        (put(f"{Q}.g_idx", torch.zeros(128).int()), "groups out of order"),
        (put("lm_head.qweight", torch.zeros(16, 97).int()), "no place for"),
    ],
)  # fmt: skip
def test_broken_checkpoints(change: Callable[[Tensors], Any], words: str, tmp_path: Path) -> None:
    publish(tmp_path, GPTQ)
    rewrite(tmp_path, change)
    with pytest.raises(StartupError, match=words) as failure:
        loaded(tmp_path)
    assert failure.value.remedy


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({**AWQ, "bits": 3}, "bits .* is 3"),
        ({**AWQ, "version": "gemv"}, "the version 'gemv'"),
        ({**AWQ, "group_size": 48}, "group_size .* is 48"),
        ({**GPTQ, "group_size": -1}, "group_size .* is -1"),
        ({**GPTQ, "lm_head": True}, "lm_head"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, "dynamic"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "'marlin'"),
    ],
)
def test_what_is_not_supported(said: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words) as failure:
        resolve_scheme({"quantization_config": said}, None)
    assert failure.value.remedy


def test_groups_that_do_not_divide(tmp_path: Path) -> None:
    publish(tmp_path, {**AWQ, "group_size": 128})
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "intermediate_size": 192}))
    with pytest.raises(StartupError, match=r"groups of 128 columns .* don't divide"):
        loaded(tmp_path)
