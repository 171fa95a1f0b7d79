"""Running a backward whose gradients go to a store, and nowhere else.

NOTE [ Destinations of gradients ]

Rule 1. During a backward `.grad` of each target is None, and what autograd leaves there moves to
        the store as soon as it is complete: a sum takes one buffer of the size of the parameters,
        and one gradient in flight. The previous `.grad` and `grad_dtype` are restored afterwards,
        the same objects. All threads share the `.grad` of a tensor, so it is replaced by one thread
        at a time. While code of others runs (`collecting`) gradients stay in `.grad` until its end:
        trainers scale and clip them there.
Rule 2. Where autograd does not accumulate in `.grad` (tensors inside the graph), where gradients
        have a graph, and where post-accumulate hooks would see them, `torch.autograd.grad` computes
        the gradients.
Rule 3. Reducers of DDP and FSDP2 and checkpoints of the reentrant kind need a plain backward, which
        accumulates in all leaves; `.grad` of leaves that are not targets is restored. A reducer has
        to see all gradients, so they move at the end. It keeps the buffers that it writes to, which
        have the type of the parameters.
Rule 4. What autograd leaves in `.grad` belongs to the store, unless it has the memory of a gradient
        that backward began with or has delivered before, has the indices of a batch (sparse
        gradients), or may be a buffer of a reducer.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn

from recoup._core.tensors import Ends, ends_of, hidden_leaves
from recoup.errors import GradientError
from recoup.gradients.accumulation import described, is_sharded, owned
from recoup.gradients.container import Container

Mode = Literal["auto", "grad", "harvest"]
MODES = ("auto", "grad", "harvest")
Collected = tuple[list[Tensor | None], int]  # gradients of inputs; how many targets got one
_Grad = tuple[Tensor, Tensor | None, torch.dtype | None]  # a tensor, its `.grad` and `grad_dtype`


@dataclass
class Backward:
    """The arguments of a backward; each target requires grad, and occurs once."""

    outputs: Sequence[Tensor]
    grad_outputs: Sequence[Tensor | None]  # None for scalars
    targets: Sequence[Tensor]  # whose gradients are collected
    inputs: Sequence[Tensor]  # whose gradients are returned
    retain_graph: bool | None
    create_graph: bool

    @cached_property
    def ends(self) -> Ends:
        """The ends of the graph, before anything has run."""
        return ends_of(self.outputs)

    @property
    def wanted(self) -> list[Tensor]:
        """The tensors that get a gradient."""
        return [*self.targets, *self.inputs]


def collect(store: Container, backward: Backward, mode: Mode) -> Collected:
    """Add the gradients of `backward` to the store; return those of its inputs, and the number."""
    wanted = backward.wanted
    if not wanted:  # all are frozen
        return [], 0
    reason = '`mode` is "grad"' if mode == "grad" else _unlike_a_parameter(wanted)
    if backward.create_graph:
        reason = "`create_graph` asks for gradients with a graph, which cannot be summed in place"
    if mode == "harvest" and reason:
        raise GradientError(f'`mode` is "harvest", but {reason}. Use mode="grad".')
    if not reason:
        return _in_grad(store, backward, is_plain=mode == "harvest")
    return _by_grad(store, backward, f"{reason[0].upper()}{reason[1:]}")


def _unlike_a_parameter(targets: Iterable[Tensor]) -> str:
    """Return what is wrong with the first tensor whose `.grad` cannot be replaced, or nothing."""
    for target in targets:
        if not target.is_leaf:
            return f"{described(target)} is not a leaf, and autograd does not accumulate in it"
        hooks: Any = getattr(target, "_post_accumulate_grad_hooks", None)
        if hooks and not all(isinstance(hook, _Move) for hook in hooks.values()):
            return f"{described(target)} has a post-accumulate hook, which would take the gradient"
    return ""


# -- in torch.autograd.grad ------------------------------------------------------------------------


def _by_grad(store: Container, backward: Backward, reason: str) -> Collected:
    """Run `backward` by `torch.autograd.grad`, for a `reason`."""
    wanted, num_targets, why_not = backward.wanted, len(backward.targets), ""
    leaves = [each for each in wanted if each.is_leaf]
    if is_sharded(*wanted):
        why_not = "a target is a DTensor, whose gradient FSDP2 delivers"
    elif leaves and backward.ends.checkpoints:  # torch would silently skip what it cannot see
        why_not = "the graph has a checkpoint (not with use_reentrant=False), which delivers them"
    if why_not:
        raise GradientError(
            f"{reason}, but {why_not} in a plain backward only. Leave one of the two out, or use "
            'mode="harvest".'
        )
    num_received = 0
    with store._reduced_in_time(leaves, by_grad=True):
        arguments = (backward.outputs, wanted, backward.grad_outputs, backward.retain_graph)
        found: list[Tensor | None] = list(
            torch.autograd.grad(*arguments, backward.create_graph, allow_unused=True)
        )
        for index, each in enumerate(wanted):
            gradient, found[index] = found[index], None
            if gradient is None:
                continue
            # Without a graph, it may occur twice, be one of `grad_outputs`, or be held by a hook.
            is_ours = backward.create_graph and gradient.requires_grad
            gradient = gradient if is_ours else gradient.detach()
            if index < num_targets:
                num_received += 1
                store._add(each, gradient, is_ours=is_ours)
            else:
                found[index] = gradient if is_ours else gradient.clone()
            del gradient
    return found[num_targets:], num_received


# -- in `.grad` ------------------------------------------------------------------------------------


def _in_grad(store: Container, backward: Backward, *, is_plain: bool) -> Collected:
    """Run `backward`, plainly or for the wanted tensors alone, while `.grad` is replaced."""
    wanted, (leaves, checkpoints) = backward.wanted, backward.ends
    is_plain = is_plain or store._may_be_reduced(wanted) or bool(checkpoints)
    # torch looks at each of its `inputs`.
    is_all = is_plain or {*map(id, wanted)}.issuperset(map(id, leaves))
    if is_sharded(*wanted):
        # FSDP2 may sum into its own parameters over backwards that it does not reduce.
        leaves = [each for each in leaves if not isinstance(each, nn.Parameter)]
    others = [*backward.inputs, *(leaves if is_plain else ())]
    with (
        moving(store, backward.targets, others, backward.grad_outputs) as (move, replaced),
        hidden_leaves(checkpoints, replaced.hide),
    ):
        torch.autograd.backward(
            backward.outputs,
            backward.grad_outputs,
            retain_graph=backward.retain_graph,
            inputs=None if is_all else wanted,
        )
        found = [move.take(each) for each in backward.inputs]
    return found, len(move.received)


@contextmanager
def collecting(store: Container, targets: Sequence[Tensor]) -> Generator[set[int]]:
    """Collect what any backward within accumulates in `.grad` of the targets.

    It yields the ids of those that got a gradient, to be read at the end.
    """
    reason = _unlike_a_parameter(targets)
    if reason:
        raise GradientError(
            f"`collecting` reads `.grad`, but {reason}. Use `backward`, which needs no `.grad`."
        )
    # Code within may read and scale `.grad`, as trainers do to clip it.
    with moving(store, targets, is_read=True) as (move, _):
        yield move.received


class ReplacedGrad:
    """A context in which `.grad` and `grad_dtype` of some tensors are replaced.

    None for the type leaves it as it is.
    """

    _lock = threading.Lock()
    # By the id of a tensor, the contexts that have replaced its `.grad`, guarded by the lock.
    holders: ClassVar[dict[int, list[ReplacedGrad]]] = {}

    def __init__(self, meanwhile: Sequence[_Grad]) -> None:
        self._meanwhile = meanwhile
        self._thread = threading.get_ident()
        self._before: list[_Grad] = []

    def __enter__(self) -> Self:
        self._record([target for target, _, _ in self._meanwhile])
        try:
            _set([(t, grad, dtype or t.grad_dtype) for t, grad, dtype in self._meanwhile])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        _set(self._before)
        with self._lock:
            for target, _, _ in self._before:
                holders = self.holders[id(target)]
                holders.remove(self)
                if not holders:
                    del self.holders[id(target)]

    def hide(self, others: Iterable[Tensor]) -> None:
        """Replace `.grad` of more tensors by None."""
        known = {id(target) for target, _, _ in self._before}
        others = {id(each): each for each in others if id(each) not in known}.values()
        self._record(others)
        for other in others:
            other.grad = None

    def _record(self, targets: Iterable[Tensor]) -> None:
        """Record `.grad` of the targets, and keep other threads from replacing it."""
        with self._lock:
            for each in targets:
                holders = self.holders.get(id(each))
                if holders and holders[-1]._thread != self._thread:
                    raise GradientError(
                        f"Another thread is collecting the gradient of {described(each)}, and "
                        'there is one `.grad` for all. Use mode="grad", or take turns.'
                    )
            for each in targets:
                self.holders.setdefault(id(each), []).append(self)
        self._before += [(each, each.grad, each.grad_dtype) for each in targets]


class _Move:
    """The hook by which what `.grad` of a target receives moves to a store (See Rule 1).

    `storages` are the memory of others (See Rule 4); None if a reducer may have everything.
    """

    def __init__(self, store: Container, replaced: ReplacedGrad, storages: set[int] | None) -> None:
        self._store, self._replaced, self._storages = store, replaced, storages
        self.received: set[int] = set()  # the ids of the targets that got a gradient
        self.is_late = False  # whether gradients are noted only, to be moved later
        self.noted: list[Tensor] = []  # the targets that got such a gradient

    def __call__(self, target: Tensor) -> None:
        """Move the gradient of a target, if it is not that of a context within."""
        gradient = target.grad
        if gradient is None or ReplacedGrad.holders[id(target)][-1] is not self._replaced:
            return
        if self.is_late:
            self.noted.append(target)
        else:
            target.grad = None
            self.received.add(id(target))
            self._store._add(target, gradient, is_ours=is_handed_over(gradient, self._storages))

    def take(self, target: Tensor) -> Tensor | None:
        """Return the gradient of a tensor that is no target, or a copy if others may have it."""
        gradient = target.grad
        if gradient is None or is_handed_over(gradient, self._storages):
            return None if gradient is None else owned(gradient)
        return gradient.clone()


@contextmanager
def moving(
    store: Container,
    targets: Sequence[Tensor],
    others: Iterable[Tensor] = (),
    seeds: Iterable[Tensor | None] = (),
    *,
    is_read: bool = False,
) -> Generator[tuple[_Move, ReplacedGrad]]:
    """Move what `.grad` of the targets receives to the store; hide `.grad` of others.

    The memory of the seeds of a backward does not become that of a gradient. What code within reads
    stays in `.grad` until the end of the context.
    """
    known = set(map(id, targets))
    hidden = [*{id(each): each for each in others if id(each) not in known}.values()]
    reduces = store._may_be_reduced(targets)
    received = [(each, None, None if reduces else store._dtype_for(each)) for each in targets]
    replaced = ReplacedGrad(received + [(each, None, None) for each in hidden])
    parts = [seed._values() if seed.is_sparse else seed for seed in seeds if seed is not None]
    storages = None if reduces else {each.untyped_storage()._cdata for each in parts}
    move = _Move(store, replaced, storages)
    with store._reduced_in_time(targets), ExitStack() as contexts:
        for grad in [each.grad for each in (*targets, *hidden) if reduces]:
            if grad is not None:  # a reducer may write to it
                contexts.callback(grad.copy_, grad.clone())
        contexts.enter_context(replaced)
        move.is_late = is_read
        for target in () if reduces else targets:  # See Rule 3
            handle = cast("Any", target).register_post_accumulate_grad_hook(move)
            contexts.callback(handle.remove)
        yield move, replaced
        move.is_late = False
        lost = next((target for target in move.noted if target.grad is None), None)
        if lost is not None:
            raise GradientError(
                f"Within `collecting`, `.grad` of {described(lost)} was set to None after it had "
                "got a gradient (by `zero_grad`, for instance), which is lost. Do that before or "
                "afterwards."
            )
        for target in targets:
            if target.grad is not None:
                move(target)
        for target in targets:  # hooks run in the order of backward
            if (gradient := store._gradients.pop(target, None)) is not None:
                store._gradients[target] = gradient


def is_handed_over(gradient: Tensor, storages: set[int] | None) -> bool:
    """Whether nobody else has the memory of a gradient that autograd left in `.grad`.

    It is added to the `storages` that others have.
    """
    if storages is None or gradient.is_sparse:  # whose indices may be those of a batch
        return False
    storage = gradient.untyped_storage()._cdata
    is_new = storage not in storages
    storages.add(storage)
    return is_new


def _set(grads: Iterable[_Grad]) -> None:
    """Set `.grad` and `grad_dtype` of tensors."""
    for target, gradient, dtype in grads:
        # Once set, `grad_dtype` no longer follows the type of the tensor, and cannot be unset.
        if target.grad_dtype is not dtype:
            target.grad = None
            target.grad_dtype = dtype
        if target.grad is not gradient:
            target.grad = gradient
