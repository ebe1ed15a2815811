"""Plan logs: every StepPlan that a runner was given and every StepResult that it returned, in the wire format.

The file begins with a line that names the format and its version, and a JSON header with the KV cache config and the
vocabulary size. Then come frames (quire.protocol.wire), each after its length; a result belongs to the oldest plan
without one. `quire replay` reads plan logs.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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
MAX_HEADER_BYTES = 2**20
MAX_IN_FLIGHT = 64
BUFFER_BYTES = 2**20


class LoggingRunner:
    """Wraps `runner` and logs its plans and results to the file `path`. A plan is logged before it is submitted, so
    that the log has it if the runner fails. Other attributes are the runner's. Raises OSError if writing fails."""

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
        """Write the header, then bind the runner (see quire.core.runner, for the other methods too)."""
        header = json.dumps({"vocab_size": self.vocab_size, "geometry": kv_cache_config_to_json(kv_config)}).encode()
        self.file.write(MAGIC + LENGTH.pack(len(header)) + header)
        self.runner.bind(kv_config)

    def submit(self, plan: StepPlan) -> Any:
        """Log the plan, then submit it."""
        self._write(encode_frame(plan))
        return self.runner.submit(plan)

    def sleep(self, level: int) -> None:
        """Put the runner to sleep. The log needs no entry: later plans read no page that was written before."""
        self.runner.sleep(level)

    def wake(self, tags: Sequence[str]) -> None:
        """Wake the runner."""
        self.runner.wake(tags)

    def collect(self, ticket: Any) -> StepResult:
        """Collect the result and log it."""
        result: StepResult = self.runner.collect(ticket)
        self._write(encode_frame(result))
        return result

    def close(self) -> None:
        """Close the log and the runner."""
        try:
            self.file.close()
        finally:
            self.runner.close()

    def _write(self, frame: bytes) -> None:
        self.file.write(LENGTH.pack(len(frame)))
        self.file.write(frame)


class LoggingDeferredMaskRunner(LoggingRunner):
    """A LoggingRunner for a DeferredMaskRunner (quire.core.runner)."""

    held_plan: StepPlan

    def submit_without_masks(self, plan: StepPlan) -> Any:
        """Submit the plan, and keep it to log it with its masks."""
        self.held_plan = plan
        return self.runner.submit_without_masks(plan)

    def proposed_tokens(self, ticket: Any) -> Mapping[int, Sequence[int]]:
        """Return what the draft model proposes."""
        proposals: Mapping[int, Sequence[int]] = self.runner.proposed_tokens(ticket)
        return proposals

    def submit_masks(self, ticket: Any, masks: tuple[TokenBitmask, ...]) -> Any:
        """Log the plan with its masks, then submit the masks."""
        self._write(encode_frame(self.held_plan._replace(masks=masks)))
        return self.runner.submit_masks(ticket, masks)


def with_plan_log(runner: Any, path: Path, vocab_size: int) -> LoggingRunner:
    """Return the runner with a log. It accepts deferred masks if the runner does."""
    wrapper = LoggingDeferredMaskRunner if hasattr(runner, "submit_without_masks") else LoggingRunner
    return wrapper(runner, path, vocab_size)


class LoggedStep(NamedTuple):
    """A plan with the offset of its frame, and its result: None if the log ends before it was collected."""

    number: int
    offset: int
    plan: StepPlan
    result: StepResult | None


class PlanLog:
    """Reads a log step by step. LogError names the byte where it is invalid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
            self.file: BinaryIO = path.open("rb", buffering=BUFFER_BYTES)
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
            detail = f"it begins with {start!r}, not with {MAGIC!r}"
            raise self.error(0, f"this is no log of plans, or one of another version, or truncated: {detail}")
        data = self._read_framed(MAX_HEADER_BYTES, "the header")
        try:
            header = json.loads(data)
            self.vocab_size = parse_count(header["vocab_size"])
            self.kv_config = kv_cache_config_from_json(header["geometry"])
            check_replay_size(self.kv_config)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.error(len(MAGIC), f"the header can't be read: {type(error).__name__} {error}") from error

    def error(self, offset: int, why: str) -> LogError:
        """Return a LogError about byte `offset`."""
        return LogError(f"{self.path}, byte {offset}: {why}", offset)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def __enter__(self) -> PlanLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[LoggedStep]:
        """Iterate over the remaining steps, each once its result is read."""
        in_flight: deque[tuple[int, StepPlan]] = deque()
        number = 0
        while (at := self.file.tell()) < self.size:
            frame = self._read_framed(MAX_FRAME_BYTES, "a frame")
            try:
                message = decode_frame(frame)
            except WireError as error:
                raise self.error(
                    at + LENGTH.size + (error.offset or 0), f"step {number + len(in_flight)}, {error}"
                ) from error
            if isinstance(message, StepPlan):
                in_flight.append((at, message))
                if len(in_flight) > MAX_IN_FLIGHT:
                    raise self.error(at, f"more than {MAX_IN_FLIGHT} plans wait for their results")
                continue
            if not in_flight:
                raise self.error(at, f"after {number} steps, a result without a plan")
            offset, plan = in_flight.popleft()
            yield LoggedStep(number, offset, plan, message)
            number += 1
        for offset, plan in in_flight:
            yield LoggedStep(number, offset, plan, None)
            number += 1

    def _read_framed(self, max_bytes: int, what: str) -> bytes:
        """Read the next length and the bytes that follow it. Raise LogError if they are not complete."""
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
