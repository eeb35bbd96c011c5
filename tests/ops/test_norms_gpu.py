"""Sums with residual and RMSNorm on real GPUs, of all rows and of each rank's own: the specification's bits."""

from __future__ import annotations

import itertools

import pytest
import torch

import graphar
from graphar import reference
from graphar.plan.algorithms import Algorithm, with_kernels
from graphar.plan.select import has_norm_kernel
from tests.cases import normal, same_bits
from tests.gpu import Ranks, poison
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
ALL, PARTS = graphar.allreduce_residual_rmsnorm, graphar.reducescatter_residual_rmsnorm
# By op: few rows, many, and rows of several launches; long rows, and rows without a kernel. Ranks may have no row.
KERNELS = {ALL: tuple(with_kernels(ALL.__name__)), PARTS: (Algorithm.REDUCESCATTER_RMSNORM,)}
OUTPUTS = {
    "as x": {},
    "dynamic": {"out_dtype": FP8},
    "static": {"out_dtype": FP8, "scale": torch.tensor([0.01])},
    "groups": {"out_dtype": FP8, "group_size": 128},
}

every_op = pytest.mark.parametrize("op", [ALL, PARTS], ids=lambda op: op.__name__)


def operands(op, world_size: int, rows: int, columns: int, dtype, fill=normal, seed: int = 0):
    """Every rank's input, its residual and its weight. Large ones are made on the first GPU."""
    if rows * columns > 1 << 22:
        generator = torch.Generator("cuda:0").manual_seed(rows)
        drawn = torch.randn(world_size + 1, rows, columns, dtype=dtype, device="cuda:0", generator=generator)
        *xs, residual = drawn.unbind()
    else:
        xs = [fill(seed + rank, rows * columns, dtype).view(rows, columns) for rank in range(world_size)]
        residual = normal(seed + 20, rows * columns, dtype).view(rows, columns)
    weight = normal(seed + 21, columns, dtype).to(xs[0].device)
    residuals = [residual] * world_size if op is ALL else list(residual.tensor_split(world_size))
    return xs, residuals, [weight] * world_size


def place(ranks: Ranks, drawn):
    return [ranks.place(ones) for ones in drawn]


def specified(op, drawn, scale=None, **options):
    """What each rank gets."""
    xs, residuals, weights = drawn
    scale = scale if scale is None else scale.to(weights[0].device)
    if op is PARTS:
        return reference.reducescatter_residual_rmsnorm(xs, residuals, weights[0], scale=scale, **options)
    found = reference.allreduce_residual_rmsnorm(xs, residuals[0], weights[0], scale=scale, **options)
    return [found] * len(xs)


def assert_bits(found, expected, what: object = "") -> None:
    """``found`` are lists by result, and ``expected`` tuples by rank."""
    for rank, (ones, wanted) in enumerate(zip(zip(*found, strict=True), expected, strict=True)):
        wrong = [same_bits(one.to(other.device), other) for one, other in zip(ones, wanted, strict=True)]
        assert wrong == [0] * len(wanted), f"rank {rank} {what}"


def calls(ranks: Ranks, op) -> list[int]:
    return [ranks.calls_of(kernel) for kernel in KERNELS[op]]


def run(ranks: Ranks, op, given, scale=None, **options):
    scales = scale if scale is None else ranks.place([scale] * ranks.world_size)
    return op(*given, group=ranks.communicator, scale=scales, **options)


def check(ranks: Ranks, op, rows: int, columns: int, dtype=BF16, fill=normal, **options) -> None:
    drawn = operands(op, ranks.world_size, rows, columns, dtype, fill)
    given, before = place(ranks, drawn), calls(ranks, op)
    poison([one.nbytes for one in given[1]])
    found = run(ranks, op, given, **options)
    ranks.communicator.synchronize()
    assert_bits(found, specified(op, drawn, **options), (rows, columns, options))
    assert (calls(ranks, op) != before) == has_norm_kernel(columns * dtype.itemsize)


# ---- bits -----------------------------------------------------------------------------------------------------------


def test_weights_that_are_no_numbers_and_rows_of_zeros_in_fp8(ranks: Ranks):
    xs, residual = [torch.zeros(140, 4096) for _ in range(ranks.world_size)], torch.zeros(140, 4096)
    xs[0][::2] = 1.0
    for special in (torch.inf, -torch.inf, torch.nan, 1e38, 1e-38):
        weight = torch.ones(4096)
        weight[4000] = special
        drawn = xs, [residual] * ranks.world_size, [weight] * ranks.world_size
        given = place(ranks, drawn)
        for scale in (None, torch.tensor(0.5)):
            found = run(ranks, ALL, given, scale, out_dtype=FP8)
            ranks.communicator.synchronize()
            assert_bits(found, specified(ALL, drawn, scale, out_dtype=FP8), (special, scale))


# ---- call after call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "launches"), [(1, [1, 0]), (1024, [0, 1])])
def test_few_rows_go_in_one_hop_and_many_in_two(ranks: Ranks, rows, launches):
    for name in ("as x", "dynamic", "static"):
        before = calls(ranks, ALL)
        check(ranks, ALL, rows, 4096, **OUTPUTS[name])
        assert [now - one for now, one in zip(calls(ranks, ALL), before, strict=True)] == launches


# ---- processes ------------------------------------------------------------------------------------------------------

# Decoding and prefill.
LAYERS = {
    ALL: ((1, 2048), (8, 4096), (128, 7168), (32, 1024), (600, 8192), (4, 8192)) * 2,
    PARTS: ((1, 2048), (8, 4096), (128, 7168), (33, 1024), (4600, 8192), (5, 8192)),
}


def replays(rank, world_size, op):
    """Unsynchronised layers in a graph, with each output, and eager calls in between: wrong elements."""
    layers = []
    for at, (rows, columns) in enumerate(LAYERS[op]):
        drawn = [[one.cuda() for one in ones] for ones in operands(op, world_size, rows, columns, BF16, seed=100 * at)]
        output = dict(OUTPUTS[list(OUTPUTS)[(at + at // 4) % 4]])
        expected = specified(op, drawn, **output)[rank]
        output |= {name: one.cuda() for name, one in output.items() if name == "scale"}
        layers.append(([ones[rank] for ones in drawn], output, expected))

    def run_all():
        return [op(*given, **output) for given, output, _ in layers]

    run_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_all()
    for _ in range(20):
        graph.replay()
        eager = run_all()
    torch.cuda.synchronize()
    found = itertools.chain(zip(captured, layers, strict=True), zip(eager, layers, strict=True))
    return [same_bits(*pair) for ones, (*_, wanted) in found for pair in zip(ones, wanted, strict=True)]


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@every_op
@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_layers_replay_in_graphs_beside_eager_calls(world_size, op):
    for found in run_on_gpus(replays, world_size, op):
        assert set(found) == {0}
