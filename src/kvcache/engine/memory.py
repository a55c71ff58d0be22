"""How many blocks each member of the cache gets out of so many bytes.

What a token takes is measured, not computed from a configuration: two tokens run through the model into a small
cache, which then tells its size. Full members get N blocks; members with a window get what `max_sequences` windows
need, or a quarter of N to keep old prefixes for reuse, whichever is more, and never more than N. N is the largest that
fits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from transformers import PreTrainedModel

from kvcache.caches import Cache, CausalCache, RecurrentCache
from kvcache.hf.layout import Layout
from kvcache.hf.linears import available_bytes
from kvcache.hf.runner import Runner
from kvcache.hf.trial import two_tokens
from kvcache.scheduler import MemberShape

__all__ = ["Sizes", "divide", "measure", "parse_bytes"]

DEFAULT_SHARE = 4
"""Of the memory that is available the cache takes a quarter, unless told: the model's activations need some too."""

DEFAULT_TOKENS = 8192
"""Nor more than this many tokens for each of `max_sequences`, unless told: more is seldom needed at once."""

WINDOW_SHARE = 4

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """What was measured, in bytes: of a block of each member (0: it has none), and of one sequence's states."""

    blocks: tuple[int, ...]
    states: int


def parse_bytes(text: str | int) -> int:
    """`"4GiB"`, `"512 MB"` or a number of bytes.

    >>> parse_bytes("1.5KiB")
    1536
    """
    if isinstance(text, int) and not isinstance(text, bool):
        number = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(text), re.IGNORECASE)
        if not match or isinstance(text, bool):
            raise ValueError(f"kv_bytes is {text!r}; expected a number of bytes or a text such as '4GiB' or '512MB'")
        number = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    if number <= 0:
        raise ValueError(f"kv_bytes is {text!r}; expected more than 0 bytes")
    return number


def _total_bytes(device: torch.device) -> int | None:
    """Memory of the device, in use or not; None where nobody tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def measure(model: PreTrainedModel, layout: Layout, dtype: str | tuple[str, str], block_size: int) -> Sizes:
    """Run two tokens into a cache of a few blocks and look at what they took."""
    with Runner(
        model,
        layout=layout,
        capacity=4 * block_size,
        dtype=dtype,
        max_sequences=1,
        max_batch=min(4, 4 * block_size),
        block_size=block_size,
        fast_layers=False,
    ) as runner:
        runner.forward([two_tokens(model, layout)])
        blocks, states = [], 0
        for member in runner.members:
            used = member.usage()
            blocks.append(used.num_bytes // used.num_blocks if used.num_blocks else 0)
            if isinstance(member, RecurrentCache):
                states = used.num_bytes
        return Sizes(tuple(blocks), states)


def divide(
    num_bytes: int | None,
    sizes: Sizes,
    members: Sequence[Cache],
    *,
    max_sequences: int,
    max_batch: int,
    max_length: int | None,
    device: torch.device,
) -> list[MemberShape]:
    """Blocks for each member that has any, in order. `num_bytes=None`: a share of what is available.

    Raises `ValueError` when not even two blocks of each fit, and for more than the device has.
    """
    causal = [
        (member, size) for member, size in zip(members, sizes.blocks, strict=True) if isinstance(member, CausalCache)
    ]
    block_size = causal[0][0].block_size if causal else 1
    most: int | None = None
    if num_bytes is None:
        num_bytes = available_bytes(device) // DEFAULT_SHARE
        most = max_sequences * (-(-min(max_length or DEFAULT_TOKENS, DEFAULT_TOKENS) // block_size) + 1)
    elif (total := _total_bytes(device)) is not None and num_bytes > total:
        raise ValueError(f"kv_bytes is {num_bytes}; the memory of {device} is {total} bytes: give less")
    budget = num_bytes - 2 * max_sequences * sizes.states  # one in use, one kept aside during a step, each

    def shapes(count: int) -> list[MemberShape]:
        made = []
        for member, _ in causal:
            span = member.span.resolve(max_sequences)
            retained = span.num_retained(2**62)
            if retained == 2**62:
                made.append(MemberShape(block_size, count))
                continue
            live = max_sequences * (-(-retained // block_size) + 2) + -(-max_batch // block_size)
            made.append(MemberShape(block_size, min(count, max(live, count // WINDOW_SHARE)), retained))
        return made

    def cost(count: int) -> int:
        return sum(shape.num_blocks * size for shape, (_, size) in zip(shapes(count), causal, strict=True))

    if budget < cost(2):
        raise ValueError(
            f"kv_bytes is {num_bytes}; two blocks of {block_size} tokens take {cost(2)} bytes and the states of "
            f"{max_sequences} sequences {2 * max_sequences * sizes.states}: give more, or lower max_sequences"
        )
    low, high = 2, 4
    while cost(high) <= budget and (most is None or high < most) and causal and cost(high) < 2**60:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return shapes(low if most is None else min(low, most))
