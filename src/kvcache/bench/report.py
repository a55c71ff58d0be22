"""What was measured, where and when, as one value that JSON can hold; and which modules measure.

{"machine": {"name": ..., "cores": 2, ...}, "date": "2026-11-21T07:00:00+00:00", "note": null,
 "tables": {"attention": [{"title": ..., "columns": [...], "rows": [[...], ...], "notes": [...]}, ...]}}
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kvcache.bench.machine import check_device, describe
from kvcache.bench.table import Cell, Table
from kvcache.errors import needing

__all__ = ["NAMES", "as_json", "check", "from_json", "measure"]

NAMES = {
    "attention": "decode, prefill, formats, block sizes, scaling; beside SDPA, flex_attention, vLLM, llama.cpp",
    "put": "writing one decode step into the cache",
    "shift": "moving tokens to other positions",
    "bookkeeping": "finding places for tokens, without tensors",
    "serving": "whole requests through the engine; beside transformers and other engines",
}
"""The measurements and what they measure: `kvcache.bench.NAME.tables()`."""

DIGITS = 6
"""Significant digits that are kept of a measured number; more would be noise."""


def check(name: str, device: str) -> None:
    """Raises `ValueError` for an unknown name, a device that is not here, or one where this is not measured."""
    if name not in NAMES:
        raise ValueError(f"there is no measurement {name!r}; expected one of {', '.join(NAMES)}, or all")
    if device != "cpu" and name != "attention":
        raise ValueError(f"{name} is measured on the CPU, and the device is {device!r}; attention takes one")
    check_device(device)


def measure(name: str, device: str = "cpu") -> Iterable[Table]:
    """The tables of that name, as they are done. Raises as `check` does, and `ImportError` without a package."""
    check(name, device)
    with needing("demo", f"kvcache bench {name}"):
        module: Any = importlib.import_module(f"kvcache.bench.{name}")
    tables: Iterable[Table] = module.tables() if device == "cpu" else module.tables(device=device)
    return tables


def as_json(
    measured: Mapping[str, Sequence[Table]],
    note: str | None = None,
    *,
    load_before: float | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """A report of what was measured just now on this machine.

    note: what a reader should know about the run. load_before: the load average when it began: what others wanted.
    """
    return {
        "machine": describe(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "note": note,
        "load_before": load_before,
        "tables": {name: [_table(table) for table in tables] for name, tables in measured.items()},
    }


def from_json(report: Mapping[str, Any]) -> dict[str, list[Table]]:
    """The tables of a report, by name."""
    return {
        name: [
            Table(t["title"], tuple(t["columns"]), [tuple(row) for row in t["rows"]], tuple(t["notes"])) for t in tables
        ]
        for name, tables in report["tables"].items()
    }


def _table(table: Table) -> dict[str, Any]:
    return table._asdict() | {"rows": [[_kept(cell) for cell in row] for row in table.rows]}


def _kept(cell: Cell) -> Cell:
    return float(f"{cell:.{DIGITS}g}") if isinstance(cell, float) else cell
