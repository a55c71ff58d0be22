"""The cache that `generate()` takes: transformers' interface in front of a `Pool`.

    cache = cache_for(model, capacity=32_768, dtype="q8_0")
    model.generate(**inputs, past_key_values=cache)        # Mamba: cache_params=cache
    cache.reuse(next_inputs.input_ids)                      # rewinds to the common prefix
    model.generate(**next_inputs, past_key_values=cache)
    branch = copy.deepcopy(cache)                           # a fork: shares every block

What happens during one forward:

    hook               announce: tokens, padding                      `hooks.py`
    get_mask_sizes     columns of the mask of each kind of layer
    update             first one: Pass starts, places are found       `passes.py`
                       each: put; then whole keys, or tagged ones
    get_conv_state ... states, lent                                   `states.py`
    hook               finish: states written back, or all undone

A cache holds B rows of `length` columns; a column is a token or left padding. Everything that selects, repeats or
copies rows (beams, forks, `reuse` of one of several rows) shares blocks. The file is long because transformers'
interface is wide: most methods are its names for one line of ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import Cache as TransformersCache
from transformers import PreTrainedModel

from kvcache.errors import CorruptState, NotSupported
from kvcache.hf.attention import Call, Gathered, Handed, MaskLength, Reader, is_in_place, without_gradient
from kvcache.hf.gather import columns_of
from kvcache.hf.hooks import Announcement
from kvcache.hf.layers import layer_of
from kvcache.hf.layout import Layer, decoder_of
from kvcache.hf.media import NUM_MEDIA, CrossStates
from kvcache.hf.passes import LayerReader, Pass, Rows, first_column
from kvcache.hf.pool import Pool
from kvcache.hf.reuse import Reuse, as_mask, as_rows, is_integral, plan_reuse
from kvcache.hf.states import LentStates, recorded_before
from kvcache.hf.transcript import Transcript
from kvcache.spec import Match, Usage, integer

__all__ = ["GenerateCache"]


@final
class GenerateCache(TransformersCache):
    """See the head of the file. Made by `cache_for`."""

    def __init__(self, model: PreTrainedModel, pool: Pool) -> None:
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._decoder_config = decoder_of(model).config
        self._device = model.device
        self._pool = pool
        self._layout = pool.layout
        self._rows = Rows()
        self._transcript = Transcript()
        self._pass: Pass | None = None
        self._handed = Handed()
        self._announced: Announcement | None = None
        self._is_running = False  # between `announce` and `finish`
        self._reused = 0  # columns that `reuse` kept, until the next pass
        self._may_expand = False  # after `reuse`: generate may repeat each row for beams
        self._records = False
        self._dtype = model.dtype
        self.media = CrossStates(pool, self._rows)
        super().__init__(layers=[layer_of(self, i, layer) for i, layer in enumerate(self._layout.layers)])
        self.on_reset: Callable[[], None] = _nothing
        weakref.finalize(self, _discard, pool, self._rows)

    # --- for generate(): attention ------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys [B,H,q,D] and values; answer with all of the layer [B,H,S,D], or with tagged new ones."""
        layer = self._layer(layer_idx)
        if layer.is_cross:
            return self.put_media(layer_idx, key_states, value_states)
        if layer.span is None:
            raise ValueError(f"layer {layer_idx} of {self._name} keeps no keys; this cache was made for another model")
        self._dtype = key_states.dtype
        current = self._pass_of(layer_idx, key_states.shape[0], key_states.shape[2])
        whole = current.put(layer_idx, key_states, value_states)
        if self._in_place:
            reader = LayerReader(current, layer_idx, Gathered(key_states, value_states), whole)
            return self._handed.out(key_states, value_states, reader)
        keys, values = whole or current.gather(layer_idx, key_states, value_states)
        if keys is key_states:
            return keys, values
        return without_gradient(keys, key_states), without_gradient(values, value_states)

    def put_media(self, layer_idx: int, keys: Tensor, values: Tensor) -> Gathered:
        """Keys [B,H,S,D] and values that an encoder made, for cross attention."""
        self._pass_of(None, keys.shape[0], None)
        return self.media.put(layer_idx, keys, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns stored in a layer: during a forward, those before it until the layer is updated."""
        current = self._pass
        if current is not None and current.is_open and current.seen and layer_idx not in current.seen:
            return current.begin
        return self._rows.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns of the mask of this layer's kind, and the first of them."""
        length = self._rows.length
        span = self._layer(layer_idx).span
        first = 0 if span is None else first_column(span, length)
        size = length + query_length - first
        return (MaskLength(size, _MaskReader(self)) if self._in_place else size), first

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [getattr(layer, "is_sliding", False) for layer in self.layers]

    @property
    def is_linear(self) -> list[bool]:
        return [bool(x.num_states) and x.span is None for x in self._layout.layers]

    @property
    def is_dummy(self) -> list[bool]:
        return [x.is_shared for x in self._layout.layers]

    @property
    def is_croppable(self) -> bool:
        return not self._layout.has_states

    @property
    def batch_size(self) -> int:
        return len(self._rows.sequences) or -1

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No length of its own: the capacity is that of the pool."""
        return -1

    # --- for generate(): states ---------------------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The convolution state [B,C,K], to be changed in place; `None` before the first tokens."""
        states = self._states(layer_idx)
        return None if states is None else states.conv(self._state_key(layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state [B,...], to be changed in place; `None` before the first tokens."""
        states = self._states(layer_idx)
        return None if states is None else states.recurrent(self._state_key(layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Take in new inputs [B,C,q]; answers with everything that the convolution runs over."""
        states = self._states(layer_idx)
        if states is None:
            return conv_states
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        key = self._state_key(layer_idx, state_idx)
        return states.update_conv(key, conv_states, size, record=self._records)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Replace the recurrent state."""
        states = self._states(layer_idx)
        if states is None:
            return recurrent_states
        return states.update_recurrent(self._state_key(layer_idx, state_idx), recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether states of earlier tokens exist."""
        if layer_idx is not None and not self._layer(layer_idx).num_states:
            raise ValueError(f"layer {layer_idx} of {self._name} has no states")
        current = self._pass
        return (current.begin if current is not None and current.is_open else self._rows.length) > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether single tokens must go through `update_conv_state` too."""
        return self._records and self._layer(layer_idx).num_states > 0

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs to take back any part of the next forward (assisted decoding)."""
        self._records = True

    # --- for generate(): rows and rollback ----------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` columns back; 0: the last forward stays. `NotSupported` when gone."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop got {tokens_to_remove}; expected a negative number of tokens to take back, or 0")
        self._mend()
        count = min(-tokens_to_remove, self._rows.length)
        if count:
            self._cut(self._rows.length - count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was. References only."""
        self._mend()
        self._select(self._chosen(beam_idx, "beam_idx"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        repeats = integer(repeats, "repeats", minimum=1)
        self._mend()
        self._repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, by their numbers or by a bool for each."""
        self._mend()
        self._select(self._chosen(indices, "indices"))

    # --- for whoever owns the cache -----------------------------------------------------------------------------------

    def reuse(self, input_ids: Any, attention_mask: Any = None) -> Match:
        """Rewind to the longest prefix in common with a prompt [rows, tokens] about to be generated from.

        All rows keep equally many tokens and at least one is left to compute. Sliding and recurrent layers may force it
        further back; `memory` of `cache_for` widens what they retain. With left padding pass the `attention_mask` too.
        Tokens are compared, not weights: after others are loaded, or another adapter is chosen, call `reset`.
        """
        prompt = as_rows(input_ids)
        mask = as_mask(attention_mask, prompt)
        self._mend()
        self._settle()
        self._records = False
        if self._layout.is_encoder_decoder and self._rows.length:
            self.reset()
            return Match(0, "the decoder's tokens depend on the encoder's input, which is not compared")
        plan = plan_reuse(self._pool, self._rows, self._transcript, prompt, mask)
        if plan.num_columns:
            self._keep(plan)
            self._reused = plan.num_columns
            self._may_expand = True
        else:
            self.reset()
        return Match(plan.num_columns, plan.reason)

    def reset(self) -> None:
        """Forget everything and free all rows."""
        self._settle()
        self._pool.free(self._rows.sequences)
        self._rows.sequences.clear()
        self._rows.padding.clear()
        self._rows.length = self._reused = 0
        self._transcript = Transcript()
        self.media.clear()
        self._pass = self._announced = None
        self._is_running = self._may_expand = self._records = False
        self.on_reset()

    def usage(self) -> Usage:
        """What the pool holds, forks included."""
        self._settle()
        return self._pool.usage()

    def check(self) -> None:
        """Raise `CorruptState` unless the core caches are sound and hold what this cache believes."""
        self._settle()
        self._pool.check()
        rows = self._rows
        if rows.length != self._transcript.tokens.shape[1]:
            raise CorruptState(f"{rows.length} columns and {self._transcript.tokens.shape[1]} token ids")
        if found := self._unequal():
            raise CorruptState(f"a row has {found[0]} tokens and its sequence {found[1]}")

    def __deepcopy__(self, memo: dict[int, Any]) -> GenerateCache:
        """A fork: independent rows that share every block of this cache. O(blocks), no tensors."""
        model = self._model()
        if model is None:
            raise ValueError(f"the {self._name} of this cache is gone; keep the model as long as its cache")
        self._mend()
        self._settle()
        fork = GenerateCache(model, self._pool)
        memo[id(self)] = fork
        media = NUM_MEDIA if self.media.is_filled else 0
        for sequence, tokens in zip(self._rows.sequences, self._rows.num_tokens, strict=True):
            fork._rows.sequences.append(self._pool.copy(sequence, tokens, media))
        fork._rows.padding = list(self._rows.padding)
        fork._rows.length = self._rows.length
        fork._transcript = self._transcript.copy()
        fork.media = self.media.copied_to(fork._rows)
        fork._reused, fork._may_expand, fork._records = self._reused, self._may_expand, self._records
        return fork

    def __repr__(self) -> str:
        rows = self._rows
        return f"GenerateCache({self._name}, {len(rows.sequences)} rows of {rows.length} tokens)"

    # --- for the model's hooks ----------------------------------------------------------------------------------------

    def announce(self, model: nn.Module, announcement: Announcement) -> None:
        """See `hooks.Listener`."""
        if model is not self._model():
            raise ValueError(
                f"the cache was made for another model ({self._name}), and this {type(model).__name__} is not it; use "
                f"cache_for(model, ...) of the model that generates"
            )
        if taken := self._mend():
            raise ValueError(
                f"the forward before broke off (Ctrl-C), and its {taken} tokens in each row have been taken back; call "
                f"cache.reuse(input_ids) and generate() again"
            )
        rows = self._rows
        if announcement.mask is None and rows.length and any(rows.padding) and not self._is_fed_whole:
            raise ValueError(
                f"the forward comes without an attention mask [rows, columns] and rows have {rows.padding} columns of "
                f"padding, which were not cached; pass the mask with its padding, or cache.reset() "
                f"(generate() drops a mask that is all ones)"
            )
        self._settle()
        self._announced, self._is_running = announcement, True

    def finish(self, *, failed: bool) -> None:
        """See `hooks.Listener`."""
        self._is_running = False
        current, self._announced = self._pass, None
        if current is None or not current.is_open:
            return
        current.is_open = False
        if failed:
            self._pass = self._pool.flush = None
            self._undo(current.begin)
        else:
            self._pool.settle()
            if current.num_columns > 1 and not self._records:
                self._pool.keep_states(current.sequences)  # the end of a prompt: where the next one may leave

    def hides_padding_alone(self, announcement: Announcement) -> bool:
        """See `hooks.Listener`."""
        mask, end = announcement.mask, self._rows.length + announcement.num_tokens
        if mask is None or tuple(mask.shape) != (announcement.num_rows, end):
            return True
        return (not any(self._rows.padding) and bool(mask.all())) or self.knows_padding(mask)

    def num_skipped(self, tokens: Tensor, mask: Tensor | None, positions: Any) -> int:
        """See `hooks.Listener`: models that take `cache_params` are fed the whole prompt after `reuse`.

        So are others by assisted generation, which shows in a mask of the prompt alone, or else in positions from 0.
        """
        kept, have = self._rows.length, len(self._rows.sequences)
        if not kept or tokens.shape[1] <= kept or tokens.shape[0] % have:
            return 0
        if self._is_fed_whole:
            is_whole = self._reused > 0
        elif mask is not None:
            is_whole = mask.shape == tokens.shape
        else:
            is_whole = isinstance(positions, Tensor) and int(positions.flatten()[0]) == 0
        if not is_whole:
            return 0
        cached = self._transcript.tokens.repeat_interleave(tokens.shape[0] // have, dim=0)
        return kept if cached.equal(tokens[:, :kept].cpu()) else 0

    def expected_positions(self, announcement: Announcement) -> Tensor:
        """See `hooks.Listener`."""
        begin, size = self._rows.length, announcement.num_tokens
        padding = self._padding_with(announcement.mask, announcement.num_rows, begin + size)
        return torch.arange(begin, begin + size) - torch.tensor(padding)[:, None]

    # --- for its layers -----------------------------------------------------------------------------------------------

    def is_stored(self, layer: int) -> bool:
        """See `layers.Owner`."""
        kind = self._layout.layers[layer]
        if kind.is_cross:
            return self.media.has(layer)
        if kind.span is None or not self._rows.length:
            return False
        return layer in self._pool.causal(self._pool.member_of(layer)).storage.layers

    def stored(self, layer: int) -> Gathered:
        """See `layers.Owner`."""
        if self._layout.layers[layer].is_cross:
            return self.media.get(layer)
        cache = self._pool.causal(self._pool.member_of(layer))
        rows = self._rows
        first = first_column(cache.tables.span, rows.length)
        columns = columns_of(cache.tables, rows.sequences, rows.padding, first, rows.length, self._device)
        stored = cache.storage.layer(layer)
        dtype = self._dtype
        return Gathered(columns.read(stored.keys, dtype), columns.read(stored.values, dtype))

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _in_place(self) -> bool:
        return self._layout.gathers is None and is_in_place(self._decoder_config)

    @property
    def _is_fed_whole(self) -> bool:
        """Whether generate() does not know that this is a cache: it feeds whole prompts, and masks only with them."""
        return self._layout.cache_argument == "cache_params"

    def _layer(self, index: int) -> Layer:
        if not 0 <= index < len(self._layout.layers):
            raise ValueError(
                f"layer {index} of a cache for {self._name}, which has {len(self._layout.layers)}; the cache was made "
                f"for another model: use cache_for(model, ...) of this one"
            )
        return self._layout.layers[index]

    def _settle(self) -> None:
        self._pool.settle()

    def _pass_of(self, layer: int | None, num_rows: int, num_columns: int | None) -> Pass:
        """The pass under way, or a new one: with the first touch after an announcement, or a layer's second update."""
        announced, current = self._announced, self._pass
        if announced is not None:
            self._announced = None
            seen = (announced.num_rows, announced.num_tokens)
            if num_columns is not None and seen != (num_rows, num_columns):
                announced = Announcement(
                    None, num_rows, num_columns, None
                )  # the model made other columns of its tokens
            return self._begin(announced)
        if current is not None and current.is_open and layer not in current.seen:
            return current
        if num_columns is None:
            raise NotSupported(
                f"{self._name} was not called as a whole, so the cache does not know the tokens of this forward; call "
                f"the model that cache_for was given"
            )
        return self._begin(Announcement(None, num_rows, num_columns, None))

    def _begin(self, announced: Announcement) -> Pass:
        """Start a pass. When there is no room nothing has changed, but for the number of empty rows."""
        rows = self._rows
        self._settle()
        if self._layout.one_by_one and rows.length and announced.num_tokens > 1:
            raise NotSupported(
                f"{self._name} goes on by one token at a time (of several it forgets the {rows.length} before), and "
                f"this forward brings {announced.num_tokens}; call cache.reset() and give it all tokens"
            )
        self._fit_rows(announced.num_rows)
        before = list(rows.padding)
        rows.padding = self._padding_with(announced.mask, announced.num_rows, rows.length + announced.num_tokens)
        try:
            current = Pass(self._pool, rows, announced.num_tokens, self._device)
        except Exception:
            rows.padding = before
            raise
        rows.length += announced.num_tokens
        self._transcript.append(announced.tokens, announced.num_rows, announced.num_tokens)
        self._reused, self._may_expand = 0, False
        self._handed.begin()
        if current.states is not None:
            self._pool.flush = current.states.write_back
        self._pass = current
        return current

    def _fit_rows(self, num_rows: int) -> None:
        """Have that many rows: new ones when nothing is stored, repeated ones when `reuse` came before."""
        rows = self._rows
        have = len(rows.sequences)
        if have == num_rows:
            return
        if not rows.length:
            self._pool.free(rows.sequences)
            rows.sequences[:] = [self._pool.new_sequence() for _ in range(num_rows)]
            rows.padding = [0] * num_rows
            self.media.clear()
        elif self._may_expand and num_rows % have == 0:
            self._repeat(num_rows // have)
        else:
            raise ValueError(
                f"the forward brings {num_rows} rows and the cache holds {have} rows of {rows.length} tokens; call "
                f"cache.reuse(input_ids) first, batch_repeat_interleave or batch_select_indices, or cache.reset()"
            )

    def _padding_with(self, mask: Tensor | None, num_rows: int, end: int) -> list[int]:
        """The padding of each row, given a mask of the columns below `end`; rows without tokens take it from there."""
        rows = self._rows
        have = len(rows.padding)
        padding = [0] * num_rows
        if have and num_rows % have == 0:
            padding = [p for p in rows.padding for _ in range(num_rows // have)]
        if mask is None or tuple(mask.shape) != (num_rows, end):
            return padding
        visible = mask.to(torch.bool)
        if rows.length and (widest := max(padding)) < rows.length:
            shown = visible[:, :widest].cpu() & (torch.arange(widest) < torch.tensor(padding)[:, None])
            if widest and bool(shown.any()):
                raise ValueError(
                    f"the attention mask shows columns that were padding when they were cached (rows have {padding} of "
                    f"them); pad as before, or cache.reset()"
                )
            return padding
        leading = (visible.cumsum(1) == 0).sum(1).tolist()
        return [lead if p >= rows.length else p for lead, p in zip(leading, padding, strict=True)]

    def knows_padding(self, mask: Tensor | None) -> bool:
        """Whether a mask [B, columns] hides the left padding that is not stored, and nothing else."""
        if mask is None:
            return True
        padding = self._padding_with(mask, mask.shape[0], mask.shape[1])
        return mask.sum(1).tolist() == [mask.shape[1] - p for p in padding]

    def _states(self, layer: int) -> LentStates | None:
        if not self._layer(layer).num_states:
            raise ValueError(f"layer {layer} of {self._name} keeps no states; this cache was made for another model")
        announced = self._announced
        return self._pass_of(None, 0 if announced is None else announced.num_rows, None).states

    def _state_key(self, layer: int, state: int) -> int:
        return layer * max(x.num_states for x in self._layout.layers) + state

    def _chosen(self, indices: Tensor, what: str) -> list[int]:
        """The rows that `indices` [n], integers or a bool for each row, names. Raises where it names none or others."""
        have = len(self._rows.sequences)
        given = torch.as_tensor(indices)
        if given.dtype == torch.bool and given.shape == (have,):
            given = given.nonzero()[:, 0]
        rows: list[int] = given.tolist() if given.ndim == 1 and is_integral(given) else []
        if not rows or not all(0 <= row < have for row in rows):
            raise ValueError(
                f"{what} is {given.tolist()} ({given.dtype}) and the cache holds {have} rows; expected numbers of "
                f"these, from 0, and at least one"
            )
        return rows

    def _repeat(self, repeats: int) -> None:
        self._select([row for row in range(len(self._rows.sequences)) for _ in range(repeats)])

    def _select(self, sources: Sequence[int]) -> None:
        """Make row i what row sources[i] was. The first user of a row keeps its sequence, others get references."""
        self._settle()
        rows = self._rows
        if list(sources) == list(range(len(rows.sequences))):
            return
        media = NUM_MEDIA if self.media.is_filled else 0
        tokens = rows.num_tokens
        taken: set[int] = set()
        chosen = []
        for source in sources:
            sequence = rows.sequences[source]
            chosen.append(self._pool.copy(sequence, tokens[source], media) if source in taken else sequence)
            taken.add(source)
        self._pool.free([sequence for row, sequence in enumerate(rows.sequences) if row not in taken])
        rows.sequences[:] = chosen
        rows.padding = [rows.padding[source] for source in sources]
        if rows.length:
            self._transcript.select(sources)
        self.media.rows_changed()

    def _keep(self, plan: Reuse) -> None:
        self._select(plan.sources)
        self._cut(plan.num_columns)

    def _cut(self, length: int) -> None:
        """Keep the first `length` columns."""
        self._settle()
        rows, current = self._rows, self._pass
        lengths = [max(0, length - padding) for padding in rows.padding]
        states = current.states if current is not None else None
        if states is not None and states.recordings and not states.has_recurrent:
            count = rows.length - length
            recorded = {key: recorded_before(r, count) for key, r in states.recordings.items()}
            self._pool.cut_recorded(rows.sequences, lengths, recorded)
        else:
            self._pool.cut(rows.sequences, lengths)
        rows.length = length
        self._transcript.cut(length)
        self._pass = None

    def _unequal(self) -> tuple[int, int] | None:
        """Tokens of the first row that has not as many as its sequence, and those; `None` where all have."""
        rows = self._rows
        pairs = zip(rows.num_tokens, map(self._pool.length, rows.sequences), strict=True)
        return next((pair for pair in pairs if pair[0] != pair[1]), None)

    def _mend(self) -> int:
        """Take back a forward that ended without a word; answers with its columns.

        PyTorch calls hooks after an `Exception`, and Ctrl-C is none: it leaves layers without the pass's keys.
        """
        if not self._is_running:
            return 0
        self._is_running = False
        current, self._announced, self._pass = self._pass, None, None
        length = begin = self._rows.length
        if current is not None and current.is_open:
            current.is_open, begin = False, current.begin
            if current.states is not None and self._pool.flush == current.states.write_back:
                self._pool.flush = None
        elif not self._unequal():
            return 0
        self._undo(begin)
        return length - self._rows.length

    def _undo(self, begin: int) -> None:
        """Take a failed pass back, to its first column; where that is not possible any more, forget everything."""
        if begin and not self._layout.has_states:
            try:
                self._cut(begin)
            except NotSupported:
                self.reset()
        else:
            self.reset()


@final
class _MaskReader(Reader):
    """Goes into `MaskLength`: asked once per kind of mask, before the pass starts."""

    def __init__(self, cache: GenerateCache) -> None:
        self._cache = cache

    @property
    def window(self) -> int | None:
        return None

    def attend(self, call: Call) -> Tensor | None:
        return None

    def gather(self) -> Gathered:
        raise TypeError("a mask has no keys")

    def knows_padding(self, attention_mask: Tensor | None) -> bool:
        return self._cache.knows_padding(attention_mask)


def _discard(pool: Pool, rows: Rows) -> None:
    pool.discard(rows.sequences)


def _nothing() -> None:
    """Nobody wants to know of a reset."""
