"""Every ld and st form: each state space, type, vector length, register width, cache operator, hint and order."""

import random
import struct

import numpy as np
import pytest
from forms_kernel import BITS, HEAD, REGISTERS, LaneForm, run_lane_forms
from forms_memory import TYPES, extend, places, registers_for, vector

from pagedkern import vgpu

COUNTS = (1, 2, 4)


def shapes():
    """(type, vector suffix, count, bytes of an element)."""
    for kind in TYPES:
        size = int(kind[1:]) // 8
        for count in COUNTS:
            if count * size <= 16:
                yield kind, f".v{count}" if count > 1 else "", count, size


def elements(words, size, count):
    """The first elements of sixteen bytes given as two 64-bit words."""
    data = words[0] | words[1] << 64
    return [data >> 8 * size * k & ((1 << 8 * size) - 1) for k in range(count)]


def load_form(opcode, kind, count, size, register, place):
    _, module, setup, address, through = place

    def reference(*words):
        return tuple(extend(kind, v, BITS[register]) for v in elements(words, size, count))

    operands = vector([f"{{d{k}}}" for k in range(count)]) + f", [{address}]"
    fill = f"st{through}.u64 [a], {{s0}}; st{through}.u64 [a+8], {{s1}}; "
    return LaneForm(
        opcode, register * count, "xx", "xx", reference, operands, around=f"{{{{ {setup}{fill}OP; }}}}", module=module
    )


def store_form(opcode, kind, count, size, register, place):
    """Stores over sixteen bytes of a pattern, and reads all of them back."""
    _, module, setup, address, through = place
    pattern = 0x0F1E2D3C4B5A69788796A5B4C3D2E1F0

    def reference(*values):
        data = pattern
        for k, v in enumerate(values):
            keep = ((1 << 8 * size) - 1) << 8 * size * k
            data = data & ~keep | v << 8 * size * k & keep
        return data & (1 << 64) - 1, data >> 64

    operands = f"[{address}], " + vector([f"{{s{k}}}" for k in range(count)])
    low, high = pattern & (1 << 64) - 1, pattern >> 64
    fill = f"st{through}.u64 [a], {low:#x}; st{through}.u64 [a+8], {high:#x}; "
    read = f"ld{through}.u64 {{d0}}, [a]; ld{through}.u64 {{d1}}, [a+8]; "
    around = f"{{{{ {setup}{fill}OP; {read}}}}}"
    return LaneForm(opcode, "xx", register * count, register * count, reference, operands, around=around, module=module)


def plain_forms(root):
    make = load_form if root == "ld" else store_form
    for place in places():
        for kind, suffix, count, size in shapes():
            for register in registers_for(kind):
                yield make(f"{root}{place[0]}{suffix}.{kind}", kind, count, size, register, place)


LOAD_MODIFIERS = (
    *("{}.ca", "{}.cg", "{}.cs", "{}.lu", "{}.cv", "volatile{}", "relaxed.cta{}", "relaxed.cluster{}", "relaxed.gpu{}"),
    *("relaxed.sys{}", "acquire.cta{}", "acquire.cluster{}", "acquire.gpu{}", "acquire.sys{}", "weak{}"),
    *("{}.L1::evict_normal", "{}.L1::evict_unchanged", "{}.L1::evict_first", "{}.L1::evict_last"),
    *("{}.L1::no_allocate", "{}.L2::64B", "{}.L2::128B", "{}.L2::256B", "{}.L1::evict_last.L2::128B"),
)
NON_COHERENT = ("{}.nc", "{}.nc.L1::evict_last.L2::256B", "{}.ca.nc", "{}.nc.L1::no_allocate", "{}.nc.L2::64B")
STORE_MODIFIERS = (
    *("{}.wb", "{}.cg", "{}.cs", "{}.wt", "volatile{}", "relaxed.cta{}", "relaxed.cluster{}", "relaxed.gpu{}"),
    *("relaxed.sys{}", "release.cta{}", "release.cluster{}", "release.gpu{}", "release.sys{}", "weak{}"),
    *("{}.L1::evict_normal", "{}.L1::evict_unchanged", "{}.L1::evict_first", "{}.L1::evict_last", "{}.L1::no_allocate"),
)


def modified_forms(root):
    """Cache operators, hints, scopes and orders change neither address nor value."""
    make = load_form if root == "ld" else store_form
    place = next(p for p in places() if p[0] == ".global")
    modifiers = LOAD_MODIFIERS + NON_COHERENT if root == "ld" else STORE_MODIFIERS
    for modifier in modifiers:
        for kind, suffix, count in (("u32", "", 1), ("f32", ".v4", 4), ("b64", ".v2", 2), ("s8", "", 1)):
            opcode = f"{root}." + modifier.format(".global").strip(".") + f"{suffix}.{kind}"
            register = registers_for(kind)[0]
            yield make(opcode, kind, count, int(kind[1:]) // 8, register, place)
    policy = make(f"{root}.global.L2::cache_hint.u32", "u32", 1, 4, "w", place)
    policy.text += ", {s1}" if root == "ld" else ", 0"
    yield policy


@pytest.mark.parametrize("root", ("ld", "st"))
@pytest.mark.parametrize("family", ("plain", "modified"))
def test_forms(family, root):
    run_lane_forms(list(globals()[f"{family}_forms"](root)))


def table():
    rng = random.Random(5)
    return bytes(rng.getrandbits(8) for _ in range(64))


def test_const_forms():
    """ld.const from an initialised array, at addresses the threads choose."""
    data = table()
    declaration = f".const .align 16 .b8 cell_const[64] = {{{', '.join(map(str, data))}}};\n"
    setup = ".reg .b64 a, b; cvt.u64.u32 b, {s0}; and.b64 b, b, 48; mov.u64 a, cell_const; add.s64 a, a, b; "
    forms = []
    for kind, suffix, count, size in shapes():
        for register in registers_for(kind):

            def reference(at, kind=kind, count=count, size=size, register=register):
                words = struct.unpack_from("<QQ", data, at & 48)
                return tuple(extend(kind, v, BITS[register]) for v in elements(words, size, count))

            operands = vector([f"{{d{k}}}" for k in range(count)]) + ", [a]"
            around = f"{{{{ {setup}OP; }}}}"
            form = LaneForm(f"ld.const{suffix}.{kind}", register * count, "w", "w", reference, operands, around=around)
            form.module = declaration
            forms.append(form)
    run_lane_forms(forms)


@pytest.mark.parametrize("space", ("param", "param::entry"))
def test_kernel_parameter_forms(space):
    """Parameters at fixed offsets, and through their address in a register."""
    data, body, want = table(), "", []
    for kind, suffix, count, size in shapes():
        for register in registers_for(kind):
            for at in (0, 16, 48):
                prefix = {"h": "%h", "w": "%r", "x": "%d"}[register]
                names = [f"{prefix}{10 + k}" for k in range(count)]
                pack = names[0] if count == 1 else "{" + ", ".join(names) + "}"
                for address in (f"blob+{at}", f"%d1+{at}"):
                    body += f"  ld.{space}{suffix}.{kind} {pack}, [{address}];\n"
                    for k, name in enumerate(names):
                        body += f"  st.global.b{BITS[register]} [%d0+{8 * len(want)}], {name};\n"
                        words = struct.unpack_from("<QQ", data, at)
                        want.append(extend(kind, elements(words, size, count)[k], BITS[register]))
    head = "  ld.param.u64 %d0, [out];\n  mov.b64 %d1, blob;\n"
    text = (
        f"{HEAD}.visible .entry k(.param .align 16 .b8 blob[64], .param .u64 out)\n{{\n{REGISTERS}{head}{body}ret;\n}}"
    )
    out = np.zeros(len(want), np.uint64)
    vgpu.Module(text).launch("k", 1, 1, [data, out])
    assert out.tolist() == want


@pytest.mark.parametrize("space", ("param", "param::func"))
def test_call_parameter_forms(space):
    """Each form in a function of its own: loads its argument, stores it widened as its result."""
    functions, body, want = "", "", []
    data = table()
    first = struct.unpack_from("<QQ", data, 0)
    for n, (kind, suffix, count, size) in enumerate(shapes()):
        width = max(16, 8 * size)
        names = [f"v{k}" for k in range(count)]
        pack = names[0] if count == 1 else "{" + ", ".join(names) + "}"
        functions += f".func (.param .align 16 .b8 result[16]) f{n} (.param .align 16 .b8 argument[16])\n{{\n"
        functions += f"  .reg .b{width} {', '.join(names)};\n  .reg .b64 zero;\n  mov.u64 zero, 0;\n"
        functions += "  st.param.b64 [result], zero;\n  st.param.b64 [result+8], zero;\n"
        functions += f"  ld.{space}{suffix}.{kind} {pack}, [argument];\n"
        functions += f"  st.{space}{suffix}.{kind} [result], {pack};\n  ret;\n}}\n"
        body += "  {\n  .param .align 16 .b8 to[16];\n  .param .align 16 .b8 back[16];\n"
        body += "  st.param.v2.b64 [to], {%d2, %d3};\n"
        body += f"  call.uni (back), f{n}, (to);\n  ld.param.v2.b64 {{%d4, %d5}}, [back];\n  }}\n"
        body += f"  st.global.v2.b64 [%d0+{16 * n}], {{%d4, %d5}};\n"
        value = (first[0] | first[1] << 64) & (1 << 8 * size * count) - 1
        want += [value & (1 << 64) - 1, value >> 64]
    head = "  ld.param.u64 %d0, [out];\n" + f"  mov.b64 %d2, {first[0]:#x};\n  mov.b64 %d3, {first[1]:#x};\n"
    text = f"{HEAD}{functions}.visible .entry k(.param .u64 out)\n{{\n{REGISTERS}{head}{body}  ret;\n}}"
    out = np.zeros(len(want) + 2, np.uint64)[:-1]
    out = out[out.__array_interface__["data"][0] % 16 // 8 :][: len(want)]
    vgpu.Module(text).launch("k", 1, 1, [out])
    assert out.tolist() == want
