"""Sleep: an engine without requests releases its runner's memory, and takes it back when it is woken."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.runner import Runner, SleepableRunner
from quire.errors import Asleep, InputError, short_repr
from quire.memory.interface import KVMemory

SLEEP_LEVELS = (1, 2)
MEMORY_TAGS = ("weights", "kv_cache")  # in the order in which they are taken back
RETRY_AFTER = 10  # seconds; when the engine will be woken is not known


class SleepController:
    """The sleep state of an engine: its `level` (0: awake) and which MEMORY_TAGS are released.

    `saved_prefixes` are registered prefixes, which are computed again when the engine wakes up. `is_sleep_pending`: the
    engine will sleep once its requests have ended."""

    def __init__(self) -> None:
        self.level, self.released_tags = 0, tuple[str, ...]()
        self.is_sleep_pending = False
        self.saved_prefixes: dict[str, list[int]] = {}

    def check_awake(self) -> None:
        """Raise Asleep if the engine sleeps or is about to."""
        if self.level:
            raise Asleep(f"the engine sleeps (level {self.level}), and takes requests once it is woken", RETRY_AFTER)
        if self.is_sleep_pending:
            raise Asleep("the engine is about to sleep: it lets requests end, and takes no new ones", RETRY_AFTER)

    def announce_sleep(self) -> None:
        """Note that the engine will sleep once its requests have ended: it takes no new ones."""
        self.is_sleep_pending = True

    def cancel_sleep(self) -> None:
        """Note that the engine is not about to sleep."""
        self.is_sleep_pending = False

    def check_level(self, level: int) -> None:
        """Raise InputError if there is no such level."""
        if type(level) is not int or level not in SLEEP_LEVELS:
            raise InputError(f"level is {short_repr(level)}: an engine sleeps at level 1 or 2", "level")

    def sleep(self, level: int, runner: SleepableRunner, memory: KVMemory) -> None:
        """Release the KV memory and the weights of an idle engine; weights move to host memory (level 1) or are dropped
        (2). Do nothing if the engine sleeps at `level` or deeper. Cached prefixes are lost; registered ones are
        computed again when the engine wakes."""
        if len(self.released_tags) == len(MEMORY_TAGS) and level <= self.level:
            return
        if memory.prefix_cache is not None:
            for name, prefix in list(memory.prefix_cache.registered_prefixes.items()):
                self.saved_prefixes[name] = prefix.tokens
                memory.prefix_cache.unpin(name)
        memory.discard_contents()
        self.level, self.released_tags = max(level, self.level), MEMORY_TAGS
        runner.sleep(self.level)

    def restore(self, runner: Runner) -> None:
        """Put a new runner, which is awake, into the state of the one before."""
        if self.released_tags:
            assert isinstance(runner, SleepableRunner), "the one before slept"
            runner.sleep(self.level)
            if back := tuple(tag for tag in MEMORY_TAGS if tag not in self.released_tags):
                runner.wake(back)

    def wake(self, tags: Sequence[str] | None, runner: Runner) -> dict[str, list[int]]:
        """Have `runner` take back what `tags` name (None or empty: all) as far as it is released. Once nothing is
        released, return the registered prefixes to compute again; before, none. Raise InputError for unknown tags. If
        the runner raises, what it did not take back stays released."""
        tags = tags or MEMORY_TAGS
        for tag in tags:
            if tag not in MEMORY_TAGS:
                raise InputError(f"tags has {short_repr(tag)}; there are {' and '.join(MEMORY_TAGS)}", "tags")
        if "kv_cache" in tags and "weights" in self.released_tags and "weights" not in tags:
            raise InputError(
                "tags has kv_cache without weights, which are released still: wake the weights first, or both", "tags"
            )
        for tag in [tag for tag in MEMORY_TAGS if tag in tags and tag in self.released_tags]:
            assert isinstance(runner, SleepableRunner), "it was put to sleep"
            runner.wake((tag,))
            self.released_tags = tuple(other for other in self.released_tags if other != tag)
        if self.released_tags:
            return {}
        self.level = 0
        prefixes, self.saved_prefixes = self.saved_prefixes, {}
        return prefixes
