"""fused_matmul_allreduce_residual_rmsnorm with sums by a kernel: what is normed, and in which order."""

import torch

import graphar
from graphar import reference
from graphar.numerics import norms
from graphar.plan.config import FALLBACK
from graphar.product import products
from graphar.product.operands import operands_of
from graphar.runtime.bind import residual_norm
from graphar.runtime.plan import Plan
from tests.cases import normal, same_bits

fused = graphar.fused_matmul_allreduce_residual_rmsnorm


def operands(ranks, lead, n, k, dtype):
    """Every rank's ``a`` and ``w``; the residual and the weight of the norm."""
    m = torch.Size(lead).numel()
    a = [normal(rank, m * k, dtype).view(*lead, k) for rank in range(ranks)]
    w = [normal(100 + rank, n * k, dtype).view(n, k) for rank in range(ranks)]
    return a, w, normal(200, m * n, dtype).view(*lead, n), normal(201, n, dtype)


def on_the_cpu(monkeypatch, order, op, sum_in_tiles):
    """Stand-ins for the kernels of ``op`` compute the same with torch, and append to ``order`` what they do."""

    def norm(total, residual, weight, normed, summed, eps, offset):
        order.append("norm")
        for mine, one in zip((normed, summed), norms.specification(total, residual, weight, eps, offset), strict=True):
            mine.copy_(one)

    monkeypatch.setattr(residual_norm, "norm", norm)
    monkeypatch.setattr(residual_norm, "load", lambda device, dtype: order.append("load"))

    def fused_plan(engine, call):
        work = call.work
        return Plan(lambda ranks: sum_in_tiles([operands_of(work, own) for own in ranks], [*work.parts]), FALLBACK)

    monkeypatch.setattr(products, "takes_tiles", lambda engine, call, a: call.work.op == op and not call.work.norm)
    monkeypatch.setattr(products, "_fused", fused_plan)


def test_what_tiles_have_summed_is_normed_where_it_lies(monkeypatch):
    a, w, residual, weight = operands(2, (2, 5), 24, 12, torch.bfloat16)
    order = []

    def sum_in_tiles(members, counts):
        order.append(f"sum of {counts}")
        total = reference.fused_matmul_allreduce([one.a for one in members], [one.w for one in members])
        for one in members:
            one.out.copy_(total.flatten(0, -2))

    on_the_cpu(monkeypatch, order, "fused_matmul_allreduce", sum_in_tiles)

    found = fused(a, w, [residual] * 2, [weight] * 2, 1e-5, weight_offset=1.0)

    expected = reference.fused_matmul_allreduce_residual_rmsnorm(a, w, residual, weight, 1e-5, 1.0)
    assert [same_bits(one, wanted) for ones, wanted in zip(found, expected, strict=True) for one in ones] == [0] * 4
    assert order == ["load", "load", "sum of [10, 0]", "norm", "norm"]  # kernels are loaded before any of them waits


def test_each_rank_norms_the_rows_that_tiles_have_summed_for_it(monkeypatch):
    a, w, residual, weight = operands(3, (2, 5), 24, 12, torch.bfloat16)
    own, order = list(residual.tensor_split(3)), []

    def sum_in_tiles(members, counts):
        order.append(f"sum of {counts}")
        pairs = [one.a for one in members], [one.w for one in members]
        for one, total in zip(members, reference.fused_matmul_allreduce(*pairs).split(counts), strict=True):
            one.out.copy_(total)

    on_the_cpu(monkeypatch, order, "fused_matmul_reducescatter", sum_in_tiles)

    found = graphar.fused_matmul_reducescatter_residual_rmsnorm(a, w, own, [weight] * 3, 1e-5, weight_offset=1.0)

    expected = reference.fused_matmul_reducescatter_residual_rmsnorm(a, w, own, weight, 1e-5, 1.0)
    pairs = zip(zip(*found, strict=True), expected, strict=True)
    assert [same_bits(*pair) for pair_of in pairs for pair in zip(*pair_of, strict=True)] == [0] * 6
    # The third rank has no rows: a kernel without blocks cannot be launched.
    assert order == ["load"] * 3 + ["sum of [5, 5, 0]"] + ["norm"] * 2
