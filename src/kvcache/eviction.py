"""Who leaves first: the lowest priority, and among equals the one that was left alone for longest. Values only.

    push a, b, c (priority 0), d (priority 1); discard b          leaves: a, c, d

Whoever is in use or pinned is not in the queue. Everything is O(1), given few distinct priorities.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar, final

__all__ = ["EvictionQueue"]

Item = TypeVar("Item")


@final
class EvictionQueue(Generic[Item]):
    """Items that may leave, each once."""

    __slots__ = ("_levels", "_priorities")

    def __init__(self) -> None:
        self._priorities: dict[Item, int] = {}
        self._levels: dict[int, OrderedDict[Item, None]] = {}

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, item: Item) -> bool:
        return item in self._priorities

    def push(self, item: Item, priority: int = 0) -> None:
        """Add `item` as the one used last; it may be in the queue already."""
        self.discard(item)
        self._priorities[item] = priority
        self._levels.setdefault(priority, OrderedDict())[item] = None

    def discard(self, item: Item) -> None:
        """Take `item` out, if it is there."""
        priority = self._priorities.pop(item, None)
        if priority is not None:
            level = self._levels[priority]
            del level[item]
            if not level:
                del self._levels[priority]

    def pop(self) -> Item:
        """Take out the one that leaves next. Raises `KeyError` when nobody is there."""
        if not self._levels:
            raise KeyError("nothing can be evicted: the queue is empty")
        item = next(iter(self._levels[min(self._levels)]))
        self.discard(item)
        return item
