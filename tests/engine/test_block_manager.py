"""Sharing of blocks, the prefix cache and host memory, one situation at a time."""

import pytest
from fake_engine import FakeCache, FakeEngine, KeyOfOneHash

from engine_min.block_manager import BlockManager, PrefixCache


def last_blocks(engine, name="a"):
    blocks, requests = engine.blocks, engine._requests[name]
    return [int(blocks.tables[r.row, blocks.num_held[r.row] - 1]) for r in requests]


def test_three_choices_share_their_prompt_and_copy_its_last_block():
    """Field case 40: prompt 6, block size 4. The last to write keeps the block."""
    engine = FakeEngine(block_size=4)
    engine.request("a", [1, 2, 3, 4, 5, 6], n=3, max_tokens=9)
    engine.step()  # the prompt
    assert engine.blocks.num_used == 2 and engine.cache.num_copies == 0
    assert len(set(last_blocks(engine))) == 1
    engine.step()  # the first token of each is written
    assert engine.cache.num_copies == 2 and len(set(last_blocks(engine))) == 3
    assert len({int(engine.blocks.tables[r.row, 0]) for r in engine._requests["a"]}) == 1
    assert engine.blocks.num_used == 4
    engine.run()
    assert engine.blocks.num_used == 0 and engine.cache.num_copies == 2


def test_a_full_last_block_is_never_copied():
    engine = FakeEngine(block_size=4)
    engine.request("a", list(range(8)), n=3, max_tokens=9)
    engine.run()
    assert engine.cache.num_copies == 0


def test_a_sibling_that_ends_before_the_write_saves_a_copy():
    engine = FakeEngine(block_size=4)
    output = engine.request("a", [1, 2, 3, 4, 5, 6], n=3, max_tokens=9)
    engine.step()
    gone = engine._requests["a"][1]
    engine.scheduler.remove(gone)  # as one that ends does
    engine._requests["a"].remove(gone)
    output.outputs[1].finish_reason = "stop"
    engine.check()
    engine.run()
    assert engine.cache.num_copies == 1 and engine.blocks.num_used == 0


@pytest.mark.parametrize("num_rollouts", [8, 16])
def test_rollouts_of_one_prompt_take_its_blocks_once(num_rollouts):
    prompt, new, size = 512, 40, 16
    engine = FakeEngine(256, size, 32, 1024, 1024)
    engine.request("a", [i % 50 for i in range(prompt)], n=num_rollouts, max_tokens=new)
    engine.run()
    tails = num_rollouts * -(-new // size)
    assert engine.blocks.peak_used <= 1.1 * prompt // size + tails
    assert engine.blocks.peak_used < (num_rollouts * (prompt + new) // size) / 3  # alone they would take this


def test_choices_without_a_row_wait_and_are_recomputed():
    engine = FakeEngine(block_size=4, max_num_seqs=2)
    output = engine.request("a", list(range(10)), n=5, max_tokens=6, seed=3)
    engine.run()
    assert all(len(choice.token_ids) == 6 for choice in output.outputs)
    other = FakeEngine(block_size=4, max_num_seqs=8).request
    roomy = other("a", list(range(10)), n=5, max_tokens=6, seed=3)
    other.__self__.run()
    assert [c.token_ids for c in roomy.outputs] == [c.token_ids for c in output.outputs]


def test_fork_shares_until_they_differ():
    engine = FakeEngine(block_size=4)
    output = engine.request("a", [1, 2, 3], max_tokens=12)
    for _ in range(4):
        engine.step()
    used = engine.blocks.num_used
    assert engine.fork("a", 3) is output and len(output.outputs) == 4
    engine.check()
    assert engine.blocks.num_used == used and {tuple(c.token_ids) for c in output.outputs} == {
        tuple(output.outputs[0].token_ids)
    }
    engine.run()
    assert all(len(choice.token_ids) == 12 for choice in output.outputs)
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1
    assert all(choice.text.split() == [str(t) for t in choice.token_ids] for choice in output.outputs)


@pytest.mark.parametrize("steps", [0, 1])
def test_fork_before_the_first_token_is_one_more_choice(steps):
    """Waiting, and in the middle of the prompt."""
    forked, asked = FakeEngine(budget=8), FakeEngine(budget=8)
    outputs = forked.request("a", list(range(12)), max_tokens=5), asked.request("a", list(range(12)), n=3, max_tokens=5)
    for _ in range(steps):
        forked.step()
    forked.fork("a", 2)
    forked.run()
    asked.run()
    assert [c.token_ids for c in outputs[0].outputs] == [c.token_ids for c in outputs[1].outputs]


def test_fork_of_what_does_not_run():
    engine = FakeEngine()
    with pytest.raises(ValueError, match="request 'a' is not running"):
        engine.fork("a", 1)
    engine.request("a", [1], max_tokens=2)
    with pytest.raises(ValueError, match="n is 0"):
        engine.fork("a", 0)


def test_a_copy_is_done_before_its_blocks_change_hands():
    """Copied and closed in one step: the block must not become the target of a second copy, or its source."""
    cache = FakeCache(6, 4, 0)
    blocks = BlockManager(6, 4, 4, 24, cache)
    first = blocks.open_row()
    blocks.grow(first, 0, 6)
    others = [blocks.fork_row(first, 6) for _ in range(2)]
    blocks.grow(others[0], 6, 7)
    blocks.close_row(others[0])  # preempted in the step in which it copied
    assert cache.num_copies == 1
    blocks.grow(others[1], 6, 7)
    blocks.flush_copies()
    assert cache.num_copies == 2
    blocks.check_integrity()


def test_a_copy_is_done_before_the_row_is_swapped_out():
    cache = FakeCache(6, 4, 4)
    blocks = BlockManager(6, 4, 4, 24, cache, num_host_blocks=4)
    first = blocks.open_row()
    blocks.grow(first, 0, 6)
    cache.blocks[int(blocks.tables[first, 1])] = list("wxyz")
    other = blocks.fork_row(first, 6)
    blocks.grow(other, 6, 7)
    host = blocks.swap_out(other)
    assert cache.host[host[1]] == list("wxyz")


def test_a_prefill_that_takes_the_blocks_of_a_decode_takes_it_out_of_the_step():
    """The second choice of a has no row until the first has ended; by then b is decoding."""
    engine = FakeEngine(num_blocks=27, block_size=1, max_num_seqs=2, budget=8, prefix_caching=False)
    first = engine.request("a", list(range(20)), n=2, max_tokens=2)
    engine.request("b", [1, 2, 3], max_tokens=24)
    preempted = 0
    while engine.has_unfinished():
        engine.step()
        engine.check()
        waiting = [r.request_id for r in engine.scheduler.waiting]
        preempted += waiting == ["b"] and bool(engine.outputs["b"].outputs[0].token_ids)
    assert preempted and first.finished and len(engine.outputs["b"].outputs[0].token_ids) == 24


# ---- The prefix cache.


@pytest.mark.parametrize("length, cached", [(3, 0), (4, 3), (5, 4), (8, 7), (9, 8), (16, 15)])
def test_prompts_found_again(length, cached):
    """Field case 33 too. Of a prompt that is cached whole the last token is computed, and nothing is written."""
    engine = FakeEngine(block_size=4)
    prompt = list(range(length))
    engine.request("a", prompt, max_tokens=1)
    engine.run()
    used = engine.blocks.peak_used
    second = engine.request("b", prompt, max_tokens=1)
    (found,) = engine.scheduler.schedule()
    assert second.num_cached_tokens == cached and found.num_scheduled == length - cached
    assert engine.blocks.num_used == used  # not a block more
    engine.scheduler.remove(found)
    engine.check()


def test_three_equal_prompts_in_one_step_share_nothing_half_written():
    """Field case 34."""
    engine = FakeEngine(block_size=4)
    outputs = [engine.request(name, list(range(11)), max_tokens=5) for name in "abc"]
    engine.run()  # the cache's own checks see any read of what is not there
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids == outputs[2].outputs[0].token_ids
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    assert engine.request("d", list(range(11))).num_cached_tokens == 0
    engine.run()
    assert engine.outputs["d"].num_cached_tokens == 8


def test_a_recycled_block_is_found_no_more():
    """Field case 37."""
    engine = FakeEngine(num_blocks=4, block_size=4, max_model_len=16)
    x, y = list(range(12)), list(range(20, 35))
    engine.request("x", x, max_tokens=1)
    engine.run()
    assert engine.stats().blocks_cached == 3
    engine.request("y", y, max_tokens=1)
    engine.run()
    again = engine.request("x", x, max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 0 and engine.stats().blocks_free == 4


def test_the_least_recently_used_goes_first_and_prefixes_last():
    engine = FakeEngine(num_blocks=8, block_size=4, max_model_len=32)
    prompts = {"a": list(range(8)), "b": list(range(20, 28)), "c": list(range(40, 48))}
    for name in ("a", "b", "a"):
        engine.request(name, prompts[name], max_tokens=1)
        engine.run()
    engine.request("c", [*prompts["c"], *range(12)], max_tokens=1)  # 5 blocks: 4 are free, and the end of b's prompt
    engine.run()
    engine.request("a", prompts["a"], max_tokens=1)
    engine.request("b", prompts["b"], max_tokens=1)
    engine.run()
    assert (engine.outputs["a"].num_cached_tokens, engine.outputs["b"].num_cached_tokens) == (7, 4)


def test_colliding_hashes_share_nothing(monkeypatch):
    """Field case 38."""
    monkeypatch.setattr("engine_min.block_manager.Key", KeyOfOneHash)
    engine = FakeEngine(block_size=2)
    cached = {}
    for name, prompt in (("a", [1, 2, 3, 4]), ("b", [3, 4, 1, 2]), ("c", [1, 2, 1, 2]), ("d", [1, 2, 3, 4])):
        cached[name] = engine.request(name, prompt, max_tokens=1)
        engine.run()
    assert {name: output.num_cached_tokens for name, output in cached.items()} == {"a": 0, "b": 0, "c": 2, "d": 3}


def test_a_block_is_not_shared_out_of_its_place():
    engine = FakeEngine(block_size=2)
    for name, prompt, cached in (("a", [1, 2, 3, 4, 5], 0), ("b", [3, 4, 1, 2, 5], 0), ("c", [1, 2, 1, 2, 5], 2)):
        output = engine.request(name, prompt, max_tokens=1)
        engine.run()
        assert output.num_cached_tokens == cached


def test_salts_share_nothing():
    engine = FakeEngine(block_size=2)
    for salt, cached in ((None, 0), ("x", 0), ("y", 0), ("x", 4), (None, 4), ("", 0)):
        output = engine.request("a", [1, 2, 3, 4, 5], salt, max_tokens=1)
        engine.run()
        assert output.num_cached_tokens == cached


def test_pinned_blocks_are_not_evicted_by_the_request_that_found_them():
    engine = FakeEngine(num_blocks=4, block_size=4, max_model_len=16)
    engine.request("a", list(range(8)), max_tokens=1)
    engine.run()
    engine.request("b", [*range(8), *range(30, 37)], max_tokens=2)  # both blocks found, both others taken
    engine.run()
    assert engine.outputs["b"].num_cached_tokens == 8


def test_generated_tokens_are_found_too():
    engine = FakeEngine(block_size=4)
    first = engine.request("a", [1, 2, 3], max_tokens=7)
    engine.run()
    again = engine.request("b", [1, 2, 3, *first.outputs[0].token_ids, 9], max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 8  # of 9 that were stored: the last token drawn never is


def test_reset_needs_an_idle_pool():
    engine = FakeEngine()
    engine.request("a", list(range(9)), max_tokens=3)
    engine.step()
    with pytest.raises(RuntimeError, match="while no sequence runs"):
        engine.blocks.reset_prefix_cache()
    engine.run()
    engine.blocks.reset_prefix_cache()
    engine.check()
    assert engine.request("a", list(range(9))).num_cached_tokens == 0 and engine.stats().blocks_cached == 0


def test_prefix_caching_can_be_off():
    engine = FakeEngine(prefix_caching=False)
    for _ in range(2):
        output = engine.request("a", list(range(9)), max_tokens=3)
        engine.run()
        assert output.num_cached_tokens == 0 and engine.stats().blocks_cached == 0


def test_the_first_of_two_blocks_with_the_same_contents_stays():
    cache = PrefixCache(2)
    assert [cache.insert(0, None, [1, 2]), cache.insert(1, None, [1, 2]), cache.insert(2, 0, [1, 2])] == [0, 0, 1]
    assert [entry.block for entry in cache.find([1, 2, 1, 2, 1], None)] == [0, 2] and sorted(cache.key_of) == [0, 2]


# ---- Swapping.


def tight(**options):
    settings = dict(num_blocks=6, block_size=4, max_model_len=24, num_host_blocks=8, prefix_caching=False)
    return FakeEngine(**(settings | options))


def test_swapped_out_and_back_without_recomputing():
    engine = tight()
    for name in "ab":
        engine.request(name, list(range(8)), max_tokens=12)
    computed, swapped = 0, 0
    while engine.has_unfinished():
        before = {r: r.num_computed for r in engine.scheduler.running}
        engine.step()
        engine.check()
        swapped = max(swapped, engine.stats().swapped)
        computed += sum(r.num_computed - n for r, n in before.items() if r.row is not None)
    assert swapped == 1 and engine.stats().preempted > 0
    assert computed <= 2 * 12
    assert engine.outputs["a"].outputs[0].token_ids == engine.outputs["b"].outputs[0].token_ids
    assert engine.stats().swapped == 0


def test_without_room_on_the_host_it_is_recomputed():
    engine = tight(num_host_blocks=1)
    for name in "ab":
        engine.request(name, list(range(8)), max_tokens=12)
    swapped = 0
    while engine.has_unfinished():
        engine.step()
        engine.check()
        swapped += engine.stats().swapped
    assert swapped == 0 and engine.stats().preempted > 0
    assert engine.outputs["a"].outputs[0].token_ids == engine.outputs["b"].outputs[0].token_ids


def test_abort_while_swapped_out_returns_the_host_blocks():
    engine = tight()
    for name in "ab":
        engine.request(name, list(range(8)), max_tokens=12)
    while not engine.stats().swapped:
        engine.step()
    assert engine.abort("b")
    engine.check()
    engine.run()


def test_what_the_prefix_cache_still_knows_is_not_brought_back():
    engine = tight(prefix_caching=True, num_blocks=7)
    moved = []
    swap_in = engine.cache.swap_in
    engine.cache.swap_in = lambda pairs: (moved.extend(pairs), swap_in(pairs))
    engine.request("a", list(range(8)), max_tokens=12)
    engine.request("b", list(range(8, 16)), max_tokens=12)
    engine.run()
    assert engine.stats().preempted > 0 and len(moved) < 4
