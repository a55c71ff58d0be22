"""`Engine`: the life of a request on one screen.

    add      Request -> Sample (its tokens) + Entry (its counts), waiting
    step     admit   prefix match, adopt what is cached, promise the rest             scheduler.can_admit
             plan    who computes how many tokens; preempts while the pool is short   scheduler.plan
             run     one packed forward of the model                                  hf.Runner
             commit  publish full blocks, choose tokens, text, events; who is done leaves

Tensors are touched by the runner and the sampler alone. One thread owns an engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, final

from torch import Tensor

from kvcache.caches import CausalCache
from kvcache.engine import build, memory
from kvcache.engine.metrics import Blocks, Counts, Metrics
from kvcache.engine.prefixes import Prefixes, namespace_of
from kvcache.engine.sample import Group, Sample
from kvcache.engine.sampler import Choice, Chooser, greedy
from kvcache.engine.shift import num_discarded
from kvcache.engine.text import StopTexts, TextStream, token_text
from kvcache.errors import CacheFull, CorruptState, NotSupported
from kvcache.hf.layout import dtype_name, layout_of
from kvcache.hf.loading import load
from kvcache.hf.runner import EncoderStates, Runner, Work, members_of
from kvcache.request import (
    Action,
    Completion,
    Event,
    Finished,
    Logprob,
    Request,
    RequestRefused,
    SamplingParams,
    State,
    Token,
    TokenLogprobs,
)
from kvcache.scheduler import Entry, Plan, Scheduler, Slice
from kvcache.spec import Match, Usage, integer

__all__ = ["Engine"]

DEFAULT_BLOCK = 16


@final
class Engine:
    """Serves many requests with one model, computing no prefix twice. Not thread-safe.

    model: "demo", a hub id, a folder, a .gguf file, or a transformers model (which keeps its own type).
    kv_bytes: for keys, values and states ("4GiB", a number); None: a quarter of what is available. kv_dtype: their
    format, or a pair; None: the model's type. max_sequences: that run at a time; max_batch_tokens: of one step.
    prefix_cache: reuse what earlier requests computed. draft: guess up to `num_drafts` tokens ahead, by "lookup" or by
    a smaller model (as `model`; its cache comes on top of kv_bytes).

    Raises what `kvcache.hf.load` raises for the model, `ValueError` for sizes that cannot work.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        kv_bytes: int | str | None = None,
        dtype: str = "bf16",
        kv_dtype: str | tuple[str, str] | None = None,
        block_size: int | None = None,
        max_sequences: int = 16,
        max_batch_tokens: int = 512,
        prefix_cache: bool = True,
        draft: Any = None,
        num_drafts: int = 4,
    ) -> None:
        integer(max_sequences, "max_sequences", minimum=1)
        integer(max_batch_tokens, "max_batch_tokens", minimum=1)
        self._num_drafts = integer(num_drafts, "num_drafts", minimum=1)
        size = DEFAULT_BLOCK if block_size is None else integer(block_size, "block_size", minimum=1)
        wanted = None if kv_bytes is None else memory.parse_bytes(kv_bytes)
        loaded = load(model, dtype=dtype, tokenizer=tokenizer)
        self.model_name = loaded.name
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        layout = layout_of(self.model)
        formats = dtype_name(self.model.dtype) if kv_dtype is None else kv_dtype
        self.max_length = build.max_length(self.model)
        sizes = memory.measure(self.model, layout, formats, size)
        members = members_of(layout, size)
        shapes = memory.divide(
            wanted,
            sizes,
            members,
            max_sequences=max_sequences,
            max_batch=max_batch_tokens,
            max_length=self.max_length,
            device=self.model.device,
        )
        self.cache = build.initialised(
            members,
            shapes,
            formats,
            self.model.device,
            max_sequences=max_sequences,
            max_batch=max_batch_tokens,
            block_bytes=sizes.blocks,
            state_bytes=sizes.states,
        )
        self._runner = Runner(self.model, self.cache, layout=layout)
        self._scheduler = Scheduler(shapes, max_batch_tokens, max_sequences)
        self._members = [member for member in members if isinstance(member, CausalCache)]
        self._prefixes: Prefixes | None = None
        if prefix_cache:
            namespace = namespace_of(loaded.fingerprint, formats, size, layout.layers)
            self._prefixes = Prefixes(members, namespace, size)
        self._vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        self._drafter = build.drafter(
            draft,
            dtype=dtype,
            layout=layout,
            vocabulary=self._vocabulary,
            max_length=self.max_length,
            max_sequences=max_sequences,
            max_batch=max_batch_tokens,
        )
        self._stop_tokens = build.stop_tokens(self.model, self.tokenizer)
        self._groups: dict[str, Group] = {}
        self._samples: dict[int, Sample] = {}
        self._numbers = count()
        self._names = count()
        self._undelivered: list[Event] = []
        self._may_admit = True
        self._is_proven = True
        self._is_closed = False
        self._fault: CorruptState | None = None
        self.counts = Counts()

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
        """Complete one prompt or several, each text or token ids; one `Completion` each, in their order."""
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
        return self._streamed(request.id)

    # --- for whoever drives it ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> str:
        """Queue a request; its id. Raises `RequestRefused` when it cannot fit even alone, `ValueError` for misuse."""
        self._check_open()
        if not isinstance(request, Request):
            raise TypeError(f"add got {type(request).__name__}; expected a kvcache.Request")
        if request.id in self._groups:
            raise ValueError(f"request {request.id!r} is under way; expected an id of its own")
        tokens, params = self._tokens_of(request), request.params
        if params.num_samples > self._scheduler.max_sequences:
            raise ValueError(
                f"request {request.id!r} asks for {params.num_samples} outputs and {self._scheduler.max_sequences} "
                f"sequences may run; expected no more: raise max_sequences"
            )
        limit, what = self._limit()
        if limit is not None and len(tokens) >= limit:
            raise RequestRefused(request.id, len(tokens) + 1, limit, what)
        group = Group(request, time.perf_counter())
        sample = self._sample(group, 0, tokens, len(tokens))
        if self._prefixes is not None:
            self._prefixes.begin(sample)
        self._groups[request.id] = group
        number = sample.number
        self._scheduler.add(Entry(number, request.priority, number, len(tokens), num_slots=params.num_samples))
        self._may_admit = True
        self._is_proven = False
        self.counts.num_requests += 1
        self.counts.num_prompt_tokens += len(tokens)
        return request.id

    def step(self) -> list[Event]:
        """One forward for all requests under way, and what came of it. Raises `CorruptState` for a broken cache."""
        self._check_open()
        began = time.perf_counter()
        events, self._undelivered = self._undelivered, []
        self._admit()
        self._draft()
        plan = self._plan(events)
        if plan.slices:
            logits = self._run(plan)
            if logits is not None:
                self._commit(plan, logits, events)
            self.counts.num_steps += 1
            self.counts.step_seconds += time.perf_counter() - began
        if not self._groups and not self._is_proven:
            self._prove()
        return events

    def abort(self, request_id: str) -> bool:
        """End a request now; its `Finished` comes with the next step. False when no such request is under way."""
        self._check_open()
        group = self._groups.get(request_id)
        if group is None:
            return False
        now = time.perf_counter()
        for sample in list(group.samples.values()):
            self._finish(sample, "abort", Action.ABORT, now, self._undelivered)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and no event waits to be delivered."""
        return not self._groups and not self._undelivered

    def usage(self) -> Usage:
        """What the cache holds; `num_free_blocks` are those that can be had, cached ones included."""
        self._check_open()
        return self.cache.usage()

    def metrics(self) -> Metrics:
        """Counters, and what waits, runs and is held."""
        self._check_open()
        blocks, num_evicted = [], 0
        for member in self._members:
            pool = member.tables.pool
            num_held = sum(pool.references(block) > 0 for block in range(pool.num_blocks))
            num_free = pool.num_blocks - num_held - pool.num_cached
            blocks.append(Blocks(str(member.span), num_free, num_held, pool.num_cached))
            num_evicted += pool.num_evicted
        return Metrics(
            self.counts, self._scheduler.num_waiting, self._scheduler.num_running, num_evicted, tuple(blocks)
        )

    def check(self) -> None:
        """Raise `CorruptState` unless cache, index and scheduler agree. Walks everything."""
        self._check_open()
        self.cache.check()
        if self._prefixes is not None:
            self._prefixes.check()
        entries = self._scheduler.entries
        if entries.keys() != self._samples.keys():
            raise CorruptState(f"requests {sorted(self._samples)} are under way and {sorted(entries)} are scheduled")
        for number, entry in entries.items():
            stored, sample = self.cache.sequence(number).seq_len, self._samples[number]
            if stored != entry.num_computed or entry.num_tokens != len(sample.tokens):
                raise CorruptState(
                    f"sequence {number} has {stored} tokens in the cache and {len(sample.tokens)} in all; the "
                    f"scheduler counts {entry.num_computed} and {entry.num_tokens}"
                )
        if stray := self.cache.usage().sequences.keys() - entries.keys():
            raise CorruptState(f"the cache holds sequences {sorted(stray)}, which no request owns")

    def close(self) -> None:
        """Give the model its attention back and free the cache. Closing twice is allowed."""
        if not self._is_closed:
            self._is_closed = True
            if self._drafter is not None:
                self._drafter.close()
            self._runner.close()
            self.cache.close()
            self._groups.clear()
            self._samples.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- about prefixes -----------------------------------------------------------------------------------------------

    @property
    def prefixes(self) -> Prefixes | None:
        """What is known by its content; `prefixes.index.listeners` hear of every change."""
        return self._prefixes

    def match(self, prompt: str | Sequence[int], salt: str | None = None) -> Match:
        """How much of a prompt is cached now, and why not more. Changes nothing."""
        self._check_open()
        if self._prefixes is None:
            return Match(0, "off: the engine was made with prefix_cache=False")
        sample = self._probe(prompt, salt)
        return self._prefixes.match(sample).match

    def pin(self, prompt: str | Sequence[int], salt: str | None = None, *, is_pinned: bool = True) -> Match:
        """Keep what is cached of a prompt from eviction until it is unpinned (`is_pinned=False`); what that is."""
        self._check_open()
        if self._prefixes is None:
            raise ValueError("the engine was made with prefix_cache=False; there is nothing to pin")
        hit = self._prefixes.match(self._probe(prompt, salt))
        self._prefixes.pin(hit.keys, is_pinned=is_pinned)
        return hit.match

    def encode(self, **inputs: Tensor) -> Tensor:
        """States [n, hidden] of one image, sound or source text, for `MediaInput`."""
        self._check_open()
        return self._runner.encode(**inputs)

    # --- the four parts of a step -------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting requests in, first come first: their cached prefix is theirs from here on."""
        if not self._may_admit:
            return
        self._may_admit = False
        prefixes = self._prefixes
        for entry in self._scheduler.waiting():
            if not self._scheduler.has_slot:
                return
            sample = self._samples[entry.number]
            if prefixes is None or sample.chain is None:
                if not self._scheduler.can_admit(entry, 0, self._free()):
                    return
                self._scheduler.admit(entry, 0)
                continue
            if prefixes.is_promised(sample):
                self._may_admit = True  # somebody computes its prefix right now
                continue
            hit = prefixes.match(sample)
            if prefixes.awaits(sample, hit) is not None:
                self._may_admit = True
                continue
            prefixes.adopt(sample, hit)
            if not self._scheduler.can_admit(entry, hit.match.num_tokens, self._free()):
                self.cache.remove(sample.number, 0)
                return
            self._scheduler.admit(entry, hit.match.num_tokens)
            prefixes.promise(sample, entry, hit)
            self._count_match(sample, hit.match)

    def _draft(self) -> None:
        """Guess what those who decode will say next."""
        if self._drafter is None:
            return
        limit, _ = self._limit()
        samples, counts = [], []
        for number, entry in self._scheduler.entries.items():
            if entry.state is State.DECODE and entry.num_missing == 1:
                sample = self._samples[number]
                room = sample.request.params.max_tokens - sample.num_generated - 1
                if limit is not None:
                    room = min(room, limit - len(sample.tokens) - 1)
                samples.append(sample)
                counts.append(max(0, min(self._num_drafts, room)))
        proposed = self._drafter.propose(samples, counts) if samples else []
        for sample, drafts in zip(samples, proposed, strict=True):
            sample.drafts = drafts
            self._scheduler.entries[sample.number].num_drafts = len(drafts)

    def _plan(self, events: list[Event]) -> Plan:
        while True:
            plan = self._scheduler.plan(self._free())
            if plan.preempt is not None:
                self._preempt(plan.preempt)
            elif plan.stuck is not None:
                self._finish(self._samples[plan.stuck], "length", Action.FINISH, time.perf_counter(), events)
            else:
                return plan

    def _run(self, plan: Plan) -> Tensor | None:
        """Logits, one row for each sequence all of whose tokens are computed now; None: the pool was too short."""
        works = [self._work(part) for part in plan.slices]
        began = time.perf_counter()
        try:
            return self._runner.forward(works)
        except CacheFull:
            # The plan counts blocks; tables with holes, or that begin inside a block, may need one more than that.
            if self._scheduler.num_running == 1:
                last = self._samples[self._scheduler.last_running()]
                self._finish(last, "length", Action.FINISH, time.perf_counter(), self._undelivered)
            else:
                self._preempt(self._scheduler.last_running())
            return None
        finally:
            self.counts.forward_seconds += time.perf_counter() - began

    def _commit(self, plan: Plan, logits: Tensor, events: list[Event]) -> None:
        likeliest = greedy(logits) if any(self._samples[part.number].chooser.is_plain for part in plan.slices) else []
        row = 0
        for part in plan.slices:
            entry, sample = self._scheduler.entries[part.number], self._samples[part.number]
            entry.num_computed += part.num_tokens - part.num_drafts
            entry.copies_tail = False
            self.counts.num_computed_tokens += part.num_tokens
            is_prefill = entry.state is State.PREFILL
            if self._prefixes is not None:
                self._prefixes.publish(sample, entry, is_prefill=is_prefill)
            if entry.num_missing:
                continue
            if is_prefill:
                self._scheduler.computed(entry)
            for own in (sample, *self._forked(sample, entry)):
                self._extend(own, logits[row:], likeliest[row:], events)
            row += 1 + part.num_drafts

    # --- what happens to a request ------------------------------------------------------------------------------------

    def _extend(self, sample: Sample, logits: Tensor, likeliest: list[int], events: list[Event]) -> None:
        """A new token, and further ones as long as the drafts are what is chosen; the other drafts are undone."""
        entry, drafts = self._scheduler.entries[sample.number], sample.drafts
        sample.drafts = []
        for row in range(len(drafts) + 1):
            if sample.chooser.is_plain:
                choice = Choice(likeliest[row])
            else:
                choice = sample.chooser.pick(logits[row], sample.tokens, sample.generated)
            if not self._accept(sample, choice, events):
                break
            if row == len(drafts) or choice.token != drafts[row]:
                break
            entry.num_computed += 1
            self.counts.num_drafts_accepted += 1
        if drafts and sample.number in self._samples and entry.state is State.DECODE:
            self.cache.remove(sample.number, entry.num_computed)
            if self._prefixes is not None:
                self._prefixes.publish(sample, entry, is_prefill=False)

    def _accept(self, sample: Sample, choice: Choice, events: list[Event]) -> bool:
        """A new token: its text, and whether it was the last. False when drafts after it are of no use."""
        entry, params, now = self._scheduler.entries[sample.number], sample.request.params, time.perf_counter()
        sample.tokens.append(choice.token)
        sample.generated.append(choice.token)
        entry.num_tokens += 1
        self.counts.num_generated_tokens += 1
        if sample.first_token is None:
            sample.first_token = now
        ends = choice.token in params.stop_token_ids
        ends = ends or (not params.ignore_eos and choice.token in self._stop_tokens)
        text, stopped = ("", False) if ends else sample.stops.feed(sample.stream.step(choice.token))
        reason = "stop" if ends or stopped else None
        if reason is None and sample.num_generated >= params.max_tokens:
            reason = "length"
        is_full = reason is None and self._is_full(sample)
        if is_full and not self._shift(sample, entry):
            reason = "length"
        if reason is not None and not stopped:
            text += sample.stops.flush()
        sample.text.append(text)
        logprobs = self._logprobs(sample, choice)
        if not sample.group.chooses_best:
            events.append(Token(choice.token, text, sample.request.id, sample.index, logprobs))
        if reason is not None:
            self._finish(sample, reason, Action.FINISH, now, events)
        return reason is None and not is_full

    def _shift(self, sample: Sample, entry: Entry) -> bool:
        """Make room in a full context by forgetting half of it; false where nobody asked, or it cannot be done."""
        params, (limit, _) = sample.request.params, self._limit()
        if not params.context_shift or limit is None:
            return False
        keep = min(params.keep, limit - 1)
        begin, end = keep, keep + num_discarded(limit, keep, len(sample.tokens))
        if end >= entry.num_computed:
            return False
        try:
            self.cache.remove(sample.number, begin, end)
        except NotSupported:
            return False
        except CacheFull:  # shared blocks cannot be copied now: the shorter context is computed again later
            self._discard(sample, entry, begin, end)
            self._preempt(sample.number)
            return True
        self._discard(sample, entry, begin, end)
        entry.num_computed -= end - begin
        return True

    def _discard(self, sample: Sample, entry: Entry, begin: int, end: int) -> None:
        """The context is shorter from now on, and no longer what its blocks would be found by."""
        if self._prefixes is not None:
            self._prefixes.promises.withdraw(entry)
        sample.chain = None
        del sample.tokens[begin:end]
        entry.num_tokens -= end - begin

    def _finish(self, sample: Sample, reason: str, action: Action, now: float, events: list[Event]) -> None:
        """The sequence leaves; what it computed stays for others as long as there is room."""
        self._leave(sample, action)
        group = sample.group
        del self._samples[sample.number], group.samples[sample.index]
        self.counts.num_finished[reason] += 1
        completion = sample.completion(reason, now)
        if not group.samples:
            del self._groups[group.request.id]
        if not group.chooses_best:
            events.append(Finished(completion, group.request.id, sample.index, is_last=not group.samples))
            return
        group.finished.append((sample.sum_logprob / max(1, sample.num_generated), completion))
        if not group.samples:
            group.finished.sort(key=lambda scored: scored[0], reverse=True)
            best = [replace(done, index=i) for i, (_, done) in enumerate(group.finished[: group.request.params.n])]
            events += [Finished(c, c.request_id, c.index, is_last=c is best[-1]) for c in best]

    def _preempt(self, number: int) -> None:
        """It leaves the pool with all its tokens known, and computes them again later."""
        sample = self._samples[number]
        self._leave(sample, Action.PREEMPT)
        sample.num_preemptions += 1
        self.counts.num_preemptions += 1

    def _leave(self, sample: Sample, action: Action) -> None:
        if self._prefixes is not None:
            self._prefixes.release(sample, self._scheduler.entries[sample.number])
        self._scheduler.leave(sample.number, action)
        self.cache.remove(sample.number, 0)
        sample.drafts = []
        if self._drafter is not None:
            self._drafter.forget(sample.number)
        self._may_admit = True

    def _forked(self, sample: Sample, entry: Entry) -> list[Sample]:
        """Parallel samples begin when their prompt is computed: sequences that share all its blocks."""
        made = []
        for index in range(1, entry.num_slots):
            own = self._sample(sample.group, index, list(sample.tokens), sample.num_prompt)
            own.chain = sample.chain.copy() if sample.chain is not None else None
            own.match = sample.match
            own.num_published = sample.num_published
            self.cache.copy_prefix(sample.number, own.number, entry.num_computed)
            self._scheduler.fork(entry, own.number)
            made.append(own)
        return made

    def _drop(self, request_id: str) -> None:
        """End a request whose events nobody wants."""
        if not self._is_closed and self.abort(request_id):
            self._undelivered = [event for event in self._undelivered if event.request_id != request_id]

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _free(self) -> list[int]:
        return [member.tables.pool.num_free for member in self._members]

    def _work(self, part: Slice) -> Work:
        entry, sample = self._scheduler.entries[part.number], self._samples[part.number]
        begin, end = entry.num_computed, entry.num_computed + part.num_tokens - part.num_drafts
        media = [EncoderStates(m.states, m.key, m.index - begin) for m in sample.media if begin <= m.index < end]
        sample.drafts = sample.drafts[: part.num_drafts]
        self.counts.num_drafted += part.num_drafts
        num_logits = 1 + part.num_drafts if end == entry.num_tokens else 0
        return Work(part.number, begin, [*sample.tokens[begin:end], *sample.drafts], num_logits, media)

    def _sample(self, group: Group, index: int, tokens: list[int], num_prompt: int) -> Sample:
        params = group.request.params
        sample = Sample(
            next(self._numbers),
            index,
            group,
            tokens,
            num_prompt,
            Chooser(params, index, self.model.device),
            TextStream(self.tokenizer, tokens),
            StopTexts(params.stop),
        )
        self._samples[sample.number] = group.samples[index] = sample
        return sample

    def _probe(self, prompt: str | Sequence[int], salt: str | None) -> Sample:
        """A prompt to ask the index about; nobody schedules it."""
        request = self._named(prompt, SamplingParams(), salt)
        tokens = self._tokens_of(request)
        sample = Sample(
            -1,
            0,
            Group(request, 0.0),
            tokens,
            len(tokens),
            Chooser(request.params, 0, self.model.device),
            TextStream(None, tokens),
            StopTexts(()),
        )
        assert self._prefixes is not None
        self._prefixes.begin(sample)
        return sample

    def _named(self, prompt: str | Sequence[int], params: SamplingParams, salt: str | None) -> Request:
        return Request(f"kvcache-{next(self._names)}", prompt, params, salt=salt)

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

    def _limit(self) -> tuple[int | None, str]:
        """Tokens that one sequence may have, and what says so."""
        room = self._scheduler.capacity
        if self.max_length is not None and (room is None or self.max_length <= room):
            return self.max_length, "the model's context"
        return room, "the cache"

    def _is_full(self, sample: Sample) -> bool:
        limit, _ = self._limit()
        return limit is not None and len(sample.tokens) >= limit

    def _logprobs(self, sample: Sample, choice: Choice) -> TokenLogprobs | None:
        if choice.logprob is None:
            return None
        sample.sum_logprob += choice.logprob
        if sample.request.params.logprobs is None:
            return None
        top = tuple(Logprob(t, token_text(self.tokenizer, t), value) for t, value in choice.top)
        chosen = Logprob(choice.token, token_text(self.tokenizer, choice.token), choice.logprob)
        found = TokenLogprobs(chosen, top)
        sample.logprobs.append(found)
        return found

    def _count_match(self, sample: Sample, match: Match) -> None:
        if sample.match is not None:
            return  # it was preempted: what it finds again is its own
        sample.match = match
        label = match.reason.partition(":")[0]
        self.counts.num_cached_tokens += match.num_tokens
        if match.num_tokens:
            self.counts.num_hits += 1
            self.counts.num_partial[label] += 1
        else:
            self.counts.num_misses[label] += 1

    def _events_of(self, ids: set[str]) -> Iterator[Event]:
        """Step until these requests are done. Events of others wait for whoever steps next."""
        while ids & self._groups.keys() or any(event.request_id in ids for event in self._undelivered):
            events = self.step()
            self._undelivered += [event for event in events if event.request_id not in ids]
            yield from (event for event in events if event.request_id in ids)

    def _streamed(self, request_id: str) -> Iterator[Event]:
        try:
            yield from self._events_of({request_id})
        finally:
            self._drop(request_id)

    def _prove(self) -> None:
        """Idle: the cache must hold nothing but what is cached, and everything must agree."""
        self._is_proven = True
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
    listed = list(prompts)
    return [listed] if listed and not hasattr(listed[0], "__len__") else listed
