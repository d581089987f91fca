"""paged_attention against the float64 reference on the whole case list."""

import pytest

from pagedkern.testing.cases import ATTENTION_CASES
from pagedkern.testing.judge import judge_attention


@pytest.mark.cases(ATTENTION_CASES)
def test_case(backend, case):
    judge_attention(backend, case)


def test_case_names_are_distinct():
    names = [case.name for case in ATTENTION_CASES]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


@pytest.mark.ops("paged_attention")
def test_workspace_of_pinned_splits_grows_with_sequences_not_with_prefill_tokens(backend):
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_seqs": 4, "max_seqlen_k": 4096, "num_splits": 4}
    size = backend.op("paged_attention_workspace_size")
    assert size(num_tokens=4096, max_seqlen_q=1024, **sizes) < 32 * 2**20
