"""What fronts ask of an engine beside requests: that it forgets what is cached, sleeps, and wakes up."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

from quire.core.engine import Engine
from quire.errors import EngineDead, InputError, NotIdle, Overloaded
from quire.ipc.messages import AdminRequest, Reply

RETRY_AFTER = 10  # seconds, after a wake-up that failed
log = logging.getLogger("quire")


class AdminOps:
    """On the thread of `engine`. A sleep that waits for requests to end is answered once they have."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.sleep_controller = engine, engine.sleep_controller
        self._pending_sleep: tuple[int, AdminRequest] | None = None  # a front, and the sleep that it asked for

    def handle(self, client_index: int, message: AdminRequest) -> Reply | None:
        """The answer; None: it comes later."""
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
        """What is told of it: what was asked wrongly, or that the log knows. An engine that is dead raises."""
        if isinstance(error, InputError):
            return Reply(message.key, error)
        if isinstance(error, EngineDead):
            raise error
        log.error(
            "%s failed (level %d, away: %s)",
            message.what,
            self.sleep_controller.level,
            self.sleep_controller.released_tags,
            exc_info=error,
        )
        text = f"{message.what} failed: the log says why, and GET /is_sleeping how the engine is now"
        return Reply(message.key, Overloaded(text, RETRY_AFTER))

    def _request_sleep(self, client_index: int, message: AdminRequest) -> bool:
        """Whether it does; else it waits."""
        self.sleep_controller.check_level(message.level)
        if self._pending_sleep is not None:
            raise NotIdle("the engine is about to sleep already, once its requests have ended")
        if message.mode == "refuse" or not self.engine.has_unfinished_requests:
            self._enter_sleep(message)
            return True
        if message.mode == "abort":
            for id in list(self.engine.requests):
                self.engine.abort(id)
        self._pending_sleep, self.sleep_controller.is_sleep_pending = (client_index, message), True
        return False

    def _enter_sleep(self, message: AdminRequest) -> None:
        before = self.sleep_controller.level
        self.sleep_controller.sleep(message.level)
        if self.sleep_controller.level != before:
            log.warning("the engine sleeps (level %d)", self.sleep_controller.level)

    def _wake_up(self, message: AdminRequest) -> None:
        self.sleep_controller.is_sleep_pending = False  # whoever waits for the sleep is told in `fall_asleep`
        before = self.sleep_controller.level
        self.sleep_controller.wake(message.tags)
        if before and not self.sleep_controller.level:
            log.warning("the engine is awake")

    def finish_pending_sleep(self) -> Iterator[tuple[int, Reply]]:
        """The answer to a sleep that waited, and whose it is, if it is time."""
        if self._pending_sleep is None or (
            self.sleep_controller.is_sleep_pending and self.engine.has_unfinished_requests
        ):
            return
        (front, message), self._pending_sleep = self._pending_sleep, None
        if not self.sleep_controller.is_sleep_pending:
            yield front, Reply(message.key, NotIdle("the engine was woken up before it slept"))
            return
        self.sleep_controller.is_sleep_pending = False
        try:
            self._enter_sleep(message)
            yield front, self._status_reply(message.key)
        except Exception as error:
            yield front, self._error_reply(message, error)

    def _status_reply(self, key: int) -> Reply:
        """How it is."""
        level, away = self.sleep_controller.level, self.sleep_controller.released_tags
        return Reply(key, value=json.dumps({"is_sleeping": level > 0, "level": level, "away": away}))
