"""Bugs planted in src/quire/models and src/quire/weights: how a model's config and weights are read; in what gpt-oss
has beyond other models; and in the choice of tiles."""

from __future__ import annotations

from bugs import Bug, bug

NOT_CLOSE = "Tensor-likes are not close"
OTHER_NUMBERS = r"assert \[-.*\] == approx\(\["

BUGS: dict[str, Bug] = {
    "a head counts only if none of its numbers is the embedding's": bug(
        "weights/checkpoint_files.py",
        "return any(bool((first[rows].float() != second[rows].float()).any()) for rows in blocks)",
        "return all(bool((first[rows].float() != second[rows].float()).all()) for rows in blocks)",
        "tests/weights/test_own_head.py::test_a_head_that_differs_counts[True-llama]",
        OTHER_NUMBERS,
    ),
    "whole heads are rotated where a share is": bug(
        "layers/rope_config.py",
        "return int(head_dim * self.partial_rotary_factor)",
        "return head_dim",
        "tests/weights/test_own_head.py::test_a_part_of_each_head_is_rotated[plain-one rank]",
        OTHER_NUMBERS,
    ),
    "rows of heads that are rotated in part keep their order": bug(
        "layers/rope_config.py",
        "return [*range(half), *first, *range(half, 2 * half), *second]",
        "return [*range(2 * half), *first, *second]",
        "tests/weights/test_own_head.py::test_a_part_of_each_head_is_rotated[plain-one rank]",
        OTHER_NUMBERS,
    ),
    "gate and up of stacked experts are exchanged": bug(
        "weights/stacked_tensors.py",
        'halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}',
        'halves = {"gate": slice(1, None, 2), "up": slice(0, None, 2)}',
        "tests/models/test_against_transformers.py::test_logits_and_parameter_counts[gpt_oss]",
        NOT_CLOSE,
    ),
    "every rank adds the experts' bias": bug(
        "layers/moe.py",
        "        if not self.down.column_shard.shard.is_first_tp_rank:\n            self.down.bias = None\n",
        "",
        "tests/models/test_shards.py::test_ranks_together_say_what_transformers_says[gpt_oss]",
        NOT_CLOSE,
    ),
    "every rank has the first experts": bug(
        "layers/moe.py",
        "PackedExperts(gate_up, down, self.own.start)",
        "PackedExperts(gate_up, down)",
        "tests/models/test_shards.py::test_ranks_with_whole_experts_say_what_transformers_says[mixtral]",
        NOT_CLOSE,
    ),
    "pairs that a rank does not compute are added up": bug(
        "kernels/triton/fused_moe.py",
        "return self.expert_ids if self.share < 1 else None",
        "return None",
        "tests/kernels/triton/test_experts.py::test_ranks_with_whole_experts[plain-False-dtype0-True]",
        r"assert tensor\(True\) == tensor\(False\)",
    ),
    "a card has the table of the greatest bandwidth": bug(
        "kernels/triton/tiles.py",
        "abs(math.log(ratio))",
        "math.log(ratio)",
        "tests/kernels/triton/test_tiles.py::test_a_card_has_its_table_or_the_nearest_one",
        "assert 'H200' == 'H100'",
    ),
    "layers attend without their sinks": bug(
        "worker/model_runner.py",
        "replace(store.caches[layer], sinks=weights)",
        "replace(store.caches[layer], sinks=None)",
        "tests/test_unlike_logits.py::test_logits_of_scored_prompts[gpt_oss]",
        NOT_CLOSE,
    ),
}
