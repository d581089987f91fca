"""Rotary position embeddings: what a config says of them, and the table of cosines and sines that the ops read."""

import math
from dataclasses import dataclass

import torch

# Types of a config.json, and the numbers that each needs.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    rotary_dim: int  # the first of a head's dimensions, which are rotated; the others stay
    type: str = "default"  # or another of ROPE_TYPES, or "factors": a tensor of the checkpoint divides the frequencies
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # cosines and sines are multiplied by it

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"{self.rotary_dim} rotary dimensions, expected an even number of at least 2")
        if not 0 < self.factor < math.inf:
            raise ValueError(f"rope factor {self.factor} of type {self.type!r}, expected a positive number")


def rope_from_hf(config: dict, head_dim: int, max_position: int) -> RopeConfig:
    """Old files say rope_theta and rope_scaling {type | rope_type}, new ones put all of it under rope_parameters."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    fraction = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not supported, expected one of {', '.join(ROPE_TYPES)}")
    missing = [key for key in ROPE_TYPES[rope_type] if scaling.get(key) is None]
    if missing:
        raise ValueError(f"rope scaling of type {rope_type!r} lacks {', '.join(missing)}")
    numbers = [*ROPE_TYPES[rope_type], *(name for name in ("beta_fast", "beta_slow") if scaling.get(name))]
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rotary_dim=int(head_dim * fraction),
        type=rope_type,
        original_max_position=int(scaling.get("original_max_position_embeddings") or max_position),
        attention_factor=_yarn_attention_factor(scaling) if rope_type == "yarn" else 1.0,
        truncate=bool(scaling.get("truncate", True)),
        **{name: float(scaling[name]) for name in numbers},
    )


def _yarn_attention_factor(scaling: dict) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    growth = 0.1 * math.log(max(1.0, float(scaling["factor"])))
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return (above * growth + 1.0) / (below * growth + 1.0) if above and below else growth + 1.0


def rope_table(rope: RopeConfig, max_position: int, divisors: torch.Tensor | None = None) -> torch.Tensor:
    """`cos_sin_cache` of the ops: [max_position, rotary_dim] float32, cos first, then sin."""
    inv_freq = rope_inv_freq(rope)
    if divisors is not None:
        inv_freq = inv_freq / divisors
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_factor


def rope_inv_freq(rope: RopeConfig) -> torch.Tensor:
    """[rotary_dim / 2] float32 angles per position. Frequencies that are kept (1) stay, others (0) are divided by the
    factor, those between are blended."""
    steps = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    inv_freq = 1.0 / (rope.theta**steps)
    kept = torch.zeros(())
    if rope.type == "llama3":  # by how often a frequency turns within the original context: short wavelengths stay
        turns = rope.original_max_position * inv_freq / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    elif rope.type == "yarn":  # by dimension: from the one that turns beta_fast times to the one of beta_slow
        first, last = (_dimension_of(turns, rope) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rope.rotary_dim - 1)
        kept = 1 - (torch.arange(rope.rotary_dim // 2).float() - first) / (last - first or 0.001)
    kept = kept.clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _dimension_of(turns: float, rope: RopeConfig) -> float:
    """The dimension that turns so often within the original context."""
    wavelength = rope.original_max_position / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))
