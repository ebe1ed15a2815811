"""What fronts ask of an engine beside requests: that it forgets what is cached, sleeps, and wakes up."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

from quire.control.engine import Engine
from quire.errors import EngineDead, InputError, NotIdle, Overloaded
from quire.link.messages import Answer, Care

RETRY_AFTER = 10  # seconds, after a wake-up that failed
log = logging.getLogger("quire")


class Caring:
    """On the thread of `engine`. A sleep that waits for requests to end is answered once they have."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.rest = engine, engine.rest
        self._waiting: tuple[int, Care] | None = None  # a front, and the sleep that it asked for

    def do(self, front: int, message: Care) -> Answer | None:
        """The answer; None: it comes later."""
        try:
            if message.what == "reset":
                return Answer(message.key, value=self.engine.reset_prefix_cache())
            if message.what == "sleep" and not self._sleep(front, message):
                return None
            if message.what == "wake":
                self._wake(message)
            return self._said(message.key)
        except Exception as error:
            return self._failed(message, error)

    def _failed(self, message: Care, error: Exception) -> Answer:
        """What is told of it: what was asked wrongly, or that the log knows. An engine that is dead raises."""
        if isinstance(error, InputError):
            return Answer(message.key, error)
        if isinstance(error, EngineDead):
            raise error
        log.error("%s failed (level %d, away: %s)", message.what, self.rest.level, self.rest.away, exc_info=error)
        text = f"{message.what} failed: the log says why, and GET /is_sleeping how the engine is now"
        return Answer(message.key, Overloaded(text, RETRY_AFTER))

    def _sleep(self, front: int, message: Care) -> bool:
        """Whether it does; else it waits."""
        self.rest.check_level(message.level)
        if self._waiting is not None:
            raise NotIdle("the engine is about to sleep already, once its requests have ended")
        if message.mode == "refuse" or not self.engine.unfinished:
            self._fall(message)
            return True
        if message.mode == "abort":
            for id in list(self.engine.requests):
                self.engine.abort(id)
        self._waiting, self.rest.soon = (front, message), True
        return False

    def _fall(self, message: Care) -> None:
        before = self.rest.level
        self.rest.sleep(message.level)
        if self.rest.level != before:
            log.warning("the engine sleeps (level %d)", self.rest.level)

    def _wake(self, message: Care) -> None:
        self.rest.soon = False  # whoever waits for the sleep is told in `fall_asleep`
        before = self.rest.level
        self.rest.wake(message.tags)
        if before and not self.rest.level:
            log.warning("the engine is awake")

    def fall_asleep(self) -> Iterator[tuple[int, Answer]]:
        """The answer to a sleep that waited, and whose it is, if it is time."""
        if self._waiting is None or (self.rest.soon and self.engine.unfinished):
            return
        (front, message), self._waiting = self._waiting, None
        if not self.rest.soon:
            yield front, Answer(message.key, NotIdle("the engine was woken up before it slept"))
            return
        self.rest.soon = False
        try:
            self._fall(message)
            yield front, self._said(message.key)
        except Exception as error:
            yield front, self._failed(message, error)

    def _said(self, key: int) -> Answer:
        """How it is."""
        level, away = self.rest.level, self.rest.away
        return Answer(key, value=json.dumps({"is_sleeping": level > 0, "level": level, "away": away}))
