"""Norms and GELU of bf16 models on the CPU, each in one operator of ours.

A model has several root-mean-square norms in each layer, and written in PyTorch each reads and writes its rows eight
times; PyTorch's GELU by tanh takes four times as long as ours: what that costs is in docs/performance.md. Nobody tells
what a layer computes but the layer itself, so each is asked: it must give what one of these formulas gives, for rows of
many sizes, or is left alone. So are norms that take more than their rows, as Mamba's gated ones.

    norms of Llama and most others    weight * round(x / rms)
    of OLMo 2, Gemma 3n               round(x / rms * weight)
    of Gemma                          round(x / rms * (1 + weight))
    GELU by tanh                      round(x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from kvcache.hf.replaced import Replaced, has_own_forward
from kvcache.kernels import cpu_build

__all__ = ["FusedLayers"]

EQUAL_SHARE = 0.995
"""Of the values of probes: sums in another order round one in a thousand to the other neighbour."""
MAX_ERROR = 2**-7
"""Of every value, to its own size: one step of bf16."""
GELU_ENDS = 1e-6
"""Results of GELU below this are not compared: PyTorch's are differences of nearly equal numbers."""

_NORMS = ((0.0, True), (0.0, False), (1.0, False))  # added to the weight; rounded before the weight

_Layer = Callable[[Tensor], Tensor]


@final
class FusedLayers:
    """Gives norms and GELUs of a model another `forward`, until `close`. With gradients on, they use their own.

    None where there is no C++ kernel. Layers whose `forward` somebody has replaced already are left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[nn.Module] = []
        if not any(weight.dtype is torch.bfloat16 and weight.is_cpu for weight in model.parameters()):
            return
        ways = {module: ways for module in model.modules() if (ways := _norms(module) or _gelus(module))}
        library = cpu_build.operators() if ways else ""
        if isinstance(library, str):
            return
        for module, way in ways.items():
            forward = _forward(module, way, library)
            if forward is not None:
                Replaced.put(module, forward)
                self._modules.append(module)

    def close(self) -> None:
        """Give the layers their own `forward` back. Repeating it changes nothing."""
        for module in self._modules:
            Replaced.undo(module)
        self._modules = []

    def __len__(self) -> int:
        return len(self._modules)


class _Ways(NamedTuple):
    """What a layer may compute, given the operators; and what it is asked."""

    formulas: Callable[[Any], list[_Layer]]
    probe: Tensor
    least: float
    """Results below this are not compared."""


def _norms(module: Any) -> _Ways | None:
    """For a root-mean-square norm of bf16. Its weight is looked up with each call: it may be another one by then."""
    parameters = dict(module.named_parameters())
    weight, eps = parameters.get("weight"), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        "RMSNorm" not in type(module).__name__
        or len(parameters) != 1
        or weight is None
        or (weight.dim(), weight.dtype, weight.device.type) != (1, torch.bfloat16, "cpu")
        or not isinstance(eps, float)
        or not _takes_one(module)
    ):
        return None

    def formula(library: Any, offset: float, rounds_first: bool) -> _Layer:
        return lambda x: library.rms_norm(x, module.weight, offset, eps, rounds_first)

    # From rows that eps outweighs to large ones.
    sizes = torch.logspace(-5, 2, 16)[:, None]
    rows = torch.randn((16, len(weight)), generator=torch.Generator().manual_seed(0))
    return _Ways(lambda library: [formula(library, *one) for one in _NORMS], (rows * sizes).bfloat16(), 0.0)


def _gelus(module: nn.Module) -> _Ways | None:
    """For GELU by tanh, which is asked for each finite number of bf16."""
    if "gelu" not in type(module).__name__.lower() or not _takes_one(module):
        return None
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return _Ways(lambda library: [library.gelu_tanh], every[every.isfinite()], GELU_ENDS)


def _takes_one(module: nn.Module) -> bool:
    return has_own_forward(module) and len(inspect.signature(module.forward).parameters) == 1


def _forward(module: nn.Module, ways: _Ways, library: Any) -> _Layer | None:
    """The forward of a layer that computes one of the formulas."""
    own: Callable[[Tensor], Any] = module.forward
    with torch.inference_mode():
        try:
            expected = own(ways.probe)
        except Exception:
            return None  # it wants something else than rows
        shape = ways.probe.shape
        if not isinstance(expected, Tensor) or (expected.dtype, expected.shape) != (torch.bfloat16, shape):
            return None
        for fused in ways.formulas(library):
            if _is_same(fused(ways.probe), expected, ways.least):
                break
        else:
            return None

    def forward(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or x.dtype is not torch.bfloat16 or torch.is_grad_enabled() or not x.is_cpu:
            result: Tensor = own(x)
            return result
        return fused(x)

    return forward


def _is_same(found: Tensor, expected: Tensor, least: float) -> bool:
    off = (found.float() - expected.float()).abs()
    wrong = off > MAX_ERROR * expected.float().abs() + least
    return not wrong.any() and (off <= least).float().mean().item() >= EQUAL_SHARE
