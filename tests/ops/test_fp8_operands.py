"""Matmuls of e4m3 operands with scales, summed over ranks: the specification's bits, and who serves them."""

from __future__ import annotations

import itertools

import pytest
import torch

import graphar
from graphar import CommunicatorError, reference
from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.ops import preparation
from graphar.plan.algorithms import Algorithm
from graphar.plan.matmuls import scaled_tiles
from graphar.product import scaled_sums
from tests.cases import normal, same_bits
from tests.processes import run_ranks

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
M, N = 24, 136
COLUMNS = (256, 200, 384, 130)  # of each rank: K may differ
FORMATS = ("rows", "numbers", "blocks")
OPS = ("fused_matmul_allreduce", "fused_matmul_reducescatter")
HOW = (
    {},
    {"partition": "none"},
    {"partition": "tiles"},
    {"partition": "batch_invariant"},
    {"partition": "split_m"},
    {"codec": "int8"},
    {"epilogue": "gelu(v)"},
)

every_op = pytest.mark.parametrize("op", OPS)
every_format = pytest.mark.parametrize("of", FORMATS)


def scale(seed, *shape):
    return normal(seed, torch.Size(shape).numel(), torch.float32).view(shape).abs() + 0.1


def operands(rank, of, columns=COLUMNS):
    """A rank's a, w and keywords with scales."""
    k = columns[rank]
    blocks = -(-k // 128)
    shapes = {"rows": ((M, 1), (1, N)), "numbers": ((), (1,)), "blocks": ((M, blocks), (-(-N // 128), blocks))}[of]
    a, w = (normal(seed + rank, rows * k, torch.float32).view(rows, k).to(FP8) for seed, rows in ((0, M), (10, N)))
    return a, w, {"a_scale": scale(20 + rank, *shapes[0]), "w_scale": scale(30 + rank, *shapes[1])}


def bias_like(dtype):
    return normal(40, N, dtype)


def lists(ranks, of):
    a, w, scales = zip(*[operands(rank, of) for rank in range(ranks)], strict=True)
    return list(a), list(w), {name: [one[name] for one in scales] for name in scales[0]}


def expected(op, ranks, of, **how):
    """What each rank gets."""
    a, w, scales = lists(ranks, of)
    found = getattr(reference, op)(a, w, **scales, **how)
    return found if op.endswith("scatter") else [found] * ranks


# ---- the specification ----------------------------------------------------------------------------------------------


@every_op
@every_format
def test_the_specification_rounds_each_scaled_product_and_adds_them_in_the_order_of_ranks(op, of):
    a, w, scales = lists(3, of)
    of_ranks = zip(a, w, scales["a_scale"], scales["w_scale"], strict=True)
    total = reference.allreduce([reference.scaled_linear(*one) for one in of_ranks])

    assert same_bits(expected(op, 3, of)[1], total if op.endswith("allreduce") else total.tensor_split(3)[1]) == 0


# ---- lists ----------------------------------------------------------------------------------------------------------


@every_op
@every_format
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_lists_get_the_specifications_bits(op, of, with_bias, how):
    a, w, scales = lists(2, of)
    bias = bias_like(BF16) if with_bias else None
    more = {"bias": [bias] * 2} if with_bias else {}

    found = getattr(graphar, op)(a, w, **scales, **more, **how)

    for y, z in zip(found, expected(op, 2, of, bias=bias, **how), strict=True):
        assert y.dtype == BF16
        assert same_bits(y, z) == 0


@every_op
@pytest.mark.parametrize("of", ["rows", "numbers"])
def test_panels_of_columns_change_no_bit(op, of):
    a, w, scales = lists(2, of)

    for y, z in zip(getattr(graphar, op)(a, w, **scales, partition="split_n"), expected(op, 2, of), strict=True):
        assert same_bits(y, z) == 0


@every_op
def test_the_result_may_be_fp16(op):
    a, w, scales = lists(2, "rows")
    bias = bias_like(torch.float16)

    found = getattr(graphar, op)(a, w, **scales, bias=[bias] * 2, out_dtype=torch.float16)

    wanted = expected(op, 2, "rows", bias=bias, out_dtype=torch.float16)
    assert [same_bits(y, z) for y, z in zip(found, wanted, strict=True)] == [0, 0]
    assert found[0].dtype == torch.float16


@every_format
def test_rows_may_have_several_dimensions(of):
    a, w, scales = lists(2, of)
    wide = {"a_scale": [one.view(2, M // 2, -1) if one.ndim else one for one in scales["a_scale"]]}

    found = graphar.fused_matmul_allreduce([one.view(2, M // 2, -1) for one in a], w, **(scales | wide))

    assert same_bits(found[0], expected(OPS[0], 2, of)[0].view(2, M // 2, N)) == 0


def test_out_takes_the_result_and_has_its_dtype():
    a, w, scales = lists(2, "rows")
    out = [torch.empty(M, N, dtype=BF16) for _ in range(2)]

    assert graphar.fused_matmul_allreduce(a, w, **scales, out=out)[1] is out[1]
    assert same_bits(out[1], expected(OPS[0], 2, "rows")[1]) == 0
    with pytest.raises(ValueError, match="out must have the result's dtype"):
        graphar.fused_matmul_allreduce(a, w, **scales, out=[one.to(FP8) for one in out])


@every_op
def test_debug_mode_and_a_profiler_watch_calls(op):
    a, w, scales = lists(2, "rows")
    with graphar.Communicator(devices=["cpu"] * 2, debug=True) as communicator, torch.profiler.profile():
        found = getattr(graphar, op)(a, w, **scales, group=communicator)

    assert same_bits(found[1], expected(op, 2, "rows")[1]) == 0


def test_explain_says_that_products_are_multiplied_and_then_summed():
    a, w, scales = lists(2, "rows")

    assert "multiplied, then summed" in str(graphar.explain(graphar.fused_matmul_allreduce, a, w, **scales))


@every_op
def test_slices_of_vmap_are_calls_of_their_own(op):
    a, w, scales = lists(2, "rows")
    stacked = [torch.stack([one, one.flip(0)]) for one in a]
    given = [*scales["a_scale"], *scales["w_scale"]]

    def call(first, second):
        how = {"a_scale": given[:2], "w_scale": given[2:]}
        return getattr(graphar, op)([first, second], w, **how)[0]

    found = torch.vmap(call)(*stacked)

    assert same_bits(found[0], expected(op, 2, "rows")[0]) == 0


@every_format
def test_the_product_of_a_repeated_launch_has_the_specifications_bits(of):
    for rank in range(2):
        a, w, scales = operands(rank, of)
        made = scaled_sums.product(OPS[0], a.view(2, M // 2, -1), w, *scales.values(), dtype=BF16)

        assert same_bits(made, reference.scaled_linear(a, w, **scales).view(2, M // 2, N)) == 0


# ---- processes ------------------------------------------------------------------------------------------------------


def answers(rank, world_size):
    """By op and format, this rank's results: of three equal calls, with an epilogue, with a codec, and compiled."""
    found = {}
    for op in OPS:
        call = getattr(graphar, op)
        for of in FORMATS:
            a, w, scales = operands(rank, of)
            with torch.no_grad():
                same = [call(a, w, **scales, bias=bias_like(BF16)) for _ in range(3)]
                followed = call(a, w, **scales, epilogue="gelu(v)")
                coded = call(a, w, **scales, codec="int8")
            found[op, of] = same, followed, coded
    a, w, scales = operands(rank, "blocks")
    compiled = {}
    for op in OPS:
        call = torch.compile(lambda a, w, s, t, op=op: getattr(graphar, op)(a, w, a_scale=s, w_scale=t) * 2)
        compiled[op] = call(a, w, scales["a_scale"], scales["w_scale"])
    return found, compiled


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_get_the_specifications_bits(world_size):
    for rank, (found, compiled) in enumerate(run_ranks(answers, world_size)):
        for (op, of), (same, followed, coded) in found.items():
            wanted = expected(op, world_size, of, bias=bias_like(BF16))[rank]
            assert [same_bits(one, wanted) for one in same] == [0] * 3
            assert same_bits(followed, expected(op, world_size, of, epilogue="gelu(v)")[rank]) == 0
            assert same_bits(coded, expected(op, world_size, of, codec="int8")[rank]) == 0
        for op, result in compiled.items():
            assert same_bits(result, expected(op, world_size, "blocks")[rank] * 2) == 0


def of_other_formats(rank, world_size, op):
    a, w, scales = operands(rank, ("rows", "blocks")[rank], (256, 256))
    with pytest.raises(CommunicatorError) as caught:
        getattr(graphar, op)(a, w, **scales)
    return str(caught.value)


@every_op
def test_processes_whose_scales_are_of_other_formats_are_told_so(op):
    for message in run_ranks(of_other_formats, 2, op):
        assert "e4m3 operands with scales of rows" in message
        assert "e4m3 operands with scales of blocks" in message


def of_other_results(rank, world_size):
    a, w, scales = operands(rank, "rows")
    with pytest.raises(CommunicatorError) as caught:
        graphar.fused_matmul_allreduce(a, w, **scales, out_dtype=(BF16, torch.float16)[rank])
    return str(caught.value)


def test_processes_whose_results_have_other_dtypes_are_told_so():
    for message in run_ranks(of_other_results, 2):
        assert "torch.bfloat16" in message
        assert "torch.float16" in message


# ---- what is prepared -----------------------------------------------------------------------------------------------


def test_with_e4m3_the_kernels_of_both_formats_are_prepared():
    form = form_to_prepare("-v")

    needed = list(preparation._scaled_tiles([OPS[0], "fused_allgather_matmul"], [BF16], [form]))

    found = {(algorithm, tile, work.scales, work.epilogue) for algorithm, dtype, tile, work in needed if dtype == BF16}
    for algorithm in (Algorithm.MATMUL_ALLREDUCE, Algorithm.MATMUL_TWO_SHOT, Algorithm.ALLGATHER_MATMUL):
        forms = (None, form) if algorithm.row.takes_epilogue else (None,)
        kinds = set(itertools.product([algorithm], scaled_tiles(algorithm), ("rows", "blocks"), forms))
        assert {one for one in found if one[0] is algorithm} == kinds
    assert len(found) == len(needed)


# ---- what is refused ------------------------------------------------------------------------------------------------


def refused(**changes):
    a, w, scales = lists(2, changes.pop("of", "rows"))
    given = {"a": a, "w": w, **scales} | changes
    return lambda op: getattr(graphar, op)(**given)


REFUSALS = {
    "need both a_scale and w_scale": refused(w_scale=None),
    "operands in torch.float8_e4m3fn need both": refused(a_scale=None, w_scale=None),
    "w must be torch.float8_e4m3fn": refused(w=[torch.ones(N, k, dtype=BF16) for k in COLUMNS[:2]]),
    "a must be torch.float8_e4m3fn, got torch.float8_e5m2": refused(
        a=[torch.ones(M, k).to(torch.float8_e5m2) for k in COLUMNS[:2]]
    ),
    "a_scale must be torch.float32": refused(a_scale=[torch.ones(M, 1, dtype=BF16)] * 2),
    "for scales of blocks of 128": refused(a_scale=[torch.ones(M, 2)] * 2),
    "all ranks must be of rows, or all of blocks": refused(
        a_scale=[torch.ones(M, 2), torch.ones(M, 1)], w_scale=[torch.ones(2, 2), torch.ones(N, 1)]
    ),
    "out_dtype must be bfloat16, float16 or None": refused(out_dtype=torch.float32),
    "out_dtype goes with a_scale and w_scale": refused(a_scale=None, w_scale=None, out_dtype=BF16),
    "partition must be one of auto, tiles, none, split_m, split_n, batch_invariant, got 'rows'": refused(
        partition="rows"
    ),
    "got 'tp_invariant'": refused(partition="tp_invariant"),
    "partition 'split_n' would cut blocks of w": refused(of="blocks", partition="split_n"),
    "bias must be torch.bfloat16": refused(bias=[torch.ones(N)] * 2),
    "have no gradients, but bias requires one": refused(bias=[torch.ones(N, dtype=BF16, requires_grad=True)] * 2),
}


@every_op
def test_calls_that_break_a_rule_are_refused_by_name(op):
    for expected_words, call in REFUSALS.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            call(op)
        assert expected_words in str(caught.value)
        assert str(caught.value).startswith(f"{op}: ")
