"""torch.fx graphs of one process with several devices: sums of lists between the operations of each device."""

import pytest
import torch
from torch import fx

import graphar
from graphar import reference
from tests.cases import same_bits
from tests.worlds import GPU_COUNTS

COLUMNS = 1024
ROWS = (7, 512)


def each(function, xs):
    return [function(x) for x in xs]


def total(xs):
    """The sum, indexed for every device: a traced list has no known length."""
    ys = graphar.allreduce(xs)
    return [ys[i] for i in range(len(xs))]


class Graph(torch.nn.Module):
    """A function of a list with a tensor a device, as a module that torch.fx can trace."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, xs):
        return self.function(xs, total)


def block(xs, total):
    """The sums of a transformer block: one after attention, one after the MLP."""
    attended = total(each(lambda x: torch.clamp(x, -1, 1) * 0.5, xs))
    xs = [x + y for x, y in zip(xs, attended, strict=True)]
    inner = total(each(lambda x: torch.relu(x) * x, xs))
    return [x + y for x, y in zip(xs, inner, strict=True)]


GRAPHS = {
    "sum, add": lambda xs, total: each(lambda y: y + 42, total(xs)),
    "sum, double, sum": lambda xs, total: total(each(lambda y: y * 2, total(xs))),
    "sum, times and plus, relu": lambda xs, total: each(lambda y: torch.relu(y * 3 + 10), total(xs)),
    "scale, plus, maximum, sum": lambda xs, total: total(each(lambda x: torch.clamp_min(x * 0.5 + 5, 4), xs)),
    "a block twice": lambda xs, total: block(block(xs, total), total),
}
PAIRS = {
    "pairs": lambda xs, total: [*total(xs[:2]), *total(xs[2:])],
    "pairs, all, pairs": lambda xs, total: PAIRS["pairs"](total(PAIRS["pairs"](xs, total)), total),
}


def traced(function, devices):
    return fx.symbolic_trace(Graph(function), concrete_args={"xs": [fx.PH] * devices})


def inputs(devices, rows=ROWS[0], device="cpu"):
    """Normal values, multiplied by rank + 1."""
    drawn = torch.randn(devices, rows, COLUMNS, generator=torch.Generator().manual_seed(0))
    return [(x * (rank + 1)).to(f"cuda:{rank}" if device == "cuda" else device) for rank, x in enumerate(drawn)]


def wrong(found, function, xs):
    """How many elements of each result differ from the same function with the specification's sums."""
    expected = function(xs, lambda ys: [reference.allreduce(ys)] * len(ys))
    return [same_bits(mine.to(right.device), right) for mine, right in zip(found, expected, strict=True)]


# A number of devices, and their kind.
ON = [(1, "cpu"), (2, "cpu"), (4, "cpu"), *(pytest.param((n, "cuda"), marks=pytest.mark.gpu(n)) for n in GPU_COUNTS)]
IN_PAIRS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(4))]


@pytest.mark.parametrize("on", ON, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_traced_graph_gives_the_specifications_bits(name, rows, on):
    devices, device = on

    found = traced(GRAPHS[name], devices)(inputs(devices, rows, device))

    assert wrong(found, GRAPHS[name], inputs(devices, rows)) == [0] * devices


@pytest.mark.parametrize("device", IN_PAIRS)
@pytest.mark.parametrize(
    ("name", "rows"),
    [*((name, (ROWS[1], ROWS[1])) for name in PAIRS), ("pairs", (5, 9)), ("pairs", (384, ROWS[1]))],
    ids=str,
)
def test_pairs_of_devices_sum_among_themselves_also_tensors_of_other_sizes(name, rows, device):
    mine, expected = ([x[: rows[rank // 2]] for rank, x in enumerate(inputs(4, ROWS[1], on))] for on in (device, "cpu"))

    assert wrong(traced(PAIRS[name], 4)(mine), PAIRS[name], expected) == [0] * 4


def test_a_sum_is_one_node():
    graph = traced(GRAPHS["sum, double, sum"], 2).graph

    sums = [node for node in graph.nodes if node.target is graphar.allreduce]
    assert len(sums) == 2
    assert [len(node.args[0]) for node in sums] == [2, 2]


def test_every_op_can_be_traced():
    def step(x, w, weight):
        normed, residual = graphar.allreduce_residual_rmsnorm([x], [x], [weight])
        product = graphar.fused_matmul_allreduce(normed, [w])
        (part,) = graphar.reducescatter(product)
        scattered = graphar.fused_matmul_reducescatter([part], [w])
        fused, _ = graphar.fused_matmul_allreduce_residual_rmsnorm(scattered, [w], residual, [weight])
        return graphar.allgather(fused)[0]

    given = torch.randn(3, 8), torch.randn(8, 8), torch.randn(8)

    assert same_bits(fx.symbolic_trace(step)(*given), step(*given)) == 0


@pytest.mark.gpu
def test_a_traced_graph_is_captured_on_all_devices(ranks):
    class InPlace(torch.nn.Module):
        def forward(self, xs, ys):
            each(lambda x: x.mul_(2), xs)
            graphar.allreduce(xs, out=ys)
            each(lambda y: y.add_(42), ys)

    places = [fx.PH] * ranks.world_size
    module = fx.symbolic_trace(InPlace(), concrete_args={"xs": places, "ys": places})
    xs = inputs(ranks.world_size, device="cuda")
    ys = each(torch.empty_like, xs)
    module(xs, ys)

    graph = ranks.capture(lambda: module(xs, ys))
    for _ in range(3):
        graph.replay()
    each(lambda y: torch.cuda.synchronize(y.device), ys)

    expected = reference.allreduce([x * 2**4 for x in inputs(ranks.world_size)]) + 42
    assert [same_bits(y.cpu(), expected) for y in ys] == [0] * ranks.world_size
