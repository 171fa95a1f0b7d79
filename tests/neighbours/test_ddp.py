"""DistributedDataParallel over two processes: the gradients of the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

WORKER = Path(__file__).with_name("ddp_worker.py")
MODES = ["sqrt", "1", "constant"]
CASES = ["plain", "unused", "shared"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch is built without gloo")
    folder = tmp_path_factory.mktemp("ddp")
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder)],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [worker.communicate(timeout=180)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(said)[-3000:]
    differences = []
    for rank in range(2):
        lines = (folder / f"found-{rank}").read_text(encoding="utf-8").splitlines()
        rows = [line.split() for line in lines]
        differences.append({(memory, case): float(value) for memory, case, value in rows})
    return differences


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("memory", MODES)
def test_the_gradients_are_those_of_the_whole_batch(found, memory, case):
    for rank in range(2):
        assert found[rank][memory, case] < 1e-12


def test_every_case_was_run(found):
    assert set(found[0]) == set(found[1]) == {(m, c) for m in MODES for c in CASES}
