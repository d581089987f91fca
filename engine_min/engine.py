"""The engine: requests in, one forward pass per step, tokens and text out."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from types import SimpleNamespace

import torch

from engine_min.attention import Attention, KVCache
from engine_min.block_manager import BlockManager
from engine_min.checkpoint import open_checkpoint, reading
from engine_min.config import EngineConfig, resolve_backend
from engine_min.llama import LlamaModel
from engine_min.parallel import joined
from engine_min.request import CompletionOutput, Request, RequestOutput, SamplingParams, refuse
from engine_min.runner import Runner
from engine_min.sampler import choice_seed
from engine_min.scheduler import Scheduler
from engine_min.tokenizer import OutputText

Prompt = str | list[int]
Sampling = SamplingParams | Sequence[SamplingParams] | None  # for all prompts, or one for each


class StepError(RuntimeError):
    """A step, or a part of it, failed: the requests in `failed` were aborted, those in `outputs` gained a token."""

    def __init__(self, what: str, failed: list[RequestOutput], outputs: list[RequestOutput]):
        super().__init__(f"{what}: aborted {', '.join(output.request_id for output in failed)}")
        self.failed = failed
        self.outputs = outputs


class EngineCore:
    """From step to step: whoever is scheduled runs, gains a token, ends, forks or fails."""

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

    def _commit(self, batch: list[Request]) -> None:
        """What the pass has computed is in the cache now, for other choices too."""
        blocks, size = self.blocks, self.blocks.block_size
        for request in batch:
            computed = request.num_computed = request.num_computed + request.num_scheduled
            if computed % size < request.num_scheduled and blocks.prefix_caching:  # it has filled a block
                blocks.commit(request.row, request.tokens, computed, request.salt)
        self._steps += 1  # now that nobody writes to a block that others share, each has empty slots in its last alone
        self._slots_held += blocks.num_used * size
        self._slots_empty += sum([-request.num_computed % size for request in self.scheduler.running])
        for request in batch:
            if not request.completion.token_ids and request.samples and request.index == 0:  # its other choices begin
                for index in range(1, len(request.output.outputs)):
                    self._fork(request, index)

    def _fork(self, request: Request, index: int) -> None:
        child = request.fork(index, choice_seed(request.seed, index))
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
            if parent.num_generated > 0 or parent.index > 0:  # else it begins when the prompt is computed
                self._fork(parent, index)
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

    def stats(self) -> SimpleNamespace:
        blocks, scheduler = self.blocks, self.scheduler
        return SimpleNamespace(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preempted=scheduler.num_preemptions,  # times a request was preempted so far
            swapped=sum(request.host_blocks is not None for request in scheduler.waiting),  # to host memory, now
            blocks_used=blocks.num_used,
            blocks_free=blocks.num_free,  # that can be taken
            blocks_cached=len(blocks.prefix.idle),  # of the free ones, those whose contents can be found again
            blocks_peak=blocks.peak_used,
            prefix_hit_rate=scheduler.cached_tokens / max(1, scheduler.prompt_tokens),  # of the prompts' tokens
            tokens_in=self._tokens_in,  # prompt tokens of all requests so far
            tokens_out=self._tokens_out,  # tokens generated so far
            steps=self._steps,
            fragmentation=self._slots_empty / max(1, self._slots_held),  # of used blocks' slots, over all steps
        )


class LLM(EngineCore):
    """An engine for the model in a directory or a .gguf file. `options` are the fields of EngineConfig."""

    def __init__(self, model: str, **options):
        config = EngineConfig(model, **options)
        checkpoint = open_checkpoint(config.model)
        backend = self.backend = resolve_backend(config, checkpoint.is_quantized)
        parallel = self.parallel = joined(config.tensor_parallel_size)
        longest = self.max_model_len = min(config.max_model_len or math.inf, checkpoint.config.max_position)
        config = self.config = replace(config, max_model_len=longest)
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < longest:
            refuse(config, "max_num_batched_tokens", f"at least max_model_len ({longest}) without chunked prefill")
        self.model_config, local = checkpoint.config, parallel.local(checkpoint.config)
        with reading(model):
            self.tokenizer = checkpoint.tokenizer()
            network = LlamaModel(checkpoint, longest, backend, parallel)
        cache = self.kv_cache = KVCache(config, checkpoint, backend, parallel)
        attention = Attention(config, local, backend, cache, network.cos_sin_cache)
        blocks = BlockManager(
            cache.num_blocks, config.block_size, config.max_num_seqs, longest, cache, cache.num_host_blocks,
            config.enable_prefix_caching,
        )  # fmt: skip
        super().__init__(
            blocks,
            Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens, config.enable_chunked_prefill),
            Runner(config, network, attention, blocks, backend.device),
        )
        self._numbers = itertools.count()
        self._seeds = torch.Generator().manual_seed(config.seed)

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Sampling = None) -> list[RequestOutput]:
        """Runs prompts (text or ids, one or several) to their end; the outputs are in the prompts' order."""
        if self.has_unfinished():
            raise RuntimeError("generate() needs an idle engine: finish or abort the requests that were added first")
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        outputs = []
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                outputs.append(self.add_request(f"generate-{next(self._numbers)}", prompt, params))
            while self.has_unfinished():
                self.step()
        except BaseException:
            for output in outputs:
                self.abort(output.request_id)
            raise
        return outputs

    def add_request(self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None,
                    cache_salt: str | None = None) -> RequestOutput:  # fmt: skip
        """Queues a request. The output returned is the one that `step` goes on filling. Cached prefixes are shared only
        between requests of the same salt."""
        params = sampling_params or SamplingParams()
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(request_id, token_ids, params, cache_salt)
        seed = params.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= self.model_config.eos_token_ids
        choices = [CompletionOutput(logprobs=None if params.logprobs is None else []) for _ in range(params.n)]
        prompt_logprobs = None if params.prompt_logprobs is None else [None]
        output = RequestOutput(request_id, token_ids, choices, prompt_logprobs=prompt_logprobs)
        request = Request(
            request_id, token_ids, params, seed, stop_ids, output, list(token_ids), choices[0], salt=cache_salt,
            text=OutputText(self.tokenizer, params, stop_ids), arrival=next(self._numbers),
        )  # fmt: skip
        self.add(request)
        return output

    def _check(self, request_id: str, token_ids: list[int], params: SamplingParams, salt: str | None) -> None:
        """Refuses at once what could never run, with the numbers."""
        if not isinstance(salt, str | None):
            raise ValueError(f"cache_salt is {salt!r}, expected a text")
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is already running")
        if not token_ids:
            raise ValueError("the prompt is empty, expected at least one token")
        vocab = self.model_config.vocab_size
        given = {"the prompt": token_ids, "stop_token_ids": params.stop_token_ids, "logit_bias": params.logit_bias}
        for name, ids in given.items():
            are_whole = all(issubclass(kind, Integral) for kind in set(map(type, ids or ())))
            if not are_whole or (ids and not 0 <= min(ids) <= max(ids) < vocab):
                raise ValueError(f"{name} holds a token id that is no whole number or outside [0, {vocab})")
        total = len(token_ids) + params.max_tokens
        sizes = f"{len(token_ids)} prompt tokens and max_tokens {params.max_tokens}"
        if total > self.max_model_len:
            raise ValueError(f"{sizes} make {total}, more than max_model_len {self.max_model_len}")
        needed = self.blocks.blocks_for(total - 1)  # the last token's keys are never stored
        if needed > self.blocks.num_blocks:
            raise ValueError(f"{sizes} need {needed} KV blocks, the pool has {self.blocks.num_blocks}")
