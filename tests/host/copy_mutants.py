"""Mistakes in asynchronous copies and in the fences between proxies and aliases, and out-of-bounds reads."""

from __future__ import annotations

from graphar.plan.algorithms import Algorithm
from graphar.simulator.build import Mutation
from tests.host.mutant import Mutant, mutant

PACK = "device/pack.cuh"
INIT_AND_BARRIER = (
    "  if (threadIdx.x < channels) progress[threadIdx.x].init();\n"
    "  advance_epoch(a, call);  // its barrier comes before any use of an mbarrier\n"
)

COPY_MUTANTS = (
    # ---- asynchronous copies
    mutant(
        "a copy that is not waited for",
        "allreduce/one_shot.cu",
        "wait_for_copies<Depth - 1>();",
        "wait_for_copies<Depth>();",
        "one_shot",
    ),
    mutant(
        "a bulk store that is not waited for",
        "allreduce/two_shot_tma.cu",
        "        wait_for_bulk_stores();\n      }\n      __syncwarp();",
        "      }\n      __syncwarp();",
        "two_shot_tma",
        world_size=2,
    ),
    mutant(
        "a bulk load that is not waited for",
        "allreduce/two_shot_tma.cu",
        "      progress.loaded.wait(k);\n",
        "",
        "two_shot_tma",
        world_size=2,
    ),
    mutant(
        "a sum that is overwritten while it is sent",
        "allreduce/two_shot_tma.cu",
        "      if (k > 0 && !wait(progress.pushed, k - 1)) break;\n",
        "",
        "two_shot_tma",
        world_size=2,
    ),
    mutant(
        "a place in the scratch that is taken too early",
        "allreduce/two_shot_tma.cu",
        "if (k >= tma_depth && !wait(progress.gathered[k % tma_depth], k / tma_depth - 1)) break;",
        "",
        "two_shot_tma",
        world_size=2,
    ),
    # ---- fences between proxies and between aliases
    mutant(
        "mbarriers that are new to the copies",
        "allreduce/two_shot_tma.cu",
        "    fence_async_proxy_shared();  // the mbarriers are new\n",
        "",
        "two_shot_tma",
        "thread",
        2,
    ),
    mutant(
        "mbarriers that are new to the other threads",
        "allreduce/two_shot_tma.cu",
        INIT_AND_BARRIER,
        "".join(reversed(INIT_AND_BARRIER.splitlines(keepends=True))),
        "two_shot_tma",
        "thread",
        2,
    ),
    mutant(
        "bulk loads before the input is known to them",
        "allreduce/two_shot_tma.cu",
        "    fence_async_proxy_global();  // and the kernel before may have written the input\n",
        "",
        "two_shot_tma",
        "thread",
        2,
    ),
    mutant(
        "bulk stores before the lanes' part of a piece is known to them",
        "allreduce/two_shot_tma.cu",
        "    fence_async_proxy_shared();\n    __syncwarp();\n  }\n",
        "    __syncwarp();\n  }\n",
        "two_shot_tma",
        "thread",
        2,
    ),
    mutant(
        "bulk stores before the sum is known to them",
        "allreduce/two_shot_tma.cu",
        "      fence_async_proxy_shared();\n      __syncwarp();\n      if",
        "      __syncwarp();\n      if",
        "two_shot_tma",
        "thread",
        2,
    ),
    Mutant(
        "bulk stores over what peers read past them",  # one of the two fences lies on every such path
        Mutation("allreduce/two_shot_tma.cu", "        fence_async_proxy_global();\n", "", times=2),
        Algorithm.TWO_SHOT_TMA,
        "thread",
        2,
    ),
    mutant(
        "a switch that adds what was staged past it",
        "allreduce/multimem_one_shot.cu",
        "  Multimem::fence_before_signal();\n",
        "",
        "multimem_one_shot",
        "thread",
    ),
    mutant(
        "a switch that adds what was staged past it, in two shots",
        "allreduce/multimem_two_shot.cu",
        "\n  Multimem::fence_before_signal();\n",
        "\n",
        "multimem_two_shot",
        "thread",
    ),
    mutant(
        "sums of the switch that are read past it",
        "allreduce/multimem_two_shot.cu",
        "\n    Multimem::fence_before_signal();\n",
        "\n",
        "multimem_two_shot",
        "thread",
    ),
    mutant(
        "a fence for one thread's stores alone",
        "device/sync/multimem.cuh",
        "    __syncthreads();\n    if (threadIdx.x == 0) fence_aliases();",
        "    if (threadIdx.x == 0) fence_aliases();",
        "multimem_one_shot",
        "thread",
    ),
    # ---- out-of-bounds reads
    mutant(
        "a pack read past the end",
        PACK,
        "whole(reinterpret_cast<u64>(p) % sizeof(P) ? 0 : n / E)",
        "whole(reinterpret_cast<u64>(p) % sizeof(P) ? 0 : (n + E - 1) / E)",
        "one_shot_push",
        "address",
    ),
    mutant(
        "an element read past the end",
        PACK,
        "if (e < count) p.word",
        "if (e <= count) p.word",
        "one_shot_push",
        "address",
    ),
)
