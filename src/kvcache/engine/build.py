"""What an engine needs to know of a model, and the cache that it makes for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

from transformers import PreTrainedModel

from kvcache.backends import Backend
from kvcache.caches import Cache, CausalCache, EncoderCache, HybridCache, RecurrentCache
from kvcache.engine import memory
from kvcache.engine.core import Core
from kvcache.engine.drafts import Drafter, DraftModel, Lookup
from kvcache.engine.prefixes import Prefixes, namespace_of
from kvcache.errors import NotSupported
from kvcache.hf.layout import Layout, backend_of, dtype_name
from kvcache.hf.loading import Loaded, load
from kvcache.hf.model_files import ModelNotFound
from kvcache.hf.runner import Runner, members_of
from kvcache.hf.trial import tried_layout
from kvcache.scheduler import MemberShape, Scheduler

__all__ = ["Options", "core", "drafter", "initialised", "max_length", "stop_tokens"]

DRAFT_TOKENS = 8192
"""Tokens for each sequence in the cache of a draft model; longer contexts decode without its guesses."""

PUBLISHED_SHARE = 4
"""States and media kept for reuse may take as much as a quarter of what the blocks take."""

PUBLISHED_STATES = 64
"""And room for as many states, at least, for each sequence that may run: without blocks there is no other measure."""


@final
@dataclass(frozen=True, slots=True)
class Options:
    """What `Engine` was asked for, checked; `num_bytes` and `formats` None: the defaults."""

    num_bytes: int | None
    formats: str | tuple[str, str] | None
    block_size: int
    max_sequences: int
    max_batch: int
    prefix_cache: bool
    draft: Any
    num_drafts: int
    compile: bool
    dtype: str


def core(loaded: Loaded, options: Options) -> Core:
    """Everything that an engine runs on: cache, runner, scheduler, prefixes, drafter."""
    model = loaded.model
    layout, size, length = tried_layout(model), options.block_size, max_length(model)
    formats = dtype_name(model.dtype) if options.formats is None else options.formats
    sizes = memory.measure(model, layout, formats, size)
    members = members_of(layout, size)
    limits = {"max_sequences": options.max_sequences, "max_batch": max(options.max_batch, layout.beginning)}
    shapes = memory.divide(options.num_bytes, sizes, members, max_length=length, device=model.device, **limits)
    with ExitStack() as taken:  # given back if anything fails
        guesses = drafter(options.draft, dtype=options.dtype, layout=layout, model=model, **limits)
        if guesses is not None:
            taken.callback(guesses.close)
        cache = initialised(
            members, shapes, formats, backend_of(model), block_bytes=sizes.blocks, state_bytes=sizes.states, **limits
        )
        prefixes = None
        if options.prefix_cache:
            namespace = namespace_of(loaded.fingerprint, formats, size, layout.layers)
            prefixes = Prefixes(members, namespace, size)
        scheduler = Scheduler(shapes, options.max_batch, options.max_sequences, beginning=layout.beginning)
        bounds = [bound for bound in (length, scheduler.capacity()) if bound is not None]
        runner = Runner(model, cache, layout=layout, compile=options.compile)
        taken.callback(runner.close)
        if options.compile:
            runner.warm()  # no request waits for the compiler
        made = Core(
            runner,
            scheduler,
            prefixes,
            guesses,
            num_drafts=options.num_drafts,
            tokenizer=loaded.tokenizer,
            device=model.device,
            limit=min(bounds, default=None),
            stop_tokens=stop_tokens(model, loaded.tokenizer),
        )
        taken.pop_all()
        return made


def initialised(
    members: Sequence[Cache],
    shapes: Sequence[MemberShape],
    formats: str | tuple[str, str],
    backend: Backend,
    *,
    max_sequences: int,
    max_batch: int,
    block_bytes: Sequence[int],
    state_bytes: int,
) -> Cache:
    """The members, each with a pool of its own size, as one cache."""
    blocks = iter(shapes)
    num_bytes = 0
    for member, size in zip(members, block_bytes, strict=True):
        if isinstance(member, CausalCache):
            shape = next(blocks)
            num_tokens = shape.num_blocks * shape.block_size
            num_bytes += shape.num_blocks * size
            member.init(
                backend, formats, max_sequences, max(num_tokens, max_batch), max_batch, num_blocks=shape.num_blocks
            )
        else:
            member.init(backend, formats, max_sequences, max_batch, max_batch)
    for member in members:
        if isinstance(member, RecurrentCache):
            member.published.limit = max(num_bytes // PUBLISHED_SHARE, PUBLISHED_STATES * state_bytes)
        elif isinstance(member, EncoderCache):
            member.published.limit = max(num_bytes // PUBLISHED_SHARE, 2**24)
    return members[0] if len(members) == 1 else HybridCache(*members)


def drafter(
    draft: Any,
    *,
    dtype: str,
    layout: Layout,
    model: Any,
    max_sequences: int,
    max_batch: int,
) -> Drafter | None:
    """What guesses ahead: `None`, "lookup", or a model, loaded to where `model` is.

    Raises `NotSupported` for targets with states.
    """
    if draft is None:
        return None
    if layout.has_states:
        raise NotSupported("guesses cannot be taken back from recurrent states; make the engine without draft")
    if isinstance(draft, str) and draft == "lookup":
        return Lookup()
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    device = None if isinstance(draft, PreTrainedModel) else str(model.device)
    try:
        smaller = load(draft, dtype=dtype, device=device, tokenizer=False).model
    except ModelNotFound as error:
        raise ModelNotFound(f"draft is neither 'lookup' nor a model: {error}") from error
    lengths = [max_length(model), max_length(smaller), DRAFT_TOKENS]
    capacity = min(length for length in lengths if length is not None)
    return DraftModel(
        smaller, vocabulary=vocabulary, capacity=capacity, max_sequences=max_sequences, max_batch=max_batch
    )


def max_length(model: Any) -> int | None:
    """Tokens that the model was made for; None where its configuration sets no limit."""
    text = model.config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_target_positions"):
        limit = getattr(text, name, None)
        if isinstance(limit, int) and limit > 0 and not model.config.model_type.startswith(("t5", "mamba")):
            return limit
    return None


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an output, by the generation config and the tokenizer."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = [named] if isinstance(named, int) else list(named or ())
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset([*ids, own] if own is not None else ids)
