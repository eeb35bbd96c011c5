"""Messages over gloo: a call that repeats touches no store, and no data is delivered to ranks that disagree."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import CollectiveTimeout, CommunicatorError, reference
from graphar.ranks import rendezvous
from graphar.ranks.cpu import messages, reduction
from graphar.ranks.cpu.messages import SMALL_NBYTES, messages_of
from tests.cases import normal, same_bits
from tests.processes import on_ranks, run_ranks

SMALL, LARGE = 500, SMALL_NBYTES  # elements: behind a header, and in messages of their own
SHORT_S = 0.5


def ones(*shape):
    return torch.ones(shape)


CALLS = {
    "a small sum": lambda world_size: graphar.allreduce(ones(SMALL)),
    "a large sum": lambda world_size: graphar.allreduce(ones(LARGE)),
    "integers": lambda world_size: graphar.allreduce(torch.ones(SMALL, dtype=torch.int64)),
    "a codec": lambda world_size: graphar.allreduce(ones(SMALL), codec="int8"),
    "an epilogue": lambda world_size: graphar.allreduce(ones(SMALL), epilogue="v + 1"),
    "reducescatter": lambda world_size: graphar.reducescatter(ones(SMALL)),
    "allgather": lambda world_size: graphar.allgather(ones(SMALL)),
    "large parts": lambda world_size: graphar.allgather(ones(LARGE)),
    "a tuple": lambda world_size: graphar.allgather((ones(2, 8), ones(2, 1))),
    "a matmul": lambda world_size: graphar.fused_matmul_allreduce(ones(2, 3), ones(4, 3)),
    "a norm": lambda world_size: graphar.allreduce_residual_rmsnorm(ones(2, 8), ones(2, 8), ones(8)),
    "hierarchical": lambda world_size: graphar.allreduce(ones(SMALL), algorithm="hierarchical"),
}


class CountedStore:
    """A rendezvous' way to the store, with a count of the questions."""

    def __init__(self):
        self.questions, ask = 0, rendezvous.StoreRendezvous._ask

        def counted(this, question):
            self.questions += 1
            return ask(this, question)

        rendezvous.StoreRendezvous._ask = counted


@on_ranks(2)
def test_a_call_that_repeats_touches_no_store(rank, world_size):
    store, counts = CountedStore(), {}
    for name, call in CALLS.items():
        call(world_size)
        before = store.questions
        for _ in range(3):
            call(world_size)
        counts[name] = store.questions - before
    asked = store.questions > 0
    assert asked
    assert counts == dict.fromkeys(CALLS, 0)


@on_ranks(2, backend="cpu:graphar")
def test_neither_does_a_call_of_torchs_that_goes_to_the_backend(rank, world_size):
    x, store = torch.ones(SMALL), CountedStore()
    dist.all_reduce(x)
    before = store.questions
    for _ in range(3):
        dist.all_reduce(x)
        dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True).wait()
        dist.all_gather_into_tensor(torch.empty(world_size * SMALL), x)
    assert (before > 0, store.questions - before) == (True, 0)


def into(out, call, **options):
    call(torch.ones_like(out), out=out, **options)


# What ranks 0 and 1 do with a tensor of as many elements.
UNLIKE = {
    "an epilogue": (lambda x: into(x, graphar.allreduce, epilogue="v + 1"), lambda x: into(x, graphar.allreduce)),
    "a codec": (lambda x: into(x, graphar.allreduce, codec="int8"), lambda x: into(x, graphar.allreduce)),
    "a dtype": (lambda x: into(x.view(torch.int32), graphar.allreduce), lambda x: into(x, graphar.allreduce)),
    "a size": (lambda x: into(x[1:], graphar.allreduce), lambda x: into(x, graphar.allreduce)),
    "one that is small": (lambda x: into(x[:5], graphar.allreduce), lambda x: into(x, graphar.allreduce)),
    "a place": (
        lambda x: graphar.allreduce(x[: len(x) // 2], out=x[: len(x) // 2]),
        lambda x: graphar.allreduce(x, out=x),
    ),
    "an algorithm": (
        lambda x: into(x, graphar.allreduce, algorithm="hierarchical"),
        lambda x: into(x, graphar.allreduce),
    ),
    "an op": (lambda x: graphar.allgather(x), lambda x: into(x, graphar.allreduce)),
    "a part": (lambda x: graphar.reducescatter(x), lambda x: into(x, graphar.allreduce)),
}


@pytest.mark.promise("Ranks whose calls differ all get an error that says what each called.")
@pytest.mark.parametrize("numel", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_ranks_that_disagree_are_told_and_get_no_data_and_go_on(rank, world_size, numel):
    x = normal(rank, numel, torch.float32)
    graphar.allreduce(ones(3))
    graphar.allreduce(ones(3), algorithm="hierarchical")
    changed = {}
    for name, calls in UNLIKE.items():
        mine = x.clone()
        with pytest.raises(CommunicatorError, match=r"the same order, got\nrank 0: \w+.*\nrank 1: \w+"):
            calls[min(rank, 1)](mine)
        changed[name] = same_bits(mine, x)
    exact = graphar.allreduce(x)
    wrong = same_bits(exact, reference.allreduce([normal(one, numel, torch.float32) for one in range(world_size)]))
    assert changed == dict.fromkeys(UNLIKE, 0)
    assert wrong == 0


@on_ranks(2)
def test_a_set_up_beside_a_call_is_told_at_once_too(rank, world_size):
    graphar.allreduce(ones(3))
    with pytest.raises(CommunicatorError, match=r"rank 0: finding hosts\nrank 1: allreduce of \[3\]"):
        graphar.allreduce(ones(3), algorithm="auto" if rank else "hierarchical")


@on_ranks(2, backend="cpu:graphar")
def test_calls_of_torchs_that_disagree_change_nothing(rank, world_size):
    x, told = torch.full((SMALL,), float(rank)), 0
    dist.all_reduce(x.clone())
    unlike = [
        (lambda: dist.all_reduce(x[1:]), lambda: dist.all_reduce(x)),
        (lambda: dist.all_reduce(x, op=dist.ReduceOp.AVG), lambda: dist.all_reduce(x)),
        (lambda: dist.all_gather([x, x], x.clone()), lambda: dist.all_reduce(x)),
    ]
    for calls in unlike:
        with pytest.raises(CommunicatorError, match=r"rank 0: .*\nrank 1: "):
            calls[rank]()
        told += x.eq(rank).all().item()
    dist.all_reduce(x)
    assert (told, x.eq(1).all().item()) == (3, True)


def stay_away_from_a_later_call(rank, world_size, numel):
    x = ones(numel)
    graphar.allreduce(x)
    graphar.allreduce(x[1:])
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["gave up 0", "gave up 2"])
        return None
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeout) as raised:
        graphar.allreduce(x, timeout_s=SHORT_S)
    took_s = time.monotonic() - begin
    store.set(f"gave up {rank}", "")
    return raised.value.record.peer, raised.value.record.last_calls, took_s


@pytest.mark.parametrize("numel", [SMALL, LARGE], ids=["small", "large"])
def test_a_rank_that_misses_a_later_call_is_named_with_the_one_before(numel):
    first, _, last = run_ranks(stay_away_from_a_later_call, 3, numel)

    before, called = (f"allreduce of [{count}] torch.float32" for count in (numel - 1, numel))
    for rank, (peer, said, took_s) in ((0, first), (2, last)):
        assert peer == 1
        assert said[1] == f"{before}, call 1 over torch.distributed"
        assert said[rank] == f"{called}, call 2 over torch.distributed"
        assert SHORT_S <= took_s < 10


@on_ranks(2)
def test_a_deadline_is_for_each_wait_not_for_all_of_a_large_sum(rank, world_size):
    x, add = ones(LARGE), reduction.sum_into

    def add_slowly(target, parts):
        time.sleep(0.1)
        add(target, parts)

    messages.Messages.two_shot_nbytes, reduction.sum_into = x.nbytes // 16, add_slowly
    begin = time.monotonic()
    summed = graphar.allreduce(x, timeout_s=1.0)
    assert (summed.unique().tolist(), time.monotonic() - begin > 1.0) == ([2.0], True)


def call_with_the_shortest_deadline(rank, world_size, names):
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in names]
    store, took_s = dist.distributed_c10d._get_default_store(), []
    for name, group in zip(names, groups, strict=True):
        SHORTEST[name](group, None)
        if rank == 0:
            begin = time.monotonic()
            with pytest.raises(
                CollectiveTimeout, match=r"rank\(s\) \[1\] failed, or did not take part within 0.0004 s"
            ):
                SHORTEST[name](group, 0.0004)
            took_s.append(time.monotonic() - begin)
            store.set(f"gave up {name}", "")
        store.wait([f"gave up {name}"])
    return took_s


SHORTEST = {
    "a small sum": lambda group, timeout_s: graphar.allreduce(ones(SMALL), group, timeout_s=timeout_s),
    "a large sum": lambda group, timeout_s: graphar.allreduce(ones(LARGE), group, timeout_s=timeout_s),
    "a codec": lambda group, timeout_s: graphar.allreduce(ones(SMALL), group, codec="int8", timeout_s=timeout_s),
    "parts": lambda group, timeout_s: graphar.reducescatter(ones(SMALL), group, timeout_s=timeout_s),
    "large parts": lambda group, timeout_s: graphar.allgather(ones(LARGE), group, timeout_s=timeout_s),
}


def test_a_deadline_below_a_millisecond_is_one():
    took_s, _ = run_ranks(call_with_the_shortest_deadline, 2, list(SHORTEST))

    assert len(took_s) == len(SHORTEST)
    assert max(took_s) < 10


@on_ranks(2)
def test_messages_of_two_communicators_of_a_group_are_told_apart(rank, world_size):
    communicators, xs = [graphar.Communicator() for _ in range(2)], [ones(SMALL), 2 * ones(LARGE)]
    found = {}

    def call(at):
        found[at] = [communicators[at].allreduce(xs[at]).unique().tolist() for _ in range(50)]

    for one in range(2):
        call(one)
    threads = [threading.Thread(target=call, args=(at,)) for at in ((0, 1) if rank else (1, 0))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    expected = {0: [[2.0]] * 50, 1: [[4.0]] * 50}
    assert found == expected


class NoGloo:
    """Stands in for a process group of another backend."""

    def __init__(self, backend):
        self._backend = backend

    def _get_backend(self, device):
        if self._backend is None:
            raise RuntimeError("no backend for cpu")
        return self._backend


@pytest.mark.parametrize("backend", [None, object()], ids=["none", "another"])
def test_a_group_without_gloo_has_no_messages(backend):
    assert messages_of(NoGloo(backend), "a communicator") is None


@on_ranks(2)
def test_a_first_call_in_inference_mode_leaves_later_ones_be(rank, world_size):
    with torch.inference_mode():
        first = graphar.allreduce(ones(3)).tolist()
    assert (first, graphar.allreduce(ones(3)).tolist()) == ([2.0] * 3, [2.0] * 3)


@on_ranks(2)
def test_calls_on_the_cpu_take_the_fast_path_and_have_results_of_their_own(rank, world_size):
    x, y = ones(SMALL), 2 * ones(SMALL)
    with graphar.Communicator() as communicator:
        found = [communicator.allreduce(one) for one in (x, x, x, y)]
        repeats = len(set(map(id, communicator.engine.plans.repeats.values())))
        found.append(communicator.allreduce(x, out=y))
        part = [communicator.reducescatter(ones(SMALL))[0].item() for _ in range(4)]
    with pytest.raises(CommunicatorError, match="closed"):
        communicator.allreduce(x)
    addresses = {one.data_ptr() for one in (*found, x)}
    values = [[2.0], [2.0], [2.0], [4.0], [2.0]]
    assert (repeats, [one.unique().tolist() for one in found], len(addresses), found[-1] is y, part) == (
        1,
        values,
        6,
        True,
        [2.0] * 4,
    )
