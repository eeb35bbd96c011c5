"""Tensor-parallel models as they are written for torch.distributed, and how tests compile them."""

import torch
import torch.distributed as dist

TOKENS = (5, 7, 9, 12)
HIDDEN, INNER = 16, 64


def backend(compile_pass):
    """Does what Inductor does to a graph up to the pass, without the code generation. Takes milliseconds."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def run_pass(graph_module, inputs):
        compile_pass(graph_module.graph)
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module

    return aot_autograd(fw_compiler=run_pass, decompositions=select_decomp_table())


def compiled(model, compile_pass):
    return torch.compile(model, fullgraph=True, backend=backend(compile_pass))


def tokens(count, dtype=torch.bfloat16):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


def weights(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(HIDDEN, INNER, generator=generator) / 4, torch.randn(INNER, HIDDEN, generator=generator) / 8
    return up.to(dtype), down.to(dtype)


class MLP:
    """A tensor-parallel MLP as it is written for dist.all_reduce."""

    def __init__(self, rank, world_size, all_reduce=dist.all_reduce):
        up, down = weights()
        self.up, self.down = up.chunk(world_size, 1)[rank], down.chunk(world_size)[rank]
        self.all_reduce = all_reduce

    def __call__(self, x):
        y = torch.relu(x @ self.up) @ self.down
        self.all_reduce(y)
        return y * 2


class SequenceParallelMLP(MLP):
    """The same MLP with its input and output divided between ranks by tokens, in functional collectives."""

    def __init__(self, rank, world_size, gather=None, scatter=None):
        super().__init__(rank, world_size)
        self.gather, self.scatter = gather or self._gather, scatter or self._scatter

    def __call__(self, x):
        return self.scatter(torch.relu(self.gather(x) @ self.up) @ self.down)

    @staticmethod
    def _gather(x):
        from torch.distributed import _functional_collectives as functional

        return functional.all_gather_tensor(x, 0, dist.group.WORLD)

    @staticmethod
    def _scatter(x):
        from torch.distributed import _functional_collectives as functional

        return functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)


def unsharded_mlp(x):
    up, down = weights()
    return (torch.relu(x @ up) @ down).float()


class Gradients(torch.nn.Module):
    def __init__(self):
        super().__init__()
        up, down = weights(torch.float32)
        self.up, self.down = torch.nn.Linear(HIDDEN, INNER), torch.nn.Linear(INNER, HIDDEN, bias=False)
        self.up.weight.data, self.down.weight.data = up.t().contiguous(), down.t().contiguous()
        torch.nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def backward(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad


class GatedMLP(torch.nn.Module):
    """Two matmuls of the same rows, one with a bias, and a matmul of their product; without a gate one and one.

    With ``gated="packed"``, one weight holds those of both matmuls.
    """

    def __init__(self, gated):
        super().__init__()
        self.is_packed = gated == "packed"
        self.gate = torch.nn.Linear(HIDDEN, INNER, bias=False) if gated and not self.is_packed else None
        self.up = torch.nn.Linear(HIDDEN, 2 * INNER if self.is_packed else INNER)
        self.down = torch.nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x):
        if self.is_packed:
            gate, y = self.up(x).chunk(2, -1)
            return self.down(torch.relu(y) * gate)
        y = torch.relu(self.up(x))
        return self.down(y * self.gate(x) if self.gate else y)


class Block(torch.nn.Module):
    """The second half of a decoder layer."""

    def __init__(self, gated):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mlp = torch.nn.RMSNorm(HIDDEN), GatedMLP(gated)
        self.bfloat16()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def sequence_parallel(block, mesh, dim):
    """Shards a block in place by a plan of torch's: tokens, which are dimension ``dim``, between its matmuls."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    layers = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=Shard(dim))}
    if block.mlp.gate:
        layers["mlp.gate"] = ColwiseParallel()
    gather = PrepareModuleInput(input_layouts=(Shard(dim),), desired_input_layouts=(Replicate(),))
    return parallelize_module(
        block, mesh, {"norm": SequenceParallel(sequence_dim=dim, use_local_output=True), "mlp": gather} | layers
    )


class FunctionalBlock(Block):
    """A block whose linear layers are this rank's parts, with functional collectives around them."""

    def __init__(self, gated, rank, world_size, dim):
        super().__init__(gated)
        self.dim = dim
        for layer in filter(None, (self.mlp.up, self.mlp.gate)):
            layer.weight.data = layer.weight.data.chunk(world_size)[rank].clone()
        self.mlp.up.bias.data = self.mlp.up.bias.data.chunk(world_size)[rank].clone()
        self.mlp.down.weight.data = self.mlp.down.weight.data.chunk(world_size, 1)[rank].clone()

    def forward(self, x):
        from torch.distributed import _functional_collectives as functional

        # torch 2.13 has renamed them.
        new = hasattr(functional, "all_gather_single_autograd")
        gather = functional.all_gather_single_autograd if new else functional.all_gather_tensor_autograd
        scatter = functional.reduce_scatter_single_autograd if new else functional.reduce_scatter_tensor_autograd
        whole = gather(self.norm(x), self.dim, dist.group.WORLD)
        return x + functional.wait_tensor(scatter(self.mlp(whole), "sum", self.dim, dist.group.WORLD))
