"""The expression language of epilogues: the parser, the syntax tree, and printing a tree as text.

graphar.Epilogue describes the language. All values are fp32 numbers: comparisons and ``&& || !`` give 1 or 0, and
places are rounded past 2^24.

The C++ code of an expression is printed from its tree, with names of its own. No text of a caller reaches the compiler.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from graphar.numerics.dtypes import fp32
from graphar.numerics.epilogues.operations import FUNCTIONS

PLACES = ("row", "col", "index")
SUBSCRIPTS = (*PLACES, "0")
CONSTANTS = {"inf": math.inf, "nan": math.nan}
RESERVED = {"v", *PLACES, *CONSTANTS, *FUNCTIONS}
MAX_ARGUMENTS = 4  # of tensors and of scalars: `max_operands` in cuda_src/device/arguments.cuh
MAX_NODES = 256  # bounds the depth of recursion over a tree
_MAX_DEPTH = 60


@dataclass(frozen=True)
class Number:
    """A constant, rounded to fp32. The parser makes only non-negative ones."""

    value: float

    def __str__(self) -> str:
        return repr(self.value)  # inf and nan print as their names


@dataclass(frozen=True)
class Name:
    """``v``, one of PLACES, or a scalar."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Operand:
    """An element of a tensor."""

    name: str
    subscript: str

    def __str__(self) -> str:
        return f"{self.name}[{self.subscript}]"


@dataclass(frozen=True)
class Apply:
    """An operator or a function with its arguments: one for "neg" and "!", three for "?:"."""

    operation: str
    of: tuple[Node, ...]

    def __str__(self) -> str:
        if self.operation in FUNCTIONS:
            return f"{self.operation}({', '.join(map(str, self.of))})"
        forms = {"neg": "(-{})", "!": "(!{})", "?:": "({} ? {} : {})"}
        return forms.get(self.operation, f"({{}} {self.operation} {{}})").format(*self.of)


Node = Number | Name | Operand | Apply


@dataclass(frozen=True)
class Expression:
    """A parsed epilogue."""

    tree: Node  # the syntax tree
    tensors: tuple[str, ...]  # the names of the tensors, sorted
    scalars: tuple[str, ...]  # the names of the scalars, sorted
    operands: tuple[Operand, ...]  # the distinct tensor elements that the expression reads, in the order of the text
    places: frozenset[str]  # the names in PLACES that the expression depends on

    def __str__(self) -> str:
        return str(self.tree)


def number(value: float) -> Node:
    """Returns a constant of either sign, rounded to fp32, as a tree."""
    rounded = fp32(value)
    if math.copysign(1.0, rounded) < 0 and not math.isnan(rounded):
        return Apply("neg", (Number(-rounded),))
    return Number(rounded)


def expression(tree: Node) -> Expression:
    """Returns the expression of a tree; ValueError if it is too large, or its arguments are too many or ambiguous."""
    nodes = list(itertools.islice(_nodes(tree), MAX_NODES + 1))
    if len(nodes) > MAX_NODES:
        raise ValueError(f"epilogue: an expression has at most {MAX_NODES} operations and operands")
    operands = tuple(dict.fromkeys(node for node in nodes if isinstance(node, Operand)))
    tensors = tuple(sorted({node.name for node in operands}))
    named = {node.name for node in nodes if isinstance(node, Name)}
    scalars = tuple(sorted(named - {"v", *PLACES}))
    if both := set(tensors) & set(scalars):
        raise ValueError(f"epilogue: {min(both)!r} stands with brackets, as a tensor, and without, as a scalar")
    for what, names in (("tensors", tensors), ("scalars", scalars)):
        if len(names) > MAX_ARGUMENTS:
            raise ValueError(f"epilogue: takes at most {MAX_ARGUMENTS} {what}, got {', '.join(names)}")
    places = (named | {node.subscript for node in operands}) & set(PLACES)
    return Expression(tree, tensors, scalars, operands, frozenset(places))


def written(tree: Node) -> str:
    """Returns a text that parses to this tree; ValueError as for :func:`expression`, or if it is nested too deeply."""
    text = str(expression(tree))
    parse(text)
    return text


def _nodes(tree: Node) -> Iterator[Node]:
    """Yields each node in the order of the text."""
    rest = [tree]
    while rest:
        yield (node := rest.pop())
        if isinstance(node, Apply):
            rest += reversed(node.of)


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Expression:
    """The expression of a text. ValueError if it is none; the message says where."""
    return expression(_Parser(text).parse())


_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[fF]?(?![\w.])|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign><=|>=|==|!=|&&|\|\||[-+*/<>!?:(),\[\]])|(?P<unknown>\S)|(?P<end>\Z))",
    re.ASCII,
)
# Binary operators, in order of increasing precedence.
_LEVELS = (("||",), ("&&",), ("==", "!="), ("<", "<=", ">", ">="), ("+", "-"), ("*", "/"))


class _Parser:
    """A recursive descent parser of one text."""

    def __init__(self, text: str) -> None:
        self._text, self._depth, self._tokens = text, 0, _TOKEN.finditer(text)
        self._advance()

    def parse(self) -> Node:
        tree = self._ternary()
        if self._kind != "end":
            self._fail()
        return tree

    def _advance(self) -> None:
        match = next(self._tokens)
        self._kind = match.lastgroup or ""  # each alternative is a group
        self._token, self._begin = match[self._kind], match.start(self._kind)

    def _fail(self, why: str = "", advice: str = "") -> None:
        why = why or (f"unexpected {self._token!r}" if self._token else "unexpected end")
        what_else = f"; {advice}" if advice else ""
        raise ValueError(f"epilogue: {why} at character {self._begin} of {self._text!r}{what_else}")

    def _take(self, *signs: str) -> str:
        """Consumes and returns the next token if it is one of ``signs``; else returns an empty string."""
        if self._kind != "sign" or self._token not in signs:
            return ""
        token = self._token
        self._advance()
        return token

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            self._fail()

    def _ternary(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._fail("nested too deeply")
        tree = self._binary(0)
        if self._take("?"):
            yes = self._ternary()
            self._expect(":")
            tree = Apply("?:", (tree, yes, self._ternary()))
        self._depth -= 1
        return tree

    def _binary(self, level: int) -> Node:
        if level == len(_LEVELS):
            return self._unary()
        tree = self._binary(level + 1)
        while sign := self._take(*_LEVELS[level]):
            tree = Apply(sign, (tree, self._binary(level + 1)))
        return tree

    def _unary(self) -> Node:
        signs = []
        while sign := self._take("-", "+", "!"):
            signs.append(sign)
            if len(signs) > _MAX_DEPTH:
                self._fail("nested too deeply")
        tree = self._primary()
        for sign in reversed(signs):
            tree = {"-": Apply("neg", (tree,)), "+": tree, "!": Apply("!", (tree,))}[sign]
        return tree

    def _primary(self) -> Node:
        kind, token = self._kind, self._token
        if self._take("("):
            tree = self._ternary()
            self._expect(")")
            return tree
        if kind == "number":
            self._advance()
            return number(float(token))
        if token == "*" and self._text[: self._begin].endswith("*"):
            self._fail("there is no operator **", "write pow(a, b) or a * a")
        if kind != "name":
            self._fail()
        self._advance()
        if self._take("("):
            return self._call(token)
        if self._take("["):
            return self._operand(token)
        if token in FUNCTIONS:
            self._fail(f"{token} is a function", f"write {token}(v)" if FUNCTIONS[token] == 1 else "")
        return Number(CONSTANTS[token]) if token in CONSTANTS else Name(token)

    def _call(self, name: str) -> Node:
        if name not in FUNCTIONS:
            self._fail(f"there is no function {name!r}", f"there are {', '.join(sorted(FUNCTIONS))}")
        arguments = [self._ternary()]
        while self._take(","):
            arguments.append(self._ternary())
        self._expect(")")
        if len(arguments) != FUNCTIONS[name]:
            self._fail(f"{name} takes {FUNCTIONS[name]} argument(s), got {len(arguments)},")
        return Apply("?:" if name == "where" else name, tuple(arguments))

    def _operand(self, name: str) -> Node:
        if name in RESERVED:
            self._fail(f"{name!r} is no tensor")
        subscript = self._token
        if subscript not in SUBSCRIPTS:
            self._fail(f"a tensor is read at [row], [col], [index] or [0], not at [{subscript}],")
        self._advance()
        self._expect("]")
        return Operand(name, subscript)
