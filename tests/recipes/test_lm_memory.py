"""What `--memory` says is kept: peaks are measured against bounds, and long windows fit."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import recoup
from recoup.memory import parse_bytes
from recoup.recipes.language_model.model import LanguageModelTraining
from recoup.recipes.language_model.plan import TimePlan
from recoup.recipes.language_model.segments import Window, window_backward

BATCH = 4
CPU = torch.device("cpu")


def model(memory, **options):
    sizes = {"embed_size": 24, "hidden_size": 40, "num_layers": 2}
    torch.manual_seed(0)
    return LanguageModelTraining(200, memory=memory, **sizes | options)


def peak_of(training, num_steps, segment_steps):
    """Peak of forward and backward of a window, of which nothing but the state was there before."""
    network = training.network
    ids = torch.randint(200, (num_steps + 1, BATCH))
    window = Window(ids, network.zero_state(BATCH))

    def step():
        store = recoup.GradStore(network.parameters())
        masks = network.new_masks(num_steps, BATCH)
        window_backward(
            network,
            window,
            store,
            penalties=training.penalties,
            segment_steps=segment_steps,
            masks=masks,
        )
        return store

    return recoup.measure(step, device="cpu", repeats=0).peak_bytes


def prepared(memory, longest=100, **options):
    training = model(memory, **options)
    training.prepare_memory(BATCH, longest, CPU)
    return training


def least_bytes(longest=100, **options):
    with pytest.raises(ValueError, match="takes at least") as caught:
        prepared("1 KiB", longest, **options)
    return math.ceil(parse_bytes(str(caught.value).partition("at least ")[2].split(". ")[0]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["locked", "independent"])
def test_the_bound_holds_and_more_bytes_are_never_slower(kind):
    options = {"dropout_kind": kind, "weight_noise": 0.01}
    least, most = least_bytes(**options), peak_of(model("linear", **options), 100, None)
    assert least < most / 5
    training = model("linear", **options)
    training.network.set_weight_noise(True)
    peak = functools.cache(functools.partial(peak_of, training))
    before = math.inf
    for step in range(20):
        budget = math.ceil(1.001 * least + step / 19 * (1.1 * most - least))
        plan = TimePlan(str(budget))
        plan.measure(peak, 100)
        for num_steps in (100, 61, 20):
            steps = plan.segment_steps(num_steps)
            assert peak(num_steps, steps) <= budget, (step, num_steps)
            if num_steps == 100:
                num_segments = math.ceil(100 / steps)
                assert num_segments <= before
                before = num_segments
    assert before == 1


def test_the_least_is_named_in_words():
    least = least_bytes()
    with pytest.raises(ValueError, match=r"`memory` is .*, but a step of 100 time steps takes"):
        prepared(str(least // 2))
    prepared(str(math.ceil(1.001 * least)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("longest", [1, 2, 3, 5])
def test_short_windows_have_bounds_too(longest):
    least = least_bytes(longest)
    training = prepared(str(math.ceil(1.001 * least)), longest)
    assert 1 <= training.plan.segment_steps(longest) <= longest


def test_a_window_of_2000_steps_trains_in_the_memory_of_a_short_one():
    short = peak_of(model("linear"), 70, None)
    training = prepared(str(short), longest=2000)
    assert peak_of(training, 2000, training.plan.segment_steps(2000)) <= short
    assert peak_of(model("linear"), 2000, None) > 20 * short


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("memory", ["sqrt", "2 MiB"])
def test_the_gradients_of_2000_steps_are_the_same(memory):
    found = []
    for mode in ("linear", memory):
        training = model(mode).double()
        if mode != "sqrt" and mode != "linear":
            training.prepare_memory(BATCH, 2000, CPU)
        network = training.network
        torch.manual_seed(1)
        window = Window(torch.randint(200, (2001, BATCH)), network.zero_state(BATCH))
        store = recoup.GradStore(network.parameters())
        window_backward(
            network,
            window,
            store,
            penalties=training.penalties,
            segment_steps=training.plan.segment_steps(2000),
            masks=network.new_masks(2000, BATCH),
        )
        found.append({name: store[each] for name, each in network.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-8, atol=1e-11, msg=name)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 70, 2000])
def test_sqrt_has_as_many_states_as_a_segment_has_steps(num_steps):
    steps = TimePlan("sqrt").segment_steps(num_steps)
    assert abs(math.ceil(num_steps / steps) - steps) <= 1
    assert TimePlan("linear").segment_steps(num_steps) is None


@pytest.mark.parametrize("memory", ["cubic", "", "-1 MiB", "12 parsecs", "constant"])
def test_an_unknown_memory(memory):
    with pytest.raises(ValueError, match='but must be "linear", "sqrt", or a number of bytes'):
        TimePlan(memory)
