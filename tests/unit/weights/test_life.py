"""To whoever saves, copies, steps or removes it, a reparametrized module is what it was."""

from __future__ import annotations

import abc
import copy
import dataclasses
import gc
import inspect
import io
import pickle
import subprocess
import sys
import typing
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves

import recoup
from recoup.weights import applied, disabled, enabled, remove, same_draw
from tests.unit.weights.plain_run import (
    PlainRun,
    mask,
    raw_parameters,
    recorded,
    weights_used,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These layers are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


HIDDEN = r"weight_hh_l\d+(_reverse)?"
LAYERS = {
    "linear": (lambda: nn.Linear(4, 4), "weight", (3, 4)),
    "conv": (lambda: nn.Conv1d(4, 4, 1), "weight", (2, 4, 3)),
    "lstm": (lambda: nn.LSTM(4, 4), HIDDEN, (3, 2, 4)),
    "lstm both ways": (lambda: nn.LSTM(4, 4, 2, bidirectional=True), HIDDEN, (3, 2, 4)),
    "gru": (lambda: nn.GRU(4, 4), ".*", (3, 2, 4)),
    "cell": (lambda: nn.GRUCell(4, 4), ".*", (3, 4)),
    "embedding": (lambda: nn.Embedding(4, 4), "weight", None),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)),
        r"\d\.weight",
        (3, 4),
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0),
        r".*(in_proj_weight|out_proj\.weight|linear\d\.weight)",
        (3, 2, 4),
    ),
}


def noisy(module, pattern):
    recoup.weight_noise(module, pattern, std=0.1)
    return recoup.weight_dropout(module, pattern, p=0.5)


WAYS = {
    "dropout": recoup.weight_dropout,
    "noise": lambda module, pattern: recoup.weight_noise(module, pattern, std=0.1),
    "both": noisy,
}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]


def input_of(size):
    return torch.tensor([[0, 3], [1, 1]]) if size is None else torch.randn(size)


def first_of(output):
    return output[0] if isinstance(output, tuple) else output


def step(module, x, optimizer=None):
    loss = first_of(module(x)).sin().sum()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def assert_dropped(module, x):
    """What forward uses is the raw parameters of this very module, with noise."""
    with recorded() as made, torch.no_grad():
        output = first_of(module(x))
    assert len([each for each in made if each.step.is_random]) > 0
    raw = raw_parameters(module)
    used = weights_used(module, made, raw)
    plain = remove(copy.deepcopy(module))
    used = {name: value for name, value in used.items() if name in raw_parameters(plain)}
    with torch.no_grad():
        want = functional_call(plain, used, x, tie_weights=False)
    assert torch.equal(output, first_of(want))


# -- what nobody must notice -----------------------------------------------------------------------


def test_repr():
    linear = recoup.weight_dropout(nn.Linear(4, 3), p=0.25)
    recoup.weight_noise(linear, std=torch.tensor(0.5), mode="always")
    assert repr(linear) == (
        "Linear(in_features=4, out_features=3, bias=True, weight_dropout(p=0.25) of weight, "
        'weight_noise(std=0.5, mode="always") of weight)'
    )
    assert repr(applied(linear)) == (
        '[weight: weight_dropout(p=0.25), weight: weight_noise(std=0.5, mode="always")]'
    )


def test_a_hundred_forwards_leave_the_parameters_alone(layer):
    build, pattern, size = layer
    module = noisy(build(), pattern)
    x = input_of(size)
    before = {name: (p, p.clone(), p._version) for name, p in module.named_parameters()}
    for _ in range(50):
        module(x)
        with torch.no_grad():
            module(x)
    for name, p in module.named_parameters():
        was, value, version = before[name]
        assert p is was
        assert torch.equal(p, value)
        assert p._version == version


def test_parameters_stay_through_training(layer):
    """Their number, identity and memory over steps, and over evaluation in between."""
    build, pattern, size = layer
    module = noisy(build(), pattern)
    x = input_of(size)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    parameters = list(module.parameters())
    pointers = [p.data_ptr() for p in parameters]
    for _ in range(3):
        step(module.train(), x, optimizer)
        module.eval()(x)
        with torch.no_grad():
            module(x)
            module.train()(x)
        assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
        assert [p.data_ptr() for p in module.parameters()] == pointers
        assert all(p.is_leaf for p in parameters)


@pytest.mark.parametrize("when", ["before", "after"])
def test_optimizers_built_before_and_after(when, layer):
    """A step of plain SGD on the raw parameters, with the gradients of the dropped ones."""
    build, pattern, size = layer
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5) if when == "before" else None
    recoup.weight_dropout(module, pattern)
    if optimizer is None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    names = {entry.name for entry in applied(module)}
    for _ in range(2):
        step(module, input_of(size))
        want = {name: p - 0.5 * p.grad for name, p in module.named_parameters()}
        moved = {name for name, p in module.named_parameters() if torch.count_nonzero(p.grad)}
        optimizer.step()
        optimizer.zero_grad()
        for name, p in module.named_parameters():
            assert torch.equal(p, want[name])
        assert names & moved


@pytest.mark.sampled(1)
def test_nothing_is_held_after_a_forward(layer):
    """No tensor with a graph, and no noisy weight, can be reached from the module."""
    build, pattern, size = layer
    module = noisy(build(), pattern)
    x = input_of(size)
    gc.collect()
    gc.disable()
    # A test of hooks may have left a graph in a cycle that only autograd knows of.
    before = {id(t) for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}
    try:
        step(module, x)
        with torch.no_grad():
            module(x)
        output = module(x)
        del output
        known = before | {id(p) for p in (*module.parameters(), *module.buffers())}
        sizes = {p.shape for p in module.parameters()}
        found = [
            t
            for t in gc.get_objects()
            if issubclass(type(t), torch.Tensor)  # some objects answer `isinstance` with a warning
            and id(t) not in known
            and t.shape in sizes
            and t.grad_fn
        ]
        assert found == []
    finally:
        gc.enable()
    reachable = [
        t
        for part in module.modules()
        for t in tree_leaves(list(vars(part).values()))
        if isinstance(t, torch.Tensor)
    ]
    assert all(t.is_leaf for t in reachable)


# -- state_dict ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_load_both_ways(layer, way):
    build, pattern, size = layer
    plain, module = build(), WAYS[way](build(), pattern)
    x = input_of(size)
    step(module, x)
    assert module.load_state_dict(plain.state_dict(), strict=True)
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first_of(module.eval()(x)), first_of(plain.eval()(x)))
    step(module.train(), x, torch.optim.SGD(module.parameters(), lr=0.1))
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    plain.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert_dropped(module, x)


def test_loading_with_assignment(layer):
    build, pattern, size = layer
    module, state = noisy(build(), pattern), build().state_dict()
    module.load_state_dict(state, assign=True)
    for name, p in module.named_parameters():
        assert isinstance(p, nn.Parameter)
        assert p.data_ptr() == state[name].data_ptr()
    x = input_of(size)
    assert_dropped(module, x)
    step(module, x)
    assert all(p.grad is not None for p in module.parameters())


def test_a_norm_has_one_key_more():
    conv = recoup.weight_norm(nn.Conv1d(4, 8, 3))
    assert list(conv.state_dict()) == ["weight", "bias", "weight_g"]
    assert list(dict(conv.named_parameters())) == ["weight", "bias", "weight_g"]
    other = recoup.weight_norm(nn.Conv1d(4, 8, 3))
    with torch.no_grad():
        conv.weight_g.mul_(2.0)
    other.load_state_dict(conv.state_dict(), strict=True)
    x = torch.randn(2, 4, 6)
    assert torch.equal(conv(x), other(x))
    with pytest.raises(RuntimeError, match="weight_g"):
        nn.Conv1d(4, 8, 3).load_state_dict(conv.state_dict(), strict=True)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_a_plain_checkpoint_into_a_norm(assign, dim):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(3, 4, 1))
    model = recoup.weight_norm(copy.deepcopy(plain), r".*weight", dim=dim)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)
    state = plain.state_dict()
    keys = list(state)
    missing, unexpected = model.load_state_dict(state, strict=True, assign=assign)
    assert missing == unexpected == []
    assert list(state) == keys
    for place in range(2):
        weight = plain[place].get_parameter("weight")
        norms = torch.norm_except_dim(weight, 2, -1 if dim is None else dim)
        assert torch.equal(model[place].weight_g, norms)
        assert isinstance(model[place].weight_g, nn.Parameter)
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(model(x), plain(x))
    step(model, x)
    assert all(p.grad is not None for p in model.parameters())


def test_a_checkpoint_that_lacks_the_weight_is_refused():
    model = recoup.weight_norm(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"bias": torch.zeros(4)}, strict=True)


# -- types and devices -----------------------------------------------------------------------------


@pytest.mark.sampled(11)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(layer, dtype, when):
    build, pattern, size = layer
    module = build()
    if when == "before":
        noisy(module, pattern)
        x = input_of(size)
        step(module, x)
    parameters = list(module.parameters())
    assert module.to(dtype) is module
    if when == "after":
        noisy(module, pattern)
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert all(p.dtype is dtype for p in module.parameters())
    x = input_of(size)
    x = x.to(dtype) if x.is_floating_point() else x
    assert first_of(module(x)).dtype is dtype
    assert_dropped(module, x)
    module.zero_grad()
    step(module, x)
    assert all(p.grad.dtype is dtype for p in module.parameters())
    assert torch.equal(first_of(module.eval()(x)), first_of(remove(copy.deepcopy(module))(x)))


def test_there_and_back():
    lstm = noisy(nn.LSTM(4, 4), HIDDEN)
    x = torch.randn(3, 2, 4)
    lstm.double()(x.double())
    lstm.half().float()
    lstm.to(torch.device("cpu"))
    assert_dropped(lstm, x)


@pytest.mark.parametrize("way", ["overwrite", "swap"])
def test_parameters_that_conversion_replaces(way):
    """torch may be told to make new parameters in `.to`, or to swap what they are."""
    name = {"overwrite": "overwrite", "swap": "swap"}[way]
    getter = getattr(torch.__future__, f"get_{name}_module_params_on_conversion")
    setter = getattr(torch.__future__, f"set_{name}_module_params_on_conversion")
    before = getter()
    setter(True)
    try:
        lstm = noisy(nn.LSTM(4, 4), HIDDEN)
        lstm(torch.randn(3, 2, 4))
        lstm.double()
        x = torch.randn(3, 2, 4, dtype=torch.float64)
        assert_dropped(lstm, x)
        step(lstm, x)
        assert all(p.grad is not None for p in lstm.parameters())
    finally:
        setter(before)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_meta_device(layer, when):
    build, pattern, size = layer
    with torch.device("meta"):
        module = build()
    if when == "before":
        noisy(module, pattern)
    module.to_empty(device="cpu")
    if when == "after":
        noisy(module, pattern)
    module.load_state_dict(build().state_dict())
    x = input_of(size)
    assert_dropped(module, x)
    step(module, x)
    assert all(p.grad is not None for p in module.parameters())


def test_a_forward_on_the_meta_device():
    """Shapes can be had without memory, as of any module."""
    linear = noisy(nn.Linear(4, 3, device="meta"), "weight")
    assert linear(torch.randn(2, 4, device="meta")).shape == (2, 3)


def test_skipped_initialisation():
    cell = noisy(torch.nn.utils.skip_init(nn.GRUCell, 4, 4), "weight_.*")
    cell.reset_parameters()
    assert_dropped(cell, torch.randn(3, 4))


def test_parameters_in_shared_memory():
    lstm = noisy(nn.LSTM(4, 4), HIDDEN).share_memory()
    assert all(p.is_shared() for p in lstm.parameters())
    assert_dropped(lstm, torch.randn(3, 2, 4))


# -- functional calls ------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [functional_call, torch.nn.utils.stateless.functional_call])
@pytest.mark.filterwarnings("ignore:.*stateless.functional_call` is deprecated:FutureWarning")
def test_functional_call_drops_what_it_is_given(layer, call):
    build, pattern, size = layer
    module = recoup.weight_dropout(build(), pattern, p=0.3)
    x = input_of(size)
    own = {name: p.detach().clone() for name, p in module.named_parameters()}
    for given in (
        {name: torch.randn_like(p).requires_grad_() for name, p in own.items()},
        {
            name: torch.randn_like(p).requires_grad_()
            for name, p in own.items()
            if any(entry.name == name for entry in applied(module))
        },
    ):
        with recorded() as made:
            output = first_of(call(module, given, x))
        leaves = {name: p.detach().clone().requires_grad_() for name, p in given.items()}
        used = weights_used(module, made, {**own, **leaves})
        plain = remove(copy.deepcopy(module))
        want = first_of(functional_call(plain, used, x))
        assert torch.equal(output, want)
        got = torch.autograd.grad(output.sin().sum(), list(given.values()))
        expected = torch.autograd.grad(want.sin().sum(), list(leaves.values()))
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
    for name, p in module.named_parameters():
        assert torch.equal(p, own[name])
    assert_dropped(module, x)


def test_functional_call_with_magnitudes():
    linear = recoup.weight_norm(nn.Linear(3, 3, bias=False), dim=None)
    given = {"weight": torch.randn(3, 3), "weight_g": torch.tensor(2.0)}
    given = {name: value.requires_grad_() for name, value in given.items()}
    x = torch.randn(2, 3)
    y = functional_call(linear, given, x)
    want = F.linear(x, given["weight"] * (given["weight_g"] / given["weight"].norm()))
    torch.testing.assert_close(y, want)
    values = list(given.values())
    for a, b in zip(
        torch.autograd.grad(y.sin().sum(), values),
        torch.autograd.grad(want.sin().sum(), values),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["linear", "lstm", "conv", "cell"])
def test_gradients_of_torch_func(kind):
    build, pattern, size = LAYERS[kind]
    module = noisy(build(), pattern)
    x = torch.randn(size)
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}

    def loss(given):
        return first_of(functional_call(module, given, x)).sin().sum()

    with same_draw(3):
        got = torch.func.grad(loss)(parameters)
    with same_draw(3):
        step(module, x)
    for name, p in module.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-5, atol=1e-6)
    with same_draw(3):
        value = torch.func.grad_and_value(loss)(parameters)[1]
    with same_draw(3):
        torch.testing.assert_close(value, loss(parameters), rtol=1e-6, atol=1e-6)


def test_ensembles_of_torch_func():
    """One draw for all of the models of an ensemble, where torch is told so, or its error."""
    module = recoup.weight_dropout(nn.Linear(4, 3), p=0.5)
    weights = {"weight": torch.randn(5, 3, 4) + 3.0, "bias": torch.zeros(5, 3)}
    x = torch.eye(4)

    def run(given):
        return functional_call(module, given, x)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(run)(weights)
    for context in (nullcontext(), same_draw(2)):
        with context, recorded() as made:
            output = torch.vmap(run, randomness="same")(weights)
        scales = mask(module.get_parameter("weight"), made[0])
        assert torch.equal(output, (weights["weight"] * scales).transpose(1, 2))


# -- initialising and assigning --------------------------------------------------------------------


def test_assigning_a_tensor_is_refused_as_in_plain_torch():
    linear = noisy(nn.Linear(4, 4), "weight")
    with pytest.raises(TypeError, match=r"assign 'torch\.FloatTensor' as parameter 'weight'"):
        linear.weight = torch.zeros(4, 4)
    with pytest.raises(TypeError, match="cannot assign"):
        linear.weight = "text"
    lstm = noisy(nn.LSTM(4, 4), HIDDEN)
    with pytest.raises(TypeError, match="cannot assign"):
        lstm.weight_hh_l0 = torch.zeros(16, 4)


def test_a_parameter_that_becomes_none():
    linear = recoup.weight_dropout(nn.Linear(4, 4), ".*", p=0.5)
    linear.bias = None
    assert linear.bias is None
    assert_dropped(linear, torch.randn(3, 4))
    linear.register_parameter("bias", nn.Parameter(torch.ones(4)))
    assert_dropped(linear, torch.randn(3, 4))


def test_freezing():
    lstm = noisy(nn.LSTM(4, 4), HIDDEN)
    x = torch.randn(3, 2, 4)
    lstm.get_parameter("weight_hh_l0").requires_grad_(False)
    step(lstm, x)
    assert lstm.get_parameter("weight_hh_l0").grad is None
    lstm.get_parameter("weight_hh_l0").requires_grad_(True)
    step(lstm, x)
    assert lstm.get_parameter("weight_hh_l0").grad is not None


def test_the_class_can_still_be_called():
    """As in `type(layer)(...)`, by which many a program makes a layer like another."""
    for module, args in (
        (noisy(nn.Linear(4, 4), "weight"), (5, 6)),
        (noisy(nn.LSTM(4, 4), HIDDEN), (5, 6)),
        (noisy(nn.GRUCell(4, 4), ".*"), (5, 6)),
    ):
        other = type(module)(*args)
        assert applied(other) == []
        assert other(torch.randn(2, 5)) is not None
        assert list(other.state_dict()) == list(module.state_dict())
        assert pickle.loads(pickle.dumps(other)).state_dict().keys() == other.state_dict().keys()


# -- copies ----------------------------------------------------------------------------------------


def copied_by_pickle(module):
    return pickle.loads(pickle.dumps(module))


def copied_by_saving(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": copied_by_pickle,
    "old pickle": lambda module: pickle.loads(pickle.dumps(module, protocol=2)),
    "torch.save": copied_by_saving,
}
WHEN = {
    "before": lambda module, x: None,
    "after forward": lambda module, x: module(x),
    "after backward": step,
    "after evaluation": lambda module, x: (module.eval()(x), module.train()),
}


@pytest.mark.sampled(28)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("way", COPIES)
def test_copies(layer, way, when):
    build, pattern, size = layer
    module = recoup.weight_norm(noisy(build(), pattern), pattern)
    x = input_of(size)
    WHEN[when](module, x)
    other = COPIES[way](module)
    assert type(other) is type(module)
    assert repr(other) == repr(module)
    assert list(other.state_dict()) == list(module.state_dict())
    for a, b in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a is not b
        assert a.data_ptr() != b.data_ptr()
    # The same noise where the same is asked for, and else its own.
    with same_draw(3):
        a = first_of(module(x))
    with same_draw(3):
        b = first_of(other(x))
    assert torch.equal(a, b)
    with same_draw():
        a = first_of(module(x))
    with same_draw():
        b = first_of(other(x))
    assert not torch.equal(a, b)
    # What happens to one does not happen to the other.
    before = [p.detach().clone() for p in module.parameters()]
    step(other, x, torch.optim.SGD(other.parameters(), lr=0.5))
    for p, was in zip(module.parameters(), before, strict=True):
        assert torch.equal(p, was)
    assert_dropped(other, x)
    assert_dropped(module, x)
    steps = [entry.step for entry in applied(module)]
    other(x)
    assert [entry.step for entry in applied(module)] == steps
    with disabled(module):
        assert not torch.equal(first_of(other(x)), first_of(other(x)))
    remove(other)
    assert type(other) is type(build())
    assert_dropped(module, x)


def test_a_copy_goes_on_with_its_schedule():
    p = torch.tensor(0.0)
    linear = recoup.weight_dropout(nn.Linear(4, 4), p=p)
    linear(torch.randn(2, 4))
    other = copy.deepcopy(linear)
    assert applied(other)[0].step == 1
    other(torch.randn(2, 4))
    assert [applied(m)[0].step for m in (linear, other)] == [1, 2]


def test_a_shallow_copy_shares():
    linear = noisy(nn.Linear(4, 4), "weight")
    other = copy.copy(linear)
    assert other.get_parameter("weight") is linear.get_parameter("weight")
    assert_dropped(other, torch.randn(2, 4))


def test_a_class_on_top_of_ours():
    """Wrappers change the class once more; copies and removal go through it."""
    linear = noisy(nn.Linear(4, 4), "weight")

    class Top(type(linear)):
        pass

    linear.__class__ = Top
    other = copy.deepcopy(linear)
    assert type(other) is Top
    assert_dropped(other, torch.randn(2, 4))
    linear.__class__ = Top.__mro__[1]
    assert type(remove(linear)) is nn.Linear


@pytest.mark.slow
def test_in_a_process_of_its_own(tmp_path):
    """What is pickled names classes that another process can import."""
    lstm = noisy(nn.LSTM(4, 4), HIDDEN)
    model = nn.Sequential(noisy(nn.Linear(4, 4), "weight"), nn.ReLU())
    recoup.weight_norm(model, r"0\.weight")
    x = torch.randn(3, 2, 4)
    with same_draw(5):
        want = model(x), lstm(x)[0]
    torch.save((lstm, model, x, want), tmp_path / "saved.pt")
    program = """
import multiprocessing, sys, torch

def work(lstm, model, x, queue):
    import recoup
    with recoup.weights.same_draw(5):
        got = model(x), lstm(x)[0]
    got[0].sum().backward()
    queue.put([y.detach().numpy().tobytes() for y in got])

if __name__ == "__main__":
    lstm, model, x, want = torch.load(sys.argv[1], weights_only=False)
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(lstm, model, x, queue))
    process.start()
    got = queue.get()
    process.join()
    assert got == [y.detach().numpy().tobytes() for y in want]
"""
    path = tmp_path / "program.py"
    path.write_text(program, encoding="utf-8")
    subprocess.run([sys.executable, str(path), str(tmp_path / "saved.pt")], check=True, timeout=120)


# -- averages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mean", "ema"])
def test_averages_are_of_raw_weights(layer, kind):
    build, pattern, size = layer
    module = noisy(build(), pattern)
    x = input_of(size)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step(module, x)
    settings = {} if kind == "mean" else {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}
    averaged = AveragedModel(module, **settings)
    seen = []
    for _ in range(3):
        step(module, x, optimizer)
        averaged.update_parameters(module)
        seen.append([p.detach().clone() for p in module.parameters()])
    for place, p in enumerate(averaged.module.parameters()):
        a, b, c = (values[place] for values in seen)
        want = (a + b + c) / 3 if kind == "mean" else 0.25 * a + 0.25 * b + 0.5 * c
        torch.testing.assert_close(p.detach(), want)
    plain = remove(copy.deepcopy(averaged.module))
    assert torch.equal(first_of(averaged.eval()(x)), first_of(plain.eval()(x)))
    assert_dropped(averaged.module.train(), x)


# -- removal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_removal_restores_everything(layer, way):
    build, pattern, size = layer
    module = build()
    kinds = [type(part) for part in module.modules()]
    keys = [list(vars(part)) for part in module.modules()]
    parameters = list(module.parameters())
    WAYS[way](module, pattern)
    x = input_of(size)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step(module, x, optimizer)
    before = {name: (value, value.clone()) for name, value in module.state_dict().items()}
    assert remove(module) is module
    assert [type(part) for part in module.modules()] == kinds
    assert [list(vars(part)) for part in module.modules()] == keys
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    for name, value in module.state_dict().items():
        assert value.data_ptr() == before[name][0].data_ptr()
        assert torch.equal(value, before[name][1])
    assert applied(module) == []
    stream = torch.get_rng_state()
    assert torch.equal(first_of(module(x)), first_of(module(x)))
    assert torch.equal(stream, torch.get_rng_state())
    was = [p.clone() for p in parameters]
    step(module, x, optimizer)
    assert any(not torch.equal(p, w) for p, w in zip(parameters, was, strict=True))
    WAYS[way](module, pattern)
    assert_dropped(module, x)


def test_backward_after_removal():
    """The graph of a forward that was, is of the weights that it had."""
    run = PlainRun(nn.Linear(4, 3), lambda m: recoup.weight_dropout(m, p=0.3))
    x = torch.randn(5, 4)
    raw = run.module.get_parameter("weight").detach().clone().requires_grad_()
    with recorded() as made:
        y = run.module(x.requires_grad_())
    remove(run.module)
    y.sin().sum().backward()
    z = x.detach().clone().requires_grad_()
    F.linear(z, raw * mask(raw, made[0]), run.module.bias.detach()).sin().sum().backward()
    assert torch.equal(run.module.get_parameter("weight").grad, raw.grad)
    assert torch.equal(x.grad, z.grad)


def test_removing_some():
    model = noisy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ".*")
    remove(model, r"0\..*|1\.bias")
    assert type(model[0]) is nn.Linear
    assert [entry.name for entry in applied(model)] == ["1.weight"] * 2
    assert_dropped(model, torch.randn(3, 4))
    remove(model)
    assert type(model) is nn.Sequential
    assert type(model[1]) is nn.Linear


def test_what_is_left_keeps_its_extent():
    """One draw for each forward of the tree, also after something else was removed from it."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(x), self.a(x), self.b(x)

    model = noisy(Twice(), ".*weight")
    remove(model, r"a\.weight")
    first, _, second = model(torch.eye(8))
    assert torch.equal(first, second)
    assert not torch.equal(first, model(torch.eye(8))[0])
    assert type(model.a) is nn.Linear


def test_removing_from_a_part():
    model = noisy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ".*weight")
    remove(model[0])
    assert [entry.name for entry in applied(model)] == ["1.weight"] * 2
    remove(model[1])
    assert applied(model) == []
    assert type(model[0]) is type(model[1]) is nn.Linear
    x = torch.randn(3, 4)
    assert torch.equal(model(x), model(x))


def test_removing_a_norm_leaves_the_product():
    conv = nn.Conv1d(4, 8, 3)
    keys, parameter = list(vars(conv)), conv.get_parameter("weight")
    recoup.weight_dropout(recoup.weight_norm(conv))
    with torch.no_grad():
        conv.weight_g.mul_(2.0)
    want = torch._weight_norm(conv.get_parameter("weight"), conv.weight_g, 0).detach()
    remove(conv)
    assert type(conv) is nn.Conv1d
    assert list(vars(conv)) == keys
    assert list(conv.state_dict()) == ["weight", "bias"]
    assert conv.get_parameter("weight") is parameter
    torch.testing.assert_close(conv.get_parameter("weight").detach(), want, rtol=1e-6, atol=1e-7)


def test_a_norm_changes_nothing_yet():
    conv = nn.Conv1d(4, 8, 3)
    x = torch.randn(2, 4, 6)
    want, parameter, pointer = (
        conv(x),
        conv.get_parameter("weight"),
        conv.get_parameter("weight").data_ptr(),
    )
    recoup.weight_norm(conv)
    torch.testing.assert_close(conv(x), want, rtol=1e-5, atol=1e-6)
    assert conv.get_parameter("weight") is parameter
    assert conv.get_parameter("weight").data_ptr() == pointer
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    before = conv.weight_g.detach().clone()
    step(conv, x, optimizer)
    assert not torch.equal(conv.weight_g, before)


# -- modules of users ------------------------------------------------------------------------------


class Lists(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4)})

    def forward(self, x):
        for weight in self.weights:
            x = x * weight
        return x + self.weights[0] * self.weights[-1] + self.named["a"] * self.named.b


class Registered(nn.Module):
    """A class that wants to know its subclasses."""

    subclasses: typing.ClassVar[list] = []

    def __init_subclass__(cls, *, tag="untagged", **kwargs):
        super().__init_subclass__(**kwargs)
        cls.subclasses.append(tag)


class Tagged(Registered, tag="tagged"):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight


class Asking(Tagged):
    def __init_subclass__(cls, *, tag):
        super().__init_subclass__(tag=tag)


def test_a_class_that_registers_its_subclasses():
    tagged = recoup.weight_dropout(Tagged())
    assert Registered.subclasses == ["tagged", "untagged", "untagged"]
    assert_dropped(tagged, torch.randn(3, 4))
    assert_dropped(copy.deepcopy(tagged), torch.randn(3, 4))
    assert type(remove(tagged)) is Tagged


@pytest.mark.parametrize("make", [Asking, lambda: nn.Sequential(Asking())])
def test_a_class_whose_subclasses_must_give_arguments(make):
    module = make()
    kinds = [type(part) for part in module.modules()]
    with pytest.raises(ValueError, match=r"has a Asking.*a subclass has to give.*'tag'"):
        recoup.weight_dropout(module, ".*weight")
    assert [type(part) for part in module.modules()] == kinds
    assert all("_recoup_attached" not in vars(part) for part in module.modules())


class Meta(type):
    made: typing.ClassVar[list] = []

    def __init__(cls, *args):
        super().__init__(*args)
        cls.is_ready = True

    def __call__(cls, *args, **kwargs):
        cls.made.append(cls.__name__)
        return super().__call__(*args, **kwargs)


class WithMeta(nn.Linear, metaclass=Meta):
    pass


def test_a_class_with_a_metaclass():
    module = recoup.weight_dropout(WithMeta(4, 4))
    assert type(type(module)) is Meta
    assert type(module).is_ready
    assert_dropped(module, torch.randn(3, 4))
    assert Meta.made == ["WithMeta"]


class Abstract(nn.Module, abc.ABC):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    @abc.abstractmethod
    def forward(self, x): ...


class Concrete(Abstract):
    def forward(self, x):
        return x * self.weight


class AlsoConcrete(Concrete):
    pass


def test_an_abstract_class():
    for use in (lambda kind: isinstance(AlsoConcrete(), kind), lambda kind: None):
        module = recoup.weight_dropout(Concrete())
        use(type(module))  # a cache of answers must not be that of the class itself
        assert isinstance(module, Concrete)
        assert isinstance(module, Abstract)
        assert isinstance(AlsoConcrete(), Concrete)
        assert isinstance(Concrete(), Concrete)
        assert not isinstance(nn.Linear(2, 2), type(module))
        assert isinstance(module, type(module))
        assert_dropped(copy.deepcopy(module), torch.randn(3, 4))


Kind = typing.TypeVar("Kind")


class Generic(nn.Linear, typing.Generic[Kind]):
    pass


class Slotted(nn.Linear):
    __slots__ = ("factor",)

    def forward(self, x):
        return super().forward(x) * self.factor


@dataclasses.dataclass(eq=False)
class Data(nn.Module):
    size: int = 4

    def __post_init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(self.size))

    def forward(self, x):
        return x * self.weight


def test_classes_of_other_kinds():
    slotted = Slotted(4, 4)
    slotted.factor = 2.0
    x = torch.randn(3, 4)
    for module in (Generic(4, 4), Generic[int](4, 4), Data()):
        kind = type(module)
        assert_dropped(recoup.weight_dropout(module), x)
        assert_dropped(copy.deepcopy(module), x)
        assert type(remove(module)) is kind
    recoup.weight_dropout(slotted, p=1.0)
    assert torch.equal(slotted(x), (slotted.bias * 2).expand(3, 4))
    assert type(remove(slotted)) is Slotted
    assert slotted.factor == 2.0


class Awkward(nn.Linear):
    """Properties, a forward of its own, and `__getattr__` that answers for another object."""

    def __init__(self):
        super().__init__(4, 4)
        self.inner = {"hello": "world"}

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self.__dict__.get("inner", {}):
                return self.inner[name]
            raise

    @property
    def doubled(self):
        return self.weight * 2

    def forward(self, x, *, twice: bool = True):
        return F.linear(x, self.doubled if twice else self.weight, self.bias)


def test_a_module_of_a_user():
    module = recoup.weight_dropout(Awkward(), p=0.5)
    raw = module.get_parameter("weight")
    x = torch.randn(3, 4)
    assert module.hello == "world"
    assert not hasattr(module, "nothing")
    with recorded() as made:
        doubled = module.doubled  # a method that computes with the weight
    assert torch.equal(doubled, raw * mask(raw, made[0]) * 2)
    del doubled
    with recorded() as made:
        y = module(x, twice=False)
        z = module(x)
    for output, drawn, factor in zip((y, z), made, (1, 2), strict=True):
        assert torch.equal(output, F.linear(x, raw * mask(raw, drawn) * factor, module.bias))
    assert "twice" in inspect.signature(module.forward).parameters
    run = PlainRun(Awkward(), recoup.weight_dropout)
    run.compare(torch.randn(3, 4))


class Shifted(nn.Embedding):
    """An embedding whose forward does more than to look up."""

    def forward(self, ids):
        return super().forward(ids) + 1.0


class Pairs(nn.Embedding):
    """An embedding whose forward returns two values."""

    def forward(self, ids):
        rows = super().forward(ids)
        return rows, rows.sum(-1)


class Tied(nn.Embedding):
    """An embedding whose forward is that of a decoder too."""

    def forward(self, ids):
        return super().forward(ids) @ self.weight.T


@pytest.mark.parametrize("kind", [Shifted, Pairs, Tied])
def test_embeddings_of_users_drop_rows_of_the_weight(kind):
    run = PlainRun(kind(9, 4), lambda m: recoup.weight_dropout(m, p=0.5, axes=(1,)))
    run.compare(torch.tensor([[1, 3, 1], [8, 0, 3]]))


class OfUsers(nn.LSTM):
    """A recurrent layer with a forward of its own."""

    def forward(self, x, state=None):
        self.flatten_parameters()
        output, state = super().forward(x.flip(0), state)
        return output.flip(0), state


def test_a_recurrent_layer_of_a_user():
    run = PlainRun(OfUsers(4, 5, 2), lambda m: recoup.weight_dropout(m, HIDDEN))
    for _ in range(2):
        run.compare(torch.randn(6, 2, 4))


def test_a_recurrent_layer_whose_weights_are_flattened_in_the_tree():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 5)

        def forward(self, x):
            self.lstm.flatten_parameters()
            assert len(self.lstm.all_weights[0]) == 4
            return self.lstm(x)[0]

    run = PlainRun(Model(), lambda m: recoup.weight_dropout(m, r"lstm\.weight_hh_l0"))
    run.compare(torch.randn(6, 2, 4))
    raw = run.module.lstm._parameters["weight_hh_l0"]
    assert any(weight is raw for weight in run.module.lstm._flat_weights)


def test_a_local_class():
    """It cannot be pickled, as without us, and everything else works."""

    class Local(nn.Linear):
        pass

    module = noisy(Local(4, 4), "weight")
    assert type(module).__qualname__ == Local.__qualname__
    assert_dropped(copy.deepcopy(module), torch.randn(3, 4))
    with pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
        pickle.dumps(module)


def test_hooks_go_on_working():
    calls = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_forward_pre_hook(lambda m, args: calls.append("before"))
    model[0].register_forward_hook(lambda m, args, output: calls.append("after") or output * 1)
    model.register_full_backward_hook(lambda m, inputs, outputs: calls.append("backward"))
    model.weight_hook = (
        model[0].get_parameter("weight").register_hook(lambda g: calls.append("gradient"))
    )
    model[0].get_parameter("weight").register_post_accumulate_grad_hook(
        lambda p: calls.append("accumulated")
    )
    model.register_state_dict_pre_hook(lambda m, prefix, keep: calls.append("state"))
    noisy(model, ".*weight")
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    model.state_dict()
    assert sorted(calls) == sorted(
        ["before", "after", "gradient", "accumulated", "backward", "state"]
    )
    model.weight_hook.remove()
    remove(model)
    calls.clear()
    model(torch.randn(3, 4))
    assert calls == ["before", "after"]


def test_a_replica_has_tensors_for_parameters():
    """What `nn.DataParallel` makes of a module, without the devices."""
    for module, x in (
        (recoup.weight_dropout(nn.Linear(4, 4), ".*"), torch.randn(3, 4)),
        (recoup.weight_dropout(nn.LSTM(4, 4), ".*"), torch.randn(3, 2, 4)),
    ):
        replica = module._replicate_for_data_parallel()
        weights = {name: p.detach().clone() * 2 for name, p in module.named_parameters()}
        for name, value in weights.items():
            setattr(replica, name, value)
        with recorded() as made:
            output = first_of(replica(x))
        used = weights_used(module, made, weights)
        plain = remove(copy.deepcopy(module))
        assert torch.equal(output, first_of(functional_call(plain, used, x)))
        assert_dropped(module, x)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", ["linear", "lstm"])
def test_tracing_in_evaluation(kind):
    build, pattern, size = LAYERS[kind]
    module = noisy(build(), pattern).eval()
    x = input_of(size)
    traced = torch.jit.trace(module, x)
    assert torch.equal(first_of(traced(x)), first_of(module(x)))


def test_symbolic_tracing_in_evaluation():
    model = noisy(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ".*weight").eval()
    x = torch.randn(3, 4)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_a_script_is_made_of_what_is_left_after_removal():
    linear = noisy(nn.Linear(4, 4), "weight")
    with pytest.raises(RuntimeError):
        torch.jit.script(linear)
    x = torch.randn(3, 4)
    assert torch.equal(torch.jit.script(remove(linear))(x), linear(x))


def test_monte_carlo_evaluation():
    """Noise in evaluation, and dropout of activations not."""
    model = noisy(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), r"0\.weight").eval()
    x = torch.ones(1, 4)
    with enabled(model), torch.no_grad():
        outputs = torch.stack([model(x) for _ in range(20)])
        assert (outputs.std(0) > 0).all()
        with same_draw(1):
            assert torch.equal(model(x), model(x))
