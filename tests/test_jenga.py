"""Layer types written by the paper's method names, in the memory: they do what the engine's own do; one that
contradicts itself is named. And the example."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from paper_types import SelfAttention, SlidingWindow

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # scripts, not a part of the package

import layer_type

from quire.errors import InputError
from quire.jenga import JengaPolicy, LayerSupportsPrefixCache, Request
from quire.memory.policies import FAR, FullPolicy, LayerPolicy, WindowPolicy, drops_pages, max_pages_at_once
from quire.protocol.kv_cache_config import KVCacheGroup


def group(tokens: int, window: int | None = None) -> KVCacheGroup:
    return KVCacheGroup((0,), 64, 4, 2**40, range(1, 200), run_tokens=tokens, window=window)


class Narrow(SlidingWindow):
    """Needs no more than the next token sees."""

    def get_possible_prefix(self, is_hit: Sequence[bool]) -> set[int]:
        return {p for p in range(1, len(is_hit) + 1) if all(is_hit[max(p - self.sliding + 1, 0) : p])}


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 8])
def test_the_papers_types_are_the_engines(tokens: int, window: int | None) -> None:
    """Figure 9b's window wants one token more of a prefix than the next one sees; what it reads is the same."""
    own: LayerPolicy = FullPolicy(group(tokens)) if window is None else WindowPolicy(group(tokens, window))
    kinds: list[LayerSupportsPrefixCache] = [SelfAttention()] if window is None else [SlidingWindow(window)]
    kinds += [Narrow(window)] if window else []
    for kind in kinds:
        policy = JengaPolicy(group(tokens), kind, horizon=40)
        assert drops_pages(policy) == drops_pages(own)
        assert max_pages_at_once(policy, 7) == max_pages_at_once(own, 7)
        for start in (*range(60), FAR):
            for end in (start + 1, start + 9):
                assert policy.reads(None, start, end) == own.reads(None, start, end)
            need, least = policy.required(None, start), own.required(None, start)
            assert need == least if isinstance(kind, Narrow) or window is None else need.start <= least.start


class Again(SlidingWindow):
    def update_last_access(self, r: Request, time: int) -> None:
        SelfAttention.update_last_access(self, r, time) if r.len == 20 else super().update_last_access(r, time)


class Holes(SlidingWindow):
    def update_last_access(self, r: Request, time: int) -> None:
        super().update_last_access(r, time)
        self.evictor.update_last_access(r.page[1], time)


class Careless(SlidingWindow):
    def get_possible_prefix(self, is_hit: Sequence[bool]) -> set[int]:
        return {p for p in range(1, len(is_hit) + 1) if is_hit[p - 1]}


class Strict(SlidingWindow):
    def get_possible_prefix(self, is_hit: Sequence[bool]) -> set[int]:
        return {p for p in super().get_possible_prefix(is_hit) if p != 9}


class Reversed(SlidingWindow):
    def set_prefix_length(self, r: Request) -> None:
        for i in range(1, r.len + 1):
            self.evictor.set_prefix_length(r.page[i], -i)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Again, "update_last_access of Again touches again"),
        (Holes, "update_last_access of Holes touches no range"),
        (Careless, "get_possible_prefix of Careless accepts"),
        (Strict, "get_possible_prefix of Strict refuses 9"),
        (Reversed, "set_prefix_length of Reversed"),
    ],
)
def test_a_type_that_contradicts_itself_is_named(kind: type[SlidingWindow], said: str) -> None:
    with pytest.raises(InputError, match=said):
        JengaPolicy(group(4), kind(4), horizon=32)


def test_the_example_holds_three_blocks_and_finds_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert layer_type.main() == [(0, [26, 4]), (400, [26, 4])]
    assert "found 400 of 402 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("retention", ["slack", "boundary"])
def test_the_example_in_a_memory_that_keeps_dropped_pages(retention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_type, "PagedMemory", partial(layer_type.PagedMemory, retention=retention))
    assert layer_type.main() == [(0, [26, 4]), (400, [26, 4])]


@pytest.mark.parametrize("tokens", range(1, 200))
def test_the_examples_blocks_are_right_beyond_the_horizon(tokens: int) -> None:
    policy = layer_type.policy_of(layer_type.BlockLocalLayer(), 4 * layer_type.BLOCK, layer_type.BLOCK)(group(1))
    assert policy.reads(None, tokens - 1, tokens).start == layer_type.first_seen(tokens) - 1
    assert policy.required(None, tokens).start == min(layer_type.first_seen(tokens + 1) - 1, tokens)


def test_it_is_short() -> None:
    assert len(Path(layer_type.__file__).read_text().splitlines()) < 120
