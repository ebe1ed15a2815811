"""A log of plans: every StepPlan that a runner was given and every StepResult that it gave, in the wire form.

The file begins with a line that names it and its version, and a header: the geometry of the memory, and how large the
vocabulary is. Then come frames (vocabulary.wire), each behind its length; a result is that of the oldest plan without
one. `quire replay` reads it.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import LogError, StartupError
from quire.protocol.columns import MAX_FRAME_BYTES, WireError
from quire.protocol.kv_cache_config import (
    KVCacheConfig,
    check_replay_size,
    kv_cache_config_from_json,
    kv_cache_config_to_json,
    parse_count,
)
from quire.protocol.step_plan import StepPlan, StepResult, TokenBitmask
from quire.protocol.wire import decode_frame, encode_frame

MAGIC = b"quire plans 1\n"
LENGTH = struct.Struct("<I")
MAX_HEADER_BYTES = 2**20  # bytes
MAX_IN_FLIGHT = 64
BUFFER_BYTES = 2**20


class LoggingRunner:
    """`runner`, with all that it is given and gives written to the file `path`: a plan before it is submitted, so that
    it is there if the runner fails. Everything else is the runner's own. OSError where the file can't take more."""

    def __init__(self, runner: Any, path: Path, vocab_size: int) -> None:
        self.runner, self.vocab_size = runner, vocab_size
        self.held_plan = StepPlan((), (), ())
        try:
            self.file = path.open("wb", buffering=BUFFER_BYTES)
        except OSError as error:
            raise StartupError(f"--log-plans {path} can't be written: {error.strerror}", "Give another file") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def bind(self, kv_config: KVCacheConfig) -> None:
        """See control.engine.Runner, as of all that follows."""
        header = json.dumps({"vocab_size": self.vocab_size, "geometry": kv_cache_config_to_json(kv_config)}).encode()
        self.file.write(MAGIC + LENGTH.pack(len(header)) + header)
        self.runner.bind(kv_config)

    def submit(self, plan: StepPlan) -> Any:
        """Log the plan, then submit it."""
        self._write(encode_frame(plan))
        return self.runner.submit(plan)

    def sleep(self, level: int) -> None:
        """The runner sleeps. Nothing is logged: plans behind a sleep name no page that was written before."""
        self.runner.sleep(level)

    def wake(self, tags: Sequence[str]) -> None:
        """It wakes up."""
        self.runner.wake(tags)

    def collect(self, ticket: Any) -> StepResult:
        """Collect the result and log it."""
        result: StepResult = self.runner.collect(ticket)
        self._write(encode_frame(result))
        return result

    def close(self) -> None:
        """Close the log, and the runner."""
        try:
            self.file.close()
        finally:
            self.runner.close()

    def _write(self, frame: bytes) -> None:
        self.file.write(LENGTH.pack(len(frame)))
        self.file.write(frame)


class LoggingDeferredMaskRunner(LoggingRunner):
    """The same of a runner that can hold a step (control.runners.Holding)."""

    held_plan: StepPlan

    def submit_without_masks(self, plan: StepPlan) -> Any:
        """Hold the plan, to be logged with its masks."""
        self.held_plan = plan
        return self.runner.submit_without_masks(plan)

    def submit_masks(self, ticket: Any, masks: tuple[TokenBitmask, ...]) -> Any:
        """Log the plan that is held, then go on with it."""
        self._write(encode_frame(self.held_plan._replace(masks=masks)))
        return self.runner.submit_masks(ticket, masks)


def with_plan_log(runner: Any, path: Path, vocab_size: int) -> LoggingRunner:
    """The runner with a log, which can hold steps if it can."""
    return (LoggingDeferredMaskRunner if hasattr(runner, "submit_without_masks") else LoggingRunner)(
        runner, path, vocab_size
    )


class LoggedStep(NamedTuple):
    """A plan, with the place of its frame, and its result: None if the log ends before it was collected."""

    number: int
    offset: int
    plan: StepPlan
    result: StepResult | None


class PlanLog:
    """A log to read, a step after the other. LogError names the byte from which it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
            self.file: BufferedReader = path.open("rb", buffering=BUFFER_BYTES)
        except OSError as error:
            raise LogError(f"{path} can't be read: {error.strerror}") from error
        try:
            self._open()
        except LogError:
            self.close()
            raise

    def _open(self) -> None:
        start = self.file.read(len(MAGIC))
        if start != MAGIC:
            said = f"it begins with {start!r}, not with {MAGIC!r}"
            raise self.error(0, f"this is no log of plans, or one of another version, or truncated: {said}")
        data = self._read_framed(MAX_HEADER_BYTES, "the header")
        try:
            header = json.loads(data)
            self.vocab_size = parse_count(header["vocab_size"])
            self.kv_config = kv_cache_config_from_json(header["geometry"])
            check_replay_size(self.kv_config)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.error(len(MAGIC), f"the header can't be read: {type(error).__name__} {error}") from error

    def error(self, offset: int, why: str) -> LogError:
        """What is wrong with the file, from byte `offset` on."""
        return LogError(f"{self.path}, byte {offset}: {why}", offset)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def __enter__(self) -> PlanLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[LoggedStep]:
        """The steps that are left, each once its result is read."""
        flight: deque[tuple[int, StepPlan]] = deque()
        number = 0
        while (at := self.file.tell()) < self.size:
            frame = self._read_framed(MAX_FRAME_BYTES, "a frame")
            try:
                message = decode_frame(frame)
            except WireError as error:
                raise self.error(
                    at + LENGTH.size + (error.offset or 0), f"step {number + len(flight)}, {error}"
                ) from error
            if isinstance(message, StepPlan):
                flight.append((at, message))
                if len(flight) > MAX_IN_FLIGHT:
                    raise self.error(at, f"more than {MAX_IN_FLIGHT} plans wait for their results")
                continue
            if not flight:
                raise self.error(at, f"after {number} steps, a result without a plan")
            began, plan = flight.popleft()
            yield LoggedStep(number, began, plan, message)
            number += 1
        for began, plan in flight:
            yield LoggedStep(number, began, plan, None)
            number += 1

    def _read_framed(self, max_bytes: int, what: str) -> bytes:
        """What lies behind the next length; it must all be there."""
        at = self.file.tell()
        left = self.size - at - LENGTH.size
        if left < 0:
            raise self.error(at, f"the log is truncated: {what} begins here")
        [length] = LENGTH.unpack(self.file.read(LENGTH.size))
        if length > max_bytes:
            raise self.error(at, f"{what} of {length} bytes, at most {max_bytes} are read")
        if length > left:
            raise self.error(at, f"the log is truncated: {what} of {length} bytes begins here, {left} remain")
        return self.file.read(length)
