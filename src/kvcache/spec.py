"""The nouns that every layer shares: plain frozen values, no tensors, no behaviour beyond checking themselves.

Letters in shapes, everywhere in the package:

| letter | counts                                  | letter | counts                                    |
|--------|-----------------------------------------|--------|-------------------------------------------|
| T      | tokens of one batch (rows of a forward) | S      | stored tokens that a batch sees (columns) |
| H      | key/value heads                         | Hq     | query heads, a multiple of H              |
| D      | values of one key head                  | Dv     | values of one value head                  |
| N      | blocks of a pool                        | W      | stored elements of one row, after encoding |

`Array` is whatever the backend calls an array: `numpy.ndarray`, `torch.Tensor` or `mlx.core.array`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex, TypeAlias

__all__ = ["Array", "Batch", "CacheConfig", "Device", "History", "Match", "Media", "SequenceUsage", "Usage"]

Array: TypeAlias = Any

MASK_DTYPES = ("f32", "f16", "bf16")

MAX_POSITION = 2**31 - 2
"""Tables and kernels keep positions, and the one after the last, in 32 bits."""


def integer(value: object, what: str, minimum: int = 0) -> int:
    """`value` as an `int` of at least `minimum`; NumPy's and PyTorch's integers pass, floats, bools and text do not.

    What it returns is what counts: other integers wrap around at their own size, or are not equal to those of Python.
    """
    if type(value) is int and value >= minimum:  # sixty times in a step, and the check of a protocol takes 5 µs
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{what} is {value!r} ({type(value).__name__}); expected an integer")
    try:
        number = operator.index(value)
    except TypeError as error:  # arrays of several numbers, or of floats
        raise TypeError(f"{what} is {value!r} ({type(value).__name__}); expected an integer") from error
    if number < minimum:
        raise ValueError(f"{what} is {number}; expected at least {minimum}")
    return number


def finite(value: object, what: str) -> float:
    """`value` as a finite `float`; NumPy's and PyTorch's numbers pass, bools and text do not."""
    if type(value) is not float:  # once for each layer of a step
        if isinstance(value, bool) or not isinstance(value, SupportsFloat):
            raise TypeError(f"{what} is {value!r} ({type(value).__name__}); expected a number")
        value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}; expected a finite number")
    return value


def flag(value: object, what: str) -> bool:
    """`value` if it is True or False: any text is true, "no" included."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} is {value!r} ({type(value).__name__}); expected True or False")
    return value


def listed(values: Any, what: str, expected: str) -> list[Any] | tuple[Any, ...]:
    """`values` one by one, arrays and tensors too; not the keys of a mapping, nor the numbers that bytes are."""
    made: object = values
    if not isinstance(values, (list, tuple, memoryview)) and hasattr(values, "tolist"):
        made = values.tolist()  # one call instead of one per element
    if isinstance(made, (list, tuple)):
        return made
    if isinstance(made, (Mapping, bytes, bytearray, memoryview)) or not isinstance(made, Iterable):
        raise TypeError(f"{what} is {type(values).__name__}; expected {expected}")
    return list(made)


def integers(values: Any, what: str, expected: str = "integers") -> tuple[int, ...]:
    """`values` as integers of at least 0, listed."""
    values = listed(values, what, expected)
    for value in values:
        if type(value) is not int or value < 0:  # the slow check only where the quick one fails
            return tuple(integer(v, f"{what}[{i}]") for i, v in enumerate(values))
    return tuple(values)


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a sound or any other encoder input that enters the batch.

    `index` is the row of the batch at which it stands, `key` identifies its content (equal keys, equal content), and
    `num_tokens` says how many rows of the encoder output are its own, needed when a batch carries several.
    """

    index: int
    key: Hashable
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", integer(self.index, "Media.index"))
        try:
            hash(self.key)
        except TypeError as error:
            raise TypeError(f"Media.key is {self.key!r}; expected something hashable, as a text or bytes") from error
        if self.num_tokens is not None:
            object.__setattr__(self, "num_tokens", integer(self.num_tokens, "Media.num_tokens", minimum=1))


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one forward pass: row i is the token of `sequences[i]` at `positions[i]`.

    Raises `ValueError` for an empty batch, unequal lengths, a position below 0 or above `MAX_POSITION`, or media
    outside the batch.
    """

    positions: Sequence[int]
    sequences: Sequence[int]
    media: Sequence[Media] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", integers(self.positions, "Batch.positions"))
        object.__setattr__(self, "sequences", integers(self.sequences, "Batch.sequences"))
        object.__setattr__(self, "media", tuple(listed(self.media, "Batch.media", "Media(index, key), listed")))
        if len(self.positions) != len(self.sequences):
            raise ValueError(
                f"Batch has {len(self.positions)} positions and {len(self.sequences)} sequences; expected one of each "
                f"per token"
            )
        if not self.positions:
            raise ValueError("Batch is empty; expected at least one token")
        if max(self.positions) > MAX_POSITION:
            raise ValueError(f"Batch.positions reach {max(self.positions)}; expected at most {MAX_POSITION}")
        for media in self.media:
            if not isinstance(media, Media):
                raise TypeError(f"Batch.media has {media!r}; expected Media(index, key)")
            if media.index >= len(self.positions):
                raise ValueError(
                    f"Media.index is {media.index} in a batch of {len(self.positions)} tokens; expected an index into "
                    f"the batch"
                )

    def __len__(self) -> int:
        return len(self.positions)


class History(NamedTuple):
    """What the queries of a batch see.

    Keys [S,H,D], values [S,H,Dv] ([H,Dv,S] when permuted), mask [T,S] additive or `None`; layers of a pass share it.
    """

    keys: Array
    values: Array
    mask: Array | None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How a model wants its history: values as [H,Dv,S], columns padded to a multiple, the mask's element type."""

    permuted_values: bool = False
    padding: int = 1
    mask_dtype: str = "f32"

    def __post_init__(self) -> None:
        flag(self.permuted_values, "CacheConfig.permuted_values")
        object.__setattr__(self, "padding", integer(self.padding, "CacheConfig.padding", minimum=1))
        if self.mask_dtype not in MASK_DTYPES:
            raise ValueError(f"CacheConfig.mask_dtype is {self.mask_dtype!r}; expected one of {', '.join(MASK_DTYPES)}")


@dataclass(frozen=True, slots=True)
class Device:
    """Where the arrays of a layer live: `Device("cpu")`, `Device("cuda:1")`."""

    name: str

    @property
    def is_gpu(self) -> bool:
        return self.name.partition(":")[0] not in ("cpu", "meta")


class Match(NamedTuple):
    """How much of a prompt is already cached, and why not more."""

    num_tokens: int
    reason: str


class SequenceUsage(NamedTuple):
    """What one sequence holds: tokens it can still show, and blocks its table names (shared ones included)."""

    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a cache holds.

    `num_blocks` is the size of the pool, `num_tokens` the sum over sequences, `num_bytes` the arrays'.
    """

    num_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_bytes: int
    sequences: Mapping[int, SequenceUsage] = field(default_factory=dict)
