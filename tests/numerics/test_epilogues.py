"""The language of epilogues: parsing, printing, refusals, and tracing of functions into expressions."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from graphar.numerics.epilogues.code import generate
from graphar.numerics.epilogues.epilogue import Epilogue, bind
from graphar.numerics.epilogues.syntax import MAX_NODES, Apply, Name, expression, number, parse, written
from graphar.numerics.epilogues.tracer import trace
from graphar.plan.algorithms import Algorithm, with_kernels
from graphar.runtime.arguments import EpilogueArguments
from graphar.runtime.catalogue import SUMMED_TILE_KERNELS, kernel_source
from perf.kernels import catalogue

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("v", "v"),
        ("-v", "(-v)"),
        ("v * scale + bias[col]", "((v * scale) + bias[col])"),
        ("v - 1 - 2", "((v - 1.0) - 2.0)"),
        ("a + b * c / d", "(a + ((b * c) / d))"),
        ("!v == 1 && v<2 || 3 >= v", "((((!v) == 1.0) && (v < 2.0)) || (3.0 >= v))"),
        ("v > 0 ? v : w > 0 ? 1 : 2", "((v > 0.0) ? v : ((w > 0.0) ? 1.0 : 2.0))"),
        (" clamp( v,-inf , .5e1f)", "clamp(v, (-inf), 5.0)"),
        ("t[row] + t[col] + t[index] + u[0]", "(((t[row] + t[col]) + t[index]) + u[0])"),
        ("--+v", "(-(-v))"),
        ("where(v > 0, mish(v), elu(v))", "((v > 0.0) ? mish(v) : elu(v))"),
        ("softplus(hardswish(v))", "softplus(hardswish(v))"),
    ],
)
def test_what_is_read_is_printed_with_all_its_parentheses(text, printed):
    assert str(parse(text)) == printed
    assert parse(str(parse(text))).tree == parse(text).tree


@pytest.mark.promise("An epilogue has the bits of its specification; only expressions reach the compiler.")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unexpected end at character 0"),
        ("v +", "unexpected end at character 3"),
        ("v v", "unexpected 'v' at character 2"),
        ("v % 2", "unexpected '%' at character 2"),
        ("v ** 2", r"there is no operator \*\* at character 3 of 'v \*\* 2'; write pow\(a, b\)"),
        ("v; system(0)", "unexpected ';' at character 1"),
        ("v /* hidden */", r"unexpected '\*' at character 3"),
        ('v + "text"', "unexpected '\"' at character 4"),
        ("v\\\n#include <x>", "unexpected"),
        ("v = 2", "unexpected '=' at character 2"),
        ("v.x", "unexpected '.' at character 1"),
        ("1.2.3", "unexpected '1' at character 0"),
        ("0x10", "unexpected '0' at character 0"),
        ("asm(v)", "there is no function 'asm'"),
        ("printf", None),  # a scalar, whose name no compiler sees
        ("exp", r"exp is a function at character 3 of 'exp'; write exp\(v\)"),
        ("max", "max is a function at character 3 of 'max'$"),
        ("exp(v, v)", r"exp takes 1 argument\(s\), got 2"),
        ("v[col]", "'v' is no tensor"),
        ("t[col + 1]", "unexpected '\\+'"),
        ("t[1]", r"read at \[row\], \[col\], \[index\] or \[0\], not at \[1\]"),
        ("t[col] + t", "'t' stands with brackets, as a tensor, and without, as a scalar"),
        ("a + b + c + d + e", "takes at most 4 scalars, got a, b, c, d, e"),
        ("(" * 500 + "v" + ")" * 500, "nested too deeply"),
        ("-" * 5000 + "v", "nested too deeply"),
        (" + ".join("v" * MAX_NODES), f"at most {MAX_NODES} operations"),
    ],
)
def test_nothing_but_an_expression_is_one(text, message):
    if message is None:
        assert parse(text).scalars == (text,)
        return
    with pytest.raises(ValueError, match=f"^epilogue: .*{message}"):
        parse(text)


@pytest.mark.parametrize("operation", ["neg", "relu", "+", "?:"])
def test_what_is_written_can_be_read_and_nothing_deeper_is_written(operation):
    tree, written_levels, v = Name("v"), 0, Name("v")
    for _ in range(2 * MAX_NODES):
        tree = Apply(operation, {"+": (tree, v), "?:": (v, v, tree)}.get(operation, (tree,)))
        try:
            text = written(tree)
        except ValueError:
            break
        written_levels += 1
        assert parse(text).tree == tree

    assert written_levels == (29 if operation == "?:" else 59)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse(str(tree))


@pytest.mark.promise("An epilogue has the bits of its specification; only expressions reach the compiler.")
def test_no_name_of_a_caller_reaches_the_compiler():
    text = generate("v * evil_scalar + evil_tensor[col]", (BF16,)).text

    assert "evil" not in text
    assert "__fadd_rn(__fmul_rn(v, e.scalar[0]), operand[0])" in text


def test_a_number_is_printed_as_the_fp32_that_it_is():
    assert "return 0x1.99999a0000000p-4f;" in generate("0.1", ()).text
    assert "return __uint_as_float(0x7f800000u);" in generate("1e39", ()).text
    assert "return __uint_as_float(0x7fffffffu);" in generate("nan", ()).text
    assert str(expression(number(-0.0))) == "(-0.0)"


def test_kernels_of_different_expressions_have_different_names_and_the_same_one_has_the_same():
    sources = [
        kernel_source(Algorithm.ONE_SHOT_PUSH, BF16, 2, generated=generate(text, dtypes))
        for text, dtypes in [("-v", ()), ("v + t[0]", (BF16,)), ("v + t[0]", (FP32,)), ("v+t[0]", (BF16,))]
    ]

    assert sources[1] == sources[3]
    assert len({source.name for source in sources}) == 3
    assert len({source.generated for source in sources}) == 3


def test_the_catalogue_has_every_kernel_with_an_epilogue():
    found = {Path(source.file).stem for source in catalogue() if source.generated}

    allreduces = [one for one in with_kernels("allreduce") if one.row.takes_epilogue]
    assert found == {*allreduces, *SUMMED_TILE_KERNELS, "allgather_matmul", "reducescatter_push"}


def traced(function, ndim=2, **kinds):
    """Traces a function of tensors, given by name as (kind, dtype), and of numbers, which have no kind."""
    tensors = tuple(sorted(name for name, kind in kinds.items() if kind))
    scalars = tuple(sorted(name for name, kind in kinds.items() if not kind))
    return trace(function, ndim, tensors, tuple(kinds[name] for name in tensors), scalars)


ROW, COL, LIKE, ONE = ("x1", FP32), ("x", FP32), ("xx", FP32), ("", FP32)


@pytest.mark.parametrize(
    ("function", "kinds", "text"),
    [
        (lambda v: -v, {}, "(-v)"),
        (lambda v, bias: torch.relu(v + bias), {"bias": COL}, "relu((v + bias[col]))"),
        (lambda v, s: v * s, {"s": ROW}, "(v * s[row])"),
        (lambda v, s: v * s, {"s": None}, "(v * s)"),
        (lambda v, r: v + r, {"r": LIKE}, "(v + r[index])"),
        (lambda v, d: v * d, {"d": ONE}, "(v * d[0])"),
        (lambda v, b: v + b[None].expand_as(v), {"b": COL}, "(v + b[col])"),
        (lambda v, b: v + b.view(1, -1), {"b": COL}, "(v + b[col])"),
        (lambda v, b: v + b * b, {"b": ("x", BF16)}, "(v + bf16((b[col] * b[col])))"),
        (lambda v: v.bfloat16().float() + 1, {}, "(bf16(v) + 1.0)"),
        (lambda v: functional.gelu(v) + functional.gelu(v, approximate="tanh"), {}, "(gelu(v) + gelu_tanh(v))"),
        (lambda v: functional.silu(v) * torch.sigmoid(v) * v.tanh() * v.exp(), {}, None),
        (lambda v: v.clamp(-1, 2).clamp(min=0).clamp(max=1), {}, "min(max(min(max(v, (-1.0)), 2.0), 0.0), 1.0)"),
        (lambda v, r: torch.where(v > 0, v, r), {"r": LIKE}, "((v > 0.0) ? v : r[index])"),
        (lambda v: v.masked_fill(~(v < 1) & v.isnan(), 2), {}, "(((!(v < 1.0)) && isnan(v)) ? 2.0 : v)"),
        (lambda v: 1 - v / 3 + torch.sub(v, v, alpha=2), {}, "((1.0 - (v / 3.0)) + (v - (v * 2.0)))"),
        (lambda v: v.bool() * 2.0, {}, "((v != 0.0) * 2.0)"),
        (lambda v: torch.where(v.bool() == (v > 0), v, 1.0), {}, "(((v != 0.0) == (v > 0.0)) ? v : 1.0)"),
        (lambda v: ((v > 0) + (v > 1)) * v, {}, "((((v > 0.0) + (v > 1.0)) != 0.0) * v)"),
        (lambda v: v**2 + v**0.5 + v**3, {}, "(((v * v) + sqrt(v)) + pow(v, 3.0))"),
        (functional.relu6, {}, "min(max(v, 0.0), 6.0)"),
        (lambda v: functional.leaky_relu(v, 0.25), {}, "((v > 0.0) ? v : (v * 0.25))"),
        (functional.leaky_relu, {}, "((v > 0.0) ? v : (v * 0.009999999776482582))"),
        (lambda v: v.view(v.shape) + 1, {}, "(v + 1.0)"),
        (lambda v: torch.where(v > 0, v, 0.0) + torch.where(v > 1, 2.0, v), {}, None),
        (lambda v: functional.mish(v) + functional.hardswish(v), {}, "(mish(v) + hardswish(v))"),
        (functional.hardsigmoid, {}, "(clamp((v + 3.0), 0.0, 6.0) / 6.0)"),
        (functional.softplus, {}, "softplus(v)"),
        (lambda v: functional.softplus(v, 2, 5), {}, "(((v * 2.0) > 5.0) ? v : (softplus((v * 2.0)) / 2.0))"),
        (functional.elu, {}, "elu(v)"),
        (lambda v: functional.elu(v, 0.5), {}, "((v > 0.0) ? v : (elu(v) * 0.5))"),
        (functional.selu, {}, None),
        (functional.celu, {}, "elu(v)"),
        (lambda v: functional.celu(v, 0.5), {}, "((v > 0.0) ? v : (elu((v * (1.0 / 0.5))) * 0.5))"),
    ],
)
def test_a_function_becomes_an_expression(function, kinds, text):
    found = traced(function, **kinds)

    assert text in (None, found)
    if not kinds:
        v = torch.linspace(-30, 30, 7 * 11).view(7, 11)
        form, inputs = bind("op", found, v, [], [])
        value = form.apply(v.reshape(-1), inputs, 0, v.numel()).view(7, 11)
        assert torch.allclose(value, function(v), rtol=1e-5, atol=1e-6, equal_nan=True)
    parse(found)


def test_rows_and_columns_are_those_of_the_last_dimension():
    assert traced(lambda v, a, b: v * a + b, 3, a=("xx1", FP32), b=("11x", FP32)) == "((v * a[row]) + b[col])"


def test_functions_are_traced_for_sums_of_up_to_eight_dimensions():
    assert traced(torch.neg, 8) == "(-v)"
    with pytest.raises(ValueError, match="traced for tensors of at most 8 dimensions"):
        traced(torch.neg, 9)


CAPTURED, ROW_CAPTURED, ON_META = torch.ones(()), torch.ones(1, 1), torch.ones((), device="meta")
FUSED = "cannot be fused: arithmetic, comparisons, casts and these functions can: abs, "


@pytest.mark.parametrize(
    ("function", "kinds", "message"),
    [
        (lambda v: v.softmax(-1), {}, f"torch.Tensor.softmax {FUSED}"),
        (lambda v: torch.relu(functional.softmax(v, -1)), {}, f"torch.nn.functional.softmax {FUSED}"),
        (lambda v: v - v.mean(-1, keepdim=True), {}, f"torch.Tensor.mean {FUSED}"),
        (lambda v: v.t().contiguous(), {}, f"torch.Tensor.t {FUSED}"),
        (lambda v: v.view(-1), {}, "Tensor.view cannot be fused: it gives the sum, or what was computed, another"),
        (lambda v: v.max(-1, keepdim=True).values, {}, f"torch.Tensor.max {FUSED}"),
        (lambda v: v.double(), {}, "torch.Tensor.double cannot be fused: it gives torch.float64"),
        (lambda v: v.int(), {}, "torch.Tensor.int cannot be fused: it gives torch.int32"),
        (lambda v: torch.div(v, 2, rounding_mode="floor"), {}, "torch.div cannot be fused: not with these"),
        (lambda v: v * v.shape[-1], {}, "depends on sizes; pass what it needs as a number"),
        (lambda v: v * CAPTURED, {}, "holds a tensor of its own, of shape []; pass it as an argument"),
        (lambda v: v * CAPTURED.view(1, 1), {}, "holds a tensor of its own, of shape []; pass it as an argument"),
        (lambda v: v + ROW_CAPTURED, {}, "its own, of shape [1, 1]; pass it as an argument: Epilogue(function, name="),
        (lambda v: v + ON_META, {}, "holds a tensor of its own, of shape []; pass it as an argument"),
        (lambda v: v if v.sum() > 0 else -v, {}, "cannot be traced, with [7, 11] in place of the sum's sizes"),
        (lambda v: (v, v), {}, "must return one tensor"),
        (lambda v: 3.0, {}, "must return one tensor"),
        (lambda v, b: b, {"b": COL}, "must have the shape of the sum"),
        (lambda v, b: v + b, {"b": ("x11", FP32)}, "broadcasts over neither the rows nor the columns"),
    ],
)
def test_what_cannot_be_fused_says_which_operation_and_why(function, kinds, message):
    ndim = 3 if any(kind and len(kind[0]) == 3 for kind in kinds.values()) else 2
    with pytest.raises(ValueError, match=f"^epilogue: .*{re.escape(message)}"):
        traced(function, ndim, **kinds)


@pytest.mark.parametrize(("whole", "text"), [(None, "(v + b[0])"), (0, "(v + b[0])")])
def test_a_tensor_of_one_element_broadcasts_but_not_over_the_dimension_that_is_cut(whole, text):
    epilogue, x = Epilogue(lambda v, b: v + b, b=torch.ones(1)), torch.ones(3, 4)

    assert epilogue.text(x, whole) == text
    with pytest.raises(ValueError, match=r"a tensor of shape \[1\] does not broadcast over \[3, 4\]"):
        epilogue.text(x, whole=1)


def test_what_an_expression_lacks_says_how_to_write_it():
    x = torch.ones(2, 3)

    with pytest.raises(ValueError, match=r"'v \+ a': 'a' is a tensor; write a\[col\] for an element a column"):
        Epilogue("v + a", a=torch.ones(3)).text(x)
    with pytest.raises(ValueError, match=r"'v \+ a\[col\]': 'a' is a number; write a$"):
        Epilogue("v + a[col]", a=2.0).text(x)
    with pytest.raises(
        ValueError, match=r"needs the number 'x', got numbers none; pass Epilogue\(\.\.\., x=\.\.\.\); the sum is v$"
    ):
        Epilogue("x * 2").text(x)


@pytest.mark.parametrize(("corner", "places"), [(None, (0, 0, 7)), ((3, 4, 9), (3, 4, 9))])
def test_a_kernel_is_given_operands_in_their_order_and_where_its_sums_lie(corner, places):
    tensors, arguments = [torch.ones(1), torch.ones(2)], EpilogueArguments(columns=7)

    x = torch.ones(7)
    arguments.put((x, *tensors), (x,), (0.5, 2.0), corner)

    assert list(arguments.tensor)[:2] == [one.data_ptr() for one in tensors]
    assert list(arguments.scalar)[:2] == [0.5, 2.0]
    assert (arguments.first_row, arguments.first_col, arguments.pitch) == places


@pytest.mark.parametrize(("tensors", "scalars"), [([], [1.0]), ([torch.ones(1)], []), ([torch.ones(1)] * 2, [1.0])])
def test_an_expression_is_bound_to_as_many_arguments_as_it_has(tensors, scalars):
    with pytest.raises(ValueError, match=r"op: 'v \* s \+ d\[0\]' takes tensors \('d',\) and numbers \('s',\)"):
        bind("op", "v * s + d[0]", torch.ones(3), tensors, scalars)


def test_an_expression_is_bound_to_tensors_of_the_sums_device():
    with pytest.raises(ValueError, match="op: b must be on the device of x, cpu, got meta"):
        bind("op", "v + b[0]", torch.ones(3), [torch.ones(1, device="meta")], [])
