"""The core caches behind a transformers cache and its forks: one pool, sequences by number, all members change or none.

A row of a `generate` batch is a sequence. Forks, beams and repeated rows are `copy_prefix`: references, no tensors.

Windowed members (sliding, chunked) are kept small: a pass that brings more tokens than they are made for (a prompt
at once) stores only its *tail* in them, the tokens that some later query can still see; the pass itself attends to
what it brought. What was never stored counts as forgotten, so it cannot be resumed there:

    window 4, a prompt of 20 tokens at once        full member       0 1 2 ... 19
                                                   windowed member   16 17 18 19, the rest forgotten
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import torch

from kvcache.backends import Backend
from kvcache.caches import Cache, CausalCache, EncoderCache, HybridCache, RecurrentCache
from kvcache.errors import CacheFull, NotSupported
from kvcache.hf.layout import Layout
from kvcache.spans import Chunked, Full, Sliding, Span
from kvcache.spec import Batch, Usage

__all__ = ["MAX_WINDOW_BATCH", "NewTokens", "Pool"]

MAX_WINDOW_BATCH = 512
"""Tokens of one pass, for each sequence of the pool, that windowed members with smaller windows store whole."""


MAX_CHECKPOINTS = 4
"""Ends of prompts, for each row, at which states are kept: one for each of the last turns of a conversation."""


class NewTokens(NamedTuple):
    """Tokens that a pass adds to one sequence: positions [begin, end), at least one."""

    sequence: int
    begin: int
    end: int


@final
class Pool:
    """Initialised members of one layout, and the numbers of their sequences. Shared by a cache and its forks."""

    def __init__(
        self,
        layout: Layout,
        members: Sequence[Cache],
        backend: Backend,
        dtype: str | tuple[str, str],
        max_sequences: int,
        capacity: int,
    ) -> None:
        self.layout = layout
        self.capacity = capacity
        self.max_sequences = max_sequences
        self.members = tuple(members)
        self.every = HybridCache(*members)
        self.encoder = EncoderCache()
        self._member_of = tuple(layout.member(i) for i in range(len(layout.layers)))
        self.flush: Callable[[], None] | None = None
        """Writes back the states that the last pass lent; called before anything that reads or changes them."""
        whole = max_sequences * capacity
        self._max_batches = [_max_batch(member, max_sequences, capacity) for member in self.members]
        for member, max_batch in zip(self.members, self._max_batches, strict=True):
            member.init(backend, dtype, max_sequences, capacity, max_batch)
        self.encoder.init(backend, dtype, max_sequences, capacity, whole)
        self._names = (dtype, dtype) if isinstance(dtype, str) else dtype
        self._numbers = itertools.count()
        self._garbage: list[int] = []

    @property
    def states(self) -> RecurrentCache:
        """The member that keeps states. Only where the layout has states."""
        member = self.members[self.layout.state_member]
        assert isinstance(member, RecurrentCache)
        return member

    def member_of(self, layer: int) -> int:
        """The member that keeps the keys and values of a layer."""
        return self._member_of[layer]

    def causal(self, member: int) -> CausalCache:
        """A member that keeps keys and values."""
        cache = self.members[member]
        assert isinstance(cache, CausalCache)
        return cache

    def settle(self) -> None:
        """Write back what the last pass lent, and free what dead forks held."""
        if self.flush is not None:
            flush, self.flush = self.flush, None
            flush()
        if self._garbage:
            garbage, self._garbage = self._garbage, []
            self.free(garbage)

    def discard(self, sequences: Sequence[int]) -> None:
        """Free these sequences when it is next safe: a garbage collector may call this in the middle of a pass."""
        self._garbage += sequences

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether keys and values of this type are stored as they are."""
        names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
        return all(name == names.get(dtype) for name in self._names)

    def new_sequence(self) -> int:
        """A number that no sequence has had."""
        return next(self._numbers)

    # --- passes -------------------------------------------------------------------------------------------------------

    def tails(self, tokens: Sequence[NewTokens]) -> frozenset[int]:
        """The members that will store only the tail of these tokens."""
        total = sum(new.end - new.begin for new in tokens)
        return frozenset(i for i, m in enumerate(self.members) if _is_windowed(m) and total > self._max_batches[i])

    def tail_begin(self, member: int, new: NewTokens) -> int:
        """The first position of `new` that a windowed member stores when it stores the tail."""
        return max(new.begin, _needed_from(self.causal(member).tables.span, new.end))

    def start(self, tokens: Sequence[NewTokens]) -> None:
        """Find places for new tokens in all members, or in none. O(tokens).

        Raises `CacheFull`, or `ValueError` for more tokens than the pool was made for.
        """
        self.settle()
        total = sum(new.end - new.begin for new in tokens)
        if total > self.max_sequences * self.capacity:
            raise ValueError(
                f"one forward brings {total} tokens and the cache holds {self.max_sequences} x {self.capacity}; give "
                f"cache_for a larger capacity, or more max_sequences where rows or beams are the reason"
            )
        tails = self.tails(tokens)
        batch = _batch(tokens)
        effects = [m.prepare_forward(batch) for i, m in enumerate(self.members) if i not in tails]
        for member in tails:
            self._check_room(member, tokens)
        for effect in effects:
            effect()
        for member in tails:
            self._start_tail(member, tokens)

    def _check_room(self, member: int, tokens: Sequence[NewTokens]) -> None:
        """Raise `CacheFull` unless the tails fit once the sequences' own blocks are free."""
        cache = self.causal(member)
        tables, size = cache.tables, cache.block_size
        lengths = [new.end - self.tail_begin(member, new) for new in tokens]
        if sum(lengths) > self._max_batches[member]:
            raise CacheFull(sum(lengths), self._max_batches[member])
        needed = sum(-(-length // size) for length in lengths)
        known = [tables.sequences[new.sequence] for new in tokens if new.sequence in tables.sequences]
        own = sum(tables.pool.references(block) == 1 for table in known for block in table.table.view.tolist())
        if needed > tables.pool.num_free + own:
            raise CacheFull(needed * size, (tables.pool.num_free + own) * size)

    def _start_tail(self, member: int, tokens: Sequence[NewTokens]) -> None:
        cache = self.causal(member)
        stored = [new._replace(begin=self.tail_begin(member, new)) for new in tokens]
        for new in stored:
            cache.remove(new.sequence, 0)
        cache.start_forward(_batch(stored))
        for new in stored:
            if new.begin:
                cache.tables.sequences[new.sequence].forgotten.add(0, new.begin)

    # --- whole sequences ----------------------------------------------------------------------------------------------

    def copy(self, source: int, length: int, num_media: int) -> int:
        """A new sequence that shares the first `length` tokens of `source`, and its media. O(blocks), no tensors."""
        self.settle()
        target = self.new_sequence()
        self.every.copy_prefix(source, target, length)
        if num_media:
            self.encoder.copy_prefix(source, target, num_media)
        return target

    def free(self, sequences: Sequence[int]) -> None:
        """Give back everything that these sequences hold."""
        self.settle()
        for sequence in sequences:
            self.every.remove(sequence, 0)
            self.encoder.remove(sequence, 0)

    def resume_point(self, sequence: int, position: int) -> int:
        """The highest position, `position` at most, from which the sequence can go on."""
        self.settle()
        return self.every.resume_point(sequence, position)

    def cut(self, sequences: Sequence[int], lengths: Sequence[int]) -> None:
        """Shorten sequences to exactly these lengths, all or none. `NotSupported` where one cannot be resumed there."""
        self.settle()
        pairs = list(zip(sequences, lengths, strict=True))
        for sequence, length in pairs:
            point = self.every.resume_point(sequence, length)
            if point != length:
                raise NotSupported(
                    f"a row cannot be cut to {length} tokens: what its layers need there is gone, the nearest point is "
                    f"{point}; a larger `memory` of cache_for retains more"
                )
        effects = [member.prepare_remove(sequence, length) for sequence, length in pairs for member in self.members]
        for effect in effects:
            effect()

    def cut_recorded(
        self, sequences: Sequence[int], lengths: Sequence[int], states: Mapping[int, torch.Tensor]
    ) -> None:
        """As `cut`, with the states [B,...] that rows have after it given: no checkpoint is needed."""
        causal = [member for member in self.members if member is not self.states]
        effects = []
        for sequence, length in zip(sequences, lengths, strict=True):
            if not all(member.can_resume(sequence, length) for member in causal):
                raise NotSupported(f"a row cannot be cut to {length} tokens: what its layers need there is gone")
            effects += [member.prepare_remove(sequence, length) for member in causal]
        for effect in effects:
            effect()
        filled = [row for row, length in enumerate(lengths) if length]
        for row, sequence in enumerate(sequences):
            self.states.remove(sequence, self.states.resume_point(sequence, max(0, lengths[row] - 1)))
        if filled:
            self.states.start_forward(Batch([lengths[row] - 1 for row in filled], [sequences[row] for row in filled]))
            for key, state in states.items():
                self.states.set_layer(key)
                self.states.put(state[filled], None)

    def keep_states(self, sequences: Sequence[int]) -> None:
        """Make checkpoints where these sequences stand, for layers that keep states."""
        if self.layout.has_states:
            for sequence in sequences:
                self.states.keep(sequence, MAX_CHECKPOINTS)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence, forgotten ones included."""
        return self.every.sequence(sequence).seq_len

    def usage(self) -> Usage:
        """What all members hold, media included."""
        self.settle()
        used, media = self.every.usage(), self.encoder.usage()
        return Usage(
            used.num_tokens, used.num_blocks, used.num_free_blocks, used.num_bytes + media.num_bytes, used.sequences
        )

    def check(self) -> None:
        """Raise `CorruptState` unless every member is sound."""
        self.settle()
        self.every.check()
        self.encoder.check()


def _max_batch(member: Cache, max_sequences: int, capacity: int) -> int:
    """Tokens of one pass that a member stores whole. A windowed one must hold at least the tails of all sequences."""
    whole = max_sequences * capacity
    if not (isinstance(member, CausalCache) and _is_windowed(member)):
        return whole
    retained = member.span.resolve(max_sequences).num_retained(capacity)
    return min(whole, max_sequences * max(MAX_WINDOW_BATCH, retained))


def _is_windowed(member: Cache) -> bool:
    return isinstance(member, CausalCache) and not isinstance(member.span, Full)


def _needed_from(span: Span, end: int) -> int:
    """The first position worth keeping: what queries from `end` on see, and what rewinding may need."""
    match span:
        case Sliding(window, memory):
            return max(0, end - (memory or window))
        case Chunked(size):
            return (end - 1) - (end - 1) % size
    return 0


def _batch(tokens: Sequence[NewTokens]) -> Batch:
    """The batch of these tokens, sequence after sequence."""
    if all(new.end - new.begin == 1 for new in tokens):
        return Batch([new.begin for new in tokens], [new.sequence for new in tokens])
    positions: list[int] = []
    sequences: list[int] = []
    for new in tokens:
        positions += range(new.begin, new.end)
        sequences += [new.sequence] * (new.end - new.begin)
    return Batch(positions, sequences)
