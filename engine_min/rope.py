"""Rotary position embeddings: what a config says of them, and the table of cosines and sines that the ops read."""

import math
from dataclasses import dataclass

import torch

# Keys that a type needs; "factors" is GGUF's, whose divisors are a tensor of the file.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "factors": (),
}


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    rotary_dim: int  # the first of a head's dimensions, which are rotated; the others stay
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # cosines and sines are multiplied by it

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            names = ", ".join(name for name in ROPE_TYPES if name != "factors")
            raise ValueError(f"rope type {self.type!r} is not supported, expected one of {names}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"{self.rotary_dim} rotary dimensions, expected an even number of at least 2")
        if "factor" in ROPE_TYPES[self.type] and not 0 < self.factor < math.inf:
            raise ValueError(f"rope factor {self.factor} of type {self.type!r}, expected a positive number")


def rope_from_hf(config: dict, head_dim: int, max_position: int) -> RopeConfig:
    """Old files say rope_theta and rope_scaling {type | rope_type}, new ones put all of it under rope_parameters."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    fraction = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    missing = [key for key in ROPE_TYPES.get(rope_type, ()) if scaling.get(key) is None]
    if missing:
        raise ValueError(f"rope scaling of type {rope_type!r} lacks {', '.join(missing)}")
    numbers = [*ROPE_TYPES.get(rope_type, ()), *(name for name in ("beta_fast", "beta_slow") if scaling.get(name))]
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


def rope_inv_freq(rope: RopeConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """[rotary_dim / 2] float32 angles per position; `factors` are the divisors that a GGUF file may carry.

    Frequencies that are kept (1) stay, others (0) are divided by the factor, those between are blended.
    """
    steps = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    inv_freq = 1.0 / (rope.theta**steps)
    if rope.type == "factors":
        return inv_freq / factors.float()
    if rope.type == "default":
        return inv_freq
    kept = 0
    if rope.type == "llama3":  # by how often a frequency turns within the original context: short wavelengths stay
        turns = rope.original_max_position * inv_freq / (2 * math.pi)
        kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    elif rope.type == "yarn":
        kept = _yarn_kept(rope)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn_kept(rope: RopeConfig) -> torch.Tensor:
    """A ramp over the dimensions, from the one that turns beta_fast times within the original context, which stays as
    all before it do, to the one that turns beta_slow times."""

    def dimension(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    ramp = (torch.arange(rope.rotary_dim // 2).float() - first) / (last - first or 0.001)
    return 1 - ramp.clamp(0, 1)


def rope_table(inv_freq: torch.Tensor, max_position: int, attention_factor: float = 1.0) -> torch.Tensor:
    """`cos_sin_cache` of the ops: [max_position, rotary_dim] float32, cos first, then sin."""
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor
