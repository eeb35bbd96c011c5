"""graphar.nn.quantize_rows: values of e4m3 with scales, against the bits of norms and against what they stand for."""

import pytest
import torch

import graphar
from graphar.nn import quantize_rows
from tests.cases import same_bits

FP8 = torch.float8_e4m3fn
ROWS, COLUMNS = 5, 384
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def values(dtype=torch.float32):
    return (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, COLUMNS)).to(
        dtype
    )


def real(rows, scales):
    return rows.float() * scales.repeat_interleave(COLUMNS // scales.shape[-1], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [None, 128])
def test_scales_are_the_largest_magnitudes_over_448_and_values_are_near(group_size, dtype):
    x = values(dtype)

    rows, scales = quantize_rows(x, group_size=group_size)

    groups = x.float().view(ROWS, -1, group_size or COLUMNS)
    assert torch.equal(scales, groups.abs().amax(-1) / 448)
    assert (rows.dtype, rows.shape, scales.dtype) == (FP8, x.shape, torch.float32)
    steps = torch.maximum(x.float().abs() / 16, scales.repeat_interleave(groups.shape[-1], -1) / 512)
    assert ((real(rows, scales) - x.float()).abs() <= steps).all()


def test_an_element_is_rounded_once_to_the_nearest_and_saturated():
    x, scale = torch.tensor([[1.0, 17.0, 19.0, 2.0**-10, 500.0, -1e30]]), torch.tensor([1.0])

    rows, given = quantize_rows(x, scale=scale)

    assert given is scale
    assert rows.float().tolist() == [[1.0, 16.0, 20.0, 0.0, 448.0, -448.0]]  # ties go to even codes


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_group_with_a_value_that_is_not_finite_is_nan_as_a_whole_and_others_are_not(bad):
    x = torch.ones(2, 256)
    x[1, 3] = bad

    rows, scales = quantize_rows(x, group_size=128)

    assert scales.isnan().tolist() == [[False, False], [True, False]]
    assert rows.float().isnan().view(2, 2, 128).all(-1).tolist() == scales.isnan().tolist()
    assert not rows.float()[:, 128:].isnan().any()


def test_zeros_have_a_scale_that_is_not_zero():
    rows, scales = quantize_rows(torch.zeros(2, 128))

    assert not rows.float().any()
    assert (scales > 0).all()


@pytest.mark.parametrize("shape", [(0, 128), (2, 3, 256), (256,)])
def test_leading_dimensions_stay(shape):
    rows, scales = quantize_rows(torch.ones(shape), group_size=128)

    assert rows.shape == shape
    assert scales.shape == (*shape[:-1], shape[-1] // 128)


@pytest.mark.parametrize("how", [{}, {"group_size": 128}, {"scale": torch.tensor(0.01)}], ids=["rows", "groups", "one"])
def test_the_rows_of_a_norm_have_the_same_bits(how):
    x, residual, weight = values(), torch.zeros(ROWS, COLUMNS), torch.ones(COLUMNS)
    given = {name: [one] if name == "scale" else one for name, one in how.items()}
    exact, _ = graphar.reference.allreduce_residual_rmsnorm([x], residual, weight)

    normed, _, *scales = graphar.allreduce_residual_rmsnorm([x], [residual], [weight], out_dtype=FP8, **given)
    rows, mine = quantize_rows(exact, **how)

    assert torch.equal(rows.view(torch.uint8), normed[0].view(torch.uint8))
    assert not scales or same_bits(mine, scales[0][0]) == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_call_has_the_bits_of_an_eager_one(backend):
    torch._dynamo.reset()
    x = values(torch.bfloat16)

    found = torch.compile(quantize_rows, fullgraph=True, backend=backend)(x, group_size=128)

    for mine, expected in zip(found, quantize_rows(x, group_size=128), strict=True):
        assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"group_size": 64}, "group_size must be None or 128"),
        ({"group_size": 128}, "divide the columns of x, 100"),
        ({"group_size": 128, "scale": torch.ones(())}, "takes scale or group_size, not both"),
    ],
)
def test_other_groups_are_refused(how, why):
    with pytest.raises(ValueError, match=f"^quantize_rows: .*{why}"):
        quantize_rows(torch.ones(2, 100), **how)
