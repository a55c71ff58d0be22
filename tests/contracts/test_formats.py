"""The contract of `kvcache.formats.Format`: every format over every backend.

A new backend joins by one line in `arrays.BACKENDS`, a new format by its line in `kvcache.formats.FORMATS`. Oracles:
the `gguf` package for q8_0 and q4_0, PyTorch for fp8_e4m3 and bf16, exact rational arithmetic for fp8's rounding.
"""

from __future__ import annotations

import importlib.util
import runpy
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from arrays import BACKENDS
from kvcache import backends, formats
from kvcache.backends import Backend
from kvcache.formats import FORMATS, Format

F32 = NDArray[np.float32]
LARGEST = np.finfo(np.float32).max
INPUTS = ("f32", "f16", "bf16")
"""Element types that rows arrive in, where the backend has them."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backends.create(request.param)


def encode(backend: Backend, name: str, rows: F32, dtype: str = "f32") -> Any:
    return formats.create(name, backend).encode(backend.cast(backend.from_numpy(rows, 0), dtype))


def bits(backend: Backend, name: str, rows: F32) -> Any:
    """Stored rows in NumPy; bf16 as u16 patterns everywhere."""
    stored = backend.to_numpy(encode(backend, name, rows))
    return stored.view(np.uint32) >> 16 if name == "bf16" and stored.dtype == np.float32 else stored


def decoded(backend: Backend, name: str, rows: F32, dtype: str = "f32") -> NDArray[Any]:
    form = formats.create(name, backend)
    return backend.to_numpy(form.decode(encode(backend, name, rows, dtype), rows.shape[-1]))


def as_read(backend: Backend, rows: F32, dtype: str) -> F32:
    """What rows are once they have arrived in `dtype`."""
    return backend.to_numpy(backend.cast(backend.from_numpy(rows, 0), dtype)).astype(np.float32)


# --- every format -----------------------------------------------------------------------------------------------------

RELATIVE_ERROR = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "fp8_e4m3": 2**-4} | {
    "q8_0": 0.5 / 127 + 2**-11,
    "q4_0": 1 / 8 + 2**-11,
}
"""Of the value (floats: half a last bit) or of the group's largest (q8_0, q4_0: half a step, and the scale's own error;
a q4_0 group reaches 7/8 of its largest value on the other side)."""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1, 32), (5, 2, 64), (3, 8, 128), (16, 1, 256), (0, 2, 64)])
def test_rows_survive_within_the_error_of_the_format(
    backend: Backend, rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> None:
    form = formats.create(name, backend)
    rows = rng.standard_normal(shape).astype(np.float32) + np.float32(0.1)
    stored = encode(backend, name, rows)
    assert tuple(stored.shape) == (*shape[:-1], form.row_width(shape[-1]))
    assert backend.dtype(stored) == form.storage_dtype
    read = form.decode(stored, shape[-1])
    assert tuple(read.shape) == shape
    assert backend.dtype(read) == (form.storage_dtype if form.is_native else "f32")
    groups = rows.reshape(-1, 32)
    scale = np.abs(groups).max(axis=1, keepdims=True) if name.startswith("q") else np.abs(groups)
    error = np.abs(backend.to_numpy(read).astype(np.float32).reshape(-1, 32) - groups)
    fixed = 2**-10 if name == "fp8_e4m3" else 0  # half a step of the lowest binade
    assert (error <= scale * np.float32(RELATIVE_ERROR[name] * 1.001) + fixed).all()


def test_names_say_what_is_stored(backend: Backend) -> None:
    expected = {"f32": "f32", "f16": "f16", "fp8_e4m3": "u8", "q8_0": "u8", "q4_0": "u8"}
    expected["bf16"] = "bf16" if "bf16" in backend.native else "u16"
    for name in FORMATS:
        form = formats.create(name, backend)
        assert form.name == name
        assert form.storage_dtype == expected[name]
        assert form.is_native == (name in backend.native)


@pytest.mark.parametrize("name", FORMATS)
def test_native_rows_are_stored_and_read_as_they_are(backend: Backend, name: str) -> None:
    form = formats.create(name, backend)
    if not form.is_native:
        pytest.skip("encoded")
    rows = backend.cast(backend.from_numpy(np.ones((2, 1, 32), np.float32), 0), name)
    assert form.encode(rows) is rows
    assert form.decode(rows, 32) is rows


@pytest.mark.parametrize("name", FORMATS)
def test_rows_to_encode_and_decode_may_be_views(backend: Backend, rng: np.random.Generator, name: str) -> None:
    """Heads first or last, every second token, and a slice of a wider row: as models hand them over."""
    form = formats.create(name, backend)
    wide = rng.standard_normal((4, 10, 96)).astype(np.float32)
    narrow = np.ascontiguousarray(wide.transpose(0, 2, 1))
    views: list[tuple[F32, Callable[[Any], Any], F32]] = [
        (narrow, lambda a: backend.permute(a, (0, 2, 1)), wide),
        (wide, lambda a: backend.permute(a, (1, 0, 2)), wide.transpose(1, 0, 2)),
        (wide, lambda a: a[::2], wide[::2]),
        (wide, lambda a: a[..., 32:], wide[..., 32:]),
        (wide, lambda a: a[1:, 3:7, :64], wide[1:, 3:7, :64]),
    ]
    for array, view, expected in views:
        rows = form.encode(view(backend.from_numpy(array, 0)))
        straight = encode(backend, name, np.ascontiguousarray(expected))
        assert np.array_equal(backend.to_numpy(rows), backend.to_numpy(straight))
        assert form.is_native or backend.name != "torch" or rows.is_contiguous()  # as torch's storage must be
    stored = encode(backend, name, wide)
    head_first = form.decode(backend.permute(stored, (1, 0, 2)), 96)
    expected = backend.to_numpy(form.decode(stored, 96))
    assert np.array_equal(backend.to_numpy(head_first), expected.transpose(1, 0, 2))
    assert np.array_equal(backend.to_numpy(form.decode(stored[1::2, 2:], 96)), expected[1::2, 2:])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_rows_pass_through_storage(backend: Backend, rng: np.random.Generator, name: str, block_size: int) -> None:
    form = formats.create(name, backend)
    rows = rng.standard_normal((12, 3, 64)).astype(np.float32)
    expected = decoded(backend, name, rows)
    storage = backend.zeros((16 // block_size, 3, block_size, form.row_width(64)), form.storage_dtype, 0)
    slots = rng.permutation(16)[:12]
    backend.write_rows(storage, slots, encode(backend, name, rows))
    assert np.array_equal(backend.to_numpy(form.decode(backend.gather_rows(storage, slots), 64)), expected)
    for i, slot in enumerate(slots):
        view = backend.view_rows(storage, int(slot), int(slot) + 1)
        assert np.array_equal(backend.to_numpy(form.decode(view, 64))[0], expected[i])


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_read_can_be_stored_again_unchanged(backend: Backend, rng: np.random.Generator, name: str) -> None:
    once = decoded(backend, name, (rng.standard_normal((32, 4, 64)) * 3).astype(np.float32))
    assert np.array_equal(decoded(backend, name, once.astype(np.float32)), once)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_are_zeros(backend: Backend, name: str) -> None:
    form = formats.create(name, backend)
    assert not decoded(backend, name, np.zeros((2, 3, 64), np.float32)).any()
    untouched = backend.zeros((2, 3, form.row_width(64)), form.storage_dtype, 0)
    assert not backend.to_numpy(form.decode(untouched, 64)).any()


@pytest.mark.parametrize("name", FORMATS)
def test_an_infinity_or_nan_stays_in_its_group(backend: Backend, name: str) -> None:
    for bad in (np.nan, np.inf, -np.inf, LARGEST, -LARGEST):
        rows = np.ones((2, 1, 64), np.float32)
        rows[1, 0, 40] = bad
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read = decoded(backend, name, rows).astype(np.float32)
        if np.isnan(bad):
            assert np.isnan(read[1, 0, 40])
        without = decoded(backend, name, np.ones((2, 1, 64), np.float32)).astype(np.float32)
        untouched = np.ones((2, 1, 64), bool)
        untouched[1, 0, slice(32, 64) if name.startswith("q") else 40] = False
        assert np.array_equal(read[untouched], without[untouched])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("other", BACKENDS[1:])
def test_backends_store_the_same_bits(rng: np.random.Generator, name: str, other: str) -> None:
    numpy = backends.numpy()
    for scale in (1e-6, 1.0, 300.0):
        rows = (rng.standard_normal((64, 4, 64)) * scale).astype(np.float32)
        assert np.array_equal(bits(backends.create(other), name, rows), bits(numpy, name, rows))


@pytest.mark.parametrize("name", FORMATS)
def test_f64_rows_are_taken_where_the_backend_has_them(backend: Backend, rng: np.random.Generator, name: str) -> None:
    if backend.name == "mlx":
        pytest.skip("MLX has no f64 on the GPU")
    rows = rng.standard_normal((4, 2, 64))
    stored = formats.create(name, backend).encode(backend.asarray(rows, 0, "keys"))
    assert np.array_equal(backend.to_numpy(stored), backend.to_numpy(encode(backend, name, rows.astype(np.float32))))


@pytest.mark.parametrize(
    ("name", "head_dim", "width"),
    [
        *[("f32", 80, 80), ("f16", 1, 1), ("bf16", 7, 7), ("fp8_e4m3", 80, 80)],
        *[("q8_0", 32, 34), ("q8_0", 64, 68), ("q8_0", 256, 272)],
        *[("q4_0", 32, 18), ("q4_0", 64, 36), ("q4_0", 256, 144)],
    ],
)
def test_row_width(backend: Backend, name: str, head_dim: int, width: int) -> None:
    assert formats.create(name, backend).row_width(head_dim) == width


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
@pytest.mark.parametrize("head_dim", [1, 16, 33, 80])
def test_rows_that_are_no_groups_are_refused(backend: Backend, name: str, head_dim: int) -> None:
    message = rf"head_dim is {head_dim}; {name} .*multiple of 32; take fp8_e4m3, bf16, f16 or f32"
    with pytest.raises(ValueError, match=message):
        formats.create(name, backend).row_width(head_dim)
    with pytest.raises(ValueError, match=message):
        encode(backend, name, np.ones((1, 1, head_dim), np.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_a_head_dim_of_nothing_is_refused(backend: Backend, name: str) -> None:
    with pytest.raises(ValueError, match="head_dim is 0"):
        formats.create(name, backend).row_width(0)
    with pytest.raises(TypeError, match=r"head_dim is 64\.0"):
        formats.create(name, backend).row_width(64.0)  # type: ignore[arg-type]


def test_unknown_names_are_refused(backend: Backend) -> None:
    for unknown in ("int8", "F32", "", "q5_0"):
        with pytest.raises(ValueError, match=f"format of keys and values is '{unknown}'; expected one of f32"):
            formats.create(unknown, backend)
        with pytest.raises(ValueError, match=f"format of keys and values is '{unknown}'"):
            formats.pair(("f32", unknown), backend)
    for no_pair in (("f32",), ("f32", "f16", "f32"), None, 8, {"f32", "f16"}):
        with pytest.raises(ValueError, match=r"or a pair \(key, value\)"):
            formats.pair(no_pair, backend)  # type: ignore[arg-type]


def test_keys_and_values_have_formats_of_their_own(backend: Backend) -> None:
    def names(dtype: Any) -> list[str]:
        return [form.name for form in formats.pair(dtype, backend)]

    assert names("f16") == ["f16", "f16"]
    assert names(("q8_0", "q4_0")) == names(["q8_0", "q4_0"]) == ["q8_0", "q4_0"]


# --- bf16 and fp8: rounding -------------------------------------------------------------------------------------------


def all_f16() -> F32:
    """Every f16 but NaN: all binades that fp8 has, with ties."""
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return values[~np.isnan(values)].astype(np.float32)


def patterns(rng: np.random.Generator) -> F32:
    """Random f32 patterns, and those about ties of bf16 (0x8000 below its last bit)."""
    upper = rng.integers(0, 2**16, 4096, dtype=np.uint32) << 16
    near_ties = np.concatenate([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = np.concatenate([near_ties, rng.integers(0, 2**32, 8192, dtype=np.uint32)]).astype(np.uint32)
    return values.view(np.float32)


def test_bf16_rounds_to_the_nearest_even_one(backend: Backend, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    rows = patterns(rng)
    rows = rows[~np.isnan(rows)]
    assert np.array_equal(
        bits(backend, "bf16", rows), torch.from_numpy(rows).bfloat16().view(torch.int16).numpy().view(np.uint16)
    )
    ties = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x00008000, 0x80000001], np.uint32)
    want = [0x3F80, 0x3F82, 0x3F80, 0x3F81, 0x7F80, 0x0000, 0x8000]
    assert bits(backend, "bf16", ties.view(np.float32)).tolist() == want


def test_bf16_keeps_every_bf16_and_every_nan(backend: Backend) -> None:
    every = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    finite = every[~np.isnan(every)]
    assert np.array_equal(decoded(backend, "bf16", finite).view(np.uint32), finite.view(np.uint32))
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(decoded(backend, "bf16", nans)).all()


def fp8_value(code: int) -> Fraction:
    """By the definition of OCP's E4M3: sign, four bits of exponent (bias 7), three of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    return -size if code & 128 else size


def test_fp8_reads_all_codes(backend: Backend) -> None:
    form = formats.create("fp8_e4m3", backend)
    read = backend.to_numpy(form.decode(backend.from_numpy(np.arange(256, dtype=np.uint8), 0), 256))
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert np.isnan(read[code])
        else:
            assert Fraction(float(read[code])) == fp8_value(code) and np.signbit(read[code]) == bool(code & 128)
    again = bits(backend, "fp8_e4m3", read)
    assert np.array_equal(again & 0x7F, np.arange(256) & 0x7F)
    assert np.array_equal(again[~np.isnan(read)], np.arange(256)[~np.isnan(read)])


def test_fp8_rounds_to_the_nearest_even_code(backend: Backend) -> None:
    """Between every two neighbours: the middle goes to the even code, a hair beside it to the nearer one."""
    values = [fp8_value(code) for code in range(0x7F)]
    rows, want = [], []
    for code in range(0x7E):
        middle = np.float32(float((values[code] + values[code + 1]) / 2))
        rows += [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
        want += [code + code % 2, code, code + 1]
    both = np.concatenate([np.array(rows, np.float32), -np.array(rows, np.float32)])
    assert bits(backend, "fp8_e4m3", both).tolist() == want + [code | 128 for code in want]


@pytest.mark.parametrize("value", [448.0, 448.1, 463.9, 464.0, 465.0, 500.0, 65504.0, LARGEST, np.inf])
def test_fp8_saturates(backend: Backend, value: float) -> None:
    rows = np.array([value, -value], np.float32)
    assert decoded(backend, "fp8_e4m3", rows).tolist() == [448, -448]
    for dtype in backend.native:
        assert decoded(backend, "fp8_e4m3", rows, dtype).tolist() == [448, -448]


def test_fp8_is_that_of_pytorch(backend: Backend, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    rows = np.concatenate([all_f16(), patterns(rng)])
    rows = rows[~np.isnan(rows)]
    expected = torch.from_numpy(rows).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(bits(backend, "fp8_e4m3", rows), expected)


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_nan_stays_nan_in_every_input(backend: Backend, name: str) -> None:
    for dtype in backend.native:
        assert np.isnan(decoded(backend, name, np.array([np.nan, -np.nan], np.float32), dtype)).all()


# --- q8_0 and q4_0: ggml, to the bit ----------------------------------------------------------------------------------


def ggml(name: str, rows: F32) -> F32:
    """What the gguf package's quantiser makes of rows."""
    gguf = pytest.importorskip("gguf")
    kind = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}[name]
    with np.errstate(all="ignore"):
        result: F32 = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
    return result


def groups_of_every_kind(rng: np.random.Generator) -> dict[str, F32]:
    half_steps = np.arange(-254, 255, dtype=np.float32) / 2
    padded = np.concatenate([half_steps, np.full(-len(half_steps) % 31, 0.25, np.float32)]).reshape(-1, 31)
    below = np.nextafter(padded, np.float32(0))
    above = np.nextafter(padded, np.float32(np.inf))
    with_largest = [
        np.concatenate([np.full((len(part), 1), sign * 127, np.float32), part], axis=1)
        for part in (padded, below, above)
        for sign in (1, -1)
    ]
    opposite = rng.choice(np.array([-8, 8, 7.5, -7.5, 0.5, -0.5, 3, 0], np.float32), (64, 32))
    coarse = rng.integers(-4, 5, (256, 32)).astype(np.float32)
    outlier = rng.standard_normal((64, 32)).astype(np.float32)
    outlier[np.arange(64), rng.integers(0, 32, 64)] *= 1000
    return {
        "random": rng.standard_normal((512, 32)).astype(np.float32),
        "zero": np.stack([np.zeros(32, np.float32), -np.zeros(32, np.float32), np.eye(32, dtype=np.float32)[3]]),
        "halves": np.concatenate(with_largest),
        "largest of both signs": opposite,
        "many equal": coarse,
        "one outlier": outlier,
        "constant": np.repeat(np.linspace(-3, 3, 64, dtype=np.float32)[:, None], 32, axis=1),
    } | {f"of size {scale:g}": (rng.uniform(-1, 1, (64, 32)) * scale).astype(np.float32) for scale in SCALES}


SCALES = (1e-45, 1e-42, 1e-39, 1e-37, 1e-20, 1e-7, 1e-5, 1e-3, 1e3, 65504.0, 5e5, 8.3e6, 1e20, 3.4e38)
"""Down to where 1 / scale overflows and a scale is no f16 any more; up to where a scale is an infinite f16."""


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_rows_decode_to_what_ggml_gives(backend: Backend, rng: np.random.Generator, name: str, dtype: str) -> None:
    if dtype not in backend.native:
        pytest.skip("not an element type of this backend")
    for kind, groups in groups_of_every_kind(rng).items():
        rows = groups[: len(groups) // 2 * 2].reshape(-1, 1, 64) if len(groups) > 3 else groups[:, None]
        arrived = as_read(backend, rows, dtype)
        if not np.isfinite(arrived).all():  # too large for f16: nothing that ggml defines
            continue
        expected, got = ggml(name, arrived), decoded(backend, name, rows, dtype)
        assert np.array_equal(got, expected, equal_nan=True), kind
        # Where 1 / scale overflows, ggml converts infinity to an integer: zeros, and the sign of them is undefined.
        largest = np.abs(arrived.reshape(*arrived.shape[:-1], -1, 32)).max(axis=-1)
        if (largest[largest > 0] > 1e-35).all():
            same_sign = np.signbit(got) == np.signbit(expected)
            assert (same_sign | np.isnan(expected)).all(), kind


def test_the_layout_is_quants_then_scales(backend: Backend) -> None:
    rows = np.zeros((1, 1, 64), np.float32)
    rows[0, 0, :4] = [127, -127, 1, -1]
    rows[0, 0, 32:36] = [254, -2, 4, 0]
    q8 = bits(backend, "q8_0", rows)[0, 0]
    assert q8[:64].view(np.int8)[[0, 1, 2, 3, 4, 32, 33, 34]].tolist() == [127, -127, 1, -1, 0, 127, -1, 2]
    assert q8[64:].view("<f2").tolist() == [1, 2]
    rows[0, 0] = 0
    rows[0, 0, [0, 1, 16, 17]] = [-8, 1, 7, -1]
    rows[0, 0, [32, 63]] = [3, 16]
    q4 = bits(backend, "q4_0", rows)[0, 0]
    assert q4[:16].tolist() == [0xF0, 0x79] + [0x88] * 14  # value j low, value j + 16 high, eight added
    assert q4[16:32].tolist() == [0x87] + [0x88] * 14 + [0x08]  # 3 / -2 + 8.5 is cut to 7
    assert q4[32:].view("<f2").tolist() == [1, -2]


# --- PyTorch's own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_torch_formats_know_shapes_without_memory(name: str) -> None:
    torch = pytest.importorskip("torch")
    form = formats.create(name, backends.torch(device="meta"))
    stored = form.encode(torch.empty(3, 2, 64, device="meta", dtype=torch.bfloat16))
    assert stored.shape == (3, 2, form.row_width(64)) and stored.device.type == "meta"
    read = form.decode(stored, 64)
    assert read.shape == (3, 2, 64) and read.device.type == "meta"


@pytest.mark.parametrize("name", FORMATS)
def test_torch_formats_leave_their_input_alone(rng: np.random.Generator, name: str) -> None:
    torch = pytest.importorskip("torch")
    form: Format = formats.create(name, backends.torch())
    rows = torch.from_numpy(rng.standard_normal((4, 2, 64)).astype(np.float32))
    before = rows.clone()
    stored = form.encode(rows)
    stored_before = stored.clone()
    form.decode(stored, 64)
    assert torch.equal(rows, before) and torch.equal(stored, stored_before)


def test_torch_formats_loaded_under_another_default_device() -> None:
    """What they decode with is made when they are first used, perhaps while a model is built on "meta"."""
    torch = pytest.importorskip("torch")
    source = importlib.util.find_spec("kvcache.formats.torch")
    assert source and source.origin
    with torch.device("meta"):
        form = runpy.run_path(source.origin)["torch_format"]("fp8_e4m3")
    rows = torch.ones(2, 1, 4)
    assert torch.equal(form.decode(form.encode(rows), 4), rows)
