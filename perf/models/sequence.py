"""Times prefill and training steps of the decoder's layers with tensor parallelism and with sequence parallelism.

    tensor parallelism    every rank has all rows of the residual
        norm -- column-parallel linear .. row-parallel linear == all-reduce -- add -- norm
    sequence parallelism  every rank has its own rows of the residual
        norm -- all-gather == column-parallel linear .. row-parallel linear == reduce-scatter -- add -- norm

A method has one function for the column-parallel linear layers and one for the row-parallel layers. These functions
also communicate. Everything else is the same code for all methods.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.nn.functional import linear

import graphar
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks, agreed, case_by_case, timed_in_turn
from perf.harness.timing import WARM_UP, capture, spread
from perf.harness.verify import LOGITS_TOLERANCE, again, compare_logits
from perf.md import NOT_SERVED, columns, method_cell, plural, ratio_cell, text_beside
from perf.models import bench
from perf.models import decoder as decoding
from perf.models.bench import BenchPlan, BenchRow, ModelBench, error_cell, whole_columns, worst_of
from perf.ratios import best_peer, ratio
from perf.report import Spread

TRAINING = "training"
COTANGENT = 3  # the seed for the gradient of the output; the other seeds are in perf.models.decoder
REPEATS = 7
# Gradients are rounded about twice as often as logits: in the forward and in the backward pass.
GRADIENT_TOLERANCE = 2 * LOGITS_TOLERANCE


@dataclass(frozen=True)
class SequencePlan(BenchPlan):
    """The sequences to measure. ``tokens`` are their lengths."""

    tokens: Sequence[int]


@dataclass(frozen=True)
class SequenceRow(BenchRow):
    """One method for one sequence. ``wrong`` counts gradients with too large an error, too.

    Attributes:
        phase: PREFILL: the forward pass. TRAINING: forward and backward pass.
        gradient_error: the largest relative error of the gradient of a weight or of the input; None after a prefill.
    """

    phase: str
    tokens: int
    time_us: Spread
    error: float
    gradient_error: float | None
    wrong: int

    @property
    def what(self) -> tuple[str, ...]:
        return self.of_layers, f"{self.phase} on a sequence of {self.tokens} tokens"

    @property
    def title(self) -> str:
        what = f"{self.phase} on {plural(self.tokens, 'token')}"
        return f"{self.world_size} ranks, {self.of_layers}, sequence parallelism: {what}"


COMPILED, ASYNC = "nccl compiled", "async_tp"
TENSOR_PARALLEL, SEQUENCE_PARALLEL = "graphar tensor-parallel", "graphar sequence-parallel"
WITH_NORMS = f"{SEQUENCE_PARALLEL}, fused norms"
OWN = (TENSOR_PARALLEL, SEQUENCE_PARALLEL, WITH_NORMS)
CUDA_METHODS = ("nccl", COMPILED, ASYNC, *OWN)
CPU_METHODS = ("gloo", *OWN)


@dataclass(frozen=True)
class Method:
    """How a model communicates.

    Attributes:
        column_parallel: takes normalised rows and a column-parallel weight. Returns this rank's features of all rows.
        row_parallel: takes this rank's features of all rows and a row-parallel weight. Returns rows of the sum over
            ranks.
        row_parallel_and_norm: takes the operands of ``row_parallel``, the residual and the norm's weight. Returns the
            normalised rows and the new residual. None: ``row_parallel``, followed by the model's own function for
            residual and norm.
        sum_norms: sums the gradients of norm weights over the ranks. None: every rank has all rows and needs no sum.
        options: Inductor's options to compile all layers together. None: only elementwise functions are compiled.
    """

    name: str
    column_parallel: Callable[[Tensor, Tensor], Tensor]
    row_parallel: Callable[[Tensor, Tensor], Tensor]
    row_parallel_and_norm: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    sum_norms: Callable[[Tensor], Tensor] | None = None
    options: Mapping[str, object] | None = None

    @property
    def shards_rows(self) -> bool:
        """Whether each rank has only its own rows of the residual."""
        return self.sum_norms is not None


WHOLE = Method("unsharded", linear, linear)


def make_method(name: str) -> Method:
    """Returns a method. For ASYNC this enables torch's symmetric memory for the group."""
    if name == TENSOR_PARALLEL:
        return Method(name, lambda x, w: linear(_SumOfGradients.apply(x), w), _SumOfProducts.apply)
    if name == SEQUENCE_PARALLEL:
        gather, scatter = graphar.fused_allgather_matmul, graphar.fused_matmul_reducescatter
        return Method(name, gather, scatter, sum_norms=graphar.allreduce)
    if name == WITH_NORMS:
        fused = partial(graphar.fused_matmul_reducescatter_residual_rmsnorm, eps=decoding.EPS)
        return replace(make_method(SEQUENCE_PARALLEL), name=name, row_parallel_and_norm=fused)
    if name == ASYNC:
        with warnings.catch_warnings():
            # Inductor's pass skips groups without this call. Some versions of torch say that it is deprecated.
            warnings.simplefilter("ignore", FutureWarning)
            symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    options = {COMPILED: {}, ASYNC: {"_micro_pipeline_tp": True}}.get(name)
    return Method(name, gathered_linear, scattered_linear, sum_norms=all_reduced, options=options)


# torch 2.13 renamed these functions.
_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
_scatter = getattr(collectives, "reduce_scatter_single_autograd", None) or collectives.reduce_scatter_tensor_autograd


def gathered_linear(x: Tensor, w: Tensor) -> Tensor:
    return linear(_gather(x, 0, dist.group.WORLD), w)


def scattered_linear(a: Tensor, w: Tensor) -> Tensor:
    return _scatter(linear(a, w), "sum", 0, dist.group.WORLD)


def all_reduced(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


class _SumOfProducts(torch.autograd.Function):
    """A row-parallel linear layer. The gradient of the sum is the same on all ranks."""

    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        return graphar.fused_matmul_allreduce(a, w)

    @staticmethod
    def backward(ctx, gradient):
        a, w = ctx.saved_tensors
        return gradient @ w, gradient.t() @ a


class _SumOfGradients(torch.autograd.Function):
    """The identity, before a column-parallel linear layer. Its backward pass sums the ranks' gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return graphar.allreduce(gradient)


class CountFused:
    """An Inductor pass that counts the collectives that torch has fused with a matmul, over all graphs.

    It is a plain callable, which makes Inductor skip its cache. No pass would run on a cached graph.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
        self.count += sum(any(name in str(node.target) for name in names) for node in graph.nodes)


def forward(
    decoder: decoding.Decoder, inputs: decoding.Inputs, method: Method, elementwise: decoding.Elementwise
) -> Tensor:
    """Returns the normalised output of the last layer. It has the rows of ``inputs.x``."""
    row_parallel_and_norm = method.row_parallel_and_norm or partial(
        bench.after_linear, method.row_parallel, elementwise.add_and_norm
    )
    return decoder.step(inputs, elementwise, row_parallel_and_norm, method.column_parallel)


def named_weights(decoder: decoding.Decoder) -> dict[str, Tensor]:
    of_layers = {
        f"{at}.{field.name}": getattr(layer, field.name)
        for at, layer in enumerate(decoder.layers)
        for field in fields(decoding.Layer)
    }
    return of_layers | {"final_norm": decoder.final_norm}


def part_of(name: str, whole: Tensor, size: decoding.Size, shard: decoding.Shard) -> Tensor:
    """Returns a rank's shard of a whole weight or of its gradient."""
    kind = name.split(".")[-1]
    kv_width = size.kv_heads * size.head_size
    stacked = {"query_key_value": (size.hidden, kv_width, kv_width), "gate_up": (size.inner, size.inner)}
    if kind in stacked:
        return torch.cat([shard.part(stack, 0) for stack in whole.split(stacked[kind])])
    return shard.part(whole, 1) if kind in ("out", "down") else whole


class Trial:
    """Runs one method on one sequence. ``cotangent`` is the gradient of the output.

    Attributes:
        result: the output of the last step: this rank's rows or all rows.
        gradients: the gradients of the last step by name, including the input's. Empty after a prefill.
    """

    result: Tensor

    def __init__(
        self,
        method: Method,
        decoder: decoding.Decoder,
        inputs: decoding.Inputs,
        cotangent: Tensor,
        phase: str,
        elementwise: decoding.Elementwise,
    ) -> None:
        self.method, self._decoder, self._phase = method, decoder, phase
        self._inputs, self._cotangent = inputs, cotangent
        self.gradients: dict[str, Tensor] = {}
        self._fused = CountFused()
        self._forward = partial(forward, elementwise=elementwise)
        if method.options is not None:
            options = {**method.options, "post_grad_custom_post_pass": self._fused}
            self._forward = torch.compile(partial(forward, elementwise=decoding.PLAIN), dynamic=False, options=options)

    def run(self) -> None:
        if self._phase == decoding.PREFILL:
            with torch.no_grad():
                self.result = self._forward(self._decoder, self._inputs, method=self.method)
        else:
            self._train()

    def _train(self) -> None:
        weights, x = named_weights(self._decoder), self._inputs.x.detach().requires_grad_()
        out = self._forward(self._decoder, replace(self._inputs, x=x), method=self.method)
        gradients = torch.autograd.grad(out, [*weights.values(), x], self._cotangent)
        self.result, self.gradients = out.detach(), dict(zip([*weights, "x"], gradients, strict=True))
        if self.method.sum_norms:
            norms = {name: gradient for name, gradient in self.gradients.items() if name.endswith("norm")}
            summed = self.method.sum_norms(torch.cat(list(norms.values())))
            self.gradients |= zip(norms, summed.split([len(gradient) for gradient in norms.values()]), strict=True)

    def make_launch(self) -> Callable[[], None]:
        """Returns a function that runs one step. On GPUs a prefill replays a CUDA graph."""
        for _ in range(WARM_UP):
            self.run()
        if self.method.name == ASYNC and not self._fused.count:
            raise RuntimeError("torch fused no collective with a matmul")
        return capture(self.run) if self.result.is_cuda and self._phase == decoding.PREFILL else self.run


class Bench(ModelBench):
    """Measures sequences with this rank's shard of a model, and compares them with the unsharded model."""

    def __init__(self, plan: SequencePlan, ranks: ProcessRanks, elementwise: decoding.Elementwise) -> None:
        super().__init__(plan, ranks, elementwise)
        for weight in (*named_weights(self._whole).values(), *named_weights(self._own).values()):
            weight.requires_grad_()

    def measure(self, phase: str, tokens: int, methods: Sequence[Method]) -> Iterator[SequenceRow | str]:
        """Yields a row for each method, or a message that says why there is none. Collective."""
        plan, ranks = self._plan, self._ranks
        torch.compiler.reset()  # torch.compile limits the number of graphs of a function
        x, cotangent = (
            decoding.normal(seed, (tokens, self._size.hidden), ranks.device) for seed in (decoding.EMBEDDED, COTANGENT)
        )
        case = decoding.Case(decoding.PREFILL, tokens, tokens)
        inputs = decoding.Inputs(case, x, decoding.rope_cos_sin(case, self._size.head_size, ranks.device))
        expected = Trial(WHOLE, self._whole, inputs, cotangent, phase, self._elementwise)
        expected.run()
        trials = (
            (f"{method.name}, {phase} on a sequence of {tokens} tokens", self._trial(method, inputs, cotangent, phase))
            for method in methods
        )
        mode = "cpu" if plan.device == "cpu" else "graph" if phase == decoding.PREFILL else "eager"
        timed, refused = timed_in_turn(ranks, trials, REPEATS, mode)
        yield from refused
        for trial, launch, times in timed:
            again(trial, launch, ranks)
            error, gradient_error, wrong = self._check(trial, expected)
            where = (plan.size, plan.world_size, plan.layers, phase, tokens)
            yield SequenceRow(trial.method.name, *where, spread(times), error, gradient_error, wrong)

    def _trial(self, method: Method, inputs: decoding.Inputs, cotangent: Tensor, phase: str) -> Trial:
        if method.shards_rows:
            inputs, cotangent = replace(inputs, x=self._own_rows(inputs.x)), self._own_rows(cotangent)
        return Trial(method, self._own, inputs, cotangent, phase, self._elementwise)

    def _own_rows(self, whole: Tensor) -> Tensor:
        return self._shard.part(whole, 0)

    def _check(self, trial: Trial, expected: Trial) -> tuple[float, float | None, int]:
        """Returns the largest logit error, the largest gradient error, and the number of wrong tokens and gradients."""
        rows = self._own_rows if trial.method.shards_rows else lambda whole: whole
        with torch.no_grad():
            errors, _ = compare_logits(trial.result, rows(expected.result), self._head)
        growth = self._plan.layers**0.5
        wrong = int((~(errors <= LOGITS_TOLERANCE * growth)).sum())
        worst = [worst_of(errors)]
        if trial.gradients:
            of_gradients = []
            for name, gradient in trial.gradients.items():
                whole = expected.gradients[name]
                mine = rows(whole) if name == "x" else part_of(name, whole, self._size, self._shard)
                of_gradients.append(relative_error(gradient, mine))
            wrong += sum(not error <= GRADIENT_TOLERANCE * growth for error in of_gradients)
            worst.append(max(of_gradients))
        error, *more = self._ranks.slowest(worst)
        (wrong,) = self._ranks.total([wrong])
        return error, more[0] if more else None, wrong


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the Euclidean norm of the difference / the norm of ``expected``; infinity for NaN."""
    error = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
    return math.inf if math.isnan(error) else error


def run_rank(plan: SequencePlan, rank: int, port: int) -> Iterator[SequenceRow | str]:
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    on_gpu = plan.device == "cuda"
    methods, elementwise = [], decoding.PLAIN
    if on_gpu:
        elementwise = elementwise.mapped(partial(decoding.compiled, dynamic=False))
    for name in CUDA_METHODS if on_gpu else CPU_METHODS:
        method, reason = agreed(ranks, partial(make_method, name))
        if reason:
            yield f"{name}, {plan.world_size} ranks: {reason}"
        else:
            methods.append(method)
    ranks.warm_up()
    measure = Bench(plan, ranks, elementwise).measure
    cases = itertools.product((decoding.PREFILL, TRAINING), plan.tokens)
    yield from case_by_case(ranks, (measure(*case, methods) for case in cases))


NOTES = text_beside(__name__)


def table_of(rows: Mapping[str, SequenceRow]) -> str:
    peer = best_peer(rows.values())
    cells = {
        "method": method_cell,
        "step (us)": lambda row: f"{row.median:.1f}",
        "of_best_peer": lambda row: ratio_cell(ratio(row, peer)),
        **whole_columns(next(iter(rows.values()))),
        "error": error_cell,
        "gradient error": lambda row: NOT_SERVED if row.gradient_error is None else f"{row.gradient_error:.4f}",
    }
    return columns(rows.values(), cells)
