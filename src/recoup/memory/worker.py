"""The worker of a curve: measures one point, as ``python -m recoup.memory.worker PATH``.

It reads the request as JSON from the standard input, and writes the answer, or an error in one
line, as JSON to PATH.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recoup._core.pytree import flatten
from recoup.memory.meter import measure
from recoup.memory.points import BuildError, Request, load_builder

Step = Callable[[], object]


def _training_step(module: nn.Module, inputs: object) -> Step:
    """Return a step: forward, the sum of all outputs, backward, which accumulates gradients."""
    arguments = cast("tuple[Any, ...]", inputs) if isinstance(inputs, tuple) else (inputs,)

    def step() -> None:
        outputs = [each for each in flatten(module(*arguments))[0] if each.requires_grad]
        if not outputs:
            raise BuildError("no output of its module requires a gradient.")
        torch.autograd.backward([output.sum() for output in outputs])

    return step


def _build(request: Request) -> Step:
    build = load_builder(request.build)
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    with torch.device(request.device):
        built = build(depth=request.depth, memory=request.memory)
    if callable(built) and not isinstance(built, nn.Module):
        return built
    pair = cast("tuple[object, ...]", built) if isinstance(built, tuple) else ()
    if len(pair) == 2 and isinstance(pair[0], nn.Module):
        inputs = tree_map_only(Tensor, lambda leaf: leaf.to(request.device), pair[1])
        return _training_step(pair[0].to(request.device), inputs)
    raise BuildError(
        f"it returned {type(cast('object', built)).__name__}, but must return a training step "
        "(a function without arguments) or a pair (module, inputs)."
    )


def _answer(request: Request) -> dict[str, Any]:
    torch.set_num_threads(request.num_threads)
    step = _build(request)
    step()  # allocates gradients, optimizer state and workspaces
    measured = measure(step, device=request.device, repeats=request.repeats)
    names = ("peak_bytes", "held_bytes", "seconds", "cpu_seconds")
    return {name: getattr(measured, name) for name in names}


def main(path: str) -> int:
    """Answer the request on the standard input; return 0 on success, else 1."""
    try:
        answer = _answer(Request(**json.load(sys.stdin)))
    except BuildError as error:
        answer = {"argument": " ".join(str(error).split())}
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error is the answer
        traceback.print_exc()
        answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    Path(path).write_text(json.dumps(answer))
    return 0 if "peak_bytes" in answer else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
