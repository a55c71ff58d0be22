"""The packed runner: ragged sequences, prefills and decodes mixed, in one `[1,T]` forward of an unmodified model.

    runner = Runner(model, capacity=4096, max_sequences=16)
    logits = runner.forward([
        Work(sequence=7, position=0, tokens=prompt),         # a prefill (or a chunk of one)
        Work(sequence=3, position=120, tokens=[token]),      # a decode
    ])                                                       # [2, vocabulary]: one row for the last token of each

What one forward does, for any number of layers:

    Batch -> cache.start_forward -> model(input_ids [1,T], position_ids [1,T], our cache) -> logits of the rows asked
                                       each layer: update -> put, attention -> attend     (hf/runner_host.py)

| models                                                   | calls of the model per forward                       |
|----------------------------------------------------------|------------------------------------------------------|
| attention through transformers' interface                | one, `[1,T]`                                         |
| recurrent layers (their code would mix a row's sequences) | one `[B,1]` for all decodes, one `[1,n]` per prefill |
| attention of their own (BLOOM)                           | the same                                             |
| positions that are counts of columns (OPT, Bart)         | the same, decodes of one length together             |
| states that go on by single tokens only (Mamba, Jamba)   | the same, `[1,1]` per token after the first prefill  |

**A forward that raises takes the cache back** to where each sequence stood; only what spans no longer need there may
have been forgotten. One exception: where a model needs several calls, a sliding layer may have forgotten too much for
that in the calls that went well; such a sequence is removed.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcache.caches import Cache, CausalCache, EncoderCache, HybridCache, RecurrentCache
from kvcache.errors import NotSupported
from kvcache.hf.fused import FusedLayers
from kvcache.hf.layout import Layout, backend_of, dtype_name, layout_of
from kvcache.hf.linears import FastLinears
from kvcache.hf.runner_call import ModelCall
from kvcache.spans import Sliding, Span
from kvcache.spec import Batch, Media, integer

__all__ = ["EncoderStates", "Runner", "Work", "members_of"]

# Sequence ids under which recurrent states are kept while a forward is under way.
_KEPT = -(2**62)


@final
@dataclass(frozen=True, slots=True, eq=False)
class EncoderStates:
    """What an encoder made of one image, sound or source text: states [n, hidden], standing at `tokens[index]`.

    `key` identifies the content (equal keys, equal content). `Runner.encode` makes the states.
    """

    states: Tensor
    key: Hashable
    index: int = 0


@final
@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Tokens that continue one sequence.

    sequence: its number, yours to choose. position: of the first token, the end of the sequence. tokens: at least one.
    num_logits: of how many of the last tokens logits are wanted. media: encoder states that enter with these tokens.
    """

    sequence: int
    position: int
    tokens: Sequence[int]
    num_logits: int = 1
    media: Sequence[EncoderStates] = ()


@final
class Runner:
    """Runs a transformers model over a cache of ours. Not thread-safe. Close it to give the model its attention back.

    cache: initialised, made of `members_of(layout, block_size)`: a `HybridCache` of them, or the only one. Its
        `max_batch` bounds a forward. It stays the caller's.
    capacity, dtype, max_sequences, max_batch, block_size, memory, checkpoints: of the cache that is made when none is
        given (`capacity` is required then, dtype "auto" is the model's); it is closed with the runner.
    layout: what the model keeps; by `layout_of` when not given. `trial.py` finds one under which more models run.
    compile: run the model through torch.compile, as `compiled.py` says; the first forwards take a minute.
    fast_layers: let a bf16 model on the CPU run faster: linear layers as `linears.py` says, norms and GELU in one
        operator each, as `fused.py` does. On some CPUs weights are copied for that: change them before, where
        `FastLinears` says that it does not see it.

    Raises `NotSupported` for models that it cannot run, with the reason. `model_seconds`: what calls of the model took.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache | None = None,
        *,
        layout: Layout | None = None,
        capacity: int | None = None,
        dtype: str | tuple[str, str] = "auto",
        max_sequences: int = 16,
        max_batch: int | None = None,
        block_size: int = 16,
        memory: int | None = None,
        checkpoints: int | Iterable[int] = (),
        compile: bool = False,
        fast_layers: bool = True,
    ) -> None:
        layout = layout or layout_of(model)
        self._owns_cache = cache is None
        if cache is None:
            members = members_of(layout, block_size, memory=memory, checkpoints=checkpoints)
            cache = members[0] if len(members) == 1 else HybridCache(*members)
            name = dtype_name(model.dtype) if dtype == "auto" else dtype
            cache.init(backend_of(model), name, max_sequences, capacity, max_batch)
        self.cache = cache
        self.members = _checked_members(cache, layout)
        self.layout = layout
        # Media alone do not say where a sequence ends.
        self._counting = next((m for m in self.members if isinstance(m, CausalCache | RecurrentCache)), self.members[0])
        self._states = next((m for m in self.members if isinstance(m, RecurrentCache)), None)
        self._encoder = next((m for m in self.members if isinstance(m, EncoderCache)), None)
        self.model_seconds = 0.0
        self._model = ModelCall(model, layout, self.members, compile=compile)
        self._linears: FastLinears | None = None
        self._fused: FusedLayers | None = None
        try:
            if fast_layers:
                self._linears = FastLinears(model)
                self._fused = FusedLayers(model)
        except BaseException:
            self.close()
            raise

    # --- running ----------------------------------------------------------------------------------------------------

    def forward(self, works: Sequence[Work]) -> Tensor:
        """Run all works; logits [sum of num_logits, vocabulary] in the model's type, in the order of works and tokens.

        Raises `ValueError` for works that do not continue their sequences, `CacheFull`, or whatever the model raises;
        the sequences are then as before. Cost on the host: O(T) with small constants.
        """
        self._check(works)
        if not works:
            return torch.empty((0, self._model.vocabulary), dtype=self._model.dtype, device=self._model.device)
        if self._states is not None:
            for number, work in enumerate(works):
                if work.position:
                    self._states.copy_prefix(work.sequence, _KEPT - number, work.position)
        started: list[int] = []
        try:
            with torch.inference_mode():
                logits = self._run(works, started)
        except BaseException:
            for number in started:
                self._take_back(works[number], _KEPT - number)
            raise
        finally:
            if self._states is not None:
                for number in range(len(works)):
                    self._states.remove(_KEPT - number, 0)
        return logits

    def warm(self) -> None:
        """Run a few tokens as sequence 0 and forget them: what is compiled on first use is compiled now.

        That is the kernel, once on a machine, and the model's two graphs where they are asked for. For an empty cache.
        """
        self.forward([Work(0, 0, [0, 0])])
        self.forward([Work(0, 2, [0])])
        self.cache.remove(0, 0)

    def encode(self, **inputs: Tensor) -> Tensor:
        """States [n, hidden] for `EncoderStates`, of what the model's encoder takes, with a batch of one."""
        with torch.inference_mode():
            return self._model.encode(**inputs)

    def close(self) -> None:
        """Give the model its attention back; close the cache if the runner made it. Closing twice is allowed."""
        self._model.close()
        if self._linears is not None:
            self._linears.close()
        if self._fused is not None:
            self._fused.close()
        if self._owns_cache:
            self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _run(self, works: Sequence[Work], started: list[int]) -> Tensor:
        if self._model.is_packed:
            return self._pass(works, range(len(works)), started)
        rows: list[Tensor | None] = [None] * len(works)
        decodes: dict[int, list[int]] = {}  # by length, where a model believes that all rows have one
        for number, work in enumerate(works):
            if work.position and len(work.tokens) == 1:
                decodes.setdefault(work.position if self._model.counts_columns else 0, []).append(number)
            elif work.position and self.layout.one_by_one:
                rows[number] = self._one_by_one(work, number, started)
            else:
                rows[number] = self._pass([work], [number], started)
        for group in decodes.values():
            logits = self._pass([works[number] for number in group], group, started)
            wanted = [works[number].num_logits for number in group]
            for number, part in zip(group, logits.split(wanted), strict=True):
                rows[number] = part
        return torch.cat([part for part in rows if part is not None])

    def _one_by_one(self, work: Work, number: int, started: list[int]) -> Tensor:
        first = len(work.tokens) - work.num_logits
        parts = [
            self._pass(
                [Work(work.sequence, work.position + index, [token], int(index >= first))],
                () if index else (number,),
                started,
            )
            for index, token in enumerate(work.tokens)
        ]
        return torch.cat(parts)

    def _pass(self, works: Sequence[Work], numbers: Iterable[int], started: list[int]) -> Tensor:
        """One call of the model."""
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        kept: list[int] = []
        for work in works:
            count = len(work.tokens)
            tokens += work.tokens
            positions += range(work.position, work.position + count)
            sequences += [work.sequence] * count
            if work.num_logits:
                kept += range(len(tokens) - work.num_logits, len(tokens))
        media, states, sees_media = self._media(works)
        batch = Batch(positions, sequences, media)
        self.cache.start_forward(batch)
        started += numbers
        began = time.perf_counter()
        logits = self._model(
            batch,
            tokens,
            [work.sequence for work in works],
            kept,
            is_fresh=not any(work.position for work in works),
            states=states,
            sees_media=sees_media,
        )
        self.model_seconds += time.perf_counter() - began
        return logits

    def _media(self, works: Sequence[Work]) -> tuple[list[Media], list[Tensor], list[bool] | None]:
        """The media that enter, their states, and which rows see media (`None` for models without cross attention)."""
        media: list[Media] = []
        states: list[Tensor] = []
        if self._encoder is None:
            if any(work.media for work in works):
                raise ValueError("a work brings media, and the model has no cross attention for them")
            return media, states, None
        sees: list[bool] = []
        for work in works:
            known = self._encoder.encoder_cached(work.sequence)
            first = 0 if known else min((entry.index for entry in work.media), default=len(work.tokens))
            media += [Media(len(sees) + entry.index, entry.key, len(entry.states)) for entry in work.media]
            states += [entry.states for entry in work.media]
            sees += [index >= first for index in range(len(work.tokens))]
            if self.layout.is_encoder_decoder and not (known or work.media):
                raise ValueError(
                    f"sequence {work.sequence} has no encoder states; give its first Work media=[EncoderStates(...)], "
                    f"made by Runner.encode"
                )
        return media, states, sees

    def _check(self, works: Sequence[Work]) -> None:
        seen = set()
        for work in works:
            if not len(work.tokens):
                raise ValueError(f"the work for sequence {work.sequence} has no tokens; expected at least one")
            if not 0 <= work.num_logits <= len(work.tokens):
                raise ValueError(
                    f"num_logits is {work.num_logits} for {len(work.tokens)} tokens of sequence {work.sequence}; "
                    f"expected at most one per token"
                )
            if work.sequence in seen:
                raise ValueError(f"sequence {work.sequence} has two works; expected one per forward: join their tokens")
            seen.add(integer(work.sequence, "Work.sequence", minimum=-(2**61)))
            end = self._counting.sequence(work.sequence).seq_len
            if integer(work.position, "Work.position") < end:
                raise ValueError(
                    f"sequence {work.sequence} ends at {end} and its work begins at {work.position}; expected the end: "
                    f"remove the tokens from {work.position} on first"
                )
            for entry in work.media:
                if entry.states.dim() != 2 or not 0 <= entry.index < len(work.tokens):
                    raise ValueError(
                        f"encoder states {list(entry.states.shape)} at index {entry.index} of {len(work.tokens)} "
                        f"tokens; expected [n, hidden] at one of the tokens"
                    )

    def _take_back(self, work: Work, kept: int) -> None:
        """The sequence as it was before a forward that failed."""
        for member in self.members:
            if member is self._states and work.position:
                member.copy_prefix(kept, work.sequence, work.position)
                continue
            try:
                member.remove(work.sequence, work.position)
            except NotSupported:  # see the head of the file
                self.cache.remove(work.sequence, 0)
                return


def members_of(
    layout: Layout, block_size: int, *, memory: int | None = None, checkpoints: int | Iterable[int] = ()
) -> tuple[Cache, ...]:
    """New caches that a `Runner` of this layout wants, in its order, not initialised: for `HybridCache(*members)`."""
    members = layout.members(block_size, memory=memory, checkpoints=checkpoints)
    crosses = layout.is_encoder_decoder or any(layer.is_cross for layer in layout.layers)
    return (*members, EncoderCache()) if crosses else members


def _checked_members(cache: Cache, layout: Layout) -> tuple[Cache, ...]:
    """The members of a cache, after checking that they are those of the layout."""
    members = cache.members if isinstance(cache, HybridCache) else (cache,)
    expected = members_of(layout, 1)
    fits = len(members) == len(expected) and all(
        type(member) is type(wanted)
        and (
            not isinstance(member, CausalCache)
            or not isinstance(wanted, CausalCache)
            or _same(member.span, wanted.span)
        )
        for member, wanted in zip(members, expected, strict=True)
    )
    if not fits:
        raise ValueError(
            f"the cache has members [{_described(members)}]; expected [{_described(expected)}] for this model: make it "
            f"with HybridCache(*members_of(layout, block_size))"
        )
    return members


def _same(span: Span, wanted: Span) -> bool:
    """Whether two spans show a query the same; what they retain beyond that may differ."""
    if isinstance(span, Sliding) and isinstance(wanted, Sliding):
        return span.window == wanted.window
    return span == wanted


def _described(members: Sequence[Cache]) -> str:
    return ", ".join(
        f"{type(member).__name__}({member.span})" if isinstance(member, CausalCache) else type(member).__name__
        for member in members
    )
