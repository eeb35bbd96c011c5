"""run: checks an algorithm at several numbers of ranks, dtypes and seeds, under sanitizers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, permutations, product, starmap
from pathlib import Path

import torch

from graphar import reference
from graphar.plan.algorithms import Algorithm
from graphar.plan.scratch import WORLD_SIZES
from graphar.runtime.arguments import Record
from graphar.simulator.build import SANITIZERS, Mutation, build
from graphar.simulator.calls import Drawn, Subject, draw, find, first_epoch
from graphar.simulator.simulation import KernelFailure, Outcome, Simulation

NUMELS = (1, 7, 8, 9, 1000, 4096)  # beside a pack of 16 bytes, and as many as fill a slot
_MOST_THREADS = 2048  # of a block on all ranks, under ThreadSanitizer, to which each is a thread of its own
UNWRITTEN = 0xA5  # each byte of an output before a call: `guard` in sources/run.cpp
# Kinds of records, as in cuda_src/device/sync/record.cuh.
TIMED_OUT, OVERLAPPED, DISAGREED = 1, 2, 3


@dataclass(frozen=True)
class Case:
    """Simulations that differ in their seed alone."""

    algorithm: Algorithm
    world_size: int
    dtype: torch.dtype
    sanitizer: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.algorithm}, {self.world_size} ranks, {dtype}, {self.sanitizer}"


@dataclass(frozen=True)
class Failure:
    """What went wrong in a case.

    Attributes:
        case: which.
        seed: of the simulation; it repeats the failure with the same sizes.
        numels: the elements of each call's tensor, or of the largest rank's part, in the order of calls.
        call: the call that failed, counted from 0; None if that is not known.
        what: the first thing that was wrong, in words, or a sanitizer's report.
        last_steps: what the threads of each rank did last before that, and what they waited for.
    """

    case: Case
    seed: int
    numels: tuple[int, ...]
    call: int | None
    what: str
    last_steps: str

    @property
    def numel(self) -> int | None:
        """The elements of the call that failed."""
        return None if self.call is None else self.numels[self.call]

    def __str__(self) -> str:
        sizes = f"calls of {', '.join(map(str, self.numels))} elements"
        size = sizes if self.numel is None else f"{self.numel} elements in call {self.call} ({sizes})"
        return f"{self.case}, seed {self.seed}, {size}\n{self.what}\nlast steps:\n{self.last_steps}".rstrip()


@dataclass(frozen=True)
class Report:
    """The result of :func:`run`.

    Attributes:
        algorithm: what was simulated.
        passed: the cases that passed with all seeds.
        failures: one for each case that failed.
        skipped: the cases that were left out, and why.
        time_s: how long it took, in seconds.
    """

    algorithm: Algorithm
    passed: tuple[Case, ...]
    failures: tuple[Failure, ...]
    skipped: tuple[str, ...]
    time_s: float

    @property
    def ok(self) -> bool:
        """Whether all cases passed."""
        return not self.failures

    @property
    def summary(self) -> str:
        """How many cases passed, in how many seconds."""
        cases = len(self.passed) + len(self.failures)
        left_out = f", {len(self.skipped)} were skipped" if self.skipped else ""
        return f"{self.algorithm}: {len(self.passed)} of {cases} cases passed in {self.time_s:.1f} s{left_out}"

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.failures), self.summary])


def run(
    algorithm: str | Algorithm,
    *,
    ranks: Iterable[int] = WORLD_SIZES,
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float32),
    numel: Sequence[int] = NUMELS,
    sanitizers: Iterable[str] = tuple(SANITIZERS),
    seeds: int | Collection[int] = 3,
    mutations: tuple[Mutation, ...] = (),
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Runs the kernels of an algorithm on the CPU, and returns what was wrong.

    A simulation makes calls of all sizes, which follow one another in an order drawn from its seed, on ranks whose
    threads a seeded scheduler picks. Every rank's result is compared with :mod:`graphar.reference`, bit for bit. No
    kernel may write beside its tensors and scratch, wait until its deadline, or wait for ever. The first failure ends
    its case. Needs g++ 12 or newer, and no GPU. Compiled programs are kept in the kernel cache.

    Args:
        algorithm: an all-reduce, reduce-scatter, all-gather or all-to-all without a codec, or what
            :func:`graphar.load_algorithm` returned. The latter keeps its own scratch, and is compared with its own
            specification if it has one.
        ranks: the numbers of ranks, each from 2 to 8.
        dtypes: the dtypes of tensors. Cases with one that the algorithm does not take are skipped.
        numel: the elements of a tensor; of the largest part, if ranks have parts. Scratch is made small enough for the
            largest to fill it.
        sanitizers: "plain" for none; "thread" for ThreadSanitizer; "address" for AddressSanitizer and UBSan.
        seeds: how many seeds each case has, or the seeds themselves.
        mutations: mistakes that are planted in the kernels.
        progress: called after each case with the case in words.

    Returns:
        The cases that passed, a failure for each other one, and the cases that were skipped.

    Raises:
        ValueError: an argument breaks a rule, or no case is left.
        UnsupportedError: there is no g++ 12 or newer with the sanitizers' libraries.
        CompileError: a kernel does not compile for the CPU.
    """
    subject, begin = find(algorithm), time.perf_counter()
    ranks, dtypes, sanitizers = tuple(ranks), tuple(dtypes), tuple(sanitizers)
    every_seed = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    _check(ranks, numel, sanitizers, every_seed)
    served = tuple(count for count in ranks if count in subject.algorithm.row.world_sizes)
    checked = _Checked(subject, served, tuple(filter(subject.takes, dtypes)), tuple(numel), mutations)
    passed, failures, skipped = [], [], []
    for sanitizer, world_size, dtype in product(sanitizers, ranks, dtypes):
        case = Case(subject.algorithm, world_size, dtype, sanitizer)
        if reason := checked.why_not(case):
            skipped.append(f"{case}: {reason}")
        elif failure := checked.failure_of(case, every_seed):
            failures.append(failure)
        else:
            passed.append(case)
        if progress:
            progress(str(case))
    if not passed and not failures:
        raise ValueError(f"run: no case is left: {'; '.join(skipped)}")
    return Report(subject.algorithm, tuple(passed), tuple(failures), tuple(skipped), time.perf_counter() - begin)


def _check(ranks: Sequence[int], numel: Sequence[int], sanitizers: Sequence[str], seeds: Sequence[int]) -> None:
    if not ranks or not set(ranks) <= set(WORLD_SIZES):
        raise ValueError(f"run: ranks must be numbers from {WORLD_SIZES[0]} to {WORLD_SIZES[-1]}, got {ranks}")
    if not numel or min(numel) < 1:
        raise ValueError(f"run: numel must be numbers from 1 on, got {numel}")
    if not sanitizers or not set(sanitizers) <= SANITIZERS.keys():
        raise ValueError(f"run: sanitizers must be some of {', '.join(SANITIZERS)}, got {sanitizers}")
    if not seeds:
        raise ValueError("run: there must be a seed")


@dataclass(frozen=True)
class _Checked:
    """What the cases of one run share."""

    subject: Subject
    ranks: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]  # of the kernels
    numels: tuple[int, ...]
    mutations: tuple[Mutation, ...]

    def why_not(self, case: Case) -> str:
        """Returns why a case cannot be run, or an empty string."""
        if not self.subject.takes(case.dtype):
            return "the algorithm does not take this dtype"
        if case.world_size not in self.ranks:
            return "the algorithm does not serve so many ranks"
        if not self.subject.fitting(self.numels, case.world_size, case.dtype):
            return "the algorithm takes none of these sizes"
        threads = (case.algorithm.row.only_threads or 0) * case.world_size
        if case.sanitizer == "thread" and threads > _MOST_THREADS:
            return f"{threads} threads are too many for ThreadSanitizer"
        return ""

    def failure_of(self, case: Case, seeds: Sequence[int]) -> Failure | None:
        """Returns the failure of the first seed that has one."""
        kernels = chain.from_iterable(starmap(self.subject.sources, product(self.ranks, self.dtypes)))
        program = build(tuple(kernels), case.sanitizer, self.mutations)
        return next(filter(None, (self._failure_of_seed(case, program, seed) for seed in seeds)), None)

    def _failure_of_seed(self, case: Case, program: Path, seed: int) -> Failure | None:
        world_size, dtype = case.world_size, case.dtype
        row = self.subject.row(max(self.numels), dtype, world_size)
        first = self.ranks.index(world_size) * len(self.dtypes) + self.dtypes.index(dtype)
        scratch, first = row.scratch(world_size), first * len(self.subject.variants)
        simulation = Simulation(program, case.algorithm, world_size, scratch, first, seed, first_epoch(seed))
        numels = self.subject.fitting(self.numels, world_size, dtype)
        drawn = draw(self.subject, row, world_size, dtype, numels, seed)
        wrong = _mistakes(simulation, drawn)
        if not wrong:
            return None
        first, other = wrong[0], replace(simulation, seed=seed + 1)
        what, steps = first.what, simulation.last_steps(drawn.calls, first.step)
        value = re.match(r"(rank \d+), call \d+: element", what)
        if value and {mistake.what for mistake in wrong} == {mistake.what for mistake in _mistakes(other, drawn)}:
            what += "; the same under another schedule, so look at values and places, not at the order of threads"
            steps = "".join(re.findall(rf"^{value[1]}:.*\n(?: .*\n)*", steps, re.MULTILINE))
        unit = dtype.itemsize if self.subject.moves_bytes else 1
        sizes = tuple(max(call.counts) // unit for call in drawn.calls)
        return Failure(case, seed, sizes, first.call, what, steps)


def _mistakes(simulation: Simulation, drawn: Drawn) -> list[Mistake]:
    """Returns what went wrong, in the order in which it happened."""
    try:
        return mistakes(drawn.expected, simulation.run(drawn.calls), drawn.terms)
    except KernelFailure as failure:
        return [Mistake(str(failure), None, failure.step)]


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong."""

    what: str  # in words
    call: int | None  # in which call, counted from 0; None if that is not known
    step: int  # the number of the scheduler's step at which it happened, or by which it had


def mistakes(
    expected: Sequence[Sequence[torch.Tensor]],
    outcomes: Sequence[Outcome],
    terms: Callable[[int, int], Sequence[torch.Tensor]] = lambda call, rank: (),
) -> list[Mistake]:
    """Returns all that is wrong, in the order in which it happened.

    ``expected`` is by call and rank. ``terms`` returns the tensors whose sum a rank gets, or none, by call and rank.
    """
    wrong = []
    for rank, outcome in enumerate(outcomes):
        if outcome.record.kind:
            call = sum(end < outcome.gave_up_at for end in outcome.ended_at)
            wrong.append(Mistake(_given_up(rank, call, outcome.record), call, outcome.gave_up_at))
        for call, by_rank in enumerate(expected):
            what = _difference(outcome.results[call], by_rank[rank], terms(call, rank))
            if what:
                wrong.append(Mistake(f"rank {rank}, call {call}: {what}", call, outcome.ended_at[call]))
        beside = {
            "writes beside the tensors or the scratch, or to the input": outcome.broken_guards,
            "polls by blocks that were not marked as busy": outcome.unmarked_polls,
        }
        found = [f"rank {rank}: {count} {what}" for what, count in beside.items() if count]
        wrong += [Mistake(what, None, outcome.ended_at[-1]) for what in found]
    return sorted(wrong, key=lambda mistake: mistake.step)


def _given_up(rank: int, call: int, record: Record) -> str:
    where = f"rank {rank}, call {call}, block {record.block}"
    if record.kind == OVERLAPPED:
        return f"{where}: began while another call ran"
    values = f"0x{record.expected:x}", f"0x{record.seen:x}"
    if record.kind == DISAGREED:
        return f"{where}: calls {values[0]} where rank {record.peer} calls {values[1]}"
    return f"{where}: waited for rank {record.peer} until the deadline; expected {values[0]}, saw {values[1]}"


def _difference(result: torch.Tensor, expected: torch.Tensor, terms: Sequence[torch.Tensor]) -> str:
    """Returns the first wrong element of a result, which is bytes, and how many there are; or an empty string."""
    expected = expected.contiguous().view(-1)
    elements = result.view(-1, expected.itemsize)
    wrong = (elements != expected.view(torch.uint8).view_as(elements)).any(1).nonzero().view(-1)
    if not len(wrong):
        return ""
    at, got = int(wrong[0]), elements[wrong].view(expected.dtype).view(-1)
    unwritten = bool((elements[at] == UNWRITTEN).all())
    text = f"was never written (0x{bytes(elements[at].numpy()).hex()})" if unwritten else f"is {_value(got[:1])}"
    count = f"{len(wrong)} of {len(expected)} are wrong{_reordered(got, [x.reshape(-1)[wrong] for x in terms])}"
    return f"element {at} {text}, expected {_value(expected[at : at + 1])}; {count}"


def _reordered(got: torch.Tensor, terms: Sequence[torch.Tensor]) -> str:
    """Returns in which order the ranks' terms add up to what was got, or an empty string."""
    forward = [tuple(rank % len(terms) for rank in range(at, at + len(terms))) for at in range(len(terms))]
    few = len(terms) < 6
    for order in permutations(forward[0]) if few and terms else (*forward, *(order[::-1] for order in forward)):
        if torch.equal(reference.allreduce([terms[rank] for rank in order]).view(torch.uint8), got.view(torch.uint8)):
            return f": they are the same terms in another order, of ranks {', '.join(map(str, order))}"
    return ""


def _value(number: torch.Tensor) -> str:
    """Returns a number and its bits: 1.5 (0x3fc0)."""
    raw = bytes(number.clone().view(torch.uint8).numpy())
    return f"{number.item():g} (0x{int.from_bytes(raw, 'little'):0{2 * len(raw)}x})"
