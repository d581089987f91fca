"""What is asked of the engine, and what it gives back."""

import math
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral, Real

GREEDY_TEMPERATURE = 1e-5  # below this a softmax is an argmax
MAX_LOGPROBS = 20


def number(default, low: float, high: float = math.inf):
    """A setting that must be in [low, high], and finite."""
    expected = f"in [{low}, {high}]" if high < math.inf else f"at least {low}"
    holds = lambda x: isinstance(x, Real) and low <= x <= high and x < math.inf  # noqa: E731
    return field(default=default, metadata={"holds": holds, "expected": expected})


def one_of(*choices: str):
    return field(
        default=choices[0], metadata={"holds": choices.__contains__, "expected": f"one of {', '.join(choices)}"}
    )


def check_fields(settings: object) -> None:
    """ValueError for the first setting that is not what its field says."""
    for setting in fields(settings):
        value, limits = getattr(settings, setting.name), setting.metadata
        if value is None and setting.default is None:
            continue
        if setting.type in (int, int | None) and not _is_whole(value):
            refuse(settings, setting.name, "whole numbers")
        if limits and not limits["holds"](value):
            refuse(settings, setting.name, limits["expected"])


def refuse(settings: object, name: str, expected: str) -> None:
    raise ValueError(f"{name} is {getattr(settings, name)!r}, expected {expected}")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    n: int = number(1, 1)  # choices per prompt
    max_tokens: int = number(16, 1)
    temperature: float = number(1.0, 0, 1000)
    top_p: float = number(1.0, 0, 1)
    top_k: int = number(-1, -1)  # -1 and 0 keep all
    min_p: float = number(0.0, 0, 1)
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None  # texts that end the output and are not part of it
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0  # no end token may be drawn, and no stop text counts, before this many
    # Of the token drawn and of this many of the likeliest, before any of the below.
    logprobs: int | None = number(None, 0, MAX_LOGPROBS)
    repetition_penalty: float = number(1.0, 0.01, 100)  # on tokens of prompt and output
    presence_penalty: float = number(0.0, -2, 2)  # on tokens of the output, once
    frequency_penalty: float = number(0.0, -2, 2)  # on tokens of the output, each time
    logit_bias: dict[int, float] | None = None
    # Of each token of the prompt after the first, and so many of the likeliest.
    prompt_logprobs: int | None = number(None, 0, MAX_LOGPROBS)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("stop_token_ids", "logit_bias"):
            if not all(map(_is_whole, getattr(self, name) or ())):
                refuse(self, name, "whole numbers")
        if not all(isinstance(stop, str) and stop for stop in self.stops):
            refuse(self, "stop", "texts that are not empty")
        if not 0 <= self.min_tokens <= self.max_tokens:
            refuse(self, "min_tokens", f"in [0, max_tokens ({self.max_tokens})]")
        if not all(isinstance(bias, Real) and -100 <= bias <= 100 for bias in (self.logit_bias or {}).values()):
            refuse(self, "logit_bias", "numbers in [-100, 100]")

    @cached_property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ()) if isinstance(self.stop, list | tuple | None) else (self.stop,)

    @cached_property
    def changes_logits(self) -> bool:
        is_penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return is_penalised or bool(self.logit_bias)


@dataclass(slots=True)
class CompletionOutput:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "abort"; None while it runs
    new_text: str = ""  # what the last step added
    logprobs: list[dict[int, float]] | None = None  # per token: the one drawn first, then the likeliest
    pieces: list[str] = field(default_factory=list)  # of the text

    @property
    def text(self) -> str:
        """Joined when somebody looks: adding to a long text each step would copy all of it."""
        self.pieces = ["".join(self.pieces)]
        return self.pieces[0]


@dataclass(eq=False, slots=True)
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # tokens of the prompt found in the prefix cache
    prompt_logprobs: list[dict[int, float] | None] | None = None  # where they are asked for; the first is None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(eq=False, slots=True)
class Request:
    """A sequence on its way: `tokens` is the prompt and what has been generated, `num_computed` of them are cached.

    The choices of a request are sequences of their own. The first computes the prompt; the others begin when it has.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    output: RequestOutput
    tokens: list[int]
    completion: CompletionOutput | None = None  # the one of the output's choices that this is
    num_computed: int = 0
    num_scheduled: int = 0  # tokens that the step computes
    samples: bool = False  # the step computes the last of them, whose logits give the next
    num_stored: int = 0  # positions before this one were found in the cache and are not written again
    row: int | None = None  # of the block manager's tables, while it runs
    index: int = 0  # of the choice
    text: object = None  # its OutputText
    logprobs: dict[int, float] | None = None  # of the token drawn last, where they are asked for
    arrival: int = 0
    salt: str | None = None  # requests of different salts share no cached prefix
    host_blocks: list[int] | None = None  # where its cached tokens are while it is swapped out
    was_preempted: bool = False

    def __lt__(self, other: "Request") -> bool:
        """First come, first served."""
        return (self.arrival, self.index) < (other.arrival, other.index)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt_token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not cached yet: 1 in decode, more in prefill or after a preemption."""
        return len(self.tokens) - self.num_computed

    def fork(self, index: int, seed: int) -> "Request":
        """Another choice, with the same tokens so far; the scheduler gives it its blocks."""
        return replace(
            self, seed=seed, tokens=list(self.tokens), completion=self.output.outputs[index], num_computed=0, row=None,
            index=index, text=copy(self.text), host_blocks=None,
        )  # fmt: skip
