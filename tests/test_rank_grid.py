"""Greedy tokens of several ranks are one rank's, over a grid of all that might change them: for each family the cases
cover every pair of memories, sizes, depths, chunks, hits, preemption, pages and numbers of ranks; in each there are
branches, beams, penalties, and prompts of several lengths at a time. The first few of each family are run by default.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_equality
import transformers
from internlm2_files import as_internlm2
from test_tensor_parallel import PROMPTS, engine_of, saver

from quire.config import MEMORIES, RESERVED_MEMORIES
from quire.core.engine import Engine
from quire.errors import InputError
from quire.protocol.sampling_params import SamplingParams

SIZES: dict[str, Any] = {**test_equality.SIZES, "tie_word_embeddings": False}
STATES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "tie_word_embeddings": False, "pad_token_id": None}
FAMILIES: dict[str, Any] = {
    **test_equality.FAMILIES,
    **test_equality.MORE,
    "llama, 4 heads of keys": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "internlm2": lambda: transformers.LlamaConfig(**SIZES),
    "phi3": lambda: transformers.Phi3Config(**SIZES, bos_token_id=None, eos_token_id=None, pad_token_id=None),
    "jamba": lambda: transformers.JambaConfig(
        **{**SIZES, "num_hidden_layers": 3}, num_experts=4, attn_layer_period=3, attn_layer_offset=1, mamba_d_state=8,
        use_mamba_kernels=False, pad_token_id=None,
    ),
    "mamba": lambda: transformers.MambaConfig(**STATES, num_hidden_layers=2, state_size=8),
    "falcon_mamba": lambda: transformers.FalconMambaConfig(**STATES, num_hidden_layers=2, state_size=8),
}  # fmt: skip
UNLIKE = test_equality.UNLIKE  # of which --memory virtual is refused
STATEFUL = ("jamba", "mamba", "falcon_mamba")  # of which every memory is that has no pages
WINDOWS = ("mistral", *UNLIKE, *STATEFUL)  # whose requests don't grow with their length, or do only in part
KINDS = (
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, n=3, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=0, beam_width=3, n=2, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, n=2, max_tokens=9, ignore_eos=True, presence_penalty=0.7, min_tokens=4),
)
FEW = 1  # cases of a family that are run by default


class Case(NamedTuple):
    """One of the grid."""

    tp: int
    memory: str
    kv_tokens: int
    depth: int
    budget: int
    hits: bool
    preemption: str
    page_size: int

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of one rank and of several."""
        return {
            "memory": self.memory, "kv_tokens": self.kv_tokens, "depth": self.depth, "preemption": self.preemption,
            "max_num_batched_tokens": self.budget, "enable_prefix_caching": self.hits, "page_size": self.page_size,
            "max_num_seqs": 16, "swap_gib": 0.01, "state_tokens": 16,
        }  # fmt: skip


GRID = Case((2, 4), MEMORIES, (4096, 192), (1, 2, 3), (7, 64), (True, False), ("recompute", "swap"), (4, 16))  # type: ignore[arg-type]


def covering(family: str) -> Iterator[Case]:
    """Yield cases until every two values of different settings occur together; those with most new pairs come first."""
    refused = (*RESERVED_MEMORIES, "virtual") if family in STATEFUL else ("virtual",) if family in UNLIKE else ()
    memories = [memory for memory in MEMORIES if memory not in refused]
    rng, values = random.Random(family), GRID._replace(memory=memories)  # type: ignore[arg-type]
    every = [Case(*one) for one in product(*values)]  # type: ignore[arg-type]
    left = {pair for case in every for pair in combinations(enumerate(case), 2)}
    while left:
        found = max(rng.sample(every, 60), key=lambda case: len(left.intersection(combinations(enumerate(case), 2))))
        if met := left.intersection(combinations(enumerate(found), 2)):
            left -= met
            yield found


def marked() -> list[Any]:
    """Return the cases of all families, in turn."""
    every = sorted((number, name, case) for name in FAMILIES for number, case in enumerate(covering(name)))
    return [
        pytest.param(name, case, marks=pytest.mark.soak if number >= FEW else (), id="-".join(map(str, (name, *case))))
        for number, name, case in every
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    plain = saver(tmp_path_factory, FAMILIES)

    def saved(family: str) -> Path:
        folder = plain(family)
        if family == "internlm2":
            as_internlm2(folder)
        return folder

    return cache(saved)


def told(engine: Engine, more: int, rounds: int) -> dict[tuple[str, int], list[int] | str]:
    """What comes of each branch: in a second round prompts may be found; or why a request is refused. Requests have so
    many tokens more than KINDS say."""
    kinds = [replace(kind, max_tokens=kind.max_tokens + more) for kind in KINDS]
    found: dict[tuple[str, int], Any] = {}
    for again in range(rounds):
        for i, prompt in enumerate(PROMPTS):
            for j in (i, i + again + 1):
                name = f"{again}, prompt {i}, kind {j % len(KINDS)}"
                try:
                    engine.add(name, prompt, kinds[j % len(KINDS)])
                except InputError as error:
                    found[name, 0] = str(error)
        while engine.has_unfinished_requests:
            for output in engine.step():
                found.setdefault((output.request_id, output.branch), []).extend(output.tokens)
    return found


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("family", "case"), marked())
def test_greedy_tokens_are_one_ranks(folders: Any, family: str, case: Case) -> None:
    one, several = (engine_of(folders(family), **case.settings, **layout) for layout in ({}, {"tp": case.tp}))
    more, rounds = 16 if case.kv_tokens == 192 else 0, 2 if case.hits else 1
    try:
        wanted, got = told(one, more, rounds), told(several, more, rounds)
    finally:
        several.close()
    differ = [f"{name} branch {branch}" for name, branch in wanted if got.get((name, branch)) != wanted[name, branch]]
    assert not differ
    assert got.keys() == wanted.keys()
    assert any(isinstance(tokens, list) for tokens in wanted.values()), "all are refused"
    in_pages = case.memory in ("paged", "uniform")
    for engine in (one, several):
        if in_pages and case.kv_tokens == 192 and family not in WINDOWS:
            assert engine.scheduler.num_preemptions > 0
        if case.hits and case.memory == "paged" and case.kv_tokens == 4096:
            assert engine.scheduler.memory.account().sharing.hits > 0
