"""kvcache: the KV cache of LLM inference. One block pool, every attention pattern, any model.

Importing this package takes NumPy alone; PyTorch, MLX and transformers are imported by the first thing that needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcache import backends, errors
from kvcache.caches import Cache, CausalCache, EncoderCache, HybridCache, RecurrentCache
from kvcache.errors import CacheFull, CorruptEntry, CorruptState, KVCacheError, NotSupported, needing
from kvcache.spans import Chunked, Full, Sliding, Span
from kvcache.spec import Batch, CacheConfig, Device, History, Match, Media, SequenceUsage, Usage
from kvcache.views import Appended, ContiguousKV, PackedView, SequenceView, View

if TYPE_CHECKING:
    from kvcache.engine import Engine
    from kvcache.request import Completion, Finished, Request, RequestRefused, SamplingParams, Token

__all__ = [
    "Appended",
    "Batch",
    "Cache",
    "CacheConfig",
    "CacheFull",
    "CausalCache",
    "Chunked",
    "Completion",
    "ContiguousKV",
    "CorruptEntry",
    "CorruptState",
    "Device",
    "EncoderCache",
    "Engine",
    "Finished",
    "Full",
    "History",
    "HybridCache",
    "KVCacheError",
    "Match",
    "Media",
    "NotSupported",
    "PackedView",
    "RecurrentCache",
    "Request",
    "RequestRefused",
    "SamplingParams",
    "SequenceUsage",
    "SequenceView",
    "Sliding",
    "Span",
    "Token",
    "Usage",
    "View",
    "backends",
    "errors",
]

_LAZY = {
    "Completion": "kvcache.request",
    "Engine": "kvcache.engine",
    "Finished": "kvcache.request",
    "Request": "kvcache.request",
    "RequestRefused": "kvcache.request",
    "SamplingParams": "kvcache.request",
    "Token": "kvcache.request",
}


def __getattr__(name: str) -> Any:
    """What needs more than NumPy, or is needed with it only, is imported on first use."""
    if name == "__version__":
        return import_module("importlib.metadata").version("kvcache")
    if name not in _LAZY:
        raise AttributeError(f"module 'kvcache' has no attribute {name!r}")
    with needing("hf", f"kvcache.{name}"):
        home = import_module(_LAZY[name])
    found = getattr(home, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "__version__"})
