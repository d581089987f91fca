"""From step to step: whoever is scheduled runs, gains a token, ends, forks or fails."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_min.block_manager import BlockManager
from engine_min.request import CompletionOutput, Request, RequestOutput
from engine_min.runner import Runner
from engine_min.sampler import choice_seed
from engine_min.scheduler import Scheduler


class StepError(RuntimeError):
    """A step, or a part of it, failed: the requests in `failed` were aborted, those in `outputs` gained a token."""

    def __init__(self, what: str, failed: list[RequestOutput], outputs: list[RequestOutput]):
        super().__init__(f"{what}: aborted {', '.join(output.request_id for output in failed)}")
        self.failed = failed
        self.outputs = outputs


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


class EngineCore:
    def __init__(self, blocks: BlockManager, scheduler: Scheduler, runner: Runner):
        self.blocks = blocks
        self.scheduler = scheduler
        self.runner = runner
        self._requests: dict[str, list[Request]] = {}  # by id: its unfinished choices
        self._advanced: list[CompletionOutput] = []  # by the last step
        self._steps = self._tokens_in = self._tokens_out = 0
        self._slots_held = self._slots_empty = 0  # of used blocks, summed over steps

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = [request]
        self._tokens_in += len(request.prompt_token_ids)
        self.scheduler.add(request)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One forward pass; the outputs that gained a token, with each choice's new text."""
        for completion in self._advanced:
            completion.new_text = ""
        self._advanced = []
        batch: list[Request] = []
        try:
            batch = self.scheduler.schedule()
            if not batch:
                return []
            for request in batch:
                if request.num_unforked and request.samples:
                    request.children = self._children(request)
            drawn = self.runner.step(batch)
        except Exception as error:  # where blocks could not be moved, nobody who runs can trust his own
            requests = batch or list(self.scheduler.running)
            failed = [request.output for request in requests if self.abort(request.request_id)]
            raise StepError(f"a step failed ({error})", failed, []) from error
        self._commit(batch)
        outputs: dict[RequestOutput, None] = {}  # in order, each once
        failed: dict[RequestOutput, None] = {}
        for request, token in drawn:
            outputs[request.output] = None
            if token is None:
                failed[request.output] = None
            else:
                self._append(request, token)
        self._tokens_out += len(self._advanced)
        if failed:
            for output in failed:
                self.abort(output.request_id)
                del outputs[output]
            raise StepError("logits without a finite maximum (NaN or all masked)", list(failed), list(outputs))
        return list(outputs)

    def _children(self, request: Request) -> list[Request]:
        """The choices that begin with the token about to be drawn."""
        total = len(request.output.outputs)
        indices = range(total - request.num_unforked, total)
        request.num_unforked = 0
        return [request.fork(index, choice_seed(request.seed, index)) for index in indices]

    def _commit(self, batch: list[Request]) -> None:
        """What the pass has computed is in the cache now, for the children too."""
        blocks, size = self.blocks, self.blocks.block_size
        for request in batch:
            computed = request.num_computed = request.num_computed + request.num_scheduled
            if computed % size < request.num_scheduled and blocks.prefix_caching:  # it has filled a block
                blocks.commit(request.row, request.tokens, computed, request.salt)
        self._steps += 1  # now that nobody writes to a block that others share, each has empty slots in its last alone
        self._slots_held += blocks.num_used * size
        self._slots_empty += sum([-request.num_computed % size for request in self.scheduler.running])
        for request in [request for request in batch if request.children]:
            for child in request.children:
                self._fork(request, child)
            request.children = []

    def _fork(self, request: Request, child: Request) -> None:
        self.scheduler.fork(request, child)
        self._requests[request.request_id].append(child)

    def _append(self, request: Request, token: int) -> None:
        output = request.completion
        request.tokens.append(token)
        output.token_ids.append(token)
        if output.logprobs is not None:
            output.logprobs.append(request.logprobs)
        self._advanced.append(output)
        output.new_text, reason = request.text.push(token)
        output.pieces.append(output.new_text)
        if reason is not None:
            output.finish_reason = reason
            self.scheduler.remove(request)
            unfinished = self._requests[request.request_id]
            unfinished.remove(request)
            if not unfinished:
                del self._requests[request.request_id]

    def fork(self, request_id: str, n: int) -> RequestOutput:
        """Adds n choices that go on from the request's first unfinished one, and share its pages until they differ."""
        if request_id not in self._requests:
            raise ValueError(f"request {request_id!r} is not running")
        if n < 1:
            raise ValueError(f"n is {n}, expected at least 1")
        parent = self._requests[request_id][0]
        source, choices = parent.completion, parent.output.outputs
        for index in range(len(choices), len(choices) + n):
            logprobs = None if source.logprobs is None else list(source.logprobs)
            choices.append(CompletionOutput(list(source.token_ids), logprobs=logprobs, pieces=[source.text]))
            if parent.num_generated == 0:
                parent.num_unforked += 1
            else:
                self._fork(parent, parent.fork(index, choice_seed(parent.seed, index)))
        return parent.output

    def abort(self, request_id: str) -> bool:
        """Ends a request wherever it is and returns its blocks; False if there is none of that name (any more)."""
        unfinished = self._requests.pop(request_id, None)
        if unfinished is None:
            return False
        for request in unfinished:
            self.scheduler.remove(request)
        for completion in unfinished[0].output.outputs:
            completion.finish_reason = completion.finish_reason or "abort"
        return True

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def stats(self) -> EngineStats:
        blocks, scheduler = self.blocks, self.scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preempted=scheduler.num_preemptions,
            swapped=scheduler.num_swapped,
            blocks_used=blocks.num_used,
            blocks_free=blocks.num_free,
            blocks_cached=len(blocks.prefix.idle),
            blocks_peak=blocks.peak_used,
            prefix_hit_rate=scheduler.cached_tokens / max(1, scheduler.prompt_tokens),
            tokens_in=self._tokens_in,
            tokens_out=self._tokens_out,
            steps=self._steps,
            fragmentation=self._slots_empty / max(1, self._slots_held),
        )
