"""Matmuls that are summed over ranks on GPUs, one process with operands on every device: not of integers alone.

tests.ops.gpu_cases has what they share with collectives.
"""

from dataclasses import replace

import pytest
import torch

import graphar
from graphar import Codec
from graphar.numerics import codecs
from graphar.plan.work import Sum
from graphar.product.gemm import matmul
from tests import cases
from tests.cases import same_bits
from tests.gpu import Ranks
from tests.ops import specified as by
from tests.ops.conformance import FUSED_ALLREDUCE, FUSED_REDUCESCATTER, placed
from tests.ops.gpu_cases import BF16, DTYPES, OF_MATMUL, Case, assert_bits, in_way
from tests.processes import on_ranks, run_on_gpus

pytestmark = pytest.mark.gpu

FUSED, SCATTER = OPS = (graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter)
KERNELS = {FUSED: "matmul_allreduce", SCATTER: "matmul_reducescatter"}  # of partition "tiles"
PARTITIONS = ("none", "split_m", "split_n", "tiles")

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
every_partition = pytest.mark.parametrize("partition", PARTITIONS)


def case_of(op, partition: str, label: str = "", epilogue: str = "", numbers: dict | None = None, **options) -> Case:
    """Calls with a partition, a bias if the label says so, and an epilogue that may read c, f and r."""
    (form,) = [form for form in (FUSED_ALLREDUCE if op is FUSED else FUSED_REDUCESCATTER) if form.label == label]
    form = replace(form, options=form.options | options)
    if epilogue:
        places = {name: place for name, place in (("c", "col"), ("f", "index"), ("r", "row")) if f"{name}[" in epilogue}
        make = placed(by.products, form.specify, **places)
        form = replace(form, make=make, epilogue=epilogue, numbers=numbers or {})
    return replace(in_way(form, partition, ()), kernels={KERNELS[op]: (500, 264, 136)})


def normal(shape, dtype, rank, seed):
    generator = torch.Generator(f"cuda:{rank}").manual_seed(seed * 8 + rank)
    return torch.randn(shape, dtype=dtype, device=f"cuda:{rank}", generator=generator)


def assert_near_float64(drawn, ys) -> None:
    pairs, dtype = list(zip(drawn["a"], drawn["w"], strict=True)), ys[0].dtype
    products = [a.to("cuda:0").double() @ w.to("cuda:0").double().t() for a, w in pairs]
    absolute = [a.to("cuda:0").double().abs() @ w.to("cuda:0").double().abs().t() for a, w in pairs]
    exact = sum(products) + (drawn["bias"][0].to("cuda:0").double() if "bias" in drawn else 0)
    precision = max(torch.finfo(dtype).eps, 2.0**-11 if dtype == torch.float32 else 0)  # torch may multiply in tf32
    bound = precision * (sum(one.abs() for one in products) + exact.abs()) + sum(absolute) * 2.0**-14
    for y in ys:
        assert ((y.to("cuda:0").double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_data_are_close_to_float64(ranks: Ranks, dtype):
    case = case_of(FUSED, "split_m", "bias")
    drawn = case.draw(ranks, (300, 520, 1024), dtype, cases.normal)

    assert_near_float64(drawn, [y for (y,) in case.call(ranks, case.place(ranks, drawn))])


@pytest.mark.parametrize("partition", ["split_n", "tiles"])
def test_the_originals_case_ten_times_in_four_partitions_and_in_tiles(ranks: Ranks, partition):
    in_four = {} if partition == "tiles" else {"num_partitions": 4}
    case, by_rows = case_of(FUSED, partition, **in_four), case_of(FUSED, "split_m")
    drawn = case.draw(ranks, (8192, 8192, 2048), BF16, cases.normal)
    tensors = case.place(ranks, drawn)
    expected = by_rows.call(ranks, tensors)  # of graphar's matmul, as the others
    ranks.communicator.synchronize()

    for turn in range(10):
        found = case.call(ranks, tensors)
        ranks.communicator.synchronize()
        assert_bits(found, expected, turn)
    ys = [y for (y,) in found]
    assert all(same_bits(y.to("cuda:0"), ys[0]) == 0 for y in ys)
    assert_near_float64(drawn, ys)


@every_op
@every_partition
def test_a_codec_rounds_each_partition(ranks: Ranks, op, partition):
    for label in ("", "bias"):
        case = case_of(op, partition, label, codec=Codec(4, 128, "stochastic", seed=11))
        drawn = case.draw(ranks, (512, 1032, 64), BF16)
        with graphar.Communicator(devices=range(ranks.world_size)) as communicator:
            found = case.form.in_list(case.place(ranks, drawn), group=communicator)
            communicator.synchronize()
        assert_bits(found, case.form.expected(drawn), label)


@every_op
def test_several_launches_a_call_go_on_counting(ranks: Ranks, op):
    case_of(op, "tiles", epilogue="v + row * 2 - col + c[col]").check(ranks, (10000, 8192, 64), BF16)


@every_op
def test_random_products_give_the_bits_of_the_same_products_reduced(ranks: Ranks, op):
    for partition in ("split_m", "split_n", "tiles"):
        case = case_of(op, partition, epilogue=OF_MATMUL, numbers={"scale": 0.375})
        drawn = case.draw(ranks, (700, 904, 200), BF16, cases.normal)
        tensors = case.place(ranks, drawn)
        products = [matmul(a, w).to("cuda:0") for a, w in zip(tensors["a"], tensors["w"], strict=True)]
        here = case.form.arguments({name: [x.to("cuda:0") for x in xs] for name, xs in drawn.items()})
        expected = (by.allreduced if op is FUSED else by.reducescattered)(products, epilogue=here["epilogue"])

        found = case.call(ranks, tensors)

        ranks.communicator.synchronize()
        assert_bits(found, expected, partition)


@every_op
def test_tiles_are_one_kernel_whose_numbers_and_tensors_may_change(ranks: Ranks, op):
    for turn in range(4):
        case = case_of(op, "tiles", epilogue="v * s + c[col]", numbers={"s": 1.0 + turn % 2})
        replace(case, served=lambda *call: True, once=True).check(ranks, (500, 264, 136), BF16, seed=turn)
    assert ranks.grid_is_idle(KERNELS[op])


def test_sums_beside_a_multiplication_have_few_blocks_and_the_last_has_all(ranks: Ranks, monkeypatch):
    asked, engine = [], ranks.communicator.engine
    find_plan = engine.plan

    def plan(call, operands):
        if isinstance(call.work, Sum):
            asked.append((call.op, call.blocks))
        return find_plan(call, operands)

    monkeypatch.setattr(engine, "plan", plan)
    case = case_of(FUSED, "split_m", num_partitions=4)
    tensors = case.place(ranks, case.draw(ranks, (2048, 2048, 256), BF16))
    case.call(ranks, tensors)
    before = ranks.calls_of("two_shot_pipelined")

    case.call(ranks, tensors)

    assert asked == [("allreduce", blocks) for blocks in ([engine.table.beside.blocks] * 3 + [None]) * 2]
    assert ranks.calls_of("two_shot_pipelined") >= before + 3
    assert ranks.grid_is_idle("two_shot_pipelined")


@every_op
def test_tiles_are_one_kernel_wherever_it_serves(ranks: Ranks, hopper, op):
    case = replace(case_of(op, "tiles"), served=lambda shape, dtype: shape[1] % 8 == 0, once=True)
    for columns in (264, 260):
        case.check(ranks, (500, columns, 136), BF16)
    assert ranks.grid_is_idle(KERNELS[op])


@every_op
@pytest.mark.parametrize("codec", ["int8", "int2"])
def test_codes_travel_in_tiles_where_rows_are_whole_buckets(ranks: Ranks, hopper, op, codec):
    case = case_of(op, "tiles", "bias", codec=codecs.codec(codec))
    before = case.calls(ranks)
    for columns in (288, 264):  # the latter are eights, but no whole buckets
        drawn = case.draw(ranks, (500, columns, 136), BF16)
        found = case.call(ranks, case.place(ranks, drawn))
        ranks.communicator.synchronize()
        assert_bits(found, case.form.expected(drawn), columns)
    assert case.calls(ranks) == before + 1
    assert ranks.grid_is_idle(KERNELS[op])


@every_op
def test_ranks_may_differ_in_k_and_in_where_their_operands_lie(ranks: Ranks, hopper, op):
    case = case_of(op, "tiles", "bias")
    drawn, before = case.draw(ranks, (300, 264, 136), BF16), case.calls(ranks)
    tensors = case.place(ranks, drawn)
    for of in (drawn, tensors):
        of["a"][0], of["w"][0] = of["a"][0][:, 1:34], of["w"][0][:, 3:36]
        of["a"][-1], of["w"][-1] = of["a"][-1][:, :0], of["w"][-1][:, :0]
        of["bias"] = [bias.repeat_interleave(2)[::2] for bias in of["bias"]]

    found = case.call(ranks, tensors)

    ranks.communicator.synchronize()
    assert_bits(found, case.expected(drawn))
    assert case.calls(ranks) == before + 1


@every_partition
def test_nothing_is_written_beside_out(ranks: Ranks, partition):
    case = case_of(FUSED, partition)
    drawn = case.draw(ranks, (520, 264, 136), BF16)
    buffers = ranks.place([torch.full((522, 280), float("nan"), dtype=BF16)] * ranks.world_size)
    outs = [buffer[1:-1, 8:272] for buffer in buffers]

    case.call_into(ranks, case.place(ranks, drawn), outs)

    ranks.communicator.synchronize()
    assert_bits([(out,) for out in outs], case.expected(drawn))
    for buffer, out in zip(buffers, outs, strict=True):
        out.fill_(float("nan"))
        assert buffer.isnan().all()


def test_a_symmetric_tensor_takes_the_result(fresh_ranks: Ranks):
    outs = fresh_ranks.communicator.empty(1024, 1024, dtype=BF16)
    for partition in PARTITIONS:
        case = case_of(FUSED, partition)
        drawn = case.draw(fresh_ranks, (1024, 1024, 64), BF16)
        case.call_into(fresh_ranks, case.place(fresh_ranks, drawn), outs)
        fresh_ranks.communicator.synchronize()
        assert_bits([(out,) for out in outs], case.expected(drawn), partition)


def test_the_next_input_may_be_written_right_after_the_call(ranks: Ranks):
    case = case_of(FUSED, "split_m")
    drawn = case.draw(ranks, (2048, 1024, 512), BF16)
    expected, tensors = case.expected(drawn), case.place(ranks, drawn)
    tensors = {name: [x.clone() for x in xs] for name, xs in tensors.items()}  # the first may be those drawn
    for rank in range(ranks.world_size):
        torch.cuda.synchronize(rank)

    found = case.call(ranks, tensors)
    for x in (*tensors["a"], *tensors["w"]):
        x.zero_()

    assert_bits(found, expected)


@pytest.mark.gpu(2, shared=True)
@on_ranks(2, by=run_on_gpus)
def test_a_compiled_layer_gives_the_eager_bits(rank, world_size):
    a, w = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in ((256, 64), (512, 64)))

    def layer(a, w):
        return graphar.fused_matmul_allreduce(a, w, epilogue=lambda v: torch.relu(v) * 2, partition="tiles")

    y, (x, weight) = layer(a, w), (one.clone().requires_grad_() for one in (a, w))
    graphar.fused_matmul_allreduce(x, weight, epilogue="v * 2").float().sum().backward()
    found = [
        same_bits(x.grad, torch.full_like(y, 2.0) @ w),
        same_bits(torch.compile(layer, fullgraph=True)(a, w), y),
        same_bits(torch.compile(layer, mode="reduce-overhead")(a, w), y),
    ]
    assert found == [0, 0, 0]
