"""What is asked of the engine, and what it gives back."""

from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral

GREEDY_TEMPERATURE = 1e-5  # below this a softmax is an argmax
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    n: int = 1  # choices per prompt
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None  # texts that end the output and are not part of it
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0  # no end token may be drawn, and no stop text counts, before this many
    logprobs: int | None = None  # of the token drawn and of this many of the likeliest, before any of the below
    repetition_penalty: float = 1.0  # on tokens of prompt and output
    presence_penalty: float = 0.0  # on tokens of the output, once
    frequency_penalty: float = 0.0  # on tokens of the output, each time
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None  # of each token of the prompt after the first, and so many of the likeliest

    def __post_init__(self) -> None:
        biases = (self.logit_bias or {}).values()
        counts = {name: [getattr(self, name)] for name in ("n", "max_tokens", "top_k", "min_tokens")}
        counts |= {name: [getattr(self, name) or 0] for name in ("seed", "logprobs", "prompt_logprobs")}
        counts |= {"stop_token_ids": self.stop_token_ids or (), "logit_bias": self.logit_bias or {}}
        refuse_first(self, {name: (all(map(_is_whole, found)), "whole numbers") for name, found in counts.items()})
        checks = {
            "n": (self.n >= 1, "at least 1"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature <= 1000, "in [0, 1000]"),
            "top_p": (0 <= self.top_p <= 1, "in [0, 1]"),
            "top_k": (self.top_k >= -1, "at least -1 (-1 and 0 keep all)"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "stop": (all(isinstance(stop, str) and stop for stop in self.stops), "texts that are not empty"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, f"in [0, max_tokens ({self.max_tokens})]"),
            "logprobs": (0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
            "prompt_logprobs": (0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
            "repetition_penalty": (0.01 <= self.repetition_penalty <= 100, "in [0.01, 100]"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            "logit_bias": (all(-100 <= value <= 100 for value in biases), "numbers in [-100, 100]"),
        }
        refuse_first(self, checks)

    @cached_property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @cached_property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def may_change_logits(self) -> bool:
        return self.penalised or bool(self.logit_bias) or self.min_tokens > 0


def _is_whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def refuse_first(settings: object, checks: dict[str, tuple[bool, str]]) -> None:
    """ValueError for the first setting whose check, (whether it holds, what is expected), does not hold."""
    for name, (ok, expected) in checks.items():
        if not ok:
            raise ValueError(f"{name} is {getattr(settings, name)!r}, expected {expected}")


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

    The choices of a request are sequences of their own from the first token on: until then one computes the prompt.
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
    samples: bool = False  # the step computes the last of them, whose logits give the next: to it and to its children
    num_stored: int = 0  # positions before this one were found in the cache and are not written again
    children: list["Request"] = field(default_factory=list)  # that begin with the token about to be drawn
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
            index=index, children=[], text=copy(self.text), host_blocks=None,
        )  # fmt: skip
