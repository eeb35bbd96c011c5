"""The timeline of a recorded kernel; mirrors cuda_src/device/matmul/timeline.cuh, which explains the phases."""

from __future__ import annotations

import torch

PHASES = ("multiplying", "waiting", "adding", "staging", "sending", "gathering")  # numbered from 1; 0: no event
CONSUMER_TRACKS = 2
TRACKS, TRACK_EVENTS = 6, 256  # tracks of a block, events of a track
EVENT_WORDS = 2  # 64-bit words: the begin in ns; the duration in ns (low 32 bits) and the phase (high 32 bits)


def empty(blocks: int, device: torch.device) -> torch.Tensor:
    """Returns a timeline without events: zeros, int64, [blocks, TRACKS, TRACK_EVENTS, EVENT_WORDS]."""
    return torch.zeros(blocks, TRACKS, TRACK_EVENTS, EVENT_WORDS, dtype=torch.int64, device=device)
