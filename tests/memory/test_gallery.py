"""What is kept of pictures: found by their keys, encoded once, evicted, counted by `fits`."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from bench.echo_runner import EchoRunner
from quire.config import EngineConfig
from quire.core.encoder_budget import EncoderBudget
from quire.core.engine import Engine
from quire.core.scheduler import Scheduler
from quire.core.validation import EngineLimits
from quire.errors import InputError, PromptTooLong, StartupError
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.memory.paged import PagedMemory
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.model_spec import LayerSpec, ModelSpec, VisionSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import ImageEncoding, StepPlan

KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(8)]
SELF, CROSS = LayerSpec(1, 8), LayerSpec(1, 8, is_cross_attention=True)
EYES = VisionSpec(16, 16, 1, part_tokens=4)


def spec(*layers: LayerSpec, vision: VisionSpec = EYES) -> ModelSpec:
    return ModelSpec("echo", layers or (SELF, SELF), 64, 256, 8, 1, 8, 1, vision=vision)


def memory(model: ModelSpec | None = None, tokens: int = 128, budget: int = 16, **settings: Any) -> PagedMemory:
    config = EngineConfig.of(
        **{"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": budget, "swap_gib": 0, **settings}
    )
    made = build_memory(config, model or spec(), MemorySize(tokens, 128, 2))
    assert isinstance(made, PagedMemory)
    return made


class Served:
    """An engine over a memory, whose plans are looked at."""

    def __init__(self, made: PagedMemory, budget: int = 16, runner: EchoRunner | None = None) -> None:
        self.memory, self.plans = made, list[StepPlan]()
        self.runner = runner or EchoRunner(vocab_size=64)
        self.runner.bind(made.kv_config)
        scheduler = Scheduler(made, token_budget=budget, max_seqs=4, max_len=128)
        self.engine = Engine(scheduler, self.runner, EngineLimits(64, 128, 16), clock=lambda: 0.0)

    def add(self, id: str, prompt: list[int], *media: ImageItem, **params: Any) -> None:
        pixels = [ImagePixels(medium.key, (1, 1, 1, 3), bytes(3)) for medium in media]
        settings = SamplingParams(**{"max_tokens": 2, "ignore_eos": True, "seed": 1, **params})
        self.engine.add(id, prompt, settings, images=media, pixels=pixels)

    def step(self) -> list[ImageEncoding]:
        plan = self.engine.scheduler.schedule()
        assert plan is not None
        self.plans.append(plan)
        self.engine.in_flight.append((plan, self.runner.submit(plan)))
        depth, self.engine.depth = self.engine.depth, 0
        self.engine.step()
        self.engine.depth = depth
        self.memory.check()
        return [entry for entry in plan.page_ops if isinstance(entry, ImageEncoding)]

    def drain(self) -> list[list[ImageEncoding]]:
        told = []
        while self.engine.has_unfinished_requests:
            told.append(self.step())
        return told


def picture(number: int, start: int, tokens: int = 8, parts: int = 1, rows: int = 0) -> ImageItem:
    return ImageItem(KEYS[number], start, tokens, rows or tokens, parts)


def prompt(length: int = 24) -> list[int]:
    return [1 + i % 40 for i in range(length)]


def test_two_that_need_the_same_picture_at_once_have_it_encoded_once() -> None:
    served = Served(memory(), budget=48)
    for i in range(3):
        served.add(str(i), [i + 1] * 12, picture(0, 2, parts=3))
    told = served.drain()
    assert sum(entry.num_parts for step in told for entry in step) == 3
    assert served.memory.account().sharing.encoder_runs == 1


@pytest.mark.parametrize("order", [(4, 9), (9, 4)])
def test_pictures_of_one_key_and_two_sizes_are_two(order: tuple[int, int]) -> None:
    """As when one who lies about a picture comes while an aborted one of that key is still in a step."""
    served = Served(memory(), budget=48)
    for i, tokens in enumerate(order):
        served.add(str(i), [i + 1] * 12, picture(0, 2, tokens=tokens, parts=tokens))
    assert sum(entry.num_parts for step in served.drain() for entry in step) == sum(order)
    served.add("again", [5] * 12, picture(0, 2, tokens=9, parts=9))
    served.drain()
    assert not served.memory.encoder_cache.encodings


def test_encoding_is_cut_to_fit_while_neighbours_go_on() -> None:
    """A part counts as 4 tokens: a step of 8 encodes two of five, and the row waits for the last one."""
    served = Served(memory(max_num_batched_tokens=8), budget=8)
    served.add("neighbour", [9] * 4, max_tokens=8)
    served.step()
    served.add("a", prompt(16), picture(0, 0, parts=5))
    told = [served.step() for _ in range(3)]
    assert [[(one.first_part, one.num_parts) for one in step] for step in told] == [[(0, 2)], [(2, 2)], [(4, 1)]]
    rows = [[len(row.tokens) for row in plan.slices] for plan in served.plans[1:4]]
    assert rows == [[1], [1], [1, 7]]
    served.drain()


@pytest.mark.parametrize(("mode", "layers"), [("pages", (SELF,)), ("inside", (SELF,)), ("pages", (SELF, CROSS))])
def test_one_picture_at_a_time_is_left_in_parts(mode: str, layers: tuple[LayerSpec, ...]) -> None:
    """Whoever is asked for first: one that doesn't fit into a step waits until the one that is in parts is encoded, or
    given up; one that fits doesn't wait."""
    served = Served(memory(spec(*layers), vision_cache=mode, max_num_batched_tokens=12), budget=12)
    for number, parts in enumerate((7, 5, 2)):
        served.add(str(number), prompt(12), picture(number, 0, parts=parts))
    assert [(entry.first_part, entry.num_parts) for entry in served.step()] == [(0, 3)]
    _, second, third = (request.live_seqs[0] for request in served.engine.requests.values())
    made = served.memory
    for seq in (second, third):
        assert made.grow(seq, 12)
    assert made.plan_encoding(second, 12, 3) == (0, 0)
    assert made.plan_encoding(third, 12, 3) == (12, 2)
    made.undo_encoding()
    served.engine.abort("0")
    assert made.plan_encoding(second, 12, 3) == (0, 3)
    made.undo_encoding()
    served.drain()


def test_a_chunk_ends_before_a_picture_that_is_kept_nowhere_and_does_not_fit() -> None:
    """But for a prompt whose tokens attend both ways: its pictures are encoded together."""
    for both_ways, encoded, rows in ((False, [[3], [2, 2]], [8, 16]), (True, [[3, 2, 2]], [24])):
        served = Served(
            memory(spec(vision=replace(EYES, bidirectional_prompt=both_ways)), vision_cache="off", budget=24), budget=24
        )
        served.memory.kv_config = replace(served.memory.kv_config, part_tokens=6)
        served.engine.scheduler.encoder_budget = EncoderBudget(served.memory, 24)
        served.add("a", prompt(24), picture(0, 0, parts=3), picture(1, 8, parts=2), picture(2, 16, 4, parts=2))
        told = served.drain()
        assert [[entry.num_parts for entry in step] for step in told if step] == encoded
        assert [len(row.tokens) for plan in served.plans for row in plan.slices][: len(rows)] == rows


def test_which_one_goes_first_depends_on_the_seed_alone() -> None:
    def left(seed: int) -> list[int]:
        made = memory(page_sizes="own", tokens=32)
        made.encoder_cache.seed = seed.to_bytes(8, "little")
        [g] = made.encoder_cache.image_policies
        served = Served(made)
        served.add("a", prompt(28), *(picture(i, 8 * i, 4) for i in range(3)), max_tokens=1)
        seq = served.engine.requests["a"].live_seqs[0]
        assert isinstance(made.admit([seq], 28), list)  # it leaves with all of its pictures at once
        for i in range(3):
            made.page_pool.publish(g, made.get_placement(seq).tables[g][i], KEYS[i] + bytes(4))
            made.encoder_cache.page_counts[g, KEYS[i]] = 1
        made.free(seq)
        queue = [pool.cached for pool in made.page_pool.size_classes if g in pool.groups]  # type: ignore[union-attr]
        keys = [made.page_pool.size_class_of[g].keys[page][1][:-4] for page in queue[0]]  # type: ignore[union-attr, index]
        return [KEYS.index(key) for key in keys]

    orders = {tuple(left(seed)) for seed in range(8)}
    assert left(3) == left(3)
    assert len(orders) > 2


def test_prompts_of_like_tokens_and_other_pictures_share_only_what_lies_before_these() -> None:
    for model in (spec(), spec(SELF, CROSS)):
        served = Served(memory(model), budget=32)
        tokens = 8 if model.images_replace_tokens else 1
        hits = []
        for number in (0, 1, 0):
            before = served.memory.account().sharing.hits
            served.add(str(len(hits)), prompt(24), picture(number, 9, tokens, rows=8))
            served.drain()
            hits.append(served.memory.account().sharing.hits - before)
        assert hits == [0, 8, 20]
        assert served.memory.account().sharing.encoder_runs == 2


def test_where_tokens_attend_both_ways_a_prompt_is_computed_in_one_step() -> None:
    model = spec(vision=replace(EYES, bidirectional_prompt=True))
    served = Served(memory(model))
    served.add("old", [7] * 10, max_tokens=4)
    served.step()
    served.add("a", prompt(16), picture(0, 2, parts=6))
    served.drain()
    rows = [(row.start, len(row.tokens)) for plan in served.plans for row in plan.slices if row.slot == 2]
    assert rows[0] == (0, 16)
    for end in (20, 21):  # alike up to a page and more, and then not
        served.add(str(end), [*prompt(14), end])
        served.drain()
    assert served.memory.account().sharing.hits == 0
    with pytest.raises(PromptTooLong, match=r"17 tokens, which attend to one another both ways.* 16 at most"):
        served.add("long", prompt(17))
    with pytest.raises(InputError, match="prompt_logprobs"):
        served.add("scored", prompt(8), prompt_logprobs=1)


@pytest.mark.parametrize(("window", "found"), [(None, (20, 0, 20)), (6, (0, 0, 0))])
def test_where_tokens_attend_both_ways_only_the_very_same_prompt_is_found(
    window: int | None, found: tuple[int, ...]
) -> None:
    """With the same images; and none at all where layers have windows."""
    layers = (SELF, replace(SELF, window=window))
    made = memory(spec(*layers, vision=replace(EYES, bidirectional_prompt=True)), budget=32)
    served, hits = Served(made, budget=32), list[int]()
    served.add("first", prompt(23), picture(0, 2))
    served.drain()
    for number in (0, 1, 0):
        before = made.account().sharing.hits
        served.add(str(len(hits)), prompt(23), picture(number, 2))
        served.drain()
        hits.append(made.account().sharing.hits - before)
    assert tuple(hits) == found


@pytest.mark.parametrize("model", [spec(), spec(SELF, CROSS)], ids=["rows", "cross"])
def test_pages_of_pictures_are_not_swapped(model: ModelSpec) -> None:
    """They are found again, or encoded again."""
    served = Served(memory(model, swap_gib=0.001))
    served.engine.scheduler.preemption = "swap"
    served.add("a", prompt(12), picture(0, 2, 8 if model.images_replace_tokens else 1, rows=8), max_tokens=9)
    for _ in range(3):
        served.step()
    served.engine.scheduler._preempt(next(iter(served.engine.scheduler.running)))
    served.drain()
    moved = {
        type(entry): entry.group for plan in served.plans for entry in plan.page_ops if hasattr(entry, "host_page")
    }
    assert len(moved) == 2
    kinds = [group.kind for group in served.memory.kv_config.groups]
    assert {kinds[group] for group in moved.values()} == {"full"}


def test_without_caching_no_picture_is_kept_and_one_at_a_time_is_shared() -> None:
    served = Served(memory(enable_prefix_caching=False), budget=48)
    for turn in range(2):
        for i in range(3):
            served.add(f"{turn}-{i}", [i + 1] * 12, picture(0, 2, parts=3))
        served.drain()
        assert served.memory.account().sharing.encoder_runs == turn + 1
    assert served.memory.account().usage.cached == 0


def test_what_has_no_place_is_refused() -> None:
    blind = Served(memory(ModelSpec("echo", (SELF,), 64, 256, 8, 1, 8, 1)))
    with pytest.raises(InputError, match="1 images, and this model"):
        blind.add("a", prompt(), picture(0, 2))
    served = Served(memory())
    for wrong in ([picture(0, 20)], [picture(0, 2), picture(1, 8)], [picture(0, 2, 8, rows=4)]):
        with pytest.raises(InputError, match="image"):
            served.add("a", prompt(), *wrong)
    with pytest.raises(PromptTooLong):  # more pages than a table of 8 pictures has
        Served(memory(max_images=1)).add("a", prompt(60), *(picture(i, 10 * i) for i in range(5)))
    assert not served.runner.pixels


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": "virtual"}, "takes images"),
        ({"memory": "orca-max"}, "takes images"),
        ({"page_sizes": "gcd"}, "gcd"),
        ({"vision_cache": "inside"}, "an image embedding has 512 bytes: more than the 64"),
        ({"vision_cache": "none"}, "--vision-cache is 'none'"),
        ({"max_images": -1}, "--max-images is -1"),
    ],
)
def test_settings_that_are_none_for_pictures_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        memory(spec(vision=replace(EYES, embed_dim=256)), **settings)


def test_uniform_pages_waste_what_the_paper_says() -> None:
    """Llama 3.2 Vision on MMMU-pro: 43 tokens and 6,193 rows, 79.6 % (Jenga §3.2)."""
    layers = tuple(LayerSpec(8, 128, is_cross_attention=i % 5 == 3) for i in range(40))
    model = ModelSpec("mllama", layers, 64, 8192, 4096, 32, 8, 1, vision=VisionSpec(4096, 6404, 1))
    wasted = {}
    for name in ("paged", "uniform"):
        config = EngineConfig(memory=name, page_size=1, max_num_seqs=2, max_num_batched_tokens=8192, swap_gib=0)
        made = build_memory(config, model, MemorySize(8192, 8192, 2))
        seq = Sequence(1, [1] * 43)
        seq.images = (ImageItem(KEYS[0], 0, 1, 6193),)
        assert made.fits([43], 43, seq.images)
        assert made.admit([seq], 8192)
        seq.planned = seq.computed = 43
        usage = made.account().usage
        wasted[name] = round(usage.internal / (usage.used + usage.internal), 4)
        made.check()
    assert wasted == {"paged": 0, "uniform": 0.7959}


def test_text_before_a_picture_is_found_whether_a_prompt_with_one_left_it_or_not() -> None:
    for registered in (False, True):
        for first, second in (((), (0,)), ((0,), ()), ((0,), (1,))):
            made = memory(prefix_tokens=32, enable_prefix_caching=not registered)
            served = Served(made, budget=48)
            if registered:
                served.engine.register_prefix("all", prompt(14))
            else:
                served.add("first", prompt(24), *(picture(one, 16) for one in first))
            served.drain()
            served.add("second", prompt(24), *(picture(one, 16) for one in second))
            served.drain()
            assert made.prefix_cache.hits == (14 if registered else 16)


class Holding(EchoRunner):
    """It asks for the pixels of what it is to encode."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth, vocab_size=64)
        self.media: dict[int, tuple[ImageItem, ...]] = {}

    def submit(self, plan: StepPlan) -> int:
        self.media |= {birth.slot: birth.images for birth in plan.new_slots}
        for entry in plan.page_ops:
            if isinstance(entry, ImageEncoding) and not entry.first_part:
                assert self.media[entry.slot][entry.image_index].key in self.pixels, "it was forgotten"
        return super().submit(plan)


@pytest.mark.parametrize(("mode", "tokens"), [("pages", 24), ("inside", 28)])
def test_who_is_aborted_between_a_step_that_came_to_nothing_and_the_next_is_not_encoded(mode: str, tokens: int) -> None:
    """There is no room for a younger sequence until a step in flight is done: that one's picture was to be encoded."""
    made = memory(tokens=tokens, enable_prefix_caching=False, vision_cache=mode)
    served = Served(made, runner=Holding(3))
    engine = served.engine
    served.add("a", prompt(20), picture(0, 0, parts=12), picture(1, 8, parts=4))
    served.add("b", prompt(2), max_tokens=20)
    served.add("c", prompt(3))
    engine.step()
    engine.step()
    assert not engine.requests["a"].live_seqs[0].not_in_flight
    engine.abort("a")
    while engine.has_unfinished_requests:
        engine.step()
    made.check()
    assert not served.runner.pixels


def test_pictures_without_pixels_are_refused_unless_the_runner_has_them() -> None:
    served = Served(memory())
    for _ in range(2):
        with pytest.raises(InputError, match="the pixels of image 0 are missing"):
            served.engine.add("a", prompt(), SamplingParams(max_tokens=2), images=(picture(0, 2),))
        assert not served.engine.requests
    served.add("b", prompt(), picture(0, 2))
    served.engine.add("c", prompt(), SamplingParams(max_tokens=2), images=(picture(0, 2),))
    served.drain()


def test_a_step_encodes_no_more_parts_than_its_tokens_stand_for() -> None:
    """Parts of 4 rows, cheap ones, of pictures of 16: of 8 tokens a step encodes two pictures', and one beyond."""
    made = memory(spec(vision=replace(EYES, part_tokens=1, part_embeds=4)))
    assert EncoderBudget(made, 8).max_parts == 6
    assert EncoderBudget(made, 2).max_parts == 2
    assert EncoderBudget(memory(), 8).max_parts == 2
