"""opcheck, torch.compile(fullgraph=True) and symbolic tracing of every op."""

import op_args
import pytest
import torch
from op_args import BF16, MAKERS
from torch.fx.experimental.proxy_tensor import make_fx

from pagedkern import ops

FP8 = torch.float8_e4m3fn
# torch has no FP8 kernel for the comparison that opcheck's schema test makes.
ALL_BUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
MUTATING = [name for name in MAKERS if name != "paged_attention_workspace_size"]


def overload(backend, op):
    return getattr(getattr(torch.ops, backend.namespace), op).default


def fp8_args(op):
    args = MAKERS[op]()
    for name in ("key_cache", "value_cache", "src", "dst"):
        if name in args:
            args[name] = args[name].to(FP8)
    if op == "copy_blocks":
        args = {name: [t.to(FP8) for t in v] if isinstance(v, list) else v for name, v in args.items()}
    if op != "reshape_and_cache_dynamic" and "k_scale" in args:
        args |= {"k_scale": torch.tensor(0.5), "v_scale": torch.rand(op_args.KV_HEADS) + 0.5}
    return args


@pytest.mark.parametrize("op", MAKERS)
def test_opcheck(op, backend):
    args = MAKERS[op]()
    uses_fp8 = any(tensor.dtype == FP8 for tensor in op_args.tensors(args))
    utils = ALL_BUT_SCHEMA if uses_fp8 else ("test_schema", *ALL_BUT_SCHEMA)
    torch.library.opcheck(overload(backend, op), (), args, test_utils=utils)


@pytest.mark.parametrize("op", [op for op in MUTATING if op != "merge_attention_states"])
def test_opcheck_over_an_fp8_cache(op, backend):
    torch.library.opcheck(overload(backend, op), (), fp8_args(op), test_utils=ALL_BUT_SCHEMA)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("op", MUTATING)
def test_fullgraph_compile_writes_what_eager_writes(op, dynamic, backend):
    torch._dynamo.reset()
    eager = MAKERS[op]()
    compiled = {
        name: [t.clone() for t in v] if isinstance(v, list) else v.clone() if isinstance(v, torch.Tensor) else v
        for name, v in eager.items()
    }
    call = overload(backend, op)
    call(**eager)

    def program(args):
        call(**args)

    torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=dynamic)(compiled)
    compared = 0
    for name in eager:
        if name == "workspace":
            continue  # scratch
        for a, b in zip(op_args.memory({name: eager[name]}), op_args.memory({name: compiled[name]}), strict=True):
            assert torch.equal(a, b), name
            compared += 1
    assert compared > 0


def layer(query, key, value, key_cache, value_cache, slots, table, seq_lens):
    """What a model's layer does: write, attend into fresh memory with a workspace, use the result."""
    query, key = query * 2, key + 1
    ops.reshape_and_cache(key, value, key_cache, value_cache, slots)
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    size = ops.paged_attention_workspace_size(
        query.shape[0], query.shape[1], key.shape[1], query.shape[2], seq_lens.shape[0], 1, 8, 2
    )
    workspace = torch.empty(size, dtype=torch.uint8)
    ops.paged_attention(out, query, key_cache, value_cache, table, seq_lens, lse=lse, num_splits=2, workspace=workspace)
    return torch.nn.functional.relu(out), lse


def layer_args(tokens):
    table = torch.arange(2 * tokens, dtype=torch.int32).view(tokens, 2)
    cache = torch.zeros(2 * tokens, 4, 2, 16, dtype=BF16)
    slots = torch.arange(tokens) * 8
    return [
        *(op_args.rows(heads, tokens=tokens) for heads in (4, 2, 2)),
        *(cache, cache.clone(), slots, table, torch.ones(tokens, dtype=torch.int32)),
    ]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_layer_compiles_whole(compiler):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    for tokens in (3, 5, 6):  # the second size makes the first dimension symbolic
        args = layer_args(tokens)
        expected_args = [a.clone() for a in args]
        for got, expected in zip(compiled(*args), layer(*expected_args), strict=True):
            assert torch.equal(got, expected)
        for got, expected in zip(args, expected_args, strict=True):
            assert torch.equal(got, expected)


def test_workspace_size_takes_symbolic_sizes():
    def program(query):
        size = torch.ops.pagedkern.paged_attention_workspace_size(query.shape[0], 4, 2, 16, query.shape[0], 1, 8, 4)
        return torch.empty(size, dtype=torch.uint8)

    query = torch.zeros(3, 4, 16)
    traced = make_fx(program, tracing_mode="symbolic")(query)
    assert traced(query).shape == program(query).shape


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, *args):
            return layer(*args)

    args = layer_args(3)
    exported = torch.export.export(Layer(), tuple(a.clone() for a in args)).module()
    for got, expected in zip(exported(*[a.clone() for a in args]), layer(*args), strict=True):
        assert torch.equal(got, expected)


def test_fake_copy_blocks_wants_one_device(backend):
    cpu, meta, mapping = op_args.cache(), op_args.cache().to("meta"), torch.tensor([[0, 1]])
    call = overload(backend, "copy_blocks")
    call([meta], [meta], mapping)
    call([meta], [meta], mapping.to("meta"))
    call([], [], mapping.to("meta"))
    with pytest.raises(RuntimeError, match=r"^copy_blocks: value_caches\[0\] must be on the device of key_caches\[0\]"):
        call([cpu], [meta], mapping)
    with pytest.raises(RuntimeError, match=r"^copy_blocks: block_mapping must be on the device .*\(cpu\), got meta"):
        call([cpu], [cpu], mapping.to("meta"))
