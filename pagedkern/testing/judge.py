"""Runs one case on one backend and holds the result against the reference. Raises AssertionError when it is wrong."""

import torch

from pagedkern.testing import compare
from pagedkern.testing.backends import Backend
from pagedkern.testing.cases import AttentionCase
from pagedkern.testing.inputs import AttentionInputs, build_attention
from pagedkern.testing.poison import Buffer, allocate


def assert_rest_untouched(after: Buffer, before: Buffer, written: torch.Tensor, what: str) -> None:
    """Every byte outside `written` (bool, shaped like the buffer's bytes) is as it was."""
    changed = (after.bytes() != before.bytes()) & ~written
    assert not changed.any(), (
        f"{what}: {int(changed.sum())} bytes written outside the result, first at byte {int(changed.nonzero()[0])} "
        f"of {changed.numel()}"
    )


def rows_only(buffer: Buffer, rows: int) -> torch.Tensor:
    """What belongs to the first rows of the view: Buffer.owned_bytes of a shorter view."""
    return Buffer(buffer.base, buffer.view[:rows]).owned_bytes()


def attach_workspace(inputs: AttentionInputs, backend: Backend) -> None:
    """A workspace of exactly the size the op asks for, full of NaN, guarded."""
    case = inputs.case
    size = backend.op("paged_attention_workspace_size")(
        case.num_tokens, *case.heads, case.head_dim, len(case.seq_lens), max(case.query_lens, default=0) +
        case.bound_slack, max(case.seq_lens, default=0) + case.bound_slack, case.num_splits,
    )  # fmt: skip
    inputs.workspace = allocate((size,), (1,), 0, torch.uint8, "nan", backend.device)


def run_attention(backend: Backend, case: AttentionCase, seed: int = 0) -> AttentionInputs:
    """Builds the case, calls the op, and checks that nothing but the results was written."""
    inputs = build_attention(case, seed, backend.device)
    if case.workspace:
        attach_workspace(inputs, backend)
    named = {"out": inputs.out, "lse": inputs.lse, "query": inputs.query, "workspace": inputs.workspace}
    named |= {f"cache buffer {index}": buffer for index, buffer in enumerate(inputs.cache.buffers)}
    before = {name: buffer.clone() for name, buffer in named.items() if buffer is not None}
    table = inputs.block_table.clone()
    inputs.call(backend.op("paged_attention"))
    live_rows = sum(case.query_lens)
    for name, old in before.items():
        nothing = torch.zeros(old.bytes().numel(), dtype=torch.bool, device=backend.device)
        written = {"out": live_rows, "lse": live_rows, "workspace": old.view.size(0)}.get(name)
        allowed = nothing if written is None else rows_only(old, written)
        assert_rest_untouched(named[name], old, allowed, name)
    assert torch.equal(inputs.block_table, table), "block_table was written"
    return inputs


def judge_attention(backend: Backend, case: AttentionCase, seed: int = 0) -> None:
    inputs = run_attention(backend, case, seed)
    out, lse = inputs.reference()
    live_rows = sum(case.query_lens)
    compare.assert_close(inputs.out.view[:live_rows], out[:live_rows], case.dtype)
    if inputs.lse is not None:
        fp8 = case.stored_dtype.itemsize == 1
        compare.assert_lse_close(inputs.lse.view[:live_rows], lse[:live_rows], fp8)
