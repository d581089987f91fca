"""From logits to tokens: edges of every parameter, independence of rows, and draws keyed by seed and position."""

import math

import pytest
import torch

from engine_min import SamplingParams
from engine_min.request import Request
from engine_min.sampler import NUM_CANDIDATES, _best, _invert, choice_seed, sample, uniform


def request(seed=0, position=3, stop_ids=(), tokens=None, prompt=(1,), **params):
    tokens = [*prompt, *([0] * (position - len(prompt)) if tokens is None else tokens)]
    return Request("r", list(prompt), SamplingParams(**params), seed, frozenset(stop_ids), None, tokens=tokens)


def draws(logits, count=400, **params):
    rows = logits.expand(count, -1)
    return sample(rows, [request(seed=seed, **params) for seed in range(count)])


LOGITS = torch.tensor([1.0, 3.0, 2.0, -math.inf, 2.5, -60000.0])


@pytest.mark.parametrize("scale", (1.0, 60000.0))
@pytest.mark.parametrize("temperature", (0.0, 1e-6, 1e-4))
def test_tiny_temperatures_are_argmax(temperature, scale):
    assert set(draws(LOGITS * scale, 20, temperature=temperature)) == {1}


@pytest.mark.parametrize("params", [{"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}])
def test_filters_down_to_the_best(params):
    assert set(draws(LOGITS, 50, **params)) == {1}


@pytest.mark.parametrize(
    "params, allowed",
    [
        ({}, {0, 1, 2, 4}),
        ({"top_k": 0}, {0, 1, 2, 4}),
        ({"top_k": -1}, {0, 1, 2, 4}),
        ({"top_k": 1000}, {0, 1, 2, 4}),
        ({"top_k": 2}, {1, 4}),
        ({"top_p": 0.5}, {1, 4}),  # shares .46, .28, .17, .06
        ({"top_p": 0.45}, {1}),
        ({"min_p": 0.5}, {1, 4}),  # e^-.5 = .61 of the best, e^-1 = .37
        ({"top_k": 3, "top_p": 0.8}, {1, 4}),  # of the three left .51, .31, .19
        ({"top_k": 3, "top_p": 0.83}, {1, 2, 4}),
    ],
)
def test_what_may_be_drawn_is_drawn(params, allowed):
    assert set(draws(LOGITS, **params)) == allowed


@pytest.mark.parametrize("params", [{}, {"top_p": 0.999999}, {"temperature": 2.0}])
def test_frequencies(params):
    temperature = params.get("temperature", 1.0)
    expected = (LOGITS / temperature).softmax(0)
    counts = torch.bincount(torch.tensor(draws(LOGITS, 20000, **params)), minlength=6) / 20000
    torch.testing.assert_close(counts, expected, atol=0.015, rtol=0)


def test_rows_do_not_see_each_other():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(12, 3000, generator=generator)
    settings = [
        {},
        {"temperature": 0},
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"top_k": NUM_CANDIDATES[0] + 9},
    ]
    settings += [
        {"min_p": 0.2},
        {"temperature": 3.0, "top_p": 0.9},
        {"top_k": 5000},
        {"temperature": 1e-6},
        {"min_p": 1e-9},
        {},
    ]
    requests = [request(seed=i, **params) for i, params in enumerate(settings)]
    together = sample(logits, requests)
    assert together == [sample(logits[i : i + 1], [requests[i]])[0] for i in range(12)]
    assert together == sample(logits.flip(0), requests[::-1])[::-1]


@pytest.mark.parametrize("vocab, params, allowed", [(4096, {"top_p": 0.5}, 2048), (1100, {"top_k": 1024}, 1024),
                                                    (12000, {"top_p": 0.9}, 10800),
                                                    (9000, {"min_p": 0.5}, 9000)])  # fmt: skip
def test_flat_rows_need_more_than_the_candidates(vocab, params, allowed):
    """Every token alike, nearly: what is kept is far more than is sorted at first."""
    logits = torch.linspace(0.01, 0, vocab)
    tokens = draws(logits, 250, **params)
    assert allowed * 0.97 < max(tokens) <= allowed * 1.01
    assert sum(token > NUM_CANDIDATES[0] for token in tokens) > 100


@pytest.mark.parametrize("width", [1, 127, 128, 129, 1000])
def test_inverting_finds_the_right_place(width):
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(200, width, generator=generator).double().float()
    weights[torch.rand(200, width, generator=generator) < 0.5] = 0.0
    weights[:, -1] = torch.where(weights.sum(1) == 0, 1.0, weights[:, -1])
    points = torch.rand(200, 1, generator=generator, dtype=torch.float64)
    points[:20], points[20:40] = 0.0, 1.0 - 2.0**-53
    places = _invert(weights, points)
    assert (weights.gather(1, places.unsqueeze(1)) > 0).all()
    sums = weights.double().cumsum(1)
    shares = (sums / sums[:, -1:]).gather(1, places.unsqueeze(1)).squeeze(1)
    before = shares - (weights.double() / sums[:, -1:]).gather(1, places.unsqueeze(1)).squeeze(1)
    assert (points.squeeze(1) < shares + 1e-6).all() and (points.squeeze(1) > before - 1e-6).all()


def test_rows_without_a_finite_maximum_are_reported():
    nan, masked = torch.full((6,), math.nan), torch.full((6,), -math.inf)
    one_nan = LOGITS.clone()
    one_nan[3] = math.nan
    logits = torch.stack([nan, LOGITS, masked, one_nan])
    for temperature in (0.0, 1.0):
        tokens = sample(logits, [request(temperature=temperature, top_k=1) for _ in range(4)])
        assert tokens == [None, 1, None, None]


def test_uniform_depends_on_seed_and_position_only():
    values = torch.tensor(
        [[uniform(seed, position) for position in range(100)] for seed in range(100)], dtype=torch.float64
    )
    assert values.unique().numel() == 10000
    assert 0 <= values.min() and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    for rows in (values, values.T):  # neither neighbouring seeds nor neighbouring positions go together
        correlation = torch.corrcoef(rows[:2])[0, 1]
        assert abs(correlation) < 0.35
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_choices_draw_differently_and_repeatably():
    """Field case 51: flat logits, seed 5."""
    seeds = [choice_seed(5, index) for index in range(4)]
    rows = [sample(torch.zeros(1, 1000), [request(seed=seed)])[0] for seed in seeds]
    assert seeds[0] == 5 and len(set(seeds)) == len(set(rows)) == 4
    assert seeds == [choice_seed(5, index) for index in range(4)]
    assert {choice_seed(6, index) for index in range(4)}.isdisjoint(seeds)


# ---- Penalties, biases, masks.


def logits_seen(monkeypatch, logits, requests):
    """The logits as they are when the token is chosen, and the tokens."""
    import engine_min.sampler as module

    seen = []
    adjust = module._adjust
    monkeypatch.setattr(module, "_adjust", lambda *args: seen.append(adjust(*args)) or seen[-1])
    before = logits.clone()
    tokens = sample(logits, requests)
    assert torch.equal(logits, before)  # the buffer is the model's
    return seen[0], tokens


def test_penalties(monkeypatch):
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5, -math.inf, 3.0])
    cases = [  # prompt, output, parameters, changes by token
        ([0, 1], [], {}, {}),
        ([0, 1], [2, 2], {"repetition_penalty": 2.0}, {0: 1.0, 1: -4.0, 2: 0.5}),
        ([0, 1], [2, 2, 3], {"presence_penalty": 0.5}, {2: 0.5, 3: 0.0}),
        ([0, 1], [2, 2, 3], {"frequency_penalty": 0.25}, {2: 0.5, 3: 0.25}),
        ([0, 1], [2, 2, 3], {"frequency_penalty": -1.0, "presence_penalty": -1.0}, {2: 4.0, 3: 2.5}),
        ([5, 4], [4], {"repetition_penalty": 2.0, "presence_penalty": 1.0}, {5: 1.5}),
        ([0], [], {"logit_bias": {3: 10.0, 4: 100.0}}, {3: 10.5}),
        ([0], [5], {"logit_bias": {5: -1.0}, "frequency_penalty": 1.0}, {5: 1.0}),
        ([0], [5], {"min_tokens": 2}, {5: -math.inf, 1: -math.inf}),
        ([0], [5, 5], {"min_tokens": 2}, {}),
    ]
    requests = [
        request(prompt=prompt, tokens=output, stop_ids=(5, 1), temperature=0, **params)
        for prompt, output, params, _ in cases
    ]
    expected = logits.repeat(len(cases), 1)
    for row, (_, _, _, changes) in zip(expected, cases, strict=True):
        for token, value in changes.items():
            row[token] = value
    rows = logits.repeat(len(cases), 1)
    together, tokens = logits_seen(monkeypatch, rows, requests)
    torch.testing.assert_close(together, expected)
    assert tokens == expected.argmax(-1).tolist()
    for i, one in enumerate(requests):
        alone, _ = logits_seen(monkeypatch, rows[i : i + 1], [one])
        assert torch.equal(alone[0], together[i])


def test_nothing_left_after_the_masks():
    logits = torch.full((2, 4), -math.inf)
    logits[:, 2] = 1.0
    requests = [request(stop_ids=(2,), position=1, min_tokens=min_tokens) for min_tokens in (1, 0)]
    assert sample(logits, requests) == [None, 2]


# ---- Logarithms of the probabilities.


def test_logprobs_are_the_models_own():
    """Before temperature, penalties and masks, and whatever is drawn."""
    settings = [{"logprobs": 0}, {}, {"logprobs": 3}, {"logprobs": 20, "temperature": 0.5, "logit_bias": {2: 100.0}}]
    requests = [request(seed=i, **params) for i, params in enumerate(settings)]
    tokens = sample(LOGITS.expand(4, -1), requests)
    exact = LOGITS.double().log_softmax(-1)
    assert requests[1].logprobs is None and tokens[3] == 2
    for i, best in ((0, []), (2, [1, 4, 2]), (3, [1, 4, 2, 0, 5, 3])):
        assert list(requests[i].logprobs)[0] == tokens[i]
        assert set(requests[i].logprobs) == {tokens[i], *best}
        assert [token for token in requests[i].logprobs if token in best and token != tokens[i]] == [
            token for token in best if token != tokens[i]
        ]
        for token, value in requests[i].logprobs.items():
            assert value == pytest.approx(float(exact[token]), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"n": 0}, "n is 0"),
        ({"stop": ["a", ""]}, "stop is"),
        ({"min_tokens": 17}, r"min_tokens is 17, expected in \[0, max_tokens \(16\)\]"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
        ({"logit_bias": {1: math.nan}}, "logit_bias is"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": 1e39}, "temperature is 1e\\+39"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_bad_parameters(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [100, 640, 1024, 1025, 1500, 4000, 49152])
def test_best_is_the_first_of_the_largest(vocab, dtype):
    torch.manual_seed(vocab)
    logits = torch.randn(7, vocab).to(dtype)
    logits[1, :] = 2.0
    logits[2, [60, vocab - 1]] = 9.0
    logits[3, vocab // 2] = math.nan
    logits[4, :] = -math.inf
    logits[5, 70] = math.inf
    logits[6, vocab - 2] = 9.0
    best, tokens = _best(logits)
    expected = [int((row == row.max()).nonzero()[0]) if i != 3 else vocab // 2 for i, row in enumerate(logits)]
    assert tokens.tolist() == expected
    torch.testing.assert_close(best, logits.gather(1, tokens.unsqueeze(1)).squeeze(1), equal_nan=True)
    assert _best(logits[:0])[0].shape == (0,)
