"""Arguments that break a rule: an error that names the argument, the rule and what came, and no harm done."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import Algorithm, Communicator, UnsupportedError
from graphar.plan import checks
from graphar.plan.algorithms import with_kernels
from tests.cases import integers, same_bits
from tests.processes import run_ranks

ALLREDUCE = with_kernels("allreduce")
ALGORITHMS = ", ".join(["auto", *ALLREDUCE, Algorithm.FALLBACK, Algorithm.HIERARCHICAL])
COMPLEX = torch.complex(torch.ones(8), torch.ones(8))

# What comes, and the error: its class and its whole message.
BAD_X = {
    "no tensor": (3, TypeError, "must be a torch.Tensor, got int"),
    "None": (None, TypeError, "must be a torch.Tensor, got NoneType"),
    "sparse": (torch.eye(3).to_sparse(), TypeError, "must be a dense (strided) tensor, got layout torch.sparse_coo"),
    "complex": (COMPLEX, TypeError, "must be a real floating-point or integer tensor, got torch.complex64"),
    "bool": (torch.ones(3) > 0, TypeError, "must be a real floating-point or integer tensor, got torch.bool"),
    "fp8": (
        torch.ones(3).to(torch.float8_e4m3fn),
        TypeError,
        "must be a real floating-point or integer tensor, got torch.float8_e4m3fn",
    ),
}

BAD_LISTS = {
    "empty": ([], "needs at least one tensor, got an empty list"),
    "unequal shapes": (
        [torch.ones(6, 2), torch.ones(6, 5)],
        "tensors must have equal shapes, got [6, 2] and, at 1, [6, 5]",
    ),
    "unequal dtypes": (
        [torch.ones(2), torch.ones(2).half()],
        "tensors must have equal dtypes, got torch.float32 and, at 1, torch.float16",
    ),
    "mixed devices": (
        [torch.ones(2), torch.ones(2, device="meta")],
        "tensors must be all on the CPU or all on GPUs, got cpu and meta",
    ),
    "another device": ([torch.ones(2, device="meta")], "tensors must be on the CPU or on CUDA devices, got meta"),
}

# Each made from the room of 16 elements whose first 8 are the input.
BAD_OUTS = {
    "no tensor": (lambda room: 3, TypeError, "out must be a torch.Tensor, got int"),
    "wrong shape": (lambda room: torch.ones(3), ValueError, "out must have the input's shape [8], got [3]"),
    "wrong dtype": (
        lambda room: torch.ones(8).half(),
        ValueError,
        "out must have the input's dtype torch.float32, got torch.float16",
    ),
    "wrong device": (
        lambda room: torch.ones(8, device="meta"),
        ValueError,
        "out must have the input's device cpu, got meta",
    ),
    "requires grad": (
        lambda room: torch.ones(8, requires_grad=True),
        ValueError,
        "out= cannot be differentiated through; omit it, or call under torch.no_grad()",
    ),
    "overlap": (
        lambda room: room[4:12],
        ValueError,
        "out must be the input itself or share no memory with it, got a partial overlap",
    ),
    "negated": (
        lambda room: torch._neg_view(room[8:]),
        ValueError,
        "out must hold its values as they are, got a negated view",
    ),
    "expanded": (
        lambda room: room[8:9].expand(8),
        ValueError,
        "out must have memory of its own for each element, got strides [0]",
    ),
}

BAD_CHOICES = {
    "unknown algorithm": (
        {"algorithm": "ring"},
        ValueError,
        f"algorithm must be one of {ALGORITHMS}, got 'ring'",
    ),
    "another op's": (
        {"algorithm": "allgather_push"},
        ValueError,
        f"algorithm must be one of {ALGORITHMS}, got 'allgather_push'",
    ),
    "no algorithm": ({"algorithm": None}, ValueError, f"algorithm must be one of {ALGORITHMS}, got None"),
    "zero timeout": (
        {"timeout_s": 0},
        ValueError,
        "timeout_s must be above 0 and at most 1e6 seconds, got 0",
    ),
    "negative timeout": (
        {"timeout_s": -1.5},
        ValueError,
        "timeout_s must be above 0 and at most 1e6 seconds, got -1.5",
    ),
    "NaN timeout": (
        {"timeout_s": float("nan")},
        ValueError,
        "timeout_s must be above 0 and at most 1e6 seconds, got nan",
    ),
    "endless timeout": (
        {"timeout_s": float("inf")},
        ValueError,
        "timeout_s must be above 0 and at most 1e6 seconds, got inf",
    ),
    "timeout in words": ({"timeout_s": "3"}, TypeError, "timeout_s must be a number of seconds, got str"),
    "bool timeout": ({"timeout_s": True}, TypeError, "timeout_s must be a number of seconds, got bool"),
}

BAD_DEVICES = {
    "a name": ("cpu", ValueError, "devices must be a list of at least one device, got 'cpu'"),
    "a number": (2, ValueError, "devices must be a list of at least one device, got 2"),
    "none": ([], ValueError, "devices must be a list of at least one device, got []"),
    "one twice": (["cuda:0", "cuda:1", "cuda:0"], ValueError, "tensors must be on distinct devices, got cuda:0 twice"),
    "two kinds": (["cpu", "cuda:0"], ValueError, "devices must be all the CPU or all CUDA, got ['cpu', 'cuda:0']"),
    "no index": (["cuda"], ValueError, "devices must name their index, got cuda"),
    "another kind": (["meta"], ValueError, "tensors must be on the CPU or on CUDA devices, got meta"),
}


def table(cases):
    return pytest.mark.parametrize("bad", cases.values(), ids=cases)


def refuses(kind, message, op="allreduce"):
    return pytest.raises(kind, match=f"^{re.escape(f'{op}: {message}')}$")


@pytest.fixture
def room():
    return integers(0, 16, torch.float32)


@pytest.fixture
def x(room):
    return room[:8]


@pytest.fixture
def y():
    return integers(1, 8, torch.float32)


@pytest.fixture
def pair():
    """A communicator of two ranks in this process, which has to work as before after the test."""
    with Communicator(devices=["cpu", "cpu"]) as communicator:
        yield communicator
        assert communicator.allreduce([torch.ones(3)] * 2)[1].tolist() == [2, 2, 2]


@pytest.fixture
def alone():
    """A process group of one, whose communicator has to work as before after the test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Communicator() as communicator:
        yield communicator
        assert communicator.allreduce(torch.ones(3)).tolist() == [1, 1, 1]
    dist.destroy_process_group()


# ---- tensors --------------------------------------------------------------------------------------------------------


@table(BAD_X)
def test_a_bad_tensor_is_refused(bad, alone):
    x, kind, message = bad

    with refuses(kind, f"x {message}"):
        alone.allreduce(x)
    with refuses(kind, f"x {message}", "explain"):
        graphar.explain(x, alone)


@table(BAD_X)
def test_a_bad_tensor_in_a_list_is_refused(bad, pair, x):
    bad_x, kind, message = bad
    out = torch.full((8,), 99.0)

    with refuses(kind, f"tensor 1 {message}"):
        pair.allreduce([x, bad_x], out=[out, out.clone()])

    assert out.tolist() == [99] * 8


@table(BAD_LISTS)
def test_a_bad_list_is_refused(bad, pair):
    xs, message = bad

    with refuses(ValueError, message):
        pair.allreduce(xs)


def test_a_list_of_another_length_than_the_communicators_is_refused(pair):
    message = "a list of tensors on ['cpu', 'cpu', 'cpu'] does not fit a communicator of ['cpu', 'cpu']"

    with refuses(ValueError, message, "graphar"):
        pair.allreduce([torch.ones(2)] * 3)


def test_two_tensors_on_one_gpu_are_refused():
    gpu = torch.device("cuda:1")

    with refuses(ValueError, "tensors must be on distinct devices, got cuda:1 twice"):
        checks.check_devices("allreduce", [torch.device("cuda:0"), gpu, gpu])


# ---- out= -----------------------------------------------------------------------------------------------------------


@table(BAD_OUTS)
def test_a_bad_out_is_refused_and_nothing_written(bad, alone, room, x):
    make, kind, message = bad

    with refuses(kind, message):
        alone.allreduce(x, out=make(room))

    assert same_bits(room, integers(0, 16, torch.float32)) == 0


@table(BAD_OUTS)
def test_a_bad_out_in_a_list_is_refused_and_nothing_written(bad, pair, room, x, y):
    make, kind, message = bad
    good = torch.full((8,), 99.0)

    with refuses(kind, message):
        pair.allreduce([y, x], out=[good, make(room)])

    assert same_bits(room, integers(0, 16, torch.float32)) == 0
    assert good.tolist() == [99] * 8


def test_an_out_between_the_elements_of_the_input_shares_no_memory_with_it(pair):
    columns = [integers(rank, 16, torch.float32).view(8, 2) for rank in range(2)]
    expected = graphar.reference.allreduce([x[:, 0] for x in columns])

    pair.allreduce([x[:, 0] for x in columns], out=[x[:, 1] for x in columns])

    assert [same_bits(x[:, 1], expected) for x in columns] == [0, 0]
    assert [same_bits(x[:, 0], integers(rank, 16, torch.float32)[::2]) for rank, x in enumerate(columns)] == [0, 0]


@pytest.mark.parametrize(
    ("out", "what"), [(torch.zeros(2, 8), "Tensor"), ([torch.zeros(8)], "a list of 1"), (iter([]), "list_iterator")]
)
def test_an_out_that_is_no_list_of_as_many_is_refused(pair, x, y, out, what):
    with refuses(ValueError, f"out must be a list of 2 tensors, one for each of x, got {what}"):
        pair.allreduce([x, y], out=out)


def test_a_list_as_out_of_one_tensor_is_refused(alone, x):
    with refuses(TypeError, "out must be a torch.Tensor, got list"):
        alone.allreduce(x, out=[torch.zeros(8)])


def test_an_input_that_needs_a_gradient_cannot_go_to_out(alone, x):
    parameter = torch.nn.Parameter(x.clone())
    out = torch.full((8,), 99.0)

    with refuses(ValueError, "out= cannot be differentiated through; omit it, or call under torch.no_grad()"):
        alone.allreduce(parameter, out=out)
    assert out.tolist() == [99] * 8

    with torch.no_grad():
        assert same_bits(alone.allreduce(parameter, out=out), x) == 0


# ---- choices --------------------------------------------------------------------------------------------------------


@table(BAD_CHOICES)
def test_a_bad_choice_is_refused(bad, pair, alone, x, y):
    choice, kind, message = bad
    out = torch.full((8,), 99.0)

    with refuses(kind, message):
        pair.allreduce([x, y], **choice)
    with refuses(kind, message):
        alone.allreduce(x, **choice)
    with refuses(kind, message):
        alone.allreduce(x, out=out, **choice)

    assert out.tolist() == [99] * 8


@pytest.mark.parametrize("algorithm", [a.value for a in ALLREDUCE])
def test_an_algorithm_that_cannot_serve_is_refused(pair, x, y, algorithm):
    out = torch.full((8,), 99.0)

    with refuses(UnsupportedError, f"{algorithm} cannot serve this call: the tensor is on the CPU"):
        pair.allreduce([x, y], out=[out, out.clone()], algorithm=algorithm)

    assert out.tolist() == [99] * 8


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_communicator_refuses_a_bad_timeout(timeout_s):
    with refuses(ValueError, f"timeout_s must be above 0 and at most 1e6 seconds, got {timeout_s}", "Communicator"):
        Communicator(devices=["cpu"], timeout_s=timeout_s)


# ---- groups and communicators ---------------------------------------------------------------------------------------


@table(BAD_DEVICES)
def test_a_communicator_refuses_bad_devices(bad):
    devices, kind, message = bad

    with refuses(kind, message, "Communicator"):
        Communicator(devices=devices)


def test_a_communicator_refuses_a_group_with_devices(alone):
    with refuses(ValueError, "give a group or devices, not both", "Communicator"):
        Communicator(dist.group.WORLD, devices=["cpu"])


def test_a_communicator_refuses_what_is_no_group():
    with refuses(TypeError, "group must be a torch.distributed.ProcessGroup, got str", "graphar"):
        Communicator("world")


@pytest.mark.parametrize("call", [graphar.allreduce, graphar.explain])
def test_what_is_no_group_is_refused(call, x):
    with refuses(TypeError, "group must be a ProcessGroup or a Communicator, got str", "graphar"):
        call(x, "world")


@pytest.mark.parametrize("call", [graphar.allreduce, graphar.explain, lambda x: Communicator()])
def test_without_a_process_group_a_tensor_is_refused(call, x):
    message = (
        "torch.distributed is not initialised; call torch.distributed.init_process_group(), or pass a list with one "
        "tensor a device"
    )
    with refuses(ValueError, message, "graphar"):
        call(x)


def test_a_communicator_of_devices_refuses_a_tensor(pair, x):
    with refuses(ValueError, "this communicator has devices, so it takes a list of tensors, got a tensor", "graphar"):
        pair.allreduce(x)


def test_a_communicator_of_a_group_refuses_a_list(alone, x):
    message = "a list of tensors on ['cpu'] does not fit a communicator of a process group"
    with refuses(ValueError, message, "graphar"):
        alone.allreduce([x])
    with refuses(ValueError, message, "graphar"):
        graphar.allreduce([x], dist.group.WORLD)


def test_cpu_devices_may_carry_an_index():
    with Communicator(devices=["cpu:0", "cpu:0"]) as communicator:
        assert communicator.allreduce([torch.ones(1)] * 2)[0].item() == 2


def reduce_over_a_group_for_gpus_only(rank, world_size):
    group = dist.new_group(backend="cuda:gloo")
    out = torch.full((3,), 99.0)
    with pytest.raises(UnsupportedError, match="the group has no backend for cpu tensors"):
        graphar.allreduce(torch.ones(3), group, out=out)
    return out.tolist(), graphar.allreduce(torch.ones(3)).tolist()


def test_a_group_without_a_backend_for_the_device_is_named():
    assert run_ranks(reduce_over_a_group_for_gpus_only, 2) == [([99.0] * 3, [2.0] * 3)] * 2


def test_explain_refuses_what_is_no_tensor():
    with refuses(TypeError, "x must be a torch.Tensor, got int", op="explain"):
        graphar.explain(3)


def test_a_communicator_explains_no_empty_list(pair):
    with refuses(ValueError, "needs at least one tensor, got an empty list", op="explain"):
        pair.explain([])
