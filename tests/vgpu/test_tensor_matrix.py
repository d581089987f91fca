"""ldmatrix, stmatrix and movmatrix: layouts, swizzled banks, races."""

import numpy as np
import pytest
from tensor_reference import load_params, load_words, module, pointers, registers, store_words

from pagedkern import vgpu

SHARED = ".shared .align 128 .b8 tile[4096];"
COUNTS = (1, 2, 4)
SPACES = (".shared", ".shared::cta", "")


def lanes_of(matrix, trans):
    """Lane l holds two neighbours of row l / 4 (column l / 4 with trans)."""
    return np.ascontiguousarray(matrix.T if trans else matrix).reshape(32, 2).view(np.uint32)[:, 0]


def to_shared(stride):
    """PTX: lane's row of 16 bytes of p0 to tile + lane * stride, whose address stays in %r9 (and generic in %d9)."""
    return f"""
  mov.u32 %r0, %laneid;
  mov.u32 %r8, tile;
  mad.lo.u32 %r9, %r0, {stride}, %r8;
  cvt.u64.u32 %d8, %r9;
  cvta.shared.u64 %d9, %d8;
"""


FILL = """
  mul.wide.u32 %d10, %r0, 16;
  add.s64 %d10, %d0, %d10;
  ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%d10];
  st.shared.v4.u32 [%r9], {%r1,%r2,%r3,%r4};
  bar.warp.sync 0xffffffff;
"""


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", COUNTS)
def test_ldmatrix(count, trans, space):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    out = np.zeros((count, 32), np.uint32)
    address = "%r9" if space else "%d9"
    body = load_params(2) + to_shared(16) + FILL
    body += f"  ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16 {registers('%r', 20, count)}, [{address}];\n"
    kernel = module(body + store_words("%d1", 20, count), params=pointers(2), shared=SHARED)
    report = kernel.launch("k", 1, 32, [rows, out])
    for k in range(count):
        np.testing.assert_array_equal(out[k], lanes_of(rows[k], bool(trans)))
    assert report["shared_load_wavefronts"] == count
    assert report["shared_bank_conflicts"] == 0


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", COUNTS)
def test_stmatrix(count, trans, space):
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    words = np.stack([lanes_of(m, bool(trans)) for m in rows])
    out = np.zeros((4, 8, 8), np.uint16)
    address = "%r9" if space else "%d9"
    body = load_params(2) + to_shared(16) + load_words("%d0", 20, count)
    body += f"  stmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16 [{address}], {registers('%r', 20, count)};\n"
    body += f"""
  bar.warp.sync 0xffffffff;
  setp.ge.u32 %p0, %r0, {8 * count};
  @%p0 ret;
  ld.shared.v4.u32 {{%r1,%r2,%r3,%r4}}, [%r9];
  mul.wide.u32 %d10, %r0, 16;
  add.s64 %d10, %d1, %d10;
  st.global.v4.u32 [%d10], {{%r1,%r2,%r3,%r4}};
"""
    report = module(body, params=pointers(2), shared=SHARED).launch("k", 1, 32, [words, out])
    np.testing.assert_array_equal(out[:count], rows[:count])
    assert not out[count:].any()
    assert report["shared_store_wavefronts"] == count


@pytest.mark.parametrize("order", ["x4.m8n8", "m8n8.x4", "m8n8.x4.trans", "x4.trans.m8n8", "trans.m8n8.x4"])
def test_modifiers_come_in_any_order(order):
    found = vgpu.find_form(f"ldmatrix.sync.aligned.{order}.shared.b16")
    assert found == f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if 'trans' in order else ''}.shared.b16"


@pytest.mark.parametrize("stride,wavefronts", [(16, 4), (32, 8), (64, 16), (128, 32), (144, 4)])
def test_bank_conflicts_of_row_strides(stride, wavefronts):
    """Rows 128 bytes apart all start in bank 0; a padding of 16 bytes spreads them."""
    rows = np.zeros((32, 16), np.uint8)
    body = load_params(1) + to_shared(stride) + FILL
    body += "  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20,%r21,%r22,%r23}, [%r9];\n"
    kernel = module(body, params=pointers(1), shared=".shared .align 128 .b8 tile[4608];")
    report = kernel.launch("k", 1, 32, [rows])
    assert report["shared_load_wavefronts"] == wavefronts
    assert report["shared_bank_conflicts"] == 2 * (wavefronts - 4)  # the stores conflict in the same way


def test_bank_conflicts_of_a_swizzle():
    """128-byte rows without conflicts: chunk XOR row."""
    rows = np.zeros((32, 16), np.uint8)
    body = (
        load_params(1) + to_shared(128) + "  and.b32 %r5, %r0, 7;\n  shl.b32 %r5, %r5, 4;\n  xor.b32 %r9, %r9, %r5;\n"
    )
    body += FILL + "  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20,%r21,%r22,%r23}, [%r9];\n"
    report = module(body, params=pointers(1), shared=SHARED).launch("k", 1, 32, [rows])
    assert report["shared_load_wavefronts"] == 4
    assert report["shared_bank_conflicts"] == 0


def test_movmatrix():
    rng = np.random.default_rng(2)
    m = rng.integers(0, 1 << 16, (8, 8)).astype(np.uint16)
    out = np.zeros((1, 32), np.uint32)
    body = load_params(2) + "  mov.u32 %r0, %laneid;\n" + load_words("%d0", 1, 1)
    body += "  movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;\n" + store_words("%d1", 2, 1)
    module(body, params=pointers(2)).launch("k", 1, 32, [lanes_of(m, False), out])
    np.testing.assert_array_equal(out[0], lanes_of(m, True))


def test_misaligned_row():
    body = load_params(1) + to_shared(8) + "  st.shared.v2.u32 [%r9], {%r0,%r0};\n  bar.warp.sync 0xffffffff;\n"
    body += "  ldmatrix.sync.aligned.m8n8.x1.shared.b16 %r20, [%r9];\n"
    with pytest.raises(vgpu.KernelFault, match="16-byte alignment") as caught:
        module(body, params=pointers(1), shared=SHARED).launch("k", 1, 32, [np.zeros(4, np.uint32)])
    assert caught.value.kind == "misaligned"


def test_row_nothing_wrote():
    body = load_params(1) + to_shared(16) + "  ldmatrix.sync.aligned.m8n8.x1.shared.b16 %r20, [%r9];\n"
    with pytest.raises(vgpu.KernelFault, match="nothing wrote") as caught:
        module(body, params=pointers(1), shared=SHARED).launch("k", 1, 32, [np.zeros(4, np.uint32)])
    assert caught.value.kind == "uninitialized"


@pytest.mark.parametrize("same", [True, False])
def test_two_warps_write_one_matrix(same):
    """Of equal values no order can be seen; as with plain stores, only different ones are a race."""
    body = load_params(1) + to_shared(16) + f"  mov.u32 %r30, {'7' if same else '%warpid'};\n"
    body += "  stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r9], {%r30,%r30};\n"
    kernel = module(body, params=pointers(1), shared=SHARED)
    if same:
        for seed in range(3):
            with vgpu.session(seed=seed):
                kernel.launch("k", 1, 64, [np.zeros(1, np.uint32)])
        return
    with pytest.raises(vgpu.KernelFault, match="races with a write by .*: no barrier orders them") as caught:
        kernel.launch("k", 1, 64, [np.zeros(1, np.uint32)])
    assert caught.value.kind == "race"


@pytest.mark.parametrize("synchronised", [True, False])
def test_race_between_warps(synchronised):
    """Warp 1 reads with ldmatrix what warp 0 writes with stmatrix."""
    body = load_params(1) + to_shared(16) + "  mov.u32 %r30, %tid.x;\n  setp.lt.u32 %p1, %r30, 32;\n  @!%p1 bra READ;\n"
    body += "  stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r9], {%r0,%r0,%r0,%r0};\n"
    wait = "  bar.sync 0;\n" if synchronised else ""
    body += wait + "  ret;\nREAD:\n" + wait
    body += "  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20,%r21,%r22,%r23}, [%r9];\n"
    body += store_words("%d0", 20, 1)
    kernel, out = module(body, params=pointers(1), shared=SHARED), np.zeros(32, np.uint32)
    if synchronised:
        for seed in range(3):
            with vgpu.session(seed=seed):
                kernel.launch("k", 1, 64, [out])
        return
    with pytest.raises(vgpu.KernelFault, match="no barrier orders them") as caught:
        kernel.launch("k", 1, 64, [out])
    assert caught.value.kind == "race"
