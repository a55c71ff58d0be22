"""What an import of something optional says when it is missing."""

from __future__ import annotations

import importlib

import pytest

from kvcache.errors import needing


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    with (
        pytest.raises(ImportError, match=r"the server needs uvicorn_x, .*; pip install 'kvcache\[serve\]'") as caught,
        needing("serve", "the server"),
    ):
        importlib.import_module("uvicorn_x.protocols")
    assert caught.value.name == "uvicorn_x"


def test_a_module_of_ours_that_is_missing_is_a_bug_and_stays_one() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"kvcache\.no_such"), needing("serve", "the server"):
        importlib.import_module("kvcache.no_such")
