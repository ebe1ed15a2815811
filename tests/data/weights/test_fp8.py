"""Weights in FP8: rounded while loading or as published, they are the same numbers in FP8 and in a model's dtype;
broken checkpoints are refused with the right words; the plan counts their bytes exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from quire.budget import plan_memory
from quire.build import build
from quire.config import EngineConfig
from quire.data.layers.linear import Linear
from quire.data.models import read_spec
from quire.data.models.quantization import MADE, fp8_of
from quire.data.weights import fp8
from quire.data.weights.checkpoint import read_config
from quire.data.weights.dummy import fill_dummy
from quire.data.weights.loader import load
from quire.errors import StartupError
from quire.vocabulary.params import SamplingParams

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
LLAMA = {
    "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48,
    "intermediate_size": 272, "vocab_size": 97, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "tie_word_embeddings": True},
    "gemma2": {**LLAMA, "sliding_window": 5, "tie_word_embeddings": True},
    "opt": {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": 97,
            "max_position_embeddings": 64, "word_embed_proj_dim": 96},
    "gpt2": {"n_embd": 96, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 64},
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FBGEMM = {"quant_method": "fbgemm_fp8"}
Tensors = dict[str, Tensor]
Q = "model.layers.1.self_attn.q_proj.weight"


def compressed(strategy: str, *ignore: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    weights |= {"block_structure": [128, 128]} if strategy == "block" else {}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group},
            "ignore": list(ignore)}  # fmt: skip


def save(folder: Path, family: str = "llama", **more: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SMALL[family], **more})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.15
    model.save_pretrained(folder)
    return model


def blown_up(scale: Tensor, shape: torch.Size) -> Tensor:
    """Scales of blocks of 128 x 128, of rows, or of the whole, for every number."""
    if scale.dim() == 2 and scale.shape != (shape[0], 1):
        scale = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    return scale.expand(shape)


def publish(folder: Path, said: dict[str, Any], kind: str, quantise: Callable[[str], bool] | None = None) -> Tensors:
    """Make the checkpoint in `folder` one in FP8, its scales random, and return what its weights stand for. `kind`:
    "block", "channel", "row" (without a second dimension) or "tensor"."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    stored, meant = Tensors(), Tensors()
    for name, weight in load_file(path).items():
        meant[name] = stored[name] = weight.clone()
        if not (quantise(name) if quantise else "_proj.weight" in name):
            continue
        rows, depth = weight.shape
        shape = {"block": (-(-rows // 128), -(-depth // 128)), "channel": (rows, 1), "row": (rows,), "tensor": ()}[kind]
        scale = torch.rand(shape) * 1e-3 + 1e-3
        stored[name] = (weight / blown_up(scale if kind != "row" else scale[:, None], weight.shape)).to(E4M3)
        meant[name] = stored[name].float() * blown_up(scale if kind != "row" else scale[:, None], weight.shape)
        stored[name + ("_scale_inv" if said["quant_method"] == "fp8" else "_scale")] = scale
        stored[name.removesuffix("weight") + "input_scale"] = torch.ones(())
    path.unlink()
    save_file(stored, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return meant


def loaded(folder: Path, in_fp8: bool = False, asked: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """Our model; its parameters begin as NaN, so that one that isn't filled shows."""
    config = read_config(folder)
    scheme = fp8_of(config, asked)
    assert scheme is not None
    model = fp8.in_fp8(config, dtype, CPU, scheme) if in_fp8 else fp8.made(config, dtype, CPU, scheme)
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(0xFF)
    for layer in in_fp8_of(model).values():
        layer.scale.fill_(torch.nan)
    load(model, folder, scheme=scheme)
    return model


def in_fp8_of(model: Any) -> dict[str, Any]:
    return {
        name: layer for name, layer in model.named_modules() if isinstance(layer, Linear) and layer.scale is not None
    }


def weights_of(model: Any) -> Tensors:
    """Every parameter, those in FP8 as what they stand for."""
    found = {name: parameter.data for name, parameter in model.named_parameters()}
    return found | {f"{name}.weight": fp8.scaled(layer.weight, layer.scale) for name, layer in in_fp8_of(model).items()}


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


KINDS = [
    (BLOCKS, "block"), (compressed("block", "lm_head"), "block"), (compressed("channel", "lm_head"), "channel"),
    (compressed("tensor", "lm_head"), "tensor"), (FBGEMM, "channel"), (FBGEMM, "row"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "kind"), KINDS)
def test_published_checkpoints(said: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """In FP8 and in the model's dtype alike, and transformers' model with the same weights has the same logits."""
    theirs = save(tmp_path)
    meant = publish(tmp_path, said, kind)
    plain, kept = loaded(tmp_path), loaded(tmp_path, in_fp8=True)
    assert len(in_fp8_of(kept)) == 8
    assert not in_fp8_of(plain)
    assert same(weights_of(plain), weights_of(kept))
    qkv = torch.cat([meant[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(plain.layers[1].attention.qkv.weight, qkv)
    theirs.load_state_dict(meant)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    settings = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", skip_tokenizer_init=True, kv_tokens=64)
    engine = build(settings).engine
    engine.add("a", tokens.tolist(), SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = []
    while engine.unfinished:
        for output in engine.step():
            found += [top.logprob for top in output.prompt_tops or ()]
    engine.close()
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)


def test_blocks_as_transformers_reads_them(tmp_path: Path) -> None:
    save(tmp_path, hidden_size=256, head_dim=64, intermediate_size=384, num_key_value_heads=4)
    publish(tmp_path, BLOCKS, "block")
    tensors, ours = load_file(tmp_path / "model.safetensors"), loaded(tmp_path)
    for theirs, where in (
        ("mlp.down_proj", ours.layers[0].mlp.down),
        ("self_attn.o_proj", ours.layers[0].attention.out),
    ):
        name = f"model.layers.0.{theirs}.weight"
        given = {"weight": [tensors[name]], "weight_scale_inv": [tensors[f"{name}_scale_inv"]]}
        assert torch.equal(where.weight, Fp8Dequantize(None).convert(given)["weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SMALL)
def test_rounding_while_loading(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """By rows, of the weights as the checkpoint has them; router, norms, embeddings and head are not rounded."""
    theirs = save(tmp_path, family)
    exact = loaded(tmp_path, False, "fp8", torch.float32)
    plain, kept = loaded(tmp_path, False, "fp8", dtype), loaded(tmp_path, True, "fp8", dtype)
    assert len(in_fp8_of(kept)) == 8
    found = weights_of(kept)
    assert same(weights_of(plain), {name: weight.to(dtype) for name, weight in found.items()})
    for name, layer in in_fp8_of(kept).items():
        assert layer.scale.shape == (1, sum(layer.parts))
        assert (layer.weight.float().abs().amax(1) == 448).all()
        largest = weights_of(exact)[f"{name}.weight"].abs().amax(1)
        torch.testing.assert_close(layer.scale[0] * 448, largest)
    if family == "llama":
        weight = theirs.model.layers[1].mlp.down_proj.weight.data
        scale = (weight.abs().amax(1, keepdim=True) / 448).float()
        want = (weight / scale).to(E4M3).float() * scale
        assert torch.equal(exact.layers[1].mlp.down.weight, want)
        assert 0.001 < ((want - weight).norm() / weight.norm()).item() < 0.05
        assert torch.equal(exact.head.weight, theirs.lm_head.weight)
        assert torch.equal(exact.embed.weight, theirs.model.embed_tokens.weight)


def test_a_cpu_multiplies_what_fp8_stands_for(tmp_path: Path) -> None:
    save(tmp_path)
    meant = publish(tmp_path, compressed("channel", "lm_head"), "channel")["model.layers.0.mlp.down_proj.weight"]
    x = torch.randn(5, 272)
    assert torch.equal(loaded(tmp_path).layers[0].mlp.down(x), x @ meant.T)


def test_what_is_kept_stays(tmp_path: Path) -> None:
    """A stacked weight of which a part isn't in FP8 is in the model's dtype as a whole, and so is the head, whatever
    the checkpoint has."""
    ignore = ("re:.*layers\\.0\\.self_attn\\.k_proj", "model.layers.1.mlp.down_proj")
    save(tmp_path)
    skipped = ("layers.0.self_attn.k_proj", "layers.1.mlp.down_proj", "norm", "embed")
    meant = publish(
        tmp_path, compressed("channel", *ignore), "channel", lambda name: not any(s in name for s in skipped)
    )
    plain, kept = loaded(tmp_path), loaded(tmp_path, in_fp8=True)
    assert set(in_fp8_of(kept)) == {
        "layers.0.attention.out", "layers.0.mlp.gate_up", "layers.0.mlp.down", "layers.1.attention.qkv",
        "layers.1.attention.out", "layers.1.mlp.gate_up",
    }  # fmt: skip
    assert same(weights_of(plain), weights_of(kept))
    assert torch.equal(kept.head.weight, meant["lm_head.weight"])
    assert not torch.equal(meant["lm_head.weight"], meant["lm_head.weight"].to(E4M3).float())
    qkv = torch.cat([meant[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(kept.layers[0].attention.qkv.weight, qkv)


def put(name: str, value: Any) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[name] = value(tensors[name]) if callable(value) else value

    return change


SCALE = f"{Q}_scale"


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("channel", lambda t: t.pop(SCALE), "lacks layers.1.self_attn.q_proj.weight_scale"),
        ("channel", lambda t: t.pop(Q), "lacks layers.1.self_attn.q_proj.weight"),
        (
            "channel",
            put(SCALE, lambda s: s.index_fill(0, torch.tensor([3]), -0.5)),
            "q_proj.weight_scale' .* scale -0.5",
        ),
        ("channel", put(SCALE, lambda s: s.index_fill(0, torch.tensor([3]), 0.0)), "has the scale 0"),
        ("channel", put(SCALE, lambda s: s.index_fill(0, torch.tensor([3]), torch.nan)), "has the scale nan"),
        ("channel", put(SCALE, lambda s: s.index_fill(0, torch.tensor([3]), torch.inf)), "has the scale inf"),
        ("tensor", put(SCALE, torch.tensor(-1.0)), "has the scale -1"),
        ("channel", put(SCALE, torch.ones(191, 1)), r"has shape \[191, 1\], for a weight \[192, 192\], as a whole"),
        ("block", put(SCALE, torch.ones(1, 2)), r"has shape \[1, 2\], for a weight \[192, 192\], in blocks"),
        ("block", put(SCALE, torch.ones(192, 1)), r"has shape \[192, 1\]"),
        ("channel", put(SCALE, torch.ones(192, 1, dtype=torch.int32)), "has dtype int32"),
        ("channel", put(Q, lambda w: w.float()), "q_proj.weight' .* has dtype float32"),
        ("channel", put(Q, lambda w: w.view(torch.uint8)), "has dtype uint8"),
        ("channel", put(Q, lambda w: w.float().to(torch.float8_e5m2)), "has dtype float8_e5m2"),
        ("channel", put(Q, lambda w: w[:, :64].clone()), r"has shape \[192, 64\]"),
        ("channel", put("lm_head.weight", lambda w: w.to(E4M3)), "lm_head.weight' .* has dtype float8_e4m3fn"),
        ("channel", put("lm_head.weight_scale", torch.ones(97, 1)), "which the model has no place for"),
        ("channel", put(f"{SCALE}_inv", torch.ones(192, 1)), "already loaded"),
        ("channel", put("model.layers.1.self_attn.q_proj.weight_zero_point", torch.ones(1)), "no place for"),
    ],
)
@pytest.mark.parametrize("in_fp8", [False, True])
def test_broken_checkpoints(
    kind: str, change: Callable[[Tensors], Any], words: str, in_fp8: bool, tmp_path: Path
) -> None:
    save(tmp_path)
    publish(tmp_path, compressed(kind, "lm_head"), kind)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path)
    with pytest.raises(StartupError, match=words) as failure:
        loaded(tmp_path, in_fp8)
    assert failure.value.remedy


def test_fp8_that_the_config_does_not_mention(tmp_path: Path) -> None:
    save(tmp_path)
    publish(tmp_path, FBGEMM, "channel")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items() if "scale" not in name}
    path.unlink()
    save_file(tensors, path)
    with pytest.raises(StartupError, match="has dtype float8_e4m3fn"):
        loaded(tmp_path, asked="fp8")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_rounded(value: float, tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[Q][5, 7] = value
    save_file(tensors, path)
    with pytest.raises(StartupError, match=r"q_proj.weight' .* isn't finite"):
        loaded(tmp_path, asked="fp8")


def test_rows_of_zeros() -> None:
    numbers, scale = fp8.rounded(torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [2.0, -0.5]]))
    assert (scale > 0).all()
    assert torch.equal(fp8.scaled(numbers, scale[None]), torch.tensor([[0.0, 0.0], [0.0, -0.0], [2.0, -0.5]]))


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("said", [None, BLOCKS, FBGEMM])
def test_the_plan_counts_every_byte(family: str, said: dict[str, Any] | None, tmp_path: Path) -> None:
    if family == "gpt2" and said is not None:
        pytest.skip("its checkpoints aren't published in FP8")
    save(tmp_path, family)
    config = {**read_config(tmp_path), "quantization_config": said}
    scheme, spec = fp8_of(config, "fp8"), read_spec(config)
    assert scheme is not None
    model = fp8.in_fp8(config, torch.bfloat16, CPU, scheme)
    real = sum(parameter.nbytes for parameter in model.parameters())
    real += sum(layer.scale.nbytes for layer in in_fp8_of(model).values())
    saved = fp8.saved_bytes(config, scheme, 2)
    plan = plan_memory(EngineConfig(kv_tokens=64), spec, family, "bfloat16", 2, "cpu", saved)
    assert plan.weights == real
    assert real < 0.8 * 2 * spec.parameters
    assert " and fewer bits" in plan.lines()[0]
    plain = plan_memory(EngineConfig(kv_tokens=64), spec, family, "bfloat16", 2, "cpu")
    assert plain.weights == 2 * spec.parameters
    assert "FP8" not in plain.lines()[0]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_dummy_weights_in_fp8(family: str, tmp_path: Path) -> None:
    """The same in FP8 and in the model's dtype; tied weights stay tied."""
    save(tmp_path, family)
    config = read_config(tmp_path)
    kept, plain = fp8.in_fp8(config, torch.float32, CPU, MADE), fp8.made(config, torch.float32, CPU, MADE)
    assert (kept.head.weight is kept.embed.weight) == (family == "gemma2")
    fill_dummy(kept, 3, MADE)
    fill_dummy(plain, 3, MADE)
    assert same(weights_of(kept), weights_of(plain))
    for layer in in_fp8_of(kept).values():
        weight = fp8.scaled(layer.weight, layer.scale)
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not torch.equal(weight[0], weight[1])


def test_a_cpu_computes_in_the_models_dtype() -> None:
    assert not fp8.native(torch.bfloat16, CPU)


@pytest.mark.parametrize(("capability", "native"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_that_multiply_fp8(capability: tuple[int, int], native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert fp8.native(torch.bfloat16, torch.device("cuda")) is native
    assert fp8.native(torch.float16, torch.device("cuda")) is native
    assert not fp8.native(torch.float32, torch.device("cuda"))
