"""What Prometheus reads at `/metrics`: the engine's counters and blocks, and what the server sees (times, refusals).

| metric                                             | from                                          |
|----------------------------------------------------|-----------------------------------------------|
| `kvcache_prefix_hits_total`, `..._misses_total`    | the engine: admissions, misses by their reason |
| `kvcache_blocks{member,state}`                     | free, held and cached blocks of each member    |
| `kvcache_evicted_blocks_total`, `..preemptions..`  | the engine                                     |
| `kvcache_sequences{state}`                         | waiting and running sequences                  |
| `kvcache_time_to_first_token_seconds`, histogram   | from the arrival in the engine                 |
| `kvcache_time_between_tokens_seconds`, histogram   | of one output, as the steps bring them         |

The engine's numbers are a copy taken between two steps; histograms are locked by prometheus_client.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcache.engine import Metrics
from kvcache.request import Completion

__all__ = ["Instruments"]

_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@final
class Instruments:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._first = Histogram(
            "kvcache_time_to_first_token_seconds",
            "Seconds from the arrival of a request in the engine to its first token.",
            buckets=_REQUEST_SECONDS,
            registry=self._registry,
        )
        self._between = Histogram(
            "kvcache_time_between_tokens_seconds",
            "Seconds between two tokens of one output.",
            buckets=_TOKEN_SECONDS,
            registry=self._registry,
        )
        self._whole = Histogram(
            "kvcache_request_seconds",
            "Seconds from the arrival of a request in the engine to the end of an output.",
            buckets=_REQUEST_SECONDS,
            registry=self._registry,
        )
        self._ended = Counter("kvcache_outputs", "Outputs that ended, by reason.", ["reason"], registry=self._registry)
        self._answers = Counter("kvcache_http_answers", "Answers by status code.", ["status"], registry=self._registry)

    def token_after(self, seconds: float) -> None:
        """A token came so long after the one before it."""
        self._between.observe(seconds)

    def finished(self, completion: Completion) -> None:
        """An output ended."""
        self._ended.labels(completion.finish_reason).inc()
        self._whole.observe(completion.seconds)
        if completion.token_ids:
            self._first.observe(completion.time_to_first_token)

    def refused(self, num_outputs: int) -> None:
        """The engine refused a request."""
        self._ended.labels("refused").inc(num_outputs)

    def aborted(self, num_outputs: int) -> None:
        """A client went away, or its time was over, before so many outputs had ended."""
        self._ended.labels("abort").inc(num_outputs)

    def answered(self, status: int) -> None:
        """An HTTP answer began."""
        self._answers.labels(str(status)).inc()

    def exposition(self, metrics: Metrics | None, num_open: int, is_serving: bool) -> bytes:
        """The text that Prometheus reads. metrics: the engine's; None when it cannot tell any more."""
        self._engine.latest = (metrics, num_open, is_serving)
        return generate_latest(self._registry)


@final
class _EngineCollector(Collector):
    """Makes metric families of the engine's numbers each time somebody asks."""

    def __init__(self) -> None:
        self.latest: tuple[Metrics | None, int, bool] = (None, 0, True)

    def collect(self) -> Iterable[Metric]:
        metrics, num_open, is_serving = self.latest
        yield GaugeMetricFamily("kvcache_up", "1 while requests are served, 0 after a failure.", value=is_serving)
        yield GaugeMetricFamily("kvcache_open_outputs", "Outputs under way or waiting.", value=num_open)
        if metrics is None:
            return
        counts = metrics.counts
        for name, text, value in (
            ("requests", "Requests that the engine accepted.", counts.num_requests),
            ("steps", "Steps of the engine.", counts.num_steps),
            ("step_seconds", "Seconds in steps.", counts.step_seconds),
            ("model_seconds", "Seconds in the model itself.", counts.model_seconds),
            ("choice_seconds", "Seconds from logits to tokens.", counts.choice_seconds),
            ("prompt_tokens", "Tokens of prompts.", counts.num_prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were not computed.", counts.num_cached_tokens),
            ("computed_tokens", "Tokens computed, prompts and answers.", counts.num_computed_tokens),
            ("generated_tokens", "Tokens generated.", counts.num_generated_tokens),
            ("prefix_hits", "Admissions that found a cached prefix.", counts.num_hits),
            ("preemptions", "Requests that had to leave and be computed again.", counts.num_preemptions),
            ("evicted_blocks", "Cached blocks given up for others.", metrics.num_evicted_blocks),
        ):
            yield CounterMetricFamily(f"kvcache_{name}", text, value=value)
        misses = CounterMetricFamily("kvcache_prefix_misses", "Admissions without one, by reason.", labels=["reason"])
        for reason, number in sorted(counts.num_misses.items()):
            misses.add_metric([reason], number)
        yield misses
        states = GaugeMetricFamily("kvcache_sequences", "Sequences, by state.", labels=["state"])
        states.add_metric(["waiting"], metrics.num_waiting)
        states.add_metric(["running"], metrics.num_running)
        yield states
        blocks = GaugeMetricFamily("kvcache_blocks", "Blocks of each member.", labels=["member", "state"])
        for member in metrics.blocks:
            blocks.add_metric([member.member, "free"], member.num_free)
            blocks.add_metric([member.member, "held"], member.num_held)
            blocks.add_metric([member.member, "cached"], member.num_cached)
        yield blocks
