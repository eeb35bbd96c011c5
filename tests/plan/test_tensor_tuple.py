"""All-gathers of several tensors: their kernels, what ranks compare, and what a launch is given."""

from types import SimpleNamespace

import pytest
import torch

from graphar.numerics.dtypes import BYTE
from graphar.plan import select
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import Kernel, kernel_of
from graphar.plan.policy import Chip
from graphar.plan.select import Facts
from graphar.plan.tables import shipped_table
from graphar.plan.work import Parts, TensorTuple
from graphar.ranks import agreement
from graphar.runtime import catalogue
from graphar.runtime.bind import collective
from tests.plan.test_parts import rank_one_of_four

FLAGGED, PUSH = Algorithm.ALLGATHER_FLAGGED, Algorithm.ALLGATHER_PUSH
FP8 = torch.float8_e4m3fn
# Rows of 7 FP8 elements, and 3 fp32 scales for each.
WORK = TensorTuple((FP8, torch.float32), ((7,), (1, 3)), (3, 0, 2, 1))
FACTS = Facts(4, shipped_table("nvidia_h200"), Chip(132, "sm_90a"))


def call_of(work):
    return Call(work, BYTE, 0)


def words_of(work):
    return agreement.words(call_of(work))


def test_every_tensor_has_whole_packs_in_a_part():
    assert WORK.row_nbytes == (7, 12)
    assert WORK.parts == (32 + 48, 0, 16 + 32, 16 + 16)


def test_ranks_compare_every_dtype_every_shape_and_all_sizes():
    assert words_of(WORK) == f"allgather of ({FP8} [*, 7], torch.float32 [*, 1, 3]), sizes [3, 0, 2, 1]"


@pytest.mark.parametrize(
    ("rows", "algorithm"), [(1, FLAGGED), (31, FLAGGED), (32, PUSH), (4096, PUSH)]
)  # 256 KB of a part are 31 rows and 248 bytes
def test_its_kernel_is_that_of_a_tensor_of_all_bytes(rows, algorithm):
    work = TensorTuple((FP8, torch.float32), ((8192,), (64,)), (rows, 0, rows, 1))

    config, _ = select.select(call_of(work), FACTS)

    assert config.algorithm is algorithm
    assert config == select.select(call_of(Parts("allgather", work.parts)), FACTS).config
    source = catalogue.source_of(kernel_of(config, call_of(work)), 4)
    assert source.name == f"{algorithm.value}<byte, 4, TupleArguments>"


def test_its_kernels_are_prepared_by_a_name_of_their_own():
    kernels = list(select.needed_kernels(FACTS, ["allgather_tuple"], (), None))

    assert kernels == [Kernel(one, BYTE, template="TupleArguments") for one in (FLAGGED, PUSH)]


def test_a_launch_is_given_every_tensor_and_the_rows_of_every_rank(monkeypatch):
    made, published, call = [], {}, call_of(WORK)
    rendezvous = SimpleNamespace(publish=published.__setitem__)
    engine = rank_one_of_four(monkeypatch, FLAGGED, lambda runner, *bound: made.append(bound), rendezvous)
    config, reason = select.select(call, FACTS)
    monkeypatch.setattr(collective, "plan_of_slices", lambda *_: collective.Plan(None, config))
    engine.select = lambda call, x: (config, reason)

    collective.bind_tuple(engine, call, [Operands((torch.empty(2),), ())])

    ((_, _, arguments, put),) = made
    assert list(arguments.count) == [*WORK.parts, 0, 0, 0, 0]
    assert list(arguments.row_nbytes) == [7, 12, 0, 0]
    assert list(arguments.rows) == [3, 0, 2, 1, 0, 0, 0, 0]
    assert list(arguments.first_row) == [0, 3, 3, 5, 0, 0, 0, 0]
    assert list(published.values()) == [
        f"{words_of(WORK)} by allgather_flagged in {config.blocks} blocks of {config.threads} threads"
    ]
    xs, outs = (torch.empty(2), torch.empty(3)), (torch.empty(4), torch.empty(5))
    put(xs, outs, (), None)
    assert list(arguments.inputs) == [*(x.data_ptr() for x in xs), 0, 0]
    assert list(arguments.outputs) == [*(out.data_ptr() for out in outs), 0, 0]
