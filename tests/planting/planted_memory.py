"""Bugs planted in src/quire/memory: what is published of tokens that are taken back or that a draft model lacks."""

from __future__ import annotations

from bugs import Bug, bug

BUGS: dict[str, Bug] = {
    "a draft page published too early": bug(
        "memory/paged.py",
        "end = seq.drafted // unit * unit",
        "end = seq.computed // unit * unit",
        "tests/memory/test_drafting.py::test_a_page_is_published_when_its_model_has_computed_it[draft]",
        "44 draft tokens are published, and 4 are computed",
    ),
    "a rejected page published": bug(
        "memory/paged.py",
        "        seq_pages.requested_tokens = min(seq_pages.requested_tokens, seq.planned)\n        if seq.drafted",
        "        seq.computed = seq_pages.requested_tokens\n        if seq.drafted",
        "tests/memory/test_rollback.py::test_rejected_tokens_leave_nothing[paged-4]",
        "a page of rejected tokens is published",
    ),
}
