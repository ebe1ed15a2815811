"""Ranks of a real model, of which one goes while they meet in a step: in a prompt, or while tokens are drawn."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from test_rank_failures import ENDS, ranks_left

import quire.parallel.remote
from quire import LLM, SamplingParams
from quire.errors import EngineDead
from quire.link.child import BOOT
from quire.parallel.remote import RemoteRunner
from quire.parallel.sides import start_program

PROGRAM = ("-P", "-c", BOOT, str(Path(__file__).parents[1]), "faulty_ranks")
STEPS = {"prompt": 1, "decode": 5}


@pytest.mark.parametrize(
    ("how", "where"),
    [
        pytest.param(how, where, marks=() if (how, where) == ("exit", "decode") else pytest.mark.soak)
        for how in ENDS
        for where in STEPS
    ],
)
def test_a_rank_that_goes_while_others_wait_for_it_is_named(
    how: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = {"rank": 1, "how": how, "step": STEPS[where], "meeting": 3}
    monkeypatch.setenv("FAULT", json.dumps(fault))
    start = partial(start_program, program=PROGRAM)
    monkeypatch.setattr(quire.parallel.remote, "RemoteRunner", partial(RemoteRunner, start=start))
    llm = LLM("tiny", tp=2, device="cpu", dtype="float32", kv_tokens=1024, threads=2, rank_timeout=60, warm_up=False)
    with pytest.raises(EngineDead, match=f"^{ENDS[how]} in step {STEPS[where]}"):
        llm.generate(["Once upon a time", "The sky"], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    llm.close()
    assert not ranks_left("faulty_ranks")
