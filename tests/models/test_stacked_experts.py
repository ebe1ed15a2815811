"""Checkpoints of gpt-oss whose experts are in MXFP4: the model computes with the numbers that transformers makes of
them, and tensors that don't fit are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dense_context import DenseContext
from safetensors.torch import load_file, save_file
from test_against_transformers import GPT_OSS, built, reference, run
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.errors import StartupError
from quire.models import read_spec
from quire.models.quantization import LowBitScheme
from quire.protocol.parallel_layout import ParallelLayout, Shard
from quire.weights.checkpoint_files import read_config
from quire.weights.loader import load_weights
from quire.weights.low_bit import MXFP4_FORMAT, create_model, quantize
from quire.weights.stacked_tensors import dequantize_mxfp4

OPTIONS = {**GPT_OSS, "hidden_size": 64, "intermediate_size": 96}
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = BLOCKS.replace("blocks", "scales")
Change = Callable[[dict[str, Tensor]], object]


def packed_tensors(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Blocks and scales of four experts, of numbers about as large as weights are."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (4, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(122, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)


def as_mxfp4(folder: Path, change: Change = lambda tensors: None) -> None:
    """Replace the experts' weights in the folder by random ones in MXFP4, with the scales in a file of their own."""
    tensors = load_file(folder / "model.safetensors")
    scales: dict[str, Tensor] = {}
    for seed, name in enumerate([name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]):
        _, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"], scales[f"{name}_scales"] = packed_tensors(rows, columns, seed)
    tensors |= scales
    change(tensors)
    (folder / "model.safetensors").unlink()
    named = {name: tensor for name, tensor in tensors.items() if name.endswith("_scales")}
    rest = {name: tensor for name, tensor in tensors.items() if name not in named}
    files = {"model-00001-of-00002.safetensors": rest, "model-00002-of-00002.safetensors": named}
    for file, part in files.items():
        save_file(part, folder / file, {"format": "pt"})
    index = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = read_config(folder)
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


def test_numbers_equal_those_of_transformers() -> None:
    """All bytes with all scales that are numbers in fp32."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(64).view(1, 64, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).repeat(5)[: 64 * 16].view(1, 64, 16)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()
    assert torch.equal(dequantize_mxfp4(blocks[0], scales[0]), theirs)


def test_logits_of_a_checkpoint_in_mxfp4(tmp_path: Path) -> None:
    theirs = reference("Gpt_Oss", OPTIONS, tmp_path)
    numbers: dict[str, Tensor] = {}

    def note(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_blocks")]:
            plain = name.removesuffix("_blocks")
            numbers[plain] = convert_moe_packed_tensors(
                tensors[name].clone(), tensors[f"{plain}_scales"], dtype=torch.float32
            )

    as_mxfp4(tmp_path, note)
    assert not theirs.load_state_dict(numbers, strict=False).unexpected_keys
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    got = run(built(tmp_path), DenseContext(read_spec(read_config(tmp_path))), tokens)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1


@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_stay_in_four_bits(deterministic: bool, tmp_path: Path) -> None:
    """On a CPU, with the numbers of the expanded weights, also those of two ranks."""
    reference("Gpt_Oss", OPTIONS, tmp_path)
    as_mxfp4(tmp_path)
    config, scheme = read_config(tmp_path), LowBitScheme(4, "mxfp4")
    expanded, context = built(tmp_path), DenseContext(read_spec(config))
    model = create_model(config, torch.float32, torch.device("cpu"), scheme)
    load_weights(model, tmp_path, scheme=scheme)
    assert all(layer.experts.gate_up.weight.is_meta for layer in model.layers)
    model.prepare(deterministic=deterministic)
    packed = model.layers[1].experts.packed
    assert packed.down.nbytes == 4 * 64 * 96 * 17 // 32 + 4 * 64 * 3
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1))
    want = run(expanded, DenseContext(read_spec(config)), tokens)
    torch.testing.assert_close(run(model, context, tokens), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_have_their_own_blocks(ranks: int, tmp_path: Path) -> None:
    """Three ranks have columns of whole blocks, and stay in few bits; two have not."""
    reference("Gpt_Oss", {**OPTIONS, "num_attention_heads": 6, "num_key_value_heads": 6}, tmp_path)
    as_mxfp4(tmp_path)
    config, scheme, found = read_config(tmp_path), LowBitScheme(4, "mxfp4"), []
    whole = built(tmp_path, prepare=False).layers[0].experts
    for rank in range(ranks):
        model = create_model(config, torch.float32, torch.device("cpu"), scheme, shard=Shard(rank, ranks))
        load_weights(model, tmp_path, scheme=scheme)
        experts = model.layers[0].experts
        assert experts.down.weight.is_meta == (ranks != 2)
        assert experts.gate_up.weight.is_meta
        for part in (experts.gate_up, experts.down):
            part.dequantize()
        found.append(experts)
    assert torch.equal(torch.cat([part.down.weight for part in found], 1), whole.down.weight)
    gates = [part.gate_up.weight.view(4, 2, -1, 64) for part in found]
    assert torch.equal(torch.cat(gates, 2), whole.gate_up.weight.view(4, 2, 96, 64))


def test_ranks_with_whole_experts_stay_in_four_bits(tmp_path: Path) -> None:
    """Also where two ranks can't have columns of whole blocks. A rank reads its own experts alone."""
    reference("Gpt_Oss", OPTIONS, tmp_path)
    as_mxfp4(tmp_path)
    config, scheme, whole = read_config(tmp_path), LowBitScheme(4, "mxfp4"), built(tmp_path, prepare=False)
    for shard in ParallelLayout(2, expert_parallel=True).shards():
        model = create_model(config, torch.float32, torch.device("cpu"), scheme, shard=shard)
        read_bytes = load_weights(model, tmp_path, scheme=scheme).read_bytes
        ours, theirs = model.layers[0].experts, whole.layers[0].experts
        for part, every in ((ours.gate_up, theirs.gate_up), (ours.down, theirs.down)):
            assert part.weight.is_meta
            part.dequantize()
            for got, expected in ((part.weight, every.weight), (part.bias, every.bias)):
                assert torch.equal(got, expected.chunk(2)[shard.tp_rank])
        spec = read_spec(config, shard)
        padding = shard.padded_vocab_rows(spec.vocab_size) - len(shard.vocab_range(spec.vocab_size))
        others = spec.parameters - spec.expert_parameters - 2 * padding * spec.hidden
        assert read_bytes == 4 * others + spec.expert_parameters * 17 // 32


def test_random_weights_in_mxfp4() -> None:
    """As `--dummy-weights` makes them: rounded to the nearest number."""
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    rounded = quantize(weight, MXFP4_FORMAT).dequantize()
    assert torch.equal(quantize(rounded, MXFP4_FORMAT).dequantize(), rounded)
    assert ((rounded - weight).abs() <= weight.view(9, 2, 32).abs().amax(2).repeat_interleave(32, 1) / 4).all()


def cut(tensors: dict[str, Tensor], name: str, *index: slice) -> None:
    tensors[name] = tensors[name][index].contiguous()


ALL = slice(None)
WRONG: dict[str, tuple[Change, str]] = {
    "blocks of 16": (lambda t: cut(t, BLOCKS, ALL, ALL, ALL, slice(8)), r"of which the last is 16"),
    "three experts": (lambda t: cut(t, BLOCKS, slice(3)), r"down_proj_blocks.*\[3, 64, 3, 16\].*4 experts"),
    "fewer rows": (lambda t: cut(t, BLOCKS, ALL, slice(60)), r"down_proj_scales.*\[4, 64, 3\].*for blocks \[4, 60, 3"),
    "fewer columns": (
        lambda t: [cut(t, name, ALL, ALL, slice(2)) for name in (BLOCKS, SCALES)],
        r"experts.0.down_proj.weight.* has shape \[64, 64\], but config.json makes it \[64, 96\]",
    ),
    "signed": (lambda t: t.update({BLOCKS: t[BLOCKS].to(torch.int16)}), "is not in uint8"),
    "no number": (lambda t: t[SCALES][2, 1].fill_(255), "has the scale 255"),
    "no scales": (lambda t: t.pop(SCALES), "no file has '.*down_proj_scales'"),
    "no blocks": (lambda t: t.pop(BLOCKS), "lacks layers.1.mlp.experts.0.down_proj.weight"),
}


def expand(tensors: dict[str, Tensor]) -> None:
    """One tensor as if it were not in MXFP4."""
    del tensors[BLOCKS], tensors[SCALES]
    tensors[BLOCKS.removesuffix("_blocks")] = torch.zeros(4, 96, 64)


def test_what_is_not_in_mxfp4_is_not_rounded_to_it(tmp_path: Path) -> None:
    reference("Gpt_Oss", OPTIONS, tmp_path)
    as_mxfp4(tmp_path, expand)
    built(tmp_path)
    scheme = LowBitScheme(4, "mxfp4")
    model = create_model(read_config(tmp_path), torch.float32, torch.device("cpu"), scheme)
    with pytest.raises(StartupError, match=r"experts.0.down_proj.weight.* isn't in MXFP4"):
        load_weights(model, tmp_path, scheme=scheme)


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    change, words = WRONG[case]
    reference("Gpt_Oss", OPTIONS, tmp_path)
    as_mxfp4(tmp_path, change)
    with pytest.raises(StartupError, match=words):
        built(tmp_path)
    for rank in range(2):
        scheme = LowBitScheme(4, "mxfp4")
        model = create_model(read_config(tmp_path), torch.float32, torch.device("cpu"), scheme, shard=Shard(rank, 2))
        with pytest.raises(StartupError, match=words):
            load_weights(model, tmp_path, scheme=scheme)


def test_other_families_do_not_have_mxfp4(tmp_path: Path) -> None:
    reference("Mixtral", {**OPTIONS, "num_local_experts": 4}, tmp_path)
    config = {**read_config(tmp_path), "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(StartupError, match="the quant_method 'mxfp4', which is not supported"):
        read_spec(config)
