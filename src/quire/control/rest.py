"""Sleep: an engine without requests lets go of its runner's memory, and takes it back when it is woken up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import proxy

from quire.control.runners import Sleeping
from quire.errors import Asleep, InputError, NotIdle, shown
from quire.vocabulary.params import SamplingParams

if TYPE_CHECKING:
    from quire.control.engine import Engine

LEVELS = (1, 2)
TAGS = ("weights", "kv_cache")  # in the order in which they are taken back
RETRY_AFTER = 10  # seconds: nobody knows when it is woken up
PREFIX = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


class Rest:
    """Whether `engine` sleeps, at which `level` (0: it doesn't), and what of TAGS is `away`. `prefixes` are those that
    are registered, and computed again at wake-up. `soon`: it will sleep once its requests have ended."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine = proxy(engine)  # whose memory goes with the last who has it, not with a collection
        self.level, self.away = 0, tuple[str, ...]()
        self.soon = False
        self.prefixes: dict[str, list[int]] = {}

    def check_awake(self) -> None:
        """Asleep if it takes no requests."""
        if self.level:
            raise Asleep(f"the engine sleeps (level {self.level}), and takes requests once it is woken", RETRY_AFTER)
        if self.soon:
            raise Asleep("the engine is about to sleep: it lets requests end, and takes no new ones", RETRY_AFTER)

    def check_level(self, level: int) -> None:
        """InputError if it can't sleep so."""
        if type(level) is not int or level not in LEVELS:
            raise InputError(f"level is {shown(level)}: an engine sleeps at level 1 or 2", "level")
        if self.engine.turns is not None:
            raise InputError("models that share a pool of KV memory don't sleep: close one instead", "level")
        if not isinstance(self.engine.runner, Sleeping):
            raise InputError("what this engine runs on can't sleep", "level")

    def sleep(self, level: int) -> None:
        """Let go of the KV memory, and of the weights: to host memory (1) or for good (2). What is cached is lost.
        InputError for a level that isn't there, NotIdle while there are requests; then nothing changed."""
        engine, runner = self.engine, self.engine.runner
        self.check_level(level)
        if engine.unfinished:
            running, waiting = len(engine.scheduler.running), len(engine.requests) - len(engine.scheduler.running)
            raise NotIdle(f"{running} requests run and {waiting} wait: the engine sleeps once they have ended")
        if len(self.away) == len(TAGS) and level <= self.level:
            return
        assert isinstance(runner, Sleeping), "looked at above"
        memory = engine.scheduler.memory
        if memory.prefixes is not None:
            for name, prefix in list(memory.prefixes.registered.items()):
                self.prefixes[name] = prefix.tokens
                memory.prefixes.unpin(name)
        memory.renew()
        engine.scheduler.births.clear()  # of sequences that have left again
        self.level, self.away = max(level, self.level), TAGS
        runner.sleep(self.level)

    def again(self) -> None:
        """The runner is another one, and awake: it is to sleep as the one before."""
        runner = self.engine.runner
        if self.away:
            assert isinstance(runner, Sleeping), "the one before slept"
            runner.sleep(self.level)
            if back := tuple(tag for tag in TAGS if tag not in self.away):
                runner.wake(back)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take back what these TAGS name, all of it if there are none, as far as it is away. Once all is there requests
        are taken, and registered prefixes are computed again. InputError for other tags. What the runner raises leaves
        away what wasn't taken back."""
        tags = tags or TAGS
        for tag in tags:
            if tag not in TAGS:
                raise InputError(f"tags has {shown(tag)}; there are {' and '.join(TAGS)}", "tags")
        if "kv_cache" in tags and "weights" in self.away and "weights" not in tags:
            raise InputError("tags has kv_cache alone, and weights sleep: what is made over both needs them", "tags")
        runner = self.engine.runner
        for tag in [tag for tag in TAGS if tag in tags and tag in self.away]:
            assert isinstance(runner, Sleeping), "it fell asleep"
            runner.wake((tag,))
            self.away = tuple(other for other in self.away if other != tag)
        if not self.away:
            self.level = 0
            prefixes, self.prefixes = self.prefixes, {}
            for name, tokens in prefixes.items():
                self.engine.compute_prefix(name, tokens)
