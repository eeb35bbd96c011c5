"""A whole decoder like Llama's as a module to train: the shapes and the elementwise functions of decoder.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from perf.models.decoder import EPS, PREFILL, Case, Size, rotate, swiglu, turns_of

STATE_NBYTES = 16  # of a parameter in training: itself, its gradient and two moments, in fp32
FILLED = 0.85  # the share of a GPU's memory that a model may fill


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

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.out(self._attend(self.query_key_value(self.attention_norm(x)), turns))
        return x + self.down(swiglu(self.gate_up(self.mlp_norm(x))))

    def _attend(self, projected: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        heads = projected.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        queries_and_keys, values = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        turned = rotate(queries_and_keys, *turns)
        queries, keys = turned[:, : -self.kv_heads], turned[:, -self.kv_heads :]
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(-2)


class Llama(nn.Module):
    """Gives logits [sequences, tokens, vocabulary] for tokens [sequences, tokens]."""

    def __init__(self, size: Size, layers: int) -> None:
        super().__init__()
        self.head_size = size.head_size
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(Block(size) for _ in range(layers))
        self.norm = nn.RMSNorm(size.hidden, EPS)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        turns = turns_of(Case(PREFILL, length, length), self.head_size, tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, turns)
        return self.head(self.norm(x))


def fitting_layers(size: Size, world_size: int, tokens: int, nbytes: int) -> int:
    """Returns how many of the model's layers fit into ``nbytes`` of each rank, with ``tokens`` a rank: an estimate."""
    with torch.device("meta"):
        in_layer = sum(parameter.numel() for parameter in Block(size).parameters())
    ends = 2 * size.vocabulary * size.hidden
    # Logits and their gradients take 14 bytes an element; embedding and head, gathered, and their gradients 6.
    fixed = STATE_NBYTES * ends // world_size + 14 * tokens * size.vocabulary + 6 * ends
    # What a layer keeps in bf16 for its backward pass: some 10 tensors of [tokens, hidden], and 5 of [tokens, inner].
    activations = 2 * tokens * (10 * size.hidden + 5 * size.inner)
    layer = STATE_NBYTES * in_layer // world_size + activations
    return max(1, min(size.layers, int((FILLED * nbytes - fixed) // layer)))


def fill(model: nn.Module, rank: int) -> None:
    """Gives this rank's shards of a model random values, and norms ones. The same at every call."""
    generator: torch.Generator | None = None
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if own.ndim == 1:
                own.fill_(1)
                continue
            generator = (generator or torch.Generator(own.device)).manual_seed(1000 * at + rank)
            own.normal_(0, 0.02, generator=generator)
