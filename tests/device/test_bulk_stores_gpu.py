"""A litmus test between two GPUs: the wait for bulk stores to a peer keeps (5) of cuda_src/device/ptx/tma.cuh.

Each block of the first GPU fills a payload with the number of the round, stores it to the second GPU by a bulk copy,
waits for the copy and raises a flag. A block there waits for the flag, counts the words that an earlier round wrote,
and answers. Other blocks keep the link busy with bulk stores meanwhile.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from graphar.runtime.driver import call, driver, on_device
from graphar.runtime.launcher import Grid
from graphar.runtime.memory.peer_memory import LocalMemory
from tests.small_kernels import bind

pytestmark = pytest.mark.gpu(2)

PAIRS, LOADING, ROUNDS = 64, 32, 20_000
STRIDE = 1 << 16  # of a pair's payloads
TEXT = """
#include "device/ptx/tma.cuh"

struct Litmus {
  char* payload;   // of the receiving GPU
  u32* flags;      // of the receiving GPU, one in 256 bytes
  u32* answers;    // of the sending GPU, one in 256 bytes
  u32* counts;     // of the receiving GPU: stale words, rounds
  u32 rounds, nbytes, stride;
};

__device__ bool wait_for(const u32* flag, u32 round) {
  const u64 begin = global_time_ns();
  while (load_acquire_sys(flag) < round)
    if (global_time_ns() - begin > 2000000000) return false;
  return true;
}

extern "C" __global__ void send(const __grid_constant__ Litmus it) {
  Pack* const stage = dynamic_shared();
  char* const there = it.payload + u64(blockIdx.x) * it.stride;
  u32* const flag = it.flags + blockIdx.x * 64;
  for (u32 round = 1; round <= it.rounds; ++round) {
    for (u32 i = threadIdx.x; i < it.nbytes / 16; i += 32) stage[i] = {{round, round, round, round}};
    fence_async_proxy_shared();
    __syncwarp();
    if (threadIdx.x == 0) {
      bulk_store(there, stage, it.nbytes);
      wait_for_bulk_stores();
      store_release_sys(flag, round);
    }
    const bool answered = threadIdx.x != 0 || wait_for(it.answers + blockIdx.x * 64, round);
    if (!__all_sync(0xffffffff, answered)) return;
  }
}

extern "C" __global__ void receive(const __grid_constant__ Litmus it) {
  const Pack* const here = reinterpret_cast<const Pack*>(it.payload + u64(blockIdx.x) * it.stride);
  u32 stale = 0, round = 1;
  for (; round <= it.rounds; ++round) {
    const bool raised = threadIdx.x != 0 || wait_for(it.flags + blockIdx.x * 64, round);
    if (!__all_sync(0xffffffff, raised)) break;
    for (u32 i = threadIdx.x; i < it.nbytes / 16; i += 32) {
      const Pack p = load_relaxed_sys(here + i);
      for (int w = 0; w < 4; ++w) stale += p.word[w] != round;
    }
    __syncwarp();
    if (threadIdx.x == 0) store_release_sys(it.answers + blockIdx.x * 64, round);
  }
  atomicAdd(it.counts, stale);
  if (threadIdx.x == 0) atomicAdd(it.counts + 1, round - 1);
}

extern "C" __global__ void load_the_link(char* there, u32 nbytes, const u32* last_answer, u32 rounds) {
  const u64 begin = global_time_ns();
  while (load_acquire_sys(last_answer) + 100 < rounds && global_time_ns() - begin < 5000000000) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 4; ++i) bulk_store(there + u64(blockIdx.x) * nbytes, dynamic_shared(), nbytes);
      wait_for_bulk_stores();
    }
    __syncwarp();
  }
}
"""


class Litmus(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("payload", "flags", "answers", "counts")),
        *((name, ctypes.c_uint32) for name in ("rounds", "nbytes", "stride")),
    ]


@pytest.fixture(scope="module")
def memory():
    """On each GPU: payloads, memory for the load, and words."""
    local = LocalMemory([0, 1])
    local.check()
    buffer = local.allocate((PAIRS + LOADING) * STRIDE + (1 << 20))
    yield buffer
    buffer.free()


def stale_words(memory, sender: int, nbytes: int) -> tuple[int, int]:
    """How many words of an earlier round receivers found after a flag, and how many rounds all pairs made."""
    receiver = 1 - sender
    words = (PAIRS + LOADING) * STRIDE
    counts = torch.zeros(2, dtype=torch.int32, device=f"cuda:{receiver}")
    here, there = (memory.pointers[device] for device in (sender, receiver))
    litmus = Litmus(there, there + words, here + words, counts.data_ptr(), ROUNDS, nbytes, STRIDE)
    pressure = (
        ctypes.c_uint64(there + PAIRS * STRIDE), ctypes.c_uint32(STRIDE // 2), ctypes.c_uint64(here + words),
        ctypes.c_uint32(ROUNDS),
    )  # fmt: skip
    streams = {name: torch.cuda.Stream(device) for name, device in (("send", sender), ("receive", receiver))}
    streams["load_the_link"] = torch.cuda.Stream(sender)
    for device in (sender, receiver):
        clear(memory.pointers[device] + words, device)
    for name, parameters, blocks in (
        ("receive", [litmus], PAIRS),
        ("send", [litmus], PAIRS),
        ("load_the_link", pressure, LOADING),
    ):
        grid = Grid(blocks, 32, 0 if name == "receive" else STRIDE // 2, overlaps=False)
        with torch.cuda.device(streams[name].device):
            bind(TEXT, name, streams[name].device.index, parameters, grid).enqueue(streams[name].cuda_stream)
    for device in (sender, receiver):
        torch.cuda.synchronize(device)
    stale, rounds = counts.tolist()
    return stale, rounds


def clear(address: int, device: int) -> None:
    with on_device(device):
        call(driver.cuMemsetD8, address, 0, 1 << 20)
        call(driver.cuCtxSynchronize)


@pytest.mark.parametrize("nbytes", [16, 1024, 32 << 10])
@pytest.mark.parametrize("sender", [0, 1])
def test_what_a_release_announces_after_the_wait_has_been_stored(memory, sender, nbytes):
    assert stale_words(memory, sender, nbytes) == (0, PAIRS * ROUNDS)
