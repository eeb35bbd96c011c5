"""The pass's rewrite of an all-reduce before a matmul: which weight it prefetches, what it leaves, and the bits."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.ops import allreduce, matmul_allreduce
from graphar.plan.tables import shipped_table
from tests.cases import same_bits
from tests.graph.graphs import given, rewritten
from tests.graph.test_norm_pass import Traced, summed
from tests.parallel_models import compiled
from tests.processes import run_ranks

ops, aten, functional = torch.ops.graphar, torch.ops.aten, torch.nn.functional
COLUMNS = 16
LARGEST_NBYTES = shipped_table("default").prefetch.largest_nbytes


def traced(function, *more, rows=8, dtype=torch.bfloat16):
    """Traces a function of x [rows, COLUMNS], a weight w [COLUMNS, COLUMNS] and ``more``."""
    return Traced(function, (rows, COLUMNS), (COLUMNS, COLUMNS), *more, dtype=dtype)


def prefetched(drawing) -> list[str | None]:
    """The input that each all-reduce prefetches: x, w, v or None."""
    inputs = dict(zip([node for node in drawing.graph.nodes if node.op == "placeholder"], "xwv", strict=False))
    sums = [node for node in drawing.graph.nodes if node.name.startswith(("allreduce", "fused"))]
    return [next((inputs[one] for one in given(node)["prefetch"]), None) for node in sums]


# ---- which weight ---------------------------------------------------------------------------------------------------

FORMS = {
    "a linear layer": lambda x, w: functional.linear(torch.relu(summed(x)), w),
    "with a bias": lambda x, w: functional.linear(summed(x) * 2, w, x[0]),
    "a product": lambda x, w: summed(x) @ w,
    "in another shape": lambda x, w: functional.linear(summed(x).view(2, 4, -1), w),
    "a view of a weight": lambda x, w: summed(x).view(-1, 8) @ w.view(8, -1),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_weight_of_the_matmul_that_follows_is_prefetched(make_pass, name):
    compile_pass = make_pass()

    drawing = rewritten(compile_pass, traced(FORMS[name]))

    x, w, total, *_ = drawing.graph.nodes
    assert total.target is ops.allreduce.default
    assert total.args == (x, *allreduce.OP.arguments(prefetch=[w]))
    assert total.meta["val"].shape == x.meta["val"].shape
    assert str(compile_pass.report).splitlines()[1:] == [
        "graph 0: all_reduce(sum) of [8, 16] bfloat16 on cpu in group '0': graphar::allreduce",
        "graph 0: allreduce of [8, 16] bfloat16 on cpu in group '0': prefetches the next matmul's weight",
    ]


def test_each_sum_prefetches_its_own_next_weight_and_the_last_none(make_pass):
    def layers(x, w, v):
        return summed(summed(summed(x) @ w) @ v)

    drawing = rewritten(make_pass(), traced(layers, (COLUMNS, COLUMNS)))

    assert prefetched(drawing) == ["w", "v", None]


def test_a_weight_in_e4m3_is_prefetched(make_pass):
    def layer(x, w):
        scale = torch.ones(())
        return torch._scaled_mm(summed(x).to(torch.float8_e4m3fn), w.t(), scale, scale, out_dtype=torch.bfloat16)

    kinds = [torch.bfloat16, torch.float8_e4m3fn]
    drawing = rewritten(make_pass(), Traced(layer, (8, COLUMNS), (COLUMNS, COLUMNS), dtype=kinds))

    assert prefetched(drawing) == ["w"]


def test_of_several_matmuls_the_first_counts_and_those_of_activations_do_not(make_pass):
    def attention(x, w, v):
        total = summed(x)
        return (total @ total.t()) @ (total @ v) + total @ w

    drawing = rewritten(make_pass(), traced(attention, (COLUMNS, COLUMNS)))

    assert prefetched(drawing) == ["v"]


def test_a_matmul_that_does_not_need_the_sum_does_not_count(make_pass):
    drawing = rewritten(make_pass(), traced(lambda x, w: (summed(x) * 2, x @ w)))

    assert prefetched(drawing) == [None]


def test_only_the_last_collective_before_a_matmul_prefetches_its_weight(make_pass):
    drawing = rewritten(make_pass(), traced(lambda x, w: summed(summed(x) * 2) @ w))

    assert prefetched(drawing) == [None, "w"]


def test_what_is_computed_is_no_weight(make_pass):
    drawing = rewritten(make_pass(), traced(lambda x, w: summed(x) @ (w * 2)))

    assert prefetched(drawing) == [None]


def test_a_fused_matmul_prefetches_and_is_a_matmul_that_follows(make_pass):
    def layers(x, w, v):
        fused, call = ops.fused_matmul_allreduce, matmul_allreduce.OP.arguments()
        return fused(torch.relu(fused(summed(x), w, *call)), v, *call)

    drawing = rewritten(make_pass(), traced(layers, (COLUMNS, COLUMNS)))

    assert prefetched(drawing) == ["w", "v", None]


def test_what_prefetches_is_kept_in_order(make_pass):
    drawing = rewritten(make_pass(), traced(lambda x, w: (summed(x) @ w, summed(x * 2) @ w)))

    first, second = (given(node)["after"] for node in drawing.graph.nodes if node.target is ops.allreduce.default)
    assert (len(first), len(second)) == (0, 1)
    assert prefetched(drawing) == ["w", "w"]


# ---- what is left ---------------------------------------------------------------------------------------------------

LINEAR = FORMS["a linear layer"]
LEFT = {
    "too large": ({"rows": LARGEST_NBYTES // COLUMNS}, {}, f"the sum has more than {LARGEST_NBYTES} bytes"),
    "no kernel": ({"dtype": torch.float64}, {}, "no kernel adds torch.float64"),
    "turned off": ({}, {"off": ["prefetch"]}, "turned off"),
}


@pytest.mark.parametrize(("kinds", "options", "why"), LEFT.values(), ids=LEFT)
def test_where_it_cannot_help_the_sum_stays_and_the_report_says_why(make_pass, kinds, options, why):
    compile_pass = make_pass(**options)

    drawing = rewritten(compile_pass, traced(LINEAR, **kinds))

    assert prefetched(drawing) == [None]
    assert [(entry.rewrite, entry.why_left) for entry in compile_pass.report.refused] == [("prefetch", why)]
    assert str(compile_pass.report).endswith(f"in group '0': no prefetch: {why}")


def test_a_fused_norm_has_no_hint(make_pass):
    def layer(x, w, residual, scale):
        return functional.rms_norm(residual + summed(x), scale.shape, scale, 1e-5) @ w

    compile_pass = make_pass()
    rewritten(compile_pass, traced(layer, (8, COLUMNS), (COLUMNS,)))

    assert [entry.rewrite for entry in compile_pass.report.entries] == ["norm"]


def test_the_key_of_the_cache_knows_whether_it_is_off(make_pass):
    first = make_pass().uuid()
    dist.destroy_process_group()

    assert make_pass(off=["prefetch"]).uuid() != first


# ---- on ranks -------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(COLUMNS, 32, bias=False), torch.nn.Linear(32, COLUMNS)

    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        dist.all_reduce(y)
        return self.up(y)


def run_model(rank, world_size):
    compile_pass, model = graphar.compile_pass(), Model()
    fast, results = compiled(model, compile_pass), []
    for count in (5, 9, 12):  # from the second on, sizes vary
        x = torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(count)) + rank
        hidden = model.down(torch.relu(model.up(x)))
        results.append((fast(x).detach(), model.up(graphar.allreduce(hidden)).detach()))
    fast(x).sum().backward()
    gradients = [one.grad is not None for one in model.parameters()]
    return results, [str(entry) for entry in compile_pass.report.rewritten], gradients


@functools.cache
def results_of_models():
    return run_ranks(run_model, 2, timeout_s=180)


def test_a_compiled_model_has_the_bits_it_has_without():
    for results, _, gradients in results_of_models():
        assert [same_bits(*pair) for pair in results] == [0, 0, 0]
        assert gradients == [True] * 3


def test_a_size_that_varies_is_rewritten_too():
    for _, rewritten_ones, _ in results_of_models():
        assert any("[s" in one and one.endswith("prefetches the next matmul's weight") for one in rewritten_ones)
