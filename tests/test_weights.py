"""Weights packed for the CPU: the same products, and a model that is as it was afterwards."""

from __future__ import annotations

import logging

import pytest
import torch

from families import FAMILIES
from kvcache.hf import weights
from kvcache.hf.runner import Runner, Work
from kvcache.hf.weights import PackedLinears

needs_bf16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN has no bf16 products on this processor",
)


def two_layers(*, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    first, last = torch.nn.Linear(96, 160, bias=True), torch.nn.Linear(160, 96, bias=False)
    return torch.nn.Sequential(first, torch.nn.ReLU(), last).to(dtype)


@needs_bf16
@pytest.mark.parametrize("shape", [(1, 96), (1, 1, 96), (1, 7, 96), (1, 33, 96), (2, 70, 96), (512, 96), (0, 96)])
def test_products_are_those_of_the_plain_weights(shape: tuple[int, ...]) -> None:
    model = two_layers()
    x = torch.randn(shape).to(torch.bfloat16)
    with torch.inference_mode():
        expected = model(x)
        packed = PackedLinears(model)
        assert packed.num_bytes == 2 * (96 * 160) * 2
        got = model(x)
        assert got.shape == expected.shape
        torch.testing.assert_close(got.float(), expected.float(), rtol=1e-2, atol=1e-2)
        strided = torch.randn((96, 5)).to(torch.bfloat16).T
        got = model(strided)
        packed.close()
        torch.testing.assert_close(got.float(), model(strided).float(), rtol=1e-2, atol=1e-2)


@needs_bf16
def test_layers_get_their_own_forward_back() -> None:
    model = two_layers()
    packed = PackedLinears(model)
    assert all("forward" in module.__dict__ for module in (model[0], model[2]))
    packed.close()
    packed.close()
    assert packed.num_bytes == 0
    assert not any("forward" in module.__dict__ for module in model)


@needs_bf16
def test_weights_that_layers_share_are_packed_once() -> None:
    model = two_layers()
    model[2] = torch.nn.Linear(96, 160, bias=False).to(torch.bfloat16)
    model[2].weight = model[0].weight
    packed = PackedLinears(model)
    assert packed.num_bytes == 96 * 160 * 2
    packed.close()


@needs_bf16
def test_gradients_flow_through_the_plain_weights() -> None:
    model = two_layers()
    packed = PackedLinears(model)
    model(torch.ones((1, 96), dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.grad is not None
    packed.close()


def test_what_is_not_bf16_or_not_plain_is_left_alone() -> None:
    assert PackedLinears(two_layers(dtype=torch.float32)).num_bytes == 0
    hooked = two_layers()
    plain = hooked[0].forward
    own = hooked[0].forward = lambda x: plain(2 * x)
    packed = PackedLinears(hooked)
    assert hooked[0].forward is own
    packed.close()
    assert hooked[0].forward is own


@needs_bf16
def test_without_memory_for_copies_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = two_layers()
    monkeypatch.setattr(weights, "available_bytes", lambda _: 2 * (4 * 96 * 160) - 1)
    with caplog.at_level(logging.INFO, "kvcache"):
        assert PackedLinears(model).num_bytes == 0
    assert "61440 bytes" in caplog.text
    assert "forward" not in model[0].__dict__


@needs_bf16
def test_a_runner_packs_and_restores() -> None:
    model = FAMILIES["llama"].build().to(torch.bfloat16)
    works = [Work(0, 0, [5, 6, 7], num_logits=3)]
    with Runner(model, capacity=64, packs_weights=False) as runner:
        expected = runner.forward(works)
    with Runner(model, capacity=64) as runner:
        assert "forward" in model.lm_head.__dict__
        torch.testing.assert_close(runner.forward(works).float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert "forward" not in model.lm_head.__dict__
