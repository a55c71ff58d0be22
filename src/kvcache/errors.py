"""Errors, split by whose fault they are.

Misuse by the caller is a plain `ValueError` or `TypeError` that says what was seen, what was expected and what to do.
What a correct caller must be ready for has a class of its own, all under `KVCacheError`:

| error          | whose fault         | what to do                                             |
|----------------|---------------------|--------------------------------------------------------|
| `CacheFull`    | nobody's: no room   | free or shorten a sequence, wait, or grow the capacity |
| `NotSupported` | the operation's     | recompute what was asked for                           |
| `CorruptState` | ours: a bug         | stop; report it with the message                       |
| `CorruptEntry` | the stored entry's  | drop the entry (a file, a remote block), recompute     |

Two more are where they are raised: `kvcache.RequestRefused` by an engine (not even alone does the request fit), and
`kvcache.hf.ModelNotFound` by `load`.

A failed operation has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CacheFull", "CorruptEntry", "CorruptState", "KVCacheError", "NotSupported", "needing"]


class KVCacheError(Exception):
    """Everything that this library raises on purpose, misuse apart."""


class CacheFull(KVCacheError):
    """No places are left for a batch. `needed` and `free` count slots (one slot holds one token)."""

    def __init__(self, needed: int, free: int) -> None:
        self.needed = needed
        self.free = free
        super().__init__(
            f"the batch needs {needed} free slots and {free} are free; remove a sequence, send a smaller batch, "
            f"or give the cache a larger capacity"
        )

    def __reduce__(self) -> tuple[type[CacheFull], tuple[int, int]]:
        return type(self), (self.needed, self.free)


class NotSupported(KVCacheError):
    """This cache cannot do that, or not any more (what it would need was forgotten)."""


class CorruptState(KVCacheError):
    """`check()` found a structure that contradicts itself: a bug in the library, never the caller's fault."""


class CorruptEntry(KVCacheError):
    """A stored entry (a session file, a block from another tier) fails its integrity check."""


@contextmanager
def needing(extra: str, who: str) -> Iterator[None]:
    """For imports of what an optional package is needed for: without it, the `ImportError` names the extra with it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "kvcache").split(".")[0]
        if package == "kvcache":
            raise
        raise ImportError(
            f"{who} needs {package}, which is not installed; pip install 'kvcache[{extra}]'", name=package
        ) from error
