"""Layers of graphar.nn in FP8 between GPUs: against the whole layer, the fused op and the CPU; in CUDA graphs."""

import pytest
import torch

import graphar
from graphar import nn
from tests.cases import normal, same_bits
from tests.processes import run_on_gpus

pytestmark = [pytest.mark.gpu(2, shared=True), pytest.mark.usefixtures("hopper")]

TOKENS, HIDDEN, INNER = 64, 1024, 2048
FORMATS, BF16 = ("tensor", "rows", "blocks"), torch.bfloat16


def drawn(seed, *shape):
    return normal(seed, torch.Size(shape).numel(), BF16).view(shape).cuda()


def whole_layers(scales):
    torch.manual_seed(0)
    up, down = [torch.nn.Linear(*sizes, dtype=BF16).cuda() for sizes in ((HIDDEN, INNER), (INNER, HIDDEN))]
    return nn.Fp8Linear(up, scales), nn.Fp8Linear(down, scales)


def layered(scales, **how):
    up, down = whole_layers(scales)
    return torch.nn.Sequential(nn.ColumnParallelLinear(up, **how), torch.nn.ReLU(), nn.RowParallelLinear(down, **how))


def run_format(rank, ranks, scales):
    """Differing elements of parts of the whole layer, of the fused op, of divided tokens; and distances of outputs."""
    (up, down), model, x = whole_layers(scales), layered(scales), drawn(1, 4, TOKENS, HIDDEN)
    group_size = 128 if scales == "blocks" else None
    replayed = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        hidden = up(x)
        own = torch.relu(hidden.chunk(ranks, -1)[rank]).contiguous()
        rows, a_scale = nn.quantize_rows(own, group_size=group_size)
        w_scale = getattr(model[2], model[2]._weight_scale)
        how = {"a_scale": a_scale, "w_scale": w_scale, "bias": down.bias}
        expected = graphar.fused_matmul_allreduce(rows, model[2].weight, **how)
        y = model(x)
        wrong = [same_bits(model[0](x), hidden.chunk(ranks, -1)[rank]), same_bits(y, expected)]
        for dim in (0, 1):
            divided = layered(scales, sequence_dim=dim)(x.chunk(ranks, dim)[rank].contiguous())
            wrong.append(same_bits(divided, y.chunk(ranks, dim)[rank]))
        in_graphs = [replayed(x).clone() for _ in range(4)]
        of_cpu = down.cpu()(torch.relu(up.cpu()(x.cpu())))
    outputs = [one.float().cpu() for one in (y, *in_graphs)]
    return wrong, [((one - of_cpu.float()).norm() / of_cpu.float().norm()).item() for one in outputs]


@pytest.mark.parametrize("scales", FORMATS)
def test_layers_have_the_bits_of_their_parts_and_about_the_values_of_the_cpu(scales, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    for wrong, distances in run_on_gpus(run_format, 2, scales, timeout_s=300):
        assert wrong == [0] * 4
        assert max(distances) < 0.03  # e4m3 has 3 bits: some values of the second layer's input are others


@pytest.mark.parametrize("how", [{}, {"group_size": 128}, {"scale": torch.tensor(0.01)}], ids=["rows", "groups", "one"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_a_gpu_quantises_as_the_cpu_does(dtype, how):
    x = normal(0, 37 * HIDDEN, dtype).view(37, HIDDEN)
    on_gpu = {name: one.cuda() if isinstance(one, torch.Tensor) else one for name, one in how.items()}

    found = nn.quantize_rows(x.cuda(), **on_gpu)

    for mine, expected in zip(found, nn.quantize_rows(x, **how), strict=True):
        assert torch.equal(mine.cpu().view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))
