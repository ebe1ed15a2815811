"""Layer types that aren't quire's: offered by an installed package, and named where they contradict themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from memories import Build, paged
from test_invariants import sequence, serve

from quire.errors import StartupError
from quire.memory.paged import PagedMemory
from quire.memory.policies import ChunkedPolicy, FullPolicy, LayerPolicy, WindowPolicy
from quire.protocol.model_spec import LayerSpec
from quire.protocol.sequence import Sequence

PACKAGE = """
from quire.memory.policies import FullPolicy


class Newest(FullPolicy):
    '''Layers that see the newest eight tokens, and the one before.'''

    def reads(self, seq, start, end):
        return range(self.group.num_full_pages(max(0, start - 8)), self.group.num_pages(end))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, as far as Python can tell."""
    (tmp_path / "newest.py").write_text(PACKAGE)
    (tmp_path / "newest-1.0.dist-info").mkdir()
    (tmp_path / "newest-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: newest\nVersion: 1.0\n")
    (tmp_path / "newest-1.0.dist-info" / "entry_points.txt").write_text("[quire.policies]\nnewest = newest:Newest\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("package")
def test_an_installed_package_offers_a_policy() -> None:
    memory = paged((LayerSpec(1, 4, policy="newest"), None), page_size=4)(Build(tokens=512))
    assert [group.kind for group in memory.kv_config.groups] == ["newest", "full"]
    seq = sequence(1, 40)
    assert serve(memory, seq) == 0
    memory.check()
    assert [sum(map(bool, table)) for table in memory.get_placement(seq).tables] == [2, 10]
    assert serve(memory, sequence(2, 41)) == 40


def test_a_type_that_nobody_offers_is_refused_with_its_name() -> None:
    with pytest.raises(StartupError, match=r"layers of the type 'newest'.*quire\.policies"):
        paged((LayerSpec(1, 4, policy="newest"), None), page_size=4)(Build())


class BeyondItsTable(FullPolicy):
    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        return range(self.group.num_pages(end) + 1)


class WritesUnread(FullPolicy):
    def writes(self, seq: Sequence | None, start: int, end: int) -> range:
        return range(self.group.num_full_pages(start), self.group.num_pages(end + 1))


class RequiresUnread(WindowPolicy):
    def required(self, seq: Sequence | None, hit: int) -> range:
        return range(self.group.num_pages(hit))


class RequiresTheFuture(FullPolicy):
    def required(self, seq: Sequence | None, hit: int) -> range:
        return range(self.group.num_pages(hit + 4))


class ComesBack(FullPolicy):
    """Every tenth token sees all."""

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        return range(0 if start % 10 == 0 else self.group.num_full_pages(start), self.group.num_pages(end))


class HoldsMore(ChunkedPolicy):
    def starts(self) -> range:
        return FullPolicy.starts(self)


class EndsTooEarly(ChunkedPolicy):
    @property
    def border(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (BeyondItsTable, "reads pages 0 to 13 for tokens 37 to 45, of a table of 12"),
        (WritesUnread, "writes pages 0 to 3 for tokens 0 to 8, and reads pages 0 to 2"),
        (RequiresUnread, r"requires pages 0 to 3 of a prefix of \d+ tokens, and reads pages 1 to 3 after it"),
        (RequiresTheFuture, "requires pages 0 to 1 of a prefix of 0 tokens"),
        (ComesBack, "reads pages 0 to 3 after tokens 9 to 10, when only pages 2 to 3 are held"),
        (HoldsMore, "holds .* are the most by its `starts`"),
        (EndsTooEarly, "requires pages 0 to 1 after 1 times its border of 1 pages"),
    ],
)
def test_check_names_a_policy_that_contradicts_itself(kind: type[LayerPolicy], said: str) -> None:
    geometry = paged((LayerSpec(1, 4, chunk=16),), page_size=4)(Build()).kv_config
    groups = tuple(replace(group, kind="own", window=6, chunk=16) for group in geometry.groups)
    if issubclass(kind, WindowPolicy):
        groups = tuple(replace(group, chunk=None) for group in groups)
    memory = PagedMemory(replace(geometry, groups=groups), max_step_tokens=8, policies={"own": kind})
    with pytest.raises(AssertionError, match=f"{kind.__name__}, of group 0 of the kind 'own', {said}"):
        memory.check()
