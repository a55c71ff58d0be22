"""Whole requests: the engine beside `transformers.generate()` and what peers this machine has, on the demo model.

    speed       the same prompts to each contender in turn, new ones each round: seconds until the last token
    prefix      the first token of a long prompt, cold and when all but its end is cached
    anatomy     a decode step: the model, everything else, and the weights' bytes at the speed of memory
    overhead    what caching costs when nothing is ever found again

Rounds alternate between contenders, medians are reported, and prompts are random tokens: what is in them matters to no
contender but for what they share. vLLM and llama.cpp run in processes of their own (`outside.py`), started before the
first round and resting while others work; one that is not installed is named as absent, with the reason.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from kvcache.bench.outside import LLAMA, VLLM, Pipe
from kvcache.bench.stream import read_bandwidth
from kvcache.bench.table import Cell, Table
from kvcache.caches import Cache, CausalCache, HybridCache
from kvcache.engine import Engine
from kvcache.hf.linears import FastLinears
from kvcache.hf.loading import load
from kvcache.request import Completion, Request, SamplingParams

__all__ = ["WORKLOADS", "Contender", "EngineContender", "GenerateContender", "Timing", "Workload", "tables"]

MAX_BATCH_TOKENS = 2048
"""Of a step: vLLM's default here, and the same for ours. Ours is 512 unless told: then long prompts take 10 % longer,
and other streams wait a quarter as long for their next token."""
LLAMA_BATCH_TOKENS = 512  # its own default
MAX_LENGTH = 4608
KV_BYTES = "384MiB"
"""Of an engine's pool: as little as the longest workload allows, so that blocks are soon evicted and written again, as
they are in a server nearly always."""
ROUNDS = 3
PAIRS = 12
"""Of engines with and without a prefix cache: their difference is small, and rounds are short."""
ANATOMY_STEPS = 40


class Workload(NamedTuple):
    """Requests that come at once: `num_shared` tokens in common, then `num_own` each; `num_out` are generated."""

    name: str
    num_requests: int
    num_shared: int
    num_own: int
    num_out: int


class Timing(NamedTuple):
    """Seconds from the prompts to the first token that comes (`None`: not told), and to the last of all."""

    first: float | None
    total: float


WORKLOADS = (
    Workload("prefill of 512", 1, 0, 512, 1),
    Workload("one stream, 128 out", 1, 0, 32, 128),
    Workload("8 sharing 1024, +64 each, 64 out", 8, 1024, 64, 64),
    Workload("4 of 4088 sharing 1088, 32 out", 4, 1088, 3000, 32),
)
PREFIX = Workload("prefix", 1, 4096, 16, 1)
STRANGERS = Workload("8 strangers of 128, 16 out", 8, 0, 128, 16)
BATCHES = (1, 8)


class Contender(ABC):
    """Something that completes prompts of token ids, greedily, and never stops early."""

    name: str

    @abstractmethod
    def complete(self, prompts: Sequence[Sequence[int]], num_out: int) -> Timing:
        """Complete all of `prompts`, given at once."""


@final
class EngineContender(Contender):
    """`Engine.generate`."""

    def __init__(self, engine: Engine, name: str = "kvcache") -> None:
        self.engine = engine
        self.name = name

    def complete(self, prompts: Sequence[Sequence[int]], num_out: int) -> Timing:
        """See `Contender.complete`."""
        began = time.perf_counter()
        done: list[Completion] = self.engine.generate(prompts, max_tokens=num_out, ignore_eos=True)
        return Timing(min(one.time_to_first_token for one in done), time.perf_counter() - began)


@final
class GenerateContender(Contender):
    """`model.generate` as its documentation calls it: one padded batch, its own cache and attention."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self._model = model

    def complete(self, prompts: Sequence[Sequence[int]], num_out: int) -> Timing:
        """See `Contender.complete`."""
        ids = torch.tensor([list(prompt) for prompt in prompts])
        clock = _Clock()
        began = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_out,
                min_new_tokens=num_out,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return Timing(clock.first - began, time.perf_counter() - began)


@final
class OutsideContender(Contender):
    """A peer that runs in a process of its own."""

    def __init__(self, name: str, pipe: Pipe) -> None:
        self.name = name
        self._pipe = pipe

    def complete(self, prompts: Sequence[Sequence[int]], num_out: int) -> Timing:
        """See `Contender.complete`."""
        answer = self._pipe.ask(do="complete", prompts=[list(prompt) for prompt in prompts], num_out=num_out)
        return Timing(None, answer["seconds"])


class _Clock(StoppingCriteria):
    """Notes when the first token was there; stops nothing."""

    first = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self.first = self.first or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def tables(
    model: Any = "demo",
    *,
    workloads: Sequence[Workload] = WORKLOADS,
    prefix: Workload = PREFIX,
    strangers: Workload = STRANGERS,
    rounds: int = ROUNDS,
    pairs: int = PAIRS,
    everyone: bool = True,
) -> Iterator[Table]:
    """All four tables, as they are done. Ten minutes and more for the demo model and all peers.

    model: a name, or a transformers model.
    everyone: the engine with a compiled model and the peers outside, too, which take long to start.
    """
    prompts = _Prompts(model)
    with ExitStack() as stack:
        others, notes = _others(prompts, stack) if everyone else ([], [])
        with prompts.engine() as engine:
            ours = EngineContender(engine)
            contenders = (ours, GenerateContender(prompts.plain), *others)
            yield _speed(contenders, workloads, prompts, rounds, tuple(notes))
            yield _prefix(ours, prefix, prompts, rounds)
            yield _anatomy(engine, prompts)
    yield _overhead(strangers, prompts, pairs)


def _others(prompts: _Prompts, stack: ExitStack) -> tuple[list[Contender], list[str]]:
    """Who takes long to start: the engine with a compiled model, and the peers outside."""
    began = time.perf_counter()
    compiled = stack.enter_context(prompts.engine(deepcopy(prompts.plain), compile=True))
    note = f"compiled: Engine(compile=True), made in {time.perf_counter() - began:.0f} s"
    peers, notes = _peers(prompts, stack)
    return [EngineContender(compiled, "compiled"), *peers], [note, *notes]


def _peers(prompts: _Prompts, stack: ExitStack) -> tuple[list[Contender], list[str]]:
    """The peers that are here, started and with the model loaded, and notes about all."""
    peers: list[Contender] = []
    notes = []
    num_threads = torch.get_num_threads()
    folder = Path(stack.enter_context(TemporaryDirectory()))
    for name, load_request in ((VLLM, _load_vllm), (LLAMA, _load_llama)):
        try:
            pipe = Pipe({VLLM: "vllm", LLAMA: "llama"}[name], num_threads, stack)
            request = load_request(prompts, folder)
            seconds = pipe.ask(do="load", **request)["seconds"]
            notes.append(f"{name} {pipe.hello['version']}: started in {seconds:.0f} s")
            peers.append(OutsideContender(name, pipe))
        except RuntimeError as error:
            notes.append(f"{name} is absent: {error}")
    if any(peer.name == LLAMA for peer in peers):
        notes.append(f"{LLAMA} reads the file's Q4_K_M weights, and completes one prompt after the other")
    return peers, notes


def _load_vllm(prompts: _Prompts, folder: Path) -> dict[str, Any]:
    """Into a folder, which is what vLLM wants, the bf16 weights that the others have."""
    prompts.plain.save_pretrained(folder)
    return {"folder": str(folder), "num_tokens": MAX_LENGTH, "kv_gib": 1, "max_batch": MAX_BATCH_TOKENS}


def _load_llama(prompts: _Prompts, _: Path) -> dict[str, Any]:
    return {"file": prompts.source, "num_tokens": MAX_LENGTH, "max_batch": LLAMA_BATCH_TOKENS}


class _Prompts:
    """The model, once for the engine and once as transformers runs it, and random prompts for both."""

    def __init__(self, model: Any) -> None:
        self._loaded = load(model, dtype="bf16" if isinstance(model, str) else "auto")
        # The engine changes its model while it runs, so transformers gets one of its own.
        self.plain = load(model, dtype="bf16").model if isinstance(model, str) else deepcopy(self._loaded.model)
        self.model, self.source = self._loaded.model, self._loaded.source
        self._vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        self._random = np.random.default_rng(0)

    def engine(self, model: Any = None, *, prefix_cache: bool = True, compile: bool = False) -> Engine:
        engine = Engine(
            self.model if model is None else model,
            tokenizer=self._loaded.tokenizer,
            kv_bytes=KV_BYTES,
            max_batch_tokens=MAX_BATCH_TOKENS,
            prefix_cache=prefix_cache,
            compile=compile,
        )
        engine.generate([self.tokens(2)], max_tokens=1)  # makes the storage
        _write_pages(engine.cache)
        return engine

    def make(self, workload: Workload) -> list[list[int]]:
        shared = self.tokens(workload.num_shared)
        return [shared + self.tokens(workload.num_own) for _ in range(workload.num_requests)]

    def tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, self._vocabulary, count)]


def _write_pages(cache: Cache) -> None:
    """Write all memory of a pool once, contents as they are: what is new to a virtual machine comes slowly."""
    for member in cache.members if isinstance(cache, HybridCache) else (cache,):
        if isinstance(member, CausalCache):
            for layer in member.storage.layers:
                stored = member.storage.layer(layer)
                for part in (stored.keys, stored.values):
                    part.array.view(torch.uint8).bitwise_or_(0)


def _speed(
    contenders: Sequence[Contender],
    workloads: Sequence[Workload],
    prompts: _Prompts,
    rounds: int,
    notes: tuple[str, ...],
) -> Table:
    rows: list[tuple[Cell, ...]] = []
    lost: dict[str, str] = {}
    for workload in workloads:
        seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for number in range(rounds + 1):
            batch = prompts.make(workload)
            first = number % len(contenders)  # who comes after a process of another's finds the cores as it left them
            for contender in (*contenders[first:], *contenders[:first]):
                if contender.name in lost:
                    continue
                try:
                    timing = contender.complete(batch, workload.num_out)
                except RuntimeError as error:
                    if not isinstance(contender, OutsideContender):
                        raise
                    lost[contender.name] = f"{contender.name} was lost among {workload.name}: {error}"
                    continue
                if number:  # the first round warms up
                    seconds[contender.name].append(timing.total)
        ours = median(seconds[contenders[0].name])
        medians = {name: None if name in lost else median(values) for name, values in seconds.items()}
        num_out = workload.num_requests * workload.num_out
        rows.append(
            (
                workload.name,
                *medians.values(),
                num_out / ours,
                *(None if time is None else time / ours for time in list(medians.values())[1:]),
            )
        )
    names = [contender.name for contender in contenders]
    columns = (
        "requests",
        *(f"{name} [s]" for name in names),
        f"{names[0]} [tok/s]",
        *(f"{name} / {names[0]}" for name in names[1:]),
    )
    return Table("Requests until the last token (bf16, greedy)", columns, rows, (*notes, *lost.values()))


def _prefix(ours: Contender, workload: Workload, prompts: _Prompts, rounds: int) -> Table:
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(rounds):
        shared = prompts.tokens(workload.num_shared)
        for times in (cold, warm):
            timing = ours.complete([shared + prompts.tokens(workload.num_own)], 1)
            times.append(timing.total if timing.first is None else timing.first)
    once, again = median(cold), median(warm)
    return Table(
        f"First token of a prompt of {workload.num_shared} + {workload.num_own} tokens",
        ("cold [s]", "prefix cached [s]", "cold / cached"),
        [(once, again, once / again)],
    )


def _overhead(workload: Workload, prompts: _Prompts, pairs: int) -> Table:
    """Pairs of the same prompts with and without a prefix cache, in either order in turn."""
    ratios, times = [], []
    with ExitStack() as stack:
        engines = [stack.enter_context(prompts.engine(prefix_cache=on)) for on in (True, False)]
        both = [EngineContender(engine) for engine in engines]
        for number in range(pairs + 1):
            batch = prompts.make(workload)
            took = {}
            for index in (0, 1) if number % 2 else (1, 0):
                took[index] = both[index].complete(batch, workload.num_out).total
            if number:
                ratios.append(took[0] / took[1])
                times.append(took[0])
    return Table(
        f"Caching when nothing is found again: {workload.name}",
        ("with cache [s]", "with / without", "pairs"),
        [(median(times), median(ratios), pairs)],
    )


def _anatomy(engine: Engine, prompts: _Prompts) -> Table:
    """Decode steps with 1 and 8 sequences: what of a step is the model, and what its weights alone would take."""
    bandwidth = read_bandwidth()
    num_bytes = sum(
        weight.numel() * weight.element_size()
        for weight in {id(weight): weight for weight in prompts.model.parameters()}.values()
    )
    rows: list[tuple[Cell, ...]] = []
    for count in BATCHES:
        step, model, choice, rest = _steps(engine, prompts, count)
        weights = num_bytes / bandwidth
        rows.append((count, step * 1e3, model * 1e3, choice * 1e3, rest, weights * 1e3, weights / step))
    plain, fast = _products(prompts.plain)
    return Table(
        "Where a decode step goes",
        (
            "sequences",
            "step [ms]",
            "model [ms]",
            "choosing [ms]",
            "planning, hashing, bookkeeping, text / step",
            "weights at stream [ms]",
            "weights / step",
        ),
        rows,
        (
            f"stream limit {bandwidth / 1e9:.1f} GB/s; weights {num_bytes / 1e6:.0f} MB",
            f"all linear layers, one token: {plain * 1e3:.1f} ms by PyTorch, {fast * 1e3:.1f} ms in a runner",
        ),
    )


def _steps(engine: Engine, prompts: _Prompts, count: int) -> tuple[float, float, float, float]:
    """Medians of a decode step of `count` sequences: its seconds, its model's, choosing tokens', what share is left."""
    steps, models, choices, rests = [], [], [], []
    params = SamplingParams(max_tokens=ANATOMY_STEPS + 64, ignore_eos=True)
    waiting = {engine.add(Request(f"anatomy-{i}", prompts.tokens(64), params)) for i in range(count)}
    names = sorted(waiting)
    while waiting:
        waiting -= {event.request_id for event in engine.step()}
    for _ in range(ANATOMY_STEPS):
        began, before = time.perf_counter(), replace(engine.counts)
        engine.step()
        steps.append(time.perf_counter() - began)
        models.append(engine.counts.model_seconds - before.model_seconds)
        choices.append(engine.counts.choice_seconds - before.choice_seconds)
        rests.append((steps[-1] - models[-1] - choices[-1]) / steps[-1])
    for name in names:
        engine.abort(name)
    engine.step()
    return median(steps), median(models), median(choices), median(rests)


def _products(model: Any) -> tuple[float, float]:
    """Median seconds of one token through every linear layer, one after the other: PyTorch's, then the runner's."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = [torch.ones((1, 1, layer.in_features), dtype=layer.weight.dtype) for layer in layers]
    medians = []
    with torch.inference_mode():
        for is_fast in (False, True):
            fast = FastLinears(model) if is_fast else None
            times = []
            for _ in range(ANATOMY_STEPS):
                began = time.perf_counter()
                for layer, x in zip(layers, inputs, strict=True):
                    layer(x)
                times.append(time.perf_counter() - began)
            medians.append(median(times))
            if fast is not None:
                fast.close()
    return medians[0], medians[1]
