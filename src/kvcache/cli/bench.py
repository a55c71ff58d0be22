"""`kvcache bench`: measures, prints each table when it is done, and writes JSON and a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table as Printed

from kvcache.bench.machine import load_average, machine
from kvcache.bench.report import NAMES, as_json, check, measure
from kvcache.bench.table import Cell, Table

__all__ = ["Asked", "asked", "bench", "names_with_help", "shown"]

WIDTH = 120
"""Columns where the output is no terminal."""
ALL = "all"
QUIET = 0.5
"""A load average above this says that others use the cores."""


class Asked(NamedTuple):
    """What to measure, on which device, and where to write: `json_file` "-" is standard output."""

    names: tuple[str, ...]
    json_file: str | None
    plot_file: str | None
    note: str | None
    device: str


def asked(arguments: Sequence[str], *, as_json: bool, plot: str | None, note: str | None, device: str = "cpu") -> Asked:
    """What the command line says: a name, and after `--json` perhaps a file. Raises `ValueError` for anything else."""
    names = [a for a in arguments if a in NAMES or a == ALL]
    files = [a for a in arguments if a not in names]
    if files and not as_json:
        raise ValueError(
            f"there is no measurement {files[0]!r}; expected one of {', '.join(NAMES)}, or {ALL}; "
            f"a file goes with --json"
        )
    if len(names) != 1 or len(files) > 1:
        raise ValueError(
            f"bench got {' '.join(arguments) or 'no name'}; expected one of {', '.join(NAMES)}, {ALL}"
            f"{', and after --json at most one file' if as_json else ''}"
        )
    chosen = tuple(NAMES) if names == [ALL] else tuple(names)
    if plot is not None and "attention" not in chosen:
        raise ValueError(f"--plot draws attention, and {names[0]} was asked for; ask for attention or {ALL}")
    return Asked(chosen, (files[0] if files else "-") if as_json else None, plot, note, device)


def bench(wanted: Asked) -> None:
    """Measures and prints. With JSON on standard output the tables are not printed.

    Of several, one whose packages are missing is left out with a word on stderr; a single one raises `ImportError`.
    """
    for name in wanted.names:
        check(name, wanted.device)
    for file in (wanted.json_file, wanted.plot_file):
        if file not in (None, "-"):
            Path(file).open("a").close()  # it can be written to: not found out after minutes of measuring
    measured: dict[str, list[Table]] = {}
    load = load_average()
    if load > QUIET:
        sys.stderr.write(
            f"kvcache: the load average is {load} before anything is measured: others use these cores, and a parallel "
            f"loop waits for its slowest thread; times will be too long\n"
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for name in wanted.names:
        if sys.stderr.isatty():
            sys.stderr.write(f"kvcache: measuring {name}\n")
        try:
            for table in measure(name, wanted.device):
                measured.setdefault(name, []).append(table)
                if wanted.json_file != "-":
                    _print(console, table, machine(wanted.device))
        except ImportError as error:
            if len(wanted.names) == 1:
                raise
            sys.stderr.write(f"kvcache: {name} is left out: {error}\n")
    _write(wanted, measured, load)


def names_with_help() -> str:
    """The names, one a line, for who gave none."""
    lines = [f"  {name:<12} {what}" for name, what in NAMES.items()]
    return "\n".join(["Name one of", *lines, f"  {ALL:<12} all of these", "", "Options: kvcache bench --help"])


def shown(cell: Cell) -> str:
    """A cell as a table prints it: three digits that count, and "-" for what is absent."""
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    if cell and abs(cell) < 1e-3:
        return f"{cell:.2e}"
    decimals = 3 if abs(cell) < 1 else max(0, 3 - len(str(int(abs(cell)))))
    return f"{cell:.{decimals}f}"


def _print(console: Console, table: Table, where: str) -> None:
    printed = Printed()
    for index, column in enumerate(table.columns):
        is_text = any(isinstance(row[index], str) for row in table.rows)
        printed.add_column(column, justify="left" if is_text else "right")
    for row in table.rows:
        printed.add_row(*map(shown, row))
    # Lines of their own: a title inside a narrow table would be cut into pieces.
    console.print(f"{table.title}\n{where}, {date.today():%Y-%m-%d}", highlight=False, markup=False)
    console.print(printed)
    for note in table.notes:
        console.print(note, highlight=False, markup=False)
    console.print()


def _write(wanted: Asked, measured: Mapping[str, Sequence[Table]], load: float) -> None:
    if wanted.json_file is not None:
        text = json.dumps(as_json(measured, wanted.note, load_before=load, device=wanted.device), indent=1) + "\n"
        if wanted.json_file == "-":
            sys.stdout.write(text)
        else:
            _save(wanted.json_file, text)
    if wanted.plot_file is not None:
        from kvcache.bench.plot import plot

        _save(wanted.plot_file, plot(measured["attention"], machine=machine(wanted.device)))


def _save(file: str, text: str) -> None:
    try:
        Path(file).write_text(text)
    except OSError as error:  # of a full disk: it names no file
        raise OSError(error.errno, error.strerror, file) from None
