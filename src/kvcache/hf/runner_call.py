"""One call of a transformers model with our cache: which arguments it takes, and how logits come back.

Everything that depends on the model's class is looked up once, when the runner is made; a call builds tensors and
keyword arguments and nothing else.

| model       | tokens              | positions              | cache             | besides                           |
|-------------|---------------------|------------------------|-------------------|-----------------------------------|
| decoders    | `input_ids`         | `position_ids`         | `past_key_values` | `logits_to_keep`                  |
| Mamba       | `input_ids`         | none                   | `cache_params`    | `logits_to_keep`                  |
| T5, Whisper | `decoder_input_ids` | `decoder_position_ids` | `past_key_values` | `encoder_outputs`                 |
| Mllama      | `input_ids`         | `position_ids`         | `past_key_values` | `cross_attention_states`, a mask  |
| BLOOM       | `input_ids`         | none                   | `past_key_values` | `attention_mask`                  |
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from kvcache.caches import Cache, CausalCache, EncoderCache
from kvcache.errors import NotSupported
from kvcache.hf import attention, compiled
from kvcache.hf.graphs import CAPTURES, DecodeGraphs
from kvcache.hf.layout import Layout, decoder_of
from kvcache.hf.rope import has_position_table
from kvcache.hf.runner_dense import DenseCache
from kvcache.hf.runner_host import CrossCache, PackedCache, PackedPair
from kvcache.hf.runner_latent import LatentReader, Latents
from kvcache.hf.runner_readers import Step
from kvcache.spec import Batch

__all__ = ["ModelCall", "encoder_width"]


@final
class ModelCall:
    """A model, called with our cache. `is_packed`: ragged rows share one call; else a call is `[B,1]` or `[1,n]`.

    counts_columns: rows of a call must be equally long, because positions are not an argument and come from a count.

    On a GPU, decode steps of models with one call for all rows are CUDA graphs (`graphs.py`).

    compile: run the decoder through torch.compile; raises `NotSupported` for models that cannot be (`compiled.py`).
    """

    def __init__(
        self, model: PreTrainedModel, layout: Layout, members: Sequence[Cache], *, compile: bool = False
    ) -> None:
        if model.training:
            raise ValueError(
                "the model is in training mode, and dropout would spoil what is cached; call model.eval() first"
            )
        self.model = model
        self.dtype = model.dtype
        self.device = model.device
        self.vocabulary = _vocabulary(model)
        self._latents: Latents | None = None
        self._compiled: list[Cache] | None = None  # the member of each layer
        self._graphs: DecodeGraphs | None = None
        self._switch = None if layout.keeps_attention else AttentionSwitch.of(model)
        try:
            self._prepare(layout, members, compile=compile)
        except BaseException:
            self.close()
            raise

    def _prepare(self, layout: Layout, members: Sequence[Cache], *, compile: bool) -> None:
        model = self.model
        attends = any(layer.span is not None or layer.is_cross for layer in layout.layers)
        is_dense = attends and (self._switch is None or not self._switch.is_on)
        self.is_packed = not (is_dense or layout.has_states or layout.counts_columns)
        self._forward, self._head = _entry(model)
        accepted = inspect.signature(self._forward.forward).parameters
        encoder = members[-1] if isinstance(members[-1], EncoderCache) else None
        self._crosses = encoder is not None and not layout.is_encoder_decoder
        self._is_pair = layout.is_encoder_decoder
        self._tokens = "decoder_input_ids" if self._is_pair else "input_ids"
        self._positions = next((name for name in ("decoder_position_ids", "position_ids") if name in accepted), None)
        self.counts_columns = layout.counts_columns or (
            is_dense and self._positions is None and has_position_table(model)
        )
        self._keeps = "logits_to_keep" in accepted
        self._cache_argument = layout.cache_argument
        if attends and not is_dense:
            self._latents = Latents(model)
        self._traced = compiled.TracedCache()
        self._host: PackedCache | DenseCache
        self._pair: PackedPair | None = None
        if is_dense:
            self._host = DenseCache(layout, members)
        else:
            modules = self._latents.modules if self._latents else {}
            latents = {i: LatentReader(m, members[layout.member(i)], i) for i, m in modules.items()}
            biased = [
                int(getattr(m, "layer_idx", 0))
                for m in model.modules()
                if getattr(m, "has_relative_attention_bias", False) and getattr(m, "is_decoder", False)
            ]
            self._host = PackedCache(layout, members, encoder, latents=latents, biased_layers=biased, dtype=self.dtype)
            if encoder is not None and self._is_pair:
                self._pair = PackedPair(self._host, CrossCache(encoder, len(layout.layers), self.dtype))
                width = encoder_width(model)
                self._no_states = torch.zeros((1, 1, width), dtype=self.dtype, device=self.device)
            if biased and layout.counts_columns:
                raise NotSupported("its position bias belongs to histories of several lengths, and it counts one")
        is_plain = self.is_packed and isinstance(self._host, PackedCache) and self._host.is_plain
        if compile:
            self._compile(layout, members, is_plain=is_plain)
        causal = [member for member in members if isinstance(member, CausalCache)]
        devices = {weight.device for weight in model.parameters()}
        is_one = len(devices) == 1 and self.device.type in CAPTURES
        if is_one and is_plain and len(causal) == len(members) and not compile:
            self._graphs = DecodeGraphs(causal, self.device, self._decode)

    def __call__(
        self,
        batch: Batch,
        tokens: Sequence[int],
        sequences: Sequence[int],
        kept: Sequence[int],
        *,
        is_fresh: bool,
        states: Sequence[Tensor],
        sees_media: Sequence[bool] | None,
    ) -> Tensor:
        """Logits [len(kept), vocabulary] of the rows `kept`. The cache has started its pass over `batch`."""
        T = len(tokens)
        if self._switch is not None:
            self._switch.check()
        if self._graphs is not None and not is_fresh and T == len(sequences) == len(kept):
            replayed = self._graphs.run(batch, tokens)
            if replayed is not None:
                return replayed
        positions = torch.tensor(batch.positions, device=self.device)
        step = Step(
            batch,
            sequences,
            positions,
            is_fresh,
            has_media=any(sees_media or ()),
            new_media=bool(states),
        )
        shape = (1, T) if self.is_packed or len(sequences) == 1 else (T, 1)
        arguments: dict[str, Any] = {
            self._tokens: torch.tensor(tokens, device=self.device).view(shape),
            self._cache_argument: self._host if self._pair is None else self._pair,
            "use_cache": True,
        }
        if self._positions is not None:
            arguments[self._positions] = positions.view(shape)
        everything = len(kept) == T
        if self._keeps and not everything and shape[0] == 1:
            arguments["logits_to_keep"] = torch.tensor(kept, dtype=torch.long, device=self.device)
        if self._compiled is not None:
            self._traced.positions = positions
            arguments[self._cache_argument] = self._traced
            with compiled.running(self._compiled):
                output = self._forward(**arguments)
            return self._rows(output, kept, arguments)
        self._host.begin(step)
        if isinstance(self._host, DenseCache):
            arguments["attention_mask"] = self._host.attention_mask
        elif self._pair is not None:
            self._pair.begin(step)
            packed = torch.cat(list(states)).to(self._no_states)[None] if states else self._no_states
            arguments["encoder_outputs"] = BaseModelOutput(last_hidden_state=packed)
        elif self._crosses and sees_media is not None:
            arguments |= self._cross_arguments(states, sees_media)
        output = self._forward(**arguments)
        self._host.write_back()
        return self._rows(output, kept, arguments)

    def _decode(self, batch: Batch, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits of one token [T] for each row, from inputs that lie where a graph may read them again."""
        assert isinstance(self._host, PackedCache)
        self._host.begin(Step(batch, batch.sequences, positions, is_fresh=False))
        arguments = {self._tokens: tokens[None], self._cache_argument: self._host, "use_cache": True}
        if self._positions is not None:
            arguments[self._positions] = positions[None]
        return self._rows(self._forward(**arguments), range(len(tokens)), arguments)

    def _rows(self, output: Any, kept: Sequence[int], arguments: dict[str, Any]) -> Tensor:
        """Logits of the rows `kept` of what the model gave for `arguments`."""
        rows = (output.logits if self._head is None else output.last_hidden_state).flatten(0, 1)
        if len(kept) != len(rows) and "logits_to_keep" not in arguments:
            rows = rows[torch.tensor(kept, dtype=torch.long, device=self.device)]
        return rows if self._head is None else self._head(rows)

    def encode(self, **inputs: Tensor) -> Tensor:
        """States [n, hidden] of one encoder input, with the attention that the model came with."""
        with nullcontext() if self._switch is None else self._switch.turned_off():
            if self._is_pair:
                encoder: Any = self.model.get_encoder()
                states: Tensor = encoder(**inputs).last_hidden_state
            elif self._crosses and hasattr(self.model, "model"):
                states = _image_states(self.model.model, **inputs)
            else:
                raise NotSupported(f"{type(self.model).__name__} has no encoder whose states attention could read")
        if states.shape[0] != 1:
            raise ValueError(f"the encoder was given {states.shape[0]} inputs; expected one at a time")
        return states[0]

    def close(self) -> None:
        """Give the model its attention back. Repeating it changes nothing."""
        if self._switch is not None:
            self._switch.release()
            self._switch = None
        self._graphs = None  # their memory goes with them
        if self._compiled is not None:
            decoder: Any = self.model.get_decoder()
            decoder._compiled_call_impl = None
        if self._latents is not None:
            self._latents.close()

    def _compile(self, layout: Layout, members: Sequence[Cache], *, is_plain: bool) -> None:
        refused = compiled.refusal_of(layout, is_plain=is_plain)
        if refused is not None:
            raise NotSupported(f"{type(self.model).__name__} cannot be compiled: {refused}; leave compile off")
        assert self._switch is not None  # a model that keeps its attention is not plain
        self._switch.use(compiled.NAME)
        self._compiled = [members[layout.member(i)] for i in range(len(layout.layers))]
        decoder: Any = self.model.get_decoder()
        decoder.compile(dynamic=True)

    def _cross_arguments(self, states: Sequence[Tensor], sees_media: Sequence[bool]) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if states:
            arguments["cross_attention_states"] = torch.cat(list(states)).to(self.device, self.dtype)[None]
        if not all(sees_media):  # rows without an image skip the layer: attention gives them zeros, this the rest
            mask = torch.tensor(sees_media, device=self.device).to(self.dtype)
            arguments["full_text_row_masked_out_mask"] = mask.view(1, 1, -1, 1)
        return arguments


_IN_USE = "the model is compiled, or is to be, and another Runner or Engine uses it; close that one, or load it twice"

_switches: WeakKeyDictionary[PreTrainedModel, AttentionSwitch] = WeakKeyDictionary()
"""Of models that are in use; several runners of one model share a switch."""


@final
class AttentionSwitch:
    """Our attention function in a model's decoder, and the way back when nobody uses it any more.

    is_on: false where nothing can be switched. Made by `of`.
    """

    @staticmethod
    def of(model: PreTrainedModel) -> AttentionSwitch:
        """The model's switch, for one more user. Raises `ValueError` while a compiled model is in use."""
        switch = _switches.get(model)
        if switch is None:
            switch = _switches[model] = AttentionSwitch(model)
        if switch._name != attention.NAME:
            raise ValueError(_IN_USE)
        switch.check()
        switch._num_users += 1
        return switch

    def __init__(self, model: PreTrainedModel) -> None:
        attention.register()
        modules = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        self._model = weakref.ref(model)
        self._num_users = 0
        self._name = attention.NAME
        self._before = list({id(m.config): (m.config, m.config._attn_implementation) for m in modules}.values())
        decoder = decoder_of(model)
        self.is_on = type(model)._can_set_attn_implementation()
        if self.is_on:
            # Vision and sound towers keep theirs where the model tells them apart.
            towers = "text_config" in model.config.sub_configs
            model.set_attn_implementation(
                {"": attention.NAME, "text_config": attention.NAME} if towers else attention.NAME
            )
            self.is_on = attention.is_in_place(decoder.config) and decoder._can_set_attn_implementation()
            if not self.is_on:  # some models only warn, and would mix the sequences of a row
                self._set(self._before)
        self._during = [(config, config._attn_implementation) for config, _ in self._before]

    def use(self, name: str) -> None:
        """Another of our attention functions, where ours is on. Raises `ValueError` while others use the model."""
        if self._num_users > 1:
            raise ValueError(_IN_USE)
        self._name = name
        self._during = [(config, name if during == attention.NAME else during) for config, during in self._during]
        self._set(self._during)

    def check(self) -> None:
        """Raise `ValueError` when somebody else has switched the attention meanwhile."""
        for config, name in self._during:
            if name in (attention.NAME, compiled.NAME) and config._attn_implementation != name:
                raise ValueError(
                    f"the model's attention is {config._attn_implementation!r} now and was {name!r} when a Runner or "
                    f"Engine took it; set it back with model.set_attn_implementation({name!r}), or close that one first"
                )

    def release(self) -> None:
        """One user less; the last one gives the model the attention back that it came with."""
        self._num_users -= 1
        model = self._model()
        if not self._num_users and model is not None:
            self._set(self._before)
            del _switches[model]

    @contextmanager
    def turned_off(self) -> Iterator[None]:
        """A context in which the model has the attention that it came with."""
        self._set(self._before)
        try:
            yield
        finally:
            self._set(self._during)

    @staticmethod
    def _set(names: Sequence[tuple[Any, str]]) -> None:
        for config, name in names:
            config._attn_implementation_internal = name


def encoder_width(model: PreTrainedModel) -> int:
    """Values of one state of an encoder-decoder's encoder. Raises `NotSupported` where nothing says how many."""
    width = getattr(model.config, "d_model", None) or getattr(model.config, "hidden_size", None)
    if width is None:
        raise NotSupported(
            f"{type(model).__name__} does not say how wide its encoder's states are (config.d_model, "
            f"config.hidden_size); run it through generate() with cache_for"
        )
    return int(width)


def _vocabulary(model: PreTrainedModel) -> int:
    """Logits of one token. Raises `NotSupported` for models without a head, or with several."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if weight is None:
        raise NotSupported(
            f"{type(model).__name__} has no one head (get_output_embeddings) whose logits are those of a next token; "
            f"run it through generate() with cache_for"
        )
    return int(weight.shape[0])


def _entry(model: PreTrainedModel) -> tuple[Any, Callable[[Tensor], Tensor] | None]:
    """What is called, and the head that it leaves out.

    Mllama with its vision tower computes the row mask from a mask of tiles, which cannot say "no image at all"; its
    text model takes the row mask itself.
    """
    inner = getattr(model, "model", None)
    if model.config.model_type == "mllama" and inner is not None and hasattr(inner, "language_model"):
        return inner.language_model, model.get_output_embeddings()
    return model, None


def _image_states(
    model: Any, pixel_values: Tensor, aspect_ratio_ids: Tensor, aspect_ratio_mask: Tensor, **_: Any
) -> Tensor:
    """Mllama's states [1, n, hidden] of one prompt's images: the tiles that `aspect_ratio_mask` says are there."""
    vision = model.vision_model(
        pixel_values=pixel_values, aspect_ratio_ids=aspect_ratio_ids, aspect_ratio_mask=aspect_ratio_mask
    )
    tiles = vision.last_hidden_state[aspect_ratio_mask.bool()]  # [tiles, patches, width]
    states: Tensor = model.multi_modal_projector(tiles)
    return states.flatten(0, 1)[None]
