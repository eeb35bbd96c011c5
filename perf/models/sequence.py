"""The decoder's layers with sequence parallelism and with tensor parallelism: prefill, and a training step.

    tensor parallelism    every rank has all rows of the residual
        norm -- column-parallel linear .. row-parallel linear == all-reduce -- add -- norm
    sequence parallelism  every rank has its own rows of the residual
        norm -- all-gather == column-parallel linear .. row-parallel linear == reduce-scatter -- add -- norm

A method has a function for each end of a block: ``enter`` multiplies normed rows with a column-parallel weight, and
``leave`` multiplies with a row-parallel weight and sums over the ranks. The rest is the same code for all methods.
"""

from __future__ import annotations

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
from torch.nn.functional import linear, scaled_dot_product_attention

import graphar
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks, agreed, agreed_launches
from perf.harness.timing import WARM_UP, capture, spread, time_in_turn
from perf.harness.verify import LOGITS_TOLERANCE, compare_logits
from perf.models.decoder import (
    EMBEDDED,
    EPS,
    PREFILL,
    SIZES,
    Case,
    Decoder,
    Layer,
    Pieces,
    Share,
    Size,
    make_decoder,
    make_head,
    normal,
    rms_norm,
    rotate,
    swiglu,
    turns_of,
)
from perf.report import NOT_SERVED, Spread, Timing, best_peer, method_cell, plural, ratio, ratio_cell, table
from perf.topics.norms import add_and_norm, compiled

TRAINING = "training"
COTANGENT = 3  # the seed of the gradient of the last layer's output; others are in perf.models.decoder
REPEATS = 7
# As LOGITS_TOLERANCE, for the gradients of a weight: the backward pass rounds as often again as the forward pass.
GRADIENT_TOLERANCE = 2 * LOGITS_TOLERANCE


@dataclass(frozen=True)
class SequencePlan:
    """What one world of ranks measures.

    Attributes:
        device: "cuda" or "cpu".
        size: a name in perf.models.decoder.SIZES.
        layers: the number of layers that are timed.
        tokens: the lengths of the sequence.
    """

    device: str
    world_size: int
    size: str
    layers: int
    tokens: Sequence[int]


@dataclass(frozen=True)
class SequenceRow(Timing):
    """The measured and verified time of one method for one sequence.

    Attributes:
        size: a name in perf.models.decoder.SIZES.
        layers: the number of layers that were timed.
        phase: PREFILL: the forward pass. TRAINING: forward and backward pass.
        tokens: the length of the sequence.
        time_us: median, p10 and p99 over the repeats. A repeat's time is the slowest rank's.
        error: the largest relative error of a token's logits, compared with the unsharded model.
        gradient_error: the largest relative error of a weight's or the input's gradient; None: there are no gradients.
        wrong: the tokens and the gradients, over all ranks, that have too large an error.
    """

    method: str
    size: str
    world_size: int
    layers: int
    phase: str
    tokens: int
    time_us: Spread
    error: float
    gradient_error: float | None
    wrong: int

    @property
    def what(self) -> tuple[str, ...]:
        return f"{plural(self.layers, 'layer')} of {self.size}", f"{self.phase} on a sequence of {self.tokens} tokens"


# ---- methods --------------------------------------------------------------------------------------------------------

COMPILED, ASYNC = "nccl compiled", "async_tp"
BY_TENSOR, BY_SEQUENCE = "graphar tensor-parallel", "graphar sequence-parallel"
WITH_NORMS = f"{BY_SEQUENCE}, fused norms"
OWN = (BY_TENSOR, BY_SEQUENCE, WITH_NORMS)
CUDA_METHODS = ("nccl", COMPILED, ASYNC, *OWN)
CPU_METHODS = ("gloo", *OWN)


@dataclass(frozen=True)
class Method:
    """A method for both ends of a block.

    Attributes:
        enter: takes normed rows and a column-parallel weight; returns this rank's features of all rows.
        leave: takes this rank's features of all rows and a row-parallel weight; returns rows of the sum over ranks.
        leave_and_norm: what ``leave`` does, then adds the residual and norms: takes the operands of ``leave``, the
            residual and the norm's weight; returns the normed rows and the new residual. None: the model's own function
            adds and norms.
        sum_norms: sums the gradients of norms over ranks, if each rank has its own rows; None: all ranks have all rows.
        options: Inductor's options, with which all layers are compiled together; None: only elementwise functions are
            compiled.
    """

    name: str
    enter: Callable[[Tensor, Tensor], Tensor]
    leave: Callable[[Tensor, Tensor], Tensor]
    leave_and_norm: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    sum_norms: Callable[[Tensor], Tensor] | None = None
    options: Mapping[str, object] | None = None

    @property
    def by_rows(self) -> bool:
        """Whether each rank has only its own rows of the residual."""
        return self.sum_norms is not None


WHOLE = Method("unsharded", linear, linear)


def make_method(name: str) -> Method:
    """Returns a method. For torch's asynchronous tensor parallelism this enables symmetric memory for the group."""
    if name == BY_TENSOR:
        return Method(name, lambda x, w: linear(_SumOfGradients.apply(x), w), _SumOfProducts.apply)
    if name == BY_SEQUENCE:
        gather, scatter = graphar.fused_allgather_matmul, graphar.fused_matmul_reducescatter
        return Method(name, gather, scatter, sum_norms=graphar.allreduce)
    if name == WITH_NORMS:
        fused = partial(graphar.fused_matmul_reducescatter_residual_rmsnorm, eps=EPS)
        return replace(make_method(BY_SEQUENCE), name=name, leave_and_norm=fused)
    if name == ASYNC:
        with warnings.catch_warnings():
            # torch's pass skips groups without this call, which some versions of torch call deprecated.
            warnings.simplefilter("ignore", FutureWarning)
            symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    options = {COMPILED: {}, ASYNC: {"_micro_pipeline_tp": True}}.get(name)
    return Method(name, gathered_linear, scattered_linear, sum_norms=all_reduced, options=options)


# torch 2.13 renamed them.
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
    """A pass after torch's own passes. It counts the collectives that torch has fused with a matmul, of all graphs.

    As a mere callable it keeps Inductor from its cache: no pass runs on a graph from there.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
        self.count += sum(any(name in str(node.target) for name in names) for node in graph.nodes)


# ---- the layers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elementwise(Pieces):
    """The elementwise functions, compiled or not."""

    add_and_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


PLAIN = Elementwise(rotate, swiglu, add_and_norm)


def forward(decoder: Decoder, x: Tensor, turns: tuple[Tensor, Tensor], method: Method, pieces: Elementwise) -> Tensor:
    """Returns the last layer's output, normed: the rows that ``x`` has."""
    residual, normed = x, rms_norm(x, decoder.layers[0].attention_norm)
    next_norms = [*(layer.attention_norm for layer in decoder.layers[1:]), decoder.final_norm]
    leave_and_norm = method.leave_and_norm or partial(leave_then_norm, method.leave, pieces.add_and_norm)
    for layer, next_norm in zip(decoder.layers, next_norms, strict=True):
        attended = attend(method.enter(normed, layer.query_key_value), layer, decoder.size, turns, pieces.rotate)
        normed, residual = leave_and_norm(attended, layer.out, residual, layer.mlp_norm)
        inner = pieces.swiglu(method.enter(normed, layer.gate_up))
        normed, residual = leave_and_norm(inner, layer.down, residual, next_norm)
    return normed


def leave_then_norm(
    leave: Callable, add_and_norm: Callable, a: Tensor, w: Tensor, residual: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor]:
    return add_and_norm(leave(a, w), residual, norm)


def attend(projected: Tensor, layer: Layer, size: Size, turns: tuple[Tensor, Tensor], rotate: Callable) -> Tensor:
    """Returns the causal attention of one sequence, without a cache: [tokens, this rank's heads x head size]."""
    heads = projected.view(1, len(projected), -1, size.head_size).transpose(1, 2)
    query_heads = layer.out.shape[1] // size.head_size
    kv_heads = (heads.shape[1] - query_heads) // 2
    turned, values = rotate(heads[:, :-kv_heads], *turns), heads[:, -kv_heads:]
    queries, keys = turned[:, :query_heads], turned[:, query_heads:]
    attended = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2).reshape(len(projected), -1)


def leaves(decoder: Decoder) -> dict[str, Tensor]:
    """Returns the weights by name."""
    of_layers = {
        f"{at}.{one.name}": getattr(layer, one.name) for at, layer in enumerate(decoder.layers) for one in fields(Layer)
    }
    return of_layers | {"final_norm": decoder.final_norm}


def part_of(name: str, whole: Tensor, size: Size, share: Share) -> Tensor:
    """Returns a rank's part of a weight of the whole model, or of its gradient."""
    kind = name.split(".")[-1]
    kv_width = size.kv_heads * size.head_size
    stacked = {"query_key_value": (size.hidden, kv_width, kv_width), "gate_up": (size.inner, size.inner)}
    if kind in stacked:
        return torch.cat([share.part(one, 0) for one in whole.split(stacked[kind])])
    return share.part(whole, 1) if kind in ("out", "down") else whole


# ---- on a rank ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """The input of one length: embedded tokens, RoPE's cosines and sines, and the gradient of the output."""

    x: Tensor
    turns: tuple[Tensor, Tensor]
    cotangent: Tensor


class Trial:
    """One method on one sequence.

    Attributes:
        result: the output of the last step, this rank's rows or all rows.
        gradients: those of the last step by name, the input's among them; empty after a prefill.
    """

    def __init__(self, method: Method, decoder: Decoder, given: Given, phase: str, pieces: Elementwise) -> None:
        self.method, self._decoder, self._given, self._phase = method, decoder, given, phase
        self.result: Tensor | None = None
        self.gradients: dict[str, Tensor] = {}
        self._fused = CountFused()
        self._forward = partial(forward, pieces=pieces)
        if method.options is not None:
            options = {**method.options, "post_grad_custom_post_pass": self._fused}
            self._forward = torch.compile(partial(forward, pieces=PLAIN), dynamic=False, options=options)

    def run(self) -> None:
        if self._phase == PREFILL:
            with torch.no_grad():
                self.result = self._forward(self._decoder, self._given.x, self._given.turns, method=self.method)
        else:
            self._train()

    def _train(self) -> None:
        weights, x = leaves(self._decoder), self._given.x.detach().requires_grad_()
        out = self._forward(self._decoder, x, self._given.turns, method=self.method)
        found = torch.autograd.grad(out, [*weights.values(), x], self._given.cotangent)
        self.result, self.gradients = out.detach(), dict(zip([*weights, "x"], found, strict=True))
        if self.method.sum_norms:
            norms = {name: one for name, one in self.gradients.items() if name.endswith("norm")}
            summed = self.method.sum_norms(torch.cat(list(norms.values())))
            self.gradients |= zip(norms, summed.split([len(one) for one in norms.values()]), strict=True)

    def make_launch(self) -> Callable[[], None]:
        """Returns a step. On GPUs a prefill is replayed as a graph."""
        for _ in range(WARM_UP):
            self.run()
        if self.method.name == ASYNC and not self._fused.count:
            raise RuntimeError("torch fused no collective with a matmul")
        return capture(self.run) if self.result.is_cuda and self._phase == PREFILL else self.run


class Bench:
    """The whole model, this rank's share of it, and what all sequences have in common."""

    def __init__(self, plan: SequencePlan, ranks: ProcessRanks, pieces: Elementwise) -> None:
        self._plan, self._ranks, self._pieces = plan, ranks, pieces
        self._size, self._share = SIZES[plan.size], Share(ranks.rank, ranks.size, ranks.device)
        self._whole = make_decoder(self._size, plan.layers, Share(0, 1, ranks.device))
        self._own = make_decoder(self._size, plan.layers, self._share)
        self._head = make_head(self._size, ranks.device)
        for one in (*leaves(self._whole).values(), *leaves(self._own).values()):
            one.requires_grad_()

    def measure(self, phase: str, tokens: int, methods: Sequence[Method]) -> Iterator[SequenceRow | str]:
        """Yields a row for each method, or the reason why there is none. Collective."""
        plan, ranks = self._plan, self._ranks
        torch.compiler.reset()  # there is a limit on the graphs of one function
        given = self._make_sequence(tokens)
        expected = Trial(WHOLE, self._whole, given, phase, self._pieces)
        expected.run()
        trials = (
            (
                f"{method.name}, {phase} on a sequence of {tokens} tokens",
                Trial(method, self._own, self._rows_of(given, method), phase, self._pieces),
            )
            for method in methods
        )
        ready, refused = agreed_launches(ranks, trials)
        yield from refused
        if not ready:
            return
        mode = "cpu" if plan.device == "cpu" else "graph" if phase == PREFILL else "eager"
        launches = [launch for _, launch in ready]
        times_us = ranks.slowest(time_in_turn(launches, REPEATS, lambda launch: ranks.time_us(launch, mode)))
        for (trial, launch), times in zip(ready, times_us, strict=True):
            trial.result.fill_(torch.nan)
            launch()
            ranks.level()
            error, gradient_error, wrong = self._check(trial, expected)
            where = (plan.size, plan.world_size, plan.layers, phase, tokens)
            yield SequenceRow(trial.method.name, *where, spread(times), error, gradient_error, wrong)

    def _make_sequence(self, tokens: int) -> Given:
        size, device = self._size, self._ranks.device
        x, cotangent = (normal(seed, (tokens, size.hidden), device) for seed in (EMBEDDED, COTANGENT))
        return Given(x, turns_of(Case(PREFILL, tokens, tokens), size.head_size, device), cotangent)

    def _rows_of(self, given: Given, method: Method) -> Given:
        if not method.by_rows:
            return given
        return replace(given, x=self._own_rows(given.x), cotangent=self._own_rows(given.cotangent))

    def _own_rows(self, whole: Tensor) -> Tensor:
        return self._share.part(whole, 0)

    def _check(self, trial: Trial, expected: Trial) -> tuple[float, float | None, int]:
        """Returns the largest errors of logits and of gradients, and the number of wrong tokens and gradients."""
        rows = self._own_rows if trial.method.by_rows else lambda whole: whole
        with torch.no_grad():
            errors, _ = compare_logits(trial.result, rows(expected.result), self._head)
        growth = self._plan.layers**0.5
        wrong = int((~(errors <= LOGITS_TOLERANCE * growth)).sum())
        worst = [errors.nan_to_num(nan=math.inf).max().item()]
        if trial.gradients:
            of_gradients = []
            for name, found in trial.gradients.items():
                whole = expected.gradients[name]
                mine = rows(whole) if name == "x" else part_of(name, whole, self._size, self._share)
                of_gradients.append(relative_error(found, mine))
            wrong += sum(not error <= GRADIENT_TOLERANCE * growth for error in of_gradients)
            worst.append(max(of_gradients))
        error, *more = self._ranks.slowest(worst)
        (wrong,) = self._ranks.total([wrong])
        return error, more[0] if more else None, wrong


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Returns the Euclidean norm of the difference over that of ``expected``; infinity for NaN."""
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    return math.inf if math.isnan(error) else error


def run_rank(plan: SequencePlan, rank: int, port: int) -> Iterator[SequenceRow | str]:
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    on_gpu = plan.device == "cuda"
    pieces = PLAIN
    if on_gpu:
        pieces = Elementwise(*(compiled(piece, dynamic=False) for piece in (rotate, swiglu, add_and_norm)))
    methods = []
    for name in CUDA_METHODS if on_gpu else CPU_METHODS:
        method, reason = agreed(ranks, partial(make_method, name))
        if reason:
            yield f"{name}, {plan.world_size} ranks: {reason}"
        else:
            methods.append(method)
    ranks.warm_up()
    bench = Bench(plan, ranks, pieces)
    for phase in (PREFILL, TRAINING):
        for tokens in plan.tokens:
            yield from bench.measure(phase, tokens, methods)
            if on_gpu:
                torch.cuda.empty_cache()  # a graph's memory stays in torch's pool, where the next step cannot use it
    ranks.level()


# ---- the report -----------------------------------------------------------------------------------------------------

NOTES = f"""\
Layers of the same shape with the rows of the residual divided between the ranks. A prefill is the forward pass of one
sequence, on GPUs in a CUDA graph. A training step is a forward and a backward pass, in eager calls: it computes the
gradients of all weights and of the input, and sums the gradients of norms over the ranks. There is no cache, no
embedding, no head and no optimiser.

- `nccl`, `gloo`: sequence parallelism with torch's functional collectives: all-gather, matmul, matmul, reduce-scatter,
  and the norm of own rows. `{COMPILED}`: the same, and torch.compile compiles all layers together.
- `{ASYNC}`: torch's asynchronous tensor parallelism: `{COMPILED}` with Inductor's option `_micro_pipeline_tp`, which
  replaces collectives and matmuls by pipelined ones over symmetric memory.
- `{BY_TENSOR}`: every rank has all rows of the residual. `graphar.fused_matmul_allreduce` ends a block, and
  `graphar.allreduce` sums the gradients of its input.
- `{BY_SEQUENCE}`: sequence parallelism with `graphar.fused_allgather_matmul` and
  `graphar.fused_matmul_reducescatter`, in both passes.
- `{WITH_NORMS}`: the same with `graphar.fused_matmul_reducescatter_residual_rmsnorm`, which in a prefill also adds the
  residual and norms. In training it takes several kernels.

Columns have the same meaning as for the other steps. gradient error: the Euclidean norm of the difference from the
unsharded model's gradient / the norm of that gradient; the largest over all weights and the input. It may be at most
2^-5 times the square root of the number of layers. The verified training step is one more after the timed ones."""


def title(row: SequenceRow) -> str:
    """Returns the title of a row's step."""
    layers = f"{plural(row.layers, 'layer')} of {row.size}"
    return f"{row.world_size} ranks, {layers}, sequence parallelism: {row.phase} on {plural(row.tokens, 'token')}"


def in_words(rows: Mapping[str, SequenceRow]) -> str:
    """Returns a sentence that compares sequence parallelism with the best peer; empty if one of them is missing."""
    own, peer, other = rows.get(BY_SEQUENCE), best_peer(rows.values()), rows.get(BY_TENSOR)
    if own is None or peer is None:
        return ""
    told = [f"{one.method} {one.median / 1e3:.4g} ms" for one in (peer, other, own) if one]
    return f"{title(own)}: {'; '.join(told)}; ratio {own.median / peer.median:.2f}"


def sequence_table(rows: Mapping[str, SequenceRow]) -> str:
    """Returns the table of one step, with a row for each method."""
    first, peer = next(iter(rows.values())), best_peer(rows.values())
    layers = SIZES[first.size].layers
    header = ["method", "step (us)", "of_best_peer", f"whole model, {layers} layers (ms)", "tokens/s", "error"]
    lines = []
    for row in rows.values():
        whole_us = row.median * layers / row.layers
        cells = [method_cell(row), f"{row.median:.1f}", ratio_cell(ratio(row, peer)), f"{whole_us / 1e3:.4g}"]
        cells += [f"{row.tokens / whole_us * 1e6:,.0f}", f"{row.error:.4f}"]
        lines.append([*cells, NOT_SERVED if row.gradient_error is None else f"{row.gradient_error:.4f}"])
    return table([*header, "gradient error"], lines)
