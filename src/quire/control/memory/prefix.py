"""Prefixes that can be reused: cached pages found by their keys, and prefixes that the operator registered.

Keys are chained: key i is a digest of key i - 1 and the i-th run of `unit` tokens, from a root of model, dtype and
salt, so a key names the whole prefix. A group's page is named by the key of the run in which its last token lies.
`unit` divides what the pages of every group hold, and a prefix ends after a multiple of `stride` tokens, where a page
of every group does. A registered prefix (PagedAttention §4.4, Figure 10) is pinned: its pages stay, the last partial
ones included, which sequences share until they write to them.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from operator import add, sub
from typing import NamedTuple

from quire.control.memory.gathering import gather
from quire.control.memory.index import PrefixIndex, Stop
from quire.control.memory.pages import SCRATCH
from quire.control.memory.policies import FAR, LayerPolicy
from quire.control.memory.tables import PageTables, Tables
from quire.control.request import Sequence, common_prefix
from quire.vocabulary.plan import Copy

MAX_PREFIXES = 1024


class Reuse(NamedTuple):
    """The first `tokens` tokens of a sequence, and the pages that hold them, a table a group (0: not needed). Of
    `junction` tokens there is all that groups have which drop nothing."""

    tokens: int
    tables: Tables
    junction: int = 0


class Registered(NamedTuple):
    """A pinned prefix; keys[i] names its first i strides."""

    tokens: list[int]
    tables: Tables
    keys: list[bytes]


class Prefixes:
    """What a memory of these tables can reuse. `set_aside` pages a group are kept for registered ones. Without
    `caching` only those are found."""

    def __init__(self, tables: PageTables, model_id: str, set_aside: Seq[int], caching: bool = True) -> None:
        self.tables, self.pages, self.policies = tables, tables.pages, tables.policies
        self.set_aside, self.caching = set_aside, caching
        self.whole = tables.geometry.both_ways
        self.bounded = any(not policy.media and policy not in tables.keeping for policy in tables.policies)
        self.named = [(g, p) for g, p in enumerate(self.policies) if p.unit]  # whose pages are found by tokens
        units = [policy.unit for _, policy in self.named]
        self.unit, self.stride = math.gcd(*units) or FAR, math.lcm(*units)
        self.root = hashlib.sha256(b"quire:" + model_id.encode()).digest()
        self.registered: dict[str, Registered] = {}
        self.index = PrefixIndex(self.stride)  # of the registered ones
        self.pins: Counter[tuple[int, int]] = Counter()  # (group, page) -> registered prefixes that hold it
        self.coming: Counter[bytes] = Counter()  # keys of whole prompt pages that residents are computing
        self.awaited: dict[bytes, set[int]] = {}  # keys in `coming`, and the sequences that were told to wait for them
        self.waiting: dict[int, list[int]] = {}  # these sequences, and the pages of each group that they will need
        self.promised = [0] * len(self.policies)  # all of these pages: who comes in meanwhile leaves them
        self.queries = self.hits = self.full_hits = 0  # tokens looked up in the cache, and found: see Sharing

    # Keys

    def chain(self, seq: Sequence, tokens: int) -> None:
        """Fill seq.keys up to those of the first `tokens` tokens, whole runs only."""
        keys, size = seq.keys, 8 * self.unit
        first, last = len(keys), tokens // self.unit
        if last <= first:
            return
        data = array("q", seq.tokens[first * self.unit : last * self.unit]).tobytes()
        key = keys[-1] if keys else self._origin(seq.salt)
        beside = seq.media or self.whole
        for i, at in enumerate(range(0, len(data), size), first):
            run = data[at : at + size]
            key = hashlib.sha256(key + (run + self._beside(seq, i) if beside else run)).digest()
            keys.append(key)

    def _beside(self, seq: Sequence, run: int) -> bytes:
        """What the keys and values of a run depend on beside its tokens: the pictures that it touches, and where they
        begin; where tokens attend both ways, all of the prompt. Nothing, so that what stands before a picture has the
        keys that it has without one."""
        begin, end = run * self.unit, (run + 1) * self.unit
        more = [m.key + m.start.to_bytes(8) for m in seq.media if m.start < end and m.end > begin]
        if self.whole and not run:
            prompt = [m.key + m.start.to_bytes(8) for m in seq.media]
            more = [array("q", seq.tokens[: seq.prompt_len]).tobytes(), *prompt]
        return hashlib.sha256(b"".join(more)).digest() if more else b""

    def _origin(self, salt: str) -> bytes:
        """The key of no pages: another adapter's keys and values, or another tenant's, begin elsewhere."""
        return hashlib.sha256(self.root + salt.encode()).digest()

    def names(self, group: int, keys: Seq[bytes], first: int, last: int) -> Seq[bytes]:
        """The names of the content of a group's pages first .. last of a sequence with these keys."""
        policy = self.policies[group]
        tokens, pages = policy.group.run_tokens, policy.group.run_pages
        if pages == 1:
            step = tokens // self.unit
            return keys[(first + 1) * step - 1 : last * step : step]
        ends = [-(-(i + 1) * tokens // (pages * self.unit)) for i in range(first, last)]
        return [keys[end - 1] + (i % pages).to_bytes(2) for i, end in zip(range(first, last), ends)]

    def publish(self, seq: Sequence, start: int, end: int, tables: Tables, first: Seq[int]) -> None:
        """tokens[start : end] of the sequence are computed, both multiples of `unit`: their full pages can be found."""
        self.chain(seq, end)
        for g, policy in self.named:
            table = tables[g]
            i, stop = max(policy.group.whole(start), first[g]), min(policy.group.whole(end), len(table))
            for name in self.names(g, seq.keys, i, stop):
                if policy.keeps(seq, i):
                    self.pages.publish(g, table[i], name)
                i += 1

    # Cached pages

    def cached(self, seq: Sequence, known: int = 0) -> Reuse:
        """The longest prefix whose pages every group can find (Jenga §5.3); one token is left to compute. Of the first
        `known` tokens, a multiple of `stride`, all pages are known, and not looked up nor returned.

        Each page is looked up once: of groups that need all of them from the left, until one is missing; of others
        from the right, where the last missing one says how long the prefix can be at most."""
        limit = max(min(seq.reusable, len(seq.tokens) - 1) // self.stride * self.stride, known)
        self.chain(seq, limit)
        ends = [policy.group.whole(limit) for policy in self.policies]
        named = [self.names(g, seq.keys, 0, end) if self.policies[g].unit else () for g, end in enumerate(ends)]
        found = list(ends)  # a group's pages from here on, before `hit`, are there
        hit, settled = limit, False
        for g, policy in enumerate(self.policies):
            if policy in self.tables.keeping:
                hit, found[g] = self._found(g, seq, named[g], range(known, hit), found[g])
        junction = hit
        while not settled and hit > known:
            settled = True
            for g, names in enumerate(named):
                shorter, found[g] = self._found(g, seq, names, range(known, hit), found[g])
                if shorter < hit:
                    hit, settled = shorter, False
        hit = self.useful(seq, hit)
        tables = []
        for g, policy in enumerate(self.policies):
            need, begin = policy.required(seq, hit), 0 if policy.media else policy.group.whole(known)
            names = named[g][max(need.start, begin) : need.stop]
            pages = [page for page in map(self.pages.index[g].get, names) if page is not None]
            tables.append([SCRATCH] * (need.start - begin) + pages)
        return Reuse(hit, tables, junction)

    def _found(self, group: int, seq: Sequence, names: Seq[bytes], tokens: range, found: int) -> tuple[int, int]:
        """The longest prefix, of up to tokens.stop tokens and beyond tokens.start, whose pages may be there, as far as
        one group's are: its pages from `found` on are, and where they are is told again."""
        policy, index, hit = self.policies[group], self.pages.index[group], tokens.stop
        need = policy.required(seq, hit)
        first, last = max(need.start, policy.group.whole(tokens.start)), min(found, need.stop)
        if first >= last:
            return hit, found
        if need.start == 0:
            there = next((i for i in range(first, last) if names[i] not in index), last)
            return (hit if there == last else self._floor(policy, there)), 0
        i = last - 1
        while i >= first and names[i] in index:
            i -= 1
        if i < first:
            return hit, first
        border = policy.border or len(names) + 1
        while i >= 0 and names[i] not in index and (i + 1) % border:  # it ends behind a page that is there
            i -= 1
        return self._floor(policy, i + 1), i if i >= 0 and names[i] in index else i + 1

    def useful(self, seq: Sequence, tokens: int) -> int:
        """How many of its first `tokens` tokens, all of which are there, a sequence can go on behind: none of a part of
        a prompt whose tokens attend both ways, where layers have windows. Within the prompt these hide nothing."""
        return 0 if self.whole and self.bounded and tokens < seq.prompt_len else tokens

    def _floor(self, policy: LayerPolicy, pages: int) -> int:
        return policy.group.until(pages) // self.stride * self.stride

    # Pages that are being computed

    def is_coming(self, seq: Sequence, tokens: int, needs: list[int]) -> bool:
        """What follows the first `tokens` tokens, all that can be reused, is being computed for another sequence: worth
        waiting for. The pages that it needs, `needs` of each group, are promised to it meanwhile."""
        end = (tokens // self.stride + 1) * self.stride
        if end >= min(seq.reusable + 1, len(seq.tokens)) or not self.useful(seq, end):
            return False
        key = seq.keys[end // self.unit - 1]
        if key not in self.coming:
            return False
        self.awaited.setdefault(key, set()).add(seq.id)
        self.waiting[seq.id] = needs
        self.promised = list(map(add, self.promised, needs))
        return True

    def waits(self, seq: Sequence) -> bool:
        """The sequence was told that a page is coming, and that page hasn't arrived yet: nothing is looked up again. If
        pages before it were evicted meanwhile, that is seen when it arrives, or when its owner leaves."""
        return seq.id in self.waiting

    def expect(self, seq: Sequence, start: int) -> tuple[int, int]:
        """`seq` will compute the whole pages of its prompt from token `start` on. Returns which of its keys that is."""
        first = start // self.unit
        end = max(first, len(seq.keys))
        self.coming.update(seq.keys[first:end])
        return first, end

    def arrived(self, seq: Sequence, start: int, end: int) -> None:
        """What keys [start, end) of `seq` name is computed, or won't be."""
        for key in seq.keys[start:end]:
            self.coming[key] -= 1
            if not self.coming[key]:
                del self.coming[key]
            for waiting in self.awaited.pop(key, ()):
                self.promised = list(map(sub, self.promised, self.waiting.pop(waiting)))

    def look_again(self) -> None:
        """What can be found has changed: nobody waits for what was said to be coming."""
        self.awaited, self.waiting = {}, {}
        self.promised = [0] * len(self.policies)

    def reset(self) -> int:
        """Forget every prefix and picture but the registered ones. Returns the number of pages emptied: those that no
        sequence uses. Those that are used aren't found any more, nor what their sequences add to them."""
        self.look_again()
        self.coming.clear()
        for resident in self.tables.everybody():
            resident.stale, resident.expected = True, (0, 0)
        emptied = self.pages.drop_cached()
        for g, index in enumerate(self.pages.index):
            for page in [page for page in index.values() if (g, page) not in self.pins]:
                self.pages.withdraw(g, page)
        self.tables.gallery.forget()
        return emptied

    # Registered prefixes (§4.4)

    def room(self, length: int) -> bool:
        """Could a prefix of `length` tokens be registered now?"""
        held = Counter(group for group, _ in self.pins)
        need = [held[g] + policy.reads(None, 0, length).stop for g, policy in enumerate(self.policies)]
        return self.pages.within(need, self.set_aside) and len(self.registered) < MAX_PREFIXES

    def pin(self, name: str, seq: Sequence) -> bool:
        """Register the computed tokens of a resident sequence as the prefix `name`; they stay until `unpin`. False if
        they exceed what is kept for prefixes, or if there are MAX_PREFIXES already."""
        if not self.room(seq.computed):
            return False
        resident = self.tables.residents[seq.id]
        self.chain(seq, seq.computed)
        ends = range(self.stride, seq.computed + 1, self.stride)
        keys = [self._origin(seq.salt), *(seq.keys[end // self.unit - 1] for end in ends)]
        tables = [
            table[: policy.required(seq, seq.computed).stop] for policy, table in zip(self.policies, resident.tables)
        ]
        prefix = Registered(seq.tokens[: seq.computed], tables, keys)
        for group, page in _pages(prefix):
            self.pages.share(group, page)
            self.pins[group, page] += 1
        self.registered[name] = prefix
        self.index.add(name, self._stops(prefix))
        self.look_again()
        resident.forked = True
        return True

    def unpin(self, name: str) -> bool:
        """Let go of a prefix; sequences that share its pages keep them. False if there is none of that name."""
        prefix = self.registered.pop(name, None)
        if prefix is None:
            return False
        self.pages.release_all(prefix.tables)
        self.pins -= Counter(_pages(prefix))
        self.index.remove(name, self._stops(prefix))
        self.look_again()
        return True

    def gather(self) -> None:
        """No sequence is in memory: what registered prefixes hold lies in as few large pages as it fills, as `fits` has
        counted it."""
        for g in range(len(self.policies)):
            moved = gather(self.pages, g, [page for group, page in self.pins if group == g])
            self.tables.entries += [Copy(g, old, new) for old, new in moved.items()]
            for old, new in moved.items():
                self.pins[g, new] = self.pins.pop((g, old))
            for prefix in self.registered.values() if moved else ():
                prefix.tables[g][:] = [moved.get(page, page) for page in prefix.tables[g]]

    def pinned(self, seq: Sequence) -> Reuse:
        """The longest part of a registered prefix that the sequence begins with: all of it, or whole strides."""
        limit = min(seq.reusable, len(seq.tokens) - 1, *(medium.start for medium in seq.media[:1]))
        name = self.index.find(self._known(seq, limit), seq.tokens, limit) if self.registered else None
        if name is None:
            return self.nothing()
        prefix = self.registered[name]
        shared = common_prefix(seq.tokens, prefix.tokens, limit)
        if shared < len(prefix.tokens):
            shared = shared // self.stride * self.stride
        kept = self.part(prefix.tables, shared) if shared > 0 else None
        return Reuse(shared, kept) if kept is not None else self.nothing()

    def _known(self, seq: Sequence, limit: int) -> list[bytes]:
        """The keys of 0, 1, 2... strides of the sequence, as long as a registered prefix has them too. No more are
        hashed than one beyond those."""
        keys: list[bytes] = []
        key = self._origin(seq.salt)
        while key in self.index:
            keys.append(key)
            end = len(keys) * self.stride
            if end > limit:
                break
            self.chain(seq, end)
            key = seq.keys[end // self.unit - 1]
        return keys

    def part(self, tables: Tables, tokens: int) -> Tables | None:
        """What a sequence needs of the tables to go on after `tokens` tokens; None if some of it isn't there."""
        kept = []
        for policy, table in zip(self.policies, tables):
            need = policy.required(None, tokens)
            pages = table[need.start : need.stop]
            if len(pages) < len(need) or SCRATCH in pages:
                return None
            kept.append([SCRATCH] * need.start + pages)
        return kept

    def nothing(self) -> Reuse:
        """No tokens."""
        return Reuse(0, [[] for _ in self.policies])

    def _stops(self, prefix: Registered) -> Iterator[Stop]:
        """Where a lookup of a prefix can end; see PrefixIndex."""
        gone = [next((i for i, page in enumerate(table) if page), len(table)) for table in prefix.tables]
        for i, key in enumerate(prefix.keys):
            # The pages that were dropped must not be needed. After no page at all there is nothing to use.
            needs = [policy.required(None, i * self.stride) for policy in self.policies]
            yield Stop(key, (), i > 0 and all(need.start >= min(first, need.stop) for need, first in zip(needs, gone)))
        if tail := prefix.tokens[(len(prefix.keys) - 1) * self.stride :]:
            yield Stop(prefix.keys[-1], tuple(tail), self.part(prefix.tables, len(prefix.tokens)) is not None)

    def check(self) -> None:
        """Assert that what is kept about registered prefixes is what their list says, and who waits waits for a page
        that is coming."""
        pins = Counter(named for prefix in self.registered.values() for named in _pages(prefix))
        assert pins == self.pins, "the pins of registered prefixes differ from their tables"
        index = PrefixIndex(self.stride)
        for name, prefix in self.registered.items():
            index.add(name, self._stops(prefix))
        assert index.names == self.index.names, "the index names other prefixes than the registered ones"
        assert index.tails == self.index.tails, "the index has lost its way to a prefix"
        assert all(key in self.coming for key in self.awaited), "a sequence waits for nothing"
        assert {seq for seqs in self.awaited.values() for seq in seqs} == set(self.waiting), "who waits is told twice"
        promised = [sum(pages) for pages in zip(*self.waiting.values())] or [0] * len(self.policies)
        assert promised == self.promised, "pages are promised to nobody"


def _pages(prefix: Registered) -> Iterable[tuple[int, int]]:
    return ((group, page) for group, table in enumerate(prefix.tables) for page in table if page != SCRATCH)
