"""The pass's rewrite of a matmul and the sum of its result: the forms it takes, what it leaves, and the bits."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import tiles
from tests.cases import same_bits
from tests.graphs import rewritten
from tests.parallel_models import MLP, TOKENS, compiled, tokens
from tests.ranks import run_ranks
from tests.test_norm_pass import Traced, llamas, summed

ops, functional = torch.ops.graphar, torch.nn.functional
ROWS, COLUMNS, K = 8, 16, 24


@pytest.fixture
def pays(monkeypatch):
    """As if all sizes had been measured to be faster."""
    monkeypatch.setattr(tiles, "_PAYS_FROM", dict.fromkeys(range(2, 9), 1))
    monkeypatch.setattr(tiles, "_LEAST_BUSY", 0.0)


def traced(function, *more, dtype=torch.bfloat16, rows=(ROWS,)):
    """Of a [rows, K], w [COLUMNS, K], and more."""
    return Traced(function, (*rows, K), (COLUMNS, K), *more, dtype=dtype)


def of_matmul(report):
    return [entry for entry in report.entries if entry.rewrite == "matmul"]


FORMS = {
    "a linear layer": lambda a, w: summed(functional.linear(a, w)),
    "a product": lambda a, w: summed(a @ w.t()),
    "the sum in another shape": lambda a, w: summed(functional.linear(a, w)).view(2, -1, COLUMNS),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_matmul_and_its_sum_become_one_op(make_pass, pays, name):
    compile_pass = make_pass()

    graph = rewritten(compile_pass, traced(FORMS[name])).graph

    (fused,) = [node for node in graph.nodes if node.target is ops.fused_matmul_allreduce.default]
    a, w = [node for node in graph.nodes if node.op == "placeholder"]
    assert fused.args == (a, w, None, "", "auto", None, "", None)
    assert not [node for node in graph.nodes if node.target is torch.ops.aten.mm.default]
    assert [entry.why_left for entry in of_matmul(compile_pass.report)] == [""]


def test_a_layer_of_three_dimensions_takes_its_input_as_it_is(make_pass, pays):
    compile_pass = make_pass()

    graph = rewritten(compile_pass, traced(FORMS["a linear layer"], rows=(2, ROWS))).graph

    (fused,) = [node for node in graph.nodes if node.target is ops.fused_matmul_allreduce.default]
    assert fused.args[0].op == "placeholder"
    assert fused.meta["val"].shape == (2, ROWS, COLUMNS)


def test_a_weight_that_is_not_seen_transposed_is_given_so(make_pass, pays):
    compile_pass = make_pass()

    graph = rewritten(compile_pass, Traced(lambda a, w: summed(a @ w), (ROWS, K), (K, COLUMNS))).graph

    (fused,) = [node for node in graph.nodes if node.target is ops.fused_matmul_allreduce.default]
    assert fused.args[1].target is torch.ops.aten.permute.default
    assert fused.args[1].meta["val"].shape == (COLUMNS, K)


def test_a_matmul_a_sum_and_a_norm_become_one_op(make_pass, pays):
    def layer(a, w, residual, weight):
        return llamas(residual + summed(functional.linear(a, w)), weight)

    compile_pass = make_pass()

    graph = rewritten(compile_pass, traced(layer, (ROWS, COLUMNS), (COLUMNS,))).graph

    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (fused,) = [node for node in graph.nodes if node.target is ops.fused_matmul_allreduce_residual_rmsnorm.default]
    assert fused.args == (*inputs, 1e-5, 0.0, "", "auto", None)


LEFT = {
    "the product has further uses": lambda a, w: (lambda y: (summed(y), y))(functional.linear(a, w)),
    "the product is summed in another shape": lambda a, w: summed(functional.linear(a, w).view(-1, 2 * COLUMNS)),
}


@pytest.mark.parametrize("why", LEFT)
def test_others_are_left_and_the_report_says_why(make_pass, pays, why):
    compile_pass = make_pass()

    calls = rewritten(compile_pass, traced(LEFT[why])).calls()

    assert ops.allreduce.default in calls
    assert [entry.why_left for entry in of_matmul(compile_pass.report)] == [why]


def test_dtypes_without_a_kernel_are_left(make_pass, pays):
    compile_pass = make_pass()

    rewritten(compile_pass, traced(FORMS["a product"], dtype=torch.float32))

    assert [entry.why_left for entry in of_matmul(compile_pass.report)] == ["no matmul of torch.float32 sums its tiles"]


def test_sizes_that_were_not_measured_to_be_faster_are_left(make_pass):
    compile_pass = make_pass()

    calls = rewritten(compile_pass, traced(FORMS["a product"])).calls()

    assert ops.allreduce.default in calls
    assert [entry.why_left for entry in of_matmul(compile_pass.report)] == ["not known to be faster as one op"]


# ---- bits -----------------------------------------------------------------------------------------------------------


def run_compiled(rank, world_size):
    tiles._PAYS_FROM, tiles._LEAST_BUSY = {2: 1}, 0.0
    fused, apart = graphar.compile_pass(), graphar.compile_pass(off=["matmul"])
    models = [compiled(MLP(rank, world_size), one) for one in (fused, apart)]
    with torch.no_grad():
        found = [[model(tokens(count)) for model in models] for count in TOKENS]
    return found, of_matmul(fused.report)


def test_a_compiled_model_has_the_bits_that_it_has_without():
    for found, entries in run_ranks(run_compiled, 2):
        assert [same_bits(fused, apart) for fused, apart in found] == [0] * len(TOKENS)
        assert [entry.why_left for entry in entries] == ["", ""]  # the second graph is for any number of tokens
