"""The ways in which a model may run, "plain" being the oracle, and situations: what is done."""

from __future__ import annotations

import copy
import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup import schedules
from recoup.schedules import Schedule, constant
from tests.oracle import assert_same_tensors, hooks_in_force, loss_of_all, tensors


class Called(nn.Module):
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
    s, first, last = schedules, n // 3, n - 1
    actions = [s.Tape(i) for i in range(first)]
    if first < last:
        actions += [s.Keep(first), s.Advance(first, last)]
    actions += [s.Tape(last), s.Reverse(last)]
    if first < last:
        actions += [s.Load(first), s.Drop(first), *(s.Tape(i) for i in range(first, last))]
    return Schedule(n, (*actions, *(s.Reverse(i) for i in reversed(range(last)))))


def planned(n):
    if n > 12:
        return "sqrt"
    costs = [schedules.Cost(1.0 + i % 3, 2 + i % 2, 3 + 5 * (i % 3)) for i in range(n)]
    return schedules.optimal(costs, schedules.frontier(costs)[0].peak_bytes)


def in_turns(*ways):
    return lambda n: constant([ways[i % len(ways)] for i in range(n)])


MEMORY = {
    **{name: lambda n, name=name: name for name in ("inputs", "sqrt", "log", "linear")},
    "1 slot": lambda n: 1,
    "3 slots": lambda n: 3,
    "revolve": lambda n: schedules.revolve(n, 2),
    "tape first, keep later": tape_first_keep_later,
    "planned": planned,
    "keep every third": in_turns("recompute", "keep", "recompute"),
}
INVERTING = {
    "constant": lambda n: "constant",
    "constant, mixed": in_turns("invert", "recompute", "invert", "keep"),
    "constant, mixed otherwise": in_turns("recompute", "invert", "invert", "recompute", "keep"),
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
    modules = copy.deepcopy(modules)
    if way == "recompute_":
        model = nn.Sequential(*modules)
        return recoup.recompute_(model, *{type(each) for each in modules})
    if way in MEMORY:
        return recoup.Sequential(*modules, memory=MEMORY[way](len(modules)))
    return Called(CALLS.get(way, nn.Sequential.__call__), modules)


def called(way, *modules):
    fn = nn.Sequential(*modules) if len(modules) > 1 else modules[0]
    regions = {"checkpoint": partial(recoup.checkpoint, fn), "value": recoup.recompute(fn)}
    return regions.get(way) or recoup.Sequential(*modules, memory=way)


def left_by(model, x):
    found = [x.grad] if isinstance(x, torch.Tensor) else []
    found += [*(p.grad for p in model.parameters()), *model.buffers()]
    return [each if each is None else each.detach().clone() for each in found]


def a_step(model, x):
    output = model(x)
    torch.rand(3, device=tensors(x)[0].device)
    loss_of_all(output).backward()
    return [*(value.detach().clone() for value in tensors(output)), *left_by(model, x)]


def three_steps(model, x):
    return [value for _ in range(3) for value in a_step(model, x)]


def gradients(output, model, x, **options):
    leaves = [*([x] if x.requires_grad else []), *model.parameters()]
    return torch.autograd.grad(loss_of_all(output), leaves, allow_unused=True, **options)


def backward_for_some(model, x):
    parameters = list(model.parameters())
    loss_of_all(model(x)).backward(inputs=parameters[1:3] or parameters)
    return left_by(model, x)


def retained(model, x):
    loss, found = loss_of_all(model(x)), []
    for time in range(3):
        loss.backward(retain_graph=time < 2)
        found += left_by(model, x)
    return found


def part_by_part(model, x):
    loss, parameters = loss_of_all(model(x)), list(model.parameters())
    parts = [parameters[-2:], parameters[:2], parameters[4:6], [x]]
    found = [torch.autograd.grad(loss, part, retain_graph=True) for part in parts if part]
    loss.backward()
    return [*(gradient for part in found for gradient in part), *left_by(model, x)]


def used_while_it_is_used(model, x):
    loss, found = loss_of_all(model(x)), []
    weights = list(model.parameters())
    weight = weights[len(weights) // 2]
    weight.register_hook(lambda _: found.extend(torch.autograd.grad(loss, x, retain_graph=True)))
    loss.backward(retain_graph=True)
    return [*found, *left_by(model, x)]


def two_forwards(model, x):
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


def hooks_of_others(model, x):
    fired, stages = [], [*getattr(model, "stages", model).children()] or [model]
    for place, p in enumerate(model.parameters()):
        p.register_hook(lambda _, place=place: fired.append(place))
        p.register_post_accumulate_grad_hook(lambda _, place=place: fired.append(place))
    x.register_hook(lambda g: g * 2)
    stages[1 % len(stages)].register_full_backward_hook(lambda *_: fired.append(100))
    stages[3 % len(stages)].register_full_backward_pre_hook(lambda *_: fired.append(200))
    output = model(x)
    tensors(output)[0].register_hook(lambda g: g * 3)
    loss_of_all(output).backward()
    return [torch.tensor(sorted(fired)), *left_by(model, x)]


def input_used_beside(model, x):
    h = x * 1.0  # which the model may change in place
    (loss_of_all(model(h)) + h.square().sum() + loss_of_all(model(h * 0.5))).backward()
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


def in_evaluation(model, x):
    found = a_step(model.eval(), x)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            found += tensors(model(x))
    return found


def in_threads(work, given):
    with ThreadPoolExecutor(4) as threads:
        return [gradient for each in threads.map(work, given) for gradient in each]


def threads_that_share_a_graph(model, x):
    """In evaluation: draws that threads repeat at once disturb each other, which is an error."""
    value = tensors(model.eval()(x))[0]
    losses = [value.sin().sum() * place for place in range(1, 5)]

    def work(loss):
        return [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(3)]

    return in_threads(work, losses)


def threads_with_a_graph_each(model, x):
    model.eval()
    inputs = [(x.detach() * place).requires_grad_() for place in range(1, 5)]
    return in_threads(lambda x: [gradients(model(x), model, x) for _ in range(3)][-1], inputs)


def a_copy(model, x):
    a_step(model, x)
    model.zero_grad()
    of_a_call = isinstance(model, Called)  # whose function cannot be pickled
    return a_step(copy.deepcopy(model) if of_a_call else pickle.loads(pickle.dumps(model)), x)


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
        found += left_by(model, x)
    return found


def a_step_with(
    call=nn.Module.__call__, around=nullcontext, between=lambda model, x: None,
    around_backward=nullcontext, backward=torch.Tensor.backward, dtype=torch.float64,
):  # fmt: skip
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


def replacing(kind):
    def situation(model, x):
        first = [*model.parameters(), *model.buffers()]
        loss = loss_of_all(model(x))
        for module in model.modules():
            for name, value in [*getattr(module, kind).items()]:
                other = None if value is None else 2 * value.detach()
                is_parameter = isinstance(value, nn.Parameter)
                setattr(module, name, nn.Parameter(other) if is_parameter else other)
        loss.backward()
        return [*left_by(model, x), *(each.detach() for each in first), *(p.grad for p in first)]

    return situation


def lent_to_the_forward(model, x):
    lent = {n: (1.5 * p).detach().requires_grad_() for n, p in model.named_parameters()}
    buffers = {name: buffer * 2 for name, buffer in model.named_buffers()}
    loss_of_all(functional_call(model, lent | buffers, (x,))).backward()
    return [*left_by(model, x), *(value.grad for value in lent.values()), *buffers.values()]


def in_another_thread(loss):
    with ThreadPoolExecutor(1) as thread:
        thread.submit(loss.backward).result()


def within(checkpoint, **options):
    return a_step_with(lambda model, x: checkpoint(lambda x: model(x * 1.0), x, **options))


def cloning():
    return saved_tensors_hooks(torch.clone, torch.clone)


bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)
anomaly_mode = partial(torch.autograd.set_detect_anomaly, True)
SITUATIONS = {
    "draws_in_between": a_step_with(between=lambda *_: torch.randn(5)),
    "reseeded_in_between": a_step_with(between=lambda *_: torch.manual_seed(99)),
    "evaluated_in_between": a_step_with(between=evaluate),
    "forward_in_between": a_step_with(between=lambda model, x: model(x)),
    "evaluation_from_then_on": a_step_with(between=lambda model, x: model.eval()),
    "training_from_then_on": a_step_with(
        lambda model, x: model.eval()(x), between=lambda model, x: model.train()
    ),
    "parameters_replaced_in_between": replacing("_parameters"),
    "buffers_replaced_in_between": replacing("_buffers"),
    "functional_call": lent_to_the_forward,
    "under_autocast": a_step_with(around=bfloat16, dtype=torch.float32),
    "backward_under_autocast": a_step_with(around_backward=bfloat16, dtype=torch.float32),
    "backward_in_another_thread": a_step_with(backward=in_another_thread),
    "in_torchs_checkpoint": within(torch_checkpoint, use_reentrant=False),
    "in_torchs_reentrant_checkpoint": within(torch_checkpoint, use_reentrant=True),
    "in_a_checkpoint": within(recoup.checkpoint),
    "within_save_on_cpu": a_step_with(around=save_on_cpu),
    "within_hooks_that_clone": a_step_with(around=cloning),
    "backward_within_hooks_that_clone": a_step_with(around_backward=cloning),
    "anomaly_mode": a_step_with(around=anomaly_mode, around_backward=anomaly_mode),
    "a_parameter_as_the_input": lambda model, x: a_step(model, nn.Parameter(x.detach().clone())),
    **{
        situation.__name__: situation
        for situation in (
            three_steps, backward_for_some, retained, part_by_part, used_while_it_is_used,
            two_forwards, two_forwards_together, gradient_of_the_gradient, hooks_of_others,
            input_used_beside, an_optimizer_within_backward, in_evaluation,
            threads_that_share_a_graph, threads_with_a_graph_each, a_copy,
            second_runs_that_fail,
        )
    },
}  # fmt: skip


def outcome(model: nn.Module, x: Any, situation: Any) -> list[Any]:
    if isinstance(x, torch.Tensor):
        x = x.detach().requires_grad_(x.requires_grad)
    torch.manual_seed(5)
    found = list(situation(model, x))
    assert hooks_in_force() is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.is_grad_enabled()
    return [*found, torch.get_rng_state()]


def assert_same(got, want, rtol=0.0):
    assert_same_tensors(dict(enumerate(got)), dict(enumerate(want)), rtol)
