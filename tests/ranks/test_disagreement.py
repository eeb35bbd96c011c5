"""Ranks that make different calls: every rank gets an error that names each rank's call, and no data."""

import re

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import CommunicatorError
from tests.cases import normal
from tests.ops import specified as by
from tests.ops.conformance import BY_OP, SCALED
from tests.processes import on_ranks, run_ranks

F32, I32 = torch.float32, torch.int32


def vector(count=6, dtype=F32):
    return torch.arange(count).to(dtype)


INVARIANT = {"partition": "tp_invariant"}
LOGITS = normal(5, 5 * 64, F32).view(5, 64), torch.zeros(5, dtype=torch.int64)


def prepare(*given, **options):
    with graphar.Communicator(timeout_s=20) as communicator:
        communicator.prepare(*given, **options)


def stochastic():
    """A codec whose seeds differ between ranks, as they may."""
    return graphar.Codec(2, rounding="stochastic", seed=dist.get_rank())


CODED = "codec bits={}, bucket_size=32, rounding={}, scheme=absmax, scale_dtype=bfloat16"
# What rank 0 calls, and what rank 1 does; then words, and how often both ranks are told them.
UNLIKE = {
    "ops": (
        lambda: graphar.reducescatter(torch.ones(8)),
        lambda: graphar.allreduce(torch.ones(8)),
        {
            "reducescatter of parts of [4, 4] elements of torch.float32 on the CPU, call ": 1,
            "allreduce of [8] torch.float32 on the CPU, call ": 1,
        },
    ),
    "shapes": (
        lambda: graphar.allreduce(torch.ones(2, 4)),
        lambda: graphar.allreduce(torch.ones(4, 2)),
        {"allreduce of [2, 4] torch.float32 on": 1, "allreduce of [4, 2] torch.float32 on": 1},
    ),
    "axes": (
        lambda: graphar.reducescatter(torch.ones(6, 4), axis=0),
        lambda: graphar.reducescatter(torch.ones(4, 6), axis=1),
        {"of parts of [12, 12] elements of torch.float32 in rows of [4]": 2, " in rows of [4] along axis 1 on": 1},
    ),
    "codecs": (
        lambda: graphar.allreduce(torch.ones(6), codec="int4"),
        lambda: graphar.allreduce(torch.ones(6), codec=stochastic()),
        {CODED.format(4, "nearest") + " on": 1, CODED.format(2, "stochastic") + " on": 1},
    ),
    "what is prepared": (
        lambda: prepare([torch.float16], max_nbytes=64),
        lambda: prepare(iter([torch.float16]), codecs=[stochastic()]),
        {
            "prepare of ['allreduce'] for [torch.float16], max_nbytes ": 2,
            f"max_nbytes None, codecs ['{CODED.format(2, 'stochastic').removeprefix('codec ')}']": 1,
        },
    ),
    "epilogues of parts": (
        lambda: graphar.reducescatter(vector(), epilogue="v + 1"),
        lambda: graphar.reducescatter(vector(), epilogue="v"),
        {"parts of ": 2, "epilogue v": 2},
    ),
    "epilogues of gathered rows": (
        lambda: graphar.fused_allgather_matmul(torch.ones(2, 3), torch.ones(4, 3), epilogue="v + 1"),
        lambda: graphar.fused_allgather_matmul(torch.ones(2, 3), torch.ones(4, 3), epilogue="v"),
        {"followed by epilogue v": 2},
    ),
    "an epilogue of gathered rows and none": (
        lambda: graphar.fused_allgather_matmul(torch.ones(2, 3), torch.ones(4, 3), epilogue="v"),
        lambda: graphar.fused_allgather_matmul(torch.ones(2, 3), torch.ones(4, 3)),
    ),
    "parts that are gathered": (lambda: graphar.allgather(vector(2)), lambda: graphar.allgather(vector(1))),
    "columns of a tuple": (
        lambda: graphar.allgather((torch.ones(2, 8), torch.ones(2, 1))),
        lambda: graphar.allgather((torch.ones(2, 8), torch.ones(2, 2))),
    ),
    "a tuple and a tensor": (
        lambda: graphar.allgather((torch.ones(2, 8), torch.ones(2, 1))),
        lambda: graphar.allgather(torch.ones(2, 8)),
    ),
    "matmuls": (
        lambda: graphar.fused_matmul_allreduce(torch.ones(2, 3), torch.ones(4, 3)),
        lambda: graphar.fused_matmul_allreduce(torch.ones(2, 3), torch.ones(8, 3)),
    ),
    "norms": (
        lambda: graphar.allreduce_residual_rmsnorm(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)),
        lambda: graphar.allreduce_residual_rmsnorm(torch.ones(1, 8), torch.ones(1, 8), torch.ones(8)),
    ),
    "norms of parts": (
        lambda: graphar.reducescatter_residual_rmsnorm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8)),
        lambda: graphar.reducescatter_residual_rmsnorm(torch.ones(4, 8), torch.ones(2, 8), torch.ones(8)),
    ),
    "columns of leaves": (
        lambda: graphar.fused_matmul_allreduce(torch.ones(8, 16), torch.ones(8, 16), **INVARIANT),
        lambda: graphar.fused_matmul_allreduce(torch.ones(8, 32), torch.ones(8, 32), **INVARIANT),
        {"after products of 16 columns": 1, "after products of 32 columns": 1},
    ),
    "results of scaled products": (
        lambda: scaled(graphar.fused_matmul_allreduce, "rows", out_dtype=torch.bfloat16),
        lambda: scaled(graphar.fused_matmul_allreduce, "rows", out_dtype=torch.float16),
        {"torch.bfloat16": 1, "torch.float16": 1},
    ),
    "smoothed labels": (
        lambda: graphar.cross_entropy(*LOGITS),
        lambda: graphar.cross_entropy(*LOGITS, label_smoothing=0.1),
        {"cross_entropy": 2, "label_smoothing 0.1": 1},
    ),
    "a loss and log-probabilities": (
        lambda: graphar.cross_entropy(*LOGITS),
        lambda: graphar.log_probs(*LOGITS),
        {"vocabulary of 128": 2, "cross_entropy": 1, "log_probs": 2},
    ),
} | {
    f"scales of {form.op.__name__}": (
        lambda op=form.op: scaled(op, "rows"),
        lambda op=form.op: scaled(op, "blocks"),
        {"e4m3 operands with scales of rows": 1, "e4m3 operands with scales of blocks": 1},
    )
    for form in SCALED
}


def scaled(op, of, **options):
    """A call with this rank's operands in e4m3, with scales of their rows or blocks."""
    plain = next(one for one in BY_OP[op] if not one.label)
    given = by.scaled(of, plain.make, 2, (24, 136, 256), torch.bfloat16, normal)
    return op(**{name: xs[dist.get_rank()] for name, xs in given.items()}, **options)


def tell_what_is_raised(rank, world_size):
    told = []
    for calls in UNLIKE.values():
        with pytest.raises(CommunicatorError) as raised:
            calls[rank]()
        told.append(str(raised.value))
    assert graphar.allreduce(vector(3)).tolist() == [0, 2, 4]  # nothing was sent, so the communicator goes on
    return told


@pytest.mark.promise("Ranks whose calls differ all get an error that says what each called.")
def test_processes_that_call_different_things_are_both_told_and_get_no_data():
    told, same = run_ranks(tell_what_is_raised, 2, timeout_s=60)

    assert told == same
    for (name, (_, _, *words)), message in zip(UNLIKE.items(), told, strict=True):
        calls = re.findall(r"^rank [01]: (.*)$", message, re.MULTILINE)
        assert "ranks must make the same graphar calls in the same order" in message, name
        assert len(set(calls)) == 2, name
        assert ("need sizes=" in message) == (name == "parts that are gathered"), name
        for counts in words:
            assert {word: "\n".join(calls).count(word) for word in counts} == counts, name


@on_ranks(2, timeout_s=60)
def test_uneven_parts_are_gathered_by_their_sizes_or_refused(rank, world_size):
    part = graphar.reducescatter(torch.arange(3.0))
    with pytest.raises(
        CommunicatorError, match=r"rank 0: allgather of parts of \[2, 2\] elements.*\nrank 1: .*\[1, 1\].*\n.*sizes="
    ):
        graphar.allgather(part)
    assert graphar.allgather(part, sizes=[2, 1]).tolist() == [0, 2, 4]


def call_in_another_group(rank, world_size):
    pair, everyone = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if rank == 2:
        return None
    communicator = graphar.Communicator(pair if rank == 0 else everyone, timeout_s=1)
    with pytest.raises(graphar.CollectiveTimeout) as raised:
        communicator.allreduce(torch.ones(3))
    dist.barrier(pair)
    return raised.value.record


def test_a_rank_that_calls_in_another_group_is_told_apart():
    first, second, _ = run_ranks(call_in_another_group, 3)

    called = r"allreduce of \[3\] torch.float32, call 0 over torch.distributed"
    gave_up = r"allreduce call 0, in which it .*"  # what the rank that gives up second reads of the first
    where = r", in another communicator, between ranks {} of the default group"
    said = (first.last_calls[1], where.format(r"\[0, 1, 2\]")), (second.last_calls[0], where.format(r"\[0, 1\]"))
    for told, of in said:
        assert re.match(f"({called}|{gave_up}){of}", told), told
    assert any(re.match(called, told) for told, _ in said), said


@on_ranks(3)
def test_ranks_that_prepare_alike_go_on(rank, world_size):
    with graphar.Communicator(timeout_s=20) as communicator:
        communicator.prepare(codecs=[graphar.Codec(2, rounding="stochastic", seed=rank)])
        assert communicator.allreduce(torch.ones(3)).tolist() == [3.0] * 3
