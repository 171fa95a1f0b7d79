"""RETURNN: the cases of returnn_cases.py, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("returnn_cases.py")


def test_layers_of_its_frontend():
    pytest.importorskip("returnn", reason="RETURNN is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "5 passed" in run.stdout
