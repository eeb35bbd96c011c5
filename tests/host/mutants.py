"""Small mistakes in the kernels, each of which the runs on the host must notice: the negative controls."""

from __future__ import annotations

from dataclasses import dataclass

from graphar.algorithms import Algorithm
from tests.host.build import Mutation


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the runs that notice it.

    Attributes:
        name: what is wrong, in words.
        mutation: how it is made.
        algorithm: whose kernel is run.
        sanitizer: "thread" where only an order is broken that the host's memory happens to keep; else "plain".
        world_size: ranks.
    """

    name: str
    mutation: Mutation
    algorithm: Algorithm
    sanitizer: str = "plain"
    world_size: int = 3


def _mutant(name: str, file: str, old: str, new: str, algorithm: str, sanitizer: str = "plain", world_size: int = 3):
    return Mutant(name, Mutation(file, old, new), Algorithm(algorithm), sanitizer, world_size)


CALL, SENTINEL, FLAGGED = "device/call.cuh", "device/sentinel.cuh", "device/flagged.cuh"
PAD, PACK, WIRE = "device/signal_pad.cuh", "device/pack.cuh", "device/wire_sentinel.cuh"
SEND = "store_release_sys(&signal_pad(a, threadIdx.x)->flag[blockIdx.x][a.rank], base_ + steps);"
WARP_SEND = "store_release_sys(&signal_pad(a, lane)->flag[row_][a.rank], base_ + steps);"
POLL = "for (u32 seen = load_acquire_sys(flag); int(seen - value) < 0; seen = load_acquire_sys(flag)) {"
ARM = "for (int r = 0; r < N; ++r) store_relaxed_sys(from[r], Pack{{not_yet, not_yet, not_yet, not_yet}});"
REDUCE_AND_SEND = "    if (k >= 1 && k <= chunks) body.reduce(k - 1);\n    signals.send<N>(a, k + 1);\n"
INIT_AND_BARRIER = (
    "  if (threadIdx.x < channels) progress[threadIdx.x].init();\n"
    "  advance_epoch(a, call);  // its barrier comes before any use of an mbarrier\n"
)
SLOTS = "const u32 slots = (call.epoch & 1) * N * a.capacity;"

MUTANTS = (
    # ---- order
    _mutant("a signal that is no release", PAD, SEND, SEND.replace("release_sys", "relaxed_gpu"), "one_shot", "thread"),
    _mutant(
        "a warp's signal that is no release",
        PAD,
        WARP_SEND,
        WARP_SEND.replace("release_sys", "relaxed_gpu"),
        "two_shot_tma",
        "thread",
        2,
    ),
    _mutant(
        "a wait that is no acquire",
        PAD,
        POLL,
        POLL.replace("acquire_sys", "relaxed_gpu"),
        "two_shot_pipelined",
        "thread",
    ),
    _mutant(
        "a signal before the block's writes",
        PAD,
        "void send(const Arguments& a, u32 steps) const {\n    __syncthreads();",
        "void send(const Arguments& a, u32 steps) const {",
        "allgather_push",
        "thread",
    ),
    _mutant(
        "threads that do not wait for the one that waits",
        PAD,
        "return !__syncthreads_or(failed);",
        "return !failed;",
        "one_shot_unstaged",
        "thread",
    ),
    _mutant(
        "a kernel that does not wait for the one before",
        "one_shot_push.cu",
        "  wait_for_previous_kernel();\n",
        "",
        "one_shot_push",
        "thread",
    ),
    # ---- epochs
    _mutant("an epoch that is not advanced", CALL, "call.epoch + 1);", "call.epoch);", "one_shot_push"),
    _mutant(
        "an epoch advanced before all have read it",
        CALL,
        "call.was_busy = __syncthreads_or(call.was_busy);",
        "call.was_busy = call.was_busy;",
        "one_shot_push",
    ),
    _mutant(
        "epochs of the grid's own blocks only",
        CALL,
        "i < max_blocks; i += blockDim.x",
        "i < gridDim.x; i += blockDim.x",
        "reducescatter_push",
    ),
    _mutant(
        "steps that are counted one short",
        "two_shot_pipelined.cu",
        "signals.end(a, chunks + 2);",
        "signals.end(a, chunks + 1);",
        "two_shot_pipelined",
    ),
    # ---- sentinels and flags in the data
    _mutant("a place that is not armed again", SENTINEL, ARM, "", "one_shot_push"),
    _mutant(
        "a torn pack taken for whole",
        SENTINEL,
        "return p.word[0] != not_yet && p.word[1] != not_yet && p.word[2] != not_yet && p.word[3] != not_yet;",
        "return p.word[0] != not_yet;",
        "two_shot_push",
    ),
    _mutant(
        "data that look like 'not yet'",
        SENTINEL,
        "if (p.word[w] == not_yet) p.word[w] = 0x7fff7fffu;",
        "",
        "one_shot_push",
    ),
    _mutant("one slot instead of two", "one_shot_push.cu", SLOTS, "const u32 slots = 0;", "one_shot_push"),
    _mutant(
        "one slot instead of two, with flags",
        "allgather_flagged.cu",
        SLOTS,
        "const u32 slots = 0;",
        "allgather_flagged",
    ),
    _mutant(
        "the gather in the slots of the scatter",
        "two_shot_push.cu",
        "scatter + 2 * N * a.capacity",
        "scatter",
        "two_shot_push",
    ),
    _mutant(
        "half a pack taken for whole",
        FLAGGED,
        "found.complete &= pair.half[i] >> 32 != 0;",
        "found.complete &= h == 1 || pair.half[i] >> 32 != 0;",
        "allgather_flagged",
    ),
    _mutant(
        "half a place that is not armed again",
        FLAGGED,
        "    store_relaxed_sys(from[i].half(1), Pair{});\n",
        "",
        "allgather_flagged",
    ),
    _mutant(
        "an empty part that nobody hears of",
        "allgather_flagged.cu",
        "return max(u32(pack_count<T>(a.count[rank])), 1u);",
        "return u32(pack_count<T>(a.count[rank]));",
        "allgather_flagged",
    ),
    # ---- encoded tiles
    _mutant(
        "a tile that is not armed again",
        WIRE,
        "  for (int r = 0; r < Count; ++r) visit_received(wire(first + r), tile, part[r], Arm{});\n",
        "  for (int r = 0; r < 0; ++r) continue;\n",
        "quantized_two_shot_push",
    ),
    _mutant(
        "a tile of which only the last word is looked at",
        WIRE,
        "complete &= piece.word[w] != not_yet;",
        "complete = piece.word[w] != not_yet;",
        "quantized_two_shot_push",
    ),
    _mutant(
        "words armed before all lanes have seen theirs",
        WIRE,
        "    if (!complete) missing = r;",
        "    if (!complete) missing = r;\n        else visit_received(wire(first + r), tile, part[r], Arm{});",
        "quantized_two_shot_push",
    ),
    _mutant(
        "one slot fewer than steps under way, with a codec",
        "quantized_two_shot_pipelined.cu",
        "constexpr u32 depth = 3;",
        "constexpr u32 depth = 2;",
        "quantized_two_shot_pipelined",
    ),
    # ---- partitions
    _mutant(
        "a partition that drops its remainder",
        PACK,
        "(packs + parts * line - 1) / (parts * line) * line",
        "max(packs / (parts * line), u64(1)) * line",
        "two_shot_pipelined",
    ),
    _mutant("a tail one element too long", PACK, "if (e < count) to[e]", "if (e <= count) to[e]", "one_shot_unstaged"),
    _mutant(
        "an owner one off",
        "two_shot_push.cu",
        "const u32 owner = (a.rank + hop) % N;",
        "const u32 owner = (a.rank + hop + 1) % N;",
        "two_shot_push",
    ),
    _mutant(
        "a part that begins where the next one does",
        PACK,
        "+ a.begin[rank], a.count[rank]}",
        "+ a.begin[(rank + 1) % max_ranks], a.count[rank]}",
        "reducescatter_push",
    ),
    # ---- slots and steps
    _mutant(
        "one stage instead of two",
        "one_shot.cu",
        "after_signal_pad(a, rank) + (call.epoch & 1) * a.capacity",
        "after_signal_pad(a, rank)",
        "one_shot",
        "thread",
    ),
    _mutant(
        "a wait one step early",
        "two_shot_pipelined.cu",
        "signals.wait<N>(a, call, k)",
        "signals.wait<N>(a, call, k ? k - 1 : 0)",
        "two_shot_pipelined",
    ),
    _mutant(
        "a signal one part early",
        "two_shot_pipelined.cu",
        REDUCE_AND_SEND,
        "".join(reversed(REDUCE_AND_SEND.splitlines(keepends=True))),
        "two_shot_pipelined",
    ),
    _mutant(
        "slots that depend on the grid",
        "two_shot_pipelined.cu",
        "(u64(blockIdx.x) * 2 + phase)",
        "(u64(phase) * gridDim.x + blockIdx.x)",
        "two_shot_pipelined",
        "thread",
    ),
    _mutant(
        "a call that ends before the last sums arrive",
        "two_shot_pipelined.cu",
        "k < chunks + 2; ++k",
        "k < chunks + (Direct ? 1 : 2); ++k",
        "two_shot_pipelined",
    ),
    _mutant(
        "one slot fewer than steps under way",
        "allgather_push.cu",
        "constexpr u32 depth = 4;",
        "constexpr u32 depth = 2;",
        "allgather_push",
    ),
    _mutant(
        "a direct pull whose inputs change under it",
        "one_shot_unstaged.cu",
        "      signals.send<N>(a, 2);\n      signals.wait<N>(a, call, 2);\n",
        "      signals.send<N>(a, 2);\n",
        "one_shot_unstaged",
    ),
    _mutant(
        "sums read before they are all there",
        "multimem_two_shot.cu",
        "ok = signals.wait<N>(a, call, 2);",
        "ok = signals.wait<N>(a, call, 1);",
        "multimem_two_shot",
    ),
    # ---- asynchronous copies
    _mutant(
        "a copy that is not waited for",
        "one_shot.cu",
        "wait_for_copies<Depth - 1>();",
        "wait_for_copies<Depth>();",
        "one_shot",
    ),
    _mutant(
        "a bulk store that is not waited for",
        "two_shot_tma.cu",
        "        wait_for_bulk_stores();\n      }\n      __syncwarp();",
        "      }\n      __syncwarp();",
        "two_shot_tma",
        world_size=2,
    ),
    _mutant(
        "a bulk load that is not waited for",
        "two_shot_tma.cu",
        "      while (!progress.loaded.try_wait(k)) continue;\n",
        "",
        "two_shot_tma",
        world_size=2,
    ),
    _mutant(
        "a sum that is overwritten while it is sent",
        "two_shot_tma.cu",
        "      if (k > 0 && !wait(progress.pushed, k - 1)) break;\n",
        "",
        "two_shot_tma",
        world_size=2,
    ),
    _mutant(
        "a place in the scratch that is taken too early",
        "two_shot_tma.cu",
        "if (k >= depth && !wait(progress.gathered[k % depth], k / depth - 1)) break;",
        "",
        "two_shot_tma",
        world_size=2,
    ),
    # ---- fences between proxies and between aliases
    _mutant(
        "mbarriers that are new to the copies",
        "two_shot_tma.cu",
        "    fence_async_proxy_shared();  // the mbarriers are new\n",
        "",
        "two_shot_tma",
        "thread",
        2,
    ),
    _mutant(
        "mbarriers that are new to the other threads",
        "two_shot_tma.cu",
        INIT_AND_BARRIER,
        "".join(reversed(INIT_AND_BARRIER.splitlines(keepends=True))),
        "two_shot_tma",
        "thread",
        2,
    ),
    _mutant(
        "bulk loads before the input is known to them",
        "two_shot_tma.cu",
        "    fence_async_proxy_global();  // and the kernel before may have written the input\n",
        "",
        "two_shot_tma",
        "thread",
        2,
    ),
    _mutant(
        "bulk stores before the lanes' part of a piece is known to them",
        "two_shot_tma.cu",
        "    fence_async_proxy_shared();\n    __syncwarp();\n  }\n",
        "    __syncwarp();\n  }\n",
        "two_shot_tma",
        "thread",
        2,
    ),
    _mutant(
        "bulk stores before the sum is known to them",
        "two_shot_tma.cu",
        "      fence_async_proxy_shared();\n      __syncwarp();\n      if",
        "      __syncwarp();\n      if",
        "two_shot_tma",
        "thread",
        2,
    ),
    Mutant(
        "bulk stores over what peers read past them",  # one of the two fences lies on every such path
        Mutation("two_shot_tma.cu", "        fence_async_proxy_global();\n", "", times=2),
        Algorithm.TWO_SHOT_TMA,
        "thread",
        2,
    ),
    _mutant(
        "a switch that adds what was staged past it",
        "multimem_one_shot.cu",
        "  Multimem::fence_before_signal();\n",
        "",
        "multimem_one_shot",
        "thread",
    ),
    _mutant(
        "a switch that adds what was staged past it, in two shots",
        "multimem_two_shot.cu",
        "\n  Multimem::fence_before_signal();\n",
        "\n",
        "multimem_two_shot",
        "thread",
    ),
    _mutant(
        "sums of the switch that are read past it",
        "multimem_two_shot.cu",
        "\n    Multimem::fence_before_signal();\n",
        "\n",
        "multimem_two_shot",
        "thread",
    ),
    _mutant(
        "a fence for one thread's stores alone",
        "device/multimem.cuh",
        "    __syncthreads();\n    if (threadIdx.x == 0) fence_aliases();",
        "    if (threadIdx.x == 0) fence_aliases();",
        "multimem_one_shot",
        "thread",
    ),
    # ---- reads beside the tensors
    _mutant(
        "a pack read past the end",
        PACK,
        "whole(reinterpret_cast<u64>(p) % 16 ? 0 : n / E)",
        "whole(reinterpret_cast<u64>(p) % 16 ? 0 : (n + E - 1) / E)",
        "one_shot_push",
        "address",
    ),
    _mutant(
        "an element read past the end",
        PACK,
        "if (e < count) p.word",
        "if (e <= count) p.word",
        "one_shot_push",
        "address",
    ),
)
