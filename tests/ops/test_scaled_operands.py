"""Operands in e4m3 with scales: what the table of conformance does not ask of them, and `graphar.linear`."""

import itertools
from functools import partial

import pytest
import torch

import graphar
from graphar import reference
from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.ops import preparation
from graphar.plan.algorithms import Algorithm
from graphar.plan.matmuls import tiles_that_serve
from graphar.plan.work import Product
from tests.cases import normal, same_bits
from tests.ops import specified as by
from tests.ops.conformance import Form, parameters, scaled
from tests.ops.specified import FP8
from tests.plan.test_tiles import Ranks

BF16 = torch.bfloat16
M, N, K = SHAPE = (24, 136, 200)
FORMATS = ("rows", "numbers", "blocks")
SUM, SCATTER, GATHER = (
    *(graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter),
    graphar.fused_allgather_matmul,
)
NORM, SCATTERED_NORM = (
    graphar.fused_matmul_allreduce_residual_rmsnorm,
    graphar.fused_matmul_reducescatter_residual_rmsnorm,
)
ARGUMENTS = ("a", "w", "a_scale", "w_scale")
# By op: what ranks give it, and what they get.
OPS = {
    SUM: (partial(by.with_unequal_columns, by.with_bias), by.fused_allreduced),
    SCATTER: (partial(by.with_unequal_columns, by.with_bias), by.fused_reducescattered),
    GATHER: (by.uneven_products, by.fused_allgathered),
    NORM: (partial(by.with_norm, by.products), by.fused_normed),
    SCATTERED_NORM: (partial(by.with_norm_of_parts, by.products), by.fused_scattered_and_normed),
}
of_ops = partial(pytest.mark.parametrize, "op", ids=lambda op: op.__name__)
every_format = pytest.mark.parametrize("of", FORMATS)


def form_of(op, of, epilogue=None, dtype=BF16, **options) -> Form:
    make, specify = OPS[op]
    how = scaled(of, make, dtype, **options)
    if "residual" in parameters(op):
        how["options"].pop("out_dtype", None)  # the residual has it
    return Form(op, of, specify=specify, fill=normal, epilogue=epilogue, **how)


def operands(of, shape=SHAPE):
    """The arguments of two ranks' call of the sum by name: a, w, and their scales."""
    return by.scaled(of, by.products, 2, shape, BF16, normal)


def own(tensors, rank=0):
    return {name: xs[rank] for name, xs in tensors.items()}


@of_ops([SUM, SCATTER])
@every_format
def test_the_specification_rounds_each_scaled_product_and_adds_them_in_the_order_of_ranks(op, of):
    tensors = by.scaled(of, OPS[op][0], 3, SHAPE, BF16, normal)
    del tensors["bias"]
    total = reference.allreduce(
        [reference.scaled_linear(*one) for one in zip(*map(tensors.get, ARGUMENTS), strict=True)]
    )
    (found,) = form_of(op, of).expected(tensors)[1]

    assert same_bits(found, total if op is SUM else total.tensor_split(3)[1]) == 0


@of_ops([NORM, SCATTERED_NORM])
def test_the_specification_norms_the_sum_of_scaled_products(op):
    form = form_of(op, "rows")
    tensors = form.tensors(2, SHAPE)
    total = reference.fused_matmul_allreduce(**{name: tensors[name] for name in ARGUMENTS})
    sums = [total] * 2 if op is NORM else total.tensor_split(2)

    for x, of_rank, found in zip(sums, map(partial(own, tensors), range(2)), form.expected(tensors), strict=True):
        wanted = reference.allreduce_residual_rmsnorm([x], of_rank["residual"], of_rank["weight"])
        assert [same_bits(*pair) for pair in zip(found, wanted, strict=True)] == [0, 0]


@every_format
def test_gathered_rows_have_their_own_scales_and_may_be_multiplied_again(of):
    tensors = by.scaled(of, by.uneven_products, 2, SHAPE, BF16, normal)
    del tensors["bias"]
    pairs = zip(tensors["a"], tensors["a_scale"], strict=True)
    w, of_w = tensors["w"][1], tensors["w_scale"][1]
    expected = torch.cat([reference.scaled_linear(a, w, of_a, of_w) for a, of_a in pairs])

    products, rows, of_rows = GATHER(**tensors, gathered=True)

    assert same_bits(products[1], expected) == 0
    assert same_bits(graphar.linear(rows[1], w, a_scale=of_rows[1], w_scale=of_w), expected) == 0


@every_format
def test_the_product_of_a_repeated_launch_has_the_specifications_bits(of):
    for rank in range(2):
        a, w, *scales = map(own(operands(of, (2, M // 2, N, K)), rank).get, ARGUMENTS)
        made = graphar.linear(a, w, a_scale=scales[0], w_scale=scales[1])

        rows = scales[0].flatten(0, -2) if scales[0].ndim else scales[0]
        assert same_bits(made.flatten(0, 1), reference.scaled_linear(a.flatten(0, 1), w, rows, scales[1])) == 0


def test_explain_says_that_products_are_multiplied_and_then_summed():
    assert "multiplied, then summed" in str(graphar.explain(SUM, **operands("rows")))


@every_format
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer_has_the_specifications_bits_for_any_rows_and_dimensions(of, dtype, with_bias):
    given = own(operands(of))
    bias = normal(40, N, dtype) if with_bias else None
    of_row, wide = (
        given | {"a": given["a"][3:4]},
        given | {"a": given["a"].view(2, M // 2, -1)},
    )
    if given["a_scale"].ndim:
        of_row["a_scale"], wide["a_scale"] = given["a_scale"][3:4], given["a_scale"].view(2, M // 2, -1)
    expected = reference.scaled_linear(**given, bias=bias, out_dtype=dtype)

    for tensors, wanted in ((given, expected), (of_row, expected[3:4]), (wide, expected.view(2, M // 2, N))):
        assert same_bits(graphar.linear(**tensors, bias=bias, out_dtype=dtype), wanted) == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_linear_layer_compiles(dynamic):
    given = own(operands("blocks"))
    call = torch.compile(lambda a, w, s, t: graphar.linear(a, w, a_scale=s, w_scale=t) * 2, dynamic=dynamic)

    for rows in (M, 7):
        tensors = given | {name: given[name][:rows] for name in ("a", "a_scale")}
        assert same_bits(call(*map(tensors.get, ARGUMENTS)), graphar.linear(**tensors) * 2) == 0


def test_no_rows_and_no_columns_of_k_give_zeros_or_nothing():
    given = own(operands("numbers"))

    assert graphar.linear(**given | {"a": given["a"][:0]}).shape == (0, N)
    assert not graphar.linear(**given | {name: given[name][:, :0] for name in ("a", "w")}).any()


def test_with_e4m3_the_kernels_of_both_formats_are_prepared():
    form = form_to_prepare("-v")

    ops, fp8 = [SUM.__name__, GATHER.__name__], torch.float8_e4m3fn
    every = preparation._needed_tiles(Ranks(), ops, [BF16, fp8], [], [form], tp_invariant=False)
    needed = [one for one in every if one[-1].format]
    found = {(algorithm, tile, work.format, work.epilogue) for algorithm, dtype, tile, work in needed if dtype == BF16}
    for algorithm in (Algorithm.MATMUL_ALLREDUCE, Algorithm.MATMUL_TWO_SHOT, Algorithm.ALLGATHER_MATMUL):
        forms = (None, form) if algorithm.row.takes_epilogue else (None,)
        tiles = tiles_that_serve(algorithm, Product(algorithm.op, (), 1, format="rows"), 4).tiles
        kinds = set(itertools.product([algorithm], tiles, ("rows", "blocks"), forms))
        assert {one for one in found if one[0] is algorithm} == kinds
    assert len(found) == len(needed)


BOTH = [SUM, SCATTER]
NORMS = [NORM, SCATTERED_NORM]
LINEAR = graphar.linear
E5M2 = [torch.ones(M, K).to(torch.float8_e5m2)] * 2
# The ops that refuse a call, its changes, and words of the message.
REFUSALS = (
    ([*OPS, LINEAR], {"w_scale": None}, "need both a_scale and w_scale"),
    ([*OPS, LINEAR], {"w_scale": None, "a_scale": None}, "need both a_scale and w_scale"),
    ([*OPS], {"w_scale": None, "a_scale": None}, "operands in torch.float8_e4m3fn need both"),
    ([*BOTH, LINEAR], {"w": [torch.ones(N, K, dtype=BF16)] * 2}, "w must be torch.float8_e4m3fn"),
    ([*BOTH, LINEAR], {"a": E5M2}, f"a must be {FP8}, got torch.float8_e5m2"),
    (BOTH, {"a_scale": [torch.ones(M, 1, dtype=BF16)] * 2}, "a_scale must be torch.float32"),
    ([*BOTH, *NORMS, LINEAR], {"a_scale": [torch.ones(M, 5)] * 2}, "for scales of blocks of 128"),
    (
        BOTH,
        {"a_scale": [torch.ones(M, 2), torch.ones(M, 1)], "w_scale": [torch.ones(2, 2), torch.ones(N, 1)]},
        "all ranks must be of rows, or all of blocks",
    ),
    ([*BOTH, GATHER, LINEAR], {"out_dtype": torch.float32}, "out_dtype must be bfloat16, float16 or None"),
    (BOTH, {"a_scale": None, "w_scale": None, "out_dtype": BF16}, "out_dtype goes with a_scale and w_scale"),
    (
        [LINEAR],
        {name: [torch.ones(4, 8)] * 2 for name in ("a", "w")} | {"a_scale": None, "w_scale": None, "out_dtype": BF16},
        "out_dtype goes with a_scale and w_scale",
    ),
    (
        BOTH,
        {"partition": "rows"},
        "partition must be one of auto, tiles, none, split_m, split_n, batch_invariant, got 'rows'",
    ),
    ([*BOTH, *NORMS], {"partition": "tp_invariant"}, "got 'tp_invariant'"),
    (
        [GATHER],
        {"partition": "tp_invariant"},
        "with scales partition must be one of auto, tiles, chunks, none, got 'tp_invariant'",
    ),
    (BOTH, {"of": "blocks", "partition": "split_n"}, "partition 'split_n' would cut blocks of w"),
    ([*BOTH, GATHER], {"bias": [torch.ones(N)] * 2}, "bias must be torch.bfloat16"),
    (
        [*BOTH, LINEAR],
        {"bias": [torch.ones(N, dtype=BF16, requires_grad=True)] * 2},
        "have no gradients, but bias requires one",
    ),
    ([GATHER], {"w_scale": [torch.ones(1, requires_grad=True)] * 2}, "have no gradients, but w_scale requires one"),
    (
        [GATHER],
        {"a": [torch.ones(8, K).to(FP8), torch.ones(5, 1, K).to(FP8)], "a_scale": [torch.ones(())] * 2},
        "the shapes of ranks may differ only in the rows of a and w",
    ),
    (NORMS, {"residual": torch.float32}, "with scales residual must be bfloat16 or float16, got torch.float32"),
    (NORMS, {"weight": [torch.ones(N, dtype=torch.float16)] * 2}, "weight must be [136] torch.bfloat16"),
    (
        [*BOTH, *NORMS],
        {"w": [torch.ones(N, K).to(FP8)] * 3},
        "w must be a list of 2 tensors, one for each of a, got",
    ),
    (
        NORMS,
        {"weight": [torch.ones(N, dtype=BF16, requires_grad=True)] * 2},
        "have no gradients, but weight requires one",
    ),
    ([SUM], {"out": [torch.empty(M, N).to(FP8) for _ in range(2)]}, "out must have the result's dtype"),
)


@pytest.mark.parametrize(
    ("op", "changes", "words"),
    [(op, changes, words) for ops, changes, words in REFUSALS for op in ops],
    ids=[f"{op.__name__}: {words}" for ops, _, words in REFUSALS for op in ops],
)
def test_a_call_that_breaks_a_rule_is_refused_by_name(op, changes, words):
    changes = dict(changes)
    make = OPS[op][0] if op in NORMS else by.products
    tensors = by.scaled(changes.pop("of", "rows"), make, 2, SHAPE, BF16, normal)
    if "residual" in changes:
        changes["residual"] = [x.to(changes["residual"]) for x in tensors["residual"]]
    given = tensors | changes
    if op is LINEAR:
        given = {name: one[0] if isinstance(one, list) else one for name, one in given.items()}

    with pytest.raises((TypeError, ValueError)) as caught:
        op(**given)

    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{op.__name__}: ")


def test_the_group_of_a_linear_layer_is_checked_as_without_scales():
    given = own(operands("rows"))
    plain = {name: given[name].bfloat16() for name in ("a", "w")}
    said = []
    for tensors in (given, plain):
        with graphar.Communicator(devices=["cpu"] * 3) as three, pytest.raises((TypeError, ValueError)) as caught:
            graphar.linear(**tensors, group=three)
        said.append(str(caught.value))

    assert said[0] == said[1]
