"""Matmuls of e4m3 operands with scales on GPUs: partials of the scaled matmul, summed in the order of ranks."""

import itertools

import pytest
import torch

import graphar
from graphar import reference
from graphar.product.gemm import matmul
from tests.cases import same_bits
from tests.processes import on_ranks, run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.usefixtures("hopper")

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SHAPES = ((1, 64, 128), (33, 136, 272), (200, 1032, 1024), (1024, 2048, 4096))  # M, N, K
FORMATS = ("rows", "numbers", "blocks")
OPS = ("fused_matmul_allreduce", "fused_matmul_reducescatter")
HOW = (
    *({"partition": partition} for partition in ("auto", "tiles", "none", "split_m")),
    {"partition": "split_m", "num_partitions": 1},
    {"epilogue": "max(v, 0)"},
)


def drawn(seed, *shape):
    """The same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def operands(rank, of, m, n, k):
    """A rank's a, w and keywords with scales."""
    blocks = -(-k // 128)
    shapes = {"rows": ((m, 1), (1, n)), "numbers": ((), (1,)), "blocks": ((m, blocks), (-(-n // 128), blocks))}[of]
    scales = [drawn(seed + rank, *shape).abs() + 0.1 for seed, shape in zip((20, 30), shapes, strict=True)]
    a, w = drawn(rank, m, k).to(FP8), drawn(10 + rank, n, k).to(FP8)
    return a, w, dict(zip(("a_scale", "w_scale"), scales, strict=True))


def expected(op, rank, ranks, of, shape, **how):
    """What a rank gets: the sum of the scaled matmul's partials."""
    parts = []
    for one in range(ranks):
        a, w, scales = operands(one, of, *shape)
        parts.append(matmul(a, w, **scales))
    total = reference.allreduce(parts, **how)
    return total if op.endswith("allreduce") else total.tensor_split(ranks)[rank]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("partition", ["split_m", "split_n"])
def test_panels_change_no_bit(partition):
    shape = (200, 1032, 1024)
    a, w, scales = operands(0, "rows", *shape)
    lists = {name: [one] for name, one in scales.items()}

    (found,) = graphar.fused_matmul_allreduce([a], [w], **lists, partition=partition)

    assert same_bits(found, expected(OPS[0], 0, 1, "rows", shape)) == 0


@pytest.mark.gpu(1)
def test_columns_that_the_kernel_cannot_store_are_those_of_the_specification():
    a, w, scales = operands(0, "rows", 24, 129, 256)
    lists = {name: [one] for name, one in scales.items()}

    (found,) = graphar.fused_matmul_allreduce([a], [w], **lists)

    assert same_bits(found, reference.scaled_linear(a, w, **scales)) == 0


@pytest.mark.gpu(1)
def test_explain_names_the_scaled_matmul():
    a, w, scales = operands(0, "blocks", 128, 256, 512)
    lists = {name: [one] for name, one in scales.items()}

    assert "scaled matmul" in str(graphar.explain(graphar.fused_matmul_allreduce, [a], [w], **lists))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("of", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_is_the_scaled_matmul_for_every_number_of_rows(of, shape):
    a, w, scales = operands(0, of, *shape)
    bias = drawn(40, shape[1]).half()
    last = {"a_scale": scales["a_scale"][-1:] if scales["a_scale"].ndim else scales["a_scale"]}

    found = graphar.linear(a, w, bias, **scales, out_dtype=torch.float16)

    assert same_bits(found, matmul(a, w, bias=bias, out_dtype=torch.float16, **scales)) == 0
    alone = graphar.linear(a[-1:], w, bias, **(scales | last), out_dtype=torch.float16)
    assert same_bits(alone, found[-1:]) == 0


def normed(partials, rank, op, shape):
    """What a rank gets of an op with a norm, beside the tensors that it takes."""
    residual, weight = drawn(50, *shape[:2]).bfloat16(), drawn(51, shape[1]).bfloat16()
    wanted = reference.allreduce_residual_rmsnorm(partials, residual, weight)
    if "reducescatter" in op:
        residual = residual.tensor_split(len(partials))[rank].contiguous()
        wanted = [one.tensor_split(len(partials))[rank] for one in wanted]
    return wanted, (residual, weight)


NORMED = [f"{op}_residual_rmsnorm" for op in OPS]


def wrong_elements_of_norms(rank, world_size):
    wrong = []
    for op, of, shape in itertools.product(NORMED, FORMATS, SHAPES):
        of_ranks = [operands(one, of, *shape) for one in range(world_size)]
        wanted, beside = normed([matmul(a, w, **scales) for a, w, scales in of_ranks], rank, op, shape)
        a, w, scales = of_ranks[rank]
        for partition in ("auto", "none") * 4:
            found = getattr(graphar, op)(a, w, *beside, partition=partition, **scales)
            wrong += [same_bits(*pair) for pair in zip(found, wanted, strict=True)]
    return wrong


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.gpu(1)), *SHARED_WORLD_SIZES])
@on_ranks(by=run_on_gpus, timeout_s=300)
def test_processes_get_the_sums_of_the_scaled_matmuls_partials(rank, world_size):
    wrong = []
    for op in OPS:
        call = getattr(graphar, op)
        for of in FORMATS:
            for shape in SHAPES:
                a, w, scales = operands(rank, of, *shape)
                for how in HOW:
                    if shape[0] < 33 and how == {"partition": "split_m"}:
                        continue
                    epilogue = {"epilogue": how["epilogue"]} if "epilogue" in how else {}
                    wanted = expected(op, rank, world_size, of, shape, **epilogue)
                    found = [call(a, w, **scales, **how) for _ in range(4)]
                    wrong += [same_bits(one, wanted) for one in found]
                wanted = expected(op, rank, world_size, of, shape)
                for partition in ("auto", "tiles"):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        captured = call(a, w, **scales, partition=partition)
                    graph.replay()
                    wrong.append(same_bits(captured, wanted))
    found = wrong + wrong_elements_of_norms(rank, world_size)
    assert set(found) == {0}
