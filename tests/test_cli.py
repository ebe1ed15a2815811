"""The command line: flags, failures of one line, and the commands over an echo engine."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import echo_service
import pytest

import quire
from quire.cli import main, parse
from quire.cli.flags import ENGINE, config_from, sampling_from
from quire.config import EngineConfig
from quire.control.costs import Costs
from quire.sim.echo import expected_beams
from quire.vocabulary.params import SamplingParams

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call main with an echo engine in place of a model, and `stdin` as a pipe."""

    def go(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        stand_in = types.ModuleType("quire.build")
        stand_in.build = lambda config, progress=False: echo_service.built()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "quire.build", stand_in)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    return go


def spent() -> float:
    """Seconds of a processor that programs took which this one started and waited for: however busy the machine is."""
    return sum(os.times()[2:4])


def test_help_is_immediate() -> None:
    began = spent()
    done = subprocess.run([sys.executable, "-m", "quire", "--help"], capture_output=True, text=True)
    assert spent() - began < 1  # it is 0.1 s
    assert done.returncode == 0
    for command in ("generate", "chat", "serve", "run-batch", "plan", "bench", "reproduce", "env"):
        assert command in done.stdout


def test_every_setting_has_a_flag() -> None:
    assert {flag.name for flag in ENGINE} | {"model"} == set(EngineConfig.names())


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "plan"])
def test_flags_become_settings(command: str) -> None:
    assert config_from(parse([command])) == EngineConfig()
    assert config_from(parse([command, "some/model"])).model == "some/model"
    texts = {"memory": "paged", "attention": "sdpa", "dtype": "bfloat16", "state_dtype": "float32", "device": "cpu",
             "table_scope": "layer", "page_sizes": "own", "association": "paper", "retention": "slack",
             "map_ahead": "off", "preemption": "swap", "quantization": "fp8", "kv_cache_dtype": "int8",
             "vision_cache": "inside", "executor": "process", "pooling": "mean",
             "on_rank_failure": "restart"}  # fmt: skip
    for field in fields(EngineConfig):
        if field.name in ("model", "kv_gib", "override_generation_config"):
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            given = ["--no-" + flag[2:]] if field.default else [flag]
            value: object = not field.default
        elif "str" in str(field.type):
            value = texts.get(field.name, "x")
            given = [flag, str(value)]
        else:
            value = 0.5 if "float" in str(field.type) else 1 if field.name == "pp" else 7
            given = [flag, str(value)]
        assert getattr(config_from(parse([command, *given])), field.name) == value, flag
    assert config_from(parse([command, "--block-size", "8"])).page_size == 8
    assert config_from(parse([command, "--kv-gib", "1.5"])).kv_gib == 1.5
    override = ["--override-generation-config", '{"temperature": 0.5, "top_k": 3}']
    assert config_from(parse([command, *override])).override_generation_config == {"temperature": 0.5, "top_k": 3}
    for given, meant in (([], "auto"), (["--generation-config", "auto"], "auto"), (["--no-generation-config"], "vllm")):
        assert config_from(parse([command, *given])).generation_config == meant
    assert config_from(parse([command, "--swap-space", "2"])).swap_gib == 2
    for said, meant in (("half", "float16"), ("float", "float32")):
        assert config_from(parse([command, "--dtype", said])) == EngineConfig(dtype=meant)


def test_sampling_flags() -> None:
    args = parse(["generate", "--temperature", "0", "--stop", "a", "--stop", "b", "--seed", "4"])
    assert sampling_from(args) == {"temperature": 0.0, "stop": ["a", "b"], "seed": 4}
    assert sampling_from(parse(["chat"])) == {}
    beams = ["--beam-width", "4", "--n", "2", "--length-penalty", "0.5", "--early-stopping"]
    for said, meant in (("true", True), ("false", False), ("never", "never")):
        assert sampling_from(parse(["generate", *beams, said])) == {
            "beam_width": 4, "n": 2, "length_penalty": 0.5, "early_stopping": meant,
        }  # fmt: skip
    assert sampling_from(parse(["chat", "--best-of", "3"])) == {"best_of": 3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--kv-gb", "3"], "Unknown argument '--kv-gb'. Did you mean --kv-gib?"),
        (["serve", "--max-num-seq=3"], "Did you mean --max-num-seqs?"),
        (["plan", "model", "another"], "Unknown argument 'another'"),
        (["serve", "--port", "abc"], "invalid int value: 'abc'"),
        (["serv"], "invalid choice: 'serv'"),
        (["plan", "--page-size", "0"], "--page-size is 0. It must be between 1 and 1024"),
        (["plan", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["plan", "--kv-gib", "nan"], "--kv-gib is nan"),
        (["generate", "--prompt", "a", "--temperature", "-3"], "temperature must be between"),
        (["generate", "--prompt-file", "/nonexistent/file"], "can't be read"),
        (["generate", "--prompt", "a" * 100_000], "characters"),
        (["generate", "--prompt", ""], "empty"),
        (["generate", "--prompt", "a", "--stop", ""], "stop must have 1 to 256"),
        (["generate", "--prompt", "a", "--beam-width", "65"], "beam_width must be between 1 and 64"),
        (["generate", "--prompt", "a", "--beam-width", "2", "--stop", "x"], "stop_token_ids works"),
        (["generate", "--prompt", "a", "--length-penalty", "2"], "--length-penalty needs --beam-width"),
        (["generate", "--prompt", "a", "--n", "3", "--best-of", "2"], "best_of must be at least n"),
        (["generate", "--prompt", "a", "--early-stopping", "1"], "invalid choice: '1'"),
        (["serve", "--swap-gib", "-1"], "--swap-gib is -1"),
        (["serve", "--prefixes", "/nonexistent/file"], "--prefixes /nonexistent/file can't be read"),
        (["serve", "--admin-key-file", "/nonexistent/file"], "--admin-key-file /nonexistent/file can't be read"),
        (["serve", "--uvicorn-log-level", "trace"], "invalid choice: 'trace'"),
    ],
)
def test_failures_end_with_one_line(run: Run, arguments: list[str], words: str) -> None:
    status, out, error = run(*arguments)
    assert status == 2
    assert out == ""
    last = error.strip().splitlines()[-1]
    assert last.startswith("quire: error: ")
    assert words in last
    assert "Traceback" not in error


def test_debug_shows_where(run: Run) -> None:
    status, _, error = run("plan", "--debug", "--page-size", "0")
    assert status == 2
    assert "Traceback" in error
    assert error.strip().splitlines()[-1].startswith("quire: error: --page-size is 0")


def test_unknown_model_fails_at_once(tmp_path: Path) -> None:
    began = spent()
    command = [sys.executable, "-m", "quire", "generate", str(tmp_path / "none"), "--prompt", "a"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("quire: error: ")
    assert "Traceback" not in done.stderr
    assert spent() - began < 5  # it is 0.5 s


def test_generate(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("a reader")
    status, out, error = run("generate", "--prompt", "once", "--prompt-file", str(file), "--json", "--max-tokens", "3")
    assert status == 0
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["once", "a reader"]
    assert "an echo" in error
    for stdin in ("once", "once\n"):
        _, out, _ = run("generate", "--json", "--max-tokens", "2", stdin=stdin)
        assert json.loads(out)["prompt"] == "once"
    status, _, error = run("generate", stdin="\n")
    assert status == 2
    assert "the prompt is empty" in error


def test_chat_from_a_pipe(run: Run) -> None:
    lines = "once\n/reset\nonce\n\n/help\n/exit\nnever read\n"
    status, out, _ = run("chat", "--seed", "1", "--max-tokens", "5", "--ignore-eos", stdin=lines)
    assert status == 0
    assert out.count("/reset forgets") == 1
    answers = out[: out.index("/reset forgets")]
    half = len(answers) // 2
    assert answers[:half] == answers[half:] != "", "a conversation that was reset begins anew"


def test_beams_and_best_of(run: Run) -> None:
    flags = ("--json", "--max-tokens", "4", "--ignore-eos", "--n", "2")
    status, out, _ = run("generate", "--prompt", "once", *flags, "--beam-width", "3")
    beams = json.loads(out)
    assert status == 0
    params = SamplingParams(beam_width=3, n=2, max_tokens=4, ignore_eos=True)
    ids = echo_service.tokenizer().encode("once")
    found = expected_beams(ids, params, vocab_size=echo_service.VOCAB)
    assert beams["texts"] == [echo_service.tokenizer().decode(beam.tokens) for beam in found]
    assert beams["cumulative_logprobs"] == [beam.logprob for beam in found]
    _, out, _ = run("generate", "--prompt", "once", *flags, "--best-of", "5")
    best = json.loads(out)["cumulative_logprobs"]
    assert best == sorted(best, reverse=True)
    _, plain, _ = run("generate", "--prompt", "once", *flags)
    assert json.loads(plain)["cumulative_logprobs"] == [None, None]


def test_chat_prints_one_answer_after_another(run: Run) -> None:
    flags = ("--seed", "1", "--max-tokens", "5", "--ignore-eos", "--beam-width", "2")
    _, one, _ = run("chat", *flags, stdin="once\n")
    _, both, _ = run("chat", *flags, "--n", "2", stdin="once\n")
    assert both.startswith(one.removesuffix("\n") + "\n---\n")


def test_chat_that_outgrows_the_context_says_so(run: Run) -> None:
    status, _, error = run("chat", "--max-tokens", "2", stdin="a" * 3000 + "\nonce\n")
    assert status == 0
    assert "/reset starts anew" in error


def test_a_named_shape_is_planned_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model-config", "opt-125m", "--kv-tokens", "4096", "--dtype", "float32"]) == 0
    assert "opt-125m: 125,239,296 parameters in float32" in capsys.readouterr().out
    assert main(["generate", "--model-config", "opt-125m", "--prompt", "a"]) == 2
    assert "Add --dummy-weights" in capsys.readouterr().err


def test_bench_and_reproduce_are_delegated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("bench", "reproduce"):
        seen: list[str] = []
        stand_in = types.ModuleType(f"quire.{command}")
        stand_in.main = lambda args, seen=seen: seen.extend(args) or 3  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"quire.{command}", stand_in)
        assert run(command, "name", "--any-flag", "1")[0] == 3
        assert seen == ["name", "--any-flag", "1"]


def test_env_shows_no_secrets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "sk-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    monkeypatch.setenv("HF_HOME", "/private/place")
    status, out, _ = run("env")
    assert status == 0
    assert "torch" in out
    assert "HF_HOME" in out
    assert "secret" not in out
    assert "/private" not in out


def test_version(run: Run) -> None:
    assert run("--version")[1] == "quire 0.1.0\n"


@pytest.mark.parametrize("number", ["-1", "1e999", "1" + "0" * 400, '"x"', "null", "NaN"])
def test_costs_that_are_no_numbers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str) -> None:
    path = tmp_path / "costs.json"
    fields = ", ".join(f'"{name}": {number}' for name in Costs._fields)
    path.write_text(f'{{"costs": {{{fields}}}}}')
    assert main(["generate", "--prompt", "a", "--max-tokens", "1", "--calibration", str(path)]) != 0
    said = capsys.readouterr().err
    assert str(path) in said
    assert "--debug" not in said


HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "dtype": ("config.json", {"dtype": []}),
    "layer type": ("config.json", {"layer_types": [[]] * 6}),
    "nameless template": (
        "tokenizer_config.json", {"chat_template": [{"name": [], "template": "x"}, {"template": "y"}]},
    ),
    "long key": ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}}),
    "surrogate": ("tokenizer_config.json", {"eos_token": "\ud800"}),
    "huge number": ("config.json", {"rms_norm_eps": 10**400}),
    "digits": ("generation_config.json", {"temperature": 10**4000}),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_error_of_a_strangers_file_is_unknown(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundled = Path(quire.__file__).parent / "assets" / "tiny"
    folder = tmp_path / "model"
    shutil.copytree(bundled, folder)
    name, changed = HOSTILE[kind]
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changed))
    status = main(["generate", str(folder), "--prompt", "a", "--max-tokens", "1", "--kv-gib", "0.01"])
    error = capsys.readouterr().err
    assert "Run again with --debug" not in error
    assert status in (0, 2)
    assert status == 0 or error.strip().splitlines()[-1].startswith("quire: error: ")
