"""The engine: requests in, one forward pass per step, tokens and text out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine_min.attention import Attention
from engine_min.block_manager import BlockManager
from engine_min.config import EngineConfig
from engine_min.kv_cache import KVCache, bytes_per_block, default_num_blocks
from engine_min.loader import GGUFCheckpoint, open_checkpoint
from engine_min.models import model_class
from engine_min.output_text import OutputText
from engine_min.request import CompletionOutput, Request, RequestOutput, SamplingParams
from engine_min.runner import Runner
from engine_min.scheduler import Scheduler
from engine_min.tokenizer import load_tokenizer

Prompt = str | list[int]


@dataclass(frozen=True)
class EngineStats:
    running: int
    waiting: int
    preempted: int  # times a request was preempted so far
    blocks_used: int
    blocks_free: int
    blocks_peak: int
    tokens_in: int  # prompt tokens of all requests so far
    tokens_out: int  # tokens generated so far
    steps: int
    fragmentation: float  # share of the slots in used blocks that held no token, over all steps


class LLM:
    """See the package's README part for the whole interface; `options` are the fields of EngineConfig."""

    def __init__(self, model: str, progress: Callable[[int, int], None] | None = None, **options):
        config = self.config = EngineConfig(model, **options)
        device, backend = torch.device("cpu"), "cpu"
        dtype = self.dtype = _resolve_dtype(config.dtype)
        checkpoint = open_checkpoint(config.model)
        model_config = self.model_config = checkpoint.config
        metadata = checkpoint.file.metadata if isinstance(checkpoint, GGUFCheckpoint) else None
        self.tokenizer = load_tokenizer(config.model, metadata)
        self.max_model_len = min(config.max_model_len or model_config.max_position, model_config.max_position)
        network = model_class(model_config.architecture)(
            checkpoint, self.max_model_len, dtype, progress or (lambda done, total: None)
        )

        cache_dtype = dtype if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype)
        block_bytes = bytes_per_block(model_config, config.block_size, cache_dtype)
        wanted = config.max_num_seqs * -(-self.max_model_len // config.block_size)
        num_blocks = config.num_blocks or default_num_blocks(block_bytes, wanted)
        self.kv_cache = KVCache(model_config, num_blocks, config.block_size, cache_dtype, device)
        self.blocks = BlockManager(num_blocks, config.block_size, config.max_num_seqs, self.max_model_len)
        self.scheduler = Scheduler(self.blocks, config.max_num_seqs, config.max_num_batched_tokens)
        attention = Attention(
            backend, model_config, self.kv_cache, network.cos_sin_cache, config.max_num_batched_tokens, dtype
        )
        self.runner = Runner(network, attention, self.blocks, config.max_num_batched_tokens)

        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self._seeds = torch.Generator().manual_seed(config.seed)
        self._steps = self._tokens_in = self._tokens_out = 0
        self._slots_held = self._slots_filled = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
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

    def add_request(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """Queues a request. The output returned is the one that `step` goes on filling."""
        params = sampling_params or SamplingParams()
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(request_id, token_ids, params)
        seed = params.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= self.model_config.eos_token_ids
        logprobs = None if params.logprobs is None else []
        output = RequestOutput(request_id, token_ids, [CompletionOutput(logprobs=logprobs)])
        request = Request(request_id, token_ids, params, seed, stop_ids, output, tokens=list(token_ids))
        request.text = OutputText(self.tokenizer, params, stop_ids)
        self._requests[request_id] = request
        self._tokens_in += len(token_ids)
        self.scheduler.add(request)
        return output

    def _check(self, request_id: str, token_ids: list[int], params: SamplingParams) -> None:
        """Refuses at once what could never run, with the numbers."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is already running")
        if not token_ids:
            raise ValueError("the prompt is empty, expected at least one token")
        vocab = self.model_config.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab:
            raise ValueError(f"the prompt holds a token id outside [0, {vocab})")
        for name in ("stop_token_ids", "logit_bias"):
            if any(not 0 <= token_id < vocab for token_id in getattr(params, name) or ()):
                raise ValueError(f"{name} holds a token id outside [0, {vocab})")
        total = len(token_ids) + params.max_tokens
        sizes = f"{len(token_ids)} prompt tokens and max_tokens {params.max_tokens}"
        if total > self.max_model_len:
            raise ValueError(f"{sizes} make {total}, more than max_model_len {self.max_model_len}")
        needed = self.blocks.blocks_for(total - 1)  # the last token's keys are never stored
        if needed > self.blocks.num_blocks:
            raise ValueError(f"{sizes} need {needed} KV blocks, the pool has {self.blocks.num_blocks}")

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One forward pass; the outputs that gained a token."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        try:
            tokens = iter(self.runner.step(chunks))
        except Exception:
            for chunk in chunks:
                self._finish(chunk.request, "abort")
            raise
        self._steps += 1
        advanced = [(chunk.request, next(tokens) if chunk.samples else None, chunk.samples) for chunk in chunks]
        for chunk in chunks:
            chunk.request.num_computed += chunk.num_tokens
        self._count_slots()
        failed = [request for request, token, samples in advanced if samples and token is None]
        outputs = [self._append(request, token) for request, token, _ in advanced if token is not None]
        for request in failed:
            self._finish(request, "abort")
        if failed:
            names = ", ".join(request.request_id for request in failed)
            raise RuntimeError(f"logits without a finite maximum (NaN or all masked): aborted {names}")
        return outputs

    def _append(self, request: Request, token: int) -> RequestOutput:
        output = request.completion
        request.tokens.append(token)
        output.token_ids.append(token)
        if output.logprobs is not None:
            output.logprobs.append(request.logprobs)
        self._tokens_out += 1
        output.new_text, reason = request.text.push(token)
        output.text += output.new_text
        if reason is not None:
            self._finish(request, reason)
        return request.output

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.remove(request)
        del self._requests[request.request_id]
        request.completion.finish_reason = reason

    def _count_slots(self) -> None:
        self._slots_held += self.blocks.num_used * self.blocks.block_size
        self._slots_filled += sum(request.num_computed for request in self.scheduler.running)

    def abort(self, request_id: str) -> bool:
        """Ends a request wherever it is and returns its blocks; False if there is none of that name (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "abort")
        return True

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            preempted=self.scheduler.num_preemptions,
            blocks_used=self.blocks.num_used,
            blocks_free=self.blocks.num_free,
            blocks_peak=self.blocks.peak_used,
            tokens_in=self._tokens_in,
            tokens_out=self._tokens_out,
            steps=self._steps,
            fragmentation=1 - self._slots_filled / self._slots_held if self._slots_held else 0.0,
        )


def _resolve_dtype(name: str) -> torch.dtype:
    """ "auto" on the CPU: bfloat16 where it has instructions for it (it halves the weights to read), else float32."""
    if name != "auto":
        return getattr(torch, name)
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32
