"""Reparametrized weights over two processes: the gradients of the whole batch, in one."""

from __future__ import annotations

import pytest

from tests.neighbours.workers import both, found_by, furthest

pytestmark = pytest.mark.slow

WAYS = ["rows", "both", "stacked", "learned"]
ADDING = ("stacked", "learned")  # parameters, which a wrapper has to know


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("weights_ddp_worker", tmp_path_factory.mktemp("weights"))


NEAR = [
    *(f"ddp {way} {call}" for way in WAYS for call in ("plainly", "torch", "reentrant", "ours")),
    *(f"ddp {way} {when}" for way in WAYS for when in ("before", "after", "inside")
      if way not in ADDING or when == "before"),
    *(f"fsdp {way} {how}" for way in WAYS for how in ("layers", "root", "torch", "ours", "kept")),
    *(f"fsdp {way} {how} late" for way in WAYS for how in ("layers", "root") if way not in ADDING),
]  # fmt: skip


@pytest.mark.parametrize("case", NEAR)
def test_gradients_are_those_of_the_whole_batch_in_one_process(found, case):
    """With the same noise on every rank; a reentrant checkpoint sums in another order."""
    assert furthest(found, case) < 3e-6


REFUSED = {
    "ddp late weight_g": "DistributedDataParallel",
    "ddp late weight_std": "DistributedDataParallel",
    **{f"fsdp {way} {how} late": "before" for way in ADDING for how in ("layers", "root")},
    "fsdp twin before": "mixed torch.Tensor and DTensor",
    "fsdp twin after": "a sharded model",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_so_on_every_rank(found, case):
    for said in both(found, case):
        assert isinstance(said, str)
        assert REFUSED[case] in said
    assert list(found[0]) == list(found[1])
    for when in ("before", "after"):
        assert both(found, f"ddp twin {when}") == [True, True]
