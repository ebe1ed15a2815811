"""Bugs planted in src/quire/memory: what is published of tokens that are taken back or that a draft model lacks."""

from __future__ import annotations

from bugs import Bug, bug

BUGS: dict[str, Bug] = {
    "a draft page published too early": bug(
        "memory/paged.py",
        "end = seq.drafted // unit * unit",
        "end = computed // unit * unit",
        "tests/memory/test_drafting.py::test_a_page_is_published_when_its_model_has_computed_it[draft]",
        "44 draft tokens are published, and 4 are computed",
    ),
    "a rejected page published": bug(
        "memory/paged.py",
        "seq_pages, computed, unit = self.seq_pages[seq.id], seq.computed, self.key_tokens",
        "seq_pages, computed, unit = self.seq_pages[seq.id], self.seq_pages[seq.id].requested_tokens, self.key_tokens",
        "tests/memory/test_rollback.py::test_rejected_tokens_leave_nothing[paged-4]",
        "a page of rejected tokens is published",
    ),
}
