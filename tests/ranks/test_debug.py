"""Debug mode: if ranks make different calls, all of them get an error, and no call was carried out."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import CollectiveTimeout, CommunicatorError
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.numerics.norms import ALLREDUCE_NORM
from graphar.plan.call import Call
from graphar.plan.work import Norm, Product, Sum
from graphar.ranks import debug
from graphar.ranks.debug import Comparison
from tests.processes import run_ranks

PATIENCE_S = 20.0
SHORT_S = 0.5


def x(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


# ---- mismatches -----------------------------------------------------------------------------------------------------

# For each: what rank 1 calls and what the others do, and how each is described.
MISMATCHES = {
    "op": (
        lambda c: c.reducescatter(x(8)),
        lambda c: c.allreduce(x(8)),
        "reducescatter of [8] torch.float32, axis 0, sizes [3, 3, 2]",
        "allreduce of [8] torch.float32",
    ),
    "shape": (
        lambda c: c.allreduce(x(2, 4)),
        lambda c: c.allreduce(x(4, 2)),
        "allreduce of [2, 4] torch.float32",
        "allreduce of [4, 2] torch.float32",
    ),
    "dtype": (
        lambda c: c.allreduce(x(8, dtype=torch.float16)),
        lambda c: c.allreduce(x(8)),
        "allreduce of [8] torch.float16",
        "allreduce of [8] torch.float32",
    ),
    "algorithm": (
        lambda c: c.allreduce(x(8), algorithm="fallback"),
        lambda c: c.allreduce(x(8), out=torch.empty(8)),
        "allreduce of [8] torch.float32, algorithm fallback",
        "allreduce of [8] torch.float32",
    ),
    "axis": (
        lambda c: c.reducescatter(x(6, 4), axis=0),
        lambda c: c.reducescatter(x(4, 6), axis=1),
        "reducescatter of [6, 4] torch.float32, axis 0, sizes [2, 2, 2]",
        "reducescatter of [4, 6] torch.float32, axis 1, sizes [2, 2, 2]",
    ),
    "codec": (
        lambda c: c.reducescatter(x(6, 4), codec="int4"),
        lambda c: c.reducescatter(x(6, 4), codec=graphar.Codec(2, rounding="stochastic", seed=c.rank)),
        "reducescatter of [6, 4] torch.float32, axis 0, sizes [2, 2, 2], codec int4",
        "reducescatter of [6, 4] torch.float32, axis 0, sizes [2, 2, 2], codec bits=2, bucket_size=32, "
        "rounding=stochastic, scheme=absmax, scale_dtype=bfloat16",
    ),
    "sizes": (
        lambda c: c.allgather(x(3, 2), sizes=[1, 3, 1]),
        lambda c: c.allgather(x(1, 2)),
        "allgather of [*, 2] torch.float32, axis 0, sizes [1, 3, 1]",
        "allgather of [*, 2] torch.float32, axis 0, sizes [1, 1, 1]",
    ),
    "empty": (
        lambda c: c.empty(8),
        lambda c: c.empty(8, dtype=torch.float16),
        "empty of [8] torch.float32",
        "empty of [8] torch.float16",
    ),
    "prepare": (
        lambda c: c.prepare(dtypes=[torch.float16], max_nbytes=64),
        lambda c: c.prepare(iter([torch.float16])),
        "prepare of ['allreduce'] for [torch.float16], max_nbytes 64",
        "prepare of ['allreduce'] for [torch.float16], max_nbytes None",
    ),
    "close": (
        lambda c: c.close(),
        lambda c: c.allreduce(x(8)),
        "close",
        "allreduce of [8] torch.float32",
    ),
}


def call_something_else(rank, world_size, kind):
    """The message of the mismatch. The communicator still works after it."""
    by_rank_one, by_others, *_ = MISMATCHES[kind]
    communicator = graphar.Communicator(timeout_s=PATIENCE_S, debug=True)
    assert communicator.allreduce(x(3)).tolist() == [3.0] * 3
    with pytest.raises(CommunicatorError) as raised:
        (by_rank_one if rank == 1 else by_others)(communicator)
    assert communicator.allreduce(x(3)).tolist() == [3.0] * 3
    communicator.close()
    return str(raised.value)


@pytest.mark.promise("Ranks whose calls differ all get an error that says what each called.")
@pytest.mark.parametrize("kind", MISMATCHES)
def test_every_rank_is_told_what_each_called(kind):
    *_, by_rank_one, by_others = MISMATCHES[kind]
    expected = (
        "ranks must make the same graphar calls in the same order, got\n"
        f"rank 0: call 1, {by_others}\nrank 1: call 1, {by_rank_one}\nrank 2: call 1, {by_others}"
    )

    assert run_ranks(call_something_else, 3, kind) == [expected] * 3


# ---- ranks that do not come -----------------------------------------------------------------------------------------


def call_without_rank_one(rank, world_size):
    store = dist.distributed_c10d._get_default_store()
    communicator = graphar.Communicator(timeout_s=PATIENCE_S, debug=True)
    communicator.allreduce(x(3))
    if rank == 1:
        store.wait(["others are done/0", "others are done/2"])
        return None
    with pytest.raises(CollectiveTimeout) as raised:
        communicator.allgather(x(3), timeout_s=SHORT_S)
    with pytest.raises(CollectiveTimeout):
        communicator.allreduce(x(3))
    store.set(f"others are done/{rank}", "")
    return raised.value


def test_a_rank_that_does_not_come_is_named_with_its_last_call():
    first, _, last = run_ranks(call_without_rank_one, 3)

    for rank, error in ((0, first), (2, last)):
        record = error.record
        assert (record.op, record.sequence, record.rank, record.peer) == ("allgather", 1, rank, 1)
        assert record.last_calls[1] == "allreduce of [3] torch.float32, call 0 over torch.distributed"
        assert record.last_calls[rank] == "call 1, allgather of [*] torch.float32, axis 0, sizes [3, 3, 3]"
        assert f"rank {rank} waited 0.5 s for rank(s) [1]" in str(error)


def test_a_call_says_whether_its_tensor_is_on_a_gpu(monkeypatch):
    """Ranks on GPUs and ranks on the CPU would take different algorithms."""
    said, rendezvous = [], SimpleNamespace(note=lambda call: None, exchange=lambda call, *_: said.append(call))
    ranks = SimpleNamespace(rendezvous=lambda: rendezvous, keeping_failure=contextlib.nullcontext)
    monkeypatch.setattr(debug, "is_capturing", lambda device: False)

    for is_cuda in (False, True):
        tensor = SimpleNamespace(is_cuda=is_cuda, device=torch.device("cuda", 0), shape=(3,), dtype=torch.float32)
        call = Call(Sum(3), torch.float32, 0)
        Comparison(ranks).compare_call(call, tensor, "")

    described = "call 0, allreduce of [3] torch.float32"
    assert said == [described, f"{described}, on a GPU"]


def call_in_another_group(rank, world_size):
    pair, everyone = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if rank == 2:
        return None
    communicator = graphar.Communicator(pair if rank == 0 else everyone, timeout_s=1, debug=True)
    with pytest.raises(CollectiveTimeout) as raised:
        communicator.allreduce(x(3))
    dist.barrier(pair)
    return raised.value.record


def test_a_rank_that_calls_in_another_group_is_told_apart():
    first, second, _ = run_ranks(call_in_another_group, 3)

    call = "call 0, allreduce of [3] torch.float32, in another communicator, between ranks"
    assert first.last_calls[1] == f"{call} [0, 1, 2] of the default group"
    assert second.last_calls[0] == f"{call} [0, 1] of the default group"


# ---- the switch -----------------------------------------------------------------------------------------------------


def mismatch_is_noticed(rank, world_size):
    with graphar.Communicator(timeout_s=PATIENCE_S) as communicator, pytest.raises(CommunicatorError, match="same"):
        communicator.empty(8 + rank)
    return True


@pytest.fixture
def watched():
    """A comparison, and the descriptions that were exchanged before its calls."""
    said = []
    rendezvous = SimpleNamespace(note=lambda call: None, exchange=lambda call, *_: said.append(call.split(", ", 1)[1]))
    ranks = SimpleNamespace(rendezvous=lambda: rendezvous, keeping_failure=contextlib.nullcontext)
    return Comparison(ranks), said


def test_a_call_of_kernels_with_operands_is_compared_as_a_whole(watched):
    (comparison, said), x = watched, torch.empty(3, 4)
    call = Call.of(Norm(ALLREDUCE_NORM, (12,), 4), x)

    comparison.compare_call(call, x, "")

    assert said == [f"{ALLREDUCE_NORM} of [3, 4] torch.float32, 4 columns, eps 1e-06, weight offset 0"]


def test_a_matmul_is_compared_by_what_ranks_have_in_common(watched):
    (comparison, said), a = watched, torch.empty(6, 5)
    name = "fused_matmul_reducescatter"
    works = [
        Product(name, (3, 3), 4, bias=True),
        Product(name, (6,), 4, epilogue=Pointwise("(-v)", (), 4)),
        Product(name, (6,), 4, codec="int8"),
    ]

    for work in works:
        comparison.compare_call(Call.of(work, a), a, "")

    assert said == [
        f"{name} of parts of [3, 3] rows of 4 columns of torch.float32 with a bias",
        f"{name} of parts of [6] rows of 4 columns of torch.float32, epilogue (-v)",
        f"{name} of parts of [6] rows of 4 columns of torch.float32, codec int8",
    ]


def test_the_environment_switches_it_on(monkeypatch):
    monkeypatch.setenv("GRAPHAR_DEBUG", "1")

    assert run_ranks(mismatch_is_noticed, 2) == [True] * 2


def off_by_default(rank, world_size):
    with graphar.Communicator(timeout_s=PATIENCE_S) as plain, graphar.Communicator(debug=False) as other:
        engines = (plain.engine, other.engine)
        return [one.warm is one.plans and one._comparison is None for one in engines]


def test_it_is_off_by_default_and_costs_nothing_then():
    assert run_ranks(off_by_default, 2) == [[True, True]] * 2


def test_one_process_has_nothing_to_compare():
    with graphar.Communicator(devices=["cpu"] * 3, debug=True) as communicator:
        assert communicator.engine._comparison is None
        assert communicator.allreduce([x(3)] * 3)[0].tolist() == [3.0] * 3
        with pytest.raises(ValueError, match="equal shapes"):
            communicator.allreduce([x(3), x(3), x(4)])


# ---- calls that fit -------------------------------------------------------------------------------------------------


def every_call(rank, world_size):
    with graphar.Communicator(timeout_s=PATIENCE_S, debug=True) as c:
        c.prepare(codecs=[graphar.Codec(2, rounding="stochastic", seed=rank)])
        out = c.empty(3, 2)
        results = [c.allreduce(x(3, 2), out=out), c.reducescatter(x(3, 2)), c.allgather(x(rank, 2), sizes=[0, 1, 2])]
        leaf = x(3).requires_grad_()
        c.allreduce(leaf).sum().backward()
        return [*(result.tolist() for result in results), leaf.grad.tolist()]


def test_calls_that_fit_give_what_they_give():
    results = run_ranks(every_call, 3)

    assert [result[0] for result in results] == [[[3.0, 3.0]] * 3] * 3
    assert [result[1] for result in results] == [[[3.0, 3.0]]] * 3
    assert [result[2] for result in results] == [[[1.0, 1.0]] * 3] * 3
    assert [result[3] for result in results] == [[3.0] * 3] * 3
