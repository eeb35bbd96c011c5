"""Mistakes in asynchronous copies and in the fences between proxies and aliases, and out-of-bounds reads."""

from __future__ import annotations

from graphar.simulator.build import Mutation
from tests.host.mutant import mutants_of

PACK = "device/pack.cuh"
INIT_AND_BARRIER = (
    "  if (threadIdx.x < channels) progress[threadIdx.x].init();\n"
    "  advance_epoch(a, call);  // its barrier comes before any use of an mbarrier\n"
)

COPY_MUTANTS = mutants_of(
    {
        "one_shot": {"a copy that is not waited for": ("wait_for_copies<Depth - 1>();", "wait_for_copies<Depth>();")},
        ("two_shot_tma", "plain", 2): {
            "a bulk store that is not waited for": (
                "        wait_for_bulk_stores();\n      }\n      __syncwarp();",
                "      }\n      __syncwarp();",
            ),
            "a bulk load that is not waited for": ("      progress.loaded.wait(k);\n", ""),
            "a sum that is overwritten while it is sent": (
                "      if (k > 0 && !wait(progress.pushed, k - 1)) break;\n",
                "",
            ),
            "a place in the scratch that is taken too early": (
                "if (k >= tma_depth && !wait(progress.gathered[k % tma_depth], k / tma_depth - 1)) break;",
                "",
            ),
        },
        ("two_shot_tma", "thread", 2): {
            "mbarriers that are new to the copies": ("    fence_async_proxy_shared();  // the mbarriers are new\n", ""),
            "mbarriers that are new to the other threads": (
                INIT_AND_BARRIER,
                "".join(reversed(INIT_AND_BARRIER.splitlines(keepends=True))),
            ),
            "bulk loads before the input is known to them": (
                "    fence_async_proxy_global();  // and the kernel before may have written the input\n",
                "",
            ),
            "bulk stores before the lanes' part of a piece is known to them": (
                "    fence_async_proxy_shared();\n    __syncwarp();\n  }\n",
                "    __syncwarp();\n  }\n",
            ),
            "bulk stores before the sum is known to them": (
                "      fence_async_proxy_shared();\n      __syncwarp();\n      if",
                "      __syncwarp();\n      if",
            ),
            "bulk stores over what peers read past them": Mutation(
                "allreduce/two_shot_tma.cu", "        fence_async_proxy_global();\n", "", times=2
            ),
        },
        ("multimem_one_shot", "thread"): {
            "a switch that adds what was staged past it": ("  Multimem::fence_before_signal();\n", ""),
            "a fence for one thread's stores alone": (
                "device/sync/multimem.cuh",
                "    __syncthreads();\n    if (threadIdx.x == 0) fence_aliases();",
                "    if (threadIdx.x == 0) fence_aliases();",
            ),
        },
        ("multimem_two_shot", "thread"): {
            "a switch that adds what was staged past it, in two shots": (
                "\n  Multimem::fence_before_signal();\n",
                "\n",
            ),
            "sums of the switch that are read past it": ("\n    Multimem::fence_before_signal();\n", "\n"),
        },
        ("one_shot_push", "address"): {
            "a pack read past the end": (
                PACK,
                "whole(reinterpret_cast<u64>(p) % sizeof(P) ? 0 : n / E)",
                "whole(reinterpret_cast<u64>(p) % sizeof(P) ? 0 : (n + E - 1) / E)",
            ),
            "an element read past the end": (PACK, "if (e < count) p.word", "if (e <= count) p.word"),
        },
    }
)
