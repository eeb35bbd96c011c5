"""Ranks whose threads run programs over the memory of memory.py, for the search."""

from collections.abc import Callable, Mapping, Sequence

from tests.model import programs as do
from tests.model.explore import Violation
from tests.model.memory import Item, Memory, State, advance, moved, only_issues, put

COUNTING = (do.Wait, do.WaitForPhase, do.Arrive)
# Operations that commute with all moves of other threads and stay possible once they are, unless they perform stores.
AT_ONCE = (do.Begin, do.Store, do.Signal, do.Wait, do.Copy, do.WaitForCopies)

Step = Callable[[State], "State | Violation | None"]  # None: not yet


class Machine:
    """A model for :func:`explore`: every wait is a move that is possible once its condition holds.

    The search leaves out runs that no thread can tell from others. An operation that commutes with all other moves is
    made at once and alone (AT_ONCE), unless its rank may die first. A store is performed only when it matters:

    - some thread's next operation concerns its word, or
    - a store of another thread to that word is under way, or
    - it has to precede a store that matters, or the begin of a kernel, or
    - all threads have ended.

    Until then no other move depends on it. In the terms of partial-order reduction, the remaining moves are persistent
    sets, and no cycle can postpone a move for ever.

    Args:
        threads: what runs.
        initial: unread data that words hold at the start. Other words begin as 'not yet', or as 0 if they count.
        deadlines: whether waits on peers may expire, at any time while their condition does not hold.
        dies: a rank that may end for good at any time; what it has stored may still arrive.
        reduced: whether to leave out runs as above.
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
        self._memory = Memory()
        self._steps = [
            [self._compile(t, i, one) for i, one in enumerate(thread.program)] for t, thread in enumerate(threads)
        ]
        at_once = () if not reduced else AT_ONCE if deadlines else (*AT_ONCE, do.LeaveIfAborted)
        self._at_once = [
            [isinstance(one, at_once) and thread.rank != dies for one in thread.program] for thread in threads
        ]
        self._concerns = [[*map(self._concerned, thread.program), 0] for thread in threads]

    def start(self) -> State:
        counts = {one.word for thread in self.threads for one in thread.program if isinstance(one, COUNTING)}
        memory = tuple(self._initial.get(word, 0 if word in counts else do.NOT_YET) for word in self._memory.words)
        unread = sum(1 << i for i, word in enumerate(self._memory.words) if word in self._initial)
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
            elif self._at_once[t][i] and not isinstance(after, Violation) and only_issues(state, after):
                return [(("run", t), after)]
            else:
                moves.append((("run", t), after))
        if self.dies is not None and not self._has_ended(state, self.dies):
            moves.append((("die", self.dies), self._die(state)))
        concerned = self._concerned_now(state) if self.reduced else -1
        under_way = [(("perform", t, i), item) for t, items in enumerate(state.pending) for i, item in enumerate(items)]
        matter = [(move, item) for move, item in under_way if concerned & item.words]
        if not moves and not matter:  # nobody can tell in which order the rest arrives
            matter = under_way[:1]
        return moves + [(move, self._memory.perform(state, move[1], item)) for move, item in matter]

    def ended(self, state: State) -> bool:
        return all(i == len(steps) for i, steps in zip(state.at, self._steps, strict=True))

    def describe(self, state: State, move: tuple) -> str:
        kind, t, *which = move
        if kind == "die":
            return f"rank {t} dies"
        thread = self.threads[t]
        if kind == "perform":
            item = state.pending[t][which[0]]
            return f"    {do.value_name(item.value)} arrives in {self._memory.name(item.word)}"
        text = f"{thread.name} {thread.program[state.at[t]]}"
        return text + ": in vain, it gives up" if kind == "expire" else text

    def where(self, state: State) -> list[str]:
        """What each thread waits for."""
        return [
            f"{thread.name} cannot go on: {thread.program[i]}"
            for i, thread in zip(state.at, self.threads, strict=True)
            if i < len(thread.program)
        ]

    def _compile(self, t: int, i: int, operation) -> Step:
        """What a thread's operation does to a state."""
        match operation:
            case do.Begin():
                return self._begin(self._partners(operation, self.threads[t].rank), self.threads[t].rank)
            case do.LeaveIfAborted():
                return self._leave_if_aborted(self._partners(operation), 1 << self.threads[t].rank)
            case do.Store(word, value):
                return self._issue(t, [Item(self._memory.index(word), value)])
            case do.Signal(words, value, release):
                return self._issue(t, [Item(self._memory.index(word), value, i if release else None) for word in words])
            case do.Copy(source, word, value):
                return self._issue(t, [Item(self._memory.index(word), value, None, self._memory.index(source))])
            case do.WaitForCopies():
                return self._wait_for_copies(t)
            case do.Wait(word, value):
                flag = self._memory.index(word)
                return lambda s: advance(s, t) if s.memory[flag] >= value else None
            case do.WaitForPhase(word, phase):
                count = self._memory.index(word)
                return lambda s: advance(s, t) if (s.memory[count] - phase) % 2 else None
            case do.Arrive(word):
                count = self._memory.index(word)
                return lambda s: advance(s, t, put(s.memory, count, s.memory[count] + 1))
            case do.Put(word, value):
                at = self._memory.index(word)
                return lambda s: advance(s, t, put(s.memory, at, value))
            case do.Read(words, expected, polled):
                return self._read(
                    t, list(map(self._memory.index, words)), expected, list(map(self._memory.index, polled))
                )
        raise AssertionError(operation)

    def _partners(self, operation, rank: int | None = None) -> list[tuple[int, int]]:
        """The threads of one rank, or of all, that have an equal operation, and its index in their programs."""
        return [
            (t, thread.program.index(operation))
            for t, thread in enumerate(self.threads)
            if operation in thread.program and rank in (None, thread.rank)
        ]

    def _begin(self, partners: list[tuple[int, int]], rank: int) -> Step:
        owners = self._memory.owners

        def step(s: State) -> State | Violation | None:
            if any(s.at[t] != i for t, i in partners):
                return None
            for t, _ in partners:
                s = self._memory.perform_those(s, t, lambda item: owners[item.word] == rank)
                if isinstance(s, Violation):
                    return s
            return s._replace(at=moved(s.at, [(t, i + 1) for t, i in partners]))

        return step

    def _leave_if_aborted(self, partners: list[tuple[int, int]], bit: int) -> Step:
        leave = [(t, self._next_begin(t, i)) for t, i in partners]
        stay = [(t, i + 1) for t, i in partners]

        def step(s: State) -> State | None:
            if any(s.at[t] != i for t, i in partners):
                return None
            return s._replace(at=moved(s.at, leave if s.aborted & bit else stay))

        return step

    def _issue(self, t: int, items: list[Item]) -> Step:
        return lambda s: s._replace(at=put(s.at, t, s.at[t] + 1), pending=put(s.pending, t, (*s.pending[t], *items)))

    def _wait_for_copies(self, t: int) -> Step:
        def step(s: State) -> State | Violation:
            for item in s.pending[t]:
                if item.source is not None and s.memory[item.source] != item.value:
                    return self._memory.copied_wrong(s, item)
            items = tuple(item._replace(source=None) for item in s.pending[t])
            return advance(s._replace(pending=put(s.pending, t, items)), t)

        return step

    def _read(self, t: int, words: list[int], expected: Sequence[str], polled: list[int]) -> Step:
        bits = sum(1 << word for word in words)

        def step(s: State) -> State | Violation | None:
            if any(s.memory[word] is do.NOT_YET for word in polled):
                return None
            for word, value in zip(words, expected, strict=True):
                if s.memory[word] != value:
                    found = do.value_name(s.memory[word])
                    return Violation(f"{found} is read where {value} should be, in {self._memory.name(word)}")
            return State(put(s.at, t, s.at[t] + 1), s.memory, s.unread & ~bits, s.pending, s.aborted)

        return step

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
        return s._replace(at=put(s.at, t, to), aborted=s.aborted | 1 << self.threads[t].rank)

    def _next_begin(self, t: int, i: int) -> int:
        program = self.threads[t].program
        return next((j for j in range(i, len(program)) if isinstance(program[j], do.Begin)), len(program))

    def _ends_of(self, rank: int) -> list[tuple[int, int]]:
        return [(t, len(thread.program)) for t, thread in enumerate(self.threads) if thread.rank == rank]

    def _has_ended(self, s: State, rank: int) -> bool:
        return all(s.at[t] == end for t, end in self._ends_of(rank))

    def _die(self, s: State) -> State:
        return s._replace(at=moved(s.at, self._ends_of(self.dies)))

    def _concerned(self, operation) -> int:
        """A bit for each word whose value affects an operation, or whose overwriting does."""
        match operation:
            case do.Read(words, _, polled):
                concerned = {*words, *polled}
            case do.Wait(word) | do.Put(word):
                concerned = {word}
            case _:
                concerned = set()
        return sum(1 << self._memory.index(word) for word in concerned)

    def _concerned_now(self, s: State) -> int:
        """A bit for each word that a thread's next operation concerns, or that two threads have stores under way to."""
        concerned = stored = 0
        for t, items in enumerate(s.pending):
            concerned |= self._concerns[t][s.at[t]]
            own = 0
            for item in items:
                own |= 1 << item.word
            concerned |= stored & own
            stored |= own
        return concerned
