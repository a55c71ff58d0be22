"""Attention over paged storage on a GPU, in Triton; and writing into the storage.

What happens on the device is in `triton_jit.py`, how a batch becomes work in `triton_plan.py`; here arrays are checked,
sizes chosen, and launches made.

| what moves through memory          | per call                                                                        |
|------------------------------------|---------------------------------------------------------------------------------|
| attention                          | the visible rows of keys and values, once per tile of rows, as they are stored  |
| split contexts (decode)            | one f32 row per part of at least 256 slots and query head, written and read     |
| put, shift                         | the rows, once read and once written                                            |

Products are made in the queries' element type with f32 sums, where that holds what is stored (f16 and bf16 queries on
their own type and on the quantised ones); else, and for f32 queries, in f32 (IEEE, not TF32).

State of the evidence. Results, plans and replays are tested through Triton's interpreter on the CPU. The launches are
compiled, PTX and machine code, for sm_80, sm_86 and sm_90 (`tests/triton_compile.py`): they fit each one's shared
memory, products are on tensor cores (`wgmma` in Hopper's prefill), keys and values come by asynchronous copies.
Registers that are spilled, in bytes per thread: f16 and bf16 queries at most 32 in decode and 128 in prefill, but up to
710 in a prefill over coded rows of 64 and 128 values before sm_90; f32 queries on coded rows 200 to 900, and mostly
kilobytes from 256 values on: slow. No GPU was at hand: nothing here has run on one, no time was measured, and sizes are
by what is known of such kernels.

More than 300 lines, because the docstrings say what cannot be tried here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.formats import Stored
from kvcache.kernels import AttentionBatch, Kernel, Planner, Rooms, Rotation, Writer, queries_per_head
from kvcache.kernels.triton_plan import ITEM, MERGE, Geometry, Plan, Room, Tiling, decode_sizes, plan
from kvcache.spec import Array

__all__ = ["TritonKernel", "geometry_of", "launch"]

# Triton reads it when a kernel is defined; so it counts as it was then.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_DIM = 512  # of a head: above, one tile of queries and results does not fit the registers
_NATIVE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# Element types of a product that lose nothing, or no more than rounding once, of what is stored.
_NARROW = {"f16": ("f16", "fp8_e4m3", "q8_0", "q4_0"), "bf16": ("bf16", "fp8_e4m3", "q8_0", "q4_0")}


@final
class TritonKernel(Kernel, Planner, Writer):
    """Attention in Triton over blocks in place; CUDA tensors of PyTorch, every format, queries f32, f16 or bf16.

    In a CUDA graph, as `hf/graphs.py` captures decode steps (`attend` alone is for passes that are not captured):

        model(...)                                            # once outside: it compiles, and tells the layers' shapes
        rooms = kernel.rooms(batch, max_slots=8192)           # for each member of the cache
        kernel.replan(batch, rooms)                           # before the capture, and again before every replay
        with torch.cuda.graph(graph): model(...)              # its `attend` finds the plan and only launches
        graph.replay()

    - `replan` writes the pass into the rooms: one copy each from pinned memory, on the current stream, which must be
      the one that replays. Between two plans into one room lies the replay of the first.
    - The captured `attend` must be given the very batch that was planned last, and keep it alive; later passes have
      other batches and the same room, so the grids and pointers in the graph stay true. Members of a cache with spans
      of their own have batches, and rooms, of their own.
    - The number of rows is that of the captured queries. A pass with fewer sequences fills the others up with segments
      of no slots, one for each row left: those rows become zeros.
    - Queries, the storage and `sinks` (f32) must be at the addresses that they had, which is what a graph's static
      inputs are.
    - Intermediate results come from PyTorch's allocator, in a capture from the graph's own pool.
    """

    name = "triton"

    def refusal(self, queries: Array, keys: Stored, values: Stored) -> str | None:
        """Why these arrays cannot be read. Triton is imported only when nothing else is to object."""
        if not isinstance(queries, Tensor) or queries.dtype not in _NATIVE:
            return (
                f"it takes torch queries of f32, f16 or bf16, not {getattr(queries, 'dtype', type(queries).__name__)}"
            )
        for what, stored in (("keys", keys), ("values", values)):
            refused = _refusal_of(what, stored, queries.device)
            if refused is not None:
                return refused
        library = _library()
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
        """See `Kernel.attend`. Cost: one pass over the visible rows per 16 (decode) to 128 (prefill) queries."""
        queries_per_head(queries, keys, values, sinks, softcap)
        geometry = geometry_of(queries, keys, values)
        found = self._plans(batch).get((queries.device, geometry))
        if found is None:
            if queries.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError("this batch was not planned; call TritonKernel.replan for it before capturing a graph")
            found = self.plan(batch, queries.device, geometry)
        _fit(found, queries, keys, values)
        shape = (*queries.shape[:2], values.head_dim)
        out = queries.new_empty(shape) if found.num_written == found.num_rows else queries.new_zeros(shape)
        launch(found, queries, keys, values, out, scale=scale, softcap=softcap, sinks=sinks)
        return out

    def plan(self, batch: AttentionBatch, device: torch.device, geometry: Geometry, room: Room | None = None) -> Plan:
        """The work of a batch on the device, which `attend` of that batch uses from now on; in `room` if given.

        Cost: about 10 µs per segment and one copy; no wait. Raises `ValueError` when it does not fit the room.
        """
        made = plan(batch, geometry, device, room)
        self._plans(batch)[device, geometry] = made
        return made

    def _plans(self, batch: AttentionBatch) -> dict[tuple[torch.device, Geometry], Plan]:
        found: dict[tuple[torch.device, Geometry], Plan] = batch.plans.setdefault(self, {})
        return found

    def rooms(self, batch: AttentionBatch, max_slots: int) -> Rooms:
        """See `Planner.rooms`; by device and geometry."""
        count, is_irregular = len(batch.query_ends), any(s.positions is not None for s in batch.segments)
        return {
            (device, geometry): Room(
                decode_sizes(geometry, batch.block_size, count, max_slots, is_irregular=is_irregular), device
            )
            for device, geometry in self._plans(batch)
        }

    def replan(self, batch: AttentionBatch, rooms: Rooms) -> None:
        """See `Planner.replan`."""
        for (device, geometry), room in rooms.items():
            self.plan(batch, device, geometry, room)

    def writes(self, storage: Sequence[Stored], rows: Sequence[Array] = ()) -> bool:
        """See `Writer.writes`."""
        if not _INTERPRETED and not getattr(storage[0].array, "is_cuda", False):
            return False  # asked before every put on the CPU, too
        return (
            all(isinstance(array, Tensor) and array.dtype in _NATIVE for array in rows)
            and all(
                isinstance(stored.array, Tensor) and _refusal_of("arrays", stored, stored.array.device) is None
                for stored in storage
            )
            and not isinstance(_library(), str)
        )

    def put(
        self,
        keys: Stored,
        values: Stored,
        slots: NDArray[np.int64] | Tensor,
        new_keys: Array,
        new_values: Array,
    ) -> None:
        """See `Writer.put`: a copy of the slots and one launch, bit for bit what formats' `encode` gives.

        Rows of f32, f16 or bf16. A negative slot is skipped. Slots that are int64 on the device already can be in a
        CUDA graph; they are not checked then. Raises `ValueError` when shapes do not fit, for slots outside the
        storage, and for arrays that the kernel refuses.
        """
        for what, stored, rows in (("keys", keys, new_keys), ("values", values, new_values)):
            expected = (len(slots), stored.array.shape[1], stored.head_dim)
            if tuple(rows.shape) != expected or rows.dtype not in _NATIVE:
                seen = f"{rows.dtype} {tuple(rows.shape)}"
                raise ValueError(f"new {what} are {seen}; expected f32, f16 or bf16 {expected}")
        device_slots = _slots(slots, keys, values)
        if not len(slots):
            return
        device = keys.array.device
        new_keys, new_values = (
            (rows if rows.stride(2) == 1 else rows.contiguous()).to(device) for rows in (new_keys, new_values)
        )
        with torch.cuda.device_of(new_keys):
            _device_code().put_rows[len(slots), keys.array.shape[1]](
                *(keys.array, values.array, new_keys, new_values, device_slots),
                *(*new_keys.stride()[:2], *new_values.stride()[:2]),
                D=keys.head_dim,
                DV=values.head_dim,
                BLOCK_D=_width(keys.head_dim),
                BLOCK_DV=_width(values.head_dim),
                BLOCK_SIZE=keys.array.shape[2],
                **_strides("K", keys),
                **_strides("V", values),
                K_FORMAT=keys.format.name,
                V_FORMAT=values.format.name,
                num_warps=1,
                enable_fp_fusion=False,  # a fused multiply-add rounds once where the formats' definition rounds twice
            )

    def shift(self, keys: Stored, slots: NDArray[np.int64], offsets: NDArray[np.int64], rotation: Rotation) -> None:
        """See `Writer.shift`: one launch; decoded, turned in f32, encoded. An offset of 0 leaves a row's bytes alone.

        Raises `ValueError` when lengths do not fit, for slots outside the storage, and for arrays that the kernel
        refuses.
        """
        num_pairs = len(rotation.inv_freq)
        if len(slots) != len(offsets) or rotation.rotary_begin + 2 * num_pairs > keys.head_dim:
            raise ValueError(
                f"shift got {len(slots)} slots, {len(offsets)} offsets and {num_pairs} frequencies from value "
                f"{rotation.rotary_begin} on for heads of {keys.head_dim}; expected as many offsets as slots, and two "
                f"values for each frequency"
            )
        device_slots, device = _slots(slots, keys), keys.array.device
        if len(slots) and slots.min() < 0:
            raise ValueError(f"slots reach down to {slots.min()}; expected slots of the storage")
        if not len(slots) or not num_pairs:
            return
        distinct, turns = np.unique(offsets, return_inverse=True)  # one, nearly always: a removal moves all rows alike
        angles = distinct[:, None] * rotation.inv_freq
        lines = np.where(offsets == 0, -1, turns.reshape(-1)).astype(np.int64)
        with torch.cuda.device_of(keys.array):
            _device_code().shift_rows[len(slots), keys.array.shape[1]](
                *(keys.array, device_slots, torch.from_numpy(lines).to(device)),
                *(torch.from_numpy(turn(angles).astype(np.float32)).to(device) for turn in (np.cos, np.sin)),
                D=keys.head_dim,
                BLOCK_D=_width(keys.head_dim),
                BLOCK_SIZE=keys.array.shape[2],
                **_strides("K", keys),
                K_FORMAT=keys.format.name,
                FIRST=rotation.rotary_begin,
                PAIRS=num_pairs,
                INTERLEAVED=rotation.interleaved,
                num_warps=1,
                enable_fp_fusion=False,
            )


def _slots(slots: NDArray[np.int64] | Tensor, *storage: Stored) -> Tensor:
    """Slots on the storage's device, after checking that they are in it and that the kernel writes there."""
    for stored in storage:
        refused = _refusal_of("arrays", stored, storage[0].array.device)
        if refused is not None:
            raise ValueError(f"the Triton kernel refuses: {refused}")
    if isinstance(slots, Tensor):
        return slots
    num_slots = min(len(stored.array) * stored.array.shape[2] for stored in storage)
    if len(slots) and slots.max() >= num_slots:
        raise ValueError(f"slots reach {slots.max()}; expected slots below {num_slots}")
    return torch.from_numpy(np.ascontiguousarray(slots, np.int64)).to(storage[0].array.device, non_blocking=True)


def _refusal_of(what: str, stored: Stored, device: torch.device) -> str | None:
    """Why this storage cannot be read or written by programs on `device`; imports nothing."""
    array = stored.array
    if not isinstance(array, Tensor) or array.device != device:
        return f"it reads torch tensors on the device of the queries, {device}, and the {what} are elsewhere"
    if not array.is_cuda and not _INTERPRETED:
        return (
            "it reads CUDA tensors, and these are on another device; to try it all the same, set TRITON_INTERPRET=1 "
            "before Python starts, and KVCACHE_KERNEL=triton"
        )
    if _INTERPRETED and os.environ.get("KVCACHE_KERNEL") != "triton":
        return "TRITON_INTERPRET=1 makes it very slow, for tests; KVCACHE_KERNEL=triton takes it all the same"
    if array.is_cuda and torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs a GPU of compute capability 8.0, and {device} has {torch.cuda.get_device_capability(device)}"
    if stored.head_dim > MAX_DIM or array.stride(3) != 1:
        return (
            f"it reads rows of adjacent values, at most {MAX_DIM}, and the {what} have heads of {stored.head_dim} "
            f"with strides {array.stride()}"
        )
    return None


@cache
def _library() -> ModuleType | str:
    """The module of the device code, or why there is none."""
    try:
        from kvcache.kernels import triton_jit
    except ImportError as error:
        return f"Triton cannot be imported ({error}); pip install 'kvcache[triton]'"
    return triton_jit


def _device_code() -> Any:
    library = _library()
    if isinstance(library, str):
        raise ValueError(f"the Triton kernel refuses: {library}")
    return library


def _fit(found: Plan, queries: Tensor, keys: Stored, values: Stored) -> None:
    num_blocks, sizes = min(len(keys.array), len(values.array)), {keys.array.shape[2], values.array.shape[2]}
    if found.num_blocks > num_blocks or found.num_rows != len(queries) or sizes != {found.block_size}:
        raise ValueError(
            f"the batch has {found.num_rows} queries and names blocks of {found.block_size} up to "
            f"{found.num_blocks - 1}; there are {len(queries)} queries and {num_blocks} blocks of {sizes}"
        )


# --- sizes ------------------------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """What a kernel is compiled for, beside the formats. k_dot, v_dot: element types of the two products."""

    geometry: Geometry
    k_dot: str
    v_dot: str
    block_d: int
    block_dv: int


def geometry_of(queries: Tensor, keys: Stored, values: Stored) -> Geometry:
    """How batches are planned for these arrays; layers with equal shapes and formats share plans."""
    return _sizes_of(queries, keys, values).geometry


def _sizes_of(queries: Tensor, keys: Stored, values: Stored) -> _Sizes:
    num_heads = keys.array.shape[1]
    return _sizes(
        _NATIVE[queries.dtype],
        (keys.format.name, values.format.name),
        (keys.head_dim, values.head_dim),
        num_heads,
        queries.shape[1] // num_heads,
        _shared_memory(queries.device),
    )


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have, as Triton checks them; Hopper's where there is no GPU."""
    if device.type != "cuda":
        return 227 << 10
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


@lru_cache(maxsize=256)
def _sizes(
    dtype: str, formats: tuple[str, str], dims: tuple[int, int], num_heads: int, group: int, shared_memory: int
) -> _Sizes:
    narrow = _NARROW.get(dtype, ())
    k_dot, v_dot = (dtype if name in narrow else "f32" for name in formats)
    block_d, block_dv = (_width(dim) for dim in dims)
    is_f32, widest = "f32" in (k_dot, v_dot), max(block_d, block_dv)
    num_bytes = 4 if is_f32 else 2
    # Queries at a time in prefill: their results, [M,Dv] of f32, stay in registers. Products of f32 (IEEE) have no
    # tensor cores, and hold whole rows of both operands in registers too.
    block_m = (32 if widest <= 64 else 16) if is_f32 else {256: 64, 512: 32}.get(widest, 128)
    # Slots at a time: 32 KiB of keys and values (64 in f32), so that several programs share a multiprocessor.
    row_bytes = (block_d + block_dv) * num_bytes
    block_n = min(128, max(16, (16 << 10) * num_bytes // row_bytes))
    block_n = 1 << (block_n.bit_length() - 1)
    chunk = min(group, block_m)
    decode_m = max(16, 1 << (chunk - 1).bit_length())

    def tiling(m: int, most_stages: int) -> Tiling:
        # Two stages hold one buffer of keys and values: their addresses come out of the block table, a stage earlier.
        spare = shared_memory - m * widest * num_bytes - (8 << 10)
        stages = max(1, min(most_stages, 1 + 2 * (spare // (block_n * row_bytes))))
        return Tiling(m, block_n, 8 if is_f32 or m >= 128 or m * block_dv >= 64 * 256 else 4, stages)

    geometry = Geometry(chunk, num_heads * -(-group // chunk), tiling(decode_m, 5), tiling(block_m, 3))
    return _Sizes(geometry, k_dot, v_dot, block_d, block_dv)


def _native_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


# --- launches ---------------------------------------------------------------------------------------------------------


def launch(
    plan: Plan,
    queries: Tensor,
    keys: Stored,
    values: Stored,
    out: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attention of a plan into `out` [T,Hq,Dv], contiguous: up to three launches, and nothing that waits for the GPU.

    Grids, pointers and numbers depend on the plan's room and on the arrays alone: it can be captured in a CUDA graph.
    """
    sizes, library = _sizes_of(queries, keys, values), _device_code()
    rows = queries if queries.stride(2) == 1 else queries.contiguous()
    group = queries.shape[1] // keys.array.shape[1]
    sink = out if sinks is None else sinks.to(device=out.device, dtype=torch.float32).contiguous()
    num_results = plan.num_partials * queries.shape[1]
    partials = out.new_empty(max(num_results * values.head_dim, 1), dtype=torch.float32)
    statistics = out.new_empty(max(num_results * 2, 1), dtype=torch.float32)
    with torch.cuda.device_of(out):
        for items, tiling in ((plan.decode, sizes.geometry.decode), (plan.prefill, sizes.geometry.prefill)):
            if not len(items):
                continue
            library.attend_items[len(items), sizes.geometry.num_programs](
                *(rows, keys.array, values.array, out, sink, partials, statistics),
                *(items, plan.rows, plan.begins, plan.ends, plan.tables, plan.positions),
                *(*rows.stride()[:2], scale, 1.0 if softcap is None else softcap),
                GROUP=group,
                CHUNK=sizes.geometry.chunk,
                NUM_HEADS=keys.array.shape[1],
                D=keys.head_dim,
                DV=values.head_dim,
                BLOCK_M=tiling.block_m,
                BLOCK_N=tiling.block_n,
                BLOCK_D=sizes.block_d,
                BLOCK_DV=sizes.block_dv,
                BLOCK_SIZE=plan.block_size,
                **_strides("K", keys),
                **_strides("V", values),
                K_FORMAT=keys.format.name,
                V_FORMAT=values.format.name,
                K_DOT=_element_type(library, sizes.k_dot),
                V_DOT=_element_type(library, sizes.v_dot),
                HAS_SOFTCAP=softcap is not None,
                HAS_SINKS=sinks is not None,
                NATIVE_FP8=_native_fp8(out.device),
                ITEM=ITEM,
                num_warps=tiling.num_warps,
                num_stages=tiling.num_stages,
            )
        if len(plan.merges):
            library.merge_items[len(plan.merges), queries.shape[1]](
                *(out, sink, partials, statistics, plan.merges),
                NUM_QUERY_HEADS=queries.shape[1],
                DV=values.head_dim,
                BLOCK_DV=sizes.block_dv,
                BLOCK_S=max(4, min(32, 4096 // sizes.block_dv)),
                V_FORMAT=values.format.name,
                HAS_SINKS=sinks is not None,
                MERGE=MERGE,
                num_warps=4,
            )


def _strides(letter: str, stored: Stored) -> dict[str, int]:
    """Stored elements from one block, head and slot to the next, as the kernels' parameters."""
    names = (f"{letter}_BLOCK", f"{letter}_HEAD", f"{letter}_SLOT")
    return dict(zip(names, stored.array.stride()[:3], strict=True))


def _width(head_dim: int) -> int:
    """Values that a program holds of a row: a power of two, and whole groups."""
    return max(32, 1 << (head_dim - 1).bit_length())


def _element_type(library: Any, name: str) -> Any:
    """Triton's name for it. Its interpreter has no bf16 arithmetic: f32 there, which holds every bf16."""
    tl = library.tl
    return {"f32": tl.float32, "f16": tl.float16, "bf16": tl.float32 if _INTERPRETED else tl.bfloat16}[name]
