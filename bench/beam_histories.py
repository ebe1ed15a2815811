"""Beam histories: the parents of beams in real searches, recorded from the bundled model, and their replay.

Sharing in beam search depends on the parent of each beam (PagedAttention Figures 9 and 15), which depends on the logits
of a model. A simulation has no logits, so the parents of real searches are replayed: BeamReplay returns candidates with
which the engine's own search chooses the recorded parents. Tokens and scores have no other meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import StartupError
from quire.protocol.sampling_params import MAX_BEAM_WIDTH, MAX_N
from quire.protocol.seeds import splitmix64
from quire.protocol.step_plan import SeqSlice, SliceResult, SlotInit, TopLogprobs

RECORDED_BEAMS = Path(__file__).parent / "recorded" / "beams.json"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
FIRST_TOKEN = 7  # the first that is sampled
SCORE_STEP = 2.0**-7  # between the scores of adjacent beams; sums are exact in any order

BeamParents = tuple[int, ...]
"""One step: for each beam of the next step, best first, its parent beam."""
BeamHistory = tuple[BeamParents, ...]
"""The steps of one search. In the first one the parent of all beams is beam 0, the prompt."""


def pack_history(history: Sequence[Sequence[int]]) -> str:
    """Return a history as text: a word a step, a digit a beam (base 36). "." is a step in which the parent of each beam
    has its index."""
    words = []
    for parents in history:
        is_identity = list(parents) == list(range(len(parents)))
        words.append("." if is_identity else "".join(DIGITS[parent] for parent in parents))
    return " ".join(words)


def unpack_history(text: str, width: int) -> BeamHistory:
    """Return a packed history. Raise ValueError if it is not one of a search of `width` beams."""
    identity = tuple(range(width))
    history = tuple(identity if word == "." else tuple(int(digit, 36) for digit in word) for word in text.split())
    if not history or any(history[0]):
        raise ValueError("a history must begin with beams that all go on from beam 0")
    if any(len(parents) != width or max(parents) >= width for parents in history):
        raise ValueError(f"a step of a search of {width} beams must have {width} digits below {width}")
    return history


def load_histories(workload: str, path: Path = RECORDED_BEAMS) -> dict[int, tuple[BeamHistory, ...]]:
    """Return the histories recorded with prompts of a workload, by beam width. Raise StartupError if there are none."""
    try:
        results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]
        histories = {
            int(result["beam_width"]): tuple(
                unpack_history(text, int(result["beam_width"])) for text in result["histories"]
            )
            for result in results
            if result["workload"] == workload
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(
            f"the beam histories in {path.name} can't be used: {error}", "`quire bench histories --out FILE` makes them"
        ) from error
    if not histories:
        raise StartupError(f"no beam histories were recorded for {workload[:60]!r}", "Choose alpaca or sharegpt")
    return histories


class BeamReplay:
    """A quire.sim.runner.DrawFunction. A request replays the history whose index is its seed modulo the number of
    histories of its beam width; after its end it continues in the second half of another one (`parents`). A beam is
    identified by its last token: FIRST_TOKEN and the next ones, without `avoid`, are the beams of a step, best first.

    Requests without beams get the same tokens as without a BeamReplay.
    """

    def __init__(self, histories: Mapping[int, Sequence[BeamHistory]], avoid: frozenset[int] = frozenset()) -> None:
        assert all(histories.values()), "a beam width without a history"
        self.histories = histories
        count = max(MAX_N, MAX_BEAM_WIDTH) + len(avoid)
        self.tokens = tuple(token for token in range(FIRST_TOKEN, FIRST_TOKEN + count) if token not in avoid)
        self.beam_of_token = {token: beam for beam, token in enumerate(self.tokens)}
        self._cache: dict[tuple[int, BeamParents], SliceResult] = {}  # by beam and parents

    def __call__(self, row: SeqSlice, birth: SlotInit) -> SliceResult:
        """Return the candidates of a beam: the tokens of its children."""
        assert birth.sampling is not None, "a sequence has no sampling parameters"
        if not birth.sampling.candidates_only:
            return SliceResult(self.tokens[: row.num_samples])
        width = birth.num_logprobs  # with ignore_eos, the number of candidates is that of beams
        step = row.start + len(row.tokens) - birth.prompt_len
        beam = self.beam_of_token[row.tokens[-1]] if step else 0
        parents = self.parents(birth.seed, width, step)
        result = self._cache.get((beam, parents))
        if result is None:
            result = self._cache[beam, parents] = self._candidates(beam, parents)
        return result

    def parents(self, seed: int, width: int, step: int) -> BeamParents:
        """Return the parents of a request of this seed after `step` outputs. After the end of its history it continues
        in the second half of another one, at a step derived from the seed: beams soon after the prompt are more alike
        than later ones."""
        if width not in self.histories:
            known = ", ".join(map(str, sorted(self.histories)))
            raise StartupError(f"no histories of {width} beams were recorded", f"Choose a beam width of {known}")
        histories = self.histories[width]
        history, turn = histories[seed % len(histories)], 0
        while step >= len(history):
            step -= len(history)
            turn += 1
            word = splitmix64(seed + turn)
            history = histories[word % len(histories)]
            half = len(history) // 2
            step += half + (word >> 32) % (len(history) - half)
        return history[step]

    def _candidates(self, beam: int, parents: BeamParents) -> SliceResult:
        """Return the candidates of a beam. The sum of log-probabilities of beam j decreases by 1 a step and by j times
        SCORE_STEP, so the next step's beams are the best ones, in their order, for any parents."""
        children = [j for j, parent in enumerate(parents) if parent == beam]
        ids = tuple(self.tokens[j] for j in children)
        logprobs = tuple(-1.0 - (j - beam) * SCORE_STEP for j in children)
        token, logprob = (ids[0], logprobs[0]) if ids else (self.tokens[0], -1.0)
        return SliceResult((token,), (TopLogprobs(token, logprob, 1, ids, logprobs),))
