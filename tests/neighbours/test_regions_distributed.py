"""Chains and tiles over two processes, under DDP or FSDP2: the gradients of the whole batch."""

from __future__ import annotations

import pytest

from tests.neighbours.chains_worker import CASES, MEMORIES
from tests.neighbours.workers import found_by, furthest


@pytest.fixture(scope="module")
def of_chains(tmp_path_factory):
    return found_by("chains_worker", tmp_path_factory.mktemp("chains"))


@pytest.fixture(scope="module")
def of_tiles(tmp_path_factory):
    return found_by("tiles_worker", tmp_path_factory.mktemp("tiles"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("memory", MEMORIES)
def test_chains_in_parallel(of_chains, memory, case):
    assert furthest(of_chains, f"{memory} {case}") < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp, each", "fsdp, whole"])
@pytest.mark.parametrize("way", ["tiled", "tiled_loss"])
def test_tiles_in_parallel(of_tiles, way, wrapper):
    assert furthest(of_tiles, f"{way} {wrapper}") < 1e-6
