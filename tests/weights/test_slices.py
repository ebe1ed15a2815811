"""What one rank reads of a checkpoint, counted at the file, and what it has of dummy weights: those of the undivided
model, bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import test_fp8
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_fp8 import BLOCKS, compressed
from test_loading import blank
from thread_ranks import Meeting, ThreadExchange
from torch import Tensor

from quire.errors import StartupError
from quire.layers.linear import Linear
from quire.models import read_spec, resolve_model_class
from quire.models.named_configs import named_config
from quire.models.quantization import FP8_ON_LOAD, SCHEMES_ON_LOAD, FP8Scheme, LowBitScheme, resolve_scheme
from quire.models.weight_names import WeightSource
from quire.protocol.parallel_layout import UNSHARDED, ParallelLayout, Shard
from quire.weights import dummy, fp8, loader, low_bit
from quire.weights.checkpoint_files import read_config
from quire.weights.dummy import fill_dummy_weights
from quire.weights.fp8 import scale_attributes
from quire.weights.gguf_config import to_hf_config
from quire.weights.gguf_file import GGUFFile, read_gguf
from quire.weights.gguf_loader import load_gguf
from quire.weights.loader import LoadedFiles, load_weights
from quire.weights.tensor_slices import parameter_shards

CPU = torch.device("cpu")
KEYS = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 176, "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
OPT = {**KEYS, "ffn_dim": 176, "word_embed_proj_dim": 64}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64, "n_inner": 176, "vocab_size": 512}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**named_config("llama-125m"), **KEYS},
    "llama, copied heads": {**named_config("llama-125m"), **KEYS, "num_key_value_heads": 2},
    "llama, shared keys": {**named_config("llama-125m"), **KEYS, "kv_sharing": [None, 0]},
    "llama, padded": {**named_config("llama-125m"), **KEYS, "vocab_size": 331},
    "qwen2, tied": {**named_config("qwen2-7b"), **KEYS, "tie_word_embeddings": True},
    "phi3": {**named_config("llama-125m"), **KEYS, "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0},
    "gemma2": {**named_config("gemma-2-2b"), **KEYS, "head_dim": 16},
    "gemma4": {
        **named_config("gemma-4-26b-a4b"), **KEYS, "head_dim": 16, "global_head_dim": 32, "num_experts": 4,
        "num_global_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"], "top_k_experts": 2,
        "moe_intermediate_size": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512,
    },
    "opt": {**named_config("opt-125m"), **OPT},
    "gpt2": {**named_config("gpt2"), **GPT2},
    "jamba": {**named_config("jamba-52b"), **KEYS, "num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 3,
              "attn_layer_offset": 1, "mamba_proj_bias": True},
    "qwen2_moe": {**named_config("qwen3-30b-a3b"), **KEYS, "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
                  "mlp_only_layers": [1]},
    "lfm2": {**named_config("lfm2-1.2b"), **KEYS, "full_attn_idxs": [1], "conv_bias": True, "block_ff_dim": 264,
             "block_multiple_of": 16},
    "granite hybrid": {**named_config("granite-4-h-small"), **KEYS, "num_local_experts": 4, "num_experts_per_tok": 2,
                       "shared_intermediate_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
                       "layer_types": ["mamba", "attention"]},
    "nemotron_h": {**named_config("nemotron-h-8b"), **KEYS, "hybrid_override_pattern": "M*-", "mamba_num_heads": 8,
                   "mamba_head_dim": 4, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16, "use_bias": True},
    "mamba": {**named_config("mamba-2.8b"), "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 331},
    **{name: {**named_config("qwen3-next-80b-a3b"), **KEYS, "architectures": [architecture], "num_experts": 4,
              "full_attention_interval": 2, "head_dim": 16, "moe_intermediate_size": 32, "linear_num_key_heads": 8,
              "linear_num_value_heads": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
              "num_experts_per_tok": 2}
       for name, architecture in (("qwen3_next", "Qwen3NextForCausalLM"), ("qwen3_5", "Qwen3_5ForCausalLM"))},
}  # fmt: skip


def made(config: dict[str, Any], part: Shard = UNSHARDED) -> Any:
    return resolve_model_class(config)(config, torch.float32, CPU, part)


def publish(config: dict[str, Any], folder: Path) -> Any:
    """The whole model with dummy weights, and a checkpoint of it in the folder."""
    model, tensors = made(config), {}
    fill_dummy_weights(model, 5)
    parameters = dict(model.named_parameters())
    for name, stored in model.weight_sources().items():
        starts = accumulate(stored.rows, initial=0)
        for tensor, rows, start in zip(stored.tensors, parameters[name].split(stored.rows), starts):
            rows = as_published(rows, stored, start)
            tensors[tensor] = (rows.t() if stored.transpose else rows).contiguous()
    for tensor in [tensor for tensor in tensors if tensor.endswith("]")]:  # in the order of their numbers
        tensors.setdefault(tensor.partition("[")[0], []).append(tensors.pop(tensor))
    tensors = {name: torch.stack(rows) if isinstance(rows, list) else rows for name, rows in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return model


def as_published(rows: Tensor, stored: WeightSource, start: int) -> Tensor:
    """The rows of a tensor in the checkpoint's order, from those of a parameter from `start` on."""
    if stored.row_order:
        order = torch.tensor(stored.row_order[start : start + len(rows)]) - start
        rows = torch.empty_like(rows).index_copy_(0, order, rows)
    if stored.group_rows and not start:
        groups = len(rows) // sum(stored.group_rows)
        parts = rows.split([groups * size for size in stored.group_rows])
        rows = torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)
    return rows


class Counting:
    """A safetensors file, or a slice of one, that counts the bytes that are asked for."""

    read = 0

    def __init__(self, of: Any) -> None:
        self.of = of

    def __enter__(self) -> Counting:
        return Counting(self.of.__enter__())

    def __exit__(self, *error: Any) -> None:
        self.of.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def get_slice(self, key: str) -> Counting:
        return Counting(self.of.get_slice(key))

    def __getitem__(self, where: Any) -> Tensor:
        found = self.of[where]
        Counting.read += found.nbytes
        return found

    def get_tensor(self, key: str) -> Tensor:
        return self.get_slice(key)[:]


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_of_dummy_weights_are_slices_and_a_rank_reads_no_more_than_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dummy, "NOISE_LENGTH", 10_007)  # it comes again in the larger weights
    monkeypatch.setattr(dummy, "PIECE_NUMBERS", 5_000)
    monkeypatch.setattr(loader, "safe_open", lambda *args, **options: Counting(safe_open(*args, **options)))
    whole = publish(CONFIGS[name], tmp_path)
    total, experts = sum(parameter.nbytes for parameter in whole.parameters()), read_spec(CONFIGS[name]).experts
    layouts = [ParallelLayout(ranks) for ranks in (2, 4, 8)]
    layouts += [ParallelLayout(ranks, expert_parallel=True) for ranks in (2, 4) if experts]
    for layout in layouts:
        for rank, part in enumerate(layout.shards()):
            ranks, spec = layout.tp, read_spec(CONFIGS[name], part)
            drawn, loaded = blank(made(CONFIGS[name], part)), blank(made(CONFIGS[name], part))
            fill_dummy_weights(drawn, 5)
            Counting.read = 0
            read_bytes = load_weights(loaded, tmp_path).read_bytes
            for (path, a), b in zip(drawn.named_parameters(), loaded.parameters(), strict=True):
                assert torch.equal(a, b), f"{path} of rank {rank} of {layout}"
            padding = len(part.vocab_range(spec.vocab_size)) - part.padded_vocab_rows(spec.vocab_size)
            tables = 1 if whole.config.tied else 2
            assert Counting.read == read_bytes == 4 * (spec.parameters + tables * padding * spec.hidden)
            if name in ("llama", "jamba") and ranks < 8:
                assert Counting.read == pytest.approx(total / ranks, rel=0.02)


def test_the_undivided_shape_is_checked(tmp_path: Path) -> None:
    publish(CONFIGS["gpt2"], tmp_path)
    path, name = tmp_path / "model.safetensors", "h.1.mlp.c_fc.weight"
    save_file({**load_file(path), name: torch.zeros(64, 88)}, path)  # what one of two ranks has
    with pytest.raises(StartupError, match=r"c_fc.weight' in .* has shape \[64, 88\], but .* makes it \[64, 176\]"):
        load_weights(made(read_config(tmp_path), Shard(0, 2)), tmp_path)


# Quantised weights: slices of the undivided ones, bit for bit, whoever made them. Scales of rows whose columns ranks
# share out are those of whole rows.


Build = Callable[[Shard, Any], Any]
BIG = {
    "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1024,
}  # fmt: skip


def weights_of(model: Any) -> dict[str, Tensor]:
    """All parameters by their names, with the scales of those in FP8; those in few bits as what they stand for."""
    found = dict[str, Tensor]()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            found[f"{path}.{name}"] = parameter.detach()
            scales = getattr(module, scale_attributes(module)[name]) if name in scale_attributes(module) else None
            if scales is not None:
                found[f"{path}.{name} scales"] = scales
        if isinstance(module, Linear) and module.low_bit_parts is not None:
            parts = [make().dequantize() for make in module.low_bit_parts if make is not None]
            found[f"{path}.weight"] = torch.cat(parts)
    return found


def cut(whole: Tensor, module: Any, name: str) -> Tensor:
    """What a rank's module has of a parameter, or of its scales [groups, rows], as the cuts say; padding aside."""
    cuts, scales = parameter_shards(module, name.removesuffix(" scales")), name.endswith("scales")
    if cuts is None:
        return whole
    rows, at = list[Tensor](), 0
    for one in cuts.rows:
        own = slice(at + one.local.start, at + one.local.stop)
        rows.append(whole[:, own] if scales else whole[own])
        at += one.total
    found = torch.cat(rows, dim=int(scales))
    if cuts.columns is None or (scales and len(whole) == 1):
        return found
    of = cuts.columns.local
    groups = math.ceil(cuts.columns.total / len(whole))
    return found[of.start // groups : of.stop // groups] if scales else found[:, of.start : of.stop]


def assert_slices(build: Build, ranks: int, expert_parallel: bool = False) -> list[Any]:
    """Each rank's weights, built at the same time, are those of the whole in its places."""

    def rank(exchange: ThreadExchange) -> Any:
        return build(exchange.shard, lambda largest: exchange.all_gather(largest).amax(0))

    whole, shards = weights_of(build(UNSHARDED, None)), Meeting(ranks, expert_parallel).run(rank)
    for shard in shards:
        modules, own = dict(shard.named_modules()), weights_of(shard)
        assert own.keys() == whole.keys()
        for name, weight in own.items():
            path, _, kind = name.rpartition(".")
            expected = cut(whole[name], modules[path], kind)
            given = weight[: len(expected)]
            assert torch.equal(given.float(), expected.float()), name
            assert not weight[len(expected) :].float().any(), f"{name}: padding"
    return shards


def built_by(make: Callable[[Shard], Any], fill: Callable[..., object]) -> Build:
    """A rank's model by `make`, filled by `fill`."""

    def build(part: Shard, most: Any) -> Any:
        model = blank(make(part))
        files = fill(model, max_reduce=most)
        model.read_bytes = files.read_bytes if isinstance(files, LoadedFiles) else 0
        return model

    return build


@pytest.mark.parametrize("in_fp8", [False, True], ids=["dequantised", "in FP8"])
@pytest.mark.parametrize("name", ["llama", "llama, copied heads", "gemma2", "jamba", "granite hybrid", "mamba"])
def test_weights_that_become_fp8(name: str, in_fp8: bool, tmp_path: Path) -> None:
    """A rank's columns are a multiple of 16, which the kernels take; else they would be in the model's dtype."""
    config = {**CONFIGS[name], "intermediate_size": 192}
    publish(config, tmp_path)
    make = fp8.create_fp8_model if in_fp8 else fp8.create_model
    fill = partial(load_weights, folder=tmp_path, scheme=FP8_ON_LOAD)
    build = built_by(lambda part: make(config, torch.float32, CPU, FP8_ON_LOAD, part), fill)
    shards = assert_slices(build, 4 if "copied" in name else 2)
    if name in ("jamba", "granite hybrid"):
        for shard in assert_slices(build, 4, expert_parallel=True):
            assert len(next(layer.experts for layer in shard.layers if layer.experts).down.weight) == 64
    alone = blank(fp8.create_model(config, torch.float32, CPU, FP8_ON_LOAD, Shard(0, 2)))
    load_weights(alone, tmp_path, scheme=FP8_ON_LOAD)
    if name == "llama" and not in_fp8:  # without the others' columns other scales would come out
        assert not torch.equal(alone.layers[0].mlp.down.weight, shards[0].layers[0].mlp.down.weight)


@pytest.mark.parametrize("in_fp8", [False, True], ids=["dequantised", "in FP8"])
@pytest.mark.parametrize(
    ("said", "kind"),
    [(BLOCKS, "block"), (compressed("channel", "lm_head"), "channel"), (compressed("tensor", "lm_head"), "tensor")],
    ids=["block", "channel", "tensor"],
)
def test_checkpoints_in_fp8(said: dict[str, Any], kind: str, in_fp8: bool, tmp_path: Path) -> None:
    test_fp8.save(tmp_path, **BIG)
    test_fp8.publish(tmp_path, said, kind)
    config = read_config(tmp_path)
    scheme = resolve_scheme(config, None)
    assert isinstance(scheme, FP8Scheme)
    make = fp8.create_fp8_model if in_fp8 else fp8.create_model
    fill = partial(load_weights, folder=tmp_path, scheme=scheme)
    build = built_by(lambda part: make(config, torch.float32, CPU, scheme, part), fill)
    shards, whole = assert_slices(build, 2), build(UNSHARDED, None)
    spare = 2 * 97 * 512 * 4 + 5 * 512 * 4 + 64 * 1024  # embedding, head, norms, scales
    for shard in shards:
        assert shard.read_bytes <= (whole.read_bytes - spare) / 2 * 1.02 + spare


def test_a_cut_through_blocks_is_refused(tmp_path: Path) -> None:
    test_fp8.save(tmp_path, **{**BIG, "intermediate_size": 640})
    test_fp8.publish(tmp_path, BLOCKS, "block")
    config = read_config(tmp_path)
    scheme = resolve_scheme(config, None)
    assert isinstance(scheme, FP8Scheme)
    model = fp8.create_model(config, torch.float32, CPU, scheme, Shard(1, 2))
    told = r"columns 320 to 639 of the weight of .*down_proj.weight_scale_inv.*, where 128 share a scale"
    with pytest.raises(StartupError, match=told):
        load_weights(model, tmp_path, scheme=scheme)


@pytest.mark.parametrize("in_fp8", [False, True], ids=["dequantised", "in FP8"])
def test_whole_experts_of_checkpoints_in_fp8(in_fp8: bool, tmp_path: Path) -> None:
    """Columns of these experts would be no whole blocks."""
    config = {**CONFIGS["qwen2_moe"], "hidden_size": 512, "num_attention_heads": 4, "moe_intermediate_size": 192}
    publish({**config, "shared_expert_intermediate_size": 256, "intermediate_size": 512}, tmp_path)
    routers = [f"model.layers.0.mlp.{name}" for name in ("gate", "shared_expert_gate")]
    test_fp8.publish(tmp_path, {**BLOCKS, "modules_to_not_convert": routers}, "block")
    config = read_config(tmp_path)
    scheme = resolve_scheme(config, None)
    assert isinstance(scheme, FP8Scheme)
    make = fp8.create_fp8_model if in_fp8 else fp8.create_model
    build = built_by(
        lambda part: make(config, torch.float32, CPU, scheme, part),
        partial(load_weights, folder=tmp_path, scheme=scheme),
    )
    assert_slices(build, 2, expert_parallel=True)
    with pytest.raises(StartupError, match=r"columns 96 to 191 of the weight of .*, where 128 share a scale"):
        build(Shard(1, 2), None)


def with_bits(model: Any) -> bool:
    return any(isinstance(module, Linear) and module.low_bit_parts is not None for module in model.modules())


ROUND = {**CONFIGS["llama, padded"], "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize(("asked", "vocab", "ranks"), [("int8", 331, 2), ("int4", 331, 2), ("int8", 150, 4)])
@pytest.mark.parametrize("source", ["loaded", "dummy"])
def test_weights_of_few_bits(
    asked: str, source: str, vocab: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 150 rows of the vocabulary the fourth of four ranks has none: its head is padding, in few bits too."""
    monkeypatch.setattr(dummy, "NOISE_LENGTH", 10_007)
    config, scheme = {**ROUND, "vocab_size": vocab}, SCHEMES_ON_LOAD[asked]
    publish(config, tmp_path)
    read = partial(load_weights, folder=tmp_path, scheme=scheme)
    fill = read if source == "loaded" else lambda model, max_reduce: fill_dummy_weights(model, 5, scheme)
    assert_slices(
        built_by(lambda part: low_bit.create_model(config, torch.bfloat16, CPU, scheme, shard=part), fill), ranks
    )
    assert bool(Shard(ranks - 1, ranks).vocab_range(vocab)) == (vocab > 150)


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_dummy_weights_in_fp8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy, "NOISE_LENGTH", 10_007)
    config = {**CONFIGS[name], "intermediate_size": 192}
    make = partial(fp8.create_fp8_model, config, torch.float32, CPU, FP8_ON_LOAD)
    build = built_by(make, lambda model, max_reduce: fill_dummy_weights(model, 5, FP8_ON_LOAD))
    assert_slices(build, 2)
    assert_slices(build, 2, expert_parallel=True)


def converted(folder: Path, kind: str, vocab: int = 352, **more: Any) -> GGUFFile:
    """A GGUF file with tensors of that kind."""
    test_fp8.save(folder, **{**BIG, "vocab_size": vocab, **more})
    return read_gguf(gguf_files.convert(folder, "llama", folder / "model.gguf", kind, vocab_size=vocab))


def test_blocks_that_become_fp8_are_cut_anywhere(tmp_path: Path) -> None:
    """A rank has 528 columns of 1,056, whose blocks have 32."""
    file = converted(tmp_path, "q8_0", intermediate_size=1056)
    make = partial(fp8.create_fp8_model, to_hf_config(file), torch.float32, CPU, FP8_ON_LOAD)
    assert_slices(built_by(make, partial(load_gguf, file=file, scheme=FP8_ON_LOAD)), 2)


@pytest.mark.parametrize(
    ("kind", "vocab", "ranks"), [("f32", 352, 2), ("bf16", 352, 2), ("q8_0", 352, 2), ("q8_0", 150, 4)]
)
def test_files_of_blocks(kind: str, vocab: int, ranks: int, tmp_path: Path) -> None:
    file, scheme = converted(tmp_path, kind, vocab), LowBitScheme(0, "gguf")
    make = partial(low_bit.create_model, to_hf_config(file), torch.float32, CPU, scheme, file)
    shards = assert_slices(built_by(make, partial(load_gguf, file=file, scheme=scheme)), ranks)
    assert with_bits(shards[0]) == (kind == "q8_0") or not low_bit.supports(256, torch.float32, CPU)


def _granite(folder: Path) -> dict[str, Any]:
    """A Granite 4 hybrid's folder, whose experts lie in stacks; its config."""
    config = transformers.GraniteMoeHybridConfig(
        hidden_size=32, intermediate_size=24, shared_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, mamba_n_heads=4, mamba_d_state=16, vocab_size=97,
        layer_types=["full_attention", "linear_attention"],
    )  # fmt: skip
    transformers.GraniteMoeHybridForCausalLM(config).save_pretrained(folder)
    return read_config(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stack: stack[:3], r"lacks .*input_linear\.weight\[3\]"),
        (
            lambda stack: torch.cat((stack, stack[:1])),
            "holds .*input_linear.weight.*, which the model has no place for",
        ),
        (lambda stack: stack[:, :40], r"has shape \[40, 32\], but config.json makes it \[48, 32\]"),
        (lambda stack: stack.flatten(0, 1), "has shape|no place"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_stacks_that_do_not_fit(change: Any, message: str, ranks: int, tmp_path: Path) -> None:
    config, path = _granite(tmp_path), tmp_path / "model.safetensors"
    key = "model.layers.1.block_sparse_moe.input_linear.weight"
    model = resolve_model_class(config)(config, torch.float32, torch.device("cpu"), Shard(ranks - 1, ranks))
    load_weights(model, tmp_path)
    tensors = load_file(path)
    save_file({**tensors, key: change(tensors[key]).contiguous()}, path)
    model = resolve_model_class(config)(config, torch.float32, torch.device("cpu"), Shard(ranks - 1, ranks))
    with pytest.raises(StartupError, match=message):
        load_weights(model, tmp_path)
