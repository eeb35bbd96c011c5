"""fused_matmul_allreduce_residual_rmsnorm on GPUs: the bits of the products, reduced and normed, on every rank."""

import functools
from dataclasses import replace

import pytest
import torch

from graphar import reference
from graphar.product.gemm import matmul
from tests import cases, inside
from tests.gpu import Ranks
from tests.ops.conformance import FUSED_NORM
from tests.ops.gpu_cases import OFFSET, Case, assert_bits, in_way

pytestmark = pytest.mark.gpu


def case_of(partition: str, **changes) -> Case:
    return in_way(replace(FUSED_NORM[0], options=OFFSET | {"partition": partition}), "", (), **changes)


@pytest.mark.parametrize("m", [4096, 2051, 10000])
def test_prefill_gives_the_bits_of_the_products_reduced_and_normed(ranks: Ranks, m):
    case = case_of("tiles")
    drawn = case.draw(ranks, (m, 8192, 256), torch.bfloat16, cases.normal)
    tensors = case.place(ranks, drawn)
    products = [matmul(a, w).to("cuda:0") for a, w in zip(tensors["a"], tensors["w"], strict=True)]

    found = case.call(ranks, tensors)

    ranks.communicator.synchronize()
    beside = [drawn[name][0].to("cuda:0") for name in ("residual", "weight")]
    assert_bits(found, [reference.allreduce_residual_rmsnorm(products, *beside, 1e-5, 1.0)] * ranks.world_size)


def test_columns_that_no_kernel_takes_go_another_way(ranks: Ranks):
    for n in (7, 260, 40000):
        case_of("tiles").check(ranks, (33, n, 40), torch.bfloat16)


@pytest.mark.parametrize(("m", "kernel"), [(520, "matmul_allreduce"), (3, "matmul_one_shot")])
def test_tiles_are_summed_by_one_kernel(ranks: Ranks, m, kernel):
    shape = (m, 1024, 136)
    replace(case_of("tiles"), kernels={kernel: shape}, served=lambda *call: True, once=True).check(ranks, shape)
    assert ranks.grid_is_idle(kernel)


@pytest.mark.parametrize("partition", ["none", "tiles"])
def test_a_constant_weight_gives_the_same_bits(ranks: Ranks, partition):
    op = functools.partial(inside.fused_matmul_allreduce_residual_rmsnorm, constant_weight=True)
    functools.update_wrapper(op, FUSED_NORM[0].op)
    for m in (1, 16, 64, 129):
        case_of(partition, op=op).check(ranks, (m, 1024, 2048), torch.bfloat16)
