"""What ranks have of checkpoints by AWQ and GPTQ: slices of the undivided weights, bit for bit, and no more read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_grouped import AWQ, GPTQ, LLAMA, loaded, packed, publish, repack
from test_slices import CONFIGS, ROUND, assert_slices, built_by, converted, with_bits
from test_slices import publish as publish_plain

from quire.errors import StartupError
from quire.layers.linear import Linear
from quire.layers.moe import SparseMLP
from quire.models import resolve_model_class
from quire.models.named_configs import named_config
from quire.models.quantization import SCHEMES_ON_LOAD, LowBitScheme, resolve_scheme
from quire.protocol.parallel_layout import ParallelLayout, Shard
from quire.weights import dummy, low_bit
from quire.weights.awq_gptq import TENSOR_KINDS, PackedWeight
from quire.weights.checkpoint_files import read_config
from quire.weights.dummy import fill_dummy_weights
from quire.weights.gguf_config import to_hf_config
from quire.weights.gguf_loader import load_gguf
from quire.weights.loader import load_weights
from quire.weights.tensor_slices import TensorSlice

CPU = torch.device("cpu")
ORDERED = {**GPTQ, "desc_act": True}
EIGHT = {**GPTQ, "bits": 8}


@pytest.mark.parametrize(
    ("said", "ranks"),
    [(AWQ, 2), ({**AWQ, "group_size": 32}, 4), (GPTQ, 4), (EIGHT, 2), (ORDERED, 4),
     ({**GPTQ, "checkpoint_format": "gptq_v2"}, 2)],
    ids=str,
)  # fmt: skip
def test_shards_are_slices(said: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    """Of four ranks two have the same heads of keys."""
    publish(tmp_path, said)
    shards, whole = assert_slices(lambda part, _: loaded(tmp_path, part=part), ranks), loaded(tmp_path)
    assert with_bits(shards[0]) == with_bits(whole)
    if said.get("desc_act") or ranks > 2:
        return
    spare = 97 * 128 * 4 + 5 * 128 * 4 + 2 * 2 * 3 * 128 * 4  # embedding or head, norms, orders of columns
    for shard in shards:
        assert shard.read_bytes <= (whole.read_bytes - spare) / 2 * 1.02 + spare


EXPERTS = {
    "jamba": ({**CONFIGS["jamba"], "intermediate_size": 128, "expert_layer_period": 1, "expert_layer_offset": 0},
              "feed_forward.experts.1.down_proj"),
    "mixtral": ({**named_config("mixtral-8x7b"), **LLAMA, "num_local_experts": 4}, "block_sparse_moe.experts.1.w2"),
    "qwen3_moe": ({**CONFIGS["qwen2_moe"], "architectures": ["Qwen3MoeForCausalLM"], "num_attention_heads": 4,
                   "num_key_value_heads": 4, "head_dim": 32, "moe_intermediate_size": 64, "mlp_only_layers": []},
                  "mlp.experts.1.down_proj"),
}  # fmt: skip
PACKED = r"(feed_forward.*|self_attn.*|mlp.*|in|out)_proj\.weight|experts\.\d+\.w\d\.weight"


@pytest.mark.parametrize("said", [{**AWQ, "group_size": 32}, {**GPTQ, "bits": 4}, EIGHT, ORDERED], ids=str)
@pytest.mark.parametrize("family", EXPERTS)
def test_experts(family: str, said: dict[str, Any], tmp_path: Path) -> None:
    """A rank has some columns of every expert, in few bits unless a group's columns may be anywhere; the router stays
    as it is. Products are those of the weights that the numbers stand for. Or a rank has whole experts, also where
    their columns would be no whole groups."""
    config, down = EXPERTS[family]
    publish_plain(config, tmp_path)
    meant = repack(tmp_path, said, PACKED)
    shards = assert_slices(lambda part, _: loaded(tmp_path, part=part), 2)
    [name] = [name for name in meant if "layers.1." in name and down in name]
    for shard, half in zip(shards, (0, 1)):
        layer = [module for module in shard.modules() if isinstance(module, SparseMLP)][1]
        assert with_bits(layer) == (with_bits(shard) and not said.get("desc_act"))
        for part in (layer.gate_up, layer.down):
            if part.low_bit_parts is not None:
                rows = [make().dequantize() for make in part.low_bit_parts if make is not None]
                part.weight, part.low_bit_parts = torch.nn.Parameter(torch.cat(rows), requires_grad=False), None
        assert layer.down.weight is not None
        columns = meant[name].shape[1] // 2
        found = layer.down.weight.view(layer.experts, -1, columns)[1]
        torch.testing.assert_close(found, meant[name].float().tensor_split(2, 1)[half], rtol=1e-6, atol=1e-7)
    told = "a rank would have 16 of 64 columns of layers.0.experts.down.weight, of which 32 share a scale"
    if family == "qwen3_moe" and not said.get("desc_act"):
        with pytest.raises(StartupError, match=told) as failure:
            loaded(tmp_path, part=Shard(0, 4))
        assert failure.value.remedy == "--tp must divide its groups of columns, 2; or give --expert-parallel"
    ranks = 4 if family == "qwen3_moe" else 2
    shards = assert_slices(lambda part, _: loaded(tmp_path, part=part), ranks, expert_parallel=True)
    for shard in shards:
        layer = next(module for module in shard.modules() if isinstance(module, SparseMLP))
        assert with_bits(layer) == (not said.get("desc_act"))
    assert sum(shard.read_bytes for shard in shards) < 1.1 * loaded(tmp_path).read_bytes


@pytest.mark.parametrize("said", [AWQ, GPTQ, EIGHT, ORDERED], ids=str)
def test_cuts_through_words_and_groups(said: dict[str, Any], tmp_path: Path) -> None:
    """Of any run of rows, and any columns, the numbers are those that were packed."""
    torch.manual_seed(3)
    tensors, meant = packed(said, 64, 128)
    path = tmp_path / "one.safetensors"
    save_file({kind: tensor.contiguous() for kind, tensor in tensors.items()}, path)
    scheme = resolve_scheme({"quantization_config": said}, None)
    assert isinstance(scheme, LowBitScheme)
    for runs, columns in (
        ((range(3, 21), range(21, 22), range(40, 64)), range(19, 77)),
        ((range(8, 16),), range(64, 128)),
        ((range(5, 6),), None),
        ((range(9, 9), range(1, 2)), range(127, 128)),
    ):
        stored = PackedWeight(scheme, "one", 64, 128, TensorSlice((64, 128), runs, columns))
        with safe_open(path, framework="pt") as file:
            for kind in [kind for kind in TENSOR_KINDS if kind in tensors]:
                stored.read(kind, file, kind, path)
        rows = [row for run in runs for row in run]
        expected = meant[rows] if columns is None else meant[rows][:, columns.start : columns.stop]
        torch.testing.assert_close(stored.dequantize().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("said", [{**AWQ, "group_size": 128}, {**GPTQ, "group_size": 128}], ids=str)
def test_a_cut_through_groups_is_refused(said: dict[str, Any], tmp_path: Path) -> None:
    told = "--tp is 2, and a rank would have 64 of 128 columns of layers.0.attention.out.weight, of which 128 share"
    config = {**named_config("llama-125m"), **LLAMA, "quantization_config": said}
    for part in (Shard(0, 2), Shard(1, 2)):
        with pytest.raises(StartupError, match=told) as failure:
            low_bit.create_model(config, torch.float32, CPU, resolve_scheme(config, None), shard=part)  # type: ignore[arg-type]
        assert failure.value.remedy == "--tp must divide its groups of columns, 1"


def held(model: Any) -> int:
    """Bytes of a prepared model's weights, packed or not."""
    packed = {}
    for module in model.modules():
        product = getattr(module, "packed" if isinstance(module, Linear) else "packed_kernel", None)
        if hasattr(product, "data"):
            packed[product.data.data_ptr()] = product.data.nbytes  # tied ones once
        if isinstance(module, SparseMLP) and module.packed is not None:
            for each in (module.packed.gate_up, module.packed.down):
                packed[int(each.addresses[0])] = each.nbytes
    return sum(weight.nbytes for weight in model.parameters()) + sum(packed.values())


@pytest.mark.parametrize("asked", ["awq", "gptq", "int8", "int4", "gguf"])
def test_a_ranks_weights_to_the_byte(asked: str, tmp_path: Path) -> None:
    """What a rank holds, packed, is what is planned for it."""
    said, config, file = {"awq": AWQ, "gptq": EIGHT}.get(asked), ROUND, None
    if said is not None:
        publish(tmp_path, said)
        config = read_config(tmp_path)
    elif asked == "gguf":
        file = converted(tmp_path, "q8_0")
        config = to_hf_config(file)
    else:
        publish_plain(config, tmp_path)
    scheme = LowBitScheme(0, "gguf") if file is not None else resolve_scheme(config, None if said else asked)
    assert isinstance(scheme, LowBitScheme)
    for part in (Shard(0, 2), Shard(1, 2)):
        model = low_bit.create_model(config, torch.bfloat16, CPU, scheme, file, part)
        if not with_bits(model):
            pytest.skip("the kernels for CPUs aren't built")
        if file is None:
            load_weights(model, tmp_path, scheme=scheme)
        else:
            load_gguf(model, file, scheme=scheme)
        model.prepare(64)
        plain = resolve_model_class(config)(config, torch.bfloat16, torch.device("meta"), part)
        saved = low_bit.saved_bytes(config, scheme, torch.bfloat16, file, part)
        assert held(model) == sum(weight.nbytes for weight in plain.parameters()) - saved


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_whole_experts_of_few_bits(asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read or random, they are slices of all experts, and take the bytes that are planned."""
    monkeypatch.setattr(dummy, "NOISE_LENGTH", 10_007)
    config = {**EXPERTS["qwen3_moe"][0], "num_attention_heads": 16, "moe_intermediate_size": 32, "num_experts": 32}
    scheme, shards = SCHEMES_ON_LOAD[asked], list[Any]()
    publish_plain(config, tmp_path)
    make = partial(low_bit.create_model, config, torch.bfloat16, CPU, scheme, None)
    for fill in (
        partial(load_weights, folder=tmp_path, scheme=scheme),
        lambda model, max_reduce: fill_dummy_weights(model, 5, scheme),
    ):
        shards = assert_slices(built_by(make, fill), 2, expert_parallel=True)
    if not with_bits(shards[0]):
        pytest.skip("the kernels for CPUs aren't built")
    for shard, part in zip(shards, ParallelLayout(2, expert_parallel=True).shards(), strict=True):
        shard.prepare(64)
        plain = resolve_model_class(config)(config, torch.bfloat16, torch.device("meta"), part)
        saved = low_bit.saved_bytes(config, scheme, torch.bfloat16, None, part)
        assert held(shard) == sum(weight.nbytes for weight in plain.parameters()) - saved
