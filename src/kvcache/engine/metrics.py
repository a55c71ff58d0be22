"""What an engine has done since it was made, and what it holds now: numbers for people and for Prometheus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, final

from kvcache.spec import Match

__all__ = ["Blocks", "Counts", "Metrics"]


class Blocks(NamedTuple):
    """Blocks of one member: free ones hold nothing, cached ones can be reused or evicted."""

    member: str
    num_free: int
    num_held: int
    num_cached: int


@final
@dataclass(slots=True)
class Counts:
    """Counters that only grow. `num_misses`: admissions without any cached token, by reason.

    model_seconds: in the model itself. choice_seconds: from logits to tokens, beams left out. The rest of
    `step_seconds` is planning, hashing, bookkeeping and text.
    """

    num_requests: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_hits: int = 0
    num_misses: Counter[str] = field(default_factory=Counter)
    num_preemptions: int = 0
    num_finished: Counter[str] = field(default_factory=Counter)
    num_drafted: int = 0
    num_drafts_accepted: int = 0
    model_seconds: float = 0.0
    choice_seconds: float = 0.0
    step_seconds: float = 0.0

    def admitted(self, match: Match) -> None:
        """A request found so much of its prompt, or nothing, for this reason."""
        self.num_cached_tokens += match.num_tokens
        if match.num_tokens:
            self.num_hits += 1
        else:
            self.num_misses[match.reason.partition(":")[0]] += 1


@final
@dataclass(frozen=True, slots=True)
class Metrics:
    """Counters, and the present: requests that wait and run, and the blocks of each member."""

    counts: Counts
    num_waiting: int
    num_running: int
    num_evicted_blocks: int
    blocks: tuple[Blocks, ...]
