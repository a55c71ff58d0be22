"""The contract of `kvcache.backends.Backend`. A new backend joins by one line in `arrays.BACKENDS`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from arrays import BACKENDS
from kvcache import backends
from kvcache.backends import Backend
from kvcache.spec import Device

ELEMENTS = {"f32": np.float32, "f16": np.float16, "u16": np.uint16, "u8": np.uint8}
Make = Callable[[Backend, tuple[int, ...], str], Any]
NUM_BLOCKS = 12
BLOCK_SIZES = (1, 2, 16)
HEADS_AND_WIDTHS = ((1, 8), (2, 5), (3, 34), (8, 16))
"""One head; rows that do not divide into 8 bytes; rows of q8_0; the ordinary case."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backends.create(request.param)


@pytest.fixture(params=BLOCK_SIZES)
def block_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=("alone", "first of two", "second of two"))
def make(request: pytest.FixtureRequest) -> Make:
    """Storage alone, or one of a pair."""
    if request.param == "alone":
        return lambda backend, shape, dtype: backend.zeros(shape, dtype, 0)
    which = int(request.param == "second of two")
    return lambda backend, shape, dtype: backend.zeros_pair(shape, dtype, 0)[which]


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Every bit pattern of the element type, NaN excepted (NumPy compares it with difficulty)."""
    raw = rng.integers(0, 256, (*shape, np.dtype(ELEMENTS[dtype]).itemsize), dtype=np.uint8)
    array = raw.view(ELEMENTS[dtype])[..., 0]
    return np.where(np.isnan(array), ELEMENTS[dtype](1), array)


def filled(
    backend: Backend, make: Make, rng: np.random.Generator, shape: tuple[int, ...], dtype: str
) -> tuple[Any, Any]:
    """Storage written slot by slot, and what it must contain."""
    num_blocks, heads, block_size, width = shape
    storage = make(backend, shape, dtype)
    rows = random_array(rng, (num_blocks * block_size, heads, width), dtype)
    slots = rng.permutation(num_blocks * block_size)
    backend.write_rows(storage, slots, backend.from_numpy(rows[slots], 0))
    return storage, rows


def expected_storage(rows: Any, shape: tuple[int, ...]) -> Any:
    num_blocks, heads, block_size, width = shape
    return rows.reshape(num_blocks, block_size, heads, width).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize(("heads", "width"), HEADS_AND_WIDTHS)
def test_rows_come_back_from_where_they_were_written(
    backend: Backend, make: Make, rng: np.random.Generator, block_size: int, heads: int, width: int, dtype: str
) -> None:
    shape = (NUM_BLOCKS, heads, block_size, width)
    storage, rows = filled(backend, make, rng, shape, dtype)
    assert np.array_equal(backend.to_numpy(storage), expected_storage(rows, shape))
    for num_rows in (0, 1, 7, NUM_BLOCKS * block_size):
        slots = rng.permutation(NUM_BLOCKS * block_size)[:num_rows]
        slots.flags.writeable = False  # a caller may keep its indices
        got = backend.to_numpy(backend.gather_rows(storage, slots))
        assert got.shape == (num_rows, heads, width) and got.dtype == ELEMENTS[dtype]
        assert np.array_equal(got, rows[slots])


def test_a_write_touches_its_slots_alone(
    backend: Backend, make: Make, rng: np.random.Generator, block_size: int
) -> None:
    shape = (NUM_BLOCKS, 2, block_size, 8)
    storage, rows = filled(backend, make, rng, shape, "u8")
    slots = np.array([3, NUM_BLOCKS * block_size - 1, 0])
    rows[slots] = random_array(rng, (3, 2, 8), "u8")
    backend.write_rows(storage, slots, backend.from_numpy(rows[slots], 0))
    assert np.array_equal(backend.to_numpy(storage), expected_storage(rows, shape))
    backend.write_rows(storage, slots[:0], backend.from_numpy(rows[:0], 0))
    assert np.array_equal(backend.to_numpy(storage), expected_storage(rows, shape))


@pytest.mark.parametrize("dtype", ["u8", "f16", "f32"])
def test_rows_to_write_may_be_views(
    backend: Backend, make: Make, rng: np.random.Generator, block_size: int, dtype: str
) -> None:
    """Heads first, as transformers hands them over, and a slice that begins at an odd place."""
    storage = make(backend, (NUM_BLOCKS, 2, block_size, 8), dtype)
    flat = random_array(rng, (2, 5, 8), dtype)
    slots = np.array([4, 1, 9, 0, 7])
    backend.write_rows(storage, slots, backend.permute(backend.from_numpy(flat, 0), (1, 0, 2)))
    assert np.array_equal(backend.to_numpy(backend.gather_rows(storage, slots)), flat.transpose(1, 0, 2))
    wide = random_array(rng, (5 * 2 * 8 + 1,), dtype)
    rows = backend.from_numpy(wide, 0)[1:].reshape((5, 2, 8))
    backend.write_rows(storage, slots, rows)
    assert np.array_equal(backend.to_numpy(backend.gather_rows(storage, slots)), wide[1:].reshape(5, 2, 8))


@pytest.mark.parametrize("dtype", ["u8", "f16", "f32"])
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("heads", [1, 2])
def test_rows_to_write_may_have_gaps(
    backend: Backend, make: Make, rng: np.random.Generator, block_size: int, num_rows: int, heads: int, dtype: str
) -> None:
    """Keys interleaved with values, and a slice of wider rows."""
    storage = make(backend, (NUM_BLOCKS, heads, block_size, 8), dtype)
    slots = np.array([4, 1, 9, 0, 7])[:num_rows]
    wide = random_array(rng, (num_rows, heads, 17), dtype)
    rows = backend.from_numpy(wide, 0)
    for part in (np.s_[..., :16:2], np.s_[..., 2:10]):
        backend.write_rows(storage, slots, rows[part])
        assert np.array_equal(backend.to_numpy(backend.gather_rows(storage, slots)), wide[part])


def test_gathered_rows_are_a_copy(backend: Backend, make: Make, rng: np.random.Generator, block_size: int) -> None:
    storage, rows = filled(backend, make, rng, (NUM_BLOCKS, 2, block_size, 8), "f32")
    slots = np.arange(4)
    before = backend.gather_rows(storage, slots)
    backend.write_rows(storage, slots, backend.from_numpy(rows[4:8], 0))
    assert np.array_equal(backend.to_numpy(before), rows[:4])


def view_ranges(block_size: int) -> Iterator[tuple[int, int]]:
    if block_size == 1:
        yield from ((0, 1), (3, 9), (0, NUM_BLOCKS), (4, 4))
    else:
        for first in (0, block_size, (NUM_BLOCKS - 1) * block_size):
            yield from ((first, first + block_size), (first + 1, first + block_size), (first, first + 1))


@pytest.mark.parametrize("dtype", ["f32", "u8"])
def test_views_show_rows_without_a_copy(
    backend: Backend, make: Make, rng: np.random.Generator, block_size: int, dtype: str
) -> None:
    storage, rows = filled(backend, make, rng, (NUM_BLOCKS, 3, block_size, 8), dtype)
    for begin, end in view_ranges(block_size):
        view = backend.view_rows(storage, begin, end)
        host = backend.to_numpy(view)
        assert tuple(view.shape) == (end - begin, 3, 8)
        assert np.array_equal(host, rows[begin:end])
        assert end == begin or np.shares_memory(host, backend.to_numpy(storage))


@pytest.mark.parametrize("dtype", [*ELEMENTS, "bf16"])
def test_whole_blocks_are_copied(
    backend: Backend, make: Make, rng: np.random.Generator, block_size: int, dtype: str
) -> None:
    if dtype == "bf16" and dtype not in backend.native:
        pytest.skip("stored as u16 here")
    shape = (NUM_BLOCKS, 2, block_size, 5)
    if dtype == "bf16":
        storage = make(backend, shape, dtype)
        rows = np.arange(np.prod(shape), dtype=np.float32).reshape(-1, 2, 5) % 256
        backend.write_rows(storage, np.arange(len(rows)), backend.cast(backend.from_numpy(rows, 0), dtype))
    else:
        storage, rows = filled(backend, make, rng, shape, dtype)
    before = expected_storage(rows, shape)
    backend.copy_blocks(storage, np.array([2, 5]), np.array([9, 0]))
    after = before.copy()
    after[[9, 0]] = before[[2, 5]]
    assert np.array_equal(backend.to_numpy(storage), after)


def test_blocks_with_gaps_are_refused_by_torch_and_never_misread(rng: np.random.Generator) -> None:
    backend = backends.create("torch")
    wide = backend.from_numpy(rng.standard_normal((3, 2, 4, 16)).astype(np.float32), 0)
    with pytest.raises(RuntimeError, match="view"):
        backend.gather_rows(wide[..., :8], np.array([1]))


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_two_of_a_pair_are_two(backend: Backend, rng: np.random.Generator, block_size: int, dtype: str) -> None:
    shape = (NUM_BLOCKS, 3, block_size, 34)
    pair = backend.zeros_pair(shape, dtype, 0)
    begins = [np.asarray(storage).ctypes.data for storage in pair]
    assert backend.name == "mlx" or begins[1] - begins[0] == pair[0][0].nbytes
    slots, sides = rng.permutation(NUM_BLOCKS * block_size), []
    for storage in pair:
        rows = random_array(rng, (len(slots), 3, 34), dtype)
        backend.write_rows(storage, slots, backend.from_numpy(rows[slots], 0))
        sides.append(expected_storage(rows, shape))
    for storage, side in zip(pair, sides, strict=True):
        assert tuple(storage.shape) == shape and backend.num_bytes(storage) == side.nbytes
        assert np.array_equal(backend.to_numpy(storage), side)
    backend.copy_blocks(pair[1], np.array([2]), np.array([9]))
    sides[1][9] = sides[1][2]
    assert all(np.array_equal(backend.to_numpy(storage), side) for storage, side in zip(pair, sides, strict=True))


def test_storage_begins_as_zeros_and_is_counted(backend: Backend) -> None:
    sizes = {"f32": 4, "f16": 2, "u16": 2, "u8": 1} | ({"bf16": 2} if "bf16" in backend.native else {})
    for dtype, size in sizes.items():
        array = backend.zeros((2, 3, 4, 5), dtype, 0)
        assert tuple(array.shape) == (2, 3, 4, 5)
        assert backend.dtype(array) == dtype
        assert not backend.to_numpy(array).any()
        assert backend.num_bytes(array) == 120 * size


def test_unknown_element_types_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="element type is 'i4'"):
        backend.zeros((1,), "i4", 0)
    with pytest.raises(ValueError, match="element type is 'u8'"):
        backend.cast(backend.zeros((1,), "f32", 0), "u8")


def test_native_element_types_are_kept(backend: Backend) -> None:
    assert {"f32", "f16"} <= backend.native <= {"f32", "f16", "bf16"}
    ones = backend.from_numpy(np.ones(3, np.float32), 0)
    for dtype in backend.native:
        array = backend.cast(ones, dtype)
        assert backend.dtype(array) == dtype
        assert backend.cast(array, dtype) is array
        assert backend.dtype(backend.asarray(array, 0, "keys")) == dtype
        assert np.array_equal(backend.to_numpy(array), np.ones(3))
        assert backend.to_numpy(array).dtype == (np.float16 if dtype == "f16" else np.float32)


def test_what_is_too_large_for_f16_is_infinite_without_a_warning(backend: Backend) -> None:
    array = backend.cast(backend.from_numpy(np.array([1e6, -1e6, 1], np.float32), 0), "f16")
    assert backend.to_numpy(array).tolist() == [np.inf, -np.inf, 1]


def test_arrays_are_taken_as_they_are(backend: Backend) -> None:
    own = backend.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3), 0)
    assert backend.asarray(own, 0, "keys") is own
    for dtype in (np.float32, np.float16):
        host = np.arange(6, dtype=dtype).reshape(2, 3)
        readonly = host.copy()
        readonly.flags.writeable = False
        for array in (host, host[:, ::-1], host[::2], host.T, readonly, host[:0]):
            got = backend.to_numpy(backend.asarray(array, 0, "keys"))
            assert got.dtype == dtype and np.array_equal(got, array)


def test_nested_lists_become_f32(backend: Backend) -> None:
    for value in ([[1, 2], [3, 4]], [[1.0, 2.0], [3.0, 4.0]], ((1, 2), (3, 4.0))):
        array = backend.asarray(value, 0, "keys")
        assert backend.dtype(array) == "f32"
        assert backend.to_numpy(array).tolist() == [[1, 2], [3, 4]]


class Foreign:
    """Looks like an array, and is of a library that nobody knows."""

    dtype = "float32"
    shape = (1,)

    def __array__(self, *_: object, **__: object) -> Any:
        return np.ones(1, np.float32)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(3),
        np.array([True]),
        np.array([1j]),
        np.array(["a"]),
        np.array([object()]),
        np.ones(2, ">f4"),
        [[1, 2], [3]],
        ["a"],
        [True, False],
        [None],
        "keys",
        b"keys",
        3.0,
        None,
        {"keys": 1},
        Foreign(),
    ],
    ids=lambda value: re.sub(" object at 0x.*", "", f"{type(value).__name__}:{value}")[:40].replace("\n", " "),
)
def test_what_is_no_floating_array_is_refused_by_name(backend: Backend, value: object) -> None:
    with pytest.raises(TypeError, match=r"the encoder's keys is .*; .*expected"):
        backend.asarray(value, 0, "the encoder's keys")


def test_integers_of_the_own_library_are_refused(backend: Backend) -> None:
    with pytest.raises(TypeError, match=r"keys is .*int"):
        backend.asarray(backend.from_numpy(np.arange(3), 0), 0, "keys")


@pytest.mark.parametrize("other", BACKENDS)
def test_arrays_of_another_library_are_refused(backend: Backend, other: str) -> None:
    if other in (backend.name, "numpy"):  # NumPy's arrays are everybody's
        return
    array = backends.create(other).zeros((2,), "f32", 0)
    with pytest.raises(TypeError, match=f"keys is {type(array).__module__}.*the {backend.name} backend"):
        backend.asarray(array, 0, "keys")


def test_from_numpy_copies(backend: Backend) -> None:
    source = np.ones(4, np.float32)
    array = backend.from_numpy(source, 0)
    source[:] = 2
    assert backend.to_numpy(array).tolist() == [1, 1, 1, 1]


def test_axes_are_permuted_and_arrays_joined(backend: Backend, rng: np.random.Generator) -> None:
    source = rng.standard_normal((2, 3, 4)).astype(np.float32)
    array = backend.from_numpy(source, 0)
    assert np.array_equal(backend.to_numpy(backend.permute(array, (1, 2, 0))), source.transpose(1, 2, 0))
    for axis in (0, 1, 2):
        joined = backend.concatenate([array, array], axis)
        assert np.array_equal(backend.to_numpy(joined), np.concatenate([source, source], axis))


def test_an_object_is_its_own_backend(backend: Backend) -> None:
    assert backends.create(backend) is backend
    assert isinstance(backend.device(0), Device)


def test_a_backend_can_be_made_twice(backend: Backend) -> None:
    """A submodule of the same name would have taken the function's place by now."""
    assert backends.create(backend.name).name == backend.name
    assert getattr(backends, backend.name)().name == backend.name


@pytest.mark.parametrize("name", ["jax", "Numpy", "", None, 3, ["numpy"]])
def test_unknown_backends_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="expected one of numpy, torch, mlx"):
        backends.create(name)


@pytest.mark.parametrize(("name", "package"), [("torch", "torch"), ("mlx", "mlx.core")])
def test_a_missing_package_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.delitem(sys.modules, f"kvcache.backends.{name}_backend", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{name} backend needs .*pip install 'kvcache\[{name}\]'"):
        backends.create(name)


def test_the_numpy_backend_imports_nothing_else() -> None:
    code = (
        "import sys; from kvcache import backends; backends.numpy(); "
        "print([name for name in ('torch', 'mlx') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- PyTorch's own: devices, gradients, modes -------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "", "cpu:x", 3.5])
def test_torch_refuses_unknown_devices_at_once(device: Any) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"device is .*expected a device"):
        backends.torch(device=device)
    with pytest.raises(ValueError, match=r"layer_devices\[2\] is .*expected a device"):
        backends.torch(layer_devices={2: device})


def test_torch_refuses_layers_that_are_no_numbers() -> None:
    pytest.importorskip("torch")
    with pytest.raises(TypeError, match="a key of layer_devices is 'first'"):
        backends.torch(layer_devices={"first": "cpu"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="a key of layer_devices is -1"):
        backends.torch(layer_devices={-1: "cpu"})


def test_torch_places_single_layers_elsewhere(rng: np.random.Generator) -> None:
    pytest.importorskip("torch")
    backend = backends.torch(layer_devices={1: "meta"})
    assert [backend.device(layer).name for layer in range(3)] == ["cpu", "meta", "cpu"]
    assert not any(backend.device(layer).is_gpu for layer in range(3))
    assert backend.asarray(np.ones(2, np.float32), 1, "keys").device.type == "meta"
    for block_size in BLOCK_SIZES:
        storage = backend.zeros((NUM_BLOCKS, 3, block_size, 8), "u8", 1)
        assert storage.device.type == "meta"
        rows = backend.from_numpy(random_array(rng, (4, 3, 8), "u8"), 1)
        backend.write_rows(storage, np.arange(4), rows)
        backend.copy_blocks(storage, np.array([0]), np.array([1]))
        assert backend.gather_rows(storage, np.arange(4)).shape == (4, 3, 8)


def test_torch_cuts_gradients_off() -> None:
    torch = pytest.importorskip("torch")
    keys = torch.ones(2, 3, requires_grad=True) * 2
    assert not backends.torch().asarray(keys, 0, "keys").requires_grad


def test_torch_storage_of_inference_mode_can_be_written_outside() -> None:
    torch = pytest.importorskip("torch")
    backend = backends.torch()
    with torch.inference_mode():
        storage = backend.zeros((4, 1, 1, 2), "f32", 0)
        backend.write_rows(storage, np.array([0]), torch.ones(1, 1, 2))
    backend.write_rows(storage, np.array([1]), torch.ones(1, 1, 2))
    assert storage.sum() == 4


def test_torch_uses_the_default_device_for_nothing() -> None:
    """A model built under `torch.device("meta")` must not take the cache with it."""
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        backend = backends.torch()
        storage = backend.zeros((4, 2, 2, 2), "f32", 0)
        backend.write_rows(storage, np.array([3]), backend.asarray(np.ones((1, 2, 2), np.float32), 0, "keys"))
        assert backend.gather_rows(storage, np.array([3])).device.type == "cpu"


@pytest.mark.parametrize("dtype", ["f32", "bf16", "u8"])
def test_large_torch_storage_is_zeros_of_its_own(dtype: str) -> None:
    """It lies in pages of its own, which must live as long as any view of them."""
    torch = pytest.importorskip("torch")
    backend = backends.torch()
    one, other = (backend.zeros((2**14, 4, 16, 8), dtype, 0) for _ in range(2))
    assert one.shape == (2**14, 4, 16, 8) and one.is_contiguous() and not one.is_inference()
    assert not one.any()
    row = backend.cast(torch.ones(1, 4, 8), "f32").to(one.dtype)
    backend.write_rows(one, np.array([2**18 - 1]), row)
    view = backend.view_rows(one, 2**18 - 1, 2**18)
    assert one.float().sum() == 32 and not other.any()
    del one
    assert view.float().sum() == 32


def test_mlx_writes_in_place() -> None:
    """Nearly always: MLX's own thread may hold on to the memory for a moment after it has answered, and then a copy is
    made."""
    pytest.importorskip("mlx.core")
    backend = backends.mlx()
    storage = backend.zeros((64, 2, 4, 8), "f32", 0)
    addresses = []
    for _ in range(32):
        backend.write_rows(storage, np.array([5, 77]), backend.from_numpy(np.ones((2, 2, 8), np.float32), 0))
        backend.copy_blocks(storage, np.array([1]), np.array([2]))
        addresses.append(backend.to_numpy(storage).__array_interface__["data"][0])
    num_moves = sum(one != other for one, other in pairwise(addresses))
    assert num_moves < 8


def test_mlx_views_outlive_the_next_write() -> None:
    pytest.importorskip("mlx.core")
    backend = backends.mlx()
    storage = backend.zeros((8, 2, 1, 8), "f32", 0)
    view = backend.view_rows(storage, 0, 4)
    backend.write_rows(storage, np.array([1]), backend.from_numpy(np.ones((1, 2, 8), np.float32), 0))
    assert not backend.to_numpy(view).any()
    assert backend.to_numpy(storage)[1].all()
