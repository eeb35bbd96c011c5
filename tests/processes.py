"""Runs a function on several ranks, one process each, or code in a process of its own."""

import contextlib
import functools
import inspect
import io
import multiprocessing
import os
import pickle
import reprlib
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist

# A server imports what ranks need, torch's compiler included, once, and never touches CUDA; every rank is a new fork of
# it, which takes milliseconds. A process has one such server, so all tests take theirs from here.
PROCESSES = multiprocessing.get_context("forkserver")
_IMPORTED = ["graphar", "pytest", "torch._dynamo", "torch._functorch.aot_autograd"]
if not torch.cuda.is_available():  # Inductor would initialise CUDA, which forks cannot use then
    _IMPORTED += ["graphar.cli.main", "perf.__main__", "tests.cases", "tests.pages", "torch._inductor.compile_fx"]
    _IMPORTED += ["torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
    # Inductor, and graphs of varying sizes, import these when they begin.
    _IMPORTED += ["torch.distributed.tensor.experimental", "torch.export._trace", "sympy.tensor.tensor"]


def import_first(*names: str) -> None:
    """Has a server that has not begun import these, too, where there are no GPUs: files of tests call it for ranks."""
    if not torch.cuda.is_available():
        _IMPORTED.extend(name for name in names if name not in _IMPORTED)
    PROCESSES.set_forkserver_preload([*_IMPORTED, "tests.garbage"])


import_first()

SHARE_SWITCH = "GRAPHAR_TEST_SHARE_GPU"

# gloo's first connections fail now and then on a busy machine ("Connection closed by peer"): those of the group that
# ranks begin with, and of groups that tests make.
_TRIES = 3
_NOT_CONNECTED = "Gloo connectFullMesh failed"


class RankFailed(Exception):
    """A rank raised, died or was not done in time. The message has its number, and its traceback if it raised."""


class _NoGroup(RankFailed):
    """torch could not connect the ranks."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Has processes that start meanwhile end at SIGINT, even if this one ignores it as a background job of a shell."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


def run_ranks(
    function: Callable,
    world_size: int,
    *args,
    backend: str = "gloo",
    timeout_s: float = 120.0,
    lost: Collection[int] = (),
) -> list:
    """``function(rank, world_size, *args)`` on every rank of a new process group: the results, in rank order.

    Args:
        function: of a module's top level, for it is pickled, as are its arguments and results.
        world_size: how many ranks.
        args: the same for every rank.
        backend: of the process group. If it names cuda or nccl, rank r has cuda:r as its current device.
        timeout_s: after so many seconds every process is killed.
        lost: ranks that are to die before they return; their result is None.

    Raises:
        RankFailed: by the first rank that raised or died, or at the time limit. No process is left.
    """
    return _run_with(dict(os.environ), function, world_size, args, backend, timeout_s, lost)


def run_on_gpus(function: Callable, world_size: int, *args, timeout_s: float = 180.0, **options) -> list:
    """Runs a function like :func:`run_ranks`, with NCCL and with cuda:r as the current device of rank r.

    If there are fewer GPUs than ranks, all ranks have cuda:0, and gloo: NCCL refuses ranks that share a GPU. Tests that
    need a GPU for each rank have a mark that skips them there: see ``gpu`` in tests/conftest.py.
    """
    environment, backend = dict(os.environ), "cpu:gloo,cuda:nccl"
    if torch.cuda.device_count() < world_size:
        backend, environment[SHARE_SWITCH] = "cpu:gloo,cuda:gloo", "1"
    return _run_with(environment, function, world_size, args, backend, timeout_s, **options)


def on_ranks(world_size: int | None = None, by: Callable = run_ranks, **options) -> Callable:
    """Has every rank run a test's body, in a process each: ``test(rank, world_size, ...)``.

    Args:
        world_size: how many ranks; None: a parameter of the test says so, the one behind ``rank``.
        by: :func:`run_ranks`, or a function like it.
        options: of ``by``.
    """

    def decorate(test: Callable) -> Callable:
        _, size, *rest = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def run_test(**given) -> None:
            by(_run_body, given.pop(size.name, world_size), run_test, given, **options)

        run_test.__signature__ = inspect.Signature([size, *rest] if world_size is None else rest)
        return run_test

    return decorate


def _run_body(rank: int, world_size: int, test: Callable, given: dict) -> None:
    test.__wrapped__(rank, world_size, **given)


def _run_with(
    environment: dict[str, str],
    function: Callable,
    world_size: int,
    args: tuple,
    backend: str,
    timeout_s: float,
    lost: Collection[int] = (),
) -> list:
    work = pickle.dumps((function, args, environment))
    for _ in range(_TRIES - 1):
        try:
            return _run_once(work, world_size, backend, timeout_s, lost)
        except _NoGroup:
            continue
    return _run_once(work, world_size, backend, timeout_s, lost)


def _run_once(work: bytes, world_size: int, backend: str, timeout_s: float, lost: Collection[int]) -> list:
    deadline = time.monotonic() + timeout_s
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            mine, theirs = PROCESSES.Pipe(duplex=False)
            place = (rank, world_size, store.port, backend, timeout_s)
            process = PROCESSES.Process(target=_be_rank, args=(place, work, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        results = _collect(pipes, deadline, timeout_s, lost)
        _expect_clean_exits({r: process for r, process in enumerate(processes) if r not in lost}, deadline)
        return results
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def _collect(pipes: list[Connection], deadline: float, timeout_s: float, lost: Collection[int]) -> list:
    results: dict[int, object] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"rank(s) {list(waiting.values())} were not done after {timeout_s:g} s")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                failure, result = pickle.loads(pipe.recv_bytes())
            except EOFError:
                if rank not in lost:
                    raise RankFailed(f"rank {rank} died without a word") from None
                failure, result = None, None
            if failure:
                raise failure(f"rank {rank} raised\n{result}")
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _expect_clean_exits(processes: dict, deadline: float) -> None:
    for rank, process in processes.items():
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode != 0:
            raise RankFailed(f"rank {rank} returned its result, but ended with exit code {process.exitcode}")


def run_code(
    code: str,
    *arguments: str,
    environment: dict[str, str],
    prepare: Callable[[], None] | None = None,
    timeout_s: float = 120.0,
) -> tuple[str, list[str]]:
    """What code prints, and its RuntimeWarnings, in a process that has imported graphar and torch's compiler.

    A new interpreter would have to import torch, which takes longer than most code.

    Args:
        code: may read ``arguments`` from ``sys.argv[1:]``.
        environment: all environment variables of the process.
        prepare: is called first; of a module's top level.
        timeout_s: after so many seconds the process is killed.

    Raises:
        RankFailed: if the code raised or exited, or at the time limit.
    """
    deadline = time.monotonic() + timeout_s
    mine, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_execute, args=(theirs, code, arguments, environment, prepare), daemon=True)
    process.start()
    theirs.close()
    try:
        (result,) = _collect([mine], deadline, timeout_s, ())
        _expect_clean_exits({0: process}, deadline)
        return result
    finally:
        process.kill()
        process.join()
        mine.close()


def _execute(pipe: Connection, code: str, arguments: tuple, environment: dict, prepare: Callable | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            if prepare:
                prepare()
            exec(code, {"__name__": "__main__"})
        warned = [str(one.message) for one in found if issubclass(one.category, RuntimeWarning)]
        message = pickle.dumps((None, (printed.getvalue().strip(), warned)))
    except BaseException:
        message = pickle.dumps((RankFailed, traceback.format_exc()))
    pipe.send_bytes(message)


def _be_rank(place: tuple, work: bytes, pipe: Connection) -> None:
    try:
        message = pickle.dumps((None, _run(*place, work)))
    except BaseException as error:
        no_group = isinstance(error, _NoGroup) or _NOT_CONNECTED in str(error)
        message = pickle.dumps((_NoGroup if no_group else RankFailed, traceback.format_exc() + _values(error)))
    pipe.send_bytes(message)


def _values(error: BaseException) -> str:
    """The variables where an assertion failed, since pytest rewrites those of its own process alone."""
    if not isinstance(error, AssertionError) or error.args:
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "".join(f"{name} = {reprlib.repr(one)}\n" for name, one in frame.f_locals.items())


def _run(rank: int, world_size: int, port: int, backend: str, timeout_s: float, work: bytes):
    function, args, environment = pickle.loads(work)
    os.environ.clear()  # of what the server was started with
    os.environ.update(environment)
    if "cuda" in backend or "nccl" in backend:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        torch.cuda.set_device(rank if torch.cuda.device_count() >= world_size else 0)
    else:
        torch.set_num_threads(1)  # as in the tests' own process: some matmuls have other bits with more
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    except RuntimeError as error:
        raise _NoGroup(str(error)) from error
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="graphar")
        result = function(rank, world_size, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
