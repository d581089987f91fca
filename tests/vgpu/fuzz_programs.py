"""What the fuzzer feeds: right programs of every family, edits of their text, and random instructions."""

import functools
import re

import test_forms_atomic
import test_forms_compare
import test_forms_convert
import test_forms_float
import test_forms_integer
import test_forms_memory
from forms_kernel import HEAD, PREFIX

ASYNC = f"""{HEAD}
.shared .align 128 .b8 tile[8192];
.shared .align 8 .b64 bar;
.visible .entry k(.param .u64 a, .param .u64 b, .param .align 64 .b8 map[128])
{{
  .reg .pred %p<8>;
  .reg .b32 %r<140>;
  .reg .b64 %d<20>;
  ld.param.u64 %d1, [a];
  ld.param.u64 %d2, [b];
  mov.b64 %d3, map;
  mov.u32 %r1, tile;
  mov.u32 %r2, bar;
  mov.u32 %r3, %tid.x;
  setp.ne.u32 %p1, %r3, 0;
  @%p1 bra READY;
  mbarrier.init.shared::cta.b64 [%r2], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], 512, [%r2];
READY:
  bar.sync 0;
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
  @!%p2 bra WAIT;
  mad.lo.u32 %r4, %r3, 16, %r1;
  cp.async.cg.shared.global [%r4+2048], [%d1], 16;
  cp.async.commit_group;
  cp.async.wait_group 0;
  bar.sync 0;
  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r4];
  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}},
    {{%r10, %r11}}, {{0.0, 0.0, 0.0, 0.0}};
  st.shared.v4.b32 [%r4+4096], {{%r20, %r21, %r22, %r23}};
  fence.proxy.async.shared::cta;
  bar.sync 0;
  mov.b64 %d5, 0x4000004000010000;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r30, %r31, %r32, %r33}}, %d5, %d5, 0, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  @%p1 bra END;
  cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d3, {{%r3, %r3}}], [%r1];
  cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r1], 256;
  cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d2], [%r1], 64;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
END:
  redux.sync.add.u32 %r40, %r3, 0xffffffff;
  shfl.sync.bfly.b32 %r41|%p3, %r40, 1, 31, -1;
  match.any.sync.b32 %r42, %r41, -1;
  barrier.cluster.arrive;
  barrier.cluster.wait;
  ret;
}}
"""

CALLS = f"""{HEAD}
.global .align 8 .b64 table[4] = {{1, 2, text, generic(table)+8}};
.const .align 1 .b8 text[3] = {{97, 98, 0}};
.func (.param .b32 r) f (.param .b32 a)
{{
  .reg .b32 x;
  ld.param.b32 x, [a];
  add.u32 x, x, 1;
  st.param.b32 [r], x;
  ret;
}}
.visible .entry k(.param .u64 a, .param .u32 n, .param .f32 x)
.maxntid 128, 1, 1
{{
  .reg .pred %p<8>;
  .reg .b16 %h<8>;
  .reg .b32 %r<40>;
  .reg .b64 %d<20>;
  .local .align 8 .b8 frame[64];
  .shared .align 4 .b32 words[64];
  .loc 1 3 1
  ld.param.u64 %d1, [a];
  ld.param.u32 %r1, [n];
  mov.u32 %r2, %tid.x;
  mov.u32 %r9, 0;
LOOP:
  {{
  .param .b32 to;
  .param .b32 back;
  st.param.b32 [to], %r9;
  call.uni (back), f, (to);
  ld.param.b32 %r9, [back];
  }}
  setp.lt.u32 %p1, %r9, %r1;
  @%p1 bra LOOP;
  and.b32 %r3, %r2, 3;
LIST: .branchtargets A, B, A, B;
  brx.idx %r3, LIST;
A: st.local.u32 [frame+4], %r9;
  ld.local.v2.u16 {{%h1, %h2}}, [frame+4];
B: mad.wide.u32 %d2, %r2, 4, %d1;
  mad.lo.u32 %r4, %r2, 4, 0;
  mov.u32 %r5, words;
  add.u32 %r5, %r5, %r4;
  st.shared.u32 [%r5], %r9;
  bar.sync 0, 64;
  atom.global.add.u32 %r6, [%d2], %r9;
  red.shared.max.s32 [%r5], 7;
  ld.global.nc.v2.f32 {{%r7, %r8}}, [%d1+8];
  fma.rn.ftz.f32 %r7, %r7, %r8, 0f3F800000;
  cvt.rn.satfinite.e4m3x2.f32 %h3, %r7, %r8;
  nanosleep.u32 20;
  ret;
}}
"""


@functools.cache
def all_forms():
    """Lane forms of every family."""
    return [
        *test_forms_integer.integer_forms(),
        *test_forms_integer.special_forms(),
        *test_forms_integer.logic_forms(),
        *test_forms_integer.shift_forms(),
        *test_forms_float.arithmetic_forms(),
        *test_forms_float.half_forms(),
        *test_forms_float.approximate_forms(),
        *test_forms_convert.float_to_float_forms(),
        *test_forms_convert.float_to_int_forms(),
        *test_forms_compare.setp_forms(),
        *test_forms_compare.select_forms(),
        *test_forms_compare.move_forms(),
        *test_forms_memory.plain_forms("ld"),
        *test_forms_memory.plain_forms("st"),
        *test_forms_atomic.read_modify_write_forms(),
    ]


def some_forms(rng, count):
    return rng.sample(all_forms(), count)


TOKEN = re.compile(r"\s+|[%$\w.:]+|.", re.S)
NUMBERS = (
    *("0", "1", "-1", "2", "3", "7", "8", "15", "16", "31", "32", "33", "64", "127", "255", "256", "1024", "4095"),
    *("65536", "1048575", "1048576", "2147483647", "2147483648", "4294967295", "4294967296", "-2147483648"),
    *("9223372036854775807", "18446744073709551615", "99999999999999999999999", "0xffffffffffffffff", "0x", "0b2"),
    *("0f7F800000", "0f7FC00000", "0d7FF0000000000000", "1e999", "-1e-999", "1.", ".", "0f", "08", "1e", "--1"),
)
TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16", "b32", "u32", "s32", "f32", "b64", "u64", "f64", "pred")
TYPED = re.compile(rf"\.({'|'.join(TYPES)})\b")
EXTRA = (
    *("{", "}", "(", ")", "[", "]", ";", ",", "|", "!", "@", "+", "-", ":", "_", "<", ">", "=", '"', "/*", "//", "\\"),
    *(".reg", ".shared", ".local", ".global", ".const", ".param", ".align", ".loc", ".pragma", ".extern", ".func"),
    *("%tid.x", "%clock64", "WARP_SZ", "generic", ".v4", ".b128", "\x00", "\x7f", "\u20ac", "ret", "call", "bra"),
)


def mutate(text, corpus, rng):
    """A few edits: tokens deleted, doubled, swapped, replaced; numbers, types, sizes changed; lines moved; nesting."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        tokens = TOKEN.findall(text)
        solid = [k for k, t in enumerate(tokens) if not t.isspace()]
        if not solid:
            return text
        k = rng.choice(solid)
        kind = rng.randrange(13)
        if kind == 0:
            del tokens[k]
        elif kind == 1:
            tokens.insert(k, tokens[k] * rng.choice((1, 2, 50)))
        elif kind == 2:
            j = rng.choice(solid)
            tokens[k], tokens[j] = tokens[j], tokens[k]
        elif kind == 3:
            other = TOKEN.findall(rng.choice(corpus))
            tokens[k] = rng.choice(other)
        elif kind == 4:
            numbers = [n for n in solid if re.fullmatch(r"-?\d\w*", tokens[n])]
            tokens[rng.choice(numbers or solid)] = rng.choice(NUMBERS)
        elif kind == 5:
            typed = [n for n in solid if TYPED.search(tokens[n])]
            n = rng.choice(typed or solid)
            tokens[n] = TYPED.sub(lambda m: "." + rng.choice(TYPES), tokens[n])
        elif kind == 6:
            tokens[k] = rng.choice(EXTRA)
        elif kind == 7:
            tokens.insert(k, rng.choice(EXTRA) * rng.choice((1, 2, 70, 5000)))
        elif kind == 8:
            registers = [n for n in solid if tokens[n].startswith("%")]
            if registers:
                tokens[rng.choice(registers)] = rng.choice([tokens[n] for n in registers])
        elif kind == 9:
            parts = tokens[k].split(".")
            del parts[rng.randrange(len(parts))]
            tokens[k] = ".".join(parts)
        else:
            lines = text.split("\n")
            j, n = rng.randrange(len(lines)), rng.randrange(len(lines))
            if kind == 10:
                lines[j], lines[n] = lines[n], lines[j]
            elif kind == 11:
                lines[j:j] = lines[n : n + rng.randint(1, 5)] * rng.choice((1, 1, 3, 200))
            else:
                del lines[j : j + rng.randint(1, 3)]
            tokens = ["\n".join(lines)]
        text = "".join(tokens)[:400_000]
    return text


def wild_kernel(rng):
    """Random instructions on a few registers, random guards and branches, random addresses."""
    lines = ["  ld.param.u64 %d1, [a];", "  mov.u32 %r1, tile;", "  mov.u32 %r2, %tid.x;"]
    lines += [f"  mov.u32 %r{k}, {rng.choice(NUMBERS[:26])};" for k in range(3, 10)]
    lines += [f"  cvt.u64.u32 %d{k}, %r{rng.randint(1, 9)};" for k in range(2, 8)]
    lines += [f"  cvt.u16.u32 %h{k}, %r{rng.randint(1, 9)};" for k in range(1, 8)]
    lines += [f"  setp.lt.u32 %p{k}, %r{rng.randint(1, 9)}, %r{rng.randint(1, 9)};" for k in range(1, 5)]
    count = {"p": 4, "h": 7, "w": 9, "x": 7}
    forms = [f for f in some_forms(rng, 60) if f.around == "OP;"]
    labels = rng.randint(1, 6)
    memory = (
        "ld.shared.u32 %r{a}, [%r{b}];",
        "st.shared.u32 [%r{b}+{o}], %r{a};",
        "ld.global.u32 %r{a}, [%d{b}+{o}];",
        "st.global.u8 [%d{b}], %h{a};",
        "atom.shared.cas.b32 %r{a}, [%r1+{o}], %r{b}, %r{a};",
        "ld.u32 %r{a}, [%d{b}];",
        "bar.sync {o};",
        "bar.arrive %r{a}, %r{b};",
        "bar.warp.sync %r{a};",
        "shfl.sync.idx.b32 %r{a}, %r{b}, %r{a}, %r{b}, %r{a};",
        "vote.sync.ballot.b32 %r{a}, %p1, %r{b};",
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "cp.async.ca.shared.global [%r{b}], [%d{a}], 16;",
        "cp.async.wait_all;",
        "mbarrier.init.shared.b64 [%r{b}], %r{a};",
        "mbarrier.arrive.shared.b64 _, [%r{b}];",
        "mapa.u32 %r{a}, %r{b}, {o};",
        "exit;",
        "ret;",
        "activemask.b32 %r{a};",
        "fns.b32 %r{a}, %r{b}, %r{a}, %r{b};",
        "isspacep.shared %p2, %d{b};",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d{b}], %r{a}, [%r{b}];",
        "prefetch.global.L2 [%d{b}];",
    )
    body = []
    for _ in range(rng.randint(5, 60)):
        guard = f"@{rng.choice(('', '!'))}%p{rng.randint(1, 4)} " if rng.random() < 0.3 else ""
        choice = rng.random()
        if choice < 0.15:
            body.append(f"  {guard}bra L{rng.randrange(labels)};")
        elif choice < 0.4:
            text = rng.choice(memory)
            a, b = rng.randint(1, 7), rng.choice((1, 1, 2, rng.randint(1, 7)))
            body.append(f"  {guard}" + text.format(a=a, b=b, o=rng.choice((0, 0, 4, 8, 1, 3, 4096, 15, 16))))
        else:
            form = rng.choice(forms)
            names = {}
            for letter, kinds in (("s", form.sources), ("d", form.to)):
                for k, kind in enumerate(kinds):
                    names[f"{letter}{k}"] = f"{PREFIX[kind]}{rng.randint(1, count[kind])}"
            body.append(f"  {guard}{form.name} {form.operands().format(**names)};")
    for k in range(labels):
        body.insert(rng.randrange(len(body) + 1), f"L{k}:")
    head = ".shared .align 16 .b8 tile[1024];\n.visible .entry k(.param .u64 a)\n{\n  .reg .pred %p<5>;\n"
    head += "  .reg .b16 %h<8>;\n  .reg .b32 %r<10>;\n  .reg .b64 %d<8>;\n"
    return HEAD + head + "\n".join(lines + body) + "\n  ret;\n}\n"
