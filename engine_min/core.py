"""From step to step: whoever is scheduled runs, gains a token, ends, forks or fails."""

from __future__ import annotations

import torch

from engine_min.block_manager import BlockManager
from engine_min.request import CompletionOutput, Request, RequestOutput
from engine_min.runner import Runner
from engine_min.sampler import choice_seed
from engine_min.scheduler import ScheduledChunk, Scheduler
from engine_min.stats import Counters, EngineStats


class StepError(RuntimeError):
    """A step, or a part of it, failed: the requests in `failed` were aborted, those in `outputs` gained a token."""

    def __init__(self, message: str, failed: list[RequestOutput], outputs: list[RequestOutput]):
        super().__init__(message)
        self.failed = failed
        self.outputs = outputs


class EngineCore:
    def __init__(self, blocks: BlockManager, scheduler: Scheduler, runner: Runner):
        self.blocks = blocks
        self.scheduler = scheduler
        self.runner = runner
        self._requests: dict[str, list[Request]] = {}  # by id: its unfinished choices
        self._counters = Counters(blocks, scheduler)
        self._advanced: list[CompletionOutput] = []  # by the last step

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = [request]
        self._counters.tokens_in += len(request.prompt_token_ids)
        self.scheduler.add(request)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One forward pass; the outputs that gained a token, with each choice's new text."""
        for completion in self._advanced:
            completion.new_text = ""
        self._advanced = []
        chunks: list[ScheduledChunk] = []
        try:
            chunks = self.scheduler.schedule()
            if not chunks:
                return []
            for chunk in chunks:
                if chunk.samples and chunk.request.num_unforked:
                    chunk.children = self._children(chunk.request)
            tokens = self.runner.step(chunks)
        except Exception as error:  # where blocks could not be moved, nobody who runs can trust his own
            requests = [chunk.request for chunk in chunks] or list(self.scheduler.running)
            failed = [request.output for request in requests if self.abort(request.request_id)]
            raise StepError(f"a step failed ({error}): aborted {_names(failed)}", failed, []) from error
        self._commit(chunks)
        drawn: list[Request] = []
        for chunk in chunks:
            if chunk.samples:
                drawn.append(chunk.request)
                for child in chunk.children:  # before the parent can end and let go of the blocks
                    self.scheduler.fork(chunk.request, child)
                    self._requests[child.request_id].append(child)
                    drawn.append(child)
        outputs: dict[str, RequestOutput] = {}
        unusable: dict[str, RequestOutput] = {}
        for request, token in zip(drawn, tokens, strict=True):
            if token is None:
                unusable[request.request_id] = request.output
            else:
                self._append(request, token)
                outputs[request.request_id] = request.output
        self._counters.tokens_out += len(self._advanced)
        if unusable:
            for request_id in unusable:
                self.abort(request_id)
                outputs.pop(request_id, None)
            failed = list(unusable.values())
            message = f"logits without a finite maximum (NaN or all masked): aborted {_names(failed)}"
            raise StepError(message, failed, list(outputs.values()))
        return list(outputs.values())

    def _children(self, request: Request) -> list[Request]:
        """The choices that begin with the token about to be drawn."""
        total = len(request.output.outputs)
        indices = range(total - request.num_unforked, total)
        request.num_unforked = 0
        return [request.fork(index, choice_seed(request.seed, index)) for index in indices]

    def _commit(self, chunks: list[ScheduledChunk]) -> None:
        """What the pass has computed is in the cache now."""
        blocks, size = self.blocks, self.blocks.block_size
        for chunk in chunks:
            request = chunk.request
            computed = request.num_computed = request.num_computed + chunk.num_tokens
            if computed % size < chunk.num_tokens and blocks.prefix_caching:  # the chunk filled a block
                blocks.commit(request.row, request.digests, request.tokens, computed, request.salt)
        self._counters.count_step()

    def _append(self, request: Request, token: int) -> None:
        output = request.completion
        request.tokens.append(token)
        output.token_ids.append(token)
        if output.logprobs is not None:
            output.logprobs.append(request.logprobs)
        self._advanced.append(output)
        text, reason = request.text.push(token)
        output.new_text = text
        output.pieces.append(text)
        if reason is not None:
            self._finish(request, reason)

    def _finish(self, request: Request, reason: str) -> None:
        request.completion.finish_reason = reason
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
                child = parent.fork(index, choice_seed(parent.seed, index))
                self.scheduler.fork(parent, child)
                self._requests[request_id].append(child)
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
        return self._counters.stats()


def _names(outputs: list[RequestOutput]) -> str:
    return ", ".join(output.request_id for output in outputs)
