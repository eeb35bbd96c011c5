"""Keeps torch.compile out of the methods that torch calls: it cannot trace a process group's own code."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

import torch

T = TypeVar("T", bound=type)


def untraced(kind: T) -> T:
    """A decorator of a class whose methods, and what they call, torch.compile runs as they are.

    torch.compiler.disable does the same, but imports the compiler, which takes seconds, and adds a call to each call.
    """
    compiler = torch._C._dynamo.eval_frame
    skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
    for one in vars(kind).values():
        if isinstance(one, FunctionType):
            compiler.set_code_exec_strategy(one.__code__, skip)
    return kind
