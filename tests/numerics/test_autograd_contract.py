"""What autograd promises of any module, it promises of ours; else an error says so."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import ChangedError, ReplayError
from recoup.invertible import AdditiveCoupling, AffineCoupling, Chain, DriftGuard
from tests.oracle import assert_same_tensor, assert_same_tensors, hooks_in_force, loss_of_all
from tests.zoo import chain_of, couplings, glow, invertible_chain_of, leaf

RECOMPUTING = ["sqrt", "log", 1, 3]
SEED = 5


class Case:
    """A chain in some mode and in linear mode, over the same parameters' values."""

    def __init__(self, memory, name="dropout"):
        build = invertible_chain_of if memory == "constant" else chain_of
        modules, self.x = build(name)
        kind = Chain if memory == "constant" else recoup.Sequential
        self.linear = kind(*copy.deepcopy(modules), memory="linear")
        self.model = kind(*modules, memory=memory)
        self.rtol = 1e-10 if memory == "constant" else 0.0

    def same(self, act):
        """Compare what `act(model, x)` returns, a dictionary, with the linear run's."""
        results = []
        for model in (self.model, self.linear):
            torch.manual_seed(SEED)
            results.append(act(model, self.x.detach().requires_grad_(self.x.requires_grad)))
        got, want = results
        assert_same_tensors(got, want, self.rtol)
        assert hooks_in_force() is None
        return got


@pytest.fixture(params=[*RECOMPUTING, "constant"])
def case(request):
    return Case(request.param)


def named_gradients(model, x):
    return {"x": x.grad} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("of", ["x", "parameters", "both", "some"])
def test_grad_of(case, of):
    def act(model, x):
        parameters = dict(model.named_parameters())
        some = {name: p for name, p in parameters.items() if name.startswith(("1.", "4."))}
        asked = {
            "x": {"x": x},
            "parameters": parameters,
            "both": {"x": x, **parameters},
            "some": some,
        }
        wanted = asked[of]
        assert wanted
        found = torch.autograd.grad(loss_of_all(model(x)), list(wanted.values()))
        assert all(p.grad is None for p in parameters.values())
        return dict(zip(wanted, found, strict=True))

    case.same(act)


def test_backward_for_some_inputs(case):
    def act(model, x):
        some = [p for name, p in model.named_parameters() if name.startswith("2.")]
        loss_of_all(model(x)).backward(inputs=some)
        return named_gradients(model, x)

    assert sum(value is not None for value in case.same(act).values()) > 0


def test_the_graph_retained_and_used_three_times(case):
    def act(model, x):
        loss = loss_of_all(model(x))
        results = {}
        for time in range(3):
            loss.backward(retain_graph=time < 2)
            results |= {f"{n}, {time}": g.clone() for n, g in named_gradients(model, x).items()}
        return results

    case.same(act)


def test_two_losses_of_one_forward(case):
    def act(model, x):
        output = model(x)
        value = output[0] if isinstance(output, tuple) else output
        value.sum().backward(retain_graph=True)
        (value * value).sum().backward()
        return named_gradients(model, x)

    case.same(act)


def test_a_part_of_the_graph_first(case):
    def act(model, x):
        loss = loss_of_all(model(x))
        last = [p for n, p in model.named_parameters() if n.startswith("5.")]
        first = [p for n, p in model.named_parameters() if n.startswith("0.")]
        middle = [p for n, p in model.named_parameters() if n.startswith("2.")]
        results = []
        for part in (last, first, middle):
            results += torch.autograd.grad(loss, part, retain_graph=True)
        loss.backward()
        return named_gradients(model, x) | {str(i): g for i, g in enumerate(results)}

    case.same(act)


def test_the_graph_used_again_while_it_is_used(case):
    """A hook that takes a gradient in the middle of a backward."""

    def act(model, x):
        inner = []
        loss = loss_of_all(model(x))
        weight = next(p for n, p in model.named_parameters() if n.startswith("4."))
        weight.register_hook(
            lambda g: inner.extend(torch.autograd.grad(loss, x, retain_graph=True))
        )
        loss.backward(retain_graph=True)
        return named_gradients(model, x) | {"inner": inner[0]}

    case.same(act)


@pytest.mark.parametrize("order", ["first", "last", "together"])
def test_two_forwards_before_backward(case, order):
    def act(model, x):
        one, two = model(x), model(x * 0.5)
        losses = [loss_of_all(one), loss_of_all(two)]
        if order == "together":
            sum(losses).backward()
        else:
            for loss in losses if order == "first" else reversed(losses):
                loss.backward()
        return named_gradients(model, x)

    case.same(act)


@pytest.mark.parametrize("memory", [*RECOMPUTING, "constant"])
def test_two_forwards_with_norms(memory):
    case = Case(memory, "norms" if memory == "constant" else "convolutions and norms")

    def act(model, x):
        one, two = model(x), model(x * 0.5)
        loss_of_all(one).backward()
        loss_of_all(two).backward()
        return named_gradients(model, x) | dict(model.named_buffers())

    case.same(act)


def test_gradient_of_the_gradient(case):
    def act(model, x):
        loss = loss_of_all(model(x))
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (first * first).sum().backward()
        return named_gradients(model, x)

    case.same(act)


@pytest.mark.parametrize("memory", ["sqrt", 1])
def test_gradgradcheck_of_a_chain(memory):
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double() for _ in range(4)]
    model, x = recoup.Sequential(*modules, memory=memory), leaf(2, 3)
    assert torch.autograd.gradcheck(model, (x,))
    assert torch.autograd.gradgradcheck(model, (x,))


@pytest.mark.parametrize("build", [lambda: couplings(0.0), lambda: glow(split=True)])
def test_gradcheck_of_an_invertible_chain(build):
    torch.manual_seed(0)
    modules = build()
    model = Chain(*modules, memory="constant").double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = leaf(2, 6) if len(modules) == 6 else leaf(2, 2, 4, 4)
    model(x)

    def flat(x):
        y, log_det = model(x)
        return (*y, log_det) if isinstance(y, tuple) else (y, log_det)

    # A backward of rounded inputs is not the same to the bit when it is repeated.
    assert torch.autograd.gradcheck(flat, (x,), nondet_tol=1e-12, fast_mode=True)


def test_every_parameter_hook_fires_once(case):
    def act(model, x):
        fired = {}
        for name, p in model.named_parameters():
            p.register_hook(lambda g, n=name: fired.update({n: fired.get(n, 0) + 1}))
            p.register_post_accumulate_grad_hook(
                lambda p, n=f"after {name}": fired.update({n: fired.get(n, 0) + 1})
            )
        loss_of_all(model(x)).backward()
        assert fired == dict.fromkeys(fired, 1)
        assert len(fired) == 2 * len(list(model.parameters()))
        return named_gradients(model, x)

    case.same(act)


def test_hooks_of_tensors_and_modules(case):
    def act(model, x):
        calls = []
        x.register_hook(lambda g: g * 2)
        stages = list(model)
        stages[1].register_full_backward_hook(lambda *_: calls.append("full"))
        stages[3].register_full_backward_pre_hook(lambda *_: calls.append("pre"))
        output = model(x)
        value = output[0] if isinstance(output, tuple) else output
        value.register_hook(lambda g: g * 3)
        loss_of_all(output).backward()
        assert calls == ["pre", "full"]
        return named_gradients(model, x)

    case.same(act)


def test_anomaly_mode(case):
    def act(model, x):
        with pytest.warns(UserWarning, match=r"Anomaly"), torch.autograd.detect_anomaly():
            loss_of_all(model(x)).backward()
        return named_gradients(model, x)

    case.same(act)


def right_or(error, case, act):
    """`act` in the mode of the case does what it does in linear mode, or raises `error`."""
    torch.manual_seed(SEED)
    try:
        got = act(case.model, case.x.detach().requires_grad_())
    except error as raised:
        assert hooks_in_force() is None
        return str(raised)
    torch.manual_seed(SEED)
    assert_same_tensors(got, act(case.linear, case.x.detach().requires_grad_()), case.rtol)
    return "right"


def test_output_changed_in_place(case):
    def act(model, x):
        output = model(x)
        value = output[0] if isinstance(output, tuple) else output
        value.mul_(2.0)
        loss_of_all(output).backward()
        return named_gradients(model, x)

    said = right_or((ChangedError, RuntimeError), case, act)
    assert said == "right" or "chang" in said or "modified" in said


def test_early_latent_changed_in_place():
    modules, x = invertible_chain_of("multi-scale")
    model = Chain(*modules, memory="constant")
    y, _ = model(x)
    with torch.no_grad():
        y[0].mul_(2.0)
    with pytest.raises(ChangedError, match=r"output of the chain was changed in place"):
        loss_of_all(y).backward()


def test_input_changed_in_place(case):
    def act(model, x):
        changed = x * 1.0
        output = model(changed)
        with torch.no_grad():
            changed.mul_(3.0)
        loss_of_all(output).backward()
        return named_gradients(model, x)

    # The plain run raises too.
    said = right_or(ChangedError, case, act)
    assert "The input of module `0`" in said
    assert "was changed in place" in said
    if isinstance(case.model, Chain) and case.model.memory == "constant":
        case.model.drift = DriftGuard("raise")  # it needs its output alone
        act(case.model, case.x.detach().requires_grad_())


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_a_stage_that_changes_what_it_is_given(memory):
    """Adding to its input in place is what plain autograd allows here, so right or an error."""

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6).double())

        def forward(self, x):
            return x.add_(1.0).sin() * self.weight

    modules = [nn.Linear(6, 6).double(), *(Adds() for _ in range(9))]
    x = leaf(4, 6)

    def act(kind):
        model = kind(*copy.deepcopy(modules))
        y = model(x.detach().requires_grad_())
        y.sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    want = act(nn.Sequential)
    try:
        got = act(lambda *modules: recoup.Sequential(*modules, memory=memory))
    except (ChangedError, ReplayError) as raised:
        said = str(raised)
    else:
        assert_same_tensors(got, want)
        said = "in place"
    assert "in place" in said


class Breaks(nn.Module):
    """Raises in its n-th call."""

    def __init__(self):
        super().__init__()
        # Beside the module: its own numbers would be put back as they were.
        self.outside = types.SimpleNamespace(at=-1, num_calls=0)

    def forward(self, x):
        self.outside.num_calls += 1
        if self.outside.num_calls == self.outside.at:
            raise KeyError("broken")
        return nn.functional.dropout((x / 2).sin(), 0.3)


def breaking(memory):
    """A model with norms and draws, and the modules in it that can be told to break."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(3 if memory == "constant" else 6).double() for _ in range(4)]
    breaks = [Breaks() for _ in range(5)]
    if memory == "constant":
        parts = [nn.Sequential(n, b) for n, b in zip([*norms, nn.Identity()], breaks, strict=True)]
        return Chain(*(AdditiveCoupling(part) for part in parts), memory=memory), norms, breaks
    parts = [
        nn.Sequential(nn.Linear(6, 6).double(), n, b)
        for n, b in zip([*norms, nn.Identity()], breaks, strict=True)
    ]
    return recoup.Sequential(*parts, memory=memory), norms, breaks


@pytest.mark.parametrize("memory", [*RECOMPUTING, "constant"])
@pytest.mark.parametrize("place", range(5))
def test_an_exception_leaves_nothing_behind(memory, place):
    model, norms, breaks = breaking(memory)
    x = leaf(4, 6)

    def state():
        return [(norm.momentum, norm.training, norm.num_batches_tracked.clone()) for norm in norms]

    before = state()
    breaks[place].outside.at = 1  # in forward
    with pytest.raises(KeyError, match=r"broken"):
        model(x)
    assert hooks_in_force() is None
    assert torch.is_grad_enabled()
    assert [s[:2] for s in state()] == [s[:2] for s in before]

    for breaking_module in breaks:
        breaking_module.outside.num_calls = 0
    breaks[place].outside.at = -1
    torch.manual_seed(SEED)
    loss = loss_of_all(model(x))
    before, stream = state(), torch.get_rng_state()
    breaks[place].outside.at = breaks[place].outside.num_calls + 1  # in backward, if it runs there
    try:
        loss.backward(retain_graph=True)
    except KeyError:
        breaks[place].outside.at = -1
    assert hooks_in_force() is None
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), stream)
    for got, want in zip(state(), before, strict=True):
        assert got[:2] == want[:2]
        assert torch.equal(got[2], want[2])


@pytest.mark.parametrize("memory", [*RECOMPUTING, "constant"])
@pytest.mark.parametrize("place", range(5))
def test_a_graph_is_of_use_after_an_exception_in_backward(memory, place):
    model, _, breaks = breaking(memory)
    x = leaf(4, 6)
    torch.manual_seed(SEED)
    loss = loss_of_all(model(x))
    breaks[place].outside.at = breaks[place].outside.num_calls + 1
    try:
        loss.backward(retain_graph=True)
    except KeyError:
        x.grad = None
    breaks[place].outside.at = -1
    (again,) = torch.autograd.grad(loss, x)
    plain = copy.deepcopy(model)
    plain.memory = "linear"
    torch.manual_seed(SEED)
    (want,) = torch.autograd.grad(loss_of_all(plain(x)), x)
    assert_same_tensor("x", again, want, 1e-10 if memory == "constant" else 0.0)


def test_output_never_used(case):
    def act(model, x):
        model(x)
        loss_of_all(model(x * 2)).backward()
        return named_gradients(model, x)

    case.same(act)


def test_the_input_is_used_beside_the_chain(case):
    def act(model, x):
        h = x.tanh()
        (loss_of_all(model(h)) + (h * h).sum() + (model(h.relu())[0] * 2).sum()).backward()
        return named_gradients(model, x)

    case.same(act)


def test_an_optimizer_that_steps_within_backward(case):
    def act(model, x):
        def step(p):
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        loss_of_all(model(x)).backward()
        return {"x": x.grad} | {name: p.detach() for name, p in model.named_parameters()}

    case.same(act)


def test_an_optimizer_within_backward_and_a_shared_block():
    modules, x = chain_of("shared across depth")
    case = Case("sqrt")
    case.model = recoup.Sequential(*copy.deepcopy(modules), memory="sqrt")
    case.linear, case.x = recoup.Sequential(*modules), x

    def act(model, x):
        def step(p):
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        loss_of_all(model(x)).backward()
        return {"x": x.grad} | {name: p.detach() for name, p in model.named_parameters()}

    said = right_or(ChangedError, case, act)
    assert said == "right" or "was changed in place" in said


def test_a_gradient_taken_inside_a_stage():
    class TakesGradient(nn.Module):
        def forward(self, x):
            with torch.enable_grad():
                (g,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
            return g

    modules, x = [nn.Tanh(), TakesGradient(), nn.Tanh(), nn.Tanh()], leaf(3)
    found = [
        torch.autograd.grad(model(x).sum(), x)[0]
        for model in (nn.Sequential(*modules), recoup.Sequential(*modules, memory=1))
    ]
    assert torch.equal(*found)
    assert hooks_in_force() is None


def test_functional_call_with_other_tensors():
    modules, x = chain_of("mlp")
    model = recoup.Sequential(*modules, memory="sqrt")
    others = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    y = torch.func.functional_call(model, others, (x,))
    with pytest.raises(ChangedError, match=r"did not repeat its first run"):
        y.sum().backward()

    def inside(x):
        return loss_of_all(nn.Sequential.forward(model, x))

    want = torch.autograd.grad(inside(x), list(model.parameters()))

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return torch.autograd.grad(loss_of_all(self.model(x)), list(self.model.parameters()))

    renamed = {f"model.{name}": value for name, value in others.items()}
    got = torch.func.functional_call(Step(), renamed, (x,))
    for a, b in zip(got, want, strict=True):
        assert_same_tensor("a gradient", a, b)


@pytest.mark.parametrize("memory", ["sqrt", "constant"])
def test_functional_transforms_are_refused(memory):
    case = Case(memory)
    with pytest.raises(RuntimeError, match=r"saved tensor hooks"):
        torch.func.grad(lambda x: loss_of_all(case.model(x)))(case.x.detach())
    assert hooks_in_force() is None


@pytest.mark.parametrize("memory", ["linear", *RECOMPUTING, "constant"])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_done(memory, without):
    case = Case(memory)

    seen = []
    for stage in case.model:
        stage.register_forward_hook(lambda *_: seen.append(hooks_in_force()))
    model = case.model.eval()
    before = torch.get_rng_state()
    with without():
        output = model(case.x)
    assert seen == [None] * len(model)
    assert torch.equal(torch.get_rng_state(), before)
    first = output[0] if isinstance(output, tuple) else output
    assert not first.requires_grad


def test_a_change_of_halves_in_affine_couplings_keeps_the_callers_storage():
    modules = [AffineCoupling(nn.Linear(3, 6).double()) for _ in range(4)]
    x = leaf(4, 6)
    h = x * 1.0
    kept = h.detach().clone()
    y, log_det = Chain(*modules, memory="constant")(h)
    out = y.detach().clone()
    loss_of_all((y, log_det)).backward()
    assert torch.equal(h, kept)
    assert torch.equal(y, out)
    assert h.untyped_storage().nbytes() == kept.untyped_storage().nbytes()
