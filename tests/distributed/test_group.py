"""Groups of torch.distributed meet through a file without a name, and sum in rank order where that is asked for. As a
program, `test_group.py RANKS`: ranks as processes of a group over gloo, that are forked; what they exchange is what one
process would have."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback

import torch
from torch import Tensor

from quire.distributed.device_exchange import DeviceExchange
from quire.distributed.nccl import NcclCommunicator
from quire.protocol.parallel_layout import Shard


def every(ranks: int, *shape: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(ranks)]


def work(rank: int, ranks: int, stores: list[int]) -> None:
    for ordered, store in zip((False, True), stores):
        group = NcclCommunicator(Shard(rank, ranks), store, 30.0, torch.device("cpu"), ordered, "gloo")
        for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
            given = every(ranks, 7, 24, dtype=dtype, seed=seed)
            assert torch.equal(group.all_gather(given[rank]), torch.stack(given)), f"{dtype}: gathered ones differ"
            want = torch.stack(given).double().sum(0)
            total = given[0].float()
            for other in given[1:]:
                total = total + other.float()
            got = group.all_reduce(given[rank])
            assert got is given[rank], "sums are taken in place"
            torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)
            assert not ordered or torch.equal(got, total.to(dtype)), f"{dtype}: not summed in rank order"
            wide = every(ranks, 5, 48, dtype=dtype, seed=seed + 9)[rank][:, :24]
            group.all_reduce(wide)  # rows of another stride
        alone = DeviceExchange(Shard(rank, ranks), torch.device("cpu"), None, None, group)  # without peers' memory
        ones = torch.ones(3, 8)
        assert alone.all_reduce_norm(ones, ones, ones[0], None, 1e-5) is None, "nothing is fused there"
        assert torch.equal(alone.all_reduce(ones.clone()), ones * ranks), "a sum that the group should have taken"
        assert torch.equal(alone.all_gather(ones), ones.expand(ranks, 3, 8)), "what the group should have gathered"
        group.close()


def test_a_group_sums_and_gathers() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, "2"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks = int(sys.argv[1])
    stores = [os.memfd_create("store") for _ in range(2)]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            try:
                work(rank, ranks, stores)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
