"""The command ``recoup`` as a module; `recoup_cli` implements it."""

from __future__ import annotations

import sys

from recoup_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
