"""Staging brings arrays to the device as they were, however often its memory is used again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.data.runner.staging import Staging

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ARRAYS = [np.arange(7), np.ones((3, 5), dtype=np.float32), np.zeros(0, dtype=np.int64), np.array([[True], [False]])]


def test_on_a_cpu_arrays_are_wrapped() -> None:
    staging = Staging(CPU)
    for array, tensor in zip(ARRAYS, staging.upload_all(ARRAYS)):
        assert np.shares_memory(tensor.numpy(), array) or not array.size
        assert (tensor.numpy() == array).all()
        assert torch.equal(staging.upload(array), tensor)
    out = torch.zeros(7, dtype=torch.int64)
    assert staging.upload(ARRAYS[0], out) is out
    assert out.tolist() == list(range(7))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [128, 4096])
def test_arrays_arrive_behind_a_slow_device(size: int) -> None:
    """The ring goes round several times while the device is held up, and larger arrays go around it."""
    staging = Staging(GPU, segments=3, size=size)
    torch.cuda._sleep(20_000_000)
    sent = [(np.full(n, n), staging.upload(np.full(n, n))) for n in range(1, 60)]
    several = [(arrays, staging.upload_all(arrays)) for arrays in [ARRAYS] * 20]
    out = torch.zeros(9, dtype=torch.int64, device=GPU)
    assert staging.upload(np.arange(9), out) is out
    assert out.tolist() == list(range(9))
    for arrays, tensors in [*several, *(([array], [tensor]) for array, tensor in sent)]:
        for array, tensor in zip(arrays, tensors):
            assert tensor.shape == array.shape
            assert (tensor.cpu().numpy() == array).all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_uploading_waits_for_nothing() -> None:
    staging = Staging(GPU)
    staging.upload(np.arange(9))
    torch.cuda._sleep(100_000_000)
    held = torch.cuda.Event()
    held.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            staging.upload_all([np.arange(4096), np.arange(4096)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not held.query()
