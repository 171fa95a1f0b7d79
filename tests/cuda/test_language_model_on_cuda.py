"""The example of a language model on a CUDA device: cuDNN's kernels, and bounds on its memory."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

import recoup

pytest.importorskip("lightning", reason="lightning is not installed")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from language_model import LanguageModelTraining, longest_segment

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

VOCAB, BATCH = 500, 8


def built(memory="linear"):
    torch.manual_seed(0)
    sizes = {"embed_size": 64, "hidden_size": 128, "num_layers": 2}
    return LanguageModelTraining(VOCAB, memory=memory, **sizes).cuda()


def trained(training, num_steps, segment_steps=None):
    network = training.network
    torch.manual_seed(1)
    ids = torch.randint(VOCAB, (num_steps + 1, BATCH), device="cuda")
    with warnings.catch_warnings():
        # cuDNN says at each call that dropped weights are not one chunk of memory.
        warnings.filterwarnings("ignore", message="RNN module weights are not part")
        store, found = training.gradients(ids, segment_steps)
    return found, {name: store[each] for name, each in network.named_parameters()}


@pytest.mark.parametrize("segment_steps", [1, 16])
def test_segments_have_the_gradients_of_the_whole(segment_steps):
    training = built()
    (one, whole), (two, cut) = (trained(training, 64, steps) for steps in (None, segment_steps))
    torch.testing.assert_close(two.loss, one.loss, rtol=1e-5, atol=0.0)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def test_the_parameters_stay_where_they_are():
    training = built()
    places = [each.data_ptr() for each in training.parameters()]
    trained(training, 32)
    trained(training, 32, 8)
    assert [each.data_ptr() for each in training.parameters()] == places


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 1.2])
def test_a_bound_on_bytes_holds(part):
    training = built()

    def peak(steps):
        step = recoup.measure(lambda: trained(training, 256, steps), device="cuda", repeats=0)
        return step.peaks.requested  # blocks of the allocator are a part of these few bytes

    budget = max(int(part * peak(None)), peak(1))

    assert peak(longest_segment(peak, 256, budget)) <= budget
