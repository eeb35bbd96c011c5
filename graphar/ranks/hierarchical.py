r"""The hierarchical all-reduce: reduce-scatter inside each host, all-reduce across hosts, all-gather inside each host.

    host 0:  rank 0   rank 1      x of every rank, in fp32
                |  \/  |
             rank 0   rank 1      reduce-scatter inside: each gets a part of the host's sum    (graphar's kernels)
                |        |
    host 1:  rank 2   rank 3      all-reduce across: rank i of every host sums its part        (the process group)
                |  /\  |
             rank 2   rank 3      all-gather inside: the parts of the whole sum, rounded       (graphar's kernels)

On the CPU the process group does all three steps. Each host sends one sum to other hosts, not every rank's tensor.
Tensors are cut into chunks. On GPUs a chunk crosses hosts on a separate stream while the next is summed inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import Protocol, TypeGuard

import torch
import torch.distributed as dist

from graphar.errors import CommunicatorError, Reason, UnsupportedError
from graphar.numerics.codecs import TILE_NUMEL
from graphar.numerics.dtypes import ACCUMULATION_DTYPES, with_canonical_nan
from graphar.plan.call import Call, Operands
from graphar.plan.tables import Table
from graphar.plan.work import Parts, Sum
from graphar.ranks import capture
from graphar.ranks.cpu import fallback
from graphar.ranks.cpu.reduction import Coder
from graphar.ranks.cpu.transport import Group, check_backend, pipelined
from graphar.ranks.groups import known_group
from graphar.ranks.hosts import host
from graphar.ranks.rendezvous import Ranks, exchange_json

_CHUNK_NUMEL = 4 << 20  # 16 MB of fp32, the most of one launch of reducescatter_push; a fourth with a codec
_LINE_NUMEL = 32  # 128 bytes of fp32


class Kernels(Protocol):
    """The interface to the engine of the ranks inside one host, on GPUs. This package knows no engines."""

    table: Table

    def run(self, call: Call, ranks: Sequence[Operands]) -> object: ...
    def synchronize(self) -> None: ...
    def why_stays(self) -> Reason | None: ...
    def end_work(self, keep: str | None) -> None: ...
    def give_back(self) -> None: ...
    def resume(self) -> None: ...
    def let_go_of_group(self) -> None: ...
    def close(self) -> None: ...


def check_hosts(hosts: object, world_size: int | None) -> list[list[int]] | None:
    """Returns the argument ``hosts`` of Communicator in a canonical form: the sorted ranks of each host, or None.

    TypeError or ValueError unless each rank is in it once; ``world_size`` is None where there is no group.
    """
    if hosts is None:
        return None
    if world_size is None:
        raise ValueError("Communicator: hosts needs a process group; the devices of one process are on one host")
    if not _is_list(hosts) or any(not _is_list(of_host) or {*map(type, of_host)} - {int} for of_host in hosts):
        raise TypeError(f"Communicator: hosts must be a list with each host's ranks, got {hosts!r}")
    if sorted(rank for of_host in hosts for rank in of_host) != list(range(world_size)) or not all(hosts):
        raise ValueError(f"Communicator: hosts must have each of {world_size} ranks once, got {hosts!r}")
    return [sorted(of_host) for of_host in hosts]


def _is_list(value: object) -> TypeGuard[Sequence]:
    return isinstance(value, Sequence) and not isinstance(value, str)


class Hierarchy:
    """The hosts of a communicator, and the process groups inside and across them, which the first call makes.

    ``hosts`` are from :func:`check_hosts`; None: those that the processes run on. ``make_kernels`` makes the engine of
    a host's process group, with a deadline in seconds.
    """

    def __init__(
        self, ranks: Ranks, hosts: list[list[int]] | None, make_kernels: Callable[[dist.ProcessGroup, float], Kernels]
    ) -> None:
        self._communicator, self._given, self._make_kernels = ranks, hosts, make_kernels
        self._hosts: list[list[int]] = []  # none until the first call
        self._groups: list[dist.ProcessGroup] = []  # inside this rank's host, and across hosts
        self.kernels: Kernels | None = None  # the engine inside this host, on GPUs
        self._beside: torch.cuda.Stream | None = None  # the stream of all-reduces across hosts

    def set_up(self, x: torch.Tensor) -> str:
        """Makes what calls with tensors like ``x`` need, and returns a description. The first call is collective.

        UnsupportedError on every rank if the algorithm cannot serve these ranks.
        """
        if self._communicator.devices:
            raise UnsupportedError("allreduce: hierarchical cannot serve this call: devices are of one host")
        if len(self._groups) < 2:
            capture.check_not_capturing("allreduce", [x.device])
            self._find_hosts()
            self._make_groups()
        if x.is_cuda and not self.kernels:
            self._beside = torch.cuda.Stream(x.device)
            self.kernels = self._make_kernels(self._groups[0], self._communicator.timeout_s)
        return f"asked for: {len(self._hosts)} host(s) of {len(self._hosts[0])} rank(s), sums inside, then across"

    def _find_hosts(self) -> None:
        if not self._hosts:
            everyone = exchange_json(self._communicator.rendezvous(), "finding hosts", [self._given, host()])
            all_given, names = zip(*everyone, strict=True)
            if any(given != self._given for given in all_given):
                raise CommunicatorError(f"ranks were given different hosts: {[*all_given]}")
            by_name = [[rank for rank, its in enumerate(names) if its == name] for name in dict.fromkeys(names)]
            self._hosts = self._given or by_name
        sizes = [len(ranks) for ranks in self._hosts]
        if len(set(sizes)) > 1:
            raise UnsupportedError(
                f"allreduce: hierarchical cannot serve this call: hosts must have equally many ranks, got {sizes}"
            )

    def _make_groups(self) -> None:
        meet = self._communicator.rendezvous()
        inside = next(ranks for ranks in self._hosts if meet.rank in ranks)
        across = [ranks[inside.index(meet.rank)] for ranks in self._hosts]
        try:
            for what, ranks in (("inside", inside), ("across", across)):
                make = partial(_new_group, self._communicator, what, ranks)
                meet.agree(f"making the groups {what} hosts", lambda make=make: self._groups.append(make()))
        except Exception:
            self._end_groups()
            raise

    def close(self) -> None:
        """Destroys the groups. Collective inside each host if kernels ran."""
        try:
            if self.kernels:
                self.kernels.close()
        finally:
            self._end_groups()

    def _end_groups(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            if group in dist.distributed_c10d._world.pg_map:  # the user may have destroyed all groups
                dist.destroy_process_group(group)

    def let_go_of_groups(self) -> None:
        """Drops the references to the process groups without destroying them."""
        self._groups = []
        if self.kernels:
            self.kernels.let_go_of_group()

    def in_hosts(self, what: str, step: Callable[[Kernels], None]) -> None:
        """Runs a step with the engine inside each host; all ranks raise if it fails on one. Collective."""
        if self.kernels:
            self._communicator.rendezvous().agree(f"{what} inside hosts", partial(step, self.kernels))

    def bind(self, call: Call, timeout_s: float, coder: Coder | None) -> fallback.Run:
        """Returns the function of a call on this rank's operands; ``timeout_s`` is the deadline of each wait.

        It writes what graphar.reference.hierarchical_allreduce or hierarchical_reducescatter gives this rank.
        ``coder`` has the codec across hosts; in a reduce-scatter it rounds to nearest.
        """
        inside, across = (Group(group, timeout_s) for group in self._groups)
        compute: Callable[..., None] = {"allreduce": self._allreduce, "reducescatter": self._reducescatter}[call.op]

        def run(ranks: Sequence[Operands]) -> None:
            (operands,) = ranks
            x, out = operands.inputs[0], operands.outputs[0]
            check_backend(x.device, known_group(self._communicator.group))
            compute(inside, across, coder, x, out)

        return run

    def _allreduce(self, inside: Group, across: Group, coder: Coder | None, x: torch.Tensor, out: torch.Tensor) -> None:
        """Sums chunks. Inside a host that is in fp32: twice the bytes of bf16 over NVLink, but no kernel of its own."""
        source, target, step = x.view(-1), out.view(-1), _CHUNK_NUMEL // 4 if coder else _CHUNK_NUMEL
        chunks = zip(source.split(step), target.split(step), strict=True)
        pipelined(self._sum_chunk(inside, across, coder, *chunk) for chunk in chunks)

    def _sum_chunk(
        self, inside: Group, across: Group, coder: Coder | None, source: torch.Tensor, target: torch.Tensor
    ) -> Iterator[None]:
        """Sums a chunk inside, and starts to sum it across. The next step waits for that, and gathers inside."""
        unit = TILE_NUMEL if coder else _LINE_NUMEL
        counts = tuple(map(len, fallback.shards(source, inside.world_size, unit)))
        part = self._sum_inside(inside, source, counts)
        arrived = self._start_across(across, part, coder)
        yield
        arrived()
        rounded = with_canonical_nan(part.to(target.dtype))
        if len(counts) == 1:
            target.copy_(rounded)
        else:
            self._inside(inside, "allgather", rounded, target, counts)

    def _reducescatter(self, inside: Group, across: Group, coder: Coder, x: torch.Tensor, out: torch.Tensor) -> None:
        """Sums the parts of all hosts' ranks at this rank's place inside its host, and sends each to its rank.

        Each rank's part of ``x`` is as long as ``out``.
        """
        parts = x.view(-1, out.numel())
        by_place = [rank for of_place in zip(*self._hosts, strict=True) for rank in of_place]
        step = max(1, _CHUNK_NUMEL // len(parts) // TILE_NUMEL) * TILE_NUMEL
        for begin in range(0, out.numel(), step):
            target = out.view(-1)[begin : begin + step]
            chunk = torch.cat([parts[rank, begin : begin + step] for rank in by_place])
            part = self._sum_inside(inside, chunk, (across.world_size * target.numel(),) * inside.world_size)
            total = part
            if across.world_size > 1:
                total, counts = part.new_empty(target.numel()), (target.numel(),) * across.world_size
                _run(across, Parts("reducescatter", counts, coder.codec.text), part, total, coder)
            target.copy_(with_canonical_nan(total.to(target.dtype)))

    def _sum_inside(self, inside: Group, chunk: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        wide = chunk.to(ACCUMULATION_DTYPES[chunk.dtype])
        if len(counts) == 1:
            return wide.clone()
        part = wide.new_empty(counts[inside.ranks[0]])
        self._inside(inside, "reducescatter", wide, part, counts)
        return part

    def _start_across(self, across: Group, part: torch.Tensor, coder: Coder | None) -> Callable[[], None]:
        """Starts to sum ``part`` over the hosts in place, and returns a function that waits for the sum."""
        if across.world_size == 1 or not part.numel():
            return lambda: None
        work = Sum(part.numel(), coder.codec.text if coder else "")
        step = partial(_run, across, work, part, part, coder)
        if not (part.is_cuda and self._beside):
            step()
            return lambda: None
        self._beside.wait_stream(torch.cuda.current_stream(part.device))
        with torch.cuda.stream(self._beside):
            step()
        arrived = self._beside.record_event()
        return lambda: torch.cuda.current_stream(part.device).wait_event(arrived)

    def _inside(self, inside: Group, op: str, x: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...]) -> None:
        if x.is_cuda and self.kernels:
            # Leave SMs to the all-reduce across hosts, or hosts could wait for each other in a circle.
            blocks = self.kernels.table.beside.blocks
            call = Call.of(Parts(op, counts), x, timeout_s=inside.timeout_s, blocks=blocks)
            self.kernels.run(call, [Operands((x,), (out,))])
        else:
            _run(inside, Parts(op, counts), x, out)


def _run(group: Group, work: Sum | Parts, x: torch.Tensor, out: torch.Tensor, coder: Coder | None = None) -> None:
    fallback.bind(Call.of(work, x), group, repeat(0), coder)([Operands((x,), (out,))])


def _new_group(communicator: Ranks, what: str, ranks: list[int]) -> dist.ProcessGroup:
    """Returns a process group of some ranks of a communicator, with its time-out. Only these ranks call this."""
    c10d, parent = dist.distributed_c10d, known_group(communicator.group)
    processes = dist.get_process_group_ranks(parent)
    if c10d._get_default_group().bound_device_id is not None and len(processes) < dist.get_world_size():
        raise UnsupportedError(
            "allreduce: hierarchical cannot serve this call: NCCL splits a default group that was made with device_id "
            "by all of its processes, and this group has only some"
        )
    # dist.new_group is collective over all processes, or names the group by this process's count of groups, which can
    # differ between ranks. It also reuses the name of a destroyed group, whose addresses are still in the store.
    meet = communicator.rendezvous()
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(meet.rank),
        [processes[rank] for rank in ranks],
        dist.Backend(dist.get_backend(parent)),
        c10d._get_default_store(),
        meet.name(what, ranks),
        timeout=timedelta(seconds=communicator.timeout_s),
        group_desc=f"graphar {what} hosts",
    )
    c10d._world.pg_group_ranks[group] = {processes[rank]: place for place, rank in enumerate(ranks)}
    return group
