"""Which module is running: a stack that follows every module call, failed ones too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


@dataclass(frozen=True)
class Frame:
    """A module call in progress."""

    path: str
    module_type: str
    call: int
    module: nn.Module | None = None


class ModuleStack:
    """The registered modules whose forward is running, outermost first.

    The hooks are torch's global ones: they need no place in the modules, so the modules' own hooks are
    neither counted nor disturbed, and script modules, which refuse hooks, are followed as well.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
        self._calls: dict[int, int] = {}
        self._root = Frame("", type(model).__name__, 0)
        self._frames: list[Frame] = []
        self._thread = threading.get_ident()

    @property
    def innermost(self) -> Frame:
        """The innermost registered module that is running."""
        return self._frames[-1] if self._frames else self._root

    def __bool__(self) -> bool:
        return bool(self._frames)

    @contextmanager
    def following(
        self, after: Callable[[Frame, tuple[Any, ...], dict[str, Any], Any], None]
    ) -> Iterator[None]:
        """Follow module calls; `after` hears of each that returned, while it is still innermost."""

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._ours(module):
                self._push(module)

        def leave(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
            if not self._ours(module):
                return
            # Of a forward that failed torch passes no keyword arguments, and None for its result.
            kwargs, result = rest if len(rest) == 2 else ({}, rest[0])
            # Of a call that another's pre-hook stopped before ours ran there is no frame to leave.
            if self._frames and self._frames[-1].module is module:
                if result is not None:
                    after(self._frames[-1], args, kwargs, result)
                self._frames.pop()

        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(enter).remove)
            left = register_module_forward_hook(leave, with_kwargs=True, always_call=True)
            hooks.callback(left.remove)
            # torch's handle leaves this entry behind, and torch.compile would warn of hooks ever after.
            hooks.callback(_global_forward_hooks_with_kwargs.pop, left.id, None)
            yield

    def _ours(self, module: nn.Module) -> bool:
        return id(module) in self._paths and threading.get_ident() == self._thread

    def _push(self, module: nn.Module) -> None:
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        path = max(self._paths[id(module)], key=self._closeness)
        self._frames.append(Frame(path, type(module).__name__, call, module))

    def _closeness(self, path: str) -> int:
        # A shared module has several paths: the one that the running modules lead to is meant.
        shared = 0
        for ours, theirs in zip(path.split("."), self.innermost.path.split("."), strict=False):
            if ours != theirs:
                break
            shared += 1
        return shared
