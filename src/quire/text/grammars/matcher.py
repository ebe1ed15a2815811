"""Places in a grammar: one output's each, and what outputs of one form have in common.

All copies of one of llguidance's matchers share its lexer. Where one output makes too many states in it, the lexer is
of no use to anybody any more: that output ends, the others go on in the same grammar made anew.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from quire.protocol.structured_output import Structured
from quire.text.grammars.errors import one_line
from quire.text.grammars.prefix_tree import PrefixNode, PrefixTreeBudget
from quire.text.grammars.strings import UNBOUNDED, StringDetector

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.text.grammars.backend import GrammarBackend

MAX_RENEWALS = 2  # times that an output may go on in its grammar made anew
MAX_RENEWAL_SECONDS = 0.05  # that making one may take where outputs wait for it
LEXER_ERROR = "lexer error"  # what llguidance says of an error that is the lexer's


class SharedGrammar:
    """A grammar as llguidance has it: `initial_matcher` at its beginning, made of `source` within `compile_seconds`;
    `root` is what is known there, and `strings` of its strings. `counted_matcher` is the same as `initial_matcher`,
    over the vocabulary of `counted_strings`, where strings of counted characters are the dearest. It has a lexer of its
    own, and the grammar made anew takes it over. None: there are no such strings, or that lexer has too many states,
    and all of the vocabulary is walked through."""

    def __init__(
        self,
        backend: GrammarBackend,
        source: str,
        strings: StringDetector | None = None,
        counted_matcher: LLMatcher | None = None,
    ) -> None:
        began = time.thread_time()
        self.backend, self.source, self.strings = backend, source, strings
        self.initial_matcher = backend.new_matcher(source)
        self.compile_seconds = time.thread_time() - began
        self.counted_strings = backend.counted_strings if strings is not None and strings.max_chars else None
        if self.counted_strings is not None and counted_matcher is None:
            counted_matcher = backend.new_matcher(source, self.counted_strings.tokenizer)
        self.counted_matcher = counted_matcher
        self.root = PrefixNode(PrefixTreeBudget())
        self.lexer_exhausted = False  # its lexer has too many states
        self._replacement: SharedGrammar | None = None
        self._lock = threading.Lock()

    def usable(self, may_compile: bool = True) -> SharedGrammar:
        """This one, or the same grammar made anew; without patience only where that is done or takes little."""
        if not self.lexer_exhausted or (
            not may_compile and self._replacement is None and self.compile_seconds > MAX_RENEWAL_SECONDS
        ):
            return self
        with self._lock:
            if self._replacement is None:
                self._replacement = SharedGrammar(self.backend, self.source, self.strings, self.counted_matcher)
            return self._replacement.usable(may_compile)


class GrammarMatcher:
    """A Matcher (see quire.protocol.structured_output). `_forced` are tokens that must follow, in order, of which
    `_forced_used` have come; `_thinking_left` is how many thoughts may have; `_tokens` are the grammar's tokens so far,
    and `_renewals_left` says how often it may be made anew; `node` is what is remembered here; `mask` is what may
    follow, if it was computed already; `_in_free_string` says whether here is a free string, if that is known: tokens
    that leave it where it is don't count. In a counted one there is `_chars_left` for so many characters, and
    `_counted_matcher` is the place over the vocabulary for these; of `_tokens` it was told the first
    `_num_fed_counted`, and `matcher` the first `_num_fed`.
    """

    __slots__ = (
        "_chars_left",
        "_counted_matcher",
        "_end_marker",
        "_forced",
        "_forced_used",
        "_in_free_string",
        "_in_grammar",
        "_num_fed",
        "_num_fed_counted",
        "_recent_tokens",
        "_renewals_left",
        "_thinking_left",
        "_tokens",
        "backend",
        "mask",
        "matcher",
        "node",
        "shared",
    )  # fmt: skip

    def __init__(self, backend: GrammarBackend, shared: SharedGrammar | None, structured: Structured) -> None:
        self.backend, self.shared, self._end_marker, self._thinking_left = (
            backend,
            shared,
            structured.after,
            structured.budget,
        )
        self.matcher = None if shared is None else shared.initial_matcher.deep_copy()
        self.node = None if shared is None else shared.root
        self.mask: bytes | None = None
        self._in_free_string: bool | None = None
        self._counted_matcher: LLMatcher | None = None
        self._chars_left = self._num_fed_counted = self._num_fed = 0
        self._tokens, self._renewals_left = list[int](), MAX_RENEWALS
        self._in_grammar = not structured.after
        self._recent_tokens: deque[int] = deque(maxlen=len(structured.after) or 1)
        self._forced, self._forced_used = structured.opening, 0
        if self._in_grammar:
            self._find_forced()
        elif not self._forced and self._thinking_left == 0:
            self._forced = self._end_marker

    def _accept_reasoning(self, token: int) -> None:
        """Go on before the marker, or behind it."""
        self._recent_tokens.append(token)
        if tuple(self._recent_tokens) == self._end_marker:
            self._in_grammar, self._forced, self._forced_used = True, (), 0
            self._find_forced()
        elif self._forced:
            self._forced = self._forced[1:]
        elif self._thinking_left:
            self._thinking_left -= 1
        if not self._in_grammar and not self._forced and self._thinking_left == 0:
            self._forced = self._end_marker

    def _find_forced(self) -> bool:
        """What must follow here; whether it is known that there was no error. Where masks are computed one by one, this
        one's is: it often says that nothing must follow, and is made while the grammar is in the caches."""
        inner, at, masker, self._forced_used = self.matcher, self.node, self.backend, 0
        if inner is None:
            return True
        if at is not None:
            if at.forced is not None:
                self._forced = at.forced
                return False
        elif masker.is_serial:
            if self._counted_mask() is not None:
                self._forced = ()
                return True
            self.mask = mask = inner.compute_bitmask()[: masker.mask_bytes]
            for one, bit, other, its in masker.probe_bits:  # no function: every row is here in every step
                if mask[one] & bit and mask[other] & its:
                    self._forced = ()
                    return True
        self._forced = (masker.eos_id,) if inner.is_stopped() else tuple(inner.compute_ff_tokens())
        if self._forced:
            self.mask = None  # of several end tokens it has all
        if at is not None and not inner.is_error():
            at.remember_forced(self._forced)
        return False

    def accept(self, token: int) -> str:
        """See Matcher."""
        masker = self.backend
        if self._in_free_string and masker.is_plain[token]:
            return ""
        if not self._in_grammar:
            self._accept_reasoning(token)
            return ""
        inner = self.matcher
        if inner is None:
            return ""
        if not masker.is_plain[token]:
            self._in_free_string = None
        elif self._in_free_string is None and self._check_free_string():
            return ""
        self.mask = None
        if self._chars_left and self._feed_counted(token):
            return ""
        if self.shared.lexer_exhausted or self._num_fed < len(self._tokens):  # type: ignore[union-attr]
            inner = self._feed_pending()
        if token in masker.eos_ids:
            return "" if inner.is_accepting() else f"token {token} ends the output before its grammar does"
        if not inner.consume_token(token):
            return self._fail_reason()
        self._tokens.append(token)
        self._num_fed += 1
        if self.node is not None:
            self.node = self.node.child(token)
        if self._forced and self._forced_used + 1 < len(self._forced) and self._forced[self._forced_used] == token:
            self._forced_used += 1
        elif self._find_forced():
            return ""
        return self._fail_reason() if inner.is_error() else ""

    def _check_free_string(self) -> bool:
        """Find out whether here is a free string, or a counted one. Where none is, none is behind more characters of a
        string either, unless this one is too short to end, or here is within an escape."""
        assert self.matcher is not None and self.shared is not None, "it has a grammar"  # noqa: PT018
        shared = self.shared
        room = 0 if shared.strings is None else shared.strings.chars_left(self.matcher)
        within = room == 0 and bool(self._tokens) and self._tokens[-1] in self.backend.string_tokens.open_escape_ids
        self._in_free_string = None if room is None or within else room == UNBOUNDED
        if room and room != UNBOUNDED and shared.counted_strings is not None and shared.counted_matcher is not None:
            self._counted_matcher = self._counted_matcher or shared.counted_matcher.deep_copy()
            if shared.counted_strings.feed(self._counted_matcher, self._tokens[self._num_fed_counted :]):
                self._num_fed_counted, self._chars_left = len(self._tokens), room
            else:
                self._leave_counted()
        return self._in_free_string is True

    def _feed_counted(self, token: int) -> bool:
        """Whether there is room for characters more behind the token, in a counted string: then `matcher` needn't be
        told of it yet."""
        assert self.shared is not None and self.shared.counted_strings is not None, "it counts"  # noqa: PT018
        count = self.shared.counted_strings.token_chars[token]
        self._chars_left = max(0, self._chars_left - count) if count else 0
        if not self._chars_left:
            return False
        if not self.shared.counted_strings.feed_chars(self._counted_matcher, count):
            self._leave_counted()
            return False
        self._tokens.append(token)
        self._num_fed_counted += 1
        if self.node is not None:
            self.node = self.node.child(token)
        return True

    def _counted_mask(self) -> bytes | None:
        """What may follow in a counted string; None: this isn't one, or not one with room for a character."""
        counted = None if self.shared is None else self.shared.counted_strings
        if counted is None or (self._in_free_string is None and self._check_free_string()) or not self._chars_left:
            return None
        mask = counted.mask(self._counted_matcher, self._chars_left)
        if self._counted_matcher.is_error():
            self._leave_counted()
            self._feed_pending()
            return None
        self.mask = mask
        return mask

    def _leave_counted(self) -> None:
        """`_counted_matcher` failed: `matcher` is asked from here to the string's end. If the lexer did that all have
        in common, it is asked in all strings until the grammar is made anew."""
        assert self._counted_matcher is not None and self.shared is not None, "it counts"  # noqa: PT018
        self._chars_left = 0
        if LEXER_ERROR in self._counted_matcher.get_error():
            self.shared.counted_matcher = None

    def _feed_pending(self) -> LLMatcher:
        """Tell `matcher` what only `_counted_matcher` was told; another one, if the lexer is spoiled and it may go "
        "on anew."""
        assert self.matcher is not None and self.shared is not None, "it has a grammar"  # noqa: PT018
        if not (self.shared.lexer_exhausted and self.renew()):
            self.matcher.consume_tokens(self._tokens[self._num_fed :])
            self._num_fed = len(self._tokens)
        return self.matcher

    def _fail_reason(self) -> str:
        self.check_failed()
        assert self.matcher is not None, "it has a grammar"
        return f"the grammar can't go on: {one_line(self.matcher.get_error())}"

    def check_failed(self) -> bool:
        """The grammar has an error here. If it is the lexer's, nobody shall go on with that."""
        assert self.matcher is not None and self.shared is not None, "it has a grammar"  # noqa: PT018
        if not self.matcher.is_error():
            return False
        self.shared.lexer_exhausted |= LEXER_ERROR in self.matcher.get_error()
        return True

    def renew(self) -> bool:
        """If another output has spoiled the lexer, go on at the same place of the grammar made anew. Who has done so
        too often, or whose grammar takes long to make, stays, and ends with the next token. Whether it goes on anew."""
        assert self.matcher is not None and self.shared is not None, "it has a grammar"  # noqa: PT018
        slow = self.shared.compile_seconds > MAX_RENEWAL_SECONDS
        if not self.shared.lexer_exhausted or not self._renewals_left or slow or self.matcher.is_error():
            return False
        self._renewals_left -= 1
        brief, self.shared = self.shared.counted_matcher, self.shared.usable()
        if self.shared.counted_matcher is not brief:
            self._counted_matcher, self._chars_left, self._num_fed_counted = None, 0, 0
        self.matcher, self.node, self.mask = self.shared.initial_matcher.deep_copy(), None, None
        self.matcher.consume_tokens(self._tokens)
        self._num_fed = len(self._tokens)
        return True

    def forced_tokens(self) -> tuple[int, ...]:
        """See Matcher."""
        return self._forced[self._forced_used :] if self._forced_used else self._forced

    def is_unconstrained(self) -> bool:
        """See Matcher."""
        return self._in_grammar and self.matcher is None

    def cached_mask(self) -> bytes | None:
        """The mask, where it needn't be computed."""
        if self.mask is not None:
            return self.mask
        if not self._forced:
            if not self._in_grammar:
                return self.backend.no_eos_mask
            if self.matcher is None:
                return self.backend.full_mask
            known = None if self.node is None else self.node.mask
            return self._counted_mask() if known is None else known
        mask, token = bytearray(self.backend.mask_bytes), self._forced[self._forced_used]
        mask[token // 8] = 1 << token % 8
        return bytes(mask)

    def copy(self) -> GrammarMatcher:
        """See Matcher."""
        other = GrammarMatcher.__new__(GrammarMatcher)
        for name in GrammarMatcher.__slots__:
            setattr(other, name, getattr(self, name))
        other.matcher = None if self.matcher is None else self.matcher.deep_copy()
        other._counted_matcher = None if self._counted_matcher is None else self._counted_matcher.deep_copy()
        other._recent_tokens, other._tokens = self._recent_tokens.copy(), self._tokens.copy()
        return other
