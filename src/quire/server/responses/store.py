"""Responses that are kept for a while: in memory, so many at the most, the oldest going first."""

from __future__ import annotations

import json
from collections import OrderedDict
from hashlib import sha256
from typing import Any, NamedTuple

from fastapi import Request

from quire.errors import InputError
from quire.server.errors import UnknownResponse
from quire.server.guards import request_keys

Json = dict[str, Any]
MAX_STORED_BYTES = 256 << 20  # of all responses kept, with the conversations that they ended
MAX_CONVERSATION = 16 << 20  # bytes of what a response to be kept answers


class StoredResponse(NamedTuple):
    """A response as JSON, and the items of the conversation up to its end, those of its output too."""

    owner: bytes
    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.items)


def owner_of(http: Request) -> bytes:
    """Who asks: a digest of the keys that came with the request, or of none."""
    other = http.headers.get("authorization", "").encode("latin-1")
    return sha256(b"\0".join(request_keys(http.scope) or [other])).digest()


class ResponseStore:
    """At most `capacity` responses in MAX_STORED_BYTES; of 0 it is off. Only the owner of a response finds it."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity, self.bytes = capacity, 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def dump_items(self, items: list[Json]) -> bytes:
        """The items of a conversation to be kept, as JSON. InputError if they are too large."""
        found = json.dumps(items, separators=(",", ":")).encode()
        if len(found) > MAX_CONVERSATION:
            raise InputError(
                f"the conversation has {len(found)} bytes, and one that is stored may have {MAX_CONVERSATION}: "
                "set store to false",
                "store",
            )
        return found

    def put(self, id: str, owner: bytes, response: Json, previous_items: bytes) -> None:
        """Keep a response to the items `previous_items`, the JSON of a list that isn't empty."""
        output = [json.dumps(item, separators=(",", ":")) for item in response["output"]]
        items = b",".join([previous_items[:-1], *(item.encode() for item in output)]) + b"]"
        stored = StoredResponse(owner, json.dumps(response, separators=(",", ":")).encode(), items)
        self._responses[id] = stored
        self.bytes += stored.size
        while len(self._responses) > self.capacity or self.bytes > MAX_STORED_BYTES:
            _, gone = self._responses.popitem(last=False)
            self.bytes -= gone.size

    def get(self, id: str, owner: bytes) -> StoredResponse:
        """One that `owner` stored. UnknownResponse if there is none."""
        if not self.capacity:
            raise UnknownResponse("this server stores no responses: start it with --store-responses")
        found = self._responses.get(id)
        if found is None or found.owner != owner:
            raise UnknownResponse(f"there is no response {id[:80]!r}; it may be one of those dropped for newer ones")
        return found

    def drop(self, id: str, owner: bytes) -> None:
        """Forget one. UnknownResponse if there is none."""
        self.bytes -= self.get(id, owner).size
        del self._responses[id]
