"""Coded sums of GPUs without peer access: local kernels encode and add, torch.distributed moves the codes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import Codec, Communicator, reference
from graphar.fsdp import QuantizedReduceScatter
from graphar.numerics.codec_reference import Noise, encode, error_of_wire
from graphar.numerics.codecs import NAMES
from graphar.numerics.partitions import split
from graphar.ranks import hierarchical
from graphar.ranks.cpu import fallback
from graphar.runtime.bind.local_codec import LocalCodec
from graphar.runtime.memory.peer_memory import ProcessMemory
from tests.cases import KERNEL_DTYPES, bit_patterns, left_after_scatter, normal, parts_of, same_bits
from tests.processes import on_ranks, run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

SEED = 0x0123456789ABCDEF
CODECS = (
    *NAMES,
    Codec(4, 128, "stochastic", seed=SEED),
    Codec(8, 512, "stochastic", "minmax", torch.float32, SEED),
)
NUMELS = (1, 1025, 77_777)
CHUNK = 8 << 10  # in tests, so that there are several


def refuse(memory):
    raise graphar.UnsupportedError("cuda:0 has no peer access to cuda:1")


def wrong_calls(rank, world_size):
    """The calls whose results or errors have other bits than the reference's, what `explain` says, and launches."""
    wrong, call = [], -1
    fallback._CHUNK_NUMEL = CHUNK
    launch = mock.patch.object(LocalCodec, "_launch", autospec=True, side_effect=LocalCodec._launch)
    with mock.patch.object(ProcessMemory, "check", refuse), launch as launched, Communicator() as communicator:
        for codec in CODECS:
            for dtype in KERNEL_DTYPES:
                for numel in NUMELS:
                    xs = parts_of(normal if numel > 1025 else bit_patterns, world_size, numel, dtype)
                    y = communicator.allreduce(xs[rank].cuda(), codec=codec)
                    call += 1
                    if same_bits(y.cpu(), reference.quantized_allreduce(xs, codec, SEED, call)):
                        wrong.append((str(codec), dtype, numel))
                    y = communicator.reducescatter(xs[rank].cuda(), codec=codec)
                    call += 1
                    if same_bits(y.cpu(), reference.quantized_reducescatter(xs, codec, SEED, call)[rank]):
                        wrong.append((str(codec), dtype, numel, "scattered"))
        said = communicator.explain(xs[rank].cuda(), codec="int8").reason
        wrong += wrong_residuals(communicator, rank, world_size, call)
        unseeded = communicator.allreduce(xs[rank].cuda(), codec=Codec(3, rounding="stochastic")).cpu()
    return wrong, said, unseeded, launched.call_count


def wrong_residuals(communicator, rank, world_size, call):
    codec, numel, wrong = Codec(4, 128, "stochastic", seed=SEED), 77_777, []
    xs = parts_of(normal, world_size, numel, torch.bfloat16)
    residual = xs[rank].mul(0.25).cuda()
    for op in ("allreduce", "reducescatter"):
        value, call = (xs[rank].cuda() + residual).cpu(), call + 1
        getattr(communicator, op)(xs[rank].cuda(), codec=codec, residual=residual)
        noise, counts = Noise(SEED, call, rank), split(numel, world_size)
        left = error_of_wire(value, encode(value, codec, noise), codec)
        if op == "reducescatter":
            left = left_after_scatter(value, codec, noise, counts)
        if same_bits(residual.cpu(), left):
            wrong.append((op, "residual"))
    return wrong


@pytest.mark.promise("A codec's results have the bits of its specification, at every size and on every rank.")
@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_sums_without_peer_access_are_encoded_by_kernels_with_the_specifications_bits(world_size):
    results = run_on_gpus(wrong_calls, world_size, timeout_s=240)

    for wrong, said, unseeded, launches in results:
        assert wrong == []
        assert "no peer access" in said
        assert launches > 2 * len(CODECS) * len(KERNEL_DTYPES) * len(NUMELS)
        assert same_bits(unseeded, results[0][2]) == 0


@pytest.mark.gpu(2, shared=True)
@on_ranks(2, by=run_on_gpus)
def test_sums_between_hosts_are_encoded_by_kernels_with_the_specifications_bits(rank, world_size):
    hierarchical._CHUNK_NUMEL = 4 * CHUNK
    wrong, hosts = [], [[one] for one in range(world_size)]
    launch = mock.patch.object(LocalCodec, "_launch", autospec=True, side_effect=LocalCodec._launch)
    with launch as launched, Communicator(hosts=hosts) as communicator:
        for codec in ("int8", "int4"):
            xs = parts_of(normal, world_size, 77_777, torch.bfloat16)
            y = communicator.allreduce(xs[rank].cuda(), codec=codec, algorithm="hierarchical")
            if same_bits(y.cpu(), reference.hierarchical_allreduce(xs, hosts, codec)):
                wrong.append(codec)
            comm, out = QuantizedReduceScatter(codec, communicator, algorithm="hierarchical"), xs[rank][:33_333].cuda()
            xs = [one[: world_size * 33_333] for one in xs]
            comm(out, xs[rank].cuda(), dist.group.WORLD, dist.ReduceOp.SUM)
            if same_bits(out.cpu(), reference.hierarchical_reducescatter(xs, hosts, codec)[rank]):
                wrong.append((codec, "scattered"))
    assert (wrong, launched.call_count > 0) == ([], True)
