"""Entries that weight dropout dropped, left alone by the optimizer, too.

NOTE [ What a step leaves alone ]

Rule 1. While this is in force, each use of a weight notes the draws that forwards give to it, where
        it is resolved (see `forwards`). Code that runs again in backward gets a decision that was
        recorded, and is not resolved. A draw that is read often is noted once; one that `same_draw`
        keeps for several steps is noted in each of them.
Rule 2. An entry is left alone if all draws of all uses dropped it, and its gradient is zero. Who
        used it in another way (in a forward without noise, outside of any, on another rank) gave it
        a gradient, which must not be lost. That of a dropped entry is zero, exactly.
Rule 3. Masks are drawn again before the optimizer's step, since the step may change gradients, and
        after each run of its closure, which makes the last ones. Weights are copied before it: a
        closure may find them moved. Afterwards entries are written back, and draws forgotten.
Rule 4. A step that raises leaves its copies to the next one, which makes new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup.weights.choosing import Named, check_is_module, named
from recoup.weights.dropout import WeightDropout
from recoup.weights.module import attached_to
from recoup.weights.norm import WeightNorm
from recoup.weights.reparametrization import Drawn

__all__ = ["FrozenDropped", "freeze_dropped"]


class FrozenDropped:
    """The freezing of dropped weights, until `remove` is called or its block of code ends."""

    def __init__(self, optimizer: Optimizer, weights: list[_Weight]) -> None:
        steps = _Steps(weights)
        self._hooks = (
            optimizer.register_step_pre_hook(steps.before),
            optimizer.register_step_post_hook(steps.after),
        )
        self._weights = weights

    def remove(self) -> None:
        """Let the optimizer move all entries again."""
        for hook in self._hooks:
            hook.remove()
        for weight in self._weights:
            weight.stop()

    def __enter__(self) -> FrozenDropped:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def freeze_dropped(optimizer: Optimizer, module: nn.Module) -> FrozenDropped:
    """Let `optimizer` leave alone the weight entries that weight dropout drops.

    The gradient of such an entry is zero, and yet weight decay and momentum move it. While this is
    in force, ``optimizer.step()`` leaves an entry as it is, to the bit, if every forward since the
    last step dropped it, and nothing else gave it a gradient. Moments are not restored: they decay
    for all entries, as without it.

    Kept: 8 bytes a draw between steps. A step pays one draw for each draw of a weight since the
    last one, and holds a copy of these weights and a mask (a byte an entry) meanwhile.

    A tied parameter is left alone only where all of its names in `module` have dropout. A weight
    that has weight norm, too, is never: the norm depends on all of its entries. A step that a
    GradScaler skips is none. Hooks of the optimizer's step that were registered before see the
    moved entries.

    Args:
        optimizer: any optimizer of torch; a closure, and the step of a `GradStore`, work too.
        module: a module, or a tree of modules, to which weight dropout has been applied.

    Returns:
        A handle whose ``remove()`` ends it; also a context manager.

    Raises:
        ValueError: when `optimizer` has no parameter of `module` with weight dropout, one of them
            is sharded, or an argument is of another type.

    Example:
        >>> import recoup, torch
        >>> layer = recoup.weight_dropout(torch.nn.Linear(64, 64), p=0.5)
        >>> optimizer = torch.optim.AdamW(layer.parameters(), weight_decay=0.1)
        >>> handle = recoup.weights.freeze_dropped(optimizer, layer)
        >>> before = layer.weight.detach().clone()
        >>> layer(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> torch.equal(layer.weight == before, layer.weight.grad == 0)
        True

    Source: "dropped weights should never be updated in this iteration":
    https://github.com/dmlc/gluon-nlp/issues/1060.
    """
    given: Any = optimizer
    if not isinstance(given, Optimizer) or not hasattr(given, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"`optimizer` is a {type(given).__name__}, but must be a torch.optim.Optimizer. Give "
            "the one within, if this wraps one."
        )
    check_is_module(module)
    weights = _weights_of(optimizer, module)
    if not weights:
        raise ValueError(
            f"`optimizer` has no parameter of {type(module).__name__} of which each use has weight "
            "dropout and no weight norm, so there is nothing to leave alone. See "
            "recoup.weights.applied(module)."
        )
    for weight in weights:
        weight.start()
    return FrozenDropped(optimizer, weights)


class _Weight:
    """A parameter of the optimizer, and its uses, all with dropout."""

    def __init__(self, parameter: Tensor, steps: list[WeightDropout]) -> None:
        self._parameter = parameter
        self._steps = steps  # of each use
        self._records = [Record() for _ in steps]
        self._raw: Tensor | None = None
        self._frozen: Tensor | None = None

    def start(self) -> None:
        """Begin to note draws."""
        for step, record in zip(self._steps, self._records, strict=True):
            step.records = WeakSet([*step.records, record])

    def stop(self) -> None:
        """End it, and forget those noted."""
        for step, record in zip(self._steps, self._records, strict=True):
            step.records = WeakSet(set(step.records) - {record})
        self.forget()

    def forget(self) -> None:
        self._raw = self._frozen = None
        for record in self._records:
            record.draws.clear()

    def copy(self, *, has_closure: bool) -> None:
        """Keep the values before a step, if one may be needed again."""
        self._raw = self._frozen = None
        if has_closure or any(record.draws for record in self._records):
            self._raw = self._parameter.detach().clone()

    def look(self) -> None:
        """Find the entries that are left alone."""
        self._frozen = None
        raw = self._raw
        if raw is None or not any(record.draws for record in self._records):
            return
        found = _without_gradient(self._parameter)
        for step, record in zip(self._steps, self._records, strict=True):
            for seed, magnitude in record.draws:
                ones = torch.ones_like(raw, memory_format=torch.contiguous_format)
                kept = step.compute(ones, (), Drawn(step, seed, magnitude), in_place=True)
                found &= kept == 0
        self._frozen = found

    def write_back(self) -> None:
        """Undo what a step did to entries that are left alone."""
        if self._raw is not None and self._frozen is not None:
            self._parameter.copy_(torch.where(self._frozen, self._raw, self._parameter))


class _Steps:
    """The hooks around the steps of an optimizer."""

    def __init__(self, weights: list[_Weight]) -> None:
        self._weights = weights

    @torch.no_grad()
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Copy the weights, and find the entries."""
        is_named = "closure" in kwargs
        closure = kwargs.get("closure") if is_named else next(iter(args[1:]), None)
        has_closure = callable(closure)
        for weight in self._weights:
            weight.copy(has_closure=has_closure)
        self._look()
        if not has_closure:
            return None
        closure = self._looking_after(cast("Callable[[], Any]", closure))
        if is_named:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _looking_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            result = closure()
            self._look()
            return result

        return run

    @torch.no_grad()
    def _look(self) -> None:
        for weight in self._weights:
            weight.look()

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Write the entries back."""
        for weight in self._weights:
            weight.write_back()
            weight.forget()


def _without_gradient(parameter: Tensor) -> Tensor:
    """Return where the gradient of a parameter is zero."""
    found = torch.ones(parameter.shape, dtype=torch.bool, device=parameter.device)
    gradient = parameter.grad
    if gradient is None:
        return found
    if gradient.layout is not torch.sparse_coo:
        return gradient == 0
    gradient = gradient.coalesce()
    found[tuple(gradient.indices())] = gradient.values() == 0
    return found


def _weights_of(optimizer: Optimizer, module: nn.Module) -> list[_Weight]:
    """Return the parameters of `optimizer` of which each use in `module` has dropout."""
    members = {id(each) for group in optimizer.param_groups for each in group["params"]}
    uses: dict[int, dict[tuple[int, str], Named]] = {}
    for each in named(module):
        if id(each.parameter) in members:
            uses.setdefault(id(each.parameter), {})[id(each.owner), each.key] = each
    found: list[_Weight] = []
    for each in uses.values():
        steps = _dropouts_of(each.values())
        if steps is not None:
            use = next(iter(each.values()))
            _check_is_whole(use)
            found.append(_Weight(use.parameter, steps))
    return found


def _dropouts_of(uses: Iterable[Named]) -> list[WeightDropout] | None:
    """Return the dropout of each use of a parameter; None if one has none that counts."""
    found: list[WeightDropout] = []
    for each in uses:
        attached = attached_to(each.owner)
        weight = None if attached is None else attached.weights.get(each.key)
        steps = [] if weight is None else weight.steps
        dropouts = [step for step in steps if isinstance(step, WeightDropout)]
        if not dropouts or any(isinstance(step, WeightNorm) for step in steps):
            return None
        found += dropouts
    return found


def _check_is_whole(use: Named) -> None:
    kind = type(use.parameter)
    if kind is not nn.Parameter and is_traceable_wrapper_subclass(use.parameter):
        raise ValueError(
            f"`{use.name}` is a {kind.__name__}, of which a rank has a part, and the masks are of "
            "the whole weight. Leave this module out."
        )
