"""Weights in FP8 of models with experts and states: rounded while loading or as published, they are the same numbers in
FP8 and in a model's dtype; the plan counts their bytes exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_fp8 import BLOCKS, CPU, E4M3, FBGEMM, Tensors, compressed, publish, same
from torch import Tensor, nn

from quire.budget import plan_memory
from quire.build import build
from quire.config import EngineConfig
from quire.data.layers.mamba import Mamba
from quire.data.models import read_spec
from quire.data.models.configs import named_config
from quire.data.models.quantization import MADE, fp8_of
from quire.data.weights import fp8
from quire.data.weights.checkpoint import read_config
from quire.data.weights.dummy import fill_dummy
from quire.data.weights.loader import load
from quire.errors import StartupError
from quire.vocabulary.params import SamplingParams

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 144, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "jamba": {**COMMON, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 48,
              "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts": 3, "attn_layer_period": 3,
              "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 16, "use_mamba_kernels": False},
    "mamba": {**COMMON, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 16, "use_bias": True},
    "falcon_mamba": {**COMMON, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 16},
}  # fmt: skip
EXPERT = "model.layers.1.feed_forward.experts.2.up_proj.weight"


def save(folder: Path, family: str = "jamba") -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SMALL[family])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        if "A_log" not in name and not name.endswith(".D"):
            parameter.data.normal_(1.0 * ("norm" in name), 0.1)
    model.save_pretrained(folder)


def loaded(folder: Path, in_fp8: bool, asked: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """Our model; its parameters begin as NaN, so that one that isn't filled shows."""
    config = read_config(folder)
    scheme = fp8_of(config, asked)
    assert scheme is not None
    model = fp8.in_fp8(config, dtype, CPU, scheme) if in_fp8 else fp8.made(config, dtype, CPU, scheme)
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(0xFF)
    for scale in scales_of(model).values():
        scale.fill_(torch.nan)
    load(model, folder, scheme=scheme)
    return model


def scales_of(model: nn.Module) -> Tensors:
    """By the names of the weights that they are of."""
    found = {name: fp8.scale_of(model, name) for name, _ in model.named_parameters()}
    return {name: scale for name, scale in found.items() if scale is not None}


def weights_of(model: nn.Module) -> Tensors:
    """Every parameter, those in FP8 as what they stand for."""
    found, scales = {name: parameter.data for name, parameter in model.named_parameters()}, scales_of(model)
    return found | {name: fp8.scaled(found[name], scale) for name, scale in scales.items()}


IN_FP8 = {
    "jamba": {
        *(f"layers.{i}.mamba.{name}.weight" for i in (0, 2, 3) for name in ("into", "out")),
        *(f"layers.1.attention.{name}.weight" for name in ("qkv", "out")),
        *(f"layers.{i}.experts.{name}" for i in (1, 3) for name in ("gate_up", "down")),
        *(f"layers.{i}.mlp.{name}.weight" for i in (0, 2) for name in ("gate_up", "down")),
    },
    **{family: {f"layers.{i}.mixer.{name}.weight" for i in (0, 1) for name in ("into", "out")}
       for family in ("mamba", "falcon_mamba")},
}  # fmt: skip
STAY = {
    "layers.1.experts.router.weight": "layers.1.feed_forward.router.weight", "embed.weight": "embed_tokens.weight",
    "head.weight": "lm_head.weight",
    **{f"layers.2.mamba.{ours}": f"layers.2.mamba.{theirs}" for ours, theirs in (
        ("parts.weight", "x_proj.weight"), ("dt.weight", "dt_proj.weight"), ("dt_bias", "dt_proj.bias"),
        ("conv_weight", "conv1d.weight"), ("decay_log", "A_log"), ("skip", "D"),
    )},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SMALL)
def test_rounding_while_loading(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """By rows, those of each expert too; what decays the states is not rounded."""
    save(tmp_path, family)
    stored = {name.removeprefix("model."): weight for name, weight in load_file(tmp_path / "model.safetensors").items()}
    plain, kept = (loaded(tmp_path, in_fp8, "fp8", dtype) for in_fp8 in (False, True))
    found, wide = weights_of(kept), {name for name, p in kept.named_parameters() if p.dtype == torch.float32}
    assert set(scales_of(kept)) == IN_FP8[family]
    assert same(weights_of(plain), {name: w.to(w.dtype if name in wide else dtype) for name, w in found.items()})
    if family == "jamba":
        for ours, theirs in STAY.items():
            weight = found[ours]
            assert torch.equal(weight, stored[theirs].to(weight.dtype))
        for expert in range(3):
            numbers, scale = fp8.rounded(stored[f"layers.3.feed_forward.experts.{expert}.down_proj.weight"])
            rows = slice(expert * 144, (expert + 1) * 144)
            assert torch.equal(found["layers.3.experts.down"][rows], numbers.float() * scale[:, None])


def proj(name: str) -> bool:
    return "_proj.weight" in name


def proj_and_router(name: str) -> bool:
    return proj(name) or "router" in name


KINDS = [
    (BLOCKS, "block", proj), (compressed("block", "lm_head"), "block", proj),
    (compressed("channel", "lm_head", "re:.*router"), "channel", proj),
    (compressed("tensor", "lm_head"), "tensor", proj_and_router), (FBGEMM, "row", proj_and_router),
    ({"quant_method": "fp8"}, "tensor", proj_and_router),
]  # fmt: skip


def said_of(said: dict[str, Any], quantise: Callable[[str], bool]) -> dict[str, Any]:
    """What a checkpoint whose router isn't in FP8 has to say of it."""
    names = {"fp8": "modules_to_not_convert", "compressed-tensors": "ignore", "fbgemm_fp8": "modules_to_not_convert"}
    more = [] if quantise is proj_and_router else ["re:.*router"]
    name = names[said["quant_method"]]
    return {**said, name: [*said.get(name, []), *more]}


@pytest.mark.share(6)
@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize(("said", "kind", "quantise"), KINDS)
def test_published_checkpoints(
    said: dict[str, Any], kind: str, quantise: Callable[[str], bool], family: str, tmp_path: Path
) -> None:
    """In FP8 and in the model's dtype alike; transformers' model with the same weights has the same logits. What stays
    in the model's dtype may be in FP8 in the checkpoint."""
    save(tmp_path, family)
    said = said_of(said, quantise)
    plain_config = json.loads((tmp_path / "config.json").read_text())
    meant = publish(tmp_path, said, kind, quantise)
    plain, kept = loaded(tmp_path, False), loaded(tmp_path, True)
    assert set(scales_of(kept)) == IN_FP8[family]
    assert same(weights_of(plain), weights_of(kept))
    if family == "jamba":
        parts = [f"experts.{expert}.{x}_proj.weight" for expert in range(3) for x in ("gate", "up")]
        gate_up = torch.cat([meant[f"model.layers.1.feed_forward.{part}"] for part in parts])
        assert torch.equal(plain.layers[1].experts.gate_up, gate_up)
        assert torch.equal(plain.layers[2].mamba.parts.weight, meant["model.layers.2.mamba.x_proj.weight"])
    other = tmp_path / "meant"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(plain_config))
    save_file(meant, other / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = theirs(tokens[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    assert expected.std() > 0.1
    torch.testing.assert_close(said_by_engine(tmp_path, tokens), expected, rtol=1e-4, atol=1e-4)


def said_by_engine(folder: Path, tokens: Tensor) -> Tensor:
    settings = EngineConfig(model=str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True, kv_tokens=64)
    engine = build(settings).engine
    engine.add("a", tokens.tolist(), SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = []
    while engine.unfinished:
        for output in engine.step():
            found += [top.logprob for top in output.prompt_tops or ()]
    engine.close()
    return torch.tensor(found)


def test_an_expert_that_is_kept_keeps_the_others_of_its_layer(tmp_path: Path) -> None:
    save(tmp_path)
    said = compressed("channel", "lm_head", EXPERT.removesuffix(".weight"), "re:.*router")
    meant = publish(tmp_path, said, "channel", lambda name: proj(name) and name != EXPERT)
    plain, kept = loaded(tmp_path, False), loaded(tmp_path, True)
    assert set(scales_of(kept)) == IN_FP8["jamba"] - {"layers.1.experts.gate_up"}
    assert same(weights_of(plain), weights_of(kept))
    assert torch.equal(kept.layers[1].experts.gate_up[-176:], meant[EXPERT])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{EXPERT}_scale"), "lacks layers.1.feed_forward.experts.2.up_proj.weight_scale"),
        (lambda t: t.update({f"{EXPERT}_scale": -t[f"{EXPERT}_scale"]}), r"experts.2.up_proj.weight_scale' .* scale -"),
        (lambda t: t.update({f"{EXPERT}_scale": torch.ones(175, 1)}), r"shape \[175, 1\], for a weight \[176, 144\]"),
        (lambda t: t.update({EXPERT: t[EXPERT].float()}), "experts.2.up_proj.weight' .* has dtype float32"),
        (lambda t: t.update({"model.layers.0.mamba.A_log_scale": torch.ones(1)}), "has no place for"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_fp8", [False, True])
def test_broken_checkpoints(change: Callable[[Tensors], Any], words: str, in_fp8: bool, tmp_path: Path) -> None:
    save(tmp_path)
    publish(tmp_path, compressed("channel", "lm_head", "re:.*router"), "channel", proj)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path)
    with pytest.raises(StartupError, match=words) as failure:
        loaded(tmp_path, in_fp8)
    assert failure.value.remedy


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("said", [None, BLOCKS, FBGEMM])
def test_the_plan_counts_every_byte(family: str, said: dict[str, Any] | None, tmp_path: Path) -> None:
    """Also those that are in float32 whatever the dtype."""
    save(tmp_path, family)
    config = {**read_config(tmp_path), "quantization_config": said}
    scheme, spec = fp8_of(config, "fp8"), read_spec(config)
    assert scheme is not None
    for itemsize, dtype in ((2, "bfloat16"), (4, "float32")):
        model = fp8.in_fp8(config, getattr(torch, dtype), CPU, scheme)
        real = sum(parameter.nbytes for parameter in model.parameters())
        real += sum(scale.nbytes for scale in scales_of(model).values())
        saved = fp8.saved_bytes(config, scheme, itemsize)
        plan = plan_memory(EngineConfig(kv_tokens=64), spec, family, dtype, itemsize, "cpu", saved)
        assert plan.weights == real
        plain = plan_memory(EngineConfig(kv_tokens=64), spec, family, dtype, itemsize, "cpu").weights
        full = fp8.made({**config, "quantization_config": None}, getattr(torch, dtype), CPU, None)
        assert plain == sum(parameter.nbytes for parameter in full.parameters())
        assert plan.weights < 0.8 * plain


def test_jamba_fits_in_half() -> None:
    config = named_config("jamba-52b")
    spec = read_spec(config)
    planned = spec.weight_bytes(2) - fp8.saved_bytes(config, MADE, 2)
    assert spec.weight_bytes(2) > 103e9
    assert 52e9 < planned < 53e9
    model = fp8.resolve(config)(config, torch.bfloat16, torch.device("meta"))
    left = {name for name, _ in model.named_parameters()} - {
        f"{next(path for path, module in model.named_modules() if module is layer)}.{name}"
        for layer, name, _ in fp8.weights(model, MADE)
    }
    assert not any("gate_up" in name or "down" in name or "into" in name for name in left)


@pytest.mark.parametrize("family", SMALL)
def test_dummy_weights_in_fp8(family: str, tmp_path: Path) -> None:
    """The same in FP8 and in the model's dtype; once prepared, what has no weight has ones."""
    save(tmp_path, family)
    config = read_config(tmp_path)
    kept, plain = fp8.in_fp8(config, torch.float32, CPU, MADE), fp8.made(config, torch.float32, CPU, MADE)
    fill_dummy(kept, 3, MADE)
    fill_dummy(plain, 3, MADE)
    assert same(weights_of(kept), weights_of(plain))
    for name, scale in scales_of(kept).items():
        weight = fp8.scaled(kept.get_parameter(name), scale)
        assert weight.dtype != E4M3
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    mixers = [module for module in kept.modules() if isinstance(module, Mamba)]
    for mixer in mixers:
        mixer.prepare()
        assert all(torch.equal(norm.weight, torch.ones(norm.shape)) for norm in mixer.norms)
    assert [len(mixer.norms) for mixer in mixers] == [0 if family == "mamba" else 3] * len(mixers)
