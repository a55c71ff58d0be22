"""The command `kvcache`: `run`, `serve`, `build`, `bench`. Parses and prints; the work is beside it and below."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Errors that a user can cure are one line on stderr and exit status 1."""
    from kvcache.cli.app import app

    try:
        app()
    except (ValueError, TypeError) as error:
        _fail(error)
    except Exception as error:
        from kvcache.errors import KVCacheError

        if not isinstance(error, (KVCacheError, ImportError)):
            raise
        _fail(error)


def _fail(error: Exception) -> None:
    sys.stderr.write(f"kvcache: {error}\n")
    sys.exit(1)
