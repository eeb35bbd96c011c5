"""The binder of losses over a divided vocabulary: each rank's partials, their all-gather, and the results of all rows.

One rank's partials become results in the same kernel. The backward pass needs no other rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from graphar.numerics import softmax
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.softmax import LANES, Terms
from graphar.plan.call import Call, Operands
from graphar.plan.config import FALLBACK
from graphar.plan.scratch import PACK_NBYTES, WARP
from graphar.plan.work import Loss
from graphar.runtime import catalogue, launcher
from graphar.runtime.arguments import LossArguments
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.engine import Engine
from graphar.runtime.launcher import Launch, OwnLaunches, early_grid, runs_on
from graphar.runtime.plan import Plan, Tensors

# As in cuda_src/loss: the bytes of shared memory before the lanes of leaves, the numbers of a lane, and the threads of
# blocks.
MERGED_NBYTES = LEAVES * 5 * 4
PLANES = {"nothing": 2, "sum_of_logits": 3, "entropy_and_top1": 4}
RESULTS_THREADS, SUM_THREADS, BACKWARD_THREADS, ROWS_OF_WARP = 128, 1024, 256, 128
# Where rows are few, slices of rows make grids of the gradient of up to so many blocks for each SM, and clusters that
# share rows make grids of one for each SM, but pairs of blocks of so many (H200).
SLICED_BLOCKS, PAIRED_BLOCKS = 8, 4
# What partials may have beside the maximum and the sum, and whether their logits are scaled.
FORMS = ("nothing", False), ("nothing", True), ("sum_of_logits", False), ("entropy_and_top1", True)


def also(terms: Terms) -> str:
    """Returns what the kernels compute beside the maximum and the sum: a name of Also in device/softmax.cuh."""
    if terms.entropy or terms.top1:
        return "entropy_and_top1"
    return "sum_of_logits" if terms.label_smoothing else "nothing"


def shared_nbytes(kind: str, leaves: int) -> int:
    """Returns the shared memory of a block of softmax_partials that has so many leaves."""
    return MERGED_NBYTES + leaves * PLANES[kind] * LANES * 4


def room_for_sums(rows: int) -> int:
    """Returns how many numbers the losses of ``rows`` and the sums of softmax_results_total take."""
    sums = -(-rows // ROWS_OF_WARP)
    return rows + (room_for_sums(sums) if sums > 1 else sums)


def arguments(work: Loss, first: int, ranks: int, cluster: int = 1, slices: int = 1) -> LossArguments:
    """Returns the kernels' arguments without addresses, for the rank whose first column is ``first``."""
    terms = work.terms
    return LossArguments(
        rows=work.rows,
        columns=work.columns,
        first=first,
        vocab_size=terms.vocab_size,
        ignore_index=terms.ignore_index or 0,
        label_smoothing=terms.label_smoothing,
        lse_square_scale=terms.lse_square_scale,
        inverse_temperature=terms.inverse_temperature,
        all_share=terms.label_smoothing / terms.vocab_size,
        target_share=1 - terms.label_smoothing,
        real_columns=min(work.columns, max(0, terms.vocab_size - first)),
        leaf_columns=work.columns * ranks // LEAVES,
        leaves_log2=(LEAVES // ranks).bit_length() - 1,
        ranks=ranks,
        cluster_log2=cluster.bit_length() - 1,
        slices=slices,
        width=terms.width,
        may_ignore=terms.ignore_index is not None,
        is_loss=terms.is_loss,
        is_mean=terms.result == "mean",
        is_per_row=terms.result not in ("mean", "sum"),
        with_entropy=terms.entropy,
        with_top1=terms.top1,
    )


def _serves(x: torch.Tensor) -> bool:
    return x.is_cuda and x.numel() > 0 and x.dtype in TYPE_NAMES and runs_on(x.device.index)


def sources(device: int, dtypes: Sequence[torch.dtype]) -> list[KernelSource]:
    """Returns the kernels of losses, log-probabilities and their gradients on a GPU."""
    spreads = (False, True) if launcher.chip(device).has_clusters else (False,)
    kinds = itertools.product(FORMS, spreads, dtypes)
    partials = [catalogue.softmax_partials_source(dtype, *form, spread) for form, spread, dtype in kinds]
    results = [*map(catalogue.softmax_results_source, PLANES), catalogue.softmax_total_source(SUM_THREADS)]
    return [*partials, *results, *map(catalogue.softmax_backward_source, dtypes)]


# Takes a rank's operands, partials to write or None, and all ranks' partials to read or None. Without partials it
# computes the results of the only rank.
Compute = Callable[[Operands, torch.Tensor | None, torch.Tensor | None], None]


def bind(engine: Engine, call: Call[Loss], ranks: Sequence[Operands]) -> Plan:
    """Collective, unless there is one rank."""
    work, count = call.work, engine.world_size
    own_ranks = [engine.rank or 0] if engine.devices is None else range(count)
    computes = [
        of_rank(operands.inputs[0], work, work.columns * rank, count)
        for rank, operands in zip(own_ranks, ranks, strict=True)
    ]
    gather = None
    if count > 1:
        gathered_work = work.exchanged._replace(parts=work.exchanged.parts * count)
        like = [_room(work, operands, count) for operands in ranks]
        gather = engine.plan(Call(gathered_work, torch.float32, call.device, timeout_s=call.timeout_s), like)

    def run(ranks: Sequence[Operands]) -> None:
        gathered: list[torch.Tensor | None] = [None]
        if gather:
            gathers = [_room(work, operands, count) for operands in ranks]
            for compute, operands, to_gather in zip(computes, ranks, gathers, strict=True):
                compute(operands, to_gather.inputs[0], None)
            gather.run(gathers)
            gathered = [to_gather.outputs[0] for to_gather in gathers]
        for compute, operands, whole in zip(computes, ranks, gathered, strict=True):
            compute(operands, None, whole)

    def launch(inputs: Tensors, outputs: Tensors, numbers=(), corner=None) -> None:
        run([Operands(inputs, outputs)])

    config, reason = (gather.config, gather.reason) if gather else (FALLBACK, "one rank sends nothing")
    return Plan(run, config, reason, lambda operands: launch)


def _room(work: Loss, operands: Operands, ranks: int) -> Operands:
    """Returns tensors for one rank's partials, and for all ranks' partials."""
    partials = operands.inputs[0].new_empty((work.rows, work.terms.width), dtype=torch.float32)
    return Operands((partials,), (partials.new_empty(ranks, *partials.shape),))


def of_rank(x: torch.Tensor, work: Loss, first: int, ranks: int) -> Compute:
    if not _serves(x):
        return _in_torch(work, first, ranks)
    device, dtype = x.device.index, x.dtype
    load(catalogue.softmax_backward_source(dtype), device)  # now, since loading could hang later
    return _bind_forward(device, dtype, work, first, ranks)


def _in_torch(work: Loss, first: int, ranks: int) -> Compute:
    def compute(operands: Operands, written: torch.Tensor | None, gathered: torch.Tensor | None) -> None:
        logits, target = operands.inputs
        if gathered is None:
            partials = softmax.partial(logits, target, first, LEAVES // ranks, work.terms)
            if written is not None:
                written.copy_(partials)
                return
            gathered = partials[None]
        finished = softmax.finish(gathered, target, work.columns, work.terms)
        for out, result in zip(operands.outputs, finished, strict=True):
            out.copy_(result.view_as(out))

    return compute


@functools.lru_cache(maxsize=1024)
def _bind_forward(device: int, dtype: torch.dtype, work: Loss, first: int, ranks: int) -> Compute:
    terms, kind = work.terms, also(work.terms)
    groups = -(-work.rows * (LEAVES // ranks) // LEAVES)
    cluster = _cluster(device, groups)
    fields = arguments(work, first, ranks, cluster)
    scaled = terms.temperature != 1 or kind == "entropy_and_top1"
    shared = shared_nbytes(kind, LEAVES // cluster)

    def bound(source: KernelSource, *grid: int) -> Launch:
        return Launch(load(source, device), [fields], early_grid(device, *grid))

    threads = LEAVES // cluster * (LANES if cluster > 1 else WARP)
    source = catalogue.softmax_partials_source(dtype, kind, scaled, cluster > 1)
    partials = bound(source, groups * cluster, threads, shared, cluster)
    results = bound(catalogue.softmax_results_source(kind), -(-work.rows // RESULTS_THREADS), RESULTS_THREADS)
    total = bound(catalogue.softmax_total_source(SUM_THREADS), 1, SUM_THREADS)
    launches = OwnLaunches(device, fields, [partials, results, total])
    room = 0 if fields.is_per_row else room_for_sums(work.rows)

    def launch(operands: Operands, written: torch.Tensor | None, gathered: torch.Tensor | None) -> None:
        (logits, target), (result, state, *more) = operands.inputs, operands.outputs
        losses = logits.new_empty(room, dtype=torch.float32) if room and written is None else result
        sums = [total] if room and written is None and work.rows > 1 else []  # the only row's loss is the sum
        sides = {"logits": logits, "target": target, "partials": written, "gathered": gathered}
        wanted = {"entropy": more[0], "top1": more[-1]} if more else {}
        kernel = partials if gathered is None else results
        launches.run(kernel, *sums, **sides, results=losses, total=result, state=state, **wanted)

    return launch


def _cluster(device: int, groups: int) -> int:
    """Returns how many blocks share 8 leaves."""
    if not launcher.chip(device).has_clusters:
        return 1
    sms = launcher.sm_count(device)
    fitting = (blocks for blocks in (8, 4, 2) if groups * blocks <= sms * (PAIRED_BLOCKS if blocks == 2 else 1))
    return next(fitting, 1)


def load(source: KernelSource, device: int):
    return launcher.load(source, device, shared_nbytes("entropy_and_top1", LEAVES), source.name)


def backward(
    work: Loss,
    first: int,
    logits: torch.Tensor,
    target: torch.Tensor,
    state: torch.Tensor,
    upstream: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Writes the gradient of one rank's logits into ``out``: see :func:`graphar.numerics.softmax.gradient`."""
    if _serves(logits):
        launches = _bind_backward(logits.device.index, logits.dtype, work, first)
        launches.run(logits=logits, target=target, state=state, upstream=upstream, gradient=out)
    else:
        softmax.gradient(logits, target, state, upstream, first, work.terms, out)


@functools.lru_cache(maxsize=1024)
def _bind_backward(device: int, dtype: torch.dtype, work: Loss, first: int) -> OwnLaunches:
    packs = -(-work.columns * dtype.itemsize // PACK_NBYTES)
    slices = min(-(-SLICED_BLOCKS * launcher.sm_count(device) // work.rows), -(-packs // BACKWARD_THREADS))
    fields = arguments(work, first, 1, slices=slices)
    grid = early_grid(device, work.rows * slices, BACKWARD_THREADS)
    return OwnLaunches(device, fields, [Launch(load(catalogue.softmax_backward_source(dtype), device), [fields], grid)])
