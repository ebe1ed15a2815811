"""The mappings of a driver, page by address, and the checks that all drivers share. No memory."""

from __future__ import annotations

from bisect import bisect_right, insort


class MappingTable:
    """Reservations and the page mapped at each address, a multiple of `page_bytes`."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.num_pages = 0  # physical pages
        self.page_by_address: dict[int, int] = {}
        self.num_maps = self.num_unmaps = 0
        self._ends: dict[int, int] = {}  # end of a reservation by its first address
        self._starts: list[int] = []  # of reservations, in rising order

    def reserve(self, start: int, nbytes: int) -> None:
        assert start % self.page_bytes == 0, f"a reservation at {start:#x} is no multiple of {self.page_bytes} bytes"
        self._ends[start] = start + nbytes
        insort(self._starts, start)

    def is_reserved(self, address: int, nbytes: int) -> bool:
        """Return True if these addresses are in one reservation."""
        i = bisect_right(self._starts, address) - 1
        return i >= 0 and address + nbytes <= self._ends[self._starts[i]]

    def check_map(self, address: int, page: int, count: int) -> None:
        """Assert that pages page ... page + count - 1 can be mapped at `address`."""
        self._check_range(address, count)
        assert 0 <= page <= page + count <= self.num_pages, f"page {page} and {count - 1} more, of {self.num_pages}"
        for at in self._addresses(address, count):
            assert at not in self.page_by_address, (
                f"a map of page {page} over page {self.page_by_address[at]}, mapped at {at:#x}"
            )

    def check_unmap(self, address: int, count: int) -> None:
        """Assert that a page is mapped at each of these addresses."""
        self._check_range(address, count)
        for at in self._addresses(address, count):
            assert at in self.page_by_address, f"an unmap of {at:#x}, where nothing is mapped"

    def check_tensor(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        """Assert that a tensor at `address` is in one reservation; strides in elements."""
        assert all(size > 0 and stride >= 0 for size, stride in zip(shape, strides, strict=True)), f"{shape}, {strides}"
        last = sum((size - 1) * stride for size, stride in zip(shape, strides))
        assert self.is_reserved(address, (last + 1) * itemsize), (
            f"a tensor {shape} at {address:#x} lies in no reservation"
        )

    def record_map(self, address: int, page: int, count: int) -> None:
        """Record that pages were mapped."""
        self.page_by_address.update(zip(self._addresses(address, count), range(page, page + count)))
        self.num_maps += count

    def record_unmap(self, address: int, count: int) -> None:
        """Record that pages were unmapped."""
        for at in self._addresses(address, count):
            del self.page_by_address[at]
        self.num_unmaps += count

    def reset(self) -> None:
        """Forget all pages, mappings and reservations."""
        self.num_pages = 0
        self.page_by_address.clear()
        self._ends.clear()
        self._starts.clear()

    def _addresses(self, address: int, count: int) -> range:
        return range(address, address + count * self.page_bytes, self.page_bytes)

    def _check_range(self, address: int, count: int) -> None:
        assert count > 0, f"{count} pages at {address:#x}"
        assert address % self.page_bytes == 0, f"{address:#x} is no multiple of {self.page_bytes} bytes"
        assert self.is_reserved(address, count * self.page_bytes), (
            f"{count} pages at {address:#x} lie in no reservation"
        )
