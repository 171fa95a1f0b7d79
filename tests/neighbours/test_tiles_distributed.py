"""Calls in tiles under DistributedDataParallel and FSDP2: the gradients of the whole batch."""

from __future__ import annotations

import pytest

from tests.neighbours.workers import found_by, furthest


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("tiles_worker", tmp_path_factory.mktemp("tiles"))


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp, each", "fsdp, whole"])
@pytest.mark.parametrize("way", ["tiled", "tiled_loss"])
def test_tiles_in_parallel(found, way, wrapper):
    assert furthest(found, f"{way} {wrapper}") < 1e-6
