"""Keeps torch.compile out of what torch calls of the backend: it cannot trace a process group's own code."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

T = TypeVar("T", bound="type | Callable")


def untraced(kind: T) -> T:
    """A decorator of a function, or of a class for its methods: torch.compile runs it, and what it calls, as it is.

    torch.compiler.disable does the same, but imports the compiler, which takes seconds, and adds a call to each call.
    """
    compiler: Any = eval_frame
    skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
    for one in vars(kind).values() if isinstance(kind, type) else [kind]:
        if isinstance(one, FunctionType):
            compiler.set_code_exec_strategy(one.__code__, skip)
            one.__dict__["_torchdynamo_disable"] = True  # what calls it is traced up to here
    return kind
