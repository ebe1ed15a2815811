"""Log each request that was queued, with --enable-log-requests: sizes and parameters, no text."""

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
    """Log a request that was queued. Values from the client are logged as their repr, which is shortened, so that they
    cannot forge a log line."""
    values = [(field, getattr(params, field.name)) for field in fields(params) if field.repr]
    shown = ", ".join(f"{field.name}={short(value)}" for field, value in values if value != field.default)
    tokens, images = sum(len(prompt.ids) for prompt in prompts), sum(len(prompt.images) for prompt in prompts)
    sizes = f"{len(prompts)} prompts, {tokens} tokens" + f", {images} images" * bool(images)
    text = "request %s (X-Request-Id %s): %s; %s"
    log.info(text, id, scope.get(REQUEST_ID, "-"), sizes, shown[:MAX_PARAM_CHARS] or "no parameters")
