"""The pool: reference counts, the free queue, and the content keys of blocks that are kept for reuse. Counts only.

    free ---allocate--> held (1 reference) --share--> held (2) --release--> held (1) --release--> free
      ^                        |                                               ^  |
      |                     publish                                         share |
      |                        v                                               |  v   (released, but it has a key)
      +------- evict ------ published <------------------------------------- cached

A published block has a key that names its content: whoever wants that content finds it by the key. A published block
that no table names is *cached*: it can be had again by its key, until `allocate` needs it for something else. Free
blocks are handed out first, in the order in which they became free (which keeps the slots of a lone sequence side by
side), then cached ones (see `EvictionQueue`); of blocks released together the last is evicted first: the tail of a
chain before its head.

A block that more than one table names, or that has a key, is read-only: whoever wants to write copies it first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import final

from kvcache.errors import CorruptState
from kvcache.eviction import EvictionQueue

__all__ = ["BlockPool"]


@final
class BlockPool:
    """Blocks 0..num_blocks-1. Every operation is O(1) per block.

    `num_evicted` counts what `allocate` took from the cached ones.
    """

    __slots__ = (
        "_blocks",
        "_cached",
        "_free",
        "_keys",
        "_pinned",
        "_priorities",
        "_references",
        "_removed",
        "num_evicted",
    )

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._cached: EvictionQueue[int] = EvictionQueue()
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._priorities: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        self._removed: list[bytes] = []
        self.num_evicted = 0

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that can be had: free ones, and cached ones that are not pinned."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that no table names and that can be had again by their key."""
        return self.num_blocks - len(self._free) - sum(count > 0 for count in self._references)

    @property
    def keys(self) -> Iterable[bytes]:
        """Every key that `find` knows."""
        return self._blocks.keys()

    def references(self, block: int) -> int:
        """How many tables name this block; 0 when it is free or cached."""
        return self._references[block]

    def is_freed(self, block: int, released: int = 1) -> bool:
        """Whether `released` references less make a held block one that can be had."""
        return self._references[block] == released and block not in self._pinned

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, now held once each, without keys. The caller has made sure that there are as many."""
        free = self._free
        blocks = [free.popleft() if free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these held or cached blocks."""
        for block in blocks:
            if not self._references[block]:
                self._cached.discard(block)
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; a block without any is free, or cached if it has a key."""
        cached = []
        for block in blocks:
            left = self._references[block] = self._references[block] - 1
            if not left:
                if block in self._keys:
                    cached.append(block)
                else:
                    self._free.append(block)
        for block in reversed(cached):
            if block not in self._pinned:
                self._cached.push(block, self._priorities.get(block, 0))

    # --- content ------------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The block of this content."""
        return self._blocks.get(key)

    def is_published(self, block: int) -> bool:
        """Whether the block has a key, so that its content must stay."""
        return block in self._keys

    def publish(self, block: int, key: bytes, priority: int = 0) -> bool:
        """Name the content of a held block; false when it has a name, or another block has this one."""
        if block in self._keys or key in self._blocks:
            return False
        self._keys[block] = key
        self._blocks[key] = block
        if priority:
            self._priorities[block] = priority
        return True

    def unpublish(self, block: int) -> None:
        """The block's content is about to change, or is of no use any more: nobody finds it again."""
        key = self._keys.pop(block, None)
        if key is None:
            return
        del self._blocks[key]
        self._priorities.pop(block, None)
        self._pinned.pop(block, None)
        self._removed.append(key)
        if not self._references[block]:
            self._cached.discard(block)
            self._free.append(block)

    def is_pinned(self, block: int) -> bool:
        """Whether the block's content must stay."""
        return block in self._pinned

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned, held or not."""
        return len(self._pinned)

    def pin(self, key: bytes) -> bool:
        """Keep the block of this key until it is unpinned as often as it was pinned; false when there is none."""
        block = self._blocks.get(key)
        if block is None:
            return False
        self._pinned[block] = self._pinned.get(block, 0) + 1
        self._cached.discard(block)
        return True

    def unpin(self, key: bytes) -> None:
        """Take one pin of `key` back. Unknown keys are fine."""
        block = self._blocks.get(key)
        if block is None or block not in self._pinned:
            return
        self._pinned[block] -= 1
        if not self._pinned[block]:
            del self._pinned[block]
            if not self._references[block]:
                self._cached.push(block, self._priorities.get(block, 0))

    def take_removed(self) -> list[bytes]:
        """Keys that went since this was last asked, in that order."""
        removed, self._removed = self._removed, []
        return removed

    def clear(self) -> None:
        """Unpublish everything, pinned or not."""
        for block in list(self._keys):
            self.unpublish(block)

    def check(self, held: Mapping[int, int]) -> None:
        """Raise `CorruptState` unless `held` (block: how many tables name it) is what the pool counts. O(blocks)."""
        for block, count in enumerate(self._references):
            if count != held.get(block, 0):
                raise CorruptState(
                    f"block {block} has {count} references in the pool and {held.get(block, 0)} in tables"
                )
        free = set(self._free)
        if len(free) != len(self._free):
            raise CorruptState(f"the free queue names a block twice: {list(self._free)}")
        if {block: key for key, block in self._blocks.items()} != self._keys:
            raise CorruptState(f"blocks have the keys {self._keys} and keys the blocks {self._blocks}")
        if stray := (self._pinned.keys() | self._priorities.keys()) - self._keys.keys():
            raise CorruptState(f"blocks {sorted(stray)} are pinned or have a priority, and no key")
        for block, count in enumerate(self._references):
            resting = not count and block in self._keys
            states = (count > 0, block in free, block in self._cached, resting and block in self._pinned)
            if sum(states) != 1 or (block in free and block in self._keys):
                raise CorruptState(f"block {block} is held, free, cached, pinned: {states}; expected exactly one")

    def _evict(self) -> int:
        block = self._cached.pop()
        key = self._keys.pop(block)
        del self._blocks[key]
        self._priorities.pop(block, None)
        self._removed.append(key)
        self.num_evicted += 1
        return block
