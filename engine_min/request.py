"""What is asked of the engine, and what it gives back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

GREEDY_TEMPERATURE = 1e-5  # below this a softmax is an argmax


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (math.isfinite(self.temperature) and self.temperature >= 0, "a finite number >= 0"),
            "top_p": (0 <= self.top_p <= 1, "in [0, 1]"),
            "top_k": (self.top_k >= -1, "at least -1 (-1 and 0 keep all)"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
        }
        for name, (ok, expected) in checks.items():
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass
class CompletionOutput:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "abort"; None while it runs
    new_text: str = ""  # what the last step added


@dataclass
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(eq=False)
class Request:
    """A sequence on its way: `tokens` is the prompt and what has been generated, `num_computed` of them are cached."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    output: RequestOutput
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    row: int | None = None  # of the block manager's tables, while it runs

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not cached yet: 1 in decode, more in prefill or after a preemption."""
        return len(self.tokens) - self.num_computed
