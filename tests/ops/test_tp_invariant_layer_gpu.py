"""Layers of a real size, divided between ranks that share one GPU: the bits of one rank, forward and backward."""

import pytest
import torch

import graphar
from graphar.numerics.leaf_tree import LEAVES
from graphar.ops import linear
from graphar.plan.algorithms import with_kernels
from tests.cases import by_position, leaf_product, same_bits
from tests.one_gpu import RanksOfOneGpu

pytestmark = [pytest.mark.gpu(1), pytest.mark.usefixtures("hopper")]

ROWS, HIDDEN, INNER = 64, 8192, 28672  # of the feed-forward layers of a model of 70 billion parameters
ALLREDUCES, REDUCESCATTERS = (
    [one for one in with_kernels(op) if one.row.adds_tree] for op in ("allreduce", "reducescatter")
)
BF16 = torch.bfloat16
RANDOM = "random numbers"
FILLS = (RANDOM, "integers")


@pytest.fixture(scope="module", params=[2, 4, 8], ids=lambda n: f"{n}ranks")
def ranks(request):
    made = RanksOfOneGpu(request.param)
    yield made
    made.close()


@pytest.fixture(scope="module", params=FILLS)
def operands(request):
    """Rows of both widths, and a weight [HIDDEN, INNER]. Sums of the integers are exact in bf16."""
    shapes = (ROWS, INNER), (ROWS, HIDDEN), (HIDDEN, INNER)
    if request.param == RANDOM:
        generator = torch.Generator("cuda").manual_seed(0)
        return [torch.randn(shape, device="cuda", dtype=BF16, generator=generator) for shape in shapes]
    mostly = (0, 0, 127)
    return [by_position(at, *shape, mostly=mostly[at], device="cuda").to(BF16) for at, shape in enumerate(shapes)]


def is_exact(found, a, w):
    """Whether a product of integers, whose sums bf16 holds, is right at every position."""
    exact = a.double() @ w.double().t()
    return 0 < exact.abs().max() <= 256 and torch.equal(found.double(), exact)


def is_of_integers(a):
    return bool((a == a.round()).all())


def sums(ranks, partials):
    """By algorithm, the sum that each rank has of all ranks' partials, or all ranks' parts of it."""
    flat = [one.flatten() for one in partials]
    for algorithm in ALLREDUCES:
        limit = algorithm.row.limit(ranks.world_size)
        if limit is not None and flat[0].nbytes > limit:
            continue
        for rank, one in enumerate(ranks.tree_sum(flat, algorithm, BF16)):
            yield f"{algorithm}, rank {rank}", one.view(partials[0].shape)
    for algorithm in REDUCESCATTERS:
        yield str(algorithm), torch.cat(ranks.tree_sum(flat, algorithm, BF16)).view(partials[0].shape)


def partials_of(ranks, a, w):
    parts = zip(a.chunk(ranks.world_size, 1), w.chunk(ranks.world_size, 1), strict=True)
    leaves = LEAVES // ranks.world_size
    return [leaf_product(*own, leaves, out_dtype=torch.float32) for own in parts]


def test_a_row_parallel_layer_sums_to_the_bits_of_one_rank(ranks, operands):
    a, _, w = operands
    alone = graphar.fused_matmul_allreduce(a, w, partition="tp_invariant")

    assert not is_of_integers(a) or is_exact(alone, a, w)
    for what, found in sums(ranks, partials_of(ranks, a, w)):
        assert same_bits(found, alone) == 0, what


def test_the_gradients_of_a_row_parallel_layer_have_the_bits_of_one_rank(ranks, operands):
    a, dy, w = operands
    a, w = a.clone().requires_grad_(), w.clone().requires_grad_()
    da, dw = torch.autograd.grad(graphar.fused_matmul_allreduce(a, w, partition="tp_invariant"), (a, w), dy)

    count = ranks.world_size
    of_a = torch.cat([linear.of_input("tp_invariant", dy, one) for one in w.detach().chunk(count, 1)], 1)
    of_w = torch.cat([linear.of_weight("tp_invariant", dy, one) for one in a.detach().chunk(count, 1)], 1)

    assert same_bits(of_a, da) == 0
    assert same_bits(of_w, dw) == 0
    if is_of_integers(a):
        assert is_exact(da, dy, w.detach().t())
        assert is_exact(dw, dy.t(), a.detach().t())


def test_a_column_parallel_layer_and_its_gradients_have_the_bits_of_one_rank(ranks, operands):
    dy, x, w = operands
    x, w = x.clone().requires_grad_(), w.t().contiguous().requires_grad_()
    y = graphar.linear(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), dy)

    with torch.no_grad():
        count = ranks.world_size
        of_y = torch.cat([graphar.linear(x, one) for one in w.chunk(count)], 1)
        of_w = torch.cat([linear.of_weight("tp_invariant", one, x) for one in dy.chunk(count, 1)])

        assert same_bits(of_y, y.detach()) == 0
        assert same_bits(of_w, dw) == 0
        for what, found in sums(ranks, partials_of(ranks, dy, w.t())):
            assert same_bits(found, dx) == 0, what
    if is_of_integers(dy):
        assert is_exact(y.detach(), x.detach(), w.detach())
        assert is_exact(dx, dy, w.detach().t())
        assert is_exact(dw, dy.t(), x.detach().t())
