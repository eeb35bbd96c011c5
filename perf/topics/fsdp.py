"""`python -m perf fsdp`: training steps of a model under fully_shard, with torch's and with graphar's collectives."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphar
from graphar.plan.policy import LosslessPolicy
from graphar.plan.sizes import MB, parse_nbytes
from perf.charts import Axis, Mark, Rows
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks
from perf.machine import check_world_sizes
from perf.models.decoder import SIZES, TINY, Size
from perf.models.llama import Llama, fill, fitting_layers
from perf.report import NOT_SERVED, Arguments, Glance, Report, Section, Timed, ratio_cell, table
from perf.topics.throughput import BLOCK, WARM_UP_STEPS, release, time_blocks
from perf.topics.training import loss_of

MODEL = "llama-3-8b"
CPU_WORLD_SIZE, CPU_STEPS, CPU_TOKENS = 2, 30, (64,)
STEPS, TOKENS = 30, (2048, 8192)
CHECKED_STEPS = 5  # the first steps, whose losses and parameters are compared
COMPRESSED_FROM = 8 * MB  # of the largest part, where the tuning table has no size for compression
TOLERANCE = 0.02  # the most by which a loss with graphar may differ from torch's, relatively
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ALONE, PLAIN, LOSSLESS = "alone", "graphar", "graphar lossless"


@dataclass(frozen=True)
class FsdpRow:
    """A model, trained with one kind of collectives.

    Attributes:
        method: "nccl" or "gloo": torch's own. "graphar": without compression. "graphar lossless". "alone": no
            communication.
        layers: the layers of the model that was trained.
        tokens: the tokens of a rank in a step, one sequence.
        reduce_dtype: the dtype in which gradients are reduced, one of DTYPES.
        blocks: the most thread blocks of a call, for "graphar"; None: the default.
        compressed: the algorithms that compressed.
        step_ms: the median time of a step.
        losses: the mean loss of the ranks in each of the first CHECKED_STEPS steps, in nats.
        digest: a hash of all ranks' losses and parameters after these steps.
    """

    method: str
    model: str
    layers: int
    parameters: int
    world_size: int
    tokens: int
    reduce_dtype: str
    blocks: int | None
    compressed: list[str]
    step_ms: float
    losses: list[float]
    digest: str

    @property
    def is_own(self) -> bool:
        return self.method in (PLAIN, LOSSLESS)

    @property
    def is_torchs(self) -> bool:
        return self.method not in (PLAIN, LOSSLESS, ALONE)

    @property
    def case(self) -> tuple:
        """A key that is equal for rows that are compared with each other."""
        return self.model, self.layers, self.world_size, self.tokens, self.reduce_dtype


@dataclass(frozen=True)
class FsdpPlan:
    """Attributes:
    device: "cuda" or "cpu".
    model: a name in SIZES.
    layers: the number of layers; None: as many as fit.
    tokens: the tokens of a rank in a step; several are measured one after another.
    steps: the number of timed steps.
    compressed_from: the bytes of the largest part from which on "graphar lossless" compresses; None: the table's.
    budget_s: the time in seconds after which no more steps are timed, for each number of tokens; None: no limit.
    """

    device: str
    world_size: int
    model: str
    layers: int | None
    tokens: tuple[int, ...]
    steps: int
    reduce_dtype: str
    blocks: int | None
    compressed_from: int | None
    budget_s: float | None


# ---- collectives ----------------------------------------------------------------------------------------------------


class OwnPartGather:
    """An all-gather without communication: each rank copies its own part in place of the others'."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False):
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():
                part.copy_(input_tensor)


class OwnPartScatter(OwnPartGather):
    """A reduce-scatter without communication: each rank keeps its own part of its gradients."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op, async_op=False):
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def set_own_parts(model: nn.Module) -> None:
    for module in (*model.layers, model):
        module.set_custom_all_gather(OwnPartGather())
        module.set_custom_reduce_scatter(OwnPartScatter())


def communicator_of(plan: FsdpPlan, method: str) -> graphar.Communicator:
    """Returns a communicator that compresses, or not. Collective."""
    found = graphar.Communicator(lossless=method == LOSSLESS)
    found.prepare([torch.bfloat16, torch.float32], ops=["allgather", "reducescatter"])  # finds its tuning table
    engine = found.engine
    if method == LOSSLESS:
        policy = engine.table.lossless
        least = {op: plan.compressed_from or policy.least(op, plan.world_size) for op in ("allgather", "reducescatter")}
        sizes = {f"{op}_from_nbytes": {plan.world_size: size or COMPRESSED_FROM} for op, size in least.items()}
        allreduce = {"allreduce_from_nbytes": policy.allreduce_from_nbytes}
        engine.use_table(replace(engine.table, lossless=LosslessPolicy(**sizes, **allreduce)))
    return found


def compressed_by(communicator: graphar.Communicator | None) -> list[str]:
    """Returns the algorithms that have compressed calls of this communicator."""
    runner = communicator.engine.runner if communicator else None
    begun = runner.calls_begun() if runner else {}
    return sorted(one.value for one, (calls,) in begun.items() if one.row.compresses and calls)


# ---- on a rank ------------------------------------------------------------------------------------------------------


class Training:
    """The training of a new model under fully_shard. All steps use the same sequence, another on each rank."""

    def __init__(self, plan: FsdpPlan, method: str, layers: int, ranks: ProcessRanks) -> None:
        self.method, self._ranks, self._size = method, ranks, SIZES[plan.model]
        self.model = sharded(self._size, layers, ranks, plan.reduce_dtype)
        self.communicator = communicator_of(plan, method) if method in (PLAIN, LOSSLESS) else None
        self.blocks = plan.blocks if method == PLAIN else None  # with a limit nothing is compressed
        if self.communicator:
            graphar.fsdp.set_collectives(self.model, self.communicator, blocks=self.blocks)
        elif method == ALONE:
            set_own_parts(self.model)
        self._begin()

    def _begin(self) -> None:
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self._ranks.device.type == "cuda")

    def use_tokens(self, tokens: int) -> None:
        make = torch.Generator(self._ranks.device).manual_seed(self._ranks.rank)
        shape = (2, 1, tokens)
        self._x, self._y = torch.randint(self._size.vocabulary, shape, generator=make, device=self._ranks.device)

    def make_steps(self, count: int, seed: int) -> list[Tensor]:
        """Enqueues ``count`` steps and returns their losses. Nothing is random, so ``seed`` is not used."""
        losses = []
        # Its backward pass can be deterministic. On the CPU there is no choice.
        flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self._x.is_cuda else contextlib.nullcontext()
        with flash:
            for _ in range(count):
                self._optimizer.zero_grad()
                loss = loss_of(self.model(self._x).float(), self._y)
                loss.backward()
                self._optimizer.step()
                losses.append(loss.detach())
        return losses

    def check(self) -> tuple[list[float], str]:
        """Makes the first steps of a new model deterministically. Collective.

        Returns the mean losses, and a hash of the results.
        """
        fill(self.model, self._ranks.rank)  # the steps that were timed before need not be deterministic
        self._begin()
        torch.use_deterministic_algorithms(True, warn_only=True)
        mine = torch.stack(self.make_steps(CHECKED_STEPS, seed=0)).tolist()
        torch.use_deterministic_algorithms(False)
        by_rank: list = [None] * self._ranks.size
        dist.all_gather_object(by_rank, (mine, [number_of(p.to_local()) for p in self.model.parameters()]))
        means = [statistics.fmean(of_step) for of_step in zip(*(losses for losses, _ in by_rank), strict=True)]
        return means, hashlib.sha256(repr(by_rank).encode()).hexdigest()[:16]


def number_of(x: Tensor) -> int:
    """Returns a number that depends on each bit of an fp32 tensor, and on its place."""
    bits = x.detach().flatten().view(torch.int32).long()
    return int((bits * (2 * torch.arange(len(bits), device=x.device) + 1)).sum())


def sharded(size: Size, layers: int, ranks: ProcessRanks, reduce_dtype: str) -> nn.Module:
    """Returns the model under fully_shard, with fp32 parameters that are gathered in bf16."""
    with torch.device("meta"):
        model = Llama(size, layers)
    # RoPE's angles stay fp32.
    policy = MixedPrecisionPolicy(torch.bfloat16, DTYPES[reduce_dtype], cast_forward_inputs=False)
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy)
    model.to_empty(device=ranks.device)
    fill(model, ranks.rank)
    return model


def run_rank(plan: FsdpPlan, rank: int, port: int) -> Iterator[FsdpRow]:
    """Yields the results of one of the ranks."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    ranks.warm_up()
    methods = (dist.get_backend(), PLAIN, LOSSLESS, ALONE)
    layers = plan.layers or layers_that_fit(plan, 1)
    side_by_side = layers <= layers_that_fit(plan, len(methods))
    for turn in [methods] if side_by_side else [(method,) for method in methods]:
        trainings = [Training(plan, method, layers, ranks) for method in turn]
        for tokens in plan.tokens:
            yield from rows_of(plan, tokens, trainings, ranks)
        for training in trainings:
            if training.communicator:
                training.communicator.close()
        del training, trainings
        release(plan.device)
    ranks.level()


def layers_that_fit(plan: FsdpPlan, copies: int) -> int:
    """Returns how many layers fit into a GPU with so many copies of the model, with the most tokens."""
    size = SIZES[plan.model]
    if plan.device == "cpu":
        return size.layers
    nbytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return fitting_layers(size, plan.world_size, max(plan.tokens), nbytes // copies)


def rows_of(plan: FsdpPlan, tokens: int, trainings: Sequence[Training], ranks: ProcessRanks) -> Iterator[FsdpRow]:
    """Yields a row for each training. They take turns, block by block. Collective."""
    checked = []
    for training in trainings:
        training.use_tokens(tokens)
        checked.append(training.check())
        training.make_steps(WARM_UP_STEPS, seed=0)
    times = time_blocks(trainings, plan, ranks, time.perf_counter())
    for training, (losses, digest), blocks_us in zip(trainings, checked, times, strict=True):
        yield FsdpRow(
            method=training.method,
            model=plan.model,
            layers=len(training.model.layers),
            parameters=sum(parameter.numel() for parameter in training.model.parameters()),
            world_size=plan.world_size,
            tokens=tokens,
            reduce_dtype=plan.reduce_dtype,
            blocks=training.blocks,
            compressed=compressed_by(training.communicator),
            step_ms=statistics.median(blocks_us) / BLOCK / 1e3,
            losses=losses,
            digest=digest,
        )


# ---- the topic ------------------------------------------------------------------------------------------------------


@dataclass
class Fsdp(Report):
    rows: list[FsdpRow] = field(default_factory=list)

    name: ClassVar[str] = "fsdp"
    title: ClassVar[str] = "Training with fully_shard (FSDP2)"
    place: ClassVar[int] = 11
    help: ClassVar[str] = "time training steps of a sharded model with torch's and graphar's collectives"
    arguments: ClassVar[Arguments] = Arguments(quick_on_gpus="--layers 4 --steps 10", quick_on_cpu="--steps 10")
    notes: ClassVar[str] = f"""\
Collectives:

- nccl or gloo: torch's own.
- graphar: `graphar.fsdp.set_collectives` with `Communicator(lossless=False)`.
- graphar lossless: the same with compression of bf16, from the size of the tuning table on, or, where the table has
  none, of {COMPRESSED_FROM // MB} MB of the largest part on.
- alone: no communication. In place of a gather, each rank copies its own part where the others' belong; in place of a
  reduce-scatter it copies its own part of its own gradients. Its losses mean nothing.

Columns:

- step: milliseconds of forward, backward and optimiser: the median over blocks of {BLOCK} steps. The time of a block is
  that of the slowest rank. The collectives took turns, block by block, if four copies of the model fit into a GPU;
  otherwise they were measured one after another.
- of_torch: the step's time / that of torch's own collectives; below 1.00 it is faster.
- exposed: the step's time minus that of "alone": communication that is not hidden behind the matmuls, and what it slows
  the matmuls down. It leaves out the copies that "alone" makes in local memory.
- compressed: the algorithms that compressed at least one call so far.
- losses: the mean cross-entropy of the ranks in the first and in step {CHECKED_STEPS}, in nats.

Verified: the first {CHECKED_STEPS} steps were made with deterministic algorithms. In them "graphar lossless" must have
the losses of "graphar" on each rank, and end with the same parameters, bit for bit. Each mean loss with graphar must
lie within {TOLERANCE:.0%} of that with torch's collectives, which may sum in another order and round more often.

The parameters, gradients and moments of AdamW are fp32 and sharded. Parameters are gathered in bf16 for each layer,
in the forward and in the backward pass; the first and last modules have a group together. Weights and tokens are
random, and each rank uses one sequence in every step. On GPUs attention is FlashAttention."""

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--world-size", type=int, metavar="N", help="ranks (default: all GPUs; 2 on the CPU)")
        models = f"{', '.join(SIZES)} (default: {MODEL}; on the CPU {TINY})"
        parser.add_argument("--model", choices=list(SIZES), metavar="MODEL", help=models)
        parser.add_argument("--layers", type=int, metavar="N", help="layers (default: as many as fit)")
        parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="tokens of a rank in a step")
        parser.add_argument(
            "--steps", type=int, metavar="N", help=f"timed steps (default: {STEPS}; {CPU_STEPS} on the CPU)"
        )
        parser.add_argument("--reduce-dtype", choices=list(DTYPES), default="bf16", help="dtype of reduced gradients")
        parser.add_argument("--blocks", type=int, metavar="N", help="the most blocks of an uncompressed call")
        parser.add_argument(
            "--lossless-from", type=parse_nbytes, metavar="SIZE", help="compress from this size of the largest part on"
        )
        parser.add_argument("--seconds", type=float, metavar="S", help="the most seconds of timing of each size")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> FsdpPlan:
        """Returns a plan of Llama 3 8B's layers on GPUs, or of a tiny model on the CPU."""
        on_gpus = gpu_count >= 2
        world_size = options.world_size or (gpu_count if on_gpus else CPU_WORLD_SIZE)
        check_world_sizes([world_size], gpu_count)
        steps = options.steps or (STEPS if on_gpus else CPU_STEPS)
        if steps < BLOCK:
            sys.exit(f"--steps must be at least {BLOCK}, which are timed as one block")
        tokens = tuple(options.tokens or (TOKENS if on_gpus else CPU_TOKENS))
        if min(*tokens, options.layers or 1, options.blocks or 1, options.seconds or 1) <= 0:
            sys.exit("--tokens, --layers, --blocks and --seconds must be positive")
        return FsdpPlan(
            device="cuda" if on_gpus else "cpu",
            world_size=world_size,
            model=options.model or (MODEL if on_gpus else TINY),
            layers=options.layers,
            tokens=tokens,
            steps=steps,
            reduce_dtype=options.reduce_dtype,
            blocks=options.blocks,
            compressed_from=options.lossless_from,
            budget_s=options.seconds,
        )

    @classmethod
    def count(cls, plan: FsdpPlan) -> int:
        return 4 * len(plan.tokens)

    def measure(self, plan: FsdpPlan) -> Iterator[FsdpRow]:
        yield from ranks_of.run(plan.world_size, partial(run_rank, plan))

    def line(self, row: FsdpRow) -> str:
        return f"{row.method:>20}: {row.step_ms:.2f} ms a step of {row.tokens} tokens, loss {row.losses[-1]:.4f}"

    # ---- what is said ----

    def wrong(self) -> list[str]:
        """Returns a message for each training with graphar whose results are not those that it is compared with."""
        return [f"{row.method} at {row.tokens} tokens" for row in self.rows if self.is_wrong(row)]

    def wrong_peers(self) -> list[str]:
        return []

    def checked(self) -> int:
        return sum(row.is_own for row in self.rows)

    def is_wrong(self, row: FsdpRow) -> bool:
        if not row.is_own:
            return False
        alike = [one for one in self.rows if one.case == row.case]
        plain = next((one for one in alike if one.method == PLAIN), row)
        torchs = next((one for one in alike if one.is_torchs), row)
        pairs = zip(row.losses, torchs.losses, strict=True)
        near = all(abs(mine - theirs) <= TOLERANCE * abs(theirs) for mine, theirs in pairs)
        return not near or (row.losses, row.digest) != (plain.losses, plain.digest)

    def findings(self) -> list[str]:
        return [one for rows in by_case(self.rows) if (one := self._finding(rows))]

    def _finding(self, rows: Sequence[FsdpRow]) -> str:
        lossless = next((row for row in rows if row.method == LOSSLESS and not self.is_wrong(row)), None)
        torchs, alone = step_of(rows, "is_torchs"), step_of_alone(rows)
        if lossless is None or torchs is None or alone is None:
            return ""
        return (
            f"{lossless.tokens} tokens a rank: {torchs / lossless.step_ms:.2f} times the speed of torch's collectives; "
            f"without communication it would be {torchs / alone:.2f} times."
        )

    def sections(self) -> list[Section]:
        cases = by_case(self.rows)
        found = [Section(title_of(rows[0]), [self._details(rows)]) for rows in cases]
        if found:
            charts = [step_chart(self.rows), exposed_chart(self.rows)]
            found[0] = replace(found[0], figures=charts)
        return found

    def _details(self, rows: Sequence[FsdpRow]) -> str:
        torchs, alone = step_of(rows, "is_torchs"), step_of_alone(rows)
        header = ["collectives", "step (ms)", "of_torch", "exposed (ms)", "tokens/s", "compressed", "losses (nats)"]
        lines = [
            [
                f"{row.method} **(WRONG)**" if self.is_wrong(row) else row.method,
                f"{row.step_ms:.2f}",
                ratio_cell(torchs and row.step_ms / torchs),
                NOT_SERVED if alone is None or row.method == ALONE else f"{row.step_ms - alone:.2f}",
                f"{row.tokens * row.world_size / row.step_ms * 1e3:,.0f}",
                ", ".join(row.compressed) or NOT_SERVED,
                NOT_SERVED if row.method == ALONE else f"{row.losses[0]:.6f}, {row.losses[-1]:.6f}",
            ]
            for row in rows
        ]
        return table(header, lines)

    def glance(self) -> Glance:
        ratios = {}
        for rows in by_case(self.rows):
            torchs = step_of(rows, "is_torchs")
            for row in rows:
                if torchs and row.is_own and not self.is_wrong(row):
                    ratios[f"{row.method}, {row.tokens} tokens, {row.world_size} ranks"] = row.step_ms / torchs
        return Glance("time of a training step with graphar.fsdp / with torch's own collectives", ratios)

    def timed(self) -> list[Timed]:
        return [
            Timed(
                (row.method, f"{row.world_size} ranks", row.model, f"{row.layers} layers", f"{row.tokens} tokens"),
                row.step_ms * 1e3,
                self.is_wrong(row),
                row.is_own,
            )
            for row in self.rows
        ]


def by_case(rows: Sequence[FsdpRow]) -> list[list[FsdpRow]]:
    """Returns the rows that are compared with each other, case by case."""
    return [list(alike) for _, alike in groupby(sorted(rows, key=lambda row: row.case), key=lambda row: row.case)]


def step_of(rows: Sequence[FsdpRow], which: str) -> float | None:
    """Returns the time of a step; None if there is no such row, for example in a partial run."""
    return next((row.step_ms for row in rows if getattr(row, which)), None)


def step_of_alone(rows: Sequence[FsdpRow]) -> float | None:
    return next((row.step_ms for row in rows if row.method == ALONE), None)


def title_of(row: FsdpRow) -> str:
    shape = f"{row.model}, {row.layers} layers, {row.parameters:,} parameters"
    blocks = f", at most {row.blocks} blocks" if row.blocks else ""
    ranks = f"{row.world_size} ranks, {row.tokens} tokens per rank"
    return f"{shape}: {ranks}, gradients reduced in {row.reduce_dtype}{blocks}"


def step_chart(rows: Sequence[FsdpRow]) -> Rows:
    """Charts the time of a step with graphar's collectives over the time with torch's own."""
    marks = []
    for alike in by_case(rows):
        torchs = step_of(alike, "is_torchs")
        marks += [_mark(row, row.step_ms / torchs) for row in alike if torchs and not row.is_torchs]
    return Rows("Step time / torch's own", marks, Axis("time / time of torch's own", form="{:.2f}".format), 1.0)


def exposed_chart(rows: Sequence[FsdpRow]) -> Rows:
    """Charts the communication that is not hidden."""
    marks = []
    for alike in by_case(rows):
        alone = step_of_alone(alike)
        marks += [_mark(row, row.step_ms - alone) for row in alike if alone and row.method != ALONE]
    return Rows("Exposed communication", marks, Axis("time (ms)"))


def _mark(row: FsdpRow, value: float) -> Mark:
    return Mark(f"{row.tokens} tokens", row.method, value, f"{row.method}: {row.step_ms:.2f} ms a step")
