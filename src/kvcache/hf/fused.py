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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

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
        is_bf16 = any(weight.dtype is torch.bfloat16 and weight.is_cpu for weight in model.parameters())
        candidates = [module for module in model.modules() if is_bf16 and (_is_norm(module) or _is_gelu(module))]
        library = cpu_build.operators() if candidates else ""
        if isinstance(library, str):
            return
        for module in candidates:
            forward = _forward(module, library)
            if forward is not None:
                module.__dict__["forward"] = forward
                self._modules.append(module)

    def close(self) -> None:
        """Give the layers their own `forward` back. Repeating it changes nothing."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules = []

    def __len__(self) -> int:
        return len(self._modules)


def _is_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    return (
        "RMSNorm" in type(module).__name__
        and len(parameters) == 1
        and weight is not None
        and (weight.dim(), weight.dtype, weight.device.type) == (1, torch.bfloat16, "cpu")
        and _eps(module) is not None
        and _takes_one(module)
    )


def _is_gelu(module: nn.Module) -> bool:
    return "gelu" in type(module).__name__.lower() and _takes_one(module)


def _takes_one(module: nn.Module) -> bool:
    return "forward" not in module.__dict__ and len(inspect.signature(module.forward).parameters) == 1


def _eps(module: nn.Module) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def _candidates(module: Any, library: Any) -> Iterator[_Layer]:
    """What the layer may compute. A norm's weight is looked up with each call: it may be another one by then."""
    if not _is_norm(module):
        yield library.gelu_tanh
        return

    def normed(x: Tensor, offset: float, rounds_first: bool) -> Tensor:
        result: Tensor = library.rms_norm(x, module.weight, offset, eps, rounds_first)
        return result

    eps = _eps(module)
    for offset, rounds_first in _NORMS:
        yield partial(normed, offset=offset, rounds_first=rounds_first)


def _forward(module: Any, library: Any) -> _Layer | None:
    """The forward of a layer that computes one of the formulas."""
    own: Callable[[Tensor], Any] = module.forward
    # From rows that eps outweighs to large ones.
    sizes = torch.logspace(-5, 2, 16)[:, None]
    dim = len(module.weight) if _is_norm(module) else 256
    probe = (torch.randn((16, dim), generator=torch.Generator().manual_seed(0)) * sizes).bfloat16()
    with torch.inference_mode():
        try:
            expected = own(probe)
        except Exception:
            return None  # it wants something else than rows
        if not isinstance(expected, Tensor) or expected.dtype is not torch.bfloat16 or expected.shape != probe.shape:
            return None
        for fused in _candidates(module, library):
            if _is_same(fused(probe), expected, 0.0 if _is_norm(module) else GELU_ENDS):
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
