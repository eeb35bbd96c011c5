"""Compiled with ``tp_invariant=True`` models have the bits of eager layers, on 1, 2 and 4 ranks alike."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import graphar
from tests.cases import same_bits
from tests.graph.test_inductor import needs_a_compiler
from tests.parallel_models import HIDDEN, INNER, Block, FunctionalBlock, backend, sequence_parallel, tokens
from tests.processes import run_ranks

PLAN = {"up": "colwise", "down": "rowwise"}


class MLP(torch.nn.Module):
    """Two layers with biases, a residual and a norm."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(HIDDEN, INNER), torch.nn.Linear(INNER, HIDDEN)
        self.norm = torch.nn.RMSNorm(HIDDEN, eps=1e-5)
        self.to(dtype)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


class SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduced(gradient)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_reduced(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def all_reduced(x):
    return dist._functional_collectives.all_reduce(x, "sum", dist.group.WORLD)


class FunctionalMLP(MLP):
    """The same with a rank's parts of the weights, and functional collectives."""

    def __init__(self, dtype, rank, ranks):
        super().__init__(dtype)
        parts = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
        for name, axis in parts.items():
            layer, of = name.split(".")
            whole = getattr(getattr(self, layer), of)
            setattr(getattr(self, layer), of, torch.nn.Parameter(whole.data.chunk(ranks, axis)[rank].clone()))

    def forward(self, x):
        y = Sum.apply(functional.linear(torch.relu(self.up(SumOfGradients.apply(x))), self.down.weight))
        return self.norm(x + (y + self.down.bias))


def in_functions(dtype, rank, ranks):
    return FunctionalMLP(dtype, rank, ranks)


def in_dtensors(dtype, rank, ranks):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    return parallelize_module(MLP(dtype), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def made_invariant(dtype, rank, ranks):
    from graphar.nn import make_tp_invariant

    model = in_dtensors(dtype, rank, ranks) if ranks > 1 else MLP(dtype)
    make_tp_invariant(model, PLAN)
    return model


def of_layers(dtype, rank, ranks):
    from graphar.nn import ColumnParallelLinear, RowParallelLinear

    model = MLP(dtype)
    model.up = ColumnParallelLinear(model.up, tp_invariant=True)
    model.down = RowParallelLinear(model.down, tp_invariant=True)
    return model


AXES = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # along which ranks divide a gradient
# By number of ranks: wrong roundings show in bf16 and wrong additions in fp32, and compilers take minutes for both.
DTYPES = {2: torch.bfloat16, 4: torch.float32}
COUNTS = (5, 24)


def trained(model, run, dtype, ranks=1, counts=COUNTS, device="cpu"):
    """The results and gradients of each number of tokens; those of parameters whole."""
    found = []
    for count in counts:
        x = tokens(count, dtype).view(1, count, HIDDEN).clone().to(device).requires_grad_()
        y = run(x)
        model.zero_grad()
        y.backward(tokens(count + 100, dtype)[:count].view(y.shape).to(device))
        found += [y.detach(), x.grad, *(whole(name, one.grad, ranks) for name, one in model.named_parameters())]
    return found


def whole(name, gradient, ranks):
    if hasattr(gradient, "full_tensor"):
        return gradient.full_tensor()
    if ranks == 1 or name not in AXES:
        return gradient
    parts = [torch.empty_like(gradient) for _ in range(ranks)]
    dist.all_gather(parts, gradient.contiguous())
    return torch.cat(parts, AXES[name])


def in_graphs(make, rank, ranks, dtype, **how):
    """What a compiled model gives, its report, and what it gives without gradients."""
    model, compile_pass = make(dtype, rank, ranks), graphar.compile_pass(**how)
    torch._dynamo.reset()
    # torch cannot trace DTensors of varying sizes together with their gradients.
    run = torch.compile(model, fullgraph=True, backend=backend(compile_pass), dynamic=make is in_functions)
    found = trained(model, run, dtype, ranks)
    with torch.no_grad():
        found += [run(tokens(count, dtype)) for count in COUNTS]
    return found, compile_pass.report


def run_models(rank, ranks):
    dtype, found = DTYPES[ranks], {}
    for make in (in_functions, in_dtensors, made_invariant):
        found[make.__name__] = in_graphs(make, rank, ranks, dtype, tp_invariant=True)
    found["plain"] = in_graphs(in_functions, rank, ranks, dtype)
    layers = of_layers(dtype, rank, ranks)
    found["layers"] = trained(layers, layers, dtype, ranks), None
    return found


@functools.cache
def on_ranks(ranks):
    return run_ranks(run_models, ranks, timeout_s=400)


@functools.cache
def on_one_rank(dtype):
    """What the compiled model of one rank gives, which was made invariant by its plan."""
    ((found, report),) = run_ranks(run_alone, 1, dtype)
    assert report.is_tp_invariant
    return found


def run_alone(rank, ranks, dtype):
    return in_graphs(made_invariant, rank, ranks, dtype, tp_invariant=True)


several = pytest.mark.parametrize("ranks", DTYPES)


@several
@pytest.mark.parametrize("make", [in_functions, in_dtensors, made_invariant], ids=lambda make: make.__name__)
def test_compiled_models_have_the_results_and_gradients_of_one_rank(ranks, make):
    expected = on_one_rank(DTYPES[ranks])

    for found, report in (rank[make.__name__] for rank in on_ranks(ranks)):
        assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0] * len(expected)
        assert report.is_tp_invariant
        assert report.breaks == []
        assert report.graphs == (3 if make is in_functions else 6)  # of any number of tokens, or of each of two


@several
def test_they_have_the_bits_of_eager_layers(ranks):
    expected = on_one_rank(DTYPES[ranks])

    for found, _ in (rank["layers"] for rank in on_ranks(ranks)):
        assert [same_bits(*pair) for pair in zip(found, expected, strict=False)] == [0] * len(found)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_they_have_the_bits_of_an_eager_model_without_a_process_group(dtype):
    model = made_invariant(dtype, 0, 1)

    found = trained(model, model, dtype)

    assert [same_bits(*pair) for pair in zip(found, on_one_rank(dtype), strict=False)] == [0] * len(found)


@several
def test_without_the_option_they_have_other_bits(ranks):
    expected = on_one_rank(DTYPES[ranks])

    for found, _ in (rank["plain"] for rank in on_ranks(ranks)):
        assert sum(same_bits(*pair) > 0 for pair in zip(found, expected, strict=True)) > len(expected) / 2


SEQUENCE = 24


def run_divided(rank, ranks, kind):
    """A rank's tokens of the result, and gradients: of its tokens, and of the weights that see all tokens."""
    from graphar.nn import make_tp_invariant

    x = tokens(SEQUENCE).view(1, SEQUENCE, HIDDEN).chunk(ranks, 1)[rank].clone().requires_grad_()
    if ranks == 1:
        model = Block(gated=False)
        make_tp_invariant(model, {"mlp.up": "colwise", "mlp.down": "rowwise"})
    elif kind == "DTensor":
        mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
        model = sequence_parallel(Block(gated=False), mesh, 1)
    else:
        model = FunctionalBlock(False, rank, ranks, 1)
    compile_pass = graphar.compile_pass(tp_invariant=True)
    y = torch.compile(model, fullgraph=True, backend=backend(compile_pass), dynamic=False)(x)
    y.square().sum().backward()
    up, down = model.mlp.up, model.mlp.down
    found = {"up.weight": up.weight.grad, "up.bias": up.bias.grad, "down.weight": down.weight.grad}
    whole_ones = [whole(name, one, ranks) for name, one in found.items()]
    return y.detach(), x.grad, whole_ones, compile_pass.report


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["DTensor", "functional"])
def test_with_divided_tokens_only_the_norms_gradient_has_other_bits_and_the_report_says_so(ranks, kind):
    ((y, of_x, of_weights, _),) = run_ranks(run_divided, 1, kind)

    parts, of_parts, of_ranks, reports = zip(*run_ranks(run_divided, ranks, kind, timeout_s=180), strict=True)

    assert same_bits(torch.cat(parts, 1), y) == 0
    assert same_bits(torch.cat(of_parts, 1), of_x) == 0
    for found in of_ranks:
        assert [same_bits(*pair) for pair in zip(found, of_weights, strict=True)] == [0, 0, 0]
    for report in reports:
        assert [one.op for one in report.breaks] == ["aten.sum.dim_IntList"]
        assert "the gradient of a norm's weight" in report.breaks[0].why


def run_inductor(rank, ranks):
    model = in_dtensors(torch.bfloat16, rank, ranks) if ranks > 1 else made_invariant(torch.bfloat16, rank, ranks)
    with torch._inductor.config.patch(compile_threads=1), graphar.enable(tp_invariant=True) as compile_pass:
        run = torch.compile(model, fullgraph=True, dynamic=False)
        found = trained(model, run, torch.bfloat16, ranks, COUNTS[:1])
    return found, compile_pass.report


@needs_a_compiler
def test_inductor_gives_compiled_models_the_bits_of_one_rank():
    ((expected, alone),) = run_ranks(run_inductor, 1, timeout_s=180)

    for found, report in run_ranks(run_inductor, 2, timeout_s=180):
        assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0] * len(expected)
        assert report.is_tp_invariant
        assert alone.is_tp_invariant
        assert report.graphs == alone.graphs == 2


def run_compiled_on_gpus(rank, ranks):
    """How many elements differ from those of the whole model on this GPU, in every result and gradient."""
    dtype, how = torch.bfloat16, {"fullgraph": True, "dynamic": False}
    whole_model, parts = made_invariant(dtype, 0, 1).cuda(), FunctionalMLP(dtype, rank, ranks).cuda()
    compile_pass = graphar.compile_pass(tp_invariant=True)
    alone = torch.compile(whole_model, backend=backend(lambda graph: None), **how)
    together = torch.compile(parts, backend=backend(compile_pass), **how)
    expected = trained(whole_model, alone, dtype, device="cuda")
    found = trained(parts, together, dtype, ranks, device="cuda")
    return [same_bits(*pair) for pair in zip(found, expected, strict=True)], compile_pass.report.is_tp_invariant


@pytest.mark.gpu
def test_compiled_models_have_the_bits_of_one_gpu(on_gpus):
    for differing, is_invariant in on_gpus(run_compiled_on_gpus):
        assert differing == [0] * len(differing)
        assert is_invariant
