"""Random traces of requests with pictures, some of them the same."""

from __future__ import annotations

import pytest
from memories import VOCAB, Build
from pictured import PICTURED
from traces import DEPTHS, Asked, Trace, drawn_trace

from quire.protocol.images import ImageItem
from quire.protocol.sampling_params import SamplingParams


@pytest.mark.share(8)
@pytest.mark.parametrize("name", PICTURED)
@pytest.mark.parametrize("depth", DEPTHS)
def test_random_traces(name: str, depth: int) -> None:
    settings = {"least": 64, "prefixes": (0,)} if "both-ways" in name else {}
    told = [drawn_trace(PICTURED[name], seed, depth, **settings) for seed in range(4)]
    assert sum(t.finished for t in told) > 12
    assert sum(t.parts for t in told) > 10


def test_what_one_leaves_half_encoded_another_one_begins_anew() -> None:
    trace = Trace(PICTURED["cross-4"](Build(128, 4)), seed=0, depth=1, budget=4, max_seqs=8)
    for i, id in enumerate("ab"):
        prompt, params = (7 + i, VOCAB - 1, 5), SamplingParams(seed=1, max_tokens=4)
        trace.add(Asked(id, prompt, params, "", (ImageItem(bytes(32), 1, 1, 8, 4),)))
    trace.step()
    trace.step()
    assert 0 < trace.runner.parts < 4
    trace.abort("a")
    trace.finish()
    assert trace.runner.parts > 4
