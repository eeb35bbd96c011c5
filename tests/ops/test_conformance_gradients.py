"""The gradients of every op with every option, on the CPU: in lists and between processes, first and second."""

import functools
from functools import partial

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import graphar
from tests.cases import normal, same_bits
from tests.ops.conformance import FORMS, compiled, every_form
from tests.processes import run_ranks

__all__ = ["compiled"]  # a fixture

WITH_GRADIENTS = [form for form in FORMS if form.leaves]
EXACT = [form for form in WITH_GRADIENTS if form.backward]
CLOSE = [form for form in WITH_GRADIENTS if not (form.options.get("codec") or form.options.get("out_dtype"))]
BETWEEN_THREE = [form for form in WITH_GRADIENTS if form.ranks(3) == 3]
TWICE = [form for form in WITH_GRADIENTS if form.twice]
WITHOUT_SECOND = [form for form in WITH_GRADIENTS if form.epilogue]


def of(forms):
    return pytest.mark.parametrize("form", forms, ids=str)


def dtype_of(form):
    """The dtype in which gradients are compared."""
    return torch.float64 if torch.float64 in form.dtypes else torch.float32


def leaves_of(form, tensors):
    """Copies of the tensors by name, and a list of those that get gradients."""
    tensors = {name: [x.detach().clone() for x in xs] for name, xs in tensors.items()}
    return tensors, [x.requires_grad_() for name in form.leaves for x in tensors[name]]


def drawn(results, seed=70):
    """The results as a list, and a random incoming gradient for each."""
    ys = [y for of_rank in results for y in of_rank]
    return ys, [normal(seed + at, y.numel(), y.dtype).view(y.shape) for at, y in enumerate(ys)]


def assert_close(mine, wanted, **tolerances):
    if mine.dtype == torch.float16:  # an epilogue's tensor
        tolerances = {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(mine, wanted, **tolerances)


def gradients(call, form, tensors):
    tensors, leaves = leaves_of(form, tensors)
    ys, given = drawn(call(tensors))
    return torch.autograd.grad(ys, leaves, given, materialize_grads=True)


def by_torch(form, tensors):
    """What each rank gets, with other roundings."""
    name, ranks = form.op.__name__, range(len(next(iter(tensors.values()))))
    if name == "allgather":
        return [(torch.cat(tensors["x"], form.options.get("axis", 0)),) for _ in ranks]
    if name == "alltoall":  # the specification only moves elements
        return form.expected(tensors)
    if name == "allgather_tuple":
        return [tuple(map(torch.cat, tensors.values())) for _ in ranks]
    if name == "cross_entropy":
        return [(loss_by_torch(rank, **tensors, **form.options),) for rank in ranks]
    if name == "fused_allgather_matmul":
        rows = torch.cat(tensors["a"])
        own = [{name: xs[rank] for name, xs in tensors.items() if name not in ("a", "w")} for rank in ranks]
        products = [followed(form, rows @ w.t(), one) for w, one in zip(tensors["w"], own, strict=True)]
        return [(product, rows) if form.options.get("gathered") else (product,) for product in products]
    parts = tensors.get("x") or [a @ w.t() for a, w in zip(tensors["a"], tensors["w"], strict=True)]
    sums = [sum(parts)] * len(ranks)
    if "reducescatter" in name:
        sums = sums[0].tensor_split(len(ranks), form.options.get("axis", 0))
    summands = ("a", "w") if "w" in tensors else ("x",)
    own = [{name: xs[rank] for name, xs in tensors.items() if name not in summands} for rank in ranks]
    if "rmsnorm" in name:
        return [rms_normed(form, *pair) for pair in zip(sums, own, strict=True)]
    return [(followed(form, *pair),) for pair in zip(sums, own, strict=True)]


def loss_by_torch(
    rank, logits, target, temperature=1, vocab_size=None, lse_square_scale=0, reduction="mean", label_smoothing=0
):
    """A rank's loss, or log-probabilities; it has gradients of the rank's own logits."""
    x = torch.cat([one if at == rank else one.detach() for at, one in enumerate(logits)], -1)[..., :vocab_size]
    x, target = x.flatten(0, -2) / temperature, target[rank].flatten()
    how = {"label_smoothing": label_smoothing, "reduction": "none"}
    loss = functional.cross_entropy(x, target, **how) + lse_square_scale * x.logsumexp(1) ** 2
    if temperature != 1:
        return -loss.view(logits[0].shape[:-1])
    return loss.view(logits[0].shape[:-1]) if reduction == "none" else getattr(loss, reduction)()


def rms_normed(form, total, own):
    total, weight = total + own["residual"], own["weight"] + form.options.get("weight_offset", 0.0)
    return functional.rms_norm(total, weight.shape, weight, form.options.get("eps", 1e-6)), total


def followed(form, v, own):
    v = v + own.pop("bias", 0)
    if form.epilogue is None:
        return v
    if callable(form.epilogue):
        return form.epilogue(v, **own, **form.numbers)
    index = torch.arange(v.numel()).view(v.shape)
    places = {"row": index // v.shape[-1], "col": index % v.shape[-1], "index": index}
    return eval(form.epilogue, {"v": v, "relu": torch.relu, **places, **own, **form.numbers})


def assert_as_by_torch(derive, form, ranks, dtype):
    tensors = form.tensors(ranks, form.small, dtype, normal)

    found, expected = (derive(call, form, tensors) for call in (form.in_list, partial(by_torch, form)))

    for mine, wanted in zip(found, expected, strict=True):
        assert_close(mine, wanted)


@of(CLOSE)
def test_the_gradients_of_a_list_are_those_of_torch(form):
    assert_as_by_torch(gradients, form, 2, dtype_of(form))


@of(EXACT)
def test_the_gradients_of_a_list_have_the_bits_of_their_op(form):
    tensors = form.tensors(form.ranks(3), form.small, form.dtypes[0], normal)

    found = gradients(form.in_list, form, tensors)

    _, given = drawn(form.in_list(tensors))
    assert [same_bits(*pair) for pair in zip(found, form.backward(given, tensors), strict=True)] == [0] * len(found)


def second(call, form, tensors):
    """Second derivatives, with respect to the tensors and to the incoming gradients."""
    tensors, leaves = leaves_of(form, tensors)
    ys, given = drawn(call(tensors))
    given = [one.requires_grad_() for one in given]
    first = torch.autograd.grad(ys, leaves, given, create_graph=True)
    weighted = sum((one * one.conj()).real.sum() for one in first)
    return torch.autograd.grad(weighted, [*leaves, *given], allow_unused=True, materialize_grads=True)


@of(TWICE)
def test_a_gradient_has_a_derivative(form):
    assert_as_by_torch(second, form, 2, dtype_of(form))


@of(WITHOUT_SECOND)
def test_a_second_derivative_of_an_epilogue_is_refused_where_it_is_asked_for(form):
    tensors = form.tensors(2, form.small, torch.float32, normal)

    with pytest.raises(NotImplementedError, match="an epilogue has no second derivative"):
        second(form.in_list, form, tensors)


@of([form for form in FORMS if form.op is graphar.allgather])
def test_complex_tensors_have_gradients(form):
    for derive in (gradients, second_of_complex):
        assert_as_by_torch(derive, form, 3, torch.complex128)


def second_of_complex(call, form, tensors):
    return second(lambda given: [tuple(torch.view_as_real(y) for y in ys) for ys in call(given)], form, tensors)


@of([form for form in WITH_GRADIENTS if form.is_steady])
def test_only_what_needs_a_gradient_gets_one(form):
    tensors = form.tensors(2, form.small, torch.float32, normal)
    expected = iter(gradients(form.in_list, form, tensors))
    for name in form.leaves:
        for rank in range(2):
            alone = {one: [x.detach().clone() for x in xs] for one, xs in tensors.items()}
            leaf = alone[name][rank].requires_grad_()
            ys, given = drawn(form.in_list(alone))
            wanting = [pair for pair in zip(ys, given, strict=True) if pair[0].requires_grad]
            torch.autograd.backward(*zip(*wanting, strict=True))

            assert_close(leaf.grad, next(expected))
            assert [x.grad is None for xs in alone.values() for x in xs].count(False) == 1


@of([form for form in WITH_GRADIENTS if form.is_steady])
def test_a_result_nobody_uses_adds_nothing_and_one_used_twice_adds_twice(form):
    tensors = form.tensors(2, form.small, torch.float32, normal)
    found = []
    for weights in ((3, 0), (1, 0), (2, 0)):
        own, leaves = leaves_of(form, tensors)
        ys = form.in_list(own)
        loss = (ys[1][0] * weights[0]).sum() if weights[0] != 3 else (ys[1][0] + ys[1][0] * 2).sum()
        found.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))

    for thrice, once, twice in zip(*found, strict=True):
        tolerance = {"rtol": 0.2, "atol": 0.2} if "codec" in form.options else {}
        assert_close(thrice, once + twice, **tolerance)


@every_form
def test_without_grad_mode_no_result_needs_a_gradient(world_of_one, form):
    one, many = (form.tensors(ranks, form.small, fill=normal) for ranks in (1, 2))
    for tensors in (one, many):
        for name in form.leaves:
            for x in tensors[name]:
                x.requires_grad_()

    with torch.no_grad():
        results = [form.of_rank(0, one), *form.in_list(many)]
    with torch.inference_mode():
        in_inference = [form.of_rank(0, one), *form.in_list(many)]

    assert not any(y.requires_grad for ys in (*results, *in_inference) for y in ys)
    if form.is_steady:
        assert [
            same_bits(*pair) for ys in zip(results, in_inference, strict=True) for pair in zip(*ys, strict=True)
        ].count(0)


def backward_as_rank(rank, world_size):
    """By form, the gradients of this rank's tensors; a loss that all ranks share has the same gradient on all."""
    found = {}
    for form in BETWEEN_THREE:
        tensors, _ = leaves_of(form, process_tensors(form, world_size))
        ys = form.of_rank(rank, tensors)
        given = drawn([ys], seed=0 if form.one_loss else 10 * rank)[1]
        found[str(form)] = torch.autograd.grad(ys, [tensors[name][rank] for name in form.leaves], given)
    return found


def process_tensors(form, world_size):
    return form.tensors(world_size, (7, *form.small[1:]), torch.bfloat16 if form.backward else torch.float32, normal)


@pytest.fixture(scope="module")
def of_processes():
    return functools.cache(lambda: run_ranks(backward_as_rank, 3, timeout_s=100))


@of([form for form in BETWEEN_THREE if form in EXACT or form in CLOSE])
def test_the_gradients_of_processes(of_processes, form):
    tensors, leaves = leaves_of(form, process_tensors(form, 3))
    results = by_torch(form, tensors)
    given = [drawn([ys], seed=0 if form.one_loss else 10 * rank)[1] for rank, ys in enumerate(results)]
    if form.backward:
        expected = {"x": form.backward([one for (one,) in given], tensors)}
    else:
        used = 1 if form.one_loss else 3  # the gradients of one result are those of the loss
        flat = [[one for of_rank in ones[:used] for one in of_rank] for ones in (results, given)]
        found = iter(torch.autograd.grad(flat[0], leaves, flat[1], allow_unused=True, materialize_grads=True))
        expected = {name: [next(found) for _ in range(3)] for name in form.leaves}

    for rank, mine in enumerate(of_processes()):
        for name, gradient in zip(form.leaves, mine[str(form)], strict=True):
            wanted = expected[name][0 if form.one_loss and name not in ("a", "w") else rank]
            if form.backward:
                assert same_bits(gradient, wanted) == 0
            else:
                assert_close(gradient, wanted)


def test_compiled_calls_have_the_gradients_of_eager_ones(world_of_one, compiled):
    forms, graphs = [form for form in WITH_GRADIENTS if form.label in ("", "bias", "epilogue", "int4")], []

    def count(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def loss(of_forms):
        return [
            sum((y * y).sum() for ys in form.in_list(one) for y in ys)
            for form, one in zip(forms, of_forms, strict=True)
        ]

    fast = compiled(loss, backend=count)
    for rows in (19, 14):  # no other dimension has these sizes or a part of 19, since a compiler unifies equal ones
        found = []
        for function in (fast, loss):
            made = [leaves_of(form, form.tensors(2, (rows, *form.small[1:]), torch.float32, normal)) for form in forms]
            found.append(
                torch.autograd.grad(sum(function([one for one, _ in made])), [x for _, xs in made for x in xs])
            )
        for mine, expected in zip(*found, strict=True):
            assert_close(mine, expected)

    assert len(graphs) == 1


@of([form for form in WITH_GRADIENTS if form.is_steady])
def test_a_checkpoint_which_gives_saved_tensors_once_gives_the_same_gradients(form):
    tensors = form.tensors(2, form.small, dtype_of(form), fill=normal)

    found = gradients(partial(checkpoint, form.in_list, use_reentrant=False), form, tensors)

    wanted = gradients(form.in_list, form, tensors)
    assert any(one.abs().sum() > 0 for one in wanted)
    assert [same_bits(*pair) for pair in zip(found, wanted, strict=True)] == [0] * len(wanted)
