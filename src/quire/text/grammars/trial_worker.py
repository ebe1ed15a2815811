"""The program of the trial process: compiles grammars to check them, with limits. Started by trial_process.py.

llguidance compiles a grammar in one native call of unbounded cost: an integer that is a multiple of six numbers takes
13 s, and 5,000 rules of which each refers to the next overflow the stack. So each grammar is compiled here first, over
a vocabulary of single bytes. The first frame on descriptor 0 describes the vocabulary; each further frame is a grammar,
and the reply on descriptor 1 is its error or "". The process ends at the end of its input, or when a grammar exceeds
the limits. It is run by its path and does not import quire.
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

MAX_SECONDS = 0.5  # of CPU time per grammar
MAX_MEMORY = 1 << 30  # bytes of address space beyond those at the start
STACK_BYTES = 1 << 20  # llguidance recurses as deep as a grammar is nested; it later runs on threads of 2 to 8 MiB
HEADER = 4  # bytes of a frame's length
MAX_ANSWER = 4096  # bytes


class ByteVocabulary:
    """A vocabulary for llguidance.TokenizerWrapper of `size` tokens: `special` tokens in hexadecimal digits, by id, and
    single bytes; the rest is empty."""

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
        """Return one token per byte, or [] if a byte has no token."""
        if not isinstance(text, str):
            raise TypeError("texts are strings")  # llguidance tests whether bytes are accepted
        ids = [self._ids.get(byte, -1) for byte in text.encode()]
        return [] if -1 in ids else ids


def main() -> None:
    """Serve requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it may be ignored or blocked by inheritance
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
        # The signal ends the process; the call cannot be interrupted otherwise.
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        why = LLMatcher(tokenizer, grammar.decode(), log_level=0, limits=limits).get_error()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(why)


def _set_limits() -> None:
    """Limit the address space, where its use is known; allow no core dump, and no further file or descriptor."""
    with suppress(OSError), open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3)):
        resource.setrlimit(what, (most, most))


def _read() -> bytes | None:
    """Return a frame's body, or None at the end of the input."""
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
