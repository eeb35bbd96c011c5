"""FlashInfer's all-reduces: vLLM's custom all-reduce, TensorRT-LLM's one-shot and two-shot, and an FP8 two-shot."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from graphar.plan.sizes import KB, MB
from perf.harness.cases import HIDDEN, Plan
from perf.harness.ranks import Ranks
from perf.peers.methods import Family, Method, Pair, symmetric, up_to

VLLM_MAX_NBYTES = 256 * MB
VLLM_BLOCKS = 36  # the most thread blocks that it supports
# Rows of eight pointers. Each captured call takes the next row.
VLLM_ROWS = 1 << 17

ONE_SHOT_MAX_NBYTES = 4 * MB
TWO_SHOT_MAX_NBYTES = 32 * MB
SMALL_HIDDEN = 1024  # the row length for tensors that are too small for rows of HIDDEN

FP8_MIN_NBYTES, FP8_MAX_NBYTES = 64 * KB, 512 * MB


def load_vllm(plan: Plan) -> None:
    tolerate_no_wheels()
    from flashinfer.comm import vllm_ar

    vllm_ar.get_vllm_comm_module()


def make_vllm(plan: Plan, ranks: Ranks) -> list[Method]:
    from flashinfer.comm import vllm_ar

    dtype = getattr(torch, plan.dtypes[0])
    max_nbytes = up_to(plan, VLLM_MAX_NBYTES)
    signals, signals_handle = symmetric(vllm_ar.meta_size() + max_nbytes)
    signals.zero_()
    buffer, buffer_handle = symmetric(2 * max_nbytes, dtype)
    pair = Pair(*buffer.chunk(2))

    def communicator(offset: int) -> tuple[int, Tensor]:
        """Returns a communicator for inputs at ``offset``, and its table of pointers. The table must outlive it."""
        pointers = [base + buffer_handle.offset + offset for base in buffer_handle.buffer_ptrs]
        # All rows are equal, so every captured call finds the right pointers. Otherwise the ranks would have to
        # exchange an IPC handle for each captured address.
        row = torch.tensor(pointers + [0] * (8 - ranks.size), dtype=torch.int64, device=ranks.device)
        table = row.repeat(VLLM_ROWS).view(torch.uint8)
        bases = [base + signals_handle.offset for base in signals_handle.buffer_ptrs]
        torch.cuda.synchronize()
        handle = vllm_ar.init_custom_ar(bases, table, ranks.rank, True)
        vllm_ar.register_buffer(handle, pointers)
        return handle, table

    by_input = {pair.first.data_ptr(): communicator(0), pair.second.data_ptr(): communicator(max_nbytes)}
    unregistered, _ = by_input[pair.first.data_ptr()]
    keeps = (signals, signals_handle, buffer_handle, by_input)
    ranks.barrier()

    def call(x: Tensor) -> Tensor:
        out = pair.opposite(x)
        vllm_ar.all_reduce(by_input[x.data_ptr()][0], x, out, 0, 0, VLLM_BLOCKS)
        return out

    def call_unregistered(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        vllm_ar.all_reduce(unregistered, x, out, pair.first.data_ptr(), max_nbytes, VLLM_BLOCKS)
        return out

    return [
        Method("vllm", call, buffer=pair.first, max_nbytes=max_nbytes, keeps=keeps),
        Method("vllm_unregistered", call_unregistered, max_nbytes=max_nbytes, keeps=keeps),
    ]


def load_trtllm(plan: Plan) -> None:
    tolerate_no_wheels()
    from flashinfer.comm import trtllm_ar

    trtllm_ar.get_trtllm_comm_module()


def make_trtllm(plan: Plan, ranks: Ranks) -> list[Method]:
    from flashinfer import comm

    dtype = getattr(torch, plan.dtypes[0])
    workspace = comm.create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=ranks.size,
        rank=ranks.rank,
        max_token_num=-(-up_to(plan, TWO_SHOT_MAX_NBYTES) // (HIDDEN * dtype.itemsize)),
        hidden_dim=HIDDEN,
        dtype=dtype,
        gpus_per_node=ranks.size,
    )

    def method(name: str, one_shot: bool, max_nbytes: int) -> Method:
        least_rows = 1 if one_shot else ranks.size + 1

        def call(x: Tensor) -> Tensor:
            hidden = HIDDEN if x.numel() >= HIDDEN * least_rows else SMALL_HIDDEN
            out = comm.allreduce_fusion(
                x.view(-1, hidden),
                workspace,
                comm.AllReduceFusionPattern.kAllReduce,
                launch_with_pdl=True,
                use_oneshot=one_shot,
            )
            return out.view(-1)

        least_nbytes = SMALL_HIDDEN * least_rows * dtype.itemsize
        return Method(name, call, min_nbytes=least_nbytes, max_nbytes=max_nbytes)

    return [
        method("flashinfer_one_shot", True, ONE_SHOT_MAX_NBYTES),
        method("flashinfer_two_shot", False, TWO_SHOT_MAX_NBYTES),
    ]


def load_fp8(plan: Plan) -> None:
    tolerate_no_wheels()
    from flashinfer.comm import quantized_allreduce  # noqa: F401


def make_fp8(plan: Plan, ranks: Ranks) -> list[Method]:
    from flashinfer.comm.quantized_allreduce import quantized_all_reduce

    dtype = getattr(torch, plan.dtypes[0])
    group = dist.group.WORLD
    max_nbytes = up_to(plan, FP8_MAX_NBYTES)

    def call(x: Tensor) -> Tensor:
        return quantized_all_reduce(x, group)

    call(torch.ones(max_nbytes // dtype.itemsize, dtype=dtype, device=ranks.device))  # allocates memory for all sizes
    return [Method("flashinfer_fp8", call, quantised=True, min_nbytes=FP8_MIN_NBYTES, max_nbytes=max_nbytes)]


def tolerate_no_wheels() -> None:
    """Disables FlashInfer's check that its packages of compiled kernels have the same version."""
    os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")


FAMILIES = (
    Family(("vllm", "vllm_unregistered"), make_vllm, load_vllm, world_sizes=(2, 4, 6, 8)),
    Family(("flashinfer_one_shot", "flashinfer_two_shot"), make_trtllm, load_trtllm, world_sizes=(2, 4, 8)),
    Family(("flashinfer_fp8",), make_fp8, load_fp8, world_sizes=(2, 4, 8)),
)
