"""Law 2 for reparametrized weights: what a forward leaves, counted in storages.

NOTE [ What is compared with what ]

Rule 1. A layer with noise may hold what the plain layer holds, and 64 bytes a weight; a weight norm
        may hold its norms too. Parameters are there before, and do not count.
Rule 2. Under autocast a plain layer holds the copies that were made of its weights. A layer with
        noise may not: it is compared with the plain one less these copies.
Rule 3. Every kind of layer is run with what keeps its noisy weights too, which must break the law.
"""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch import nn

import recoup
from recoup._core.storage_tracking import StorageTracker
from tests.alive import Held, held_after, histories, no_collector, step_of
from tests.oracle import hooks_in_force
from tests.weight_zoo import (
    LAYERS,
    NAIVE,
    OURS,
    PRECISIONS,
    Apply,
    Kind,
    Uses,
    around,
    built,
    matching,
)

BYTES_A_WEIGHT = 64
# Looked up, and not saved by anybody.
UNSAVED = {name for name in LAYERS if name.startswith("embedding") and "weighted" not in name}
SOME = ("linear", "lstm", "lstm cell, in a loop", "attention to itself", "embedding, sparse")


pytestmark = [
    pytest.mark.usefixtures("measured"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN"),  # torch, of its flags
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def held_by(kind: Kind, precision: str, apply: Apply | None) -> tuple[Held, int]:
    """What a forward leaves, and how many bytes of norms the layer may keep."""
    module, inputs = built(kind, precision)
    weights = [weight for _, weight in matching(module, kind.pattern)]
    if apply is not None:
        module = apply(module, kind.pattern)
    again = [
        held_after(lambda: module(*inputs), weights, functools.partial(around, precision))
        for _ in range(2)
    ]
    norms = [norm for name, norm in module.named_parameters() if name.endswith("_g")]
    return max(again), sum(4 * norm.numel() for norm in norms)  # in float32 for bfloat16, too


@functools.cache
def plain_held(name: str, precision: str) -> Held:
    return held_by(LAYERS[name], precision, None)[0]


def beyond_the_law(name: str, precision: str, apply: Apply) -> int:
    """How many bytes more a layer holds than it may."""
    kind = LAYERS[name]
    plain = plain_held(name, precision)
    held, norm_bytes = held_by(kind, precision, apply)
    num_weights = len(matching(kind.build(), kind.pattern))
    allowed = plain.num_bytes - plain.cast_bytes + BYTES_A_WEIGHT * num_weights + norm_bytes
    return held.num_bytes - allowed


# -- after a forward -------------------------------------------------------------------------------


@pytest.mark.sampled(9)
@pytest.mark.parametrize("how", OURS)
@pytest.mark.parametrize("name", LAYERS)
def test_noise_on_a_layer_is_not_held(name, how):
    for precision in PRECISIONS:
        assert beyond_the_law(name, precision, OURS[how]) <= 0, precision


def multiplied(module, pattern):
    return recoup.weights.apply(module, lambda w, draw: w * (1 + 0.1 * draw.normal()), pattern)


DEVIATIONS = {
    "tensor": {"learned": "tensor"},
    "row": {"learned": "row"},
    "weight": {"learned": "weight"},
    "relative": {"relative": True},
    "relative rows": {"learned": "row", "relative": True},
}


@pytest.mark.parametrize("how", DEVIATIONS)
@pytest.mark.parametrize("name", [*SOME, "conv2d", "encoder layer"])
def test_noise_with_a_deviation_of_its_own_is_not_held(name, how):
    def apply(module, pattern):
        return recoup.weight_noise(module, pattern, 0.1, **DEVIATIONS[how])

    for precision in PRECISIONS:
        assert beyond_the_law(name, precision, apply) <= 0, precision


@pytest.mark.parametrize("prior", [{"prior_std": None}, {"prior_std": 1.0, "prior_mean": 0.5}])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("learned", ["row", "weight", None])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_divergence_holds_no_weight_and_no_deviation(precision, relative, learned, normed, prior):
    layer = nn.Linear(128, 96, dtype=precision)
    layer = recoup.weight_noise(layer, std=0.1, learned=learned, relative=relative)
    layer = recoup.weight_norm(layer) if normed else layer
    held = held_after(lambda: recoup.weights.kl_divergence(layer, **prior)).num_bytes
    assert held <= BYTES_A_WEIGHT + (layer.weight_g.nbytes if normed else 0)


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_function_makes_of_a_weight_is_not_held(name):
    for precision in PRECISIONS:
        assert beyond_the_law(name, precision, multiplied) <= 0, precision


@pytest.mark.slow
@pytest.mark.parametrize("how", NAIVE)
def test_the_law_is_broken_by_what_keeps_noisy_weights(how):
    for precision in ("float32", "autocast"):
        kept_nothing = {n for n in LAYERS if beyond_the_law(n, precision, NAIVE[how]) <= 0}
        # A mask is kept whatever the layer does; a weight by whoever saves it.
        assert kept_nothing == (UNSAVED if "noise" in how else set()), precision


@pytest.mark.parametrize("dim", [0, 1, 2, 3, None])
@pytest.mark.parametrize("build", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_weight_norm_keeps_norms_for_any_axis(build, dim):
    x = torch.randn(2, 40, 3, 3, requires_grad=True)
    module = build(40, 48, 3)
    plain = held_after(lambda: module(x)).num_bytes
    recoup.weight_norm(module, dim=dim)
    held = held_after(lambda: module(x)).num_bytes - plain
    # The fused operator keeps the norms; elsewhere their ratio to the magnitudes is kept, too.
    assert held <= (1 if dim in (0, 3) else 2) * module.weight_g.nbytes


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("how", ["dropout", "noise", "both"])
def test_rows_of_a_large_embedding(how, is_sparse):
    """Not a byte more is held than of a plain lookup, and no table is made on the way."""
    module, ids = nn.Embedding(5000, 64, sparse=is_sparse), torch.tensor([[7, 4999], [7, 30]])
    plain = held_after(lambda: module(ids)).num_bytes
    plain_step = step_of(module, [ids], with_gradients=False)
    for each in ("noise", "dropout") if how == "both" else (how,):
        OURS[each](module, "weight")
    assert held_after(lambda: module(ids)).num_bytes == plain
    step = step_of(module, [ids], with_gradients=False)
    for peak, plain_peak in zip(step[::2], plain_step[::2], strict=True):
        assert peak - plain_peak < 32 * ids.numel() * 64  # of a table, 1.3 MB


class Ten(nn.Module):
    """Ten weights alive at once, which die in another order than they were made."""

    def __init__(self) -> None:
        super().__init__()
        for place in range(10):
            self.register_parameter(f"w{place}", nn.Parameter(torch.randn(96, 96) / 10))

    def forward(self, x):
        alive = {place: getattr(self, f"w{place}") for place in range(10)}
        x = x @ alive.pop(3)
        x = torch.nn.functional.linear(x, alive.pop(7)) @ alive[0].t()
        later = {place: alive.pop(place).t() for place in (1, 5, 9)}
        x = x @ later.pop(5) + x @ alive.pop(2)
        for place in (8, 0, 6, 4):
            x = x @ alive.pop(place)
        return x @ later.pop(9) * later.pop(1).sum()


@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize("how", [*OURS, *NAIVE])
def test_ten_weights_alive_at_once(how, precision):
    x = torch.randn(2, 96, requires_grad=True)
    module = Ten()
    plain = held_after(lambda: module(x), module.parameters(), lambda: around(precision))
    module = (OURS | NAIVE)[how](module, r"w\d")
    norms = sum(p.nbytes for name, p in module.named_parameters() if name.endswith("_g"))
    held = held_after(lambda: module(x), (), lambda: around(precision)).num_bytes
    allowed = plain.num_bytes - plain.cast_bytes + 10 * BYTES_A_WEIGHT + norms
    assert (held <= allowed) == (how in OURS)


def test_outputs_of_several_forwards_alive_at_once():
    kind = LAYERS["linear"]
    module, inputs = built(kind, "float32")
    one = held_after(lambda: module(*inputs)).num_bytes
    OURS["stacked"](module, kind.pattern)
    with no_collector(), StorageTracker() as tracker:
        outputs = [module(*inputs) for _ in range(10)]
        allowed = one + BYTES_A_WEIGHT + module.weight_g.nbytes
        assert tracker.current_bytes <= 10 * allowed
        for place in (3, 7, 0, 9, 1, 8, 2, 6, 4, 5):
            outputs[place] = None
            allowed_now = allowed * sum(output is not None for output in outputs)
            assert tracker.current_bytes <= allowed_now


# -- when nothing is to be held --------------------------------------------------------------------


@pytest.mark.sampled(19)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", LAYERS)
def test_a_forward_without_a_graph_leaves_its_output(name, mode):
    kind = LAYERS[name]
    module, inputs = built(kind, "float32")
    plain = held_after(lambda: module(*inputs), (), mode)
    OURS["stacked"](module, kind.pattern)
    with no_collector():
        assert held_after(lambda: module(*inputs), (), mode) == plain


@pytest.mark.sampled(22)
@pytest.mark.parametrize("how", ["dropout", "noise"])
@pytest.mark.parametrize("name", LAYERS)
def test_in_evaluation_a_layer_is_the_plain_one(name, how):
    kind = LAYERS[name]
    module, inputs = built(kind, "float32")
    module.eval()
    plain = step_of(module, inputs)
    assert step_of(OURS[how](module, kind.pattern), inputs) == plain


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_left_of_a_step(name):
    kind = LAYERS[name]
    module, inputs = built(kind, "float32")
    OURS["stacked" if "sparse" not in name else "dropout"](module, kind.pattern)
    step_of(module, inputs)
    with no_collector():
        with StorageTracker() as tracker:
            output = module(*inputs)
            assert tracker.current_bytes > 0
            del output
            assert tracker.current_bytes == 0  # of a forward alone
        assert step_of(module, inputs).left == 0
        assert histories(module) == []
        module(*inputs)
        assert gc.collect() == 0


@pytest.mark.parametrize("name", SOME)
def test_twenty_steps_are_alike(name):
    kind = LAYERS[name]
    module, inputs = built(kind, "float32")
    OURS["stacked" if "sparse" not in name else "dropout"](module, kind.pattern)
    with no_collector():
        steps = [step_of(module, inputs) for _ in range(20)]
    assert steps[0].left == 0
    assert len(set(steps[1:])) == 1


class Breaks(nn.Module):
    """A layer after which something goes wrong."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        self.layer(*args)
        raise KeyError("broken")


@pytest.mark.sampled(17)
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_left_of_a_forward_that_breaks(name):
    kind = LAYERS[name]
    layer, inputs = built(kind, "float32")
    module = OURS["stacked"](Breaks(layer), kind.pattern)
    with no_collector(), StorageTracker() as tracker:
        for _ in range(2):
            with pytest.raises(KeyError):
                module(*inputs)
        assert tracker.peak_bytes > 0
        assert tracker.current_bytes == 0
    assert hooks_in_force() is None
    assert histories(module) == []
    for name, weight in matching(module, kind.pattern):
        assert module.get_parameter(name) is weight  # no forward is thought to be in progress


def test_nothing_is_left_of_an_operator_that_breaks():
    module = OURS["stacked"](Uses(torch.matmul, 96, 128), "weight")
    with no_collector(), StorageTracker() as tracker:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            module(torch.randn(3, 128, requires_grad=True))
        assert tracker.current_bytes == 0
    assert hooks_in_force() is None
    assert histories(module) == []


def test_what_is_reached_from_a_module_can_have_a_history():
    kind = LAYERS["lstm"]
    module, inputs = built(kind, "float32")
    module = NAIVE["dropout, parametrize"](module, kind.pattern)
    module(*inputs)
    assert len(histories(module)) == 2  # the list that torch runs it on
