"""Counters of the compiled Triton kernels, without a GPU: traffic and conflicts from the virtual GPU, registers and the
main loop from the sm_90 machine code.

    python -m bench.bench_triton_counters             # decode over bf16 and FP8, 4k context
    python -m bench.bench_triton_counters --all       # a prefill tile, and the cache ops too
"""

import argparse
import re
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

import pagedkern.triton_kernels  # noqa: F401
from bench.shapes import AttentionShape
from bench.tune_triton import inputs
from pagedkern import vgpu
from pagedkern.testing import triton_vgpu
from pagedkern.triton_kernels import attention_plan

DECODE = AttentionShape((1, 1), (4096, 4096))
PREFILL = AttentionShape((128,), (512,))
KIB = 1024


def cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def main_loop(sass: str) -> list[str]:
    """The instructions of the smallest loop that multiplies matrices; all where there is none."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+);", sass)
    places = [(int(address, 16), text) for address, text in found]
    loops = []
    for address, text in places:
        target = re.search(r"\bBRA(?:\.\w+)*\s+(?:\S+,\s*)?`?\(?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) <= address:
            body = [t for a, t in places if int(target[1], 16) <= a <= address]
            if any("MMA" in t for t in body):
                loops.append(body)
    return min(loops, key=len, default=[text for _, text in places])


def usage(cubin: bytes) -> dict[str, int]:
    return {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", cuobjdump(cubin, "-res-usage"))}


def run(call, args) -> list[tuple]:
    """(compiled kernel, report) of every launch of one call."""
    used, plain = [], triton_vgpu.compiled

    def noted(*key):
        used.append(plain(*key))
        return used[-1]

    triton_vgpu.compiled = noted
    try:
        with vgpu.session(checks="all") as session, triton_vgpu.on_vgpu():
            call(*args)
            return list(zip(used, session.reports, strict=True))
    finally:
        triton_vgpu.compiled = plain


def static_facts(compiled) -> dict:
    cubin, meta = compiled.kernel.asm["cubin"], compiled.kernel.metadata
    loop = main_loop(cuobjdump(cubin, "-sass"))
    used = usage(cubin)
    registers = -(-used["REG"] // 8) * 8 * 32 * meta.num_warps
    blocks = min(65536 // registers, 228 * KIB // (meta.shared + KIB), 2048 // (32 * meta.num_warps), 32)
    return {
        "registers": used["REG"],
        "spills and stack": used["STACK"] + used["LOCAL"],
        "shared bytes": meta.shared,
        "blocks per SM": blocks,
        "loop": loop,
        "warps": meta.num_warps,
        "stages": meta.num_stages,
    }


def attention_row(shape: AttentionShape, itemsize: int, num_splits: int) -> dict:
    head_dim = shape.head_dim
    args = inputs(shape, head_dim, itemsize, "cpu")
    launches = run(
        lambda *a: torch.ops.pagedkern_triton.paged_attention(*a, num_splits=num_splits), args
    )  # fmt: skip
    (compiled, report), rest = launches[0], launches[1:]
    facts = static_facts(compiled)
    config = attention_plan.CONFIGS[head_dim, itemsize]
    tile = 2 * config.block_n * head_dim * itemsize
    kv_bytes = shape.kv_bytes(itemsize)
    query_bytes = 2 * shape.num_tokens * shape.num_heads * head_dim
    table_bytes = 4 * (shape.num_pages + len(shape.seq_lens))
    all_bytes = sum(r["global_load_bytes"] + r["global_store_bytes"] for _, r in launches)
    wavefronts = report["shared_load_wavefronts"] + report["shared_store_wavefronts"]
    loop = facts.pop("loop")
    wide = sum("LDGSTS" in text and ".128" in text for text in loop)
    narrow = sum(("LDGSTS" in text or "LDG" in text) and ".128" not in text for text in loop)
    return {
        "launches": len(launches),
        "global bytes / least": all_bytes / (kv_bytes + 2 * query_bytes + table_bytes),
        "partials / KV": sum(r["global_load_bytes"] for _, r in rest) / kv_bytes,
        "PTX warp instructions / KiB of KV": report["warp_instructions"] / (kv_bytes / KIB),
        "SASS instructions of the loop / KiB": len(loop) * facts["warps"] / (tile / KIB),
        "loads of 16 bytes, others, in the loop": (wide, narrow),
        "wavefronts / fewest": wavefronts / max(wavefronts - report["shared_bank_conflicts"], 1),
        **facts,
    }


def cache_row(num_tokens: int, dtype: torch.dtype) -> dict:
    rows = torch.randn(num_tokens, 8, 128).bfloat16()
    caches = [torch.zeros(num_tokens // 16 + 1, 16, 8, 128).to(dtype) for _ in range(2)]
    slots = torch.randperm(num_tokens)
    [(compiled, report)] = run(torch.ops.pagedkern_triton.reshape_and_cache, (rows, rows, *caches, slots))
    facts = static_facts(compiled)
    facts.pop("loop")
    least = 2 * rows.numel() * (2 + dtype.itemsize) + 8 * num_tokens
    moved = report["global_load_bytes"] + report["global_store_bytes"]
    return {
        "global bytes / least": moved / least,
        "PTX warp instructions / KiB": report["warp_instructions"] * KIB / least,
        **facts,
    }


def show(title: str, row: dict) -> None:
    print(f"\n{title}")
    for name, value in row.items():
        print(f"  {name:<42}{value:.3f}" if isinstance(value, float) else f"  {name:<42}{value}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    chosen = parser.parse_args()
    for itemsize, name in ((2, "bf16"), (1, "e4m3")):
        for num_splits, how in ((1, "one split"), (0, "automatic splits")):
            show(f"decode 2 x 4096, 32/8 heads of 128, {name}, {how}", attention_row(DECODE, itemsize, num_splits))
    if chosen.all:
        for itemsize, name in ((2, "bf16"), (1, "e4m3")):
            show(f"prefill, 128 of 512 tokens, 32/8 heads of 128, {name}", attention_row(PREFILL, itemsize, 0))
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            show(f"reshape_and_cache, 512 tokens of 8 heads of 128, {dtype}", cache_row(512, dtype))


if __name__ == "__main__":
    main()
