"""The log of plans: what is served is written down, replays to the same tables, and is refused where it is broken."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from geometries import one_size
from published_heads import HEAD, PublishedEagle3

import quire
from bench.echo_runner import EchoRunner
from quire import SamplingParams
from quire.cli import main
from quire.core.runner import DeferredMaskRunner
from quire.errors import LogError, StartupError
from quire.protocol.device_params import DeviceSamplingParams
from quire.protocol.plan_log import LENGTH, MAGIC, MAX_IN_FLIGHT, LoggingRunner, PlanLog, with_plan_log
from quire.protocol.step_plan import (
    PageCopy,
    PageOp,
    Poison,
    SeqSlice,
    SliceResult,
    SlotInit,
    StepPlan,
    StepResult,
    SwapIn,
    SwapOut,
    TableWrite,
    TopLogprobs,
)
from quire.protocol.wire import decode_frame, encode_frame
from quire.sim.plan_replay import PlanReplayer, ReplayError, compare_files, iter_differences, replay
from quire.worker.store import Store

pytestmark = pytest.mark.xdist_group(name="plan_log")  # they share what takes seconds to make

PROMPT = "Once upon a time, there was a"
SMALL = one_size(((0, 1), None), ((2,), 8), pages=40, page_bytes=64, slots=5, width=8, tokens=4, host=6)


def serve(path: Path, temperature: float = 0.8) -> np.ndarray:
    """Requests of several kinds, in so little memory that some are swapped; returns the runner's own tables."""
    settings: dict[str, Any] = {"kv_tokens": 240, "page_size": 4, "preemption": "swap", "swap_gib": 0.01}
    with quire.LLM(dtype="float32", threads=1, debug=True, max_num_seqs=16, log_plans=str(path), **settings) as llm:
        params = [
            SamplingParams(temperature=temperature, seed=i, n=1 + i % 3, max_tokens=24, ignore_eos=True, logprobs=i % 2)
            for i in range(9)
        ]
        params.append(SamplingParams(beam_width=3, max_tokens=20, ignore_eos=True))
        llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        return np.array(llm.engine.runner.store.host_tables)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    path = tmp_path_factory.mktemp("logs") / "plans"
    return path, serve(path)


def replayed(path: Path) -> PlanReplayer:
    with PlanLog(path) as log:
        return replay(log)


def refused(path: Path) -> LogError:
    """Why a log can't be replayed."""
    with pytest.raises(LogError) as error:
        replayed(path)
    assert 0 <= error.value.offset <= path.stat().st_size
    assert f"byte {error.value.offset}" in str(error.value)
    return error.value


def frames(path: Path) -> list[bytes]:
    """The header and the frames of a log, each with its length; the header with what is before it."""
    data = path.read_bytes()
    ends, at = [0], len(MAGIC)
    while at < len(data):
        at += LENGTH.size + LENGTH.unpack_from(data, at)[0]
        ends.append(at)
    return [data[start:end] for start, end in pairwise(ends)]


def written(path: Path, *messages: StepPlan | StepResult, geometry: Any = SMALL) -> Path:
    """A log of an EchoRunner that was given nothing."""
    logged = LoggingRunner(EchoRunner(), path, 512)
    logged.bind(geometry)
    for message in messages:
        logged._write(encode_frame(message))
    logged.close()
    return path


def test_a_served_log_replays_to_the_tables_of_its_runner(served: tuple[Path, np.ndarray]) -> None:
    path, tables = served
    done = replayed(path)
    assert np.array_equal(np.array(done.tables), tables)
    assert done.counts["forks"] > 5
    assert all(done.op_counts[kind.__name__] for kind in (TableWrite, PageCopy, SwapOut, SwapIn, Poison)), (
        done.op_counts
    )
    assert done.counts["collected"] == done.counts["steps"]


def check_drafts_replay(log: Path, **settings: Any) -> None:
    """Write a log of drafting requests in a memory that is short. Its replay ends with the tables of the runner."""
    settings |= {"kv_tokens": 240, "page_size": 4, "preemption": "swap", "swap_gib": 0.01, "log_plans": str(log)}
    with quire.LLM(dtype="float32", threads=1, debug=True, max_num_seqs=8, **settings) as llm:
        params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40, ignore_eos=True) for i in range(6)]
        llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        tables = np.array(llm.engine.runner.store.host_tables)
    done = replayed(log)
    assert all(np.array_equal(mine, other) for mine, other in zip(done.tables, tables))


def test_draft_slices_are_replayed(tmp_path: Path) -> None:
    """In the pages of the draft model's layers, as far as they are proposed."""
    check_drafts_replay(tmp_path / "log", speculative_model="tiny-draft", speculative_method="both")
    with PlanLog(tmp_path / "log") as log:
        steps = (step for step in log if step.plan.slices and step.plan.slices[0].draft_tokens)
        step = next(step for step in steps if any(row.num_samples > 1 for row in step.plan.draft_slices))
        kv_config = log.kv_config
    assert step.result is not None
    more = [result._replace(tokens=result.tokens * 20) for result in step.result.slice_results]
    for plan, result, why in (
        (step.plan, step.result._replace(slice_results=tuple(more)), r"samples\[0\]: \d+ tokens, and 1 to \d+"),
        (step.plan, None, r"draft_slices\[0\]: slot \d+ has no real page .* in group 1"),
    ):
        replayer = PlanReplayer(kv_config)
        with PlanLog(tmp_path / "log") as log:
            for earlier in log:
                if earlier.number == step.number:
                    break
                replayer.step(earlier.plan, earlier.result)
        if result is None:
            replayer.tables[1][:] = 0
        with pytest.raises(ReplayError, match=why):
            replayer.step(plan, result)


def test_draft_slices_of_a_head_are_replayed(tmp_path: Path) -> None:
    """A head computes the slices' own positions, and may have no token and no proposal."""
    head = {**HEAD, "hidden_size": 256, "head_dim": 64, "vocab_size": 3072, "max_position_embeddings": 4096}
    PublishedEagle3(head, embeds=False).save(tmp_path / "head", head)
    settings = {"speculative_model": str(tmp_path / "head"), "speculative_method": "eagle3"}
    check_drafts_replay(tmp_path / "log", **settings, max_num_batched_tokens=16)
    with PlanLog(tmp_path / "log") as log:
        kv_config, earlier = log.kv_config, []
        for step in log:
            if any(row.num_samples > 1 for row in step.plan.draft_slices):
                break
            earlier.append(step)
    plan, first = step.plan, step.plan.draft_slices[0]
    for changed, why in (
        (plan._replace(draft_slices=(first._replace(start=first.start + 1),)), r"draft_slices\[0\]: .*that ends at"),
        (plan._replace(slices=()), r"draft_slices\[0\]: slot \d+ has no slice"),
        (plan, r"draft_slices\[0\]: slot \d+ has no real page .* in group 1"),
    ):
        replayer = PlanReplayer(kv_config)
        for one in earlier:
            replayer.step(one.plan, one.result)
        if changed is plan:
            replayer.tables[1][:] = 0
        with pytest.raises(ReplayError, match=why):
            replayer.step(changed, None)


def test_the_command_tells_what_a_log_holds(
    served: tuple[Path, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = served
    assert main(["replay", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "tables     sha256" in shown
    assert "inherit" in shown
    assert main(["replay", str(path), "--against", str(path)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[:-1])
    for wrong in (["replay", str(cut)], ["replay", str(path), "--against", str(cut)]):
        assert main(wrong) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        assert "is truncated" in said.err
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "can't be read: No such file" in capsys.readouterr().err


def test_logs_of_the_same_requests_are_the_same_and_of_others_differ(
    served: tuple[Path, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = served
    again, other = tmp_path / "again", tmp_path / "other"
    serve(again)
    assert compare_files(path, again) is None
    serve(other, temperature=0.9)
    assert compare_files(path, other) == "step 0: plan.new_slots[0].sampling.temperature is 0.8 and 0.9"
    assert main(["replay", str(path), "--against", str(other)]) == 1
    parts = frames(path)
    last = decode_frame(parts[-1][LENGTH.size :])
    assert isinstance(last, StepResult)
    changed = last.slice_results[-1]._replace(tokens=(99,))
    frame = encode_frame(last._replace(slice_results=(*last.slice_results[:-1], changed), seconds=1.0))
    other.write_bytes(b"".join(parts[:-1]) + LENGTH.pack(len(frame)) + frame)
    steps = (len(parts) - 1) // 2
    found = compare_files(path, other)
    assert found is not None
    assert found.startswith(f"step {steps - 1}: result.slice_results[{len(last.slice_results) - 1}].tokens")
    other.write_bytes(b"".join(parts[:-2]))
    assert compare_files(path, other) == f"step {steps - 1}: only {path} has it"
    other.write_bytes(b"".join(parts[:-1]))
    assert compare_files(path, other) == f"step {steps - 1}: only one of them has a result: the first"


def test_what_is_truncated_is_refused_wherever_it_ends(served: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    path, _ = served
    data, cut, rng = path.read_bytes(), tmp_path / "cut", random.Random(5)
    ends, at = set(), 0
    for part in frames(path):
        at += len(part)
        ends.add(at)
    for end in [0, 1, len(MAGIC), len(MAGIC) + 3, *(rng.randrange(len(data)) for _ in range(40))]:
        cut.write_bytes(data[:end])
        if end in ends:
            replayed(cut)  # a shorter log
            continue
        error = refused(cut)
        assert "truncated" in str(error)
        assert error.offset <= end


def test_what_is_damaged_is_refused_or_a_log(served: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    path, _ = served
    data, broken, rng = path.read_bytes(), tmp_path / "broken", random.Random(6)
    outcomes = [0, 0]
    for _ in range(60):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        broken.write_bytes(changed)
        try:
            replayed(broken)
        except LogError:
            outcomes[0] += 1
        else:
            outcomes[1] += 1
    assert all(outcomes)


def test_other_versions_and_geometries_are_refused(served: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    path, _ = served
    data, other = path.read_bytes(), tmp_path / "other"
    other.write_bytes(data.replace(b"quire plans 1", b"quire plans 2", 1))
    assert "byte 0: this is no log of plans, or one of another version" in str(refused(other))
    other.write_bytes(data.replace(b'"page_bytes"', b'"page_bites"', 1))
    assert f"byte {len(MAGIC)}: the header can't be read" in str(refused(other))
    written(other, StepPlan((), (), ()))
    with pytest.raises(LogError, match=r"it is of another geometry than .*: (vocab_size|geometry\.bytes)"):
        compare_files(path, other)
    smaller = written(tmp_path / "smaller", geometry=replace(SMALL, slots=4))
    with pytest.raises(LogError, match=r"of another geometry than .*: geometry\.slots is 5 and 4"):
        compare_files(other, smaller)


def test_a_header_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(MAGIC + LENGTH.pack(2**32 - 1))
    assert "the header of 4294967295 bytes, at most" in str(refused(path))
    for group in ({"table_width": 2**40}, {"run_tokens": 0}, {"host_ids": range(1, 2**40)}):
        geometry = replace(SMALL, groups=(replace(SMALL.groups[0], **group),))
        logged = LoggingRunner(EchoRunner(is_constant=True), path, 512)
        logged.bind(geometry)
        logged.close()
        assert "the header can't be read: ValueError" in str(refused(path))


BORN = SlotInit(1, 7, -1, DeviceSamplingParams(), 3, 4)
HELD = TableWrite(1, 0, 0, (5, 6)), TableWrite(1, 1, 0, (7, 8))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (StepPlan((BORN._replace(slot=5),), (), ()), r"new_slots\[0\]: slot 5 is none of the 5"),
        (StepPlan((BORN._replace(slot=0),), (), ()), r"new_slots\[0\]: slot 0 is none"),
        (
            StepPlan((BORN._replace(sampling=None, parent_slot=2),), (), ()),
            "slot 1 inherits from slot 2, which was never",
        ),
        (
            StepPlan((BORN._replace(sampling=DeviceSamplingParams(min_p=1, top_k=1, presence_penalty=1.0)),), (), ()),
            "no history",
        ),
        (StepPlan((), (TableWrite(1, 2, 0, (5,)),), ()), r"page_ops\[0\]: there is no group 2"),
        (StepPlan((), (TableWrite(1, 0, 7, (5, 6)),), ()), r"page_ops\[0\]: places 7 on for 2 pages, of 8"),
        (StepPlan((), (TableWrite(1, 0, -1, (5,)),), ()), r"page_ops\[0\]: places -1 on"),
        (StepPlan((), (TableWrite(1, 0, 0, (40,)),), ()), r"page_ops\[0\]: page 40 is none of group 0"),
        (StepPlan((), (), (), (PageCopy(0, 0, 3),)), r"overlapped_page_ops\[0\]: page 0 is none of group 0"),
        (StepPlan((), (Poison(0, -3),), ()), r"page_ops\[0\]: page -3 is none"),
        (StepPlan((), (SwapOut(1, 5, 7),), ()), r"page_ops\[0\]: host page 7 is none of group 1"),
        (StepPlan((), HELD, (SeqSlice(1, (4, 5), 0, 1),)), r"slices\[0\]: slot 1 was never initialized"),
        (
            StepPlan((BORN,), HELD[:1], (SeqSlice(1, (4, 5), 0, 1),)),
            r"no real page for some position below 2 in group 1",
        ),
        (StepPlan((BORN,), HELD, (SeqSlice(1, (4,) * 9, 0, 1),)), r"no real page for some position below 9"),
        (StepPlan((BORN,), HELD, (SeqSlice(1, (4,), 7, 1, (), (5,)),)), r"no real page for some position below 9"),
        (StepPlan((BORN,), HELD, (SeqSlice(1, (4,), 100, 1),)), r"no real page for some position below 101"),
        (StepPlan((BORN,), HELD, (SeqSlice(1, (4,), -1, 1),)), r"slices\[0\]: 1 tokens from position -1 on"),
        (StepPlan((BORN,), HELD, (SeqSlice(1, (4,), 0, 2),)), r"samples\[0\]: 1 tokens, and 2 were to be drawn"),
        (StepPlan((BORN,), HELD, ()), "1 samples for 0 slices"),
    ],
)
def test_steps_that_do_not_hold_together_are_named(plan: StepPlan, why: str, tmp_path: Path) -> None:
    fine = StepPlan((), (), ()), StepResult((), 0.0)
    path = written(tmp_path / "log", *fine, plan, StepResult((SliceResult((3,)),), 0.0))
    error = refused(path)
    with pytest.raises(LogError, match=rf"byte {error.offset}: step 1, .*{why}"):
        raise error
    assert error.offset == sum(map(len, frames(path)[:3]))


def test_a_window_needs_no_pages_behind_it(tmp_path: Path) -> None:
    tables = TableWrite(1, 0, 0, (5, 6, 9, 10, 11)), TableWrite(1, 1, 2, (7, 8, 4))
    plan = StepPlan((BORN,), tables, (SeqSlice(1, (4,), 16, 1),))
    assert replayed(written(tmp_path / "log", plan)).counts["collected"] == 0


def test_two_replayers_that_disagree_are_noticed(
    served: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = served
    real = Store.apply_page_ops

    def lossy(store: Store, page_ops: Sequence[PageOp]) -> None:
        real(store, tuple(
            op._replace(pages=(op.pages[0] % 50 + 1, *op.pages[1:])) if isinstance(op, TableWrite) and op.pages else op
            for op in page_ops
        ))  # fmt: skip

    monkeypatch.setattr(Store, "apply_page_ops", lossy)
    assert "is one page here and another one there" in str(refused(path))


def test_results_belong_to_plans(tmp_path: Path) -> None:
    path = written(tmp_path / "log", StepResult((), 0.0))
    assert "after 0 steps, a result without a plan" in str(refused(path))
    path = written(tmp_path / "log", *[StepPlan((), (), ())] * (MAX_IN_FLIGHT + 1))
    assert "plans wait for their results" in str(refused(path))


def test_a_log_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--log-plans .* can't be written: Is a directory\. Give another file"):
        LoggingRunner(EchoRunner(), tmp_path, 512)


def test_differences_have_names() -> None:
    top = TopLogprobs(1, float("nan"), 1)
    assert list(iter_differences(top, TopLogprobs(1, float("nan"), 1), "top")) == []
    assert list(iter_differences(top, top._replace(rank=2), "top")) == ["top.rank is 1 and 2"]
    assert list(iter_differences((PageCopy(0, 1, 2),), (SwapOut(0, 1, 2),), "x")) == [
        "x[0] is PageCopy(group=0, src=1, dst=2) and SwapOut(group=0, page=1, host_page=2)"
    ]
    assert list(iter_differences((1,), (1, 2), "x")) == ["x has 1 and 2 of them"]


def test_the_step_that_ended_a_runner_is_in_its_log(tmp_path: Path) -> None:
    logged = LoggingRunner(EchoRunner(), tmp_path / "log", 512)
    logged.bind(SMALL)
    plan = StepPlan((), (), (SeqSlice(3, (4, 5), 0, 1),))
    with pytest.raises(KeyError):
        logged.collect(logged.submit(plan))  # slot 3 was never initialized
    logged.close()
    with PlanLog(tmp_path / "log") as log:
        [step] = log
    assert (step.plan, step.result) == (plan, None)


def test_a_log_can_hold_steps_if_its_runner_can(tmp_path: Path) -> None:
    """Ranks can't: whoever asks the log must not be told that they can."""

    class Plain:
        def close(self) -> None: ...

    for runner, holds in ((Plain(), False), (EchoRunner(), True)):
        log = with_plan_log(runner, tmp_path / "log", 512)
        assert isinstance(log, DeferredMaskRunner) is holds is isinstance(runner, DeferredMaskRunner)
        log.close()


def test_logs_of_an_earlier_revision_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    """The file and the digest of its page tables were written by that revision."""
    file = Path(__file__).parent / "golden" / "plans_of_revision_1007128a"
    assert main(["replay", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "fcde46c6802a286a83b49ca3c635ab766566bb27c502fa2d136f0e69e212bd71" in printed
    assert printed.splitlines()[1:3] == ["steps      40", "slices     236, of 242 tokens"]


def test_a_log_that_takes_no_more_ends_the_engine(tmp_path: Path) -> None:
    """A plan is written before it is submitted: what the file can't take isn't computed."""
    runner = EchoRunner()
    logged = LoggingRunner(runner, tmp_path / "log", 512)
    logged.bind(SMALL)
    logged.file.close()
    logged.file = Mock(write=Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        logged.submit(StepPlan((), (), ()))
    assert runner.submitted == 0
