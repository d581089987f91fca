"""Builds the op library and `_C` with ninja, in place or into a wheel.

    python setup.py build_ext --inplace        what `make build` calls
    pip install .                              builds in isolation, against a torch that pip fetches
    pip install -e . --no-build-isolation      builds against the torch of the environment

The op library uses LibTorch's stable ABI only (torch >= 2.11), so that one binary serves every later torch. Objects and
depfiles are kept in build/, one folder per Python and torch version; a second build compiles what changed.
"""

import fcntl
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)

# ---------------------------------------------------------------------------------------------------------- sources


def _files(folder, suffix, names):
    """The sources of one part: every file is named here, and tests/build/test_sources.py compares with the tree."""
    return [f"{folder}{name}{suffix}" for name in names.split()]


# Bindings: checks, tensors to params, registration. Torch's stable headers.
BINDINGS = _files(
    "csrc/bindings/",
    ".cpp",
    """
    arg backend backend_cpu backend_cuda build_info cache_write checks checks_only copy_blocks gather input_checks
    merge_states mode overlap paged_attention quantized_linear register smoke swap_blocks value_checks
    """,
)
# Those of them that know the CPU kernels.
CPU_BINDINGS = _files("csrc/bindings/", ".cpp", "backend_cpu quantized_linear")
# CPU kernels and their dispatch, compiled once.
CPU = _files("csrc/cpu/", ".cpp", "attention block_copy cache_write gather merge_states quantized_linear simd_level")
# CPU kernels compiled once per SIMD level.
CPU_SIMD = _files(
    "csrc/cpu/simd/",
    ".cpp",
    """
    attention attention_bfloat16 attention_e4m3 attention_e5m2 attention_float16 attention_float32 cache_write
    gather merge_states quantized_linear
    """,
)
# CUDA kernels, one instantiation a file.
CUDA = _files(
    "csrc/",
    ".cu",
    """
    block_copy/copy_rows block_copy/instantiations/copy_blocks cache_write/instantiations/dynamic
    cache_write/instantiations/quantize_bfloat16 cache_write/instantiations/quantize_float16
    cache_write/instantiations/reshape_and_cache cache_write/instantiations/rope_bfloat16
    cache_write/instantiations/rope_float16 gather/instantiations/gather_cache
    merge_states/instantiations/merge_attention_states
    paged_decode/instantiations/bf16_128 paged_decode/instantiations/bf16_192 paged_decode/instantiations/bf16_256
    paged_decode/instantiations/bf16_64 paged_decode/instantiations/bf16_96 paged_decode/instantiations/e4m3_128
    paged_decode/instantiations/e4m3_192 paged_decode/instantiations/e4m3_256 paged_decode/instantiations/e4m3_64
    paged_decode/instantiations/e5m2_128 paged_decode/instantiations/e5m2_192 paged_decode/instantiations/e5m2_256
    paged_decode/instantiations/e5m2_64 paged_decode/instantiations/f16_128 paged_decode/instantiations/f16_192
    paged_decode/instantiations/f16_256 paged_decode/instantiations/f16_64 paged_decode/instantiations/f16_96
    paged_prefill/instantiations/bf16_128 paged_prefill/instantiations/bf16_192
    paged_prefill/instantiations/bf16_256 paged_prefill/instantiations/bf16_64 paged_prefill/instantiations/bf16_96
    paged_prefill/instantiations/f16_128 paged_prefill/instantiations/f16_192 paged_prefill/instantiations/f16_256
    paged_prefill/instantiations/f16_64 paged_prefill/instantiations/f16_96 smoke/kernel
    """,
)
# Which kernel takes a call, and where in it: plain C++, linked wherever the kernels are.
CUDA_DISPATCH = _files("csrc/", ".cpp", "paged_attention/dispatch paged_decode/dispatch paged_prefill/dispatch")
# Python module `_C`.
MODULE = _files("csrc/", ".cpp", "bindings/module paged_decode/plan paged_prefill/plan vgpu/python")
# Virtual GPU: compiled once, and the instruction families once per level.
VGPU = _files(
    "csrc/vgpu/",
    ".cpp",
    """
    access async async_bulk_forms async_copy_forms async_forms async_mbarrier async_mbarrier_forms
    async_policy_forms async_support block builder builder_layout builder_names capture counters decode device flow
    global_order launch lexer memory parser parser_operand parser_variable program registry shadow tensor_forms
    tensor_gemm tensor_matrix tensor_mma tensor_wgmma tensor_wgmma_forms tma_box tma_forms tma_map warp warp_place
    """,
)
VGPU_FAMILIES = _files(
    "csrc/vgpu/families/",
    ".cpp",
    """
    atomic barrier compare control convert float half integer logic memory move warp
    """,
)
# What stands for the CUDA runtime where the CUDA bindings and kernels run on the virtual GPU.
VGPU_RUNTIME = _files(
    "csrc/vgpu/runtime/",
    ".cpp",
    """
    device driver errors fatbin functions graphs launch memory modules streams
    """,
)

SIMD_LEVELS = {"generic": ""}
if platform.machine() in ("x86_64", "AMD64"):
    _AVX2 = "-mavx2 -mfma -mf16c"
    _AVX512 = f"-mavx512f -mavx512bw -mavx512dq -mavx512vl {_AVX2}"
    SIMD_LEVELS |= {
        # Only for CPUs of before 2013; -O3 over emulated 512-bit vectors takes six times as long to compile.
        "generic": "-O2",
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512_bf16": f"{_AVX512} -mavx512bf16 -mavx512vbmi -mavx512vnni",
    }

VGPU_LEVELS = {"generic": ""}
if "avx2" in SIMD_LEVELS:
    VGPU_LEVELS["avx2"] = "-mavx2 -mfma -mf16c -mbmi2 -mpopcnt"
# PTX says where a multiplication and an addition fuse; lane arrays are read as whatever type an instruction names.
VGPU_FLAGS = "-ffp-contract=off -fno-strict-aliasing -fno-math-errno"

CXX_FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -fno-gnu-unique -Wall -Wextra -Wno-restrict -Icsrc"
NVCC_FLAGS = "-std=c++20 -O3 -lineinfo -Xcompiler -fPIC,-fvisibility=hidden -Icsrc"
# One object for both op libraries: code for the GPU, and the PTX it was made of, which the virtual GPU runs.
SM_90A = "-gencode arch=compute_90a,code=[sm_90a,compute_90a] --no-compress"
NO_UNDEFINED = "-Wl,-z,defs"  # a source missing from the lists fails at the link, not at import
TORCH_TARGET = "0x020b000000000000"  # 2.11, the oldest torch the op library runs under

# --------------------------------------------------------------------------------------------------------- toolchain


def _switch(name):
    """An on/off switch from the environment: True, False, or None where it is not given."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        sys.exit(f"pagedkern: {name}={value!r}: expected 0 or 1")
    return None if value == "" else value == "1"


def _package_dir(name):
    spec = find_spec(name)
    if spec is None:
        sys.exit(f"pagedkern: building needs {name} (pip install {name}), or pip's build isolation")
    return Path(next(iter(spec.submodule_search_locations)))


def _ninja():
    if find_spec("ninja") is not None:
        import ninja

        return os.path.join(ninja.BIN_DIR, "ninja")
    return shutil.which("ninja") or sys.exit("pagedkern: building needs ninja (pip install ninja), or pip's isolation")


def _cuda_home_of(nvcc):
    """Where a working nvcc has its headers and libraries; it may itself be a script or a link. None if incomplete."""
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"], capture_output=True, text=True)
    tops = [line.split("TOP=", 1)[1] for line in dry.stderr.splitlines() if "TOP=" in line]
    home = Path(tops[0]).resolve() if tops else None
    complete = home and (home / "include/cuda_runtime.h").exists() and any(home.glob("lib*/libcudart_static.a"))
    return home if complete else None


def _find_cuda_home():
    """The first complete toolkit: CUDA_HOME, nvcc on PATH, /usr/local/cuda, the nvidia-cuda-nvcc wheel."""
    wheel = find_spec("nvidia")
    folders = [*(wheel.submodule_search_locations if wheel else []), Path(sysconfig.get_path("purelib"), "nvidia")]
    wheels = [Path(p) / "cu13/bin/nvcc" for p in folders]
    given = [Path(os.environ["CUDA_HOME"], "bin/nvcc")] if os.environ.get("CUDA_HOME") else []
    for nvcc in [*given, shutil.which("nvcc"), Path("/usr/local/cuda/bin/nvcc"), *wheels]:
        home = _cuda_home_of(nvcc) if nvcc and Path(nvcc).exists() else None
        if home:
            return home
    return None


GET_NVCC = (
    "install CUDA 13 and put nvcc on PATH, or "
    "pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl (all ==13.0.*)"
)


class Toolchain:
    """What this machine can build with, and why not more."""

    def __init__(self):
        self.cxx = os.environ.get("CXX", "c++")
        if shutil.which(shlex.split(self.cxx)[0]) is None:
            sys.exit(f"pagedkern: no C++ compiler {self.cxx!r}: install one (Debian: apt install g++) or set CXX")
        self.torch_dir = _package_dir("torch")
        torch = runpy.run_path(str(self.torch_dir / "version.py"))
        self.torch_version, self.torch_cuda = torch["__version__"], torch["cuda"]
        # torch brings the headers too.
        bundled = find_spec("pybind11") is None and (self.torch_dir / "include/pybind11").exists()
        self.pybind11_dir = self.torch_dir if bundled else _package_dir("pybind11")
        self.cuda_home, self.nvcc_version = _find_cuda_home(), ""
        wanted = _switch("PAGEDKERN_CUDA")
        self.nvcc_missing = self._why_no_nvcc(wanted)
        self.cuda_missing = self.nvcc_missing or self._why_no_cuda(wanted)
        if not self.nvcc_missing:
            out = subprocess.run([self.cuda_home / "bin/nvcc", "--version"], capture_output=True, text=True, check=True)
            self.nvcc_version = out.stdout.split(", V")[-1].split()[0]

    def _why_no_nvcc(self, wanted):
        if wanted is False:
            return "switched off by PAGEDKERN_CUDA=0 at build time"
        if self.cuda_home is not None:
            return ""
        if wanted:
            sys.exit(f"pagedkern: PAGEDKERN_CUDA=1, but there is no nvcc: {GET_NVCC}")
        return f"no nvcc when this was built: {GET_NVCC}; then build again"

    def _why_no_cuda(self, wanted):
        if self.torch_cuda is not None or wanted:
            return ""
        return (
            f"torch {self.torch_version} is a build without CUDA: install a CUDA build of torch, or set "
            "PAGEDKERN_CUDA=1 to build the CUDA kernels beside it; then build again"
        )


# -------------------------------------------------------------------------------------------------------- ninja file


def _write_if_changed(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _link_to(link, target):
    if not (link.is_symlink() and link.readlink() == target):
        link.unlink(missing_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target, target_is_directory=True)


class NinjaBuild:
    """Writes build.ninja and config.h, runs ninja. All paths are relative to the repository, and foreign headers are
    reached by links inside the build folder, so that a build in isolation reuses the objects of the one in place."""

    def __init__(self, version):
        self.tools = Toolchain()
        self.version = version
        self.namespace = os.environ.get("PAGEDKERN_NAMESPACE", "pagedkern")
        self.dir = Path("build") / f"{sys.implementation.cache_tag}-torch{self.tools.torch_version}"
        self.deps = self.dir / "deps"
        self.outputs = []  # file names, in self.dir
        self.lines = [f"builddir = {self.dir}\n"]
        self._rules()
        self.kernels = [] if self.tools.nvcc_missing else self._kernels()
        self._op_library()
        self._vgpu_library()
        if not self.tools.nvcc_missing:
            self._vgpu_op_library()
        self._module()

    def _config_header(self):
        tools = self.tools
        strings = {
            "VERSION": self.version,
            "TORCH_BUILT_WITH": tools.torch_version,
            "SIMD_LEVELS": " ".join(SIMD_LEVELS),
            "NVCC_VERSION": tools.nvcc_version,
            "CUDA_MISSING": tools.cuda_missing,
            "VGPU_OPS_MISSING": tools.nvcc_missing,
        }
        rows = [f'#define PAGEDKERN_CONFIG_{k} "{v}"' for k, v in strings.items()]
        return "// Written by setup.py.\n#pragma once\n" + "\n".join(rows) + "\n"

    def _edge(self, rule, source, flags="", suffix=""):
        out = self.dir / "obj" / f"{source}{suffix}.o"
        self.lines.append(f"build {out}: {rule} {source}\n  flags = {flags}\n")
        return str(out)

    def _rules(self):
        cxx, env = self.tools.cxx, os.environ.get
        command = f"{cxx} {CXX_FLAGS} {env('CXXFLAGS', '')} $flags -MMD -MF $out.d -c $in -o $out"
        self.lines += [f"rule cxx\n  command = {command}\n  depfile = $out.d\n  deps = gcc\n  description = $out\n"]
        link = f"{cxx} -shared {env('LDFLAGS', '')} $in -o $out $libs"
        self.lines += [f"rule link\n  command = {link}\n  description = $out\n"]
        archive = "rm -f $out && ar rcs $out $in"
        self.lines += [f"rule archive\n  command = {archive}\n  description = $out\n"]
        if not self.tools.nvcc_missing:
            nvcc = self.tools.cuda_home / "bin/nvcc"
            command = f"{nvcc} -ccbin {shlex.split(cxx)[0]} {NVCC_FLAGS} $flags -MMD -MF $out.d -c $in -o $out"
            self.lines += [
                f"rule nvcc\n  command = {command}\n  depfile = $out.d\n  deps = gcc\n  description = $out\n"
            ]

    def _library(self, name, objects, libs, needs=None):
        needs = f" | {self.dir / needs}" if needs else ""
        self.lines.append(f"build {self.dir / name}: link {' '.join(objects)}{needs}\n  libs = {libs}\n")
        self.outputs.append(name)

    def _torch_flags(self, namespace):
        return (
            f"-isystem {self.deps}/torch/include -DTORCH_TARGET_VERSION={TORCH_TARGET} -I{self.dir} "
            f"-DPAGEDKERN_NAMESPACE={namespace}"
        )

    def _torch_libs(self):
        return f"-L{self.deps}/torch/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -Wl,-rpath,'$$ORIGIN/../torch/lib'"

    def _cuda_libs(self):
        lib = "lib64" if (self.tools.cuda_home / "lib64").exists() else "lib"
        return f"-L{self.deps}/cuda/{lib} -lcudart_static -ldl -lrt -lpthread"

    def _kernels(self):
        return [self._edge("nvcc", s, SM_90A) for s in CUDA] + [self._edge("cxx", s) for s in CUDA_DISPATCH]

    def _op_library(self):
        flags, libs, objects = self._torch_flags(self.namespace), self._torch_libs(), []
        if not self.tools.cuda_missing:
            flags += f" -DPAGEDKERN_WITH_CUDA -isystem {self.deps}/cuda/include"
            libs += " " + self._cuda_libs()
            objects += self.kernels
        # A suffix, so that switching CUDA off and on again finds both kinds of objects still there.
        suffix = "" if self.tools.cuda_missing else ".cuda"
        objects += [self._edge("cxx", s, flags, suffix) for s in BINDINGS]
        objects += [self._edge("cxx", s) for s in CPU]
        for level, flags in SIMD_LEVELS.items():
            flags += " -Wno-maybe-uninitialized -Wno-uninitialized"  # GCC 12's own AVX-512 headers
            objects += [self._edge("cxx", s, f"-DPAGEDKERN_SIMD={level} {flags}", f".{level}") for s in CPU_SIMD]
        self._library("libpagedkern_ops.so", objects, f"{NO_UNDEFINED} {libs}")

    def _vgpu_library(self):
        objects = [self._edge("cxx", s, VGPU_FLAGS) for s in VGPU]
        for level, flags in VGPU_LEVELS.items():
            flags = f"{VGPU_FLAGS} -DPAGEDKERN_VGPU_LEVEL={level} {flags}"
            objects += [self._edge("cxx", s, flags, f".{level}") for s in VGPU_FAMILIES]
        self._library("libpagedkern_vgpu.so", objects, f"{NO_UNDEFINED} -lpthread")

    def _vgpu_op_library(self):
        """The CUDA kernels, and their bindings once more, for CPU tensors, with the virtual GPU's runtime below."""
        cuda = f"-isystem {self.deps}/cuda/include"
        flags = f"{self._torch_flags(self.namespace + '_vgpu')} -DPAGEDKERN_VGPU {cuda}"
        objects = [self._edge("cxx", s, flags, ".vgpu") for s in BINDINGS if s not in CPU_BINDINGS]
        runtime = [self._edge("cxx", s, f"{VGPU_FLAGS} {cuda}") for s in VGPU_RUNTIME]
        # -Bsymbolic: a real CUDA runtime that torch brought into the process must not be picked up.
        libs = f"{NO_UNDEFINED} {self._vgpu_libs()} -Wl,-Bsymbolic {self._torch_libs()}"
        self._library("libpagedkern_ops_vgpu.so", objects + self.kernels + runtime, libs, needs="libpagedkern_vgpu.so")
        # The runtime alone, to link other host code that launches kernels.
        name = "libpagedkern_vgpu_cudart.a"
        self.lines.append(f"build {self.dir / name}: archive {' '.join(runtime)}\n")
        self.outputs.append(name)

    def _vgpu_libs(self):
        return f"-L{self.dir} -lpagedkern_vgpu -Wl,-rpath,'$$ORIGIN'"

    def _module(self):
        python = sysconfig.get_path("include")
        flags = f"-I{self.dir} -isystem {self.deps}/pybind11/include -isystem {python}"
        objects = [self._edge("cxx", s, flags) for s in MODULE]
        name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        self._library(name, objects, self._vgpu_libs(), needs="libpagedkern_vgpu.so")

    def write(self):
        _link_to(self.deps / "torch", self.tools.torch_dir)
        _link_to(self.deps / "pybind11", self.tools.pybind11_dir)
        if not self.tools.nvcc_missing:
            _link_to(self.deps / "cuda", self.tools.cuda_home)
        _write_if_changed(self.dir / "config.h", self._config_header())
        _write_if_changed(self.dir / "build.ninja", "\n".join(self.lines))

    def run(self):
        jobs = os.environ.get("PAGEDKERN_JOBS") or str(os.cpu_count())
        command = [_ninja(), "-f", str(self.dir / "build.ninja"), "-j", jobs, "-k", "0"]
        if subprocess.run(command).returncode != 0:
            sys.exit("pagedkern: the build failed, see above")


# ------------------------------------------------------------------------------------------------------------- setup


class BuildWithNinja(build_ext):
    """`build_ext` that hands the work to ninja and copies the two binaries to where the package is."""

    def finalize_options(self):
        super().finalize_options()
        self.ninja = NinjaBuild(self.distribution.get_version())

    def run(self):
        build = self.ninja
        build.dir.mkdir(parents=True, exist_ok=True)
        # Two builds of one checkout at once would write the same objects.
        with open(build.dir / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            build.write()
            if build.tools.cuda_missing:
                print(f"pagedkern: the CUDA kernels are left out: {build.tools.cuda_missing}", flush=True)
            build.run()
            for name in build.outputs:
                self._install(build.dir / name, self._package(self.inplace) / name)

    def _package(self, inplace):
        return Path("pagedkern") if inplace else Path(self.build_lib, "pagedkern")

    def _install(self, binary, target):
        """By rename: a process that has the old library mapped keeps it."""
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copy2(binary, temporary)
        os.replace(temporary, target)

    def get_outputs(self):
        return [str(self._package(self.inplace) / name) for name in self.ninja.outputs]

    def get_output_mapping(self):
        names = self.ninja.outputs if self.inplace else []
        return {str(self._package(False) / name): str(self._package(True) / name) for name in names}


class CleanBuildPy(build_py):
    """`build_py` that starts from nothing, so that a file deleted from the tree does not live on in the wheel."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


# Folder -> package where the two differ: a top-level import named triton_kernels would shadow Triton's own package.
PACKAGE_DIR = {"pagedkern.triton_kernels": "triton_kernels"} if Path("triton_kernels").exists() else {}
PACKAGES = find_packages(include=["pagedkern", "pagedkern.*", "engine_min", "engine_min.*"])
PACKAGES += [f"pagedkern.{p}" for p in find_packages(include=["triton_kernels", "triton_kernels.*"])]
PACKAGES = sorted(set(PACKAGES))  # in the tree pagedkern/triton_kernels is a link to that folder
SOURCES = BINDINGS + CPU + CPU_SIMD + CUDA + CUDA_DISPATCH + MODULE + VGPU + VGPU_FAMILIES + VGPU_RUNTIME
HEADERS = sorted(str(path) for suffix in ("h", "cuh", "inc") for path in Path("csrc").rglob(f"*.{suffix}"))

if __name__ == "__main__":
    setup(
        packages=PACKAGES,
        package_dir=PACKAGE_DIR,
        ext_modules=[Extension("pagedkern._C", SOURCES, depends=HEADERS)],
        cmdclass={"build_ext": BuildWithNinja, "build_py": CleanBuildPy},
        include_package_data=False,
        zip_safe=False,
    )
