"""How much of a new prompt a cache holds already, and why not more. Decides; changes nothing.

    cached     a b c d e f g         prompt     a b c d x y
    agreement  a b c d               4 columns
    resumable  a full layer anywhere; a sliding one only while its window is stored; a recurrent one at checkpoints
    computed   at least the last token: `generate` feeds a wholly cached prompt again, silently wrong

Every row of the prompt takes the row of the cache that agrees longest with it, several may take the same one. All rows
keep the same number of columns, because `generate` has one length for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcache.hf.passes import Rows
from kvcache.hf.pool import Pool
from kvcache.hf.transcript import UNKNOWN, Agreement, Transcript

__all__ = ["Reuse", "as_mask", "as_rows", "is_integral", "plan_reuse"]


class Reuse(NamedTuple):
    """Keep `num_columns` of the cache rows `sources`, one per row of the prompt."""

    sources: Sequence[int]
    num_columns: int
    reason: str


def as_rows(input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Prompt ids as int64 [R,n] on the host; one row may come without its brackets."""
    rows = _as_rows(input_ids, "input_ids", "token ids [rows, tokens]")
    if rows.ndim != 2 or not rows.numel() or not is_integral(rows):
        raise ValueError(
            f"input_ids are {rows.dtype} {list(rows.shape)}; expected integers [rows, tokens], at least one each"
        )
    return rows.to(torch.int64)


def as_mask(attention_mask: Tensor | Sequence[int] | Sequence[Sequence[int]] | None, prompt: Tensor) -> Tensor | None:
    """The padding mask of a prompt [R,n], likewise."""
    if attention_mask is None:
        return None
    mask = _as_rows(attention_mask, "attention_mask", "0 or 1 for each token [rows, tokens], or None")
    if mask.shape != prompt.shape:
        raise ValueError(
            f"attention_mask is {list(mask.shape)} and input_ids are {list(prompt.shape)}; expected 0 or 1 for each "
            f"token, as the tokenizer gives them"
        )
    return mask


def is_integral(tensor: Tensor) -> bool:
    """Whether its elements are integers: bools are none here."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _as_rows(values: Any, what: str, expected: str) -> Tensor:
    try:
        rows = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{what} is {type(values).__name__}; expected {expected}") from error
    return rows[None] if rows.ndim == 1 else rows


def plan_reuse(pool: Pool, rows: Rows, transcript: Transcript, prompt: Tensor, mask: Tensor | None) -> Reuse:
    """What a prompt [R,n] can keep. `mask`: its padding mask, when it has one. O(R * B * n)."""
    if not rows.length:
        return Reuse((), 0, "the cache is empty")
    found = [_agreement(transcript, rows, ids, None if mask is None else mask[r]) for r, ids in enumerate(prompt)]
    agreed = min(agreement.num_tokens for agreement in found)
    sources = [agreement.row for agreement in found]
    shortest = prompt.shape[1]
    limit = min(agreed, shortest - 1)
    if not agreed:
        return Reuse((), 0, f"nothing agrees: {_difference(transcript, prompt, found)}")
    kept = _resumable(pool, rows, set(sources), limit)
    if pool.layout.one_by_one and shortest - kept > 1:
        return Reuse((), 0, f"{kept} tokens could be kept, but this model goes on by one token at a time only")
    if kept == limit == rows.length:
        reason = f"all {rows.length} cached tokens"
    elif kept == limit == agreed:
        reason = f"{kept} of {rows.length} cached tokens: {_difference(transcript, prompt, found)}"
    elif kept == limit:
        reason = f"{kept} of {rows.length} cached tokens: the last token of the prompt must be computed"
    else:
        reason = f"{limit} tokens agree and {kept} can be kept: {_limits(pool)} at {limit}"
    return Reuse(sources if kept else (), kept, reason)


def _agreement(transcript: Transcript, rows: Rows, ids: Tensor, mask: Tensor | None) -> Agreement:
    """The row that agrees longest, padding included."""
    found = transcript.agreement(ids)
    if mask is None:
        return found
    padding = int((mask.to(torch.int64).cumsum(0) == 0).sum())
    return found if padding == rows.padding[found.row] else Agreement(found.row, 0)


def _resumable(pool: Pool, rows: Rows, sources: set[int], limit: int) -> int:
    """The most columns, `limit` at most, after which every one of these rows can go on."""
    point = limit
    while True:
        lowered = point
        for row in sources:
            padding = rows.padding[row]
            tokens = pool.resume_point(rows.sequences[row], max(0, lowered - padding))
            lowered = tokens + padding if tokens else 0
        if lowered == point:
            return point
        point = lowered


def _difference(transcript: Transcript, prompt: Tensor, found: Sequence[Agreement]) -> str:
    """Where the worst row of the prompt leaves the cache, in words."""
    r = min(range(len(found)), key=lambda i: found[i].num_tokens)
    row, column = found[r]
    cached = transcript.tokens[row]
    if column >= len(cached):
        return f"the cache ends at {column}"
    if column >= prompt.shape[1]:
        return f"the prompt ends at {column}"
    if int(cached[column]) == UNKNOWN:
        return (
            f"token {column} of the cache came as an embedding, with an image, under a mask that hides tokens or "
            f"unannounced: its id is not known"
        )
    return f"token {column} is {int(prompt[r, column])}, and {int(cached[column])} in the cache"


def _limits(pool: Pool) -> str:
    layout = pool.layout
    spans = ", ".join(str(span) for span in layout.spans if str(span) != "Full()")
    parts = [f"layers of {spans} have forgotten what they need"] if spans else []
    parts += ["recurrent layers go back to a checkpoint only"] if layout.has_states else []
    return " and ".join(parts) + "; a larger `memory` of cache_for retains more"
