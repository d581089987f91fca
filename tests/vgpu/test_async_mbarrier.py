"""mbarrier: every form against a model of the object, waits between warps, and what must be caught."""

import numpy as np
import pytest
from tensor_reference import ORDERS, load_params, module, order, pointers

from pagedkern import vgpu

SHARED = ".shared .align 8 .b64 bar[4];\n.shared .align 16 .b8 data[256];"
START = """
  mov.u32 %r0, %tid.x;
  setp.eq.u32 %p1, %r0, 0;
  mov.u32 %r3, bar;
  cvt.u64.u32 %d30, %r3;
  cvta.shared.u64 %d30, %d30;
  mapa.shared::cluster.u32 %r4, %r3, 0;
  mov.u32 %r5, data;
  mad.lo.u32 %r5, %r0, 4, %r5;
"""
SPACES = {"": "%d30", ".shared": "%r3", ".shared::cta": "%r3", ".shared::cluster": "%r4"}
RELEASES = ["", ".release.cta", ".release.cluster", ".relaxed.cta", ".relaxed.cluster"]
ACQUIRES = ["", ".acquire.cta", ".acquire.cluster", ".relaxed.cta", ".relaxed.cluster"]


def one_thread(body, values):
    """Runs `body` in one thread; it leaves 32-bit results in %r50..; returns `values` of them."""
    text = load_params(1) + START + "  @!%p1 ret;\n" + body
    text += "".join(f"  st.global.u32 [%d0+{4 * k}], %r{50 + k};\n" for k in range(values))
    out = np.zeros(values, np.uint32)
    module(text, params=pointers(1), shared=SHARED).launch("k", 1, 32, [out])
    return out.tolist()


def test_wait(register, parity):
    return f"  mbarrier.test_wait.parity.shared.b64 %p2, [%r3], {parity};\n  selp.u32 {register}, 1, 0, %p2;\n"


test_wait.__test__ = False


@pytest.mark.parametrize("space", [s for s in SPACES if s != ".shared::cluster"])
def test_init_and_inval(space):
    at = SPACES[space]
    body = f"  mbarrier.init{space}.b64 [{at}], 2;\n" + test_wait("%r50", 0) + test_wait("%r51", 1)
    body += f"  mbarrier.inval{space}.b64 [{at}];\n  mbarrier.init{space}.b64 [{at}], 1;\n"
    body += "  mbarrier.arrive.shared.b64 _, [%r3];\n" + test_wait("%r52", 0) + test_wait("%r53", 1)
    assert one_thread(body, 4) == [0, 1, 1, 0]


@pytest.mark.parametrize("order_", RELEASES)
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("op", ["arrive", "arrive_drop"])
@pytest.mark.parametrize("expect", ["", ".expect_tx"])
def test_arrive(op, expect, space, order_):
    """Three arrivals expected, two of them here; the state tells what was pending before each."""
    at, state = SPACES[space], "_" if "cluster" in space else "%d5"
    count = ", 48" if expect else ", 2"
    body = "  mbarrier.init.shared.b64 [%r3], 3;\n  mov.u64 %d5, 0;\n"
    body += f"  mbarrier.{op}{expect}{order_}{space}.b64 {state}, [{at}]{count};\n"
    if expect:
        body += "  mbarrier.arrive.shared.b64 _, [%r3];\n"
    else:
        default = f"  mbarrier.{op}{order_}{space}.b64 {state}, [{at}];\n"
    body += "  mbarrier.arrive.shared.b64 %d6, [%r3];\n  mbarrier.pending_count.b64 %r50, %d6;\n" + test_wait("%r51", 0)
    body += "  mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r3], 48;\n" if expect else ""
    body += test_wait("%r52", 0)
    dropped = (1 if expect else 2) if op == "arrive_drop" else 0
    body += "  mbarrier.arrive.shared.b64 %d6, [%r3];\n  mbarrier.pending_count.b64 %r53, %d6;\n"
    assert one_thread(body, 4) == [1, 0 if expect else 1, 1, 3 - dropped]
    if not expect:
        assert one_thread("  mbarrier.init.shared.b64 [%r3], 1;\n" + default + test_wait("%r50", 0), 1) == [1]


@pytest.mark.parametrize("order_", ["", ".release.cta"])
@pytest.mark.parametrize("space", [s for s in SPACES if s != ".shared::cluster"])
@pytest.mark.parametrize("op", ["arrive", "arrive_drop"])
def test_no_complete(op, space, order_):
    form = f"  mbarrier.{op}.noComplete{order_}{space}.b64 %d5, [{SPACES[space]}], 2;\n"
    body = "  mbarrier.init.shared.b64 [%r3], 3;\n" + form + "  mbarrier.arrive.shared.b64 %d6, [%r3];\n"
    body += "  mbarrier.pending_count.b64 %r50, %d5;\n  mbarrier.pending_count.b64 %r51, %d6;\n" + test_wait("%r52", 0)
    assert one_thread(body, 3) == [3, 1, 1]
    with pytest.raises(vgpu.KernelFault, match="noComplete"):
        one_thread("  mbarrier.init.shared.b64 [%r3], 2;\n" + form, 0)


@pytest.mark.parametrize("order_", ["", ".relaxed.cta", ".relaxed.cluster"])
@pytest.mark.parametrize("space", SPACES)
def test_transactions(space, order_):
    at = SPACES[space]
    body = "  mbarrier.init.shared.b64 [%r3], 1;\n"
    body += f"  mbarrier.expect_tx{order_}{space}.b64 [{at}], 100;\n  mbarrier.arrive.shared.b64 _, [%r3];\n"
    body += test_wait("%r50", 0) + f"  mbarrier.complete_tx{order_}{space}.b64 [{at}], 60;\n" + test_wait("%r51", 0)
    body += f"  mbarrier.complete_tx{order_}{space}.b64 [{at}], 40;\n" + test_wait("%r52", 0)
    assert one_thread(body, 3) == [0, 0, 1]


@pytest.mark.parametrize("order_", ACQUIRES)
@pytest.mark.parametrize("space", [s for s in SPACES if s != ".shared::cluster"])
@pytest.mark.parametrize("op", ["test_wait", "try_wait"])
def test_waits(op, space, order_):
    """By parity and by state, before and after the phase completes."""
    at = SPACES[space]
    hint = ", 100" if op == "try_wait" and order_ else ""
    by_parity = f"  mbarrier.{op}.parity{order_}{space}.b64 %p2, [{at}], 0{hint};\n"
    by_state = f"  mbarrier.{op}{order_}{space}.b64 %p3, [{at}], %d5{hint};\n"
    body = "  mbarrier.init.shared.b64 [%r3], 2;\n  mbarrier.arrive.shared.b64 %d5, [%r3];\n" + by_parity + by_state
    body += "  selp.u32 %r50, 1, 0, %p2;\n  selp.u32 %r51, 1, 0, %p3;\n  mbarrier.arrive.shared.b64 _, [%r3];\n"
    body += by_parity + by_state + "  selp.u32 %r52, 1, 0, %p2;\n  selp.u32 %r53, 1, 0, %p3;\n"
    assert one_thread(body, 4) == [0, 0, 1, 1]


def test_only_the_lowest_bit_of_a_parity_counts():
    body = "  mbarrier.init.shared.b64 [%r3], 1;\n" + test_wait("%r50", -1) + test_wait("%r51", -2)
    assert one_thread(body, 2) == [1, 0]


PING_PONG = """
  mov.u32 %r10, 0;
ROUND:
  and.b32 %r11, %r10, 1;
  @%p4 bra CONSUME;
EMPTY:
  xor.b32 %r12, %r11, 1;
  mbarrier.try_wait.parity.shared.b64 %p5, [%r3+8], {empty_parity};
  @!%p5 bra EMPTY;
  st.shared.u32 [%r6], %r10;
  mbarrier.arrive{release}.shared.b64 _, [%r3];
  bra NEXT;
CONSUME:
  mbarrier.try_wait.parity{acquire}.shared.b64 %p5, [%r3], %r11;
  @!%p5 bra CONSUME;
  ld.shared.u32 %r13, [%r6];
  add.u32 %r14, %r14, %r13;
  mbarrier.arrive.shared.b64 _, [%r3+8];
NEXT:
  add.u32 %r10, %r10, 1;
  setp.lt.u32 %p6, %r10, 9;
  @%p6 bra ROUND;
  @!%p4 ret;
  and.b32 %r15, %r0, 31;
  mul.wide.u32 %d10, %r15, 4;
  add.s64 %d10, %d0, %d10;
  st.global.u32 [%d10], %r14;
"""


def ping_pong(*, release="", acquire="", empty_parity="%r12"):
    body = load_params(1) + START + "  @%p1 mbarrier.init.shared.b64 [%r3], 32;\n"
    body += "  @%p1 mbarrier.init.shared.b64 [%r3+8], 32;\n  bar.sync 0;\n  setp.ge.u32 %p4, %r0, 32;\n"
    body += "  and.b32 %r7, %r0, 31;\n  mov.u32 %r6, data;\n  mad.lo.u32 %r6, %r7, 4, %r6;\n  mov.u32 %r14, 0;\n"
    body += PING_PONG.format(release=release, acquire=acquire, empty_parity=empty_parity)
    return module(body, params=pointers(1), shared=SHARED)


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_ping_pong(mode, seed):
    """Warp 0 fills, warp 1 reads, nine rounds through two objects."""
    out = np.zeros(32, np.uint32)
    with order(mode, seed):
        ping_pong().launch("k", 1, 64, [out])
    assert (out == 36).all()


def test_relaxed_arrival_orders_nothing():
    with pytest.raises(vgpu.KernelFault, match="no barrier orders them") as caught:
        ping_pong(release=".relaxed.cta").launch("k", 1, 64, [np.zeros(32, np.uint32)])
    assert caught.value.kind == "race"


def test_relaxed_wait_orders_nothing():
    with pytest.raises(vgpu.KernelFault, match="no barrier orders them") as caught:
        ping_pong(acquire=".relaxed.cta").launch("k", 1, 64, [np.zeros(32, np.uint32)])
    assert caught.value.kind == "race"


def test_wrong_parity_deadlocks_by_name():
    """Waiting for a phase that cannot complete: both warps' waits are named."""
    with vgpu.session(checks=("barriers",)), pytest.raises(vgpu.KernelFault, match="phase parity") as caught:
        ping_pong(empty_parity="%r11").launch("k", 1, 64, [np.zeros(32, np.uint32)])
    assert caught.value.kind == "deadlock"
    assert "warp 0" in str(caught.value) and "warp 1" in str(caught.value)


def test_wrong_parity_overtakes():
    """Waiting for a phase that is over already lets the writer overtake the reader."""
    with pytest.raises(vgpu.KernelFault) as caught:
        ping_pong(empty_parity="1").launch("k", 1, 64, [np.zeros(32, np.uint32)])
    assert caught.value.kind in ("race", "invalid", "deadlock")


FAULTS = {
    "never initialised": ("  mbarrier.arrive.shared.b64 _, [%r3];\n", "never initialised"),
    "invalidated": (
        "  mbarrier.init.shared.b64 [%r3], 1;\n  mbarrier.inval.shared.b64 [%r3];\n" + test_wait("%r50", 0),
        "invalidated",
    ),
    "overwritten": (
        "  mbarrier.init.shared.b64 [%r3], 1;\n  st.shared.u32 [%r3+4], %r0;\n" + test_wait("%r50", 0),
        "overwritten",
    ),
    "count of zero": ("  mbarrier.init.shared.b64 [%r3], 0;\n", "count is outside"),
    "count too large": ("  mbarrier.init.shared.b64 [%r3], 1048576;\n", "count is outside"),
    "too many arrivals": (
        "  mbarrier.init.shared.b64 [%r3], 2;\n  mbarrier.arrive.shared.b64 _, [%r3], 3;\n",
        "more arrivals than the phase",
    ),
    "too many bytes": (
        "  mbarrier.init.shared.b64 [%r3], 2;\n  mbarrier.expect_tx.shared.b64 [%r3], 1048576;\n",
        "transaction count leaves its range",
    ),
    "misaligned": ("  mbarrier.init.shared.b64 [%r3+4], 2;\n", "8-byte alignment"),
    "not shared": ("  mbarrier.init.b64 [%d0], 2;\n", "mbarrier.init.b64"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    text, message = FAULTS[name]
    with pytest.raises(vgpu.KernelFault, match=message) as caught:
        one_thread(text, 0)
    assert "mbarrier" in str(caught.value)
    assert "thread (0,0,0)" in str(caught.value)


def test_missing_arrival_deadlocks_by_name():
    body = "  mbarrier.init.shared.b64 [%r3], 2;\n  mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 16;\nWAIT:\n"
    body += "  mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;\n  @!%p2 bra WAIT;\n"
    with pytest.raises(vgpu.KernelFault, match="1 arrivals and 16 bytes short") as caught:
        one_thread(body, 0)
    assert caught.value.kind == "deadlock"
