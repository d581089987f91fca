"""The runtime in place of cudart, called by host code that nvcc compiled: launches, memory, limits, refusals."""

import ctypes
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

import pagedkern
from pagedkern import vgpu

NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
PACKAGE = pathlib.Path(pagedkern.__file__).parent
FLAGS = ["-std=c++20", "-gencode=arch=compute_90a,code=compute_90a", "--no-compress", "-cudart", "none", "-lineinfo"]
SUCCESS, INVALID_VALUE, INVALID_CONFIGURATION, TOO_LARGE, NOT_SUPPORTED, INVALID_CLUSTER = 0, 1, 9, 720, 801, 912
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNMATCHED = 900, 901, 903
FAULT = -1


def build(source, folder, *flags):
    """A shared library of one .cu file and the virtual GPU's runtime."""
    host_object, library = folder / f"{source.stem}.o", folder / f"lib{source.stem}.so"
    command = [NVCC, *(flags or FLAGS), "-Xcompiler", "-fPIC,-fvisibility=default", "-c", source, "-o", host_object]
    subprocess.run(command, check=True)
    libs = [f"-L{PACKAGE}", "-lpagedkern_vgpu_cudart", "-lpagedkern_vgpu", f"-Wl,-rpath,{PACKAGE}", "-Wl,-Bsymbolic"]
    subprocess.run(["c++", "-shared", host_object, "-o", library, *libs], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not pathlib.Path(NVCC).exists():
        pytest.skip("nvcc is not installed")
    loaded = build(pathlib.Path(__file__).with_name("runtime_host.cu"), tmp_path_factory.mktemp("runtime"))
    loaded.time_on_a_stream.restype = ctypes.c_float
    return loaded


@pytest.fixture
def call(library):
    """call(name, *arguments) -> (error, text): arrays by address, floats as float."""

    def run(name, *arguments):
        text = ctypes.create_string_buffer(4096)
        kinds = {np.ndarray: lambda a: ctypes.c_void_p(a.ctypes.data), float: ctypes.c_float}
        converted = [kinds.get(type(a), int)(a) for a in arguments]
        return getattr(library, name)(*converted, text), text.value.decode()

    return run


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_launch_and_report(call, seed):
    x, y = np.random.default_rng(seed).standard_normal((2, 1000)).astype(np.float32)
    wanted = (2.5 * x.astype(np.float64) + y).astype(np.float32)
    with vgpu.session(seed=seed) as session:
        assert call("run_saxpy", 2.5, x, y, 1000, 128) == (SUCCESS, "no error")
    np.testing.assert_array_equal(y, wanted)
    (report,) = session.reports
    assert "saxpy" in report["kernel"] and report["grid"] == (8, 1, 1) and report["global_load_bytes"] == 8000


def test_reports_go_to_the_session_that_was_open(call):
    data = np.zeros((2, 64), np.float32)
    with vgpu.session() as outer:
        call("run_saxpy", 1.0, *data, 64, 32)
        with vgpu.session() as inner:
            call("run_saxpy", 1.0, *data, 64, 64)
        call("run_saxpy", 1.0, *data, 64, 16)
    call("run_saxpy", 1.0, *data, 64, 8)
    assert [r["block"][0] for r in inner.reports] == [64]
    assert [r["block"][0] for r in outer.reports] == [32, 16]


@pytest.mark.parametrize(
    "wrong,kind,name",
    [
        (0, "uninitialized", "allocation"),
        (1, "use after free", "allocation"),
        (2, "out_of_bounds", "252 bytes"),
        (3, "use after free", "allocation"),
    ],
)
def test_a_fault_leaves_the_launch_as_an_exception(call, wrong, kind, name):
    error, text = call("run_faulty_saxpy", wrong)
    assert error == FAULT, text
    for part in (kind, name, "saxpy", "block (0,0,0), thread (", "PTX line", "runtime_host.cu:"):
        assert part in text, text


def test_checks_of_the_session_hold(call):
    with vgpu.session(checks="none"):
        assert call("run_faulty_saxpy", 0)[0] == SUCCESS
    with vgpu.session(max_warp_instructions=3):
        error, text = call("run_faulty_saxpy", 1)
    assert error == FAULT and text.startswith("budget")


def test_variables(call):
    out, counter = np.zeros(4, np.float32), np.zeros(1, np.int32)
    for calls in (1, 2):  # __device__ variables live as long as the process
        assert call("run_variables", out, counter)[0] == SUCCESS
        assert out.tolist() == [1, 2, 30, 4] and counter[0] == 5 + 10 * calls


def test_parameters_of_every_size(call):
    out = np.zeros(1)
    assert call("run_structs", out)[0] == SUCCESS
    assert out[0] == 1.5 - 2 + 7 + 100 + 3


def test_dynamic_shared_memory_needs_the_attribute(call):
    data = np.arange(256, dtype=np.int32)
    assert call("run_shared", data, 256, 1024, -1)[0] == SUCCESS
    assert data.tolist() == list(range(256))[::-1]
    error, text = call("run_shared", data, 256, 100_000, -1)
    assert error == INVALID_VALUE and "100000 bytes of dynamic shared memory, allowed are 49152" in text
    assert call("run_shared", data, 256, 100_000, 100_000)[0] == SUCCESS
    assert data.tolist() == list(range(256))
    assert call("run_shared", data, 256, 227 * 1024, 227 * 1024)[0] == SUCCESS
    error, text = call("run_shared", data, 256, 1024, 227 * 1024 + 1)
    assert error == INVALID_VALUE and "room for 232448" in text


def test_shared_memory_out_of_bounds(call):
    error, text = call("run_shared", np.zeros(256, np.int32), 256, 1020, -1)
    assert error == FAULT and "out_of_bounds" in text and "reverse_in_shared" in text


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_clusters(call, cluster):
    out = np.full(16, 99, np.uint32)
    assert call("run_cluster", out, 16, cluster, 0)[0] == SUCCESS
    assert out.tolist() == [k % cluster for k in range(16)]


def test_large_clusters_need_the_attribute(call):
    out = np.full(32, 99, np.uint32)
    error, text = call("run_cluster", out, 32, 16, 0)
    assert error == INVALID_CLUSTER and "NonPortableClusterSizeAllowed" in text and (out == 99).all()
    assert call("run_cluster", out, 32, 16, 1)[0] == SUCCESS
    assert out.tolist() == [k % 16 for k in range(32)]


def test_cluster_that_does_not_divide_the_grid(call):
    out = np.full(6, 99, np.uint32)
    error, text = call("run_cluster", out, 6, 4, 0)
    assert error == INVALID_CLUSTER and "does not divide the grid" in text and (out == 99).all()


def test_cluster_of_the_kernel_itself(call):
    out = np.full(6, 99, np.uint32)
    assert call("run_cluster_of_two", out, 6)[0] == SUCCESS
    assert out.tolist() == [0, 1] * 3
    assert call("run_cluster_of_two", out, 5)[0] == INVALID_CLUSTER


@pytest.mark.parametrize("threads,message", [(0, "empty"), (1025, "1024 threads"), (129, "bound of 128 threads")])
def test_refused_blocks(call, threads, message):
    error, text = call("run_bounded", threads)
    assert error == INVALID_CONFIGURATION and message in text
    assert call("run_bounded", 128) == (SUCCESS, "no error")


def test_cooperative_launches_must_be_resident(call):
    assert call("run_cooperative", 132 * 16)[0] == SUCCESS
    error, text = call("run_cooperative", 132 * 16 + 1)
    assert error == TOO_LARGE and "resident at once are 2112" in text


def test_an_attribute_it_does_not_know_is_refused(call):
    error, text = call("run_unknown_attribute")
    assert error == NOT_SUPPORTED and "launch attribute 13" in text


def test_the_device_is_an_h200(library):
    values = (ctypes.c_longlong * 9)()
    library.properties(values)
    assert list(values) == [132, 227 * 1024, 60 * 2**20, 9, 0, 32, 0, 1, 101]
    for attribute, value in (
        (16, 132),
        (97, 227 * 1024),
        (38, 60 * 2**20),
        (75, 9),
        (76, 0),
        (81, 228 * 1024),
        (39, 2048),
    ):
        assert library.attribute(attribute) == value
    assert library.attribute(9999) == -1


@pytest.mark.parametrize(
    "threads,shared,blocks",
    [(1024, 0, 2), (128, 0, 16), (33, 0, 32), (128, 100 * 1024, 2), (128, 227 * 1024, 1), (32, 228 * 1024, 0)],
)
def test_occupancy(library, threads, shared, blocks):
    assert library.occupancy(threads, shared) == blocks


def test_function_attributes(library):
    threads, shared = ctypes.c_int(), ctypes.c_int()
    library.describe_bounded(ctypes.byref(threads), ctypes.byref(shared))
    assert (threads.value, shared.value) == (128, 48 * 1024)


def test_copy_of_rows(call):
    source, target = np.arange(60, dtype=np.uint8), np.zeros(80, np.uint8)
    assert call("copy_rows", target, source, 16, 12, 10, 5)[0] == SUCCESS
    np.testing.assert_array_equal(target.reshape(5, 16)[:, :10], source.reshape(5, 12)[:, :10])
    assert not target.reshape(5, 16)[:, 10:].any()
    assert call("copy_rows", target, source, 16, 8, 10, 5)[0] == INVALID_VALUE


def test_streams_and_events(library):
    assert library.time_on_a_stream() >= 0


def test_a_graph_is_what_was_captured(call):
    out = np.zeros(6, np.float32)
    assert call("run_graph", out) == (SUCCESS, "no error")
    assert out.tolist() == [1, 0, 2, 2, 4, 4]


BREAKING = {
    "cudaStreamSynchronize": "Unsupported", "cudaDeviceSynchronize": "Unsupported", "cudaMalloc": "Unsupported",
    "cudaMemcpy": "Implicit", "default_stream": "Implicit", "cudaStreamWaitEvent": "NotSupported",
    "cudaFree": "Unsupported", "cudaMemset": "Implicit", "cudaEventQuery": "Unsupported",
    "cudaMallocAsync": "NotSupported",
}  # fmt: skip


@pytest.mark.parametrize("number,error", list(enumerate(BREAKING.values())), ids=list(BREAKING))
def test_calls_that_break_a_capture(call, number, error):
    at_end = np.zeros(1, np.int32)
    code, text = call("break_capture", number, at_end)
    assert code == FAULT and text == ("cudaErrorNotSupported" if "Not" in error else f"cudaErrorStreamCapture{error}")
    assert at_end[0] == CAPTURE_INVALIDATED


def test_captures_that_go_on(call):
    """A second one in the thread is refused, memory in relaxed mode is given, and neither ends the first."""
    at_end = np.full(1, -1, np.int32)
    assert call("break_capture", 10, at_end) == (FAULT, "cudaErrorNotSupported") and at_end[0] == SUCCESS
    at_end[:] = -1
    assert call("break_capture", 11, at_end) == (SUCCESS, "no error") and at_end[0] == SUCCESS


def test_captures_have_a_stream_and_a_beginning(call):
    begun = np.zeros(1, np.int32)
    code, text = call("end_what_did_not_begin", begun)
    assert begun[0] == CAPTURE_UNSUPPORTED and code == CAPTURE_UNMATCHED and "not captured" in text


def test_tensor_maps_by_the_drivers_entry_point(library):
    tensor = np.zeros(16 * 64 + 128, np.uint8)
    address = -(-tensor.ctypes.data // 128) * 128
    got = ctypes.create_string_buffer(128)
    assert library.encode(got, ctypes.c_void_p(address), ctypes.c_uint64(16)) == 0
    aligned = tensor[address - tensor.ctypes.data :][: 16 * 64].reshape(16, 64)
    assert got.raw == vgpu.tensor_map(aligned, (8, 32)).data
    assert library.encode(got, ctypes.c_void_p(address + 1), ctypes.c_uint64(16)) == 1


def test_a_real_binary_says_what_it_lacks(tmp_path):
    """Kernels compiled for the GPU alone have no text to run."""
    if not pathlib.Path(NVCC).exists():
        pytest.skip("nvcc is not installed")
    source = tmp_path / "plain.cu"
    source.write_text(
        "#include <cstdio>\n#include <exception>\n__global__ void nothing() {}\n"
        'extern "C" void run(char* text) {\n  try {\n    nothing<<<1, 1>>>();\n  } catch (const std::exception& e) {\n'
        '    std::snprintf(text, 400, "%s", e.what());\n  }\n}\n'
    )
    for flags, reason in (
        (("-gencode=arch=compute_90a,code=sm_90a",), "there is no PTX for sm_90a"),
        (("-gencode=arch=compute_90a,code=compute_90a", "--compress-mode=size"), "the PTX is compressed"),
    ):
        text = ctypes.create_string_buffer(400)
        folder = tmp_path / reason.replace(" ", "_")
        folder.mkdir()
        build(source, folder, "-cudart", "none", *flags).run(text)
        assert reason in text.value.decode() and "--no-compress" in text.value.decode()
