"""What a model's forward is told about its cache: `generate()` shows a cache keys and values, never tokens.

One pre-hook and one post-hook per model, installed by the first `cache_for(model)`. A forward that carries no cache of
ours passes through untouched; else the hooks announce its tokens and its padding before it, and its end after it:

    before    cache.announce(Announcement(tokens, num_rows, num_tokens, mask))
    after     cache.finish(failed)        # also when the forward raised, so that a half-done pass is taken back

Token ids identify a column only when nothing else went into it. So the arguments that do not matter are listed, and any
other argument (images, embeddings, encoder states, positions of one's own) makes the columns of that forward unknown.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn

__all__ = ["Announcement", "Listener", "install"]

# Arguments that leave keys and values what the tokens say. attention_mask and position_ids are looked at by themselves.
_HARMLESS = frozenset(
    {
        "input_ids",
        "decoder_input_ids",
        "attention_mask",
        "decoder_attention_mask",
        "position_ids",
        "past_key_values",
        "cache_params",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "logits_to_keep",
        "cache_position",
        "labels",
        "next_sequence_length",
    }
)
# Token types matter only together with the images that they place; text has zeros everywhere.
_TOKEN_TYPES = frozenset(("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"))


class Announcement(NamedTuple):
    """A forward about to run: B rows of n tokens.

    tokens: int64 [B,n] on the host; `None` when ids do not identify them.
    mask: the padding mask [B, columns], past ones included, when there is one.
    """

    tokens: Tensor | None
    num_rows: int
    num_tokens: int
    mask: Tensor | None


@runtime_checkable
class Listener(Protocol):
    """A cache that wants to be told."""

    def announce(self, model: nn.Module, announcement: Announcement) -> None:
        """A forward of `model` with this cache is about to run."""

    def finish(self, *, failed: bool) -> None:
        """It is over."""

    def num_skipped(self, tokens: Tensor, mask: Tensor | None, positions: Any) -> int:
        """How many leading tokens of this call the cache holds already, where they have not been taken off before."""

    def hides_padding_alone(self, announcement: Announcement) -> bool:
        """Whether its mask hides left padding and nothing else."""

    def expected_positions(self, announcement: Announcement) -> Tensor:
        """The positions [B,n] that plain text has here."""


_hooked: WeakSet[nn.Module] = WeakSet()


def install(model: nn.Module) -> None:
    """Hook this model, once. Costs some 20 µs per forward."""
    if model not in _hooked:
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True, always_call=True)
        _hooked.add(model)


def _listener(kwargs: dict[str, Any]) -> Listener | None:
    cache = kwargs.get("past_key_values")
    cache = kwargs.get("cache_params") if cache is None else cache
    cache = getattr(cache, "self_attention_cache", cache)
    return cache if isinstance(cache, Listener) else None


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    cache = _listener(kwargs)
    if cache is None:
        return None
    is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    ids_name, mask_name = (
        ("decoder_input_ids", "decoder_attention_mask") if is_encoder_decoder else ("input_ids", "attention_mask")
    )
    tokens = args[0] if args and not is_encoder_decoder else kwargs.get(ids_name)
    embeds = kwargs.get("decoder_inputs_embeds" if is_encoder_decoder else "inputs_embeds")
    shaped = tokens if tokens is not None else embeds
    if shaped is None:
        return None
    mask = kwargs.get(mask_name)
    mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
    changed = None
    if tokens is not None and not args and (skipped := cache.num_skipped(tokens, mask, kwargs.get("position_ids"))):
        kwargs = dict(kwargs) | {ids_name: tokens[:, skipped:]}
        if mask is not None and "cache_params" in kwargs:
            kwargs[mask_name] = mask[:, skipped:]
        for name in ("position_ids", *_TOKEN_TYPES):
            if isinstance(given := kwargs.get(name), Tensor) and given.shape[-1] == tokens.shape[1]:
                kwargs[name] = given[..., skipped:]
        changed, tokens = (args, kwargs), tokens[:, skipped:]
        shaped = tokens
    if not shaped.shape[1]:
        raise ValueError(
            "the prompt has no token beyond those that the cache holds; expected all of them and at least one more: "
            "call cache.reuse(input_ids) before generate(), which keeps what agrees"
        )
    announcement = Announcement(None, shaped.shape[0], shaped.shape[1], mask)
    if tokens is not None and _identified(cache, announcement, kwargs, is_encoder_decoder):
        announcement = announcement._replace(tokens=tokens.detach().to("cpu", torch.int64))
    cache.announce(model, announcement)
    return changed


def _after(
    model: nn.Module,  # noqa: ARG001  the signature of a forward hook
    args: tuple[Any, ...],  # noqa: ARG001
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    cache = _listener(kwargs)
    if cache is not None:
        cache.finish(failed=output is None)


def _identified(cache: Listener, announcement: Announcement, kwargs: dict[str, Any], is_encoder_decoder: bool) -> bool:
    """Whether token ids say all about the keys and values of this forward."""
    for name, value in kwargs.items():
        if name in _HARMLESS or value is None or isinstance(value, (bool, int, str)):
            continue
        if name in _TOKEN_TYPES and isinstance(value, Tensor) and not bool(value.any()):
            continue
        if is_encoder_decoder and name == "encoder_outputs":
            continue  # the decoder's keys depend on it, and `reuse` says so
        return False
    given = kwargs.get("decoder_attention_mask" if is_encoder_decoder else "attention_mask")
    if (given is not None and announcement.mask is None) or not cache.hides_padding_alone(announcement):
        return False  # what a token cannot see changes its keys and values from the second layer on
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor):
        expected = cache.expected_positions(announcement)
        padded = expected < 0
        return bool(((positions.cpu() == expected) | padded).all())
    return True
