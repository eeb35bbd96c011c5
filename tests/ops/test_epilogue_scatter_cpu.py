"""reducescatter with an epilogue on the CPU: the specification's bits on every rank, gradients, compilers, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck

import graphar
from graphar import Epilogue
from graphar.ops.reducescatter import OP
from tests.cases import KERNEL_DTYPES, normal, same_bits
from tests.processes import run_ranks

ops = torch.ops.graphar
EVERYTHING = "v * s + a[row] - b[col] * c[index] + d[0] + row - 2 * col + index"


def parts_of(world_size, shape, dtype=torch.bfloat16):
    return [normal(rank, torch.Size(shape).numel(), dtype).view(shape) for rank in range(world_size)]


def lengths(length, world_size):
    return [len(part) for part in torch.empty(length).tensor_split(world_size)]


def everything(rows, columns, seed=30):
    """An epilogue of all there is, for a part of that shape."""
    numels = {"a": rows, "b": columns, "c": rows * columns, "d": 1}
    tensors = {name: normal(seed + k, numel, torch.float16) for k, (name, numel) in enumerate(numels.items())}
    return Epilogue(EVERYTHING, s=0.3, **tensors)


def in_lists(epilogues):
    names = epilogues[0].tensors
    tensors = {name: [one.tensors[name] for one in epilogues] for name in names}
    return Epilogue(epilogues[0].what, **tensors, **epilogues[0].scalars)


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_each_rank_gets_its_part_of_the_sum_with_its_own_epilogue(world_size, dtype):
    for rows, columns in [(1, 1), (7, 5), (9, 64)]:
        parts = parts_of(world_size, (rows, columns), dtype)
        own = [everything(size, columns, 50 * rank) for rank, size in enumerate(lengths(rows, world_size))]

        ys = graphar.reducescatter(parts, epilogue=in_lists(own))

        summands = zip(*(part.tensor_split(world_size) for part in parts), strict=True)
        for y, shares, epilogue in zip(ys, summands, own, strict=True):
            assert same_bits(y, graphar.reference.allreduce(shares, epilogue)) == 0
        expected = graphar.reference.reducescatter(parts, epilogue=in_lists(own))
        assert [same_bits(*pair) for pair in zip(ys, expected, strict=True)] == [0] * world_size


def test_without_places_it_is_a_part_of_the_all_reduce_along_any_axis():
    parts = parts_of(3, (5, 4, 7))
    for text, axes in [("-v", (0, 1, 2)), ("gelu(v) * b[col]", (0, 1))]:
        tensors = {"b": normal(9, 7, torch.float32)} if "b" in text else {}
        whole = graphar.reference.allreduce(parts, Epilogue(text, **tensors))
        for axis in axes:
            lists = {name: [one] * 3 for name, one in tensors.items()}
            ys = graphar.reducescatter(parts, axis=axis, epilogue=Epilogue(text, **lists))
            assert [same_bits(*pair) for pair in zip(ys, whole.tensor_split(3, axis), strict=True)] == [0] * 3


def test_a_tensor_of_one_dimension_is_one_row():
    ys = graphar.reducescatter([torch.zeros(7)] * 2, epilogue="100 * row + 10 * col + index")

    assert [y.tolist() for y in ys] == [[0.0, 11.0, 22.0, 33.0], [0.0, 11.0, 22.0]]


def scatter_as_rank(rank, world_size):
    for rows in (0, 1, 5, 1 << 15):
        parts, columns = parts_of(world_size, (rows, 33)), 33
        own = [everything(size, columns, 50 * r) for r, size in enumerate(lengths(rows, world_size))]
        expected = graphar.reference.reducescatter(parts, epilogue=in_lists(own))
        assert same_bits(graphar.reducescatter(parts[rank], epilogue=own[rank]), expected[rank]) == 0, f"{rows} rows"
    residuals = [
        normal(70 + r, size * 33, torch.bfloat16).view(size, 33) for r, size in enumerate(lengths(5, world_size))
    ]
    parts = parts_of(world_size, (5, 33))
    mine = graphar.reducescatter(parts[rank], epilogue=Epilogue(lambda v, r: v + r, r=residuals[rank]))
    expected = graphar.reference.reducescatter(parts, epilogue=Epilogue("v + r[index]", r=residuals))
    assert same_bits(mine, expected[rank]) == 0


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_get_the_specifications_bits(world_size):
    run_ranks(scatter_as_rank, world_size)


@pytest.mark.parametrize("length", [1, 3])
def test_a_function_means_the_same_on_ranks_with_one_row_as_on_others(length):
    def added(v, residual, of_rows):
        return v * of_rows + residual

    epilogue = Epilogue(added, residual=torch.ones(length, 5), of_rows=torch.ones(length, 1))

    assert epilogue.text(torch.empty(length, 5), whole=0) == "((v * of_rows[row]) + residual[index])"


def scatter_in_debug_mode(rank, world_size):
    with graphar.Communicator(debug=True) as communicator:
        assert communicator.reducescatter(torch.ones(2), epilogue="-v").tolist() == [-2.0]
        with pytest.raises(graphar.CommunicatorError, match=r"axis 0, sizes .* epilogue v"):
            communicator.reducescatter(torch.ones(2), epilogue=f"v + {rank}")


def test_debug_mode_compares_epilogues():
    run_ranks(scatter_in_debug_mode, 2)


# ---- gradients and compilers ----------------------------------------------------------------------------------------


def test_the_gradients_are_those_of_the_parts_of_the_sum():
    xs = [x.requires_grad_() for x in parts_of(2, (5, 4), torch.float32)]
    residuals = [normal(9 + k, n * 4, torch.float32).view(n, 4).requires_grad_() for k, n in enumerate((3, 2))]

    ys = graphar.reducescatter(xs, epilogue=Epilogue("v * v * r[index]", r=residuals))
    gradients = torch.autograd.grad((ys[0] * 3).sum() + ys[1].sum(), [*xs, *residuals])

    shares = (xs[0] + xs[1]).tensor_split(2)
    zs = [v * v * r for v, r in zip(shares, residuals, strict=True)]
    expected = torch.autograd.grad((zs[0] * 3).sum() + zs[1].sum(), [*xs, *residuals])
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.fixture(scope="module")
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_ops_keep_the_rules_of_ops(world_of_one):
    x, bias = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    given, places = {"scalars": [0.5], "epilogue": "v * s + b[col]"}, ((0, [4]), (-1, [2, 2]))
    one, two = (OP.arguments(tensors=[bias] * len(sizes), sizes=sizes, rank=rank, **given) for rank, sizes in places)

    opcheck(ops.reducescatter.default, (x, *one))
    opcheck(ops.reducescatter_list.default, ([x, x], *two))


def test_a_compiled_call_gives_the_eager_bits(world_of_one):
    def scatter(x, bias):
        return graphar.reducescatter(x * 2, epilogue=Epilogue(lambda v, b: torch.relu(v + b), b=bias)) + 1

    x, bias = torch.randn(6, 4), torch.randn(4)

    assert same_bits(torch.compile(scatter, fullgraph=True, backend="aot_eager")(x, bias), scatter(x, bias)) == 0
    torch._dynamo.reset()


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "epilogue", "message"),
    [
        (1, "v + row", "along axis 1 an epilogue cannot use row"),
        (1, Epilogue("v + r[index]", r=[torch.ones(12)] * 2), "along axis 1 an epilogue cannot use index"),
        (2, "v + col", "along axis 2 an epilogue cannot use col; move axis to the front"),
        (0, Epilogue("v + r[index]", r=[torch.ones(24)] * 2), r"r\[index\] needs 12 element"),
        (0, Epilogue("v + b[col]", b=torch.ones(3)), "with a list, an epilogue's tensors are lists of 2"),
        (
            0,
            Epilogue(lambda v, b: v + b, b=[torch.ones(1, 2, 3)] * 2),
            r"\[1, 2, 3\] does not broadcast over \[2, 2, 3\]",
        ),
        (0, "v +", "epilogue"),
    ],
)
def test_what_cannot_be_is_refused(axis, epilogue, message):
    xs = [torch.ones(4, 2, 3)] * 2

    with pytest.raises(ValueError, match=message):
        graphar.reducescatter(xs, axis=axis, epilogue=epilogue)


def test_a_codec_and_an_epilogue_do_not_go_together():
    with pytest.raises(ValueError, match="takes a codec or an epilogue, not both"):
        graphar.reducescatter([torch.ones(2)] * 2, epilogue="-v", codec="int8")


def test_a_rank_whose_part_is_empty_has_tensors_without_elements():
    xs, biases = [torch.ones(1), torch.ones(1)], [torch.ones(1), torch.ones(0)]

    parts = graphar.reducescatter(xs, epilogue=graphar.Epilogue("v + b[col]", b=biases))

    assert [part.tolist() for part in parts] == [[3.0], []]
