"""The program of the trial process: compiles grammars to check them, with limits. Started by trial_process.py.

llguidance compiles a grammar in one native call of unbounded cost: an integer that is a multiple of six numbers takes
13 s, and 5,000 rules of which each refers to the next overflow the stack. So each grammar is compiled here first, over
a vocabulary of single bytes. The first frame describes the vocabulary; each further frame is a grammar, and the reply
is its error or "". The process ends at the end of its input, or when a grammar exceeds the limits.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

from quire.protocol.json_frames import unpack
from quire.text.isolated_worker import read_frame, set_limits, set_signals, write_frame

MAX_SECONDS = 0.5  # of CPU time per grammar
MAX_MEMORY = 1 << 30  # bytes of address space beyond those at the start
STACK_BYTES = 1 << 20  # llguidance recurses as deep as a grammar is nested; it later runs on threads of 2 to 8 MiB
MAX_ERROR = 4096  # characters


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
    set_signals(signal.SIGPROF)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    first = read_frame()
    if first is None:
        return
    about: dict[str, Any] = unpack(first)
    words = ByteVocabulary(about["size"], about["ends"][0], about["special"])
    tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=about["size"], eos_token=about["ends"], slices=[])
    limits = LLParserLimits(**about["limits"])
    set_limits(MAX_MEMORY)
    write_frame("")
    while (grammar := read_frame()) is not None:
        # The signal ends the process; the call cannot be interrupted otherwise.
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        why = LLMatcher(tokenizer, unpack(grammar), log_level=0, limits=limits).get_error()
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(why[:MAX_ERROR])
