"""vAttention's entries that run whole steps: on a CPU, tiny, over real mapped pages; their verdicts can fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.bench import contexts, replay
from quire.data.models.configs import named_config
from quire.errors import StartupError
from quire.reproduce import ENTRIES, dummy_engines, main, step_spikes
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED
from quire.vocabulary.plan import Row

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")

TINY = {
    **named_config("llama-125m"), "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "dtype": "float32",
}  # fmt: skip
PAGE = 512  # tokens of 64 KiB of one layer's keys


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "need_gpu", lambda what: None)
    monkeypatch.setattr(dummy_engines, "ON", "cpu")
    monkeypatch.setattr(dummy_engines, "SHAPES", dict.fromkeys(dummy_engines.SHAPES, TINY))


def drawn(name: str, out: Path) -> dict[str, Any]:
    """The document of an entry, whose picture is made anew from it."""
    main([name, "--out", str(out), "--no-pictures"])
    assert main(["--draw", str(out)]) == 0
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    content: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return content


def test_prompts_are_taken_as_computed(tiny: None) -> None:
    with dummy_engines.dummy("yi-6b", 900, 3, **dummy_engines.virtual("sliced"), max_num_batched_tokens=100) as made:
        contexts.skipping(made.engine)
        contexts.start(made.engine, [700, 5, 801])
        lengths = {name: request.live[0].computed for name, request in made.engine.requests.items()}
        assert all(lengths[f"row-{i}"] >= length for i, length in enumerate([700, 5, 801]))
        assert made.engine.stats.computed_tokens >= 1506, "the control plane knows nothing of it"
        assert len(contexts.step_seconds(made.engine, 4)) == 4
        contexts.stop(made.engine, ["row-0"])
        assert set(made.engine.requests) == {"row-1", "row-2"}
        contexts.stop(made.engine)
        assert not made.engine.unfinished


def test_the_last_token_of_a_row() -> None:
    row = Row(3, (7, 8, 9), 10, 1, score=(8, 9))
    assert contexts.last_token(row) == Row(3, (9,), 12, 1)
    assert contexts.last_token(Row(3, (7,), 10, 1)) == Row(3, (7,), 10, 1)


def test_spikes_are_where_pages_are_full(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CONTEXT", 2 * PAGE), ("PAGE", PAGE), ("STEPS", {False: 24}), ("ENDS", (10, 16))):
        monkeypatch.setattr(step_spikes, name, value)
    runs = drawn("vattention-fig10", tmp_path)["data"]
    assert len(runs) == 8
    for run in runs:
        assert len(run["ms"]) == len(run["maps"]) == 24
        in_the_way = [i for i, count in enumerate(run["maps"]) if count]
        if run["layout"] == "layer" and not run["ahead"]:
            assert [run["maps"][i] for i in in_the_way] == [4, 4], "a page of keys and one of values, of each layer"
            assert 5 <= in_the_way[1] - in_the_way[0] <= 7
        if run["ahead"]:
            assert not in_the_way


def test_verdicts_of_spikes() -> None:
    def run(layout: str, ahead: bool, spike: float, count: int = 4) -> dict[str, Any]:
        return {"layout": layout, "ahead": ahead, "depth": 1, "ms": [1.0] * (200 - count) + [spike] * count, "maps": []}

    def judged(*runs: dict[str, Any]) -> list[str]:
        return [result.verdict for result in step_spikes.judged(runs)]

    assert judged(run("layer", True, 1.05), run("layer", False, 1.6)) == [HOLDS, HOLDS, MEASURED]
    assert judged(run("layer", True, 1.6), run("layer", False, 1.1)) == [DIFFERS, DIFFERS, MEASURED]
    assert judged(run("sliced", False, 1.6)) == [MEASURED]


@pytest.mark.parametrize("name", ["fig10"])
def test_they_need_a_gpu(name: str) -> None:
    assert ENTRIES[f"vattention-{name}"].gpu
    with pytest.raises(StartupError, match="Run it beside a GPU"):
        ENTRIES[f"vattention-{name}"].run()
