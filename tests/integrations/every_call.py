"""Makes calls of ENTRIES, PROGRAMS and MODELS once, in one set of processes; tests then look at one result each.

A run names the call that it stopped in: where a rank is not done in time, the error has each rank's last call and the
tracebacks of its threads.
"""

import contextlib
import faulthandler
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from graphar.runtime.watch import hook
from tests.integrations.entry_points import ENTRIES
from tests.integrations.models import MODELS, missing
from tests.integrations.programs import PROGRAMS, WITHOUT_GRAPHAR
from tests.processes import RankFailed, run_ranks

GRAPHAR, INNER = "graphar", "gloo or NCCL"
_NEED_TWO_RANKS = ("send and recv", "send_object_list", "batch_isend_irecv")
_NEED_TWO_RANKS += ("recv from any rank", "batches of sends", "subgroups")
FOR_ONE_RANK = [name for name in (*ENTRIES, *PROGRAMS) if name not in _NEED_TWO_RANKS]
_LIMIT_S = 300.0  # of all calls together: seconds on a quiet machine, and only a run that hangs waits for it
_BEGIN = "\n> "


class Made(NamedTuple):
    """A call on one rank: its result and what is expected, by whom it was served, and the traceback if it raised."""

    got: object
    expected: object
    route: str
    error: str


def run_watched(function: Callable, world_size: int, *args, **options) -> list:
    """Runs ``function(rank, world_size, file, *args)`` on every rank, which writes the names of its calls to the file.

    Raises:
        RankFailed: with the last call of each rank, and with tracebacks if all took more than five minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_ranks(_watched, world_size, function, folder, args, timeout_s=_LIMIT_S + 10, **options)
        except RankFailed as error:
            said = "\n".join(f"rank {rank}: {_last_call(Path(folder, str(rank)))}" for rank in range(world_size))
            raise RankFailed(f"{error}\n{said}") from None


def _watched(rank: int, world_size: int, function: Callable, folder: str, args: tuple):
    with Path(folder, str(rank)).open("w", buffering=1) as file:
        faulthandler.dump_traceback_later(_LIMIT_S, file=file)
        try:
            return function(rank, world_size, file, *args)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _last_call(path: Path) -> str:
    return path.read_text().rpartition(_BEGIN)[2].strip() if path.exists() else "no call yet"


def by_rank(world_size: int, backend: str, names: Sequence[str], device: str = "cpu") -> list:
    """Makes calls on every rank, but for those that miss a package: a list with a dict of Made by name for each rank.

    Raises:
        RankFailed: a rank died, was not done in time, or failed where others did not.
    """
    names = [name for name in names if not missing(name)]
    return run_watched(make_calls, world_size, device, names, backend=backend)


def make_calls(rank: int, world_size: int, file: TextIO, device: str, names: Sequence[str]) -> dict[str, Made]:
    """Makes the calls of these names with tensors on ``device``."""
    calls, found = [], {}

    def count(engine, call, ranks):
        calls.append(call.op)
        return contextlib.nullcontext()

    def run(name: str) -> tuple[object, object]:
        with torch.device(device):
            if name not in ENTRIES:
                pairs = on_cpu((PROGRAMS | MODELS)[name](rank, world_size))
                return [one for one, _ in pairs], [one for _, one in pairs]
            got = ENTRIES[name].call(dist.group.WORLD, rank, world_size)
        return on_cpu(got), ENTRIES[name].call(gloo, rank, world_size)

    def attempt(name: str) -> None:
        calls.clear()
        file.write(f"{_BEGIN}{name}\n")
        pair, error = (None, None), ""
        try:
            pair = run(name)
        except Exception:
            error = traceback.format_exc()
            file.write(error)  # other ranks may wait for this one inside the call
        found[name] = Made(*pair, GRAPHAR if calls else INNER, error)
        errors = [""] * world_size
        dist.all_gather_object(errors, error, group=gloo)
        if any(errors) and not all(errors):  # what ranks call from here on may not match
            failed = [one for one in range(world_size) if errors[one]]
            raise RuntimeError(f"{name} failed on rank(s) {failed} alone\n{errors[failed[0]]}")

    hook.sinks.append(count)
    gloo = dist.new_group(backend="gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of some entry points
        for name in names:
            attempt(name)
    file.write(f"{_BEGIN}destroy_process_group\n")
    dist.destroy_process_group()
    return found


def on_cpu(found: object) -> object:
    return tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), found)


def check(of_ranks: list[dict[str, Made]], name: str) -> None:
    (check_entry if name in ENTRIES else check_program)(of_ranks, name)


def check_entry(of_ranks: list[dict[str, Made]], name: str) -> None:
    """An entry point gave what gloo gave."""
    for rank, found in enumerate(of_ranks):
        got, expected, _, error = found[name]
        assert not error, error
        for one, other in zip(_flat(got), _flat(expected), strict=True):
            same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
            assert same, f"rank {rank}: {one} is not {other}"


def check_program(of_ranks: list[dict[str, Made]], name: str) -> None:
    """A program gave what it expected, and between ranks was served by graphar. Skips one that misses a package."""
    if packages := missing(name):
        pytest.skip(f"needs {' and '.join(packages)}")
    for rank, found in enumerate(of_ranks):
        got, expected, route, error = found[name]
        assert not error, error
        assert len(of_ranks) == 1 or route == (INNER if name in WITHOUT_GRAPHAR else GRAPHAR)
        assert len(got) > 0
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, rank=rank: f"rank {rank}: {text}")


def _flat(found: object) -> list:
    return found if isinstance(found, list) else [found]
