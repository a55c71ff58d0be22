"""Attention over keys at hand under a span, for prompts of which a windowed member stores only the tail.

Queries go in tiles, each over the columns that its span reaches, so the cost is O(queries * (window + tile)) and the
mask never larger than one tile's, where a mask of the whole prompt would grow with its square.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache.hf.attention import Gathered, attention_with_scores
from kvcache.spans import Span

__all__ = ["windowed_attention"]

TILE_QUERIES = 512


def windowed_attention(
    queries: Tensor,
    whole: Gathered,
    *,
    span: Span,
    padding: Sequence[int],
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention [B,q,Hq,Dv] of queries [B,Hq,q,D], the last q of the columns [B,H,S,D]; zeros for queries of padding.

    Columns are counted from the first of `whole`; `padding` is in the same count and may be negative, which says that
    the row's position 0 lies before it (chunks begin where positions do).
    """
    q, S = queries.shape[2], whole.keys.shape[2]
    pad = torch.tensor(padding, device=queries.device)[:, None, None]
    outputs = []
    for first in range(0, q, TILE_QUERIES):
        tile = queries[:, :, first : first + TILE_QUERIES]
        begin, end = S - q + first, S - q + first + tile.shape[2]
        lowest = max(0, min(span.begin(max(begin - p, 0)) + p for p in padding))
        columns = torch.arange(lowest, end, device=queries.device)
        rows = torch.arange(begin, end, device=queries.device)[:, None]
        begins = span.begin(rows - pad) + pad  # type: ignore[type-var]
        seen = (columns <= rows) & (columns >= begins) & (columns >= pad)
        is_padding = rows < pad  # [B,t,1]
        mask = (seen | (is_padding & (columns == rows)))[:, None]
        keys, values = (tensor[:, :, lowest:end] for tensor in whole)
        if softcap is None and sinks is None:
            output = F.scaled_dot_product_attention(tile, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
            output = output.transpose(1, 2)
        else:
            bias = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min)
            output = attention_with_scores(tile, keys, values, bias, 0.0, scale, softcap, sinks)
        outputs.append(output.masked_fill(is_padding[..., None], 0) if max(padding) > begin else output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
