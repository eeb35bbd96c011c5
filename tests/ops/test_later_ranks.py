"""Lists in which the last rank's tensor alone breaks a rule: they are refused as those whose first one does."""

import pytest
import torch

import graphar

FP8, RANKS = torch.float8_e4m3fn, 2
A, W, ROWS = torch.ones(6, 16), torch.ones(8, 16), torch.ones(6, 8)

SCALED = {"a_scale": torch.ones(6, 1), "w_scale": torch.ones(1, 8), "out_dtype": torch.bfloat16}
# By name: an op, and the arguments of each rank. Those in no list are options.
CALLS = {
    "allreduce": (graphar.allreduce, {"x": ROWS, "out": ROWS}),
    "allreduce by a codec": (graphar.allreduce, {"x": ROWS, "residual": ROWS, "codec": "int4"}),
    "reducescatter": (graphar.reducescatter, {"x": ROWS}),
    "reducescatter by a codec": (graphar.reducescatter, {"x": ROWS, "residual": ROWS, "codec": "int4"}),
    "allgather": (graphar.allgather, {"x": ROWS}),
    "a matmul": (graphar.fused_matmul_allreduce, {"a": A, "w": W, "bias": W[:, 0], "out": ROWS}),
    "a matmul of parts": (graphar.fused_matmul_reducescatter, {"a": A, "w": W}),
    "gathered rows": (graphar.fused_allgather_matmul, {"a": A, "w": W, "bias": W[:, 0]}),
    "a norm": (graphar.allreduce_residual_rmsnorm, {"x": ROWS, "residual": ROWS, "weight": ROWS[0]}),
    "a norm of parts": (graphar.reducescatter_residual_rmsnorm, {"x": ROWS, "residual": ROWS[:3], "weight": ROWS[0]}),
    "a matmul and a norm": (
        graphar.fused_matmul_allreduce_residual_rmsnorm,
        {"a": A, "w": W, "residual": ROWS, "weight": ROWS[0]},
    ),
    "scales": (graphar.fused_matmul_allreduce, {"a": A.to(FP8), "w": W.to(FP8), **SCALED}),
    "scales of parts": (graphar.fused_matmul_reducescatter, {"a": A.to(FP8), "w": W.to(FP8), **SCALED}),
    "scales of gathered rows": (graphar.fused_allgather_matmul, {"a": A.to(FP8), "w": W.to(FP8), **SCALED}),
}
CHANGES = {
    "no tensor": lambda x: 3,
    "another dtype": lambda x: x.to(torch.float16),
    "another device": lambda x: x.to("meta"),
    "another dimension": lambda x: x.unsqueeze(0),
    "another last dimension": lambda x: torch.ones(*x.shape[:-1], x.shape[-1] + 1).to(x.dtype),
}
ACCEPTED = {("a_scale", "another dimension")}  # leading dimensions are rows


def of_ranks(given):
    """Arguments with a list of copies in place of each tensor."""
    return {name: [one.clone() for _ in range(RANKS)] if _is_tensor(one) else one for name, one in given.items()}


def _is_tensor(one):
    return isinstance(one, torch.Tensor)


TENSORS = [(name, argument) for name, (_, given) in CALLS.items() for argument in given if _is_tensor(given[argument])]


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_a_tensor_of_the_last_rank_that_breaks_a_rule_is_refused_and_nothing_is_written(name, argument, what):
    op, given = CALLS[name]
    lists = of_ranks(given)
    lists[argument][-1] = CHANGES[what](lists[argument][-1])
    before = {one: [x.clone() for x in lists[one] if _is_tensor(x)] for one in ("out", "residual") if one in lists}

    if (argument, what) in ACCEPTED:
        op(**lists)
        return
    with pytest.raises((ValueError, TypeError)):
        op(**lists)
    for one, tensors in before.items():
        after = [x for x in lists[one] if _is_tensor(x)]
        assert all(x.is_meta or torch.equal(x, y) for x, y in zip(tensors, after, strict=True))


@pytest.mark.parametrize("op", [graphar.allreduce, graphar.reducescatter])
def test_a_residual_of_the_last_rank_that_is_its_tensor_is_refused_and_nothing_is_written(op):
    xs = [torch.full((8,), 3.0) for _ in range(RANKS)]
    residuals = [torch.ones(8), xs[-1].view(8)]

    with pytest.raises(ValueError, match="residual"):
        op(xs, codec="int4", residual=residuals)

    assert [float(one.sum()) for one in (*xs, residuals[0])] == [24, 24, 8]
