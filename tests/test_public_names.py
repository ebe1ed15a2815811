"""What an earlier revision's README, docs and examples use is still there: imports, flags, settings, metrics, routes.

golden/public_names.json was written with that revision."""

from __future__ import annotations

import ast
import json
from importlib import import_module
from pathlib import Path

import echo_service
import httpx
import numpy as np
import pytest

from quire.cli import build_parsers
from quire.config import EngineConfig, Experiment
from quire.errors import StartupError
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sequence import Sequence
from quire.text.input_processor import engine_config

NAMES = json.loads((Path(__file__).parent / "golden" / "public_names.json").read_text())


@pytest.mark.parametrize("statement", NAMES["imports"])
def test_imports(statement: str) -> None:
    [node] = ast.parse(statement).body
    assert isinstance(node, ast.Import | ast.ImportFrom)
    module = import_module(node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name)
    for alias in node.names if isinstance(node, ast.ImportFrom) else ():
        assert getattr(module, alias.name) is not None


def test_old_names_are_the_present_objects() -> None:
    assert import_module("quire.vocabulary.specs").Geometry is KVCacheConfig
    assert import_module("quire.control.request").Sequence is Sequence
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'quire\.vocabulary\.nothing'"):
        import_module("quire.vocabulary.nothing")


@pytest.mark.parametrize("command", NAMES["flags"])
def test_flags(command: str) -> None:
    parser = build_parsers()[1][command]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert set(NAMES["flags"][command]) <= flags


def test_settings_and_their_defaults() -> None:
    assert EngineConfig().flat() == NAMES["settings"]
    assert EngineConfig.of(**NAMES["settings"]) == EngineConfig()
    given = engine_config("x", {"retention": "slack", "experiment": Experiment(page_sizes="max"), "kv_tokens": 8})
    assert given.experiment == Experiment(retention="slack", page_sizes="max")
    assert EngineConfig.of(**given.flat()) == given
    with pytest.raises(TypeError, match="retentions"):
        engine_config("x", {"retentions": "slack"})
    with pytest.raises(StartupError, match=r"--retention is 'no'. Choose one of: paper, slack, boundary"):
        engine_config("x", {"retention": "no"})


def test_metrics_and_routes() -> None:
    with echo_service.serving(server_info=True, tokenizer_info=True) as running:
        httpx.post(f"{running.url}/v1/completions", json={"prompt": [5], "max_tokens": 2})
        scrape = httpx.get(f"{running.url}/metrics").text
        paths = httpx.get(f"{running.url}/openapi.json").json()["paths"]
    assert set(NAMES["metrics"]) <= {line.split()[2] for line in scrape.splitlines() if line.startswith("# TYPE")}
    assert {path: set(NAMES["routes"][path]) - set(paths[path]) for path in NAMES["routes"]} == {
        path: set() for path in NAMES["routes"]
    }


def test_settings_are_checked_and_plain() -> None:
    given = EngineConfig.of(tp=np.int64(2), swap_gib=np.float32(0.5), page_sizes="max")
    assert json.loads(json.dumps(given.flat())) == given.flat() | {"override_generation_config": None}
    assert EngineConfig.of(**given.flat()) == given
    assert EngineConfig.of(experiment=Experiment(page_sizes="gcd", retention="slack"), page_sizes="max").experiment == (
        Experiment(page_sizes="max", retention="slack")
    )
    for wrong in (None, {"page_sizes": "gcd"}, "x"):
        with pytest.raises(StartupError, match="It must be an Experiment"):
            EngineConfig.of(experiment=wrong, page_sizes="max")
