"""What runs in the next step. One step is one forward pass over a mixed batch of decodes and prefill chunks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine_min.block_manager import BlockManager
from engine_min.request import Request


@dataclass(frozen=True)
class ScheduledChunk:
    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """The last pending token is in the chunk, so that its logits give the next one."""
        return self.num_tokens == self.request.num_pending


class Scheduler:
    """First come, first served: `running` and `waiting` are in order of arrival, all running came before all waiting.

    Out of blocks, the latest running request is preempted: its blocks go back, it moves to the front of the queue and
    is recomputed from its tokens, those generated included.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledChunk]:
        """Decodes first, then unfinished prefills, then new requests, until the token budget or the blocks run out."""
        budget = self.max_num_batched_tokens
        chunks: dict[Request, ScheduledChunk] = {}
        for request in sorted(self.running, key=lambda request: request.num_pending > 1):
            if budget and request.row is not None:  # None: preempted a moment ago, for one before it
                num_tokens = min(request.num_pending, budget)
                if self._make_room(request, num_tokens, chunks):
                    chunks[request] = ScheduledChunk(request, num_tokens)
                    budget = self.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks.values())
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self.blocks.can_grow(None, len(request.tokens)):  # all of it, lest it be preempted half way
                break
            self.waiting.popleft()
            request.row = self.blocks.open_row()
            self.running.append(request)
            num_tokens = min(request.num_pending, budget)
            self.blocks.grow(request.row, num_tokens)
            chunks[request] = ScheduledChunk(request, num_tokens)
            budget -= num_tokens
        return list(chunks.values())

    def _make_room(self, request: Request, num_tokens: int, chunks: dict[Request, ScheduledChunk]) -> bool:
        """Grows the request by num_tokens, preempting from the latest on; False if it had to go itself."""
        total = request.num_computed + num_tokens
        while not self.blocks.can_grow(request.row, total):
            victim = self.running[-1]
            chunks.pop(victim, None)
            self._preempt(victim)
            if victim is request:
                return False
        self.blocks.grow(request.row, total)
        return True

    def _preempt(self, request: Request) -> None:
        self.remove(request)
        request.num_computed = 0
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is, and returns its blocks."""
        if request.row is None:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.blocks.close_row(request.row)
        request.row = None
