"""A matmul in panels, overlapped with their sums over ranks: while one panel is summed, the next is multiplied.

    the caller's stream    multiply 0 | sum 0       | sum 1       | sum 2
    side stream                       | multiply 1  | multiply 2  |

The sums are calls of one communicator on one stream, so each begins after the one before has ended. Each panel has its
own memory, and passes from one stream to the other once, by an event. A multiplication never waits for a sum, and so
never for another rank. It therefore ends, and frees its SMs for a sum that waits for them. At the end, also after an
error, the caller's stream waits for the side stream.

A sum that runs beside a multiplication has few blocks. graphar's matmul leaves these SMs free; torch's matmul does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphar.runtime.side_stream import stream_beside


@dataclass(frozen=True)
class Beside:
    """How a sum runs beside a multiplication."""

    algorithm: str = "auto"  # the ``algorithm`` of graphar.allreduce
    blocks: int | None = None  # the most blocks of the sum's grid; None: the tuning table's number


AUTO = Beside()


def in_turn(
    panels: int,
    devices: Sequence[torch.device],
    multiplies: Sequence[Callable[[int], None]],
    sum_panel: Callable[[int, bool], None],
) -> None:
    """Multiplies and sums panels in turn, on the caller's stream and on the side stream of each device.

    Args:
        multiplies: of each device, multiplies the panel with a number, on the current stream.
        sum_panel: sums the panel with a number; it is also told whether the next panel is multiplied meanwhile.
    """
    streams = [streams_of(device) for device in devices]
    try:
        for at in range(panels):
            for multiply, (main, side) in zip(multiplies, streams, strict=True):
                with torch.cuda.stream(side if at else main):
                    multiply(at)
                # The caller's stream waits for the panel. The side stream starts after the first multiplication.
                if at:
                    main.wait_stream(side)
                else:
                    side.wait_stream(main)
            sum_panel(at, at < panels - 1)
    finally:
        for main, side in streams:
            main.wait_stream(side)


def streams_of(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Returns the caller's stream on a device, and its side stream."""
    main = torch.cuda.current_stream(device)
    return main, stream_beside(device, main.cuda_stream)
