"""The versions of recoup, Python and torch, read without importing torch."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["version_line"]


def version_line() -> str:
    """Return the line that ``recoup --version`` prints, for reports of bugs."""
    # Of recoup the source has it: the metadata of an editable install may be old.
    source = (Path(__file__).parents[1] / "recoup" / "__init__.py").read_text("utf-8")
    own = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return f"recoup {''.join(own)} (Python {platform.python_version()}, torch {_torch_version()})"


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed"
