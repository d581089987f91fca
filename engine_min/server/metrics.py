"""What Prometheus is told: gauges from the engine's statistics, counters, and histograms of what clients wait for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
_GAUGES = {  # name: (text, value)
    "kv_usage_ratio": ("share of the KV blocks in use", lambda s: s.blocks_used / (s.blocks_used + s.blocks_free)),
    "kv_blocks_used": ("KV blocks in use", lambda s: s.blocks_used),
    "kv_blocks_free": ("KV blocks that can be taken", lambda s: s.blocks_free),
    "requests_running": ("requests in the batch", lambda s: s.running),
    "requests_waiting": ("requests in the queue", lambda s: s.waiting),
    "prefix_cache_hit_ratio": ("share of prompt tokens found cached", lambda s: s.prefix_hit_rate),
    "kv_blocks_cached": ("free KV blocks whose contents can be found again", lambda s: s.blocks_cached),
    "requests_swapped": ("requests whose KV blocks are in host memory", lambda s: s.swapped),
}
_COUNTERS = {
    "preemptions": ("times a request lost its blocks", lambda s: s.preempted),
    "prompt_tokens": ("tokens of all prompts", lambda s: s.tokens_in),
    "generated_tokens": ("tokens generated", lambda s: s.tokens_out),
    "engine_steps": ("forward passes", lambda s: s.steps),
}


class Metrics:
    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def make(kind, name: str, text: str, *args, **options):
            return kind(f"pagedkern_{name}", text, *args, registry=registry, **options)

        self._gauges = {name: (make(Gauge, name, text), value) for name, (text, value) in _GAUGES.items()}
        self._counters = {name: (make(Counter, name, text), value) for name, (text, value) in _COUNTERS.items()}
        self._counted = dict.fromkeys(_COUNTERS, 0)
        self._finished = make(Counter, "requests_finished", "requests that ended, by reason", ["reason"])
        self._responses = make(Counter, "http_responses", "answers, by path and status", ["path", "status"])
        self._first = make(Histogram, "time_to_first_token_seconds", "arrival to first token", buckets=_SECONDS)
        self._between = make(Histogram, "inter_token_seconds", "token to token of a request", buckets=_SECONDS)
        self._whole = make(Histogram, "request_seconds", "arrival to end", buckets=_SECONDS)

    def observe_engine(self, stats) -> None:
        for gauge, value in self._gauges.values():
            gauge.set(value(stats))
        for name, (counter, value) in self._counters.items():
            total = value(stats)
            counter.inc(total - self._counted[name])
            self._counted[name] = total

    def observe_updates(self, stream, updates: list, now: float) -> None:
        if any(update.token_ids for update in updates):
            if stream.last_token is None:
                self._first.observe(now - stream.arrived)
            else:
                self._between.observe(now - stream.last_token)
            stream.last_token = now
        for update in updates:
            if update.finish_reason is not None:
                self.finished(update.finish_reason)
        if stream.output.finished:
            self._whole.observe(now - stream.arrived)

    def finished(self, reason: str) -> None:
        self._finished.labels(reason).inc()

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
