"""Bugs planted in src/quire/models and src/quire/weights: how a model's config and weights are read."""

from __future__ import annotations

from bugs import Bug, bug

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
}
