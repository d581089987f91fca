"""From logits to tokens: greedy, or seeded with temperature, top-k, top-p and min-p."""

from __future__ import annotations

import torch

from engine_min.request import Request, SamplingParams

NUM_CANDIDATES = 512  # sorted for every filtered row; rows that need more are sorted in full
_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from the seed and the token's position alone (two rounds of splitmix64).

    So neither preemption nor the rest of the batch can change what a request draws.
    """
    state = seed & _MASK
    for word in (0, position):  # the seed is mixed first, or seed 1, position 2 would be seed 2, position 1
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def sample(logits: torch.Tensor, requests: list[Request]) -> list[int | None]:
    """One token per row of [rows, vocab] logits; None where the row has no finite maximum (NaN, or nothing left)."""
    best, tokens = logits.max(dim=-1)
    finite = best.isfinite().tolist()
    result: list[int | None] = [token if ok else None for token, ok in zip(tokens.tolist(), finite, strict=True)]
    drawn = [i for i, request in enumerate(requests) if not request.params.greedy and finite[i]]
    if drawn:
        picked = _draw(logits[drawn].float(), [requests[i] for i in drawn])
        for i, token in zip(drawn, picked, strict=True):
            result[i] = token
    return result


def _draw(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    params = [request.params for request in requests]
    temperature = torch.tensor([p.temperature for p in params]).unsqueeze(1)
    # The maximum goes to zero before the division, so that no temperature, however small, overflows.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    probs = scaled.softmax(dim=-1)
    points = torch.tensor([uniform(r.seed, len(r.tokens)) for r in requests], dtype=torch.float64).unsqueeze(1)
    filtered = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    tokens = _invert(probs, points)
    if not filtered:
        return tokens.tolist()
    vocab = probs.size(1)
    ordered, ids = probs[filtered].topk(min(NUM_CANDIDATES, vocab), dim=-1)
    for row, i in enumerate(filtered):  # each row by itself: which path it takes must not depend on the others
        top_k = params[i].top_k if 0 < params[i].top_k < vocab else None
        row_probs, row_ids = ordered[row], ids[row]
        if top_k is not None and top_k <= NUM_CANDIDATES:
            row_probs = row_probs[:top_k]
        elif top_k is not None or not _covers(row_probs, params[i]):
            row_probs, row_ids = probs[i].sort(descending=True, stable=True)
            row_probs = row_probs[:top_k]
        total = 1.0 if top_k is None else float(row_probs.sum(dtype=torch.float64))
        kept = _filter(row_probs, total, params[i])
        tokens[i] = row_ids[_invert(kept.unsqueeze(0), points[i : i + 1])]
    return tokens.tolist()


def _covers(ordered: torch.Tensor, params: SamplingParams) -> bool:
    """Whether the candidates surely hold everything that top-p and min-p keep."""
    return float(ordered.sum(dtype=torch.float64)) >= params.top_p or bool(ordered[-1] < params.min_p * ordered[0])


def _filter(ordered: torch.Tensor, total: float, params: SamplingParams) -> torch.Tensor:
    """Zeroes what top-p and min-p drop from a descending row of sum `total`; the first entry always stays.

    top-p works on what top-k has left: the smallest set of the likeliest tokens whose sum reaches the share.
    """
    keep = ordered >= params.min_p * ordered[0]
    if params.top_p < 1:
        keep &= ordered.cumsum(0, dtype=torch.float64) - ordered < params.top_p * total
    keep[0] = True
    return ordered * keep


def _invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Index where the running sum of each row passes the point's share of the row's total."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = points * sums[:, -1:]
    return torch.searchsorted(sums, targets, right=True).squeeze(1).clamp_(max=weights.size(1) - 1)
