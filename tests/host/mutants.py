"""Small mistakes in the kernels, each of which the runs on the host must notice: the negative controls.

This file has mistakes in signals, sentinels and the division of work; copy_mutants.py has those in copies and fences.
"""

from __future__ import annotations

from tests.host.copy_mutants import COPY_MUTANTS
from tests.host.mutant import mutants_of

CALL, SENTINEL, FLAGGED = "device/sync/call.cuh", "device/sync/sentinel.cuh", "device/sync/flagged.cuh"
PAD, PACK = "device/sync/signal_pad.cuh", "device/pack.cuh"
PARTS, ALLTOALL = "device/parts.cuh", "scatter_gather/alltoall"
TILES, LOSSLESS, TILE_CHUNKS = "device/wire/wire.cuh", "device/wire/lossless.cuh", "device/wire/tile_chunks.cuh"
TWO_SHOT_PIPELINE, PUSH_PIPELINE = "device/sync/two_shot_pipeline.cuh", "device/sync/push_pipeline.cuh"
LOADED = "    __syncwarp();  // (24)\n"
SET = "store_release_sys_if(sends, &signal_pad(a, sends ? peer : 0)->flag[row][a.rank], flag_of(a, call, step));"
NOT_RELEASED = "if (sends) store_relaxed_sys(&signal_pad(a, peer)->flag[row][a.rank], flag_of(a, call, step));"
POLL = "for (u64 seen; (seen = load_acquire_sys(flag)) != own;) {"
REDUCE_AND_SEND = "    if (k >= 1 && k <= chunks) body.reduce(k - 1);\n    signals.send<N>(a, call, k + 1);\n"
SLOTS, NO_SLOTS = "const u32 slots = (call.epoch & 1) * N * a.capacity;", "const u32 slots = 0;"

OF_TILES = ("two_shot_lossless", "allgather_lossless", "quantized_reducescatter", "quantized_two_shot_push")
NOT_READ = {"a last element stored before all have read it": (TILES, LOADED, "")}

MUTANTS = mutants_of(
    {
        **{(name, "thread", 2): NOT_READ for name in OF_TILES},
        ("one_shot", "thread"): {
            "a signal that is no release": (PAD, SET, NOT_RELEASED),
            "one stage instead of two": (
                "after_signal_pad(a, rank) + (call.epoch & 1) * a.capacity",
                "after_signal_pad(a, rank)",
            ),
            "threads that do not wait for the one that waits": (
                PAD,
                "return !__syncthreads_or(failed);",
                "return !failed;",
            ),
        },
        ("two_shot_tma", "thread", 2): {
            "a warp's signal, no release": (PAD, SET, NOT_RELEASED),
            "lanes that only vote with the one that waits": (
                PAD,
                "    __syncwarp();\n    return !__any_sync",
                "    return !__any_sync",
            ),
        },
        "two_shot_pipelined": {
            "the flag of the step before": (PAD, "- 2 * step) >= 0", "- 2 * step) >= -2"),
            "steps that are counted one short": (
                TWO_SHOT_PIPELINE,
                "signals.end(a, chunks + 2);",
                "signals.end(a, chunks + 1);",
            ),
            "a partition that drops its remainder": (
                PACK,
                "(units + parts * Line - 1) / (parts * Line) * Line",
                "max(units / (parts * Line), Index(1)) * Line",
            ),
            "a wait one step early": (
                TWO_SHOT_PIPELINE,
                "signals.wait<N>(a, call, k)",
                "signals.wait<N>(a, call, k ? k - 1 : 0)",
            ),
            "a signal one part early": (
                TWO_SHOT_PIPELINE,
                REDUCE_AND_SEND,
                "".join(reversed(REDUCE_AND_SEND.splitlines(keepends=True))),
            ),
            "a call that ends before the last sums arrive": (
                TWO_SHOT_PIPELINE,
                "k < chunks + 2; ++k",
                "k < chunks + (Body::gathers ? 2 : 1); ++k",
            ),
        },
        ("two_shot_pipelined", "thread"): {
            "a wait that is no acquire": (PAD, POLL, POLL.replace("acquire", "relaxed")),
            "slots that depend on the grid": (
                TWO_SHOT_PIPELINE,
                "(u64(blockIdx.x) * 2 + shot)",
                "(u64(shot) * gridDim.x + blockIdx.x)",
            ),
        },
        ("allgather_push", "thread"): {
            "a signal before the block's writes": (
                PAD,
                "OfWarp ? __syncwarp() : __syncthreads();",
                "if (OfWarp) __syncwarp();",
            )
        },
        "one_shot_push": {
            "an epoch that is not advanced": (CALL, "call.epoch + 1 - call.aborted);", "call.epoch);"),
            "an epoch advanced before all have read it": (
                CALL,
                "call.was_busy = __syncthreads_or(call.was_busy);",
                "call.was_busy = call.was_busy;",
            ),
            "a place that is not armed again": (SENTINEL, "arm(slot<P>(a, 0, at + r * a.capacity));", ";"),
            "data that look like 'not yet'": (SENTINEL, "word = min(word, not_yet - 1);", "word = min(word, not_yet);"),
            "the last pack of a tensor taken for a whole one": (
                PACK,
                "return end <= whole || (first < whole && first + stride >= end);",
                "return end <= whole + 1;",
            ),
            "one slot instead of two": (SLOTS, NO_SLOTS),
        },
        "reducescatter_push": {
            "epochs of the grid's own blocks only": (
                CALL,
                "i < max_blocks; i += blockDim.x",
                "i < gridDim.x; i += blockDim.x",
            ),
            "a part that begins where the next one does": (
                PACK,
                "+ a.begin[rank], a.count[rank]}",
                "+ a.begin[(rank + 1) % max_ranks], a.count[rank]}",
            ),
        },
        "two_shot_push": {
            "a block that is no longer busy while its threads wait": (
                CALL,
                "  __syncthreads();\n  end_aborted_call(a, call);",
                "  end_aborted_call(a, call);",
            ),
            "a torn pack taken for whole": (
                SENTINEL,
                "most[i] = max(most[i], max(parts[i].word[2], parts[i].word[3]));",
                "most[i] = parts[i].word[0];",
            ),
            "packs that are used before they have come": (
                SENTINEL,
                "if (!(Ahead && arrived(part)) && !await(",
                "if (!Ahead && !await(",
            ),
            "a look at the same place again in place of the next one": (
                SENTINEL,
                "look_at(a, base + i + stride, next);",
                "look_at(a, base + i, next);",
            ),
            "a pack that is sent twice": (SENTINEL, "from[i + ahead * stride];", "from[i];"),
            "the gather in the slots of the scatter": ("scatter + 2 * N * a.capacity", "scatter"),
            "an owner one off": ("const u32 owner = (a.rank + hop) % N;", "const u32 owner = (a.rank + hop + 1) % N;"),
        },
        ("one_shot_push", "plain", 2): {
            "a pack that is sent twice in turn": (SENTINEL, "mine[0] = from[sent];", "mine[0] = *from;"),
            "packs after the first that are not sent": (SENTINEL, "    send();\n", ""),
        },
        "allgather_flagged": {
            "one slot instead of two, with flags": (SLOTS, NO_SLOTS),
            "half a pack taken for whole": (
                FLAGGED,
                "found.difference |= flag ^ a.fingerprint;",
                "found.difference |= h == 1 ? 0 : flag ^ a.fingerprint;",
            ),
            "half a place that is not armed again": (FLAGGED, "    store_relaxed_sys(from[i].half(1), Pair{});\n", ""),
            "an empty part that nobody hears of": (
                "return max(u32(pack_count<T>(a.count[rank])), 1u);",
                "return u32(pack_count<T>(a.count[rank]));",
            ),
            "a tensor of a tuple without its last pack": (
                PARTS,
                "packs = pack_count<T>(nbytes);",
                "packs = nbytes / sizeof(Pack);",
            ),
            "an empty part of a tuple that is looked for beyond the last tensor": (
                PARTS,
                "if (i < packs || t + 1 == max_tensors)",
                "if (i < packs)",
            ),
        },
        "quantized_two_shot_push": {
            "a tile that is not armed again": (
                "  for (int r = 0; r < Count; ++r) visit_received(wire(first + r), tile, part[r], Arm{});\n",
                "  for (int r = 0; r < 0; ++r) continue;\n",
            ),
            "a tile of which only the last word is looked at": (
                "complete &= piece.word[w] != not_yet;",
                "complete = piece.word[w] != not_yet;",
            ),
            "words armed before all lanes have seen theirs": (
                "    if (!complete) missing = r;",
                "    if (!complete) missing = r;\n        else visit_received(wire(first + r), tile, part[r], Arm{});",
            ),
            "errors of earlier calls that are not added": (
                TILES,
                "v[e] = __fadd_rn(v[e], error[e]);",
                "v[e] = __fadd_rn(v[e], 0);",
            ),
        },
        "quantized_two_shot_pipelined": {
            "one slot fewer than steps under way, with a codec": (
                TWO_SHOT_PIPELINE,
                "constexpr u32 pipeline_depth = 3;",
                "constexpr u32 pipeline_depth = 2;",
            )
        },
        "quantized_reducescatter": {
            "one slot fewer than steps under way, of a reduce-scatter with a codec": (
                PUSH_PIPELINE,
                "constexpr u32 push_depth = 4;",
                "constexpr u32 push_depth = 2;",
            ),
            "random numbers that begin again with each part": ("tiles_before(owner) + tile, {a.seed", "tile, {a.seed"),
            "errors that take the place of the input": (
                "device/wire/tile_chunks.cuh",
                "store_error(errors, tile, mine, coded);",
                "store_error(x, tile, mine, coded);",
            ),
            "steps enough for this rank's own part alone": (
                TILE_CHUNKS,
                "most = max(most, tile_count(a.count[r]));",
                "most = max(most, r == a.rank ? max(tile_count(a.count[r]), 1u) : 0);",
            ),
        },
        "allgather_lossless": {
            "one slot fewer than steps under way, of a compressed all-gather": (
                PUSH_PIPELINE,
                "constexpr u32 push_depth = 4;",
                "constexpr u32 push_depth = 2;",
            ),
            "a gathered part of which the last chunk is missing": (
                TILE_CHUNKS,
                "min(begin(k) + length, (blockIdx.x + 1) * share)",
                "min(begin(k) + length, (blockIdx.x + 1) * share - 1)",
            ),
        },
        "one_shot": {"a tail one element too long": (PACK, "if (e < count) to[e]", "if (e <= count) to[e]")},
        "allgather_push": {
            "rows of a tuple that begin where those of the first rank do": (
                PARTS,
                "static_cast<const char*>(tensors[t]) + first_row * a.row_nbytes[t]",
                "static_cast<const char*>(tensors[t])",
            ),
            "a pack that each tensor counts from the first one": (PARTS, "i -= packs;", ""),
            "one slot fewer than steps under way": (
                PUSH_PIPELINE,
                "constexpr u32 push_depth = 4;",
                "constexpr u32 push_depth = 2;",
            ),
        },
        "alltoall_flagged": {
            "runs without the gaps between them": (PARTS, "i / part.run_packs * part.gap", "0"),
            "one slot instead of two, of all-to-alls": (SLOTS, NO_SLOTS),
            "an empty part for a peer": (", 1u); };", ", 0u); };"),
        },
        "alltoall_push": {
            "bytes without the gaps between runs": (PARTS, "at += gap, left = run", "left = run"),
            "the part for another peer": ("(a.rank + hop) % N; }", "(a.rank + N - hop) % N; }"),
            "ranks that go on as far as their own largest part": ("      most = max(most, header.word[2]);\n", ""),
            "a step before headers": ("a.most == 0 && most", "a.most != 0 && most"),
        },
        "multimem_two_shot": {
            "sums read before they are all there": (
                "ok = signals.wait<N>(a, call, 2);",
                "ok = signals.wait<N>(a, call, 1);",
            )
        },
        "two_shot_lossless": {
            "an exponent just too far away": (LOSSLESS, "bytes_from<15>(offset[h])", "bytes_from<16>(offset[h])"),
            "half of the zeros with their row's exponent": (LOSSLESS, "offset + 0x71717171", "offset + 0x71707170"),
            "more odd elements than a header holds": (
                LOSSLESS,
                "most_odd = header_words - 2",
                "most_odd = header_words - 1",
            ),
        },
    }
)
MUTANTS += COPY_MUTANTS
