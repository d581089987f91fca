"""Sixteen bytes per thread in any state space, for the forms that read or write memory."""

from forms_kernel import THREADS

GLOBAL = f".global .align 16 .b8 cell_global[{16 * THREADS}];\n"
SHARED = f".shared .align 16 .b8 cell_shared[{16 * THREADS}];\n"
TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")


def enter(space, address="a"):
    """(module declarations, statements) that declare the register `address` and point it at this thread's cell, as an
    address of the state space ("" is generic)."""
    if space == "local":
        text = f".local .align 16 .b8 cell[16]; .reg .b64 {address}; mov.u64 {address}, cell; "
        return "", text
    if space.startswith("shared"):
        text = f".reg .b32 {address}; mov.u32 {address}, cell_shared; mad.lo.u32 {address}, %r0, 16, {address}; "
        return SHARED, text
    text = f".reg .b64 {address}; mov.u64 {address}, cell_global; mad.wide.u32 {address}, %r0, 16, {address}; "
    return GLOBAL, text


def generic(space):
    """The same with a generic address, for a cell in `space`."""
    module, text = enter(space)
    if space.startswith("shared"):
        text += ".reg .b64 g; cvt.u64.u32 g, a; cvta.shared.u64 g, g; "
    else:
        text += f".reg .b64 g; cvta.{space}.u64 g, a; "
    return module, text


def places():
    """(state space in the opcode, module, statements, address register, space to fill it through)."""
    for space in ("global", "shared", "shared::cta", "shared::cluster", "local"):
        module, text = enter(space)
        yield f".{space}", module, text, "a", f".{space}"
    for space in ("global", "shared", "local"):
        module, text = generic(space)
        yield "", module, text, "g", f".{space}"


def registers_for(kind):
    """Registers a type may live in."""
    width = int(kind[1:])
    return [r for r, bits in (("h", 16), ("w", 32), ("x", 64)) if bits >= max(16, width)]


def extend(kind, v, bits):
    """An element of a type in a register of `bits`."""
    width = int(kind[1:])
    if kind[0] == "s" and v >> (width - 1):
        v -= 1 << width
    return v & ((1 << bits) - 1)


def vector(names):
    return names[0] if len(names) == 1 else "{{" + ", ".join(names) + "}}"
