"""The keys of cached pages.

Keys are chained: key i is a digest of key i - 1 and the i-th `key_tokens` tokens, from a root of model, dtype and salt,
so a key identifies the whole prefix. A group's page has the key of the piece in which its last token lies."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.protocol.images import ImageItem
from quire.protocol.sequence import Sequence


class KeyChain(NamedTuple):
    """How the keys of sequences are made. `root_key` stands for the model and the dtype. With `bidirectional_prompt`
    the keys and values of a token depend on the whole prompt."""

    root_key: bytes
    key_tokens: int
    bidirectional_prompt: bool = False

    def extend(self, seq: Sequence, tokens: int) -> None:
        """Extend seq.page_keys to the first `tokens` tokens, in whole pieces of `key_tokens` tokens."""
        keys, size = seq.page_keys, 8 * self.key_tokens
        first, last = len(keys), tokens // self.key_tokens
        if last <= first:
            return
        data = array("q", seq.tokens[first * self.key_tokens : last * self.key_tokens]).tobytes()
        key = keys[-1] if keys else self.salted_root(seq.cache_salt)
        has_extra_keys = seq.images or self.bidirectional_prompt
        for i, at in enumerate(range(0, len(data), size), first):
            piece = data[at : at + size]
            key = hashlib.sha256(key + (piece + self._extra_key(seq, i) if has_extra_keys else piece)).digest()
            keys.append(key)

    def _extra_key(self, seq: Sequence, run: int) -> bytes:
        """Return a digest of what the keys and values of a piece depend on besides its tokens.

        That is the images that overlap it, with their positions; and, where attention in the prompt is bidirectional,
        the whole prompt. It is empty if there is nothing: what precedes an image has the same keys as without it."""
        begin, end = run * self.key_tokens, (run + 1) * self.key_tokens
        parts = [m.key + m.start.to_bytes(8) for m in seq.images if m.start < end and m.end > begin]
        if self.bidirectional_prompt and not run:
            prompt = [m.key + m.start.to_bytes(8) for m in seq.images]
            parts = [array("q", seq.tokens[: seq.prompt_len]).tobytes(), *prompt]
        return hashlib.sha256(b"".join(parts)).digest() if parts else b""

    def salted_root(self, salt: str) -> bytes:
        """Return the key of the empty prefix: each adapter and each tenant has its own."""
        return hashlib.sha256(self.root_key + salt.encode()).digest()

    def of_pages(self, run_tokens: int, run_pages: int, keys: Seq[bytes], first: int, last: int) -> Seq[bytes]:
        """Return the keys of the pages [first, last) of a sequence with these keys, in a group of which `run_pages`
        pages hold `run_tokens` tokens."""
        if run_pages == 1:
            step = run_tokens // self.key_tokens
            return keys[(first + 1) * step - 1 : last * step : step]
        ends = [-(-(i + 1) * run_tokens // (run_pages * self.key_tokens)) for i in range(first, last)]
        return [keys[end - 1] + (i % run_pages).to_bytes(2) for i, end in zip(range(first, last), ends)]


class PromptKeys(NamedTuple):
    """How the keys of one group's pages are made, of which `run_pages` pages hold `run_tokens` tokens."""

    chain: KeyChain
    run_tokens: int
    run_pages: int

    @property
    def page_tokens(self) -> float:
        """The tokens of a page."""
        return self.run_tokens / self.run_pages

    def num_full_pages(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens fill completely."""
        return tokens * self.run_pages // self.run_tokens

    def tokens_in_pages(self, pages: int) -> int:
        """Return how many whole tokens the first `pages` pages hold."""
        return pages * self.run_tokens // self.run_pages

    def of_pages(self, seq: Sequence, first: int, last: int) -> Seq[bytes]:
        """Return the keys of the pages [first, last) of a sequence whose keys are made already."""
        return self.chain.of_pages(self.run_tokens, self.run_pages, seq.page_keys, first, last)

    def of_prompt(self, prompt: Seq[int], salt: str = "", images: tuple[ImageItem, ...] = ()) -> Seq[bytes]:
        """Return the keys of the pages of a prompt that can be found: its last token is always computed."""
        seq, end = Sequence(0, list(prompt), cache_salt=salt), len(prompt) - 1
        seq.images = images
        self.chain.extend(seq, end)
        return self.of_pages(seq, 0, self.num_full_pages(end))
