"""What each kind of member needs in order to resume at a position, asked of what it holds.

Windowed(Sliding(4)), block 2       holds   T T F T F F T T F F F        blocks 0..10
    resume(22)                              a query at 22 sees 19..21: block 10 is missing; so are 9 and 8
    -> 16                                   a query at 16 sees 13..15: blocks 6 and 7 are there
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, final

from kvcache.spans import Full, Span

__all__ = ["Encoded", "Member", "Path", "States", "Windowed"]


class Path(NamedTuple):
    """Where a prompt could be resumed at most.

    keys: of its blocks, the last perhaps of another prompt's block of which it shares the first tokens (the donor).
    num_tokens: up to here tokens are the same. is_whole: the last block has no token beyond that.
    media: position and key of the prompt's media.
    """

    keys: Sequence[bytes]
    num_tokens: int
    is_whole: bool
    block_size: int
    media: Sequence[tuple[int, Hashable]] = ()


class Member(ABC):
    """One member of a cache, as far as prefixes go."""

    needs_all = False
    """Whether a missing block ends every prefix: nothing behind it need be looked at."""

    @abstractmethod
    def holds(self, key: bytes) -> bool:
        """Whether the member has what belongs to this block."""

    @abstractmethod
    def resume(self, path: Path) -> Callable[[int], int]:
        """A function: the highest position, `position` at most, at which this member can go on (0 always)."""

    @abstractmethod
    def __str__(self) -> str:
        """As reasons name it."""


@final
class Windowed(Member):
    """A member with a span: it needs the blocks that a query at the position sees."""

    def __init__(self, span: Span, find: Callable[[bytes], int | None]) -> None:
        self.span = span
        self.needs_all = isinstance(span, Full)
        self._find = find

    def holds(self, key: bytes) -> bool:
        return self._find(key) is not None

    def resume(self, path: Path) -> Callable[[int], int]:
        size, begin = path.block_size, self.span.begin
        missing, last = [], -1  # of block i: the last missing one up to it
        for index, key in enumerate(path.keys):
            last = last if self._find(key) is not None else index
            missing.append(last)

        def resume(position: int) -> int:
            while position > 0:
                first = max(0, begin(position))
                if first >= position:
                    return position
                gap = missing[(position - 1) // size]
                if gap < first // size:
                    return position
                # Every position whose query sees the gap is out; one whose query sees nothing is not (a chunk's begin).
                position = max(gap * size, first if max(0, begin(first)) == first else 0)
            return 0

        return resume

    def __str__(self) -> str:
        return str(self.span)


@final
class States(Member):
    """A member with recurrent states: one must be there exactly at the position."""

    def __init__(self, holds: Callable[[bytes], bool]) -> None:
        self._holds = holds

    def holds(self, key: bytes) -> bool:
        return self._holds(key)

    def resume(self, path: Path) -> Callable[[int], int]:
        def resume(position: int) -> int:
            is_cut = position == path.num_tokens and position % path.block_size != 0
            if is_cut and path.is_whole and self._holds(path.keys[-1]):
                return position
            index = position // path.block_size
            while index and not self._holds(path.keys[index - 1]):
                index -= 1
            return index * path.block_size

        return resume

    def __str__(self) -> str:
        return "recurrent states"


@final
class Encoded(Member):
    """A member with media: all that stand before the position must be there."""

    def __init__(self, holds: Callable[[Hashable], bool]) -> None:
        self._holds = holds

    def holds(self, key: bytes) -> bool:
        return False  # it holds media, not blocks

    def resume(self, path: Path) -> Callable[[int], int]:
        first = min((position for position, key in path.media if not self._holds(key)), default=path.num_tokens)
        return lambda position: min(position, first)

    def __str__(self) -> str:
        return "media"
