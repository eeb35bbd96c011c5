"""Groups that cross, as tensor parallelism beside data parallelism has them: four ranks in rows and columns."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import graphar
from graphar.nn import ColumnParallelLinear, RowParallelLinear
from tests.cases import normal, same_bits
from tests.processes import on_ranks, run_on_gpus, run_ranks
from tests.ranks.test_two_communicators_gpu import CALLS, MB

WORLD_SIZE = 4
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))

STEPS, BLOCKS, RATE = 5, 3, 0.05


def whole_model(hidden, inner):
    torch.manual_seed(0)
    blocks = [(torch.nn.Linear(hidden, inner), torch.nn.ReLU(), torch.nn.Linear(inner, hidden)) for _ in range(BLOCKS)]
    return torch.nn.Sequential(*[torch.nn.Sequential(*block) for block in blocks])


def sharded(model, group):
    """The model with each block's inner features divided between the group's ranks."""
    blocks = [(ColumnParallelLinear(up, group), relu, RowParallelLinear(down, group)) for up, relu, down in model]
    return torch.nn.Sequential(*[torch.nn.Sequential(*block) for block in blocks])


def losses_of(model, batches, total):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for batch in batches:
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total(loss.detach().view(1)).item())
    return losses


def train(rank, world_size, device, hidden, inner, tokens):
    """The losses in tensor parallelism of 2 and data parallelism of 2, and those of one process with all tokens."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    whole = whole_model(hidden, inner)
    batches = [torch.randn(2, tokens, hidden, generator=torch.Generator().manual_seed(at)) for at in range(STEPS)]
    model = DistributedDataParallel(sharded(copy.deepcopy(whole).to(device), tensor), process_group=data)
    model.register_comm_hook(None, graphar.ddp.exact_hook(data))
    own = [batch[mesh.get_local_rank("data")].to(device) for batch in batches]
    found = losses_of(model, own, lambda loss: graphar.allreduce(loss, data) / 2)
    return found, losses_of(whole, [batch.flatten(0, 1) for batch in batches], lambda loss: loss)


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        ("cpu", (16, 32, 8)),
        pytest.param("cuda", (1024, 8192, 2048), marks=pytest.mark.gpu(WORLD_SIZE)),
    ],
)
def test_training_in_both_kinds_of_parallelism_has_the_losses_of_one_process(device, sizes):
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    for found, expected in run_ranks(train, WORLD_SIZE, device, *sizes, backend=backend, timeout_s=240):
        assert found == pytest.approx(expected, rel=1e-4)
        assert found[-1] < found[0]


ROUNDS, TIMEOUT_S = 300, 10.0


def own_group(rank, pairs):
    """This rank's communicator of its pair, and the pair's number."""
    made = [dist.new_group(pair) for pair in pairs]
    number = next(at for at, pair in enumerate(pairs) if rank in pair)
    return graphar.Communicator(made[number], timeout_s=TIMEOUT_S), number


@pytest.mark.promise(
    "Calls of two communicators, or as many as declared, end in any order, if a matmul's K is equal on all ranks."
)
@pytest.mark.gpu(WORLD_SIZE)
@on_ranks(WORLD_SIZE, by=run_on_gpus, timeout_s=300)
def test_calls_of_crossing_groups_end_in_any_order_of_launches(rank, world_size):
    x = normal(rank, 96 * MB, torch.bfloat16).cuda()
    groups, numbers = zip(*(own_group(rank, pairs) for pairs in (ROWS, COLUMNS)), strict=True)
    expected = [{name: call(x, group) for name, call in CALLS.items()} for group in groups]
    torch.cuda.synchronize()
    dist.barrier()
    streams = [torch.cuda.Stream() for _ in groups]
    draws = [random.Random(f"{which} {number}") for which, number in enumerate(numbers)]  # alike in a group
    order, wrong = random.Random(f"order {rank}"), 0
    for _ in range(ROUNDS):
        names = [draw.choice([*CALLS]) for draw in draws]
        results = [None, None]
        for at in order.sample((0, 1), 2):
            with torch.cuda.stream(streams[at]):
                results[at] = CALLS[names[at]](x, groups[at])
        torch.cuda.synchronize()
        wrong += sum(same_bits(*pair) for pair in zip(results, map(dict.get, expected, names), strict=True))
    for group in groups:
        group.synchronize()
    assert wrong == 0
