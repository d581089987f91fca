"""cp.async: every form, groups, mbarrier arrivals; and what must be caught around them."""

import numpy as np
import pytest
from tensor_reference import ORDERS, load_params, module, order, pointers

from pagedkern import vgpu

SHARED = ".shared .align 128 .b8 tile[4096];\n.shared .align 8 .b64 bar;"
START = """
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, tile;
  mad.lo.u32 %r2, %r0, 16, %r1;
  mul.wide.u32 %d10, %r0, 16;
  add.s64 %d11, %d0, %d10;
  add.s64 %d12, %d1, %d10;
  mov.u32 %r3, bar;
  mov.u64 %d20, 0;
"""


def read_back(size, at="%r2", to="%d12"):
    return "".join(f"  ld.shared.u32 %r40, [{at}+{k}];\n  st.global.u32 [{to}+{k}], %r40;\n" for k in range(0, size, 4))


def forms():
    for cache in ("ca", "cg"):
        for space in ("shared", "shared::cta"):
            for hint in ("", ".L2::cache_hint"):
                for prefetch in ("", ".L2::64B", ".L2::128B", ".L2::256B"):
                    yield f"cp.async.{cache}.{space}.global{hint}{prefetch}"


@pytest.mark.parametrize("form", list(forms()))
def test_form(form):
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, (32, 16)).astype(np.uint8)
    policy = ", %d20" if "cache_hint" in form else ""
    for size in (16,) if ".cg." in form else (4, 8, 16):
        for extra in ("", f", {size // 4}", ", %r7", ", %p2", ", !%p2"):
            body = load_params(2) + START + "  and.b32 %r7, %r0, 3;\n  setp.lt.u32 %p2, %r0, 5;\n"
            body += f"  {form} [%r2], [%d11], {size}{extra}{policy};\n  cp.async.wait_all;\n" + read_back(size)
            out = np.full((32, 16), 7, np.uint8)
            module(body, params=pointers(2), shared=SHARED).launch("k", 1, 32, [source, out])
            lane = np.arange(32)[:, None]
            kept = {"": size, ", %r7": lane % 4, ", %p2": (lane >= 5) * size, ", !%p2": (lane < 5) * size}
            kept = kept.get(extra, size // 4)
            want = np.where(np.arange(16)[None] < kept, source, 0)
            np.testing.assert_array_equal(out[:, :size], want[:, :size])


def two_groups(middle, after=""):
    """Tile and tile + 2048 in a group each; `middle` waits, then both are read back to p1 and p2."""
    body = load_params(3) + START + "  add.s64 %d13, %d2, %d10;\n  add.u32 %r4, %r2, 2048;\n"
    body += "  cp.async.cg.shared.global [%r2], [%d11], 16;\n  cp.async.commit_group;\n"
    body += "  cp.async.ca.shared.global [%r4], [%d11+512], 16;\n  cp.async.commit_group;\n"
    return module(body + middle + after, params=pointers(3), shared=SHARED)


READ_FIRST, READ_SECOND = read_back(16), read_back(16, "%r4", "%d13")


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_groups(mode, seed):
    source = np.random.default_rng(1).integers(0, 256, (64, 16)).astype(np.uint8)
    first, second = np.zeros((2, 32, 16), np.uint8)
    run = two_groups("  cp.async.wait_group 1;\n" + READ_FIRST + "  cp.async.wait_group 0;\n" + READ_SECOND)
    with order(mode, seed) as session:
        run.launch("k", 1, 32, [source, first, second])
    np.testing.assert_array_equal(first, source[:32])
    np.testing.assert_array_equal(second, source[32:])
    assert session.reports[0]["global_load_bytes"] == 1024


FAULTS = {
    "no wait": (READ_FIRST, "nothing waited for"),
    "too few groups": ("  cp.async.wait_group 1;\n" + READ_SECOND, "nothing waited for"),
    "only committed": ("  cp.async.commit_group;\n" + READ_SECOND, "nothing waited for"),
    "overwritten": ("  st.shared.u32 [%r4+4], %r0;\n", "nothing waited for"),
    "copied over": ("  cp.async.ca.shared.global [%r4+8], [%d11], 8;\n", "nothing waited for"),
}


@pytest.mark.parametrize("mode", ["late", "early", "random"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name, mode):
    middle, text = FAULTS[name]
    source, out = np.zeros((64, 16), np.uint8), np.zeros((32, 16), np.uint8)
    with vgpu.session(async_completion=mode), pytest.raises(vgpu.KernelFault, match=text) as caught:
        two_groups(middle).launch("k", 1, 32, [source, out, out])
    assert caught.value.kind == "async"
    assert "PTX line" in str(caught.value)


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_late_copies_show_without_checks(mode, seed):
    """With the checks off, a missing wait reads poison in late mode: the destination is not filled yet."""
    source = np.ones((64, 16), np.uint8)
    first, second = np.zeros((2, 32, 16), np.uint8)
    with vgpu.session(seed=seed, async_completion=mode, checks="none"):
        two_groups(READ_FIRST).launch("k", 1, 32, [source, first, second])
    if mode == "late":
        assert (first == 0xFF).all()
    if mode == "early":
        assert (first == 1).all()


@pytest.mark.parametrize("barrier", [True, False])
def test_neighbours_need_a_barrier(barrier):
    """A wait makes a thread's own copies visible to it; other warps need a barrier on top."""
    source = np.random.default_rng(2).integers(0, 256, (64, 16)).astype(np.uint8)
    out = np.zeros((64, 16), np.uint8)
    body = load_params(2) + START + "  cp.async.cg.shared.global [%r2], [%d11], 16;\n  cp.async.wait_all;\n"
    body += "  bar.sync 0;\n" if barrier else ""
    body += "  xor.b32 %r5, %r0, 32;\n  mad.lo.u32 %r5, %r5, 16, %r1;\n" + read_back(16, "%r5")
    run = module(body, params=pointers(2), shared=SHARED)
    if barrier:
        run.launch("k", 1, 64, [source, out])
        np.testing.assert_array_equal(out, np.roll(source, 32, 0))
        return
    with vgpu.session(checks=("races",)), pytest.raises(vgpu.KernelFault) as caught:
        run.launch("k", 1, 64, [source, out])
    assert caught.value.kind == "race"


def one_copy(text, shared=SHARED):
    return module(load_params(2) + START + text + "  cp.async.wait_all;\n", params=pointers(2), shared=shared)


@pytest.mark.parametrize(
    "text,kind",
    [
        ("  cp.async.cg.shared.global [%r2], [%d11+16], 16;\n", "out_of_bounds"),
        ("  cp.async.cg.shared.global [%r2+4096], [%d11], 16;\n", "out_of_bounds"),
        ("  cp.async.cg.shared.global [%r2+4], [%d11], 16;\n", "misaligned"),
        ("  cp.async.ca.shared.global [%r2], [%d11+4], 8;\n", "misaligned"),
        ("  mov.u32 %r7, 5;\n  cp.async.ca.shared.global [%r2], [%d11], 4, %r7;\n", "invalid"),
    ],
)
def test_bad_addresses(text, kind):
    with pytest.raises(vgpu.KernelFault) as caught:
        one_copy(text).launch("k", 1, 32, [np.zeros((32, 16), np.uint8), np.zeros(4, np.uint8)])
    assert caught.value.kind == kind


def test_zero_source_size_reads_nothing():
    one_copy("  mov.u64 %d11, 0;\n  mov.u32 %r7, 0;\n  cp.async.cg.shared.global [%r2], [%d11], 16, %r7;\n").launch(
        "k", 1, 32, [np.zeros(4, np.uint8), np.zeros(4, np.uint8)]
    )


@pytest.mark.parametrize("size", ["12", "%r7"])
def test_copy_size_is_checked_before_the_launch(size):
    with pytest.raises(vgpu.ParseError, match="copy size"):
        one_copy(f"  cp.async.ca.shared.global [%r2], [%d11], {size};\n")


WAIT = """
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0;
  @!%p3 bra WAIT;
"""


@pytest.mark.parametrize("space", ["", ".shared", ".shared::cta"])
@pytest.mark.parametrize("noinc", ["", ".noinc"])
@pytest.mark.parametrize("mode,seed", ORDERS)
def test_mbarrier_arrive(noinc, space, mode, seed):
    """With .noinc the phase counts the copies' arrivals, without it only the threads' own."""
    source = np.random.default_rng(3).integers(0, 256, (64, 16)).astype(np.uint8)
    out = np.zeros((64, 16), np.uint8)
    body = load_params(2) + START + "  setp.eq.u32 %p1, %r0, 0;\n  @%p1 mbarrier.init.shared.b64 [%r3], 64;\n"
    body += "  cvt.u64.u32 %d30, %r3;\n  cvta.shared.u64 %d30, %d30;\n  bar.sync 0;\n"
    body += "  cp.async.cg.shared.global [%r2], [%d11], 16;\n"
    body += f"  cp.async.mbarrier.arrive{noinc}{space}.b64 [{'%r3' if space else '%d30'}];\n"
    body += "" if noinc else "  mbarrier.arrive.shared.b64 _, [%r3];\n"
    body += WAIT + "  xor.b32 %r5, %r0, 32;\n  mad.lo.u32 %r5, %r5, 16, %r1;\n" + read_back(16, "%r5")
    with order(mode, seed):
        module(body, params=pointers(2), shared=SHARED).launch("k", 1, 64, [source, out])
    np.testing.assert_array_equal(out, np.roll(source, 32, 0))


def test_mbarrier_arrive_without_wait_is_caught():
    body = load_params(2) + START + "  setp.eq.u32 %p1, %r0, 0;\n  @%p1 mbarrier.init.shared.b64 [%r3], 32;\n"
    body += "  bar.sync 0;\n  cp.async.cg.shared.global [%r2], [%d11], 16;\n"
    body += "  cp.async.mbarrier.arrive.noinc.shared.b64 [%r3];\n" + read_back(16)
    for mode in ("late", "early", "random"):
        with vgpu.session(async_completion=mode), pytest.raises(vgpu.KernelFault) as caught:
            module(body, params=pointers(2), shared=SHARED).launch("k", 1, 32, [np.zeros((32, 16), np.uint8)] * 2)
        assert caught.value.kind == "async"


@pytest.mark.parametrize("second", ["", ".L2::evict_first", ".L2::evict_unchanged"])
@pytest.mark.parametrize("first", ["evict_last", "evict_normal", "evict_first", "evict_unchanged"])
def test_policies_are_hints(first, second):
    """A made policy changes nothing about the copy."""
    source, out = np.arange(512, dtype=np.uint8).reshape(32, 16), np.zeros((32, 16), np.uint8)
    body = load_params(2) + START + "  mov.u64 %d22, 0x16f0000000000000;\n  createpolicy.cvt.L2.b64 %d21, %d22;\n"
    body += f"  createpolicy.fractional.L2::{first}{second}.b64 %d20, 0.5;\n"
    body += "  cp.async.cg.shared.global.L2::cache_hint [%r2], [%d11], 16, %d20;\n"
    body += (
        "  cp.async.cg.shared.global.L2::cache_hint [%r2+2048], [%d11], 16, %d21;\n  cp.async.wait_all;\n"
        + read_back(16)
    )
    module(body, params=pointers(2), shared=SHARED).launch("k", 1, 32, [source, out])
    np.testing.assert_array_equal(out, source)
