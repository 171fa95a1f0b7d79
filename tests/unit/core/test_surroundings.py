"""What a forward changes beside its output, in the first step or in a later one, happens once."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import ChangedError, ReplayError
from tests.oracle import assert_same_tensors
from tests.plan_oracle import Made
from tests.ways import one_by_one, recomputing
from tests.zoo import Fn


class Counting(nn.Module):
    def __init__(self, count, first_step=0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("late", None)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.plain = torch.zeros(4)
        self.num_steps, self.count, self.first_step = 0, count, first_step

    def forward(self, x):
        if self.training and self.num_steps >= self.first_step:
            self.count(self, x.detach().mean(0))
        return self.linear(x).sin()


class Codebook(Counting):
    def __init__(self, count, first_step):
        super().__init__(count, first_step)
        del self.mean, self.late

    def forward(self, x):
        y = (self.linear(x) * (1 + self.frozen)).sin()
        self.count(self, y.detach().mean(0))
        return y


def register(module, mean):
    if "new" in module._buffers:
        module.new = 0.9 * module.new + mean
    else:
        module.register_buffer("new", mean)


def parameter(name):
    def assign(m, mean):
        setattr(m, name, nn.Parameter(0.9 * getattr(m, name, 0.0) + mean, requires_grad=False))

    return assign


AT_ANY_TIME = {
    "assign": lambda m, mean: setattr(m, "mean", 0.9 * m.mean + mean),
    "write": lambda m, mean: m.mean.mul_(0.9).add_(mean),
    "assign first": lambda m, mean: setattr(
        m, "late", mean if m.late is None else 0.9 * m.late + mean
    ),
    "register": register,
    "assign parameter": parameter("frozen"),
    "register parameter": parameter("begun"),
    "write to parameter": lambda m, mean: m.frozen.mul_(0.9).add_(mean),
}
FROM_THE_FIRST_STEP = {
    "write to data": lambda m, mean: m.frozen.data.mul_(0.9).add_(mean),
    "assign data": lambda m, mean: setattr(m.frozen, "data", 0.9 * m.frozen.data + mean),
    "write to attribute": lambda m, mean: m.plain.mul_(0.9).add_(mean),
}
COUNTS = [(Counting, count, step) for count in AT_ANY_TIME.values() for step in (0, 2)]
COUNTS += [(Counting, count, 0) for count in FROM_THE_FIRST_STEP.values()]
COUNTS += [(Codebook, parameter("frozen"), 0)]


WAYS = {
    "planned": lambda model, x: (recoup.plan(model, x, policy="full").apply(), model)[1],
    "checkpoint": lambda model, x: partial(one_by_one, model),
    "chain": lambda model, x: recoup.Sequential(*model, memory="inputs"),
    "recomputing": lambda model, x: partial(recomputing, model),
}


def counts_of(model):
    found = model.state_dict()
    found |= {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
    return found | {f"{place}.plain": module.plain for place, module in enumerate(model)}


@pytest.mark.filterwarnings("ignore:The plan for a Sequential keeps everything")
@pytest.mark.parametrize(("kind", "count", "first_step"), COUNTS)
@pytest.mark.parametrize("way", ["planned", "checkpoint"])
def test_what_a_forward_counts_is_counted_once_in_each_step(way, kind, count, first_step):
    plain = nn.Sequential(*(kind(count, first_step) for _ in range(2)))
    other, x = copy.deepcopy(plain), torch.randn(3, 4)
    run = WAYS[way](other, x)
    for step, is_training in enumerate((True, False, True, True, True)):
        for model, call in ((plain, plain), (other, run)):
            model.train(is_training)
            for module in model:
                module.num_steps = step
            call(x).sum().backward()
        assert_same_tensors(counts_of(other), counts_of(plain))


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.num_calls, self.handle = nn.Linear(4, 4), 0, None

    def forward(self, x):
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.linear.weight.register_hook(lambda gradient: gradient / 2)
        self.num_calls += 1
        y = self.linear(x).tanh()
        self.loss = y.square().mean()
        return y


@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_sets_on_a_module_is_of_the_first_run(way):
    plain = nn.Sequential(Keeping(), Keeping())
    other, x = copy.deepcopy(plain), torch.randn(3, 4)
    for model, run in ((plain, plain), (other, WAYS[way](other, x))):
        for _ in range(2):
            run(x).sum().backward(retain_graph=True)
            sum(module.loss for module in model).backward()
    assert [module.num_calls for module in other] == [2, 2]
    for each in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(*(parameter.grad for parameter in each))
        wanted, found = (len(parameter._backward_hooks or ()) for parameter in each)
        assert wanted == found


@pytest.mark.parametrize("way", ["planned", "checkpoint"])
def test_threads_that_share_a_module_find_all_its_attributes(way, request):
    model, x = nn.Sequential(Keeping(), Keeping()), torch.randn(3, 4)
    run = WAYS[way](model, x)

    train = lambda _: [run(x).sum().backward() for _ in range(25)]  # noqa: E731
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, range(2)))  # which raises what they raise


def test_what_a_forward_writes_to_a_parameter_that_it_needs_is_an_error():
    halve = torch.no_grad()(lambda bias: bias.mul_(0.5))  # which changes a residual
    module = Fn(lambda x, linear: (halve(linear.bias), linear(x).tanh())[1], nn.Linear(4, 4))
    with pytest.raises(ChangedError, match=r"`parts\.0\.bias` of Fn was changed in place"):
        recoup.checkpoint(module, torch.randn(3, 4)).sum().backward()


def test_a_tensor_of_a_second_run_cannot_be_differentiated():
    kept, linear, x = [], nn.Linear(4, 4), torch.randn(3, 4)

    def run(x):
        kept.append(linear(x).tanh().square().mean())
        return kept[-1] * 2

    recoup.checkpoint(run, x).backward()
    with pytest.raises(ReplayError, match="a list, or another object, beside what it returns"):
        kept[1].backward()


def state_of():
    return SimpleNamespace(seen=torch.zeros(()), caches=[1, {"last": torch.zeros(4)}])


class Block(nn.Linear):
    def __init__(self, write):
        super().__init__(4, 4)
        self.write = write

    def forward(self, x, state):
        y = x + super().forward(x).tanh()
        self.write(state, y.detach())
        return y


def count(state, y):
    state.seen.add_(len(y))


def test_a_tensor_in_an_object_is_replaced_once_and_a_change_in_place_is_an_error():
    x, state = torch.randn(4, 4), state_of()
    for write in (count, lambda state, y: state.caches[1]["last"].copy_(y[-1])):
        with pytest.raises(ReplayError, match=r"Block.*in an object among its arguments"):
            recoup.checkpoint(Block(write), x, state_of())
    replace = Block(lambda state, y: setattr(state, "seen", state.seen + len(y)))
    recoup.checkpoint(replace, x, state).sum().backward()
    assert state.seen == 4


def test_a_plan_keeps_such_blocks_and_says_so():
    blocks = [Block(count) for _ in range(4)]
    net = Made(lambda net, x, state: [x := b(x, state) for b in net.blocks][-1], blocks=blocks)
    x, state = torch.randn(4, 4), state_of()
    with pytest.warns(UserWarning, match=r"`blocks\.0` changes a tensor in place"):
        plan = recoup.plan(net, x, state_of(), policy="full")
    with plan.applied():
        net(x, state).sum().backward()
    assert state.seen == 16
