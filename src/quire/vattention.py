"""vAttention's interface for a serving framework (Table 4), with its names: `init`, `alloc_reqid`, `free_reqid` and
`step`, over any driver of virtual memory.

It knows pages and lengths; no engine, scheduler or model. Pages are counted by the same PagePool as in the engine. The
rules for reqIds are separate, and differ from the engine's memory `virtual` in one point: there an empty page may stay
mapped where it was last used, since a plan determines what may still be read. Here there is no plan, so a page is
mapped under one reqId, and unmapped before another one gets it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

from quire.errors import InputError, short_repr
from quire.memory.page_pool import PagePool
from quire.memory.virtual.buffers import MAX_LAYERS, BufferLayout, plan_buffers
from quire.worker.virtual import Driver, DriverError, PageRun, map_all, open_driver

if TYPE_CHECKING:
    import torch

FAILED = -1
LOW_WATER_DIVISOR = 10  # 1 / 10 of all pages is kept unmapped, if inactive reqIds have pages to reclaim (§6.2.2)
MEAN_WINDOW = 16  # weight of the moving mean of the pages of new requests: about the last 16 requests
LIMITS = {"N": MAX_LAYERS, "B": 2**16, "L": 2**31, "H": 2**16, "D": 2**16, "P": 8, "page_size": 2**31, "pages": 2**31}
DEVICE = re.compile(r"cpu|cuda(:\d{1,4})?", re.ASCII)
DTYPES = {1: "uint8", 2: "float16", 4: "float32", 8: "float64"}  # the defaults, by P


class Counts(NamedTuple):
    """Numbers of pages, each counted once for all tensors.

    `free` pages are not mapped, `cached` ones are mapped under inactive reqIds, `active` ones under active reqIds.
    Since the start `in_step` pages were mapped in a step, `ahead` before one, and `reclaimed` ones were unmapped for
    use elsewhere. `failures` counts failed steps, and `seconds` is the time of all steps."""

    free: int
    cached: int
    active: int
    in_step: int
    ahead: int
    reclaimed: int
    failures: int
    seconds: float


def init(
    N: int, B: int, L: int, H: int, D: int, P: int, page_size: int, *, pages: int, layout: str = "layer",
    device: str = "cpu", dtype: torch.dtype | None = None, background: bool = False, driver: Driver | None = None,
) -> VAttention:  # fmt: skip
    """Return a vAttention for a worker with `N` layers, at most `B` requests of at most `L` tokens, and `H` KV heads of
    `D` numbers of `P` bytes.

    Every buffer gets `pages` pages of `page_size` bytes, which are made now and mapped by `step`. `layout` determines
    the layers that share a buffer: "layer" is the paper's, "sliced" puts all into one, "sliced:4" four.

    With `background` a thread maps ahead while an iteration runs (§6.2.1); without it, call `map_ahead`. `driver`
    replaces the device's own, and is closed with the result. InputError for invalid sizes; StartupError for a layout or
    page size that is not available here, or too few addresses or too little memory."""
    given = {"N": N, "B": B, "L": L, "H": H, "D": D, "P": P, "page_size": page_size, "pages": pages}
    for name, value in given.items():
        if not isinstance(value, int) or not 1 <= value <= LIMITS[name]:
            raise InputError(f"{name} is {short_repr(value)}; it must be from 1 to {LIMITS[name]:,}", name)
    if not DEVICE.fullmatch(device):
        raise InputError(f"device is {short_repr(device)}; it must be 'cpu', 'cuda' or 'cuda:N'", "device")
    if P not in DTYPES or (dtype is not None and dtype.itemsize != P):
        of = "any type of numbers" if dtype is None else f"{short_repr(dtype)}, a number of which has {dtype.itemsize}"
        raise InputError(f"P is {P} bytes, not those of {of}", "P")
    if driver is not None and driver.page != page_size:
        raise InputError(f"page_size is {page_size}; the driver's pages have {driver.page:,} bytes", "page_size")
    if page_size % P:
        raise InputError(f"page_size is {page_size}; it must be a multiple of P, {P} bytes", "page_size")
    buffers = plan_buffers(N, H * D * P, page_size, layout)
    if driver is None:
        if device == "cpu":
            from quire.worker.virtual.memfd import check_map_count

            check_map_count(2 * buffers.num_buffers * min(pages, B * (buffers.num_pages(L) + 1)))
        driver = open_driver(device, page_size)
    try:
        return VAttention(buffers, (B, L, H, D), P, pages, driver, dtype, background)
    except BaseException:
        driver.close()
        raise


class VAttention:
    """Virtual tensors and their reqIds, 0 to B - 1.

    `tensors` are the keys and the values of each layer, [B, L, H, D]; empty over a driver without bytes. Only the
    tokens of a reqId before its length in the last `step` may be accessed. Call the methods from one thread."""

    def __init__(
        self, buffers: BufferLayout, shape: tuple[int, int, int, int], itemsize: int, pages: int, driver: Driver,
        dtype: torch.dtype | None, background: bool,
    ) -> None:  # fmt: skip
        self.buffers, self.shape, self.itemsize, self.pages = buffers, shape, itemsize, pages
        self.driver, self.dtype = driver, dtype
        reqids, self.max_len = shape[:2]
        self.buffer_addresses = [
            driver.reserve(buffers.buffer_bytes(reqids, self.max_len)) for _ in range(buffers.num_buffers)
        ]
        driver.create(pages * buffers.num_buffers)
        once = driver.reserve(pages * buffers.num_buffers * buffers.buffer_page_bytes)
        driver.map(once, 0, pages * buffers.num_buffers)  # so that no page is zeroed, or first touched, in a step
        driver.unmap(once, pages * buffers.num_buffers)
        self.page_pool = PagePool([range(1, pages + 1)])
        self.mapped: list[list[int]] = [[] for _ in range(reqids)]  # the pages under each reqId, from its first token
        self.lengths = [0] * reqids
        self.inactive = dict.fromkeys(range(reqids))  # the longest unused first
        self.unstepped_reqids: set[int] = set()  # allocated, and without a step with tokens since
        self.first_pages = 0.0  # mean pages of a request in its first step
        self.in_step = self.ahead = self.reclaimed = self.failures = 0
        self.seconds = 0.0
        self.tensors = self._make_tensors()
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "quire-map-ahead", self._init_thread) if background else None
        self._job: Future[None] | None = None

    # Table 4

    def alloc_reqid(self, length: int = 0) -> int:
        """Activate an inactive reqId and return it; -1 if all are active.

        The choice is the reqId with the fewest pages that suffice for `length` tokens, else the one with the most
        pages; without a `length`, for those of a mean request."""
        self._wait_for_mapping()
        if not isinstance(length, int) or not 0 <= length <= self.max_len:
            raise InputError(
                f"a length of {short_repr(length)} tokens; it must be from 0 to L = {self.max_len:,}", "length"
            )
        if not self.inactive:
            return FAILED
        reqid = self._choose_reqid(self.buffers.num_pages(length) if length else self._expected_pages())
        del self.inactive[reqid]
        self.unstepped_reqids.add(reqid)
        return reqid

    def free_reqid(self, reqid: int) -> None:
        """Deactivate a reqId; its pages stay mapped for the next request (§6.2.2)."""
        self._wait_for_mapping()
        if not isinstance(reqid, int) or not 0 <= reqid < self.shape[0]:
            raise InputError(f"no reqId is {short_repr(reqid)}; they are 0 to {self.shape[0] - 1}", "reqid")
        if reqid in self.inactive:
            raise InputError(f"reqId {reqid} is not active", "reqid")
        self.lengths[reqid] = 0
        self.inactive[reqid] = None

    def step(self, seq_lens: Sequence[int]) -> int:
        """Map pages for seq_lens[r] tokens of each reqId r, and return 0.

        -1: there are too few pages, even if no others were mapped, and nothing has changed: free a reqId and try again.
        DriverError if the system refuses a mapping: then no page of this step is mapped, and only lengths that
        decreased have changed."""
        began = time.perf_counter()
        self._wait_for_mapping()
        self._check_lengths(seq_lens)
        needs = {reqid: self.buffers.num_pages(seq_lens[reqid]) for reqid in range(len(seq_lens))}
        if sum(needs.values()) > self.pages:
            self.failures += 1
            return FAILED
        wants = [(reqid, need - len(self.mapped[reqid])) for reqid, need in needs.items()]
        self.lengths = list(map(min, self.lengths, seq_lens))
        self.in_step += self._map_needed([(reqid, count) for reqid, count in wants if count > 0], seq_lens)
        self.lengths = list(seq_lens)
        for reqid in [reqid for reqid in self.unstepped_reqids if seq_lens[reqid]]:
            self.unstepped_reqids.remove(reqid)
            weight = MEAN_WINDOW if self.first_pages else 1
            self.first_pages += (needs[reqid] - self.first_pages) / weight
        if self._thread is not None:
            self._job = self._thread.submit(self._map_ahead)
        self.seconds += time.perf_counter() - began
        return 0

    # Besides Table 4

    def map_ahead(self) -> None:
        """Map what the next step needs if every request gets one token more, and a mean request's pages under the next
        reqId. Call it after an iteration was launched; with `background` a thread does it."""
        self._wait_for_mapping()
        self._map_ahead()

    def counts(self) -> Counts:
        """Return the numbers of pages by state now, and the counts so far."""
        self._wait_for_mapping()
        cached = sum(len(self.mapped[reqid]) for reqid in self.inactive)
        active = self.page_pool.used[0] - cached
        totals = self.in_step, self.ahead, self.reclaimed, self.failures, self.seconds
        return Counts(self._count_free(), cached, active, *totals)

    def close(self) -> None:
        """Release all memory; a second call does nothing. DriverError, which names them, while tensors made from these
        are in use; then nothing has changed."""
        if self._closed:
            return
        with contextlib.suppress(DriverError):
            self._wait_for_mapping()
        self.tensors = ()
        try:
            self.driver.close()
        except DriverError:
            self.tensors = self._make_tensors()
            raise
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown()

    def check(self) -> None:
        """Assert that every page is free or under one reqId, and that each reqId has the pages for its tokens."""
        self._wait_for_mapping()
        named: dict[int, int] = {}
        for page in (page for pages in self.mapped for page in pages):
            named[page] = named.get(page, 0) + 1
        assert all(count == 1 for count in named.values()), "a page is under two reqIds"
        self.page_pool.check([named])
        for reqid, length in enumerate(self.lengths):
            assert not (length and reqid in self.inactive), f"reqId {reqid} is inactive and has {length} tokens"
            assert len(self.mapped[reqid]) >= self.buffers.num_pages(length), f"reqId {reqid} has too few pages"

    # Pages

    def _map_ahead(self) -> None:
        wants = []
        for reqid, length in enumerate(self.lengths):
            if length and self.buffers.num_pages(min(length + 1, self.max_len)) > len(self.mapped[reqid]):
                wants.append((reqid, 1))
        if self._count_free() < len(wants) + self._low_water_pages():
            self._reclaim(len(wants) + self._low_water_pages(), self._inactive_keeps())
        self.ahead += self._map(wants[: self._count_free()])
        if self.inactive:
            reqid = self._choose_reqid(self._expected_pages())
            count = min(self._expected_pages() - len(self.mapped[reqid]), self._count_free() - self._low_water_pages())
            if count > 0:
                self.ahead += self._map([(reqid, count)])

    def _map_needed(self, wants: list[tuple[int, int]], lengths: Sequence[int]) -> int:
        """Map the wanted pages and return their number; reclaim pages that `lengths` do not need if necessary."""
        count = sum(count for _, count in wants)
        if self._count_free() < count + self._low_water_pages():
            self._reclaim(count + self._low_water_pages(), self._inactive_keeps())
        if self._count_free() < count:
            spare = [(reqid, self.buffers.num_pages(length)) for reqid, length in enumerate(lengths)]
            self._reclaim(count, sorted(spare, key=lambda one: one[0] not in self.inactive))
        return self._map(wants)

    def _map(self, wants: list[tuple[int, int]]) -> int:
        """Map `count` free pages after those of each wanted (reqid, count), or none on failure; return their number."""
        fresh, runs = [], list[PageRun]()
        for reqid, count in wants:
            pages = [self.page_pool.allocate_one(0) for _ in range(count)]
            fresh.append((reqid, pages))
            runs += self._mapping_runs(reqid, pages)
        try:
            map_all(self.driver, runs)
        except BaseException:
            self.page_pool.decref(0, [page for _, pages in fresh for page in pages])
            raise
        for reqid, pages in fresh:
            self.mapped[reqid] += pages
        return sum(count for _, count in wants)

    def _mapping_runs(self, reqid: int, pages: list[int]) -> Iterator[PageRun]:
        """Yield the mappings of these pages in each buffer, consecutive pages as one.

        The pages of one buffer have consecutive numbers in the driver."""
        starts = [i for i, page in enumerate(pages) if i == 0 or page != pages[i - 1] + 1]
        for part in range(len(self.buffer_addresses)):
            for start, end in zip(starts, [*starts[1:], len(pages)]):
                address = self._address_of(part, reqid, len(self.mapped[reqid]) + start)
                yield PageRun(address, part * self.pages + pages[start] - 1, end - start)

    def _address_of(self, buffer: int, reqid: int, at: int) -> int:
        return (
            self.buffer_addresses[buffer]
            + reqid * self.buffers.slot_bytes(self.max_len)
            + at * self.buffers.buffer_page_bytes
        )

    def _reclaim(self, wanted: int, spare: list[tuple[int, int]]) -> None:
        """Unmap pages until `wanted` are free, or each (reqid, keep) of `spare` has only `keep` pages left.

        Wait for the device first: work that was enqueued may still read the pages."""
        fenced = False
        for reqid, keep in spare:
            while self._count_free() < wanted and len(self.mapped[reqid]) > keep:
                if not fenced:
                    self.driver.fence()
                    fenced = True
                self._unmap_last(reqid)

    def _inactive_keeps(self) -> list[tuple[int, int]]:
        """Return the inactive reqIds with the pages to keep: a mean request's for the next reqId, else none."""
        if not self.inactive:
            return []
        following = self._choose_reqid(self._expected_pages())
        return [(reqid, self._expected_pages() if reqid == following else 0) for reqid in self.inactive]

    def _unmap_last(self, reqid: int) -> None:
        """Unmap and free the last page of a reqId; if a call fails, leave it mapped."""
        page, at = self.mapped[reqid][-1], len(self.mapped[reqid]) - 1
        done: list[PageRun] = []
        try:
            for part in range(len(self.buffer_addresses)):
                address = self._address_of(part, reqid, at)
                self.driver.unmap(address)
                done.append(PageRun(address, part * self.pages + page - 1))
        except BaseException:
            map_all(self.driver, done)
            raise
        self.mapped[reqid].pop()
        self.page_pool.decref(0, (page,))
        self.reclaimed += 1

    def _choose_reqid(self, need: int) -> int:
        """Return the inactive reqId with the fewest pages that suffice for `need`, else the one with the most."""
        enough = [reqid for reqid in self.inactive if len(self.mapped[reqid]) >= need]
        if enough:
            return min(enough, key=lambda reqid: (len(self.mapped[reqid]), reqid))
        return min(self.inactive, key=lambda reqid: (-len(self.mapped[reqid]), reqid))

    def _expected_pages(self) -> int:
        return max(round(self.first_pages), 1) if self.first_pages else 1

    def _count_free(self) -> int:
        return len(self.page_pool.size_classes[0].empty)

    def _low_water_pages(self) -> int:
        return self.pages // LOW_WATER_DIVISOR

    # Helpers

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        if len(lengths) != self.shape[0]:
            raise InputError(f"{len(lengths)} lengths; there must be one for each of B = {self.shape[0]}", "seq_lens")
        for reqid, length in enumerate(lengths):
            if not isinstance(length, int) or not 0 <= length <= self.max_len:
                cause = f"a length of {short_repr(length)} tokens for reqId {reqid}; it must be from 0 to L"
                raise InputError(f"{cause} = {self.max_len:,}", "seq_lens")
            if length and reqid in self.inactive:
                raise InputError(f"a length of {length} tokens for reqId {reqid}, which is not active", "seq_lens")

    def _make_tensors(self) -> tuple[torch.Tensor, ...]:
        if self.driver.device is None:
            return ()
        import torch

        buffers, item = self.buffers, self.itemsize
        dtype = self.dtype or getattr(torch, DTYPES[item])
        strides = buffers.slot_bytes(self.max_len) // item, buffers.stride // item, self.shape[3], 1
        places = [buffers.locate(layer, values) for layer in range(buffers.layers) for values in (False, True)]
        return tuple(
            self.driver.tensor(self.buffer_addresses[part] + at, self.shape, strides, dtype) for part, at in places
        )

    def _wait_for_mapping(self) -> None:
        """Wait for the thread that maps ahead, and raise its error, if any, once."""
        if self._closed:
            raise InputError("this vAttention is closed")
        job = self._job
        if job is not None:
            wait([job])
            self._job = None
            job.result()

    def _init_thread(self) -> None:
        """Select the device in the background thread."""
        if self.driver.device is not None and self.driver.device.type == "cuda":
            import torch

            torch.cuda.set_device(self.driver.device)
