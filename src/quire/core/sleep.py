"""Sleep: an engine without requests lets go of its runner's memory, and takes it back when it is woken up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import proxy

from quire.core.runner import SleepableRunner
from quire.errors import Asleep, InputError, NotIdle, short_repr
from quire.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.core.engine import Engine

SLEEP_LEVELS = (1, 2)
MEMORY_TAGS = ("weights", "kv_cache")  # in the order in which they are taken back
RETRY_AFTER = 10  # seconds: nobody knows when it is woken up
PREFIX_PARAMS = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


class SleepController:
    """Whether `engine` sleeps, at which `level` (0: it doesn't), and what of TAGS is `released_tags`. `saved_prefixes`
    are those that are registered, and computed again at wake-up. `is_sleep_pending`: it will sleep once its requests
    have ended."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine = proxy(engine)  # whose memory goes with the last who has it, not with a collection
        self.level, self.released_tags = 0, tuple[str, ...]()
        self.is_sleep_pending = False
        self.saved_prefixes: dict[str, list[int]] = {}

    def check_awake(self) -> None:
        """Asleep if it takes no requests."""
        if self.level:
            raise Asleep(f"the engine sleeps (level {self.level}), and takes requests once it is woken", RETRY_AFTER)
        if self.is_sleep_pending:
            raise Asleep("the engine is about to sleep: it lets requests end, and takes no new ones", RETRY_AFTER)

    def check_level(self, level: int) -> None:
        """InputError if it can't sleep so."""
        if type(level) is not int or level not in SLEEP_LEVELS:
            raise InputError(f"level is {short_repr(level)}: an engine sleeps at level 1 or 2", "level")
        if self.engine.shared_memory_group is not None:
            raise InputError("models that share a pool of KV memory don't sleep: close one instead", "level")
        if not isinstance(self.engine.runner, SleepableRunner):
            raise InputError("what this engine runs on can't sleep", "level")

    def sleep(self, level: int) -> None:
        """Let go of the KV memory, and of the weights: to host memory (1) or for good (2). What is cached is lost.
        InputError for a level that isn't there, NotIdle while there are requests; then nothing changed."""
        engine, runner = self.engine, self.engine.runner
        self.check_level(level)
        if engine.has_unfinished_requests:
            running, waiting = len(engine.scheduler.running), len(engine.requests) - len(engine.scheduler.running)
            raise NotIdle(f"{running} requests run and {waiting} wait: the engine sleeps once they have ended")
        if len(self.released_tags) == len(MEMORY_TAGS) and level <= self.level:
            return
        assert isinstance(runner, SleepableRunner), "looked at above"
        memory = engine.scheduler.memory
        if memory.prefix_cache is not None:
            for name, prefix in list(memory.prefix_cache.registered_prefixes.items()):
                self.saved_prefixes[name] = prefix.tokens
                memory.prefix_cache.unpin(name)
        memory.discard_contents()
        engine.scheduler.new_slots.clear()  # of sequences that have left again
        self.level, self.released_tags = max(level, self.level), MEMORY_TAGS
        runner.sleep(self.level)

    def restore_sleep(self) -> None:
        """The runner is another one, and awake: it is to sleep as the one before."""
        runner = self.engine.runner
        if self.released_tags:
            assert isinstance(runner, SleepableRunner), "the one before slept"
            runner.sleep(self.level)
            if back := tuple(tag for tag in MEMORY_TAGS if tag not in self.released_tags):
                runner.wake(back)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take back what these TAGS name, all of it if there are none, as far as it is away. Once all is there requests
        are taken, and registered prefixes are computed again. InputError for other tags. What the runner raises leaves
        away what wasn't taken back."""
        tags = tags or MEMORY_TAGS
        for tag in tags:
            if tag not in MEMORY_TAGS:
                raise InputError(f"tags has {short_repr(tag)}; there are {' and '.join(MEMORY_TAGS)}", "tags")
        if "kv_cache" in tags and "weights" in self.released_tags and "weights" not in tags:
            raise InputError("tags has kv_cache alone, and weights sleep: what is made over both needs them", "tags")
        runner = self.engine.runner
        for tag in [tag for tag in MEMORY_TAGS if tag in tags and tag in self.released_tags]:
            assert isinstance(runner, SleepableRunner), "it fell asleep"
            runner.wake((tag,))
            self.released_tags = tuple(other for other in self.released_tags if other != tag)
        if not self.released_tags:
            self.level = 0
            prefixes, self.saved_prefixes = self.saved_prefixes, {}
            for name, tokens in prefixes.items():
                self.engine.recompute_prefix(name, tokens)
