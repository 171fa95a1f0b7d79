"""Warnings about code that probably does not expect the weight it reads outside of a forward.

NOTE [ Reads outside of a forward ]

Rule 1. A draw belongs to a forward of the module that the reparametrization was applied to. A
        method beside `forward` (`encode`, `training_step`) that calls parts of that module gives
        each part a draw and a step of its own. That is a mistake if two such forwards wait for
        one backward, and a schedule counts them or they draw for the same weight.
Rule 2. A weight that is read outside of a forward is the raw parameter, as optimizers,
        initialisation, weight tying and penalties need it. It is a mistake where a method of a
        model reads it to compute with it. That is guessed from the reading function, the mode, and
        the next use of the tensor; the guess decides about a warning only, never about a value.
Rule 3. There is one warning for each call that applied a reparametrization; it names the remedy.
"""

from __future__ import annotations

import dis
import functools
import linecache
import re
import sys
import warnings
import weakref
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn

from recoup._core.compile import never_compiled
from recoup._core.pytree import flatten
from recoup.weights.forwards import Forward, frames, is_due, override_for
from recoup.weights.reparametrization import Application, Drawn, Reparametrization, Reparametrized

__all__ = ["look_at_part", "look_at_read", "warn_of_read"]

_WAY_OUT = "with recoup.weights.step(model):"
# Attributes of a weight that code uses to compute with it.
_USES = re.compile(
    "[TH]|mT|mH|t|transpose|permute|view|reshape|flatten|unflatten|squeeze|unsqueeze|expand|chunk|"
    "split|unbind|narrow|contiguous|to|type|type_as|float|double|half|bfloat16|matmul|mm|bmm|mv|"
    "mul|add|sub|div|index_select|gather"
)
_ASKED_BEFORE = re.compile(r"\b(isinstance|hasattr|type|id|len|print|repr|str)\($|\bis (not )?$")
_ASKED_AFTER = re.compile(r"\s+is\b")
_SETTING_UP = re.compile(r"init|reset|tie|share|optim|param|state|load|save|copy|remove|^on_")

_MACHINERY = ("torch.", "recoup.weights.", "recoup._core.")
_NUM_HOLDERS = 3  # of a copy of variables: the frame, the name here and getrefcount's argument
_PASSING = (nn.ParameterList.__module__, "recoup.weights.parametrized_module")

_waiting: weakref.WeakKeyDictionary[Application, list[weakref.ref[_Waiting]]]
_waiting = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[Application] = weakref.WeakSet()


class _Waiting:
    """A forward of a part, which lives as long as its graph does (See Rule 1)."""

    def __init__(self, steps: set[Reparametrization]) -> None:
        self.steps = steps
        self.is_over = False

    def __call__(self, gradients: Any) -> None:
        """Note that a backward has reached this forward."""
        self.is_over = True


@never_compiled
def look_at_part(
    module: nn.Module,
    roots: list[Application],
    drawn: dict[Reparametrization, Drawn],
    result: Any,
) -> None:
    """Warn if a forward of a part shares its backward with another one (See Rule 1).

    Args:
        module: the module that ran.
        roots: the applications to the module itself, rather than to a tree that contains it.
        drawn: the draws of its forward, which was the outermost one.
        result: the value that it returned.
    """
    by_application: dict[Application, set[Reparametrization]] = {}
    for step in drawn:
        if step.is_random and step.application not in roots and step.application not in _warned:
            by_application.setdefault(step.application, set()).add(step)
    for application, steps in by_application.items():
        before = [each for ref in _waiting.get(application, ()) if (each := ref()) is not None]
        before = [each for each in before if not each.is_over]
        is_counted = any(step.has_schedule for step in steps)
        if any(is_counted or each.steps & steps for each in before):
            _warn_of_part(module, application, next(iter(steps)))
            continue
        now = _Waiting(steps)
        for node in {tensor.grad_fn for tensor in flatten(result)[0]}:
            if node is not None:
                node.register_prehook(now)
        _waiting[application] = [weakref.ref(each) for each in (*before, now)]


def _warn_of_part(module: nn.Module, application: Application, step: Reparametrization) -> None:
    _warned.add(application)
    _waiting.pop(application, None)
    warnings.warn(
        f"Several modules of the tree that {step.kind} was applied to ran outside of a forward of "
        f"that tree ({type(module).__name__} was the last one), and wait for one backward. Each of "
        "these forwards has a draw of its own and counts as a step, and a weight that is read "
        f"between them is the parameter itself. Put `{_WAY_OUT}` around what one step of training "
        "computes: within, there is one draw and one step.",
        stacklevel=_level(sys._getframe(1)),
    )


def look_at_read(parametrized: Reparametrized, module: nn.Module) -> None:
    """Warn if the read was of the raw parameter where that is probably a mistake (See Rule 2)."""
    if module.training and not torch.is_grad_enabled():
        return  # initialising, averaging, copying
    around = frames()
    if around and isinstance(around[-1], Forward) and around[-1].reads_raw:
        return
    if not _missing(parametrized, is_training=module.training):
        return
    reader = _reader(sys._getframe(3))  # beyond `ParametrizedWeight.read` and the property
    if reader is not None:
        warn_of_read(parametrized, reader, is_training=module.training)


def _missing(parametrized: Reparametrized, *, is_training: bool) -> list[Reparametrization]:
    """Return the reparametrizations that a forward would apply and none in progress covers."""
    if torch._C._current_graph_task_id() != -1:
        return []  # a hook: no forward is in force in backward
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


def warn_of_read(
    parametrized: Reparametrized, frame: FrameType | None = None, *, is_training: bool
) -> None:
    """Warn if code computes with a weight outside of a forward that reparametrizes it.

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


def _reader(frame: FrameType | None) -> FrameType | None:
    """Return the frame of a method of a model that computes with what it reads, or None."""
    if frame is None or not _computes(frame.f_code, frame.f_lasti):
        return None
    while frame is not None and (frame.f_code.co_name.startswith("<") or _name(frame) in _PASSING):
        # A comprehension or a lambda of the function around it, or a list that returns its items.
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    if not code.co_argcount or _SETTING_UP.search(code.co_name):
        return None
    if _name(frame) in (nn.Module.__module__, nn.RNNBase.__module__):
        return None  # `get_parameter` and the like; the check of an RNN's list of weights
    around, _, _ = code.co_qualname.rpartition(".")
    is_method = bool(around) and not around.endswith(">")
    return frame if is_method and isinstance(_first_argument(frame), nn.Module) else None


def _first_argument(frame: FrameType) -> object:
    """Return the first argument of a function that runs, without keeping its variables alive."""
    variables: Any = frame.f_locals
    first = variables.get(frame.f_code.co_varnames[0])
    # Before Python 3.13 a frame keeps this copy until it ends, and with it a loss that the function
    # has deleted. The copy is also what `locals()` returned to the function, if it was called.
    if isinstance(variables, dict) and sys.getrefcount(variables) == _NUM_HOLDERS:
        cast("dict[str, Any]", variables).clear()
    return first


@functools.lru_cache(maxsize=256)
def _computes(code: CodeType, offset: int) -> bool:
    """Whether code computes with the weight that it has just read, as far as the code shows."""
    instructions = dis.get_instructions(code)
    read = next((each for each in instructions if each.offset == offset), None)
    then = next(instructions, None)
    if then is not None and then.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return _USES.fullmatch(str(then.argval)) is not None
    where = None if read is None else read.positions
    if where is None or where.lineno is None or where.lineno != where.end_lineno:
        return True
    line = linecache.getline(code.co_filename, where.lineno).encode()
    before, after = line[: where.col_offset].decode(), line[where.end_col_offset :].decode()
    return not _ASKED_BEFORE.search(before) and not _ASKED_AFTER.match(after)


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
