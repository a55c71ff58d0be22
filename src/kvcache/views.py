"""The second face of a cache: one sequence, as engines that walk blocks themselves want it.

The same tokens, the same pool: a sequence can be driven by `start_forward` and by its view in turn, between forwards.

    view = cache.sequence(7)
    for layer in layers:
        keys, values = project(layer, x)                      # [T,H,D], [T,H,Dv]
        appended = view.append(layer, keys, values)           # written after the committed length, which stays
        attend(layer, appended.views, appended.start)
    view.commit(T)                                            # moves the length once, for all layers
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from kvcache.spec import Array, Device

__all__ = ["Appended", "ContiguousKV", "PackedView", "SequenceView", "View"]


class View(NamedTuple):
    """Consecutive positions that lie side by side, from position `start`: keys [length,H,D], values [length,H,Dv].

    A view of the storage without a copy where the backend computes with the stored type; other formats are decoded to
    f32. It is stale once the cache changes.
    """

    keys: Array
    values: Array
    start: int
    length: int
    device: Device


class PackedView(NamedTuple):
    """A run inside one block, head-major as blocks are stored: keys [H,slot,D], values [H,slot,Dv] in f32.

    The first `length` slots hold the positions `[start, start + length)`; slots after them are undefined.
    Without a copy when the format is f32.
    """

    keys: Array
    values: Array
    start: int
    length: int
    block_size: int
    head_dim: int
    num_kv_heads: int


class ContiguousKV(NamedTuple):
    """The first tokens of a sequence as one array each, without a copy: keys [length,H,D], values [length,H,Dv]."""

    keys: Array
    values: Array


class Appended(NamedTuple):
    """What `append` answers: views over everything the new tokens may see in that layer, and the first new position."""

    views: list[View]
    start: int


class SequenceView(ABC):
    """One sequence of a cache. Making one costs nothing and changes nothing; the sequence need not exist yet."""

    @property
    @abstractmethod
    def seq_len(self) -> int:
        """The position after the last committed token, forgotten ones included."""

    @property
    @abstractmethod
    def max_seq_len(self) -> int:
        """The capacity given to `init`, in tokens. A sequence may outgrow it while the pool has room."""

    @property
    @abstractmethod
    def is_on_gpu(self) -> bool:
        """Whether any layer written so far lives on an accelerator."""

    @abstractmethod
    def append(self, layer: int, keys: Array, values: Array) -> Appended:
        """Write keys [T,H,D] and values [T,H,Dv] after the committed length and what this layer appended before.

        Forgets as a forward does. Raises `ValueError` for wrong shapes and beyond `MAX_POSITION`, `CacheFull` when no
        slots are left; nothing has changed then.
        """

    @abstractmethod
    def commit(self, num_tokens: int) -> None:
        """Make the first `num_tokens` appended tokens part of the sequence, in all layers; drop the rest.

        Raises `ValueError` when some layer has appended fewer.
        """

    @abstractmethod
    def prepare_commit(self, num_tokens: int) -> Callable[[], None]:
        """Everything of `commit` that can fail, changing nothing; the answer does the rest. For hybrids."""

    @abstractmethod
    def views(self, layer: int) -> list[View]:
        """The committed tokens that are stored, in order of position, in as few runs as the blocks allow."""

    @abstractmethod
    def packed_views(self, layer: int) -> list[PackedView]:
        """The committed tokens block by block, head-major, f32."""

    @abstractmethod
    def contiguous_kv(self, layer: int, length: int) -> ContiguousKV | None:
        """The first `length` tokens (appended ones count) without a copy, or `None` where that needs one."""

    @abstractmethod
    def layer_device(self, layer: int) -> Device:
        """Where the layer's arrays live."""

    @abstractmethod
    def truncate(self, seq_len: int) -> None:
        """Forget everything from position `seq_len` on, appended tokens included.

        Raises `NotSupported` when what a query at `seq_len` needs was forgotten, `ValueError` beyond the end.
        """

    @abstractmethod
    def free(self) -> None:
        """Give back everything this sequence holds; it is empty afterwards."""
