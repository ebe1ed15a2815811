"""Opening a store of virtual memory: over the device's driver, once it is known that its mappings are not too many."""

from __future__ import annotations

import traceback
from contextlib import suppress

import torch

from quire.data.runner.virtual import DriverError, open_driver
from quire.data.runner.virtual.store import VirtualStore
from quire.vocabulary.specs import Geometry, ModelSpec


def open_store(
    geometry: Geometry, spec: ModelSpec, dtype: torch.dtype, device: torch.device, debug: bool, *, views: bool,
    background: bool = False,
) -> VirtualStore:  # fmt: skip
    """StartupError where the device has no virtual memory to be managed, or not enough of it."""
    page = geometry.groups[0].page_bytes // geometry.groups[0].parts
    driver = open_driver(str(device), page)
    try:
        if device.type == "cpu":
            from quire.data.runner.virtual.memfd import check_regions

            check_regions(sum(geometry.slots * group.parts * (group.table_width + 1) for group in geometry.groups))
        return VirtualStore(geometry, spec, dtype, device, driver, debug, views=views, background=background)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold tensors over what is given back
        with suppress(DriverError):
            driver.close()
        raise
