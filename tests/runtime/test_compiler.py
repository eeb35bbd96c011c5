"""The compiler: no kernel is compiled twice, and an error says where it is."""

import os
import re
import shutil
from dataclasses import replace

import pytest
import torch

from graphar.errors import CompileError
from graphar.plan.algorithms import Algorithm
from graphar.runtime import compiler
from graphar.runtime.catalogue import KernelSource, kernel_source
from graphar.runtime.compiler import cache_key, compile_kernel, nvrtc_build
from tests.runtime.conftest import edit, line_of

SOURCE = kernel_source(Algorithm.ONE_SHOT, torch.bfloat16, 2)


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(path))
    forget_compiled_kernels()
    yield path
    forget_compiled_kernels()


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of cuda_src to break."""
    copy = shutil.copytree(compiler.source_directory(), tmp_path / "cuda_src")
    monkeypatch.setattr(compiler, "source_directory", lambda: copy)
    return copy


@pytest.fixture
def no_nvrtc(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("NVRTC was asked to compile")

    return lambda: monkeypatch.setattr("cuda.core.Program", refuse)


def forget_compiled_kernels():
    compile_kernel.cache_clear()


def test_a_compilation_gives_the_same_bytes_again(directory):
    first = compile_kernel(SOURCE, "sm_90a")
    shutil.rmtree(directory)
    forget_compiled_kernels()
    assert compile_kernel(SOURCE, "sm_90a") == first


@pytest.mark.parametrize(("limit", "on_sm_100a"), [({"minimum_arch": 90}, True), ({"only_arch": "sm_90a"}, False)])
def test_a_kernel_runs_from_its_minimum_architecture_on_or_on_a_single_one(limit, on_sm_100a):
    kernel = replace(SOURCE, **limit)
    assert [kernel.runs_on(arch) for arch in ("sm_89", "sm_90a", "sm_100a")] == [False, True, on_sm_100a]


def test_a_kernel_compiled_in_this_process_is_the_same_object():
    assert compile_kernel(SOURCE, "sm_90a") is compile_kernel(SOURCE, "sm_90a")


def test_a_kernel_not_found_on_disk_is_compiled(no_nvrtc):
    no_nvrtc()
    with pytest.raises(AssertionError, match="NVRTC was asked"):
        compile_kernel(SOURCE, "sm_90a")


def test_a_damaged_entry_is_compiled_again_and_repaired(directory, no_nvrtc):
    first = compile_kernel(SOURCE, "sm_90a")
    (entry,) = directory.iterdir()
    entry.write_bytes(bytes(entry.stat().st_size))
    forget_compiled_kernels()
    assert compile_kernel(SOURCE, "sm_90a") == first
    forget_compiled_kernels()
    no_nvrtc()
    assert compile_kernel(SOURCE, "sm_90a") == first


def test_a_cache_that_cannot_be_used_does_not_stop_the_compiler(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot be made"):
        assert compile_kernel(SOURCE, "sm_90a").image


def test_a_kernel_edited_while_it_compiles_is_not_kept(directory, monkeypatch):
    keys = iter(["before", "after"])
    monkeypatch.setattr(compiler, "cache_key", lambda source, arch: next(keys))
    compile_kernel(SOURCE, "sm_90a")
    assert os.listdir(directory) == []


def test_the_place_of_the_sources_keeps_the_key(sources, monkeypatch):
    before = cache_key(SOURCE, "sm_90a")
    moved = sources.rename(sources.with_name("moved"))
    monkeypatch.setattr(compiler, "source_directory", lambda: moved)
    assert cache_key(SOURCE, "sm_90a") == before


@pytest.mark.parametrize("file", ["allreduce/one_shot.cu", "device/ptx/ptx.cuh", "device/sync/sentinel.cuh"])
def test_one_byte_of_a_source_changes_the_key(sources, file):
    before = cache_key(SOURCE, "sm_90a")
    (sources / file).write_bytes((sources / file).read_bytes() + b" ")
    assert cache_key(SOURCE, "sm_90a") != before


def test_another_name_of_a_header_changes_the_key(sources):
    before = cache_key(SOURCE, "sm_90a")
    path = sources / "device" / "sync" / "sentinel.cuh"
    path.rename(path.with_name("sentinels.cuh"))
    assert cache_key(SOURCE, "sm_90a") != before


def test_an_edit_of_another_kernel_and_the_lock_file_of_an_editor_keep_the_key(sources):
    before = cache_key(SOURCE, "sm_90a")
    (sources / "allreduce" / "two_shot_push.cu").write_text("")
    assert cache_key(SOURCE, "sm_90a") == before
    (sources / "device" / ".#pack.cuh").symlink_to("someone@somewhere.1234")
    assert cache_key(SOURCE, "sm_90a") == before


CHANGES = {
    "the architecture": lambda patch: cache_key(SOURCE, "sm_90"),
    "the name expression": lambda patch: cache_key(replace(SOURCE, name="one_shot<bf16, 3>"), "sm_90a"),
    "NVRTC's build": lambda patch: patch.setattr(compiler, "nvrtc_build", lambda: nvrtc_build().replace("CL-", "CL-1")),
    "the options": lambda patch: patch.setitem(compiler.OPTIONS, "std", "c++20"),
    "the layout check": lambda patch: patch.setattr(compiler, "layout_check", lambda: "static_assert(true);"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_compiled_and_with_what_changes_the_key(monkeypatch, what):
    before = cache_key(SOURCE, "sm_90a")

    assert (CHANGES[what](monkeypatch) or cache_key(SOURCE, "sm_90a")) != before


def test_sources_include_only_what_the_key_covers():
    directory = compiler.source_directory()
    for path in directory.rglob("*.cu*"):
        for name in re.findall(r'^\s*#\s*include\s*["<](.+)[">]', path.read_text(), re.MULTILINE):
            header = directory / name
            assert header.is_file(), f"{path.name} includes {name}"
            assert header.is_relative_to(directory / "device"), f"{path.name} includes {name}"
            assert header.suffix == ".cuh", f"{path.name} includes {name}"


def test_all_headers_can_be_included_in_one_file(sources):
    """So no name at the top of one has another meaning in another."""
    headers = sorted(path.relative_to(sources).as_posix() for path in (sources / "device").rglob("*.cuh"))
    included = "".join(f'#include "{header}"\n' for header in headers)
    (sources / "all_headers.cu").write_text(f"{included}__global__ void all_headers() {{}}\n")

    assert len(headers) > 30
    assert compile_kernel(KernelSource("all_headers.cu", "all_headers"), "sm_90a").image


@pytest.mark.parametrize(
    ("file", "old", "new", "name"),
    [
        (SOURCE.file, "signals.end(a, 1);", "signals.end(a, one);", "one"),
        ("device/pack.cuh", "PackOf<T, Out> result;", "Packs result;", "Packs"),
    ],
    ids=["in a kernel", "in a header"],
)
def test_an_error_is_reported_with_file_line_and_log(sources, file, old, new, name):
    path = sources / file
    edit(path, old, new)
    with pytest.raises(CompileError) as raised:
        compile_kernel(SOURCE, "sm_90a")
    assert (raised.value.file, raised.value.line) == (str(path), line_of(path, new))
    assert f'identifier "{name}" is undefined' in raised.value.log


def test_a_missing_header_is_reported_where_it_is_included(sources):
    (sources / "device" / "pack.cuh").unlink()
    with pytest.raises(CompileError, match="cannot open source file") as raised:
        compile_kernel(SOURCE, "sm_90a")
    assert raised.value.line == line_of(sources / SOURCE.file, '#include "device/pack.cuh"')


@pytest.mark.parametrize(
    ("source", "arch"),
    [(replace(SOURCE, name="one_shot<bf17, 2>"), "sm_90a"), (SOURCE, "sm_1")],
    ids=["an unknown template argument", "an unknown architecture"],
)
def test_an_error_in_no_file_is_reported_at_line_zero_of_the_kernel(source, arch):
    with pytest.raises(CompileError) as raised:
        compile_kernel(source, arch)
    assert (raised.value.file, raised.value.line) == (str(compiler.source_directory() / SOURCE.file), 0)


def test_an_error_is_not_cached(sources):
    edit(sources / SOURCE.file, "signals.end(a, 1);", "signals.end(a, one);")
    with pytest.raises(CompileError):
        compile_kernel(SOURCE, "sm_90a")
    edit(sources / SOURCE.file, "signals.end(a, one);", "signals.end(a, 1);")
    assert compile_kernel(SOURCE, "sm_90a").image


@pytest.mark.parametrize(
    ("struct", "old", "new"),
    [
        ("Arguments", "  u32 chunk;", "  u32 chunk, another, and_one_more;"),
        ("Arguments", "  u64 timeout_ns;", "  u32 timeout_ns;"),
        ("EpilogueArguments", "  u64 first_row, first_col;", "  u64 first_col, first_row;"),
        ("NormArguments", "  float eps, weight_offset;", "  float weight_offset, eps;"),
        ("Record", "  u32 seen;", "  u64 seen;"),
        ("Counters", "  u32 steps[max_blocks];", "  u32 steps[max_blocks + 1];"),
    ],
    ids=[
        "a field too many",
        "a narrower one",
        "two fields swapped",
        "two of a derived struct swapped",
        "a wider field",
        "a longer array",
    ],
)
def test_a_struct_that_differs_from_its_mirror_does_not_compile(sources, struct, old, new):
    edit(sources / "device" / "arguments.cuh", old, new)
    with pytest.raises(CompileError, match=f"static assertion failed.*\n.*{struct}") as raised:
        compile_kernel(SOURCE, "sm_90a")
    assert raised.value.file == "graphar.runtime.arguments.layout_check"
