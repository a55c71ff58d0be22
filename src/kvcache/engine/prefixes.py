"""Content keys for the members of one cache: what a new sequence can take over, and what others can take from it.

    admit      match -> adopt     blocks, states and media by reference; the rest is promised
    commit     publish            blocks that are full now; a state where a prompt's chunk ended on a block's border
    leave      release            the block that is not full, too: the next turn of a conversation continues there

Drafts are never published: only tokens that the request has accepted count as computed here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import final

from kvcache.caches import Cache, CausalCache, EncoderCache, RecurrentCache
from kvcache.engine.sample import Sample
from kvcache.errors import CorruptState
from kvcache.prefix import Chain, Encoded, Hit, Member, PrefixIndex, Promises, States, Windowed, root
from kvcache.scheduler import Entry

__all__ = ["Prefixes", "namespace_of"]


def namespace_of(fingerprint: str, formats: object, block_size: int, layout: object) -> str:
    """What must be equal for blocks to be exchanged: weights, formats, block size, layout."""
    return sha256(f"{fingerprint}\0{formats}\0{block_size}\0{layout}".encode()).hexdigest()


@final
class Prefixes:
    """The index of one cache, kept in step with its members."""

    def __init__(self, members: Sequence[Cache], namespace: str, block_size: int) -> None:
        self._namespace = namespace
        self._block_size = block_size
        self._causal = [(i, m) for i, m in enumerate(members) if isinstance(m, CausalCache)]
        self._states = [(i, m) for i, m in enumerate(members) if isinstance(m, RecurrentCache)]
        self._encoders = [m for m in members if isinstance(m, EncoderCache)]
        self.index = PrefixIndex([_member(member) for member in members])
        self.promises: Promises[Entry] = Promises()
        self._pins: dict[tuple[bytes, tuple[int, ...]], list[Sequence[bytes]]] = {}

    # --- finding ------------------------------------------------------------------------------------------------------

    def begin(self, sample: Sample) -> None:
        """Give a new request its chain of keys."""
        media = [(entry.index, entry.key) for entry in sample.media]
        salt = sample.request.salt
        sample.chain = Chain(root(self._namespace, salt=salt), self._block_size, media)

    def match(self, sample: Sample) -> Hit:
        """The longest prefix that all members can resume."""
        self.sync()
        assert sample.chain is not None
        media = [(entry.index, entry.key) for entry in sample.media]
        return self.index.match(sample.chain, sample.tokens, media)

    def is_promised(self, sample: Sample) -> bool:
        """Whether the block that `sample` was waiting for is still under way."""
        return sample.awaited is not None and self.promises.owner(sample.awaited) is not None

    def awaits(self, sample: Sample, hit: Hit) -> Entry | None:
        """Who is computing a block after those that are known; `sample` had better wait for the last one of theirs.

        Not always the next one: windows and states are known only where somebody can resume.
        """
        if not self.promises:
            return None
        assert sample.chain is not None
        for index in range(hit.num_known // self._block_size, len(sample.tokens) // self._block_size):
            key = sample.chain.key(sample.tokens, index)
            owner = self.promises.owner(key)
            if owner is not None and owner.number != sample.number:
                break
        else:
            return None
        end = self._common_end(sample, owner, index)
        sample.awaited = sample.chain.key(sample.tokens, max(index, end // self._block_size - 1))
        if self._states and end not in owner.stops:
            owner.stops = (*owner.stops, end)
        return owner

    def _common_end(self, sample: Sample, owner: Entry, index: int) -> int:
        """Where the promised prefix ends that both have: a state must be kept there."""
        assert sample.chain is not None
        last = (len(sample.tokens) - 1) // self._block_size
        while index < last and self.promises.owner(sample.chain.key(sample.tokens, index)) is owner:
            index += 1
        return index * self._block_size

    # --- taking over --------------------------------------------------------------------------------------------------

    def adopt(self, sample: Sample, hit: Hit) -> None:
        """Make the sequence of `sample` from what was found."""
        end, size = hit.match.num_tokens, self._block_size
        if not end:
            return
        for _, member in self._causal:
            seen = max(0, member.span.begin(end))
            first = seen // size
            begin, keys = (first * size, list(hit.keys[first:])) if seen < end else (end, [])
            member.adopt(sample.number, keys, begin, end)
        for _, states in self._states:
            states.adopt(sample.number, hit.keys[-1], end)
        for encoder in self._encoders:
            encoder.adopt(sample.number, [(m.index, m.key) for m in sample.media if m.index < end], end)

    def promise(self, sample: Sample, entry: Entry, hit: Hit) -> None:
        """What the admitted request is going to compute, and where its steps must end for states to be kept."""
        assert sample.chain is not None
        size, tokens = self._block_size, sample.tokens
        sample.num_published = hit.match.num_tokens // size
        blocks = range(hit.match.num_tokens // size, len(tokens) // size)
        self.promises.make(entry, (sample.chain.key(tokens, index) for index in blocks))
        if self._states:
            last = (len(tokens) - 1) // size * size
            entry.stops = tuple({last, hit.num_known // size * size})

    # --- giving -------------------------------------------------------------------------------------------------------

    def publish(self, sample: Sample, entry: Entry, *, is_prefill: bool) -> None:
        """More tokens are computed: let others have the blocks that are full now."""
        chain, end, size = sample.chain, entry.num_computed, self._block_size
        if chain is None:
            return
        self.sync()  # a key that was evicted and is published again must not be taken for gone
        priority = entry.priority
        for index in range(sample.num_published, end // size):
            key = chain.key(sample.tokens, index)
            for number, member in self._causal:
                if member.publish(sample.number, index, key, priority):
                    self.index.stored(number, chain, sample.tokens, index * size, (index + 1) * size, key)
            self.promises.fulfil(key)
        sample.num_published = end // size
        if is_prefill:
            for encoder in self._encoders:
                encoder.publish(sample.number, priority)
            if self._states and end and end % size == 0:
                self._publish_state(sample, end, chain.key(sample.tokens, end // size - 1), priority)

    def release(self, sample: Sample, entry: Entry) -> None:
        """The sequence is about to be removed: what it has beyond its last full block can be of use, too."""
        self.promises.withdraw(entry)
        chain, end, size = sample.chain, entry.num_computed, self._block_size
        if chain is None or not end:
            return
        self.publish(sample, entry, is_prefill=False)
        index, rest = divmod(end, size)
        if rest:
            key = chain.tail(sample.tokens, end)
            for number, member in self._causal:
                if member.publish(sample.number, index, key, entry.priority):
                    self.index.stored(number, chain, sample.tokens, end - rest, end, key)
        else:
            key = chain.key(sample.tokens, index - 1)
        if self._states:
            self._publish_state(sample, end, key, entry.priority)

    def _publish_state(self, sample: Sample, end: int, key: bytes, priority: int) -> None:
        chain = sample.chain
        assert chain is not None
        begin = (end - 1) // self._block_size * self._block_size
        for number, states in self._states:
            if states.publish(sample.number, key, priority):
                self.index.stored(number, chain, sample.tokens, begin, end, key)
        self.sync()

    # --- keeping and proving ------------------------------------------------------------------------------------------

    def pin(self, sample: Sample, hit: Hit) -> None:
        """Keep what was found of a prompt from eviction: blocks, and the state at its end."""
        assert sample.chain is not None
        for _, member in self._causal:
            for key in hit.keys:
                member.tables.pool.pin(key)
        for _, states in self._states:
            for key in hit.keys[-1:]:
                states.published.pin(key)
        self._pins.setdefault((sample.chain.root, tuple(sample.tokens)), []).append(hit.keys)

    def unpin(self, sample: Sample) -> None:
        """Take back what `pin` did last for this prompt, whatever is cached of it by now."""
        assert sample.chain is not None
        name = (sample.chain.root, tuple(sample.tokens))
        pins = self._pins.get(name)
        if not pins:
            return
        keys = pins.pop()
        if not pins:
            del self._pins[name]
        for _, member in self._causal:
            for key in keys:
                member.tables.pool.unpin(key)
        for _, states in self._states:
            for key in keys[-1:]:
                states.published.unpin(key)

    def room_beside_pins(self, sample: Sample) -> int | None:
        """Tokens that this prompt and its output may have while all that is pinned stays; None: any."""
        if not any(member.tables.pool.num_pinned for _, member in self._causal):
            return None
        hit, room = self.match(sample), None
        for _, member in self._causal:
            pool, shape = member.tables.pool, member.span.resolve(1)
            blocks = [pool.find(key) for key in hit.keys[: hit.match.num_tokens // self._block_size]]
            own = sum(block is not None and pool.is_pinned(block) for block in blocks)
            tokens = (pool.num_blocks - pool.num_pinned + own - 1) * self._block_size
            if shape.num_retained(2**62) + 3 * self._block_size > tokens:
                room = tokens if room is None else min(room, tokens)
        return room

    def clear(self) -> None:
        """Forget everything that is cached, pinned or not; sequences under way keep theirs."""
        self._pins.clear()
        for _, member in self._causal:
            member.tables.pool.clear()
        for _, states in self._states:
            states.published.clear()
        for encoder in self._encoders:
            encoder.published.clear()
        self.sync()

    def check(self) -> None:
        """Raise `CorruptState` unless the index says what the members hold. O(blocks)."""
        self.sync()
        self.index.check()
        for number, member in self._causal:
            if unknown := set(member.tables.pool.keys) - set(self.index.keys):
                raise CorruptState(f"member {number} has {len(unknown)} published blocks that the index does not know")

    def mend(self, running: Collection[Entry]) -> None:
        """After a step that broke off: blocks of which members and index do not both know are known no more."""
        self.promises.keep(running)
        self.index.mend()
        for _, member in self._causal:
            pool = member.tables.pool
            for key in set(pool.keys) - set(self.index.keys):
                if (block := pool.find(key)) is not None:
                    pool.unpublish(block)
            pool.take_removed()
        for _, states in self._states:
            states.published.take_removed()

    def sync(self) -> None:
        """Tell the index what the members have evicted."""
        for number, member in self._causal:
            if removed := member.tables.pool.take_removed():
                self.index.removed(number, removed)
        for number, states in self._states:
            if removed := states.published.take_removed():
                self.index.removed(number, removed)
        for encoder in self._encoders:
            encoder.published.take_removed()  # media are no blocks: nobody is told


def _member(cache: Cache) -> Member:
    if isinstance(cache, CausalCache):
        return Windowed(cache.span, cache.tables.pool.find)
    if isinstance(cache, RecurrentCache):
        return States(cache.published.__contains__)
    assert isinstance(cache, EncoderCache)
    return Encoded(cache.published.__contains__)
