"""Layers with a running state: pages that are states, beside pages of tokens, in every arrangement that is offered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize, plan_page_layout, state_interval, tokens_for_bytes
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.model_spec import LayerSpec, ModelSpec, StateTensor
from quire.protocol.sequence import Sequence
from quire.startup import memory_plan
from quire.startup.memory_plan import GIB, describe_pages, plan_memory

KIB, MIB = 2**10, 2**20
CONV = StateTensor("conv", (8192, 3), 2)
MAMBA = LayerSpec(0, 0, state_tensors=(CONV, StateTensor("ssm", (8192, 16), 2)))
ATTENTION = LayerSpec(8, 128)
STATE = 28 * 311_296
"""Bytes of what Jamba 52B keeps of a sequence, in bf16."""


def model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("jamba", layers, 65536, 262_144, 4096, 32, 14336, 10**6)


def jamba() -> ModelSpec:
    """The layers of Jamba 52B: every eighth is attention."""
    return model(*(ATTENTION if i % 8 == 4 else MAMBA for i in range(32)))


def settings(**given: Any) -> EngineConfig:
    return EngineConfig.of(**{"max_num_seqs": 8, "max_num_batched_tokens": 2048, "swap_gib": 0, **given})


def geometry(spec: ModelSpec, tokens: int = 8192, **given: Any) -> KVCacheConfig:
    return build_memory(settings(**given), spec, MemorySize(tokens, tokens, 2)).kv_config


def test_a_page_is_the_states_of_its_layers() -> None:
    states, tokens = geometry(jamba()).groups
    assert (states.kind, len(states.layers), states.token_bytes) == ("state", 28, STATE)
    assert (states.run_tokens, states.run_pages, states.table_width) == (512, 1, 16)
    assert [states.payload_of_page(page, tokens) for page, tokens in ((0, 0), (1, 512), (1, 513))] == [0, 0, STATE]
    assert (tokens.kind, tokens.run_tokens, tokens.table_width) == ("full", 16, 512)
    assert states.page_bytes == 8912896  # 2.26 % of padding
    assert geometry(jamba(), state_tokens=96).groups[0].table_width == 86


@pytest.mark.parametrize("gib", [1, 8, 9, 20, 80, 300])
@pytest.mark.parametrize("chunk", [512, 8192])
def test_states_are_stored_as_often_as_a_step_has_room_for(gib: int, chunk: int) -> None:
    """The fewest of 16, 32, ..., 512 tokens for which the states of `chunk` tokens take a sixteenth of the memory."""
    config = settings(max_num_batched_tokens=chunk)
    fitting = [run for run in (16, 32, 64, 128, 256) if chunk // run * STATE * 16 <= gib * GIB]
    layout = plan_page_layout(config, jamba(), 2, gib * GIB)
    [states] = [one for one in layout.specs if one.is_state]
    assert states.page_tokens == min(fitting, default=512)
    fixed = plan_page_layout(settings(max_num_batched_tokens=chunk, state_tokens=512), jamba(), 2, gib * GIB)
    assert layout.max_tokens(gib * GIB) == fixed.max_tokens(gib * GIB), "room is planned for one of 512 tokens"
    for given in ({"page_sizes": "own"}, {"state_tokens": 512}):
        assert state_interval(settings(max_num_batched_tokens=chunk, **given), jamba(), gib * GIB) == 512
    assert state_interval(config, model(MAMBA), gib * GIB) == 512, "alone they share the memory with nothing"


def test_uniform_memory_has_states_apart() -> None:
    """One for each sequence that may run, for good: its layers of tokens have the rest of the pool."""
    spec, config = jamba(), settings(memory="uniform")
    tokens, states = geometry(spec, memory="uniform").groups
    assert (states.kind, states.table_width, len(states.ids)) == ("state", 1, 9)
    assert (tokens.kind, tokens.run_tokens, set(tokens.ids) & set(states.ids)) == ("full", 16, set())
    pool = 2**30
    assert tokens_for_bytes(config, spec, 2, pool) == (pool - 9 * STATE) // (16 * 4 * 4096) * 16
    memory = build_memory(config, spec, MemorySize(8192, 8192, 2))
    assert memory.fits([1000] * 8)
    assert memory.fits([8192])
    assert not memory.fits([100] * 9)


def test_without_prefixes_a_sequence_has_one_state() -> None:
    """Nothing is found again: no checkpoint is kept. What sequences don't need of the pool attention gets."""
    states = geometry(jamba(), enable_prefix_caching=False).groups[0]
    assert (states.table_width, states.run_tokens) == (1, 262_144)
    memory = build_memory(settings(enable_prefix_caching=False), jamba(), MemorySize(8192, 8192, 2))
    assert memory.fits([1000] * 8)
    seq = Sequence(1, list(range(5000)))
    assert memory.admit([seq], 2048)
    for end in (2048, 4096, 5000):
        assert memory.grow(seq, end)
        seq.computed = seq.planned = end
        memory.commit(seq)
    assert [len(table) for table in memory.get_placement(seq).tables] == [1, 313]
    with_prefixes = geometry(jamba(), enable_prefix_caching=False, prefix_tokens=512).groups[0]
    assert with_prefixes.run_tokens == 512


def test_nothing_but_states() -> None:
    """A Mamba model: no token takes anything, and what a pool holds is states."""
    spec = model(*[MAMBA] * 28)
    assert tokens_for_bytes(settings(), spec, 2, 100 * STATE + 5) == 100 * 512
    [group] = geometry(spec).groups
    assert (group.page_bytes, group.kind, len(group.ids)) == (STATE, "state", 16)
    memory = build_memory(settings(), spec, MemorySize(8192, 8192, 2))
    assert memory.fits([8192])
    assert memory.fits([512] * 8)
    [apart] = geometry(spec, memory="uniform").groups
    assert (apart.table_width, len(apart.ids)) == (1, 9)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(
            ({"memory": memory}, f"--memory is {memory}, and .* keep a running state.*Use --memory paged$")
            for memory in ("virtual", "orca-max", "ft")
        ),
        ({"memory": "uniform", "prefix_tokens": 64}, "--prefix-tokens is 64, and --memory is uniform"),
        ({"page_sizes": "gcd"}, "--page-sizes is gcd, and a state is no number of tokens"),
        ({"state_tokens": 100}, "--state-tokens is 100, and pages hold 16 tokens"),
        ({"state_tokens": 0}, "--state-tokens is 0"),
        ({"state_tokens": 65_552}, "--state-tokens is 65552"),
    ],
)
def test_settings_that_are_none_for_states_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        geometry(jamba(), **given)


@pytest.mark.parametrize("shape", [(5, 3), (8, 0), ()])
def test_states_that_no_access_takes_are_refused(shape: tuple[int, ...]) -> None:
    part = CONV._replace(shape=shape)
    with pytest.raises(StartupError, match=r"a layer's state 'conv' is .* no multiple of the 16 bytes"):
        geometry(model(LayerSpec(0, 0, state_tensors=(part,)), ATTENTION))


def test_the_plan_says_what_a_sequence_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: (80 * GIB, 79 * GIB))
    config, spec = settings(kv_gib=8, max_num_batched_tokens=8192), jamba()
    plan = plan_memory(config, spec, "jamba", "bfloat16", 2, "cuda")
    assert (plan.token_bytes, plan.state_bytes, plan.max_len) == (4 * 4096, STATE, 262_144)
    assert plan.kv_bytes % 8_912_896 == 0
    states, pages = plan.kv_tokens // 512, -(-plan.kv_tokens // (16 * 34))
    assert (plan.kv_tokens, states + pages) == (253_952, plan.kv_bytes // 8_912_896)
    told = plan.to_lines() + describe_pages(config, spec, 2, plan)
    assert any("8.3 MiB a sequence, however long it is; one after every 256 tokens" in line for line in told)
    assert any(
        "28 layers, state, 8,912,896 bytes for the state after 256 tokens, 2.2% padding" in line for line in told
    )
    assert any("4 layers, full, 262,144 bytes for 16 tokens, 34 in a large page" in line for line in told)
    assert any(line.startswith("requests") and "8 of 1,024 tokens" in line for line in told)
    assert any("80.0 KiB a sequence, however long" in line for line in plan._replace(state_bytes=81_920).to_lines())
    apart = plan_memory(replace(config, memory="uniform"), spec, "jamba", "bfloat16", 2, "cuda")
    told = apart.to_lines() + describe_pages(replace(config, memory="uniform"), spec, 2, apart)
    assert any(line.endswith("8.3 MiB a sequence, however long it is") for line in told)
    assert any("28 layers, state, 8,716,288 bytes for a sequence's state" in line for line in told)
