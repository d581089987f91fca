"""Gates of the cache ops' kernels, counted: they move what must move, once, by full requests of 16 bytes a lane.

No row goes through shared memory. What else a GPU's caches are asked for is named at LIMITS; memory sees none of it.
"""

import pytest

from pagedkern.testing import cache_gates

# Sectors of all requests over what must move. Every team of a cache writer looks through all slots behind its own; each
# warp loads the scales; four scales of a dynamic row are half a sector, as are the first four of eight angles; a gather
# looks for each token's page; a warp of copy_blocks reads the two ids of its blocks.
LIMITS = {
    (cache_gates.write_calls, 0): 1.017,
    (cache_gates.write_calls, 1): 1.017,
    (cache_gates.write_calls, 2): 1.033,
    (cache_gates.write_calls, 3): 1.032,
    (cache_gates.write_calls, 4): 1.026,
    (cache_gates.write_calls, 5): 1.036,
    (cache_gates.read_calls, 0): 1.005,
    (cache_gates.read_calls, 1): 1.027,
    (cache_gates.read_calls, 2): 1.0,
}


def check(traffic: cache_gates.Traffic, requested: float, lanes: float = 32.0) -> None:
    assert traffic.memory <= 1.0005, traffic
    assert traffic.requested <= requested, traffic
    assert traffic.vectors == 1.0, traffic
    assert traffic.lanes >= lanes, traffic
    assert traffic.conflicts == 0, traffic
    assert traffic.launches == 1, traffic


# So many tokens that blocks work in teams, and that each of rope's warps has tokens of its own.
@pytest.mark.parametrize("make,index", LIMITS, ids=lambda value: getattr(value, "__name__", value))
def test_writes_gathers_and_merges(make, index):
    # FP8 codes of two parts are one access: a block's last round may have one part, and half of the lanes store.
    lanes = 31.0 if (make, index) == (cache_gates.write_calls, 2) else 32.0
    check(cache_gates.measure(make(4352)[index]), LIMITS[make, index], lanes)


@pytest.mark.parametrize("pairs", [3, 40])
def test_copies_of_blocks(pairs):
    check(cache_gates.measure(cache_gates.copy_calls(pairs, layers=3)[0]), 1.008)
