"""Beam histories: how the beams of real searches parted, recorded from the bundled model, and their replay.

What beam search shares depends on which beam each next beam goes on from (PagedAttention Figures 9 and 15), and that on
the logits of a model. A simulation has none, so the parents of real searches are replayed: the candidates that
`BeamReplay` draws are such that the engine's own search chooses the recorded parents. Tokens and scores mean nothing
else.
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
FIRST_TOKEN = 7  # the first that is drawn
SCORE_STEP = 2.0**-7  # between the scores of neighbouring beams: sums of its multiples are exact, in any order

BeamParents = tuple[int, ...]
"""One step: for each beam of the next step, best first, the beam that it goes on from."""
BeamHistory = tuple[BeamParents, ...]
"""The steps of one search. In the first one all beams go on from beam 0, the prompt."""


def pack_history(history: Sequence[Sequence[int]]) -> str:
    """A history as text: a word a step, a digit a beam (base 36); "." is a step in which each goes on from itself."""
    words = []
    for parents in history:
        itself = list(parents) == list(range(len(parents)))
        words.append("." if itself else "".join("0123456789abcdefghijklmnopqrstuvwxyz"[parent] for parent in parents))
    return " ".join(words)


def unpack_history(text: str, width: int) -> BeamHistory:
    """The history that was packed. ValueError if no search of `width` beams has it."""
    themselves = tuple(range(width))
    history = tuple(themselves if word == "." else tuple(int(digit, 36) for digit in word) for word in text.split())
    if not history or any(history[0]):
        raise ValueError("a history must begin with beams that all go on from beam 0")
    if any(len(parents) != width or max(parents) >= width for parents in history):
        raise ValueError(f"a step of a search of {width} beams must have {width} digits below {width}")
    return history


def load_histories(workload: str, path: Path = RECORDED_BEAMS) -> dict[int, tuple[BeamHistory, ...]]:
    """The histories recorded with prompts of a workload, by beam width. StartupError if there are none."""
    try:
        results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]
        found = {
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
    if not found:
        raise StartupError(f"no beam histories were recorded for {workload[:60]!r}", "Choose alpaca or sharegpt")
    return found


class BeamReplay:
    """See quire.sim.runner.Draw. A request replays the history whose number is its seed, modulo how many there are of
    its beam width; where that ends, it goes on in the second half of another (`parents`). A beam is known by its last
    token: TOKEN and the next ones, `avoid` left out, stand for the beams of a step, best first.

    Requests without beams draw the same tokens as without a `BeamReplay`.
    """

    def __init__(self, histories: Mapping[int, Sequence[BeamHistory]], avoid: frozenset[int] = frozenset()) -> None:
        assert all(histories.values()), "a beam width without a history"
        self.histories = histories
        count = max(MAX_N, MAX_BEAM_WIDTH) + len(avoid)
        self.tokens = tuple(token for token in range(FIRST_TOKEN, FIRST_TOKEN + count) if token not in avoid)
        self.beam_of_token = {token: beam for beam, token in enumerate(self.tokens)}
        self._cache: dict[tuple[int, BeamParents], SliceResult] = {}  # by beam and parents

    def __call__(self, row: SeqSlice, birth: SlotInit) -> SliceResult:
        """Candidates of a beam: the tokens of the beams that go on from it."""
        assert birth.sampling is not None, "a sequence was born without sampling parameters"
        if not birth.sampling.candidates_only:
            return SliceResult(self.tokens[: row.num_samples])
        width = birth.num_logprobs  # where end tokens are ignored, a search asks for as many candidates as it has beams
        step = row.start + len(row.tokens) - birth.prompt_len
        beam = self.beam_of_token[row.tokens[-1]] if step else 0
        parents = self.parents(birth.seed, width, step)
        drawn = self._cache.get((beam, parents))
        if drawn is None:
            drawn = self._cache[beam, parents] = self._candidates(beam, parents)
        return drawn

    def parents(self, seed: int, width: int, step: int) -> BeamParents:
        """What a request of this seed chooses after `step` outputs. Past the end of its own history it goes on in the
        second half of another, from a place that the seed gives: beams that have just parted from the prompt are more
        alike than later ones."""
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
        """The sum of log-probabilities of beam j after a step falls by 1 a step and by j times UNIT: so the next step's
        beams are the best, in their order, whatever they go on from."""
        mine = [j for j, parent in enumerate(parents) if parent == beam]
        ids = tuple(self.tokens[j] for j in mine)
        logprobs = tuple(-1.0 - (j - beam) * SCORE_STEP for j in mine)
        token, logprob = (ids[0], logprobs[0]) if ids else (self.tokens[0], -1.0)
        return SliceResult((token,), (TopLogprobs(token, logprob, 1, ids, logprobs),))
