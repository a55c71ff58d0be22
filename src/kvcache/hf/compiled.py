"""`torch.compile` over a packed forward: what lies between two attentions becomes fused loops.

An unmodified model's decoder is traced as one graph for any number of tokens (one more for a single token). What the
compiler must not look into are three operators, opaque to it:

    k, v -- TracedCache.update -->  unchanged: nothing is stored while tracing
    q, k, v -- kvcache::attend -->  the layer's keys and values are put, and attention reads the blocks in place
    x, weight -- kvcache::linear --> a product by whom `linears.py` chooses

While a graph runs, `attend` finds its cache by the thread: `running` names it for the time of one call. Compiling takes
a minute on two cores.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import Cache as TransformersCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from kvcache.caches import Cache
from kvcache.errors import NotSupported
from kvcache.hf.layout import Layout
from kvcache.hf.runner_readers import put_rows

__all__ = ["NAME", "TracedCache", "refusal_of", "running"]

NAME = "kvcache-compiled"
"""The name of this attention among transformers'."""

_thread = threading.local()


def refusal_of(layout: Layout, *, is_plain: bool) -> str | None:
    """Why a model cannot be compiled; `None` when it can. `is_plain`: each layer reads, by rows, what it was given."""
    if not is_plain or layout.is_encoder_decoder:
        return "its layers keep more than keys and values that attention reads in place"
    if any(layer.span is None or layer.is_cross or layer.is_shared for layer in layout.layers):
        return "some of its layers keep no keys and values of their own"
    return None


@contextmanager
def running(members: Sequence[Cache]) -> Iterator[None]:
    """A compiled forward over these members, one for each layer."""
    _thread.members = members
    try:
        yield
    finally:
        del _thread.members


@final
class TracedCache(TransformersCache):
    """The cache that the compiler sees: it has nothing to store. `positions`: int64 [T] of the forward to come."""

    is_compileable = True

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self.positions: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """What to add to `arange(T)` for the true positions, as `PackedCache` answers (Llama 4's temperature)."""
        return self.positions - torch.arange(self.positions.shape[0], device=self.positions.device)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: [1,Hq,T,D] of one layer; output [1,T,Hq,Dv]."""
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise NotSupported("the model masks attention itself, which compiled rows do not support; leave compile off")
    layer: Any = module.layer_idx
    return torch.ops.kvcache.attend(query, key, value, layer, scaling, softcap, s_aux), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    member: Cache = _thread.members[layer]
    put_rows(member, layer, key, value)
    rows = query.transpose(1, 2)[0]
    out: Tensor = member.attend(rows, scale=scale, softcap=softcap, sinks=sinks)
    return out[None]


def _attend_shape(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> Tensor:
    B, Hq, n, _D = query.shape
    return query.new_empty((B, n, Hq, value.shape[3]))


def _no_mask(**_: Any) -> None:
    """Causality, span and sequences are the cache's own business."""


_library = torch.library.Library("kvcache", "FRAGMENT")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float? scale, float? softcap, Tensor? sinks) -> Tensor"
)
_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("kvcache::attend", _attend_shape, lib=_library)
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, _no_mask)
