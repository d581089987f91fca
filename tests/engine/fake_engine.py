"""An engine without a model: its cache holds what was written, so that every read is checked, and the token that
follows is a function of what was read."""

import itertools
import random

from engine_min import SamplingParams
from engine_min.block_manager import BlockManager, Key
from engine_min.engine import EngineCore
from engine_min.request import CompletionOutput, Request, RequestOutput
from engine_min.scheduler import Scheduler

VOCAB = 50


class KeyOfOneHash(Key):
    """For the prefix cache: a hash that says nothing."""

    def __hash__(self):
        return 0


def next_token(history, seed):
    return hash((history, seed)) % VOCAB


def history_of(tokens):
    """What a slot holds: it stands for the token and everything before it, as keys and values do."""
    history = 0
    for token in tokens:
        history = hash((history, token))
    return history


class FakeText:
    def __init__(self, request_params, length=0):
        self.params, self.length = request_params, length

    def push(self, token):
        self.length += 1
        return f"{token} ", "length" if self.length == self.params.max_tokens else None


class FakeCache:
    """The block manager's mover; `slots` is the cache."""

    def __init__(self, num_blocks, block_size, num_host_blocks):
        self.block_size = block_size
        self.blocks = [[None] * block_size for _ in range(num_blocks)]
        self.host = [[None] * block_size for _ in range(num_host_blocks)]
        self.num_copies = 0

    def copy(self, pairs):
        self.num_copies += len(pairs)
        sources, targets = zip(*pairs, strict=True)
        assert len(set(targets)) == len(targets) and not set(sources) & set(targets)
        for source, target in pairs:
            self.blocks[target] = list(self.blocks[source])

    def swap_out(self, pairs):
        for source, target in pairs:
            self.host[target] = list(self.blocks[source])

    def swap_in(self, pairs):
        for source, target in pairs:
            self.blocks[target] = list(self.host[source])


class FakeRunner:
    def __init__(self, blocks, cache):
        self.blocks, self.cache = blocks, cache
        self.fail = lambda request: None

    def step(self, batch):
        written = {}
        for request in batch:
            size, table = self.blocks.block_size, self.blocks.tables[request.row]
            start, end = request.num_computed, request.num_computed + request.num_scheduled
            assert end <= self.blocks.num_held[request.row] * size, "tokens without blocks"
            history = self._read(table, start - 1) if start else 0
            for position in range(start, end):
                history = hash((history, request.tokens[position]))
                block, offset = int(table[position // size]), position % size
                if position >= request.num_stored:
                    assert self.blocks.ref_counts[block] == 1, "a write to a shared block"
                    assert block not in self.blocks.prefix.key_of, "a write to a known block"
                    assert (block, offset) not in written, "two writers of one slot"
                    written[block, offset] = request
                    self.cache.blocks[block][offset] = history
        drawn = []
        for request in batch:
            end = request.num_computed + request.num_scheduled
            # Everything that attention would read is what this request wrote, or one with the same tokens before it.
            history = 0
            for position in range(end):
                history = hash((history, request.tokens[position]))
                assert self._read(self.blocks.tables[request.row], position) == history, "foreign keys and values"
            if request.samples:
                failure = self.fail(request)
                if isinstance(failure, Exception):
                    raise failure
                drawn.append((request, None if failure else next_token(history, request.seed)))
        return drawn

    def _read(self, table, position):
        return self.cache.blocks[table[position // self.blocks.block_size]][position % self.blocks.block_size]


class FakeEngine(EngineCore):
    def __init__(self, num_blocks=64, block_size=4, max_num_seqs=8, budget=32, max_model_len=128, num_host_blocks=0,
                 prefix_caching=True, chunked=True):  # fmt: skip
        self.cache = FakeCache(num_blocks, block_size, num_host_blocks)
        blocks = BlockManager(
            num_blocks, block_size, max_num_seqs, max_model_len, self.cache, num_host_blocks, prefix_caching
        )
        super().__init__(blocks, Scheduler(blocks, max_num_seqs, budget, chunked), FakeRunner(blocks, self.cache))
        self.numbers = itertools.count()
        self.outputs = {}

    def request(self, name, tokens, salt=None, seed=0, **params):
        params = SamplingParams(**params)
        output = RequestOutput(name, list(tokens), [CompletionOutput() for _ in range(params.n)])
        request = Request(
            name, list(tokens), params, seed, frozenset(), output, list(tokens), output.outputs[0],
            text=FakeText(params), salt=salt, arrival=next(self.numbers),
        )  # fmt: skip
        self.outputs[name] = output
        self.add(request)
        return output

    def check(self):
        self.scheduler.check_integrity()

    def run(self):
        while self.has_unfinished():
            self.step()
            self.check()


def random_prompt(rng: random.Random, known: list[list[int]], longest: int) -> list[int]:
    """Often one that begins like an earlier one."""
    if known and rng.random() < 0.7:
        base = rng.choice(known)
        prompt = base[: rng.randint(1, len(base))] if rng.random() < 0.3 else list(base)
        prompt += [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 5]))]
    else:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
    return prompt[:longest]
