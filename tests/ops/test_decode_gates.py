"""The gates of decode attention that need no GPU: instructions, bytes, bank conflicts, bytes in flight, balance."""

import pytest

from pagedkern.testing import decode_gates as gates

DTYPES = (gates.BF16, gates.E4M3)


def by_heads(function):
    function = pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "e4m3"))(function)
    return pytest.mark.parametrize("heads", gates.HEADS, ids=str)(function)


@by_heads
def test_main_loop(heads, dtype):
    found, limits = gates.static(heads, dtype), gates.LIMITS[dtype]
    assert found.local_bytes == 0, found
    assert found.instructions_per_kib <= limits.instructions, found
    assert found.conversions_per_element <= limits.conversions, found
    assert found.copies and all(copy.startswith("LDGSTS") and ".128" in copy for copy in found.copies), found
    assert found.narrow_loads == 0, found
    assert found.blocks_by_registers >= found.blocks, found
    assert found.bytes_in_flight >= limits.bytes_in_flight, found


@by_heads
@pytest.mark.parametrize("block_size", [16, 64])
def test_traffic(heads, dtype, block_size):
    found, limits = gates.dynamic(heads, dtype, block_size), gates.LIMITS[dtype]
    assert found.kv_bytes <= limits.kv_bytes, found
    assert found.all_bytes <= limits.all_bytes, found
    assert found.wavefronts <= limits.wavefronts, found
    assert found.partials <= limits.partials, found
    assert found.launches == 1, found


@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "e4m3"))
@pytest.mark.parametrize("case", gates.READ_ONCE, ids=str)
def test_many_rows_of_a_kv_head_share_each_load(case, dtype):
    found = gates.kv_bytes_by_kernel(case, dtype)
    assert len(found) == 1, "one kernel takes all rows of a sequence"
    assert max(found.values()) <= gates.MANY_ROWS_KV_BYTES, found


@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "e4m3"))
@pytest.mark.parametrize("case", gates.SHARED_OUT, ids=str)
def test_few_tiles_of_many_keys_are_shared_out(case, dtype):
    found = gates.shared_out(case, dtype)
    assert found.blocks >= 2 * case.heads.num_kv_heads and found.speedup >= 2, found
    assert found.balance <= 1.10, found


def test_a_plan_needs_a_start_for_every_sequence():
    from pagedkern import _C

    for starts, lens in (([0], []), ([0, 1], [1, 2])):
        with pytest.raises(ValueError, match="one entry more"):
            _C.paged_prefill_plan(starts, lens, 32, 8, 128, False)


@pytest.mark.parametrize("query_len,seq_len", [(2048, 2048), (512, 2048), (512, 100_000)])
def test_units_stay_whole_where_splitting_gains_nothing(query_len, seq_len):
    """A long prompt, whose tiles of rows see different keys; nearly as many tiles of rows as blocks."""
    from pagedkern import _C

    plan = _C.paged_prefill_plan([0, query_len], [seq_len], 32, 8, 128, False, 132)
    tiles = plan["bucket_tiles"]
    assert len(tiles) == 8 * query_len * 4 // 64 and plan["partial_bytes"] == 0
    assert max(tiles) == -(-seq_len // plan["tile_keys"])


@pytest.mark.parametrize("num_heads,most", [(128, 132), (200, 66), (512, 29), (1024, 14)])
def test_no_more_clusters_than_a_device_holds_at_once(num_heads, most):
    """Clusters of 1, 2, 4 and 8 blocks, each in one of seven groups of 18 multiprocessors or the six left over."""
    from pagedkern import _C

    plan = _C.paged_prefill_plan([0, 1], [1_000_000], num_heads, 1, 128, False, 132)
    assert len(plan["bucket_tiles"]) == most


@by_heads
@pytest.mark.parametrize("mix", gates.MIXES)
def test_schedule(heads, dtype, mix):
    assert gates.balance(heads, dtype, mix) <= gates.LIMITS[dtype].balance
    assert gates.partials(heads, dtype, mix) <= gates.LIMITS[dtype].partials


@pytest.mark.parametrize("num_seqs", [1, 3, 64])
@pytest.mark.parametrize("length", [1, 64, 100, 1000, 5000])
def test_schedule_gives_every_tile_to_one_block(num_seqs, length):
    from pagedkern import _C

    plan = _C.paged_decode_plan([length] * num_seqs, 32, 8, 128, False)
    assert sum(plan["bucket_tiles"]) == num_seqs * 8 * -(-length // plan["tile_keys"])
    assert max(plan["bucket_tiles"]) - min(plan["bucket_tiles"]) <= 1


def test_a_turn_is_counted_with_all_its_work():
    """The way through a loop that does the most, and of those the shortest."""
    from pagedkern.testing import sass

    lines = [
        "MOV R1, RZ", "LDGSTS.E.128 [R0], [R2]", "@P0 BRA 0x70", "IADD3 R4, R4, R5, R6", "IADD3 R4, R4, R5, R6",
        "NOP", "NOP", "HMMA.16816.F32 R0, R1, R2, R3", "@P1 BRA 0xa0", "HMMA.16816.F32 R0, R1, R2, R3",
        "@P2 BRA 0x10", "EXIT",
    ]  # fmt: skip
    code = [(16 * i, line) for i, line in enumerate(lines)]
    turn = sass.main_turn(code)
    assert sass.main_loop(code) == (1, 10)
    assert turn == [lines[1], lines[2], lines[7], lines[8], lines[9], lines[10]]
    assert sass.count(turn, "HMMA") == 2
