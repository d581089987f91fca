"""What decode attention costs, counted without a GPU: from disassembly, schedule and a run on the virtual GPU."""

from dataclasses import dataclass

import torch

from pagedkern import _C, vgpu
from pagedkern.testing import sass

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DTYPE_NUMBER = {torch.float16: 1, BF16: 2, E4M3: 3, torch.float8_e5m2: 4}  # DType of csrc/common/dtypes.h
MULTIPROCESSORS = 132
WARPS, ROWS = 4, 8


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} x {self.head_dim}"


HEADS = (Heads(32, 8, 128), Heads(24, 4, 256), Heads(64, 8, 128), Heads(32, 32, 128))
MIXES = {
    "64x4k": (4096,) * 64,
    "1x128k+31x4k": (131072,) + (4096,) * 31,
    "2x32k+30x4k": (32768,) * 2 + (4096,) * 30,
    "32x128+32x4k": (128,) * 32 + (4096,) * 32,
}


@dataclass(frozen=True)
class Limits:
    kv_bytes: float
    all_bytes: float
    instructions: float  # per KiB of keys and values
    wavefronts: float
    bytes_in_flight: int
    conversions: float  # per FP8 element
    balance: float
    partials: float


LIMITS = {
    BF16: Limits(1.01, 1.03, 38, 1.02, 64 << 10, 0, 1.10, 0.03),
    E4M3: Limits(1.01, 1.04, 59, 1.02, 48 << 10, 0.5, 1.10, 0.05),
}


@dataclass(frozen=True)
class Static:
    """Of the kernel that plain decode calls of these heads get."""

    registers: int
    local_bytes: int  # stack and spills
    instructions_per_kib: float
    conversions_per_element: float
    copies: list[str]  # opcodes of the main loop's copies
    narrow_loads: int  # other global loads of the turn
    blocks: int  # of a multiprocessor, as planned
    blocks_by_registers: int
    bytes_in_flight: int


def static(heads: Heads, dtype: torch.dtype) -> Static:
    config = (
        f"paged_decode_kernelINS_17PagedDecodeConfigILNS_5DTypeE{DTYPE_NUMBER[dtype]}ELi{heads.head_dim}ELi{ROWS}ELb0E"
    )
    (name,) = (n for n in sass.kernels() if config in n)
    code = sass.instructions(sass.kernels()[name])
    turn = sass.main_turn(code)
    plan = _C.paged_decode_plan([4096], heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype.itemsize == 1)
    elements = 2 * plan["tile_keys"] // WARPS * heads.head_dim  # of keys and values that a warp takes in a turn
    used = sass.usage()[name]
    return Static(
        registers=used["REG"],
        local_bytes=used["STACK"] + used["LOCAL"] + sass.count([text for _, text in code], r"\b(LDL|STL)\b"),
        instructions_per_kib=len(turn) / (elements * dtype.itemsize / 1024),
        conversions_per_element=32 * sass.count(turn, r"F2FP\.F16\.E[45]M[32]|I2F|HADD2|HMUL2") / elements,
        copies=sorted({line.split()[0] for line in turn if "LDGSTS" in line}),
        narrow_loads=sass.count(turn, r"\bLDG\b"),
        blocks=plan["blocks_per_multiprocessor"],
        blocks_by_registers=65536 // (-(-used["REG"] // 8) * 8 * 32 * WARPS),
        bytes_in_flight=plan["bytes_in_flight"],
    )


@dataclass(frozen=True)
class Dynamic:
    """Of a run on the virtual GPU; the ratios are to the least that the call needs."""

    kv_bytes: float
    all_bytes: float
    wavefronts: float
    partials: float  # bytes of partial results over those of keys and values
    instructions_per_kib: float  # all executed PTX instructions, prologue and merge included
    launches: int
    blocks: int


def _run(
    heads: Heads, dtype: torch.dtype, block_size: int, seq_lens: tuple[int, ...], num_splits: int, query_len: int = 1
):
    generator = torch.Generator().manual_seed(0)
    pages = [-(-length // block_size) for length in seq_lens]
    shape = (sum(pages), block_size, heads.num_kv_heads, heads.head_dim)
    # Any bytes of moderate value do: exponents of 0x30 to 0x3F are numbers around 1 in every dtype.
    kinds = torch.uint8 if dtype.itemsize == 1 else torch.int16
    low, high = (0x30, 0x40) if dtype.itemsize == 1 else (0x3E00, 0x4000)
    caches = [torch.randint(low, high, shape, dtype=kinds, generator=generator).view(dtype) for _ in range(2)]
    order = torch.randperm(sum(pages), generator=generator).int()
    table = torch.full((len(pages), max(pages)), -1, dtype=torch.int32)
    for row, (part, count) in enumerate(zip(order.split(pages), pages, strict=True)):
        table[row, :count] = part
    tokens = query_len * len(seq_lens)
    query = torch.randn(tokens, heads.num_heads, heads.head_dim, generator=generator).bfloat16()
    starts = None if query_len == 1 else torch.arange(0, tokens + 1, query_len, dtype=torch.int32)
    out = torch.empty_like(query)
    op = getattr(torch.ops, vgpu.load_ops()).paged_attention
    with vgpu.session(checks="none") as session:
        op(
            out, query, *caches, table, torch.tensor(seq_lens, dtype=torch.int32), starts, query_len, max(seq_lens),
            heads.head_dim**-0.5, num_splits=num_splits,
        )  # fmt: skip
    return session.reports


def dynamic(heads: Heads, dtype: torch.dtype, block_size: int, seq_lens: tuple[int, ...] = (4096,)) -> Dynamic:
    kv = 2 * sum(seq_lens) * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    rows = 2 * len(seq_lens) * heads.num_heads * heads.head_dim  # bytes of query, and of out
    tables = 4 * sum(-(-length // block_size) for length in seq_lens) + 4 * len(seq_lens)
    (whole,) = _run(heads, dtype, block_size, seq_lens, num_splits=1)
    reports = _run(heads, dtype, block_size, seq_lens, num_splits=0)
    report = reports[-1]
    wavefronts = report["shared_load_wavefronts"] + report["shared_store_wavefronts"]
    plan = _C.paged_decode_plan(
        list(seq_lens), heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype.itemsize == 1
    )
    return Dynamic(
        # Without splits there are no partial results: what is not a query is keys, values and their tables.
        kv_bytes=(whole["global_load_bytes"] - rows) / kv,
        all_bytes=(report["global_load_bytes"] + report["global_store_bytes"]) / (kv + 2 * rows + tables),
        wavefronts=wavefronts / (wavefronts - report["shared_bank_conflicts"]),
        partials=plan["partial_bytes"] / kv,
        instructions_per_kib=report["warp_instructions"] / (kv / 1024),
        launches=len(reports),
        blocks=len(plan["bucket_tiles"]),
    )


def balance(heads: Heads, dtype: torch.dtype, mix: str) -> float:
    """Tiles of the busiest block over those of the mean resident block."""
    plan = _C.paged_decode_plan(
        list(MIXES[mix]), heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype.itemsize == 1, MULTIPROCESSORS
    )
    tiles = plan["bucket_tiles"]
    return max(tiles) * MULTIPROCESSORS * plan["blocks_per_multiprocessor"] / sum(tiles)


def partials(heads: Heads, dtype: torch.dtype, mix: str) -> float:
    lengths = MIXES[mix]
    plan = _C.paged_decode_plan(
        list(lengths), heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype.itemsize == 1, MULTIPROCESSORS
    )
    return plan["partial_bytes"] / (2 * sum(lengths) * heads.num_kv_heads * heads.head_dim * dtype.itemsize)


@dataclass(frozen=True)
class ManyRows:
    """Queries of more rows of a KV head than a decode tile takes: one sequence of some query tokens."""

    heads: Heads
    query_len: int
    seq_len: int = 4096

    def __str__(self) -> str:
        return f"{self.heads}, {self.query_len} query token{'s' if self.query_len > 1 else ''} over {self.seq_len}"


READ_ONCE = (
    ManyRows(Heads(1024, 1, 128), 1),
    ManyRows(Heads(200, 1, 128), 1),
    ManyRows(Heads(128, 1, 128), 1),
    ManyRows(Heads(71, 1, 128), 1),
    ManyRows(Heads(64, 1, 128), 1),
    ManyRows(Heads(32, 1, 128), 1),
    ManyRows(Heads(32, 8, 128), 5),
    ManyRows(Heads(32, 8, 128), 16),
)
SHARED_OUT = (
    ManyRows(Heads(200, 1, 128), 1),
    ManyRows(Heads(64, 1, 128), 1),
    ManyRows(Heads(32, 8, 128), 16),
    ManyRows(Heads(32, 8, 128), 32),
    ManyRows(Heads(32, 8, 128), 128, 32768),
    ManyRows(Heads(64, 1, 128), 1, 131072),
)
MANY_ROWS_KV_BYTES = 1.05


def kv_bytes_by_kernel(case: ManyRows, dtype: torch.dtype, block_size: int = 16) -> dict[str, float]:
    """KV bytes requested over KV bytes, of every kernel that took part of the call; without splits, so that what is
    neither query nor key nor value is lengths and page ids alone."""
    heads = case.heads
    kv = 2 * case.seq_len * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    query = 2 * case.query_len * heads.num_heads * heads.head_dim
    reports = _run(heads, dtype, block_size, (case.seq_len,), 1, case.query_len)
    return {
        report["kernel"]: (report["global_load_bytes"] - query) / kv
        for report in reports
        if report["global_store_bytes"] > 0
    }


@dataclass(frozen=True)
class Shared:
    blocks: int
    balance: float  # tiles of the busiest block over those of the mean busy one
    partials: float  # bytes of partial results, written and read, over those of keys and values
    speedup: float  # tiles of the longest unit, which one block would compute, over those of the busiest block


def shared_out(case: ManyRows, dtype: torch.dtype) -> Shared:
    heads = case.heads
    plan = _C.paged_prefill_plan(
        [0, case.query_len], [case.seq_len], heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype.itemsize == 1,
        MULTIPROCESSORS,
    )  # fmt: skip
    tiles = plan["bucket_tiles"]
    return Shared(
        blocks=len(tiles),
        balance=max(tiles) * len(tiles) / sum(tiles),
        partials=plan["partial_bytes"] / (2 * case.seq_len * heads.num_kv_heads * heads.head_dim * dtype.itemsize),
        speedup=-(-case.seq_len // plan["tile_keys"]) / max(tiles),
    )
