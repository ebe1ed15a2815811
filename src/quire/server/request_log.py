"""One log line for each request that the engine took, by --enable-log-requests: sizes and parameters, no text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from reprlib import repr as short

from starlette.types import Scope

from quire.protocol.sampling_params import SamplingParams
from quire.server.outer_middleware import REQUEST_ID
from quire.text.input_processor import Prompt

MAX_PARAM_CHARS = 500  # characters of parameters
log = logging.getLogger("quire.server")


def log_request(id: str, prompts: Sequence[Prompt], params: SamplingParams, scope: Scope) -> None:
    """Log a request that was queued. What the client chose is shown as repr, so it can't forge a line, of which only
    the beginning is made."""
    values = [(field, getattr(params, field.name)) for field in fields(params) if field.repr]
    shown = ", ".join(f"{field.name}={short(value)}" for field, value in values if value != field.default)
    tokens, pictures = sum(len(prompt.ids) for prompt in prompts), sum(len(prompt.images) for prompt in prompts)
    sizes = f"{len(prompts)} prompts, {tokens} tokens" + f", {pictures} pictures" * bool(pictures)
    text = "request %s (X-Request-Id %s): %s; %s"
    log.info(text, id, scope.get(REQUEST_ID, "-"), sizes, shown[:MAX_PARAM_CHARS] or "no parameters")
