"""Graphs and made-up ranks for tests of Inductor's pass."""

from __future__ import annotations

import json
import operator
from dataclasses import asdict, replace

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from graphar.graph.places import Place
from graphar.ops.register import op_of
from graphar.plan.algorithms import MATMUL_ARCH

torch_ops = torch.ops._c10d_functional
RANKS = 4


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


def given(node):
    """The arguments of a call of one of graphar's ops, by name."""
    return op_of(node.target).read(node.args)


def rewritten(compile_pass, drawing):
    compile_pass(drawing.graph)
    drawing.graph.lint()
    return drawing
