"""The memory plan of one rank and of all together, to the byte: PagedAttention's Table 1, vAttention's Table 8, devices
that aren't there, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from papers.vattention import WASTE
from quire.cli import main, parse_arguments
from quire.cli.flags import config_from
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.kernels.peer_memory_layout import peer_bytes
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.models import read_spec, resolve_model_class
from quire.models.named_configs import named_config
from quire.models.quantization import FP8_ON_LOAD
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import ParallelLayout, Shard
from quire.startup import memory_plan
from quire.startup.build import describe_memory_plan
from quire.startup.memory_plan import GIB, MemoryPlan, plan_memory
from quire.weights.fp8 import create_fp8_model, saved_bytes, scale_attributes

KIB, MIB = 2**10, 2**20


def spec_of(name: str, ranks: int = 1) -> ModelSpec:
    """Return the last rank's spec."""
    return read_spec(named_config(name), Shard(ranks - 1, ranks))


def planned(name: str, device_gib: float | None = None, **settings: Any) -> MemoryPlan:
    """Return a rank's plan, with two bytes a number."""
    config = EngineConfig.of(model_config=name, **settings)
    bytes_ = None if device_gib is None else int(device_gib * GIB)
    return plan_memory(config.per_rank(), spec_of(name, config.tp), name, "float16", 2, "cuda", 0, bytes_)


# name, ranks, GiB of a device, tokens of a step; Table 1's GB of parameters, GB for KV, thousands of slots
TABLE_1 = [("opt-66b", 4, 40, 512, 132, 21, 9.7), ("opt-175b", 8, 80, 2048, 346, 264, 60.1)]


@pytest.mark.parametrize(("name", "ranks", "device", "step", "parameters", "cache", "slots"), TABLE_1)
def test_table_1_on_its_devices(
    name: str, ranks: int, device: int, step: int, parameters: int, cache: int, slots: float
) -> None:
    """What the table says, as it rounds, holds on ranks of such devices: what steps need beside fits as well."""
    kv_gib = {21: 21.3, 264: 264.2}[cache]  # both are the table's GB in whole ones: 21.0 GiB are 9.6K slots
    plan = planned(name, device, tp=ranks, kv_gib=kv_gib, max_num_seqs=256, max_num_batched_tokens=step,
                   gpu_memory_utilization=0.99)  # fmt: skip
    assert round(kv_gib) == cache
    assert plan.kv_tokens == kv_gib * GIB // (ranks * plan.token_bytes) // 16 * 16
    assert round(plan.kv_tokens / 1000, 1) == slots
    assert ranks * plan.weight_bytes / 1e9 == pytest.approx(parameters, rel=0.012)
    whole = spec_of(name)
    assert ranks * plan.token_bytes == whole.token_bytes(2)
    assert plan.kv_bytes == plan.kv_tokens * plan.token_bytes
    # Norms, positions and biases behind sums are everywhere; the last rank's rows of the vocabulary are padded.
    copied = whole.hidden * (2050 + len(whole.layers) * 6 + 2)
    rows = ranks * Shard(0, ranks).padded_vocab_rows(50272) - 50272
    assert ranks * plan.parameters == whole.parameters + (ranks - 1) * copied + rows * whole.hidden


@pytest.mark.parametrize(("name", "ranks"), [
    ("opt-66b", 4), ("gpt2-xl", 5), ("gpt2", 4), ("qwen2-7b", 4), ("qwen3-8b", 8), ("gemma-2-9b", 2),
    ("characterai-8b", 8), ("yi-6b", 8), ("llama3.2-1b", 16), ("llama3.2-vision-11b", 4), ("llava-onevision-7b", 4),
    ("jamba-52b", 4), ("mamba-2.8b", 8), ("internvl2-8b", 2), ("phi-3-vision-4b", 2), ("paligemma2-10b", 4),
])  # fmt: skip
def test_planned_weights_are_those_of_a_ranks_model(name: str, ranks: int) -> None:
    config, meta = named_config(name), torch.device("meta")
    made: Any = resolve_model_class(config)
    for rank in (0, ranks - 1):
        shard = made(config, torch.bfloat16, meta, shard=Shard(rank, ranks))
        spec = spec_of(name, ranks)
        eyes = 0 if spec.vision is None else spec.vision.parameters  # whole on each
        assert sum(one.numel() for one in shard.parameters()) == spec.parameters + eyes
        assert eyes == (0 if spec.vision is None else spec_of(name).vision.parameters)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("qwen3-30b-a3b", 4), ("gpt-oss-120b", 8), ("gemma-4-26b-a4b", 2), ("granite-4-h-small", 4), ("jamba-52b", 8)],
)
def test_planned_weights_of_ranks_with_whole_experts(name: str, ranks: int) -> None:
    config, meta = named_config(name), torch.device("meta")
    plan = said(name, 79, tp=ranks, expert_parallel=True)
    for part in ParallelLayout(ranks, expert_parallel=True).shards():
        model: Any = resolve_model_class(config)(config, torch.bfloat16, meta, shard=part)
        numbers = sum(one.numel() for one in model.parameters())
        assert numbers == read_spec(config, part).parameters
        assert plan["model"].startswith(f"{name}: {numbers:,} parameters in bfloat16, on each of {ranks} ranks")


def mapped(name: str, ranks: int, kib: int, layout: str = "layer") -> tuple[MemoryPlan, KVCacheConfig]:
    """Return a rank's plan and configuration of virtual memory; several ranks have 64 GiB together."""
    settings: dict[str, Any] = {"virtual_layout": layout, "virtual_page_kib": kib, "max_num_seqs": 8, "tp": ranks}
    settings["memory"] = "virtual"
    plan = planned(name, 80, kv_gib=64 if ranks > 1 else 4, max_num_batched_tokens=512, **settings)
    config = EngineConfig.of(**settings, swap_gib=0).with_device_defaults("cuda").per_rank()
    size = MemorySize(plan.kv_tokens, plan.max_len, 2, plan.kv_bytes)
    return plan, build_memory(config, spec_of(name, ranks), size).kv_config


@pytest.mark.parametrize(("name", "ranks"), [*WASTE, ("yi-6b", 4), ("llama3-8b", 4), ("yi-34b", 4)])
def test_table_8_by_rank(name: str, ranks: int) -> None:
    """With one, two and (by the same rule) four workers."""
    times = max(ranks // 2, 1)
    for kib, tokens, waste in zip((64, 128, 256, 2048), *WASTE[name, min(ranks, 2)], strict=True):
        _, geometry = mapped(name, ranks, kib)
        (group,) = geometry.groups
        assert (group.run_tokens, group.run_pages) == (times * tokens, 1)
        assert group.parts == 2 * len(spec_of(name).layers), "each worker has all layers"
        assert group.page_bytes == group.parts * kib * KIB
        assert ranks * group.page_bytes == times * waste * MIB


def test_sums_over_ranks() -> None:
    """--kv-gib and --swap-gib are sums over ranks; --kv-tokens is the same in each."""
    config = EngineConfig(tp=4, kv_gib=8, swap_gib=2, max_num_seqs=8).with_device_defaults("cuda").per_rank()
    plan = planned("llama3-8b", 80, tp=4, kv_gib=8)
    assert (4 * plan.kv_bytes, plan.kv_tokens) == (8 * GIB, 8 * GIB // spec_of("llama3-8b").token_bytes(2))
    size = MemorySize(plan.kv_tokens, plan.max_len, 2, plan.kv_bytes)
    geometry = build_memory(config, spec_of("llama3-8b", 4), size).kv_config
    page = geometry.groups[0].page_bytes
    assert 0 <= 2 * GIB - 4 * geometry.host_bytes < 4 * page
    assert 4 * geometry.bytes == 8 * GIB + 4 * page, "and a scratch page each"
    assert planned("llama3-8b", 80, tp=4, kv_tokens=8192).kv_tokens == 8192
    copied = planned("yi-6b", 80, tp=8, kv_tokens=4096).token_bytes
    assert 8 * copied == 2 * spec_of("yi-6b").token_bytes(2), "each of 8 ranks has one of 4 heads of keys"


def test_the_gpu_with_the_least_room_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"cuda:0": (80, 79), "cuda:1": (80, 40), "cuda:2": (40, 39), "cuda:3": (16, 1)}
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: tuple(n * GIB for n in there[device]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
    two = planned("llama3-8b", tp=2, max_num_seqs=1024)
    assert (two.device_bytes, two.free_bytes) == (80 * GIB, 40 * GIB)
    room = 32 * GIB - two.weight_bytes - two.activation_bytes - two.peer_bytes
    assert two.kv_tokens == room // two.token_bytes // 16 * 16
    with pytest.raises(StartupError, match="on cuda, each of 4 ranks"):
        planned("llama3-8b", tp=4)  # of these the last has 0.4 GiB
    with pytest.raises(StartupError, match="--tp is 8, and torch finds 4 GPUs") as raised:
        planned("llama3-8b", tp=8)
    assert "--device-gib" in raised.value.remedy


def test_what_ranks_will_exchange_through_takes_room() -> None:
    """On GPUs that are not opened yet; on open ones it is missing from the free memory."""
    absent = planned("llama3-8b", 40, tp=2, max_num_seqs=1024)
    spec, config = spec_of("llama3-8b", 2), EngineConfig(tp=2, max_num_seqs=1024)
    there = plan_memory(config.per_rank(), spec, "m", "float16", 2, "cuda", measured=(40 * GIB, 40 * GIB, "GPU 0"))
    assert (absent.peer_bytes, there.peer_bytes) == (peer_bytes(2), 0)
    assert peer_bytes(2) > 384 * MIB
    assert abs(there.kv_bytes - absent.kv_bytes - absent.peer_bytes) < 16 * absent.token_bytes, "to a page"
    taken = absent.weight_bytes + absent.activation_bytes + absent.kv_bytes
    assert 0 <= int(0.9 * 40 * GIB) - taken - absent.peer_bytes < 16 * absent.token_bytes
    memory_plan.check_still_fits(config, absent, (40 * GIB, taken, "GPU 0"))  # ranks that were started have it
    text = "384.0 MiB of exchange"
    with pytest.raises(StartupError, match=f"{text} and 40.00 GiB of KV cache don't fit"):
        planned("llama3-8b", 40, tp=2, kv_gib=80)
    with pytest.raises(StartupError) as raised:
        planned("llama3-8b", 40, kv_gib=40)
    assert text not in raised.value.cause


@pytest.mark.parametrize(("settings", "line"), [
    ({"tp": 2}, True), ({"tp": 8}, True), ({"tp": 4, "pp": 2}, True), ({}, False), ({"pp": 2}, False),
    ({"tp": 16}, False), ({"tp": 2, "device": "cpu"}, False),
], ids=str)  # fmt: skip
def test_who_exchanges_through_peers_memory(settings: dict[str, Any], line: bool) -> None:
    """The ranks of a stage do, if there are not too many."""
    lines = said("llama3.2-1b", 40, kv_gib=4, **settings)
    assert lines.get("exchange") == ("384.0 MiB that the other ranks' GPUs reach" if line else None)


def said(name: str, device_gib: float | None, **settings: Any) -> dict[str, str]:
    """Return the lines of a plan, by their first word."""
    lines = describe_memory_plan(EngineConfig.of(model_config=name, **settings), device_gib)
    return {line[:12].strip(): line[13:] for line in lines}


def test_what_a_plan_for_ranks_says() -> None:
    """Besides what the documents show."""
    one = said("llama3-8b", 80, kv_gib=8)
    assert "all ranks" not in one
    assert "rank" not in "".join(one.values())
    halves = said("llama3-8b", 64, tp=2, kv_gib=2, device="cpu", dtype="float32", max_num_batched_tokens=512)
    assert halves["device"] == "cpu (--device-gib): 32.00 GiB free of 32.00 GiB"
    fp8 = said("llama3-8b", 24, quantization="fp8", kv_gib=4, max_num_seqs=64)
    assert "and fewer bits" in fp8["model"], "a GPU that isn't there computes with FP8"


@pytest.mark.parametrize(("device_gib", "settings", "kv", "left"), [
    (24, {"device": "cpu"}, "4.00 GiB",
     ": without --kv-gib, KV takes 40% of a CPU's free memory, and at most 4.00 GiB"),
    (7, {"device": "cpu", "dtype": "bfloat16"}, "2.80 GiB",
     ": without --kv-gib, KV takes 40% of a CPU's free memory, and at most 4.00 GiB"),
    (24, {"device": "cpu", "kv_gib": 2}, "2.00 GiB", ""),
    (80, {"kv_tokens": 32768}, "1.00 GiB", ""),
    (80, {}, "64.93 GiB", ": --gpu-memory-utilization is 0.9"),
    (80, {"max_num_seqs": 16, "max_model_len": 2048}, "1.00 GiB",
     ": KV is for 16 sequences (--max-num-seqs) of 2,048 tokens"),
])  # fmt: skip
def test_a_plan_says_why_kv_has_its_size(device_gib: float, settings: dict[str, Any], kv: str, left: str) -> None:
    lines = said("llama3.2-1b", device_gib, **settings)
    assert lines["KV cache"].startswith(f"{kv} = ")
    assert lines["left over"].endswith(f" GiB{left}")


def test_what_a_plan_of_mapped_pages_says() -> None:
    """A token may be in two pages, and has fewer bytes on a rank (vAttention, Table 8)."""
    layers = said("yi-6b", 79, memory="virtual", virtual_layout="layer", virtual_page_kib=64, kv_gib=8, tp=2)
    assert layers["pages"] == (
        "32 layers, full, 4,194,304 bytes for 128 tokens, 65,536 in each of 64 buffers, 8,388,608 on all ranks"
    )
    sliced = said("yi-34b", 80, memory="virtual", virtual_layout="sliced", virtual_page_kib=2048, kv_gib=4, tp=2)
    assert "4,194,304 bytes for 34.13 tokens, 2,097,152 in each of 2 buffers" in sliced["pages"]


def test_plans_in_the_documents() -> None:
    text = (Path(__file__).parents[1] / "docs" / "parallel.md").read_text(encoding="utf-8")
    found = re.findall(r"^    \$ quire (plan .*)\n((?:    .*\n)+)", text, re.MULTILINE)
    assert found
    for command, shown in found:
        args = parse_arguments(command.split())
        assert "".join(f"    {line}\n" for line in describe_memory_plan(config_from(args), args.device_gib)) == shown


@pytest.mark.parametrize("part", [Shard(1, 4), Shard(0, 2, 1, 2), Shard(1, 4, 0, 1, True)], ids=str)
@pytest.mark.parametrize("name", ["llama3-8b", "jamba-52b", "gemma-2-9b"])
def test_a_ranks_weights_in_fp8_to_the_byte(name: str, part: Shard) -> None:
    """With their scales; weights that are not quantized have two bytes."""
    config = named_config(name)
    made = create_fp8_model(config, torch.bfloat16, torch.device("meta"), FP8_ON_LOAD, part)
    held = sum(weight.nbytes for weight in made.parameters())
    for module in made.modules():
        held += sum(getattr(module, scales).nbytes for scales in scale_attributes(module).values()
                    if getattr(module, scales) is not None)  # fmt: skip
    plain = sum(
        weight.nbytes
        for weight in resolve_model_class(config)(config, torch.bfloat16, torch.device("meta"), part).parameters()
    )
    assert held == plain - saved_bytes(config, FP8_ON_LOAD, 2, part)


@pytest.mark.parametrize(("name", "settings", "cause", "remedy"), [
    ("qwen2-7b", {"tp": 8}, "--tp is 8, which doesn't divide the model: it has 28 heads, 4 heads of keys, "
     "intermediate_size 18944", "Use 1, 2 or 4"),
    ("opt-66b", {"tp": 5}, "--tp is 5, which doesn't divide the model: it has 72 heads, 72 heads of keys, ffn_dim "
     "36864", "Use 1, 2, 3, 4, 6, 8, 9, 12, 18, 24 or 36"),
    ("gpt2-xl", {"tp": 2}, "it has 25 heads", "Use 1, 5 or 25"),
    ("llama3-70b", {"tp": 63}, "64 heads, 8 heads of keys", "Use 1, 2, 4, 8, 16 or 32"),  # 64 ranks there can't be
    ("jamba-52b", {"tp": 3}, "it has 32 heads, 8 heads of keys, intermediate_size 14336, mamba_expand times "
     "hidden_size 8192", "Use 1, 2, 4, 8, 16 or 32"),
    ("mamba-2.8b", {"tp": 3}, "--tp is 3, which doesn't divide the model: it has expand times hidden_size 5120",
     "divides them"),
    ("llama3-70b", {"tp": 2}, "65.71 GiB of weights", "model"),
    ("mixtral-8x7b", {"tp": 3, "expert_parallel": True}, "it has 32 heads, 8 heads of keys", "Use 1, 2, 4 or 8"),
    ("mixtral-8x7b", {"tp": 16, "expert_parallel": True}, "--tp is 16, and --expert-parallel divides 8 experts",
     "Use a --tp of at most 8, or leave --expert-parallel out"),
])  # fmt: skip
def test_refused(name: str, settings: dict[str, object], cause: str, remedy: str) -> None:
    with pytest.raises(StartupError, match=re.escape(cause)) as raised:
        said(name, 40, **settings)
    assert remedy in raised.value.remedy


@pytest.mark.parametrize("gib", ["0", "-1", "nan", "inf"])
def test_sizes_that_no_device_has(gib: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model-config", "opt-125m", "--device-gib", gib]) == 2
    assert f"--device-gib is {float(gib)}. It must be above 0" in capsys.readouterr().err


def test_the_flag_is_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-config", "llama3-8b", "--tp", "2", "--device-gib", "24", "--kv-gib", "8"]
    assert main(["plan", *flags]) == 0
    assert "8.00 GiB of KV = the same 65,536 tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse_arguments(["serve", *flags])
    assert "Unknown argument '--device-gib'" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_here_names_the_flag_for_other_devices() -> None:
    with pytest.raises(StartupError) as raised:
        describe_memory_plan(EngineConfig.of(model_config="opt-175b", device="cpu"))
    assert raised.value.remedy.endswith("or --device-gib to plan for another device")
    with pytest.raises(StartupError) as raised:
        describe_memory_plan(EngineConfig.of(model_config="opt-175b"), device_gib=80.0)
    assert "--device-gib" not in raised.value.remedy
