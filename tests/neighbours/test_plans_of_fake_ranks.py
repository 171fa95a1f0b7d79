"""Plans of sharded models, rank by rank, under torch's fake process group: no other process."""

from __future__ import annotations

import json

import pytest
import torch

from tests.neighbours.fake_ranks_worker import NUM_RANKS
from tests.neighbours.workers import outputs_of

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="here the fake group leaves what it gathers uninitialized"
)


@pytest.fixture(scope="module")
def ranks():
    """What each rank found."""
    given = [[str(rank)] for rank in range(NUM_RANKS)]
    return [json.loads(each) for each in outputs_of("fake_ranks_worker", given)]


@pytest.mark.parametrize("way", ["sharded", "in_parallel"])
def test_the_largest_of_all_ranks_suffices_and_all_run_the_same_collectives(ranks, way):
    rows = [found[way] for found in ranks]
    assert all(row["peak"] <= max(each["least"] for each in rows) for row in rows)
    for name in ("plain", "all", "again"):
        assert len({row[name] for row in rows}) == 1
    assert all(row["forwards"] > 0 for row in rows)


def test_ranks_with_larger_batches_need_more(ranks):
    least = [found["sharded"]["least"] for found in ranks]
    assert sorted(set(least)) == least
    assert len({found["in_parallel"]["least"] for found in ranks}) == 1


def test_a_head_of_a_sharded_model_runs_in_tiles(ranks):
    for found in ranks[::3]:
        tiled = found["in_tiles"]
        assert tiled["bytes"] < 0.6
        off = {name: each for name, each in tiled["off"].items() if each}
        assert off.keys() <= {"head.weight", "head.bias"}
        assert max(off.values(), default=0.0) < 1e-6


@pytest.mark.parametrize("case", ["head alone", "loss outside", "freed"])
def test_a_head_whose_weight_or_output_is_not_there_for_tiles_runs_whole(ranks, case):
    assert set(ranks[0][case]["off"].values()) == {0.0}


def test_collectives_that_second_runs_repeat_are_counted(ranks):
    """FSDP2 gathers for backward anyway; in tensor parallelism they are code of the blocks."""
    for found in ranks:
        sharded, parallel = found["sharded"], found["in_parallel"]
        assert sharded["all"] == sharded["plain"] > sharded["again"] == 0
        assert "collectives" not in sharded["text"]
        assert parallel["all"] == parallel["plain"] + parallel["again"] > parallel["plain"]
        said = f"second runs repeat {parallel['again']} of the {parallel['all']} collectives"
        assert said in parallel["text"]
