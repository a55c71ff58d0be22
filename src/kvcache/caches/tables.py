"""The sequences of one cache over its pool: who holds which block, who must copy, what is forgotten. No tensors.

Every change is planned first: a plan has counted the blocks that it frees and takes, so applying it cannot fail.

    plan(groups)            the batch's tokens by sequence -> Plan, or CacheFull
        forget              whole blocks that the span has outgrown, of resting sequences too
        place               room in the last block (copied first if it is shared), then free blocks, then holes
    apply(plan)             -> the slot of every token, and the block copies that the storage must make

Holes (left by a removal inside a block) come last and only when the pool is short, because filling them puts a
sequence's slots out of order; nothing is lost to them, though.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Indices
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from kvcache.blocks import BlockPool
from kvcache.errors import CacheFull, NotSupported
from kvcache.sequences import Sequence
from kvcache.spans import Span
from kvcache.spec import SequenceUsage

__all__ = ["Applied", "Plan", "Removal", "Tables"]

_NO_SLOTS = np.empty(0, np.int64)


@dataclass(slots=True)
class _Step:
    """What a plan does to one sequence.

    `positions` are those of the tokens to come; none: it rests. Table indices count before `drops`.
    """

    sequence: int
    table: Sequence
    drops: Indices[int]
    positions: Indices[int]
    holes: NDArray[np.int64]
    copy_tail: bool = False
    claim_tail: bool = False
    num_new_blocks: int = 0


@dataclass(slots=True)
class Plan:
    """A change to the tables that is known to fit. `pending`: the new slots are taken, not yet tokens."""

    steps: list[_Step]
    settled: set[int]
    pending: bool


class Applied(NamedTuple):
    """Slots of the new tokens by sequence, in the order of their positions in the plan; and the blocks to copy."""

    slots: dict[int, NDArray[np.int64] | int]
    sources: list[int]
    targets: list[int]


class Removal(NamedTuple):
    """A planned `remove`: the range, and the slots whose keys must be shifted, in table order."""

    sequence: int
    begin: int
    end: int
    later: NDArray[np.int64]


@final
class Tables:
    """All sequences of one cache. `span` is resolved; block ids are those of `pool`."""

    __slots__ = ("_unsettled", "block_size", "pool", "sequences", "span")

    def __init__(self, span: Span, block_size: int, num_blocks: int) -> None:
        self.span = span
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.sequences: dict[int, Sequence] = {}
        self._unsettled: set[int] = set()  # sequences that changed since their outgrown blocks were last looked for

    # --- a batch ------------------------------------------------------------------------------------------------------

    def plan(self, groups: Mapping[int, Indices[int]], *, pending: bool = False) -> Plan:
        """Plan places for tokens at `groups[sequence]`. O(tokens + blocks freed) for dense sequences.

        With `pending`, positions are placeholders: forgetting goes by each sequence's end. Raises `CacheFull`.
        """
        released: Counter[int] = Counter()
        resting = self._unsettled - groups.keys()
        steps = [self._forget(sequence, (), self.sequences[sequence].end) for sequence in resting] if resting else []
        for sequence, positions in groups.items():
            table = self.sequences.get(sequence)
            lowest = min(positions) if not pending else table.end if table else 0
            steps.append(self._forget(sequence, positions, lowest))
        num_free = self.pool.num_free
        for step in steps:
            for index in step.drops:
                num_free += self._release_one(step.table.table[index], released)
        shared = dict(released)
        needed = sum(self._place(step, released, use_holes=False) for step in steps)
        if needed > num_free:
            needed = sum(self._place(step, Counter(shared), use_holes=True) for step in steps)
            if needed > num_free:
                raise CacheFull(needed * self.block_size, num_free * self.block_size)
        return Plan(steps, resting, pending)

    def apply(self, plan: Plan) -> Applied:
        """Carry out a plan made from the present state."""
        applied = Applied({}, [], [])
        for step in plan.steps:  # all that is freed first: the plan counts on it
            if step.drops:
                self.pool.release(step.table.drop_blocks(step.drops))
        self._unsettled -= plan.settled
        for step in plan.steps:
            if len(step.positions):
                self.sequences[step.sequence] = step.table
                self._unsettled.add(step.sequence)
                applied.slots[step.sequence] = self._take(step, plan.pending, applied)
            if step.drops and not step.table.is_dense:  # the block that is last now may end in holes
                self.pool.release(step.table.compact())
        return applied

    def settle(self) -> None:
        """Free what the span has outgrown in all sequences. O(sequences + blocks freed)."""
        self.apply(self.plan({}))

    def _forget(self, sequence: int, positions: Indices[int], lowest: int) -> _Step:
        table = self.sequences.get(sequence) or Sequence(self.block_size)
        return _Step(sequence, table, table.forgettable_blocks(self.span.retained_from(lowest)), positions, _NO_SLOTS)

    def _release_one(self, block: int, released: Counter[int]) -> int:
        """Count one reference less; 1 when that frees the block."""
        if self.pool.references(block) == 1:
            return int(self.pool.is_freed(block))
        released[block] += 1
        return int(self.pool.is_freed(block, released[block]))

    def _place(self, step: _Step, released: Counter[int], *, use_holes: bool) -> int:
        """Decide where a step's tokens go; the number of blocks that this takes."""
        count = len(step.positions)
        if not count:
            return 0
        table = step.table
        if use_holes:
            step.holes = self._writable_holes(step)[:count]
            count -= len(step.holes)
        has_tail = len(table.table) > 0 and not (step.drops and step.drops[-1] == len(table.table) - 1)
        room = table.tail_room if has_tail else 0
        step.copy_tail = step.claim_tail = False
        if room and count:
            tail = table.table[len(table.table) - 1]
            is_published = self.pool.is_published(tail)
            # A published tail of our own is copied too, so that others find it; when the pool is short, we write to it.
            may_claim = use_holes and not self.pool.is_pinned(tail)
            step.copy_tail = self.pool.references(tail) - released[tail] > 1 or (is_published and not may_claim)
            step.claim_tail = is_published and not step.copy_tail
            released[tail] += step.copy_tail
        step.num_new_blocks = max(0, -(-(count - room) // self.block_size))
        return step.num_new_blocks + step.copy_tail

    def _writable_holes(self, step: _Step) -> NDArray[np.int64]:
        """Empty slots inside blocks that this sequence alone names, as indices after the step's drops."""
        holes = step.table.holes()
        if not len(holes):
            return _NO_SLOTS
        table = step.table.table
        pool = self.pool
        mine = np.array([pool.references(b) == 1 and not pool.is_published(b) for b in table.view.tolist()])
        mine[list(step.drops)] = False
        blocks = holes // self.block_size
        shift = np.searchsorted(np.asarray(step.drops, np.int64), blocks) * self.block_size
        writable: NDArray[np.int64] = (holes - shift)[mine[blocks]]
        return writable

    def _take(self, step: _Step, pending: bool, applied: Applied) -> NDArray[np.int64] | int:
        table = step.table
        if step.copy_tail:
            self._make_own(table, len(table.table) - 1, applied)
        elif step.claim_tail:
            self.pool.unpublish(table.table[len(table.table) - 1])
        if step.num_new_blocks:
            table.table.extend(self.pool.allocate(step.num_new_blocks))
        num_holes = len(step.holes)
        begin, rest = table.num_slots, step.positions[num_holes:]
        if len(rest) == 1 and not num_holes and not pending:  # decode: no arrays
            table.append(rest)
            return table.table[len(table.table) - 1] * self.block_size + begin % self.block_size
        if pending:
            table.pending.extend(int(i) for i in step.holes)
            table.append_pending(len(rest))
        elif len(rest):
            table.append(rest)
        if num_holes and not pending:
            table.fill(step.holes, step.positions[:num_holes])
        indices = np.arange(begin, begin + len(rest), dtype=np.int64)
        return table.slots(np.concatenate([step.holes, indices]) if num_holes else indices)

    def _make_own(self, table: Sequence, index: int, applied: Applied) -> None:
        """Give a table entry a block of its own in place of a shared one."""
        source = table.table[index]
        (target,) = self.pool.allocate(1)
        self.pool.release((source,))
        table.table[index] = target
        applied.sources.append(source)
        applied.targets.append(target)

    # --- appended tokens ----------------------------------------------------------------------------------------------

    def commit(self, sequence: int, num_tokens: int) -> None:
        """The first `num_tokens` pending slots become tokens after the end; the others are given back. O(slots)."""
        table = self.sequences[sequence]
        indices = np.asarray(table.pending[:num_tokens], np.int64)
        table.pending = []
        table.appended = {}
        if num_tokens:
            table.fill(indices, range(table.end, table.end + num_tokens))
        self.pool.release(table.compact())
        self._unsettled.add(sequence)
        self._drop_if_empty(sequence)

    # --- content-keyed blocks -----------------------------------------------------------------------------------------

    def publish(self, sequence: int, index: int, key: bytes, priority: int) -> bool:
        """Name the block of positions from `index * block_size` on; false where there is no such block. O(1)."""
        table = self.sequences.get(sequence)
        if table is None or not table.is_dense or not table.num_slots or table.positions[0] % self.block_size:
            return False  # its blocks do not begin at multiples of the block size: they are nobody else's
        entry = index - table.positions[0] // self.block_size
        return 0 <= entry < len(table.table) and self.pool.publish(table.table[entry], key, priority)

    def adopt(self, sequence: int, keys: Indices[bytes], begin: int, end: int) -> None:
        """A new sequence of the tokens [begin, end) in the blocks of `keys`. O(end - begin)."""
        if sequence in self.sequences:
            raise ValueError(f"sequence {sequence} exists already; remove it before it adopts a prefix")
        blocks = [self.pool.find(key) for key in keys]
        found = [block for block in blocks if block is not None]
        if (
            len(found) != len(keys)
            or len(keys) != -(-(end - begin) // self.block_size)
            or (begin < end and begin % self.block_size)
        ):
            raise ValueError(
                f"[{begin}, {end}) takes blocks of {self.block_size} from a multiple of it on, all published; "
                f"{len(found)} of {len(keys)} are"
            )
        self.pool.share(found)
        self.sequences[sequence] = Sequence.resumed(self.block_size, found, begin, end)
        self._unsettled.add(sequence)

    # --- prefixes and removals ----------------------------------------------------------------------------------------

    def can_resume(self, sequence: int, position: int) -> bool:
        """See `Cache.can_resume`. O(1)."""
        if position == 0:
            return True
        table = self.sequences.get(sequence)
        if table is None or position > table.end:
            return False
        return not table.forgotten.overlaps(max(0, self.span.begin(position)), position)

    def resume_point(self, sequence: int, position: int) -> int:
        """See `Cache.resume_point`. O(1)."""
        table = self.sequences.get(sequence)
        position = min(position, table.end if table else 0)
        # A window that cannot be filled here cannot be filled below; a chunk can always be begun anew.
        return next((p for p in (position, max(0, self.span.begin(position))) if self.can_resume(sequence, p)), 0)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """See `Cache.copy_prefix`. O(slots of the source)."""
        table = self.sequences.get(source)
        copy = table.prefix(length) if table else None
        if copy:
            self.pool.share(copy.table.view.tolist())
        self.free(target)
        if copy and copy.end:
            self.sequences[target] = copy
            self._unsettled.add(target)

    def plan_removal(self, sequence: int, begin: int, end: int | None, *, can_shift: bool) -> Removal | None:
        """Plan to take [begin, end) out; `None` when that changes nothing. Raises `NotSupported` or `CacheFull`."""
        table = self.sequences.get(sequence)
        if table is None or begin >= table.end or begin == end:
            return None
        end = table.end if end is None else min(end, table.end)
        later = table.indices_between(end, table.end)
        new_end = table.end - (end - begin)
        seen_from = max(0, self.span.begin(new_end))
        if table.forgotten.without(begin, end).overlaps(seen_from, new_end):
            raise NotSupported(
                f"removing [{begin}, {end}) of sequence {sequence} leaves a query at {new_end} that sees positions "
                f"from {seen_from} on, and some of those were forgotten ({self.span}); remove the whole sequence and "
                f"recompute it, or retain more (Sliding's memory)"
            )
        if len(later):
            if not can_shift:
                raise NotSupported(
                    f"removing [{begin}, {end}) of sequence {sequence} moves {len(later)} later tokens and this cache "
                    "has no shift function; give CausalCache a shift, or remove to the end and recompute"
                )
            self._check_room_to_move(table, begin, end, later)
        return Removal(sequence, begin, end, later)

    def apply_removal(self, removal: Removal) -> Applied:
        """Carry out a planned removal. `slots`: where the later tokens lie now, in the order of `later`."""
        table = self.sequences[removal.sequence]
        applied = Applied({}, [], [])
        self.pool.release(table.erase(removal.begin, removal.end))
        if len(removal.later):
            later = table.indices_between(removal.begin, table.end)
            for index in np.unique(later // self.block_size):
                if self._is_others(table.table[int(index)]):
                    self._make_own(table, int(index), applied)
                else:
                    self.pool.unpublish(table.table[int(index)])
            applied.slots[removal.sequence] = table.slots(later)
        self._unsettled.add(removal.sequence)
        self._drop_if_empty(removal.sequence)
        return applied

    def _check_room_to_move(self, table: Sequence, begin: int, end: int, later: NDArray[np.int64]) -> None:
        """Shared blocks among the later ones are copied; blocks that the removal empties make room for that."""
        positions = table.positions.view
        kept = np.flatnonzero((positions >= 0) & ((positions < begin) | (positions >= end))) // self.block_size
        emptied = set(range(len(table.table))) - set(kept.tolist())
        num_free = self.pool.num_free + sum(self.pool.is_freed(table.table[i]) for i in emptied)
        needed = sum(self._is_others(table.table[int(i)]) for i in np.unique(later // self.block_size))
        if needed > num_free:
            raise CacheFull(needed * self.block_size, num_free * self.block_size)

    def _is_others(self, block: int) -> bool:
        """Whether somebody else needs what is in a block of ours: another sequence, or who pinned it."""
        return self.pool.references(block) > 1 or self.pool.is_pinned(block)

    def free(self, sequence: int) -> None:
        """Give back everything that a sequence holds. Unknown sequences are fine."""
        table = self.sequences.pop(sequence, None)
        self._unsettled.discard(sequence)
        if table:
            self.pool.release(table.table.view.tolist())

    def _drop_if_empty(self, sequence: int) -> None:
        table = self.sequences[sequence]
        if not table.end and not table.num_slots:
            self.free(sequence)

    # --- telling and proving ------------------------------------------------------------------------------------------

    def usage(self) -> dict[int, SequenceUsage]:
        """Tokens and blocks of every sequence."""
        return {key: SequenceUsage(table.num_tokens, len(table.table)) for key, table in self.sequences.items()}

    def check(self) -> None:
        """Raise `CorruptState` unless tables and pool agree. O(slots)."""
        for table in self.sequences.values():
            table.check()
        self.pool.check(Counter(chain.from_iterable(table.table.view.tolist() for table in self.sequences.values())))
