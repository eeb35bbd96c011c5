"""Every algorithm that can run here, once, against the specification."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from graphar import reference
from graphar.algorithms import Algorithm
from graphar.availability import is_available
from graphar.chooser import choose_for_parts
from graphar.communicator import Communicator
from graphar.doctor.report import REPORT, Finding, note, problem
from graphar.errors import CollectiveTimeout, GrapharError, UnsupportedError
from graphar.kernels import MAX_RANKS

NUMELS = (7, 8199, 262149)  # less than a pack of every rank, a few blocks, many; none of them whole packs
_CPU_RANKS = 4
_DEADLINE_S = 5.0  # of a wait on another rank
_SPECIAL = (-0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(torch.bfloat16).tiny / 4)


def algorithms() -> list[Algorithm]:
    """What there is to test on this machine; the matmuls take other operands, and one host has no hierarchy."""
    ours = [one for one in Algorithm if not one.of_matmul and one is not Algorithm.HIERARCHICAL]
    return ours if is_available() else [Algorithm.FALLBACK]


def self_test(algorithm: Algorithm) -> Iterator[Finding]:
    """A line: whether the bits are those of the specification, for some sizes of bf16, on all GPUs or on the CPU."""
    on_gpus = bool(is_available())
    devices = list(range(min(torch.cuda.device_count(), MAX_RANKS))) if on_gpus else ["cpu"] * _CPU_RANKS
    where, name = f"{len(devices)} {'GPUs' if on_gpus else 'ranks on the CPU'}", algorithm.value
    ops = ["allreduce", "reducescatter", "allgather"] if not on_gpus else [algorithm.op]
    begin = time.monotonic()
    try:
        with Communicator(devices=devices, timeout_s=_DEADLINE_S) as communicator:
            wrong = sum(_wrong(communicator, op, name, numel) for op in ops for numel in _numels(algorithm))
    except UnsupportedError as error:
        yield note(name, f"not here: {str(error).removeprefix(f'allreduce: {name} cannot serve this call: ')}")
    except CollectiveTimeout as error:
        yield problem(
            name, str(error), "see NVLinks and peer access above, and whether other processes fill these GPUs"
        )
    except (GrapharError, RuntimeError) as error:
        yield problem(
            name, f"{type(error).__name__}: {error}", f"where memory is lacking, free some on these GPUs; else {REPORT}"
        )
    else:
        if wrong:
            advice = f"do not compute on these GPUs together before this is understood: {REPORT}"
            yield problem(name, f"{wrong} elements differ from the specification on {where}", advice)
        else:
            yield Finding(name, f"exact on {where} ({time.monotonic() - begin:.1f} s)")


def _numels(algorithm: Algorithm) -> list[int]:
    """Those for which a call takes it; all-reduce can be told what to take."""
    if algorithm.op != "allgather":
        return list(NUMELS)
    return [numel for numel in NUMELS if choose_for_parts("allgather", 2 * numel).algorithm is algorithm]


def _wrong(communicator: Communicator, op: str, algorithm: str, numel: int) -> int:
    """How many elements of all ranks' results differ in any bit from the specification."""
    parts = [_random(rank, numel) for rank in range(communicator.world_size)]
    xs = [part.to(device) for part, device in zip(parts, communicator.devices, strict=True)]
    if op == "allreduce":
        results, expected = communicator.allreduce(xs, algorithm=algorithm), [reference.allreduce(parts)] * len(parts)
    elif op == "reducescatter":
        results, expected = communicator.reducescatter(xs), reference.reducescatter(parts)
    else:
        results, expected = communicator.allgather(xs), [reference.allgather(parts)] * len(parts)
    communicator.synchronize()
    return sum(
        int((result.cpu().view(torch.int16) != one.view(torch.int16)).sum())
        for result, one in zip(results, expected, strict=True)
    )


def _random(rank: int, numel: int) -> torch.Tensor:
    """Normal values that differ by rank, with special ones among them, which meet each other on all ranks."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(numel, generator=generator).bfloat16()
    special = torch.tensor(_SPECIAL).bfloat16()
    x[::13] = special[torch.randint(len(special), (len(x[::13]),), generator=generator)]
    return x
