"""Weights of linear layers in the layout that oneDNN reads fastest, for bf16 models on the CPU.

PyTorch multiplies with weights [out, in] as they lie, and for the few tokens of a decode step that reads them at half
the memory's bandwidth or less; oneDNN's own layout gets nearly all of it. (docs/performance.md has both.) The
model keeps its weights: a packed copy of each lies beside them while a runner is open, if there is memory for that.

The operators are those that torch.compile puts into models that it freezes: `torch.ops.mkldnn._reorder_linear_weight`
and `_linear_pointwise`. A compiler of ours (`compiled.py`) sees `kvcache::linear` instead, which looks the copy up.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from kvcache.hf.replaced import Replaced, has_own_forward

__all__ = ["PackedLinears", "available_bytes"]

MEMORY_SHARE = 2
"""Packed copies take at most half of the memory that is available."""

_log = logging.getLogger(__name__)

_packed: dict[int, Tensor] = {}
"""Packed copies by the address of their weights, for compiled code."""


def available_bytes(device: torch.device) -> int:
    """Memory that can be had on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if info.exists() and (found := re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())):
        return int(found[1]) * 1024
    return 8 * 2**30


@final
class PackedLinears:
    """Packs the bf16 `nn.Linear`s of a model that are on the CPU, all or none. `num_bytes`: what the copies take.

    Until `close`, weights changed in place are not seen; with gradients on, the plain weights are used. Layers whose
    `forward` somebody has replaced already are left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[nn.Linear] = []
        self._pointers: set[int] = set()  # of weights whose copies are ours
        if _is_supported():
            self._modules = [m for m in model.modules() if isinstance(m, nn.Linear) and _can_pack(m)]
        weights = {module.weight.data_ptr(): module.weight.detach() for module in self._modules}
        self.num_bytes = sum(weight.numel() * weight.element_size() for weight in weights.values())
        room = available_bytes(torch.device("cpu")) // MEMORY_SHARE
        if self.num_bytes > room:
            _log.info("weights stay as they are: packed copies take %d bytes and %d may be used", self.num_bytes, room)
            self._modules, self.num_bytes = [], 0
            return
        pack = torch.ops.mkldnn._reorder_linear_weight
        packed = {pointer: pack(weight) for pointer, weight in weights.items()}
        self._pointers = packed.keys() - _packed.keys()
        _packed.update((pointer, packed[pointer]) for pointer in self._pointers)
        for module in self._modules:
            Replaced.put(module, _forward(module, packed[module.weight.data_ptr()]))

    def close(self) -> None:
        """Give the layers their own `forward` back and free the copies. Repeating it changes nothing."""
        for module in self._modules:
            Replaced.undo(module)
        for pointer in self._pointers:
            del _packed[pointer]
        self._modules, self._pointers, self.num_bytes = [], set(), 0


def padded_rows(num_rows: int) -> int:
    """The number of rows that a product of `num_rows` is computed with.

    oneDNN keeps a compiled product for each number of rows that it meets, up to a thousand of a megabyte or more:
    prompts of ever new lengths would fill the memory. Numbers are rounded up to few; decode steps are left alone.

    >>> [padded_rows(n) for n in (1, 16, 17, 128, 130, 512)]
    [1, 16, 32, 128, 192, 512]
    """
    if num_rows <= 16:
        return num_rows
    step = 16 if num_rows <= 128 else 64
    return -(-num_rows // step) * step


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Rows x [..., in] times packed weights [out, in]."""
    num_rows = x.numel() // x.shape[-1]
    missing = padded_rows(num_rows) - num_rows
    if not missing:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
        return product
    rows = nn.functional.pad(x.reshape(num_rows, x.shape[-1]), (0, 0, 0, missing))
    product = torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")
    return product[:num_rows].view(*x.shape[:-1], product.shape[-1])


def _is_supported() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _can_pack(module: nn.Linear) -> bool:
    return (
        type(module) is nn.Linear  # a subclass may do anything
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.bfloat16
        and module.weight.numel() > 0
        and has_own_forward(module)
    )


def _forward(module: nn.Linear, packed: Tensor) -> Callable[[Tensor], Tensor]:
    bias: Tensor | None = module.bias
    bias = None if bias is None else bias.detach()

    def forward(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            traced: Tensor = torch.ops.kvcache.linear(x, module.weight, bias)
            return traced
        if x.dtype is not torch.bfloat16 or x.device.type != "cpu" or torch.is_grad_enabled():
            return nn.functional.linear(x, module.weight, module.bias)
        return _product(x, packed, bias)

    return forward


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product for compiled code: with the packed copy of `weight` if there is one."""
    packed = _packed.get(weight.data_ptr())
    if packed is None or x.dtype is not torch.bfloat16:
        return nn.functional.linear(x, weight, bias)
    return _product(x, packed, bias)


def _linear_shape(x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library = torch.library.Library("kvcache", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("linear", _linear, "CPU")
torch.library.register_fake("kvcache::linear", _linear_shape, lib=_library)
