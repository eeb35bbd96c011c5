"""Training by fully_shard with graphar.fsdp.set_collectives, compared with torch's own collectives over gloo."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import graphar
from graphar import fsdp
from graphar.plan.algorithms import Algorithm
from graphar.plan.select import Choice
from graphar.plan.tables import by_entries, shipped_table
from graphar.runtime.engine import Engine
from graphar.runtime.registry import engine_of
from tests.cases import same_bits
from tests.processes import on_ranks, run_ranks
from tests.training.test_fsdp import batch, make_model

STEPS = 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
FP32_SUMS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def each_layer(model: nn.Sequential) -> list:
    return [model[0], model[1], model[3], model]


def sharded(use=None, groups=each_layer, **options) -> nn.Sequential:
    """The model under fully_shard, after ``use`` of it, such as set_collectives; None: torch's own collectives.

    ``groups`` returns the modules whose parameters are gathered together.
    """
    model = make_model()
    on_cpus = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}  # also where there are GPUs
    for layer in groups(model):
        fully_shard(layer, **on_cpus | options)
    if use is not None:
        use(model)
    return model


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x[:, :5]).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, accumulated: int = 1, steps=range(STEPS)):
    """Returns the bits of what training gives: losses, gradients of the last step, parameters."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(accumulated):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(part == accumulated - 1)
            loss = loss_of(model, batch(rank, accumulated * step + part))
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return losses, gradients, [parameter.full_tensor().detach() for parameter in model.parameters()]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def trained(rank: int, use=None, accumulated: int = 1, **options):
    model = sharded(use, **options)
    return train(model, adam(model), rank, accumulated)


def same(some, others) -> bool:
    """Whether nested lists of tensors have the same bits."""
    if isinstance(some, Tensor):
        return same_bits(some, others) == 0
    return len(some) == len(others) and all(map(same, some, others))


@contextlib.contextmanager
def calls_of_graphar():
    """A list of the calls that graphar makes inside a ``with`` block."""
    made, run = [], Engine.run

    def note(engine, call, *tensors):
        made.append(call)
        run(engine, call, *tensors)

    with mock.patch.object(Engine, "run", note):
        yield made


@contextlib.contextmanager
def none_of_torch():
    """Fails on torch's own all-gathers and reduce-scatters of fully_shard inside a ``with`` block."""
    names = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
    with contextlib.ExitStack() as patches:
        for name in names:
            if hasattr(dist, name):  # two of them from torch 2.13 on
                patches.enter_context(mock.patch.object(dist, name, side_effect=AssertionError(name)))
        yield


def asynchronous(model: nn.Module) -> None:
    fsdp.set_collectives(model)
    model._set_unshard_async_op(True)


def compiled_layers(model: nn.Sequential) -> list:
    for layer in model:
        layer.compile(backend="aot_eager")
    return each_layer(model)


def compiled_as_one(model: nn.Sequential) -> list:
    model.compile(backend="aot_eager")
    return each_layer(model)


SETTINGS = {
    "fp32": {},
    "kept after the forward pass": {"reshard_after_forward": False},
    "bf16": {"mp_policy": BF16},
    "bf16, kept after the forward pass": {"mp_policy": BF16, "reshard_after_forward": False},
    "bf16 parameters and fp32 sums": {"mp_policy": FP32_SUMS},
    "accumulated gradients": {"accumulated": 3},
    "accumulated gradients in bf16": {"accumulated": 2, "mp_policy": BF16},
    "asynchronous gathers": {"use": asynchronous},
    "two modules in a group": {"groups": lambda model: [[model[0], model[1]], model[3], model]},
    "all parameters in a group": {"groups": lambda model: [model], "mp_policy": BF16},
    "offloaded parameters": {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": BF16},
    "compiled layers": {"groups": compiled_layers, "mp_policy": BF16},
    "a compiled model": {"groups": compiled_as_one, "mp_policy": BF16},
}


@on_ranks(2)
def test_training_by_two_ranks_has_the_bits_of_torchs_own_collectives(rank, world_size):
    found = {}
    for name, setting in SETTINGS.items():
        options = {"use": fsdp.set_collectives} | setting
        expected = trained(rank, **(options | {"use": None}))
        with none_of_torch():
            found[name] = same(trained(rank, **options), expected)
    assert found == dict.fromkeys(SETTINGS, True)


@on_ranks(2)
def test_torchs_own_collectives_are_noticed(rank, world_size):
    with none_of_torch(), pytest.raises(AssertionError, match="all_gather"):
        trained(rank)


def with_a_communicator(model: nn.Module) -> None:
    fsdp.set_collectives(model, graphar.Communicator(lossless=False))


@on_ranks(3)
def test_three_ranks_with_a_communicator_have_the_bits_of_the_groups_own_engine(rank, world_size):
    assert same(trained(rank, fsdp.set_collectives, mp_policy=BF16), trained(rank, with_a_communicator, mp_policy=BF16))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


@on_ranks(2)
def test_a_checkpoint_of_either_is_continued_by_the_other_to_the_bit(rank, world_size, tmp_path):
    folder = str(tmp_path)
    whole = sharded(mp_policy=BF16)
    losses, *rest = train(whole, adam(whole), rank, steps=range(2 * STEPS))
    found = []
    for first, second in ((None, fsdp.set_collectives), (fsdp.set_collectives, None)):
        model = sharded(first, mp_policy=BF16)
        optimizer, path = adam(model), f"{folder}/{len(found)}"
        train(model, optimizer, rank)
        dcp.save(state_of(model, optimizer), checkpoint_id=path)
        model = sharded(second, mp_policy=BF16)
        optimizer = adam(model)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        continued = train(model, optimizer, rank, steps=range(STEPS, 2 * STEPS))
        found.append(same(continued, (losses[STEPS:], *rest)))
    assert found == [True, True]


@on_ranks(4)
def test_replicas_of_a_sharded_model_have_the_bits_of_torchs_own_collectives(rank, world_size):
    """Two replicas of two shards: bits of torch's own, and of a communicator of the shard's ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    expected = trained(rank, mesh=mesh, mp_policy=BF16)
    of_shard = graphar.Communicator(mesh["shard"])
    found = [
        trained(rank, fsdp.set_collectives, mesh=mesh, mp_policy=BF16),
        trained(rank, lambda model: fsdp.set_collectives(model, of_shard), mesh=mesh, mp_policy=BF16),
    ]
    assert [same(one, expected) for one in found] == [True, True]


@on_ranks(4)
def test_gathers_over_a_part_of_the_ranks_give_the_same_bits(rank, world_size):
    """After the forward pass two ranks share a whole model, over which the backward pass gathers."""
    with calls_of_graphar() as made:
        found = trained(rank, fsdp.set_collectives, reshard_after_forward=2)
    gathered = {len(call.work.parts) for call in made if call.op == "allgather"}
    expected = trained(rank, fsdp.set_collectives)
    assert (sorted(gathered), same(found, expected)) == ([2, 4], True)


@on_ranks(4)
def test_a_group_of_other_ranks_than_the_shards_is_refused(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = sharded(lambda model: fsdp.set_collectives(model, dist.group.WORLD), mesh=mesh)
    with pytest.raises(ValueError, match=r"over the ranks \[\d, \d\], but the given group has \[0, 1, 2, 3\]"):
        loss_of(model, batch(rank, 0))


@on_ranks(2)
def test_with_a_codec_gradients_are_rounded_and_parameters_are_not(rank, world_size):
    """Which calls have a codec, and which feed errors back; relative errors of int8 gradients."""
    exact = trained(rank, fsdp.set_collectives)[1]
    model = sharded(lambda model: fsdp.set_collectives(model, codec="int8", error_feedback=True))
    with calls_of_graphar() as made:
        found = train(model, adam(model), rank)[1]
    codecs = {(call.op, bool(call.wire), bool(call.wire and call.wire.feedback)) for call in made}
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
    assert codecs == {("allgather", False, False), ("reducescatter", True, True)}
    assert all(0 < error < 0.05 for error in errors)


@on_ranks(3)
def test_a_gather_moves_any_dtype_and_its_input_may_be_a_part_of_its_output(rank, world_size):
    found = {}
    gather = fsdp.AllGather()
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.bool):
        parts = [torch.arange(5 * r, 5 * r + 5).to(dtype) for r in range(world_size)]
        for in_place in (False, True):
            for async_op in (False, True):
                out = gather.allocate((5 * world_size,), dtype=dtype, device=torch.device("cpu"))
                x = out.narrow(0, 5 * rank, 5).copy_(parts[rank]) if in_place else parts[rank]
                work = gather(output_tensor=out, input_tensor=x, group=dist.group.WORLD, async_op=async_op)
                assert (work is not None) is async_op
                assert work is None or (work.wait() and work.is_completed())
                found[str(dtype), in_place, async_op] = torch.equal(out, torch.cat(parts))
    assert len(found) == 20
    assert all(found.values()), found


@pytest.mark.parametrize(
    ("out", "x", "message"),
    [
        (torch.ones(5), torch.ones(4), "the output must be 1 times the input, got 4 torch.float32 on cpu and 5"),
        (torch.ones(4), torch.ones(4).half(), "the output must be 1 times the input, got 4 torch.float16"),
        (torch.ones(8)[::2], torch.ones(4), "the tensors must be contiguous"),
        (torch.ones(4), torch.ones(8)[::2], "the tensors must be contiguous"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(world_of_one, out, x, message):
    with pytest.raises(ValueError, match=f"^AllGather: {message}"):
        fsdp.AllGather()(out, x, world_of_one)


def blocks_of_calls(engine: Engine, **options) -> list[int | None]:
    """The limits on the blocks of a gather and a scatter of bf16."""
    x, out = torch.ones(64, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
    gather, scatter = fsdp.AllGather(**options), fsdp.ExactReduceScatter(**options)
    with calls_of_graphar() as made:
        for _ in range(3):  # later calls find what the first found
            gather(out, x, engine.group)
            scatter(out, x, engine.group, dist.ReduceOp.SUM)
    assert [call.op for call in made] == ["allgather", "reducescatter"] * 3
    assert made[:2] == made[2:4] == made[4:]
    return [call.blocks for call in made[:2]]


def test_calls_have_few_blocks_unless_they_are_compressed(world_of_one, monkeypatch):
    engine = graphar.Communicator().engine

    def compressing(engine, call, x):
        algorithm = Algorithm.ALLGATHER_LOSSLESS if call.op == "allgather" else Algorithm.REDUCESCATTER_PUSH
        return Choice(by_entries(engine.table.parts[call.op], 1, call.nbytes, algorithm), "compressed")

    assert blocks_of_calls(engine) == [32, 32]
    assert blocks_of_calls(engine, blocks=7) == [7, 7]
    monkeypatch.setattr(Engine, "select", compressing)
    assert blocks_of_calls(engine) == [None, 32]
    assert blocks_of_calls(engine, blocks=7) == [7, 7]


def test_two_ranks_take_more_blocks_than_more_ranks():
    assert [shipped_table("default").training.most_blocks(ranks) for ranks in (2, 3, 4, 8)] == [64, 32, 32, 32]


def test_one_object_keeps_the_blocks_of_each_group_apart(world_of_one, monkeypatch):
    gather, x, out, made = fsdp.AllGather(), torch.ones(8), torch.empty(8), []
    groups = [world_of_one, dist.new_group([0])]
    engines = [engine_of(group) for group in groups]

    def compressing_in_the_second(engine, call, x):
        algorithm = Algorithm.ALLGATHER_LOSSLESS if engine is engines[1] else Algorithm.ALLGATHER_PUSH
        return Choice(by_entries(engine.table.parts[call.op], 1, call.nbytes, algorithm), "chosen")

    monkeypatch.setattr(Engine, "select", compressing_in_the_second)
    for engine in engines:
        engine.run = lambda call, ranks: made.append(call.blocks)
    for group in (*groups, *groups):
        gather(out, x, group)

    assert made == [32, None, 32, None]


def gather_over_another_group(rank, world_size):
    mine, other = dist.new_group([0, 1]), dist.new_group([0, 2])
    if rank > 0:
        return None
    with pytest.raises(ValueError, match=r"communicates over the ranks \[0, 2\], but the given group has \[0, 1\]"):
        fsdp.AllGather(mine)(torch.empty(8), torch.ones(4), other)
    return True


def test_a_group_of_as_many_other_ranks_is_refused():
    assert run_ranks(gather_over_another_group, 3) == [True, None, None]


@pytest.mark.parametrize("blocks", [0, -1, 2.5, "8"])
def test_a_number_of_blocks_is_positive(blocks):
    with pytest.raises(ValueError, match=r"^AllGather: blocks must be a positive int or None, got"):
        fsdp.AllGather(blocks=blocks)


def test_a_model_without_fully_shard_is_refused():
    with pytest.raises(ValueError, match=r"^set_collectives: no module of the model was given to fully_shard"):
        fsdp.set_collectives(make_model())


def test_error_feedback_without_a_codec_is_refused():
    with pytest.raises(ValueError, match=r"^set_collectives: error_feedback needs a codec"):
        fsdp.set_collectives(make_model(), error_feedback=True)


def test_a_communicator_of_devices_is_refused_at_once(world_of_one):
    with pytest.raises(ValueError, match="this communicator has devices"):
        fsdp.AllGather(graphar.Communicator(devices=["cpu", "cpu"]))


def test_each_module_gets_a_quantised_reduce_scatter_of_its_own(world_of_one):
    model, given = sharded(mesh=DeviceMesh.from_group(world_of_one, "cpu")), []
    with mock.patch.object(FSDPModule, "set_custom_reduce_scatter", lambda module, comm: given.append(comm)):
        fsdp.set_collectives(model, codec="int4", error_feedback=True)

    assert len(given) == len(set(map(id, given))) == 4
    assert {type(one) for one in given} == {fsdp.QuantizedReduceScatter}


def test_the_reduce_scatters_have_their_names_in_graphar_ddp_as_well():
    assert graphar.ddp.ExactReduceScatter is fsdp.ExactReduceScatter
    assert graphar.ddp.QuantizedReduceScatter is fsdp.QuantizedReduceScatter
