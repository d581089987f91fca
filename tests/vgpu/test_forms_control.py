"""Every control, barrier, fence, prefetch and address form: branches, calls, named barriers, clusters, hints."""

import numpy as np
import pytest
from forms_kernel import HEAD, REGISTERS

from pagedkern import vgpu

SEEDS = (0, 1, 2)


def kernel(body, *, params="", module="", entry=""):
    """A kernel k whose first parameter is an array: %d0 points at this thread's u64 of it, %r0 is the thread."""
    head = f".visible .entry k(.param .u64 out{params}){entry}"
    start = "  ld.param.u64 %d0, [out];\n  mov.u32 %r0, %tid.x;\n  mov.u32 %r1, %ctaid.x;\n  mov.u32 %r2, %ntid.x;\n"
    start += "  mad.lo.u32 %r3, %r1, %r2, %r0;\n  mad.wide.u32 %d0, %r3, 8, %d0;\n"
    return vgpu.Module(f"{HEAD}{module}{head}\n{{\n{REGISTERS}{start}{body}\n  ret;\n}}")


def run(body, *, threads=64, blocks=1, seed=0, cluster=1, args=(), **parts):
    out = np.zeros(threads * blocks, np.uint64)
    with vgpu.session(seed=seed):
        kernel(body, **parts).launch("k", blocks, threads, [out, *args], cluster=(cluster, 1, 1))
    return out.tolist()


STORE = "  cvt.u64.u32 %d9, %r9;\n  st.global.u64 [%d0], %d9;\n"


@pytest.mark.parametrize("suffix", ("", ".uni"))
@pytest.mark.parametrize("seed", SEEDS)
def test_branch(suffix, seed):
    """A loop whose trip count is the thread's number, then a branch that all take."""
    body = "  mov.u32 %r9, 0;\n  mov.u32 %r8, 0;\nLOOP:\n  setp.ge.u32 %p1, %r8, %r0;\n  @%p1 bra END;\n"
    body += f"  add.u32 %r9, %r9, %r8;\n  add.u32 %r8, %r8, 1;\n  bra{suffix} LOOP;\nEND:\n  bra{suffix} STORE;\n"
    body += "  mov.u32 %r9, 7;\nSTORE:\n" + STORE
    assert run(body, seed=seed) == [k * (k - 1) // 2 for k in range(64)]


@pytest.mark.parametrize("suffix", ("", ".uni"))
@pytest.mark.parametrize("seed", SEEDS)
def test_jump_table(suffix, seed):
    index = "  and.b32 %r8, %r0, 3;\n" if not suffix else "  shr.u32 %r8, %r0, 5;\n"
    body = "TABLE: .branchtargets L0, L1, L2, L1;\n" + index + f"  brx.idx{suffix} %r8, TABLE;\n"
    body += "L0: mov.u32 %r9, 10;\n  bra DONE;\nL1: mov.u32 %r9, 11;\n  bra DONE;\nL2: mov.u32 %r9, 12;\nDONE:\n"
    values = [10, 11, 12, 11]
    want = [values[k >> 5 if suffix else k & 3] for k in range(64)]
    assert run(body + STORE, seed=seed) == want


def test_jump_past_the_table():
    body = "TABLE: .branchtargets L0, L1;\n  brx.idx %r0, TABLE;\nL0:\nL1: mov.u32 %r9, 1;\n"
    with pytest.raises(vgpu.KernelFault, match="brx.idx index 2 of 2 targets"):
        run(body + STORE)


FUNCTION = """
.func (.param .b32 sum) square_sum (.param .b32 a, .param .b32 b)
{
  .reg .b32 x, y;
  .reg .pred p;
  ld.param.b32 x, [a];
  ld.param.b32 y, [b];
  mul.lo.u32 x, x, x;
  setp.gt.u32 p, y, 20;
  @p bra SHORT;
  mad.lo.u32 x, y, y, x;
SHORT:
  st.param.b32 [sum], x;
  RETURN;
}
.func nothing ()
{
  ret;
}
"""


@pytest.mark.parametrize("call", ("call", "call.uni"))
@pytest.mark.parametrize("leave", ("ret", "ret.uni"))
@pytest.mark.parametrize("seed", SEEDS)
def test_call(call, leave, seed):
    """Calls from diverged lanes, and one without parameters."""
    body = "  setp.lt.u32 %p1, %r0, 7;\n  mov.u32 %r9, 5;\n  @%p1 bra SKIP;\n  {\n  .param .b32 one;\n"
    body += "  .param .b32 two;\n  .param .b32 back;\n  st.param.b32 [one], %r0;\n  st.param.b32 [two], %r0;\n"
    body += f"  {call} (back), square_sum, (one, two);\n  ld.param.b32 %r9, [back];\n  }}\nSKIP:\n  {call} nothing;\n"
    got = run(body + STORE + f"  {leave};\n", seed=seed, module=FUNCTION.replace("RETURN", leave))
    assert got == [5 if k < 7 else k * k + (k * k if k <= 20 else 0) for k in range(64)]


def test_exit_of_some_lanes():
    body = "  mov.u32 %r9, 1;\n  and.b32 %r8, %r0, 1;\n  setp.eq.u32 %p1, %r8, 0;\n  @%p1 exit;\n"
    assert run(body + STORE) == [k & 1 for k in range(64)]


@pytest.mark.parametrize("form", ("trap", "brkpt"))
def test_trap(form):
    """Stops the kernel, naming the lane; not reached, it does nothing."""
    body = f"  setp.eq.u32 %p1, %r0, 37;\n  @%p1 {form};\n  mov.u32 %r9, 1;\n" + STORE
    with pytest.raises(vgpu.KernelFault) as caught:
        run(body)
    assert (caught.value.kind, caught.value.thread) == ("trap", (37, 0, 0))
    assert run(body.replace("37", "64")) == [1] * 64


NO_EFFECT = [
    *("nanosleep.u32 20", "nanosleep.u32 %r0", "griddepcontrol.wait", "griddepcontrol.launch_dependents"),
    *("setmaxnreg.inc.sync.aligned.u32 64", "setmaxnreg.dec.sync.aligned.u32 24", "pmevent 7"),
    *(f"membar.{level}" for level in ("cta", "gl", "sys")),
    *(
        f"fence{k}.{s}"
        for k in ("", ".sc", ".acq_rel", ".acquire", ".release")
        for s in ("cta", "cluster", "gpu", "sys")
    ),
    *("fence.mbarrier_init.release.cluster", "fence.proxy.alias", "fence.proxy.async"),
    *(f"fence.proxy.async.{space}" for space in ("global", "shared::cta", "shared::cluster")),
    *(f"fence.proxy.tensormap::generic.release.{s}" for s in ("cta", "cluster", "gpu", "sys")),
    *(f"fence.proxy.tensormap::generic.acquire.{s} [%d0], 128" for s in ("cta", "cluster", "gpu", "sys")),
    *("prefetch.global.L1 [%d0]", "prefetch.global.L2 [%d0+64]", "prefetch.global.L2::evict_last [%d0]"),
    *("prefetch.global.L2::evict_normal [%d0]", "prefetch.L1 [%d0]", "prefetch.L2 [%d0]", "prefetchu.L1 [%d0]"),
    *("prefetch.local.L1 [frame]", "prefetch.local.L2 [frame]", "prefetch.tensormap [%d0]"),
    *("prefetch.param.tensormap [map]", "prefetch.const.tensormap [table]"),
]


@pytest.mark.parametrize("text", NO_EFFECT)
def test_hints(text):
    """Hints and orders change no register and no memory. (What fences order is tested with what they order.)"""
    module = ".const .align 64 .b8 table[128];\n"
    body = f"  .local .align 8 .b8 frame[16];\n  add.u32 %r9, %r0, 3;\n  {text};\n" + STORE
    got = run(body, module=module, params=", .param .align 64 .b8 map[128]", args=[bytes(128)])
    assert got == [k + 3 for k in range(64)]


# ---- barriers ----

HEADS = ("bar", "bar.cta", "barrier", "barrier.cta")
TILE = ".shared .align 4 .b32 tile[256];\n"


def spellings(operation, tail=""):
    for head in HEADS:
        yield f"{head}.{operation}{tail}"
        if head.startswith("barrier"):
            yield f"{head}.{operation}.aligned{tail}"


PUT = "  mov.u32 %r5, tile;\n  mad.lo.u32 %r6, %r0, 4, %r5;\n  st.shared.u32 [%r6], %r0;\n"


@pytest.mark.parametrize("form", list(spellings("sync")))
@pytest.mark.parametrize("count", ("", ", 96", ", %r2"))
def test_sync(form, count):
    """Every thread reads what another warp wrote before the barrier."""
    body = PUT + f"  {form} 3{count};\n  sub.u32 %r7, 95, %r0;\n  mad.lo.u32 %r7, %r7, 4, %r5;\n"
    body += "  ld.shared.u32 %r9, [%r7];\n" + STORE
    for seed in SEEDS:
        assert run(body, threads=96, seed=seed, module=TILE) == list(range(95, -1, -1))


@pytest.mark.parametrize("form", list(spellings("arrive")))
def test_arrive(form):
    """The first warp arrives and goes on; the second waits for it."""
    wait = form.replace("arrive", "sync")
    body = PUT + f"  mov.u32 %r9, 0;\n  setp.ge.u32 %p1, %r0, 32;\n  @%p1 bra READ;\n  {form} 1, 64;\n  bra DONE;\n"
    body += f"READ:\n  {wait} 1, 64;\n  ld.shared.u32 %r9, [%r6+-128];\nDONE:\n"
    for seed in SEEDS:
        assert run(body + STORE, seed=seed, module=TILE) == [max(0, k - 32) for k in range(64)]


REDUCTIONS = [(form, op) for op in ("popc", "and", "or") for form in spellings(f"red.{op}", "")]


@pytest.mark.parametrize("form,op", REDUCTIONS)
@pytest.mark.parametrize("bang", ("", "!"))
def test_reduction(form, op, bang):
    kind = ".u32" if op == "popc" else ".pred"
    to = "%r9" if op == "popc" else "%p5"
    after = "" if op == "popc" else "  selp.u32 %r9, 1, 0, %p5;\n"
    for threshold in (0, 1, 40, 96):
        for count in ("", " 96,"):
            body = f"  setp.lt.u32 %p1, %r0, {threshold};\n  {form}{kind} {to}, 2,{count} {bang}%p1;\n" + after + STORE
            yes = 96 - threshold if bang else threshold
            want = {"popc": yes, "and": int(yes == 96), "or": int(yes > 0)}[op]
            assert run(body, threads=96) == [want] * 96


ARRIVES = [f"barrier.cluster.arrive{s}{t}" for s in ("", ".release", ".relaxed") for t in ("", ".aligned")]
WAITS = [f"barrier.cluster.wait{s}{t}" for s in ("", ".acquire") for t in ("", ".aligned")]
MAPS = {
    "mapa.u32": "  mapa.u32 %r8, %r6, %r7;\n  ld.shared::cluster.u32 %r9, [%r8];\n",
    "mapa.shared::cluster.u32": "  mapa.shared::cluster.u32 %r8, %r6, %r7;\n  ld.shared::cluster.u32 %r9, [%r8];\n",
    "mapa.u64": "  cvt.u64.u32 %d5, %r6;\n  cvta.shared.u64 %d5, %d5;\n  mapa.u64 %d6, %d5, %r7;\n"
    "  ld.u32 %r9, [%d6];\n",
    "mapa.shared::cluster.u64": "  cvt.u64.u32 %d5, %r6;\n  mapa.shared::cluster.u64 %d6, %d5, %r7;\n"
    "  ld.shared::cluster.u32 %r9, [%d6];\n",
}


def read_next_block(arrive, wait, read, order=""):
    """Each block of a cluster of four reads the shared memory of the next one."""
    body = "  mov.u32 %r5, tile;\n  mad.lo.u32 %r6, %r0, 4, %r5;\n  st.shared.u32 [%r6], %r3;\n" + order
    body += (
        f"  {arrive};\n  {wait};\n  mov.u32 %r7, %cluster_ctarank;\n  add.u32 %r7, %r7, 1;\n  and.b32 %r7, %r7, 3;\n"
    )
    body += read + f"  {arrive};\n  {wait};\n" + STORE
    return body


def next_block_values():
    return [(k // 32 // 4 * 4 + (k // 32 + 1) % 4) * 32 + k % 32 for k in range(8 * 32)]


@pytest.mark.parametrize("arrive", ARRIVES)
@pytest.mark.parametrize("wait", WAITS)
def test_cluster_barrier(arrive, wait):
    order = "  fence.acq_rel.cluster;\n" if "relaxed" in arrive else ""
    body = read_next_block(arrive, wait, MAPS["mapa.u32"], order)
    for seed in SEEDS:
        assert run(body, threads=32, blocks=8, cluster=4, seed=seed, module=TILE) == next_block_values()


@pytest.mark.parametrize("form", MAPS)
def test_mapa(form):
    body = read_next_block("barrier.cluster.arrive", "barrier.cluster.wait", MAPS[form])
    assert run(body, threads=32, blocks=8, cluster=4, module=TILE) == next_block_values()


def test_mapa_past_the_cluster():
    body = "  mov.u32 %r5, tile;\n  mapa.u32 %r8, %r5, 4;\n  mov.u32 %r9, 0;\n" + STORE
    with pytest.raises(vgpu.KernelFault, match="mapa to block 4 of a cluster of 4"):
        run(body, threads=32, blocks=4, cluster=4, module=TILE)


RANKS = {
    "getctarank.u32": "  getctarank.u32 %r9, %r8;\n",
    "getctarank.shared::cluster.u32": "  getctarank.shared::cluster.u32 %r9, %r8;\n",
    "getctarank.u64": "  cvt.u64.u32 %d5, %r8;\n  cvta.shared::cluster.u64 %d5, %d5;\n  getctarank.u64 %r9, %d5;\n",
}


@pytest.mark.parametrize("form", RANKS)
def test_getctarank(form):
    """Of an address in another block, and (blocks of odd rank) of an own one."""
    body = (
        "  mov.u32 %r8, tile;\n  mov.u32 %r7, %cluster_ctarank;\n  and.b32 %r6, %r7, 1;\n  setp.ne.u32 %p1, %r6, 0;\n"
    )
    body += "  add.u32 %r7, %r7, 3;\n  and.b32 %r7, %r7, 3;\n  @%p1 bra OWN;\n  mapa.u32 %r8, %r8, %r7;\nOWN:\n"
    got = run(body + RANKS[form] + STORE, threads=32, blocks=4, cluster=4, module=TILE)
    assert got == [rank if rank & 1 else (rank + 3) % 4 for rank in range(4) for _ in range(32)]


# ---- address spaces ----

SPACES = {  # an address of each space in %d5
    "global": "  mov.u64 %d5, variable;\n",
    "const": "  mov.u64 %d5, table;\n",
    "shared": "  mov.u32 %r8, tile;\n  cvt.u64.u32 %d5, %r8;\n",
    "shared::cta": "  mov.u64 %d5, tile;\n",
    "shared::cluster": "  mov.u32 %r8, tile;\n  mapa.u32 %r8, %r8, 1;\n  cvt.u64.u32 %d5, %r8;\n",
    "local": "  mov.u64 %d5, frame;\n",
    "param": "  mov.b64 %d5, blob;\n",
    "param::entry": "  mov.b64 %d5, blob;\n",
}
MEMORY = ".global .align 8 .b64 variable[2] = {11, 12};\n.const .align 8 .b64 table[2] = {21, 22};\n" + TILE


def in_space(body, **kwargs):
    start = "  .local .align 8 .b8 frame[16];\n  mov.u64 %d7, 41;\n  st.local.u64 [frame+8], %d7;\n  mov.u64 %d7, 31;\n"
    start += "  setp.ne.u32 %p9, %r0, 0;\n  @%p9 bra WRITTEN;\n  st.shared.u64 [tile+8], %d7;\nWRITTEN:\n"
    start += "  barrier.cluster.arrive;\n  barrier.cluster.wait;\n"
    end = "  barrier.cluster.arrive;\n  barrier.cluster.wait;\n"
    blob = (51).to_bytes(8, "little") + (52).to_bytes(8, "little")
    parts = {"module": MEMORY, "params": ", .param .align 8 .b8 blob[16]", "args": [blob]}
    return run(start + body + end, threads=32, blocks=2, cluster=2, **parts, **kwargs)


CELL = {"global": 12, "const": 22, "local": 41, "param": 52, "param::entry": 52}


@pytest.mark.parametrize("space", SPACES)
def test_cvta(space):
    """To generic, a generic load; back again, a load from the space."""
    body = SPACES[space] + f"  cvta.{space}.u64 %d6, %d5;\n  ld.u64 %d7, [%d6+8];\n  st.global.u64 [%d0], %d7;\n"
    assert in_space(body) == [CELL.get(space, 31)] * 64
    base = space.split(":")[0] if space != "shared::cluster" else space
    body = SPACES[space] + f"  cvta.{space}.u64 %d6, %d5;\n  cvta.to.{space}.u64 %d6, %d6;\n"
    body += f"  ld.{base}.u64 %d7, [%d6+8];\n  st.global.u64 [%d0], %d7;\n"
    assert in_space(body) == [CELL.get(space, 31)] * 64


@pytest.mark.parametrize("asked", SPACES)
def test_isspacep(asked):
    """Every kind of generic address against every question."""
    for space, address in SPACES.items():
        body = address + f"  cvta.{space}.u64 %d6, %d5;\n  isspacep.{asked} %p1, %d6;\n"
        got = in_space(body + "  selp.u32 %r9, 1, 0, %p1;\n" + STORE)
        if space == "shared::cluster" and asked == "shared::cta":
            want = [0] * 32 + [1] * 32  # block 1 asks about its own memory
        elif asked.startswith("shared"):
            want = [int(space.startswith("shared"))] * 64
        else:
            want = [int(space.split("::")[0] == asked.split("::")[0])] * 64
        assert got == want, space
