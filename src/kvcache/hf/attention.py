"""`attn_implementation="kvcache"`: attention of unmodified transformers models that reads a cache's blocks in place.

A model calls `cache.update(keys, values, layer)` and hands what comes back to its attention function. A cache of ours
answers with the new keys *tagged* with a `Reader`, an attribute that travels with the tensor (through Gemma's shared
layers too), and the function below asks the reader instead of looking at the keys:

| keys     | mask | what happens                                                                                       |
|----------|------|----------------------------------------------------------------------------------------------------|
| tagged   | None | `reader.attend(call)`: blocks in place; causality, span and left padding are the cache's own       |
| tagged   | any  | it answers `None`: `reader.gather()`, then attention with that mask (image blocks, 4D masks)       |
| untagged | any  | attention as transformers would do it (encoders, cross attention, other caches, no cache)          |

Values are tagged likewise, and a reader knows whether it was asked: a model that changes keys or values between the
cache and attention (DiffLlama, JetMoe) is refused instead of answered wrongly.

Whether a mask is needed is decided where transformers makes masks: `get_mask_sizes` of our caches answers with a
`MaskLength`, an `int` that remembers its cache, and the mask function registered here returns `None` exactly when the
pattern is the plain one and the padding is what the cache knows; else it makes the real mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, NoReturn, Self, final

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kvcache.errors import NotSupported
from kvcache.kernels import check_softcap

__all__ = [
    "NAME",
    "Call",
    "Gathered",
    "Handed",
    "MaskLength",
    "Reader",
    "attention_with_scores",
    "is_in_place",
    "reader_of",
    "register",
    "tag",
    "tag_both",
    "without_gradient",
]

NAME = "kvcache"
"""The name for `attn_implementation`."""

_TAG = "_kvcache_reader"


class Gathered(NamedTuple):
    """Keys [B,H,S,D] and values [B,H,S,Dv] as models expect them, columns in the order of tokens."""

    keys: Tensor
    values: Tensor


class Call(NamedTuple):
    """One call of an attention function.

    queries: [B,Hq,q,D] of `module`; mask: bool or additive [B,1,q,S], or `None`; scale: `None` for D**-0.5; softcap,
    sinks [Hq], position_bias [1,Hq,q,S]: `None` without; is_causal: `None` when the model leaves it to the mask.
    """

    module: nn.Module
    queries: Tensor
    mask: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    position_bias: Tensor | None
    is_causal: bool | None
    dropout: float

    @property
    def is_plain(self) -> bool:
        """Whether causality, the span and the padding that the cache knows say all: blocks can be read in place."""
        return self.mask is None and self.position_bias is None and self.is_causal is not False and not self.dropout


def _refuse_changed(what: str) -> NoReturn:
    """For keys or values that are not what the cache handed out."""
    raise NotSupported(
        f"the model changes {what} between the cache and its attention, so that blocks cannot be read in place; leave "
        f"it the attention that it came with (attn_implementation='sdpa' or 'eager')"
    )


class Reader(ABC):
    """What tagged keys carry: a way to read one layer of a cache for the pass under way."""

    was_asked = True
    """By the attention function, since it was handed out."""

    @property
    @abstractmethod
    def window(self) -> int | None:
        """The sliding window of the layer, own token included; `None` without one."""

    @abstractmethod
    def attend(self, call: Call) -> Tensor | None:
        """Attention [B,q,Hq,Dv], zeros for queries of padding; `None` when whole keys are needed, see `gather`."""

    @abstractmethod
    def gather(self) -> Gathered:
        """The columns that the mask of this layer has, as last told by `get_mask_sizes`."""

    @abstractmethod
    def knows_padding(self, attention_mask: Tensor | None) -> bool:
        """Whether this padding mask [B, columns] hides nothing but what the cache leaves out by itself."""


class MaskLength(int):
    """The number of mask columns, for `get_mask_sizes`; `reader` decides whether a mask is needed at all."""

    reader: Reader

    def __new__(cls, value: int, reader: Reader) -> Self:
        length = int.__new__(cls, value)
        length.reader = reader
        return length


@final
class Handed:
    """The readers that a cache hands out in one pass of a model, which asks each before it wants the next."""

    def __init__(self) -> None:
        self._last: Reader | None = None

    def begin(self) -> None:
        """A new pass: what became of the one before does not matter."""
        self._last = None

    def out(self, keys: Tensor, values: Tensor, reader: Reader) -> Gathered:
        """Keys and values tagged with a reader. Raises as `check` does."""
        self.check()
        self._last, reader.was_asked = reader, False
        return tag_both(keys, values, reader)

    def check(self) -> None:
        """Raise `NotSupported` when the last one was not asked: attention has got other keys."""
        if self._last is not None and not self._last.was_asked:
            _refuse_changed("keys")


def tag_both(keys: Tensor, values: Tensor, reader: Reader) -> Gathered:
    """Both, tagged."""
    return Gathered(tag(keys, reader), tag(values, reader))


def tag(states: Tensor, reader: Reader) -> Tensor:
    """A view of keys or values that carries `reader` to the attention function."""
    tagged = states.view_as(states)
    setattr(tagged, _TAG, reader)
    return tagged


def reader_of(states: Tensor) -> Reader | None:
    """The reader of tagged keys or values."""
    return getattr(states, _TAG, None)


@final
class _WithoutGradient(torch.autograd.Function):
    """What came through a cache, which stores no gradients: going back through it raises."""

    @staticmethod
    def forward(_ctx: Any, result: Tensor, *_sources: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> NoReturn:
        raise NotSupported(
            "gradients do not flow through keys and values that a cache stores; call the model without this cache to "
            "train it (past_key_values=None, use_cache=False)"
        )


def without_gradient(result: Tensor, *sources: Tensor) -> Tensor:
    """`result`, made of `sources` where no gradient reaches them: going back raises, where it would leave them out."""
    if not torch.is_grad_enabled() or not any(source.requires_grad for source in sources):
        return result
    marked: Tensor = _WithoutGradient.apply(result, *sources)  # type: ignore[no-untyped-call]
    return marked


def register() -> None:
    """Make `attn_implementation="kvcache"` known to transformers; done when this file is imported."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask_for)


def is_in_place(config: Any) -> bool:
    """Whether a model with this (text) config attends through `attention_forward`."""
    return getattr(config, "_attn_implementation", None) == NAME


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,  # noqa: ARG001  what other implementations want
) -> tuple[Tensor, None]:
    """The attention function: queries [B,Hq,q,D] over keys [B,H,S,D]; output [B,q,Hq,Dv], no weights."""
    check_softcap(softcap)
    reader = reader_of(key)
    if reader_of(value) is not reader:
        _refuse_changed("values" if reader is not None else "keys")
    if reader is not None:
        reader.was_asked = True
        if sliding_window is not None and reader.window != sliding_window:
            raise ValueError(
                f"the layer attends to a window of {sliding_window} tokens and the cache keeps it for {reader.window}; "
                f"make the cache for this model: cache_for(model, ...)"
            )
        call = Call(module, query, attention_mask, scaling, softcap, s_aux, position_bias, is_causal, dropout)
        answer = reader.attend(call)
        if answer is not None:
            return without_gradient(answer, query, key, value), None
        key, value = reader.gather()
    if softcap is None and s_aux is None:
        output, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
        )
        return output, None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    bias = _additive(attention_mask, position_bias, query, key, is_causal=causal)
    return attention_with_scores(query, key, value, bias, dropout, scaling, softcap, s_aux), None


def attention_mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function: bool or additive [B,1,q,S], `None` where a cache of ours sees to everything itself."""
    in_place = isinstance(kv_length, MaskLength)
    # transformers allows the skip for plain causal, sliding and chunked patterns only: not for image blocks, packed
    # rows or bidirectional attention.
    if isinstance(kv_length, MaskLength) and allow_is_causal_skip and kv_length.reader.knows_padding(attention_mask):
        return None
    make = eager_mask if _adds_masks(type(config)) else sdpa_mask
    mask: Tensor | None = make(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=int(kv_length),
        attention_mask=attention_mask,
        allow_is_causal_skip=False,  # it asks modules whether they are causal, and those of eager models may lie
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and not in_place,
        **kwargs,
    )
    return mask


def _adds_masks(config: type) -> bool:
    """Whether models with such a configuration may read masks themselves, as additive ones: they know no SDPA."""
    model = MODEL_MAPPING.get(config, None)
    return getattr(model, "_supports_sdpa", True) is False


def _additive(
    mask: Tensor | None, position_bias: Tensor | None, query: Tensor, key: Tensor, *, is_causal: bool
) -> Tensor | None:
    """Mask and position bias as one additive tensor; without a mask, several queries are causal, ends aligned."""
    q, S = query.shape[2], key.shape[2]
    if mask is None and is_causal and q > 1:
        mask = torch.ones((q, S), dtype=torch.bool, device=query.device).tril(S - q)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min)
    if mask is None or position_bias is None:
        return position_bias if mask is None else mask
    return mask + position_bias


def attention_with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention [B,q,Hq,Dv] with the scores at hand, softmax in float32: softcap (Gemma 2), sinks (GPT-OSS)."""
    B, Hq, q, D = query.shape
    H, S = key.shape[1], key.shape[2]
    folded = query.reshape(B, H, Hq // H * q, D)
    scores = torch.matmul(folded, key.transpose(2, 3)) * (D**-0.5 if scaling is None else scaling)
    scores = scores.view(B, Hq, q, S).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        column = sinks.to(scores).reshape(1, Hq, 1, 1).expand(B, Hq, q, 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    weights = torch.dropout(weights.to(value.dtype), dropout, train=dropout > 0.0)
    output = torch.matmul(weights.reshape(B, H, Hq // H * q, S), value)
    return output.view(B, Hq, q, value.shape[3]).transpose(1, 2).contiguous()


register()
