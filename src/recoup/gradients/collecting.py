"""Running a backward whose gradients go to a store, and nowhere else.

NOTE [ Destinations of gradients ]

Rule 1. Autograd sums into `.grad`, in place. So during a backward, `.grad` of each target is its
        gradient in the store, and a sum takes one buffer of the size of the parameters. The
        previous `.grad` and `grad_dtype` are restored afterwards, the same objects.
Rule 2. Where autograd does not sum into `.grad` in place (`create_graph`, tensors inside the
        graph), and where post-accumulate hooks would see it, `torch.autograd.grad` computes the
        gradients, and they are summed here.
Rule 3. Reducers of DDP and FSDP2 and checkpoints of the reentrant kind need a plain backward, which
        accumulates in all leaves; `.grad` of leaves that are not targets is restored.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from recoup._core.graph_ends import ends_of, hidden_leaves
from recoup._core.restoring import Undoing, restoring
from recoup._core.saved_tensors import grad_mode
from recoup.errors import GradientError
from recoup.gradients.entries import Entries
from recoup.gradients.lent import Lent, LentElsewhereError
from recoup.gradients.merging import is_sharded
from recoup.gradients.ownership import is_alone, owned, shared
from recoup.gradients.reducers import (
    check_is_not_reduced,
    is_distributed,
    reduced_in_time,
)
from recoup.gradients.targets import said

__all__ = ["Backward", "Mode", "check_mode", "collect", "collecting", "mode_for"]

Mode = Literal["auto", "accumulate", "grad", "harvest", "stream"]
_MODES = ("auto", "accumulate", "grad", "harvest", "stream")


class Backward(NamedTuple):
    """The arguments of a backward.

    Args:
        outputs: the tensors where it begins.
        grad_outputs: the gradients of `outputs`, or None for scalars.
        targets: the tensors whose gradients are collected; each requires grad, and occurs once.
        inputs: the tensors whose gradients are returned.
        retain_graph: as for ``torch.autograd.backward``.
        create_graph: as for ``torch.autograd.backward``.
    """

    outputs: Sequence[Tensor]
    grad_outputs: Sequence[Tensor | None] | None
    targets: Sequence[Tensor]
    inputs: Sequence[Tensor]
    retain_graph: bool | None
    create_graph: bool

    def run(self, inputs: Sequence[Tensor] | None) -> None:
        """Accumulate in `.grad` of `inputs`, or of all leaves."""
        torch.autograd.backward(
            self.outputs,
            self.grad_outputs,
            retain_graph=self.retain_graph,
            create_graph=self.create_graph,
            inputs=inputs,
        )


# -- choice of mode --------------------------------------------------------------------------------


def check_mode(mode: object) -> None:
    """Raise unless `mode` is a mode."""
    if mode not in _MODES:
        raise ValueError(f"`mode` is {mode!r}, but must be one of {', '.join(_MODES)}.")


def mode_for(mode: Mode, backward: Backward, entries: Entries) -> Mode:
    """Return `mode`, with "auto" resolved, or raise if `mode` cannot run `backward`."""
    check_mode(mode)
    everything = [*backward.targets, *backward.inputs]
    reason = _why_not_in_grad(backward, everything)
    if mode == "auto":
        return _auto(backward, everything, entries, reason)
    if mode != "grad" and reason is not None:
        raise GradientError(f'`mode` is "{mode}", but {reason}. Use mode="grad".')
    if mode == "harvest":
        return mode
    check_is_not_reduced(mode, everything)
    if any(map(is_sharded, everything)):
        raise GradientError(
            f'`mode` is "{mode}", but a target is a DTensor, whose gradient FSDP2 delivers in a '
            'plain backward only. Use mode="harvest".'
        )
    _check_sees_leaves(f'`mode` is "{mode}"', 'Use mode="harvest"', backward, everything)
    return mode


def _check_sees_leaves(
    what: str, way_out: str, backward: Backward, everything: Iterable[Tensor]
) -> None:
    """Raise if the graph may hide leaves among the targets; torch would silently skip them."""
    is_leaf = any(each.is_leaf for each in everything)
    if is_leaf and ends_of(backward.outputs).hides_leaves:
        raise GradientError(
            f"{what}, but the graph holds a checkpoint of the reentrant kind, which delivers "
            f"gradients in a plain backward only. {way_out}, or use_reentrant=False."
        )


def _auto(
    backward: Backward,
    everything: Sequence[Tensor],
    entries: Entries,
    reason: str | None,
) -> Mode:
    if reason is not None:
        what = f"{reason[0].upper()}{reason[1:]}"
        if any(map(is_sharded, everything)):
            raise GradientError(
                f"{what}, and a target is a DTensor, whose gradient FSDP2 "
                "delivers in a plain backward only. Take one of the two away."
            )
        check_is_not_reduced("grad", everything)
        _check_sees_leaves(what, "Take one of the two away", backward, everything)
        return "grad"
    is_plain = is_distributed() or any(map(is_sharded, everything))
    if is_plain or ends_of(backward.outputs).hides_leaves:
        return "harvest"
    if any(map(entries.is_elsewhere, backward.targets)):
        return "stream"
    return "accumulate"


def _why_not_in_grad(backward: Backward, everything: Sequence[Tensor]) -> str | None:
    """Return the reason if `.grad` cannot be lent, else None (See Rule 2)."""
    if backward.create_graph:
        return "`create_graph` asks for gradients with a graph, which cannot be summed in place"
    for target in everything:
        if not target.is_leaf:
            return f"{said(target)} is no leaf, and autograd does not accumulate in it"
        if getattr(target, "_post_accumulate_grad_hooks", None):
            return (
                f"{said(target)} has a post-accumulate hook, which would take what is collected "
                "for its own"
            )
        if Lent.is_lent_elsewhere(target):
            return f"another thread is collecting the gradient of {said(target)}"
    return None


# -- the modes -------------------------------------------------------------------------------------


def collect(mode: Mode, backward: Backward, entries: Entries) -> tuple[list[Tensor | None], int]:
    """Run `backward`, and add its gradients to `entries`.

    Returns:
        The gradients of its inputs, and the number of targets that got a gradient.
    """
    if not backward.targets and not backward.inputs:  # all are frozen
        return [], 0
    with reduced_in_time(backward.targets, entries):
        return _collect(mode, backward, entries)


def _collect(mode: Mode, backward: Backward, entries: Entries) -> tuple[list[Tensor | None], int]:
    wanted = {*backward.targets, *backward.inputs}
    try:
        match mode:
            case "grad":
                return _by_grad(backward, entries)
            case "stream":
                return _by_stream(backward, entries)
            case _:
                return _by_lending(backward, entries, is_plain=mode == "harvest")
    except LentElsewhereError as error:
        # Another thread took `.grad` after `mode_for` had checked it: nothing has run yet.
        if mode == "harvest" or error.target not in wanted:
            raise
    return _by_grad(backward, entries)


@restoring
def collecting(targets: Sequence[Tensor], entries: Entries) -> Generator[list[int]]:
    """Collect the gradients that any backward within accumulates in `.grad` of the targets.

    Yields:
        A list that gets one entry at the end: the number of targets that got a gradient.
    """
    for target in targets:
        if not target.is_leaf or getattr(target, "_post_accumulate_grad_hooks", None):
            what = "has a post-accumulate hook" if target.is_leaf else "is no leaf"
            raise GradientError(
                f"`collecting` reads `.grad`, and {said(target)} {what}. Use `backward`, which can "
                "do without."
            )
    is_plain = is_distributed() or any(map(is_sharded, targets))
    num_received: list[int] = []
    with (
        reduced_in_time(targets, entries),
        _lent(targets, entries, is_plain=is_plain) as lent,
    ):
        yield num_received
        _check_was_left_alone(lent, entries, is_plain=is_plain)
        num_received.append(_take(lent, targets, entries, is_seen=True))


def _check_was_left_alone(lent: Lent, entries: Entries, *, is_plain: bool) -> None:
    lost = lent.lost(is_plain=is_plain)
    if lost:
        entries.num_changes += 1
        raise GradientError(
            f"Within `collecting`, `.grad` of {said(lost[0])} was set to None or replaced (by "
            "`zero_grad` or `create_graph`, for instance), and with it what the store held. Leave "
            "`.grad` alone in there, and collect gradients with a graph with `backward`."
        )
    for target, gradient in lent.lent().items():
        if entries.gradients.get(target) is not gradient:
            entries.num_changes += 1
            raise GradientError(
                f"Within `collecting`, the gradient of {said(target)} was taken out of the store "
                "that collects (by `step`, for instance). Do that afterwards."
            )


def _by_grad(backward: Backward, entries: Entries) -> tuple[list[Tensor | None], int]:
    wanted = [*backward.targets, *backward.inputs]
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
    for place, each in enumerate(wanted):
        gradient, found[place] = found[place], None
        if gradient is None:
            continue
        if not gradient.requires_grad:
            gradient = shared(gradient)  # it may occur twice, or be one of `grad_outputs`
        if place < len(backward.targets):
            num_received += 1
            entries.add(each, gradient)
        else:
            found[place] = gradient if gradient.requires_grad else owned(gradient)
        del gradient
    return found[len(backward.targets) :], num_received


def _by_stream(backward: Backward, entries: Entries) -> tuple[list[Tensor | None], int]:
    received: set[Tensor] = set()

    def take(target: Tensor) -> None:
        gradient, target.grad = target.grad, None
        if gradient is not None:
            received.add(target)
            with grad_mode(True):  # the gradient in the store may have a graph
                entries.add(target, gradient)

    wanted = [*backward.targets, *backward.inputs]
    with Lent(dict.fromkeys(wanted, (None, None))) as lent, Undoing() as undo:
        for target in backward.targets:
            undo.later(_forget_hook, target, take)
            cast("Any", target).register_post_accumulate_grad_hook(take)
        backward.run(wanted)
        return _taken(lent, backward.inputs), len(received)


def _forget_hook(target: Tensor, hook: Any) -> None:
    hooks: dict[int, Any] = getattr(target, "_post_accumulate_grad_hooks", None) or {}
    for key, each in list(hooks.items()):
        if each is hook:
            del hooks[key]


def _by_lending(
    backward: Backward, entries: Entries, *, is_plain: bool
) -> tuple[list[Tensor | None], int]:
    if not is_plain:
        with _lent(backward.targets, entries, backward.inputs, is_plain=False) as lent:
            backward.run([*backward.targets, *backward.inputs])
            num_received = _take(lent, backward.targets, entries)
            return _taken(lent, backward.inputs), num_received
    ends = ends_of(backward.outputs)
    leaves = ends.leaves
    if any(map(is_sharded, backward.targets)):
        # FSDP2 may sum into its own parameters over backwards that it does not reduce.
        leaves = [each for each in leaves if not isinstance(each, nn.Parameter)]
    others = [*backward.inputs, *leaves]  # See Rule 3
    with (
        _lent(backward.targets, entries, others, is_plain=True) as lent,
        hidden_leaves(ends.checkpoints, lent.put_away),
    ):
        backward.run(None)
        num_received = _take(lent, backward.targets, entries)
        return _taken(lent, backward.inputs), num_received


@restoring
def _lent(
    targets: Sequence[Tensor], entries: Entries, others: Sequence[Tensor] = (), *, is_plain: bool
) -> Generator[Lent]:
    """Lend `.grad` of the targets to `entries`, and set that of the others aside."""
    lending: dict[Tensor, tuple[Tensor | None, torch.dtype | None]] = {}
    for target in targets:
        # The buffers of a reducer have the type of the parameter.
        dtype = target.grad_dtype if is_plain else entries.dtype_of(target)
        lending[target] = (entries.lendable(target, dtype), None if is_plain else dtype)
    for other in others:
        lending.setdefault(other, (None, None))
    # A reducer may write to the tensor in `.grad` now, if that is a view of its buffer.
    numbers = [
        (each.grad, each.grad.clone())
        for each in (lending if is_plain else ())
        if each.grad is not None and not is_alone(each.grad)
    ]
    with Undoing() as undo, Lent(lending) as lent:
        for gradient, before in numbers:
            undo.later(gradient.copy_, before)
        try:
            yield lent
        except BaseException:
            entries.num_changes += len(lent.changed())
            raise


def _take(lent: Lent, targets: Iterable[Tensor], entries: Entries, *, is_seen: bool = False) -> int:
    """Take the received gradients; `is_seen`: other code may hold references to them."""
    received = set(lent.received())
    num_received = 0
    for target in targets:
        if target not in received:
            continue
        num_received += 1
        gradient = cast("Tensor", lent.take(target))
        if not lent.has_lent(target):
            gradient = shared(gradient) if is_seen else gradient
            entries.add(target, gradient)
        elif gradient is not entries.gradients[target]:
            entries.put(target, gradient)
    return num_received


def _taken(lent: Lent, inputs: Iterable[Tensor]) -> list[Tensor | None]:
    return [lent.take(each) for each in inputs]
