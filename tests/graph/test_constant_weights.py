"""Which weights the pass calls constant: those of modules that a graph for inference only reads."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

import graphar
from graphar.graph import matmul, places
from graphar.ops.register import op_of
from tests.graph.graphs import PAYS, given, rewritten
from tests.graph.test_matmul_pass import COLUMNS, FORMS, ROWS, K, normed, summed, traced
from tests.parallel_models import HIDDEN, compiled, tokens
from tests.processes import on_ranks

pytestmark = pytest.mark.usefixtures("pays")

aten = torch.ops.aten
WEIGHT = 1  # its number among the graph's inputs


def flags(compile_pass, graph, static=(WEIGHT,), tokens=()):
    """The option in each of graphar's ops of a rewritten graph whose inputs ``static`` are parameters or buffers."""
    context = TracingContext(FakeTensorMode())
    context.fw_metadata = SimpleNamespace(static_input_indices=list(static), tokens=dict.fromkeys(tokens))
    with tracing(context):
        rewritten(compile_pass, graph)
    return [given(node)["constant_weight"] for node in graph.graph.nodes if op_of(node.target)]


def written(graph):
    """The graph, which now ends with a copy into the weight."""
    weight = graph.graph.find_nodes(op="placeholder")[WEIGHT]
    with graph.graph.inserting_before(graph.graph.output_node()):
        seen = graph.graph.call_function(aten.view.default, (weight, [COLUMNS, K]))
        copied = graph.graph.call_function(aten.copy_.default, (seen, weight))
    seen.meta["val"] = copied.meta["val"] = weight.meta["val"]
    return graph


def of_training(name):
    """A graph whose first input has a name as in graphs with gradients."""
    graph = traced(LAYER)
    graph.graph.find_nodes(op="placeholder")[0].target = name
    return graph


@pytest.mark.parametrize("name", [*FORMS, "a norm"])
def test_a_parameter_that_is_only_read_is_constant(make_pass, name):
    graph = traced(FORMS[name]) if name in FORMS else traced(normed(summed), (ROWS, COLUMNS), (COLUMNS,))

    assert flags(make_pass(constant_weights=True), graph) == [True]


LAYER = FORMS["a linear layer"]
NOT_CONSTANT = {
    "unless asked for": (lambda: traced(LAYER), {}, {}),
    "an input that is no parameter": (lambda: traced(LAYER), {"constant_weights": True}, {"static": (0,)}),
    "a computed weight": (lambda: traced(lambda a, w: LAYER(a, w * 2)), {"constant_weights": True}, {}),
    "a weight that the graph writes": (lambda: written(traced(LAYER)), {"constant_weights": True}, {}),
    "a graph with side effects": (lambda: traced(LAYER), {"constant_weights": True}, {"tokens": ["a print"]}),
    "where gradients are recorded": (lambda: of_training("primals_1"), {"constant_weights": True}, {}),
    "in a backward pass": (lambda: of_training("tangents_1"), {"constant_weights": True}, {}),
}


@pytest.mark.parametrize(("graph", "how", "known"), NOT_CONSTANT.values(), ids=NOT_CONSTANT)
def test_other_weights_are_not_constant(make_pass, graph, how, known):
    assert flags(make_pass(**how), graph(), **known) == [False]


def test_nothing_is_constant_in_a_graph_of_which_torch_tells_nothing(make_pass):
    graph = rewritten(make_pass(constant_weights=True), traced(LAYER)).graph

    assert [given(node)["constant_weight"] for node in graph.nodes if op_of(node.target)] == [False]


@on_ranks(2, timeout_s=180)
def test_inductor_tells_parameters_from_other_inputs(rank, world_size):
    """Which weights of a model are constant, first for inference: those of a layer, and one that is an argument."""
    places.shipped_table = places.find_table = lambda name: PAYS
    found, is_constant = [], matmul.is_constant
    matmul.is_constant = lambda weight: found.append(is_constant(weight)) or found[-1]
    layer = torch.nn.Linear(HIDDEN, COLUMNS, bias=False, dtype=torch.bfloat16)

    def model(x, w):
        sums = layer(x), torch.nn.functional.linear(x, w)
        for one in sums:
            dist.all_reduce(one)
        return sums

    for records_gradients in (False, True):
        torch._dynamo.reset()
        with torch.set_grad_enabled(records_gradients):
            compiled(model, graphar.compile_pass(constant_weights=True))(tokens(4), torch.zeros_like(layer.weight))
    assert found == [True, False, False, False]
