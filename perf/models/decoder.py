"""A decoder like Llama's, or one rank's share of it: grouped-query attention, SwiGLU, RMSNorm, RoPE, a KV cache.

    x --+-- norm -- query, key, value -- rotate, attend -- out == add --+-- norm -- gate, up -- SwiGLU -- down == add --
        |             column-parallel                  row-parallel |   |        column-parallel    row-parallel  |
        +-----------------------------------------------------------+   +-----------------------------------------+

== is a sum over ranks. The residual and the model's next norm follow it. One function, ``finish``, computes the
row-parallel linear layer, the sum, the residual and the norm; the measured methods differ only in this function.
Weights and caches are random. Every rank generates the whole tensors from a seed, and keeps its share.
"""

from __future__ import annotations

from collections.abc import Callable
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
        heads: query heads.
        kv_heads: key and value heads; each serves several query heads.
        inner: features between the MLP's linear layers.
        layers: layers of the whole model; only some are timed.
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


@dataclass(frozen=True)
class Case:
    """One step of the model.

    Attributes:
        phase: DECODE: one new token for each of several sequences. PREFILL: all tokens of one sequence.
        tokens: new tokens of all sequences: for DECODE the number of sequences, for PREFILL the sequence's length.
        context: tokens of each sequence, including the new ones. Earlier tokens are in the cache.
    """

    phase: str
    tokens: int
    context: int

    @property
    def sequences(self) -> int:
        return self.tokens if self.phase == DECODE else 1

    @property
    def new(self) -> int:
        """The number of new tokens of each sequence."""
        return self.tokens // self.sequences

    @property
    def iterations(self) -> int:
        """The number of steps in one timed repeat."""
        return 10 if self.phase == DECODE else 1

    @property
    def repeats(self) -> int:
        return 15 if self.phase == DECODE else 7


# ---- the model ------------------------------------------------------------------------------------------------------

THETA = 500_000.0  # RoPE's base frequency in Llama 3

# Takes a, a row-parallel weight, the residual and a norm's weight. Returns norm(total) and total, where total is
# residual + the sum over ranks of a @ weight.T.
Finish = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Layer:
    """One rank's weights of a layer, [outputs, inputs], and the weights of its norms.

    Attributes:
        query_key_value: the three weights of this rank's heads, stacked along the outputs.
        gate_up: the two weights of this rank's features, stacked along the outputs.
    """

    attention_norm: Tensor
    query_key_value: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer: each [sequences, this rank's key heads, context, head size].

    The new tokens come last. A step writes their keys and values.
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Inputs:
    """The inputs of one case.

    Attributes:
        x: embedded tokens, [tokens, hidden].
        turns: cosines and sines of RoPE's angles, each [new tokens of a sequence, head size].
        caches: one cache for each layer.
    """

    case: Case
    x: Tensor
    turns: tuple[Tensor, Tensor]
    caches: list[Cache]


@dataclass(frozen=True)
class Pieces:
    """The elementwise functions, compiled or not, that all methods share."""

    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Decoder:
    """Attributes:
    final_norm: the weight of the last norm.
    """

    size: Size
    layers: list[Layer]
    final_norm: Tensor

    def step(self, given: Inputs, pieces: Pieces, finish: Finish) -> Tensor:
        """Returns the last layer's output, normed: [tokens, hidden]. Writes the new keys and values to the caches."""
        residual, normed = given.x, rms_norm(given.x, self.layers[0].attention_norm)
        next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.final_norm]
        for layer, cache, next_norm in zip(self.layers, given.caches, next_norms, strict=True):
            attended = self._attend(normed @ layer.query_key_value.t(), cache, given, pieces.rotate)
            normed, residual = finish(attended, layer.out, residual, layer.mlp_norm)
            inner = pieces.swiglu(normed @ layer.gate_up.t())
            normed, residual = finish(inner, layer.down, residual, next_norm)
        return normed

    def _attend(self, projected: Tensor, cache: Cache, given: Inputs, rotate: Callable) -> Tensor:
        """Returns the attention's output, [tokens, this rank's heads x head size].

        ``projected`` has the queries, keys and values side by side.
        """
        case, kv_heads = given.case, cache.keys.shape[1]
        heads = projected.view(case.sequences, case.new, -1, self.size.head_size).transpose(1, 2)
        queries_and_keys, values = heads[:, :-kv_heads], heads[:, -kv_heads:]
        turned = rotate(queries_and_keys, *given.turns)
        queries, keys = turned[:, :-kv_heads], turned[:, -kv_heads:]
        cache.keys[:, :, -case.new :] = keys
        cache.values[:, :, -case.new :] = values
        attended = functional.scaled_dot_product_attention(
            queries, cache.keys, cache.values, is_causal=case.new > 1, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(len(projected), -1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def turns_of(case: Case, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of RoPE's angles at the positions of the new tokens."""
    places = torch.arange(case.context - case.new, case.context, device=device)
    frequencies = THETA ** -(torch.arange(0, head_size, 2, device=device) / head_size)
    angles = torch.outer(places, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Applies RoPE in fp32: rotates each element of a head's first half with the same element of its second half."""
    first, second = x.float().chunk(2, -1)
    return (x * cosines + torch.cat((-second, first), -1) * sines).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


# ---- weights and caches ---------------------------------------------------------------------------------------------

# A layer's tensors. A tensor's position in this tuple is part of its seed.
NAMES = ("query", "key", "value", "out", "gate", "up", "down", "attention_norm", "mlp_norm", "keys", "values")
EMBEDDED, HEAD, FINAL_NORM = range(3)
FIRST_LAYER = 10


@dataclass(frozen=True)
class Share:
    """Which part of a model a rank has: part ``rank`` of ``ranks``. With one rank it is the whole model."""

    rank: int
    ranks: int
    device: torch.device

    def part(self, whole: Tensor, axis: int) -> Tensor:
        return whole.chunk(self.ranks, axis)[self.rank].clone(memory_format=torch.contiguous_format)


def make_decoder(size: Size, layers: int, share: Share) -> Decoder:
    """Returns a model with random weights: linear layers keep the variance of their input, norm weights are about 1."""
    final_norm = norm(FINAL_NORM, size.hidden, share.device)
    return Decoder(size, [make_layer(size, at, share) for at in range(layers)], final_norm)


def make_layer(size: Size, at: int, share: Share) -> Layer:
    seeds = seeds_of(at)
    kv_width = size.kv_heads * size.head_size

    def weight(name: str, outputs: int, inputs: int, axis: int) -> Tensor:
        whole = normal(seeds[name], (outputs, inputs), share.device).mul_(inputs**-0.5)
        return share.part(whole, axis)

    columns = {"query": size.hidden, "key": kv_width, "value": kv_width, "gate": size.inner, "up": size.inner}
    made = {name: weight(name, outputs, size.hidden, 0) for name, outputs in columns.items()}
    return Layer(
        attention_norm=norm(seeds["attention_norm"], size.hidden, share.device),
        query_key_value=torch.cat([made[name] for name in ("query", "key", "value")]),
        out=weight("out", size.hidden, size.hidden, 1),
        mlp_norm=norm(seeds["mlp_norm"], size.hidden, share.device),
        gate_up=torch.cat([made["gate"], made["up"]]),
        down=weight("down", size.hidden, size.inner, 1),
    )


def make_inputs(size: Size, layers: int, case: Case, share: Share) -> Inputs:
    """Returns random embeddings, the same on all ranks, and random caches, where a step overwrites the new tokens."""
    shape = (case.sequences, size.kv_heads, case.context, size.head_size)
    caches = [
        Cache(*(share.part(normal(seeds_of(at)[name], shape, share.device), 1) for name in ("keys", "values")))
        for at in range(layers)
    ]
    x = normal(EMBEDDED, (case.tokens, size.hidden), share.device)
    return Inputs(case, x, turns_of(case, size.head_size, share.device), caches)


def make_head(size: Size, device: torch.device) -> Tensor:
    """Returns the language-model head, [vocabulary, hidden], for logits of about 1. It is not timed, so not sharded."""
    return normal(HEAD, (size.vocabulary, size.hidden), device).mul_(size.hidden**-0.5)


def seeds_of(layer: int) -> dict[str, int]:
    return {name: FIRST_LAYER + layer * len(NAMES) + at for at, name in enumerate(NAMES)}


def norm(seed: int, hidden: int, device: torch.device) -> Tensor:
    return normal(seed, (hidden,), device).mul_(0.1).add_(1)


def normal(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)
