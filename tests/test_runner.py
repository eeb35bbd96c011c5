"""What the runner refuses before it loads anything."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphar import UnsupportedError, launcher
from graphar.algorithms import Algorithm
from graphar.runner import Runner


def test_a_device_too_old_for_a_kernel_is_named(monkeypatch):
    monkeypatch.setattr(launcher, "architecture", lambda device: "sm_80")
    runner = Runner([SimpleNamespace(rank=0, device=1)], 2, memory=None, rendezvous=None, multicast_memory=None)

    with pytest.raises(UnsupportedError, match=r"two_shot_tma needs sm_90 or newer, cuda:1 is sm_80"):
        runner._load(Algorithm.TWO_SHOT_TMA, torch.bfloat16, direct=False)
