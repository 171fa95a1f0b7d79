"""Two processes under DDP, FSDP2 or `all_reduce_` have what one has of the whole batch."""

from __future__ import annotations

import pytest

from tests.neighbours.workers import RIGHT, SKIPPED, found_by

slow = pytest.mark.slow
WORKERS = [  # the worker, and how its cases begin
    pytest.param("models_worker", "chain", id="chains"),
    pytest.param("models_worker", "tiles", id="tiles", marks=slow),
    pytest.param("models_worker", "flow", id="flows", marks=slow),
    pytest.param("plans_worker", "", id="plans", marks=slow),
    pytest.param("weights_worker", "", id="weights", marks=slow),
    pytest.param("stores_worker", "", id="stores", marks=slow),
    pytest.param("fsdp_stores_worker", "", id="sharded stores", marks=slow),
]


@pytest.mark.parametrize(("worker", "prefix"), WORKERS)
def test_two_processes(worker, prefix, tmp_path):
    found = found_by(worker, tmp_path, prefix)
    assert found[0]
    assert found[0].keys() == found[1].keys()
    said = {(case, rank): text for rank, each in enumerate(found) for case, text in each.items()}
    assert not {where: text for where, text in said.items() if text not in (RIGHT, SKIPPED)}
