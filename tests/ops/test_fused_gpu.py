"""fused_matmul_allreduce and fused_matmul_reducescatter on GPUs, one process with operands on every device."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import Codec, reference
from graphar.numerics import codecs
from graphar.plan.work import Sum
from tests.cases import same_bits
from tests.gpu import Ranks, poison

pytestmark = pytest.mark.gpu

FUSED, SCATTER = OPS = (graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNELS = {FUSED: "matmul_allreduce", SCATTER: "matmul_reducescatter"}  # of partition "tiles"

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Layer:
    """Operands on every device: A_r [m, k], W_r [n, k], which may be a transposed view, and a bias if asked for."""

    def __init__(self, ranks: Ranks, fill, m, n, k, dtype, transposed=False, with_bias=False, seed=0) -> None:
        self.ranks = ranks
        self.a = [fill((m, k), dtype, rank, seed) for rank in range(ranks.world_size)]
        self.w = [fill((n, k), dtype, rank, seed + 100) for rank in range(ranks.world_size)]
        if transposed:
            self.w = [w.t().contiguous().t() for w in self.w]
        bias = fill((n,), dtype, 0, seed + 200) if with_bias else None
        self.bias = None if bias is None else [bias.to(a.device) for a in self.a]

    def __call__(self, op=FUSED, **options):
        return op(self.a, self.w, bias=self.bias, group=self.ranks.communicator, **options)

    def specified(self, op=FUSED, **options) -> list[torch.Tensor]:
        """The specification, with torch's matmul on the first device. Any matmul of integers gives its bits."""
        a, w = ([x.to("cuda:0") for x in xs] for xs in (self.a, self.w))
        bias = None if self.bias is None else self.bias[0]
        if op is FUSED:
            return [reference.fused_matmul_allreduce(a, w, bias, **options)] * len(a)
        return reference.fused_matmul_reducescatter(a, w, bias, **options)

    def poison_results(self, op) -> None:
        a, world_size = self.a[0], len(self.a)
        rows = [len(a)] * world_size if op is FUSED else [len(part) for part in a.tensor_split(world_size)]
        poison([count * len(self.w[0]) * a.element_size() for count in rows])

    def check(self, op, what="", **options) -> None:
        self.poison_results(op)
        self.check_results(self(op, **options), op, (what, options))

    def check_results(self, ys, op=FUSED, what="", **options) -> None:
        self.ranks.communicator.synchronize()
        for rank, (y, expected) in enumerate(zip(ys, self.specified(op, **options), strict=True)):
            assert same_bits(y.to("cuda:0"), expected) == 0, f"rank {rank} {what}"


def integers(shape, dtype, rank, seed):
    """Random integers from -4 to 4 without 0: fp32 holds any sum of fewer than 2^20 products.

    With zeros, a sum of one product could be -0, which some of torch's matmuls turn into 0.
    """
    generator = torch.Generator(f"cuda:{rank}").manual_seed(seed * 8 + rank)
    x = torch.randint(-4, 4, shape, device=f"cuda:{rank}", generator=generator)
    return torch.where(x < 0, x, x + 1).to(dtype)


def normal(shape, dtype, rank, seed):
    generator = torch.Generator(f"cuda:{rank}").manual_seed(seed * 8 + rank)
    return torch.randn(shape, dtype=dtype, device=f"cuda:{rank}", generator=generator)


# ---- results --------------------------------------------------------------------------------------------------------


@every_dtype
def test_random_data_are_close_to_float64(ranks: Ranks, dtype):
    layer = Layer(ranks, normal, 300, 520, 1024, dtype, with_bias=True)

    assert_near_float64(layer, layer(partition="split_m"))


def assert_near_float64(layer: Layer, ys) -> None:
    dtype = ys[0].dtype
    products = [(a.double() @ w.double().t()).to("cuda:0") for a, w in zip(layer.a, layer.w, strict=True)]
    absolute = [(a.double().abs() @ w.double().abs().t()).to("cuda:0") for a, w in zip(layer.a, layer.w, strict=True)]
    exact = sum(products) + (layer.bias[0].double() if layer.bias else 0)
    precision = max(torch.finfo(dtype).eps, 2.0**-11 if dtype == torch.float32 else 0)  # torch may multiply in tf32
    bound = precision * (sum(one.abs() for one in products) + exact.abs()) + sum(absolute) * 2.0**-14
    for y in ys:
        assert ((y.to("cuda:0").double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("partition", ["split_n", "tiles"])
def test_the_originals_case_ten_times_in_four_partitions_and_in_tiles(ranks: Ranks, partition):
    layer = Layer(ranks, normal, 8192, 8192, 2048, torch.bfloat16)
    expected = layer(partition="split_m")  # of graphar's matmul, as the others
    ranks.communicator.synchronize()

    for turn in range(10):
        layer.poison_results(FUSED)
        ys = layer(partition=partition, num_partitions=None if partition == "tiles" else 4)
        for rank, (y, whole) in enumerate(zip(ys, expected, strict=True)):
            assert same_bits(y, whole) == 0, f"rank {rank}, turn {turn}"
    assert all(same_bits(y.to("cuda:0"), ys[0]) == 0 for y in ys)
    assert_near_float64(layer, ys)


@every_op
@pytest.mark.parametrize("partition", ["none", "split_m", "split_n", "tiles"])
def test_a_codec_rounds_each_partition(fresh_ranks: Ranks, op, partition):
    codec = Codec(4, 128, "stochastic", seed=11)
    for call, with_bias in enumerate((False, True)):
        layer = Layer(fresh_ranks, integers, 512, 1032, 64, torch.bfloat16, with_bias=with_bias)
        with graphar.Communicator(devices=range(fresh_ranks.world_size)) as communicator:
            ys = op(layer.a, layer.w, bias=layer.bias, codec=codec, partition=partition, group=communicator)
            communicator.synchronize()
        options = {"codec": codec, "seed": 11, "partition": partition}
        layer.check_results(ys, op, call, **options)


# ---- what runs ------------------------------------------------------------------------------------------------------


def test_sums_beside_a_multiplication_have_few_blocks_and_the_last_has_all(ranks: Ranks, monkeypatch):
    asked, engine = [], ranks.communicator.engine
    find_plan = engine.plan

    def plan(call, operands):
        if isinstance(call.work, Sum):
            asked.append((call.op, call.blocks))
        return find_plan(call, operands)

    monkeypatch.setattr(engine, "plan", plan)
    layer = Layer(ranks, normal, 2048, 2048, 256, torch.bfloat16)
    layer(partition="split_m", num_partitions=4)
    before = ranks.calls_of("two_shot_pipelined")

    layer(partition="split_m", num_partitions=4)

    assert asked == [("allreduce", blocks) for blocks in ([engine.table.beside.blocks] * 3 + [None]) * 2]
    assert ranks.calls_of("two_shot_pipelined") >= before + 3
    assert ranks.grid_is_idle("two_shot_pipelined")


@every_op
def test_tiles_are_one_kernel_wherever_it_serves(ranks: Ranks, hopper, op):
    layer = Layer(ranks, integers, 500, 264, 136, torch.bfloat16)
    before = ranks.calls_of(KERNELS[op])

    layer.check(op, partition="tiles")
    Layer(ranks, integers, 500, 260, 136, torch.bfloat16).check(op, partition="tiles")  # of an odd number of columns

    assert ranks.calls_of(KERNELS[op]) == before + 1
    assert ranks.grid_is_idle(KERNELS[op])


@every_op
@pytest.mark.parametrize("codec", ["int8", "int2"])
def test_codes_travel_in_tiles_where_rows_are_whole_buckets(ranks: Ranks, hopper, op, codec):
    options = {"partition": "tiles", "codec": codecs.codec(codec)}
    before = ranks.calls_of(KERNELS[op])

    for columns in (288, 264):  # the latter are eights, but no whole buckets
        layer = Layer(ranks, integers, 500, columns, 136, torch.bfloat16, with_bias=True)
        layer.poison_results(op)
        layer.check_results(layer(op, **options), op, columns, **options)

    assert ranks.calls_of(KERNELS[op]) == before + 1
    assert ranks.grid_is_idle(KERNELS[op])


@every_op
def test_ranks_may_differ_in_k_and_in_where_their_operands_lie(ranks: Ranks, hopper, op):
    layer = Layer(ranks, integers, 300, 264, 136, torch.bfloat16, with_bias=True)
    layer.a[0], layer.w[0] = layer.a[0][:, 1:34], layer.w[0][:, 3:36]
    layer.a[-1], layer.w[-1] = layer.a[-1][:, :0], layer.w[-1][:, :0]
    layer.bias = [bias.repeat_interleave(2)[::2] for bias in layer.bias]
    before = ranks.calls_of(KERNELS[op])

    layer.check(op, partition="tiles")

    assert ranks.calls_of(KERNELS[op]) == before + 1


@pytest.mark.parametrize("partition", ["none", "split_m", "split_n", "tiles"])
def test_nothing_is_written_beside_out(ranks: Ranks, partition):
    layer = Layer(ranks, integers, 520, 264, 136, torch.bfloat16)
    buffers = [torch.full((522, 280), float("nan"), dtype=torch.bfloat16, device=a.device) for a in layer.a]
    outs = [buffer[1:-1, 8:272] for buffer in buffers]

    layer.check_results(layer(out=outs, partition=partition))

    for buffer, out in zip(buffers, outs, strict=True):
        out.fill_(float("nan"))
        assert buffer.isnan().all()


def test_a_symmetric_tensor_takes_the_result(fresh_ranks: Ranks):
    layer = Layer(fresh_ranks, integers, 1024, 1024, 64, torch.bfloat16)
    outs = fresh_ranks.communicator.empty(1024, 1024, dtype=torch.bfloat16)

    for partition in ("none", "split_m", "split_n", "tiles"):
        layer.check_results(layer(out=outs, partition=partition), what=partition)


# ---- streams and graphs ---------------------------------------------------------------------------------------------


def test_the_next_input_may_be_written_right_after_the_call(ranks: Ranks):
    layer = Layer(ranks, integers, 2048, 1024, 512, torch.bfloat16)
    expected = layer.specified()

    ys = layer(partition="split_m")
    for x in (*layer.a, *layer.w):
        x.zero_()

    for y, wanted in zip(ys, expected, strict=True):
        assert same_bits(y.to("cuda:0"), wanted) == 0
