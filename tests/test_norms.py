"""Norms in one operator: what the modules themselves compute, and modules that are as they were afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from families import FAMILIES
from kvcache.hf.norms import FusedNorms
from kvcache.hf.runner import Runner, Work
from kvcache.kernels import cpu_build


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def made(kind: Any, dim: int = 96, eps: float = 1e-6) -> torch.nn.Module:
    norm = kind(dim, eps=eps)
    norm.weight.data = torch.randn(dim, generator=torch.Generator().manual_seed(1))
    return norm.to(torch.bfloat16)


@pytest.mark.parametrize("isa", ["native", "avx512", "avx2", "scalar"])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("dim", [96, 100, 33])
def test_the_result_is_the_modules_own(kind: Any, dim: int, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_ISA", "" if isa == "native" else isa)
    if isinstance(cpu_build.operators(), str):
        pytest.skip(cpu_build.operators())
    norm = made(kind, dim, eps=1e-5)
    inputs = [
        torch.randn((7, dim)).bfloat16(),
        torch.randn((1, 5, 4, dim)).bfloat16().transpose(1, 2),  # as norms of queries and keys get them
        (torch.randn((600, 2 * dim)) * 1e-3).bfloat16()[:, ::2],
        torch.zeros((2, dim)).bfloat16(),
        torch.empty((0, dim)).bfloat16(),
    ]
    expected = [norm(x) for x in inputs]
    fused = FusedNorms(norm)
    assert len(fused) == 1
    for x, wanted in zip(inputs, expected, strict=True):
        got = norm(x)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=0.0)
        assert got.numel() == 0 or (got == wanted).float().mean() > 0.99
    fused.close()
    assert "forward" not in norm.__dict__


def test_nan_stays_in_its_row() -> None:
    norm = made(LlamaRMSNorm)
    x = torch.ones((3, 96)).bfloat16()
    x[1, 5] = float("nan")
    FusedNorms(norm)
    assert norm(x).isnan().all(1).tolist() == [False, True, False]


class HalvedRMSNorm(LlamaRMSNorm):
    """Has the name and the parts of a norm, and computes something else."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = super().forward(hidden_states) / 2
        return normed


class SometimesRMSNorm(LlamaRMSNorm):
    """Differs where rows are small: eps is elsewhere."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        own, self.variance_epsilon = self.variance_epsilon, 0.0
        normed: torch.Tensor = super().forward(hidden_states)
        self.variance_epsilon = own
        return normed


@pytest.mark.parametrize("kind", [HalvedRMSNorm, SometimesRMSNorm])
def test_a_norm_of_another_formula_is_left_alone(kind: Any) -> None:
    norm = made(kind)
    assert len(FusedNorms(norm)) == 0 and "forward" not in norm.__dict__


class UnhappyRMSNorm(LlamaRMSNorm):
    """Wants more than rows."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise TypeError("not these")


@pytest.mark.parametrize("kind", [partial(MambaRMSNormGated, group_size=96), Qwen3NextRMSNormGated, UnhappyRMSNorm])
def test_a_norm_of_more_than_its_rows_is_left_alone(kind: Any) -> None:
    norm = made(kind)
    assert len(FusedNorms(norm)) == 0 and "forward" not in norm.__dict__


def test_new_weights_are_used_at_once() -> None:
    norm = made(LlamaRMSNorm)
    x = torch.randn((3, 96)).bfloat16()
    fused = FusedNorms(norm)
    norm.weight.mul_(3)
    found = norm(x)
    fused.close()
    torch.testing.assert_close(found, norm(x), rtol=2**-7, atol=0.0)


def test_norms_that_are_not_bf16_or_hooked_are_left_alone() -> None:
    assert len(FusedNorms(LlamaRMSNorm(96))) == 0
    norm = made(LlamaRMSNorm)
    norm.__dict__["forward"] = lambda x: x
    assert len(FusedNorms(norm)) == 0 and "forward" in norm.__dict__
    assert len(FusedNorms(torch.nn.LayerNorm(8))) == 0


def test_with_gradients_and_other_types_the_modules_own_is_used() -> None:
    norm = made(LlamaRMSNorm)
    fused = FusedNorms(norm)
    assert norm(torch.ones((1, 96))).dtype == torch.float32
    with torch.enable_grad():
        assert norm(torch.ones((1, 96)).bfloat16().requires_grad_()).requires_grad
    fused.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "qwen3_next", "mamba2"])
def test_a_runner_answers_as_with_the_modules_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES[family].build().to(torch.bfloat16)
    works = [Work(0, 0, [3, 1, 4, 1, 5])]
    with Runner(model, capacity=64) as runner:
        assert sum("forward" in module.__dict__ for module in model.modules() if "RMSNorm" in type(module).__name__) > 2
        fused = runner.forward(works)
    assert not any("forward" in module.__dict__ for module in model.modules())
    monkeypatch.setattr("kvcache.hf.runner.FusedNorms", lambda _: FusedNorms(torch.nn.Identity()))
    with Runner(model, capacity=64) as runner:
        own = runner.forward(works)
    torch.testing.assert_close(fused.float(), own.float(), rtol=2e-2, atol=2e-2)
