"""Warm eager calls of every op: they reach their launch in few Python calls, with the operands of the call before."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar import Codec, Epilogue
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.runtime import engine as engines
from graphar.runtime import runner
from graphar.runtime.plan import Plan
from tests.ops.test_repeats import functions_called

MOST_CALLS = 8  # Python calls from the public op to the launch
BF16 = torch.bfloat16
ROWS, COLUMNS, K = 4, 16, 8


def zeros(*shape):
    return torch.zeros(shape, dtype=BF16)


class Form:
    """A call of an op: its arguments by name, apart from the group."""

    def __init__(self, op, *given, **options) -> None:
        self.op, signature = op, inspect.signature(op)
        bound = signature.bind(*given, **options)
        bound.apply_defaults()
        self.given = {name: one for name, one in bound.arguments.items() if name not in ("group", "removed")}

    def __call__(self, group, **changed):
        return self.op(group=group, **self.given | changed)


A, W, BIAS, RESIDUAL, WEIGHT = zeros(ROWS, K), zeros(COLUMNS, K), zeros(COLUMNS), zeros(ROWS, COLUMNS), zeros(COLUMNS)
SUMMED, TOKENS = zeros(ROWS, COLUMNS), torch.zeros(ROWS, dtype=torch.int64)
SCALED = graphar.Epilogue("v * scale + bias[col]", scale=0.5, bias=BIAS)
OPS = {
    "allreduce": Form(graphar.allreduce, SUMMED),
    "allreduce, out": Form(graphar.allreduce, SUMMED, out=zeros(ROWS, COLUMNS)),
    "allreduce, codec": Form(graphar.allreduce, SUMMED, codec="int8"),
    "allreduce, residual": Form(graphar.allreduce, SUMMED, codec="int8", residual=RESIDUAL),
    "allreduce, residual and out": Form(
        graphar.allreduce, SUMMED, codec="int8", residual=RESIDUAL, out=zeros(ROWS, COLUMNS)
    ),
    "allreduce, epilogue": Form(graphar.allreduce, SUMMED, epilogue=SCALED),
    "allreduce, expression": Form(graphar.allreduce, SUMMED, epilogue="-v"),
    "reducescatter": Form(graphar.reducescatter, SUMMED),
    "reducescatter, codec": Form(graphar.reducescatter, SUMMED, codec="int8"),
    "reducescatter, residual": Form(graphar.reducescatter, SUMMED, codec="int8", residual=RESIDUAL),
    "reducescatter, epilogue": Form(graphar.reducescatter, SUMMED, epilogue=SCALED),
    "allgather": Form(graphar.allgather, SUMMED),
    "allgather, sizes": Form(graphar.allgather, SUMMED, sizes=[ROWS]),
    "alltoall": Form(graphar.alltoall, SUMMED),
    "alltoall, out": Form(graphar.alltoall, SUMMED, out=zeros(ROWS, COLUMNS)),
    "alltoall, sizes": Form(graphar.alltoall, SUMMED, sizes=([ROWS], [ROWS])),
    "alltoall, heads": Form(graphar.alltoall, SUMMED, scatter_dim=1, gather_dim=0),
    "allgather, tuple": Form(graphar.allgather, (SUMMED, A)),
    "allreduce_residual_rmsnorm": Form(graphar.allreduce_residual_rmsnorm, SUMMED, RESIDUAL, WEIGHT),
    "reducescatter_residual_rmsnorm": Form(graphar.reducescatter_residual_rmsnorm, SUMMED, RESIDUAL, WEIGHT),
    "fused_matmul_allreduce": Form(graphar.fused_matmul_allreduce, A, W),
    "fused_matmul_allreduce, out": Form(graphar.fused_matmul_allreduce, A, W, out=zeros(ROWS, COLUMNS)),
    "fused_matmul_allreduce, bias and epilogue": Form(
        graphar.fused_matmul_allreduce, A, W, bias=BIAS, epilogue="relu(v)"
    ),
    "fused_matmul_reducescatter": Form(graphar.fused_matmul_reducescatter, A, W, bias=BIAS),
    "fused_allgather_matmul": Form(graphar.fused_allgather_matmul, A, W, gathered=True),
    "fused_matmul_allreduce_residual_rmsnorm": Form(
        graphar.fused_matmul_allreduce_residual_rmsnorm, A, W, RESIDUAL, WEIGHT
    ),
    "fused_matmul_reducescatter_residual_rmsnorm": Form(
        graphar.fused_matmul_reducescatter_residual_rmsnorm, A, W, RESIDUAL, WEIGHT
    ),
    "cross_entropy": Form(graphar.cross_entropy, SUMMED, TOKENS),
    "log_probs": Form(graphar.log_probs, SUMMED, TOKENS),
}


@pytest.fixture
def bound(communicator, monkeypatch):
    """The communicator, whose works of every kind are bound to a stand-in; and what it launched and how it ran."""
    machine = SimpleNamespace(launched=[], ran=[])

    def launch(inputs, outputs, numbers, corner=None):
        machine.launched.append((inputs, outputs, numbers))
        written(outputs)

    def run(ranks):
        machine.ran.append(ranks)
        written(ranks[0].outputs)

    def written(outputs):
        for one in outputs:
            one.data.fill_(7)  # as a kernel: torch sees no change

    def bind(engine, call, ranks):
        return Plan(run, Config(Algorithm.ONE_SHOT_PUSH, 2, 32), launch_like=lambda own: launch)

    communicator.engine.plans.clear()
    for kind in engines.binders:
        monkeypatch.setitem(engines.binders, kind, bind)
    return communicator, machine


def python_calls(call):
    """The Python functions that are called until the launch, without lambdas, which stand in for functions of torch."""
    return [name for name in functions_called(call, until="launch", events=("call",)) if name != "<lambda>"]


@pytest.mark.parametrize("name", OPS)
def test_a_warm_call_of_every_op_reaches_its_launch_in_few_python_calls(bound, name):
    communicator, machine = bound
    for _ in range(3):
        OPS[name](communicator)
    ran = len(machine.ran)

    # Two more are the kernels' own: they write the operands' addresses, and a matmul's look up its tensor maps.
    calls = python_calls(functools.partial(OPS[name].op, group=communicator, **OPS[name].given))

    assert len(machine.ran) == ran
    assert len(calls) + 2 <= MOST_CALLS, calls


def test_symmetric_tensors_cost_a_warm_call_one_look_up(bound, symmetric):
    communicator, machine = bound
    forms = [Form(graphar.allreduce, x, out=x.clone()) for x in (symmetric(SUMMED), SUMMED)]
    calls = [functools.partial(graphar.allreduce, group=communicator, **form.given) for form in forms]
    for call in calls * 3:
        call()
    ran = len(machine.ran)

    direct, plain = map(python_calls, calls)

    assert len(machine.ran) == ran
    assert direct == plain  # a plain call asks, too, once there is symmetric memory
    assert direct.count("hold") == 1
    assert len(direct) + 2 <= MOST_CALLS, direct


@pytest.mark.parametrize("name", OPS)
def test_a_repeated_call_launches_with_the_operands_of_the_call_that_ran(bound, name):
    communicator, machine = bound
    for _ in range(3):
        OPS[name](communicator)
    (own,) = machine.ran[-1]

    result = OPS[name](communicator)

    ((inputs, outputs, numbers),) = machine.launched
    assert [one.data_ptr() for one in inputs] == [one.data_ptr() for one in own.inputs]
    assert numbers == own.numbers
    results = result if isinstance(result, tuple) else (result,)
    delivered = outputs[:1] if inputs[-1] is TOKENS else outputs  # a loss also has a state for its backward pass
    assert all(one is out for one, out in zip(results, delivered, strict=True))
    assert [(one.shape, one.dtype) for one in outputs] == [(one.shape, one.dtype) for one in own.outputs]


@pytest.mark.parametrize("name", OPS)
def test_a_repeated_call_counts_the_bytes_of_the_call_that_ran(bound, monkeypatch, name):
    monkeypatch.setattr(runner, "is_capturing", lambda device: False)
    communicator, _ = bound
    counts = []
    for _ in range(5):
        OPS[name](communicator)
        counts += [(one.calls, one.repeated, one.nbytes) for one in communicator.stats().calls]

    (_, _, nbytes), *_, (_, repeated, _) = counts
    assert nbytes > 0
    assert repeated > 0
    assert [(calls, total) for calls, _, total in counts] == [(calls, calls * nbytes) for calls in range(1, 6)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_with_a_layers_parameters_repeat_where_no_gradients_are_recorded(bound, mode):
    communicator, machine = bound
    weight, bias = torch.nn.Parameter(W.clone()), torch.nn.Parameter(BIAS.clone())
    with mode():
        for _ in range(4):
            y = graphar.fused_matmul_allreduce(A, weight, bias=bias, group=communicator)

    ((inputs, _, _),) = machine.launched
    assert [one.data_ptr() for one in inputs] == [one.data_ptr() for one in (A, weight, bias)]
    assert type(y) is torch.Tensor


def test_a_call_that_repeats_without_gradients_still_records_them_where_they_are_wanted(bound):
    communicator, machine = bound
    weight = torch.nn.Parameter(W.clone())
    with torch.no_grad():
        for _ in range(4):
            graphar.fused_matmul_allreduce(A, weight, group=communicator)

    y = graphar.fused_matmul_allreduce(A, weight, group=communicator)

    assert y.requires_grad
    assert len(machine.launched) == 1


# An allowed value of each option, which the calls that are repeated have.
ALLOWED = {
    "timeout_s": 1,
    "axis": 0,
    "scatter_dim": 0,
    "gather_dim": 1,
    "sizes": [ROWS],
    "eps": 1,
    "weight_offset": 1,
    "group_size": 128,
    "num_partitions": 1,
    "codec": Codec(8, rounding="stochastic"),
    "algorithm": "auto",
    "partition": "auto",
    "epilogue": SCALED,
    "gathered": True,
    "bias": BIAS,
    "reduction": "sum",
    "ignore_index": 1,
    "label_smoothing": 1,
    "lse_square_scale": 1,
    "vocab_size": 1,
    "overwrite_logits": True,
    "temperature": 2,
    "entropy": True,
    "top1": True,
}
OPERANDS = {"logits", "target", "tokens", "x", "a", "w", "residual", "weight", "bias", "scale", "a_scale", "w_scale"}
TENSORS = OPERANDS | {"out"}


class Subclass(torch.Tensor):
    pass


OF_A_TENSOR = {
    "another dtype": lambda x: x.half(),
    "another shape": lambda x: x.reshape(-1),
    "one row less": lambda x: x[1:].clone(),
    "other strides": lambda x: x.t().contiguous().t(),
    "gaps": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "stride 0": lambda x: x[:1].expand(x.shape),
    "another alignment": lambda x: torch.cat([x.flatten(), x.flatten()[:1]])[1:].view(x.shape),
    "a parameter": lambda x: torch.nn.Parameter(x.clone(), x.dtype.is_floating_point),
    "a subclass": lambda x: x.clone().as_subclass(Subclass),
    "a negated view": lambda x: torch._neg_view(x.clone()),
    "no memory": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "a list": lambda x: [x],
    "no tensor": lambda x: 3,
    "nothing": lambda x: None,
}
STATES = {
    "without gradients": torch.no_grad,
    "in inference mode": torch.inference_mode,
    "deterministic": lambda: deterministic(),
}


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def changes(given: dict) -> Iterator[tuple[str, dict]]:
    """Arguments that a call must not be repeated with, or only with the same outcome; each argument in turn."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            for what, change in OF_A_TENSOR.items():
                yield f"{name}: {what}", {name: change(value)}
            yield from shared(given, name, value)
        elif isinstance(value, (int, float, list)):
            for kind in (bool, int, float, Fraction, str):
                of_kind = [kind(one) for one in value] if isinstance(value, list) else kind(value)
                yield f"{name}: {of_kind!r}", {name: of_kind}
            yield f"{name}: negative", {name: [-one for one in value] if isinstance(value, list) else -value}
        elif isinstance(value, Epilogue):
            for of_name, tensor in value.tensors.items():
                of_rest = value.scalars | value.tensors
                for what, change in OF_A_TENSOR.items():
                    with contextlib.suppress(TypeError):  # of the epilogue itself
                        yield f"{name}: {what}", {name: Epilogue(value.what, **of_rest | {of_name: change(tensor)})}
            yield f"{name}: a name more", {name: Epilogue(value.what, **value.scalars, **value.tensors, more=1)}
        else:
            yield f"{name}: 3", {name: 3}
            yield f"{name}: other words", {name: "other words"}
            yield f"{name}: allowed", {name: ALLOWED.get(name, A)}
    x, epilogue = next(iter(given.values())), given.get("epilogue")
    if "out" in given:
        yield "out: the first tensor", {"out": x}
    if "out" in given and isinstance(epilogue, Epilogue):
        inside = {"bias": x.flatten()[: len(BIAS)]}
        yield "epilogue: in the output", {"out": x, "epilogue": Epilogue(epilogue.what, **epilogue.scalars, **inside)}


def shared(given: dict, name: str, x: torch.Tensor) -> Iterator[tuple[str, dict]]:
    """A tensor that shares memory with another one: it begins there, or some elements later."""
    for other, y in given.items():
        for later in (0, 1, 8) if isinstance(y, torch.Tensor) and other != name and y.dtype == x.dtype else ():
            memory = torch.cat([y.flatten(), x.flatten()])
            mine = memory[later : later + x.numel()].view(x.shape)
            yield f"{name}: {later} elements behind {other}", {other: memory[: y.numel()].view(y.shape), name: mine}


def outcome_of(machine, form, group, changed, state):
    """What a call launches, returns and leaves in its arguments, or its error."""
    machine.launched.clear(), machine.ran.clear()
    form.given = form.given | changed
    arguments = [one for one in form.given.values() if isinstance(one, torch.Tensor) and one.layout is torch.strided]
    before = [None if one.is_inference() else one._version for one in arguments]
    try:
        with state():
            found = form(group)
    except Exception as error:
        return type(error), str(error), *map(described, arguments)
    made = [(own.inputs, own.numbers) for (own,) in machine.ran] + [(one[0], one[2]) for one in machine.launched]
    inputs, numbers = made[0] if made else ((), ())
    results = [one for one in found if one is not None] if isinstance(found, tuple) else (found,)
    after = [None if was is None else one._version - was for one, was in zip(arguments, before, strict=True)]
    return (
        *(described(one) for one in (*inputs, *arguments)),
        *numbers,
        *after,
        *((one.shape, one.dtype, one.stride(), one.requires_grad, type(one), one.is_inference()) for one in results),
        *(any(one is given for given in arguments) for one in results),
    )


def described(x):
    values = None if x.is_meta else x.detach().resolve_neg().contiguous().flatten().view(torch.uint8).tolist()
    return x.shape, x.dtype, values


@pytest.mark.parametrize("name", OPS)
def test_a_call_that_could_be_repeated_has_the_outcome_of_a_first_call_whatever_changes(bound, name):
    communicator, machine = bound
    plans, base = communicator.engine.plans, OPS[name].given
    assert base.keys() <= TENSORS | ALLOWED.keys() | {"out_dtype"}, "ALLOWED needs a value of each option"
    generator, refused = torch.Generator().manual_seed(0), set()

    def drawn(value):
        if isinstance(value, torch.Tensor):
            return torch.randn(value.shape, generator=generator).to(value.dtype)
        return tuple(map(drawn, value)) if isinstance(value, tuple) else value

    for option in (None, *(one for one in base if one in ALLOWED and one not in TENSORS)):
        form = Form(OPS[name].op, **{one: drawn(value) for one, value in base.items()})
        form.given |= {option: ALLOWED[option]} if option else {}
        usual = dict(form.given)
        if isinstance(outcome_of(machine, form, communicator, {}, contextlib.nullcontext)[0], type):
            continue  # this option excludes another
        mine = usual if option is None else {option: usual[option]}
        tried = [(what, changed, contextlib.nullcontext) for what, changed in changes(mine)]
        for what, changed, state in (*tried, *[(what, {}, state) for what, state in STATES.items()]):
            outcomes = []
            for is_warm in (False, True):
                plans.repeats.clear()
                form.given = dict(usual)
                machine.launched.clear()
                for _ in range(3 if is_warm else 0):
                    form(communicator)
                assert bool(machine.launched) == is_warm
                outcomes.append(outcome_of(machine, form, communicator, changed, state))
            cold, warm = outcomes
            assert warm == cold, (option, what)
            refused |= {what} if isinstance(cold[0], type) else set()
    assert len(refused) > 10
