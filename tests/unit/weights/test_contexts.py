"""Which forwards share a draw, what turns noise on and off, and what a draw takes."""

from __future__ import annotations

import copy
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import recoup
from recoup.weights import applied, disabled, draws, enabled, row_draws, same_draw
from tests.unit.weights.plain_run import counted_seeds, mask, recorded


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These layers are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Reads(nn.Module):
    """A forward that returns its weight."""

    def __init__(self, *size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*(size or (16, 16))) + 3.0)

    def forward(self):
        return self.weight * 1


class Calls(nn.Module):
    """A tree whose forward is a function of the tree."""

    def __init__(self, call, **modules):
        super().__init__()
        self.call = call
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args):
        return self.call(self, *args)


def dropped(module, pattern=r"(.*\.)?weight", **settings):
    return recoup.weight_dropout(module, pattern, **settings)


def differ(*tensors):
    return all(not torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i])


def agree(*tensors):
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


def in_threads(*calls):
    """Run each call in a thread of its own, and return what they return."""
    results = [None] * len(calls)

    def run(place, call):
        try:
            results[place] = call()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            results[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# -- one draw per forward of the tree it was applied to --------------------------------------------


def test_each_forward_has_its_own():
    reads = dropped(Reads())
    assert differ(reads(), reads(), reads())


def test_each_read_of_a_forward_has_the_same():
    def call(tree):
        tree.seen = [tree.layer.weight, tree.layer(), tree.layer.weight, tree.layer()]
        return tree.seen

    tree = dropped(Calls(call, layer=Reads()))
    with recorded() as made:
        assert agree(*tree())
    assert len(made) == 1


def test_a_layer_called_twice():
    tree = dropped(Calls(lambda tree: (tree.layer(), tree.layer()), layer=Reads()))
    first, second = tree(), tree()
    assert agree(*first)
    assert agree(*second)
    assert differ(first[0], second[0])


def test_a_layer_that_it_was_applied_to_itself():
    """The draw lasts for the forward of what it was applied to: here for each call."""
    tree = Calls(lambda tree: (tree.layer(), tree.layer()), layer=Reads())
    dropped(tree.layer)
    assert differ(*tree())


def test_one_module_under_two_names():
    layer = Reads()
    tree = dropped(Calls(lambda tree: (tree.a(), tree.b()), a=layer, b=layer))
    assert len(applied(tree)) == 1
    assert agree(*tree())


def test_a_part_of_the_tree_whose_weight_it_reads_itself():
    """Attention never runs `out_proj`: it reads its weight."""
    tree = Calls(lambda tree, x: tree.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2))
    dropped(tree, r".*out_proj\.weight", p=1.0)
    x = torch.randn(3, 1, 4)
    assert torch.count_nonzero(tree(x)) == 0
    assert torch.count_nonzero(tree.attention(x, x, x)[0]) == 0


def test_a_tree_within_a_tree():
    """Each call has its own extent: here of the inner tree, and of the outer one."""
    inner = Calls(lambda tree: (tree.a(), tree.b()), a=Reads(), b=Reads())
    outer = Calls(lambda tree: (*tree.inner(), *tree.inner()), inner=inner)
    dropped(inner, "a.weight")
    dropped(outer, r"inner\.b\.weight")
    a1, b1, a2, b2 = outer()
    assert differ(a1, a2)
    assert agree(b1, b2)


def test_a_forward_that_calls_itself():
    def call(tree, depth):
        deeper = tree(depth - 1) if depth else []
        return [tree.layer.weight.clone(), *deeper]

    tree = dropped(Calls(call, layer=Reads()))
    assert agree(*tree(3))


def test_parameters_are_raw_within_a_forward_too():
    """What lists and saves parameters goes by the parameters, not by reads."""

    def call(tree):
        tree.seen = (dict(tree.named_parameters()), tree.state_dict(), copy.deepcopy(tree.layer))
        return tree.layer()

    tree = dropped(Calls(call, layer=Reads()))
    raw = tree.layer._parameters["weight"]
    tree()
    parameters, state, layer = tree.seen
    assert parameters["layer.weight"] is raw
    assert torch.equal(state["layer.weight"], raw)
    assert torch.equal(layer._parameters["weight"], raw)


def test_a_weight_that_is_looked_at_without_a_graph_first():
    """What is read for a log under no_grad must not be what the loss is computed with."""

    def call(tree):
        with torch.no_grad():
            logged = tree.layer.weight  # alive while the next ones are made
        used = tree.layer()
        with torch.no_grad():
            again = tree.layer.weight
        return logged, used, again, tree.layer()

    tree = dropped(Calls(call, layer=Reads()))
    for _ in range(2):
        with counted_seeds() as taken:
            logged, used, again, last = tree()
        assert len(taken) == 1
        assert agree(logged, used, again, last)
        assert not logged.requires_grad
        assert used.requires_grad
        assert last.requires_grad
    (used + last).sum().backward()
    assert torch.equal(tree.layer.get_parameter("weight").grad == 0, used == 0)


def test_a_parameter_that_is_replaced_within_a_forward():
    """One draw, of whatever is the parameter at the time."""

    def call(tree):
        first = tree.layer()
        second = functional_call(tree.layer, {"weight": 2 * tree.layer._parameters["weight"]}, ())
        third = tree.layer()
        with torch.no_grad():
            tree.layer._parameters["weight"].mul_(4.0)
        return first, second, third, tree.layer()

    tree = dropped(Calls(call, layer=Reads()))
    for _ in range(2):
        with counted_seeds() as taken:
            first, second, third, fourth = (y.detach().clone() for y in tree())
        assert len(taken) == 1
        assert torch.equal(second, 2 * first)
        assert torch.equal(third, first)
        assert torch.equal(fourth, 4 * first)


# -- how often is drawn ----------------------------------------------------------------------------


class Attends(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 5)

    def forward(self, x):
        state = None
        for step in x:
            state = self.cell(step, state)
        return state[0]


COUNTED = {
    "linear": (lambda: nn.Linear(4, 5), ".*"),
    "linear layers": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ".*"),
    "embedding": (lambda: nn.Embedding(9, 4), ".*"),
    "lstm": (lambda: nn.LSTM(4, 5, 2, bidirectional=True), r"weight_hh.*"),
    "gru": (lambda: nn.GRU(4, 5), ".*"),
    "cell in a loop": (Loop, ".*weight_.*"),
    "attention": (lambda: Attends(4, 2), "in_proj_weight"),
    "attention, all": (lambda: Attends(4, 2), ".*"),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0),
        r".*weight",
    ),
}  # fmt: skip
SETTINGS = {
    "dropout": lambda module, pattern: recoup.weight_dropout(module, pattern, p=0.3),
    "noise": lambda module, pattern: recoup.weight_noise(module, pattern, std=0.3),
}


def counted_draws(monkeypatch):
    """Count the calls that make weights, or gradients of weights."""
    counts = {"dropped": 0, "noised": 0, "scales": 0}

    def counting(module, name, key):
        function = getattr(module, name)

        def count(*args, **kwargs):
            counts[key] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, count)

    for name in ("dropped", "dropped_", "noised", "noised_", "scales"):
        counting(draws, name, name.rstrip("_"))
    for name in ("dropped", "noised"):
        counting(row_draws, name, name)
    counting(draws, "noise_beside", "noised")
    return counts


def test_the_default_generator_reproduces():
    model = dropped(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)))
    x = torch.randn(3, 8)

    def run():
        torch.manual_seed(5)
        model.zero_grad()
        outputs = [model(x) for _ in range(2)]
        sum(y.sum() for y in outputs).backward()
        return [*outputs, *(p.grad.clone() for p in model.parameters()), torch.rand(1)]

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("p", [0.5, 0.3])
def test_the_first_forward_is_like_any_other(p):
    """Which step of training it was must not show in the bits, or a resumed run is another one."""
    model = dropped(Loop(), r"cell\.weight_.*", p=p)
    x = torch.randn(6, 2, 4)

    def gradients():
        torch.manual_seed(5)
        model.zero_grad()
        model(x).sin().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    for a, b in zip(gradients(), gradients(), strict=True):
        assert torch.equal(a, b)


# -- one draw for several forwards -----------------------------------------------------------------


def test_same_draw():
    reads = dropped(Reads())
    with same_draw():
        first = [reads() for _ in range(3)]
    with same_draw():
        second = [reads() for _ in range(3)]
    assert agree(*first)
    assert agree(*second)
    assert differ(first[0], second[0], reads())


def test_same_draw_of_a_seed():
    """Whatever the default generator is at."""
    reads = dropped(Reads())
    with same_draw(seed=3):
        first = reads()
    torch.manual_seed(99)
    with same_draw(seed=3):
        again = reads()
    with same_draw(seed=4):
        other = reads()
    with same_draw(seed=0):
        zero = reads()
    assert agree(first, again)
    assert differ(first, other, zero)


def test_same_draw_goes_by_names():
    """Another process, or a copy, has the same noise, whatever ran before and in what order."""

    def build():
        return dropped(
            Calls(
                lambda tree, names: [getattr(tree, name)() for name in names],
                **{name: Reads() for name in "abc"},
            )
        )

    tree, other = build(), build()
    with torch.no_grad():
        for parameter in (*tree.parameters(), *other.parameters()):
            parameter.fill_(1.0)
    other(["a"])
    with same_draw(8):
        a, b, c = tree(["a", "b", "c"])
    with same_draw(8):
        c2, a2 = other(["c", "a"])
    assert differ(a, b, c)
    assert agree(a, a2)
    assert agree(c, c2)


def test_same_draw_of_noise_and_dropout_on_one_weight():
    """Both have seeds of their own."""
    reads = recoup.weight_noise(dropped(Reads()), std=0.1)
    with recorded() as made, same_draw(2):
        reads()
        reads()
    assert len({each.seed for each in made}) == len(made) == 2


def test_same_draw_nested():
    """The innermost one counts, and the outer one goes on after it."""
    reads = dropped(Reads())
    with same_draw(1):
        outer = reads()
        with same_draw(2):
            inner = reads()
            with same_draw(1):
                again = reads()
        after = reads()
    assert agree(outer, again, after)
    assert differ(outer, inner)


def test_same_draw_entered_again():
    reads = dropped(Reads())
    context = same_draw()
    with context:
        first = reads()
    between = reads()
    with context, context:
        second = reads()
    assert agree(first, second)
    assert differ(first, between, reads())


def test_same_draw_after_an_exception():
    reads = dropped(Reads())
    context = same_draw(1)
    with pytest.raises(RuntimeError, match="on purpose"), context:
        raise RuntimeError("on purpose")
    assert differ(reads(), reads())


def test_same_draw_within_a_forward():
    """Of the forward that goes on, what is drawn within is drawn for the context alone."""

    def call(tree):
        before = tree.layer()
        with same_draw(1):
            within = tree.layer()
        return before, within, tree.layer()

    tree = dropped(Calls(call, layer=Reads()))
    before, within, after = tree()
    assert agree(before, after)
    assert differ(before, within)


def test_same_draw_makes_the_gradient_of_one_weight():
    """Windows of one sequence, or accumulated gradients: the mask is one for all of them."""
    linear = dropped(nn.Linear(6, 5))
    x = torch.randn(4, 3, 6)
    with same_draw(), recorded() as made:
        for window in x:
            linear(window).sin().sum().backward()
    assert len(made) == 1
    scales = mask(linear.get_parameter("weight"), made[0])
    assert torch.equal(linear.get_parameter("weight").grad == 0, scales == 0)


def test_backward_after_the_context():
    linear = dropped(nn.Linear(6, 5), p=0.3)
    raw = linear.get_parameter("weight").detach().clone().requires_grad_()
    x = torch.randn(4, 6, requires_grad=True)
    with same_draw(7), recorded() as made:
        y = linear(x)
    with same_draw(9), disabled(linear):
        y.sin().sum().backward()
    want = F.linear(x.detach(), raw * mask(raw, made[0]), linear.bias)
    want.sin().sum().backward()
    assert torch.equal(linear.get_parameter("weight").grad, raw.grad)


# -- on and off ------------------------------------------------------------------------------------


def test_disabled_and_enabled():
    reads = dropped(Reads())
    raw = reads.get_parameter("weight")
    with disabled(reads), counted_seeds() as taken:
        assert torch.equal(reads(), raw)
        with enabled(reads):
            assert differ(reads(), reads(), raw)
            with disabled(reads):
                assert torch.equal(reads(), raw)
            assert differ(reads(), raw)
        assert torch.equal(reads(), raw)
    assert len(taken) == 3
    assert differ(reads(), raw)
    reads.eval()
    with enabled(reads):
        assert differ(reads(), reads(), raw)
    assert torch.equal(reads(), raw)


def test_always_can_be_disabled():
    reads = dropped(Reads(), mode="always").eval()
    with disabled(reads):
        assert torch.equal(reads(), reads.weight)
    assert differ(reads(), reads.weight)


def test_a_part_can_be_disabled():
    tree = dropped(Calls(lambda tree: (tree.a(), tree.b()), a=Reads(), b=Reads()))
    with disabled(tree.a):
        a, b = tree()
    assert torch.equal(a, tree.a.get_parameter("weight"))
    assert differ(b, tree.b.get_parameter("weight"))
    with disabled(tree), enabled(tree.a):
        a, b = tree()
    assert differ(a, tree.a.get_parameter("weight"))
    assert torch.equal(b, tree.b.get_parameter("weight"))


def test_another_copy_is_not_disabled():
    reads = dropped(Reads())
    other = copy.deepcopy(reads)
    with disabled(reads):
        assert differ(other(), other())


def test_a_norm_is_not_noise():
    reads = recoup.weight_norm(dropped(Reads()))
    with torch.no_grad():
        reads.weight_g.mul_(2)
    want = torch._weight_norm(reads._parameters["weight"], reads.weight_g, 0)
    with disabled(reads):
        assert torch.equal(reads(), want)
    reads.eval()
    assert torch.equal(reads(), want)
    with disabled(reads):
        assert torch.equal(reads(), want)
    with enabled(reads):
        assert differ(reads(), want)


def test_batch_norms_go_on_while_noise_is_off():
    model = dropped(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with disabled(model):
        model(torch.randn(5, 4))
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize("context", [disabled, enabled])
def test_after_an_exception_it_is_as_before(context):
    reads = dropped(Reads()).train(context is disabled)
    raw = reads.weight
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"), context(reads):
            raise RuntimeError("on purpose")
        assert torch.equal(reads(), raw) is (context is enabled)


def test_one_context_entered_again():
    reads = dropped(Reads())
    context = disabled(reads)
    for _ in range(2):
        with context:
            assert torch.equal(reads(), reads.weight)
            with context:
                assert torch.equal(reads(), reads.weight)
            assert torch.equal(reads(), reads.weight)
        assert differ(reads(), reads())


def test_contexts_that_do_not_end_in_order():
    """A generator that is left open ends when it likes: it takes away its own context only."""
    reads = dropped(Reads())
    raw = reads.get_parameter("weight")
    off, on = disabled(reads), enabled(reads.eval())
    off.__enter__()
    on.__enter__()
    off.__exit__(None, None, None)
    try:
        assert differ(reads(), raw)
    finally:
        on.__exit__(None, None, None)
    assert torch.equal(reads(), raw)


# -- threads ---------------------------------------------------------------------------------------


def test_contexts_are_of_their_thread():
    reads = dropped(Reads())
    with same_draw(1):
        here = reads()
        there, elsewhere = in_threads(reads, reads)
    assert differ(here, there, elsewhere)
    with disabled(reads):
        (there,) = in_threads(reads)
    assert differ(there, reads.get_parameter("weight"))


def test_many_threads_through_one_module():
    """Each thread has its own draw in each forward, and gradients of its own draw."""
    linear = dropped(nn.Linear(12, 12, bias=False))
    raw = linear.get_parameter("weight").detach()
    x = torch.eye(12)

    def work(seed):
        def run():
            for place in range(10):
                with same_draw(seed * 100 + place):
                    y = linear(x)
                    (gradient,) = torch.autograd.grad(y.sum(), linear.get_parameter("weight"))
                want = raw * (gradient != 0) * 2
                if not torch.equal(y.T, want):
                    return False
            return True

        return run

    assert all(in_threads(*(work(seed) for seed in range(6))))


# -- schedules -------------------------------------------------------------------------------------


def share_kept(weight):
    return float((weight != 0).double().mean())


def test_a_tensor_that_changes():
    p = torch.tensor(0.0)
    reads = dropped(Reads(), p=p)
    assert torch.equal(reads(), reads.get_parameter("weight"))
    p.fill_(0.9)
    assert share_kept(reads()) < 0.3
    p.fill_(1.0)
    assert torch.count_nonzero(reads()) == 0
    p.fill_(0.0)
    assert torch.equal(reads(), reads.get_parameter("weight"))
    std = torch.tensor(1.0, dtype=torch.float64)
    reads = recoup.weight_noise(Reads(), std=std)
    assert differ(reads(), reads.get_parameter("weight"))
    std.zero_()
    assert torch.equal(reads(), reads.get_parameter("weight"))


def test_a_function_of_the_step():
    asked = []

    def p(step):
        asked.append(step)
        return min(1.0, step / 4)

    tree = dropped(Calls(lambda tree: (tree.a(), tree.b(), tree.a()), a=Reads(), b=Reads()), p=p)
    asked.clear()
    shares = [share_kept(tree()[0]) for _ in range(6)]
    assert shares[0] == 1.0
    assert shares[4:] == [0.0, 0.0]
    assert shares[1] > shares[2] > shares[3]
    assert asked == [step for step in range(6) for _ in "ab"]
    assert [entry.step for entry in applied(tree)] == [6, 6]


def test_only_forwards_in_training_are_steps():
    reads = dropped(Reads())
    reads()
    reads.eval()
    reads()
    with enabled(reads):
        reads()
    reads.train()
    with torch.no_grad():
        reads()
    assert applied(reads)[0].step == 2
    with same_draw():
        for _ in range(3):
            reads()
    assert applied(reads)[0].step == 3


def test_the_step_is_the_same_for_the_whole_forward():
    """The last layer of a tree, and a layer that is called again, see the step of the first."""
    seen = []

    def std(step):
        seen.append(step)
        return 0.1

    tree = Calls(lambda tree: [tree.a(), tree.a(), tree.b(), tree.a()], a=Reads(), b=Reads())
    recoup.weight_noise(tree, ".*", std=std)
    seen.clear()
    tree()
    tree()
    assert seen == [0, 0, 1, 1]


def test_backward_is_of_the_magnitude_of_forward():
    p = torch.tensor(0.3)
    linear = dropped(nn.Linear(6, 5), p=p)
    raw = linear.get_parameter("weight").detach().clone().requires_grad_()
    x = torch.randn(4, 6, requires_grad=True)
    with recorded() as made:
        y = linear(x)
    p.fill_(0.9)
    y.sin().sum().backward()
    z = x.detach().clone().requires_grad_()
    F.linear(z, raw * mask(raw, made[0]), linear.bias.detach()).sin().sum().backward()
    assert torch.equal(linear.get_parameter("weight").grad, raw.grad)
    assert torch.equal(x.grad, z.grad)


def test_a_schedule_out_of_range_says_so():
    reads = dropped(Reads(), p=lambda step: 0.5 + step)
    reads()
    with pytest.raises(ValueError, match=r"`p` is 1.5, but must be from 0 to 1"):
        reads()
    std = torch.tensor(0.1)
    reads = recoup.weight_noise(Reads(), std=std)
    std.fill_(float("nan"))
    with pytest.raises(ValueError, match="`std` is nan"):
        reads()


# -- backward is not a forward ---------------------------------------------------------------------


@pytest.mark.parametrize("before", ["nothing", "evaluation", "training without a graph"])
def test_hooks_in_backward_may_look_at_the_weight(before):
    """What reads a parameter in a hook of backward is given the parameter."""
    linear = dropped(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    if before != "nothing":
        with torch.no_grad():
            linear.train(before != "evaluation")(x)
    linear.train()
    seen = []
    linear._parameters["weight"].register_hook(lambda gradient: seen.append(linear.weight))
    linear(x).sum().backward()
    assert seen[0] is linear._parameters["weight"]


def test_the_noise_of_a_seed_goes_by_qualified_names_alone():
    """A model under another class, with the same names, has the same noise."""

    class Other(nn.Sequential):
        pass

    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(2, 16)
    outputs = []
    for kind in (nn.Sequential, Other):
        model = recoup.weight_noise(kind(copy.deepcopy(layer)), r"0\.weight", std=0.1)
        with recoup.weights.same_draw(seed=5):
            outputs.append(model(x))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], layer(x))


def test_weights_of_one_name_have_draws_of_their_own():
    """As two layers that something was applied to, in one context, or what a wrapper is called."""
    layers = [recoup.weight_noise(nn.Linear(8, 8, bias=False), std=1.0) for _ in range(2)]
    for layer in layers:
        nn.init.zeros_(layer.get_parameter("weight"))
    with same_draw(seed=0):
        first, second = (layer(torch.eye(8)).detach() for layer in layers)
    assert not torch.equal(first, second)
    with same_draw(seed=0):
        assert torch.equal(layers[0](torch.eye(8)), first)


def test_an_exception_that_is_held_holds_no_weight():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            made.extend(weakref.ref(self.layer.weight) for _ in range(2))
            raise KeyError("x")

    made, model = [], recoup.weight_noise(Fails(), r"layer\.weight")
    with pytest.raises(KeyError) as caught:
        model(torch.ones(1, 4))
    assert caught.value.__traceback__ is not None
    assert [ref() for ref in made] == [None, None]
