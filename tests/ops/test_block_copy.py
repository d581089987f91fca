"""copy_blocks and swap_blocks: whole allocations byte for byte against the reference."""

import pytest
import torch

from pagedkern.testing.cache_cases import MOVE_CASES
from pagedkern.testing.judge_cache import judge_move


@pytest.mark.cases(MOVE_CASES)
def test_case(backend, case):
    judge_move(backend, case)


@pytest.mark.ops("copy_blocks", "swap_blocks")
@pytest.mark.parametrize("pair", [(0, 4), (4, 0), (-1, 0), (0, -1), (2**40, 1), (0, 2**32)], ids=str)
def test_ids_out_of_range_raise_before_anything_is_written(backend, pair):
    caches = [torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 2, 1, 8).contiguous() for _ in range(2)]
    before = [cache.clone() for cache in caches]
    mapping = torch.tensor([(0, 1), pair])
    with pytest.raises(RuntimeError, match="block_mapping"):
        backend.op("copy_blocks")([caches[0]], [caches[1]], mapping)
    with pytest.raises(RuntimeError, match="block_mapping"):
        backend.op("swap_blocks")(caches[0], caches[1], mapping)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old)


@pytest.mark.ops("copy_blocks")
def test_layers_of_other_sizes_share_one_mapping(backend):
    """Ids are held against the smallest layer."""
    large, small = (torch.randn(n, 2, 1, 8) for n in (9, 4))
    before = large.clone()
    backend.op("copy_blocks")([large, small], [large.clone(), small.clone()], torch.tensor([[0, 3]]))
    assert torch.equal(large[3], large[0]) and torch.equal(small[3], small[0])
    with pytest.raises(RuntimeError, match="block_mapping"):
        backend.op("copy_blocks")([large, small], [large.clone(), small.clone()], torch.tensor([[0, 5]]))
    assert torch.equal(large[4:], before[4:])


@pytest.mark.ops("swap_blocks")
def test_swap_out_and_back(backend):
    cache, host = torch.randn(8, 16, 2, 64).bfloat16(), torch.zeros(5, 16, 2, 64).bfloat16()
    wanted = cache[[6, 2, 3]].clone()
    backend.op("swap_blocks")(cache, host, torch.tensor([[6, 0], [2, 1], [3, 2]]))
    cache.zero_()
    backend.op("swap_blocks")(host, cache, torch.tensor([[0, 1], [1, 5], [2, 0]]))
    assert torch.equal(cache[[1, 5, 0]], wanted)
    assert not cache[[2, 3, 4, 6, 7]].any()
