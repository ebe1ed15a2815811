"""The memory `virtual`: tokens equal transformers' and the paged memory's, whatever the pages, the buffers, the chunks,
the pressure, or what is shared; over pages that the operating system really maps."""

from __future__ import annotations

import gc
from functools import cache

import pytest
from test_equality import (
    FAMILIES,
    GROUPS,
    KINDS,
    MORE,
    SOME,
    Oracle,
    assert_equal,
    assert_same,
    engine_of,
    oracle,  # noqa: F401
    params_of,
    plenty,  # noqa: F401
    prompt_of,
    run_all,
)

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.errors import StartupError
from quire.ipc.engine_loop import EngineLoop
from quire.ipc.messages import EngineExited
from quire.kernels.cpu.library_loader import library
from quire.memory.page_layout import MemorySize
from quire.memory.virtual.virtual_memory import VirtualMemory, choose_virtual_layout, virtual_capacity_tokens
from quire.models import read_spec
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.startup.memory_plan import plan_memory

LAYOUTS = ("layer", "sliced")


def virtual(model: Oracle, **settings: object) -> Engine:
    return engine_of(model, **{"memory": "virtual", "virtual_page_kib": 4} | settings)


def emptied(engine: Engine) -> bool:
    """Nothing is used, and all was given back; what is mapped stays."""
    usage = engine.scheduler.memory.account().usage
    engine.close()
    return usage.used == 0


@pytest.mark.share(8)
@pytest.mark.parametrize("family", FAMILIES | MORE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("budget", "attention"), [(1, "contiguous"), (7, "auto"), (64, "contiguous"), (64, "auto")])
def test_tokens_equal_transformers(oracle, family: str, layout: str, budget: int, attention: str) -> None:  # noqa: F811
    model = oracle(family)
    engine = virtual(model, virtual_layout=layout, max_num_batched_tokens=budget, attention=attention)
    assert_equal(model, engine, model.prompts)
    chosen = "native" if attention == "auto" and library() is not None else "contiguous"
    assert engine.runner.attention == chosen
    assert emptied(engine)


@pytest.mark.parametrize("page", [4, 64, 256, 2048])
@pytest.mark.parametrize("ahead", ["inline", "thread", "off"])
def test_pages_of_every_size(oracle, page: int, ahead: str) -> None:  # noqa: F811
    model = oracle("llama")
    tokens = {4: 512, 64: 4096, 256: 16384, 2048: 131072}[page]
    engine = virtual(
        model, virtual_page_kib=page, virtual_layout="sliced", kv_tokens=tokens, map_ahead=ahead, debug=False
    )
    assert_equal(model, engine, model.prompts)
    mapped = engine.runner.store.mapping_stats
    assert mapped.overlapped == 0 if ahead == "off" else mapped.overlapped > 0 or page > 64
    assert emptied(engine)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_that_read_page_tables_run_over_it_too(oracle, layout: str, attention: str) -> None:  # noqa: F811
    """A paged kernel runs over every memory: here over the pages as they lie one after another."""
    model = oracle("llama")
    engine = virtual(model, virtual_layout=layout, attention=attention)
    assert_equal(model, engine, model.prompts)
    assert emptied(engine)


@cache
def least_tokens(model: Oracle, layout: str) -> int:
    """Room for the largest request alone, and a page."""
    config = EngineConfig.of(
        memory="virtual", virtual_page_kib=4, virtual_layout=layout, max_num_batched_tokens=16, max_num_seqs=32
    )
    spec = read_spec(model.model.config.to_dict())
    asked = [(prompt_of(model, kind), params_of(kind).width) for kind in KINDS]
    tokens = 128
    while True:
        memory = VirtualMemory.build(config, spec, MemorySize(tokens, 128, 4))
        if all(memory.fits([len(prompt) + SOME] * width, len(prompt)) for prompt, width in asked):
            return tokens
        tokens += memory.groups[0].run_tokens


@pytest.mark.share(8)
@pytest.mark.parametrize("policy", ["swap", "recompute"])
@pytest.mark.parametrize(
    ("family", "layout"), [("llama", "sliced"), ("llama", "layer"), ("mistral", "sliced"), ("gpt2", "sliced")]
)
def test_requests_of_all_kinds_survive_preemption(oracle, plenty, family: str, layout: str, policy: str) -> None:  # noqa: F811
    """n, best_of, beams and their forks, in memory for the largest of them alone."""
    model = oracle(family)
    hurt, preempted = dict.fromkeys(KINDS, 0), 0
    for turn, caching in ((0, True), (4, False)):
        engine = virtual(
            model, virtual_layout=layout, kv_tokens=least_tokens(model, layout), preemption=policy,
            enable_prefix_caching=caching, max_num_batched_tokens=16, max_num_seqs=32,
        )  # fmt: skip
        ran = run_all(engine, model, [(0, kind) for kind in [*KINDS][turn:] + [*KINDS][:turn]])
        assert_same(ran, plenty(family))
        hurt = {kind: hurt[kind] + ran.preemptions[kind] for kind in KINDS}
        preempted += engine.scheduler.preemption_counts[policy]
        assert emptied(engine)
    assert any(hurt[kind] for kind in GROUPS), hurt
    assert preempted > 0


def test_a_small_memory_gets_small_pages(oracle) -> None:  # noqa: F811
    """In memory for 192 tokens, a sequence of 114 fits."""
    model = oracle("llama")
    engine = engine_of(model, memory="virtual", kv_tokens=192)
    assert_equal(model, engine, model.prompts)
    memory = engine.scheduler.memory
    assert memory.fits([114])
    assert memory.kv_config.groups[0].page_bytes // memory.kv_config.groups[0].parts < 2**16
    assert emptied(engine)


def test_buffers_where_nothing_is_said() -> None:
    """On a GPU pages of 2 MiB over all layers. On a CPU 48 slots, and the first layout and page size with room for two
    of the longest sequences and at most 32,000 mappings: 49 slots, 16 buffers, 65 pages of 64 KiB are too many."""
    gpu, cpu = (EngineConfig(memory="virtual").with_device_defaults(device) for device in ("cuda", "cpu"))
    assert (gpu.experiment.virtual_layout, gpu.experiment.virtual_page_kib) == ("sliced", 2048)
    assert cpu.max_num_seqs == 48
    spec = ModelSpec("eight", (LayerSpec(2, 64),) * 8, 100, 4096, 64, 2, 64, 1000)
    for tokens, longest, wanted in (
        (4096, 96, ("layer", 64)), (2048, 96, ("sliced:4", 64)), (600, 96, ("sliced", 64)), (192, 96, ("sliced", 32)),
        (20_000, 8192, ("layer", 128)),
    ):  # fmt: skip
        assert choose_virtual_layout(cpu, spec, MemorySize(tokens, longest, 4)) == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"table_scope": "layer"}, r"--table-scope is layer, and --memory is virtual"),
        ({"virtual_layout": "sideways"}, r"'sideways' is no layout of virtual memory"),
        ({"virtual_page_kib": 3}, r"--virtual-page-kib is 3"),
        ({"virtual_page_kib": 6}, r"6,?144"),
        ({"page_sizes": "own"}, r"--page-sizes is own, and --memory is virtual"),
        ({"virtual_page_kib": 2048}, r"--memory virtual has 0 bytes of pages"),
        ({"map_ahead": "never"}, r"--map-ahead is 'never'"),
        ({"max_num_seqs": 60000}, r"mappings, more than half of vm.max_map_count"),
        ({"memory": "paged", "attention": "contiguous"}, r"--attention is contiguous.*the memory is paged"),
    ],
)
def test_what_cannot_be_is_refused_at_start(oracle, settings: dict[str, object], message: str) -> None:  # noqa: F811
    with pytest.raises(StartupError, match=message) as raised:
        virtual(oracle("llama"), **settings)
    assert raised.value.remedy


def test_an_engine_that_dies_says_why_and_gives_its_pages_back(oracle, monkeypatch) -> None:  # noqa: F811
    """Frames of the failure hold tensors over the pages."""
    engine = virtual(oracle("llama"), debug=False, attention="contiguous")
    store = engine.runner.store
    monkeypatch.setattr(type(engine.runner.backend), "attend", lambda *_: 1 // 0)
    told: list[object] = []
    host = EngineLoop(engine, lambda front, message: told.append(message), 60.0)
    engine.add("one", [1, 2, 3], params_of("greedy"))
    driver = store.driver
    del store
    ended = host.run()
    assert isinstance(ended, ZeroDivisionError)
    assert isinstance(told[-1], EngineExited)
    assert told[-1].error is ended
    assert driver.physical() == 0


@pytest.mark.parametrize("layout", ["sliced", "sliced:3", "layer"])
def test_the_plan_says_how_many_tokens_fit(layout: str) -> None:
    """Five layers don't fill two buffers of three."""
    spec = ModelSpec("five", (LayerSpec(2, 64),) * 5, 100, 4096, 64, 2, 64, 1000)
    config = EngineConfig.of(
        memory="virtual", virtual_layout=layout, virtual_page_kib=4, max_num_seqs=8, max_num_batched_tokens=64
    )
    memory = VirtualMemory.build(config, spec, MemorySize(10_000, 100, 4))
    tokens = virtual_capacity_tokens(memory.kv_config)
    assert tokens <= 10_000
    assert tokens > (8_000 if layout == "sliced:3" else 9_800)
    group = memory.kv_config.groups[0]
    assert group.num_pages(tokens) <= len(group.ids) < group.num_pages(tokens) + 2
    unlike = ModelSpec("two kinds", (LayerSpec(2, 64), LayerSpec(16, 64, window=512)), 100, 4096, 64, 16, 64, 1000)
    config = EngineConfig(
        memory="virtual", kv_gib=0.25, max_num_seqs=8, max_num_batched_tokens=64
    ).with_device_defaults("cpu")
    plan = plan_memory(config, unlike, "two kinds", "float32", 4, "cpu")
    memory = VirtualMemory.build(config, unlike, MemorySize(plan.kv_tokens, plan.max_len, 4))
    assert 0.97 * 2**28 <= memory.kv_config.bytes <= 2**28, "nothing is padded to another group's size"


def test_an_engine_that_is_dropped_gives_its_pages_back(oracle) -> None:  # noqa: F811
    model = oracle("llama")
    engine = virtual(model)
    assert_equal(model, engine, model.prompts[:2])
    driver = engine.runner.store.driver
    assert driver.physical() > 0
    del engine
    gc.collect()
    assert driver.physical() == 0
