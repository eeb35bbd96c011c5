"""Matmuls of gathered rows in e4m3 with scales: the specification's bits, and who is refused."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import CommunicatorError, reference
from tests.cases import normal, same_bits
from tests.ops.test_fp8_operands import BF16, FP8, scale
from tests.processes import run_ranks

K, ROWS, COLUMNS = 200, (8, 5, 0, 3), (136, 64, 8, 72)  # of each rank: rows and features may differ
FORMATS = ("rows", "numbers", "blocks")
HOW = ({}, {"partition": "none"}, {"partition": "tiles"}, {"epilogue": "gelu(v)"}, {"out_dtype": torch.float16})

every_format = pytest.mark.parametrize("of", FORMATS)


def operands(rank, of, k=K):
    """A rank's a, w and keywords with scales."""
    m, n, blocks = ROWS[rank], COLUMNS[rank], -(-k // 128)
    shapes = {"rows": ((m, 1), (1, n)), "numbers": ((), (1,)), "blocks": ((m, blocks), (-(-n // 128), blocks))}[of]
    a, w = (normal(seed + rank, rows * k, torch.float32).view(rows, k).to(FP8) for seed, rows in ((0, m), (10, n)))
    return a, w, {"a_scale": scale(20 + rank, *shapes[0]), "w_scale": scale(30 + rank, *shapes[1])}


def lists(ranks, of):
    a, w, scales = zip(*[operands(rank, of) for rank in range(ranks)], strict=True)
    return list(a), list(w), {name: [one[name] for one in scales] for name in scales[0]}


def bias_of(rank, dtype):
    return normal(40 + rank, COLUMNS[rank], dtype)


def expected(rank, ranks, of, **how):
    a, w, scales = lists(ranks, of)
    of_w = scales["w_scale"][rank]
    return reference.fused_allgather_matmul(a, w[rank], a_scale=scales["a_scale"], w_scale=of_w, **how)


def gathered_scales(ranks, of):
    a, _, scales = lists(ranks, of)
    pairs = zip(a, scales["a_scale"], strict=True)
    return torch.cat([one.expand(len(x), 1) if one.numel() == 1 else one for x, one in pairs])


# ---- the specification ----------------------------------------------------------------------------------------------


@every_format
def test_the_specification_multiplies_the_gathered_rows_with_their_own_scales(of):
    a, w, scales = lists(2, of)
    pairs = zip(a, scales["a_scale"], strict=True)
    parts = [reference.scaled_linear(x, w[0], of_a, scales["w_scale"][0]) for x, of_a in pairs]

    assert same_bits(expected(0, 2, of), torch.cat(parts)) == 0


# ---- lists ----------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_lists_get_the_specifications_bits(of, with_bias, how):
    a, w, scales = lists(4, of)
    dtype = how.get("out_dtype", BF16)
    biases = [bias_of(rank, dtype) if with_bias else None for rank in range(4)]

    found = graphar.fused_allgather_matmul(a, w, **scales, **({"bias": biases} if with_bias else {}), **how)

    told = {name: one for name, one in how.items() if name != "partition"}
    for rank in range(4):
        assert found[rank].dtype == dtype
        assert same_bits(found[rank], expected(rank, 4, of, bias=biases[rank], **told)) == 0


@every_format
def test_the_gathered_rows_come_with_their_scales(of):
    a, w, scales = lists(3, of)

    products, rows, of_rows = graphar.fused_allgather_matmul(a, w, **scales, gathered=True)

    for rank in range(3):
        assert same_bits(products[rank], expected(rank, 3, of)) == 0
        assert torch.equal(rows[rank].view(torch.uint8), torch.cat(a).view(torch.uint8))
        assert torch.equal(of_rows[rank], gathered_scales(3, of))
    more = graphar.linear(rows[1], w[1], a_scale=of_rows[1], w_scale=scales["w_scale"][1])
    assert same_bits(more, products[1]) == 0


@every_format
def test_rows_may_have_several_dimensions(of):
    a, w, scales = lists(2, of)
    a = [x.unsqueeze(1) for x in a]
    of_a = [one.unsqueeze(1) if one.ndim else one for one in scales["a_scale"]]

    product, rows, of_rows = graphar.fused_allgather_matmul(a, w, **(scales | {"a_scale": of_a}), gathered=True)

    assert same_bits(product[0], expected(0, 2, of).unsqueeze(1)) == 0
    assert rows[0].shape == (13, 1, K)
    assert torch.equal(of_rows[0].squeeze(1), gathered_scales(2, of))


@every_format
def test_without_columns_of_k_there_is_the_bias_alone(of):
    a, w, scales = lists(2, of)
    if of == "blocks":
        scales = {name: [one[:, :0] for one in scales[name]] for name in scales}
    biases = [bias_of(rank, BF16) for rank in range(2)]

    found = graphar.fused_allgather_matmul([x[:, :0] for x in a], [x[:, :0] for x in w], bias=biases, **scales)

    assert torch.equal(found[1], biases[1].expand(13, -1))


# ---- processes ------------------------------------------------------------------------------------------------------


def answers(rank, world_size):
    """By format, this rank's results: of three equal calls, and with the rows; and a compiled call's."""
    found, sizes = {}, list(ROWS[:world_size])
    for of in FORMATS:
        a, w, scales = operands(rank, of)
        same = [graphar.fused_allgather_matmul(a, w, **scales, sizes=sizes) for _ in range(3)]
        product, rows, of_rows = graphar.fused_allgather_matmul(a, w, **scales, sizes=sizes, gathered=True)
        found[of] = [*same, product], rows.view(torch.uint8), of_rows
    a, w, scales = operands(rank, "blocks")

    def call(a, w, a_scale, w_scale):
        product, rows, of_rows = graphar.fused_allgather_matmul(
            a, w, a_scale=a_scale, w_scale=w_scale, sizes=sizes, gathered=True
        )
        return product * 2, rows.view(torch.uint8), of_rows

    return found, torch.compile(call)(a, w, *scales.values())


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_get_the_specifications_bits(world_size):
    for rank, (found, compiled) in enumerate(run_ranks(answers, world_size)):
        whole = torch.cat(lists(world_size, "rows")[0]).view(torch.uint8)
        for of, (products, rows, of_rows) in found.items():
            wanted = expected(rank, world_size, of)
            assert [same_bits(one, wanted) for one in products] == [0] * 4
            assert torch.equal(rows, whole)
            assert torch.equal(of_rows, gathered_scales(world_size, of))
        assert same_bits(compiled[0], expected(rank, world_size, "blocks") * 2) == 0
        assert torch.equal(compiled[1], whole)
        assert torch.equal(compiled[2], gathered_scales(world_size, "blocks"))


def of_other_formats(rank, world_size):
    a, w, scales = operands(rank, ("rows", "blocks")[rank])
    with pytest.raises(CommunicatorError) as caught:
        graphar.fused_allgather_matmul(a, w, **scales, sizes=list(ROWS[:2]))
    return str(caught.value)


def test_processes_whose_scales_are_of_other_formats_are_told_so():
    for message in run_ranks(of_other_formats, 2):
        assert "e4m3 operands with scales of rows" in message
        assert "e4m3 operands with scales of blocks" in message


# ---- what is refused ------------------------------------------------------------------------------------------------


REFUSALS = {
    "need both a_scale and w_scale": {"w_scale": None},
    "operands in torch.float8_e4m3fn need both": {"a_scale": None, "w_scale": None},
    "out_dtype must be bfloat16, float16 or None": {"out_dtype": torch.float32},
    "with scales partition must be one of auto, tiles, chunks, none, got 'tp_invariant'": {"partition": "tp_invariant"},
    "the shapes of ranks may differ only in the rows of a and w": {"a": [torch.ones(8, 200), torch.ones(5, 1, 200)]},
    "bias must be torch.bfloat16": {"bias": [torch.ones(n) for n in COLUMNS[:2]]},
    "have no gradients, but w_scale requires one": {"w_scale": [torch.ones(1, requires_grad=True)] * 2},
}


@pytest.mark.parametrize("words", REFUSALS)
def test_calls_that_break_a_rule_are_refused_by_name(words):
    a, w, scales = lists(2, "rows")
    changes = dict(REFUSALS[words])
    if "a" in changes:
        changes |= {"a": [x.to(FP8) for x in changes["a"]], "a_scale": [torch.ones(())] * 2}

    with pytest.raises((TypeError, ValueError)) as caught:
        graphar.fused_allgather_matmul(**({"a": a, "w": w} | scales | changes))

    assert words in str(caught.value)
    assert str(caught.value).startswith("fused_allgather_matmul: ")
