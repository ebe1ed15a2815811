"""The command line: flags, failures of one line, the commands over an echo engine, --config FILE, and `quire chat` in a
terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import echo_service
import pytest
from echo_oracle import expected_beams

import quire
from quire.cli import chat, main, parse_arguments
from quire.cli.flags import config_from, sampling_from
from quire.cli.serve import options_from
from quire.config import EngineConfig, Experiment, KVEventsConfig
from quire.core.preemption_costs import PreemptionCosts
from quire.kernels.cpu.library_loader import library, missing_reason
from quire.protocol.sampling_params import SamplingParams

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call main with an echo engine in place of a model, and `stdin` as a pipe."""

    def go(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("quire.startup.build.build", lambda config, progress=False: echo_service.built())
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


HELPS = ("serve", "generate", "chat", "run-batch", "plan", "simulate", "bench throughput")


@pytest.mark.parametrize("command", HELPS)
def test_help_is_short_and_help_all_has_every_option(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            main([*command.split(), flag])
        shown.append(capsys.readouterr().out)
    short, whole = shown
    assert len(short.splitlines()) <= 100, "two screens"
    assert "--help-all" in short
    assert "--memory {paged,virtual}" in short
    assert "experiments:" not in short
    assert whole.index("\nexperiments:\n") < whole.index("--page-sizes") < whole.index("\nvLLM's names")
    for name in EngineConfig().flat():
        flag = f"--{name.replace('_', '-')} "
        assert flag in whole.replace(",", " ").replace("\n", " "), flag
        assert flag not in short or name not in {field.name for field in fields(Experiment)}, flag


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "plan"])
def test_flags_become_settings(command: str) -> None:
    assert config_from(parse_arguments([command])) == EngineConfig()
    assert config_from(parse_arguments([command, "some/model"])).model == "some/model"
    texts = {"memory": "paged", "attention": "sdpa", "dtype": "bfloat16", "state_dtype": "float32", "device": "cpu",
             "table_scope": "layer", "page_sizes": "own", "association": "paper", "retention": "slack",
             "map_ahead": "off", "preemption": "swap", "quantization": "fp8", "kv_cache_dtype": "int8",
             "vision_cache": "inside", "executor": "process", "pooling": "mean",
             "on_rank_failure": "restart", "speculative_method": "ngram"}  # fmt: skip
    for field in (*fields(EngineConfig), *fields(Experiment)):
        if field.name in ("model", "kv_gib", "override_generation_config", "kv_events_config", "experiment"):
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            given = ["--no-" + flag[2:]] if field.default else [flag]
            value: object = not field.default
        elif "str" in str(field.type):
            value = texts.get(field.name, "x")
            given = [flag, str(value)]
        else:
            value = 0.5 if "float" in str(field.type) else {"pp": 1, "prompt_lookup_min": 3}.get(field.name, 7)
            given = [flag, str(value)]
        if field.name == "synthetic_acceptance":  # of draft tokens
            given += ["--speculative-method", "ngram"]
        if field.name == "expert_parallel":  # among ranks
            given += ["--tp", "2"]
        assert config_from(parse_arguments([command, *given])).flat()[field.name] == value, flag
    assert config_from(parse_arguments([command, "--kv-gib", "1.5"])).kv_gib == 1.5
    override = ["--override-generation-config", '{"temperature": 0.5, "top_k": 3}']
    assert config_from(parse_arguments([command, *override])).override_generation_config == {
        "temperature": 0.5,
        "top_k": 3,
    }
    events = config_from(parse_arguments([command, "--kv-events-config", '{"enable_kv_cache_events": true, "hwm": 5}']))
    assert events.kv_events == KVEventsConfig(enable_kv_cache_events=True, hwm=5)
    for given, meant in (([], "auto"), (["--no-generation-config"], "vllm")):
        assert config_from(parse_arguments([command, *given])).generation_config == meant


def test_sampling_flags() -> None:
    args = parse_arguments(["generate", "--temperature", "0", "--stop", "a", "--stop", "b", "--seed", "4"])
    assert sampling_from(args) == {"temperature": 0.0, "stop": ["a", "b"], "seed": 4}
    assert sampling_from(parse_arguments(["chat"])) == {}
    beams = ["--beam-width", "4", "--n", "2", "--length-penalty", "0.5", "--early-stopping"]
    for said, meant in (("true", True), ("false", False), ("never", "never")):
        assert sampling_from(parse_arguments(["generate", *beams, said])) == {
            "beam_width": 4, "n": 2, "length_penalty": 0.5, "early_stopping": meant,
        }  # fmt: skip
    assert sampling_from(parse_arguments(["chat", "--best-of", "3"])) == {"best_of": 3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--kv-gb", "3"], "Unknown argument '--kv-gb'. Did you mean --kv-gib?"),
        (["plan", "model", "another"], "Unknown argument 'another'"),
        (["serve", "--port", "abc"], "invalid int value: 'abc'"),
        (["serv"], "invalid choice: 'serv'"),
        (["plan", "--page-size", "0"], "--page-size is 0. It must be between 1 and 1024"),
        (["plan", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["plan", "--quantization", "gptq"], "gptq"),
        (["plan", "--model-config", "Llama-3-8B"], "--model-config is 'Llama-3-8B'. Did you mean llama3-8b?"),
        (["plan", "--model-config", "nothing"], "--model-config is 'nothing'. Known shapes: characterai-70b, "),
        (["plan", "llama-3-8b"], "Did you mean --model-config llama3-8b?"),
        (["plan", "tiny_vision"], "Did you mean tiny-vision?"),
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
        (["serve", "--swap-gib", "-1"], "--swap-gib is -1"),
        (["serve", "--prefixes", "/nonexistent/file"], "--prefixes /nonexistent/file can't be read"),
        (["serve", "--admin-key-file", "/nonexistent/file"], "--admin-key-file /nonexistent/file can't be read"),
        (["serve", "--uvicorn-log-level", "trace"], "invalid choice: 'trace'"),
    ],
)
def test_failures_end_with_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, out, error = run(*arguments)
    assert status == 2
    assert out == ""
    last = error.strip().splitlines()[-1]
    assert last.startswith("quire: error: ")
    assert words in last
    assert "Traceback" not in error


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
    status, _, error = run("generate", "--debug", stdin="\n")
    assert status == 2
    assert "Traceback" in error, "--debug shows where"
    assert "quire: error: the prompt is empty" in error.splitlines()[-1]


def test_chat_from_a_pipe(run: Run) -> None:
    lines = "once\n/reset\nonce\n\n/help\n/exit\nnever read\n"
    status, out, _ = run("chat", "--seed", "1", "--max-tokens", "5", "--ignore-eos", stdin=lines)
    assert status == 0
    assert out.count("/reset forgets") == 1
    answers = out[: out.index("/reset forgets")]
    half = len(answers) // 2
    assert answers[:half] == answers[half:] != "", "a conversation that was reset begins anew"


def test_beams(run: Run) -> None:
    flags = ("--json", "--max-tokens", "4", "--ignore-eos", "--n", "2")
    status, out, _ = run("generate", "--prompt", "once", *flags, "--beam-width", "3")
    beams = json.loads(out)
    assert status == 0
    params = SamplingParams(beam_width=3, n=2, max_tokens=4, ignore_eos=True)
    ids = echo_service.tokenizer().encode("once")
    found = expected_beams(ids, params, vocab_size=echo_service.VOCAB)
    assert beams["texts"] == [echo_service.tokenizer().decode(beam.tokens) for beam in found]
    assert beams["cumulative_logprobs"] == [beam.logprob for beam in found]
    _, plain, _ = run("generate", "--prompt", "once", *flags)
    assert json.loads(plain)["cumulative_logprobs"] == [None, None]
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
    for command, module in (("bench", "quire.bench"), ("simulate", "quire.bench.simulate"), ("reproduce", "papers")):
        seen: list[str] = []
        stand_in = types.ModuleType(module)
        stand_in.__file__ = str(Path(quire.__file__).parents[2] / "papers" / "__init__.py")
        stand_in.main = lambda args, seen=seen: seen.extend(args) or 3  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module, stand_in)
        assert run(command, "name", "--any-flag", "1")[0] == 3
        assert seen == ["name", "--any-flag", "1"]


def test_folders_of_the_checkout_come_before_other_packages(tmp_path: Path) -> None:
    for name in ("bench", "papers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit(9)")
    for command in (["bench", "list"], ["reproduce", "--list"]):
        done = subprocess.run([sys.executable, "-m", "quire", *command], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_papers_need_a_checkout(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("quire.cli.checkout.CHECKOUT", tmp_path)
    status, out, err = run("reproduce", "--list")
    assert (status, out) == (2, "")
    assert "Clone the repository" in err
    status, out, err = run("bench", "list")
    assert status == 0, err
    assert "throughput" in out
    assert "allocator" not in out
    status, _, err = run("bench", "allocator")
    assert (status, "a checkout of the repository has further ones" in err) == (2, True)


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


def test_env_says_which_kernels_compute(run: Run) -> None:
    [line] = [line for line in run("env")[1].splitlines() if line.startswith("quire cpu kernels")]
    found = library()
    assert (found.path.stem if found is not None else missing_reason()) in line


def test_version(run: Run) -> None:
    assert run("--version")[1] == "quire 0.1.0\n"


@pytest.mark.parametrize("number", ["-1", "1e999", "1" + "0" * 400, '"x"', "null", "NaN"])
def test_costs_that_are_no_numbers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str) -> None:
    path = tmp_path / "costs.json"
    fields = ", ".join(f'"{name}": {number}' for name in PreemptionCosts._fields)
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


WHOLE = """
model: a/b
port: 9000
host: "::1"
kv-gib: 1.5
max_model_len: 512
enable-prefix-caching: false
dummy-weights: true
enforce-eager: no
strict: yes
served-model-name: [one, two]
allowed-origins: "*"
override-generation-config: {temperature: 0.5, top_k: 3}
dtype: half
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


def test_every_kind_of_setting(file: Path) -> None:
    file.write_text(WHOLE)
    said = ["a/b", "--port", "9000", "--host", "::1", "--kv-gib", "1.5", "--max-model-len", "512", "--dtype", "half",
            "--no-enable-prefix-caching", "--dummy-weights", "--strict", "--allowed-origins", "*",
            "--override-generation-config", '{"temperature": 0.5, "top_k": 3}',
            "--served-model-name", "one", "two"]  # fmt: skip
    found, same = parse_arguments(["serve", "--config", str(file)]), parse_arguments(["serve", *said])
    assert config_from(found) == config_from(same)
    assert options_from(found) == options_from(same)
    file.write_text('{"port": 7}')  # JSON is YAML too
    for said in (["--config", str(file), "a/b"], ["a/b", f"--config={file}"], ["--config", str(file), "--", "a/b"]):
        found = parse_arguments(["serve", *said])
        assert (config_from(found).model, options_from(found).port) == ("a/b", 7)
    file.write_text("# nothing\n")
    assert options_from(parse_arguments(["serve", "--config", str(file)])).port == 8000


def test_the_command_line_wins(file: Path) -> None:
    file.write_text(WHOLE)
    said = ["c/d", "--kv-cache-memory-bytes", "1G", "--port", "1", "--served-model-name", "three"]
    said += ["--load-format", "auto", "--enable-prefix-caching"]
    found = parse_arguments(["serve", *said, "--config", str(file)])
    config = config_from(found)
    assert (config.model, config.kv_gib) == ("c/d", 1.0)
    assert (config.enable_prefix_caching, config.dummy_weights) == (True, False)
    assert config.max_model_len == 512, "what only the file says"
    options = options_from(found)
    assert (options.port, options.served_model_name) == (1, ("three",))


def test_lists_of_repeated_flags(file: Path) -> None:
    file.write_text("stop: [a, b]\nprompt: once\nseed: 4\nearly-stopping: true\nbeam-width: 2\n")
    found = parse_arguments(["generate", "--config", str(file)])
    assert found.prompt == ["once"]
    assert sampling_from(found) == {"stop": ["a", "b"], "seed": 4, "early_stopping": True, "beam_width": 2}
    assert sampling_from(parse_arguments(["generate", "--config", str(file), "--stop", "c"]))["stop"] == ["c"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "--config: there is no setting 'prot'. See quire serve --help"),
        ("config: other.yaml", "there is no setting 'config'"),
        ("1: 2", "there is no setting '1'"),
        ("trust-remote-code: true", "there is no setting 'trust-remote-code'"),
        ("kv_gib: 1\nkv-gib: 2", "'kv-gib' is there twice"),
        ("port: [1, 2]", "port is a list. It must be text or a number"),
        ("port:", "port is empty. It must be text or a number"),
        ("port: 2024-01-01", "port is datetime.date"),
        ("port: many", "invalid int value: 'many'"),
        ("strict: 1", "strict is 1. It must be true or false"),
        ("override-generation-config: {temperature: [1]}", "override-generation-config is a list"),
        ("served-model-name: [[a]]", "served-model-name is a list"),
        ("[a, b]", "holds a list. Write one setting a line"),
        ("just words", "holds a str"),
        ("a: b: c", "is not YAML: mapping values are not allowed here"),
        ("!!python/object/apply:os.system ['true']", "is not YAML: could not determine a constructor"),
        ("port: " + "9" * 5000, "is not YAML"),
        ("[" * 20_000, "is not YAML"),
        ("? [a]\n: 1", "is not YAML"),
        ("\x00", "is not YAML"),
    ],
)
def test_what_cannot_be(file: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        parse_arguments(["serve", "--config", str(file)])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.startswith("quire: error: ")
    assert said.count("\n") == 1
    assert len(said) < 600
    assert words in said


def test_aliases_that_multiply_are_not_followed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 20)]
    file.write_text("\n".join(lines))
    with pytest.raises(SystemExit):
        parse_arguments(["serve", "--config", str(file)])
    assert "there is no setting 'a0'" in capsys.readouterr().err
    file.write_text("port: &a [*a]")  # holds itself
    with pytest.raises(SystemExit):
        parse_arguments(["serve", "--config", str(file)])
    assert "port is a list" in capsys.readouterr().err


TESTS = Path(__file__).parent
PROGRAM = f"""
import os, signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored, by inheritance, where tests run in background
os.close(os.open(os.ttyname(0), os.O_RDWR))  # a session's first terminal controls it: Ctrl-C interrupts
sys.path.insert(0, {str(TESTS)!r})
import echo_service
stand_in = types.ModuleType("quire.startup.build")
stand_in.build = lambda config, progress=False: echo_service.built()
sys.modules["quire.startup.build"] = stand_in
from quire.cli import chat, main
from quire.llm import LLM
from quire.text.input_processor import InputProcessor

def stream(llm, history, params):
    yield types.SimpleNamespace(branch=0, text=str([said["content"] for said in history if said["role"] == "user"]))
    while history[-1]["content"] == "for ever":
        yield types.SimpleNamespace(branch=0, text=".")
        time.sleep(0.01)

InputProcessor.process_chat, LLM.stream = lambda self, history: history, stream
if len(sys.argv) > 1:
    chat.MAX_HISTORY = int(sys.argv[1])
sys.exit(main(["chat"]))
"""
UP, CONTROL_D, CONTROL_C = "\x1b[A", "\x04", "\x03"


class Terminal:
    """A chat in a terminal of its own. It repeats what it was told so far in place of an answer."""

    def __init__(self, *arguments: str) -> None:
        self.end, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
        self.child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def until(self, pattern: str, seconds: float = 60) -> str:
        """What is shown up to the first match of `pattern`, which is taken away."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            ready, _, _ = select.select([self.end], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"waited for {pattern!r}, and there is only {self.shown!r}"
            try:
                self.shown += os.read(self.end, 4096).decode()
            except OSError as error:  # the other end is closed
                raise AssertionError(f"it ended before {pattern!r}: {self.shown!r}") from error
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def say(self, line: str, answer: str) -> str:
        """Type a line at the prompt and wait for the answer."""
        self.type(line + "\r")
        return self.until(answer)

    def interrupt(self) -> None:
        """Press Ctrl-C at the prompt, which is shown again after a hint; once more where readline wasn't ready yet."""
        time.sleep(0.1)
        self.type(CONTROL_C)
        self.until(r"\r\n" + chat.INTERRUPT_HINT + r"\r\n")
        self.until("> ")

    def status(self, last: str) -> int:
        """The exit status after typing `last`; once more where readline wasn't ready for it yet, which Ctrl-C needs."""
        for _ in range(20):
            self.type(last)
            with suppress(subprocess.TimeoutExpired):
                return self.child.wait(timeout=5)
        raise AssertionError(f"{last!r} doesn't end it")


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.child.kill()
        opened.child.wait()
        os.close(opened.end)


@pytest.mark.parametrize("last", ["/quit\r", "/exit\r", CONTROL_D])
def test_commands_are_said_at_start_and_each_ends_it(last: str) -> None:
    with terminal() as opened:
        shown = opened.until("> ")
        for word in ("/quit", "/exit", "/reset", "/help", "arrow keys", "//"):
            assert word in shown
        assert opened.status(last) == 0


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation() -> None:
    with terminal() as opened:
        opened.until("> ")
        opened.say("first", r"\['first'\]")
        opened.until("> ")
        for stopped in (["first", "for ever"], ["first", "for ever", "for ever"]):
            opened.say("for ever", re.escape(str(stopped)) + r"\.")
            opened.type(CONTROL_C)
            opened.until("> ")
        for word in ("once", "twice"):
            opened.interrupt()
            opened.say(word, rf"'for ever', .*'{word}'\]")
            opened.until("> ")
        opened.interrupt()
        assert opened.status(CONTROL_C) == 0


@pytest.mark.parametrize("columns", [30, 47])
def test_help_has_whole_words_within_the_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with terminal() as opened:
        opened.until("> ")
        opened.type("/help\r")
        opened.until("/help\r\n")
        lines = opened.until("> ").removesuffix("> ").splitlines()
        assert " ".join(lines).strip() == chat.HELP
        assert len(lines) > 3
        assert max(map(len, lines)) <= columns


def test_arrow_keys_recall_and_edit_the_last_lines() -> None:
    with terminal("2") as opened:
        opened.until("> ")
        opened.say("first", r"\['first'\]")
        opened.until("> ")
        opened.say("/reset", "> ")
        opened.say(UP * 9, r"\['first'\]")  # of two lines
        opened.until("> ")
        opened.say("/reset", "> ")
        opened.say(UP * 2 + "\x7f\x7fe!", r"\['fire!'\]")
        for line in ("two", "three"):
            opened.until("> ")
            opened.say(line, rf"'{line}'\]")
        opened.until("> ")
        opened.say("/reset", "> ")
        opened.say(UP * 9, r"\['three'\]")


def test_an_unknown_command_is_not_said_to_the_model() -> None:
    with terminal() as opened:
        opened.until("> ")
        shown = opened.say("/clear all", r"(?s)/clear is not a command.*begins\s+with /\r\n")
        assert "/quit, /exit or Ctrl-D ends it" in " ".join(shown.split())
        opened.until("> ")
        assert chat.unknown_command_message("/" + "x" * 500).index(" is not a command: ") == 80, "a long one is cut"
        opened.say("//clear", r"\['/clear'\]")
        opened.until("> ")
        opened.say("/help", "/reset forgets")
        opened.until("> ")
        opened.say("a / b", r"\['/clear', 'a / b'\]")
