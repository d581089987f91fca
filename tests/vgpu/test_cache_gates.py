"""Gates of the cache ops' kernels, counted: they move what must move, by full sectors and accesses of 16 bytes.

What is not data is slots, scales and lse, a few bytes an access, and the hash table of slots, where lanes may look into
two runs that share banks: the data themselves never go through shared memory.
"""

import pytest

from pagedkern.testing import cache_gates

# So many tokens that blocks work in teams, and that each of rope's warps has tokens of its own.
CALLS = [
    *((cache_gates.write_calls, 2048, index) for index in range(4)),
    *((cache_gates.write_calls, 4352, index) for index in (4, 5)),
    *((cache_gates.read_calls, 4096, index) for index in range(3)),
]


def check(traffic: cache_gates.Traffic) -> None:
    assert traffic.memory <= 1.005, traffic
    assert traffic.requested <= 1.055, traffic
    assert traffic.access >= 8, traffic
    assert traffic.conflicts <= 0.1, traffic
    assert traffic.launches == 1, traffic


@pytest.mark.parametrize("make,tokens,index", CALLS, ids=[f"{make.__name__}-{index}" for make, _, index in CALLS])
def test_writes_gathers_and_merges(make, tokens, index):
    check(cache_gates.measure(make(tokens)[index]))


@pytest.mark.parametrize("pairs", [3, 40])
def test_copies_of_blocks(pairs):
    check(cache_gates.measure(cache_gates.copy_calls(pairs, layers=3)[0]))
