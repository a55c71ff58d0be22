"""Blocks, in two classes that know nothing of each other.

`BlockPool` counts: which block is free, and how many hold a reference to it. No tensors.
`BlockStorage` keeps: the tensors of every layer, addressed by block and slot. No counts.
"""

from __future__ import annotations

from kvcache.blocks.pool import BlockPool
from kvcache.blocks.storage import BlockStorage

__all__ = ["BlockPool", "BlockStorage"]
