"""Files that others wrote: where a checkpoint's may be, what kind and size a file may have, and what errors show; and
where requests' defaults come from: the model's generation_config.json, another one, none, and what overrides it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli import config_file
from quire.config import EngineConfig
from quire.errors import StartupError, short_repr
from quire.files import MAX_BYTES_BY_FILE, find_checkpoint_file, read_bounded, read_json_object
from quire.server.options import ADMIN_KEY_VARIABLE, read_keys
from quire.server.prefixes import read_prefixes
from quire.startup.build import _read_costs, build
from quire.startup.checkpoint import read_checkpoint
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import special_tokens, tokenizer_config
from quire.weights.checkpoint_files import check_weight_bytes, read_config, read_generation_config, tensor_files

READERS: dict[str, Callable[[Path], Any]] = {  # every file of a checkpoint, and who reads it
    "config.json": read_config,
    "generation_config.json": read_generation_config,
    "model.safetensors": tensor_files,
    "model.safetensors.index.json": tensor_files,
    "special_tokens_map.json": tokenizer_config,
    "tokenizer_config.json": tokenizer_config,
    "tokenizer.json": Tokenizer.load,
    "chat_template.jinja": ChatTemplate.find,
}
OPERATORS: dict[str, Callable[[str], Any]] = {
    "keys": read_keys,
    "prefixes": read_prefixes,
    "calibration": _read_costs,
    "chat template": lambda path: ChatTemplate.find(Path(path).parent / "nowhere", path),
    "--config": config_file.read_settings,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("target", ["/proc/self/environ", "/dev/zero", "../outside"])
def test_a_checkpoints_files_are_its_own(name: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).symlink_to(target)
    with pytest.raises(StartupError, match="is a link that leads out of it"):
        READERS[name](folder)


@pytest.mark.parametrize("name", READERS)
def test_a_checkpoints_files_are_regular(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(StartupError, match="is not a regular file"):
        READERS[name](tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StartupError, match="is not a regular file"):
        READERS[name](tmp_path)
    path.rmdir()
    for target in ("absent", name):  # to nowhere, and in a circle
        path.symlink_to(target)
        with pytest.raises(StartupError, match="can't be read"):
            READERS[name](tmp_path)
        path.unlink()


@pytest.mark.parametrize("name", sorted(set(READERS) - {"model.safetensors"}))
def test_a_file_that_becomes_a_link_is_not_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced between the check of its place and the reading."""
    for path in (tmp_path / name, tmp_path / "outside"):
        path.write_text("{}")
    system = os.open

    def swap(path: Any, *args: Any, **options: Any) -> int:
        if Path(path).name == name:
            os.unlink(path)
            os.symlink(tmp_path / "outside", path)
        return system(path, *args, **options)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(StartupError, match="symbolic link"):
        READERS[name](tmp_path)


@pytest.mark.parametrize("name", sorted(set(READERS) - {"model.safetensors"}))
def test_a_checkpoints_files_are_bounded(name: str, tmp_path: Path) -> None:
    limit = MAX_BYTES_BY_FILE.get(name, MAX_BYTES_BY_FILE["chat template"])
    with (tmp_path / name).open("wb") as file:
        file.truncate(limit + 1)
    with pytest.raises(StartupError, match=f"it has more than {limit} bytes"):
        READERS[name](tmp_path)


@pytest.mark.parametrize("place", ["model", "hub/models--owner--name/snapshots/0123", "link"])
def test_a_folder_may_link_to_the_blobs_of_the_hubs_cache(place: str, tmp_path: Path) -> None:
    """Wherever the folder is: in the cache, outside of it, or reached through a link; but to nothing else."""
    folder, blobs = tmp_path / place, tmp_path / "hub" / "models--owner--name" / "blobs"
    if place == "link":
        folder.symlink_to("hub/models--owner--name/snapshots/0123")
        folder.resolve().mkdir(parents=True)
    inside = [blobs.parent / "x", blobs / "deeper" / "x"]  # of the entry, which its snapshots may link to
    refused = [
        *(inside if place == "model" else ()), tmp_path / "blobs" / "x", tmp_path / "hub" / "blobs" / "x",
        tmp_path / "hub" / "datasets--owner--name" / "blobs" / "x", tmp_path / "hub" / "models--other--name" / "x",
        blobs / "out",
    ]  # fmt: skip
    for path in (folder / "x", blobs / "abc", *refused[:-1]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    refused[-1].symlink_to("/proc/self/environ")
    link = folder / "config.json"
    link.symlink_to(blobs / "abc")
    assert read_config(folder) == {}
    assert find_checkpoint_file(folder, "config.json") == blobs / "abc"
    for path in [*refused, Path("/etc/passwd")]:
        link.unlink()
        link.symlink_to(path)
        with pytest.raises(StartupError, match="leads out of it"):
            read_config(folder)


@pytest.mark.parametrize("kind", OPERATORS)
def test_the_operators_files_are_regular_and_bounded(kind: str, tmp_path: Path) -> None:
    fifo, large = tmp_path / "fifo", tmp_path / "large"
    limit = MAX_BYTES_BY_FILE.get(kind, config_file.MAX_BYTES)
    os.mkfifo(fifo)
    with large.open("wb") as file:
        file.truncate(limit + 1)
    for path, words in (("/dev/zero", "not a regular file"), (str(fifo), "not a regular file"),
                        (str(large), f"more than {limit} bytes"), (str(tmp_path), "can't be read")):  # fmt: skip
        with pytest.raises(StartupError, match=words):
            OPERATORS[kind](path)


def test_what_a_file_says_of_its_size_counts_for_nothing() -> None:
    assert os.stat("/proc/self/status").st_size == 0
    assert b"VmRSS" in read_bounded("/proc/self/status", 1 << 20)
    with pytest.raises(StartupError, match="more than 10 bytes"):
        read_bounded("/proc/self/status", 10)
    with pytest.raises(StartupError, match="can't be read"):
        read_bounded("a\0b", 10)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + "9" * 5000 + "}", '{"a": ' * 100_000, "[" * 100_000, '{"a"', "\ufeff{}",
        '{"a": [' + "0," * (2 << 20) + "0]}",
    ],
    ids=["digits", "deep", "lists", "cut", "mark", "many"],
)  # fmt: skip
def test_json_that_is_not_sane(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(StartupError, match="can't be read as JSON"):
        read_json_object(path, 64 << 20)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a\nb\ud800", r"'a\nb\ud800'"), ("x" * 500, "'" + "x" * 37), ([[[[[[[[1]]]]]]]], "[[[[[[[...]]]]]]]"),
        (None, "None"),
    ],
)  # fmt: skip
def test_values_are_shown_on_one_line(value: object, expected: str) -> None:
    assert short_repr(value).startswith(expected)
    for odd in (value, [value] * 1000, {"a" * 100: value}, 10**4000, object()):
        assert len(short_repr(odd)) <= 80
        assert short_repr(odd).isprintable()


def test_names_of_shards(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for name in ("x" * 5000 + ".safetensors", "a.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(StartupError, match=r"which .* lacks") as failure:
            tensor_files(tmp_path)
        assert len(str(failure.value)) < 300
    for odd in (["x"], None, 7, "", "..", "w.bin", "\ud800.safetensors", "../a.safetensors", "/x.safetensors",
                "a/b.safetensors", "a\nb.safetensors"):  # fmt: skip
        index.write_text(json.dumps({"weight_map": {"a": "b.safetensors", "b": odd}}))
        with pytest.raises(StartupError, match=r"names the file .*Shards must be safetensors files beside it"):
            tensor_files(tmp_path)
    for weight_map in ({}, None, ["a"]):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(StartupError, match="has no weight_map"):
            tensor_files(tmp_path)


def test_a_checkpoint_smaller_than_its_config_says(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    check_weight_bytes(tmp_path, 50)
    with pytest.raises(StartupError, match=r"makes 51 parameters, and the files of .* have 100 bytes"):
        check_weight_bytes(tmp_path, 51)


def test_special_tokens_are_bounded() -> None:
    assert special_tokens({"a_token": "x" * 1024, "b_token": {"content": "é"}, "c": "d"}) == {
        "a_token": "x" * 1024, "b_token": "é",
    }  # fmt: skip
    for bad in ({"a_token": "x" * 1025}, {"a_token": "\ud800"}, {f"{i}_token": "x" for i in range(1025)}):
        with pytest.raises(StartupError, match="special token"):
            special_tokens(bad)


def test_keys_leave_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, pathlib, subprocess, sys; from quire.server.options import read_keys\n"
        "assert read_keys(None) == ('secret-one',)\n"
        "assert read_keys(None, '--admin-key-file', 'QUIRE_ADMIN_KEY') == ('secret-two',)\n"
        "assert not [name for name in os.environ if name.startswith('QUIRE_')]\n"
        "assert 'secret' not in subprocess.run(['env'], capture_output=True, text=True).stdout\n"
        "own = pathlib.Path('/proc/self/environ')\n"
        "assert not own.exists() or b'secret' not in own.read_bytes()"
    )
    keys = {"QUIRE_API_KEY": "secret-one", ADMIN_KEY_VARIABLE: "secret-two"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, **keys})
    file = tmp_path / "secret"
    file.write_text("one\ntwo\n")
    (tmp_path / "keys").symlink_to("secret")
    monkeypatch.setenv("QUIRE_API_KEY", "three")
    assert read_keys(str(tmp_path / "keys")) == ("one", "two")  # an operator's file may be a link
    assert "QUIRE_API_KEY" not in os.environ
    assert read_keys(None) == ()
    file.write_text("\n")
    with pytest.raises(StartupError, match="holds no key"):
        read_keys(str(file))


SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 3,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.7, "top_k": 20, "eos_token_id": [5, 7]}'
    )
    return folder


def defaults(model: Path, **settings: Any) -> dict[str, Any]:
    return read_checkpoint(EngineConfig(model=str(model), **settings), weights=False).default_sampling


def test_the_models_own(model: Path) -> None:
    assert defaults(model) == defaults(model, generation_config=True) == {"temperature": 0.7, "top_k": 20}
    assert defaults(model, generation_config="vllm") == defaults(model, generation_config=False) == {}


def test_another_folders(model: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "max_new_tokens": 7}')
    assert defaults(model, generation_config=str(tmp_path)) == {"temperature": 0.2}
    (tmp_path / "generation_config.json").write_text('{"temperature": -2}')
    with pytest.raises(StartupError, match=r"--generation-config .* can't be used: temperature"):
        defaults(model, generation_config=str(tmp_path))


def test_what_overrides(model: Path) -> None:
    override = {"temperature": 0.1, "min_p": 0.2}
    assert defaults(model, override_generation_config=override) == {"temperature": 0.1, "top_k": 20, "min_p": 0.2}
    assert defaults(model, override_generation_config=override, generation_config="vllm") == override
    for wrong in ({"temperature": "hot"}, {"top_p": 2}, {"top_k": 1.5}):
        with pytest.raises(StartupError, match="--override-generation-config can't be used"):
            defaults(model, override_generation_config=wrong)


def test_end_tokens_stay_the_models_own(model: Path) -> None:
    settings = {"dummy_weights": True, "kv_tokens": 64, "device": "cpu", "skip_tokenizer_init": True}
    for said, more in (("auto", {}), ("auto", {"top_p": 0.5}), ("vllm", {})):
        built = build(
            EngineConfig(model=str(model), generation_config=said, override_generation_config=more or None, **settings)
        )
        assert built.engine.scheduler.eos_ids == {3, 5, 7}
        assert built.default_sampling == ({"temperature": 0.7, "top_k": 20, **more} if said == "auto" else {})
        shown = [notice for notice in built.notices if "temperature" in notice]
        assert len(shown) == (said == "auto")
        if more:
            assert "requests have temperature=0.7, top_p=0.5, top_k=20 where they say nothing" in shown[0]
        built.engine.close()
