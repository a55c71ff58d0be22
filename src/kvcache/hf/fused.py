"""Norms, GELU and rotary embeddings of bf16 models on the CPU, each in one operator of ours.

A model has several root-mean-square norms in each layer, and written in PyTorch each reads and writes its rows eight
times, rotary embeddings sixteen; PyTorch's GELU by tanh takes four times as long as ours: what that costs is in
docs/performance.md. Nobody tells what a layer computes but the layer itself, so each is asked: it must give what one of
these formulas gives, for rows of many sizes, or is left alone. So are norms that take more than their rows, as Mamba's
gated ones. Rotary embeddings are no layer but a function that attention calls: attention keeps its own code, over a
copy of its module's names in which one means our operator.

    norms of Llama and most others    weight * round(x / rms)
    of OLMo 2, Gemma 3n               round(x / rms * weight)
    of Gemma                          round(x / rms * (1 + weight))
    GELU by tanh                      round(x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))))
    rotary embeddings                 round(round(x * cos) + round((-second half of x, first half) * sin)), bit for bit
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from kvcache.hf.replaced import Replaced, has_own_forward
from kvcache.kernels import cpu_build

__all__ = ["FusedLayers", "rotary_of"]

EQUAL_SHARE = 0.995
"""Of the values of probes: sums in another order round one in a thousand to the other neighbour."""
MAX_ERROR = 2**-7
"""Of every value, to its own size: one step of bf16."""
GELU_ENDS = 1e-6
"""Results of GELU below this are not compared: PyTorch's are differences of nearly equal numbers."""

_ROTARY = "apply_rotary_pos_emb"
"""The function's name in transformers' files of models."""

_NORMS = ((0.0, True), (0.0, False), (1.0, False))  # added to the weight; rounded before the weight

_Layer = Callable[[Tensor], Tensor]


@final
class FusedLayers:
    """Gives norms, GELUs and attention of a model another `forward`, until `close`.

    With gradients on, they compute as before. None where there is no C++ kernel. Those whose `forward` somebody else
    has replaced are left alone. Several of one model share what they replace; the last one closed gives it back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._replaced: list[Replaced] = []
        if not any(weight.dtype is torch.bfloat16 and weight.is_cpu for weight in model.parameters()):
            return
        try:
            self._replace(model)
        except BaseException:
            self.close()
            raise

    def _replace(self, model: nn.Module) -> None:
        for module in model.modules():
            # Linear layers are the business of `linears.py`.
            if not isinstance(module, nn.Linear) and (replaced := Replaced.shared(module)):
                self._replaced.append(replaced)
        ways = {module: ways for module in model.modules() if (ways := _norms(module) or _gelus(module))}
        turning = [module for module in model.modules() if _turns(module)]
        library = cpu_build.operators() if ways or turning else ""
        if isinstance(library, str):
            return
        for module, way in ways.items():
            self._put(module, _forward(module, way, library))
        kinds = {kind: _attention(kind, library) for kind in {type(module) for module in turning}}
        for module in turning:
            forward = kinds[type(module)]
            self._put(module, forward and partial(forward, module), takes_all=True)

    def _put(self, module: nn.Module, forward: Callable[..., Any] | None, takes_all: bool = False) -> None:
        if forward is not None:
            self._replaced.append(Replaced.put(module, forward, takes_all))

    def close(self) -> None:
        """Give the layers their own `forward` back. Repeating it changes nothing."""
        for replaced in self._replaced:
            replaced.release()
        self._replaced = []

    def __len__(self) -> int:
        return len(self._replaced)


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


def _turns(module: nn.Module) -> bool:
    """Whether it is attention that calls transformers' function for rotary embeddings by its name."""
    forward: Any = getattr(type(module), "forward", None)  # a script module has none
    return (
        isinstance(forward, FunctionType)
        and _ROTARY in forward.__code__.co_names
        and isinstance(forward.__globals__.get(_ROTARY), FunctionType)
        and has_own_forward(module)
    )


def _attention(kind: type[nn.Module], library: Any) -> Callable[..., Any] | None:
    """The forward of a class whose rotary embeddings are what the operator computes: its code, over other names."""
    own: Any = kind.forward
    turn = rotary_of(own.__globals__[_ROTARY], library)
    if turn is None:
        return None
    fused = FunctionType(
        own.__code__, own.__globals__ | {_ROTARY: turn}, own.__name__, own.__defaults__, own.__closure__
    )
    fused.__kwdefaults__ = own.__kwdefaults__

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (own if torch.compiler.is_compiling() else fused)(module, *args, **kwargs)

    return forward


def rotary_of(own: Callable[..., Any], library: Any) -> Callable[..., Any] | None:
    """The operator in the place of `own`, if that computes the same: of whole rows, and of parts if it takes those."""
    random = torch.Generator().manual_seed(0)

    def is_same(dim: int, turned: int) -> bool:
        shapes = (2, 3, 5, dim), (2, 1, 5, dim), (2, 5, turned), (2, 5, turned)
        probe = [torch.randn(shape, generator=random).bfloat16() for shape in shapes]
        try:
            expected = own(*probe)
        except Exception:
            return False  # it takes something else
        found = library.turn(*probe, True)
        return isinstance(expected, tuple) and len(expected) == 2 and all(map(_is_equal, found, expected))

    with torch.inference_mode():
        if not is_same(64, 64):
            return None
        takes_part = is_same(64, 32)

    def turn(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and args[2].dtype is torch.bfloat16 and not torch.is_grad_enabled():
            # Rows of other types and shapes are refused; what they mean the function knows.
            with contextlib.suppress(ValueError, RuntimeError):
                return library.turn(*args, takes_part)
        return own(*args, **kwargs)

    return turn


def _is_equal(found: Tensor, expected: Any) -> bool:
    return isinstance(expected, Tensor) and expected.dtype is torch.bfloat16 and torch.equal(found, expected)


def _is_same(found: Tensor, expected: Tensor, least: float) -> bool:
    off = (found.float() - expected.float()).abs()
    wrong = off > MAX_ERROR * expected.float().abs() + least
    return not wrong.any() and (off <= least).float().mean().item() >= EQUAL_SHARE
