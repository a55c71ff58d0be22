"""What every cache checks alike: arguments; configured before `init`, initialised once, not used after `close`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

from kvcache.backends import Backend
from kvcache.spec import MAX_POSITION, Batch, CacheConfig, flag, integer

__all__ = ["Lifecycle", "Limits", "check_copy", "check_growth", "check_range", "check_sequence", "check_truncation"]


class Limits(NamedTuple):
    """The sizes given to `init`, in sequences and tokens."""

    max_sequences: int
    capacity: int
    max_batch: int

    def check_pass(self, batch: Batch, reserve: bool) -> None:
        """Raise unless `start_forward` can take these."""
        flag(reserve, "reserve")
        if not isinstance(batch, Batch):
            raise TypeError(f"start_forward got {type(batch).__name__}; expected a kvcache.Batch")
        if len(batch) > self.max_batch:
            raise ValueError(
                f"the batch has {len(batch)} tokens; expected at most max_batch = {self.max_batch}: split it, or init "
                "with a larger max_batch"
            )


@final
class Lifecycle:
    """new -> initialised -> closed."""

    __slots__ = ("_config", "_limits", "is_closed")

    def __init__(self) -> None:
        self._config: CacheConfig | None = None
        self._limits: Limits | None = None
        self.is_closed = False

    @property
    def config(self) -> CacheConfig:
        return self._config or CacheConfig()

    def prepare_config(self, config: CacheConfig) -> Callable[[], None]:
        """Check the argument of `set_config`; the answer does the rest."""
        if not isinstance(config, CacheConfig):
            raise TypeError(f"set_config got {type(config).__name__}; expected a kvcache.CacheConfig")
        if self._config or self._limits or self.is_closed:
            raise ValueError("set_config was called twice or after init; expected once, before init")

        def effect() -> None:
            self._config = config

        return effect

    def prepare(self, backend: Backend, max_sequences: int, capacity: int | None, max_batch: int | None) -> Limits:
        """Check the arguments of `init`, and that the backend can do what `set_config` said; changes nothing."""
        if self.is_closed:
            raise ValueError("the cache is closed; make a new one")
        if self._limits:
            raise ValueError("the cache is initialised already; expected one call of init")
        if capacity is None:
            raise ValueError("capacity is missing; expected the number of tokens that a sequence may hold")
        capacity = integer(capacity, "capacity", minimum=1)
        max_sequences = integer(max_sequences, "max_sequences", minimum=1)
        max_batch = capacity if max_batch is None else integer(max_batch, "max_batch", minimum=1)
        if max_batch > max_sequences * capacity:
            raise ValueError(
                f"max_batch is {max_batch} and the cache holds {max_sequences} sequences of {capacity} tokens; "
                "expected a capacity that one batch fits into: raise capacity, or lower max_batch"
            )
        if self.config.mask_dtype not in backend.native:
            raise ValueError(
                f"CacheConfig.mask_dtype is {self.config.mask_dtype!r}; the {backend.name} backend computes in "
                f"{', '.join(sorted(backend.native))}"
            )
        return Limits(max_sequences, capacity, max_batch)

    def begin(self, limits: Limits) -> None:
        self._limits = limits

    def check_open(self) -> None:
        """Raise `ValueError` before `init` and after `close`."""
        _ = self.limits

    @property
    def limits(self) -> Limits:
        """The sizes given to `init`. Raises `ValueError` before `init` and after `close`."""
        if self.is_closed:
            raise ValueError("the cache is closed; make a new one")
        if self._limits is None:
            raise ValueError("the cache is not initialised; call init first")
        return self._limits


def check_sequence(sequence: int, what: str = "sequence") -> int:
    """The id of a sequence as an `int`; raises `TypeError` for what is none."""
    return integer(sequence, what, minimum=-(2**63))


def check_range(sequence: int, begin: int, end: int | None) -> tuple[int, int, int | None]:
    """The arguments of `remove` as `int`s; raises unless [begin, end) is a range of positions."""
    sequence, begin = check_sequence(sequence), integer(begin, "begin")
    end = None if end is None else integer(end, "end")
    if end is not None and end < begin:
        raise ValueError(f"the range is [{begin}, {end}); expected begin <= end")
    return sequence, begin, end


def check_copy(source: int, target: int, length: int) -> tuple[int, int, int]:
    """The arguments of `copy_prefix` as `int`s; raises unless they are integers and the length is not negative."""
    return check_sequence(source, "source"), check_sequence(target, "target"), integer(length, "length")


def check_growth(sequence: int, end: int, num_tokens: int) -> None:
    """Raise unless `num_tokens` more tokens of a sequence that ends at `end` have positions."""
    if end + num_tokens - 1 > MAX_POSITION:
        raise ValueError(
            f"sequence {sequence} ends at {end} and {num_tokens} more tokens reach position {end + num_tokens - 1}; "
            f"expected at most {MAX_POSITION}: truncate the sequence, or begin another"
        )


def check_truncation(seq_len: int, end: int) -> int:
    """`seq_len` as an `int`; raises unless a sequence that ends at `end` can be cut to so many tokens."""
    seq_len = integer(seq_len, "seq_len")
    if seq_len > end:
        raise ValueError(f"seq_len is {seq_len} and the sequence has {end} tokens; expected no more than that")
    return seq_len
