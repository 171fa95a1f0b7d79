"""Law 1: a zoo of models x every way x every situation leave what ordinary autograd leaves.

The oracle is the same code around the same modules in a plain `nn.Sequential`, or in a `Chain` that
keeps everything. What recomputes is compared bit by bit, what inverts to a tolerance.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup.invertible import ActNorm, Chain
from recoup.schedules import (
    Advance,
    Cost,
    Drop,
    Keep,
    Load,
    Reverse,
    Schedule,
    Tape,
    constant,
    optimal,
    revolve,
)
from tests.oracle import (
    assert_same_step,
    assert_same_tensor,
    hooks_in_force,
    loss_of_all,
    run_step,
    tensors,
)
from tests.zoo import CHAINS, INVERTIBLE, MODULES, chain_of, invertible_chain_of

# -- ways ------------------------------------------------------------------------------------------


class Called(nn.Module):
    """Modules in a row, called in some way."""

    def __init__(self, call, modules):
        super().__init__()
        self.call, self.stages = call, nn.Sequential(*modules)

    def forward(self, x):
        return self.call(self.stages, x)


def one_by_one(stages, x):
    for stage in stages:
        x = recoup.checkpoint(stage, x)
    return x


def nested(stages, x):
    return recoup.checkpoint(lambda x: recoup.checkpoint(stages, recoup.checkpoint(copied, x)), x)


def copied(x):
    return x * 1 if torch.is_tensor(x) and x.is_floating_point() else x


def recomputing(stages, x):
    with recoup.recomputing():
        return stages(x)


def offloading(stages, x):
    with recoup.offloading(1, tempfile.gettempdir(), in_flight_bytes=200):
        return stages(x)


def tape_first_keep_later(n):
    """Tape a third in the sweep, then keep and advance, then tape the end."""
    first, last = n // 3, n - 1
    if n == 1:
        return Schedule(n, (Tape(0), Reverse(0)))
    actions = [Tape(i) for i in range(first)]
    if first < last:
        actions += [Keep(first), Advance(first, last)]
    actions += [Tape(last), Reverse(last)]
    if first < last:
        actions += [Load(first), Drop(first), *(Tape(i) for i in range(first, last))]
    return Schedule(n, (*actions, *(Reverse(i) for i in reversed(range(last)))))


def planned(n, num_bytes=None):
    """The schedule for stages of unlike costs, under the tightest budget if none is given."""
    costs = [Cost(1.0 + i % 3, 2 + i % 2, 3 + 5 * (i % 3)) for i in range(min(n, 12))]
    if n > 12:
        return "sqrt"
    for budget in range(200) if num_bytes is None else [num_bytes]:
        try:
            return optimal(costs, budget)
        except recoup.errors.ScheduleError:
            continue
    raise AssertionError


MEMORY = {
    "inputs": lambda n: "inputs",
    "sqrt": lambda n: "sqrt",
    "log": lambda n: "log",
    "1 slot": lambda n: 1,
    "3 slots": lambda n: 3,
    "100 slots": lambda n: 100,
    "linear": lambda n: "linear",
    "revolve": lambda n: revolve(n, 2),
    "tape first, keep later": tape_first_keep_later,
    "planned": planned,
    "roomy": lambda n: planned(n, 8 * n - n // 2),
    "keep every third": lambda n: constant(
        ["keep" if i % 3 == 1 else "recompute" for i in range(n)]
    ),
}
INVERTING = {
    "constant": lambda n: "constant",
    "constant, mixed": lambda n: constant(
        [("invert", "recompute", "invert", "keep")[i % 4] for i in range(n)]
    ),
    "constant, mixed otherwise": lambda n: constant(
        [("recompute", "invert", "invert", "recompute", "keep")[i % 5] for i in range(n)]
    ),
}
CALLS = {
    "checkpoint": recoup.checkpoint,
    "one by one": one_by_one,
    "nested": nested,
    "recompute": lambda stages, x: recoup.recompute(stages)(x),
    "recomputing": recomputing,
    "offloading": offloading,
}
WAYS = [*CALLS, "recompute_", *MEMORY]
USUAL = ["checkpoint", "one by one", "recompute", "recomputing", "inputs", "sqrt", "log", "1 slot"]


def built(way, modules):
    """The modules in some way; "plain" is the oracle."""
    modules = copy.deepcopy(modules)
    if way == "recompute_":
        model = nn.Sequential(*modules)
        return recoup.recompute_(model, *{type(each) for each in modules})
    if way in MEMORY:
        return recoup.Sequential(*modules, memory=MEMORY[way](len(modules)))
    return Called(CALLS.get(way, nn.Sequential.__call__), modules)


# -- situations: what is done with a model and its input, and what that leaves ---------------------


def left_by(model, x):
    """The gradients of the input and the parameters, and the buffers."""
    found = [x.grad] if isinstance(x, torch.Tensor) else []
    return [*found, *(p.grad for p in model.parameters()), *map(torch.clone, model.buffers())]


def a_step(model, x):
    output = model(x)
    torch.rand(3, device=tensors(x)[0].device)
    loss_of_all(output).backward()
    return [*(value.detach().clone() for value in tensors(output)), *left_by(model, x)]


def three_steps(model, x):
    """Gradients add up, and what a first run was looked at for is known in later ones."""
    return [value for _ in range(3) for value in a_step(model, x)]


def leaves_of(model, x):
    return [*([x] if x.requires_grad else []), *model.parameters()]


def gradients(output, model, x, **options):
    return torch.autograd.grad(
        loss_of_all(output), leaves_of(model, x), allow_unused=True, **options
    )


def gradient_of_the_input(model, x):
    return torch.autograd.grad(loss_of_all(model(x)), x)


def gradient_of_some_parameters(model, x):
    return torch.autograd.grad(loss_of_all(model(x)), list(model.parameters())[2:4])


def backward_for_some(model, x):
    loss_of_all(model(x)).backward(inputs=list(model.parameters())[1:3])
    return left_by(model, x)


def retained(model, x):
    loss, found = loss_of_all(model(x)), []
    for time in range(3):
        loss.backward(retain_graph=time < 2)
        found += [each if each is None else each.clone() for each in left_by(model, x)]
    return found


def two_losses(model, x):
    value = tensors(model(x))[0]
    value.sum().backward(retain_graph=True)
    value.square().sum().backward()
    return left_by(model, x)


def part_by_part(model, x):
    loss, parameters = loss_of_all(model(x)), list(model.parameters())
    parts = [parameters[-2:], parameters[:2], parameters[4:6], [x]]
    found = [torch.autograd.grad(loss, part, retain_graph=True) for part in parts]
    loss.backward()
    return [*(gradient for part in found for gradient in part), *left_by(model, x)]


def used_while_it_is_used(model, x):
    """A hook takes a gradient in the middle of a backward."""
    loss, found = loss_of_all(model(x)), []
    weight = list(model.parameters())[4]
    weight.register_hook(lambda _: found.extend(torch.autograd.grad(loss, x, retain_graph=True)))
    loss.backward(retain_graph=True)
    return [*found, *left_by(model, x)]


def two_forwards(model, x):
    losses = [loss_of_all(model(x)), loss_of_all(model(x * 0.5))]
    losses[0].backward()
    losses[1].backward()
    return left_by(model, x)


def two_forwards_last_first(model, x):
    losses = [loss_of_all(model(x)), loss_of_all(model(x * 0.5))]
    losses[1].backward()
    losses[0].backward()
    return left_by(model, x)


def two_forwards_together(model, x):
    (loss_of_all(model(x)) + loss_of_all(model(x * 0.5))).backward()
    return left_by(model, x)


def gradient_of_the_gradient(model, x):
    first = gradients(model(x), model, x, create_graph=True)
    sum(each.square().sum() for each in first if each is not None).backward()
    return [*(each if each is None else each.detach() for each in first), *left_by(model, x)]


def hooks_of_parameters(model, x):
    fired = []
    for place, p in enumerate(model.parameters()):
        p.register_hook(lambda _, place=place: fired.append(place))
        p.register_post_accumulate_grad_hook(lambda _, place=place: fired.append(place))
    loss_of_all(model(x)).backward()
    return [torch.tensor(sorted(fired)), *left_by(model, x)]


def hooks_of_tensors_and_modules(model, x):
    calls, stages = [], list(getattr(model, "stages", model))
    x.register_hook(lambda g: g * 2)
    stages[1].register_full_backward_hook(lambda *_: calls.append(1.0))
    stages[3].register_full_backward_pre_hook(lambda *_: calls.append(2.0))
    output = model(x)
    tensors(output)[0].register_hook(lambda g: g * 3)
    loss_of_all(output).backward()
    return [torch.tensor(calls), *left_by(model, x)]


def input_used_beside(model, x):
    h = x.tanh()
    (loss_of_all(model(h)) + h.square().sum() + loss_of_all(model(h.relu()))).backward()
    return left_by(model, x)


def an_optimizer_within_backward(model, x):
    def step(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    loss_of_all(model(x)).backward()
    return [x.grad, *(p.detach() for p in model.parameters())]


def ten_steps_of_adam(model, x):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(10):
        optimizer.zero_grad()
        loss_of_all(model(torch.randn_like(x))).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def in_evaluation(model, x):
    found = a_step(model.eval(), x)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            found += tensors(model(x))
    return found


def threads_that_share_a_graph(model, x):
    """In evaluation: draws that threads repeat at once disturb each other, which is an error."""
    value, found = tensors(model.eval()(x))[0], [None] * 4
    losses = [value.sin().sum() * place for place in range(1, 5)]

    def work(place):
        for _ in range(3):
            found[place] = torch.autograd.grad(losses[place], x, retain_graph=True)[0]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    return found


def threads_with_a_graph_each(model, x):
    """In evaluation: what they draw would come in any order."""
    model.eval()
    inputs = [(x.detach() * place).requires_grad_() for place in range(1, 5)]
    found = [None] * 4

    def work(place):
        for _ in range(3):
            found[place] = gradients(model(inputs[place]), model, inputs[place])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    return [gradient for each in found for gradient in each]


def a_copy(model, x):
    a_step(model, x)
    model.zero_grad()
    return a_step(copy.deepcopy(model), x)


def a_pickled_copy(model, x):
    if isinstance(model, Called):
        model.call = None
        other = pickle.loads(pickle.dumps(model))
        other.call = nn.Sequential.__call__
        return a_step(other, x)
    return a_step(pickle.loads(pickle.dumps(model)), x)


def a_gradient_that_fails_first(model, x):
    """The graph is of use after an exception in backward."""
    loss = loss_of_all(model(x))

    def fails(_):
        handle.remove()
        raise KeyError

    handle = list(model.parameters())[3].register_hook(fails)
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    assert hooks_in_force() is None
    model.zero_grad()
    x.grad = None
    loss.backward()
    return left_by(model, x)


def second_runs_that_fail(model, x):
    """The graph is of use after an exception in the first, fourth or ninth call in backward."""
    num_left = 0

    def fail(*_):
        nonlocal num_left
        num_left -= torch._C._current_graph_task_id() != -1
        if num_left == 0:
            raise KeyError

    for module in model.modules():
        module.register_forward_hook(fail)
    found = []
    for number in (1, 4, 9):
        num_left = -1
        loss = loss_of_all(model(x))
        num_left = number
        with suppress(KeyError):
            loss.backward(retain_graph=True)
        num_left = -1
        assert hooks_in_force() is None
        model.zero_grad()
        x.grad = None
        loss.backward()
        found += [each if each is None else each.clone() for each in left_by(model, x)]
    return found


def a_step_with(
    call=nn.Module.__call__,
    around=nullcontext,
    between=lambda model, x: None,
    around_backward=nullcontext,
    backward=torch.Tensor.backward,
    dtype=torch.float64,
):
    """A step with something around it, or between its forward and its backward."""

    def situation(model, x):
        model, x = model.to(dtype), x.detach().to(dtype).requires_grad_(x.requires_grad)
        with around():
            loss = loss_of_all(call(model, x))
        between(model, x)
        with around_backward():
            backward(loss)
        return left_by(model, x)

    return situation


def evaluate(model, x):
    with torch.no_grad():
        model.eval()(x * 3)
    model.train()


def in_another_thread(loss):
    with ThreadPoolExecutor(1) as thread:
        thread.submit(loss.backward).result()


def torchs(use_reentrant):
    return partial(torch_checkpoint, use_reentrant=use_reentrant)


bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)
anomaly_mode = partial(torch.autograd.set_detect_anomaly, True)
SITUATIONS = {
    "draws_in_between": a_step_with(between=lambda *_: torch.randn(5)),
    "reseeded_in_between": a_step_with(between=lambda *_: torch.manual_seed(99)),
    "evaluated_in_between": a_step_with(between=evaluate),
    "forward_in_between": a_step_with(between=lambda model, x: model(x)),
    "under_autocast": a_step_with(around=bfloat16, dtype=torch.float32),
    "backward_under_autocast": a_step_with(around_backward=bfloat16, dtype=torch.float32),
    "backward_in_another_thread": a_step_with(backward=in_another_thread),
    "in_torchs_checkpoint": a_step_with(lambda model, x: torchs(False)(model, x)),
    "in_torchs_reentrant_checkpoint": a_step_with(lambda model, x: torchs(True)(model, x)),
    "in_a_checkpoint": a_step_with(recoup.checkpoint),
    "within_save_on_cpu": a_step_with(around=save_on_cpu),
    "within_hooks_that_clone": a_step_with(
        around=lambda: saved_tensors_hooks(torch.clone, torch.clone)
    ),
    "anomaly_mode": a_step_with(around=anomaly_mode, around_backward=anomaly_mode),
    "a_parameter_as_the_input": lambda model, x: a_step(model, nn.Parameter(x.detach().clone())),
    **{
        situation.__name__: situation
        for situation in (
            three_steps, gradient_of_the_input, gradient_of_some_parameters, backward_for_some,
            retained, two_losses, part_by_part, used_while_it_is_used, two_forwards,
            two_forwards_last_first, two_forwards_together, gradient_of_the_gradient,
            hooks_of_parameters, hooks_of_tensors_and_modules, input_used_beside,
            an_optimizer_within_backward, ten_steps_of_adam, in_evaluation,
            threads_that_share_a_graph, threads_with_a_graph_each, a_copy, a_pickled_copy,
            a_gradient_that_fails_first, second_runs_that_fail,
        )
    },
}  # fmt: skip
in_situations = pytest.mark.parametrize("name", SITUATIONS)


# -- the comparison --------------------------------------------------------------------------------


def outcome(model: nn.Module, x: Any, situation: Any) -> list[Any]:
    """What a situation leaves, and the random stream after it."""
    if isinstance(x, torch.Tensor):
        x = x.detach().requires_grad_(x.requires_grad)
    torch.manual_seed(5)
    found = list(situation(model, x))
    assert hooks_in_force() is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.is_grad_enabled()
    return [*found, torch.get_rng_state()]


def assert_same(got, want, rtol=0.0):
    present = [w for w in want if w is not None and w.is_floating_point() and w.numel()]
    least = 1e-3 * max(float(each.abs().max()) for each in present)
    for place, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same_tensor(str(place), g, w, rtol, least)


@pytest.mark.sampled(200)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*CHAINS, *MODULES])
def test_every_model_in_every_way(name, way):
    modules, x = chain_of(name)
    want = outcome(built("plain", modules), x, a_step)
    assert_same(outcome(built(way, modules), x, a_step), want)


@pytest.mark.parametrize("way", MEMORY)
def test_in_place_activations_as_stages(way):
    modules, x = chain_of("in place as stages")
    want = outcome(built("plain", modules), x, two_forwards_together)
    assert_same(outcome(built(way, modules), x, two_forwards_together), want)


@in_situations
@pytest.mark.parametrize("way", [*USUAL, "recompute_"])
def test_every_situation(name, way):
    modules, x = chain_of("dropout")
    want = outcome(built("plain", modules), x, SITUATIONS[name])
    assert_same(outcome(built(way, modules), x, SITUATIONS[name]), want)


@pytest.mark.sampled(100)
@pytest.mark.parametrize("way", USUAL)
@pytest.mark.parametrize(
    ("name", "situation"),
    [
        (name, situation)
        for name in MODULES
        for situation in (retained, gradient_of_the_gradient, two_forwards, three_steps)
        # Torch has no second derivative of these.
        if situation is not gradient_of_the_gradient
        or name not in ("bags", "encoder in evaluation")
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_models_in_the_harder_situations(name, way, situation):
    modules, x = chain_of(name)
    want = outcome(built("plain", modules), x, situation)
    assert_same(outcome(built(way, modules), x, situation), want)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("way", [*INVERTING, "sqrt", "log", "1 slot", "tape first, keep later"])
@pytest.mark.parametrize("name", INVERTIBLE)
def test_every_invertible_chain_in_every_way(name, way):
    modules, x = invertible_chain_of(name)
    memory = (INVERTING | MEMORY)[way](len(modules))
    want = outcome(Chain(*copy.deepcopy(modules)), x, a_step)
    got = outcome(Chain(*modules, memory=memory), x, a_step)
    assert_same(got, want, 1e-10 if way in INVERTING else 0.0)


@in_situations
@pytest.mark.parametrize("chain", ["dropout", "norms"])
def test_every_situation_in_constant_memory(chain, name):
    modules, x = invertible_chain_of(chain)
    rtol = 1e-3 if "autocast" in name else 1e-7 if name == "ten_steps_of_adam" else 1e-10
    want = outcome(Chain(*copy.deepcopy(modules)), x, SITUATIONS[name])
    assert_same(outcome(Chain(*modules, memory="constant"), x, SITUATIONS[name]), want, rtol)


@pytest.mark.filterwarnings("ignore:The first step of a Sequential under its plan")  # its loss
@pytest.mark.parametrize(
    "name", ["force", "force of its input", "counts", "batch norm", "lstm", "dropout in place"]
)
def test_models_in_planned_blocks(name):
    modules = [chain_of(name)[0][2] for _ in range(4)]
    x = torch.randn(12, 6, requires_grad=True)
    want = outcome(nn.Sequential(*copy.deepcopy(modules)), x, three_steps)
    model = nn.Sequential(*modules)
    frontier = recoup.plan(model, x, blocks=list(model))
    frontier.plan(frontier.least_bytes).apply()
    model.zero_grad()
    assert_same(outcome(model, x, three_steps), want)


# -- chains in chains, some outputs alone, other kernels -------------------------------------------


@pytest.mark.parametrize("inner", ["linear", "sqrt", 1, "constant"])
@pytest.mark.parametrize("outer", ["constant", "sqrt", 1])
def test_a_chain_of_chains(inner, outer):
    first, x = invertible_chain_of("dropout")
    second, _ = invertible_chain_of("norms")
    want = run_step(Chain(Chain(*first), Chain(*second)), x)
    model = Chain(Chain(*first, memory=inner), Chain(*second, memory=inner))
    assert_same_step(run_step(model, x, memory=outer), want, rtol=1e-10)


@pytest.mark.parametrize("memory", ["sqrt", "inputs", 1])
def test_a_chain_in_a_chain_in_a_checkpoint(memory):
    modules, x = chain_of("dropout")
    inner = recoup.Sequential(*modules[1:4], memory=memory)
    chain = recoup.Sequential(modules[0], inner, *modules[4:], memory=memory)
    want = outcome(nn.Sequential(*copy.deepcopy(modules)), x, a_step)
    assert_same(outcome(Called(nested, chain), x, a_step), want)


OUTPUTS = {
    "y": lambda output: output[0],
    "log_det": lambda output: output[1].square(),
    **{f"latent {place}": lambda output, place=place: output[0][place] for place in range(3)},
}


@pytest.mark.parametrize("way", [*INVERTING, "sqrt", "1 slot"])
@pytest.mark.parametrize("part", OUTPUTS)
def test_a_loss_of_one_output_alone(part, way):
    modules, x = invertible_chain_of("multi-scale")
    memory = (INVERTING | MEMORY)[way](len(modules))
    loss = lambda output: loss_of_all(OUTPUTS[part](output))  # noqa: E731
    want = run_step(Chain(*modules), x, loss=loss)
    rtol = 1e-10 if way in INVERTING else 0.0
    assert_same_step(run_step(Chain(*modules), x, memory=memory, loss=loss), want, rtol)


@pytest.mark.parametrize("otherwise", ["recompute", "keep"])
def test_constant_with_a_word_for_what_has_no_inverse(otherwise):
    modules, x = chain_of("dropout")
    couplings, _ = invertible_chain_of("dropout")
    mixture = [couplings[0], modules[0], couplings[1], couplings[2], modules[1], couplings[4]]
    model = recoup.Sequential(*mixture, otherwise=otherwise)
    want = run_step(model, x, memory="linear")
    assert_same_step(run_step(model, x, memory="constant"), want, rtol=1e-10)
    assert_same_step(run_step(model, x, memory="sqrt"), want)


@pytest.mark.parametrize("memory", ["sqrt", "constant", 1])
def test_a_start_that_depends_on_data(memory):
    modules, x = invertible_chain_of("glow")
    models = [Chain(*copy.deepcopy(modules), memory=each) for each in (memory, "linear")]
    for model in models:
        torch.manual_seed(1)
        loss_of_all(model(x)).backward()
    assert all(m.started for m in models[0].modules() if isinstance(m, ActNorm))
    assert_same(*([p.detach() for p in model.parameters()] for model in models))


@pytest.mark.parametrize("used", [[0], [1], [1, 0]], ids=str)
@pytest.mark.parametrize("way", ["checkpoint", "recompute", "recomputing"])
def test_nested_arguments_and_outputs_of_which_some_are_used(used, way):
    def fn(x, *, scale):
        early = (x["a"][0] * scale[0]).sin().exp()
        return early, {"late": (early.tanh() * x["b"]).cumprod(1), "nothing": None}

    def block(x, *, scale):
        with recoup.recomputing():
            return fn(x, scale=scale)

    def gradients_by(call):
        a, b, scale = (torch.linspace(0.1, n, 12).view(2, 6).requires_grad_() for n in (1, 2, 3))
        early, rest = call({"a": [a], "b": b}, scale=(scale,))
        assert rest["nothing"] is None
        loss = sum((early, rest["late"])[n].square().sum() for n in used)
        return torch.autograd.grad(loss, [a, b, scale], allow_unused=True)

    by_checkpoint = lambda x, **more: recoup.checkpoint(fn, x, **more)  # noqa: E731
    calls = {"checkpoint": by_checkpoint, "recompute": recoup.recompute(fn), "recomputing": block}
    assert_same(gradients_by(calls[way]), gradients_by(fn))


@pytest.mark.parametrize("way", ["checkpoint", "sqrt"])
@pytest.mark.parametrize("name", ["wide", "router"])
def test_backward_with_another_number_of_threads(name, way):
    """Kernels may round otherwise, which is no error."""
    modules, x = chain_of(name)
    num_threads, found = torch.get_num_threads(), []
    for each in ("plain", way):
        model = built(each, modules)
        torch.manual_seed(5)
        torch.set_num_threads(1)
        loss = loss_of_all(model(x))
        torch.set_num_threads(2)
        found.append(gradients(loss, model, x))
        torch.set_num_threads(num_threads)
    assert_same(*reversed(found), rtol=1e-4)


def test_threads_leave_norms_as_they_were():
    torch.manual_seed(0)
    parts = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.BatchNorm1d(64)]
    model = recoup.Sequential(*(nn.Sequential(*copy.deepcopy(parts)) for _ in range(3)), memory=1)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]

    def work():
        for _ in range(15):
            model(torch.randn(256, 64, requires_grad=True)).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)
    assert [norm.momentum for norm in norms] == [0.1] * len(norms)
    # Of the stage that runs again, which is counted under a lock. The other stages run as in plain
    # torch, where adding to one tensor from several threads may lose counts.
    assert [int(norm.num_batches_tracked) for norm in norms[:2]] == [60, 60]
