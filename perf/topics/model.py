"""`python -m perf model`: times a tensor-parallel Llama decoder with several all-reduce methods, and generation.

The decoder has random weights. transformers generates eagerly, once over NCCL or gloo and once over graphar's
torch.distributed backend.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

import graphar
from perf.between_ranks import BetweenRanks
from perf.charts import Axis, Mark, Rows
from perf.harness import ranks as ranks_of
from perf.harness.cases import Plan
from perf.harness.ranks import Ranks, case_by_case, timed_in_turn
from perf.harness.timing import Repeated, spread
from perf.harness.verify import LOGITS_TOLERANCE, again, compare_logits
from perf.md import NOT_SERVED, columns, method_cell, plural, ratio_cell
from perf.models import bench, generation, sequence
from perf.models import decoder as decoding
from perf.models.bench import ALONE, UNSHARDED, BenchPlan, BenchRow, ModelBench, by_title, error_cell, whole_columns
from perf.models.generation import GenerationPlan, GenerationRow
from perf.models.sequence import SequencePlan, SequenceRow
from perf.peers import catalogue
from perf.peers.matmuls import Variant, after_matmul, torch_mm
from perf.peers.methods import Method
from perf.ratios import best, best_peer, ratio, words_for
from perf.report import Arguments, Glance, Section, Spread, Timing

SIZE, LAYERS, DECODED, PREFILLED = "llama-3-70b", 4, (1, 8, 64), (2048, 8192)
GENERATING_SIZE, GENERATED = "llama-3-8b", 64
CPU_DECODED, CPU_PREFILLED, CPU_GENERATED = (1, 8), (128,), 16


@dataclass(frozen=True)
class ModelPlan(BenchPlan):
    """The decoder's cases. ``decode`` and ``prefill`` are their numbers of tokens."""

    decode: Sequence[int]
    prefill: Sequence[int]

    def cases(self) -> Iterator[decoding.Case]:
        for tokens in self.decode:
            yield decoding.Case(decoding.DECODE, tokens, decoding.CONTEXT)
        for tokens in self.prefill:
            yield decoding.Case(decoding.PREFILL, tokens, tokens)


MATMUL, NORM, BOTH, CODEC = "graphar + matmul", "graphar + norm", "graphar + matmul + norm", "graphar_int8"
CUDA_METHODS = (UNSHARDED, ALONE, "nccl", "symm_two_shot", "graphar", MATMUL, NORM, BOTH, CODEC)
CPU_METHODS = (UNSHARDED, ALONE, "gloo", "graphar", MATMUL, NORM, BOTH, CODEC)


def make_variants(plan: ModelPlan, ranks: Ranks, add_and_norm: Callable) -> tuple[list[Variant], list[str]]:
    """Returns the methods that this machine can run, and why others are missing. Allocates all memory. Collective.

    The ``call`` of each is a RowParallelAndNorm of perf.models.decoder: a row-parallel linear layer, its all-reduce,
    the residual addition and the norm.
    """
    names = CUDA_METHODS if plan.device == "cuda" else CPU_METHODS
    largest = max(case.tokens for case in plan.cases()) * decoding.SIZES[plan.size].hidden * 2
    sums = tuple(name for name in names if name not in (UNSHARDED, ALONE, MATMUL, NORM, BOTH))
    sums_made, skipped = catalogue.make_methods(
        Plan(plan.device, plan.world_size, "process", ("bfloat16",), sums, largest), ranks
    )
    product = partial(bench.after_linear, torch.nn.functional.linear, add_and_norm)
    own_product = partial(bench.after_linear, graphar.fused_matmul_allreduce, add_and_norm)
    variants = [
        Variant(UNSHARDED, product),
        Variant(ALONE, product, summed=False),
        Variant(MATMUL, own_product, exact=True),
        Variant(NORM, normed_in_kernel, exact=True),
        Variant(BOTH, partial(graphar.fused_matmul_allreduce_residual_rmsnorm, eps=decoding.EPS), exact=True),
        *(after_sum(method, add_and_norm) for method in sums_made),
    ]
    return sorted(variants, key=lambda variant: names.index(variant.name)), skipped


def normed_in_kernel(a: Tensor, weight: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return graphar.allreduce_residual_rmsnorm(torch.nn.functional.linear(a, weight), residual, scale, decoding.EPS)


def after_sum(method: Method, add_and_norm: Callable) -> Variant:
    """Returns a variant of torch's matmul, an all-reduce and the norm."""
    product = after_matmul(method, "", torch_mm)
    call = partial(bench.after_linear, product.call, add_and_norm)
    return replace(product, call=call, exact=method.exact, codec=method.codec)


# Replaces LOGITS_TOLERANCE for the 8-bit codec, whose error is about 1 % of each summand.
QUANTISED_TOLERANCE = 2.0**-4


@dataclass(frozen=True)
class ModelRow(BenchRow):
    """One method in one case: ``phase``, ``tokens`` and ``context`` are the fields of perf.models.decoder.Case.

    ``error`` is None for the unsharded model and without all-reduces.
    """

    phase: str
    tokens: int
    context: int
    time_us: Spread
    error: float | None
    wrong: int

    @property
    def what(self) -> tuple[str, ...]:
        return self.of_layers, f"{self.phase} of {plural(self.tokens, 'token')}"

    @property
    def title(self) -> str:
        return f"{self.world_size} ranks, {': '.join(self.what)}"


def run_rank(plan: ModelPlan, rank: int, port: int) -> Iterator[ModelRow | str]:
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    elementwise = decoding.PLAIN.mapped(decoding.compiled) if plan.device == "cuda" else decoding.PLAIN
    variants, skipped = make_variants(plan, ranks, elementwise.add_and_norm)
    yield from skipped
    ranks.warm_up()
    measure = Bench(plan, ranks, elementwise).measure
    yield from case_by_case(ranks, (measure(case, variants) for case in plan.cases()))


class Trial(Repeated):
    """Runs one method on one case."""

    def __init__(
        self, variant: Variant, decoder: decoding.Decoder, inputs: decoding.Inputs, elementwise: decoding.Elementwise
    ) -> None:
        step, on_gpu = partial(decoder.step, inputs, elementwise, variant.call), inputs.x.is_cuda
        super().__init__(step, inputs.case.iterations if on_gpu else 1, on_gpu)
        self.variant = variant


class Bench(ModelBench):
    """Measures cases with the unsharded model and with this rank's shard of it."""

    def measure(self, case: decoding.Case, variants: list[Variant]) -> Iterator[ModelRow | str]:
        """Yields a row for each method that can run the case, and a message for each that cannot. Collective."""
        plan, ranks = self._plan, self._ranks
        models = {True: (self._own, self._shard), False: (self._whole, decoding.Shard(0, 1, ranks.device))}
        of_model = {
            sharded: (decoder, decoding.make_inputs(self._size, plan.layers, case, share))
            for sharded, (decoder, share) in models.items()
        }
        trials = (
            (
                f"{variant.name}, {case.phase} of {case.tokens} tokens",
                Trial(variant, *of_model[variant.name != UNSHARDED], self._elementwise),
            )
            for variant in variants
        )
        how = ("graph", case.iterations) if ranks.device.type == "cuda" else ("cpu", 1)
        timed, refused = timed_in_turn(ranks, trials, case.repeats, *how)
        yield from refused
        of_whole = (again(*one, ranks).clone() for *one, _ in timed if one[0].variant.name == UNSHARDED)
        expected = next(of_whole, None)
        if expected is None:
            yield f"{case.phase} of {case.tokens} tokens: no result of the unsharded model to compare with"
            return
        for trial, launch, times in timed:
            error, wrong = self._check(trial, launch, expected)
            where = (plan.size, plan.world_size, plan.layers, case.phase, case.tokens, case.context)
            yield ModelRow(trial.variant.name, *where, spread(times), error, wrong)

    def _check(self, trial: Trial, launch: Callable[[], None], expected: Tensor) -> tuple[float | None, int]:
        """Returns a row's error and number of wrong tokens. Collective."""
        if not trial.variant.summed or trial.variant.name == UNSHARDED:
            return None, 0
        errors, apart = compare_logits(again(trial, launch, self._ranks), expected, self._head)
        return bench.verdict(errors, wrong_tokens(errors, apart, trial.variant, self._plan.layers), self._ranks)


def wrong_tokens(errors: Tensor, apart: Tensor, variant: Variant, layers: int) -> Tensor:
    """Returns a mask of wrong tokens. The arguments come from :func:`compare_logits`. A NaN error counts as wrong."""
    tolerance = QUANTISED_TOLERANCE if variant.codec else LOGITS_TOLERANCE
    return ~(errors <= tolerance * layers**0.5) | (apart & variant.exact)


def run_plan(plan: BenchPlan, rank: int, port: int) -> Iterator[AnyRow | str]:
    works = {ModelPlan: run_rank, GenerationPlan: generation.run_rank, SequencePlan: sequence.run_rank}
    yield from works[type(plan)](plan, rank, port)


EXACT = ("graphar", MATMUL, NORM, BOTH, *sequence.OWN)  # graphar's methods without a codec

AnyRow = ModelRow | GenerationRow | SequenceRow


@dataclass
class Model(BetweenRanks):
    rows: list[ModelRow] = field(default_factory=list)
    generations: list[GenerationRow] = field(default_factory=list)
    sequences: list[SequenceRow] = field(default_factory=list)

    order: ClassVar[int] = 12
    arguments: ClassVar[Arguments] = Arguments(
        quick_on_gpus="--layers 1 --decode 1 --prefill 2048 --generate 16",
        quick_on_cpu="--decode 1 --prefill --generate 4",
    )
    has_spread: ClassVar[bool] = True
    work: ClassVar = staticmethod(run_plan)
    added_fields: ClassVar[tuple[str, ...]] = ("skipped", "generations", "sequences")

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        sizes = (
            f"shape of the model (default: {SIZE}, and {GENERATING_SIZE} for generation; {decoding.TINY} on the CPU)"
        )
        parser.add_argument("--size", choices=list(decoding.SIZES), help=sizes)
        layers = f"layers to time (default: {LAYERS}, or all of a smaller model)"
        parser.add_argument("--layers", type=int, metavar="N", help=layers)
        tokens = {"type": int, "nargs": "*", "metavar": "TOKENS"}
        parser.add_argument("--decode", **tokens, help="batch sizes of decode steps (default: 1 8 64; 1 8 on the CPU)")
        parser.add_argument(
            "--prefill", **tokens, help="sequence lengths of prefill steps (default: 2048 8192; 128 on the CPU)"
        )
        lengths = "also measure sequence parallelism, with these sequence lengths (default: the lengths of --prefill)"
        parser.add_argument("--sequence-parallel", **tokens, help=lengths)
        generated = f"tokens to generate with transformers, or 0 (default: {GENERATED}; {CPU_GENERATED} on the CPU)"
        parser.add_argument("--generate", type=int, metavar="TOKENS", help=generated)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[ModelPlan | GenerationPlan | SequencePlan]:
        """Returns the plans of each world: for the decoder, for generation, and for sequence parallelism."""
        on_gpus = gpu_count >= 2
        world_sizes = cls.world_sizes(options, gpu_count)
        decode, prefill, generate = (
            (DECODED, PREFILLED, GENERATED) if on_gpus else (CPU_DECODED, CPU_PREFILLED, CPU_GENERATED)
        )
        decode = decode if options.decode is None else options.decode
        in_sequence = () if options.sequence_parallel is None else options.sequence_parallel or prefill
        prefill = prefill if options.prefill is None else options.prefill
        generate = generate if options.generate is None else options.generate
        if not decode and not prefill and not generate and not in_sequence:
            sys.exit("--decode, --prefill and --generate leave nothing to measure")
        if min([*decode, *prefill, 1]) < 1 or 1 in prefill:
            sys.exit("--decode must be at least 1 token, --prefill at least 2")
        if generate < 0:
            sys.exit("--generate must be at least 0 tokens")
        plans = []
        for world_size in world_sizes:
            if uneven := [tokens for tokens in in_sequence if tokens < 1 or tokens % world_size]:
                sys.exit(f"--sequence-parallel: {world_size} ranks cannot divide {uneven[0]} tokens evenly")
            wanted: list[tuple[type, str, tuple]] = [
                (ModelPlan, SIZE, (decode, prefill) if decode or prefill else ()),
                (GenerationPlan, GENERATING_SIZE, (generate,) if generate else ()),
                (SequencePlan, SIZE, (in_sequence,) if in_sequence else ()),
            ]
            for kind, size, fields in wanted:
                if fields:
                    shape = shape_of(options, size if on_gpus else decoding.TINY, world_size)
                    plans.append(kind("cuda" if on_gpus else "cpu", world_size, *shape, *fields))
        return plans

    def verified(self) -> Sequence[Timing]:
        return [row for row in (*self.rows, *self.generations) if row.error is not None] + self.sequences

    def timed(self) -> Sequence[Timing]:
        return [*self.rows, *self.generations, *self.sequences]

    def sections(self) -> list[Section]:
        sections = [Section(title, [step_table(rows)]) for title, rows in by_title(self.rows).items()]
        for what, part, rows in (
            ("generation", generation, self.generations),
            ("sequence parallelism", sequence, self.sequences),
        ):
            sections += [Section(title, [part.table_of(of_title)]) for title, of_title in by_title(rows).items()]
            sections += [Section(f"How {what} was measured", [part.NOTES])] if rows else []
        return sections

    def glance(self) -> Glance:
        measured = by_title([*self.rows, *self.generations, *self.sequences])
        ratios = {title: ratio(best_own(rows), best_peer(rows.values())) for title, rows in measured.items()}
        over = words_for([row.method for rows in measured.values() for row in rows.values() if row.is_peer])
        timed = "a step or of generation" if self.generations else "a step"
        known = {title: value for title, value in ratios.items() if value}
        return Glance(f"time of {timed} with graphar's fastest exact method / with {over}", known)

    def figure_of_speedups(self) -> Rows:
        """Plots the speedup of each step over the same step with NCCL's all-reduces."""
        picks = {"graphar, fastest exact method": best_own, "best peer": lambda rows: best_peer(rows.values())}
        marks = [
            Mark(step.split(": ")[1], name, rows["nccl"].median / pick(rows).median)
            for step, rows in by_title(self.rows).items()
            for name, pick in picks.items()
        ]
        title = f"Layers of {self.rows[0].size}: speed of a step relative to NCCL"
        return Rows(title, marks, Axis("times as fast as with NCCL"), 1.0)


def shape_of(options: argparse.Namespace, default: str, world_size: int) -> tuple[str, int]:
    """Returns a model's size and the number of its layers. Ends the program if the options are invalid."""
    size = decoding.SIZES[options.size or default]
    decoding.check_heads(size, world_size)
    layers = options.layers or min(LAYERS, size.layers)
    if not 1 <= layers <= size.layers:
        sys.exit(f"--layers must be from 1 to the {size.layers} of {size.name}")
    return size.name, layers


def step_table(rows: Mapping[str, ModelRow]) -> str:
    peer, alone = best_peer(rows.values()), rows.get(ALONE)

    def is_sum(row: ModelRow) -> bool:
        return alone is not None and row.method not in (ALONE, UNSHARDED)

    def communication(row: ModelRow) -> str:
        return f"{(row.median - alone.median) / row.layers:.1f}" if is_sum(row) else NOT_SERVED

    cells = {
        "method": method_cell,
        "step (us)": lambda row: f"{row.median:.1f}",
        "of_best_peer": lambda row: ratio_cell(ratio(row, peer) if row.method != ALONE else None),
        "communication (us a layer)": communication,
        "communication (%)": lambda row: f"{100 * (1 - alone.median / row.median):.1f}" if is_sum(row) else NOT_SERVED,
        **whole_columns(next(iter(rows.values()))),
        "error": error_cell,
    }
    return columns(rows.values(), cells)


def best_own(rows: Mapping[str, AnyRow]) -> AnyRow | None:
    return best(row for name, row in rows.items() if name in EXACT)
