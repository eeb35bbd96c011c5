"""What a communicator does before calls: it loads kernels, and allocates symmetric tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.plan import select
from graphar.plan.select import Facts
from graphar.ranks.capture import check_not_capturing
from graphar.runtime.engine import Engine


def prepare(
    engine: Engine,
    ops: Sequence[str],
    dtypes: Iterable[torch.dtype],
    max_nbytes: int | None,
    codecs: Sequence[Codec] = (),
    epilogues: Sequence[Pointwise] = (),
) -> None:
    """Compiles and loads the kernels of later calls of ``ops``, and allocates their scratch. Collective.

    It takes the arguments of graphar.Communicator.prepare, checked.
    """
    added = [dtype for dtype in dtypes if dtype in TYPE_NAMES]
    named = f", codecs {[codec.text for codec in codecs]}" if codecs else ""
    named += f", epilogues {[one.text for one in epilogues]}" if epilogues else ""
    with engine.keeping_failure():
        engine.compare("prepare", f"of {ops} for {added}, max_nbytes {max_nbytes}{named}")
        if engine.find_runner(engine.first_device()):
            facts = Facts(engine.world_size, engine.table, engine.runner.chip, lossless=engine.lossless)
            symmetric = engine.symmetric is not None
            for kernel in select.needed_kernels(facts, ops, added, max_nbytes, codecs, epilogues, symmetric):
                engine.runner.kernels.prepare(kernel)


def empty(engine: Engine, like: torch.Tensor) -> list[torch.Tensor]:
    """Returns an uninitialised symmetric tensor like ``like`` for each rank of this process. Collective."""
    with engine.keeping_failure():
        devices = engine.devices or (engine.first_device(),)
        check_not_capturing("empty", devices)
        engine.compare("empty", f"of {list(like.shape)} {like.dtype}")
        if not engine.find_runner(devices[0]):
            return [torch.empty_like(like, device=device) for device in devices]
        tensors = engine.runner.symmetric.empty(like)
        engine.symmetric = engine.runner.symmetric
        return tensors
