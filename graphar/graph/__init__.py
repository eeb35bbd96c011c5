"""graphar in compiled graphs: an Inductor pass that replaces torch's collectives with graphar's ops.

    passes.py       CompilePass: runs the rewrites over a graph, fills the report, gives Inductor's cache its key;
                    and how it is installed in Inductor's configuration, which may hold passes of others
    places.py       which process groups graphar serves, found without calling a collective op
    collectives.py  what a collective looks like in a graph, the rewrites "allreduce", "reducescatter" and "allgather",
                    and how collectives stay in order, also in graphs of programs that do not call enable()
    norm.py  epilogue.py    one rewrite each
    products.py     the matmuls of a graph, their scales, and weights as layers store them
    matmul.py  allgather_matmul.py    the rewrite "matmul": a matmul and its sum, an all-gather and its matmul
    tp_invariance.py    with tp_invariant=True: the other matmuls, and what may still change bits
    rows.py         ops that move whole rows between a collective and a matmul
    report.py       which collectives were rewritten, and why the others were not

To add a rewrite, write a subclass of Collective with ``check`` and ``replace``, and a function that finds it in a
graph, as norm.py has them, and add that to ``passes.REWRITES``. Rewrites run in the order of that dict.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch._guards import TracingContext

from graphar.ops import register

if TYPE_CHECKING:
    from graphar.graph.passes import CompilePass

# Modules that import Inductor are imported in the functions below: importing Inductor takes a second.


def compile_pass(
    *,
    on: Iterable[str] = (),
    off: Iterable[str] = (),
    batch_invariant: bool = False,
    constant_weights: bool = False,
    tp_invariant: bool = False,
) -> CompilePass:
    """Returns an Inductor pass that replaces torch's collectives with graphar's ops: ``post_grad_custom_pre_pass``.

    Use it where you set Inductor's configuration yourself; :func:`enable` sets it for you. The pass rewrites forward
    and backward graphs, in which ``dist.all_reduce``, functional collectives and DTensor are ``_c10d_functional`` ops.
    ``compile_pass()(program.graph)`` rewrites an exported program. The rewrites, in the order of their attempts:

    - "norm": an all-reduce, the addition of a residual and an RMSNorm become ``graphar::allreduce_residual_rmsnorm``.
      With a reduce-scatter they become ``graphar::reducescatter_residual_rmsnorm``. The norm is ``torch.nn.RMSNorm``,
      or is written as in Llama or Gemma. graphar computes it in fp32 and rounds once, where a model may round twice.
      With an all-reduce the residual, the weight and the uses of the sum must be the same on every rank, as in
      tensor-parallel models; otherwise pass ``off=["norm"]``. A norm whose intermediate values have other uses, such as
      a backward pass, stays.
    - "epilogue", off by default: pointwise operations on a sum and on numbers, such as an activation or a scale, become
      the epilogue (graphar.Epilogue) of the all-reduce or reduce-scatter. They apply to the fp32 sum, which is rounded
      once. The graph rounds the sum first, so the bits differ; with the epilogue they are closer to the exact result.
    - "allreduce", "reducescatter", "allgather": ``all_reduce``, ``reduce_scatter_tensor`` and
      ``all_gather_into_tensor``, also coalesced, become graphar's ops. Sums have the bits of :func:`graphar.allreduce`.
    - "matmul": a matmul of bf16 or fp16, or torch's scaled product of e4m3, and the sum that is the only use of its
      result, become ``graphar::fused_matmul_allreduce``, ``fused_matmul_reducescatter``, or one of these with
      ``_residual_rmsnorm``. An all-gather and a matmul of its rows become ``graphar::fused_allgather_matmul``. Of
      several matmuls it is the one of the largest weight, and the others take the gathered rows from the op. Both
      happen if the tuning table says that this is faster. A number of rows that varies counts as many, and the op
      decides again at each call. The product may have other bits than torch's.

    Other collectives stay, and the pass's ``report`` says why: the reduction is not a sum, graphar's kernels do not
    reach the group, or they do not add the dtype.

    graphar's ops run in place of the collective, on torch's current stream. A schedule that overlaps collectives with
    later work, as FSDP does, needs torch's: ``off=["allgather", "reducescatter"]``. A wait on another rank ends with an
    error after 60 s. This includes the first call, in which a rank may take longer to compile than its peers.

    On each rank Inductor may time several kernels for a norm, a softmax or another reduction. Ranks that choose
    different kernels add in different orders, and results that should be equal on all ranks differ in their last bits.
    ``torch._inductor.config.deterministic = True``, or ``torch.compile(..., options={"deterministic": True})``, makes
    all ranks take the same kernel. Collective, like :func:`enable`, which describes the arguments further.

    Args:
        on: optional rewrites to switch on: "epilogue", with ``tp_invariant=True`` also "norm".
        off: rewrites to switch off, by the names above.
        batch_invariant: as in :func:`enable`.
        constant_weights: as in :func:`enable`.
        tp_invariant: as in :func:`enable`.

    Raises:
        ValueError, CommunicatorError: as in :func:`enable`.
    """
    from graphar.graph.passes import CompilePass

    return CompilePass(off, on, batch_invariant, constant_weights, tp_invariant)


def enable(
    *,
    on: Iterable[str] = (),
    off: Iterable[str] = (),
    batch_invariant: bool = False,
    constant_weights: bool = False,
    tp_invariant: bool = False,
) -> CompilePass:
    """Makes torch.compile replace torch's collectives with graphar's ops; models need no change.

    It installs the pass of :func:`compile_pass`, which describes each rewrite, in Inductor's configuration. Other
    passes in the configuration stay, and run first. Call it before the first call of the compiled model. From torch
    2.12 on, call it in the thread that makes that first call: each thread has its own Inductor configuration. Graphs
    that were compiled earlier stay as they are. The pass stays installed until :func:`disable`, or until the end of a
    ``with`` block.

    Collective: every rank of the default group calls it with the same arguments, after ``init_process_group`` and, on
    GPUs, ``torch.cuda.set_device``.

    Args:
        on: optional rewrites to switch on: "epilogue", with ``tp_invariant=True`` also "norm".
        off: rewrites to switch off: "norm", "epilogue", "allreduce", "reducescatter", "allgather" or
            "matmul".
        batch_invariant: fuse matmuls and their sums with ``partition="batch_invariant"``, at every size that graphar's
            matmul takes: the bits of a row then do not depend on the number of rows. Other matmuls stay torch's, also
            those of gathered rows.
        constant_weights: in graphs without gradients, let skinny matmuls that were fused with an all-reduce load their
            weight early, if it is a tensor of a module, such as a parameter, and the graph only reads it. True
            promises that whatever wrote these weights has ended when the model is called, or a CUDA graph with it is
            replayed. So it is for inference with weights that stay in place. Not for FSDP, which gathers weights just
            before a layer, nor for weights that are updated, loaded, cast or copied between layers: results would be
            undefined.
        tp_invariant: give results and gradients the same bits on 1, 2, 4 and 8 ranks, as layers of ``graphar.nn`` with
            ``tp_invariant=True`` have. At every size, matmuls and their sums, and gathered rows and their matmuls, are
            fused with ``partition="tp_invariant"``; a bias that is added to a sum is added before the sum is rounded.
            Other matmuls become :func:`linear`, and gradients of biases sums of 8 leaves. Whatever may still change
            bits stays as it is: the report's ``breaks`` names it, and its ``is_tp_invariant`` is False. "norm" is off,
            since graphs of one rank and of training have no fused norm. A graph of one rank has no sums and does not
            tell row-parallel layers: there, call ``graphar.nn.make_tp_invariant(model, plan)`` before torch.compile.

    Returns:
        The pass. Its ``report`` lists, for each graph, which collectives were replaced, and why the others were not.

    Raises:
        ValueError: torch.distributed is not initialised, there is no rewrite of that name, or ``tp_invariant=True``
            goes with ``batch_invariant=True`` or ``off`` of a rewrite that it needs.
        CommunicatorError: a rank did not arrive within 60 s.
    """
    from graphar.graph import passes

    made = passes.CompilePass(off, on, batch_invariant, constant_weights, tp_invariant)
    passes.install(made)
    return made


def disable() -> None:
    """Removes every pass of graphar's from Inductor's configuration, which ends :func:`enable`.

    Graphs that were compiled meanwhile keep graphar's ops.
    """
    from graphar.graph import passes

    passes.remove_all()


def _keep_order() -> None:
    """Has Inductor keep the order of graphar's ops in the graph that torch is tracing."""
    if TracingContext.try_get() and "torch._inductor.config" in sys.modules:
        from graphar.graph import passes

        passes.keep_order()


register.when_traced.append(_keep_order)
