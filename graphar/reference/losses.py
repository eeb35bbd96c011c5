"""The specification of losses and log-probabilities over a divided vocabulary, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graphar.numerics import softmax
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.softmax import Terms


class Specified(NamedTuple):
    """What every rank gets, and the gradient of each rank's logits."""

    results: tuple[torch.Tensor, ...]  # what softmax.finish returns, in the shape of the target
    gradients: list[torch.Tensor]


def cross_entropy(
    logits: torch.Tensor | Sequence[torch.Tensor],
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Returns the loss that graphar.cross_entropy gives on every rank, which numerics/softmax.py defines.

    Args:
        logits: [..., V], bf16, fp16 or fp32, where V is a multiple of 8; or a list with the columns of 1, 2, 4 or 8
            ranks, in rank order.
        target: [...], int64.
        ignore_index: the target of rows that have no loss.
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
        label_smoothing: the share of the loss, from 0 to 1, that is the mean over all columns.
        lse_square_scale: the factor of the z-loss, the square of the logarithm of the sum of exponentials.
        vocab_size: the columns of all ranks that are no padding. None: all.

    Returns:
        fp32, [...] for the reduction "none", otherwise [].
    """
    terms = Terms(vocab_size or 0, reduction, ignore_index, label_smoothing, lse_square_scale)
    return specification(logits, target, terms).results[0]


def log_probs(
    logits: torch.Tensor | Sequence[torch.Tensor],
    tokens: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    entropy: bool = False,
    top1: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Returns the log-probabilities that graphar.log_probs gives on every rank, which numerics/softmax.py defines.

    Args:
        logits: [..., V], bf16, fp16 or fp32, where V is a multiple of 8; or a list with the columns of 1, 2, 4 or 8
            ranks, in rank order.
        tokens: [...], int64.
        temperature: logits are multiplied by 1 / temperature.
        vocab_size: the columns of all ranks that are no padding. None: all.
        entropy: also returns the entropy of each row.
        top1: also returns the column of each row's largest logit, the first of equals.

    Returns:
        fp32 [...]; with ``entropy`` or ``top1`` a tuple: log-probabilities, then fp32 entropies, then int64 columns.
    """
    terms = Terms(vocab_size or 0, "log_probs", temperature=temperature, entropy=entropy, top1=top1)
    result, _, *more = specification(logits, tokens, terms).results
    return (result, *more) if more else result


def specification(
    logits: torch.Tensor | Sequence[torch.Tensor],
    target: torch.Tensor,
    terms: Terms,
    upstream: torch.Tensor | None = None,
) -> Specified:
    """Returns the results of :func:`graphar.numerics.softmax.finish`, and the gradients of all ranks' logits.

    A ``vocab_size`` of 0 means all columns. ``upstream`` is the gradient of the first result, fp32. None: no gradients.
    """
    ranks = [x.contiguous() for x in ([logits] if isinstance(logits, torch.Tensor) else logits)]
    columns, gradients = ranks[0].shape[-1], []
    terms = terms._replace(vocab_size=terms.vocab_size or columns * len(ranks))
    firsts = range(0, columns * len(ranks), columns)
    leaves = LEAVES // len(ranks)
    partials = [softmax.partial(x, target, first, leaves, terms) for x, first in zip(ranks, firsts, strict=True)]
    result, state, *more = softmax.finish(torch.stack(partials), target, columns, terms)
    if upstream is not None:
        gradients = [torch.empty_like(x) for x in ranks]
        for x, first, out in zip(ranks, firsts, gradients, strict=True):
            softmax.gradient(x, target, state, upstream, first, terms, out)
    result, *more = (x.view(target.shape) if x.ndim else x for x in (result, *more))
    return Specified((result, state, *more), gradients)
