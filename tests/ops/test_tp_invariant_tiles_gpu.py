"""Large tensor-parallel invariant matmuls on several GPUs, one process: one kernel has the bits of a single rank."""

import pytest
import torch

import graphar
from graphar.numerics.leaf_tree import LEAVES
from tests.cases import leaf_product, normal, same_bits
from tests.gpu import Ranks, poison

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_many_as_trees", "hopper")]

OPS = (graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter)
M, N = 2056, 8192  # from the size on from which tiles are taken
INVARIANT = {"partition": "tp_invariant"}
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


class Layer:
    def __init__(self, ranks: Ranks, k: int, dtype=torch.bfloat16, transposed: bool = False) -> None:
        self.ranks = ranks
        self.whole = [normal(seed, rows * k, dtype).view(rows, k).cuda(0) for seed, rows in enumerate((M, N))]
        self.bias = normal(2, N, dtype).cuda(0)
        parts = [x.chunk(ranks.world_size, 1) for x in self.whole]
        self.a, self.w = ([part.contiguous().to(f"cuda:{r}") for r, part in enumerate(of_x)] for of_x in parts)
        if transposed:
            self.w = [w.t().contiguous().t() for w in self.w]
        self.biases = [self.bias.to(a.device) for a in self.a]

    def check(self, op, **options) -> None:
        expected = leaf_product(*self.whole, LEAVES, bias=self.bias)
        parts = [expected] * self.ranks.world_size
        if op is graphar.fused_matmul_reducescatter:
            parts = expected.tensor_split(self.ranks.world_size)
        poison([part.nbytes for part in parts])
        ys = op(self.a, self.w, bias=self.biases, group=self.ranks.communicator, **INVARIANT, **options)
        self.ranks.communicator.synchronize()
        for rank, (y, part) in enumerate(zip(ys, parts, strict=True)):
            assert same_bits(y.to("cuda:0"), part) == 0, f"rank {rank}"


@every_op
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("k", [512, 8192, 8 * 100])
def test_a_large_result_has_the_bits_of_one_rank(ranks: Ranks, op, k, transposed):
    layer = Layer(ranks, k, transposed=transposed)

    for _ in range(3):
        layer.check(op)


@every_op
def test_fp16_has_the_bits_of_one_rank(ranks: Ranks, op):
    Layer(ranks, 1024, torch.float16).check(op)


def test_one_kernel_multiplies_and_sums(ranks: Ranks):
    if ranks.world_size == 8:
        pytest.skip("tiles of 8 ranks were not measured")
    layer = Layer(ranks, 1024)
    before = ranks.communicator.stats().launches.get("matmul_allreduce", 0)
    layer.check(graphar.fused_matmul_allreduce)

    assert ranks.communicator.stats().launches.get("matmul_allreduce", 0) > before
