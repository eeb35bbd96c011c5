"""What fused_matmul_allreduce and fused_matmul_reducescatter refuse, and that they say why, before anything is sent."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import Codec, Communicator
from graphar.plan import checks

OPS = (graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter)
A, W = torch.ones(6, 5), torch.ones(4, 5)

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


@pytest.fixture
def alone():
    """A process group of one, whose communicator has to work as before after the test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Communicator() as communicator:
        yield communicator
        assert communicator.allreduce(torch.ones(3)).tolist() == [1, 1, 1]
    dist.destroy_process_group()


def refuses(kind, message, op):
    return pytest.raises(kind, match=f"^{re.escape(f'{op.__name__}: {message}')}$")


BAD_OPERANDS = {
    "a list of numbers for a tensor": ({"a": 1.0}, TypeError, "a must be a torch.Tensor, got float"),
    "sparse": (
        {"a": A.to_sparse()},
        TypeError,
        "a must be a dense (strided) tensor, got layout torch.sparse_coo",
    ),
    "integers": (
        {"a": A.int(), "w": W.int()},
        TypeError,
        "a must be bfloat16, float16, float32 or float64, got torch.int32",
    ),
    "dtypes that differ": (
        {"w": W.half()},
        ValueError,
        "w must have the dtype of a, torch.float32, got torch.float16",
    ),
    "a bias of another dtype": (
        {"bias": torch.ones(4).double()},
        ValueError,
        "bias must have the dtype of a, torch.float32, got torch.float64",
    ),
    "another device": ({"w": W.to("meta")}, ValueError, "w must be on the device of a, cpu, got meta"),
    "no dimension": ({"a": A[0, 0]}, ValueError, "a must have 1 or more dimensions, got []"),
    "a weight of three dimensions": ({"w": W[None]}, ValueError, "w must have 2 dimensions, got [1, 4, 5]"),
    "a bias of two": ({"bias": A}, ValueError, "bias must have 1 dimension, got [6, 5]"),
    "K that differs": (
        {"w": W.t()},
        ValueError,
        "a must have as many elements in its last dimension as w in a row, which is [out, in] as in torch.nn.Linear, "
        "got [6, 5] and [5, 4]",
    ),
    "a bias of another length": ({"bias": A[0]}, ValueError, "bias must be [4], as w has rows, got [5]"),
}
BAD_OPTIONS = {
    "a partition": (
        {"partition": "split_k"},
        ValueError,
        "partition must be one of auto, split_m, split_n, tiles, none, got 'split_k'",
    ),
    "no partitions": (
        {"partition": "split_m", "num_partitions": 0},
        ValueError,
        "num_partitions must be 1 or more, got 0",
    ),
    "more than rows": (
        {"partition": "split_m", "num_partitions": 7},
        ValueError,
        "split_m cannot make 7 partitions of 6 rows",
    ),
    "more than columns": (
        {"partition": "split_n", "num_partitions": 5},
        ValueError,
        "split_n cannot make 5 partitions of 4 columns",
    ),
    "a number without a cut": (
        {"num_partitions": 2},
        ValueError,
        "num_partitions goes with split_m or split_n, got 2 with 'auto'",
    ),
    "a codec": (
        {"codec": "int7"},
        ValueError,
        "codec must be a graphar.Codec or one of fp8_e4m3, int8, int6, int5, int4, int3, int2, got 'int7'",
    ),
    "feedback": (
        {"codec": Codec(4, feedback=True)},
        ValueError,
        "a codec with feedback leaves what it takes in a residual, and there is none",
    ),
    "a deadline": ({"timeout_s": 0}, ValueError, "timeout_s must be above 0 and at most 1e6 seconds, got 0"),
}


@every_op
@pytest.mark.parametrize(("bad", "kind", "message"), BAD_OPERANDS.values(), ids=BAD_OPERANDS)
def test_a_bad_operand_is_refused(op, alone, bad, kind, message):
    with refuses(kind, message, op):
        op(**{"a": A, "w": W, "group": alone} | bad)


@every_op
@pytest.mark.parametrize(("bad", "kind", "message"), BAD_OPERANDS.values(), ids=BAD_OPERANDS)
def test_a_bad_operand_of_a_list_is_refused_with_its_rank(op, bad, kind, message):
    both = {"a": A, "w": W} | bad
    lists = {name: [good, bad_one] for (name, bad_one), good in zip(both.items(), (A, W, torch.ones(4)), strict=False)}
    pattern = re.sub(r"\b(a|w|bias) must", r"\1[1] must", message)

    with refuses(kind, pattern, op):
        op(**lists)


@every_op
@pytest.mark.parametrize(("bad", "kind", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_a_bad_option_is_refused(op, alone, bad, kind, message):
    with refuses(kind, message, op):
        op(A, W, group=alone, **bad)


@every_op
def test_a_codec_rounds_no_fp64(op):
    with refuses(ValueError, "a codec rounds bfloat16, float16 and float32, got a tensor of torch.float64", op):
        op([A.double()] * 2, [W.double()] * 2, codec="int8")


@every_op
@pytest.mark.parametrize(
    ("a", "w", "bias", "message"),
    [
        ([], [], None, "needs at least one tensor, got an empty list"),
        ([A, A], [W], None, "w must be a list of 2 tensors, one for each of a, got a list of 1"),
        ([A, A], W, None, "w must be a list of 2 tensors, one for each of a, got Tensor"),
        ([A, A], W[:2], None, "w must be a list of 2 tensors, one for each of a, got Tensor"),
        ([A, A], None, None, "w must be a list of 2 tensors, one for each of a, got NoneType"),
        ([A.to("meta")], [W.to("meta")], None, "tensors must be on the CPU or on CUDA devices, got meta"),
        ([A, A], [W, W], A[0], "bias must be a list of 2 tensors, one for each of a, got Tensor"),
        (
            [A, A[1:]],
            [W, W],
            None,
            "ranks may differ in K alone, got [6, 5] and [4, 5], and, at 1, [5, 5] and [4, 5]",
        ),
        (
            [A, A],
            [W, W[1:]],
            None,
            "ranks may differ in K alone, got [6, 5] and [4, 5], and, at 1, [6, 5] and [3, 5]",
        ),
        (
            [A, A.double()],
            [W, W.double()],
            None,
            "tensors must have equal dtypes, got torch.float32 and, at 1, torch.float64",
        ),
        (
            [A, A.to("meta")],
            [W, W.to("meta")],
            None,
            "tensors must be all on the CPU or all on GPUs, got cpu and meta",
        ),
    ],
)
def test_a_bad_list_is_refused(op, a, w, bias, message):
    with refuses(ValueError, message, op):
        op(a, w, bias=bias)


def test_a_reducescatter_needs_rows_to_split(alone):
    op = graphar.fused_matmul_reducescatter
    message = "a must have 2 dimensions or more, since its rows are split, got [5]"

    with refuses(ValueError, message, op):
        op(A[0], W, group=alone)
    with refuses(ValueError, message, op):
        op([A[0]] * 2, [W] * 2)


SQUARE = torch.zeros(5, 5)
BAD_OUTS = {
    "another shape": (torch.zeros(6, 5), "out must have the result's shape [6, 4], got [6, 5]"),
    "another dtype": (
        torch.zeros(6, 4).half(),
        "out must have the result's dtype torch.float32, got torch.float16",
    ),
    "another device": (torch.zeros(6, 4, device="meta"), "out must have the result's device cpu, got meta"),
    "a negated view": (torch._neg_view(torch.zeros(6, 4)), "out must hold its values as they are, got a negated view"),
    "one row repeated": (
        torch.zeros(1, 4).expand(6, 4),
        "out must have memory of its own for each element, got strides [0, 1]",
    ),
}


@pytest.mark.parametrize(("out", "message"), BAD_OUTS.values(), ids=BAD_OUTS)
def test_an_output_that_is_not_like_the_result_is_refused(alone, out, message):
    op = graphar.fused_matmul_allreduce

    with refuses(ValueError, message, op):
        op(A, W, out=out, group=alone)
    with refuses(ValueError, message, op):
        op([A, A], [W, W], out=[torch.zeros(6, 4), out])


@pytest.mark.parametrize("which", ["a", "w", "bias"])
def test_an_output_among_the_operands_is_refused(alone, which):
    given = {"a": torch.ones(5, 5), "w": torch.ones(5, 5), "bias": torch.ones(5)}
    out = torch.zeros(50)
    given[which] = out[: given[which].numel()].view(given[which].shape)

    with refuses(ValueError, f"out must share no memory with {which}", graphar.fused_matmul_allreduce):
        graphar.fused_matmul_allreduce(**given, out=out[3:28].view(5, 5), group=alone)


@pytest.mark.parametrize("which", ["a", "w", "bias"])
def test_an_output_among_the_operands_of_its_own_rank_is_refused(which):
    mine = {"a": torch.ones(5, 5), "w": torch.ones(5, 5), "bias": torch.ones(5)}
    room = torch.zeros(50)
    given = {
        name: [one.clone(), room[: one.numel()].view(one.shape) if name == which else one] for name, one in mine.items()
    }
    outs = [torch.zeros(5, 5), room[3:28].view(5, 5)]

    with refuses(ValueError, f"out must share no memory with {which}", graphar.fused_matmul_allreduce):
        graphar.fused_matmul_allreduce(**given, out=outs)


@pytest.mark.parametrize(
    ("out", "other", "apart"),
    [
        ((4, 8), (0, 4), True),
        ((0, 4), (4, 8), True),
        ((3, 8), (0, 4), False),
        ((0, 5), (4, 8), False),
        ((2, 2), (0, 4), True),
        ((0, 4), (2, 2), True),
    ],
)
def test_an_output_is_apart_from_what_ends_where_it_begins_and_from_what_is_empty(out, other, apart):
    room = torch.zeros(8)
    refusal = pytest.raises(ValueError, match=r"^op: out must share no memory with x$")

    with contextlib.nullcontext() if apart else refusal:
        checks.check_apart("op", room[slice(*out)], x=room[slice(*other)])


def test_lists_of_outputs_are_as_long_as_those_of_operands():
    message = "out must be a list of 2 tensors, one for each of a, got"

    for out, what in (([torch.zeros(6, 4)], "a list of 1"), (torch.zeros(2, 6, 4), "Tensor")):
        with refuses(ValueError, f"{message} {what}", graphar.fused_matmul_allreduce):
            graphar.fused_matmul_allreduce([A, A], [W, W], out=out)


@pytest.mark.parametrize("options", [{}, {"epilogue": "-v"}], ids=["plain", "epilogue"])
def test_each_rank_of_a_list_has_an_output_of_its_own(options):
    message = "out must be a tensor of its own for each rank, got one twice"

    with refuses(ValueError, message, graphar.fused_matmul_allreduce):
        graphar.fused_matmul_allreduce([A, A], [W, W], out=[torch.empty(6, 4)] * 2, **options)


def test_an_output_is_not_differentiated_through(alone):
    message = "out= cannot be differentiated through; omit it, or call under torch.no_grad()"
    w, out = W.clone().requires_grad_(), torch.zeros(6, 4)

    with refuses(ValueError, message, graphar.fused_matmul_allreduce):
        graphar.fused_matmul_allreduce(A, w, out=out, group=alone)
    with refuses(ValueError, message, graphar.fused_matmul_allreduce):
        graphar.fused_matmul_allreduce([A, A], [W, w], out=[out, out.clone()])
    with torch.no_grad():
        assert graphar.fused_matmul_allreduce(A, w, out=out, group=alone) is out
    assert (out == 5).all()
