"""Two processes under DDP, FSDP2 or `all_reduce_` have what one has of the whole batch."""

from __future__ import annotations

import pytest

from tests.neighbours import (
    fsdp_stores_worker,
    models_worker,
    plans_worker,
    stores_worker,
    weights_worker,
)
from tests.neighbours.workers import NUM_RANKS, RIGHT, SKIPPED, found_by


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks of a worker found, which runs at most once."""
    known = {}

    def found(worker, prefix=""):
        key = worker.__name__.rpartition(".")[2], prefix
        if key not in known:
            known[key] = None  # if it fails, it does so once
            known[key] = found_by(key[0], tmp_path_factory.mktemp("ranks"), prefix)
        assert known[key] is not None, "the worker failed"
        return known[key]

    return found


def cases_of(worker, prefix=""):
    cases = [case for case in worker.CASES if case.startswith(prefix)]
    assert cases
    return pytest.mark.parametrize("case", cases)


def assert_right(found, case):
    said = [rank[case] for rank in found]
    if said == [SKIPPED] * NUM_RANKS:
        pytest.skip("a library is not installed")
    assert said == [RIGHT] * NUM_RANKS, "\n".join(said)


@cases_of(models_worker, "chain")
def test_chains_in_parallel(found, case):
    assert_right(found(models_worker, "chain"), case)


@pytest.mark.slow
@cases_of(models_worker, "tiles")
def test_tiles_in_parallel(found, case):
    assert_right(found(models_worker, "tiles"), case)


@pytest.mark.slow
@cases_of(models_worker, "flow")
def test_flows_in_parallel(found, case):
    assert_right(found(models_worker, "flow"), case)


@pytest.mark.slow
@cases_of(plans_worker)
def test_plans_in_parallel(found, case):
    assert_right(found(plans_worker), case)


@pytest.mark.slow
@cases_of(weights_worker)
def test_weights_in_parallel(found, case):
    assert_right(found(weights_worker), case)


@pytest.mark.slow
@cases_of(stores_worker)
def test_stores_in_parallel(found, case):
    assert_right(found(stores_worker), case)


@pytest.mark.slow
@cases_of(fsdp_stores_worker)
def test_stores_of_sharded_gradients(found, case):
    assert_right(found(fsdp_stores_worker), case)
