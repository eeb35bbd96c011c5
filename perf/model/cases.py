"""What is measured: layers of Llama's shapes, tokens that are decoded beside a cache, and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CONTEXT = 1024  # tokens of each sequence that is decoded, the new one included
DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True)
class Size:
    """A model's shape.

    Attributes:
        heads, kv_heads: of queries; and of keys and values, each of which serves several of those.
        inner: features between the MLP's linear layers.
        layers: of the whole model, of which some are timed.
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


@dataclass(frozen=True)
class Plan:
    """What one world of ranks works through.

    Attributes:
        device: "cuda" or "cpu".
        size: name of SIZES.
        layers: how many are timed.
        decode, prefill: numbers of tokens.
    """

    device: str
    world_size: int
    size: str
    layers: int
    decode: Sequence[int]
    prefill: Sequence[int]

    def cases(self) -> Iterator[Case]:
        for tokens in self.decode:
            yield Case(DECODE, tokens, CONTEXT)
        for tokens in self.prefill:
            yield Case(PREFILL, tokens, tokens)
