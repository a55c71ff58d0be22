"""Convolution and recurrent states of a pass: lent to the model, written back after it.

The contract of transformers is peculiar: with one new token a model changes the tensors that `get_conv_state` (and in
Mamba 2 `get_recurrent_state`) returned, in place, and tells nobody; with more tokens it calls `update_*`. Stored states
are immutable, because checkpoints and forks share them. So a pass is lent copies, `update_*` replaces what is lent, and
when the pass is over everything lent is put back:

    get_conv_state     RecurrentCache.get -> lent
    update_conv_state  lent = the last K columns of (lent | new);  answers (lent | new)
    write_back         RecurrentCache.put(lent)

While the past is being *recorded* (assisted decoding) the whole (lent | new) is kept until the next `crop`, which then
takes the K columns before the rejected tokens. Only layers without a recurrent state can do that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache.caches import RecurrentCache

__all__ = ["LentStates", "Recording", "recorded_before"]


class Recording(NamedTuple):
    """Everything a convolution saw in a pass: `inputs` [B,C,K + new], of which the kernel needs K."""

    inputs: Tensor
    kernel_size: int


@dataclass(slots=True)
class _Lent:
    conv: Tensor | None
    recurrent: Tensor | None


@final
class LentStates:
    """The states of one pass. `rows`: which rows of the batch have tokens in it (others are padding); `num_rows`: B."""

    def __init__(self, cache: RecurrentCache, rows: Tensor | None, num_rows: int) -> None:
        self._cache = cache
        self._rows = rows
        self._num_rows = num_rows
        self._lent: dict[int, _Lent] = {}
        self.recordings: dict[int, Recording] = {}

    @property
    def has_recurrent(self) -> bool:
        """Whether a layer has a recurrent state, which cannot be taken back in part."""
        return any(lent.recurrent is not None for lent in self._lent.values())

    def conv(self, key: int) -> Tensor | None:
        """The convolution state [B,C,K] of layer `key`, to be changed in place; `None` before the first pass."""
        return self._load(key).conv

    def recurrent(self, key: int) -> Tensor | None:
        """The recurrent state [B,...] of layer `key`, to be changed in place; `None` before the first pass."""
        return self._load(key).recurrent

    def update_conv(self, key: int, inputs: Tensor, kernel_size: int, *, record: bool) -> Tensor:
        """Take in new inputs [B,C,n]; what the convolution has to run over [B,C,at least K]."""
        lent = self._load(key)
        seen = inputs if lent.conv is None else torch.cat([lent.conv.to(inputs), inputs], dim=-1)
        if seen.shape[-1] < kernel_size:
            seen = F.pad(seen, (kernel_size - seen.shape[-1], 0))
        # A copy: the last K columns as a view would keep a whole prompt's inputs alive.
        lent.conv = seen[..., -kernel_size:].clone()
        if record:
            self.recordings[key] = Recording(seen, kernel_size)
        return seen

    def update_recurrent(self, key: int, state: Tensor) -> Tensor:
        """Replace the recurrent state of layer `key`."""
        self._load(key).recurrent = state
        return state

    def write_back(self) -> None:
        """Put everything lent. Once, when the pass is over."""
        for key, lent in self._lent.items():
            states = [self._of_rows(state) for state in (lent.conv, lent.recurrent)]
            if any(state is not None for state in states):
                self._cache.set_layer(key)
                self._cache.put(*states)

    def _of_rows(self, state: Tensor | None) -> Tensor | None:
        return state if state is None or self._rows is None else state[self._rows]

    def _load(self, key: int) -> _Lent:
        if key not in self._lent:
            self._cache.set_layer(key)
            stored = self._cache.get()
            self._lent[key] = _Lent(self._placed(stored.keys), self._placed(stored.values))
        return self._lent[key]

    def _placed(self, stored: Tensor | None) -> Tensor | None:
        """Stored rows as a tensor [B,...]; rows of padding have zeros."""
        if stored is None or self._rows is None:
            return stored
        whole = stored.new_zeros((self._num_rows, *stored.shape[1:]))
        whole[self._rows] = stored
        return whole


def recorded_before(recording: Recording, num_rejected: int) -> Tensor:
    """The convolution state [B,C,K] as it was `num_rejected` tokens before the end of the recorded pass."""
    end = recording.inputs.shape[-1] - num_rejected
    state = recording.inputs[..., max(0, end - recording.kernel_size) : end]
    return F.pad(state, (recording.kernel_size - state.shape[-1], 0)).clone()
