"""The engine: many requests on one model, no prefix computed twice. `Engine.step()` is plan, run, commit.

engine.py       the life of a request: add, admit, plan, run, commit, leave
sample.py       one output under way: its tokens, its text, its clock
sampler.py      logits to tokens
text.py         tokens to text, as it comes
prefixes.py     content keys for the members of the cache: adopt, publish, release
memory.py       how many blocks fit
"""

from __future__ import annotations

from kvcache.engine.engine import Engine
from kvcache.engine.metrics import Metrics

__all__ = ["Engine", "Metrics"]
