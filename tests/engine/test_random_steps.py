"""Ten thousand random steps on random pools: every block accounted for and every token in its place after each."""

import random

import pytest
from fake_engine import FakeEngine, KeyOfOneHash, history_of, next_token, random_prompt

from engine_min import StepError
from engine_min.sampler import choice_seed

NUM_ENGINES, STEPS = 20, 500


class Driver:
    """Adds, aborts, forks and breaks at random, and knows what every choice must have said in the end."""

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 3, 4, 8, 16])
        num_blocks = rng.randint(6, 40)
        self.longest = min(60, num_blocks * self.block_size)
        self.engine = FakeEngine(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=rng.choice([1, 3, 8]),
            budget=rng.choice([8, 11, 64]),
            max_model_len=self.longest + 1,
            num_host_blocks=rng.choice([0, 0, 3, 12, 80]),
            prefix_caching=rng.random() < 0.8,
            chunked=True,
        )
        self.engine.runner.fail = self.fail
        self.known, self.alive, self.seeds, self.ended, self.failures = [], [], {}, 0, 0
        self.deltas, self.forked, self.lengths = {}, {}, {}

    def fail(self, request):
        if self.rng.random() < 0.002:
            self.failures += 1
            return RuntimeError("scripted")
        if self.rng.random() < 0.001:
            self.failures += 1
            return True
        return None

    def add(self):
        prompt = random_prompt(self.rng, self.known, self.longest - 1)
        self.known = [*self.known[-20:], prompt]
        name = f"r{len(self.seeds)}"
        self.seeds[name] = self.rng.randrange(1000)
        self.lengths[name] = self.rng.randint(1, self.longest - len(prompt))
        n, salt = self.rng.choice([1, 1, 1, 2, 4]), self.rng.choice([None, None, "s"])
        self.engine.request(name, prompt, salt, self.seeds[name], n=n, max_tokens=self.lengths[name])
        self.alive.append(name)

    def act(self):
        rng = self.rng
        if rng.random() < 0.3 and len(self.alive) < 15:
            self.add()
        if self.alive and rng.random() < 0.05:
            name = rng.choice(self.alive)
            assert self.engine.abort(name) and not self.engine.abort(name)
            self.settle()
        if self.alive and rng.random() < 0.05:
            name = rng.choice(self.alive)
            self.fork(name, rng.randint(1, 3))
        assert not self.engine.abort("unknown")

    def fork(self, name, n):
        output = self.engine.outputs[name]
        parent = self.engine._requests[name][0]
        for index in range(len(output.outputs), len(output.outputs) + n):
            if parent.num_generated or parent.index:
                self.forked[name, index] = (parent.seed, parent.num_generated)
        self.engine.fork(name, n)

    def step(self):
        expected = self.engine.has_unfinished()
        try:
            outputs = self.engine.step()
            assert not expected or outputs or self.engine.scheduler.running, "somebody is there and nobody runs"
        except StepError as error:
            assert not isinstance(error.__cause__, AssertionError), error.__cause__
            outputs = [*error.outputs, *error.failed]
            assert all(o.finished for o in error.failed) and error.failed
        for output in outputs:
            for index, choice in enumerate(output.outputs):
                key = output.request_id, index
                self.deltas[key] = self.deltas.get(key, "") + choice.new_text
        self.engine.check()
        self.settle()

    def settle(self):
        for name in [name for name in self.alive if self.engine.outputs[name].finished]:
            self.alive.remove(name)
            self.ended += 1
            self.check_tokens(self.engine.outputs[name])

    def check_tokens(self, output):
        """None lost, none twice, whatever happened on the way."""
        for index, choice in enumerate(output.outputs):
            key = output.request_id, index
            tokens = list(output.prompt_token_ids)
            # Of a fork, the first tokens were drawn by the one it comes from, and are checked there.
            parent_seed, inherited = self.forked.get(key, (self.seeds[output.request_id], 0))
            seed = choice_seed(parent_seed, index)
            for i, token in enumerate(choice.token_ids):
                assert i < inherited or token == next_token(history_of(tokens), seed), key
                tokens.append(token)
            if choice.finish_reason == "length":
                assert len(choice.token_ids) == self.lengths[output.request_id]
            text = "".join(f"{token} " for token in choice.token_ids)
            if index == 0:
                assert self.deltas.get(key, "") == text  # field case 36: the stream goes on where it was


@pytest.mark.parametrize("seed", range(NUM_ENGINES))
def test_random_steps(seed, monkeypatch):
    if seed % 5 == 4:  # field case 38, all the way: a hash that says nothing
        monkeypatch.setattr("engine_min.block_manager.Key", KeyOfOneHash)
    driver = Driver(seed)
    for _ in range(STEPS):
        driver.act()
        driver.step()
    while driver.alive:
        driver.step()
    engine = driver.engine
    stats = engine.stats()
    assert driver.ended > 20
    assert (stats.running, stats.waiting, stats.swapped, stats.blocks_used) == (0, 0, 0, 0)
    assert stats.blocks_free == engine.blocks.num_blocks
    engine.blocks.reset_prefix_cache()
    engine.check()
