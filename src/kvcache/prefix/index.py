"""The index: a tree of blocks that members of a cache hold, and the longest prefix of a prompt that all can resume.

    match(prompt)   1. walk the chain of keys while blocks are known
                    2. at the first unknown one, look among the known blocks that follow the same prefix for the one
                       that begins most alike: its first tokens can be used by copying it
                    3. ask each member where it could resume, going down until all agree

A key is in the tree as long as some member holds its block; members tell by `stored` and `removed`, and listeners hear
the same: who replays `Stored` and `Removed` has the set of all cached prefixes. One token at least is left to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, NamedTuple, TypeAlias, TypeVar, final

from kvcache.errors import CorruptState
from kvcache.prefix.chain import Chain, common_length
from kvcache.prefix.members import Member, Path
from kvcache.spec import Match

__all__ = ["Hit", "PrefixEvent", "PrefixIndex", "Promises", "Removed", "Stored"]

Owner = TypeVar("Owner", bound=Hashable)

MAX_TAILS = 64
"""Blocks that are compared with a prompt's next tokens, the newest first: a bound on time, reached when more prompts
than this differ after the same prefix and the same next token."""


@final
@dataclass(frozen=True, slots=True)
class Stored:
    """Member `member` has begun to hold the block `key`: `tokens` after `parent`."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    member: int


@final
@dataclass(frozen=True, slots=True)
class Removed:
    """Member `member` holds the block `key` no more."""

    key: bytes
    member: int


PrefixEvent: TypeAlias = Stored | Removed


@final
@dataclass(slots=True, eq=False)
class _Node:
    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    extras: bytes
    holders: set[int]


class Hit(NamedTuple):
    """What can be reused. keys: of the blocks up to `match.num_tokens`, the last perhaps only in part.

    num_known: tokens that are cached somewhere along this chain, whether or not all members can resume there.
    """

    match: Match
    keys: Sequence[bytes]
    num_known: int


@final
class PrefixIndex:
    """What the members of one cache hold."""

    __slots__ = ("_members", "_nodes", "_strict", "_tails", "listeners")

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)
        self._strict = [number for number, member in enumerate(members) if member.needs_all]
        self._nodes: dict[bytes, _Node] = {}
        self._tails: dict[tuple[bytes, int], dict[bytes, _Node]] = {}  # by parent and first token
        self.listeners: list[Callable[[PrefixEvent], None]] = []

    @property
    def keys(self) -> Collection[bytes]:
        """Every known block."""
        return self._nodes.keys()

    def stored(self, member: int, chain: Chain, tokens: Sequence[int], begin: int, end: int, key: bytes) -> None:
        """Member `member` holds the block [begin, end) of a chain now."""
        parent = chain.parent(begin // chain.block_size)
        node = self._nodes.get(key)
        if node is None:
            node = _Node(key, parent, tuple(tokens[begin:end]), chain.extras(begin, end), set())
            self._nodes[key] = node
            self._tails.setdefault((parent, node.tokens[0]), {})[key] = node
        if member not in node.holders:
            node.holders.add(member)
            for listener in self.listeners:
                listener(Stored(key, parent, node.tokens, member))

    def removed(self, member: int, keys: Iterable[bytes]) -> None:
        """Member `member` holds these blocks no more."""
        for key in keys:
            node = self._nodes.get(key)
            if node is None or member not in node.holders:
                continue
            node.holders.discard(member)
            if not node.holders:
                del self._nodes[key]
                place = (node.parent, node.tokens[0])
                del self._tails[place][key]
                if not self._tails[place]:
                    del self._tails[place]
            for listener in self.listeners:
                listener(Removed(key, member))

    def match(
        self, chain: Chain, tokens: Sequence[int], media: Sequence[tuple[int, Hashable]] = (), limit: int | None = None
    ) -> Hit:
        """The longest prefix of `tokens`, all but the last at most, at which every member can resume.

        O(tokens) hashing at most, and only as far as something is known where a member needs every block.
        """
        limit = len(tokens) - 1 if limit is None else limit
        keys = self._known(chain, tokens, limit)
        is_whole = True
        donor = self._donor(chain, tokens, len(keys), limit)
        if not self._strict:  # no member needs every block: the furthest one may lie behind a gap
            for index in range(limit // chain.block_size, len(keys), -1):
                if further := self._donor(chain, tokens, index, limit):
                    donor = further
                    keys += [chain.key(tokens, i) for i in range(len(keys), index)]
                    break
        num_tokens = len(keys) * chain.block_size
        if donor is not None:
            shared = common_length(donor.tokens, tokens[num_tokens:limit])
            keys.append(donor.key)
            num_tokens += shared
            is_whole = shared == len(donor.tokens)
        path = Path(keys, num_tokens, is_whole, chain.block_size, media)
        point, blamed = self._agreed(path)
        reason = _reason(point, num_tokens, limit, blamed)
        return Hit(Match(point, reason), keys[: -(-point // chain.block_size)], num_tokens)

    def mend(self) -> None:
        """After a change that broke off: know what is known in full and held, and nothing else. O(blocks)."""
        gone = [
            (number, node.key)
            for node in self._nodes.values()
            for number in node.holders
            if not self._members[number].holds(node.key)
        ]
        for number, key in gone:
            self._nodes[key].holders.discard(number)
        self._nodes = {key: node for key, node in self._nodes.items() if node.holders}
        self._tails = {}
        for key, node in self._nodes.items():
            self._tails.setdefault((node.parent, node.tokens[0]), {})[key] = node
        for number, key in gone:
            for listener in self.listeners:
                listener(Removed(key, number))

    def check(self) -> None:
        """Raise `CorruptState` unless the tree is what the members hold. O(blocks)."""
        for node in self._nodes.values():
            for number in node.holders:
                if not self._members[number].holds(node.key):
                    raise CorruptState(f"the index says that member {number} holds {node.key.hex()}, and it does not")
            if not node.holders or self._tails.get((node.parent, node.tokens[0]), {}).get(node.key) is not node:
                raise CorruptState(f"block {node.key.hex()} is known and has no holder, or is not found by its parent")
        if sum(map(len, self._tails.values())) != len(self._nodes):
            raise CorruptState("the index finds blocks by their parents that it does not know")

    def _known(self, chain: Chain, tokens: Sequence[int], limit: int) -> list[bytes]:
        """Keys of the full blocks before `limit` that lead to something known."""
        strict = [self._members[number] for number in self._strict]
        keys: list[bytes] = []
        length = 0
        for index in range(limit // chain.block_size):
            key = chain.key(tokens, index)
            if all(member.holds(key) for member in strict) and (key in self._nodes or not strict):
                keys.append(key)
                length = index + 1 if key in self._nodes else length
            else:
                break
        return keys[:length]

    def _donor(self, chain: Chain, tokens: Sequence[int], index: int, limit: int) -> _Node | None:
        """The block after `index` known ones that begins most like the prompt goes on."""
        begin = index * chain.block_size
        if begin >= limit:
            return None
        if index:
            chain.key(tokens, index - 1)
        known = self._tails.get((chain.parent(index), tokens[begin]))
        if not known:
            return None
        end = min(begin + chain.block_size, limit)
        wanted = tokens[begin:end]
        best, most = None, 0
        for node in islice(reversed(known.values()), MAX_TAILS):
            if not node.holders.issuperset(self._strict) or node.extras != chain.extras(
                begin, begin + len(node.tokens)
            ):
                continue
            shared = common_length(node.tokens, wanted)
            if (shared, shared == len(node.tokens)) > (most, best is not None and most == len(best.tokens)):
                best, most = node, shared
        return best

    def _agreed(self, path: Path) -> tuple[int, Member | None]:
        """The highest position at which all members can resume, and the member that first lowered it."""
        members = [(member, member.resume(path)) for member in self._members]
        point, blamed = path.num_tokens, None
        while True:
            before = point
            for member, resume in members:
                lowered = resume(point)
                if lowered < point and blamed is None:
                    blamed = member
                point = lowered
            if point == before:
                return point, blamed


def _reason(point: int, num_known: int, limit: int, blamed: Member | None) -> str:
    if blamed is not None:
        return f"forgotten: {num_known} tokens are known, and {blamed} can resume at {point} at most"
    if not limit:
        return "short: a prompt of one token, which is always computed"
    if point == limit:
        return "whole: all but the last token"
    if not point:
        return "new: nothing that is cached begins like this"
    return f"differs: nothing that is cached goes on as the prompt does after {point} tokens"


@final
class Promises(Generic[Owner]):
    """Blocks that requests under way are about to compute: who comes with the same prefix waits for them."""

    __slots__ = ("_keys", "_owners")

    def __init__(self) -> None:
        self._owners: dict[bytes, Owner] = {}
        self._keys: dict[Owner, list[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def make(self, owner: Owner, keys: Iterable[bytes]) -> None:
        """`owner` is going to compute these, unless somebody else is."""
        new = [key for key in keys if key not in self._owners]
        self._keys.setdefault(owner, []).extend(new)  # first: what is promised can be withdrawn
        self._owners.update(dict.fromkeys(new, owner))

    def owner(self, key: bytes) -> Owner | None:
        """Who is going to compute this block."""
        return self._owners.get(key)

    def fulfil(self, key: bytes) -> None:
        """It has been computed."""
        self._owners.pop(key, None)

    def withdraw(self, owner: Owner) -> None:
        """`owner` will compute nothing more."""
        for key in self._keys.get(owner, ()):
            if self._owners.get(key) is owner:
                del self._owners[key]
        self._keys.pop(owner, None)

    def keep(self, owners: Collection[Owner]) -> None:
        """Withdraw what others than these have promised."""
        for owner in self._keys.keys() - set(owners):
            self.withdraw(owner)
