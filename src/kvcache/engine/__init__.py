"""The engine: many requests on one model, no prefix computed twice. `Engine.step()` is plan, run, commit.

engine.py       the public face
core.py         the life of a request: admit, draft, plan, run, commit, leave
prefixes.py     content keys for the members of the cache: adopt, publish, release
drafts.py       guesses of the next tokens, by lookup or by a smaller model
sampler.py      logits to tokens; beams.py: the likeliest outputs side by side; places.py: their sequences
text.py         tokens to text, as it comes
shift.py        how much of a full context is forgotten
sample.py       one output under way: its tokens, its text, its log-probabilities, its clock; the best of several
build.py        the cache and all that an engine runs on; memory.py: how many blocks fit
metrics.py      what it has done
"""

from __future__ import annotations

from kvcache.engine.engine import Engine
from kvcache.engine.metrics import Metrics

__all__ = ["Engine", "Metrics"]
