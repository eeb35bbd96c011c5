"""Memory in which stores arrive late.

What a kernel may rely on, and all that this model grants it:

(a) A word is held by one rank, in the L2 cache of its GPU. It has one value at a time, and a load sees that value.
(b) A thread issues its stores in program order, and each is performed at any time later. A pack is four words, which
    may arrive apart. Only stores of one thread to one word are performed in the order of issue.
(c) What depends on the value of a load is issued after that load. A wait is a load that is repeated.
(d) A release store is performed after all stores that its block has issued before, to whichever rank. What follows an
    acquire load and a barrier sees what was performed before the release store that the load has seen.
(e) A kernel begins when the rank's kernel before it has ended in all threads, and what these have stored to their own
    rank is performed. Of their stores to other ranks this says nothing.
(f) A bulk copy reads at any time until a wait for it ends. It counts as a store of the thread only from then on: an
    earlier release store does not wait for it.

In terms of PTX: (a) and (b) are coherence of relaxed.sys accesses, whose vectors are sets of scalars; (d) is
st.release.sys and ld.acquire.sys, which are cumulative; (e) is griddepcontrol.wait, or the order of a stream. PTX
orders more: stores of one rank's successive kernels to one word, and a kernel's last stores to other ranks.

(3) of sentinel.cuh rests on one property that PTX's axioms do not state: time passes for all words alike. If a store
was performed before another one was issued, it comes first in the order of their word, even if only relaxed accesses
lead from the one to the other. By the axioms alone, this order takes a release and an acquire. The property follows
from (a): a rank that has performed a store to a word it holds performs later arrivals after it.

Data that nobody has read may not be overwritten, by anything: every store is checked for that.
"""

from collections.abc import Callable
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
        """A bit for each word that the store concerns."""
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


class Memory:
    """The words, by index, and stores that are performed."""

    def __init__(self) -> None:
        self.words: dict[do.Word, int] = {}
        self.owners: list[int] = []

    def index(self, word: do.Word) -> int:
        if word not in self.words:
            self.owners.append(word[0])
        return self.words.setdefault(word, len(self.words))

    def name(self, index: int) -> str:
        return do.word_name(list(self.words)[index])

    def perform_those(self, s: State, t: int, which: Callable[[Item], bool]) -> State | Violation:
        """Performs a thread's stores that ``which`` selects, in the order of issue."""
        for item in filter(which, s.pending[t]):
            s = self.perform(s, t, item)
            if isinstance(s, Violation):
                return s
        return s

    def perform(self, s: State, t: int, item: Item) -> State | Violation:
        """Performs a store, and first those of the thread that have to come before it."""
        i = s.pending[t].index(item)
        first = next((earlier for earlier in s.pending[t][:i] if _comes_first(earlier, item)), None)
        if first is not None:
            s = self.perform(s, t, first)
            return s if isinstance(s, Violation) else self.perform(s, t, item)
        bit = 1 << item.word
        if s.unread & bit:
            lost = s.memory[item.word]
            return Violation(f"{do.value_name(item.value)} overwrites {lost}, unread, in {self.name(item.word)}")
        if item.source is not None and s.memory[item.source] != item.value:
            return self.copied_wrong(s, item)
        unread = s.unread | bit if isinstance(item.value, str) else s.unread
        pending = put(s.pending, t, s.pending[t][:i] + s.pending[t][i + 1 :])
        return State(s.at, put(s.memory, item.word, item.value), unread, pending, s.aborted)

    def copied_wrong(self, s: State, item: Item) -> Violation:
        return Violation(f"a copy finds {do.value_name(s.memory[item.source])} where {item.value} should be")


def _comes_first(earlier: Item, item: Item) -> bool:
    """Whether a thread's store has to be performed before a later one of the same thread."""
    waited_for = earlier.source is None and earlier.release != item.release
    return earlier.word == item.word or (item.release is not None and waited_for)


def put(values: tuple, i: int, value) -> tuple:
    return (*values[:i], value, *values[i + 1 :])


def moved(at: tuple[int, ...], to: list[tuple[int, int]]) -> tuple[int, ...]:
    after = list(at)
    for t, i in to:
        after[t] = i
    return tuple(after)


def advance(s: State, t: int, memory: tuple | None = None) -> State:
    return State(put(s.at, t, s.at[t] + 1), s.memory if memory is None else memory, s.unread, s.pending, s.aborted)


def only_issues(before: State, after: State) -> bool:
    """Whether a move leaves all stores under way as they were."""
    return all(new[: len(old)] == old for old, new in zip(before.pending, after.pending, strict=True))
