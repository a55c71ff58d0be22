"""A model is tried before it is served: what it does cannot be read off its configuration."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcache.errors import NotSupported
from kvcache.hf.layout import Layout, layout_of, looks_ahead
from kvcache.hf.runner import EncoderStates, Runner, Work
from kvcache.hf.runner_call import encoder_width
from kvcache.kernels import WrongKernel
from kvcache.kernels.cpu_build import isa_name

__all__ = ["tried_layout", "two_tokens"]

_log = logging.getLogger("kvcache")

# Why these cannot be served as models of text, which three tokens do not show.
_REFUSED = {"git": "puts columns of an image before each mask, of which prompts of text alone have none"}


def tried_layout(model: PreTrainedModel) -> Layout:
    """The layout under which a model runs, found by running three tokens.

    One that fails may do with rows of one length in a call, or else with its own attention over whole keys. Raises
    `NotSupported` for one that fails in all three ways or would answer wrongly, `ValueError` for a wrong `KVCACHE_ISA`
    or `KVCACHE_KERNEL`, and what `layout_of` raises.
    """
    isa_name()  # what is wrong with the environment must not pass for the model's failing
    layout = layout_of(model)
    name = type(model).__name__
    refused = _REFUSED.get(model.config.model_type)
    if refused is None and looks_ahead(model):
        refused = "reads prompts in both directions, so that no part of one can be computed alone or shared"
    if refused is not None:
        raise NotSupported(f"{name} {refused}; run it through generate() with cache_for")
    ways = (
        (layout, ""),
        (replace(layout, counts_columns=True), "takes rows of one length in a call"),
        (replace(layout, keeps_attention=True), "keeps its own attention, over copies of its history"),
    )
    cause: Exception | None = None
    for way, what in ways:
        try:
            with Runner(model, layout=way, capacity=8, max_sequences=1, block_size=4, fast_layers=False) as runner:
                failed = _failure(runner, two_tokens(model, way))
        except NotSupported as error:
            failed = error
        if failed is None:
            if what:
                _log.info("%s %s: %s", name, what, cause)
            return way
        cause = cause or failed
    if isinstance(cause, NotSupported):
        raise cause
    raise NotSupported(
        f"{name} cannot run over blocks: {cause}; run it through generate() with cache_for, or with its own cache"
    ) from cause


def _failure(runner: Runner, first: Work) -> Exception | None:
    """What a model raises for two tokens and a third."""
    try:
        runner.forward([first])
        runner.forward([Work(first.sequence, len(first.tokens), first.tokens[:1])])
    except (MemoryError, torch.OutOfMemoryError, WrongKernel):
        raise
    except Exception as error:
        return error
    return None


def two_tokens(model: PreTrainedModel, layout: Layout) -> Work:
    """Work that any model of text can do as the first: two tokens, and one state where it has an encoder."""
    media: list[EncoderStates] = []
    if layout.is_encoder_decoder:
        states = torch.zeros((1, encoder_width(model)), dtype=model.dtype, device=model.device)
        media = [EncoderStates(states, "two tokens")]
    vocabulary: Any = model.get_input_embeddings()
    token = min(1, len(vocabulary.weight) - 1)
    return Work(0, 0, [token, token], media=media)
