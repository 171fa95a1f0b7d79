"""Law 4: hooks, checkpoints, autocast, copies and threads of others go on working."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    Chain,
    InvertibleConv1x1,
    InvertibleConv1x1LU,
)
from recoup.schedules import sqrt
from tests.oracle import (
    assert_same_step,
    assert_same_tensor,
    hooks_in_force,
    loss_of_all,
    run_step,
)
from tests.zoo import chain_of, conv_net, invertible_chain_of, leaf

MEMORIES = ["sqrt", 1, 3]


class Within(nn.Module):
    """Calls `module` through `call`."""

    def __init__(self, module, call):
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, x):
        return self.call(self.module, x)


def on_cpu(module, x):
    with save_on_cpu():
        return module(x)


def cloned(module, x):
    with saved_tensors_hooks(torch.clone, torch.clone):
        return module(x)


CALLS = {
    "torch, not reentrant": lambda m, x: torch_checkpoint(m, x, use_reentrant=False),
    "torch, reentrant": lambda m, x: torch_checkpoint(m, x, use_reentrant=True),
    "ours": recoup.checkpoint,
    "save_on_cpu": on_cpu,
    "hooks": cloned,
}


def without_prefix(step):
    step.gradients = {n.replace("module.", ""): g for n, g in step.gradients.items()}
    step.buffers = {n.replace("module.", ""): b for n, b in step.buffers.items()}
    return step


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["dropout", "draws itself"])
def test_a_chain_inside_of(name, call, memory):
    modules, x = chain_of(name)
    want = run_step(nn.Sequential(*modules), x)
    model = Within(recoup.Sequential(*modules, memory=memory), CALLS[call])
    assert_same_step(without_prefix(run_step(model, x)), want)


# It says so whenever it runs without gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("call", CALLS)
def test_a_chain_of_stages_that_use(call, memory):
    modules, x = chain_of("dropout")
    want = run_step(nn.Sequential(*modules), x)
    stages = [Within(module, CALLS[call]) for module in modules]
    assert_same_step(without_prefix(run_step(recoup.Sequential(*stages, memory=memory), x)), want)


@pytest.mark.parametrize("call", CALLS)
def test_an_invertible_chain_inside_of(call):
    modules, x = invertible_chain_of("dropout")
    want = run_step(Chain(*modules), x)
    model = Within(Chain(*modules, memory="constant"), CALLS[call])
    assert_same_step(without_prefix(run_step(model, x)), want, rtol=1e-10)


@pytest.mark.parametrize("call", CALLS)
def test_couplings_whose_networks_use(call):
    modules, x = invertible_chain_of("couplings")
    want = run_step(Chain(*copy.deepcopy(modules)), x)
    for coupling in modules:
        if hasattr(coupling, "network"):
            coupling.network = Within(coupling.network, CALLS[call])
    got = without_prefix(run_step(Chain(*modules, memory="constant"), x))
    assert_same_step(got, want, rtol=1e-10)


@pytest.mark.parametrize("memory", ["sqrt", "log", "constant"])
def test_hooks_outside_see_what_is_kept(memory):
    # Convolutions and norms save the parameter itself, linear layers a view of it.
    build = invertible_chain_of if memory == "constant" else chain_of
    modules, x = build("glow" if memory == "constant" else "convolutions and norms")
    kind = Chain if memory == "constant" else recoup.Sequential
    model = kind(*modules, memory=memory)
    model(x)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor)
        return tensor.detach()

    def unpack(tensor):
        unpacked.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, unpack):
        output = model(x)
    loss_of_all(output).backward()
    seen = {id(tensor) for tensor in packed}
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    assert weights
    assert all(id(p) in seen for p in weights)
    others = {t.untyped_storage()._cdata for t in packed if not isinstance(t, nn.Parameter)}
    y = output[0] if isinstance(output, tuple) else x
    assert y.untyped_storage()._cdata in others
    assert unpacked


@pytest.mark.parametrize("memory", ["sqrt", "log", 1, 3])
def test_autocast_and_backward_outside_it(memory):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    modules = [
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)),
        block,
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)),
        block,
        nn.Linear(6, 6),
    ]
    x = leaf(4, 6).float().detach().requires_grad_()

    def cast(module, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x)

    want = run_step(Within(nn.Sequential(*modules), cast), x)
    assert want.outputs[0].dtype is torch.bfloat16
    got = run_step(Within(recoup.Sequential(*modules, memory=memory), cast), x)
    assert_same_step(got, want)


@pytest.mark.parametrize("memory", ["sqrt", "constant"])
def test_backward_within_autocast_of_a_forward_outside(memory):
    modules, x = invertible_chain_of("couplings")
    gradients = []
    for mode in ("linear", memory):
        model = Chain(*copy.deepcopy(modules), memory=mode).float()
        loss = loss_of_all(model(x.detach().float()))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_autocast_in_constant_memory():
    torch.manual_seed(0)
    modules = []
    for _ in range(3):
        modules += [ActNorm(6), InvertibleConv1x1(6), InvertibleConv1x1LU(6)]
        modules += [AdditiveCoupling(conv_net(3, 3), conv_net(3, 3))]
    x = torch.randn(4, 6, 4, 4, requires_grad=True)

    def cast(module, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x)

    want = run_step(Within(Chain(*modules), cast), x)
    got = run_step(Within(Chain(*modules, memory="constant"), cast), x)
    assert got.outputs[0].dtype is want.outputs[0].dtype is torch.float32
    assert_same_step(got, want, rtol=1e-2)


def models():
    modules, x = chain_of("convolutions and norms")
    yield recoup.Sequential(*modules, memory="sqrt"), x
    yield recoup.Sequential(*modules, memory=sqrt(len(modules))), x
    modules, x = invertible_chain_of("multi-scale")
    yield Chain(*modules, memory="constant"), x


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(place, used, copied):
    model, x = list(models())[place]
    if used:
        loss_of_all(model(x)).backward()
        model.zero_grad()
    twin = copied(model)
    assert twin.memory == model.memory
    assert_same_step(run_step(twin, x), run_step(model, x))
    if used:
        loss_of_all(model(x))  # a graph that is still to be used is no hindrance
        assert copied(model).memory == model.memory


def test_names_are_those_of_torch():
    modules, _ = chain_of("convolutions and norms")
    ours, theirs = recoup.Sequential(*modules, memory="sqrt"), nn.Sequential(*modules)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert isinstance(ours, nn.Sequential)
    assert [id(p) for p in ours.parameters()] == [id(p) for p in theirs.parameters()]
    modules, _ = invertible_chain_of("glow")
    assert list(Chain(*modules).state_dict()) == list(nn.Sequential(*modules).state_dict())


# -- threads ---------------------------------------------------------------------------------------


def in_threads(work, num_threads):
    errors = []

    def guarded(place):
        try:
            work(place)
        except Exception as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(place,)) for place in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert hooks_in_force() is None


@pytest.mark.parametrize("memory", ["sqrt", 1, "constant"])
def test_two_threads_share_one_graph(memory):
    build = invertible_chain_of if memory == "constant" else chain_of
    modules, x = build("couplings" if memory == "constant" else "mlp")
    kind = Chain if memory == "constant" else recoup.Sequential
    model = kind(*modules, memory=memory)
    losses = []
    for mode in ("linear", memory):
        model.memory = mode
        output = model(x)
        value = output[0] if isinstance(output, tuple) else output
        losses.append([value.sin().sum(), value.square().sum()])
    parameters = list(model.parameters())
    want = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses[0]]
    got = [None, None]

    def work(place):
        for _ in range(5):
            got[place] = torch.autograd.grad(losses[1][place], parameters, retain_graph=True)

    in_threads(work, 2)
    for a, b in zip(got, want, strict=True):
        for p, q in zip(a, b, strict=True):
            assert_same_tensor("a gradient", p, q, 1e-10, 1e-3)


@pytest.mark.parametrize("memory", ["sqrt", 1, "constant"])
def test_many_threads_with_a_graph_each(memory):
    build = invertible_chain_of if memory == "constant" else chain_of
    modules, x = build("couplings" if memory == "constant" else "mlp")
    kind = Chain if memory == "constant" else recoup.Sequential
    model = kind(*modules, memory="linear")
    parameters = list(model.parameters())
    inputs = [x.detach() * (place + 1) for place in range(6)]
    want = [torch.autograd.grad(loss_of_all(model(value)), parameters) for value in inputs]
    model.memory = memory
    got = [()] * 6

    def work(place):
        for _ in range(5):
            got[place] = torch.autograd.grad(loss_of_all(model(inputs[place])), parameters)

    in_threads(work, 6)
    for a, b in zip(got, want, strict=True):
        for p, q in zip(a, b, strict=True):
            assert_same_tensor("a gradient", p, q, 1e-10, 1e-3)


def test_threads_leave_norms_as_they_were():
    torch.manual_seed(0)
    parts = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.BatchNorm1d(64)]
    model = recoup.Sequential(*(nn.Sequential(*copy.deepcopy(parts)) for _ in range(3)), memory=1)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]

    def work(place):
        for _ in range(15):
            model(torch.randn(256, 64, requires_grad=True)).sum().backward()

    in_threads(work, 4)
    assert [norm.momentum for norm in norms] == [0.1] * len(norms)
    assert all(norm.num_batches_tracked is not None for norm in norms)
    # Of the stage that runs again, which is counted under a lock. The other stages run as in plain
    # torch, where adding to one tensor from several threads may lose counts.
    assert [int(norm.num_batches_tracked) for norm in norms[:2]] == [60, 60]
