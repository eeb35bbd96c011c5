"""fused_matmul_allreduce_residual_rmsnorm on GPUs: the bits of the products, reduced and normed, on every rank."""

from __future__ import annotations

import itertools

import pytest
import torch

import graphar
from graphar import reference
from graphar.numerics import norms
from graphar.numerics.nan import with_canonical_nan
from graphar.product.gemm import matmul
from graphar.runtime.bind import residual_norm
from tests import cases, inside
from tests.cases import same_bits
from tests.gpu import Ranks, poison
from tests.ops.test_fused_gpu import integers, normal

pytestmark = pytest.mark.gpu

fused = graphar.fused_matmul_allreduce_residual_rmsnorm
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


class Layer:
    """Operands on every device: A_r [m, k], W_r [n, k], a residual and the norm's weight."""

    op = staticmethod(fused)

    def __init__(self, ranks: Ranks, fill, m, n, k, dtype, seed=0) -> None:
        self.ranks = ranks
        self.a = [fill((m, k), dtype, rank, seed) for rank in range(ranks.world_size)]
        self.w = [fill((n, k), dtype, rank, seed + 100) for rank in range(ranks.world_size)]
        residual, weight = normal((m, n), dtype, 0, seed + 200), normal((n,), dtype, 0, seed + 201)
        self.rest = [[one.to(a.device) for a in self.a] for one in (residual, weight)]

    def __call__(self, **options):
        return self.op(self.a, self.w, *self.rest, 1e-5, weight_offset=1.0, group=self.ranks.communicator, **options)

    def specified(self, products=None):
        """The specification, with torch's matmul on the first device. Any matmul of integers gives its bits."""
        residual, weight = (of_ranks[0] for of_ranks in self.rest)
        if products is None:
            products = [reference.matmul(a.to("cuda:0"), w.to("cuda:0")) for a, w in zip(self.a, self.w, strict=True)]
        return reference.allreduce_residual_rmsnorm(products, residual, weight, 1e-5, 1.0)

    def check(self, what: object = "", products=None, **options) -> None:
        poison([residual.nbytes for residual in self.rest[0]])
        found = self(**options)
        self.ranks.communicator.synchronize()
        for name, ones, expected in zip(("normed", "summed"), found, self.specified(products), strict=True):
            wrong = [same_bits(one.to("cuda:0"), expected) for one in ones]
            assert wrong == [0] * self.ranks.world_size, (name, what, options)


@pytest.mark.parametrize("m", [4096, 2051, 10000])
def test_prefill_gives_the_bits_of_the_products_reduced_and_normed(ranks: Ranks, m):
    layer = Layer(ranks, normal, m, 8192, 256, torch.bfloat16)
    products = [matmul(a, w).to("cuda:0") for a, w in zip(layer.a, layer.w, strict=True)]

    layer.check(m, products, partition="tiles")


def test_columns_that_no_kernel_takes_go_another_way(ranks: Ranks):
    for n in (7, 260, 40000):
        Layer(ranks, integers, 33, n, 40, torch.bfloat16).check(n, partition="tiles")


@pytest.mark.parametrize(("m", "kernel"), [(520, "matmul_allreduce"), (3, "matmul_one_shot")])
def test_tiles_are_summed_by_one_kernel(ranks: Ranks, m, kernel):
    layer = Layer(ranks, integers, m, 1024, 136, torch.bfloat16)
    before = ranks.calls_of(kernel)

    layer.check(partition="tiles")

    assert ranks.calls_of(kernel) == before + 1
    assert ranks.grid_is_idle(kernel)


@pytest.mark.parametrize("partition", ["none", "tiles"])
def test_a_constant_weight_gives_the_same_bits(ranks: Ranks, partition):
    for m in (1, 16, 64, 129):
        layer = Layer(ranks, integers, m, 1024, 2048, torch.bfloat16)
        layer.op = inside.fused_matmul_allreduce_residual_rmsnorm
        layer.check(m, partition=partition, constant_weight=True)


@every_dtype
def test_sums_are_normed_to_the_bit_whatever_they_hold(dtype):
    for rows, columns, fill in itertools.product((1, 265, 700), (8, 1032, 8192), (cases.normal, cases.bit_patterns)):
        total = with_canonical_nan(fill(0, rows * columns, dtype).view(rows, columns)).cuda()
        residual, weight = (normal(shape, dtype, 0, seed) for seed, shape in enumerate(((rows, columns), (columns,))))
        summed, expected = torch.empty_like(residual), norms.specification(total, residual, weight, 1e-5, 1.0)

        residual_norm.norm(total, residual, weight, total, summed, 1e-5, 1.0)

        assert [same_bits(*pair) for pair in zip((total, summed), expected, strict=True)] == [0, 0], (rows, columns)
