"""One optimizer step with the gradients of one store or several."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from recoup.errors import GradientError
from recoup.gradients.algebra import Algebra
from recoup.gradients.applying import (
    Missing,
    Unknown,
    check_can_step,
    installed,
    parameters_of,
)
from recoup.gradients.container import UNSCALED, scaled_by

__all__ = ["Stepping", "step"]


class Stepping(Algebra):
    """How gradients get to an optimizer."""

    def unscale_(self, scaler: Any, *optimizers: Any) -> Tensor:
        """Divide by the scale of a ``torch.amp.GradScaler``, for a clip before `step`.

        Args:
            scaler: the scaler that the losses went through.
            optimizers: all optimizers that the gradients will go to.

        Returns:
            Whether an entry is infinite or NaN, so that `step` with this scaler will skip.

        Raises:
            GradientError: the store holds other gradients, or was unscaled before.
        """
        self._check_is_whole()
        self._check_isscaled_by(scaler)
        parameters: dict[Tensor, str] = {}
        for optimizer in optimizers:
            check_can_step(optimizer, (), "skip", "ignore")
            parameters |= parameters_of(optimizer)
        if any(each not in parameters for each in self):
            raise GradientError(
                "`unscale_` was not given the optimizers of all gradients in the store. Give all, "
                "or `split` the store first."
            )
        with self._guarded():
            self._entries.num_changes += 1
            for optimizer in optimizers:
                mine = parameters_of(optimizer)
                with installed(self._entries.gradients, mine, as_they_are=True):
                    scaler.unscale_(optimizer)
        self._scale = UNSCALED
        return ~self.isfinite()

    def _check_isscaled_by(self, scaler: Any) -> None:
        if self._scale == UNSCALED:
            raise GradientError("The store was unscaled before. Call `unscale_` once.")
        if self._scale is not None and self._scale != float(scaler.get_scale()):
            raise GradientError(
                f"The gradients are {scaled_by(self._scale)}, and the scale of `scaler` is "
                f"{float(scaler.get_scale()):g} now. Call `scaler.update()` after the step only."
            )

    @contextmanager
    def as_grad(self, params: Any, *, consume: bool = True) -> Generator[None]:
        """Let `.grad` be what the store holds, for code that reads it.

        Args:
            params: an optimizer, or tensors. `.grad` of each is its gradient, or None if it has
                none; what was there is put back afterwards.
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

    @contextmanager
    def _installed(self, params: Any, consume: bool, missing: Missing) -> Generator[None]:
        self._check_is_whole()
        parameters = parameters_of(params)
        gradients = self._entries.gradients
        if not consume:
            gradients = {each: gradients[each].clone() for each in gradients if each in parameters}
        changed: list[Tensor] = []
        try:
            with installed(gradients, parameters, missing=missing) as changed:
                yield
        except BaseException as error:
            if consume and any(each in gradients for each in changed):
                self._damage = f"{type(error).__name__}: {error}"
            raise
        if consume:
            for each in parameters:
                gradients.pop(each, None)
            if not gradients:
                self.clear()

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

        It is the optimizer's own step, with its hooks and schedulers. `.grad` that was there is
        not applied, and is there again afterwards. A store without gradients does nothing.

        Args:
            optimizer: anything with `param_groups` and `step`.
            scaler: a ``torch.amp.GradScaler``, whose `step` is called instead. Call its `update`
                yourself, after all steps.
            consume: whether the gradients leave the store. If not, the optimizer gets copies, since
                it may change what it is given.
            missing: what to do with parameters that have no gradient: "skip" them, take "zero"
                (weight decay and momentum move them), or "error".
            unknown: what to do with gradients that the optimizer has no parameter for: "error", or
                "ignore" them, which leaves them in the store.

        Returns:
            What the optimizer's step returns.

        Raises:
            GradientError: before anything is changed, when `missing` or `unknown` say so, a
                parameter was frozen meanwhile, or the scale is not that of `scaler`.
            ValueError: the optimizer needs a closure, or an argument is not what it must be.
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
        stores: whose gradients are summed, parameter by parameter.
        scaler: as in `GradStore.step`, and so are the others.
        consume: likewise.
        missing: likewise.
        unknown: likewise.

    Returns:
        What the optimizer's step returns.

    Raises:
        GradientError: as in `GradStore.step`.
        ValueError: likewise, or there is no store.

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
        store._check_is_whole()
    targets = dict.fromkeys(each for store in stores for each in store)
    check_can_step(optimizer, targets, missing, unknown)
    if not targets and missing == "skip":
        return None
    total = stores[0] if consume else stores[0].clone()
    total.extend_(*(store for store in stores[1:] if store is not stores[0]), consume=consume)
    if scaler is not None and total._scale != UNSCALED:
        total._check_isscaled_by(scaler)
    if scaler is None and isinstance(total._scale, float):
        raise GradientError(
            f"The gradients are {scaled_by(total._scale)}, and `scaler` was not given. Give it, "
            "or call `unscale_` first."
        )
    with total._installed(optimizer, True, missing):
        return optimizer.step() if scaler is None else scaler.step(optimizer)
