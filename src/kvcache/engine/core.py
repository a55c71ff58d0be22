"""The core of an engine: requests under way, and what a step does with them. See `engine.py` for the picture.

(Longer than 300 lines: it is one life, read from top to bottom; what can be decided apart from it stands elsewhere.)

step     admit, draft, plan, run, commit; mend where that broke off
extend   accept a token, and drafts as long as they are what is chosen
accept   its text; was it the last; does the context have to be shifted: all decided, then written down
finish   events; leave: publish what can be of use, give everything back
mend     carry out what was decided, take back what was not
beams    see `places.py`; they leave the pool folded to what they have in common
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from itertools import count
from typing import Any, final

from torch import Tensor

from kvcache.caches import Cache, CausalCache
from kvcache.engine.beams import BeamSearch
from kvcache.engine.drafts import Drafter
from kvcache.engine.metrics import Counts
from kvcache.engine.places import Places
from kvcache.engine.prefixes import Prefixes
from kvcache.engine.sample import Accepted, Ending, Group, Sample
from kvcache.engine.sampler import Choice, Chooser, greedy
from kvcache.engine.shift import num_discarded
from kvcache.engine.text import StopFinder, StopTexts, TextStream
from kvcache.errors import CacheFull, CorruptState, NotSupported
from kvcache.hf.runner import EncoderStates, Runner, Work
from kvcache.request import Action, Event, Request, State, Token, advance
from kvcache.scheduler import Entry, Plan, Scheduler, Slice

__all__ = ["Core"]


@final
class Core:
    """Requests that wait and run. `undelivered`: events that came of something else than a step.

    members: of the cache, those with blocks. limit: tokens that one sequence may have, None: any. stop_tokens: the
    model's own.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        prefixes: Prefixes | None,
        drafter: Drafter | None,
        *,
        num_drafts: int,
        tokenizer: Any,
        device: Any,
        limit: int | None,
        stop_tokens: frozenset[int],
    ) -> None:
        self.runner = runner
        self.cache: Cache = runner.cache
        self.members = [member for member in runner.members if isinstance(member, CausalCache)]
        self.scheduler = scheduler
        self.prefixes = prefixes
        self.drafter = drafter
        self.limit = limit
        self.stop_tokens = stop_tokens
        self.groups: dict[str, Group] = {}
        self.samples: dict[int, Sample] = {}
        self.undelivered: list[Event] = []
        self.counts = Counts()
        self.may_admit = True
        self._may_draft = True
        self._num_drafts = num_drafts
        self._tokenizer = tokenizer
        self._device = device
        self._numbers = count()
        self._places = Places(self.cache, scheduler, prefixes, self._sample)

    def begin(self, request: Request, tokens: list[int]) -> None:
        """Queue a request that has been looked at and fits."""
        group = Group(request, time.perf_counter())
        self.may_admit = True
        try:
            sample = self._sample(group, 0, tokens, len(tokens))
            if self.prefixes is not None:
                self.prefixes.begin(sample)
            if request.params.num_beams > 1:
                group.search = self._search_of(sample)
            number = sample.number
            entry = Entry(number, request.priority, number, len(tokens), num_slots=request.params.num_sequences)
            self.scheduler.add(entry)
            self.groups[request.id] = group
        except BaseException:
            for sample in list(group.samples.values()):
                self._forget(sample)
            self.groups.pop(request.id, None)
            self.scheduler.mend()
            raise
        self.counts.num_requests += 1
        self.counts.num_prompt_tokens += len(tokens)

    def step(self, events: list[Event]) -> None:
        """One forward of everything that can go on; what comes of it is added to `events`.

        One that raises keeps the tokens that were chosen by then: all requests go on from there with the next step.
        """
        began = time.perf_counter()
        try:
            self._admit()
            self._draft()
            plan = self._plan(events)
            if not plan.slices:
                return
            logits = self._run(plan)
            if logits is not None:
                self._commit(plan, logits, events)
            if self.prefixes is not None:
                self.prefixes.sync()
        except BaseException:
            self._mend(events)
            raise
        self.counts.num_steps += 1
        self.counts.step_seconds += time.perf_counter() - began

    def abort(self, group: Group) -> None:
        """End all outputs of a request now."""
        now = time.perf_counter()
        try:
            for sample in list(group.samples.values()):
                if sample.number in self.samples:  # beams end together
                    self.finish(sample, "abort", Action.ABORT, now, self.undelivered)
        except BaseException:
            self._mend(self.undelivered)
            raise

    def probe(self, request: Request, tokens: list[int]) -> Sample:
        """A prompt to ask the index about; nobody schedules it."""
        chooser = Chooser(request.params, 0, self._device)
        group = Group(request, 0.0)
        sample = Sample(-1, 0, group, tokens, len(tokens), chooser, TextStream(None, tokens), StopTexts(()))
        sample.media = request.media
        if self.prefixes is not None:
            self.prefixes.begin(sample)
        return sample

    def check(self) -> None:
        """Raise `CorruptState` unless cache, index and scheduler agree. Walks everything."""
        self.cache.check()
        if self.prefixes is not None:
            self.prefixes.check()
        entries = self.scheduler.entries
        if entries.keys() != self.samples.keys():
            raise CorruptState(f"requests {sorted(self.samples)} are under way and {sorted(entries)} are scheduled")
        for number, entry in entries.items():
            stored, sample = self.cache.sequence(number).seq_len, self.samples[number]
            if stored != entry.num_computed or entry.num_tokens != len(sample.tokens):
                raise CorruptState(
                    f"sequence {number} has {stored} tokens in the cache and {len(sample.tokens)} in all; the "
                    f"scheduler counts {entry.num_computed} and {entry.num_tokens}"
                )
        if stray := self.cache.usage().sequences.keys() - entries.keys():
            raise CorruptState(f"the cache holds sequences {sorted(stray)}, which no request owns")

    def close(self) -> None:
        """Give the model its attention back and free the caches, all of it, even if a listener raises."""
        with ExitStack() as last_first:
            last_first.callback(self.samples.clear)
            last_first.callback(self.groups.clear)
            last_first.callback(self.cache.close)
            last_first.callback(self.runner.close)
            if self.drafter is not None:
                last_first.callback(self.drafter.close)
            if self.prefixes is not None:
                last_first.callback(self.prefixes.clear)  # listeners hear that all is gone

    # --- the parts of a step ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting requests in, first come first: their cached prefix is theirs from here on."""
        if not self.may_admit:
            return
        self.may_admit = False
        prefixes = self.prefixes
        for entry in self.scheduler.waiting():
            if not self.scheduler.has_slot:
                return
            sample = self.samples[entry.number]
            if prefixes is None or sample.chain is None:
                if not self.scheduler.can_admit(entry, 0, self._free()):
                    return
                self.scheduler.admit(entry, 0)
                continue
            if prefixes.is_promised(sample):
                self.may_admit = True  # somebody computes its prefix right now
                continue
            hit = prefixes.match(sample)
            if prefixes.awaits(sample, hit) is not None:
                self.may_admit = True
                continue
            prefixes.adopt(sample, hit)
            if not self.scheduler.can_admit(entry, hit.match.num_tokens, self._free()):
                self.cache.remove(sample.number, 0)
                return
            if sample.match is None:  # else it was preempted: what it finds again is its own
                sample.match = hit.match
                self.counts.admitted(hit.match)
            self.scheduler.admit(entry, hit.match.num_tokens)
            prefixes.promise(sample, entry, hit)

    def _draft(self) -> None:
        """Guess what those who decode will say next."""
        may_draft, self._may_draft = self._may_draft, True
        if self.drafter is None:
            return
        limit = self.limit
        samples, counts = [], []
        for number, entry in self.scheduler.entries.items():
            sample = self.samples[number]
            if entry.state is State.DECODE and entry.num_missing == 1 and sample.group.search is None:
                room = sample.request.params.max_tokens - sample.num_generated - 1
                if limit is not None:
                    room = min(room, limit - len(sample.tokens) - 1)
                samples.append(sample)
                counts.append(max(0, min(self._num_drafts, room)))
        proposed = self.drafter.propose(samples, counts) if samples and may_draft else [[] for _ in samples]
        for sample, drafts in zip(samples, proposed, strict=True):
            sample.drafts = drafts
            self.scheduler.entries[sample.number].num_drafts = len(drafts)

    def _plan(self, events: list[Event]) -> Plan:
        while True:
            plan = self.scheduler.plan(self._free())
            is_short = plan.preempt is not None or plan.stuck is not None
            if is_short and any(member.settle() for member in self.members):
                continue  # windows had moved on
            if plan.preempt is not None:
                self._preempt(plan.preempt)
            elif plan.stuck is not None:
                self._end_or_shift(plan.stuck, events)
            else:
                return plan

    def _run(self, plan: Plan) -> Tensor | None:
        """Logits, one row for each sequence all of whose tokens are computed now; None: the pool was too short."""
        works = [self._work(part) for part in plan.slices]
        try:
            return self.runner.forward(works)
        except CacheFull:
            # The plan counts blocks; tables with holes, or that begin inside a block, may need one more than that.
            if any(part.num_drafts for part in plan.slices):
                self._may_draft = False
            elif self.scheduler.is_alone:
                self._end_or_shift(self.scheduler.last_running(), self.undelivered)
            else:
                self._preempt(self.scheduler.last_running())
            return None
        finally:
            self.counts.model_seconds = self.runner.model_seconds

    def _commit(self, plan: Plan, logits: Tensor, events: list[Event]) -> None:
        began = time.perf_counter()
        likeliest = greedy(logits) if any(self.samples[part.number].chooser.is_plain for part in plan.slices) else []
        self.counts.choice_seconds += time.perf_counter() - began
        row = 0
        for part in plan.slices:
            entry, sample = self.scheduler.entries[part.number], self.samples[part.number]
            entry.num_computed += part.num_tokens - part.num_drafts
            entry.copies_tail = False
            self.counts.num_computed_tokens += part.num_tokens
            is_prefill = entry.state is State.PREFILL
            if self.prefixes is not None:
                self.prefixes.publish(sample, entry, is_prefill=is_prefill)
            if entry.num_missing:
                continue
            if is_prefill:
                self.scheduler.computed(entry)
            if sample.group.search is not None:
                self._advance(sample, sample.group.search, logits[row], events)
            else:
                for own in (sample, *self._forked(sample, entry)):
                    self._extend(own, logits[row:], likeliest[row:], events)
            row += 1 + part.num_drafts

    def _mend(self, events: list[Event]) -> None:
        """After a step that broke off: the last known token of each sequence is still to be computed.

        All that is stored before it is right: only guesses, which nobody has looked at, come after. What was decided is
        carried out, without publishing: whoever broke the step off may do so again.
        """
        self.may_admit = True
        for sample in list(self.samples.values()):
            if sample.accepted is not None:
                self._write(sample, sample.accepted, events)
            if sample.reason is not None and sample.ending is None:
                sample.ending = self._ending(sample, sample.reason, time.perf_counter())
            if sample.ending is not None:
                for own in self._together(sample):
                    self._forget(own)
                self._conclude(sample, sample.ending, events)
            elif sample.number not in self.scheduler.entries and sample.number in self.samples and sample.index:
                self._forget(sample)  # it was about to be born
        for group in self.groups.values():
            if group.search is None and (entry := self.scheduler.entries.get(group.samples[min(group.samples)].number)):
                if entry.num_slots > 1:
                    entry.num_slots = 1 + group.request.params.num_samples - len(group.samples)
            elif group.search is not None:
                self._refold(group, group.search)
        self.scheduler.mend()
        if self.prefixes is not None:
            running = [entry for entry in self.scheduler.entries.values() if entry.state is not State.WAITING]
            self.prefixes.mend(running)
        for number, entry in list(self.scheduler.entries.items()):
            sample = self.samples[number]
            entry.num_tokens = len(sample.tokens)
            if entry.state is State.WAITING:
                self.cache.remove(number, 0)  # it was about to be admitted, or has just left
                entry.num_computed, entry.num_drafts, entry.copies_tail = 0, 0, False
            elif sample.is_uncertain or not self._is_rewound(entry):
                self._restart(sample)
            if sample.accepted is None and sample.group.search is None:
                sample.chooser.resume(sample.num_generated)
            sample.is_uncertain = False

    def _is_rewound(self, entry: Entry) -> bool:
        """Take what is stored back to the last known token; false where states cannot go back."""
        end = min(self.cache.sequence(entry.number).seq_len, entry.num_tokens - 1)
        try:
            self.cache.remove(entry.number, end)
        except NotSupported:
            return False
        entry.num_computed, entry.copies_tail = self.cache.sequence(entry.number).seq_len, True
        return True

    def _restart(self, sample: Sample) -> None:
        """Compute it again from the start; what is stored is uncertain, and nobody else may have it."""
        sample.chain = None
        self._preempt(sample.number)
        if self.prefixes is not None:
            self.prefixes.begin(sample)

    def _refold(self, group: Group, search: BeamSearch) -> None:
        """Beams that run, or were about to part or to leave, wait again as what they have in common."""
        first = group.samples[0]
        entry = self.scheduler.entries[first.number]
        if entry.state is State.WAITING and len(group.samples) == 1 and first.tokens == search.common():
            return
        for sample in list(group.samples.values()):
            if sample is not first:
                self._forget(sample)
        if self.prefixes is not None:
            self.prefixes.promises.withdraw(entry)
        if entry.state is not State.WAITING:
            entry.state = advance(entry.state, Action.PREEMPT)
        self._places.fold(first, search)
        first.num_preemptions += 1
        self.counts.num_preemptions += 1

    def _forget(self, sample: Sample) -> None:
        """A sequence is gone, as far as it ever was there. Nothing is published."""
        entry = self.scheduler.entries.pop(sample.number, None)
        if entry is not None and self.prefixes is not None:
            self.prefixes.promises.withdraw(entry)
        self.cache.remove(sample.number, 0)
        if self.drafter is not None:
            self.drafter.forget(sample.number)
        self.samples.pop(sample.number, None)
        sample.group.samples.pop(sample.index, None)

    # --- what happens to a request ------------------------------------------------------------------------------------

    def _extend(self, sample: Sample, logits: Tensor, likeliest: list[int], events: list[Event]) -> None:
        """A new token, and further ones as long as the drafts are what is chosen; the other drafts are undone."""
        entry, drafts = self.scheduler.entries[sample.number], sample.drafts
        sample.drafts = []
        for row in range(len(drafts) + 1):
            if sample.chooser.is_plain:
                choice = Choice(likeliest[row])
            else:
                began = time.perf_counter()
                choice = sample.chooser.pick(logits[row], sample.tokens, sample.generated)
                self.counts.choice_seconds += time.perf_counter() - began
            if not self._accept(sample, choice, events):
                break
            if row == len(drafts) or choice.token != drafts[row]:
                break
            entry.num_computed += 1
            self.counts.num_drafts_accepted += 1
        if drafts and sample.number in self.samples and entry.state is State.DECODE:
            self.cache.remove(sample.number, entry.num_computed)
            if self.prefixes is not None:
                self.prefixes.publish(sample, entry, is_prefill=False)

    def _accept(self, sample: Sample, choice: Choice, events: list[Event]) -> bool:
        """A new token: its text, and whether it was the last. False when drafts after it are of no use."""
        entry, params, now = self.scheduler.entries[sample.number], sample.request.params, time.perf_counter()
        stream, stops = copy(sample.stream), copy(sample.stops)
        ends = choice.token in params.stop_token_ids
        ends = ends or (not params.ignore_eos and choice.token in self.stop_tokens)
        text, stopped = ("", False) if ends else stops.feed(stream.step(choice.token))
        reason = "stop" if ends or stopped else None
        if reason is None and sample.num_generated + 1 >= params.max_tokens:
            reason = "length"
        is_full = reason is None and self.limit is not None and len(sample.tokens) + 1 >= self.limit
        if is_full and not self._shift(sample, entry, len(sample.tokens) + 1):
            reason = "length"
        if reason is not None and not stopped:
            text += stops.flush()
        logprobs = sample.described(choice, self._tokenizer)
        event = Token(choice.token, text, sample.request.id, sample.index, logprobs)
        total = sample.sum_logprob + (choice.logprob or 0.0)
        before = len(sample.tokens), sample.num_generated
        sample.accepted = Accepted(choice.token, text, logprobs, total, event, reason, stream, stops, *before, now)
        self._write(sample, sample.accepted, events)
        if reason is not None:
            self.finish(sample, reason, Action.FINISH, now, events)
        return reason is None and not is_full

    def _write(self, sample: Sample, accepted: Accepted, events: list[Event]) -> None:
        """Carry out what was accepted, or what is left of that."""
        sample.tokens[accepted.num_tokens :] = [accepted.token]
        sample.generated[accepted.num_generated :] = [accepted.token]
        sample.text[accepted.num_generated :] = [accepted.text]
        if accepted.logprobs is not None:
            sample.logprobs[accepted.num_generated :] = [accepted.logprobs]
        sample.sum_logprob = accepted.sum_logprob
        if sample.first_token is None:
            sample.first_token = accepted.now
        if not sample.group.chooses_best and not (events and events[-1] is accepted.event):
            events.append(accepted.event)
        self.scheduler.entries[sample.number].num_tokens = len(sample.tokens)
        sample.stream, sample.stops, sample.reason = accepted.stream, accepted.stops, accepted.reason
        sample.accepted = None
        self.counts.num_generated_tokens += 1

    def _end_or_shift(self, number: int, events: list[Event]) -> None:
        """A sequence has the pool to itself, and no room: what is pinned, or holes that a shift left, take it."""
        sample = self.samples[number]
        if not self._shift(sample, self.scheduler.entries[number], len(sample.tokens)):
            self.finish(sample, "length", Action.FINISH, time.perf_counter(), events)

    def _shift(self, sample: Sample, entry: Entry, held: int) -> bool:
        """Make room in a full context by forgetting half of it; false where nobody asked, or it cannot be done.

        held: its tokens, perhaps with one that is about to come.
        """
        params = sample.request.params
        if not params.context_shift or self.limit is None:
            return False
        context = min(self.limit, held)
        keep = min(params.keep, context - 1)
        begin, end = keep, keep + num_discarded(context, keep, held)
        if end >= entry.num_computed:
            return False
        sample.is_uncertain = True
        try:
            self.cache.remove(sample.number, begin, end)
        except NotSupported:
            sample.is_uncertain = False
            return False
        except CacheFull:  # shared blocks cannot be copied now: the shorter context is computed again later
            self._discard(sample, entry, begin, end)
            self._preempt(sample.number)
        else:
            self._discard(sample, entry, begin, end)
            entry.num_computed -= end - begin
        sample.is_uncertain = False
        return True

    def _discard(self, sample: Sample, entry: Entry, begin: int, end: int) -> None:
        """The context is shorter from now on, and no longer what its blocks would be found by."""
        if self.prefixes is not None:
            self.prefixes.promises.withdraw(entry)
        sample.chain = None
        del sample.tokens[begin:end]
        sample.media = [
            replace(medium, index=medium.index - (end - begin if medium.index >= end else 0))
            for medium in sample.media
            if not begin <= medium.index < end
        ]
        entry.num_tokens -= end - begin

    def finish(self, sample: Sample, reason: str, action: Action, now: float, events: list[Event]) -> None:
        """The sequence leaves, beams together; what it computed stays for others as long as there is room."""
        if sample.group.search is not None:
            sample = sample.group.samples[0]
        if sample.ending is None:
            sample.ending = self._ending(sample, reason, now)
        for own in self._together(sample):
            self._leave(own, action)
        self._conclude(sample, sample.ending, events)

    def _ending(self, sample: Sample, reason: str, now: float) -> Ending:
        unborn = self._unborn(sample.group, self.scheduler.entries[sample.number])
        return sample.ends(reason, now, unborn, self._tokenizer)

    def _conclude(self, sample: Sample, ending: Ending, events: list[Event]) -> None:
        """An output that has left is told of and forgotten."""
        group = sample.group
        if ending.events and not (events and events[-1] is ending.events[-1]):
            events += ending.events
        group.finished.update(ending.finished)
        for own in self._together(sample):
            group.samples.pop(own.index, None)
            if own is not sample:
                self.samples.pop(own.number, None)
        if not group.samples:
            self.groups.pop(group.request.id, None)
        self.samples.pop(sample.number, None)  # not before the rest: `_mend` looks here
        for _, completion in ending.finished.values():
            self.counts.num_finished[completion.finish_reason] += 1
            if group.search is not None:  # of beams only those count that are told of
                self.counts.num_generated_tokens += len(completion.token_ids)

    def _together(self, sample: Sample) -> list[Sample]:
        """Those that leave with it, and itself, last."""
        others = () if sample.group.search is None else sample.group.samples.values()
        return [*(own for own in others if own is not sample), sample]

    def _preempt(self, number: int) -> None:
        """It leaves the pool with all its tokens known, and computes them again later."""
        sample = self.samples[number]
        if sample.group.search is not None:
            sample = self._folded(sample.group, sample.group.search)
        else:
            self._leave(sample, Action.PREEMPT)
        sample.num_preemptions += 1
        self.counts.num_preemptions += 1

    def _leave(self, sample: Sample, action: Action) -> None:
        if self.prefixes is not None:
            self.prefixes.release(sample, self.scheduler.entries[sample.number])
        self.scheduler.leave(sample.number, action)
        self.cache.remove(sample.number, 0)
        sample.drafts = []
        if self.drafter is not None:
            self.drafter.forget(sample.number)
        self.may_admit = True

    def _forked(self, sample: Sample, entry: Entry) -> list[Sample]:
        """Parallel samples begin when their prompt is computed: sequences that share all its blocks."""
        made = []
        for index in self._unborn(sample.group, entry):
            own = self._sample(sample.group, index, list(sample.tokens), sample.num_prompt)
            own.chain = sample.chain.copy() if sample.chain is not None else None
            own.match = sample.match
            own.media = sample.media
            own.num_published = sample.num_published
            self.cache.copy_prefix(sample.number, own.number, entry.num_computed)
            self.scheduler.fork(entry, own.number)
            made.append(own)
        return made

    def _unborn(self, group: Group, entry: Entry) -> range:
        """Which parallel samples are still to begin when this prompt is computed."""
        count = group.request.params.num_samples
        return range(count - entry.num_slots + 1, count)

    # --- beams --------------------------------------------------------------------------------------------------------

    def _search_of(self, sample: Sample) -> BeamSearch:
        """A search whose outputs fit whatever happens, even where they share nothing but their prompt."""
        params = sample.request.params
        room = self.limit_of(params.num_beams, sample.num_prompt)
        most = params.max_tokens if room is None else min(params.max_tokens, room - sample.num_prompt)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_tokens)
        finder = StopFinder(self._tokenizer, sample.tokens, params.stop)
        return BeamSearch(params, sample.chooser, sample.tokens, most=most, ends=ends, has_stopped=finder.is_in)

    def limit_of(self, num_sequences: int, num_prompt: int) -> int | None:
        """Tokens that each of so many sequences of one prompt may have; None: any."""
        bounds = (self.limit, self.scheduler.capacity(num_sequences, num_prompt))
        return min((bound for bound in bounds if bound is not None), default=None)

    def _advance(self, sample: Sample, search: BeamSearch, logits: Tensor, events: list[Event]) -> None:
        """A place of a search is computed; when all are, every beam goes on by a token."""
        group, now = sample.group, time.perf_counter()
        if self._places.advance(group, search, sample.index, logits, now) and search.is_done:
            self.finish(group.samples[0], "length", Action.FINISH, now, events)

    def _folded(self, group: Group, search: BeamSearch) -> Sample:
        """All beams leave; what they have in common waits, as one sequence, to be computed again."""
        first = group.samples[0]
        *others, _ = self._together(first)
        for sample in others:
            self._leave(sample, Action.FINISH)
            del self.samples[sample.number], group.samples[sample.index]
        self._leave(first, Action.PREEMPT)
        self._places.fold(first, search)
        return first

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _free(self) -> list[int]:
        return [member.tables.pool.num_free for member in self.members]

    def _work(self, part: Slice) -> Work:
        entry, sample = self.scheduler.entries[part.number], self.samples[part.number]
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
            Chooser(params, index, self._device),
            TextStream(self._tokenizer, tokens),
            StopTexts(params.stop),
        )
        sample.media = group.request.media
        group.samples[index] = self.samples[sample.number] = sample
        return sample
