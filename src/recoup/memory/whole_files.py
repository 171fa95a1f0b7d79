"""Files that are written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recoup._arguments import check_type

__all__ = ["path_of", "write_whole"]


def path_of(path: Any) -> Path:
    """Return the path of a file, or raise a ValueError if it is none."""
    check_type((str, os.PathLike), "the path of a file", path=path)
    if not Path(path).name:
        raise ValueError(f"`path` is {path!r}, but must be the path of a file.")
    return Path(path)


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file atomically; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
