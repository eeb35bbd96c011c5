"""Which algorithm a call takes between GPUs and why, and which kernels must be loaded for it."""

from dataclasses import replace

import pytest
import torch

from graphar.errors import UnsupportedError
from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.numerics.norms import PREPARED as NORMS
from graphar.plan import select
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import FALLBACK, HIERARCHICAL, Kernel, kernel_of
from graphar.plan.grids import CLUSTERS
from graphar.plan.policy import Chip
from graphar.plan.scratch import NORM_ROW_PACKS
from graphar.plan.select import Facts
from graphar.plan.tables import expected_us, measured_config, shipped_table
from graphar.plan.work import Parts, Sum

EPILOGUE, CODEC = form_to_prepare("-v"), Codec(4)
DTYPES = (torch.bfloat16, torch.float32)
H200 = shipped_table("nvidia_h200")
LOSSLESS = Algorithm.TWO_SHOT_LOSSLESS


def facts_of(call, world_size=4, clusters=True, no_multicast="", lossless=True):
    """The facts about GPUs of one kind by which ``call`` gets its algorithm."""
    return Facts(
        world_size,
        H200,
        Chip(132, "sm_90a" if clusters else "sm_80"),
        select.why_no_kernel(world_size, "cuda", call.dtype, call.op),
        lambda: no_multicast,
        lambda: "asked for",
        lossless=lossless,
    )


def call_of(op, counts, dtype=torch.bfloat16, codec="", epilogue=None, **options):
    """A call of an op; ``counts`` are the elements of each part, or of an all-reduce's tensor."""
    work = Sum(counts, codec, epilogue) if op == "allreduce" else Parts(op, counts, codec, epilogue)
    return Call(work, dtype, 0, **options)


def choose(op, counts, dtype=torch.bfloat16, world_size=4, no_multicast="", lossless=True, **options):
    call = call_of(op, counts, dtype, **options)
    return select.select(call, facts_of(call, world_size, no_multicast=no_multicast, lossless=lossless))


def chosen(nbytes, algorithm="auto", **options):
    return choose("allreduce", nbytes // 2, algorithm=algorithm, **options)


@pytest.mark.parametrize(
    ("world_size", "device", "dtype", "op", "reason"),
    [
        (2, "cuda", torch.bfloat16, "allreduce", None),
        (8, "cuda", torch.bfloat16, "allreduce", None),
        (9, "cuda", torch.bfloat16, "allreduce", "kernels serve at most 8 ranks, not 9"),
        (1, "cuda", torch.bfloat16, "allreduce", "one rank has nothing to add"),
        (2, "cpu", torch.float32, "allgather", "the tensor is on the CPU"),
        (2, "cuda", torch.float64, "reducescatter", "no kernel adds torch.float64"),
        (2, "cuda", torch.float64, "allgather", None),
    ],
)
def test_it_is_said_why_no_kernel_serves(world_size, device, dtype, op, reason):
    assert select.why_no_kernel(world_size, device, dtype, op) == reason


def test_what_has_no_kernel_takes_the_fallback_unless_it_asks_for_one():
    assert chosen(16, world_size=1) == (FALLBACK, "one rank has nothing to add")
    assert chosen(16, "hierarchical", world_size=1) == (FALLBACK, "one rank has nothing to add")
    with pytest.raises(UnsupportedError, match="one_shot cannot serve this call: one rank has nothing to add"):
        chosen(16, "one_shot", world_size=1)


def test_an_algorithm_without_a_kernel_for_the_dtype_is_refused():
    with pytest.raises(UnsupportedError, match=r"it has no kernel for torch\.float32"):
        choose("allreduce", 8, torch.float32, algorithm="two_shot_lossless")


@pytest.mark.parametrize(
    "algorithm", [Algorithm.ONE_SHOT_PUSH, Algorithm.MULTIMEM_ONE_SHOT, Algorithm.MULTIMEM_TWO_SHOT]
)
def test_what_is_too_large_for_the_scratch_is_refused(algorithm):
    largest = algorithm.row.limit(4)

    assert chosen(largest, algorithm.value)[0].algorithm is algorithm
    with pytest.raises(UnsupportedError, match=f"its scratch takes {largest} bytes between 4 ranks"):
        chosen(largest + 2, algorithm.value)


def test_multimem_without_multicast_is_refused():
    with pytest.raises(UnsupportedError, match="cannot serve this call: nobody asked for multicast"):
        chosen(16, "multimem_one_shot", no_multicast="nobody asked for multicast")


def test_few_blocks_pipeline_a_large_sum_unless_an_algorithm_is_asked_for():
    assert chosen(1 << 20, blocks=24)[0].algorithm is Algorithm.TWO_SHOT_PIPELINED
    small, _ = chosen((1 << 20) - 2)
    assert chosen((1 << 20) - 2, blocks=24)[0] == replace(small, blocks=min(small.blocks, 24))
    assert chosen(1 << 20, "two_shot_tma", blocks=24)[0].algorithm is Algorithm.TWO_SHOT_TMA


@pytest.mark.parametrize(("world_size", "least"), H200.lossless.allreduce_from_nbytes.items())
def test_bf16_is_compressed_from_the_size_in_the_table_on(world_size, least):
    below, _ = chosen(least - 2, world_size=world_size)
    at, reason = chosen(least, world_size=world_size)

    assert below == measured_config(H200, world_size, least - 2)
    assert at == replace(measured_config(H200, world_size, least, LOSSLESS), blocks=131)
    assert reason == f"lossless compression, chosen by table 'nvidia_h200' for {world_size} ranks and {least} bytes"


@pytest.mark.parametrize(
    "how",
    [
        *({"world_size": world_size} for world_size in (5, 6, 7, 8)),  # which were not measured
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"blocks": 24},
        {"epilogue": EPILOGUE},
    ],
    ids=lambda how: next(iter(how)),
)
def test_other_large_calls_are_not_compressed(how):
    choice = choose("allreduce", 1 << 30, **how)

    assert choice.config.algorithm is Algorithm.TWO_SHOT_PIPELINED
    assert "lossless" not in choice.reason
    assert shipped_table("default").lossless.allreduce_from_nbytes == {}


def test_without_lossless_a_large_call_is_plain_and_says_so():
    config, reason = chosen(1 << 30, lossless=False)

    assert config == measured_config(H200, 4, 1 << 30)
    assert reason == (
        f"the fastest by table 'nvidia_h200' for 4 ranks and {1 << 30} bytes; lossless compression is off"
    )
    assert "lossless" not in chosen(1 << 20, lossless=False).reason
    assert chosen(1 << 30, LOSSLESS.value, lossless=False).config.algorithm is LOSSLESS


COMPRESSES_PARTS = replace(H200.lossless, allgather_from_nbytes={4: 1 << 20})


@pytest.mark.parametrize(
    ("largest", "options", "compressed"),
    [
        (1 << 19, {}, True),
        ((1 << 19) - 1, {}, False),
        (1 << 19, {"dtype": torch.float16}, False),
        (1 << 19, {"lossless": False}, False),
    ],
)
def test_large_gathered_parts_of_bf16_are_compressed_where_the_table_says_so(largest, options, compressed):
    options = {"dtype": torch.bfloat16, "lossless": True, **options}
    dtype, lossless = options.pop("dtype"), options.pop("lossless")
    call = call_of("allgather", (3, largest, 0, 7), dtype, **options)
    facts = replace(facts_of(call, lossless=lossless), table=replace(H200, lossless=COMPRESSES_PARTS))

    config, reason = select.select(call, facts)

    assert (config.algorithm is Algorithm.ALLGATHER_LOSSLESS) is compressed
    assert reason.startswith("lossless compression, chosen by table") is compressed
    assert reason.endswith("; lossless compression is off") is not lossless
    kernels = set(select.needed_kernels(facts, ["allgather"], DTYPES, None))
    assert (Kernel(Algorithm.ALLGATHER_LOSSLESS, torch.bfloat16) in kernels) is lossless


def test_no_reduce_scatter_is_compressed():
    call = call_of("reducescatter", (1 << 29,) * 4, torch.bfloat16)
    facts = replace(facts_of(call), table=replace(H200, lossless=COMPRESSES_PARTS))

    assert not select.select(call, facts).config.algorithm.row.compresses
    assert not any(
        kernel.algorithm.row.compresses for kernel in select.needed_kernels(facts, ["reducescatter"], DTYPES, None)
    )


def test_no_time_is_expected_of_a_compressed_call():
    call = Call(Sum(1 << 29), torch.bfloat16, 0)

    compressed, plain = (select.explain(call, facts_of(call, lossless=one)) for one in (True, False))

    assert (compressed.algorithm, compressed.expected_us) == ("two_shot_lossless", None)
    assert plain.expected_us == pytest.approx(expected_us(H200, 4, 1 << 30))
    assert str(compressed).startswith("two_shot_lossless (131 blocks of 512): lossless compression, chosen by table")


@pytest.mark.parametrize(
    ("max_nbytes", "lossless", "prepared"),
    [
        (H200.lossless.allreduce_from_nbytes[4], True, [torch.bfloat16]),
        (None, True, [torch.bfloat16]),
        (H200.lossless.allreduce_from_nbytes[4] - 1, True, []),
        (None, False, []),
    ],
)
def test_the_compressing_kernel_is_prepared_where_it_may_be_taken(max_nbytes, lossless, prepared):
    facts = facts_of(Call(Sum(8), torch.bfloat16, 0), lossless=lossless)

    needed = list(select.needed_kernels(facts, ["allreduce"], DTYPES, max_nbytes, (), [EPILOGUE], True))

    assert [(one.dtype, one.direct, one.epilogue) for one in needed if one.algorithm is LOSSLESS] == [
        (dtype, False, None) for dtype in prepared
    ]


@pytest.mark.parametrize(
    ("numel", "algorithm", "reason"), [(0, "auto", "an empty tensor has no tile"), (8, "fallback", "asked for")]
)
def test_a_call_with_a_codec_takes_the_fallback(numel, algorithm, reason):
    assert choose("allreduce", numel, algorithm=algorithm, codec=CODEC.text) == (FALLBACK, reason)


def test_a_hierarchical_sum_says_what_an_element_costs_across_hosts():
    assert choose("allreduce", 1 << 20, algorithm="hierarchical", codec=CODEC.text) == (
        HIERARCHICAL,
        f"asked for; across hosts {CODEC.bits_per_element:g} bits an element",
    )
    assert chosen(16, "hierarchical") == (HIERARCHICAL, "asked for")


def test_the_fallback_and_what_no_kernel_serves_say_which_epilogue_follows():
    assert chosen(16, "fallback", epilogue=EPILOGUE)[1] == f"asked for; with the epilogue {EPILOGUE.text}"
    alone = chosen(16, world_size=1, epilogue=EPILOGUE)[1]
    assert alone == f"one rank has nothing to add; with the epilogue {EPILOGUE.text}"


def test_the_largest_part_decides_a_grid_by_its_bytes():
    def config(numel, dtype):
        return choose("reducescatter", (8, numel), dtype, world_size=2).config

    assert config(65536, torch.bfloat16).threads < config(65537, torch.bfloat16).threads
    assert config(32768, torch.float32) == config(65536, torch.bfloat16)
    assert config(32769, torch.float32) == config(65538, torch.bfloat16)


def test_parts_without_a_kernel_or_without_elements_take_the_fallback():
    assert choose("allgather", (8,), world_size=1).config == FALLBACK
    assert choose("reducescatter", (8,), world_size=1, codec=CODEC.text).config == FALLBACK
    assert choose("reducescatter", (0, 0), world_size=2, codec=CODEC.text).config == FALLBACK
    assert choose("reducescatter", (0, 8), world_size=2, codec=CODEC.text).config.blocks == 1


@pytest.mark.parametrize(
    ("columns", "kernel"), [(8, True), (12, False), (8 * NORM_ROW_PACKS, True), (8 * NORM_ROW_PACKS + 8, False)]
)
def test_rows_of_whole_packs_are_normed_up_to_the_longest(columns, kernel):
    most = Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT.row.limit(4) // (2 * columns)

    assert select.has_norm_kernel(2 * columns) == kernel
    assert select.norm_rows(4, 2 * columns) == most
    assert (
        select.why_no_kernel(1, "cuda", torch.bfloat16, "allreduce_residual_rmsnorm") == "one rank has nothing to add"
    )


def needed(ops, max_nbytes=None, codecs=(), epilogues=(), symmetric=False, clusters=True):
    facts = facts_of(Call(Sum(8), torch.bfloat16, 0), clusters=clusters)
    return list(select.needed_kernels(facts, ops, DTYPES, max_nbytes, codecs, epilogues, symmetric))


def taken(op, max_nbytes, **way):
    """The kernels of calls of up to ``max_nbytes``, alone or beside a matmul or a backward pass."""
    found = set()
    for dtype in DTYPES:
        for nbytes in {max_nbytes, *(1 << power for power in range(4, 32) if 1 << power <= max_nbytes)}:
            numel = nbytes // dtype.itemsize
            for blocks in (None, H200.beside.blocks):
                counts = numel if op == "allreduce" else (numel,) * 4
                call = call_of(op, counts, dtype, blocks=blocks, **way)
                found.add(kernel_of(select.select(call, facts_of(call)).config, call))
    return found


@pytest.mark.parametrize("max_nbytes", [4096, 1 << 19, 5 << 19, 1 << 31])
@pytest.mark.parametrize("epilogue", [None, EPILOGUE])
def test_what_all_reduces_of_any_size_up_to_one_take_is_prepared_and_no_more(max_nbytes, epilogue):
    plain, with_epilogue = taken("allreduce", max_nbytes), taken("allreduce", max_nbytes, epilogue=EPILOGUE)

    found = needed(["allreduce"], max_nbytes, epilogues=[epilogue] if epilogue else [])

    assert set(found) == plain | (with_epilogue if epilogue else set())
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("op", ["reducescatter", "allgather"])
def test_all_that_parts_of_any_size_take_is_prepared(op):
    found = needed([op], 4096, epilogues=[EPILOGUE])

    with_epilogue = taken(op, 1 << 31, epilogue=EPILOGUE) if op == "reducescatter" else set()
    assert set(found) == taken(op, 1 << 31) | with_epilogue
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
def test_all_that_calls_with_a_codec_take_is_prepared(op):
    found = [one for one in needed([op], 4096, codecs=[CODEC]) if one.codec]

    assert set(found) == taken(op, 1 << 31, codec=CODEC.text)


def test_where_there_are_symmetric_tensors_kernels_for_them_are_prepared_too():
    plain = needed(["allreduce"], epilogues=[EPILOGUE])
    both = needed(["allreduce"], epilogues=[EPILOGUE], symmetric=True)

    added = [one for one in both if one not in plain]
    assert {(algorithm, direct) for algorithm, _, direct, *_ in added} == {(Algorithm.TWO_SHOT_PIPELINED, True)}
    assert {one.epilogue for one in added} == {None, EPILOGUE}


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize(("name", "op", "output"), [(name, *meant) for name, meant in NORMS.items()], ids=NORMS)
def test_norms_are_prepared_for_rows_of_any_length(name, op, output, clusters):
    found = needed([name], clusters=clusters)

    kernels = {
        "allreduce_residual_rmsnorm": ["allreduce_rmsnorm_one_shot", "allreduce_rmsnorm_two_shot"],
        "reducescatter_residual_rmsnorm": ["reducescatter_rmsnorm"],
    }[op]
    assert {(one.value, dtype) for one, dtype, *_ in found} == {(one, dtype) for one in kernels for dtype in DTYPES}
    templates = {f"{cluster}, {output}" for cluster in (CLUSTERS if clusters else CLUSTERS[:1])}
    assert {one.template for one in found} == templates
    assert len(set(found)) == len(found) == len(kernels) * len(DTYPES) * (len(CLUSTERS) if clusters else 1)
