"""Decode steps as CUDA graphs: a step that the host would launch operator by operator is captured once and replayed.

    1st step of 3 sequences     rows padded to 4, run as it is, rehearsed as it will be captured (what must be compiled
                                and loaded is by then), and captured
    later steps of 3 or 4       tokens, positions, slots and plans are written where the graph reads them; replay

A graph repeats its launches with their addresses and sizes, so everything that differs between steps lies in memory
that stays: tokens, positions and slots in one tensor (one copy), plans in a `Planner`'s rooms (one copy for each member
of the cache). Rows are padded to a power of two, and contexts too: a graph serves all steps up to both. Sequences whose
slots are out of order have graphs of their own, because their positions take room. Rows of nobody see nothing and are
stored nowhere. Graphs share memory for all that happens within them, and those of as many rows their logits.

A model that cannot be captured (it waits for the device, as routing of some experts does) runs as before, and the log
says why; so does a size for which there is no memory. State of the evidence: captures and replays are tested on the
CPU, where a tape of all operators and launches stands in for the graph and the kernels run in Triton's interpreter. No
GPU was at hand.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO, final

import torch
from torch import Tensor

from kvcache import kernels
from kvcache.caches import CausalCache
from kvcache.kernels import Planner, Rooms
from kvcache.spec import Batch

__all__ = ["CAPTURES", "DecodeGraphs"]

MIN_SLOTS = 1024
"""Of a context that graphs are made for, at least; then powers of two."""

_log = logging.getLogger("kvcache")


class _Size(NamedTuple):
    """What a graph serves: rows, and contexts of at most `max_slots` slots in each member, in order or not."""

    num_rows: int
    max_slots: int
    are_irregular: tuple[bool, ...]


_Call = Callable[[], object]


@final
class _CudaCapture:
    """Rehearses and captures calls on a GPU, and gives what replays them.

    Graphs share a pool of memory, and for that a stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, call: _Call) -> _Call:
        _rehearse(call)
        graph = torch.cuda.CUDAGraph()
        failure: Exception | None = None
        try:
            # Its stream is entered here, too: a capture that fails leaves the thread on it. Nor do other threads, which
            # may allocate meanwhile, spoil it.
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
            ):
                try:
                    call()
                except Exception as error:
                    failure = error
                    raise
        except RuntimeError as error:  # of the end of a capture that has failed before, which does not say why
            raise failure or error from None
        return graph.replay


def _rehearse(call: _Call) -> None:
    """Call, which loads code that was not launched before. Raises `RuntimeError` if it waits for the device.

    A capture does neither, and one that fails once it has begun leaves PyTorch's allocator believing that it goes on
    (PyTorch's #180395 and #190348, mended in 2.13). The mode is the whole process's, so it warns, and only this
    thread's warnings count.
    """
    own, shown, waits = threading.get_ident(), warnings.showwarning, []

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if "called a synchronizing CUDA operation" not in str(message):
            shown(message, category, filename, lineno, file, line)
        elif threading.get_ident() == own:
            waits.append(f"{filename}:{lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    if waits:
        raise RuntimeError(f"the model waits for the device, at {waits[0]}")


CAPTURES: dict[str, Callable[[torch.device], Callable[[_Call], _Call]]] = {"cuda": _CudaCapture}
"""By type of device: what calls once and then captures there."""


@final
class _Step:
    """One graph and what it reads."""

    def __init__(self, size: _Size, num_members: int, device: torch.device) -> None:
        self.size = size
        self._inputs = torch.zeros((2 + num_members, size.num_rows), dtype=torch.int64, device=device)
        self.tokens, self.positions = self._inputs[0], self._inputs[1]
        self.slots = list(self._inputs[2:])
        self.rooms: list[Rooms] = []
        self.replay: _Call | None = None
        self.kept: object = None  # what the graph was captured with: its plans go when their batches do

    def fill(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[Any]) -> None:
        """The inputs of the next replay, in one copy."""
        host = torch.zeros(self._inputs.shape, dtype=torch.int64, pin_memory=self._inputs.is_cuda)
        numbers = host.numpy()
        numbers[0, : len(tokens)], numbers[1, : len(tokens)] = tokens, positions
        for row, own in zip(numbers[2:], slots, strict=True):
            row[:] = own
        self._inputs.copy_(host, non_blocking=True)


@final
class DecodeGraphs:
    """The graphs of a model over `members`. call: the model on tokens [T] and positions [T]; logits [T, vocabulary]."""

    def __init__(
        self, members: Sequence[CausalCache], device: torch.device, call: Callable[[Batch, Tensor, Tensor], Tensor]
    ) -> None:
        self._members = members
        self._device = device
        self._call = call
        self._steps: dict[_Size, _Step] = {}
        self._logits: dict[int, Tensor] = {}  # by rows: replays write there
        self._too_large: set[_Size] = set()
        self._capture = CAPTURES[device.type](device)
        self._refusal: str | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def run(self, batch: Batch, tokens: Sequence[int]) -> Tensor | None:
        """Logits [T, vocabulary] of one token for each of T sequences, on which the members have started their pass.

        `None`, and nothing has changed, when the model cannot be captured or another kernel reads the cache.
        """
        planner, size = self._planner(), self._size(batch)
        if planner is None or size in self._too_large:
            return None
        step = self._steps.get(size) or _Step(size, len(self._members), self._device)
        padded = [
            member.pad_forward(size.num_rows, slots) for member, slots in zip(self._members, step.slots, strict=True)
        ]
        step.fill(tokens, batch.positions, [each.slots for each in padded])
        passes = [each.attention for each in padded]
        if step.replay is None:
            logits = self._call(batch, step.tokens, step.positions)
            self._make(planner, step, batch, passes, logits)
            return logits[: len(tokens)]
        _replan(planner, step, passes)
        step.replay()
        return self._logits[size.num_rows][: len(tokens)].clone()

    def _planner(self) -> Planner | None:
        """The kernel that reads and writes all members, if it plans for graphs and the model can be captured."""
        if self._refusal is not None:
            return None
        found: set[object] = set()
        for member in self._members:
            layer = next(iter(member.storage.layers), None)
            if layer is None:
                return None  # nothing was ever put
            stored = member.storage.layer(layer)
            found.add(kernels.writer((stored.keys, stored.values)))
        planner = found.pop() if len(found) == 1 else None
        return planner if isinstance(planner, Planner) else None

    def _size(self, batch: Batch) -> _Size:
        tables = [[member.tables.sequences[sequence] for sequence in batch.sequences] for member in self._members]
        longest = max(table.num_slots for own in tables for table in own)
        return _Size(
            1 << (len(batch) - 1).bit_length(),
            max(MIN_SLOTS, 1 << (longest - 1).bit_length()),
            tuple(not all(table.is_dense for table in own) for own in tables),
        )

    def _make(
        self, planner: Planner, step: _Step, batch: Batch, passes: Sequence[kernels.AttentionBatch], logits: Tensor
    ) -> None:
        """Capture the step that has just run and given `logits`, or say why not."""
        try:
            step.rooms = [planner.rooms(each, step.size.max_slots) for each in passes]
            _replan(planner, step, passes)
            if step.size.num_rows not in self._logits:
                self._logits[step.size.num_rows] = torch.empty_like(logits)
            kept = self._logits[step.size.num_rows]
            step.replay = self._capture(lambda: kept.copy_(self._call(batch, step.tokens, step.positions)))
        except RuntimeError as error:
            if _is_of_memory(error):
                self._too_large.add(step.size)
                _log.warning("there is no memory to capture decode steps of %s; they run uncaptured", step.size)
            else:
                self._refusal = str(error).splitlines()[0]
                _log.warning("decode steps are not captured in CUDA graphs: %s", self._refusal)
        else:
            step.kept = (batch, passes)
            self._steps[step.size] = step


def _is_of_memory(error: RuntimeError) -> bool:
    """PyTorch's allocator has a type for it; CUDA and cuBLAS, which allocate for themselves, only say so."""
    says = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in says or "alloc_failed" in says


def _replan(planner: Planner, step: _Step, passes: Sequence[kernels.AttentionBatch]) -> None:
    for attention, rooms in zip(passes, step.rooms, strict=True):
        planner.replan(attention, rooms)
