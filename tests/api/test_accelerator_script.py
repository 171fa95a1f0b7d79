"""`make accelerator`: on a machine without a GPU, and in tiny sizes (T2)."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "benchmarks" / "accelerator.py")


def script(*arguments):
    command, env = [sys.executable, SCRIPT, *arguments], os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_t2_without_a_gpu_there_is_one_line_and_no_result(tmp_path):
    run = script("--results", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 1
    assert "GPU" in run.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_parts_in_tiny_sizes_write_rows_and_a_table(tmp_path):
    pytest.importorskip("transformers")
    run = script("--small", "--results", str(tmp_path), "--parts", "budgets of ResNet-50")
    assert "Not well: none." in run.stdout, run.stdout + run.stderr
    (path,) = tmp_path.glob("budgets_*.json")
    found = json.loads(path.read_text())
    for row in found["budgets"]:
        assert row["allocated_bytes"] <= row["usable_bytes"] <= row["budget_bytes"]
    table = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["budgets_table"](found)
    rows = [*found["budgets"], *found["speeds"], *found["sketches"]]
    assert table.count("\n| ResNet-50 |") == len(rows) > 0
