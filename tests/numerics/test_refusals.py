"""What is refused: the call, the exception, and the words that name the argument and a way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup import errors, schedules
from recoup._core.executor import Executor
from recoup.errors import ChangedError, NotInvertibleError, RecoupError, ReplayError, ScheduleError
from recoup.invertible import AdditiveCoupling, Chain
from recoup.schedules import Advance, Invert, Keep, Load, Offload, Reverse, Schedule, Tape
from tests.deciding import is_second_run
from tests.invertible_zoo import invertible_chain_of, net
from tests.oracle import loss_of_all, tensors
from tests.ways import called
from tests.zoo import Fn, dense, leaf

X = leaf(3)


def sequential(*modules, **options):
    return lambda: recoup.Sequential(*(modules or [nn.Tanh(), nn.Tanh()]), **options)


def replaced():
    model = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Dropout())
    model[1].forward = torch.tanh
    return model


END = [action for index in (2, 1, 0) for action in (Invert(index), Reverse(index))]
DROPS = Schedule(3, (Keep(0), Advance(0, 3), Load(3), *END), name="drops what it loads")
WRONG = Schedule(2, (Advance(0, 2), Load(1), Tape(1), Reverse(1)), name="wrong")
TO = "/nowhere/at/all"
NOWHERE = Schedule(1, (Offload(0, TO), Advance(0, 1), Load(0), Tape(0), Reverse(0)))
ARGUMENTS = [
    (lambda: recoup.checkpoint(torch.sin, X, use_reentrant=True), ValueError, "`use_reentrant`"),
    (lambda: recoup.checkpoint(torch.sin, X, debug=True), ValueError, "`debug` is True"),
    (lambda: recoup.checkpoint(torch.sin, X, context_fn=lambda: 0), ValueError, "`context_fn` ret"),
    (sequential(memory=schedules.sqrt(3)), ValueError, "for 3 stages, but the chain has 2"),
    (sequential(AdditiveCoupling(net(3, 3)), nn.Tanh(), memory="constant"), NotInvertibleError,
     r'module `1` \(Tanh\).*"sqrt".*otherwise='),
    (lambda: sequential(nn.Linear(3, 3).double(), nn.Tanh(), memory=schedules.constant(2))()(X),
     NotInvertibleError, "Linear"),
    (lambda: recoup.recompute_(replaced()), ValueError, "`types` is empty"),
    (lambda: recoup.recompute_(replaced(), nn.Conv2d), ValueError, "Conv2d.* There are: Dr"),
    (lambda: recoup.recompute_(replaced(), nn.GELU), ValueError, "GELU whose `forward` was repl"),
    (lambda: recoup.recompute_(nn.ModuleList([nn.GELU()]), nn.ModuleList), ValueError, "no for"),
    (lambda: recoup.offloading(to=TO), ValueError, "no folder. Make the folder first"),
    (lambda: sequential(nn.Tanh(), memory=NOWHERE)()(X * 1), errors.OffloadError, TO),
    (lambda: Chain(*invertible_chain_of("couplings")[0][:3], memory=DROPS)(leaf(4, 6)),
     ScheduleError, "drops"),
    (lambda: Executor(WRONG), ScheduleError, r"needs x_1 kept"),
    (lambda: Executor(Schedule(2, (Tape(0), Tape(1), Reverse(1)))), ScheduleError, "incomplete"),
    (lambda: Executor(schedules.sqrt(3)).execute([None, None], (torch.zeros(1),)),
     ScheduleError, "for 3 stages and the chain has 2"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), ARGUMENTS)
def test_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_folder_that_is_gone(tmp_path):
    around = recoup.offloading(1, tmp_path)
    tmp_path.rmdir()
    with pytest.raises(errors.OffloadError, match="No file can be made in"), around:
        pass


def test_what_is_refused_changes_nothing():
    model = replaced()
    with pytest.raises(ValueError, match="GELU"):
        recoup.recompute_(model, nn.Dropout, nn.GELU)
    assert type(model[2]) is nn.Dropout


def test_lazy_modules_are_called_outside_of_a_region_first():
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(RecoupError, match=r"LazyLinear.*outside"):
        recoup.checkpoint(lazy, torch.randn(4, 6))
    lazy(torch.randn(4, 6))
    recoup.checkpoint(lazy, torch.randn(4, 6)).sum().backward()


CULPRITS = {
    "parameter": (lambda net: net[0].weight.detach().mul_(2), r"`0.weight` of \w+ .*in place"),
    "hook": (lambda net: net[1].register_forward_hook(lambda *a: a[2] * 2), "hooks of its modules"),
    "forward": (lambda net: setattr(net[1], "forward", torch.sin), "hooks of its .* `forward`"),
    "module": (lambda net: net.insert(1, nn.Tanh()), "a module in it was replaced, added"),
}


@pytest.mark.parametrize("way", ["checkpoint", "sqrt"])
@pytest.mark.parametrize("name", CULPRITS)
def test_errors_name_the_culprit(name, way):
    change, said = CULPRITS[name]
    model, others = dense(0.5).double(), [dense().double() for _ in range(4 * (way == "sqrt"))]
    y = called(way, *others, model, *others)(leaf(3, 6))
    change(model)
    for _ in range(2):
        with pytest.raises(ChangedError, match=said):
            y.sum().backward(retain_graph=True)


# Functions of the input and of whether they run for the second time.
OTHERWISE = {
    "a save more": (lambda x, n: (x.sin() if n else x).exp().cos(), "did not repeat"),
    "a save less": (lambda x, n: x.sin() if n else x.sin().cos(), "saved 1 .* where .* saved 2"),
    "two for one": (lambda x, n: (x * x if n else x.exp()).cos(), "did not repeat"),
    "another shape": (lambda x, n: x[:, n:].sin().exp(), r"64 of shape \(4, 3\) where the first"),
    "another type": (lambda x, n: x.to([x.dtype, torch.float][n]).sin().exp(), "float32 of shape"),
    "numbers": (lambda x, n: (x * (n + 1)).sin().exp(), r"with other values .* off by \d"),
    "a branch": (lambda x, n: x.sin().exp() + (x + n).cos().exp(), "with other values"),
    "a row": (lambda x, n: (x + n * torch.eye(4)[1:2].mT).sin().exp(), "with other values"),
}


@pytest.mark.parametrize("way", ["checkpoint", "sqrt", "inputs"])
@pytest.mark.parametrize("name", OTHERWISE)
def test_a_second_run_that_differs(name, way):
    code, words = OTHERWISE[name]
    stage = Fn(lambda x: code(x, int(is_second_run())))
    others = [] if way == "checkpoint" else [nn.Identity() for _ in range(5)]
    y = called(way, stage, *others)(leaf(4, 4))
    with pytest.raises(ReplayError, match=f"Fn.*{words}"):
        y.sum().backward()


@pytest.mark.parametrize("way", ["checkpoint", "sqrt", "log", "inputs", 1])
@pytest.mark.parametrize("is_second", [False, True])
def test_an_input_that_is_changed_in_place(way, is_second):
    h = leaf(4, 6) * 1.0
    loss = called(way, *(dense().double() for _ in range(6)))(h).sum()
    if is_second:
        torch.autograd.grad(loss, h, retain_graph=True)
    with torch.no_grad():
        h.mul_(3.0)
    with pytest.raises(ChangedError, match=r"The input of .*was changed in place"):
        torch.autograd.grad(loss, h)


ENDS = ("dropout", 1, "output of the"), ("multi-scale", 1, "output of the"), ("dropout", 0, "input")


@pytest.mark.parametrize(("name", "place", "words"), ENDS)
def test_an_end_of_a_constant_chain_that_is_changed_in_place(name, place, words):
    modules, x = invertible_chain_of(name)
    ends = [x * 1.0, None]
    ends[1], _ = Chain(*modules, memory="constant")(ends[0])
    with torch.no_grad():
        tensors(ends[place])[0].mul_(2.0)
    with pytest.raises(ChangedError, match=words):
        loss_of_all(ends[1]).backward()


@pytest.mark.parametrize("way", ["checkpoint", "value", "inputs"])
def test_a_weight_that_shows_in_no_residual(way):
    """The input of a linear layer stays the same, and its gradient is that of another weight."""
    layer, x = nn.Linear(5, 5), torch.randn(3, 5, requires_grad=True)
    loss = called(way, layer, *([nn.Identity()] if way == "inputs" else []))(x).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(ChangedError, match=r"A parameter that .* was changed in place"):
        loss.backward()


@pytest.mark.parametrize("memory", ["sqrt", "inputs"])
@pytest.mark.parametrize("first", [nn.Tanh(), nn.Softmax(-1)])
def test_a_residual_that_a_later_operator_overwrites(first, memory):
    """As in the plain run: autograd itself does not look at what goes through hooks."""
    modules = [nn.Linear(4, 4), first, nn.LeakyReLU(0.3, inplace=True), *[nn.Linear(4, 4)] * 4]
    if memory == "inputs":  # in one stage: what a stage of its own overwrites is a copy
        modules = [nn.Sequential(*modules), nn.Linear(4, 4)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nn.Sequential(*modules)(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ChangedError, match="changed in place by a later operator"):
        recoup.Sequential(*modules, memory=memory)(torch.randn(2, 4)).sum().backward()


def with_a_transform(x):
    value, pull = torch.func.vjp(torch.sin, x)
    return value * pull(torch.ones_like(x))[0]


@pytest.mark.parametrize("way", ["checkpoint", "value", "sqrt"])
def test_transforms_of_torch_say_so(way):
    in_a_row = nn.Tanh(), *[dense().double()] * 4
    call, x = called(way, *(in_a_row if way == "sqrt" else [with_a_transform])), leaf(4, 6)
    with pytest.raises(RecoupError, match=r"torch\.func|saved tensor hooks"):
        torch.func.grad(lambda x: call(x).sum())(x.detach())
    if way != "sqrt":
        with pytest.raises(RecoupError, match=r"torch\.func|saved tensor hooks"):
            call(x)


def choice(x, linear):
    y = linear(x)
    return torch.cond(y.sum() > 0, linear, lambda y: y.cos(), (y,)).exp()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_condition_in_a_region_or_in_a_planned_model_names_itself():
    """N10"""
    x, model = leaf(4, 8), nn.Sequential(*(Fn(choice, nn.Linear(8, 8)).double() for _ in range(3)))
    for call in (recoup.checkpoint, lambda *args: recoup.plan(*args, policy="full")):
        with pytest.raises(RecoupError, match=r"torch\.cond.*torch\.utils\.checkpoint"):
            call(model, x.detach().requires_grad_(call is recoup.checkpoint))
