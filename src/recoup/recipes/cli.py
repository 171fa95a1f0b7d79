"""The command ``recoup`` as a module; what it is made of is in `recoup_cli`."""

from __future__ import annotations

import sys

from recoup_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
