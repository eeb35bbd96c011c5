"""A small transformer in plain torch, and a plan of torch that divides its tokens between ranks."""

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from tests.cases import normal

HEADS, WORDS = 8, 32


class Attention(torch.nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(hidden, inner) for _ in range(3))
        self.out = torch.nn.Linear(inner, hidden)
        self.width = inner // HEADS  # of a head

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Feed(torch.nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, hidden)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(torch.nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.before, self.between = torch.nn.RMSNorm(hidden, eps=1e-5), torch.nn.LayerNorm(hidden)
        self.attention, self.feed = Attention(hidden, inner), Feed(hidden, inner)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.feed(self.between(x))


class Transformer(torch.nn.Module):
    """Two blocks with random weights, the same on every rank."""

    def __init__(self, dtype, hidden=16, inner=64):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, hidden)
        self.blocks = torch.nn.ModuleList([Block(hidden, inner), Block(hidden, inner)])
        self.norm, self.head = torch.nn.RMSNorm(hidden, eps=1e-5), torch.nn.Linear(hidden, WORDS, bias=False)
        with torch.no_grad():
            for seed, one in enumerate(self.parameters()):
                one.copy_(normal(seed, one.numel(), torch.float32).view(one.shape) / hidden**0.5 + (one.ndim == 1))
        self.to(dtype)

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def words(batch, length, device="cpu"):
    return torch.arange(batch * length, device=device).mul(7).remainder(WORDS).view(batch, length)


def plan():
    """A plan of torch with sequence parallelism: tokens are divided between the linear layers of a block."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    joins = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    found = {
        "words": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": parallel.SequenceParallel(),
        "head": parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for name in ("before", "between"):
        found[f"blocks.*.{name}"] = parallel.SequenceParallel()
    for name in ("attention", "feed"):
        found[f"blocks.*.{name}"] = parallel.PrepareModuleInput(**joins)
    for name in ("attention.q", "attention.k", "attention.v", "feed.gate", "feed.up"):
        found[f"blocks.*.{name}"] = parallel.ColwiseParallel()
    for name in ("attention.out", "feed.down"):
        found[f"blocks.*.{name}"] = parallel.RowwiseParallel(output_layouts=Shard(1))
    return found
