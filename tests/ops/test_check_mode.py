"""Check mode (rule 9): everything an index tensor or an input can get wrong raises from the call that was wrong, naming
op, argument, index, value and bound; what no row can see may hold anything."""

import os
import subprocess
import sys

import op_args
import pytest
import torch
from op_args import BLOCK_SIZE, BLOCKS, E4M3, KV_HEADS, MAKERS, int32

import pagedkern
from pagedkern.check import is_check_mode

NAN, INF = float("nan"), float("inf")
WRITERS = ("reshape_and_cache", "reshape_and_cache_dynamic", "rope_reshape_and_cache")
CASES = []


def wrong(op, change, *words):
    for name in (op,) if isinstance(op, str) else op:
        CASES.append(pytest.param(name, change, words, id=f"{name}-{words[0]}-{len(CASES)}"))


def put(**values):
    return lambda args: args.update(values)


def poke(argument, index, value=NAN):
    """Sets one element, by its byte pattern where the dtype is FP8."""

    def change(args):
        tensor = args[argument]
        if tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8)[index] = 0x7F
        else:
            tensor[index] = value

    return change


def both(*changes):
    return lambda args: [change(args) for change in changes]


def fp8_caches(args):
    args.update(key_cache=args["key_cache"].to(E4M3), value_cache=args["value_cache"].to(E4M3))


def token_scale(name, index=None, value=0.0):
    def change(args):
        fp8_caches(args)
        args[name] = torch.ones(BLOCKS, BLOCK_SIZE, KV_HEADS)
        if index is not None:
            args[name][index] = value

    return change


# The maker's slots are 0, 7, 19: blocks 0, 1, 4 at offsets 0, 3, 3.
wrong(WRITERS, put(slot_mapping=torch.tensor([0, 1, 20])), "slot_mapping[2] is 20", "num_blocks * block_size=20")
wrong(WRITERS, poke("key", (1, 0, 5)), "[1, 0, 5] is NaN")
wrong(WRITERS, poke("value", (2, 1, 15)), "value[2, 1, 15] is NaN")
rope = "rope_reshape_and_cache"
wrong(rope, put(positions=int32(0, 1, 10)), "positions[2] is 10", "max_position=10")
wrong(rope, put(positions=int32(0, -1, 1)), "positions[1] is -1", "max_position=10")
wrong(rope, poke("query", (2, 3, 0)), "query[2, 3, 0] is NaN")
wrong(rope, poke("cos_sin_cache", (9, 2)), "cos_sin_cache[9, 2] is NaN")
for op in ("reshape_and_cache", rope):
    wrong(op, token_scale("k_scale", (1, 3, 1), 0.0), "k_scale[1, 3, 1] is 0", "finite and positive")
    wrong(op, token_scale("v_scale", (4, 3, 0), INF), "v_scale[4, 3, 0] is inf", "finite and positive")

# The maker's sequences hold 8, 5 and 1 keys in blocks (0, 1), (2, 3) and 4.
att = "paged_attention"
wrong(att, put(seq_lens=int32(8, 9, 1), max_seqlen_k=9), "seq_lens[1] is 9", "max_blocks * block_size=8")
wrong(att, put(max_seqlen_k=7), "seq_lens[0] is 8", "max_seqlen_k=7")
wrong(att, put(seq_lens=int32(8, 5, -3)), "seq_lens[2] is -3", "0 or more")
wrong(att, put(cu_seqlens_q=int32(1, 1, 2, 3)), "cu_seqlens_q[0] is 1", "expected 0")
wrong(att, put(cu_seqlens_q=int32(0, 2, 1, 3), max_seqlen_q=3), "cu_seqlens_q[2] is 1", "at least")
wrong(att, put(cu_seqlens_q=int32(0, 1, 2, 4), max_seqlen_q=3), "cu_seqlens_q[3] is 4", "num_tokens=3")
wrong(att, put(cu_seqlens_q=int32(0, 2, 2, 3)), "cu_seqlens_q[1] is 2", "max_seqlen_q=1")
wrong(att, put(block_table=torch.tensor([[0, 1], [2, 5], [4, 0]]).int()), "block_table[1, 1] is 5", "num_blocks=5")
wrong(att, poke("query", (0, 3, 1)), "query[0, 3, 1] is NaN")
wrong(att, poke("key_cache", (3, 0, 1, 2)), "key_cache[3, 0, 1, 2] is NaN")
wrong(att, poke("value_cache", (4, 0, 0, 15)), "value_cache[4, 0, 0, 15] is NaN")
wrong(att, both(fp8_caches, poke("key_cache", (0, 0, 0, 0))), "key_cache[0, 0, 0, 0] is NaN")
wrong(att, poke("alibi_slopes", 2), "alibi_slopes[2] is NaN")
wrong(att, poke("sinks", 0), "sinks[0] is NaN")
wrong(att, token_scale("k_scale", (1, 3, 1), -1.0), "k_scale[1, 3, 1] is -1", "finite and positive")
wrong(att, token_scale("v_scale", (3, 0, 0), NAN), "v_scale[3, 0, 0] is nan", "finite and positive")

gat = "gather_cache"
wrong(gat, put(cu_seqlens=int32(0, 8, 13, 15)), "cu_seqlens[3] is 15", "expected 14")
wrong(gat, put(block_table=torch.tensor([[0, 1], [2, -2], [4, 0]]).int()), "block_table[1, 1] is -2", "num_blocks=5")
wrong(gat, put(seq_lens=int32(9, 5, 0)), "seq_lens[0] is 9", "max_blocks * block_size=8")
wrong(gat, poke("key_cache", (3, 0, 1, 2)), "key_cache[3, 0, 1, 2] is NaN")
wrong(gat, token_scale("v_scale", (0, 0, 0), 0.0), "v_scale[0, 0, 0] is 0", "finite and positive")

mrg = "merge_attention_states"
wrong(mrg, poke("out_a", (1, 2, 3)), "out_a[1, 2, 3] is NaN")
wrong(mrg, poke("out_b", (2, 3, 15)), "out_b[2, 3, 15] is NaN")
wrong(mrg, poke("lse_b", (0, 1)), "lse_b[0, 1] is NaN")
for op in ("copy_blocks", "swap_blocks"):
    wrong(op, put(block_mapping=torch.tensor([[0, 1], [5, 2]])), "block_mapping[1, 0] is 5", "[0, 5)")
    wrong(op, put(block_mapping=torch.tensor([[0, 1], [2, 1]])), "block_mapping[1, 1] is 1", "pair 0")

# What no row sees.
UNSEEN = [
    ("reshape_and_cache", both(put(slot_mapping=torch.tensor([0, -1])), poke("key", (1, 0, 0)), poke("value", (2, 0)))),
    ("reshape_and_cache", token_scale("k_scale", (2, 0, 0), 0.0)),
    ("reshape_and_cache_dynamic", poke("k_scale", (0, 0, 0))),
    (rope, both(put(slot_mapping=torch.tensor([0, -1])), poke("query", (1, 0, 0)), poke("query", (2, 0, 0)))),
    (rope, both(put(slot_mapping=torch.tensor([0, 1]), positions=int32(0, 1, 77)))),
    (att, poke("key_cache", (3, 1, 0, 0))),  # past the 5 keys of the second sequence
    (att, put(block_table=torch.tensor([[0, 1], [2, 3], [4, 1 << 30]]).int())),
    (att, both(put(window_left=1, block_table=torch.tensor([[-7, 1], [2, 3], [4, 0]]).int()), poke("key_cache", 0))),
    (att, both(put(cu_seqlens_q=int32(0, 1, 2, 2), seq_lens=int32(8, 5, 99)), poke("query", (2, 0, 0)))),
    (att, both(put(seq_lens=int32(8, 5, 0), block_table=torch.tensor([[0, 1], [2, 3], [-1, -1]]).int()))),
    (att, token_scale("k_scale", (4, 2, 0), NAN)),
    (gat, poke("value_cache", (4, 1, 0, 0))),
    (mrg, both(poke("out_a", (1, 2, 3)), poke("lse_a", (1, 2), -INF))),
    (mrg, both(poke("out_b", (1, 2, 3)), poke("lse_b", (1, 2), INF))),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _restore_the_mode():
    before = is_check_mode()
    yield
    pagedkern.check_mode(before)


@pytest.mark.parametrize("op,change,words", CASES)
def test_raises_before_anything_is_written(op, change, words, backend):
    args = MAKERS[op]()
    change(args)
    before = op_args.memory(args)
    with pagedkern.check_mode(True), pytest.raises(RuntimeError) as raised:
        backend.op(op)(**args)
    message = str(raised.value)
    assert message.startswith(f"{op}: ") and all(word in message for word in words), message
    for old, new in zip(before, op_args.memory(args), strict=True):
        assert torch.equal(old, new), "something was written"


@pytest.mark.parametrize("op", MAKERS)
def test_right_arguments_pass(op, backend):
    with pagedkern.check_mode(True):
        backend.op(op)(**MAKERS[op]())


@pytest.mark.parametrize("op,change", UNSEEN, ids=[f"{op}-{i}" for i, (op, _) in enumerate(UNSEEN)])
def test_what_no_row_sees_is_not_looked_at(op, change, backend):
    args = MAKERS[op]()
    change(args)
    with pagedkern.check_mode(True):
        backend.op(op)(**args)


def test_nan_passes_when_it_is_off(backend):
    args = MAKERS["reshape_and_cache"]()
    args["key"][0, 0, 0] = NAN
    backend.op("reshape_and_cache")(**args)
    assert args["key_cache"][0, 0, 0, 0].isnan()


def test_sets_the_mode_and_is_a_context_manager():
    pagedkern.check_mode(False)
    pagedkern.check_mode(True)
    assert is_check_mode()
    with pagedkern.check_mode(False):
        assert not is_check_mode()
        with pagedkern.check_mode(True):
            assert is_check_mode()
        assert not is_check_mode()
    assert is_check_mode()
    with pytest.raises(KeyError), pagedkern.check_mode(False):
        raise KeyError
    assert is_check_mode()


@pytest.mark.parametrize("value,expected", [("1", True), ("0", False), ("", False), (None, False)])
def test_environment(value, expected):
    environment = {k: v for k, v in os.environ.items() if k != "PAGEDKERN_CHECK"}
    if value is not None:
        environment["PAGEDKERN_CHECK"] = value
    code = "from pagedkern.check import is_check_mode; print(is_check_mode())"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(expected)
