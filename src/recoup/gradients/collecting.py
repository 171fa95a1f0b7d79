"""Running a backward whose gradients go to a store, and nowhere else.

NOTE [ Destinations of gradients ]

Rule 1. Autograd sums into `.grad`, in place. So during a backward, `.grad` of each target is its
        gradient in the store, and a sum takes one buffer of the size of the parameters. The
        previous `.grad` and `grad_dtype` are restored afterwards, the same objects. All threads
        share the `.grad` of a tensor, so it is replaced by one thread at a time. A gradient that is
        summed on another device goes there as soon as backward has made it.
Rule 2. Where autograd does not sum into `.grad` in place (`create_graph`, tensors inside the
        graph), and where post-accumulate hooks would see it, `torch.autograd.grad` computes the
        gradients, and they are summed here.
Rule 3. Reducers of DDP and FSDP2 and checkpoints of the reentrant kind need a plain backward, which
        accumulates in all leaves; `.grad` of leaves that are not targets is restored. A reducer
        keeps the buffers that it writes to, which have the type of the parameters.
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
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from recoup._core.graph_ends import Ends, ends_of, hidden_leaves
from recoup._core.saved_tensors import grad_mode
from recoup.errors import GradientError
from recoup.gradients.accumulation import is_reduced, is_sharded, owned
from recoup.gradients.container import Container
from recoup.gradients.targets import described

Mode = Literal["auto", "grad", "harvest"]
MODES = ("auto", "grad", "harvest")


@dataclass
class Backward:
    """The arguments of a backward.

    Args:
        outputs: the tensors where it begins.
        grad_outputs: the gradients of `outputs`, with None for scalars.
        targets: the tensors whose gradients are collected; each requires grad, and occurs once.
        inputs: the tensors whose gradients are returned.
        retain_graph: as for ``torch.autograd.backward``.
        create_graph: as for ``torch.autograd.backward``.
    """

    outputs: Sequence[Tensor]
    grad_outputs: Sequence[Tensor | None]
    targets: Sequence[Tensor]
    inputs: Sequence[Tensor]
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


def collect(store: Container, backward: Backward, mode: Mode) -> tuple[list[Tensor | None], int]:
    """Run `backward`, and add its gradients to the store.

    Returns:
        The gradients of its inputs, and the number of targets that got a gradient.
    """
    wanted = backward.wanted
    if not wanted:  # all are frozen
        return [], 0
    if mode == "grad":
        return _by_grad(store, backward, '`mode` is "grad"')
    reason = _unlike_a_parameter(wanted)
    if backward.create_graph:
        reason = "`create_graph` asks for gradients with a graph, which cannot be summed in place"
    if mode == "harvest" and reason:
        raise GradientError(f'`mode` is "harvest", but {reason}. Use mode="grad".')
    if not reason:
        leaves, checkpoints = backward.ends
        if is_sharded(*wanted):
            # FSDP2 may sum into its own parameters over backwards that it does not reduce.
            leaves = [each for each in leaves if not isinstance(each, nn.Parameter)]
        is_plain = mode == "harvest" or is_reduced(wanted) or bool(checkpoints)
        others = [*backward.inputs, *(leaves if is_plain else ())]
        with ExitStack() as contexts:
            try:
                lent = _lent(store, backward.targets, others, backward.grad_outputs)
                replaced = contexts.enter_context(lent)
            except GradInUseError as error:  # nothing has run yet
                if mode == "harvest":
                    raise
                reason = error.reason
            else:
                return _in_grad(store, backward, replaced, is_plain=is_plain)
    return _by_grad(store, backward, f"{reason[0].upper()}{reason[1:]}")


def _unlike_a_parameter(targets: Iterable[Tensor]) -> str:
    """Return what is wrong with the first tensor whose `.grad` cannot be lent, or nothing."""
    for target in targets:
        if not target.is_leaf:
            return f"{described(target)} is not a leaf, and autograd does not accumulate in it"
        if getattr(target, "_post_accumulate_grad_hooks", None):
            return f"{described(target)} has a post-accumulate hook, which would take the gradient"
    return ""


# -- in torch.autograd.grad ------------------------------------------------------------------------


def _by_grad(store: Container, backward: Backward, reason: str) -> tuple[list[Tensor | None], int]:
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


@contextmanager
def _lent(
    store: Container,
    targets: Sequence[Tensor],
    others: Iterable[Tensor] = (),
    seeds: Iterable[Tensor | None] = (),
) -> Generator[ReplacedGrad]:
    """Put the gradients of `store` into `.grad` of the targets, and None into that of others.

    The memory of `seeds` does not become that of a gradient.
    """
    known = set(map(id, targets))
    others = {id(each): each for each in others if id(each) not in known}.values()
    reduces = is_reduced(targets)
    # See Rule 3 for the type, and for what a reducer may write to.
    elsewhere = store._elsewhere(targets)
    dtypes = [
        target.grad_dtype if reduces or id(target) in elsewhere else store._dtype_for(target)
        for target in targets
    ]
    gradients: list[Tensor | None] = [None] * len(targets)
    if store._gradients:
        gradients = [
            None if id(target) in elsewhere else store._accumulator(target, dtype)
            for target, dtype in zip(targets, dtypes, strict=True)
        ]
    grads = [each.grad for each in (*targets, *others)] if reduces else []
    values = [(grad, grad.clone()) for grad in grads if grad is not None]
    nothing = [None] * len(others)
    parts = [seed._values() if seed.is_sparse else seed for seed in seeds if seed is not None]
    replaced = ReplacedGrad(
        [*targets, *others],
        [*gradients, *nothing],
        [*dtypes, *nothing],
        None if reduces else {each.untyped_storage()._cdata for each in parts},
    )
    replaced.is_converted = not reduces and not elsewhere
    with store._reduced_in_time(targets), replaced:
        try:
            yield replaced
        except BaseException:
            store._num_changes += sum(map(replaced.is_changed, range(len(targets))))
            raise
        finally:
            for grad, before in values:
                grad.copy_(before)


def _in_grad(
    store: Container, backward: Backward, replaced: ReplacedGrad, *, is_plain: bool
) -> tuple[list[Tensor | None], int]:
    """Run `backward`, plainly or for the wanted tensors alone, while `.grad` is replaced."""
    targets, wanted = backward.targets, backward.wanted
    moved: set[int] = set()

    def move(target: Tensor) -> None:
        gradient, target.grad = target.grad, None
        if gradient is not None:
            moved.add(id(target))
            with grad_mode(True):  # the gradient in the store may have a graph
                store._add(target, gradient, is_ours=False)

    # A reducer must see the gradients, and one that is reduced is moved at the end.
    elsewhere = set[int]() if is_reduced(targets) else store._elsewhere(targets)
    with ExitStack() as hooks, hidden_leaves(backward.ends.checkpoints, replaced.hide):
        for target in targets if elsewhere else ():
            if id(target) in elsewhere:
                handle = cast("Any", target).register_post_accumulate_grad_hook(move)
                hooks.callback(handle.remove)
        # torch looks at each of its `inputs`.
        is_all = is_plain or {*map(id, wanted)}.issuperset(map(id, backward.ends.leaves))
        torch.autograd.backward(
            backward.outputs,
            backward.grad_outputs,
            retain_graph=backward.retain_graph,
            inputs=None if is_all else wanted,
        )
    num_received = len(moved) + _receive(store, replaced, len(targets))
    return [replaced.take(len(targets) + i) for i in range(len(backward.inputs))], num_received


def _receive(store: Container, replaced: ReplacedGrad, num_targets: int) -> int:
    """Add what the targets received to the store, and return how many did."""
    num_received = 0
    for index in range(num_targets):
        gradient, lent = replaced.take(index), replaced.gradients[index]
        if gradient is None:
            continue
        num_received += 1
        target = replaced.targets[index]
        if lent is None and (not replaced.is_converted or target in store._gradients):
            store._add(target, gradient)
        elif gradient is not lent:
            store._put(target, gradient)
    return num_received


# -- in backwards of others ------------------------------------------------------------------------


@contextmanager
def collecting(store: Container, targets: Sequence[Tensor]) -> Generator[list[int]]:
    """Collect the gradients that any backward within accumulates in `.grad` of the targets.

    Yields:
        A list that gets one entry at the end: the number of targets that got a gradient.
    """
    reason = _unlike_a_parameter(targets)
    if reason:
        raise GradientError(
            f"`collecting` reads `.grad`, but {reason}. Use `backward`, which needs no `.grad`."
        )
    num_received: list[int] = []
    reduces = is_reduced(targets)
    with _lent(store, targets) as replaced:
        yield num_received
        for target, lent in zip(targets, replaced.gradients, strict=True):
            # A reducer may have moved it into a buffer of its own.
            is_there = target.grad is lent or (reduces and target.grad is not None)
            if lent is not None and not (is_there and store._gradients.get(target) is lent):
                store._num_changes += 1
                raise GradientError(
                    f"Within `collecting`, what the store held of {described(target)} was lost: "
                    "`.grad` was set to None or replaced (by `zero_grad` or `create_graph`, for "
                    "instance), or the store was emptied (by `step`). Do that afterwards, and "
                    "collect gradients with a graph with `backward`."
                )
        num_received.append(_receive(store, replaced, len(targets)))


# -- `.grad`, replaced for a while -----------------------------------------------------------------


class GradInUseError(GradientError):
    """Another thread has replaced `.grad` of a tensor."""

    def __init__(self, target: Tensor) -> None:
        self.reason = f"another thread is collecting the gradient of {described(target)}"
        super().__init__(
            f"{self.reason.capitalize()}, and there is one `.grad` for all. Use "
            'mode="grad", or take turns.'
        )


class ReplacedGrad:
    """A context in which `.grad` of some tensors is replaced.

    Args:
        targets: the tensors, each once.
        gradients: `.grad` of each tensor meanwhile.
        dtypes: `grad_dtype` of each tensor meanwhile; None leaves it as it is.
        storages: as for `handed_over`.
    """

    _lock = threading.Lock()
    _threads: dict[int, int] = {}  # noqa: RUF012 - who has replaced what, guarded by the lock

    def __init__(
        self,
        targets: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype | None],
        storages: set[int] | None = None,
    ) -> None:
        self.targets = targets
        self.gradients = gradients
        self._dtypes = dtypes
        self._storages = storages
        self.is_converted = False  # whether `dtypes` are those that gradients are summed in
        # FSDP2 adds to its own part of a gradient.
        self._parts = [getattr(each, "_local_tensor", each) for each in gradients]
        self._versions = [None if each is None else each._version for each in self._parts]
        self._ids: list[int] = []  # of tensors that no other context of this thread has replaced
        self._before: list[tuple[Tensor, Tensor | None, torch.dtype | None]] = []

    def __enter__(self) -> ReplacedGrad:
        self._record(self.targets)
        meanwhile = zip(self.targets, self.gradients, self._dtypes, strict=True)
        try:
            _set([(t, grad, dtype or t.grad_dtype) for t, grad, dtype in meanwhile])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        _set(self._before)
        with self._lock:
            for each in self._ids:
                del self._threads[each]

    def hide(self, others: Iterable[Tensor]) -> None:
        """Replace `.grad` of more tensors by None."""
        known = {id(target) for target, _, _ in self._before}
        others = {id(each): each for each in others if id(each) not in known}.values()
        self._record(others)
        for other in others:
            other.grad = None

    def _record(self, targets: Iterable[Tensor]) -> None:
        """Record `.grad` of the targets, and keep other threads from replacing it."""
        here = threading.get_ident()
        with self._lock:
            for each in targets:
                if self._threads.get(id(each), here) != here:
                    raise GradInUseError(each)
            free = [id(each) for each in targets if id(each) not in self._threads]
            self._threads.update(dict.fromkeys(free, here))
            self._ids += free
        self._before += [(each, each.grad, each.grad_dtype) for each in targets]

    def is_changed(self, index: int) -> bool:
        """Whether the gradient that was put into `.grad` of a target has changed in place."""
        part = self._parts[index]
        return part is not None and part._version != self._versions[index]

    def take(self, index: int) -> Tensor | None:
        """Set `.grad` of a target to None, and return the gradient that it received, if any.

        It belongs to the caller (See `handed_over`).
        """
        target, lent = self.targets[index], self.gradients[index]
        gradient = target.grad
        if gradient is None or (gradient is lent and not self.is_changed(index)):
            return None
        target.grad = None
        return gradient if gradient is lent else handed_over(gradient, self._storages)


def handed_over(gradient: Tensor, storages: set[int] | None) -> Tensor:
    """Return a gradient that autograd left in `.grad`, or a copy if others may have its memory.

    Args:
        gradient: the gradient.
        storages: what others have; the memory of `gradient` is added. None if a reducer may have
            everything.
    """
    if storages is not None and not gradient.is_sparse:  # whose indices may be those of a batch
        storage = gradient.untyped_storage()._cdata
        if storage not in storages:
            storages.add(storage)
            return owned(gradient)
    return gradient.clone()


def _set(grads: Iterable[tuple[Tensor, Tensor | None, torch.dtype | None]]) -> None:
    """Set `.grad` and `grad_dtype` of tensors."""
    for target, gradient, dtype in grads:
        # Once set, `grad_dtype` no longer follows the type of the tensor, and cannot be unset.
        if target.grad_dtype is not dtype:
            target.grad = None
            target.grad_dtype = dtype
        if target.grad is not gradient:
            target.grad = gradient
