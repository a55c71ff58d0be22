"""Modules that have another `forward` for a while, as runners give them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import MethodType
from typing import Any, final

from torch import nn

__all__ = ["Replaced", "has_own_forward"]


@final
class Replaced:
    """Another forward in the place of a module's own: for calls with one tensor, or for all.

    Copies and pickles of the module have the module's own forward: what stands here knows the module it was made for.
    """

    @staticmethod
    def put(module: nn.Module, forward: Callable[..., Any], takes_all: bool = False) -> None:
        """Let calls of the module with one tensor, or all, be calls of `forward`.

        Raises `ValueError` when it has been replaced before.
        """
        if not has_own_forward(module):
            raise ValueError(f"the forward of a {type(module).__name__} was replaced before; expected the class's own")
        module.__dict__["forward"] = Replaced(module, forward, takes_all)

    @staticmethod
    def undo(module: nn.Module) -> None:
        """Let calls of the module be calls of its own forward again, if `put` has changed that."""
        if isinstance(module.__dict__.get("forward"), Replaced):
            del module.__dict__["forward"]

    def __init__(self, module: nn.Module, forward: Callable[..., Any], takes_all: bool) -> None:
        self._module, self._forward, self._takes_all = module, forward, takes_all

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._takes_all or (len(args) == 1 and not kwargs):
            return self._forward(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        return MethodType(type(self._module).forward, deepcopy(self._module, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")  # of a module that has nothing in its instance yet


def has_own_forward(module: nn.Module) -> bool:
    """Whether a call of the module is a call of its class's `forward`: nobody has put another one into the instance."""
    forward = module.__dict__.get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward
