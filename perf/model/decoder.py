"""A decoder of Llama's shape, or one rank's share of it: grouped-query attention, SwiGLU, RMSNorm, RoPE, a KV cache.

    x --+-- norm -- query, key, value -- rotate, attend -- out == add --+-- norm -- gate, up -- SwiGLU -- down == add --
        |             column-parallel                  row-parallel |   |        column-parallel    row-parallel  |
        +-----------------------------------------------------------+   +-----------------------------------------+

== is a sum over ranks. After it come the residual and a norm, the next one in the model: the row-parallel linear layer
and those three are one function, ``finish``, which is all that differs between the ways that are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from perf.model.cases import Case, Size
from perf.norms import EPS

THETA = 500_000.0  # Llama 3's base of the rotations' frequencies

# Of a, a row-parallel weight, the residual and a norm's weight: norm(residual + sum over ranks of a @ weight.T), and
# what is normed there.
Finish = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Layer:
    """One rank's weights of a layer, [outputs, inputs], and its norms'.

    Attributes:
        query_key_value: of this rank's heads, one below the other.
        gate_up: likewise, of its features.
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
    """What is done to elements, compiled or not, alike in all ways."""

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
