"""What fronts and the engine tell each other. One engine's thread works off what all fronts send, in order, and tells
each front once a step what the step brought for it.

A front numbers its requests; numbers are its own. `key` names a question: its Answer has the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.control.edge import Limits
from quire.control.engine import Engine
from quire.control.memory import Account
from quire.control.outcomes import Output, Stats
from quire.link.cache import cache_facts
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import Mapped, RankUse

MOST_NUMBER = 2**32 - 1  # of a request or a question
MOST_REQUESTS = 1 << 16  # of one message
MOST_ID = 1024  # characters of a request's name
MOST_TAGS = 16  # of a wake-up

# From a front


class Asked(NamedTuple):
    """A request: its number, its name among all, its prompt, and the pictures in that."""

    number: int
    id: str
    prompt: Sequence[int]
    media: tuple[Medium, ...] = ()


class Add(NamedTuple):
    """Queue all of these, or none. Their parameters are resolved: words are token ids. `pixels` are those of all their
    pictures, each once. `client`, at most MOST_CLIENT characters, is whoever has a common share of the engine."""

    key: int
    requests: tuple[Asked, ...]
    params: SamplingParams
    salt: str = ""
    pixels: tuple[Pixels, ...] = ()
    client: str = ""


class Abort(NamedTuple):
    """End requests whose clients left; None: all of this front's."""

    numbers: tuple[int, ...] | None


class Stop(NamedTuple):
    """A branch's text has a stop string: end it. It isn't told any more."""

    number: int
    branch: int
    reason: str


class Register(NamedTuple):
    """Compute a prefix and keep it; it is told of as a request of that number."""

    key: int
    number: int
    name: str
    tokens: Sequence[int]


class Release(NamedTuple):
    """Let go of a prefix. The answer says whether there was one."""

    key: int
    name: str


class Prefixes(NamedTuple):
    """Which prefixes are there?"""

    key: int


class Look(NamedTuple):
    """What is in memory, page by page? The answer is JSON (control.scene), which begins with `took`, the seconds of
    processor time that looking took, and writing the answer, and sending the one before; and `busy`, the engine's
    processor time a second since somebody looked before."""

    key: int


class Care(NamedTuple):
    """Look after the engine: do `what`, one of CARES. "reset" forgets cached prefixes; the answer is how many pages
    were emptied. "sleep" and "wake" are those of control.rest, for a `level` and `tags`; the answer to them and to
    "rest" is JSON, how it is then. A sleep with requests under way is refused, or waits for their end, or has them end,
    as `mode`, one of MODES, says."""

    key: int
    what: str
    level: int = 0
    mode: str = "refuse"
    tags: tuple[str, ...] = ()


CARES = ("reset", "sleep", "wake", "rest")
MODES = ("refuse", "wait", "abort")
FromFront = Add | Abort | Stop | Register | Release | Prefixes | Look | Care

# From the engine


class Answer(NamedTuple):
    """Of a question: what went wrong, if anything did; else what was asked."""

    key: int
    error: Exception | None = None
    value: int | str | tuple[dict[str, int], tuple[str, ...]] | None = None


class Progress(NamedTuple):
    """How far a request has come, in seconds of CLOCK_MONOTONIC: told with its first output, and with its last."""

    number: int
    max_tokens: int
    scheduled: float | None
    first_token: float | None
    cached_tokens: int
    preemptions: int


class Queues(NamedTuple):
    """Requests that wait for their first step, are in memory, or in host memory; `deferred` of those that wait, until
    another one has computed a common prefix; `batches` that those that wait are of."""

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    deferred: int = 0
    batches: int = 0


class Facts(NamedTuple):
    """What is so, and what was counted since the start."""

    account: Account
    stats: Stats
    preempted: Mapping[str, int]  # requests, by the way it was done
    seconds: float = 0.0  # of processor time, of the engine's thread, or of its process where it has one
    mapped: Mapped = Mapped()
    ranks: tuple[RankUse, ...] = ()  # where the model is in processes of its own
    asleep: int = 0  # the level; 0: it is awake


class Stepped(NamedTuple):
    """What a step brought for one front, at `now` of CLOCK_MONOTONIC. `outputs` are by the requests' numbers. The first
    front learns how many tokens were `computed`."""

    now: float
    queues: Queues
    computed: int
    progress: Sequence[Progress]
    outputs: Sequence[tuple[int, Output]]
    facts: Facts | None = None


class Died(NamedTuple):
    """The engine's loop ended, and why. Nothing follows."""

    error: BaseException


FromEngine = Answer | Stepped | Died


class Ready(NamedTuple):
    """What a front must know of an engine that was built. `lines` are its memory plan, `notices` what is said at start;
    `cache` are facts of the KV memory by vLLM's names."""

    limits: Limits
    lines: tuple[str, ...]
    notices: tuple[str, ...]
    cache: Mapping[str, object]
    facts: Facts


def queues_of(engine: Engine) -> Queues:
    """As they are now."""
    scheduler = engine.scheduler
    waiting = scheduler.waiting
    return Queues(len(waiting), len(scheduler.running), len(scheduler.swapped), scheduler.deferred, waiting.batches)


def facts_of(engine: Engine, seconds: float = 0.0) -> Facts:
    """As they are now; asked on the engine's thread."""
    scheduler = engine.scheduler
    mapped = getattr(engine.runner, "mapped", None) or Mapped()
    ranks = getattr(engine.runner, "used", ())
    return Facts(scheduler.memory.account(), engine.stats.copy(), dict(scheduler.preempted), seconds, mapped, ranks,
                 engine.rest.level)  # fmt: skip


def described(engine: Engine, lines: list[str], notices: tuple[str, ...]) -> Ready:
    """What fronts must know of an engine."""
    memory = engine.scheduler.memory
    cache = cache_facts(memory.geometry, engine.limits.max_len, memory.account())
    return Ready(engine.limits, tuple(lines), notices, cache, facts_of(engine))
