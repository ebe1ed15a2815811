"""The memory plan, by hand: sizes given and fitted, lengths cut, and what is said when it doesn't fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.protocol.model_spec import LayerSpec, ModelSpec, VisionSpec, max_parts_per_step
from quire.startup import memory_plan
from quire.startup.memory_plan import GIB, MemoryPlan, activation_bytes, plan_memory

# 4 layers x 2 (keys, values) x 8 heads x 64 numbers x 2 bytes = 8192 bytes a token
SPEC = ModelSpec(
    "llama", (LayerSpec(8, 64),) * 4, vocab_size=1000, max_len=2048, hidden=512, heads=8, intermediate=1024,
    parameters=50_000_000,
)  # fmt: skip
TOKEN, WEIGHTS = 8192, 100_000_000


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """Bytes in all and free of the devices of a made-up machine; a test may change them."""
    sizes = {"cpu": (16 * GIB, 8 * GIB), "cuda": (80 * GIB, 79 * GIB)}
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: sizes[device])
    return sizes


def planned(device: str = "cpu", spec: ModelSpec = SPEC, **settings: Any) -> MemoryPlan:
    return plan_memory(EngineConfig(**settings), spec, "test", "bfloat16", 2, device)


def test_a_size_in_gib() -> None:
    plan = planned(kv_gib=0.5)
    assert (plan.kv_tokens, plan.kv_bytes, plan.token_bytes) == (65536, GIB // 2, TOKEN)
    assert (plan.weight_bytes, plan.max_len, plan.limit_note) == (WEIGHTS, 2048, "")
    assert (plan.device_bytes, plan.free_bytes) == (16 * GIB, 8 * GIB)
    assert planned(kv_gib=100_000 * TOKEN / GIB, page_size=1024).kv_tokens == 97 * 1024  # whole pages of what is given
    assert planned(kv_gib=2 * TOKEN / GIB, page_size=1).kv_tokens == 2  # and no less
    rounded = planned(kv_tokens=2049, page_size=16)  # up to pages
    assert (rounded.kv_tokens, rounded.kv_bytes) == (2064, 2064 * TOKEN)
    assert planned(kv_tokens=2048, page_size=16).kv_tokens == 2048


def test_a_cpu_gives_a_share_of_what_is_free(machine: dict[str, tuple[int, int]]) -> None:
    machine["cpu"] = (16 * GIB, 5 * GIB)
    assert planned().kv_tokens == 2 * GIB // TOKEN  # 40 %
    machine["cpu"] = (64 * GIB, 50 * GIB)
    assert planned(max_num_seqs=1000).kv_tokens == 4 * GIB // TOKEN  # and no more than that
    assert planned(max_num_seqs=3).kv_tokens == 3 * 2048  # what can be used at all
    assert planned(max_num_seqs=3, max_model_len=512).kv_tokens == 3 * 512


def test_a_gpu_gives_what_others_and_the_model_leave_of_its_share() -> None:
    plan = planned("cuda", max_num_seqs=60000, gpu_memory_utilization=0.5)
    room = 40 * GIB - 1 * GIB - WEIGHTS - plan.activation_bytes
    assert plan.kv_tokens == room // TOKEN // 16 * 16
    assert planned("cuda", max_num_seqs=2).kv_tokens == 2 * 2048


def test_batches_of_a_gpu_are_larger_unless_given() -> None:
    made = [EngineConfig(**given).with_device_defaults(device) for device, given in
            (("cuda", {}), ("cpu", {}), ("cuda", {"max_num_seqs": 3, "max_num_batched_tokens": 64}))]  # fmt: skip
    assert [(one.max_num_seqs, one.max_num_batched_tokens) for one in made] == [(1024, 8192), (256, 2048), (3, 64)]


def test_sequences_are_cut_to_the_memory_and_it_is_said() -> None:
    plan = planned(kv_tokens=1000, page_size=16)
    assert plan.max_len == 1008
    assert "2,048" in plan.limit_note
    assert "--kv-gib" in plan.limit_note
    assert any("1,008 tokens a sequence (the model allows 2,048" in line for line in plan.to_lines())
    assert planned(kv_tokens=1000, max_model_len=900).max_len == 900


LARGE = {"spec": dataclasses.replace(SPEC, parameters=70_000_000_000)}
FULL = r"95\.4 MiB of weights, [\d.]+ [MG]iB of activations and 8\.00 GiB of KV cache don't fit into 8\.00 GiB on cpu"
SMALLER = "Use a smaller --kv-gib, --max-num-batched-tokens or model"
ON_A_GPU = f"{SMALLER}, or a larger --gpu-memory-utilization"


@pytest.mark.parametrize(
    ("settings", "cause", "remedy"),
    [
        (
            {"max_model_len": 4096},
            "--max-model-len is 4096, but the model was made for 2048 tokens",
            "Use at most 2048",
        ),
        (
            {"max_model_len": 2000, "kv_tokens": 1000},
            "--max-model-len is 2000, but the KV cache holds 1008 tokens",
            "Use --max-model-len 1008 or less, or a larger --kv-gib",
        ),
        ({"kv_gib": 8.0}, FULL, SMALLER),
        ({"kv_tokens": 8 * GIB // TOKEN}, FULL, SMALLER),
        (LARGE, r"130\.39 GiB of weights.* on cpu", SMALLER),
        ({**LARGE, "device": "cuda"}, r"130\.39 GiB of weights.* on cuda", ON_A_GPU),
        ({"device": "cuda", "free": 4 * GIB}, r"0\.0 MiB on cuda", ON_A_GPU),  # others have filled it
        ({"kv_gib": TOKEN / GIB, "page_size": 1}, "out of memory", SMALLER),
    ],
)
def test_what_does_not_fit(
    machine: dict[str, tuple[int, int]], settings: dict[str, Any], cause: str, remedy: str
) -> None:
    given = dict(settings)
    machine["cuda"] = (80 * GIB, given.pop("free", 79 * GIB))
    with pytest.raises(StartupError, match=cause) as raised:
        planned(**given)
    assert raised.value.remedy == remedy


def test_a_plan_is_one_screen_and_says_when_it_does_not_add_up() -> None:
    plan = planned(kv_gib=0.5)
    lines = plan.to_lines()
    assert len(lines) == 8
    assert "65,536 tokens of 8,192 bytes, in pages of 16" in lines[4]
    assert "32.0 sequences of that length, 256 sequences at most" in lines[7]
    assert "this does not fit" not in "".join(lines)
    assert "this does not fit" in "".join(plan._replace(free_bytes=GIB // 4).to_lines())


CONFIG = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=256)


def test_activations_grow_with_what_they_are_made_of() -> None:
    before = activation_bytes(CONFIG, SPEC, 2)
    for larger in ({"max_num_batched_tokens": 4096}, {"max_num_seqs": 512}):
        assert 0 < before < activation_bytes(dataclasses.replace(CONFIG, **larger), SPEC, 2), larger
    layers = (LayerSpec(16, 64),) * 4
    for larger in ({"hidden": 1024}, {"intermediate": 4096}, {"vocab_size": 32000}, {"layers": layers}):
        assert before < activation_bytes(CONFIG, dataclasses.replace(SPEC, **larger), 2), larger
    assert before < activation_bytes(CONFIG, SPEC, 4)
    config = EngineConfig().with_device_defaults("cpu")  # each rotary embedding has a table
    one, two = (activation_bytes(config, dataclasses.replace(SPEC, num_rope_tables=count), 2) for count in (1, 2))
    assert two - one == 2048 * 64 * 4


def test_kernels_for_cpus_gather_no_keys() -> None:
    """What each part of a context gives takes less, and grows with sequences, not with contexts."""
    config = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=8)
    gathered, native = config, dataclasses.replace(config, attention="native")
    longer = dataclasses.replace(SPEC, max_len=4096)
    saved = [activation_bytes(gathered, spec, 2) - activation_bytes(native, spec, 2) for spec in (SPEC, longer)]
    assert 0 < saved[0] < saved[1]
    more = dataclasses.replace(native, max_num_seqs=16)
    parts = 8 * SPEC.heads * 16 * (64 + 2) * 4
    assert activation_bytes(more, SPEC, 2) - activation_bytes(native, SPEC, 2) == parts


def test_a_step_encodes_what_its_time_and_its_tokens_allow() -> None:
    """`parts_a_step` by hand: 8,192 tokens are the rows of 32 parts of 256, and one picture more may be among them in
    part, 13 more; a budget that few parts fill; pictures whose rows take no places; at least one."""
    assert max_parts_per_step(8192, 41, 256, 3328) == 45
    assert max_parts_per_step(1024, 41, 256, 3328) == 17  # not the 24 that take as long
    assert max_parts_per_step(512, 41, 256, 3328) == 12
    assert max_parts_per_step(8192, 566, 0, 6404) == 14
    assert max_parts_per_step(16, 41, 256, 3328) == 1


def test_pictures_take_what_a_step_encodes_and_what_it_leaves() -> None:
    """Both in numbers of 2 bytes, as they are said, or of 4; and the rows of a picture."""
    before = activation_bytes(CONFIG, SPEC, 2)
    eyes = VisionSpec(512, 100, 1, activations=10**7, part_tokens=500, part_bytes=10**5, partial_image_bytes=10**6)
    seeing = dataclasses.replace(SPEC, vision=eyes)
    assert activation_bytes(CONFIG, seeing, 2) - before == 10**7 + 4 * 10**5 + 10**6 + 512 * 100 * 2
    assert activation_bytes(CONFIG, seeing, 4) - activation_bytes(CONFIG, SPEC, 4) == 2 * (
        activation_bytes(CONFIG, seeing, 2) - before
    )
    # Fewer rows leave more memory: as many parts are planned as a step encodes.
    eyes = VisionSpec(512, 100, 1, part_tokens=10, part_bytes=10**5, part_embeds=50)
    some, all_of_them = (
        activation_bytes(CONFIG, dataclasses.replace(SPEC, vision=one), 2)
        for one in (eyes, dataclasses.replace(eyes, part_embeds=0))
    )
    assert all_of_them - some == (204 - 43) * 10**5
