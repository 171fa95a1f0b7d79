"""DistributedDataParallel over two processes: the gradients of the whole batch."""

from __future__ import annotations

import pytest

from tests.neighbours.workers import found_by, furthest

MODES = ["sqrt", "1", "constant"]
CASES = ["plain", "unused", "shared"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("ddp_worker", tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("memory", MODES)
def test_the_gradients_are_those_of_the_whole_batch(found, memory, case):
    assert furthest(found, f"{memory} {case}") < 1e-12


def test_every_case_was_run(found):
    assert set(found[0]) == set(found[1]) == {f"{m} {c}" for m in MODES for c in CASES}
