"""The folder of what can be made again: compiled kernels, unpacked models, converted tokenizers."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_home"]


def cache_home() -> Path:
    """Where we keep what can be made again: `$KVCACHE_HOME`, `$XDG_CACHE_HOME/kvcache` or `~/.cache/kvcache`."""
    if home := os.environ.get("KVCACHE_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")  # a relative one is to be ignored, says the XDG specification
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "kvcache"
