"""What takes processes of its own: a simulated accelerator, ranks of a group, ranks without one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import recoup
from tests.neighbours.workers import MOST_SECONDS, NUM_RANKS, run_worker

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


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo")
@pytest.mark.parametrize(("worker", "prefix"), WORKERS)
def test_two_processes(worker, prefix, tmp_path):
    ranks = [[str(rank), str(tmp_path), prefix] for rank in range(NUM_RANKS)]
    run_worker(worker, ranks, MOST_SECONDS)


def test_every_way_on_any_device():
    run_worker("device_worker")


@pytest.mark.exhaustive
def test_every_model_in_every_way_on_any_device():
    run_worker("device_worker", [["all"]])


def test_a_device_without_states_counts_and_streams():
    run_worker("device_worker", [["bare"]])


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
    run_worker("fake_ranks_worker")


def test_layers_of_the_frontend_of_returnn():
    pytest.importorskip("returnn", reason="RETURNN is not installed")
    run_worker("returnn_worker", most_seconds=240)
