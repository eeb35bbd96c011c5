"""graphar.reducescatter with a codec, on the CPU: the specification's bits in both forms, and under torch itself."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import graphar
from graphar import Codec, Communicator, reference
from graphar.numerics.codec_reference import Noise, encode
from graphar.numerics.codecs import NAMES, codec
from graphar.ops.reducescatter import OP
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.scratch import MAX_BLOCKS, WORLD_SIZES
from graphar.plan.select import algorithms_of
from graphar.plan.shapes import for_quantized_parts
from graphar.ranks import fallback
from tests.cases import KERNEL_DTYPES, bit_patterns, left_after_scatter, normal, same_bits
from tests.processes import run_ranks

INT4 = Codec(4)
STOCHASTIC = Codec(4, 128, "stochastic", seed=11)
CODECS = (INT4, codec("fp8_e4m3"), Codec(8, 64, scheme="minmax"), STOCHASTIC)
SHAPES = ((3001,), (6, 700), (2, 1500), (1, 40), (5, 3, 70))
KERNEL = Algorithm.QUANTIZED_REDUCESCATTER
ops = torch.ops.graphar

every_codec = pytest.mark.parametrize("one", CODECS, ids=lambda one: one.text)


def expected(parts, one, call=0, axis=0, sizes=None):
    return reference.quantized_reducescatter(parts, one, one.seed or 0, call, axis, sizes)


def inputs(shape, dtype=torch.bfloat16, ranks=3, fill=normal):
    return [fill(rank, torch.Size(shape).numel(), dtype).view(shape) for rank in range(ranks)]


def wrong(found, wanted):
    """By rank, how many elements differ."""
    return [same_bits(*pair) for pair in zip(found, wanted, strict=True)]


@pytest.fixture
def trio():
    with Communicator(devices=["cpu"] * 3) as communicator:
        yield communicator


# ---- the specification ----------------------------------------------------------------------------------------------


@every_codec
def test_each_part_is_rounded_as_an_all_reduce_rounds_a_tensor_but_its_sum_is_not(one):
    parts = inputs((2 * 1024, 3), torch.float32, ranks=2)  # each part has whole tiles

    found = torch.cat(expected(parts, one))

    wires = [encode(part.view(-1), one, Noise(one.seed or 0, 0, rank)) for rank, part in enumerate(parts)]
    assert same_bits(found, reference.part_of_wires(wires, one, parts[0])) == 0
    exact = reference.allreduce(parts)
    two_roundings = reference.quantized_allreduce(parts, one, one.seed or 0)
    assert 0 < (found - exact).norm() < (two_roundings - exact).norm()


def test_a_part_shares_no_bucket_with_its_neighbours():
    calm, loud = torch.full((40,), 0.01), torch.full((40,), 1000.0)
    parts = [torch.cat([calm, loud])] * 2

    first, second = expected(parts, INT4)

    torch.testing.assert_close(first, 2 * calm, rtol=0.01, atol=0)
    torch.testing.assert_close(second, 2 * loud, rtol=0.01, atol=0)


def test_parts_round_at_random_each_in_its_own_way():
    parts = [torch.cat([normal(rank, 1024, torch.float32)] * 2) for rank in range(2)]

    first, second = expected(parts, STOCHASTIC)

    assert same_bits(first, second) > 100


# ---- results --------------------------------------------------------------------------------------------------------


@every_codec
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_a_list_gets_the_specifications_bits(one, dtype):
    for shape in SHAPES:
        for axis in range(len(shape)):
            parts = inputs(shape, dtype, fill=bit_patterns)
            with Communicator(devices=["cpu"] * 3) as communicator:
                found = communicator.reducescatter(parts, codec=one, axis=axis)

            assert wrong(found, expected(parts, one, axis=axis)) == [0, 0, 0]
            assert all(part.is_contiguous() for part in found)


def scatter_as_rank(rank, world_size):
    found = []
    for one in CODECS:
        for shape in SHAPES:
            parts = inputs(shape, ranks=world_size)
            y = graphar.reducescatter(parts[rank], codec=one, axis=-1)
            found.append(same_bits(y, expected(parts, one, len(found), len(shape) - 1)[rank]))
    return found


def test_processes_get_the_specifications_bits():
    for found in run_ranks(scatter_as_rank, 3):
        assert found == [0] * len(CODECS) * len(SHAPES)


UNEVEN = (0, 3000, 1025)
UNEVEN_CALL = Call("reducescatter", UNEVEN, torch.bfloat16, -1, codec=STOCHASTIC.text)


def scatter_unevenly_as_rank(rank, world_size):
    fallback._CHUNK_NUMEL = 1024  # so that parts go in several pieces, some of them empty
    parts = inputs((sum(UNEVEN),))
    out = torch.empty(UNEVEN[rank], dtype=torch.bfloat16)
    Communicator().engine.run(UNEVEN_CALL, parts[rank], out)
    return same_bits(out, expected(parts, STOCHASTIC, sizes=UNEVEN)[rank])


def test_processes_may_have_parts_of_any_lengths():
    assert run_ranks(scatter_unevenly_as_rank, 3) == [0, 0, 0]


def test_a_list_may_have_parts_of_any_lengths(trio, monkeypatch):
    monkeypatch.setattr(fallback, "_CHUNK_NUMEL", 1024)
    parts = inputs((sum(UNEVEN),))
    outs = [torch.empty(count, dtype=torch.bfloat16) for count in UNEVEN]

    trio.engine.run(UNEVEN_CALL, parts, outs)

    assert wrong(outs, expected(parts, STOCHASTIC, sizes=UNEVEN)) == [0, 0, 0]


def test_each_call_rounds_in_other_directions(trio):
    parts = inputs((3001,))

    calls = [trio.reducescatter(parts, codec=STOCHASTIC) for _ in range(3)]

    assert [wrong(found, expected(parts, STOCHASTIC, call)) for call, found in enumerate(calls)] == [[0] * 3] * 3
    assert same_bits(calls[0][0], calls[1][0]) > 100


def test_an_empty_tensor_and_one_rank_change_nothing(trio):
    x = normal(0, 77, torch.float32)

    assert [part.shape for part in trio.reducescatter([torch.ones(0, 4)] * 3, codec="int4")] == [(0, 4)] * 3
    assert same_bits(graphar.reducescatter([x], codec="int2")[0], x) == 0


# ---- residuals ------------------------------------------------------------------------------------------------------


def step(xs, residuals, one, call, axis):
    """What the ranks receive, and the residuals afterwards, by the specification."""
    parts = [residual + x for x, residual in zip(xs, residuals, strict=True)]
    received = expected(parts, one, call, axis)
    counts, left = [part.numel() for part in received], []
    for rank, part in enumerate(parts):
        rows = part.movedim(axis, 0).contiguous()
        errors = left_after_scatter(rows.view(-1), one, Noise(one.seed or 0, call, rank), counts)
        left.append(errors.view(rows.shape).movedim(0, axis).contiguous())
    return received, left


def feed_back_as_rank(rank, world_size, one, axis):
    xs, residuals = ([normal(r + at, 4200, torch.bfloat16).view(6, 700) for r in range(3)] for at in (0, 50))
    mine = residuals[rank].clone()
    for call in range(3):
        received, residuals = step(xs, residuals, one, call, axis)
        y = graphar.reducescatter(xs[rank], codec=one, residual=mine, axis=axis)
        assert same_bits(y, received[rank]) == 0
        assert same_bits(mine, residuals[rank]) == 0
    return True


@pytest.mark.parametrize(("one", "axis"), [(INT4, 0), (STOCHASTIC, 1)], ids=["int4, 0", "stochastic, 1"])
def test_processes_keep_the_specifications_residuals(one, axis):
    assert all(run_ranks(feed_back_as_rank, 3, one, axis))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_list_keeps_the_specifications_residuals(trio, axis):
    xs, residuals = ([bit_patterns(r + at, 4200, torch.float16).view(6, 700) for r in range(3)] for at in (0, 7))
    received, left = step(xs, residuals, STOCHASTIC, 0, axis)

    ys = trio.reducescatter(xs, codec=STOCHASTIC, residual=residuals, axis=axis)

    assert wrong(ys, received) == [0, 0, 0]
    assert wrong(residuals, left) == [0, 0, 0]


@pytest.mark.parametrize("op", [graphar.allreduce, graphar.reducescatter], ids=lambda op: op.__name__)
def test_one_rank_leaves_nothing_in_its_residual(op):
    residual = torch.ones(8)

    (y,) = op([torch.full((8,), 2.0)], codec="int4", residual=[residual])

    assert y.tolist() == [3] * 8
    assert not residual.any()


# ---- torch ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_ops_keep_the_rules_of_ops(world_of_one, requires_grad, axis):
    xs = [torch.randn(4, 6).requires_grad_(requires_grad) for _ in range(2)]
    size, call = xs[0].shape[axis], {"axis": axis, "codec": "int4"}

    opcheck(ops.reducescatter.default, (xs[0], *OP.arguments(rank=0, sizes=[size], **call)))
    opcheck(ops.reducescatter_list.default, (xs, *OP.arguments(sizes=[size // 2] * 2, **call)))


def test_the_ops_say_what_they_write(world_of_one):
    xs, residuals = [torch.randn(4, 6), torch.randn(4, 6)], [torch.randn(4, 6), torch.randn(4, 6)]
    one, two = (OP.arguments(axis=1, codec="int4", rank=rank, sizes=sizes) for rank, sizes in ((0, [6]), (-1, [3, 3])))

    opcheck(ops.reducescatter_out.default, (xs[0], residuals[:1], torch.empty(4, 6), *one))
    opcheck(ops.reducescatter_list_out.default, (xs, residuals, [torch.empty(4, 3), torch.empty(4, 3)], *two))


def test_a_fake_result_has_the_shape_strides_and_dtype_of_a_real_one():
    real = torch.randn(5, 4, dtype=torch.float16).t()
    for axis in (0, 1):
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(real)
            found = graphar.reducescatter([fake, fake], codec="int4", axis=axis)

        for mine, wanted in zip(found, graphar.reducescatter([real, real], codec="int4", axis=axis), strict=True):
            assert (mine.shape, mine.stride(), mine.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


def test_a_fake_result_is_as_long_as_its_ranks_part(group_of):
    group_of(2, rank=1)
    with FakeTensorMode() as mode:
        x, residual = (mode.from_tensor(torch.ones(3, 4)) for _ in range(2))
        plain = ops.reducescatter(x, *OP.arguments(rank=1, sizes=[2, 1], codec="int4"))
        fed_back = graphar.reducescatter(x, codec="int4", residual=residual)

    assert plain.shape == fed_back.shape == (1, 4)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_compiled_function_gives_the_same_bits():
    torch._dynamo.reset()
    parts = inputs((6, 700), ranks=2)

    def scatter(a, b):
        first, second = graphar.reducescatter([a * 2, b], codec=Codec(6, 64), axis=1)
        return first + 1, second

    found = torch.compile(scatter, fullgraph=True, backend="aot_eager")(*parts)

    assert wrong(found, scatter(*parts)) == [0, 0]


@pytest.mark.parametrize("axis", [0, 1])
def test_the_gradient_is_the_gathered_one_as_it_is(axis):
    xs = [x.requires_grad_() for x in inputs((5, 6), torch.float32, ranks=2)]
    outs = graphar.reducescatter(xs, codec="int2", axis=axis)
    gradients = [torch.randn_like(out) for out in outs]

    torch.autograd.backward(outs, gradients)

    assert [same_bits(x.grad, torch.cat(gradients, axis)) for x in xs] == [0, 0]


def gradient_as_rank(rank, world_size):
    x = normal(rank, 12, torch.float32).view(4, 3).requires_grad_()
    graphar.reducescatter(x, codec="int8").backward(torch.full((2, 3), rank + 1.0))
    return x.grad


def test_processes_get_the_gathered_gradient():
    for gradient in run_ranks(gradient_as_rank, 2):
        assert gradient.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2


# ---- what is chosen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("one", [*map(codec, NAMES), Codec(8, 32, scheme="minmax", scale_dtype=torch.float32)], ids=str)
def test_a_shape_can_run(world_size, one):
    room = KERNEL.row.scratch(world_size).capacity * 16
    for numel in (1, 1024, 1025, 1 << 20, 1 << 25, 1 << 31):
        shape = for_quantized_parts(132, one, world_size, numel)
        assert 1 <= shape.blocks <= MAX_BLOCKS
        assert shape.threads in range(32 * world_size, 513, 32)
        assert 1 <= shape.chunk * one.tile_nbytes <= room


def test_any_codec_has_its_kernel():
    assert algorithms_of(INT4, "reducescatter") == algorithms_of(Codec(4, scheme="minmax"), "reducescatter") == [KERNEL]
    assert algorithms_of(INT4, "allgather") == []


# ---- bad arguments --------------------------------------------------------------------------------------------------

_NAMES = "fp8_e4m3, int8, int6, int5, int4, int3, int2"
BAD = {
    "a name": ({"codec": "int7"}, ValueError, f"codec must be a graphar.Codec or one of {_NAMES}, got 'int7'"),
    "a number": ({"codec": 4}, TypeError, "codec must be a graphar.Codec or the name of one, got int"),
    "an axis": ({"codec": "int4", "axis": 1}, ValueError, "axis must be from -1 to 0 for a tensor of shape [8], got 1"),
    "a timeout": (
        {"codec": "int4", "timeout_s": 0},
        ValueError,
        "timeout_s must be above 0 and at most 1e6 seconds, got 0",
    ),
    "feedback without a residual": (
        {"codec": Codec(4, feedback=True)},
        ValueError,
        "a codec with feedback leaves what it takes in a residual, and there is none",
    ),
    "a residual without a codec": (
        {"residual": [torch.zeros(8)] * 3},
        ValueError,
        "residual holds what a codec took, and there is no codec",
    ),
    "a residual of another shape": (
        {"codec": "int4", "residual": [torch.zeros(9)] * 3},
        ValueError,
        "residual must have the input's shape [8], got [9]",
    ),
    "a residual with gaps": (
        {"codec": "int4", "residual": [torch.zeros(16)[::2] for _ in range(3)]},
        ValueError,
        "residual must be contiguous, got strides [2]",
    ),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD.values(), ids=BAD)
def test_a_bad_argument_is_refused(trio, arguments, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(f'reducescatter: {message}')}$"):
        trio.reducescatter([torch.ones(8) for _ in range(3)], **arguments)


@pytest.mark.parametrize(
    ("x", "residual", "kind", "message"),
    [
        ([1.0], None, TypeError, "tensor 0 must be a torch.Tensor, got float"),
        ([torch.ones(3), torch.ones(4)], None, ValueError, "tensors must have equal shapes, got [3] and, at 1, [4]"),
        (1.0, None, TypeError, "x must be a torch.Tensor, got float"),
        (torch.ones(3).double(), None, ValueError, "a codec rounds bfloat16, float16 and float32, got a tensor of"),
        (torch.ones(3), torch.ones(4), ValueError, "residual must have the input's shape [3], got [4]"),
    ],
)
def test_a_bad_tensor_is_refused(world_of_one, x, residual, kind, message):
    with pytest.raises(kind, match=re.escape(f"reducescatter: {message}")):
        graphar.reducescatter(x, codec="int4", residual=residual)


def test_a_residual_is_apart_from_the_input_and_kept_where_a_codec_is_refused(trio):
    xs, residuals = ([torch.ones(8) for _ in range(3)] for _ in range(2))

    with pytest.raises(ValueError, match="residual must share no memory with x"):
        trio.reducescatter(xs, codec="int4", residual=xs)
    for call in (trio.allreduce, trio.reducescatter):
        with pytest.raises(ValueError, match="codec must be"):
            call(xs, codec="int7", residual=residuals)

    assert all(residual.tolist() == [1] * 8 for residual in residuals)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_a_dtype_that_no_codec_rounds_is_refused(trio, dtype):
    with pytest.raises(ValueError, match="reducescatter: a codec rounds bfloat16, float16 and float32, got a tensor"):
        trio.reducescatter([torch.ones(3, dtype=dtype)] * 3, codec="int4")


def test_random_rounding_without_a_seed_is_refused_where_determinism_is_asked_for(trio):
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="stochastic rounding without a seed is not deterministic"):
            trio.reducescatter([torch.ones(3)] * 3, codec=Codec(4, rounding="stochastic"))
    finally:
        torch.use_deterministic_algorithms(False)
