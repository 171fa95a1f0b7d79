"""The versions of recoup, Python and torch, read without importing torch."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version

from recoup_cli.signatures import package_folder

__all__ = ["version_line"]

_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def version_line() -> str:
    """Return the line that ``recoup --version`` prints, for reports of bugs."""
    others = f"Python {platform.python_version()}, torch {_torch_version()}"
    return f"recoup {_own_version()} ({others})"


def _own_version() -> str:
    """Return the version in the source: the metadata of an editable install may be old."""
    folder = package_folder("recoup")
    found = None if folder is None else _VERSION.search((folder / "__init__.py").read_text("utf-8"))
    return "(version unknown)" if found is None else found[1]


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed"
