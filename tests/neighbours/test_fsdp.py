"""FSDP2 over two processes, each stage or the whole sharded: the gradients of the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

WORKER = Path(__file__).with_name("fsdp_worker.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch is built without gloo")
    folder = tmp_path_factory.mktemp("fsdp")
    command = [sys.executable, str(WORKER)]
    workers = [
        subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [worker.communicate(timeout=180)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(said)[-3000:]
    lines = (folder / "found-0").read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines]
    return {(memory, sharded): float(worst) for memory, sharded, worst in rows}


@pytest.mark.parametrize("sharded", ["stages", "whole"])
@pytest.mark.parametrize("memory", ["sqrt", "constant"])
def test_the_gradients_are_those_of_the_whole_batch(found, memory, sharded):
    assert found[memory, sharded] < 1e-6
