"""`python -m perf norms`: times a fused all-reduce, residual and RMSNorm, and an all-reduce with a separate norm."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

import graphar
from perf.between_ranks import BetweenRanks
from perf.charts import TIME, Axis, Line, Plot
from perf.choices import choices
from perf.harness import ranks as ranks_of
from perf.harness import verify
from perf.harness.cases import Plan
from perf.harness.ranks import ProcessRanks, Ranks, agreed, timed_in_turn
from perf.harness.timing import Repeated, deciles
from perf.md import method_table, plural
from perf.models.decoder import EPS, add_and_norm, compiled
from perf.peers import catalogue
from perf.peers.flashinfer import load_trtllm
from perf.ratios import by_method, group, of_best_peer, of_largest_world, words_for
from perf.report import Choice, Deciles, Glance, Section, Timing

HIDDEN, TOKENS = 8192, (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CPU_HIDDEN, CPU_TOKENS = 1024, (1, 16, 256)
OFFSET = 0.0
CALLS, REPEATS = 20, {"cuda": 15, "cpu": 4}
SMALL = 2.0**-30  # scale of the timed input: CALLS consecutive sums in place must stay finite
OWN, OWN_FP8, NORM = "graphar", "graphar fp8", " + norm"
OUTPUTS = {OWN: None, OWN_FP8: torch.float8_e4m3fn}


@dataclass(frozen=True)
class NormRow(Timing):
    """The measured and verified time of one method.

    Attributes:
        method: "graphar", "graphar fp8", or the name of a peer.
        tokens, hidden: rows and columns of the bf16 input.
    """

    method: str
    world_size: int
    tokens: int
    hidden: int
    time_us: Deciles
    wrong: int

    @property
    def what(self) -> tuple[str, ...]:
        return plural(self.tokens, "token"), f"hidden size {self.hidden}"


@dataclass(frozen=True)
class NormPlan:
    device: str
    world_size: int
    hidden: int
    tokens: tuple[int, ...]


Call = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]  # (input, residual, weight) -> (normed, residual)


def run_rank(plan: NormPlan, rank: int, port: int) -> Iterator[NormRow | str]:
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    ranks.warm_up()
    methods, skipped = make_methods(plan, ranks)
    yield from skipped
    for tokens in plan.tokens:
        yield from rows_of(plan, tokens, methods, ranks)
    ranks.barrier()


def make_methods(plan: NormPlan, ranks: ProcessRanks) -> tuple[dict[str, Call], list[str]]:
    """Returns the methods by name, and why some are missing. Collective."""
    on_gpu = plan.device == "cuda"
    norm = compiled(add_and_norm) if on_gpu else add_and_norm
    sums = ("nccl" if on_gpu else "gloo", "graphar")
    largest = max(plan.tokens) * plan.hidden * 2
    alone = Plan(plan.device, plan.world_size, "process", ("bfloat16",), sums, largest)
    sums_made, skipped = catalogue.make_methods(alone, ranks)
    fused = partial(graphar.allreduce_residual_rmsnorm, eps=EPS)
    calls: dict[str, Call] = {name: partial(fused, out_dtype=output) for name, output in OUTPUTS.items()}
    for method in sums_made:
        calls[method.name + NORM] = partial(after_sum, method.call, norm)
    if on_gpu:
        _, reason = agreed(ranks, lambda: ranks.first_rank_first(partial(load_trtllm, alone)))
        if not reason:
            theirs, reason = agreed(ranks, partial(make_flashinfer, plan, ranks))
            calls |= theirs or {}
        skipped += [f"flashinfer: {reason}"] if reason else []
    return calls, skipped


def after_sum(call: Callable[[Tensor], Tensor], norm: Call, x: Tensor, residual: Tensor, weight: Tensor):
    return norm(call(x.view(-1)).view_as(x), residual, weight)


def make_flashinfer(plan: NormPlan, ranks: ProcessRanks) -> dict[str, Call]:
    """Returns FlashInfer's fused kernels, one-shot and two-shot, by name."""
    from flashinfer import comm

    workspace = comm.create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=plan.world_size,
        rank=ranks.rank,
        max_token_num=max(plan.tokens),
        hidden_dim=plan.hidden,
        dtype=torch.bfloat16,
        gpus_per_node=plan.world_size,
    )

    def call(x: Tensor, residual: Tensor, weight: Tensor, one_shot: bool) -> tuple[Tensor, Tensor]:
        normed, summed = torch.empty_like(x), torch.empty_like(x)
        comm.allreduce_fusion(
            x,
            workspace,
            comm.AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl=True,
            residual_in=residual,
            residual_out=summed,
            norm_out=normed,
            rms_gamma=weight,
            rms_eps=EPS,
            use_oneshot=one_shot,
        )
        return normed, summed

    return {f"flashinfer_{name}": partial(call, one_shot=name == "one_shot") for name in ("one_shot", "two_shot")}


def serves(method: str, tokens: int, world_size: int) -> bool:
    return method != "flashinfer_two_shot" or tokens > world_size


def rows_of(plan: NormPlan, tokens: int, methods: dict[str, Call], ranks: ProcessRanks) -> Iterator[NormRow]:
    xs = [normal(rank, (tokens, plan.hidden), ranks.device) for rank in range(plan.world_size)]
    residual, weight = (
        normal(100 + at, shape, ranks.device) for at, shape in enumerate(((tokens, plan.hidden), (plan.hidden,)))
    )
    expected = {
        name: graphar.reference.allreduce_residual_rmsnorm(xs, residual, weight, EPS, OFFSET, output)
        for name, output in OUTPUTS.items()
    }
    here = f"{plan.world_size} ranks, {tokens} tokens"
    trials = (
        (f"{name}, {here}", Trial(call, xs[ranks.rank], residual, weight, name))
        for name, call in methods.items()
        if serves(name, tokens, plan.world_size)
    )
    mode = "graph" if plan.device == "cuda" else "cpu"
    timed, refused = timed_in_turn(ranks, trials, REPEATS[plan.device], mode, CALLS)
    yield from refused
    limits, mine = bounds(xs, residual, weight, expected[OWN]), []
    for trial, launch, _ in timed:
        results, drift = trial.results_of(launch, xs[ranks.rank], ranks)
        if trial.name in expected:
            mine.append(verify.count_differing(results, expected[trial.name]))
        else:
            mine.append(verify.count_far(results, expected[OWN], [drift * limit for limit in limits]))
    for (trial, _, times), wrong in zip(timed, ranks.total(mine), strict=True):
        yield NormRow(trial.name, plan.world_size, tokens, plan.hidden, deciles(times), wrong)


def normal(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def bounds(xs: Sequence[Tensor], residual: Tensor, weight: Tensor, expected: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Returns the allowed errors of a method that rounds at every hop, for normalised rows and for sums.

    The error of a sum may be a share of the sum of magnitudes, as for every all-reduce. The norm multiplies this error
    by weight / root mean square of the row, and rounds once more.
    """
    normed, summed = (tensor.float() for tensor in expected)
    magnitude = sum((x.float().abs() for x in xs), residual.float().abs())
    of_sum = magnitude * verify.tolerance(residual.dtype)
    rms = (summed.square().mean(-1, keepdim=True) + EPS).sqrt()
    return [of_sum * weight.float().abs() / rms + normed.abs() * torch.finfo(residual.dtype).eps, of_sum]


class Trial(Repeated):
    """Runs one method on one rank's data. Captured graphs read ``x``."""

    def __init__(self, call: Call, x: Tensor, residual: Tensor, weight: Tensor, name: str = "") -> None:
        self.name = name
        self.refusals = () if name.startswith(OWN) else (Exception,)  # graphar must serve every case
        self._small = x * SMALL
        self.x = self._small.clone()
        super().__init__(partial(call, self.x, residual, weight), CALLS, x.is_cuda)

    def refill(self) -> None:
        """Restores the input, which in-place calls overwrote."""
        self.x.copy_(self._small)

    def results_of(self, launch: Callable[[], None], x: Tensor, ranks: Ranks) -> tuple[tuple[Tensor, ...], float]:
        """Runs the timed launch on ``x``. Returns the last call's results and a factor for error bounds. Collective.

        If calls sum in place, each sum is the input of the next call. The first input is then scaled down, so that the
        last call's input is ``x`` itself. The factor allows for the errors of the earlier calls.
        """
        self._launch_on(launch, x, ranks)
        (changed,) = ranks.total([int(not torch.equal(self.x, x))])
        if not changed:
            return self.result, 1.0
        self._launch_on(launch, (x.double() * float(ranks.size) ** (1 - CALLS)).to(x.dtype), ranks)
        return self.result, verify.drift(ranks.size)

    def _launch_on(self, launch: Callable[[], None], x: Tensor, ranks: Ranks) -> None:
        self.x.copy_(x)
        for result in self.result:
            result.view(torch.uint8).fill_(0xFF)  # NaNs
        ranks.barrier()
        launch()
        ranks.barrier()


@dataclass
class Norms(BetweenRanks):
    rows: list[NormRow] = field(default_factory=list)

    order: ClassVar[int] = 4
    has_spread: ClassVar[bool] = True
    work: ClassVar = staticmethod(run_rank)

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        columns = f"hidden size (default: {HIDDEN}; {CPU_HIDDEN} on the CPU)"
        parser.add_argument("--hidden", type=int, metavar="H", help=columns)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[NormPlan]:
        device, hidden, tokens = ("cuda", HIDDEN, TOKENS) if gpu_count >= 2 else ("cpu", CPU_HIDDEN, CPU_TOKENS)
        world_sizes = cls.world_sizes(options, gpu_count)
        return [NormPlan(device, world_size, options.hidden or hidden, tokens) for world_size in world_sizes]

    def findings(self) -> list[str]:
        loss = self.loss_of_auto()
        return [f"graphar's time / the time of graphar's sum and a norm of torch is at most {loss}."] if loss else []

    def losses(self) -> list[tuple[str, Choice]]:
        chosen = choices(by_method(self.rows, case_of), {OWN: f"{OWN}{NORM}".__eq__})
        return [(in_words(case), choice) for (case, _), choice in chosen.items()]

    def sections(self) -> list[Section]:
        sections = []
        for world_size, mine in group(self.rows, lambda row: row.world_size).items():
            cases = {str(tokens): rows for tokens, rows in by_method(mine, lambda row: row.tokens).items()}
            title = f"{world_size} ranks, hidden size {mine[0].hidden}"
            sections.append(Section(title, [method_table("tokens", cases)], [times(mine)]))
        return sections

    def glance(self) -> Glance:
        ratios = of_best_peer(by_method(self.rows, case_of))
        named = {in_words(case): value for case, value in ratios.items()}
        over = words_for([row.method for row in self.rows if row.is_peer])
        return Glance(f"graphar's time / the time of {over}, by number of tokens", named)

    def figure_of_times(self) -> Plot:
        return times(of_largest_world(self.rows))


def case_of(row: NormRow) -> tuple[int, int]:
    return row.world_size, row.tokens


def in_words(case: tuple[int, int]) -> str:
    return f"{plural(case[1], 'token')}, {case[0]} ranks"


TOKEN_AXIS = Axis("tokens", 2)


def times(rows: Sequence[NormRow]) -> Plot:
    lines = []
    for method, mine in group(rows, lambda row: row.method).items():
        band = [(row.time_us["p10"], row.time_us["p90"]) for row in mine]
        wrong = frozenset(at for at, row in enumerate(mine) if row.wrong)
        lines.append(Line(method, [(row.tokens, row.median) for row in mine], band, wrong))
    note = "Lines are medians, bands are the 10th to 90th percentile."
    return Plot("Time by tokens", lines, TOKEN_AXIS, TIME, note=note)
