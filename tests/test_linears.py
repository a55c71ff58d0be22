"""Linear layers of bf16 models: PyTorch's products by other operators, and a model that is as it was afterwards."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
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


@pytest.fixture(params=["ours", pytest.param("copies", marks=needs_bf16), "widened"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By operators of ours alone; and for all rows but one, as some CPUs have most, over packed copies and in f32."""
    monkeypatch.setattr(linears, "_packing_helps", lambda: request.param == "copies")
    monkeypatch.setattr(linears, "_widening_helps", lambda: request.param == "widened")
    monkeypatch.setattr(linears, "FEW_WITH_UNIT", 128 if request.param == "ours" else 1)
    monkeypatch.setattr(linears, "FEW", 32 if request.param == "ours" else 1)
    monkeypatch.setattr(linears, "FEW_BEFORE_WIDENED", 1)
    monkeypatch.setattr(linears, "WIDENED_ABOVE", 1)
    monkeypatch.setattr(linears, "WIDENED", 96 * 50)  # parts of the first layer, all of none
    monkeypatch.setattr(linears, "_most_rows", linears._most_rows.__wrapped__)
    return str(request.param)


# --- the operator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [640, 96, 100, 33, 7])
@pytest.mark.parametrize("num_out", [320, 70, 16, 1])
def test_few_rows_are_the_products_of_f32(isa: str, width: int, num_out: int) -> None:
    """Each row alone, in blocks and in lanes of the tile unit; weights that end anywhere; with a bias and without."""
    operators = cpu_build.operators()
    weight, bias = torch.randn((num_out, width)).bfloat16(), torch.randn(num_out).bfloat16()
    for rows in (1, 2, 3, 4, 5, 9, 14, 16, 17, 32, 33, 100):
        x = torch.randn((rows, width)).bfloat16()
        for added in (None, bias):
            got = operators.linear(x, weight, added)
            expected = torch.nn.functional.linear(x.float(), weight.float(), None if added is None else added.float())
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=1e-4 * width)


def test_operands_may_lie_anywhere(isa: str) -> None:
    operators = cpu_build.operators()
    x, weight = torch.randn((2, 5, 128)).bfloat16()[..., ::2], torch.randn((64, 48)).bfloat16().T
    bias = torch.randn(96).bfloat16()[::2]
    got = operators.linear(x, weight, bias)
    assert got.shape == (2, 5, 48)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=1e-2)


def test_without_rows_values_or_columns(isa: str) -> None:
    operators = cpu_build.operators()
    for rows, width, num_out in ((0, 8, 3), (2, 0, 3), (2, 8, 0)):
        got = operators.linear(torch.ones((rows, width)).bfloat16(), torch.ones((num_out, width)).bfloat16(), None)
        assert torch.equal(got, torch.full((rows, num_out), float(width)).bfloat16())


def test_nan_reaches_its_row_and_its_column_alone(isa: str) -> None:
    operators = cpu_build.operators()
    for rows in (3, 20):
        x, weight = torch.ones((rows, 64)).bfloat16(), torch.ones((70, 64)).bfloat16()
        x[1, 63], weight[66, 0], weight[5, 2] = float("nan"), float("nan"), float("inf")
        expected = torch.nn.functional.linear(x.float(), weight.float())
        torch.testing.assert_close(operators.linear(x, weight, None).float(), expected, equal_nan=True)


def test_threads_of_python_do_not_meet(isa: str) -> None:
    operators = cpu_build.operators()
    weight = torch.randn((320, 640)).bfloat16()
    inputs = [torch.randn((rows, 640)).bfloat16() for rows in (1, 7, 30, 64)]
    alone = [operators.linear(x, weight, None) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            together = threads.map(lambda x: operators.linear(x, weight, None), inputs)
            assert all(map(torch.equal, together, alone))


def test_what_does_not_fit_is_refused(isa: str) -> None:
    operators = cpu_build.operators()
    x, weight = torch.ones((2, 8)).bfloat16(), torch.ones((4, 8)).bfloat16()
    with pytest.raises(ValueError, match=r"rows are \[2, 7\] and weights are \[4, 8\]"):
        operators.linear(x[:, :7], weight, None)
    with pytest.raises(ValueError, match=r"the bias is \[1\] and weights are \[4, 8\]"):
        operators.linear(x, weight, torch.ones(1).bfloat16())
    with pytest.raises(ValueError, match="linear takes bfloat16 on the CPU, not Float on cpu"):
        operators.linear(x.float(), weight, None)


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


def test_the_last_of_several_gives_the_layers_back(way: str) -> None:
    model = two_layers()
    first, last = FastLinears(model), FastLinears(model)
    num_copies = len(linears._copies)
    assert first.num_bytes == last.num_bytes and num_copies == (2 if way == "copies" else 0)
    first.close()
    assert all("forward" in module.__dict__ for module in (model[0], model[2]))
    assert len(linears._copies) == num_copies
    last.close()
    assert not any("forward" in module.__dict__ for module in model) and not linears._copies


def test_a_weight_turned_in_place_is_another(way: str) -> None:
    layer = torch.nn.Linear(96, 96, bias=False, dtype=torch.bfloat16)
    x = torch.randn((20, 96)).bfloat16()
    fast = FastLinears(layer)
    layer.weight = torch.nn.Parameter(layer.weight.detach().t())
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight), rtol=1e-2, atol=1e-2)
    fast.close()


@needs_bf16
def test_a_copy_of_what_a_weight_was_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_packing_helps", lambda: True)
    model = two_layers()
    first = FastLinears(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    last = FastLinears(model)
    assert all(linears._copies[m.weight.data_ptr()].is_of(m.weight) for m in (model[0], model[2]))
    first.close()
    assert len(linears._copies) == 2
    last.close()
    assert not linears._copies


@pytest.mark.parametrize("rows", [1, 20])
def test_weights_are_used_as_they_are_now(rows: int, way: str) -> None:
    model = two_layers()
    fast = FastLinears(model)
    x = torch.randn((rows, 96)).bfloat16()
    with torch.inference_mode():
        once = model(x)
    with torch.no_grad():
        model[2].weight.mul_(2)
    with torch.inference_mode():
        torch.testing.assert_close(model(x).float(), 2 * once.float(), rtol=1e-2, atol=1e-2)
        for other in (torch.float32, torch.bfloat16):  # other memory, then perhaps the same again, for other weights
            model.to(other)
            expected = torch.nn.Sequential.forward(deepcopy(model), x.to(other))
            torch.testing.assert_close(model(x.to(other)).float(), expected.float(), rtol=1e-2, atol=1e-2)
    fast.close()


def test_models_made_in_inference_mode(way: str) -> None:
    with torch.inference_mode():
        model = two_layers()
        x = torch.randn((20, 96)).bfloat16()
        expected = model(x)
        fast = FastLinears(model)
        torch.testing.assert_close(model(x).float(), expected.float(), rtol=1e-2, atol=1e-2)
        fast.close()


def test_widened_products_are_rounded_once(way: str) -> None:
    if way != "widened":
        pytest.skip("these sum as their library does")
    for out, has_bias in ((160, True), (160, False), (40, True)):
        layer = torch.nn.Linear(96, out, bias=has_bias).bfloat16()
        x = torch.randn((2, 35, 96)).bfloat16()
        fast = FastLinears(layer)
        with torch.inference_mode():
            got, expected = layer(x), layer.float()(x.float())
        fast.close()
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 200])
def test_compiled_code_uses_them_too(rows: int, way: str) -> None:
    model = two_layers()
    x = torch.randn((rows, 96)).bfloat16()
    with torch.inference_mode():
        expected = model(x)
        fast = FastLinears(model)
        seen: list[str] = []

        def backend(graph: Any, _: Any) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        got = torch.compile(model, backend=backend)(x)
        fast.close()
    torch._dynamo.reset()
    assert sum("kvcache.linear" in name for name in seen) == 2
    torch.testing.assert_close(got.float(), expected.float(), rtol=1e-2, atol=1e-2)


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


class OwnLinear(torch.nn.Linear):
    """It may do anything."""


def test_what_is_not_bf16_or_not_plain_is_left_alone(way: str) -> None:
    turned = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    turned.weight = torch.nn.Parameter(torch.randn((8, 4)).bfloat16().T)
    mixed = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    mixed.bias = torch.nn.Parameter(torch.zeros(4))
    others = [two_layers(dtype=torch.float32)[0], OwnLinear(8, 4, dtype=torch.bfloat16), turned, mixed]
    for other in others:
        assert FastLinears(other).num_bytes == 0 and "forward" not in other.__dict__
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
