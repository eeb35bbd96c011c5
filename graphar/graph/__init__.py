"""graphar in compiled graphs: an Inductor pass that puts graphar's ops in the place of torch's collectives.

    passes.py       CompilePass: runs the rewrites over a graph, keeps the report, gives Inductor's cache its key
    hook.py         in and out of Inductor's configuration, beside the passes of others
    places.py       which groups graphar serves, as far as that can be told without a call
    collectives.py  what a collective looks like in a graph, and how it is replaced
    norm.py  epilogue.py  allreduce.py  reducescatter.py  allgather.py  matmul.py  prefetch.py    one rewrite each
    order.py        keeps collectives in their order
    report.py       what was rewritten, and what was not, and why

To add a rewrite: a module with ``find``, ``why_not`` and ``replace`` as in allreduce.py, and its name in
``passes.REWRITES``, which are tried in their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphar.graph.passes import CompilePass

# What imports Inductor is imported when it is needed: that takes torch a second.


def compile_pass(*, on: Iterable[str] = (), off: Iterable[str] = ()) -> CompilePass:
    """An Inductor pass that rewrites torch's collectives to graphar's: for ``post_grad_custom_pre_pass``.

    :func:`enable` also puts it there. ``_c10d_functional.all_reduce``, ``reduce_scatter_tensor`` and
    ``all_gather_into_tensor``, and their coalesced forms, become ``graphar::allreduce``, ``reducescatter`` and
    ``allgather``: what ``dist.all_reduce`` and its like, functional collectives and DTensor are in a compiled graph,
    forward and backward. Sums then have the bits of :func:`graphar.allreduce`. All else stays, and the pass's
    ``report`` says why: other reductions than sums, groups that graphar's kernels do not reach, dtypes they do not add.
    An all-reduce whose sum goes into a residual and then an RMSNorm, ``torch.nn.RMSNorm`` or one that is written as
    Llama's or Gemma's, becomes ``graphar::allreduce_residual_rmsnorm``. It gives the bits of
    :func:`graphar.allreduce_residual_rmsnorm`: normed in fp32 and rounded once, where a model may round twice. Residual
    and weight must be the same on every rank, for a rank norms rows for others, and so must what is done with the sum,
    for which op it becomes depends on that: as in tensor-parallel models. Elsewhere, ``off=["norm"]``. A norm whose
    inner values are needed further, as by a backward pass, stays. A matmul of bf16 or fp16 before a sum, whose result
    goes nowhere else, becomes part of the op where that was measured to be faster, or if the number of rows varies:
    ``graphar::fused_matmul_allreduce``, or with ``_residual_rmsnorm``, or ``fused_matmul_reducescatter``, whose product
    may have other bits than torch's.
    An all-reduce of its own whose sum goes on into a matmul, and has at most 2 MB or a size that varies, is given that
    one's weight, an input of the graph, as ``prefetch``: a hint, which changes no result.

    With ``on=["epilogue"]``, pointwise operations that follow a sum, of it and of numbers alone, such as an activation
    or a scale, become part of the all-reduce or reduce-scatter (graphar.Epilogue). They are then done to the fp32 sum,
    and that is rounded once, where a graph rounds the sum first: this gives other bits, closer to the exact ones.

    Called with the graph of an exported program, ``compile_pass()(program.graph)``, it rewrites that.

    graphar's ops run where the collective stood, on torch's current stream. Where a schedule overlaps collectives with
    what follows them, as FSDP does its all-gathers, leave those to torch: ``off=["allgather", "reducescatter"]``. The
    deadline of a wait is graphar's, 60 s, also in the first call, for a rank that takes longer to compile.

    Of a norm, a softmax or another reduction Inductor may time several kernels, on each rank; ranks that take different
    ones add up in different orders, and what should be alike on all ranks differs in its last bits. With
    ``torch._inductor.config.deterministic = True``, or ``torch.compile(..., options={"deterministic": True})``, there
    is one kernel for each, the same on all ranks.

    Collective: every rank of the default group calls it, after ``init_process_group`` and, on GPUs,
    ``torch.cuda.set_device``, with the same arguments.

    Args:
        on: rewrites to try that are not otherwise: "epilogue".
        off: rewrites to leave out, of "norm", "epilogue", "allreduce", "reducescatter", "allgather", "matmul" and
            "prefetch".

    Raises:
        ValueError: torch.distributed is not initialised, or there is no rewrite of that name.
        CommunicatorError: a rank did not come within 60 s.
    """
    from graphar.graph.passes import CompilePass

    return CompilePass(off, on)


def enable(*, on: Iterable[str] = (), off: Iterable[str] = ()) -> CompilePass:
    """Has torch.compile put graphar's ops in the place of torch's collectives, in models as they are.

    Call it before the compiled model's first call, and from torch 2.12 on in the thread that makes it: Inductor's
    configuration is a thread's own. Graphs that were compiled before stay as they were. Until :func:`disable`, or the
    end of a ``with`` block. Passes of others that are in Inductor's configuration stay, and run
    first. Collective, with arguments, errors and effects as :func:`compile_pass` says.

    Returns:
        The pass, whose ``report`` lists what became of the collectives of each graph.
    """
    from graphar.graph import hook

    made = compile_pass(on=on, off=off)
    hook.install(made)
    return made


def disable() -> None:
    """Ends what :func:`enable` began. What was compiled meanwhile stays as it is."""
    from graphar.graph import hook

    hook.remove_all()
