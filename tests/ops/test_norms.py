"""graphar.allreduce_residual_rmsnorm on the CPU: its bits, its gradients, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import graphar
from graphar import Communicator, reference
from graphar.numerics.norms import RmsNorm
from graphar.ops.allreduce_rmsnorm import OP
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.select import Facts, select
from graphar.plan.shapes import for_norm
from graphar.plan.tables import shipped_table
from tests.cases import bit_patterns, normal, same_bits
from tests.ops.test_scatter_ops import world_of_one  # noqa: F401, a fixture
from tests.processes import run_ranks

SHAPES = ((1, 8), (3, 5, 40), (2, 8200), (0, 16), (7,))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
norm = graphar.allreduce_residual_rmsnorm
TABLE = shipped_table("default")


def operands(ranks: int, shape, dtype, fill=normal):
    """Every rank's input; the residual and the weight."""
    numel = torch.Size(shape).numel()
    xs = [fill(rank, numel, dtype).view(shape) for rank in range(ranks)]
    return xs, normal(20, numel, dtype).view(shape), normal(21, shape[-1], dtype)


# ---- the specification ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_specification_is_the_norm_of_the_sum_and_the_residual(dtype, offset):
    xs, residual, weight = operands(3, (5, 1000), dtype)

    normed, summed = reference.allreduce_residual_rmsnorm(xs, residual, weight, 1e-3, offset)

    assert same_bits(summed, (reference.allreduce(xs).float() + residual.float()).to(dtype)) == 0
    exactly = torch.nn.functional.rms_norm(summed.double(), (1000,), weight.double() + offset, 1e-3)
    torch.testing.assert_close(normed, exactly.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_row_with_what_is_not_a_number_leaves_the_others():
    xs, residual, weight = operands(2, (3, 16), torch.float32)
    xs[1][1, 3] = torch.inf

    normed, summed = reference.allreduce_residual_rmsnorm(xs, residual, weight)

    assert normed[1, 3].isnan()
    assert not normed[1, :3].any()
    assert summed[1, 3] == torch.inf
    assert normed[[0, 2]].isfinite().all()


def fp8(x: torch.Tensor, weight: torch.Tensor, scale: float | None = None, eps: float = 1e-6):
    """The specification of one rank's FP8, of a residual that changes nothing."""
    given = None if scale is None else torch.tensor([scale])
    return reference.allreduce_residual_rmsnorm([x], torch.full_like(x, -0.0), weight, eps, out_dtype=FP8, scale=given)


def test_fp8_is_the_nearest_code_and_of_two_the_even_one():
    codes = torch.arange(0x7F)  # of all that is not negative
    values = codes.to(torch.uint8).view(FP8).double()
    between = torch.cat([values[1:], (values[1:] + values[:-1]) / 2, normal(1, 2000, torch.float64).square() * 50])
    distance = (values - between.unsqueeze(-1)).abs()
    nearest = torch.where(distance == distance.amin(-1, keepdim=True), codes + codes % 2 * 1000, 5000).argmin(-1)

    weight = 0.25 * torch.cat([between, -between]).float()  # what a row of ones is normed to
    normed, _ = fp8(torch.ones(1, len(weight)), weight, 0.25, eps=0.0)

    assert torch.equal(normed[0].view(torch.uint8), torch.cat([nearest, nearest + 0x80]).to(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_scale_makes_its_largest_magnitude_448(dtype):
    xs, residual, weight = operands(3, (5, 1000), dtype)
    normed, summed, scales = reference.allreduce_residual_rmsnorm(xs, residual, weight, out_dtype=FP8)

    exactly = torch.nn.functional.rms_norm(summed.double(), (1000,), weight.double(), 1e-6)
    assert (scales.shape, scales.dtype) == ((5, 1), torch.float32)
    assert (normed.float().abs().amax(-1) == 448).all()
    torch.testing.assert_close(scales.double() * 448, exactly.abs().amax(-1, keepdim=True), rtol=1e-6, atol=0)
    torch.testing.assert_close(normed.double() * scales.double(), exactly, rtol=2**-4 + 1e-6, atol=0.01)


def test_rows_in_fp8_of_zeros_or_of_what_is_no_number():
    x, weight = torch.ones(5, 16), torch.ones(16)
    x[0] = -0.0
    x[1, 3], x[2, 3], x[3] = torch.nan, -torch.inf, 1e30  # squares that overflow
    normed, _, scales = fp8(x, weight)

    assert scales.view(-1)[[0, 3]].tolist() == [2**-126] * 2
    assert normed[0].view(torch.uint8).tolist() == [0x80] * 16
    assert normed[3].view(torch.uint8).tolist() == [0] * 16
    assert scales[1:3].view(torch.int32).tolist() == [[0x7FFFFFFF]] * 2
    assert normed[1:3].view(torch.uint8).tolist() == [[0x7F] * 16] * 2
    assert normed[4].float().tolist() == [448] * 16


def test_a_given_scale_saturates_infinities_and_keeps_what_is_not_a_number():
    weight = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 1e9, -1e9, 0.0, -1e-9])
    normed, _ = fp8(torch.ones(1, 8), weight, 1.0)

    assert normed.view(torch.uint8).tolist() == [[0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0xFE, 0, 0x80]]


# ---- the op ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [normal, bit_patterns], ids=lambda fill: fill.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_list_gives_the_specification(shape, dtype, fill):
    xs, residual, weight = operands(3, shape, dtype, fill)
    expected = reference.allreduce_residual_rmsnorm(xs, residual, weight, 1e-5, 1.0)

    for found, wanted in zip(norm(xs, [residual] * 3, [weight] * 3, 1e-5, weight_offset=1.0), expected, strict=True):
        assert [same_bits(one, wanted) for one in found] == [0] * 3


@pytest.mark.parametrize("scale", [None, 0.3], ids=str)
@pytest.mark.parametrize("fill", [normal, bit_patterns], ids=lambda fill: fill.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_list_gives_the_specification_in_fp8(shape, fill, scale):
    xs, residual, weight = operands(3, shape, torch.bfloat16, fill)
    given = {} if scale is None else {"scale": torch.tensor(scale)}
    expected = reference.allreduce_residual_rmsnorm(xs, residual, weight, out_dtype=FP8, **given)

    of_ranks = {name: [one] * 3 for name, one in given.items()}
    for found, wanted in zip(norm(xs, [residual] * 3, [weight] * 3, out_dtype=FP8, **of_ranks), expected, strict=True):
        assert [same_bits(one, wanted) for one in found] == [0] * 3


def in_process(rank, world_size):
    xs, residual, weight = operands(world_size, (5, 24), torch.bfloat16)
    expected = reference.allreduce_residual_rmsnorm(xs, residual, weight)
    strided = xs[rank].t().contiguous().t()
    wrong = [same_bits(*pair) for pair in zip(norm(strided, residual, weight), expected, strict=True)]
    for scale in (None, torch.tensor([0.1])):
        expected = reference.allreduce_residual_rmsnorm(xs, residual, weight, out_dtype=FP8, scale=scale)
        found = norm(strided, residual, weight, out_dtype=FP8, scale=scale)
        wrong += [same_bits(*pair) for pair in zip(found, expected, strict=True)]
    x, r, w = (one.float().requires_grad_() for one in (xs[rank], residual, weight))
    normed, summed = norm(x, r, w)
    (normed.sum() + 2 * summed.sum()).backward()
    return wrong, x.grad, r.grad, w.grad


def test_processes_get_the_specification_and_its_gradients():
    xs, residual, weight = operands(2, (5, 24), torch.bfloat16)
    total = (reference.allreduce([x.float() for x in xs]) + residual.float()).requires_grad_()
    w = weight.float().requires_grad_()
    (torch.nn.functional.rms_norm(total, (24,), w, 1e-6).sum() + 2 * total.sum()).backward()

    for wrong, of_x, of_residual, of_weight in run_ranks(in_process, 2):
        assert wrong == [0] * 7
        torch.testing.assert_close(of_residual, total.grad)
        torch.testing.assert_close(of_weight, w.grad)
        torch.testing.assert_close(of_x, 2 * total.grad)  # the sum over the ranks of their gradients


def test_the_ops_keep_the_rules_of_ops(world_of_one):  # noqa: F811
    xs, residual, weight = operands(2, (3, 16), torch.bfloat16)
    lists = (xs, [residual, residual.clone()], [weight, weight.clone()])
    scales = [torch.tensor([0.5]), torch.tensor([0.5])]

    for output, of_ranks in (("like_input", []), ("dynamic_fp8", []), ("static_fp8", scales)):
        call = {"eps": 1e-6, "weight_offset": 0.0, "output": output}
        one, two = (OP.arguments(scales=of_ranks[:ranks], **call) for ranks in (1, 2))
        opcheck(torch.ops.graphar.allreduce_residual_rmsnorm.default, (xs[0], residual, weight, *one))
        opcheck(torch.ops.graphar.allreduce_residual_rmsnorm_list.default, (*lists, *two))


@pytest.mark.parametrize("out_dtype", [None, FP8])
def test_fake_results_are_like_real_ones(out_dtype):
    xs, residual, weight = operands(2, (3, 16), torch.bfloat16)
    given = (xs, [residual] * 2, [weight] * 2)
    with FakeTensorMode() as mode:
        fakes = norm(*([mode.from_tensor(one) for one in ones] for ones in given), out_dtype=out_dtype)

    for found, expected in zip(fakes, norm(*given, out_dtype=out_dtype), strict=True):
        for fake, real in zip(found, expected, strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_a_call_that_nobody_watches_goes_past_the_dispatcher(world_of_one, monkeypatch):  # noqa: F811
    (x,), residual, weight = operands(1, (3, 16), torch.bfloat16)
    expected = norm(x, residual, weight)
    monkeypatch.setattr(torch.ops.graphar, "allreduce_residual_rmsnorm", None)

    for one, wanted in zip(norm(x, residual, weight), expected, strict=True):
        assert same_bits(one, wanted) == 0


# ---- the grid -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.parametrize("columns", [8, 1024, 8192, 20000, 32768])
@pytest.mark.parametrize("has_clusters", [False, True])
def test_rows_of_a_two_shot_have_owners_in_turn_and_fit_their_slots(world_size, columns, has_clusters):
    chip = replace(TABLE.chip, arch="sm_90a" if has_clusters else "sm_80")
    for rows in (1, 31, 132, 133, 256, 257, (64 << 20) // (2 * columns)):
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
        shape = for_norm(TABLE.norm, chip, world_size, Call.of(norm.__name__, x, epilogue=RmsNorm(columns)))
        packs, cluster = columns // 8, shape.epilogue.cluster
        teams, threads = shape.blocks // cluster, shape.threads * cluster
        assert cluster == 1 or has_clusters
        assert teams <= rows
        assert shape.blocks <= 132  # all run at once
        assert threads >= min(packs, 1024)
        assert threads & (threads - 1) == 0
        assert shape.threads % 32 == 0
        if shape.algorithm is Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT:
            assert teams == rows or teams % world_size == 0
            assert -(-rows // world_size) * packs <= shape.algorithm.row.scratch(world_size).capacity
        else:
            assert rows * packs <= shape.algorithm.row.scratch(world_size).capacity


# ---- bad input ------------------------------------------------------------------------------------------------------

X, WEIGHT, SCALE = torch.ones(4, 8), torch.ones(8), torch.ones(1)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, X, WEIGHT[:7]), {}, ValueError, "weight must be"),
        ((X, X[:3], WEIGHT), {}, ValueError, "residual must be"),
        ((X, X.half(), WEIGHT), {}, ValueError, "residual must be"),
        ((X, X, WEIGHT.double()), {}, ValueError, "weight must be"),
        ((X.double(), X.double(), WEIGHT.double()), {}, ValueError, "x must be bfloat16, float16 or float32"),
        ((X.long(), X.long(), WEIGHT.long()), {}, ValueError, "x must be bfloat16, float16 or float32"),
        ((torch.ones(()), torch.ones(()), torch.ones(())), {}, ValueError, "x must have columns"),
        ((torch.ones(3, 0), torch.ones(3, 0), torch.ones(0)), {}, ValueError, "x must have columns"),
        ((X, X, WEIGHT, float("nan")), {}, ValueError, "eps must be a finite number"),
        ((X, X, WEIGHT), {"weight_offset": "1"}, ValueError, "weight_offset must be a finite number"),
        ((X, X, WEIGHT), {"timeout_s": -1.0}, ValueError, "timeout_s"),
        ((X, None, WEIGHT), {}, TypeError, "residual"),
        ((X, X, WEIGHT), {"out_dtype": torch.float8_e5m2}, ValueError, "out_dtype must be torch.float8_e4m3fn"),
        ((X, X, WEIGHT), {"out_dtype": torch.float16}, ValueError, "out_dtype must be torch.float8_e4m3fn"),
        ((X, X, WEIGHT), {"scale": SCALE}, ValueError, "scale is for out_dtype=torch.float8_e4m3fn"),
        ((X, X, WEIGHT), {"scale": 0.5, "out_dtype": FP8}, TypeError, "scale must be a torch.Tensor"),
        ((X, X, WEIGHT), {"scale": SCALE.double(), "out_dtype": FP8}, ValueError, "scale must be one element"),
        ((X, X, WEIGHT), {"scale": torch.ones(4, 1), "out_dtype": FP8}, ValueError, "scale must be one element"),
        ((X, X, WEIGHT), {"scale": SCALE.to("meta"), "out_dtype": FP8}, ValueError, "scale must be one element"),
        (([X], [X], [WEIGHT]), {"scale": SCALE, "out_dtype": FP8}, ValueError, "scale must be a list of 1 tensors"),
        ((X, X, WEIGHT.clone().requires_grad_()), {"out_dtype": FP8}, ValueError, "FP8 cannot be differentiated"),
        (([X], [X], [WEIGHT.clone().requires_grad_()]), {"out_dtype": FP8}, ValueError, "FP8 cannot be differentiated"),
        (([X, X], X, [WEIGHT, WEIGHT]), {}, ValueError, "residual must be a list of 2 tensors"),
        (([X, X], [X, X], [WEIGHT]), {}, ValueError, "weight must be a list of 2 tensors"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(arguments, options, error, message):
    with pytest.raises(error, match=message):
        norm(*arguments, **options)


def test_one_rank_norms_its_own(world_of_one):  # noqa: F811
    (x,), residual, weight = operands(1, (4, 16), torch.bfloat16)
    with Communicator(dist.group.WORLD) as communicator:
        found = norm(x, residual, weight, group=communicator)

    for one, wanted in zip(found, reference.allreduce_residual_rmsnorm([x], residual, weight), strict=True):
        assert same_bits(one, wanted) == 0


def test_a_call_is_planned_with_its_columns():
    """Without them the kernel would be launched without its operands."""
    x = torch.empty(3, 1024, dtype=torch.bfloat16, device="meta")
    call = Call.of(norm.__name__, x, epilogue=RmsNorm(1024, output="dynamic_fp8"))
    shape, _ = select(call, Facts(2, TABLE, TABLE.chip))

    assert shape.epilogue == RmsNorm(1024, 2, "dynamic_fp8")
