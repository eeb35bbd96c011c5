"""fused_matmul_allreduce_residual_rmsnorm on the CPU: its bits, its gradients, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import graphar
from graphar import reference
from graphar.graph import order
from graphar.matmul import fused as fused_matmuls
from graphar.numerics import norms
from graphar.ops.matmul_allreduce_rmsnorm import OP
from graphar.runtime import residual_norm
from tests.cases import normal, same_bits
from tests.ops.test_scatter_ops import compiled, world_of_one  # noqa: F401, they are fixtures
from tests.processes import run_ranks

fused = graphar.fused_matmul_allreduce_residual_rmsnorm
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def operands(ranks, lead, n, k, dtype):
    """Every rank's ``a`` and ``w``; the residual and the weight of the norm."""
    m = torch.Size(lead).numel()
    a = [normal(rank, m * k, dtype).view(*lead, k) for rank in range(ranks)]
    w = [normal(100 + rank, n * k, dtype).view(n, k) for rank in range(ranks)]
    return a, w, normal(200, m * n, dtype).view(*lead, n), normal(201, n, dtype)


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["auto", "tiles", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_list_gets_the_bits_of_the_products_reduced_and_normed(dtype, partition):
    for lead, n, k in (((7,), 40, 33), ((2, 5), 16, 1), ((0,), 8, 4), ((3,), 9, 0), ((), 24, 12)):
        a, w, residual, weight = operands(3, lead, n, k, dtype)
        products = [
            reference.matmul(x.reshape(torch.Size(lead).numel(), k), y).view(*lead, n)
            for x, y in zip(a, w, strict=True)
        ]
        call = (residual, weight, 1e-5, 1.0)

        found = fused(a, w, [residual] * 3, [weight] * 3, 1e-5, weight_offset=1.0, partition=partition)

        expected = reference.allreduce_residual_rmsnorm(products, *call)
        for ones, wanted, specified in zip(
            found, expected, reference.fused_matmul_allreduce_residual_rmsnorm(a, w, *call), strict=True
        ):
            assert [same_bits(one, wanted) for one in (*ones, specified)] == [0] * 4


def test_what_tiles_have_summed_is_normed_where_it_lies(monkeypatch):
    """The kernels' stand-ins do what they do in torch's operations."""
    a, w, residual, weight = operands(2, (2, 5), 24, 12, torch.bfloat16)
    order = []

    def sum_in_tiles(ranks, members, counts, timeout_s, epilogue=None):
        order.append(f"sum of {counts}")
        total = reference.fused_matmul_allreduce([one.a for one in members], [one.w for one in members])
        for one in members:
            one.out.copy_(total)

    def norm(total, residual, weight, summed, eps, offset):
        order.append("norm")
        for mine, one in zip((total, summed), norms.specification(total, residual, weight, eps, offset), strict=True):
            mine.copy_(one)

    monkeypatch.setattr(residual_norm, "norm", norm)
    monkeypatch.setattr(residual_norm, "load", lambda device, dtype: order.append("load"))
    monkeypatch.setattr(fused_matmuls, "takes", lambda *call: True)
    monkeypatch.setattr(fused_matmuls, "allreduce", sum_in_tiles)

    found = fused(a, w, [residual] * 2, [weight] * 2, 1e-5, weight_offset=1.0)

    expected = reference.fused_matmul_allreduce_residual_rmsnorm(a, w, residual, weight, 1e-5, 1.0)
    assert [same_bits(one, wanted) for ones, wanted in zip(found, expected, strict=True) for one in ones] == [0] * 4
    assert order == ["load", "load", "sum of [10, 0]", "norm", "norm"]  # nothing is loaded beside what waits


def as_rank(rank, world_size):
    a, w, residual, weight = operands(world_size, (2, 5), 24, 12, torch.bfloat16)
    expected = reference.fused_matmul_allreduce_residual_rmsnorm(a, w, residual, weight)
    wrong = [same_bits(*pair) for pair in zip(fused(a[rank], w[rank], residual, weight), expected, strict=True)]
    leaves = [one.float().requires_grad_() for one in (a[rank], w[rank], residual, weight)]
    normed, summed = fused(*leaves)
    (normed.sum() + 2 * summed.sum()).backward()
    return wrong, [leaf.grad for leaf in leaves]


def test_processes_get_the_specification_and_the_gradients_of_the_layer():
    a, w, residual, weight = operands(2, (2, 5), 24, 12, torch.bfloat16)
    a, w, residual, weight = ([one.float().requires_grad_() for one in ones] for ones in (a, w, [residual], [weight]))
    summed = a[0] @ w[0].t() + a[1] @ w[1].t() + residual[0]
    (torch.nn.functional.rms_norm(summed, (24,), weight[0], 1e-6).sum() + 2 * summed.sum()).backward()

    for rank, (wrong, gradients) in enumerate(run_ranks(as_rank, 2)):
        assert wrong == [0, 0]
        for mine, leaf in zip(gradients, (a[rank], w[rank], residual[0], weight[0]), strict=True):
            torch.testing.assert_close(mine, leaf.grad, rtol=1e-4, atol=1e-4)


def test_the_gradients_of_a_list_reach_every_operand():
    a, w, residual, weight = operands(2, (5,), 24, 12, torch.float32)
    given = [[one.clone().requires_grad_() for one in ones] for ones in (a, w, [residual] * 2, [weight] * 2)]

    normed, summed = fused(*given)
    sum(one.sum() for one in (*normed, *summed)).backward()

    assert all(one.grad is not None and one.grad.any() for ones in given for one in ones)


# ---- compilers ------------------------------------------------------------------------------------------------------


def test_the_ops_keep_the_rules_of_ops(world_of_one):  # noqa: F811
    a, w, residual, weight = operands(2, (3,), 16, 8, torch.bfloat16)
    numbers = OP.arguments(eps=1e-6, weight_offset=0.0)

    opcheck(getattr(torch.ops.graphar, fused.__name__).default, (a[0], w[0], residual, weight, *numbers))
    lists = (a, w, [residual, residual.clone()], [weight, weight.clone()])
    opcheck(getattr(torch.ops.graphar, f"{fused.__name__}_list").default, (*lists, *numbers))


def test_a_compiled_call_gives_the_eager_bits_at_any_size(world_of_one, compiled):  # noqa: F811
    fast = compiled(lambda *given: fused(given[0] * 2, *given[1:]))

    for rows in (3, 5, 8):
        (a,), (w,), residual, weight = operands(1, (rows,), 16, 8, torch.bfloat16)
        expected = fused(a * 2, w, residual, weight)
        found = fast(a, w, residual, weight)
        assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0, 0]


def test_a_graph_keeps_its_order(world_of_one):  # noqa: F811
    from torch.fx.experimental.proxy_tensor import make_fx

    (a,), (w,), residual, weight = operands(1, (3,), 16, 8, torch.bfloat16)
    module = make_fx(lambda *given: (graphar.allreduce(given[0]), *fused(*given)))(a, w, residual, weight)
    order.keep(module.graph)

    first, second = (node for node in module.graph.nodes if "graphar" in str(node.target))
    assert second.target is OP.one
    assert OP.read(second.args)["after"] == [first]


# ---- refusals -------------------------------------------------------------------------------------------------------

A, W, RESIDUAL, WEIGHT = torch.ones(6, 5), torch.ones(4, 5), torch.ones(6, 4), torch.ones(4)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ((A, W[:, :3], RESIDUAL, WEIGHT), {}, ValueError, "as many elements in its last dimension"),
        ((A, W, RESIDUAL[:5], WEIGHT), {}, ValueError, r"residual must be \[6, 4\] torch.float32 on cpu, got \[5, 4\]"),
        ((A, W, RESIDUAL, WEIGHT[:3]), {}, ValueError, r"weight must be \[4\]"),
        ((A, W, RESIDUAL.half(), WEIGHT), {}, ValueError, "got .* torch.float16"),
        ((A, W, None, WEIGHT), {}, TypeError, "residual"),
        ((A.double(), W.double(), RESIDUAL.double(), WEIGHT.double()), {}, ValueError, "a must be bfloat16, float16"),
        ((A, W[:0], RESIDUAL[:, :0], WEIGHT[:0]), {}, ValueError, "w must have rows"),
        ((A, W, RESIDUAL, WEIGHT, float("inf")), {}, ValueError, "eps must be a finite number"),
        ((A, W, RESIDUAL, WEIGHT), {"weight_offset": "1"}, ValueError, "weight_offset must be a finite number"),
        ((A, W, RESIDUAL, WEIGHT), {"partition": "split_m"}, ValueError, "one of auto, tiles, none, got 'split_m'"),
        ((A, W, RESIDUAL, WEIGHT), {"timeout_s": 0}, ValueError, "timeout_s"),
        (([A, A], W[:2], [RESIDUAL] * 2, [WEIGHT] * 2), {}, ValueError, "w must be a list of 2 tensors"),
        (([A, A], [W, W], RESIDUAL[:2], [WEIGHT] * 2), {}, ValueError, "residual must be a list of 2 tensors"),
        (([A, A], [W, W], [RESIDUAL] * 2, [WEIGHT]), {}, ValueError, "weight must be a list of 2 tensors"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_sent(given, options, error, message):
    with pytest.raises(error, match=message):
        fused(*given, **options)
