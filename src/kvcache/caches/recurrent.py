"""`RecurrentCache`: one state per sequence and layer, for convolution, SSM and linear-attention layers.

A state has no tokens to look back at: it can be continued where it stands, or from a *checkpoint*, a state that was
kept on the way. What is put and what `get` returns are copies, so nobody else writes to a stored state: checkpoints and
forks are references.

    RecurrentCache(checkpoints=256)            keep the state whenever a pass ends at a multiple of 256
    RecurrentCache(checkpoints=[100, 2048])    or at these positions

A pass puts one row per sequence of the batch, in the order in which the sequences appear in it:

    start_forward(Batch([5, 6, 9], [7, 7, 3]))
    get()        -> History(conv [2,...], recurrent [2,...], None), the states before this pass; None where none is yet
    put(conv [2,...], recurrent [2,...])       either may be None
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, final

from kvcache import backends, formats
from kvcache.backends import Backend
from kvcache.caches import Cache
from kvcache.caches.forward import group_rows
from kvcache.caches.lifecycle import Lifecycle, check_copy, check_range, check_sequence
from kvcache.caches.published import Published
from kvcache.caches.tokenless_view import TokenlessView
from kvcache.errors import CorruptState, NotSupported
from kvcache.spec import Array, Batch, CacheConfig, History, SequenceUsage, Usage, integer
from kvcache.views import SequenceView

__all__ = ["RecurrentCache"]

_States: TypeAlias = dict[int, tuple[Array | None, Array | None]]
"""Per layer the convolution state and the recurrent state of one sequence, each [...] or `None`."""


PublishedStates: TypeAlias = Published[bytes, _States]


@dataclass(slots=True)
class _Sequence:
    """`live` is the state after `end` tokens; `None` when the sequence was cut where no state was kept."""

    end: int = 0
    live: _States | None = field(default_factory=dict)
    checkpoints: dict[int, _States] = field(default_factory=dict)

    def state_at(self, position: int) -> _States | None:
        return self.live if position == self.end and self.live is not None else self.checkpoints.get(position)


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    batch: Batch
    sequences: tuple[int, ...]
    before: tuple[_States, ...]
    is_reserved: bool


@final
class RecurrentCache(Cache):
    """States, and checkpoints of them. A state keeps the element type it is put in: an error in it would add up.

    The first put into a layer says which shapes its states have.

    checkpoints: an interval in tokens, or positions; the state is kept when a pass ends exactly there.
    """

    def __init__(self, checkpoints: int | Iterable[int] = ()) -> None:
        if isinstance(checkpoints, Iterable):
            chosen = frozenset(integer(p, "a position in checkpoints", minimum=1) for p in checkpoints)
            self._is_checkpoint: Callable[[int], bool] = chosen.__contains__
        else:
            interval = integer(checkpoints, "checkpoints", minimum=1)
            self._is_checkpoint = lambda position: position % interval == 0
        self._lifecycle = Lifecycle()
        self._layer: int | None = None
        self._pass: _Pass | None = None
        self._sequences: dict[int, _Sequence] = {}
        self._shapes: dict[tuple[int, str], tuple[int, ...]] = {}  # of each layer's states of either kind
        self._published: PublishedStates = Published()
        self._backend: Backend

    # --- for models ---------------------------------------------------------------------------------------------------

    def set_layer(self, layer: int) -> None:
        self._lifecycle.check_open()
        self._layer = integer(layer, "layer")

    def put(self, keys: Array | None, values: Array | None) -> None:
        """Keep the convolution and the recurrent states after this pass, one row per sequence of the batch each."""
        current, layer = self._started()
        given = {"convolution states": keys, "recurrent states": values}
        rows = [None if array is None else self._backend.asarray(array, layer, what) for what, array in given.items()]
        shapes = {}
        for what, array in zip(given, rows, strict=True):
            if array is None:
                continue
            if not len(array.shape) or array.shape[0] != len(current.sequences):
                raise ValueError(
                    f"states are {list(array.shape)}; expected {len(current.sequences)} rows, one per sequence of the "
                    f"batch"
                )
            shape = shapes[layer, what] = tuple(array.shape[1:])
            if shape != (known := self._shapes.get((layer, what), shape)):
                raise ValueError(
                    f"{what} are {list(array.shape)}; expected rows of {list(known)}, the first that layer {layer} got"
                )
        if not shapes:
            raise ValueError("put got no states; expected convolution states, recurrent states or both")
        if current.is_reserved:
            return
        owned = [
            [None if array is None else self._own(array, row) for array in rows]
            for row in range(len(current.sequences))
        ]
        self._shapes.update(shapes)  # nothing fails from here on
        for (conv, recurrent), sequence in zip(owned, current.sequences, strict=True):
            live = self._sequences[sequence].live
            assert live is not None  # start_forward has made it
            live[layer] = (conv, recurrent)

    def get(self) -> History:
        """States before this pass, one row per sequence, the caller's to change; a sequence without one gets zeros.

        `None` when none has any.
        """
        current, layer = self._started()
        states = [self._now(current, row, layer) for row in range(len(current.sequences))]
        return History(self._stacked([s[0] for s in states], layer), self._stacked([s[1] for s in states], layer), None)

    def attend(
        self, queries: Array, *, scale: float | None = None, softcap: float | None = None, sinks: Array | None = None
    ) -> Array:
        raise NotSupported("a recurrent state cannot be attended to; read it with get")

    def prepare_config(self, config: CacheConfig) -> Callable[[], None]:
        return self._lifecycle.prepare_config(config)

    # --- for whoever manages the cache --------------------------------------------------------------------------------

    def init(
        self,
        backend: str | Backend,
        dtype: str | tuple[str, str],
        max_sequences: int = 1,
        capacity: int | None = None,
        max_batch: int | None = None,
    ) -> None:
        self.prepare_init(backend, dtype, max_sequences, capacity, max_batch)()

    def prepare_init(
        self,
        backend: str | Backend,
        dtype: str | tuple[str, str],
        max_sequences: int = 1,
        capacity: int | None = None,
        max_batch: int | None = None,
    ) -> Callable[[], None]:
        arrays = backends.create(backend)
        limits = self._lifecycle.prepare(arrays, max_sequences, capacity, max_batch)
        formats.pair(dtype, arrays)  # unknown names raise here as everywhere

        def effect() -> None:
            self._backend = arrays
            self._lifecycle.begin(limits)

        return effect

    def close(self) -> None:
        self._lifecycle.is_closed = True
        self._pass = None
        self._sequences.clear()
        self._published.clear()

    def prepare_forward(self, batch: Batch, reserve: bool = False) -> Callable[[], None]:
        self._lifecycle.limits.check_pass(batch, reserve)
        rows = group_rows(batch)
        before: list[_States] = []
        for sequence, own in rows.items():
            known = self._sequences.get(sequence, _Sequence())
            begin = min(batch.positions[row] for row in own)
            if not reserve and (known.live is None or begin < known.end):
                raise ValueError(
                    f"sequence {sequence} continues at {begin} and its state stands "
                    f"{'nowhere' if known.live is None else f'at {known.end}'}; remove to a position where can_resume "
                    f"holds first"
                )
            before.append(dict(known.live or {}))
        current = _Pass(batch, tuple(rows), tuple(before), reserve)

        def effect() -> None:
            self._pass = current
            if reserve:
                return
            for sequence, states in zip(current.sequences, before, strict=True):
                known = self._sequences.setdefault(sequence, _Sequence())
                if known.end and self._is_checkpoint(known.end):
                    known.checkpoints[known.end] = states
                known.live = dict(states)
                known.end = max(batch.positions[row] for row in rows[sequence]) + 1

        return effect

    def prepare_copy(self, source: int, target: int, length: int) -> Callable[[], None]:
        self._lifecycle.check_open()
        source, target, length = check_copy(source, target, length)

        def effect() -> None:
            self._pass = None
            known = self._sequences.get(source)
            self._sequences.pop(target, None)
            if known and min(known.end, length):
                self._sequences[target] = self._cut(known, min(known.end, length))

        return effect

    def can_resume(self, sequence: int, position: int) -> bool:
        self._lifecycle.check_open()
        position, known = integer(position, "position"), self._sequences.get(check_sequence(sequence))
        if position == 0:
            return True
        return known is not None and known.state_at(position) is not None

    def resume_point(self, sequence: int, position: int) -> int:
        self._lifecycle.check_open()
        position, known = integer(position, "position"), self._sequences.get(check_sequence(sequence))
        if known is None:
            return 0
        live = {known.end} if known.live is not None else set()
        return max((point for point in known.checkpoints.keys() | live if point <= position), default=0)

    def stopping_point(self, sequence: int, position: int) -> int:
        return self.resume_point(sequence, position)

    def prepare_remove(
        self, sequence: int, begin: int, end: int | None = None, *, drop_appended: bool = False
    ) -> Callable[[], None]:
        self._lifecycle.check_open()
        sequence, begin, end = check_range(sequence, begin, end)
        known = self._sequences.get(sequence)
        if known is None or begin >= known.end or begin == end:
            return lambda: None
        if end is not None and end < known.end:
            raise NotSupported(
                f"[{begin}, {end}) lies inside sequence {sequence}, which ends at {known.end}; a recurrent state "
                "cannot forget tokens in its middle: remove to the end and recompute"
            )
        point = self.stopping_point(sequence, begin)
        if begin and not point:
            raise NotSupported(
                f"sequence {sequence} has no checkpoint at or below {begin} (it has {sorted(known.checkpoints)}); "
                "remove the whole sequence and recompute it, or keep more checkpoints"
            )

        def effect() -> None:
            self._pass = None
            if point:
                self._sequences[sequence] = self._cut(known, point)
            else:
                del self._sequences[sequence]

        return effect

    def sequence(self, sequence: int) -> SequenceView:
        self._lifecycle.check_open()
        return TokenlessView(check_sequence(sequence), self._lifecycle, self, "RecurrentCache")

    def keep(self, sequence: int, at_most: int) -> None:
        """Make the state where `sequence` stands a checkpoint, now; of its lowest ones none beyond `at_most` stay."""
        self._lifecycle.check_open()
        known = self._sequences.get(sequence)
        if known is None or known.live is None or not known.end:
            return
        known.checkpoints[known.end] = dict(known.live)
        for point in sorted(known.checkpoints)[: -integer(at_most, "at_most", minimum=1)]:
            del known.checkpoints[point]

    # --- for prefix reuse: states that are known by what they come after ----------------------------------------------

    @property
    def published(self) -> PublishedStates:
        """The states that `adopt` can start from."""
        return self._published

    def publish(self, sequence: int, key: bytes, priority: int = 0) -> bool:
        """Let others go on from where `sequence` stands, by `key`; false when they can already."""
        self._lifecycle.check_open()
        known = self._sequences.get(sequence)
        if known is None or not known.live or key in self._published:
            return False
        states = dict(known.live)
        self._published.add(key, states, sum(self._num_bytes(states)), priority)
        return True

    def adopt(self, sequence: int, key: bytes, end: int) -> None:
        """A new sequence that stands at `end`, in the published state of `key`; `ValueError` when there is none."""
        self._lifecycle.check_open()
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} exists already; remove it before it adopts a state")
        self._pass = None
        self._sequences[sequence] = _Sequence(end, dict(self._published.use(key)))

    def usage(self) -> Usage:
        self._lifecycle.check_open()
        arrays = {
            id(array): array
            for states in (
                *(s for known in self._sequences.values() for s in (known.live or {}, *known.checkpoints.values())),
                *self._published.values(),
            )
            for pair in states.values()
            for array in pair
            if array is not None
        }
        num_bytes = sum(self._backend.num_bytes(array) for array in arrays.values())
        sequences = {key: SequenceUsage(known.end, 0) for key, known in self._sequences.items()}
        return Usage(sum(used.num_tokens for used in sequences.values()), 0, 0, num_bytes, sequences)

    def check(self) -> None:
        self._lifecycle.check_open()
        for sequence, known in self._sequences.items():
            if wrong := [point for point in known.checkpoints if not 0 < point <= known.end]:
                raise CorruptState(f"sequence {sequence} ends at {known.end} and has checkpoints at {wrong}")

    # --- for its views ------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> Backend:
        self._lifecycle.check_open()
        return self._backend

    def end(self, sequence: int) -> int:
        """The position after the sequence's last token; 0 when it is unknown."""
        self._lifecycle.check_open()
        known = self._sequences.get(sequence)
        return known.end if known else 0

    def layers(self) -> set[int]:
        """Layers that hold a state."""
        return {layer for known in self._sequences.values() for layer in known.live or ()}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _started(self) -> tuple[_Pass, int]:
        self._lifecycle.check_open()
        if self._pass is None:
            raise ValueError("no forward pass is under way; call start_forward first")
        if self._layer is None:
            raise ValueError("no layer is active; call set_layer first")
        return self._pass, self._layer

    def _own(self, states: Array, row: int) -> Array:
        """A copy of one row of [B,...]: it must not keep the others alive, nor change when the caller's array does."""
        return self._backend.concatenate((states[row : row + 1],), 0)[0]

    def _num_bytes(self, states: _States) -> Iterable[int]:
        return (self._backend.num_bytes(array) for pair in states.values() for array in pair if array is not None)

    def _cut(self, known: _Sequence, end: int) -> _Sequence:
        """A sequence that shares the states up to `end`."""
        state = known.state_at(end)
        checkpoints = {point: states for point, states in known.checkpoints.items() if point <= end}
        if state is not None and self._is_checkpoint(end):
            checkpoints[end] = state
        return _Sequence(end, None if state is None else dict(state), checkpoints)

    def _now(self, current: _Pass, row: int, layer: int) -> tuple[Array | None, Array | None]:
        live = current.before[row] if current.is_reserved else self._sequences[current.sequences[row]].live
        return (live or {}).get(layer, (None, None))

    def _stacked(self, states: list[Array | None], layer: int) -> Array | None:
        known = next((state for state in states if state is not None), None)
        if known is None:
            return None
        if any(state is None for state in states):
            zeros = self._backend.zeros(tuple(known.shape), "f32", layer)
            zero: Array = self._backend.cast(zeros, self._backend.dtype(known))
            states = [zero if state is None else state for state in states]
        rows: list[Array] = [state[None] for state in states if state is not None]
        return self._backend.concatenate(rows, 0)
