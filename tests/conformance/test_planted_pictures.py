"""Bugs in what is kept of pictures: each is planted, and must be caught at every depth, by outputs alone too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import seeing
from memories import VOCAB
from picture_files import drawn, written
from pictured import PICTURED
from test_planted import (
    HIT,
    SCRATCH,
    WRONG,
    Patch,
    Shown,
    every_depth,
    found_by,
    instead_of,
    only_outputs,
    planted_depths,
)
from traces import Asked, open_trace, run_trace

from bench.echo_images import EchoImages
from bench.echo_pages import STATE_BYTES, EchoPages, States
from bench.echo_runner import EchoRunner
from quire.core.encoder_budget import EncoderBudget
from quire.memory import encoder_cache as gallery
from quire.memory.encoder_cache import EncoderCache
from quire.memory.page_keys import KeyChain
from quire.memory.policies import ImageSpan, VisionPolicy
from quire.memory.seq_pages import SeqPages
from quire.protocol.images import ImageItem
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import ImageEncoding, PageOp, StepResult
from quire.text.chat_messages import ImageSource
from quire.text.images import loader as sight


def pages_of_another_picture_of_the_same_size(patch: Patch) -> None:
    patch.setattr(gallery, "page_keys", lambda key, count: [bytes([count]) * 32 + i.to_bytes(4) for i in range(count)])


@instead_of(VisionPolicy, "first_needed_page")
def embedding_freed_before_its_last_chunk(begin: Any, policy: VisionPolicy, spans: list[ImageSpan], start: int) -> int:
    return min(begin(policy, spans, start) + (start > spans[0].image.start), spans[-1].stop)


embeddings_inside_pages_written_too_early = instead_of(EchoImages, "_inline_row")(
    lambda inside, sights, slot, at: inside(sights, slot, at - sights.groups[0].group.run_tokens)
)
embeddings_over_keys_that_are_there = instead_of(EncoderCache, "_plan_parts")(
    lambda go_on, self, resident, place, at, most, skip=0: go_on(self, resident, place, at, most)
)


def picture_half_evicted_that_counts_as_there(patch: Patch) -> None:
    def found(self: EncoderCache, g: int, key: bytes, count: int) -> list[int] | None:
        index = self.page_pool.index[g]
        pages = [index[name] for name in gallery.page_keys(key, count) if name in index]
        return (pages * count)[:count] if pages else None

    patch.setattr(EncoderCache, "_find_pages", found)
    patch.setattr(EncoderCache, "drop_incomplete", lambda self: [torn.clear() for torn in self.evicted_keys.values()])


@instead_of(KeyChain, "_extra_key")
def key_of_tokens_without_their_picture(more: Any, chain: KeyChain, seq: Sequence, run: int) -> bytes:
    media, seq.images = seq.images, ()
    found: bytes = more(chain, seq, run)
    seq.images = media
    return found


def encoder_run_skipped_after_a_preemption(patch: Patch) -> None:
    once: set[bytes] = set()

    @instead_of(EncoderCache, "detach")
    def left(leave: Any, self: EncoderCache, resident: SeqPages) -> None:
        once.update(medium.key for medium in resident.images)
        leave(self, resident)

    @instead_of(EncoderCache, "extend_table")
    def skipped(extend: Any, self: EncoderCache, seq: Sequence, resident: SeqPages, *more: Any) -> None:
        extend(self, seq, resident, *more)
        for (_, i), coming in resident.pending_encodings.items():
            if seq.images[i].key in once and not coming.parts_done:
                coming.parts_done = coming.num_parts

    skipped(patch)
    left(patch)


row_that_does_not_wait_for_the_last_part = instead_of(EncoderBudget, "schedule_encoding")(
    lambda clear, sight, seq, count: clear(sight, seq, count) or count
)


def encoder_that_is_a_step_late(patch: Patch) -> None:
    replay = EchoRunner.apply
    late: dict[int, list[ImageEncoding]] = {}

    @instead_of(EchoRunner, "apply")
    def held(replay: Any, runner: EchoRunner, entry: PageOp) -> None:
        if isinstance(entry, ImageEncoding):
            late.setdefault(id(runner), []).append(entry)
        else:
            replay(runner, entry)

    @instead_of(EchoRunner, "collect")
    def after(collect: Any, runner: EchoRunner, ticket: int) -> StepResult:
        result: StepResult = collect(runner, ticket)
        for entry in late.pop(id(runner), []):
            replay(runner, entry)
        return result

    held(patch)
    after(patch)


LOST = "pages of an image are lost, or found without it"
TORN = r"a token of slot \d+ is torn"
UNTABLED = r"an image's page \d+ is in no table"

PLANTED: dict[str, Shown] = {
    "cross pages of another picture": Shown(pages_of_another_picture_of_the_same_size, LOST, "cross-4"),
    "embeddings of another picture": Shown(pages_of_another_picture_of_the_same_size, LOST, "large-vision-4"),
    "an embedding freed before its last chunk": Shown(
        embedding_freed_before_its_last_chunk, f"{UNTABLED}|{SCRATCH}", "vision-4"
    ),
    "embeddings inside pages written too early": Shown(embeddings_inside_pages_written_too_early, TORN, "inside-4"),
    "embeddings over keys that are there": Shown(embeddings_over_keys_that_are_there, TORN, "inside-4"),
    "a picture half evicted": Shown(picture_half_evicted_that_counts_as_there, LOST, "large-cross-1"),
    "a key without its picture": Shown(key_of_tokens_without_their_picture, HIT, "cross-4"),
    "a key without its picture's rows": Shown(key_of_tokens_without_their_picture, HIT, "off"),
    "an encoder run skipped after a preemption": Shown(encoder_run_skipped_after_a_preemption, WRONG, "cross-4"),
    "an encoder a step late": Shown(encoder_that_is_a_step_late, WRONG, "large-vision-4"),
    "a row that doesn't wait": Shown(row_that_does_not_wait_for_the_last_part, f"{UNTABLED}|{WRONG}", "large-vision-4"),
}
MEMORIES = sorted({bug.memory for bug in PLANTED.values()})
SHOWN = [name for name in PLANTED if name != "a row that doesn't wait"]  # of whose pages the memory itself says no


def run(name: str, depth: int) -> None:
    for seed in range(10):
        way = ("swap", "recompute")[seed % 2]
        run_trace(PICTURED[name], seed=seed, depth=depth, tokens=72, host=1000, preemption=way)


def trusting(patch: Patch) -> None:
    """A runner that reads and writes wherever it is told to, and takes what lies there for what should."""

    def read(pages: EchoPages, slot: int, first: int, last: int) -> States:
        size = pages.group.token_bytes
        held = [
            pages.page_at(slot, i)
            for i in range(first * size // pages.used_page_bytes, -(-last * size // pages.used_page_bytes))
        ]
        begin = first * size % pages.used_page_bytes
        cells = pages.pages[held, : pages.used_page_bytes].reshape(-1)[begin : begin + (last - first) * size]
        states: States = np.ascontiguousarray(cells.reshape(-1, size)[:, :STATE_BYTES]).view(np.int64).reshape(-1)
        return states ^ pages.group_index

    patch.setattr(EchoPages, "page_at", lambda pages, slot, logical: int(pages.table[slot, logical]))
    patch.setattr(EchoPages, "read_states", read)


def only_tokens(patch: Patch) -> None:
    """With no check of the memory's, of its tables, or of what is read: nothing fails but what comes out."""
    only_outputs(patch)
    patch.setattr(EncoderCache, "check", lambda gallery: None)
    trusting(patch)


@pytest.mark.share(8)
@every_depth
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", MEMORIES)
def test_the_traces_pass_without_a_bug(name: str, checked: bool, depth: int, monkeypatch: Patch) -> None:
    if not checked:
        only_tokens(monkeypatch)
    run(name, depth)


@planted_depths
@pytest.mark.parametrize(("name", "checked"), [*((name, True) for name in PLANTED), *((name, False) for name in SHOWN)])
def test_planted_bug_is_caught(name: str, checked: bool, depth: int, monkeypatch: Patch) -> None:
    """Also unchecked, by wrong tokens alone."""
    bug = PLANTED[name]
    if not checked:
        only_tokens(monkeypatch)
    bug.plant(monkeypatch)
    with found_by(bug.message if checked else WRONG):
        run(bug.memory, depth)


key_without_its_salt = instead_of(sight, "image_key")(lambda key_of, image, settings, salt: key_of(image, settings, ""))


def run_tenants(name: str, depth: int) -> None:
    """Two tenants show one picture, whose key is made as of a request's, and each of them shows it again: who isn't
    shown it by anybody of his own has it encoded, or would learn that somebody else has it."""
    trace = open_trace(PICTURED[name], depth=depth, budget=16)
    memory = trace.memory
    given, found = [ImageSource("here", written(drawn(8, 8)))], list[tuple[int, int]]()
    for i, salt in enumerate(("", "a", "b", "b", "a")):
        [pixels] = seeing.sight().load(given, salt)
        rows = 4
        prompt = (7 + i, *[VOCAB - 1] * (rows if memory.kv_config.sight else 1), 5, 6)
        medium = ImageItem(pixels.key, 1, len(prompt) - 3, rows, 2)
        trace.add(Asked(str(i), prompt, SamplingParams(max_tokens=4, seed=i), salt, (medium,)))
        trace.exhaust()
        sharing = memory.account().sharing
        found.append((sharing.encoder_runs, sharing.picture_hits))
    trace.drained()
    assert found == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)], f"who found what: {found}"


@planted_depths
@pytest.mark.parametrize("name", ["cross-4", "large-cross-4", "vision-4", "large-vision-4"])
def test_a_tenant_finds_no_picture_of_another_s(name: str, depth: int, monkeypatch: Patch) -> None:
    """Nor where a hash is taken without its salt would that stay unseen."""
    run_tenants(name, depth)
    key_without_its_salt(monkeypatch)
    with pytest.raises(AssertionError, match="who found what"):
        run_tenants(name, depth)
