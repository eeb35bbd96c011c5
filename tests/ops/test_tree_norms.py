"""Sums of fp32 partials as a tree, with residual and norm: the same bits for each number of ranks.

Engines plan these calls. No op of one tensor makes them.
"""

from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar import CommunicatorError, reference
from graphar.numerics import leaf_tree, norms
from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.numerics.partitions import split
from graphar.plan.call import Call, Operands
from graphar.plan.work import Norm
from graphar.runtime.bind import residual_norm
from tests.cases import bit_patterns, normal, same_bits
from tests.processes import on_ranks

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = (BF16, torch.float16, FP32)
OPS = (ALLREDUCE_NORM, REDUCESCATTER_NORM)
RANKS = (1, 2, 4, 8)
NUMBERS = (1e-5, 1.0)
ROWS, COLUMNS = 16, 40
every_op = pytest.mark.parametrize("op", OPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def leaves(fill=normal, rows=ROWS, columns=COLUMNS):
    return [fill(leaf, rows * columns, FP32).view(rows, columns) for leaf in range(leaf_tree.LEAVES)]


def partials(ranks: int, of=None):
    """The partial of each rank: the sum of its leaves, a node of the tree."""
    of, each = of or leaves(), leaf_tree.LEAVES // ranks
    return [leaf_tree.tree_sum(of[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def residual_and_weight(dtype, rows=ROWS, columns=COLUMNS):
    return normal(20, rows * columns, dtype).view(rows, columns), normal(21, columns, dtype)


def call_of(op: str, x, world_size: int, dtype, output: str = "like_input", order: str = "tree") -> Call:
    sizes = [len(x)] if op == ALLREDUCE_NORM else split(len(x), world_size)
    counts = tuple(size * x.shape[1] for size in sizes)
    return Call(Norm(op, counts, x.shape[1], output, *NUMBERS, order=order, out_dtype=dtype), x.dtype, -1)


def normed(op: str, xs, residual, weight, **call) -> list[list[torch.Tensor]]:
    """The results of all ranks: normed rows, and the new residual. Reduce-scatters split the rows of ``residual``."""
    with graphar.Communicator(devices=["cpu"] * len(xs)) as communicator:
        engine = communicator.engine
        residuals = [residual] * len(xs) if op == ALLREDUCE_NORM else residual.tensor_split(len(xs))
        ranks = [
            Operands((x, own, weight), (torch.full_like(own, 7), torch.full_like(own, 7)))
            for x, own in zip(xs, residuals, strict=True)
        ]
        for _ in range(2):
            engine.run(call_of(op, xs[0], len(xs), weight.dtype, **call), ranks)
        return [list(own.outputs) for own in ranks]


def assert_bits(op: str, found, expected) -> None:
    """``expected`` is what every rank gets, or has its rows of."""
    for at, whole in enumerate(expected):
        results = [of_rank[at] for of_rank in found]
        for one in results if op == ALLREDUCE_NORM else [torch.cat(results)]:
            assert same_bits(one, whole) == 0


@every_op
@every_dtype
@pytest.mark.parametrize("fill", [normal, bit_patterns], ids=lambda fill: fill.__name__)
def test_each_number_of_ranks_gives_the_same_bits(op, dtype, fill):
    of, beside = leaves(fill), residual_and_weight(dtype)
    expected = norms.specification(leaf_tree.tree_sum(of), *beside, *NUMBERS)

    for ranks in RANKS:
        assert_bits(op, normed(op, partials(ranks, of), *beside), expected)


@every_op
@every_dtype
def test_products_in_leaves_have_the_bits_of_the_specified_matmul(op, dtype):
    a, w = normal(1, 9 * 1024, dtype).view(9, 1024), normal(2, 24 * 1024, dtype).view(24, 1024)
    beside = residual_and_weight(dtype, 9, 24)

    for ranks in RANKS:
        of_ranks = a.chunk(ranks, 1), w.chunk(ranks, 1)
        products = [leaf_tree.in_leaves(*pair, 8 // ranks) for pair in zip(*of_ranks, strict=True)]
        expected = reference.fused_matmul_allreduce_residual_rmsnorm(*of_ranks, *beside, *NUMBERS, tp_invariant=True)
        assert_bits(op, normed(op, products, *beside), expected)


def test_the_residual_is_added_before_the_only_rounding():
    """Half of the smallest step of 1 is kept until the residual, another half, is added."""
    step = torch.finfo(BF16).eps
    xs = [torch.full((2, 8), 1.0), torch.full((2, 8), step / 2)]
    beside = torch.full((2, 8), step / 2, dtype=BF16), torch.ones(8, dtype=BF16)

    for _, summed in normed(ALLREDUCE_NORM, xs, *beside):
        assert torch.equal(summed, torch.full((2, 8), 1 + step, dtype=BF16))


@every_op
def test_the_order_of_ranks_gives_other_bits(op):
    beside = residual_and_weight(FP32)
    as_tree, in_order = (normed(op, partials(8), *beside, order=order)[0][1] for order in ("tree", "rank"))

    assert same_bits(as_tree, in_order) > 10


@every_op
def test_rows_without_a_kernel_and_ranks_without_rows_have_the_same_bits(op):
    for rows, columns in ((3, 7), (1, 20000), (0, 8)):
        of, beside = leaves(normal, rows, columns), residual_and_weight(BF16, rows, columns)
        for ranks in (2, 8):
            expected = norms.specification(leaf_tree.tree_sum(of), *beside, *NUMBERS)
            assert_bits(op, normed(op, partials(ranks, of), *beside), expected)


@every_op
@every_dtype
def test_a_single_rank_norms_by_the_kernel_that_meets_no_other_rank(op, dtype, monkeypatch):
    (x,), beside, order = partials(1), residual_and_weight(dtype), []
    expected = norms.specification(x, *beside, *NUMBERS)

    def norm(total, residual, weight, *results, **_):
        *outputs, eps, offset = results
        order.append((total.data_ptr(), eps, offset))
        for out, one in zip(outputs, norms.specification(total, residual, weight, eps, offset), strict=True):
            out.copy_(one)

    monkeypatch.setattr(residual_norm, "serves", lambda residual, total_dtype: residual.dtype == dtype)
    monkeypatch.setattr(residual_norm, "load", lambda device, *dtypes: order.append(dtypes))
    monkeypatch.setattr(residual_norm, "norm", norm)

    assert_bits(op, normed(op, [x], *beside), expected)
    assert order == [(dtype, FP32), *[(x.data_ptr(), *NUMBERS)] * 2]


def test_the_local_kernel_serves_fp32_sums_of_narrower_residuals(monkeypatch):
    monkeypatch.setattr(residual_norm, "runs_on", lambda device: True)

    def on_gpu(columns, dtype):
        return SimpleNamespace(
            is_cuda=True,
            numel=lambda: columns,
            dtype=dtype,
            shape=(1, columns),
            element_size=lambda: dtype.itemsize,
            device=torch.device("cuda:0"),
        )

    assert residual_norm.serves(on_gpu(32768, BF16), FP32)
    assert residual_norm.serves(on_gpu(16384, FP32))
    assert not residual_norm.serves(on_gpu(12, BF16), FP32)  # 24 bytes
    assert not residual_norm.serves(on_gpu(16, FP32), BF16)


@every_op
def test_explain_says_that_a_norm_is_added_as_a_tree(op):
    with graphar.Communicator(devices=["cpu"] * 4) as communicator:
        (x, *_) = partials(4)
        explained = communicator.engine.explain(call_of(op, x, 4, BF16), x)
        in_order = communicator.engine.explain(call_of(op, x, 4, None, order="rank"), x)

    assert explained.reason == "the tensor is on the CPU; added as a tree"
    assert in_order.reason == "the tensor is on the CPU"


@on_ranks(2)
def test_ranks_that_add_in_other_orders_are_told(rank, world_size):
    communicator = graphar.Communicator(timeout_s=20)
    x, (residual, weight) = partials(world_size)[rank], residual_and_weight(FP32)
    operands = Operands((x, residual, weight), (torch.empty_like(x), torch.empty_like(x)))
    with pytest.raises(CommunicatorError) as raised:
        communicator.engine.run(
            call_of(ALLREDUCE_NORM, x, world_size, FP32 if rank else None, order="tree" if rank else "rank"), [operands]
        )
    message = str(raised.value)
    assert message.count("added as a tree") == 1, message
