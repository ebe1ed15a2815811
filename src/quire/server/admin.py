"""What an operator does to a running server and asks of it: admin routes, and routes that are there if flags say so."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import quire
from quire.config import EngineConfig
from quire.errors import InputError, short_repr

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.text.tokenizer import Tokenizer

PACKAGES = ("torch", "triton", "tokenizers", "llguidance", "fastapi", "uvicorn")


class AdminRoutes:
    """Looks after `llm`, whose engine `config` describes."""

    def __init__(self, llm: AsyncLLM, config: EngineConfig | None) -> None:
        self.llm, self.config = llm, config

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget cached prefixes and pictures; requests that run aren't disturbed."""
        check_query(request)
        return JSONResponse({"pages": await self.llm.reset_prefix_cache()})

    async def sleep(self, request: Request) -> Response:
        """Let go of the KV memory, and of the weights: to host memory (level=1) or for good (2)."""
        check_query(request, "level", "mode")
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise InputError(f"level is {short_repr(level)}: an engine sleeps at level 1 or 2", "level")
        return JSONResponse(await self.llm.sleep(int(level), request.query_params.get("mode", "refuse")))

    async def wake_up(self, request: Request) -> Response:
        """Take back what sleeps, or what tags say of it."""
        check_query(request, "tags")
        return JSONResponse(await self.llm.wake_up(request.query_params.getlist("tags")))

    async def is_sleeping(self) -> Response:
        """Whether the engine sleeps, and what of it."""
        return JSONResponse(await self.llm.rest())

    async def server_info(self) -> Response:
        """The engine's settings, its memory plan and what it runs on."""
        ready = self.llm.engine_client.ready
        found = {
            "version": quire.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: _version(name) for name in PACKAGES},
            "config": None if self.config is None else asdict(self.config),
            "plan": list(ready.lines),
            "notices": list(ready.notices),
            "cache": dict(ready.cache),
        }
        return Response(json.dumps(found, default=str), media_type="application/json")

    async def tokenizer_info(self) -> Response:
        """What the tokenizer's settings say, with the chat template that is used."""
        tokenizer, template = self.llm.prompts.tokenizer, self.llm.prompts.chat_template
        if tokenizer is None:
            raise InputError("this model has no tokenizer")
        found = {**tokenizer_settings(tokenizer), "chat_template": None if template is None else template.source}
        return Response(json.dumps(found), media_type="application/json")


def check_query(request: Request, *names: str) -> None:
    """InputError for a parameter in the path that isn't one of these."""
    if unknown := next((name for name in request.query_params if name not in names), None):
        raise InputError(f"there is no parameter {short_repr(unknown)} here", unknown)


def tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """As a folder's tokenizer_config.json says them, less names of files and code; special tokens are texts."""
    said = {
        name: value
        for name, value in tokenizer.config.items()
        if not name.endswith(("_file", "_path")) and name not in ("auto_map", "chat_template")
    }
    added = {str(id): _added_token_fields(token) for id, token in sorted(tokenizer.added_tokens.items())}
    found = {"tokenizer_class": None, **said, **tokenizer.special_tokens, "added_tokens_decoder": added}
    return dict(json.loads(json.dumps(found), parse_constant=lambda name: None))  # there is no NaN in JSON


def _added_token_fields(token: Any) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
