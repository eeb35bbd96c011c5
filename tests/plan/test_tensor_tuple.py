"""All-gathers of several tensors: their kernels, what ranks compare, and what a launch is given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from graphar.numerics.dtypes import BYTE
from graphar.plan import select
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.policy import Chip
from graphar.plan.select import Facts, kernel_of
from graphar.plan.slices import slices
from graphar.plan.tables import shipped_table
from graphar.plan.tensor_tuple import MAX_TENSORS, TensorTuple
from graphar.ranks.rendezvous import Alone
from graphar.runtime import catalogue, compiler, runner

FLAGGED, PUSH = Algorithm.ALLGATHER_FLAGGED, Algorithm.ALLGATHER_PUSH
FP8 = torch.float8_e4m3fn
# Rows of 7 FP8 elements, and 3 fp32 scales for each.
FORM = TensorTuple((FP8, torch.float32), ((7,), (1, 3)), (3, 0, 2, 1))
FACTS = Facts(4, shipped_table("nvidia_h200"), Chip(132, "sm_90a"))


def call_of(form):
    return Call("allgather", form.part_nbytes, BYTE, 0, epilogue=form)


def test_every_tensor_has_whole_packs_in_a_part():
    assert FORM.row_nbytes == (7, 12)
    assert FORM.part_nbytes == (32 + 48, 0, 16 + 32, 16 + 16)


def test_ranks_compare_every_dtype_every_shape_and_all_sizes():
    agreed = f"allgather of ({FP8} [*, 7], torch.float32 [*, 1, 3]), sizes [3, 0, 2, 1]"

    assert call_of(FORM).agreed == agreed
    unlike = (
        replace(FORM, dtypes=(torch.uint8, torch.float32)),
        replace(FORM, rows=((7,), (3, 1))),
        replace(FORM, rows=((7,), (3,))),
        replace(FORM, sizes=(3, 0, 1, 2)),
        TensorTuple(FORM.dtypes[:1], FORM.rows[:1], FORM.sizes),
    )
    assert len({agreed, *(call_of(one).agreed for one in unlike)}) == 1 + len(unlike)


@pytest.mark.parametrize(
    ("rows", "algorithm"), [(1, FLAGGED), (31, FLAGGED), (32, PUSH), (4096, PUSH)]
)  # 256 KB of a part are 31 rows and 248 bytes
def test_its_kernel_is_that_of_a_tensor_of_all_bytes(rows, algorithm):
    form = TensorTuple((FP8, torch.float32), ((8192,), (64,)), (rows, 0, rows, 1))

    shape, _ = select.select(call_of(form), FACTS)

    assert shape.algorithm is algorithm
    assert shape == replace(select.select(call_of(form)._replace(epilogue=None), FACTS).shape, epilogue=form)
    source = catalogue.source_of(kernel_of(shape, BYTE), 4)
    assert source.name == f"{algorithm.value}<byte, 4, TupleArguments>"


def test_its_kernels_are_prepared_by_a_name_of_their_own():
    kernels = [
        one._replace(epilogue=one.epilogue.kernel)
        for one in select.needed_kernels(FACTS, ["allgather_tuple"], (), None)
    ]

    assert kernels == [select.Kernel(one, BYTE, epilogue="TupleArguments") for one in (FLAGGED, PUSH)]


def test_a_launch_has_the_tensors_that_the_kernels_have_room_for():
    text = (compiler.source_directory() / "device/arguments.cuh").read_text()

    assert f"constexpr int max_tensors = {MAX_TENSORS};" in text


def test_a_launch_is_given_every_tensor_and_the_rows_of_every_rank(monkeypatch):
    made = []
    monkeypatch.setattr(runner.launcher, "can_overlap", lambda device: True)
    monkeypatch.setattr(runner, "Launch", lambda function, parameters, grid: None)
    monkeypatch.setattr(runner.Runner, "bind_member", lambda self, *bound: made.append(bound))
    one = runner.Runner.__new__(runner.Runner)
    one.world_size, one.members = 4, [SimpleNamespace(rank=1, device=0, abort=0, record_pointer=0)]
    one._agreed, one._rendezvous, one.symmetric = {}, Alone(), None
    one._regions = {FLAGGED: SimpleNamespace(pointers=[0x1000] * 4, multicast_pointer=0)}
    one._functions = {(FLAGGED, BYTE, False, "TupleArguments"): [None]}
    call = call_of(FORM)
    shape, _ = select.select(call, FACTS)

    one.bind(shape, slices(FLAGGED, 4, call.counts, 1), BYTE, timeout_s=1.0, agreed=call.agreed)

    ((_, _, arguments, fill),) = made
    assert list(arguments.count) == [*FORM.part_nbytes, 0, 0, 0, 0]
    assert list(arguments.row_nbytes) == [7, 12, 0, 0]
    assert list(arguments.rows) == [3, 0, 2, 1, 0, 0, 0, 0]
    assert list(arguments.first_row) == [0, 3, 3, 5, 0, 0, 0, 0]
    assert list(one._agreed.values()) == [
        f"{call.agreed} by allgather_flagged in {shape.blocks} blocks of {shape.threads} threads"
    ]
    xs, outs = [torch.empty(2), torch.empty(3)], [torch.empty(4), torch.empty(5)]
    fill(arguments, xs[0], outs[0], (xs, outs))
    assert list(arguments.inputs) == [*(x.data_ptr() for x in xs), 0, 0]
    assert list(arguments.outputs) == [*(out.data_ptr() for out in outs), 0, 0]
