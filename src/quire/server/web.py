"""The web server: uvicorn over one bound socket, its connections bounded. Knows no engine and no signals."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from quire.server.connections import BoundedProtocol, Bounds, Door
from quire.server.descriptors import capacity
from quire.server.ending import LAST_RESPONSES
from quire.server.errors import LastResort
from quire.server.places import Places

if TYPE_CHECKING:
    from quire.server.run import ServeOptions

FEW = 256  # connections
log = logging.getLogger("quire.server")


class WebServer(uvicorn.Server):
    """uvicorn, less its signal handlers, which end with the signal's exit status and know nothing of draining, and less
    its way of accepting connections, which knows no bound."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        ready: Callable[[], None],
        end: Callable[[], object] = bool,
        bounds: dict[str, Any] | None = None,
        places: Places | None = None,
    ) -> None:
        """`ready` is called once it listens, `end` when a request asked for the process's end; `bounds` are fields of
        connections.Bounds. `places` are those of all fronts, if there are several."""
        super().__init__(
            uvicorn.Config(
                LastResort(app, end),
                log_config=None,
                access_log=options.access_log,
                http="h11",
                ws="none",
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
                timeout_keep_alive=round(Bounds().idle),
                timeout_graceful_shutdown=LAST_RESPONSES,
                server_header=False,
            )
        )
        self._max_connections, self._ready, self._bounds = options.max_connections, ready, bounds or {}
        self._places = places
        if options.access_log:
            logging.getLogger("uvicorn.access").addFilter(without_query)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept on the one socket."""
        await super().startup(sockets=[])
        room = capacity(self._max_connections if self._places is None else None)
        if room < FEW and self._max_connections is None:
            log.warning("there is room for %d connections only: raise the limit of open files (ulimit -n)", room)
        [listener] = sockets or []
        make = partial(BoundedProtocol, self.config, self.server_state, self.lifespan.state)
        self.door = Door(listener, Bounds(room)._replace(**self._bounds), make, self.config.ssl, self._places)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, and let what runs end."""
        self.door.close()
        await super().shutdown(sockets)


def without_query(record: logging.LogRecord) -> bool:
    """Cuts the query, where clients put keys, from a line of uvicorn's access log."""
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, version, status = record.args
        record.args = client, method, str(path).partition("?")[0][:200], version, status
    return True
