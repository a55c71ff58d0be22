"""The C++ kernel beyond the contract of kernels: its instruction sets, long contexts, its writes, its build."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
if shutil.which("c++") is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

import torch

from kernel_cases import (
    Sequence,
    Shape,
    World,
    array,
    decode,
    decoded,
    make_world,
    naive,
    prefill,
    rounded,
    stored,
    to_numpy,
)
from kvcache import Batch, CausalCache, Full, NotSupported, backends, formats
from kvcache.formats import FORMATS, Stored
from kvcache.kernels import AttentionBatch, Rotation, Segment, choose, cpu_build
from kvcache.kernels.cpu import CpuKernel
from kvcache.kernels.rope import rope_shift

BACKEND = backends.create("torch")


def attend(world: World, dtype: str, format_names: tuple[str, str], **options: Any) -> tuple[Any, Any]:
    """What the kernel gives, and the naive table of all scores over the same stored numbers."""
    keys, values = (
        stored("torch", raw, name, world.seen_slots)
        for raw, name in zip((world.keys, world.values), format_names, strict=True)
    )
    queries = array("torch", world.queries, dtype)
    out = CpuKernel().attend(queries, keys, values, world.batch, scale=world.shape.head_dim**-0.5, **options)
    exact = [to_numpy(queries), decoded(keys, world.seen_slots), decoded(values, world.seen_slots)]
    given = {name: to_numpy(option) if name == "sinks" else option for name, option in options.items()}
    return to_numpy(out), naive(*exact, world.visible, scale=world.shape.head_dim**-0.5, **given)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def error(seen: Any, expected: Any) -> float:
    assert np.isfinite(seen).all()
    return float(np.abs(seen - expected).max() / max(1.0, np.abs(expected).max()))


MIXED = [
    decode(700, window=90),
    prefill(150, 70),
    decode(65),
    prefill(90, 3, holes=20),
    decode(1),
    decode(130, holes=0),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(32, 32), (64, 128), (96, 32), (256, 256), (512, 512)])
def test_every_format_and_head_size(isa: str, name: str, head_dim: int, value_dim: int) -> None:
    """Formats of keys and values apart, few and many rows, all in one ragged call; f32 is exact, bf16 close."""
    other = FORMATS[(FORMATS.index(name) + 2) % len(FORMATS)]
    world = make_world(Shape(1, 4, head_dim, value_dim, 16), MIXED, seed=3)
    for dtype, names, tolerance in (("f32", (name, other), 2e-6), ("bf16", (other, name), 1e-2)):
        assert error(*attend(rounded(world, dtype), dtype, names)) < tolerance, (dtype, names)


@pytest.mark.parametrize(("queries", "group"), [(1, 4), (5, 1), (40, 2)])
def test_the_tile_unit_changes_little(queries: int, group: int) -> None:
    """Few rows and rows in lanes; plain loops stand for the unit where there is none."""
    cpu_build.build()
    operators = cpu_build.operators()
    if not operators.isa().endswith("bf16"):
        pytest.skip("needs bf16 products in this CPU")
    before = operators.uses_amx()
    world = rounded(make_world(Shape(2, group, 128, 128, 16), [prefill(600, queries)], seed=6), "bf16")
    try:
        outs = []
        for on in (False, True):
            operators.set_amx(on)
            outs.append(attend(world, "bf16", ("bf16", "bf16"))[0])
    finally:
        operators.set_amx(before)
    assert error(*outs) < 1e-2


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 9, 40])
def test_any_number_of_query_heads(isa: str, group: int) -> None:
    for dtype, tolerance in (("f32", 2e-6), ("bf16", 1e-2), ("f16", 1e-2)):
        world = rounded(make_world(Shape(2, group, 64, 64, 8), MIXED[1:4], seed=4), dtype)
        sinks = array("torch", np.linspace(-2, 3, 2 * group).astype(np.float32))
        for names in (("bf16", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "fp8_e4m3")):
            assert error(*attend(world, dtype, names, softcap=4.0, sinks=sinks)) < tolerance, (dtype, names)


QUANTISED = [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q4_0", "q8_0")]


def hard_world(kind: str, head_dim: int) -> World:
    """Rows that integers with one scale per group hold badly, in long contexts and awkward spans."""
    sequences = [
        decode(1200),
        decode(300, window=90),
        decode(300, holes=100),
        decode(3),
        prefill(150, 2),
        prefill(150, 20),
    ]
    world = make_world(Shape(1, 4, head_dim, head_dim, 16), sequences, seed=13)
    for side, rows in enumerate((world.keys, world.values, world.queries)):
        if kind == "one huge value in each group":
            rows[..., 5 + side :: 32] *= 100.0 if side == 1 else 12.0
        elif kind == "huge rows":
            rows[::7] *= 1000.0 if side == 1 else 5.0
        elif kind == "all zeros":
            rows[...] = 0.0
        elif kind == "constant rows":
            rows[...] = rows[..., :1]
        elif kind == "some groups zero":
            rows[..., side * 32 : side * 32 + 32] = 0.0
        elif kind == "tiny":
            rows[...] *= 1e-4
    return rounded(world, "bf16")


@pytest.mark.parametrize("names", QUANTISED)
@pytest.mark.parametrize("head_dim", [32, 96, 128])
@pytest.mark.parametrize(
    "kind",
    ["one huge value in each group", "huge rows", "all zeros", "constant rows", "some groups zero", "tiny", "plain"],
)
def test_quantised_rows_of_every_kind(kind: str, head_dim: int, names: tuple[str, str]) -> None:
    """Decode and two queries at a time: products of integers where the CPU has them."""
    world = hard_world(kind, head_dim)
    sinks = array("torch", np.linspace(-2, 3, 4).astype(np.float32))
    for options in ({}, {"softcap": 30.0, "sinks": sinks}):
        seen, expected = attend(world, "bf16", names, **options)
        assert np.isfinite(seen).all()
        # The output is bf16: half a step of 2^-8, and what the products lose.
        assert np.abs(seen - expected).max() <= 5e-3 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_a_large_query_value_leaves_other_groups_alone(isa: str, name: str) -> None:
    """Its keys are zeros: what it is multiplied with says nothing, and must not take the digits of the rest."""
    world = make_world(Shape(2, 4, 128, 128, 16), [decode(300), prefill(200, 2)], seed=9)
    keys, queries = world.keys.copy(), world.queries.copy()
    keys[..., :32], queries[..., 5] = 0.0, 1e5
    world = rounded(replace(world, keys=keys, queries=queries), "bf16")
    assert error(*attend(world, "bf16", (name, name))) < 1e-2


@pytest.mark.parametrize(("name", "dim"), [("q8_0", 64), ("q4_0", 128)])  # 64 bytes before the scales
@pytest.mark.parametrize("length", [200, 900])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_foreign_scales(isa: str, dtype: str, length: int, name: str, dim: int) -> None:
    """Negative scales, and -128, which the quantiser does not write; what is not finite stays where it is seen."""
    world = rounded(make_world(Shape(2, 4, dim, dim, 16), [decode(length), decode(150)], seed=14), dtype)
    keys, values = (stored("torch", raw, name, world.seen_slots) for raw in (world.keys, world.values))
    scales = [part.array[..., 64:].view(torch.float16) for part in (keys, values)]
    queries = array("torch", world.queries, dtype)

    def run() -> Any:
        return to_numpy(CpuKernel().attend(queries, keys, values, world.batch, scale=0.125))

    for scale in scales:
        scale[::3, :, ::2, 0] *= -1
    keys.array[1::3, :, :, 7] = values.array[1::3, :, :, 9] = 128
    exact = [to_numpy(queries), decoded(keys, world.seen_slots), decoded(values, world.seen_slots)]
    seen = run()
    # Where keys and values become bf16 by a table, -128 reads as -127.
    assert error(seen, naive(*exact, world.visible, scale=0.125)) < (2e-6 if dtype == "f32" else 1e-2)
    first, second = world.batch.segments
    for side, scale in enumerate(scales):
        for bad in (np.nan, np.inf):
            before = scale.clone()
            scale[first.block_table[2], 1, 3] = bad
            broken = run()
            scale.copy_(before)
            assert np.array_equal(broken[second.rows], seen[second.rows])
            assert np.array_equal(broken[first.rows, :4], seen[first.rows, :4])
            assert side == 0 or not np.isfinite(broken[first.rows, 4:]).any()


@pytest.mark.parametrize("block_size", [1, 16, 100, 128, 4096])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_contexts_of_many_chunks(isa: str, block_size: int, dtype: str) -> None:
    """Longer than the chunks that are merged, of each of their sizes, with windows that begin anywhere in a block."""
    sequences = [
        decode(2600),
        decode(1100, window=513),
        prefill(1300, 9),
        decode(1025, holes=300),
        decode(8200),
        decode(17000),
    ]
    world = rounded(make_world(Shape(2, 2, 32, 32, block_size), sequences, seed=5), dtype)
    for name in ("f32", "q4_0") if dtype == "f32" else ("bf16", "q4_0"):
        assert error(*attend(world, dtype, (name, name))) < (2e-6 if dtype == "f32" else 1e-2)


@pytest.mark.parametrize(
    ("block_size", "group", "dims"),
    [
        (16, 4, (128, 128)),
        (32, 3, (64, 96)),
        (48, 1, (96, 64)),
        (64, 8, (32, 80)),
        (80, 5, (128, 32)),
        (128, 2, (256, 128)),
        (32, 6, (128, 256)),
        (64, 8, (512, 128)),
        (16, 4, (128, 384)),
        (512, 7, (64, 64)),
    ],
)
def test_whole_tiles_among_ragged_ones(isa: str, block_size: int, group: int, dims: tuple[int, int]) -> None:
    """Few rows over long contexts, whose tiles are all seen by all queries, by some, in part, or by none."""
    sequences = [
        decode(1500),
        decode(1024, first_position=77),
        decode(1100, window=777),
        decode(900, window=300, first_position=1000),
        decode(256),
        prefill(800, 2),
        Sequence(1000, (999, 400)),
        Sequence(1000, (300, 900), window=350),
        Sequence(700, (100,), is_causal=False),
        decode(600, holes=100),
    ]
    world = rounded(make_world(Shape(3, group, *dims, block_size), sequences, seed=21), "bf16")
    sinks = array("torch", np.linspace(-2, 3, 3 * group).astype(np.float32))
    of_integers = (("q4_0", "q4_0"), ("q8_0", "q4_0")) if max(dims) >= 128 and min(dims) % 32 == 0 else ()
    for names in (("bf16", "bf16"), ("bf16", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), *of_integers):
        assert error(*attend(world, "bf16", names, softcap=8.0, sinks=sinks)) < 1e-2, names
        assert error(*attend(world, "bf16", names)) < 1e-2, names


@pytest.mark.parametrize(
    "names", [("bf16", "bf16"), ("fp8_e4m3", "q8_0"), ("q4_0", "bf16"), ("f16", "bf16"), ("bf16", "f32")]
)
def test_rows_in_lanes(isa: str, names: tuple[str, str]) -> None:
    """More rows than go few by few: whole and broken bands of sixteen, beside decoding sequences."""
    dims = 160, 80 if "q8_0" not in names else 64
    for seed, num_queries in enumerate((70, 64, 93)):
        sequences = [prefill(150, num_queries), decode(600), Sequence(200, tuple(range(40)), is_causal=False), *MIXED]
        world = rounded(make_world(Shape(2, 4, *dims, 16), sequences, seed=seed), "bf16")
        sinks = array("torch", np.linspace(-2, 3, 8).astype(np.float32))
        assert error(*attend(world, "bf16", names)) < 1e-2
        assert error(*attend(world, "bf16", names, softcap=8.0, sinks=sinks)) < 1e-2


@pytest.mark.parametrize("rise", [3.0, 25.0, 80.0, 500.0, -25.0, -500.0])
def test_scores_that_rise_along_the_context(isa: str, rise: float) -> None:
    """By less in a tile than highest scores may be exceeded by before they move on, and by more; and the other way."""
    world = make_world(Shape(2, 4, 64, 64, 16), [prefill(700, 90), decode(700), prefill(900, 3)], seed=7)
    keys, queries = world.keys.copy(), world.queries.copy()
    queries[:, :, 0] = 8.0  # times the scale: 1
    for segment in world.batch.segments:
        slots = np.arange(segment.num_slots)
        keys[segment.block_table[slots // 16], :, slots % 16, 0] = (rise * slots / segment.num_slots)[:, None]
    world = rounded(replace(world, keys=keys, queries=queries), "bf16")
    sinks = array("torch", np.linspace(-2, rise, 8).astype(np.float32))
    for names in (("bf16", "bf16"), ("fp8_e4m3", "fp8_e4m3")):
        assert error(*attend(world, "bf16", names)) < 1e-2
        assert error(*attend(world, "bf16", names, sinks=sinks)) < 1e-2


@pytest.mark.parametrize("block_size", [16, 128])
def test_several_heads_in_lanes(isa: str, block_size: int) -> None:
    """Tiles of other heads in one group, as tasks of 9 to 32 rows have them where there are few threads."""
    sequences = [decode(3000), prefill(2500, 2), decode(2100, window=1111), decode(300, holes=7)]
    world = rounded(make_world(Shape(3, 16, 64, 64, block_size), sequences, seed=3), "bf16")
    with threads(1):
        for names in (("bf16", "bf16"), ("fp8_e4m3", "fp8_e4m3")):
            assert error(*attend(world, "bf16", names)) < 1e-2


def test_rows_that_see_nothing_of_a_tile(isa: str) -> None:
    """An infinite value is nobody's but theirs who see its slot, among few rows and beyond a pair of bands."""
    for num_slots, num_queries, together in ((66, 4, 1), (160, 96, 32)):
        world = rounded(make_world(Shape(1, 1, 64, 64, 16), [prefill(num_slots, num_queries)], seed=5), "bf16")
        keys, values = (stored("torch", raw, "bf16", world.seen_slots) for raw in (world.keys, world.values))
        queries = array("torch", world.queries, "bf16")
        expected = CpuKernel().attend(queries, keys, values, world.batch, scale=0.125)
        last = num_slots - 1
        (segment,) = world.batch.segments
        block = segment.block_table[last // 16]
        values.array[block, 0, last % 16] = float("inf")
        seen = CpuKernel().attend(queries, keys, values, world.batch, scale=0.125)
        sees = world.batch.query_ends[segment.rows] > last // 64 * 64
        blind = segment.rows[: int(sees.argmax()) // together * together]
        assert len(blind) and torch.equal(seen[blind], expected[blind])
        assert not torch.isfinite(seen[segment.rows[-1]]).any()


@pytest.mark.parametrize(("name", "dim"), [("bf16", 64), ("q8_0", 64), ("q4_0", 64), ("q4_0", 128)])
@pytest.mark.parametrize("length", [1500, 9000])
def test_a_decode_does_not_depend_on_companions_or_threads(isa: str, name: str, dim: int, length: int) -> None:
    world = rounded(make_world(Shape(2, 4, dim, dim, 16), [decode(length), decode(90), prefill(700, 300)], 6), "bf16")
    keys, values = (stored("torch", raw, name, world.seen_slots) for raw in (world.keys, world.values))
    queries = array("torch", world.queries, "bf16")
    together = CpuKernel().attend(queries, keys, values, world.batch, scale=0.125)
    for segment in world.batch.segments[:2]:
        (row,) = segment.rows
        alone = Segment(np.zeros(1, np.int64), segment.block_table, segment.num_slots, 0, None)
        ends = (world.batch.query_begins[[row]], world.batch.query_ends[[row]])
        batch = AttentionBatch([alone], *ends, world.batch.block_size)
        for count in (1, 2, 3):
            with threads(count):
                out = CpuKernel().attend(queries[[row]], keys, values, batch, scale=0.125)
            assert torch.equal(out[0], together[row])


def test_queries_and_storage_may_be_views() -> None:
    world = make_world(Shape(2, 2, 64, 64, 16), [prefill(40, 6)], seed=7)
    keys, values = (stored("torch", raw, "f32", world.seen_slots) for raw in (world.keys, world.values))
    queries = array("torch", world.queries)
    plain = CpuKernel().attend(queries, keys, values, world.batch, scale=0.1)
    turned = queries.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(CpuKernel().attend(turned, keys, values, world.batch, scale=0.1), plain)
    wide = torch.stack([queries, queries], dim=-1)[..., 0]
    assert torch.equal(CpuKernel().attend(wide, keys, values, world.batch, scale=0.1), plain)
    both = torch.stack([keys.array, values.array])
    parts = (Stored(both[i], part.format, 64) for i, part in enumerate((keys, values)))
    assert torch.equal(CpuKernel().attend(queries, *parts, world.batch, scale=0.1), plain)


def test_rows_of_a_block_may_stand_apart(isa: str) -> None:
    world = rounded(make_world(Shape(2, 2, 64, 64, 16), [decode(900)], seed=8), "bf16")
    parts = [stored("torch", raw, "bf16", world.seen_slots) for raw in (world.keys, world.values)]
    queries = array("torch", world.queries, "bf16")
    apart = [Stored(torch.cat([part.array] * 2, dim=-1)[..., :64], part.format, 64) for part in parts]
    seen = [to_numpy(CpuKernel().attend(queries, *pair, world.batch, scale=0.1)) for pair in (parts, apart)]
    assert error(*seen) < 1e-2


def test_refusals_say_why() -> None:
    world = make_world(Shape(1, 1, 32, 32, 4), [decode(5)], seed=8)
    keys = stored("torch", world.keys, "f32", world.seen_slots)
    kernel, queries = CpuKernel(), array("torch", world.queries)
    assert kernel.refusal(queries, keys, keys) is None
    assert "float64" in str(kernel.refusal(queries.double(), keys, keys))
    odd = Stored(torch.zeros(1, 1, 4, 30, dtype=torch.uint8), formats.create("fp8_e4m3", BACKEND), 30)
    assert "multiple of 4 in fp8_e4m3" in str(kernel.refusal(queries, odd, odd))
    strided = Stored(keys.array.transpose(2, 3), keys.format, 32)
    assert "adjacent" in str(kernel.refusal(queries, strided, keys))
    elsewhere = Stored(keys.array.to("meta"), keys.format, 32)
    assert "elsewhere" in str(kernel.refusal(queries, elsewhere, keys))


def test_batches_beyond_the_storage_raise() -> None:
    world = make_world(Shape(1, 1, 32, 32, 4), [decode(5)], seed=8)
    keys = stored("torch", world.keys, "f32", world.seen_slots)
    queries = array("torch", world.queries)
    few = Stored(keys.array[:1], keys.format, 32)
    with pytest.raises(ValueError, match=r"names blocks of 4 up to \d; there are 1 queries and 1 blocks of \{4\}"):
        CpuKernel().attend(queries, few, keys, world.batch, scale=1.0)
    with pytest.raises(ValueError, match="the batch has 1 queries"):
        CpuKernel().attend(queries.repeat(2, 1, 1), keys, keys, world.batch, scale=1.0)
    with pytest.raises(ValueError, match=r"refuses: it takes torch queries of f32, f16 or bf16, not torch.float64"):
        CpuKernel().attend(queries.double(), keys, keys, world.batch, scale=1.0)
    with pytest.raises(ValueError, match=r"refuses: the values are stored in rows of 32; heads of 30 in f32 have 30"):
        CpuKernel().attend(queries, keys, Stored(keys.array, keys.format, 30), world.batch, scale=1.0)
    elsewhere = Stored(keys.array.to("meta"), keys.format, 32)
    with pytest.raises(ValueError, match=r"refuses: .* the values are elsewhere"):
        CpuKernel().attend(queries, keys, elsewhere, world.batch, scale=1.0)
    (segment,) = world.batch.segments
    for bad in (
        Segment(segment.rows, segment.block_table[:1], 5, 0, None),
        Segment(segment.rows + 1, segment.block_table, 5, 0, None),
    ):
        batch = AttentionBatch([bad], world.batch.query_begins, world.batch.query_ends, 4)
        with pytest.raises(ValueError, match="expected 2 blocks and rows of the batch"):
            CpuKernel().attend(queries, keys, keys, batch, scale=1.0)


# --- writing ----------------------------------------------------------------------------------------------------------


def storage(name: str, head_dim: int, *, num_blocks: int = 7, num_heads: int = 3, block_size: int = 4) -> Stored:
    fmt = formats.create(name, BACKEND)
    shape = (num_blocks, num_heads, block_size, fmt.row_width(head_dim))
    return Stored(BACKEND.zeros_pair(shape, fmt.storage_dtype, 0)[1], fmt, head_dim)


def awkward_rows(n: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows with ties, zeros, tiny, huge and saturating values among them, and what is no number."""
    rng = np.random.default_rng(9)
    rows = rng.standard_normal((n, num_heads, head_dim)).astype(np.float32) * 10.0 ** rng.integers(
        -4, 3, (n, num_heads, 1)
    )
    rows[0, 0] = 0
    rows[1, 0] = np.arange(head_dim) % 9 - 4.5
    rows[1, 1] = np.linspace(-127.5, 127, head_dim)
    rows[2, 0] *= 2.0**-140
    rows[2, 1] = 2.0**-9 * (np.arange(head_dim) % 40) / 4
    rows[3, 0] = np.linspace(-500, 500, head_dim)
    rows[7, 0, -3], rows[7, 0, -2] = 9000, -9000  # two extremes of one size: the first counts
    rows[7, 1, -3], rows[7, 1, -2] = -9000, 9000
    rows[4, 0, 7] = rows[4, 1, -24] = rows[5, 0] = np.nan
    rows[5, 1, -31], rows[6, 0, 2], rows[6, 0, 9] = np.inf, -np.inf, np.nan
    return torch.from_numpy(rows).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 96), (128, 32), (160, 256)])
@pytest.mark.parametrize(
    ("key_name", "value_name"), [("f32", "f16"), ("bf16", "fp8_e4m3"), ("q8_0", "q4_0"), ("q4_0", "q8_0")]
)
def test_put_stores_what_the_formats_encode(
    isa: str, key_name: str, value_name: str, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    keys, values = storage(key_name, key_dim), storage(value_name, value_dim)
    slots = np.random.default_rng(10).permutation(28)[:20].astype(np.int64)
    rows = awkward_rows(20, 3, key_dim, dtype), awkward_rows(20, 3, value_dim, dtype)
    CpuKernel().put(keys, values, slots, rows[0].transpose(0, 1).contiguous().transpose(0, 1), rows[1])
    for part, new in zip((keys, values), rows, strict=True):
        expected = storage(part.format.name, part.head_dim)
        BACKEND.write_rows(expected.array, slots, part.format.encode(new))
        if part.format.is_native:  # one NaN is as good as another
            assert torch.equal(part.array.isnan(), expected.array.isnan())
            part.array.nan_to_num_(), expected.array.nan_to_num_()
        assert torch.equal(part.array.view(torch.uint8), expected.array.view(torch.uint8))


@pytest.mark.parametrize("name", ["fp8_e4m3", "q8_0", "q4_0"])
def test_put_where_subnormals_are_flushed(isa: str, name: str) -> None:
    rng = np.random.default_rng(12)
    rows = torch.from_numpy(rng.standard_normal((20, 3, 64), dtype=np.float32) * np.float32(2.0**-130))
    rows[0] *= 2.0**10
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush them")
    try:
        parts = storage(name, 64), storage(name, 64)
        CpuKernel().put(*parts, np.arange(20), rows, rows)
        encoded = formats.create(name, backends.create("numpy")).encode(rows.numpy())
    finally:
        torch.set_flush_denormal(False)
    for part in parts:
        seen = BACKEND.gather_rows(part.array, np.arange(20)).view(torch.uint8).numpy()
        assert np.array_equal(seen, encoded.view(np.uint8))


@pytest.mark.parametrize("dim", [4, 36, 60, 80])
def test_put_of_fp8_rows_that_fill_no_group(isa: str, dim: int) -> None:
    stored, slots = storage("fp8_e4m3", dim), np.arange(20)
    rows = awkward_rows(20, 3, 96, torch.float32)[..., :dim]
    CpuKernel().put(stored, stored, slots, rows, rows)
    expected = storage("fp8_e4m3", dim)
    BACKEND.write_rows(expected.array, slots, stored.format.encode(rows))
    assert torch.equal(stored.array.view(torch.uint8), expected.array.view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("interleaved", "begin", "num_pairs"),
    [(False, 0, 32), (True, 0, 32), (False, 16, 8), (True, 4, 12), (False, 4, 5), (False, 2, 20)],
)
def test_shift_turns_stored_keys(isa: str, name: str, interleaved: bool, begin: int, num_pairs: int) -> None:
    keys = storage(name, 64)
    rng = np.random.default_rng(11)
    slots = np.concatenate([np.arange(4, 19), rng.permutation(np.arange(20, 28))[:5]]).astype(np.int64)
    rows = torch.from_numpy(rng.standard_normal((20, 3, 64), dtype=np.float32))
    BACKEND.write_rows(keys.array, slots, keys.format.encode(rows))
    before = keys.array.clone()
    offsets = np.where(np.arange(20) < 12, -7, rng.integers(-9000, 9000, 20)).astype(np.int64)
    offsets[[3, 15]] = 0
    inv_freq = 10000.0 ** (-np.arange(num_pairs) / num_pairs)
    CpuKernel().shift(keys, slots, offsets, Rotation(inv_freq, interleaved, begin))
    old = keys.format.decode(BACKEND.gather_rows(before, slots), 64)
    turn = rope_shift(inv_freq, interleaved=interleaved, rotary_begin=begin)
    turned = turn(0, old.float(), torch.from_numpy(offsets))
    seen = keys.format.decode(BACKEND.gather_rows(keys.array, slots), 64).float()
    # One rounding of the format: of the value itself, or of the largest of its group.
    step = {"f32": 1e-6, "f16": 1e-3, "bf16": 1e-2, "fp8_e4m3": 0.13, "q8_0": 0.01, "q4_0": 0.14}[name]
    groups = turned.unflatten(-1, (2, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 2, 32).flatten(-2)
    assert ((seen - turned).abs() <= step * groups).all()
    still = np.ones(28, bool)
    still[slots[offsets != 0]] = False
    kept = [BACKEND.gather_rows(a, np.flatnonzero(still)) for a in (before, keys.array)]
    assert torch.equal(kept[0].view(torch.uint8), kept[1].view(torch.uint8))


def test_shift_leaves_what_does_not_turn(isa: str) -> None:
    """Every code of fp8, NaN and subnormals among them, read and written again."""
    keys = storage("fp8_e4m3", 136)
    codes = torch.arange(256).to(torch.uint8).view(2, 128)
    rows = torch.cat((torch.zeros((2, 8), dtype=torch.uint8), codes), 1).view(keys.array.dtype)
    slots = np.array([5, 6])
    BACKEND.write_rows(keys.array, slots, rows[:, None].expand(2, 3, 136))
    before = keys.array.clone()
    CpuKernel().shift(keys, slots, np.array([3, 4]), Rotation(np.ones(4), False, 0))  # turns eight values
    assert torch.equal(keys.array[..., 8:].view(torch.uint8), before[..., 8:].view(torch.uint8))


def test_writes_that_do_not_fit_raise() -> None:
    keys, values = storage("f32", 64), storage("f32", 64)
    rows, slots = torch.zeros(2, 3, 64), np.array([0, 28])
    with pytest.raises(ValueError, match=r"slot 28 is outside the storage of 28 slots"):
        CpuKernel().put(keys, values, slots, rows, rows)
    with pytest.raises(ValueError, match=r"new values are torch.float32 \(2, 3, 32\); expected .* \(2, 3, 64\)"):
        CpuKernel().put(keys, values, np.array([0, 1]), rows, rows[..., :32])
    with pytest.raises(ValueError, match=r"new keys are float32 \(2, 3, 64\) \(numpy\)"):
        CpuKernel().put(keys, values, np.array([0, 1]), rows.numpy(), rows)
    with pytest.raises(ValueError, match=r"new keys are torch.float32 \(2, 3, 64\) \(meta\)"):
        CpuKernel().put(keys, values, np.array([0, 1]), rows.to("meta"), rows)
    with pytest.raises(ValueError, match=r"slots have shape \(1, 2\); expected one for each row"):
        CpuKernel().put(keys, values, np.array([[0, 1]]), rows, rows)
    for name, dim in (("bf16", 33), ("f16", 33), ("fp8_e4m3", 35), ("q8_0", 35), ("q4_0", 39)):
        stored_rows, long = storage(name, 32), torch.zeros(2, 3, dim)  # as many bytes as that, but for a rest
        with pytest.raises(ValueError, match=rf"new keys are .*{dim}\)"):
            CpuKernel().put(stored_rows, stored_rows, np.array([0, 1]), long, long)
    huge = Stored(torch.zeros(2, 3, 4, 4096), keys.format, 4096)
    with pytest.raises(ValueError, match="at most 1024"):
        CpuKernel().put(huge, huge, np.array([0, 1]), torch.zeros(2, 3, 4096), torch.zeros(2, 3, 4096))
    with pytest.raises(ValueError, match="slot -1 is outside"):
        CpuKernel().shift(keys, np.array([-1]), np.array([1]), Rotation(np.ones(32), False, 0))
    with pytest.raises(ValueError, match="1 slots, 2 offsets and 33 frequencies"):
        CpuKernel().shift(keys, np.array([1]), np.array([1, 2]), Rotation(np.ones(33), False, 0))
    on_meta = Stored(keys.array.to("meta"), keys.format, 64)
    with pytest.raises(ValueError, match=r"refuses: .* elsewhere"):
        CpuKernel().shift(on_meta, np.array([1]), np.array([1]), Rotation(np.ones(32), False, 0))


def test_where_there_is_nothing_nothing_is_done() -> None:
    cpu_build.build()
    for rows in (torch.zeros(2, 0, 32), torch.zeros(0, 3, 32)):
        stored_rows = Stored(torch.zeros(4, rows.shape[1], 16, 32), formats.create("f32", BACKEND), 32)
        slots = np.arange(len(rows))
        CpuKernel().put(stored_rows, stored_rows, slots, rows, rows)
        CpuKernel().shift(stored_rows, slots, slots + 1, Rotation(np.ones(4), False, 0))
        assert not stored_rows.array.any()
    for shape in ((4, 0), (0, 8)):
        x = torch.zeros(shape, dtype=torch.bfloat16)
        assert cpu_build.operators().rms_norm(x, x.new_zeros(shape[1]), 0.0, 1e-5, True).shape == shape


# --- the build --------------------------------------------------------------------------------------------------------


def test_a_build_is_found_again() -> None:
    first = cpu_build.build()
    assert first.path.is_file()
    again = cpu_build.build()
    assert (again.path, again.isa, again.seconds) == (first.path, first.isa, 0.0)


def test_the_same_build_in_another_file_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyTorch would abort. It happened to the second of two processes that had compiled at once."""
    first = cpu_build.build()
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path))
    for copied in (False, True):
        if copied:
            shutil.copytree(first.path.parent, tmp_path / "kernels" / first.path.parent.name)
        assert cpu_build.build() == first._replace(seconds=0.0)


def test_one_thread_builds_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Operators that two threads bring at once end the process."""
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KVCACHE_CFLAGS", "-DONE_THREAD_AT_A_TIME")
    could_begin = []

    def compile_beside_another(*_: object) -> None:
        with ThreadPoolExecutor(1) as other:
            could_begin.append(other.submit(cpu_build._lock.acquire, blocking=False).result())
        raise NotSupported("seen enough")

    monkeypatch.setattr(cpu_build, "_compile", compile_beside_another)
    with pytest.raises(NotSupported, match="seen enough"):
        cpu_build.build()
    assert could_begin == [False]


def test_unknown_isa_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_ISA", "sse9")
    with pytest.raises(ValueError, match="'sse9'; expected one of avx512, avx2, scalar"):
        cpu_build.build()


@pytest.mark.parametrize(
    ("family", "features", "expected"), [(25, "avx2 avx512f", True), (25, "avx2", False), (26, "avx2 avx512f", False)]
)
def test_lines_are_fetched_into_the_second_level_on_zen_4_alone(
    monkeypatch: pytest.MonkeyPatch, family: int, features: str, expected: bool
) -> None:
    cpu = f"vendor_id\t: AuthenticAMD; cpu family\t: {family}; model name\t: AMD EPYC; flags\t\t: fpu {features}"
    monkeypatch.setattr(cpu_build, "_cpu", lambda: cpu)
    assert ("-DKVCACHE_FETCH_SECOND" in cpu_build._flags("native")) is expected


def test_flags_and_sources_decide_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path))
    folders = {cpu_build._folder("native"), cpu_build._folder("avx2")}
    monkeypatch.setenv("KVCACHE_CFLAGS", "-DSOMETHING")
    folders.add(cpu_build._folder("native"))
    monkeypatch.setattr(cpu_build, "_cpu", lambda: "another CPU")
    folders.add(cpu_build._folder("native"))
    assert len(folders) == 4
    assert all(folder.parent == tmp_path / "kernels" for folder in folders)
    monkeypatch.delenv("KVCACHE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cpu_build._folder("native").parent == tmp_path / "xdg" / "kvcache" / "kernels"


def test_without_a_compiler_one_warning_and_a_refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(cpu_build, "_loaded", [])
    world = make_world(Shape(1, 1, 32, 32, 4), [decode(5)], seed=8)
    keys = stored("torch", world.keys, "f32", world.seen_slots)
    queries = array("torch", world.queries)
    with caplog.at_level(logging.WARNING, logger="kvcache"):
        for _ in range(3):
            assert "no C++ compiler ('no-such-compiler'" in str(CpuKernel().refusal(queries, keys, keys))
    (record,) = caplog.records
    assert "PyTorch's operators are used instead" in record.getMessage()
    with pytest.raises(ValueError, match="refuses: there is no C"):
        CpuKernel().shift(keys, np.array([1]), np.array([1]), Rotation(np.ones(16), False, 0))


def test_a_home_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NotSupported, match=r"cannot be put into .*file/kernels: .*; set KVCACHE_HOME"):
        cpu_build._compile("scalar", cpu_build._folder("scalar") / "kernel.so", verbose=False)


def test_a_damaged_build_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KVCACHE_CFLAGS", "-DDAMAGED")
    folder = cpu_build._folder("scalar")
    folder.mkdir(parents=True)
    (folder / f"{cpu_build._namespace(folder)}.so").write_bytes(b"half of it")
    with pytest.raises(NotSupported, match=rf"lies in {folder} cannot be loaded: .*too short; remove that folder"):
        cpu_build.build(isa="scalar")


def test_a_second_attempt_is_found_by_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def second(name: str, *_: object, build_directory: str, **__: object) -> None:
        (Path(build_directory) / f"{name}_v1.so").touch()  # as PyTorch calls it, within one process

    monkeypatch.setattr("torch.utils.cpp_extension.load", second)
    target = tmp_path / "kernels" / "cpu-scalar" / "kvcache_cpu_scalar.so"
    cpu_build._compile("scalar", target, verbose=False)
    assert list(target.parent.iterdir()) == [target]


def test_a_build_that_is_broken_off_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken_off(*_: object, build_directory: str, **__: object) -> None:
        (Path(build_directory) / "cpu.o").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.utils.cpp_extension.load", broken_off)
    with pytest.raises(KeyboardInterrupt):
        cpu_build._compile("scalar", tmp_path / "kernels" / "cpu-scalar" / "kernel.so", verbose=False)
    assert list((tmp_path / "kernels").iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("ninja") is None, reason="needs ninja")
def test_what_does_not_compile_says_so_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KVCACHE_CFLAGS", "--no-such-flag")
    with pytest.raises(NotSupported, match=r"could not be compiled: .*no-such-flag"):
        cpu_build.build()
    assert list((tmp_path / "kernels").iterdir()) == []


def filled_cache(name: str, *, block_size: int) -> CausalCache:
    """60 tokens of two sequences that share 32, in two layers of which one is not rotated; then 20 are removed."""
    turn = rope_shift({0: 10000.0 ** (-np.arange(16) / 16), 1: None})
    cache = CausalCache(Full(), shift=turn, block_size=block_size)
    cache.init("torch", name, max_sequences=2, capacity=96)
    rng = np.random.default_rng(12)

    def forward(sequence: int, begin: int, end: int) -> None:
        cache.start_forward(Batch(range(begin, end), [sequence] * (end - begin)))
        for layer in (0, 1):
            cache.set_layer(layer)
            rows = torch.from_numpy(rng.standard_normal((2, end - begin, 2, 32), dtype=np.float32)).to(torch.bfloat16)
            cache.put(rows[0], rows[1])

    forward(1, 0, 32)
    cache.copy_prefix(1, 2, 32)
    forward(2, 32, 60)
    cache.remove(2, 5, 25)
    forward(1, 32, 40)
    cache.check()
    return cache


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_cache_writes_through_the_kernel_as_through_pytorch(
    monkeypatch: pytest.MonkeyPatch, name: str, block_size: int
) -> None:
    monkeypatch.setenv("KVCACHE_KERNEL", "cpu")
    used = []
    for method in ("put", "shift"):
        original = getattr(CpuKernel, method)
        monkeypatch.setattr(
            CpuKernel, method, lambda *a, _m=method, _o=original, **k: (used.append(_m), _o(*a, **k))[1]
        )
    one = torch.ones(1, 1, 32)
    warm = Stored(torch.zeros(1, 1, 1, 32), formats.create("f32", BACKEND), 32)
    assert not isinstance(choose(one, warm, warm), str)  # attention has loaded the kernel
    through = filled_cache(name, block_size=block_size)
    assert used.count("put") == 6 and used.count("shift") == 1  # the layer that is not rotated is left alone
    monkeypatch.setenv("KVCACHE_KERNEL", "sdpa")
    plain = filled_cache(name, block_size=block_size)
    assert len(used) == 7
    for sequence, end in ((1, 40), (2, 40)):
        for layer in (0, 1):
            pairs = zip(through.sequence(sequence).views(layer), plain.sequence(sequence).views(layer), strict=True)
            seen = [(a, b) for a, b in pairs]
            values = [torch.cat([pair[i].values for pair in seen]).float() for i in (0, 1)]
            assert torch.equal(*values)
            keys = [torch.cat([pair[i].keys for pair in seen]).float() for i in (0, 1)]
            assert len(keys[0]) == end
            is_turned = sequence == 2 and layer == 0
            if not is_turned:
                assert torch.equal(*keys)
            step = {"f32": 1e-6, "f16": 1e-3, "bf16": 1e-2, "fp8_e4m3": 0.13, "q8_0": 0.01, "q4_0": 0.14}[name]
            assert ((keys[0] - keys[1]).abs() <= step * keys[1].abs().amax(-1, keepdim=True)).all()


def test_rows_that_the_kernel_does_not_take_are_written_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_KERNEL", "cpu")
    cache = CausalCache()
    cache.init("torch", "bf16", capacity=8)
    cache.start_forward(Batch([0, 1], [0, 0]))
    cache.set_layer(0)
    rows = torch.arange(64, dtype=torch.float64).view(2, 1, 32) / 3
    cache.put(rows, rows)
    assert torch.equal(cache.get().keys, rows.to(torch.bfloat16))
