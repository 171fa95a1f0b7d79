"""Reads of weights outside of the forwards that reparametrize them.

NOTE [ Reads outside of a forward ]

Rule 1. A weight that is read while its module trains is the one that the step in progress uses (see
        `waiting`), wherever it is read. Optimizers, initialisation, weight tying, averages and
        penalties need the parameter. The source of the code that reads shows which of the two it
        wants (see `readers`), and so does the grad mode.
Rule 2. Where the source does not tell, a method of a model gets the weight of the step, and so does
        any code while one step, or one forward, waits for a backward. Other code gets the
        parameter, and a warning if there is a source that could tell. Code that changes such a
        weight without a graph wanted the parameter: it would change a copy, and fails
        (`Source.stands_for`).
Rule 3. Without a graph there is no step. Only products, convolutions and functions of
        torch.nn.functional compute there; other operators serve averages, too.
Rule 4. A weight that is not random, as that of weight norm, needs no step: in evaluation, too, code
        that computes with it gets it.
Rule 5. There is one warning for each call that applied a reparametrization; it names the remedy.
"""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from types import FrameType

import torch
from torch import nn

from recoup.weights.forwards import Forward, frames, is_due, override_for
from recoup.weights.readers import Use, has_source, use_of, variable_of
from recoup.weights.reparametrization import Application, Reparametrization, Reparametrized
from recoup.weights.waiting import WaitingDraws, begin_step, joined_step

__all__ = ["draws_outside", "warn_of_read"]

_WAY_OUT = "with recoup.weights.step(model):"
_SETTING_UP = re.compile(
    r"(^|_)(init(iali[sz]e)?|reset|tie|share|load|save|copy|remove)(_|$)|parameters?$|state_dict|"
    r"optimizers?$|^on_"
)
_MACHINERY = ("torch.", "recoup.weights.", "recoup._core.")
_PASSING = (nn.ParameterList.__module__, "recoup.weights.parametrized_module")

_warned: weakref.WeakSet[Application] = weakref.WeakSet()


def draws_outside(
    parametrized: Reparametrized,
    module: nn.Module,
    joined: list[WaitingDraws],
    step: Reparametrization,
) -> WaitingDraws | None:
    """Return the draws of the step that a read outside of forwards belongs to (See Rule 1).

    Args:
        parametrized: the weight that is read.
        module: the module that has it.
        joined: is given the draws, which the graph of the weight is to hold.
        step: the reparametrization that no forward in progress covers.

    Returns:
        The draws; None if the parameter is read.
    """
    if torch._C._current_graph_task_id() != -1:
        return None  # a hook
    frame = _reader()
    if frame is None:
        return None
    use = use_of(frame)
    if use in (Use.UNKNOWN, Use.COMBINES) and _sets_up(frame):
        use = Use.ASKS
    if use is Use.ASKS:
        return None
    if not step.is_random:
        return _deterministic(parametrized, step, frame, use, is_training=module.training)
    if not module.training or (not torch.is_grad_enabled() and use is not Use.COMPUTES):
        if not module.training and (use is Use.COMPUTES or _is_method(frame)):
            warn_of_read(parametrized, frame, is_training=False)
        return None  # See Rule 3
    is_unknown = use is Use.UNKNOWN and not _is_method(frame)
    draws = joined_step(step.application, None if is_unknown else parametrized.name)
    if draws is None:
        if is_unknown:
            if has_source(frame):
                warn_of_read(parametrized, frame, is_training=True)
            return None  # See Rule 2
        draws = begin_step(step.application)
    joined.append(draws)
    return draws


def _deterministic(
    parametrized: Reparametrized,
    step: Reparametrization,
    frame: FrameType,
    use: Use,
    *,
    is_training: bool,
) -> WaitingDraws | None:
    is_method = _is_method(frame)
    if use is Use.COMPUTES or (torch.is_grad_enabled() and (use is Use.COMBINES or is_method)):
        return WaitingDraws()  # See Rule 4
    if is_method or torch.is_grad_enabled():
        warn_of_read(parametrized, frame, is_training=is_training)
    return None


def warn_of_read(
    parametrized: Reparametrized, frame: FrameType | None = None, *, is_training: bool
) -> None:
    """Warn if code may compute with a weight outside of a forward that reparametrizes it.

    Args:
        parametrized: the weight.
        frame: the frame of the reader, if that is known.
        is_training: whether the module that has the weight is in training mode.
    """
    missing = _missing(parametrized, is_training=is_training)
    if not missing:
        return
    _warned.update(step.application for step in missing)
    reader = "" if frame is None else f" by `{frame.f_code.co_qualname}`"
    warnings.warn(
        f"{parametrized.name} was read{reader} outside of a forward of the module that "
        f"{missing[0].kind} was applied to, and is the parameter itself there. To have it as in a "
        "forward, apply to the module whose `forward` reads it (with a pattern for the qualified "
        f"name), or put `{_WAY_OUT}` around what one step computes. Where the parameter is meant, "
        f'read it by `get_parameter("{parametrized.key}")`, or within `recoup.weights.disabled`.',
        stacklevel=2 if frame is None else _level(frame),
    )


def _missing(parametrized: Reparametrized, *, is_training: bool) -> list[Reparametrization]:
    """Return the reparametrizations that a forward would apply and none in progress covers."""
    covered = [
        each for frame in frames() if isinstance(frame, Forward) for each in frame.applications
    ]
    override = override_for(parametrized)
    return [
        step
        for step in parametrized.steps
        if step.application not in covered
        and step.application not in _warned
        and is_due(step, override, is_training=is_training)
    ]


def _reader() -> FrameType | None:
    """Return the frame of the code that reads a weight; None if that is torch's machinery."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _name(frame).startswith(_MACHINERY[1:]):
        frame = frame.f_back
    while frame is not None and _name(frame) in _PASSING:  # a list that returns its items
        frame = frame.f_back
    if frame is None or _name(frame) in (nn.Module.__module__, nn.RNNBase.__module__):
        return None  # `get_parameter` and the like; the check of an RNN's list of weights
    if _name(frame).startswith("torch.") and not _is_method(frame):
        return None  # pruning, states of optimizers
    return frame


def _function_around(frame: FrameType) -> FrameType:
    """Return the frame of the function around a comprehension or a lambda."""
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:
        if frame.f_code.co_name == "<module>":
            break
        frame = frame.f_back
    return frame


def _sets_up(frame: FrameType) -> bool:
    """Whether a method initialises, ties or collects parameters, by its name."""
    around = _function_around(frame)
    return _SETTING_UP.search(around.f_code.co_name) is not None and _is_method(around)


def _is_method(frame: FrameType) -> bool:
    """Whether the code of a frame is that of a method of a module."""
    frame = _function_around(frame)
    code = frame.f_code
    if not code.co_argcount:
        return False
    around, _, _ = code.co_qualname.rpartition(".")
    is_method = bool(around) and not around.endswith(">")
    return is_method and isinstance(variable_of(frame, code.co_varnames[0]), nn.Module)


def _level(frame: FrameType | None) -> int:
    """Return the `stacklevel` by which the caller names the first frame beyond torch and us."""
    while frame is not None and _name(frame).startswith(_MACHINERY):
        frame = frame.f_back
    level, each = 1, sys._getframe(1)
    while each is not frame and each.f_back is not None:
        level, each = level + 1, each.f_back
    return level


def _name(frame: FrameType) -> str:
    """Return the name of the Python module whose code a frame runs."""
    return str(frame.f_globals.get("__name__"))
