"""Handing the gradients of stores to an optimizer, by its own `step`."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from recoup._arguments import check_choice, check_flag
from recoup.errors import GradientError
from recoup.gradients.algebra import Algebra, check_are_stores, check_scales
from recoup.gradients.collecting import ReplacedGrad
from recoup.gradients.container import UNSCALED, members_of, parameters_of, refuse_any, scale_of

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
        scale = scale_of(scaler)
        self._check_scaler(scale, has_unscaled=False)
        for optimizer in optimizers:
            _check_steps(optimizer)
        optimizers = tuple(dict.fromkeys(optimizers))
        members = members_of("optimizers", optimizers, self)
        for optimizer in optimizers:
            if _has_unscaled(scaler, optimizer):
                raise GradientError(
                    f"`scaler` has unscaled for this {type(optimizer).__name__} since its last "
                    "`update`. Merge stores first (`extend_`), and unscale their sum once."
                )
        refuse_any(
            [each for each, gradient in self.items() if gradient.device != each.device],
            None,
            "The gradient of {} is on another device, where no scaler looks for it. Move the "
            "store to the parameters first (`to`).",
        )
        with self._guarded():
            self._num_changes += 1
            for optimizer, parameters in zip(optimizers, members, strict=True):
                held = [self._gradients.get(each) for each in parameters]
                types = [None if each is None else each.dtype for each in held]
                without_graph = map(_without_graph, held)
                with ReplacedGrad([*zip(parameters, without_graph, types, strict=True)]):
                    scaler.unscale_(optimizer)
            for each, gradient in self.items():
                if gradient.requires_grad:  # a copy without the graph was divided
                    self._gradients[each] = gradient / scale
        self._scale = UNSCALED
        return ~self.isfinite()

    def _check_scaler(self, scale: float | None, *, has_unscaled: bool) -> None:
        """Raise if a scaler, of this scale now, would divide by another one, or a second time."""
        if self._scale == UNSCALED and not has_unscaled:
            raise GradientError(
                "The store was unscaled before, and `scaler` would unscale it again: it was "
                "updated since, or is another, or `unscale_` was not given this optimizer. Call "
                "`unscale_` once, and `scaler.update()` after the step only."
            )
        if self._scale not in (None, UNSCALED):
            self._check_scale(scale, "This call")

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
        _check_are_leaves(params)
        check_flag(consume=consume)
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

        `.grad` is zero, and not None, where there is no gradient, if it is `with_zeros`. A scaler
        that divides the gradients has kernels that change no version.
        """
        self._check_is_whole()
        held = [self._gradients.get(each) for each in parameters]
        lent = [
            _fitting(gradient, each, is_copied=not consume, with_zeros=with_zeros)
            for gradient, each in zip(held, parameters, strict=True)
        ]
        pairs = zip(held, lent, strict=True)
        # An optimizer changes the part of a sharded one that is here.
        own = [getattr(e, "_local_tensor", e) for e, each in pairs if e is each and e is not None]
        versions = [each._version for each in own]
        try:
            with ReplacedGrad([(p, grad, None) for p, grad in zip(parameters, lent, strict=True)]):
                yield
        except BaseException as error:
            if consume and (is_divided or versions != [each._version for each in own]):
                self._damage = f"{type(error).__name__}: {error}"
            raise
        if consume and len(self) == len([each for each in held if each is not None]):
            self.clear()
        elif consume:
            for each in parameters:
                self.discard(each)

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
        applied, and is restored afterwards. A store without gradients for the optimizer does
        nothing. While accelerate accumulates (`accelerator.accumulate`), its optimizers do nothing
        either: the store keeps its gradients, to which those of the next batch are added.

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
    check_choice("skip", "zero", "error", missing=missing)
    check_choice("error", "ignore", unknown=unknown)
    scale = None if scaler is None else scale_of(scaler)
    if not stores:
        raise ValueError("`stores` is empty, but there must be at least one.")
    check_are_stores("stores", *stores)
    _check_steps(optimizer)
    parameters = parameters_of(optimizer)
    targets = {id(each): each for store in stores for each in store}
    _check_match(optimizer, targets, missing, unknown)
    if missing == "skip" and targets.keys().isdisjoint(map(id, parameters)):
        return None
    if not getattr(getattr(optimizer, "gradient_state", None), "sync_gradients", True):
        return None  # the step of accelerate would do nothing
    check_scales(*stores)
    has_unscaled = scaler is None or _has_unscaled(scaler, optimizer) is not False
    next(filter(len, stores), stores[0])._check_scaler(scale, has_unscaled=has_unscaled)
    total = stores[0] if consume else stores[0].clone()
    total.extend_(*stores[1:], consume=consume)
    is_divided = scaler is not None and total._scale != UNSCALED
    with_zeros = missing == "zero"
    with total._as_grad(parameters, consume=True, with_zeros=with_zeros, is_divided=is_divided):
        return optimizer.step() if scaler is None else scaler.step(optimizer)


# -- gradients for `.grad` -------------------------------------------------------------------------


def _without_graph(gradient: Tensor | None) -> Tensor | None:
    """Return a copy of a gradient that has a graph, and any other itself."""
    if gradient is None or not gradient.requires_grad:
        return gradient
    return gradient.detach().clone()


def _fitting(
    gradient: Tensor | None, target: Tensor, *, is_copied: bool, with_zeros: bool
) -> Tensor | None:
    """Return a gradient on the device of `target`, in its type and strides; itself, if it fits."""
    dtype = target.grad_dtype or target.dtype  # None allows any type, but not every optimizer does
    if gradient is None:
        needs_one = with_zeros and target.requires_grad
        return torch.zeros_like(target, dtype=dtype) if needs_one else None
    if gradient.dtype is not dtype or gradient.device != target.device:
        gradient, is_copied = gradient.detach().to(device=target.device, dtype=dtype), False
    if not gradient.is_sparse and gradient.stride() != target.stride():
        return torch.empty_like(target, dtype=dtype).copy_(gradient.detach())
    return gradient.detach().clone() if is_copied or gradient.requires_grad else gradient


# -- checks ----------------------------------------------------------------------------------------


def _check_steps(optimizer: Any) -> None:
    """Raise unless the step of `optimizer` needs nothing but gradients, in `.grad`."""
    kind = type(optimizer).__name__
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"`optimizer` is a {kind}, but must have `param_groups` and `step`.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"`optimizer` is a {kind}, which evaluates the loss several times within a step "
            "(`closure`). Call its `step` with a closure, or use another optimizer."
        )
    _check_are_leaves(optimizer)


def _check_are_leaves(params: Any) -> None:
    refuse_any(
        [each for each in parameters_of(params) if not each.is_leaf],
        params,
        "{} is not a leaf tensor, so its `.grad` cannot be replaced. For an optimizer with "
        "`differentiable`, set `.grad` yourself, from `store[param]`.",
    )


def _check_match(
    optimizer: Any, targets: Mapping[int, Tensor], missing: Missing, unknown: Unknown
) -> None:
    """Raise unless the gradients, of targets by id, are what the arguments ask for."""
    parameters = parameters_of(optimizer)
    ids = set(map(id, parameters))
    refuse_any(
        [each for each in targets.values() if unknown == "error" and id(each) not in ids],
        optimizer,
        "`optimizer` does not have {}, of which the store holds the gradient. Give it to its own "
        'optimizer (`split`), drop it (`discard`), or pass unknown="ignore". If parameters were '
        "replaced (`load_state_dict(assign=True)`, wrapping), carry a store over by `state_dict`.",
    )
    held = [each for each in parameters if id(each) in targets]
    absent = [each for each in parameters if id(each) not in targets and each.requires_grad]
    refuse_any(
        absent if missing == "error" else [],
        optimizer,
        "The store has no gradient of {}, which took no part in the loss. Leave it out of the "
        'optimizer, or pass missing="skip" or "zero".',
    )
    refuse_any(
        [each for each in held if not each.requires_grad],
        optimizer,
        "{} was frozen after its gradient had been collected, and a step would move it. Drop the "
        "gradient (`discard`), or set `requires_grad` again.",
    )


def _has_unscaled(scaler: Any, optimizer: Any) -> bool | None:
    """Whether `scaler` has unscaled for `optimizer` since its last update; None if unknown."""
    states = getattr(scaler, "_per_optimizer_states", None)  # None too if it is not enabled
    if states is None:
        return None
    return id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED"
