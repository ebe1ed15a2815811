"""Draws from logits that ranks have shared out are those of `sampling` from all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from grids import CUDA, DEVICE, TYPES
from thread_ranks import Meeting, ThreadExchange
from torch import Tensor

from quire.layers.sharding import ShardRange, shard_vocab
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import SliceResult, SlotInit
from quire.worker import vocab_parallel_sampler
from quire.worker.sampler import Sampler
from quire.worker.sampling_kernels import TritonSampling
from quire.worker.vocab_parallel_sampler import VocabParallelTritonSampler, VocabParallelTritonSampling

T = TypeVar("T")


class Turns(ThreadExchange):
    """A rank's exchange that counts the bytes that it sends; of these, one runs at a time until it gathers."""

    def __init__(self, other: ThreadExchange, turn: Lock) -> None:
        super().__init__(other.meeting, other.shard)
        self.turn, self.sent = turn, 0

    def all_gather(self, x: Tensor) -> Tensor:
        self.sent += x.nbytes
        self.turn.release()
        try:
            return super().all_gather(x.clone())
        finally:
            self.turn.acquire()


def on_ranks(ranks: int, work: Callable[[Turns], T]) -> tuple[list[T], int]:
    """The same work on every rank: what each finds, and the bytes that the first has sent."""
    turn, sent = Lock(), {}

    def alone(exchange: ThreadExchange) -> T:
        with turn:
            found = work(mine := Turns(exchange, turn))
        sent[mine.shard.tp_rank] = mine.sent
        return found

    return Meeting(ranks).run(alone), sent[0]


def own_of(logits: Tensor, cut: ShardRange) -> Tensor:
    """A rank's, padded with what isn't to be seen."""
    own = torch.full((len(logits), cut.padded), 1e4, dtype=logits.dtype, device=logits.device)
    own[:, : len(cut.local)] = logits[:, cut.local.start : cut.local.stop]
    return own


class Rows(NamedTuple):
    """Logits [R, V], what each row asks for [R, 4], and seeds [R]."""

    logits: Tensor
    shape: np.ndarray
    seeds: np.ndarray

    @classmethod
    def some(cls, seed: int, rows: int) -> Rows:
        """Of one vocabulary: flat and steep ones, with ties, with tokens that are hidden and faults; settings at and
        beyond all edges."""
        random = np.random.default_rng(seed)
        vocab = int(random.choice([1, 3, 50, 65, 130, 300, 2100]))
        logits = random.standard_normal((rows, vocab)) * random.choice([0.0, 0.01, 1, 3, 10, 30], (rows, 1))
        grain = random.choice([1e-9, 1e-9, 0.25, 1, 5], (rows, 1))
        logits = np.round(logits / grain) * grain
        hidden = random.random((rows, vocab)) < random.choice([0, 0, 0.5, 0.95], (rows, 1))
        hidden[:, vocab // 2] = False
        logits[hidden] = -np.inf
        bad, place = random.random(rows) < 0.03, random.integers(0, vocab, rows)
        logits[bad, place[bad]] = random.choice([np.nan, np.inf], bad.sum())
        edges = random.choice([1, 1, 0.9, 1e-6, 1e-300, 1 - 2.0**-53, 2.0**-33], rows)
        shape = np.stack((
            random.choice([1, 1, 0.3, 1e-5, 4, 1e30, 0], rows), random.choice([0, 0, 0.05, 1e-12, 1], rows),
            random.choice([0, 0, 1, 2, 7, 50, vocab - 1], rows),
            np.where(random.random(rows) < 0.5, edges, random.uniform(1e-6, 1, rows)),
        ), axis=1)  # fmt: skip
        return cls(torch.from_numpy(logits).float().to(DEVICE), shape, random.integers(0, 2**63, rows))

    def drawn(self, fused: TritonSampling, tail: str, logits: Tensor) -> Tensor:
        """Tokens, faults and what is last in slots 1 and so on."""
        slots = torch.arange(len(logits), device=DEVICE) + 1
        last = torch.zeros(len(slots) + 1, dtype=torch.int64, device=DEVICE)
        tails = fused.epilogues(last, len(slots))
        fused.fill_epilogue(self.shape, self.seeds, self.seeds >> 20)
        tokens, faults = tails[tail](logits, slots)
        return torch.stack((tokens, faults, last[1:])).cpu()

    def drawn_by_all(self, tail: str, ranks: int) -> tuple[Tensor, int]:
        """The same by one rank, which some ranks find too; and the bytes that these have sent."""
        vocab = self.logits.shape[1]
        want = self.drawn(TritonSampling(vocab, DEVICE), tail, self.logits)

        def work(rank: Turns) -> Tensor:
            mine = own_of(self.logits, shard_vocab(rank.shard, vocab))
            return self.drawn(VocabParallelTritonSampling(vocab, DEVICE, rank), tail, mine)

        every, sent = on_ranks(ranks, work)
        assert all(torch.equal(got, want) for got in every)
        return want, sent


@TYPES
@pytest.mark.parametrize(("ranks", "vocab"), [(3, 1000), (2, 5000), (4, 150)])  # the last of four has none
@pytest.mark.parametrize("tail", ["cut", "greedy", "random"])
def test_tokens_are_those_of_all_logits(tail: str, ranks: int, vocab: int, dtype: torch.dtype) -> None:
    rows = 20
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(dtype).to(DEVICE)
    logits[1, :] = logits[1, 0]  # ties: the lowest id
    logits[2, 7], logits[3, -1], logits[4, :] = torch.nan, torch.inf, -torch.inf  # no token
    logits[5, : vocab - 1] = -torch.inf  # only the last one
    logits[6, vocab // 2 :] = -torch.inf
    shape = np.tile((0.8, 0.0, 0.0, 1.0), (rows, 1))
    shape[7:10, 0] = 0  # greedy
    if tail == "cut":
        shape[10:14, 1] = 0.05
        shape[[0, 1, 5, 6, 7, 11, 12, 13], 2] = 50, 3, 2, vocab - 1, 4, 1, 7, 60
        shape[[0, 4, 6, 12, 14, 15, 16, 17], 3] = 0.9, 0.5, 0.999, 0.7, 0.9, 0.95, 1e-6, 1 - 2.0**-53
    want, sent = Rows(logits, shape, np.arange(rows) << 30).drawn_by_all(tail, ranks)
    assert want[1].tolist() == [0, 0, 1, 1, 1, *[0] * 15]
    assert sent == rows * {"greedy": 8, "random": 8, "cut": 3856}[tail]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(80))
def test_many_rows_draw_the_tokens_of_all_logits(seed: int) -> None:
    Rows.some(seed, 512 if CUDA else 20).drawn_by_all("cut", (2, 3, 4, 8)[seed % 4])


@pytest.mark.parametrize("few", [0, 16])
def test_several_draws_of_a_row(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a graph: greedy rows alone, and beside rows that are drawn; the first draw of a row is its last."""
    monkeypatch.setattr(vocab_parallel_sampler, "MAX_GATHERED_ROWS", few)
    vocab, slots = 150, np.array([3, 1, 4])
    logits = 2 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    owner, seeds, positions = np.array([0, 0, 0, 1, 2, 2]), np.arange(6), np.full(6, 9)
    for shape in ([(0, 0, 0, 1)] * 3, [(1, 0, 20, 0.9), (0, 0, 0, 1), (0.8, 0.1, 0, 1)], [(1, 0, 0, 1)] * 3):
        asked = np.array(shape, dtype=np.float64), owner, seeds, positions, slots
        last = torch.zeros(5, dtype=torch.int64, device=DEVICE)
        want = (*TritonSampling(vocab, DEVICE).draw(logits, *asked, last), last)

        def work(rank: Turns, asked: Any = asked) -> tuple[Tensor, ...]:
            mine = own_of(logits, shard_vocab(rank.shard, vocab))
            last = torch.zeros(5, dtype=torch.int64, device=DEVICE)
            return (*VocabParallelTritonSampling(vocab, DEVICE, rank).draw_local(mine, *asked, last), last)

        for found in on_ranks(2, work)[0]:
            assert all(torch.equal(got, other) for got, other in zip(found, want, strict=True))


KINDS: tuple[dict[str, Any], ...] = (
    {"top_k": 20, "n": 2},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"temperature": 0.7, "logprobs": 3},
    {"frequency_penalty": 0.5},
)


@pytest.mark.parametrize("kinds", [[0, 1, 2], [0, 3], [2, 4]])
def test_the_sampler_of_a_rank_equals_that_of_all_logits(kinds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole logits are gathered where some row asks for more than draws, and else not."""
    monkeypatch.setattr(vocab_parallel_sampler, "MAX_GATHERED_ROWS", 0)
    vocab, slots = 300, len(KINDS)
    logits = 2 * torch.randn(len(kinds), vocab, generator=torch.Generator().manual_seed(4)).to(DEVICE)

    def sampled(sampler: Sampler, given: Tensor) -> tuple[list[SliceResult], list[int]]:
        last = torch.zeros(slots, dtype=torch.int64, device=DEVICE)
        for kind in kinds:
            params = SamplingParams(**KINDS[kind])
            sampler.init_slot(
                SlotInit(kind, kind, -1, params.to_device_params(), kind * 9, 2, (5, 6), params.num_logprobs)
            )
        rows = [(kind, 2, KINDS[kind].get("n", 1)) for kind in kinds]
        return sampler.collect(sampler.sample(given, rows, last)), last.tolist()

    undivided = Sampler(slots, vocab, DEVICE, ())
    undivided._kernels = TritonSampling(vocab, DEVICE)
    want = sampled(undivided, logits)

    def work(rank: Turns) -> Any:
        mine = own_of(logits, shard_vocab(rank.shard, vocab))
        return sampled(VocabParallelTritonSampler(slots, vocab, DEVICE, (), rank), mine)

    found, sent = on_ranks(2, work)
    assert found == [want] * 2
    more = any(kind > 2 for kind in kinds)
    assert sent == 4 * len(kinds) * 192 if more else sent <= 3 * 3856 + 8


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
    asked = Rows(logits, np.tile((0.8, 0.0, 5.0, 0.5), (rows, 1)), np.arange(rows))

    def work(rank: Turns) -> Tensor:
        fused = VocabParallelTritonSampling(vocab, DEVICE, rank) if ranks > 1 else TritonSampling(vocab, DEVICE)
        given = own_of(logits, shard_vocab(rank.shard, vocab)) if ranks > 1 else logits
        return asked.drawn(fused, "random", given)[0]

    for tokens in on_ranks(ranks, work)[0]:
        assert ((tokens >= 0) & (tokens < vocab)).all()
