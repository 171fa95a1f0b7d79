"""Reparametrized weights over two processes: the gradients of the whole batch, in one."""

from __future__ import annotations

import pytest

from tests.neighbours.workers import both, found_by, furthest

pytestmark = pytest.mark.slow

WAYS = ["dropout", "noise", "rows", "stacked", "learned"]
ADDING = ("stacked", "learned")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("weights_ddp_worker", tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("call", ["plainly", "torch", "reentrant", "ours"])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_noise_on_every_rank(found, way, call):
    """Blocks may be checkpointed, and no parameter is called unused."""
    assert furthest(found, f"ddp {way} {call} manual_seed") < 1e-6


@pytest.mark.parametrize("call", ["plainly", "torch", "reentrant", "ours"])
@pytest.mark.parametrize("way", WAYS)
def test_a_seed_for_each_step(found, way, call):
    # Rounding in float32: a reentrant checkpoint sums in another order.
    assert furthest(found, f"ddp {way} {call} same_draw") < 3e-6


@pytest.mark.parametrize("when", ["before", "after", "inside"])
@pytest.mark.parametrize("way", WAYS)
def test_applied_before_and_after_it_is_wrapped(found, way, when):
    if way in ADDING and when != "before":
        pytest.skip("it adds parameters, which the wrapper has to know")
    assert furthest(found, f"ddp {way} {when}") < 1e-6


def test_noise_of_each_rank(found):
    assert furthest(found, "ddp noise of each rank") < 1e-6
    assert min(both(found, "ddp noises apart")) > 0.1
    assert both(found, "ddp generators differ") == [True, True]


def test_micro_batches(found):
    assert furthest(found, "ddp accumulates") < 1e-6


@pytest.mark.parametrize("added", ["weight_g", "weight_std"])
def test_what_adds_parameters_after_wrapping(found, added):
    for said in both(found, f"ddp late {added}"):
        assert said == "reduced" or "DistributedDataParallel" in said


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_twin_of_a_model_that_is_wrapped(found, when):
    assert both(found, f"ddp twin {when}") == [True, True]


@pytest.mark.parametrize(
    ("when", "message"),
    [("before", "mixed torch.Tensor and DTensor"), ("after", "a sharded model")],
)
def test_a_twin_of_a_model_that_is_sharded(found, when, message):
    for said in both(found, f"fsdp twin {when}"):
        assert message in said


@pytest.mark.parametrize("draw", ["manual_seed", "same_draw"])
@pytest.mark.parametrize("how", ["layers", "root"])
@pytest.mark.parametrize("way", WAYS)
def test_sharded(found, way, how, draw):
    assert furthest(found, f"fsdp {way} {how} {draw}") < 1e-6


@pytest.mark.parametrize("call", ["torch", "ours", "kept"])
@pytest.mark.parametrize("way", WAYS)
def test_sharded_and_checkpointed(found, way, call):
    """Or not resharded after forward."""
    assert furthest(found, f"fsdp {way} {call}") < 1e-6


@pytest.mark.parametrize("how", ["layers", "root"])
@pytest.mark.parametrize("way", ["dropout", "noise", "rows"])
def test_applied_after_sharding(found, way, how):
    assert furthest(found, f"fsdp {way} {how} late") < 1e-6


@pytest.mark.parametrize("how", ["layers", "root"])
@pytest.mark.parametrize("way", ADDING)
def test_what_adds_parameters_after_sharding(found, way, how):
    for value in both(found, f"fsdp {way} {how} late"):
        assert isinstance(value, str)
        assert "weight" in value
        assert "before" in value


@pytest.mark.parametrize(
    "how",
    [
        "layers",
        "root",
    ],
)
def test_a_sharded_recurrent_layer(found, how):
    assert furthest(found, f"fsdp recurrent {how}") < 1e-6


def test_sharded_in_bfloat16(found):
    assert furthest(found, "fsdp bfloat16") < 0.05


def test_sharded_training(found):
    assert furthest(found, "fsdp trains") < 1e-6


def test_both_ranks_found_the_same_cases(found):
    assert list(found[0]) == list(found[1])
    assert len(found[0]) > 50
