"""Write a part of a response's body without awaiting: an ASGI extension that quire's own protocol class offers.

A response begins and ends the ordinary way, so middleware sees it and h11's state stays valid. The parts between are
written here, with the same framing as h11's.
"""

from __future__ import annotations

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

DIRECT_EXTENSION = "quire.direct"  # in a scope's extensions


class DirectWriter:
    """Writes the body of one response that has no Content-Length."""

    __slots__ = ("_chunked", "_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl) -> None:
        self._cycle, self._flow = cycle, flow
        self._chunked = cycle.scope["http_version"] == "1.1"

    @property
    def is_open(self) -> bool:
        """Return True if a part can be written now: the response has begun, and the client reads what is sent."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.response_started:
            return False
        return not cycle.transport.is_closing()

    def write(self, part: bytes) -> None:
        """Write a part, which must not be empty. Only while `is_open`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if self._chunked else part)
