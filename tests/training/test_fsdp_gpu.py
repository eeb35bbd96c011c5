"""Training by fully_shard on GPUs: bits with and without lossless compression, gradients with a codec, gathers."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import graphar
from graphar import fsdp
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.policy import LargeCallsPolicy
from graphar.plan.work import Parts
from tests.cases import bit_patterns, same_bits
from tests.processes import on_ranks, run_on_gpus
from tests.worlds import GPU_WORLD_SIZES

STEPS = 4
COMPRESSED = {Algorithm.ALLGATHER_LOSSLESS}
WORLD_SIZES = [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)]


def make_model() -> nn.Sequential:
    """Layers whose 515 rows and biases are not the same number on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(515, 515) for _ in range(6))).cuda()


def trained(rank: int, use=None, asynchronous: bool = False, compiled: bool = False, **options) -> list[Tensor]:
    """Losses, and parameters after some steps. Each layer has a group of its own, and gathers run beside matmuls."""
    model = make_model()
    for layer in (*model, model):
        if compiled and layer is not model:
            layer.compile(backend="aot_eager")
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16), **options)
    if use is not None:
        use(model)
    model._set_unshard_async_op(asynchronous)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(256, 515, generator=generator).cuda()).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = [*losses, *(parameter.full_tensor().detach() for parameter in model.parameters())]
    return [one.cpu() for one in found]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(same_bits(*pair) == 0 for pair in zip(some, others, strict=True))


def compressing(group: dist.ProcessGroup | None = None, lossless: bool = True) -> graphar.Communicator:
    """A communicator that compresses parts of any size if ``lossless``."""
    found = graphar.Communicator(group, timeout_s=30, lossless=lossless)
    found.prepare([torch.bfloat16], ops=["allgather", "reducescatter"])  # finds its table
    any_size = dict.fromkeys(range(2, 9), 1)
    found.engine.use_table(replace(found.engine.table, lossless=LargeCallsPolicy(any_size, any_size)))
    return found


def algorithms_of(communicator: graphar.Communicator) -> set[Algorithm]:
    """The algorithms whose kernels have counted calls."""
    return {one for one, (calls,) in communicator.engine.runner.calls_begun().items() if calls}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks(by=run_on_gpus)
def test_training_has_the_same_bits_with_and_without_lossless_compression(rank, world_size):
    plain, lossless = compressing(lossless=False), compressing()
    expected, found = trained(rank, lambda model: fsdp.set_collectives(model, plain)), {}
    settings = {
        "compressed": (lossless, {}),
        "asynchronous": (lossless, {"asynchronous": True}),
        "kept after the forward pass": (lossless, {"reshard_after_forward": False}),
        "plain and asynchronous": (plain, {"asynchronous": True}),
        "by the group": (None, {}),
    }
    for name, (group, options) in settings.items():
        use = lambda model, group=group: fsdp.set_collectives(model, group)  # noqa: E731
        found[name] = same(trained(rank, use, **options), expected)
    assert algorithms_of(lossless) >= COMPRESSED
    assert not algorithms_of(plain) & COMPRESSED
    dist.barrier()
    assert len(found) == 5
    assert all(found.values()), found


@pytest.mark.gpu(2)  # whole parameters are compared, which gloo cannot gather on GPUs that ranks share
@on_ranks(2, by=run_on_gpus, timeout_s=400)
def test_training_by_copies_has_the_bits_of_training_by_kernels(rank, world_size):
    by_kernels, found = partial(trained, rank, lambda model: fsdp.set_collectives(model, algorithm="kernels")), {}
    settings = {"pool": {}, "scratch": {"pool_nbytes": 0}, "one tensor in the pool": {"pool_nbytes": 1100 << 10}}
    plain, offloaded = by_kernels(), {"offload_policy": CPUOffloadPolicy()}  # whose optimiser has other bits
    cases = {"plain": ({}, plain), "asynchronous": ({"asynchronous": True}, plain)}
    cases |= {"kept": ({"reshard_after_forward": False}, plain), "compiled": ({"compiled": True}, plain)}
    cases["offloaded"] = offloaded, by_kernels(**offloaded)
    for name, how in settings.items():
        for case, (options, expected) in cases.items():
            own = graphar.Communicator(timeout_s=30)
            use = lambda model, own=own, how=how: fsdp.set_collectives(model, own, algorithm="copies", **how)  # noqa: E731
            is_same, held = same(trained(rank, use, **options), expected), own.memory()
            found[name, case] = is_same, held.symmetric.resident_nbytes >> 20, sorted(held.scratch)
            own.close()
    assert all(same for same, _, _ in found.values()), found
    assert {tuple(scratch) for _, _, scratch in found.values()} == {
        ("allgather_copies", "allgather_flagged", "reducescatter_copies")
    }
    pooled = {name: held for (name, case), (_, held, _) in found.items() if case == "plain"}
    assert pooled["scratch"] == 0
    assert 0 < pooled["one tensor in the pool"] <= pooled["pool"] <= 8


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks(by=run_on_gpus)
def test_training_comes_near_that_with_nccl(rank, world_size):
    found, expected = trained(rank, fsdp.set_collectives), trained(rank)
    differences = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    assert max(differences) < 0.03  # in bf16 NCCL rounds sums of four more than once


@pytest.mark.gpu(4)
@on_ranks(4, by=run_on_gpus)
def test_replicas_of_a_sharded_model_have_the_same_bits_with_and_without_compression(rank, world_size):
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replica", "shard"))
    own = compressing(mesh["shard"].get_group())
    found = trained(rank, lambda model: fsdp.set_collectives(model, own), mesh=mesh)
    same_as_plain = same(found, trained(rank, fsdp.set_collectives, mesh=mesh))
    assert algorithms_of(own) >= COMPRESSED
    dist.barrier()
    assert same_as_plain


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks(by=run_on_gpus)
def test_every_kernel_gathers_into_the_tensor_that_its_input_is_a_part_of(rank, world_size):
    wrong, kernels = {}, set()
    for communicator in (compressing(lossless=False), compressing()):
        gather, engine = fsdp.AllGather(communicator), communicator.engine
        for dtype in (torch.bfloat16, torch.uint8):
            for numel in (1, 8, 1023, 4096, 131075, 3_000_001):
                for shift in (0, 1):
                    parts = [bit_patterns(r, numel, torch.bfloat16).view(dtype)[:numel] for r in range(world_size)]
                    guarded = torch.full((world_size * numel + 16,), 7, dtype=dtype, device="cuda")
                    out = guarded[shift : shift + world_size * numel]
                    mine = out[rank * numel : (rank + 1) * numel].copy_(parts[rank])
                    gather(out, mine, dist.group.WORLD)
                    call = Call.of(Parts("allgather", (numel,) * world_size), mine)
                    kernel = engine.select(call, mine).config.algorithm
                    kernels.add(kernel)
                    beside = torch.cat([guarded[:shift], guarded[shift + len(out) :]])
                    wrong[kernel, dtype, numel, shift] = same_bits(out.cpu(), torch.cat(parts)) + int(
                        (beside != 7).sum()
                    )
    assert kernels == {Algorithm.ALLGATHER_FLAGGED, Algorithm.ALLGATHER_PUSH, Algorithm.ALLGATHER_LOSSLESS}
    dist.barrier()
    assert {key: count for key, count in wrong.items() if count} == {}


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))


def gradients_with(make_reduce_scatter, rank, **options):
    """Each layer in a group of its own, so that reduce-scatters run beside the backward pass."""
    model = make_layers().cuda()
    for module in (*model, model):
        fully_shard(module, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule) and make_reduce_scatter:
            module.set_custom_reduce_scatter(make_reduce_scatter())
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        model.zero_grad()
        model(torch.randn(64, 256, generator=generator).cuda()).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def fully_shard_as_rank(rank, world_size):
    """The relative errors of gradients by torch's own reduce-scatter, and by int8 without and with feedback."""
    exact = gradients_with(fsdp.ExactReduceScatter, rank)
    assert all(same_bits(*pair) == 0 for pair in zip(exact, gradients_with(fsdp.ExactReduceScatter, rank), strict=True))
    errors = []
    for make in (
        None,
        lambda: fsdp.QuantizedReduceScatter("int8"),
        lambda: fsdp.QuantizedReduceScatter("int8", error_feedback=True),
    ):
        found = gradients_with(make, rank)
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)))
    dist.barrier()
    return errors


@pytest.mark.parametrize("world_size", GPU_WORLD_SIZES)
def test_fully_shard_gets_exact_and_quantised_gradients(world_size):
    results = run_on_gpus(fully_shard_as_rank, world_size)

    for torchs, quantised, fed_back in results:
        assert torchs < 1e-5
        assert 0 < quantised < 0.02
        assert 0 < fed_back < 0.02
    assert results == [results[0]] * world_size
