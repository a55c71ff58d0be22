"""A dictionary of everything: what one causal cache must answer, written from section 4 of the design and nothing else.

The oracle keeps every token that was ever put, as an object. Two sequences that name the same object share a slot; a
key that was shifted in one of them is another object with the same `uid`. A token is in one of four places:

| list      | meaning                                                                                        |
|-----------|------------------------------------------------------------------------------------------------|
| `stored`  | must be there: queries that may see it do see it                                               |
| `fading`  | forgotten, but perhaps still in a block that others keep; resolved by looking (`resolve`)      |
| `gone`    | forgotten for good; only the position is known                                                 |
| `pending` | appended by the sequence's own face and not committed yet                                      |

With blocks of one slot forgetting is exact and nothing fades. Nothing here knows blocks, tables or tensors; costs are
linear or worse on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvcache import Chunked, Full, Sliding


@dataclass(eq=False, slots=True)
class Token:
    """One slot: equal only to itself. `shift` is what was added to its key so far."""

    uid: int
    position: int
    shift: int = 0

    @property
    def shown(self) -> tuple[int, int]:
        """What can be recognised from outside: whose payload it is, and how far its key was moved."""
        return self.uid, self.shift


@dataclass(slots=True)
class Story:
    """Everything about one sequence."""

    stored: list[Token] = field(default_factory=list)
    fading: list[Token] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    pending: list[Token] = field(default_factory=list)
    end: int = 0

    def positions(self) -> list[int]:
        return sorted([t.position for t in self.stored] + [t.position for t in self.fading] + self.gone)

    @property
    def is_dense(self) -> bool:
        """Positions 0, 1, 2, ... without gaps or repeats."""
        return self.positions() == list(range(self.end))


class Oracle:
    """One cache: a span, a block size, a pool of `num_slots`, and the stories of its sequences."""

    def __init__(self, span: object, *, block_size: int, num_slots: int, max_sequences: int, can_shift: bool) -> None:
        self.span = span
        self.block_size = block_size
        self.num_slots = num_slots
        self.can_shift = can_shift
        self.memory = 0
        if isinstance(span, Sliding):
            self.memory = span.memory or span.window + (1 if max_sequences > 1 else 0)
        self.stories: dict[int, Story] = {}
        self.num_tokens_ever = 0

    # --- the span, in its own words ---------------------------------------------------------------------------------

    def first_seen(self, position: int) -> int:
        """The lowest position that a query sees."""
        match self.span:
            case Full():
                return 0
            case Sliding():
                return max(0, position - self.span.window + 1)
            case Chunked():
                return position - position % self.span.size
        raise AssertionError(self.span)

    def first_kept(self, position: int) -> int:
        """Positions below are forgotten when `position` is the lowest of a batch, or the end of a resting sequence."""
        match self.span:
            case Full():
                return 0
            case Sliding():
                return max(0, position - self.memory + 1)
            case Chunked():
                return position - position % self.span.size
        raise AssertionError(self.span)

    # --- questions --------------------------------------------------------------------------------------------------

    def story(self, sequence: int) -> Story:
        """The story of a sequence; an empty one, not kept, for a stranger."""
        return self.stories.get(sequence) or Story()

    def visible(self, sequence: int, position: int, *, is_causal: bool = True) -> list[Token]:
        """What a query at `position` sees."""
        first = self.first_seen(position)
        return [
            t for t in self.story(sequence).stored if t.position >= first and (t.position <= position or not is_causal)
        ]

    def can_resume(self, sequence: int, position: int) -> bool | None:
        """True, False, or `None` where a needed token has faded and nobody has looked yet."""
        story = self.story(sequence)
        if position == 0:
            return True
        if position > story.end:
            return False
        return self._is_whole(story, position)

    def _is_whole(self, story: Story, end: int) -> bool | None:
        """Whether all that a query at `end` sees below `end` is there."""
        first = self.first_seen(end)
        if any(first <= position < end for position in story.gone):
            return False
        if any(first <= token.position < end for token in story.fading):
            return None
        return True

    def slots(self, *, with_fading: bool = True) -> set[Token]:
        """Every occupied slot, a shared one once."""
        stories = self.stories.values()
        occupied = {t for story in stories for t in [*story.stored, *story.pending]}
        return occupied | {t for story in stories for t in story.fading} if with_fading else occupied

    def needed_after_forgetting(self, lowest: dict[int, int]) -> tuple[int, int]:
        """How many slots a pass releases, at least and at most, when the sequences of `lowest` take part in it."""
        before = self.slots()
        kept: set[Token] = set()
        faded: set[Token] = set()
        for sequence, story in self.stories.items():
            first = self.first_kept(lowest.get(sequence, story.end))
            kept |= {t for t in story.stored if t.position >= first} | set(story.pending)
            faded |= {t for t in story.fading if t.position >= first or story.pending}
            faded |= set(story.stored if story.pending else ())
        return len(before) - len(kept | faded), len(before) - len(kept)

    # --- what changes it --------------------------------------------------------------------------------------------

    def forget(self, lowest: dict[int, int], unsure: dict[int, int] | None = None) -> None:
        """A pass begins. A sequence with appended tokens may wait with forgetting until they are committed.

        `unsure`: sequences that may forget up to this higher bound (a second append before the commit).
        """
        for sequence, story in self.stories.items():
            first = self.first_kept(lowest.get(sequence, story.end))
            leaving = [t for t in story.stored if t.position < first]
            story.stored = [t for t in story.stored if t.position >= first]
            if self.block_size == 1 and not story.pending:
                story.gone += [t.position for t in leaving]
            else:
                story.fading += leaving
            if unsure and sequence in unsure:
                first = self.first_kept(unsure[sequence])
                story.fading += [t for t in story.stored if t.position < first]
                story.stored = [t for t in story.stored if t.position >= first]

    def new_tokens(self, positions: Iterable[int]) -> list[Token]:
        tokens = [Token(self.num_tokens_ever + i, p) for i, p in enumerate(positions)]
        self.num_tokens_ever += len(tokens)
        return tokens

    def forward(self, positions: Sequence[int], sequences: Sequence[int]) -> list[Token]:
        """A pass over a batch; its tokens, row by row."""
        lowest = {s: min(p for p, q in zip(positions, sequences, strict=True) if q == s) for s in sequences}
        self.forget(lowest)
        tokens = self.new_tokens(positions)
        for token, sequence in zip(tokens, sequences, strict=True):
            story = self.stories.setdefault(sequence, Story())
            story.stored.append(token)
            story.end = max(story.end, token.position + 1)
        return tokens

    def append(self, sequence: int, count: int) -> list[Token]:
        """Tokens after the committed end, in all layers, not committed."""
        story = self.stories.setdefault(sequence, Story())
        start = story.end + len(story.pending)
        self.forget({sequence: story.end}, unsure={sequence: start} if story.pending else None)
        tokens = self.new_tokens(range(start, start + count))
        story.pending += tokens
        return tokens

    def commit(self, sequence: int, count: int) -> None:
        story = self.stories[sequence]
        story.stored += story.pending[:count]
        story.pending = []
        story.end += count

    def copy_prefix(self, source: int, target: int, length: int) -> set[int]:
        """The possible ends of the target afterwards (one, unless there are gaps)."""
        old = self.story(source)
        new = Story(
            stored=[t for t in old.stored if t.position < length],
            fading=[t for t in old.fading if t.position < length],
            gone=[p for p in old.gone if p < length],
            end=min(length, old.end),
        )
        ends = self._possible_ends(new, new.end, old.is_dense)
        self.stories.pop(target, None)
        if new.end:
            self.stories[target] = new
        return ends

    def _possible_ends(self, story: Story, end: int, is_dense: bool) -> set[int]:
        positions = story.positions()
        return {end} if is_dense else {end, positions[-1] + 1 if positions else 0}

    def plan_removal(self, sequence: int, begin: int, end: int | None) -> Removal:
        """What a removal must do, without doing it."""
        old = self.story(sequence)
        stop = old.end if end is None else min(end, old.end)
        if begin >= stop:
            return Removal(new=None, ends={old.end}, outcomes={"ok"}, num_moved=0)
        is_tail = stop == old.end
        delta = 0 if is_tail else stop - begin
        new_end = begin if is_tail else old.end - delta

        def moved(token: Token) -> Token:
            return token if token.position < begin else Token(token.uid, token.position - delta, token.shift - delta)

        def outside(position: int) -> bool:
            return not begin <= position < stop

        new = Story(
            stored=[moved(t) for t in old.stored if outside(t.position)],
            fading=[moved(t) for t in old.fading if outside(t.position)],
            gone=[p if p < begin else p - delta for p in old.gone if outside(p)],
            end=new_end,
        )
        ends = self._possible_ends(new, new_end, old.is_dense)
        num_moved = sum(t.position >= stop for t in old.stored) if delta else 0
        return Removal(new, ends, self._removal_outcomes(old, new, stop if delta else None, num_moved), num_moved)

    def _removal_outcomes(self, old: Story, new: Story, moved_from: int | None, num_moved: int) -> set[str]:
        whole = new.end == 0 or self._is_whole(new, new.end)
        if whole is False:
            return {"unsupported"}
        if num_moved and not self.can_shift:
            return {"unsupported"}
        later_forgotten = moved_from is not None and not num_moved  # only forgotten tokens would have to move
        return {"ok"} | ({"unsupported"} if whole is None or (later_forgotten and not self.can_shift) else set())

    def apply_removal(self, sequence: int, removal: Removal) -> None:
        if removal.new is not None:
            if removal.new.end:
                self.stories[sequence] = removal.new
            else:
                self.stories.pop(sequence, None)

    def resolve(self, sequence: int, shown: set[tuple[int, int]]) -> None:
        """What faded is looked at: still there, or gone."""
        story = self.story(sequence)
        story.gone += [t.position for t in story.fading if t.shown not in shown]
        story.stored += [t for t in story.fading if t.shown in shown]
        story.fading = []


@dataclass(slots=True)
class Removal:
    """A removal thought through: the story afterwards (`None`: as before), its possible ends, what may happen."""

    new: Story | None
    ends: set[int]
    outcomes: set[str]
    num_moved: int
