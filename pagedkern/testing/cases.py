"""The attention case list, shared by every backend. A case is plain data; inputs.py turns it into tensors."""

from dataclasses import dataclass, replace

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Ratios users have run into, beside the common ones.
HEAD_RATIOS = (
    (1, 1), (2, 1), (3, 3), (4, 4), (4, 2), (6, 2), (8, 2), (9, 3), (13, 1), (16, 8), (24, 1), (24, 4), (28, 4),
    (32, 8), (40, 8), (48, 4), (64, 4), (71, 1), (14, 2), (12, 12), (20, 4), (128, 1), (200, 1),
    (600, 2), (1040, 1),
)  # fmt: skip
HEAD_DIMS = tuple(range(8, 257, 8))
BLOCK_SIZES = (1, 8, 16, 32, 48, 64, 128, 256, 512)
SCALE_KINDS = (None, "tensor", "scalar", "head", "token", "token_strided")
MASKS = (
    # causal, window_left, window_right
    (True, -1, -1), (False, -1, -1), (True, 0, -1), (True, 15, -1), (True, 16, 0), (True, 17, 5), (True, 1000, -1),
    (False, 16, -1), (False, -1, 0), (False, -1, 7), (False, 0, 0), (False, 9, 3), (False, 33, 64), (True, -1, 3),
)  # fmt: skip


@dataclass(frozen=True)
class AttentionCase:
    """One call of paged_attention. None for q_lens: one query token per sequence and no cu_seqlens_q."""

    name: str
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype | None = None  # None: dtype
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    k_scale: str | None = None
    v_scale: str | None = None
    scale: float | None = None  # None: head_dim ** -0.5
    query_layout: str = "contiguous"
    out_layout: str = "contiguous"
    cache_layout: str = "NHD"
    lse_layout: str | None = "contiguous"  # None: no lse asked for
    num_splits: int = 0
    workspace: bool = False
    padding_rows: int = 0
    table_slack: int = 3  # unused columns of the block table
    table_stride_slack: int = 0  # elements between its rows beyond the width
    bound_slack: int = 0  # by how much max_seqlen_* exceed the truth
    shared_blocks: int = 0  # leading blocks that all sequences share

    @property
    def op_name(self) -> str:
        return "paged_attention"

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens) + self.padding_rows

    @property
    def query_lens(self) -> tuple[int, ...]:
        return self.q_lens if self.q_lens is not None else (1,) * len(self.seq_lens)

    @property
    def softmax_scale(self) -> float:
        return self.scale if self.scale is not None else self.head_dim**-0.5

    @property
    def work(self) -> int:
        """Multiply-adds of the scores, without masks."""
        return sum(q * k for q, k in zip(self.query_lens, self.seq_lens, strict=True)) * self.heads[0] * self.head_dim


def _name(value) -> str:
    if isinstance(value, torch.dtype):
        short = {BF16: "bf16", FP16: "fp16", FP32: "fp32", E4M3: "e4m3", E5M2: "e5m2"}
        return short.get(value, str(value).removeprefix("torch."))
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value)


def sweep(base: AttentionCase, **axes) -> list[AttentionCase]:
    """base with every value of every axis, one axis after another inside the next, named after the values."""
    cases = [base]
    for axis, values in axes.items():
        cases = [replace(case, **{axis: v}, name=f"{case.name}-{axis}_{_name(v)}") for case in cases for v in values]
    return cases


DECODE = AttentionCase("decode", seq_lens=(1, 17, 40, 100))
CHUNK = AttentionCase("chunk", seq_lens=(5, 33, 70), q_lens=(5, 20, 1))
MIXED = AttentionCase("mixed", seq_lens=(40, 3, 64, 129, 16), q_lens=(1, 3, 17, 1, 16), padding_rows=3)
VERIFY = AttentionCase("verify", seq_lens=(50, 7, 128), q_lens=(4, 4, 4), heads=(8, 2))
BATCHES = (DECODE, CHUNK, MIXED, VERIFY)


def _heads() -> list[AttentionCase]:
    decode = sweep(DECODE, heads=HEAD_RATIOS)
    chunk = sweep(replace(CHUNK, head_dim=32), heads=HEAD_RATIOS)
    fp8 = sweep(
        replace(DECODE, name="decode-fp8", cache_dtype=E4M3, k_scale="head", v_scale="head"),
        heads=((28, 4), (24, 1), (9, 3)),
    )
    return decode + chunk + fp8


def _head_dims() -> list[AttentionCase]:
    kinds = [(BF16, None), (FP16, E4M3), (FP32, None), (BF16, E4M3), (FP16, None), (FP32, E5M2), (BF16, E5M2)]
    cases = []
    for index, head_dim in enumerate(HEAD_DIMS):
        for base in (DECODE, CHUNK):
            # Every head_dim meets two of the dtype pairs; over the list every pair meets odd and even multiples of 8.
            for dtype, cache_dtype in (kinds[index % len(kinds)], kinds[(index + 3) % len(kinds)]):
                case = replace(base, dtype=dtype, cache_dtype=cache_dtype, head_dim=head_dim)
                name = f"{base.name}-head_dim_{head_dim}-{_name(dtype)}-{_name(case.stored_dtype)}"
                cases.append(replace(case, name=name))
    return cases


def _block_sizes() -> list[AttentionCase]:
    cases = []
    for block_size in BLOCK_SIZES:
        lengths = tuple(n for n in (block_size - 1, block_size, block_size + 1, 2 * block_size) if n >= 0)
        base = replace(DECODE, block_size=block_size, seq_lens=lengths)
        cases.append(replace(base, name=f"decode-block_{block_size}"))
        cases.append(replace(base, name=f"decode-block_{block_size}-fp8", cache_dtype=E4M3, k_scale="token"))
        q_lens = tuple(min(n, 5) for n in lengths)
        cases.append(replace(base, name=f"chunk-block_{block_size}", q_lens=q_lens, cache_layout="HND"))
        cases.append(replace(base, name=f"window-block_{block_size}", q_lens=q_lens, window=(block_size // 2, -1)))
    cases += sweep(AttentionCase("long", seq_lens=(8864,), heads=(2, 1), head_dim=64), block_size=(1, 16, 48, 512))
    return cases


def _dtypes() -> list[AttentionCase]:
    cases = []
    for base in BATCHES:
        for case in sweep(base, dtype=(BF16, FP16, FP32), cache_dtype=(None, E4M3, E5M2)):
            scales = ("tensor", "head") if case.cache_dtype else (None, None)
            cases.append(replace(case, k_scale=scales[0], v_scale=scales[1], head_dim=128))
    return cases


def _layouts() -> list[AttentionCase]:
    queries = (
        "fused", "head_major", "every_second_token", "every_second_head", "odd_offset", "odd_stride", "wide",
        "broadcast_token", "broadcast_head", "broadcast_all",
    )  # fmt: skip
    outs = ("head_major", "every_second_token", "every_second_head", "odd_offset", "odd_stride", "wide")
    caches = ("HND", "N2_NHD", "N2_HND", "2N_NHD", "packed", "mixed", "token_major", "odd", "odd_offset")
    cases = []
    for base in (replace(DECODE, head_dim=40), replace(MIXED, head_dim=64)):
        cases += sweep(base, query_layout=queries)
        cases += sweep(base, out_layout=outs)
        cases += sweep(base, lse_layout=(None, "head_major", "odd_stride"))
        for cache_dtype in (None, E4M3):
            cases += sweep(replace(base, cache_dtype=cache_dtype), cache_dtype=(cache_dtype,), cache_layout=caches)
        cases += sweep(replace(base, dtype=FP32), dtype=(FP32,), cache_layout=caches[::3], query_layout=queries[::3])
    split = replace(DECODE, num_splits=5, seq_lens=(300, 1, 77), name="split")
    cases += sweep(split, out_layout=outs, query_layout=("fused",), cache_layout=("odd",))
    cases += sweep(MIXED, table_slack=(0, 1), table_stride_slack=(0, 5), bound_slack=(0, 1000))
    return cases


def _masks() -> list[AttentionCase]:
    cases = []
    for base in (replace(DECODE, block_size=8), CHUNK, replace(MIXED, head_dim=32)):
        for causal, left, right in MASKS:
            name = f"{base.name}-mask_{'causal' if causal else 'full'}_{left}_{right}"
            cases.append(replace(base, name=name, causal=causal, window=(left, right)))
    for causal, left, right in MASKS[1:]:
        name = f"splits-mask_{'causal' if causal else 'full'}_{left}_{right}"
        case = replace(DECODE, name=name, seq_lens=(500, 33), q_lens=(3, 2), num_splits=4, cache_dtype=E4M3)
        cases.append(replace(case, causal=causal, window=(left, right), k_scale="token"))
    return cases


def _score_options() -> list[AttentionCase]:
    cases = []
    for base in (DECODE, CHUNK, MIXED):
        for cache_dtype in (None, E4M3):
            scales = ("head", "token") if cache_dtype else (None, None)
            for options in (
                {"softcap": 2.0}, {"softcap": 30.0}, {"alibi": True}, {"sinks": True}, {"alibi": True, "sinks": True},
                {"softcap": 3.0, "alibi": True, "sinks": True}, {"softcap": 3.0, "window": (20, -1)},
                {"softcap": 3.0, "alibi": True, "sinks": True, "window": (10, -1)}, {"sinks": True, "num_splits": 3},
                {"alibi": True, "causal": False}, {"sinks": True, "window": (4, 4), "causal": False}, {"scale": 0.02},
                {"scale": 1.0, "softcap": 5.0},
            ):  # fmt: skip
                label = "-".join(f"{k}_{_name(v)}" for k, v in options.items())
                name = f"{base.name}-{_name(cache_dtype or base.dtype)}-{label}"
                case = replace(base, name=name, cache_dtype=cache_dtype, **options)
                cases.append(replace(case, k_scale=scales[0], v_scale=scales[1], heads=(6, 2)))
    return cases


def _scales() -> list[AttentionCase]:
    base = replace(MIXED, heads=(6, 3), head_dim=32, padding_rows=0)
    cases = sweep(replace(base, cache_dtype=E4M3), k_scale=SCALE_KINDS, v_scale=SCALE_KINDS)
    cases += sweep(replace(base, name="e5m2", cache_dtype=E5M2, dtype=FP16), k_scale=SCALE_KINDS, v_scale=("head",))
    cases += sweep(replace(DECODE, name="one_head", cache_dtype=E4M3, heads=(4, 1)), k_scale=("tensor", "head"))
    return cases


def _splits() -> list[AttentionCase]:
    lengths = (1, 15, 16, 17, 333, 2000)
    base = AttentionCase("splits", seq_lens=lengths, heads=(8, 4), head_dim=64)
    cases = sweep(base, num_splits=(0, 1, 2, 3, 7, 16, 32, 128), workspace=(False, True))
    cases += sweep(replace(base, cache_dtype=E4M3, q_lens=(1, 2, 3, 4, 5, 6)), num_splits=(0, 2, 128))
    # More tokens than 16 a sequence: what is kept of short queries' splits has places by sequence.
    beside = replace(base, name="splits-beside-prefill", seq_lens=(300, 200, 129), q_lens=(1, 100, 4))
    cases += sweep(beside, num_splits=(0, 4), workspace=(False, True))
    return cases


def _many_rows() -> list[AttentionCase]:
    """More rows of a KV head than 16, whose keys are shared out among blocks, beside sequences of fewer."""
    base = AttentionCase("rows", seq_lens=(1, 900, 0, 333), heads=(40, 2), head_dim=64)
    verify = replace(base, name="rows-verify", q_lens=(1, 6, 2, 16), heads=(8, 2), head_dim=128, sinks=True)
    fp8 = replace(verify, name="rows-fp8", cache_dtype=E4M3, k_scale="head", v_scale="token", softcap=5.0, alibi=True)
    chunk = replace(base, name="rows-chunk", seq_lens=(330, 20, 300), q_lens=(30, 20, 6), heads=(6, 2), head_dim=256)
    cases = [case for each in (base, verify, fp8) for case in sweep(each, num_splits=(0, 3))]
    cases += sweep(chunk, window=((-1, -1), (200, -1)), dtype=(FP16,), cache_dtype=(None, E5M2))
    cases.append(replace(base, name="rows-many-sequences", seq_lens=tuple(i % 7 for i in range(300)), heads=(20, 1)))
    return cases


def _many_heads() -> list[AttentionCase]:
    """More query heads of a KV head than one block of a GPU takes."""
    base = AttentionCase("heads", seq_lens=(1, 300, 0, 70), heads=(200, 1))
    fp8 = replace(base, name="heads-fp8", cache_dtype=E4M3, k_scale="token", v_scale="token", sinks=True, alibi=True)
    chunk = replace(base, name="heads-chunk", seq_lens=(150, 9), q_lens=(7, 9))
    cases = [case for each in (base, fp8) for case in sweep(each, num_splits=(0, 3), heads=((300, 1), (1040, 2)))]
    cases += sweep(replace(base, cache_layout="odd", softcap=5.0), head_dim=(40, 96, 128, 192, 256))
    cases += sweep(replace(fp8, k_scale="head"), head_dim=(32, 96, 128, 192, 256))
    cases += sweep(chunk, window=((-1, -1), (40, -1)), dtype=(BF16, FP16), cache_dtype=(None, E5M2))
    return cases


def _large_scores() -> list[AttentionCase]:
    """Scores beside whose rounding an exponent is small: the greatest takes all. The reference decides it in float64,
    so what is asked for is that a maximum and its own score stay equal, and that nothing becomes infinite or NaN."""
    rows = AttentionCase("rows", seq_lens=(500, 70), q_lens=(3, 1), heads=(20, 1), num_splits=3)
    cases = []
    for base in (replace(DECODE, seq_lens=(1, 40, 300)), CHUNK, rows):
        for scale in (1e5, 3e6, 4e7, 1.1e8, 1e12, 1e30):
            for cache_dtype, options in ((None, {}), (E4M3, {"k_scale": "head"}), (E4M3, {"v_scale": "token"})):
                name = f"{base.name}-{_name(cache_dtype)}-{'-'.join(options)}-scale_{scale:g}"
                cases.append(replace(base, name=name, scale=scale, cache_dtype=cache_dtype, **options))
        cases.append(replace(base, name=f"{base.name}-alibi-scale_1e8", scale=1e8, alibi=True, dtype=FP16))
    return cases


def _edges() -> list[AttentionCase]:
    cases = [
        AttentionCase("no-sequences", seq_lens=()),
        AttentionCase("no-sequences-cu", seq_lens=(), q_lens=()),
        AttentionCase("no-sequences-only-padding", seq_lens=(), q_lens=(), padding_rows=4),
        AttentionCase("no-tokens", seq_lens=(10, 20), q_lens=(0, 0)),
        AttentionCase("no-tokens-some", seq_lens=(10, 20, 30), q_lens=(0, 2, 0)),
        AttentionCase("empty-sequences", seq_lens=(0, 0)),
        AttentionCase("empty-sequences-no-table", seq_lens=(0, 0), table_slack=0),
        AttentionCase("empty-among-live", seq_lens=(0, 9, 0, 40), q_lens=(2, 3, 1, 4)),
        AttentionCase("empty-with-sink", seq_lens=(0, 9), sinks=True),
        AttentionCase("more-queries-than-keys", seq_lens=(3, 1), q_lens=(5, 4)),
        AttentionCase("more-queries-than-keys-full", seq_lens=(3, 1), q_lens=(5, 4), causal=False),
        AttentionCase("more-queries-than-keys-window", seq_lens=(3, 6), q_lens=(9, 8), causal=False, window=(2, 1)),
        AttentionCase("empty-split", seq_lens=(0, 1), num_splits=8, sinks=True),
        AttentionCase("all-masked-rows", seq_lens=(4,), q_lens=(10,), causal=False, window=(1, 0), sinks=True),
        AttentionCase("many-sequences", seq_lens=tuple(i % 7 for i in range(300)), heads=(2, 1), head_dim=16),
        AttentionCase("many-sequences-cu", seq_lens=(3,) * 300, q_lens=(1, 2, 0) * 100, heads=(2, 1), head_dim=16),
        AttentionCase("shared-prefix", seq_lens=(40, 50, 70), q_lens=(3, 1, 6), shared_blocks=2),
        AttentionCase("shared-prefix-fp8", seq_lens=(40, 50), shared_blocks=2, cache_dtype=E4M3, k_scale="token"),
        AttentionCase("prefill", seq_lens=(200,), q_lens=(200,), heads=(4, 2), head_dim=128),
        AttentionCase("prefill-fp16", seq_lens=(130, 3), q_lens=(130, 3), dtype=FP16, head_dim=96),
        AttentionCase("prefill-fp8", seq_lens=(150,), q_lens=(130,), cache_dtype=E4M3, k_scale="head", v_scale="token"),
        AttentionCase("long-decode", seq_lens=(4096, 1, 2047), heads=(8, 2), head_dim=128),
        AttentionCase("long-decode-fp8", seq_lens=(4096, 1, 2047), heads=(8, 2), head_dim=128, cache_dtype=E4M3),
        # Float32 sums over this many keys stay within the tolerance only when they run in tiles.
        AttentionCase("long-float32", seq_lens=(65536,), heads=(2, 1), dtype=FP32),
        AttentionCase("long-float32-one-split", seq_lens=(65536,), heads=(2, 1), dtype=FP32, num_splits=1),
        AttentionCase("long-float32-fp8", seq_lens=(30000,), heads=(2, 1), dtype=FP32, cache_dtype=E4M3, num_splits=1),
        AttentionCase("long-float32-chunk", seq_lens=(9000,), q_lens=(9,), heads=(4, 1), dtype=FP32, num_splits=1),
        AttentionCase("long-window", seq_lens=(5000,), q_lens=(2,), window=(100, -1), heads=(4, 1), head_dim=128),
        AttentionCase("model-32-8-128", seq_lens=(64, 300), heads=(32, 8), head_dim=128),
        AttentionCase("wide-head-256", seq_lens=(200, 31), q_lens=(2, 31), heads=(24, 4), head_dim=256),
    ]
    return cases


ATTENTION_CASES: list[AttentionCase] = [
    *_heads(), *_head_dims(), *_block_sizes(), *_dtypes(), *_layouts(), *_masks(), *_score_options(), *_scales(),
    *_splits(), *_many_rows(), *_many_heads(), *_large_scores(), *_edges(),
]  # fmt: skip
