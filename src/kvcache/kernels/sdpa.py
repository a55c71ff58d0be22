"""Attention by PyTorch's own operators, over blocks gathered from the pool.

A pass is planned once (`sdpa_plan.py`) and the plan serves every layer; it lives as long as the `AttentionBatch`.

| what a segment asks for                 | how it is computed                                                       |
|-----------------------------------------|--------------------------------------------------------------------------|
| one query, all of [begin, end) visible  | no mask; equal lengths of several sequences in one call                  |
| a whole prompt from its beginning       | `is_causal`, no mask                                                     |
| anything else                           | tiles of queries, each over its own columns, with a boolean mask         |
| softcap or sinks                        | matmul, float32 softmax, matmul, in tiles of bounded memory              |

Only columns that some query of the tile sees are gathered, so what lies in empty or forgotten slots (NaN, possibly)
never enters a product. Grouped queries are never repeated: a single query folds its group into rows, [B,H,G,D] against
[B,H,S,D]; several become [H,G,T,D] against keys expanded by stride 0. Measured (one thread, 4 x 4 heads of 128, 4096
keys): folding a decode costs 1.0 ms in float32 and 1.1 ms in bfloat16, where `enable_gqa` costs 1.5 and 13 ms; for
prefills the three differ by noise. PyTorch's fast CPU path wants D = Dv: the narrower is padded with zeros, 1.7 times
faster than its fallback.

Element types: keys and values are what their format decodes to (float32 when quantised), and the computation runs in
the widest type of queries, keys and values: quantised or mixed caches compute in float32, pure f16 or bf16 ones do not.
"""

from __future__ import annotations

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache.formats import Stored
from kvcache.kernels import AttentionBatch, Kernel, queries_per_head
from kvcache.kernels.sdpa_plan import Tile, plan
from kvcache.spec import Array

__all__ = ["SdpaKernel"]

# Scores that the matmul path holds at once, in elements: 64 MiB of float32.
TILE_SCORES = 1 << 24


@final
class SdpaKernel(Kernel):
    """PyTorch's scaled_dot_product_attention over gathered blocks; any device that PyTorch has."""

    name = "sdpa"

    def refusal(self, queries: Array, keys: Stored, values: Stored) -> str | None:
        """Refuses arrays that are not torch tensors."""
        if isinstance(queries, Tensor) and isinstance(keys.array, Tensor) and isinstance(values.array, Tensor):
            return None
        for what, array in (("queries", queries), ("keys", keys.array), ("values", values.array)):
            if not isinstance(array, Tensor):
                return f"it reads torch tensors and the {what} are {type(array).__module__}.{type(array).__name__}"
        return None

    def attend(
        self,
        queries: Array,
        keys: Stored,
        values: Stored,
        batch: AttentionBatch,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """See `Kernel.attend`. Cost: one gather of each tile's visible blocks, then PyTorch's attention over them."""
        group = queries_per_head(queries, keys, values, sinks, softcap)
        T, Hq, _ = queries.shape
        out = None
        for tile in self._plan(batch, keys.array.device):
            q = queries if tile.rows is None else queries.index_select(0, tile.rows.to(queries.device))
            k, v = (_gather(stored, tile, batch.block_size) for stored in (keys, values))
            q = q.to(k.device).unflatten(0, (tile.num_segments, -1)).unflatten(2, (-1, group))  # [B,n,H,G,D]
            if softcap is None and sinks is None:
                result = _fused(q, k, v, tile, scale)
            else:
                result = _explicit(q, k, v, tile, scale, softcap, sinks)
            result = result.to(device=queries.device, dtype=queries.dtype).flatten(0, 1).flatten(1, 2)  # [B*n,Hq,Dv]
            if tile.rows is None:
                return result
            if out is None:
                out = queries.new_zeros((T, Hq, values.head_dim))
            out.index_copy_(0, tile.rows.to(queries.device), result)
        return queries.new_zeros((T, Hq, values.head_dim)) if out is None else out

    def _plan(self, batch: AttentionBatch, device: torch.device) -> list[Tile]:
        plans: dict[torch.device, list[Tile]] = batch.plans.setdefault(self, {})
        if device not in plans:
            plans[device] = plan(batch, device)
        return plans[device]


def _gather(stored: Stored, tile: Tile, block_size: int) -> Tensor:
    """Decoded rows [B,H,S,D] of a tile's columns. Consecutive blocks of one slot, or one block, are not copied."""
    array = stored.array  # [N,H,block_size,W]
    if tile.slots is not None:
        rows = array.transpose(0, 1)[:, tile.slots // block_size, tile.slots % block_size].unsqueeze(0)
    else:
        if isinstance(tile.blocks, range):
            blocks = array[tile.blocks.start : tile.blocks.stop]
        else:  # of any dimension but the first, `index_select` copies the whole pool before it selects
            blocks = array.index_select(0, tile.blocks)
        blocks = blocks.transpose(0, 1)
        rows = blocks.reshape(blocks.shape[0], tile.num_segments, -1, blocks.shape[3]).transpose(0, 1)
        rows = rows[:, :, tile.begin : tile.begin + tile.length]
    decoded: Tensor = stored.format.decode(rows, stored.head_dim)
    return decoded


def _fused(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Tensor:
    """Attention [B,n,H,G,Dv] of queries [B,n,H,G,D] over [B,H,S,D] and [B,H,S,Dv], by PyTorch's fused operator."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    head_dim, value_dim = k.shape[-1], v.shape[-1]
    q, k, v = (_widened(tensor.to(dtype), max(head_dim, value_dim)) for tensor in (q, k, v))
    if q.shape[1] == 1:
        result = F.scaled_dot_product_attention(q[:, 0], k, v, scale=scale).unsqueeze(1)
    else:  # several queries: one segment, B = 1
        group = q.shape[3]
        result = F.scaled_dot_product_attention(
            q[0].permute(1, 2, 0, 3),
            k[0].unsqueeze(1).expand(-1, group, -1, -1),
            v[0].unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=tile.mask,
            is_causal=tile.is_causal,
            scale=scale,
        )
        result = result.permute(2, 0, 1, 3).unsqueeze(0)
    return result[..., :value_dim]


def _widened(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """As `_fused`, with the scores at hand: softcap, sinks. Float32 at least, tiles of bounded memory."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    B, n, H, G, _ = q.shape
    S = k.shape[2]
    k, v = k.to(dtype).transpose(2, 3), v.to(dtype)
    sink = None if sinks is None else sinks.to(device=k.device, dtype=dtype).reshape(H, G, 1)
    parts = []
    step = max(1, TILE_SCORES // (B * H * G * S))
    for first in range(0, n, step):
        part = (q[:, first : first + step].to(dtype) * scale).permute(0, 2, 3, 1, 4)  # [B,H,G,t,D]
        t = part.shape[3]
        scores = torch.matmul(part.reshape(B, H, G * t, -1), k)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.view(B, H, G, t, S)
        seen = tile.mask[first : first + t] if tile.mask is not None else None
        if tile.is_causal:
            seen = torch.ones((t, S), dtype=torch.bool, device=k.device).tril(first)
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        weights = _softmax(scores, sink)
        result = torch.matmul(weights.view(B, H, G * t, S), v).view(B, H, G, t, -1)
        parts.append(result.permute(0, 3, 1, 2, 4))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Weights of scores [B,H,G,t,S]; a sink [H,G,1] takes its share of the sum and has no value."""
    if sink is None:
        return torch.softmax(scores, dim=-1)
    columns = sink.unsqueeze(-1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, columns), dim=-1), dim=-1)[..., :-1].contiguous()
