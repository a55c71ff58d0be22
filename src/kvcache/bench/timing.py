"""Contenders in turn, so that what else the machine does hits them alike; medians of single calls.

A contender is visited: a pause in which the threads of the one before stop spinning, one call that is not counted, and
then calls that are, each timed by itself. Rounds of visits follow each other until each contender has had its share.
A contender far slower than the rest is visited less often, three times at least.

    round 1    ours ....    stream ....    SDPA ..    vLLM ....
    round 2    ours ....    stream ....    SDPA ..    vLLM ....

On a GPU a call's time is the device's own, between two events. Before each call a buffer larger than the caches is
rewritten: what the call reads then comes from memory, and its launches are queued before it begins, as in the CUDA
graph of a decode step. What Python takes to launch is therefore not in these times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple, TypeAlias

import torch

__all__ = ["CPU", "Effort", "Visit", "alternate", "timed"]

CPU = torch.device("cpu")

Visit: TypeAlias = Callable[[int], list[float]]
"""Calls a contender that many times and gives the seconds of each call."""

PAUSE_SECONDS = 0.03
"""Threads of OpenMP spin for some milliseconds after their work, on the cores that the next contender wants: those of
libgomp for 300 000 pauses of the processor, which may be 15 ms."""
MAX_CALLS = 40
SLOW_SECONDS = 0.3
MIN_ROUNDS = 3
REWRITTEN_BYTES = 2**30
"""On a GPU, between calls: more than any last-level cache, and a third of a millisecond of the fastest memory."""


class Effort(NamedTuple):
    """How long to measure: `rounds` visits of about `visit_seconds`, of a slow contender about `max_seconds` in all."""

    rounds: int = 9
    visit_seconds: float = 0.03
    max_seconds: float = 1.0


class _Share(NamedTuple):
    rounds: int
    calls: int


def timed(function: Callable[[], object], device: torch.device = CPU) -> Visit:
    """The visit of a contender in this process, whose results are on `device`."""
    if device.type == "cuda":
        return _timed_by_events(function, device)

    def visit(num_calls: int) -> list[float]:
        seconds = []
        for _ in range(num_calls):
            begin = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - begin)
        return seconds

    return visit


def _timed_by_events(function: Callable[[], object], device: torch.device) -> Visit:
    function()  # what is compiled takes seconds, on which a contender's share must not depend
    torch.cuda.synchronize(device)

    def visit(num_calls: int) -> list[float]:
        rewritten = torch.zeros(REWRITTEN_BYTES // 4, dtype=torch.int32, device=device)
        spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_calls)]
        with torch.cuda.device(device):
            for begin, end in spans:
                rewritten.add_(1)
                begin.record()
                function()
                end.record()
            torch.cuda.synchronize(device)
        return [float(begin.elapsed_time(end)) / 1e3 for begin, end in spans]

    return visit


def alternate(contenders: Mapping[str, Visit], effort: Effort) -> dict[str, float]:
    """Median seconds of a call of each contender.

    Each is first called twice, uncounted, which compiles and plans; one that takes long is called once.
    """
    shares = {name: _share(_first(visit), effort) for name, visit in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(max(share.rounds for share in shares.values())):
        for name, visit in contenders.items():
            share = shares[name]
            if index >= share.rounds:
                continue
            time.sleep(PAUSE_SECONDS)
            # The uncounted call wakes the threads; one that takes long has woken them in its first moments.
            times[name] += visit(share.calls + 1)[1:] if share.calls > 1 else visit(1)
    return {name: median(measured) for name, measured in times.items()}


def _first(visit: Visit) -> float:
    (seconds,) = visit(1)
    return seconds if seconds > SLOW_SECONDS else min(seconds, *visit(1))


def _share(seconds: float, effort: Effort) -> _Share:
    calls = max(1, min(MAX_CALLS, int(effort.visit_seconds / max(seconds, 1e-9))))
    return _Share(max(min(MIN_ROUNDS, effort.rounds), min(effort.rounds, int(effort.max_seconds / seconds))), calls)
