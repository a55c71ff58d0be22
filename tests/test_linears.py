"""Linear layers of bf16 models: PyTorch's products by other operators, and a model that is as it was afterwards."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from families import FAMILIES
from kvcache.hf import linears
from kvcache.hf.linears import FastLinears
from kvcache.hf.runner import Runner, Work
from kvcache.kernels import cpu_build

PACKS = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_bf16 = pytest.mark.skipif(not PACKS, reason="oneDNN has no bf16 products on this processor")


def two_layers(*, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    first, last = torch.nn.Linear(96, 160, bias=True), torch.nn.Linear(160, 96, bias=False)
    return torch.nn.Sequential(first, torch.nn.ReLU(), last).to(dtype)


@pytest.fixture(params=["ours", pytest.param("copies", marks=needs_bf16)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With operators of ours alone, and with packed copies for more rows, as some CPUs have them."""
    monkeypatch.setattr(linears, "_packing_helps", lambda: request.param == "copies")
    return str(request.param)


# --- the operator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [640, 96, 100, 33, 7])
@pytest.mark.parametrize("num_out", [320, 70, 16, 1])
def test_few_rows_are_the_products_of_f32(isa: str, width: int, num_out: int) -> None:
    """Each row alone, in blocks and in lanes of the tile unit; weights that end anywhere; with a bias and without."""
    operators = cpu_build.operators()
    weight, bias = torch.randn((num_out, width)).bfloat16(), torch.randn(num_out).bfloat16()
    for rows in (1, 2, 3, 4, 5, 16, 17, 40, 100):
        x = torch.randn((rows, width)).bfloat16()
        for added in (None, bias):
            got = operators.linear(x, weight, added)
            expected = torch.nn.functional.linear(x.float(), weight.float(), None if added is None else added.float())
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=1e-4 * width)


def test_rows_may_lie_anywhere(isa: str) -> None:
    operators = cpu_build.operators()
    weight = torch.randn((48, 64)).bfloat16()
    x = torch.randn((2, 5, 128)).bfloat16()[..., ::2]
    expected = torch.nn.functional.linear(x.float(), weight.float())
    assert operators.linear(x, weight, None).shape == (2, 5, 48)
    torch.testing.assert_close(operators.linear(x, weight, None).float(), expected, rtol=2**-8, atol=1e-2)
    columns = torch.randn((64, 48)).bfloat16().T
    torch.testing.assert_close(
        operators.linear(x, columns, None).float(),
        torch.nn.functional.linear(x.float(), columns.float()),
        rtol=2**-8,
        atol=1e-2,
    )
    assert operators.linear(x[:0], weight, None).shape == (0, 5, 48)


def test_nan_reaches_its_row_and_its_column_alone(isa: str) -> None:
    operators = cpu_build.operators()
    for rows in (3, 20):
        x, weight = torch.ones((rows, 64)).bfloat16(), torch.ones((70, 64)).bfloat16()
        x[1, 63], weight[66, 0], weight[5, 2] = float("nan"), float("nan"), float("inf")
        got = operators.linear(x, weight, None)
        assert got[1].isnan().all() and got[:, 66].isnan().all()
        assert (got[0, :66] == torch.tensor([64.0]).where(torch.arange(66) != 5, float("inf"))).all()


def test_what_does_not_fit_is_refused(isa: str) -> None:
    operators = cpu_build.operators()
    weight = torch.ones((4, 8)).bfloat16()
    with pytest.raises(ValueError, match=r"rows are \[2, 7\] and weights are \[4, 8\]"):
        operators.linear(torch.ones((2, 7)).bfloat16(), weight, None)
    with pytest.raises(ValueError, match="linear takes bfloat16"):
        operators.linear(torch.ones((2, 8)), weight, None)


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1, 96), (1, 1, 96), (1, 7, 96), (1, 33, 96), (2, 70, 96), (512, 96), (0, 96)], ids=str
)
def test_products_are_those_of_the_plain_weights(shape: tuple[int, ...], way: str) -> None:
    model = two_layers()
    x = torch.randn(shape).to(torch.bfloat16)
    with torch.inference_mode():
        expected = model(x)
        fast = FastLinears(model)
        assert fast.num_bytes == (2 * (96 * 160) * 2 if way == "copies" else 0)
        got = model(x)
        assert got.shape == expected.shape
        torch.testing.assert_close(got.float(), expected.float(), rtol=1e-2, atol=1e-2)
        strided = torch.randn((96, 5)).to(torch.bfloat16).T
        got = model(strided)
        fast.close()
        torch.testing.assert_close(got.float(), model(strided).float(), rtol=1e-2, atol=1e-2)


def test_layers_get_their_own_forward_back(way: str) -> None:
    model = two_layers()
    fast = FastLinears(model)
    assert all("forward" in module.__dict__ for module in (model[0], model[2]))
    fast.close()
    fast.close()
    assert fast.num_bytes == 0
    assert not any("forward" in module.__dict__ for module in model)


def test_weights_are_read_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_packing_helps", lambda: False)
    model = two_layers()
    FastLinears(model)
    x = torch.randn((3, 96)).bfloat16()
    with torch.inference_mode():
        once = model(x)
        model[2].weight.mul_(2)
        torch.testing.assert_close(model(x), 2 * once)
        model.float()
        assert model(x.float()).dtype == torch.float32


@needs_bf16
def test_weights_that_layers_share_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_packing_helps", lambda: True)
    model = two_layers()
    model[2] = torch.nn.Linear(96, 160, bias=False).to(torch.bfloat16)
    model[2].weight = model[0].weight
    fast = FastLinears(model)
    assert fast.num_bytes == 96 * 160 * 2
    fast.close()


def test_gradients_flow_through_the_plain_weights(way: str) -> None:
    model = two_layers()
    fast = FastLinears(model)
    model(torch.ones((1, 96), dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.grad is not None
    fast.close()


def test_what_is_not_bf16_or_not_plain_is_left_alone(way: str) -> None:
    model = two_layers(dtype=torch.float32)
    assert FastLinears(model).num_bytes == 0 and "forward" not in model[0].__dict__
    hooked = two_layers()
    plain = hooked[0].forward
    own: Any = lambda x: plain(2 * x)  # noqa: E731
    hooked[0].forward = own
    fast = FastLinears(hooked)
    assert hooked[0].forward is own
    fast.close()
    assert hooked[0].forward is own


@needs_bf16
def test_without_memory_for_copies_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = two_layers()
    monkeypatch.setattr(linears, "_packing_helps", lambda: True)
    monkeypatch.setattr(linears, "available_bytes", lambda _: 2 * (4 * 96 * 160) - 1)
    with caplog.at_level(logging.INFO, "kvcache"):
        fast = FastLinears(model)
    assert fast.num_bytes == 0
    assert "61440 bytes" in caplog.text
    fast.close()


def test_without_operators_of_ours_products_are_pytorchs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "operators", lambda: "no compiler")
    model = two_layers()
    x = torch.randn((2, 96)).bfloat16()
    with torch.inference_mode():
        expected = model(x)
        fast = FastLinears(model)
        torch.testing.assert_close(model(x).float(), expected.float(), rtol=1e-2, atol=1e-2)
        fast.close()


def test_a_runner_replaces_and_restores(way: str) -> None:
    model = FAMILIES["llama"].build().to(torch.bfloat16)
    works = [Work(0, 0, [5, 6, 7], num_logits=3)]
    with Runner(model, capacity=64, fast_layers=False) as runner:
        expected = runner.forward(works)
    with Runner(model, capacity=64) as runner:
        assert "forward" in model.lm_head.__dict__
        torch.testing.assert_close(runner.forward(works).float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert "forward" not in model.lm_head.__dict__
