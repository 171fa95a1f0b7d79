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
        accumulates in all leaves; `.grad` of leaves that are not targets is restored.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from recoup._core.graph_ends import Ends, ends_of, hidden_leaves
from recoup._core.saved_tensors import grad_mode
from recoup.errors import GradientError
from recoup.gradients.accumulation import Entries, is_sharded, owned, shared
from recoup.gradients.reducers import check_is_not_reduced, is_distributed, reduced_in_time
from recoup.gradients.replaced_grad import (
    GradInUseError,
    ReplacedGrad,
    accumulating,
    take_received,
)
from recoup.gradients.targets import described

__all__ = ["Backward", "Mode", "check_mode", "collect", "collecting", "mechanism_for"]

Mode = Literal["auto", "grad", "harvest"]
_MODES = ("auto", "grad", "harvest")
_REMOVED = {
    "accumulate": 'Leave it out: "auto" sums into the store wherever that is right.',
    "stream": 'Leave it out: "auto" moves each gradient as soon as it is made if the store is on '
    'another device than the target, as by GradStore(params, device="cpu").',
}

Mechanism = Literal["accumulate", "grad", "harvest"]


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

    def run(self, inputs: Sequence[Tensor] | None) -> None:
        """Accumulate in `.grad` of `inputs`, or of all leaves."""
        torch.autograd.backward(
            self.outputs,
            self.grad_outputs,
            retain_graph=self.retain_graph,
            create_graph=self.create_graph,
            inputs=inputs,
        )


# -- choice of mechanism ---------------------------------------------------------------------------


def check_mode(mode: Any) -> None:
    """Raise unless `mode` is a mode."""
    if mode not in _MODES:
        way_out = f" {_REMOVED[mode]}" if isinstance(mode, str) and mode in _REMOVED else ""
        raise ValueError(f"`mode` is {mode!r}, but must be one of {', '.join(_MODES)}.{way_out}")


def mechanism_for(mode: Mode, backward: Backward) -> Mechanism:
    """Return how `backward` is run in `mode`, or raise if it cannot be run so.

    "harvest" is a plain backward. "accumulate" sums into `.grad` of the targets and inputs alone:
    reducers take no part, and leaves behind a reentrant checkpoint would get nothing.
    """
    check_mode(mode)
    everything = [*backward.targets, *backward.inputs]
    reason = _why_not_in_grad(backward, everything)
    are_sharded = is_sharded(*everything)
    if mode == "harvest":
        if reason is not None:
            raise GradientError(f'`mode` is "harvest", but {reason}. Use mode="grad".')
        return "harvest"
    if mode == "auto" and reason is None:
        is_plain = are_sharded or is_distributed() or bool(backward.ends.checkpoints)
        return "harvest" if is_plain else "accumulate"
    what, way_out = '`mode` is "grad"', 'Use mode="harvest"'
    if mode == "auto" and reason is not None:
        what, way_out = f"{reason[0].upper()}{reason[1:]}", "Leave one of the two out"
    if are_sharded:
        raise GradientError(
            f"{what}, but a target is a DTensor, whose gradient FSDP2 delivers in a plain backward "
            f"only. {way_out}."
        )
    check_is_not_reduced(everything)
    # torch would silently skip leaves that it cannot see.
    if any(each.is_leaf for each in everything) and backward.ends.checkpoints:
        raise GradientError(
            f"{what}, but the graph contains a reentrant checkpoint, which delivers gradients "
            f"in a plain backward only. {way_out}, or set use_reentrant=False in the checkpoint."
        )
    return "grad"


def _why_not_in_grad(backward: Backward, everything: Sequence[Tensor]) -> str | None:
    """Return the reason if `.grad` cannot be replaced, else None (See Rule 2)."""
    if backward.create_graph:
        return "`create_graph` asks for gradients with a graph, which cannot be summed in place"
    for target in everything:
        if not target.is_leaf:
            return (
                f"{described(target)} is not a leaf tensor, and autograd does not accumulate in it"
            )
        if getattr(target, "_post_accumulate_grad_hooks", None):
            return (
                f"{described(target)} has a post-accumulate hook, which would take what is "
                "collected for its own"
            )
    in_use = ReplacedGrad.in_use(everything)
    if in_use is not None:
        return f"another thread is collecting the gradient of {described(in_use)}"
    return None


# -- the mechanisms --------------------------------------------------------------------------------


def collect(
    mechanism: Mechanism, backward: Backward, entries: Entries
) -> tuple[list[Tensor | None], int]:
    """Run `backward`, and add its gradients to `entries`.

    Returns:
        The gradients of its inputs, and the number of targets that got a gradient.
    """
    if not backward.targets and not backward.inputs:  # all are frozen
        return [], 0
    with reduced_in_time(backward.targets, entries):
        match mechanism:
            case "harvest":
                return _by_plain_backward(backward, entries)
            case "grad":
                return _by_grad(backward, entries)
            case "accumulate":
                try:
                    return _by_accumulating(backward, entries)
                except GradInUseError as error:
                    # Another thread came after the mechanism was chosen: nothing has run yet.
                    wanted = (*backward.targets, *backward.inputs)
                    if not any(error.target is each for each in wanted):
                        raise
                return _by_grad(backward, entries)


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
    for index, each in enumerate(wanted):
        gradient, found[index] = found[index], None
        if gradient is None:
            continue
        if not gradient.requires_grad:
            gradient = shared(gradient)  # it may occur twice, or be one of `grad_outputs`
        if index < len(backward.targets):
            num_received += 1
            entries.add(each, gradient)
        else:
            found[index] = gradient if gradient.requires_grad else owned(gradient)
        del gradient
    return found[len(backward.targets) :], num_received


def _by_accumulating(backward: Backward, entries: Entries) -> tuple[list[Tensor | None], int]:
    targets = backward.targets
    elsewhere = entries.elsewhere(targets)
    moved: set[int] = set()

    def move(target: Tensor) -> None:
        gradient, target.grad = target.grad, None
        if gradient is not None:
            moved.add(id(target))
            with grad_mode(True):  # the gradient in the store may have a graph
                entries.add(target, gradient)

    with (
        accumulating(targets, entries, backward.inputs, elsewhere=elsewhere) as replaced,
        ExitStack() as hooks,
    ):
        for target in elsewhere:
            hook: Any = cast("Any", target).register_post_accumulate_grad_hook(move)
            hooks.callback(hook.remove)
        wanted = [*targets, *backward.inputs]
        are_all = set(map(id, wanted)).issuperset(map(id, backward.ends.leaves))
        backward.run(None if are_all else wanted)  # torch looks at each of its `inputs`
        num_received = take_received(replaced, len(targets), entries, is_converted=True)
        return _taken_inputs(replaced, backward), num_received + len(moved)


def _by_plain_backward(backward: Backward, entries: Entries) -> tuple[list[Tensor | None], int]:
    leaves, checkpoints = backward.ends
    if is_sharded(*backward.targets):
        # FSDP2 may sum into its own parameters over backwards that it does not reduce.
        leaves = [each for each in leaves if not isinstance(each, nn.Parameter)]
    others = [*backward.inputs, *leaves]  # See Rule 3
    with (
        accumulating(backward.targets, entries, others, is_plain=True) as replaced,
        hidden_leaves(checkpoints, replaced.clear_others),
    ):
        backward.run(None)
        num_received = take_received(replaced, len(backward.targets), entries)
        return _taken_inputs(replaced, backward), num_received


@contextmanager
def collecting(targets: Sequence[Tensor], entries: Entries) -> Generator[list[int]]:
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
    is_plain = is_distributed() or is_sharded(*targets)
    num_received: list[int] = []
    with (
        reduced_in_time(targets, entries),
        accumulating(targets, entries, is_plain=is_plain) as replaced,
    ):
        yield num_received
        _check_was_left_alone(replaced, entries, is_plain=is_plain)
        num_received.append(take_received(replaced, len(targets), entries, is_seen=True))


def _check_was_left_alone(replaced: ReplacedGrad, entries: Entries, *, is_plain: bool) -> None:
    for target, gradient in zip(replaced.targets, replaced.gradients, strict=True):
        if gradient is None:
            continue
        # In a plain backward, a reducer may have moved it into a buffer of its own.
        if target.grad is None or (target.grad is not gradient and not is_plain):
            entries.num_changes += 1
            raise GradientError(
                f"Within `collecting`, `.grad` of {described(target)} was set to None or replaced "
                "(by `zero_grad` or `create_graph`, for instance), and with it what the store "
                "held. Leave `.grad` alone in there, and collect gradients with a graph with "
                "`backward`."
            )
        if entries.gradients.get(target) is not gradient:
            entries.num_changes += 1
            raise GradientError(
                f"Within `collecting`, the gradient of {described(target)} was taken out of the "
                "store that collects (by `step`, for instance). Do that afterwards."
            )


def _taken_inputs(replaced: ReplacedGrad, backward: Backward) -> list[Tensor | None]:
    first = len(backward.targets)
    return [replaced.take(first + index) for index in range(len(backward.inputs))]
