"""Advice that is printed with a plan: memory that a plan cannot free, and what else can be done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from recoup.memory import format_bytes
from recoup.planning.blocks import find_links
from recoup.planning.measured_calls import MeasuredCall

__all__ = ["held_by_others", "what_can_be_inverted"]


def held_by_others(model: nn.Module, calls: Sequence[MeasuredCall]) -> list[str]:
    """Return a line for each kind of code that holds residuals, which no plan frees.

    Args:
        model: the model.
        calls: the measured calls of its blocks.
    """
    return [*_caches(model, calls), *_attributes(calls), *_checkpoints(model)]


def _caches(model: nn.Module, calls: Sequence[MeasuredCall]) -> Iterator[str]:
    holding = [call for call in calls if call.alive_bytes > 0]
    if not holding:
        return
    num_bytes = sum(call.alive_bytes for call in holding)
    advice = "a cache, a list or an attribute that the blocks write to: leave it out in training"
    if getattr(getattr(model, "config", None), "use_cache", False):
        advice = "`use_cache` is on: pass use_cache=False"
    yield (
        f"held by others: {format_bytes(num_bytes)} of the residuals of {len(holding)} blocks "
        f"(`{holding[0].name}` first), which no plan frees; {advice}"
    )


def _attributes(calls: Sequence[MeasuredCall]) -> Iterator[str]:
    names = list(dict.fromkeys(name for call in calls for name in call.holders))
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"held by attributes: `{names[0]}`{more}, a tensor with its graph, which holds its "
            "step until the next one; return it instead, or store `.detach()` of it"
        )


def _checkpoints(model: nn.Module) -> Iterator[str]:
    if model.training and any(
        getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
    ):
        yield (
            "`gradient_checkpointing` is on: the model runs its layers again itself, and the plan "
            "leaves them to it; call `gradient_checkpointing_disable()` and plan again"
        )


def what_can_be_inverted(model: nn.Module, calls: Sequence[MeasuredCall]) -> list[str]:
    """Return a sentence that names the modules which a plan could invert if it may round.

    Args:
        model: the model.
        calls: the measured calls of its blocks.
    """
    constant = {
        id(part)
        for module in model.modules()
        if getattr(module, "memory", None) == "constant"
        for part in module.modules()
    }
    names = [name for name, link in find_links(model) if id(link) not in constant]
    names = names or [call.name for call in calls if call.is_invertible]
    if not names:
        return []
    sentence = (
        f"This plan inverts nothing, and {len(names)} blocks have an inverse (`{names[0]}` first): "
        "a plan with exact=False may take less, and rounds."
    )
    return [sentence]
