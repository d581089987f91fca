"""The traps of PTX text: scopes, labels, sinks, literals, ranges, packs, directives; and what is refused by name."""

import numpy as np
import pytest

from pagedkern import vgpu

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def run(body, *, threads=1, module="", regs="", args=()):
    """The u64 that each thread left in %out."""
    text = f"""{HEAD}{module}
.visible .entry k(.param .u64 result)
{{
  .reg .pred %p<9>;
  .reg .b16 %h<9>;
  .reg .b32 %r<20>;
  .reg .b64 %d<9>;
  .reg .b64 %out;
  {regs}
{body}
  ld.param.u64 %d8, [result];
  mov.u32 %r19, %tid.x;
  mad.wide.u32 %d8, %r19, 8, %d8;
  st.global.u64 [%d8], %out;
  ret;
}}
"""
    result = np.zeros(threads, np.uint64)
    vgpu.Module(text).launch("k", 1, threads, [result, *args])
    return [int(v) for v in result]


def test_same_label_in_many_scopes():
    """Inline assembly repeats its labels: each scope has its own, forward and backward."""
    block = """{
  .reg .pred p;
  .reg .b32 n;
  mov.u32 n, 0;
waitLoop:
  add.u32 n, n, 1;
  setp.lt.u32 p, n, 3;
  @p bra waitLoop;
  @!p bra DONE;
  trap;
DONE:
  add.u32 %r1, %r1, n;
}
"""
    assert run("  mov.u32 %r1, 0;\n" + 37 * block + "  cvt.u64.u32 %out, %r1;") == [111]


def test_inner_names_hide_outer_ones():
    body = """  mov.u32 %r1, 5;
  bra OUT;
OUT:
  { .reg .b32 %r1; mov.u32 %r1, 7; { .reg .b64 %r1; mov.u64 %r1, 9; mov.u64 %out, %r1; } bra OUT; OUT: }
  cvt.u64.u32 %d1, %r1;
  mad.lo.u64 %out, %out, 10, %d1;"""
    assert run(body) == [95]


def test_shared_variables_of_one_name():
    """A block's variable hides the module's, and is another one."""
    body = """  mov.u32 %r1, words;
  { .shared .align 4 .b32 words[4]; mov.u32 %r2, words; }
  sub.u32 %r3, %r2, %r1;
  setp.eq.u32 %p1, %r3, 0;
  selp.u64 %out, 1, 0, %p1;"""
    assert run(body, module=".shared .align 4 .b32 words[4];\n") == [0]


def test_sinks():
    body = """  mov.b64 %d1, 0x0000000700000009;
  mov.b64 {_, %r1}, %d1;
  shfl.sync.idx.b32 %r2|_, %r1, 0, 31, 1;
  elect.sync _|%p1, 1;
  selp.u32 %r3, 10, 0, %p1;
  add.u32 %r3, %r3, %r2;
  cvt.u64.u32 %out, %r3;"""
    assert run(body) == [17]


@pytest.mark.parametrize(
    "literal,bits",
    [
        ("0f3F800000", 0x3F800000),
        ("0F3f800000", 0x3F800000),
        ("0fBF800000", 0xBF800000),
        ("0.", 0),
        ("1.0", 0x3F800000),
        ("-1.5", 0xBFC00000),
        ("1e-2", 0x3C23D70A),
        ("2.5E+1", 0x41C80000),
        (".5", 0x3F000000),
        ("0d3FF8000000000000", 0x3FC00000),
    ],
)
def test_float_literals(literal, bits):
    assert run(f"  .reg .f32 f;\n  mov.f32 f, {literal};\n  mov.b32 %r1, f;\n  cvt.u64.u32 %out, %r1;") == [bits]


@pytest.mark.parametrize(
    "literal,value",
    [
        ("0x1F", 31),
        ("0X1f", 31),
        ("0x1FU", 31),
        ("017", 15),
        ("0b101", 5),
        ("12U", 12),
        ("-1", 2**64 - 1),
        ("-9223372036854775808", 2**63),
        ("18446744073709551615", 2**64 - 1),
        ("0xFFFFFFFFFFFFFFFF", 2**64 - 1),
        ("WARP_SZ", 32),
    ],
)
def test_int_literals(literal, value):
    assert run(f"  mov.u64 %out, {literal};") == [value]


def test_doubles():
    body = "  .reg .f64 f;\n  mov.f64 f, 0d400921FB54442D18;\n  add.f64 f, f, 1.0;\n  mov.b64 %out, f;"
    assert np.array(run(body), np.uint64).view(np.float64)[0] == np.pi + 1


def test_names_without_percent_and_ranges():
    body = """  .reg .b32 remAddr32, a<3>, $x, _y;
  .reg .pred complete, P1;
  mov.u32 a0, 1;
  mov.u32 a1, 20;
  mov.u32 a2, 300;
  mov.u32 $x, 4000;
  mov.u32 _y, 50000;
  add.u32 remAddr32, a0, a1;
  add.u32 remAddr32, remAddr32, a2;
  add.u32 remAddr32, remAddr32, $x;
  add.u32 remAddr32, remAddr32, _y;
  setp.eq.u32 complete|P1, remAddr32, 54321;
  @complete add.u32 remAddr32, remAddr32, 600000;
  @P1 trap;
  cvt.u64.u32 %out, remAddr32;"""
    assert run(body) == [654321]


def test_packs():
    body = """  mov.b64 %d1, 0x1122334455667788;
  mov.b64 {%r1, %r2}, %d1;
  mov.b32 {%h1, %h2}, %r1;
  mov.b64 {%h3, %h4, %h5, %h6}, %d1;
  mov.b32 %r3, {%h2, %h6};
  mov.b64 %out, {%r3, %r2};"""
    assert run(body) == [0x11223344_1122_5566]


def test_addresses():
    module = ".global .align 8 .b32 words[8] = {1, 2, 3, 4, 5, 6, 7, 8};\n"
    body = """  mov.u64 %d1, words;
  ld.global.u32 %r1, [words+4];
  ld.global.u32 %r2, [%d1+8];
  ld.global.u32 %r3, [ %d1 + 12 ];
  add.u64 %d2, %d1, 20;
  ld.global.u32 %r4, [%d2+-4];
  ld.global.u32 %r5, [%d2-0];
  mad.lo.u32 %r1, %r1, 10, %r2;
  mad.lo.u32 %r1, %r1, 10, %r3;
  mad.lo.u32 %r1, %r1, 10, %r4;
  mad.lo.u32 %r1, %r1, 10, %r5;
  mov.u64 %d3, words+28;
  ld.global.u32 %r2, [%d3];
  mad.lo.u32 %r1, %r1, 10, %r2;
  cvt.u64.u32 %out, %r1;"""
    assert run(body, module=module) == [234568]


def test_initialised_variables():
    module = """.global .align 4 .f32 floats[2] = {0f3F800000, 2.5};
.global .align 8 .b64 double = 0d3FF0000000000000;
.global .align 2 .u16 shorts[4] = {1, -1};
.global .align 8 .u64 pointers[2] = {shorts, generic(floats)+4};
.global .align 1 .b8 text[6] = {104, 101, 108, 108, 111, 0};
.global .align 4 .b32 grid[2][2] = {{1, 2}, {3, 4}};
"""
    body = """  ld.global.u64 %d1, [pointers+8];
  ld.f32 %r1, [%d1];
  ld.global.u64 %d2, [pointers];
  ld.global.u16 %h1, [%d2+2];
  ld.global.u16 %h2, [%d2+4];
  mov.b32 %r2, {%h1, %h2};
  ld.global.b32 %r3, [grid+8];
  ld.global.u8 %r4, [text+1];
  ld.global.b64 %d3, [double];
  setp.ne.f64 %p1, %d3, 1.0;
  @%p1 trap;
  setp.ne.u32 %p1, %r2, 0xffff;
  @%p1 trap;
  setp.ne.f32 %p1, %r1, 2.5;
  @%p1 trap;
  mad.lo.u32 %r3, %r3, 1000, %r4;
  cvt.u64.u32 %out, %r3;"""
    assert run(body, module=module) == [3101]


def test_directives_that_mean_nothing_here():
    text = f"""//
// a comment
/* another
   one */
{HEAD}
.file 1 "a.cu", 12345, 67
.pragma "nounroll";
.visible .entry k(
  .param .u64 .ptr .global .align 16 result
)
.maxntid 128, 1, 1
.minnctapersm 1
.pragma "used_bytes_mask 0xff";
{{
  .reg .b64 %d<3>;
  .pragma "nounroll";
  .loc 1 10 5
  mov.u64 %d1, 3;
  .loc 1 20 5, function_name $L__info_string0, inlined_at 1 10 5
  .loc 1 21 5, function_name $L__info_string0+16, inlined_at 1 10 5
  ld.param.u64 %d2, [result];
  st.global.u64 [%d2], %d1;
  ret;
}}
.section .debug_str
{{
$L__info_string0:
.b8 95, 90
.b32 info
}}
"""
    out = np.zeros(1, np.uint64)
    vgpu.Module(text).launch("k", 1, 1, [out])
    assert out[0] == 3
    with pytest.raises(vgpu.LaunchError, match="bound of 128 threads"):
        vgpu.Module(text).launch("k", 1, 129, [out])


def test_source_line_of_a_fault():
    body = '.file 1 "kernel.cu"\n.visible .entry k(.param .u64 p)\n{\n.reg .b32 %r<2>;\n.loc 1 42 3\n mov.u32 %r1, 0;\n'
    body += ".loc 1 43 7, function_name f, inlined_at 1 12 3\n trap;\n ret;\n}\n"
    with pytest.raises(vgpu.KernelFault) as caught:
        vgpu.Module(HEAD + body).launch("k", 1, 1, [0])
    assert (caught.value.source, caught.value.ptx_line, caught.value.instruction) == ("kernel.cu:43", 11, "trap;")


def test_loads_into_wider_registers():
    module = ".global .align 4 .b32 v[1] = {0xfffefdfc};\n"
    body = """  ld.global.s8 %d1, [v];
  ld.global.u8 %r1, [v];
  ld.global.s32 %d2, [v];
  cvt.u64.u32 %d3, %r1;
  add.u64 %out, %d1, %d2;
  add.u64 %out, %out, %d3;"""
    assert run(body, module=module) == [(-4 + (0xFFFEFDFC - 2**32) + 0xFC) % 2**64]


def test_kernel_parameter_address():
    text = (
        HEAD + ".visible .entry k(.param .u64 result, .param .align 8 .b8 s[32])\n{\n.reg .b64 %d<5>;\n.reg .b32 %r;\n"
    )
    text += " mov.b64 %d1, s;\n cvta.param.u64 %d1, %d1;\n ld.u64 %d2, [%d1+16];\n mov.b64 %d4, s;\n"
    text += " ld.param.u32 %r, [%d4+24];\n cvt.u64.u32 %d4, %r;\n add.u64 %d2, %d2, %d4;\n"
    text += " ld.param.u64 %d3, [result];\n st.global.u64 [%d3], %d2;\n ret;\n}\n"
    out = np.zeros(1, np.uint64)
    data = b"".join(v.to_bytes(8, "little") for v in (1, 2, 300, 4))
    vgpu.Module(text).launch("k", 1, 1, [out, data])
    assert out[0] == 304


# ---- what is refused ----

BODY = ".visible .entry k(.param .u64 p)\n{{\n.reg .pred %p<4>;\n.reg .b16 %h<4>;\n.reg .b32 %r<4>;\n"
BODY += ".reg .b64 %d<4>;\n{}\nret;\n}}\n"


@pytest.mark.parametrize(
    "line,message",
    [
        ("frob.u32 %r1, %r2;", "unsupported instruction frob.u32"),
        ("add.s31 %r1, %r2, %r3;", "unsupported instruction add.s31"),
        ("add.wrap.s32 %r1, %r2, %r3;", "unsupported instruction add.wrap.s32"),
        ("ld.global.L1::sometimes.u32 %r1, [%d1];", "unsupported instruction ld.global.L1::sometimes.u32"),
        ("ld.release.gpu.global.u32 %r1, [%d1];", "unsupported instruction ld.release.gpu.global.u32"),
        ("st.global.nc.u32 [%d1], %r1;", "unsupported instruction st.global.nc.u32"),
        ("tex.2d.v4.f32.f32 {%r1,%r2,%r3,%r1}, [t, {%r1,%r2}];", "unsupported instruction tex.2d.v4.f32.f32"),
        ("add.u32 %r1, %r2;", "too few operands"),
        ("add.u32 %r1, %r2, %r3, %r1;", "too many operands"),
        ("add.u32 %r1, %d1, %r2;", "register '%d1' has 64 bits, the instruction reads 32"),
        ("add.u32 %d1, %r1, %r2;", "register '%d1' has 64 bits, the instruction writes 32"),
        ("add.u32 %r1, %r9, %r2;", "unknown name '%r9'"),
        ("add.u32 5, %r1, %r2;", "is no register to write to"),
        ("@%r1 add.u32 %r1, %r1, %r2;", "'%r1' is no predicate register"),
        ("bra NOWHERE;", "unknown label 'NOWHERE'"),
        ("setp.eq.f16 %p1|%p2, %h1, %h2;", "one predicate"),
        ("lop3.b32 %r1, %r1, %r2, %r3, 256;", "immediate of 8 bits"),
        ("ld.global.v4.u32 {%r1, %r2}, [%d1];", "wrong number of registers"),
        ("st.param.u32 [p], %r1;", "read-only"),
        ("ld.param.u32 %r1, [p+6];", "misaligned parameter access"),
        ("ld.param.u64 %d1, [p+8];", "outside the kernel parameters"),
        ("call.uni missing;", "function 'missing' has no body"),
        (".reg .b128 %q; mov.b128 %q, %q;", "mov.b128"),
        (".texref t;", "unsupported directive .texref"),
    ],
)
def test_refused(line, message):
    with pytest.raises(vgpu.ParseError) as caught:
        vgpu.Module(HEAD + BODY.format(line))
    assert message in str(caught.value)
    assert "PTX line " in str(caught.value)


def test_all_unknown_instructions_are_named_at_once():
    with pytest.raises(vgpu.ParseError) as caught:
        vgpu.Module(HEAD + BODY.format("frob.u32 %r1;\nfrob.u32 %r2;\nfoo.bar;\nadd.u32 %r1, %r2;"))
    lines = str(caught.value).splitlines()
    assert [x.split(": ", 1)[1] for x in lines[1:]] == [
        "unsupported instruction foo.bar",
        "unsupported instruction frob.u32 (2 times)",
    ]
    assert "too few operands" in lines[0]


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "no .version"),
        (".version 8.7\n.target sm_90a\n.address_size 32\n", "64-bit"),
        (HEAD + ".entry k() {", "function without end"),
        (HEAD + ".entry k() { LAB: LAB: ret; }", "defined twice"),
        (HEAD + ".entry k() { .reg .b32 a; .reg .b64 a; ret; }", "declared twice"),
        (HEAD + '.entry k() { .pragma "x; ret; }', "string without end"),
        (HEAD + "/* no end", "comment without end"),
        (
            HEAD + ".func f() { call.uni g; ret; } .func g() { call.uni f; ret; } .entry k() { call.uni f; ret; }",
            "recursion",
        ),
    ],
)
def test_broken_text(text, message):
    with pytest.raises(vgpu.ParseError, match=message):
        vgpu.Module(text)
