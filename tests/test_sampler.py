"""Logits to tokens, without an engine around it."""

from __future__ import annotations

import pytest
import torch

from kvcache.engine.sampler import greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_is_the_first_of_the_largest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn((6, 3000), generator=generator).to(dtype)  # bf16: many are equal
    rows[1] = -rows[1].abs() - 1  # all negative
    rows[2] = rows[2].clamp(max=0)  # zero is the largest
    rows[2, :2] = torch.tensor([-1.0, -0.0], dtype=dtype)  # and of the two zeros neither is larger
    rows[3] = -torch.inf
    rows[4, 77], rows[4, 99] = torch.inf, torch.inf
    expected = rows.float().numpy().argmax(-1).tolist()
    assert greedy(rows) == expected
    assert greedy(rows[:, ::2]) == rows[:, ::2].float().numpy().argmax(-1).tolist()
    assert [greedy(row[None]) for row in rows] == [[token] for token in expected]
