"""The shift of rotary keys: what `CausalCache(shift=...)` calls when positions move.

RoPE (Su et al., 2021) turns pairs of a key's values by `position * inv_freq[i]`. A key that moves from p to p + d is
therefore its stored self, turned once more by `d * inv_freq[i]`: nothing else about the model is needed. Whatever was
multiplied into the key besides the angle (YaRN's attention factor) is in it already, so norms do not change.

Which values form pair i of m, by layout, for a rotary part that begins at b:

| layout                                             | first of the pair | second of the pair |
|----------------------------------------------------|-------------------|--------------------|
| half-split (Llama, NeoX, most of transformers)     | b + i             | b + m + i          |
| interleaved (GPT-J, Llama 4's complex numbers)     | b + 2i            | b + 2i + 1         |

It is the layout of the *stored* key that counts. Angles are made in float64, because `d * inv_freq` in float32 is off
by 1e-3 after some ten thousand tokens; values are turned in float32 (float64 for float64 keys) and rounded once.
NumPy, PyTorch and MLX arrays are taken alike, and none of these libraries is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.kernels import Rotation
from kvcache.spec import Array, integer

__all__ = ["RopeShift", "rope_shift"]

Frequencies: TypeAlias = ArrayLike | Array


def rope_shift(
    inv_freq: Frequencies | Mapping[int, Frequencies | None],
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_begin: int = 0,
) -> RopeShift:
    """The function `shift(layer, keys [n,H,D], offsets [n]) -> keys [n,H,D]` for keys rotated with these frequencies.

    inv_freq: radians per position of each pair, [rotary_dim / 2]: a model's `rotary_emb.inv_freq`. Or a mapping from
        layer numbers to such arrays where layers differ (Gemma 3), `None` for a layer that is not rotated (NoPE).
    interleaved: how pairs lie in the stored key, see the table above.
    rotary_dim: values of a head that are rotated; `None`: twice the number of frequencies. The rest is left alone.
    rotary_begin: the first of them; other than 0 where the rotated part comes last (DeepSeek: `qk_nope_head_dim`).

    Raises `ValueError` for frequencies that are not one row of numbers, or not half as many as `rotary_dim`.
    """
    if rotary_dim is not None:
        rotary_dim = integer(rotary_dim, "rotary_dim", minimum=2)
    rotary_begin = integer(rotary_begin, "rotary_begin")
    if isinstance(inv_freq, Mapping):
        by_layer: dict[int, NDArray[np.float64] | None] = {
            layer: None if freqs is None else _frequencies(freqs, f"inv_freq[{layer!r}]", rotary_dim)
            for layer, freqs in inv_freq.items()
        }
        return RopeShift(by_layer, None, interleaved, rotary_begin)
    return RopeShift({}, _frequencies(inv_freq, "inv_freq", rotary_dim), interleaved, rotary_begin)


@final
class RopeShift:
    """Turns stored keys to other positions; made by `rope_shift`. Holds frequencies only, so one serves many caches."""

    def __init__(
        self,
        by_layer: Mapping[int, NDArray[np.float64] | None],
        every_layer: NDArray[np.float64] | None,
        interleaved: bool,
        rotary_begin: int,
    ) -> None:
        self._by_layer = by_layer
        self._every_layer = every_layer
        self._interleaved = interleaved
        self._rotary_begin = rotary_begin

    def __call__(self, layer: int, keys: Array, offsets: Array) -> Array:
        """Keys [n,H,D] turned by `offsets` [n] positions (negative: towards 0), in their own element type and device.

        Rows whose offset is 0 come back bit for bit. The argument is not written to. Cost: one pass over the keys.
        Raises `ValueError` for a layer without frequencies, for heads too small to hold the rotary part, and unless
        there is one offset per key; `TypeError` for fractional offsets or arrays of an unknown library.
        """
        inv_freq = self._of_layer(layer)
        rows = _offsets(offsets)
        if len(keys.shape) != 3 or keys.shape[0] != len(rows):
            raise ValueError(
                f"shift got keys of shape {tuple(keys.shape)} and {len(rows)} offsets; "
                f"expected keys [n,H,D] and n offsets"
            )
        if inv_freq is None or not rows.any():
            return keys
        self._check_room(layer, len(inv_freq), keys.shape[2])
        angles = (rows[:, None] * inv_freq)[:, None, :]
        return _rotated(keys, np.cos(angles), np.sin(angles), self._pairs(len(inv_freq)), rows == 0)

    def rotation(self, layer: int, head_dim: int) -> Rotation | None:
        """What a call for this layer and keys of `head_dim` would do to them; `None` for a layer that is not rotated.

        Raises `ValueError` as a call does.
        """
        inv_freq = self._of_layer(layer)
        if inv_freq is None:
            return None
        self._check_room(layer, len(inv_freq), head_dim)
        return Rotation(inv_freq, self._interleaved, self._rotary_begin)

    def _check_room(self, layer: int, num_pairs: int, head_dim: int) -> None:
        needed = self._rotary_begin + 2 * num_pairs
        if head_dim < needed:
            raise ValueError(
                f"layer {layer} rotates {2 * num_pairs} values from {self._rotary_begin} on, and its keys "
                f"have heads of {head_dim}; expected at least {needed}"
            )

    def _of_layer(self, layer: int) -> NDArray[np.float64] | None:
        if self._every_layer is not None:
            return self._every_layer
        if layer not in self._by_layer:
            raise ValueError(
                f"rope_shift has frequencies for layers {sorted(self._by_layer)} and was asked to shift layer {layer}; "
                f"give it an array, or None if the layer is not rotated"
            )
        return self._by_layer[layer]

    def _pairs(self, num_pairs: int) -> tuple[slice, slice]:
        """Where the first and the second values of all pairs lie in a head."""
        begin, middle, end = self._rotary_begin, self._rotary_begin + num_pairs, self._rotary_begin + 2 * num_pairs
        if self._interleaved:
            return slice(begin, end, 2), slice(begin + 1, end, 2)
        return slice(begin, middle), slice(middle, end)


def _frequencies(value: Frequencies, what: str, rotary_dim: int | None) -> NDArray[np.float64]:
    tolist: Callable[[], object] | None = getattr(value, "tolist", None)  # every array library has it, on any device
    try:
        freqs = np.asarray(value if tolist is None else tolist(), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is {value!r}; expected one row of numbers, radians per position") from error
    if freqs.ndim != 1 or not freqs.size or not np.isfinite(freqs).all():
        raise ValueError(f"{what} has shape {freqs.shape}; expected one row of finite numbers, radians per position")
    if rotary_dim is not None and rotary_dim != 2 * freqs.size:
        raise ValueError(
            f"{what} has {freqs.size} frequencies and rotary_dim is {rotary_dim}; expected rotary_dim / 2 frequencies, "
            f"one per rotated pair"
        )
    return freqs


def _offsets(offsets: Array) -> NDArray[np.int64]:
    rows = np.asarray(offsets if isinstance(offsets, (np.ndarray, list, tuple)) else offsets.tolist())
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise TypeError(f"shift got offsets {offsets!r}; expected one integer per key")
    return rows.astype(np.int64)


def _rotated(
    keys: Array,
    cos: NDArray[np.float64],
    sin: NDArray[np.float64],
    pairs: tuple[slice, slice],
    unmoved: NDArray[np.bool_],
) -> Array:
    """Keys [n,H,D] with `pairs` turned by the angles [n,1,m]; rows named by `unmoved` [n] as they came."""
    library: Any = sys.modules.get({"numpy": "numpy", "torch": "torch", "mlx": "mlx.core"}.get(_library(keys), ""))
    if library is None:
        raise TypeError(f"shift got keys of type {type(keys).__name__}; expected an array of NumPy, PyTorch or MLX")
    is_torch = library.__name__ == "torch"

    def like_keys(array: NDArray[Any]) -> Array:
        return library.asarray(array, device=keys.device) if is_torch else library.asarray(array)

    def cast(array: Array, dtype: Any) -> Array:
        return array.to(dtype) if is_torch else array.astype(dtype)

    precise = keys.dtype == library.float64
    work = keys if precise else cast(keys, library.float32)
    cosine, sine = (like_keys(a if precise else a.astype(np.float32)) for a in (cos, sin))
    first, second = work[..., pairs[0]], work[..., pairs[1]]
    turned = work + 0  # a copy, in every library
    turned[..., pairs[0]] = first * cosine - second * sine
    turned[..., pairs[1]] = first * sine + second * cosine
    result = cast(turned, keys.dtype)
    if unmoved.any():
        # Angle 0 would do but for signed zeros and NaN payloads; "exact" is meant to the bit.
        result = library.where(like_keys(unmoved[:, None, None]), keys, result)
    return result


def _library(array: Array) -> str:
    return type(array).__module__.partition(".")[0]
