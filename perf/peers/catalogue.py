"""Makes methods by name: graphar's own methods and the peers that this machine can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import graphar
from graphar.numerics import codecs
from graphar.plan.algorithms import with_kernels
from graphar.plan.call import Call, Operands
from graphar.plan.work import Sum
from graphar.runtime.bind.collective import bind_kernel
from graphar.runtime.registry import engine_of_group
from perf.harness.cases import Plan
from perf.harness.ranks import Data, Ranks, agreed
from perf.peers import flashinfer, sglang, torch_distributed
from perf.peers.methods import Family, Method, Pair

CUDA_METHODS = (
    *("graphar", "graphar_out", "graphar_symmetric", "graphar_any_bits"),
    *("nccl", "nccl_window", "symm_one_shot", "symm_two_shot", "vllm", "vllm_unregistered"),
    *("flashinfer_one_shot", "flashinfer_two_shot", "flashinfer_fp8"),
    *("sglang_one_shot_push", "sglang_two_shot_push", "sglang_two_shot_pull"),
)
CPU_METHODS = ("graphar", "gloo")
LIST_METHODS = ("graphar",)  # only graphar has a list form
CODEC_METHODS = tuple(f"graphar_{name}" for name in codecs.NAMES)
# graphar with a fixed algorithm, and optionally with a fixed number of thread blocks ("@BLOCKS"). These methods are
# measured only on request.
ALGORITHMS = with_kernels("allreduce")
ALGORITHM_METHODS = tuple(f"graphar:{algorithm}" for algorithm in ALGORITHMS)
FIXED_ALGORITHM = "graphar:ALGORITHM[@BLOCKS]"


def why_no_method(name: str) -> str:
    """Returns why ``name`` is not a method on any machine; an empty string if it is one."""
    plain = dict.fromkeys(CUDA_METHODS + CPU_METHODS)
    method, at, blocks = name.partition("@")
    if name in plain or (method in ALGORITHM_METHODS and not at):
        return ""
    if method not in ALGORITHM_METHODS:
        return (
            f"{name!r} is no method: choose from {', '.join(plain)}, and {FIXED_ALGORITHM} with {', '.join(ALGORITHMS)}"
        )
    most = graphar.Algorithm(method.removeprefix("graphar:")).row.max_blocks
    return "" if blocks.isdecimal() and 0 < int(blocks) <= most else f"{name!r}: blocks must be from 1 to {most}"


def make_methods(plan: Plan, ranks: Ranks) -> tuple[list[Method], list[str]]:
    """Returns the plan's methods in its order, and why some are missing. Allocates all memory. Collective."""
    made = {name: make_one(name) for name in plan.methods if name not in OF_A_FAMILY}
    skipped = []
    for family in FAMILIES:
        wanted = [name for name in family.names if name in plan.methods]
        methods, reason = set_up(family, plan, ranks) if wanted else ([], "")
        made |= {method.name: method for method in methods if method.name in wanted}
        if reason:
            skipped += [f"{name}, {plan.world_size} ranks: {reason}" for name in wanted]
    return [made[name] for name in plan.methods if name in made], skipped


def set_up(family: Family, plan: Plan, ranks: Ranks) -> tuple[list[Method], str]:
    """Returns a family's methods on every rank; or on every rank an empty list, and the reason."""
    if plan.world_size not in family.world_sizes:
        served = ", ".join(str(size) for size in family.world_sizes)
        return [], f"its kernels serve {served} ranks"
    _, reason = agreed(ranks, lambda: ranks.first_rank_first(partial(family.load, plan)))
    if reason:
        return [], reason
    # Every rank has loaded the package. Without it, a rank would fail in `make` while the others wait for it there.
    methods, reason = agreed(ranks, partial(family.make, plan, ranks))
    return methods or [], reason


def make_one(name: str) -> Method:
    if name == "graphar":
        return make_graphar()
    if name == "graphar_out":
        return make_graphar_with_output()
    if name in CODEC_METHODS:
        return make_quantised(name)
    if name.startswith("graphar:"):
        return make_algorithm(name)
    return torch_distributed.make_backend(name)


def make_graphar() -> Method:
    """Returns graphar as users call it: with an ordinary input, a new output, and the algorithm chosen by graphar."""
    return Method("graphar", graphar.allreduce, algorithm=explain, exact=True, refusals=())


def make_graphar_with_output() -> Method:
    """Returns graphar with an ordinary input and output that are the same in each call."""
    outs: dict[tuple[int, int], torch.Tensor] = {}

    def call(x: torch.Tensor) -> torch.Tensor:
        key = (x.data_ptr(), x.numel())
        out = outs.get(key)
        if out is None:
            outs.clear()
            out = outs[key] = torch.empty_like(x)
        return graphar.allreduce(x, out=out)

    return Method("graphar_out", call, algorithm=explain, exact=True, refusals=())


def make_quantised(name: str) -> Method:
    """Returns graphar with a named codec."""
    codec = codecs.codec(name.removeprefix("graphar_"))
    call = partial(graphar.allreduce, codec=codec)
    return Method(name, call, partial(explain, codec=codec), exact=True, quantised=True, codec=codec, refusals=())


def make_algorithm(name: str) -> Method:
    """Returns graphar with a fixed algorithm, and with a fixed number of blocks if the name has one."""
    algorithm, _, blocks = name.removeprefix("graphar:").partition("@")
    call = FixedGrid(algorithm, int(blocks)) if blocks else partial(graphar.allreduce, algorithm=algorithm)
    return Method(name, call, algorithm=lambda x: algorithm, exact=True, refusals=(graphar.UnsupportedError,))


class FixedGrid:
    """All-reduces with a fixed algorithm and a fixed number of thread blocks."""

    def __init__(self, algorithm: str, blocks: int) -> None:
        self.algorithm, self.blocks = algorithm, blocks
        self._runs: dict[tuple[int, torch.dtype], Callable] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        run = self._runs.get((x.numel(), x.dtype))
        if run is None:
            graphar.allreduce(x, algorithm=self.algorithm)  # makes the plan
            engine = engine_of_group("")
            call = Call.of(Sum(x.numel()), x, algorithm=self.algorithm)
            config = replace(engine.select(call, x).config, blocks=self.blocks)
            run = self._runs[x.numel(), x.dtype] = bind_kernel(engine, call, config).run
        out = torch.empty_like(x)
        run([Operands((x,), (out,))])
        return out


def make_symmetric(plan: Plan, ranks: Ranks) -> list[Method]:
    """Returns graphar with symmetric tensors (graphar.empty) as input and output."""
    dtype = getattr(torch, plan.dtypes[0])
    numel = plan.max_nbytes // dtype.itemsize
    pair = Pair(graphar.empty(numel, dtype=dtype), graphar.empty(numel, dtype=dtype))

    def call(x: torch.Tensor) -> torch.Tensor:
        return graphar.allreduce(x, out=pair.opposite(x))

    def explain_call(x: torch.Tensor) -> str:
        return str(graphar.explain(x, out=pair.opposite(x)).algorithm)

    refusals = (graphar.UnsupportedError,)
    return [Method("graphar_symmetric", call, algorithm=explain_call, exact=True, buffer=pair.first, refusals=refusals)]


def make_any_bits(plan: Plan, ranks: Ranks) -> list[Method]:
    """Returns graphar on random bits, at the sizes where it uses lossless compression. Collective."""
    if plan.dtypes[0] != "bfloat16":
        raise graphar.UnsupportedError("only bfloat16 is compressed without loss")
    graphar.explain(torch.empty(1, dtype=torch.bfloat16, device=ranks.device))  # finds the table
    engine = engine_of_group("")
    least = engine.table.lossless.least("allreduce", ranks.size) if engine.lossless else None
    if least is None:
        raise graphar.UnsupportedError("graphar compresses nothing without loss here")
    data = partial(any_bits, seed=ranks.rank)
    return [
        Method("graphar_any_bits", graphar.allreduce, explain, exact=True, data=data, min_nbytes=least, refusals=())
    ]


def any_bits(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns a bf16 tensor of random bits. It cannot be compressed. Its values are from 0 to 2."""
    generator = torch.Generator(like.device).manual_seed(seed)
    bits = torch.randint(1 << 15, like.shape, dtype=torch.int16, device=like.device, generator=generator)
    return bits.bitwise_and_(~0x4000).view(torch.bfloat16)


def explain(data: Data, codec: codecs.Codec | None = None) -> str:
    return str(graphar.explain(data, codec=codec).algorithm)


FAMILIES = (
    Family(("graphar_symmetric",), make_symmetric),
    Family(("graphar_any_bits",), make_any_bits),
    *torch_distributed.FAMILIES,
    *flashinfer.FAMILIES,
    *sglang.FAMILIES,
)
OF_A_FAMILY = {name for family in FAMILIES for name in family.names}
