"""The exchange memories of ranks on one host's GPUs, each opened by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quire.distributed import peer_memory
from quire.distributed.peer_memory import HANDLE_BYTES, PeerError
from quire.distributed.shared_memory_exchange import SharedMemoryExchange
from quire.kernels import peer_memory_layout
from quire.protocol.parallel_layout import Shard

ONE_SHOT_BYTES = {2: 1 << 40, 3: 1 << 20, 4: 1 << 19}
"""The most bytes of a one-shot sum, by ranks, until a warm-up measures it."""
ONE_SHOT_BYTES_DEFAULT = 1 << 17  # the same for more ranks


def open_peer_buffers(
    shard: Shard, device: torch.device, indices: Sequence[int], host: SharedMemoryExchange, seconds: float
) -> tuple[Any, str]:
    """Return a kernels.triton.all_reduce.PeerBuffers and "", or None and the reason, the same on all ranks. `indices`
    are the GPUs of the ranks, `seconds` the timeout of a step."""
    from quire.kernels.triton import all_reduce, copy_engine_pair

    try:
        why = _unreachable(shard, indices)
    except PeerError as error:  # the driver reports no attributes
        why = str(error)
    handle, nbytes = b"", peer_memory_layout.peer_bytes(shard.tp_size)
    copy_bytes = nbytes - peer_memory_layout.KERNEL_BYTES
    if not why:
        try:
            address, handle = peer_memory.export(nbytes)
        except PeerError as error:
            why = str(error)
    handles = host.all_gather(torch.tensor(list(handle.ljust(HANDLE_BYTES, b"\0")), dtype=torch.uint8))
    if reason := _first_reason(why, host):
        if handle:
            peer_memory.free(address)
        return None, reason
    addresses: list[int] = []
    try:
        for rank in range(shard.tp_size):
            theirs = bytes(handles[rank].tolist())
            addresses.append(address if rank == shard.tp_rank else peer_memory.open_handle(theirs))
            if copy_bytes:  # fail now, not in a step
                peer_memory.stream_write_value(addresses[-1] + copy_engine_pair.flag_offset(0, 0), 0, 0)
    except PeerError as error:
        why = str(error)
    if reason := _first_reason(why, host):
        for one in addresses:
            if one != address:
                peer_memory.close(one)
        host.barrier()  # all ranks have closed this rank's memory
        peer_memory.free(address)
        return None, reason
    polls = min(int(seconds * all_reduce.POLLS), 2**31 - 1)
    counters = torch.zeros(peer_memory_layout.PROGRAMS, dtype=torch.int64, device=device)
    # The host reads this without asking the device.
    error_word = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
    table = torch.tensor(addresses, dtype=torch.int64, device=device)
    one_shot = ONE_SHOT_BYTES.get(shard.tp_size, ONE_SHOT_BYTES_DEFAULT)
    return all_reduce.PeerBuffers(
        table, counters, error_word, shard.tp_rank, shard.tp_size, polls, tuple(addresses), copy_bytes, one_shot
    ), ""


def _unreachable(shard: Shard, indices: Sequence[int]) -> str:
    """Return the reason that this rank's GPU has no access to another one's memory, or ""."""
    here = indices[shard.tp_rank]
    if shard.tp_size > peer_memory_layout.MAX_PEERS:
        return f"more than {peer_memory_layout.MAX_PEERS} ranks"
    if 2 * torch.cuda.get_device_properties(here).multi_processor_count < peer_memory_layout.PROGRAMS:
        return f"GPU {here} has fewer than {peer_memory_layout.PROGRAMS // 2} multiprocessors"
    for there in set(indices) - {here}:
        if not torch.cuda.can_device_access_peer(here, there):
            return f"GPU {here} has no access to the memory of GPU {there}"
        if not peer_memory.has_native_atomics(here, there):
            return f"GPU {here} has no NVLink to GPU {there}"
    return ""


def _first_reason(why: str, host: SharedMemoryExchange) -> str:
    """Return the reason of the first rank that has one, the same on all ranks; "" if none has."""
    reasons = host.all_gather(torch.tensor(list(why.encode()[:200].ljust(200, b"\0")), dtype=torch.uint8))
    texts = (bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in reasons)
    return next(filter(None, texts), "")
