"""Reparametrized weights and values beside saved-tensor hooks of others."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import (
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import checkpoint

import recoup
from tests.oracle import (
    Step,
    assert_same_step,
    hooks_in_force,
    loss_of_all,
)
from tests.weight_zoo import LAYERS, OURS, Loop, Without

# Of `torch.backends.mkldnn.flags`.
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Layers are small, and threads that wait for each other are not."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


KINDS = [
    "linear",
    "linear 3-D",
    "x @ w.t()",
    "einsum",
    "conv2d",
    "embedding",
    "gru",
    "encoder layer",
]
KINDS += ["lstm, mkldnn off", "attention to others", "gru cell, in a loop"]


class Cloned(saved_tensors_hooks):
    """A pair that keeps a copy of all that it is given."""

    def __init__(self):
        super().__init__(lambda tensor: (tensor.clone(), tensor.shape), lambda packed: packed[0])


class Logged(saved_tensors_hooks):
    """A pair that writes down what it is given, and what is asked for."""

    def __init__(self):
        self.packed, self.unpacked = [], []

        def pack(tensor):
            self.packed.append(
                (tuple(tensor.shape), tensor.dtype, float(tensor.detach().double().sum()))
            )
            return len(self.packed) - 1, tensor.detach()

        def unpack(packed):
            self.unpacked.append(packed[0])
            return packed[1]

        super().__init__(pack, unpack)


def kind_of(name, way):
    torch.manual_seed(0)
    kind = LAYERS[name]
    module = kind.build()
    if way is not None:
        OURS[way](module, kind.pattern)
    return module, kind.inputs()


def step_of(module, inputs, around=nullcontext, around_backward=nullcontext, seed=11):
    module.zero_grad()
    for value in inputs:
        value.grad = None
    torch.manual_seed(seed)
    with around():
        output = module(*inputs)
        assert not isinstance(output, tuple) or len(output) == 2
    loss = loss_of_all(output)
    with around_backward():
        loss.backward()
    assert hooks_in_force() is None
    gradients = {str(place): value.grad for place, value in enumerate(inputs)}
    gradients |= {name: p.grad for name, p in module.named_parameters()}
    output = output if isinstance(output, torch.Tensor) else output[0]
    return Step(
        [output.detach().clone()],
        {name: None if g is None else g.clone() for name, g in gradients.items()},
        {},
        torch.get_rng_state(),
    )


AROUND = {"save_on_cpu": save_on_cpu, "cloned": Cloned, "logged": Logged}


@pytest.mark.sampled(18)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_around(kind, way, around):
    module, inputs = kind_of(kind, way)
    twin = copy.deepcopy(module)
    for settings in ({"around": AROUND[around]}, {"around_backward": AROUND[around]}):
        assert_same_step(step_of(module, inputs, **settings), step_of(twin, inputs))


@pytest.mark.parametrize("way", ["dropout", "noise"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_see_what_they_would_have_seen(kind, way):
    """All that a plain layer with the very weights shows, in its order, but these weights."""
    module, inputs = kind_of(kind, way)
    shapes = {
        tuple(p.shape)
        for name, p in module.named_parameters()
        if any(entry.name == name for entry in recoup.weights.applied(module))
    }
    shapes |= {shape[::-1] for shape in shapes} | {(1, *shape) for shape in shapes}
    shapes |= {(1, *shape[::-1]) for shape in shapes if len(shape) == 2}
    ours, plain = Logged(), Logged()
    torch.manual_seed(4)
    with ours:
        output = module(*inputs)
    noisy = [entry.name for entry in recoup.weights.applied(module)]
    recoup.weights.remove(module)
    with plain:
        same = module(*inputs)
    assert [shape for shape, *_ in ours.packed if shape in shapes] == []
    want = [shape for shape, *_ in plain.packed if shape not in shapes]
    ids = [want[-1]] if kind == "embedding" and way == "dropout" else []  # for the mask of its rows
    want += ids
    assert [shape for shape, *_ in ours.packed] == want
    assert len(plain.packed) > len(want) or "embedding" in kind, noisy
    # and each is asked for as often
    for result in (output, same):
        loss_of_all(result if isinstance(result, torch.Tensor) else result[0]).backward()
    seen = [plain.packed[place][0] for place in plain.unpacked]
    asked = sorted([*(shape for shape in seen if shape not in shapes), *ids])
    assert sorted(ours.packed[place][0] for place in ours.unpacked) == asked


def test_they_are_given_the_objects_themselves():
    """The input and the parameters, that is: what has no history."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    recoup.weight_noise(module, r"[02]\.weight", std=0.1)
    x, seen = torch.randn(6, 5, requires_grad=True), []

    def pack(tensor):
        seen.append(tensor)
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda packed: packed):
        loss_of_all(module(x)).backward()
    assert any(tensor is x for tensor in seen)
    assert any(tensor is module[1].weight for tensor in seen)
    addresses = {tensor.untyped_storage().data_ptr() for tensor in seen}
    raw = module[0]._parameters["weight"].untyped_storage().data_ptr()
    assert raw not in addresses


@pytest.mark.parametrize("way", ["dropout", "noise"])
def test_what_is_offloaded_holds_no_weight(way):
    """Of all that the pair keeps, nothing is as large as the weight."""
    module, x = nn.Linear(300, 200), torch.randn(3, 300)
    OURS[way](module, "weight")
    kept = []

    def pack(tensor):
        kept.append(weakref.ref(copied := tensor.clone()))
        return copied

    with saved_tensors_hooks(pack, lambda packed: packed):
        output = module(x)
    assert kept
    assert all(ref().numel() <= 900 for ref in kept if ref() is not None)
    loss_of_all(output).backward()
    del output
    assert all(ref() is None for ref in kept)


# -- within ----------------------------------------------------------------------------------------


class Within(nn.Module):
    """Enters a pair between reading the weight and using it, and leaves it before the result."""

    def __init__(self, pair, at):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))
        self.pair, self.at = pair, at

    def forward(self, x):
        with self.pair() if self.at == "read" else nullcontext():
            weight = self.weight
        with self.pair() if self.at in ("use", "first use") else nullcontext():
            y = F.linear(x, weight)
        with self.pair() if self.at == "use" else nullcontext():
            return (y @ weight).sin() * torch.einsum("bi,oi->bo", x, weight).sum(1, keepdim=True)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("at", ["read", "use", "first use"])
@pytest.mark.parametrize("pair", AROUND)
@pytest.mark.parametrize("way", OURS)
def test_hooks_within(way, pair, at):
    x = torch.randn(4, 5, requires_grad=True)
    module = Within(AROUND[pair], at)
    OURS[way](module, "weight")
    got = step_of(module, (x,))
    module.pair = nullcontext
    assert_same_step(got, step_of(module, (x,)))


def test_hooks_entered_in_one_forward_and_left_in_another():
    """As an offloader does that begins at one layer and ends at another."""
    torch.manual_seed(0)
    pair = Logged()
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    recoup.weight_dropout(module, ".*weight")
    x = torch.randn(3, 6, requires_grad=True)
    want = step_of(module, (x,))
    handles = [
        module[1].register_forward_pre_hook(lambda *_: pair.__enter__() and None),
        module[2].register_forward_hook(lambda *_: pair.__exit__()),
    ]
    got = step_of(module, (x,))
    for handle in handles:
        handle.remove()
    assert_same_step(got, want)
    assert [shape for shape, *_ in pair.packed] == [(3, 6)] * 2


@pytest.mark.parametrize("outer", AROUND)
@pytest.mark.parametrize("inner", AROUND)
def test_pairs_within_pairs(outer, inner):
    """The innermost has what is not ours, as ever; the outer one has nothing."""
    module, (x,) = kind_of("linear", "stacked")
    want = step_of(module, (x,))
    outermost = AROUND[outer]()

    def around():
        return stacked_up(outermost, AROUND[inner]())

    assert_same_step(step_of(module, (x,), around), want)
    if outer == "logged":
        assert outermost.packed == []


@contextmanager
def stacked_up(outer, inner):
    with outer, inner:
        yield


# -- values ----------------------------------------------------------------------------------------


def through(fn, x, w, pair=nullcontext, around=nullcontext):
    with around():
        value = fn(F.gelu)(x)
        with pair():
            product = value @ w
        return (product.sin() * value[:, :1]).exp()


@pytest.mark.parametrize("at", ["around", "within"])
@pytest.mark.parametrize("pair", AROUND)
def test_values(pair, at):
    w = torch.randn(6, 6, requires_grad=True)
    x = torch.randn(4, 6, requires_grad=True)
    settings = {"around" if at == "around" else "pair": AROUND[pair]}
    want = torch.autograd.grad(through(lambda fn: fn, x, w).sum(), [x, w])
    got = torch.autograd.grad(through(recoup.recompute, x, w, **settings).sum(), [x, w])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert hooks_in_force() is None


def test_hooks_see_a_call_whose_value_is_not_kept():
    """The argument and the other factor, once each, and not the value."""
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    log = Logged()
    with log:
        y = recoup.recompute(F.gelu)(x) @ w
    assert sorted(shape for shape, *_ in log.packed) == [(4, 6), (6, 6)]
    assert [total for shape, _, total in log.packed if shape == (4, 6)] == [
        float(x.detach().double().sum())
    ]
    y.sum().backward()


# -- no hooks allowed ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("kind", ["linear", "gru", "embedding"])
def test_hooks_forbidden(kind, way):
    """Torch's own error, in forward; what needs none is right."""
    module, inputs = kind_of(kind, way)
    want = step_of(module, inputs)
    module.zero_grad()
    needs_none = kind == "embedding" and way in ("dropout", "noise")  # which are drawn by row
    with disable_saved_tensors_hooks("no hooks, please"):
        with nullcontext() if needs_none else pytest.raises(RuntimeError, match="no hooks, please"):
            module(*inputs)
        with torch.no_grad():
            torch.manual_seed(11)
            output = module(*inputs)
            output = output if isinstance(output, torch.Tensor) else output[0]
            assert torch.equal(output, want.outputs[0])
    assert module.training
    assert_same_step(step_of(module, inputs), want)
    assert_same_step(
        step_of(module, inputs, around_backward=lambda: disable_saved_tensors_hooks("none")), want
    )
    if way in ("dropout", "noise"):
        module.eval()
        with disable_saved_tensors_hooks("no hooks, please"):
            module(*inputs)


def test_values_where_hooks_are_forbidden():
    x = torch.randn(3, requires_grad=True)
    with (
        disable_saved_tensors_hooks("no hooks, please"),
        pytest.raises(RuntimeError, match="no hooks, please"),
    ):
        recoup.recompute(torch.sin)(x)
    value = recoup.recompute(torch.sin)(x)
    with (
        disable_saved_tensors_hooks("no hooks, please"),
        pytest.raises(RuntimeError, match="no hooks, please"),
    ):
        value * value
    assert hooks_in_force() is None
    (value * value).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().sin() * x.detach().cos())


# -- nothing left ----------------------------------------------------------------------------------


class Breaks(nn.Module):
    """Raises between the read of the weight and its uses, or in a use."""

    def __init__(self, at):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))
        self.at = at

    def forward(self, x):
        if self.at == "before":
            raise KeyError("broken")
        weight = self.weight
        assert hooks_in_force() is None, "between operators"
        if self.at == "read":
            raise KeyError("broken")
        y = F.linear(x, weight)
        assert hooks_in_force() is None, "between operators"
        if self.at == "use":
            y = torch.linalg.cholesky(weight)  # not square
        if self.at == "backward":
            y.register_hook(self.broken)
        return y.tanh()

    @staticmethod
    def broken(gradient):
        raise KeyError("broken")


@pytest.mark.parametrize("at", ["pack", "unpack"])
def test_hooks_of_others_that_raise(at):
    module, x = kind_of("linear", "stacked")
    want = step_of(module, x)

    def raising(tensor):
        raise KeyError("theirs")

    def keeping(tensor):
        return tensor.detach()

    pair = (raising, keeping) if at == "pack" else (keeping, raising)
    with pytest.raises(KeyError, match="theirs"):
        step_of(module, x, lambda: saved_tensors_hooks(*pair))
    assert hooks_in_force() is None
    assert_same_step(step_of(module, x), want)


def test_a_mode_of_others_is_on_its_stack_afterwards():
    """The pair that was in force before a call is in force after it."""
    module, inputs = kind_of("encoder layer", "stacked")
    with Logged():
        before = hooks_in_force()
        module(*inputs)
        assert hooks_in_force() == before
        value = recoup.recompute(torch.sin)(inputs[0])
        assert hooks_in_force() == before
        value.square().sum().backward()
        assert hooks_in_force() == before
    assert hooks_in_force() is None


def test_no_monkey_patch():
    kinds = [("linear", "stacked"), ("gru", "dropout"), ("encoder layer", "noise")]
    for kind, way in kinds:
        module, inputs = kind_of(kind, way)
        with save_on_cpu():
            output = module(*inputs)
        loss_of_all(output if isinstance(output, torch.Tensor) else output[0]).backward()
    x = torch.ones(3, requires_grad=True)
    recoup.recompute(torch.sin)(x).square().sum().backward()
    hooks = saved_tensors_hooks
    functions = [hooks.__init__, hooks.__enter__, hooks.__exit__, checkpoint]
    functions += [nn.Linear.forward, nn.LSTM.forward, nn.GRU.forward, nn.Module.__call__]
    functions += [nn.Module.__getattr__, nn.Module.__setattr__, nn.Module.register_parameter]
    functions += [torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad]
    for function in functions:
        file = inspect.unwrap(function).__code__.co_filename
        assert Path(file).is_relative_to(Path(torch.__file__).parent), function
    assert F.linear is torch._C._nn.linear


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", OURS)
def test_nothing_is_held_by_the_pair_after_backward(way):
    """Without the garbage collector: what was packed goes with the graph."""
    module, (x,) = kind_of("linear", way)
    kept = []

    def pack(tensor):
        copied = tensor.clone()
        kept.append(weakref.ref(copied))
        return copied

    gc.collect()
    gc.disable()
    try:
        with saved_tensors_hooks(pack, lambda packed: packed):
            output = module(x)
        loss_of_all(output).backward()
        del output
        assert kept
        assert all(ref() is None for ref in kept)
        with saved_tensors_hooks(pack, lambda packed: packed):
            output = module(x)
        del output  # and no backward
        assert all(ref() is None for ref in kept)
    finally:
        gc.enable()


def test_a_loop_of_cells_under_hooks_is_as_without():
    module = Without(Loop(nn.LSTMCell(6, 6)))
    recoup.weight_dropout(module, r".*weight_.*", p=0.3)
    inputs = (torch.randn(4, 2, 6, requires_grad=True),)
    twin = copy.deepcopy(module)
    assert_same_step(step_of(twin, inputs, save_on_cpu), step_of(module, inputs))
