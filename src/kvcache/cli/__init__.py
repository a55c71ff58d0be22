"""The command `kvcache`: `run`, `serve`, `build`, `bench`. Parses and prints; the work is beside it and below."""

from __future__ import annotations

import sys

from kvcache.errors import KVCacheError, needing

__all__ = ["main"]


def main() -> None:
    """Run the command line. Errors that a user can cure are one line on stderr and exit status 1."""
    try:
        with needing("cli", "the command line"):
            from kvcache.cli.app import app
        app()
    except (ImportError, KVCacheError, OSError, TypeError, ValueError) as error:
        sys.stderr.write(f"kvcache: {error}\n")
        sys.exit(1)
