"""The built sm_90a code, by its disassembly: what must be in it and what must not."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import pagedkern

ROOT = Path(__file__).resolve().parents[2]
OP_LIBRARY = ROOT / "pagedkern" / "libpagedkern_ops.so"

VECTOR_LOAD, VECTOR_STORE = r"LDG\S*\.128\b", r"STG\S*\.128\b"
FP8_ENCODE, FP8_DECODE = r"F2FP\S*E4M3", r"F2FP\S*E4M3"
MOVES = [VECTOR_LOAD, VECTOR_STORE]
COPY_16, MATRIX_LOAD = r"LDGSTS\S*\.128\b", r"LDSM\S*\.MT88\.4\b"
# Part of a kernel's mangled name -> (most registers a thread may use, instructions that must be found).
GATES = {
    "smoke_add_kernel": (40, MOVES),
    "copy_blocks_kernel": (48, []),
    "copy_blocks_kernelILi16E": (48, MOVES),
    "paged_decode_kernel": (255, [COPY_16, MATRIX_LOAD]),
    "paged_prefill_kernel": (255, [COPY_16, MATRIX_LOAD]),
    "paged_prefill_kernelI13__nv_bfloat16": (255, [r"HMMA\.16816\.F32\.BF16"]),
    "paged_prefill_kernelI6__half": (255, [r"HMMA\.16816\.F32\b"]),
    "24reshape_and_cache_kernel": (64, []),
    "reshape_and_cache_kernelINS_7CopyRowILi8E": (64, MOVES),
    "reshape_and_cache_kernelINS_11QuantizeRowI13__nv_bfloat16NS_4E4M3ELi8ELb1E": (
        64,
        [*MOVES, FP8_ENCODE],
    ),
    "reshape_and_cache_dynamic_kernel": (64, []),
    "reshape_and_cache_dynamic_kernelI13__nv_bfloat16NS_4E4M3ELi8ELi2E": (64, [*MOVES, FP8_ENCODE]),
    "rope_reshape_and_cache_kernel": (96, []),
    "rope_reshape_and_cache_kernelI13__nv_bfloat16NS_8CopyCodeELi8E": (96, MOVES),
    "rope_reshape_and_cache_kernelI13__nv_bfloat16NS_12QuantizeCodeINS_4E4M3EEELi8E": (
        96,
        [*MOVES, FP8_ENCODE],
    ),
    "gather_cache_kernel": (64, []),
    "gather_cache_kernelINS_9CopyChunkILi8E": (64, MOVES),
    "gather_cache_kernelINS_15DequantizeChunkI13__nv_bfloat16NS_4E4M3ELi16E": (
        64,
        [*MOVES, FP8_DECODE],
    ),
    "merge_attention_states_kernel": (128, []),
    "merge_attention_states_kernelI13__nv_bfloat16S1_S1_Li8E": (104, MOVES),
}


def cuobjdump(*options):
    # Triton's wheel, which every CUDA build of torch brings, ships cuobjdump and nvdisasm.
    tool = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, *options, OP_LIBRARY], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def sass():
    """Kernel name (mangled) -> its SASS."""
    info = pagedkern.build_info()
    assert info["cuda"], info["cuda_missing"]
    parts = re.split(r"\n\s*Function : (\S+)\n", cuobjdump("-sass"))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def usage():
    """Kernel name (mangled) -> {REG, STACK, LOCAL, ...}."""
    rows = re.findall(r"Function (\S+?):\s*\n\s*(REG:.*)", cuobjdump("-res-usage"))
    return {name: {k: int(v) for k, v in re.findall(r"(\w+(?:\[\d\])?):(\d+)", row)} for name, row in rows}


def test_only_sm_90a(sass):
    names = cuobjdump("--list-elf").split()
    cubins = [n for n in names if n.endswith(".cubin")]
    assert cubins and all("sm_90a" in n for n in cubins)


def test_every_kernel_has_a_gate(sass):
    assert [name for name in sass if not any(gate in name for gate in GATES)] == []


@pytest.mark.parametrize("gate", GATES)
def test_gate(gate, sass, usage):
    registers, instructions = GATES[gate]
    kernels = [name for name in sass if gate in name]
    assert kernels, f"{gate} is not in the library"
    for name in kernels:
        assert usage[name]["REG"] <= registers, usage[name]
        assert usage[name]["STACK"] == 0 and usage[name]["LOCAL"] == 0, usage[name]
        assert not re.search(r"\b(LDL|STL)\b", sass[name]), f"{name} spills or uses local memory"
        for pattern in instructions:
            assert re.search(pattern, sass[name]), f"{name} has no {pattern}"


def test_the_trivial_kernel_is_registered_for_cuda():
    keys = torch._C._dispatch_dump("pagedkern::_smoke_add")
    assert re.search(r"^CUDA: registered", keys, re.MULTILINE), keys


@pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("count", [0, 1, 4, 1000, 1 << 22])
def test_the_trivial_kernel_runs(count):
    x, y = torch.randn(count, device="cuda"), torch.randn(count, device="cuda")
    expected = y + 0.5 * x
    torch.ops.pagedkern._smoke_add(x, y, 0.5)
    torch.testing.assert_close(y, expected)
