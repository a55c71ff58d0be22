"""Context shift: how many tokens go when the context is full, as Ollama's runner computes it (`ShiftDiscard`)."""

from __future__ import annotations

__all__ = ["num_discarded"]


def num_discarded(context: int, keep: int, held: int) -> int:
    """Tokens to discard after the first `keep`, so that half of the rest of `context` is free again.

    held: tokens there are. 0: there is room enough.

    >>> num_discarded(2048, 5, 2048)
    1021
    """
    wanted = max((context - keep) // 2, 1)
    return max(0, wanted - (context - held))
