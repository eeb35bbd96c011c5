r"""All-reduce by hierarchy: inside each host, across hosts, and inside each host again.

    host 0:  rank 0   rank 1      x of every rank, in fp32
                |  \/  |
             rank 0   rank 1      reduce-scatter inside: each has a part of the host's sum     (graphar's kernels)
                |        |
    host 1:  rank 2   rank 3      all-reduce across: rank i of every host, of that part alone  (the process group)
                |  /\  |
             rank 2   rank 3      all-gather inside, of the whole sum's parts, rounded         (graphar's kernels)

On the CPU the group does all three. What crosses between hosts is one sum of each host, not every rank's tensor.
Tensors are cut into chunks: on GPUs one goes across, on a stream of its own, while the next is summed inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from graphar.errors import CommunicatorError, UnsupportedError
from graphar.numerics.codec_reference import decode, encode
from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.numerics.nan import with_canonical_nan
from graphar.plan import checks
from graphar.ranks import fallback
from graphar.ranks.processes import host
from graphar.reference import ACCUMULATION_DTYPES

if TYPE_CHECKING:
    from graphar.communicator import Communicator

_CHUNK_NUMEL = 4 << 20  # 16 MB of fp32, which one launch of reducescatter_push takes; encoded, a fourth of it
_LINE_NUMEL = 32  # 128 bytes of fp32
_BLOCKS = 24  # of kernels inside: what goes across needs SMs meanwhile, or hosts would wait for each other in a circle


def check_hosts(hosts: object, world_size: int | None) -> list[list[int]] | None:
    """``hosts`` as Communicator takes it, in a form that ranks can compare; ``world_size`` None: there is no group."""
    if hosts is None:
        return None
    if world_size is None:
        raise ValueError("Communicator: hosts are those of a group, and devices are of one host")
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise TypeError(f"Communicator: hosts must be a list with each host's ranks, got {hosts!r}")
    for one in hosts:
        if isinstance(one, str) or not isinstance(one, Sequence) or any(type(rank) is not int for rank in one):
            raise TypeError(f"Communicator: hosts must be a list with each host's ranks, got {hosts!r}")
    if sorted(rank for one in hosts for rank in one) != list(range(world_size)) or not all(hosts):
        raise ValueError(f"Communicator: hosts must have each of {world_size} ranks once, got {hosts!r}")
    return [sorted(one) for one in hosts]


class Hierarchy:
    """The ranks of a communicator by host, and the groups inside and across them, which the first call makes.

    Args:
        communicator: of a process group, or it stays unused.
        hosts: each host's ranks, as check_hosts gives them; None: as the processes find themselves.
    """

    def __init__(self, communicator: Communicator, hosts: list[list[int]] | None) -> None:
        self._communicator, self._given = communicator, hosts
        self._hosts: list[list[int]] | None = None  # once they are known
        self._groups: list[dist.ProcessGroup] = []  # inside this rank's host, and across hosts, once they are made
        self._kernels: Communicator | None = None  # inside, on GPUs
        self._beside: torch.cuda.Stream | None = None  # what goes across

    def set_up(self, x: torch.Tensor) -> str:
        """What calls with tensors like ``x`` do, in words. Collective, the first time.

        Raises:
            UnsupportedError: on every rank, where the ranks cannot be served.
            RanksAbsent: a rank did not come in time.
        """
        if self._communicator.devices:
            raise UnsupportedError("allreduce: hierarchical cannot serve this call: devices are of one host")
        if len(self._groups) < 2:
            checks.check_not_capturing("allreduce", [x.device])
            self._find_hosts()
            self._make_groups()
        if x.is_cuda and not self._kernels:
            from graphar.communicator import Communicator

            self._beside = torch.cuda.Stream(x.device)
            self._kernels = Communicator(self._groups[0], timeout_s=self._communicator.timeout_s, debug=False)
        return f"asked for: {len(self._hosts)} host(s) of {len(self._hosts[0])} rank(s), sums inside, then across"

    def _find_hosts(self) -> None:
        if self._hosts is None:
            said = json.dumps([self._given, host()]).encode()
            words = [json.loads(word) for word in self._communicator.rendezvous().exchange("finding hosts", said)]
            if any(given != self._given for given, _ in words):
                raise CommunicatorError(f"ranks were given different hosts: {[given for given, _ in words]}")
            names = [name for _, name in words]
            found = [[rank for rank, one in enumerate(names) if one == name] for name in dict.fromkeys(names)]
            self._hosts = self._given or found
        if len({len(one) for one in self._hosts}) > 1:
            raise UnsupportedError(
                "allreduce: hierarchical cannot serve this call: hosts must have equally many ranks, got "
                f"{[len(one) for one in self._hosts]}"
            )

    def _make_groups(self) -> None:
        rank = self._communicator.rank
        inside = next(one for one in self._hosts if rank in one)
        across = [one[inside.index(rank)] for one in self._hosts]
        meet = self._communicator.rendezvous()
        try:
            for what, ranks in (("inside", inside), ("across", across)):
                make = partial(_new_group, self._communicator, what, ranks)
                meet.agree(f"making the groups {what} hosts", lambda make=make: self._groups.append(make()))
        except Exception:
            self._end_groups()
            raise

    def close(self) -> None:
        """Ends the groups; collective inside each host where there were kernels."""
        try:
            if self._kernels:
                self._kernels.close()
        finally:
            self._end_groups()

    def _end_groups(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            if group in dist.distributed_c10d._world.pg_map:  # the user may have ended all groups
                dist.destroy_process_group(group)

    def let_go_of_groups(self) -> None:
        """As Communicator.let_go_of_group."""
        self._groups = []
        if self._kernels:
            self._kernels.let_go_of_group()

    def synchronize(self) -> None:
        """As Communicator.synchronize."""
        if self._kernels:
            self._kernels.synchronize()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def allreduce(self, x: torch.Tensor, out: torch.Tensor, timeout_s: float, codec: Codec | None) -> None:
        """Writes what graphar.reference.hierarchical_allreduce gives into ``out``; both contiguous.

        What is summed inside is ``x`` in fp32: twice the bytes of bf16 over NVLink, and no kernel of its own.

        Args:
            codec: what is on the wire across hosts, to nearest; by plain torch, on GPUs too.
        """
        source, target, waiting = x.view(-1), out.view(-1), None
        step = _CHUNK_NUMEL // 4 if codec else _CHUNK_NUMEL
        for begin in range(0, source.numel(), step):
            window = slice(begin, begin + step)
            counts = _counts(source[window].numel(), self._groups[0].size(), TILE_NUMEL if codec else _LINE_NUMEL)
            part = self._sum_inside(source[window], counts, timeout_s)
            arrived = self._start_across(part, timeout_s, codec)
            if waiting:
                self._gather_inside(*waiting)
            waiting = target[window], part, arrived, counts, timeout_s
        if waiting:
            self._gather_inside(*waiting)

    def _sum_inside(self, chunk: torch.Tensor, counts: tuple[int, ...], timeout_s: float) -> torch.Tensor:
        wide = chunk.to(ACCUMULATION_DTYPES[chunk.dtype])
        part = wide.new_empty(counts[self._groups[0].rank()])
        if len(counts) == 1:
            part.copy_(wide)
        else:
            self._inside("reducescatter", wide, part, counts, timeout_s)
        return part

    def _start_across(self, part: torch.Tensor, timeout_s: float, codec: Codec | None) -> Callable[[], None]:
        """Sums ``part`` over the hosts in place; what it returns waits for that."""
        group = self._groups[1]
        if group.size() == 1 or not part.numel():
            return fallback.do_nothing
        step = partial(fallback.allreduce_process, part, part, group, timeout_s)
        if codec:
            step = partial(_quantized_allreduce, part, group, timeout_s, codec)
        if not part.is_cuda:
            step()
            return fallback.do_nothing
        self._beside.wait_stream(torch.cuda.current_stream(part.device))
        with torch.cuda.stream(self._beside):
            step()
        arrived = self._beside.record_event()
        return lambda: torch.cuda.current_stream(part.device).wait_event(arrived)

    def _gather_inside(
        self, target: torch.Tensor, part: torch.Tensor, arrived: Callable, counts: tuple[int, ...], timeout_s: float
    ) -> None:
        arrived()
        rounded = with_canonical_nan(part.to(target.dtype))
        if len(counts) == 1:
            target.copy_(rounded)
        else:
            self._inside("allgather", rounded, target, counts, timeout_s)

    def _inside(self, op: str, x: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...], timeout_s: float) -> None:
        if x.is_cuda:
            self._kernels.run_parts(op, x, out, counts, timeout_s, blocks=_BLOCKS)
        else:
            fallback.PROCESS[op](x, out, group=self._groups[0], timeout_s=timeout_s, counts=counts)


def _quantized_allreduce(part: torch.Tensor, group: dist.ProcessGroup, timeout_s: float, codec: Codec) -> None:
    """Sums ``part`` over the group in place, as graphar.reference.quantized_allreduce does."""
    counts = _counts(part.numel(), group.size(), TILE_NUMEL)
    own = part.new_empty(counts[group.rank()])
    fallback.quantized_reducescatter_process(part, own, group, timeout_s, counts, codec, repeat(0))
    wire = encode(own, codec)
    nbytes = [-(-count // TILE_NUMEL) * codec.tile_nbytes for count in counts]
    wires = wire.new_empty(sum(nbytes))
    fallback.allgather_process(wire, wires, group, timeout_s, nbytes)
    for target, one in zip(part.split(counts), wires.split(nbytes), strict=True):
        if target.numel():
            target.copy_(decode(one, codec)[: target.numel()])


def _counts(numel: int, ranks: int, unit: int) -> tuple[int, ...]:
    """The elements of each rank's part: whole units, but for the last that has any."""
    share = -(-numel // (ranks * unit)) * unit
    return tuple(min(share, max(0, numel - rank * share)) for rank in range(ranks))


def _new_group(communicator: Communicator, what: str, ranks: list[int]) -> dist.ProcessGroup:
    """The process group of some ranks of a communicator, which only these have to make; its time-out is the same."""
    c10d, parent = dist.distributed_c10d, communicator.group
    processes = dist.get_process_group_ranks(parent)
    if dist.group.WORLD.bound_device_id is not None and len(processes) < dist.get_world_size():
        raise UnsupportedError(
            "allreduce: hierarchical cannot serve this call: NCCL splits a default group that was made with device_id "
            "by all of its processes, and this group has only some"
        )
    # dist.new_group wants all processes, or else names a group by how many this process has, which others need not have
    # as many of; and it gives the name of a group that was destroyed, whose addresses are still in the store, again.
    name = communicator.rendezvous().name(what, ranks)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(communicator.rank),
        [processes[rank] for rank in ranks],
        dist.Backend(dist.get_backend(parent)),
        c10d._get_default_store(),
        name,
        timeout=timedelta(seconds=communicator.timeout_s),
        group_desc=f"graphar {what} hosts",
    )
    c10d._world.pg_group_ranks[group] = {processes[rank]: place for place, rank in enumerate(ranks)}
    return group
