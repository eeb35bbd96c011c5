"""Matmuls that are summed over ranks with an epilogue, on GPUs: the bits of the products, reduced with the epilogue."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import Epilogue, reference
from graphar.product.gemm import matmul
from tests.cases import same_bits
from tests.gpu import Ranks
from tests.ops.test_fused_gpu import FUSED, KERNELS, SCATTER, Layer, every_op, integers, normal
from tests.processes import run_on_gpus

pytestmark = pytest.mark.gpu

EXACT = "max(v * scale, c[col]) + f[index] * r[row] + row * 0.5 - col + bf16(index)"
NEAR = "gelu(v) * tanh(c[col]) + silu(v)"


def epilogues(op, layer: Layer, text: str = EXACT):
    """The epilogue for a call with lists, and for the specification on the first device."""
    world_size, m, n = layer.ranks.world_size, len(layer.a[0]), len(layer.w[0])
    rows = [m] * world_size if op is FUSED else [len(one) for one in torch.empty(m).tensor_split(world_size)]
    tensors = []
    for rank, own in enumerate(rows):
        at = rank if op is SCATTER else 0
        f, r = (normal((size,), torch.float16, 0, 300 + 2 * at + kind) for kind, size in enumerate((own * n, own)))
        made = {"c": normal((n,), torch.bfloat16, 0, 299), "f": f, "r": r}
        tensors.append({name: one for name, one in made.items() if f"{name}[" in text})
    numbers = {"scale": 0.375} if "scale" in text else {}
    placed = {name: [one[name].to(a.device) for one, a in zip(tensors, layer.a, strict=True)] for name in tensors[0]}
    here = {name: [one[name] for one in tensors] for name in tensors[0]}
    return Epilogue(text, **placed, **numbers), Epilogue(text, **(here if op is SCATTER else tensors[0]), **numbers)


def check(layer: Layer, op, what: object = "", text: str = EXACT, **options) -> None:
    given, wanted = epilogues(op, layer, text)
    layer.poison_results(op)
    ys = layer(op, epilogue=given, **options)
    layer.check_results(ys, op, what, epilogue=wanted)


# ---- bits -----------------------------------------------------------------------------------------------------------


@every_op
def test_several_launches_a_call_go_on_counting(ranks: Ranks, op):
    layer = Layer(ranks, integers, 10000, 8192, 64, torch.bfloat16)

    check(layer, op, text="v + row * 2 - col + c[col]", partition="tiles")


@every_op
def test_random_products_give_the_bits_of_the_same_products_reduced(ranks: Ranks, op):
    layer = Layer(ranks, normal, 700, 904, 200, torch.bfloat16)
    given, wanted = epilogues(op, layer)
    products = [matmul(a, w).to("cuda:0") for a, w in zip(layer.a, layer.w, strict=True)]
    reduced = reference.allreduce if op is FUSED else reference.reducescatter
    expected = reduced(products, epilogue=wanted)
    expected = [expected] * ranks.world_size if op is FUSED else expected

    for partition in ("split_m", "split_n", "tiles"):
        ys = layer(op, epilogue=given, partition=partition)
        ranks.communicator.synchronize()
        assert [same_bits(y.to("cuda:0"), one) for y, one in zip(ys, expected, strict=True)] == [0] * len(ys), partition


@every_op
def test_transcendental_functions_come_near(ranks: Ranks, op):
    layer = Layer(ranks, integers, 300, 264, 40, torch.float16)
    given, wanted = epilogues(op, layer, NEAR)

    for partition in ("none", "split_n", "tiles"):
        ys = layer(op, epilogue=given, partition=partition)
        ranks.communicator.synchronize()
        for y, expected in zip(ys, layer.specified(op, epilogue=wanted), strict=True):
            torch.testing.assert_close(y.to("cuda:0"), expected, rtol=2e-3, atol=1e-3)


# ---- what runs ------------------------------------------------------------------------------------------------------


@every_op
def test_tiles_are_one_kernel_whose_numbers_and_tensors_may_change(ranks: Ranks, op):
    layer = Layer(ranks, integers, 500, 264, 136, torch.bfloat16)
    before = ranks.calls_of(KERNELS[op])

    for scale in (1.0, 2.0):
        for rows in (1, 2):
            offsets = [torch.full((264,), float(rows), device=a.device) for a in layer.a]
            given = Epilogue("v * s + b[col]", s=scale, b=offsets)
            ys = layer(op, epilogue=given, partition="tiles")
            layer.check_results(ys, op, epilogue=Epilogue("v * s + b[col]", s=scale, b=offsets[0]))

    assert ranks.calls_of(KERNELS[op]) == before + 4
    assert ranks.grid_is_idle(KERNELS[op])


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(2, shared=True)
def test_a_compiled_layer_gives_the_eager_bits():
    for found in run_on_gpus(compiled_as_rank, 2):
        assert found == [0, 0, 0]


def compiled_as_rank(rank, world_size):
    a, w = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in ((256, 64), (512, 64)))

    def layer(a, w):
        return graphar.fused_matmul_allreduce(a, w, epilogue=lambda v: torch.relu(v) * 2, partition="tiles")

    y, (x, weight) = layer(a, w), (one.clone().requires_grad_() for one in (a, w))
    graphar.fused_matmul_allreduce(x, weight, epilogue="v * 2").float().sum().backward()
    return [
        same_bits(x.grad, torch.full_like(y, 2.0) @ w),
        same_bits(torch.compile(layer, fullgraph=True)(a, w), y),
        same_bits(torch.compile(layer, mode="reduce-overhead")(a, w), y),
    ]
