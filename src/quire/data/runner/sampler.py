"""The sampler: from a step's logits to its next tokens, for all rows at once and without waiting for the device.

It knows slots and their sampling parameters, and the tokens that it drew itself; it doesn't know requests, stop rules
or memory. The parameters mean what they mean in vLLM; `Sampler.sample` states the order in which they act.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.batch import to_device
from quire.data.kernels.cpu.rows import take
from quire.data.runner.drawn import Asked, Drawn
from quire.data.runner.draws import MAX_VOCAB, draw, noise, token_weights
from quire.data.runner.fused import FusedSampling, Tail
from quire.data.runner.logprobs import Width, details_of, top_of, total_of
from quire.data.runner.masks import Masks
from quire.data.runner.native import NativeSampling
from quire.data.runner.penalties import TokenStatistics
from quire.data.runner.rules import Rules
from quire.vocabulary.params import MAX_LOGPROBS
from quire.vocabulary.plan import Birth, Row, Sampled, Sampling, Top
from quire.vocabulary.rows import Rows
from quire.vocabulary.seeds import branch_seed

TAILS = ("greedy", "random", "cut")
FAULTS = ("", "the model's logits are not finite (NaN or infinite)", "the request's masks leave no token to sample")


class Sampler:
    """Samples for `slots` slots over a vocabulary of `vocab_size`; `eos_ids` are masked while min_tokens isn't reached.

    What a row draws is a function of its own logits, parameters, tokens, seed and position: of nothing else in the
    batch, nor of the slot. The caller gives `birth` before the first row of a slot, in the order of the plan.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device, eos_ids: tuple[int, ...]) -> None:
        assert vocab_size <= MAX_VOCAB, f"a vocabulary of {vocab_size} tokens, at most {MAX_VOCAB} can be sampled"
        self.vocab_size, self.device, self.eos_ids = vocab_size, device, eos_ids
        self._fused: FusedSampling | NativeSampling | None = None
        if device.type == "cuda":
            self._fused = FusedSampling(vocab_size, device)
        elif take(device, torch.float32):
            self._fused = NativeSampling()
        self._pinned: list[Tensor] = []  # host memory for results, when none are on their way there
        self._rules: dict[int, Rules] = {}
        self._statistics = TokenStatistics(vocab_size, device)
        # Parameters and seeds live on the host: a step gathers its rows' and sends them in one small copy.
        self._prompt_len = np.zeros(slots, dtype=np.int64)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._tops = np.full(slots, -1, dtype=np.int64)  # alternatives of each sample; -1: no log-probabilities at all
        self._shape = np.zeros((slots, 4))  # temperature (0: greedy), min_p, top_k, top_p
        self._penalties = np.zeros((slots, 3))  # repetition, frequency, presence
        self._ruled = np.zeros(slots, dtype=np.bool_)  # logits change before they are drawn from, or a method chooses
        self._until = np.zeros(slots, dtype=np.int64)  # the position before which end tokens are masked
        self._tails = [-1] * slots  # of TAILS; -1: a draw from the logits isn't all there is
        self._waiting: set[int] = set()  # slots that have an `_until`
        self.masks = Masks(slots, vocab_size, device)
        self._one, self._none = np.ones(slots, dtype=np.int64), np.full(slots, -1, dtype=np.int64)  # of a graph's rows

    def rehearsals(self, dtypes: Iterable[torch.dtype], most: int) -> Iterator[Callable[[], None]]:
        """On a GPU: what to call, from any threads, so that kernels for up to `most` rows of logits of `dtypes` are
        compiled and loaded."""
        if isinstance(self._fused, FusedSampling):
            for dtype in dtypes:
                for rows in dict.fromkeys(min(rows, most) for rows in self._fused.kernels.REPRESENTATIVES):
                    yield partial(self._fused.rehearse, rows, dtype)

    def birth(self, birth: Birth) -> None:
        """A sequence takes a slot. Its tokens are `birth.history` or, if that is empty, those of the parent's slot.

        A parent that drew several branches at once has recorded the first one: the others need their history. What a
        child inherits is shared with the parent: nothing is sent to the device anew.
        """
        slot, parent = birth.slot, self._rules.get(birth.parent) if birth.parent >= 0 else None
        rules = parent
        if birth.sampling is not None:
            rules = Rules.of(birth.sampling, self.vocab_size, self.eos_ids, self.device)
        assert rules is not None, f"slot {slot} is born without sampling parameters"
        sampling = rules.sampling
        if not sampling.needs_history:
            self._statistics.drop(slot)
        elif birth.history or parent is None:
            assert birth.history, f"slot {slot} has penalties and is born without its history"
            self._statistics.birth(slot, birth.history, birth.prompt_len)
        else:
            self._statistics.fork(birth.parent, slot)
        self._rules[slot], self._prompt_len[slot], self._seeds[slot] = rules, birth.prompt_len, birth.seed % 2**63
        self._tops[slot] = len(sampling.logprob_token_ids) or birth.top if birth.top >= 0 else -1
        top_k = sampling.top_k if sampling.top_k < self.vocab_size else 0
        temperature = 0.0 if sampling.greedy else sampling.temperature
        self._shape[slot] = (temperature, sampling.min_p, top_k, sampling.top_p)
        self._penalties[slot] = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._ruled[slot] = rules.changes or sampling.chosen
        self._until[slot] = birth.prompt_len + sampling.min_tokens if len(rules.ends) else 0
        (self._waiting.add if self._until[slot] else self._waiting.discard)(slot)
        self._tails[slot] = -1
        if birth.top < 0 and not self._ruled[slot]:
            self._tails[slot] = 0 if temperature == 0 else 2 if top_k > 0 or sampling.top_p < 1 else 1

    def tails(self, last: Tensor, largest: int) -> dict[str, Tail]:
        """By kernels: what may follow the logits in a graph or on a tape of up to `largest` rows, by the names of
        `tail_of`. The result is for `from_graph`; tokens are written to `last` [slots] too."""
        assert self._fused is not None, "graphs sample by kernels"
        tails = self._fused.tails(last, largest)
        if isinstance(self._fused, NativeSampling):
            tails |= {f"masked {name}": self.masks.tail(tails[name], largest) for name in TAILS[1:]}
        return tails

    def tail_of(self, rows: Sequence[Row]) -> str:
        """The tail that samples `rows`: "greedy", "random", "cut", on a CPU the latter two "masked" too; or "" where
        that takes `sample`: for rows with several draws, log-probabilities, masks, biases, penalties, a method."""
        if self.masks.some and not isinstance(self._fused, NativeSampling):
            return ""
        rows = Rows.of(rows)
        all_of_them, slots, samples = self._tails, rows.slots, rows.samples
        tails = [all_of_them[slot] for slot in slots]
        if min(tails, default=0) < 0 or samples.count(1) < len(samples):
            return ""
        if self._waiting and any(end < self._until[slot] for slot, end in zip(slots, rows.ends)):
            return ""
        kind = max(tails, default=0)
        return f"masked {TAILS[max(kind, 1)]}" if self.masks.some else TAILS[kind]

    def fill(self, rows: Sequence[Row]) -> None:
        """Before the replay of a graph or tape whose tail is neither "greedy" nor "": give it what `rows` ask for, and
        their noise. A row's first draw has the seed of its own."""
        assert self._fused is not None, "graphs sample by kernels"
        rows = Rows.of(rows)
        slots, ends = np.array((rows.slots, rows.ends), dtype=np.int64)
        self._fused.fill(self._shape[slots], noise(self._seeds[slots], ends))
        if self.masks.some:
            self.masks.fill(slots)

    def from_graph(self, tokens: Tensor | np.ndarray, faults: Any, rows: Sequence[Row]) -> Drawn:
        """The samples of `rows` from what a tail left on the device, padding at the end. They are on their way to the
        host when this returns, so the tensors may be written again by later work."""
        count = len(rows)
        one, none = self._one[:count], self._none[:count]
        if isinstance(tokens, np.ndarray):  # of a CPU: NumPy's views and copies cost a tenth of torch's
            copied = np.concatenate((tokens[:count], faults[:count]))
            return Drawn(copied[:count], copied, None, None, one, none, None)
        host, ready = self._to_host(tokens[:count], faults[:count])
        return Drawn(tokens[:count], host, None, ready, one, none, None)

    def sample(self, logits: Tensor, rows: Sequence[tuple[int, int, int]], last: Tensor | None = None) -> Drawn:
        """Draw from logits [R, V]. A row is (slot, position, draws): `draws` >= 1 tokens for the index `position`.

        In this order: log-probabilities are taken from the unchanged logits; then the step's masks, allowed_token_ids,
        bad words (their earlier tokens are looked for in the prompt too), min_tokens, logit_bias; repetition, frequency
        and presence penalty; greedy rows take the most likely token, of equals the lowest id; the others temperature,
        min_p, top_k, top_p, and a draw. Tokens that are equally likely are kept or cut together by min_p, top_k and
        top_p. Draw i of a row uses the seed branch_seed(seed, i). A row with a fault gets token 0 and leaves the others
        as they were. The slot's Birth.top and logprob_token_ids say which log-probabilities come along. Those of a row
        whose request has a method are what the method chooses from, so they are of the masked, biased and penalised
        logits, normalised as the unchanged ones are (transformers' order); its token is the most likely one, whatever
        its temperature.
        With `last` [slots], the first draw of each row is written there too.
        """
        assert logits.shape == (len(rows), self.vocab_size), f"{tuple(logits.shape)} logits for {len(rows)} rows"
        asked = Asked.of(rows)
        if self.masks.some:  # at once, unless the unchanged logits are still wanted
            self.masks.apply(logits, np.where(self._tops[asked.slots] < 0, asked.slots, -1))
        if self._fused is not None:
            tokens, faults, changed = self._by_kernels(self._fused, logits, asked, rows, last)
        else:
            tokens, faults, changed = self._by_torch(logits.float(), asked, rows)
            if last is not None:
                last.index_copy_(0, to_device(asked.slots, self.device), self._take(tokens, asked.first))
        counted = [i for i, slot in enumerate(asked.slots.tolist()) if slot in self._statistics]
        if counted:
            slots = asked.slots[counted].tolist()
            self._statistics.record(slots, self._take(tokens, asked.first[counted]))
        return self._packed(logits, changed, tokens, faults, asked)

    def sampling(self, slot: int) -> Sampling:
        """What the slot was born with."""
        return self._rules[slot].sampling

    def process(self, logits: Tensor, rows: Sequence[tuple[int, int, int]]) -> Tensor:
        """Logits [R, V] after masks, biases and penalties: new ones, or `logits` itself if no row has any of these."""
        slots = [slot for slot, _, _ in rows]
        if not (self._ruled[slots] | (self._until[slots] > 0) | self.masks.of(slots)).any():
            return logits
        changed = logits
        if self.masks.of(slots).any():
            changed = changed.clone()
            self.masks.apply(changed, np.array(slots))
        allowed = [i for i, slot in enumerate(slots) if self._rules[slot].allowed is not None]
        if allowed:
            masks = torch.stack([mask for i in allowed if (mask := self._rules[slots[i]].allowed) is not None])
            index = to_device(np.array(allowed), self.device)
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
            index, some = to_device(punished, self.device), [slots[i] for i in punished]
            part = self._statistics.penalise(changed.index_select(0, index), some, self._penalties[some])
            changed = changed.index_copy(0, index, part)
        return changed

    def finish(self, drawn: Drawn) -> list[Sampled]:
        """The samples on the host, a row each and in order, once the device has drawn them: the step's one wait.

        Once for each step: what carried the results is used again.
        """
        if drawn.ready is not None:
            drawn.ready.synchronize()
        count, rows = len(drawn.tokens), len(drawn.draws)
        numbers = drawn.host[: count + rows].tolist()
        if drawn.ready is not None:
            self._pinned.append(drawn.host)
        tokens, faults = numbers[:count], numbers[count:]
        if count == rows and drawn.widths is None and not any(faults):
            return [Sampled(own) for own in zip(tokens)]
        widths = drawn.widths or (None,) * rows
        details = drawn.details_by_width()
        samples, start = [], 0
        for draws, top, width, fault in zip(drawn.draws.tolist(), drawn.tops.tolist(), widths, faults):
            own = tuple(tokens[start : start + draws])
            start += draws
            tops: tuple[Top, ...] = ()
            if width is not None:
                tops = tuple(top_of(token, next(details[width]), top, width.named) for token in own)
            samples.append(Sampled(own, () if fault else tops, error=FAULTS[fault]))
        return samples

    def _more(self, asked: Asked) -> np.ndarray:
        """Which rows [R] ask for more than draws: for log-probabilities, masks, biases, penalties or a method."""
        tails = np.array([self._tails[slot] for slot in asked.slots.tolist()])
        return self.masks.of(asked.slots) | (tails < 0) | (asked.positions < self._until[asked.slots])

    def _take(self, tensor: Tensor, index: np.ndarray) -> Tensor:
        return tensor.index_select(0, to_device(index, self.device))

    def _chance(self, asked: Asked) -> np.ndarray:
        """The noise of each draw."""
        branch = (np.arange(len(asked.owner)) - asked.first[asked.owner]).astype(np.uint64)
        seeds = branch_seed(self._seeds[asked.slots][asked.owner], branch)
        return noise(seeds, asked.positions[asked.owner])

    def _by_torch(
        self, raw: Tensor, asked: Asked, rows: Sequence[tuple[int, int, int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [D], faults [R], and logits [R, V] after masks, biases and penalties."""
        processed = self.process(raw, rows)
        best, tokens = processed.max(-1)
        peak = best if processed is raw else raw.amax(-1)
        fault = torch.where(peak.isfinite(), 2 * (best == -torch.inf).long(), 1)
        tokens, failed = self._take(tokens, asked.owner), self._take(fault, asked.owner)
        shape = self._shape[asked.slots]
        random = shape[:, 0] > 0
        if random.any():
            drawn = self._draw(processed, best, shape, asked.owner, random, self._chance(asked))
            places = np.flatnonzero(random[asked.owner])
            tokens = tokens.index_copy(0, to_device(places, self.device), drawn)
        return torch.where(failed == 0, tokens, 0), fault, processed

    def _by_kernels(
        self,
        fused: FusedSampling | NativeSampling,
        logits: Tensor,
        asked: Asked,
        rows: Sequence[tuple[int, int, int]],
        last: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `_by_torch`, but only the logits that are `_ruled`, row after row, or None. Those rows are drawn again."""
        ruled, owner = self._ruled_rows(asked), asked.owner
        shape = self._shape[asked.slots]
        chance = self._chance(asked) if (shape[:, 0] > 0).any() else np.zeros(len(owner))
        first = np.where(ruled[:, None], (0, 0, 0, 1), shape)  # tells the faults of those that are ruled
        tokens, faults = fused.draw(logits, first, owner, chance, asked.slots, last)
        some = np.flatnonzero(ruled)
        if not len(some):
            return tokens, faults, None
        places, index = np.flatnonzero(ruled[owner]), to_device(some, self.device)
        changed = self.process(logits.index_select(0, index).float(), [rows[i] for i in some])
        renumbered = (np.cumsum(ruled) - 1)[owner[places]]
        drawn, empty = fused.draw(changed, shape[some], renumbered, chance[places])
        fault = torch.where(faults.index_select(0, index) != 0, 1, 2 * empty)
        drawn = torch.where(self._take(fault, renumbered) == 0, drawn, 0)
        faults.index_copy_(0, index, fault)
        tokens.index_copy_(0, to_device(places, self.device), drawn)
        if last is not None:
            slots = to_device(asked.slots[some], self.device)
            last.index_copy_(0, slots, self._take(tokens, asked.first[some]))
        return tokens, faults, changed

    def _ruled_rows(self, asked: Asked) -> np.ndarray:
        kept = self.masks.of(asked.slots) & (self._tops[asked.slots] >= 0)
        return self._ruled[asked.slots] | (asked.positions < self._until[asked.slots]) | kept

    def _draw(
        self, logits: Tensor, best: Tensor, shape: np.ndarray, owner: np.ndarray, random: np.ndarray, chance: np.ndarray
    ) -> Tensor:
        """The tokens of those draws whose row is `random` [R]; owner and chance [D] are given for all draws."""
        if random.all():
            return draw(token_weights(logits, best, shape), owner, chance)
        rows, places = np.flatnonzero(random), np.flatnonzero(random[owner])
        weights = token_weights(self._take(logits, rows), self._take(best, rows), shape[rows])
        return draw(weights, (np.cumsum(random) - 1)[owner[places]], chance[places])

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
            if len(rules.ends) and position - self._prompt_len[slot] < rules.sampling.min_tokens:
                ids.append(rules.ends + offset)
                numbers.append(np.full(len(rules.ends), -np.inf, dtype=np.float32))
            if len(rules.lasts):
                barred.append(slot)
                completing.append(rules.lasts + offset)
        if not ids and not barred:
            return None, None
        cells = to_device(np.concatenate(ids + completing), self.device)
        shifts = to_device(np.concatenate([*numbers, np.zeros(0, dtype=np.float32)]), self.device)
        if barred:
            said = self._statistics.ends_with(barred, [self._rules[slot].openings for slot in barred])
            shifts = torch.cat((shifts, torch.where(said, -torch.inf, 0.0)))
        return cells, shifts

    def _width(self, slot: int) -> Width | None:
        """How wide the details of a slot's row are; up to MAX_LOGPROBS all are alike, and come at once."""
        top = int(self._tops[slot])
        if top < 0:
            return None
        sampling = self._rules[slot].sampling
        if sampling.logprob_token_ids:
            return Width.of_named(sampling.logprob_token_ids)
        return Width(sampling.chosen, min(max(top, MAX_LOGPROBS), self.vocab_size) if top else 0)

    def _named(self, slots: np.ndarray, width: int) -> Tensor:
        """The tokens that the requests of `slots` name, [N, width]; what is left of a row is padding."""
        ids = np.zeros((len(slots), width), dtype=np.int64)
        for row, slot in zip(ids, slots.tolist()):
            wanted = self._rules[slot].sampling.logprob_token_ids
            row[: len(wanted)] = wanted
        return to_device(ids, self.device)

    def _packed(self, logits: Tensor, changed: Tensor | None, tokens: Tensor, faults: Tensor, asked: Asked) -> Drawn:
        """Everything that the host will want, on its way there. `changed` are the logits of all rows or, by kernels,
        of those that are ruled."""
        tops, widths, details = self._tops[asked.slots], None, None
        if (tops >= 0).any():
            widths = tuple(self._width(slot) for slot in asked.slots.tolist())
            place = np.cumsum(self._ruled_rows(asked)) - 1 if self._fused else np.arange(len(tops))
            parts = []
            for width in sorted({width for width in widths if width is not None}):
                places = np.array([i for i, row in enumerate(asked.owner) if widths[row] == width], dtype=np.int64)
                rows, total, named = asked.owner[places], None, None
                own, some = self._take(tokens, places), self._take(logits, rows).float()
                if width.candidates:
                    assert changed is not None, "what a method chooses from is processed"
                    total, some = total_of(some), self._take(changed, place[rows])
                if width.named:
                    named = self._named(asked.slots[rows], width.alternatives)
                parts.append(details_of(some, own, width.alternatives, total, named).flatten())
            details = torch.cat(parts)
            if self.device.type == "cuda":
                details = torch.empty(details.shape, dtype=details.dtype, pin_memory=True).copy_(
                    details, non_blocking=True
                )
        host, ready = self._to_host(tokens, faults)
        return Drawn(tokens, host, details, ready, asked.draws, tops, widths)

    def _to_host(self, tokens: Tensor, faults: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Both, one after the other, in host memory that `finish` takes back; and when they will be there."""
        count, rows = len(tokens), len(faults)
        if self.device.type == "cpu":
            return torch.cat((tokens, faults)), None
        host = self._pinned.pop() if self._pinned else None
        if host is None or len(host) < count + rows:
            host = torch.empty(max(2048, 2 * (count + rows)), dtype=torch.int64, pin_memory=True)
        together = tokens.untyped_storage().data_ptr() == faults.untyped_storage().data_ptr()
        if together and tokens.data_ptr() + tokens.nbytes == faults.data_ptr():
            host[: count + rows].copy_(tokens.as_strided((count + rows,), (1,)), non_blocking=True)
        else:
            host[:count].copy_(tokens, non_blocking=True)
            host[count : count + rows].copy_(faults, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return host, ready
