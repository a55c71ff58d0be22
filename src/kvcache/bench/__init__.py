"""Measurements that a reader can repeat: `kvcache bench NAME`. Each prints one table, with the machine named.

Timings are medians over many rounds, contenders alternate inside one run, and ratios are what travels between machines.
"""

from __future__ import annotations

from kvcache.bench.bookkeeping import Row, bookkeeping
from kvcache.bench.machine import machine

__all__ = ["Row", "bookkeeping", "machine"]
