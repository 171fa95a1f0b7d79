"""Law 2 for reparametrized weights: what a forward leaves and backward makes, in storages."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch import nn
from torch._functorch import config

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.weights import draws
from tests import alive, weight_zoo
from tests.alive import counting_remade, held_after, no_collector, step_of
from tests.oracle import hooks_in_force
from tests.weight_zoo import LAYERS, MORE, OURS, Runs, Way, around, built, matching
from tests.zoo import Fn

A_WEIGHT = 64  # bytes that each may take
# Looked up, and not saved by anybody.
UNSAVED = {name for name in LAYERS if name.startswith("embedding")}
# Used at the same time: by one operator, or by a loop in turns.
TOGETHER = {name: 2 for name in LAYERS if name.startswith("lstm") or "cell" in name}
WAYS = OURS | {way: MORE[way] for way in ("learned", "all", "function")}

pytestmark = [
    pytest.mark.usefixtures("measured"),
    pytest.mark.filterwarnings(  # of torch
        "ignore:TF32 acceleration on top of oneDNN", "ignore:LSTM with projections is not support",
        "ignore:The .grad attribute of a Tensor:UserWarning",
        "ignore:`torch.jit:DeprecationWarning",
    ),
]  # fmt: skip


def norms_of(module):
    return sum(4 * p.numel() for name, p in module.named_parameters() if name.endswith("_g"))


def held_by(name, precision, apply=None):
    module, inputs = built(LAYERS[name], precision)
    weights = matching(module, LAYERS[name].pattern)
    module = module if apply is None else apply(module, LAYERS[name].pattern)
    run = functools.partial(module, *inputs)
    again = [held_after(run, weights, lambda: around(precision)) for _ in range(2)]
    return max(again), A_WEIGHT * len(weights) + norms_of(module)


plain_held = functools.cache(held_by)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_made_of_a_weight_is_not_held(name, way):
    for precision in weight_zoo.PRECISIONS:
        (plain, _), (held, more) = plain_held(name, precision), held_by(name, precision, WAYS[way])
        assert held.num_bytes <= plain.num_bytes - plain.cast_bytes + more, precision


@pytest.mark.parametrize("prior_std", [None, 1.0])
@pytest.mark.parametrize("learned", ["row", "weight", None])
def test_a_divergence_holds_no_weight_and_no_deviation(learned, prior_std):
    layer = nn.Linear(128, 96, dtype=torch.bfloat16)
    layer = Way({}, None, {"std": 0.1, "learned": learned})(layer)
    held = held_after(lambda: recoup.weights.kl_divergence(layer, prior_std=prior_std)).num_bytes
    assert held <= A_WEIGHT + layer.weight_g.nbytes


@pytest.mark.parametrize("is_sparse", [False, True])
def test_dropped_rows_of_a_large_embedding_need_no_table(is_sparse):
    module, ids = nn.Embedding(5000, 64, sparse=is_sparse), torch.tensor([[7, 4999], [7, 30]])
    plain = held_after(lambda: module(ids)).num_bytes
    before = step_of(module, [ids], with_gradients=False)
    recoup.weight_dropout(module, axes=(1,))
    assert held_after(lambda: module(ids)).num_bytes <= plain + 4 * ids.numel()
    after = step_of(module, [ids], with_gradients=False)
    for peak, plain_peak in zip(after[::2], before[::2], strict=True):
        assert peak - plain_peak < 16 * 5000  # of a table, 1.3 MB


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", LAYERS)
def test_without_a_graph_and_in_evaluation_a_layer_is_the_plain_one(name):
    modes, (module, inputs) = (torch.no_grad, torch.inference_mode), built(LAYERS[name], "float32")
    plain = [held_after(lambda: module(*inputs), (), mode) for mode in modes]
    plain_step = step_of(module.eval(), inputs)
    assert step_of(OURS["dropout"](module, LAYERS[name].pattern), inputs) == plain_step
    module, inputs = built(LAYERS[name], "float32")
    OURS["stacked"](module, LAYERS[name].pattern)
    with no_collector():
        assert [held_after(lambda: module(*inputs), (), mode) for mode in modes] == plain


DEPTH, WEIGHT = 30, 256 * 256 * 4


def stack():
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(DEPTH)))


def batch():
    return torch.randn(4, 256, requires_grad=True)


@functools.cache
def bytes_of_a_draw(shape: torch.Size) -> int:
    weight, peaks = torch.zeros(shape), []
    like = {"dtype": weight.dtype, "device": weight.device}
    for draw in (
        lambda: draws.dropped(weight, 1, 0.5),
        lambda: draws.noised(weight, 1, 0.5),
        lambda: draws.scales(tuple(shape), 1, 0.5, **like),
    ):
        with StorageTracker() as tracker:
            draw()
        peaks.append(tracker.peak_bytes)
    return max(peaks) - weight.nbytes


@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize("way", OURS)
def test_a_deep_stack_peaks_at_one_weight_more(way, precision):
    x, under = batch(), functools.partial(around, precision)
    plain, module = step_of(stack(), [x], around=under), OURS[way](stack())
    with counting_remade() as remade:
        found = step_of(module, [x], around=under)
    assert (remade.num_made, remade.most_alive) == (DEPTH, 1)
    # The plain stack holds a copy of each weight, of half its bytes; we make that of one.
    copies = DEPTH * WEIGHT // 2 if precision == "autocast" else 0
    more = WEIGHT * (1.5 if precision == "autocast" else 1) + norms_of(module)
    more += bytes_of_a_draw(torch.Size((256, 256)))
    assert found.held <= plain.held - copies + norms_of(module)
    assert found.backward_peak <= plain.backward_peak - copies + more
    assert found.forward_peak <= plain.forward_peak - copies + more + WEIGHT
    assert found.left == 0


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", [name for name in LAYERS if "sparse" not in name])
@pytest.mark.parametrize("way", ["dropout", "noise", "stacked"])
def test_backward_makes_each_weight_once_and_nothing_is_left_of_a_step_that_ends_or_breaks(
    name, way
):
    module, inputs = built(LAYERS[name], "float32")
    weights = matching(module, LAYERS[name].pattern)
    plain = step_of(module, inputs)
    OURS[way](module, LAYERS[name].pattern)
    handle = module.register_forward_hook(lambda *_: 1 / 0)
    with no_collector(), StorageTracker() as tracker:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                module(*inputs)
        assert tracker.peak_bytes > 0
        assert tracker.current_bytes == 0
        assert hooks_in_force() is None
        handle.remove()
        assert step_of(module, inputs).left == 0
        with counting_remade() as remade:
            found = step_of(module, inputs)
        assert step_of(module, inputs) == found
        module(*inputs)
        assert tracker.current_bytes <= sum(p.nbytes for p in module.parameters()) + 10**5
        assert alive.histories(module) == []
        assert gc.collect() == 0
    together = TOGETHER.get(name, 1)
    assert remade.most_alive <= together
    assert bool(remade.num_made) == (name not in UNSAVED)
    assert remade.num_made <= len(weights) * (2 if "in a loop" in name else 1)
    most = together * max(weight.nbytes for weight in weights)
    most += max(bytes_of_a_draw(weight.shape) for weight in weights)
    most += 2 * norms_of(module)  # which are kept, and their gradients
    assert found.backward_peak <= plain.backward_peak + most
    assert found.left == plain.left


@pytest.mark.sampled(24)
@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("wanted", ["input", "weights", "one weight", "bias"])
@pytest.mark.parametrize("name", ["linear", "lstm, mkldnn off", "lstm cell, in a loop"])
def test_a_retained_graph_holds_what_it_held_before_whatever_part_is_asked_for(name, wanted, way):
    module, inputs = built(LAYERS[name], "float32")
    OURS[way](module, LAYERS[name].pattern)
    weights = matching(module, LAYERS[name].pattern)
    biases = [value for key, value in module.named_parameters() if "bias" in key]
    parts = {"input": inputs, "weights": weights, "one weight": weights[-1:], "bias": biases}
    with no_collector(), StorageTracker() as tracker:
        loss = sum(part.sum() for part in module(*inputs)[:1])
        held = tracker.current_bytes
        for _ in range(2):
            torch.autograd.grad(loss, parts[wanted], retain_graph=True)
            assert tracker.current_bytes <= held  # what nobody asked for was let go of
        del loss
        assert tracker.current_bytes == 0


def at_both_ends(x, layer, between):
    weight = layer.weight
    return between(x @ weight) @ weight.t()


def test_a_weight_used_at_both_ends_is_made_once_and_stays_in_between():
    between = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    module = recoup.weight_noise(Fn(at_both_ends, nn.Linear(256, 256), between), std=0.1)
    with counting_remade() as remade:
        step_of(module, [batch()])
    assert (remade.num_made, remade.most_alive) == (5, 2)


# Way, precision, and the share of the activations that the compiler is told to save.
COMPILED = [
    (lambda: Runs(nn.MultiheadAttention(64, 4), weight_zoo.attending), "stacked", "float32", 0.0),
    (lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)),
     "stacked", "autocast", 1.0),
    (lambda: nn.Sequential(nn.Linear(64, 64), Runs(nn.LSTM(64, 64), weight_zoo.first_of)),
     "noise", "float32", 0.0),  # the graph breaks
]  # fmt: skip


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("make", "way", "precision", "budget"), COMPILED)
def test_a_compiled_graph_holds_no_weight(make, way, precision, budget):
    module = make()

    def call(x):
        with around(precision):
            return module(x)

    def held():
        """The bytes that a forward leaves, beside its output, by the allocator."""
        run, left = torch.compile(call, backend="aot_eager"), []
        x = torch.randn(3, 2, 64)
        run(x.clone()).float().sum().backward()  # compiles
        gc.collect()
        return alive.allocated_bytes(lambda: left.append(run(x.clone())))[1] - left[0].nbytes

    with config.patch(activation_memory_budget=budget):
        plain = held()
        OURS[way](module, ".*weight.*")
        num_weights = len(recoup.weights.applied(module))
        assert held() <= plain + A_WEIGHT * num_weights
