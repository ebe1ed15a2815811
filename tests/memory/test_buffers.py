"""How contiguous addresses are cut: vAttention's Table 8, sliced layouts, and tokens that aren't whole."""

from __future__ import annotations

from fractions import Fraction

import pytest

from papers.closed_forms import KIB, MIB, max_waste_bytes, on_workers
from quire.errors import StartupError
from quire.memory.virtual.buffers import plan_buffers

HEAD = 128 * 2  # bytes: numbers of 16 bits
LAYOUTS = ("layer", "sliced:4", "sliced:8", "sliced")
# pages of 2 MB: tokens of a page, MB wasted by a request on all workers, pages mapped at once on each
SLICED: dict[tuple[str, int], tuple[tuple[float, int, int], ...]] = {
    ("yi-6b", 1): ((2048, 128, 64), (512, 32, 16), (256, 16, 8), (64, 4, 2)),
    ("yi-6b", 2): ((4096, 256, 64), (1024, 64, 16), (512, 32, 8), (128, 8, 2)),
    ("llama3-8b", 1): ((1024, 128, 64), (256, 32, 16), (128, 16, 8), (32, 4, 2)),
    ("llama3-8b", 2): ((2048, 256, 64), (512, 64, 16), (256, 32, 8), (64, 8, 2)),
    ("yi-34b", 1): ((1024, 240, 120), (256, 60, 30), (128, 32, 16), (17.07, 4, 2)),
    ("yi-34b", 2): ((2048, 480, 120), (512, 120, 30), (256, 64, 16), (34.13, 8, 2)),
}


@pytest.mark.parametrize(("model", "tensor"), SLICED)
def test_sliced_layouts(model: str, tensor: int) -> None:
    for layout, (tokens, waste, parts) in zip(LAYOUTS, SLICED[model, tensor], strict=True):
        found = on_workers(model, tensor, 2 * MIB, layout)
        assert round(found[0].run_tokens / found[0].run_pages, 2) == tokens
        assert max_waste_bytes(found) == waste * MIB
        assert {one.num_buffers for one in found} == {parts}


def test_tokens_that_are_not_whole() -> None:
    yi = plan_buffers(60, 8 * HEAD, 2 * MIB, "sliced")
    assert (yi.run_tokens, yi.run_pages, yi.stride) == (256, 15, 120 * KIB)
    assert [yi.num_pages(tokens) for tokens in (0, 1, 17, 18, 34, 35, 256, 257)] == [0, 1, 1, 2, 2, 3, 15, 16]
    large = plan_buffers(96, 96 * HEAD, 2 * MIB, "sliced")  # OPT-175B: a token is more than a page
    assert Fraction(large.run_tokens, large.run_pages) == Fraction(2 * MIB, 96 * 96 * HEAD) < 1
    assert large.num_pages(1) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [1, 5, 32, 60])
def test_each_layer_has_a_place_of_its_own(layers: int, layout: str) -> None:
    one = plan_buffers(layers, HEAD, 64 * KIB, layout)
    places = [one.locate(layer, values) for layer in range(layers) for values in (False, True)]
    assert len(set(places)) == 2 * layers
    assert {part for part, _ in places} == set(range(one.num_buffers))
    assert all(offset % HEAD == 0 and 0 <= offset <= one.stride - HEAD for _, offset in places)
    assert one.num_buffers * one.stride - one.token_bytes == 2 * HEAD * (-layers % one.layers_per_buffer)
    with pytest.raises(AssertionError, match=f"layer {layers} of {layers}"):
        one.locate(layers, False)


def test_addresses_of_the_paper() -> None:
    """§5.1.1: Yi-34B on two workers, 200K tokens, 500 sequences: 200 MB a sequence, 120 buffers of 100 GB, 12 TB."""
    first, second = on_workers("yi-34b", 2, 2 * MIB, "layer")
    assert first == second
    assert first.stride == KIB
    assert first.num_buffers == 120
    assert first.slot_bytes(200 * KIB) == 200 * MIB
    assert first.buffer_bytes(500, 200 * KIB) == 500 * 200 * MIB
    assert first.total_address_bytes(500, 200 * KIB) == 120 * 500 * 200 * MIB
    assert first.slot_bytes(200_000) == 196 * MIB, "a slot is whole pages: 195.3 MB of them"


@pytest.mark.parametrize("layout", [
    "", "layers", "sliced:", "sliced:0", "sliced:-1", "sliced:4097", "sliced:08888", "layer:2", "sliced:8:8",
    "sliced:\u0668", "sliced: 8", "paged" * 99,
])  # fmt: skip
def test_other_layouts_are_refused(layout: str) -> None:
    with pytest.raises(StartupError, match="is no layout of virtual memory") as failure:
        plan_buffers(32, HEAD, MIB, layout)
    assert len(failure.value.cause) < 130
