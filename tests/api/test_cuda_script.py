"""`make cuda` on a machine without a GPU (T2)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_t2_without_a_gpu_there_is_one_line_and_no_result(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "cuda.py"), "--results", str(tmp_path)]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 1
    assert "GPU" in run.stdout
    assert list(tmp_path.iterdir()) == []


def test_t2_a_python_without_torch_is_told_which_to_name(tmp_path):
    # -S leaves site-packages out, and with them torch.
    script = str(ROOT / "benchmarks" / "cuda.py")
    command = [sys.executable, "-S", script, "--results", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "has no torch" in run.stderr
    assert "Traceback" not in run.stderr
