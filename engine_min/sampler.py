"""From logits to tokens: penalties, biases, masks, then greedy or seeded with temperature, top-k, top-p and min-p."""

import math
from hashlib import blake2b

import numpy as np
import torch
import torch.nn.functional as F

from engine_min.request import Request

NUM_CANDIDATES = (512, 8192)  # sorted of each filtered row; where they are not enough, the next; at last the row
_CHUNK = 128
_BEST_CHUNK = 1024


def _hash(seed: int, number: int, use: bytes) -> int:
    """64 bits from the lower 64 of the seed, a number, and what they are for."""
    packed = (number << 64 | seed % 2**64).to_bytes(16, "little")
    return int.from_bytes(blake2b(packed, digest_size=8, person=use).digest(), "little")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from the seed and the token's position alone.

    So neither preemption nor the rest of the batch can change what a request draws.
    """
    return (_hash(seed, position, b"token") >> 11) / (1 << 53)


def choice_seed(seed: int, index: int) -> int:
    """The seed of one of a request's choices: the first has the request's own."""
    return seed if index == 0 else _hash(seed, index, b"choice")


def sample(logits: torch.Tensor, requests: list[Request]) -> list[int | None]:
    """One token per row of [rows, vocab] logits; None where the row has no finite maximum (NaN, or nothing left).

    Where a request wants them, the logarithms of the probabilities that the model gave are left in its `logprobs`.
    """
    raw, logits = logits, _adjust(logits, requests)
    best, tokens = _best(logits)
    finite = best.isfinite().tolist()
    result = [token if ok else None for token, ok in zip(tokens.tolist(), finite, strict=True)]
    drawn = [i for i, request in enumerate(requests) if not request.params.greedy and finite[i]]
    if drawn:
        picked = _draw(logits[drawn].float(), [requests[i] for i in drawn])
        for i, token in zip(drawn, picked, strict=True):
            result[i] = token
    reporting = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    if reporting:
        counts = [requests[i].params.logprobs for i in reporting]
        found = logprobs_of(raw[reporting], [result[i] or 0 for i in reporting], counts)
        for i, logprobs in zip(reporting, found, strict=True):
            requests[i].logprobs = logprobs
    return result


def logprobs_of(logits: torch.Tensor, tokens: list[int], counts: list[int]) -> list[dict[int, float]]:
    """Of each row's token, and of so many of the row's likeliest."""
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = (part.tolist() for part in logprobs.topk(min(max(counts), logits.size(1)), dim=-1))
    own = logprobs[range(len(tokens)), tokens].tolist()
    return [
        {token: logprob} | dict(zip(top[:count], top_values[:count], strict=True))
        for token, logprob, top, top_values, count in zip(tokens, own, ids, values, counts, strict=True)
    ]


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row and the first place where it is, NaN counting as larger than all.

    By chunks: on the CPU a maximum with its place takes twenty times as long as one without, which runs at the speed of
    memory if the chunks are large.
    """
    rows, vocab = logits.shape
    if vocab <= _BEST_CHUNK or logits.device.type != "cpu":
        return logits.max(dim=-1)
    whole = vocab - vocab % _BEST_CHUNK
    maxima = logits[:, :whole].unflatten(1, (-1, _BEST_CHUNK)).amax(dim=-1)
    if whole < vocab:
        maxima = torch.cat((maxima, logits[:, whole:].amax(dim=-1, keepdim=True)), dim=1)
    best, chunk = maxima.max(dim=-1)
    start = (chunk * _BEST_CHUNK).clamp_(max=vocab - _BEST_CHUNK)  # where the last one overlaps, all before is smaller
    window = logits.gather(1, start.unsqueeze(1) + torch.arange(_BEST_CHUNK))
    return best, start + window.max(dim=-1).indices


def _adjust(logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """The logits with penalties, biases and masks applied: a copy if there are any, since the buffer is the model's."""
    rows = [i for i, r in enumerate(requests) if r.params.changes_logits or (r.params.min_tokens and _is_too_short(r))]
    if rows:
        logits = logits.to(torch.float32, copy=True)
    for i in rows:
        _adjust_row(logits[i], requests[i])
    return logits


def _is_too_short(request: Request) -> bool:
    return request.num_generated < request.params.min_tokens


def _adjust_row(row: torch.Tensor, request: Request) -> None:
    """In place. Only the tokens concerned are touched, not the whole vocabulary."""
    params, device = request.params, row.device
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.array(request.tokens)).to(device)
        values, penalty = row.take(seen), params.repetition_penalty
        row.put_(seen, torch.where(values > 0, values / penalty, values * penalty))
    if params.presence_penalty or params.frequency_penalty:
        said = np.array(request.tokens[len(request.prompt_token_ids) :], dtype=np.int64)
        said = torch.from_numpy(said).to(device)
        row.put_(said, row.take(said) - params.presence_penalty)  # once, however often a token occurs
        row.put_(said, torch.full(said.shape, -params.frequency_penalty, device=device), accumulate=True)
    added = dict(params.logit_bias or {})
    if _is_too_short(request):
        added |= dict.fromkeys(request.stop_ids, -math.inf)
    if added:
        row[torch.tensor(list(added), device=device)] += torch.tensor(list(added.values()), device=device)


def _draw(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    params, device, vocab = [request.params for request in requests], logits.device, logits.size(1)

    def column(values: list, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    # The maximum goes to zero before the division, so that no temperature, however small, overflows.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    probs = scaled.div_(column([p.temperature for p in params])).softmax(dim=-1)
    points = column([uniform(r.seed, len(r.tokens)) for r in requests], torch.float64)
    top_k = column([p.top_k if 0 < p.top_k < vocab else vocab for p in params], torch.int64)
    top_p, min_p = column([p.top_p for p in params], torch.float64), column([p.min_p for p in params])
    is_filtered = ((top_k < vocab) | (top_p < 1) | (min_p > 0)).squeeze(1)
    tokens = torch.empty(len(requests), dtype=torch.int64, device=device)
    tokens[~is_filtered] = _invert(probs[~is_filtered], points[~is_filtered])
    rows = is_filtered.nonzero().squeeze(1)
    # How many candidates a row needs depends on the row alone, and so does what it draws.
    for count in (*(count for count in NUM_CANDIDATES if count < vocab), vocab):
        if not rows.numel():
            break
        found = probs[rows].topk(count) if count < vocab else probs[rows].sort(descending=True, stable=True)
        kept, is_done = _filter(found.values, vocab, top_k[rows], top_p[rows], min_p[rows])
        places = _invert(kept[is_done], points[rows[is_done]])
        tokens[rows[is_done]] = found.indices[is_done].gather(1, places.unsqueeze(1)).squeeze(1)
        rows = rows[~is_done]
    return tokens.tolist()


def _filter(ordered: torch.Tensor, vocab: int, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor):
    """Zeroes what the filters drop from the likeliest tokens of each row, in descending order; the first always stays.
    And whether these surely are all that a row keeps.

    top-p works on what top-k has left: the smallest set of the likeliest tokens whose sum reaches the share.
    """
    count = ordered.size(1)
    ordered = ordered * (torch.arange(count, device=ordered.device) < top_k)
    sums = ordered.cumsum(-1, dtype=torch.float64)
    total = torch.where(top_k < vocab, sums[:, -1:], 1.0)
    keep = (sums - ordered < top_p * total) | (top_p >= 1)
    least = min_p * ordered[:, :1]
    keep &= ordered >= least
    keep[:, 0] = True
    is_done = (top_k == vocab) & (((sums[:, -1:] >= top_p) & (top_p < 1)) | (ordered[:, -1:] < least))
    return ordered * keep, (is_done | (top_k <= count)).squeeze(1)


def _invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Index where the running sum of each row passes the point's share of the row's total.

    First among sums of chunks, then within a chunk: running sums over a whole vocabulary take several times as long.
    """
    chunks = F.pad(weights, (0, -weights.size(1) % _CHUNK)).unflatten(1, (-1, _CHUNK))
    sums = chunks.sum(-1).double().cumsum(-1)
    target = _below(points * sums[:, -1:], sums[:, -1:])
    chunk = torch.searchsorted(sums, target, right=True)
    before = torch.where(chunk > 0, sums.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    inner = chunks.gather(1, chunk.unsqueeze(2).expand(-1, -1, _CHUNK)).squeeze(1).cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(inner, _below(target - before, inner[:, -1:]), right=True)
    return (chunk * _CHUNK + place).squeeze(1)


def _below(target: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """A target that rounding has brought to the total would fall behind the last weight that is not zero."""
    return torch.minimum(target, total.nextafter(torch.zeros_like(total)))
