"""Sequence parallelism of graphar.nn: layers between which each rank has its part of the tokens.

A weight's gradient sums over all tokens. Parts of a [batch, sequence, features] input interleave with the batch, so
tokens are joined along the sequence again before they are summed: the order is as on one rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.autograd.functional import vjp

from graphar.numerics import leaf_tree, partitions
from graphar.ops.allgather import OP as ALLGATHER
from graphar.ops.allgather_matmul import OP as ALLGATHER_MATMUL
from graphar.ops.linear import of_bias, of_weight
from graphar.ops.matmul_sums import SCATTER as MATMUL_REDUCESCATTER
from graphar.ops.register import Op
from graphar.runtime.registry import ALONE


class Tokens(NamedTuple):
    """How ranks divide tokens."""

    communicator: str  # its name in an op's schema
    rank: int
    ranks: int
    axis: int  # of the tokens, counted from the first

    def joined(self, x: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """Returns the tokens of all ranks. ``lengths`` are the ranks' lengths; None: all have this rank's."""
        return self._of_all(ALLGATHER, x.shape[self.axis], lengths, x=x.contiguous(), axis=self.axis)

    def gathered_product(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, partition: str):
        """Returns the products of all ranks' tokens with this rank's weight, and these tokens, both as of one rank."""
        added = [] if bias is None else [bias]
        call = {"a": self.first(x), "w": w, "bias": added, "partition": partition, "gathered": True}
        results = self._of_all(ALLGATHER_MATMUL, x.shape[self.axis], **call)
        return [self.back(result) for result in results]

    def own_sums(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, partition: str) -> torch.Tensor:
        """Returns this rank's tokens of the sum of all ranks' products."""
        call = {"a": self.first(x), "w": w, "bias": [] if bias is None else [bias], "partition": partition}
        return self.back(self._of_all(MATMUL_REDUCESCATTER, x.shape[self.axis] // self.ranks, **call))

    def _of_all(self, op: Op, length: int, lengths: Sequence[int] | None = None, **call) -> Any:
        """Returns the results of a collective of ranks whose parts have these ``lengths``, or all the same."""
        rank = -1 if self.communicator == ALONE else self.rank
        sizes = list(lengths or [length] * self.ranks)
        return op.dispatched(communicator=self.communicator, rank=rank, sizes=sizes, **call)

    def check_even(self, x: torch.Tensor) -> None:
        """Raises ValueError unless all ranks can have equally many of the tokens of ``x``."""
        if x.shape[self.axis] % self.ranks:
            raise ValueError(f"RowParallelLinear: {self.ranks} ranks cannot divide {x.shape[self.axis]} tokens evenly")

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return x.movedim(self.axis, 0).contiguous()

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor, which has its tokens in the first dimension, with them where they were."""
        return x.movedim(0, self.axis).contiguous()


def column_parallel(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, tokens: Tokens, partition: str):
    if partition == partitions.TP_INVARIANT and x.requires_grad and torch.is_grad_enabled():
        leaf_tree.check_columns("ColumnParallelLinear", len(w), tokens.ranks, "features")
    return _Parallel.apply(x, w, bias, tokens, partition, True)


def row_parallel(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, tokens: Tokens, partition: str):
    """Returns this rank's tokens of the sum over all features, from this rank's features of all tokens."""
    tokens.check_even(x)
    return _Parallel.apply(x, w, bias, tokens, partition, False)


class _Parallel(torch.autograd.Function):
    """Gathers tokens, which no rank keeps, and multiplies; or multiplies and sums each rank's. Backward the other."""

    @staticmethod
    def forward(ctx, x, w, bias, tokens, partition, gathers):
        ctx.save_for_backward(x, w)
        ctx.tokens, ctx.partition, ctx.gathers = tokens, partition, gathers
        return tokens.gathered_product(x, w, bias, partition)[0] if gathers else tokens.own_sums(x, w, bias, partition)

    @staticmethod
    def backward(ctx, *gradient):
        (dy,), (x, w), partition = gradient, ctx.saved_tensors, partitions.in_backward(ctx.partition)
        needs_x, needs_w, needs_bias, *_ = ctx.needs_input_grad
        if ctx.gathers:
            of_x = ctx.tokens.own_sums(dy, w.t(), None, partition) if needs_x else None
            x = ctx.tokens.joined(x) if needs_w else x
        else:
            of_x, dy = ctx.tokens.gathered_product(dy, w.t(), None, partition)
        of_w = of_weight(partition, dy, x) if needs_w else None
        return of_x, of_w, of_bias(partition, dy) if needs_bias else None, None, None, None


class _OfOwnTokens(torch.autograd.Function):
    """A ``function(x, *parameters)`` of this rank's tokens, with the gradients of one rank that has all tokens.

    ``function`` is one of each token alone, as norms are. The backward pass gathers ``x`` and the result's gradient,
    and differentiates ``function`` of all tokens on every rank. So whatever order torch sums in, it is the order of one
    rank. ``length`` is the number of all ranks' tokens along their axis, divided as by torch.chunk. Without ``tokens``
    this rank has all. It needs this too: torch may differentiate ``function`` in several steps, whose gradients of
    ``x`` are added to others in another order than one gradient.
    """

    @staticmethod
    def forward(ctx, function, tokens: Tokens | None, length: int, x, *parameters):
        ctx.save_for_backward(x, *parameters)
        ctx.function, ctx.tokens, ctx.length = function, tokens, length
        return function(x, *parameters)

    @staticmethod
    def backward(ctx, *gradient):
        (dy,), (x, *parameters), tokens, own = gradient, ctx.saved_tensors, ctx.tokens, None
        if tokens is not None:
            each = -(-ctx.length // tokens.ranks)
            begins = [min(each * rank, ctx.length) for rank in range(tokens.ranks + 1)]
            lengths = [end - begin for begin, end in itertools.pairwise(begins)]
            x, dy = tokens.joined(x, lengths), tokens.joined(dy, lengths)
            own = tokens.axis, begins[tokens.rank], lengths[tokens.rank]
        # For results that have derivatives themselves, vjp() wants inputs that all need gradients.
        inputs = tuple([one if one.requires_grad else one.detach().requires_grad_() for one in (x, *parameters)])
        of_x, *rest = vjp(ctx.function, inputs, dy, create_graph=torch.is_grad_enabled())[1]
        return None, None, None, of_x if own is None else of_x.narrow(*own), *rest


@_disable_dynamo  # torch.compile traces no backward pass that differentiates; torch.compiler.disable imports it
def of_own_tokens(*call: Any) -> torch.Tensor:
    return _OfOwnTokens.apply(*call)
