"""The names of running modules, and the tensors that belong to modules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parameter import is_lazy

from recoup._core.compile import never_compiled

ModulePath = tuple[nn.Module, str]  # the root of a tree of modules, and a qualified name within it


class RunningModules:
    """The stack of modules whose forward is running in this thread, within `followed`.

    Args:
        modules: roots of module trees that are known beforehand; others become known when they run.
            Modules of a tree within another tree are named by the outer one.
        changed: called when another module is the innermost; None for nothing.
    """

    def __init__(
        self, modules: Iterable[nn.Module], changed: Callable[[], None] | None = None
    ) -> None:
        self._changed = changed
        self._thread = threading.get_ident()
        self._running: list[nn.Module] = []
        self._paths: dict[int, ModulePath] = {}
        self._roots: list[nn.Module] = []
        self._tensors: dict[int, Tensor] = {}
        for module in sorted(modules, key=lambda root: -sum(1 for _ in root.modules())):
            self._know(module)

    @contextmanager
    def followed(self) -> Generator[None]:
        """Return a context in which the running modules are tracked."""

        @never_compiled
        def enter(module: nn.Module, inputs: Any) -> None:
            del inputs
            if threading.get_ident() == self._thread:
                if not self._running or id(module) not in self._paths:
                    self._know(module)  # again: functional_call gives it other parameters
                self._running.append(module)
                self._tell()

        @never_compiled
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            del inputs, output
            is_mine = threading.get_ident() == self._thread
            if is_mine and self._running and self._running[-1] is module:
                self._running.pop()
                self._tell()

        entering = register_module_forward_pre_hook(enter)
        leaving = register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()

    @property
    def path(self) -> ModulePath | None:
        """The path of the innermost running module, or None."""
        return self._paths[id(self._running[-1])] if self._running else None

    def tensors(self) -> Iterable[Tensor]:
        """Return the parameters and buffers of all known modules."""
        for root in self._roots:
            self._know(root)  # lazy parameters have a shape by now
        return self._tensors.values()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed()

    def _know(self, module: nn.Module) -> None:
        if id(module) not in self._paths:
            self._roots.append(module)
        for name, each in cast("Iterator[tuple[str, nn.Module]]", module.named_modules()):
            self._paths.setdefault(id(each), (module, name))
        for tensor in (*module.parameters(), *module.buffers()):
            if not is_lazy(tensor):
                self._tensors[id(tensor)] = tensor


def names_of(paths: Iterable[ModulePath]) -> Callable[[ModulePath], str]:
    """Return a function that names a path, with the class of its root if there are several."""
    titles: dict[int, str] = {}
    num_named: dict[str, int] = {}
    for root, _ in paths:
        if id(root) not in titles:
            kind = type(root).__name__
            num_named[kind] = num_named.get(kind, 0) + 1
            titles[id(root)] = kind if num_named[kind] == 1 else f"{kind}#{num_named[kind]}"

    def name_of(path: ModulePath) -> str:
        root, name = path
        title = titles[id(root)]
        if not name:
            return title
        return name if len(titles) == 1 else f"{title}.{name}"

    return name_of
