"""docs/reference.md is what the code declares, and docs/serving.md names no flag, route, field or metric that is not
there."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import echo_service

from quire.cli import build_parsers
from quire.cli.vllm_flags import NO_EFFECT_FLAGS, unsupported_reason
from quire.errors import StartupError
from quire.models import FAMILIES, read_spec
from quire.models.named_configs import CONFIGS, named_config
from quire.server.anthropic.input import MessageRequest
from quire.server.errors import OPENAI_TYPES
from quire.server.request_models import ChatRequest, CompletionRequest
from quire.server.responses.input import ResponseRequest
from tools.doc_tables import made_pages

ROOT = Path(__file__).parents[1]
SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def section(text: str, name: str) -> str:
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, name
    return found[1]


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`([^`\s]+)`", text))


def test_the_reference_is_the_codes() -> None:
    for page, text in made_pages():
        assert page.read_text(encoding="utf-8") == text, f"docs/{page.name} is stale: run tools/doc_tables.py"
    assert "| `--port` | PORT | port to listen on (default: 8000) |" in REFERENCE
    assert "| log-probabilities in an answer | 524,288:" in REFERENCE
    assert "| `temperature` | 1.0 | number from 0 to 100 | all | 0 is greedy |" in REFERENCE
    assert "| `top_logprobs` | integer from 0 to 20 | chat |" in REFERENCE
    assert "| `quire_kv_bytes` | gauge | `category` |" in REFERENCE
    assert "| `/v1/prefixes/NAME` | DELETE | admin |" in REFERENCE
    gemma = "| `gemma-4-31b` | `Gemma4ForCausalLM` | 30.7 B | 50 window of 1,024, 10 full | 901,120 |"
    assert gemma in section(REFERENCE, "Named shapes")


def test_families_read_the_quantized_checkpoints_that_they_name() -> None:
    methods = {
        "FP8": {"quant_method": "fp8"}, "AWQ": {"quant_method": "awq", "bits": 4, "version": "gemm"},
        "GPTQ": {"quant_method": "gptq", "bits": 4}, "MXFP4": {"quant_method": "mxfp4"},
    }  # fmt: skip
    families = {name: family for family in FAMILIES for name in family.architectures}
    for config in map(named_config, CONFIGS):
        read = []
        for name, section in methods.items():
            with suppress(StartupError):
                read_spec({**config, "quantization_config": section})
                read.append(name)
        assert (", ".join(read) or "none") == families[config["architectures"][0]].checkpoints


def test_every_field_is_in_the_reference() -> None:
    for model, *headings in (
        (CompletionRequest, "Sampling parameters", "Fields of completions and chats", "Refused fields"),
        (ChatRequest, "Sampling parameters", "Fields of completions and chats", "Refused fields"),
        (ResponseRequest, "Sampling parameters", "Fields of completions and chats", "Fields of responses"),
        (MessageRequest, "Sampling parameters", "Fields of completions and chats", "Fields of messages"),
    ):
        assert model.model_fields.keys() <= set().union(*(quoted(section(REFERENCE, name)) for name in headings))


def test_flags_that_serving_names() -> None:
    flags = {option for parser in build_parsers()[1].values() for option in parser._option_string_actions}
    named = {name for name in re.findall(r"--[a-z][a-z-]+", SERVING) if name not in flags | NO_EFFECT_FLAGS.keys()}
    assert {name for name in named if unsupported_reason(name) is None} == set()


def test_routes_and_errors() -> None:
    with echo_service.serving(server_info=True, tokenizer_info=True) as running:
        document = running.http.get("/openapi.json").json()
    paths = {path.replace("{name}", "NAME") for path in document["paths"]}
    assert len(paths) > 20
    assert paths <= quoted(section(REFERENCE, "Routes"))
    assert {path.removesuffix("/NAME") for path in paths} <= quoted(section(SERVING, "APIs"))
    errors = section(SERVING, "Errors")
    for code, kind in OPENAI_TYPES.items():
        assert str(code) in errors
        assert f"`{kind}`" in errors


def test_metrics() -> None:
    with echo_service.serving() as running:
        running.http.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})
        scrape = running.http.get("/metrics").text
    real = {line.split()[2] for line in scrape.splitlines() if line.startswith("# TYPE")}
    assert {name for name in quoted(section(REFERENCE, "Metrics")) if name.startswith("quire_")} == real
    assert set(re.findall(r"quire_[a-z_]*[a-z]", SERVING)) <= real


def test_the_tests_that_security_names_are_there() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    folder = Path("tests")
    for name in re.findall(
        r"`((?:tests/)?[\w/]+(?:\.py)?)`", text[text.index("| promise |") : text.index("## What is not")]
    ):
        if name.startswith("tests/"):
            folder = Path(name).parent if name.endswith(".py") else Path(name)
            assert (ROOT / name).exists(), name
        elif name.endswith(".py"):
            assert (ROOT / folder / name).exists(), name


def test_every_promise_names_a_test_that_exists() -> None:
    rows = [line.split("\t") for line in (ROOT / "docs" / "promises.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    assert len(rows) > 900
    sources: dict[str, str] = {}
    lost = []
    for _, promise, test in rows:
        path, _, name = test.partition("::")
        if path not in sources:
            file = ROOT / path
            sources[path] = "".join(one.read_text() for one in file.rglob("*.py")) if file.is_dir() else (
                file.read_text() if file.is_file() else ""
            )  # fmt: skip
        function = name.partition("[")[0].rpartition("::")[2]
        if not sources[path] or (function and not re.search(rf"^ *(async )?def {function}\(", sources[path], re.M)):
            lost.append(f"{promise}: {test}")
    assert lost == []
