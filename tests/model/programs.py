"""What the modelled threads do: a kernel's loops written out, with sizes, grids and epochs known beforehand.

Data are strings, counts are numbers, and None is 'not yet'. A word is a tuple that begins with the rank that holds it.
Operations that several threads do together, as they begin a kernel, are equal in their programs.
"""

from dataclasses import dataclass

Word = tuple
NOT_YET = None


@dataclass(frozen=True)
class Thread:
    """A thread, or threads that act as one: all of a block, or of a warp."""

    name: str
    rank: int
    program: tuple


@dataclass(frozen=True)
class Begin:
    """A kernel begins, with all threads of its rank. A thread that gives up goes on at the next one."""

    call: int

    def __str__(self) -> str:
        return f"call {self.call} begins"


@dataclass(frozen=True)
class LeaveIfAborted:
    """The threads of ``which`` leave this kernel, together, once a wait of their rank has expired."""

    which: str
    call: int

    def __str__(self) -> str:
        return f"{self.which} looks whether a wait has expired"


@dataclass(frozen=True)
class Store:
    word: Word
    value: str | None

    def __str__(self) -> str:
        return f"stores {value_name(self.value)} to {word_name(self.word)}"


@dataclass(frozen=True)
class Signal:
    """Stores a number to some flags; ``release``: as release stores."""

    words: tuple[Word, ...]
    value: int
    release: bool = True

    def __str__(self) -> str:
        return f"signals {self.value} to {', '.join(map(word_name, self.words))}"


@dataclass(frozen=True)
class Wait:
    """Waits until a flag is at least ``value``."""

    word: Word
    value: int
    deadline: bool = True

    def __str__(self) -> str:
        return f"waits for {self.value} in {word_name(self.word)}"


@dataclass(frozen=True)
class Read:
    """Waits until no word of ``polled`` holds 'not yet', then reads words that should hold ``expected``."""

    words: tuple[Word, ...]
    expected: tuple[str, ...]
    polled: tuple[Word, ...] = ()
    deadline: bool = True

    def __str__(self) -> str:
        return f"reads {', '.join(self.expected)} in {', '.join(map(word_name, self.words))}"


@dataclass(frozen=True)
class Put:
    """Stores data to shared memory, where they may be overwritten unread."""

    word: Word
    value: str

    def __str__(self) -> str:
        return f"puts {self.value} into {word_name(self.word)}"


@dataclass(frozen=True)
class Copy:
    """Issues a bulk copy from shared memory that is meant to carry ``value``."""

    source: Word
    word: Word
    value: str

    def __str__(self) -> str:
        return f"copies {self.value} to {word_name(self.word)}"


@dataclass(frozen=True)
class WaitForCopies:
    def __str__(self) -> str:
        return "has waited for its copies"


@dataclass(frozen=True)
class Arrive:
    """Ends a phase of an mbarrier that expects one arrival; the word counts the phases that have ended."""

    word: Word

    def __str__(self) -> str:
        return f"arrives at {word_name(self.word)}"


@dataclass(frozen=True)
class WaitForPhase:
    """Waits by parity until a phase of an mbarrier has ended, or a wait of this rank has expired."""

    word: Word
    phase: int
    sees_abort: bool = True

    def __str__(self) -> str:
        return f"waits for phase {self.phase} of {word_name(self.word)}"


def word_name(word: Word) -> str:
    rank, *rest = word
    return f"{' '.join(map(str, rest))} of rank {rank}"


def value_name(value: str | int | None) -> str:
    return "'not yet'" if value is NOT_YET else str(value)
