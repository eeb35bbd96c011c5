"""Collectives on real GPUs, one process with a tensor a device: every kernel gives its specification's bits."""

import itertools
from dataclasses import replace

import pytest
import torch

from graphar.plan.scratch import Sizes
from tests.cases import HALVES, LAYOUTS, bit_patterns, integers, lay_out, normal
from tests.gpu import Ranks
from tests.ops.gpu_cases import (
    ALONG_AXES,
    BF16,
    CODED,
    COPIED,
    FOLLOWED,
    GATHER,
    GATHERED,
    GATHERED_ALONG_AXES,
    NORMS,
    NORMS_OF_TREES,
    OF_INT4,
    RANDOM,
    SCATTER,
    SCATTERED_TREES,
    SUM,
    SUMMED,
    SUMMED_AND_NORMED,
    SUMMED_FOLLOWED,
    SUMS,
    TREES,
    Case,
    assert_bits,
)

pytestmark = pytest.mark.gpu

EPILOGUES = [case for cases in FOLLOWED.values() for case in cases]
PLAIN = [*SUMS, SCATTER, GATHER, *COPIED]


def every(*cases: Case):
    return pytest.mark.parametrize("case", cases, ids=str)


@pytest.mark.promise("All-reduce has the bits of its specification: fp32 sums in rank order, rounded once.")
@pytest.mark.promise("A codec's results have the bits of its specification, at every size and on every rank.")
@pytest.mark.promise("An epilogue has the bits of its specification; only expressions reach the compiler.")
@pytest.mark.promise("Reduce-scatter, then all-gather, gives the bits of the all-reduce.")
@every(*PLAIN, *ALONG_AXES, *GATHERED_ALONG_AXES, *CODED, *TREES, *SCATTERED_TREES, *EPILOGUES)
def test_every_kernel_gives_the_specification_bit_for_bit(ranks: Ranks, case):
    case.skip_unless_served(ranks)
    for dtype in case.dtypes:
        for shape in case.shapes:
            if case.fits(ranks, shape, dtype):
                for fill in case.fills:
                    case.check(ranks, shape, dtype, fill)
    assert case.is_at_rest(ranks)


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@every(*NORMS, *NORMS_OF_TREES)
def test_a_norm_of_rows_of_any_shape_gives_the_specification(ranks: Ranks, case):
    case.skip_unless_served(ranks)
    for shape in case.shapes:
        for dtype in case.dtypes if "group_size" in case.form.options else (BF16,):
            case.check(ranks, shape, dtype, normal)
    columns = 384 if "group_size" in case.form.options else 264
    for shape in ((1, 8192), (3, 512), (129, 2048), (33, 8192), (33, columns)):
        for dtype in case.dtypes:
            for fill in (normal, bit_patterns):
                case.check(ranks, shape, dtype, fill)


@pytest.mark.promise("A fused matmul has the bits of its specification, whatever the partition and the codec.")
@every(*SUMMED, *SUMMED_FOLLOWED, *SUMMED_AND_NORMED, *GATHERED)
def test_matmuls_of_integers_of_any_size_give_the_specification(ranks: Ranks, case):
    for shape, dtype in itertools.product(case.shapes, case.dtypes):
        if case.fits(ranks, shape, dtype):
            case.check(ranks, shape, dtype)
            case.check(ranks, shape, dtype, view=lambda name, x: x.t().contiguous().t() if name == "w" else x)


@every(*SUMMED)
@pytest.mark.parametrize("shape", [(4095, 4096, 264), (4095, 4095, 129), (1024, 4104, 520)], ids=str)
def test_large_partitions_that_do_not_divide_give_the_specification(ranks: Ranks, case, shape):
    case.check(ranks, shape, BF16)


@pytest.mark.usefixtures("as_many_as_trees")
@every(
    *[case for case in TREES if not case.kernels],
    *[case for case in SCATTERED_TREES if case.form.options["axis"] == 0],
)
def test_large_sums_as_trees_give_the_specification(ranks: Ranks, case):
    case.check(ranks, ((40 << 20) + 5,))  # 160 MB, more than the scratch of two_shot_push takes


@pytest.mark.usefixtures("as_many_as_trees")
@every(*TREES)
def test_an_epilogue_works_on_the_sum_of_a_tree_before_it_is_rounded(ranks: Ranks, case):
    replace(case, form=replace(case.form, epilogue="max(v * 3, -1)")).check(ranks, (8199,))


@pytest.mark.promise("NaN, infinities, -0.0 and subnormals come out as that sum gives them.")
@every(*SUMS, SCATTER, *COPIED[:2])
def test_every_pair_of_16_bit_patterns_meets(ranks: Ranks, case):
    for shift in (0, 1, 255, 31743):
        for dtype in HALVES:
            if case.fits(ranks, (1 << 16,), dtype):
                case.check(ranks, (1 << 16,), dtype, lambda rank, numel, of, by=shift: rolled(rank * by, of))


def rolled(shift: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).roll(shift)


@pytest.mark.promise("What the kernels cannot serve takes an exact fallback, and `explain` says why.")
@every(SUM, SCATTER)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8], ids=str)
def test_other_dtypes_take_the_fallback(ranks: Ranks, case, dtype):
    before = case.calls(ranks)
    case.check(ranks, (8199,), dtype, integers)
    assert case.calls(ranks) == before


@every(SCATTER, GATHER, OF_INT4[-1])
def test_an_empty_tensor_launches_nothing(ranks: Ranks, case):
    case.check(ranks, (8,))
    before, drawn = case.calls(ranks), case.draw(ranks, (0, 4))
    assert_bits(case.call(ranks, case.place(ranks, drawn)), case.expected(drawn))
    assert case.calls(ranks) == before


VIEWS = [lambda name, x, layout=layout: lay_out(x, layout) for layout in LAYOUTS[1:]]
ON_EACH_ROW = [*EPILOGUES, *NORMS]


@pytest.mark.promise("Any strides, alignment and allocator work, and nothing is written beside the result.")
@every(*PLAIN, *RANDOM, *ON_EACH_ROW)
def test_tensors_may_lie_anywhere(ranks: Ranks, case):
    large = () if case in RANDOM else (((1 << 21) + 1,),)
    for shape in ((17, 264), (9, 384)) if case in ON_EACH_ROW else ((5000,), (50, 100), *large):
        if shape[-1] % case.form.options.get("group_size", 1) == 0 and case.fits(ranks, shape, case.dtypes[0]):
            for view in VIEWS:
                case.check(ranks, shape, case.dtypes[0], case.fills[0], view=view)


@every(SUM, SCATTER)
def test_a_negated_view_is_negated(ranks: Ranks, case):
    drawn = case.draw(ranks, (8192,), torch.float32)
    negated = {"x": [-x for x in drawn["x"]]}

    found = case.call(ranks, {"x": [torch._neg_view(x) for x in ranks.place(drawn["x"])]})

    ranks.communicator.synchronize()
    assert_bits(found, case.expected(negated))


@pytest.mark.promise("Any strides, alignment and allocator work, and nothing is written beside the result.")
@every(*SUMS, SCATTER, *COPIED, GATHERED_ALONG_AXES[0], *OF_INT4, *FOLLOWED["v * scale + bias[col]"][:-1])
@pytest.mark.parametrize("offset", [0, 1])
def test_nothing_is_written_beside_the_result_or_the_scratch(ranks: Ranks, case, offset):
    guard = 64
    several = [(Sizes.reducescatter_nbytes // 2 + 77,)] if case is SCATTER else []  # launches
    for shape in ((17, 241), (64, 4097)) if case in EPILOGUES else ((8199,), (262149,), *several):
        drawn, at = case.draw(ranks, shape), case.calls(ranks)
        expected = case.expected(drawn, at)
        around = ranks.place([torch.full((y.numel() + 2 * guard,), 7.0).to(y.dtype) for (y,) in expected])
        outs = [one[guard + offset :][: y.numel()].view(y.shape) for one, (y,) in zip(around, expected, strict=True)]
        case.call_into(ranks, case.place(ranks, drawn), outs)
        ranks.communicator.synchronize()
        assert_bits([(out,) for out in outs], expected, shape)
        for one, out in zip(around, outs, strict=True):
            assert bool((one[: guard + offset].float() == 7).all())
            assert bool((one[guard + offset + out.numel() :].float() == 7).all())
    assert case.is_at_rest(ranks)


@every(*[case for case in (*TREES, *FOLLOWED["v * scale + bias[col]"]) if "two_shot_pipelined" in case.kernels])
def test_symmetric_outputs_are_written_directly(ranks: Ranks, case):
    case.skip_unless_served(ranks)
    drawn = case.draw(ranks, (8199,) if case.is_tree else (512, 1024))
    (first, *_), *_ = expected = case.expected(drawn)
    outs = ranks.communicator.empty(*first.shape, dtype=first.dtype)

    case.call_into(ranks, case.place(ranks, drawn), outs)

    ranks.communicator.synchronize()
    assert_bits([(out,) for out in outs], expected)


@every(*SUMS, *OF_INT4[:-1], *FOLLOWED["v + c[index] - row + b[col]"][:-1])
def test_the_output_may_be_the_input(ranks: Ranks, case):
    large = (((1 << 22) + 3,),) if case in SUMS and case.fits(ranks, ((1 << 22) + 3,), BF16) else ()
    for shape in ((65, 129),) if case in EPILOGUES else ((8199,), (262149,), *large):
        drawn, at = case.draw(ranks, shape, BF16), case.calls(ranks)
        tensors = case.place(ranks, drawn)
        case.call_into(ranks, tensors, tensors["x"])
        ranks.communicator.synchronize()
        assert_bits([(x,) for x in tensors["x"]], case.expected(drawn, at), shape)


SHRINKING = [(n,) for n in (262149, 8192, 64, 1, 3, 8199, 1, 1, 131072, 7)]
PRODUCTS_IN_TURN = [(64, 64, 136), (640, 520, 136), (1024, 2048, 136), (2048, 1024, 136), (2050, 2056, 136)]
ROWS_IN_TURN = ((1, 8192), (64, 4096), (17, 8192), (2, 128), (400, 1024), (300, 7168))


def shapes_in_turn(case: Case) -> tuple:
    if "w" in case.form.known:
        return PRODUCTS_IN_TURN
    return ROWS_IN_TURN if case in (*NORMS, *NORMS_OF_TREES) else SHRINKING


@every(*PLAIN, *RANDOM, *NORMS, *NORMS_OF_TREES, *SUMMED[6:], *SUMMED_AND_NORMED)
def test_calls_in_a_row_without_a_wait_and_with_one_rank_late(ranks: Ranks, case):
    """Their sizes shrink and grow, so that what an earlier call left behind would be noticed."""
    case.skip_unless_served(ranks)
    shapes, first, made = shapes_in_turn(case), case.calls(ranks), []
    for turn in range(8 * len(shapes)):
        shape, dtype = shapes[turn % len(shapes)], case.dtypes[turn % len(case.dtypes)]
        drawn = case.draw(ranks, shape, dtype if case.fits(ranks, shape, dtype) else BF16, seed=100 * turn)
        made.append((drawn, case.place(ranks, drawn)))
    ranks.communicator.synchronize()
    results = []
    for turn, (_, tensors) in enumerate(made):
        if turn % 5 == 0:
            with torch.cuda.device(turn // 5 % ranks.world_size):
                torch.cuda._sleep(1_000_000)
        results.append(case.call(ranks, tensors))
    ranks.communicator.synchronize()
    for turn, (found, (drawn, _)) in enumerate(zip(results, made, strict=True)):
        assert_bits(found, case.expected(drawn, first + turn), f"call {turn}")
    assert case.is_at_rest(ranks)


@pytest.mark.parametrize(
    "cases",
    [CODED, TREES, [*EPILOGUES, *PLAIN], [*NORMS, *NORMS_OF_TREES]],
    ids=["codecs", "orders", "epilogues", "norms"],
)
def test_calls_of_all_kinds_take_turns_in_one_scratch(ranks: Ranks, cases):
    served = [case for case in cases if not case.is_tree or ranks.world_size in (2, 4, 8)]
    served += SUMS if cases is TREES else []
    for turn in range(3 * len(served)):
        case = served[turn * 7 % len(served)]
        shape = ((3, 5), (64, 128), (17, 999), (1, 8))[turn % 4] if case in EPILOGUES else SHRINKING[turn % 10]
        shape = ROWS_IN_TURN[turn % 6] if case in (*NORMS, *NORMS_OF_TREES) else shape
        dtype, fill = case.dtypes[turn % len(case.dtypes)], case.fills[turn % len(case.fills)]
        if case.fits(ranks, shape, dtype):
            case.check(ranks, shape, dtype, fill, seed=turn)
    assert all(case.is_at_rest(ranks) for case in served)


@pytest.mark.promise("Graphs replay after everything that Python held is gone, and epochs may wrap.")
@pytest.mark.parametrize(
    ("case", "kernel"),
    [(case, kernel) for case in (*PLAIN, *RANDOM, NORMS[0], NORMS[5]) for kernel in case.kernels],
    ids=str,
)
def test_epochs_wrap(fresh_ranks: Ranks, case, kernel):
    shape = case.kernels[kernel]
    case.check(fresh_ranks, shape)
    fresh_ranks.set_epochs(kernel, 2**32 - 4)
    for turn in range(12):
        drawn, at = case.draw(fresh_ranks, shape, seed=turn), fresh_ranks.calls_of(kernel)
        found = case.call(fresh_ranks, case.place(fresh_ranks, drawn))
        fresh_ranks.communicator.synchronize()
        assert_bits(found, case.expected(drawn, at), f"call {turn}")
    assert fresh_ranks.calls_of(kernel) == 8
