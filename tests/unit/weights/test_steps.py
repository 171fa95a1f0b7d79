"""Which reads share a draw, what turns noise on and off, and what a schedule is given."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

import recoup
from recoup.weights import applied, disabled, enabled, same_draw, set_step, step, update
from tests.weight_zoo import Reads


class Calls(nn.Module):
    """A tree whose forward is a function of the tree."""

    def __init__(self, call, **modules):
        super().__init__()
        self.call = call
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args):
        return self.call(self, *args)


def reads(value=3.0):
    return Reads(torch.full((16, 16), value))


def dropped(module, pattern=r"(.*\.)?weight", **settings):
    return recoup.weight_dropout(module, pattern, **settings)


def differ(*tensors):
    return all(not torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i])


def agree(*tensors):
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


def num_seeds(call):
    """How many seeds a call takes from the default generator."""
    layer, num, before = dropped(reads()), 0, torch.get_rng_state()
    call()
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    while not torch.equal(torch.get_rng_state(), after):
        layer()
        num += 1
        assert num < 10, "something else is drawn"
    return num


# -- steps -----------------------------------------------------------------------------------------


def both_ways(tree):
    return [tree.layer.weight * 1, tree.layer(), functional_call(tree.layer, {}, ()), tree.layer()]


def in_a_block(tree):
    with step(tree):
        return [*tree(), *tree()]


def decorated(tree):
    return step(tree)(lambda: [*tree(), *tree(), tree.layer.weight * 1])()


def without_graphs(tree):
    with step(tree):
        with torch.no_grad():
            logged = tree.layer.weight  # alive while the next ones are made
        made = tree.layer()
        with torch.no_grad():
            again = tree.layer.weight
        assert (logged.requires_grad, made.requires_grad) == (False, True)
        return [logged, made, again, tree.layer()]


def deeper(tree):
    tree.call = lambda tree, depth=3: [tree.layer(), *(tree(depth - 1) if depth else [])]
    return tree()


@pytest.mark.parametrize("way", [nn.Module.__call__, in_a_block, decorated, without_graphs, deeper])
def test_all_reads_of_a_step_have_one_draw_and_the_next_step_has_another(way):
    tree = dropped(Calls(both_ways, layer=reads()))
    first, second = way(tree), way(tree)
    assert agree(*first)
    assert agree(*second)
    assert differ(first[0], second[0], tree()[0], tree.layer.weight, tree.layer.weight)
    assert num_seeds(lambda: way(tree)) == 1
    (first[1] + first[-1]).sum().backward()
    assert torch.equal(tree.layer.get_parameter("weight").grad == 0, first[1] == 0)


def test_what_was_computed_last_is_not_computed_again_when_it_is_read_at_once():
    layer = dropped(reads())
    with step(layer):
        alive = weakref.ref(layer.weight)
        assert layer.weight is alive()


def test_a_step_is_the_forward_of_what_something_was_applied_to():
    twice = Calls(lambda tree: (tree.layer(), tree.layer()), layer=reads())
    dropped(twice.layer)
    assert differ(*twice())  # here each call of the layer
    with step(twice):
        assert agree(*twice())
    inner = Calls(lambda tree: (tree.a(), tree.b()), a=reads(), b=reads())
    outer = Calls(lambda tree: (*tree.inner(), *tree.inner()), inner=inner)
    dropped(inner, "a.weight")
    dropped(outer, r"inner\.b\.weight")
    a1, b1, a2, b2 = outer()
    assert differ(a1, a2)
    assert agree(b1, b2)
    layer = reads()
    names = dropped(Calls(lambda tree: (tree.a(), tree.b()), a=layer, b=layer), "b.weight")
    assert [entry.name for entry in applied(names)] == ["a.weight"]
    assert agree(*names())


def test_parameters_are_raw_within_a_step_and_may_be_replaced_there():
    tree = dropped(Calls(lambda tree: tree.layer(), layer=reads()))
    raw = tree.layer.get_parameter("weight")
    with step(tree):
        first = tree()
        assert torch.equal(copy.deepcopy(tree.layer).get_parameter("weight"), raw)
        assert torch.equal(functional_call(tree, {"layer.weight": 2 * raw}, ()), 2 * first)
        assert torch.equal(tree(), first)
        want = first.detach() * 4
        with torch.no_grad():
            raw.mul_(4.0)
        assert torch.equal(tree(), want)


def test_an_exception_ends_a_step_and_holds_no_weight():
    def fails(tree):
        made.extend(weakref.ref(tree.layer.weight) for _ in range(2))
        raise KeyError("x")

    made, tree = [], dropped(Calls(fails, layer=reads()))
    with pytest.raises(KeyError) as caught:
        tree()
    assert caught.value.__traceback__ is not None
    assert [ref() for ref in made] == [None, None]
    with pytest.raises(KeyError), step(tree):
        tree()
    with torch.no_grad():
        assert tree.layer.weight is tree.layer.get_parameter("weight")


@pytest.mark.parametrize("before", ["nothing", "evaluation", "training without a graph"])
def test_hooks_in_backward_may_look_at_the_parameter(before):
    linear, x, seen = dropped(nn.Linear(4, 4)), torch.randn(2, 4), []
    if before != "nothing":
        with torch.no_grad():
            linear.train(before != "evaluation")(x)
    raw = linear.train().get_parameter("weight")
    raw.register_hook(lambda gradient: seen.append(linear.weight))
    linear(x).sum().backward()
    assert seen[0] is raw


# -- one draw for several steps --------------------------------------------------------------------


class Other(Calls):
    """A tree of another class."""


def tree_of(kind, wrap=lambda tree: tree):
    tree = kind(lambda tree, names: [getattr(tree, name)() for name in names],
                a=reads(), b=reads(), c=reads())  # fmt: skip
    return dropped(wrap(tree))


def test_same_draw_goes_by_qualified_names_alone():
    """Whatever class it has, whatever ran before, and whatever trainers wrap it in."""
    tree, other = tree_of(Calls), tree_of(Other)
    wrapped = tree_of(Calls, lambda tree: Calls(lambda whole, *args: whole.module(*args),
                                                module=tree))  # fmt: skip
    other(["a"])
    found = []
    for run, names in ((tree, "abc"), (other, "cab"), (wrapped, "abc")):
        with same_draw(8):
            made = dict(zip(names, run(names), strict=True))
        found.append([made[name] for name in "abc"])
    assert differ(*found[0])
    for other_found in found[1:]:
        assert all(map(torch.equal, found[0], other_found))


def test_weights_of_one_name_and_of_one_tree_have_draws_of_their_own():
    layers = [dropped(reads()) for _ in range(2)]
    with same_draw(seed=0):
        first, second = (layer().detach() for layer in layers)
    assert differ(first, second)
    with same_draw(seed=0):
        assert torch.equal(layers[0](), first)
    with step(tree := tree_of(Calls)):
        kept = [layer.weight > 0 for layer in (tree.a, tree.b)]
    assert abs((kept[0] == kept[1]).double().mean() - 0.5) < 0.15


def test_same_draw_may_be_nested_entered_again_left_by_an_exception_or_within_a_forward():
    layer, context = dropped(reads()), same_draw(1)
    with context:
        outer = layer()
        with same_draw(2):
            inner = layer()
            with same_draw(1):
                again = layer()
        with context:
            within = layer()
        after = layer()
    with pytest.raises(RuntimeError, match="on purpose"), context:
        raise RuntimeError("on purpose")
    assert agree(outer, again, within, after)
    assert differ(outer, inner, layer(), layer())

    def call(tree):
        before = tree.layer()
        with same_draw(1):
            within = tree.layer()
        return before, within, tree.layer()

    before, within, after = dropped(Calls(call, layer=reads()))()
    assert agree(before, after)
    assert differ(before, within)


# -- on and off ------------------------------------------------------------------------------------


def test_disabled_and_enabled():
    layer, other = dropped(reads()), dropped(reads())
    raw = layer.get_parameter("weight")

    def run():
        with disabled(layer):
            assert torch.equal(layer(), raw)
            with enabled(layer):
                assert differ(layer(), layer(), raw)
                with disabled(layer):
                    assert torch.equal(layer(), raw)
                assert differ(layer(), raw)
            assert torch.equal(layer(), raw)

    assert num_seeds(run) == 3
    with disabled(other):
        assert differ(layer(), raw)
    layer.eval()
    with enabled(layer):
        assert differ(layer(), layer(), raw)
        with same_draw(1), torch.no_grad():
            assert agree(layer(), layer())
    assert torch.equal(layer(), raw)
    always = dropped(reads(), mode="always").eval()
    with disabled(always):
        assert torch.equal(always(), raw)
    assert differ(always(), always(), raw)


@pytest.mark.parametrize("context", [disabled, enabled])
def test_a_switch_may_be_entered_again_left_by_an_exception_and_end_before_what_is_within(context):
    layer = dropped(reads()).train(context is disabled)
    raw, switch = layer.get_parameter("weight"), context(layer)
    for _ in range(2):
        with switch:
            with switch:
                assert torch.equal(layer(), raw) is (context is disabled)
            assert torch.equal(layer(), raw) is (context is disabled)
        with pytest.raises(RuntimeError, match="on purpose"), switch:
            raise RuntimeError("on purpose")
        assert torch.equal(layer(), raw) is (context is enabled)
    other = enabled(layer) if context is disabled else disabled(layer)
    other.__enter__()
    switch.__enter__()
    other.__exit__(None, None, None)  # a generator that is left open ends when it likes
    assert torch.equal(layer(), raw) is (context is disabled)
    switch.__exit__(None, None, None)
    assert torch.equal(layer(), raw) is (context is enabled)


def test_a_context_that_begins_in_a_forward_may_outlive_it():
    context = same_draw(1)
    tree = dropped(Calls(lambda tree: context.__enter__(), layer=reads()))
    tree()
    assert agree(tree.layer(), tree.layer())
    context.__exit__(None, None, None)
    with torch.no_grad():
        assert tree.layer.weight is tree.layer.get_parameter("weight")


# -- schedules -------------------------------------------------------------------------------------


def test_a_schedule_is_given_the_number_of_steps_in_training():
    seen = []
    tree = Calls(lambda tree: [tree.a(), tree.a(), tree.b(), tree.a()], a=reads(), b=reads())
    recoup.weight_noise(tree, ".*", std=lambda step: seen.append(step) or 0.1)

    def expect(call, *steps):
        seen.clear()
        call()
        assert seen == [*steps]

    for number in range(2):
        expect(tree, number, number)  # once for each weight, and the same for both
    with step(tree):
        expect(lambda: (tree(), tree()), 2, 2)
    with same_draw():
        expect(lambda: (tree(), tree(), tree()), 3, 3)
    with torch.no_grad():
        expect(tree, 4, 4)
    expect(lambda: tree.a.weight, 5)  # a read outside of steps is none
    tree.eval()
    expect(tree)
    with enabled(tree):
        expect(tree, 5, 5)
    tree.train()
    assert [entry.step for entry in applied(tree)] == [5, 5]
    assert applied(set_step(tree, 70))[0].step == 70
    for _ in range(2):
        expect(tree, 70, 70)


def test_backward_has_the_magnitude_of_forward():
    p = torch.tensor(0.3)
    linear, x = dropped(nn.Linear(6, 5), p=p), torch.randn(4, 6, requires_grad=True)
    with same_draw(1):
        y, weight = linear(x).sum(), linear.weight.detach()
    p.fill_(0.9)
    y.backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 6))


def test_an_update_of_some():
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 3))
    recoup.weight_noise(dropped(model, nn.LSTM), [nn.LSTM, nn.Linear])
    update(model, "1.weight_hh_l0", p=0.25, std=lambda step: 0.1)
    update(model, nn.Linear, std=torch.tensor(0.5))
    assert {repr(each) for each in applied(model)} == {
        "0.weight: weight_noise(std=0.5)",
        "1.weight_hh_l0: weight_dropout(p=0.25)",
        "1.weight_hh_l0: weight_noise(std=<lambda>)",
        "1.weight_ih_l0: weight_dropout(p=0.5)",
        "1.weight_ih_l0: weight_noise(std=0.01)",
    }
