"""Every entry of `quire reproduce` runs, holds where the clock has no say, and writes its document and picture."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from papers import ENTRIES, contiguous_sizes, kernel_switch, main
from papers.code_size import ROOT
from papers.contiguous_sizes import PAGES, TABLE_8, Row, table_5, table_8
from papers.kernel_switch import WAYS, compared, figure_12
from papers.paging_issues import CHANGED, ISSUES, lines_here
from papers.reqids import figure_7, table_4
from papers.result import CITED, DIFFERS, HOLDS, MEASURED, at_most, equal, near
from quire.bench.drive import Decoding, Load, drive
from quire.bench.workloads import Job
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.startup.build import build
from quire.vattention import VAttention

RESULT = {"row", "what", "paper", "ours", "unit", "verdict", "real_or_simulated"}
MIXED = {  # of whose numbers some are claimed by nobody
    "vattention-table4", "jenga-fig3", "jenga-fig6", "jenga-fig7", "jenga-fig8", "jenga-fig9",
    "jenga-fig10", "jenga-fig11", "jenga-fig12", "jenga-table1", "jenga-x2", "jenga-x3", "jenga-x5",
}  # fmt: skip
APART = {  # they have tests of their own
    "fig1", "fig2", "fig11", "fig13", "fig14", "fig15", "fig16", "fig17", "fig18b", "fig19a", "fig19b", "table-scope",
    "step-overhead", "x4", "r1", "c1", "c5", "vattention-table1", "vattention-table2", "vattention-table3",
    "vattention-table7", "vattention-table8", "vattention-fig11", "vattention-fig12", "vattention-x2",
    "vattention-views", *(name for name in ENTRIES if name.startswith(("fig12", "jenga-"))),
} - MIXED  # fmt: skip


def reproduced(name: str, folder: Path) -> dict[str, Any]:
    status = main([name, "--out", str(folder)])
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert set(content) - {"data"} == {"name", "command", "machine", "date", "real", "results", "text"}
    real = all(result["real_or_simulated"] == "real" for result in content["results"])
    assert (content["name"], content["real"]) == (name, real)
    assert content["results"]
    for result in content["results"]:
        assert set(result) == RESULT
        assert result["verdict"] in (HOLDS, DIFFERS, MEASURED, CITED)
    assert status == any(result["verdict"] == DIFFERS for result in content["results"])
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return content


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if name not in APART and not entry.gpu])
def test_entry_holds(name: str, tmp_path: Path) -> None:
    verdicts = {result["verdict"] for result in reproduced(name, tmp_path)["results"]}
    assert verdicts <= {HOLDS, MEASURED} if name in MIXED else verdicts == {HOLDS}


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.gpu])
def test_they_need_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    about = re.escape(ENTRIES[name].about)
    with pytest.raises(StartupError, match=f"({name}|{about}) measures a GPU, and torch finds none.*beside a GPU"):
        ENTRIES[name].run()


def test_lengths_are_judged_as_drawn_and_as_served(tmp_path: Path) -> None:
    content = reproduced("fig11", tmp_path)
    verdicts = {result["what"]: result["verdict"] for result in content["results"]}
    assert {verdict for what, verdict in verdicts.items() if "before clipping" in what} == {HOLDS}
    served = {what: verdict for what, verdict in verdicts.items() if "as served" in what}
    assert list(served.values()) == [DIFFERS, DIFFERS, HOLDS, HOLDS], "ShareGPT's tails are cut"
    assert "Every reproduction serves lengths that are clipped" in content["text"]


def test_table_scope_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("papers.overheads.REPEATS", 1)
    tokens, ratio = reproduced("table-scope", tmp_path)["results"]
    assert (tokens["ours"], tokens["verdict"]) == (8, HOLDS)
    assert ratio["ours"] > 0


def test_step_overhead_has_a_number_for_each_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("papers.overheads.STEPS", 20)
    monkeypatch.setattr("papers.overheads.MOST_TOKENS", 2**18)
    results = reproduced("step-overhead", tmp_path)["results"]
    assert len(results) == 4
    assert all(result["ours"] > 0 and result["paper"] is None for result in results)


def test_sharing_saves_what_sequences_have_in_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("papers.sharing.WORKLOADS", {"alpaca": (3, 3), "sharegpt": (1, 1)})
    monkeypatch.setattr("papers.sharing.WIDTHS", (2, 4))
    monkeypatch.setattr("bench.histories.STORY", 200)
    results = reproduced("fig15", tmp_path)["results"]
    saved = [result for result in results if result["unit"] == "%"]
    assert [result["paper"] for result in saved] == [6.1, 8.5, 37.6, 53.1, 16.2, 44.3]
    assert all(0 < result["ours"] < 75 for result in saved)  # of four sequences, three at most are saved
    said = {result["what"]: result["ours"] for result in results if result["unit"] == ""}
    assert said["alpaca: beam search saves more than parallel sampling"]


def test_sharing_is_of_whole_prompts() -> None:
    """Parallel samples of a prompt of whole pages that part at once share it and nothing else: 4 of 8 pages, twice."""
    engine = build(EngineConfig(threads=1, enable_prefix_caching=False, kv_tokens=1024)).engine
    jobs = [Job(list(range(10, 74)), 16)]
    _, facts = drive(engine, jobs, Load((0.0,)), Decoding(temperature=1.0, n=2))
    engine.close()
    # After the first step the two share 4 pages of 8; for the 15 steps that compute a token, 4 of 10 (the last one ends
    # both, and nothing is left to sample).
    assert facts["sharing_saved"] == pytest.approx((4 + 14 * 4) / (8 + 14 * 10))


def test_swapping_and_recomputing_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("papers.swap_or_recompute.SIZES", (1, 16))
    monkeypatch.setattr("papers.swap_or_recompute.TOKENS", 64)
    monkeypatch.setattr("papers.swap_or_recompute.REPEATS", 2)
    content = reproduced("fig19a", tmp_path)
    assert [point["page"] for point in content["data"]] == [1, 16]
    flat, _, worst, _ = content["results"]
    assert flat["ours"] >= 1
    assert worst["ours"] >= 1


def test_verdicts() -> None:
    assert [near("P", "w", 100, ours, "u", 0.05).verdict for ours in (95, 105, 94.9, 105.1)] == [
        HOLDS, HOLDS, DIFFERS, DIFFERS,
    ]  # fmt: skip
    assert [equal("P", "w", 1, ours).verdict for ours in (1, 2)] == [HOLDS, DIFFERS]
    assert [at_most("P", "w", 5, ours, "u").verdict for ours in (5, 5.1)] == [HOLDS, DIFFERS]


def test_list_and_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ENTRIES)
    with pytest.raises(StartupError, match=r"fig99.*Known: fig1"):
        main(["fig99"])


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(StartupError, match=r"pip install 'quire\[plot\]'"):
        main(["x1", "fig6", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists(), "nothing ran"
    assert main(["x1", "--out", str(tmp_path), "--no-pictures"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x1.json"]
    with pytest.raises(StartupError, match="matplotlib is not installed"):
        main(["--draw", str(tmp_path)])


def test_simulated_is_of_all() -> None:
    with pytest.raises(StartupError, match="--simulated is given without --all"):
        main(["x1", "--simulated"])


def test_imports_are_light() -> None:
    """Measuring works where neither the server's libraries nor matplotlib are installed, as on the GPU machine."""
    code = (
        "import sys, quire.cli, quire.bench, papers as r; from importlib import import_module\n"
        "runners = [getattr(e, 'function', '') or e.runner for e in r.ENTRIES.values()]\n"
        "[import_module('papers.' + name.partition(':')[0]) for name in runners]\n"
        "r.main(['--list'])\n"
        "absent = 'pydantic', 'fastapi', 'uvicorn', 'starlette', 'msgspec', 'matplotlib', 'tokenizers'\n"
        "print([name for name in absent if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


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


def test_a_library_that_reclaims_at_once_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    free = VAttention.free_reqid

    def reclaims(self: VAttention, reqid: int) -> None:
        free(self, reqid)
        self._reclaim(self.pages, [(reqid, 0)])

    monkeypatch.setattr(VAttention, "free_reqid", reclaims)
    differing = [result.what for result in figure_7().results if result.verdict == DIFFERS]
    assert differing == ["(d) R1 has completed: pages under reqIds 0 and 1"]
    assert "V-M11" in {result.row for result in table_4().results if result.verdict == DIFFERS}


def test_a_library_that_maps_nothing_ahead_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VAttention, "map_ahead", lambda self: None)
    ours: dict[str, Any] = {result.row: result.ours for result in table_4().results if result.verdict == DIFFERS}
    assert ours == {"V-M10": 1, "V-M12": 1}


@pytest.mark.parametrize("name", ["vattention-table1", "vattention-table2"])
def test_entries_run(name: str, tmp_path: Path) -> None:
    results = reproduced(name, tmp_path)["results"]
    told = [result for result in results if result["verdict"] == CITED]
    assert len(told) == (len(ISSUES) + 1 if name == "vattention-table1" else len(CHANGED))
    assert all(isinstance(result["ours"], str) and result["ours"] for result in told), "where it is told of here"
    assert {result["verdict"] for result in results} <= {CITED, MEASURED}


def test_lines_are_counted_where_there_are_any(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir(parents=True)
    (tmp_path / "memory" / "one.py").write_text('"""Said."""\n\nx = 1\ny = 2\n')
    assert list(lines_here(tmp_path).values()) == [2]
    (tmp_path / "worker" / "virtual").mkdir(parents=True)
    (tmp_path / "worker" / "virtual" / "one.py").write_text("x = 1\n")
    assert list(lines_here(tmp_path).values()) == [2, 1]
    assert next(iter(lines_here(ROOT).values())) > 500


def test_a_switch_of_kernels_takes_few_lines(tmp_path: Path) -> None:
    results = reproduced("vattention-fig12", tmp_path)["results"]
    assert {result["verdict"] for result in results} == {HOLDS, MEASURED, CITED}
    ours = {result["what"]: result["ours"] for result in results}
    assert ours["lines changed from sdpa to sdpa_flash (limit: 10)"] == 4
    assert ours["lines changed from sdpa to varlen_attn (limit: 10)"] == 7


def test_more_lines_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_switch, "MOST", 8)
    differing = [result.ours for result in figure_12().results if result.verdict == DIFFERS]
    assert differing == [9], "from a forced backend to another call"


def test_another_output_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = WAYS["sdpa_flash"]

    def off(query: Any, keys: Any, values: Any) -> Any:
        return real(query, keys, values) + (keys.stride(0) > 128)  # where tokens of several layers are sliced

    monkeypatch.setitem(WAYS, "sdpa_flash", off)
    same = compared()
    assert same["sdpa"]
    assert not same["sdpa_flash"]
