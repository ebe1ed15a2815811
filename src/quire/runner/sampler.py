"""The sampler: from a step's logits to its next tokens, for all rows at once and without waiting for the device.

It knows slots and their sampling parameters, and the tokens that it drew itself; it doesn't know requests, stop rules
or memory. The parameters mean what they mean in vLLM; `Sampler.sample` states the order in which they act.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.decoding import branch_seed, split_mix
from quire.plan import Birth, Sampled, Top
from quire.request import MAX_LOGPROBS, SamplingParams
from quire.runner.penalties import Phrases, TokenStatistics, upload

SCALE = 2.0**32
"""The weight of the most likely token. Weights are integers, and at most MAX_VOCAB of them: sums below 2**53."""

MAX_VOCAB = 2**20
BLOCK = 128  # tokens whose weights are summed before the search for the drawn one
CANDIDATES = 1024  # tokens that top_p looks at before it sorts a whole row (on the CPU)
FAULTS = ("", "the model's logits are not finite (NaN or infinite)", "the request's masks leave no token to sample")


class Width(NamedTuple):
    """Rows whose log-probabilities are looked up together: by `candidates` for a method to choose from, after masks and
    biases, or as the model has them; and by the number of alternatives, which is nobody else's concern."""

    candidates: bool
    alternatives: int


class Drawn(NamedTuple):
    """A step's samples. `tokens` [sum of draws] int64, on the device, row by row; the rest is for `Sampler.finish`."""

    tokens: Tensor
    host: Tensor  # float64: tokens, a fault for each row, then the details of each width in rising order, draw by draw
    ready: torch.cuda.Event | None
    rows: tuple[tuple[int, int, Width | None], ...]  # of each row: draws, Birth.top, and how wide its details are


@dataclass(frozen=True, slots=True)
class Rules:
    """What a slot's parameters do to logits, token by token. Derived from `params` alone, so forks share it."""

    params: SamplingParams
    biased: np.ndarray  # token ids, and what is added to their logits: logit_bias, and -inf for one-token bad words
    biases: np.ndarray
    ends: np.ndarray  # token ids masked below min_tokens
    allowed: Tensor | None  # [vocab] bool, on the device
    candidates: bool  # a method chooses: no token is drawn
    openings: Phrases  # of bad words of several tokens, and the token that would complete each
    lasts: np.ndarray

    @property
    def greedy(self) -> bool:
        """No noise is needed."""
        return self.candidates or self.params.greedy

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int, eos_ids: tuple[int, ...], device: torch.device) -> Rules:
        bias = dict(params.logit_bias or {})
        words = [word for word in params.bad_word_ids if word and max(word) < vocab_size]
        bias.update((word[0], -np.inf) for word in words if len(word) == 1)
        longer = [word for word in words if len(word) > 1]
        ends = {*eos_ids, *(params.stop_token_ids or ())} if params.min_tokens else set()
        allowed = None
        if params.allowed_token_ids is not None:
            mask = np.zeros(vocab_size, dtype=np.bool_)
            mask[list(params.allowed_token_ids)] = True
            allowed = upload(mask, device)
        return cls(
            params,
            np.array(list(bias), dtype=np.int64),
            np.array(list(bias.values()), dtype=np.float32),
            np.array(sorted(ends), dtype=np.int64),
            allowed,
            params.beam_width is not None or params.method is not None,
            Phrases.of([word[:-1] for word in longer]),
            np.array([word[-1] for word in longer], dtype=np.int64),
        )


class Sampler:
    """Samples for `slots` slots over a vocabulary of `vocab_size`; `eos_ids` are masked while min_tokens isn't reached.

    What a row draws is a function of its own logits, parameters, tokens, seed and position: of nothing else in the
    batch, nor of the slot. The caller gives `birth` before the first row of a slot, in the order of the plan.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device, eos_ids: tuple[int, ...]) -> None:
        assert vocab_size <= MAX_VOCAB, f"a vocabulary of {vocab_size} tokens, at most {MAX_VOCAB} can be sampled"
        self.vocab_size, self.device, self.eos_ids = vocab_size, device, eos_ids
        self._rules: dict[int, Rules] = {}
        self._statistics = TokenStatistics(vocab_size, device)
        # Parameters and seeds live on the host: a step gathers its rows' and sends them in one small copy.
        self._prompt_len = np.zeros(slots, dtype=np.int64)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._tops = np.full(slots, -1, dtype=np.int64)
        self._shape = np.zeros((slots, 4))  # temperature, min_p, top_k, top_p
        self._penalties = np.zeros((slots, 3))  # repetition, frequency, presence

    def birth(self, birth: Birth) -> None:
        """A sequence takes a slot. Its tokens are `birth.history` or, if that is empty, those of the parent's slot.

        A parent that drew several branches at once has recorded the first one: the others need their history.
        """
        slot, parent = birth.slot, self._rules.get(birth.parent) if birth.parent >= 0 else None
        params = birth.params or (parent.params if parent else None)
        assert params is not None, f"slot {slot} is born without sampling parameters"
        rules = parent if parent and parent.params is params else None
        rules = rules or Rules.of(params, self.vocab_size, self.eos_ids, self.device)
        if not params.needs_history:
            self._statistics.drop(slot)
        elif birth.history or parent is None:
            assert birth.history, f"slot {slot} has penalties and is born without its history"
            self._statistics.birth(slot, birth.history, birth.prompt_len)
        else:
            self._statistics.fork(birth.parent, slot)
        self._rules[slot], self._prompt_len[slot], self._seeds[slot] = rules, birth.prompt_len, birth.seed % 2**63
        self._tops[slot] = birth.top
        top_k = params.top_k if params.top_k < self.vocab_size else 0
        self._shape[slot] = (params.temperature, params.min_p, top_k, params.top_p)
        self._penalties[slot] = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)

    def sample(self, logits: Tensor, rows: Sequence[tuple[int, int, int]]) -> Drawn:
        """Draw from logits [R, V]. A row is (slot, position, draws): `draws` >= 1 tokens for the index `position`.

        In this order: log-probabilities are taken from the unchanged logits; then allowed_token_ids, bad words (their
        earlier tokens are looked for in the prompt too), min_tokens, logit_bias; repetition, frequency and presence
        penalty; greedy rows take the most likely token, of equals the lowest id; the others temperature, min_p, top_k,
        top_p, and a draw. Tokens that are equally likely are kept or cut together by min_p, top_k and top_p. Draw i of
        a row uses the seed branch_seed(seed, i). A row with a fault gets token 0 and leaves the others as they were.
        The slot's Birth.top says which log-probabilities come along. Those of a row whose request has a method are what
        the method chooses from, so they are of the masked, biased and penalised logits, normalised as the unchanged
        ones are (transformers' order); its token is the most likely one, whatever its temperature.
        """
        assert logits.shape == (len(rows), self.vocab_size), f"{tuple(logits.shape)} logits for {len(rows)} rows"
        slots = [slot for slot, _, _ in rows]
        draws = np.array([count for _, _, count in rows], dtype=np.int64)
        owner = np.repeat(np.arange(len(rows)), draws)  # the row of each draw
        first = np.cumsum(draws) - draws
        raw = logits.float()
        processed = self.process(raw, rows)
        best, tokens = processed.max(-1)
        peak = best if processed is raw else raw.amax(-1)
        fault = torch.where(peak.isfinite(), 2 * (best == -torch.inf).long(), 1)
        tokens, failed = self._take(tokens, owner), self._take(fault, owner)
        random = np.array([not self._rules[slot].greedy for slot in slots], dtype=np.bool_)
        if random.any():
            positions = np.array([position for _, position, _ in rows], dtype=np.int64)
            branch = (np.arange(len(owner)) - first[owner]).astype(np.uint64)
            seeds = branch_seed(self._seeds[slots][owner], branch)
            chance = noise(seeds, positions[owner])
            drawn = self._draw(processed, best, self._shape[slots], owner, random, chance)
            places = np.flatnonzero(random[owner])
            tokens = tokens.index_copy(0, upload(places, self.device), drawn)
        tokens = torch.where(failed == 0, tokens, 0)
        counted = [i for i, slot in enumerate(slots) if slot in self._statistics]
        if counted:
            self._statistics.record([slots[i] for i in counted], self._take(tokens, first[counted]))
        return self._packed(raw, processed, tokens, fault, slots, draws, owner)

    def params(self, slot: int) -> SamplingParams:
        """The parameters that the slot was born with."""
        return self._rules[slot].params

    def process(self, logits: Tensor, rows: Sequence[tuple[int, int, int]]) -> Tensor:
        """Logits [R, V] after masks, biases and penalties: new ones, or `logits` itself if no row has any of these."""
        slots = [slot for slot, _, _ in rows]
        changed = logits
        allowed = [i for i, slot in enumerate(slots) if self._rules[slot].allowed is not None]
        if allowed:
            masks = torch.stack([mask for i in allowed if (mask := self._rules[slots[i]].allowed) is not None])
            index = upload(np.array(allowed), self.device)
            kept = torch.where(masks, changed.index_select(0, index), -torch.inf)
            changed = changed.index_copy(0, index, kept)
        cells, shifts = self._shifts(rows)
        if cells is not None:
            changed = changed.clone() if changed is logits else changed
            changed.view(-1).scatter_add_(0, cells, shifts)
        punished = np.flatnonzero((self._penalties[slots] != (1, 0, 0)).any(1))
        if len(punished) == len(rows) and rows:
            return self._statistics.penalise(changed, slots, self._penalties[slots])
        if len(punished):
            index, some = upload(punished, self.device), [slots[i] for i in punished]
            part = self._statistics.penalise(changed.index_select(0, index), some, self._penalties[some])
            changed = changed.index_copy(0, index, part)
        return changed

    def finish(self, drawn: Drawn) -> list[Sampled]:
        """The samples on the host, a row each and in order, once the device has drawn them: the step's one wait."""
        if drawn.ready is not None:
            drawn.ready.synchronize()
        numbers = drawn.host.numpy()
        count = len(drawn.tokens)
        tokens = numbers[:count].astype(np.int64).tolist()
        faults = numbers[count : count + len(drawn.rows)].astype(np.int64).tolist()
        details, end = {}, count + len(drawn.rows)
        for width in sorted({width for _, _, width in drawn.rows if width is not None}):
            columns = 2 + 2 * width.alternatives
            begin, end = end, end + columns * sum(draws for draws, _, other in drawn.rows if other == width)
            details[width] = iter(numbers[begin:end].reshape(-1, columns).tolist())
        samples, start = [], 0
        for (draws, top, width), fault in zip(drawn.rows, faults):
            own = tuple(tokens[start : start + draws])
            start += draws
            tops: tuple[Top, ...] = ()
            if width is not None:
                tops = tuple(top_of(token, next(details[width]), top) for token in own)
            samples.append(Sampled(own, () if fault else tops, error=FAULTS[fault]))
        return samples

    def score(self, logits: Tensor, targets: Tensor, k: int) -> list[Top]:
        """Log-probability, rank and `k` alternatives of targets [N] under logits [N, V]. Waits for the device."""
        details = details_of(logits.float(), targets, MAX_LOGPROBS if k else 0).tolist()
        return [top_of(token, numbers, k) for token, numbers in zip(targets.tolist(), details)]

    def _take(self, tensor: Tensor, index: np.ndarray) -> Tensor:
        return tensor.index_select(0, upload(index, self.device))

    def _shifts(self, rows: Sequence[tuple[int, int, int]]) -> tuple[Tensor | None, Tensor | None]:
        """What is added to single logits, as flat indices into [R, V] and numbers; -inf bans. None if nothing is."""
        ids: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        barred: list[int] = []  # slots with bad words of several tokens
        completing: list[np.ndarray] = []
        for i, (slot, position, _) in enumerate(rows):
            rules, offset = self._rules[slot], i * self.vocab_size
            if len(rules.biased):
                ids.append(rules.biased + offset)
                numbers.append(rules.biases)
            if len(rules.ends) and position - self._prompt_len[slot] < rules.params.min_tokens:
                ids.append(rules.ends + offset)
                numbers.append(np.full(len(rules.ends), -np.inf, dtype=np.float32))
            if len(rules.lasts):
                barred.append(slot)
                completing.append(rules.lasts + offset)
        if not ids and not barred:
            return None, None
        cells = upload(np.concatenate(ids + completing), self.device)
        shifts = upload(np.concatenate([*numbers, np.zeros(0, dtype=np.float32)]), self.device)
        if barred:
            said = self._statistics.ends_with(barred, [self._rules[slot].openings for slot in barred])
            shifts = torch.cat((shifts, torch.where(said, -torch.inf, 0.0)))
        return cells, shifts

    def _draw(
        self, logits: Tensor, best: Tensor, shape: np.ndarray, owner: np.ndarray, random: np.ndarray, chance: np.ndarray
    ) -> Tensor:
        """The tokens of those draws whose row is `random` [R]; owner and chance [D] are given for all draws."""
        if random.all():
            return draw(token_weights(logits, best, shape), owner, chance)
        rows, places = np.flatnonzero(random), np.flatnonzero(random[owner])
        weights = token_weights(self._take(logits, rows), self._take(best, rows), shape[rows])
        return draw(weights, (np.cumsum(random) - 1)[owner[places]], chance[places])

    def _width(self, slot: int) -> Width | None:
        """How wide the details of a slot's row are; up to MAX_LOGPROBS all are alike, and come at once."""
        top = int(self._tops[slot])
        if top < 0:
            return None
        return Width(self._rules[slot].candidates, min(max(top, MAX_LOGPROBS), self.vocab_size) if top else 0)

    def _packed(
        self,
        raw: Tensor,
        processed: Tensor,
        tokens: Tensor,
        fault: Tensor,
        slots: list[int],
        draws: np.ndarray,
        owner: np.ndarray,
    ) -> Drawn:
        """Everything that the host will want in one tensor, and its copy to the host under way."""
        widths = [self._width(slot) for slot in slots]
        parts = [tokens.double(), fault.double()]
        for width in sorted({width for width in widths if width is not None}):
            places = np.array([i for i, row in enumerate(owner) if widths[row] == width], dtype=np.int64)
            own, logits, total = self._take(tokens, places), self._take(raw, owner[places]), None
            if width.candidates:
                total, logits = logits.logsumexp(-1, keepdim=True), self._take(processed, owner[places])
            parts.append(details_of(logits, own, width.alternatives, total).flatten())
        host, ready = torch.cat(parts), None
        if self.device.type == "cuda":
            host = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return Drawn(tokens, host, ready, tuple(zip(draws.tolist(), self._tops[slots].tolist(), widths)))


def noise(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform float64 numbers in [0, 1), one for each (seed, position), by SplitMix64, twice."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    streams = split_mix(seeds.astype(np.uint64) + golden)
    bits = split_mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * golden)
    return (bits >> np.uint64(11)) * 2.0**-53


def token_weights(logits: Tensor, best: Tensor, shape: np.ndarray) -> Tensor:
    """Integers [R, V], in float32, in proportion to the tokens' probabilities; tokens that are cut have zero.

    `best` [R] is the greatest logit; shape [R, 4] temperature, min_p, top_k (0: off), top_p. The best token weighs
    2**32. Sums of the weights in float64 are exact, so no order of summation can change what is drawn.
    """
    likelihood = logits - best[:, None]  # of each token beside the best one's: 1 or less, once exp is taken
    if (shape[:, 0] != 1).any():
        likelihood.div_(_column(shape[:, 0], likelihood))
    likelihood.exp_()
    cut = np.flatnonzero((shape[:, 1:] != (0, 0, 1)).any(1))
    if len(cut) == len(shape):
        _truncate(likelihood, shape)
    elif len(cut):
        index = upload(cut, logits.device)
        part = _truncate(likelihood.index_select(0, index), shape[cut])
        likelihood.index_copy_(0, index, part)
    return likelihood.mul_(SCALE).floor_()


def _truncate(likelihood: Tensor, shape: np.ndarray) -> Tensor:
    """Zero, in place, what min_p, then top_k, then top_p cut from likelihoods [R, V]."""
    vocab, on_cpu = likelihood.shape[1], likelihood.device.type == "cpu"
    min_p, top_k, top_p = shape[:, 1], shape[:, 2].astype(np.int64), shape[:, 3]
    if (min_p > 0).any():
        likelihood.mul_(likelihood >= _column(min_p, likelihood))
    unbounded = ((top_k == 0) & (top_p < 1)).any()
    width = max(top_k.max(), (CANDIDATES if on_cpu else vocab) if unbounded else 0)
    if width == 0:
        return likelihood
    border, settled = _border(likelihood, top_k, top_p, min(int(width), vocab))
    if on_cpu and not settled.all():  # elsewhere to ask would be to wait, and all the tokens have been sorted
        rows = (~settled).nonzero()[:, 0]
        border[rows] = _border(likelihood[rows], top_k[rows.numpy()], top_p[rows.numpy()], vocab)[0]
    return likelihood.mul_(likelihood >= border[:, None])


def _border(likelihood: Tensor, top_k: np.ndarray, top_p: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
    """The least likelihood [R] that top_k and then top_p keep, and whether the `width` best tokens told it [R].

    It is that of the first token, in falling order and among the first k, with which the sum reaches top_p of the sum
    of the first k. The values of the best tokens don't depend on `width`, so neither does the answer, once settled.
    """
    device = likelihood.device
    values = _likeliest(likelihood, width)
    among = torch.arange(width, device=device) < upload(np.where(top_k > 0, top_k, width), device)[:, None]
    sums = ((values * SCALE).floor_() * among).cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    unbounded = (top_k == 0) & (top_p < 1)
    if unbounded.any():
        everything = (likelihood * SCALE).floor_().sum(-1, dtype=torch.float64)
        total = torch.where(upload(unbounded, device), everything, total)
    goal = total * upload(top_p.copy(), device)
    place = (sums < goal[:, None]).sum(-1, keepdim=True).clamp_(max=width - 1)
    border = values.gather(1, place)[:, 0]
    off = (top_k == 0) & (top_p == 1)
    if off.any():
        border = torch.where(upload(off, device), 0.0, border)
    return border, sums[:, -1] >= goal


def _likeliest(likelihood: Tensor, width: int) -> Tensor:
    """The `width` greatest numbers of each row, in falling order."""
    vocab = likelihood.shape[1]
    if likelihood.device.type != "cpu":
        return likelihood.topk(width).values if width < vocab else likelihood.sort(-1, descending=True).values
    numbers = likelihood.numpy()  # NumPy's vectorised sort and selection take a tenth of the time of torch's
    if width < vocab:
        numbers = np.partition(numbers, vocab - width, axis=-1)[:, vocab - width :]
    return torch.from_numpy(np.sort(numbers, axis=-1)[:, ::-1].copy())


def draw(weights: Tensor, owner: np.ndarray, chance: np.ndarray) -> Tensor:
    """One token for each draw [D]: the first, by id, at which the sum of its row's weights exceeds chance x total.

    weights [R, V] are integers in float32; owner [D] is the row of each draw, chance [D] in [0, 1). The sum over blocks
    finds the block, the sum within it the token. A token of zero weight can't be drawn, whatever the chance.
    """
    rows, vocab = weights.shape
    if vocab % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocab % BLOCK))
    blocks = weights.view(rows, -1, BLOCK)
    parts = blocks.sum(-1, dtype=torch.float64)
    sums = parts.cumsum(-1)
    index = upload(owner, weights.device)
    if len(owner) > rows:
        parts, sums = parts.index_select(0, index), sums.index_select(0, index)
    # chance <= 1 - 2**-53, so that the rounded product is below the total; floor keeps it an integer
    goal = (sums[:, -1:] * upload(chance, weights.device)[:, None]).floor_()
    block = torch.searchsorted(sums, goal, right=True).clamp_(max=sums.shape[1] - 1)
    goal -= sums.gather(1, block) - parts.gather(1, block)
    inside = blocks[index, block[:, 0]].cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(inside, goal, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + place)[:, 0]


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return upload(values.astype(np.float32), like.device)[:, None]


def details_of(logits: Tensor, tokens: Tensor, width: int, total: Tensor | None = None) -> Tensor:
    """[N, 2 + 2 width] float64: log-probability and rank of tokens [N], the `width` likeliest ids, and theirs.

    Equals come in the order of their ids. `total` [N, 1] normalises in place of the logits' own sum.
    """
    logprobs = logits.log_softmax(-1) if total is None else logits - total
    own = logprobs.gather(1, tokens[:, None])
    rank = 1 + (logits > logits.gather(1, tokens[:, None])).sum(-1, keepdim=True)
    parts = [own, rank]
    if width:
        ids = logprobs.topk(min(width, logits.shape[1])).indices.sort(-1).values
        values, order = logprobs.gather(1, ids).sort(stable=True, dim=-1, descending=True)
        parts += [ids.gather(1, order), values]
    return torch.cat([part.double() for part in parts], 1)


def top_of(token: int, details: list[float], k: int) -> Top:
    """`Top` from one row of `details_of`, its alternatives cut to `k` and to those that masks left possible."""
    most = (len(details) - 2) // 2
    logprobs = details[2 + most :][:k]
    while logprobs and logprobs[-1] == -math.inf:
        del logprobs[-1]
    ids = details[2 : 2 + len(logprobs)]
    return Top(token, details[0], int(details[1]), tuple(map(int, ids)), tuple(logprobs))
