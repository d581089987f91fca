"""The schemas are the contract's, word for word, in every namespace that is registered."""

import inspect
import re

import pytest
import torch
from torch._C import parse_schema

import pagedkern
from pagedkern import ops
from pagedkern.testing.backends import BACKENDS

CONTRACT = """
reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping,
                  Tensor? k_scale=None, Tensor? v_scale=None) -> ()
reshape_and_cache_dynamic(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,
                  Tensor(c!) k_scale, Tensor(d!) v_scale, Tensor slot_mapping) -> ()
rope_reshape_and_cache(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor(c!) key_cache, Tensor(d!) value_cache,
                  Tensor positions, Tensor cos_sin_cache, Tensor slot_mapping, bool interleaved=False,
                  Tensor? k_scale=None, Tensor? v_scale=None) -> ()
paged_attention(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens,
                  Tensor? cu_seqlens_q, int max_seqlen_q, int max_seqlen_k, float scale, bool causal=True,
                  int window_left=-1, int window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None,
                  Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor(b!)? lse=None,
                  int num_splits=0, Tensor(c!)? workspace=None) -> ()
paged_attention_workspace_size(int num_tokens, int num_heads, int num_kv_heads, int head_dim, int num_seqs,
                  int max_seqlen_q, int max_seqlen_k, int num_splits=0) -> int
merge_attention_states(Tensor(a!) out, Tensor(b!)? lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> ()
gather_cache(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, Tensor block_table,
                  Tensor seq_lens, Tensor cu_seqlens, Tensor? k_scale=None, Tensor? v_scale=None) -> ()
copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()
swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()
"""
SCHEMAS = {m.group(1): " ".join(m.group(0).split()) for m in re.finditer(r"(\w+)\([^\n]*(?:\n +[^\n]*)*", CONTRACT)}
WRITTEN = {
    "reshape_and_cache": {"key_cache", "value_cache"},
    "reshape_and_cache_dynamic": {"key_cache", "value_cache", "k_scale", "v_scale"},
    "rope_reshape_and_cache": {"query", "key", "key_cache", "value_cache"},
    "paged_attention": {"out", "lse", "workspace"},
    "paged_attention_workspace_size": set(),
    "merge_attention_states": {"out", "lse"},
    "gather_cache": {"key", "value"},
    "copy_blocks": {"key_caches", "value_caches"},
    "swap_blocks": {"dst"},
}
NAMESPACES = sorted({backend.namespace for backend in BACKENDS})


@pytest.fixture(autouse=True, scope="module")
def _all_backends():
    for backend in BACKENDS:
        backend.load()


def schema_of(namespace, name):
    return getattr(getattr(torch.ops, namespace), name).default._schema


def test_the_contract_is_read_whole():
    assert SCHEMAS.keys() == WRITTEN.keys()


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(namespace, name):
    assert str(schema_of(namespace, name)) == str(parse_schema(f"{namespace}::{SCHEMAS[name]}"))


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_mutation_marks(namespace, name):
    arguments = schema_of(namespace, name).arguments
    marked = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    assert marked == WRITTEN[name]


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_no_other_public_op(namespace):
    registered = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{namespace}::")}
    assert {name for name in registered if not name.startswith("_")} == SCHEMAS.keys()


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_op_has_a_fake(namespace, name):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert any(has(f"{namespace}::{name}", key) for key in ("Meta", "CompositeExplicitAutograd"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_documented_function_takes_the_same_arguments(name):
    function = getattr(ops, name)
    signature = inspect.signature(function)
    schema = schema_of(pagedkern.build_info()["namespace"], name)
    assert list(signature.parameters) == [argument.name for argument in schema.arguments]
    for argument in schema.arguments:
        parameter = signature.parameters[argument.name]
        assert parameter.annotation is not parameter.empty
        if argument.has_default_value():
            assert parameter.default == argument.default_value
        if argument.type.kind() != "IntType":
            assert f"{argument.name}" in function.__doc__ + ops.__doc__
