"""Frameworks that aren't ours, unmodified, by each API that they speak: texts, streams, calls, objects, overflows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import echo_service
import httpx
import pytest
from echo_service import Saying

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CLIENTS = ROOT / ".venv" / "clients"  # others are beside it: see CLIENTS in the Makefile
TEXT, STREAM, RESULT = "once upon a time", "there was a quire", "Paris: rain."
CALL = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
PAGE = '{"title":"once","number":7}'
FOUND = {"text": TEXT, "stream": STREAM, "tool": RESULT, "page": json.loads(PAGE)}
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
Served = tuple[str, Callable[..., None]]


def python(name: str = "") -> Path:
    """The Python of an environment of clients."""
    return CLIENTS.with_name(f"clients{name}") / "bin" / "python"


def output(command: Sequence[Any], folder: Path | None = None, **env: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **OFFLINE, **env}, capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server whose model says what it is told to, unless a grammar forbids it."""
    runner = Saying()
    model = echo_service.built(runner, kv_tokens=65536, max_len=16384, max_num_batched_tokens=1024)
    with echo_service.serving(model) as running:
        yield f"{running.url}/v1", runner.say


def called(name: str) -> str:
    """Says the page as a call of a function."""
    return f'[{{"name":"{name}","arguments":{PAGE}}}]'


def framework(served: Served, python: Path, *words: str, page: str = PAGE, **env: str) -> Any:
    url, say = served
    say(TEXT, STREAM, CALL, RESULT, page)
    printed = output([python, HERE / "running_frameworks.py", words[0], url, *words[1:]], **env)
    return json.loads(printed.splitlines()[-1])  # litellm tells of its errors first


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm(served: Served, provider: str) -> None:
    found = framework(served, python("-openai2"), "litellm", f"{provider}/echo")
    assert found == FOUND | {"overflow": "ContextWindowExceededError"}


def test_llama_index(served: Served) -> None:
    assert framework(served, python("-openai2"), "llama_index", page=called("Page")) == FOUND


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_pydantic_ai(served: Served, kind: str) -> None:
    page = called("final_result") if kind == "messages" else PAGE  # for other models than Claude it has no formats
    assert framework(served, python("-pydantic"), "pydantic_ai", kind, page=page) == FOUND


def test_llm(served: Served, tmp_path: Path) -> None:
    entry = {"model_id": "quire", "model_name": "echo", "api_base": served[0], "supports_tools": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry | {"supports_schema": True}]))
    assert framework(served, python(), "llm", LLM_USER_PATH=str(tmp_path)) == FOUND


@needs_node
@pytest.mark.parametrize("provider", ["openai", "chat", "compatible", "anthropic"])
def test_ai_sdk(served: Served, tmp_path: Path, provider: str) -> None:
    """Anthropic's has a function with the form of the page."""
    url, say = served
    say(TEXT, STREAM, CALL, RESULT, called("json") if provider == "anthropic" else PAGE, "once again")
    shutil.copy(HERE / "running_ai.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(CLIENTS / "node_modules")
    assert json.loads(output(["node", "running_ai.mjs", provider, url], tmp_path)) == FOUND | {"again": "once again"}


def save_tokenizer(folder: Path) -> None:
    echo_service.trained().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_lm_eval(served: Served, tmp_path: Path) -> None:
    """The log-likelihood of a choice is the sum over its tokens of the server's own log-probabilities."""
    url, say = served
    say(TEXT)
    save_tokenizer(tmp_path)
    docs = [{"question": f"{n} times once", "choices": ["upon", "a quire of pages"]} for n in range(3)]
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    program = [python("-bench"), HERE / "running_lm_eval.py", url, tmp_path, tmp_path / "docs.jsonl"]
    found = json.loads(output(program, HF_HOME=str(tmp_path)).splitlines()[-1])
    assert found["generate_until"] == found["chats"] == [[TEXT]] * 3
    for doc, row in zip(docs, found["loglikelihood"], strict=True):
        for choice, (given, _) in zip(doc["choices"], row, strict=True):
            body = {"prompt": f"{doc['question']} {choice}", "echo": True, "logprobs": 1, "max_tokens": 0}
            scored = httpx.post(f"{url}/completions", json=body).json()["choices"][0]["logprobs"]
            begins = scored["text_offset"].index(len(doc["question"]))
            assert given == pytest.approx(sum(scored["token_logprobs"][begins:]))


def test_guidellm(served: Served, tmp_path: Path) -> None:
    """A short benchmark, with prompts of its own."""
    url, say = served
    say("once upon a time " * 10)
    save_tokenizer(tmp_path)
    for path in ("/v1/chat/completions", "/v1/completions"):
        flags = {
            "backend": f"kind=openai_http,target={url.removesuffix('/v1')},model=echo,request_format={path}",
            "profile": "kind=concurrent,streams=2", "constraint": "kind=max_requests,count=6",
            "tokenizer": f"kind=hf_auto,model={tmp_path}",
            "data": "kind=synthetic_text,prompt_tokens=40,output_tokens=8",
            "output": f"kind=json,path={tmp_path}/out.json",
        }  # fmt: skip
        given = [word for name, value in flags.items() for word in (f"--{name}", value)]
        output([python("-bench"), "-m", "guidellm", "run", "--disable-console", *given], HF_HOME=str(tmp_path))
        [found] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
        requests = found["metrics"]["request_totals"]
        assert (requests["successful"], requests["errored"]) == (6, 0)
        assert found["metrics"]["output_token_count"]["successful"]["mean"] == 8


def test_aider(served: Served, tmp_path: Path) -> None:
    """One edit of a file, in aider's own format."""
    url, say = served
    file, caches = tmp_path / "greet.py", tmp_path / ".aider" / "caches"
    file.write_text('def greet():\n    return "hello"\n')
    caches.mkdir(parents=True)
    (caches / "model_prices_and_context_window.json").write_text('{"echo": {}}')  # else it asks the network
    edit = '<<<<<<< SEARCH\n    return "hello"\n=======\n    return "good day"\n>>>>>>> REPLACE\n'
    say(f"greet.py\n```python\n{edit}```\n")
    flags = "--no-git --yes-always --no-check-update --analytics-disable --no-show-model-warnings --no-pretty"
    command = [python("-aider"), "-m", "aider", "--model", "openai/echo", "--openai-api-base", url, *flags.split()]
    asked = ["--openai-api-key", "unused", "--edit-format", "diff", "--message", "Say good day.", "greet.py"]
    output([*command, *asked], tmp_path, HOME=str(tmp_path))
    assert file.read_text() == 'def greet():\n    return "good day"\n'
