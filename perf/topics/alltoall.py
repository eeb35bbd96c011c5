"""`python -m perf alltoall`: times and verifies all-to-alls, of rows and of heads, beside torch's."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import graphar
from graphar.cli.options import size
from graphar.plan.algorithms import COPYING, Algorithm, in_tables
from graphar.plan.sizes import KB, MB, format_nbytes
from perf.between_ranks import BetweenRanks
from perf.harness import ranks as ranks_of
from perf.harness.cases import Case
from perf.harness.ranks import ProcessRanks, case_by_case, random_tensor, timed_in_turn
from perf.harness.timing import Repeated, spread
from perf.harness.verify import again, differs
from perf.md import method_table
from perf.ratios import by_method, of_best_peer
from perf.report import Arguments, Glance, Section, Spread, Timing

SIZES = (2 * KB, 8 * KB, 32 * KB, 128 * KB, 512 * KB, 2 * MB, 8 * MB, 32 * MB, 128 * MB, 256 * MB)
CPU_SIZES = (2 * KB, 128 * KB, 2 * MB)
ROWS, HEADS = "rows", "heads"  # torch's all_to_all_single, and the exchange of Ulysses
HEAD_DIM = 64


@dataclass(frozen=True)
class AllToAllPlan:
    """The calls between some ranks."""

    device: str
    world_size: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class AllToAllRow(Timing):
    """The verified time of one method.

    Attributes:
        kind: ROWS or HEADS.
        nbytes: the bytes of one rank's tensor, of bf16.
    """

    method: str
    kind: str
    world_size: int
    nbytes: int
    time_us: Spread
    wrong: int

    @property
    def what(self) -> tuple[str, ...]:
        return self.kind, format_nbytes(self.nbytes)


class Trial(Repeated):
    """A method on one rank's data. A part of its result comes from each rank."""

    def __init__(self, method: str, call: Callable[[], Tensor], case: Case, kind: str, ranks: ProcessRanks) -> None:
        self.method, self._case, self._kind, self._ranks = method, case, kind, ranks
        super().__init__(call, case.iterations, ranks.device.type == "cuda")

    def count_wrong(self, launch: Callable[[], None]) -> int:
        result = again(self, launch, self._ranks)
        rank, ranks = self._ranks.rank, self._ranks.size
        scatter, gather = (0, 0) if self._kind == ROWS else (2, 1)
        wrong = 0
        for source, part in enumerate(result.chunk(ranks, gather)):  # made again: it need not travel
            x = shaped(random_tensor(self._case, source, self._ranks.device), self._kind, ranks)
            wrong += int(differs(part.contiguous(), x.chunk(ranks, scatter)[rank].contiguous()).sum())
        return wrong


def shaped(x: Tensor, kind: str, ranks: int) -> Tensor:
    """Returns a rank's tensor: [elements], or [1, tokens, heads, head_dim]."""
    return x if kind == ROWS else x.view(1, -1, 2 * ranks, HEAD_DIM)


def numel_of(nbytes: int, ranks: int) -> int:
    """Returns the elements of a rank's tensor, in whole tokens of two heads for each rank."""
    token = 2 * ranks * HEAD_DIM
    return max(1, nbytes // (2 * token)) * token


def calls_of(x: Tensor, kind: str) -> dict[str, Callable[[], Tensor]]:
    ranks, part_nbytes = dist.get_world_size(), x.nbytes // dist.get_world_size()
    dims = {} if kind == ROWS else {"scatter_dim": 2, "gather_dim": 1}
    calls: dict[str, Callable[[], Tensor]] = {"graphar": partial(graphar.alltoall, x, **dims)}
    if kind == ROWS:
        sizes = [len(x) // ranks] * ranks
        calls["graphar_sizes"] = partial(graphar.alltoall, x, sizes=(sizes, sizes))
    if x.is_cuda:
        copies = [COPYING["alltoall"]] if kind == ROWS and x.nbytes >= 4 * MB else []  # meetings dominate smaller ones
        for algorithm in (*in_tables("alltoall"), *copies):
            if Algorithm(algorithm).row.fits(ranks, part_nbytes):
                calls[f"graphar:{algorithm}"] = partial(graphar.alltoall, x, algorithm=algorithm, **dims)
        calls["nccl"] = partial(by_torch, x, kind)
        if kind == ROWS:
            calls["symm_mem"] = by_symmetric_memory(x)
    else:
        calls["gloo"] = partial(by_torch, x, kind)
    return calls


def by_torch(x: Tensor, kind: str) -> Tensor:
    """Returns the result of all_to_all_single; of heads with a copy before and after it, as Ulysses has."""
    ranks = dist.get_world_size()
    if kind == ROWS:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out
    batch, tokens, heads, width = x.shape
    sent = x.view(batch, tokens, ranks, heads // ranks, width).permute(2, 1, 0, 3, 4).contiguous()
    out = torch.empty_like(sent)
    dist.all_to_all_single(out, sent)
    return out.flatten(0, 1).transpose(0, 1).contiguous()


def by_symmetric_memory(x: Tensor) -> Callable[[], Tensor]:
    """Returns torch's all_to_all_vdev, which needs NVSHMEM. It raises where torch has none."""

    def prepare() -> tuple[Tensor, ...]:
        import torch.distributed._symmetric_memory as symm_mem

        ranks = dist.get_world_size()
        symm_mem.set_backend("NVSHMEM")
        mine, out = (symm_mem.empty(len(x), dtype=x.dtype, device=x.device) for _ in range(2))
        splits = symm_mem.empty(ranks, dtype=torch.int64, device=x.device).fill_(len(x) // ranks)
        got = symm_mem.empty((2, ranks), dtype=torch.int64, device=x.device)
        for tensor in (mine, out, splits, got):
            symm_mem.rendezvous(tensor, dist.group.WORLD)
        return mine.copy_(x), out, splits, got

    made: list[Tensor] = []

    def call() -> Tensor:
        if not made:
            made.extend(prepare())
        torch.ops.symm_mem.all_to_all_vdev(*made, dist.group.WORLD.group_name)
        return made[1]

    return call


def run_rank(plan: AllToAllPlan, rank: int, port: int) -> Iterator[AllToAllRow | str]:
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    ranks.warm_up()
    cases = itertools.product((ROWS, HEADS), plan.sizes)
    yield from case_by_case(ranks, (rows_of(kind, 2 * numel_of(asked, ranks.size), ranks) for kind, asked in cases))


def rows_of(kind: str, nbytes: int, ranks: ProcessRanks) -> Iterator[AllToAllRow | str]:
    case = Case(ranks.size, "process", "graph" if ranks.device.type == "cuda" else "cpu", "bfloat16", nbytes)
    x = shaped(random_tensor(case, ranks.rank, ranks.device), kind, ranks.size)
    trials = [(name, Trial(name, call, case, kind, ranks)) for name, call in calls_of(x, kind).items()]
    timed, refused = timed_in_turn(ranks, trials, case.repeats, case.mode, case.iterations)
    yield from (f"{message}, {kind} of {format_nbytes(nbytes)}" for message in refused)
    for trial, launch, times in timed:
        (wrong,) = ranks.total([trial.count_wrong(launch)])
        yield AllToAllRow(trial.method, kind, ranks.size, nbytes, spread(times), wrong)


@dataclass
class AllToAll(BetweenRanks):
    rows: list[AllToAllRow] = field(default_factory=list)

    order: ClassVar[int] = 18
    work: ClassVar = staticmethod(run_rank)
    arguments: ClassVar[Arguments] = Arguments(quick_on_gpus="--max-nbytes 8M", quick_on_cpu="--max-nbytes 2K")
    has_spread: ClassVar[bool] = True

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--max-nbytes", type=size, metavar="SIZE", help="the largest tensor, such as 64M")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[AllToAllPlan]:
        device, known = ("cuda", SIZES) if gpu_count >= 2 else ("cpu", CPU_SIZES)
        sizes = tuple(nbytes for nbytes in known if nbytes <= (options.max_nbytes or known[-1]))
        return [AllToAllPlan(device, world_size, sizes) for world_size in cls.world_sizes(options, gpu_count)]

    def cases(self) -> dict[tuple[int, str, int], dict[str, AllToAllRow]]:
        return by_method(self.rows, lambda row: (row.world_size, row.kind, row.nbytes))

    def ratios(self) -> dict[str, float]:
        ratios = of_best_peer(self.cases())
        return {f"{kind}, {format_nbytes(nbytes)}, {n} ranks": value for (n, kind, nbytes), value in ratios.items()}

    def sections(self) -> list[Section]:
        sections, cases = [], self.cases()
        for world_size, kind in dict.fromkeys(key[:2] for key in cases):
            mine = {key[2]: rows for key, rows in cases.items() if key[:2] == (world_size, kind)}
            body = [method_table("size", {format_nbytes(nbytes): rows for nbytes, rows in mine.items()})]
            sections.append(Section(f"{kind.capitalize()}, {world_size} ranks", body))
        return sections

    def glance(self) -> Glance:
        return Glance("time / the best peer's time, by size", self.ratios())
