"""How all-gathers and matmuls overlap, and what the kernel in tiles is given."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.numerics.partitions import split
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.policy import AllgatherMatmulPolicy
from graphar.plan.scratch import PACK_NBYTES, SIGNAL_PAD_NBYTES, gathered_flags
from graphar.plan.slices import gathered_rows_a_launch
from graphar.plan.tables import shipped_table
from graphar.plan.work import ALLGATHER_MATMUL, FACTORS, Product
from graphar.product.fused import fused_launches
from graphar.product.gemm import layout_of
from graphar.product.operands import MatmulOperands
from graphar.product.products import gathering_method
from graphar.product.tensor_maps import matrix_of
from tests.plan.test_tiles import Ranks

H200 = shipped_table("nvidia_h200")
FROM_1024 = replace(H200, allgather_matmul=AllgatherMatmulPolicy({4: 2048}, {4: 1024}))
engine = partial(Ranks, table=FROM_1024)


def method_of(engine, partition="auto", rows=4096, k=64, dtype=torch.bfloat16, is_cuda=True, epilogue=None):
    """How rows of all ranks, of ``k`` elements, are gathered and multiplied."""
    counts = tuple(split(rows, engine.world_size))
    call = Call(Product(ALLGATHER_MATMUL, counts, k, epilogue=epilogue, partition=partition), dtype, 0)
    return gathering_method(engine, call, SimpleNamespace(dtype=dtype, is_cuda=is_cuda))


@pytest.mark.parametrize(
    ("rows", "world_size", "method"),
    [(1023, 4, "none"), (1024, 4, "tiles"), (2047, 4, "tiles"), (2048, 4, "chunks"), (1 << 20, 2, "none")],
)
def test_auto_goes_by_the_table(rows, world_size, method):
    assert method_of(engine(world_size=world_size), rows=rows) == method


@pytest.mark.parametrize("name", ["default", "nvidia_h200"])
def test_the_shipped_tables_take_tiles_between_two_ranks_and_nothing_that_was_not_measured(name):
    taken = {n: method_of(engine(n, table=shipped_table(name)), rows=1024) for n in range(2, 9)}
    assert taken == {2: "tiles"} | dict.fromkeys(range(3, 9), "none")
    assert method_of(engine(2, table=shipped_table(name)), rows=1023) == "none"


@pytest.mark.parametrize(
    ("what", "of_engine", "of_rows"),
    [
        ("on the CPU", {}, {"is_cuda": False}),
        ("fp32", {}, {"dtype": torch.float32}),
        ("nothing to multiply", {}, {"k": 0}),
        ("rows longer than the scratch", {}, {"k": 1 << 25}),
        ("no peer access", {"no_kernel": "no peer access"}, {}),
    ],
)
def test_rows_that_cannot_be_sent_to_scratch_are_gathered_first(what, of_engine, of_rows):
    for partition in ("auto", "tiles", "chunks"):
        assert method_of(engine(**of_engine), partition, **of_rows) == "none", what


def test_without_wgmma_there_are_no_tiles():
    assert method_of(engine(arch="sm_100a"), "tiles") == "none"
    assert method_of(engine(arch="sm_100a"), rows=1024) == "none"
    assert method_of(engine(arch="sm_100a"), "chunks") == "chunks"


def test_chunks_have_no_epilogue_and_auto_takes_tiles_for_one_at_every_size():
    epilogue = form_to_prepare("-v")

    assert method_of(engine(), "chunks", epilogue=epilogue) == "none"
    assert method_of(engine(), "tiles", epilogue=epilogue) == "tiles"
    assert method_of(engine(), "none", epilogue=epilogue) == "none"
    for rows in (1, 4096):
        assert method_of(engine(table=H200), "auto", rows, epilogue=epilogue) == "tiles"
        assert method_of(engine(arch="sm_100a"), "auto", rows, epilogue=epilogue) == "none"


def test_a_named_partition_is_taken_at_every_size():
    for partition in ("tiles", "chunks"):
        assert method_of(engine(table=H200), partition, rows=1) == partition
    assert method_of(engine(), "none", rows=1 << 20) == "none"


ROWS = torch.randn(6, 16).bfloat16()


def place(own):
    """Returns one rank's operands as the kernel takes them."""
    call = Call(Product(ALLGATHER_MATMUL, (3,) * 4, own.a.shape[1]), torch.bfloat16, 0)
    return fused_launches(engine(), call, Algorithm.ALLGATHER_MATMUL)._place(own)


def placed(a, w=None):
    k = a.shape[1]
    w = torch.randn(8, k).bfloat16() if w is None else w
    out, whole = torch.empty(12, 8).bfloat16(), torch.empty(12, k).bfloat16()
    one = MatmulOperands(a, w, None, out, whole)
    return one, place(one)


def test_operands_that_lie_well_are_not_copied():
    one, found = placed(ROWS)

    assert found is one


@pytest.mark.parametrize("a", [ROWS[:, 1:], ROWS[:, :7], ROWS[:, ::2], ROWS[:, :8], torch.randn(5, 6).bfloat16().t()])
def test_rows_are_sent_without_gaps_and_in_whole_packs(a):
    _, found = placed(a)

    assert torch.equal(found.a, a)
    assert found.a.stride() == (-(-a.shape[1] // 8) * 8, 1)
    assert found.a.data_ptr() % PACK_NBYTES == 0
    assert found.gathered.shape == (12, a.shape[1])
    assert found.gathered.stride() == found.a.stride()


def test_a_weight_that_lies_badly_is_copied():
    w = torch.randn(8, 32).bfloat16()[:, ::2]

    _, found = placed(ROWS, w)

    assert layout_of(found.w)
    assert torch.equal(found.w, w)


@pytest.mark.parametrize("n", [0, 1, 12])
def test_a_result_whose_rows_tma_cannot_store_is_written_elsewhere_first(n):
    w, out = torch.randn(n, 16).bfloat16(), torch.empty(12, n).bfloat16()

    found = place(MatmulOperands(ROWS, w, None, out))

    assert found.out is not out
    assert len(found.w) == found.out.shape[1] == (n or 8)
    assert matrix_of(found.out)
    assert found.gathered is None


def test_for_a_rank_without_columns_an_epilogue_reads_zeros_where_its_tensors_are_empty():
    w, out, whole = torch.empty(0, 16).bfloat16(), torch.empty(12, 0).bfloat16(), torch.ones(12)
    tensors = (torch.empty(0), torch.empty(0), whole)

    found = place(MatmulOperands(ROWS, w, None, out, tensors=tensors))

    *empty, rows = found.tensors
    assert [torch.equal(one, torch.zeros(found.out.numel())) for one in empty] == [True, True]
    assert rows is whole


LINE_OF_COUNTS_NBYTES = 128
SCALES_OF_ROW = {"": lambda k: 0, "rows": lambda k: 1, "blocks": lambda k: -(-k // 128)}


@pytest.mark.parametrize("scales", SCALES_OF_ROW)
@pytest.mark.parametrize("k", [8, 16, 1000, 8192, 100_000])
@pytest.mark.parametrize("world_size", range(2, 9))
def test_the_rows_of_a_launch_their_flags_and_scales_fit_the_scratch(world_size, k, scales):
    scratch, row_packs = Algorithm.ALLGATHER_MATMUL.row.scratch(world_size), -(-k // (16 if scales else 8))
    rows = gathered_rows_a_launch(world_size, k, FACTORS[scales])
    unit_rows = max(1024 // row_packs, 1)

    assert rows > 0
    assert rows * (row_packs * PACK_NBYTES + 4 * SCALES_OF_ROW[scales](k)) <= scratch.capacity * PACK_NBYTES
    assert -(-rows // unit_rows) <= gathered_flags(scratch.capacity)
    slots = (world_size - 1) * (4 * gathered_flags(scratch.capacity) + scratch.capacity * PACK_NBYTES)
    assert SIGNAL_PAD_NBYTES + LINE_OF_COUNTS_NBYTES + slots == scratch.nbytes
