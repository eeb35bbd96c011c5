"""Graphs and made-up ranks for tests of Inductor's pass."""

import json
import operator
from dataclasses import asdict, replace

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from graphar.graph.places import Place
from graphar.ops.register import op_of
from graphar.plan.algorithms import MATMUL_ARCH
from graphar.plan.tables import shipped_table

torch_ops = torch.ops._c10d_functional
RANKS, EPS = 4, 1e-5
DEFAULT = shipped_table("default")
# As if all sizes had been measured to be faster.
PAYS = replace(
    DEFAULT,
    matmul=replace(
        DEFAULT.matmul,
        tiles_from_numel=dict.fromkeys(range(2, 9), 1),
        skinny_from_columns=dict.fromkeys(range(2, 9), 1),
    ),
    allgather_matmul=replace(DEFAULT.allgather_matmul, tiles_from_rows=dict.fromkeys(range(2, 9), 1)),
)


def places_of(ranks, **changes):
    """The places of ranks with one GPU each, on one host with peer access. The last rank's has ``changes``."""
    gpus = [f"gpu {rank}" for rank in range(ranks)]
    known = [Place("a host", gpu, [other for other in gpus if other != gpu], "", arch=MATMUL_ARCH) for gpu in gpus]
    return [*known[:-1], replace(known[-1], **changes)]


class Meeting:
    """Stands in for a rendezvous of ranks at these places."""

    def __init__(self, places):
        self.words = [json.dumps({"place": asdict(place), "table": ""}).encode() for place in places]

    def exchange(self, what, payload):
        return self.words


class Drawing:
    """Builds a graph with one input. Its nodes hold fake tensors."""

    def __init__(self, *shape, dtype=torch.bfloat16, device="cuda"):
        self.graph, self.mode = Graph(), FakeTensorMode()
        self.x = self.graph.placeholder("x")
        with self.mode:
            self.x.meta["val"] = torch.empty(shape, dtype=dtype, device=device)

    def add(self, op, *args):
        node = self.graph.call_function(op.default, args)
        values = torch.utils._pytree.tree_map_only(torch.fx.Node, lambda one: one.meta["val"], args)
        with self.mode:
            node.meta["val"] = op.default(*values)
        return node

    def item(self, node, i):
        taken = self.graph.call_function(operator.getitem, (node, i))
        taken.meta["val"] = node.meta["val"][i]
        return taken

    def wait(self, node):
        return self.add(torch_ops.wait_tensor, node)

    def calls(self):
        return [node.target for node in self.graph.nodes if node.op == "call_function"]

    def end(self, *results):
        self.graph.output(results)
        return self


def summed(x, reduction="sum"):
    return torch_ops.wait_tensor(torch_ops.all_reduce(x, reduction, "0"))


def scattered(x, world_size=RANKS, reduction="sum"):
    return torch_ops.wait_tensor(torch_ops.reduce_scatter_tensor(x, reduction, world_size, "0"))


class Traced:
    """The graph of a function as Inductor's pass gets it. ``dtype`` is that of all tensors, or a list of each one's."""

    def __init__(self, function, *shapes, dtype=torch.bfloat16, device="cpu"):
        from torch._inductor.decomposition import select_decomp_table

        dtypes = dtype if isinstance(dtype, list) else [dtype] * len(shapes)
        with FakeTensorMode():
            values = [torch.empty(shape, dtype=one, device=device) for shape, one in zip(shapes, dtypes, strict=True)]
            decomposed = make_fx(function, decomposition_table=select_decomp_table())(*values)
            self.graph = make_fx(torch.func.functionalize(decomposed))(*values).graph
        self.graph.eliminate_dead_code()

    calls = Drawing.calls


def given(node):
    """The arguments of a call of one of graphar's ops, by name."""
    return op_of(node.target).read(node.args)


def inputs_of(graph):
    return graph.find_nodes(op="placeholder")


def fused_in(graph):
    """The only node of a graph with one of graphar's ops."""
    (node,) = [one for one in graph.nodes if op_of(one.target)]
    return node


def rewritten(compile_pass, drawing):
    compile_pass(drawing.graph)
    drawing.graph.lint()
    return drawing


def of_matmul(report):
    return [entry for entry in report.entries if entry.rewrite == "matmul"]


def gathered(x, dim=0):
    """The tensors of all ranks, joined along a dimension, as torch.distributed's functional collectives write it."""
    whole = torch_ops.wait_tensor(torch_ops.all_gather_into_tensor(x, RANKS, "0"))
    return torch.cat(whole.chunk(RANKS), dim) if dim else whole


def torchs(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def llamas(x, weight):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def gemmas(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * (1.0 + weight.float())).type_as(x)


NORMS = {"torch's": torchs, "Llama's": llamas, "Gemma's": gemmas}
