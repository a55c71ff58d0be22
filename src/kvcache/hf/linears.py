"""Linear layers of bf16 models on the CPU: who multiplies with the weights [out, in].

    rows of x   with AMX (`cpp/amx.h`)   bf16 products without AMX       other x86
    few         ours: up to 128          ours: up to 32                  ours: up to 256
    more        PyTorch's                oneDNN's over packed copies     PyTorch's of f32, widened part by part

Ours (`cpp/products.h`) reads weights as they lie, for one row at nine tenths of the speed of memory; PyTorch takes
twice as long. oneDNN is fast over a layout of its own: a packed copy of each weight lies beside the model's while a
runner is open, where that is worth its memory. On x86 without bf16 products PyTorch's own of bf16 are slow loops, and
of f32 they are a library's: weights become f32 for as long as they are multiplied with. Decision 16 has what each
takes.

oneDNN's operators are those that torch.compile puts into models that it freezes: `_reorder_linear_weight` and
`_linear_pointwise` of `torch.ops.mkldnn`. A compiler of ours (`compiled.py`) sees `kvcache::linear` instead.
"""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from kvcache.hf.replaced import Replaced, has_own_forward
from kvcache.kernels import cpu_build

__all__ = ["FastLinears", "available_bytes"]

MEMORY_SHARE = 2
"""Packed copies take at most half of the memory that is available."""
FEW_WITH_UNIT, FEW, FEW_BEFORE_WIDENED = 128, 32, 256
"""Rows up to which ours is faster: than PyTorch's with AMX, than any without, than products of f32."""
WIDENED, WIDENED_ABOVE = 2**21, 8
"""Weights that are f32 at a time: 8 MiB, most of which stays in the caches. Rows above which it pays without ours."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Copy:
    weight: Tensor  # kept, so that nothing else can come to lie at its address
    version: int
    packed: Tensor
    num_users: int

    def is_of(self, weight: Tensor) -> bool:
        """Whether a tensor at the same address is what was copied, unchanged as far as PyTorch counts changes."""
        copied = self.weight
        return weight.shape == copied.shape and weight.stride() == copied.stride() and _version(weight) == self.version


def _version(weight: Tensor) -> int:
    """How often it has been changed in place. Inference tensors do not count, nor do changes through `.data`."""
    return 0 if weight.is_inference() else weight._version


_copies: dict[int, _Copy] = {}
"""By the address of their weights."""


def available_bytes(device: torch.device) -> int:
    """Memory that can be had on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if info.exists() and (found := re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())):
        return int(found[1]) * 1024
    return 8 * 2**30


@final
class FastLinears:
    """Gives the bf16 `nn.Linear`s of a model that are on the CPU another `forward`, until `close`.

    Several of one model share what they replace and copy, and the last one closed gives it back. `num_bytes`: what the
    packed copies take; all layers have them or none. With gradients on, layers use their own `forward`; where somebody
    has replaced it they are left alone.

    A weight that is changed in place, loaded or put in the place of another is used as it lies from then on. Of a
    change through `weight.data`, as PEFT merges adapters, packed copies know nothing: make it before, or close all that
    have the model open (engines, runners) and make them anew.
    """

    def __init__(self, model: nn.Module) -> None:
        self._replaced: list[Replaced] = []
        self._pointers: set[int] = set()  # of weights whose copies it uses
        self.num_bytes = 0
        modules = [m for m in model.modules() if isinstance(m, nn.Linear) and _is_plain(m)]
        if not modules:
            return
        try:
            if _packing_helps():
                self._pack({module.weight.data_ptr(): module.weight.detach() for module in modules})
            for module in modules:
                self._replaced.append(Replaced.shared(module) or Replaced.put(module, _forward(module)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the layers their own `forward` back and free the copies. Repeating it changes nothing."""
        for replaced in self._replaced:
            replaced.release()
        for pointer in self._pointers:
            copy = _copies[pointer]
            copy.num_users -= 1
            if not copy.num_users:
                del _copies[pointer]
        self._replaced, self._pointers, self.num_bytes = [], set(), 0

    def _pack(self, weights: dict[int, Tensor]) -> None:
        missing = {p for p, weight in weights.items() if p not in _copies or not _copies[p].is_of(weight)}
        sizes = {pointer: weight.numel() * weight.element_size() for pointer, weight in weights.items()}
        num_bytes = sum(sizes[pointer] for pointer in missing)
        room = available_bytes(torch.device("cpu")) // MEMORY_SHARE
        if num_bytes > room:
            _log.info("weights stay as they are: packed copies take %d bytes and %d may be used", num_bytes, room)
            return
        for pointer, weight in weights.items():
            if pointer in missing:
                packed = torch.ops.mkldnn._reorder_linear_weight(weight)
                num_users = _copies[pointer].num_users if pointer in _copies else 0  # of what the weight was before
                _copies[pointer] = _Copy(weight, _version(weight), packed, num_users)
            _copies[pointer].num_users += 1
            self._pointers.add(pointer)
        self.num_bytes = sum(sizes.values())


def padded_rows(num_rows: int) -> int:
    """The number of rows that a product of `num_rows` is computed with by oneDNN.

    It keeps a compiled product for each number of rows that it meets, up to a thousand of a megabyte or more: prompts
    of ever new lengths would fill the memory. Numbers are rounded up to few; decode steps are left alone.

    >>> [padded_rows(n) for n in (1, 16, 17, 128, 130, 512)]
    [1, 16, 32, 128, 192, 512]
    """
    if num_rows <= 16:
        return num_rows
    step = 16 if num_rows <= 128 else 64
    return -(-num_rows // step) * step


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rows x [..., in] times weights [out, in], with gradients off."""
    if not (x.is_cpu and weight.is_cpu and x.dtype is weight.dtype is torch.bfloat16):
        return nn.functional.linear(x, weight, bias)
    copy = _copies.get(weight.data_ptr()) if _copies else None
    if copy is not None and not copy.is_of(weight):
        copy = None
    library = cpu_build.operators()
    if not isinstance(library, str) and x.numel() <= _most_rows(library) * x.shape[-1]:
        product: Tensor = library.linear(x, weight, bias)
        return product
    if copy is not None:
        return _packed_product(x, copy.packed, bias)
    # autocast would make bf16 of them again
    widens = _widening_helps() and x.numel() > WIDENED_ABOVE * x.shape[-1] and not torch.is_autocast_enabled("cpu")
    return (_widened_product if widens else nn.functional.linear)(x, weight, bias)


@cache
def _most_rows(library: Any) -> int:
    """The rows that are few."""
    if library.uses_amx():
        return FEW_WITH_UNIT
    return FEW_BEFORE_WIDENED if _widening_helps() else FEW


def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    num_rows = x.numel() // x.shape[-1]
    missing = padded_rows(num_rows) - num_rows
    rows = nn.functional.pad(x.reshape(num_rows, x.shape[-1]), (0, 0, 0, missing)) if missing else x
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")
    return product[:num_rows].view(*x.shape[:-1], product.shape[-1]) if missing else product


def _widened_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, added = x.float(), None if bias is None else bias.float()
    step = max(1, WIDENED // weight.shape[1])
    product = x.new_empty((*x.shape[:-1], weight.shape[0]))
    for begin in range(0, weight.shape[0], step):
        part = slice(begin, begin + step)
        product[..., part] = nn.functional.linear(rows, weight[part].float(), None if added is None else added[part])
    return product


@cache
def _widening_helps() -> bool:
    """On x86 without bf16 products."""
    return platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported()


def _packing_helps() -> bool:
    """Where there is no AMX that we could use. Without bf16 products oneDNN is slow over any layout."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    library = cpu_build.operators()
    return not _widening_helps() and (isinstance(library, str) or not library.uses_amx())


def _is_plain(module: nn.Linear) -> bool:
    """Whether its `forward` is a product with a dense weight of bf16 on the CPU, and nothing else."""
    weight, parts = module.weight, list(module.parameters(recurse=False))
    return (
        type(module) is nn.Linear  # a subclass may do anything
        and (has_own_forward(module) or isinstance(module.__dict__.get("forward"), Replaced))
        and all(type(part) is nn.Parameter and part.is_cpu and part.dtype is torch.bfloat16 for part in parts)
        and weight.is_contiguous()
        and weight.numel() > 0
    )


def _forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            traced: Tensor = torch.ops.kvcache.linear(x, module.weight, module.bias)
            return traced
        product = nn.functional.linear if torch.is_grad_enabled() else _linear
        return product(x, module.weight, module.bias)

    return forward


def _linear_shape(x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library = torch.library.Library("kvcache", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("linear", _linear, "CPU")
torch.library.register_fake("kvcache::linear", _linear_shape, lib=_library)
