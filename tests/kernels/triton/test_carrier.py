"""What two ranks' carriers send and add up, with memory of this process in place of GPUs': copies and flags are written
at once."""

from __future__ import annotations

from collections.abc import Iterator

import memory_checker
import pytest
import torch
from reduce_ranks import EPS, following, immediate, normed, peers_of, random, summed
from torch import Tensor

from quire.distributed.copy_engine_allreduce import CopyEngineAllReduce
from quire.distributed.device_exchange import NCCL_MIN_BYTES, DeviceExchange
from quire.kernels import peer_memory_layout
from quire.kernels.triton import copy_engine_pair
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.prepare import connect_ranks
from quire.layers.sharding import shard_columns
from quire.protocol.parallel_layout import Shard

if torch.cuda.is_available():
    pytest.skip("kernels are interpreted here", allow_module_level=True)

CPU = torch.device("cpu")
SIZE, ROOM = 48, 1 << 16


@pytest.fixture
def carriers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CopyEngineAllReduce, CopyEngineAllReduce]]:
    monkeypatch.setattr(memory_checker.Bounds, "check", lambda *args: None)  # they write what isn't given to them
    immediate(monkeypatch.setattr, least=2)
    memories = [torch.zeros(peer_memory_layout.KERNEL_BYTES + ROOM, dtype=torch.uint8) for _ in range(2)]
    addresses = [memory.data_ptr() for memory in memories]
    one, two = (CopyEngineAllReduce(peers_of(rank, addresses, 20, ROOM), CPU) for rank in range(2))
    yield one, two
    del memories  # which carriers know by their addresses alone


def test_rows_are_cut_into_no_more_pieces_than_there_are_flags(
    carriers: tuple[CopyEngineAllReduce, CopyEngineAllReduce],
) -> None:
    one, _ = carriers
    assert one.split_rows(3, 3 * SIZE * 4) == ()
    assert one.split_rows(5, 5 * SIZE * 4) == (slice(0, 2), slice(2, 4), slice(4, 5))
    for rows in range(4, 100):
        found = one.split_rows(rows, rows * SIZE * 4)
        assert 2 <= len(found) <= copy_engine_pair.MAX_PIECES
        assert [row for piece in found for row in range(piece.start, piece.stop)] == list(range(rows))
    room = copy_engine_pair.region_capacity(one.peers)
    assert room == (ROOM - copy_engine_pair.COPY_FLAG_BYTES) // 2
    assert one.split_rows(64, room)
    assert not one.split_rows(64, room + 1)


def test_what_is_sent_is_added_up_in_turn(carriers: tuple[CopyEngineAllReduce, CopyEngineAllReduce]) -> None:
    """With each kind of norm and without one; who sends nothing is named."""
    for call, kind in enumerate(("rms", "layer", "sum", "behind", "rms")):
        rows = 5 + call
        deltas = [random(rows, SIZE, seed=10 * call + rank) for rank in range(2)]
        for carrier, delta in zip(carriers, deltas):
            for piece in carrier.split_rows(rows, delta.nbytes):
                carrier.send_rows(delta, piece)
        total, (x, weight, bias, behind) = summed(deltas), following(kind, rows, SIZE)
        want_x = x.clone()
        want = normed(total, want_x, weight, bias, behind)
        for carrier, delta in zip(carriers, deltas):
            assert carrier.pending_delta is delta
            if kind == "sum":
                assert carrier.finish(None, None, None, 0.0, None) is delta
                assert torch.equal(delta, total)
                continue
            mine = x.clone()
            assert torch.equal(carrier.finish(mine, weight, bias, EPS, behind), want)
            assert torch.equal(mine, want_x)
            assert carrier.pending_delta is None
    one, two = carriers
    assert not any(carrier.peers.error.item() for carrier in carriers)
    one.send_rows(delta, slice(0, 4))
    one.finish(None, None, None, 0.0, None)
    assert (one.peers.error.item(), two.peers.error.item()) == (2, 0)


class Alone(DeviceExchange):
    """A rank's exchange without other ways than a carrier; `met` are other sums that were asked for."""

    def __init__(self, rank: int, carrier: CopyEngineAllReduce) -> None:
        self.shard, self.device, self.copy_engine, self.is_warming_up = Shard(rank, 2), CPU, carrier, False
        self.met: list[Tensor] = []
        self.peers, self.nccl = carrier.peers, None

    def _uses_nccl(self, x: Tensor) -> bool:
        self.met.append(x)
        return True


def test_a_product_sends_its_rows_to_the_norm_behind(
    carriers: tuple[CopyEngineAllReduce, CopyEngineAllReduce], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.distributed.device_exchange.NCCL_MIN_BYTES", 0)
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    exchanges = [Alone(rank, carrier) for rank, carrier in enumerate(carriers)]
    inputs, products, norms = [], [], []
    for rank, exchange in enumerate(exchanges):
        torch.manual_seed(rank)
        part = Shard(rank, 2)
        product = Linear(shard_columns(part, 32), SIZE, rank == 0, torch.float32, CPU)
        for parameter in product.parameters():
            parameter.data.normal_()
        after = RMSNorm(SIZE, EPS, torch.float32, CPU)
        after.weight.data.normal_()
        for layer in (product, after):
            connect_ranks(layer, exchange)  # type: ignore[arg-type]
        assert product.overlap is exchange
        inputs.append(torch.randn(7, 16))
        products.append(product)
        norms.append(after)
    deltas = [product(x) for product, x in zip(products, inputs)]
    for product, x, delta in zip(products, inputs, deltas):
        torch.testing.assert_close(delta, product._matmul(x))
    total = deltas[0] + deltas[1]
    for after, delta, exchange in zip(norms, deltas, exchanges):
        x = torch.ones(7, SIZE)
        got = after(x, delta)
        torch.testing.assert_close(got, torch.nn.functional.rms_norm(1 + total, (SIZE,), after.weight, EPS))
        assert not exchange.met, "no other way was taken"
    # What was sent, but isn't what is to be added up, is waited for and forgotten.
    for product, x in zip(products, inputs):
        product(x)
    for exchange in exchanges:
        other = torch.ones(7, SIZE)
        assert exchange.all_reduce(other) is other
        assert exchange.met[0] is other
        assert exchange.copy_engine is not None
        assert exchange.copy_engine.pending_delta is None


def test_what_is_replicated_or_small_is_not_sent(carriers: tuple[CopyEngineAllReduce, CopyEngineAllReduce]) -> None:
    exchange = Alone(0, carriers[0])
    whole = Linear(32, SIZE, False, torch.float32, CPU)
    gated = Linear(shard_columns(Shard(0, 2), 32), SIZE, False, torch.float32, CPU, output_modified=True)
    for layer in (whole, gated):
        connect_ranks(layer, exchange)  # type: ignore[arg-type]
        assert layer.overlap is None
    exchange.shard, staged = Shard(0, 2, 0, 2), Linear(shard_columns(Shard(0, 2), 32), SIZE, False, torch.float32, CPU)
    connect_ranks(staged, exchange)  # type: ignore[arg-type]
    assert staged.overlap is None, "the stage behind adds it up"
    assert exchange.split_rows(64, NCCL_MIN_BYTES) == ()
    exchange.alone = True
    assert exchange.split_rows(1 << 20, NCCL_MIN_BYTES + 1) == ()


def test_what_gates_change_is_not_sent() -> None:
    """Llama 3.2 Vision's layers over pictures change in place what their products give: the same tensor."""
    from quire.models.mllama import CrossAttentionLayer, Mllama
    from quire.models.named_configs import named_config

    model = Mllama(named_config("llama3.2-vision-11b"), torch.float32, torch.device("meta"), Shard(0, 2))
    blocks = [one for one in model.modules() if isinstance(one, CrossAttentionLayer)]
    assert blocks
    assert all(block.cross.out.output_modified and block.mlp.down.output_modified for block in blocks)
