"""Rule 8 of the op contract: one clear RuntimeError for every wrong argument, before anything is written.

It names the op, the argument, what it got and what it expects."""

import re

import op_args
import pytest
import torch
from op_args import BF16, BLOCK_SIZE, BLOCKS, DIM, E4M3, HEADS, KV_HEADS, MAKERS, cache, int32, rows

import pagedkern

FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64
CACHE_OPS = ("reshape_and_cache", "rope_reshape_and_cache", "paged_attention", "gather_cache")
WRITERS = ("reshape_and_cache", "reshape_and_cache_dynamic", "rope_reshape_and_cache")
CASES = []


def wrong(op, argument, change, got, expected):
    """`change(args)` makes one argument wrong; the message then names it, `got` and `expected`."""
    for name in (op,) if isinstance(op, str) else op:
        CASES.append(pytest.param(name, argument, change, got, expected, id=f"{name}-{argument}-{len(CASES)}"))


def put(**values):
    """Replaces arguments one by one; a callable makes the new value from the arguments."""

    def change(args):
        for name, value in values.items():
            args[name] = value(args) if callable(value) else value

    return change


def transposed(name):
    """The same shape with a last dimension that is not contiguous."""
    return put(**{name: lambda a: a[name].transpose(-1, -2).contiguous().transpose(-1, -2)})


def as_dtype(name, dtype):
    return put(**{name: lambda a: a[name].to(dtype)})


def meta(name):
    return put(**{name: lambda a: a[name].to("meta")})


def one_row_back(tensor):
    return tensor.as_strided(tensor.shape, tensor.stride(), 0)


def fp8(**values):
    """FP8 caches and the given scales."""
    return put(key_cache=cache(E4M3), value_cache=cache(E4M3), **values)


# ------------------------------------------------------------------------------------------------- caches, in all ops
for op in (*CACHE_OPS, "reshape_and_cache_dynamic"):
    kind = E4M3 if op == "reshape_and_cache_dynamic" else BF16
    wrong(op, "key_cache", put(key_cache=cache(kind)[0]), f"[{BLOCK_SIZE}, {KV_HEADS}, {DIM}]",
          "[num_blocks, block_size, num_kv_heads, head_dim]")  # fmt: skip
    wrong(op, "value_cache", put(value_cache=cache(kind, blocks=4)), "[4, 4, 2, 16]", f"num_blocks={BLOCKS}")
    wrong(op, "value_cache", put(value_cache=cache(kind, block_size=8)), "[5, 8, 2, 16]", f"block_size={BLOCK_SIZE}")
    wrong(op, "value_cache", as_dtype("value_cache", torch.float8_e5m2), "float8_e5m2", "dtype of key_cache")
    wrong(op, "key_cache", transposed("key_cache"), "(128, 32, 1, 2)", "contiguous last dimension")
    wrong(op, "value_cache", transposed("value_cache"), "(128, 32, 1, 2)", "contiguous last dimension")
    wrong(op, "key_cache", put(key_cache=cache(kind, dim=12), value_cache=cache(kind, dim=12)), "12", "multiple of 8")
    wrong(op, "key_cache", put(key_cache=cache(kind, dim=264), value_cache=cache(kind, dim=264)), "264", "up to 256")
    wrong(op, "key_cache", put(key_cache=cache(kind, dim=0), value_cache=cache(kind, dim=0)), "0", "multiple of 8")
    wrong(op, "key_cache", put(key_cache=cache(kind, heads=0), value_cache=cache(kind, heads=0)), "[5, 4, 0, 16]",
          "at least 1 KV head")  # fmt: skip
    wrong(op, "key_cache", put(key_cache=cache(kind, block_size=0), value_cache=cache(kind, block_size=0)),
          "[5, 0, 2, 16]", "block_size of at least 1")  # fmt: skip
    wrong(
        op, "key_cache", put(**{k: cache().to(torch.int8) for k in ("key_cache", "value_cache")}), "int8", "float8_e4"
    )
wrong(CACHE_OPS, "key_cache", put(key_cache=cache(FP16), value_cache=cache(FP16)), "float16", "bfloat16")
wrong("reshape_and_cache_dynamic", "key_cache", put(key_cache=cache(), value_cache=cache()), "bfloat16", "float8_e4")

# --------------------------------------------------------------------------------------------------------- FP8 scales
SCALED = ("k_scale", "v_scale")
for op in CACHE_OPS:
    for name in SCALED:
        wrong(op, name, put(**{name: torch.ones(1)}), "bfloat16 cache", "None unless")
        wrong(op, name, fp8(**{name: torch.ones(1, dtype=FP64)}), "float64", "float32")
        wrong(op, name, fp8(**{name: torch.ones(3)}), "[3]", "[num_kv_heads=2]")
        wrong(op, name, fp8(**{name: torch.ones(1, 1)}), "[1, 1]", "[], [1]")
        wrong(op, name, fp8(**{name: torch.ones(5, 2)}), "[5, 2]", "block_size=4")
        wrong(op, name, fp8(**{name: torch.ones(5, 4, 1)}), "[5, 4, 1]", "num_kv_heads=2")
        wrong(op, name, fp8(**{name: torch.ones(4)[::2]}), "(2)", "contiguous")
        wrong(op, name, fp8(**{name: torch.ones(1, device="meta")}), "meta", "(cpu)")
        for bad in (0.0, -1.0, float("nan"), float("inf")):
            wrong(op, name, fp8(**{name: torch.tensor(bad)}), str(torch.tensor(bad).item()).split(".")[0], "positive")
        wrong(op, name, fp8(**{name: torch.tensor([1.0, 0.0])}), "[1] is 0", "finite and positive")
for name in SCALED:
    op = "reshape_and_cache_dynamic"
    wrong(op, name, put(**{name: torch.ones(KV_HEADS)}), "[2]", "block_size=4")
    wrong(op, name, as_dtype(name, BF16), "bfloat16", "float32")
    wrong(op, name, meta(name), "meta", "device of key_cache (cpu)")
    wrong(op, name, put(**{name: torch.ones(1, 1, 1).expand(BLOCKS, BLOCK_SIZE, KV_HEADS)}), "(0, 0, 0)", "itself")

# ------------------------------------------------------------------------------------------------------------ writers
for op in WRITERS:
    wrong(op, "key", put(key=rows(dim=8)), "[3, 2, 8]", "head_dim=16")
    wrong(op, "key", put(key=rows(heads=1)), "[3, 1, 16]", "num_kv_heads=2")
    wrong(op, "value", put(value=rows(tokens=4)), "[4, 2, 16]", "num_tokens=3")
    wrong(op, "value", as_dtype("value", FP16), "float16", "dtype of key")
    wrong(op, "key", put(key=rows(dtype=FP64), value=rows(dtype=FP64)), "float64", "bfloat16")
    wrong(op, "key", transposed("key"), "(32, 1, 2)", "contiguous last dimension")
    wrong(op, "value", transposed("value"), "(32, 1, 2)", "contiguous last dimension")
    wrong(op, "key", meta("key"), "meta", "device of key_cache (cpu)")
    wrong(op, "slot_mapping", as_dtype("slot_mapping", torch.int16), "int16", "int32 or int64")
    wrong(op, "slot_mapping", put(slot_mapping=torch.zeros(3, 1, dtype=torch.int64)), "[3, 1]", "[n]")
    wrong(op, "slot_mapping", put(slot_mapping=torch.zeros(4, dtype=torch.int64)), "[4]", "num_tokens=3")
    wrong(op, "slot_mapping", meta("slot_mapping"), "meta", "device of key_cache (cpu)")
    wrong(op, "slot_mapping", put(slot_mapping=torch.tensor([0, 20, 1])), "[1] is 20", "num_blocks * block_size=20")
    wrong(op, "slot_mapping", put(slot_mapping=int32(0, 1, 2**31 - 1)), "[2] is 2147483647", "block_size=20")
    wrong(op, "key_cache", put(value_cache=lambda a: a["key_cache"]), "overlapping memory", "with value_cache")
    wrong(op, "key_cache", put(key_cache=lambda a: a["key_cache"][:1].expand(BLOCKS, -1, -1, -1)), "(0, 32, 16, 1)",
          "overlap itself")  # fmt: skip
    sliding = put(value_cache=lambda a: a["value_cache"].as_strided((5, 4, 2, 16), (64, 32, 16, 1)))
    wrong(op, "value_cache", sliding, "(64, 32, 16, 1)", "overlap itself")
for op in ("reshape_and_cache", "rope_reshape_and_cache"):
    row = "key" if op == "reshape_and_cache" else "value"
    inside = put(**{row: lambda a: a["key_cache"].view(-1, KV_HEADS, DIM)[2:5]})
    wrong(op, "key_cache", inside, "overlapping memory", f"share memory with {row}")

# ------------------------------------------------------------------------------------------------------------- rotary
rope = "rope_reshape_and_cache"
wrong(rope, "query", put(query=rows(HEADS, tokens=2)), "[2, 4, 16]", "num_tokens=3")
wrong(rope, "query", put(query=rows(3)), "3 heads", "multiple of num_kv_heads=2")
wrong(rope, "query", as_dtype("query", FP32), "float32", "dtype of key")
wrong(rope, "query", transposed("query"), "(64, 1, 4)", "contiguous last dimension")
wrong(rope, "query", put(query=lambda a: a["query"][:1].expand(3, -1, -1)), "(0, 16, 1)", "overlap itself")
wrong(rope, "query", put(query=lambda a: a["key"]), "overlapping memory", "share memory with key")
wrong(rope, "key", put(value=lambda a: a["key"]), "overlapping memory", "share memory with value")
wrong(rope, "positions", put(positions=torch.zeros(2, dtype=torch.int64)), "[2]", "num_tokens=3")
wrong(rope, "positions", as_dtype("positions", FP32), "float32", "int32 or int64")
wrong(rope, "positions", put(positions=torch.tensor([0, 10, 0])), "[1] is 10", "max_position=10")
wrong(rope, "positions", put(positions=torch.tensor([0, 1, -1])), "[2] is -1", "max_position=10")
wrong(rope, "cos_sin_cache", as_dtype("cos_sin_cache", FP16), "float16", "bfloat16 or float32")
wrong(rope, "cos_sin_cache", put(cos_sin_cache=torch.zeros(10)), "[10]", "[max_position, rotary_dim]")
wrong(rope, "cos_sin_cache", put(cos_sin_cache=torch.zeros(10, 18)), "[10, 18]", "head_dim=16")
wrong(rope, "cos_sin_cache", put(cos_sin_cache=torch.zeros(10, 7)), "[10, 7]", "even")
wrong(rope, "cos_sin_cache", put(cos_sin_cache=torch.zeros(10, 0)), "[10, 0]", "even")
wrong(rope, "cos_sin_cache", transposed("cos_sin_cache"), "(1, 10)", "contiguous last dimension")

# ---------------------------------------------------------------------------------------------------------- attention
att = "paged_attention"
wrong(att, "query", put(query=rows(HEADS, dim=8)), "[3, 4, 8]", "head_dim=16")
wrong(att, "query", put(query=rows(3), out=rows(3)), "3 heads", "multiple of num_kv_heads=2")
wrong(att, "query", put(query=rows(0), out=rows(0)), "0 heads", "multiple of num_kv_heads=2")
wrong(att, "query", as_dtype("query", FP64), "float64", "bfloat16")
wrong(att, "query", transposed("query"), "(64, 1, 4)", "contiguous last dimension")
wrong(att, "query", put(cu_seqlens_q=None, seq_lens=int32(8, 5), block_table=lambda a: a["block_table"][:2]),
      "[3, 4, 16]", "num_seqs=2")  # fmt: skip
wrong(att, "out", put(out=rows(HEADS, tokens=4)), "[4, 4, 16]", "num_tokens=3")
wrong(att, "out", as_dtype("out", FP32), "float32", "dtype of query")
wrong(att, "out", transposed("out"), "(64, 1, 4)", "contiguous last dimension")
wrong(att, "out", put(out=lambda a: a["out"][:1].expand(3, -1, -1)), "(0, 16, 1)", "overlap itself")
wrong(att, "out", put(out=lambda a: a["query"]), "overlapping memory", "share memory with query")
wrong(att, "out", put(out=lambda a: a["key_cache"].view(-1, HEADS, DIM)[:3]), "overlapping memory", "with key_cache")
wrong(att, "block_table", as_dtype("block_table", torch.int64), "int64", "int32")
wrong(att, "block_table", put(block_table=int32(0, 1)), "[2]", "[num_seqs=3, max_blocks]")
wrong(att, "block_table", put(block_table=torch.zeros(2, 2, dtype=torch.int32)), "[2, 2]", "num_seqs=3")
wrong(att, "block_table", transposed("block_table"), "(1, 3)", "contiguous last dimension")
wrong(att, "block_table", put(block_table=torch.tensor([[0, 5], [2, 3], [4, 0]]).int()), "[0, 1] is 5", "num_blocks=5")
wrong(att, "block_table", put(block_table=torch.tensor([[0, 1], [-1, 3], [4, 0]]).int()), "[1, 0] is -1", "blocks=5")
wrong(att, "seq_lens", as_dtype("seq_lens", torch.int64), "int64", "int32")
wrong(att, "seq_lens", put(seq_lens=int32(8, 5, 1)[:, None]), "[3, 1]", "[num_seqs]")
wrong(att, "seq_lens", put(seq_lens=int32(8, 0, 5, 0, 1, 0)[::2]), "(2)", "contiguous")
wrong(att, "seq_lens", put(seq_lens=int32(8, 9, 1), max_seqlen_k=9), "[1] is 9", "max_blocks * block_size=8")
wrong(att, "seq_lens", put(max_seqlen_k=7), "[0] is 8", "max_seqlen_k=7")
wrong(att, "seq_lens", put(seq_lens=int32(8, 5, -1)), "[2] is -1", "0 or more")
wrong(att, "cu_seqlens_q", put(cu_seqlens_q=int32(0, 1, 3)), "[3]", "[num_seqs+1=4]")
wrong(att, "cu_seqlens_q", put(cu_seqlens_q=torch.tensor([0, 1, 2, 3])), "int64", "int32")
wrong(att, "cu_seqlens_q", put(cu_seqlens_q=int32(1, 1, 2, 3)), "[0] is 1", "expected 0")
wrong(att, "cu_seqlens_q", put(cu_seqlens_q=int32(0, 2, 1, 3), max_seqlen_q=3), "[2] is 1", "at least the entry before")
wrong(att, "cu_seqlens_q", put(cu_seqlens_q=int32(0, 1, 2, 4), max_seqlen_q=3), "[3] is 4", "num_tokens=3")
wrong(att, "cu_seqlens_q", put(cu_seqlens_q=int32(0, 2, 2, 3)), "[1] is 2", "max_seqlen_q=1")
for name in ("max_seqlen_q", "max_seqlen_k", "num_splits"):
    wrong(att, name, put(**{name: -1}), "-1", "[0, 2^31)")
    wrong(att, name, put(**{name: 2**31}), "2147483648", "[0, 2^31)")
wrong(att, "window_left", put(window_left=-2), "-2", "-1 (unbounded)")
wrong(att, "window_right", put(window_right=-5), "-5", "-1 (unbounded)")
for bad in (0.0, -0.5, float("nan"), float("inf"), 1e-60, 1e60):
    wrong(att, "scale", put(scale=bad), f"{bad:g}", "finite and positive")
for bad in (-1.0, float("nan"), float("inf")):
    wrong(att, "softcap", put(softcap=bad), f"{bad:g}", "0 (off) or positive")
for name in ("alibi_slopes", "sinks"):
    wrong(att, name, as_dtype(name, BF16), "bfloat16", "float32")
    wrong(att, name, put(**{name: torch.ones(3)}), "[3]", "num_heads=4")
    wrong(att, name, put(**{name: torch.ones(8)[::2]}), "(2)", "contiguous")
    wrong(att, name, meta(name), "meta", "device of query (cpu)")
wrong(att, "lse", as_dtype("lse", BF16), "bfloat16", "float32")
wrong(att, "lse", put(lse=torch.zeros(3)), "[3]", "[num_tokens=3, num_heads=4]")
wrong(att, "lse", put(lse=torch.zeros(3, 1).expand(3, 4)), "(1, 0)", "overlap itself")
wrong(att, "lse", put(lse=torch.zeros(12).as_strided((3, 4), (1, 1))), "(1, 1)", "overlap itself")
wrong(att, "workspace", as_dtype("workspace", torch.int8), "int8", "uint8")
wrong(att, "workspace", put(workspace=torch.zeros(4, 4, dtype=torch.uint8)), "[4, 4]", "[bytes]")
wrong(att, "workspace", put(workspace=torch.zeros(1 << 21, dtype=torch.uint8)[::2]), "(2)", "contiguous")
wrong(att, "workspace", put(workspace=torch.zeros(1, dtype=torch.uint8).expand(1 << 20)), "(0)", "contiguous")
for name in ("out", "block_table", "seq_lens", "cu_seqlens_q", "key_cache", "value_cache", "lse", "workspace"):
    wrong(att, name, meta(name), "meta", "device of query (cpu)")
size = "paged_attention_workspace_size"
for name in ("num_tokens", "num_seqs", "max_seqlen_q", "max_seqlen_k", "num_splits"):
    wrong(size, name, put(**{name: -1}), "-1", "[0, 2^31)")
wrong(size, "num_heads", put(num_heads=3), "3", "multiple of num_kv_heads=2")
wrong(size, "num_kv_heads", put(num_kv_heads=0), "0", "[1, 2^31)")
wrong(size, "head_dim", put(head_dim=260), "260", "multiple of 8 up to 256")

# -------------------------------------------------------------------------------------------------------------- merge
mrg = "merge_attention_states"
wrong(mrg, "out", put(out=rows(HEADS)[0]), "[4, 16]", "[num_tokens, num_heads, head_dim]")
wrong(mrg, "out", as_dtype("out", FP64), "float64", "bfloat16")
wrong(mrg, "out", transposed("out"), "(64, 1, 4)", "contiguous last dimension")
wrong(mrg, "out", put(out=lambda a: a["out"][:1].expand(3, -1, -1)), "(0, 16, 1)", "overlap itself")
wrong(mrg, "out", put(**{k: rows(HEADS, dim=12) for k in ("out", "out_a", "out_b")}), "12", "multiple of 8")
wrong(mrg, "lse", put(lse=lambda a: a["lse"].T), "[4, 3]", "num_tokens=3")
wrong(mrg, "lse", as_dtype("lse", FP64), "float64", "float32")
wrong(mrg, "lse", put(lse=torch.zeros(1, 4).expand(3, 4)), "(0, 1)", "overlap itself")
for part in ("a", "b"):
    out, lse = f"out_{part}", f"lse_{part}"
    wrong(mrg, out, put(**{out: rows(HEADS, tokens=2)}), "[2, 4, 16]", "num_tokens=3")
    wrong(mrg, out, as_dtype(out, FP16), "float16", "bfloat16 or float32")
    wrong(mrg, out, transposed(out), "(64, 1, 4)", "contiguous last dimension")
    wrong(mrg, lse, put(**{lse: torch.zeros(3)}), "[3]", "num_heads=4")
    wrong(mrg, lse, as_dtype(lse, BF16), "bfloat16", "float32")
    across = put(**{out: torch.zeros(4, HEADS, DIM, dtype=BF16)[1:]}, out=lambda a, out=out: one_row_back(a[out]))
    wrong(mrg, "out", across, "overlapping memory", f"share memory with {out}")
    across = put(**{lse: torch.zeros(4, HEADS)[1:]}, lse=lambda a, lse=lse: one_row_back(a[lse]))
    wrong(mrg, "lse", across, "overlapping memory", f"share memory with {lse}")

# ------------------------------------------------------------------------------------------------------------- gather
gat = "gather_cache"
wrong(gat, "key", put(key=rows(tokens=14, dim=8)), "[14, 2, 8]", "head_dim=16")
wrong(gat, "value", put(value=rows(tokens=13)), "[13, 2, 16]", "total=14")
wrong(gat, "value", as_dtype("value", FP32), "float32", "dtype of key")
wrong(gat, "key", transposed("key"), "(32, 1, 2)", "contiguous last dimension")
wrong(gat, "key", put(key=lambda a: a["key"][:1].expand(14, -1, -1)), "(0, 16, 1)", "overlap itself")
wrong(gat, "key", put(value=lambda a: a["key"]), "overlapping memory", "share memory with value")
wrong(gat, "value", put(value=lambda a: a["value_cache"].view(-1, 2, 16)[:14]), "overlapping", "with value_cache")
wrong(gat, "block_table", put(block_table=torch.tensor([[0, 1], [2, 3], [5, 0]]).int()), "[2, 0] is 5", "num_blocks=5")
wrong(gat, "block_table", as_dtype("block_table", torch.int64), "int64", "int32")
wrong(gat, "seq_lens", put(seq_lens=int32(8, 5, -1)), "[2] is -1", "0 or more")
wrong(gat, "seq_lens", put(seq_lens=int32(8, 9, 1), cu_seqlens=int32(0, 8, 17, 18)), "[1] is 9", "block_size=8")
wrong(gat, "seq_lens", put(seq_lens=int32(8, 5, 2), cu_seqlens=int32(0, 8, 13, 15)), "[2] is 2", "=1")
wrong(gat, "cu_seqlens", put(cu_seqlens=int32(0, 8, 13)), "[3]", "num_seqs+1=4")
wrong(gat, "cu_seqlens", put(cu_seqlens=int32(0, 7, 13, 14)), "[1] is 7", "expected 8")
wrong(gat, "cu_seqlens", put(cu_seqlens=int32(0, 8, 13, 13)), "[3] is 13", "expected 14")

# ------------------------------------------------------------------------------------------------------- block movers
for op in ("copy_blocks", "swap_blocks"):
    wrong(op, "block_mapping", as_dtype("block_mapping", torch.int32), "int32", "int64")
    wrong(op, "block_mapping", put(block_mapping=torch.zeros(2, 3, dtype=torch.int64)), "[2, 3]", "[pairs, 2]")
    wrong(op, "block_mapping", put(block_mapping=torch.tensor([[0, 1], [5, 2]])), "[1, 0] is 5", "[0, 5)")
    wrong(op, "block_mapping", put(block_mapping=torch.tensor([[-1, 1]])), "[0, 0] is -1", "[0, 5)")
    wrong(op, "block_mapping", put(block_mapping=torch.tensor([[0, 1], [2, 1]])), "[1, 1] is 1", "pair 0 has it too")
wrong("copy_blocks", "block_mapping", put(block_mapping=torch.tensor([[0, 1], [1, 2]])), "[1, 0] is 1", "pair 0 writes")
wrong("copy_blocks", "block_mapping", put(block_mapping=torch.tensor([[3, 3]])), "[0, 0] is 3", "pair 0 writes it")
wrong("copy_blocks", "value_caches", put(value_caches=lambda a: a["value_caches"][:1]), "1", "as many tensors as key")
wrong("copy_blocks", "key_caches[1]", put(key_caches=[cache(), cache(block_size=2)]), "[5, 2, 2, 16]", "block_size=4")
wrong("copy_blocks", "key_caches[1]", put(key_caches=[cache(), cache(FP16)]), "float16", "dtype of key_caches[0]")
wrong(
    "copy_blocks", "key_caches[0]", put(value_caches=lambda a: a["key_caches"]), "overlapping", "with value_caches[0]"
)
wrong("copy_blocks", "value_caches[1]", put(value_caches=[cache(), cache()[:1].expand(5, -1, -1, -1)]),
      "(0, 32, 16, 1)", "overlap itself")  # fmt: skip
wrong("swap_blocks", "block_mapping", put(block_mapping=torch.tensor([[0, 4]])), "[0, 1] is 4", "[0, 4)")
wrong("swap_blocks", "block_mapping", put(dst=lambda a: a["src"], block_mapping=torch.tensor([[0, 1], [1, 3]])),
      "[1, 0] is 1", "pair 0 writes it")  # fmt: skip
wrong("swap_blocks", "dst", put(dst=cache(block_size=8)), "[5, 8, 2, 16]", "blocks like src")
wrong("swap_blocks", "dst", as_dtype("dst", FP16), "float16", "dtype of src")
wrong("swap_blocks", "dst", put(dst=lambda a: a["src"][1:]), "overlapping memory", "share memory with src")
wrong("swap_blocks", "dst", put(dst=lambda a: a["dst"][:1].expand(4, -1, -1, -1)), "(0, 32, 16, 1)", "overlap itself")


@pytest.mark.parametrize("op", MAKERS)
def test_the_arguments_without_a_fault_pass(op, backend):
    backend.op(op)(**MAKERS[op]())


@pytest.mark.parametrize("op,argument,change,got,expected", CASES)
def test_error(op, argument, change, got, expected, backend):
    args = MAKERS[op]()
    change(args)
    host = {k: v for k, v in args.items() if not (isinstance(v, torch.Tensor) and v.device.type == "meta")}
    before = op_args.memory(host)
    # A wrong value is an error of every call only where the host can see it, and of check mode everywhere.
    with pagedkern.check_mode(not backend.checks_values), pytest.raises(RuntimeError) as raised:
        backend.op(op)(**args)
    message = str(raised.value)
    assert re.match(re.escape(f"{op}: {argument}") + r"[ \[]", message), message
    assert got in message and expected in message, message
    assert "\n" not in message
    for old, new in zip(before, op_args.memory(host), strict=True):
        assert torch.equal(old, new), "something was written"


@pytest.mark.parametrize("op", MAKERS)
def test_none_for_a_tensor(op, backend):
    schema = getattr(torch.ops.pagedkern, op).default._schema
    for name in (a.name for a in schema.arguments if str(a.type) == "Tensor"):
        with pytest.raises(RuntimeError, match=f"^{op}: {name} must .*, got None$"):
            backend.op(op)(**MAKERS[op]() | {name: None})


def at_an_odd_address(tensor):
    buffer = bytearray(tensor.nbytes + 2)
    odd = 1 - torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() % 2
    moved = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=odd).view(tensor.shape)
    assert moved.data_ptr() % 2 == 1
    return moved.copy_(tensor)


@pytest.mark.parametrize("op", MAKERS)
def test_a_tensor_that_starts_between_two_elements(op, backend):
    """No kernel can read it; on a GPU it would be the end of the process's context."""
    plain = MAKERS[op]()
    for name, value in plain.items():
        several = isinstance(value, list)
        tensor = value[1] if several else value
        if not isinstance(tensor, torch.Tensor) or tensor.itemsize == 1:
            continue
        args = MAKERS[op]()
        args[name] = [value[0], at_an_odd_address(tensor)] if several else at_an_odd_address(tensor)
        before = op_args.memory(args)
        label = re.escape(f"{name}[1]" if several else name)
        rule = rf"^{op}: {label} must start at a multiple of its element size \({tensor.itemsize} bytes\), got address "
        with pytest.raises(RuntimeError, match=rule):
            backend.op(op)(**args)
        for old, new in zip(before, op_args.memory(args), strict=True):
            assert torch.equal(old, new), "something was written"


@pytest.mark.ops("paged_attention")
@pytest.mark.parametrize("num_splits", [0, 1, 4])
def test_a_workspace_one_byte_short(num_splits, backend):
    args = MAKERS["paged_attention"]() | {"num_splits": num_splits}
    need = backend.op("paged_attention_workspace_size")(
        *args["query"].shape[:2], KV_HEADS, DIM, len(args["seq_lens"]), args["max_seqlen_q"], args["max_seqlen_k"],
        num_splits,
    )  # fmt: skip
    backend.op("paged_attention")(**args | {"workspace": torch.zeros(need, dtype=torch.uint8)})
    if need == 0:
        return  # the smallest workspace is enough
    args |= {"workspace": torch.zeros(need - 1, dtype=torch.uint8), "out": torch.full_like(args["out"], 7.0)}
    expected = f"^paged_attention: workspace must have at least .*_size.*={need} bytes, got {need - 1}$"
    with pytest.raises(RuntimeError, match=expected):
        backend.op("paged_attention")(**args)
    assert (args["out"] == 7.0).all()
