"""Writing a response's body at once, with nothing to await: an ASGI extension that quire's own protocol class offers.

A response begins and ends the ordinary way, so whoever is around it sees it, and h11 keeps its state; what is written
here is a part of its body in between, framed as h11 would.
"""

from __future__ import annotations

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

DIRECT_EXTENSION = "quire.direct"  # in a scope's extensions


class DirectWriter:
    """The body of one response, which has no Content-Length."""

    __slots__ = ("_chunked", "_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl) -> None:
        self._cycle, self._flow = cycle, flow
        self._chunked = cycle.scope["http_version"] == "1.1"

    @property
    def is_open(self) -> bool:
        """Whether a part may be written now: the response is under way, and its client reads what it is sent."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.response_started:
            return False
        return not cycle.transport.is_closing()

    def write(self, part: bytes) -> None:
        """A part that isn't empty. Only while `is_open`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if self._chunked else part)
