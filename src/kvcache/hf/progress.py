"""What a user sees while a model loads: nothing for a second, then a bar on stderr, and only on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    import rich.progress

__all__ = ["Progress"]

_PATIENCE_SECONDS = 1.0


@final
class Progress:
    """A bar with one line that names the current step. Entering starts the patience; leaving removes the bar.

    Without a terminal, without rich (extra `cli`), or with `wanted=False`, every method does nothing.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._timer = threading.Timer(_PATIENCE_SECONDS, self._show) if wanted and sys.stderr.isatty() else None
        self._lock = threading.Lock()
        self._text, self._total, self._done = "loading", None, 0
        self._bar: rich.progress.Progress | None = None
        self._closed = False

    _total: int | None

    def __enter__(self) -> Progress:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.stop()

    def step(self, text: str, total: int | None = None) -> None:
        """A new step begins: `total` units long, or of unknown length."""
        with self._lock:
            self._text, self._total, self._done = text, total, 0
            self._update()

    def advance(self, amount: int) -> None:
        """`amount` more units of the current step are done."""
        with self._lock:
            self._done += amount
            self._update()

    def _update(self) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=self._text, total=self._total, completed=self._done)

    def _show(self) -> None:
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            with self._lock:
                if self._closed:
                    return
                columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
                self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
                self._bar.add_task(self._text, total=self._total, completed=self._done)
                self._bar.start()
