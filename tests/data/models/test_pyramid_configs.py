"""What a config.json says of PyramidKV: budgets as the paper has them, and every value that can't be, by name."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from test_hostile_configs import refusals

from quire.config import EngineConfig
from quire.control.memory import Size
from quire.control.memory.layout import geometry_of
from quire.data.models import read_spec
from quire.data.models.configs import named_config
from quire.data.models.pyramid import falling
from quire.errors import StartupError
from quire.vocabulary.specs import Selection


def read(pyramid: Any, name: str = "llama3.1-8b", **more: Any) -> Any:
    return read_spec({**named_config(name), "pyramid_kv": pyramid, **more})


@pytest.mark.parametrize(("name", "layers"), [("pyramidkv-8b", 32), ("pyramidkv-70b", 80)])
def test_the_named_shapes(name: str, layers: int) -> None:
    """Eight groups of equal layers, whose pages are of one size: no large page is larger than a small one."""
    spec = read_spec(named_config(name))
    budgets = [layer.budget for layer in spec.layers]
    assert len(budgets) == layers
    assert sum(budgets) == 2048 * layers, "on average"
    assert budgets == sorted(budgets, reverse=True)
    assert list(Counter(budgets).values()) == [layers // 8] * 8
    assert spec.selection == Selection(queries=32, pool=5)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=512)
    geometry = geometry_of(config, spec, Size(2**17, spec.max_len, 2))
    assert {group.page_bytes for group in geometry.groups} == {4096 * layers // 8 * 16}
    assert (len(geometry.groups), geometry.large_bytes) == (8, 0)
    assert {group.kind for group in geometry.groups} == {"budget"}
    assert (geometry.budget, geometry.queries) == (min(budgets), 32)


def test_budgets_fall_as_the_authors_have_them() -> None:
    """A group a layer: from nearly twice the average to a twentieth of it, in equal steps, behind the last queries."""
    budgets = falling(32 + 3200, 32, 20, 20)
    assert budgets[-1] == 32 + 3200 // 20
    assert budgets[0] == 32 + 2 * 3200 - 3200 // 20
    steps = [a - b for a, b in pairwise(budgets)]
    assert max(steps) - min(steps) <= 16, "a multiple of 16 is the nearest one"
    assert all((budget - 32) % 16 == 0 for budget in budgets)
    assert falling(100, 32, 1, 1) == (96,)


def test_budgets_of_ones_own() -> None:
    spec = read({"budgets": [64, None] * 16, "queries": 8})
    assert [layer.budget for layer in spec.layers] == [64, None] * 16
    assert spec.least_budget == 64
    assert read(None).least_budget == 0


@pytest.mark.parametrize(
    ("pyramid", "said"),
    [
        ([], "has []"),
        ({"averge": 9}, "has 'averge'"),
        ({}, "either average or budgets"),
        ({"average": 64, "budgets": [64] * 32}, "either average or budgets"),
        ({"average": 0}, "average in pyramid_kv of config.json must be an integer from 1 to 131072, got 0"),
        ({"average": 31}, "average in pyramid_kv of config.json is 31"),
        ({"average": 131073}, "got 131073"),
        ({"average": 64, "groups": 5}, "groups in pyramid_kv of config.json is 5"),
        ({"average": 64, "groups": 33}, "from 1 to 32, got 33"),
        ({"average": 64, "queries": 0}, "queries"),
        ({"average": 64, "pool": 4}, "pool in pyramid_kv of config.json is 4"),
        ({"budgets": [64] * 31}, "list of 32 numbers"),
        ({"budgets": [0] * 32}, "budgets in pyramid_kv of config.json has 0"),
        ({"budgets": [64] * 31 + [131073]}, "has 131073"),
        ({"budgets": [64] * 31 + [True]}, "has True"),
        ({"budgets": [None] * 32}, "has no number"),
    ],
)
def test_what_cannot_be_is_named(pyramid: Any, said: str) -> None:
    with pytest.raises(StartupError) as refused:
        read(pyramid)
    assert said in str(refused.value)


@pytest.mark.parametrize("way", [{"average": 64, "groups": 1}, {"budgets": [64, None] * 16}])
def test_any_value_of_any_key(way: dict[str, Any]) -> None:
    said = refusals({**way, "queries": 4, "pool": 3}, read)
    assert len(said) > 50
    assert max(map(len, said)) < 400


def test_windows_or_shared_layers_beside_budgets() -> None:
    with pytest.raises(StartupError, match="pyramid_kv, and layers that share or don't see all"):
        read({"average": 2048}, "mistral-7b")
    with pytest.raises(StartupError, match="pyramid_kv, and layers that share or don't see all"):
        read({"average": 2048}, kv_sharing=[None, 0] + [None] * 30)
