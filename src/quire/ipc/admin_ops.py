"""Administration of an engine: reset the prefix cache, sleep and wake up."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

from quire.core.engine import Engine
from quire.errors import EngineDead, InputError, NotIdle, Overloaded
from quire.ipc.messages import AdminRequest, Reply

RETRY_AFTER = 10  # seconds, after a failed wake-up
log = logging.getLogger("quire")


class AdminOps:
    """Carry out administrative requests on the thread of `engine`. A sleep that waits for requests to end is answered
    once they have ended."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.sleep_controller = engine, engine.sleep_controller
        self._pending_sleep: tuple[int, AdminRequest] | None = None  # a client, and its request

    def handle(self, client_index: int, message: AdminRequest) -> Reply | None:
        """Carry out a request and return the reply, or None if the reply follows later. Raise EngineDead if the engine
        is dead."""
        try:
            if message.what == "reset":
                return Reply(message.key, value=self.engine.reset_prefix_cache())
            if message.what == "sleep" and not self._request_sleep(client_index, message):
                return None
            if message.what == "wake":
                self._wake_up(message)
            return self._status_reply(message.key)
        except Exception as error:
            return self._error_reply(message, error)

    def _error_reply(self, message: AdminRequest, error: Exception) -> Reply:
        """Return a reply with an InputError as it is, or, for other errors, which are logged, with an Overloaded. Raise
        EngineDead again."""
        if isinstance(error, InputError):
            return Reply(message.key, error)
        if isinstance(error, EngineDead):
            raise error
        log.error(
            "%s failed (level %d, released: %s)",
            message.what,
            self.sleep_controller.level,
            self.sleep_controller.released_tags,
            exc_info=error,
        )
        text = f"{message.what} failed: see the log for the cause, and GET /is_sleeping for the engine's state"
        return Reply(message.key, Overloaded(text, RETRY_AFTER))

    def _request_sleep(self, client_index: int, message: AdminRequest) -> bool:
        """Put the engine to sleep and return True, or return False if it must wait for requests to end."""
        self.engine.check_sleep_level(message.level)
        if self._pending_sleep is not None:
            raise NotIdle("the engine is about to sleep already, once its requests have ended")
        if message.mode == "refuse" or not self.engine.has_unfinished_requests:
            self._enter_sleep(message)
            return True
        if message.mode == "abort":
            for id in list(self.engine.requests):
                self.engine.abort(id)
        self._pending_sleep = client_index, message
        self.sleep_controller.announce_sleep()
        return False

    def _enter_sleep(self, message: AdminRequest) -> None:
        before = self.sleep_controller.level
        self.engine.sleep(message.level)
        if self.sleep_controller.level != before:
            log.warning("the engine sleeps (level %d)", self.sleep_controller.level)

    def _wake_up(self, message: AdminRequest) -> None:
        self.sleep_controller.cancel_sleep()  # `finish_pending_sleep` answers the request that waits
        before = self.sleep_controller.level
        self.engine.wake(message.tags)
        if before and not self.sleep_controller.level:
            log.warning("the engine is awake")

    def finish_pending_sleep(self) -> Iterator[tuple[int, Reply]]:
        """Yield the client and the reply of a sleep that waited, if it is due: its requests have ended, or the engine
        was woken up."""
        if self._pending_sleep is None or (
            self.sleep_controller.is_sleep_pending and self.engine.has_unfinished_requests
        ):
            return
        (client_index, message), self._pending_sleep = self._pending_sleep, None
        if not self.sleep_controller.is_sleep_pending:
            yield client_index, Reply(message.key, NotIdle("the engine was woken up before it slept"))
            return
        self.sleep_controller.cancel_sleep()
        try:
            self._enter_sleep(message)
            yield client_index, self._status_reply(message.key)
        except Exception as error:
            yield client_index, self._error_reply(message, error)

    def _status_reply(self, key: int) -> Reply:
        """Return a reply with the state of the engine as JSON."""
        level, away = self.sleep_controller.level, self.sleep_controller.released_tags
        return Reply(key, value=json.dumps({"is_sleeping": level > 0, "level": level, "away": away}))
