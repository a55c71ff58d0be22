"""Where what can be made again is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache.home import cache_home


def test_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path
    monkeypatch.setenv("KVCACHE_HOME", "~/kv")
    assert cache_home() == Path.home() / "kv"
    monkeypatch.delenv("KVCACHE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path / "kvcache"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_home() == Path.home() / ".cache" / "kvcache"
