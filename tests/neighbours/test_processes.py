"""What takes processes of its own: a simulated accelerator, ranks of a group, ranks without one.

The cases are in the workers of this folder; a test starts one, and looks at what it found.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import recoup
from tests.neighbours.device_worker import OTHERS, WAYS
from tests.neighbours.workers import RIGHT, SKIPPED, found_by, outputs_of

# -- two processes under DDP, FSDP2 or `all_reduce_`, which have what one has of the whole batch ---

slow = pytest.mark.slow
WORKERS = [  # the worker, and how its cases begin
    pytest.param("models_worker", "chain", id="chains"),
    pytest.param("models_worker", "tiles", id="tiles", marks=slow),
    pytest.param("models_worker", "flow", id="flows", marks=slow),
    pytest.param("models_worker", "plans", id="plans", marks=slow),
    pytest.param("models_worker", "weights", id="weights", marks=slow),
    pytest.param("stores_worker", "ddp", id="stores", marks=slow),
    pytest.param("stores_worker", "fsdp", id="sharded stores", marks=slow),
]


@pytest.mark.parametrize(("worker", "prefix"), WORKERS)
def test_two_processes(worker, prefix, tmp_path):
    found = found_by(worker, tmp_path, prefix)
    assert found[0]
    assert found[0].keys() == found[1].keys()
    said = {(case, rank): text for rank, each in enumerate(found) for case, text in each.items()}
    assert not {where: text for where, text in said.items() if text not in (RIGHT, SKIPPED)}


# -- accelerators that are neither a CPU nor CUDA --------------------------------------------------


def table(*arguments):
    """The table of the worker: ways, models, and what each found."""
    return json.loads(*outputs_of("device_worker", [arguments]))


def assert_all_the_same(found, num_models):
    """All cells, but for models that the device itself cannot run: it has no recurrent kernels."""
    assert found.pop("plain", {}).keys() <= {"recurrent", "lstm", "gru"}
    assert found["settings"].pop("counter").startswith("ReplayError: Running the checkpointed call")
    captured = found.pop("captured")
    assert captured.pop("a plan that keeps everything") == "same"
    for way, cell in captured.items():
        assert cell.startswith("RecoupError: A stream is being captured into a CUDA graph"), way
    assert found.keys() | {"captured"} == {*WAYS, *OTHERS}
    assert all(len(found[way]) >= num_models for way in WAYS)
    assert not {(way, *cell) for way in found for cell in found[way].items() if cell[1] != "same"}


def test_every_way_on_any_device():
    assert_all_the_same(table(), 5)


@pytest.mark.exhaustive
def test_every_model_in_every_way_on_any_device():
    assert_all_the_same(table("all"), 50)


def test_a_device_without_states_counts_and_streams():
    found = table("bare")
    assert set(found["without dropout"].values()) == {"same"}
    offloading = {way for way in WAYS if "offloading" in way}
    for way, cell in found["with dropout"].items():
        error = "ReplayError: aten.native_dropout.default draws on"
        assert cell.startswith("same" if way in offloading else error), way
    for cell in found["bytes"].values():
        assert cell.startswith("ValueError: The bytes on sim")


def test_tensors_without_values():
    with FakeTensorMode() as mode:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()), torch.rand(4, 4)
        recoup.checkpoint(model, x).sum().backward()
        recoup.Sequential(*model, memory="sqrt")(x).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    for call in (lambda: recoup.measure(lambda: model(x)), lambda: recoup.plan(model, x)):
        with mode:
            call()
        with pytest.raises(ValueError, match="Tensors of a FakeTensorMode take no memory"):
            call()


# -- plans of sharded models under torch's fake process group: there is no other process ----------


@pytest.fixture(scope="module")
def ranks():
    """What each rank found."""
    if torch.__version__ < "2.13":
        pytest.skip("here the fake group leaves what it gathers uninitialized")
    return json.loads(*outputs_of("fake_ranks_worker", [[]]))


def test_the_largest_of_all_ranks_suffices_and_all_run_the_same_collectives(ranks):
    """FSDP2 gathers for backward anyway; in tensor parallelism collectives are code of blocks."""
    least = {way: [found[way]["least"] for found in ranks] for way in ("sharded", "in_parallel")}
    first, last = least["sharded"]
    assert first < last  # whose batch is larger
    assert len(set(least["in_parallel"])) == 1
    for way, bytes_of_ranks in least.items():
        rows = [found[way] for found in ranks]
        assert all(row["peak"] <= max(bytes_of_ranks) and row["forwards"] > 0 for row in rows)
        assert len({(row["plain"], row["planned"]) for row in rows}) == 1
    assert ranks[0]["sharded"]["planned"] == ranks[0]["sharded"]["plain"] > 0
    assert ranks[0]["in_parallel"]["planned"] > ranks[0]["in_parallel"]["plain"]


def test_a_head_of_a_sharded_model_runs_in_tiles(ranks):
    tiled = ranks[0]["in_tiles"]
    assert tiled["bytes"] < 0.6
    off = {name: each for name, each in tiled["off"].items() if each}
    assert off.keys() <= {"head.weight", "head.bias"}
    assert max(off.values(), default=0.0) < 1e-6


@pytest.mark.parametrize("case", ["head alone", "loss outside", "freed"])
def test_a_head_whose_weight_or_output_is_not_there_for_tiles_runs_whole(ranks, case):
    assert set(ranks[0][case]["off"].values()) == {0.0}


def test_layers_of_the_frontend_of_returnn():
    pytest.importorskip("returnn", reason="RETURNN is not installed")
    outputs_of("returnn_worker", [[]], 240)
