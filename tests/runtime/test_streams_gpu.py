"""Several streams and graphs on one communicator, and several communicators: right, or an error; never a deadlock."""

import contextlib
import gc
import time

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import CollectiveTimeout, ConcurrentCallError
from tests.cases import normal, same_bits
from tests.processes import on_ranks, run_on_gpus
from tests.worlds import GPU_WORLD_SIZES

DTYPE = torch.bfloat16
SMALL, LARGE = 8192, 64 << 20  # one block or so, and one for every SM
TIMEOUT_S = 2.0
PATIENCE_S = 30.0

every_world_size = pytest.mark.parametrize("world_size", GPU_WORLD_SIZES)


class Sum:
    """An all-reduce: this rank's input, and the bits it has to give."""

    def __init__(self, rank: int, world_size: int, numel: int, seed: int) -> None:
        parts = [normal(100 * seed + r, numel, DTYPE).cuda() for r in range(world_size)]
        self.x, self.expected = parts[rank].clone(), graphar.reference.allreduce(parts)

    def check(self, y: torch.Tensor) -> None:
        assert same_bits(y, self.expected) == 0


def captured(call) -> tuple[torch.cuda.CUDAGraph, object]:
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def on(stream, call):
    with torch.cuda.stream(stream):
        return call()


def ends(*communicators) -> bool:
    """Whether all launches ended without an error. Asserts that they end in time, and that torch works afterwards."""
    begin = time.monotonic()
    try:
        for communicator in communicators:
            communicator.synchronize()
        return True
    except (CollectiveTimeout, ConcurrentCallError):
        return False
    finally:
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 5 * TIMEOUT_S
        assert torch.ones(8, device="cuda").sum().item() == 8


def call_in_turn(rank, world_size, numels, turns, at, stream_at, before=lambda turn, stream: None):
    """Sums, of which ``at`` gives each turn's, on the stream of the turn, behind what ``before`` puts there."""
    sums, results = [Sum(rank, world_size, numel, seed) for seed, numel in enumerate(numels)], []
    torch.cuda.synchronize()
    with graphar.Communicator(timeout_s=PATIENCE_S) as communicator:
        for turn in range(turns):
            one, stream = sums[at(turn)], stream_at(turn)
            before(turn, stream)
            results.append((one, on(stream, lambda one=one: communicator.allreduce(one.x))))
        communicator.synchronize()
        for one, y in results:
            one.check(y)


@every_world_size
@pytest.mark.parametrize("on_default", [False, True], ids=["own_stream", "default_stream"])
@on_ranks(by=run_on_gpus)
def test_calls_follow_each_other_though_their_stream_waits_for_another_one_between_them(rank, world_size, on_default):
    stream = torch.cuda.default_stream() if on_default else torch.cuda.Stream()
    other = torch.cuda.Stream()

    def wait(turn, stream):
        if turn % 7 == rank:
            on(stream, lambda: torch.cuda._sleep(1_000_000))
        on(other, lambda: torch.cuda._sleep(50_000))
        stream.wait_stream(other)

    call_in_turn(rank, world_size, (SMALL, 1 << 20), 300, lambda turn: turn % 3 % 2, lambda turn: stream, wait)


@pytest.mark.promise("Streams and graphs of one communicator give right results or an error, never a deadlock.")
@every_world_size
@on_ranks(by=run_on_gpus)
def test_calls_on_two_streams_follow_each_other_though_ranks_are_late(rank, world_size):
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    weight = torch.randn(1024, 1024, dtype=DTYPE, device="cuda")

    def be_busy(turn, stream):
        if turn % 7 == rank:
            on(stream, lambda: torch.cuda._sleep(1_000_000))
        on(stream, lambda: weight @ weight)  # still runs when the call's kernel is queued

    at, stream_at = (lambda turn: turn % 3 % 2), (lambda turn: streams[turn * 7 % 3 % 2])
    call_in_turn(rank, world_size, (SMALL, 1 << 20), 300, at, stream_at, be_busy)


@every_world_size
@on_ranks(by=run_on_gpus)
def test_calls_on_two_branches_of_one_graph_are_right(rank, world_size):
    first, second = (Sum(rank, world_size, 1 << 20, seed) for seed in range(2))
    with graphar.Communicator(timeout_s=PATIENCE_S) as communicator:
        communicator.allreduce(first.x)
        side = torch.cuda.Stream()

        def fork():
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            results = []
            for _ in range(4):
                results.append((first, communicator.allreduce(first.x)))
                results.append((second, on(side, lambda: communicator.allreduce(second.x))))
            main.wait_stream(side)
            return results

        graph, results = captured(fork)
        for _ in range(100):
            graph.replay()
        communicator.synchronize()
        for one, y in results:
            one.check(y)
        communicator.allreduce(first.x)  # and outside once more
        del graph


@pytest.mark.promise("Streams and graphs of one communicator give right results or an error, never a deadlock.")
@every_world_size
@pytest.mark.parametrize("ordered", [True, False])
@on_ranks(by=run_on_gpus)
def test_two_graphs_on_two_streams_end_and_are_right_in_order(rank, world_size, ordered):
    """At once, their results may be wrong: each rank runs them in an order of its own."""
    sums = [Sum(rank, world_size, SMALL, seed) for seed in range(2)]
    communicator = graphar.Communicator(timeout_s=PATIENCE_S)
    communicator.prepare([DTYPE])
    graphs = [captured(lambda one=one: communicator.allreduce(one.x, timeout_s=TIMEOUT_S)) for one in sums]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for turn in range(400):
        if ordered:
            streams[turn % 2].wait_stream(streams[1 - turn % 2])
        on(streams[turn % 2], graphs[turn % 2][0].replay)
    ended = ends(communicator)
    if ordered:
        assert ended
        for one, (_, y) in zip(sums, graphs, strict=True):
            one.check(y)
    graphs.clear()
    communicator.close()
    with graphar.Communicator(timeout_s=PATIENCE_S) as another:
        sums[0].check(another.allreduce(sums[0].x))


@every_world_size
@pytest.mark.parametrize("same_stream", [True, False])
@on_ranks(by=run_on_gpus)
def test_a_graph_and_eager_calls_end_and_are_right_on_one_stream(rank, world_size, same_stream):
    one, other = (Sum(rank, world_size, SMALL, seed) for seed in range(2))
    communicator = graphar.Communicator(timeout_s=PATIENCE_S)
    communicator.prepare([DTYPE])
    graph, y = captured(lambda: communicator.allreduce(one.x, timeout_s=TIMEOUT_S))
    main = torch.cuda.Stream()
    side = main if same_stream else torch.cuda.Stream()
    torch.cuda.synchronize()
    with contextlib.suppress(CollectiveTimeout, ConcurrentCallError):
        for _ in range(200):
            on(main, graph.replay)
            z = on(side, lambda: communicator.allreduce(other.x, timeout_s=TIMEOUT_S))
    ended = ends(communicator)
    if same_stream:
        assert ended
        one.check(y)
        other.check(z)
    del graph
    communicator.close()


@every_world_size
@pytest.mark.parametrize("numel", [SMALL, LARGE], ids=["both fit the GPU", "each fills the GPU"])
@on_ranks(by=run_on_gpus)
def test_two_communicators_in_opposite_orders_end_and_are_right_while_both_fit_the_gpu(rank, world_size, numel):
    """Odd ranks launch the second communicator's call first."""
    sums = [Sum(rank, world_size, numel, seed) for seed in range(2)]
    communicators = [graphar.Communicator(timeout_s=PATIENCE_S) for _ in sums]
    streams = [torch.cuda.Stream() for _ in sums]
    outs = [torch.empty_like(one.x) for one in sums]
    for communicator, one in zip(communicators, sums, strict=True):
        communicator.allreduce(one.x)
        communicator.synchronize()
    dist.barrier(group=dist.new_group(backend="gloo"))
    calls = list(zip(streams, communicators, sums, outs, strict=True))
    with contextlib.suppress(CollectiveTimeout):
        for _ in range(20):
            for stream, communicator, one, out in reversed(calls) if rank % 2 else calls:
                on(stream, lambda c=communicator, one=one, out=out: c.allreduce(one.x, out=out, timeout_s=TIMEOUT_S))
    ended = ends(*communicators)
    if ended:
        for one, out in zip(sums, outs, strict=True):
            one.check(out)
    for communicator in communicators:
        communicator.close()
    assert ended or numel == LARGE
