"""Tensor-parallel layers and the RowwiseParallel of plans against the whole layer: forward, backward, compiled."""

import copy
import importlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.nn import functional

import graphar
from graphar import nn
from tests.cases import normal, same_bits
from tests.processes import on_ranks, run_ranks

TOKENS, HIDDEN, INNER = 8, 16, 64
MODES = ("eager", "aot_eager")


class MLP(torch.nn.Module):
    """The same on every rank."""

    def __init__(self, bias=True, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(HIDDEN, INNER, bias=bias, dtype=dtype)
        self.down = torch.nn.Linear(INNER, HIDDEN, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def batch(dtype=torch.float32, count=TOKENS, device="cpu"):
    return normal(1, count * HIDDEN, dtype).view(count, HIDDEN).to(device)


def maybe_compiled(model, mode):
    torch._dynamo.reset()
    return model if mode == "eager" else torch.compile(model, fullgraph=True, backend=mode)


def both_ways(model, x):
    """The output, the gradient of the input and the gradients of the parameters, as local tensors."""
    x = x.clone().requires_grad_()
    y = model(x)
    local(y).square().sum().backward()
    return [local(y).detach(), x.grad, *(local(parameter.grad) for parameter in model.parameters())]


def derived_twice(model, x):
    """The gradient of the input, and the gradients of a penalty on it and on the gradients of the parameters."""
    x = x.clone().requires_grad_()
    first = torch.autograd.grad(model(x).pow(3).mean(), [x, *model.parameters()], create_graph=True)
    sum(one.square().sum() for one in first).backward()
    return [first[0].detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def local(x):
    return x.to_local() if isinstance(x, torch.distributed.tensor.DTensor) else x


def sharded_gradients(rank, world_size, derive=both_ways):
    """This rank's parts of what ``derive`` gives for the whole layer."""
    y, x, up, up_bias, down, down_bias = derive(MLP(), batch())
    mine = [up.chunk(world_size)[rank], up_bias.chunk(world_size)[rank], down.chunk(world_size, 1)[rank], down_bias]
    return [y, x, *mine]


def partial_product(rank, world_size, device, count=TOKENS):
    """This rank's part of the output in bf16, where the order and the rounding of a sum show."""
    model = MLP(bias=False, dtype=torch.bfloat16).to(device)
    hidden = functional.linear(batch(torch.bfloat16, count, device), model.up.weight.chunk(world_size)[rank])
    return functional.linear(torch.relu(hidden), model.down.weight.chunk(world_size, 1)[rank]).detach()


def layered(model, group=None, **of_rows):
    model.up = nn.ColumnParallelLinear(model.up, group, tp_invariant="tp_invariant" in of_rows)
    model.down = nn.RowParallelLinear(model.down, group, **of_rows)
    return model


def run_layers(rank, world_size):
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    groups = {"default": None, "process group": dist.group.WORLD, "mesh": mesh, "communicator": graphar.Communicator()}
    results = [both_ways(layered(MLP(), group), batch()) for group in groups.values()]
    for group in (dist.group.WORLD, mesh):
        results.append(both_ways(maybe_compiled(layered(MLP(), group), "aot_eager"), batch()))
    for mode in MODES:
        constant, x = maybe_compiled(layered(MLP(), constant_weight=True), mode), batch()
        with torch.no_grad():
            y = constant(x)
        results.append([y, *both_ways(constant, x)[1:]])
    return results, sharded_gradients(rank, world_size)


def run_twice(rank, world_size):
    models = [layered(MLP(), **how) for how in ({}, {"tp_invariant": True}, {})]
    down = models[2].down
    down.forward = lambda x: graphar.fused_matmul_allreduce(x, down.weight, bias=down.bias)
    return [derived_twice(model, batch()) for model in models], sharded_gradients(rank, world_size, derived_twice)


def test_the_copy_of_a_layer_has_its_ranks_and_a_weight_of_its_own(group_of):
    group_of(2)
    for group in (dist.group.WORLD, graphar.Communicator(), None):
        for layer in (nn.RowParallelLinear, nn.ColumnParallelLinear):
            model = torch.nn.Sequential(layer(torch.nn.Linear(4, 6), group))
            copied = copy.deepcopy(model)
            assert copied[0].group is group
            assert torch.equal(copied[0].weight, model[0].weight)
            assert copied[0].weight.data_ptr() != model[0].weight.data_ptr()
            assert [name for name, _ in copied.named_parameters()] == ["0.weight", "0.bias"]


def test_under_autocast_outputs_have_the_dtype_of_the_whole_layers(group_of):
    group_of(1)
    whole, x = torch.nn.Linear(4, 6), torch.ones(2, 4)

    with torch.autocast("cpu", torch.bfloat16):
        outputs = [layer(x) for layer in (whole, nn.RowParallelLinear(whole), nn.ColumnParallelLinear(whole))]

    assert {y.dtype for y in outputs} == {torch.bfloat16}


@pytest.mark.parametrize("constant_weight", [False, True])
def test_a_constant_weight_is_multiplied_by_the_fused_op_in_inference(group_of, monkeypatch, constant_weight):
    from graphar.nn import layers

    group_of(1)
    called, x = [], torch.ones(2, 4)
    monkeypatch.setattr(layers, "with_constant_weight", lambda a, w, **how: called.append(how) or a @ w.t())
    layer = nn.RowParallelLinear(torch.nn.Linear(4, 6), constant_weight=constant_weight)

    layer(x)
    with torch.no_grad():
        layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)

    assert called == [{"group": None}] * constant_weight


def test_vmap_takes_layers_without_gradients_alone(group_of):
    group_of(1)
    for kind in (nn.RowParallelLinear, nn.ColumnParallelLinear):
        layer, x = kind(torch.nn.Linear(4, 6)), torch.ones(2, 3, 4)
        with torch.no_grad():
            assert torch.equal(torch.vmap(layer)(x), layer(x))
        with pytest.raises(RuntimeError, match="Function with functorch transforms"):
            torch.vmap(layer)(x.requires_grad_())


def other_model():
    """A model with the weights of another seed, on every rank the same."""
    model = MLP()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(7 + number, parameter.numel(), torch.float32).view(parameter.shape))
    return model


def load(model, state, **how):
    """What a model computes once it has loaded ``state``, and its parameters."""
    assert str(model.load_state_dict(state, **how)) == "<All keys matched successfully>"
    assert all(parameter.is_contiguous() and parameter.requires_grad for parameter in model.parameters())
    return [model(batch()).detach(), *(parameter.detach() for parameter in model.parameters())]


@on_ranks(2)
def test_checkpoints_of_whole_layers_and_of_shards_load_into_layers(rank, world_size):
    whole = other_model()
    state = whole.state_dict()
    up, up_bias, down, down_bias = whole.parameters()
    mine = [up.chunk(world_size)[rank], up_bias.chunk(world_size)[rank], down.chunk(world_size, 1)[rank], down_bias]
    loaded = {"whole": load(layered(MLP()), state)}
    loaded["shards"] = load(layered(MLP()), dict(zip(state, mine, strict=True)))
    loaded["parameters"] = load(layered(MLP()), whole.state_dict(keep_vars=True))
    with torch.device("meta"):
        without_memory = layered(MLP())
    loaded["assigned"] = load(without_memory, state, assign=True)
    assert state["down.weight"].shape == (HIDDEN, INNER)  # as it was
    (y, *parameters) = [whole(batch()).detach(), *(part.detach() for part in mine)]
    for how, (found, *own) in loaded.items():
        assert all(map(torch.equal, own, parameters)), how
        torch.testing.assert_close(found, y)


@on_ranks(2)
def test_a_checkpoint_of_another_size_is_torchs_own_error(rank, world_size):
    told = []
    for name, size in (("up.weight", (INNER, HIDDEN + 1)), ("down.weight", (HIDDEN, INNER * 2)), ("up.bias", (3,))):
        with pytest.raises(RuntimeError) as refusal:
            layered(MLP()).load_state_dict(MLP().state_dict() | {name: torch.ones(size)})
        told.append(f"size mismatch for {name}: " in str(refusal.value))
    assert told == [True] * 3


def planned(world_size, model, styles, **output):
    mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, (world_size,))
    plan = {"up": parallel.ColwiseParallel(), "down": styles.RowwiseParallel(**output)}
    return parallel.parallelize_module(model, mesh, plan)


def run_plan(rank, world_size, modes, **output):
    """What :func:`both_ways` gives by torch's plan, and by graphar's in each mode."""
    theirs = both_ways(planned(world_size, MLP(), parallel, **output), batch())
    mine = [both_ways(maybe_compiled(planned(world_size, MLP(), nn, **output), mode), batch()) for mode in modes]
    return theirs, mine


def run_plans(rank, world_size):
    last = {"output_layouts": Shard(-1), "use_local_output": False}
    return {
        "replicated": run_plan(rank, world_size, MODES),
        "replicated DTensor": run_plan(rank, world_size, MODES[:1], use_local_output=False),
        "sharded": run_plan(rank, world_size, MODES, output_layouts=Shard(0)),
        "sharded along the last dimension": run_plan(rank, world_size, MODES[:1], **last),
    }


def run_bits(rank, world_size, device):
    """Outputs of layers and plans in bf16, and results of the eager op on the same input."""

    def whole():
        return MLP(bias=False, dtype=torch.bfloat16).to(device)

    def outputs(model, count=TOKENS):
        with torch.no_grad():
            return model(batch(torch.bfloat16, count, device)).clone().cpu()  # torch's may not be complete yet

    partial = partial_product(rank, world_size, device)
    pairs = [(outputs(layered(whole())), graphar.allreduce(partial))]
    pairs.append((outputs(planned(world_size, whole(), nn)), graphar.allreduce(partial)))
    for dim in (0, 1):
        sharded = planned(world_size, whole(), nn, output_layouts=Shard(dim))
        pairs.append((outputs(sharded), graphar.reducescatter(partial, axis=dim)))
    total = graphar.allreduce(partial_product(rank, world_size, device, count=7)).cpu()
    uneven = outputs(planned(world_size, whole(), nn, output_layouts=Shard(0)), count=7)
    return [(mine, expected.cpu()) for mine, expected in pairs], uneven, total.chunk(world_size)[rank]


def run_embedding(rank, world_size):
    torch.manual_seed(0)
    embedding, ids = torch.nn.Embedding(12, HIDDEN), torch.arange(12)
    expected = embedding(ids).detach()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    sharded = parallel.parallelize_module(embedding, mesh, nn.RowwiseParallel(input_layouts=Replicate()))
    return sharded(ids).detach().clone(), expected


def run_all(rank, world_size):
    found = {run.__name__.removeprefix("run_"): run(rank, world_size) for run in (run_layers, run_twice, run_plans)}
    return found | {"embedding": run_embedding(rank, world_size)}


@pytest.fixture(scope="module")
def ranks():
    """What each of 2 ranks found."""
    return run_ranks(run_all, 2, timeout_s=180)


PLACES = {"2 ranks": ("cpu", 2), "4 ranks": ("cpu", 4), "2 GPUs": pytest.param(("cuda", 2), marks=pytest.mark.gpu)}


@pytest.fixture(scope="module", params=PLACES.values(), ids=PLACES)
def outputs(request):
    """What each rank got in bf16."""
    device, world_size = request.param
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    return run_ranks(run_bits, world_size, device, backend=backend, timeout_s=180)


def assert_close(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("derivatives", ["layers", "twice"])
def test_layers_give_the_outputs_and_gradients_of_the_whole_one(ranks, derivatives):
    for results, expected in (rank[derivatives] for rank in ranks):
        for result in results:
            assert_close(result, expected)


@pytest.mark.parametrize("output", ["replicated", "replicated DTensor", "sharded", "sharded along the last dimension"])
def test_a_plan_with_graphars_style_gives_what_torchs_gives_forward_and_backward(ranks, output):
    for theirs, mine in (rank["plans"][output] for rank in ranks):
        for result in mine:
            assert_close(result, theirs)


@pytest.mark.promise("Models under `graphar.enable()` and layers of `graphar.nn` have the bits of eager calls.")
def test_outputs_have_the_bits_of_allreduce_and_sharded_ones_those_of_reducescatter(outputs):
    for pairs, *_ in outputs:
        assert [same_bits(mine, expected) for mine, expected in pairs] == [0] * 4


def test_what_cannot_be_sharded_evenly_goes_torchs_way(outputs):
    for _, mine, expected in outputs:
        torch.testing.assert_close(mine, expected, rtol=0.02, atol=0.02)


def test_an_embedding_goes_torchs_way(ranks):
    for mine, expected in (rank["embedding"] for rank in ranks):
        assert same_bits(mine, expected) == 0


@pytest.fixture
def one_of_three():
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=3)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("layer", "features"), [("ColumnParallelLinear", 64), ("RowParallelLinear", 16)])
def test_features_that_cannot_be_divided_evenly_are_refused(one_of_three, layer, features):
    with pytest.raises(ValueError, match=f"3 ranks cannot divide {features} features evenly"):
        getattr(nn, layer)(torch.nn.Linear(16, 64))


@pytest.mark.parametrize("layer", ["ColumnParallelLinear", "RowParallelLinear"])
def test_what_is_no_linear_layer_is_refused(layer):
    with pytest.raises(TypeError, match=f"^graphar.nn.{layer}: linear must be a torch.nn.Linear, got Conv1d$"):
        getattr(nn, layer)(torch.nn.Conv1d(4, 4, 1))


def test_a_communicator_with_devices_is_refused():
    with graphar.Communicator(devices=["cpu"] * 2) as communicator, pytest.raises(ValueError, match="not one with dev"):
        nn.RowParallelLinear(torch.nn.Linear(16, 64), communicator)
