"""Mistakes in matmuls of several ranks: summed tiles, their codes and partials, skinny matmuls, gathered rows."""

from __future__ import annotations

from graphar.numerics.codecs import Codec
from graphar.plan.algorithms import Algorithm
from graphar.plan.tiles import MatmulTile, SkinnyTile
from tests.host.products import EPILOGUE, GATHER, REDUCE, SCATTER, Kind, Products

SENT = "      wait_for_bulk_stores();\n"
STAGED = "      fence_async_proxy_shared();\n      __syncwarp();\n"
ADDED = "        Travel::template add_partials<N, Tile>(m, a, tile, sums);\n"
FOLLOWED = "        add_bias_or_epilogue(sums, tile);\n"
NBYTES = "owner == a.rank ? Travel::finished_nbytes : Travel::partial_nbytes;"
ONE_SHOT, TWO_SHOT = Algorithm.MATMUL_ONE_SHOT, Algorithm.MATMUL_TWO_SHOT
OF_PARTIALS = SkinnyTile(16, 3, 2, leaves=2, partials=True)


def tiles(algorithm, **more):
    return Products(algorithm, (Kind(MatmulTile(64, 64, 2, whole=True)),), 3, **more)


def in_clusters(algorithm, sanitizer):
    """Between 2 ranks, with consumers that alternate."""
    return Products(algorithm, (Kind(MatmulTile(64, 128, 2, 2, whole=True, alternating=True)),), 2, sanitizer)


def skinny(algorithm, tile, world_size=3, sanitizer="plain"):
    return Products(algorithm, (Kind(tile),), world_size, sanitizer)


def gathered(tile, sanitizer="plain", then=None):
    return Products(GATHER, (Kind(tile),), 3, sanitizer, then)


partials = Products(REDUCE, (Kind(MatmulTile(128, 128, 2, whole=True, leaves=2, partials=True)),), 4)

HANDED_OVER_IN_CLUSTERS = {
    "tiles that are dealt and read with nothing but a relaxed arrival between": (
        "  if constexpr (Tile::cluster > 1) __syncthreads();",
        "",
    ),
    "a box whose arrival is relaxed": (
        "handover.staged[box].arrive();",
        "handover.staged[box].arrive_at(block_in_cluster());",
    ),
}
ADDED_IN_ANOTHER_ORDER = {
    "the order of ranks in place of the tree": (
        "total[0] = sum_of_tree<N>(part, w);",
        "RankOrder::add<T, N>(part, w, total);",
    ),
    "leaves that are added one after another": ("if constexpr (Tile::leaves > 1)", "if constexpr (Tile::leaves > 8)"),
}
MISTAKES = {
    tiles(REDUCE, then=Codec(8)): {
        "the scale of a neighbour's bucket": (
            "__shfl_sync(all_lanes, inverse[box], j, 4)",
            "__shfl_sync(all_lanes, inverse[box], 3 - j, 4)",
        ),
        "partial sums that are not rounded before they are coded": (
            "encode<T>(sums, 0, coded);",
            "encode<fp32>(sums, 0, coded);",
        ),
        "a sum that is rounded before it is coded": ("encode<fp32>(sums, 0, coded);", "encode<T>(sums, 0, coded);"),
        "an own tile that is not coded": ("r == a.rank ? own.scale[j]", "r == a.rank ? 0"),
        "ranks added in another order": (
            "part[r - first].decode(j, v, r > 0);",
            "part[N - 1 - r].decode(j, v, r > 0);",
        ),
        "a bias that is left out": ("add_bias_to_pair(m, box, j * 32 + i * 8 + column, v + 2 * i);", ""),
        "halves of the wrong eight": ("(i + odd) * 8 + column / 4 * 4", "(i + 1 - odd) * 8 + column / 4 * 4"),
    },
    tiles(SCATTER, sanitizer="thread"): {
        "a flag set before the tile is there": (
            SENT,
            "      commit_bulk_stores();\n      wait_for_bulk_sources<0>();\n",
        ),
        "a tile staged over one that is being sent": (SENT, ""),
        "tiles sent over what was read, without a fence": (
            "    if (threadIdx.x % 32 == 0) fence_async_proxy_global();\n",
            "",
        ),
        "a box staged without a fence": (STAGED, "      __syncwarp();\n"),
        "a box staged by lanes that only vote": (STAGED, STAGED.replace("__syncwarp()", "__any_sync(~0u, 0)")),
        "ranks that have entered, to lanes that only vote": (
            "lane, call.epoch + 1);\n  __syncwarp();\n",
            "lane, call.epoch + 1);\n",
        ),
        "flags seen by lanes that only vote": (
            "(a.rank + hop) % N, box);\n    __syncwarp();\n",
            "(a.rank + hop) % N, box);\n",
        ),
    },
    tiles(SCATTER): {
        "a flag that stays set": ("    store_relaxed_gpu(there, 0);\n", ""),
        "tiles for ranks that have not entered the call": (" || !exchange.wait_until_all_entered(call);", ";"),
        "an epoch that does not advance": (
            "epoch_state[i].epoch, call.epoch + 1);",
            "epoch_state[i].epoch, call.epoch);",
        ),
        "partial tiles added in the order of distance": (
            "place(a.rank, r, tile.box * places)",
            "place(a.rank, (2 * a.rank + N - r) % N, tile.box * places)",
        ),
        "partial tiles read before they are there": ("        handover.arrived.wait(own_tiles);\n", ""),
    },
    tiles(REDUCE, sanitizer="thread"): {
        "a finished tile announced before it is there": (
            SENT,
            "      commit_bulk_stores();\n      wait_for_bulk_sources<0>();\n",
        )
    },
    tiles(REDUCE): {
        "a result gathered before it is finished": (
            "      if (!TileExchange<N>{a, finished}.wait_for_finished(call, walk.owner(), tile.box)) return;\n",
            "",
        ),
        "finished tiles put where partial tiles are": (
            "bulk_store(TileExchange<N>{a, finished}.place((a.rank + hop)",
            "bulk_store(TileExchange<N>{a}.place((a.rank + hop)",
        ),
    },
    in_clusters(SCATTER, sanitizer="thread"): HANDED_OVER_IN_CLUSTERS,
    in_clusters(REDUCE, sanitizer="thread"): HANDED_OVER_IN_CLUSTERS,
    partials: {
        **ADDED_IN_ANOTHER_ORDER,
        "a partial that is rounded to bf16": ("= word_of_sum(*from);", "= word_of_sum(*from) & 0xffff0000u;"),
        "a bias that is added before the sum": (f"{ADDED}{FOLLOWED}", f"{FOLLOWED}{ADDED}"),
        "places that are counted as boxes of elements": ("(tile.box + box) * Travel::places)", "tile.box + box)"),
        "places that are read as boxes of elements": (
            "place(a.rank, r, tile.box * places)",
            "place(a.rank, r, tile.box)",
        ),
        "boxes that are staged in half their room": (
            "(consumer * Tile::boxes + box) * Travel::places * box_nbytes",
            "(consumer * Tile::boxes + box) * box_nbytes",
        ),
        "half a partial box that is not sent": (NBYTES, "Travel::finished_nbytes;"),
        "a finished box with as many bytes as a partial one": (NBYTES, "Travel::partial_nbytes;"),
    },
    skinny(ONE_SHOT, SkinnyTile(8, 2)): {
        "packs taken from the box before all of them are there": (
            "    round_transposed<Result>(sums, ring.staging);\n    sync_warpgroup(1);\n",
            "    round_transposed<Result>(sums, ring.staging);\n",
        ),
        "A loaded before the kernel before has written it": (
            "  wait_for_previous_kernel(a);\n",
            "  if (warp != 4 || !m.constant_weight) wait_for_previous_kernel(a);\n",
        ),
        "a constant weight loaded twice": ("if (!m.constant_weight || !is_early(step)) load_w(step);", "load_w(step);"),
        "a constant weight loaded into places that are in use": (
            "step.more() && is_early(step); step.next()) load_w(step);",
            "step.more() && step.at.use < 2; step.next()) load_w(step);",
        ),
    },
    skinny(ONE_SHOT, SkinnyTile(8, 2), sanitizer="thread"): {
        "a call used before it is known": (
            "    sync_warpgroup(1);  // the box of the tile before has been read, and the call is known\n",
            "",
        ),
        "operands read before the kernel before has written them": (
            "    fence_async_proxy_global();  // the kernel before may have written A, or W\n",
            "",
        ),
    },
    skinny(ONE_SHOT, SkinnyTile(16, 3, cluster=2)): {
        "rows that a cluster's other block has, loaded twice": (
            "first = Tile::cluster > 1 ? block_in_cluster() * share : 0;",
            "first = 0;",
        ),
        "a place of a constant weight that waits for too few bytes of a cluster's rows": (
            "filled.arrive_and_expect(Tile::a_nbytes + Tile::cluster * share * row_nbytes);",
            "filled.arrive_and_expect(Tile::a_nbytes + (step.at.use ? Tile::cluster : 1) * share * row_nbytes);",
        ),
    },
    skinny(TWO_SHOT, SkinnyTile(8, 2)): {
        "a sum that its owner does not keep": ("    output.store(at.in_result(m), sum);\n", "")
    },
    skinny(ONE_SHOT, OF_PARTIALS, 4): {
        **ADDED_IN_ANOTHER_ORDER,
        "a partial that is rounded to bf16": (
            "x % 4 * 4) = sums[i];",
            "x % 4 * 4) = __uint_as_float(__float_as_uint(sums[i]) & 0xffff0000u);",
        ),
        "the halves of 8 columns swapped": ("place[2] = {first, first + 1};", "place[2] = {first + 1, first};"),
        "a bias of the first half alone": ("bias(4 * half + e, v)", "bias(e, v)"),
        "a box that is read without its swizzle": ("chunk ^ row / 2 % 4 * 2;", "chunk;"),
    },
    skinny(TWO_SHOT, OF_PARTIALS, 4): {
        "a sum in the place of a partial that has not come": (
            "const u32 place = slots + a.rank * a.capacity + at.in_result<Tile::pack_columns>(m);",
            "const u32 place = slots + a.rank * a.capacity + at.in_result(m);",
        )
    },
    gathered(MatmulTile(64, 64, 2)): {
        "rows sent to ranks that have not entered the call": (" && wait_until_all_entered<N>(a, shared.call)", ""),
        "rows multiplied before they have come": (
            "failed = failed || !rows.wait(call, tile.owner, row, Tile::rows);",
            "(void)failed, (void)row;",
        ),
        "a peer's rows that the producer does not wait for": ("      shared.arrived.wait(number);\n", ""),
        "phases that count own tiles as well": (
            "      fence_async_proxy_global();\n      ++number;\n    }\n",
            "      fence_async_proxy_global();\n    }\n    ++number;\n",
        ),
        "own rows that are waited for": ("    if (tile.owner == a.rank) continue;\n", ""),
        "bytes of the boxes of another's rows": (
            "producer.a_nbytes_of(a.count[tile.owner])",
            "producer.a_nbytes_of(a.count[a.rank])",
        ),
        "a unit too few is waited for": (
            "const u32 beyond = min(row + rows,",
            "const u32 beyond = min(row + rows / 2,",
        ),
        "a next unit that is never cleared": ("    rows.clear_next_call(call);\n", ""),
        "flags that do not tell the call": ("seen != flag_value(call); seen", "seen == 0; seen"),
        "arrivals that run ahead of the producer": ("    shared.awaited.wait(number - 1);\n", ""),
        "a tensor map that nobody filled": ("if (a.count[a.rank] != 0) {", "if (true) {"),
        "own rows that are not gathered": ("copy<N>(packs", "copy<N - 1>(packs"),
    },
    gathered(MatmulTile(64, 64, 2), sanitizer="thread"): {
        "rows announced before all threads have stored them": (
            "      send_unit(unit);\n      if constexpr (scaled) send_scales(unit);\n      __syncwarp();\n",
            "      send_unit(unit);\n",
        ),
        "rows loaded without a fence": (
            "      shared.awaited.arrive();\n      fence_async_proxy_global();\n",
            "      shared.awaited.arrive();\n",
        ),
    },
    gathered(MatmulTile(128, 64, 2), then=EPILOGUE): {
        "an epilogue whose rows count from their owner's first": (
            "begin + tile.row + 64 * index",
            "tile.row + 64 * index",
        ),
        "an epilogue in the places of the other consumer": (
            "begin + tile.row + 64 * index",
            "begin + tile.row + 0 * index",
        ),
        "operands of an epilogue that end with the owner's count": ("end = begin + a.count", "end = a.count"),
    },
}
