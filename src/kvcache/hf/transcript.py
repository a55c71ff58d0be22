"""The token ids of a cache's columns, [B, columns] on the host, and how far a new prompt agrees with them.

`UNKNOWN` stands for a column that no token id identifies: it came as an embedding, or with an image, or through a call
that nobody announced. It agrees with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

__all__ = ["UNKNOWN", "Agreement", "Transcript"]

UNKNOWN = -1


class Agreement(NamedTuple):
    """How a prompt row agrees with the best row of the cache: its first `num_tokens` columns are the same."""

    row: int
    num_tokens: int


@final
class Transcript:
    """Tokens [B, length]; appends in amortised O(B) per column.

    Never inference tensors: of two forwards over one cache only one may be in that mode.
    """

    def __init__(self) -> None:
        self._tokens = torch.empty((0, 0), dtype=torch.int64)
        self._length = 0

    @property
    def tokens(self) -> Tensor:
        """int64 [B, length], a view."""
        return self._tokens[:, : self._length]

    @torch.inference_mode(False)
    def append(self, tokens: Tensor | None, num_rows: int, num_tokens: int) -> None:
        """Add columns [B,n]; `None`: unknown ones. Rows are those of the first columns."""
        if not self._length:
            self._tokens = torch.empty((num_rows, max(64, 2 * num_tokens)), dtype=torch.int64)
        end = self._length + num_tokens
        if end > self._tokens.shape[1]:
            grown = torch.empty((num_rows, 2 * end), dtype=torch.int64)
            grown[:, : self._length] = self.tokens
            self._tokens = grown
        self._tokens[:, self._length : end] = UNKNOWN if tokens is None else tokens
        self._length = end

    def cut(self, length: int) -> None:
        """Keep the first `length` columns."""
        self._length = min(self._length, length)

    @torch.inference_mode(False)
    def select(self, rows: Sequence[int]) -> None:
        """Make these rows the rows."""
        self._tokens = self._tokens[torch.as_tensor(rows, dtype=torch.int64)]

    @torch.inference_mode(False)
    def copy(self) -> Transcript:
        """An independent transcript."""
        other = Transcript()
        other._tokens, other._length = self._tokens.clone(), self._length
        return other

    def agreement(self, prompt: Tensor) -> Agreement:
        """The row that agrees longest with a prompt [n]; the first of equals. O(B * columns)."""
        length = min(self._length, len(prompt))
        cached = self._tokens[:, :length]
        agrees = (cached == prompt[:length].cpu()) & (cached != UNKNOWN)  # prompts may hold -1: some mark images so
        counts = agrees.cumprod(dim=1).sum(dim=1)
        row = int(counts.argmax())
        return Agreement(row, int(counts[row]))
