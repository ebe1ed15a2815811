"""The web server: uvicorn on one bound socket, with limits on connections."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from quire.server.accept_slots import AcceptSlots
from quire.server.connections import BoundedProtocol, ConnectionAcceptor, ConnectionLimits
from quire.server.errors import CatchAllMiddleware
from quire.server.options import connection_capacity
from quire.server.shutdown import LAST_RESPONSES_SECONDS

if TYPE_CHECKING:
    from quire.server.options import ServeOptions

LOW_CONNECTIONS = 256  # a warning is logged below this
log = logging.getLogger("quire.server")


class WebServer(uvicorn.Server):
    """uvicorn without its signal handlers, which exit without draining, and without its way of accepting connections,
    which has no limit."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        on_ready: Callable[[], None],
        on_exit_request: Callable[[], object] = bool,
        limits: dict[str, Any] | None = None,
        accept_slots: AcceptSlots | None = None,
    ) -> None:
        """`on_ready` is called once the server listens, `on_exit_request` when a request raised SystemExit or
        KeyboardInterrupt. `limits` are fields of ConnectionLimits. `accept_slots` are shared by all frontends, if there
        are several."""
        super().__init__(
            uvicorn.Config(
                CatchAllMiddleware(app, on_exit_request),
                log_config=None,
                access_log=options.access_log,
                http="h11",
                ws="none",
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
                timeout_keep_alive=round(ConnectionLimits().idle),
                timeout_graceful_shutdown=LAST_RESPONSES_SECONDS,
                server_header=False,
            )
        )
        self._max_connections, self._on_ready, self._limits = options.max_connections, on_ready, limits or {}
        self._accept_slots = accept_slots
        if options.access_log:
            logging.getLogger("uvicorn.access").addFilter(strip_query)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: signals are handled by the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on the one socket."""
        await super().startup(sockets=[])
        room = connection_capacity(self._max_connections if self._accept_slots is None else None)
        if room < LOW_CONNECTIONS and self._max_connections is None:
            log.warning("there is room for %d connections only: raise the limit of open files (ulimit -n)", room)
        [listener] = sockets or []
        new_protocol = partial(BoundedProtocol, self.config, self.server_state, self.lifespan.state)
        limits = ConnectionLimits(room)._replace(**self._limits)
        self.acceptor = ConnectionAcceptor(listener, limits, new_protocol, self.config.ssl, self._accept_slots)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and let open connections end."""
        self.acceptor.close()
        await super().shutdown(sockets)


def strip_query(record: logging.LogRecord) -> bool:
    """Remove the query, which may contain keys, from a record of uvicorn's access log."""
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, version, status = record.args
        record.args = client, method, str(path).partition("?")[0][:200], version, status
    return True
