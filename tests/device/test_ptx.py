"""The PTX instructions of the functions in cuda_src/device/ptx. Runs on the host replace these functions.

Each function is called in a kernel of its own. Its PTX must have these opcodes, with their order, scope and width.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from cuda.bindings import nvrtc

from graphar.runtime.compiler import source_directory

FOLDER = source_directory() / "device" / "ptx"
HEADERS = sorted(path.name for path in FOLDER.glob("*.cuh"))
PARAMETERS = (
    "void* out, u32* word, u64* longs, Pack* pack, Pair* pair, Words<1>* one, Words<2>* two, "
    "Words<4>* four, Mbarrier* mbarrier, const __grid_constant__ TensorMap map, float x, float y, u32 v, u32 w, "
    "u64 a, u64 b"
)

# By call: the opcodes, each with those operands that are kernel parameters, special registers or numbers. The compiler
# moves no access across these calls, since they clobber memory.
ORDERED = {
    # loads and stores
    "load_acquire_sys(word)": "ld.acquire.sys.global.u32 word",
    "store_release_sys(word, v)": "st.release.sys.global.u32 word v",
    "load_acquire_sys(longs)": "ld.acquire.sys.global.u64 longs",
    "store_release_sys_if(v, longs, a)": "setp.ne.u32 0; @p:st.release.sys.global.u64 longs a",
    "load_relaxed_gpu(word)": "ld.relaxed.gpu.global.u32 word",
    "load_relaxed_gpu(longs)": "ld.relaxed.gpu.global.u64 longs",
    "store_relaxed_gpu(word, v)": "st.relaxed.gpu.global.u32 word v",
    "exchange_relaxed_gpu(word, v)": "atom.relaxed.gpu.global.exch.b32 word v",
    "add_relaxed_gpu(word, v)": "atom.relaxed.gpu.global.add.u32 word v",
    "add_relaxed_cta(word, v)": "atom.relaxed.cta.shared.add.u32 v",
    # asynchronous copies
    "copy_async(pack, pack)": "cp.async.cg.shared.global pack 16",
    "commit_copies()": "cp.async.commit_group",
    "wait_for_copies<2>()": "cp.async.wait_group 2",
    # clusters
    "sync_cluster_mbarriers()": (
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned; "
        "barrier.cluster.wait.acquire.aligned"
    ),
    "arrive_at_cluster()": "barrier.cluster.arrive.release",
    "wait_for_cluster()": "barrier.cluster.wait.acquire",
    "store_in_cluster(&x_shared, v, x)": "mapa.shared::cluster.u32 v; st.shared::cluster.f32 x",
    # programmatic dependent launch
    "wait_for_previous_kernel()": "griddepcontrol.wait",
    "wait_for_previous_kernel(v)": "mov.u32 %ntid; or.b32 v; setp.ne.u32 0; @p:griddepcontrol.wait",
    "release_next_kernel()": "griddepcontrol.launch_dependents",
    # mbarriers and bulk copies
    "mbarrier->init(v)": "mbarrier.init.shared::cta.b64 v",
    "mbarrier->arrive()": "mbarrier.arrive.shared::cta.b64",
    "mbarrier->arrive_at(v)": "mapa.shared::cluster.u32 v; mbarrier.arrive.relaxed.cluster.shared::cluster.b64",
    "mbarrier->release_to(v)": "mapa.shared::cluster.u32 v; mbarrier.arrive.release.cluster.shared::cluster.b64",
    "mbarrier->arrive_and_expect(v)": "mbarrier.arrive.expect_tx.shared::cta.b64 v",
    "mbarrier->try_wait(v)": "mbarrier.try_wait.parity.shared::cta.b64; selp.u32 1 0",
    "mbarrier->try_wait_for_cluster(v)": "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64; selp.u32 1 0",
    "store_async_in_cluster(pack, v, Pack{v, w, v, w}, *mbarrier)": (
        "mapa.shared::cluster.u32 v; mapa.shared::cluster.u32 v; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 v w v w"
    ),
    "bulk_load(out, pack, v, *mbarrier)": "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes pack v",
    "bulk_store(out, pack, v)": "cp.async.bulk.global.shared::cta.bulk_group out v",
    "wait_for_bulk_stores()": "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0",
    "fence_async_proxy_shared()": "fence.proxy.async.shared::cta",
    "fence_async_proxy_global()": "fence.proxy.async.global",
    # tensor maps
    "prefetch(map)": "prefetch.tensormap",
    "tensor_load(out, map, v, w, *mbarrier)": (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes v w"
    ),
    "tensor_load(out, map, v, w, *mbarrier, u16(3))": (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster v w"
    ),
    "tensor_store(map, v, w, out)": "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group v w",
    "commit_bulk_stores()": "cp.async.bulk.commit_group",
    "wait_for_bulk_sources<1>()": "cp.async.bulk.wait_group.read 1",
    # warpgroups
    "fence_sums()": "wgmma.fence.sync.aligned",
    "commit_products()": "wgmma.commit_group.sync.aligned",
    "wait_for_all_but_last_products()": "wgmma.wait_group.sync.aligned 1",
    "wait_for_all_but_last_products(sums)": "wgmma.wait_group.sync.aligned 1",
    "wait_for_products(sums)": "wgmma.wait_group.sync.aligned 0",
    "sync_warpgroup(v)": "barrier.sync.aligned v 128",
    "store_matrices(out, four_words)": "stmatrix.sync.aligned.m8n8.x4.shared.b16 v w v w",
    "store_transposed_matrices(out, two_words)": "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 v w",
    # aliases
    "fence_aliases()": "fence.proxy.alias",
}

# The compiler may move other accesses across these calls. It drops none of them, as a polling loop requires.
VOLATILE = {
    "load_relaxed_sys(pack)": "ld.relaxed.sys.global.v4.u32 pack",
    "load_relaxed_sys(pair)": "ld.relaxed.sys.global.v2.u64 pair",
    "load_relaxed_sys(longs)": "ld.relaxed.sys.global.u64 longs",
    "load_relaxed_sys(one)": "ld.relaxed.sys.global.u32 one",
    "load_relaxed_sys(two)": "ld.relaxed.sys.global.v2.u32 two",
    "load_relaxed_sys(four)": "ld.relaxed.sys.global.v4.u32 four",
    "store_relaxed_sys(pack, *pack)": "st.relaxed.sys.global.v4.u32 pack",
    "store_relaxed_sys(pair, *pair)": "st.relaxed.sys.global.v2.u64 pair",
    "store_relaxed_sys(longs, *longs)": "st.relaxed.sys.global.u64 longs",
    "store_relaxed_sys(one, {v})": "st.relaxed.sys.global.u32 one v",
    "store_relaxed_sys(two, {v, w})": "st.relaxed.sys.global.v2.u32 two v w",
    "store_relaxed_sys(four, {v, w, v, w})": "st.relaxed.sys.global.v4.u32 four v w v w",
    "multimem_load_sum(bf16{}, pack)": "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 pack",
    "multimem_load_sum(fp16{}, pack)": "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 pack",
    "multimem_load_sum(fp32{}, pack)": "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 pack",
    "multimem_store(pack, Pack{v, w, v, w})": "multimem.st.relaxed.sys.global.v4.f32 pack v w v w",
    "global_time_ns()": "mov.u64 %globaltimer",
    "elected()": "elect.sync 0xffffffff; selp.u32 1 0",
    "shrink_registers<40>()": "setmaxnreg.dec.sync.aligned.u32 40",
    "grow_registers<232>()": "setmaxnreg.inc.sync.aligned.u32 232",
    **{
        f"Product<{n}, {a}, {b}>::add({kind}{{}}, of_{n}, a, b, v)": (
            f"setp.eq.u32 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} a b 1 1 {int(a == 'true')} "
            f"{int(b == 'true')}"
        )
        for n, a, b in (
            (8, "false", "false"),
            (16, "false", "true"),
            (32, "true", "false"),
            (64, "true", "true"),
            (128, "false", "false"),
            (192, "false", "true"),
            (256, "true", "false"),
        )
        for kind, ptx in (("bf16", "bf16"), ("fp16", "f16"))
    },
}

# Functions of their arguments alone.
PURE = {
    "block_in_cluster()": "mov.u32 %cluster_ctarank",
    "word_of_sum(x)": "mov.b32 x",
    "bf16x2_from_floats(x, y)": "cvt.rn.bf16x2.f32 y x",
    "fp16x2_from_floats(x, y)": "cvt.rn.f16x2.f32 y x",
    "floats_from_fp16x2(v, x, y)": "mov.b32 v; cvt.f32.f16; cvt.f32.f16",
    "larger(bf16{}, v, w)": "max.NaN.bf16x2 v w",
    "larger(fp16{}, v, w)": "max.NaN.f16x2 v w",
    "larger(fp32{}, v, w)": "max.NaN.f32 v w",
    "smaller(bf16{}, v, w)": "min.NaN.bf16x2 v w",
    "smaller(fp16{}, v, w)": "min.NaN.f16x2 v w",
    "larger_magnitude(bf16{}, v, w)": "max.NaN.xorsign.abs.bf16x2 v w",
    "larger_magnitude(fp16{}, v, w)": "abs.f16x2 v; abs.f16x2 w; max.NaN.f16x2",
    "larger_magnitude(fp32{}, v, w)": "abs.f32 v; abs.f32 w; max.NaN.f32",
    "fma_bf16x2(v, w, v)": "fma.rn.bf16x2 v w v",
    "choose_bits(v, w, v)": "lop3.b32 v w v 0xca",
    "spread_signs(v)": "prmt.b32 v 0 0xba98",
    "e4m3x2_from_floats(x, y)": "cvt.rn.satfinite.e4m3x2.f32 y x",
    "floats_from_e4m3x2(v, x, y)": "cvt.rn.f16x2.e4m3x2 v; mov.b32; cvt.f32.f16; cvt.f32.f16",
}

CALLS = ORDERED | VOLATILE | PURE
OPENING = """
template <class T>
constexpr bool is_void = false;
template <>
inline constexpr bool is_void<void> = true;

template <class Call>
DEVICE void keep(void* out, Call call) {
  if constexpr (is_void<decltype(call())>) call();
  else *static_cast<decltype(call())*>(out) = call();
}
"""


def text_of(number: int, call: str) -> str:
    """A kernel that makes the call once if it is in PURE, else twice."""
    columns = re.search(r"of_(\d+)", call)
    made = f"keep(out, [&] {{ return {call}; }}); keep(word, [&] {{ return x + y; }});"
    return f"""
extern "C" __global__ void kernel_{number}({PARAMETERS}) {{
  __shared__ float x_shared;
  const u32 two_words[2] = {{v, w}}, four_words[4] = {{v, w, v, w}};
  float sums[4] = {{x, y, x, y}};
  {f"float of_{columns[1]}[{int(columns[1]) // 2}] = {{}};" if columns else ""}
  {made if call in PURE else f"{call}; {call};"}
}}
"""


def compile_to_ptx(text: str) -> str:
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", f"--include-path={source_directory()}".encode()]
    program = ask(nvrtc.nvrtcCreateProgram(text.encode(), b"functions.cu", 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log, ptx = (bytes(ask(size(program))) for size in (nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetPTXSize))
    ask(nvrtc.nvrtcGetProgramLog(program, log))
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    ask(nvrtc.nvrtcGetPTX(program, ptx))
    return ptx.decode()


def ask(answer: tuple):
    error, *value = answer
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    return value[0] if value else None


@pytest.fixture(scope="module")
def kernels() -> dict[str, str]:
    """The PTX of each call's kernel."""
    included = "".join(f'#include "device/ptx/{name}"\n' for name in HEADERS)
    ptx = compile_to_ptx(included + OPENING + "".join(text_of(*numbered) for numbered in enumerate(CALLS)))
    return dict(zip(CALLS, ptx.split(".visible .entry")[1:], strict=True))


def instructions(ptx: str) -> list[str]:
    """The opcodes of inline asm with their operands, except registers that hold no kernel parameter."""
    names = [one.split()[-1].strip("*") for one in PARAMETERS.split(", ")]
    loads = re.findall(r"ld\.param\.\S+\s+(%\w+), \[\w+_param_(\d+)\]", ptx)
    parameters = {register: names[int(number)] for register, number in loads}
    found = []
    for asm in re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.DOTALL):
        for line in re.split(r"[;\n]", re.sub(r"\.reg [^;]*;", "", asm)):
            opcode, _, operands = re.sub(r"^(@\w+) ", r"\1:", line.strip(" \t{}")).partition(" ")
            words = [parameters.get(word, word) for word in re.findall(r"%\w+|0x\w+|\b\d+\b", operands)]
            words = [word for word in words if not re.fullmatch(r"%[a-z]+\d+", word)]
            found += [" ".join([opcode, *words])] if opcode else []
    return found


@pytest.mark.parametrize("call", CALLS)
def test_a_function_is_these_instructions(call, kernels):
    expected = CALLS[call].split("; ")

    assert instructions(kernels[call]) == expected * (1 if call in PURE else 2)


def name_of(call: str) -> str:
    return re.match(r"(?:\w+->|Product<.*>::)?(\w+)", call)[1]


def functions() -> list[tuple[str, str]]:
    """Name and text of each function that holds asm."""
    text = "".join((FOLDER / name).read_text() for name in HEADERS)
    every = re.findall(r"\bDEVICE \S+ (\w+)(\(.*?)(?=\bDEVICE\b|\Z)", text, re.DOTALL)
    return [(name, body) for name, body in every if re.search(r"\basm( volatile)?\(", body)]


def test_every_function_with_an_instruction_is_called():
    defined, called = Counter(name for name, _ in functions()), Counter(map(name_of, CALLS))

    assert defined - called == Counter()
    assert called.keys() == defined.keys()


@pytest.mark.parametrize("name", sorted(set(map(name_of, ORDERED))))
def test_the_compiler_is_told_that_other_accesses_stay_on_their_side(name):
    """Reads the source: in PTX, NVRTC keeps a dead store before any volatile asm, with or without the clobber."""
    assert all('"memory"' in body for one, body in functions() if one == name)


def test_no_kernel_loads_through_the_cache_that_is_not_coherent():
    """(20) in cuda_src/device/sync/signal_pad.cuh needs it."""
    texts = {path.name: re.sub("//.*", "", path.read_text()) for path in source_directory().rglob("*.cu*")}

    assert [name for name, text in texts.items() if re.search(r"__ldg|__restrict|\bld\.\S*\bnc\b", text)] == []
