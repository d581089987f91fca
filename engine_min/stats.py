"""What the engine counts."""

from __future__ import annotations

from dataclasses import dataclass

from engine_min.block_manager import BlockManager
from engine_min.scheduler import Scheduler


@dataclass(frozen=True)
class EngineStats:
    running: int
    waiting: int
    preempted: int  # times a request was preempted so far
    swapped: int  # requests whose cached tokens are in host memory now
    blocks_used: int
    blocks_free: int  # that can be taken
    blocks_cached: int  # of the free ones, those whose contents can be found again
    blocks_peak: int
    prefix_hit_rate: float  # share of the prompts' tokens that were found in the prefix cache
    tokens_in: int  # prompt tokens of all requests so far
    tokens_out: int  # tokens generated so far
    steps: int
    fragmentation: float  # share of the slots in used blocks that held no token, over all steps


class Counters:
    def __init__(self, blocks: BlockManager, scheduler: Scheduler):
        self.blocks = blocks
        self.scheduler = scheduler
        self.steps = self.tokens_in = self.tokens_out = 0
        self.slots_held = self.slots_empty = 0

    def count_step(self) -> None:
        """After a forward pass, in which whoever shared the block it writes to has got its own: only the last block of
        a sequence has empty slots."""
        size = self.blocks.block_size
        self.steps += 1
        self.slots_held += self.blocks.num_used * size
        self.slots_empty += sum([-request.num_computed % size for request in self.scheduler.running])

    def stats(self) -> EngineStats:
        blocks, scheduler = self.blocks, self.scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preempted=scheduler.num_preemptions,
            swapped=scheduler.num_swapped,
            blocks_used=blocks.num_used,
            blocks_free=blocks.num_free,
            blocks_cached=blocks.num_idle,
            blocks_peak=blocks.peak_used,
            prefix_hit_rate=scheduler.cached_tokens / scheduler.prompt_tokens if scheduler.prompt_tokens else 0.0,
            tokens_in=self.tokens_in,
            tokens_out=self.tokens_out,
            steps=self.steps,
            fragmentation=self.slots_empty / self.slots_held if self.slots_held else 0.0,
        )
