"""vAttention's arithmetic as `quire reproduce` tells it: all of the paper's numbers hold, and others would not."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_reproduce import reproduced

from quire.reproduce import contiguous_sizes
from quire.reproduce.contiguous_sizes import PAGES, TABLE_8, Row, on_workers, row_of, table_5, table_8
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED


def test_table_8(tmp_path: Path) -> None:
    content = reproduced("vattention-table8", tmp_path)
    judged = [result for result in content["results"] if result["verdict"] != MEASURED]
    assert {result["verdict"] for result in judged} == {HOLDS}
    assert sum(len(result["paper"]) for result in judged) == 48
    assert all(result["paper"] == result["ours"] for result in judged)
    ours = {result["what"]: result["ours"] for result in content["results"]}
    assert ours["llama3-8b, TP-1, sliced: tokens of a page of 64 KB, 128 KB, 256 KB, 2 MB"][-1] == 32
    assert ours["llama3-8b, TP-1, sliced: most waste of a request"][-1] == 4
    assert "yi-34b     TP-1     sliced     17.07          4                     2" in content["text"]
    assert "256 KB 3.1 to 11.7" in content["text"]
    assert "6.25% of Yi-34B's in sliced:8" in content["text"]
    assert len(content["data"]) == len(TABLE_8) * 3 * len(PAGES)


def test_other_numbers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE_8, ("yi-6b", 1), Row([64, 128, 256, 1024], [4, 8, 16, 128]))
    verdicts = [result.verdict for result in table_8().results if result.verdict != MEASURED]
    assert (verdicts.count(DIFFERS), verdicts.count(HOLDS)) == (1, 11)
    monkeypatch.setitem(contiguous_sizes.TABLE_5, "yi-34b", (56, 8, 61))
    assert [result.verdict for result in table_5().results].count(DIFFERS) == 1


def test_a_page_holds_as_many_tokens_whatever_the_layout_if_it_has_as_many_bytes_a_layer() -> None:
    """2 MB for all of 32 layers are 64 KB for each; as many tokens for each worker as a head is halved."""
    for name in ("yi-6b", "llama3-8b"):
        layer, sliced = row_of(name, 1, "layer"), row_of(name, 1, "sliced")
        assert (sliced.tokens[-1], sliced.waste[-1]) == (layer.tokens[0], layer.waste[0])
    assert [one.run_tokens for one in on_workers("yi-34b", 2, PAGES["2 MB"], "sliced")] == [512, 512]
