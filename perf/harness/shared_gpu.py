"""Times one call of graphar between ranks that share a GPU: a process of `python -m perf latency`.

Ranks of one GPU exchange data through its memory, so this measures the time of a call without the time on links. Each
rank has its own memory, counters and stream. All are in one process: kernels of several processes would take turns.

The kernels of all ranks must be resident on the GPU at once, and so must the next kernel of each rank, which starts
early. So each rank has a share of the SMs, and launches only the blocks that fit there. Its tensors have the data that
these blocks have in the whole call. Each thread then does what it does between whole GPUs.

This file imports graphar and torch only, so that it can run with the graphar of another checkout, whose folder is
PYTHONPATH. It reads one request per line, and prints one answer per line, both in JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from graphar import reference
from graphar.numerics.fp8_products import BLOCK
from graphar.numerics.norms import ALLREDUCE_NORM, FP8, REDUCESCATTER_NORM
from graphar.ops import norms
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config
from graphar.plan.policy import Chip
from graphar.plan.scratch import PACK_NBYTES
from graphar.plan.select import Facts, select
from graphar.plan.slices import slices
from graphar.plan.tables import shipped_table
from graphar.plan.tiles import skinny_tile
from graphar.plan.work import MATMUL_ALLREDUCE, Norm, Parts, Product, Sum, Work
from graphar.product.fused import fused_launches
from graphar.product.operands import operands_of
from graphar.ranks.rendezvous import Alone
from graphar.runtime.bind import collective
from graphar.runtime.launcher import chip
from graphar.runtime.member import Member
from graphar.runtime.memory.peer_memory import LocalMemory
from graphar.runtime.runner import Runner

TABLE, DEVICE = shipped_table("nvidia_h200"), "cuda"
TIMEOUT_S = 3.0
WARM_UP_S = 1.0  # for the clocks of an idle GPU to rise
GATE_CYCLES = 4_000_000  # about 2 ms: until the graphs of all ranks are queued
GRAPH_NBYTES = 4 << 30  # of all calls in a graph
MOST_CALLS, LEAST_CALLS = 300, 10
OVERWRITTEN = 7  # what each byte of a result holds before a verified call
FAR = 2.0**-6  # of the sum of magnitudes, the most by which a sum of products may differ from that in fp32


class Case(NamedTuple):
    """A call between whole GPUs.

    Attributes:
        op: a public op.
        world_size: the number of ranks.
        size: the bytes of a sum's tensor on a rank, or of the whole tensor of a reduce-scatter or all-gather; the rows
            of a norm or a matmul.
        columns, k: of a norm or a matmul.
        dtype: as torch names it.
        codec: the name of the codec on the wire, or an empty string.
        scales: of a matmul of e4m3 operands, what each scale is of: "rows" or "blocks"; else an empty string.
    """

    op: str
    world_size: int
    size: int
    columns: int = 0
    k: int = 0
    dtype: str = "bfloat16"
    codec: str = ""
    scales: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def amount(self) -> int:
        """What is divided if a rank has fewer SMs: elements of a tensor or a part, rows of a norm, or columns."""
        if self.op == MATMUL_ALLREDUCE:
            return self.columns
        if self.columns:
            return max(1, self.size // (self.world_size if self.op == REDUCESCATTER_NORM else 1))
        return self.size // self.torch_dtype.itemsize // (1 if self.op == "allreduce" else self.world_size)


class Fitted(NamedTuple):
    """A call of a rank that has a share of the GPU.

    Attributes:
        chip: the share.
        config: the algorithm and the grid.
        amount: what :attr:`Case.amount` becomes.
    """

    chip: Chip
    config: Config
    amount: int


def work_of(case: Case, amount: int) -> Work:
    if case.op == "allreduce":
        return Sum(amount, case.codec)
    if case.op == ALLREDUCE_NORM:
        return Norm(case.op, (amount * case.columns,), case.columns)
    if case.op == REDUCESCATTER_NORM:
        return Norm(case.op, (amount * case.columns,) * case.world_size, case.columns)
    if case.op == MATMUL_ALLREDUCE:
        counts = (case.size, *[0] * (case.world_size - 1))
        return Product(MATMUL_ALLREDUCE, counts, amount, constant_weight=True, format=case.scales)
    return Parts(case.op, (amount,) * case.world_size, case.codec)


def fit(case: Case, whole: Chip, amount: int | None = None) -> Fitted:
    """Returns the algorithm that `auto` takes between whole GPUs, with the blocks that fit into a share of one GPU.

    ``amount``: as another checkout has computed it. None: it is computed here.
    """
    if case.op == MATMUL_ALLREDUCE:
        return _fit_skinny(case, whole, amount)
    config = select(Call(work_of(case, case.amount), case.torch_dtype, 0), Facts(case.world_size, TABLE, whole)).config
    row, cluster = config.algorithm.row, config.cluster
    # Blocks of half an SM leave the other half to the next kernel. Large clusters find room in parts of a GPU only.
    halves = row.takes_half(config.threads)
    share = replace(whole, sms=whole.sms // case.world_size // (1 if halves and cluster <= 2 else 2))
    room, unit = share.shared_blocks(halves, cluster), cluster
    if config.algorithm is Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT:  # it has a team for each rank
        unit *= case.world_size
    if room < unit:
        raise ValueError(f"clusters of {cluster} blocks of all ranks are not resident at once on one GPU")
    idle = row.tells and 1 < config.blocks < whole.shared_blocks(halves, cluster)  # the last block only tells
    blocks = min(config.blocks, room // unit * unit)
    if amount is None:
        amount = _whole_packs(case, case.amount * max(1, blocks - idle) // (config.blocks - idle))
    elif amount < case.amount:
        needed = -(-(config.blocks - idle) * amount // case.amount) + idle
        blocks = min(blocks, -(-needed // unit) * unit)
    return Fitted(share, replace(config, blocks=blocks), amount)


def _whole_packs(case: Case, amount: int) -> int:
    if case.columns or amount >= case.amount:
        return max(1, amount)
    unit = PACK_NBYTES // case.torch_dtype.itemsize * (case.world_size if case.op == "allreduce" else 1)
    return max(unit, amount // unit * unit)


def _fit_skinny(case: Case, whole: Chip, amount: int | None) -> Fitted:
    """A block of a skinny kernel takes a whole SM. Blocks of scales have BLOCK columns."""
    row, tile = Algorithm.MATMUL_ONE_SHOT.row, skinny_tile(case.size, None)
    nbytes = case.size * case.columns * case.torch_dtype.itemsize
    one_shot = row.suits(TABLE, case.world_size, nbytes) and nbytes <= row.limit(case.world_size)
    share = replace(whole, sms=whole.sms // case.world_size // 2)
    if amount is None:
        rooms = [part.shared_blocks(cluster=tile.cluster) for part in (share, whole)]
        amount = max(BLOCK, case.columns * rooms[0] // rooms[1] // BLOCK * BLOCK)
    return Fitted(share, Config(Algorithm.MATMUL_ONE_SHOT if one_shot else Algorithm.MATMUL_TWO_SHOT, 0, 0), amount)


def operands(case: Case, amount: int) -> list[Operands]:
    """Returns each rank's random inputs, and results that hold no earlier result."""
    made = [_inputs(case, amount, rank) for rank in range(case.world_size)]
    if case.op == ALLREDUCE_NORM:  # residual and weight are equal on all ranks
        made = [(inputs[0], *made[0][1:]) for inputs in made]
    if case.op == REDUCESCATTER_NORM:
        made = [(*inputs[:2], made[0][2]) for inputs in made]
    return [Operands(inputs, _results(case, amount, inputs)) for inputs in made]


def _inputs(case: Case, amount: int, rank: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(DEVICE).manual_seed(1000 + rank)

    def random(*shape: int, dtype: torch.dtype = case.torch_dtype) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator).to(dtype)

    if case.scales:
        in_k, of_columns = (case.k // BLOCK, amount // BLOCK) if case.scales == "blocks" else (1, amount)
        scales = [random(rows, in_k, dtype=torch.float32).abs() for rows in (case.size, of_columns)]
        return *[random(rows, case.k, dtype=FP8) for rows in (case.size, amount)], *scales
    if case.op == MATMUL_ALLREDUCE:
        return random(case.size, case.k), random(amount, case.k)
    if case.columns:
        rows = amount * (case.world_size if case.op == REDUCESCATTER_NORM else 1)
        return random(rows, case.columns), random(amount, case.columns), random(case.columns)
    return (random(amount * (case.world_size if case.op == "reducescatter" else 1)),)


def _results(case: Case, amount: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if case.op == MATMUL_ALLREDUCE:
        made = (inputs[0].new_empty(case.size, amount, dtype=case.torch_dtype),)
    elif case.columns:
        made = norms.empty("like_input", inputs[1])
    else:
        made = (inputs[0].new_empty(amount * (case.world_size if case.op == "allgather" else 1)),)
    overwrite(made)
    return tuple(made)


def overwrite(results: Sequence[Tensor]) -> None:
    for result in results:
        result.view(torch.uint8).fill_(OVERWRITTEN)


def expected(case: Case, ranks: Sequence[Operands]) -> list[tuple[Tensor, ...]]:
    """Returns each rank's results by the specification."""
    firsts = [of_rank.inputs[0] for of_rank in ranks]
    if case.op == MATMUL_ALLREDUCE:
        products = [(a @ w.t()).to(case.torch_dtype) for a, w in map(factors, ranks)]
        return [(reference.allreduce(products),)] * len(ranks)
    if case.op == ALLREDUCE_NORM:
        return [tuple(reference.allreduce_residual_rmsnorm(firsts, *ranks[0].inputs[1:]))] * len(ranks)
    if case.op == REDUCESCATTER_NORM:
        residuals, weight = [of_rank.inputs[1] for of_rank in ranks], ranks[0].inputs[2]
        return reference.reducescatter_residual_rmsnorm(firsts, residuals, weight)
    if case.op == "allgather":
        return [(reference.allgather(firsts),)] * len(ranks)
    if case.op == "reducescatter":
        quantized = partial(reference.quantized_reducescatter, codec=case.codec)
        return [(part,) for part in (quantized if case.codec else reference.reducescatter)(firsts)]
    quantized = partial(reference.quantized_allreduce, codec=case.codec)
    return [((quantized if case.codec else reference.allreduce)(firsts),)] * len(ranks)


def factors(mine: Operands) -> tuple[Tensor, Tensor]:
    """Returns a rank's factors in fp32, times their scales."""
    a, w, *scales = mine.inputs
    if not scales:
        return a.float(), w.float()
    whole = [
        scale.repeat_interleave(len(x) // len(scale), 0).repeat_interleave(x.shape[1] // scale.shape[1], 1)
        for x, scale in zip((a, w), scales, strict=True)
    ]
    return a.float() * whole[0], w.float() * whole[1]


def count_wrong(case: Case, ranks: Sequence[Operands], right: Sequence[tuple[Tensor, ...]]) -> int:
    """Returns how many elements of all results have other bits than the specification's.

    A product's bits depend on the order of K, so a matmul's are compared with rank 0's, and with an error bound.
    """
    pairs = [
        pair for mine, of_rank in zip(ranks, right, strict=True) for pair in zip(mine.outputs, of_rank, strict=True)
    ]
    if case.op == MATMUL_ALLREDUCE:
        magnitude = sum(a.abs() @ w.abs().t() for a, w in map(factors, ranks))
        far = [~((result.float() - want.float()).abs() <= FAR * magnitude) for result, want in pairs]
        return int(sum(mask.sum() for mask in far)) + _apart([(result, pairs[0][0]) for result, _ in pairs])
    return _apart(pairs)


def _apart(pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
    kinds = {2: torch.int16, 4: torch.int32}
    return sum(int((a.view(kinds[a.itemsize]) != b.view(kinds[b.itemsize])).sum()) for a, b in pairs)


class Ranks:
    """The ranks of one number of ranks, on cuda:0, without a communicator."""

    def __init__(self, world_size: int, whole: Chip) -> None:
        members = [Member(rank, 0) for rank in range(world_size)]
        self.runner = Runner(members, world_size, whole, LocalMemory([0] * world_size), Alone(), multicast_memory=None)
        self.streams = [torch.cuda.Stream() for _ in members]
        self.engine = SimpleNamespace(
            runner=self.runner,
            table=TABLE,
            world_size=world_size,
            devices=[0] * world_size,
            deadline=lambda call: TIMEOUT_S,
        )

    def launches(self, case: Case, fitted: Fitted, ranks: Sequence[Operands]) -> list[Callable[[], None]]:
        """Returns, for each rank, the launch of its kernel on the current stream."""
        self.runner.chip = fitted.chip
        work, dtype, config = work_of(case, fitted.amount), case.torch_dtype, fitted.config
        call = Call(work, dtype, 0)
        if case.op == MATMUL_ALLREDUCE:
            return self._matmul_launches(call, config.algorithm, ranks)
        parts = slices(config.algorithm, case.world_size, work.parts, dtype.itemsize, max(1, case.columns))
        if len(parts) > 1:
            raise ValueError(f"the call takes {len(parts)} launches")
        bound = collective.bind_slice(self.runner, call, config, parts[0], TIMEOUT_S)
        return [partial(launch, *mine) for launch, mine in zip(bound, ranks, strict=True)]

    def _matmul_launches(self, call: Call, algorithm: Algorithm, ranks: Sequence[Operands]) -> list[Callable[[], None]]:
        made = fused_launches(self.engine, call, algorithm)
        (part,) = made._slices
        placed = [operands_of(call.work, mine) for mine in ranks]
        return [
            partial(made._launch(member, mine, part), *made._tensors(member, mine, part))
            for member, mine in zip(self.runner.members, placed, strict=True)
        ]


class Bench:
    """A call of all ranks, and a graph of many for each."""

    def __init__(self, ranks: Ranks, case: Case, fitted: Fitted) -> None:
        self._case, self._ranks = case, ranks
        self._operands = operands(case, fitted.amount)
        self._right = expected(case, self._operands)
        self._launches = ranks.launches(case, fitted, self._operands)
        torch.cuda.synchronize()
        for launch, stream in zip(self._launches, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                launch()
        ranks.runner.synchronize()
        nbytes = sum(tensor.nbytes for of_rank in self._operands for tensor in (*of_rank.inputs, *of_rank.outputs))
        self.calls = max(LEAST_CALLS, min(MOST_CALLS, GRAPH_NBYTES // nbytes))
        self._graphs = [
            self._capture(launch, stream) for launch, stream in zip(self._launches, ranks.streams, strict=True)
        ]
        self.time_us()

    def _capture(self, launch: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(self.calls):
                launch()
        return graph

    def time_us(self) -> float:
        """Returns the time of a call on the slowest rank in microseconds. The graphs of all ranks begin together."""
        starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in self._graphs] for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(GATE_CYCLES)
        opened = torch.cuda.Event()
        opened.record()
        for graph, stream, start, end in zip(self._graphs, self._ranks.streams, starts, ends, strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(opened)
                start.record()
                graph.replay()
                end.record()
        self._ranks.runner.synchronize()
        return max(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)) * 1e3 / self.calls

    def count_wrong(self) -> int:
        """Replays the graphs once more, and returns how many elements of their last results are wrong."""
        for of_rank in self._operands:
            overwrite(of_rank.outputs)
        self.time_us()
        return count_wrong(self._case, self._operands, self._right)


class Server:
    """Answers requests: {"do": "make", "case": [...], "amount": ...}, {"do": "time"} and {"do": "verify"}."""

    def __init__(self) -> None:
        self._whole = chip(0)
        self._ranks: dict[int, Ranks] = {}
        self._bench: Bench | None = None

    def answer(self, asked: dict) -> dict:
        try:
            if asked["do"] == "make":
                return self._make(Case(*asked["case"]), asked["amount"])
            return {"time_us": self._bench.time_us()} if asked["do"] == "time" else {"wrong": self._bench.count_wrong()}
        except Exception:  # ranks report the failure of a kernel from then on
            self._close_ranks()
            raise

    def _make(self, case: Case, amount: int | None) -> dict:
        self._bench = None
        torch.cuda.empty_cache()
        fitted = fit(case, self._whole, amount)
        if case.world_size not in self._ranks:
            self._close_ranks()  # their scratch takes gigabytes
            self._ranks[case.world_size] = Ranks(case.world_size, self._whole)
        self._bench = Bench(self._ranks[case.world_size], case, fitted)
        config, calls = fitted.config, self._bench.calls
        grid = f"{config.blocks} x {config.threads}" if config.blocks else ""
        return {"algorithm": config.algorithm.value, "grid": grid, "amount": fitted.amount, "calls": calls}

    def _close_ranks(self) -> None:
        self._bench = None
        while self._ranks:
            _, ranks = self._ranks.popitem()
            with contextlib.suppress(Exception):
                ranks.runner.close()


def serve(answer: Callable[[dict], dict]) -> None:
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        print(json.dumps(reply), flush=True)


def warm_up() -> None:
    x, begin = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda"), time.perf_counter()
    while time.perf_counter() - begin < WARM_UP_S:
        x @ x
        torch.cuda.synchronize()


if __name__ == "__main__":
    torch.cuda.set_device(0)
    warm_up()
    serve(Server().answer)
