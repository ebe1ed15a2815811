"""A long chat with tools, which clients that aren't ours replay over templates of published models: every request is
answered, and nearly all of its prompt is found in the prefix cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import echo_service
import pytest
from published_tokenizers import fetch_tokenizer
from test_frameworks import CLIENTS, HERE, needs_node, output, python
from tokenizers import Tokenizer

from quire.config import EngineConfig

pytestmark = pytest.mark.xdist_group("replays")
MODELS = ("qwen3", "llama3_1", "gemma3")
ROUNDS = 15  # each a user's message, a call, its result and an answer: two requests
CACHED = 0.9  # of a prompt: the rest is new, or in a page that was not full
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
READ: Any = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file of the project.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
            "required": ["path"],
        },
    },
}


def chat() -> dict[str, Any]:
    """Messages in OpenAI's form, and tools."""
    rules = " ".join(f"Rule {n}: keep file {n} of the project as short as it is clear." for n in range(120))
    messages: list[Any] = [{"role": "system", "content": f"You are a careful engineer. {rules}"}]
    for n in range(ROUNDS):
        function = {"name": "read_file", "arguments": json.dumps({"path": f"src/part_{n}.py", "lines": 40 + n})}
        messages += [
            {"role": "user", "content": f'What does part {n} do? "Quoted", naïve, 日本語.'},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": f"call_{n:05}", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": f"call_{n:05}", "content": f"def part_{n}(x):\n    return x + {n}\n"},
            {"role": "assistant", "content": f"It adds {n} to its argument."},
        ]  # fmt: skip
    return {"messages": messages, "tools": [READ]}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Servers of models with random weights, each with a published tokenizer and its template."""
    with ExitStack() as stack:
        found = []
        for name in MODELS:
            theirs, folder = fetch_tokenizer(name), tmp_path_factory.mktemp(name)
            shutil.copytree(theirs, folder, dirs_exist_ok=True)
            vocab = Tokenizer.from_file(str(theirs / "tokenizer.json")).get_vocab_size()
            (folder / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": vocab}))
            config = EngineConfig.of(
                model=str(folder), dummy_weights=True, device="cpu", kv_tokens=65536, threads=1, swap_gib=0
            )
            found.append(stack.enter_context(echo_service.serving(config)).url)
        yield found


def check(printed: str) -> None:
    for name, counts in zip(MODELS, json.loads(printed), strict=True):
        assert len(counts) == 2 * ROUNDS
        shares = [cached / length for length, cached in counts[1:]]
        assert min(shares) >= CACHED, (name, counts)


@pytest.mark.parametrize("client", ["openai", "responses", "anthropic", "litellm"])
def test_python(urls: list[str], tmp_path: Path, client: str) -> None:
    (tmp_path / "chat").write_text(json.dumps(chat()))
    environment = "-openai2" if client == "litellm" else ""
    check(output([python(environment), HERE / "replaying.py", client, tmp_path / "chat", *urls]))


@needs_node
@pytest.mark.parametrize("client", ["ai_compatible", "ai_responses", "ai_anthropic"])
def test_ai_sdk(urls: list[str], tmp_path: Path, client: str) -> None:
    (tmp_path / "chat").write_text(json.dumps(chat()))
    (tmp_path / "replaying_ai.mjs").write_text((HERE / "replaying_ai.mjs").read_text())
    (tmp_path / "node_modules").symlink_to(CLIENTS / "node_modules")
    check(output(["node", "replaying_ai.mjs", client, "chat", *urls], tmp_path))
