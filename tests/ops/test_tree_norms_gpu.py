"""Sums of fp32 partials as a tree, with residual and norm, on real GPUs: the specification's bits on every rank."""

from __future__ import annotations

import itertools

import pytest
import torch

from graphar import reference
from graphar.numerics import leaf_tree, norms
from graphar.numerics.nan import with_canonical_nan
from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.numerics.partitions import split
from graphar.plan import select
from graphar.plan.algorithms import with_kernels
from graphar.plan.call import Call, Operands
from graphar.plan.work import Norm
from graphar.runtime.bind import residual_norm
from graphar.runtime.registry import engine_of_group
from tests.cases import HALVES, bit_patterns, normal, same_bits
from tests.gpu import DTYPES, Ranks, poison
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

FP32, BF16 = torch.float32, torch.bfloat16
OPS = (ALLREDUCE_NORM, REDUCESCATTER_NORM)
NUMBERS = (1e-5, 1.0)
# Fewer rows than ranks, few, many, and rows of several launches; long rows, and rows without a kernel.
ROWS_AND_COLUMNS = (
    *((1, 8), (1, 4096), (1, 8192), (2, 4096), (7, 16384), (8, 8192), (33, 1024), (131, 7168), (1027, 4096)),
    *((4099, 8192), (40001, 128), (5, 24), (300, 264), (9, 12), (9, 7), (3, 20000)),
)
several_gpus = pytest.mark.gpu
every_op = pytest.mark.parametrize("op", OPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def ranks(ranks: Ranks):
    if ranks.world_size not in (2, 4, 8):
        pytest.skip("a tree has 2, 4 or 8 ranks")
    return ranks


def operands(world_size: int, rows: int, columns: int, dtype, fill=normal, seed: int = 0):
    """Every rank's partial, the residual and the weight. Large ones are made on the first GPU."""
    if rows * columns > 1 << 22:
        generator = torch.Generator("cuda:0").manual_seed(seed + rows)
        drawn = torch.randn(world_size + 1, rows, columns, device="cuda:0", generator=generator)
        *xs, residual = drawn.unbind()
        return xs, residual.to(dtype), normal(seed + 21, columns, dtype).to("cuda:0")
    xs = [fill(seed + rank, rows * columns, FP32).view(rows, columns) for rank in range(world_size)]
    return xs, normal(seed + 20, rows * columns, dtype).view(rows, columns), normal(seed + 21, columns, dtype)


def specified(xs, residual, weight):
    return norms.specification(leaf_tree.tree_sum(xs), residual, weight, *NUMBERS)


def call_of(op: str, x: torch.Tensor, world_size: int, dtype) -> Call:
    sizes = [len(x)] if op == ALLREDUCE_NORM else split(len(x), world_size)
    counts = tuple(size * x.shape[1] for size in sizes)
    work = Norm(op, counts, x.shape[1], "like_input", *NUMBERS, order="tree", out_dtype=dtype)
    return Call(work, FP32, x.get_device())


def place(ranks: Ranks, op: str, xs, residual, weight) -> list[Operands]:
    world_size = ranks.world_size
    residuals = [residual] * world_size if op == ALLREDUCE_NORM else residual.tensor_split(world_size)
    given = zip(ranks.place(xs), ranks.place(residuals), ranks.place([weight] * world_size), strict=True)
    return [Operands(own, (torch.full_like(own[1], 7), torch.full_like(own[1], 7))) for own in given]


def run(ranks: Ranks, op: str, placed, dtype) -> None:
    call = call_of(op, placed[0].inputs[0], ranks.world_size, dtype)
    ranks.communicator.engine.run(call, placed)


def assert_bits(op: str, placed, expected) -> None:
    """``expected`` is what every rank gets, or has its rows of."""
    for at, whole in enumerate(expected):
        results = [own.outputs[at].to(whole.device) for own in placed]
        for rank, one in enumerate(results if op == ALLREDUCE_NORM else [torch.cat(results)]):
            assert same_bits(one, whole) == 0, f"rank {rank}, result {at}"


def calls(ranks: Ranks, op: str) -> int:
    return sum(ranks.calls_of(kernel) for kernel in with_kernels(op))


def check(ranks: Ranks, op: str, rows: int, columns: int, dtype, fill=normal, seed: int = 0) -> None:
    drawn = operands(ranks.world_size, rows, columns, dtype, fill, seed)
    placed, before = place(ranks, op, *drawn), calls(ranks, op)
    poison([own.inputs[1].nbytes for own in placed])
    run(ranks, op, placed, dtype)
    ranks.communicator.synchronize()
    assert_bits(op, placed, specified(*drawn))
    work = call_of(op, drawn[0][0], ranks.world_size, dtype).work
    assert (calls(ranks, op) != before) == select.has_kernel_for_rows(work, FP32)


# ---- several GPUs, one process --------------------------------------------------------------------------------------


@several_gpus
@every_op
@pytest.mark.parametrize(("rows", "columns"), ROWS_AND_COLUMNS)
def test_bf16_of_any_shape_gives_the_specification(ranks: Ranks, op, rows, columns):
    check(ranks, op, rows, columns, BF16)


@several_gpus
@every_op
@every_dtype
@pytest.mark.parametrize("fill", [normal, bit_patterns], ids=lambda fill: fill.__name__)
def test_any_data_of_any_dtype_gives_the_specification(ranks: Ranks, op, dtype, fill):
    for rows, columns in ((1, 8192), (3, 512), (129, 2048), (33, 8200)):
        check(ranks, op, rows, columns, dtype, fill)


@several_gpus
def test_partials_that_are_nodes_of_one_tree_give_the_same_bits_as_one_rank(ranks: Ranks):
    leaves, residual, weight = operands(leaf_tree.LEAVES, 37, 4096, BF16)
    each = leaf_tree.LEAVES // ranks.world_size
    partials = [leaf_tree.tree_sum(leaves[rank * each :][:each]) for rank in range(ranks.world_size)]
    for op in OPS:
        placed = place(ranks, op, partials, residual, weight)
        run(ranks, op, placed, BF16)
        ranks.communicator.synchronize()

        assert_bits(op, placed, specified(leaves, residual, weight))


@several_gpus
@every_op
def test_calls_of_both_orders_take_turns_in_one_scratch_and_leave_it_as_before(ranks: Ranks, op):
    for turn in range(24):
        rows, columns = ((1, 8192), (64, 4096), (17, 8192), (2, 64), (400, 1024))[turn * 7 % 5]
        check(ranks, op, rows, columns, DTYPES[turn % 3], bit_patterns if turn % 4 == 0 else normal, seed=turn)
        xs, residual, weight = operands(ranks.world_size, rows, columns, BF16, seed=turn)
        xs = [x.bfloat16() for x in xs]
        placed = place(ranks, op, xs, residual, weight)
        as_tree = call_of(op, placed[0].inputs[0], ranks.world_size, None)
        in_order = as_tree._replace(work=as_tree.work._replace(order="rank"), dtype=BF16)
        ranks.communicator.engine.run(in_order, placed)
        ranks.communicator.synchronize()
        assert_bits(op, placed, norms.specification(reference.allreduce(xs), residual, weight, *NUMBERS))
    for kernel in with_kernels(op):
        assert ranks.grid_is_idle(kernel)
        assert ranks.scratch_is_as_before(kernel)


@several_gpus
@every_op
def test_calls_in_a_row_without_a_wait_and_with_one_rank_late(ranks: Ranks, op):
    shapes = ((1, 2048), (8, 4096), (300, 7168), (2, 7168), (32, 1024))
    made = [operands(ranks.world_size, *shapes[turn % 5], BF16, seed=100 * turn) for turn in range(30)]
    placed = [place(ranks, op, *drawn) for drawn in made]

    for turn, one in enumerate(placed):
        with torch.cuda.device(turn % ranks.world_size):
            torch.cuda._sleep(200_000)
        run(ranks, op, one, BF16)

    ranks.communicator.synchronize()
    for one, drawn in zip(placed, made, strict=True):
        assert_bits(op, one, specified(*drawn))


@several_gpus
@every_op
@pytest.mark.parametrize(("rows", "columns"), [(1, 8192), (640, 4096)])
def test_a_prepared_call_replays_in_a_graph(fresh_ranks: Ranks, op, rows, columns):
    if fresh_ranks.world_size not in (2, 4, 8):
        pytest.skip("a tree has 2, 4 or 8 ranks")
    drawn = [operands(fresh_ranks.world_size, rows, columns, BF16, seed=100 * seed) for seed in range(3)]
    placed = place(fresh_ranks, op, *drawn[0])
    fresh_ranks.communicator.prepare(dtypes=[BF16], ops=[op], tp_invariant=True)

    graph = fresh_ranks.capture(lambda: run(fresh_ranks, op, placed, BF16))

    for xs, residual, weight in drawn:
        given = place(fresh_ranks, op, xs, residual, weight)
        for own, new in zip(placed, given, strict=True):
            for place_of, one in zip(own.inputs, new.inputs, strict=True):
                place_of.copy_(one)
        for device in range(fresh_ranks.world_size):
            torch.cuda.synchronize(device)
        graph.replay()
        fresh_ranks.communicator.synchronize()
        assert_bits(op, placed, specified(xs, residual, weight))


@several_gpus
@every_op
def test_the_kernel_is_told(ranks: Ranks, op):
    (x, *_), *_ = operands(ranks.world_size, 4, 1024, BF16)
    x = x.cuda(0)
    explained = ranks.communicator.engine.explain(call_of(op, x, ranks.world_size, BF16), x)

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
            engine.run(call_of(op, given[0], world_size, dtype), [made])
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
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_local_kernel_norms_fp32_sums_of_narrower_residuals(dtype):
    for rows, columns, fill in itertools.product((1, 265, 700), (8, 1032, 8192, 32768), (normal, bit_patterns)):
        total = with_canonical_nan(fill(0, rows * columns, FP32).view(rows, columns)).cuda()
        residual = normal(20, rows * columns, dtype).view(rows, columns).cuda()
        weight = normal(21, columns, dtype).cuda()
        results = torch.empty_like(residual), torch.empty_like(residual)
        assert residual_norm.serves(residual, FP32)

        residual_norm.norm(total, residual, weight, *results, *NUMBERS)

        expected = norms.specification(total, residual, weight, *NUMBERS)
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
