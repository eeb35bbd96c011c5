"""graphar.reducescatter_residual_rmsnorm on real GPUs: to each rank the specification's bits of its own rows."""

from __future__ import annotations

import itertools

import pytest
import torch

import graphar
from graphar import reference
from graphar.plan.algorithms import Algorithm
from graphar.plan.select import has_norm_kernel
from tests.cases import bit_patterns, normal, same_bits
from tests.gpu import DTYPES, Ranks, poison
from tests.processes import run_ranks
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
OUTPUTS = {
    "as x": {},
    "dynamic": {"out_dtype": FP8},
    "static": {"out_dtype": FP8, "scale": torch.tensor([0.01])},
    "groups": {"out_dtype": FP8, "group_size": 128},
}
# Fewer rows than ranks, few, many, and rows of several launches; long rows, and rows without a kernel.
ROWS_AND_COLUMNS = (
    *((1, 8), (1, 8192), (2, 4096), (7, 16384), (8, 8192), (33, 1024), (131, 7168), (1027, 4096)),
    *((4099, 8192), (40001, 128), (700, 32768), (5, 24), (300, 264), (9, 7)),
)
KERNEL = Algorithm.REDUCESCATTER_RMSNORM
norm = graphar.reducescatter_residual_rmsnorm


def operands(world_size: int, rows: int, columns: int, dtype, fill=normal, seed: int = 0):
    """Every rank's input, its rows of the residual, and the weight. Large ones are made on the first GPU."""
    if rows * columns > 1 << 22:
        generator = torch.Generator("cuda:0").manual_seed(rows)
        drawn = torch.randn(world_size + 1, rows, columns, dtype=dtype, device="cuda:0", generator=generator)
        *xs, residual = drawn.unbind()
    else:
        xs = [fill(seed + rank, rows * columns, dtype).view(rows, columns) for rank in range(world_size)]
        residual = normal(seed + 20, rows * columns, dtype).view(rows, columns)
    weight = normal(seed + 21, columns, dtype).to(xs[0].device)
    return xs, list(residual.tensor_split(world_size)), weight


def place(ranks: Ranks, xs, residuals, weight):
    return ranks.place(xs), ranks.place(residuals), ranks.place([weight] * ranks.world_size)


def assert_bits(found, expected) -> None:
    """``found`` are lists by result, and ``expected`` tuples by rank."""
    for rank, (ones, wanted) in enumerate(zip(zip(*found, strict=True), expected, strict=True)):
        wrong = [same_bits(one.to(other.device), other) for one, other in zip(ones, wanted, strict=True)]
        assert wrong == [0] * len(wanted), f"rank {rank}"


def check(ranks: Ranks, rows: int, columns: int, dtype=torch.bfloat16, fill=normal, scale=None, **options) -> None:
    drawn = operands(ranks.world_size, rows, columns, dtype, fill)
    given, before = place(ranks, *drawn), ranks.calls_of(KERNEL)
    scales = scale if scale is None else ranks.place([scale] * ranks.world_size)
    poison([one.nbytes for one in given[1]])
    found = norm(*given, group=ranks.communicator, scale=scales, **options)
    ranks.communicator.synchronize()
    scale = scale if scale is None else scale.to(drawn[2].device)
    assert_bits(found, reference.reducescatter_residual_rmsnorm(*drawn, scale=scale, **options))
    assert (ranks.calls_of(KERNEL) != before) == has_norm_kernel(columns * dtype.itemsize)


def fitting(output: str, columns: int) -> bool:
    return output != "groups" or columns % 128 == 0


@pytest.mark.parametrize(
    ("rows", "columns", "output"),
    [(*shape, output) for shape, output in itertools.product(ROWS_AND_COLUMNS, OUTPUTS) if fitting(output, shape[1])],
)
def test_parts_of_any_shape_give_the_specification(ranks: Ranks, rows, columns, output):
    check(ranks, rows, columns, eps=1e-5, **OUTPUTS[output])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fill", [normal, bit_patterns], ids=lambda fill: fill.__name__)
def test_any_data_of_any_dtype_gives_the_specification(ranks: Ranks, dtype, fill):
    for (rows, columns), (name, output) in itertools.product(((3, 512), (129, 2048), (33, 8200)), OUTPUTS.items()):
        if fitting(name, columns):
            check(ranks, rows, columns, dtype, fill, weight_offset=1.0, **output)


def test_calls_of_other_shapes_follow_one_another_and_leave_their_scratch_as_before(ranks: Ranks):
    outputs = list(OUTPUTS.values())
    for turn in range(40):
        rows, columns = ((1, 8192), (64, 4096), (17, 8192), (2, 128), (400, 1024))[turn * 7 % 5]
        check(ranks, rows, columns, **outputs[turn % 4])
    assert ranks.grid_is_idle(KERNEL)
    assert ranks.scratch_is_as_before(KERNEL)


def test_calls_in_a_row_without_a_wait(ranks: Ranks):
    shapes = ((1, 2048), (8, 4096), (300, 7168), (2, 7168), (32, 1024))
    made = [operands(ranks.world_size, *shapes[turn % 5], torch.bfloat16, seed=100 * turn) for turn in range(30)]
    placed = [place(ranks, *drawn) for drawn in made]

    results = [norm(*given, group=ranks.communicator) for given in placed]

    ranks.communicator.synchronize()
    for found, drawn in zip(results, made, strict=True):
        assert_bits(found, reference.reducescatter_residual_rmsnorm(*drawn))


def test_epochs_wrap(fresh_ranks: Ranks):
    check(fresh_ranks, 5, 4096)
    fresh_ranks.set_epochs(KERNEL, 2**32 - 4)
    for turn in range(8):
        check(fresh_ranks, 1 + 40 * turn, 4096)
    assert fresh_ranks.calls_of(KERNEL) == 4


def test_what_is_prepared_can_be_captured_first(fresh_ranks: Ranks):
    fresh_ranks.communicator.prepare([torch.bfloat16], ops=[f"{norm.__name__}_grouped_fp8"])
    drawn = {rows: operands(fresh_ranks.world_size, rows, 2048, torch.bfloat16) for rows in (3, 200)}
    placed, found = {rows: place(fresh_ranks, *one) for rows, one in drawn.items()}, {}

    def call() -> None:
        for rows, given in placed.items():
            found[rows] = norm(*given, **OUTPUTS["groups"], group=fresh_ranks.communicator)

    fresh_ranks.capture(call).replay()
    fresh_ranks.communicator.synchronize()
    for rows, one in drawn.items():
        assert_bits(found[rows], reference.reducescatter_residual_rmsnorm(*one, **OUTPUTS["groups"]))


def test_misaligned_tensors(ranks: Ranks):
    drawn = operands(ranks.world_size, 9, 384, torch.bfloat16)
    shifted = [
        [torch.cat([one.new_zeros(1), one.flatten()])[1:].view(one.shape) for one in ones]
        for ones in place(ranks, *drawn)
    ]
    for output in (OUTPUTS["as x"], OUTPUTS["dynamic"], OUTPUTS["groups"]):
        found = norm(*shifted, group=ranks.communicator, **output)
        ranks.communicator.synchronize()
        assert_bits(found, reference.reducescatter_residual_rmsnorm(*drawn, **output))


# ---- processes ------------------------------------------------------------------------------------------------------


def replays(rank, world_size):
    """Layers in a graph, decoding and prefill, and eager calls in between: wrong elements of this rank's results."""
    layers, outputs = [], list(OUTPUTS.values())
    for at, (rows, columns) in enumerate(((1, 2048), (8, 4096), (128, 7168), (33, 1024), (4600, 8192), (5, 8192))):
        drawn = operands(world_size, rows, columns, torch.bfloat16, seed=100 * at)
        drawn = [[one.cuda() for one in ones] for ones in (*drawn[:2], drawn[2:])]
        output = {name: one.cuda() if name == "scale" else one for name, one in outputs[at % 4].items()}
        expected = reference.reducescatter_residual_rmsnorm(*drawn[:2], *drawn[2], **output)[rank]
        layers.append(((drawn[0][rank], drawn[1][rank], *drawn[2]), output, expected))

    def run():
        return [norm(*given, **output) for given, output, _ in layers]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(20):
        graph.replay()
        eager = run()
    torch.cuda.synchronize()
    return [
        same_bits(one, wanted)
        for results in (captured, eager)
        for ones, (*_, expected) in zip(results, layers, strict=True)
        for one, wanted in zip(ones, expected, strict=True)
    ]


@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_layers_replay_in_graphs_beside_eager_calls(world_size):
    for found in run_ranks(replays, world_size, backend="cpu:gloo,cuda:nccl", timeout_s=180):
        assert set(found) == {0}


def without_a_rank(rank, world_size):
    x, own = (torch.ones(rows, 1024, dtype=torch.bfloat16, device="cuda") for rows in (4, 2))
    with graphar.Communicator() as communicator:
        norm(x, own, x[0], group=communicator)
        communicator.synchronize()
        if rank == 0:
            return 0
        try:
            norm(x, own, x[0], group=communicator, timeout_s=1.0)
            communicator.synchronize()
        except graphar.CollectiveTimeout as error:
            torch.cuda.synchronize()
            return error.record.peer


@pytest.mark.gpu(2)
def test_a_rank_that_does_not_come_is_named():
    assert run_ranks(without_a_rank, 2, backend="cpu:gloo,cuda:nccl", timeout_s=120) == [0, 0]
