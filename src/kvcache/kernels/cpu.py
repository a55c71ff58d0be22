"""Attention over paged storage on the CPU, in C++ that is compiled for this very machine; and writing into the storage.

What happens is in C++: read `cpp/attend.h` first. Here an `AttentionBatch` becomes flat integer tensors, once for all
layers of a pass, and what the operators refuse is explained. `cpu_build.py` compiles.

Arithmetic follows the queries: f32 and f16 queries are computed in f32 throughout; bf16 queries use bf16 products with
f32 sums where the CPU has them and the format is exact in bf16 (bf16, fp8_e4m3, and the integers of q8_0 and q4_0; AMX
rounds what values of these are worth to bf16, where a head has more than eight rows).
A decoding sequence gives the same bits whatever other sequences and however many threads there are, with up to 32 query
heads to a key/value head.

| bytes that must move            | per call                                                          |
|---------------------------------|-------------------------------------------------------------------|
| attention                       | the visible rows of keys and values, once per (128 and more) rows |
| put                             | the new rows, once read and once written                          |
| shift                           | the stored rows, once read and once written                       |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.formats import GROUP_SIZE, Stored
from kvcache.kernels import AttentionBatch, Kernel, Rotation, Segment, Writer, queries_per_head
from kvcache.kernels.cpu_build import build, is_loaded, operators
from kvcache.spec import Array

__all__ = ["CpuKernel", "build", "refusal_of"]

TILE = 64  # slots that the C++ decodes at a time: positions are padded to whole tiles. The same in `cpp/ahead.h`.
MAX_DIM = 1024  # of a head; the same in `cpp/pack.h`

_FORMATS = {"f32": 0, "f16": 1, "bf16": 2, "fp8_e4m3": 3, "q8_0": 4, "q4_0": 5}
# What `head_dim` must be a multiple of: rows are read in units of 32 bits, or in groups with one scale.
_MULTIPLES = {"f32": 1, "f16": 2, "bf16": 2, "fp8_e4m3": 4, "q8_0": GROUP_SIZE, "q4_0": GROUP_SIZE}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal_of(what: str, stored: Stored) -> str | None:
    """Why the kernel cannot read or write this storage (`what` names it); `None` when it can. Compiles nothing."""
    array, multiple = stored.array, _MULTIPLES[stored.format.name]
    if not isinstance(array, Tensor) or not array.is_cpu:
        return f"it reads torch tensors on the CPU and the {what} are elsewhere"
    if stored.head_dim % multiple or stored.head_dim > MAX_DIM or array.stride(3) != 1:
        return (
            f"it reads rows of adjacent values, at most {MAX_DIM} and a multiple of {multiple} in "
            f"{stored.format.name}, and the {what} have heads of {stored.head_dim}"
        )
    width, expected = array.shape[3], stored.format.row_width(stored.head_dim)
    if width != expected:
        return (
            f"the {what} are stored in rows of {width}; heads of {stored.head_dim} in {stored.format.name} "
            f"have {expected}"
        )
    return None


@final
class CpuKernel(Kernel, Writer):
    """Attention in C++ over blocks in place; CPU tensors of PyTorch, every format, queries f32, f16 or bf16."""

    name = "cpu"

    def refusal(self, queries: Array, keys: Stored, values: Stored) -> str | None:
        """Why these arrays cannot be read. The first call that finds nothing else to object compiles the kernel."""
        if not isinstance(queries, Tensor) or queries.dtype not in _DTYPES:
            return (
                f"it takes torch queries of f32, f16 or bf16, not {getattr(queries, 'dtype', type(queries).__name__)}"
            )
        refused = refusal_of("keys", keys) or refusal_of("values", values)
        if refused is not None:
            return refused
        library = operators()
        return library if isinstance(library, str) else None

    def attend(
        self,
        queries: Array,
        keys: Stored,
        values: Stored,
        batch: AttentionBatch,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """See `Kernel.attend`. Cost: one pass over the visible rows, at the speed of memory when queries are few."""
        plan: _Plan | None = batch.plans.get(self)
        if plan is None:
            plan = batch.plans[self] = _plan(batch)
        try:
            out: Tensor = plan.attend(
                queries if queries.is_cpu else queries.cpu(),
                keys.array,
                values.array,
                _FORMATS[keys.format.name],
                _FORMATS[values.format.name],
                values.head_dim,
                plan.tensors,
                plan.num_blocks,
                batch.block_size,
                scale,
                softcap,
                None if sinks is None else sinks.to(device="cpu", dtype=torch.float32).contiguous(),
            )
        except (ValueError, NotImplementedError):  # what is on another device is a NotImplementedError
            queries_per_head(queries, keys, values, sinks, softcap)
            self._explain(queries, keys, values, batch, plan)
        return out if queries.is_cpu else out.to(queries.device)

    def _explain(self, queries: Tensor, keys: Stored, values: Stored, batch: AttentionBatch, plan: _Plan) -> NoReturn:
        """Raise `ValueError` that says what does not fit, of what the operator has refused.

        It looks first and this comes after: between operators that read hundreds of megabytes nothing of Python is in
        the caches, and checks in Python took 25 µs of each call.
        """
        _refuse(self.refusal(queries, keys, values))
        shapes = keys.array.shape, values.array.shape
        num_blocks, sizes = min(shapes[0][0], shapes[1][0]), {shapes[0][2], shapes[1][2]}
        raise ValueError(
            f"the batch has {plan.num_rows} queries and names blocks of {batch.block_size} up to "
            f"{plan.num_blocks - 1}; there are {len(queries)} queries and {num_blocks} blocks of {sizes}"
        )

    def writes(self, storage: Sequence[Stored], rows: Sequence[Array] = ()) -> bool:
        """See `Writer.writes`."""
        return (
            is_loaded()
            and all(array.dtype in _DTYPES for array in rows)
            and all(refusal_of("arrays", stored) is None for stored in storage)
        )

    def put(self, keys: Stored, values: Stored, slots: NDArray[np.int64], new_keys: Array, new_values: Array) -> None:
        """See `Writer.put`; bit for bit what formats' `encode` gives. Rows of f32, f16 or bf16.

        Raises `ValueError` when shapes do not fit, for slots outside the storage, and where there is no kernel.
        """
        try:
            _operators().put(
                keys.array,
                values.array,
                _FORMATS[keys.format.name],
                _FORMATS[values.format.name],
                torch.from_numpy(np.ascontiguousarray(slots, np.int64)),
                new_keys,
                new_values,
            )
        except (ValueError, RuntimeError):  # what is no tensor, or on another device, is a RuntimeError
            _explain_put(keys, values, slots, new_keys, new_values)
            raise

    def shift(self, keys: Stored, slots: NDArray[np.int64], offsets: NDArray[np.int64], rotation: Rotation) -> None:
        """See `Writer.shift`: decoded, turned in f32, encoded. An offset of 0 leaves a row's bytes alone.

        Raises `ValueError` when lengths do not fit, for slots outside the storage, and where there is no kernel.
        """
        num_values = 2 * len(rotation.inv_freq)
        if len(slots) != len(offsets) or rotation.rotary_begin + num_values > keys.head_dim:
            raise ValueError(
                f"shift got {len(slots)} slots, {len(offsets)} offsets and {len(rotation.inv_freq)} frequencies from "
                f"value {rotation.rotary_begin} on for heads of {keys.head_dim}; expected as many offsets as slots, "
                f"and two values for each frequency"
            )
        _written(keys).shift(
            keys.array,
            _FORMATS[keys.format.name],
            keys.head_dim,
            torch.from_numpy(np.ascontiguousarray(slots, np.int64)),
            torch.from_numpy(np.ascontiguousarray(offsets, np.int64)),
            torch.from_numpy(np.ascontiguousarray(rotation.inv_freq, np.float64)),
            rotation.rotary_begin,
            rotation.interleaved,
        )


def _explain_put(keys: Stored, values: Stored, slots: NDArray[np.int64], new_keys: Tensor, new_values: Tensor) -> None:
    """Raise `ValueError` that says what does not fit, if that is more than the operator has said."""
    if keys.array.shape[:3] != values.array.shape[:3]:
        raise ValueError(
            f"keys are stored as {tuple(keys.array.shape)} and values as {tuple(values.array.shape)}; expected the "
            f"same blocks, heads and block size"
        )
    if slots.ndim != 1:
        raise ValueError(f"slots have shape {slots.shape}; expected one for each row, [n]")
    given: tuple[tuple[str, Stored, Any], ...] = (("keys", keys, new_keys), ("values", values, new_values))
    for what, stored, rows in given:
        expected = (len(slots), stored.array.shape[1], stored.head_dim)
        where = str(rows.device if isinstance(rows, Tensor) else type(rows).__module__)
        if where != "cpu" or rows.dtype not in _DTYPES or tuple(rows.shape) != expected:
            seen = f"{rows.dtype} {tuple(rows.shape)}" + (f" ({where})" if where != "cpu" else "")
            raise ValueError(f"new {what} are {seen}; expected f32, f16 or bf16 {expected}, tensors on the CPU")
    _written(keys, values)


def _written(*storage: Stored) -> Any:
    """The operators, for storage that they can write."""
    for stored in storage:
        _refuse(refusal_of("arrays", stored))
    return _operators()


def _operators() -> Any:
    found = operators()
    _refuse(found if isinstance(found, str) else None)
    return found


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"the CPU kernel refuses: {reason}")


# --- the plan ---------------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """A batch as `cpu.cpp` takes it: one row per segment, and flat int32 arrays into which the rows point."""

    attend: Any  # the operator
    tensors: list[Tensor]
    num_blocks: int  # that the storage must have
    num_rows: int


def _plan(batch: AttentionBatch) -> _Plan:
    table: list[list[int]] = []
    blocks: list[NDArray[np.int32]] = []
    rows: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int32]] = []
    bounds: list[NDArray[np.int32]] = []
    num_blocks = num_rows = num_padded = 0
    for segment in batch.segments:
        at = -1 if segment.positions is None else num_padded
        table.append([num_blocks, segment.num_slots, segment.first_position, at, num_rows, len(segment.rows)])
        needed = -(-segment.num_slots // batch.block_size)
        named, own = segment.block_table[:needed], segment.rows
        if (
            len(named) < needed
            or (needed and named.min() < 0)
            or (len(own) and (own.min() < 0 or own.max() >= len(batch.query_ends)))
        ):
            raise ValueError(
                f"a segment of {segment.num_slots} slots has the blocks {segment.block_table} of {batch.block_size}, "
                f"and rows {own} of {len(batch.query_ends)}; expected {needed} blocks and rows of the batch"
            )
        blocks.append(named)
        num_blocks += needed
        rows.append(_ordered(segment.rows, batch))
        num_rows += len(segment.rows)
        if segment.positions is not None:
            positions.append(_padded(segment))
            bounds.append(_bounds(positions[-1]))
            num_padded += len(positions[-1])
    ends = [
        *map(_joined, (blocks, rows, positions, bounds)),
        _joined([batch.query_begins]),
        _joined([batch.query_ends]),
    ]
    highest = max((int(ids.max()) for ids in blocks if len(ids)), default=-1)
    tensors = [torch.tensor(table, dtype=torch.int64, device="cpu").reshape(-1, 6), *ends]
    return _Plan(operators().attend, tensors, highest + 1, len(batch.query_begins))


def _padded(segment: Segment) -> NDArray[np.int32]:
    assert segment.positions is not None
    padded = np.full(-(-segment.num_slots // TILE) * TILE, -1, np.int32)
    padded[: segment.num_slots] = segment.positions[: segment.num_slots]
    return padded


def _bounds(positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """The lowest and the highest position of each tile: tiles that nobody sees are skipped by them."""
    tiles = positions.reshape(-1, TILE)
    lowest = np.where(tiles < 0, np.iinfo(np.int32).max, tiles).min(1)
    return np.stack([lowest, tiles.max(1)], 1).astype(np.int32).reshape(-1)


def _ordered(rows: NDArray[np.int64], batch: AttentionBatch) -> NDArray[np.int32]:
    """Rows by what they see, so that neighbours see the same tiles."""
    ends = batch.query_ends[rows]
    if len(rows) > 1 and (ends[1:] < ends[:-1]).any():
        rows = rows[np.lexsort((batch.query_begins[rows], ends))]
    return rows.astype(np.int32)


def _joined(parts: list[NDArray[np.int32]]) -> Tensor:
    if not parts:
        return torch.empty(0, dtype=torch.int32, device="cpu")
    joined = np.concatenate(parts) if len(parts) > 1 else parts[0].copy()
    return torch.from_numpy(np.ascontiguousarray(joined, dtype=np.int32))
