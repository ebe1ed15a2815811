"""Matchers: the state of one output in its grammar, and what outputs with the same grammar share.

All copies of an llguidance matcher share its lexer. If one output makes too many lexer states, the lexer becomes
unusable: that output ends, and the others continue with the same grammar compiled anew.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from quire.protocol.structured_output import Structured
from quire.text.grammars.errors import one_line
from quire.text.grammars.strings import UNBOUNDED, StringDetector

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.text.grammars.backend import GrammarBackend

MAX_NODES = 1024  # per grammar
MAX_MASKS = 32  # per grammar; a mask takes 16 kB for 128,000 tokens
MAX_FORCED = 64  # forced tokens per node: each node may store a long forced text
MAX_RENEWALS = 2  # recompilations of the grammar per output
MAX_RENEWAL_SECONDS = 0.05  # longest recompilation while outputs wait
LEXER_ERROR = "lexer error"  # in llguidance's messages about the lexer


class PrefixTreeBudget:
    """The number of nodes and masks that a grammar may still store."""

    __slots__ = ("masks", "nodes")

    def __init__(self, nodes: int = MAX_NODES, masks: int = MAX_MASKS) -> None:
        self.nodes, self.masks = nodes, masks


class PrefixNode:
    """The state after some first tokens: the `mask`, and in `forced` the tokens that must follow. None: not known."""

    __slots__ = ("budget", "children", "forced", "mask", "visited")

    def __init__(self, budget: PrefixTreeBudget) -> None:
        self.budget, self.children = budget, dict[int, PrefixNode]()
        self.mask: bytes | None = None
        self.forced: tuple[int, ...] | None = None
        self.visited = False

    def child(self, token: int) -> PrefixNode | None:
        """Return the node after one more token, or None if the budget is exhausted."""
        node = self.children.get(token)
        if node is None and self.budget.nodes:
            self.budget.nodes -= 1
            node = self.children[token] = PrefixNode(self.budget)
        return node

    def remember_forced(self, forced: tuple[int, ...]) -> None:
        """Store the tokens that must follow, unless they are too many."""
        if len(forced) <= MAX_FORCED:
            self.forced = forced

    def remember_mask(self, mask: bytes) -> None:
        """Store the mask, from the second time on."""
        if self.visited and self.mask is None and self.budget.masks:
            self.budget.masks -= 1
            self.mask = mask
        self.visited = True


class SharedGrammar:
    """A compiled grammar: `initial_matcher` is at its start, compiled from `source` in `compile_seconds`; `root` is the
    prefix tree, and `strings` the detector of its strings. `counted_matcher` is the initial matcher over the vocabulary
    of `counted_strings`, for strings of limited length, whose masks are the most expensive. It has a lexer of its own,
    which a recompiled grammar takes over. None: the grammar has no such strings, or that lexer has too many states, and
    masks are computed over the whole vocabulary."""

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
        self.lexer_exhausted = False  # the lexer has too many states
        self._replacement: SharedGrammar | None = None
        self._lock = threading.Lock()

    def usable(self, may_compile: bool = True) -> SharedGrammar:
        """Return this grammar, or its recompiled replacement if the lexer is exhausted. Unless it `may_compile`, only
        if that was done already or is fast."""
        if not self.lexer_exhausted or (
            not may_compile and self._replacement is None and self.compile_seconds > MAX_RENEWAL_SECONDS
        ):
            return self
        with self._lock:
            if self._replacement is None:
                self._replacement = SharedGrammar(self.backend, self.source, self.strings, self.counted_matcher)
            return self._replacement.usable(may_compile)


class GrammarMatcher:
    """The state of one output in its grammar (see quire.protocol.structured_output.GrammarMatcher).

    Two kinds of tokens are not passed to `matcher` at once. In a free string plain tokens leave the grammar's state
    unchanged. In a counted string they are only counted, and passed to `_counted_matcher`, which is over the vocabulary
    of counted strings; `matcher` gets them when the string ends.
    """

    __slots__ = (
        "_chars_left", "_counted_matcher", "_end_marker", "_forced", "_forced_used", "_in_free_string", "_in_grammar",
        "_num_fed", "_num_fed_counted", "_recent_tokens", "_renewals_left", "_thinking_left", "_tokens", "backend",
        "mask", "matcher", "node", "shared",
    )  # fmt: skip

    def __init__(self, backend: GrammarBackend, shared: SharedGrammar | None, structured: Structured) -> None:
        self.backend, self.shared = backend, shared
        self._end_marker, self._thinking_left = structured.after, structured.budget  # reasoning tokens left
        self.matcher = None if shared is None else shared.initial_matcher.deep_copy()
        self.node = None if shared is None else shared.root
        self.mask: bytes | None = None  # if it was computed already
        self._in_free_string: bool | None = None  # None: not known
        self._counted_matcher: LLMatcher | None = None
        self._chars_left = 0  # in a counted string; 0 outside
        self._tokens = list[int]()  # of the grammar
        self._num_fed_counted = self._num_fed = 0  # of _tokens: passed to _counted_matcher, to matcher
        self._renewals_left = MAX_RENEWALS
        self._in_grammar = not structured.after  # else before the marker
        self._recent_tokens: deque[int] = deque(maxlen=len(structured.after) or 1)
        self._forced, self._forced_used = structured.opening, 0  # tokens that must follow, and how many have come
        if self._in_grammar:
            self._find_forced()
        elif not self._forced and self._thinking_left == 0:
            self._forced = self._end_marker

    def _accept_reasoning(self, token: int) -> None:
        """Accept a token before the marker, or its last one."""
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
        """Set the tokens that must follow. Return True if the matcher is known to have no error. Where masks are
        computed one by one, compute this one first: it often shows that no token is forced, and the grammar is in the
        CPU caches now."""
        matcher, node, backend, self._forced_used = self.matcher, self.node, self.backend, 0
        if matcher is None:
            return True
        if node is not None:
            if node.forced is not None:
                self._forced = node.forced
                return False
        elif backend.is_serial:
            if self._counted_mask() is not None:
                self._forced = ()
                return True
            self.mask = mask = matcher.compute_bitmask()[: backend.mask_bytes]
            for one, bit, other, other_bit in backend.probe_bits:  # inlined: every sequence runs this in every step
                if mask[one] & bit and mask[other] & other_bit:
                    self._forced = ()
                    return True
        self._forced = (backend.eos_id,) if matcher.is_stopped() else tuple(matcher.compute_ff_tokens())
        if self._forced:
            self.mask = None  # it may allow several end tokens
        if node is not None and not matcher.is_error():
            node.remember_forced(self._forced)
        return False

    def accept(self, token: int) -> str:
        """See the protocol."""
        backend = self.backend
        if self._in_free_string and backend.is_plain[token]:
            return ""
        if not self._in_grammar:
            self._accept_reasoning(token)
            return ""
        matcher, shared = self.matcher, self.shared
        if matcher is None or shared is None:
            return ""
        if not backend.is_plain[token]:
            self._in_free_string = None
        elif self._in_free_string is None and self._check_free_string():
            return ""
        self.mask = None
        if self._chars_left and self._feed_counted(token):
            return ""
        if shared.lexer_exhausted or self._num_fed < len(self._tokens):
            matcher = self._feed_pending()
        if token in backend.eos_ids:
            return "" if matcher.is_accepting() else f"token {token} ends the output before its grammar does"
        if not matcher.consume_token(token):
            return self._fail_reason()
        self._tokens.append(token)
        self._num_fed += 1
        if self.node is not None:
            self.node = self.node.child(token)
        if self._forced and self._forced_used + 1 < len(self._forced) and self._forced[self._forced_used] == token:
            self._forced_used += 1
        elif self._find_forced():
            return ""
        return self._fail_reason() if matcher.is_error() else ""

    def _check_free_string(self) -> bool:
        """Detect whether the output is in a free or counted string; return True for a free one. If it is in neither, it
        is not after further plain tokens either, unless the string is too short to end or an escape is incomplete."""
        assert self.matcher is not None and self.shared is not None, "a matcher without a grammar"  # noqa: PT018
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
        """Count a token in a counted string. Return True if there is room for more characters; then `matcher` gets the
        token later."""
        counted = None if self.shared is None else self.shared.counted_strings
        assert counted is not None and self._counted_matcher is not None, "no counted strings"  # noqa: PT018
        count = counted.token_chars[token]
        self._chars_left = max(0, self._chars_left - count) if count else 0
        if not self._chars_left:
            return False
        if not counted.feed_chars(self._counted_matcher, count):
            self._leave_counted()
            return False
        self._tokens.append(token)
        self._num_fed_counted += 1
        if self.node is not None:
            self.node = self.node.child(token)
        return True

    def _counted_mask(self) -> bytes | None:
        """Return the mask in a counted string with room for a character, else None."""
        counted = None if self.shared is None else self.shared.counted_strings
        if counted is None or (self._in_free_string is None and self._check_free_string()) or not self._chars_left:
            return None
        assert self._counted_matcher is not None, "no counted strings"
        mask = counted.mask(self._counted_matcher, self._chars_left)
        if self._counted_matcher.is_error():
            self._leave_counted()
            self._feed_pending()
            return None
        self.mask = mask
        return mask

    def _leave_counted(self) -> None:
        """Stop using `_counted_matcher`, which failed, up to the string's end. If its shared lexer failed, stop it for
        all strings until the grammar is recompiled."""
        assert self._counted_matcher is not None and self.shared is not None, "no counted strings"  # noqa: PT018
        self._chars_left = 0
        if LEXER_ERROR in self._counted_matcher.get_error():
            self.shared.counted_matcher = None

    def _feed_pending(self) -> LLMatcher:
        """Pass to `matcher` the tokens that only `_counted_matcher` got; to a new one, if the lexer is exhausted and
        may be renewed."""
        assert self.matcher is not None and self.shared is not None, "a matcher without a grammar"  # noqa: PT018
        if not (self.shared.lexer_exhausted and self.renew()):
            self.matcher.consume_tokens(self._tokens[self._num_fed :])
            self._num_fed = len(self._tokens)
        return self.matcher

    def _fail_reason(self) -> str:
        self.check_failed()
        assert self.matcher is not None, "a matcher without a grammar"
        return f"the grammar can't go on: {one_line(self.matcher.get_error())}"

    def check_failed(self) -> bool:
        """Return True if the grammar has an error here. A lexer error marks the shared grammar as exhausted."""
        assert self.matcher is not None and self.shared is not None, "a matcher without a grammar"  # noqa: PT018
        if not self.matcher.is_error():
            return False
        self.shared.lexer_exhausted |= LEXER_ERROR in self.matcher.get_error()
        return True

    def renew(self) -> bool:
        """If another output exhausted the lexer, continue at the same position of the recompiled grammar, and return
        True. An output that did so too often, or whose grammar compiles slowly, keeps its matcher and ends with the
        next token."""
        assert self.matcher is not None and self.shared is not None, "a matcher without a grammar"  # noqa: PT018
        slow = self.shared.compile_seconds > MAX_RENEWAL_SECONDS
        if not self.shared.lexer_exhausted or not self._renewals_left or slow or self.matcher.is_error():
            return False
        self._renewals_left -= 1
        old_counted, self.shared = self.shared.counted_matcher, self.shared.usable()
        if self.shared.counted_matcher is not old_counted:
            self._counted_matcher, self._chars_left, self._num_fed_counted = None, 0, 0
        self.matcher, self.node, self.mask = self.shared.initial_matcher.deep_copy(), None, None
        self.matcher.consume_tokens(self._tokens)
        self._num_fed = len(self._tokens)
        return True

    def forced_tokens(self) -> tuple[int, ...]:
        """See the protocol."""
        return self._forced[self._forced_used :] if self._forced_used else self._forced

    def is_unconstrained(self) -> bool:
        """See the protocol."""
        return self._in_grammar and self.matcher is None

    def cached_mask(self) -> bytes | None:
        """Return the mask if it need not be computed, else None."""
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
        """See the protocol."""
        other = GrammarMatcher.__new__(GrammarMatcher)
        for name in GrammarMatcher.__slots__:
            setattr(other, name, getattr(self, name))
        other.matcher = None if self.matcher is None else self.matcher.deep_copy()
        other._counted_matcher = None if self._counted_matcher is None else self._counted_matcher.deep_copy()
        other._recent_tokens, other._tokens = self._recent_tokens.copy(), self._tokens.copy()
        return other
