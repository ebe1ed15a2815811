"""Sleep and wake-up of real models on a CPU: the same tokens afterwards, nothing cached, and the memory really gone."""

from __future__ import annotations

import random
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import quire.pool
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import Asleep, InputError, StartupError
from quire.kernels.cpu import linear as cpu_linear
from quire.layers import linear
from quire.worker.offloaded_weights import OffloadedWeights, device_tensors

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [[random.Random(i).randrange(5, 2000) for _ in range(400)] for i in range(4)]
RULES = PROMPTS[0][:40]
SETTINGS: dict[str, Any] = {"device": "cpu", "kv_tokens": 4096, "threads": 1, "page_size": 16, "max_num_seqs": 8}


def tokens(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [result.outputs[0].token_ids for result in llm.generate(prompts, PARAMS, use_tqdm=False)]


def dirty() -> int:
    """Bytes of this process's own memory."""
    said = Path("/proc/self/smaps_rollup").read_text()
    found = {line.split()[0]: int(line.split()[1]) for line in said.splitlines()[1:]}
    return 1024 * (found["Private_Dirty:"] + found.get("Shared_Dirty:", 0))


def hits(llm: LLM) -> int:
    return llm.engine.scheduler.memory.account().sharing.hits


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what is in memory")
@pytest.mark.parametrize("memory", ["paged", "virtual", pytest.param("orca-max", marks=pytest.mark.soak)])
def test_nights(memory: str) -> None:
    more = {"swap_gib": 0.01, "prefix_tokens": 64} if memory == "paged" else {"max_model_len": 512}
    with LLM("tiny", memory=memory, **SETTINGS, **more) as llm:
        wanted = tokens(llm)
        if more.get("prefix_tokens"):
            llm.register_prefix("rules", RULES)
        model = weakref.ref(llm.engine.runner.model)
        plan, held = llm.built.memory_plan, sum(map(len, PROMPTS)) * llm.built.memory_plan.token_bytes
        awake = dirty()
        llm.sleep()
        assert awake - dirty() > 0.8 * held, "the pages are there still"
        assert model() is not None, "on a CPU weights stay"
        with pytest.raises(Asleep):
            tokens(llm)
        llm.wake_up()
        before = hits(llm)
        assert tokens(llm) == wanted
        assert hits(llm) - before == (40 if more.get("prefix_tokens") else 0), "more than the registered prefix"
        llm.sleep()
        first = dirty()  # again: the tokens since took more memory
        llm.sleep(2)
        assert model() is None
        assert first - dirty() > 0.8 * plan.weight_bytes, "the weights are there still"
        llm.wake_up(["weights"])
        with pytest.raises(Asleep):
            tokens(llm)
        llm.wake_up(["kv_cache"])
        assert tokens(llm) == wanted
        assert llm.reset_prefix_cache() > 0 or memory == "orca-max"
        before = hits(llm)
        assert tokens(llm) == wanted
        assert hits(llm) - before == (40 if more.get("prefix_tokens") else 0)
        llm.engine.scheduler.memory.check()


@pytest.mark.parametrize(
    "settings", [{"dummy_weights": True, "seed": 5}, pytest.param({"quantization": "int8"}, marks=pytest.mark.soak)]
)
def test_other_weights_come_again_too(settings: dict[str, Any]) -> None:
    """Made up from a seed, and rounded."""
    with LLM("tiny", **SETTINGS, **settings, skip_tokenizer_init=True) as llm:
        wanted = tokens(llm)
        llm.sleep(2)
        llm.wake_up()
        assert tokens(llm) == wanted


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what is in memory")
def test_every_rank_sleeps() -> None:
    with LLM("tiny", **SETTINGS, tp=2) as llm:
        wanted, runner = tokens(llm), llm.engine.runner
        held = sum(map(len, PROMPTS)) * llm.built.memory_plan.token_bytes
        for level, least in ((1, held), (2, held + llm.built.memory_plan.weight_bytes)):
            awake = runner.used
            llm.sleep(level)
            for before, now in zip(awake, runner.used, strict=True):
                assert before.bytes - now.bytes > 0.7 * least
            llm.wake_up()
            assert tokens(llm) == wanted


def test_a_checkpoint_that_is_gone_is_waited_for(tmp_path: Path) -> None:
    source = Path(quire.__file__).parent / "assets" / "tiny"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = next(tmp_path.glob("*.safetensors"))
    with LLM(str(tmp_path), **SETTINGS) as llm:
        wanted = tokens(llm)
        llm.sleep(2)
        weights.rename(tmp_path / "elsewhere")
        for _ in range(2):
            with pytest.raises(StartupError):
                llm.wake_up()
            assert llm.engine.sleep_controller.released_tags == ("weights", "kv_cache")
        (tmp_path / "elsewhere").rename(weights)
        llm.wake_up()
        assert tokens(llm) == wanted


def test_without_room_for_pages_it_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("tiny", **SETTINGS) as llm:
        wanted, runner = tokens(llm), llm.engine.runner
        llm.sleep()
        with monkeypatch.context() as patched:
            patched.setattr(type(runner), "_make_sampler", lambda self, slots: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.wake_up()
        assert not hasattr(runner, "store"), "half of it is there"
        assert llm.engine.sleep_controller.released_tags == ("kv_cache",)
        llm.wake_up()
        assert tokens(llm) == wanted


def test_weights_leave_a_device_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done with those on a GPU, here with a CPU's that aren't packed."""
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    monkeypatch.setattr(cpu_linear, "supports", lambda weight: False)
    monkeypatch.setattr(linear, "pack_onednn", lambda weight, bias: None)
    with LLM("tiny", **SETTINGS, attention="sdpa", dtype="float32") as llm:
        wanted, runner = tokens(llm), llm.engine.runner
        llm.sleep()
        parked = OffloadedWeights(runner.model, torch.device("cpu"))
        assert parked.nbytes > 0.95 * llm.built.memory_plan.weight_bytes
        left = [
            tensor for tensor in device_tensors(runner.model, torch.device("cpu")) if tensor.untyped_storage().nbytes()
        ]
        assert not left, [tensor.shape for tensor in left]
        parked.restore()
        llm.wake_up()
        assert tokens(llm) == wanted


def test_models_of_a_pool_do_not_sleep() -> None:
    config = EngineConfig(model="tiny", device="cpu", max_num_seqs=4)
    pool = quire.pool.Pool([config], kv_gib=0.01)
    with LLM("tiny", custom_kv_cache=pool) as llm:
        with pytest.raises(InputError, match="share a pool"):
            llm.sleep()
        assert llm.generate("Once", PARAMS, use_tqdm=False)


def test_bad_levels_and_tags() -> None:
    with LLM("tiny", **SETTINGS) as llm:
        for level in (0, 3, True, "1", 1.0):
            with pytest.raises(InputError, match="level"):
                llm.sleep(level)  # type: ignore[arg-type]
        llm.sleep()
        for tags in (["weight"], "weights", ["kv_cache"], [1]):
            with pytest.raises(InputError, match="tags"):
                llm.wake_up(tags)
        assert llm.engine.sleep_controller.released_tags == ("weights", "kv_cache")
        llm.wake_up()
