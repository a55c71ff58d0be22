"""kvcache: the KV cache of LLM inference. One block pool, every attention pattern, any model.

Importing this package takes NumPy alone; PyTorch, MLX and transformers are imported by the first thing that needs them.
"""

from __future__ import annotations

from kvcache import backends, errors
from kvcache.caches import Cache, CausalCache, EncoderCache, HybridCache, RecurrentCache
from kvcache.errors import CacheFull, CorruptEntry, CorruptState, KVCacheError, NotSupported
from kvcache.spans import Chunked, Full, Sliding, Span
from kvcache.spec import Batch, CacheConfig, Device, History, Match, Media, SequenceUsage, Usage
from kvcache.views import Appended, ContiguousKV, PackedView, SequenceView, View

__all__ = [
    "Appended",
    "Batch",
    "Cache",
    "CacheConfig",
    "CacheFull",
    "CausalCache",
    "Chunked",
    "ContiguousKV",
    "CorruptEntry",
    "CorruptState",
    "Device",
    "EncoderCache",
    "Full",
    "History",
    "HybridCache",
    "KVCacheError",
    "Match",
    "Media",
    "NotSupported",
    "PackedView",
    "RecurrentCache",
    "SequenceUsage",
    "SequenceView",
    "Sliding",
    "Span",
    "Usage",
    "View",
    "backends",
    "errors",
]
