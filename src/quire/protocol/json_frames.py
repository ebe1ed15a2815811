"""What the renderer and its process say to each other: frames of a length and JSON. Loads nothing."""

from __future__ import annotations

import json
from typing import Any

HEADER = 4  # bytes of a frame's length


def pack(value: Any) -> bytes:
    """A frame. Lone surrogates pass."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return len(body).to_bytes(HEADER, "big") + body


def unpack(body: bytes) -> Any:
    """What a frame's body says. ValueError or RecursionError for one that isn't JSON."""
    return json.loads(body.decode("utf-8", "surrogatepass"))
