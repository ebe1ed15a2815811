"""The page plan of a model whose layers are unlike, by hand: what a size in bytes holds, what one sequence may have,
what `quire plan` says of it, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.memory.build import build_memory, max_seq_len
from quire.memory.page_layout import MemorySize, plan_page_layout, tokens_for_bytes
from quire.memory.paged import PagedMemory
from quire.models import read_spec
from quire.models.named_configs import CONFIGS, named_config
from quire.protocol.images import ImageItem
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sequence import Sequence
from quire.startup import memory_plan
from quire.startup.memory_plan import GIB, MemoryPlan, describe_pages, plan_memory
from quire.worker.cache_views import check_kv_cache_config

MINISTRAL = read_spec(named_config("ministral-8b"))
PAGES, LARGE = (16 * 9 * 4096, 16 * 27 * 4096), 16 * 27 * 4096


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: (141 * GIB, 140 * GIB))


def settings(**given: Any) -> EngineConfig:
    return EngineConfig.of(**{"max_num_batched_tokens": 8192, "swap_gib": 0, **given})


def planned(spec: ModelSpec = MINISTRAL, **given: Any) -> MemoryPlan:
    return plan_memory(settings(**given), spec, "test", "bfloat16", 2, "cuda")


def many(spec: ModelSpec, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    return replace(spec, layers=layers, parameters=10**6)


def test_a_size_in_bytes_is_the_pools() -> None:
    """Large pages, whatever each layer type has of them; as tokens, what every layer holds at once."""
    size = 40 * GIB + LARGE
    plan = planned(kv_gib=size / GIB)
    assert plan.kv_bytes == size // LARGE * LARGE
    assert plan.token_bytes == 36 * 4096
    pages = plan.kv_tokens // 16
    assert -(-pages // 3) + pages <= plan.kv_bytes // LARGE < -(-(pages + 1) // 3) + pages + 1
    config = settings().with_device_defaults("cuda")
    memory = build_memory(config, MINISTRAL, MemorySize(plan.kv_tokens, plan.max_len, 2, plan.kv_bytes))
    assert (memory.kv_config.bytes, memory.kv_config.large_bytes) == (plan.kv_bytes + LARGE, LARGE)
    assert tuple(group.page_bytes for group in memory.kv_config.groups) == PAGES
    assert memory.account().usage.total == plan.kv_bytes
    assert memory.kv_config.tokens_in_large_pages() == plan.kv_tokens
    plan = planned(kv_tokens=100_000)
    assert (plan.kv_tokens, plan.kv_bytes) == (100_000, (-(-6250 // 3) + 6250) * LARGE)


def test_the_longest_sequence_is_what_admission_allows() -> None:
    """What an L4 has left for KV beside weights of 8 bits: uniform pages hold three fourths of the model's length."""
    uniform, ours = planned(kv_gib=12.3, memory="uniform"), planned(kv_gib=12.3)
    assert 89_000 < uniform.max_len < 90_000
    assert uniform.max_len == uniform.kv_tokens
    assert (ours.max_len, ours.limit_note) == (131_072, "")
    assert ours.kv_tokens < 90_000
    tight = planned(kv_gib=8)
    config = settings().with_device_defaults("cuda")
    memory = build_memory(config, MINISTRAL, MemorySize(tight.kv_tokens, tight.max_len, 2, tight.kv_bytes))
    assert memory.fits([tight.max_len])
    larger = build_memory(config, MINISTRAL, MemorySize(tight.kv_tokens, 131_072, 2, tight.kv_bytes))
    assert not larger.fits([tight.max_len + 1])
    assert tight.kv_tokens < tight.max_len < 131_072
    assert max_seq_len(config, MINISTRAL, MemorySize(tight.kv_tokens, 10, 2, tight.kv_bytes)) == 10
    with pytest.raises(StartupError, match=f"the KV cache holds {tight.max_len} tokens"):
        planned(kv_gib=8, max_model_len=131_072)


def test_bytes_as_tokens_where_they_are_simulated() -> None:
    config = settings().with_device_defaults("cuda")
    assert tokens_for_bytes(config, MINISTRAL, 2, 40 * GIB) == planned(kv_gib=40).kv_tokens
    assert tokens_for_bytes(replace(config, memory="uniform"), MINISTRAL, 2, 40 * GIB) == 40 * GIB // (36 * 4096)
    padded = tokens_for_bytes(EngineConfig.of(**config.flat() | {"page_sizes": "max"}), MINISTRAL, 2, 40 * GIB)
    assert padded == 40 * GIB // (2 * LARGE) * 16


def requests(line: str) -> dict[int, int]:
    """Of "requests  5 of 1,024 tokens, ...": how many, by their length."""
    parts = line.split(maxsplit=1)[1].split(", ")
    return {int(part.split()[2].replace(",", "")): int(part.split()[0].replace(",", "")) for part in parts}


def test_what_a_plan_says() -> None:
    config, plan = settings(kv_gib=40).with_device_defaults("cuda"), planned(kv_gib=40)
    full, window, large, fit, *compared = describe_pages(config, MINISTRAL, 2, plan)
    assert "9 layers, full, 589,824 bytes for 16 tokens, 3 in a large page" in full
    assert "27 layers, window of 32,768, 1,769,472 bytes for 16 tokens, 1 in a large page" in window
    assert "24,272 of 1,769,472 bytes" in large
    uniform = replace(config, memory="uniform")
    (only, other) = describe_pages(uniform, MINISTRAL, 2, planned(kv_gib=40, memory="uniform"))
    assert "36 layers, full, 2,359,296 bytes for 16 tokens" in only
    ours, theirs = requests(fit), requests(other)
    assert list(ours) == list(theirs) == [1024, 8192, 32768, 131072]
    assert (ours[131072], theirs[131072]) == (4, 2)
    assert all(ours[length] >= theirs[length] for length in ours)
    assert [line.split("; ")[1] for line in compared] == ["uniform pages 7,282 (1.0 x)"] * 2, "all within the window"
    (group, _) = describe_pages(config, many(MINISTRAL, (LayerSpec(8, 128),) * 4), 2, plan)
    assert group.startswith("pages")
    assert describe_pages(replace(config, memory="orca-max"), MINISTRAL, 2, plan) == []
    padded = describe_pages(
        EngineConfig.of(**config.flat() | {"page_sizes": "max"}), MINISTRAL, 2, planned(kv_gib=40, page_sizes="max")
    )
    assert "66.7% padding" in padded[0]


@pytest.mark.parametrize(
    ("way", "together", "longest"),
    [
        ({"page_sizes": "lcm"}, 4, 131_072),
        ({"page_sizes": "gcd"}, 4, 131_072),
        ({"page_sizes": "max"}, 2, 69_712),
        ({"page_sizes": "own"}, 2, 89_552),
        ({"memory": "uniform"}, 2, 89_552),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_what_fits_by_page_sizes(way: dict[str, str], together: int, longest: int) -> None:
    """Requests of 131,072 tokens at once in 40 GiB, and the longest sequence in 12.3 GiB."""
    config, plan = settings(kv_gib=40, **way).with_device_defaults("cuda"), planned(kv_gib=40, **way)
    memory = build_memory(config, MINISTRAL, MemorySize(plan.kv_tokens, plan.max_len, 2, plan.kv_bytes))
    assert memory.fits([131_072] * together)
    assert not memory.fits([131_072] * (together + 1))
    assert planned(kv_gib=12.3, **way).max_len == longest


def test_sets_of_layers_of_one_size() -> None:
    sheets = plan_page_layout(settings(page_sizes="gcd"), MINISTRAL, 2)
    assert [(len(sheet.layers), sheet.page_bytes) for sheet in sheets.specs] == [(9, PAGES[0])] * 4
    assert sheets.large_bytes == 0
    odd = many(MINISTRAL, (LayerSpec(3, 32),) * 5 + (LayerSpec(2, 32, 8),) * 7)
    with pytest.raises(StartupError, match="no sets of layers have equal bytes: 5 of 384 bytes a token, 7 of 256"):
        plan_page_layout(settings(page_sizes="gcd"), odd, 2)


def test_a_large_page_beyond_its_limit_is_refused_with_the_padded_plan() -> None:
    layers = tuple(LayerSpec(1, dim, window) for dim, window in ((254, None), (510, 5), (1018, 6), (2042, 7)))
    with pytest.raises(StartupError, match=r"a large page would have [\d,]+ bytes \([\d,]+ with pages that are padded"):
        planned(many(MINISTRAL, layers), kv_gib=1)
    config = settings(page_sizes="max")
    assert plan_page_layout(config, many(MINISTRAL, layers), 2).large_bytes == 0


@pytest.mark.parametrize(("name", "padding"), [("lfm2-1.2b", 0), ("granite-4-h-small", 1e-3), ("nemotron-h-8b", 1e-3)])
def test_large_pages_of_states(name: str, padding: float) -> None:
    """A large page has at least one state, however large, and few bytes that hold nothing."""
    spec = read_spec(named_config(name))
    config = settings(max_num_seqs=64, max_num_batched_tokens=2048)
    found = plan_page_layout(config, spec, 2, 40 * GIB)
    for page_spec, count in zip(found.specs, found.small_pages_per_large, strict=True):
        assert found.large_bytes == count * page_spec.page_bytes
        held = page_spec.token_bytes * (1 if page_spec.is_state else page_spec.page_tokens)
        assert page_spec.page_bytes <= (1 + padding) * held
    states = sum(spec.layers[i].state_bytes for i in spec.state_layers)
    assert found.large_bytes <= max(80 * 2**20, (1 + padding) * states)


def test_fewer_large_pages_than_layer_types_are_refused() -> None:
    with pytest.raises(StartupError, match=r"1,769,472 bytes, and 2,097,152 bytes of KV.* are 1 of them") as raised:
        planned(kv_gib=1 / 512)
    assert "--page-sizes max" in raised.value.remedy
    with pytest.raises(StartupError, match="each of 2 groups of layers needs one"):
        build_memory(settings().with_device_defaults("cpu"), MINISTRAL, MemorySize(16, 16, 2, LARGE))


def test_pages_that_no_view_of_16_bytes_takes_are_refused() -> None:
    """8 heads of 3 numbers of 2 bytes, of one token: 48 bytes of keys. Of 9 they are 54."""
    for heads, taken in ((8, True), (9, False)):
        spec = many(MINISTRAL, (LayerSpec(heads, 3), LayerSpec(heads, 3), LayerSpec(heads, 3, window=9)))
        memory = build_memory(settings(page_size=1).with_device_defaults("cpu"), spec, MemorySize(64, 16, 2))
        assert memory.kv_config.large_bytes > 0
        if taken:
            check_kv_cache_config(memory.kv_config, spec)
        else:
            with pytest.raises(StartupError, match="of keys of 54 bytes a layer"):
                check_kv_cache_config(memory.kv_config, spec)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_named_shape_has_a_plan(name: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its layers keep, in 40 GiB: large pages that aren't too large, and what they hold is what is told."""
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: (2000 * GIB, 2000 * GIB))
    spec = read_spec(named_config(name))
    config = settings(kv_gib=40, page_size=page_size, max_num_seqs=64)
    plan = plan_memory(config, spec, name, "bfloat16", 2, "cuda")
    memory = build_memory(config, spec, MemorySize(plan.kv_tokens, plan.max_len, 2, plan.kv_bytes))
    large = max(16 * 2**20, 40 * GIB // 512, *(group.page_bytes for group in memory.kv_config.groups))
    assert 40 * GIB - large < plan.kv_bytes <= 40 * GIB
    assert memory.fits([plan.max_len])
    assert plan.kv_bytes <= memory.kv_config.bytes <= plan.kv_bytes + large


PAIRS = {
    "gemma-2-27b": "gemma-2-2b",
    "ministral-8b": "ministral-1b",
    "llama3-70b": "llama3.2-1b",
    "llama3-8b": "llama3.2-1b",
}


@pytest.mark.parametrize("page_size", [1, 8, 16, 24, 32, 64])
@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_of_models_has_a_plan(name: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs of `quire reproduce jenga-fig19`, in the memory that Gemma-2 27B leaves there, whatever their layers:
    the bytes of a token are padded by at most 3 %, and one type's pages are not padded alone."""
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: (2000 * GIB, 2000 * GIB))
    spec = read_spec(named_config(name)).with_draft(read_spec(named_config(PAIRS[name])))
    config = settings(kv_gib=13.8, page_size=page_size, max_num_seqs=64).with_device_defaults("cuda")
    layout = plan_page_layout(config, spec, 2, int(13.8 * GIB))
    assert layout.large_bytes <= 13.8 * GIB / 512
    assert sum(len(one.layers) for one in layout.specs) == len(spec.layers)
    assert all(layout.large_bytes % one.page_bytes == 0 for one in layout.specs)
    held = [one.page_tokens * one.token_bytes for one in layout.specs]
    assert all(size <= one.page_bytes <= 1.03 * size for size, one in zip(held, layout.specs))
    assert sum(one.token_bytes for one in layout.specs) == spec.token_bytes(2)
    plan = plan_memory(config, spec, name, "bfloat16", 2, "cuda")
    memory = build_memory(config, spec, MemorySize(plan.kv_tokens, plan.max_len, 2, plan.kv_bytes))
    assert memory.fits([plan.max_len])
    check_kv_cache_config(memory.kv_config, spec)


def test_a_plan_of_a_pair_shows_the_padding() -> None:
    spec = read_spec(named_config("gemma-2-27b")).with_draft(read_spec(named_config("gemma-2-2b")))
    config, plan = settings(kv_gib=14).with_device_defaults("cuda"), planned(spec, kv_gib=14)
    lines = describe_pages(config, spec, 2, plan)
    assert sum("23 layers" in line and "0.8% padding, 2 in a large page" in line for line in lines) == 2
    assert sum("13 layers of the draft model" in line and "1.9% padding, 7 in" in line for line in lines) == 2
    assert any("large pages" in line and "of 6,078,464 bytes" in line for line in lines)


SEEING = [name for name in CONFIGS if read_spec(named_config(name)).vision is not None]


@pytest.mark.parametrize("mode", ["pages", "inside", "off"])
@pytest.mark.parametrize("name", SEEING)
def test_every_named_shape_that_sees_has_a_plan(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its eyes' weights in it, and room for pictures, wherever their embeddings lie; in FP8 with more of it."""
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: (2000 * GIB, 2000 * GIB))
    spec = read_spec(named_config(name))
    assert spec.vision is not None
    config = settings(vision_cache=mode, max_num_seqs=64, kv_gib=40)
    plan = plan_memory(config, spec, name, "bfloat16", 2, "cuda")
    assert plan.weight_bytes == 2 * (spec.parameters + spec.vision.parameters)
    less = plan_memory(config, spec, name, "bfloat16", 2, "cuda", quantization_savings=spec.parameters)
    assert less.weight_bytes == plan.weight_bytes - spec.parameters
    memory = build_memory(config, spec, MemorySize(plan.kv_tokens, plan.max_len, 2, plan.kv_bytes))
    kinds = {group.kind for group in memory.kv_config.groups}
    assert ("vision" in kinds) == (mode == "pages" and spec.images_replace_tokens)
    assert memory.kv_config.sight == (mode if spec.images_replace_tokens else "")
    rows = spec.vision.max_embeds
    media = (ImageItem(bytes(32), 1, rows if spec.images_replace_tokens else 1, rows),)
    assert memory.fits([min(rows + 300, plan.max_len)], rows + 50, media)


def test_heads_of_two_sizes_share_large_pages() -> None:
    """Gemma-4 31B in 30 GiB: a large page holds 16 tokens of the 50 layers with a window, or 160 of the 10 others. A
    sequence may be as long as the model's limit, and three times as many of 8,192 tokens fit as in uniform pages."""
    spec, large, held = read_spec(named_config("gemma-4-31b")), 16 * 50 * 2 * 16 * 256 * 2, {}
    assert {(one.kv_heads, one.head_dim, one.window) for one in spec.layers} == {(16, 256, 1024), (4, 512, None)}
    for kind in ("paged", "uniform"):
        given: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 512, "memory": kind}
        plan = planned(spec, kv_gib=30, **given)
        size = MemorySize(plan.kv_tokens, plan.max_len, 2, plan.kv_bytes)
        memory = build_memory(settings(**given).with_device_defaults("cuda"), spec, size)
        together = next(count for count in range(1, 99) if not memory.fits([8192] * count)) - 1
        held[kind] = plan.max_len, together
        if kind == "paged":
            assert memory.kv_config.large_bytes == large
            assert [group.page_bytes for group in memory.kv_config.groups] == [large, large // 10]
    assert held == {"paged": (262_144, 13), "uniform": (35_744, 4)}


def test_pages_of_image_embeddings_are_padded_more() -> None:
    """Gemma-4 31B: with 172,032 bytes for 16 embeddings a large page would have 21 times as many bytes."""
    config = settings(max_num_seqs=64).with_device_defaults("cuda")
    layout = plan_page_layout(config, read_spec(named_config("gemma-4-31b-vision")), 2, 4 * GIB)
    assert layout.large_bytes == 13_107_200
    assert [page_spec.page_bytes for page_spec in layout.specs] == [13_107_200, 1_310_720, 13_107_200 // 64]


def in_a_gib(name: str, **given: Any) -> list[str]:
    """The lines of a plan that compare the tokens in a GiB."""
    spec, given = read_spec(named_config(name)), {"kv_gib": 40, **given}
    lines = describe_pages(settings(**given).with_device_defaults("cuda"), spec, 2, planned(spec, **given))
    return [line.removeprefix("in a GiB").strip() for line in lines if line.startswith("in a GiB")]


def test_tokens_in_a_gib_by_hand() -> None:
    """Gemma-4 31B: a sequence of 32,768 tokens holds 2,048 pages of 10 layers, 81,920 bytes a token, and of 50 layers,
    819,200 bytes a token, a window of 1,024 tokens and 16 more: 65 pages. In uniform pages a token takes both."""
    held = 2048 * 16 * 81_920 + 65 * 16 * 819_200
    assert (round(32_768 * GIB / held), GIB // (81_920 + 819_200)) == (9949, 1191)
    short, long = in_a_gib("gemma-4-31b", kv_gib=30)
    assert short == "5,775 tokens of decoding sequences of 8,192; uniform pages 1,192 (4.8 x)"
    assert long == "9,949 tokens of decoding sequences of 32,768; uniform pages 1,192 (8.3 x)"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("gpt-oss-20b", {}, ["42,936 of 8,192, 21,845", "43,500 of 32,768, 21,845"]),
        ("qwen3-next-80b-a3b", {}, ["31,551 of 8,192, 31,573", "39,857 of 32,768, 39,866"]),
        ("jamba-52b", {}, ["58,534 of 8,192, 58,534", "63,633 of 32,768, 63,633"]),
        ("jamba-52b", {"max_model_len": 4096, "prefix_tokens": 512}, ["52,883 of 4,096, 52,883"]),
        ("llama3-8b", {}, []),
        ("gpt-oss-20b", {"memory": "uniform"}, []),
        ("gpt-oss-20b", {"memory": "virtual"}, []),
        ("gpt-oss-20b", {"table_scope": "layer"}, ["42,936 of 8,192, 21,845", "43,500 of 32,768, 21,845"]),
    ],
)
def test_tokens_in_a_gib(
    name: str, given: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: (400 * GIB, 400 * GIB))
    shown = [re.findall(r"[\d,]+\d", line) for line in in_a_gib(name, **given)]
    assert [f"{ours} of {length}, {uniform}" for ours, length, uniform, *_ in shown] == expected


@pytest.mark.parametrize("memory", ["paged", "uniform"])
@pytest.mark.parametrize("name", ["gemma-4-31b", "gpt-oss-20b", "ministral-8b", "jamba-52b", "pyramidkv-8b"])
@pytest.mark.parametrize("length", [1000, 8192])
def test_a_decoding_sequence_holds_what_the_plan_counts(name: str, length: int, memory: str) -> None:
    spec, config = read_spec(named_config(name)), settings(memory=memory, max_num_seqs=4, max_num_batched_tokens=2048)
    paged = PagedMemory.build(config, spec, MemorySize(length, spec.max_len, 2, 80 * GIB))
    seq = Sequence(1, list(range(length)))
    assert paged.admit([seq], 2048)
    for end in (*range(2048, length, 2048), length):
        assert paged.grow(seq, end)
        seq.computed = seq.planned = end
        paged.commit(seq)
    assert paged.count_held([seq])[0] == paged.decoding_bytes(length)
