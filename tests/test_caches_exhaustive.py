"""Every short sequence of operations in a tiny world: blocks of two slots, a pool of five, two sequences.

Small worlds have all the borders of large ones. The tree of operations is walked depth first; a cache cannot be cloned
from outside, so each node replays its path, in which only the last operation is compared. An operation that failed or
changed nothing has been shown to change nothing, so what follows it is what would follow without it: its branch ends
there. That is what makes the depth reachable; nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from duel import Duel, told
from kvcache import Chunked, Full, Sliding

Operation = Callable[[Duel], str]


def end(duel: Duel, sequence: int) -> int:
    return duel.oracle.story(sequence).end


def forward(*counts: tuple[int, int]) -> Operation:
    """The next tokens of some sequences, `(sequence, count)` each, in one batch."""

    def run(duel: Duel) -> str:
        rows = [(end(duel, s) + i, s) for s, count in counts for i in range(count)]
        return duel.forward([p for p, _ in rows], [s for _, s in rows])

    return run


def append_and_commit(sequence: int, count: int, kept: int) -> Operation:
    """The other face in one go."""

    def run(duel: Duel) -> str:
        outcome = duel.append(sequence, count)
        return duel.commit(sequence, kept) if outcome == "ok" else outcome

    return run


OPERATIONS: dict[str, Operation] = {
    "0 +1": forward((0, 1)),
    "0 +3": forward((0, 3)),
    "1 +2": forward((1, 2)),
    "0 +1, 1 +1": forward((0, 1), (1, 1)),
    "append 0 2 of 3": append_and_commit(0, 3, 2),
    "copy 0 to 1, 1": lambda duel: duel.copy_prefix(0, 1, 1),
    "copy 0 to 1, 4": lambda duel: duel.copy_prefix(0, 1, 4),
    "copy 1 to 0, 3": lambda duel: duel.copy_prefix(1, 0, 3),
    "remove 0 [0,1)": lambda duel: duel.remove(0, 0, 1),
    "remove 0 [1,3)": lambda duel: duel.remove(0, 1, 3),
    "remove 0 [-1:]": lambda duel: duel.remove(0, max(0, end(duel, 0) - 1)),
    "remove 1 [2:]": lambda duel: duel.remove(1, 2),
    "free 0": lambda duel: duel.free(0),
}

WORLDS = {
    "full": (Full(), {"capacity": 4, "max_batch": 4}),
    "sliding": (Sliding(2), {"capacity": 6, "max_batch": 6}),
    "sliding with memory": (Sliding(2, memory=3), {"capacity": 4, "max_batch": 4}),
    "chunked": (Chunked(2), {"capacity": 6, "max_batch": 6}),
}

# Each alphabet with the longest path that a few seconds allow. (All operations at depth 4 take a minute of CPU; they
# passed when this was written.)
ALPHABETS = {
    "all": (tuple(OPERATIONS), 3),
    "core": (("0 +1", "0 +3", "0 +1, 1 +1", "append 0 2 of 3", "copy 0 to 1, 4", "remove 0 [1,3)", "remove 1 [2:]"), 4),
}


def world(name: str) -> Duel:
    span, sizes = WORLDS[name]
    duel = Duel(span, block_size=2, layers=(0,), **sizes)
    assert duel.num_blocks == 5
    return duel


def state(duel: Duel) -> Any:
    return {s: (len(o.stored), o.end, [t.shown for t in o.stored]) for s, o in duel.oracle.stories.items()}


def replay(name: str, path: tuple[str, ...]) -> Duel | None:
    """The world after `path`; `None` when its last operation changed nothing."""
    duel = world(name)
    try:
        duel.is_quiet = True
        for operation in path[:-1]:
            OPERATIONS[operation](duel)
        duel.is_quiet = False
        before = state(duel)
        outcome = OPERATIONS[path[-1]](duel)
    except BaseException as error:
        told(duel, error)
        raise
    return duel if outcome == "ok" and state(duel) != before else None


def walk(name: str, operations: tuple[str, ...], path: tuple[str, ...], depth: int) -> int:
    """Visit every operation after `path`; how many paths were run."""
    count = 0
    for operation in operations:
        longer = (*path, operation)
        count += 1
        if replay(name, longer) is not None and len(longer) < depth:
            count += walk(name, operations, longer, depth)
    return count


@pytest.mark.parametrize("alphabet", ALPHABETS)
@pytest.mark.parametrize("name", WORLDS)
def test_every_short_sequence_of_operations(name: str, alphabet: str) -> None:
    operations, depth = ALPHABETS[alphabet]
    num_paths = walk(name, operations, (), depth)
    assert num_paths > 500, f"only {num_paths} paths: operations must be failing that should not"
