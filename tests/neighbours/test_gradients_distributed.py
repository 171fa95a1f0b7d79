"""Stores of gradients over two processes: DistributedDataParallel, FSDP2, and `all_reduce_`."""

from __future__ import annotations

import pytest

from tests.neighbours.workers import both, found_by, furthest

pytestmark = pytest.mark.slow

KINDS = ["plain", "unused", "static", "views", "views unused", "views static"]
LAYERS = ["layers", "whole"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("gradients_ddp_worker", tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    return found_by("gradients_reduce_worker", tmp_path_factory.mktemp("reduce"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return found_by("gradients_fsdp_worker", tmp_path_factory.mktemp("fsdp"))


def refused(found, case, *words):
    for said in both(found, case):
        assert isinstance(said, str), said
        assert said.startswith("GradientError")
        for word in words:
            assert word in said


# -- DistributedDataParallel -----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["auto", "harvest", "collecting"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_of_several_backwards_is_that_of_the_whole_batch(found, kind, way):
    for rank in both(found, f"several {kind} {way}"):
        assert isinstance(rank, dict), rank
        assert rank["apart"] < 1e-12
        assert set(rank[".grad"]) == {0.0}, "what was in `.grad` is not there again"
        assert rank["later"] == 0.0, "a later backward writes to the store"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_from_grad_is_not_the_buffer_of_a_reducer(found, kind):
    for rank in both(found, f"taken {kind}"):
        assert isinstance(rank, list), rank
        assert max(rank) < 1e-12


@pytest.mark.parametrize("way", ["auto", "collecting"])
@pytest.mark.parametrize("kind", ["plain", "views"])
def test_a_store_over_some_parameters(found, kind, way):
    assert furthest(found, f"subset {kind} {way}") < 1e-12


@pytest.mark.parametrize("kind", ["unused", "views unused"])
def test_ranks_that_use_different_layers(found, kind):
    assert furthest(found, f"unlike {kind}") < 1e-12


@pytest.mark.parametrize("end", ["all_reduce_", "backward"])
@pytest.mark.parametrize("way", ["auto", "grad", "collecting", "segments"])
def test_what_was_collected_within_no_sync_is_reduced_in_the_end(found, way, end):
    assert furthest(found, f"unreduced {way} {end}") < 1e-12


def test_a_merge_keeps_what_is_yet_to_be_reduced_with_the_rest(found):
    """Collected apart (`segments_backward`), the rest alone would be reduced."""
    assert furthest(found, "unknown segments") < 1e-12


@pytest.mark.parametrize("end", ["all", "all_reduce_"])
def test_sparse_gradients_of_a_layer(found, end):
    assert furthest(found, f"sparse {end}") < 1e-12


def test_a_sum_in_another_type_is_reduced(found):
    assert furthest(found, "float32 all_reduce_") < 1e-6


@pytest.mark.parametrize(
    "case", ["float32 backward", "sparse backward", "taken unreduced", "partly unreduced"]
)
def test_a_backward_that_would_reduce_itself_alone_is_refused(found, case):
    """What a reducer cannot take over would stay a part of this process."""
    refused(found, case, "`no_sync()`", "`all_reduce_`")


def test_ways_that_pass_the_reducer_by_are_refused(found):
    refused(found, "refused grad", '"grad"', 'mode="harvest"', "`no_sync()`", "`all_reduce_`")


def test_training(found):
    assert furthest(found, "trained") < 1e-12


def test_what_no_reducer_sees_is_refused_unless_nobody_reduces(found):
    """With the DistributedDataParallel given; and without it, where it must be."""
    refused(found, "refused graph", "`no_sync()`", "`all_reduce_`")
    refused(found, "unknown", "GradStore(params, ddp=model)", "ddp=False")
    assert furthest(found, "nobody asked") < 1e-12


# -- all_reduce_ -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [1, 40, "25 MiB"])
@pytest.mark.parametrize("absent", [[-1, -1], [0, -1], [0, 3], [4, 1]])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_gradients_of_several_types(reduced, op, absent, bucket):
    """Of which a rank may have some alone, and which nobody has stays absent."""
    assert furthest(reduced, f"reduced {op} {absent} {bucket}") == 0.0


@pytest.mark.parametrize("other", ["sparse", "dense"])
@pytest.mark.parametrize("mine", ["sparse", "dense", "absent"])
def test_sparse_gradients(reduced, mine, other):
    assert furthest(reduced, f"sparse {mine} {other}") == 0.0


@pytest.mark.parametrize("alike", [True, False])
def test_messages_are_few_and_a_large_gradient_is_not_copied(reduced, alike):
    for num_messages, num_buckets, peak in both(reduced, f"counted {alike}"):
        assert num_messages <= num_buckets + 1
        if alike:
            assert peak < 200_000  # the largest is of 400 kB, the buckets of 30


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_the_mean_is_over_the_batches_of_all_ranks(reduced, op):
    for *entries, want in both(reduced, f"weighted {op}"):
        assert entries == pytest.approx([want] * 2)


def test_a_mean_does_not_overflow_on_its_way(reduced):
    assert both(reduced, "large") == [40_000.0] * 2


def test_a_rank_without_gradients_learns_their_scale(reduced):
    refused(reduced, "scaled", "scaled by 8")


def test_processes_that_agree_reduce(reduced):
    assert both(reduced, "stranger nobody") == ["nothing"] * 2


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("number", "another number"),
        ("order", "same order"),
        ("op", "`op`"),
        ("bucket", "`bucket_bytes`"),
        ("scale", "one scale"),
    ],
)
def test_processes_that_differ_all_raise(reduced, what, words):
    refused(reduced, f"stranger {what}", words)


@pytest.mark.parametrize(
    ("what", "words"), [("extra", "`params`"), ("graph", "`detach_()`"), ("damage", "`clear()`")]
)
def test_nobody_waits_for_a_process_that_cannot_take_part(reduced, what, words):
    other, culprit = both(reduced, f"stranger {what}")
    assert words in culprit
    assert "Process 1" in other


# -- FSDP2 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["auto", "harvest", "collecting"])
@pytest.mark.parametrize("kind", ["", "kept ", "low "])
@pytest.mark.parametrize("how", LAYERS)
def test_sharded_gradients_are_summed_in_place(sharded, how, kind, way):
    """Each layer or the whole, resharded or kept after forward, gathered in 16 bits or not."""
    for rank in both(sharded, f"{how} {kind}several {way}"):
        assert isinstance(rank, list), rank
        apart, puts_back, in_place, counts_its_part = rank
        assert apart < (0.01 if kind == "low " else 1e-6)
        assert puts_back
        assert in_place
        assert counts_its_part


@pytest.mark.parametrize("way", ["auto", "collecting"])
@pytest.mark.parametrize("kind", ["", "kept ", "low "])
@pytest.mark.parametrize("how", LAYERS)
def test_backwards_that_fsdp_does_not_reduce_are_not_lost(sharded, how, kind, way):
    bound = 0.01 if kind == "low " else 1e-6
    assert furthest(sharded, f"{how} {kind}unreduced {way}") < bound


@pytest.mark.parametrize("how", LAYERS)
def test_a_sharded_store_in_another_type(sharded, how):
    for apart, puts_back, *_ in both(sharded, f"{how} several in float64"):
        assert apart < 1e-6
        assert puts_back


@pytest.mark.parametrize("how", LAYERS)
def test_a_backward_that_reduces_nothing_is_not_silent(sharded, how):
    refused(sharded, f"{how} unreduced alone", "allow_empty=True")


@pytest.mark.parametrize("how", LAYERS)
def test_ways_that_pass_fsdp_by_are_refused(sharded, how):
    refused(sharded, f"{how} refused grad", '"grad"', "DTensor", 'mode="harvest"')


@pytest.mark.parametrize("how", LAYERS)
def test_a_graph_of_sharded_gradients_is_refused(sharded, how):
    refused(sharded, f"{how} with a graph", "`create_graph`", "DTensor")


@pytest.mark.parametrize("how", LAYERS)
def test_numbers_are_those_of_the_full_gradients(sharded, how):
    for rank in both(sharded, f"{how} algebra"):
        assert isinstance(rank, dict), rank
        assert max(rank.values()) < 1e-5


def test_the_largest_entry_where_a_rank_has_none(sharded):
    assert furthest(sharded, "largest") < 1e-6


@pytest.mark.parametrize("name", ["adamw", "fused", "nesterov"])
@pytest.mark.parametrize("how", LAYERS)
def test_sharded_training(sharded, how, name):
    assert furthest(sharded, f"{how} trained {name}") < 1e-6


@pytest.mark.parametrize("how", LAYERS)
def test_the_gradient_of_a_batch_is_returned(sharded, how):
    for apart, is_left_alone in both(sharded, f"{how} inputs"):
        assert apart < 1e-6
        assert is_left_alone


@pytest.mark.parametrize("how", LAYERS)
def test_sharded_and_whole_gradients_are_not_mixed(sharded, how):
    for said in both(sharded, f"{how} mixed"):
        assert "DTensor" in said
        assert "plain tensor" in said


@pytest.mark.parametrize("how", LAYERS)
def test_what_fsdp_reduced_is_not_reduced_again(sharded, how):
    refused(sharded, f"{how} reduced again", "`all_reduce_`")


@pytest.mark.parametrize("how", LAYERS)
def test_sharded_states(sharded, how):
    """One is loaded; one of whole gradients is refused, and leaves the store as it was."""
    for apart, words in both(sharded, f"{how} saved"):
        assert apart < 1e-6
        assert "plain tensor" in words


@pytest.mark.parametrize("how", LAYERS)
def test_sharded_tensors_are_measured_and_listed(sharded, how):
    assert both(sharded, f"{how} measured") == [True, True]
