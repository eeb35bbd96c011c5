"""Softmax over a vocabulary that ranks divide, with one set of bits on 1, 2, 4 and 8 ranks.

A row of logits x is reduced to a node: its maximum m and s, the sum of exp(x - m). If they are asked for, a node also
has sum_x, the sum of x; sum_xe, the sum of exp(x - m) (x - m); and top1, the lowest column whose logit is m.

The order of additions is fixed, and does not depend on the number of ranks:

    1  The vocabulary is cut into 8 leaves of equal length. Each rank has 8 / ranks adjacent leaves.
    2  Element i of a leaf belongs to lane (i // 8) % 64. A lane adds its elements in order, in steps of 32.
    3  The 64 lanes of a leaf are added by halves: lane i and lane i + 32, then i and i + 16, down to i and i + 1.
    4  Neighbouring leaves are merged, then neighbouring pairs, as a binary tree. What a rank merges of its own leaves,
       its partial, is a node of that tree.

All arithmetic is fp32. Each operation is rounded once, to nearest; fma is one operation.

    empty node      m = -inf, s = 0, sum_x = 0, sum_xe = 0
    rescale to m'   d = m - m';  sum_xe = fma(s, d, sum_xe) x exp(d);  s = s x exp(d)
    step of a lane  rescale to the maximum of m and the step's elements, then for each element in order:
                    d = x - m;  s = s + exp(d);  sum_xe = fma(exp(d), d, sum_xe)
    lanes           rescale each lane to the maximum of its leaf, then add s and sum_xe by halves
    merge           of `low` and `high`, where low.m < high.m:  d = low.m - high.m
                    s = fma(low.s, exp(d), high.s)
                    sum_xe = fma(fma(low.s, d, low.sum_xe), exp(d), high.sum_xe)
                    of equal maxima: s and sum_xe are added
    exp(d), d <= 0  n = d x log2(e), rounded to an integer;  f = d x log2(e) - n, by fma
                    p = a polynomial of f, by fma from the highest coefficient on;  the result is p x 2^n

A d below -88 counts as -88, and so does -inf - -inf; a 2^n of 2^-127 counts as 0. Padding columns count as -inf, and as
0 in sum_x. A NaN among the logits makes m and s NaN, and top1 -1. Every NaN that is stored is the canonical one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from graphar.numerics.dtypes import fp32, with_canonical_nan
from graphar.numerics.exact_fma import fma, fma_in_doubles

PREPARED = ("cross_entropy", "log_probs")  # names under which the kernels of both are prepared
LANES, PACK, PACKS_OF_STEP = 64, 8, 4
LOG2E = float.fromhex("0x1.715476p+0")
COEFFICIENTS = [
    float.fromhex(f"0x1.{digits}") for digits in ("5bba14p-10", "3cea88p-7", "c6b752p-5", "ebf9bcp-3", "62e42ap-1")
]
_CHUNK_NUMEL, _PIECE_NUMEL = 1 << 18, 1 << 15  # elements of whole rows, and of exponentials, that are computed at once


class Terms(NamedTuple):
    """What is computed of each row."""

    vocab_size: int  # the columns of all ranks that are no padding
    result: str = "none"  # of losses the reduction: "mean", "sum" or "none"; or "log_probs"
    ignore_index: int | None = None  # the target of rows without a loss
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    temperature: float = 1.0  # divides the logits
    entropy: bool = False
    top1: bool = False

    @property
    def width(self) -> int:
        """The fp32 numbers of a rank's partial of a row: m, s, the target's x, and sum_x, sum_xe, top1 if needed."""
        return 3 + bool(self.label_smoothing) + self.entropy + self.top1

    @property
    def is_loss(self) -> bool:
        return self.result != "log_probs"

    @property
    def inverse_temperature(self) -> float:
        """The fp32 number by which logits are multiplied."""
        return fp32(1 / self.temperature)


class Node(NamedTuple):
    """A node of the tree for each row: fp32 tensors of one shape, or None for what is not asked for."""

    m: Tensor
    s: Tensor
    sum_x: Tensor | None = None
    sum_xe: Tensor | None = None
    top1: Tensor | None = None  # whole numbers


def exp(d: Tensor) -> Tensor:
    """Returns exp(d) of fp32 numbers that are not positive, with a relative error below 1.7e-7 + 1.4e-8 |d|."""
    result = torch.empty_like(d, memory_format=torch.contiguous_format)
    for piece, into in zip(d.reshape(-1).split(_PIECE_NUMEL), result.view(-1).split(_PIECE_NUMEL), strict=True):
        product = _clamped(piece).double().mul_(LOG2E)  # exact: 24 bits each
        n = product.round()
        f = product.sub_(n).float().double()  # the difference is exact in fp64, so this rounds once, as fma does
        p = torch.full_like(f, COEFFICIENTS[0])
        for coefficient in (*COEFFICIENTS[1:], 1.0):
            p = fma_in_doubles(p, f, coefficient)
        power = (n.nan_to_num_().int().add_(127) << 23).view(torch.float32)
        torch.mul(p.float(), power, out=into)
    return result


def _clamped(d: Tensor) -> Tensor:
    """Returns ``d``, or -88 if it is less: exp(d) is then 0, and its product with ``d`` is 0 and no NaN."""
    return d.clamp(min=-88.0)  # a NaN stays


def log(s: Tensor) -> Tensor:
    """Returns the logarithm of fp32 numbers, 0 included, in fp64 with a relative error below 1e-12.

    s = 2^k c with c in [sqrt(1/2), sqrt(2)). With r = (c - 1) / (c + 1), log c = 2 r (1 + r^2/3 + ... + r^14/15).
    """
    c, k = torch.frexp(s.double())
    small = c < math.sqrt(0.5)
    c, k = torch.where(small, c * 2, c), torch.where(small, k - 1, k)
    r = (c - 1) / (c + 1)
    square, series = r * r, torch.full_like(r, 1 / 15)
    for odd in range(13, 0, -2):
        series = series * square + 1 / odd
    return torch.where(s == 0, -math.inf, k.double() * math.log(2) + (r + r) * series)


def merge(a: Node, b: Node) -> Node:
    """Returns the node of two neighbours. ``a`` has the lower columns."""
    b_is_larger, equal = b.m > a.m, a.m == b.m

    def ordered(of_a: Tensor, of_b: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the numbers of the node with the lower maximum, and then the other's."""
        return torch.where(b_is_larger, of_a, of_b), torch.where(b_is_larger, of_b, of_a)

    (low_m, high_m), (low_s, high_s) = ordered(a.m, b.m), ordered(a.s, b.s)
    m, d = torch.maximum(a.m, b.m), low_m - high_m
    factor = exp(d)
    s = torch.where(equal, a.s + b.s, fma(low_s, factor, high_s))
    sum_x = sum_xe = top1 = None
    if a.sum_x is not None and b.sum_x is not None:
        sum_x = a.sum_x + b.sum_x
    if a.sum_xe is not None and b.sum_xe is not None:
        low, high = ordered(a.sum_xe, b.sum_xe)
        sum_xe = torch.where(equal, a.sum_xe + b.sum_xe, fma(fma(low_s, _clamped(d), low), factor, high))
    if a.top1 is not None and b.top1 is not None:
        top1 = torch.where(m.isnan(), -1.0, torch.where(b_is_larger, b.top1, a.top1))
    return Node(m, s, sum_x, sum_xe, top1)


def tree(nodes: Node) -> Node:
    """Returns the root of a binary tree over the last dimension of ``nodes``, whose length is a power of two."""
    while nodes.m.shape[-1] > 1:
        nodes = merge(_at(nodes, slice(0, None, 2)), _at(nodes, slice(1, None, 2)))
    return _at(nodes, 0)


def _at(nodes: Node, place: int | slice) -> Node:
    m, s, *others = nodes
    return Node(m[..., place], s[..., place], *[None if x is None else x[..., place] for x in others])


def tree_sum(x: Tensor) -> Tensor:
    """Returns the sum over the last dimension as a binary tree, as if zeros filled it up to a power of two."""
    count = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, (1 << max(0, count - 1).bit_length()) - count))
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def leaves(x: Tensor, present: Tensor, terms: Terms) -> Node:
    """Returns the nodes [rows, leaves], without top1, of fp32 logits ``x`` [rows, leaves, columns of a leaf].

    ``present`` [leaves, columns] says which columns are no padding.
    """
    steps = _steps(torch.where(present, x, -math.inf), -math.inf)
    zeros, sum_x = torch.zeros_like(steps[0][0]), None
    lanes = Node(zeros - math.inf, zeros, None, zeros if terms.entropy else None)
    for step in steps:
        lanes = _after_step(lanes, step)
    lanes = _rescaled(lanes, lanes.m.amax(-1, keepdim=True).expand_as(zeros))
    if terms.label_smoothing:
        sum_x = zeros
        for step in _steps(torch.where(present, x, 0.0), 0.0):
            for element in step:
                sum_x = sum_x + element
    sum_x, sum_xe = (None if lane is None else _by_halves(lane) for lane in (sum_x, lanes.sum_xe))
    return Node(lanes.m[..., 0], _by_halves(lanes.s), sum_x, sum_xe)


def _by_halves(x: Tensor) -> Tensor:
    """Returns the sum over the last dimension, a power of two: its halves are added until one number is left."""
    while x.shape[-1] > 1:
        left, right = x.chunk(2, -1)
        x = left + right
    return x[..., 0]


def _steps(x: Tensor, padding: float) -> list[Tensor]:
    """Returns the elements of each step: [32, rows, leaves, lanes], with ``padding`` past the end of a leaf.

    A leaf of fewer elements than lanes x 32 has fewer lanes, a power of two, and shorter steps. The lanes that are left
    out are empty, so that no bit changes.
    """
    packs = -(-x.shape[-1] // PACK)
    lanes = min(LANES, 1 << (packs - 1).bit_length())
    packs_of_step = min(PACKS_OF_STEP, -(-packs // lanes))
    whole = torch.nn.functional.pad(x, (0, -x.shape[-1] % (lanes * PACK * packs_of_step)), value=padding)
    steps = whole.unflatten(-1, (-1, packs_of_step, lanes, PACK)).permute(2, 3, 5, 0, 1, 4)
    return list(steps.reshape(len(steps), packs_of_step * PACK, *x.shape[:2], lanes))


def _rescaled(node: Node, m: Tensor) -> Node:
    """Returns the node with the maximum ``m``, which is not smaller than its own."""
    d = _below(node.m, m)
    factor = exp(d)
    sum_xe = None if node.sum_xe is None else fma(node.s, d, node.sum_xe) * factor
    return Node(m, node.s * factor, None, sum_xe)


def _below(x: Tensor, m: Tensor) -> Tensor:
    """Returns x - m, where -inf - -inf is -inf and everything below -88 is -88."""
    return _clamped(torch.where(m == -math.inf, -math.inf, x - m))


def _after_step(node: Node, step: Tensor) -> Node:
    m, s, _, sum_xe, _ = _rescaled(node, torch.maximum(node.m, step.amax(0)))
    differences = _below(step, m)
    for d, e in zip(differences, exp(differences), strict=True):
        s = s + e
        if sum_xe is not None:
            sum_xe = fma(e, d, sum_xe)
    return Node(m, s, None, sum_xe)


def partial(logits: Tensor, target: Tensor, first: int, leaves_of_rank: int, terms: Terms) -> Tensor:
    """Returns a rank's partial of each row: fp32 [rows, ``terms.width``], in the order that ``width`` names.

    The target's x is 0 if another rank has that column, or if it is padding.

    Args:
        logits: [..., columns] of this rank, bf16, fp16 or fp32.
        target: [...], int64, columns of the whole vocabulary.
        first: the column of the vocabulary that is this rank's first.
        leaves_of_rank: 8 / the number of ranks.
    """
    columns = logits.shape[-1]
    logits, target = logits.reshape(-1, columns), target.reshape(-1)
    present = torch.arange(first, first + columns, device=logits.device) < terms.vocab_size
    step = max(1, _CHUNK_NUMEL // max(1, columns))
    partials = [logits.new_empty(0, terms.width, dtype=torch.float32)]
    for rows, targets in zip(logits.split(step), target.split(step), strict=True):
        x = rows.float() * terms.inverse_temperature
        node = tree(leaves(x.unflatten(1, (leaves_of_rank, -1)), present.view(leaves_of_rank, -1), terms))
        is_here = (targets >= first) & (targets < min(first + columns, terms.vocab_size))
        of_target = torch.where(is_here, x.gather(1, torch.where(is_here, targets - first, 0)[:, None])[:, 0], 0.0)
        top1 = None
        if terms.top1:
            largest = torch.where(present, x, -math.inf).argmax(1)
            top1 = torch.where(node.m.isnan(), -1.0, (largest + first).float())
        numbers = node.m, node.s, of_target, node.sum_x, node.sum_xe, top1
        partials.append(torch.stack([number for number in numbers if number is not None], 1))
    return with_canonical_nan(torch.cat(partials))


def node_of(partials: Tensor, terms: Terms) -> Node:
    """Returns the node of partials [..., width]."""
    m, s, _, *others = partials.unbind(-1)
    asked_for = terms.label_smoothing != 0, terms.entropy, terms.top1
    return Node(m, s, *[others.pop(0) if asked else None for asked in asked_for])


def finish(partials: Tensor, target: Tensor, columns: int, terms: Terms) -> tuple[Tensor, ...]:
    """Returns the results of all rows: (result, state), then the entropy and top1 if ``terms`` asks for them.

    Logarithms and what follows them are computed in fp64, and each result is rounded once to fp32:

        lse = m + log s        log_prob = (x of the target - m) - log s        entropy = log s - sum_xe / s
        loss = (1 - label_smoothing) x -log_prob
               - label_smoothing x (sum_x / vocab_size - lse) + lse_square_scale x (lse x lse)

    Ignored rows have the loss 0. A row whose target is no column of the vocabulary, and that is not ignored, has NaN.
    The losses of rows are added by :func:`tree_sum`. The mean divides their sum by the number of rows that are not
    ignored.

    Args:
        partials: [ranks, rows, width], in rank order.
        target: [...], int64: a column for each row.
        columns: of each rank.

    Returns:
        result: fp32 [rows], or [] for a mean or a sum. state: fp32 [2 rows + 1]: m and s of each row, and the number of
        rows that are not ignored. entropy: fp32 [rows]. top1: int64 [rows].
    """
    rows, target = target.numel(), target.reshape(-1)
    node = tree(node_of(partials.movedim(0, 1), terms))
    valid, ignored = _valid_and_ignored(target, terms)
    owner = torch.where(valid, target // columns, 0)
    x = partials[owner, torch.arange(rows, device=target.device), 2].double()
    m, log_s = node.m.double(), log(node.s)
    log_prob = torch.where(valid, (x - m) - log_s, torch.nan)
    if terms.is_loss:
        result = _loss(log_prob, m + log_s, node, terms)
        result = torch.where(ignored, 0.0, torch.where(valid, result, torch.nan)).float()
    else:
        result = log_prob.float()
    count = (~ignored).sum().float()
    if terms.result in ("sum", "mean"):
        result = tree_sum(result)
        result = result / count if terms.result == "mean" else result
    results = [result, torch.cat([torch.stack([node.m, node.s], 1).view(-1), count[None]])]
    if node.sum_xe is not None:
        results.append((log_s - node.sum_xe.double() / node.s.double()).float())
    if node.top1 is not None:
        results.append(node.top1.long())
    return tuple(map(with_canonical_nan, results))


def _valid_and_ignored(target: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    valid = (target >= 0) & (target < terms.vocab_size)
    ignored = torch.zeros_like(valid) if terms.ignore_index is None else target == terms.ignore_index
    return valid & ~ignored, ignored


def _loss(log_prob: Tensor, lse: Tensor, node: Node, terms: Terms) -> Tensor:
    loss = (1 - terms.label_smoothing) * -log_prob
    if node.sum_x is not None:
        loss = loss - terms.label_smoothing * (node.sum_x.double() / terms.vocab_size - lse)
    if terms.lse_square_scale:
        loss = loss + terms.lse_square_scale * (lse * lse)
    return loss


def gradient(
    logits: Tensor, target: Tensor, state: Tensor, upstream: Tensor, first: int, terms: Terms, out: Tensor
) -> None:
    """Writes the gradient of a rank's logits into ``out``, which may be ``logits``.

    g is the gradient of a row: ``upstream``, divided by the number of rows that are not ignored for a mean, and negated
    for log-probabilities. Constants are rounded to fp32. Each operation is rounded to fp32, and the sum to the dtype:

        factor = 1 + 2 lse_square_scale x lse, in fp64, rounded once to fp32
        gradient = ( exp(x - m) x (g x factor / s)
                     - g x (label_smoothing / vocab_size)
                     - g x (1 - label_smoothing), at the target ) x (1 / temperature)

    The gradient of padding and of ignored rows is +0.

    Args:
        logits, target, first: as :func:`partial` takes them.
        state: as :func:`finish` returns it.
        upstream: fp32, [rows] for a result [rows], otherwise one element.
        out: like ``logits``, which are contiguous.
    """
    columns, rows = logits.shape[-1], target.numel()
    logits, target, out = logits.view(rows, columns), target.reshape(-1), out.view(rows, columns)
    present = torch.arange(first, first + columns, device=logits.device) < terms.vocab_size
    m, s = state[:-1].view(-1, 2).unbind(1)
    valid, ignored = _valid_and_ignored(target, terms)
    g = upstream.reshape(-1).expand(rows)
    g = g / state[-1] if terms.result == "mean" else g if terms.is_loss else -g
    g = torch.where(valid, g, torch.nan)
    scale = g
    if terms.lse_square_scale:
        lse = m.double() + log(s)
        scale = g * (1 + 2 * terms.lse_square_scale * lse).float()
    scale = scale / s
    step = max(1, _CHUNK_NUMEL // max(1, columns))
    for start in range(0, rows, step):
        window = slice(start, start + step)
        x, of_row = logits[window].float() * terms.inverse_temperature, g[window, None]
        gradients = exp(x - m[window, None]) * scale[window, None]
        if terms.label_smoothing:
            gradients = gradients - of_row * fp32(terms.label_smoothing / terms.vocab_size)
        is_target = torch.arange(first, first + columns, device=logits.device) == target[window, None]
        gradients = torch.where(is_target, gradients - of_row * fp32(1 - terms.label_smoothing), gradients)
        gradients = gradients * terms.inverse_temperature
        gradients = torch.where(present & ~ignored[window, None], gradients, 0.0)
        out[window] = with_canonical_nan(gradients.to(out.dtype))
