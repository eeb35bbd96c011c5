"""The compiled kernels have the multimem instructions at the intended places, in the intended order."""

import functools
import re
import subprocess

import pytest
import torch
from cuda.bindings import nvrtc
from cuda.pathfinder import find_nvidia_binary_utility

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import Algorithm, kernels_that
from graphar.runtime import compiler
from graphar.runtime.catalogue import kernel_source

SUM = {
    torch.bfloat16: "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2",
    torch.float16: "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2",
    torch.float32: "multimem.ld_reduce.relaxed.sys.global.add.v4.f32",
}
COPY = "multimem.st.relaxed.sys.global.v4.f32"
FENCE = "fence.proxy.alias"
every_multimem_kernel = pytest.mark.parametrize("algorithm", kernels_that(lambda row: not row.exact))
every_arch = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
every_dtype = pytest.mark.parametrize("dtype", TYPE_NAMES, ids=str)


@functools.cache
def compiled(source, arch):
    """The PTX and the cubin of a kernel, by NVRTC directly, which has both of one compilation."""
    status, program = nvrtc.nvrtcCreateProgram(compiler._text(source).encode(), b"", 0, [], [])
    assert not status
    nvrtc.nvrtcAddNameExpression(program, source.name.encode())
    options = [f"-arch={arch}", f"-std={compiler.OPTIONS['std']}", f"-I{compiler.source_directory()}"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert not status
    text, image = bytes(nvrtc.nvrtcGetPTXSize(program)[1]), bytes(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode(), image


def instructions(source, arch):
    """The multimem instructions and alias fences of a kernel's PTX, in their order."""
    text, _ = compiled(source, arch)
    return re.findall(r"\b(multimem\.[\w.:]+|fence\.proxy\.alias)", text)


@every_arch
@every_dtype
def test_a_one_shot_sums_by_the_switch_behind_a_fence_and_a_two_shot_copies_before_another(arch, dtype):
    one, two = (
        instructions(kernel_source(algorithm, dtype, 4), arch)
        for algorithm in (Algorithm.MULTIMEM_ONE_SHOT, Algorithm.MULTIMEM_TWO_SHOT)
    )

    assert (one[0], {*one[1:]}) == (FENCE, {SUM[dtype]})
    assert (two[0], {*two[1:-1]}, two[-1]) == (FENCE, {SUM[dtype], COPY}, FENCE)


@every_multimem_kernel
@every_dtype
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_a_stand_in_compiles_everywhere_and_holds_none_of_them(algorithm, dtype, arch):
    source = kernel_source(algorithm, dtype, 4, "StandIn")

    assert source.runs_on(arch)
    assert instructions(source, arch) == []
    assert compiled(source, arch)[1].startswith(b"\x7fELF")


@every_multimem_kernel
@every_arch
@every_dtype
def test_the_machine_code_adds_by_the_switch(algorithm, arch, dtype, tmp_path):
    disassembler = find_nvidia_binary_utility("nvdisasm")  # in an NVIDIA wheel, too
    if disassembler is None:
        pytest.skip("there is no nvdisasm: it comes with the CUDA toolkit, and in nvidia-cuda-nvdisasm")
    image = tmp_path / "kernel.cubin"
    image.write_bytes(compiled(kernel_source(algorithm, dtype, 4), arch)[1])

    code = subprocess.run([disassembler, "-c", image], capture_output=True, text=True, check=True).stdout

    elements = {torch.bfloat16: "BF16x8", torch.float16: "F16x8", torch.float32: "F32x4"}[dtype]
    assert re.search(rf"\bLDGMC\.\S*ADD\.{elements}\.", code)


def test_multimem_instructions_are_in_one_file_that_only_two_kernels_include():
    directory = compiler.source_directory()
    texts = {path.relative_to(directory).as_posix(): path.read_text() for path in directory.rglob("*.cu*")}

    assert [name for name, text in texts.items() if re.search(r'"multimem\.', text)] == ["device/ptx/multimem.cuh"]
    including = sorted(name for name, text in texts.items() if '#include "device/sync/multimem.cuh"' in text)
    assert including == ["allreduce/multimem_one_shot.cu", "allreduce/multimem_two_shot.cu"]
    assert [name for name, text in texts.items() if '"device/ptx/multimem.cuh"' in text] == ["device/sync/multimem.cuh"]
