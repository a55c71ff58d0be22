"""transformers models on our caches.

| name                                    | what it does                                                      | file              |
|-----------------------------------------|-------------------------------------------------------------------|-------------------|
| `cache_for(model, capacity=...)`        | a `transformers.Cache` for `generate()`, with `reuse` and forks   | `cache.py`        |
| `attn_implementation="kvcache"`         | attention of unmodified models reads our blocks in place          | `attention.py`    |
| `layout_of(model)`                      | what each layer keeps, and the `HybridCache` that fits            | `layout.py`       |

transformers and torch are imported by the first name that is used. After `import kvcache.hf` a model can be loaded with
`attn_implementation="kvcache"` once `register()` has run; `cache_for` runs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.hf.attention import register
    from kvcache.hf.cache import cache_for
    from kvcache.hf.layout import Layout, layout_of

__all__ = ["Layout", "cache_for", "layout_of", "register"]

_HOMES = {
    "Layout": "kvcache.hf.layout",
    "cache_for": "kvcache.hf.cache",
    "layout_of": "kvcache.hf.layout",
    "register": "kvcache.hf.attention",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
