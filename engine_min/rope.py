"""Rotary position embeddings: what a config says of them, and the table of cosines and sines that the ops read."""

import math

import torch

# Types of a config.json, and the numbers that each needs.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


class Rope:
    """Old files say rope_theta and rope_scaling {type | rope_type}, new ones put all of it under rope_parameters."""

    def __init__(self, config: dict, head_dim: int, max_position: int):
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        self.type: str = scaling.get("rope_type") or scaling.get("type") or "default"
        if self.type not in ROPE_TYPES:
            raise ValueError(f"rope type {self.type!r} is not supported, expected one of {', '.join(ROPE_TYPES)}")
        missing = [key for key in ROPE_TYPES[self.type] if scaling.get(key) is None]
        if missing:
            raise ValueError(f"rope scaling of type {self.type!r} lacks {', '.join(missing)}")
        self.scaling = scaling
        self.theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
        fraction = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        self.rotary_dim = int(head_dim * fraction)  # the first of a head's, which are rotated; the others stay
        if not 2 <= self.rotary_dim <= head_dim or self.rotary_dim % 2:
            raise ValueError(f"{self.rotary_dim} rotary dimensions, expected an even number in [2, {head_dim}]")
        self.factor = float(scaling["factor"]) if ROPE_TYPES[self.type] else 1.0
        if not 0 < self.factor < math.inf:
            raise ValueError(f"rope factor {self.factor} of type {self.type!r}, expected a positive number")
        self.original_max_position = int(scaling.get("original_max_position_embeddings") or max_position)
        self.has_divisors = False  # whether a tensor of the checkpoint divides the frequencies

    def table(self, max_position: int, divisors: torch.Tensor | None = None) -> torch.Tensor:
        """`cos_sin_cache` of the ops: [max_position, rotary_dim] float32, cos first, then sin."""
        inv_freq = self.inv_freq() if divisors is None else self.inv_freq() / divisors
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
        return torch.cat((angles.cos(), angles.sin()), dim=1) * self.attention_factor()

    def inv_freq(self) -> torch.Tensor:
        """[rotary_dim / 2] float32 angles per position. Frequencies that are kept (1) stay, others (0) are divided by
        the factor, those between are blended."""
        steps = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        inv_freq = 1.0 / (self.theta**steps)
        kept = torch.zeros(())
        if self.type == "llama3":  # by how often a frequency turns within the original context: short wavelengths stay
            turns = self.original_max_position * inv_freq / (2 * math.pi)
            low, high = (float(self.scaling[f"{which}_freq_factor"]) for which in ("low", "high"))
            kept = (turns - low) / (high - low)
        elif self.type == "yarn":  # by dimension: from the one that turns beta_fast times to the one of beta_slow
            first = self._dimension_of(float(self.scaling.get("beta_fast") or 32.0))
            last = self._dimension_of(float(self.scaling.get("beta_slow") or 1.0))
            if self.scaling.get("truncate", True):
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, self.rotary_dim - 1)
            kept = 1 - (torch.arange(self.rotary_dim // 2).float() - first) / (last - first or 0.001)
        kept = kept.clamp(0, 1)
        return (1 - kept) * inv_freq / self.factor + kept * inv_freq

    def _dimension_of(self, turns: float) -> float:
        """The dimension that turns so often within the original context."""
        wavelength = self.original_max_position / (turns * 2 * math.pi)
        return self.rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))

    def attention_factor(self) -> float:
        """Cosines and sines are multiplied by it."""
        if self.type != "yarn":
            return 1.0
        if self.scaling.get("attention_factor") is not None:
            return float(self.scaling["attention_factor"])
        growth = 0.1 * math.log(max(1.0, self.factor))
        above, below = self.scaling.get("mscale"), self.scaling.get("mscale_all_dim")
        return (above * growth + 1.0) / (below * growth + 1.0) if above and below else growth + 1.0
