"""The timer: a median in seconds, not swayed by one slow call."""

import time

from pagedkern.testing import timing


def test_median_of_a_call_with_an_outlier():
    calls = iter([0.0, 0.2, 0.004, 0.004, 0.004, 0.004, 0.2])
    seconds = timing.median_seconds(lambda: time.sleep(next(calls)), repeats=5, warmup=2)
    assert 0.004 <= seconds < 0.1 and next(calls, None) is None


def test_bandwidths_are_bytes_a_second():
    """Both directions count in a copy. The bounds hold for any machine that runs this."""
    assert 1e8 < timing.copy_bandwidth(1 << 24) < 1e13
    assert 1e8 < timing.read_bandwidth(1 << 24) < 1e13
