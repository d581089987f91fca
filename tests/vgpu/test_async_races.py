"""Orderings between the generic and the async proxy, and between warps, each with a faulty and a right twin."""

import numpy as np
import pytest
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
"""
WRITE = "  ld.global.v4.u32 {%r40,%r41,%r42,%r43}, [%d11];\n  st.shared.v4.u32 [%r2], {%r40,%r41,%r42,%r43};\n"
STORE = "  @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 1024;\n  cp.async.bulk.commit_group;\n"
DONE = "  cp.async.bulk.wait_group 0;\n"


def build(body, shared=SHARED):
    return module(load_params(2) + START + body, params=pointers(2), shared=shared)


def rows():
    out = aligned((64, 16))
    out[:] = np.random.default_rng(0).integers(0, 256, (64, 16))
    return out


def in_every_order(body):
    for mode, seed in ORDERS:
        source, out = rows(), aligned((64, 16))
        with order(mode, seed):
            build(body).launch("k", 1, 64, [source, out])
        np.testing.assert_array_equal(out, source)


@pytest.mark.parametrize(
    "publish",
    [
        "  fence.proxy.async;\n  bar.sync 0;\n",  # by every writer, then a barrier
        "  bar.sync 0;\n  fence.proxy.async.shared::cta;\n",  # by the issuer, after the barrier
        "  bar.sync 0;\n  @%p1 fence.proxy.async;\n",
    ],
)
def test_published_writes(publish):
    in_every_order(WRITE + publish + STORE + DONE)


@pytest.mark.parametrize(
    "publish,kind,text",
    [
        ("  bar.sync 0;\n", "async", "no fence.proxy.async after the write"),
        ("  bar.sync 0;\n  fence.acq_rel.cta;\n", "async", "no fence.proxy.async after the write"),
        ("  @%p1 fence.proxy.async;\n  bar.sync 0;\n", "async", "no fence.proxy.async after the write"),
        ("  fence.proxy.async;\n", "race", "no barrier orders them"),
    ],
)
def test_unpublished_writes(publish, kind, text):
    with vgpu.session(checks=("async", "races")), pytest.raises(vgpu.KernelFault, match=text) as caught:
        # the issuer is in the last warp to run: the other one has written by then
        late = "  setp.eq.u32 %p1, %r0, 32;\n"
        build(WRITE + late + publish + STORE + DONE).launch("k", 1, 64, [rows(), aligned(1024)])
    assert caught.value.kind == kind


def test_write_after_the_fence_needs_another():
    body = WRITE + "  fence.proxy.async;\n  bar.sync 0;\n  @%p1 st.shared.u32 [%r2], %r0;\n" + STORE + DONE
    with pytest.raises(vgpu.KernelFault, match="no fence.proxy.async") as caught:
        build(body).launch("k", 1, 64, [rows(), aligned((64, 16))])
    assert caught.value.kind == "async"


LOAD = """
  @%p1 mbarrier.init.shared.b64 [%r3], 1;
  bar.sync 0;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 1024;
  @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d0], 1024, [%r3];
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0;
  @!%p3 bra WAIT;
"""


def test_async_writes_need_no_fence_for_the_async_proxy():
    in_every_order(LOAD + STORE + DONE)


def test_generic_write_over_loaded_bytes_needs_a_fence():
    body = LOAD + "  bar.sync 0;\n  @%p1 st.shared.u32 [%r2], %r0;\n" + STORE + DONE
    with pytest.raises(vgpu.KernelFault, match="no fence.proxy.async"):
        build(body).launch("k", 1, 64, [rows(), aligned((64, 16))])


@pytest.mark.parametrize("wait", ["", "  cp.async.bulk.wait_group.read 1;\n"])
def test_source_of_a_store_is_not_free(wait):
    body = WRITE + "  fence.proxy.async;\n  bar.sync 0;\n" + STORE + wait + "  bar.sync 0;\n" + WRITE + DONE
    with vgpu.session(async_completion="late"), pytest.raises(vgpu.KernelFault, match="may still read") as caught:
        build(body).launch("k", 1, 64, [rows(), aligned((64, 16))])
    assert caught.value.kind == "async"


def test_source_of_a_store_is_free_after_its_wait():
    read = "  cp.async.bulk.wait_group.read 0;\n  bar.sync 0;\n"
    in_every_order(
        WRITE + "  fence.proxy.async;\n  bar.sync 0;\n" + STORE + read + "  st.shared.u32 [%r2], %r0;\n" + DONE
    )


@pytest.mark.parametrize("value,races", [("7", False), ("%r0", True)])
def test_writes_of_equal_values_are_no_race(value, races):
    """Two warps store to one word: the same value, or each its own."""
    body = f"  mov.u32 %r20, {value};\n  st.shared.u32 [%r1], %r20;\n  bar.sync 0;\n"
    body += "  ld.shared.u32 %r21, [%r1];\n  st.global.u32 [%d12], %r21;\n"
    out = aligned((64, 4), np.uint32)
    if races:
        with pytest.raises(vgpu.KernelFault, match="races with a write") as caught:
            build(body).launch("k", 1, 64, [out, out])
        assert caught.value.kind == "race"
        return
    for seed in range(3):
        with vgpu.session(seed=seed):
            build(body).launch("k", 1, 64, [out, out])
        assert (out[:, 0] == 7).all()
