"""`python -m perf fsdp`: times training steps under fully_shard (FSDP2) with torch's and graphar's collectives."""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphar
from graphar.plan.sizes import MB, parse_nbytes
from perf import training_steps
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks
from perf.md import NOT_SERVED, columns
from perf.models.decoder import SIZES, TINY, Size
from perf.models.llama import Llama, fill, fitting_layers
from perf.ratios import group
from perf.report import Arguments, Glance, Section
from perf.training_steps import Batch, Trainer

MODEL = "llama-3-8b"
TOKENS, CPU_TOKENS = (2048, 8192), (64,)
CHECKED_STEPS = 5  # steps after which losses and parameters are compared
COMPRESSED_MB = 8  # the smallest size to compress if the tuning table has none
TOLERANCE = 0.02  # the largest relative difference of a loss from the loss with torch's collectives
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PLAIN, LOSSLESS, COPIES = OWN = "graphar", "graphar lossless", "graphar copies"
ZERO_CTA = "nccl zero-CTA"


@dataclass(frozen=True)
class FsdpRow(training_steps.StepRow):
    """The measured training steps of a model with one kind of collectives.

    Attributes:
        method: "nccl" or "gloo": torch's own collectives. "graphar": without compression. "graphar lossless": with
            compression. "graphar copies": by copy engines. "nccl zero-CTA": NCCL's gathers by copy engines. "alone": no
            communication.
        tokens: tokens per rank and step, in one sequence.
        reduce_dtype: the dtype in which gradients are reduced, one of DTYPES.
        blocks: the limit on thread blocks of a call, of "graphar"; None: the default.
        compressed: the algorithms that compressed at least one call.
        losses: the mean loss of all ranks in each of the first CHECKED_STEPS steps, in nats.
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

    wrong: ClassVar[int] = 0  # rows are compared with each other: :meth:`Fsdp.is_wrong`

    @property
    def label(self) -> str:
        """The method, and the limit on thread blocks if it is not the default."""
        return f"{self.method}, {self.blocks} blocks" if self.blocks else self.method

    @property
    def what(self) -> tuple[str, ...]:
        return self.model, f"{self.layers} layers", f"{self.tokens} tokens"

    @property
    def case(self) -> tuple:
        """A key that is equal for rows that are compared with each other."""
        return self.model, self.layers, self.world_size, self.tokens, self.reduce_dtype


@dataclass(frozen=True)
class FsdpPlan:
    """What to measure with one number of ranks.

    Attributes:
        layers: the number of layers. None: as many as fit into memory.
        tokens: tokens per rank and step. Each number is measured.
        blocks: limits on thread blocks of a call, with each of which "graphar" is measured beside its default.
        compressed_from: "graphar lossless" compresses gathers whose largest shard has at least this many bytes. None:
            the tuning table decides.
        budget_s: the time limit for each number of tokens in seconds. No steps are timed after it. None: no limit.
        zero_cta: whether to measure NCCL's gathers by copy engines, too.
    """

    device: str
    world_size: int
    model: str
    layers: int | None
    tokens: tuple[int, ...]
    steps: int
    reduce_dtype: str
    blocks: tuple[int, ...]
    compressed_from: int | None
    budget_s: float | None
    zero_cta: bool = False


# torch 2.13 renamed these functions.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collective:
    """A collective of fully_shard, made by a function as torch.distributed's are called."""

    def __init__(self, run: Callable) -> None:
        self._run = run

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **how):
        return self._run(output_tensor, input_tensor, group=group, **how)


class ZeroCtaAllGather(Collective):
    """NCCL's all-gather by copy engines: with the policy that takes no SM, into memory that its group has registered.

    Making it is collective. Multicast stays off: see NO_MULTICAST of perf.harness.ranks.
    """

    def __init__(self) -> None:
        super().__init__(_gather)
        options = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
        self._group = dist.new_group(backend="nccl", pg_options=options)
        device = torch.device("cuda", torch.cuda.current_device())
        dist.all_reduce(torch.ones(1, device=device), group=self._group)  # connects it, which registering needs
        backend = self._group._get_backend(device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(self._pool, symm=True)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.use_mem_pool(self._pool):
            return super().allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **how):
        return super().__call__(output_tensor, input_tensor, self._group, **how)


def local_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup, **how) -> None:
    """Gathers without communication. Each rank copies its own shard into the place of every other shard."""
    for rank, part in enumerate(output.chunk(group.size())):
        if rank != group.rank():
            part.copy_(shard)


def local_scatter(output: Tensor, gradients: Tensor, group: dist.ProcessGroup, **how) -> None:
    """Reduces and scatters without communication. Each rank copies its shard of its own gradients."""
    output.copy_(gradients.chunk(group.size())[group.rank()])


@dataclass(frozen=True)
class Kind:
    """One kind of collectives: its name, graphar's limit on thread blocks and communicator, or a peer's all-gather."""

    method: str
    blocks: int | None = None
    communicator: graphar.Communicator | None = None
    gather: ZeroCtaAllGather | None = None

    def use_in(self, model: nn.Module) -> None:
        """Makes a model that was given to fully_shard use these collectives."""
        if self.communicator:
            algorithm = "copies" if self.method == COPIES else "kernels"
            graphar.fsdp.set_collectives(model, self.communicator, blocks=self.blocks, algorithm=algorithm)
            return
        # fully_shard has no call that would bring its own collectives back after others, so torch's are set too.
        local = self.method == training_steps.ALONE
        gather, scatter = (local_gather, local_scatter) if local else (_gather, _scatter)
        for module in (*model.layers, model):
            module.set_custom_all_gather(self.gather or Collective(gather))
            module.set_custom_reduce_scatter(Collective(scatter))


def make_kinds(plan: FsdpPlan) -> list[Kind]:
    plain, lossless, copies = (communicator_of(plan, method) for method in OWN)
    limited = [Kind(PLAIN, blocks, plain) for blocks in plan.blocks]  # calls with a limit are not compressed
    of_graphar = [Kind(PLAIN, communicator=plain), *limited, Kind(LOSSLESS, communicator=lossless)]
    of_graphar.append(Kind(COPIES, communicator=copies))
    peer = [Kind(ZERO_CTA, gather=ZeroCtaAllGather())] if plan.zero_cta else []
    return [Kind(dist.get_backend()), *peer, *of_graphar, Kind(training_steps.ALONE)]


def communicator_of(plan: FsdpPlan, method: str) -> graphar.Communicator:
    """Returns a communicator with or without lossless compression. Collective."""
    communicator = graphar.Communicator(lossless=method == LOSSLESS)
    communicator.prepare([torch.bfloat16, torch.float32], ops=["allgather", "reducescatter"])  # finds its tuning table
    engine = communicator.engine
    if method == LOSSLESS:
        policy = engine.table.lossless
        least = plan.compressed_from or policy.least("allgather", plan.world_size) or COMPRESSED_MB * MB
        policy = replace(policy, allgather_from_nbytes={plan.world_size: least})
        engine.use_table(replace(engine.table, lossless=policy))
    return communicator


def compressed_by(communicator: graphar.Communicator | None) -> list[str]:
    runner = communicator.engine.runner if communicator else None
    begun = runner.calls_begun() if runner else {}
    return sorted(algorithm.value for algorithm, (calls,) in begun.items() if algorithm.row.compresses and calls)


def trainer_of(plan: FsdpPlan, layers: int, ranks: ProcessRanks) -> Trainer:
    """Returns the trainer of a model under fully_shard. Parameters are fp32 and are gathered in bf16. Collective."""
    on_gpu = ranks.device.type == "cuda"
    # FlashAttention's backward pass can be deterministic. The CPU has only one kernel.
    attention = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION) if on_gpu else nullcontext
    with torch.device("meta"):
        model = Llama(SIZES[plan.model], layers)
    # RoPE's angles stay fp32.
    policy = MixedPrecisionPolicy(torch.bfloat16, DTYPES[plan.reduce_dtype], cast_forward_inputs=False)
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy)
    model.to_empty(device=ranks.device)
    fill(model, ranks.rank)
    return Trainer(model, fused=on_gpu, around=attention)


def random_batch(size: Size, tokens: int, ranks: ProcessRanks) -> Batch:
    """Returns a random sequence and its random next tokens. They differ from rank to rank."""
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    x, y = torch.randint(size.vocabulary, (2, 1, tokens), generator=generator, device=ranks.device)
    return x, y


def make_steps(trainer: Trainer, kind: Kind | None, batch: Batch, count: int, seed: int) -> None:
    """Enqueues ``count`` steps with one kind of collectives. None: the collectives that the model has."""
    if kind:
        kind.use_in(trainer.model)
    trainer.make_steps(batch, count, seed)


def check(trainer: Trainer, kind: Kind | None, batch: Batch, ranks: ProcessRanks) -> tuple[list[float], str]:
    """Trains the initial model for CHECKED_STEPS deterministic steps. Collective.

    Returns the mean losses, and a hash of losses and parameters.
    """
    fill(trainer.model, ranks.rank)
    trainer.forget()
    torch.use_deterministic_algorithms(True)  # with warn_only, FlashAttention's backward pass would not be
    make_steps(trainer, kind, batch, CHECKED_STEPS, seed=0)
    torch.use_deterministic_algorithms(False)
    mine = torch.stack(trainer.losses).tolist()
    by_rank: list = [None] * ranks.size
    dist.all_gather_object(by_rank, (mine, [checksum(p.to_local()) for p in trainer.model.parameters()]))
    means = [statistics.fmean(of_step) for of_step in zip(*(losses for losses, _ in by_rank), strict=True)]
    return means, hashlib.sha256(repr(by_rank).encode()).hexdigest()[:16]


def checksum(x: Tensor) -> int:
    """Returns a checksum of an fp32 tensor. It depends on the position of every bit."""
    bits = x.detach().flatten().view(torch.int32).long()
    return int((bits * (2 * torch.arange(len(bits), device=x.device) + 1)).sum())


def run_rank(plan: FsdpPlan, rank: int, port: int) -> Iterator[FsdpRow]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    ranks.warm_up()
    trainer, kinds = trainer_of(plan, plan.layers or layers_that_fit(plan), ranks), make_kinds(plan)
    for tokens in plan.tokens:
        yield from rows_of(plan, tokens, trainer, kinds, ranks)
    for communicator in dict.fromkeys(kind.communicator for kind in kinds if kind.communicator):
        communicator.close()  # in one order on all ranks
    ranks.barrier()


def layers_that_fit(plan: FsdpPlan) -> int:
    size = SIZES[plan.model]
    if plan.device == "cpu":
        return size.layers
    nbytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return fitting_layers(size, plan.world_size, max(plan.tokens), nbytes)


def rows_of(
    plan: FsdpPlan, tokens: int, trainer: Trainer, kinds: Sequence[Kind], ranks: ProcessRanks
) -> Iterator[FsdpRow]:
    """Yields a row for each kind. Kinds take turns in one model, block by block. Collective."""
    batch = random_batch(SIZES[plan.model], tokens, ranks)
    checked, turns = [], [partial(make_steps, trainer, kind, batch) for kind in kinds]
    for kind, make_turn in zip(kinds, turns, strict=True):
        checked.append(check(trainer, kind, batch, ranks))
        make_turn(training_steps.WARM_UP_STEPS, seed=0)
    times = training_steps.time_blocks(turns, plan, ranks, time.perf_counter())
    for kind, (losses, digest), blocks_us in zip(kinds, checked, times, strict=True):
        yield FsdpRow(
            method=kind.method,
            model=plan.model,
            layers=len(trainer.model.layers),
            parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
            world_size=plan.world_size,
            tokens=tokens,
            reduce_dtype=plan.reduce_dtype,
            blocks=kind.blocks,
            compressed=compressed_by(kind.communicator),
            step_ms=training_steps.step_ms_of(blocks_us),
            losses=losses,
            digest=digest,
        )


@dataclass
class Fsdp(training_steps.TrainingReport):
    rows: list[FsdpRow] = field(default_factory=list)

    order: ClassVar[int] = 15
    arguments: ClassVar[Arguments] = Arguments(quick_on_gpus="--layers 4 --steps 10", quick_on_cpu="--steps 10")
    work: ClassVar = staticmethod(run_rank)
    steps_on_gpus: ClassVar[int] = 30
    steps_on_cpu: ClassVar[int] = 30

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        models = f"{', '.join(SIZES)} (default: {MODEL}; on the CPU {TINY})"
        parser.add_argument("--model", choices=list(SIZES), metavar="MODEL", help=models)
        parser.add_argument("--layers", type=int, metavar="N", help="layers (default: as many as fit into memory)")
        parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="tokens per rank and step")
        parser.add_argument("--reduce-dtype", choices=list(DTYPES), default="bf16", help="dtype of reduced gradients")
        blocks = "limits on thread blocks of an uncompressed call to measure beside the default"
        parser.add_argument("--blocks", type=int, nargs="+", metavar="N", default=[], help=blocks)
        parser.add_argument(
            "--lossless-from", type=parse_nbytes, metavar="SIZE", help="smallest size of the largest shard to compress"
        )
        parser.add_argument("--seconds", type=float, metavar="S", help="time limit for each number of tokens")
        parser.add_argument("--zero-cta", action="store_true", help="also NCCL's gathers by copy engines, on GPUs")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> FsdpPlan:
        device, world_size, steps = cls.world(options, gpu_count)
        tokens = tuple(options.tokens or (TOKENS if device == "cuda" else CPU_TOKENS))
        positive = (*tokens, *options.blocks, options.layers, options.seconds)
        training_steps.check_blocks(steps, positive, "--tokens, --layers, --blocks and --seconds")
        return FsdpPlan(
            device=device,
            world_size=world_size,
            model=options.model or (MODEL if device == "cuda" else TINY),
            layers=options.layers,
            tokens=tokens,
            steps=steps,
            reduce_dtype=options.reduce_dtype,
            blocks=tuple(options.blocks),
            compressed_from=options.lossless_from,
            budget_s=options.seconds,
            zero_cta=options.zero_cta,
        )

    @classmethod
    def count(cls, plan: FsdpPlan) -> int:
        return (5 + plan.zero_cta + len(plan.blocks)) * len(plan.tokens)

    def line(self, row: FsdpRow) -> str:
        return f"{row.label:>20}: {row.step_ms:.2f} ms a step of {row.tokens} tokens, loss {row.losses[-1]:.4f}"

    def where(self, row: FsdpRow) -> str:
        return f"{row.label} at {row.tokens} tokens"

    def checked(self) -> int:
        return sum(row.is_own for row in self.rows)

    def is_wrong(self, row: FsdpRow) -> bool:
        if not row.is_own:
            return False
        of_case = [other for other in self.rows if other.case == row.case]
        plain = next((other for other in of_case if other.method == PLAIN), row)
        torchs = next((other for other in of_case if other.is_baseline), row)
        pairs = zip(row.losses, torchs.losses, strict=True)
        near = all(abs(mine - theirs) <= TOLERANCE * abs(theirs) for mine, theirs in pairs)
        return not near or (row.losses, row.digest) != (plain.losses, plain.digest)

    def findings(self) -> list[str]:
        return [sentence for rows in by_case(self.rows) if (sentence := self._finding(rows))]

    def _finding(self, rows: Sequence[FsdpRow]) -> str:
        """Returns a sentence on the fastest of graphar's methods; empty if there is nothing to compare it with."""
        right = [row for row in rows if row.is_own and not self.is_wrong(row)]
        torchs, alone = training_steps.baseline_ms(rows), training_steps.alone_ms(rows)
        if not right or torchs is None or alone is None:
            return ""
        fastest = min(right, key=lambda row: row.step_ms)
        return (
            f"{fastest.tokens} tokens per rank: with {fastest.label} a step takes {fastest.step_ms / torchs:.2f} of"
            f" the time with torch's collectives; without communication it would take {alone / torchs:.2f}."
        )

    def sections(self) -> list[Section]:
        return [Section(title_of(rows[0]), [self._details(rows)]) for rows in by_case(self.rows)]

    def _details(self, rows: Sequence[FsdpRow]) -> str:
        alone = training_steps.alone_ms(rows)
        cells = {
            "collectives": lambda row: f"{row.label} **(WRONG)**" if self.is_wrong(row) else row.label,
            "step (ms)": lambda row: f"{row.step_ms:.2f}",
            "of_torch": lambda row: training_steps.of_torch(row, rows),
            "exposed (ms)": lambda row: NOT_SERVED if alone is None or row.is_alone else f"{row.step_ms - alone:.2f}",
            "tokens/s": lambda row: f"{row.tokens * row.world_size / row.step_ms * 1e3:,.0f}",
            "compressed": lambda row: ", ".join(row.compressed) or NOT_SERVED,
            "losses (nats)": lambda row: NOT_SERVED if row.is_alone else f"{row.losses[0]:.6f}, {row.losses[-1]:.6f}",
        }
        return columns(rows, cells)

    def glance(self) -> Glance:
        ratios = {}
        for rows in by_case(self.rows):
            torchs = training_steps.baseline_ms(rows)
            for row in rows:
                if torchs and row.is_own and not self.is_wrong(row):
                    ratios[f"{row.label}, {row.tokens} tokens, {row.world_size} ranks"] = row.step_ms / torchs
        return Glance("time of a training step with graphar.fsdp / with torch's own collectives", ratios)


def by_case(rows: Sequence[FsdpRow]) -> list[list[FsdpRow]]:
    return [of_case for _, of_case in sorted(group(rows, lambda row: row.case).items())]


def title_of(row: FsdpRow) -> str:
    shape = f"{row.model}, {row.layers} layers, {row.parameters:,} parameters"
    ranks = f"{row.world_size} ranks, {row.tokens} tokens per rank"
    return f"{shape}: {ranks}, gradients reduced in {row.reduce_dtype}"
