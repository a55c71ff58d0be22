"""The stream limit: how fast this machine reads memory when it does nothing else, with all of PyTorch's threads.

A buffer much larger than the caches is summed by PyTorch's own C++ loops, which share one parallel loop over it with
all threads. Which loop is fastest differs between machines, so the fastest of several is taken; on the development
machine (2 cores of Zen 5) all three came within 1 % of a hand-written AVX-512 loop with prefetching, 33 to 35 GB/s.

On a GPU the limit is that of a copy within its memory, whose bytes are read once and written once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple, final

import torch
from torch import Tensor

from kvcache import backends
from kvcache.bench.machine import cache_bytes
from kvcache.bench.timing import CPU, Visit, timed

__all__ = ["Stream", "read_bandwidth"]

MIN_BYTES = 256 * 2**20
CACHES = 8
"""The buffer is so many times the last-level cache."""
ROUNDS = 7
GPU_BYTES = 2**31


class _Reader(NamedTuple):
    name: str
    read: Callable[[Tensor], object]


_READERS = (
    _Reader("sum of f64", lambda words: words.view(torch.float64).sum()),
    _Reader("sum of i64", lambda words: words.sum()),
    _Reader("dot of f32", lambda words: torch.dot(*words.view(torch.float32).chunk(2))),
)


_GPU_READERS = (_Reader("copy", lambda words: words.chunk(2)[1].copy_(words.chunk(2)[0])),)


@final
class Stream:
    """A buffer to read: `visit` is the contender, `bandwidth` what its seconds mean, `reader` how it reads.

    num_bytes: that move in a call.
    """

    def __init__(self, num_bytes: int | None = None, device: torch.device = CPU) -> None:
        is_cpu = device.type == "cpu"
        least = max(MIN_BYTES, CACHES * cache_bytes()) if is_cpu else GPU_BYTES
        self.num_bytes = (num_bytes or least) // 16 * 16
        # Memory as caches have it (huge pages), and written, so that every page is there.
        memory: Tensor = backends.torch(str(device)).zeros((self.num_bytes // 4,), "f32", 0)
        words = memory.fill_(1).view(torch.int64)
        readers = _READERS if is_cpu else _GPU_READERS
        visits = {reader.name: timed(partial(reader.read, words), device) for reader in readers}
        times = {name: min(visit(3)) for name, visit in visits.items()}
        self.reader = min(times, key=times.__getitem__)
        self.visit: Visit = visits[self.reader]

    def bandwidth(self, seconds: float) -> float:
        """Bytes per second of a call that took so long."""
        return self.num_bytes / seconds


def read_bandwidth() -> float:
    """Bytes per second that all of PyTorch's threads together read from memory: the median of some calls.

    Takes about a quarter of a second. Where a limit is compared with something, let `Stream.visit` take turns with it.
    """
    stream = Stream()
    return stream.bandwidth(median(stream.visit(ROUNDS)))
