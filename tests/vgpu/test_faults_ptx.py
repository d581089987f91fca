"""Planted faults that CUDA C++ cannot write down, launches that hardware refuses, and seeds that disagree."""

import re

import numpy as np
import pytest
from tensor_reference import ORDERS, aligned, load_params, module, order, pointers

from pagedkern import vgpu

START = load_params(2) + "  mov.u32 %r0, %tid.x;\n  mul.wide.u32 %d10, %r0, 4;\n  add.s64 %d11, %d1, %d10;\n"
OUT = "  st.global.u32 [%d11], %r1;\n"


def build(body, **declarations):
    return module(START + body + OUT, params=pointers(2), **declarations)


def run(kernel, block=32, **settings):
    source, out = aligned(64, np.uint32), aligned(64, np.uint32)
    source[:] = np.arange(64)
    kernel.launch("k", 1, block, [source, out], **settings)
    return out


LOCAL = dict(regs=".local .align 16 .b8 depot[64];")
GLOBAL = dict(shared=".global .align 16 .u32 table[4] = {1, 2, 3, 4};")
CONST = dict(shared=".const .align 16 .u32 fixed[4] = {5, 6, 7, 8};")
SHARED = dict(shared=".shared .align 16 .b8 tile[128];")
WRITE_DEPOT = (
    "  mov.u32 %r1, 7;\n  mov.u64 %d2, depot;\n  cvta.local.u64 %d3, %d2;\n  st.local.v2.u32 [%d2], {%r1,%r1};\n"
)

# name: (declarations, faulty body, mended body, kind, text)
FAULTS = {
    "parameter beyond the last": (
        {},
        "  mov.b64 %d2, p0;\n  mad.wide.u32 %d2, %r0, 8, %d2;\n  ld.param.u32 %r1, [%d2];\n",
        "  mov.b64 %d2, p0;\n  and.b32 %r2, %r0, 1;\n  mad.wide.u32 %d2, %r2, 8, %d2;\n  ld.param.u32 %r2, [%d2];\n"
        "  mov.u32 %r1, 0;\n",
        "out_of_bounds",
        "read of 4 bytes at parameter offset 16 of 16",
    ),
    "misaligned parameter": (
        {},
        "  mov.b64 %d2, p0;\n  add.s64 %d2, %d2, 2;\n  ld.param.u32 %r1, [%d2];\n",
        "  mov.b64 %d2, p0;\n  add.s64 %d2, %d2, 4;\n  ld.param.u32 %r1, [%d2];\n  mov.u32 %r1, 0;\n",
        "misaligned",
        "parameter address 0x2 needs 4-byte alignment",
    ),
    "null pointer": (
        {},
        "  mov.u64 %d2, 0;\n  ld.global.u32 %r1, [%d2];\n",
        "  mov.u64 %d2, 0;\n  add.s64 %d2, %d0, %d2;\n  ld.global.u32 %r1, [%d2];\n",
        "out_of_bounds",
        "read of 4 bytes at global address 0x0, ",
    ),
    "null pointer in shared memory": (
        SHARED,
        "  mov.u32 %r1, 3;\n  mov.u32 %r2, 0;\n  st.shared.u32 [%r2], %r1;\n",
        "  mov.u32 %r1, 3;\n  mov.u32 %r2, tile;\n  st.shared.u32 [%r2], %r1;\n",
        "out_of_bounds",
        "shared address 0x0, outside the block's",
    ),
    "no such address window": (
        {},
        "  mov.u64 %d2, 0xb000000000000000;\n  ld.u32 %r1, [%d2];\n",
        "  ld.u32 %r1, [%d0];\n",
        "out_of_bounds",
        "read of 4 bytes at 0xb000000000000000",
    ),
    "vector over the end": (
        {},
        "  ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%d0+240];\n  add.s64 %d2, %d0, 8;\n"
        "  ld.global.v2.u32 {%r1,%r2}, [%d2+248];\n",
        "  ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%d0+240];\n  ld.global.v2.u32 {%r1,%r2}, [%d0+248];\n",
        "out_of_bounds",
        "read of 8 bytes at global address .*, 0 bytes after the end of 'argument 0'",
    ),
    "variable of the module": (
        GLOBAL,
        "  ld.global.u32 %r1, [table+16];\n",
        "  ld.global.u32 %r1, [table+12];\n",
        "out_of_bounds",
        r"after the end of 'table' \(16 bytes",
    ),
    "before a variable of the module": (
        GLOBAL,
        "  ld.global.u32 %r1, [table+-4];\n",
        "  ld.global.u32 %r1, [table];\n",
        "out_of_bounds",
        "4 bytes before 'table'",
    ),
    "write to constant memory": (
        CONST,
        "  mov.u32 %r1, 1;\n  mov.u64 %d2, fixed;\n  cvta.const.u64 %d2, %d2;\n  st.u32 [%d2], %r1;\n",
        "  mov.u64 %d2, fixed;\n  cvta.const.u64 %d2, %d2;\n  ld.u32 %r1, [%d2];\n",
        "out_of_bounds",
        "'fixed' is read-only",
    ),
    "atomic past the end": (
        {},
        "  mov.u32 %r2, 1;\n  atom.global.add.u32 %r1, [%d0+256], %r2;\n",
        "  mov.u32 %r2, 1;\n  atom.global.add.u32 %r1, [%d0+252], %r2;\n",
        "out_of_bounds",
        "atomic access of 4 bytes at global address",
    ),
    "misaligned atomic": (
        {},
        "  mov.u32 %r2, 1;\n  atom.global.add.u32 %r1, [%d0+2], %r2;\n",
        "  mov.u32 %r2, 1;\n  atom.global.add.u32 %r1, [%d0+4], %r2;\n",
        "misaligned",
        "atomic access at global address .* 4-byte alignment",
    ),
    "atomic on shared memory nothing wrote": (
        SHARED,
        "  mov.u32 %r2, 1;\n  atom.shared.add.u32 %r1, [tile], %r2;\n",
        "  mov.u32 %r2, 1;\n  setp.eq.u32 %p1, %r0, 0;\n  @%p1 st.shared.u32 [tile], %r2;\n  bar.sync 0;\n"
        "  atom.shared.add.u32 %r1, [tile], %r2;\n",
        "uninitialized",
        "shared address .* that nothing wrote",
    ),
    "misaligned local vector": (
        LOCAL,
        WRITE_DEPOT + "  ld.local.v2.u32 {%r1,%r2}, [%d2+4];\n",
        WRITE_DEPOT + "  ld.local.v2.u32 {%r1,%r2}, [%d2];\n",
        "misaligned",
        "local address .* 8-byte alignment",
    ),
    "local through a generic pointer": (
        LOCAL,
        WRITE_DEPOT + "  ld.u32 %r1, [%d3+64];\n",
        WRITE_DEPOT + "  ld.u32 %r1, [%d3];\n",
        "out_of_bounds",
        "local address .* outside the thread's 64 bytes",
    ),
    "register nothing wrote": ({}, "", "  mov.u32 %r1, 0;\n", "uninitialized", "register %r1 is read before anything"),
    "register some lanes wrote": (
        {},
        "  setp.lt.u32 %p1, %r0, 9;\n  @%p1 mov.u32 %r1, 4;\n",
        "  setp.lt.u32 %p1, %r0, 9;\n  mov.u32 %r1, 3;\n  @%p1 mov.u32 %r1, 4;\n",
        "uninitialized",
        "register %r1 is read before anything",
    ),
    "register one branch wrote": (
        {},
        "  setp.lt.u32 %p1, %r0, 9;\n  @%p1 bra SKIP;\n  mov.u32 %r1, 4;\nSKIP:\n",
        "  setp.lt.u32 %p1, %r0, 9;\n  mov.u32 %r1, 5;\n  @%p1 bra SKIP;\n  mov.u32 %r1, 4;\nSKIP:\n",
        "uninitialized",
        "register %r1 is read before anything",
    ),
    "predicate nothing wrote": (
        {},
        "  selp.u32 %r1, 1, 2, %p5;\n",
        "  setp.eq.u32 %p5, %r0, 1;\n  selp.u32 %r1, 1, 2, %p5;\n",
        "uninitialized",
        "register %p5 is read before anything",
    ),
    "guard nothing wrote": (
        {},
        "  mov.u32 %r1, 2;\n  @%p5 mov.u32 %r1, 3;\n",
        "  mov.u32 %r1, 2;\n  setp.eq.u32 %p5, %r0, 1;\n  @%p5 mov.u32 %r1, 3;\n",
        "uninitialized",
        "register %p5 is read before anything",
    ),
    "barrier that does not exist": (
        {},
        "  mov.u32 %r1, 16;\n  bar.sync %r1;\n",
        "  mov.u32 %r1, 15;\n  bar.sync %r1;\n",
        "invalid",
        "barrier 16 does not exist",
    ),
    "barrier count": (
        {},
        "  mov.u32 %r1, 40;\n  bar.sync 1, %r1;\n",
        "  mov.u32 %r1, 32;\n  bar.sync 1, %r1;\n",
        "invalid",
        "barrier thread count 40 is no multiple of 32",
    ),
    "shuffle of lanes that are elsewhere": (
        {},
        "  mov.u32 %r1, 1;\n  setp.lt.u32 %p1, %r0, 16;\n  @%p1 bra HALF;\n"
        "  shfl.sync.bfly.b32 %r1, %r1, 1, 31, 0xffffffff;\n  bra END;\nHALF:\n"
        "  shfl.sync.bfly.b32 %r1, %r1, 1, 31, 0xffffffff;\nEND:\n",
        "  mov.u32 %r1, 1;\n  setp.lt.u32 %p1, %r0, 16;\n  @%p1 bra HALF;\n"
        "  shfl.sync.bfly.b32 %r1, %r1, 1, 31, 0xffff0000;\n  bra END;\nHALF:\n"
        "  shfl.sync.bfly.b32 %r1, %r1, 1, 31, 0x0000ffff;\nEND:\n",
        "divergent_barrier",
        "wait at different warp-synchronous instructions",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    declarations, bad, _, kind, text = FAULTS[name]
    kernel = build(bad, **declarations)
    for mode, seed in ORDERS:
        with order(mode, seed), pytest.raises(vgpu.KernelFault, match=text) as caught:
            run(kernel)
        error = caught.value
        assert (error.kind, error.kernel, error.block) == (kind, "k", (0, 0, 0))
        assert error.source is None
        assert f"PTX line {error.ptx_line}: {error.instruction}" in str(error)


@pytest.mark.parametrize("name", FAULTS)
def test_mended_twin_runs_alike_in_every_order(name):
    declarations, _, good, _, _ = FAULTS[name]
    kernel = build(good, **declarations)
    results = []
    for mode, seed in ORDERS:
        with order(mode, seed):
            results.append(run(kernel))
    for result in results[1:]:
        if name == "atomic past the end":
            result, results[0] = np.sort(result), np.sort(results[0])
        np.testing.assert_array_equal(result, results[0])


def test_end_of_one_view_is_not_the_start_of_the_next():
    """One access never runs from an allocation into its neighbour, even where nothing lies between them."""
    room, out = aligned(64, np.uint32), aligned(64, np.uint32)
    kernel = build("  ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%d0+16];\n")
    kernel.launch("k", 1, 32, [room[:8], out])
    with pytest.raises(vgpu.KernelFault, match="running over the end of 'argument 0'"):
        kernel.launch("k", 1, 32, [room[:6], out], memory=[room[6:]])


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_misaligned_tensor_map(mode, seed):
    body = "  mov.u32 %r1, 0;\n  add.s64 %d2, %d0, {at};\n"
    body += "  cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%d2, {{%r1}}];\n"
    maps, out = aligned(256), aligned(64, np.uint32)
    data = np.frombuffer(vgpu.tensor_map(out, (32,)).data, np.uint8)
    with order(mode, seed):
        maps[64:192] = data
        build(body.format(at=64)).launch("k", 1, 32, [maps, out])
        maps[16:144] = data
        with pytest.raises(vgpu.KernelFault, match="a tensor map needs 64-byte alignment") as caught:
            build(body.format(at=16)).launch("k", 1, 32, [maps, out])
    assert caught.value.kind == "misaligned"


def test_array_with_negative_strides():
    """Its address is that of its first element; all of it, and no more, may be read."""
    room, out = aligned(64, np.uint32), aligned(64, np.uint32)
    room[:] = np.arange(64)
    back = "  mul.wide.u32 %d2, %r0, 8;\n  sub.s64 %d2, %d0, %d2;\n  ld.global.u32 %r1, [%d2];\n"
    kernel = build(back)
    kernel.launch("k", 1, 32, [room[63:0:-2], out])
    np.testing.assert_array_equal(out[:32], room[63:0:-2])
    with pytest.raises(vgpu.KernelFault, match="8 bytes before 'argument 0'"):
        kernel.launch("k", 1, 32, [room[63:2:-2], out])


def test_unread_registers_may_stay_unwritten():
    kernel = build("  mov.u32 %r1, 1;\n  setp.gt.u32 %p1, %r0, 99;\n  @%p1 add.u32 %r1, %r2, %r3;\n")
    assert (run(kernel)[:32] == 1).all()


def test_memory_that_took_the_place_of_freed_memory():
    room, out = aligned(64, np.uint32), aligned(64, np.uint32)
    kernel = build("  ld.global.u32 %r1, [%d0];\n")
    kernel.launch("k", 1, 32, [room, out], memory=[vgpu.Freed(room)])
    with pytest.raises(vgpu.KernelFault, match="use after free of 'argument 0'"):
        kernel.launch("k", 1, 32, [vgpu.Freed(room), out])


# ---- launches

KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p0) {directives}
{{
  .shared .align 16 .b8 fixed[{shared}];
  ret;
}}
"""
REFUSED = {
    "threads": ({}, dict(block=1056), "more than 1024 threads"),
    "threads in z": ({}, dict(block=(1, 1, 65)), "z at most 64"),
    "grid in y": ({}, dict(grid=(1, 65536, 1)), "too large"),
    "grid in z": ({}, dict(grid=(1, 1, 65536)), "too large"),
    "shared memory": ({}, dict(shared_bytes=227 * 1024), "shared memory, a block has at most 232448"),
    "cluster": ({}, dict(grid=32, cluster=32), "more than 16 blocks"),
    "cluster that does not divide": ({}, dict(grid=(4, 3), cluster=(2, 2)), "does not divide the grid"),
    "required threads": (dict(directives=".reqntid 64, 1, 1"), dict(block=32), "requires"),
    "most threads": (dict(directives=".maxntid 64, 1, 1"), dict(block=96), "bound of 64 threads"),
    "required cluster": (
        dict(directives=".explicitcluster .reqnctapercluster 2, 1, 1"),
        dict(grid=4, cluster=4),
        "requires",
    ),
    "largest cluster": (dict(directives=".maxclusterrank 2"), dict(grid=4, cluster=4), "maxclusterrank"),
    "registers": (dict(directives=".maxnreg 128"), dict(block=544), "65536 registers"),
    "too few arguments": ({}, dict(args=[]), "got 0 arguments, expected 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_launch(name):
    text, settings, message = REFUSED[name]
    kernel = vgpu.Module(KERNEL.format(**({"directives": "", "shared": 16} | text)))
    launch = {"grid": 1, "block": 32, "args": [np.zeros(1)]} | settings
    with vgpu.session() as session, pytest.raises(vgpu.LaunchError, match=message):
        kernel.launch("k", **launch)
    assert session.reports == []


def test_launches_at_the_limits():
    kernel = vgpu.Module(KERNEL.format(directives="", shared=16))
    for settings in (
        dict(block=1024),
        dict(block=(16, 1, 64)),
        dict(shared_bytes=227 * 1024 - 16),
        dict(grid=16, cluster=16),
        dict(grid=(4, 6), cluster=(2, 3)),
        dict(grid=(1, 65535, 1)),
    ):
        kernel.launch("k", **({"grid": 1, "block": 32, "args": [np.zeros(1)]} | settings))
    bounded = vgpu.Module(KERNEL.format(directives=".maxnreg 128", shared=16))
    bounded.launch("k", 1, 512, [np.zeros(1)])


# ---- what no check sees shows in the orders


def test_blocks_that_race_in_global_memory_disagree_over_seeds():
    """Without the race check, blocks that overwrite each other's value still show: the last one to run differs."""
    kernel = build("  mov.u32 %r1, %ctaid.x;\n  st.global.u32 [%d1], %r1;\n  ld.global.u32 %r1, [%d1];\n")
    winners = set()
    for seed in range(6):
        source, out = aligned(64, np.uint32), aligned(64, np.uint32)
        with vgpu.session(seed=seed, threads=1, checks=["uninitialized", "barriers", "async"]):
            kernel.launch("k", 16, 32, [source, out])
        winners.add(int(out[0]))
    assert len(winners) > 1


def test_endless_loop_ends_at_the_budget():
    kernel = build("  mov.u32 %r1, 0;\nAGAIN:\n  add.u32 %r1, %r1, 1;\n  bra AGAIN;\n")
    with vgpu.session(max_warp_instructions=10_000), pytest.raises(vgpu.KernelFault, match="10000") as caught:
        run(kernel)
    assert caught.value.kind == "budget"
    assert re.search(r"PTX line \d+: ", str(caught.value))
