"""Losses and log-probabilities over a divided vocabulary, executed on the host: the specification's bits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from graphar.numerics import softmax
from graphar.numerics.dtypes import TYPE_NAMES, with_canonical_nan
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.softmax import Terms
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import Scratch
from graphar.plan.work import Loss
from graphar.runtime.bind import loss
from graphar.runtime.catalogue import (
    softmax_backward_source,
    softmax_partials_source,
    softmax_results_source,
    softmax_total_source,
)
from graphar.simulator.build import SANITIZERS, Mutation
from graphar.simulator.simulation import Call, Simulation
from tests.cases import same_bits
from tests.host.build import build, known, seeds
from tests.host.mutant import notices

pytestmark = [pytest.mark.host]

DTYPES = tuple(TYPE_NAMES)
OF_ANY_KIND = Algorithm.ONE_SHOT_PUSH  # any: Simulation requires one
KINDS = ("nothing", "sum_of_logits", "entropy_and_top1")
PARTIALS = [
    (dtype, kind, scaled, spread)
    for dtype in DTYPES
    for kind, scaled in (("nothing", False), ("nothing", True), ("sum_of_logits", False), ("entropy_and_top1", True))
    for spread in (False, True)
]
SUM_THREADS = 64
OF_RESULTS = (*map(softmax_results_source, KINDS), softmax_total_source(SUM_THREADS))
COLUMNS_OF_LEAF = (1, 8, 12, 40, 504, 512, 520, 1024, 2048, 2056, 3001)


@dataclass
class Memory:
    """The input and the output of a call: tensors one after another, and where they begin."""

    given: list[torch.Tensor] = field(default_factory=list)
    at: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    def give(self, name: str, x: torch.Tensor, beside: int = 0) -> None:
        raw = x.contiguous().view(-1).view(torch.uint8)
        begin = sum(one.nbytes for one in self.given) + beside
        self.given += [
            torch.zeros(beside, dtype=torch.uint8),
            raw,
            torch.zeros(-(beside + raw.nbytes) % 16, dtype=torch.uint8),
        ]
        self.at[name], self.nbytes[name] = begin + 1, raw.nbytes

    def take(self, name: str, nbytes: int) -> None:
        begin = sum(-(-self.nbytes[one] // 16) * 16 for one, at in self.at.items() if at >> 62)
        self.at[name], self.nbytes[name] = (1 << 62) + begin + 1, nbytes


def run(program, kernel: int, grid: tuple[int, int], arguments, memory: Memory, seed: int, shared=0, **of_call):
    """Runs a kernel once. Returns the bytes of its output, by name, and how many guards are broken."""
    for name, at in memory.at.items():
        setattr(arguments, name, at)
    outs = {name: at & ~(1 << 62) for name, at in memory.at.items() if at >> 62}
    nbytes = max([1, *(at - 1 + memory.nbytes[name] for name, at in outs.items())])
    call = Call(
        kernel,
        Config(OF_ANY_KIND, *grid),
        [torch.cat(memory.given)],
        (1,),
        (nbytes,),
        operands=(torch.frombuffer(bytearray(arguments), dtype=torch.uint8),),
        places=1,
        **of_call,
    )
    (outcome,) = Simulation(program, OF_ANY_KIND, 1, Scratch(0, 128, 0, shared), 0, seed).run([call])
    result = outcome.results[0]
    return {name: result[at - 1 : at - 1 + memory.nbytes[name]] for name, at in outs.items()}, outcome.broken_guards


def draw_logits(rows: int, columns: int, dtype: torch.dtype, choices: random.Random) -> torch.Tensor:
    """Normal numbers, large ones, equal ones, and rows with special values."""
    generator = torch.Generator().manual_seed(choices.getrandbits(32))
    x = torch.randn(rows, columns, generator=generator) * choices.choice([1, 4, 30, 0])
    for row in range(rows):
        special = choices.choice([None, None, None, -torch.inf, torch.inf, torch.nan, 60000.0, "masked", "equal"])
        if special == "masked":
            x[row, torch.rand(columns, generator=generator) < choices.choice([0.5, 1.0])] = -torch.inf
        elif special == "equal":
            x[row] = 3.0
        elif special is not None:
            x[row, choices.randrange(columns)] = special
    return x.to(dtype)


def draw_work(choices: random.Random, kind: str, rows: int, vocabulary: int, ranks: int, scaled: bool) -> Loss:
    size = choices.choice([vocabulary, choices.randint(1, vocabulary)])
    if kind == "entropy_and_top1" or scaled:
        asked = choices.choice([(True, True), (True, False), (False, True)]) if kind == "entropy_and_top1" else ()
        terms = Terms(size, "log_probs", None, 0.0, 0.0, choices.choice([1.0, 0.7]) if asked else 0.7, *asked)
    else:
        smoothing = 0.1 if kind == "sum_of_logits" else 0.0
        result = choices.choice(["mean", "sum", "none"])
        terms = Terms(size, result, choices.choice([-100, 0]), smoothing, choices.choice([0.0, 1e-4]))
    return Loss("loss", rows, vocabulary // ranks, terms)


def draw_target(work: Loss, vocabulary: int, choices: random.Random) -> torch.Tensor:
    ignored = -100 if work.terms.ignore_index is None else work.terms.ignore_index
    columns = [
        choices.choice([choices.randrange(work.terms.vocab_size)] * 4 + [ignored, vocabulary, -1])
        for _ in range(work.rows)
    ]
    return torch.tensor(columns)


def is_wrong(found: torch.Tensor, wanted: torch.Tensor) -> int:
    return same_bits(with_canonical_nan(found.reshape(-1).view(wanted.dtype)), with_canonical_nan(wanted.reshape(-1)))


def used(numbers: torch.Tensor, width: int, target: torch.Tensor, work: Loss) -> torch.Tensor:
    """Nodes of rows that are not ignored, with zeros of one sign: those of equal maxima may differ."""
    nodes = numbers.view(-1).view(torch.float32)[: width * work.rows].view(-1, width)
    return (nodes + 0.0)[target != work.terms.ignore_index] if work.terms.is_loss else nodes + 0.0


def sum_of_a_row(arguments, partials: torch.Tensor, target: torch.Tensor, work: Loss) -> dict[str, torch.Tensor]:
    """What the kernel of a row's results also writes if the row is the only one of a sum or a mean."""
    if work.rows > 1 or arguments.is_per_row:
        return {}
    total, state, *_ = softmax.finish(partials, target, work.columns, work.terms)
    return {"total": total, "rows with a loss": state[-1:]}


def wrong_results(sanitizer: str, seed: int, mistake: Mutation | None = None, **of_call) -> int:
    """How many numbers and guards are wrong after one rank's partials, or all results of one rank."""
    choices = random.Random(seed)
    at = choices.randrange(len(PARTIALS))
    dtype, kind, scaled, spread = PARTIALS[at]
    ranks, of_leaf = choices.choice([1, 2, 4, 8]), choices.choice(COLUMNS_OF_LEAF)
    rows = choices.randint(1, 4 if spread else 9)  # the simulator has room for 32 blocks in clusters
    work = draw_work(choices, kind, rows, LEAVES * of_leaf, ranks, scaled)
    rank = choices.randrange(ranks)
    first, leaves, cluster = rank * work.columns, LEAVES // ranks, choices.choice([2, 4, 8]) if spread else 1
    x, target = draw_logits(rows, work.columns, dtype, choices), draw_target(work, LEAVES * of_leaf, choices)
    arguments = loss.arguments(work, first, ranks, cluster)
    memory = Memory()
    memory.give("logits", x, choices.choice([0, 0, dtype.itemsize]))
    memory.give("target", target)
    partials = softmax.partial(x, target, first, leaves, work.terms)
    if ranks > 1 or choices.random() < 0.3:
        memory.take("partials", partials.nbytes)
        wanted = {"partials": partials}
    else:
        of_rows = work._replace(terms=work.terms._replace(result="none" if work.terms.is_loss else "log_probs"))
        memory.take("results", 4 * rows)
        found = softmax.finish(partials[None], target, work.columns, of_rows.terms)
        wanted = dict(zip(("results", "state"), found, strict=False))
        wanted |= sum_of_a_row(arguments, partials[None], target, work)
        memory.take("state", 8 * rows + 4 * ("total" in wanted))
        if "total" in wanted:
            memory.take("total", 4)
        for name, one in zip([n for n in ("entropy", "top1") if getattr(work.terms, n)], found[2:], strict=True):
            memory.take(name, one.nbytes)
            wanted[name] = one
    groups = -(-rows * leaves // LEAVES)
    program = build(tuple(softmax_partials_source(*one) for one in PARTIALS), sanitizer, mistake)
    shared = loss.shared_nbytes(kind, LEAVES // cluster)
    grid = groups * cluster, LEAVES // cluster * (softmax.LANES if spread else 32)
    results, broken = run(program, at, grid, arguments, memory, seed, shared, cluster=cluster, **of_call)
    if "rows with a loss" in wanted:
        results["rows with a loss"] = results["state"][-4:]
    for name, width in (("partials", work.terms.width), ("state", 2)):
        if name in wanted:
            results[name], wanted[name] = (
                used(results[name], width, target, work),
                used(wanted[name], width, target, work),
            )
    return sum(is_wrong(results[name], one) for name, one in wanted.items()) + broken


def wrong_sums(sanitizer: str, seed: int, mistake: Mutation | None = None, **of_call) -> int:
    """How many numbers and guards are wrong after the results of gathered partials, and their sum."""
    choices = random.Random(seed)
    at, ranks, rows = (
        choices.randrange(len(KINDS)),
        choices.choice([1, 2, 4, 8]),
        choices.choice([1, 1, 1, 2, 9, 40, 130, 400]),
    )
    work = draw_work(choices, KINDS[at], rows, LEAVES * 4, ranks, False)
    x, target = draw_logits(rows, LEAVES * 4, torch.float32, choices), draw_target(work, LEAVES * 4, choices)
    if choices.random() < 0.6:  # one NaN would hide how rows are added
        x, target = torch.randn(rows, LEAVES * 4), torch.randint(work.terms.vocab_size, (rows,))
        x[0, target[0]] = choices.choice([0.0, 500.0, 500.0])  # the loss is then -0
    parts = x.split(work.columns, 1)
    partials = [
        softmax.partial(one, target, work.columns * r, LEAVES // ranks, work.terms) for r, one in enumerate(parts)
    ]
    of_rows = work.terms._replace(result="none" if work.terms.is_loss else "log_probs")
    losses, state, *more = softmax.finish(torch.stack(partials), target, work.columns, of_rows)
    wanted = {"results": losses, "state": state[:-1]}
    wanted |= dict(zip([n for n in ("entropy", "top1") if getattr(work.terms, n)], more, strict=True))
    memory, arguments = Memory(), loss.arguments(work, 0, ranks)
    wanted |= sum_of_a_row(arguments, torch.stack(partials), target, work)
    memory.give("gathered", torch.stack(partials))
    memory.give("target", target)
    for name, one in wanted.items():
        if name != "rows with a loss":
            memory.take(name, one.nbytes + 4 * (name == "state" and "total" in wanted))
    program = build(OF_RESULTS, sanitizer, mistake)
    found, broken = run(program, at, (-(-rows // 64), 64), arguments, memory, seed, **of_call)
    found["rows with a loss"] = found["state"][-4:]
    found["state"], wanted["state"] = used(found["state"], 2, target, work), used(wanted["state"], 2, target, work)
    wrong = sum(is_wrong(found[name], one) for name, one in wanted.items()) + broken
    if arguments.is_per_row:
        return wrong
    memory, arguments = Memory(), loss.arguments(work, 0, ranks)
    room = torch.zeros(loss.room_for_sums(rows))
    room[:rows] = losses
    memory.give("results", room)
    memory.give("target", target)
    memory.take("state", 4 * (2 * rows + 1))
    memory.take("total", 4)
    found, broken = run(program, 3, (1, SUM_THREADS), arguments, memory, seed, feeds_back=True, **of_call)
    total, state, *_ = softmax.finish(torch.stack(partials), target, work.columns, work.terms)
    return wrong + is_wrong(found["total"], total) + is_wrong(found["state"][-4:], state[-1:])


def wrong_gradients(sanitizer: str, seed: int, mistake: Mutation | None = None, **of_call) -> int:
    """How many elements and guards are wrong after the gradient of one rank's logits, which may be in place."""
    choices = random.Random(seed)
    ranks, rows, of_leaf = choices.choice([1, 2, 4, 8]), choices.randint(1, 5), choices.choice(COLUMNS_OF_LEAF)
    at, kind, slices = choices.randrange(len(DTYPES)), choices.choice(KINDS[:2]), choices.randint(1, 3)
    work = draw_work(choices, kind, rows, LEAVES * of_leaf, ranks, choices.random() < 0.3)
    whole, target = (
        draw_logits(rows, LEAVES * of_leaf, DTYPES[at], choices),
        draw_target(work, LEAVES * of_leaf, choices),
    )
    rank = choices.randrange(ranks)
    first = rank * work.columns
    partials = softmax.partial(whole, target, 0, LEAVES, work.terms)
    state = softmax.finish(partials[None], target, LEAVES * of_leaf, work.terms)[1]
    x = whole[:, first : first + work.columns].contiguous()
    upstream = torch.randn(rows if work.terms.result in ("none", "log_probs") else 1)
    wanted = torch.empty_like(x)
    softmax.gradient(x, target, state, upstream, first, work.terms, wanted)
    memory, arguments = Memory(), loss.arguments(work, first, 1, slices=slices)
    in_place = choices.random() < 0.5
    memory.give("logits", x, choices.choice([0, 0, x.itemsize]))
    for name, one in (("target", target), ("state", state), ("upstream", upstream)):
        memory.give(name, one)
    memory.at["gradient"], memory.nbytes["gradient"] = (1 << 62) + (memory.at["logits"] if in_place else 1), x.nbytes
    sources = tuple(map(softmax_backward_source, DTYPES))
    program = build(sources, sanitizer, mistake)
    grid = rows * slices, choices.choice([32, 64])
    found, broken = run(program, at, grid, arguments, memory, seed, in_place=in_place, **of_call)
    return is_wrong(found["gradient"], wanted) + broken


SEEDS = {
    wrong_results: {"plain": 120, "thread": 6, "address": 24},
    wrong_sums: {"plain": 60, "thread": 6, "address": 20},
    wrong_gradients: {"plain": 80, "thread": 6, "address": 24},
}


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("run_one", SEEDS, ids=lambda one: one.__name__)
def test_kernels_give_the_specifications_bits(run_one, sanitizer):
    for seed in seeds(SEEDS[run_one][sanitizer]):
        assert run_one(sanitizer, seed) == 0, seed


def test_kernels_without_their_wait_for_the_one_before_are_noticed():
    for run_one in SEEDS:
        assert any(run_one("plain", seed, waits=False) for seed in range(6)), run_one.__name__


_HEADER, _PARTIALS = "device/softmax.cuh", "loss/softmax_partials.cu"
_RESULTS, _BACKWARD = "loss/softmax_results.cu", "loss/softmax_backward.cu"
MISTAKES = {
    "an old maximum's scale": (wrong_results, _PARTIALS, "if (i >= softmax_lanes) node", "if (i < softmax_lanes) node"),
    "a step passed over": (wrong_results, _PARTIALS, ": begin + step_packs) +", ": begin + 2 * step_packs) +"),
    "the next lanes' packs": (wrong_results, _PARTIALS, "at += int(next - step.i) * 8;", "at += step_packs * 8;"),
    "a rest that is padding": (wrong_results, _PARTIALS, "if (leaf.ragged && ends)", "if (leaf.ragged && !ends)"),
    "padding that counts": (
        wrong_results,
        _PARTIALS,
        "a.real_columns - min(a.real_columns, begin))",
        "a.leaf_columns)",
    ),
    "a row that is not ignored": (wrong_results, _PARTIALS, "a.may_ignore && target ==", "a.may_ignore && target !="),
    "the last of equal columns": (wrong_results, _PARTIALS, "== all.m) all.top1 = min(", "== all.m) all.top1 = max("),
    "neighbours first": (wrong_results, _PARTIALS, "node[g + half].*number)", "node[g].*number)"),
    "leaves left out": (wrong_results, _PARTIALS, "(u32 step = 1; step < leaves", "(u32 step = 2; step < leaves"),
    "the entropy of an old scale": (
        wrong_results,
        _HEADER,
        "__fmaf_rn(small_s, delta, second",
        "__fmaf_rn(0, delta, second",
    ),
    "far elements that are not clamped": (wrong_results, _PARTIALS, "near = step.is_near(r)", "near = true"),
    "the only row's mean over rows without a loss": (wrong_sums, _HEADER, "rows = !target.ignored;", "rows = 1;"),
    "a smoothing forgotten": (wrong_results, _HEADER, "__dmul_rn(1 - all, -result)", "__dmul_rn(1, -result)"),
    "a rank left out": (wrong_sums, _RESULTS, "if (rank < a.ranks)", "if (rank + 1 < a.ranks)"),
    "another rank's logit": (wrong_sums, _RESULTS, "(owner * a.rows + row)", "row"),
    "zeros that are added": (wrong_sums, _RESULTS, "if (size > 4 * step)", "if (size > 0)"),
    "sums of sums left out": (wrong_sums, _RESULTS, "if (left <= rows_of_warp) break;", "break;"),
    "the target's share": (wrong_gradients, _BACKWARD, "if (i == target_pack)", "if (i + 1 == target_pack)"),
    "gradients of padding": (wrong_gradients, _BACKWARD, ">= a.real_columns) v[e]", "> a.real_columns) v[e]"),
    "a slice too short": (wrong_gradients, _BACKWARD, "(packs + a.slices - 1) / a.slices", "packs / a.slices"),
    "an ignored row's gradient": (wrong_gradients, _BACKWARD, "if (target.ignored) {", "if (!target.valid) {"),
}
known(Mutation(*one[1:]) for one in MISTAKES.values())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake):
    run_one, *change = MISTAKES[mistake]
    assert any(notices(lambda seed=seed: run_one("plain", seed, Mutation(*change))) for seed in range(200))
