"""A Llama decoder, whole or sharded by tensor parallelism: grouped-query attention, SwiGLU, RMSNorm, RoPE, KV cache.

    x --+-- norm -- query, key, value -- rotate, attend -- out == add --+-- norm -- gate, up -- SwiGLU -- down == add --
        |             column-parallel                  row-parallel |   |        column-parallel    row-parallel  |
        +-----------------------------------------------------------+   +-----------------------------------------+

== is an all-reduce. After it, the residual is added and the next norm is computed. One function,
``row_parallel_and_norm``, does all of this: row-parallel linear layer, all-reduce, residual and norm. The measured
methods differ only in this function. Weights and caches are random. Every rank generates the whole tensors from the
same seed and takes its shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6  # added to the mean square in RMSNorm
CONTEXT = 1024  # tokens of each sequence in decoding, including the new one
DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True)
class Size:
    """A model's shape.

    Attributes:
        kv_heads: key and value heads. Several query heads share each of them.
        inner: the MLP's intermediate size.
        layers: layers of the whole model. Only some of them are timed.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    layers: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


TINY = "tiny"
SIZES = {
    size.name: size
    for size in (
        Size(TINY, 256, 8, 4, 512, 512, 2),
        Size("llama-3-8b", 4096, 32, 8, 14336, 128256, 32),
        Size("llama-3-70b", 8192, 64, 8, 28672, 128256, 80),
    )
}


def check_heads(size: Size, world_size: int) -> None:
    """Ends the program if this number of ranks cannot divide the heads evenly."""
    if size.kv_heads % world_size:
        sys.exit(
            f"--world-size: {world_size} ranks cannot divide the {size.kv_heads} heads of {size.name}'s keys evenly"
        )


@dataclass(frozen=True)
class Case:
    """One step of the model.

    Attributes:
        phase: DECODE: one new token for each of several sequences. PREFILL: all tokens of one sequence.
        tokens: the number of new tokens: for DECODE the number of sequences, for PREFILL the sequence's length.
        context: the length of each sequence, including new tokens. Earlier tokens are in the cache.
    """

    phase: str
    tokens: int
    context: int

    @property
    def sequences(self) -> int:
        return self.tokens if self.phase == DECODE else 1

    @property
    def new(self) -> int:
        return self.tokens // self.sequences

    @property
    def iterations(self) -> int:
        return 10 if self.phase == DECODE else 1

    @property
    def repeats(self) -> int:
        return 15 if self.phase == DECODE else 7


THETA = 500_000.0  # RoPE's base frequency in Llama 3

# (a, row-parallel weight, residual, norm weight) -> (norm(total), total)
# total = residual + all-reduce(a @ weight.T)
RowParallelAndNorm = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Layer:
    """One rank's weights of a layer. A linear layer's weight is [outputs, inputs].

    Attributes:
        query_key_value: the query, key and value weights of this rank's heads, concatenated along the outputs.
        gate_up: the gate and up weights of this rank's features, concatenated along the outputs.
    """

    attention_norm: Tensor
    query_key_value: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, each [sequences, this rank's KV heads, context, head size].

    New tokens have the last positions. A step writes their keys and values.
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Inputs:
    """The inputs of one case.

    Attributes:
        x: embedded tokens, [tokens, hidden], or this rank's rows of them.
        cos_sin: cosine and sine of RoPE's angles, each [new tokens of a sequence, head size].
        caches: one cache for each layer; empty if sequences have no earlier tokens.
    """

    case: Case
    x: Tensor
    cos_sin: tuple[Tensor, Tensor]
    caches: Sequence[Cache] = ()


@dataclass(frozen=True)
class Decoder:
    """The layers of one rank, without embedding and head.

    Attributes:
        final_norm: the weight of the last norm.
    """

    size: Size
    layers: list[Layer]
    final_norm: Tensor

    def step(
        self,
        inputs: Inputs,
        elementwise: Elementwise,
        row_parallel_and_norm: RowParallelAndNorm,
        column_parallel: Callable[[Tensor, Tensor], Tensor] = functional.linear,
    ) -> Tensor:
        """Returns the normalised output of the last layer. It has the rows of ``inputs.x``. Updates the caches.

        Args:
            column_parallel: takes normalised rows and a weight. Returns this rank's features of all rows.
        """
        residual, normed = inputs.x, rms_norm(inputs.x, self.layers[0].attention_norm)
        next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.final_norm]
        for at, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            projected = column_parallel(normed, layer.query_key_value)
            cache = inputs.caches[at] if inputs.caches else None
            attended = self._attend(projected, layer, cache, inputs, elementwise.rotate)
            normed, residual = row_parallel_and_norm(attended, layer.out, residual, layer.mlp_norm)
            inner = elementwise.swiglu(column_parallel(normed, layer.gate_up))
            normed, residual = row_parallel_and_norm(inner, layer.down, residual, next_norm)
        return normed

    def _attend(self, projected: Tensor, layer: Layer, cache: Cache | None, inputs: Inputs, rotate: Callable) -> Tensor:
        """Returns the attention's output, [tokens, this rank's heads x head size].

        ``projected`` has queries, keys and values concatenated along the features.
        """
        case, head_size = inputs.case, self.size.head_size
        heads = projected.view(case.sequences, case.new, -1, head_size).transpose(1, 2)
        kv_heads = (heads.shape[1] - layer.out.shape[1] // head_size) // 2
        rotated, values = rotate(heads[:, :-kv_heads], *inputs.cos_sin), heads[:, -kv_heads:]
        queries, keys = rotated[:, :-kv_heads], rotated[:, -kv_heads:]
        if cache is not None:
            cache.keys[:, :, -case.new :] = keys
            cache.values[:, :, -case.new :] = values
            keys, values = cache.keys, cache.values
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=case.new > 1, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(len(projected), -1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def add_and_norm(total: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    summed = total + residual
    return torch.nn.functional.rms_norm(summed, weight.shape, weight, EPS), summed


def rope_cos_sin(case: Case, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of RoPE's angles at the positions of the new tokens."""
    positions = torch.arange(case.context - case.new, case.context, device=device)
    frequencies = THETA ** -(torch.arange(0, head_size, 2, device=device) / head_size)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Applies RoPE in fp32. Element i of a head's first half is rotated together with element i of its second half."""
    first, second = x.float().chunk(2, -1)
    return (x * cosines + torch.cat((-second, first), -1) * sines).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


@dataclass(frozen=True)
class Elementwise:
    """The model's elementwise functions, compiled or not. All methods use the same ones."""

    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    swiglu: Callable[[Tensor], Tensor] = swiglu
    # (sum, residual, weight) -> (normed, residual)
    add_and_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = add_and_norm

    def mapped(self, function: Callable[[Callable], Callable]) -> Elementwise:
        """Returns these functions after ``function``, such as torch.compile."""
        return Elementwise(function(self.rotate), function(self.swiglu), function(self.add_and_norm))


PLAIN = Elementwise()


def compiled(function: Callable, dynamic: bool | None = None) -> Callable:
    """Returns ``function`` compiled by Inductor, with the same kernels on every rank.

    Inductor has several kernels for the sum of a row of more than 2048 elements. By default each rank times them in its
    first call and takes the fastest, so ranks may choose different kernels. Inductor's option ``deterministic`` chooses
    the kernel by size and GPU alone.

    Args:
        dynamic: False: each size has its own kernels. None: kernels take any size from the second size on.
    """
    from torch._inductor import config

    config.compile_threads = 1  # starting a pool of processes takes longer than compiling one function
    return torch.compile(function, dynamic=dynamic, options={"deterministic": True})


# A layer's tensors. A tensor's position in this tuple is part of its seed.
NAMES = ("query", "key", "value", "out", "gate", "up", "down", "attention_norm", "mlp_norm", "keys", "values")
EMBEDDED, HEAD, FINAL_NORM = range(3)
FIRST_LAYER = 10


@dataclass(frozen=True)
class Shard:
    """A rank's shard of the model: part ``rank`` of ``ranks`` equal parts. With one rank it is the whole model."""

    rank: int
    ranks: int
    device: torch.device

    def part(self, whole: Tensor, axis: int) -> Tensor:
        return whole.chunk(self.ranks, axis)[self.rank].clone(memory_format=torch.contiguous_format)


def make_decoder(size: Size, layers: int, shard: Shard) -> Decoder:
    """Returns a model with random weights. Linear layers preserve variance, and norm weights are about 1."""
    final_norm = norm(FINAL_NORM, size.hidden, shard.device)
    return Decoder(size, [make_layer(size, at, shard) for at in range(layers)], final_norm)


def make_layer(size: Size, at: int, shard: Shard) -> Layer:
    seeds = seeds_of(at)
    kv_width = size.kv_heads * size.head_size

    def weight(name: str, outputs: int, inputs: int, axis: int) -> Tensor:
        whole = normal(seeds[name], (outputs, inputs), shard.device).mul_(inputs**-0.5)
        return shard.part(whole, axis)

    columns = {"query": size.hidden, "key": kv_width, "value": kv_width, "gate": size.inner, "up": size.inner}
    made = {name: weight(name, outputs, size.hidden, 0) for name, outputs in columns.items()}
    return Layer(
        attention_norm=norm(seeds["attention_norm"], size.hidden, shard.device),
        query_key_value=torch.cat([made[name] for name in ("query", "key", "value")]),
        out=weight("out", size.hidden, size.hidden, 1),
        mlp_norm=norm(seeds["mlp_norm"], size.hidden, shard.device),
        gate_up=torch.cat([made["gate"], made["up"]]),
        down=weight("down", size.hidden, size.inner, 1),
    )


def make_inputs(size: Size, layers: int, case: Case, shard: Shard) -> Inputs:
    """Returns random embeddings and caches. The embeddings are the same on all ranks."""
    shape = (case.sequences, size.kv_heads, case.context, size.head_size)
    caches = [
        Cache(*(shard.part(normal(seeds_of(at)[name], shape, shard.device), 1) for name in ("keys", "values")))
        for at in range(layers)
    ]
    x = normal(EMBEDDED, (case.tokens, size.hidden), shard.device)
    return Inputs(case, x, rope_cos_sin(case, size.head_size, shard.device), caches)


def make_head(size: Size, device: torch.device) -> Tensor:
    """Returns the language-model head, [vocabulary, hidden], for logits of about 1. It is neither timed nor sharded."""
    return normal(HEAD, (size.vocabulary, size.hidden), device).mul_(size.hidden**-0.5)


def seeds_of(layer: int) -> dict[str, int]:
    return {name: FIRST_LAYER + layer * len(NAMES) + at for at, name in enumerate(NAMES)}


def norm(seed: int, hidden: int, device: torch.device) -> Tensor:
    return normal(seed, (hidden,), device).mul_(0.1).add_(1)


def normal(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)
