"""Prefixes known by their content: which beginnings of a prompt need not be computed. No tensors, no caches.

Chain           the identity of each block of a prompt: a digest of everything that came before and is in it
PrefixIndex     a tree of what the members of a cache hold; `match` finds the longest prefix that all can resume
Windowed        a member with a span (full, sliding, chunked): needs the blocks that a query at the end sees
States          a member with recurrent states: needs one exactly at the end
Encoded         a member with media: needs all of them that stand before the end
"""

from __future__ import annotations

from kvcache.prefix.chain import Chain, digest, root
from kvcache.prefix.index import Hit, PrefixEvent, PrefixIndex, Promises, Removed, Stored
from kvcache.prefix.members import Encoded, Member, States, Windowed

__all__ = [
    "Chain",
    "Encoded",
    "Hit",
    "Member",
    "PrefixEvent",
    "PrefixIndex",
    "Promises",
    "Removed",
    "States",
    "Stored",
    "Windowed",
    "digest",
    "root",
]
