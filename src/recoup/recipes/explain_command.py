"""The command ``recoup explain``: what a plan does with a model, for a number of bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from recoup import plan
from recoup.errors import RecoupError
from recoup.memory import load_builder

__all__ = ["explain_command"]


def explain_command(
    build: str,
    budget: str,
    blocks: str | None = None,
    loss: str | None = None,
    device: str = "cpu",
    figure: Path | None = None,
) -> int:
    """Say what each block of a model does with its residuals to keep to a number of bytes.

    Args:
        build: a function, as "module:function" or "path/to/file.py:function", that is called
            without arguments and returns (model, argument, ...), where a last dict stands for
            keyword arguments.
        budget: bytes for a step, such as 2GiB.
        blocks: a regular expression for the names of the blocks; found if left out.
        loss: a function from what the model returns to a scalar, written as `build` is.
        device: cpu or a CUDA device, to which model and arguments go.
        figure: draw the plan into this file (.png, .svg or .pdf).

    Returns:
        The exit code: 0, or 2 if something was wrong, of which one line on stderr tells.
    """
    try:
        model, args, kwargs = _built(build, torch.device(device))
        made = plan(
            model,
            *args,
            budget=budget,
            blocks=blocks,
            loss=None if loss is None else cast("Any", load_builder(loss)),
            **kwargs,
        )
        print(made)
        if figure is not None:
            figure.parent.mkdir(parents=True, exist_ok=True)
            print(f"figure: {made.figure(figure)}")
    except (ValueError, RecoupError, OSError, ImportError) as error:
        print(f"recoup explain: {error}", file=sys.stderr)
        return 2
    return 0


def _built(build: str, device: torch.device) -> tuple[nn.Module, list[Any], dict[str, Any]]:
    made: Any = load_builder(build)()
    given = list(cast("Any", made)) if isinstance(made, (tuple, list)) else [made]
    if not given or not isinstance(given[0], nn.Module):
        raise ValueError(
            f"`build` ({build}) returned a {type(made).__name__}, but must return a model and its "
            "arguments: (model, argument, ...)."
        )
    model, *args = given
    kwargs: dict[str, Any] = args.pop() if args and isinstance(args[-1], dict) else {}
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    return model.to(device), args, kwargs
