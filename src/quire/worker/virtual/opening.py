"""Opening a store of virtual memory: over the device's driver, once it is known that its mappings are not too many."""

from __future__ import annotations

import traceback
from contextlib import suppress

import torch

from quire.protocol.model_spec import KVCacheConfig, ModelSpec
from quire.worker.virtual import DriverError, open_driver
from quire.worker.virtual.store import VirtualStore


def open_store(
    kv_config: KVCacheConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, debug: bool, *,
    is_contiguous: bool,
    map_in_background: bool = False,
) -> VirtualStore:  # fmt: skip
    """StartupError where the device has no virtual memory to be managed, or not enough of it."""
    page = kv_config.groups[0].page_bytes // kv_config.groups[0].parts
    driver = open_driver(str(device), page)
    try:
        if device.type == "cpu":
            from quire.worker.virtual.memfd import check_map_count

            check_map_count(sum(kv_config.slots * group.parts * (group.table_width + 1) for group in kv_config.groups))
        return VirtualStore(
            kv_config,
            spec,
            dtype,
            device,
            driver,
            debug,
            is_contiguous=is_contiguous,
            map_in_background=map_in_background,
        )
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold tensors over what is given back
        with suppress(DriverError):
            driver.close()
        raise
