"""The methods of `perf gathered`, which gather rows and multiply them: graphar's op, its partitions, and peers.

Every rank has the same number of rows, because torch's all-gathers need that.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import graphar
import graphar.reference
from graphar.plan.call import Call
from graphar.plan.work import ALLGATHER_MATMUL, Product
from graphar.product import gemm
from graphar.product.products import gathering_method
from graphar.runtime.registry import engine_of_group
from perf.models.decoder import normal
from perf.peers.matmuls import Alone, FusedPlan, Layer, Variant

# Column-parallel layers of Llama-3-70B.
FEATURES = 8192
COLUMNS = (10240, 57344)  # output features of the whole layers: query, key and value; gate and up
ROWS = (64, 256, 1024, 2048, 4096, 8192, 16384)  # gathered rows
_ALIGNMENT = 64  # N is a multiple of this: 128 bytes


class GatheredLayer(Layer):
    """A column-parallel layer. The gathered rows [m, k] are multiplied by the transpose of this rank's [n, k]."""

    @property
    def own_rows(self) -> int:
        return self.m // self.world_size

    def operands(self, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns this rank's rows and weight: normal data with a different seed on every rank."""
        return self._rows_of(rank, device), normal(2000 + rank, (self.n, self.k), device).mul_(self.k**-0.5)

    def gathered(self, device: torch.device) -> Tensor:
        """Returns the rows of all ranks, generated from their seeds."""
        return torch.cat([self._rows_of(rank, device) for rank in range(self.world_size)])

    def _rows_of(self, rank: int, device: torch.device) -> Tensor:
        return normal(1000 + rank, (self.own_rows, self.k), device)


class GatheredPlan(FusedPlan):
    """The layers to measure with one number of ranks.

    ``rows`` are gathered rows, rounded down to a multiple of the number of ranks. ``columns`` are the whole
    layers'. A rank's share is rounded down to a multiple of _ALIGNMENT. ``features`` is one number.
    """

    def layers(self) -> Iterator[GatheredLayer]:
        for columns in self.columns:
            n = max(columns // self.world_size // _ALIGNMENT, 1) * _ALIGNMENT
            for m in self.rows:
                yield GatheredLayer(self.world_size, m // self.world_size * self.world_size, n, self.features)


MATMUL, ALLGATHER = FLOORS = ("matmul", "allgather")
AFTER = "+matmul"  # after the name of an all-gather
CHUNKED = "chunked_nccl@"  # followed by the number of chunks
SYMM_FUSED = "symm_fused"
SEQUENCE, AUTO = f"graphar{AFTER}", "graphar"
PARTITIONS = {AUTO: "auto", "graphar:tiles": "tiles", "graphar:chunks": "chunks"}  # by method
CUDA_METHODS = (
    *FLOORS,
    f"nccl{AFTER}",
    *(f"{CHUNKED}{count}" for count in (2, 4, 8)),
    SYMM_FUSED,
    SEQUENCE,
    *PARTITIONS,
)
CPU_METHODS = (*FLOORS, f"gloo{AFTER}", SEQUENCE, *PARTITIONS)
# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
MIN_CHUNK = 64  # the fewest rows of a rank in a chunk


def make_variants(plan: GatheredPlan) -> list[Variant]:
    """Returns the plan's methods, in its order."""
    return [_make(name) for name in plan.methods]


def _make(name: str) -> Variant:
    if name == MATMUL:
        return Variant(name, Alone(lambda a, w: gather_by_torch(a), lambda rows, a, w: torch.mm(rows, w.t())))
    if name == ALLGATHER:
        return Variant(name, lambda a, w: graphar.allgather(a), exact=True)
    if name.startswith(CHUNKED):
        count = int(name.removeprefix(CHUNKED))
        return Variant(
            name, partial(chunked, count=count), lambda layer: layer.m // layer.world_size >= count * MIN_CHUNK
        )
    if name == SYMM_FUSED:
        return Variant(name, symm_fused)
    if name in PARTITIONS:
        return Variant(name, partial(graphar.fused_allgather_matmul, partition=PARTITIONS[name]), exact=True)
    gather = graphar.allgather if name == SEQUENCE else gather_by_torch
    return Variant(name, lambda a, w: torch.mm(gather(a), w.t()))


def gather_by_torch(a: Tensor) -> Tensor:
    out = a.new_empty(len(a) * dist.get_world_size(), a.shape[1])
    _all_gather(out, a)
    return out


def chunked(a: Tensor, w: Tensor, count: int) -> Tensor:
    """Gathers chunks of rows with NCCL on its own stream. While it gathers a chunk, the previous one is multiplied."""
    world_size = dist.get_world_size()
    out = a.new_empty(world_size, len(a), len(w))
    pending = []
    for rows, part in zip(a.chunk(count), out.chunk(count, 1), strict=True):
        whole = a.new_empty(world_size * len(rows), a.shape[1])
        pending.append((_all_gather(whole, rows, async_op=True), whole, part))
    for work, whole, part in pending:
        work.wait()
        torch.bmm(whole.view(world_size, -1, a.shape[1]), w.t().expand(world_size, -1, -1), out=part)
    return out.view(-1, len(w))


def symm_fused(a: Tensor, w: Tensor) -> Tensor:
    """Runs torch's pipelined all-gather and matmul over symmetric memory."""
    _, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [w.t()], 0, dist.group.WORLD.group_name, return_A=False)
    return out


def promised(variant: Variant, a: Tensor, w: Tensor, rows: Tensor) -> Tensor | None:
    """Returns the result whose bits a method promises. None: its matmul is torch's, which promises no bits.

    Args:
        rows: the gathered rows.
    """
    if not variant.exact:
        return None
    if variant.name == ALLGATHER:
        return rows
    if not a.is_cuda:
        return graphar.reference.linear(rows, w, None)
    engine = engine_of_group("")
    counts = (len(a),) * engine.world_size
    work = Product(ALLGATHER_MATMUL, counts, a.shape[1], partition=PARTITIONS[variant.name])
    return gemm.matmul(rows, w) if gathering_method(engine, Call.of(work, a), a) == "tiles" else None
