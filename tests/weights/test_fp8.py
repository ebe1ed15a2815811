"""Weights in FP8: rounded while loading or as published, they are the same numbers in FP8 and in a model's dtype, of
models with experts and states too; broken checkpoints are refused with the right words; the plan counts their bytes
exactly."""

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
from test_grouped import logprobs
from test_loading import blank, put, rewrite, same
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.models.quantization import FP8_ON_LOAD, FP8Scheme, resolve_scheme
from quire.startup.memory_plan import plan_memory
from quire.weights import fp8
from quire.weights.checkpoint_files import read_config
from quire.weights.dummy import fill_dummy_weights
from quire.weights.loader import load_weights

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
LLAMA = {
    "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48,
    "intermediate_size": 272, "vocab_size": 97, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 144, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN_MOE = {**COMMON, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts": 3, "num_experts_per_tok": 2,
            "moe_intermediate_size": 80}  # fmt: skip
MIXED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**QWEN_MOE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    "qwen3_moe": {**QWEN_MOE, "head_dim": 48},
    "jamba": {**COMMON, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 48,
              "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts": 3, "attn_layer_period": 3,
              "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 16, "use_mamba_kernels": False},
    "mamba": {**COMMON, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 16, "use_bias": True},
    "falcon_mamba": {**COMMON, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 16},
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "tie_word_embeddings": True},
    "gemma2": {**LLAMA, "sliding_window": 5, "tie_word_embeddings": True},
    "gemma4_text": {
        **LLAMA, "global_head_dim": 96, "num_global_key_value_heads": 1, "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 5, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "final_logit_softcapping": 9.0, "tie_word_embeddings": True,
    },
    "opt": {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": 97,
            "max_position_embeddings": 64, "word_embed_proj_dim": 96},
    "gpt2": {"n_embd": 96, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 64},
    **MIXED,
}  # fmt: skip
IN_FP8 = {
    "jamba": {
        *(f"layers.{i}.mixer.{name}.weight" for i in (0, 2, 3) for name in ("in_proj", "out")),
        *(f"layers.1.attention.{name}.weight" for name in ("qkv", "out")),
        *(f"layers.{i}.experts.{name}.weight" for i in (1, 3) for name in ("gate_up", "down")),
        *(f"layers.{i}.mlp.{name}.weight" for i in (0, 2) for name in ("gate_up", "down")),
    },
    "qwen2_moe": {
        *(f"layers.{i}.attention.{name}.weight" for i in (0, 1) for name in ("qkv", "out")),
        *(f"layers.{part}.{name}.weight" for part in ("0.mlp", "1.experts", "1.experts.shared")
          for name in ("gate_up", "down")),
    },
    "qwen3_moe": {f"layers.{i}.{name}.weight" for i in (0, 1)
                  for name in ("attention.qkv", "attention.out", "experts.gate_up", "experts.down")},
    "llama": {f"layers.{i}.{name}.weight" for i in (0, 1)
              for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")},
    **{family: {f"layers.{i}.mixer.{name}.weight" for i in (0, 1) for name in ("in_proj", "out")}
       for family in ("mamba", "falcon_mamba")},
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FBGEMM = {"quant_method": "fbgemm_fp8"}
Tensors = dict[str, Tensor]
Q = "model.layers.1.self_attn.q_proj.weight"
ROUTER = r"\.(router|gate|shared_expert_gate)"
EXPERT = "model.layers.1.feed_forward.experts.2.up_proj.weight"


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
    for name, parameter in model.named_parameters():
        if family not in MIXED:
            parameter.data += torch.randn_like(parameter) * 0.15
        elif "A_log" not in name and not name.endswith(".D"):
            parameter.data.normal_(1.0 * ("norm" in name), 0.1)
    model.save_pretrained(folder)
    return model


def blown_up(scale: Tensor, shape: torch.Size) -> Tensor:
    """Scales of blocks of 128 x 128, of rows, or of the whole, for every number."""
    if scale.dim() == 2 and scale.shape != (shape[0], 1):
        scale = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    return scale.expand(shape)


def proj(name: str) -> bool:
    return "_proj.weight" in name


def is_router(name: str) -> bool:
    return re.search(rf"{ROUTER}\.weight$", name) is not None


def publish(folder: Path, said: dict[str, Any], kind: str, quantise: Callable[[str], bool] = proj) -> Tensors:
    """Make the checkpoint in `folder` one in FP8, its scales random, and return what its weights stand for. `kind`:
    "block", "channel", "row" (without a second dimension) or "tensor"."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    stored, meant = Tensors(), Tensors()
    for name, weight in load_file(path).items():
        meant[name] = stored[name] = weight.clone()
        if not quantise(name):
            continue
        rows, depth = weight.shape
        shape = {"block": (-(-rows // 128), -(-depth // 128)), "channel": (rows, 1), "row": (rows,), "tensor": ()}[kind]
        scale = torch.rand(shape) * 1e-3 + 1e-3
        every = blown_up(scale if kind != "row" else scale[:, None], weight.shape)
        stored[name] = (weight / every).to(E4M3)
        meant[name] = stored[name].float() * every
        stored[name + ("_scale_inv" if said["quant_method"] == "fp8" else "_scale")] = scale
        for unread in ("input_scale", "k_scale", "v_scale"):  # of activations, of keys and values
            stored[name.removesuffix("weight") + unread] = torch.ones(())
    path.unlink()
    save_file(stored, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return meant


def loaded(folder: Path, in_fp8: bool = False, asked: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """Our model."""
    config = read_config(folder)
    scheme = resolve_scheme(config, asked)
    assert isinstance(scheme, FP8Scheme)
    model = blank((fp8.create_fp8_model if in_fp8 else fp8.create_model)(config, dtype, CPU, scheme))
    for scale in scales_of(model).values():
        scale.fill_(torch.nan)
    load_weights(model, folder, scheme=scheme)
    return model


def scales_of(model: nn.Module) -> Tensors:
    """By the names of the weights that they are of."""
    found = {name: fp8.get_scale(model, name) for name, _ in model.named_parameters()}
    return {name: scale for name, scale in found.items() if scale is not None}


def weights_of(model: nn.Module) -> Tensors:
    """Every parameter, those in FP8 as what they stand for."""
    found, scales = {name: parameter.data for name, parameter in model.named_parameters()}, scales_of(model)
    return found | {name: fp8.dequantize(found[name], scale) for name, scale in scales.items()}


KINDS = [
    (BLOCKS, "block", False), (compressed("block", "lm_head"), "block", False),
    (compressed("channel", "lm_head"), "channel", False), (compressed("tensor", "lm_head"), "tensor", True),
    (FBGEMM, "channel", False), (FBGEMM, "row", True),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor", True),
]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", *MIXED])
@pytest.mark.parametrize(("said", "kind", "routers"), KINDS)
def test_published_checkpoints(said: dict[str, Any], kind: str, routers: bool, family: str, tmp_path: Path) -> None:
    """In FP8 and in the model's dtype alike; transformers' model with the same weights has the same logits. What stays
    in the model's dtype may be in FP8 in the checkpoint."""
    save(tmp_path, family)
    if not routers:
        names = "ignore" if said["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
        said = {**said, names: [*said.get(names, []), f"re:.*{ROUTER}$"]}
    plain_config = json.loads((tmp_path / "config.json").read_text())
    meant = publish(tmp_path, said, kind, lambda name: proj(name) or (routers and is_router(name)))
    plain, kept = loaded(tmp_path), loaded(tmp_path, in_fp8=True)
    assert set(scales_of(kept)) == IN_FP8[family]
    assert not scales_of(plain)
    assert same(weights_of(plain), weights_of(kept))
    if family == "llama":
        qkv = torch.cat([meant[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"])
        assert torch.equal(plain.layers[1].attention.qkv.weight, qkv)
    if family == "jamba":
        parts = [f"experts.{expert}.{x}_proj.weight" for expert in range(3) for x in ("gate", "up")]
        gate_up = torch.cat([meant[f"model.layers.1.feed_forward.{part}"] for part in parts])
        assert torch.equal(plain.layers[1].experts.gate_up.weight, gate_up)
        assert torch.equal(plain.layers[2].mixer.x_proj.weight, meant["model.layers.2.mamba.x_proj.weight"])
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
    torch.testing.assert_close(logprobs(tmp_path, tokens.tolist()), expected.double(), rtol=1e-4, atol=1e-4)


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


STAY = {
    "layers.1.experts.router.weight": "layers.1.feed_forward.router.weight",
    "embed_tokens.weight": "embed_tokens.weight",
    "head.weight": "lm_head.weight",
    **{f"layers.2.mixer.{ours}": f"layers.2.mamba.{theirs}" for ours, theirs in (
        ("x_proj.weight", "x_proj.weight"), ("dt_proj.weight", "dt_proj.weight"), ("dt_bias", "dt_proj.bias"),
        ("conv_weight", "conv1d.weight"), ("A_log", "A_log"), ("D", "D"),
    )},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SMALL)
def test_rounding_while_loading(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """By rows, those of each expert too, of the weights as the checkpoint has them; router, norms, embeddings, head and
    what decays the states are not rounded."""
    save(tmp_path, family)
    stored = {name.removeprefix("model."): weight for name, weight in load_file(tmp_path / "model.safetensors").items()}
    exact = weights_of(loaded(tmp_path, asked="fp8"))
    plain, kept = (loaded(tmp_path, in_fp8, "fp8", dtype) for in_fp8 in (False, True))
    found, wide = weights_of(kept), {name for name, p in kept.named_parameters() if p.dtype == torch.float32}
    assert set(scales_of(kept)) == IN_FP8[family] if family in IN_FP8 else len(scales_of(kept)) == 8
    assert same(weights_of(plain), {name: w.to(w.dtype if name in wide else dtype) for name, w in found.items()})
    for name, scale in scales_of(kept).items():
        numbers = kept.get_parameter(name)
        assert scale.shape == (1, len(numbers))
        assert (numbers.float().abs().amax(1) == 448).all()
        torch.testing.assert_close(scale[0] * 448, exact[name].abs().amax(1))
    if family == "llama":
        weight = stored["layers.1.mlp.down_proj.weight"]
        scale = (weight.abs().amax(1, keepdim=True) / 448).float()
        want = (weight / scale).to(E4M3).float() * scale
        assert torch.equal(exact["layers.1.mlp.down.weight"], want)
        assert 0.001 < ((want - weight).norm() / weight.norm()).item() < 0.05
        assert torch.equal(exact["head.weight"], stored["lm_head.weight"])
        assert torch.equal(exact["embed_tokens.weight"], stored["embed_tokens.weight"])
    if family == "jamba":
        for ours, theirs in STAY.items():
            assert torch.equal(found[ours], stored[theirs].to(found[ours].dtype))
        for expert in range(3):
            numbers, scale = fp8.quantize(stored[f"layers.3.feed_forward.experts.{expert}.down_proj.weight"])
            rows = slice(expert * 144, (expert + 1) * 144)
            assert torch.equal(found["layers.3.experts.down.weight"][rows], numbers.float() * scale[:, None])


QK = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("family", "ignore", "plain", "left"),
    [
        ("llama", ["re:.*layers\\.0\\.self_attn\\.k_proj", "model.layers.1.mlp.down_proj"],
         [QK, "model.layers.1.mlp.down_proj.weight"], {"layers.0.attention.qkv.weight", "layers.1.mlp.down.weight"}),
        ("jamba", ["lm_head", EXPERT.removesuffix(".weight"), "re:.*router"], [EXPERT],
         {"layers.1.experts.gate_up.weight"}),
    ],
)  # fmt: skip
def test_what_is_kept_stays(family: str, ignore: list[str], plain: list[str], left: set[str], tmp_path: Path) -> None:
    """A stacked weight of which a part isn't in FP8, and all experts of a layer of which one isn't, are in the model's
    dtype as a whole; and so is the head, whatever the checkpoint has."""
    save(tmp_path, family)
    head = family == "llama"
    published = publish(
        tmp_path, compressed("channel", *ignore), "channel",
        lambda name: name not in plain and (proj(name) or (head and name == "lm_head.weight")),
    )  # fmt: skip
    wide, kept = loaded(tmp_path), loaded(tmp_path, in_fp8=True)
    assert set(scales_of(kept)) == IN_FP8[family] - left
    assert same(weights_of(wide), weights_of(kept))
    if head:
        assert torch.equal(kept.head.weight, published["lm_head.weight"])
        assert not torch.equal(published["lm_head.weight"], published["lm_head.weight"].to(E4M3).float())
        qkv = torch.cat([published[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
        assert torch.equal(kept.layers[0].attention.qkv.weight, qkv)
    else:
        assert torch.equal(kept.layers[1].experts.gate_up.weight[-176:], published[EXPERT])


SCALE = f"{Q}_scale"


def one_scale(value: float) -> Callable[[Tensors], Any]:
    return put(SCALE, lambda s: s.index_fill(0, torch.tensor([3]), value))


BROKEN: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("channel", lambda t: t.pop(SCALE), "lacks layers.1.self_attn.q_proj.weight_scale"),
    ("channel", lambda t: t.pop(Q), "lacks layers.1.self_attn.q_proj.weight"),
    ("channel", one_scale(-0.5), "q_proj.weight_scale' .* scale -0.5"),
    ("channel", one_scale(0.0), "has the scale 0"),
    ("channel", one_scale(torch.nan), "has the scale nan"),
    ("channel", put(SCALE, torch.ones(191, 1)), r"has shape \[191, 1\], for a weight \[192, 192\], as a whole"),
    ("block", put(SCALE, torch.ones(1, 2)), r"has shape \[1, 2\], for a weight \[192, 192\], in blocks"),
    ("channel", put(SCALE, torch.ones(192, 1, dtype=torch.int32)), "has dtype int32"),
    ("channel", put(Q, lambda w: w.float()), "q_proj.weight' .* has dtype float32"),
    ("channel", put(Q, lambda w: w.float().to(torch.float8_e5m2)), "has dtype float8_e5m2"),
    ("channel", put("lm_head.weight", lambda w: w.to(E4M3)), "lm_head.weight' .* has dtype float8_e4m3fn"),
    ("channel", put("lm_head.weight_scale", torch.ones(97, 1)), "which the model has no place for"),
    ("channel", put(f"{SCALE}_inv", torch.ones(192, 1)), "already loaded"),
]
BROKEN_MIXED: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("channel", lambda t: t.pop(f"{EXPERT}_scale"), "lacks layers.1.feed_forward.experts.2.up_proj.weight_scale"),
    ("channel", put(f"{EXPERT}_scale", lambda s: -s), r"experts.2.up_proj.weight_scale' .* scale -"),
    ("channel", put(f"{EXPERT}_scale", torch.ones(175, 1)), r"shape \[175, 1\], for a weight \[176, 144\]"),
]


@pytest.mark.parametrize(
    ("family", "kind", "change", "words"),
    [("llama", *row) for row in BROKEN] + [("jamba", *row) for row in BROKEN_MIXED],
)
@pytest.mark.parametrize("in_fp8", [False, True])
def test_broken_checkpoints(
    family: str, kind: str, change: Callable[[Tensors], Any], words: str, in_fp8: bool, tmp_path: Path
) -> None:
    save(tmp_path, family)
    publish(tmp_path, compressed(kind, "lm_head", "re:.*router"), kind)
    rewrite(tmp_path, change)
    with pytest.raises(StartupError, match=words) as failure:
        loaded(tmp_path, in_fp8)
    assert failure.value.remedy


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_rounded(value: float, tmp_path: Path) -> None:
    save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors[Q][5, 7:8].fill_(value))
    with pytest.raises(StartupError, match=r"q_proj.weight' .* isn't finite"):
        loaded(tmp_path, asked="fp8")


def test_rows_of_zeros() -> None:
    numbers, scale = fp8.quantize(torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [2.0, -0.5]]))
    assert (scale > 0).all()
    assert torch.equal(fp8.dequantize(numbers, scale[None]), torch.tensor([[0.0, 0.0], [0.0, -0.0], [2.0, -0.5]]))


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("said", [None, BLOCKS, FBGEMM])
def test_the_plan_counts_every_byte(family: str, said: dict[str, Any] | None, tmp_path: Path) -> None:
    """Also those that are in float32 whatever the dtype."""
    if family == "gpt2" and said is not None:
        pytest.skip("its checkpoints aren't published in FP8")
    save(tmp_path, family)
    config = {**read_config(tmp_path), "quantization_config": said}
    scheme, spec = resolve_scheme(config, "fp8"), read_spec(config)
    assert isinstance(scheme, FP8Scheme)
    for itemsize, dtype in ((2, torch.bfloat16), (4, torch.float32)):
        model = fp8.create_fp8_model(config, dtype, CPU, scheme)
        real = sum(weight.nbytes for weight in (*model.parameters(), *scales_of(model).values()))
        full = fp8.create_model({**config, "quantization_config": None}, dtype, CPU, None)
        saved, whole = fp8.saved_bytes(config, scheme, itemsize), sum(weight.nbytes for weight in full.parameters())
        plan, plain = (
            plan_memory(EngineConfig(kv_tokens=64), spec, family, str(dtype), itemsize, "cpu", less)
            for less in (saved, 0)
        )
        assert (plan.weight_bytes, plain.weight_bytes) == (real, whole)
        assert real < 0.8 * whole
        assert " and fewer bits" in plan.to_lines()[0]
        assert " and fewer bits" not in plain.to_lines()[0]


def test_jamba_fits_in_half() -> None:
    config = named_config("jamba-52b")
    spec = read_spec(config)
    planned = spec.weight_bytes(2) - fp8.saved_bytes(config, FP8_ON_LOAD, 2)
    assert spec.weight_bytes(2) > 103e9
    assert 52e9 < planned < 53e9


@pytest.mark.parametrize("family", ["llama", "gemma2", *MIXED])
def test_dummy_weights_in_fp8(family: str, tmp_path: Path) -> None:
    """The same in FP8 and in the model's dtype; tied weights stay tied."""
    save(tmp_path, family)
    config = read_config(tmp_path)
    kept, plain = (
        fp8.create_fp8_model(config, torch.float32, CPU, FP8_ON_LOAD),
        fp8.create_model(config, torch.float32, CPU, FP8_ON_LOAD),
    )
    assert (kept.head.weight is kept.embed_tokens.weight) == (family == "gemma2")
    fill_dummy_weights(kept, 3, FP8_ON_LOAD)
    fill_dummy_weights(plain, 3, FP8_ON_LOAD)
    assert same(weights_of(kept), weights_of(plain))
    for name in scales_of(kept):
        weight = weights_of(kept)[name]
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not torch.equal(weight[0], weight[1])


@pytest.mark.parametrize(("capability", "native"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_that_multiply_fp8(capability: tuple[int, int], native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert fp8.has_fp8_matmul(torch.bfloat16, torch.device("cuda")) is native
    assert fp8.has_fp8_matmul(torch.float16, torch.device("cuda")) is native
    assert not fp8.has_fp8_matmul(torch.float32, torch.device("cuda"))
