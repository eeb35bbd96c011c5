"""Error feedback: the rounding error of a codec stays in a residual, which is added to the next tensor."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import Codec, reference
from graphar.numerics.codec_reference import Noise, encode, error_of_wire
from tests.cases import normal, same_bits
from tests.processes import on_ranks

INT4 = Codec(4)
STOCHASTIC = Codec(2, 128, "stochastic", seed=3)


def step(xs, residuals, codec, call=0):
    """What every rank receives, and the residuals afterwards, by the specification."""
    parts = [residual + x for x, residual in zip(xs, residuals, strict=True)]
    wires = [encode(part.view(-1), codec, Noise(codec.seed or 0, call, rank)) for rank, part in enumerate(parts)]
    left = [error_of_wire(part, wire, codec) for part, wire in zip(parts, wires, strict=True)]
    return reference.quantized_allreduce(parts, codec, codec.seed or 0, call), left


@pytest.mark.promise("Error feedback adds what a codec took to the next tensor, and loses nothing.")
@pytest.mark.parametrize("codec", [INT4, STOCHASTIC], ids=["int4", "stochastic"])
@on_ranks(3)
def test_processes_keep_the_specifications_residuals(rank, world_size, codec):
    dtype = torch.bfloat16
    xs, residuals = ([normal(r + at, 3001, dtype) for r in range(world_size)] for at in (0, 50))
    mine = residuals[rank].clone()
    for call in range(3):
        expected, residuals = step(xs, residuals, codec, call)
        y = graphar.allreduce(xs[rank], codec=codec, residual=mine)
        assert same_bits(y, expected) == 0
        assert same_bits(mine, residuals[rank]) == 0


class Feeding:
    """An op or a hook with error feedback over a communicator, and its residual."""

    def __init__(self, kind: str, communicator: graphar.Communicator) -> None:
        self.call: Callable[[torch.Tensor], torch.Tensor] = getattr(self, kind)
        self.residual, self.communicator, self.group = None, communicator, communicator.engine.group
        self._hook = graphar.ddp.quantized_hook("int4", communicator, error_feedback=True)
        self._scatter = graphar.fsdp.QuantizedReduceScatter("int4", communicator, error_feedback=True)

    def allreduce(self, x):
        self.residual = torch.zeros_like(x) if self.residual is None else self.residual
        return self.communicator.allreduce(x, codec=INT4, residual=self.residual)

    def reducescatter(self, x, axis=0):
        self.residual = torch.zeros_like(x) if self.residual is None else self.residual
        return self.communicator.reducescatter(x, codec=INT4, residual=self.residual, axis=axis)

    def reducescatter_of_columns(self, x):
        return self.reducescatter(x, axis=1)

    def data_parallel_hook(self, x):
        buffer, parameter = x.view(-1).clone(), x
        bucket = SimpleNamespace(buffer=lambda: buffer, parameters=lambda: [parameter], index=lambda: 0)
        try:
            return self._hook(None, bucket).wait()
        finally:
            (self.residual,) = self._hook._average._buckets[0].residuals

    def sharded_scatter(self, x):
        out = torch.empty(x.numel() // self.group.size())
        try:
            self._scatter(out, x.view(-1), self.group, dist.ReduceOp.SUM)
        finally:
            self.residual = self._scatter._residual
        return out


@pytest.mark.parametrize(
    "kind", ["allreduce", "reducescatter", "reducescatter_of_columns", "data_parallel_hook", "sharded_scatter"]
)
@on_ranks(2)
def test_a_call_that_raises_leaves_the_residual_for_the_call_that_is_made_in_its_place(rank, world_size, kind):
    x = normal(rank, 64 * world_size, torch.float32).view(-1, 4)
    groups = [dist.new_group(range(world_size)) for _ in range(3)]
    with graphar.Communicator(groups[0], timeout_s=20) as never_refused:
        twin = Feeding(kind, never_refused)
        expected = [twin.call(x) for _ in range(6)]
    communicator = graphar.Communicator(groups[1], timeout_s=1.5)
    mine = Feeding(kind, communicator)
    found = [mine.call(x) for _ in range(4)]  # the last of them are warm

    def refused(error, **matches):
        before = mine.residual.clone()
        with pytest.raises(error, **matches):
            mine.call(x)
        assert torch.equal(mine.residual, before)

    communicator.suspend()
    refused(graphar.CommunicatorError, match="suspended")
    communicator.resume()
    found.append(mine.call(x))
    if rank == 0:
        refused(graphar.CollectiveTimeout)  # the other ranks do not come
        refused(graphar.CollectiveTimeout, match="this call was not made")
    dist.barrier()
    mine.communicator = graphar.Communicator(groups[2], timeout_s=20)
    mine._hook._group = mine._scatter._group = mine.communicator
    found.append(mine.call(x))
    assert all(map(torch.equal, found, expected))
    assert torch.equal(mine.residual, twin.residual)


def test_a_bucket_that_became_nan_leaves_nothing():
    x = normal(0, 96, torch.float32)
    x[40] = torch.inf
    wire = encode(x, INT4)

    error = error_of_wire(x, wire, INT4)

    assert (error[32:64] == 0).all()
    assert (error[:32] != 0).any()
