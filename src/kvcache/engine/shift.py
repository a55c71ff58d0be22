"""Context shift: how many tokens go when the context is full, as Ollama's runner computes it (`ShiftDiscard`)."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["num_discarded"]


def num_discarded(context: int, keep: int, held: int, groups: Iterable[tuple[int, int]] = ()) -> int:
    """Tokens to discard after the first `keep`, so that half of the rest of `context` is free again.

    held: tokens there are. groups: [begin, end) of tokens that must stay together (an image's); a cut through one takes
    all of it. 0: there is room enough.

    >>> num_discarded(2048, 5, 2048)
    1021
    """
    wanted = max((context - keep) // 2, 1)
    count = max(0, wanted - (context - held))
    if count:
        count = max([count, *(end - keep for begin, end in groups if begin < keep + count < end)])
    return count
