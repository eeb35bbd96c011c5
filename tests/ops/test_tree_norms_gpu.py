"""Sums of fp32 partials as a tree, with residual and norm, on real GPUs: the specification's bits on every rank."""

import itertools

import pytest
import torch

from graphar.numerics import leaf_tree, norms
from graphar.numerics.nan import with_canonical_nan
from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.plan.call import Operands
from graphar.runtime.bind import residual_norm
from graphar.runtime.registry import engine_of_group
from tests.cases import HALVES, bit_patterns, normal, same_bits
from tests.gpu import DTYPES, Ranks
from tests.ops.gpu_cases import NUMBERS, tree_call
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

FP32, BF16 = torch.float32, torch.bfloat16
OPS = (ALLREDUCE_NORM, REDUCESCATTER_NORM)
# Fewer rows than ranks, few, many, and rows of several launches; long rows, and rows without a kernel.
several_gpus = pytest.mark.gpu
every_op = pytest.mark.parametrize("op", OPS)


def operands(world_size: int, rows: int, columns: int, dtype):
    """Every rank's partial, the residual and the weight."""
    xs = [normal(rank, rows * columns, FP32).view(rows, columns) for rank in range(world_size)]
    return xs, normal(20, rows * columns, dtype).view(rows, columns), normal(21, columns, dtype)


def specified(xs, residual, weight):
    return norms.specification(leaf_tree.tree_sum(xs), residual, weight, *NUMBERS)


# ---- several GPUs, one process --------------------------------------------------------------------------------------


@several_gpus
@pytest.mark.usefixtures("as_many_as_trees")
@every_op
def test_the_kernel_is_told(ranks: Ranks, op):
    (x, *_), *_ = operands(ranks.world_size, 4, 1024, BF16)
    x = x.cuda(0)
    explained = ranks.communicator.engine.explain(tree_call(op, x, ranks.world_size, BF16), x)

    assert "rmsnorm" in explained.algorithm
    assert explained.reason.endswith("; added as a tree")


# ---- several GPUs, a process each -----------------------------------------------------------------------------------


def answers(rank: int, world_size: int):
    """What this rank gets, for both ops, each dtype and two calls of each shape."""
    engine, found = engine_of_group(""), []
    for op, dtype, (rows, columns) in itertools.product(OPS, DTYPES, ((1, 4096), (300, 1024), (9, 12))):
        xs, residual, weight = operands(world_size, rows, columns, dtype)
        own = residual if op == ALLREDUCE_NORM else residual.tensor_split(world_size)[rank]
        given = tuple(one.cuda() for one in (xs[rank], own, weight))
        for _ in range(2):
            made = Operands(given, (torch.full_like(given[1], 7), torch.full_like(given[1], 7)))
            engine.run(tree_call(op, given[0], world_size, dtype), [made])
        torch.cuda.synchronize()
        expected = specified(xs, residual, weight)
        if op == REDUCESCATTER_NORM:
            expected = [one.tensor_split(world_size)[rank] for one in expected]
        found += [same_bits(one.cpu(), wanted) for one, wanted in zip(made.outputs, expected, strict=True)]
    return found


@several_gpus
@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_processes_get_the_specifications_bits(world_size):
    if world_size not in (2, 4, 8):
        pytest.skip("a tree has 2, 4 or 8 ranks")
    assert run_on_gpus(answers, world_size) == [[0] * 36] * world_size


# ---- one GPU, one rank ----------------------------------------------------------------------------------------------


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("of_sum", "dtype"), [*((dtype, dtype) for dtype in DTYPES), *((FP32, dtype) for dtype in HALVES)], ids=str
)
def test_the_local_kernel_norms_sums_to_the_bit_whatever_they_hold(of_sum, dtype):
    widths = (8, 1032, 8192, (1 << 16) // dtype.itemsize)
    for rows, columns, fill in itertools.product((1, 265, 700), widths, (normal, bit_patterns)):
        total = with_canonical_nan(fill(0, rows * columns, of_sum).view(rows, columns)).cuda()
        residual = normal(20, rows * columns, dtype).view(rows, columns).cuda()
        weight = normal(21, columns, dtype).cuda()
        normed = total if of_sum == dtype else torch.empty_like(residual)  # in place of the sum, where it fits
        results = normed, torch.empty_like(residual)
        expected = norms.specification(total, residual, weight, *NUMBERS)
        assert residual_norm.serves(residual, of_sum)

        residual_norm.norm(total, residual, weight, *results, *NUMBERS)

        assert [same_bits(*pair) for pair in zip(results, expected, strict=True)] == [0, 0], (rows, columns)


@pytest.mark.gpu(1)
def test_the_local_kernel_takes_rows_of_any_alignment():
    room, numel = torch.empty(3 * 1024 + 1, device="cuda"), 3 * 1024
    total = room[1:].view(3, 1024).copy_(normal(0, numel, FP32).view(3, 1024))
    residual, weight = normal(20, numel, BF16).view(3, 1024).cuda(), normal(21, 1024, BF16).cuda()
    results = torch.empty_like(residual), torch.empty_like(residual)

    residual_norm.norm(total, residual, weight, *results, *NUMBERS)

    expected = norms.specification(total, residual, weight, *NUMBERS)
    assert [same_bits(*pair) for pair in zip(results, expected, strict=True)] == [0, 0]
