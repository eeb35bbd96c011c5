"""Which way a call takes between GPUs, which kernels must be loaded for it, and the reasons."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphar.errors import UnsupportedError
from graphar.matmul.overlap import BESIDE
from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.numerics.norms import OPS as NORM_OPS
from graphar.plan import choice
from graphar.plan.algorithms import NORM_ROW_PACKS, Algorithm, largest_nbytes
from graphar.plan.tables import shipped_table
from graphar.runtime.catalogue import BYTE, CLUSTERS

FORM, CODEC = form_to_prepare("-v"), Codec(4)
DTYPES = (torch.bfloat16, torch.float32)


def ranks_of(world_size=4, clusters=True, symmetric=None, no_multicast="", devices=()):
    """A communicator of GPUs, as far as it is asked here."""
    return SimpleNamespace(
        world_size=world_size,
        devices=devices,
        hierarchy=SimpleNamespace(set_up=lambda x: "asked for"),
        _table=shipped_table("nvidia_h200"),
        _symmetric=symmetric,
        _multimem_stand_in=False,
        _quantized_calls=None,
        _runner=SimpleNamespace(has_clusters=lambda: clusters, why_no_multicast=lambda: no_multicast),
        _why_no_kernel=lambda x, op="allreduce": choice.why_no_kernel(world_size, x, op),
    )


def on_gpu(numel, dtype=torch.bfloat16):
    return torch.empty(numel, dtype=dtype, device="meta")


def chosen(nbytes, algorithm="auto", ranks=None, **options):
    return choice.choose_allreduce(ranks or ranks_of(), on_gpu(nbytes // 2), algorithm, None, **options)


# ---- no kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "x", "op", "reason"),
    [
        (2, on_gpu(8), "allreduce", ""),
        (8, on_gpu(8), "allreduce", ""),
        (9, on_gpu(8), "allreduce", "kernels serve at most 8 ranks, not 9"),
        (1, on_gpu(8), "allreduce", "one rank has nothing to add"),
        (2, torch.empty(8), "allgather", "the tensor is on the CPU"),
        (2, on_gpu(8, torch.float64), "reducescatter", "no kernel adds torch.float64"),
        (2, on_gpu(8, torch.float64), "allgather", ""),
    ],
)
def test_it_is_said_why_no_kernel_serves(world_size, x, op, reason):
    assert choice.why_no_kernel(world_size, x, op) == reason


def test_what_has_no_kernel_takes_the_fallback_unless_it_asks_for_one():
    alone = ranks_of(1)

    assert chosen(16, ranks=alone) == (choice.FALLBACK, "one rank has nothing to add")
    assert chosen(16, "hierarchical", ranks=alone) == (choice.FALLBACK, "one rank has nothing to add")
    with pytest.raises(UnsupportedError, match="one_shot cannot serve this call: one rank has nothing to add"):
        chosen(16, "one_shot", ranks=alone)


def test_an_algorithm_without_a_kernel_for_the_dtype_is_refused():
    with pytest.raises(UnsupportedError, match=r"it has no kernel for torch\.float32"):
        choice.choose_allreduce(ranks_of(), on_gpu(8, torch.float32), "two_shot_lossless", None)


@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT_PUSH, Algorithm.MULTIMEM_ONE_SHOT])
def test_what_is_too_large_for_the_scratch_is_refused(algorithm):
    largest = largest_nbytes(algorithm, 4)

    assert chosen(largest, algorithm.value)[0].algorithm is algorithm
    with pytest.raises(UnsupportedError, match=f"its scratch takes {largest} bytes between 4 ranks"):
        chosen(largest + 2, algorithm.value)


def test_multimem_without_multicast_is_refused():
    with pytest.raises(UnsupportedError, match="cannot serve this call: nobody asked for multicast"):
        chosen(16, "multimem_one_shot", ranks_of(no_multicast="nobody asked for multicast"))


def test_few_blocks_pipeline_a_large_sum_unless_an_algorithm_is_asked_for():
    assert chosen(1 << 20, blocks=24)[0].algorithm is Algorithm.TWO_SHOT_PIPELINED
    assert chosen((1 << 20) - 2, blocks=24)[0] == chosen((1 << 20) - 2)[0]
    assert chosen(1 << 20, "two_shot_tma", blocks=24)[0].algorithm is Algorithm.TWO_SHOT_TMA


# ---- codecs, parts and norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "algorithm", "reason"),
    [(0, "auto", "an empty tensor has no tile"), (8, "fallback", "asked for")],
)
def test_a_call_with_a_codec_takes_the_fallback(numel, algorithm, reason):
    assert choice.choose_quantized_allreduce(ranks_of(), on_gpu(numel), algorithm, CODEC) == (choice.FALLBACK, reason)


def test_a_hierarchical_sum_says_what_an_element_costs_across_hosts():
    x = on_gpu(1 << 20)

    assert choice.choose_quantized_allreduce(ranks_of(), x, "hierarchical", CODEC) == (
        choice.HIERARCHICAL,
        f"asked for; across hosts {CODEC.bits_per_element:g} bits an element",
    )
    assert chosen(16, "hierarchical") == (choice.HIERARCHICAL, "asked for")


def test_the_largest_part_decides_a_shape_by_its_bytes():
    def shape(numel, dtype):
        return choice.choose_parts(ranks_of(2), "reducescatter", on_gpu(8, dtype), (8, numel))

    assert shape(65536, torch.bfloat16).threads < shape(65537, torch.bfloat16).threads
    assert shape(32768, torch.float32) == shape(65536, torch.bfloat16)
    assert shape(32769, torch.float32) == shape(65538, torch.bfloat16)


def test_parts_without_a_kernel_or_without_elements_take_the_fallback():
    x = on_gpu(8)

    assert choice.choose_parts(ranks_of(1), "allgather", x, (8,)) == choice.FALLBACK
    assert choice.choose_quantized_parts(ranks_of(1), x, (8,), CODEC) == choice.FALLBACK
    assert choice.choose_quantized_parts(ranks_of(2), x, (0, 0), CODEC) == choice.FALLBACK
    assert choice.choose_quantized_parts(ranks_of(2), x, (0, 8), CODEC).blocks == 1


@pytest.mark.parametrize(
    ("columns", "kernel"), [(8, True), (12, False), (8 * NORM_ROW_PACKS, True), (8 * NORM_ROW_PACKS + 8, False)]
)
def test_rows_of_whole_packs_are_normed_up_to_the_longest(columns, kernel):
    x = torch.empty(3, columns, dtype=torch.bfloat16, device="meta")
    most = largest_nbytes(Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT, 4) // (2 * columns)

    assert choice.has_norm_kernel(2 * columns) == kernel
    assert choice.norm_rows(ranks_of(), x) == (most if kernel else 0)
    assert choice.norm_rows(ranks_of(1), x) == 0


# ---- what is prepared -----------------------------------------------------------------------------------------------


def needed(ops, max_nbytes=None, codecs=(), forms=(), **ranks):
    return list(choice.needed_kernels(ranks_of(**ranks), ops, DTYPES, max_nbytes, codecs, forms))


def taken(op, way, max_nbytes):
    """What launches of calls of any size load, by themselves or beside a matmul or a backward pass."""
    found, ranks = set(), ranks_of()
    for dtype in DTYPES:
        for nbytes in {max_nbytes, *(1 << power for power in range(4, 32) if 1 << power <= max_nbytes)}:
            x = on_gpu(nbytes // dtype.itemsize, dtype)
            counts = x.numel() if "allreduce" in op else (x.numel(),) * 4
            for blocks in (None, BESIDE.blocks):
                shape, _ = choice.choose_call(ranks, op, counts, x, "auto", way, blocks)
                element = BYTE if op == "allgather" else dtype
                found.add((shape.algorithm, element, shape.direct, shape.codec, shape.epilogue))
    return found


@pytest.mark.parametrize("max_nbytes", [4096, 1 << 19, 5 << 19, 1 << 31])
@pytest.mark.parametrize("form", [None, FORM])
def test_what_all_reduces_of_any_size_up_to_one_take_is_prepared_and_no_more(max_nbytes, form):
    plain, with_form = taken("allreduce", None, max_nbytes), taken("epilogue_allreduce", (FORM, None), max_nbytes)

    found = needed(["allreduce"], max_nbytes, forms=[form] if form else [])

    assert set(found) == plain | (with_form if form else set())
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("op", ["reducescatter", "allgather"])
def test_all_that_parts_of_any_size_take_is_prepared(op):
    found = needed([op], 4096, forms=[FORM])

    with_form = taken("epilogue_reducescatter", (FORM, None), 1 << 31) if op == "reducescatter" else set()
    assert set(found) == taken(op, None, 1 << 31) | with_form
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
def test_all_that_calls_with_a_codec_take_is_prepared(op):
    found = [one for one in needed([op], 4096, codecs=[CODEC]) if one[3]]

    assert set(found) == taken(f"quantized_{op}", CODEC, 1 << 31)


def test_where_there_are_symmetric_tensors_kernels_for_them_are_prepared_too():
    plain = needed(["allreduce"], forms=[FORM])
    both = needed(["allreduce"], forms=[FORM], symmetric="some")

    added = [one for one in both if one not in plain]
    assert {(algorithm, direct) for algorithm, _, direct, *_ in added} == {(Algorithm.TWO_SHOT_PIPELINED, True)}
    assert {form for *_, form in added} == {None, FORM}


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize(("output", "op"), NORM_OPS.items())
def test_norms_are_prepared_for_rows_of_any_length(output, op, clusters):
    found = needed([op], clusters=clusters)

    assert {(one.value, dtype) for one, dtype, *_ in found} == {
        (f"allreduce_rmsnorm_{hops}_shot", dtype) for hops in ("one", "two") for dtype in DTYPES
    }
    assert {norm.cluster for *_, norm in found} == set(CLUSTERS if clusters else CLUSTERS[:1])
    assert {norm.output for *_, norm in found} == {output}
    assert len(set(found)) == len(found) == 4 * (len(CLUSTERS) if clusters else 1)
