"""FSDP2 over two processes, each stage or the whole sharded: the gradients of the whole batch."""

from __future__ import annotations

import pytest

from tests.neighbours.workers import found_by, furthest


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("fsdp_worker", tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("sharded", ["stages", "whole"])
@pytest.mark.parametrize("memory", ["sqrt", "constant"])
def test_the_gradients_are_those_of_the_whole_batch(found, memory, sharded):
    assert furthest(found, f"{memory} {sharded}") < 1e-6
