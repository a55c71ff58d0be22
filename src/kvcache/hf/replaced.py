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
    """Another forward in the place of a module's own: for calls with one tensor, or for all; until its last user goes.

    Copies and pickles of the module have the module's own forward: what stands here knows the module it was made for.
    """

    @staticmethod
    def put(module: nn.Module, forward: Callable[..., Any], takes_all: bool = False) -> Replaced:
        """Let calls of the module with one tensor, or all, be calls of `forward`, for one user.

        Raises `ValueError` when it has been replaced before.
        """
        if not has_own_forward(module):
            raise ValueError(f"the forward of a {type(module).__name__} was replaced before; expected the class's own")
        replaced = module.__dict__["forward"] = Replaced(module, forward, takes_all)
        return replaced

    @staticmethod
    def shared(module: nn.Module) -> Replaced | None:
        """What stands in the place of the module's own forward, for one user more; `None` where nothing does."""
        replaced = module.__dict__.get("forward")
        if not isinstance(replaced, Replaced):
            return None
        replaced._num_users += 1
        return replaced

    def __init__(self, module: nn.Module, forward: Callable[..., Any], takes_all: bool) -> None:
        self._module, self._forward, self._takes_all = module, forward, takes_all
        self._num_users = 1

    def release(self) -> None:
        """One user less: the last one lets calls of the module be calls of its own forward again."""
        self._num_users -= 1
        if not self._num_users and self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]

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
