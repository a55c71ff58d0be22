"""The sequence face of caches that do not hold a key and a value per token: it can rewind and free, not append."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn, Protocol, final

from kvcache.backends import Backend
from kvcache.caches.lifecycle import Lifecycle, check_growth, check_truncation
from kvcache.errors import NotSupported
from kvcache.spec import Array, Device, integer
from kvcache.views import Appended, ContiguousKV, PackedView, SequenceView, View

__all__ = ["TokenlessView"]


class _Owner(Protocol):
    @property
    def backend(self) -> Backend: ...
    def end(self, sequence: int) -> int: ...
    def layers(self) -> set[int]: ...
    def remove(self, sequence: int, begin: int, end: int | None = None) -> None: ...


@final
class TokenlessView(SequenceView):
    """One sequence of an `EncoderCache` or a `RecurrentCache`.

    advance: what `commit` of tokens that other members of a hybrid store does; without it they cannot be committed.
    """

    __slots__ = ("_advance", "_kind", "_lifecycle", "_owner", "_sequence")

    def __init__(
        self,
        sequence: int,
        lifecycle: Lifecycle,
        owner: _Owner,
        kind: str,
        advance: Callable[[int, int], None] | None = None,
    ) -> None:
        self._advance = advance
        self._sequence = sequence
        self._lifecycle = lifecycle
        self._owner = owner
        self._kind = kind

    @property
    def seq_len(self) -> int:
        return self._owner.end(self._sequence)

    @property
    def max_seq_len(self) -> int:
        return self._lifecycle.limits.capacity

    @property
    def is_on_gpu(self) -> bool:
        backend = self._owner.backend
        return any(backend.device(layer).is_gpu for layer in self._owner.layers())

    def append(self, layer: int, keys: Array, values: Array) -> Appended:
        self._refuse("append")

    def commit(self, num_tokens: int) -> None:
        self.prepare_commit(num_tokens)()

    def prepare_commit(self, num_tokens: int) -> Callable[[], None]:
        self._lifecycle.check_open()
        num_tokens = integer(num_tokens, "num_tokens")
        if not num_tokens:
            return lambda: None
        if self._advance is None:
            self._refuse("commit")
        check_growth(self._sequence, self.seq_len, num_tokens)
        return partial(self._advance, self._sequence, num_tokens)

    @property
    def can_advance(self) -> bool:
        """Whether tokens can be committed."""
        return self._advance is not None

    def views(self, layer: int) -> list[View]:
        self._refuse("views")

    def packed_views(self, layer: int) -> list[PackedView]:
        self._refuse("packed_views")

    def contiguous_kv(self, layer: int, length: int) -> ContiguousKV | None:
        self._refuse("contiguous_kv")

    def layer_device(self, layer: int) -> Device:
        return self._owner.backend.device(integer(layer, "layer"))

    def truncate(self, seq_len: int) -> None:
        self._owner.remove(self._sequence, check_truncation(seq_len, self.seq_len))

    def free(self) -> None:
        self._owner.remove(self._sequence, 0)

    def _refuse(self, operation: str) -> NoReturn:
        raise NotSupported(
            f"{self._kind} holds no key and value per token, so a sequence view has no {operation}; use "
            f"start_forward, put and get"
        )
