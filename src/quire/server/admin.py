"""Admin routes (sleep, wake up, cache reset), and the routes that exist only with a flag (/server_info,
/tokenizer_info)."""

from __future__ import annotations

import json
import platform
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
    """Admin routes for `llm`, whose settings are `config`."""

    def __init__(self, llm: AsyncLLM, config: EngineConfig | None) -> None:
        self.llm, self.config = llm, config

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Drop cached prefixes and cached images. Running requests are not affected."""
        check_query(request)
        return JSONResponse({"pages": await self.llm.reset_prefix_cache()})

    async def sleep(self, request: Request) -> Response:
        """Free the KV memory, and move the weights to host memory (level=1) or discard them (level=2)."""
        check_query(request, "level", "mode")
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise InputError(f"level is {short_repr(level)}: an engine sleeps at level 1 or 2", "level")
        return JSONResponse(await self.llm.sleep(int(level), request.query_params.get("mode", "refuse")))

    async def wake_up(self, request: Request) -> Response:
        """Restore what was freed: everything, or only the parts named by `tags`."""
        check_query(request, "tags")
        return JSONResponse(await self.llm.wake_up(request.query_params.getlist("tags")))

    async def is_sleeping(self) -> Response:
        """Return whether the engine sleeps, at which level, and which parts are freed."""
        return JSONResponse(await self.llm.rest())

    async def server_info(self) -> Response:
        """Return the engine's settings, its memory plan, and versions."""
        ready = self.llm.engine_client.ready
        info = {
            "version": quire.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: _version(name) for name in PACKAGES},
            "config": None if self.config is None else self.config.flat(),
            "plan": list(ready.lines),
            "notices": list(ready.notices),
            "cache": dict(ready.cache),
        }
        return Response(json.dumps(info, default=str), media_type="application/json")

    async def tokenizer_info(self) -> Response:
        """Return the tokenizer's settings and the chat template in use."""
        tokenizer, template = self.llm.prompts.tokenizer, self.llm.prompts.chat_template
        if tokenizer is None:
            raise InputError("this model has no tokenizer")
        info = {**tokenizer_settings(tokenizer), "chat_template": None if template is None else template.source}
        return Response(json.dumps(info), media_type="application/json")


def check_query(request: Request, *names: str) -> None:
    """Raise InputError if the query has a parameter that is not in `names`."""
    if unknown := next((name for name in request.query_params if name not in names), None):
        raise InputError(f"there is no query parameter {short_repr(unknown)} on this route", unknown)


def tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the settings of tokenizer_config.json without names of files and of code. Special tokens are strings."""
    settings = {
        name: value
        for name, value in tokenizer.config.items()
        if not name.endswith(("_file", "_path")) and name not in ("auto_map", "chat_template")
    }
    added = {str(id): _added_token_fields(token) for id, token in sorted(tokenizer.added_tokens.items())}
    info = {"tokenizer_class": None, **settings, **tokenizer.special_tokens, "added_tokens_decoder": added}
    return dict(json.loads(json.dumps(info), parse_constant=lambda name: None))  # NaN, which JSON lacks, as null


def _added_token_fields(token: Any) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
