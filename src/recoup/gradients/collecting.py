"""Running a backward whose gradients go to a store, and nowhere else.

NOTE [ Destinations of gradients ]

Rule 1. Autograd sums into `.grad`, in place. So during a backward, `.grad` of each target is its
        gradient in the store, and a sum takes one buffer of the size of the parameters. The
        previous `.grad` and `grad_dtype` are restored afterwards, the same objects. A gradient
        that is summed on another device goes there as soon as backward has made it.
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
from recoup.gradients.accumulation import is_sharded, owned
from recoup.gradients.container import Container
from recoup.gradients.reducers import is_reduced, reduced_in_time
from recoup.gradients.replaced_grad import GradInUseError, ReplacedGrad
from recoup.gradients.targets import described

__all__ = ["Backward", "Memory", "Mode", "check_mode", "collect", "collecting"]

Mode = Literal["auto", "grad", "harvest"]
_REMOVED = {
    "accumulate": ' Leave it out: "auto" sums into the store wherever that is right.',
    "stream": ' Leave it out: "auto" moves each gradient as soon as it is made if the store is on '
    'another device than the target, as by GradStore(params, device="cpu").',
}


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


def check_mode(mode: Any) -> None:
    """Raise unless `mode` is a mode."""
    if mode not in ("auto", "grad", "harvest"):
        way_out = _REMOVED.get(mode, "") if isinstance(mode, str) else ""
        raise ValueError(f"`mode` is {mode!r}, but must be one of auto, grad, harvest.{way_out}")


def collect(store: Container, backward: Backward, mode: Mode) -> tuple[list[Tensor | None], int]:
    """Run `backward`, and add its gradients to the store.

    Returns:
        The gradients of its inputs, and the number of targets that got a gradient.
    """
    wanted = backward.wanted
    if not wanted:  # all are frozen
        return [], 0
    if mode == "grad":
        return _by_grad(store, backward, '`mode` is "grad"', 'Use mode="harvest"')
    reason = _why_not_in_grad(backward)
    if mode == "harvest" and reason is not None:
        raise GradientError(f'`mode` is "harvest", but {reason}. Use mode="grad".')
    is_plain = mode == "harvest" or is_reduced(wanted) or bool(backward.ends.checkpoints)
    with ExitStack() as contexts:
        if reason is None:
            others = [*backward.inputs, *(_other_leaves(backward) if is_plain else ())]
            try:
                replaced = contexts.enter_context(_lent(store, backward.targets, others))
            except GradInUseError as error:  # nothing has run yet
                if mode == "harvest":
                    raise
                reason = error.reason
            else:
                return _in_grad(store, backward, replaced, is_plain=is_plain)
    what = f"{reason[0].upper()}{reason[1:]}"
    return _by_grad(store, backward, what, "Leave one of the two out")


def _why_not_in_grad(backward: Backward) -> str | None:
    """Return the reason if `.grad` cannot be replaced, else None (See Rule 2)."""
    if backward.create_graph:
        return "`create_graph` asks for gradients with a graph, which cannot be summed in place"
    for target in backward.wanted:
        if not target.is_leaf:
            return (
                f"{described(target)} is not a leaf tensor, and autograd does not accumulate in it"
            )
        if getattr(target, "_post_accumulate_grad_hooks", None):
            return (
                f"{described(target)} has a post-accumulate hook, which would take what is "
                "collected for its own"
            )
    return None


# -- in torch.autograd.grad ------------------------------------------------------------------------


def _by_grad(
    store: Container, backward: Backward, what: str, way_out: str
) -> tuple[list[Tensor | None], int]:
    """Run `backward` by `torch.autograd.grad`; errors begin with `what`, and end with `way_out`."""
    wanted, num_targets = backward.wanted, len(backward.targets)
    if is_sharded(*wanted):
        raise GradientError(
            f"{what}, but a target is a DTensor, whose gradient FSDP2 delivers in a plain backward "
            f"only. {way_out}."
        )
    # torch would silently skip leaves that it cannot see.
    if any(each.is_leaf for each in wanted) and backward.ends.checkpoints:
        raise GradientError(
            f"{what}, but the graph contains a reentrant checkpoint, which delivers gradients "
            f"in a plain backward only. {way_out}, or set use_reentrant=False in the checkpoint."
        )
    with reduced_in_time(store, [each for each in wanted if each.is_leaf], by_grad=True):
        found: list[Tensor | None] = list(
            torch.autograd.grad(
                backward.outputs,
                wanted,
                backward.grad_outputs,
                retain_graph=backward.retain_graph,
                create_graph=backward.create_graph,
                allow_unused=True,
            )
        )
        num_received = 0
        for index, each in enumerate(wanted):
            gradient, found[index] = found[index], None
            if gradient is None:
                continue
            # It may occur twice, be one of `grad_outputs`, or be held by a hook.
            is_ours = gradient.requires_grad
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
    store: Container, targets: Sequence[Tensor], others: Iterable[Tensor]
) -> Generator[ReplacedGrad]:
    """Put the gradients of `store` into `.grad` of the targets, and None into that of others."""
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
    replaced = ReplacedGrad([*targets, *others], [*gradients, *nothing], [*dtypes, *nothing])
    with reduced_in_time(store, targets), replaced:
        try:
            yield replaced
        except BaseException:
            store._num_changes += sum(map(replaced.is_changed, range(len(targets))))
            raise
        finally:
            for grad, before in values:
                grad.copy_(before)


def _other_leaves(backward: Backward) -> list[Tensor]:
    """Return the leaves that a plain backward accumulates in (See Rule 3)."""
    if not is_sharded(*backward.targets):
        return backward.ends.leaves
    # FSDP2 may sum into its own parameters over backwards that it does not reduce.
    return [each for each in backward.ends.leaves if not isinstance(each, nn.Parameter)]


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
    memory = Memory(targets, backward.grad_outputs)
    num_received = len(moved) + _receive(store, replaced, len(targets), memory)
    found = [replaced.take(len(targets) + index) for index in range(len(backward.inputs))]
    return [None if each is None else memory.handed_over(each) for each in found], num_received


class Memory:
    """The memory of gradients that backward began with or has delivered (See Rule 4).

    Args:
        targets: the tensors that gradients are delivered to.
        seeds: the gradients that backward began with.
    """

    def __init__(self, targets: Sequence[Tensor], seeds: Iterable[Tensor | None] = ()) -> None:
        self._may_be_buffers = is_reduced(targets)
        self._storages = {each.untyped_storage()._cdata for each in seeds if each is not None}

    def is_new(self, gradient: Tensor) -> bool:
        """Whether a gradient in `.grad` belongs to the store."""
        if self._may_be_buffers or gradient.is_sparse:
            return False
        storage = gradient.untyped_storage()._cdata
        is_new = storage not in self._storages
        self._storages.add(storage)
        return is_new

    def handed_over(self, gradient: Tensor) -> Tensor:
        """Return a gradient in `.grad`, or a copy if it does not belong to who collects it."""
        return owned(gradient) if self.is_new(gradient) else gradient.clone()


def _receive(store: Container, replaced: ReplacedGrad, num_targets: int, memory: Memory) -> int:
    """Add what the targets received to the store, and return how many did."""
    num_received = 0
    for index in range(num_targets):
        gradient = replaced.take(index)
        if gradient is None:
            continue
        num_received += 1
        lent, target = replaced.gradients[index], replaced.targets[index]
        if lent is None:
            store._add(target, gradient, is_ours=memory.is_new(gradient))
        elif gradient is not lent:
            store._put(target, gradient, is_ours=memory.is_new(gradient))
    return num_received


# -- in backwards of others ------------------------------------------------------------------------


@contextmanager
def collecting(store: Container, targets: Sequence[Tensor]) -> Generator[list[int]]:
    """Collect the gradients that any backward within accumulates in `.grad` of the targets.

    Yields:
        A list that gets one entry at the end: the number of targets that got a gradient.
    """
    for target in targets:
        if not target.is_leaf or getattr(target, "_post_accumulate_grad_hooks", None):
            what = "has a post-accumulate hook" if target.is_leaf else "is not a leaf tensor"
            raise GradientError(
                f"`collecting` reads `.grad`, but {described(target)} {what}. Use `backward`, "
                "which does not need `.grad`."
            )
    num_received: list[int] = []
    with _lent(store, targets, ()) as replaced:
        yield num_received
        for target, lent in zip(targets, replaced.gradients, strict=True):
            if lent is None:
                continue
            # A reducer may have moved it into a buffer of its own.
            if target.grad is None or (target.grad is not lent and not is_reduced(targets)):
                store._num_changes += 1
                raise GradientError(
                    f"Within `collecting`, `.grad` of {described(target)} was set to None or "
                    "replaced (by `zero_grad` or `create_graph`, for instance), and with it what "
                    "the store held. Leave `.grad` alone in there, and collect gradients with a "
                    "graph with `backward`."
                )
            if store._gradients.get(target) is not lent:
                store._num_changes += 1
                raise GradientError(
                    f"Within `collecting`, the gradient of {described(target)} was taken out of "
                    "the store that collects (by `step`, for instance). Do that afterwards."
                )
        num_received.append(_receive(store, replaced, len(targets), Memory(targets)))
