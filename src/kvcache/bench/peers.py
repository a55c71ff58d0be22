"""PyTorch's own attention as contenders, on contiguous keys and values: the layout that suits it best.

| name              | what it is                                                                                   |
|-------------------|----------------------------------------------------------------------------------------------|
| SDPA transformers | `sdpa_attention_forward` of the transformers that is installed, as its models call it        |
| SDPA repeat_kv    | keys and values repeated for each query head (transformers with a mask)                      |
| SDPA best         | the fastest of that, `enable_gqa=True`, and in a decode the heads of a group as rows of one  |
| flex_attention    | compiled for the shape                                                                       |

None of them pays for bringing keys and values into that layout, which a cache that grows would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvcache.bench.paged import Case, Pool
from kvcache.bench.timing import Visit, timed

__all__ = ["PEERS", "Inputs", "inputs", "peer"]


class Inputs(NamedTuple):
    """Queries [B,Hq,T,D], the keys and values [B,H,S,D] of each copy, and what is visible when that is not all."""

    queries: Tensor
    copies: list[tuple[Tensor, Tensor]]
    group: int
    is_square: bool  # as many queries as tokens, causal
    mask: Tensor | None  # bool [T,S]


Attend = Callable[[Tensor, Tensor], Tensor]  # keys, values -> [B,Hq,T,D]


def inputs(case: Case, pool: Pool, queries: Tensor) -> Inputs:
    """The case as PyTorch wants it. No window."""
    T, S = case.num_queries, case.num_tokens
    shaped = queries.view(case.num_sequences, T, *queries.shape[1:]).transpose(1, 2).contiguous()
    mask = None if T in (1, S) else torch.ones(T, S, dtype=torch.bool, device=queries.device).tril(S - T)
    group = pool.heads.num_query_heads // pool.heads.num_heads
    return Inputs(shaped, pool.contiguous(case), group, T == S and T > 1, mask)


def peer(name: str, given: Inputs) -> Visit:
    """The visit of a peer. Raises `ImportError` or `RuntimeError` with the reason when it cannot be had here."""
    attend = PEERS[name](given)
    turn: Iterator[tuple[Tensor, Tensor]] = cycle(given.copies)
    return timed(lambda: attend(*next(turn)), given.queries.device)


def _transformers(given: Inputs) -> Attend:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module: Any = SimpleNamespace(num_key_value_groups=given.group, is_causal=True)
    mask = None if given.mask is None else given.mask[None, None]
    return lambda keys, values: sdpa_attention_forward(module, given.queries, keys, values, mask)[0].transpose(1, 2)


def _repeated(given: Inputs) -> Attend:
    def repeat(part: Tensor) -> Tensor:
        B, H, S, D = part.shape
        return part[:, :, None].expand(B, H, given.group, S, D).reshape(B, H * given.group, S, D)

    return lambda keys, values: sdpa(
        given.queries, repeat(keys), repeat(values), attn_mask=given.mask, is_causal=given.is_square
    )


def _best(given: Inputs) -> Attend:
    """Each way once to warm up and once in earnest, and the fastest one."""
    ways: list[Attend] = [partial(_grouped, given), _repeated(given)]
    if given.queries.shape[2] == 1:
        ways.append(partial(_as_rows, given))
    keys, values = given.copies[0]
    times = [min(timed(partial(way, keys, values), keys.device)(2)) for way in ways]
    return ways[times.index(min(times))]


def _grouped(given: Inputs, keys: Tensor, values: Tensor) -> Tensor:
    return sdpa(given.queries, keys, values, attn_mask=given.mask, is_causal=given.is_square, enable_gqa=True)


def _as_rows(given: Inputs, keys: Tensor, values: Tensor) -> Tensor:
    B, H, _, D = keys.shape
    return sdpa(given.queries.view(B, H, given.group, D), keys, values).view(B, H * given.group, 1, D)


def _flex(given: Inputs) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T, S = given.queries.shape[2], given.copies[0][0].shape[2]
    mask = None
    if T > 1:
        mask = create_block_mask(lambda _b, _h, q, k: q + (S - T) >= k, None, None, T, S, device=given.queries.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    attend: Attend = partial(compiled, given.queries, block_mask=mask, enable_gqa=True)
    try:
        attend(*given.copies[0])
    except Exception as error:  # a compiler's errors are of many types
        raise RuntimeError(f"it does not compile here: {_first_line(error)}") from error
    return attend


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


PEERS: dict[str, Callable[[Inputs], Attend]] = {
    "SDPA transformers": _transformers,
    "SDPA repeat_kv": _repeated,
    "SDPA best": _best,
    "flex_attention": _flex,
}
