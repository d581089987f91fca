"""Bulk copies and reductions, st.async, red.async: every form; and what must be caught around them."""

import numpy as np
import pytest
import torch
from tensor_reference import ORDERS, aligned, load_params, module, order, pointers

from pagedkern import vgpu

SHARED = ".shared .align 128 .b8 tile[4096];\n.shared .align 8 .b64 bar;"
START = """
  mov.u32 %r0, %tid.x;
  setp.eq.u32 %p1, %r0, 0;
  mov.u32 %r1, tile;
  mad.lo.u32 %r2, %r0, 16, %r1;
  mov.u32 %r3, bar;
  mul.wide.u32 %d10, %r0, 16;
  add.s64 %d11, %d0, %d10;
  add.s64 %d12, %d1, %d10;
  mov.u64 %d20, 0;
  mov.u32 %r9, %cluster_ctarank;
"""
INIT = "  @%p1 mbarrier.init.shared.b64 [%r3], 1;\n  fence.mbarrier_init.release.cluster;\n"
WAIT = "WAIT:\n  mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0;\n  @!%p3 bra WAIT;\n"
EXPECT = "  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {bytes};\n"
BACK = "  ld.shared.v4.u32 {%r40,%r41,%r42,%r43}, [%r2];\n  st.global.v4.u32 [%d12], {%r40,%r41,%r42,%r43};\n"
FILL = "  ld.global.v4.u32 {%r40,%r41,%r42,%r43}, [%d11];\n  st.shared.v4.u32 [%r2], {%r40,%r41,%r42,%r43};\n"
PUBLISH = "  fence.proxy.async.shared::cta;\n  bar.sync 0;\n"
DONE = "  cp.async.bulk.commit_group;\n  cp.async.bulk.wait_group 0;\n"


def build(body, params=2, shared=SHARED):
    return module(load_params(params) + START + body, params=pointers(params), shared=shared)


def rows(seed=0, count=32):
    out = aligned((count, 16))
    out[:] = np.random.default_rng(seed).integers(0, 256, (count, 16))
    return out


COUNTED = ".mbarrier::complete_tx::bytes"


def load_kernel(form="cp.async.bulk.shared::cluster.global" + COUNTED, *, wait=WAIT, expect=512, size=512, last=""):
    body = INIT + "  bar.sync 0;\n" + EXPECT.format(bytes=expect)
    body += f"  @%p1 {form} [%r1], [%d0], {size}, [%r3]{last};\n" + wait + BACK
    return build(body)


@pytest.mark.parametrize("mode,seed", ORDERS)
@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("space", ["shared::cluster", "shared::cta"])
def test_load(space, hint, mode, seed):
    source, out = rows(), aligned((32, 16))
    form = f"cp.async.bulk.{space}.global{COUNTED}{hint}"
    with order(mode, seed) as session:
        load_kernel(form, last=", %d20" if hint else "").launch("k", 1, 32, [source, out])
    np.testing.assert_array_equal(out, source)
    assert session.reports[0]["bulk_bytes"] == 512
    assert session.reports[0]["unique_global_read_bytes"] == 512
    assert session.reports[0]["global_load_bytes"] == 0


@pytest.mark.parametrize("mode,seed", ORDERS)
@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
def test_multicast(hint, mode, seed):
    """Block 1 of the cluster copies to blocks 0 and 1; every block waits on its own mbarrier."""
    source, out = rows(1), np.zeros((3, 32, 16), np.uint8)
    body = INIT + EXPECT.format(bytes=512)
    body += (
        "  barrier.cluster.arrive;\n  barrier.cluster.wait;\n  setp.eq.and.u32 %p2, %r9, 1, %p1;\n  mov.u16 %h0, 3;\n"
    )
    body += (
        f"  @%p2 cp.async.bulk.shared::cluster.global{COUNTED}.multicast::cluster{hint} [%r1], [%d0], 512, [%r3], %h0"
    )
    body += (", %d20" if hint else "") + ";\n  setp.eq.u32 %p4, %r9, 2;\n  @%p4 bra END;\n" + WAIT
    body += "  mul.wide.u32 %d13, %r9, 512;\n  add.s64 %d12, %d12, %d13;\n" + BACK
    body += "END:\n  barrier.cluster.arrive;\n  barrier.cluster.wait;\n"
    with order(mode, seed) as session:
        build(body).launch("k", 3, 32, [source, out], cluster=3)
    np.testing.assert_array_equal(out[0], source)
    np.testing.assert_array_equal(out[1], source)
    assert not out[2].any()
    assert session.reports[0]["bulk_bytes"] == 512


def test_multicast_beyond_the_cluster():
    body = INIT + EXPECT.format(bytes=512) + "  mov.u16 %h0, 5;\n"
    body += f"  @%p1 cp.async.bulk.shared::cluster.global{COUNTED}.multicast::cluster [%r1], [%d0], 512, [%r3], %h0;\n"
    with pytest.raises(vgpu.KernelFault, match="multicast mask names block 2"):
        build(body).launch("k", 1, 32, [rows(), rows()])


def test_multicast_to_a_block_that_has_exited():
    body = INIT + "  barrier.cluster.arrive;\n  barrier.cluster.wait;\n  setp.eq.u32 %p2, %r9, 1;\n  @%p2 ret;\n"
    body += "  mov.u32 %r20, 0;\nSPIN:\n  add.u32 %r20, %r20, 1;\n  setp.lt.u32 %p2, %r20, 5000;\n  @%p2 bra SPIN;\n"
    body += EXPECT.format(bytes=512) + "  mov.u16 %h0, 2;\n"
    body += f"  @%p1 cp.async.bulk.shared::cluster.global{COUNTED}.multicast::cluster [%r1], [%d0], 512, [%r3], %h0;\n"
    with pytest.raises(vgpu.KernelFault, match="block 1, which has exited") as caught:
        build(body).launch("k", 2, 32, [rows(), rows()], cluster=2)
    assert caught.value.kind == "out_of_bounds"


@pytest.mark.parametrize("mode,seed", ORDERS)
@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
def test_store(hint, mode, seed):
    source, out = rows(2), aligned((32, 16))
    form = f"cp.async.bulk.global.shared::cta.bulk_group{hint}"
    body = FILL + PUBLISH + f"  @%p1 {form} [%d1], [%r1], 512{', %d20' if hint else ''};\n" + DONE
    with order(mode, seed) as session:
        build(body).launch("k", 1, 32, [source, out])
    np.testing.assert_array_equal(out, source)
    assert session.reports[0]["bulk_bytes"] == 512
    assert session.reports[0]["unique_global_write_bytes"] == 512


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_store_source_is_free_after_the_read(mode, seed):
    source, out = rows(3), aligned((32, 16))
    body = FILL + PUBLISH + "  @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 512;\n"
    body += "  cp.async.bulk.commit_group;\n  cp.async.bulk.wait_group.read 0;\n  bar.sync 0;\n"
    body += "  mov.u32 %r40, 0;\n  st.shared.v4.u32 [%r2], {%r40,%r40,%r40,%r40};\n"
    with order(mode, seed):
        build(body).launch("k", 1, 32, [source, out])
    np.testing.assert_array_equal(out, source)


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_shared_to_shared(mode, seed):
    """Each block of a pair copies its tile into the other's second half."""
    source, out = rows(4, 64), np.zeros((2, 32, 16), np.uint8)
    body = "  mul.wide.u32 %d13, %r9, 512;\n  add.s64 %d11, %d11, %d13;\n  add.s64 %d12, %d12, %d13;\n" + FILL
    body += (
        INIT + EXPECT.format(bytes=512) + "  fence.proxy.async;\n  barrier.cluster.arrive;\n  barrier.cluster.wait;\n"
    )
    body += "  xor.b32 %r10, %r9, 1;\n  mapa.shared::cluster.u32 %r11, %r1, %r10;\n  add.u32 %r11, %r11, 2048;\n"
    body += "  mapa.shared::cluster.u32 %r12, %r3, %r10;\n"
    body += f"  @%p1 cp.async.bulk.shared::cluster.shared::cta{COUNTED} [%r11], [%r1], 512, [%r12];\n"
    body += WAIT + "  add.u32 %r2, %r2, 2048;\n" + BACK + "  barrier.cluster.arrive;\n  barrier.cluster.wait;\n"
    with order(mode, seed):
        build(body).launch("k", 2, 32, [source, out], cluster=2)
    np.testing.assert_array_equal(out, source.reshape(2, 32, 16)[::-1])


def test_prefetch():
    for hint in ("", ".L2::cache_hint"):
        form = f"cp.async.bulk.prefetch.L2.global{hint} [%d0], 512{', %d20' if hint else ''}"
        report = build(f"  @%p1 {form};\n").launch("k", 1, 32, [rows(), rows()])
        assert report["unique_global_read_bytes"] == 0
    with pytest.raises(vgpu.KernelFault, match="16-byte aligned"):
        build("  @%p1 cp.async.bulk.prefetch.L2.global [%d0+8], 512;\n").launch("k", 1, 32, [rows(), rows()])


# ---- reductions ----

DTYPES = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "f32": np.float32,
    "f64": np.float64,
    "b32": np.uint32,
    "b64": np.uint64,
}
REDUCTIONS = [("add", t) for t in ("u32", "s32", "u64", "f16", "bf16", "f32", "f64")]
REDUCTIONS += [(op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16", "bf16")]
REDUCTIONS += [("inc", "u32"), ("dec", "u32")] + [(op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")]
INTO_SHARED = [(o, t) for o, t in REDUCTIONS if t in ("u32", "s32", "b32") or (o, t) == ("add", "u64")]


def values(kind, rng):
    """Two arrays of 512 bytes, and how to combine them."""
    if kind in ("f16", "bf16"):
        dtype = torch.float16 if kind == "f16" else torch.bfloat16
        return torch.randn((2, 256), generator=torch.Generator().manual_seed(1)).to(dtype)
    if kind in ("f32", "f64"):
        return rng.standard_normal((2, 512 // (int(kind[1:]) // 8))).astype(DTYPES[kind])
    info = np.iinfo(DTYPES[kind])
    wide = rng.integers(info.min, info.max, (2, 512 // info.dtype.itemsize), dtype=info.dtype, endpoint=True)
    wide[:, ::3] = rng.integers(0, 4, wide[:, ::3].shape)  # equal and neighbouring values
    return wide


def combine(op, memory, operand):
    if isinstance(memory, torch.Tensor):
        fine = {"add": torch.add, "min": torch.minimum, "max": torch.maximum}[op]
        return fine(memory.float(), operand.float()).to(memory.dtype)
    with np.errstate(over="ignore"):
        return {
            "add": lambda: memory + operand,
            "min": lambda: np.minimum(memory, operand),
            "max": lambda: np.maximum(memory, operand),
            "inc": lambda: np.where(memory >= operand, 0, memory + 1).astype(memory.dtype),
            "dec": lambda: np.where((memory == 0) | (memory > operand), operand, memory - 1).astype(memory.dtype),
            "and": lambda: memory & operand,
            "or": lambda: memory | operand,
            "xor": lambda: memory ^ operand,
        }[op]()


def equal(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b)


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("op,kind", REDUCTIONS)
def test_reduce_to_global(op, kind, hint):
    pair = values(kind, np.random.default_rng(5))
    memory, operand = (p.clone() if isinstance(p, torch.Tensor) else p.copy() for p in pair)
    want = combine(op, memory, operand)
    noftz = ".noftz" if kind in ("f16", "bf16") and op == "add" else ""
    form = f"cp.reduce.async.bulk.global.shared::cta.bulk_group{hint}.{op}{noftz}.{kind}"
    body = FILL + PUBLISH + f"  @%p1 {form} [%d1], [%r1], 512{', %d20' if hint else ''};\n" + DONE
    build(body).launch("k", 1, 32, [operand, memory])
    assert equal(memory, want)


@pytest.mark.parametrize("op,kind", INTO_SHARED)
def test_reduce_to_shared(op, kind):
    memory, operand = values(kind, np.random.default_rng(6))
    out = np.zeros_like(memory)
    body = "  add.s64 %d13, %d2, %d10;\n" + FILL
    body += "  ld.global.v4.u32 {%r40,%r41,%r42,%r43}, [%d13];\n  st.shared.v4.u32 [%r2+2048], {%r40,%r41,%r42,%r43};\n"
    body += INIT + PUBLISH + EXPECT.format(bytes=512) + "  add.u32 %r5, %r1, 2048;\n"
    form = f"cp.reduce.async.bulk.shared::cluster.shared::cta{COUNTED}.{op}.{kind}"
    body += f"  @%p1 {form} [%r5], [%r1], 512, [%r3];\n" + WAIT + "  add.u32 %r2, %r2, 2048;\n" + BACK
    build(body, params=3).launch("k", 1, 32, [operand, out, memory])
    np.testing.assert_array_equal(out, combine(op, memory, operand))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reductions_of_many_blocks_add_up(seed):
    """Every block adds its ones to the same 128 words, on as many threads as there are cores."""
    ones, memory = np.ones((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    form = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32"
    body = FILL + PUBLISH + f"  @%p1 {form} [%d1], [%r1], 512;\n" + DONE
    with vgpu.session(seed=seed):
        build(body).launch("k", 200, 32, [ones, memory])
    assert (memory == 200).all()


# ---- st.async, red.async ----


def remote(form, value, width):
    """Block 0 sends to block 1: lane k's value to word k."""
    body = INIT + "  setp.eq.and.u32 %p2, %r9, 1, %p1;\n"
    body += f"  mad.lo.u32 %r6, %r0, {width}, %r1;\n"
    fill = "  mov.u32 %r40, 5;\n" + "".join(f"  st.shared.u32 [%r6+{k}], %r40;\n" for k in range(0, width, 4))
    body += fill + f"  @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {32 * width};\n"
    body += "  barrier.cluster.arrive;\n  barrier.cluster.wait;\n  setp.eq.u32 %p4, %r9, 1;\n  @%p4 bra RECEIVE;\n"
    body += (
        "  mov.u32 %r10, 1;\n  mapa.shared::cluster.u32 %r11, %r6, %r10;\n  mapa.shared::cluster.u32 %r12, %r3, %r10;\n"
    )
    body += "  add.u32 %r20, %r0, 1;\n  add.u32 %r21, %r0, 100;\n  cvt.u64.u32 %d21, %r20;\n  cvt.u64.u32 %d22, %r21;\n"
    body += f"  {form} [%r11], {value}, [%r12];\n  bra END;\nRECEIVE:\n" + WAIT
    body += f"  mul.wide.u32 %d13, %r0, {width};\n  add.s64 %d13, %d0, %d13;\n"
    for k in range(0, width, 4):
        body += f"  ld.shared.u32 %r40, [%r6+{k}];\n  st.global.u32 [%d13+{k}], %r40;\n"
    return build(body + "END:\n  barrier.cluster.arrive;\n  barrier.cluster.wait;\n")


SENDS = []
for _type in ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
    for _vector in (1, 2, 4):
        if int(_type[1:]) // 8 * _vector <= 16:
            SENDS.append((_type, _vector))


@pytest.mark.parametrize("space", ["", ".shared::cluster"])
@pytest.mark.parametrize("weak", ["", ".weak"])
@pytest.mark.parametrize("kind,vector", SENDS)
def test_st_async(kind, vector, weak, space):
    size = int(kind[1:]) // 8
    names = ["%r20", "%r21"] if size == 4 else ["%d21", "%d22"]
    value = names[0] if vector == 1 else "{" + ",".join((names * 2)[:vector]) + "}"
    form = f"st.async{weak}{space}{COUNTED}{'' if vector == 1 else f'.v{vector}'}.{kind}"
    out = np.zeros((32, vector), np.uint32 if size == 4 else np.uint64)
    remote(form, value, size * vector).launch("k", 2, 32, [out, out], cluster=2)
    want = np.stack([np.arange(32) + (1, 100)[k % 2] for k in range(vector)], 1)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_st_async_in_every_order(mode, seed):
    out = np.zeros(32, np.uint32)
    with order(mode, seed):
        remote(f"st.async.weak.shared::cluster{COUNTED}.b32", "%r20", 4).launch("k", 2, 32, [out, out], cluster=2)
    np.testing.assert_array_equal(out, np.arange(32) + 1)


@pytest.mark.parametrize("space", ["", ".shared::cluster"])
@pytest.mark.parametrize("op,kind", INTO_SHARED)
def test_red_async(op, kind, space):
    size = int(kind[1:]) // 8
    form = f"red.async.relaxed.cluster{space}{COUNTED}.{op}.{kind}"
    out = np.zeros(32, DTYPES[kind])
    remote(form, "%r20" if size == 4 else "%d21", size).launch("k", 2, 32, [out, out], cluster=2)
    memory = np.full(32, 5 if size == 4 else 5 << 32 | 5, DTYPES[kind])
    np.testing.assert_array_equal(out, combine(op, memory, (np.arange(32) + 1).astype(DTYPES[kind])))


# ---- planted faults ----

STORE = "  @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 512;\n"
OVERWRITE = "  bar.sync 0;\n  st.shared.u32 [%r2], %r0;\n"
STORE_FAULTS = {
    "no proxy fence": (FILL + "  bar.sync 0;\n" + STORE + DONE, "async", "no fence.proxy.async"),
    "source overwritten": (FILL + PUBLISH + STORE + OVERWRITE + DONE, "async", "may still read"),
    "waited for the wrong group": (
        FILL + PUBLISH + STORE + "  cp.async.bulk.commit_group;\n  cp.async.bulk.wait_group.read 1;\n" + OVERWRITE,
        "async",
        "may still read",
    ),
    "exit without a wait": (FILL + PUBLISH + STORE, "async", "a block that exits"),
    "out of bounds": (FILL + PUBLISH + STORE.replace("[%d1]", "[%d1+16]") + DONE, "out_of_bounds", "outside"),
    "odd size": (FILL + PUBLISH + STORE.replace("512", "500") + DONE, "misaligned", "no multiple of 16"),
    "source nothing wrote": (PUBLISH + STORE + DONE, "uninitialized", "nothing wrote"),
}


@pytest.mark.parametrize("name", STORE_FAULTS)
def test_store_fault_is_caught(name):
    body, kind, text = STORE_FAULTS[name]
    with vgpu.session(async_completion="late"), pytest.raises(vgpu.KernelFault, match=text) as caught:
        build(body).launch("k", 1, 32, [rows(), aligned((32, 16))])
    assert caught.value.kind == kind


LOAD_FAULTS = {
    "no wait": (dict(wait=""), "async", "nothing waited for"),
    "wrong parity": (dict(wait=WAIT.replace("[%r3], 0", "[%r3], 1")), None, "nothing waited for|phase parity 1"),
    "fewer bytes than expected": (dict(expect=528), "deadlock", "16 bytes short"),
    "more bytes than expected": (dict(expect=496), "deadlock", "-16 bytes short"),
    "source out of bounds": (dict(size=528, expect=528), "out_of_bounds", "outside"),
}


@pytest.mark.parametrize("mode", ["late", "early", "random"])
@pytest.mark.parametrize("name", LOAD_FAULTS)
def test_load_fault_is_caught(name, mode):
    options, kind, text = LOAD_FAULTS[name]
    with vgpu.session(async_completion=mode), pytest.raises(vgpu.KernelFault, match=text) as caught:
        load_kernel(**options).launch("k", 1, 32, [rows(), aligned((32, 16))])
    if kind is None:  # the phase before the first counts as over; once the copy is done, its successor never comes
        kind = "async" if mode == "late" else caught.value.kind
        assert kind in ("async", "deadlock")
    assert caught.value.kind == kind


# Warp 1 reads the tile and sets a flag in global memory; warp 0 spins on the flag, then loads over the tile. That
# orders the two in time, but not in the memory model: only a barrier on top does. The flag itself is a race in global
# memory, so that check is off.
READ_THEN_FLAG = """
  setp.ge.u32 %p5, %r0, 32;
  @!%p5 bra SPIN;
  ld.shared.u32 %r40, [%r2];
  st.global.u32 [%d1], %r0;
  bra GO;
SPIN:
  ld.global.u32 %r41, [%d1];
  setp.lt.u32 %p6, %r41, 32;
  @%p6 bra SPIN;
GO:
"""


def load_over(barrier):
    body = FILL + INIT + "  bar.sync 0;\n" + READ_THEN_FLAG + barrier + EXPECT.format(bytes=1024)
    body += f"  @%p1 cp.async.bulk.shared::cta.global{COUNTED} [%r1], [%d0], 1024, [%r3];\n" + WAIT
    return build(body)


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_load_over_what_others_have_read(mode, seed):
    with vgpu.session(async_completion=mode, seed=seed, checks=("uninitialized", "races", "async")):
        load_over("  bar.sync 1;\n").launch("k", 1, 64, [rows(0, 64), aligned((64, 16))])


@pytest.mark.parametrize("mode", ["late", "early", "random"])
def test_load_over_what_others_may_still_read(mode):
    quiet = vgpu.session(async_completion=mode, checks=("uninitialized", "races", "async"))
    with quiet, pytest.raises(vgpu.KernelFault, match="races with a read by") as caught:
        load_over("").launch("k", 1, 64, [rows(0, 64), aligned((64, 16))])
    assert caught.value.kind == "race"
