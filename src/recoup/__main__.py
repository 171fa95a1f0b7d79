"""``python -m recoup``: the command ``recoup``, for the Python that runs it."""

from __future__ import annotations

import sys

from recoup_cli import main

if __name__ == "__main__":
    sys.exit(main())
