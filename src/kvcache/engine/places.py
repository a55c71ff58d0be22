"""Places of a beam search: the sequences in which its beams live.

A place is a `Sample` of the group, by its index. The first is there from beginning to end; the others begin when beams
part, and share by reference what they have in common.

advance  a place is computed; when all are, every beam goes on by a token: children of another place's beam copy it
fold     what the beams have in common waits as one sequence, the first
unfold   the beams part again after it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import Tensor

from kvcache.caches import Cache
from kvcache.engine.beams import BeamSearch
from kvcache.engine.prefixes import Prefixes
from kvcache.engine.sample import Group, Sample
from kvcache.scheduler import Entry, Scheduler

__all__ = ["Places"]


@final
class Places:
    """`new`: makes a sample of a group, by its index, of these tokens and so many of its prompt."""

    def __init__(
        self,
        cache: Cache,
        scheduler: Scheduler,
        prefixes: Prefixes | None,
        new: Callable[[Group, int, list[int], int], Sample],
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._new = new

    def advance(self, group: Group, search: BeamSearch, place: int, logits: Tensor, now: float) -> bool:
        """A place is computed. Whether all are, and every beam has gone on by a token, or the search is done."""
        first = group.samples[0]
        if len(group.samples) < len(search.beams):  # what the beams have in common is computed again
            self._unfold(group, search)
            return False
        search.rows[place] = logits
        if len(search.rows) < len(group.samples):
            return False
        children = [] if search.is_done else search.advance()  # it is if the step that found out broke off
        first.first_token = first.first_token or now
        if search.is_done:
            return True
        for child in children:
            if child.place != child.parent:
                self._copy(group.samples[child.parent], child.place, self._entry(group, child.parent).num_computed)
        for number, child in enumerate(children):
            sample, entry = group.samples[child.place], self._entry(group, child.place)
            sample.tokens.append(child.token)
            sample.generated = list(search.beams[number].tokens)
            entry.num_tokens += 1
        return True

    def fold(self, first: Sample, search: BeamSearch) -> None:
        """The first beam, which waits, stands for all."""
        search.rows.clear()
        entry = self._scheduler.entries[first.number]
        first.tokens = search.common()
        entry.num_tokens, entry.num_slots = len(first.tokens), search.num_places
        if self._prefixes is not None:
            self._prefixes.begin(first)

    def _unfold(self, group: Group, search: BeamSearch) -> None:
        """The beams part again after what they have in common; each computes the rest of its own."""
        first, length = group.samples[0], len(group.samples[0].tokens)
        search.places = list(range(len(search.beams)))
        for place in search.places[1:]:
            self._copy(first, place, length)
        for place in search.places:
            sample = group.samples[place]
            sample.tokens = search.tokens(place)
            sample.generated = list(search.beams[place].tokens)
            self._entry(group, place).num_tokens = len(sample.tokens)

    def _copy(self, source: Sample, place: int, length: int) -> None:
        """Place `place` becomes the first `length` tokens of `source`, by reference."""
        entry, own = self._scheduler.entries[source.number], source.group.samples.get(place)
        if own is None:
            own = self._new(source.group, place, [], source.num_prompt)
            copy = self._scheduler.fork(entry, own.number, is_party=True)
        else:
            copy = self._scheduler.entries[own.number]
        self._cache.copy_prefix(source.number, own.number, length)
        own.tokens = source.tokens[:length]
        own.chain = source.chain.copy() if source.chain is not None else None
        own.num_published = source.num_published
        copy.num_tokens = copy.num_computed = length
        entry.copies_tail = copy.copies_tail = True

    def _entry(self, group: Group, place: int) -> Entry:
        return self._scheduler.entries[group.samples[place].number]
