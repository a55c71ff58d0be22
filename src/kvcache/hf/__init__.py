"""transformers models on our caches.

| name                            | what it does                                                    | file           |
|---------------------------------|-----------------------------------------------------------------|----------------|
| `cache_for(model, capacity=...)` | a `transformers.Cache` for `generate()`, with `reuse` and forks | `cache.py`     |
| `attn_implementation="kvcache"` | attention of unmodified models reads our blocks in place        | `attention.py` |
| `layout_of(model)`              | what each layer keeps, and the `HybridCache` that fits          | `layout.py`    |
| `load(name)`                    | a model and its tokenizer: hub id, folder, `.gguf`, or `"demo"` | `loading.py`   |

transformers and torch are imported by the first name that is used. From then on transformers knows the attention
implementation: `from kvcache.hf import cache_for` before `from_pretrained(..., attn_implementation="kvcache")`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcache.errors import needing

if TYPE_CHECKING:
    from kvcache.hf.cache import cache_for
    from kvcache.hf.layout import Layout, layout_of
    from kvcache.hf.loading import Loaded, load
    from kvcache.hf.model_files import ModelNotFound

__all__ = ["Layout", "Loaded", "ModelNotFound", "cache_for", "layout_of", "load"]

_HOMES = {
    "Layout": "kvcache.hf.layout",
    "Loaded": "kvcache.hf.loading",
    "ModelNotFound": "kvcache.hf.model_files",
    "cache_for": "kvcache.hf.cache",
    "layout_of": "kvcache.hf.layout",
    "load": "kvcache.hf.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needing("hf", "kvcache.hf"):
        home = import_module(_HOMES[name])
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
