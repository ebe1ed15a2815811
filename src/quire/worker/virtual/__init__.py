"""Virtual memory: drivers that map physical pages at fixed addresses, by the operating system or by CUDA.

The exported names import no torch; a device's driver is imported when it is opened.
"""

from __future__ import annotations

from quire.worker.virtual.driver import CallTimes, Driver, DriverCounters, DriverError, PageRun, map_all

__all__ = ["CallTimes", "Driver", "DriverCounters", "DriverError", "PageRun", "map_all", "open_driver"]


def open_driver(device: str, page: int) -> Driver:
    """Return the driver of a torch device, 'cpu' or 'cuda:N', in pages of `page` bytes. Raise StartupError if the
    device has no virtual memory."""
    if device.partition(":")[0] == "cuda":
        from quire.worker.virtual.cuda import CudaDriver

        return CudaDriver(page, int(device.partition(":")[2] or 0))
    from quire.worker.virtual.memfd import MemfdDriver

    return MemfdDriver(page)
