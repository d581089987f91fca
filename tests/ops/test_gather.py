"""gather_cache: stored * scale in float32, rounded once, byte for byte against the reference."""

import pytest
import torch

from pagedkern import reference
from pagedkern.testing.cache_cases import GATHER_CASES
from pagedkern.testing.judge_cache import judge_gather


@pytest.mark.cases(GATHER_CASES)
def test_case(backend, case):
    judge_gather(backend, case)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_every_byte_is_decoded_exactly(backend, cache_dtype, dtype, scale):
    cache = torch.arange(256, dtype=torch.uint8).view(cache_dtype).reshape(1, 4, 1, 64)
    key, value = (torch.zeros(4, 1, 64, dtype=dtype) for _ in range(2))
    table, lens, starts = (torch.tensor(v, dtype=torch.int32) for v in ([[0]], [4], [0, 4]))
    scales = [None if scale is None else torch.tensor([scale])] * 2
    backend.op("gather_cache")(key, value, cache, cache, table, lens, starts, *scales)
    wanted = (reference.decode_table(cache_dtype) * (scale or 1.0)).to(dtype)
    for out in (key, value):
        assert torch.equal(out.flatten().isnan(), wanted.isnan())
        assert torch.equal(out.flatten().nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0))


def test_gather_after_write_gives_the_rows_back(backend):
    rows = torch.randn(21, 3, 40).bfloat16()
    caches = [torch.zeros(4, 8, 3, 40).bfloat16() for _ in range(2)]
    table = torch.tensor([[3, 0, 2]], dtype=torch.int32)
    slots = table[0].long().repeat_interleave(8)[:21] * 8 + torch.arange(21) % 8
    backend.op("reshape_and_cache")(rows, -rows, *caches, slots)
    key, value = torch.zeros_like(rows), torch.zeros_like(rows)
    lens, starts = (torch.tensor(v, dtype=torch.int32) for v in ([21], [0, 21]))
    backend.op("gather_cache")(key, value, *caches, table, lens, starts)
    assert torch.equal(key, rows) and torch.equal(value, -rows)
