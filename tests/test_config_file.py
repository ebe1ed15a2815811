"""--config FILE: what it says is as if said on the command line, which wins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.cli import parse
from quire.cli.config_file import MOST
from quire.cli.flags import config_from, sampling_from
from quire.cli.serve import options_from

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
    found, same = parse(["serve", "--config", str(file)]), parse(["serve", *said])
    assert config_from(found) == config_from(same)
    assert options_from(found) == options_from(same)


def test_the_command_line_wins(file: Path) -> None:
    file.write_text(WHOLE)
    said = ["c/d", "--kv-cache-memory-bytes", "1G", "--port", "1", "--served-model-name", "three"]
    said += ["--load-format", "auto", "--enable-prefix-caching"]
    found = parse(["serve", *said, "--config", str(file)])
    config = config_from(found)
    assert (config.model, config.kv_gib) == ("c/d", 1.0)
    assert (config.enable_prefix_caching, config.dummy_weights) == (True, False)
    assert config.max_model_len == 512, "what only the file says"
    options = options_from(found)
    assert (options.port, options.served_model_name) == (1, ("three",))


def test_it_may_stand_anywhere_and_before_a_model(file: Path) -> None:
    file.write_text('{"served-model-name": ["one", "two"], "port": 7}')  # JSON is YAML too
    for said in (["--config", str(file), "a/b"], ["a/b", f"--config={file}"], ["--config", str(file), "--", "a/b"]):
        found = parse(["serve", *said])
        assert config_from(found).model == "a/b"
        assert options_from(found).served_model_name == ("one", "two")


def test_lists_of_repeated_flags(file: Path) -> None:
    file.write_text("stop: [a, b]\nprompt: once\nseed: 4\nearly-stopping: true\nbeam-width: 2\n")
    found = parse(["generate", "--config", str(file)])
    assert found.prompt == ["once"]
    assert sampling_from(found) == {"stop": ["a", "b"], "seed": 4, "early_stopping": True, "beam_width": 2}
    assert sampling_from(parse(["generate", "--config", str(file), "--stop", "c"]))["stop"] == ["c"]


def test_an_empty_file_says_nothing(file: Path) -> None:
    file.write_text("# nothing\n")
    assert parse(["serve", "--config", str(file)]).port == 8000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "--config: there is no setting 'prot'. See quire serve --help"),
        ("config: other.yaml", "there is no setting 'config'"),
        ("help: true", "there is no setting 'help'"),
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
        parse(["serve", "--config", str(file)])
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
        parse(["serve", "--config", str(file)])
    assert "there is no setting 'a0'" in capsys.readouterr().err
    file.write_text("port: &a [*a]")  # holds itself
    with pytest.raises(SystemExit):
        parse(["serve", "--config", str(file)])
    assert "port is a list" in capsys.readouterr().err


def test_only_regular_files_of_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large, pipe = tmp_path / "large.yaml", tmp_path / "pipe"
    large.write_text("#" * (MOST + 1))
    os.mkfifo(pipe)
    for path, words in (
        (large, f"is larger than {MOST} bytes"),
        (pipe, "is no regular file"),
        (Path("/dev/zero"), "is no regular file"),
        (tmp_path, "is no regular file"),
        (tmp_path / "none", "can't be read"),
        (Path("a\0b"), "can't be read"),
    ):
        with pytest.raises(SystemExit):
            parse(["serve", "--config", str(path)])
        assert words in capsys.readouterr().err
