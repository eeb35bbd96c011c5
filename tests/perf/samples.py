"""Rows and reports that tests of perf share."""

from __future__ import annotations

from dataclasses import replace

from graphar.numerics.codecs import codec
from perf.fusion import FusionRow
from perf.harness.cases import Case, make_row
from perf.harness.links import utilisation
from perf.host_calls import SHARED, HostRow
from perf.models.generation import GenerationRow
from perf.models.sequence import SequenceRow
from perf.passes import BOTH
from perf.products import ProductRow
from perf.topics.allreduce import AllReduce
from perf.topics.alltoall import AllToAll, AllToAllRow
from perf.topics.beside import METHODS as BESIDE_METHODS
from perf.topics.beside import BesideRow, MatmulsBeside
from perf.topics.compile import Compile, Compiled
from perf.topics.convergence import Convergence
from perf.topics.fp8 import METHODS as SCALED_METHODS
from perf.topics.fp8 import Scaled
from perf.topics.fsdp import Fsdp, FsdpRow
from perf.topics.fused import Fused
from perf.topics.fused_fp8 import FusedFp8, FusedFp8Row
from perf.topics.gathered import Gathered
from perf.topics.host import Host
from perf.topics.latency import Latency, LatencyRow
from perf.topics.leaves import METHODS as LEAF_METHODS
from perf.topics.leaves import Leaves
from perf.topics.losses import Losses, LossRow
from perf.topics.lossless import Lossless, LosslessRow
from perf.topics.matmul import TORCH, Matmul, MatmulRow
from perf.topics.model import Model, ModelRow
from perf.topics.norm_gradients import BACKWARD, NormGradientRow, NormGradients, least_nbytes
from perf.topics.norms import NormRow, Norms
from perf.topics.quantized import ErrorRow, Quantized
from perf.topics.slow_links import SlowLinks, SlowRow
from perf.topics.suspend import Suspend, SuspendRow
from perf.topics.throughput import Reduction, Throughput, ThroughputRow
from perf.topics.training import Outcome, Run, Training, TrainingRow

MACHINE = {
    "gpu": "NVIDIA H200",
    "gpu_count": 4,
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "nccl": "2.28.9",
    "cpu": "a CPU",
    "cpu_count": 64,
    "commit": "0123456789ab",
    "date": "2026-01-31",
    "nvrtc": "13.0.88",
}
CPU = MACHINE | dict.fromkeys(("gpu", "driver", "nccl"), None) | {"gpu_count": 0}


def row(method="graphar", time_us=10.0, wrong=0, nbytes=2048, mode="graph", dtype="bfloat16", **more):
    """A row of an all-reduce between 4 ranks."""
    case = Case(world_size=4, form="process", mode=mode, dtype=dtype, nbytes=nbytes)
    algorithm = "one_shot_push" if method == "graphar" else None
    return make_row(case, method, [time_us], wrong, algorithm=algorithm, **more)


def spread(median, last="p99"):
    """A time whose repeats are all alike."""
    return {"median": median, "p10": median, last: median}


def fused_row(method, time_us, wrong=0, m=4096):
    return FusionRow(method, 4, m, 8192, 2048, spread(time_us), wrong)


def fused_fp8_row(method, time_us, wrong=0, m=4096, scales="rows"):
    return FusedFp8Row(method, 4, m, 8192, 2048, spread(time_us), wrong, scales)


def gathered_row(method, time_us, wrong=0, m=4096):
    return FusionRow(method, 4, m, 2560, 8192, spread(time_us), wrong)


def norm_row(method, tokens, time_us, wrong=0):
    return NormRow(method, 4, tokens, 8192, spread(time_us, "p90"), wrong)


def norm_gradient_row(method, time_us, passes=BACKWARD, shape=(4096, 8192), summed=True, **more):
    """A row on a GPU whose memory moves 4000 GB/s."""
    nbytes = least_nbytes(passes, shape, summed)
    peak_nbytes = 192 << 20 if passes == BOTH else None
    time = spread(time_us, "p90")
    row = NormGradientRow(method, passes, time, nbytes, nbytes / 4e6, peak_nbytes, 0, *shape, summed)
    return replace(row, **more)


def loss_row(method, time_us, passes="forward and backward", **more):
    """A row of 4096 x 32064 logits, whose bytes take 60 us for each time that they are read or written."""
    peak_nbytes, times = (None, 1) if passes == "forward" else (256 << 20, 3)
    nbytes = times * 4096 * 32064 * 2
    time = spread(time_us, "p90")
    row = LossRow(method, passes, time, nbytes, 60.0 * times, peak_nbytes, 0, 4096, 32064, 1)
    return replace(row, **more)


def model_row(method, time_us, error=0.01, wrong=0):
    return ModelRow(method, "llama-3-70b", 4, 4, "decode", 8, 1024, spread(time_us), error, wrong)


def generation_row(method, time_us, error=0.01, wrong=0):
    return GenerationRow(method, "llama-3-8b", 4, 8, 16, 64, spread(time_us), error, 60, 50, wrong)


def fsdp_row(method, step_ms, **more):
    """A row of Llama 3 8B between 4 ranks."""
    row = FsdpRow(method, "llama-3-8b", 32, 8_030_261_248, 4, 2048, "bf16", None, [], step_ms, [11.5, 11.0], "0123")
    return replace(row, **more)


def host_row(op, time_us, ratio, option="", limit=1.5, outputs=1, wrong=0, **more):
    """A row between 2 ranks that share a GPU."""
    time_us = spread(time_us, "p90")
    return replace(HostRow("graphar", op, option, outputs, SHARED, 2, time_us, ratio, limit, wrong), **more)


def sequence_row(method, time_us, gradient_error=0.02, wrong=0):
    phase = "prefill" if gradient_error is None else "training"
    return SequenceRow(method, "llama-3-70b", 4, 4, phase, 8192, spread(time_us), 0.01, gradient_error, wrong)


def matmul_row(method, time_us, shape=(4096, 8192, 2048), is_taken=False, is_auto=False, wrong=0):
    """A row on a GPU of 132 SMs."""
    return MatmulRow(method, *shape, spread(time_us, "p90"), wrong, is_taken, is_auto, 132)


def product_row(method, median, shape=(64, 8192, 7168), wrong=0):
    return ProductRow(method, *shape, spread(median, "p90"), wrong)


def latency_row(time_us=10.0, size="2 KB", wrong=0, before_us=None):
    """A row of an all-reduce between 4 ranks that share a GPU."""
    how = "one_shot_push", "3 x 64", 1.0, 200
    return LatencyRow("graphar", "all-reduce", size, 4, *how, spread(time_us, "p90"), wrong, before_us)


def suspend_row(**more):
    """A row of decoding between 2 ranks, which hold 32 MB and suspend in 2 ms."""
    row = SuspendRow(
        world_size=2,
        size="llama-3-70b",
        layers=4,
        phase="decode",
        tokens=8,
        cycles=11,
        scratch={"allreduce_rmsnorm_one_shot": 16 << 20, "one_shot_push": 16 << 20},
        symmetric_nbytes=0,
        freed_nbytes=32 << 20,
        grown_nbytes=0,
        suspend_us=spread(2000.0, "p90"),
        first_suspend_us=5000.0,
        resume_us=spread(3000.0, "p90"),
        first_resume_us=6000.0,
        before_us=spread(1000.0),
        after_us=spread(1010.0),
        wrong=0,
    )
    return replace(row, **more)


OUTCOME = Outcome(0.5, 0.9, 0.6, 0.8, 1.0, 4.0, 1000, True)
TRAINED = [
    TrainingRow("bytes", "0123456789ab", "graphar", 2, 64, 1.5, Run("graphar", *kind, 3, 30), OUTCOME)
    for kind in ((None, False), (codec("int4"), True))
]
REDUCTIONS = [*map(Reduction, ("alone", "one by one", "gloo", "graphar")), Reduction("graphar", "int4")]
# Counters that nobody has read: link n of 18 sends at 60 % and 2 n % of its rate.
NVLINK = utilisation(([0] * 18,) * 2, ([60 + 2 * link for link in range(18)],) * 2, 1000, 1.0, 1.8)


def slow_row(method, time_ms, case="32 MB", wrong=0, samples=0, loss=None):
    """A row of a sum or a step between two hosts at 1 Gbit/s."""
    return SlowRow(method, 2, "1gbit", case, samples, spread(time_ms * 1e3), wrong, loss)


REPORTS = [
    AllReduce({4: 355.0}, [replace(row(), nvlink=NVLINK), row("nccl", 20.0)], skipped=["vllm: no such package"]),
    Quantized([ErrorRow("int4", "normal", 4, 4.5, 0.1, 0.2, 0.99)], [row(), row("nccl", 20.0)]),
    Lossless([LosslessRow("normal", 4, 16 << 20, 12.06, 75.0, 60.0)], skipped=["gradients: the run was ended"]),
    Norms([norm_row("graphar", 1, 4.0), norm_row("nccl + norm", 1, 12.0)]),
    NormGradients(
        [norm_gradient_row(method, 200.0, passes) for passes in (BACKWARD, BOTH) for method in ("graphar", "torch")],
        skipped=["torch.compile: no compiler"],
    ),
    Matmul(
        [
            matmul_row(TORCH, 200.0),
            matmul_row("graphar:128x128x6c2", 210.0),
            matmul_row("graphar:128x256x4c2", 205.0, is_taken=True, is_auto=True),
        ],
        skipped=["4 x 4 x 4: misaligned"],
    ),
    Leaves([product_row(method, 200.0) for method in LEAF_METHODS], skipped=["4 x 4 x 4: misaligned"]),
    Scaled([product_row(method, 200.0) for method in SCALED_METHODS], skipped=["4 x 4 x 4: misaligned"]),
    Fused([fused_row("graphar", 400.0), fused_row("matmul+nccl", 500.0)]),
    FusedFp8([fused_fp8_row("graphar", 400.0), fused_fp8_row("scaled_mm+nccl", 500.0)]),
    Gathered([gathered_row("graphar", 400.0), gathered_row("nccl+matmul", 500.0)]),
    Model(
        [model_row("alone", 200.0, None), model_row("nccl", 400.0), model_row("graphar", 300.0)],
        [generation_row("unsharded", 100.0, None), generation_row("nccl", 200.0), generation_row("graphar", 150.0)],
        [sequence_row("nccl", 900.0), sequence_row("graphar sequence-parallel", 800.0)],
    ),
    Training(TRAINED, skipped=["digits: the run was ended"]),
    Throughput(
        [ThroughputRow("resnet50", "img", 1000, 10, 2, 32, 64, way, 20, 1.5, 0.5, True) for way in REDUCTIONS],
        skipped=["vit: no torchvision"],
    ),
    Fsdp([fsdp_row("nccl", 400.0), fsdp_row("graphar", 390.0), fsdp_row("graphar lossless", 380.0)]),
    Host([host_row("allreduce", 12.0, 1.0), host_row("allgather", 15.0, 1.25, "sizes=")], skipped=["nccl: refused"]),
    Suspend([suspend_row()], skipped=["2 ranks, decode of 8 tokens: no driver"]),
    AllToAll([AllToAllRow(method, "rows", 4, 2048, spread(6.0), 0) for method in ("graphar", "nccl")]),
    Latency("0123456789ab, 2026-01-31", [latency_row(before_us=11.0)], skipped=["2 ranks: no room"]),
    MatmulsBeside(
        [
            BesideRow(method, "allgather", 2, 64, "4096x8192x8192", of_alone, 500.0, 1.5, 0, False)
            for method, of_alone in zip(BESIDE_METHODS, (1.17, 1.16, 1.02), strict=True)
        ]
    ),
    SlowLinks([slow_row("gloo", 400.0), slow_row("int4", 100.0)], skipped=["slow links: needs tc"]),
    Convergence([row for row in TRAINED if row.backend == "graphar"], skipped=["text: the run was ended"]),
    Compile("13.0", 1.5, [Compiled("all/one_shot.cu", "one_shot<bf16, 2>", "sm_90a", 0.5, 1000, 32, 0, 0)]),
    Losses([loss_row("graphar", 80.0), loss_row("torch", 160.0)], skipped=["liger: no package"]),
]
