"""graphar.allreduce_residual_rmsnorm on real GPUs: the specification's bits on every rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import graphar
from graphar import reference
from graphar.plan.algorithms import with_kernels
from graphar.plan.select import has_norm_kernel
from tests.cases import bit_patterns, normal, same_bits
from tests.gpu import DTYPES, Ranks, poison
from tests.processes import run_ranks
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu

ROWS_AND_COLUMNS = (
    *((1, 4096), (8, 4096), (1, 8192), (8, 8192), (1, 16384), (1024, 4096), (4096, 8192), (8192, 8192)),
    *((17, 16384), (20, 16384), (48, 8192), (1, 2048), (1, 7168), (8, 7168), (16, 7168), (32, 1024), (4, 8192)),
    *((1, 8), (5, 24), (300, 264), (133, 1032), (700, 32768)),
    *((3, 40000), (9, 7)),  # without a kernel
)
FP8 = torch.float8_e4m3fn
OUTPUTS = ({}, {"out_dtype": FP8}, {"out_dtype": FP8, "scale": torch.tensor([0.01])})  # as of x, dynamic, static
GROUPED = {"out_dtype": FP8, "group_size": 128}
norm = graphar.allreduce_residual_rmsnorm
NORM_KERNELS = with_kernels(norm.__name__)


def operands(ranks: Ranks, rows: int, columns: int, dtype, fill=normal):
    """Every rank's input, the residual and the weight. Large ones are made on the first GPU."""
    if rows * columns > 1 << 22:
        generator = torch.Generator("cuda:0").manual_seed(rows)
        drawn = [
            torch.randn(rows, columns, dtype=dtype, device="cuda:0", generator=generator)
            for _ in range(ranks.world_size + 1)
        ]
        return drawn[:-1], drawn[-1], normal(21, columns, dtype).to("cuda:0")
    xs = [fill(rank, rows * columns, dtype).view(rows, columns) for rank in range(ranks.world_size)]
    return xs, normal(20, rows * columns, dtype).view(rows, columns), normal(21, columns, dtype)


def wrong(ranks: Ranks, found, expected) -> list[int]:
    return [
        same_bits(one.to(wanted.device), wanted)
        for of_all, wanted in zip(found, expected, strict=True)
        for one in of_all
    ]


def calls(ranks: Ranks) -> list[int]:
    return [ranks.calls_of(kernel) for kernel in NORM_KERNELS]


def check(ranks: Ranks, rows: int, columns: int, dtype, fill=normal, scale=None, **options) -> None:
    xs, residual, weight = operands(ranks, rows, columns, dtype, fill)
    given = (ranks.place(xs), ranks.place([residual] * ranks.world_size), ranks.place([weight] * ranks.world_size))
    scales = scale if scale is None else ranks.place([scale] * ranks.world_size)
    before = calls(ranks)
    poison([x.nbytes for x in given[0]])
    found = norm(*given, group=ranks.communicator, scale=scales, **options)
    ranks.communicator.synchronize()
    scale = scale if scale is None else scale.to(residual.device)
    expected = reference.allreduce_residual_rmsnorm(xs, residual, weight, scale=scale, **options)
    assert wrong(ranks, found, expected) == [0] * len(expected) * ranks.world_size
    assert (calls(ranks) != before) == has_norm_kernel(columns * dtype.itemsize)


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@pytest.mark.parametrize(("rows", "columns"), ROWS_AND_COLUMNS)
def test_bf16_of_any_shape_gives_the_specification(ranks: Ranks, rows, columns):
    check(ranks, rows, columns, torch.bfloat16, eps=1e-5)


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@pytest.mark.parametrize("output", OUTPUTS[1:], ids=["dynamic", "static"])
@pytest.mark.parametrize(("rows", "columns"), ROWS_AND_COLUMNS)
def test_fp8_of_any_shape_gives_the_specification(ranks: Ranks, rows, columns, output):
    check(ranks, rows, columns, torch.bfloat16, eps=1e-5, **output)


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [pair for pair in ROWS_AND_COLUMNS if pair[1] % 128 == 0])
def test_fp8_with_scales_of_groups_gives_the_specification(ranks: Ranks, rows, columns, dtype):
    check(ranks, rows, columns, dtype, bit_patterns if rows * columns < 1 << 16 else normal, **GROUPED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fill", [normal, bit_patterns], ids=lambda fill: fill.__name__)
def test_any_data_of_any_dtype_gives_the_specification(ranks: Ranks, dtype, fill):
    for rows, columns in ((3, 512), (129, 2048), (33, 8200)):
        for output in OUTPUTS:
            check(ranks, rows, columns, dtype, fill, weight_offset=1.0, **output)


def test_weights_that_are_no_numbers_and_rows_of_zeros_in_fp8(ranks: Ranks):
    xs, residual, weight = [torch.zeros(140, 4096) for _ in range(ranks.world_size)], torch.zeros(140, 4096), None
    xs[0][::2] = 1.0
    for special in (torch.inf, -torch.inf, torch.nan, 1e38, 1e-38):
        weight = torch.ones(4096)
        weight[4000] = special
        given = (ranks.place(xs), *(ranks.place([one] * ranks.world_size) for one in (residual, weight)))
        for scale in (None, torch.tensor(0.5)):
            scales = scale if scale is None else ranks.place([scale] * ranks.world_size)
            found = norm(*given, out_dtype=FP8, scale=scales, group=ranks.communicator)
            ranks.communicator.synchronize()
            expected = reference.allreduce_residual_rmsnorm(xs, residual, weight, out_dtype=FP8, scale=scale)
            assert not any(wrong(ranks, found, expected)), (special, scale)


def test_calls_of_other_shapes_follow_one_another(ranks: Ranks):
    for turn in range(40):
        rows, columns = ((1, 8192), (64, 4096), (17, 8192), (2, 64), (400, 1024))[turn * 7 % 5]
        check(ranks, rows, columns, torch.bfloat16, **OUTPUTS[turn % 3])


@pytest.mark.parametrize(("rows", "launches"), [(1, [1, 0]), (1024, [0, 1])])
def test_few_rows_go_in_one_hop_and_many_in_two_and_their_scratch_is_as_before(ranks: Ranks, rows, launches):
    for output in OUTPUTS:
        before = calls(ranks)
        check(ranks, rows, 4096, torch.bfloat16, **output)
        assert [now - one for now, one in zip(calls(ranks), before, strict=True)] == launches
    assert all(ranks.grid_is_idle(kernel) and ranks.scratch_is_as_before(kernel) for kernel in NORM_KERNELS)


def test_calls_in_a_row_without_a_wait(ranks: Ranks):
    shapes, made = ((1, 2048), (1, 7168), (8, 4096), (8, 7168), (16, 7168), (32, 1024), (4, 8192)), []
    for turn in range(32):
        rows, columns = shapes[turn % len(shapes)]
        seeds = range(100 * turn, 100 * turn + ranks.world_size + 1)
        *xs, residual = (normal(seed, rows * columns, torch.bfloat16).view(rows, columns) for seed in seeds)
        made.append((xs, residual, normal(100 * turn + 99, columns, torch.bfloat16)))
    placed = [(ranks.place(xs), *(ranks.place([x] * ranks.world_size) for x in rest)) for xs, *rest in made]
    before = sum(calls(ranks))

    results = [norm(*given, group=ranks.communicator) for given in placed]

    ranks.communicator.synchronize()
    assert sum(calls(ranks)) == before + 32
    for turn, (found, given) in enumerate(zip(results, made, strict=True)):
        assert not any(wrong(ranks, found, reference.allreduce_residual_rmsnorm(*given))), turn


@pytest.mark.parametrize(("rows", "kernel"), list(zip((1, 1024), NORM_KERNELS, strict=True)))
def test_epochs_wrap(fresh_ranks: Ranks, rows, kernel):
    check(fresh_ranks, rows, 4096, torch.bfloat16)
    fresh_ranks.set_epochs(kernel, 2**32 - 4)
    for turn in range(8):
        check(fresh_ranks, rows + turn, 4096, torch.bfloat16)
    assert fresh_ranks.calls_of(kernel) == 4


def test_what_is_prepared_can_be_captured_first(fresh_ranks: Ranks):
    count, columns, found = fresh_ranks.world_size, 2048, {}
    fresh_ranks.communicator.prepare([torch.bfloat16], ops=[f"{norm.__name__}_dynamic_fp8"])
    drawn = {rows: operands(fresh_ranks, rows, columns, torch.bfloat16) for rows in (3, 200)}
    placed = {
        rows: (fresh_ranks.place(xs), fresh_ranks.place([residual] * count), fresh_ranks.place([weight] * count))
        for rows, (xs, residual, weight) in drawn.items()
    }

    def call() -> None:
        for rows, given in placed.items():
            found[rows] = norm(*given, out_dtype=FP8, group=fresh_ranks.communicator)

    fresh_ranks.capture(call).replay()
    fresh_ranks.communicator.synchronize()
    for rows, given in drawn.items():
        assert not any(wrong(fresh_ranks, found[rows], reference.allreduce_residual_rmsnorm(*given, out_dtype=FP8)))


def test_misaligned_tensors(ranks: Ranks):
    xs, residual, weight = operands(ranks, 9, 264, torch.bfloat16)
    many = [ranks.place(ones) for ones in (xs, [residual] * ranks.world_size, [weight] * ranks.world_size)]
    shifted = [[torch.cat([one.new_zeros(1), one.flatten()])[1:].view(one.shape) for one in ones] for ones in many]
    for output in OUTPUTS[:2]:
        found = norm(*shifted, group=ranks.communicator, **output)
        ranks.communicator.synchronize()
        assert not any(wrong(ranks, found, reference.allreduce_residual_rmsnorm(xs, residual, weight, **output)))


# ---- processes ------------------------------------------------------------------------------------------------------


def replays(rank, world_size):
    """Twelve unsynchronised layers in a graph, decoding and prefill, with each output, and eager calls in between."""
    layers = []
    for at, (rows, columns) in enumerate(((1, 2048), (8, 4096), (128, 7168), (32, 1024), (600, 8192), (4, 8192)) * 2):
        xs = [normal(100 * at + r, rows * columns, torch.bfloat16).view(rows, columns) for r in range(world_size)]
        residual, weight = (
            normal(9, rows * columns, torch.bfloat16).view(rows, columns),
            normal(8, columns, torch.bfloat16),
        )
        output = OUTPUTS[(at // 2 + at // 6) % 3]
        expected = reference.allreduce_residual_rmsnorm(xs, residual, weight, **output)
        options = {name: one.cuda() if name == "scale" else one for name, one in output.items()}
        given = [one.cuda() for one in (xs[rank], residual, weight)]
        layers.append((partial(norm, *given, **options), [one.cuda() for one in expected]))
    for layer, _ in layers:
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [layer() for layer, _ in layers]
    for _ in range(20):
        graph.replay()
        eager = layers[2][0]()
    torch.cuda.synchronize()
    pairs = [*zip(found, [expected for _, expected in layers], strict=True), (eager, layers[2][1])]
    return [same_bits(one, wanted) for mine, theirs in pairs for one, wanted in zip(mine, theirs, strict=True)]


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_layers_replay_in_graphs_beside_eager_calls(world_size):
    for found in run_ranks(replays, world_size, backend="cpu:gloo,cuda:nccl", timeout_s=180):
        assert found == [0] * 31


def without_a_rank(rank, world_size):
    given = [torch.ones(4, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    weight = torch.ones(1024, dtype=torch.bfloat16, device="cuda")
    with graphar.Communicator() as communicator:
        norm(*given, weight, group=communicator)
        communicator.synchronize()
        if rank == 0:
            return 0
        try:
            norm(*given, weight, group=communicator, timeout_s=1.0)
            communicator.synchronize()
        except graphar.CollectiveTimeout as error:
            torch.cuda.synchronize()
            return error.record.peer


@pytest.mark.gpu(2)
def test_a_rank_that_does_not_come_is_named():
    assert run_ranks(without_a_rank, 2, backend="cpu:gloo,cuda:nccl", timeout_s=120) == [0, 0]
