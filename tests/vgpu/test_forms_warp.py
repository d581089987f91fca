"""Every form among the lanes of a warp: shfl, vote, match, redux, elect, activemask, under full and partial masks."""

import functools
import random

import numpy as np
import pytest
from forms_kernel import HEAD, REGISTERS, special_ints

from pagedkern import vgpu

FULL = 0xFFFFFFFF
MASKS = (FULL, 0x0000FFFF, 0xF0F0F0F0, 0x80000001, 0x00000100, 0x7FFFFFFE)
NOBODY = 0xDEADBEEF


def run(body, masks, *, words=(), predicates=(), results=1, regs=""):
    """Warp w runs `body` with lanes masks[w] only (%r1: the mask, %r2.. : words, %p1.. : predicates, %r50..: results).

    words and predicates: [warp][lane] each. Returns [result][warp][lane]; lanes outside the mask keep NOBODY.
    """
    text = "  ld.param.u64 %d0, [source];\n  ld.param.u64 %d1, [result];\n  mov.u32 %r0, %tid.x;\n"
    text += "  mul.wide.u32 %d2, %r0, 4;\n  add.s64 %d0, %d0, %d2;\n  add.s64 %d1, %d1, %d2;\n"
    text += "  ld.global.u32 %r1, [%d0];\n"
    stride = 4 * 32 * len(masks)
    for k in range(len(words)):
        text += f"  ld.global.u32 %r{2 + k}, [%d0+{stride * (1 + k)}];\n"
    for k in range(len(predicates)):
        text += f"  ld.global.u32 %r99, [%d0+{stride * (1 + len(words) + k)}];\n  setp.ne.u32 %p{1 + k}, %r99, 0;\n"
    text += "  mov.u32 %r98, %lanemask_eq;\n  and.b32 %r98, %r98, %r1;\n  setp.eq.u32 %p0, %r98, 0;\n  @%p0 bra DONE;\n"
    text += body
    text += "".join(f"  st.global.u32 [%d1+{stride * k}], %r{50 + k};\n" for k in range(results))
    head = ".visible .entry k(.param .u64 source, .param .u64 result)"
    members = np.repeat(np.array(masks, np.uint32), 32)
    source = np.concatenate([members, *(np.array(x, np.uint32).ravel() for x in (*words, *predicates))])
    out = np.full((results, len(masks), 32), NOBODY, np.uint32)
    module = vgpu.Module(f"{HEAD}{head}\n{{\n{REGISTERS}{regs}{text}DONE:\n  ret;\n}}")
    module.launch("k", 1, 32 * len(masks), [source, out])
    return out


def lanes_of(mask):
    return [lane for lane in range(32) if mask >> lane & 1]


def random_words(rng, masks, pool):
    return [[rng.choice(pool) for _ in range(32)] for _ in masks]


def expect(got, masks, function):
    """function(warp, lane) -> value, for the lanes that ran."""
    for warp, mask in enumerate(masks):
        for lane in range(32):
            want = function(warp, lane) if mask >> lane & 1 else NOBODY
            assert int(got[warp][lane]) == want & FULL, (warp, lane)


def shuffle_source(mode, lane, b, c):
    """The ISA's pseudo code: (source lane, inside)."""
    clamp, segment = c & 31, c >> 8 & 31
    b &= 31
    top, low = (lane & segment) | (clamp & ~segment & 31), lane & segment
    if mode == "up":
        j, inside = lane - b, lane - b >= top
    elif mode == "down":
        j, inside = lane + b, lane + b <= top
    elif mode == "bfly":
        j, inside = lane ^ b, (lane ^ b) <= top
    else:
        j = low | (b & ~segment & 31)
        inside = j <= top
    return (j if inside else lane), inside


@pytest.mark.parametrize("mode", ("up", "down", "bfly", "idx"))
def test_shfl(mode):
    rng = random.Random(mode)
    masks = [FULL] * 12
    widths = [rng.choice((1, 2, 4, 8, 16, 32)) for _ in masks]
    c = [((32 - w) << 8) | (0 if mode == "up" else 31) for w in widths]
    c[-2:] = [0x0714, 0x1505]  # segment masks and clamps that no width gives
    values = random_words(rng, masks, list(range(1000, 2000)))
    b = random_words(rng, masks, [0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 33])
    words = [values, b, [[x] * 32 for x in c]]
    body = f"  shfl.sync.{mode}.b32 %r50|%p9, %r2, %r3, %r4, %r1;\n  selp.u32 %r51, 1, 0, %p9;\n"
    body += f"  shfl.sync.{mode}.b32 %r52, %r2, %r3, %r4, 0xffffffff;\n"
    got = run(body, masks, words=words, results=3)
    source = [[shuffle_source(mode, lane, b[w][lane], c[w]) for lane in range(32)] for w in range(len(masks))]
    expect(got[0], masks, lambda w, lane: values[w][source[w][lane][0]])
    expect(got[1], masks, lambda w, lane: int(source[w][lane][1]))
    expect(got[2], masks, lambda w, lane: values[w][source[w][lane][0]])


def test_shfl_among_some_lanes():
    """A partial member mask; every member reads a member."""
    rng = random.Random(3)
    masks = list(MASKS)
    values = random_words(rng, masks, list(range(1000)))
    b = [[rng.choice(lanes_of(m)) for _ in range(32)] for m in masks]
    got = run("  shfl.sync.idx.b32 %r50, %r2, %r3, 31, %r1;\n", masks, words=[values, b])
    expect(got[0], masks, lambda w, lane: values[w][b[w][lane]])


VOTES = {
    "all": lambda yes: int(all(yes)),
    "any": lambda yes: int(any(yes)),
    "uni": lambda yes: int(all(yes) or not any(yes)),
}


@pytest.mark.parametrize("mode", (*VOTES, "ballot"))
@pytest.mark.parametrize("bang", ("", "!"))
def test_vote(mode, bang):
    rng = random.Random(mode)
    masks = list(MASKS) * 3
    p = random_words(rng, masks, [0, 1])
    p[: len(MASKS)] = [[1] * 32 for _ in MASKS]
    p[len(MASKS) : 2 * len(MASKS)] = [[0] * 32 for _ in MASKS]
    if mode == "ballot":
        body = f"  vote.sync.ballot.b32 %r50, {bang}%p1, %r1;\n"
    else:
        body = f"  vote.sync.{mode}.pred %p9, {bang}%p1, %r1;\n  selp.u32 %r50, 1, 0, %p9;\n"
    got = run(body, masks, predicates=[p])

    def want(w, lane):
        yes = {k: p[w][k] ^ (bang == "!") for k in lanes_of(masks[w])}
        return sum(v << k for k, v in yes.items()) if mode == "ballot" else VOTES[mode](yes.values())

    expect(got[0], masks, want)


@pytest.mark.parametrize("bits", (32, 64))
def test_match(bits):
    rng = random.Random(bits)
    masks = list(MASKS) * 2
    low = random_words(rng, masks, [0, 1, 5, FULL])
    high = random_words(rng, masks, [0, 7])
    for w in range(0, len(masks), 3):
        low[w], high[w] = [9] * 32, [4] * 32
    register = "%r2" if bits == 32 else "%d5"
    body = "  mov.b64 %d5, {%r2, %r3};\n"
    body += f"  match.any.sync.b{bits} %r50, {register}, %r1;\n  match.all.sync.b{bits} %r51|%p9, {register}, %r1;\n"
    body += f"  selp.u32 %r52, 1, 0, %p9;\n  match.all.sync.b{bits} %r53, {register}, %r1;\n"
    got = run(body, masks, words=[low, high], results=4)

    def value(w, lane):
        return low[w][lane] | (high[w][lane] << 32 if bits == 64 else 0)

    def equals(w, lane):
        return sum(1 << k for k in lanes_of(masks[w]) if value(w, k) == value(w, lane))

    expect(got[0], masks, equals)
    expect(got[1], masks, lambda w, lane: masks[w] if equals(w, lane) == masks[w] else 0)
    expect(got[2], masks, lambda w, lane: int(equals(w, lane) == masks[w]))
    expect(got[3], masks, lambda w, lane: masks[w] if equals(w, lane) == masks[w] else 0)


REDUCE = {"add": lambda a, b: a + b, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}
REDUX = [f"{op}.{t}32" for op in ("add", "min", "max") for t in "us"] + [f"{op}.b32" for op in ("and", "or", "xor")]


@pytest.mark.parametrize("tail", REDUX)
def test_redux(tail):
    rng = random.Random(tail)
    masks = list(MASKS)
    values = random_words(rng, masks, special_ints(32))
    got = run(f"  redux.sync.{tail} %r50, %r2, %r1;\n", masks, words=[values])
    op, kind = tail.split(".")

    def want(w, lane):
        members = [values[w][k] for k in lanes_of(masks[w])]
        if op in ("min", "max"):
            order = (lambda v: v) if kind == "u32" else (lambda v: v - (v >> 31 << 32))
            return (min if op == "min" else max)(members, key=order)
        return functools.reduce(REDUCE[op], members)

    expect(got[0], masks, want)


def test_elect():
    masks = list(MASKS)
    body = "  elect.sync %r50|%p9, %r1;\n  selp.u32 %r51, 1, 0, %p9;\n  elect.sync _|%p8, %r1;\n"
    got = run(body + "  selp.u32 %r52, 1, 0, %p8;\n", masks, results=3)
    expect(got[0], masks, lambda w, lane: lanes_of(masks[w])[0])
    for k in (1, 2):
        expect(got[k], masks, lambda w, lane: int(lane == lanes_of(masks[w])[0]))


def test_activemask():
    got = run("  activemask.b32 %r50;\n", list(MASKS))
    expect(got[0], MASKS, lambda w, lane: MASKS[w])


def test_members_in_two_places():
    """A .sync instruction waits for members that come by another path."""
    body = "  and.b32 %r60, %r0, 1;\n  setp.eq.u32 %p9, %r60, 0;\n  @%p9 bra EVEN;\n  add.u32 %r2, %r2, 100;\n"
    body += "EVEN:\n  shfl.sync.bfly.b32 %r50, %r2, 1, 31, 0xffffffff;\n  bar.warp.sync %r1;\n"
    values = [[10 * lane for lane in range(32)]]
    got = run(body, [FULL], words=[values])
    expect(got[0], [FULL], lambda w, lane: 10 * (lane ^ 1) + 100 * ((lane ^ 1) & 1))


@pytest.mark.parametrize("form", ("shfl.sync.idx.b32 %r50, %r2, 0, 31, {}", "redux.sync.add.u32 %r50, %r2, {}"))
def test_not_a_member(form):
    with pytest.raises(vgpu.KernelFault) as caught:
        run("  " + form.format("0x7fffffff") + ";\n", [FULL], words=[[[0] * 32]])
    assert (caught.value.kind, caught.value.thread) == ("invalid", (31, 0, 0))
    assert "member mask" in caught.value.detail
