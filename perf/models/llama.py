"""Llama as a module to train. It has the shapes and the elementwise functions of decoder.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from perf.models.decoder import EPS, PREFILL, Case, Size, rope_cos_sin, rotate, swiglu

STATE_NBYTES = 16  # per parameter: the parameter, its gradient and AdamW's two moments, in fp32
MEMORY_FRACTION = 0.85  # the fraction of a GPU's memory that training may use


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.kv_heads, self.head_size = size.kv_heads, size.head_size
        self.attention_norm = nn.RMSNorm(size.hidden, EPS)
        self.query_key_value = nn.Linear(size.hidden, size.hidden + 2 * size.kv_heads * size.head_size, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(size.hidden, EPS)
        self.gate_up = nn.Linear(size.hidden, 2 * size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.hidden, bias=False)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.out(self._attend(self.query_key_value(self.attention_norm(x)), cos_sin))
        return x + self.down(swiglu(self.gate_up(self.mlp_norm(x))))

    def _attend(self, projected: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        heads = projected.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        queries_and_keys, values = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        rotated = rotate(queries_and_keys, *cos_sin)
        queries, keys = rotated[:, : -self.kv_heads], rotated[:, -self.kv_heads :]
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(-2)


class Llama(nn.Module):
    """Maps tokens [sequences, tokens] to logits [sequences, tokens, vocabulary]."""

    def __init__(self, size: Size, layers: int) -> None:
        super().__init__()
        self.head_size = size.head_size
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(Block(size) for _ in range(layers))
        self.norm = nn.RMSNorm(size.hidden, EPS)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos_sin = rope_cos_sin(Case(PREFILL, length, length), self.head_size, tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos_sin)
        return self.head(self.norm(x))


def fitting_layers(size: Size, world_size: int, tokens: int, nbytes: int) -> int:
    """Estimates how many layers can be trained with ``nbytes`` of memory and ``tokens`` tokens per rank."""
    with torch.device("meta"):
        in_layer = sum(parameter.numel() for parameter in Block(size).parameters())
    embedding_and_head = 2 * size.vocabulary * size.hidden
    # Logits and their gradients take 14 bytes an element. The gathered embedding and head and their gradients take 6.
    fixed = STATE_NBYTES * embedding_and_head // world_size + 14 * tokens * size.vocabulary + 6 * embedding_and_head
    # A layer saves about 10 tensors of [tokens, hidden] and 5 of [tokens, inner] for its backward pass, in bf16.
    activations = 2 * tokens * (10 * size.hidden + 5 * size.inner)
    layer = STATE_NBYTES * in_layer // world_size + activations
    return max(1, min(size.layers, int((MEMORY_FRACTION * nbytes - fixed) // layer)))


def fill(model: nn.Module, rank: int) -> None:
    """Initialises this rank's shards: ones for norms, random values for the rest. Every call gives the same values."""
    generator: torch.Generator | None = None
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if shard.ndim == 1:
                shard.fill_(1)
                continue
            generator = (generator or torch.Generator(shard.device)).manual_seed(1000 * at + rank)
            shard.normal_(0, 0.02, generator=generator)
