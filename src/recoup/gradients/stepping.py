"""Handing the gradients of stores to an optimizer, by its own `step`."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from recoup._arguments import check_flag
from recoup.errors import GradientError
from recoup.gradients.accumulation import scaled
from recoup.gradients.algebra import Algebra, check_is_store, check_scales
from recoup.gradients.container import UNSCALED, scaled_by
from recoup.gradients.replaced_grad import ReplacedGrad
from recoup.gradients.targets import check_scaler, described, names_of, parameters_of

__all__ = ["Stepping", "step"]

Missing = Literal["skip", "zero", "error"]
Unknown = Literal["error", "ignore"]


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
        check_scaler(scaler)
        self._check_is_scaled_by(scaler)
        members = {each: _parameters_to_step(each) for each in optimizers}
        self._check_each_has_one(members.values())
        for optimizer in members:
            if _is_unscaled(scaler, optimizer):
                raise GradientError(
                    f"`scaler` has unscaled for this {type(optimizer).__name__} since its last "
                    "`update`. Merge stores first (`extend_`), and unscale their sum once."
                )
        with self._guarded():
            self._num_changes += 1
            for optimizer, parameters in members.items():
                held = [self._gradients.get(each) for each in parameters]
                types = [None if each is None else each.dtype for each in held]
                with ReplacedGrad(parameters, [*map(_without_graph, held)], types):
                    scaler.unscale_(optimizer)
            for each, gradient in self.items():
                if gradient.requires_grad:  # a copy without the graph was divided
                    self._gradients[each] = scaled(gradient, 1 / float(scaler.get_scale()))
        self._scale = UNSCALED
        return ~self.isfinite()

    def _check_each_has_one(self, members: Iterable[Sequence[Tensor]]) -> None:
        """Raise unless each gradient belongs to one of several optimizers, on its device."""
        ids = [set(map(id, parameters)) for parameters in members]
        for each, gradient in self.items():
            num_members = sum(id(each) in mine for mine in ids)
            if num_members == 0:
                raise GradientError(
                    "`unscale_` was not given the optimizers of all gradients in the store. Give "
                    "all, or `split` the store first."
                )
            if num_members > 1:
                raise GradientError(
                    f"{described(each).capitalize()} belongs to {num_members} of the optimizers, "
                    "and each would divide its gradient. Give `unscale_` one of them."
                )
            if gradient.device != each.device:
                raise GradientError(
                    f"The gradient of {described(each)} is on {gradient.device}, and a scaler "
                    f"needs it on {each.device}. Move the store there first (`to`)."
                )

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

    @contextmanager
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
        parameters = parameters_of(params)
        _check_are_leaves(params, parameters)
        with self._as_grad(parameters, consume=consume):
            yield

    @contextmanager
    def _as_grad(
        self,
        parameters: Sequence[Tensor],
        *,
        consume: bool,
        with_zeros: bool = False,
        is_divided: bool = False,
    ) -> Generator[None]:
        """Do what `as_grad` does.

        Args:
            parameters: the tensors whose `.grad` is set.
            consume: as in `as_grad`.
            with_zeros: whether `.grad` is zero, and not None, where there is no gradient.
            is_divided: whether a scaler divides the gradients, whose kernels change no version.
        """
        self._check_is_whole()
        gradients = self._gradients
        lent: list[Tensor | None] = []
        for parameter in parameters:
            gradient = gradients.get(parameter)
            if gradient is not None:
                gradient = _fitting(gradient, parameter, is_copied=not consume)
            elif with_zeros and parameter.requires_grad:
                gradient = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            lent.append(gradient)
        replaced = ReplacedGrad(parameters, lent, [None] * len(parameters))
        try:
            with replaced:
                yield
        except BaseException as error:
            is_changed = any(
                each is gradients.get(parameter) and replaced.is_changed(index)
                for index, (parameter, each) in enumerate(zip(parameters, lent, strict=True))
            )
            if consume and (is_changed or is_divided):
                self._damage = f"{type(error).__name__}: {error}"
            raise
        if consume:
            for parameter in parameters:
                gradients.pop(parameter, None)
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
    check_flag(consume=consume)
    if scaler is not None:
        check_scaler(scaler)
    if not stores:
        raise ValueError("`stores` is empty, but there must be at least one.")
    for store in stores:
        check_is_store("stores", store)
        store._check_is_whole()
    parameters = _parameters_to_step(optimizer)
    targets = {id(each): each for store in stores for each in store._gradients}
    _check_match(optimizer, parameters, targets, missing, unknown)
    if missing == "skip" and targets.keys().isdisjoint(map(id, parameters)):
        return None
    check_scales(*stores)
    next(filter(len, stores), stores[0])._check_goes_to(optimizer, scaler)
    total = stores[0] if consume else stores[0].clone()
    total.extend_(*stores[1:], consume=consume)
    is_divided = scaler is not None and total._scale != UNSCALED
    with_zeros = missing == "zero"
    with total._as_grad(parameters, consume=True, with_zeros=with_zeros, is_divided=is_divided):
        return optimizer.step() if scaler is None else scaler.step(optimizer)


# -- gradients in `.grad` --------------------------------------------------------------------------


def _without_graph(gradient: Tensor | None) -> Tensor | None:
    """Return a copy of a gradient that has a graph, and any other itself."""
    if gradient is None or not gradient.requires_grad:
        return gradient
    return gradient.detach().clone()


def _fitting(gradient: Tensor, target: Tensor, *, is_copied: bool) -> Tensor:
    """Return `gradient` on the device of `target`, and in its type and strides.

    It is `gradient` itself if that fits, unless it is to be copied, or has a graph.
    """
    dtype = target.grad_dtype or target.dtype  # None allows any type, but not every optimizer does
    if gradient.dtype is not dtype or gradient.device != target.device:
        gradient, is_copied = gradient.to(device=target.device, dtype=dtype), False
    if not gradient.is_sparse and gradient.stride() != target.stride():
        return torch.empty_like(target, dtype=dtype).copy_(gradient.detach())
    return gradient.detach().clone() if is_copied or gradient.requires_grad else gradient


# -- checks ----------------------------------------------------------------------------------------


def _parameters_to_step(optimizer: Any) -> tuple[Tensor, ...]:
    """Return the parameters of `optimizer`, or raise if its step needs more than gradients."""
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"`optimizer` is a {type(optimizer).__name__}, but must have `param_groups` and `step`."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"`optimizer` is a {type(optimizer).__name__}, which evaluates the loss several times "
            "within a step (`closure`), so one gradient does not suffice. Call its `step` with a "
            "closure, or use another optimizer."
        )
    parameters = parameters_of(optimizer)
    _check_are_leaves(optimizer, parameters)
    return parameters


def _check_match(
    optimizer: Any,
    parameters: Sequence[Tensor],
    targets: Mapping[int, Tensor],
    missing: Missing,
    unknown: Unknown,
) -> None:
    """Raise unless gradients of `targets`, given by id, are what the arguments ask for."""
    for argument, value, choices in (
        ("missing", missing, ("skip", "zero", "error")),
        ("unknown", unknown, ("error", "ignore")),
    ):
        if value not in choices:
            raise ValueError(f"`{argument}` is {value!r}, but must be one of {', '.join(choices)}.")
    ids = set(map(id, parameters))
    strangers = [each for each in targets.values() if id(each) not in ids]
    if strangers and unknown == "error":
        raise GradientError(
            f"`optimizer` does not have {names_of(optimizer, strangers)}, of which the store holds"
            " the gradient. Give those to their own optimizer (`split`), "
            'drop them (`discard`), or pass unknown="ignore". After `load_state_dict(assign=True)` '
            "or wrapping, the parameters are other objects: carry a store over by `state_dict` and "
            "`load_state_dict`."
        )
    if missing == "error":
        absent = [each for each in parameters if id(each) not in targets and each.requires_grad]
        if absent:
            raise GradientError(
                f"The store has no gradient of {names_of(optimizer, absent)}. They took no part in "
                'the loss: leave them out of the optimizer, or pass missing="skip" or "zero".'
            )
    frozen = [each for each in parameters if not each.requires_grad and id(each) in targets]
    if frozen:
        raise GradientError(
            f"{names_of(optimizer, frozen)} was frozen after its gradient had been collected, and a"
            " step would move it. Drop the gradient (`discard`), or set `requires_grad` again."
        )


def _check_are_leaves(params: Any, parameters: Sequence[Tensor]) -> None:
    within_graph = [each for each in parameters if not each.is_leaf]
    if within_graph:
        raise GradientError(
            f"{names_of(params, within_graph)} is not a leaf tensor, so the step cannot "
            "replace its `.grad`. For an optimizer with `differentiable`, set `.grad` yourself, "
            "from `store[param]`."
        )


def _is_unscaled(scaler: Any, optimizer: Any) -> bool | None:
    """Whether `scaler` has unscaled for `optimizer` since its last update; None if unknown."""
    states = getattr(scaler, "_per_optimizer_states", None)  # None too if it is not enabled
    if states is None:
        return None
    return id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED"
