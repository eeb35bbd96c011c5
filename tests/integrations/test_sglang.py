"""The plugin in SGLang itself, on the CPU: its loader of plugins, its registry of hooks and its groups of ranks."""

import ast
import importlib.util
import os
from pathlib import Path

import pytest
import torch

from graphar import reference
from graphar.integrations.sglang import WEIGHT_UPDATER
from tests.processes import on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed: nox -s sglang"
)

FLOATS, INTEGERS = torch.bfloat16, torch.int64


def of_rank(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(4 * 6).reshape(4, 6) * (rank + 1)).to(dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "asked", "by_graphar"),
    [
        ("tp", FLOATS, "1", ["allgather", "allreduce", "reducescatter"]),
        ("attention_tp", FLOATS, "1", ["allgather", "allreduce", "reducescatter"]),
        ("tp", INTEGERS, "1", []),
        ("pp", FLOATS, "1", None),
        ("tp", FLOATS, "0", None),
    ],
)
@on_ranks(2, timeout_s=240.0)
def test_a_groups_calls_are_graphars_or_sglangs_own(rank, world_size, name, dtype, asked, by_graphar):
    os.environ |= {"GRAPHAR_SGLANG": asked, "SGLANG_USE_CPU_ENGINE": "1", "LOCAL_SIZE": str(world_size)}
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed import parallel_state

    ranks, needs_gpu = list(range(world_size)), ("pynccl", "custom_allreduce", "mscclpp", "torch_symm_mem_allreduce")
    without = {f"use_{name}": False for name in needs_gpu}
    group = parallel_state.init_model_parallel_group([ranks], rank, "gloo", group_name=name, **without)
    used = getattr(group, "graphar", None)
    x = of_rank(rank, dtype)
    in_place, part, whole = x.clone(), x.new_empty(2, 6), x.new_empty(8, 6)
    group._all_reduce_in_place(in_place)  # what SGLang's op of a compiled call runs
    group.reduce_scatter_tensor(part, x)
    group.all_gather_into_tensor(whole, x)
    sums = [group.all_reduce(x.clone()), in_place, group._all_reduce_out_place(x, "auto")]
    made = sorted(call.op for call in used.engine.plans) if used else None
    group.destroy()
    xs = [of_rank(rank, dtype) for rank in range(2)]
    total = reference.allreduce(xs)
    assert made == by_graphar
    assert all(torch.equal(one, total) for one in sums)
    assert torch.equal(part, total.chunk(2)[rank])
    assert torch.equal(whole, torch.cat(xs))
    assert used is None or used.closed


def test_sglang_has_the_methods_that_release_and_resume_memory():
    """The source is read, not imported: it needs all that a server needs."""
    module, _, name = WEIGHT_UPDATER.rpartition(".")
    path = Path(importlib.util.find_spec("sglang").submodule_search_locations[0], *module.split(".")[1:])
    (found,) = (one for one in ast.parse(path.with_suffix(".py").read_text()).body if getattr(one, "name", "") == name)

    methods = {one.name: [each.arg for each in one.args.args] for one in found.body if isinstance(one, ast.FunctionDef)}
    for method in ("release_memory_occupation", "resume_memory_occupation"):
        assert methods[method] == ["self", "recv_req"]
