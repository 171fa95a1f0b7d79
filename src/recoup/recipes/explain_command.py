"""The command ``recoup explain``: show what a plan does with a model, for a number of bytes."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from recoup import plan, timeline
from recoup.memory import load_builder
from recoup.memory.timeline_page import check_page
from recoup.recipes.checks import check_outputs, device_checked
from recoup.recipes.mistakes import MISTAKES, report_mistake
from recoup_cli import MistakeError

__all__ = ["explain_command"]


def explain_command(
    build: str,
    budget: str | None = None,
    blocks: str | None = None,
    loss: str | None = None,
    device: str = "cpu",
    figure: Path | None = None,
    compile: bool = False,  # noqa: A002
    tiles: bool = False,
    html: Path | None = None,
) -> int:
    """Say what each block of a model does with its residuals to keep to a number of bytes.

    Args:
        build: a function, as "module:function" or "path/to/file.py:function", that is called
            without arguments and returns (model, argument, ...), where a last dict stands for
            keyword arguments.
        budget: bytes for a step, such as 2GiB. Without it, the peaks and times are printed that
            plans are predicted to have.
        blocks: a regular expression for the names of the blocks; found if left out.
        loss: a function from what the model returns to a scalar, written as `build` is.
        device: cpu or a CUDA device, to which model and arguments go.
        figure: draw the plan, or all plans, into this file (.png, .svg or .pdf).
        compile: let blocks run compiled where that pays; says on stderr what is being compiled.
        tiles: let the output layer, with its loss, and MLPs run in tiles.
        html: show the memory of one step, event by event, on this page (.html), with the plan and
            without it: which module ran, and what becomes of its residuals.

    Returns:
        The exit code: 0, 2 if something was wrong with the arguments, or 1 if the builder, the
        model or the loss raised; both explained in one line on stderr.
    """
    try:
        if html is not None:
            check_page(html.suffix)
        check_outputs(figure, html, figure=figure)  # before minutes of planning
        model, args, kwargs = _built(build, device)
        with _progress():
            of_loss = None if loss is None else cast("Any", load_builder(loss))
            options: Any = {"blocks": blocks, "loss": of_loss, "compile": compile}
            options |= {"tiles": tiles, **kwargs}
            if budget is None:
                made = plan(model, *args, **options)
            else:
                made = plan(model, *args, budget=budget, **options)
        print(made)
        if figure is not None:
            print(f"figure: {made.figure(figure)}")
        if html is not None:
            chosen: Any = None if budget is None else made
            shown = timeline(model, *args, plan=chosen, loss=of_loss, **kwargs)
            print(f"timeline: {shown.page(html)}")
    except (MistakeError, *MISTAKES) as error:
        return report_mistake(error)
    except Exception as error:  # noqa: BLE001  # from the user's model or loss
        return report_mistake(MistakeError(f"the step raised {_located(error)}", 1))
    return 0


@contextmanager
def _progress() -> Generator[None]:
    """Return a context in which planning says on stderr what it compiles."""
    logger, handler = logging.getLogger("recoup.planning"), logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _built(build: str, device: str) -> tuple[nn.Module, list[Any], dict[str, Any]]:
    builder = load_builder(build)
    try:
        made: Any = builder()
    except Exception as error:  # the user's code may raise anything
        raise MistakeError(f"`build` ({build}) raised {_located(error)}", exit_code=1) from error
    given = list(cast("Any", made)) if isinstance(made, (tuple, list)) else [made]
    if not given or not isinstance(given[0], nn.Module):
        raise ValueError(
            f"`build` ({build}) returned a {type(made).__name__}, but must return a model and its "
            "arguments: (model, argument, ...)."
        )
    model, *args = given
    kwargs: dict[str, Any] = args.pop() if args and isinstance(args[-1], dict) else {}
    with device_checked(device):
        model.to(device)
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    return model, args, kwargs


def _located(error: Exception) -> str:
    """Return the type and text of an error, and the line that it comes from."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({last.filename}, line {last.lineno})"
