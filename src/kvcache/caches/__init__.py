"""Caches: what models put keys and values into and read their history from.

| class            | holds                                            | for                                          |
|------------------|--------------------------------------------------|----------------------------------------------|
| `CausalCache`    | keys and values of tokens, under one span        | full, sliding-window and chunked attention   |
| `EncoderCache`   | keys and values of media, of any length          | cross attention                              |
| `RecurrentCache` | one state per sequence, and checkpoints          | convolution, SSM and linear-attention layers |
| `HybridCache`    | several of these, one per kind of layer          | models that mix them                         |

One pass of a model:

    cache.start_forward(Batch(positions, sequences))   # finds places; CacheFull changes nothing
    for each layer:
        cache.set_layer(layer)
        cache.put(keys, values)
        out = cache.attend(queries)                    # or: keys, values, mask = cache.get()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

from kvcache.backends import Backend
from kvcache.spec import Array, Batch, CacheConfig, History, Usage
from kvcache.views import SequenceView

__all__ = ["Cache", "CausalCache", "EncoderCache", "HybridCache", "RecurrentCache"]


class Cache(ABC):
    """A cache of one model. Not thread-safe: one thread owns it.

    Every operation that raises has changed nothing. Calls before `init` and after `close` raise `ValueError`.
    """

    # --- for models ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def set_layer(self, layer: int) -> None:
        """Make `layer` (the model's number) the one that `put`, `get` and `attend` mean."""

    @abstractmethod
    def put(self, keys: Array, values: Array) -> None:
        """Store keys [T,H,D] and values [T,H,Dv] of the batch's tokens in the active layer."""

    @abstractmethod
    def get(self) -> History:
        """Everything that the batch's tokens see in the active layer, with the mask that says who sees what.

        Layers of a pass share the mask, and keys and values may lie in the cache: read them, do not write to them.
        """

    @abstractmethod
    def attend(
        self, queries: Array, *, scale: float | None = None, softcap: float | None = None, sinks: Array | None = None
    ) -> Array:
        """Attention of queries [T,Hq,D] over the active layer, read in place: [T,Hq,Dv].

        `scale` defaults to D**-0.5.
        """

    @final
    def set_config(self, config: CacheConfig) -> None:
        """Say how the model wants its history. Once, before `init`."""
        self.prepare_config(config)()

    # --- for whoever manages the cache --------------------------------------------------------------------------------

    @abstractmethod
    def init(
        self,
        backend: str | Backend,
        dtype: str | tuple[str, str],
        max_sequences: int = 1,
        capacity: int | None = None,
        max_batch: int | None = None,
    ) -> None:
        """Size the cache: `max_sequences` sequences of `capacity` tokens, batches of `max_batch` (or capacity)."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Closing twice is allowed; any other call afterwards raises."""

    @final
    def start_forward(self, batch: Batch, reserve: bool = False) -> None:
        """Find places for the tokens of `batch`, forgetting what spans have outgrown. `CacheFull` changes nothing.

        They count as stored from now on: if the model fails before its puts, `remove` them.
        With `reserve`, `get` answers with the largest shapes that can occur, and nothing is changed or stored.
        """
        self.prepare_forward(batch, reserve)()

    @final
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """`target` becomes the tokens of `source` below position `length`, by reference.

        An unknown source empties it.
        """
        self.prepare_copy(source, target, length)()

    @abstractmethod
    def can_resume(self, sequence: int, position: int) -> bool:
        """Whether everything below `position` that a query there or later can see is stored."""

    @final
    def remove(self, sequence: int, begin: int, end: int | None = None) -> None:
        """Take the tokens in [begin, end) out; later ones move down, their keys re-rotated. `None`: to the end.

        Raises `NotSupported` when what the span needs at the new end was forgotten, or tokens would have to move and
        there is no `shift`.
        """
        self.prepare_remove(sequence, begin, end)()

    @abstractmethod
    def sequence(self, sequence: int) -> SequenceView:
        """The other face: this one sequence."""

    @abstractmethod
    def usage(self) -> Usage:
        """What is held, in tokens, blocks and bytes."""

    @abstractmethod
    def check(self) -> None:
        """Raise `CorruptState` unless every structure agrees with every other. Walks everything."""

    # --- in two steps, of which only the first can fail: so all members of a hybrid change, or none -------------------

    @abstractmethod
    def prepare_config(self, config: CacheConfig) -> Callable[[], None]:
        """Everything of `set_config` that can fail, changing nothing; the answer does the rest."""

    @abstractmethod
    def prepare_init(
        self,
        backend: str | Backend,
        dtype: str | tuple[str, str],
        max_sequences: int = 1,
        capacity: int | None = None,
        max_batch: int | None = None,
    ) -> Callable[[], None]:
        """Everything of `init` that can fail, changing nothing; the answer does the rest."""

    @abstractmethod
    def prepare_forward(self, batch: Batch, reserve: bool = False) -> Callable[[], None]:
        """Do everything of `start_forward` that can fail, changing nothing.

        The answer does the rest and cannot fail.
        """

    @abstractmethod
    def prepare_remove(
        self, sequence: int, begin: int, end: int | None = None, *, drop_appended: bool = False
    ) -> Callable[[], None]:
        """The same for `remove`.

        With `drop_appended` it drops tokens that were appended and not committed, else they raise.
        """

    @abstractmethod
    def prepare_copy(self, source: int, target: int, length: int) -> Callable[[], None]:
        """The same for `copy_prefix`."""

    @abstractmethod
    def resume_point(self, sequence: int, position: int) -> int:
        """The highest position, `position` at most, for which `can_resume` holds (0 always does)."""

    @abstractmethod
    def stopping_point(self, sequence: int, position: int) -> int:
        """Where a `remove` from `position` to the end stops: there, or at a checkpoint below it; 0: there is none."""


from kvcache.caches.causal import CausalCache  # noqa: E402  the implementations need the contract above
from kvcache.caches.encoder import EncoderCache  # noqa: E402
from kvcache.caches.hybrid import HybridCache  # noqa: E402
from kvcache.caches.recurrent import RecurrentCache  # noqa: E402
