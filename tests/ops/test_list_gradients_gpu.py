"""Gradients of ops with one tensor per device: ordered on any streams, and without a warning of torch."""

from contextlib import ExitStack

import pytest
import torch

from graphar import Epilogue
from tests.cases import normal
from tests.gpu import Ranks

pytestmark = pytest.mark.gpu

LATE_CYCLES = 20_000_000  # some 10 ms

OPS = {
    "allreduce": lambda communicator, xs: communicator.allreduce(xs),
    "allreduce with a codec": lambda communicator, xs: communicator.allreduce(xs, codec="int8"),
    "reducescatter": lambda communicator, xs: communicator.reducescatter(xs),
    "allgather": lambda communicator, xs: communicator.allgather(xs),
    "allreduce with an epilogue": lambda communicator, xs: communicator.allreduce(xs, epilogue="v * 3"),
    "reducescatter with an epilogue": lambda communicator, xs: communicator.reducescatter(xs, epilogue="v * 3"),
}


class Late(torch.autograd.Function):
    """The identity. Its gradient holds NaN until it is written late."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        found = torch.full_like(gradient, torch.nan)
        torch.cuda._sleep(LATE_CYCLES)
        return found.copy_(gradient)


def gradients(ranks: Ranks, op, late: bool) -> list[torch.Tensor]:
    leaves = [
        x.requires_grad_() for x in ranks.place([normal(r, 4096, torch.float32) for r in range(ranks.world_size)])
    ]
    ys = op(ranks.communicator, leaves)
    ys = [Late.apply(y) if late else y for y in ys]
    torch.autograd.backward(ys, [torch.full_like(y, rank + 1.0) for rank, y in enumerate(ys)])
    return [leaf.grad * 1 for leaf in leaves]


@pytest.mark.parametrize("name", OPS)
def test_gradients_on_side_streams_wait_for_those_before_them(ranks: Ranks, name):
    expected = gradients(ranks, OPS[name], late=False)
    ranks.communicator.synchronize()

    with ExitStack() as streams:
        for device in range(ranks.world_size):
            streams.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        found = gradients(ranks, OPS[name], late=True)

    ranks.communicator.synchronize()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_the_gradients_of_an_epilogues_own_tensors_do_not_make_torch_warn(ranks: Ranks):
    xs = [x.requires_grad_() for x in ranks.place([torch.ones(2, 4)] * ranks.world_size)]
    biases = [torch.nn.Parameter(bias) for bias in ranks.place([torch.ones(4)] * ranks.world_size)]

    ys = ranks.communicator.allreduce(xs, epilogue=Epilogue("v * b[col]", b=biases))
    torch.autograd.backward([y.sum() for y in ys])

    ranks.communicator.synchronize()
    assert [bias.grad.tolist() for bias in biases] == [[2.0 * ranks.world_size] * 4] * ranks.world_size
