"""graphar.load_algorithm: an algorithm from a user's kernel and a row."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from graphar.numerics.dtypes import BYTE
from graphar.plan import grids
from graphar.plan.algorithms import Algorithm, add
from graphar.plan.row import FLOATS, Grid, Limit, Row, Specification
from graphar.plan.scratch import FLAGGED_PACKS, MAX_BLOCKS, PACK_NBYTES, SENTINEL, WARP, WORLD_SIZES, Layout, Scratch
from graphar.plan.sources import contents, digest_of, files_of, hashed, includes
from graphar.plan.tables import inside, require

T = TypeVar("T")
OPS = ("allreduce", "reducescatter", "allgather")
FLAGGED = "device/sync/flagged.cuh"
_ARCHS = range(80, 1000)
_MAX_THREADS = 1024
_DIGITS = 12  # of the hash in an algorithm's name
_SAMPLES = [1 << power for power in range(4, 36)]  # sizes in bytes at which the grid is hashed
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def load_algorithm(
    source: str | os.PathLike[str],
    *,
    op: str,
    scratch: Scratch | Layout,
    dtypes: Collection[torch.dtype] | None = None,
    max_nbytes: int | Limit | None = None,
    threads: int = 256,
    blocks: int | Callable[[int], int] = 128,
    chunk: int = 0,
    world_sizes: Collection[int] = WORLD_SIZES,
    minimum_arch: int = 80,
    specification: Specification | None = None,
) -> Algorithm:
    """Returns the algorithm of a kernel from outside the package, for ``algorithm=`` of its op.

    The file ``ring.cu`` has ``template <class T, int N> __global__ void ring(const __grid_constant__ Arguments a)``,
    written with the primitives in ``cuda_src/device``. It begins with ``wait_for_previous_kernel(a)``, and its blocks
    make the calls from ``begin_call`` to ``end_call``. T is ``bf16``, ``fp16`` or ``fp32``, or ``byte`` if it only
    moves data, and N is the number of ranks. In ``a``, of ``device/arguments.cuh``, ``capacity`` is a slot's size in
    packs of 16 bytes, and ``numel``, ``begin`` and ``count`` are elements of T. One launch serves a call. A grid may
    have fewer blocks than asked for. Include paths are the folder of the file, and ``cuda_src``.

    The value is the name of the kernel, and a hash of the file, the files that it includes from beside it, and the
    arguments here. Ranks that loaded different algorithms get CommunicatorError. The same file and arguments give
    the same algorithm, and an edited file gives another algorithm.

    On the CPU, and where no kernel can run, a call has the result of ``specification``. Deadlines, graphs, comparisons
    of ranks' calls, tuning and reports work as for graphar's own algorithms. "auto" takes a loaded algorithm
    that a tuning table names. Not collective; every rank loads the algorithm.

    Args:
        source: the path of the file, from the folder of the file that calls or from the working directory.
        op: "allreduce", "reducescatter" or "allgather".
        scratch: the scratch on every rank, or a function from the number of ranks to the scratch.
        dtypes: the dtypes of tensors that it serves: some of bf16, fp16 and fp32. None: all three, and for an
            all-gather any dtype, as ``byte``.
        max_nbytes: the size of the largest tensor, or of the largest part of one, in bytes, or a function from the
            number of ranks to it; None: any size.
        threads: threads of a block, a multiple of 32.
        blocks: the most blocks of the grid, at most 256, which has no more than one for each ``threads`` packs; or a
            function from the bytes of the tensor, or of the largest part, to the blocks.
        chunk: what ``a.chunk`` is: packs that a block sends one peer in one step of a pipeline; 0: not pipelined.
        world_sizes: the numbers of ranks that it serves, of 2 to 8.
        minimum_arch: the oldest architecture that has its instructions: 90 is sm_90.
        specification: what it computes, if that is not exactly what :mod:`graphar.reference` has for the op: a function
            from the list of the ranks' tensors to the result; of a reduce-scatter, to the list of the ranks' results,
            which has the lengths of torch.tensor_split's parts.
            Such an algorithm is not taken by "auto". None: it has the exact bits of the op. The algorithm's name also
            has a hash of this function's code, and of all values that it depends on: its defaults, its closure, and
            what it takes from its module. These must be plain values, tensors or functions. Functions of other modules
            count by their names.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an argument breaks a rule, or the file has no kernel of its name. The message begins with file and
            line of the call.
    """
    caller = sys._getframe(1)
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}: load_algorithm"
    with inside(where):
        file = _file_of(source, Path(caller.f_code.co_filename).parent, where)
        require(op in OPS, f"op must be one of {', '.join(OPS)}, got {op!r}")
        ranks = _checked(world_sizes, "world_sizes", WORLD_SIZES)
        every = (BYTE,) if op == "allgather" else FLOATS
        elements = every if dtypes is None else _checked(dtypes, "dtypes", FLOATS)
    scratches = {n: scratch(n) if callable(scratch) else scratch for n in ranks}
    limits = {n: max_nbytes(n) if callable(max_nbytes) else max_nbytes for n in ranks}
    with inside(where):
        for n in ranks:
            _check_slots(file, n, scratches[n])
            _check_room(op, n, scratches[n], limits[n], exact=specification is None)
        _check_count("threads", threads, _MAX_THREADS)
        require(threads % WARP == 0, f"threads must be a multiple of {WARP}, got {threads}")
        if not callable(blocks):
            _check_count("blocks", blocks, MAX_BLOCKS)
        _check_count("chunk", chunk, min(scratch.capacity for scratch in scratches.values()), least=0)
        require(minimum_arch in _ARCHS, f"minimum_arch must be a number such as 80 or 90, got {minimum_arch!r}")
        require(specification is None or callable(specification), "specification must be a function or None")
        of_specification = [*contents(specification)] if specification else [b"True"]
    row = Row(
        op,
        str(file.parent),
        scratches.__getitem__,
        lambda world_size: limits.get(world_size, 0),
        digest=digest_of(file),
        dtypes=elements,
        world_sizes=ranks,
        minimum_arch=minimum_arch,
        specification=specification,
        max_threads=threads,
        only_threads=threads,
        max_blocks=MAX_BLOCKS if callable(blocks) else blocks,
        candidates=grids.each_of((threads, chunk)) if specification is None else None,
        default_grid=partial(_grid, where, blocks, threads, chunk),
        packs_a_block=(lambda *_: 1) if callable(blocks) else lambda world_size, threads, chunk: threads,
    )
    grid_at_sizes = [row.default_grid(2, nbytes) for nbytes in _SAMPLES]
    values = (op, ranks, scratches, limits, elements, grid_at_sizes, minimum_arch)
    fields = row.digest.encode(), repr(values).encode(), *of_specification
    return add(file.stem, hashed(fields)[:_DIGITS], row)


def _file_of(source: object, beside: Path, where: str) -> Path:
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"source must be the path of a file, got {source!r}")
    files = (beside / source).absolute(), Path(source).absolute()
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{where}: there is no file {' or '.join(map(str, dict.fromkeys(files)))}")
    name = file.stem
    require(file.suffix == ".cu" and name.isidentifier(), f"source must be NAME.cu, got {file}")
    texts = [_COMMENT.sub("", content.decode(errors="replace")) for content in files_of(file).values()]
    has = any(re.search(rf"\b{name}\s*\(", text) for text in texts)
    require(has, f"{file} has no kernel {name!r}: it must have the name of its file")
    return file


def _checked(chosen: Any, name: str, known: Sequence[T]) -> tuple[T, ...]:
    """Returns what was chosen of the ``known`` values, in their order."""
    if not isinstance(chosen, Collection) or not chosen or not all(value in known for value in chosen):
        raise ValueError(f"{name} must be some of {', '.join(map(str, known))}, got {chosen!r}")
    return tuple(value for value in known if value in chosen)


def _check_count(name: str, value: object, most: int, least: int = 1) -> None:
    holds = type(value) is int and least <= value <= most
    require(holds, f"{name} must be a number from {least} to {most}, got {value!r}")


def _check_slots(file: Path, world_size: int, scratch: object) -> None:
    """Checks the slots. A kernel with flags beside its data accesses whole units of 32 packs."""
    if not isinstance(scratch, Scratch):
        raise ValueError(f"scratch must be a graphar.Scratch, or a function that returns one, got {scratch!r}")
    slot_nbytes, unit = scratch.capacity * PACK_NBYTES, FLAGGED_PACKS * PACK_NBYTES
    enough = 0 < slot_nbytes <= scratch.nbytes
    require(enough, f"scratch of {world_size} ranks has {scratch.nbytes} bytes and a slot of {slot_nbytes}")
    require(
        slot_nbytes % unit == 0 or not includes(file, FLAGGED),
        f"{FLAGGED} needs slots of a multiple of {unit} bytes, and the scratch of {world_size} ranks has slots of"
        f" {slot_nbytes}",
    )


def _check_room(op: str, world_size: int, scratch: Scratch, limit: Any, exact: bool) -> None:
    """Checks the largest tensor. Slots with a sentinel are written once in a call: peers push the rank's shard."""
    if limit is not None:
        _check_count(f"max_nbytes of {world_size} ranks", limit, 1 << 62)
    if scratch.fill != SENTINEL:
        return
    if limit is None:
        raise ValueError("max_nbytes must be given for scratch with a sentinel, which takes tensors of a limited size")
    pushed = (world_size - 1) * (-(-limit // world_size) if op == "allreduce" else limit)
    enough = not exact or pushed <= scratch.nbytes
    require(enough, f"scratch of {world_size} ranks has {scratch.nbytes} bytes, and peers push {pushed} or more")


def _grid(
    where: str, blocks: int | Callable[[int], int], threads: int, chunk: int, world_size: int, nbytes: int
) -> Grid:
    count = blocks(nbytes) if callable(blocks) else blocks
    with inside(where):
        _check_count(f"blocks for {nbytes} bytes", count, MAX_BLOCKS)
    return Grid(count, threads, chunk)
