"""Frames of a length and JSON, between the chat template renderer and its process. Imports only json."""

from __future__ import annotations

import json
from typing import Any

HEADER = 4  # bytes of a frame's length


def pack(value: Any) -> bytes:
    """Return the frame of a value. Lone surrogates are kept."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return len(body).to_bytes(HEADER, "big") + body


def unpack(body: bytes) -> Any:
    """Return the value of a frame's body. Raise ValueError or RecursionError if it is not JSON."""
    return json.loads(body.decode("utf-8", "surrogatepass"))
