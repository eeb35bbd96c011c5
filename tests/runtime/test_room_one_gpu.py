"""Kernels that spin on one GPU: grids of as many communicators as declared find room beside each other."""

import ctypes
import time

import pytest
import torch

from graphar.plan.policy import Chip
from graphar.runtime.launcher import Grid, architecture, sm_count
from tests.small_kernels import bind

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) < (9, 0), reason="needs an sm_90 GPU"
    ),
]

SPIN = """
#include "device/ptx/ptx.cuh"
extern "C" __global__ void __launch_bounds__(128) spin(volatile u32* stop, u32* started) {
  const u64 begin = global_time_ns();
  if (threadIdx.x == 0) started[blockIdx.x] = 1;
  release_next_kernel();
  while (*stop == 0 && global_time_ns() - begin < 20000000000ull) continue;
}
"""
HALF_NBYTES, WHOLE_NBYTES = 100 << 10, 200 << 10  # of dynamic shared memory: two blocks fit on an SM, or one
MOST_BLOCKS, SETTLE_S = 512, 0.2


class Spinning:
    """Grids that spin until the end, and how many of their blocks have begun."""

    def __init__(self):
        self._words, self._started, self._streams = torch.zeros(1, dtype=torch.int32).pin_memory(), [], []

    def launch(self, blocks, nbytes, cluster=1, behind=None):
        """Launches a grid on a stream of its own, or early behind an earlier grid; returns its number."""
        started = torch.zeros(MOST_BLOCKS, dtype=torch.int32).pin_memory()
        stream = torch.cuda.Stream() if behind is None else self._streams[behind]
        pointers = [ctypes.c_uint64(one.data_ptr()) for one in (self._words, started)]
        grid = Grid(blocks, 128, nbytes, overlaps=behind is not None, cluster=cluster)
        bind(SPIN, "spin", 0, pointers, grid).enqueue(stream.cuda_stream)
        self._started.append(started)
        self._streams.append(stream)
        time.sleep(SETTLE_S)
        return len(self._started) - 1

    def begun(self):
        """How many blocks of each grid have begun, in the order of their launches."""
        return [int(one.sum()) for one in self._started]

    def end(self):
        self._words[0] = 1
        torch.cuda.synchronize()


@pytest.fixture
def spinning():
    made = Spinning()
    yield made
    made.end()


def chip_for(communicators):
    return Chip(sm_count(0), architecture(0), communicators)


@pytest.mark.parametrize("communicators", [3, 4])
@pytest.mark.parametrize(
    ("halves", "cluster"), [(True, 1), (False, 1), (False, 2)], ids=["halves", "whole SMs", "pairs of whole SMs"]
)
def test_the_grids_of_as_many_communicators_as_declared_all_begin(spinning, communicators, halves, cluster):
    blocks = chip_for(communicators).shared_blocks(halves, cluster)

    for _ in range(communicators):
        spinning.launch(blocks, HALF_NBYTES if halves else WHOLE_NBYTES, cluster)

    assert spinning.begun() == [blocks] * communicators


@pytest.mark.parametrize("communicators", [2, 3, 4])
def test_grids_that_start_early_leave_room_for_the_last_communicator(spinning, communicators):
    chip = chip_for(communicators)
    blocks = chip.shared_blocks(halves=True)
    early = max(one for one in range(1, blocks + 1) if chip.may_overlap(one, halves=True))

    for _ in range(communicators - 1):
        spinning.launch(early, HALF_NBYTES, behind=spinning.launch(blocks, HALF_NBYTES))
    spinning.launch(blocks, HALF_NBYTES)

    *others, last = spinning.begun()
    assert others == [blocks, early] * (communicators - 1)
    assert last > 0


@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_pairs_of_whole_sms_begin_beside_two_norms_in_clusters(spinning, cluster):
    chip = chip_for(3)

    for _ in range(2):
        spinning.launch(chip.shared_blocks(halves=True, cluster=cluster), HALF_NBYTES, cluster)
    spinning.launch(chip.shared_blocks(cluster=2), WHOLE_NBYTES, 2)

    *norms, tiles = spinning.begun()
    assert norms == [chip.shared_blocks(halves=True, cluster=cluster)] * 2
    assert tiles >= 2


@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_a_norm_in_clusters_begins_beside_two_others(spinning, cluster):
    blocks = chip_for(3).shared_blocks(halves=True, cluster=cluster)

    for _ in range(3):
        spinning.launch(blocks, HALF_NBYTES, cluster)

    assert spinning.begun()[-1] >= cluster


def test_three_communicators_go_on_beside_a_foreign_kernel_that_is_declared_as_a_fourth(spinning):
    chip = chip_for(4)

    spinning.launch(chip.sms // 4, WHOLE_NBYTES)  # it holds its SMs and waits
    for _ in range(3):
        spinning.launch(chip.shared_blocks(halves=True), HALF_NBYTES)

    assert spinning.begun() == [chip.sms // 4] + [chip.shared_blocks(halves=True)] * 3


def test_the_third_of_three_grids_for_two_communicators_does_not_all_begin(spinning):
    """The negative control: without a declaration."""
    blocks = chip_for(2).shared_blocks(halves=True)

    for _ in range(4):
        spinning.launch(blocks, HALF_NBYTES)

    first, second, third, fourth = spinning.begun()
    assert (first, second, fourth) == (blocks, blocks, 0)
    assert third < blocks
