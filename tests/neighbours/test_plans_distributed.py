"""Plans under DistributedDataParallel and FSDP2, two processes: gradients of the whole batch."""

from __future__ import annotations

import pytest

from tests.neighbours.workers import both, found_by, furthest

pytestmark = pytest.mark.slow

SHARES = ["least", "middle"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("plans_ddp_worker", tmp_path_factory.mktemp("plans"))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "case",
    [
        "ddp_after", "ddp_before", "ddp_accumulated",
        "fsdp", "fsdp_root",
    ],
)  # fmt: skip
def test_the_gradients_are_those_of_the_whole_batch(found, case, share):
    assert furthest(found, f"{case} {share}") < 1e-6


@pytest.mark.parametrize("share", SHARES)
def test_a_step_keeps_to_its_budget(found, share):
    assert all(part <= 1.0 for part in both(found, f"ddp_peak {share}"))


@pytest.mark.parametrize("share", SHARES)
def test_a_wrapped_model_is_refused(found, share):
    for said in both(found, f"ddp_itself {share}"):
        assert said.startswith("ValueError: `model` is a DistributedDataParallel")


@pytest.mark.parametrize("share", SHARES)
def test_ranks_that_hold_parts_of_one_model_make_one_plan(found, share):
    """Otherwise one would wait for a rehearsal that the other does not run."""
    first, second = both(found, f"fsdp_uneven {share}")
    assert first == second
    budget_bytes, least_bytes, peak_bytes, _ = first
    assert least_bytes <= peak_bytes <= budget_bytes


@pytest.mark.parametrize("share", SHARES)
def test_a_head_of_a_sharded_model_runs_in_tiles(found, share):
    for each in both(found, f"fsdp_tiles {share}"):
        assert not isinstance(each, str), each  # the error of a rank
        off, part = each
        assert off < 1e-6
        assert part < 0.6


@pytest.mark.parametrize("share", SHARES)
def test_stages_of_a_pipeline_keep_to_their_budgets(found, share):
    for same, excess, runs_again in both(found, f"pipeline {share}"):
        assert same
        assert runs_again
        assert excess <= 0
