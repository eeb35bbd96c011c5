"""DTensors given to ops: refused by name, with what to do, and before anything is sent."""

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import graphar
from tests.processes import run_ranks

X, ROW, WHOLE = torch.ones(8, 8), torch.ones(8), [Replicate()]
WHAT_TO_DO = "got a DTensor; pass its to_local(), or give parallelize_module a graphar.nn.RowwiseParallel, which sums"

# By the argument that is a DTensor: the op, how that argument is placed, and a call.
CALLS = {
    "sharded": ("allreduce: x", [Shard(0)], lambda d: graphar.allreduce(d(X))),
    "partial": ("allreduce: x", [Partial()], lambda d: graphar.allreduce(d(X))),
    "in a list": ("allreduce: tensor 1", WHOLE, lambda d: graphar.allreduce([X, d(X)])),
    "out": ("allreduce: out", WHOLE, lambda d: graphar.allreduce(X, out=d(X))),
    "with a codec": ("allreduce: x", [Shard(0)], lambda d: graphar.allreduce(d(X), codec="int8")),
    "residual": ("allreduce: residual", WHOLE, lambda d: graphar.allreduce(X, codec="int8", residual=d(X))),
    "with an epilogue": ("allreduce: x", [Shard(0)], lambda d: graphar.allreduce(d(X), epilogue="-v")),
    "an epilogue's": (
        "allreduce: an epilogue's tensor",
        WHOLE,
        lambda d: graphar.allreduce(X, epilogue=graphar.Epilogue("v * scale[col]", scale=d(ROW))),
    ),
    "an epilogue's, in a list": (
        "allreduce: an epilogue's tensor",
        WHOLE,
        lambda d: graphar.allreduce([X, X], epilogue=graphar.Epilogue("v * scale[col]", scale=[ROW, d(ROW)])),
    ),
    "reducescatter": ("reducescatter: x", [Shard(0)], lambda d: graphar.reducescatter(d(X))),
    "allgather": ("allgather: x", [Shard(0)], lambda d: graphar.allgather(d(X))),
    "norm": (
        "allreduce_residual_rmsnorm: weight",
        WHOLE,
        lambda d: graphar.allreduce_residual_rmsnorm(X, X, d(ROW)),
    ),
    "norm of parts": (
        "reducescatter_residual_rmsnorm: residual",
        [Shard(0)],
        lambda d: graphar.reducescatter_residual_rmsnorm(X, d(X), ROW),
    ),
    "a matmul's weight": ("fused_matmul_allreduce: w", [Shard(1)], lambda d: graphar.fused_matmul_allreduce(X, d(X))),
    "a matmul's bias": (
        "fused_matmul_allreduce: bias",
        WHOLE,
        lambda d: graphar.fused_matmul_allreduce(X, X, bias=d(ROW)),
    ),
    "a matmul's rows": (
        "fused_matmul_reducescatter: a",
        WHOLE,
        lambda d: graphar.fused_matmul_reducescatter(d(X), X),
    ),
    "a matmul's before a norm": (
        "fused_matmul_allreduce_residual_rmsnorm: w",
        [Shard(1)],
        lambda d: graphar.fused_matmul_allreduce_residual_rmsnorm(X, d(X), X, ROW),
    ),
    "a matmul's before a norm of parts": (
        "fused_matmul_reducescatter_residual_rmsnorm: residual",
        [Shard(0)],
        lambda d: graphar.fused_matmul_reducescatter_residual_rmsnorm(X, X, d(X), X[0]),
    ),
    "explain": ("allreduce: x", [Shard(0)], lambda d: graphar.explain(d(X))),
}


def errors_of(rank, world_size):
    """The error of each call, and the sum of an all-reduce after all of them."""
    mesh, found = init_device_mesh("cpu", (world_size,)), {}
    for name, (_, placements, call) in CALLS.items():
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            call(lambda x, placements=placements: distribute_tensor(x, mesh, placements))
        found[name] = type(error.value), str(error.value)
    local = distribute_tensor(X, mesh, [Shard(0)]).to_local()
    return found, graphar.allreduce(local).sum().item()


@functools.cache
def of_two_ranks():
    return run_ranks(errors_of, 2, timeout_s=120)


@pytest.mark.parametrize("name", CALLS)
def test_a_dtensor_is_refused_with_what_to_do(name):
    where, *_ = CALLS[name]

    for found, _ in of_two_ranks():
        assert found[name] == (TypeError, f"{where} must be a tensor of this rank's own, {WHAT_TO_DO}")


def test_ranks_are_in_step_after_refusals_and_take_what_they_are_told_to_pass():
    assert [total for _, total in of_two_ranks()] == [2.0 * 32] * 2
