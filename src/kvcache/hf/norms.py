"""Root-mean-square norms of bf16 models on the CPU, in one operator instead of eight.

A model has several in each layer, and written in PyTorch each reads and writes its rows eight times: what that costs
is in docs/performance.md. Nobody tells what a norm computes but the norm itself, so each is asked: it must give what
one of these formulas gives, for rows of many sizes, or is left alone. So are norms that take more than their rows, as
Mamba's gated ones.

    Llama and most others    weight * round(x / rms)
    OLMo 2, Gemma 3n         round(x / rms * weight)
    Gemma                    round(x / rms * (1 + weight))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from kvcache.kernels import cpu_build

__all__ = ["FusedNorms"]

EQUAL_SHARE = 0.995
"""Of the values of probes: sums in another order round one in a thousand to the other neighbour."""
MAX_ERROR = 2**-7
"""Of every value, to its own size: one step of bf16."""


class _Formula(NamedTuple):
    offset: float
    rounds_first: bool


_FORMULAS = (_Formula(0.0, True), _Formula(0.0, False), _Formula(1.0, False))


@final
class FusedNorms:
    """Gives the norms of a model another `forward`, until `close`. With gradients on, they use their own.

    None where there is no C++ kernel. Layers whose `forward` somebody has replaced already are left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[nn.Module] = []
        candidates = [module for module in model.modules() if _may_be(module)]
        library = cpu_build.operators() if candidates else ""
        if isinstance(library, str):
            return
        for module in candidates:
            forward = _forward(module, library.rms_norm)
            if forward is not None:
                module.__dict__["forward"] = forward
                self._modules.append(module)

    def close(self) -> None:
        """Give the norms their own `forward` back. Repeating it changes nothing."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules = []

    def __len__(self) -> int:
        return len(self._modules)


def _may_be(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    return (
        "RMSNorm" in type(module).__name__
        and len(parameters) == 1
        and weight is not None
        and (weight.dim(), weight.dtype, weight.device.type) == (1, torch.bfloat16, "cpu")
        and _eps(module) is not None
        and "forward" not in module.__dict__
        and len(inspect.signature(module.forward).parameters) == 1
    )


def _eps(module: nn.Module) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def _forward(
    module: Any, rms_norm: Callable[[Tensor, Tensor, float, float, bool], Tensor]
) -> Callable[[Tensor], Tensor] | None:
    """The forward of a norm that computes one of the formulas."""
    own, eps = module.forward, _eps(module)
    assert eps is not None
    weight: Tensor = module.weight
    # From rows that eps outweighs to large ones.
    sizes = torch.logspace(-5, 2, 16)[:, None]
    probe = (torch.randn((16, len(weight)), generator=torch.Generator().manual_seed(0)) * sizes).bfloat16()
    with torch.inference_mode():
        try:
            expected = own(probe)
        except Exception:
            return None  # it wants something else than rows
        if not isinstance(expected, Tensor) or expected.dtype is not torch.bfloat16 or expected.shape != probe.shape:
            return None
        for offset, rounds_first in _FORMULAS:
            if _is_same(rms_norm(probe, weight, offset, eps, rounds_first), expected):
                break
        else:
            return None

    def forward(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or x.dtype is not torch.bfloat16 or torch.is_grad_enabled() or not x.is_cpu:
            normed: Tensor = own(x)
            return normed
        return rms_norm(x, module.weight, offset, eps, rounds_first)

    return forward


def _is_same(found: Tensor, expected: Tensor) -> bool:
    off = (found.float() - expected.float()).abs() > MAX_ERROR * expected.float().abs()
    return not off.any() and (found == expected).float().mean().item() >= EQUAL_SHARE
