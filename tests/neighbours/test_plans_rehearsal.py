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
from recoup.errors import BudgetError, RecoupError, ReplayError
from tests.neighbours.planned import Block, Net, loss_of, result_of
from tests.planned_zoo import is_plain


def fresh() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(64, 32)


def planned(model: Any = None, *args: Any, **options: Any) -> recoup.Plan:
    own, x = fresh()
    options = {"budget": "1 GiB", "loss": loss_of} | options
    return recoup.plan(own if model is None else model, *(args or (x,)), **options)


# -- no trace ------------------------------------------------------------------------------


class Counts(Block):
    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.calls, self.rate, self.is_warm = 0, 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rate *= 0.9
        self.is_warm = True
        return super().forward(x)


def test_no_trace_is_left_on_a_model():
    torch.manual_seed(0)
    model, x = Net(block=Counts), torch.randn(64, 32)
    steps: list[int] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: steps.append(1))
    model.head.weight.register_hook(lambda gradient: steps.append(1))
    model.blocks[2].eval()
    model.blocks[3].up.requires_grad_(False)
    model.stem[0].weight.grad = torch.ones(32, 32)
    gradient = model.stem[0].weight.grad
    values = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()]
    attributes = [dict(vars(module)) for module in model.modules()]
    stream = torch.get_rng_state()
    recoup.plan(model, x, budget="1 GiB", loss=loss_of)
    assert steps == []
    assert torch.equal(torch.get_rng_state(), stream)
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
    assert [dict(vars(module)) for module in model.modules()] == attributes
    found = [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()]
    assert found == flags
    assert model.stem[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(32, 32))
    assert sum(p.grad is not None for p in model.parameters()) == 1
    loss_of(model(x)).backward()
    assert steps == [1, 1]


class Keeps(Net):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.history: list[Tensor] = []
        self.stats = {"calls": 0}
        self.last: Tensor | None = None
        self.count: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.what == "a list":
            self.history.append(y.detach())
        elif self.what == "a dict":
            self.stats["calls"] += 1
        elif self.what == "a tensor":
            self.last = y
        elif self.what == "a new attribute":
            self.cache = y
        else:
            self.count = (self.count or 0) + 1
        return y


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["a list", "a dict", "a tensor", "a new attribute", "a count"])
def test_no_trace_is_left_in(what: str):
    torch.manual_seed(0)
    model = Keeps(what)
    planned(model)
    assert model.history == []
    assert model.stats == {"calls": 0}
    assert model.last is None
    assert model.count is None
    assert not hasattr(model, "cache")


class Drops(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random()) * (1 + float(np.random.rand()))


def test_no_trace_is_left_in_streams_of_others():
    model = Drops()
    random.seed(0)
    np.random.seed(0)
    of_python, of_numpy = random.getstate(), np.random.get_state()
    planned(model)
    assert random.getstate() == of_python
    assert np.random.get_state()[2] == of_numpy[2]


class Draws(Net):
    """A net that draws from a generator of its own, outside of its blocks."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.generator, torch.Generator):
            return super().forward(x + torch.rand(x.shape, generator=self.generator))
        return super().forward(x * self.generator.random())


GENERATORS: list[Callable[[], Any]] = [
    torch.Generator, lambda: random.Random(0), lambda: np.random.default_rng(0),
    lambda: np.random.RandomState(0),
]  # fmt: skip
GLOBAL = torch.Generator()


def loss_that_draws(output: Tensor) -> Tensor:
    return (output * torch.rand(output.shape, generator=GLOBAL)).sum()


class Counting(random.Random):
    num_draws = 0

    def random(self) -> float:
        self.num_draws += 1
        return super().random()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", GENERATORS, ids=["torch", "Python", "numpy", "old numpy"])
def test_no_trace_is_left_in_generators_of_the_model(make: Callable[[], Any]):
    torch.manual_seed(0)
    model, x = Draws(make()), torch.randn(64, 32)
    untouched = copy.deepcopy(model.state_dict())
    wanted = Draws(make())
    wanted.load_state_dict(untouched)
    torch.manual_seed(3)
    loss_of(wanted(x)).backward()
    least = recoup.plan(model, x, loss=loss_of).least_bytes
    plan = recoup.plan(model, x, budget=least, loss=loss_of)
    torch.manual_seed(3)
    with plan.applied():
        loss_of(model(x)).backward()
    for found, want in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(found.grad, want.grad)


def test_no_trace_is_left_in_a_generator_of_the_loss():
    model, x = fresh()
    generator = torch.Generator().manual_seed(1)

    def loss(output: Tensor) -> Tensor:
        return (output * torch.rand(output.shape, generator=generator)).sum()

    before = generator.get_state()
    recoup.plan(model, x, budget=recoup.plan(model, x, loss=loss).least_bytes, loss=loss)
    assert torch.equal(generator.get_state(), before)


def test_a_loss_that_draws_from_a_global_generator_is_refused():
    with pytest.raises(ReplayError, match="generator that no module, loss or argument holds"):
        planned(None, torch.randn(64, 32), loss=loss_that_draws)


def test_generators_of_users_and_of_the_system():
    model = Draws(random.SystemRandom())
    model.generator = Counting(0)
    model.secret = random.SystemRandom()
    planned(model)
    assert model.generator.num_draws == 0


def test_no_trace_is_left_on_leaves_that_are_not_the_models():
    temperature, prompt = nn.Parameter(torch.ones(())), nn.Parameter(torch.randn(64, 32))
    planned(None, prompt, loss=lambda y: loss_of(y * temperature))
    assert temperature.grad is None
    assert prompt.grad is None


def test_no_trace_is_left_on_arguments():
    x, items = torch.randn(64, 32, requires_grad=True), [torch.randn(32)]

    class Takes(Net):
        def forward(self, x: Tensor, items: list[Tensor]) -> Tensor:
            items.append(x)
            return super().forward(x)

    planned(Takes(), x, items)
    assert x.grad is None
    assert len(items) == 1


class Marked(nn.Linear):
    """A layer that is not there before the first forward."""


def _hook(module: nn.Module, *_: Any) -> None:
    """A hook that does nothing."""


class Installs(Net):
    """Does once, in its first forward, what others do lazily."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.is_installed = what, False
        self.nested: dict[str, Any] = {"lists": [[1], [2]], "queue": deque([3])}
        self.settings = SimpleNamespace(flags={"on": False}, sizes=[1, 2])
        self.plain = torch.zeros(3)

    def install(self) -> None:
        block: Any = self.blocks[0]
        if self.what == "hooks":
            block.register_forward_hook(_hook)
            block.register_forward_hook(lambda *_, **__: None, with_kwargs=True, always_call=True)
            block.register_forward_pre_hook(lambda *_, **__: None, with_kwargs=True)
            block.register_full_backward_hook(_hook)
            block.register_full_backward_pre_hook(_hook)
            block.register_state_dict_post_hook(_hook)
            block.register_load_state_dict_post_hook(_hook)
        elif self.what == "global hooks":
            nn.modules.module.register_module_forward_hook(_hook)
        elif self.what == "nested":
            self.nested["lists"][0].append(5)
            self.nested["queue"].append(6)
            self.settings.flags["on"] = True
            self.settings.sizes.append(7)
            self.settings.more = 8
        elif self.what == "a tensor":
            self.plain.numpy()[:] = 1.0
        elif self.what == "modules":
            self.added = nn.Linear(32, 32)
            self.blocks[1].drop = nn.Identity()
        elif self.what == "a class":
            self.head.__class__ = Marked
        elif self.what == "a parameter":
            self.head.bias.requires_grad_(False)
            self.head.bias.mark = True
        elif self.what == "settings":
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True, warn_only=True)
        elif self.what == "modes":
            self.blocks[2].eval()

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_installed:
            self.is_installed = True
            self.install()
        return super().forward(x)


def state_of(model: Installs) -> list[Any]:
    """All that a rehearsal may have changed, as values that compare."""
    found: list[Any] = [
        (type(m), m.training, {k: len(v) for k, v in vars(m).items() if "hooks" in k}, set(vars(m)))
        for m in model.modules()
    ]
    found += [(p.requires_grad, sorted(vars(p))) for p in model.parameters()]
    found += [copy.deepcopy(model.nested), copy.deepcopy(vars(model.settings)), [*model._modules]]
    found += [model.plain.tolist(), model.plain._version, model.is_installed]
    found += [len(nn.modules.module._global_forward_hooks), torch.get_default_dtype()]
    return [*found, torch.are_deterministic_algorithms_enabled()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "what",
    ["hooks", "global hooks", "nested", "a tensor", "modules", "a class", "a parameter",
     "settings", "modes"],
)  # fmt: skip
def test_f2_what_a_first_forward_installs_is_not_left(what: str):
    torch.manual_seed(0)
    model = Installs(what)
    before = state_of(model)
    planned(model)
    assert state_of(model) == before


def test_f2_a_parameter_that_is_written_to_past_torch_is_an_error():
    class Clips(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.head.weight.data.numpy().clip(-0.01, 0.01, out=self.head.weight.data.numpy())
            return super().forward(x)

    with pytest.raises(RecoupError, match=r"`head.weight` of Clips was changed by a step"):
        planned(Clips())


class Codebook(Block):
    """A block with an average of what it is given, in a parameter that `write` writes to."""

    def __init__(self, width: int = 32, write: str = "data") -> None:
        super().__init__(width)
        self.average, self.write = nn.Parameter(torch.zeros(width)), write

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.average
        mean = x.detach().mean(0)
        with torch.no_grad():
            if self.write == "data":
                self.average.data.lerp_(mean, 0.1)
            elif self.write == "a version":
                self.average.lerp_(mean, 0.1)
            else:
                torch.lerp(self.average, mean, 0.1, out=self.average.data)
        return y


def averages(model: nn.Module) -> list[Tensor]:
    return [block.average.detach().clone() for block in model.modules() if type(block) is Codebook]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write", ["data", "a version", "out"])
def test_f2_a_parameter_that_a_forward_writes_to_is_written_to_once_a_step(write: str):
    model, x = fresh()
    model.blocks[2] = Codebook(write=write)
    plain, versions = copy.deepcopy(model), [p._version for p in model.parameters()]
    found = recoup.plan(model, x, loss=loss_of)
    plan = found.plan(found.least_bytes)
    assert plan.rehearsed_peak_bytes < found.points[-1].peak_bytes
    assert [p._version for p in model.parameters()] == versions
    assert torch.equal(averages(model)[0], torch.zeros(32))
    for _ in range(2):
        wanted = result_of(plain, lambda: loss_of(plain(x)).backward())
        with plan.applied():
            got = result_of(model, lambda: loss_of(model(x)).backward())
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        assert torch.equal(averages(model)[0], averages(plain)[0])


def test_f2_a_model_whose_blocks_all_write_to_parameters_keeps_everything():
    torch.manual_seed(0)
    model = Net(block=Codebook)
    with pytest.warns(UserWarning, match=r"keeps everything.*`blocks.0.average`.*buffers") as said:
        planned(model)
    assert len(said) == 1
    assert not torch.stack(averages(model)).any()


def test_f2_a_step_that_fails_leaves_parameters_as_they_were():
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    for register in (nn.Module.register_forward_hook, nn.Module.register_full_backward_hook):
        model, x = fresh()
        model.blocks[2] = Codebook()
        register(model.blocks[3], fails)
        with pytest.raises(ZeroDivisionError):
            planned(model, x)
        assert not averages(model)[0].any()


def test_f2_a_parameter_that_is_given_other_memory_has_its_own_again():
    class Renews(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.head.weight.data = self.head.weight.data.clone()
            return super().forward(x)

    model = Renews()
    address = model.head.weight.data_ptr()
    planned(model)
    assert model.head.weight.data_ptr() == address


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: x.masked_fill_(x > 0, 0.0),
    "through data": lambda x: x.data.zero_(),
    "with numpy": lambda x: x.numpy().fill(0.0),
    "through a view": lambda x: x[1:].mul_(2.0),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("write", WRITES)
def test_f4_arguments_that_a_forward_writes_to_are_as_before(write: str):
    class Writes(Net):
        def forward(self, x: Tensor, beside: dict[str, Any]) -> Tensor:
            WRITES[write](x)
            WRITES[write](beside["nested"][0])
            beside["array"] += 1.0
            return super().forward(x)

    x, nested, array = torch.randn(64, 32), torch.randn(32, 32), np.zeros(3)
    before, nested_before = x.clone(), nested.clone()
    version = x._version
    planned(Writes(), x, {"nested": [nested], "array": array})
    assert torch.equal(x, before)
    assert x._version == version
    assert torch.equal(nested, nested_before)
    assert not array.any()


def test_f4_what_a_loss_writes_to_is_as_before():
    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, output: Tensor) -> Tensor:
            self.seen += 1
            return loss_of(output)

    target, criterion = torch.ones(64, 32), Criterion()
    planned(loss=lambda y: criterion(y) + loss_of(y - target.mul_(0.5)))
    planned(loss=criterion)
    assert torch.equal(target, torch.ones(64, 32))
    assert criterion.seen == 0


def test_f4_a_chain_with_a_budget_writes_to_its_input_as_often_as_a_plain_one():
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x.data.add_(1.0)
            return self.layer(x.sign()).tanh()  # the same, however often it is written to

    layers = [Adds(), *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))]
    x = torch.zeros(8, 32)
    recoup.Sequential(*layers, memory="1 GiB")(x)
    assert torch.equal(x, torch.ones(8, 32))


def test_a_failing_forward_leaves_no_trace():
    model, x = fresh()
    before = [vars(module).copy() for module in model.modules()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    for register in (
        model.blocks[3].register_forward_pre_hook,
        model.blocks[3].up.register_full_backward_hook,
    ):
        handle = register(fails)
        with pytest.raises(ZeroDivisionError):
            recoup.plan(model, x, budget="1 GiB", loss=loss_of)
        handle.remove()
        assert [list(vars(module)) for module in model.modules()] == [list(b) for b in before]
        assert all(torch.equal(v, values[n]) for n, v in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), stream)
        assert all(p.grad is None for p in model.parameters())
    result_of(model, lambda: loss_of(model(x)).backward())


def test_a_plan_made_under_autocast_says_what_it_takes():
    """Made within a context in which the model has run before, and whose casts are not held."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Linear(64, 2048))
    x = torch.randn(256, 64)
    loss = lambda y: y.float().exp().sum().log()  # noqa: E731

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(model(x))
        value.backward()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)  # casts of the weights are cached from here on
        found = recoup.plan(model, x, loss=loss, blocks=blocks, holds_output=False)
        least, most = found.points[0].peak_bytes, found.points[-1].peak_bytes
        plans = [found.plan(least + (most - least) * k // 4) for k in range(5)]
    for plan in plans:
        with plan.applied():
            peak = recoup.measure(step, device="cpu", repeats=0).peak_bytes
        model.zero_grad()
        assert peak == plan.rehearsed_peak_bytes <= plan.budget_bytes
        assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.05)


# -- what is wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["abc", "", "-2 GiB", -1, 1.5, True, float("nan")])
def test_a_budget_that_is_none(budget: Any):
    with pytest.raises(ValueError, match="`budget`"):
        planned(budget=budget)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("budget", [0, 1, "1 KiB"])
def test_a_budget_that_is_too_low_is_told_one_that_is_not(budget: Any):
    with pytest.raises(BudgetError, match="`budget`") as caught:
        planned(budget=budget)
    planned(budget=caught.value.least_bytes)


class Calls(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def without_parameters() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Sigmoid()) for _ in range(4)))


BAD: dict[str, Any] = {
    "a name of nothing": ({"blocks": "nope.*"}, "matches the name of no module"),
    "nested": ({"blocks": ["blocks.0", "blocks.0.up"]}, "`blocks.0.up`, which is part of"),
    "everything": ({"blocks": ".*"}, "which is part of"),
    "of another": ({"blocks": [Block()]}, "no module of Net"),
    "none": ({"blocks": []}, "`blocks` is empty"),
    "a number": ({"blocks": [3]}, "`blocks` has int"),
    "never called": ({"blocks": ["blocks"]}, "calls none of them"),
    "no pattern": ({"blocks": "("}, "`blocks`"),
    "the model": ({"blocks": [""]}, "`blocks`"),
    "a module": ({"blocks": Block()}, "`blocks`"),
    "a vector": ({"loss": lambda y: y}, r"`loss` returned a tensor of shape \(64, 32\)"),
    "no tensor": ({"loss": lambda y: None}, "`loss` returned a NoneType"),
    "a dict": ({"loss": lambda y: {"a": y.sum()}}, "`loss` returned a dict"),
    "detached": ({"loss": lambda y: y.detach().sum()}, "nothing that requires a gradient"),
    "budget_of": ({"budget_of": "x"}, "`budget_of`"),
    "N13: a number of blocks": ({"blocks": 3}, "`blocks` is 3"),
    "N13: a number as a loss": ({"loss": 3}, "`loss` is 3"),
    "N13: the name of an optimizer": (
        {"optimizer": "adam", "budget_of": "total"},
        "`optimizer` is 'adam'",
    ),
    "N13: such a name for a step": ({"optimizer": "adam"}, "`optimizer` is 'adam'"),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("options", "text"),
    [pytest.param(*each, id=name) for name, each in BAD.items()],
)
def test_an_argument_that_is_wrong(options: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        planned(**options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (without_parameters, "nothing that requires a gradient"),
        (lambda: Net().requires_grad_(False), "nothing that requires a gradient"),
        (Calls, "calls none of them"),
    ],
)
def test_a_model_that_cannot_be_planned(make: Callable[[], nn.Module], text: str):
    with pytest.raises(ValueError, match=text):
        planned(make())


def test_a_model_that_is_none():
    with pytest.raises(ValueError, match="`model`"):
        planned(lambda x: x)


def test_blocks_that_are_named_twice_are_one():
    model, x = fresh()
    blocks = [*model.blocks, "blocks.0"]
    assert len(recoup.plan(model, x, budget="1 GiB", loss=loss_of, blocks=blocks).blocks) == 5


@pytest.mark.slow
def test_models_that_can_be_planned():
    leaf = torch.randn(64, 32, requires_grad=True)
    assert planned(without_parameters(), leaf).least_bytes > 0
    assert planned(Net().requires_grad_(False), leaf).least_bytes > 0
    assert planned(Net().eval()).least_bytes > 0
    with torch.no_grad():
        assert planned().least_bytes == planned().least_bytes
    model = Net()
    model.blocks.requires_grad_(False)
    model.stem.requires_grad_(False)
    plan = planned(model)
    # Of one block there is nothing to choose, beside the random state of its second run.
    assert 0 <= plan.most_bytes - plan.least_bytes <= torch.get_rng_state().nbytes


def test_arguments_on_another_device():
    model = Net()
    with pytest.raises(RuntimeError, match="device"):
        planned(model, torch.randn(64, 32, device="meta"))
    assert is_plain(model)


def test_a_block_that_cannot_run_again_is_an_error():
    class InPlace(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(width, width), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    with pytest.raises(RecoupError, match=r"`blocks.0` changes its input in place"):
        planned(Net(block=InPlace))


# -- totals --------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_total_counts_the_state_before_the_first_step(kind: str):
    model, x = fresh()
    optimizer = OPTIMIZERS[kind](model.parameters())
    stepped: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: stepped.append(1))
    values = [p.detach().clone() for p in model.parameters()]
    state = len(optimizer.state)
    options = {"budget_of": "total", "optimizer": optimizer}
    before = planned(model, x, **options)
    assert stepped == []
    assert len(optimizer.state) == state
    assert all(map(torch.equal, model.parameters(), values))
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    loss_of(model(x)).backward()
    optimizer.step()
    assert planned(model, x, **options).baseline_bytes == before.baseline_bytes
    assert before.least_bytes - before.baseline_bytes == planned(model, x).least_bytes
    with pytest.raises(BudgetError, match="alive before a step"):
        planned(model, x, **(options | {"budget": before.baseline_bytes}))


def test_a_state_that_cannot_be_told():
    model, _ = fresh()
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS):
        optimizer = kind(model.parameters())
        with pytest.raises(ValueError, match=r"`optimizer` is a .* Step it once"):
            planned(model, budget_of="total", optimizer=optimizer)
    with pytest.raises(ValueError, match="`optimizer`"):
        planned(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
