"""Eviction: order by priority and last use; the pool's free, held and cached blocks against a naive model."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvcache.blocks import BlockPool
from kvcache.errors import CorruptState
from kvcache.eviction import EvictionQueue


def test_lowest_priority_then_longest_unused_leaves_first() -> None:
    queue: EvictionQueue[str] = EvictionQueue()
    for item, priority in (("a", 0), ("d", 1), ("b", 0), ("c", 0), ("e", -1)):
        queue.push(item, priority)
    queue.discard("b")
    queue.discard("nobody")
    queue.push("a")  # used again
    assert len(queue) == 4 and "b" not in queue
    assert [queue.pop() for _ in range(4)] == ["e", "c", "a", "d"]
    with pytest.raises(KeyError, match="empty"):
        queue.pop()


def test_tail_of_a_chain_leaves_before_its_head() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in blocks:
        assert pool.publish(block, bytes([block]))
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (4, 4)
    pool.allocate(2)
    assert pool.take_removed() == [bytes([blocks[3]]), bytes([blocks[2]])]
    assert pool.find(bytes([blocks[0]])) == blocks[0]


def test_pins_and_priorities_hold() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    pool.publish(a, b"a")
    pool.publish(b, b"b", priority=1)
    pool.publish(c, b"c")
    assert pool.pin(b"a") and pool.pin(b"a") and not pool.pin(b"nothing")
    pool.release([a, b, c])
    assert pool.num_free == 2
    assert pool.allocate(1) == [c]
    pool.unpin(b"a")
    assert pool.num_free == 1
    assert pool.allocate(1) == [b]
    pool.unpin(b"a")
    pool.unpin(b"nothing")
    assert pool.allocate(1) == [a]
    pool.check({a: 1, b: 1, c: 1})


def test_free_blocks_are_taken_before_cached_ones_and_a_hit_saves_a_block() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.publish(a, b"a")
    assert not pool.publish(a, b"again") and not pool.publish(b, b"a")
    pool.release([a, b])
    assert pool.allocate(2) == [2, b]
    block = pool.find(b"a")
    assert block == a
    pool.share([a])
    assert pool.num_free == 0 and pool.is_published(a)
    pool.unpublish(a)
    assert pool.find(b"a") is None
    pool.check({a: 1, b: 1, 2: 1})
    with pytest.raises(CorruptState, match="references"):
        pool.check({a: 1, b: 2, 2: 1})


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_agree_with_a_naive_model(seed: int) -> None:
    """What can be found, what is free, who is evicted: against lists that remember everything."""
    chance = random.Random(seed)
    pool = BlockPool(7)
    held: Counter[int] = Counter()
    keys: dict[bytes, int] = {}
    resting: list[int] = []  # cached blocks, the next victim first
    names = (number.to_bytes(4) for number in range(10**6))
    for _ in range(1500):
        match chance.randrange(5):
            case 0 if pool.num_free:
                count = chance.randint(1, pool.num_free)
                unkeyed = 7 - len(held) - len(resting)
                victims = resting[: max(0, count - unkeyed)]
                blocks = pool.allocate(count)
                assert [b for b in blocks if b in victims] == victims
                gone = [key for victim in victims for key, block in keys.items() if block == victim]
                assert pool.take_removed() == gone
                for key in gone:
                    del keys[key]
                resting = resting[len(victims) :]
                held.update(blocks)
            case 1 if held:
                block = chance.choice(list(held))
                pool.share([block])
                held[block] += 1
            case 2 if held:
                block = chance.choice(list(held))
                pool.release([block])
                held[block] -= 1
                if not held[block]:
                    del held[block]
                    if block in keys.values():
                        resting.append(block)
            case 3 if held:
                block, key = chance.choice(list(held)), next(names)
                assert pool.publish(block, key) == (block not in keys.values())
                if block not in keys.values():
                    keys[key] = block
            case 4 if keys:
                key = chance.choice(list(keys))
                block = keys[key]
                pool.share([block])
                held[block] += 1
                resting = [other for other in resting if other != block]
        assert {key: pool.find(key) for key in keys} == keys
        assert pool.num_free == 7 - len(held)
        assert pool.num_cached == len(resting)
        pool.check(held)
