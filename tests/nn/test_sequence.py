"""Sequence parallelism of graphar.nn: results, gradients and steps of AdamW have the bits of one rank with all tokens.

Sequence shards of a [batch, sequence, hidden] input interleave with the batch, which shows what is summed in the order
of ranks.
"""

import pytest
import torch
import torch.distributed as dist

from graphar import nn
from tests.cases import normal, same_bits
from tests.nn.test_layers import derived_twice
from tests.processes import on_ranks, run_ranks

BATCH, SEQUENCE, HIDDEN, INNER = 4, 16, 16, 64
DTYPES = (torch.bfloat16, torch.float32)  # of bf16, rounding hides some wrong additions
SEVERAL = (2, 4, 8)


def drawn(seed, *shape, dtype=torch.bfloat16):
    return normal(seed, torch.Size(shape).numel(), dtype).view(shape)


def part(whole, axis, rank, ranks):
    """A rank's part of a tensor; all of it for the axis None."""
    own = whole if axis is None else whole.chunk(ranks, axis)[rank]
    return own.clone(memory_format=torch.contiguous_format)


def whole_linears(dtype):
    """A layer up and a layer down, with biases, the same on every rank."""
    up, down = (torch.nn.Linear(*sizes, dtype=dtype) for sizes in ((HIDDEN, INNER), (INNER, HIDDEN)))
    with torch.no_grad():
        for seed, one in enumerate([*up.parameters(), *down.parameters()]):
            one.copy_(drawn(seed, *one.shape, dtype=dtype) / 4)
    return up, down


def step(parameters):
    """Copies of the parameters after a step of AdamW with their gradients."""
    optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=False)
    optimizer.step()
    return [one.detach().clone() for one in parameters]


def trained(x, up, down, of_y):
    """The output, all gradients and the parameters after a step, of a residual block of two layers."""
    x = x.clone().requires_grad_()
    y = x + down(torch.relu(up(x)))
    y.backward(of_y)
    parameters = [*up.parameters(), *down.parameters()]
    return [y.detach(), x.grad, *[one.grad for one in parameters], *step(parameters)]


def given(dtype):
    return [drawn(seed, BATCH, SEQUENCE, HIDDEN, dtype=dtype) for seed in (7, 8)]


def on_one_rank(dtype, **more):
    up, down = whole_linears(dtype)
    x, of_y = given(dtype)
    up = nn.ColumnParallelLinear(up, tp_invariant=True, **more)
    return trained(x, up, nn.RowParallelLinear(down, tp_invariant=True, **more), of_y)


def in_parts(found, rank, ranks, axis):
    """The parts of :func:`trained` that a rank of sequence parallelism has."""
    axes = [axis, axis] + [0, 0, 1, None] * 2
    return [part(*pair, rank, ranks) for pair in zip(found, axes, strict=True)]


def layers_on_ranks(rank, ranks, tp_invariant):
    """What each rank gets, by dtype and dimension of tokens."""
    found = {}
    for dtype in DTYPES:
        for axis in (1, -2) if BATCH % ranks else (0, 1, -2):
            how = {"tp_invariant": tp_invariant, "sequence_dim": axis}
            up, down = whole_linears(dtype)
            up, down = nn.ColumnParallelLinear(up, **how), nn.RowParallelLinear(down, **how)
            x, of_y = (part(one, axis, rank, ranks) for one in given(dtype))
            found[dtype, axis] = trained(x, up, down, of_y)
    return found


@pytest.mark.parametrize("ranks", SEVERAL)
def test_layers_with_divided_tokens_have_the_bits_of_one_rank_with_all(ranks):
    for rank, by_case in enumerate(run_ranks(layers_on_ranks, ranks, True)):
        for (dtype, axis), found in by_case.items():
            expected = in_parts(on_one_rank(dtype), rank, ranks, axis)
            assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0] * 10, (dtype, axis)


def test_otherwise_layers_are_as_close_as_sums_can_be():
    for rank, by_case in enumerate(run_ranks(layers_on_ranks, 2, False)):
        for axis in (1, -2):
            expected = in_parts(on_one_rank(torch.float32), rank, 2, axis)
            torch.testing.assert_close(by_case[torch.float32, axis][:6], expected[:6])


def compiled_layers(rank, ranks):
    """What a rank gets from layers that torch.compile has traced in one graph."""
    up, down = whole_linears(torch.bfloat16)
    how = {"tp_invariant": True, "sequence_dim": 1}
    layers = nn.ColumnParallelLinear(up, **how), nn.RowParallelLinear(down, **how)
    x, of_y = (part(one, 1, rank, ranks) for one in given(torch.bfloat16))
    return trained(x, *[torch.compile(one, fullgraph=True, backend="aot_eager") for one in layers], of_y)


def test_compiled_layers_have_the_same_bits():
    for rank, found in enumerate(run_ranks(compiled_layers, 2)):
        expected = in_parts(on_one_rank(torch.bfloat16), rank, 2, 1)
        assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0] * 10


@pytest.mark.parametrize("layer", ["ColumnParallelLinear", "RowParallelLinear"])
@pytest.mark.parametrize("axis", [-1, 2, 3, -4])
def test_only_a_dimension_of_tokens_can_be_divided(layer, axis):
    made = getattr(nn, layer)(torch.nn.Linear(8, 8), tp_invariant=True, sequence_dim=axis)

    with pytest.raises(ValueError, match=f"^{layer}: sequence_dim must be a dimension before the last"):
        made(torch.ones(2, 8, 8))


@on_ranks(2)
def test_tokens_that_cannot_be_divided_evenly_are_refused(rank, ranks):
    layer = nn.RowParallelLinear(torch.nn.Linear(16, 8), sequence_dim=0)
    with pytest.raises(ValueError, match=r"^RowParallelLinear: 2 ranks cannot divide 7 tokens evenly$"):
        layer(torch.ones(7, 8))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_single_process_needs_no_group(axis):
    for dtype in DTYPES:
        pairs = zip(on_one_rank(dtype, sequence_dim=axis), on_one_rank(dtype), strict=True)
        assert [same_bits(*pair) for pair in pairs] == [0] * 10


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def differing(found, expected):
    return [same_bits(*pair) for pair in zip(found, expected, strict=True)]


NORMS = (torch.nn.RMSNorm, torch.nn.LayerNorm)


def norms_on_ranks(rank, ranks, length, axis=1, norms=NORMS):
    """What norms of tokens divided along an axis give: results and gradients, whole."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh, found = dist.device_mesh.init_device_mesh("cpu", (ranks,)), []
    x, of_y = (drawn(seed, 2, length, HIDDEN) for seed in (0, 1))
    for kind in norms:
        norm = torch.nn.Sequential(kind(HIDDEN, eps=1e-5, dtype=torch.bfloat16))
        if ranks > 1:
            parallelize_module(norm, mesh, {"0": SequenceParallel(sequence_dim=axis % 3)})
            norm[0]._forward_pre_hooks.clear()  # the input is divided as the case wants it
            x, of_y = (distribute_tensor(whole(one), mesh, [Shard(axis)]) for one in (x, of_y))
        nn.make_tp_invariant(norm, {"0": SequenceParallel()})
        own = x.detach().clone().requires_grad_()
        y = norm(own)
        y.backward(of_y)
        found.append([whole(one) for one in (y, own.grad, *[one.grad for one in norm.parameters()])])
    return found


@pytest.mark.parametrize("length", [16, 7, 3])
def test_norms_of_tokens_that_ranks_divide_unevenly_have_the_bits_of_one_rank(length):
    (expected,) = run_ranks(norms_on_ranks, 1, length)

    for found in run_ranks(norms_on_ranks, 4, length):
        for kind, *pair in zip(NORMS, found, expected, strict=True):
            assert not any(differing(*pair)), kind


def test_the_gradients_of_a_norm_on_one_rank_have_derivatives():
    plain, ours = [torch.nn.Sequential(torch.nn.LayerNorm(HIDDEN)) for _ in range(2)]
    nn.make_tp_invariant(ours, {"0": "sequence_parallel"})
    x = drawn(0, 4, HIDDEN, dtype=torch.float32)
    torch.testing.assert_close(derived_twice(ours, x), derived_twice(plain, x))


def test_rows_that_ranks_divide_are_normed_by_torch():
    kinds = (torch.nn.LayerNorm,)  # torch cannot divide the rows of its RMSNorm on CPUs
    (expected,) = run_ranks(norms_on_ranks, 1, 16, 1, kinds)

    for found in run_ranks(norms_on_ranks, 2, 16, -1, kinds):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


class ScaledNorm(torch.nn.Module):
    """A norm that graphar does not know."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return self.weight * x


def test_a_norm_of_another_class_that_sees_a_ranks_tokens_is_named():
    from torch.distributed.tensor.parallel import SequenceParallel

    model = torch.nn.Sequential(ScaledNorm(), torch.nn.RMSNorm(HIDDEN), torch.nn.Dropout())
    styles = {str(at): SequenceParallel() for at in range(3)}

    layers = nn.make_tp_invariant(model, styles)

    assert list(layers.left) == ["0"]
    assert "the gradients of its parameters are summed in the order of ranks" in layers.left["0"]


def test_a_name_of_the_plan_that_no_module_has_is_told():
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN))

    layers = nn.make_tp_invariant(model, {"*": "colwise", "0": "colwise", "down": "rowwise"})

    assert layers.left == {"down": "no such module"}
