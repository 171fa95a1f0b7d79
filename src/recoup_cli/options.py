"""The options of the commands that are a function each: its arguments, with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recoup_cli.parser import Parser

__all__ = [
    "add_curve",
    "add_demo",
    "add_explain",
    "add_flow_evaluate",
    "add_generate",
    "add_lm_evaluate",
    "add_sample",
]

# The type of a value, and its placeholder.
_INT: Any = {"type": int, "metavar": "N"}
_FLOAT: Any = {"type": float, "metavar": "X"}
_FILE: Any = {"type": Path, "metavar": "FILE"}
_CHECKPOINT: Any = {
    "required": True,
    "metavar": "CKPT",
    "help": "the .ckpt file of a trained model (needed)",
}
_DATA: Any = {
    "metavar": "PATH",
    "help": "as of `fit`; what training kept for the end if left out",
}
_ACCELERATOR: Any = {"help": "where to run: auto, cpu or gpu (auto)"}
_DEVICE: Any = {"help": "where to run: cpu or a CUDA device (cpu)"}


def add_flow_evaluate(parser: Parser) -> None:
    """Add the options of ``recoup flow evaluate``."""
    add = parser.add_argument
    add("--checkpoint", **_CHECKPOINT)
    add("--data", **_DATA)
    add("--batch-size", help="pictures in a batch (256)", **_INT)
    add("--accelerator", **_ACCELERATOR)


def add_sample(parser: Parser) -> None:
    """Add the options of ``recoup flow sample``."""
    add = parser.add_argument
    add("--checkpoint", **_CHECKPOINT)
    add("--num", help="number of pictures (64)", **_INT)
    add("--temperature", help="1 as in training, less for likelier pictures (0.7)", **_FLOAT)
    add("--out", metavar="FILE", help=".png, or another that Pillow writes (samples.png)")
    add("--seed", help="seed of the latents (0)", **_INT)
    add("--device", **_DEVICE)
    add("--labels", help="classes, such as 3 or 0,1,7, of a conditional flow; all if left out")


def add_demo(parser: Parser) -> None:
    """Add the options of ``recoup flow demo``."""
    add = parser.add_argument
    add("--out", metavar="DIR", help="folder of the results (runs/flow/demo-1, or the next number)")
    add("--epochs", help="number of epochs (10)", **_INT)


def add_lm_evaluate(parser: Parser) -> None:
    """Add the options of ``recoup lm evaluate``."""
    add = parser.add_argument
    add("--checkpoint", **_CHECKPOINT)
    add("--data", **_DATA)
    add("--batch-size", help="columns read side by side; only 1 reads every token (1)", **_INT)
    # Published are 2000 to 3785 for WikiText-2, and 500 for Penn Treebank.
    add("--cache-window", help="words of the neural cache, such as 2000; 0 for none (0)", **_INT)
    add("--cache-theta", help="how sharply it tells outputs apart (0.662)", **_FLOAT)
    add("--cache-weight", help="its part in the probability (0.1279)", **_FLOAT)
    add("--accelerator", **_ACCELERATOR)


def add_generate(parser: Parser) -> None:
    """Add the options of ``recoup lm generate``."""
    add = parser.add_argument
    add("--checkpoint", **_CHECKPOINT)
    add("--prompt", metavar="TEXT", help="how the text begins; what is not known reads as <unk>")
    add("--num-tokens", help="number of tokens to write (100)", **_INT)
    add("--temperature", help="1 as in training, less for likelier tokens (1.0)", **_FLOAT)
    add("--seed", help="seed of the draws (0)", **_INT)
    add("--device", **_DEVICE)


def add_curve(parser: Parser) -> None:
    """Add the options of ``recoup curve``."""
    add = parser.add_argument
    add(
        "build",
        metavar="BUILD",
        help="a function, as module:function or path/to/file.py:function, that is called as "
        "build(depth=..., memory=...) and returns (module, inputs), or a function that runs a "
        "training step",
    )
    add("--depths", nargs="+", help="numbers of blocks (4 8 16 32)", **_INT)
    add("--memories", nargs="+", metavar="MODE", help="modes, or slots (linear sqrt constant)")
    add("--device", **_DEVICE)
    add("--repeats", help="timed steps, of which the best counts; 0 for no times (3)", **_INT)
    add("--csv", help="write the points to this file", **_FILE)
    add("--figure", help="draw the curve: .png, .svg or .pdf", **_FILE)


def add_explain(parser: Parser) -> None:
    """Add the options of ``recoup explain``."""
    add = parser.add_argument
    add(
        "build",
        metavar="BUILD",
        help="a function, as module:function or path/to/file.py:function, that is called without "
        "arguments and returns (model, argument, ...), where a last dict stands for keyword "
        "arguments",
    )
    add("--budget", metavar="BYTES", help="of a step, such as 2GiB; all plans if left out")
    add("--blocks", metavar="REGEX", help="names of the blocks; found if left out")
    add("--loss", help="a function from what the model returns to a scalar, given as BUILD is")
    add("--device", **_DEVICE)
    add("--figure", help="draw the plan, or all: .png, .svg or .pdf", **_FILE)
    add("--html", help="a page of the memory of a step, event by event: .html", **_FILE)
    add("--compile", action="store_true", help="let blocks run compiled where that pays")
    add("--tiles", action="store_true", help="let the output layer and MLPs run in tiles")
