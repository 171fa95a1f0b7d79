"""Accelerators that are neither a CPU nor CUDA, which a simulated one stands for."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import recoup
from tests.neighbours.device_worker import OTHERS, WAYS
from tests.neighbours.workers import outputs_of


def table(*arguments):
    """The table of the worker: ways, models, and what each found."""
    return json.loads(*outputs_of("device_worker", [arguments]))


def assert_all_the_same(found, num_models):
    """All cells, but for models that the device itself cannot run: it has no recurrent kernels."""
    assert found.pop("plain").keys() == {"recurrent", "lstm", "gru"}
    assert found["settings"].pop("counter").startswith("ReplayError: Running the checkpointed call")
    captured = found.pop("captured")
    assert captured.pop("a plan that keeps everything") == "same"
    for way, cell in captured.items():
        assert cell.startswith("RecoupError: A stream is being captured into a CUDA graph"), way
    assert found.keys() | {"captured"} == {*WAYS, *OTHERS}
    assert all(len(found[way]) >= num_models for way in WAYS)
    others = {(way, *cell) for way in found for cell in found[way].items() if cell[1] != "same"}
    assert not others


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
        wanted = (
            "same" if way in offloading else "ReplayError: aten.native_dropout.default draws on"
        )
        assert cell.startswith(wanted), way
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
