"""The reduce-scatter of fully_shard: gradients averaged exactly, or with a codec, by processes over gloo."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import graphar
from graphar import Codec, reference
from graphar.fsdp import ExactReduceScatter, QuantizedReduceScatter
from graphar.numerics.codec_reference import Noise
from graphar.ranks import hierarchical
from tests.cases import bit_patterns, left_after_scatter, normal, parts_of, same_bits
from tests.processes import on_ranks, run_ranks

INT4 = Codec(4, 128)
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 97), nn.LayerNorm(97), nn.ReLU(), nn.Linear(97, 5))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(16, 48, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    x = batch(rank, step)
    return (model(x) - x[:, :5]).square().mean()


def sharded(make_reduce_scatter, **options) -> nn.Module:
    """The model under fully_shard. Each layer with gradients has a group and a reduce-scatter of its own."""
    model = make_model()
    on_cpus = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}  # also where there are GPUs
    for layer in (model[0], model[1], model[3], model):
        fully_shard(layer, **on_cpus | options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(make_reduce_scatter())
    return model


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def exact_mean(world_size: int) -> list[torch.Tensor]:
    by_rank = []
    for rank in range(world_size):
        model = make_model()
        loss_of(model, rank).backward()
        by_rank.append([parameter.grad for parameter in model.parameters()])
    return [reference.allreduce(of_one) / world_size for of_one in zip(*by_rank, strict=True)]


@pytest.mark.promise("A codec's results have the bits of its specification, at every size and on every rank.")
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_exact_gradients_are_the_specifications_bit_for_bit(rank, world_size):
    model = sharded(ExactReduceScatter)
    loss_of(model, rank).backward()
    assert [torch.equal(*pair) for pair in zip(gradients_of(model), exact_mean(world_size), strict=True)] == [True] * 6


def quantized_as_rank(rank, world_size, options):
    model = sharded(lambda: QuantizedReduceScatter(INT4), **options)
    loss_of(model, rank).backward()
    return gradients_of(model)


def relative_errors(gradients) -> list[float]:
    pairs = zip(gradients, exact_mean(2), strict=True)
    return [((gradient - exact).norm() / exact.norm()).item() for gradient, exact in pairs]


def test_gradients_with_a_codec_come_near_the_exact_ones_and_are_the_same_on_all_ranks():
    first, second = run_ranks(quantized_as_rank, 2, {})

    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert all(0 < error < 0.25 for error in relative_errors(first))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_may_be_reduced_in_another_dtype(dtype):
    first, _ = run_ranks(quantized_as_rank, 2, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype)})

    assert all(gradient.dtype == torch.float32 for gradient in first)
    assert all(0 < error < 0.25 for error in relative_errors(first))


def train_as_rank(rank, world_size, make_reduce_scatter, steps):
    model = sharded(make_reduce_scatter)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.full_tensor().detach() for parameter in model.parameters()]


def int6():
    return QuantizedReduceScatter("int6")


def int3_with_feedback():
    return QuantizedReduceScatter("int3", error_feedback=True)


@pytest.fixture(scope="module")
def exact_training():
    """Losses and parameters, as :func:`train_as_rank` returns them."""
    return run_ranks(train_as_rank, 2, ExactReduceScatter, 30)[0]


@pytest.mark.parametrize("make_reduce_scatter", [int6, int3_with_feedback], ids=lambda one: one.__name__)
def test_training_with_a_codec_comes_near_exact_training(exact_training, make_reduce_scatter):
    exact_losses, exact = exact_training
    (losses, found), (_, others) = run_ranks(train_as_rank, 2, make_reduce_scatter, 30)

    assert all(torch.equal(*pair) for pair in zip(found, others, strict=True))
    assert exact_losses[-1] < 0.9 * exact_losses[0]
    assert losses[-1] == pytest.approx(exact_losses[-1], rel=0.05)
    begin = [parameter.detach() for parameter in make_model().parameters()]
    for mine, theirs, first in zip(found, exact, begin, strict=True):
        assert 0 < (mine - theirs).norm() < 0.3 * (theirs - first).norm()


def with_factor_as_rank(rank, world_size):
    model = sharded(ExactReduceScatter)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(3.0)
            module.set_force_sum_reduction_for_comms(True)
    loss_of(model, rank).backward()
    return gradients_of(model)


def test_fully_shard_divides_by_another_factor_where_it_is_made_to_sum():
    first, _ = run_ranks(with_factor_as_rank, 2)

    torch.testing.assert_close(first, [mean * (2 / 3) for mean in exact_mean(2)])


@pytest.mark.promise("`hierarchical` has the bits of its own specification, however ranks are placed on hosts.")
@pytest.mark.parametrize(
    ("dtype", "codec"), [(torch.bfloat16, "int4"), (torch.float32, graphar.Codec(8, 512, scheme="minmax"))], ids=str
)
@on_ranks(4)
def test_gradients_between_hosts_are_the_specifications_bit_for_bit(rank, world_size, dtype, codec):
    hierarchical._CHUNK_NUMEL = 1 << 12  # so that there are several chunks
    splits = [[[0, 1], [2, 3]], [[3, 1], [0, 2]], [[2], [0], [3], [1]], [[0, 1, 2, 3]]]
    for hosts in splits:
        for numel, fill in ((1, normal), (1500, normal), (2 << 10, bit_patterns)):
            xs, out = parts_of(fill, world_size, world_size * numel, dtype), torch.empty(numel, dtype=dtype)
            with graphar.Communicator(hosts=hosts) as communicator:
                comm = QuantizedReduceScatter(codec, communicator, algorithm="hierarchical")
                comm(out, xs[rank].clone(), dist.group.WORLD, SUM)
            expected = reference.hierarchical_reducescatter(xs, hosts, codec)[rank]
            assert same_bits(out, expected) == 0, (hosts, numel)


def test_sums_inside_a_host_are_exact_and_rounded_once():
    parts = [torch.full((64,), value, dtype=torch.bfloat16) for value in (256, 1, 1, 0)]

    found = reference.hierarchical_reducescatter(parts, [[0, 1, 2, 3]], "int2")
    assert [one.tolist() for one in found] == [[258.0] * 16] * 4  # 257 is no bf16, and int2 has no 258


def between_hosts(rank, world_size):
    """The gradients of a model by graphar.fsdp, and what torch's own would be."""
    with graphar.Communicator(hosts=[[0, 1], [2, 3]]) as communicator:
        model = sharded(lambda: QuantizedReduceScatter("int8", communicator, algorithm="hierarchical"))
        loss_of(model, rank).backward()
        found = gradients_of(model)
        model = sharded(ExactReduceScatter)
        graphar.fsdp.set_collectives(model, communicator, codec="int8", algorithm="hierarchical")
        loss_of(model, rank).backward()
        return found, gradients_of(model)


def test_a_model_is_trained_between_hosts_by_one_option():
    results = run_ranks(between_hosts, 4)

    for found, by_option in results:
        assert all(torch.equal(*pair) for pair in zip(found, by_option, strict=True))
    errors = [(mine - exact).norm() / exact.norm() for mine, exact in zip(results[0][0], exact_mean(4), strict=True)]
    assert all(0 < error < 0.05 for error in errors)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantizedReduceScatter("int4", algorithm="copies"), "algorithm must be one of auto, hierarchical"),
        (
            lambda: QuantizedReduceScatter("int4", error_feedback=True, algorithm="hierarchical"),
            "algorithm='hierarchical' has no error_feedback",
        ),
        (
            lambda: graphar.fsdp.set_collectives(nn.Linear(1, 1), algorithm="hierarchical"),
            "algorithm='hierarchical' needs a codec",
        ),
    ],
)
def test_what_sums_between_hosts_cannot_do_is_refused(make, message, monkeypatch):
    monkeypatch.setattr("torch.distributed.fsdp.FSDPModule", nn.Linear)

    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("op", [SUM, AVG], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@on_ranks(2)
def test_each_call_gives_the_specification_of_its_input_and_what_earlier_ones_took(rank, world_size, op, dtype):
    comm = QuantizedReduceScatter(INT4, error_feedback=True)
    residuals, checked = [torch.zeros(4800, dtype=dtype) for _ in range(world_size)], []
    for call in range(3):
        xs = [normal(10 * call + one, 4800, dtype) for one in range(world_size)]
        parts = [residual + x for residual, x in zip(residuals, xs, strict=True)]
        residuals = [left_after_scatter(part, INT4, Noise(0, call, 0), [2400, 2400]) for part in parts]
        expected = reference.quantized_reducescatter(parts, INT4)[rank] / (world_size if op == AVG else 1)
        out = comm.allocate((2400,), dtype=dtype, device=torch.device("cpu"))
        assert comm(output_tensor=out, input_tensor=xs[rank].clone(), group=dist.group.WORLD, op=op) is None
        checked.append(same_bits(out, expected))
    assert checked == [0] * 3


@pytest.mark.parametrize("op", [dist.ReduceOp.MAX, dist.ReduceOp(dist.ReduceOp.MIN)], ids=["a kind", "an op"])
def test_another_op_is_refused_with_what_to_do(world_of_one, op):
    with pytest.raises(ValueError, match=r"takes ReduceOp.SUM and AVG, got .*M.*set_force_sum_reduction_for_comms"):
        ExactReduceScatter()(torch.ones(4), torch.ones(4), world_of_one, op)


@pytest.mark.parametrize(
    ("out", "x", "options", "message"),
    [
        (torch.ones(4), torch.ones(5), {}, "the input must be 1 times the output, got 5 torch.float32 on cpu and 4"),
        (torch.ones(4), torch.ones(4).half(), {}, "the input must be 1 times the output, got 4 torch.float16"),
        (torch.ones(8)[::2], torch.ones(4), {}, "the tensors must be contiguous"),
        (torch.ones(4), torch.ones(8)[::2], {}, "the tensors must be contiguous"),
        (torch.ones(4), torch.ones(4), {"async_op": True}, "has no async_op"),
    ],
)
def test_tensors_that_do_not_fit_and_waiting_later_are_refused(world_of_one, out, x, options, message):
    with pytest.raises(ValueError, match=f"^ExactReduceScatter: {re.escape(message)}"):
        ExactReduceScatter()(out, x, world_of_one, SUM, **options)


def test_what_a_codec_cannot_do_is_refused(world_of_one):
    with pytest.raises(ValueError, match="QuantizedReduceScatter: codec must be"):
        QuantizedReduceScatter("int9")
    with pytest.raises(ValueError, match="QuantizedReduceScatter: a codec rounds bfloat16, float16 and float32"):
        QuantizedReduceScatter("int4")(torch.ones(4).double(), torch.ones(4).double(), world_of_one, SUM)


@pytest.mark.parametrize("other", [torch.ones(5), torch.ones(4, dtype=torch.bfloat16)], ids=["numel", "dtype"])
def test_one_object_with_feedback_serves_one_module(world_of_one, other):
    comm = QuantizedReduceScatter("int4", error_feedback=True)
    comm(torch.ones(4), torch.ones(4), world_of_one, SUM)

    with pytest.raises(
        ValueError, match=r"each module needs one of its own; this one's has 4 torch\.float32, got [45]"
    ):
        comm(other, other.clone(), world_of_one, SUM)
