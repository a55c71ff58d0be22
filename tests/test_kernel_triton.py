"""The Triton kernel beyond the contract: its plans, split contexts, replays in one room, writing, compilation.

Without a GPU it runs through Triton's interpreter (see conftest.py), which takes some 0.1 s for each call: worlds are
small. What the interpreter cannot see, types and layouts that only the compiler knows, `test_it_compiles` does see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_cases import (
    Sequence,
    Shape,
    World,
    array,
    backend_named,
    decode,
    decoded,
    make_world,
    prefill,
    rounded,
    stored,
    to_numpy,
)
from kvcache import formats, kernels
from kvcache.formats import FORMATS, Stored
from kvcache.kernels import AttentionBatch, Rotation, Segment, triton_kernel, triton_plan
from kvcache.kernels.reference import ReferenceKernel
from kvcache.kernels.rope import rope_shift
from kvcache.kernels.triton_kernel import TritonKernel, geometry_of
from kvcache.kernels.triton_plan import Geometry, Room, Sizes, Tiling, decode_sizes

BACKEND = "torch" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
DEVICE = torch.device("cpu" if BACKEND == "torch" else "cuda")
MIXED = [decode(70, window=30), prefill(40, 18), decode(21), prefill(33, 3, holes=9), decode(1), decode(30, holes=0)]


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_KERNEL", "triton")


def both(world: World, names: tuple[str, str]) -> tuple[Stored, Stored]:
    keys, values = (
        stored(BACKEND, raw, name, world.seen_slots)
        for raw, name in zip((world.keys, world.values), names, strict=True)
    )
    return keys, values


def expected(world: World, queries: Any, keys: Stored, values: Stored, **options: Any) -> Any:
    parts = (decoded(part, world.seen_slots).astype(np.float32) for part in (keys, values))
    exact = (stored("numpy", part, "f32", world.seen_slots) for part in parts)
    return ReferenceKernel().attend(to_numpy(queries), *exact, world.batch, **options)


def error(world: World, dtype: str, names: tuple[str, str], softcap: float | None = None, sinks: Any = None) -> float:
    """The largest difference from the reference, relative to the largest result (or 1)."""
    queries, (keys, values) = array(BACKEND, world.queries, dtype), both(world, names)
    kernel = TritonKernel()
    assert kernel.refusal(queries, keys, values) is None
    options = {"scale": world.shape.head_dim**-0.5, "softcap": softcap}
    given = None if sinks is None else array(BACKEND, sinks)
    out = to_numpy(kernel.attend(queries, keys, values, world.batch, sinks=given, **options))
    exact = expected(world, queries, keys, values, sinks=sinks, **options)
    assert np.isfinite(out).all()
    return float(np.abs(out - exact).max() / max(1, np.abs(exact).max()))


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 16, 100, 128, 4096])
def test_split_contexts(block_size: int) -> None:
    """Longer than the parts that are merged, with windows and holes; blocks smaller and larger than a step."""
    sequences = [decode(700), decode(600, window=513), prefill(530, 2), decode(300, holes=40), decode(9)]
    world = make_world(Shape(1, 2, 32, 32, block_size), sequences, seed=5)
    queries, (keys, values) = array(BACKEND, world.queries), both(world, ("f32", "f32"))
    plan = TritonKernel().plan(world.batch, queries.device, geometry_of(queries, keys, values))
    assert len(plan.merges) == 5  # the last sequence is not cut
    sinks = np.array([-1, 2], np.float32)
    assert error(world, "f32", ("f32", "f32"), softcap=4.0, sinks=sinks) < 2e-6
    assert error(world, "bf16", ("q4_0", "fp8_e4m3")) < 1e-2


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 128), (96, 32), (256, 256), (512, 512)])
def test_every_format_and_head_size(name: str, head_dim: int, value_dim: int) -> None:
    other = FORMATS[(FORMATS.index(name) + 2) % len(FORMATS)]
    world = make_world(Shape(1, 2, head_dim, value_dim, 16), MIXED[1:4], seed=3)
    assert error(world, "f32", (name, other)) < 2e-6
    assert error(rounded(world, "bf16"), "bf16", (other, name)) < 1e-2


@pytest.mark.parametrize("group", [1, 3, 5, 8, 40])
def test_any_number_of_query_heads(group: int) -> None:
    """Groups that are no power of two, and one that is cut into chunks (f32 takes 16 or 32 heads at a time)."""
    sinks = np.linspace(-2, 3, 2 * group).astype(np.float32)
    world = rounded(make_world(Shape(2, group, 64, 64, 8), MIXED[1:4], seed=4), "f16")
    assert error(world, "f32", ("f16", "q8_0"), softcap=4.0, sinks=sinks) < 2e-6
    assert error(world, "f16", ("f16", "q8_0"), softcap=4.0, sinks=sinks) < 1e-2


def test_fp8_codes_are_all_read() -> None:
    """Every code but NaN, one by one: the value of a single visible row is the result."""
    values = formats.create("fp8_e4m3", backend_named(BACKEND))
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).reshape(8, 1, 1, 32)
    held = Stored(codes, values, 32)
    segments = [Segment(np.array([i]), np.array([i], np.int32), 1, 0, None) for i in range(8)]
    batch = AttentionBatch(segments, np.zeros(8, np.int32), np.ones(8, np.int32), 1)
    keys = Stored(torch.zeros(8, 1, 1, 32, device=DEVICE), formats.create("f32", backend_named(BACKEND)), 32)
    out = TritonKernel().attend(torch.zeros(8, 1, 32, device=DEVICE), keys, held, batch, scale=1.0)
    assert torch.equal(out.reshape(-1).nan_to_num(), values.decode(codes, 32).reshape(-1).nan_to_num())
    assert out.isnan().sum() == 2


def test_a_sequence_does_not_depend_on_companions() -> None:
    world = make_world(Shape(2, 4, 32, 32, 16), [decode(600), decode(90), prefill(70, 30)], seed=6)
    queries, (keys, values) = array(BACKEND, world.queries), both(world, ("f32", "f32"))
    together = TritonKernel().attend(queries, keys, values, world.batch, scale=0.125)
    for segment in world.batch.segments:
        rows = segment.rows
        alone = Segment(np.arange(len(rows)), segment.block_table, segment.num_slots, 0, None)
        bounds = (world.batch.query_begins[rows], world.batch.query_ends[rows])
        batch = AttentionBatch([alone], *bounds, world.batch.block_size)
        assert torch.equal(TritonKernel().attend(queries[rows], keys, values, batch, scale=0.125), together[rows])


def test_rows_of_no_segment_are_zeros_and_views_are_read() -> None:
    world = make_world(Shape(2, 2, 64, 64, 16), [decode(20), prefill(40, 6)], seed=7)
    queries, (keys, values) = array(BACKEND, world.queries), both(world, ("f32", "f32"))
    plain = TritonKernel().attend(queries, keys, values, world.batch, scale=0.1)
    (row,) = world.batch.segments[0].rows
    fewer = replace_segments(world.batch, list(world.batch.segments[1:]))
    part = TritonKernel().attend(queries, keys, values, fewer, scale=0.1)
    assert not part[row].any()
    assert torch.equal(part[world.batch.segments[1].rows], plain[world.batch.segments[1].rows])
    wide = torch.stack([queries, queries], dim=-1)[..., 0]
    together = torch.stack([keys.array, values.array])
    parts = (Stored(together[i], part.format, 64) for i, part in enumerate((keys, values)))
    assert torch.equal(TritonKernel().attend(wide, *parts, world.batch, scale=0.1), plain)


def replace_segments(batch: AttentionBatch, segments: list[Segment]) -> AttentionBatch:
    return AttentionBatch(segments, batch.query_begins, batch.query_ends, batch.block_size)


# --- plans ------------------------------------------------------------------------------------------------------------

GEOMETRIES = [
    Geometry(2, 4, Tiling(16, 16, 4, 1), Tiling(64, 32, 4, 1)),
    Geometry(3, 1, Tiling(16, 128, 4, 1), Tiling(32, 64, 4, 1)),
    Geometry(16, 600, Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["chunks of 2", "chunks of 3", "chunks of 16"])
@pytest.mark.parametrize("seed", range(12))
def test_plans_cover_what_is_visible_once(geometry: Geometry, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(5):
        num_slots, first = int(rng.integers(0, 900)), int(rng.choice([0, 0, 77]))
        queries = rng.integers(first, first + num_slots + 5, int(rng.choice([1, 1, 2, 40])))
        window, chunk = int(rng.integers(1, 400)), int(rng.integers(1, 400))
        kind = [{}, {"window": window}, {"chunk": chunk}, {"is_causal": False}][rng.integers(4)]
        holes = None if rng.integers(2) else int(rng.integers(0, num_slots + 1))
        sequences.append(Sequence(num_slots, tuple(map(int, queries)), first, holes=holes, **kind))
    world = make_world(Shape(block_size=int(rng.choice([1, 7, 16, 64]))), sequences, seed)
    assert_covers(triton_plan.plan(world.batch, geometry, torch.device("cpu")), world, geometry)


def assert_covers(plan: triton_plan.Plan, world: World, geometry: Geometry) -> None:
    seen = np.zeros(world.visible.shape, int)
    whole, parts = np.zeros(len(seen), int), {}
    rows, tables, positions = (t.numpy() for t in (plan.rows, plan.tables, plan.positions))
    size = world.batch.block_size
    for items, tiling in ((plan.decode, geometry.decode), (plan.prefill, geometry.prefill)):
        for item in items.numpy():
            rows_at, count, lo, full_lo, full_hi, hi, seen_begin, seen_end, table_at = item[:9]
            positions_at, is_irregular, first_position, partial = item[9:13]
            assert 0 < count <= tiling.block_m // geometry.chunk
            assert lo % tiling.block_n == 0
            assert full_lo == full_hi or not (full_lo % tiling.block_n or full_hi % tiling.block_n)
            assert lo <= full_lo <= full_hi <= hi
            own = rows[rows_at : rows_at + count]
            slots = np.arange(lo, hi)
            held = positions[positions_at + slots] if is_irregular else first_position + slots
            loaded = (held >= seen_begin) & (held < seen_end)
            storage = tables[table_at + slots // size] * size + slots % size if len(slots) else slots
            visible = world.visible[own][:, storage]
            assert not visible[:, ~loaded].any()
            assert visible[:, loaded].any(axis=0).all()  # nothing that nobody sees is loaded
            assert visible[:, full_lo - lo : full_hi - lo].all()
            seen[own[:, None], storage] += visible
            for offset, row in enumerate(own):
                whole[row] += partial < 0
                if partial >= 0:
                    parts.setdefault(row, []).append(partial + offset)
    assert (seen == world.visible).all()
    merged = {row: [first + i * step for i in range(n)] for row, first, n, step in plan.merges.numpy()}
    assert {row: sorted(found) for row, found in parts.items()} == merged
    assert (whole + np.isin(np.arange(len(whole)), list(merged)) == 1).all()
    used = [index for found in merged.values() for index in found]
    assert len(used) == len(set(used)) and max(used, default=-1) < plan.num_partials


def test_a_plan_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(triton_kernel, "plan", lambda *given: made.append(1) or triton_plan.plan(*given))
    world = make_world(Shape(), [decode(9)], seed=1)
    queries, (keys, values) = array(BACKEND, world.queries), both(world, ("f32", "f32"))
    kernel = TritonKernel()
    for _ in range(3):
        kernel.attend(queries, keys, values, world.batch, scale=1.0)
    kernel.attend(queries, keys, values, replace_segments(world.batch, list(world.batch.segments)), scale=1.0)
    assert len(made) == 2


def test_batches_that_do_not_fit_raise() -> None:
    world = make_world(Shape(2, 1, block_size=4), [decode(9), decode(3)], seed=1)
    queries, (keys, values) = array(BACKEND, world.queries), both(world, ("f32", "f32"))
    kernel = TritonKernel()
    with pytest.raises(ValueError, match=r"2 queries .* there are 1 queries"):
        kernel.attend(queries[:1], keys, values, world.batch, scale=1.0)
    few = Stored(keys.array[:1], keys.format, keys.head_dim)
    with pytest.raises(ValueError, match="and 1 blocks of"):
        kernel.attend(queries, few, values, world.batch, scale=1.0)
    segment = world.batch.segments[0]
    for rows, table in ((segment.rows, segment.block_table[:1]), (np.array([7]), segment.block_table)):
        bad = Segment(rows, table, segment.num_slots, 0, None)
        with pytest.raises(ValueError, match="expected 3 blocks and rows of the batch"):
            kernel.attend(queries, keys, values, replace_segments(world.batch, [bad]), scale=1.0)
    negative = Segment(segment.rows, segment.block_table * 0 - 1, segment.num_slots, 0, None)
    with pytest.raises(ValueError, match="names block -1"):
        kernel.attend(queries, keys, values, replace_segments(world.batch, [negative]), scale=1.0)


# --- replays ----------------------------------------------------------------------------------------------------------


class Capture:
    """A CUDA graph's part: keeps the launches, with their tensors, and makes them again as they were."""

    def __init__(self, library: Any) -> None:
        self.launches: list[Callable[[], None]] = []
        self.signatures: list[tuple[Any, ...]] = []
        kept = {name: self._keeper(getattr(library, name)) for name in ("attend_items", "merge_items")}
        self.library = SimpleNamespace(tl=library.tl, **kept)

    def _keeper(self, function: Any) -> Any:
        def at(grid: tuple[int, ...]) -> Callable[..., None]:
            def keep(*given: Any, **options: Any) -> None:
                self.launches.append(lambda: function[grid](*given, **options))
                addresses = tuple(g.data_ptr() if isinstance(g, Tensor) else g for g in given)
                self.signatures.append((grid, addresses, tuple(options.items())))

            return keep

        class Keeper:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return at(grid)

        return Keeper()


class Operators(TorchDispatchMode):
    """The names of the PyTorch operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


PASSES = [
    [decode(700), decode(5), decode(40, window=16), decode(20, holes=4)],
    [decode(3), decode(640), decode(1), decode(290)],
    [decode(90), decode(300), Sequence(0, (5,)), Sequence(0, (5,))],  # two sequences fewer
]


def test_one_capture_serves_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph does: the launches of the first pass, repeated with the plans of others in the same room."""
    capture = Capture(triton_kernel._device_code())
    monkeypatch.setattr(triton_kernel, "_device_code", lambda: capture.library)
    worlds = [make_world(Shape(2, 2, 32, 32, 16), sequences, seed) for seed, sequences in enumerate(PASSES)]
    names = ("bf16", "q4_0")
    first = both(worlds[0], names)
    keys, values = (Stored(part.array.new_zeros((80, *part.array.shape[1:])), part.format, 32) for part in first)
    queries = torch.zeros(4, 4, 32, dtype=torch.bfloat16, device=DEVICE)
    sinks = torch.ones(4, device=DEVICE)
    out = torch.empty_like(queries)
    room = Room(decode_sizes(geometry_of(queries, keys, values), 16, 4, 700, is_irregular=True), DEVICE)
    kernel = TritonKernel()
    for world in worlds:
        for part, filled in zip((keys, values), both(world, names), strict=True):
            part.array[: len(filled.array)].copy_(filled.array)
        queries.copy_(array(BACKEND, world.queries, "bf16"))
        plan = kernel.plan(world.batch, queries.device, geometry_of(queries, keys, values), room)
        if not capture.launches:
            with Operators() as operators:
                triton_kernel.launch(plan, queries, keys, values, out, scale=0.2, softcap=9.0, sinks=sinks)
            # Nothing that waits for the device or copies from it, and nothing that a graph cannot hold.
            assert operators.names <= {"aten.new_empty.default"}
        out.fill_(7)
        for launch in capture.launches:
            launch()
        exact = expected(world, queries, *both(world, names), scale=0.2, softcap=9.0, sinks=np.ones(4))
        assert np.abs(to_numpy(out) - exact).max() < 1e-2 * max(1, np.abs(exact).max())
        again = len(capture.signatures)
        triton_kernel.launch(plan, queries, keys, values, out, scale=0.2, softcap=9.0, sinks=sinks)
        # Grids, pointers and numbers of a fresh launch are those of the captured one; its intermediates are its own.
        for old, new in zip(capture.signatures[:again], capture.signatures[again:], strict=True):
            assert old[0] == new[0] and old[2] == new[2]
            shared = [i for i, (a, b) in enumerate(zip(old[1], new[1], strict=True)) if a == b]
            assert len(shared) >= len(old[1]) - 2
        del capture.launches[again:], capture.signatures[again:]


def test_rooms_that_are_too_small_say_so() -> None:
    world = make_world(Shape(2, 1), [decode(9), decode(30)], seed=1)
    queries, (keys, values) = array(BACKEND, world.queries), both(world, ("f32", "f32"))
    geometry = geometry_of(queries, keys, values)
    sizes = decode_sizes(geometry, 4, num_sequences=1, max_slots=30, is_irregular=False)
    with pytest.raises(ValueError, match=r"the room has Sizes\(decode_items=\d+, .* make a larger one"):
        TritonKernel().plan(world.batch, queries.device, geometry, Room(sizes, DEVICE))
    room = Room(decode_sizes(geometry, 4, num_sequences=2, max_slots=30, is_irregular=False), DEVICE)
    fewer = replace_segments(world.batch, list(world.batch.segments[1:]))
    with pytest.raises(ValueError, match="1 of 2 rows belong to a segment"):
        TritonKernel().plan(fewer, queries.device, geometry, room)
    assert decode_sizes(geometry, 4, 2, 30, is_irregular=True).positions == 60
    assert isinstance(sizes, Sizes) and sizes.prefill_items == 0


def test_partial_results_take_what_their_rows_need() -> None:
    """A decode has one row in each part, whatever a tile could hold."""
    world = make_world(Shape(8, 4, 32, 32, 16), [decode(2000), decode(600), prefill(900, 3)], seed=1)
    queries, (keys, values) = array(BACKEND, world.queries), both(world, ("f32", "f32"))
    plan = TritonKernel().plan(world.batch, queries.device, geometry_of(queries, keys, values))
    items = plan.decode.cpu().numpy()
    assert plan.num_partials == int(items[items[:, 12] >= 0, 1].sum())


# --- writing ----------------------------------------------------------------------------------------------------------


def storage(name: str, num_heads: int, head_dim: int, block_size: int) -> Stored:
    made = backend_named(BACKEND)
    fmt = formats.create(name, made)
    shape = (5, num_heads, block_size, fmt.row_width(head_dim))
    return Stored(made.zeros_pair(shape, fmt.storage_dtype, 0)[1], fmt, head_dim)


def hostile(rng: np.random.Generator, count: int, heads: int, dim: int) -> Any:
    """Rows of all sizes, with zeros, ties, halves, negative zeros and values beyond what formats hold."""
    rows = rng.standard_normal((count, heads, dim)) * 10.0 ** rng.integers(-6, 4, (count, heads, 1))
    rows[0, 0] = 0
    rows[1, 0, ::2], rows[1, 0, 1::2] = 3, -3
    rows[2, 0] = np.arange(dim) - dim / 2 + 0.5
    rows[3, 0, :4] = (-0.0, 500, -1e4, 2.0**-10)
    return rows.astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("head_dim", "value_dim", "dtype"), [(64, 96, "f32"), (32, 64, "bf16"), (128, 32, "f16")])
def test_put_is_what_formats_encode(name: str, head_dim: int, value_dim: int, dtype: str) -> None:
    rng = np.random.default_rng(1)
    other = FORMATS[(FORMATS.index(name) + 1) % len(FORMATS)]
    parts = (storage(name, 2, head_dim, 4), storage(other, 2, value_dim, 4))
    slots = rng.permutation(20)[:6]
    new = [array(BACKEND, hostile(rng, 6, 2, dim), dtype) for dim in (head_dim, value_dim)]
    with np.errstate(all="ignore"):  # 1 / 0 and what f16 cannot hold are meant; NumPy, as the interpreter, would warn
        TritonKernel().put(*parts, slots, *new)
    for part, rows in zip(parts, new, strict=True):
        wanted = torch.zeros_like(part.array)
        wanted[slots // 4, :, slots % 4] = part.format.encode(rows)
        if part.format.name == "bf16" and dtype != "bf16" and BACKEND == "torch":
            # Triton's interpreter cuts f32 to bf16; the GPU rounds.
            assert torch.allclose(part.array.float(), wanted.float(), rtol=2.0**-7)
        else:
            assert torch.equal(part.array, wanted), part.format.name


def test_put_skips_negative_slots_and_takes_them_on_the_device() -> None:
    parts = (storage("f32", 1, 32, 4), storage("q8_0", 1, 32, 4))
    rows = torch.ones(3, 1, 32, device=DEVICE)
    TritonKernel().put(*parts, torch.tensor([3, -1, 9], device=DEVICE), rows, rows)
    written = parts[0].array[:, 0, :, 0].reshape(-1)
    assert written.nonzero().flatten().tolist() == [3, 9]
    TritonKernel().put(*parts, np.empty(0, np.int64), rows[:0], rows[:0])


def test_puts_that_do_not_fit_raise() -> None:
    parts, rows = (storage("f32", 1, 32, 4), storage("f32", 1, 32, 4)), torch.ones(2, 1, 32, device=DEVICE)
    with pytest.raises(ValueError, match=r"new keys are .*; expected .*\(3, 1, 32\)"):
        TritonKernel().put(*parts, np.arange(3), rows, rows)
    with pytest.raises(ValueError, match="slots reach 20; expected slots below 20"):
        TritonKernel().put(*parts, np.array([1, 20]), rows, rows)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("interleaved", "begin", "num_pairs"), [(False, 0, 32), (True, 0, 32), (False, 32, 16)])
def test_shift_turns_stored_keys(name: str, interleaved: bool, begin: int, num_pairs: int) -> None:
    rng = np.random.default_rng(2)
    keys = storage(name, 2, 96, 4)
    before = keys.format.encode(array(BACKEND, rng.standard_normal((20, 2, 96)).astype(np.float32)))
    keys.array.copy_(before.reshape(5, 4, 2, -1).transpose(1, 2))
    slots, offsets = rng.permutation(20)[:7], np.array([-3, 0, 900, -3, 1, 0, -100_000])
    inv_freq = 10000.0 ** (-np.arange(num_pairs) / num_pairs)
    with np.errstate(all="ignore"):
        TritonKernel().shift(keys, slots, offsets, Rotation(inv_freq, interleaved, begin))
    wanted = before.clone()
    turn = rope_shift(inv_freq, interleaved=interleaved, rotary_begin=begin)
    turned = turn(0, keys.format.decode(before[slots], 96).float(), offsets)
    moved = offsets != 0
    wanted[slots[moved]] = keys.format.encode(turned)[moved]
    seen = keys.array.transpose(1, 2).reshape(wanted.shape)
    assert torch.equal(seen[slots[~moved]], before[slots[~moved]])
    if name == "bf16" and BACKEND == "torch":  # cut by the interpreter, rounded by the GPU
        assert torch.allclose(seen.float(), wanted.float(), rtol=2.0**-7)
    else:
        assert torch.equal(seen, wanted)


def test_shifts_that_do_not_fit_raise() -> None:
    keys, kernel = storage("f32", 1, 64, 4), TritonKernel()
    for slots, offsets, pairs, told in (
        ([1], [1, 2], 32, "1 slots, 2 offsets"),
        ([1], [1], 33, "two values for each frequency"),
        ([20], [1], 32, "slots reach 20"),
        ([-1], [1], 32, "slots reach down to -1"),
    ):
        with pytest.raises(ValueError, match=told):
            kernel.shift(keys, np.array(slots), np.array(offsets), Rotation(np.ones(pairs), False, 0))


def test_it_is_the_writer_of_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    part, rows = storage("q8_0", 1, 32, 4), array(BACKEND, np.ones((2, 1, 32), np.float32))
    kernel = TritonKernel()
    monkeypatch.setitem(kernels._loaded, "triton", kernel)
    assert kernels.writer((part,), (rows,)) is kernel
    assert not kernel.writes((part,), (rows.double(),))
    assert not kernel.writes((storage("q8_0", 1, 32, 4), Stored(np.zeros((1, 1, 4, 34), np.uint8), part.format, 32)))
    monkeypatch.setattr(triton_kernel, "_INTERPRETED", False)
    assert kernel.writes((part,)) == (BACKEND == "cuda")


# --- when it is taken -------------------------------------------------------------------------------------------------


def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(Shape(1, 1, 32, 32, 4), [decode(5)], seed=8)
    queries, (keys, values) = array(BACKEND, world.queries), both(world, ("f32", "f32"))
    kernel = TritonKernel()
    assert "float64" in str(kernel.refusal(queries.double(), keys, values))
    strided = replace(keys, array=keys.array.transpose(2, 3))
    assert "adjacent" in str(kernel.refusal(queries, strided, keys))
    large = replace(keys, array=torch.zeros(1, 1, 4, 576, device=DEVICE), head_dim=576)
    assert "at most 512" in str(kernel.refusal(queries, large, keys))
    assert "elsewhere" in str(kernel.refusal(queries, replace(keys, array=keys.array.to("meta")), keys))
    monkeypatch.setattr(triton_kernel, "_INTERPRETED", True)
    monkeypatch.delenv("KVCACHE_KERNEL")
    assert "very slow" in str(kernel.refusal(queries, keys, values))
    monkeypatch.setattr(triton_kernel, "_INTERPRETED", False)
    on_cpu = (queries.cpu(), *(replace(part, array=part.array.cpu()) for part in (keys, values)))
    assert "it reads CUDA tensors" in str(kernel.refusal(*on_cpu))


def test_an_engine_generates_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From end to end: sinks, a sliding member, chunked prefill beside decodes, a prefix shared in the cache."""
    transformers = pytest.importorskip("transformers")
    from kvcache import Engine

    torch.manual_seed(0)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=64, vocab_size=64, num_local_experts=4, sliding_window=8, **layers
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    prompts = [list(range(1, 13)), [5, 6, 7], [*range(1, 10), 40]]
    tokens = {}
    for name in ("triton", "reference"):
        monkeypatch.setenv("KVCACHE_KERNEL", name)
        engine = Engine(model, kv_bytes="1MiB", dtype="f32", kv_dtype="f32", max_batch_tokens=16)
        tokens[name] = [done.token_ids for done in engine.generate(prompts, max_tokens=4)]
        engine.close()
    assert tokens["triton"] == tokens["reference"]


def test_without_triton_it_refuses_and_the_next_is_taken() -> None:
    """In a process that cannot import Triton, with the CPU's tensors in the place of a GPU's."""
    program = (
        "import sys, torch\n"
        "sys.modules['triton'] = None\n"
        "from kvcache import backends, formats\n"
        "from kvcache.kernels.triton_kernel import TritonKernel\n"
        "fmt = formats.create('f32', backends.create('torch'))\n"
        "stored = formats.Stored(torch.zeros(1, 1, 4, 8), fmt, 8)\n"
        "kernel, rows = TritonKernel(), torch.zeros(1, 1, 8)\n"
        "print(kernel.refusal(rows, stored, stored))\n"
        "assert not kernel.writes((stored, stored), (rows, rows))\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "KVCACHE_KERNEL": "triton"}
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert "Triton cannot be imported" in told.stdout and "pip install 'kvcache[triton]'" in told.stdout


def test_choosing_on_the_cpu_imports_no_triton() -> None:
    program = (
        "import sys, torch\n"
        "from kvcache import backends, formats, kernels\n"
        "fmt = formats.create('f32', backends.create('torch'))\n"
        "stored = formats.Stored(torch.zeros(1, 1, 4, 8), fmt, 8)\n"
        "refused = kernels._candidate('triton', torch.zeros(1, 1, 8), stored, stored)\n"
        "assert 'CUDA' in refused, refused\n"
        "assert 'triton' not in sys.modules\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET",)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


# --- compilation ------------------------------------------------------------------------------------------------------

COMPILED = {
    90: ["bf16,bf16,q4_0,128,128,4,128,prefill", "bf16,fp8_e4m3,q4_0,64,64,1,16,put"],
    86: ["bf16,bf16,bf16,256,256,4,16,prefill"],  # the least shared memory
    80: ["bf16,q8_0,fp8_e4m3,96,64,5,1,decode"],
}


@pytest.mark.parametrize("capability", COMPILED)
def test_it_compiles(capability: int, tmp_path: Path) -> None:
    """For GPUs that need not be here: types, shared memory, stack; tensor cores and asynchronous copies are used."""
    script = Path(__file__).parent / "triton_compile.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    sources = Path(triton_kernel.__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(script.parent), str(sources)])
    told = subprocess.run(
        [sys.executable, script, str(capability), *COMPILED[capability]],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    programs = [json.loads(line) for line in told.stdout.splitlines()]
    assert {program["name"].split()[1] for program in programs} >= {"attend_items"}
    for program in programs:
        assert program["shared"] <= {90: 227, 86: 99, 80: 163}[capability] << 10
        assert program["stack"] <= 128, program  # spilled registers, in bytes of each thread
        if "attend_items" in program["name"]:
            products = "wgmma.mma" if capability == 90 and "prefill" in program["name"] else "mma.sync"
            assert program[products] and program["cp.async.c"] > 40, program
