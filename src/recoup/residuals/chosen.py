"""A call that keeps what chosen operators made, and makes the rest again.

NOTE [ Chosen operators ]

Rule 1. Costly operators (products, convolutions, attention) are numbered in the order in which a
        call runs them. What the chosen ones make is kept by the first run; a later run is given it
        in their place, and runs everything else.
Rule 2. An operator that drew random numbers and is left out leaves the generators where it left
        them in the first run, or the draws after it would be others.
Rule 3. What was changed in place later in the first run is not what a later run needs at that
        place, so it is not kept. Changed after the call, it is an error in backward.
Rule 4. It is handed out once, and goes as residuals go. Asked again (retain_graph), the operator
        runs as any other.
Rule 5. What is kept goes to the pair of hooks beneath, as any residual does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.errors import ReplayError
from recoup.residuals.calls import Call
from recoup.residuals.hooks import Kept, Pair, pair_in_force, version_of
from recoup.residuals.seeds import States, generator_states, same_states, set_generator_states
from recoup.residuals.work import is_costly

__all__ = ["ChoosingCall"]


class _Made(NamedTuple):
    """What a chosen operator made.

    Args:
        operator: the operator.
        shapes: of the tensors that it took.
        tensors: what it made, kept; what is no tensor as it is.
        is_single: whether it made one thing, and no tuple.
        versions: of the tensors when they were made, and the tensors until the run has ended.
        states: where it left the generators, if it drew (See Rule 2).
    """

    operator: Any
    shapes: tuple[torch.Size, ...]
    tensors: list[Any]
    is_single: bool
    versions: list[tuple[Tensor, int]]
    states: States | None


class ChoosingCall(Call):
    """One call, of which chosen operators run once.

    Args:
        name: what errors call it.
        fn: what is called.
        args: its arguments.
        kwargs: its keyword arguments.
        module: the module whose forward `fn` is.
        chosen: numbers of the operators (See Rule 1).
    """

    __slots__ = ("_chosen", "_made", "_pair")

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None,
        chosen: frozenset[int],
    ) -> None:
        super().__init__(name, fn, args, kwargs, module)
        self._chosen = chosen
        self._made: dict[int, _Made] | None = None
        self._pair = pair_in_force()

    def _called(self, given: Any) -> Any:
        if self._made is not None:
            with _Handing(self.name, self._made):
                return super()._called(given)
        keeping = _Keeping(self.name, self._chosen, self._pair)
        self._pair = None
        with keeping:
            output = super()._called(given)
        self._made = keeping.take()
        return output


class _Keeping(TorchDispatchMode):
    """Around the first run."""

    supports_higher_order_operators = True

    def __init__(self, name: str, chosen: frozenset[int], pair: Pair | None) -> None:
        super().__init__()
        self._name = name
        self._chosen = chosen
        self._pair = pair
        self._place = -1
        self._made: dict[int, _Made] = {}

    def take(self) -> dict[int, _Made]:
        """Return what is to be had again (See Rule 3)."""
        made, self._made = self._made, {}
        found: dict[int, _Made] = {}
        for place, each in made.items():
            if all(version_of(tensor) == version for tensor, version in each.versions):
                each.versions.clear()
                found[place] = each
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and keep what it made if it is chosen."""
        kwargs = kwargs or {}
        if not is_costly(func):
            return func(*args, **kwargs)
        self._place += 1
        if self._place not in self._chosen:
            return func(*args, **kwargs)
        before = generator_states() if _may_draw(func) else None
        result = func(*args, **kwargs)
        after = None if before is None else generator_states()
        if before is not None and after is not None and same_states(before, after):
            after = None
        self._made[self._place] = self._kept(func, args, result, after)
        return result

    def _kept(self, func: Any, args: tuple[Any, ...], result: Any, states: States | None) -> _Made:
        is_single = not isinstance(result, (tuple, list))
        items: list[Any] = [result] if is_single else list(cast("list[Any]", result))
        name = f"What {func} made in {self._name}"
        versions: list[tuple[Tensor, int]] = []
        kept: list[Any] = []
        for item in items:
            if isinstance(item, Tensor):
                alias = item.detach()  # the result itself gets a history
                versions.append((alias, version_of(alias)))
                kept.append(Kept(alias, name, self._pair))
            else:
                kept.append(item)
        return _Made(func, _shapes(args), kept, is_single, versions, states)


class _Handing(TorchDispatchMode):
    """Around a later run."""

    supports_higher_order_operators = True

    def __init__(self, name: str, made: dict[int, _Made]) -> None:
        super().__init__()
        self._name = name
        self._made = made
        self._place = -1

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, or return what it made before."""
        kwargs = kwargs or {}
        if not is_costly(func):
            return func(*args, **kwargs)
        self._place += 1
        made = self._made.pop(self._place, None)  # See Rule 4
        if made is None:
            return func(*args, **kwargs)
        if made.operator is not func or made.shapes != _shapes(args):
            raise ReplayError(
                f"Running {self._name} again called {func} on shapes "
                f"{[tuple(shape) for shape in _shapes(args)]} where the first run called "
                f"{made.operator} on {[tuple(shape) for shape in made.shapes]}. A region must do "
                "the same when it runs again: look for outside state that it reads."
            )
        if made.states is not None:
            set_generator_states(made.states)
        items = [item.get().detach() if isinstance(item, Kept) else item for item in made.tensors]
        return items[0] if made.is_single else tuple(items)


def _may_draw(func: Any) -> bool:
    name = str(func)
    return "attention" in name or "rnn" in name


def _shapes(args: tuple[Any, ...]) -> tuple[torch.Size, ...]:
    return tuple(arg.shape for arg in args if isinstance(arg, Tensor))
