"""What a measurement gives: a titled table whose column names carry the units."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Cell", "Table"]

Cell = str | float | int | None
"""A name, a measured or counted number, or `None`: absent here, which prints as "-"; a note says why."""


class Table(NamedTuple):
    """Rows under named columns. Units stand in the names of the columns; `notes` are printed below, one a line."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    notes: tuple[str, ...] = ()
