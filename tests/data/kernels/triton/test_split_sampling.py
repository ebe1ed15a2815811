"""Draws from logits that ranks have shared out are those of `sampling` from all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.data.kernels.triton import sampling
from quire.data.layers.cut import Cut, vocabulary
from quire.data.runner.fused import FusedSampling
from quire.data.runner.split_fused import SplitFused
from quire.vocabulary.layout import Part

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if CUDA else (torch.float32,)


class Together:
    """Ranks that do the same one after another: `round` by round, what each gathers is told to all in the next run of
    the same. Their bytes are counted."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.told, self.sent = ranks, list[list[Tensor]](), 0

    def run(self, work: Callable[[Rank], Tensor]) -> list[Tensor]:
        """The same work on every rank, again and again until none asks for what others haven't said."""
        while True:
            found, known = [], len(self.told)
            for rank in range(self.ranks):
                one = Rank(self, rank)
                try:
                    found.append(work(one))
                except Unsaid as unsaid:
                    if rank == 0:
                        self.told.append([])
                    self.told[known].append(unsaid.x)
            if len(found) == self.ranks:
                return found


class Unsaid(Exception):
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Rank:
    """A rank's exchange."""

    def __init__(self, together: Together, rank: int) -> None:
        self.together, self.part, self.gathers = together, Part(rank, together.ranks), 0

    def gather(self, x: Tensor) -> Tensor:
        told, self.gathers = self.together.told, self.gathers + 1
        if len(told) < self.gathers or len(told[self.gathers - 1]) < self.together.ranks:
            raise Unsaid(x.clone())
        return torch.stack(told[self.gathers - 1])


def own_of(logits: Tensor, cut: Cut) -> Tensor:
    """A rank's, padded with what isn't to be seen."""
    own = torch.full((len(logits), cut.room), 1e4, dtype=logits.dtype, device=logits.device)
    own[:, : len(cut.own)] = logits[:, cut.own.start : cut.own.stop]
    return own


class Padded(SplitFused):
    """One that takes padding for tokens."""

    def __init__(self, vocab_size: int, device: torch.device, exchange: Any) -> None:
        super().__init__(vocab_size, device, exchange)
        self.own = self.own._replace(count=self.cut.room)


@pytest.mark.parametrize("tail", ["greedy", "random"])
def test_a_padded_vocabulary_row_that_is_drawn_is_named(tail: str) -> None:
    """Whatever ranks tell becomes a token of the vocabulary: its last one here."""
    rows, vocab, ranks = 20, 150, 2
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(DEVICE)
    slots, last = torch.arange(rows, device=DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE)

    def drawn(fused: FusedSampling, given: Tensor) -> Tensor:
        tails = fused.tails(last, rows)
        fused.fill(np.tile((0.8, 0.0, 0.0, 1.0), (rows, 1)), np.full(rows, 0.5))
        return tails[tail](given, slots)[0].cpu()

    def told(kind: type[SplitFused]) -> list[str]:
        def work(rank: Rank) -> Tensor:
            return drawn(kind(vocab, DEVICE, rank), own_of(logits, vocabulary(rank.part, vocab)))

        found = Together(ranks).run(work)
        return [
            f"row {row} on rank {rank}: token {int(tokens[row])}, not {wanted}"
            for rank, tokens in enumerate(found)
            for row, wanted in enumerate(want.tolist())
            if tokens[row] != wanted
        ]

    want = drawn(FusedSampling(vocab, DEVICE), logits)
    assert (want < vocab - 1).all()
    assert told(SplitFused) == []
    assert told(Padded) == [
        f"row {row} on rank {rank}: token {vocab - 1}, not {want[row]}" for rank in range(ranks) for row in range(rows)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "vocab"), [(2, 5000), (3, 1000), (4, 150)])
@pytest.mark.parametrize("tail", ["greedy", "random"])
def test_tokens_are_those_of_all_logits(tail: str, ranks: int, vocab: int, dtype: torch.dtype) -> None:
    rows = 20
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(dtype).to(DEVICE)
    logits[1, :] = logits[1, 0]  # ties: the lowest id
    logits[2, 7], logits[3, -1], logits[4, :] = torch.nan, torch.inf, -torch.inf  # no token
    logits[5, : vocab - 1] = -torch.inf  # only the last one
    logits[6, vocab // 2 :] = -torch.inf
    shape = np.tile((0.8, 0.0, 0.0, 1.0), (rows, 1))
    shape[7:10, 0], shape[10:14, 1] = 0, 0.05  # greedy ones, min_p
    chance = np.random.default_rng(0).random(rows)
    chance[14:16] = 0.0, 1 - 2.0**-53
    slots = torch.arange(rows, device=DEVICE) + 1

    def outcome(fused: FusedSampling, given: Tensor) -> Tensor:
        last = torch.zeros(rows + 1, dtype=torch.int64, device=DEVICE)
        tails = fused.tails(last, rows)
        fused.fill(shape, chance)
        tokens, faults = tails[tail](given, slots)
        return torch.stack((tokens, faults, last[1:])).cpu()

    want = outcome(FusedSampling(vocab, DEVICE), logits)
    assert want[1].tolist() == [0, 0, 1, 1, 1, *[0] * 15]

    def work(rank: Rank) -> Tensor:
        return outcome(SplitFused(vocab, DEVICE, rank), own_of(logits, vocabulary(rank.part, vocab)))

    together = Together(ranks)
    for got in together.run(work):
        assert torch.equal(got, want)
    sent = sum(told[0].nbytes for told in together.told)
    assert sent == rows * (8 if tail == "greedy" else 20)


@pytest.fixture
def nothing_is_left_over() -> Iterator[None]:
    """Memory that nobody has written holds the greatest integers and NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nothing_is_left_over")
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_are_cut_hurt_no_tail_without_room_for_that(ranks: int) -> None:
    """A size is captured while another tail's inputs are there: what it draws then is of no use, and stays inside."""
    rows, vocab = 20, 300
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    slots, last = torch.arange(rows, device=DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE)

    def work(rank: Rank) -> Tensor:
        fused = SplitFused(vocab, DEVICE, rank) if ranks > 1 else FusedSampling(vocab, DEVICE)
        tails = fused.tails(last, rows)
        fused.fill(np.tile((0.8, 0.0, 5.0, 0.5), (rows, 1)), np.full(rows, 0.5))
        given = own_of(logits, vocabulary(rank.part, vocab)) if ranks > 1 else logits
        return tails["random"](given, slots)[0]

    for tokens in Together(ranks).run(work):
        assert ((tokens >= 0) & (tokens < vocab)).all()


def test_a_rank_whose_part_is_empty_tells_nothing() -> None:
    cut = vocabulary(Part(3, 4), 150)
    assert not len(cut.own)
    assert cut.room == 64
    assert sampling.BLOCK > 64
