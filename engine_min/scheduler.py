"""What runs in the next step. One step is one forward pass over a mixed batch of decodes and prefill chunks."""

from bisect import insort

from engine_min.block_manager import BlockManager
from engine_min.request import Request


class Scheduler:
    """First come, first served: `running` and `waiting` are in order of arrival.

    Out of blocks, the latest running request is preempted: its contents move to host memory, or, where there is none,
    its blocks go back and it is recomputed from its tokens, those generated included. It waits before later ones.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, chunked: bool = True):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked = chunked  # whether a prompt may take several steps
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prompt_tokens = self.cached_tokens = 0  # of all requests admitted, and those found in the prefix cache

    def add(self, request: Request) -> None:
        insort(self.waiting, request)

    def schedule(self) -> list[Request]:
        """Who runs, each with its `num_scheduled`: decodes first, then unfinished prefills, then new requests, until
        the token budget or the blocks run out."""
        num_preemptions, room = self.num_preemptions, self.blocks.room
        batch: list[Request] = []
        prefills: list[Request] = []
        for request in self.running[:]:
            row, computed = request.row, request.num_computed
            if row is None:  # preempted a moment ago, for one before it
                continue
            if len(request.tokens) - computed > 1:
                prefills.append(request)
            elif computed < room[row] or self._make_room(request, computed + 1):
                request.num_scheduled, request.samples = 1, True
                batch.append(request)
        budget = self.max_num_batched_tokens - len(batch)
        for request in prefills:
            if budget and request.row is not None:
                num_tokens = min(request.num_pending, budget)
                if self._make_room(request, request.num_computed + num_tokens):
                    budget -= self._take(request, num_tokens, batch)
        if self.num_preemptions > num_preemptions:  # whoever had to go runs neither now nor again in the same step
            batch = [request for request in batch if request.row is not None]
        else:
            self._admit(batch, budget)
        self.blocks.flush_copies()
        return batch

    def _take(self, request: Request, num_tokens: int, batch: list[Request]) -> int:
        request.num_scheduled = num_tokens
        request.samples = num_tokens == request.num_pending
        batch.append(request)
        return num_tokens

    def _make_room(self, request: Request, end: int) -> bool:
        """Grows the request to `end` tokens, preempting from the latest on; False if it had to go itself."""
        while not self.blocks.grow(request.row, request.num_computed, end):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        request.host_blocks = self.blocks.swap_out(request.row) if request.num_computed else None
        if request.host_blocks is None:
            request.num_computed = 0
        self._stop(request)
        request.was_preempted = True
        self.add(request)
        self.num_preemptions += 1

    def _stop(self, request: Request) -> None:
        self.blocks.close_row(request.row)
        self.running.remove(request)
        request.row = None

    def _admit(self, batch: list[Request], budget: int) -> None:
        blocks = self.blocks
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            num_tokens = len(request.tokens)
            # Who wants log probabilities of the prompt wants every position computed.
            may_find = blocks.prefix_caching and request.params.prompt_logprobs is None
            found = blocks.pin(request.tokens, request.salt) if may_find else []
            num_stored = len(found) * blocks.block_size
            # The last token is computed even if it is stored, since its logits are wanted.
            num_computed = max(min(num_stored, num_tokens - 1), request.num_computed)
            # All of it must fit, lest it be preempted half way; one that was preempted leaves the others room to grow.
            needed = blocks.blocks_for(num_tokens) - len(found) + (len(self.running) if request.was_preempted else 0)
            if needed > blocks.num_free or (not self.chunked and num_tokens - num_computed > budget):
                blocks.unpin(found)
                return
            self.waiting.pop(0)
            request.row = blocks.open_row(found)
            insort(self.running, request)
            if request.host_blocks is not None:
                blocks.swap_in(request.row, request.host_blocks)
                request.host_blocks = None
            if not request.was_preempted:
                request.output.num_cached_tokens = num_computed
                self.prompt_tokens += num_tokens
                self.cached_tokens += num_computed
            request.num_computed, request.num_stored = num_computed, num_stored
            taken = self._take(request, min(num_tokens - num_computed, budget), batch)
            blocks.grow(request.row, max(num_computed, num_stored), num_computed + taken)
            budget -= taken

    def fork(self, request: Request, child: Request) -> None:
        """Lets a child that has the request's tokens run beside it; without a free row it waits and is recomputed."""
        if request.row is not None and len(self.running) < self.max_num_seqs:
            child.row = self.blocks.fork_row(request.row, request.num_computed)
            child.num_stored = request.num_computed
            child.num_computed = min(request.num_computed, len(child.tokens) - 1)  # the last for its logits alone
            insort(self.running, child)
        else:
            child.was_preempted = True
            self.add(child)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is, and returns its blocks."""
        if request.row is not None:
            self._stop(request)
        else:
            self.waiting.remove(request)
        if request.host_blocks is not None:
            self.blocks.drop_host(request.host_blocks)
            request.host_blocks = None

    def check_integrity(self) -> None:
        self.blocks.check_integrity([block for request in self.waiting for block in request.host_blocks or ()])
        is_in_place = [r.row is not None for r in self.running] + [r.row is None for r in self.waiting]
        assert all(is_in_place), "rows belong to running requests, and to no others"
