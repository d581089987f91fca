"""Who runs when, and whose blocks are whose: borders, order, preemption, and random steps with an integrity check."""

import itertools
import random

import pytest

from engine_min import SamplingParams
from engine_min.block_manager import BlockManager
from engine_min.request import Request, RequestOutput
from engine_min.scheduler import Scheduler

ARRIVALS = itertools.count()


def make(num_blocks=64, block_size=4, max_num_seqs=8, budget=32, max_model_len=128):
    blocks = BlockManager(num_blocks, block_size, max_num_seqs, max_model_len, prefix_caching=False)
    return Scheduler(blocks, max_num_seqs, budget)


def request(name, prompt_len, max_tokens=8):
    tokens = list(range(prompt_len))
    params, output = SamplingParams(max_tokens=max_tokens), RequestOutput(name, tokens, [])
    return Request(name, tokens, params, 0, frozenset(), output, list(tokens), arrival=next(ARRIVALS))


def advance(scheduler, finish=True):
    """One step as the engine takes it: who samples gains a token, full requests leave."""
    names = {}
    for item in scheduler.schedule():
        names[item.request_id] = item.num_scheduled
        item.num_computed += item.num_scheduled
        if item.samples:
            item.tokens.append(1000 + len(item.tokens))
            if finish and item.num_generated == item.params.max_tokens:
                scheduler.remove(item)
    scheduler.check_integrity()
    return names


@pytest.mark.parametrize("length, held", [(3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_at_their_borders(length, held):
    """Field case 33: a block more only when a token needs it, never one ahead."""
    scheduler = make()
    scheduler.add(request("a", length))
    advance(scheduler)
    assert scheduler.blocks.num_used == held
    for generated in range(1, 7):  # the token drawn last is stored by the next step
        advance(scheduler)
        assert scheduler.blocks.num_used == -(-(length + generated) // 4)


def test_decodes_come_first_and_prefills_are_chunked():
    scheduler = make(budget=10, num_blocks=64)
    scheduler.add(request("a", 4))
    scheduler.add(request("b", 25))
    scheduler.add(request("c", 3))
    assert advance(scheduler) == {"a": 4, "b": 6}
    assert advance(scheduler) == {"a": 1, "b": 9}
    assert advance(scheduler) == {"a": 1, "b": 9}
    assert advance(scheduler) == {"a": 1, "b": 1, "c": 3}  # field case 31: a last chunk of one token beside a decode
    assert advance(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_no_more_than_max_num_seqs():
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, 2, max_tokens=3 if name == "a" else 6))
    assert set(advance(scheduler)) == {"a", "b"}
    advance(scheduler)
    assert set(advance(scheduler)) == {"a", "b"}
    assert advance(scheduler) == {"b": 1, "c": 2}


def test_a_request_that_does_not_fit_yet_holds_back_those_after_it():
    scheduler = make(num_blocks=6)
    for name, length in (("a", 16), ("b", 12), ("c", 1)):
        scheduler.add(request(name, length, max_tokens=2))
    assert set(advance(scheduler)) == {"a"}
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]
    advance(scheduler)
    assert set(advance(scheduler)) == {"b", "c"}


def test_the_latest_is_preempted_and_comes_back_first():
    scheduler = make(num_blocks=4)
    for name in "abc":
        scheduler.add(request(name, 4, max_tokens=5))
    assert advance(scheduler) == {"a": 4, "b": 4, "c": 4}
    assert advance(scheduler) == {"a": 1, "b": 1}  # the free block goes to a, and c gives its own to b
    assert [r.request_id for r in scheduler.waiting] == ["c"]
    assert scheduler.num_preemptions == 1
    order = []
    while scheduler.running or scheduler.waiting:
        before = {r.request_id for r in (*scheduler.running, *scheduler.waiting)}
        advance(scheduler)
        order += sorted(before - {r.request_id for r in (*scheduler.running, *scheduler.waiting)})
    assert order == ["a", "b", "c"]
    assert scheduler.blocks.num_used == 0


def test_a_preempted_request_recomputes_its_own_tokens():
    scheduler = make(num_blocks=3)
    first, second = request("a", 4, max_tokens=8), request("b", 4, max_tokens=4)
    scheduler.add(first)
    scheduler.add(second)
    advance(scheduler)
    while second.row is not None:
        advance(scheduler)
    tokens = list(second.tokens)
    assert second.num_computed == 0 and len(tokens) > 4
    while second.row is None:
        names = advance(scheduler)
    assert names["b"] == len(tokens)
    assert second.tokens[: len(tokens)] == tokens


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed):
    """Adds, aborts and steps at random on small pools: no leak, no double owner, nobody out of order, an end to all."""
    rng = random.Random(seed)
    num_blocks, block_size = rng.choice([(6, 4), (12, 1), (20, 3), (40, 16)])
    max_len = min(60, num_blocks * block_size)
    scheduler = make(num_blocks, block_size, rng.choice([1, 3, 8]), rng.choice([8, 11, 64]), max_len)
    alive, arrivals, arrived, served = {}, {}, 0, set()
    for step in range(900):
        if step < 700 and rng.random() < 0.25 and len(alive) < 20:
            prompt = rng.randint(1, max_len - 1)
            item = request(f"r{arrived}", prompt, rng.randint(1, max_len - prompt))
            alive[item.request_id], arrivals[item.request_id] = item, arrived
            arrived += 1
            scheduler.add(item)
        if alive and rng.random() < 0.05:
            scheduler.remove(alive.pop(rng.choice(list(alive))))
        names = advance(scheduler)
        assert not alive or names, "somebody is there and nobody runs"
        assert sum(names.values()) <= scheduler.max_num_batched_tokens
        served |= set(names)
        present = {r.request_id: r for r in (*scheduler.running, *scheduler.waiting)}
        order = [arrivals[name] for name in present]
        assert order == sorted(order), "first come, first served"
        for name in [name for name in alive if name not in present]:
            item = alive.pop(name)
            assert len(item.tokens) - len(item.prompt_token_ids) == item.params.max_tokens
        for item in scheduler.running:
            held = scheduler.blocks.num_held[item.row]
            assert held == scheduler.blocks.blocks_for(item.num_computed)
        if step >= 700 and not alive:
            break
    assert not alive and scheduler.blocks.num_used == 0 and len(served) > 20


def test_integrity_check_finds_what_it_is_for():
    blocks = BlockManager(8, 4, 4, 32)
    row = blocks.open_row()
    blocks.grow(row, 0, 9)
    blocks.check_integrity()
    blocks.tables[row, 0] = blocks.tables[row, 1]
    with pytest.raises(AssertionError, match="reference counts"):
        blocks.check_integrity()
