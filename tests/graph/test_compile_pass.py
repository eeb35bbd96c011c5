"""The Inductor pass on graphs written by hand, between ranks that are made up: what it writes, and what it leaves."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.graph import places
from graphar.ops import allgather, sums
from graphar.plan.scratch import MAX_RANKS
from tests.graph.graphs import RANKS, Drawing, given, rewritten

torch_ops, ops = torch.ops._c10d_functional, torch.ops.graphar


@pytest.fixture(scope="module", autouse=True)
def inductor():
    """Inductor's configuration, imported before any test is timed."""
    return importlib.import_module("torch._inductor.config")


def drawn(op, *args, shape=(8, 6), **kinds):
    """x -> op -> wait_tensor -> relu."""
    drawing = Drawing(*shape, **kinds)
    return drawing.end(drawing.add(torch.ops.aten.relu, drawing.wait(drawing.add(op, drawing.x, *args))))


COLLECTIVES = {
    "allreduce": (torch_ops.all_reduce, ("sum", "0"), sums.SUM.arguments()),
    "reducescatter": (
        torch_ops.reduce_scatter_tensor,
        ("sum", RANKS, "0"),
        sums.SCATTER.arguments(rank=0, axis=0, sizes=[2] * RANKS),
    ),
    "allgather": (
        torch_ops.all_gather_into_tensor,
        (RANKS, "0"),
        allgather.OP.arguments(rank=0, axis=0, sizes=[8] * RANKS),
    ),
}
every_rewrite = pytest.mark.parametrize("name", COLLECTIVES)


@every_rewrite
def test_a_collective_and_its_wait_become_one_call(make_pass, name):
    op, args, call = COLLECTIVES[name]

    drawing = rewritten(make_pass(), drawn(op, *args))

    assert drawing.calls() == [getattr(ops, name).default, torch.ops.aten.relu.default]
    x, mine, relu, _ = drawing.graph.nodes
    assert mine.args == (x, *call)
    assert relu.args == (mine,)
    assert mine.meta["val"].shape == mine.target(*[x.meta["val"], *call]).shape


@every_rewrite
def test_what_is_turned_off_stays(make_pass, name):
    op, args, _ = COLLECTIVES[name]
    compile_pass = make_pass(off=[name])

    drawing = rewritten(compile_pass, drawn(op, *args))

    assert drawing.calls() == [op.default, torch_ops.wait_tensor.default, torch.ops.aten.relu.default]
    assert [entry.why_left for entry in compile_pass.report.entries] == ["turned off"]


def test_a_rewrite_that_does_not_exist_cannot_be_turned_off(make_pass):
    with pytest.raises(ValueError, match=r"off must name rewrites, of norm, .* got \['all_reduce'\]"):
        make_pass(off="all_reduce")


def test_a_subgroup_is_called_by_its_name(make_pass):
    compile_pass = make_pass()
    name = dist.new_group([0, 2]).group_name

    drawing = rewritten(compile_pass, drawn(torch_ops.all_gather_into_tensor, 2, name))

    call = allgather.OP.arguments(communicator=name, rank=0, axis=0, sizes=[8, 8])
    assert list(drawing.graph.nodes)[1].args[1:] == call


def test_coalesced_collectives_become_a_call_for_each_tensor(make_pass):
    drawing = Drawing(8, 6)
    y = drawing.add(torch.ops.aten.relu, drawing.x)
    both = drawing.add(torch_ops.all_reduce_coalesced, [drawing.x, y], "sum", "0")
    drawing.end(*[drawing.wait(drawing.item(both, i)) for i in (0, 1, 1)])

    rewritten(make_pass(), drawing)

    _, _, first, second, output = drawing.graph.nodes
    assert [first.target, second.target] == [ops.allreduce.default] * 2
    assert (first.args[0], second.args[0]) == (drawing.x, y)
    assert [given(one)["after"] for one in (first, second)] == [[], [first]]
    assert output.args[0] == (first, second, second)


def test_a_result_that_nobody_uses_is_waited_for_so_that_it_is_not_dropped(make_pass):
    drawing = Drawing(8, 6)
    drawing.wait(drawing.add(torch_ops.all_reduce, drawing.x, "sum", "0"))
    drawing.add(torch_ops.all_reduce_coalesced, [drawing.x], "sum", "0")
    drawing.end(drawing.x)

    rewritten(make_pass(), drawing)

    assert drawing.calls() == [ops.allreduce.default, torch_ops.wait_tensor.default] * 2
    _, _, wait, second, *_ = drawing.graph.nodes
    assert given(second)["after"] == [wait]


def test_only_a_call_that_does_not_need_the_one_before_it_is_tied_to_it(make_pass):
    drawing = Drawing(8, 6)
    first = drawing.wait(drawing.add(torch_ops.all_reduce, drawing.x, "sum", "0"))
    second = drawing.wait(drawing.add(torch_ops.all_reduce, drawing.add(torch.ops.aten.relu, first), "sum", "0"))
    third = drawing.wait(drawing.add(torch_ops.all_reduce, drawing.add(torch.ops.aten.relu, first), "sum", "0"))
    drawing.end(second, third)

    rewritten(make_pass(), drawing)

    reduced = [node for node in drawing.graph.nodes if "allreduce" in node.name]
    assert [node.target for node in reduced] == [ops.allreduce.default] * 3
    assert [given(node)["after"] for node in reduced] == [[], [], [reduced[1]]]


def test_a_models_own_calls_of_graphar_are_kept_in_their_order_too(make_pass):
    drawing = Drawing(8, 6)
    first = drawing.add(ops.allreduce, drawing.x, *sums.SUM.arguments())
    second = drawing.add(ops.allreduce, drawing.x, *sums.SUM.arguments(codec="int8"))
    drawing.end(first, second)

    rewritten(make_pass(), drawing)

    assert drawing.calls() == [ops.allreduce.default] * 2
    assert given(second) == sums.SUM.read((drawing.x, *sums.SUM.arguments(codec="int8", after=[first])))


all_reduce = torch_ops.all_reduce


def total(reduction="sum", group="0", **kinds):
    return lambda: drawn(all_reduce, reduction, group, **kinds)


NO_AXIS = "graphar joins tensors along an axis, and this one has none"
TOO_MANY = f"kernels serve at most {MAX_RANKS} ranks, not {MAX_RANKS + 1}"
LEFT = {  # by reason: the graph, and where the ranks are
    "graphar has sums, not max": (total("max"), {}),
    "graphar has sums, not avg": (total("avg"), {}),
    "no kernel adds torch.int64": (total(dtype=torch.int64), {}),
    "no kernel adds torch.bool": (total(dtype=torch.bool, device="cpu"), {}),
    "this process knows no group '7'": (total(group="7"), {}),
    NO_AXIS: (lambda: drawn(torch_ops.all_gather_into_tensor, RANKS, "0", shape=()), {}),
    "one rank has nothing to exchange": (total(), {"ranks": 1}),
    TOO_MANY: (total(), {"ranks": MAX_RANKS + 1}),
    "the ranks are on 2 hosts": (total(), {"host": "another host"}),
    "rank 3 sees no peer access to the GPU of rank 1": (total(), {"reaches": ["gpu 0", "gpu 2"]}),
    "rank 3: no NVRTC": (total(), {"problem": "no NVRTC"}),
    "graphar has no kernels for xpu": (total(device="xpu"), {}),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_graphar_does_not_serve_stays_and_the_report_says_why(make_pass, why):
    draw, where = LEFT[why]
    compile_pass, drawing = make_pass(**where), draw()
    before = drawing.calls()

    rewritten(compile_pass, drawing)

    assert drawing.calls() == before
    assert [entry.why_left for entry in compile_pass.report.entries] == [why]


@pytest.mark.parametrize(("may_share", "reaches"), [(False, []), (True, ["7"])])
def test_a_gpu_reaches_itself_only_if_ranks_may_share_it(monkeypatch, may_share, reaches):
    gpu = SimpleNamespace(uuid="7", multi_processor_count=132)
    monkeypatch.setattr(places, "device_of_process", lambda group: torch.device("cuda", 0))
    monkeypatch.setattr(places, "missing_software", lambda: "no NVRTC")
    monkeypatch.setattr(places, "may_share_gpu", lambda: may_share)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)

    assert places._find_place(None).reaches == reaches


def test_as_many_ranks_as_kernels_serve_are_served(make_pass):
    drawing = rewritten(make_pass(MAX_RANKS), drawn(all_reduce, "sum", "0"))

    assert ops.allreduce.default in drawing.calls()


def test_on_the_cpu_hosts_and_kernels_do_not_matter(make_pass):
    compile_pass = make_pass(ranks=9, host="another host", problem="no NVRTC", reaches=[])

    rewritten(compile_pass, drawn(all_reduce, "sum", "0", device="cpu", dtype=torch.int64))

    assert len(compile_pass.report.rewritten) == 1


def test_a_group_made_after_the_default_group_was_is_left(make_pass, group_of):
    compile_pass = make_pass(2)
    dist.destroy_process_group()
    group_of(3)

    rewritten(compile_pass, drawn(all_reduce, "sum", "0"))

    assert compile_pass.report.left[0].why_left == "the group was made after another default group"


def test_a_report_has_a_line_for_each_tensor(make_pass):
    compile_pass = make_pass(off=["allgather"])
    rewritten(compile_pass, drawn(all_reduce, "sum", "0"))
    rewritten(compile_pass, drawn(torch_ops.all_gather_into_tensor, RANKS, "0", dtype=torch.int8, device="cpu"))

    assert str(compile_pass.report).splitlines() == [
        "2 graphs: 1 collective became graphar's, 1 stayed torch's, 0 fusions refused",
        "graph 0: all_reduce(sum) of [8, 6] bfloat16 on cuda in group '0': graphar::allreduce",
        "graph 1: all_gather_into_tensor of [8, 6] int8 on cpu in group '0': left: turned off",
    ]


def test_a_report_without_graphs_or_collectives_says_what_to_do(make_pass):
    compile_pass = make_pass()
    assert str(compile_pass.report).startswith("0 graphs: nothing was compiled since the pass was installed")
    assert "graphar.enable() before the first call" in str(compile_pass.report)
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    compile_pass(graph)

    first, second = str(compile_pass.report).splitlines()

    assert first.startswith("1 graph: 0 collectives became graphar's")
    assert "torch.compile traces no call with async_op=True" in second


def test_the_key_of_the_cache_changes_with_options_and_places_and_with_nothing_else(make_pass):
    def key(**how):
        found = make_pass(**how).uuid()
        dist.destroy_process_group()
        return found

    options = ({"off": ["allgather"]}, {"off": ["allreduce"]}, {"constant_weights": True}, {"on": ["epilogue"]})
    options += ({"batch_invariant": True}, {"tp_invariant": True}, {"tp_invariant": True, "on": ["norm"]})
    keys = [key(), *(key(**one) for one in options), key(ranks=2), key(host="another host"), key(arch="sm_80")]
    again = key()
    make_pass()

    assert again == keys[0]
    assert len(set(keys)) == len(keys)


def test_the_key_of_the_cache_knows_the_groups(make_pass):
    compile_pass = make_pass()
    before = compile_pass.uuid()
    dist.new_group([0, 1])

    assert compile_pass.uuid() != before


@pytest.fixture
def installed(inductor, make_pass):
    """The passes that Inductor would run. Restores the configuration afterwards."""
    with inductor.patch(post_grad_custom_pre_pass=None):
        make_pass()
        yield lambda: inductor.post_grad_custom_pre_pass


def test_enable_puts_a_pass_into_inductor_and_disable_takes_it_out(installed):
    made = graphar.enable(off=["allgather"])

    assert installed() is made
    assert made.off == {"allgather"}
    graphar.disable()
    assert installed() is None


def test_a_block_ends_with_what_was_there_before_it(installed):
    with graphar.enable() as outer:
        with graphar.enable(off=["allreduce"]) as inner:
            assert installed() is inner
        assert installed() is outer
    assert installed() is None


def test_disable_ends_nested_blocks_too(installed):
    with graphar.enable(), graphar.enable():
        graphar.disable()
        assert installed() is None
    assert installed() is None


def other_pass(graph_pass, seen, name, key):
    class Other(graph_pass):
        def __call__(self, graph, *is_inference):
            seen.append((name, *is_inference))

        def uuid(self):
            return key

    return Other()


@pytest.mark.parametrize("as_list", [False, True])
def test_passes_of_others_stay_and_run_first(installed, inductor, as_list):
    kinds = importlib.import_module("torch._inductor.custom_graph_pass")
    seen = []
    theirs = other_pass(kinds.CustomGraphPass, seen, "theirs", "key")
    inductor.post_grad_custom_pre_pass = [theirs] if as_list else theirs

    with graphar.enable() as mine:
        chain = installed()
        drawing = drawn(all_reduce, "sum", "0")
        chain(drawing.graph)
        assert seen == [("theirs",)]
        assert mine.report.graphs == 1
        assert chain.uuid() == ["key", mine.uuid()]

    assert installed() is theirs


def test_a_pass_that_asks_for_it_is_told_whether_the_graph_is_for_inference(installed, inductor):
    kinds = importlib.import_module("torch._inductor.custom_graph_pass")
    if not hasattr(kinds, "CustomInferenceAwareGraphPass"):
        pytest.skip("this torch has no such passes")
    seen = []
    inductor.post_grad_custom_pre_pass = other_pass(kinds.CustomInferenceAwareGraphPass, seen, "theirs", "key")

    with graphar.enable():
        installed()(drawn(all_reduce, "sum", "0").graph, is_inference=True)

    assert seen == [("theirs", True)]


def test_beside_a_pass_without_a_key_nothing_is_cached(installed, inductor):
    inductor.post_grad_custom_pre_pass = lambda graph: None

    with graphar.enable():
        assert installed().uuid() is None


def test_without_enable_a_traced_op_installs_a_pass_behind_those_of_others(installed, inductor):
    passes = importlib.import_module("graphar.graph.passes")
    inductor.post_grad_custom_pre_pass = theirs = lambda graph: None

    for rows in (2, 3):
        trace_only = torch.compile(graphar.allgather, backend=lambda graph, given: lambda *_: (given[0],))
        trace_only(torch.ones(rows, 3))

    first, second = installed().passes
    assert first is theirs
    assert isinstance(second, passes.OrderPass)


def test_the_pass_for_the_order_goes_where_enable_brings_its_own(installed):
    passes = importlib.import_module("graphar.graph.passes")
    passes.keep_order()

    with graphar.enable() as mine:
        passes.keep_order()
        assert installed() is mine


def test_without_a_process_group_there_is_nothing_to_enable():
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        graphar.enable()
