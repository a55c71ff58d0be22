"""What an unmodified transformers model takes for its cache while several ragged sequences share one forward.

The model believes in `[B,n]` tokens with one history for all; our caches believe in T = B * n rows, each of its own
sequence. `PackedCache` stands between them: `update` stores the new keys and values and hands the keys back *tagged*
with a reader (`hf/attention.py`), which the attention function asks instead of looking at keys.

    model layer                      PackedCache                      kvcache
    k, v [B,H,n,D]  -- update -->    rows [T,H,D]  -- put -->         blocks of each sequence
    attention(q, k) -- reader -->    rows [T,Hq,D] -- attend -->      out [T,Hq,Dv] -> [B,n,Hq,Dv]

| layer                         | what is different                                                                   |
|-------------------------------|-------------------------------------------------------------------------------------|
| latent attention (MLA)        | attended in the latent space: `hf/runner_latent.py`                                 |
| relative position bias (T5)   | `BiasedReader`: histories side by side, a column for each bias that the model makes |
| cross attention               | an `EncoderCache`: `CrossCache`, or inside (Mllama, whose layers share one cache)   |
| convolution, SSM, linear      | states are lent for the pass and written back after it (`write_back`)               |
| no AttentionInterface (BLOOM) | `hf/runner_dense.py`                                                                |

A model may update a lent state in place, without telling (one-token steps of Mamba 2, Qwen3-Next, LFM2, Falcon-H1):
what is lent is never what the cache holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers import EncoderDecoderCache

from kvcache.caches import Cache, CausalCache, EncoderCache
from kvcache.errors import NotSupported
from kvcache.hf.attention import Gathered, Handed, MaskLength, tag_both
from kvcache.hf.layout import Layout
from kvcache.hf.runner_latent import LatentReader
from kvcache.hf.runner_readers import BiasedReader, Columns, RowReader, Step, put_rows
from kvcache.spans import Full

__all__ = ["CrossCache", "PackedCache", "PackedPair"]


@final
class _LayerFace:
    """What models read of `cache.layers[i]` directly: keys, values, whether there are any."""

    __slots__ = ("_layer", "_owner", "is_sliding")

    supports_early_init = False

    def __init__(self, owner: CrossCache | PackedCache, layer: int, *, is_sliding: bool) -> None:
        self._owner = owner
        self._layer = layer
        self.is_sliding = is_sliding

    @property
    def is_initialized(self) -> bool:
        return self._owner.step.has_media and self._owner.is_cross(self._layer)

    @property
    def keys(self) -> Tensor:
        return self._owner.stored(self._layer).keys

    @property
    def values(self) -> Tensor:
        return self._owner.stored(self._layer).values


@final
class PackedCache(TransformersCache):
    """The cache that the decoder sees, over the members of the layout. `begin` comes before each call of the model."""

    is_compileable = False

    def __init__(
        self,
        layout: Layout,
        members: Sequence[Cache],
        encoder: EncoderCache | None,
        *,
        latents: Mapping[int, LatentReader],
        biased_layers: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        # Not the base class's fields: it would make storage of its own.
        self.layers: list[Any] = [
            _LayerFace(self, i, is_sliding=not isinstance(layer.span, Full | None))
            for i, layer in enumerate(layout.layers)
        ]
        self.layer_class_to_replicate = None
        self.offloading = False
        self.step: Step
        self._members = [
            encoder if layer.is_cross else None if layer.span is None else members[layout.member(i)]
            for i, layer in enumerate(layout.layers)
        ]
        self._readers = [None if member is None else RowReader(member, i) for i, member in enumerate(self._members)]
        self._latents = latents
        self._biased = {i: BiasedReader(i) for i in range(len(layout.layers))} if biased_layers else {}
        self._biased_layers = frozenset(biased_layers)
        self._columns: Columns | None = None
        self._states = members[layout.state_member] if layout.has_states else None
        self._loans: dict[int, list[Tensor | None]] = {}
        self._dummy = torch.zeros((1, 1, 1, 1), dtype=dtype)
        self._counts_columns = layout.counts_columns
        self._mask_length = MaskLength(0, RowReader(members[0], 0))
        self._handed = Handed()

    @property
    def is_plain(self) -> bool:
        """Whether every layer stores the keys and values that it is given, and reads them in place by rows."""
        return not (self._latents or self._biased)

    def begin(self, step: Step) -> None:
        """The next call of the model is `step`; the members have started their pass."""
        self.step = step
        self._handed.begin()
        self._loans.clear()
        if self._biased:
            member = self._members[0]
            assert isinstance(member, CausalCache)  # models with a position bias have full attention only
            self._columns = Columns(member, step)
            for reader in self._biased.values():
                reader.columns = self._columns

    # --- keys and values --------------------------------------------------------------------------------------------

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if latent := self._latents.get(layer_idx):
            return latent.store(key_states, value_states)
        member, reader = self._members[layer_idx], self._readers[layer_idx]
        if member is None or reader is None:
            raise ValueError(f"layer {layer_idx} updates keys and values, and its layout says that it keeps none")
        put_rows(member, layer_idx, key_states, value_states)
        if self._columns is not None:
            stand_in = self._dummy.expand(1, 1, len(self._columns), 1)  # only its length is looked at
            return tag_both(stand_in, value_states, self._biased[layer_idx])
        return self._handed.out(key_states, value_states, reader)

    def is_cross(self, layer: int) -> bool:
        """Whether the keys of `layer` come from an encoder."""
        return isinstance(self._members[layer], EncoderCache)

    def stored(self, layer: int) -> Gathered:
        """What stands for the keys and values of a cross-attention layer that was put in an earlier pass."""
        reader = self._readers[layer]
        if reader is None or not self.is_cross(layer):
            raise NotSupported(
                f"the model reads keys of layer {layer} past update(); packed rows hand out tagged keys only"
            )
        return tag_both(self._dummy, self._dummy, reader)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Not one number but a tensor: what to add to `arange(T)` for the true positions.

        Models that add it are right unmodified (Llama 4's temperature, T5's bias); one that compares it, or sizes a
        mask by it (OPT, Bart), raises: such a model has calls of equally long rows (`Layout.counts_columns`).
        """
        if self._counts_columns:
            return int(self.step.batch.positions[0])  # of all rows: they are equally long
        if self._columns is not None:
            return self._columns.offsets if layer_idx in self._biased_layers else 0
        return self.step.positions - torch.arange(len(self.step.positions), device=self.step.positions.device)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._mask_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    # --- states -----------------------------------------------------------------------------------------------------

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self.step.is_fresh

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None if self.step.is_fresh else self._loan(layer_idx, state_idx)[0]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None if self.step.is_fresh else self._loan(layer_idx, state_idx)[1]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append to the convolution state; answers with the previous state and the new tokens, [B,C,K + n]."""
        loan = self._loan(layer_idx, state_idx)
        previous = loan[0]
        size = previous.shape[-1] if previous is not None else conv_kernel_size or conv_states.shape[-1]
        if previous is not None:
            conv_states = torch.cat((previous, conv_states), dim=-1)
        elif conv_states.shape[-1] < size:
            conv_states = torch.nn.functional.pad(conv_states, (size - conv_states.shape[-1], 0))
        # A copy: a view would keep the whole pass alive for as long as the state.
        loan[0] = conv_states[..., conv_states.shape[-1] - size :].clone()
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._loan(layer_idx, state_idx)[1] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def write_back(self) -> None:
        """The call went well: states as the model left them become the sequences' states."""
        self._handed.check()
        for layer, (conv, recurrent) in self._loans.items():
            assert self._states is not None  # loans are of its states
            self._states.set_layer(layer)
            self._states.put(conv, recurrent)
        self._loans.clear()

    def _loan(self, layer: int, state_index: int) -> list[Tensor | None]:
        loan = self._loans.get(layer)
        if loan is None:
            if self._states is None:
                raise ValueError(f"layer {layer} asks for states, and its layout says that it keeps none")
            if state_index:
                raise NotSupported(f"layer {layer} keeps several convolution states; packed rows support one")
            loan = [None, None]
            if not self.step.is_fresh:
                self._states.set_layer(layer)
                history = self._states.get()
                loan[:] = history.keys, history.values
            self._loans[layer] = loan
        return loan

    # --- refused ----------------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        _refuse("reorder_cache")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        _refuse("crop")


@final
class CrossCache(TransformersCache):
    """The cross-attention half of an encoder-decoder's cache: what the encoder made of each sequence's media."""

    is_compileable = False

    def __init__(self, encoder: EncoderCache, num_layers: int, dtype: torch.dtype) -> None:
        self.layers: list[Any] = [_LayerFace(self, layer, is_sliding=False) for layer in range(num_layers)]
        self.layer_class_to_replicate = None
        self.offloading = False
        self.step: Step
        self._encoder = encoder
        self._readers = [RowReader(encoder, layer) for layer in range(num_layers)]
        self._dummy = torch.zeros((1, 1, 1, 1), dtype=dtype)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        put_rows(self._encoder, layer_idx, key_states, value_states)
        return self.stored(layer_idx)

    def is_cross(self, layer: int) -> bool:
        """All of them."""
        return True

    def stored(self, layer: int) -> Gathered:
        """Tagged stand-ins for the keys and values of all media that the pass sees."""
        return tag_both(self._dummy, self._dummy, self._readers[layer])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _IsUpdated(dict[int, bool]):
    """`EncoderDecoderCache.is_updated`: whether a layer need not be put in this pass. Models set it too, in vain."""

    new_media = False

    def get(self, layer: int, default: Any = None) -> bool:
        return not self.new_media


@final
class PackedPair(EncoderDecoderCache):
    """Self and cross attention of an encoder-decoder. `isinstance(EncoderDecoderCache)` is what the models check."""

    def __init__(self, decoder: PackedCache, cross: CrossCache) -> None:
        self.self_attention_cache: Any = decoder
        self.cross_attention_cache: Any = cross
        self.is_updated: Any = _IsUpdated()

    def begin(self, step: Step) -> None:
        """The next call of the model is `step`."""
        self.cross_attention_cache.step = step
        self.is_updated.new_media = step.new_media


def _refuse(operation: str) -> NoReturn:
    raise NotSupported(f"{operation} belongs to generate(); a Runner's sequences are changed through its cache")
