"""Kernels compile: a few of each file, with `nox -s catalogue` a sample, and with its `--whole` all of them."""

import json
import os
import re
import shutil
import struct
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from graphar.errors import CompileError
from graphar.runtime import compiler
from graphar.runtime.compiler import Cubin, compile_kernel, nvrtc_version
from perf.cubin import resources
from perf.kernels import catalogue
from tests.compilations import ARCHS, FEW_RANKS, cases, combinations, compile_kept, features, keep_kernels, named, words
from tests.kernel_budget import of_most_ranks
from tests.processes import PROCESSES

every_arch = pytest.mark.parametrize("arch", ARCHS)
CASES = cases(of_most_ranks())
MOST_SAMPLED = 450  # a budget of time: each takes about 0.5 s
# The bytes of local memory that each thread of a kernel takes, with one version of NVRTC. Kernels without are left out.
LOCAL_MEMORY = json.loads(Path(__file__).with_name("local_memory.json").read_text())


@pytest.fixture(scope="module", params=["some", pytest.param("most", marks=pytest.mark.catalogue)])
def compiled(request):
    """A Cubin, or what went wrong, for each of CASES; NVRTC is loaded in forked processes only."""
    whole = "all" if request.config.getoption("--whole") else "sample"
    return compile_all(CASES["some" if request.param == "some" else whole])


def compile_all(these):
    with ProcessPoolExecutor(os.cpu_count(), PROCESSES, keep_kernels) as pool:
        return dict(zip(these, pool.map(compile_or_explain, these), strict=True))


def compile_or_explain(case):
    try:
        return compile_kept(*case)
    except CompileError as error:
        return str(error)


def cubins(compiled, arch):
    return [(source, cubin) for (source, at), cubin in compiled.items() if at == arch and isinstance(cubin, Cubin)]


def all_words(sources):
    return set().union(*map(words, sources))


def test_every_kernel_of_the_catalogue_is_in_the_whole_of_it():
    assert {source for source, _ in CASES["all"]} == set(catalogue())


@every_arch
def test_every_file_dtype_variant_and_expression_is_in_the_whole_of_it(arch):
    assert all_words(s for s, at in CASES["all"] if at == arch) == all_words(s for s in catalogue() if s.runs_on(arch))


def test_every_file_dtype_variant_and_expression_is_compiled_for_an_architecture():
    compiled, known = (set().union(*map(features, sources)) for sources in ([s for s, _ in CASES["some"]], catalogue()))
    assert compiled == known


def test_every_file_is_in_the_sample_with_every_dtype_number_of_ranks_codec_and_kind_of_tile():
    sampled, known = (set().union(*map(combinations, of)) for of in ([s for s, _ in CASES["sample"]], catalogue()))
    assert sampled >= known
    assert {arch for _, arch in CASES["sample"]} == set(ARCHS)
    assert CASES["sample"][: len(of_most_ranks())] == [(source, "sm_90a") for source in of_most_ranks()]


@every_arch
def test_some_are_compiled_for_every_architecture(arch):
    assert len([at for _, at in CASES["some"] if at == arch]) > 5


@every_arch
def test_every_catalogue_entry_compiles(compiled, arch):
    failed = {source.name: log for (source, at), log in compiled.items() if at == arch and isinstance(log, str)}
    assert not failed


@every_arch
def test_the_compiler_has_nothing_to_say_about_them(compiled, arch):
    """It says, for example, that tensor cores wait for each product, since other code touches the sums."""
    said = {source.name: cubin.said for source, cubin in cubins(compiled, arch) if cubin.said}
    assert not said


def test_only_kernels_of_newer_instructions_pass_over_an_architecture():
    passed_over = {source.file for source in catalogue() for arch in ARCHS if not source.runs_on(arch)}
    assert passed_over == {
        "allreduce/multimem_one_shot.cu",
        "allreduce/multimem_two_shot.cu",
        "allreduce/two_shot_tma.cu",
        "loss/softmax_partials.cu",
        "matmul/allgather_matmul.cu",
        "matmul/matmul.cu",
        "matmul/matmul_allreduce.cu",
        "matmul/matmul_one_shot.cu",
        "matmul/matmul_reducescatter.cu",
        "matmul/matmul_two_shot.cu",
        "norm/allreduce_rmsnorm_one_shot.cu",
        "norm/allreduce_rmsnorm_two_shot.cu",
        "norm/reducescatter_rmsnorm.cu",
    }


@every_arch
def test_a_cubin_is_an_elf_for_its_architecture_with_the_symbol_of_its_kernel(compiled, arch):
    number = int(re.sub(r"\D", "", arch))
    for source, cubin in cubins(compiled, arch):
        assert Path(source.file).stem in cubin.symbol, source.name
        assert cubin.symbol.encode() in cubin.image, source.name
        machine, flags = struct.unpack_from("<18xH28xI", cubin.image)
        assert (cubin.image[:4], machine, flags >> 8 & 0xFF) == (b"\x7fELF", 190, number)  # 190: EM_CUDA


def test_no_two_kernels_share_an_image(compiled):
    images = [cubin.image for cubin in compiled.values()]
    assert len(set(images)) == len(images)


def test_what_the_compiler_has_to_say_is_said_again_when_it_is_asked_again(tmp_path, monkeypatch):
    source, copy = next(catalogue()), shutil.copytree(compiler.source_directory(), tmp_path / "cuda_src")
    monkeypatch.setattr(compiler, "source_directory", lambda: copy)
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(tmp_path / "cache"))
    (copy / source.file).write_text((copy / source.file).read_text() + "__device__ void f() { int unused_number; }\n")

    for _ in range(2):
        compile_kernel.cache_clear()
        assert "unused_number" in compile_or_explain((source, "sm_90a")).said


@pytest.fixture(scope="module")
def asked(request):
    """The kernels that a tuning table names, in the sample if the whole is not asked for, and their world sizes."""
    world_sizes = named()
    if request.config.getoption("--whole"):
        return world_sizes
    return {
        source: world_sizes[source] for source, arch in CASES["sample"] if arch == "sm_90a" and source in world_sizes
    }


@pytest.fixture(scope="module")
def local_nbytes(asked):
    """The local memory of those that have some, by world size and name."""
    found = {}
    for (source, _), cubin in compile_all([(source, "sm_90a") for source in asked]).items():
        assert isinstance(cubin, Cubin), cubin
        if nbytes := resources(cubin.image, cubin.symbol).stack_nbytes:
            found.setdefault(asked[source], {})[source.name] = nbytes
    return found


@pytest.mark.catalogue
@pytest.mark.parametrize("world_size", range(2, FEW_RANKS + 1))
def test_no_kernel_that_a_table_names_spills_registers_between_a_few_ranks(local_nbytes, world_size):
    assert local_nbytes.get(world_size, {}) == {}


@pytest.mark.catalogue
def test_the_kernels_that_spill_registers_between_more_ranks_are_known_with_their_bytes(local_nbytes, asked):
    if list(nvrtc_version()) != LOCAL_MEMORY["nvrtc"]:
        pytest.skip(f"the bytes are those of NVRTC {LOCAL_MEMORY['nvrtc']}")
    known = {source.name: LOCAL_MEMORY["nbytes"].get(source.name, 0) for source in asked}

    found = {name: n for kernels in local_nbytes.values() for name, n in kernels.items()}
    assert found == {name: nbytes for name, nbytes in known.items() if nbytes}


def test_the_sample_has_few_kernels():
    assert len(CASES["sample"]) <= MOST_SAMPLED


def test_all_kernels_that_are_known_to_spill_are_of_more_ranks():
    assert LOCAL_MEMORY["nbytes"].keys() <= {s.name for s, world_size in named().items() if world_size > FEW_RANKS}
