"""Making a plan: it leaves no trace, and says what is wrong with what it is given."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.errors import RecoupError, ReplayError
from tests.neighbours.planned import Block, Net, fresh, loss_of, result_of
from tests.plan_oracle import Made


def planned(model: Any = None, *args: Any, **options: Any) -> recoup.Plan:
    options = {"budget": "1 GiB", "loss": loss_of} | options
    model, args = (fresh()[0] if model is None else model), args or (fresh()[1],)
    return recoup.plan(model, *args, **options)


STATES: dict[type, Callable[[Any], Any]] = {
    np.ndarray: np.ndarray.tobytes,
    torch.Generator: lambda generator: generator.get_state().tolist(),
    np.random.Generator: lambda generator: str(generator.bit_generator.state),
    np.random.RandomState: lambda state: str(state.get_state()),
    random.Random: random.Random.getstate,
}


def seen(value: Any, known: set[int]) -> Any:
    """A value as it is now, with all that it holds, to be compared."""
    if isinstance(value, Tensor):
        grad = None if value.grad is None else seen(value.grad, known)
        place = id(value), value.data_ptr(), value.requires_grad, value._version
        return place, value.detach().cpu().numpy().tobytes(), grad, sorted(vars(value))
    for kind, state in STATES.items():
        if isinstance(value, kind):
            return state(value)
    if isinstance(value, dict):
        return [(key, seen(each, known)) for key, each in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [seen(each, known) for each in value]
    if isinstance(value, (nn.Module, SimpleNamespace)) and id(value) not in known:
        known.add(id(value))
        return id(value), type(value), seen(vars(value), known)
    return id(value) if callable(value) else value


def everything(*values: Any) -> Any:
    """The values, and the random streams of the process."""
    streams = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
    return seen(values, set()), streams


class Acts(Net):
    """Does something in each forward, or in its first one alone."""

    def __init__(self, act: Callable[..., Any], *, once: bool) -> None:
        super().__init__()
        self.act, self.once, self.is_done = act, once, False
        self.history: list[Any] = []
        self.nested: dict[str, Any] = {"calls": 0, "lists": [[1], [2]], "queue": deque([3])}
        self.settings = SimpleNamespace(flags={"on": False}, sizes=[1, 2])
        self.last, self.plain = None, torch.zeros(3)
        self.of_torch, self.of_python = torch.Generator(), random.Random(0)
        self.of_numpy, self.of_old_numpy = np.random.default_rng(0), np.random.RandomState(0)

    def forward(self, x: Tensor, *beside: Any) -> Tensor:
        if not (self.once and self.is_done):
            self.is_done = True
            made = self.act(self, x, *beside)
            x = made if isinstance(made, Tensor) else x
        return super().forward(x)


def nothing(*_: Any, **__: Any) -> None:
    """A hook that does nothing."""


def changes_objects(model: Any, x: Tensor) -> None:
    block: Any = model.blocks[0]
    for kind in ("forward", "forward_pre", "full_backward", "state_dict_post"):
        getattr(block, f"register_{kind}_hook")(nothing)
    block.register_forward_hook(nothing, with_kwargs=True, always_call=True)
    model.nested["lists"][0].append(5)
    model.nested["queue"].append(6)
    model.settings.flags["on"] = True
    model.settings.sizes.append(7)
    model.settings.more = 8
    model.plain.numpy().fill(1.0)  # past torch


def changes_modules(model: Any, x: Tensor) -> None:
    model.added = nn.Linear(32, 32)
    model.blocks[1].drop = nn.Identity()
    model.blocks[2].eval()
    model.head.__class__ = type("Marked", (nn.Linear,), {})
    model.head.bias.requires_grad_(False)
    model.head.bias.mark = True
    model.stem[0].weight.data = model.stem[0].weight.data.clone()


def counts_and_draws(model: Any, x: Tensor) -> Tensor:
    model.history.append(x.detach())
    model.nested.update(calls=model.nested["calls"] + 1)
    model.cache = x
    of_numpy = float(np.random.rand()) + model.of_numpy.random() + model.of_old_numpy.rand()
    x = x * (1 + random.random()) * model.of_python.random() * (1 + of_numpy)
    return x + torch.rand(x.shape, generator=model.of_torch)


def writes(model: Any, x: Tensor, beside: dict[str, Any]) -> None:
    nested = beside["nested"]
    x.masked_fill_(x > 0, 0.0)
    nested[0].numpy().fill(0.0)
    nested[1][1:].mul_(2.0)
    nested.append(x)
    beside["array"] += 1.0


# What is done once would be something else in the first step than in those that follow.
ACTS = {"objects": (changes_objects, True), "modules": (changes_modules, True),
        "counts and draws": (counts_and_draws, False), "writes": (writes, False)}  # fmt: skip


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.temperature = nn.Parameter(torch.ones(()))
        self.target, self.generator = torch.ones(64, 32), torch.Generator()

    def forward(self, output: Tensor) -> Tensor:
        self.seen += 1
        drawn = self.temperature * torch.rand(output.shape, generator=self.generator)
        return loss_of(output * drawn - self.target.mul_(0.5))


@pytest.mark.parametrize("what", ACTS)
def test_no_trace_is_left_of_what_a_forward_and_a_loss_do(what: str):
    torch.manual_seed(0)
    act, once = ACTS[what]
    model, criterion, beside = Acts(act, once=once), Criterion(), ()
    fired: list[int] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    model.head.weight.register_hook(lambda gradient: fired.append(1))
    model.blocks[2].eval()
    model.blocks[3].up.requires_grad_(False)
    model.stem[0].weight.grad = torch.ones(32, 32)
    x = torch.randn(64, 32, requires_grad=act is not writes)
    if act is writes:
        beside = ({"nested": [torch.randn(32, 32), torch.randn(32, 32)], "array": np.zeros(3)},)
    before = everything(model, x, beside, criterion)
    found = recoup.plan(model, x, *beside, loss=criterion if once else lambda y: criterion(y))
    found.plan(found.least_bytes)
    assert everything(model, x, beside, criterion) == before
    assert fired == []
    loss_of(model(x, *beside)).backward()
    assert fired == [1, 1]


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "data": lambda average, mean: average.data.lerp_(mean, 0.1),
    "a version": lambda average, mean: average.lerp_(mean, 0.1),
    "out": lambda average, mean: torch.lerp(average, mean, 0.1, out=average.data),
}


class Codebook(Block):
    """A block with an average of what it is given, in a parameter that it writes to."""

    def __init__(self, width: int = 32, write: str = "data") -> None:
        super().__init__(width)
        self.average, self.write = nn.Parameter(torch.zeros(width)), WRITES[write]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.average
        with torch.no_grad():
            self.write(self.average, x.detach().mean(0))
        return y


@pytest.mark.parametrize("where", ["forward", "full_backward"])
def test_a_step_that_fails_leaves_no_trace(where: str):
    model, x = fresh()
    model.blocks[2] = Codebook()
    getattr(model.blocks[3], f"register_{where}_hook")(lambda *_: 1 / 0)
    before = everything(model, x)
    with pytest.raises(ZeroDivisionError):
        planned(model, x)
    assert everything(model, x) == before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write", WRITES)
def test_a_parameter_that_a_forward_writes_to_is_written_to_once_a_step(write: str):
    model, x = fresh()
    model.blocks[2] = Codebook(write=write)
    plain, before = copy.deepcopy(model), everything(model, x)
    found = recoup.plan(model, x, loss=loss_of)
    plan = found.plan(found.least_bytes)
    assert plan.rehearsed_peak_bytes < found.points[-1].peak_bytes
    assert everything(model, x) == before
    for _ in range(2):
        wanted = result_of(plain, lambda: loss_of(plain(x)).backward())
        with plan.applied():
            got = result_of(model, lambda: loss_of(model(x)).backward())
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        assert torch.equal(model.blocks[2].average, plain.blocks[2].average)


def test_a_model_whose_blocks_all_write_to_parameters_keeps_everything():
    with pytest.warns(UserWarning, match=r"keeps everything.*`blocks.0.average`.*buffers") as said:
        planned(Net(block=Codebook))
    assert len(said) == 1


def in_place(width: int) -> nn.Module:
    parts = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(width, width), nn.Tanh())
    return Made(lambda block, x: block.parts(x), parts=parts)


def stepped_by(kind: Any) -> None:
    """Its states are not known before a step."""
    model, x = fresh()
    planned(model, x, budget_of="total", optimizer=kind(model.parameters()))


def clips(model: Any, x: Tensor) -> None:
    values = model.head.weight.data.numpy()
    values.clip(-0.01, 0.01, out=values)


GLOBAL = torch.Generator()
STATES_OF = r"`optimizer` is a .* Step it once"
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "another device": (
        lambda: planned(Net(), torch.ones(9, 32, device="meta")), RuntimeError, "device"
    ),
    "an input that is changed": (
        lambda: planned(Net(block=in_place)), RecoupError, "`blocks.0` changes its input in place"
    ),
    "a parameter that is changed past torch": (
        lambda: planned(Acts(clips, once=False)),
        RecoupError, "`head.weight` of Acts was changed by a step",
    ),
    "a draw of a generator that nobody holds": (
        lambda: planned(loss=lambda y: (y * torch.rand(y.shape, generator=GLOBAL)).sum()),
        ReplayError, "generator that no module, loss or argument holds",
    ),
    "Adafactor": (lambda: stepped_by(torch.optim.Adafactor), ValueError, STATES_OF),
    "LBFGS": (lambda: stepped_by(torch.optim.LBFGS), ValueError, STATES_OF),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_step_that_is_wrong_is_an_error(what: str):
    run, error, words = WRONG[what]
    with pytest.raises(error, match=words):
        run()
