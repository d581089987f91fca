"""Tensor maps: tensormap instructions, the encoder, planted faults."""

import itertools

import numpy as np
import pytest
from tensor_reference import aligned, order
from tma_kernels import (
    COUNTED,
    DONE,
    DUMP,
    EXPECT,
    INIT,
    WAIT,
    box_of,
    build,
    check_store,
    header,
    load_kernel,
    random_tensor,
    store_kernel,
    swizzled,
)

from pagedkern import vgpu

# ---- tensormap.replace ----

FIELDS = [
    ("global_address", "b64", "", "%d15"),
    ("rank", "b32", "", "0x1"),
    ("box_dim", "b32", "0x0, ", "%r20"),
    ("box_dim", "b32", "0x1, ", "%r21"),
    ("global_dim", "b32", "0x0, ", "%r22"),
    ("global_dim", "b32", "0x1, ", "%r23"),
    ("global_stride", "b64", "0x0, ", "%d16"),
    ("element_stride", "b32", "0x0, ", "%r24"),
    ("element_stride", "b32", "0x1, ", "%r24"),
    ("elemtype", "b32", "", "0x1"),
    ("interleave_layout", "b32", "", "0x0"),
    ("swizzle_mode", "b32", "", "0x2"),
    ("fill_mode", "b32", "", "0x0"),
]


def replace_kernel(space, scope="gpu", skip=None):
    """Builds a map of p1's 16-bit 20 x 64 matrix in shared or global memory and loads a 4 x 32 box with it."""
    shared = space == ".shared::cta"
    body = "  ld.param.u64 %d15, [p1];\n  mov.u32 %r20, 32;\n  mov.u32 %r21, 4;\n  mov.u32 %r22, 64;\n"
    body += "  mov.u32 %r23, 20;\n  mov.u32 %r24, 1;\n  mov.u64 %d16, 128;\n  add.s64 %d17, %d1, 4096;\n"
    target = "%r2" if shared else "%d17"
    body += "  mul.lo.u32 %r16, %r0, 4;\n  add.u32 %r17, %r2, %r16;\n  cvt.u64.u32 %d18, %r16;\n"
    body += "  add.s64 %d19, %d17, %d18;\n"
    body += "  mov.u32 %r18, 0;\n" + (
        "  st.shared.u32 [%r17], %r18;\n" if shared else "  st.global.u32 [%d19], %r18;\n"
    )
    body += "  bar.warp.sync 0xffffffff;\n"
    for name, bits, at, value in FIELDS:
        if name != skip:
            body += f"  @%p1 tensormap.replace.tile.{name}{space}.b1024.{bits} [{target}], {at}{value};\n"
    body += "  bar.warp.sync 0xffffffff;\n"
    if shared:
        copy = f"tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.{scope}.sync.aligned"
        body += f"  {copy} [%d17], [%r2], 128;\n"
    body += f"  fence.proxy.tensormap::generic.acquire.{scope} [%d17], 128;\n"
    body += (
        INIT
        + EXPECT
        + f"  @%p1 cp.async.bulk.tensor.2d.shared::cta.global{COUNTED} [%r1], [%d17, {{%r10, %r11}}], [%r3];\n"
    )
    return build(body + WAIT + "  add.s64 %d11, %d11, 8192;\n" + DUMP)


def replaced(run):
    memory = aligned(8192 + 256)
    tensor = memory[:2560].view(np.int16).reshape(20, 64)
    tensor[...] = random_tensor((20, 64), np.int16)
    run.launch("k", 1, 32, [header((18, 40), 256), memory, bytes(128)])
    want = swizzled(box_of(tensor, (4, 32), (18, 40)), 64)
    np.testing.assert_array_equal(memory[8192:], want)


@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu", "sys"])
@pytest.mark.parametrize("space", ["", ".global", ".shared::cta"])
def test_replace(space, scope):
    replaced(replace_kernel(space, scope))


@pytest.mark.parametrize("skip", sorted({f[0] for f in FIELDS}))
def test_replace_needs_every_field(skip):
    with pytest.raises(vgpu.KernelFault, match="lacks fields|not a tensor map"):
        replaced(replace_kernel(".shared::cta", skip=skip))


@pytest.mark.parametrize(
    "field,bits,arguments",
    [
        ("rank", "b32", "5"),
        ("box_dim", "b32", "0, 257"),
        ("global_dim", "b32", "0, 0"),
        ("element_stride", "b32", "0, 9"),
        ("global_stride", "b64", "0, 1099511627776"),
        ("elemtype", "b32", "13"),
        ("interleave_layout", "b32", "3"),
        ("swizzle_mode", "b32", "4"),
        ("fill_mode", "b32", "2"),
    ],
)
def test_replace_of_a_bad_value(field, bits, arguments):
    body = "  mov.u32 %r18, 0;\n  mad.lo.u32 %r17, %r0, 4, %r2;\n  st.shared.u32 [%r17], %r18;\n"
    body += "  bar.warp.sync 0xffffffff;\n"
    body += f"  @%p1 tensormap.replace.tile.{field}.shared::cta.b1024.{bits} [%r2], {arguments};\n"
    with pytest.raises(vgpu.KernelFault, match="does not fit the field") as caught:
        build(body).launch("k", 1, 32, [header((0, 0), 0), aligned(128), bytes(128)])
    assert caught.value.kind == "invalid"


# ---- the encoder ----

ENCODER = {
    "boxDim[0] must span a multiple of 16 bytes": dict(box=(8, 4)),
    "boxDim[1] must be 1 to 256": dict(box=(257, 32)),
    "boxDim[0] spans more bytes than the swizzle": dict(box=(8, 64), swizzle=64),
    "elementStrides[1] must be 1 to 8": dict(element_strides=(9, 1)),
    "oobFill of NaN needs a floating point": dict(nan_fill=True),
    "interleave of 32B needs the 32B swizzle": dict(shape=(4, 8, 64), box=(1, 8, 32), interleave=32),
    "tensorRank must be 3 or more": dict(interleave=16),
    "tensorRank must be 1 to 5": dict(shape=(1, 1, 1, 1, 2, 64), box=(1, 1, 1, 1, 2, 32)),
}


@pytest.mark.parametrize("message", ENCODER)
def test_encoder_refuses(message):
    options = dict(ENCODER[message])
    tensor = random_tensor(options.pop("shape", (20, 64)), np.int16)
    with pytest.raises(ValueError) as caught:
        vgpu.tensor_map(tensor, options.pop("box", (8, 32)), **options)
    assert message in str(caught.value) or "do not fit together" in str(caught.value)


def test_encoder_checks_alignment():
    flat = aligned(4096)
    with pytest.raises(ValueError, match="globalAddress must be aligned to 16"):
        vgpu.tensor_map(flat[8:][:2048].reshape(16, 128), (8, 64))
    with pytest.raises(ValueError, match=r"globalStrides\[0\] must be a multiple of 16"):
        vgpu.tensor_map(flat[: 24 * 8].reshape(8, 24)[:, :16], (8, 16))
    with pytest.raises(ValueError, match="innermost dimension must be contiguous"):
        vgpu.tensor_map(flat.reshape(64, 64)[:, ::2], (8, 16))


# ---- planted faults ----


def launch_load(run, tensor, descriptor, box=(8, 32), coordinates=(0, 0), expect=None):
    bytes_ = int(np.prod(box)) * tensor.itemsize
    return run.launch("k", 1, 32, [header(coordinates, expect or bytes_), aligned(bytes_), descriptor])


def matrix():
    return random_tensor((40, 96), np.int16)


def edited(**changes):
    descriptor = vgpu.tensor_map(changes.pop("tensor", matrix()), changes.pop("box", (8, 32)), **changes)
    return descriptor


def test_bytes_that_are_no_map():
    with pytest.raises(vgpu.KernelFault, match="not a tensor map"):
        launch_load(load_kernel(2), matrix(), bytes(128))


def test_map_that_was_overwritten():
    descriptor = edited()
    descriptor.data = descriptor.data[:40] + b"\x07" + descriptor.data[41:]
    with pytest.raises(vgpu.KernelFault, match="overwritten in part"):
        launch_load(load_kernel(2), matrix(), descriptor)


def test_map_of_another_rank():
    with pytest.raises(vgpu.KernelFault, match="has 2 dimensions, the instruction 3"):
        launch_load(load_kernel(3), matrix(), edited())


@pytest.mark.parametrize(
    "changes,text",
    [
        (dict(swizzle=128), "narrower than its swizzle"),
        (dict(tensor=random_tensor((40, 96), np.float32), dtype="tfloat32"), "tensor map of tf32"),
        (dict(tensor=random_tensor((4, 40, 96), np.int16), box=(1, 8, 32), interleave=16), "interleaved"),
    ],
)
def test_unsupported_maps_are_named(changes, text):
    with pytest.raises(vgpu.KernelFault, match=text) as caught:
        launch_load(load_kernel(len(changes.get("box", (8, 32)))), matrix(), edited(**changes))
    assert caught.value.kind == "unsupported"


def test_tensor_larger_than_its_memory():
    tensor = matrix()
    descriptor = vgpu.tensor_map(tensor, (8, 32))
    descriptor.tensor = tensor[:10]
    launch_load(load_kernel(2), tensor, descriptor, coordinates=(0, 0))
    with pytest.raises(vgpu.KernelFault, match="outside") as caught:
        launch_load(load_kernel(2), tensor, descriptor, coordinates=(8, 0))
    assert caught.value.kind == "out_of_bounds"


def test_box_larger_than_shared_memory():
    tensor = aligned((1, 1, 1, 1, 256), np.int64)
    descriptor = vgpu.tensor_map(tensor, (256, 256, 256, 256, 256))
    with pytest.raises(vgpu.KernelFault, match="more than shared memory") as caught:
        load_kernel(5).launch("k", 1, 32, [header([0] * 5, 256), aligned(256), descriptor])
    assert caught.value.kind == "out_of_bounds"


def test_misaligned_destination():
    body = INIT + EXPECT + "  add.u32 %r16, %r1, 64;\n"
    body += f"  @%p1 cp.async.bulk.tensor.2d.shared::cta.global{COUNTED} [%r16], [%d3, {{%r10, %r11}}], [%r3];\n"
    with pytest.raises(vgpu.KernelFault, match="128-byte alignment"):
        launch_load(build(body + WAIT), matrix(), edited())


@pytest.mark.parametrize("mode", ["late", "early", "random"])
def test_load_without_a_wait(mode):
    with vgpu.session(async_completion=mode), pytest.raises(vgpu.KernelFault, match="nothing waited for") as caught:
        launch_load(load_kernel(2, wait=""), matrix(), edited())
    assert caught.value.kind == "async"
    assert "cp.async.bulk.tensor" in str(caught.value)


def test_clipped_box_still_counts_whole():
    """A wait for only the bytes inside the tensor never ends: the transaction count is that of the full box."""
    with pytest.raises(vgpu.KernelFault, match="-256 bytes short") as caught:
        launch_load(load_kernel(2), matrix(), edited(), coordinates=(36, 0), expect=256)
    assert caught.value.kind == "deadlock"


STORE_FAULTS = {
    "no proxy fence": (dict(publish="  bar.sync 0;\n"), "no fence.proxy.async"),
    "no wait": (dict(done=""), "a block that exits"),
    "not committed": (dict(done="  cp.async.bulk.wait_group 0;\n"), "a block that exits"),
    "source overwritten": (dict(done="  bar.sync 0;\n  st.shared.u32 [%r4], %r0;\n" + DONE), "may still read"),
}


@pytest.mark.parametrize("name", STORE_FAULTS)
def test_store_fault_is_caught(name):
    options, text = STORE_FAULTS[name]
    with pytest.raises(vgpu.KernelFault, match=text) as caught:
        check_store(matrix(), (8, 32), (0, 0), kernel=store_kernel(2, **options))
    assert caught.value.kind == "async"


def test_im2col_is_refused_by_name():
    form = f"cp.async.bulk.tensor.4d.shared::cluster.global.im2col{COUNTED}"
    with pytest.raises(vgpu.ParseError, match="im2col"):
        load_kernel(4, form)


def test_every_order_gives_one_result():
    """Loads, a swizzled store and a reduction in one kernel, over all orders."""
    source, results = random_tensor((32, 64), np.float32), []
    body = (
        INIT
        + EXPECT
        + f"  @%p1 cp.async.bulk.tensor.2d.shared::cta.global{COUNTED} [%r1], [%d3, {{%r10, %r11}}], [%r3];\n"
    )
    body += (
        WAIT
        + "  @%p1 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%d3, {%r12, %r13}], [%r1];\n"
        + DONE
    )
    run = build(body)
    for mode, seed in itertools.product(("late", "early", "random"), range(3)):
        tensor = aligned((32, 64), np.float32)
        tensor[...] = source
        at = header((0, 0), 1024)
        at[2:4] = (32, 16)
        with order(mode, seed):
            run.launch("k", 1, 32, [at, aligned(128), vgpu.tensor_map(tensor, (8, 32), swizzle=128)])
        results.append(tensor)
    want = source.copy()
    want[16:24, 32:] += source[:8, :32]
    for tensor in results:
        np.testing.assert_array_equal(tensor, want)
