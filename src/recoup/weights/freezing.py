"""Entries that weight dropout dropped, left alone by the optimizer, too.

NOTE [ What a step leaves alone ]

Rule 1. While this is in force, each use of a weight notes its draws, where they are first made. One
        that is read often is noted once; one that `same_draw` keeps for several steps is noted in
        each of them.
Rule 2. An entry is left alone if all draws of all uses dropped it, and its gradient is zero. Who
        used it in another way (without noise, on another rank) gave it a gradient, which must not
        be lost. That of a dropped entry is zero, exactly.
Rule 3. Masks are drawn again before the optimizer's step, since the step may change gradients, and
        after each run of its closure, which makes the last ones. Weights are copied before it: a
        closure may find them moved. Afterwards entries are written back, and draws forgotten.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.weights.choosing import Named, check_is_module, named
from recoup.weights.dropout import WeightDropout
from recoup.weights.module import attached_to, check_is_plain
from recoup.weights.reparametrization import Drawn

__all__ = ["FrozenDropped", "freeze_dropped"]


class FrozenDropped:
    """The freezing of dropped weights, until `remove` is called or its block of code ends."""

    def __init__(self, optimizer: Optimizer, weights: list[_Weight]) -> None:
        self._weights = weights
        self._hooks = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    def remove(self) -> None:
        """Let the optimizer move all entries again."""
        for hook in self._hooks:
            hook.remove()
        for weight in self._weights:
            for step, draws in weight.uses:
                step.records = [each for each in step.records if each is not draws]

    def __enter__(self) -> FrozenDropped:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Copy the weights, and find the entries."""
        del optimizer
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        for weight in self._weights:
            weight.before = None
            if callable(closure) or any(draws for _, draws in weight.uses):
                weight.before = weight.parameter.detach().clone()
        self._find()
        if not callable(closure):
            return None

        def run() -> Any:
            result = cast("Any", closure)()
            self._find()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": run}
        return (args[0], run, *args[2:]), kwargs

    @torch.no_grad()
    def _find(self) -> None:
        for weight in self._weights:
            weight.find()

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Write the entries back."""
        for weight in self._weights:
            if weight.before is not None and weight.frozen is not None:
                kept = torch.where(weight.frozen, weight.before, weight.parameter)
                weight.parameter.copy_(kept)
            weight.before = weight.frozen = None
            for _, draws in weight.uses:
                draws.clear()


class _Weight:
    """A parameter of the optimizer, and the dropout and the draws of each of its uses."""

    def __init__(self, parameter: Tensor, steps: list[WeightDropout]) -> None:
        self.parameter = parameter
        self.uses: list[tuple[WeightDropout, set[Drawn]]] = [(step, set()) for step in steps]
        self.before: Tensor | None = None
        self.frozen: Tensor | None = None
        for step, draws in self.uses:
            step.records = [*step.records, draws]

    def find(self) -> None:
        """Find the entries that are left alone."""
        self.frozen, drawn = None, [(s, each) for s, draws in self.uses for each in draws]
        if self.before is None or not drawn:
            return
        found = torch.ones_like(self.before, dtype=torch.bool)
        gradient = self.parameter.grad
        if gradient is not None and gradient.layout is torch.sparse_coo:
            gradient = gradient.coalesce()
            found[tuple(gradient.indices())] = gradient.values() == 0
        elif gradient is not None:
            found = gradient == 0
        for step, each in drawn:
            ones = torch.ones_like(self.before, memory_format=torch.contiguous_format)
            found &= step.compute(ones, (), each, in_place=True) == 0
        self.frozen = found


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
        >>> weight = layer.get_parameter("weight")
        >>> before = weight.detach().clone()
        >>> layer(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> torch.equal(weight == before, weight.grad == 0)
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
    members = {id(each) for group in optimizer.param_groups for each in group["params"]}
    uses: dict[int, dict[tuple[int, str], Named]] = {}
    for each in named(module):
        if id(each.parameter) in members:
            uses.setdefault(id(each.parameter), {})[id(each.owner), each.key] = each
    chosen: list[tuple[Named, list[WeightDropout]]] = []
    for of_one in uses.values():
        dropouts = [_dropout_of(use) for use in of_one.values()]
        steps = [step for step in dropouts if step is not None]
        use = next(iter(of_one.values()))
        if len(steps) == len(dropouts):
            check_is_plain(use.parameter, use.name)
            chosen.append((use, steps))
    if not chosen:
        raise ValueError(
            f"`optimizer` has no parameter of {type(module).__name__} of which each use has weight "
            "dropout and no weight norm, so there is nothing to leave alone. See "
            "recoup.weights.applied(module)."
        )
    return FrozenDropped(optimizer, [_Weight(use.parameter, steps) for use, steps in chosen])


def _dropout_of(use: Named) -> WeightDropout | None:
    """Return the dropout of a use of a parameter; None if it has none that counts."""
    attached = attached_to(use.owner)
    weight = None if attached is None else attached.weights.get(use.key)
    steps = [] if weight is None else weight.steps
    found = next((step for step in steps if isinstance(step, WeightDropout)), None)
    return found if all(step.is_random for step in steps) else None
