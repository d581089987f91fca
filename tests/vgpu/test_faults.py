"""Planted faults in CUDA kernels: each is caught, named and located in every order; its mended twin is right in all."""

import dataclasses
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest
from tensor_reference import ORDERS, aligned, order

from pagedkern import vgpu

NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
SOURCE = pathlib.Path(__file__).with_name("fault_kernels.cu")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if not pathlib.Path(NVCC).exists():
        pytest.skip("nvcc is not installed")
    out = tmp_path_factory.mktemp("ptx") / "fault_kernels.ptx"
    subprocess.run([NVCC, "-ptx", "-arch=sm_90a", "-std=c++17", "-lineinfo", str(SOURCE), "-o", str(out)], check=True)
    return vgpu.Module(out.read_text())


def marked_lines(name):
    """file:line of the lines where the fault of `name` may be caught."""
    mark = re.compile(rf"// FAULT {name}$")
    return {k for k, line in enumerate(SOURCE.read_text().splitlines(), 1) if mark.search(line)}


def plain(n=64):
    """x and what `o` is when the kernel is right."""
    x = aligned(n, np.int32)
    x[:] = np.arange(n) + 100
    return x, x.copy()


def rotated():
    x, want = plain()
    return x, np.roll(want, -1)


def indices():
    x = aligned(64, np.int32)
    x[:] = np.random.default_rng(0).integers(0, 16, 64)
    return x, x[x]


def quarter_sums():
    x, _ = plain()
    v = x[:32].reshape(8, 4)
    return x, np.tile(v[:, 0] + v[:, 3], 8)


def pair_sums():
    x, _ = plain()
    return x, np.tile(x[0::2] + x[1::2], 2)


@dataclasses.dataclass
class Fault:
    """kinds and text: of the fault; the order decides where there are two. data: x and the right `o`. n: the third
    argument. block_at: its block, where only one can be. threads: its thread, of the warps that may come first."""

    kinds: str
    text: str
    data: object = plain
    n: int = 64
    grid: int = 1
    block: int = 64
    cluster: int = 1
    shared_bytes: int = 0
    block_at: tuple | None = (0, 0, 0)
    threads: tuple | None = None


def reversed_():
    x, want = plain()
    return x, want[::-1]


def tripled():
    x, want = plain()
    return x, 3 * want


UNORDERED = (
    r"read at 'g_partial' \+ \d+ in global memory races with a write by warp [01] of block \([012],0,0\): no fence"
)

FAULTS = {
    "past_the_end": Fault(
        "out_of_bounds",
        r"read of 4 bytes at global address 0x[0-9a-f]+, \d+ bytes after the end of 'argument 0' \(256 bytes",
        grid=2,
        block=63,
        block_at=(1, 0, 0),
        threads=(1, 32),
    ),
    "before_the_start": Fault(
        "out_of_bounds",
        "4 bytes before 'argument 0'",
        lambda: (plain()[0], np.r_[plain()[1][:1], plain()[1][:-1]]),
        threads=(0, 32),
    ),
    "write_past_the_end": Fault(
        "out_of_bounds",
        "write of 4 bytes at global address .*after the end of 'argument 1'",
        lambda: (plain()[0], np.full(64, 100)),
        block=96,
        threads=(64,),
    ),
    "shared_past_the_end": Fault("out_of_bounds", "outside the block's 256 bytes", rotated, threads=(63,)),
    "dynamic_shared_past_the_end": Fault(
        "out_of_bounds", "outside the block's 256 bytes", shared_bytes=256, threads=(0, 32)
    ),
    "local_past_the_end": Fault("out_of_bounds", "read of 4 bytes at local address .*thread's 64 bytes", indices),
    "misaligned_vector": Fault("misaligned", "16-byte alignment", quarter_sums, threads=(0, 32)),
    "misaligned_shared_vector": Fault("misaligned", "shared address .* 8-byte alignment", pair_sums, threads=(0, 32)),
    "unwritten_shared": Fault("uninitialized", "shared address .* that nothing wrote", reversed_, threads=(0, 32)),
    "unwritten_local": Fault("uninitialized", "local address .* that nothing wrote", indices),
    "race_read_after_write": Fault("race", "races with a (read|write) by warp [01]: no barrier", reversed_),
    "race_write_after_read": Fault(
        "race",
        "races with a (read|write) by warp [01]: no barrier",
        lambda: (plain()[0], 3 * plain()[1][::-1] + 3),
    ),
    "race_write_write": Fault(
        "race", "write at shared .* races with a write by warp", lambda: (plain()[0], np.tile(plain()[1][:32], 2))
    ),
    "race_named_barrier": Fault("race", "races with a (read|write) by warp [0-3]: no barrier", block=128),
    "race_in_cluster": Fault(
        "race",
        "races with a (read|write) by warp [01] of the cluster's block [01]",
        grid=2,
        cluster=2,
        block_at=None,
    ),
    "cluster_memory_after_exit": Fault(
        "out_of_bounds race",
        "a block of the cluster that has exited|the block exits while warp [01] of the cluster's block 0",
        grid=2,
        cluster=2,
        block_at=None,
    ),
    "half_a_warp_at_a_barrier": Fault(
        "divergent_barrier", r"16 lane\(s\) of the warp have exited and never reach the barrier"
    ),
    "warp_leaves": Fault(
        "divergent_barrier", r"exits while 1 warp\(s\) wait at barrier 0|1 warp\(s\) of the block have exited"
    ),
    "barrier_counts_differ": Fault(
        "divergent_barrier deadlock", "barrier 1 is used with 32 threads while others wait|waits for barrier 1"
    ),
    "lanes_miss_syncwarp": Fault(
        "divergent_barrier", "lanes of one warp wait at different warp-synchronous instructions"
    ),
    "crossed_barriers": Fault("deadlock", "no warp can move"),
    "cluster_barrier_without_partner": Fault("deadlock", "no warp can move", grid=2, cluster=2),
    "trap": Fault("trap", "trap", threads=(40,)),
    "partials_without_release": Fault("race", UNORDERED, tripled, grid=3, block_at=None),
    "partials_without_acquire": Fault("race", UNORDERED, tripled, grid=3, block_at=None),
    "release_of_a_narrow_scope": Fault("race", UNORDERED, tripled, grid=3, block_at=None),
    "blocks_write_one_word": Fault("race", "write at 'argument 1' .*of block", grid=2, block_at=None),
    "warps_meet_in_global_memory": Fault("race", "read at 'g_partial' .*by warp [01]: no barrier", reversed_),
    "written_behind_the_read_only_cache": Fault(
        "race", r"non-coherent read \(ld.global.nc\) at 'argument 1' \+ \d+ of memory that this launch writes"
    ),
    "blocks_share_a_word": Fault("race", "write at 'argument 1' .*of block", grid=2, block_at=None),
}


def launch(kernels, name, fault, twin):
    x, want = fault.data()
    o = aligned(64, np.int32)
    settings = dict(grid=fault.grid, block=fault.block, cluster=fault.cluster, shared_bytes=fault.shared_bytes)
    kernels.launch(f"{name}_{twin}", args=[x, o, fault.n], **settings)
    return o, want


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught_and_located(kernels, name):
    fault = FAULTS[name]
    for mode, seed in ORDERS:
        with order(mode, seed), pytest.raises(vgpu.KernelFault, match=fault.text) as caught:
            launch(kernels, name, fault, "bad")
        error = caught.value
        assert error.kind in fault.kinds.split()
        assert error.kernel == f"{name}_bad"
        if fault.block_at is not None:
            assert error.block == fault.block_at
        assert error.thread[0] in (fault.threads or range(fault.block))
        assert error.thread[1:] == (0, 0)
        file, line = error.source.rsplit(":", 1)
        assert pathlib.Path(file).name == SOURCE.name
        assert int(line) in marked_lines(name), str(error)
        assert error.ptx_line > 0
        assert f"PTX line {error.ptx_line}: {error.instruction}" in str(error)


@pytest.mark.parametrize("name", FAULTS)
def test_mended_twin_is_right(kernels, name):
    for mode, seed in ORDERS:
        with order(mode, seed):
            o, want = launch(kernels, name, FAULTS[name], "good")
        np.testing.assert_array_equal(o, want)


def test_deadlock_says_who_waits_for_what(kernels):
    with pytest.raises(vgpu.KernelFault) as caught:
        launch(kernels, "crossed_barriers", FAULTS["crossed_barriers"], "bad")
    text = str(caught.value)
    assert re.search(r"warp 0 of block \(0,0,0\) waits for barrier 1 at PTX line \d+: (bar|barrier)\.sync", text)
    assert re.search(r"warp 1 of block \(0,0,0\) waits for barrier 2 at PTX line \d+: (bar|barrier)\.sync", text)


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_unwritten_global_memory(kernels, mode, seed):
    """Of an argument that counts as unwritten; the same bytes as an ordinary argument may be read."""
    scratch, o = np.zeros(64, np.int32), np.zeros(64, np.int32)
    with order(mode, seed):
        with pytest.raises(vgpu.KernelFault, match=r"'argument 0' \+ 20, that nothing wrote") as caught:
            kernels.launch("unwritten_global_bad", 1, 64, [vgpu.Uninitialized(scratch), o, 64])
        assert (caught.value.kind, caught.value.thread) == ("uninitialized", (4, 0, 0))
        assert int(caught.value.source.rsplit(":", 1)[1]) in marked_lines("unwritten_global")
        kernels.launch("unwritten_global_bad", 1, 64, [scratch, o, 64])
        kernels.launch("unwritten_global_good", 1, 64, [vgpu.Uninitialized(scratch), vgpu.Uninitialized(o), 64])
    np.testing.assert_array_equal(o, np.arange(64) ^ 1)


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_use_after_free(kernels, mode, seed):
    alive, gone, o = np.arange(64, dtype=np.int32), np.zeros(64, np.int32), np.zeros(64, np.int32)
    nodes = np.array([a.__array_interface__["data"][0] for a in (alive, gone)], np.uint64)
    with order(mode, seed):
        with pytest.raises(vgpu.KernelFault, match="use after free of 'memory 1'") as caught:
            kernels.launch("chased_pointer_bad", 1, 64, [nodes, o, 64], memory=[alive, vgpu.Freed(gone)])
        assert caught.value.kind == "out_of_bounds"
        assert int(caught.value.source.rsplit(":", 1)[1]) in marked_lines("chased_pointer")
        with pytest.raises(vgpu.KernelFault, match="global address"):
            kernels.launch("chased_pointer_bad", 1, 64, [nodes, o, 64], memory=[alive])
        kernels.launch("chased_pointer_good", 1, 64, [nodes, o, 64], memory=[alive, vgpu.Freed(gone)])
    np.testing.assert_array_equal(o, alive)


def test_checks_can_be_left_out(kernels):
    """Without its check a race runs on, and the poison of unwritten shared memory shows in the result."""
    with vgpu.session(checks=("barriers",)):
        launch(kernels, "race_write_after_read", FAULTS["race_write_after_read"], "bad")
        o, _ = launch(kernels, "unwritten_shared", FAULTS["unwritten_shared"], "bad")
    assert (o[:32] == -1).all()
