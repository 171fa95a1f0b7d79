"""Weight dropout: entries of a weight, or whole rows of it, are left out of a forward.

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

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup._core.saved_tensors import is_transformed, pop_pair, push_pair, unpack
from recoup.weights import draws
from recoup.weights.application import apply_to
from recoup.weights.choosing import ANY_WEIGHT, Named, Where, check_is_module, matching
from recoup.weights.module import check_is_plain, weights_of
from recoup.weights.reparametrization import (
    Application,
    Drawn,
    Magnitude,
    Operands,
    Reparametrization,
)


def weight_dropout(
    module: nn.Module,
    pattern: Where = ANY_WEIGHT,
    p: Magnitude = 0.5,
    *,
    axes: tuple[int, ...] = (),
    mode: str = "training",
    tied: str = "own",
) -> nn.Module:
    """Drop entries of weights in each forward, and keep nothing for it but a seed.

    Kept: 8 bytes a weight; neither the mask nor the dropped weight, whichever operator saves it. Of
    an embedding whose rows are dropped, a number for each row that was looked up.
    Backward pays two draws a weight: one for the weight, one for the mask of its gradient. The
    parameters remain the same objects under the same names; evaluation uses the raw weight.

    Args:
        module: the module, or a tree of modules. A forward of it is a step, which has one draw.
        pattern: chooses parameters: a regular expression for the whole of their qualified names, a
            type of modules (its weights), a function ``(name, parameter, module) -> bool``, or a
            list of these. Frozen parameters, and those without floating-point numbers, are chosen
            by a function or by their name in full only. By default, all weights: names in which
            "weight" is a word.
        p: the probability that an entry is dropped, rounded to a multiple of 2^-16; the others are
            scaled by 1 / (1 - p). A number, a 0-dim tensor, or a function from the number of steps
            in training so far (see `set_step`) to a number.
        axes: the axes along which the mask is shared; ``axes=(1,)`` drops whole rows, which for an
            `nn.Embedding` is done on the rows that were looked up.
        mode: "training", or "always" to draw in evaluation too.
        tied: "own" gives each name of a tied parameter a draw of its own; with "same" those that
            `pattern` chooses share one.

    Returns:
        `module` itself.

    Raises:
        ValueError: when no parameter matches, one has weight dropout already, or an argument is
            out of its range.
        ChangedError: in backward, when a raw weight has changed in place since forward.

    Example:
        >>> import recoup, torch
        >>> lstm = recoup.weight_dropout(torch.nn.LSTM(4, 8), r"weight_hh_l\\d+", p=0.5)
        >>> [name for name, _ in lstm.named_parameters()][:2]
        ['weight_ih_l0', 'weight_hh_l0']
        >>> output, _ = lstm(torch.randn(5, 2, 4))

    Source: Wan et al., "Regularization of neural networks using DropConnect" (2013); Merity et al.,
    "Regularizing and optimizing LSTM language models", https://arxiv.org/abs/1708.02182.
    """
    application = Application()
    return apply_to(module, pattern, lambda: WeightDropout(application, p, axes, mode), tied=tied)


class WeightDropout(Reparametrization):
    """Weight dropout: sets entries of a weight to zero, and scales up the others."""

    kind = "weight_dropout"
    order = 1
    argument = "p"
    most = 1.0

    def __init__(
        self, application: Application, p: Magnitude, axes: tuple[int, ...], mode: str
    ) -> None:
        super().__init__(application, mode)
        if type(axes) not in (tuple, list) or not {*map(type, axes)} <= {int}:
            raise ValueError(f"`axes` is {axes!r}, but must be a tuple of ints, such as (1,).")
        self.axes = tuple(axes)
        self.rate = self.checked(p)

    def shown(self) -> str:
        return super().shown() + (f", axes={self.axes}" if self.axes else "")

    def fit(self, module: nn.Module, key: str, name: str) -> None:
        """Normalize `axes` for `draws`, or raise if the weight does not have them."""
        weight = cast("Tensor", module._parameters[key])
        for axis in self.axes:
            if not -weight.dim() <= axis < weight.dim():
                raise ValueError(
                    f"`axes` is {self.axes}, but `{name}` has shape {tuple(weight.shape)}, so "
                    f"axes must be from {-weight.dim()} to {weight.dim() - 1}."
                )
        self.axes = tuple(sorted({axis % weight.dim() for axis in self.axes}))
        is_table = isinstance(module, nn.Embedding) and key == "weight" and weight.dim() == 2
        self.draws_by_row = is_table and self.axes == (1,)

    def apply(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        mask: draws.Mask | None = None
        if weight.is_contiguous() and not is_transformed():
            mask = draws.mask_beside(weight, drawn.seed, drawn.magnitude, self.axes)
        if mask is None:
            return super().apply(weight, operands, drawn)
        # The product's own backward takes less time than a function of ours.
        push_pair(mask.pack, unpack)
        try:
            return weight * mask.get()
        finally:
            pop_pair()

    def compute(self, weight: Tensor, own: Operands, drawn: Drawn, is_new: bool = False) -> Tensor:
        if weight.layout is torch.sparse_coo:  # a gradient, which an embedding may have
            ones = torch.ones(weight.shape, dtype=weight.dtype, device=weight.device)
            return weight * self.compute(ones, (), drawn, is_new=True)
        return draws.dropped(weight, drawn.seed, drawn.magnitude, self.axes, in_place=is_new)

    def scaled_rows(self, rows: Tensor, ids: Tensor, num_rows: int, drawn: Drawn) -> Tensor:
        like: Any = {"dtype": rows.dtype, "device": rows.device}
        return rows * draws.scales((num_rows, 1), drawn.seed, drawn.magnitude, **like)[ids]


# -- entries that a step leaves alone --------------------------------------------------------------

_Uses = list[tuple[WeightDropout, set[Drawn]]]  # the dropout of each use of a weight, and its draws


class FrozenDropped:
    """The freezing of dropped weights, until `remove` is called or its block of code ends."""

    def __init__(self, optimizer: Optimizer, weights: list[tuple[Tensor, _Uses]]) -> None:
        self._weights = weights
        self._copies: list[Tensor | None] = []
        self._frozen: list[Tensor | None] = []  # of a step without a closure
        self._uses = [use for _, uses in weights for use in uses]
        for step, noted in self._uses:
            step.records = [*step.records, noted]
        before = optimizer.register_step_pre_hook(self._copy)
        self._hooks = (before, optimizer.register_step_post_hook(self._write_back))

    def remove(self) -> None:
        """Let the optimizer move all entries again."""
        for hook in self._hooks:
            hook.remove()
        for step, noted in self._uses:
            step.records = [each for each in step.records if each is not noted]

    def __enter__(self) -> FrozenDropped:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _copy(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Copy the weights and, where there is no closure, find the entries."""
        has_closure = callable(kwargs.get("closure", args[1] if len(args) > 1 else None))
        self._copies = [
            weight.detach().clone() if has_closure or any(noted for _, noted in uses) else None
            for weight, uses in self._weights
        ]
        self._frozen = [] if has_closure else [_frozen(*each) for each in self._weights]

    @torch.no_grad()
    def _write_back(self, *given: object) -> None:
        frozen = self._frozen or [_frozen(*each) for each in self._weights]
        for (weight, _), copy, mask in zip(self._weights, self._copies, frozen, strict=True):
            if copy is not None and mask is not None:
                weight.copy_(torch.where(mask, copy, weight))
        self._copies, self._frozen = [], []
        for _, noted in self._uses:
            noted.clear()


@torch.no_grad()
def _frozen(weight: Tensor, uses: _Uses) -> Tensor | None:
    """Return the entries of a weight that are left alone."""
    drawn = [(step, each) for step, noted in uses for each in noted]
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
        weights = [weights_of(use.owner).get(use.key) for use in of_one]
        steps = [step for weight in weights if weight is not None for step in weight.steps]
        dropouts = [step for step in steps if isinstance(step, WeightDropout)]
        if len(dropouts) == len(of_one) and all(step.is_random for step in steps):
            check_is_plain(of_one[0].parameter, of_one[0].name)
            chosen.append((of_one[0].parameter, [(step, set()) for step in dropouts]))
    if not chosen:
        raise ValueError(
            f"`optimizer` has no parameter of {type(module).__name__} of which each use has weight "
            "dropout and no weight norm, so there is nothing to leave alone. See "
            "recoup.weights.applied(module)."
        )
    return FrozenDropped(optimizer, chosen)
