"""The store of virtual memory: what lies where, what becomes of a map that fails half-way, and reads of what isn't
mapped."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memories import VIRTUAL, Build
from stored import PAGE, store_of

from quire.data.runner.virtual import DriverError
from quire.data.runner.virtual.memfd import MemfdDriver
from quire.data.runner.virtual.store import VirtualStore
from quire.vocabulary.plan import Table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")


def geometry(name: str = "virtual-16"):
    return VIRTUAL[name](Build(tokens=128, max_seqs=3, host=4, device_page=PAGE)).geometry


class Failing(MemfdDriver):
    """The map that is `left` away fails, once."""

    left = -1

    def map(self, address: int, page: int, count: int = 1) -> None:
        self.left -= 1
        if self.left == 0:
            raise DriverError("mmap", "it was asked to")
        super().map(address, page, count)


def lying(store: VirtualStore, slot: int) -> list[int]:
    return store.lying[0][slot].tolist()


def test_of_several_tables_for_a_place_the_last_one_counts() -> None:
    store = store_of(geometry())
    parts = store.geometry.groups[0].parts
    store.replay((Table(1, 0, 0, (1, 2, 3)), Table(1, 0, 1, (4,)), Table(1, 0, 1, (2,))))
    assert lying(store, 1) == [1, 2, 3]
    assert (store.mapped.maps, store.mapped.unmaps) == (3 * parts, 0)
    store.replay((Table(1, 0, 0, (0, 5)), Table(2, 0, 0, (2,))))
    assert (lying(store, 1), lying(store, 2)) == ([1, 5, 3], [2, 0, 0])  # a page that is dropped lies on
    assert (store.mapped.maps, store.mapped.unmaps) == (5 * parts, parts)
    store.replay((Table(1, 0, 0, (1, 5, 3)),))
    assert store.mapped.maps == 5 * parts
    store.close()


@pytest.mark.parametrize("k", range(1, 9))
def test_a_map_that_fails_half_way_leaves_no_half_page(k: int) -> None:
    """Whole pages are mapped before it, none of its own; and the same journal does the rest."""
    driver = Failing(PAGE)
    store = store_of(geometry(), driver)
    parts, mapped = store.geometry.groups[0].parts, driver.counters.mapped
    assert parts == 4
    driver.left = k
    journal = (Table(1, 0, 0, (3, 2)),)
    with pytest.raises(DriverError, match="it was asked to"):
        store.replay(journal)
    whole = (k - 1) // parts
    assert lying(store, 1) == [3, 0, 0] if whole else [0, 0, 0]
    assert driver.counters.mapped - mapped == whole * parts
    store.replay(journal)
    assert lying(store, 1) == [3, 2, 0]
    store.close()


def test_a_page_that_cannot_take_anothers_place() -> None:
    """The place is bare then, and known to be."""
    driver = Failing(PAGE)
    store = store_of(geometry(), driver)
    store.replay((Table(1, 0, 0, (1,)),))
    driver.left = 3
    with pytest.raises(DriverError):
        store.replay((Table(1, 0, 0, (2,)),))
    assert lying(store, 1) == [0, 0, 0]
    store.replay((Table(1, 0, 0, (1,)),))
    assert lying(store, 1) == [1, 0, 0]
    store.close()


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from memories import VIRTUAL, Build
from stored import PAGE, store_of
from quire.vocabulary.plan import Table
store = store_of(VIRTUAL["virtual-16"](Build(tokens=128, max_seqs=3, device_page=PAGE)).geometry)
store.replay((Table(1, 0, 0, (1,)), Table(2, 0, 0, (2, 3, 4))))
keys, values = store.caches[1].keys, store.caches[1].values
print(float(keys[1, 0, :16].sum() + values[2, 0, :48].sum() + keys[0].sum()), flush=True)
{overrun}
print("survived")
"""


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("overrun", "faults"),
    [
        ("keys[1, 0, :16].sum()", False),
        ("keys[1, 0, 15:17].sum()", True),
        ("values[1, 0, 16] = 1", True),
        ("values[3].sum()", True),
        ("values[2].sum()", False),
    ],
    ids=["all that is mapped", "a token past it", "a write past it", "a slot that nobody had", "a full slot"],
)
def test_an_overrun_faults(overrun: str, faults: bool) -> None:
    """Behind the end of a slot's mapped pages nothing can be read or written."""
    path = [str(Path(__file__).parents[3] / "conformance")]
    code = PROGRAM.format(path=path, overrun=overrun)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    wanted = ("0.0\n", -signal.SIGSEGV) if faults else ("0.0\nsurvived\n", 0)
    assert (done.stdout, done.returncode) == wanted, done.stderr


def test_scratch_is_mapped_from_the_start() -> None:
    """Slot 0 has page 0 at each of its places, which rows that are padding use."""
    for name in VIRTUAL:
        store = store_of(geometry(name))
        for cache in store.caches.values():
            assert torch.equal(cache.keys[0], torch.zeros_like(cache.keys[0]))
            cache.values[0] = 7
        store.clear_scratch()
        assert not any(bool(cache.values[0].any()) for cache in store.caches.values())
        del cache
        store.close()
