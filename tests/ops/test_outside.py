"""Calls by an algorithm from outside the package on the CPU: they have the result of its specification."""

from functools import partial

import pytest
import torch

import graphar
from graphar import reference
from tests.outside import load
from tests.processes import on_ranks

pytestmark = pytest.mark.usefixtures("nothing_stays_loaded")

OPS = ("allreduce", "reducescatter", "allgather")


def in_reverse(tensors):
    """A sum that differs from that in rank order where rounding does."""
    total = torch.zeros_like(tensors[0])
    for one in reversed(tensors):
        total += one
    return total


def parts_in_reverse(tensors):
    return list(in_reverse(tensors).tensor_split(len(tensors)))


def joined_in_reverse(tensors):
    return torch.cat(tensors[::-1])


OWN = {"allreduce": in_reverse, "reducescatter": parts_in_reverse, "allgather": joined_in_reverse}


@pytest.fixture
def xs():
    """Tensors of three ranks, whose sum depends on the order."""
    values = torch.tensor([1.0, 1e8, -1e8]).view(3, 1, 1)
    return list(torch.randn(3, 7, 2, generator=torch.Generator().manual_seed(1)) + values)


def of_every_rank(op, results):
    """The results of three ranks: a reduce-scatter gives each its own."""
    return list(results) if op == "reducescatter" else [results] * 3


def are_equal(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_without_a_specification_a_call_has_the_exact_bits_of_its_op(op, xs):
    found = getattr(graphar, op)(xs, algorithm=load(op=op))

    assert are_equal(found, of_every_rank(op, getattr(reference, op)(xs)))


@pytest.mark.parametrize("op", OPS)
def test_a_specification_of_its_own_gives_the_result(op, xs):
    found = getattr(graphar, op)(xs, algorithm=load(op=op, specification=OWN[op]))

    expected = of_every_rank(op, OWN[op](xs))
    assert are_equal(found, expected)
    assert not are_equal(found, of_every_rank(op, getattr(reference, op)(xs)))


def test_the_result_may_go_into_the_input(xs):
    expected, given = in_reverse(xs), [x.clone() for x in xs]

    graphar.allreduce(given, out=given, algorithm=load(specification=in_reverse))

    assert are_equal(given, [expected] * 3)


def test_a_function_that_overwrites_its_tensors_changes_no_input(xs):
    before = [x.clone() for x in xs]
    add_to_first = load(specification=lambda tensors: tensors[0].add_(tensors[1]).add_(tensors[2]))

    graphar.allreduce(xs, algorithm=add_to_first)

    assert are_equal(xs, before)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_another_axis_comes_first_where_the_specification_is_asked(axis, xs):
    scatter, gather = (load(op=op, specification=OWN[op]) for op in OPS[1:])

    scattered = graphar.reducescatter(xs, axis=axis, algorithm=scatter)
    joined = graphar.allgather(xs, axis=axis, algorithm=gather)

    assert are_equal(scattered, in_reverse(xs).tensor_split(3, dim=axis))
    assert are_equal(joined, [torch.cat(xs[::-1], dim=axis)] * 3)


@pytest.mark.parametrize("value", [lambda tensors: tensors[0].double(), lambda tensors: tensors[0][:3]])
def test_a_specification_with_another_result_is_refused(value, xs):
    with pytest.raises(ValueError, match=r"allreduce: pushed_sum@\w+ has a specification that gives \["):
        graphar.allreduce(xs, algorithm=load(specification=value))


def test_a_specification_of_a_reduce_scatter_has_a_result_for_every_rank(xs):
    whole, two = (load(op="reducescatter", specification=one) for one in (in_reverse, lambda tensors: tensors[:2]))

    with pytest.raises(ValueError, match=r"has a specification that gives \[7, 2\] torch.float32 in place of \[3, 2\]"):
        graphar.reducescatter(xs, algorithm=whole)
    with pytest.raises(ValueError, match="has a specification that gives 2 results"):
        graphar.reducescatter(xs, algorithm=two)


@pytest.mark.parametrize("op", OPS)
def test_a_single_rank_and_an_empty_tensor_need_no_specification(op):
    algorithm = load(op=op, specification=lambda tensors: pytest.fail("computed"))

    assert getattr(graphar, op)([torch.ones(3)], algorithm=algorithm)[0].tolist() == [1, 1, 1]
    assert getattr(graphar, op)([torch.ones(0)] * 2, algorithm=algorithm)[0].numel() == 0


def test_an_explanation_says_by_whose_specification_a_call_goes(xs):
    ring = load()

    said = graphar.explain(xs, algorithm=ring)
    of_parts = graphar.explain(graphar.reducescatter, xs, algorithm=load(op="reducescatter"))

    assert str(said) == f"fallback: the tensor is on the CPU; by the specification of {ring}"
    assert "by the specification of pushed_sum@" in of_parts.reason


@pytest.mark.parametrize("op", OPS)
def test_one_that_is_not_loaded_is_refused(op, xs):
    with pytest.raises(ValueError, match=f"^{op}: this process has loaded no algorithm 'ring@0123' of {op}$"):
        getattr(graphar, op)(xs, algorithm="ring@0123")


def test_a_codec_or_a_tuple_takes_no_algorithm(xs):
    with pytest.raises(ValueError, match="reducescatter: takes a codec or an algorithm, not both"):
        graphar.reducescatter(xs, algorithm="reducescatter_push", codec="int8")
    with pytest.raises(ValueError, match="algorithm must be one of auto, quantized_two_shot_push"):
        graphar.allreduce(xs, algorithm=load(), codec="int8")
    with pytest.raises(ValueError, match="algorithm must be 'auto' for a tuple, got 'pushed_sum@"):
        graphar.allgather((xs, xs), algorithm=load(op="allgather"))


def test_a_hook_takes_an_all_reduce_alone():
    assert callable(graphar.ddp.exact_hook(algorithm=load()))
    with pytest.raises(ValueError, match=r"^exact_hook: this process has loaded no algorithm 'pushed_sum@\w+' of"):
        graphar.ddp.exact_hook(algorithm=load(op="allgather"))


def test_the_gradient_is_the_sum_by_the_same_algorithm(xs):
    for x in xs:
        x.requires_grad_()
    gradients = [torch.full_like(x, value) for x, value in zip(xs, (1.0, 1e8, -1e8), strict=True)]

    sums = graphar.allreduce(xs, algorithm=load(specification=in_reverse))
    torch.autograd.backward(sums, gradients)

    assert are_equal([x.grad for x in xs], [in_reverse(gradients)] * 3)


@pytest.fixture
def compiler():
    """torch.compile, which has compiled nothing yet."""
    torch.compiler.reset()
    return partial(torch.compile, fullgraph=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("op", OPS)
def test_a_compiled_graph_carries_it_by_its_name(op, backend, xs, compiler):
    algorithm = load(op=op, specification=OWN[op])

    @compiler(backend=backend)
    def compiled(xs):
        return [one * 2 for one in getattr(graphar, op)(xs, algorithm=algorithm)]

    found = compiled(xs)

    assert are_equal(found, [one * 2 for one in of_every_rank(op, OWN[op](xs))])


def test_a_graph_holds_a_plain_string(xs, compiler):
    graphs = []

    @compiler(backend=lambda graph, _: graphs.append(graph) or graph)
    def compiled(xs):
        return graphar.allreduce(xs, algorithm=ring)

    ring = load()
    compiled(xs)

    (node,) = [node for node in graphs[0].graph.nodes if node.target is torch.ops.graphar.allreduce_list.default]
    held = [one for one in node.args if one == ring]
    assert [type(one) for one in held] == [str]


def test_another_algorithm_is_compiled_again(xs, compiler):
    compiled = compiler(graphar.allreduce, backend="eager")

    exact, other = (compiled(xs, algorithm=one)[0] for one in (load(), load(specification=in_reverse)))

    assert torch.equal(exact, reference.allreduce(xs))
    assert torch.equal(other, in_reverse(xs))


@on_ranks(3)
def test_ranks_that_are_processes_compute_the_specification(rank, world_size):
    xs = [torch.tensor([[1.0, 2.0], [1e8, 1e8], [-1e8, 3.0]])[at] + torch.zeros(5, 2) for at in range(world_size)]
    unequal = [x[: at + 1] for at, x in enumerate(xs)]
    reduce, scatter, gather = (load(op=op, specification=OWN[op]) for op in OPS)
    exact = load()

    for _ in range(3):  # the first time by a new plan, and then by a repeat
        assert torch.equal(graphar.allreduce(xs[rank], algorithm=reduce), in_reverse(xs))
        assert torch.equal(graphar.allreduce(xs[rank], algorithm=exact), reference.allreduce(xs))
    assert torch.equal(graphar.reducescatter(xs[rank], algorithm=scatter), parts_in_reverse(xs)[rank])
    assert torch.equal(graphar.allgather(xs[rank], algorithm=gather), joined_in_reverse(xs))
    found = graphar.allgather(unequal[rank], sizes=[1, 2, 3], algorithm=gather)
    assert torch.equal(found, joined_in_reverse(unequal))
    large = torch.ones(1 << 16) * (rank + 1)
    assert graphar.allreduce(large, algorithm=reduce)[0] == 6


@on_ranks(2)
def test_ranks_that_loaded_different_files_or_rows_are_told_what_each_called(rank, world_size):
    ring = load(threads=128 << rank)

    with pytest.raises(graphar.CommunicatorError, match="must make the same graphar calls") as raised:
        graphar.allreduce(torch.ones(4), algorithm=ring)

    assert f"rank {rank}: allreduce of [4] torch.float32, algorithm {ring} on the CPU" in str(raised.value)
