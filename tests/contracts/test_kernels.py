"""The contract of kernels. A kernel joins by one line in `KERNELS`.

The reference is compared with a naive table of all scores, every other kernel with the reference.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

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
from kvcache import kernels
from kvcache.formats import FORMATS
from kvcache.kernels import AttentionBatch, Kernel, Segment
from kvcache.kernels.reference import ReferenceKernel


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class Case(NamedTuple):
    """A kernel by name, and the arrays that it is given."""

    kernel: str
    backend: str


KERNELS = [
    Case("reference", "numpy"),
    *([Case("reference", "torch"), Case("cpu", "torch"), Case("sdpa", "torch")] if has("torch") else []),
    # Through Triton's interpreter where there is no GPU (see conftest.py).
    *([Case("triton", "torch" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")] if has("triton") else []),
    *([Case("reference", "mlx")] if has("mlx") else []),
]
DTYPES = {
    "cuda": ("f32", "f16", "bf16"),
    "numpy": ("f32", "f16"),
    "torch": ("f32", "f16", "bf16"),
    "mlx": ("f32", "f16", "bf16"),
}
# Of the queries. Against float64 over the same rounded inputs: f32 rounds the result and sums in f32; in f16 and bf16
# weights and results have 11 and 8 bits.
TOLERANCES = {"f32": 2e-6, "f16": 1e-2, "bf16": 1e-2}

SHAPES = {
    "one head": Shape(1, 1, 32, 32, 16),
    "grouped by 4, cells": Shape(2, 4, 64, 64, 1),
    "grouped by 8, contiguous": Shape(1, 8, 32, 32, 128),
    "values wider": Shape(2, 2, 32, 64, 16),
    "keys wider": Shape(2, 4, 96, 64, 4),
    "large heads": Shape(1, 4, 256, 256, 16),
    "odd heads": Shape(3, 1, 80, 80, 16),
}
BATCHES: dict[str, list[Sequence]] = {
    "one token": [decode(1)],
    "a decode": [decode(37)],
    "decodes, ragged": [decode(n) for n in (1, 16, 17, 40, 40, 9)],
    "decodes, equal lengths": [decode(33), decode(33), decode(33, first_position=64)],
    "a prompt": [prefill(40)],
    "a prompt's second chunk": [prefill(50, 20)],
    "prefill and decode": [decode(21), prefill(18), prefill(45, 7), decode(5), decode(21)],
    "sliding": [decode(40, window=8), prefill(60, 30, window=8), prefill(20, window=3)],
    "decodes, equal windows": [decode(n, window=8) for n in (33, 30, 29, 37)],
    "sliding, begun late": [decode(20, first_position=100, window=12), prefill(30, 9, first_position=64, window=7)],
    "chunked": [prefill(40, 30, chunk=16), decode(35, chunk=16), decode(33, chunk=16)],
    "not causal": [prefill(30, 12, is_causal=False), decode(9), Sequence(20, (3, 4, 11), is_causal=False, window=5)],
    "queries far apart": [Sequence(60, (2, 3, 30, 59), window=4)],
    "the same position twice": [Sequence(30, (7, 7, 29, 29))],
    "holes": [prefill(40, 12, holes=9), decode(31, holes=0), decode(20, window=6, holes=3)],
    "holes and no holes": [decode(33), prefill(25, 6, holes=5), prefill(16), decode(12, holes=4, window=4)],
    "nothing visible": [
        Sequence(20, (50, 51, 52, 19), window=6),
        Sequence(16, (5, 200), window=4, holes=2),
        Sequence(8, (100,), window=3),
        decode(9),
    ],
}


@pytest.fixture(params=KERNELS, ids=lambda case: f"{case.kernel}-{case.backend}")
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    if request.param.kernel == "triton":  # on the CPU it must be asked for by name
        monkeypatch.setenv("KVCACHE_KERNEL", "triton")
    return request.param


def kernel_named(name: str) -> Kernel:
    kernel = kernels._loaded.get(name) or kernels._load(name)
    assert isinstance(kernel, Kernel), kernel
    return kernel


def thin_out(case: Case, first: object, second: object, *choices: list[Any]) -> None:
    """Every second combination of two parameters is enough for an interpreter that takes 0.2 s for each."""
    if case.kernel == "triton" and case.backend == "torch" and (choices[0].index(first) + choices[1].index(second)) % 2:
        pytest.skip("every second combination through Triton's interpreter")


class Results(NamedTuple):
    seen: NDArray[np.float64]
    expected: NDArray[np.float64]


def attend(
    case: Case,
    world: World,
    *,
    dtype: str = "f32",
    formats: tuple[str, str] = ("f32", "f32"),
    softcap: float | None = None,
    sinks: NDArray[np.float32] | None = None,
) -> Results:
    """What the kernel gives, and what it should: by the reference, or by the naive table if it is the reference."""
    keys, values = (
        stored(case.backend, raw, name, world.seen_slots)
        for raw, name in zip((world.keys, world.values), formats, strict=True)
    )
    scale = world.shape.head_dim**-0.5 * 1.25
    queries = array(case.backend, world.queries, dtype)
    given_sinks = None if sinks is None else array(case.backend, sinks, dtype)
    kernel = kernel_named(case.kernel)
    assert kernel.refusal(queries, keys, values) is None
    out = kernel.attend(queries, keys, values, world.batch, scale=scale, softcap=softcap, sinks=given_sinks)
    exact = [to_numpy(queries), decoded(keys, world.seen_slots), decoded(values, world.seen_slots)]
    exact_sinks = None if given_sinks is None else to_numpy(given_sinks)
    if case.kernel == "reference":
        expected = naive(*exact, world.visible, scale=scale, softcap=softcap, sinks=exact_sinks)
    else:
        expected = ReferenceKernel().attend(
            exact[0],
            *(stored("numpy", part.astype(np.float32), "f32", world.seen_slots) for part in exact[1:]),
            world.batch,
            scale=scale,
            softcap=softcap,
            sinks=exact_sinks,
        )
    assert tuple(out.shape) == (*queries.shape[:2], world.shape.value_dim)
    assert out.dtype == queries.dtype
    return Results(to_numpy(out), expected)


def check(results: Results, tolerance: float = TOLERANCES["f32"]) -> None:
    assert np.isfinite(results.seen).all()
    scale = max(1.0, np.abs(results.expected).max())
    assert np.abs(results.seen - results.expected).max() <= tolerance * scale


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_layouts(case: Case, shape: Shape, sequences: list[Sequence]) -> None:
    thin_out(case, shape, sequences, list(SHAPES.values()), list(BATCHES.values()))
    check(attend(case, make_world(shape, sequences, seed=1)))


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(("softcap", "with_sinks"), [(3.0, False), (None, True), (5.0, True)])
def test_softcap_and_sinks(case: Case, sequences: list[Sequence], softcap: float | None, with_sinks: bool) -> None:
    thin_out(case, sequences, softcap, list(BATCHES.values()), [3.0, None, 5.0])
    shape = Shape(2, 4, 32, 32, 16)
    sinks = np.linspace(-2, 3, 8, dtype=np.float32) if with_sinks else None
    check(attend(case, make_world(shape, sequences, seed=2), softcap=softcap, sinks=sinks))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("batch", ["prefill and decode", "holes and no holes", "sliding"])
def test_formats(case: Case, name: str, batch: str) -> None:
    dtypes = DTYPES[case.backend]
    if case.kernel == "triton" and case.backend == "torch":  # each once is enough for an interpreter
        dtypes = {"prefill and decode": dtypes[:1], "holes and no holes": dtypes[1:2], "sliding": dtypes[2:]}[batch]
    for dtype in dtypes:
        world = rounded(make_world(Shape(2, 4, 64, 64, 16), BATCHES[batch], seed=3), dtype)
        # Where keys and values are narrower than f32 and the queries too, the computation may be as narrow.
        check(attend(case, world, dtype=dtype, formats=(name, name)), TOLERANCES[dtype])


@pytest.mark.parametrize("pair", [p for p in itertools.product(FORMATS, repeat=2) if p[0] != p[1]], ids="-".join)
def test_keys_and_values_of_different_formats(case: Case, pair: tuple[str, str]) -> None:
    world = make_world(Shape(2, 2, 32, 96, 4), BATCHES["prefill and decode"], seed=4)
    check(attend(case, world, formats=pair))
    check(attend(case, world, formats=pair, sinks=np.ones(4, np.float32)))


@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 1024])
def test_block_sizes_change_nothing(case: Case, block_size: int) -> None:
    check(attend(case, make_world(Shape(2, 4, 32, 32, block_size), BATCHES["prefill and decode"], seed=5)))
    check(attend(case, make_world(Shape(2, 4, 32, 32, block_size), BATCHES["sliding"], seed=5), softcap=4.0))


@pytest.mark.parametrize("seed", range(25))
def test_random_worlds(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    sequences = []
    for _ in range(rng.integers(1, 6)):
        num_slots, first = int(rng.integers(1, 90)), int(pick(0, 0, 7, 1000))
        num_queries = int(pick(1, 1, 2, rng.integers(1, num_slots + 1)))
        queries = tuple(int(q) for q in rng.integers(first, first + num_slots + 5, num_queries))
        holes = pick(None, None, int(rng.integers(0, num_slots)))
        kind = pick({}, {"window": int(rng.integers(1, 40))}, {"chunk": int(rng.integers(1, 40))})
        sequences.append(Sequence(num_slots, queries, first, is_causal=pick(True, True, False), holes=holes, **kind))
    shape = Shape(int(pick(1, 2, 3)), int(pick(1, 4, 8)), pick(32, 64), pick(32, 64), int(pick(1, 3, 16)))
    sinks = pick(None, rng.standard_normal(shape.num_heads * shape.group).astype(np.float32))
    dtype = pick(*DTYPES[case.backend])
    world = rounded(make_world(shape, sequences, seed), dtype)
    formats = (pick(*FORMATS), pick(*FORMATS))
    results = attend(case, world, dtype=dtype, formats=formats, softcap=pick(None, None, 3.0), sinks=sinks)
    check(results, TOLERANCES[dtype])


def test_a_long_prompt_in_tiles(case: Case) -> None:
    """Longer than the tiles of queries and of scores that kernels may cut it into."""
    if case.kernel == "reference":
        pytest.skip("the reference has no tiles")
    shape = Shape(1, 2, 32, 32, 16)
    sequences = [prefill(1500, 1300), prefill(1100, window=100), prefill(1000, 600, holes=100)]
    if case.kernel == "triton":  # its tiles are of 16 to 128 rows, and an interpreter may have to do it
        sequences = [prefill(300, 150), prefill(140, window=50), prefill(200, 90, holes=20)]
    world = make_world(shape, sequences, seed=6)
    queries, keys, values = (a.astype(np.float64) for a in (world.queries, world.keys, world.values))
    for softcap in (None, 3.0):
        seen = attend_only(case, world, softcap=softcap)
        expected = naive(queries, keys, values, world.visible, scale=32**-0.5, softcap=softcap)
        assert np.abs(seen - expected).max() < 2e-6 * max(1, np.abs(expected).max())


def attend_only(case: Case, world: World, softcap: float | None = None, batch: AttentionBatch | None = None) -> Any:
    keys, values = (stored(case.backend, raw, "f32", world.seen_slots) for raw in (world.keys, world.values))
    queries = array(case.backend, world.queries)
    scale = world.shape.head_dim**-0.5
    kernel = kernel_named(case.kernel)
    return to_numpy(kernel.attend(queries, keys, values, batch or world.batch, scale=scale, softcap=softcap))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of Triton's interpreter
@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("where", ["key", "value", "query", "infinite"])
def test_what_is_no_number_shows(case: Case, where: str, softcap: float | None) -> None:
    """A model that overflows must not seem healthy: who sees a NaN gives NaN, whatever else is in the tile."""
    if where == "infinite" and softcap is not None:
        pytest.skip("softcapping makes an infinite score a finite one")
    world = make_world(Shape(2, 4, 32, 32, 16), [decode(600), prefill(40, 20), decode(70)], seed=8)
    good = attend_only(case, world, softcap)
    bad, segments = {"key": world.keys, "value": world.values}.get(where, world.queries).copy(), world.batch.segments
    broken = np.zeros(good.shape, bool)
    for segment in segments[:2]:
        rows, block, offset = segment.rows, segment.block_table[30 // 16], 30 % 16
        sees = world.visible[rows, block * 16 + offset]
        if where == "key":
            bad[block, 1, offset, 3] = np.nan
            broken[rows[sees], 4:] = True
        elif where == "value":
            bad[block, 1, offset, 3] = np.nan
            broken[rows[sees], 4:, 3] = True
        else:
            head = rows[-1], 5
            bad[head] = np.nan if where == "query" else np.inf * np.sign(world.keys[block, 1, offset])
            broken[head] = True
    name = "queries" if where in ("query", "infinite") else f"{where}s"
    seen = attend_only(case, replace(world, **{name: bad}), softcap)
    assert np.isnan(seen[broken]).all()
    alone = segments[2].rows
    assert np.array_equal(seen[alone], good[alone])
    if name == "queries":
        assert np.array_equal(seen[~broken], good[~broken])


def test_sinks_of_another_model(case: Case) -> None:
    world = make_world(Shape(2, 4, 32, 32, 16), [decode(20)], seed=8)
    for count in (1, 7, 9):
        with pytest.raises(ValueError, match=rf"sinks have shape \({count},\); expected one for each of 8"):
            attend(case, world, sinks=np.ones(count, np.float32))


@pytest.mark.parametrize("softcap", [0.0, -3.0, float("inf"), float("nan")])
def test_a_softcap_is_positive(case: Case, softcap: float) -> None:
    world = make_world(Shape(2, 4, 32, 32, 16), [decode(20)], seed=8)
    with pytest.raises(ValueError, match=f"softcap is {softcap}; expected a finite number above 0, or None for none"):
        attend(case, world, softcap=softcap)


def test_queries_that_see_nothing_give_exact_zeros(case: Case) -> None:
    world = make_world(Shape(2, 2, 32, 48, 16), BATCHES["nothing visible"], seed=7)
    for sinks in (None, np.zeros(4, np.float32)):
        blind = ~world.visible.any(axis=1)
        assert blind.sum() >= 4
        assert (attend(case, world, sinks=sinks).seen[blind] == 0).all()
    everyone = make_world(Shape(), [Sequence(8, (100, 101), window=3)], seed=7)
    assert (attend(case, everyone).seen == 0).all()


def test_large_scores_do_not_overflow(case: Case) -> None:
    world = make_world(Shape(2, 2), [prefill(20, 5), decode(9)], seed=8)
    world = World(world.shape, world.keys * 60, world.values, world.queries * 60, world.batch, world.visible)
    for sinks in (None, np.full(4, 500, np.float32)):
        arrays = [stored(case.backend, raw, "f32", world.seen_slots) for raw in (world.keys, world.values)]
        given = None if sinks is None else array(case.backend, sinks)
        out = kernel_named(case.kernel).attend(
            array(case.backend, world.queries), *arrays, world.batch, scale=1.0, sinks=given
        )
        assert np.isfinite(to_numpy(out)).all()
        assert np.abs(to_numpy(out)).max() <= np.abs(world.values).max() * (1 + 1e-6)


def test_one_batch_serves_layers_of_different_content(case: Case) -> None:
    """What a kernel keeps of a batch is where things lie, never what lies there; and other batches are other plans."""
    first = make_world(Shape(2, 4), BATCHES["prefill and decode"], seed=9)
    second = make_world(Shape(2, 4), BATCHES["prefill and decode"], seed=9)
    other = World(first.shape, first.keys * -2, first.values + 3, first.queries, first.batch, first.visible)
    check(attend(case, first))
    check(attend(case, other))
    check(attend(case, second))
    for _ in range(3):  # batches die and their memory is used again
        check(attend(case, make_world(Shape(2, 4), BATCHES["sliding"], seed=10)))
        gc.collect()


def test_rows_in_any_order_give_the_same_rows(case: Case) -> None:
    world = make_world(Shape(2, 4), [prefill(20, 10)], seed=11, shuffle_rows=False)
    (segment,) = world.batch.segments
    backwards = Segment(
        segment.rows[::-1].copy(), segment.block_table, segment.num_slots, segment.first_position, segment.positions
    )
    batch = AttentionBatch([backwards], world.batch.query_begins, world.batch.query_ends, world.batch.block_size)
    assert np.abs(attend_only(case, world) - attend_only(case, world, batch=batch)).max() < 1e-6


@pytest.mark.parametrize(
    ("queries", "values_heads"), [((3, 3, 32), 2), ((3, 4, 16), 2), ((12, 32), 2), ((3, 4, 32), 1)]
)
def test_queries_that_do_not_fit_raise(case: Case, queries: tuple[int, ...], values_heads: int) -> None:
    world = make_world(Shape(2, 2), [prefill(3)], seed=12)
    keys = stored(case.backend, world.keys, "f32", world.seen_slots)
    values = stored(case.backend, world.values[:, :values_heads].copy(), "f32", world.seen_slots)
    with pytest.raises(ValueError, match=r"queries have shape .*expected queries \[T,Hq,D\]"):
        kernel_named(case.kernel).attend(
            array(case.backend, np.zeros(queries, np.float32)), keys, values, world.batch, scale=1.0
        )


# --- the choice -------------------------------------------------------------------------------------------------------


def arrays_of(backend: str) -> tuple[Any, Any, Any]:
    world = make_world(Shape(), [decode(3)], seed=13)
    parts = (stored(backend, raw, "f32", world.seen_slots) for raw in (world.keys, world.values))
    return (array(backend, world.queries), *parts)


def test_every_kernel_is_in_the_contract() -> None:
    if has("torch") and has("triton"):
        assert {case.kernel for case in KERNELS} == set(kernels.KERNELS)


def test_forced_by_the_environment(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_KERNEL", case.kernel)
    assert kernels.choose(*arrays_of(case.backend)).name == case.kernel


@pytest.mark.parametrize("backend", sorted({case.backend for case in KERNELS}))
def test_the_first_that_does_not_refuse(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arrays_of(backend)
    able = [case.kernel for case in KERNELS if case.backend == backend]
    if backend == "torch" and "triton" in able:
        able.remove("triton")  # unasked it takes a GPU's tensors only
    expected = next(name for name in kernels.KERNELS if name in able)
    monkeypatch.delenv("KVCACHE_KERNEL", raising=False)
    assert kernels.choose(*arrays).name == expected
    monkeypatch.setenv("KVCACHE_KERNEL", "")  # empty is unset
    assert kernels.choose(*arrays).name == expected


def test_unknown_names_raise_and_list_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_KERNEL", "flash")
    with pytest.raises(ValueError, match=r"'flash'; expected one of .*sdpa, reference"):
        kernels.choose(*arrays_of("numpy"))


def test_a_forced_kernel_that_refuses_raises_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_KERNEL", "sdpa")
    with pytest.raises(ValueError, match=r"'sdpa'.* refuses: it reads torch arrays and the cache holds numpy arrays"):
        kernels.choose(*arrays_of("numpy"))


@pytest.mark.skipif(not has("torch"), reason="needs torch")
def test_sdpa_refuses_queries_of_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_KERNEL", "sdpa")
    _, keys, values = arrays_of("torch")
    with pytest.raises(ValueError, match=r"queries are numpy\.ndarray"):
        kernels.choose(np.zeros((1, 2, 32), np.float32), keys, values)


def test_a_kernel_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = kernels._Entry("kvcache.kernels.not_there", "NotThere", None)
    monkeypatch.setitem(kernels._KERNELS, "missing", entry)
    monkeypatch.delitem(kernels._loaded, "missing", raising=False)
    monkeypatch.setenv("KVCACHE_KERNEL", "missing")
    with pytest.raises(ValueError, match=r"cannot be imported \(No module named 'kvcache.kernels.not_there'\)"):
        kernels.choose(*arrays_of("numpy"))
    kernels._loaded.pop("missing")


def test_choosing_for_numpy_arrays_imports_no_torch() -> None:
    program = (
        "import sys, numpy as np\n"
        "from kvcache import backends, formats, kernels\n"
        "fmt = formats.create('f32', backends.create('numpy'))\n"
        "stored = formats.Stored(np.zeros((1, 1, 4, 8), 'f4'), fmt, 8)\n"
        "assert kernels.choose(np.zeros((1, 1, 8), 'f4'), stored, stored).name == 'reference'\n"
        "assert not {'torch', 'mlx'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
