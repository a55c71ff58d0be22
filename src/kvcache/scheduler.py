"""The scheduler: which requests compute how many tokens in the next step. Counts in, `Plan` out: no tensors, no clock.

A step of at most 8 tokens, three slots, A and B decoding, C with a prompt of 20, D waiting behind it:

    step      1                2                3                4
    A B       1 1              1 1              1 1              1 1
    C         6 of 20          6                6                2, and its first token
    D         (no slot)

(Sequences that go on by single tokens begin with more: `beginning`.)

Order is priority, then arrival: who is admitted first, whose prompt gets tokens first, and, backwards, who is preempted
when the pool is short. Those who decode go before prompts whatever their order, each by a token: a prompt has what they
leave of a step. Why this cannot deadlock:

* a request is admitted only when its whole prompt fits beside what runs and what was promised to prompts under way; one
  that would not fit alone never gets here;
* the first in order never waits for blocks of those behind it: they are preempted for it, last first, down to it alone;
* a step in which requests run and none can compute preempts the last of them;
* the beams of one request are a party: they come, and leave, together, so none waits for one that cannot come back.

Preempted requests keep their tokens and compute them again: they wait where their arrival puts them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from kvcache.request import Action, State, advance

__all__ = ["Entry", "MemberShape", "Plan", "Scheduler", "Slice"]


@final
@dataclass(frozen=True, slots=True)
class MemberShape:
    """One member of the cache: blocks of `block_size` tokens, `num_blocks` of them.

    num_retained: tokens that a sequence holds at most before its next batch; None: all of them.
    """

    block_size: int
    num_blocks: int
    num_retained: int | None = None

    def new_blocks(self, begin: int, end: int, *, copies_tail: bool = False) -> int:
        """Blocks that a sequence of `begin` tokens takes to become one of `end`."""
        size = self.block_size
        return -(-end // size) - -(-begin // size) + (copies_tail and begin % size > 0)

    def blocks_to_finish(self, begin: int, end: int, max_batch: int) -> int:
        """Blocks beyond those held that a sequence needs on its way from `begin` to `end`, in steps of `max_batch`."""
        needed = self.new_blocks(begin, end, copies_tail=True)
        if self.num_retained is None:
            return needed
        held = min(begin, self.num_retained) // self.block_size
        return min(needed, -(-(self.num_retained + max_batch) // self.block_size) + 2 - held)

    def capacity(self, num_sequences: int = 1, num_shared: int = 0) -> int | None:
        """Tokens of the longest sequence that fits alone; None: any. One block is left for copying a tail.

        `num_sequences` of them: each as long, only the first `num_shared` tokens being the same.
        """
        retained, size = self.num_retained, self.block_size
        if retained is not None and self.num_blocks >= num_sequences * (-(-(retained + 1) // size) + 2):
            return None
        shared = num_shared // size if num_sequences > 1 else 0
        return max(0, shared + (self.num_blocks - shared - num_sequences) // num_sequences) * size


@final
@dataclass(slots=True, eq=False)
class Entry:
    """A sequence, as the scheduler sees it.

    num_tokens: known ones, to be computed; num_computed: of them, in the cache. num_slots: sequences that it may become
    (parallel samples). copies_tail: its last block is shared and not full. stops: positions at which a step must end.
    num_drafts: guesses that the next step checks besides. party: equal for sequences that leave only together.
    """

    number: int
    priority: int
    arrival: int
    num_tokens: int
    num_computed: int = 0
    num_slots: int = 1
    copies_tail: bool = False
    stops: tuple[int, ...] = ()
    num_drafts: int = 0
    party: int = -1
    state: State = State.WAITING

    def __post_init__(self) -> None:
        if self.party < 0:
            self.party = self.number

    @property
    def rank(self) -> tuple[int, int, int]:
        """Smaller goes first."""
        return (-self.priority, self.arrival, self.number)

    @property
    def num_missing(self) -> int:
        """Tokens that are known and not computed."""
        return self.num_tokens - self.num_computed


class Slice(NamedTuple):
    """Compute `num_tokens` more tokens of a sequence, the last `num_drafts` of them guesses."""

    number: int
    num_tokens: int
    num_drafts: int = 0


@final
@dataclass(slots=True)
class Plan:
    """A step. `preempt`: it must leave first, and then another plan be made; `stuck`: it cannot go on at all."""

    slices: list[Slice] = field(default_factory=list)
    preempt: int | None = None
    stuck: int | None = None


@final
class Scheduler:
    """Requests that wait and requests that run.

    members: of the cache, those with blocks. max_batch_tokens: of one step. max_sequences: that run at a time.
    beginning: tokens that a sequence may begin with all the same, if it goes on by single tokens; 0: it does not.
    """

    def __init__(
        self,
        members: Sequence[MemberShape],
        max_batch_tokens: int,
        max_sequences: int,
        *,
        beginning: int = 0,
    ) -> None:
        self.members = tuple(members)
        self.beginning = beginning
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.entries: dict[int, Entry] = {}
        self._waiting: list[tuple[tuple[int, int, int], int]] = []
        self._running: list[tuple[tuple[int, int, int], int]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_slot(self) -> bool:
        """Whether one more sequence may run."""
        return sum(self.entries[number].num_slots for _, number in self._running) < self.max_sequences

    @property
    def is_alone(self) -> bool:
        """Whether no more than one sequence runs, or those of one party."""
        ends = {self.entries[number].party for _, number in (*self._running[:1], *self._running[-1:])}
        return len(ends) < 2  # those of one party follow each other

    def capacity(self, num_sequences: int = 1, num_shared: int = 0) -> int | None:
        """Tokens of the longest sequence that fits alone, or of so many with a common beginning; None: any."""
        found = (member.capacity(num_sequences, num_shared) for member in self.members)
        return min((tokens for tokens in found if tokens is not None), default=None)

    def add(self, entry: Entry) -> None:
        """A new request, which waits."""
        self.entries[entry.number] = entry
        insort(self._waiting, (entry.rank, entry.number))

    def waiting(self) -> Iterator[Entry]:
        """Those that wait, first come first; they may be admitted on the way."""
        for _, number in list(self._waiting):
            yield self.entries[number]

    def can_admit(self, entry: Entry, num_cached: int, free: Sequence[int]) -> bool:
        """Whether there is a slot, and room for all known tokens after `num_cached` ones that it has already.

        `free`: blocks of each member that can be had, after it has taken the cached ones. What prompts under way still
        need of them is promised, and every running request keeps a block in reserve, so that it is not preempted at
        once for the newcomer. O(running).
        """
        running = [self.entries[number] for _, number in self._running]
        if not running:
            return True  # requests that do not fit alone are refused before they get here
        if sum(other.num_slots for other in running) + entry.num_slots > self.max_sequences:
            return False
        reserve = len(running) + 2 * sum(other.num_slots - 1 for other in (*running, entry))
        ways = [(other.num_computed, other.num_tokens + 1) for other in running if other.num_missing > 1]
        ways.append((num_cached, entry.num_tokens + 1))
        return all(
            sum(member.blocks_to_finish(*way, self.max_batch_tokens) for way in ways) + reserve <= num_free
            for member, num_free in zip(self.members, free, strict=True)
        )

    def admit(self, entry: Entry, num_cached: int) -> None:
        """It runs from now on, `num_cached` of its tokens being computed."""
        entry.state = advance(entry.state, Action.ADMIT)
        entry.num_computed = num_cached
        entry.copies_tail = num_cached > 0
        self._waiting.remove((entry.rank, entry.number))
        insort(self._running, (entry.rank, entry.number))

    def computed(self, entry: Entry) -> None:
        """All its tokens are computed: from now on it grows by one token a step."""
        entry.state = advance(entry.state, Action.COMPUTED)
        entry.stops = ()

    def fork(self, entry: Entry, number: int, *, is_party: bool = False) -> Entry:
        """A copy of a running sequence, running too; it takes one of its slots, and joins its party or founds one."""
        entry.copies_tail = True
        copy = Entry(
            number,
            entry.priority,
            entry.arrival,
            entry.num_tokens,
            entry.num_computed,
            copies_tail=True,
            party=entry.party if is_party else number,
            state=entry.state,
        )
        self.entries[number] = copy
        insort(self._running, (copy.rank, number))
        entry.num_slots -= 1
        return copy

    def plan(self, free: Sequence[int]) -> Plan:
        """The next step, given the blocks of each member that can be had. Changes nothing. O(running)."""
        plan, budget, left = Plan(), self.max_batch_tokens, list(free)
        running = [self.entries[number] for _, number in self._running]
        decodes = [entry for entry in running if entry.num_missing == 1]
        prefills = [entry for entry in running if entry.num_missing > 1]
        spare = max(0, budget - len(decodes) - len(prefills))  # tokens that may be guesses
        for entry in decodes[:budget]:
            if not self._take(entry, 1, left):
                return self._short(entry)
            num_drafts = min(entry.num_drafts, spare)
            while num_drafts and not self._take(entry, 1 + num_drafts, left, taken=1):
                num_drafts -= 1
            spare -= num_drafts
            plan.slices.append(Slice(entry.number, 1 + num_drafts, num_drafts))
            budget -= 1 + num_drafts
        for entry in prefills:
            count = self._chunk(entry, budget, left)
            if count and self._take(entry, count, left):
                plan.slices.append(Slice(entry.number, count))
                budget -= count
            elif entry is running[0] and budget and not self.is_alone:
                return self._short(entry)
        if running and not plan.slices:
            return self._short(running[0])
        return plan

    def leave(self, number: int, action: Action) -> None:
        """A request ends, or (`PREEMPT`) waits again with all its tokens to compute."""
        entry = self.entries[number]
        place = (entry.rank, number)
        (self._waiting if entry.state is State.WAITING else self._running).remove(place)
        entry.state = advance(entry.state, action)
        entry.num_drafts = 0
        if entry.state is State.WAITING:
            entry.num_computed = 0
            entry.copies_tail = False
            insort(self._waiting, place)
        else:
            del self.entries[number]

    def mend(self) -> None:
        """After a change that broke off: who waits and who runs is what the entries say. O(entries)."""
        places = sorted((entry.rank, number) for number, entry in self.entries.items())
        self._waiting = [place for place in places if self.entries[place[1]].state is State.WAITING]
        self._running = [place for place in places if self.entries[place[1]].state is not State.WAITING]

    def last_running(self) -> int:
        """Who is preempted next."""
        return self._running[-1][1]

    def _chunk(self, entry: Entry, budget: int, left: Sequence[int]) -> int:
        """Tokens of a prompt in this step: as the budget, the next stop and the free blocks allow."""
        begin = entry.num_computed
        stops = [stop for stop in entry.stops if begin < stop < entry.num_tokens]
        is_beginning = self.beginning > 0 and not begin and budget > 0
        end = min([begin + budget, entry.num_tokens, *stops])
        if is_beginning:
            end = self._beginning(entry.num_tokens, stops)
        wanted = end
        for member, num_free in zip(self.members, left, strict=True):
            tail = -begin % member.block_size
            blocks = num_free - (entry.copies_tail and tail > 0)
            end = min(end, begin + max(0, (tail if blocks >= 0 else 0) + max(0, blocks) * member.block_size))
        if is_beginning and end < wanted and not self.is_alone:
            return 0  # there will be room for all of it: what is cut off would go by single tokens
        return max(0, end - begin)

    def _beginning(self, num_tokens: int, stops: Sequence[int]) -> int:
        """Where the first forward of a sequence ends that goes on by single tokens.

        A token alone takes as long as eight of many: a state that others want may leave an eighth of them alone.
        """
        longest = min(num_tokens, max(self.beginning, self.max_batch_tokens))
        last = max(stops, default=num_tokens)
        return min(
            (s for s in stops if s <= longest and (s == last or (num_tokens - s) * 8 <= num_tokens)), default=longest
        )

    def _take(self, entry: Entry, count: int, left: list[int], taken: int = 0) -> bool:
        """Take blocks for `count` tokens, `taken` of which have theirs, out of `left`; false where too few are left."""
        begin = entry.num_computed
        needed = []
        for member in self.members:
            already = member.new_blocks(begin, begin + taken, copies_tail=entry.copies_tail) if taken else 0
            needed.append(member.new_blocks(begin, begin + count, copies_tail=entry.copies_tail) - already)
        if any(blocks > num_free for blocks, num_free in zip(needed, left, strict=True)):
            return False
        for index, blocks in enumerate(needed):
            left[index] -= blocks
        return True

    def _short(self, entry: Entry) -> Plan:
        """No room for `entry`: the last one leaves, or it has the pool to itself and is stuck."""
        return Plan(stuck=entry.number) if self.is_alone else Plan(preempt=self.last_running())
