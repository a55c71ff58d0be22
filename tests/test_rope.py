"""The shift of rotary keys, against rotating the raw keys at the new position in float64 (cases C1 and C2)."""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache.kernels.rope import rope_shift

LIBRARIES = ("numpy", "torch", "mlx")
DTYPES = {"float32": 1e-5, "float16": 2e-3}  # and the error that case C1 allows
D = 64


def frequencies(num_pairs: int, base: float = 10_000.0) -> NDArray[np.float64]:
    return base ** (-np.arange(num_pairs) / num_pairs)


def rotated(
    raw: NDArray[Any], positions: Any, inv_freq: NDArray[np.float64], *, interleaved: bool = False, begin: int = 0
) -> NDArray[np.float64]:
    """RoPE by complex numbers, in float64: raw keys [n,H,D] at `positions` [n]."""
    out = raw.astype(np.float64)
    num_pairs = len(inv_freq)
    index = np.arange(num_pairs)
    first, second = (2 * index, 2 * index + 1) if interleaved else (index, index + num_pairs)
    turn = np.exp(1j * np.asarray(positions, dtype=np.float64)[:, None] * inv_freq)[:, None, :]
    pairs = (out[..., begin + first] + 1j * out[..., begin + second]) * turn
    out[..., begin + first], out[..., begin + second] = pairs.real, pairs.imag
    return out


def array(library: str, value: NDArray[Any], dtype: str) -> Any:
    value = value.astype(np.float32)
    if library == "numpy":
        return value.astype(dtype)
    if library == "torch":
        torch = pytest.importorskip("torch")
        return torch.from_numpy(value).to(getattr(torch, dtype))
    mx = pytest.importorskip("mlx.core")
    return mx.array(value).astype(getattr(mx, dtype))


def to_numpy(value: Any) -> NDArray[np.float64]:
    if type(value).__module__ == "torch":
        return value.double().numpy()
    if type(value).__module__ == "mlx.core":
        import mlx.core as mx

        return np.array(value.astype(mx.float32)).astype(np.float64)
    return value.astype(np.float64)


@pytest.fixture
def raw(rng: np.random.Generator) -> NDArray[np.float64]:
    """Raw keys of 50 tokens and 3 heads, within [-1, 1] as normalised keys are: the errors allowed are absolute."""
    return rng.uniform(-1, 1, (50, 3, D)).astype(np.float32)


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("interleaved", "rotary_dim", "begin"),
    [(False, None, 0), (True, None, 0), (False, 16, 0), (True, 16, 0), (False, 32, 32), (True, 32, 32)],
)
def test_a_shift_equals_rotating_the_raw_keys_at_the_new_position(
    library: str, dtype: str, interleaved: bool, rotary_dim: int | None, begin: int, raw: NDArray[Any]
) -> None:
    inv_freq = frequencies((rotary_dim or D) // 2)
    rng = np.random.default_rng(1)
    positions = rng.integers(1000, 2000, 50)
    offsets = rng.integers(-900, 900, 50)
    stored = array(library, rotated(raw, positions, inv_freq, interleaved=interleaved, begin=begin), dtype)
    shift = rope_shift(inv_freq, interleaved=interleaved, rotary_dim=rotary_dim, rotary_begin=begin)
    shifted = shift(0, stored, offsets)
    assert shifted.dtype == stored.dtype and type(shifted) is type(stored)
    expected = rotated(raw, positions + offsets, inv_freq, interleaved=interleaved, begin=begin)
    assert np.abs(to_numpy(shifted) - expected).max() <= DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_shifts_equal_one(library: str, dtype: str, raw: NDArray[Any]) -> None:
    shift = rope_shift(frequencies(D // 2))
    keys = array(library, raw, dtype)
    once, twice = shift(0, keys, [-700] * 50), shift(0, shift(0, keys, [-300] * 50), [-400] * 50)
    assert np.abs(to_numpy(once) - to_numpy(twice)).max() <= DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles_stay_exact_a_million_tokens_away(library: str, dtype: str, raw: NDArray[Any]) -> None:
    inv_freq = frequencies(D // 2)
    shifted = rope_shift(inv_freq)(0, array(library, raw, dtype), [-1_000_003] * 50)
    assert np.abs(to_numpy(shifted) - rotated(raw, [-1_000_003] * 50, inv_freq)).max() <= DTYPES[dtype]


def yarn_frequencies(factor: float, num_pairs: int) -> NDArray[np.float64]:
    """YaRN's blend (Peng et al., 2023): fast pairs as they are, slow ones slowed by `factor`."""
    plain = frequencies(num_pairs)
    ramp = np.clip((np.arange(num_pairs) - num_pairs / 4) / (num_pairs / 2), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_unchanged_after_three_shifts_with_yarn(library: str, dtype: str, raw: NDArray[Any]) -> None:
    inv_freq = yarn_frequencies(32, D // 2)
    attention_factor = 0.1 * math.log(32) + 1  # in the stored key already; a shift must not multiply it in again
    keys = array(library, rotated(raw, np.arange(50), inv_freq) * attention_factor, dtype)
    shift = rope_shift(inv_freq)
    moved = shift(0, shift(0, shift(0, keys, [-5] * 50), [900] * 50), [-77] * 50)
    before, after = (np.linalg.norm(to_numpy(k), axis=-1) for k in (keys, moved))
    assert np.abs(after / before - 1).max() < {"float32": 1e-6, "float16": 1e-3}[dtype]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_with_offset_zero_are_bit_exact(library: str, dtype: str, raw: NDArray[Any]) -> None:
    raw[0, 0, :4] = (-0.0, 0.0, math.inf, math.nan)  # where "times one plus times zero" is not the identity
    keys = array(library, raw, dtype)
    offsets = np.arange(50) % 3
    shift = rope_shift(frequencies(D // 2))
    with np.errstate(invalid="ignore"):
        moved = shift(0, keys, offsets)
    still = np.flatnonzero(offsets == 0)

    def bits(value: Any) -> bytes:
        return to_numpy(value)[still].tobytes()

    assert bits(moved) == bits(keys)
    assert np.abs(to_numpy(moved)[1] - to_numpy(keys)[1]).max() > 0.1
    assert to_numpy(shift(0, keys, [0] * 50)).tobytes() == to_numpy(keys).tobytes()


def test_the_argument_is_not_written_to(library: str, raw: NDArray[Any]) -> None:
    keys = array(library, raw, "float32")
    rope_shift(frequencies(D // 2))(0, keys, np.arange(50))
    assert (to_numpy(keys) == raw).all()


@pytest.mark.parametrize("make", [list, tuple, np.asarray, lambda v: array("torch", np.asarray(v), "int32")])
def test_offsets_and_frequencies_come_as_any_array(make: Callable[[Any], Any], raw: NDArray[Any]) -> None:
    expected = rope_shift(frequencies(D // 2))(0, raw, np.arange(50))
    torch = pytest.importorskip("torch")
    shift = rope_shift(torch.from_numpy(frequencies(D // 2)))
    assert (shift(0, raw, make(list(range(50)))) == expected).all()


def test_layers_with_their_own_frequencies(raw: NDArray[Any]) -> None:
    local, distant = frequencies(D // 2), frequencies(D // 2, base=1e6)
    shift = rope_shift({0: local, 1: distant, 2: None})
    offsets = [9] * 50
    assert np.abs(shift(0, raw, offsets) - rotated(raw, offsets, local)).max() < 1e-5
    assert np.abs(shift(1, raw, offsets) - rotated(raw, offsets, distant)).max() < 1e-5
    assert (shift(2, raw, offsets) == raw).all()
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2\].*layer 3"):
        shift(3, raw, offsets)


def test_float64_keys_are_turned_in_float64(raw: NDArray[Any]) -> None:
    keys = raw.astype(np.float64)
    inv_freq = frequencies(D // 2)
    moved = rope_shift(inv_freq)(0, keys, [-12_345] * 50)
    assert moved.dtype == np.float64
    assert np.abs(moved - rotated(keys, [-12_345] * 50, inv_freq)).max() < 1e-12


def test_bfloat16_keys_are_rounded_once(raw: NDArray[Any]) -> None:
    torch = pytest.importorskip("torch")
    keys = torch.from_numpy(raw).bfloat16()
    inv_freq = frequencies(D // 2)
    moved = rope_shift(inv_freq)(0, keys, [-12_345] * 50)
    expected = torch.from_numpy(rotated(to_numpy(keys), [-12_345] * 50, inv_freq))
    assert (moved.double() - expected).abs().max() <= 2**-8  # half a unit in the last place at [1, 2)


def test_transformers_rotation_is_undone_and_redone() -> None:
    """The layout is that of transformers' Llama keys: its own rotation at p, shifted by d, is its rotation at p + d."""
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=D)
    rotary = llama.LlamaRotaryEmbedding(config)
    raw = torch.randn(1, 2, 10, D)

    def at(begin: int) -> Any:
        cos, sin = rotary(raw, torch.arange(begin, begin + 10)[None])
        return llama.apply_rotary_pos_emb(raw, raw, cos, sin)[1][0].transpose(0, 1)

    shift = rope_shift(rotary.inv_freq)
    assert (shift(0, at(40), [-33] * 10) - at(7)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("inv_freq", "options", "message"),
    [
        ([[1.0, 0.5]], {}, "expected one row"),
        ([], {}, "expected one row"),
        ([1.0, math.nan], {}, "finite"),
        ("fast", {}, "expected one row"),
        ([1.0, 0.5], {"rotary_dim": 8}, "2 frequencies and rotary_dim is 8"),
        ([1.0, 0.5], {"rotary_begin": -1}, "rotary_begin is -1"),
        ({3: [[1.0]]}, {}, r"inv_freq\[3\]"),
    ],
)
def test_wrong_frequencies(inv_freq: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_shift(inv_freq, **options)


def test_wrong_calls(raw: NDArray[Any]) -> None:
    shift = rope_shift(frequencies(D // 2))
    with pytest.raises(ValueError, match=r"\(50, 3, 64\) and 49 offsets"):
        shift(0, raw, [1] * 49)
    with pytest.raises(TypeError, match="one integer per key"):
        shift(0, raw, [0.5] * 50)
    with pytest.raises(ValueError, match=r"heads of 32; expected at least 64"):
        shift(0, raw[..., :32], [1] * 50)
    with pytest.raises(TypeError, match="expected an array of NumPy, PyTorch or MLX"):
        shift(0, memoryview(raw), [1] * 50)


def test_shifting_numpy_keys_needs_numpy_alone() -> None:
    program = (
        "import sys, numpy as np\n"
        "from kvcache.kernels.rope import rope_shift\n"
        "rope_shift([1.0, 0.5])(0, np.ones((2, 1, 4), 'f4'), [0, 3])\n"
        "assert not {'torch', 'mlx', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
