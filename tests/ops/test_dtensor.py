"""DTensors given to ops: refused by name, with what to do, and before anything is sent."""

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import graphar
from tests.cases import normal
from tests.ops.conformance import ALLREDUCE, FUSED_ALLREDUCE, PLAIN
from tests.processes import run_ranks

X = torch.ones(8, 8)
WHAT_TO_DO = "got a DTensor; pass its to_local(), or give parallelize_module a graphar.nn.RowwiseParallel, which sums"
PLACEMENTS = Shard(0), Replicate(), Partial()
# Losses take DTensors of logits. The others are a codec, a residual, an epilogue and a bias.
FORMS = [form for form in PLAIN if form.op.__name__ not in ("cross_entropy", "allgather_tuple")]
FORMS += [ALLREDUCE[2], ALLREDUCE[6], ALLREDUCE[9], FUSED_ALLREDUCE[1]]
CALLS = [(form, argument) for form in FORMS for argument in form.tensors(2, form.small)]
# By the argument that is a DTensor: a call that takes it from a function.
OTHERS = {
    "allreduce: tensor 1": lambda d: graphar.allreduce([X, d(X)]),
    "allreduce: out": lambda d: graphar.allreduce(X, out=d(X)),
    "allreduce: x": lambda d: graphar.explain(d(X)),
    "allreduce: an epilogue's tensor": lambda d: graphar.allreduce(
        [X, X], epilogue=graphar.Epilogue("v * scale[col]", scale=[X[0], d(X[0])])
    ),
}


def errors_of(rank, world_size):
    """The error of each call, and the sum of an all-reduce after all of them."""
    mesh, found = init_device_mesh("cpu", (world_size,)), []
    calls = list(OTHERS.values())
    for form, argument in CALLS:
        tensors = form.tensors(world_size, form.small, fill=normal)

        def call(d, form=form, argument=argument, tensors=tensors):
            return form.of_rank(rank, tensors | {argument: list(map(d, tensors[argument]))})

        calls.append(call)
    for at, call in enumerate(calls):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            call(lambda x, at=at: distribute_tensor(x, mesh, PLACEMENTS[at % 3 : at % 3 + 1]))
        found.append((type(error.value), str(error.value)))
    return found, graphar.allreduce(distribute_tensor(X, mesh, [Shard(0)]).to_local()).sum().item()


@functools.cache
def of_two_ranks():
    return run_ranks(errors_of, 2, timeout_s=120)


def test_a_dtensor_is_refused_with_what_to_do():
    named = [argument if argument in form.known else "an epilogue's tensor" for form, argument in CALLS]
    places = [*OTHERS, *(f"{form.op.__name__}: {name}" for (form, _), name in zip(CALLS, named, strict=True))]

    for found, _ in of_two_ranks():
        for where, one in zip(places, found, strict=True):
            assert one == (TypeError, f"{where} must be a tensor of this rank's own, {WHAT_TO_DO}")


def test_ranks_are_in_step_after_refusals_and_take_what_they_are_told_to_pass():
    assert [total for _, total in of_two_ranks()] == [2.0 * 32] * 2
