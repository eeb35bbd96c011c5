"""The fast path of eager calls: a call like an earlier one repeats its launch, and any other call does not.

Which changes of a call keep it from being repeated is asked in test_warm_calls.py. Here a plan of the runner is kept
for calls with CPU tensors. Its driver and its streams are stand-ins, so that a launch adds the addresses that it got to
a list.
"""

import contextlib
import gc
import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import graphar
from graphar.errors import CollectiveTimeout, CommunicatorError
from graphar.numerics.epilogues.epilogue import bind
from graphar.ops import repeats
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Config
from graphar.plan.work import Sum
from graphar.runtime import runner
from graphar.runtime.plan import Plan
from graphar.runtime.watch.hook import watching
from tests.ops.conftest import NUMEL, PLAIN


@pytest.fixture
def warm(communicator, like):
    """The communicator after calls that others can repeat."""
    twice(lambda: communicator.allreduce(like))
    return communicator


@pytest.fixture
def like():
    return torch.zeros(4, 6, dtype=torch.bfloat16)


def twice(call):
    """Makes a call that later ones can repeat: one that was made once may have options that never come again."""
    call()
    call()


def repeats_of(machine, *calls):
    """How many of the calls took the fast path. Those that did not may fail: only one kind of call has a plan."""
    machine.repeated.clear()
    for call in calls:
        call()
    return len(machine.repeated)


def test_a_call_like_an_earlier_one_launches_with_its_own_addresses(warm, machine, like):
    x = torch.ones_like(like)

    result = warm.allreduce(x)

    assert machine.repeated == [(x.data_ptr(), result.data_ptr())]
    assert machine.launched[-1] == (5, x.data_ptr(), result.data_ptr())
    assert (result.shape, result.stride(), result.dtype) == (x.shape, x.stride(), x.dtype)
    assert not result.requires_grad


def test_a_call_with_an_output_repeats_and_returns_it(warm, machine, like):
    out = torch.empty_like(like)

    assert warm.allreduce(like, out=out) is out
    assert warm.allreduce(like, out=like) is like
    assert machine.repeated == [(like.data_ptr(), out.data_ptr()), (like.data_ptr(), like.data_ptr())]


@pytest.mark.parametrize("given", ["group", "default", "communicator"])
def test_calls_repeat_with_each_form_of_a_group(communicator, machine, like, group, given):
    chosen = {"group": group, "default": None, "communicator": communicator}[given]
    if given != "communicator":
        theirs = graphar.runtime.registry.engine_of(chosen)
        theirs.runner = communicator.engine.runner
        theirs.plans.update(communicator.engine.plans)

    twice(lambda: graphar.allreduce(like, chosen))

    assert repeats_of(machine, lambda: graphar.allreduce(like, chosen)) == 1


def test_results_of_repeated_calls_in_inference_mode_are_inference_tensors(communicator, machine):
    with torch.inference_mode():
        x = torch.zeros(4, 6, dtype=torch.bfloat16)
        twice(lambda: communicator.allreduce(x))
        assert communicator.allreduce(x).is_inference()
        assert communicator.allreduce(x, out=x) is x
    assert len(machine.repeated) == 2


def keep_plan_for(communicator, x):
    """Lets calls with a tensor like ``x`` launch on the stand-in as well."""
    (plan,) = communicator.engine.plans.values()
    communicator.engine.plans.keep(Call(Sum(x.numel(), shape=tuple(x.shape)), torch.bfloat16, -1), plan)


def functions_called(call, until="setprofile", events=("call", "c_call")):
    """The functions, of Python and of C, that a call calls until the first one of a name."""
    seen = []

    def profile(frame, event, argument):
        if event in events:
            seen.append(frame.f_code.co_name if event == "call" else argument.__name__)

    gc.collect()
    gc.disable()  # a collection of other tests' objects would call what awaits their end
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen[: seen.index(until)]


@pytest.mark.parametrize(("into", "most"), [("a new tensor", 29), ("another", 31), ("x", 29)])
def test_a_repeated_call_calls_few_functions(warm, machine, like, into, most):
    """The time of a small call is the host's, and each of them takes 20 to 100 ns. With ``out`` none allocates."""
    options = {"a new tensor": {}, "another": {"out": torch.empty_like(like)}, "x": {"out": like}}[into]
    warm.allreduce(like, **options)

    called = functions_called(lambda: warm.allreduce(like, **options))

    assert len(called) <= most, called
    assert ("_empty_strided_cpu" in called) == (into == "a new tensor")


def test_calls_of_one_size_and_two_shapes_are_both_repeated(communicator, machine, like):
    square = like.view(6, 4)
    keep_plan_for(communicator, square)
    for x in (like, square) * 2:
        communicator.allreduce(x)

    assert repeats_of(machine, lambda: communicator.allreduce(like), lambda: communicator.allreduce(square)) == 2


def test_of_calls_that_differ_in_another_tensor_those_that_go_on_are_repeated(communicator, machine, like):
    (plan,) = communicator.engine.plans.values()
    single, half = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    for bias in (single, half):
        form, _ = bind("allreduce", "v + b[0]", like, [bias], [])
        communicator.engine.plans.keep(PLAIN._replace(work=PLAIN.work._replace(epilogue=form)), plan)

    def adding(bias):
        return lambda: communicator.allreduce(like, epilogue=graphar.Epilogue("v + b[0]", b=bias))

    for bias in (single, half) * 3:
        adding(bias)()
    assert repeats_of(machine, adding(single), adding(half)) == 1

    calls = repeats_of(machine, *[adding(half)] * 100)

    assert 30 < calls <= 100
    assert repeats_of(machine, adding(half)) == 1


def test_a_call_that_is_made_once_leaves_nothing_to_repeat(communicator, machine, like):
    """Its options may never come again: an epilogue that is a new function in each call is a new key."""
    communicator.allreduce(like)

    assert not communicator.engine.plans.repeats


def test_a_call_that_copies_its_input_leaves_nothing_to_repeat(communicator, machine):
    x = torch.arange(NUMEL, dtype=torch.bfloat16).view(6, 4).T

    results = [communicator.allreduce(x) for _ in range(2)]

    assert all(result.is_contiguous() for result in results)
    assert len(machine.launched) == 2
    assert not communicator.engine.plans.repeats


def test_a_call_on_another_device_is_not_repeated(warm, machine, like):
    machine.device = 3

    assert repeats_of(machine, lambda: warm.allreduce(like)) == 0
    assert len(machine.launched) == 3  # all calls were launched


def test_a_repeated_call_follows_the_stream(warm, machine, like):
    machine.stream = 6

    assert repeats_of(machine, lambda: warm.allreduce(like)) == 1
    assert machine.launched[-1][0] == 6
    assert warm.engine.runner.members[0].followed == [6]


def test_calls_with_symmetric_tensors_repeat_the_launch_of_their_own_plan(warm, symmetric, like):
    """Which plan that is depends on the addresses alone, and calls of one shape take turns."""
    x, out, plain, launched = symmetric(like), symmetric(like), torch.empty_like(like), []

    def plan_of(is_symmetric):
        def launch(inputs, outputs, numbers):
            launched.append((is_symmetric, inputs[0].data_ptr(), outputs[0].data_ptr()))

        return Plan(lambda ranks: None, Config(Algorithm.ONE_SHOT_PUSH, 2, 32), launch_like=lambda own: launch)

    for is_symmetric in (False, True):
        warm.engine.plans.keep(PLAIN._replace(symmetric=is_symmetric), plan_of(is_symmetric))
    warm.engine.plans.repeats.clear()
    calls = [(False, like, plain), (False, x, plain), (True, x, out), (True, x, x)]
    for _, one, to in calls * 2:
        warm.allreduce(one, out=to)
    launched.clear()

    for _, one, to in calls * 2:
        assert warm.allreduce(one, out=to) is to
    new = warm.allreduce(x)

    expected = [(is_symmetric, one.data_ptr(), to.data_ptr()) for is_symmetric, one, to in calls]
    assert launched == [*expected, *expected, (False, x.data_ptr(), new.data_ptr())]


def test_a_closed_communicator_raises(warm, machine, like):
    warm.close()

    with pytest.raises(CommunicatorError, match="allreduce: this communicator is closed"):
        warm.allreduce(like)
    assert machine.repeated == []


@pytest.mark.parametrize("keeps_store", [False, True])
def test_a_destroyed_group_raises(warm, machine, like, group, keeps_store):
    theirs = graphar.runtime.registry.engine_of(None)
    theirs.runner = warm.engine.runner
    theirs.plans.update(warm.engine.plans)
    twice(lambda: graphar.allreduce(like, group))
    assert repeats_of(machine, lambda: graphar.allreduce(like, group), lambda: graphar.allreduce(like)) == 2

    kept = dist.distributed_c10d._get_process_group_store(group) if keeps_store else None
    dist.destroy_process_group()

    for given in (group, None):
        with pytest.raises((RuntimeError, ValueError)):
            graphar.allreduce(like, given)
    assert len(machine.repeated) == 2
    del kept


def test_dropped_plans_are_not_repeated(warm, machine, like):
    """As when a tuning table is replaced."""
    warm.engine.plans.clear()

    assert repeats_of(machine, lambda: warm.allreduce(like)) == 0


def test_a_plan_that_another_thread_drops_during_its_call_is_not_repeated(communicator, machine, like):
    plans = communicator.engine.plans
    ((call, plan),) = plans.items()

    def drop(ranks):
        plan.run(ranks)
        plans.clear()
        plans.keep(call, plan)

    communicator.allreduce(like)
    plans[call] = plan._replace(run=drop)

    communicator.allreduce(like)

    assert len(machine.launched) == 2
    assert not plans.repeats


def test_a_watched_call_is_not_repeated(warm, machine, like):
    watched = []

    with watching(lambda engine, call, ranks: contextlib.nullcontext(watched.append(call.op))):
        assert repeats_of(machine, lambda: warm.allreduce(like)) == 0
    assert watched == ["allreduce"]

    assert repeats_of(machine, lambda: warm.allreduce(like)) == 1


def test_a_repeated_call_raises_the_failure_of_an_earlier_one(warm, machine, like, monkeypatch):
    monkeypatch.setattr(runner, "calls_begun", lambda counters, device: 0)
    record = warm.engine.runner.members[0].record
    record.algorithm, record.kind = Algorithm.ONE_SHOT_PUSH.number, 1
    launches = len(machine.launched)

    for _ in range(2):
        with pytest.raises(CollectiveTimeout):
            warm.allreduce(like)

    assert len(machine.launched) == launches
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(warm.engine.runner.lock.acquire, blocking=False).result()


@pytest.mark.parametrize("error", [TypeError, RuntimeError, CommunicatorError])
def test_a_repeated_call_that_fails_is_not_made_again(warm, machine, like, monkeypatch, error):
    tried = []

    def fail(stream):
        tried.append(stream)
        raise error("as arranged")

    warm.allreduce(like)
    machine.stream = 6
    monkeypatch.setattr(warm.engine.runner.members[0], "follow", fail)

    with pytest.raises(error, match="as arranged"):
        warm.allreduce(like)

    assert (len(machine.repeated), len(tried)) == (2, 1)


class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class DispatchOutsideOfCompilers(Dispatch):
    """A mode that guards of compiled code do not see."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class Function(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [
        Dispatch,
        DispatchOutsideOfCompilers,
        Function,
        forward_ad.dual_level,
        lambda: torch.autograd.profiler.profile(use_cpu=True),
    ],
)
def test_calls_under_a_mode_of_torch_are_not_repeated(warm, machine, like, mode):
    with mode():
        assert repeats_of(machine, lambda: warm.allreduce(like)) == 0
    assert repeats_of(machine, lambda: warm.allreduce(like)) == 1


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_calls_in_a_function_transform_are_not_repeated(warm, machine, like, transform):
    seen = []

    def call(x):
        warm.allreduce(like)  # a tensor that the transform does not wrap
        seen.append(len(machine.repeated))
        return x.sum()

    if transform == "vmap":
        torch.vmap(call)(torch.zeros(2, 3))
    else:
        torch.func.grad(call)(torch.zeros(3))

    assert seen == [0]


@pytest.mark.parametrize("name", ["_len_torch_dispatch_stack", "_len_torch_function_stack"])
def test_with_a_torch_that_lacks_a_private_name_no_call_can_repeat(monkeypatch, name):
    monkeypatch.delattr(torch._C, name)
    loaded = importlib.util.module_from_spec(repeats.__spec__)
    repeats.__spec__.loader.exec_module(loaded)

    assert repeats.can_repeat
    assert not loaded.can_repeat


def test_where_no_call_can_repeat_plans_are_called(communicator, machine, like, monkeypatch):
    monkeypatch.setattr(repeats, "can_repeat", False)
    calls = [lambda: communicator.allreduce(like)] * 3

    assert repeats_of(machine, *calls) == 0
    assert len(machine.launched) == 3
