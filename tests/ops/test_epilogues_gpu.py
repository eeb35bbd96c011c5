"""Sums with an epilogue on real GPUs: exact expressions give the specification's bits on every rank."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import graphar
from graphar import Epilogue
from graphar.plan.scratch import Sizes
from tests.cases import normal, same_bits
from tests.gpu import DTYPES, Ranks, parts_of
from tests.ops import specified as by
from tests.ops.conformance import ALLREDUCE, REDUCESCATTER
from tests.ops.gpu_cases import EPILOGUE_KERNELS, FOLLOWED, Case, followed, if_not_empty

pytestmark = pytest.mark.gpu

NUMELS = (0, 7, 8192, 8193, 8199, 8200, 8216, 131072, 262144, 262149, 16777216, 16777224, 16777240, 67108864)


AFFINE = "v * scale + bias[col]"


def auto(what: str, **changes) -> Case:
    """Calls with an expression by the kernel that is chosen."""
    form = replace(followed(ALLREDUCE[0], by.allreduced, what), **changes)
    return Case(form, dict.fromkeys(EPILOGUE_KERNELS, (17, 65)), [], served=if_not_empty, once=True)


def test_every_size_gives_the_specification(ranks: Ranks):
    for rows in (1, 64, 1024, 8192):
        auto(AFFINE).check(ranks, (rows, 8192), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_any_size_are_negated(ranks: Ranks, dtype):
    for numel in NUMELS:
        auto("-v").check(ranks, (numel,), dtype)


def test_the_fallback_gives_the_kernels_bits(ranks: Ranks):
    for what in FOLLOWED:
        Case(replace(auto(what).form, options={"algorithm": "fallback"}), {}, []).check(ranks, (17, 65))


@pytest.mark.parametrize(
    ("what", "function"),
    [
        ("gelu(v)", functional.gelu),
        ("softplus(v) + elu(v) * mish(v)", lambda v: functional.softplus(v) + functional.elu(v) * functional.mish(v)),
        ("gelu_tanh(v)", lambda v: functional.gelu(v, approximate="tanh")),
        ("silu(v) * sigmoid(v)", lambda v: functional.silu(v) * v.sigmoid()),
        ("tanh(v) + exp(v) + erf(v) + expm1(v)", lambda v: v.tanh() + v.exp() + v.erf() + v.expm1()),
        ("log(abs(v)) + log1p(abs(v)) + log2(abs(v))", lambda v: v.abs().log() + v.abs().log1p() + v.abs().log2()),
        ("rsqrt(abs(v)) + pow(abs(v), 0.3) + exp2(v)", lambda v: v.abs().rsqrt() + v.abs().pow(0.3) + v.exp2()),
        ("sin(v) * cos(v)", lambda v: v.sin() * v.cos()),
    ],
)
def test_transcendental_functions_are_torchs_within_a_few_units_in_the_last_place(ranks: Ranks, what, function):
    parts = parts_of(ranks, normal, (64, 129), torch.float32)

    ys = ranks.communicator.allreduce(ranks.place(parts), epilogue=what)

    ranks.communicator.synchronize()
    total = graphar.reference.allreduce(parts).double()
    for y in ys:
        torch.testing.assert_close(y.cpu().double(), function(total), rtol=3e-6, atol=3e-6)
        assert same_bits(y.cpu(), ys[0].cpu()) == 0


def test_places_go_on_from_one_slice_of_a_reduce_scatter_to_the_next(ranks: Ranks):
    case = replace(FOLLOWED["v + c[index] - row + b[col]"][-1], once=False)
    before = case.calls(ranks)

    case.check(ranks, (3 * Sizes.reducescatter_nbytes // 2000, 1000), torch.bfloat16)

    assert case.calls(ranks) > before + 1


def test_reduce_scatters_along_other_axes_and_of_one_dimension(ranks: Ranks):
    for what, axis in (("-v", 2), (AFFINE, 1)):
        form = replace(followed(REDUCESCATTER[0], by.reducescattered, what), options={"axis": axis})
        Case(form, {}).check(ranks, (3, 17, 40), torch.float16)
    Case(replace(REDUCESCATTER[0], epilogue="v + index - col + row"), {}).check(ranks, (4099,), torch.bfloat16)


def test_another_number_or_tensor_needs_no_other_plan(ranks: Ranks):
    auto(AFFINE).check(ranks, (8, 64))
    plans = len(ranks.communicator.engine.plans)

    for turn in range(5):
        auto(AFFINE, numbers={"scale": 0.7 * turn}).check(ranks, (8, 64), seed=turn)

    assert len(ranks.communicator.engine.plans) == plans


def test_a_tensor_on_another_device_is_refused(ranks: Ranks):
    xs = ranks.place([torch.ones(2, 4)] * ranks.world_size)

    with pytest.raises(ValueError, match="b must be on the device of x, cuda:0, got cpu"):
        ranks.communicator.allreduce(xs, epilogue=Epilogue("v + b[col]", b=[torch.ones(4)] * ranks.world_size))
