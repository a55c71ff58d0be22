"""The sdpa kernel with tiles so small that every segment is cut, and its plans: how long they live, what they merge."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from kernel_cases import Sequence, Shape, array, decode, make_world, naive, prefill, stored, to_numpy

torch = pytest.importorskip("torch")

from kvcache import backends, formats  # noqa: E402
from kvcache.formats import Stored  # noqa: E402
from kvcache.kernels import AttentionBatch, Segment, sdpa, sdpa_plan  # noqa: E402  the last two import torch

BATCHES = {
    "a prompt": [prefill(40)],
    "chunks and decodes": [prefill(50, 20), decode(33), prefill(30)],
    "sliding": [prefill(60, 30, window=8), prefill(50, window=11)],
    "holes": [prefill(40, 25, holes=9)],
    "not causal": [prefill(30, 20, is_causal=False)],
}


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (3.0, False), (None, True)])
def test_tiny_tiles(
    sequences: list[Sequence], softcap: float | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa_plan, "TILE_QUERIES", 7)
    monkeypatch.setattr(sdpa, "TILE_SCORES", 1000)
    world = make_world(Shape(2, 4), sequences, seed=21)
    keys, values = (stored("torch", raw, "f32", world.seen_slots) for raw in (world.keys, world.values))
    sinks = np.linspace(-2, 3, 8, dtype=np.float32) if with_sinks else None
    out = sdpa.SdpaKernel().attend(
        array("torch", world.queries),
        keys,
        values,
        world.batch,
        scale=0.2,
        softcap=softcap,
        sinks=None if sinks is None else array("torch", sinks),
    )
    exact = (a.astype(np.float64) for a in (world.queries, world.keys, world.values))
    expected = naive(*exact, world.visible, scale=0.2, softcap=softcap, sinks=sinks)
    assert np.abs(to_numpy(out) - expected).max() < 2e-6 * max(1, np.abs(expected).max())


def plan_of(sequences: list[Sequence], block_size: int = 4) -> list[sdpa_plan.Tile]:
    world = make_world(Shape(block_size=block_size), sequences, seed=22, shuffle_rows=False)
    return sdpa_plan.plan(world.batch, torch.device("cpu"))


def test_equal_decodes_share_a_call() -> None:
    (tile,) = plan_of([decode(33), decode(33), decode(33, first_position=7)])
    assert (tile.num_segments, tile.length, tile.mask, tile.rows) == (3, 33, None, None)
    # Windows of equal length that begin elsewhere within a block cannot: here at 1, 1 and 2.
    assert sorted(
        t.num_segments for t in plan_of([decode(9, window=4), decode(13, window=4), decode(10, window=4)])
    ) == [
        1,
        2,
    ]


def test_a_prompt_from_its_beginning_needs_no_mask() -> None:
    (tile,) = plan_of([prefill(1200)])
    assert tile.is_causal and tile.mask is None and tile.rows is None


def test_a_tile_gathers_only_the_columns_it_sees() -> None:
    tiles = plan_of([prefill(2000, 1100, window=100)])
    assert [tile.length for tile in tiles] == [512 + 99, 512 + 99, 76 + 99]
    (tile,) = plan_of([Sequence(60, (3, 59), window=4)])
    assert tile.slots is not None and len(tile.slots) == 8


def test_blocks_in_a_row_are_not_copied() -> None:
    world = make_world(Shape(block_size=64), [decode(50)], seed=23)
    keys = stored("torch", world.keys, "f32", world.seen_slots)
    (tile,) = sdpa_plan.plan(world.batch, torch.device("cpu"))
    block = keys.array[tile.blocks[0]]
    assert sdpa._gather(keys, tile, 64).data_ptr() == block[:, tile.begin].data_ptr()


def test_only_blocks_that_are_seen_are_copied() -> None:
    """In a pool that no memory holds: all its blocks lie at one place."""
    pool = torch.randn(1, 2, 16, 32).expand(1 << 40, 2, 16, 32)
    keys = Stored(pool, formats.create("f32", backends.create("torch")), 32)
    segment = Segment(np.array([0]), np.array([9, 1 << 30, 4], np.int32), 40, 0, None)
    batch = AttentionBatch([segment], np.zeros(1, np.int32), np.array([40], np.int32), 16)
    (tile,) = sdpa_plan.plan(batch, torch.device("cpu"))
    assert torch.equal(sdpa._gather(keys, tile, 16), pool[0].repeat(1, 3, 1)[None, :, :40])


def test_a_batch_is_planned_once_and_plans_die_with_it() -> None:
    kernel = sdpa.SdpaKernel()
    world = make_world(Shape(), [prefill(9, 3)], seed=24)
    keys, values = (stored("torch", raw, "f32", world.seen_slots) for raw in (world.keys, world.values))
    plans = []
    for _ in range(3):
        kernel.attend(array("torch", world.queries), keys, values, world.batch, scale=1.0)
        plans.append(world.batch.plans[kernel][torch.device("cpu")])
    assert plans[0] is plans[1] is plans[2]
    parts = [getattr(tile, name) for tile in plans[0] for name in ("rows", "blocks", "slots", "mask")]
    alive = [weakref.ref(part) for part in parts if isinstance(part, torch.Tensor)]
    del world, plans, parts
    gc.collect()
    assert alive and not any(part() is not None for part in alive)
