"""`Engine`: the life of a request on one screen.

    add      Request -> Sample (its tokens) + Entry (its counts), waiting
    step     admit   prefix match, adopt what is cached, promise the rest             scheduler.can_admit
             plan    who computes how many tokens; preempts while the pool is short   scheduler.plan
             run     one packed forward of the model                                  hf.Runner
             commit  publish full blocks, choose tokens, text, events; who is done leaves

Tensors are touched by the runner and the sampler alone. One thread owns an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any, final

from torch import Tensor

from kvcache.engine import build, memory
from kvcache.engine.metrics import Blocks, Metrics
from kvcache.engine.prefixes import Prefixes
from kvcache.engine.sample import Sample
from kvcache.errors import CorruptState
from kvcache.hf.loading import load
from kvcache.request import (
    PROMPT,
    Completion,
    Event,
    Finished,
    Request,
    RequestRefused,
    SamplingParams,
)
from kvcache.spec import Match, Usage, flag, integer, listed

__all__ = ["Engine"]

DEFAULT_BLOCK = 16


@final
class Engine:
    """Serves many requests with one model, computing no prefix twice. For one thread at a time.

    model: "demo", a hub id, a folder, a .gguf file, or a transformers model (which keeps its own type and place).
    device: where a named model computes, as "cuda"; None: the CPU.
    kv_bytes: for keys, values and states ("4GiB", a number); None: a quarter of what is available. kv_dtype: their
    format, or a pair; None: the model's type. max_sequences: that run at a time; max_batch_tokens: of one step
    (models that go on by single tokens, as Mamba and Jamba do, begin with up to 4096).
    prefix_cache: reuse what earlier requests computed. draft: guess up to `num_drafts` tokens ahead, by "lookup" or by
    a smaller model (as `model`; its cache comes on top of kv_bytes). compile: run the model through torch.compile,
    which takes a minute or so here and now.

    Raises what `kvcache.hf.load` raises for the model, `ValueError` for sizes that cannot work.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        kv_bytes: int | str | None = None,
        dtype: str = "bf16",
        device: str | None = None,
        kv_dtype: str | tuple[str, str] | None = None,
        block_size: int | None = None,
        max_sequences: int = 16,
        max_batch_tokens: int = 512,
        prefix_cache: bool = True,
        draft: Any = None,
        num_drafts: int = 4,
        compile: bool = False,
    ) -> None:
        options = build.Options(
            num_bytes=None if kv_bytes is None else memory.parse_bytes(kv_bytes),
            formats=kv_dtype,
            block_size=DEFAULT_BLOCK if block_size is None else integer(block_size, "block_size", minimum=1),
            max_sequences=integer(max_sequences, "max_sequences", minimum=1),
            max_batch=integer(max_batch_tokens, "max_batch_tokens", minimum=1),
            prefix_cache=flag(prefix_cache, "prefix_cache"),
            draft=draft,
            num_drafts=integer(num_drafts, "num_drafts", minimum=1),
            compile=flag(compile, "compile"),
            dtype=dtype,
        )
        loaded = load(model, dtype=dtype, device=device, tokenizer=tokenizer)
        self.model_name = loaded.name
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.max_length = build.max_length(self.model)
        self._core = build.core(loaded, options)
        self.cache, self.counts = self._core.cache, self._core.counts
        self._vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        self._names = count()
        self._num_proven = 0
        self._is_closed = False
        self._worker: int | None = None
        self._ending: list[tuple[str, bool]] = []
        self._fault: CorruptState | None = None

    # --- for people ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        salt: str | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several, each text or token ids (arrays too); a `Completion` each, in their order."""
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
        )
        requests = [self._named(prompt, params, salt) for prompt in _listed(prompts)]
        done: dict[str, Completion] = {}
        try:
            for request in requests:
                self.add(request)
            for event in self._events_of({request.id for request in requests}):
                if isinstance(event, Finished):
                    done[event.request_id] = event.completion
        finally:
            for request in requests:
                if request.id not in done:
                    self._drop(request.id)
        return [done[request.id] for request in requests]

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        salt: str | None = None,
    ) -> Iterator[Event]:
        """The events of one prompt as they come: `Token`s, then `Finished`. Leaving the loop aborts the request."""
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
        )
        request = self._named(prompt, params, salt)
        self.add(request)
        events = self._streamed(request.id)
        next(events)  # begun, so that it ends the request even if nobody ever asks for an event
        return (event for event in events if event is not None)

    # --- for whoever drives it ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> str:
        """Queue a request; its id. Raises `RequestRefused` when it cannot fit even alone, `ValueError` for misuse."""
        self._check_open()
        if not isinstance(request, Request):
            raise TypeError(f"add got {type(request).__name__}; expected a kvcache.Request")
        if request.id in self._core.groups:
            raise ValueError(f"request {request.id!r} is under way; expected an id of its own")
        tokens, params = self._tokens_of(request), request.params
        most = self._core.scheduler.max_sequences
        if params.num_sequences > most:
            raise ValueError(
                f"request {request.id!r} asks for {params.num_sequences} outputs and {most} "
                f"sequences may run; expected no more: raise max_sequences"
            )
        self._check_words(request.id, params)
        limit, what = self._limit(params.num_beams, len(tokens))
        if limit is not None and len(tokens) >= limit:
            raise RequestRefused(request.id, len(tokens) + 1, limit, what)
        if self._core.prefixes is not None:
            room = self._core.prefixes.room_beside_pins(self._core.probe(request, tokens))
            if room is not None and len(tokens) >= room:
                raise RequestRefused(request.id, len(tokens) + 1, room, "the cache, beside what is pinned,")
        with self._working():
            self._core.begin(request, tokens)
        return request.id

    def step(self) -> list[Event]:
        """One forward for all requests under way, and what came of it. Raises `CorruptState` for a broken cache."""
        self._check_open()
        core = self._core
        with self._working():
            core.step(core.undelivered)  # if it raises, the next step tells what came before
        if not core.groups:
            self._prove()
        events, core.undelivered = core.undelivered, []
        return events

    def abort(self, request_id: str) -> bool:
        """End a request now; its `Finished` comes with the next step. False when no such request is under way.

        Within a step, as a listener may call it: at the end of that step.
        """
        self._check_open()
        group = self._core.groups.get(request_id)
        if group is None:
            return False
        if self._is_busy:
            self._ending.append((request_id, True))
            return True
        with self._working():
            self._core.abort(group)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and no event waits to be delivered."""
        return not self._core.groups and not self._core.undelivered

    @property
    def capacity(self) -> int | None:
        """Tokens of the longest request: the model's context, or less when the cache is smaller; None: any number."""
        return self._limit(1, 0)[0]

    @property
    def max_sequences(self) -> int:
        """Sequences that run at a time, and so outputs of one request."""
        return self._core.scheduler.max_sequences

    def usage(self) -> Usage:
        """What the cache holds; `num_free_blocks` are those that can be had, cached ones included."""
        self._check_open()
        return self.cache.usage()

    def metrics(self) -> Metrics:
        """Counters, and what waits, runs and is held."""
        self._check_open()
        blocks, num_evicted = [], 0
        for member in self._core.members:
            pool = member.tables.pool
            num_held = sum(pool.references(block) > 0 for block in range(pool.num_blocks))
            num_free = pool.num_blocks - num_held - pool.num_cached
            blocks.append(Blocks(str(member.span), num_free, num_held, pool.num_cached))
            num_evicted += pool.num_evicted
        return Metrics(
            self.counts, self._core.scheduler.num_waiting, self._core.scheduler.num_running, num_evicted, tuple(blocks)
        )

    def check(self) -> None:
        """Raise `CorruptState` unless cache, index and scheduler agree. Walks everything."""
        self._check_open()
        with self._working():
            self._core.check()

    def close(self) -> None:
        """Give the model its attention back and free the cache. Closing twice is allowed."""
        if not self._is_closed:
            self._is_closed = True
            self._core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- about prefixes -----------------------------------------------------------------------------------------------

    @property
    def prefixes(self) -> Prefixes | None:
        """What is known by its content; `prefixes.index.listeners` hear of every change."""
        return self._core.prefixes

    def match(self, prompt: str | Sequence[int], salt: str | None = None) -> Match:
        """How much of a prompt is cached now, and why not more. Changes nothing."""
        self._check_open()
        if self._core.prefixes is None:
            return Match(0, "off: the engine was made with prefix_cache=False")
        sample = self._probe(prompt, salt)
        return self._core.prefixes.match(sample).match

    def pin(self, prompt: str | Sequence[int], salt: str | None = None, *, is_pinned: bool = True) -> Match:
        """Keep what is cached of a prompt from eviction until it is unpinned (`is_pinned=False`); what that is."""
        self._check_open()
        if self._core.prefixes is None:
            raise ValueError("the engine was made with prefix_cache=False; there is nothing to pin")
        sample = self._probe(prompt, salt)
        hit = self._core.prefixes.match(sample)
        if is_pinned:
            self._core.prefixes.pin(sample, hit)
        else:
            self._core.prefixes.unpin(sample)
        return hit.match

    def encode(self, **inputs: Tensor) -> Tensor:
        """States [n, hidden] of one image, sound or source text, for `MediaInput`."""
        self._check_open()
        return self._core.runner.encode(**inputs)

    def _drop(self, request_id: str) -> None:
        """End a request whose events nobody wants."""
        if self._is_busy:
            self._ending.append((request_id, False))
        elif not self._is_closed:
            self.abort(request_id)
            self._core.undelivered = [event for event in self._core.undelivered if event.request_id != request_id]

    @property
    def _is_busy(self) -> bool:
        return self._worker is not None

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Requests that end meanwhile end afterwards: a stream that the garbage collector finds may end anywhere.

        Raises `ValueError` for a second thread.
        """
        outer, own = self._worker, get_ident()
        if outer not in (None, own):
            raise ValueError(
                "another thread is in the middle of a step of this engine; expected one thread at a time: let one own "
                "the engine and the others hand it their prompts, or use `kvcache serve`"
            )
        try:
            self._worker = own
            yield
        finally:
            self._worker = outer
            while self._ending and outer is None:
                request_id, is_wanted = self._ending.pop(0)
                if not self._is_closed:
                    (self.abort if is_wanted else self._drop)(request_id)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _named(self, prompt: str | Sequence[int], params: SamplingParams, salt: str | None) -> Request:
        names = (f"kvcache-{number}" for number in self._names)
        return Request(next(name for name in names if name not in self._core.groups), prompt, params, salt=salt)

    def _probe(self, prompt: str | Sequence[int], salt: str | None) -> Sample:
        request = self._named(prompt, SamplingParams(), salt)
        return self._core.probe(request, self._tokens_of(request))

    def _tokens_of(self, request: Request) -> list[int]:
        if isinstance(request.prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"the prompt of request {request.id!r} is text and {self.model_name} has no tokenizer; give token "
                    f"ids, or Engine(..., tokenizer=...)"
                )
            tokens = list(self.tokenizer(request.prompt)["input_ids"])
        else:
            tokens = list(request.prompt)
        if not tokens:
            raise ValueError(f"the prompt of request {request.id!r} has no tokens; expected at least one")
        if max(tokens) >= self._vocabulary:
            raise ValueError(
                f"the prompt of request {request.id!r} has token {max(tokens)}; expected ids below {self._vocabulary}, "
                f"the model's vocabulary"
            )
        for entry in request.media:
            if entry.index >= len(tokens):
                raise ValueError(f"MediaInput.index is {entry.index} in a prompt of {len(tokens)} tokens")
        return tokens

    def _check_words(self, request_id: str, params: SamplingParams) -> None:
        """Stop texts need a tokenizer, and what is said of single tokens must be true of this vocabulary."""
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"request {request_id!r} has stop={params.stop!r} and {self.model_name} has no tokenizer, so no text "
                f"comes; leave stop out, or give Engine(..., tokenizer=...)"
            )
        highest = max(params.logit_bias, default=0)
        if highest >= self._vocabulary:
            raise ValueError(
                f"logit_bias of request {request_id!r} names token {highest}; expected ids below {self._vocabulary}, "
                f"the model's vocabulary"
            )
        if 2 * params.num_beams > self._vocabulary:
            raise ValueError(
                f"request {request_id!r} has num_beams={params.num_beams}; expected at most half the vocabulary, "
                f"{self._vocabulary // 2}"
            )

    def _limit(self, num_beams: int, num_prompt: int) -> tuple[int | None, str]:
        """Tokens that each sequence of a request may have, and what says so."""
        room = self._core.scheduler.capacity(num_beams, num_prompt)
        if self.max_length is not None and (room is None or self.max_length <= room):
            return self.max_length, "the model's context"
        return room, "the cache" if num_beams == 1 else f"the cache, divided among {num_beams} beams,"

    def _events_of(self, ids: set[str]) -> Iterator[Event]:
        """Step until these requests are done. Events of others wait for whoever steps next."""
        core, left = self._core, set(ids)
        # In an engine that was closed meanwhile `step` raises: what has not finished must not look as if it had.
        while left and (
            self._is_closed or left & core.groups.keys() or any(event.request_id in left for event in core.undelivered)
        ):
            events = self.step()
            core.undelivered += [event for event in events if event.request_id not in ids]
            for event in events:
                if event.request_id in ids:
                    if isinstance(event, Finished):
                        left.discard(event.request_id)
                    yield event

    def _streamed(self, request_id: str) -> Iterator[Event | None]:
        try:
            yield None
            yield from self._events_of({request_id})
        finally:
            self._drop(request_id)

    def _prove(self) -> None:
        """Idle: the cache must hold nothing but what is cached, and everything must agree.

        That walks all blocks before the last event is told, so it waits until a token for each has been computed.
        """
        computed = self._core.counts.num_computed_tokens
        if computed - self._num_proven < sum(member.tables.pool.num_blocks for member in self._core.members):
            return
        self._num_proven = computed
        try:
            self.check()
        except CorruptState as fault:
            self._fault = fault
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the engine is closed; make a new one")
        if self._fault is not None:
            raise CorruptState(f"the engine has stopped, its cache is broken: {self._fault}") from self._fault


def _listed(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    several = list(listed(prompts, "prompts", f"{PROMPT}, or several of these"))
    return [several] if several and not hasattr(several[0], "__len__") else several
