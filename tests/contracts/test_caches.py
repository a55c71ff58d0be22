"""What every `Cache` must do, whatever it holds: section 3 and 4 of the design. A new implementation joins by one line.

A *contender* knows how to make a cache and how to run a pass through it (which layers, which shapes); the suite knows
the rest. "Changes nothing" is compared by `picture`, which shows everything that can be seen from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvcache.backends
from arrays import to_backend, to_numpy
from kvcache import (
    Batch,
    Cache,
    CacheConfig,
    CausalCache,
    Chunked,
    EncoderCache,
    Full,
    HybridCache,
    Media,
    RecurrentCache,
    Sliding,
)
from kvcache.errors import KVCacheError

SIZES = {"max_sequences": 2, "capacity": 16, "max_batch": 8}
H, D, DV = 2, 4, 6


def token_rows(batch: Batch) -> tuple[Any, Any]:
    """One row per token."""
    return numbers(len(batch), H, D), numbers(len(batch), H, DV)


def sequence_rows(batch: Batch) -> tuple[Any, Any]:
    """One row per sequence: states."""
    count = len(set(batch.sequences))
    return numbers(count, 3, 4), numbers(count, H, D, D)


def media_rows(batch: Batch) -> tuple[Any, Any]:
    """Five encoder rows for the one medium."""
    return numbers(5, H, D), numbers(5, H, DV)


def numbers(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def torch_scalar(value: int) -> Any:
    return pytest.importorskip("torch").tensor(value)


@dataclass(frozen=True)
class Contender:
    """`layers`: which layers a pass puts; `rows`: what it puts; `has_media`: a medium stands at position 0."""

    make: Callable[[], Cache]
    layers: Sequence[int] = (0,)
    rows: Callable[[Batch], tuple[Any, Any]] = token_rows
    has_media: bool = False

    @property
    def is_causal(self) -> bool:
        return self.rows is token_rows

    def made(self, **sizes: int) -> Cache:
        cache = self.make()
        cache.init("numpy", "f32", **{**SIZES, **sizes})
        return cache

    def batch(self, positions: Sequence[int], sequences: Sequence[int]) -> Batch:
        media = [Media(i, f"image {s}", 5) for i, s in enumerate(sequences) if self.has_media and positions[i] == 0]
        return Batch(positions, sequences, media)

    def forward(self, cache: Cache, positions: Sequence[int], sequence: int) -> None:
        batch = self.batch(positions, [sequence] * len(positions))
        cache.start_forward(batch)
        for layer in self.layers:
            cache.set_layer(layer)
            if not self.has_media or batch.media:
                cache.put(*self.rows(batch))


CACHES = [
    pytest.param(Contender(CausalCache), id="full"),
    pytest.param(Contender(lambda: CausalCache(Full(), block_size=4), layers=(0, 5)), id="full, blocks"),
    pytest.param(Contender(lambda: CausalCache(Sliding(4))), id="sliding"),
    pytest.param(Contender(lambda: CausalCache(Sliding(4, memory=7), block_size=16)), id="sliding, memory, blocks"),
    pytest.param(Contender(lambda: CausalCache(Chunked(4), block_size=2)), id="chunked"),
    pytest.param(
        Contender(
            lambda: HybridCache(CausalCache(Sliding(4)), CausalCache(Full(), block_size=4), layer_types=[0, 1]),
            layers=(0, 1),
        ),
        id="hybrid",
    ),
    pytest.param(Contender(EncoderCache, rows=media_rows, has_media=True), id="encoder"),
    pytest.param(Contender(lambda: RecurrentCache(checkpoints=4), rows=sequence_rows), id="recurrent"),
]

pytestmark = pytest.mark.parametrize("contender", CACHES)


def picture(cache: Cache) -> list[Any]:
    """Everything observable of sequences 0 to 3, and the history of the pass under way if there is one."""
    seen: list[Any] = [repr(cache.usage())]
    for sequence in range(4):
        length = cache.sequence(sequence).seq_len
        seen += [length, [cache.can_resume(sequence, p) for p in range(length + 2)]]
    for layer in (0, 1):
        try:
            cache.set_layer(layer)
            seen += [None if array is None else to_numpy(array).tobytes() for array in cache.get()]
        except (ValueError, KVCacheError) as error:
            seen.append(str(error))
    cache.set_layer(0)
    return seen


def refused(cache: Cache, operation: Callable[[], object], *errors: type[Exception], match: str | None = None) -> None:
    """The operation raises one of these errors (`ValueError`) and changes nothing."""
    before = picture(cache)
    with pytest.raises(errors or ValueError, match=match) as raised:
        operation()
    assert len(str(raised.value)) > 10
    assert picture(cache) == before
    cache.check()


def every_operation(cache: Cache, contender: Contender) -> list[Callable[[], object]]:
    batch = contender.batch([0], [0])
    return [
        lambda: (cache.set_layer(0), cache.put(*contender.rows(batch))),
        lambda: (cache.set_layer(0), cache.get()),
        lambda: cache.start_forward(batch),
        lambda: cache.start_forward(batch, reserve=True),
        lambda: cache.copy_prefix(0, 1, 1),
        lambda: cache.can_resume(0, 0),
        lambda: cache.remove(0, 0),
        cache.usage,
        cache.check,
        lambda: cache.sequence(0).seq_len,
        lambda: cache.sequence(0).free(),
        lambda: cache.sequence(0).truncate(0),
    ]


# --- a cache's life ---------------------------------------------------------------------------------------------------


def test_nothing_works_before_init(contender: Contender) -> None:
    cache = contender.make()
    for operation in every_operation(cache, contender):
        with pytest.raises(ValueError, match="init"):
            operation()


def test_nothing_works_after_close(contender: Contender) -> None:
    cache = contender.made()
    contender.forward(cache, [0, 1], 0)
    cache.close()
    for operation in every_operation(cache, contender):
        with pytest.raises(ValueError, match="close"):
            operation()
    with pytest.raises(ValueError):
        cache.init("numpy", "f32", **SIZES)
    with pytest.raises(ValueError):
        cache.set_config(CacheConfig())


def test_views_made_before_close_are_closed_too(contender: Contender) -> None:
    cache = contender.made()
    contender.forward(cache, [0, 1], 0)
    view = cache.sequence(0)
    cache.close()
    for operation in (
        lambda: view.seq_len,
        lambda: view.max_seq_len,
        lambda: view.is_on_gpu,
        lambda: view.commit(0),
        lambda: view.truncate(0),
        view.free,
    ):
        with pytest.raises(ValueError, match="close"):
            operation()


def test_init_once(contender: Contender) -> None:
    cache = contender.made()
    contender.forward(cache, [0, 1], 0)
    refused(cache, lambda: cache.init("numpy", "f32", **SIZES))


def test_config_once_and_before_init(contender: Contender) -> None:
    cache = contender.make()
    cache.set_config(CacheConfig(padding=1))
    with pytest.raises(ValueError):
        cache.set_config(CacheConfig(padding=1))
    cache.init("numpy", "f32", **SIZES)
    refused(cache, lambda: cache.set_config(CacheConfig()))


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "cupy"},
        {"backend": None},
        {"dtype": "f64"},
        {"dtype": ("f32", "int3")},
        {"dtype": ("f32", "f32", "f32")},
        {"dtype": 16},
        {"capacity": None},
        {"capacity": 0},
        {"capacity": -4},
        {"capacity": "16"},
        {"capacity": 16.0},
        {"max_sequences": 0},
        {"max_batch": 0},
        {"max_batch": -1},
    ],
    ids=str,
)
def test_init_refuses_and_can_be_tried_again(contender: Contender, change: dict[str, Any]) -> None:
    cache = contender.make()
    arguments: dict[str, Any] = {"backend": "numpy", "dtype": "f32", **SIZES}
    with pytest.raises((ValueError, TypeError)):
        cache.init(**{**arguments, **change})
    with pytest.raises(ValueError, match="init"):
        cache.usage()
    cache.init(**arguments)
    contender.forward(cache, [0, 1], 0)
    assert cache.sequence(0).seq_len == 2


def test_capacity_too_small_for_one_batch(contender: Contender) -> None:
    if not contender.is_causal:
        pytest.skip("holds no pool of tokens")
    cache = contender.make()
    with pytest.raises(ValueError, match="capacity"):
        cache.init("numpy", "f32", max_sequences=1, capacity=4, max_batch=64)
    cache.init("numpy", "f32", **SIZES)


def test_capacity_is_required_and_the_rest_has_defaults(contender: Contender) -> None:
    cache = contender.make()
    with pytest.raises((ValueError, TypeError), match="capacity"):
        cache.init("numpy", "f32")
    cache.init("numpy", "f32", capacity=8)
    contender.forward(cache, list(range(8)), 0)
    assert cache.sequence(0).seq_len == 8 and cache.sequence(0).max_seq_len == 8


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "sequences"),
    [([], []), ([0, 1], [0]), ([0], [0, 0]), ([-1], [0]), ([0], [-1]), ([3, -2], [0, 0])],
    ids=str,
)
def test_a_bad_batch_changes_nothing(contender: Contender, positions: list[int], sequences: list[int]) -> None:
    cache = contender.made()
    contender.forward(cache, [0, 1, 2], 0)
    refused(cache, lambda: cache.start_forward(Batch(positions, sequences)))


@pytest.mark.parametrize("value", ["0", 1.5, None, True])
def test_positions_and_sequences_are_integers(contender: Contender, value: object) -> None:
    cache = contender.made()
    refused(cache, lambda: cache.start_forward(Batch([value], [0])), TypeError)
    refused(cache, lambda: cache.start_forward(Batch([0], [value])), TypeError)


def test_media_outside_the_batch(contender: Contender) -> None:
    cache = contender.made()
    refused(cache, lambda: cache.start_forward(Batch([0], [0], [Media(1, "cat")])))


def test_media_of_the_wrong_kind(contender: Contender) -> None:
    cache = contender.made()
    refused(cache, lambda: Media(0, [1]), TypeError, match=r"Media.key is \[1\]; expected something hashable")  # type: ignore[arg-type]
    wrong: Any = [("x",)]
    refused(cache, lambda: Batch([4], [1], media=wrong), TypeError, match=r"Batch.media has \('x',\); expected Media")
    for unlisted in (None, Media(0, "x")):
        refused(cache, lambda: Batch([4], [1], unlisted), TypeError, match="Batch.media is .*; expected Media")  # type: ignore[arg-type]  # noqa: B023


def test_an_oversized_batch_changes_nothing(contender: Contender) -> None:
    cache = contender.made(max_batch=4)
    contender.forward(cache, [0, 1, 2], 0)
    refused(cache, lambda: cache.start_forward(contender.batch(range(3, 8), [0] * 5)), match="max_batch")
    refused(cache, lambda: cache.start_forward(contender.batch(range(3, 8), [0] * 5), reserve=True), match="max_batch")
    contender.forward(cache, [3, 4, 5, 6], 0)


def test_numpy_integers_and_arrays_are_integers(contender: Contender) -> None:
    cache = contender.made()
    contender.forward(cache, np.arange(3).tolist(), 0)
    cache.start_forward(Batch(np.arange(3, 5), np.zeros(2, np.int32)))
    assert cache.sequence(0).seq_len == 5


INTEGERS = [np.int8, np.uint8, np.uint32, np.uint64, np.array, pytest.param(torch_scalar, id="torch")]


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_of_other_kinds_mean_what_they_say(contender: Contender, kind: Callable[[int], Any]) -> None:
    def answers(n: Callable[[int], Any]) -> list[Any]:
        cache = contender.made()
        contender.forward(cache, range(4), 0)
        contender.forward(cache, [4, 5], 0)
        cache.copy_prefix(n(0), n(1), n(4))
        contender.forward(cache, [4], 1)
        cache.remove(n(0), n(5), n(6))
        cache.sequence(n(1)).truncate(n(4))
        seen = [(s, p) for s in (0, 1) for p in range(7)]
        resumable = [(cache.can_resume(n(s), n(p)), cache.resume_point(n(s), n(p))) for s, p in seen]
        cache.check()
        return [*picture(cache), resumable]

    assert answers(kind) == answers(int)


@pytest.mark.parametrize("wrong", [7.0, "7", None, True, np.array([7, 8])], ids=str)
def test_sequences_are_named_by_integers(contender: Contender, wrong: Any) -> None:
    cache = contender.made()
    contender.forward(cache, [0, 1], 0)
    for operation in (
        lambda: cache.can_resume(wrong, 0),
        lambda: cache.resume_point(wrong, 2),
        lambda: cache.remove(wrong, 0),
        lambda: cache.copy_prefix(wrong, 0, 1),
        lambda: cache.copy_prefix(0, wrong, 1),
        lambda: cache.sequence(wrong),
    ):
        refused(cache, operation, TypeError, match="expected an integer")


# --- put, get ---------------------------------------------------------------------------------------------------------


def test_put_and_get_need_a_pass_and_a_put(contender: Contender) -> None:
    cache = contender.made()
    batch = contender.batch([0, 1], [0, 0])
    cache.set_layer(0)
    refused(cache, lambda: cache.put(*contender.rows(batch)))
    refused(cache, cache.get)
    refused(cache, lambda: cache.attend(numbers(2, 2 * H, D)), ValueError, KVCacheError)
    cache.start_forward(batch)
    if contender.rows is sequence_rows:
        assert cache.get()[:2] == (None, None), "no state yet: a model starts from nothing"
    else:
        refused(cache, cache.get)
    cache.put(*contender.rows(batch))
    cache.get()


def test_put_of_the_wrong_number_of_rows(contender: Contender) -> None:
    cache = contender.made()
    contender.forward(cache, [0, 1, 2], 0)
    cache.start_forward(contender.batch([0, 1], [1, 1]))
    keys, values = contender.rows(contender.batch([0, 1], [1, 1]))
    refused(cache, lambda: cache.put(keys[:-1], values))
    refused(cache, lambda: cache.put(np.concatenate([keys, keys]), np.concatenate([values, values])))
    cache.put(keys, values)


@pytest.mark.parametrize("wrong", ["text", object()], ids=["text", "object"])
def test_put_of_no_array(contender: Contender, wrong: object) -> None:
    cache = contender.made()
    cache.start_forward(contender.batch([0, 1], [0, 0]))
    cache.set_layer(0)
    _, values = contender.rows(contender.batch([0, 1], [0, 0]))
    refused(cache, lambda: cache.put(wrong, values), TypeError, ValueError)


def test_layers_are_counted_from_zero(contender: Contender) -> None:
    cache = contender.made()
    refused(cache, lambda: cache.set_layer(-1))
    refused(cache, lambda: cache.set_layer("0"), TypeError)  # type: ignore[arg-type]


# --- reserve ----------------------------------------------------------------------------------------------------------


def test_reserve_is_yes_or_no(contender: Contender) -> None:
    cache = contender.made()
    for wrong in ("no", None, 1):
        refused(cache, lambda: cache.start_forward(contender.batch([0], [0]), wrong), TypeError, match="reserve is")  # type: ignore[arg-type]  # noqa: B023


def test_reserve_changes_nothing(contender: Contender) -> None:
    cache = contender.made()
    contender.forward(cache, [0, 1, 2], 0)
    before = picture(cache)[:9]  # all but the history, which becomes the reserved pass's
    for sequence in (1, 0):  # which tokens the sequence has does not matter: nothing is stored
        batch = contender.batch([0, 1, 2, 3], [sequence] * 4)
        cache.start_forward(batch, reserve=True)
        for layer in contender.layers:
            cache.set_layer(layer)
            cache.put(*contender.rows(batch))
            cache.get()
        assert picture(cache)[:9] == before
    cache.check()
    contender.forward(cache, [3], 0)
    assert cache.sequence(0).seq_len == 4 and cache.sequence(1).seq_len == 0


def test_reserve_gives_the_largest_shapes(contender: Contender) -> None:
    if not contender.is_causal:
        pytest.skip("shapes that do not depend on what is stored")
    cache = contender.made()
    batch = contender.batch(range(8), [3] * 8)
    cache.start_forward(batch, reserve=True)
    worst = {}
    for layer in contender.layers:
        cache.set_layer(layer)
        cache.put(*contender.rows(batch))
        worst[layer] = cache.get()
    for first in range(0, 32, 8):
        contender.forward(cache, range(first, first + 8) if first < 16 else range(first - 16, first - 8), first // 16)
        for layer in contender.layers:
            cache.set_layer(layer)
            for array, largest in zip(cache.get(), worst[layer], strict=True):
                assert array.ndim == largest.ndim
                assert all(n <= m for n, m in zip(array.shape, largest.shape, strict=True)), (
                    array.shape,
                    largest.shape,
                )


# --- resume, copy, remove ---------------------------------------------------------------------------------------------


def test_strangers(contender: Contender) -> None:
    cache = contender.made()
    contender.forward(cache, [0, 1], 0)
    before = picture(cache)[:9]
    assert cache.can_resume(3, 0) and not cache.can_resume(3, 1)
    cache.remove(3, 0)
    cache.remove(3, 1, 2)
    cache.sequence(3).free()
    cache.copy_prefix(3, 3, 5)
    assert picture(cache)[:9] == before


def test_the_end_can_be_resumed_and_nothing_past_it(contender: Contender) -> None:
    cache = contender.made()
    for first in (0, 4, 8):
        contender.forward(cache, range(first, first + 4), 0)
        assert cache.can_resume(0, first + 4) and not cache.can_resume(0, first + 5) and cache.can_resume(0, 0)
        assert cache.sequence(0).seq_len == first + 4
    refused(cache, lambda: cache.can_resume(0, -1))


def test_copy_prefix(contender: Contender) -> None:
    cache = contender.made()
    contender.forward(cache, [0, 1, 2, 3], 0)
    contender.forward(cache, [4, 5], 0)
    cache.copy_prefix(0, 1, 6)
    assert cache.sequence(1).seq_len == 6 and cache.can_resume(1, 6)
    cache.copy_prefix(0, 2, 4)
    assert cache.sequence(2).seq_len == 4 and cache.can_resume(2, 4)
    contender.forward(cache, [4], 2)
    assert cache.sequence(2).seq_len == 5 and cache.sequence(0).seq_len == 6
    cache.copy_prefix(9, 0, 3)  # an unknown source empties
    assert cache.sequence(0).seq_len == 0 and not cache.can_resume(0, 1)
    assert cache.sequence(1).seq_len == 6
    refused(cache, lambda: cache.copy_prefix(1, 2, -1))
    cache.copy_prefix(1, 2, 0)
    assert cache.sequence(2).seq_len == 0


def test_remove(contender: Contender) -> None:
    cache = contender.made()
    contender.forward(cache, [0, 1, 2, 3], 0)
    contender.forward(cache, [4, 5], 0)
    cache.copy_prefix(0, 1, 6)
    refused(cache, lambda: cache.remove(0, -1))
    refused(cache, lambda: cache.remove(0, 3, 2))
    refused(cache, lambda: cache.remove(0, 1.5), TypeError)  # type: ignore[arg-type]
    cache.remove(0, 6)
    cache.remove(0, 2, 2)
    assert cache.sequence(0).seq_len == 6
    cache.remove(0, 4)
    assert cache.sequence(0).seq_len == 4 and cache.can_resume(0, 4)
    cache.remove(0, 0)
    assert cache.sequence(0).seq_len == 0 and not cache.can_resume(0, 1)
    assert cache.sequence(1).seq_len == 6 and cache.can_resume(1, 6)
    cache.sequence(1).free()
    assert cache.usage().num_tokens == 0
    assert cache.usage().num_free_blocks == cache.usage().num_blocks
    cache.check()


def test_a_hundred_lives_leave_no_trace(contender: Contender) -> None:
    cache = contender.made()
    sizes = []
    for _ in range(100):
        contender.forward(cache, [0, 1, 2, 3], 0)
        contender.forward(cache, [4, 5], 0)
        cache.copy_prefix(0, 1, 4)
        cache.remove(0, 4)
        cache.remove(0, 0)
        cache.remove(1, 0)
        cache.check()
        sizes.append((cache.usage().num_bytes, cache.usage().num_free_blocks))
    assert len(set(sizes)) == 1


# --- backends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_other_backends_and_backend_objects(contender: Contender, backend: str) -> None:
    pytest.importorskip({"torch": "torch", "mlx": "mlx.core"}[backend])
    histories = []
    for choice in ("numpy", backend, getattr(kvcache.backends, backend)()):
        cache = contender.make()
        cache.init(choice, "f32", **SIZES)
        batch = contender.batch([0, 1, 2], [0, 0, 0])
        cache.start_forward(batch)
        library = choice if choice == "numpy" else backend
        for layer in contender.layers:
            cache.set_layer(layer)
            cache.put(*(to_backend(library, array) for array in contender.rows(batch)))
            history = cache.get()
            assert library in type(history.keys).__module__
        histories.append([None if array is None else to_numpy(array) for array in history])
    for other in histories[1:]:
        for ours, theirs in zip(histories[0], other, strict=True):
            np.testing.assert_array_equal(ours, theirs)
