"""Prefixes: identity, the longest common resume point, and the cases of prefix reuse, on real tables, no model."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from itertools import count

import numpy as np
import pytest

from kvcache import (
    Batch,
    CacheFull,
    CausalCache,
    Chunked,
    EncoderCache,
    Full,
    Match,
    Media,
    RecurrentCache,
    Sliding,
    Span,
)
from kvcache.prefix import Chain, Encoded, Hit, PrefixIndex, Promises, Removed, States, Stored, Windowed, digest, root
from kvcache.prefix.chain import encoded

# --- identity ---------------------------------------------------------------------------------------------------------


def test_digest_is_sha256_over_parent_tokens_and_extras() -> None:
    from hashlib import sha256

    parent = bytes(range(32))
    expected = parent + (2).to_bytes(4, "little") + (5).to_bytes(4, "little") + (258).to_bytes(4, "little")
    assert digest(parent, (5, 258)) == sha256(expected).digest()
    assert len(digest(parent, ())) == 32


def test_a_key_names_everything_before_it() -> None:
    a = Chain(root("weights"), 2)
    b = Chain(root("weights"), 2)
    assert a.key([1, 2, 3, 4], 1) == b.key([1, 2, 3, 4, 9], 1)
    assert a.key([1, 2, 3, 4], 0) == b.key([1, 2, 7, 7], 0)
    assert Chain(root("weights"), 2).key([9, 2, 3, 4], 1) != a.key([1, 2, 3, 4], 1)
    assert a.tail([1, 2, 3], 3) not in (a.key([1, 2, 3, 4], 1), a.tail([1, 2, 4], 3))
    copy = a.copy()
    assert copy.key([1, 2, 3, 4, 5, 6], 2) == a.key([1, 2, 3, 4, 5, 6], 2)


def test_roots_do_not_collide() -> None:
    roots = [
        root("w"),
        root("w", salt="a"),
        root("w", adapter="a"),
        root("w", salt=""),
        root("w", adapter=""),
        root("w", adapter="a", salt="a"),
        root("wsalt", salt="a"),
        root("v"),
    ]
    assert len(set(roots)) == len(roots)


def test_media_keys_have_one_form_each() -> None:
    keys: list[Hashable] = [b"a", "a", 1, "1", ("a",), ("a", "b"), ("ab",), (("a",), "b"), True, None, "True", ()]
    assert len({encoded(key) for key in keys}) == len(keys)
    with pytest.raises(TypeError, match="media key"):
        encoded(1.5)


# --- a world of caches without a model --------------------------------------------------------------------------------


class World:
    """Requests on members that share one index, as the engine drives them; `compute` is a forward without puts."""

    def __init__(self, *spans: Span, block_size: int, num_blocks: int, num_states: int | None = None) -> None:
        self.size = block_size
        self.caches = [CausalCache(span, block_size=block_size) for span in spans]
        for cache in self.caches:
            cache.init("numpy", "f32", 4, 10_000, 10_000, num_blocks=num_blocks)
        self.states = RecurrentCache()
        self.states.init("numpy", "f32", 4, 10_000)
        self.has_states = num_states is not None
        members = [Windowed(cache.span, cache.tables.pool.find) for cache in self.caches]
        states = [States(self.states.published.__contains__)] if self.has_states else []
        self.index = PrefixIndex([*members, *states])
        self.numbers = count()
        self.known: dict[int, tuple[Chain, list[int]]] = {}
        self.cached: set[tuple[bytes, int]] = set()
        self.index.listeners.append(self.hear)

    def hear(self, event: Stored | Removed) -> None:
        if isinstance(event, Stored):
            assert (event.key, event.member) not in self.cached and 0 < len(event.tokens) <= self.size
            self.cached.add((event.key, event.member))
        else:
            self.cached.remove((event.key, event.member))

    def sync(self) -> None:
        for member, cache in enumerate(self.caches):
            self.index.removed(member, cache.tables.pool.take_removed())
        self.index.removed(len(self.caches), self.states.published.take_removed())

    def match(self, tokens: Sequence[int], salt: str | None = None, media: Sequence[tuple[int, str]] = ()) -> Hit:
        self.sync()
        return self.index.match(Chain(root("w", salt=salt), self.size, media), tokens)

    def admit(
        self, tokens: Sequence[int], salt: str | None = None, media: Sequence[tuple[int, str]] = ()
    ) -> tuple[int, Match]:
        """Adopt what is cached and compute the rest; the new sequence and the match."""
        self.sync()
        number, chain = next(self.numbers), Chain(root("w", salt=salt), self.size, media)
        hit = self.index.match(chain, tokens)
        end = hit.match.num_tokens
        for cache in self.caches:
            seen = max(0, cache.span.begin(end))
            if end:
                first = seen // self.size
                begin, keys = (first * self.size, hit.keys[first:]) if seen < end else (end, [])
                cache.adopt(number, list(keys), begin, end)
        if end and self.has_states:
            self.states.adopt(number, hit.keys[-1], end)
        self.known[number] = (chain, list(tokens[:end]))
        try:
            self.compute(number, tokens[end:])
        except CacheFull:
            self.free(number)
            raise
        return number, hit.match

    def compute(self, number: int, tokens: Sequence[int]) -> None:
        """A forward of more tokens, and the publication of what is full now."""
        chain, own = self.known[number]
        begin = len(own)
        batch = Batch(range(begin, begin + len(tokens)), [number] * len(tokens))
        effects = [cache.prepare_forward(batch) for cache in self.caches]
        for effect in effects:
            effect()
        if self.has_states:
            self.states.start_forward(batch)
            self.states.set_layer(0)
            self.states.put(np.ones((1, 2), np.float32), None)
        own += tokens
        self.sync()
        for index in range(begin // self.size, len(own) // self.size):
            key = chain.key(own, index)
            for member, cache in enumerate(self.caches):
                if cache.publish(number, index, key):
                    self.index.stored(member, chain, own, index * self.size, (index + 1) * self.size, key)
        if self.has_states and len(own) % self.size == 0:
            key = chain.key(own, len(own) // self.size - 1)
            if self.states.publish(number, key):
                self.index.stored(len(self.caches), chain, own, len(own) - self.size, len(own), key)

    def free(self, number: int, *, publish_tail: bool = False) -> None:
        chain, own = self.known.pop(number)
        self.sync()
        rest = len(own) % self.size
        if publish_tail and rest:
            key = chain.tail(own, len(own))
            for member, cache in enumerate(self.caches):
                if cache.publish(number, len(own) // self.size, key):
                    self.index.stored(member, chain, own, len(own) - rest, len(own), key)
        for cache in self.caches:
            cache.remove(number, 0)
        self.states.remove(number, 0)

    def check(self) -> None:
        self.sync()
        for cache in self.caches:
            cache.check()
        self.index.check()
        held = {(key, member) for member, cache in enumerate(self.caches) for key in cache.tables.pool.keys}
        assert {entry for entry in self.cached if entry[1] < len(self.caches)} == held


def numbered(begin: int, end: int) -> list[int]:
    return list(range(begin, end))


# --- cases.md: prefix reuse, block 16; its block 0 is a reserved null, so ten blocks here -----------------------------


@pytest.fixture
def reuse() -> World:
    return World(Full(), block_size=16, num_blocks=10)


def blocks(world: World, number: int) -> list[int]:
    return world.caches[0].tables.sequences[number].table.view.tolist()


def test_a_second_prompt_shares_full_blocks(reuse: World) -> None:
    first, match = reuse.admit(numbered(0, 55))
    assert match.num_tokens == 0 and len(blocks(reuse, first)) == 4
    second, match = reuse.admit([*numbered(0, 48), 900, 901])
    assert match.num_tokens == 48
    assert blocks(reuse, second)[:3] == blocks(reuse, first)[:3] and len(blocks(reuse, second)) == 4
    pool = reuse.caches[0].tables.pool
    assert [pool.references(block) for block in blocks(reuse, second)] == [2, 2, 2, 1]
    reuse.check()


def test_freed_prefixes_are_found_until_a_stranger_needs_the_room(reuse: World) -> None:
    first, _ = reuse.admit(numbered(0, 55))
    second, _ = reuse.admit([*numbered(0, 48), 900, 901])
    reuse.free(first)
    reuse.free(second)
    assert reuse.caches[0].usage().num_free_blocks == 10
    third, match = reuse.admit([*numbered(0, 48), 902])
    assert match.num_tokens == 48
    reuse.free(third)
    reuse.admit(numbered(1000, 1160))
    assert reuse.match([*numbered(0, 48), 902]).match.num_tokens == 0
    before = reuse.caches[0].usage()
    with pytest.raises(CacheFull, match="needs 16 free slots and 0 are free"):
        reuse.admit([5000])
    assert reuse.caches[0].usage() == before
    reuse.check()


def test_growth_takes_blocks_only_at_their_borders(reuse: World) -> None:
    number, _ = reuse.admit(numbered(0, 55))
    reuse.compute(number, numbered(55, 59))
    assert len(blocks(reuse, number)) == 4
    reuse.compute(number, numbered(59, 78))
    assert len(blocks(reuse, number)) == 5
    reuse.check()


def test_the_identical_prompt_computes_one_token_in_a_copied_block(reuse: World) -> None:
    first, _ = reuse.admit(numbered(0, 48))
    second, match = reuse.admit(numbered(0, 48))
    assert match == Match(47, "whole: all but the last token")
    assert blocks(reuse, second)[:2] == blocks(reuse, first)[:2]
    assert blocks(reuse, second)[2] != blocks(reuse, first)[2]
    reuse.check()


def test_a_tail_that_is_not_full_is_reused_to_the_token(reuse: World) -> None:
    first, _ = reuse.admit(numbered(0, 55))
    reuse.free(first, publish_tail=True)
    _, match = reuse.admit(numbered(0, 55) + numbered(300, 340))
    assert match.num_tokens == 55
    _, match = reuse.admit([*numbered(0, 52), 77, 78])
    assert match.num_tokens == 52
    assert "goes on as the prompt does after 52" in match.reason
    reuse.check()


def test_salts_keep_apart(reuse: World) -> None:
    prompt = numbered(0, 48)
    seen = []
    for salt in ("a", "a", "b", None):
        number, match = reuse.admit([*prompt, 900 + len(seen)], salt)
        reuse.free(number)
        seen.append(match.num_tokens)
    assert seen == [0, 48, 0, 0]
    reuse.check()


def test_an_image_counts_where_it_stands(reuse: World) -> None:
    prompt = numbered(0, 32)
    reuse.admit(prompt, media=[(3, "cat")])
    assert reuse.match(prompt, media=[(3, "cat")]).match.num_tokens == 31
    for media in ([(4, "cat")], [(3, "dog")], [], [(3, "cat"), (4, "cat")]):
        assert reuse.match(prompt, media=media).match.num_tokens == 0
    assert reuse.match([*prompt[:18], 7, 7], media=[(3, "cat"), (18, "dog")]).match.num_tokens == 16


# --- cases.md: hybrid hits, block 2, a full member that has all and a sliding member with window 4 --------------------


@pytest.mark.parametrize(
    ("cached", "num_blocks"), [("TTFTFFTTFTTT", 12), ("TTFTFFTTFFF", 8), ("TTFTFFTTFFFT", 8), ("FFFF", 0), ("TTFF", 2)]
)
def test_hybrid_hit_is_the_longest_that_both_can_resume(cached: str, num_blocks: int) -> None:
    tokens = numbered(0, 2 * len(cached))
    chain = Chain(root("w"), 2)
    keys = [chain.key(tokens, index) for index in range(len(cached))]
    full = {key: i for i, key in enumerate(keys)}
    sliding = {key: i for i, key in enumerate(keys) if cached[i] == "T"}
    index = PrefixIndex([Windowed(Full(), full.get), Windowed(Sliding(4), sliding.get)])
    for i, key in enumerate(keys):
        for member, held in enumerate((full, sliding)):
            if key in held:
                index.stored(member, chain, tokens, 2 * i, 2 * i + 2, key)
    index.check()
    hit = index.match(Chain(root("w"), 2), [*tokens, 999])
    assert hit.match.num_tokens == 2 * num_blocks
    assert list(hit.keys) == keys[:num_blocks]
    assert hit.num_known == len(tokens)
    if num_blocks < len(cached):
        assert hit.match.reason.startswith("forgotten") and "Sliding" in hit.match.reason


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "spans",
    [
        (Full(),),
        (Full(), Sliding(5)),
        (Sliding(4),),
        (Full(), Chunked(8)),
        (Sliding(6), Chunked(4)),
        (Sliding(1), Full()),
    ],
    ids=str,
)
def test_a_hit_can_be_resumed_and_no_longer_block_can(spans: tuple[Span, ...], seed: int) -> None:
    """Random members hold random blocks of a random tree; what `match` finds is valid, and no longer whole block is."""
    chance, size = random.Random(seed), 4
    held: list[dict[bytes, int]] = [{} for _ in spans]
    index = PrefixIndex([Windowed(span, have.get) for span, have in zip(spans, held, strict=True)])
    prompts = [[chance.randrange(2) for _ in range(chance.randrange(1, 30))] for _ in range(30)]
    stored: dict[bytes, tuple[list[int], int]] = {}
    for prompt in prompts:
        chain = Chain(root("w"), size)
        for begin in range(0, len(prompt), size):
            end = min(begin + size, len(prompt))
            key = chain.key(prompt, begin // size) if end - begin == size else chain.tail(prompt, end)
            for member, span in enumerate(spans):
                if isinstance(span, Full) or chance.random() < 0.6:
                    held[member][key] = 1
                    index.stored(member, chain, prompt, begin, end, key)
                    stored[key] = (prompt[:end], begin)
    index.check()

    def available(member: int, tokens: list[int], begin: int, end: int) -> bool:
        """Whether some held block has `tokens[begin:end]` after `tokens[:begin]`."""
        return any(start == begin and own[:end] == tokens[:end] for key in held[member] for own, start in [stored[key]])

    def resumable(tokens: list[int], end: int) -> bool:
        for member, span in enumerate(spans):
            seen = max(0, span.begin(end))
            for begin in range(seen // size * size, end, size):
                if seen < end and not available(member, tokens, begin, min(begin + size, end)):
                    return False
        return True

    for prompt in prompts:
        tokens = prompt[: chance.randrange(1, len(prompt) + 1)] + [chance.randrange(2) for _ in range(3)]
        hit = index.match(Chain(root("w"), size), tokens)
        end = hit.match.num_tokens
        assert end < len(tokens)
        assert resumable(tokens, end), (tokens, end)
        assert len(hit.keys) == -(-end // size)
        longer = [p for p in range(end + 1, len(tokens)) if p % size == 0 and resumable(tokens, p)]
        assert not longer, (tokens, end, longer)


def test_states_resume_exactly_where_they_were_kept() -> None:
    world = World(Full(), block_size=4, num_blocks=40, num_states=9)
    number, _ = world.admit(numbered(0, 8))
    world.compute(number, numbered(8, 15))
    hit = world.match(numbered(0, 15))
    assert hit.match.num_tokens == 8 and hit.num_known == 12
    assert "recurrent states" in hit.match.reason
    other, match = world.admit([*numbered(0, 12), 70])
    assert match.num_tokens == 8 and world.states.sequence(other).seq_len == 13
    world.check()
    world.states.published.limit = 1  # nothing more fits: the next one drives all out
    world.compute(number, numbered(15, 16))
    assert world.match(numbered(0, 15)).match.num_tokens == 0
    world.check()


def test_media_must_all_be_there() -> None:
    have = {"cat"}
    full: dict[bytes, int] = {}
    index = PrefixIndex([Windowed(Full(), full.get), Encoded(have.__contains__)])
    tokens, media = numbered(0, 12), [(1, "cat"), (9, "dog")]
    chain = Chain(root("w"), 4, media)
    for i in range(3):
        full[chain.key(tokens, i)] = i
        index.stored(0, chain, tokens, 4 * i, 4 * i + 4, chain.key(tokens, i))
    assert index.match(Chain(root("w"), 4, media), [*tokens, 5], media).match.num_tokens == 9
    have.add("dog")
    assert index.match(Chain(root("w"), 4, media), [*tokens, 5], media).match.num_tokens == 12
    have.clear()
    hit = index.match(Chain(root("w"), 4, media), [*tokens, 5], media)
    assert hit.match.num_tokens == 1 and "media" in hit.match.reason


def test_promises_are_kept_or_withdrawn() -> None:
    promises: Promises[int] = Promises()
    promises.make(1, [b"a", b"b"])
    promises.make(2, [b"b", b"c"])
    assert [promises.owner(key) for key in (b"a", b"b", b"c", b"d")] == [1, 1, 2, None]
    promises.fulfil(b"a")
    promises.withdraw(1)
    promises.withdraw(1)
    assert [promises.owner(key) for key in (b"a", b"b", b"c")] == [None, None, 2]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spans", [(Full(),), (Full(), Sliding(6)), (Sliding(9),), (Full(), Chunked(8))], ids=str)
def test_random_sharing_evicting_and_copying_keeps_everything_consistent(spans: tuple[Span, ...], seed: int) -> None:
    """Requests come, grow, are cut and go in a small pool; tables, pool, index and listener agree after each step."""
    chance = random.Random(seed)
    world = World(*spans, block_size=4, num_blocks=24)
    trunk = [chance.randrange(50) for _ in range(40)]
    running: list[int] = []
    for _ in range(120):
        try:
            match chance.randrange(4):
                case 0:
                    tokens = trunk[: chance.randrange(1, 40)] + [
                        chance.randrange(50) for _ in range(chance.randrange(1, 9))
                    ]
                    number, match = world.admit(tokens)
                    assert match.num_tokens < len(tokens)
                    running.append(number)
                case 1 if running:
                    number = chance.choice(running)
                    world.compute(number, [chance.randrange(50) for _ in range(chance.randrange(1, 7))])
                case 2 if running:
                    world.free(running.pop(chance.randrange(len(running))), publish_tail=chance.random() < 0.5)
                case 3 if running:  # taken back, as drafts are
                    number = chance.choice(running)
                    chain, own = world.known[number]
                    cut = len(own) - chance.randrange(0, 3)
                    if cut > 0 and all(cache.can_resume(number, cut) for cache in world.caches):
                        for cache in world.caches:
                            cache.remove(number, cut)
                        world.known[number] = (Chain(chain.root, 4), own[:cut])
        except CacheFull:
            pass
        world.check()
    for number in running:
        world.free(number)
    world.check()
    assert all(cache.usage().num_free_blocks == 24 for cache in world.caches)


# --- what members refuse ----------------------------------------------------------------------------------------------


def test_adopting_what_is_not_there_is_refused_and_changes_nothing() -> None:
    world = World(Full(), block_size=4, num_blocks=8)
    number, _ = world.admit(numbered(0, 9))
    keys = list(world.match(numbered(0, 9)).keys)
    cache = world.caches[0]
    before = cache.usage()
    for sequence, wanted, begin, end in (
        (number, keys, 0, 8),  # exists
        (50, [b"nobody's", keys[1]], 0, 8),
        (50, keys[:1], 0, 8),  # too few
        (50, keys[1:], 2, 6),  # begins inside a block
    ):
        with pytest.raises(ValueError, match=r"exists|published"):
            cache.adopt(sequence, wanted, begin, end)
    assert cache.usage() == before
    with pytest.raises(ValueError, match="not published"):
        world.states.adopt(50, b"nobody's", 8)
    media = EncoderCache()
    media.init("numpy", "f32", 2, 100)
    with pytest.raises(ValueError, match="not published"):
        media.adopt(50, [(0, "cat")], 4)
    world.check()


def test_media_are_taken_over_by_their_key() -> None:
    cache = EncoderCache()
    cache.init("numpy", "f32", 2, 100)
    cache.start_forward(Batch([0, 1, 2], [7, 7, 7], media=[Media(1, "cat")]))
    cache.set_layer(0)
    cache.put(np.full((2, 1, 4), 3, np.float32), np.full((2, 1, 4), 5, np.float32))
    cache.publish(7)
    cache.remove(7, 0)
    assert "cat" in cache.published and cache.published.num_bytes == 64
    cache.adopt(9, [(5, "cat")], 6)
    assert cache.encoder_cached(9) and cache.can_resume(9, 6)
    cache.start_forward(Batch([6], [9]))
    keys, values, _ = cache.get()
    assert float(keys[0, 0, 0]) == 3 and float(values[1, 0, 3]) == 5
    cache.published.limit = 0
    cache.start_forward(Batch([0], [8], media=[Media(0, "dog")]))
    cache.put(np.zeros((1, 1, 4), np.float32), np.zeros((1, 1, 4), np.float32))
    cache.publish(8)
    assert len(cache.published) == 0 and cache.published.take_removed() == ["cat", "dog"]
    cache.check()


def test_a_published_tail_is_copied_on_write_and_written_only_when_the_pool_is_short() -> None:
    world = World(Full(), block_size=4, num_blocks=3)
    number, _ = world.admit(numbered(0, 8))
    cache = world.caches[0]
    cache.remove(number, 6)  # into a published block
    world.known[number] = (Chain(root("w"), 4), numbered(0, 6))
    world.compute(number, [90])
    assert world.match(numbered(0, 9)).match.num_tokens == 8  # still there, beside the copy
    world.compute(number, [91])
    world.check()
    cache.remove(number, 6)
    world.known[number] = (Chain(root("w"), 4), numbered(0, 6))
    other, _ = world.admit([70])
    world.compute(number, [92])  # no block is left for a copy
    assert world.match([*numbered(0, 6), 90, 91, 5]).match.num_tokens == 4
    world.check()
    world.free(other)
    world.free(number)
    assert cache.usage().num_free_blocks == 3
