"""Measures on a rank the host time of eager calls of every public op.

A burst of calls is enqueued without a wait and timed on the host. All calls take turns, burst by burst, so that changes
of the clock affect all of them. Ranks have a GPU each, share one GPU, or run on the CPU.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import graphar
from graphar import reference
from graphar.plan.sizes import MB
from perf.harness import ranks as ranks_of
from perf.harness.cases import Plan
from perf.harness.ranks import ProcessRanks, agreed
from perf.harness.timing import WARM_UP, deciles, time_in_turn
from perf.harness.verify import differs
from perf.peers import catalogue
from perf.report import Deciles, Timing

APART, SHARED, CPU = "a GPU each", "one GPU shared", "CPU"  # where ranks run
SHARE_SWITCH = "GRAPHAR_TEST_SHARE_GPU"
OWN = "graphar"
# All-reduces of other packages, each called as its users call it: from an ordinary tensor where it takes one
PEERS = ("symm_one_shot", "vllm_unregistered", "flashinfer_one_shot", "sglang_one_shot_push")
PEERS_OP = "all_reduce"  # of PEERS and of torch.distributed

ROWS, COLUMNS = 8, 128  # of tensors that are summed or gathered: 2 KB of bf16
FEATURES = 1024  # N and K of matmuls: a row of a product is 2 KB
SUM_LIMIT, MATMUL_LIMIT = 1.5, 2.0  # the most host time of a call / that of a plain all-reduce with as many results
UNTIMED = 2  # calls at the beginning of each burst: the first ones find cold caches
PLAIN, GROUP, ONE_KERNEL = "", "group=", "partition=, one kernel"
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class HostPlan:
    """What is measured, and where. ``calls`` are the timed calls of a burst."""

    place: str
    world_size: int
    calls: int
    bursts: int


@dataclass(frozen=True)
class HostRow(Timing):
    """The measured and verified host time of one op with some of its options.

    Attributes:
        method: OWN, "torch", a backend of torch.distributed, or one of PEERS.
        outputs: the number of tensors that the call returns.
        time_us: the host time of one call. A burst is a repeat.
        of_allreduce: the median / that of a plain all-reduce with as many outputs; None for other methods.
        limit: the most that ``of_allreduce`` may be on GPUs; None if there is no limit.
    """

    method: str
    op: str
    option: str
    outputs: int
    place: str
    world_size: int
    time_us: Deciles
    of_allreduce: float | None
    limit: float | None
    wrong: int

    @property
    def what(self) -> tuple[str, ...]:
        return self.op, self.option or "plain", self.place

    @property
    def is_own(self) -> bool:
        return self.method == OWN

    @property
    def exceeds(self) -> bool:
        """Whether the call takes more host time than its limit allows."""
        return self.limit is not None and self.of_allreduce is not None and self.of_allreduce > self.limit


@dataclass
class Trial:
    """One op with some of its options, called on this rank's tensors.

    Attributes:
        call: a functools.partial of the op.
        expected: what this rank must get. Further results are not compared: they are uninitialised.
        prepare: restores tensors that calls change.
        in_place: the tensor that the call changes, if it returns no result.
        keeps: objects that must live as long as the trial, because its calls use only their addresses.
    """

    method: str
    op: str
    option: str
    call: Callable[[], object]
    expected: Sequence[Tensor]
    limit: float | None = None
    prepare: Callable[[], object] = lambda: None
    in_place: Tensor | None = None
    keeps: object = None

    def results(self) -> tuple[Tensor, ...]:
        self.prepare()
        results = self.call()
        if self.in_place is not None:
            results = self.in_place
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    def burst_us(self, calls: int) -> float:
        """Makes a burst of calls. Returns the host time of one call in microseconds."""
        call = self.call
        for _ in range(UNTIMED):
            call()
        begin_ns = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - begin_ns) / calls / 1e3

    def count_wrong(self, ranks: ProcessRanks) -> int:
        """Makes one call. Returns how many elements of this rank's results are wrong. Collective."""
        results = self.results()
        ranks.barrier()
        return sum(differing(y, right) for y, right in zip(results, self.expected, strict=False))


def differing(result: Tensor, expected: Tensor) -> int:
    """Returns the number of elements whose bits differ; all of them if shape or dtype differ."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return max(1, expected.numel())
    return int(differs(result.cpu(), expected.cpu()).sum())


def whole_numbers(seed: int, shape: tuple[int, ...], largest: int) -> Tensor:
    """Returns random whole numbers in bf16. Products of small ones are exact, so no order of additions matters."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).to(torch.bfloat16)


class Operands:
    """Every rank's tensors on the CPU, for ``graphar.reference``, and this rank's on its device."""

    def __init__(self, ranks: ProcessRanks) -> None:
        size, self.rank, self.device = ranks.size, ranks.rank, ranks.device
        self.size = size
        self.xs = [whole_numbers(rank, (ROWS, COLUMNS), 8) for rank in range(size)]
        self.scales = [torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
        self.residual, self.weight = whole_numbers(50, (ROWS, COLUMNS), 8), whole_numbers(51, (COLUMNS,), 8)
        self.bias = whole_numbers(52, (COLUMNS,), 8)
        self.one_row = [whole_numbers(100 + rank, (1, FEATURES), 1) for rank in range(size)]
        self.row_each = [whole_numbers(200 + rank, (size, FEATURES), 1) for rank in range(size)]
        self.w = [whole_numbers(300 + rank, (FEATURES, FEATURES), 1) for rank in range(size)]
        self.features_bias = whole_numbers(400, (FEATURES,), 8)
        self.features_weight = whole_numbers(401, (FEATURES,), 8)
        self.features_residual = whole_numbers(402, (size, FEATURES), 8)
        self.group = dist.new_group(list(range(size)))

    def own(self, of_ranks: Sequence[Tensor]) -> Tensor:
        return self.here(of_ranks[self.rank])

    def here(self, x: Tensor) -> Tensor:
        return x.to(self.device)

    def rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns each rank's part of the rows."""
        return x.tensor_split(self.size)


def negated(v: Tensor) -> Tensor:
    """Returns an epilogue's values. It is traced."""
    return torch.relu(-v)


def sum_and_1(x: Tensor) -> tuple[Tensor, ...]:
    return graphar.allreduce(x), torch.empty_like(x)


def sum_and_2(x: Tensor) -> tuple[Tensor, ...]:
    return graphar.allreduce(x), torch.empty_like(x), torch.empty_like(x)


# Plain all-reduces by the number of results, as options of "allreduce"
BASELINES = {1: PLAIN, 2: "and 1 torch.empty_like", 3: "and 2 torch.empty_like"}


def own_trials(operands: Operands) -> Iterator[Trial]:
    """Yields the calls of graphar's ops."""
    for make in (allreduces, reducescatters, allgathers, alltoalls, norms, matmul_sums, gathered_matmuls):
        yield from make(operands)


def allreduces(operands: Operands) -> Iterator[Trial]:
    x, total = operands.own(operands.xs), [reference.allreduce(operands.xs)]
    trial = partial(Trial, OWN, "allreduce", limit=SUM_LIMIT)
    call, residual = partial(graphar.allreduce, x), torch.zeros_like(x)
    named = "one_shot_push" if x.is_cuda else "fallback"
    added = partial(graphar.Epilogue, "relu(v + bias[col])")
    rounded = [reference.quantized_allreduce(operands.xs, "int8")]
    yield trial(PLAIN, call, total)
    for outputs, make in ((2, sum_and_1), (3, sum_and_2)):
        yield replace(trial(BASELINES[outputs], partial(make, x), total), limit=None)
    yield trial("out=", partial(call, out=torch.empty_like(x)), total)
    yield trial(GROUP, partial(call, operands.group), total)
    yield trial("algorithm=", partial(call, algorithm=named), total)
    yield trial("codec=", partial(call, codec="int8"), rounded)
    yield trial("codec=, residual=", partial(call, codec="int8", residual=residual), rounded, prepare=residual.zero_)
    yield trial(
        "epilogue=, an expression with a tensor",
        partial(call, epilogue=added(bias=operands.here(operands.bias))),
        [reference.allreduce(operands.xs, added(bias=operands.bias))],
    )
    yield trial("epilogue=, a function", partial(call, epilogue=negated), [reference.allreduce(operands.xs, negated)])


def reducescatters(operands: Operands) -> Iterator[Trial]:
    x, rank = operands.own(operands.xs), operands.rank
    trial = partial(Trial, OWN, "reducescatter", limit=SUM_LIMIT)
    call, residual = partial(graphar.reducescatter, x), torch.zeros_like(x)
    total = [reference.reducescatter(operands.xs)[rank]]
    rounded = [reference.quantized_reducescatter(operands.xs, "int8")[rank]]
    added = partial(graphar.Epilogue, "relu(v + bias[col])")
    yield trial(PLAIN, call, total)
    yield trial(GROUP, partial(call, operands.group), total)
    yield trial("codec=", partial(call, codec="int8"), rounded)
    yield trial("codec=, residual=", partial(call, codec="int8", residual=residual), rounded, prepare=residual.zero_)
    yield trial(
        "epilogue=, an expression with a tensor",
        partial(call, epilogue=added(bias=operands.here(operands.bias))),
        [reference.reducescatter(operands.xs, epilogue=added(bias=operands.bias))[rank]],
    )


def allgathers(operands: Operands) -> Iterator[Trial]:
    x, scales = operands.own(operands.xs), operands.own(operands.scales)
    trial, every = partial(Trial, OWN, "allgather", limit=SUM_LIMIT), [reference.allgather(operands.xs)]
    both = [*every, reference.allgather(operands.scales)]
    yield trial(PLAIN, partial(graphar.allgather, x), every)
    yield trial(GROUP, partial(graphar.allgather, x, operands.group), every)
    yield trial("sizes=", partial(graphar.allgather, x, sizes=[ROWS] * operands.size), every)
    yield trial("a tuple of 2", partial(graphar.allgather, (x, scales)), both)
    yield trial("a tuple of 2, sizes=", partial(graphar.allgather, (x, scales), sizes=[ROWS] * operands.size), both)


def alltoalls(operands: Operands) -> Iterator[Trial]:
    x, rank, ranks = operands.own(operands.xs), operands.rank, operands.size
    trial, call = partial(Trial, OWN, "alltoall", limit=SUM_LIMIT), partial(graphar.alltoall, x)
    promised, sizes = partial(reference.alltoall, operands.xs), [ROWS // ranks] * ranks
    yield trial(PLAIN, call, [promised()[rank]])
    yield trial("out=", partial(call, out=torch.empty_like(x)), [promised()[rank]])
    yield trial("sizes=", partial(call, sizes=(sizes, sizes)), [promised()[rank]])
    yield trial("scatter_dim=, gather_dim=", partial(call, scatter_dim=1, gather_dim=0), [promised(1, 0)[rank]])


def norms(operands: Operands) -> Iterator[Trial]:
    """Yields the all-reduce and the reduce-scatter with residual and RMSNorm."""
    x, residual, weight = operands.own(operands.xs), operands.here(operands.residual), operands.here(operands.weight)
    trial = partial(Trial, OWN, "allreduce_residual_rmsnorm", limit=SUM_LIMIT)
    call = partial(graphar.allreduce_residual_rmsnorm, x, residual, weight)
    promised = partial(reference.allreduce_residual_rmsnorm, operands.xs, operands.residual, operands.weight)
    yield trial(PLAIN, call, promised())
    yield trial(GROUP, partial(call, group=operands.group), promised())
    yield trial("FP8", partial(call, out_dtype=FP8), promised(out_dtype=FP8))
    scale = torch.tensor([0.25])
    yield trial(
        "FP8, scale=", partial(call, out_dtype=FP8, scale=operands.here(scale)), promised(out_dtype=FP8, scale=scale)
    )

    parts = operands.rows(operands.residual)
    trial = partial(Trial, OWN, "reducescatter_residual_rmsnorm", limit=SUM_LIMIT)
    call = partial(graphar.reducescatter_residual_rmsnorm, x, operands.own(parts), weight)
    promised = partial(reference.reducescatter_residual_rmsnorm, operands.xs, parts, operands.weight)
    yield trial(PLAIN, call, promised()[operands.rank])
    yield trial("FP8", partial(call, out_dtype=FP8), promised(out_dtype=FP8)[operands.rank])


def matmul_sums(operands: Operands) -> Iterator[Trial]:
    """Yields matmuls with an all-reduce of one row, and with a reduce-scatter of one row for each rank."""
    w, weight = operands.own(operands.w), operands.here(operands.features_weight)
    bias, added = operands.features_bias, partial(graphar.Epilogue, "relu(v * scale[col])")
    followed = {"epilogue": added(scale=operands.here(bias))}
    row, each = operands.own(operands.one_row), operands.own(operands.row_each)

    trial = partial(Trial, OWN, "fused_matmul_allreduce", limit=MATMUL_LIMIT)
    call = partial(graphar.fused_matmul_allreduce, row, w)
    promised = partial(reference.fused_matmul_allreduce, operands.one_row, operands.w)
    out = torch.empty(1, FEATURES, dtype=row.dtype, device=row.device)
    yield trial(PLAIN, call, [promised()])
    yield trial("out=", partial(call, out=out), [promised()])
    yield trial(GROUP, partial(call, group=operands.group), [promised()])
    yield trial(ONE_KERNEL, partial(call, partition="tiles"), [promised()])
    yield trial("bias=", partial(call, bias=operands.here(bias)), [promised(bias)])
    yield trial("epilogue=", partial(call, **followed), [promised(epilogue=added(scale=bias))])
    yield trial("codec=", partial(call, codec="int8"), [promised(codec="int8")])

    trial = partial(Trial, OWN, "fused_matmul_reducescatter", limit=MATMUL_LIMIT)
    call = partial(graphar.fused_matmul_reducescatter, each, w)
    scattered = partial(reference.fused_matmul_reducescatter, operands.row_each, operands.w)
    of_ranks = [bias] * operands.size
    yield trial(PLAIN, call, [scattered()[operands.rank]])
    yield trial(ONE_KERNEL, partial(call, partition="tiles"), [scattered()[operands.rank]])
    yield trial("bias=", partial(call, bias=operands.here(bias)), [scattered(bias)[operands.rank]])
    yield trial("epilogue=", partial(call, **followed), [scattered(epilogue=added(scale=of_ranks))[operands.rank]])
    yield trial("codec=", partial(call, codec="int8"), [scattered(codec="int8")[operands.rank]])

    first, parts = operands.features_residual[:1], operands.rows(operands.features_residual)
    trial = partial(Trial, OWN, "fused_matmul_allreduce_residual_rmsnorm", PLAIN, limit=MATMUL_LIMIT)
    call = partial(graphar.fused_matmul_allreduce_residual_rmsnorm, row, w, operands.here(first), weight)
    summed = reference.fused_matmul_allreduce_residual_rmsnorm
    yield trial(call, summed(operands.one_row, operands.w, first, operands.features_weight))

    trial = partial(Trial, OWN, "fused_matmul_reducescatter_residual_rmsnorm", PLAIN, limit=MATMUL_LIMIT)
    call = partial(graphar.fused_matmul_reducescatter_residual_rmsnorm, each, w, operands.own(parts), weight)
    summed = reference.fused_matmul_reducescatter_residual_rmsnorm
    yield trial(call, summed(operands.row_each, operands.w, parts, operands.features_weight)[operands.rank])


def gathered_matmuls(operands: Operands) -> Iterator[Trial]:
    rows, w, bias = operands.own(operands.one_row), operands.own(operands.w), operands.features_bias
    trial = partial(Trial, OWN, "fused_allgather_matmul", limit=MATMUL_LIMIT)
    call = partial(graphar.fused_allgather_matmul, rows, w)
    promised = partial(reference.fused_allgather_matmul, operands.one_row, operands.w[operands.rank])
    followed = partial(graphar.Epilogue, "relu(v * scale[col])")
    yield trial(PLAIN, call, [promised()])
    yield trial(ONE_KERNEL, partial(call, partition="tiles"), [promised()])
    yield trial("gathered=True", partial(call, gathered=True), [promised(), reference.allgather(operands.one_row)])
    yield trial("bias=", partial(call, bias=operands.here(bias)), [promised(bias)])
    yield trial(
        "epilogue=",
        partial(call, epilogue=followed(scale=operands.here(bias))),
        [promised(epilogue=followed(scale=bias))],
    )


def peer_trials(operands: Operands, ranks: ProcessRanks, place: str) -> tuple[list[Trial], list[str]]:
    """Returns torch's addition and matmul, and the all-reduces of peers, and why some are missing. Collective."""
    x, row, w = operands.own(operands.xs), operands.own(operands.one_row), operands.own(operands.w)
    linear = partial(torch.nn.functional.linear, row, w)
    alone = [
        Trial("torch", "x + x", PLAIN, partial(operator.add, x, x), [x + x]),
        Trial("torch", "linear", PLAIN, linear, [reference.linear(row.cpu(), w.cpu())]),
    ]
    of_backends, skipped = backend_trials(operands, ranks)
    # The kernels of other packages need a GPU for each rank.
    of_packages, missing = package_trials(operands, ranks) if place == APART else ([], [])
    return [*alone, *of_backends, *of_packages], [*skipped, *missing]


def backend_trials(operands: Operands, ranks: ProcessRanks) -> tuple[list[Trial], list[str]]:
    """Returns the all-reduces of torch.distributed's backends, and why some are missing. Collective."""
    x, total = operands.own(operands.xs), [reference.allreduce(operands.xs)]
    trials, skipped = [], []
    known = dist.get_backend()
    for backend in dict.fromkeys((known, "gloo")):
        if backend == known:
            group, reason = dist.group.WORLD, ""
        else:
            group, reason = agreed(ranks, partial(dist.new_group, list(range(ranks.size)), backend=backend))
        mine = x.clone()
        call = partial(dist.all_reduce, mine, group=group)
        _, refused = (None, reason) if reason else agreed(ranks, call)
        if refused:
            skipped.append(f"{backend}'s all_reduce: {refused}")
        else:
            restore = partial(mine.copy_, x)
            trials.append(Trial(backend, PEERS_OP, PLAIN, call, total, prepare=restore, in_place=mine))
    return trials, skipped


def package_trials(operands: Operands, ranks: ProcessRanks) -> tuple[list[Trial], list[str]]:
    """Returns the all-reduces of PEERS, and why some are missing. Collective."""
    plan = Plan("cuda", ranks.size, "process", ("bfloat16",), PEERS, MB)
    methods, skipped = catalogue.make_methods(plan, ranks)
    x, total = operands.own(operands.xs).view(-1), [reference.allreduce(operands.xs).view(-1)]
    trials = []
    for method in methods:
        source = x if method.buffer is None else method.buffer[: x.numel()].copy_(x)
        trials.append(Trial(method.name, PEERS_OP, PLAIN, partial(method.call, source), total, keeps=method))
    return trials, skipped


def join(plan: HostPlan, rank: int, port: int) -> ProcessRanks:
    """Joins the process group and returns the ranks. Ranks that share a GPU need gloo: NCCL refuses them."""
    if plan.place != SHARED:
        return ranks_of.join(rank, plan.world_size, "cuda" if plan.place == APART else "cpu", port)
    os.environ[SHARE_SWITCH] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.TCPStore(ranks_of.HOST, port, is_master=False)
    world = {"store": store, "rank": rank, "world_size": plan.world_size, "timeout": ranks_of.TIMEOUT}
    dist.init_process_group("gloo", **world)
    return ProcessRanks(device, store)


def run_rank(plan: HostPlan, rank: int, port: int) -> Iterator[HostRow | str]:
    """Yields one rank's rows. Every result is verified before and after the measurement."""
    ranks = join(plan, rank, port)
    operands = Operands(ranks)
    peers, skipped = peer_trials(operands, ranks, plan.place)
    yield from skipped
    trials = [*peers, *own_trials(operands)]
    outputs = [warm_up(trial, ranks) for trial in trials]
    ranks.warm_up()
    before = [trial.count_wrong(ranks) for trial in trials]
    bursts = [partial(trial.burst_us, plan.calls) for trial in trials]
    prepare = [trial.prepare for trial in trials]
    times = time_in_turn(bursts, plan.bursts, lambda burst: ranks.time_us(burst, "host_loop"), prepare)
    after = [trial.count_wrong(ranks) for trial in trials]
    wrong = ranks.total([max(counts) for counts in zip(before, after, strict=True)])
    spreads = [deciles(times) for times in ranks.slowest(times)]
    yield from rows_of(plan, list(zip(trials, outputs, spreads, wrong, strict=True)))
    ranks.barrier()


def warm_up(trial: Trial, ranks: ProcessRanks) -> int:
    """Makes a few calls. Returns the number of their results. Collective."""
    for _ in range(WARM_UP):
        results = trial.results()
    ranks.barrier()
    return len(results)


def rows_of(plan: HostPlan, measured: Sequence[tuple[Trial, int, Deciles, int]]) -> Iterator[HostRow]:
    """Yields the rows. ``measured`` has trials with their number of results, times and wrong elements."""
    medians = {(trial.op, trial.option): time_us["median"] for trial, _, time_us, _ in measured if trial.method == OWN}
    for trial, outputs, time_us, wrong in measured:
        is_own, plain = trial.method == OWN, medians["allreduce", BASELINES[outputs]]
        yield HostRow(
            method=trial.method,
            op=trial.op,
            option=trial.option,
            outputs=outputs,
            place=plan.place,
            world_size=plan.world_size,
            time_us=time_us,
            of_allreduce=time_us["median"] / plain if is_own else None,
            limit=trial.limit,
            wrong=wrong,
        )
