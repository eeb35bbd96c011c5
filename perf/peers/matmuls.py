"""The methods of `perf fused`, which compute a matmul and sum its result: graphar's op, its partitions, and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import graphar
from graphar.numerics.codecs import Codec, codec
from graphar.numerics.leaf_tree import LEAVES
from graphar.plan.call import Call, Operands
from graphar.plan.matmuls import is_skinny, owned_rows
from graphar.plan.work import MATMUL_ALLREDUCE, Product
from graphar.product import gemm
from graphar.product.products import takes_tiles
from graphar.product.then import Then
from graphar.runtime.registry import engine_of_group
from perf.harness.cases import Plan
from perf.harness.ranks import Ranks
from perf.peers import catalogue
from perf.peers.methods import Method

# Row-parallel layers of Llama-3-70B.
HIDDEN = 8192  # columns of the result
FEATURES = (8192, 28672)  # input features of the whole layers: attention output; down
ROWS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)  # rows of the activations
_ALIGNMENT = 64  # K is a multiple of this: 128 bytes


@dataclass(frozen=True)
class Layer:
    """A row-parallel layer. Each rank multiplies [m, k] x [n, k]^T, and the products are summed over all ranks."""

    world_size: int
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.world_size} ranks, {self.m} x {self.n} x {self.k}"

    @property
    def nbytes(self) -> int:
        """The bytes of the result in bfloat16."""
        return self.m * self.n * 2

    @property
    def iterations(self) -> int:
        """The number of operations in one timed repeat."""
        return 20 if self.m <= 1024 else 8 if self.m <= 4096 else 4

    @property
    def repeats(self) -> int:
        return 9

    def operands(self, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Returns this rank's activations and weight: normal data with a different seed on every rank.

        The result has the variance ``world_size``.
        """
        generator = torch.Generator(device).manual_seed(1000 + rank)
        a, w = (
            torch.randn(rows, self.k, dtype=torch.bfloat16, device=device, generator=generator)
            for rows in (self.m, self.n)
        )
        return a, w.mul_(self.k**-0.5)

    def whole(self, device: torch.device) -> Iterator[Tensor]:
        """Yields the activations and the weight of the whole layer: all ranks' parts, side by side."""
        for parts in zip(*(self.operands(rank, device) for rank in range(self.world_size)), strict=True):
            yield torch.cat(parts, 1)


@dataclass(frozen=True)
class FusedPlan:
    """The layers to measure with one number of ranks.

    Attributes:
        rows: numbers of rows of the activations.
        features: input features of the whole layers.
    """

    device: str
    world_size: int
    rows: Sequence[int]
    columns: int
    features: Sequence[int]
    methods: Sequence[str]

    def layers(self) -> Iterator[Layer]:
        for k in self.features:
            for m in self.rows:
                yield Layer(self.world_size, m, self.columns, max(k // self.world_size // _ALIGNMENT, 1) * _ALIGNMENT)


MATMUL, ALLREDUCE = FLOORS = ("matmul", "allreduce")
AFTER = "matmul+"  # followed by the name of an all-reduce in perf/peers/catalogue.py
CHUNKED = "chunked_nccl@"  # followed by the number of chunks
SYMM_FUSED = "symm_fused"
# By name: how the product is split, into how many chunks, and the all-reduce that runs beside the matmul.
PARTITIONED = {
    f"graphar:{cut}{count}@{name}{blocks}": (cut, count, algorithm, blocks)
    for cut, count, name, algorithm, blocks in (
        ("split_m", 2, "", "auto", 24),
        ("split_m", 4, "", "auto", 16),
        ("split_m", 4, "", "auto", 24),
        ("split_m", 4, "", "auto", 32),
        ("split_m", 4, "tma", "two_shot_tma", 12),
        ("split_m", 8, "", "auto", 24),
        ("split_n", 4, "", "auto", 24),
    )
}
TILES = "graphar:tiles"
INT8 = "_int8"  # the suffix of graphar's methods with the codec "int8"
TP_INVARIANT = "graphar_tp_invariant"
# The op with the partition "auto" and with each fixed one. With a codec, `matmul+graphar` is the partition "none".
_GRAPHAR = ("graphar", TP_INVARIANT, f"graphar{INT8}", f"{AFTER}graphar{INT8}", TILES, f"{TILES}{INT8}", *PARTITIONED)
# The all-reduces that follow a matmul, by their names in perf/peers/catalogue.py.
SUMS = ("nccl", "symm_two_shot", "sglang_one_shot_push", "sglang_two_shot_push", "graphar")
CUDA_METHODS = (
    *FLOORS,
    *(f"{AFTER}{name}" for name in SUMS),
    *(f"{CHUNKED}{count}" for count in (2, 4, 8)),
    SYMM_FUSED,
    *_GRAPHAR,
)
CPU_METHODS = (*FLOORS, f"{AFTER}gloo", f"{AFTER}graphar", *_GRAPHAR)
MIN_ROWS = 256  # the fewest rows for which partitions are measured


def own_product(a: Tensor, w: Tensor, partition: str = "auto") -> Tensor:
    """Returns this rank's product. It has the bits of graphar's op, because it is the op with one rank."""
    return graphar.fused_matmul_allreduce([a], [w], partition=partition)[0]


def product_of_cuts(a: Tensor, w: Tensor) -> Tensor:
    """Returns this rank's product for "split_m" and "split_n", which use the same matmul. At least MIN_ROWS rows."""
    return own_product(a, w, "split_m")


def product_of_tiles(a: Tensor, w: Tensor) -> Tensor:
    """Returns this rank's product for "tiles", for any number of rows."""
    if not a.is_cuda or len(a) >= MIN_ROWS:
        return product_of_cuts(a, w)
    out = a.new_empty(len(a), len(w))
    return own_product(a, w) if gemm.why_not(a, w, out) else gemm.matmul(a, w, out)


def product_of_auto(codec: str, a: Tensor, w: Tensor) -> Tensor:
    """Returns this rank's product for "auto", which uses the tuning table. The first call is collective."""
    return product_of_tiles(a, w) if a.is_cuda and _takes_tiles(codec, a, w) else own_product(a, w)


def _takes_tiles(codec: str, a: Tensor, w: Tensor) -> bool:
    engine = engine_of_group("")
    work = Product(MATMUL_ALLREDUCE, tuple(owned_rows(len(a), engine.world_size)), len(w), codec=codec)
    return takes_tiles(engine, Call.of(work, a), a)


@dataclass(frozen=True)
class Variant:
    """A method that computes a matmul and sums its result.

    Attributes:
        call: takes this rank's operands, enqueues one operation, and returns its result.
        serves: whether it is measured on a layer.
        exact: whether it promises the bits of graphar.reference for sums of graphar's products. Other methods round at
            every hop, or use torch's matmul.
        codec: the codec of an exact method; None: exact sums.
        summed: whether the result is a sum over ranks. Otherwise it is this rank's product.
        whole: whether it promises the bits of one GPU that has the whole layer.
        keeps: objects that must live as long as the method, because its calls use only their addresses.
        product: computes this rank's product. For an exact method it has the op's bits.
    """

    name: str
    call: Callable[..., Tensor]
    serves: Callable[[Layer], bool] = lambda layer: True
    exact: bool = False
    codec: Codec | None = None
    summed: bool = True
    whole: bool = False
    keeps: object = None
    product: Callable[..., Tensor] = own_product


def make_variants(plan: FusedPlan, ranks: Ranks) -> tuple[list[Variant], list[str]]:
    """Returns the plan's methods in its order, and why some are missing. Allocates all memory. Collective."""
    others = [name for name in plan.methods if name.startswith(AFTER) and not name.endswith(INT8)]
    sums, skipped = make_sums(plan, [name.removeprefix(AFTER) for name in others], ranks)
    variants = [_make(name) for name in plan.methods if name not in others]
    variants += [after_matmul(method, AFTER, torch_mm) for method in sums]
    made = {variant.name: variant for variant in variants}
    return [made[name] for name in plan.methods if name in made], skipped


def make_sums(plan: FusedPlan, names: Sequence[str], ranks: Ranks) -> tuple[list[Method], list[str]]:
    """Returns all-reduces of the plan's results, and why some are missing. Allocates all memory. Collective."""
    largest = max(layer.nbytes for layer in plan.layers())
    sums = Plan(plan.device, plan.world_size, "process", ("bfloat16",), tuple(names), largest)
    return catalogue.make_methods(sums, ranks)


def _make(name: str) -> Variant:
    if name == MATMUL:
        return Variant(name, torch_mm, summed=False)
    if name == ALLREDUCE:
        return Variant(name, Alone(own_product, sum_of), exact=True)
    if name.startswith(CHUNKED):
        return Variant(
            name, partial(chunked, count=int(name.removeprefix(CHUNKED))), serves=lambda layer: layer.m >= MIN_ROWS
        )
    if name == SYMM_FUSED:
        return Variant(name, symm_fused, serves=lambda layer: layer.m >= MIN_ROWS and layer.m % layer.world_size == 0)
    if name in PARTITIONED:
        call = partial(partitioned, *PARTITIONED[name])
        return Variant(name, call, serves=lambda layer: layer.m >= MIN_ROWS, exact=True, product=product_of_cuts)
    if name == TP_INVARIANT:
        call = partial(graphar.fused_matmul_allreduce, partition="tp_invariant")
        return Variant(name, call, serves=lambda layer: LEAVES % layer.world_size == 0, whole=True)
    text = INT8[1:] if name.endswith(INT8) else ""
    by = {"exact": True, "codec": codec(text) if text else None}
    call = partial(graphar.fused_matmul_allreduce, codec=text or None)
    if name.startswith(AFTER):
        return Variant(name, partial(call, partition="none"), **by)
    if name.startswith(TILES):
        serves = (lambda layer: layer.m >= MIN_ROWS) if text else in_tiles
        return Variant(name, partial(call, partition="tiles"), serves, product=product_of_tiles, **by)
    return Variant(name, call, product=partial(product_of_auto, text), **by)


def torch_mm(a: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.mm(a, w.t(), out=out)


def after_matmul(method: Method, prefix: str, multiply: Callable[..., Tensor]) -> Variant:
    """Returns a matmul followed by an all-reduce.

    Args:
        prefix: what precedes the method's name in the variant's.
        multiply: takes a rank's operands and ``out``, and returns its product. If the all-reduce needs its input in a
            buffer, ``out`` is that buffer. Otherwise it is None.
    """

    def call(a: Tensor, w: Tensor, *scales: Tensor) -> Tensor:
        shape = (len(a), len(w))
        out = None if method.buffer is None else method.buffer[: len(a) * len(w)].view(shape)
        return method.call(multiply(a, w, *scales, out=out).view(-1)).view(shape)

    return Variant(f"{prefix}{method.name}", call, lambda layer: method.serves(layer.nbytes), keeps=method)


def in_tiles(layer: Layer) -> bool:
    """Whether "tiles" is measured on a layer. It must have many rows, or a skinny kernel must support it."""
    return layer.m >= MIN_ROWS or is_skinny(Product(MATMUL_ALLREDUCE, (layer.m,), layer.n), layer.world_size)


class Alone:
    """One of two steps alone.

    Args:
        before: the other step, computed once for the same operands, before timing.
        step: takes the result of ``before`` and the operands.
    """

    def __init__(self, before: Callable[..., Tensor], step: Callable[..., Tensor]) -> None:
        self._before, self._step = before, step
        self._made: tuple[tuple, Tensor] | None = None

    def __call__(self, *operands: Tensor) -> Tensor:
        key = tuple((tensor.data_ptr(), tensor.shape) for tensor in operands)
        if self._made is None or self._made[0] != key:
            self._made = key, self._before(*operands)
        return self._step(self._made[1], *operands)


def sum_of(product: Tensor, *_: Tensor) -> Tensor:
    return graphar.allreduce(product)


def chunked(a: Tensor, w: Tensor, count: int) -> Tensor:
    """Multiplies in chunks of rows. NCCL sums a chunk on its own stream while the next chunk is multiplied."""
    out = a.new_empty(len(a), len(w))
    pairs = zip(a.chunk(count), out.chunk(count), strict=True)
    pending = []
    for rows, part in pairs:
        torch.mm(rows, w.t(), out=part)
        pending.append(dist.all_reduce(part, async_op=True))
    for work in pending:
        work.wait()
    return out


def symm_fused(a: Tensor, w: Tensor) -> Tensor:
    """Runs torch's pipelined matmul and reduce-scatter over symmetric memory, and then an all-gather."""
    group = dist.group.WORLD.group_name
    part = torch.ops.symm_mem.fused_matmul_reduce_scatter(a, w.t(), "sum", 0, group)
    out = a.new_empty(len(a), len(w))
    dist.all_gather_into_tensor(out, part)
    return out


def partitioned(cut: str, count: int, algorithm: str, blocks: int, a: Tensor, w: Tensor) -> Tensor:
    """Runs graphar's op in ``count`` chunks, with this algorithm and so many thread blocks of the all-reduces."""
    out = a.new_empty(len(a), len(w))
    work = Product(MATMUL_ALLREDUCE, (len(a),), len(w), partition=cut, num_partitions=count)
    operands = Operands((a, w), (out,))
    Then(engine_of_group(""), Call.of(work, a, algorithm=algorithm, blocks=blocks), operands).run([operands])
    return out
