"""Weight noise whose deviation is trained or relative, and the divergence that it costs."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.distributions import kl_divergence as kl_of_torch
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.errors import ChangedError, ReplayError
from recoup.weights import applied, apply, disabled, draws, kl_divergence, remove, same_draw, update
from tests.oracle import hooks_in_force
from tests.unit.weights.plain_run import PlainRun
from tests.unit.weights.test_function import LAYERS, LoRA, multiplied, of_two_axes
from tests.unit.weights.test_function import double as double  # a fixture

LEARNED = ["tensor", "row", "weight"]


def noisy(layer, learned="row", std=0.3, **more):
    return recoup.weight_noise(layer, std=std, learned=learned, **more)


def eps(weight, seed):
    """What a deviation of 1 adds to a weight."""
    return draws.noised(torch.zeros_like(weight, requires_grad=False).detach(), seed, 1.0)


# -- values and gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("learned", [*LEARNED, None])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_are_those_of_the_written_out_noise(layer, learned, relative, dtype):
    torch.set_default_dtype(dtype)
    build, inputs = LAYERS[layer]
    how = {"std": 0.3, "learned": learned, "relative": relative}
    run = PlainRun(build(), lambda module: recoup.weight_noise(module, of_two_axes, **how))
    made = run.compare(*inputs())
    torch.set_default_dtype(torch.float32)
    assert len(made) == len(applied(run.module)) > 0
    stds = [p for name, p in run.module.named_parameters() if name.endswith("_std")]
    assert len(stds) == (len(made) if learned else 0)
    assert all(std.grad.abs().sum() > 0 for std in stds)
    assert hooks_in_force() is None


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("learned", LEARNED)
def test_the_gradient_is_the_one_of_differences(learned):
    layer, x = noisy(nn.Linear(3, 4), learned, relative=True), torch.randn(2, 3)
    scale = float(layer.get_parameter("weight").detach().square().mean().sqrt())

    def loss(std):
        with same_draw(seed=2):
            return functional_call(layer, {"weight_std": std}, (x,)).sin().sum()

    std = layer.weight_std.detach()
    layer.weight_std.grad = torch.autograd.grad(loss(layer.weight_std), layer.weight_std)[0]
    for place in range(std.numel()):
        step = torch.zeros(std.numel())
        step[place] = 1e-6
        step = step.view(std.shape)
        difference = (loss(std + step) - loss(std - step)) / 2e-6
        assert abs(difference - layer.weight_std.grad.flatten()[place]) < 1e-8
    with same_draw(seed=2):
        weight = layer(torch.eye(3)) - layer.bias
    drawn = (weight.T - layer.weight) / (std * scale)
    assert 0.1 < drawn.std() < 3  # a draw of deviation 1, times std and the root mean square


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 4), (5, 1), (5, 4)])
def test_a_parameter_of_any_shape_is_used_as_it_is(shape):
    std = nn.Parameter(torch.rand(shape) + 0.1)
    run = PlainRun(nn.Linear(4, 5), lambda module: recoup.weight_noise(module, std=std))
    run.compare(torch.randn(3, 4, requires_grad=True))
    assert run.module.weight_std is std
    assert std.grad.shape == shape


def test_shapes_names_and_the_first_values():
    model = nn.Sequential(nn.Conv1d(2, 3, 4), nn.Linear(3, 2))
    for learned, shapes in {
        "tensor": [(), ()],
        "row": [(3, 1, 1), (2, 1)],
        "weight": [(3, 2, 4), (2, 3)],
        "model": [(), ()],
    }.items():
        made = recoup.weight_noise(copy.deepcopy(model), r".\.weight", 0.25, learned=learned)
        stds = [made[0].weight_std, made[1].weight_std]
        assert [std.shape for std in stds] == shapes
        assert all(isinstance(std, nn.Parameter) and (std == 0.25).all() for std in stds)
        assert (stds[0] is stds[1]) == (learned == "model")
        assert "1.weight_std" in made.state_dict()
        shown = [repr(each) for each in applied(made)]
        assert shown == ["0.weight: weight_noise(std=weight_std)",
                         "1.weight: weight_noise(std=weight_std)"]  # fmt: skip
    norm = noisy(nn.LayerNorm(6), "row", relative=True, mode="always")
    assert norm.weight_std.shape == (6,)
    text = 'weight_noise(std=weight_std, relative=True, mode="always")'
    assert repr(applied(norm)[0].reparametrization) == text


def test_one_deviation_of_a_model_has_the_sum_of_the_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    one = recoup.weight_noise(copy.deepcopy(model), nn.Linear, 0.3, learned="model")
    each = recoup.weight_noise(copy.deepcopy(model), nn.Linear, 0.3, learned="tensor")
    x = torch.randn(2, 4)
    for noised in (one, each):
        with same_draw(seed=1):
            noised(x).square().sum().backward()
    want = each[0].weight_std.grad + each[1].weight_std.grad
    assert torch.allclose(one[0].weight_std.grad, want)
    assert len(list(one.parameters())) == 5


def test_a_parameter_with_two_names_has_one_deviation():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(7, 4)
            self.scores = nn.Linear(4, 7, bias=False)
            self.scores.weight = self.words.weight

        def forward(self, ids):
            return self.scores(self.words(ids))

    run = PlainRun(Tied(), lambda m: recoup.weight_noise(m, r".*\.weight", 0.3, learned="row"))
    assert len(run.compare(torch.randint(7, (3, 2)))) == 2  # two draws
    assert run.module.words.weight_std is run.module.scores.weight_std
    again = copy.deepcopy(run.module)
    assert again.words.weight_std is again.scores.weight_std
    assert again.words.weight_std is not run.module.words.weight_std


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("learned", [*LEARNED, None])
def test_among_all_the_others(learned, relative):
    def made(module):
        apply(module, LoRA(module.get_parameter("weight").detach()), mode="always")
        recoup.weight_noise(module, std=0.3, learned=learned, relative=relative)
        recoup.weight_norm(recoup.weight_dropout(module, p=0.3))

    run = PlainRun(nn.Linear(6, 5), made)
    assert len(run.compare(torch.randn(4, 6, requires_grad=True))) == 4
    run = PlainRun(nn.Linear(6, 5), lambda module: made(module) or remove_last(module))
    assert len(run.compare(torch.randn(4, 6, requires_grad=True))) == 3


def remove_last(module):
    """Leave the function out, so that the steps are no region."""
    step = applied(module)[-1].reparametrization
    attached = module.__dict__["_recoup_attached"].weights["weight"]
    attached.steps.remove(step)
    attached._has_functions = False
    step.removed_from(module, "weight")


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("learned", LEARNED)
def test_second_and_third_derivatives(learned, relative):
    layer, x = noisy(nn.Linear(3, 2), learned, relative=relative), torch.randn(2, 3)

    def output(std, bias):
        with same_draw(seed=1):
            return functional_call(layer, {"weight_std": std, "bias": bias}, (x,)).tanh()

    given = (torch.full_like(layer.weight_std, 0.4), torch.randn(2))
    given = tuple(value.detach().requires_grad_() for value in given)
    assert torch.autograd.gradcheck(output, given)
    assert torch.autograd.gradgradcheck(output, given)

    def slope(std, bias):
        return torch.autograd.grad(output(std, bias).sum(), std, create_graph=True)

    assert torch.autograd.gradgradcheck(slope, given)


@pytest.mark.usefixtures("double")
def test_second_derivatives_for_the_weight_under_a_norm():
    layer = recoup.weight_norm(noisy(nn.Linear(3, 2), "row"))
    x, seed = torch.randn(2, 3), 5
    parameters = [layer.get_parameter(name) for name in ("weight", "weight_g", "weight_std")]

    def curvature(output):
        first = torch.autograd.grad(output.tanh().sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), parameters)

    with same_draw(seed=seed):
        got = curvature(layer(x))
        drawn = SeedOf(layer, seed).seed
    v, g, std = parameters
    weight = v * (g / v.norm(dim=1, keepdim=True)) + std * eps(v, drawn)
    for ours, plain in zip(got, curvature(F.linear(x, weight, layer.bias)), strict=True):
        torch.testing.assert_close(ours, plain)


class SeedOf:
    """The seed of the noise of a layer under `same_draw(seed)`, from a run of its own."""

    def __init__(self, layer, seed):
        from tests.unit.weights.plain_run import recorded

        with recorded() as made, same_draw(seed=seed), torch.no_grad():
            layer(torch.zeros(1, layer.weight.shape[1], dtype=layer.weight.dtype))
        (self.seed,) = [each.seed for each in made if each.step.kind == "weight_noise"]


# -- a relative deviation --------------------------------------------------------------------------


def test_a_relative_deviation_is_in_units_of_the_root_mean_square():
    weight = torch.randn(300, 200) * 7
    layer = nn.Linear(200, 300, bias=False)
    layer.get_parameter("weight").data = weight.clone()
    recoup.weight_noise(layer, std=0.1, relative=True)
    used = layer(torch.eye(200)).T
    scale = weight.double().square().mean().sqrt()
    assert abs(float((used.detach() - weight).std() / (0.1 * scale)) - 1) < 0.01
    used.sum().backward()
    assert torch.equal(
        layer.get_parameter("weight").grad, torch.ones(300, 200)
    )  # a constant for the gradient
    layer.get_parameter("weight").data.zero_()
    assert torch.equal(layer(torch.eye(200)), torch.zeros(200, 300))
    assert repr(applied(layer)) == "[weight: weight_noise(std=0.1, relative=True)]"


def test_the_root_mean_square_of_many_numbers_is_exact():
    from recoup.weights.noise import root_mean_square

    weight = torch.randn(20_000, 500)
    exact = float(weight.double().square().mean().sqrt())
    assert abs(float(root_mean_square(weight)) / exact - 1) < 1e-6
    assert abs(float(root_mean_square(weight[:, 0].half())) / exact - 1) < 0.02
    for none in (torch.zeros(0, 3), torch.zeros(0)):
        assert float(root_mean_square(none)) == 0
    assert float(root_mean_square(torch.tensor(-3.0))) == 3


def test_it_is_relative_to_what_norm_and_dropout_leave():
    layer = recoup.weight_noise(nn.Linear(50, 40, bias=False), std=1e3, relative=True)
    recoup.weight_norm(layer)
    layer.weight_g.data.mul_(100)
    scale = (layer.weight_g.detach().square().sum() / layer.weight.numel()).sqrt()
    used = layer(torch.eye(50)).T
    assert abs(float(used.detach().std() / (1e3 * scale)) - 1) < 0.1
    recoup.weight_dropout(layer, p=1.0)
    assert torch.equal(layer(torch.eye(50)), torch.zeros(50, 40))


# -- precisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("learned", LEARNED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, learned, relative):
    layer = nn.Linear(6, 5).to(dtype)
    run = PlainRun(layer, lambda m: noisy(m, learned, relative=relative))
    run.compare(torch.randn(3, 6, dtype=dtype, requires_grad=True))
    assert run.module.weight_std.dtype is dtype


@pytest.mark.parametrize("shape", [(), (5, 1), (5, 6)])
def test_a_deviation_of_another_type_leaves_the_type_of_the_weight(shape):
    std = nn.Parameter(torch.full(shape, 0.3))
    layer = recoup.weight_noise(nn.Linear(6, 5).bfloat16(), std=std)
    x = torch.randn(3, 6).bfloat16()
    with same_draw(seed=1):
        output = layer(x)
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    assert std.grad.dtype is torch.float32
    used = eps(layer.get_parameter("weight"), SeedOf(layer, 1).seed)
    want = (x.float().sum(0).expand(5, 6).bfloat16().float() * used.float()).sum_to_size(shape)
    torch.testing.assert_close(std.grad, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("learned", LEARNED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_forward_and_backward_have_the_same_weight(dtype, learned, relative):
    layer = noisy(nn.Linear(300, 200, bias=False).to(dtype), learned, relative=relative)
    x = torch.eye(300, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)  # the weight of forward
    output.sum().backward()
    rows = torch.ones(300, 200, dtype=torch.bfloat16) @ output.detach().T
    assert torch.equal(x.grad, rows.float())


# -- surroundings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: recoup.checkpoint(model, x),
        lambda model, x: checkpoint(model, x, use_reentrant=False),
        lambda model, x: checkpoint(model, x, use_reentrant=True),
        lambda model, x: recoup.recompute(model)(x),
        lambda model, x: recoup.Sequential(*model, memory="sqrt")(x),
    ],
)
@pytest.mark.parametrize("with_function", [False, True])
def test_within_regions(run, with_function):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    for part in model:
        recoup.weight_noise(part, nn.Linear, 0.3, learned="row", relative=True)
        if with_function:
            apply(part, multiplied, "0.weight")
    x = torch.randn(3, 4, requires_grad=True)

    def gradients(call):
        model.zero_grad()
        torch.manual_seed(1)
        call(model, x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    want = gradients(lambda model, x: model(x))
    for got, expected in zip(gradients(run), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("learned", LEARNED)
def test_transforms_of_torch_func(learned, relative):
    layer, x = noisy(nn.Linear(4, 3), learned, relative=relative), torch.randn(2, 4)
    recoup.weight_norm(layer)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        with same_draw(seed=4):
            return functional_call(layer, parameters, (x,)).sin().sum()

    loss(parameters, x).backward()
    for name, got in grad(loss)(parameters, x).items():
        torch.testing.assert_close(got, parameters[name].grad, msg=name)
    each = vmap(grad(loss), (None, 0), randomness="same")(parameters, x.unsqueeze(1))
    for name, got in each.items():
        torch.testing.assert_close(got.sum(0), parameters[name].grad, msg=name)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("learned", [None, "row", "model"])
def test_transforms_of_a_tree(learned):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    recoup.weight_norm(noisy_tree(model, learned), nn.Linear)
    parameters, x = dict(model.named_parameters()), torch.randn(2, 4)

    def loss(parameters):
        with same_draw(seed=4):
            return functional_call(model, parameters, (x,)).sin().sum()

    loss(parameters).backward()
    for name, got in grad(loss)(parameters).items():
        torch.testing.assert_close(got, parameters[name].grad, msg=name)


def noisy_tree(model, learned):
    return recoup.weight_noise(model, nn.Linear, 0.3, learned=learned, relative=True)


def test_an_ensemble():
    layers = [noisy(nn.Linear(4, 3), "row", std, relative=True) for std in (0.1, 0.5)]
    parameters, _ = stack_module_state(layers)
    x = torch.randn(2, 4)

    def output(parameters):
        with same_draw(seed=4):
            return functional_call(layers[0], parameters, (x,))

    got = vmap(output, randomness="same")(parameters)
    for ours, layer in zip(got, layers, strict=True):
        with same_draw(seed=4):
            torch.testing.assert_close(ours, layer(x))


def test_on_the_meta_device():
    layer = noisy(nn.Linear(4, 3, device="meta"), "row", relative=True)
    assert layer.weight_std.is_meta
    layer(torch.ones(2, 4, device="meta")).sum().backward()
    assert layer.weight_std.grad.shape == (3, 1)


def test_off_and_in_evaluation():
    layer, x = noisy(nn.Linear(4, 4)), torch.randn(2, 4)
    raw = F.linear(x, layer.get_parameter("weight"), layer.bias)
    assert not torch.equal(layer(x), raw)
    with disabled(layer):
        assert torch.equal(layer(x), raw)
    assert torch.equal(layer.eval()(x), raw)
    with torch.no_grad():
        assert not torch.equal(layer.train()(x), raw)


@pytest.mark.parametrize("frozen", ["weight", "weight_std"])
def test_what_is_frozen_has_no_gradient(frozen):
    layer = noisy(nn.Linear(4, 4))
    layer.get_parameter(frozen).requires_grad_(False)
    layer(torch.randn(2, 4)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == (name == frozen)


# -- copies, states, removal -----------------------------------------------------------------------


@pytest.mark.parametrize("learned", [*LEARNED, "model"])
def test_copies_and_pickles(learned):
    layer, x = noisy(nn.Linear(4, 4), learned, 0.2, relative=True), torch.randn(2, 4)
    layer.weight_std.data.mul_(1.5)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for again in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert repr(applied(again)) == repr(applied(layer))
        with same_draw(seed=2):
            output = again(x)
        with same_draw(seed=2):
            assert torch.equal(output, layer(x))
        output.sum().backward()
        assert again.weight_std.grad is not None
        assert layer.weight_std.grad is None


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_without_deviations_leaves_them(assign):
    plain, model = nn.Linear(4, 3), noisy(nn.Linear(4, 3), "row", 0.25)
    model.load_state_dict(plain.state_dict(), assign=assign)
    assert torch.equal(model.get_parameter("weight"), plain.weight)
    assert (model.weight_std == 0.25).all()
    assert isinstance(model.weight_std, nn.Parameter)
    model.weight_std.data.fill_(0.5)
    other = noisy(nn.Linear(4, 3), "row")
    other.load_state_dict(model.state_dict(), assign=assign)
    assert (other.weight_std == 0.5).all()
    with pytest.raises(RuntimeError, match="weight_std"):
        nn.Linear(4, 3).load_state_dict(model.state_dict())


def test_removal_leaves_the_weight_alone():
    layer = noisy(nn.Linear(4, 3))
    before, x = layer.get_parameter("weight").detach().clone(), torch.randn(2, 4)
    output = layer(x).sum()
    assert list(remove(layer).state_dict()) == ["weight", "bias"]
    assert type(layer) is nn.Linear
    assert torch.equal(layer.get_parameter("weight"), before)
    output.backward()
    assert noisy(layer).weight_std.shape == (3, 1)


def test_conversion_to_another_type():
    layer = noisy(nn.Linear(4, 3)).double()
    assert layer.weight_std.dtype is torch.float64
    assert layer(torch.ones(1, 4).double()).dtype is torch.float64


def test_an_update_sets_what_is_learned():
    model = nn.Sequential(noisy(nn.Linear(4, 3)), recoup.weight_noise(nn.Linear(3, 2), std=0.1))
    std = model[0].weight_std
    update(model, std=0.75)
    assert model[0].weight_std is std
    assert (std == 0.75).all()
    for value in (lambda step: 0.1, torch.tensor(0.1)):
        with pytest.raises(ValueError, match="is learned, as `weight_std`"):
            update(model, std=value)
    with pytest.raises(ValueError, match="`std` is -1"):
        update(model, std=-1)
    assert (std == 0.75).all()
    assert repr(applied(model)[1].reparametrization) == "weight_noise(std=0.75)"


# -- what changes, and what is refused -------------------------------------------------------------


@pytest.mark.parametrize("with_function", [False, True])
@pytest.mark.parametrize("what", ["weight", "weight_std"])
def test_what_changes_between_forward_and_backward_is_an_error(what, with_function):
    layer = noisy(nn.Linear(2, 2))
    if with_function:
        apply(layer, multiplied)
    output = layer(torch.ones(1, 2, requires_grad=True)).sum()
    with torch.no_grad():
        layer.get_parameter(what).mul_(2)
    with pytest.raises((ChangedError, ReplayError)):
        output.backward()


REFUSED = [
    ({"learned": "column"}, "`learned` is 'column'"),
    ({"learned": True}, "`learned` is True"),
    ({"learned": "row", "std": lambda step: 0.1}, "with `learned` it must be a number"),
    ({"learned": "row", "std": torch.tensor(0.1)}, "with `learned` it must be a number"),
    ({"learned": "row", "std": -0.1}, "`std` is -0.1, but must be 0 or more"),
    ({"learned": "row", "std": True}, "`std` is True"),
    ({"learned": "row", "std": None}, "with `learned` it must be a number"),
    ({"learned": "row", "std": nn.Parameter(torch.ones(()))}, "trained as it is"),
    ({"std": nn.Parameter(torch.ones(3))}, "shape (3,), which cannot be broadcast to that of"),
    ({"std": nn.Parameter(torch.ones(1, 2, 2))}, "shape (1, 2, 2), which cannot be broadcast"),
    ({"std": nn.UninitializedParameter()}, "must have a shape"),
    ({"std": nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))}, "floating-point numbers"),
    ({"std": torch.tensor(0.5, requires_grad=True)}, "give `nn.Parameter(std)`"),
    ({"relative": 1}, "`relative` is 1"),
]


def test_a_name_that_is_taken():
    layer = nn.Linear(2, 2)
    layer.weight_std = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="`weight_std` exists already"):
        noisy(layer)
    assert type(layer) is nn.Linear


# -- the divergence --------------------------------------------------------------------------------


def kl_by_torch(weight, std, prior_std, prior_mean=0.0):
    std = std.abs().expand_as(weight) if isinstance(std, torch.Tensor) else std
    return kl_of_torch(Normal(weight, std), Normal(prior_mean, prior_std)).sum()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("prior", [(1.0, 0.0), (0.3, -0.7)])
@pytest.mark.parametrize("learned", LEARNED)
def test_the_divergence_is_the_one_of_torch(learned, prior):
    layer = noisy(nn.Conv1d(3, 4, 2), learned)
    layer.weight_std.data.copy_(torch.randn_like(layer.weight_std))  # of both signs
    parameters = [layer.get_parameter("weight"), layer.weight_std]
    want = kl_by_torch(*parameters, *prior)
    got = kl_divergence(layer, prior_std=prior[0], prior_mean=prior[1])
    torch.testing.assert_close(got, want)
    gradients = (torch.autograd.grad(each, parameters) for each in (got, want))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("double")
def test_the_divergence_is_differentiated_as_differences_are():
    layer = recoup.weight_norm(noisy(nn.Linear(3, 2), "row"))
    names = ["weight", "weight_g", "weight_std"]
    given = [layer.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def of(prior_std, prior_mean):
        def divergence(*values):
            with torch.no_grad():
                for name, value in zip(names, values, strict=True):
                    layer.get_parameter(name).copy_(value)
                return float(kl_divergence(layer, prior_std=prior_std, prior_mean=prior_mean))

        return divergence

    for prior in ((0.5, 0.2), (None, 0.0)):
        divergence = of(*prior)
        divergence(*given)
        layer.zero_grad()
        kl_divergence(layer, prior_std=prior[0], prior_mean=prior[1]).backward()
        found = {name: layer.get_parameter(name).grad.clone() for name in names}
        for place, name in enumerate(names):
            for index in range(given[place].numel()):
                ends = []
                for sign in (1, -1):
                    values = [value.detach().clone() for value in given]
                    values[place].view(-1)[index] += sign * 1e-6
                    ends.append(divergence(*values))
                slope = (ends[0] - ends[1]) / 2e-6
                assert abs(slope - float(found[name].flatten()[index])) < 1e-6, (name, index)


@pytest.mark.usefixtures("double")
def test_a_fitted_prior_is_the_best_one():
    layer = noisy(nn.Linear(5, 4), "row")
    layer.weight_std.data.uniform_(0.1, 2.0)
    layer.get_parameter("weight").data.add_(0.7)
    best = kl_divergence(layer, prior_std=None)
    weight, std = layer.get_parameter("weight").detach(), layer.weight_std.detach()
    mean = weight.mean()
    deviation = ((weight - mean).square() + std.square()).mean().sqrt()
    torch.testing.assert_close(best, kl_by_torch(weight, std, deviation, mean))
    for d in (-1e-3, 1e-3):
        for prior in ((deviation + d, mean), (deviation, mean + d)):
            assert kl_divergence(layer, prior_std=prior[0], prior_mean=prior[1]) > best


def test_a_tied_parameter_counts_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    weight, last = (
        model[0].get_parameter("weight").detach(),
        model[2].get_parameter("weight").detach(),
    )
    for learned in (None, "row", "tensor", "model"):
        noised = recoup.weight_noise(copy.deepcopy(model), nn.Linear, 0.2, learned=learned)
        want = kl_by_torch(weight, 0.2, 1.0) + kl_by_torch(last, 0.2, 1.0)
        torch.testing.assert_close(kl_divergence(noised, prior_std=1.0), want)
        got = kl_divergence(noised, r"2\..*", prior_std=1.0)
        torch.testing.assert_close(got, kl_by_torch(last, 0.2, 1.0))
    recoup.weight_noise(model[0], std=0.2), recoup.weight_noise(model[1], std=0.4)
    want = kl_by_torch(weight, 0.2, 1.0) + kl_by_torch(weight, 0.4, 1.0)
    torch.testing.assert_close(kl_divergence(model, prior_std=1.0), want)


def test_limits_of_the_divergence():
    layer = recoup.weight_noise(nn.Linear(3, 2), std=0.0)
    assert kl_divergence(layer, prior_std=1.0) == math.inf
    assert kl_divergence(layer, prior_std=None) == math.inf
    update(layer, std=-0.0 + 0.5)
    prior = nn.Parameter(torch.tensor(2.0))
    kl_divergence(layer, prior_std=prior).backward()
    assert prior.grad is not None
    empty = recoup.weight_noise(nn.Embedding(0, 2), std=0.5)
    assert kl_divergence(empty, prior_std=1.0) == 0
    assert kl_divergence(empty, prior_std=None) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prior_std": 0.0}, "`prior_std` is 0.0, but must be a number above 0"),
        ({"prior_std": -1}, "`prior_std` is -1"),
        ({"prior_std": "one"}, "`prior_std` is 'one'"),
        ({"prior_std": True}, "`prior_std` is True"),
        ({"prior_std": math.nan}, "`prior_std` is nan"),
        ({"prior_std": torch.ones(2)}, r"of shape \(2,\)"),
        ({"prior_std": 1.0, "prior_mean": math.inf}, "`prior_mean` is inf"),
        ({"prior_std": 1.0, "prior_mean": None}, "`prior_mean` is None"),
        ({"prior_std": None, "prior_mean": 0.5}, "`prior_mean` is given, but `prior_std` is None"),
        ({"prior_std": 1.0, "where": "bias"}, "matches no parameter"),
    ],
)
def test_divergences_that_are_refused(given, message):
    layer = recoup.weight_noise(nn.Linear(3, 2), std=0.5)
    with pytest.raises(ValueError, match=message):
        kl_divergence(layer, **given)


def test_nothing_that_is_noisy():
    with pytest.raises(ValueError, match="has weight noise"):
        kl_divergence(recoup.weight_dropout(nn.Linear(3, 2)), prior_std=1.0)
    with pytest.raises(ValueError, match="applied"):
        kl_divergence(nn.Linear(3, 2), prior_std=1.0)


# -- all of it -------------------------------------------------------------------------------------


class Written(nn.Module):
    """A variational network of two layers, written out."""

    def __init__(self, model):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(model[i].get_parameter("weight").detach()) for i in (0, 2)
        )
        self.biases = nn.ParameterList(nn.Parameter(model[i].bias.detach()) for i in (0, 2))
        self.stds = nn.ParameterList(nn.Parameter(model[i].weight_std.detach()) for i in (0, 2))

    def forward(self, x, seeds):
        made = [
            weight + std * eps(weight, seed)
            for weight, std, seed in zip(self.weights, self.stds, seeds, strict=True)
        ]
        return F.linear(F.linear(x, made[0], self.biases[0]).tanh(), made[1], self.biases[1])

    def divergence(self, prior_std):
        pairs = zip(self.weights, self.stds, strict=True)
        return sum(kl_by_torch(weight, std, prior_std) for weight, std in pairs)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("learned", LEARNED)
def test_training_is_that_of_a_network_that_is_written_out(learned):
    from tests.unit.weights.plain_run import recorded

    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    y = (3 * x).sin() + 0.1 * torch.randn(32, 1)
    ours = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    recoup.weight_noise(ours, nn.Linear, std=0.1, learned=learned)
    theirs = Written(copy.deepcopy(ours))
    optimizers = [torch.optim.Adam(each.parameters(), 0.02) for each in (ours, theirs)]
    losses = []
    for step in range(150):
        with recorded() as made, same_draw(seed=step):
            output = ours(x)
        seeds = [each.seed for each in made]
        pairs = (
            (output, kl_divergence(ours, prior_std=1.0)),
            (theirs(x, seeds), theirs.divergence(1.0)),
        )
        losses.append([F.mse_loss(out, y) * 50 + kl / 32 for out, kl in pairs])
        for loss, optimizer in zip(losses[-1], optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(*losses[-1], rtol=0, atol=1e-6)
    assert losses[-1][0] < 0.7 * losses[0][0]
    moved = (ours[0].weight_std - 0.1).abs().max()
    assert moved > 0.01
    torch.testing.assert_close(ours[2].weight_std, theirs.stds[1])


@pytest.mark.parametrize("learned", [None, "row"])
def test_the_divergence_of_a_relative_deviation(learned):
    torch.manual_seed(0)
    layer = recoup.weight_noise(nn.Linear(6, 4), std=0.5, relative=True, learned=learned)
    raw = layer.get_parameter("weight").detach()
    std = 0.5 * raw.square().mean().sqrt()
    want = kl_of_torch(Normal(raw, std.expand_as(raw)), Normal(0.0, 1.0)).sum()
    torch.testing.assert_close(kl_divergence(layer, prior_std=1.0), want)
