"""Ctrl-C at a chosen place: a tracer that raises where the interpreter would."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import recoup

_SOURCE = str(Path(recoup.__file__).parent)
# Contexts that are written in C take and give back in one instruction, which nothing interrupts;
# the tracer is told of the line once more before they are left.
_IN_C = ("lock", "LOCK", "_plainly", "torch._C.")


class Interrupt:
    """Runs a function and raises KeyboardInterrupt at one of the places that it goes through.

    Places are, in recoup's own files, where a function begins, where a line does and where a
    function returns.

    Args:
        at: the number of the place; None to count them.
    """

    def __init__(self, at: int | None = None) -> None:
        self.num_places = 0
        self.where = ""
        self._at = at

    def run(self, fn: Callable[[], object]) -> KeyboardInterrupt | None:
        """Run `fn`; return the interrupt, with its traceback, if it came out of it."""
        before = sys.gettrace()
        sys.settrace(self._begin)
        try:
            fn()
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.settrace(before)
        return None

    def _begin(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_SOURCE):
            return None
        self._place(frame, event)
        return self._go_on

    def _go_on(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" or event == "return":
            self._place(frame, event)
        return self._go_on

    def _place(self, frame: FrameType, event: str) -> None:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and line.startswith("with ") and any(name in line for name in _IN_C):
            return
        if self.num_places == self._at:
            self.where = f"{event} of {frame.f_code.co_filename}:{frame.f_lineno} ({line})"
            self.num_places += 1
            raise KeyboardInterrupt
        self.num_places += 1
