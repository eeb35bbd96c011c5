"""Losses and log-probabilities over a vocabulary that ranks divide: graphar.cross_entropy and graphar.log_probs."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch

from graphar.numerics import leaf_tree
from graphar.numerics.softmax import Terms
from graphar.ops import options
from graphar.ops.options import Arguments, T
from graphar.ops.register import Op, define
from graphar.ops.repeats import repeated
from graphar.plan.call import Call
from graphar.plan.work import Loss
from graphar.runtime.bind import loss
from graphar.runtime.checks import call_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import ALONE, Group, engine_name, engine_of_group

NAME, LOG_PROBS = "cross_entropy", "log_probs"
REDUCTIONS = ("mean", "sum", "none")


class LogProbs(NamedTuple):
    """What :func:`graphar.log_probs` returns with ``entropy`` or ``top1``: tensors, or lists with one per device."""

    log_probs: Any  # fp32
    entropy: Any  # fp32; None: not asked for
    top1: Any  # int64; None: not asked for


def cross_entropy(
    logits: T,
    target: T,
    group: Group | Literal["alone"] = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
    timeout_s: float | None = None,
) -> T:
    """Returns the cross-entropy loss of logits whose columns, the vocabulary, are divided between ranks.

    Loss and gradients have the same bits on 1, 2, 4 and 8 ranks, and a row's for every number of rows.
    ``graphar.reference.cross_entropy`` is the specification. A process without a group is the only rank.

    Logits are read once, in fp32 inside, and ranks exchange three or four numbers a row. The backward pass reads them
    once more, and does not communicate: it takes this rank's gradient of the loss, which is the same on all ranks.

    Args:
        logits: [..., V / N], bf16, fp16 or fp32, where V is a multiple of 8: this rank's columns of the vocabulary, or
            a list with one tensor for each device of this process; or a DTensor, replicated or with Shard(-1).
        target: [...], int64: columns of the whole vocabulary, equal on all ranks. For a list a list, one per device. A
            row whose target is no column and not ``ignore_index`` has the loss and gradients NaN.
        group: a process group, 1-D DeviceMesh or Communicator of 1, 2, 4 or 8 ranks. None: the default group; for a
            list, of its devices; for a DTensor, its mesh. "alone": this rank has the whole vocabulary.
        ignore_index: the target of rows that do not count: their loss and their gradient are 0.
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
        label_smoothing: the share of the loss, from 0 to 1, that is the mean over all columns.
        lse_square_scale: the factor of the z-loss, the square of each row's logarithm of its sum of exponentials.
        vocab_size: how many columns of all ranks are no padding. Later columns are ignored. None: all count.
        overwrite_logits: the backward pass writes the gradient into the memory of contiguous logits. torch raises an
            error if another backward pass needs them. Not in compiled code.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        fp32: [] for a mean or a sum, otherwise [...]. For a list a list, one per device.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    numbers = ignore_index, label_smoothing, lse_square_scale, vocab_size, overwrite_logits, timeout_s
    how = reduction, *numbers, *map(type, numbers)  # a call of `repeats.typed` takes longer
    if (results := repeated(NAME, group, (logits, target), how)) is not None:  # type: ignore[arg-type]
        return results[0]
    if reduction not in REDUCTIONS:
        raise ValueError(f"{NAME}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0 <= (smoothing := options.check_number(NAME, "label_smoothing", label_smoothing)) <= 1:
        raise ValueError(f"{NAME}: label_smoothing must be from 0 to 1, got {label_smoothing!r}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"{NAME}: ignore_index must be an int, got {ignore_index!r}")
    z_loss = options.check_number(NAME, "lse_square_scale", lse_square_scale)
    terms = Terms(_real_columns(NAME, vocab_size), reduction, ignore_index, smoothing, z_loss)
    return _call(NAME, (logits, target), how, group, terms, timeout_s, bool(overwrite_logits))[0]


@overload
def log_probs(
    logits: T,
    tokens: T,
    group: Group | Literal["alone"] = None,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    entropy: Literal[False] = False,
    top1: Literal[False] = False,
    timeout_s: float | None = None,
) -> T: ...
@overload
def log_probs(
    logits: T,
    tokens: T,
    group: Group | Literal["alone"] = None,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    entropy: bool = False,
    top1: bool = False,
    timeout_s: float | None = None,
) -> T | LogProbs: ...
def log_probs(
    logits, tokens, group=None, *, temperature=1.0, vocab_size=None, entropy=False, top1=False, timeout_s=None
):
    """Returns the log-probabilities of tokens, by logits whose columns, the vocabulary, are divided between ranks.

    They have the same bits on 1, 2, 4 and 8 ranks, and for every number of rows; so have the gradients of the logits,
    the entropies and the columns. ``graphar.reference.log_probs`` is the specification. A process without a group is
    the only rank. What is computed, read and exchanged is as for :func:`cross_entropy`.

    Args:
        logits: [..., V / N], bf16, fp16 or fp32, where V is a multiple of 8: this rank's columns of the vocabulary, or
            a list with one tensor for each device of this process; or a DTensor, replicated or with Shard(-1).
        tokens: [...], int64: columns of the whole vocabulary, equal on all ranks; others give NaN. For a list a list.
        group: a process group, 1-D DeviceMesh or Communicator of 1, 2, 4 or 8 ranks. None: the default group; for a
            list, of its devices; for a DTensor, its mesh. "alone": this rank has the whole vocabulary.
        temperature: logits are multiplied by 1 / temperature, in fp32.
        vocab_size: how many columns of all ranks are no padding. Later columns are ignored. None: all count.
        entropy: also returns the entropy of each row, without gradients.
        top1: also returns the column of each row's largest logit, the first of equals; -1 if a logit is NaN. At most
            2^24 columns then count.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        fp32 [...]; for a list a list, one per device. With ``entropy`` or ``top1`` a tuple of the fields ``log_probs``,
        ``entropy``, fp32 [...] or None, and ``top1``, int64 [...] or None.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    numbers = temperature, vocab_size, entropy, top1, timeout_s
    how = LOG_PROBS, *numbers, *map(type, numbers)
    if (results := repeated(NAME, group, (logits, tokens), how)) is None:
        if options.check_number(LOG_PROBS, "temperature", temperature) <= 0:
            raise ValueError(f"{LOG_PROBS}: temperature must be positive, got {temperature!r}")
        asked = {"temperature": float(temperature), "entropy": bool(entropy), "top1": bool(top1)}
        terms = Terms(_real_columns(LOG_PROBS, vocab_size), LOG_PROBS, **asked)
        results = _call(LOG_PROBS, (logits, tokens), how, group, terms, timeout_s)
    if not (entropy or top1):
        return results[0]
    return LogProbs(results[0], _detached(results[2]) if entropy else None, results[-1] if top1 else None)


def _detached(x: Any) -> Any:
    return [of_rank.detach() for of_rank in x] if isinstance(x, list) else x.detach()


def _call(op: str, tensors: tuple, how: tuple, group: Any, terms: Terms, timeout_s, overwrite: bool = False) -> tuple:
    """Makes a call, and returns its results as users get them, the state included."""
    call_checks.check_call(op, "auto", timeout_s)
    (logits, target), communicator = tensors, None
    if hasattr(logits, "device_mesh"):  # importing DTensor is slow
        logits, communicator = _of_rank(op, logits, group)
    if hasattr(target, "device_mesh"):
        target = target.full_tensor()
    options.check_input(op, logits, "logits")
    for x, of_rows in options.by_rank(op, logits=logits, target=target):
        options.check_rows(op, "logits", x)
        options.check_beside(op, "target", of_rows, x.shape[:-1], x, torch.int64)
    if communicator is None:
        alone = not isinstance(logits, (list, tuple))
        communicator = ALONE if group == ALONE else engine_name(group, op, alone=alone)
    named = {"communicator": communicator, "timeout_s": timeout_s, "overwrite": overwrite, **terms._asdict()}
    return OP(logits, target, asked=(tensors, how, None), **named)


def _real_columns(op: str, vocab_size: int | None) -> int:
    """Returns how many columns of all ranks are no padding; 0: all."""
    if vocab_size is not None and (type(vocab_size) is bool or vocab_size < 1):
        raise ValueError(f"{op}: vocab_size must be positive, got {vocab_size!r}")
    return vocab_size or 0


def _of_rank(op: str, logits: Any, group: Group) -> tuple[torch.Tensor, str]:
    """Returns this rank's columns of a DTensor, and the name of the ranks that divide them."""
    placements, mesh = logits.placements, logits.device_mesh
    if len(placements) == 1 and group is None:
        (placement,), ranks = placements, mesh.size()
        if placement.is_replicate():
            return logits.to_local(), ALONE
        if placement.is_shard(logits.ndim - 1) and logits.shape[-1] % ranks == 0:
            return logits.to_local(), engine_name(mesh, op)
    raise ValueError(
        f"{op}: a DTensor of logits must be replicated, or evenly sharded by columns over a mesh of one dimension, "
        f"without group=, got {list(logits.shape)} with {placements}"
    )


def _work(logits: torch.Tensor, terms: Terms) -> Loss:
    return Loss(NAME if terms.is_loss else LOG_PROBS, logits.shape[:-1].numel(), logits.shape[-1], terms)


def _of_rank_backward(call: tuple, overwrites: bool) -> torch.Tensor:
    logits = call[0]
    is_eager = type(logits) in (torch.Tensor, torch.nn.Parameter)
    if not (overwrites and is_eager and logits.is_contiguous()) or torch.is_grad_enabled():
        return torch.ops.graphar.cross_entropy_backward(*call)
    gradient = _gradient(*call, out=logits.detach())
    torch.autograd.graph.increment_version(logits)
    return gradient


def _gradient(logits, target, state, gradient, first: int, communicator: str, vocab_size, *terms, out=None):
    x, columns = logits.contiguous(), logits.shape[-1]
    if first < 0:
        engine = engine_of_group(communicator, NAME)
        first, vocab_size = columns * (engine.rank or 0), vocab_size or columns * engine.world_size
    out = torch.empty_like(x) if out is None else out
    work = _work(x, Terms(vocab_size, *terms))
    loss.backward(work, first, x, target.contiguous(), state, gradient.contiguous(), out)
    return out


def _refuse(ctx, gradient):
    raise NotImplementedError(f"{NAME}: it has no second derivatives")


# ``first`` is the first column of these logits in a call with lists; else -1, and the communicator's rank decides.
define(
    "cross_entropy_backward(Tensor logits, Tensor target, Tensor state, Tensor gradient, int first, str communicator, "
    "int vocab_size, str result, int? ignore_index, float label_smoothing, float lse_square_scale, float temperature) "
    "-> Tensor",
    _gradient,
    lambda logits, *_: logits.new_empty(logits.shape),
    _refuse,
)


class _Losses(Op):
    tensors = ("logits", "target")
    has_several = True
    saved_result = 1

    def fake(self, logits, targets, arguments: Arguments) -> list[tuple[torch.Tensor, ...]]:
        outs = []
        for target in targets:
            shape, fp32 = target.shape, partial(target.new_empty, dtype=torch.float32)
            results = [fp32(() if arguments.result in ("mean", "sum") else shape), fp32(2 * target.numel() + 1)]
            results += [fp32(shape)] if arguments.entropy else []
            results += [target.new_empty(shape)] if arguments.top1 else []
            outs.append(tuple(results))
        return outs

    def run(self, engine: Engine, logits, targets, outs, arguments: Arguments):
        ranks = options.operands([[x.contiguous() for x in logits], [target.contiguous() for target in targets]], outs)
        x = ranks[0].inputs[0]
        terms = Terms(*[getattr(arguments, name) for name in Terms._fields])
        work = _work(x, terms._replace(vocab_size=terms.vocab_size or x.shape[-1] * engine.world_size))
        return engine.run(Call.of(work, x, timeout_s=arguments.timeout_s), ranks), ranks

    def check(self, engine: Engine, logits, targets, arguments: Arguments) -> None:
        op = LOG_PROBS if arguments.result == LOG_PROBS else NAME
        columns, ranks, size = logits[0].shape[-1], engine.world_size, arguments.vocab_size
        leaf_tree.check_ranks(op, ranks)
        leaf_tree.check_columns(op, columns, ranks)
        if size > columns * ranks:
            raise ValueError(f"{op}: vocab_size must be at most the {columns * ranks} columns, got {size}")
        if arguments.top1 and (size or columns * ranks) > 1 << 24:  # columns travel in fp32
            raise ValueError(f"{op}: top1 takes at most {1 << 24} columns, got {size or columns * ranks}")

    def backward(self, ctx, gradients, saved, _):
        logits, targets, states = saved
        columns, results = logits[0].shape[-1], len(gradients) // ctx.ranks
        how = [getattr(ctx.arguments, name) for name in ("communicator", *Terms._fields[:-2])]
        if ctx.in_list:
            how[1] = how[1] or columns * ctx.ranks  # vocab_size
        ranks, of_logits = zip(logits, targets, states, gradients[::results], strict=True), []
        for rank, (*tensors, gradient) in enumerate(ranks):
            call = *tensors, gradient, columns * rank if ctx.in_list else -1, *how
            of_logits.append(None if gradient is None else _of_rank_backward(call, ctx.arguments.overwrite))
        return of_logits, [None] * ctx.ranks, {}


OP = _Losses(NAME, *Terms._fields, "overwrite")
