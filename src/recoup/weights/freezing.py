"""Entries that weight dropout dropped, left alone by the optimizer, too.

NOTE [ What a step leaves alone ]

Rule 1. While this is in force, each use of a weight notes its draws, where they are first made. One
        that is read often is noted once; one that `same_draw` keeps for several steps is noted in
        each of them.
Rule 2. An entry is left alone if all draws of all uses dropped it, and its gradient is zero. Who
        used it in another way (without noise, on another rank) gave it a gradient, which must not
        be lost. That of a dropped entry is zero, exactly.
Rule 3. Masks are drawn again before the optimizer's step, since the step may change gradients, or
        after it, if it has a closure, which makes the last ones. Weights are copied before it: a
        closure may find them moved. Afterwards entries are written back, and draws forgotten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.weights.choosing import Named, check_is_module, matching
from recoup.weights.dropout import WeightDropout
from recoup.weights.module import check_is_plain, weights_of
from recoup.weights.reparametrization import Drawn

_Uses = list[tuple[WeightDropout, set[Drawn]]]  # the dropout of each use of a weight, and its draws


class FrozenDropped:
    """The freezing of dropped weights, until `remove` is called or its block of code ends."""

    def __init__(self, optimizer: Optimizer, weights: list[tuple[Tensor, _Uses]]) -> None:
        self._weights = weights
        self._copies: list[Tensor | None] = []
        self._frozen: list[Tensor | None] = []  # of a step without a closure
        self._uses = [use for _, uses in weights for use in uses]
        for step, draws in self._uses:
            step.records = [*step.records, draws]
        self._hooks = (
            optimizer.register_step_pre_hook(self._copy),
            optimizer.register_step_post_hook(self._write_back),
        )

    def remove(self) -> None:
        """Let the optimizer move all entries again."""
        for hook in self._hooks:
            hook.remove()
        for step, draws in self._uses:
            step.records = [each for each in step.records if each is not draws]

    def __enter__(self) -> FrozenDropped:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _copy(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Copy the weights and, where there is no closure, find the entries."""
        has_closure = callable(kwargs.get("closure", args[1] if len(args) > 1 else None))
        self._copies = [
            weight.detach().clone() if has_closure or any(draws for _, draws in uses) else None
            for weight, uses in self._weights
        ]
        self._frozen = [] if has_closure else self._find()

    def _find(self) -> list[Tensor | None]:
        return [_frozen(weight, uses) for weight, uses in self._weights]

    @torch.no_grad()
    def _write_back(self, *given: object) -> None:
        """Write the entries back."""
        frozen = self._frozen or self._find()
        for (weight, _), copy, mask in zip(self._weights, self._copies, frozen, strict=True):
            if copy is not None and mask is not None:
                weight.copy_(torch.where(mask, copy, weight))
        self._copies, self._frozen = [], []
        for _, draws in self._uses:
            draws.clear()


@torch.no_grad()
def _frozen(weight: Tensor, uses: _Uses) -> Tensor | None:
    """Return the entries of a weight that are left alone."""
    drawn = [(step, each) for step, draws in uses for each in draws]
    if not drawn:
        return None
    found, gradient = torch.ones_like(weight, dtype=torch.bool), weight.grad
    if gradient is not None and gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce()
        found[tuple(gradient.indices())] = gradient.values() == 0
    elif gradient is not None:
        found = gradient == 0
    for step, each in drawn:
        ones = torch.ones_like(weight, memory_format=torch.contiguous_format)
        found &= step.compute(ones, (), each, is_new=True) == 0
    return found


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
    uses: dict[int, list[Named]] = {}
    for each in matching(module, ".*", "module"):
        if id(each.parameter) in members:
            uses.setdefault(id(each.parameter), []).append(each)
    chosen: list[tuple[Tensor, _Uses]] = []
    for of_one in uses.values():
        dropouts = [_dropout_of(use) for use in of_one]
        steps = [step for step in dropouts if step is not None]
        if len(steps) == len(dropouts):
            check_is_plain(of_one[0].parameter, of_one[0].name)
            chosen.append((of_one[0].parameter, [(step, set()) for step in steps]))
    if not chosen:
        raise ValueError(
            f"`optimizer` has no parameter of {type(module).__name__} of which each use has weight "
            "dropout and no weight norm, so there is nothing to leave alone. See "
            "recoup.weights.applied(module)."
        )
    return FrozenDropped(optimizer, chosen)


def _dropout_of(use: Named) -> WeightDropout | None:
    """Return the dropout of a use of a parameter; None if it has none that counts."""
    weight = weights_of(use.owner).get(use.key)
    steps = [] if weight is None else weight.steps
    found = (step for step in steps if isinstance(step, WeightDropout))
    return next(found, None) if all(step.is_random for step in steps) else None
