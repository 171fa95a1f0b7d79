"""Which reads share a draw, what turns noise on and off, and what a schedule is given."""

from __future__ import annotations

import copy
import re
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


# -- which reads share a draw ----------------------------------------------------------------------

READS = {
    "a": lambda tree: [tree.a.weight * 1],
    "b": lambda tree: [tree.b.weight * 1],
    "a()": lambda tree: [tree.a()],
    "f(a)": lambda tree: [functional_call(tree.a, {}, ())],
    "g(a)": lambda tree: [torch.no_grad()(lambda: tree.a.weight)()],  # without a graph
    "copy": lambda tree: [copy.deepcopy(tree.a).get_parameter("weight")],
    "tree": lambda tree: tree(),  # a() and b()
    "evaluate": lambda tree: tree.eval() and [],
    "train": lambda tree: tree.train() and [],
}
CONTEXTS = {
    "step{": step,
    "step2{": step,
    "same1{": lambda tree: same_draw(1),
    "same2{": lambda tree: same_draw(2),
    "off{": disabled,
    "on{": enabled,
    "elsewhere{": lambda tree: disabled(dropped(reads())),
}
# A letter for each draw, "r" for the raw parameter; and how many seeds that takes. A block ends at
# "}", or by an exception at "!"; the same word is the same context, which is entered again.
PROGRAMS = """
tree tree a a a()                               -> ab cd e f g         5
step{ tree a f(a) a() tree } tree               -> ab a a a ab cd      2
step{ g(a) a() g(a) a copy }                    -> a a a a r           1
step{ step2{ tree } a tree ! a                  -> ab a ab c           2
same1{ tree tree b a } a                        -> ab ab b a c         1
same1{ a same2{ a same1{ a } } same1{ a } a } a -> a b a a a c         1
same1{ ! a same1{ a } a same2{ ! a              -> a b c d             3
same1{ step{ a same2{ a } tree } a }            -> a b ac a            0
off{ a on{ a a off{ a } a } a } a               -> r a b r c r d       4
off{ off{ a } a } a off{ ! a                    -> r r a b             2
evaluate a tree on{ a tree } train a            -> r rr a bc d         3
evaluate on{ on{ a } same1{ a a } ! a           -> a b b r             1
on{ off{ tree } } elsewhere{ tree }             -> rr ab               1
evaluate off{ a } g(a) train g(a)               -> r r r               0
"""
ROWS = [re.split(r" +-> |  +", line) for line in PROGRAMS.splitlines() if line]


class EndsError(Exception):
    """An exception by which a block ends, with what was read in it."""


def run(words, tree, contexts):
    """The reads of a program, up to the end of its block."""
    found = []
    for word in words:
        if word == "}":
            break
        if word == "!":
            raise EndsError(*found)
        if word in READS:
            found += READS[word](tree)
            continue
        try:
            with contexts[word]:
                found += run(words, tree, contexts)
        except EndsError as block:
            found += block.args
    return found


@pytest.mark.parametrize(("program", "pattern", "seeds"), ROWS, ids=[row[0] for row in ROWS])
def test_which_reads_share_a_draw(program, pattern, seeds):
    tree = dropped(Calls(lambda tree: [tree.a(), tree.b()], a=reads(), b=reads()))
    contexts = {word: make(tree) for word, make in CONTEXTS.items()}
    found, seen, letters = [], [], ""
    taken = num_seeds(lambda: found.extend(run(iter(program.split()), tree, contexts)))
    for each in found:
        place = next((i for i, one in enumerate(seen) if torch.equal(each, one)), len(seen))
        is_raw = bool((each == 3).all())
        seen += [each] if place == len(seen) and not is_raw else []
        letters += "r" if is_raw else chr(ord("a") + place)
    assert (letters, taken) == (pattern.replace(" ", ""), int(seeds))


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
    for call, names in ((tree, "abc"), (other, "cab"), (wrapped, "abc")):
        with same_draw(8):
            made = dict(zip(names, call(names), strict=True))
        found.append([made[name] for name in "abc"])
    assert differ(*found[0])
    for other_found in found[1:]:
        assert all(map(torch.equal, found[0], other_found))
    kept = [each > 0 for each in found[0][:2]]
    assert abs((kept[0] == kept[1]).double().mean() - 0.5) < 0.15
    layers = [dropped(reads()) for _ in range(2)]  # of one name
    with same_draw(8):
        assert differ(*(layer() for layer in layers))


def test_a_context_may_end_before_what_is_within_and_outlive_the_forward_where_it_began():
    """A generator that is left open ends when it likes."""
    context = same_draw(1)
    tree = dropped(Calls(lambda tree: context.__enter__(), layer=reads()))
    tree()
    assert agree(tree.layer(), tree.layer())
    context.__exit__(None, None, None)
    assert differ(tree.layer(), tree.layer())
    for first, second in ((disabled, enabled), (enabled, disabled)):
        outer, inner = first(tree), second(tree)
        inner.__enter__()
        outer.__enter__()
        inner.__exit__(None, None, None)
        assert (tree.layer() == 3).all() == (first is disabled)
        outer.__exit__(None, None, None)
    always = dropped(reads(), mode="always").eval()
    with disabled(always):
        assert agree(always(), always.get_parameter("weight"))
    assert differ(always(), always(), always.get_parameter("weight"))


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
