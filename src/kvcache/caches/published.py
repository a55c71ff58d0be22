"""What members without blocks keep for reuse: values by key, up to so many bytes, evicted least recently used first."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar, final

from kvcache.eviction import EvictionQueue

__all__ = ["Published"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@final
class Published(Generic[Key, Value]):
    """Values by key. Whoever uses a value keeps it alive: eviction only forgets the way to it.

    limit: bytes that values may take together; without one (None) everything stays. Pinned ones stay anyway.
    """

    __slots__ = ("_entries", "_order", "_pinned", "_priorities", "_removed", "limit", "num_bytes", "num_evicted")

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[Value, int]] = {}
        self._priorities: dict[Key, int] = {}
        self._order: EvictionQueue[Key] = EvictionQueue()
        self._pinned: dict[Key, int] = {}
        self._removed: list[Key] = []
        self.limit: int | None = None
        self.num_bytes = 0
        self.num_evicted = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> Iterable[Value]:
        """All values."""
        return [value for value, _ in self._entries.values()]

    def add(self, key: Key, value: Value, num_bytes: int, priority: int = 0) -> None:
        """Keep a value, and let others go until the limit holds; what is larger than the limit goes at once."""
        self._entries[key] = (value, num_bytes)
        self._priorities[key] = priority
        self._order.push(key, priority)
        self.num_bytes += num_bytes
        while self.limit is not None and self.num_bytes > self.limit and len(self._order):
            gone = self._order.pop()
            self.num_bytes -= self._entries.pop(gone)[1]
            del self._priorities[gone]
            self._removed.append(gone)
            self.num_evicted += 1

    def use(self, key: Key) -> Value:
        """The value of a key, used just now. Raises `ValueError` when there is none."""
        if key not in self._entries:
            raise ValueError(f"{key!r} is not published; it was evicted, or never was")
        if key not in self._pinned:
            self._order.push(key, self._priorities[key])
        return self._entries[key][0]

    def pin(self, key: Key) -> bool:
        """Keep the value of this key until it is unpinned as often as it was pinned; false when there is none."""
        if key not in self._entries:
            return False
        self._pinned[key] = self._pinned.get(key, 0) + 1
        self._order.discard(key)
        return True

    def unpin(self, key: Key) -> None:
        """Take one pin of `key` back. Unknown keys are fine."""
        if key not in self._pinned:
            return
        self._pinned[key] -= 1
        if not self._pinned[key]:
            del self._pinned[key]
            self._order.push(key, self._priorities[key])

    def take_removed(self) -> list[Key]:
        """Keys that went since this was last asked, in that order."""
        removed, self._removed = self._removed, []
        return removed

    def clear(self) -> None:
        """Forget everything."""
        self._removed += self._entries
        for key in self._entries:
            self._order.discard(key)
        self._entries.clear()
        self._priorities.clear()
        self._pinned.clear()
        self.num_bytes = 0
