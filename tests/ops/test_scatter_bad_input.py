"""What reducescatter and allgather refuse: an error that names the argument, the rule and what came."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import Communicator
from graphar.ops.allgather import OP as ALLGATHER
from graphar.ops.reducescatter import OP as REDUCESCATTER
from tests.processes import run_ranks

COMPLEX = torch.complex(torch.ones(8), torch.ones(8))
NO_SUM = "must be a real floating-point or integer tensor, got torch."

BAD_X = {
    "no tensor": (3, TypeError, "must be a torch.Tensor, got int"),
    "sparse": (torch.eye(3).to_sparse(), TypeError, "must be a dense (strided) tensor, got layout torch.sparse_coo"),
}
WITHOUT_A_SUM = {
    "complex": (COMPLEX, TypeError, f"{NO_SUM}complex64"),
    "bool": (torch.ones(3) > 0, TypeError, f"{NO_SUM}bool"),
    "fp8": (torch.ones(3).to(torch.float8_e4m3fn), TypeError, f"{NO_SUM}float8_e4m3fn"),
}

# Of tensors of shape [4, 3].
BAD_AXES = {
    "past the last": (2, ValueError, "axis must be from -2 to 1 for a tensor of shape [4, 3], got 2"),
    "before the first": (-3, ValueError, "axis must be from -2 to 1 for a tensor of shape [4, 3], got -3"),
    "no number": ("0", TypeError, "axis must be an int, got str"),
    "a fraction": (0.0, TypeError, "axis must be an int, got float"),
    "a bool": (True, TypeError, "axis must be an int, got bool"),
}

# Of rank 0 of two, whose tensor has shape [4, 3].
BAD_SIZES = {
    "too few": ([4], ValueError, "sizes must have a length for each of 2 ranks, got 1"),
    "too many": ([4, 4, 4], ValueError, "sizes must have a length for each of 2 ranks, got 3"),
    "negative": ([4, -1], ValueError, "sizes must not be negative, got [4, -1]"),
    "another of this rank": (
        [3, 4],
        ValueError,
        "sizes must have x's length 4 for rank 0, which is this one, got [3, 4]",
    ),
    "a number": (4, TypeError, "sizes must be a sequence of ints, got 4"),
    "fractions": ([4.0, 4.0], TypeError, "sizes must be a sequence of ints, got [4.0, 4.0]"),
}

BAD_TIMEOUTS = {
    "zero": (0, ValueError, "timeout_s must be above 0 and at most 1e6 seconds, got 0"),
    "in words": ("3", TypeError, "timeout_s must be a number of seconds, got str"),
}

BAD_LISTS = {
    "empty": ([], "needs at least one tensor, got an empty list"),
    "unequal dtypes": (
        [torch.ones(2), torch.ones(2).half()],
        "tensors must have equal dtypes, got torch.float32 and, at 1, torch.float16",
    ),
    "mixed devices": (
        [torch.ones(2), torch.ones(2, device="meta")],
        "tensors must be all on the CPU or all on GPUs, got cpu and meta",
    ),
    "another device": ([torch.ones(2, device="meta")], "tensors must be on the CPU or on CUDA devices, got meta"),
}


def table(cases):
    return pytest.mark.parametrize("bad", cases.values(), ids=cases)


def refuses(kind, message, op):
    return pytest.raises(kind, match=f"^{re.escape(f'{op}: {message}')}$")


def name_of(call):
    return call.__name__


both = pytest.mark.parametrize("call", [graphar.reducescatter, graphar.allgather], ids=name_of)


@pytest.fixture
def x():
    return torch.arange(12.0).view(4, 3)


@pytest.fixture
def alone():
    """A process group of one, whose communicator has to work as before after the test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Communicator() as communicator:
        yield communicator
        assert communicator.reducescatter(torch.ones(3)).tolist() == [1, 1, 1]
        assert communicator.allgather(torch.ones(3)).tolist() == [1, 1, 1]
    dist.destroy_process_group()


# ---- tensors --------------------------------------------------------------------------------------------------------


@both
@table(BAD_X)
def test_a_bad_tensor_is_refused(call, bad, alone, x):
    bad_x, kind, message = bad

    with refuses(kind, f"x {message}", name_of(call)):
        call(bad_x, alone)
    with refuses(kind, f"tensor 1 {message}", name_of(call)):
        call([x, bad_x])


@table(WITHOUT_A_SUM)
def test_reducescatter_refuses_what_has_no_sum(bad, alone):
    bad_x, kind, message = bad

    with refuses(kind, f"x {message}", "reducescatter"):
        alone.reducescatter(bad_x)
    with refuses(kind, f"tensor 0 {message}", "reducescatter"):
        graphar.reducescatter([bad_x])


@both
def test_a_0d_tensor_is_refused(call, alone):
    message = "tensors must have at least one dimension, got a 0-d tensor"

    with refuses(ValueError, message, name_of(call)):
        call(torch.tensor(1.0), alone)
    with refuses(ValueError, message, name_of(call)):
        call([torch.tensor(1.0)] * 2)


@pytest.mark.filterwarnings("ignore:.*quant.*:UserWarning")
def test_a_quantized_tensor_is_refused():
    x = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)

    with refuses(
        TypeError, "tensor 0 must not be a quantized tensor, got torch.qint8; pass its int_repr()", "allgather"
    ):
        graphar.allgather([x, x])


@both
@table(BAD_LISTS)
def test_a_bad_list_is_refused(call, bad):
    xs, message = bad

    with refuses(ValueError, message, name_of(call)):
        call(xs)


def test_reducescatter_refuses_unequal_shapes(x):
    with refuses(ValueError, "tensors must have equal shapes, got [4, 3] and, at 1, [3, 3]", "reducescatter"):
        graphar.reducescatter([x, x[1:]])


@pytest.mark.parametrize(
    ("axis", "shape"), [(0, [4, 2]), (1, [3, 3]), (-2, [4, 2]), (0, [4]), (1, [4]), (0, [4, 3, 1])]
)
def test_allgather_refuses_shapes_unequal_beside_the_axis(x, axis, shape):
    message = f"tensors must have equal shapes but for axis {axis % 2}, got [4, 3] and, at 1, {shape}"

    with refuses(ValueError, message, "allgather"):
        graphar.allgather([x, torch.ones(shape)], axis=axis)


# ---- axis, sizes, timeout_s -----------------------------------------------------------------------------------------


@both
@table(BAD_AXES)
def test_a_bad_axis_is_refused(call, bad, alone, x):
    axis, kind, message = bad

    with refuses(kind, message, name_of(call)):
        call(x, alone, axis=axis)
    with refuses(kind, message, name_of(call)):
        call([x, x], axis=axis)


def gather_with_bad_sizes(rank, world_size):
    x = torch.ones(4, 3)
    if rank == 0:
        for sizes, kind, message in BAD_SIZES.values():
            with refuses(kind, message, "allgather"):
                graphar.allgather(x, sizes=sizes)
    return graphar.allgather(x).sum().item()  # nothing was sent, so the ranks are still in step


def test_bad_sizes_are_refused_and_nothing_is_sent():
    assert run_ranks(gather_with_bad_sizes, 2) == [24.0, 24.0]


def test_sizes_of_a_list_are_refused(x):
    with refuses(ValueError, "a list of tensors has its sizes itself; omit sizes", "allgather"):
        graphar.allgather([x, x], sizes=[4, 4])


@both
@table(BAD_TIMEOUTS)
def test_a_bad_timeout_is_refused(call, bad, alone, x):
    timeout_s, kind, message = bad

    with refuses(kind, message, name_of(call)):
        call(x, alone, timeout_s=timeout_s)
    with refuses(kind, message, name_of(call)):
        call([x, x], timeout_s=timeout_s)


# ---- groups and communicators ---------------------------------------------------------------------------------------


@both
def test_what_is_no_group_is_refused(call, x):
    with refuses(TypeError, "group must be a ProcessGroup or a Communicator, got str", "graphar"):
        call(x, "world")


@both
def test_without_a_process_group_a_tensor_is_refused(call, x):
    with pytest.raises(ValueError, match=r"^graphar: torch\.distributed is not initialised"):
        call(x)


@both
def test_a_communicator_of_devices_refuses_a_tensor(call, x):
    message = "this communicator has devices, so it takes a list of tensors, got a tensor"

    with Communicator(devices=["cpu"] * 2) as pair, refuses(ValueError, message, "graphar"):
        call(x, pair)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, pair: graphar.reducescatter(x, pair, epilogue="-v"),
        lambda x, pair: graphar.reducescatter(x.clone().requires_grad_(), pair),
        lambda x, pair: graphar.allgather(x, pair, sizes=[4, 4]),
        lambda x, pair: graphar.fused_matmul_reducescatter(x, x, group=pair, epilogue="-v"),
    ],
    ids=["epilogue", "gradient", "sizes", "matmul"],
)
def test_it_does_so_whatever_else_the_call_has(call, x):
    message = "this communicator has devices, so it takes a list of tensors, got a tensor"

    with Communicator(devices=["cpu"] * 2) as pair, refuses(ValueError, message, "graphar"):
        call(x, pair)


@both
def test_a_closed_communicator_refuses_a_call(call, x):
    with Communicator(devices=["cpu"] * 2) as pair:
        call([x, x], pair)

    with pytest.raises(graphar.CommunicatorError, match="this communicator is closed"):
        call([x, x], pair)


def scatter_over_a_group_for_gpus_only(rank, world_size):
    group = dist.new_group(backend="cuda:gloo")
    for call in (graphar.reducescatter, graphar.allgather):
        with pytest.raises(graphar.UnsupportedError, match="the group has no backend for cpu tensors"):
            call(torch.ones(3), group)


def test_a_group_without_a_backend_for_the_device_is_named():
    run_ranks(scatter_over_a_group_for_gpus_only, 2)


@pytest.mark.parametrize("ops", ["allgather", ["allgather", "allreduce_out"], [None]])
def test_preparing_unknown_ops_is_refused(ops):
    message = (
        "ops must be a list with any of allreduce, reducescatter, allgather, allreduce_residual_rmsnorm, "
        f"allreduce_residual_rmsnorm_static_fp8, allreduce_residual_rmsnorm_dynamic_fp8, got {ops!r}"
    )

    with Communicator(devices=["cpu"] * 2) as pair, refuses(ValueError, message, "prepare"):
        pair.prepare(ops=ops)


# ---- calls that do not come from the functions ----------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[3], [5], [-4]])
def test_an_op_checks_the_sizes_it_is_given(alone, x, sizes):
    message = f"sizes {sizes} do not fit a length of 4"

    with refuses(ValueError, message, "reducescatter"):
        torch.ops.graphar.reducescatter(x, *REDUCESCATTER.arguments(rank=0, sizes=sizes))
    with refuses(ValueError, message, "allgather"):
        torch.ops.graphar.allgather(x, *ALLGATHER.arguments(rank=0, sizes=sizes))


def test_an_op_of_a_list_checks_the_sizes_it_is_given(x):
    with refuses(ValueError, "sizes [2, 3] do not fit a length of 4, 4", "reducescatter"):
        torch.ops.graphar.reducescatter_list([x, x], *REDUCESCATTER.arguments(sizes=[2, 3]))


@pytest.mark.parametrize(("rank", "sizes"), [(1, [4]), (0, [4, 0]), (1, [0, 4])])
def test_an_op_made_for_another_place_in_the_group_is_refused(alone, x, rank, sizes):
    message = f"made for rank {rank} of {len(sizes)}, called by rank 0 of 1"

    for op in (REDUCESCATTER, ALLGATHER):
        with refuses(ValueError, message, op.name):
            op.one(x, *op.arguments(rank=rank, sizes=sizes))
