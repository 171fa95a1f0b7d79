"""Forward and backward of a chain, one segment's activations at a time, into a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from recoup.gradients.collecting import Mode
from recoup.gradients.store import GradStore
from recoup.residuals.drift import DriftGuard
from recoup.residuals.links import Otherwise, plan_for, run_through, value_of, ways_of
from recoup.schedules.memory import Memory

__all__ = ["segments_backward"]


def segments_backward(
    segments: Iterable[Callable[[Any], Any]],
    input: Any,
    loss_fn: Callable[[Any], Tensor],
    store: GradStore,
    *,
    memory: Memory = "inputs",
    otherwise: Otherwise = None,
    params: Iterable[Tensor] | None = None,
    weight: float = 1.0,
    scaler: Any = None,
    mode: Mode = "auto",
) -> Tensor:
    """Run segments one after the other and add the gradients of the loss to a store.

    Kept: the inputs of the segments, and what one of them keeps while backward is in it; other
    choices of `memory` keep less. Backward pays one more forward of each segment but the last. The
    gradients are those of the whole chain, bit for bit: segments may share parameters, draw, and
    have batch norms. No parameter changes; step once, afterwards.

    Args:
        segments: modules or functions, called in order; what goes from one to the next may be
            tensors in tuples, lists and dicts. One may occur several times.
        input: what the first is given.
        loss_fn: from what the last returns to the loss, a scalar.
        store: where the gradients go. The gradient of `input` goes there, too, if it is one of
            `params`.
        memory: as for `recoup.Sequential`: "inputs", "linear", "sqrt", "log", "constant", a number
            of slots, or a `recoup.schedules.Schedule`. Within
            ``torch.autograd.graph.save_on_cpu()``, what it keeps is offloaded.
        otherwise: as for `recoup.Sequential`.
        params: as in `GradStore.backward`, and so are the others.
        weight: likewise.
        scaler: likewise.
        mode: likewise.

    Returns:
        The loss, without a graph.

    Raises:
        ValueError: there is no segment, or an argument is not what it must be.
        ChangedError: in backward, when something that a segment used has changed since.
        ReplayError: when a segment does what cannot be repeated.
        GradientError: as in `GradStore.backward`.

    Example:
        >>> import recoup, torch
        >>> cell = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> store = recoup.GradStore(cell.parameters())
        >>> x = torch.ones(2, 8)
        >>> loss = recoup.segments_backward([cell] * 16, x, lambda y: y.square().mean(), store)
        >>> store.step(torch.optim.AdamW(cell.parameters()))

    Source: https://github.com/huggingface/candle/pull/1483.
    """
    links = _named(segments)
    if not isinstance(cast("object", store), GradStore):
        raise ValueError(
            f"`store` is a {type(store).__name__}, but must be a GradStore: make one with "
            "recoup.GradStore(model.parameters())."
        )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "`segments_backward` was called in inference mode, which has no backward. Leave the "
            "mode, or use torch.no_grad() for the code around."
        )
    with torch.enable_grad():
        loss = loss_fn(_run(links, input, memory, otherwise))
        store.backward(loss, params=params, weight=weight, scaler=scaler, mode=mode)
    return loss.detach()


def _named(segments: object) -> dict[str, Any]:
    if not isinstance(segments, Iterable):
        raise ValueError(
            f"`segments` is a {type(segments).__name__}, but must be a sequence: give [segment]."
        )
    named: dict[str, Any] = {}
    for place, segment in enumerate(cast("Iterable[object]", segments)):
        if not callable(segment):
            raise ValueError(
                f"`segments` has a {type(segment).__name__} at place {place}, but must be modules "
                "or functions."
            )
        called = getattr(segment, "__qualname__", None) or type(segment).__name__
        named[f"segment {place} ({called})"] = segment
    if not named:
        raise ValueError("`segments` is empty, but there must be at least one.")
    return named


def _run(links: dict[str, Any], value: Any, memory: Memory, otherwise: Otherwise) -> Any:
    ways = ways_of(links, otherwise) if memory == "constant" else None
    if memory != "linear":
        return run_through(plan_for(memory, links, ways, DriftGuard()), links, value)
    for link in links.values():
        value = value_of(link, link(value))
    return value
