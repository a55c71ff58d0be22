"""Spans: which positions a query sees, and which can be forgotten. Integers only; no tensors, no state.

A query at position p, positions 0..9 stored, `x` seen:

    Full()         p=7   xxxxxxxx..
    Sliding(3)     p=7   .....xxx..     the window counts the query's own token
    Chunked(4)     p=7   ....xxxx..     from the start of p's chunk
    Chunked(4)     p=8   ........x.     a new chunk begins empty

`begin` works on integers and on NumPy arrays alike. The upper end (`k <= p`) is causality, which is not the span's
business: a query may be excepted from it (`CausalCache.set_causal`), never from its span.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeVar, final

import numpy as np
from numpy.typing import NDArray

from kvcache.spec import integer

__all__ = ["Chunked", "Full", "Sliding", "Span", "num_blocks"]

Position = TypeVar("Position", int, NDArray[np.int32], NDArray[np.int64])


class Span(ABC):
    """What a query sees of its own sequence, and what no later query will see again."""

    @abstractmethod
    def begin(self, position: Position) -> Position:
        """The lowest position that a query at `position` sees (may be negative: nothing is there)."""

    @abstractmethod
    def retained_from(self, position: int) -> int:
        """Positions below this can be forgotten once no query below `position` will come."""

    @abstractmethod
    def resolve(self, max_sequences: int) -> Span:
        """This span with its defaults filled in."""

    @abstractmethod
    def num_retained(self, capacity: int) -> int:
        """How many tokens of one resting sequence must be held, at most."""


@final
@dataclass(frozen=True, slots=True)
class Full(Span):
    """Every position up to the query's own."""

    def begin(self, position: Position) -> Position:
        return position * 0

    def retained_from(self, position: int) -> int:
        return 0

    def resolve(self, max_sequences: int) -> Span:
        return self

    def num_retained(self, capacity: int) -> int:
        return capacity


@final
@dataclass(frozen=True, slots=True)
class Sliding(Span):
    """The last `window` positions, the query's own included; `memory >= window` tokens are retained for rewinding.

    `memory` defaults to `window`, or `window + 1` when `max_sequences > 1`, so that one stop token can be taken back.
    """

    window: int
    memory: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", _width(self.window, "Sliding.window"))
        if self.memory is None:
            return
        object.__setattr__(self, "memory", integer(self.memory, "Sliding.memory", minimum=1))
        if self.memory < self.window:
            raise ValueError(
                f"Sliding.memory is {self.memory} with a window of {self.window}; expected memory >= window, "
                f"or None for the default"
            )

    def begin(self, position: Position) -> Position:
        return position - (self.window - 1)

    def retained_from(self, position: int) -> int:
        return max(0, position - (self.memory or self.window) + 1)

    def resolve(self, max_sequences: int) -> Span:
        return self if self.memory is not None else Sliding(self.window, self.window + (max_sequences > 1))

    def num_retained(self, capacity: int) -> int:
        return self.memory or self.window


@final
@dataclass(frozen=True, slots=True)
class Chunked(Span):
    """The positions of the query's own chunk of `size`, as Llama 4 attends."""

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _width(self.size, "Chunked.size"))

    def begin(self, position: Position) -> Position:
        return position - position % self.size

    def retained_from(self, position: int) -> int:
        return position - position % self.size

    def resolve(self, max_sequences: int) -> Span:
        return self

    def num_retained(self, capacity: int) -> int:
        return self.size


def _width(value: object, what: str) -> int:
    """How many positions a span covers: in 64 bits, like the positions that it is subtracted from."""
    width = integer(value, what, minimum=1)
    if width >= 2**63:
        raise ValueError(f"{what} is {width}; expected less than 2**63, or Full() to see everything")
    return width


def num_blocks(span: Span, *, block_size: int, max_sequences: int, capacity: int, max_batch: int) -> int:
    """Blocks of a pool for `max_sequences` sequences and one batch: of one sequence, or a token for each, always fits.

    With blocks of one slot `max_sequences * retained + max_batch`, and `max_sequences * capacity` for `Full`; larger
    blocks pay one more block per sequence (a window seldom starts on a border) and never more than `Full` would.

    >>> num_blocks(Sliding(2, 2), block_size=1, max_sequences=1, capacity=16, max_batch=4)
    6
    >>> num_blocks(Sliding(512, 512), block_size=16, max_sequences=2, capacity=8192, max_batch=64)
    70
    """

    def needed(retained: int) -> int:
        if block_size == 1:
            return max_sequences * retained + max_batch
        return max_sequences * (-(-retained // block_size) + 1) + -(-max_batch // block_size)

    full = max_sequences * capacity if block_size == 1 else needed(capacity)
    return full if isinstance(span, Full) else min(needed(span.num_retained(capacity)), full)
