"""What a recorded kernel writes: mirrors cuda_src/device/timeline.cuh, which says what the phases are."""

from __future__ import annotations

import torch

PHASES = ("multiplying", "waiting", "adding", "staging", "sending", "gathering")  # from 1 on; 0 is no event
CONSUMER_TRACKS = 2
TRACKS, TRACK_EVENTS = 6, 256  # of a block, of a track
EVENT_WORDS = 2  # of 64 bits: the beginning in ns; the duration in ns in 32 bits, and above them the phase


def empty(blocks: int, device: torch.device) -> torch.Tensor:
    """Of so many blocks, without events: int64, [blocks, TRACKS, TRACK_EVENTS, EVENT_WORDS]."""
    return torch.zeros(blocks, TRACKS, TRACK_EVENTS, EVENT_WORDS, dtype=torch.int64, device=device)
