"""Gradients as values, owned by a store."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor

from recoup._arguments import check_choice, check_flag, check_type, shown
from recoup.errors import GradientError
from recoup.gradients.accumulation import described
from recoup.gradients.collecting import MODES, Backward, Mode, collect, collecting, is_handed_over
from recoup.gradients.container import scale_of, tensors_in, weight_in
from recoup.gradients.stepping import Stepping
from recoup.gradients.transfer import Transfer

# What candle's store calls what this one has.
_OF_CANDLE = {
    "extend": "a.extend_(b)",
    "get_id": "store[param]",
    "get_ids": "list(store)",
    "insert": "store[param] = gradient",
    "insert_id": "store[param] = gradient",
    "remove": "store.pop(param)",
}


class GradStore(Stepping, Transfer):
    """The gradients of some tensors, as values that can be summed, compared and applied.

    Kept: one gradient for each target that got one. Later ones are added in place, so that the sum
    of any number of backwards is as large as the parameters. Backward pays nothing.
    `.grad` of the targets, and of all other tensors, does not change.

    A target without a gradient is absent, which is not the same as zero: an optimizer leaves it
    alone. Keys are the tensors themselves, told separate by identity.

    Args:
        params: the tensors whose gradients are collected, as ``torch.optim`` takes them: tensors or
            pairs of name and tensor. Those that do not require grad are left out. None for a store
            that others are merged into.
        dtype: the type that gradients are summed in. By default the type of each parameter (its
            `grad_dtype` where that was set), and float32 for one of 16 bits.
        device: the device that gradients are summed on; by default that of each parameter. On
            another device, they are moved one by one, as backward makes them.
        ddp: the DistributedDataParallel that reduces the gradients of `params`, or False if none
            does. An error asks for it where there are several processes.

    Raises:
        ValueError: `params` are not tensors, or `dtype` is not a floating-point type.

    Example:
        >>> import recoup, torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> store = recoup.GradStore(model.parameters())
        >>> for _ in range(3):
        ...     _ = store.backward(model(torch.ones(5, 4)).square().mean())
        >>> len(store), model.weight.grad
        (2, None)
        >>> norm = store.mean_().clip_norm_(1.0)
        >>> store.step(optimizer)
        >>> len(store)
        0

    Source: candle's GradStore, https://github.com/huggingface/candle/pull/1483.
    """

    def __getattr__(self, name: str) -> Any:
        way_out = f": use `{_OF_CANDLE[name]}`" if name in _OF_CANDLE else ""
        raise AttributeError(f"A GradStore has no `{name}`{way_out}.", name=name, obj=self)

    # -- collecting ------------------------------------------------------------------------

    @classmethod
    def from_backward(
        cls,
        outputs: Tensor | Sequence[Tensor],
        params: Iterable[Tensor],
        grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
        **kwargs: Any,
    ) -> GradStore:
        """Return the gradients of `outputs` in a store of their own; arguments as in `backward`."""
        store = cls(params)
        store.backward(outputs, grad_outputs, **kwargs)
        return store

    @classmethod
    def from_grad(cls, params: Iterable[Tensor]) -> GradStore:
        """Return a store with the gradients in `.grad` of `params`, which becomes None.

        Raises:
            GradientError: none of them has a gradient.
            ValueError: there are none.
        """
        store = cls(params)
        if not store.params:
            raise ValueError("`params` is empty, but must hold what has gradients in `.grad`.")
        store._is_local = store._may_be_reduced(store.params)  # it may come from `no_sync`
        storages = None if store._is_local else set[int]()
        for each in store.params:
            gradient, each.grad = each.grad, None
            if gradient is not None:
                is_ours = is_handed_over(gradient, storages)
                store._add(each, gradient.detach(), is_ours=is_ours)
        store._count(len(store), store.params, 1.0, None)
        return store

    def backward(
        self,
        outputs: Tensor | Sequence[Tensor],
        grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
        *,
        params: Iterable[Tensor] | None = None,
        inputs: Tensor | Iterable[Tensor] = (),
        weight: float = 1.0,
        scaler: Any = None,
        mode: Mode = "auto",
        retain_graph: bool | None = None,
        create_graph: bool = False,
        allow_empty: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Add the gradients of `outputs` to the store, in place.

        =========  ================================================  ==========================
        `mode`     how                                               peak for shared parameters
        =========  ================================================  ==========================
        "auto"     a hook moves each gradient to the store; as       the store and one parameter
                   below where that would not be right
        "grad"     ``torch.autograd.grad``, summed by us; `.grad`    twice the store
                   is not touched meanwhile, for several threads
        "harvest"  a plain backward, which DDP, FSDP2 and reentrant  the store and one parameter;
                   checkpoints need                                  with reducers twice the store
        =========  ================================================  ==========================

        Args:
            outputs: the tensors where backward begins, usually a loss.
            grad_outputs: the gradients of `outputs`, of their shapes; may be left out for
                scalars.
            params: the targets of this call; by default those of the store.
            inputs: other tensors, whose gradients are returned.
            weight: the weight of this call in `mean_`: the gradient of a mean over n tokens is
                multiplied by ``weight=n`` here, and divided by the sum of all weights there.
            scaler: a ``torch.amp.GradScaler`` by which to scale `outputs`; the store remembers the
                scale.
            mode: as above.
            retain_graph: as for ``torch.autograd.backward``.
            create_graph: as for ``torch.autograd.backward``; such gradients are summed out of
                place.
            allow_empty: whether to allow that no target gets a gradient.

        Returns:
            The gradients of `inputs`; None for one that does not take part in `outputs`.

        Raises:
            GradientError: no target got a gradient, or `mode` cannot run this backward; the store
                is as before, or later calls raise until `clear()`.
            ValueError: an argument is not valid.
        """
        self._check_is_whole()
        check_flag(create_graph=create_graph, allow_empty=allow_empty)
        if retain_graph is not None:
            check_flag(retain_graph=retain_graph)
        check_choice(*MODES, mode=mode)
        scale = None if scaler is None else scale_of(scaler)
        weight = weight_in(weight)
        wanted = tensors_in("inputs", [inputs] if isinstance(inputs, Tensor) else inputs)
        roots, seeds = _roots(outputs, grad_outputs, weight, scaler)
        targets = self._targets(params, wanted, allow_empty=allow_empty)
        self._check_scale(scale, "A backward")
        backward = Backward(roots, seeds, targets, wanted, retain_graph, create_graph)
        with self._guarded():
            found, num_received = collect(self, backward, mode)
            self._count(num_received, () if allow_empty else targets, weight, scale)
        return tuple(found)

    @contextmanager
    def collecting(
        self, params: Iterable[Tensor] | None = None, *, allow_empty: bool = False
    ) -> Generator[None]:
        """Add the gradients of every ``.backward()`` within to the store; `.grad` is restored.

        Use it around code that calls backward itself: a trainer, an engine, a wrapper. It adds one
        to `weight`. Within, `.grad` of the targets begins with None and is summed as ever, so that
        code may read it and clip it; at the end it moves to the store. So it takes the bytes of
        these gradients beside those of a store that is not empty.

        Args:
            params: the targets; by default those of the store.
            allow_empty: whether to allow that no target gets a gradient.

        Raises:
            GradientError: no target got a gradient, or `.grad` of one was set to None after it had.

        Example:
            >>> import recoup, torch
            >>> model = torch.nn.Linear(4, 2)
            >>> store = recoup.GradStore(model.parameters())
            >>> with store.collecting():
            ...     model(torch.ones(5, 4)).sum().backward()
            >>> len(store), model.weight.grad
            (2, None)
        """
        self._check_is_whole()
        check_flag(allow_empty=allow_empty)
        self._check_scale(None, "A backward")
        targets = self._targets(params, (), allow_empty=allow_empty)
        with self._guarded():
            with collecting(self, targets) as received:
                yield
            self._count(len(received), () if allow_empty else targets, 1.0, None)

    def _targets(
        self, params: Iterable[Tensor] | None, inputs: Sequence[Tensor], *, allow_empty: bool
    ) -> tuple[Tensor, ...]:
        """Return the targets of a call, which are checked as the `inputs` are."""
        given = self.params if params is None else tensors_in("params", params)
        targets = tuple([each for each in given if each.requires_grad])
        if not given and not inputs and params is None:
            raise ValueError(
                "`params` is missing: the store was made without parameters, so pass those whose "
                "gradients it is to collect."
            )
        if not targets and not inputs and not allow_empty:
            raise GradientError(
                "None of the `params` requires grad, so there is nothing to collect. Call "
                "`requires_grad_()` on what is to be trained."
            )
        ids = set(map(id, targets)) if inputs else ()
        for each in inputs:
            wrong = "is in `params`, too" if id(each) in ids else "does not require grad"
            if id(each) in ids or not each.requires_grad:
                raise ValueError(
                    f"`inputs` has {described(each)}, which {wrong}. Name each tensor once, and "
                    "call `requires_grad_()` on it before forward."
                )
        return targets

    def _count(
        self, num_received: int, wanted: Sequence[Tensor], weight: float, scale: float | None
    ) -> None:
        """Record what was collected, or raise if none of what is `wanted` was."""
        if wanted and not num_received:
            raise GradientError(
                f"None of the {len(wanted)} targets got a gradient. Are they what `outputs` was "
                "made from, and not copies? If it is right, pass allow_empty=True."
            )
        self.weight += weight
        self._scale = scale  # a store emptied by `pop` may have had another one

    @contextmanager
    def _unchanged_by_errors(self) -> Generator[Self]:
        """Yield a store to collect in, this one if it is empty: an error leaves this unchanged."""
        self._check_is_whole()
        if not self:
            yield self
            return
        separate = self._derived(())
        separate.weight, separate._scale = 0.0, None
        yield separate
        self.extend_(separate)


# -- arguments -------------------------------------------------------------------------------------


def _roots(
    outputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None,
    weight: float,
    scaler: Any,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs and their gradients, scaled and weighted, where backward begins."""
    roots, seeds = _listed(outputs), _listed(grad_outputs)
    for root in roots:
        check_type(Tensor, "a tensor, or several: a loss made from the targets", outputs=root)
    if not any(root.requires_grad for root in roots):
        raise GradientError(
            "`outputs` does not require grad: nothing that requires grad took part in it, or it "
            "was detached."
        )
    seeds = cast("list[Any]", [None] * len(roots)) if grad_outputs is None else seeds
    if len(seeds) != len(roots):
        raise ValueError(
            f"`grad_outputs` has {len(seeds)} gradients for {len(roots)} outputs. Give one for "
            "each; None for a scalar."
        )
    for root, seed in zip(roots, seeds, strict=True):
        fits = root.numel() == 1 if seed is None else getattr(seed, "shape", None) == root.shape
        if not fits:
            got = tuple(seed.shape) if isinstance(seed, Tensor) else shown(seed)
            raise ValueError(
                f"`grad_outputs` has {got} for an output of shape {tuple(root.shape)}. Give a "
                "gradient of that shape; only a scalar needs none."
            )
    if scaler is not None:
        roots = [scaler.scale(root) for root in roots]
    if weight != 1:
        pairs = zip(roots, seeds, strict=True)
        seeds = [torch.full_like(r, weight) if s is None else s * weight for r, s in pairs]
    return roots, seeds


def _listed(given: Any) -> list[Any]:
    return [*given] if isinstance(given, list | tuple) else [given]
