"""Opening a store of virtual memory: over the device's driver, once it is known that its mappings are not too many."""

from __future__ import annotations

import torch

from quire.data.runner.virtual import open_driver
from quire.data.runner.virtual.store import VirtualStore
from quire.vocabulary.specs import Geometry, ModelSpec


def open_store(
    geometry: Geometry, spec: ModelSpec, dtype: torch.dtype, device: torch.device, debug: bool, *, views: bool,
    background: bool,
) -> VirtualStore:  # fmt: skip
    """StartupError where the device has no virtual memory to be managed, or not enough of it."""
    page = geometry.groups[0].page_bytes // geometry.groups[0].parts
    if device.type == "cpu":
        from quire.data.runner.virtual.memfd import check_regions

        check_regions(sum(geometry.slots * group.parts * (group.table_width + 1) for group in geometry.groups))
    driver = open_driver(str(device), page)
    try:
        return VirtualStore(geometry, spec, dtype, device, driver, debug, views=views, background=background)
    except BaseException:
        driver.close()
        raise
