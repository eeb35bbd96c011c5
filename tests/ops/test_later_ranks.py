"""Lists in which the last rank's tensor alone breaks a rule: they are refused as those whose first one does."""

import pytest
import torch

import graphar
from tests.cases import normal
from tests.ops.conformance import (
    ALLREDUCE,
    FUSED_ALLGATHER,
    FUSED_ALLREDUCE,
    FUSED_REDUCESCATTER,
    PLAIN,
    REDUCESCATTER,
    copies,
)

RANKS, WRITTEN = 2, {"out", "residual"}
FORMS = [*PLAIN, ALLREDUCE[6], REDUCESCATTER[6], FUSED_ALLREDUCE[1], FUSED_ALLGATHER[1]]  # residuals and biases
FORMS += [
    next(form for form in forms if form.label.startswith("rows"))  # with scales
    for forms in (FUSED_ALLREDUCE, FUSED_REDUCESCATTER, FUSED_ALLGATHER)
]
CHANGES = {
    "no tensor": lambda x: 3,
    "another dtype": lambda x: x.to(torch.float16),
    "another device": lambda x: x.to("meta"),
    "another dimension": lambda x: x.unsqueeze(0),
    "another last dimension": lambda x: torch.ones(*x.shape[:-1], x.shape[-1] + 1).to(x.dtype),
}
ACCEPTED = {("a_scale", "another dimension")}  # leading dimensions are rows


def call_of(form):
    """Arguments of a call of two ranks by name, with an ``out`` if the op takes one."""
    tensors = form.tensors(RANKS, form.small, torch.float32 if torch.float32 in form.dtypes else None, normal)
    return tensors | ({"out": [torch.zeros_like(y) for (y,) in form.expected(tensors)]} if form.takes_out else {})


CALLS = [(form, argument) for form in FORMS for argument in call_of(form)]


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize(("form", "argument"), CALLS, ids=str)
def test_a_tensor_of_the_last_rank_that_breaks_a_rule_is_refused_and_nothing_is_written(form, argument, what):
    lists = call_of(form)
    lists[argument][-1] = CHANGES[what](lists[argument][-1])
    written = {name: [x for x in lists[name] if isinstance(x, torch.Tensor)] for name in lists.keys() & WRITTEN}
    before = copies(written)

    if (argument, what) in ACCEPTED:
        form.in_list(lists)
        return
    with pytest.raises((ValueError, TypeError), match=f"^{form.op.__name__.removesuffix('_tuple')}: "):
        form.in_list(lists)
    for name, tensors in written.items():
        assert all(x.is_meta or torch.equal(x, y) for x, y in zip(tensors, before[name], strict=True))


@pytest.mark.parametrize("op", [graphar.allreduce, graphar.reducescatter])
def test_a_residual_of_the_last_rank_that_is_its_tensor_is_refused_and_nothing_is_written(op):
    xs = [torch.full((8,), 3.0) for _ in range(RANKS)]
    residuals = [torch.ones(8), xs[-1].view(8)]

    with pytest.raises(ValueError, match="residual"):
        op(xs, codec="int4", residual=residuals)

    assert [float(one.sum()) for one in (*xs, residuals[0])] == [24, 24, 8]
