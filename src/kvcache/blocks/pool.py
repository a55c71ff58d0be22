"""The pool: reference counts and the free queue of a cache's blocks. Counts only.

    free  --allocate-->  held (1 reference)  --share-->  held (2)  --release-->  held (1)  --release-->  free

A block that more than one sequence names is read-only: whoever wants to write copies it first. Blocks are handed out in
the order in which they became free, which keeps the slots of a lone sequence side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import final

from kvcache.errors import CorruptState

__all__ = ["BlockPool"]


@final
class BlockPool:
    """Blocks 0..num_blocks-1. Every operation is O(1) per block."""

    __slots__ = ("_free", "_references")

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, block: int) -> int:
        """How many tables name this block; 0 when it is free."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, now held once each. The caller has made sure that there are as many."""
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these held blocks."""
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; a block without any is free."""
        for block in blocks:
            left = self._references[block] = self._references[block] - 1
            if not left:
                self._free.append(block)

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
        if wrong := [b for b, count in enumerate(self._references) if (count == 0) != (b in free)]:
            raise CorruptState(f"blocks {wrong} are both free and held, or neither")
