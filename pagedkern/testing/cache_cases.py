"""The case lists of the ops that write, move, gather and merge, shared by every backend."""

from dataclasses import dataclass, replace

import torch

from pagedkern.testing.cases import BF16, BLOCK_SIZES, E4M3, E5M2, FP16, FP32, HEAD_DIMS, SCALE_KINDS, sweep
from pagedkern.testing.layouts import CACHE_LAYOUTS, INPUT_ONLY_LAYOUTS, ROW_LAYOUTS


@dataclass(frozen=True)
class WriteCase:
    """One call of reshape_and_cache ("plain"), its "_dynamic" variant or rope_reshape_and_cache ("rope")."""

    name: str
    op: str = "plain"
    tokens: int = 9
    heads: tuple[int, int] = (4, 2)  # query heads matter to rope alone
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype | None = None  # None: dtype
    key_layout: str = "contiguous"
    value_layout: str = "contiguous"
    query_layout: str = "contiguous"
    cache_layout: str = "NHD"
    k_scale: str | None = None  # "dynamic": the kind of the scale cache, "token" or "token_strided"
    v_scale: str | None = None
    slots: str = "scattered"  # or "run", "skips", "all_negative"
    slot_dtype: torch.dtype = torch.int64
    slot_stride: int = 1
    extra_rows: int = 0  # rows of key and value past slot_mapping
    specials: bool = True  # inf, NaN, -0.0 and the edges of FP8 among the values
    rotary_dim: int | None = None  # None: head_dim
    interleaved: bool = False
    cos_sin_dtype: torch.dtype = FP32
    position_dtype: torch.dtype = torch.int64

    @property
    def op_name(self) -> str:
        names = {"plain": "reshape_and_cache", "dynamic": "reshape_and_cache_dynamic", "rope": "rope_reshape_and_cache"}
        return names[self.op]

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def num_blocks(self) -> int:
        return -(-2 * self.tokens // self.block_size) + 2

    @property
    def work(self) -> int:
        return self.tokens * self.heads[1] * self.head_dim


@dataclass(frozen=True)
class GatherCase:
    name: str
    seq_lens: tuple[int, ...] = (1, 17, 0, 40)
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype | None = None
    key_layout: str = "contiguous"
    value_layout: str = "contiguous"
    cache_layout: str = "NHD"
    k_scale: str | None = None
    v_scale: str | None = None

    @property
    def op_name(self) -> str:
        return "gather_cache"

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def work(self) -> int:
        return sum(self.seq_lens) * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class MergeCase:
    name: str
    tokens: int = 7
    heads: int = 4
    head_dim: int = 64
    dtype: torch.dtype = BF16  # of out
    a_dtype: torch.dtype | None = None  # None: dtype
    b_dtype: torch.dtype | None = None
    out_layout: str = "contiguous"
    a_layout: str = "contiguous"
    b_layout: str = "contiguous"
    lse_layout: str | None = "contiguous"  # None: no merged lse asked for
    part_lse_layout: str = "contiguous"
    out_is: str | None = None  # "a" or "b": out is that input
    lse_is: str | None = None

    @property
    def op_name(self) -> str:
        return "merge_attention_states"

    @property
    def work(self) -> int:
        return self.tokens * self.heads * self.head_dim


@dataclass(frozen=True)
class MoveCase:
    """copy_blocks over some layers, or swap_blocks from src_layout to dst_layout."""

    name: str
    op: str = "copy"
    layers: int = 2
    num_blocks: int = 12
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = BF16
    layouts: tuple[str, ...] = ("NHD",)  # one per layer, cyclic
    pairs: tuple[tuple[int, int], ...] = ((0, 5), (1, 11), (0, 7), (10, 2))
    mapping_layout: str = "contiguous"  # or "strided", "transposed"
    dst_layout: str = "NHD"

    @property
    def op_name(self) -> str:
        return f"{self.op}_blocks"

    @property
    def work(self) -> int:
        return self.layers * len(self.pairs) * self.block_size * self.kv_heads * self.head_dim


PLAIN = WriteCase("plain")
DYNAMIC = WriteCase("dynamic", op="dynamic", cache_dtype=E4M3, k_scale="token", v_scale="token")
ROPE = WriteCase("rope", op="rope")
FP8 = replace(PLAIN, name="fp8", cache_dtype=E4M3, k_scale="head", v_scale="tensor")
ROW_NAMES = tuple(ROW_LAYOUTS)[1:]


def _write_layouts() -> list[WriteCase]:
    cases = []
    for base in (PLAIN, FP8, DYNAMIC, ROPE, replace(PLAIN, name="plain40", head_dim=40, dtype=FP32)):
        cases += sweep(base, key_layout=ROW_NAMES)
        cases += sweep(base, value_layout=ROW_NAMES[::2] + tuple(INPUT_ONLY_LAYOUTS), cache_layout=("N2_HND",))
        cases += sweep(base, cache_layout=tuple(CACHE_LAYOUTS)[1:])
        cases += sweep(base, slots=("run", "skips", "all_negative"), slot_dtype=(torch.int64, torch.int32))
        cases += sweep(base, slot_stride=(2, 3), extra_rows=(0, 5))
        cases += sweep(base, tokens=(0, 1, 100))
        cases += sweep(base, block_size=BLOCK_SIZES)
    cases += sweep(PLAIN, key_layout=tuple(INPUT_ONLY_LAYOUTS))
    cases += sweep(ROPE, query_layout=ROW_NAMES)
    return cases


def _write_kinds() -> list[WriteCase]:
    cases = []
    for dtype in (BF16, FP16, FP32):
        for cache_dtype in (None, E4M3, E5M2):
            for index, head_dim in enumerate(HEAD_DIMS):
                # Every head_dim meets every dtype, and every pair of dtypes meets odd and even multiples of 8.
                if index % 3 == [None, E4M3, E5M2].index(cache_dtype):
                    scales = ("head", "token") if cache_dtype else (None, None)
                    base = replace(PLAIN, dtype=dtype, k_scale=scales[0], v_scale=scales[1])
                    cases += sweep(base, dtype=(dtype,), cache_dtype=(cache_dtype,), head_dim=(head_dim,))
        cases += sweep(DYNAMIC, dtype=(dtype,), cache_dtype=(E4M3, E5M2), head_dim=(8, 40, 72, 128, 256))
    for cache_dtype in (E4M3, E5M2):
        cases += sweep(FP8, cache_dtype=(cache_dtype,), k_scale=SCALE_KINDS, v_scale=SCALE_KINDS)
    cases += sweep(FP8, heads=((1, 1), (3, 3), (13, 13), (8, 8)), block_size=(1, 16))
    cases += sweep(DYNAMIC, k_scale=("token", "token_strided"), v_scale=("token", "token_strided"))
    return cases


def _rope() -> list[WriteCase]:
    cases = sweep(ROPE, dtype=(BF16, FP16, FP32), interleaved=(False, True), rotary_dim=(None, 16, 2))
    cases += sweep(ROPE, cache_dtype=(E4M3, E5M2), k_scale=("head", "token"), interleaved=(False, True))
    cases += sweep(ROPE, dtype=(BF16, FP16), cos_sin_dtype=(BF16, FP16))
    cases = [case for case in cases if case.cos_sin_dtype in (FP32, case.dtype)]
    cases += sweep(ROPE, position_dtype=(torch.int32,), slot_dtype=(torch.int32, torch.int64))
    cases += sweep(replace(ROPE, heads=(28, 4)), heads=((28, 4), (1, 1), (71, 1)), head_dim=(8, 24, 128, 256))
    return cases


def _gather() -> list[GatherCase]:
    base, fp8 = GatherCase("gather"), GatherCase("gather-fp8", cache_dtype=E4M3, k_scale="head", v_scale="token")
    cases = []
    for case in (base, fp8):
        cases += sweep(case, key_layout=ROW_NAMES, value_layout=ROW_NAMES[::3])
        cases += sweep(case, cache_layout=tuple(CACHE_LAYOUTS))
        cases += sweep(case, block_size=BLOCK_SIZES)
        cases += sweep(case, head_dim=HEAD_DIMS[::3], dtype=(BF16, FP16, FP32))
        cases += sweep(case, seq_lens=((), (0,), (0, 0), (300, 1, 5)))
    cases += sweep(fp8, cache_dtype=(E4M3, E5M2), dtype=(BF16, FP16, FP32), k_scale=SCALE_KINDS)
    return cases


def _merge() -> list[MergeCase]:
    base = MergeCase("merge")
    cases = sweep(base, dtype=(BF16, FP16, FP32), head_dim=(8, 40, 72, 128, 256))
    cases += sweep(base, dtype=(BF16, FP16), a_dtype=(None, FP32), b_dtype=(None, FP32))
    cases += sweep(base, out_layout=ROW_NAMES)
    cases += sweep(base, a_layout=ROW_NAMES, b_layout=("odd_stride", "broadcast_token"))
    cases += sweep(base, lse_layout=(None, "head_major", "odd_stride"), part_lse_layout=("head_major", "odd_stride"))
    cases += sweep(base, out_is=(None, "a", "b"), lse_is=(None, "a", "b"), dtype=(BF16, FP32))
    cases += sweep(base, tokens=(0, 1, 200), heads=(1, 7))
    return cases


def _move() -> list[MoveCase]:
    copy, swap = MoveCase("copy"), MoveCase("swap", op="swap")
    runs = ((3, 0), (4, 1), (5, 2), (9, 7), (8, 6), (10, 11))
    cases = []
    for base in (copy, swap):
        cases += sweep(base, layouts=tuple((name,) for name in CACHE_LAYOUTS), dtype=(BF16, E4M3))
        cases += sweep(base, dtype=(FP16, FP32, E5M2), head_dim=(8, 40))
        cases += sweep(base, block_size=BLOCK_SIZES)
        cases += sweep(base, mapping_layout=("strided", "transposed"))
        cases += [replace(base, name=f"{base.name}-pairs_{n}", pairs=p) for n, p in (("none", ()), ("runs", runs))]
    cases += sweep(copy, layers=(0, 1, 5), layouts=(("NHD", "HND", "packed", "odd", "mixed"),))
    swaps = ("NHD", "HND", "token_major", "odd", "odd_offset")
    cases += sweep(replace(swap, pairs=runs), layouts=tuple((name,) for name in swaps), dst_layout=swaps)
    many = tuple((i, i + 300) for i in range(300))
    return cases + [
        replace(base, name=f"{base.name}-many", num_blocks=600, block_size=1, pairs=many) for base in (copy, swap)
    ]


WRITE_CASES: list[WriteCase] = [*_write_layouts(), *_write_kinds(), *_rope()]
GATHER_CASES: list[GatherCase] = _gather()
MERGE_CASES: list[MergeCase] = _merge()
MOVE_CASES: list[MoveCase] = _move()
