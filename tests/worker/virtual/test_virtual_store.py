"""The store of virtual memory: what lies where, what becomes of a map that fails half-way, and reads of what isn't
mapped."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from memories import VIRTUAL, Build
from stored import PAGE, store_of

from quire.protocol.step_plan import TableWrite
from quire.worker.virtual import DriverError
from quire.worker.virtual.memfd import MemfdDriver
from quire.worker.virtual.store import VirtualStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")


def geometry(name: str = "virtual-16"):
    return VIRTUAL[name](Build(tokens=128, max_seqs=3, host=4, device_page=PAGE)).kv_config


class Failing(MemfdDriver):
    """The map that is `left` away fails, once."""

    left = -1

    def map(self, address: int, page: int, count: int = 1) -> None:
        self.left -= 1
        if self.left == 0:
            raise DriverError("mmap", "it was asked to")
        super().map(address, page, count)


def lying(store: VirtualStore, slot: int) -> list[int]:
    return store.mapped_pages[0][slot].tolist()


@pytest.mark.parametrize("k", range(1, 9))
def test_a_map_that_fails_half_way_leaves_no_half_page(k: int) -> None:
    """Whole pages are mapped before it, none of its own; and the same journal does the rest."""
    driver = Failing(PAGE)
    store = store_of(geometry(), driver)
    parts, mapped = store.kv_config.groups[0].parts, driver.counters.mapped
    assert parts == 4
    driver.left = k
    journal = (TableWrite(1, 0, 0, (3, 2)),)
    with pytest.raises(DriverError, match="it was asked to"):
        store.apply_page_ops(journal)
    whole = (k - 1) // parts
    assert lying(store, 1) == [3, 0, 0] if whole else [0, 0, 0]
    assert driver.counters.mapped - mapped == whole * parts
    store.apply_page_ops(journal)
    assert lying(store, 1) == [3, 2, 0]
    store.close()


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from memories import VIRTUAL, Build
from stored import PAGE, store_of
from quire.protocol.step_plan import TableWrite
store = store_of(VIRTUAL["virtual-16"](Build(tokens=128, max_seqs=3, device_page=PAGE)).kv_config)
store.apply_page_ops((TableWrite(1, 0, 0, (1,)), TableWrite(2, 0, 0, (2, 3, 4))))
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
    path = [str(Path(__file__).parents[2] / "conformance")]
    code = PROGRAM.format(path=path, overrun=overrun)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    wanted = ("0.0\n", -signal.SIGSEGV) if faults else ("0.0\nsurvived\n", 0)
    assert (done.stdout, done.returncode) == wanted, done.stderr
