"""The command `kvcache`: `run`, `serve`, `build`, `bench`. Parses and prints; the work is beside it and below."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvcache.errors import KVCacheError, needing

__all__ = ["main"]


def main() -> None:
    """Run the command line. Errors that a user can cure are one line on stderr and exit status 1."""
    _replace_closed_streams()
    try:
        with needing("cli", "the command line"):
            from kvcache.cli.app import app
        app()
    except (ImportError, KVCacheError, OSError, TypeError, ValueError) as error:
        sys.stderr.write(f"kvcache: {error}\n")
        sys.exit(1)


def _replace_closed_streams() -> None:
    """A stream that was closed before we began (`>&-`) is None: reading gets its end, and what is written is lost."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  it stays open
