"""What is refused: each error names the argument or the parameter, and a way out."""

from __future__ import annotations

import copy
import re
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

import recoup
from recoup.errors import ChangedError
from recoup.weights import applied, disabled, enabled, remove, same_draw
from tests.oracle import hooks_in_force
from tests.unit.weights.plain_run import mask, recorded


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These layers are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


APPLY = {
    "dropout": recoup.weight_dropout,
    "noise": recoup.weight_noise,
    "norm": recoup.weight_norm,
}


@pytest.fixture(params=APPLY)
def apply(request):
    return APPLY[request.param]


def snapshot(module):
    """All by which a module could show that something was applied to it."""
    return [
        (type(part), sorted(vars(part)), {name: id(p) for name, p in part._parameters.items()})
        for part in module.modules()
    ]


def refused(module, call, *parts):
    """Check that `call` raises ValueError with these parts, and leaves `module` as it was."""
    before = snapshot(module)
    values = {name: p.detach().clone() for name, p in module.named_parameters() if not is_lazy(p)}
    stream = torch.get_rng_state()
    with pytest.raises(ValueError) as error:  # noqa: PT011 - what it says is checked below
        call()
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in {str(error.value)!r}"
    assert snapshot(module) == before
    assert all(torch.equal(value, module.get_parameter(name)) for name, value in values.items())
    assert torch.equal(stream, torch.get_rng_state())


# -- arguments -------------------------------------------------------------------------------------


def test_no_parameter_matches(apply):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    refused(model, lambda: apply(model, "weight"), "`pattern`", "'weight'", "0.weight", "...")
    # What would match the beginning or the middle does not match.
    refused(model, lambda: apply(model, r"0\.w"), "`pattern`", "whole")
    refused(model, lambda: apply(model, r"eight"), "`pattern`")
    refused(model, lambda: apply(nn.ReLU(), ".*"), "`pattern`", "none")
    half = nn.Linear(2, 2, bias=False)
    refused(half, lambda: apply(half, "bias"), "`pattern`", "weight")


@pytest.mark.parametrize("pattern", ["*", "(", None, 3, b"weight", [], ["weight", 3], [["weight"]]])
def test_no_regular_expression(apply, pattern):
    linear = nn.Linear(2, 2)
    refused(linear, lambda: apply(linear, pattern), "`pattern`", "pattern")


def test_a_compiled_pattern(apply):
    assert len(applied(apply(nn.Linear(2, 2), re.compile("WEIGHT", re.IGNORECASE)))) == 1


@pytest.mark.parametrize("module", [None, 3, nn.Linear, "linear", [nn.Linear(2, 2)], torch.ones(2)])
def test_no_module(apply, module):
    linear = nn.Linear(2, 2)
    refused(linear, lambda: apply(module), "`module`", "nn.Module")


@pytest.mark.parametrize("call", [applied, remove, disabled, enabled])
@pytest.mark.parametrize("module", [None, 3, nn.Linear])
def test_no_module_for_what_looks_at_modules(call, module):
    linear = nn.Linear(2, 2)
    refused(linear, lambda: call(module), "`module`", "nn.Module")


@pytest.mark.parametrize(
    "p",
    [
        -0.1,
        1.1,
        1 + 1e-9,
        float("nan"),
        float("inf"),
        None,
        "0.5",
        True,
        0.5j,
        [0.5],
        torch.tensor([0.5, 0.5]),
        torch.tensor([0.5]),
        torch.tensor(-1.0),
        torch.tensor(float("nan")),
        torch.tensor(True),
        lambda step: -1.0,
        lambda step: "0.5",
        lambda step: torch.tensor([0.1, 0.2]),
    ],
)
def test_p_out_of_range(p):
    linear = nn.Linear(2, 2)
    refused(linear, lambda: recoup.weight_dropout(linear, p=p), "`p`", "from 0 to 1")


@pytest.mark.parametrize(
    "std",
    [
        -0.1,
        float("nan"),
        float("inf"),
        None,
        "0.5",
        True,
        torch.tensor([0.5, 0.5]),
        torch.tensor(-1.0),
        torch.tensor(float("inf")),
        lambda step: -1.0,
    ],
)
def test_std_out_of_range(std):
    linear = nn.Linear(2, 2)
    refused(linear, lambda: recoup.weight_noise(linear, std=std), "`std`", "0 or more")


RATES = {
    "tensor": torch.tensor(0.5, requires_grad=True),
    "result": nn.Parameter(torch.tensor(0.5)).square(),
    "function": lambda step: torch.tensor(0.5, requires_grad=True),
}


@pytest.mark.parametrize("p", [0, 1, 0.0, 1.0, torch.tensor(0.5), torch.tensor(1), lambda _: 0])
def test_p_in_range(p):
    linear = recoup.weight_dropout(nn.Linear(2, 2), p=p)
    linear(torch.ones(1, 2)).sum().backward()


def test_numbers_of_numpy():
    np = pytest.importorskip("numpy")
    for p in (np.float32(0.5), np.float64(0.5), np.int64(1)):
        recoup.weight_dropout(nn.Linear(2, 2), p=p)(torch.ones(1, 2))
    with same_draw(np.int64(3)):
        pass


@pytest.mark.parametrize("mode", ["train", "Training", "eval", "", None, True, 1])
@pytest.mark.parametrize("apply", [recoup.weight_dropout, recoup.weight_noise])
def test_mode(apply, mode):
    linear = nn.Linear(2, 2)
    refused(linear, lambda: apply(linear, mode=mode), "`mode`", '"training"', '"always"')


@pytest.mark.parametrize("axes", [(2,), (-3,), (0, 5), [7], 1, "0", ("a",), (1.0,), (None,), None])
def test_axes(axes):
    linear = nn.Linear(2, 2)
    refused(linear, lambda: recoup.weight_dropout(linear, axes=axes), "`axes`")
    model = nn.Sequential(nn.Conv1d(2, 2, 2), linear)
    refused(model, lambda: recoup.weight_dropout(model, ".*weight", axes=axes), "`axes`")


def test_axes_that_one_of_the_parameters_lacks():
    """All is checked before anything is changed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    call = lambda: recoup.weight_dropout(model, ".*weight", axes=(1,))  # noqa: E731
    refused(model, call, "`axes`", "`1.weight`", "(2,)")


@pytest.mark.parametrize("dim", [2, -3, 1.0, "0", (0,)])
def test_dim(dim):
    linear = nn.Linear(2, 2)
    refused(linear, lambda: recoup.weight_norm(linear, dim=dim), "`dim`", "None")


@pytest.mark.parametrize(
    "seed",
    [
        -1,
        0.5,
        "3",
        True,
        False,
        (1,),
    ],
)
def test_seeds(seed):
    with pytest.raises(ValueError, match="`seed`"):
        same_draw(seed)


# -- parameters ------------------------------------------------------------------------------------


def test_a_lazy_parameter(apply):
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    refused(model, lambda: apply(model, r"0\.weight"), "`0.weight`", "batch")
    model(torch.ones(1, 3))
    apply(model, r"0\.weight")(torch.ones(1, 3))


def test_a_forward_replaced_on_the_instance(apply):
    linear = nn.Linear(2, 2)
    linear.forward = types.MethodType(lambda self, x: x, linear)
    refused(linear, lambda: apply(linear), "`forward`", "before")
    tree = nn.Sequential(linear)
    refused(tree, lambda: apply(tree, r"0\.weight"), "`forward`", "before")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script(apply):
    script = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"`module` has a .*Script"):
        apply(script)
    tree = nn.Sequential(script)
    with pytest.raises(ValueError, match=r"`module` has a .*Script"):
        apply(tree, r"0\.weight")


def test_a_norm_whose_name_is_taken():
    """A parameter of the user's is not overwritten."""

    class Taken(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.weight_g = nn.Parameter(torch.ones(3))

    taken = Taken()
    refused(taken, lambda: recoup.weight_norm(taken), "`weight_g`")
    tree = nn.Sequential(nn.Linear(2, 2), taken)
    refused(tree, lambda: recoup.weight_norm(tree, r".*\.weight"), "weight_g")
    assert taken.weight_g.shape == (3,)


def test_a_parametrization_of_torch_beneath():
    """Its own parameter can be given noise, which it then sees."""

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    linear = parametrize.register_parametrization(nn.Linear(4, 4, bias=False), "weight", Doubled())
    recoup.weight_dropout(linear, r"parametrizations\.weight\.original")
    raw = linear.parametrizations.weight.get_parameter("original")
    x = torch.eye(4)
    with recorded() as made:
        y = linear(x)
    assert len(made) == 1
    assert torch.equal(y.T, 2 * raw * mask(raw, made[0]))


def test_the_fast_path_of_attention():
    """In evaluation, an encoder layer of torch reads the weights of its attention itself."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    recoup.weight_dropout(layer, r"self_attn\.in_proj_weight", mode="always")
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        assert not torch.equal(layer(x), layer(x))


def test_a_norm_of_two_uses_of_one_parameter():
    """One parameter cannot be left with two products: an error, or both uses as they were."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Linear(3, 3, bias=False) for _ in range(2))
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.a(x), self.b(x)

    twice = recoup.weight_norm(Twice(), ".*weight")
    with torch.no_grad():
        twice.a.weight_g.mul_(2)
        twice.b.weight_g.mul_(3)
    x = torch.randn(2, 3)
    before = twice(x)
    try:
        remove(twice)
    except ValueError as error:
        assert "weight" in str(error)  # noqa: PT017
        return
    for a, b in zip(before, twice(x), strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_to_remove():
    linear = nn.Linear(2, 2)
    refused(linear, lambda: remove(linear), "`pattern`", "applied")
    recoup.weight_dropout(linear)
    refused(linear, lambda: remove(linear, "bias"), "`pattern`", "applied")
    refused(linear, lambda: remove(linear, "weigh"), "`pattern`")
    refused(linear, lambda: remove(linear, "("), "`pattern`", "regular expression")
    remove(linear)
    refused(linear, lambda: remove(linear), "`pattern`", "applied")


def test_nothing_applied():
    assert applied(nn.Linear(2, 2)) == []
    with disabled(nn.Linear(2, 2)), enabled(nn.Linear(2, 2)):
        pass


# -- raw weights that change -----------------------------------------------------------------------

CHANGES = {
    "add_": lambda p: p.add_(1.0),
    "copy_": lambda p: p.copy_(torch.zeros_like(p)),
    "a row": lambda p: p[0].zero_(),
    "a detached view": lambda p: p.detach().view(-1)[:3].mul_(2.0),
    "init": nn.init.zeros_,
    "norm of an embedding": lambda p: torch.embedding_renorm_(p, torch.tensor([0]), 1e-3, 2.0),
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [
        (lambda: nn.Linear(4, 4), "weight", (3, 4)),
        (lambda: nn.LSTM(4, 4), "weight_hh_l0", (3, 2, 4)),
        (lambda: nn.GRUCell(4, 4), "weight_ih", (3, 4)),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "1.weight", (3, 4)),
    ],
)
def test_a_raw_weight_changed_before_backward(kind, name, size, change, apply):
    module = apply(kind(), re.escape(name))
    output = module(torch.randn(size, requires_grad=True))
    loss = (output[0] if isinstance(output, tuple) else output).sum()
    parameter = module.get_parameter(name)
    with torch.no_grad():
        CHANGES[change](parameter)
    with pytest.raises(ChangedError, match=rf"`{name}` of \w+ was changed in place"):
        loss.backward()
    assert hooks_in_force() is None


def test_a_weight_changed_past_its_version():
    """`param.data.mul_` is what torch does not count: its own graph goes on with the new values."""
    found = {}
    for way in ("plain", "checkpoint", "dropout"):
        linear = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            linear.get_parameter("weight").copy_(torch.arange(16.0).view(4, 4))
        x = torch.ones(3, 4, requires_grad=True)
        if way == "dropout":
            recoup.weight_dropout(linear, p=0.5)
        with recorded() as made:
            loss = (recoup.checkpoint(linear, x) if way == "checkpoint" else linear(x)).sum()
        linear.get_parameter("weight").data.mul_(2.0)
        loss.backward()
        raw = linear.get_parameter("weight")
        used = raw * mask(raw, made[0]) if made else raw
        assert torch.equal(x.grad, used.sum(0).expand(3, -1))
        found[way] = x.grad
    assert torch.equal(found["plain"], found["checkpoint"])


@pytest.mark.parametrize("dim", [0, None])
@pytest.mark.parametrize("name", ["weight", "weight_g"])
def test_a_norm_whose_parameters_change(name, dim):
    """Also where only the gradients of the parameters themselves need them."""
    linear = recoup.weight_norm(nn.Linear(4, 4), dim=dim)
    loss = linear(torch.randn(3, 4)).sum()
    with torch.no_grad():
        linear.get_parameter(name).mul_(2.0)
    with pytest.raises(ChangedError, match="`weight`"):
        loss.backward()


def test_a_magnitude_changed_before_backward():
    linear = recoup.weight_norm(nn.Linear(4, 4))
    y = linear(torch.randn(3, 4, requires_grad=True))
    with torch.no_grad():
        linear.weight_g.mul_(2.0)
    with pytest.raises(ChangedError, match="operand of `weight` of Linear was changed in place"):
        y.sum().backward()


def test_a_change_that_plain_torch_allows_too():
    """Where backward needs no weight, it may change: as in plain torch, the numbers are right."""
    linear = recoup.weight_dropout(nn.Linear(4, 4), p=0.3)
    x = torch.randn(3, 4)
    plain = x.T @ torch.ones(3, 4)
    with recorded() as made:
        loss = linear(x).sum()
    scales = mask(linear.weight, made[0])
    with torch.no_grad():
        linear.get_parameter("weight").add_(1.0)
    loss.backward()
    assert torch.equal(linear.get_parameter("weight").grad, plain.T * scales)


def test_a_change_after_backward():
    linear = recoup.weight_dropout(nn.Linear(4, 4))
    for _ in range(3):
        linear(torch.randn(3, 4, requires_grad=True)).sum().backward()
        with torch.no_grad():
            linear.get_parameter("weight").add_(0.1)


def test_a_change_while_the_graph_is_retained():
    linear = recoup.weight_dropout(nn.Linear(4, 4))
    loss = linear(torch.randn(3, 4, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        linear.get_parameter("weight").add_(0.1)
    with pytest.raises(ChangedError, match="`weight` of Linear"):
        loss.backward()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.last(self.lstm(self.first(x))[0]).tanh())


def test_an_optimizer_in_backward():
    """Hooks that step when a gradient is there: the numbers of a step after backward."""
    base = Model()
    x = torch.randn(5, 2, 4)
    results = []
    for in_backward in (True, False):
        model = copy.deepcopy(base)
        recoup.weight_dropout(model, ".*weight.*", p=0.3)
        recoup.weight_noise(model, r"lstm\..*", std=0.1)
        optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in model.parameters()}

        def step(p, optimizers=optimizers):
            optimizers[p].step()
            optimizers[p].zero_grad()

        if in_backward:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(step)
        for place in range(3):
            with same_draw(place):
                loss = model(x).sin().sum()
            loss.backward()
            if not in_backward:
                for p in model.parameters():
                    step(p)
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_in_backward_that_comes_too_early():
    """A weight that a second loss still needs: an error, as in plain torch."""
    linear = recoup.weight_dropout(nn.Linear(4, 4))

    def step(parameter):
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)

    linear.get_parameter("weight").register_post_accumulate_grad_hook(step)
    x = torch.randn(3, 4, requires_grad=True)
    a, b = linear(x).sum(), linear(x).sum()
    a.backward()
    with pytest.raises(ChangedError, match="`weight` of Linear was changed in place"):
        b.backward()


# -- noisy weights that are edited -----------------------------------------------------------------


class Edits(nn.Linear):
    """A forward that edits the weight it was given."""

    def __init__(self, before=None, after=None):
        super().__init__(4, 4, bias=False)
        self.before, self.after = before, after

    def forward(self, x):
        if self.before is not None:
            self.before(self.weight)
        y = F.linear(x, self.weight)
        if self.after is not None:
            self.after(self.weight)
        return y


def without_graph(change):
    def run(weight):
        with torch.no_grad():
            change(weight)

    return run


EDITS = {
    "mul_": lambda w: w.mul_(3.0),
    "a row": lambda w: w[1].fill_(2.0),
    "a view": lambda w: w.view(2, 8)[0].add_(1.0),
    "a detached view": lambda w: w.detach().t().mul_(2.0),
    "without a graph": without_graph(lambda w: w.clamp_(-0.1, 0.1)),
    "setitem": lambda w: w.__setitem__((slice(None), 2), 5.0),
    "copy_": without_graph(lambda w: w.copy_(torch.ones(4, 4))),
    "data": lambda w: w.data.mul_(3.0),
    "data of a view": lambda w: w.t().data.mul_(3.0),
}


def test_no_warning_in_a_step():
    """A library that warns makes programs fail whose warnings are errors."""
    model = recoup.weight_noise(recoup.weight_dropout(Model(), ".*weight.*"), ".*weight.*", std=0.1)
    embedding = recoup.weight_dropout(nn.Embedding(9, 4, sparse=True), axes=(1,))
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(embedding(torch.tensor([[1, 2], [3, 3]]))).sum().backward()
    finally:
        torch.set_warn_always(False)
