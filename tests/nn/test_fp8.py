"""Layers of graphar.nn with weights in FP8: checkpoints, quantised inputs, and parts against the whole layer."""

import copy

import pytest
import torch

import graphar
from graphar import nn
from tests.cases import same_bits
from tests.processes import on_ranks, run_ranks

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
TOKENS, HIDDEN, INNER = 6, 256, 512
FORMATS = ("tensor", "rows", "blocks")
GROUPS = {"tensor": None, "rows": None, "blocks": 128}


def linear(rows=INNER, columns=HIDDEN, bias=True, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(columns, rows, bias=bias, dtype=BF16)


def batch(columns=HIDDEN, dtype=BF16):
    return torch.randn(TOKENS, columns, generator=torch.Generator().manual_seed(1)).to(dtype)


def weight_scale(layer):
    return layer.weight_scale if hasattr(layer, "weight_scale") else layer.weight_scale_inv


def real_weight(layer):
    """What a weight in FP8 stands for, in fp32."""
    scale = weight_scale(layer)
    if scale.numel() > 1 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(layer.weight), : layer.weight.shape[1]]
    return layer.weight.float() * scale


def product(layer, rows, scales):
    """The output of a whole layer, by the specification of products."""
    return graphar.reference.scaled_linear(rows, layer.weight, scales, weight_scale(layer), layer.bias)


@pytest.mark.parametrize(("scales", "shape"), [("tensor", (1, 1)), ("rows", (200, 1)), ("blocks", (2, 2))])
def test_a_weight_is_quantised_to_near_values_with_as_many_scales_as_asked(scales, shape):
    whole = linear(200)

    layer = nn.Fp8Linear(whole, scales)

    assert (layer.weight.dtype, weight_scale(layer).dtype, weight_scale(layer).shape) == (FP8, torch.float32, shape)
    largest = whole.weight.float().abs().amax()
    torch.testing.assert_close(real_weight(layer), whole.weight.float(), rtol=1 / 16, atol=largest.item() / 448 / 512)
    assert layer.weight.abs().float().amax() == 448


@pytest.mark.parametrize("scales", FORMATS)
def test_a_layer_multiplies_its_quantised_input_in_the_order_of_the_specification(scales):
    layer, x = nn.Fp8Linear(linear(), scales), batch()
    rows, of_rows = nn.quantize_rows(x, group_size=GROUPS[scales])

    with torch.no_grad():
        found, of_pair = layer(x), layer((rows, of_rows))

    assert same_bits(found, product(layer, rows, of_rows)) == 0
    assert same_bits(of_pair, found) == 0
    exact = torch.nn.functional.linear(x.float(), real_weight(layer), layer.bias.float())
    assert (found - exact).norm() < 0.04 * exact.norm()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_outputs_have_the_dtype_of_the_input_or_that_which_was_asked_for(dtype):
    with torch.no_grad():
        found = nn.Fp8Linear(linear())(batch(dtype=dtype))
        asked = nn.Fp8Linear(linear(), out_dtype=torch.float16)(batch(dtype=dtype))

    assert found.dtype == (BF16 if dtype == torch.float32 else dtype)
    assert asked.dtype == torch.float16


@pytest.mark.parametrize("scales", FORMATS)
def test_rows_of_a_batch_have_the_bits_of_the_whole_batch(scales):
    layer, x = nn.Fp8Linear(linear(), scales), batch()

    with torch.no_grad():
        whole, alone, of_one, in_three = layer(x), layer(x[2:3]), layer(x[2]), layer(x.view(2, 3, HIDDEN))

    assert same_bits(alone, whole[2:3]) == same_bits(of_one, whole[2]) == 0
    assert same_bits(in_three.view(TOKENS, INNER), whole) == 0


def test_a_layer_with_an_input_scale_quantises_every_input_by_it():
    whole = nn.Fp8Linear(linear(), "tensor")
    whole.input_scale = torch.nn.Parameter(torch.tensor([0.02]), requires_grad=False)
    layer, x = nn.Fp8Linear(whole), batch()

    with torch.no_grad():
        found = layer(x)

    rows, scale = nn.quantize_rows(x, scale=whole.input_scale)
    assert same_bits(found, product(layer, rows, scale)) == 0
    assert sorted(layer.state_dict()) == ["bias", "input_scale", "weight", "weight_scale"]


@pytest.mark.parametrize("kind", ["rows", "columns", "whole"])
@pytest.mark.parametrize("scales", FORMATS)
def test_a_copy_of_a_layer_has_a_weight_and_scales_of_its_own(group_of, scales, kind):
    group_of(2)
    whole = nn.Fp8Linear(linear(), scales)
    layer = {"rows": nn.RowParallelLinear, "columns": nn.ColumnParallelLinear, "whole": nn.Fp8Linear}[kind](whole)

    copied = copy.deepcopy(torch.nn.Sequential(layer))[0]

    for mine, other in zip(copied.parameters(), layer.parameters(), strict=True):
        assert torch.equal(mine.float(), other.float())
        assert mine.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("kind", [nn.Fp8Linear, nn.RowParallelLinear])
def test_a_cast_of_a_model_leaves_weights_in_fp8_and_their_scales_as_they_are(group_of, kind):
    group_of(1)
    layer = kind(nn.Fp8Linear(linear()))

    torch.nn.Sequential(layer).half()

    assert (layer.weight.dtype, layer.weight_scale.dtype, layer.bias.dtype) == (FP8, torch.float32, torch.float16)


@pytest.mark.parametrize("name", ["x", "bias"])
@pytest.mark.parametrize("layer", ["Fp8Linear", "RowParallelLinear", "ColumnParallelLinear"])
def test_gradients_are_refused(group_of, layer, name):
    group_of(1)
    made, x = getattr(nn, layer)(nn.Fp8Linear(linear(bias=name == "bias"))), batch().requires_grad_(name == "x")

    with pytest.raises(ValueError, match=rf"no gradients, but {name} requires one; use torch.no"):
        made(x)


def of_transformers(scales):
    """A layer as transformers makes it for a checkpoint in FP8."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    made = nn.Fp8Linear(linear(), scales)
    layer = finegrained.FP8Linear(HIDDEN, INNER, (128, 128) if scales == "blocks" else None, has_bias=True)
    state = {"weight": made.weight, "bias": made.bias, "weight_scale_inv": weight_scale(made)}
    if scales == "tensor":
        state["weight_scale_inv"] = state["weight_scale_inv"].reshape(())
    layer.load_state_dict(state)
    return layer, made


@pytest.mark.parametrize("scales", ["tensor", "blocks"])
def test_a_layer_of_transformers_is_taken_as_it_is(scales):
    theirs, made = of_transformers(scales)

    layer = nn.Fp8Linear(theirs)

    assert sorted(layer.state_dict()) == ["bias", "weight", "weight_scale_inv"]
    with torch.no_grad():
        assert same_bits(layer(batch()), made(batch())) == 0


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(INNER,), (INNER, 1)])
def test_scales_of_a_checkpoint_may_be_a_vector_and_of_16_bits(shape, kind):
    layer, other = nn.Fp8Linear(linear(seed=1)), nn.Fp8Linear(linear(seed=2))
    state = other.state_dict() | {"weight_scale": other.weight_scale.reshape(shape).to(kind)}

    layer.load_state_dict(state)

    assert torch.equal(layer.weight.float(), other.weight.float())
    assert torch.equal(layer.weight_scale, other.weight_scale.to(kind).float())


@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_without_memory_takes_a_checkpoint(assign):
    state = nn.Fp8Linear(linear(), "blocks").state_dict()
    with torch.device("meta"):
        layer = nn.Fp8Linear(torch.nn.Linear(HIDDEN, INNER, dtype=BF16), "blocks")

    layer = layer if assign else layer.to_empty(device="cpu")
    layer.load_state_dict(state, assign=assign)

    assert all(torch.equal(mine.float(), state[name].float()) for name, mine in layer.state_dict().items())


def test_a_checkpoint_of_16_bits_is_refused_by_a_layer_in_fp8():
    layer = nn.Fp8Linear(linear())

    with pytest.raises(RuntimeError, match=r"weight must be .*e4m3fn, as the layer's, got torch"):
        layer.load_state_dict(layer.state_dict() | {"weight": linear().weight})


def without_scales():
    whole = nn.Fp8Linear(linear())
    del whole.weight_scale
    return whole


def with_parameter(name, value, *how):
    whole = nn.Fp8Linear(linear(), *how)
    setattr(whole, name, torch.nn.Parameter(value, requires_grad=False))
    return whole


REFUSED = {  # by what is said: a layer, or what the whole layer is made with
    r"a weight in torch.float8_e4m3fn needs weight_scale or weight_scale_inv$": without_scales,
    r"weight_scale of a weight \[512, 256\] must be one number, or \[512, 1\] of rows, or \[4, 2\] of blocks of "
    r"128 x 128, got \[3, 5\]$": lambda: with_parameter("weight_scale", torch.ones(3, 5)),
    r".*need scales of groups of inputs, got activation_scale$": lambda: with_parameter(
        "activation_scale", torch.ones(()), "blocks"
    ),
}
NOT_QUANTISED = {
    r"scales of blocks need a multiple of 128 input features, got 200$": (200, "blocks"),
    r"scales must be one of tensor, rows, blocks, got 'columns'$": (HIDDEN, "columns"),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("layer", ["Fp8Linear", "RowParallelLinear", "ColumnParallelLinear"])
def test_a_weight_whose_scales_do_not_fit_is_refused(group_of, layer, why):
    group_of(2)
    whole = REFUSED[why]()

    with pytest.raises(ValueError, match=f"^graphar.nn.{layer}: {why}"):
        getattr(nn, layer)(whole)


@pytest.mark.parametrize("why", NOT_QUANTISED)
def test_a_weight_that_cannot_be_quantised_so_is_refused(why):
    columns, scales = NOT_QUANTISED[why]

    with pytest.raises(ValueError, match=f"Fp8Linear: {why}"):
        nn.Fp8Linear(linear(columns=columns), scales)


@pytest.mark.parametrize(("layer", "size"), [("RowParallelLinear", (INNER, 384)), ("ColumnParallelLinear", (384, 256))])
def test_what_ranks_cannot_do_with_products_in_fp8_is_refused(group_of, layer, size):
    group_of(2)
    parallel = getattr(nn, layer)

    with pytest.raises(ValueError, match=f"{layer}: 2 ranks cannot divide 384 features into parts of whole blocks of"):
        parallel(nn.Fp8Linear(linear(*size), "blocks"))
    with pytest.raises(ValueError, match=r"have no tensor-parallel invariant order$"):
        parallel(nn.Fp8Linear(linear()), tp_invariant=True)
    with pytest.raises(ValueError, match=r"out_dtype is for weights in torch.float8_e4m3fn$"):
        parallel(linear(), out_dtype=BF16)


class MLP(torch.nn.Module):
    def __init__(self, scales):
        super().__init__()
        self.up, self.down = nn.Fp8Linear(linear(), scales), nn.Fp8Linear(linear(HIDDEN, INNER, seed=1), scales)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def layered(model, **of_rows):
    model.up, model.down = nn.ColumnParallelLinear(model.up), nn.RowParallelLinear(model.down, **of_rows)
    return model


def expected_sum(whole, hidden, world_size):
    """The output of a row-parallel layer by the specification, from the whole layer and its whole input."""
    size = GROUPS[whole.scales]
    parts = [nn.quantize_rows(one, group_size=size) for one in hidden.chunk(world_size, 1)]
    weights, scale = whole.down.weight.view(torch.uint8).chunk(world_size, 1), weight_scale(whole.down)
    scales = scale.chunk(world_size, 1) if whole.scales == "blocks" else [scale] * world_size
    return graphar.reference.fused_matmul_allreduce(
        [rows for rows, _ in parts],
        [one.view(FP8) for one in weights],
        bias=whole.down.bias,
        a_scale=[one for _, one in parts],
        w_scale=scales,
    )


@on_ranks(2, timeout_s=180)
def test_layers_of_divided_tokens_have_the_bits_of_those_of_all_tokens(rank, world_size):
    found = []
    for scales in FORMATS:
        for dim in (0, 1):
            x = torch.randn(4, 8, HIDDEN, generator=torch.Generator().manual_seed(3)).to(BF16)
            parted = MLP(scales)
            parted.up = nn.ColumnParallelLinear(parted.up, sequence_dim=dim)
            parted.down = nn.RowParallelLinear(parted.down, sequence_dim=dim)
            own = nn.quantize_rows(x.chunk(world_size, dim)[rank].contiguous(), group_size=GROUPS[scales])
            torch._dynamo.reset()
            compiled = torch.compile(parted, fullgraph=True, backend="aot_eager")
            with torch.no_grad():
                outputs = [parted(own), compiled(own), layered(MLP(scales))(x).chunk(world_size, dim)[rank]]
            found.append(outputs)
    for *mine, expected in found:
        assert [same_bits(one, expected) for one in mine] == [0, 0]


def run_layers(rank, world_size):
    """For each format this rank's hidden features and those of the whole layer, and outputs and the expected one."""
    found = {}
    for scales in FORMATS:
        whole = MLP(scales)
        whole.scales = scales
        parted, x = layered(MLP(scales)), batch()
        loaded = layered(MLP(scales))
        loaded.load_state_dict(MLP(scales).state_dict())
        torch._dynamo.reset()
        compiled = torch.compile(parted, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            hidden = whole.up(x)
            mine, own = parted.up(x), hidden.chunk(world_size, 1)[rank]
            outputs = [parted(x), loaded(x), compiled(x), layered(MLP(scales), constant_weight=True)(x)]
            expected = expected_sum(whole, torch.relu(hidden), world_size)
        found[scales] = (mine, own), outputs, expected
    return found


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    return run_ranks(run_layers, request.param, timeout_s=180)


@pytest.mark.parametrize("scales", FORMATS)
def test_a_column_parallel_layer_has_the_bits_of_its_features_of_the_whole_layer(ranks, scales):
    for (mine, whole), *_ in (found[scales] for found in ranks):
        assert same_bits(mine, whole) == 0


@pytest.mark.parametrize("scales", FORMATS)
def test_a_row_parallel_layer_has_the_bits_of_the_specification(ranks, scales):
    for _, outputs, expected in (found[scales] for found in ranks):
        assert [same_bits(output, expected) for output in outputs] == [0] * len(outputs)
