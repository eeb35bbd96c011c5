"""Ranks whose threads run programs over memory in which stores arrive late.

What a kernel may rely on, and all that this model grants it:

(a) A word is held by one rank, in the L2 cache of its GPU. It has one value at a time, and a load sees that value.
(b) A thread issues its stores in program order, and each is performed at any time later. A pack is four words, which may
    arrive apart. Only stores of one thread to one word are performed in the order of issue.
(c) What depends on the value of a load is issued after that load. A wait is a load that is repeated.
(d) A release store is performed after all stores that its block has issued before, to whichever rank. What follows an
    acquire load and a barrier sees what was performed before the release store that the load has seen.
(e) A kernel begins when the rank's kernel before it has ended in all threads, and what these have stored to their own
    rank is performed. Of their stores to other ranks this says nothing.
(f) A bulk copy reads at any time until it was waited for, and counts as a store of the thread only from then on. Before,
    a release store does not wait for it.

In terms of PTX: (a) and (b) are coherence of relaxed.sys accesses, whose vectors are sets of scalars; (d) is st.release.sys
and ld.acquire.sys, which are cumulative; (e) is griddepcontrol.wait, or the order of a stream. PTX orders more: stores of
one rank's successive kernels to one word, and a kernel's last stores to other ranks.

One thing PTX's axioms do not say, and (3) of device/sentinel.cuh rests on it: time passes for all words alike. Where a
store was performed before another one was issued, it comes first in the order of their word, also where only relaxed
accesses lead from the one to the other; by the axioms alone, that takes a release and an acquire. It follows from (a): a
home that has performed one store performs what arrives later after it.

Data that nobody has read may not be overwritten, by anything: every store is checked for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tests.model import programs as do
from tests.model.explore import Violation


class Item(NamedTuple):
    """A store under way.

    Attributes:
        word: index of the word it goes to.
        value: what that will hold.
        release: of a release store, the number of the operation that issued it; None for others.
        source: of a bulk copy, the index of the word that it reads; None for others.
    """

    word: int
    value: str | int | None
    release: int | None = None
    source: int | None = None

    @property
    def words(self) -> int:
        """A bit for each word that it concerns."""
        return 1 << self.word | (0 if self.source is None else 1 << self.source)


class State(NamedTuple):
    """A moment of a run.

    Attributes:
        at: each thread's next operation.
        memory: each word's value.
        unread: a bit for each word with data that nobody has read.
        pending: each thread's stores that are under way, in the order of issue.
        aborted: a bit for each rank one of whose waits has expired.
    """

    at: tuple[int, ...]
    memory: tuple
    unread: int
    pending: tuple[tuple[Item, ...], ...]
    aborted: int


COUNTING = (do.Wait, do.WaitForPhase, do.Arrive)
# What commutes with every move of every other thread and stays possible once it is, unless it performs stores.
AT_ONCE = (do.Begin, do.Store, do.Signal, do.Wait, do.Copy, do.WaitForCopies)

Step = Callable[[State], "State | Violation | None"]  # None: not yet


class Machine:
    """A model for :func:`explore`: every wait is a move that is possible once its condition holds.

    The search is spared runs that differ in nothing that can be seen. What commutes with all other moves is made at once
    and alone (AT_ONCE, but for the rank that may die first). A store is performed only when it matters: when some thread's next operation concerns its word,
    a store of another thread to that word is under way, a release store or the end of a kernel or of a wait for copies
    brings it along, or all have ended. Until then no other move depends on it. (In the terms of partial-order reduction,
    what is left are persistent sets, and there are no cycles in which anything could be put off for ever.)

    Args:
        threads: what runs.
        initial: data that words hold at the start, unread; others begin as 'not yet', or 0 where they count.
        deadlines: whether waits on peers may expire, at any time while their condition does not hold.
        dies: a rank that may end for good at any time; what it has stored may still arrive.
        reduced: whether to leave out what can make no difference.
    """

    def __init__(
        self,
        threads: Sequence[do.Thread],
        initial: Mapping[do.Word, str] | None = None,
        *,
        deadlines: bool = False,
        dies: int | None = None,
        reduced: bool = True,
    ) -> None:
        self.threads, self.deadlines, self.dies, self.reduced = threads, deadlines, dies, reduced
        self._initial = initial or {}
        self._words: dict[do.Word, int] = {}
        self._steps = [
            [self._compile(t, i, one) for i, one in enumerate(thread.program)] for t, thread in enumerate(threads)
        ]
        at_once = () if not reduced else AT_ONCE if deadlines else (*AT_ONCE, do.LeaveIfAborted)
        self._at_once = [
            [isinstance(one, at_once) and thread.rank != dies for one in thread.program] for thread in threads
        ]
        self._concerns = [[*map(self._concerned, thread.program), 0] for thread in threads]
        self._owners = [word[0] for word in self._words]
        self._names = [do.word_name(word) for word in self._words]

    # ---- what explore asks ----------------------------------------------------------------------------------------

    def start(self) -> State:
        counts = {one.word for thread in self.threads for one in thread.program if isinstance(one, COUNTING)}
        memory = tuple(self._initial.get(word, 0 if word in counts else do.NOT_YET) for word in self._words)
        unread = sum(1 << i for i, word in enumerate(self._words) if word in self._initial)
        return State((0,) * len(self.threads), memory, unread, ((),) * len(self.threads), 0)

    def moves(self, state: State) -> list[tuple[tuple, State | Violation]]:
        """("run", thread), ("expire", thread), ("die", rank) or ("perform", thread, which of its stores)."""
        moves = []
        for t, steps in enumerate(self._steps):
            i = state.at[t]
            if i == len(steps):
                continue
            after = steps[i](state)
            if after is None:
                if self.deadlines and self._may_give_up(state, t):
                    moves.append((("expire", t), self._give_up(state, t)))
            elif self._at_once[t][i] and not isinstance(after, Violation) and _only_issues(state, after):
                return [(("run", t), after)]
            else:
                moves.append((("run", t), after))
        if self.dies is not None and not self._has_ended(state, self.dies):
            moves.append((("die", self.dies), self._die(state)))
        concerned = self._concerned_now(state) if self.reduced else -1
        under_way = [(("perform", t, i), item) for t, items in enumerate(state.pending) for i, item in enumerate(items)]
        matter = [(move, item) for move, item in under_way if concerned & item.words]
        if not moves and not matter:
            matter = under_way[:1]
        return moves + [(move, self._perform(state, move[1], item)) for move, item in matter]

    def ended(self, state: State) -> bool:
        return all(i == len(steps) for i, steps in zip(state.at, self._steps, strict=True))

    def describe(self, state: State, move: tuple) -> str:
        kind, t, *which = move
        if kind == "die":
            return f"rank {t} dies"
        thread = self.threads[t]
        if kind == "perform":
            item = state.pending[t][which[0]]
            return f"    {do.value_name(item.value)} arrives in {self._names[item.word]}"
        text = f"{thread.name} {thread.program[state.at[t]]}"
        return text + ": in vain, it gives up" if kind == "expire" else text

    def where(self, state: State) -> list[str]:
        """What each thread cannot do."""
        return [
            f"{thread.name} cannot go on: {thread.program[i]}"
            for i, thread in zip(state.at, self.threads, strict=True)
            if i < len(thread.program)
        ]

    # ---- operations -----------------------------------------------------------------------------------------------

    def _compile(self, t: int, i: int, operation) -> Step:
        """What a thread's operation does to a state."""
        match operation:
            case do.Begin():
                return self._begin(self._partners(operation, self.threads[t].rank), self.threads[t].rank)
            case do.LeaveIfAborted():
                return self._leave_if_aborted(self._partners(operation), 1 << self.threads[t].rank)
            case do.Store(word, value):
                return self._issue(t, [Item(self._word(word), value)])
            case do.Signal(words, value, release):
                return self._issue(t, [Item(self._word(word), value, i if release else None) for word in words])
            case do.Copy(source, word, value):
                return self._issue(t, [Item(self._word(word), value, None, self._word(source))])
            case do.WaitForCopies():
                return self._wait_for_copies(t)
            case do.Wait(word, value):
                flag = self._word(word)
                return lambda s: _advance(s, t) if s.memory[flag] >= value else None
            case do.WaitForPhase(word, phase):
                count = self._word(word)
                return lambda s: _advance(s, t) if (s.memory[count] - phase) % 2 else None
            case do.Arrive(word):
                count = self._word(word)
                return lambda s: _advance(s, t, _put(s.memory, count, s.memory[count] + 1))
            case do.Put(word, value):
                at = self._word(word)
                return lambda s: _advance(s, t, _put(s.memory, at, value))
            case do.Read(words, expected, polled):
                return self._read(t, list(map(self._word, words)), expected, list(map(self._word, polled)))
        raise AssertionError(operation)

    def _word(self, word: do.Word) -> int:
        return self._words.setdefault(word, len(self._words))

    def _partners(self, operation, rank: int | None = None) -> list[tuple[int, int]]:
        """The threads, of one rank or of all, that have an equal operation, and where in their programs."""
        return [
            (t, thread.program.index(operation))
            for t, thread in enumerate(self.threads)
            if operation in thread.program and rank in (None, thread.rank)
        ]

    def _begin(self, partners: list[tuple[int, int]], rank: int) -> Step:
        def step(s: State) -> State | Violation | None:
            if any(s.at[t] != i for t, i in partners):
                return None
            for t, _ in partners:
                s = self._perform_those(s, t, lambda item: self._owners[item.word] == rank)
                if isinstance(s, Violation):
                    return s
            return s._replace(at=_moved(s.at, [(t, i + 1) for t, i in partners]))

        return step

    def _leave_if_aborted(self, partners: list[tuple[int, int]], bit: int) -> Step:
        leave = [(t, self._next_begin(t, i)) for t, i in partners]
        stay = [(t, i + 1) for t, i in partners]

        def step(s: State) -> State | None:
            if any(s.at[t] != i for t, i in partners):
                return None
            return s._replace(at=_moved(s.at, leave if s.aborted & bit else stay))

        return step

    def _issue(self, t: int, items: list[Item]) -> Step:
        return lambda s: s._replace(at=_put(s.at, t, s.at[t] + 1), pending=_put(s.pending, t, (*s.pending[t], *items)))

    def _wait_for_copies(self, t: int) -> Step:
        def step(s: State) -> State | Violation:
            for item in s.pending[t]:
                if item.source is not None and s.memory[item.source] != item.value:
                    return self._copied_wrong(s, item)
            items = tuple(item._replace(source=None) for item in s.pending[t])
            return _advance(s._replace(pending=_put(s.pending, t, items)), t)

        return step

    def _read(self, t: int, words: list[int], expected: Sequence[str], polled: list[int]) -> Step:
        bits = sum(1 << word for word in words)

        def step(s: State) -> State | Violation | None:
            if any(s.memory[word] is do.NOT_YET for word in polled):
                return None
            for word, value in zip(words, expected, strict=True):
                if s.memory[word] != value:
                    found = do.value_name(s.memory[word])
                    return Violation(f"{found} is read where {value} should be, in {self._names[word]}")
            return State(_put(s.at, t, s.at[t] + 1), s.memory, s.unread & ~bits, s.pending, s.aborted)

        return step

    # ---- ends before the end --------------------------------------------------------------------------------------

    def _may_give_up(self, s: State, t: int) -> bool:
        match self.threads[t].program[s.at[t]]:
            case do.Wait(deadline=True) | do.Read(deadline=True):
                return True
            case do.WaitForPhase(sees_abort=True):
                return bool(s.aborted >> self.threads[t].rank & 1)
        return False

    def _give_up(self, s: State, t: int) -> State:
        """A wait has expired: the thread ends this kernel, and the rank sends nothing more."""
        to = self._next_begin(t, s.at[t])
        return s._replace(at=_put(s.at, t, to), aborted=s.aborted | 1 << self.threads[t].rank)

    def _next_begin(self, t: int, i: int) -> int:
        program = self.threads[t].program
        return next((j for j in range(i, len(program)) if isinstance(program[j], do.Begin)), len(program))

    def _ends_of(self, rank: int) -> list[tuple[int, int]]:
        return [(t, len(thread.program)) for t, thread in enumerate(self.threads) if thread.rank == rank]

    def _has_ended(self, s: State, rank: int) -> bool:
        return all(s.at[t] == end for t, end in self._ends_of(rank))

    def _die(self, s: State) -> State:
        return s._replace(at=_moved(s.at, self._ends_of(self.dies)))

    # ---- stores that arrive ---------------------------------------------------------------------------------------

    def _concerned(self, operation) -> int:
        """A bit for each word whose value, or whose being overwritten, makes a difference to an operation."""
        match operation:
            case do.Read(words, _, polled):
                concerned = {*words, *polled}
            case do.Wait(word) | do.Put(word):
                concerned = {word}
            case _:
                concerned = set()
        return sum(1 << self._word(word) for word in concerned)

    def _concerned_now(self, s: State) -> int:
        """A bit for each word of the threads' next operations, or with stores of two threads under way."""
        concerned = stored = 0
        for t, items in enumerate(s.pending):
            concerned |= self._concerns[t][s.at[t]]
            own = 0
            for item in items:
                own |= 1 << item.word
            concerned |= stored & own
            stored |= own
        return concerned

    def _perform_those(self, s: State, t: int, which: Callable[[Item], bool]) -> State | Violation:
        """Performs those of a thread's stores, in the order of issue."""
        for item in filter(which, s.pending[t]):
            s = self._perform(s, t, item)
            if isinstance(s, Violation):
                return s
        return s

    def _perform(self, s: State, t: int, item: Item) -> State | Violation:
        """Performs a store, and first those of the thread that have to come before it."""
        i = s.pending[t].index(item)
        first = next((earlier for earlier in s.pending[t][:i] if _comes_first(earlier, item)), None)
        if first is not None:
            s = self._perform(s, t, first)
            return s if isinstance(s, Violation) else self._perform(s, t, item)
        bit = 1 << item.word
        if s.unread & bit:
            lost = s.memory[item.word]
            return Violation(f"{do.value_name(item.value)} overwrites {lost}, unread, in {self._names[item.word]}")
        if item.source is not None and s.memory[item.source] != item.value:
            return self._copied_wrong(s, item)
        unread = s.unread | bit if isinstance(item.value, str) else s.unread
        pending = _put(s.pending, t, s.pending[t][:i] + s.pending[t][i + 1 :])
        return State(s.at, _put(s.memory, item.word, item.value), unread, pending, s.aborted)

    def _copied_wrong(self, s: State, item: Item) -> Violation:
        return Violation(f"a copy finds {do.value_name(s.memory[item.source])} where {item.value} should be")


def _comes_first(earlier: Item, item: Item) -> bool:
    """Whether a thread's store has to be performed before a later one of the same thread."""
    waited_for = earlier.source is None and earlier.release != item.release
    return earlier.word == item.word or (item.release is not None and waited_for)


def _put(values: tuple, i: int, value) -> tuple:
    return values[:i] + (value,) + values[i + 1 :]


def _moved(at: tuple[int, ...], to: list[tuple[int, int]]) -> tuple[int, ...]:
    moved = list(at)
    for t, i in to:
        moved[t] = i
    return tuple(moved)


def _advance(s: State, t: int, memory: tuple | None = None) -> State:
    return State(_put(s.at, t, s.at[t] + 1), s.memory if memory is None else memory, s.unread, s.pending, s.aborted)


def _only_issues(before: State, after: State) -> bool:
    """Whether a move leaves all stores under way as they were."""
    return all(new[: len(old)] == old for old, new in zip(before.pending, after.pending, strict=True))
