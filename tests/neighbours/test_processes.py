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


@pytest.mark.skipif(torch.__version__ < "2.13", reason="what is gathered is uninitialized there")
def test_sharded_models_under_the_fake_process_group_of_torch():
    outputs_of("fake_ranks_worker", [[]])


def test_layers_of_the_frontend_of_returnn():
    pytest.importorskip("returnn", reason="RETURNN is not installed")
    outputs_of("returnn_worker", [[]], 240)
