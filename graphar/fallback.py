"""The exact all-reduce over torch.distributed: any backend, dtype and number of hosts; and the one on the CPU.

Every rank receives its shard of all inputs, sums it as graphar.reference does, and sends the sum to all: the traffic of
a two-shot, and the same bits as every other algorithm. Only bytes travel, so a backend need not know the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from graphar import reference
from graphar.errors import CollectiveTimeout, UnsupportedError

_CHUNK_NBYTES = 64 << 20


def allreduce_process(x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, timeout_s: float) -> None:
    """Writes the sum of every rank's ``x`` into ``out``; both contiguous, one rank a process.

    Raises:
        UnsupportedError: the group has no backend for the device of ``x``.
        CollectiveTimeout: on the CPU, when the group was not done in ``timeout_s`` seconds.
    """
    try:
        group._get_backend(x.device)
    except RuntimeError as error:
        raise UnsupportedError(f"the group has no backend for {x.device.type} tensors: {error}") from None
    source, target = x.view(-1), out.view(-1)
    step = max(1, _CHUNK_NBYTES // source.element_size())
    for start in range(0, source.numel(), step):
        target[start : start + step].copy_(_chunk(source[start : start + step], group, timeout_s))


def _chunk(x: torch.Tensor, group: dist.ProcessGroup, timeout_s: float) -> torch.Tensor:
    world_size = group.size()
    shard = -(-x.numel() // world_size)
    padded = torch.nn.functional.pad(x, (0, world_size * shard - x.numel()))
    parts = torch.empty_like(padded)
    _wait(x, timeout_s, lambda: dist.all_to_all_single(_bytes(parts), _bytes(padded), group=group, async_op=True))
    total = reference.allreduce(parts.view(world_size, shard).unbind())
    gathered = torch.empty_like(padded)
    shards = list(_bytes(gathered).chunk(world_size))
    _wait(x, timeout_s, lambda: dist.all_gather(shards, _bytes(total), group, async_op=True))
    return gathered[: x.numel()]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def _wait(x: torch.Tensor, timeout_s: float, start: Callable[[], dist.Work]) -> None:
    if x.device.type != "cpu":
        start().wait()  # only orders the stream; the group's own timeout holds
        return
    try:
        start().wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise CollectiveTimeout(
            f"fallback: a rank failed, or did not take part within {timeout_s:g} s: {error}"
        ) from error


def allreduce_local(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Writes the sum of all inputs into every output; one process holds all ranks, on the CPU or on several devices."""
    totals = {
        device: reference.allreduce([part.to(device) for part in inputs]) for device in {out.device for out in outputs}
    }
    for out in outputs:
        out.copy_(totals[out.device])
