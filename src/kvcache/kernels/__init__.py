"""Kernels: attention over the blocks of a cache, read in place.

One signature, several implementations. `reference` is the definition, written to be read; the others are tested equal
to it.

| name        | arrays | what it is                                                                 |
|-------------|--------|----------------------------------------------------------------------------|
| `triton`    | torch  | Triton over the blocks in place, on a GPU; compiled on first use           |
| `cpu`       | torch  | C++ over the blocks in place, compiled for this machine on first use       |
| `sdpa`      | torch  | PyTorch's own operators over gathered blocks, grouped queries not repeated |
| `reference` | any    | NumPy in float64; the definition                                           |

The fastest that does not refuse is taken. `KVCACHE_KERNEL` names one and overrides the choice; an unknown name raises
`ValueError`, and so does one that refuses. A kernel joins by a line in `_KERNELS` and one in the contract tests.

What a kernel is given is the same for every layer of a pass and is made once: an `AttentionBatch` of `Segment`s. Spans,
causality and its exceptions have become two numbers per query by then: a query sees the positions
`[query_begins[t], query_ends[t])` of its own segment, and nothing else.
"""

from __future__ import annotations

import importlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.formats import Stored
from kvcache.spec import Array

__all__ = [
    "KERNELS",
    "AttentionBatch",
    "Kernel",
    "Planner",
    "Rooms",
    "Rotation",
    "Segment",
    "Writer",
    "WrongKernel",
    "check_softcap",
    "choose",
    "forced",
    "queries_per_head",
    "writer",
]


class _Entry(NamedTuple):
    """Where a kernel lives: module and class, imported when first wanted, and the library whose arrays it reads."""

    module: str
    cls: str
    library: str | None  # None: any


# The order is the preference: fastest first, and last the one that reads everything.
_KERNELS = {
    "triton": _Entry("kvcache.kernels.triton_kernel", "TritonKernel", "torch"),
    "cpu": _Entry("kvcache.kernels.cpu", "CpuKernel", "torch"),
    "sdpa": _Entry("kvcache.kernels.sdpa", "SdpaKernel", "torch"),
    "reference": _Entry("kvcache.kernels.reference", "ReferenceKernel", None),
}
KERNELS = tuple(_KERNELS)
"""The names that `KVCACHE_KERNEL` may have, fastest first."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One sequence of a pass: its queries, and where its tokens lie.

    rows: int64 [n], the batch rows that are its queries, in any order.
    block_table: int32 [ceil(num_slots / block_size)], ids into the storage. Slot j of the segment lies in block
        `block_table[j // block_size]` at offset `j % block_size`.
    num_slots: slots of the table that are in use, empty ones among them included.
    first_position: the position of slot 0, meant only when `positions` is `None`.
    positions: int32 [num_slots], the position in each slot and -1 for an empty one (its contents are undefined and must
        not reach a result); `None` says that slot j holds position `first_position + j`, the ordinary case.
    """

    rows: NDArray[np.int64]
    block_table: NDArray[np.int32]
    num_slots: int
    first_position: int
    positions: NDArray[np.int32] | None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """What every layer of one pass shares. A value: kernels keep what they derive from it, so its arrays never change.

    Row t of the queries sees the positions `[query_begins[t], query_ends[t])` of its segment, int32 [T] each. Each row
    belongs to exactly one segment. plans: what kernels have derived, by kernel; it lives as long as the batch.
    """

    segments: Sequence[Segment]
    query_begins: NDArray[np.int32]
    query_ends: NDArray[np.int32]
    block_size: int
    plans: dict[Kernel, Any] = field(default_factory=dict, init=False, repr=False)


class Kernel(ABC):
    """Attention over stored blocks."""

    name: str

    @abstractmethod
    def refusal(self, queries: Array, keys: Stored, values: Stored) -> str | None:
        """Why this kernel cannot read these arrays; `None` when it can."""

    @abstractmethod
    def attend(
        self,
        queries: Array,
        keys: Stored,
        values: Stored,
        batch: AttentionBatch,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """Attention output [T,Hq,Dv] of queries [T,Hq,D], in the element type of the queries.

        score = scale * (q . k); with `softcap` c > 0: c * tanh(score / c). `sinks` [Hq] adds one column to each head's
        softmax that has a score but no value (GPT-OSS). Query head h reads key/value head `h // (Hq / H)`. A query that
        sees nothing gives zeros.
        """


class Rotation(NamedTuple):
    """How a layer's stored keys turn with their positions; see `rope.py`.

    inv_freq: radians per position of each pair, float64 [m]. interleaved, rotary_begin: where the pairs lie in a head.
    """

    inv_freq: NDArray[np.float64]
    interleaved: bool
    rotary_begin: int


class Writer(ABC):
    """A kernel that writes into the storage, too, in one pass: rows are read once and their codes written once."""

    @abstractmethod
    def writes(self, storage: Sequence[Stored], rows: Sequence[Array] = ()) -> bool:
        """Whether it can write such rows to all of these, without anything to load or compile first."""

    @abstractmethod
    def put(self, keys: Stored, values: Stored, slots: NDArray[np.int64], new_keys: Array, new_values: Array) -> None:
        """Encode rows [n,H,D] and [n,H,Dv] into the distinct `slots` [n] of the storage, as `Format.encode` does."""

    @abstractmethod
    def shift(self, keys: Stored, slots: NDArray[np.int64], offsets: NDArray[np.int64], rotation: Rotation) -> None:
        """Turn the keys in the distinct `slots` [n] by `offsets` [n] positions, in place."""


Rooms: TypeAlias = Mapping[Any, Any]
"""Memory for the plans of a pass, as its `Planner` made it."""


class Planner(ABC):
    """A kernel whose plans can lie in memory of fixed size and address, which a CUDA graph reads at every replay."""

    @abstractmethod
    def rooms(self, batch: AttentionBatch, max_slots: int) -> Rooms:
        """Memory for passes of as many sequences of one token as this one, of `max_slots` slots each.

        Their slots may be out of order if those of this pass are. For the shapes of all layers that have attended this
        batch by now; empty when this kernel has read none.
        """

    @abstractmethod
    def replan(self, batch: AttentionBatch, rooms: Rooms) -> None:
        """Write the plans of a batch into the rooms, on the current stream: before a capture, and before each replay.

        Raises `ValueError` when they do not fit.
        """


class WrongKernel(ValueError):
    """`KVCACHE_KERNEL` names no kernel, or one that refuses: nobody's fault but the environment's."""


def forced() -> str | None:
    """The kernel that `KVCACHE_KERNEL` names at this moment, if any."""
    return os.environ.get("KVCACHE_KERNEL") or None


def writer(storage: Sequence[Stored], rows: Sequence[Array] = ()) -> Writer | None:
    """The kernel that writes such rows to this storage; `None` where the storage does it itself.

    One that attention has loaded already: nobody waits for a compiler to write rows. Follows `KVCACHE_KERNEL`.
    """
    wanted = forced()
    for name in (wanted,) if wanted else KERNELS:
        kernel: object = _loaded.get(name)
        if isinstance(kernel, Writer) and kernel.writes(storage, rows):
            return kernel
    return None


def choose(queries: Array, keys: Stored, values: Stored) -> Kernel:
    """The fastest kernel that reads these arrays, or the one that `KVCACHE_KERNEL` names.

    Raises `WrongKernel` when that is no kernel's name, or names a kernel that cannot read them.
    """
    wanted = forced()
    if wanted:
        if wanted not in _KERNELS:
            raise WrongKernel(f"KVCACHE_KERNEL is {wanted!r}; expected one of {', '.join(KERNELS)}, or leave it unset")
        chosen = _candidate(wanted, queries, keys, values)
        if isinstance(chosen, str):
            raise WrongKernel(
                f"KVCACHE_KERNEL is {wanted!r}, and that kernel refuses: {chosen}; leave it unset to choose"
            )
        return chosen
    for name in KERNELS:
        chosen = _candidate(name, queries, keys, values)
        if not isinstance(chosen, str):
            return chosen
    raise ValueError(f"no kernel reads these arrays: {chosen}")


def check_softcap(softcap: float | None) -> None:
    """Raise unless `softcap` is a positive number or `None`."""
    if softcap is not None and not 0 < softcap < math.inf:  # also false for NaN
        raise ValueError(f"softcap is {softcap}; expected a finite number above 0, or None for none")


def queries_per_head(
    queries: Array, keys: Stored, values: Stored, sinks: Array | None = None, softcap: float | None = None
) -> int:
    """How many query heads share one key/value head (G = Hq / H).

    Raises `ValueError` for queries and sinks that do not fit the stored keys and values, and for a softcap that is not
    positive: what every `attend` refuses.
    """
    check_softcap(softcap)
    num_heads = keys.array.shape[1]
    shape = queries.shape
    if len(shape) != 3 or shape[2] != keys.head_dim or shape[1] % num_heads or values.array.shape[1] != num_heads:
        raise ValueError(
            f"queries have shape {tuple(shape)}, keys {num_heads} heads of {keys.head_dim} and values "
            f"{values.array.shape[1]} heads of {values.head_dim}; expected queries [T,Hq,D] with the keys' D, "
            f"and Hq a multiple of their {num_heads} heads"
        )
    if sinks is not None and tuple(sinks.shape) != (shape[1],):
        raise ValueError(f"sinks have shape {tuple(sinks.shape)}; expected one for each of {shape[1]} query heads")
    return int(shape[1]) // int(num_heads)


_loaded: dict[str, Kernel | str] = {}  # a kernel, or why it cannot be had on this machine


def _candidate(name: str, queries: Array, keys: Stored, values: Stored) -> Kernel | str:
    """The kernel of that name, or why it cannot read these arrays. Imports nothing for another library's arrays."""
    library = _KERNELS[name].library
    found = type(keys.array).__module__.partition(".")[0]
    if library is not None and library != found:
        return f"it reads {library} arrays and the cache holds {found} arrays"
    kernel = _loaded.get(name) or _load(name)
    return kernel if isinstance(kernel, str) else kernel.refusal(queries, keys, values) or kernel


def _load(name: str) -> Kernel | str:
    entry = _KERNELS[name]
    try:
        kernel: Kernel | str = getattr(importlib.import_module(entry.module), entry.cls)()
    except ImportError as error:
        kernel = f"it cannot be imported ({error})"
    _loaded[name] = kernel
    return kernel
