"""One optimizer step with the gradients of one store or several."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from recoup._core.restoring import restoring
from recoup.errors import GradientError
from recoup.gradients.algebra import Algebra, check_is_store, check_scales
from recoup.gradients.applying import (
    Missing,
    Unknown,
    check_can_step,
    installed,
)
from recoup.gradients.container import UNSCALED, scaled_by
from recoup.gradients.merging import scaled
from recoup.gradients.targets import parameters_of, said

__all__ = ["Stepping", "step"]


class Stepping(Algebra):
    """The methods that hand gradients to an optimizer."""

    def unscale_(self, scaler: Any, *optimizers: Any) -> Tensor:
        """Divide by the scale of a ``torch.amp.GradScaler``, to clip before `step`.

        Args:
            scaler: the scaler that the losses went through.
            optimizers: all optimizers that the gradients will go to.

        Returns:
            Whether an entry is infinite or NaN, so that `step` with this scaler will skip.

        Raises:
            GradientError: the store holds other gradients, or was unscaled before.
        """
        self._check_is_whole()
        self._check_is_scaled_by(scaler)
        optimizers = tuple(dict.fromkeys(optimizers))
        members = self._members(optimizers)
        for optimizer in optimizers:
            if _is_unscaled(scaler, optimizer):
                raise GradientError(
                    f"`scaler` has unscaled for this {type(optimizer).__name__} since its last "
                    "`update`. Merge stores first (`extend_`), and unscale their sum once."
                )
        with self._guarded():
            self._entries.num_changes += 1
            for optimizer, mine in members:
                with installed(self._entries.gradients, mine, as_they_are=True):
                    scaler.unscale_(optimizer)
            for each, gradient in self.items():
                if gradient.requires_grad:  # a copy without the graph was divided
                    self._entries.gradients[each] = scaled(gradient, 1 / float(scaler.get_scale()))
        self._scale = UNSCALED
        return ~self.isfinite()

    def _members(self, optimizers: tuple[Any, ...]) -> list[tuple[Any, dict[Tensor, str]]]:
        """Return each optimizer with its parameters; raise unless each gradient belongs to one."""
        members: list[tuple[Any, dict[Tensor, str]]] = []
        for optimizer in optimizers:
            check_can_step(optimizer, (), "skip", "ignore")
            members.append((optimizer, parameters_of(optimizer)))
        for each, gradient in self.items():
            num_members = sum(each in mine for _, mine in members)
            if num_members == 0:
                raise GradientError(
                    "`unscale_` was not given the optimizers of all gradients in the store. Give "
                    "all, or `split` the store first."
                )
            if num_members > 1:
                raise GradientError(
                    f"{said(each).capitalize()} belongs to {num_members} of the optimizers, and "
                    "each would divide its gradient. Give `unscale_` one of them."
                )
            if gradient.device != each.device:
                raise GradientError(
                    f"The gradient of {said(each)} is on {gradient.device}, and a scaler needs it "
                    f"on {each.device}. Move the store there first (`to`)."
                )
        return members

    def _check_is_scaled_by(self, scaler: Any) -> None:
        if self._scale == UNSCALED:
            raise GradientError("The store was unscaled before. Call `unscale_` once.")
        if self._scale is not None and self._scale != float(scaler.get_scale()):
            raise GradientError(
                f"The gradients are {scaled_by(self._scale)}, and the scale of `scaler` is "
                f"{float(scaler.get_scale()):g} now. Call `scaler.update()` after the step only."
            )

    def _check_goes_to(self, optimizer: Any, scaler: Any) -> None:
        """Raise if a step would divide by a scale twice, or not at all."""
        if scaler is None:
            if isinstance(self._scale, float):
                raise GradientError(
                    f"The gradients are {scaled_by(self._scale)}, and `scaler` was not given. Give "
                    "it, or call `unscale_` first."
                )
        elif self._scale != UNSCALED:
            self._check_is_scaled_by(scaler)
        elif _is_unscaled(scaler, optimizer) is False:
            raise GradientError(
                "The store was unscaled, and `scaler` would unscale it again: it was updated "
                f"since, or is another, or `unscale_` was not given this "
                f"{type(optimizer).__name__}. Call `scaler.update()` after the step only."
            )

    @restoring
    def as_grad(self, params: Any, *, consume: bool = True) -> Generator[None]:
        """Set `.grad` to the gradients of the store, for code that reads it.

        Args:
            params: an optimizer, or tensors. `.grad` of each is its gradient, or None if it has
                none; the previous one is restored afterwards.
            consume: whether these gradients leave the store. If not, copies are installed.

        Example:
            >>> import recoup, torch
            >>> w = torch.nn.Parameter(torch.ones(2))
            >>> store = recoup.GradStore.from_backward((3 * w).sum(), [w])
            >>> with store.as_grad([w]):
            ...     print(w.grad)
            tensor([3., 3.])
            >>> w.grad, len(store)
            (None, 0)
        """
        with self._installed(params, consume, "skip"):
            yield

    @restoring
    def _installed(
        self, params: Any, consume: bool, missing: Missing, *, is_divided: bool = False
    ) -> Generator[None]:
        self._check_is_whole()
        parameters = parameters_of(params)
        gradients = self._entries.gradients
        if not consume:
            gradients = {
                each: gradients[each].detach().clone() for each in gradients if each in parameters
            }
        changed: list[Tensor] = []
        is_over = False
        try:
            with installed(gradients, parameters, missing=missing) as changed:
                yield
                is_over = True
            if consume:
                for each in parameters:
                    gradients.pop(each, None)
                if not gradients:
                    self.clear()
        except BaseException as error:
            if consume and (changed or is_divided or is_over):
                self._damage = f"{type(error).__name__}: {error}"
            raise

    def step(
        self,
        optimizer: Any,
        *,
        scaler: Any = None,
        consume: bool = True,
        missing: Missing = "skip",
        unknown: Unknown = "error",
    ) -> Any:
        """Call ``optimizer.step()`` with these gradients, and no others.

        It is the optimizer's own step, with its hooks and schedulers. A previous `.grad` is not
        applied, and is restored afterwards. A store without gradients for the optimizer
        does nothing.

        Args:
            optimizer: anything with `param_groups` and `step`.
            scaler: a ``torch.amp.GradScaler`` whose `step` is called instead. Call its `update`
                yourself, after all steps.
            consume: whether the gradients leave the store. If not, the optimizer gets copies, since
                it may change them.
            missing: what to do with parameters that have no gradient: "skip" them, use "zero"
                (weight decay and momentum move them), or raise an "error".
            unknown: what to do with gradients that the optimizer has no parameter for: raise an
                "error", or "ignore" them, which leaves them in the store.

        Returns:
            What the optimizer's step returns.

        Raises:
            GradientError: before anything is changed, when `missing` or `unknown` is "error", a
                parameter was frozen meanwhile, or the scale is not that of `scaler`.
            ValueError: the optimizer needs a closure, or an argument is not valid.
        """
        return step(
            optimizer, self, scaler=scaler, consume=consume, missing=missing, unknown=unknown
        )


def step(
    optimizer: Any,
    *stores: Stepping,
    scaler: Any = None,
    consume: bool = True,
    missing: Missing = "skip",
    unknown: Unknown = "error",
) -> Any:
    """Call ``optimizer.step()`` once, with the sum of several stores.

    Kept: nothing. The sum is made in the first store, and gradients leave the others as they are
    added, so that it takes no memory beyond theirs; with ``consume=False`` it takes one more store.

    Args:
        optimizer: anything with `param_groups` and `step`.
        stores: the stores whose gradients are summed, parameter by parameter.
        scaler: as in `GradStore.step`.
        consume: as in `GradStore.step`.
        missing: as in `GradStore.step`.
        unknown: as in `GradStore.step`.

    Returns:
        What the optimizer's step returns.

    Raises:
        GradientError: as in `GradStore.step`.
        ValueError: as in `GradStore.step`, or there is no store.

    Example:
        >>> import recoup, torch
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> a = recoup.GradStore.from_backward((3 * w).sum(), [w])
        >>> b = recoup.GradStore.from_backward((2 * w).sum(), [w])
        >>> recoup.step(torch.optim.SGD([w], lr=0.1), a, b)
        >>> w.data
        tensor([0.5000, 0.5000])

    Source: burn's ``step_multi``, https://github.com/tracel-ai/burn.
    """
    if not stores:
        raise ValueError("`stores` is empty, but there must be at least one.")
    for store in stores:
        check_is_store("stores", store)
        store._check_is_whole()
    targets = dict.fromkeys(each for store in stores for each in store)
    check_can_step(optimizer, targets, missing, unknown)
    if missing == "skip" and targets.keys().isdisjoint(parameters_of(optimizer)):
        return None
    check_scales(*stores)
    next(filter(len, stores), stores[0])._check_goes_to(optimizer, scaler)
    total = stores[0] if consume else stores[0].clone()
    total.extend_(*stores[1:], consume=consume)
    # The in-place division by a scaler does not change versions.
    is_divided = scaler is not None and total._scale != UNSCALED
    with total._installed(optimizer, True, missing, is_divided=is_divided):
        return optimizer.step() if scaler is None else scaler.step(optimizer)


def _is_unscaled(scaler: Any, optimizer: Any) -> bool | None:
    """Whether `scaler` has unscaled for `optimizer` since its last update; None if unknown."""
    states = getattr(scaler, "_per_optimizer_states", None)  # None too if it is not enabled
    if states is None:
        return None
    return id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED"
