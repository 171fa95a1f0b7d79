"""Law 2 for reparametrized weights in backward: how many are alive at once, and for how long.

NOTE [ One weight at a time ]

Rule 1. What is made again in backward is counted as it is made; the peak is counted in storages.
Rule 2. Backward may hold one more weight than the plain one: the weight that was made again and
        then, when that is gone, the gradient that passes through a mask or a norm into a new
        tensor. What a draw needs while it runs, and what a norm keeps, is counted beside it.
Rule 3. Weights that are used at the same time are alive together: those of one fused operator, and
        those that a loop over time uses in turns (TOGETHER). So is one that is used at both ends of
        a model, from the first use that backward meets to the last.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.weights import draws
from tests.alive import Remade, no_collector, step_of
from tests.weight_zoo import LAYERS, NAIVE, OURS, Uses, around, built, matching

DEPTH = 50
WEIGHT = 256 * 256 * 4
UNSAVED = {name for name in LAYERS if name.startswith("embedding") and "weighted" not in name}
TOGETHER = {  # See Rule 3
    "lstm": 2,  # a fused operator for a layer and a direction
    "lstm of layers, both ways": 2,
    "lstm, no bias, batch first": 2,
    "lstm with dropout": 2,
    "lstm with projection": 2,  # at each step, the hidden state and what it is projected to
    "lstm cell, in a loop": 2,
    "gru cell, in a loop": 2,
    "rnn cell, in a loop": 2,
}
COPIED = {"einsum"}  # torch's weight norm copies a gradient that is not contiguous

pytestmark = [
    pytest.mark.usefixtures("measured"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN"),  # torch, of its flags
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


@functools.cache
def bytes_of_a_draw(shape: torch.Size) -> int:
    """What drawing takes beside its result, at worst."""
    weight = torch.zeros(shape)
    peaks = []
    for draw in (draws.dropped, draws.noised):
        with StorageTracker() as tracker:
            draw(weight, 1, 0.5)
        peaks.append(tracker.peak_bytes)
    with StorageTracker() as tracker:
        draws.scales(tuple(shape), 1, 0.5, dtype=weight.dtype, device=weight.device)
    return max(*peaks, tracker.peak_bytes) - weight.nbytes


def norm_bytes(module):
    return sum(p.nbytes for name, p in module.named_parameters() if name.endswith("_g"))


def stack(how=None):
    torch.manual_seed(5)
    module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(DEPTH)))
    return module if how is None else (OURS | NAIVE)[how](module, r"(.*\.)?weight")


def batch():
    return torch.randn(4, 256, requires_grad=True)


# -- peaks -----------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("with_gradients", [True, False], ids=["accumulated", "fresh"])
@pytest.mark.parametrize("how", OURS)
def test_a_deep_stack_peaks_at_one_weight_more(how, with_gradients):
    x = batch()
    plain = step_of(stack(), [x], with_gradients=with_gradients)
    module = stack(how)
    with Remade() as remade:
        step = step_of(module, [x], with_gradients=with_gradients)
    assert (remade.num_made, remade.most_alive) == (DEPTH, 1)
    more = WEIGHT + bytes_of_a_draw(torch.Size((256, 256))) + norm_bytes(module)
    # Of several steps from the raw weight to the noisy one, each makes a tensor in forward.
    steps = 2 if how == "stacked" else 1
    assert step.forward_peak <= plain.forward_peak + more + (steps - 1) * WEIGHT
    assert step.held <= plain.held + norm_bytes(module)
    assert plain.backward_peak + WEIGHT // 2 < step.backward_peak <= plain.backward_peak + more
    assert step.left == 0


@pytest.mark.parametrize("how", NAIVE)
def test_a_deep_stack_that_keeps_noisy_weights_peaks_far_above(how):
    x = batch()
    plain = step_of(stack(), [x])
    step = step_of(stack(how), [x])
    # Dropout keeps a mask, too, of a byte for each entry.
    assert step.held >= plain.held + DEPTH * WEIGHT
    assert step.backward_peak >= plain.backward_peak + (DEPTH - 1) * WEIGHT


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", OURS)
def test_a_deep_stack_under_autocast(how):
    x = batch()
    autocast = functools.partial(around, "autocast")
    plain = step_of(stack(), [x], around=autocast)
    module = stack(how)
    with Remade() as remade:
        step = step_of(module, [x], around=autocast)
    assert (remade.num_made, remade.most_alive) == (DEPTH, 1)
    # The plain stack holds a copy of each weight, of half its bytes; we make that of one.
    copies = DEPTH * WEIGHT // 2
    more = 1.5 * WEIGHT + bytes_of_a_draw(torch.Size((256, 256))) + norm_bytes(module)
    assert step.held <= plain.held - copies + norm_bytes(module)
    assert step.backward_peak <= plain.backward_peak - copies + more


@pytest.mark.parametrize("how", OURS)
def test_what_a_draw_takes_is_little_beside_a_large_weight(how):
    x = torch.randn(2, 1024, requires_grad=True)
    module = nn.Linear(1024, 512)
    plain = step_of(module, [x])
    OURS[how](module, "weight")
    most = module.weight.nbytes * 4 // 3 + norm_bytes(module)
    assert step_of(module, [x]).backward_peak <= plain.backward_peak + most


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("name", "how"),
    # torch's weight norm takes no sparse gradient.
    [(n, h) for n in LAYERS for h in OURS if "sparse" not in n or h in ("dropout", "noise")],
)
def test_backward_of_a_layer(name, how):
    kind = LAYERS[name]
    module, inputs = built(kind, "float32")
    sizes = [weight.shape for _, weight in matching(module, kind.pattern)]
    plain = step_of(module, inputs)
    module = OURS[how](module, kind.pattern)
    step_of(module, inputs)
    with Remade() as remade:
        step = step_of(module, inputs)
    together = TOGETHER.get(name, 1)
    assert remade.most_alive <= together
    assert bool(remade.num_made) == (name not in UNSAVED)
    # Each once, however often it was saved; that it is read again shows at its second read.
    assert remade.num_made <= len(sizes) * (2 if name == "linear, in a loop" else 1)
    copies = how == "norm" and name in COPIED
    most = (together + copies) * max(size.numel() * 4 for size in sizes)
    most += max(map(bytes_of_a_draw, sizes)) + norm_bytes(module)
    assert step.backward_peak <= plain.backward_peak + most
    assert step.left == plain.left


class BothEnds(nn.Module):
    """One weight at both ends of a stack of others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)
        self.between = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def forward(self, x):
        weight = self.weight
        return self.between(x @ weight) @ weight.t()


def test_a_weight_used_at_both_ends_is_made_once_and_stays_in_between():
    module = recoup.weight_noise(BothEnds(), r"(.*\.)?weight", 0.1)
    with Remade() as remade:
        step_of(module, [batch()])
    assert (remade.num_made, remade.most_alive) == (5, 2)


# -- parts of a backward, and more than one --------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", OURS)
def test_a_retained_graph_holds_what_it_held_before(how):
    module, x = stack(how), batch()
    with no_collector(), StorageTracker() as tracker:
        loss = module(x).sum()
        held = tracker.current_bytes
        for _ in range(3):
            tracker.peak_bytes = 0
            torch.autograd.grad(loss, x, retain_graph=True)
            assert tracker.current_bytes == held
            assert tracker.peak_bytes < held + 2.5 * WEIGHT
        del loss
        assert tracker.current_bytes == 0


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ["linear", "lstm", "lstm, mkldnn off", "lstm cell, in a loop"])
@pytest.mark.parametrize("wanted", ["input", "weights", "one weight", "bias"])
def test_the_gradient_of_a_part(name, wanted):
    kind = LAYERS[name]
    module, inputs = built(kind, "float32")
    module = OURS["stacked"](module, kind.pattern)
    named = dict(module.named_parameters())
    weights = [weight for _, weight in matching(module, kind.pattern)]
    biases = [value for name, value in named.items() if "bias" in name]
    parts = {"input": inputs, "weights": weights, "one weight": weights[-1:], "bias": biases}[
        wanted
    ]

    def gradient_of_part(loss, **kwargs):
        torch.autograd.grad(loss, parts, **kwargs)

    def twice(loss):
        gradient_of_part(loss, retain_graph=True)
        gradient_of_part(loss)

    for backward in (gradient_of_part, twice):
        assert step_of(module, inputs, backward=backward).left == 0
    with no_collector(), StorageTracker() as tracker:
        loss = sum(part.sum() for part in module(*inputs)[:1])
        held = tracker.current_bytes
        gradient_of_part(loss, retain_graph=True)
        assert tracker.current_bytes <= held  # what nobody asked for was let go of
        del loss
        assert tracker.current_bytes == 0


def test_what_some_use_of_a_weight_does_not_ask_for_is_let_go():
    module = recoup.weight_noise(Uses(lambda pair, w: (pair[0] @ w, pair[1] @ w), 256, 256))
    pair = batch(), batch()
    with no_collector(), StorageTracker() as tracker:
        loss = sum(part.sum() for part in module(pair))
        held = tracker.current_bytes
        with Remade() as remade:
            for x in (pair[0], pair, pair[1]):
                torch.autograd.grad(loss, x, retain_graph=True)
                assert tracker.current_bytes == held
        assert remade.num_made == 3  # once in each backward
        del loss
        assert tracker.current_bytes == 0


def test_a_saved_weight_that_is_looked_at_is_not_kept():
    module, x = recoup.weight_noise(nn.Linear(256, 256, bias=False)), batch()
    with no_collector(), StorageTracker() as tracker:
        output = module(x)
        held = tracker.current_bytes
        assert output.grad_fn._saved_mat2.shape == (256, 256)
        assert tracker.current_bytes == held


def test_a_backward_that_breaks_between_two_uses_of_a_weight():
    def breaks(_):
        raise KeyError("broken")

    module, x = recoup.weight_noise(BothEnds(), "weight", 0.1), batch()
    module.between.register_full_backward_pre_hook(lambda *_: breaks(None))
    with no_collector(), StorageTracker() as tracker:
        loss = module(x).sum()
        with pytest.raises(KeyError):
            loss.backward()
        module.zero_grad()
        del loss
        assert tracker.current_bytes == 0


# -- without a graph -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", OURS)
def test_a_deep_stack_without_a_graph(how, mode):
    def run(module):
        with no_collector(), StorageTracker() as tracker, mode():
            output = module(x)
            return tracker.peak_bytes, tracker.current_bytes, output

    x = torch.randn(4, 256)
    plain_peak, plain_held, _ = run(stack())
    module = stack(how)
    peak, held, _ = run(module)
    more = WEIGHT + bytes_of_a_draw(torch.Size((256, 256))) + norm_bytes(module)
    assert plain_peak < peak <= plain_peak + more  # one weight, changed in place
    assert held == plain_held
