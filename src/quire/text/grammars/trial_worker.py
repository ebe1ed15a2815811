"""The program that tries to make grammars, in a process of its own with limits; grammar_trials.py starts it.

llguidance makes a grammar in one call into native code, and what that takes isn't bounded: six numbers of which an
integer is to be a multiple take it 13 s, and 5,000 rules of which each is the next its stack. So it is done here first,
over a vocabulary of single bytes. The first frame on descriptor 0 says what that is like; each one after it is a
grammar, and what is wrong with it is answered on descriptor 1. The process ends when its input does, and when a grammar
takes too much. Run by its path: it knows nothing of quire.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

MAX_SECONDS = 0.5  # of a processor that making one grammar may take
MAX_MEMORY = 1 << 30  # bytes of addresses beyond those of the start
STACK_BYTES = 1 << 20  # bytes; llguidance calls itself as deep as a grammar is nested, later on threads of 2 to 8 MiB
HEADER = 4  # bytes of a frame's length
MAX_ANSWER = 4096  # bytes


class ByteVocabulary:
    """What llguidance.TokenizerWrapper asks of a tokenizer: `size` tokens, of which `special` are named in hexadecimal
    digits by their ids, and others are single bytes, or nothing."""

    bos_token_id = None

    def __init__(self, size: int, eos_id: int, special: dict[str, str]) -> None:
        self.eos_token_id = eos_id
        self.special_token_ids = sorted(map(int, special))
        self.tokens = [b""] * size
        for name, digits in special.items():
            self.tokens[int(name)] = bytes.fromhex(digits)
        plain = (id for id in range(size) if str(id) not in special)
        self._ids = dict(zip(range(256), plain))
        for byte, at in self._ids.items():
            self.tokens[at] = bytes([byte])

    def __call__(self, text: str) -> list[int]:
        """A token a byte; none at all if there isn't one of each."""
        if not isinstance(text, str):
            raise TypeError("texts are strings")  # llguidance finds out whether bytes will do
        ids = [self._ids.get(byte, -1) for byte in text.encode()]
        return [] if -1 in ids else ids


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # may be ignored or blocked by inheritance
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    sys.path += sys.argv[1:]
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    first = _read()
    if first is None:
        return
    about: dict[str, Any] = json.loads(first)
    words = ByteVocabulary(about["size"], about["ends"][0], about["special"])
    tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=about["size"], eos_token=about["ends"], slices=[])
    limits = LLParserLimits(**about["limits"])
    _set_limits()
    _write("")
    while (grammar := _read()) is not None:
        # Ends the process: there is no other way out of the call.
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        why = LLMatcher(tokenizer, grammar.decode(), log_level=0, limits=limits).get_error()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(why)


def _set_limits() -> None:
    """So much memory, where the system tells what is in use; no core, and no further file or descriptor."""
    with suppress(OSError), open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3)):
        resource.setrlimit(what, (most, most))


def _read() -> bytes | None:
    """A frame's body; None at the end of the input."""
    header = _read_exactly(HEADER)
    return None if header is None else _read_exactly(int.from_bytes(header, "big"))


def _read_exactly(size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _write(text: str) -> None:
    body = text.encode()[:MAX_ANSWER]
    view = memoryview(len(body).to_bytes(HEADER, "big") + body)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    main()
