"""Random weights and caches, whole from a seed, of which each rank keeps its share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perf.model.cases import Case, Size
from perf.model.decoder import Cache, Decoder, Inputs, Layer, turns_of

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
    """Random embeddings, alike on all ranks, and caches, of which the new tokens' part is there to be written over."""
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
