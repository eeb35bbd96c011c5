"""A decoder of Llama's shape, or one rank's share of it: grouped-query attention, SwiGLU, RMSNorm, RoPE, a KV cache.

    x --+-- norm -- query, key, value -- rotate, attend -- out == add --+-- norm -- gate, up -- SwiGLU -- down == add --
        |             column-parallel                  row-parallel |   |        column-parallel    row-parallel  |
        +-----------------------------------------------------------+   +-----------------------------------------+

== is a sum over ranks. After it come the residual and a norm, the next one in the model: the row-parallel linear layer
and those three are one function, ``finish``, which is all that differs between the methods that are measured. Weights
and caches are random, whole from a seed, of which each rank keeps its share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6  # of RMSNorm
CONTEXT = 1024  # tokens of each sequence that is decoded, the new one included
DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True)
class Size:
    """A model's shape.

    Attributes:
        heads, kv_heads: of queries; and of keys and values, each of which serves several of those.
        inner: features between the MLP's linear layers.
        layers: of the whole model; some are timed.
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
        phase: DECODE, one new token for each of several sequences; or PREFILL, all tokens of one.
        tokens: new ones: the number of sequences, or the length of the one.
        context: tokens of each sequence, the new ones included; those before are in the cache.
    """

    phase: str
    tokens: int
    context: int

    @property
    def sequences(self) -> int:
        return self.tokens if self.phase == DECODE else 1

    @property
    def new(self) -> int:
        """New tokens of each sequence."""
        return self.tokens // self.sequences

    @property
    def iterations(self) -> int:
        """How many steps one timed repeat holds."""
        return 10 if self.phase == DECODE else 1

    @property
    def repeats(self) -> int:
        return 15 if self.phase == DECODE else 7


# ---- the model ------------------------------------------------------------------------------------------------------

THETA = 500_000.0  # Llama 3's base of the rotations' frequencies

# Of a, a row-parallel weight, the residual and a norm's weight: norm(residual + sum over ranks of a @ weight.T), and
# what is normed there.
Finish = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Layer:
    """One rank's weights of a layer, [outputs, inputs], and its norms'.

    Attributes:
        query_key_value: of this rank's heads, one below the other.
        gate_up: both of this rank's features, one below the other.
    """

    attention_norm: Tensor
    query_key_value: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer: each [sequences, this rank's heads of keys, context, head size]. The last tokens
    are the new ones', which a step writes."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Inputs:
    """Of one case.

    Attributes:
        x: embedded tokens, [tokens, hidden].
        turns: cosines and sines of RoPE's angles, each [new tokens of a sequence, head size].
        caches: one a layer.
    """

    case: Case
    x: Tensor
    turns: tuple[Tensor, Tensor]
    caches: list[Cache]


@dataclass(frozen=True)
class Pieces:
    """What is done to elements, compiled or not, alike in all methods."""

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
        """The last layer's output, normed: [tokens, hidden]. Writes the new tokens' keys and values into the caches."""
        residual, normed = given.x, rms_norm(given.x, self.layers[0].attention_norm)
        next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.final_norm]
        for layer, cache, next_norm in zip(self.layers, given.caches, next_norms, strict=True):
            attended = self._attend(normed @ layer.query_key_value.t(), cache, given, pieces.rotate)
            normed, residual = finish(attended, layer.out, residual, layer.mlp_norm)
            inner = pieces.swiglu(normed @ layer.gate_up.t())
            normed, residual = finish(inner, layer.down, residual, next_norm)
        return normed

    def _attend(self, projected: Tensor, cache: Cache, given: Inputs, rotate: Callable) -> Tensor:
        """[tokens, this rank's heads x head size], of its queries, keys and values side by side."""
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
    """Cosines and sines of the angles that pairs of elements are turned by, at the places of the new tokens."""
    places = torch.arange(case.context - case.new, case.context, device=device)
    frequencies = THETA ** -(torch.arange(0, head_size, 2, device=device) / head_size)
    angles = torch.outer(places, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Each element of the first half of a head with that of the second half, in fp32."""
    first, second = x.float().chunk(2, -1)
    return (x * cosines + torch.cat((-second, first), -1) * sines).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


# ---- weights and caches ---------------------------------------------------------------------------------------------

# What a layer's tensors are numbered by; each has a seed of its own.
NAMES = ("query", "key", "value", "out", "gate", "up", "down", "attention_norm", "mlp_norm", "keys", "values")
EMBEDDED, HEAD, FINAL_NORM = range(3)
FIRST_LAYER = 10


@dataclass(frozen=True)
class Share:
    """Which part of a model this is: ``rank`` of ``ranks``; of one, the whole."""

    rank: int
    ranks: int
    device: torch.device

    def part(self, whole: Tensor, axis: int) -> Tensor:
        return whole.chunk(self.ranks, axis)[self.rank].clone(memory_format=torch.contiguous_format)


def make_decoder(size: Size, layers: int, share: Share) -> Decoder:
    """Linear layers that keep the variance of what they are given, and norms with weights about 1."""
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
    """Random embeddings, alike on all ranks, and caches; a step overwrites the new tokens' part."""
    shape = (case.sequences, size.kv_heads, case.context, size.head_size)
    caches = [
        Cache(*(share.part(normal(seeds_of(at)[name], shape, share.device), 1) for name in ("keys", "values")))
        for at in range(layers)
    ]
    x = normal(EMBEDDED, (case.tokens, size.hidden), share.device)
    return Inputs(case, x, turns_of(case, size.head_size, share.device), caches)


def make_head(size: Size, device: torch.device) -> Tensor:
    """[vocabulary, hidden]: gives logits of about 1; whole on every rank, since it is not timed."""
    return normal(HEAD, (size.vocabulary, size.hidden), device).mul_(size.hidden**-0.5)


def seeds_of(layer: int) -> dict[str, int]:
    return {name: FIRST_LAYER + layer * len(NAMES) + at for at, name in enumerate(NAMES)}


def norm(seed: int, hidden: int, device: torch.device) -> Tensor:
    return normal(seed, (hidden,), device).mul_(0.1).add_(1)


def normal(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)
