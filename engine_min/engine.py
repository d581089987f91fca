"""The engine: requests in, one forward pass per step, tokens and text out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from engine_min.attention import Attention, Backend, resolve_backend
from engine_min.block_manager import BlockManager
from engine_min.config import DTYPES, EngineConfig
from engine_min.core import EngineCore
from engine_min.kv_cache import KVCache, Scales, default_num_blocks, static_scales
from engine_min.llama import LlamaModel
from engine_min.loader import Checkpoint, open_checkpoint
from engine_min.output_text import OutputText
from engine_min.parallel import joined
from engine_min.request import CompletionOutput, Request, RequestOutput, SamplingParams
from engine_min.runner import Runner
from engine_min.scheduler import Scheduler
from engine_min.tokenizer import load_tokenizer
from pagedkern.kv_layout import bytes_per_token

Prompt = str | list[int]


class LLM(EngineCore):
    """See the package's README part for the whole interface; `options` are the fields of EngineConfig."""

    def __init__(self, model: str, progress: bool = False, **options):
        config = self.config = EngineConfig(model, **options)
        backend = self.backend = resolve_backend(config)
        self.dtype = _resolve_dtype(config.dtype, backend)
        self.parallel = joined(config.tensor_parallel_size)
        self._progress = progress
        checkpoint = open_checkpoint(config.model)
        model_config = self.model_config = checkpoint.config
        self.tokenizer = load_tokenizer(config.model, checkpoint.gguf_metadata)
        self.max_model_len = min(config.max_model_len or model_config.max_position, model_config.max_position)
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}, expected at least max_model_len "
                f"({self.max_model_len}) without chunked prefill"
            )
        network = self._load(checkpoint)
        self.kv_cache = self._allocate_cache(checkpoint)
        blocks = BlockManager(
            self.kv_cache.num_blocks, config.block_size, config.max_num_seqs, self.max_model_len, self.kv_cache,
            self.kv_cache.num_host_blocks, config.enable_prefix_caching,
        )  # fmt: skip
        scheduler = Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens, config.enable_chunked_prefill)
        attention = Attention(
            backend.ops, self.parallel.local(model_config), self.kv_cache, network.cos_sin_cache,
            config.max_num_batched_tokens, config.max_num_seqs, self.max_model_len, self.dtype,
        )  # fmt: skip
        runner = Runner(
            network, attention, blocks, config.max_num_batched_tokens, self.max_model_len, backend.device,
            config.enforce_eager,
        )  # fmt: skip
        super().__init__(blocks, scheduler, runner)
        self._numbers = itertools.count()
        self._seeds = torch.Generator().manual_seed(config.seed)

    def _load(self, checkpoint: Checkpoint) -> LlamaModel:
        return LlamaModel(
            checkpoint, self.max_model_len, self.dtype, self.backend.device, self.parallel, self._progress
        )

    def _allocate_cache(self, checkpoint: Checkpoint) -> KVCache:
        config, model_config, device = self.config, self.parallel.local(self.model_config), self.backend.device
        dtype = DTYPES.get(config.kv_cache_dtype, self.dtype)
        scales = self._static_scales(checkpoint)
        is_dynamic = dtype.itemsize == 1 and scales is None
        heads = (model_config.num_kv_heads, model_config.head_dim)
        block_bytes = config.block_size * bytes_per_token(*heads, dtype, model_config.num_layers, is_dynamic)
        wanted = config.max_num_seqs * -(-self.max_model_len // config.block_size)
        num_blocks = config.num_blocks or default_num_blocks(config, model_config, block_bytes, wanted, device)
        num_blocks = self.parallel.least(num_blocks)
        num_host_blocks = int(config.swap_space_gib * 2**30) // block_bytes
        return KVCache(
            model_config, num_blocks, config.block_size, dtype, device, self.backend.ops, scales, num_host_blocks
        )

    def _static_scales(self, checkpoint: Checkpoint) -> Scales | None:
        """Of this process's heads; None where the cache is not FP8, or its scales are dynamic."""
        if not self.config.kv_cache_dtype.startswith("fp8"):
            return None
        scales = static_scales(self.config.kv_scales, checkpoint, self.model_config, self.backend.device)
        part = self.parallel.part
        own = [[s if s.numel() == 1 else part(s, 0, s.size(0)) for s in pair] for pair in scales or ()]
        return [(keys, values) for keys, values in own] or None

    def reload_weights(self, model: str | None = None) -> None:
        """Loads the weights again, from another checkpoint of the same model if one is given. Nothing computed with the
        old ones is used again."""
        if self.has_unfinished():
            raise RuntimeError("reload_weights() needs an idle engine: finish or abort the requests first")
        checkpoint = open_checkpoint(model or self.config.model)
        if checkpoint.config != self.model_config:
            raise ValueError(f"{model!r} is not a checkpoint of the model that is loaded: its config differs")
        scales, old = self._static_scales(checkpoint) or [], self.kv_cache.static_scales
        if [[s.shape for s in pair] for pair in scales] != [[s.shape for s in pair] for pair in old]:
            raise ValueError(f"{model!r} has not the KV cache scales that the checkpoint loaded first has")
        self.runner.model = self._load(checkpoint)
        for (old_key, old_value), (key, value) in zip(old, scales, strict=True):  # in place: recorded steps read them
            old_key.copy_(key)
            old_value.copy_(value)
        self.blocks.reset_prefix_cache()
        if self.runner.graphs is not None:
            self.runner.record()

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
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:  # fmt: skip
        """Queues a request. The output returned is the one that `step` goes on filling. Cached prefixes are shared only
        between requests of the same salt."""
        params = sampling_params or SamplingParams()
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(request_id, token_ids, params)
        seed = params.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= self.model_config.eos_token_ids
        choices = [CompletionOutput(logprobs=None if params.logprobs is None else []) for _ in range(params.n)]
        output = RequestOutput(request_id, token_ids, choices)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        request = Request(
            request_id, token_ids, params, seed, stop_ids, output, list(token_ids), choices[0], salt=cache_salt,
            text=OutputText(self.tokenizer, params, stop_ids), arrival=next(self._numbers), num_unforked=params.n - 1,
        )  # fmt: skip
        self.add(request)
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


def _resolve_dtype(name: str, backend: Backend) -> torch.dtype:
    """ "auto" is bfloat16 where there are instructions for it, since it halves the weights to read, else float32."""
    if name != "auto":
        if name == "float32" and not backend.float32:
            raise ValueError(f"attention {backend.name!r} takes bfloat16 and float16, dtype is float32")
        return getattr(torch, name)
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast or not backend.float32 else torch.float32
