"""Places in a grammar: one output's each, and what outputs of one form have in common.

All copies of one of llguidance's matchers share its lexer. Where one output makes too many states in it, the lexer is
of no use to anybody any more: that output ends, the others go on in the same grammar made anew.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from quire.text.grammar_beginnings import Known, Room
from quire.text.grammar_complaints import short
from quire.text.grammar_strings import FREE, Strings
from quire.vocabulary.structured import Structured

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.text.grammars import Masker

AGAIN = 2  # times that an output may go on in its grammar made anew
AGAIN_SECONDS = 0.05  # that making one may take where outputs wait for it
LEXER = "lexer error"  # what llguidance says of an error that is the lexer's


class Shared:
    """A grammar as llguidance has it: `first` at its beginning, made of `text` within `seconds`; `start` is what is
    known there, and `strings` of its strings. `brief` is the same as `first`, over the vocabulary of `counted`, where
    strings of counted characters are the dearest. It has a lexer of its own, and the grammar made anew takes it over.
    None: there are no such strings, or that lexer has too many states, and all of the vocabulary is walked through."""

    def __init__(
        self, masker: Masker, text: str, strings: Strings | None = None, brief: LLMatcher | None = None
    ) -> None:
        began = time.thread_time()
        self.masker, self.text, self.strings = masker, text, strings
        self.first = masker.matcher(text)
        self.seconds = time.thread_time() - began
        self.counted = masker.counted if strings is not None and strings.most else None
        if self.counted is not None and brief is None:
            brief = masker.matcher(text, self.counted.tokenizer)
        self.brief = brief
        self.start = Known(Room())
        self.spoiled = False  # its lexer has too many states
        self._next: Shared | None = None
        self._lock = threading.Lock()

    def sound(self, patient: bool = True) -> Shared:
        """This one, or the same grammar made anew; without patience only where that is done or takes little."""
        if not self.spoiled or (not patient and self._next is None and self.seconds > AGAIN_SECONDS):
            return self
        with self._lock:
            if self._next is None:
                self._next = Shared(self.masker, self.text, self.strings, self.brief)
            return self._next.sound(patient)


class Place:
    """A Matcher (see quire.vocabulary.structured). `_queue` are tokens that must follow, in order, of which `_used`
    have come; `_left` is how many thoughts may have; `_taken` are the grammar's tokens so far, and `_again` says how
    often it may be made anew; `at` is what is remembered here; `mask` is what may follow, if it was computed already;
    `_string` says whether here is a free string, if that is known: tokens that leave it where it is don't count. In a
    counted one there is `_room` for so many characters, and `_brief` is the place over the vocabulary for these; of
    `_taken` it was told the first `_said`, and `inner` the first `_told`.
    """

    __slots__ = (
        "_after", "_again", "_begun", "_brief", "_left", "_queue", "_recent", "_room", "_said", "_string", "_taken",
        "_told", "_used", "at", "inner", "mask", "masker", "shared",
    )  # fmt: skip

    def __init__(self, masker: Masker, shared: Shared | None, asked: Structured) -> None:
        self.masker, self.shared, self._after, self._left = masker, shared, asked.after, asked.budget
        self.inner = None if shared is None else shared.first.deep_copy()
        self.at = None if shared is None else shared.start
        self.mask: bytes | None = None
        self._string: bool | None = None
        self._brief: LLMatcher | None = None
        self._room = self._said = self._told = 0
        self._taken, self._again = list[int](), AGAIN
        self._begun = not asked.after
        self._recent: deque[int] = deque(maxlen=len(asked.after) or 1)
        self._queue, self._used = asked.opening, 0
        if self._begun:
            self._look()
        elif not self._queue and self._left == 0:
            self._queue = self._after

    def _think(self, token: int) -> None:
        """Go on before the marker, or behind it."""
        self._recent.append(token)
        if tuple(self._recent) == self._after:
            self._begun, self._queue, self._used = True, (), 0
            self._look()
        elif self._queue:
            self._queue = self._queue[1:]
        elif self._left:
            self._left -= 1
        if not self._begun and not self._queue and self._left == 0:
            self._queue = self._after

    def _look(self) -> bool:
        """What must follow here; whether it is known that there was no error. Where masks are computed one by one, this
        one's is: it often says that nothing must follow, and is made while the grammar is in the caches."""
        inner, at, masker, self._used = self.inner, self.at, self.masker, 0
        if inner is None:
            return True
        if at is not None:
            if at.queue is not None:
                self._queue = at.queue
                return False
        elif masker.one_by_one:
            if self._counted_mask() is not None:
                self._queue = ()
                return True
            self.mask = mask = inner.compute_bitmask()[: masker.size]
            for one, bit, other, its in masker.probes:  # no function: every row is here in every step
                if mask[one] & bit and mask[other] & its:
                    self._queue = ()
                    return True
        self._queue = (masker.end,) if inner.is_stopped() else tuple(inner.compute_ff_tokens())
        if self._queue:
            self.mask = None  # of several end tokens it has all
        if at is not None and not inner.is_error():
            at.follow(self._queue)
        return False

    def accept(self, token: int) -> str:
        """See Matcher."""
        masker = self.masker
        if self._string and masker.plain[token]:
            return ""
        if not self._begun:
            self._think(token)
            return ""
        inner = self.inner
        if inner is None:
            return ""
        if not masker.plain[token]:
            self._string = None
        elif self._string is None and self._is_free():
            return ""
        self.mask = None
        if self._room and self._fits(token):
            return ""
        if self.shared.spoiled or self._told < len(self._taken):  # type: ignore[union-attr]
            inner = self._tell()
        if token in masker.eos_ids:
            return "" if inner.is_accepting() else f"token {token} ends the output before its grammar does"
        if not inner.consume_token(token):
            return self._failed()
        self._taken.append(token)
        self._told += 1
        if self.at is not None:
            self.at = self.at.then(token)
        if self._queue and self._used + 1 < len(self._queue) and self._queue[self._used] == token:
            self._used += 1
        elif self._look():
            return ""
        return self._failed() if inner.is_error() else ""

    def _is_free(self) -> bool:
        """Find out whether here is a free string, or a counted one. Where none is, none is behind more characters of a
        string either, unless this one is too short to end, or here is within an escape."""
        assert self.inner is not None and self.shared is not None, "it has a grammar"  # noqa: PT018
        shared = self.shared
        room = 0 if shared.strings is None else shared.strings.room(self.inner)
        within = room == 0 and bool(self._taken) and self._taken[-1] in self.masker.spoken.escaping
        self._string = None if room is None or within else room == FREE
        if room and room != FREE and shared.counted is not None and shared.brief is not None:
            self._brief = self._brief or shared.brief.deep_copy()
            if shared.counted.tell(self._brief, self._taken[self._said :]):
                self._said, self._room = len(self._taken), room
            else:
                self._walk()
        return self._string is True

    def _fits(self, token: int) -> bool:
        """Whether there is room for characters more behind the token, in a counted string: then `inner` needn't be told
        of it yet."""
        assert self.shared is not None and self.shared.counted is not None, "it counts"  # noqa: PT018
        count = self.shared.counted.characters[token]
        self._room = max(0, self._room - count) if count else 0
        if not self._room:
            return False
        if not self.shared.counted.pass_over(self._brief, count):
            self._walk()
            return False
        self._taken.append(token)
        self._said += 1
        if self.at is not None:
            self.at = self.at.then(token)
        return True

    def _counted_mask(self) -> bytes | None:
        """What may follow in a counted string; None: this isn't one, or not one with room for a character."""
        counted = None if self.shared is None else self.shared.counted
        if counted is None or (self._string is None and self._is_free()) or not self._room:
            return None
        mask = counted.mask(self._brief, self._room)
        if self._brief.is_error():
            self._walk()
            self._tell()
            return None
        self.mask = mask
        return mask

    def _walk(self) -> None:
        """`_brief` failed: `inner` is asked from here to the string's end. If the lexer did that all have in common, it
        is asked in all strings until the grammar is made anew."""
        assert self._brief is not None and self.shared is not None, "it counts"  # noqa: PT018
        self._room = 0
        if LEXER in self._brief.get_error():
            self.shared.brief = None

    def _tell(self) -> LLMatcher:
        """Tell `inner` what only `_brief` was told; another one, if the lexer is spoiled and it may go on anew."""
        assert self.inner is not None and self.shared is not None, "it has a grammar"  # noqa: PT018
        if not (self.shared.spoiled and self.renew()):
            self.inner.consume_tokens(self._taken[self._told :])
            self._told = len(self._taken)
        return self.inner

    def _failed(self) -> str:
        self.fails()
        assert self.inner is not None, "it has a grammar"
        return f"the grammar can't go on: {short(self.inner.get_error())}"

    def fails(self) -> bool:
        """The grammar has an error here. If it is the lexer's, nobody shall go on with that."""
        assert self.inner is not None and self.shared is not None, "it has a grammar"  # noqa: PT018
        if not self.inner.is_error():
            return False
        self.shared.spoiled |= LEXER in self.inner.get_error()
        return True

    def renew(self) -> bool:
        """If another output has spoiled the lexer, go on at the same place of the grammar made anew. Who has done so
        too often, or whose grammar takes long to make, stays, and ends with the next token. Whether it goes on anew."""
        assert self.inner is not None and self.shared is not None, "it has a grammar"  # noqa: PT018
        slow = self.shared.seconds > AGAIN_SECONDS
        if not self.shared.spoiled or not self._again or slow or self.inner.is_error():
            return False
        self._again -= 1
        brief, self.shared = self.shared.brief, self.shared.sound()
        if self.shared.brief is not brief:
            self._brief, self._room, self._said = None, 0, 0
        self.inner, self.at, self.mask = self.shared.first.deep_copy(), None, None
        self.inner.consume_tokens(self._taken)
        self._told = len(self._taken)
        return True

    def forced(self) -> tuple[int, ...]:
        """See Matcher."""
        return self._queue[self._used :] if self._used else self._queue

    def free(self) -> bool:
        """See Matcher."""
        return self._begun and self.inner is None

    def known(self) -> bytes | None:
        """The mask, where it needn't be computed."""
        if self.mask is not None:
            return self.mask
        if not self._queue:
            if not self._begun:
                return self.masker.unending
            if self.inner is None:
                return self.masker.everything
            known = None if self.at is None else self.at.mask
            return self._counted_mask() if known is None else known
        mask, token = bytearray(self.masker.size), self._queue[self._used]
        mask[token // 8] = 1 << token % 8
        return bytes(mask)

    def copy(self) -> Place:
        """See Matcher."""
        other = Place.__new__(Place)
        for name in Place.__slots__:
            setattr(other, name, getattr(self, name))
        other.inner = None if self.inner is None else self.inner.deep_copy()
        other._brief = None if self._brief is None else self._brief.deep_copy()
        other._recent, other._taken = self._recent.copy(), self._taken.copy()
        return other
