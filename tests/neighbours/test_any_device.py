"""Regions on an accelerator that is neither a CPU nor CUDA, which a simulated one stands for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.neighbours.device_worker import WAYS


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-m", "tests.neighbours.device_worker"]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert not ran.returncode, ran.stderr[-3000:]
    return json.loads(ran.stdout)


@pytest.mark.parametrize("way", ["plain, as on the CPU", *WAYS])
def test_dropout_is_repeated_to_the_bit(found, way):
    assert found[way] is True


def test_another_outcome_is_an_error_before_backward_returns(found):
    assert found["a counter"] == "ReplayError"
