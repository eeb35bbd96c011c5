"""graphar.allreduce_residual_rmsnorm on the CPU: its bits, its gradients, and what it refuses."""

from dataclasses import replace

import pytest
import torch

import graphar
from graphar import reference
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import kernel_of
from graphar.plan.select import Facts, select
from graphar.plan.tables import shipped_table
from graphar.plan.work import Norm
from tests.cases import normal, same_bits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
norm = graphar.allreduce_residual_rmsnorm
TABLE = shipped_table("default")


def operands(ranks: int, shape, dtype, fill=normal):
    """Every rank's input; the residual and the weight."""
    numel = torch.Size(shape).numel()
    xs = [fill(rank, numel, dtype).view(shape) for rank in range(ranks)]
    return xs, normal(20, numel, dtype).view(shape), normal(21, shape[-1], dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_specification_is_the_norm_of_the_sum_and_the_residual(dtype, offset):
    xs, residual, weight = operands(3, (5, 1000), dtype)

    normed, summed = reference.allreduce_residual_rmsnorm(xs, residual, weight, 1e-3, offset)

    assert same_bits(summed, (reference.allreduce(xs).float() + residual.float()).to(dtype)) == 0
    exactly = torch.nn.functional.rms_norm(summed.double(), (1000,), weight.double() + offset, 1e-3)
    torch.testing.assert_close(normed, exactly.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("offset", [-0.0, 0.0])
def test_an_offset_of_either_zero_gives_the_bits_of_the_specification_whichever_came_before(offset):
    x, weight = torch.ones(2, 8), torch.full((8,), -0.0)
    for earlier in (offset, -offset, offset):
        found = norm([x] * 2, [x] * 2, [weight] * 2, weight_offset=earlier)[0][0]
        assert same_bits(found, reference.allreduce_residual_rmsnorm([x] * 2, x, weight, 1e-6, earlier)[0]) == 0


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


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
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


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
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


@pytest.mark.parametrize("world_size", range(2, 9))
@pytest.mark.parametrize("columns", [8, 1024, 8192, 20000, 32768])
@pytest.mark.parametrize("has_clusters", [False, True])
def test_rows_of_a_two_shot_have_owners_in_turn_and_fit_their_slots(world_size, columns, has_clusters):
    chip = replace(TABLE.chip, arch="sm_90a" if has_clusters else "sm_80")
    for rows in (1, 31, 132, 133, 256, 257, (64 << 20) // (2 * columns)):
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
        call = Call.of(Norm(norm.__name__, (x.numel(),), columns), x)
        config, _ = select(call, Facts(world_size, TABLE, chip))
        packs, cluster = columns // 8, config.cluster
        teams, threads = config.blocks // cluster, config.threads * cluster
        assert cluster == 1 or has_clusters
        assert teams <= rows
        assert config.blocks <= 131  # all run at once, and leave an SM free
        assert threads >= min(packs, 1024 if cluster > 1 else 512)
        assert threads & (threads - 1) == 0
        assert config.threads % 32 == 0
        if config.algorithm is Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT:
            assert teams == rows or teams % world_size == 0
            assert -(-rows // world_size) * packs <= config.algorithm.row.scratch(world_size).capacity
        else:
            assert rows * packs <= config.algorithm.row.scratch(world_size).capacity


def test_a_call_is_planned_with_its_columns():
    """Without them the kernel would be launched without its operands."""
    x = torch.empty(3, 1024, dtype=torch.bfloat16, device="meta")
    call = Call.of(Norm(norm.__name__, (x.numel(),), 1024, "dynamic_fp8"), x)
    config, _ = select(call, Facts(2, TABLE, TABLE.chip))

    assert config.cluster == 2
    assert kernel_of(config, call).template == "2, dynamic_fp8"
