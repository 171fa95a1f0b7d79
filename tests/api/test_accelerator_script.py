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


def script(*arguments, options=()):
    return subprocess.run(
        [sys.executable, *options, SCRIPT, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_t2_without_a_gpu_there_is_one_line_and_no_result(tmp_path):
    run = script("--results", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 1
    assert "GPU" in run.stdout
    assert list(tmp_path.iterdir()) == []


def test_t2_a_python_without_torch_is_told_which_to_name(tmp_path):
    # -S leaves site-packages out, and with them torch.
    run = script("--results", str(tmp_path), options=["-S"])
    assert run.returncode != 0
    assert "has no torch" in run.stderr
    assert "Traceback" not in run.stderr


OF_RESNET = ("--parts", "budgets of ResNet-50")
ALL = {"GPT-2", "Llama", "ViT", "ResNet-50"}


@pytest.mark.parametrize(
    ("parts", "models"),
    [
        pytest.param(OF_RESNET, {"ResNet-50"}, marks=pytest.mark.slow),
        pytest.param((), ALL, marks=pytest.mark.exhaustive),
    ],
)
def test_parts_in_tiny_sizes_write_rows_and_a_table(parts, models, tmp_path):
    pytest.importorskip("transformers")
    run = script("--small", "--results", str(tmp_path), *parts)
    assert "Not well: none." in run.stdout, run.stdout + run.stderr
    (path,) = tmp_path.glob("budgets_*.json")
    found = json.loads(path.read_text())
    for row in found["budgets"]:
        assert row["allocated_bytes"] <= row["usable_bytes"] <= row["budget_bytes"]
    table = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["budgets_table"](found)
    rows = [*found["budgets"], *found["speeds"], *found["sketches"]]
    assert sum(table.count(f"\n| {model} |") for model in {r["model"] for r in rows}) == len(rows)
    assert {row["model"] for row in found["sketches"]} == models
