"""Which reads of a weight are noisy and share a draw; what turns noise on; and schedules."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call

import recoup
from recoup.errors import RecoupError
from recoup.weights import applied, disabled, enabled, remove, same_draw, set_step, step
from tests.block_code import CHECKPOINTS
from tests.weight_zoo import MORE, Reads, materialised


class Calls(nn.ModuleDict):
    """A tree whose forward is a function of the tree."""

    def __init__(self, call, **modules):
        super().__init__(modules)
        self.call = call

    def forward(self, *args):
        return self.call(self, *args)


PLACES = {
    "forward": lambda model, read: model(read),
    "step": lambda model, read: step(model)(read)(model),
    "outside": lambda model, read: read(model),
}
CHECKPOINTS = {"none": lambda call, x: call(x)} | CHECKPOINTS


@pytest.mark.sampled(72)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("read", [lambda m: m.layer.weight, lambda m: m.layer(torch.eye(6)).T])
@pytest.mark.parametrize("kind", ["dropout", "noise", "function"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", ["training", "always"])
def test_a_read_is_noisy_or_raw_and_gradients_are_those_of_what_was_read(
    mode, training, grad, checkpoint, place, kind, read
):
    plain = Calls(lambda model, read: read(model), layer=nn.Linear(6, 6, bias=False))
    plain.train(training)
    way = MORE[kind]._replace(how={"mode": mode})
    model, x = way(copy.deepcopy(plain)), torch.randn(6, requires_grad=True)
    raw = model.get_parameter("layer.weight")
    torch.manual_seed(7)
    with torch.set_grad_enabled(grad):
        got = PLACES[place](model, lambda m: CHECKPOINTS[checkpoint](lambda x: read(m) * x, x))

    torch.manual_seed(7)
    builds_graph = grad and checkpoint != "reentrant"
    is_noisy = (training or mode == "always") and (builds_graph or place != "outside")
    weight = raw
    if is_noisy:
        weight = materialised(way, plain, "layer.weight", {"layer.weight": raw})["layer.weight"]
    assert torch.equal(weight, raw) is not is_noisy
    del plain.layer.weight
    plain.layer.weight = weight
    want = read(plain) * x
    assert torch.equal(got, want)
    if grad:
        gradients = []
        for y in (want, got):
            x.grad = raw.grad = None
            y.sin().sum().backward()
            gradients.append((x.grad, raw.grad))
        torch.testing.assert_close(gradients[1], gradients[0])


def test_a_norm_is_no_noise_applies_everywhere_and_stays_in_the_weight_when_it_is_removed():
    layer = recoup.weight_norm(nn.Linear(6, 6))
    layer.weight_g.data.mul_(2)
    want = 2 * layer.get_parameter("weight").detach()
    for training in (True, False):
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(layer.train(training).weight, want)
    torch.testing.assert_close(remove(layer).weight.detach(), want)


def reads():
    return Reads(torch.full((16, 16), 3.0))


def dropped(module, pattern=r"(.*\.)?weight", **settings):
    return recoup.weight_dropout(module, pattern, **settings)


def stream_after(num_seeds):
    torch.manual_seed(1)
    layer = dropped(reads())
    for _ in range(num_seeds):
        layer()
    return torch.get_rng_state()


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
    seen, letters = [], ""
    torch.manual_seed(1)
    for each in run(iter(program.split()), tree, contexts):
        place = next((i for i, one in enumerate(seen) if torch.equal(each, one)), len(seen))
        is_raw = bool((each == 3).all())
        seen += [each] if place == len(seen) and not is_raw else []
        letters += "r" if is_raw else chr(ord("a") + place)
    assert letters == pattern.replace(" ", "")
    assert torch.equal(torch.get_rng_state(), stream_after(int(seeds)))


def test_a_step_is_the_forward_of_what_something_was_applied_to():
    inner = Calls(lambda tree: (tree.a(), tree.b()), a=reads(), b=reads())
    outer = Calls(lambda tree: (*tree.inner(), *tree.inner()), inner=inner)
    dropped(inner, "a.weight")
    dropped(outer, r"inner\.b\.weight")
    a1, b1, a2, b2 = outer()
    assert not torch.equal(a1, a2)
    assert torch.equal(b1, b2)


def test_same_draw_goes_by_qualified_names_alone():
    def tree_of(names):
        return Calls(lambda tree: {name: tree[name]() for name in names}, a=reads(), b=reads())

    wrapped, found = Calls(lambda whole: whole.module(), module=tree_of("ab")), []
    for call in map(dropped, (tree_of("ab"), tree_of("ba"), wrapped)):
        with same_draw(8):
            found.append(call())
    assert 0.35 < ((found[0]["a"] > 0) == (found[0]["b"] > 0)).double().mean() < 0.65
    for again in found[1:]:
        assert all(torch.equal(again[name], found[0][name]) for name in "ab")
    layers = [dropped(reads()) for _ in range(2)]  # of one name
    with same_draw(8):
        assert not torch.equal(*(layer() for layer in layers))


def test_a_schedule_is_given_the_number_of_steps_in_training():
    seen = []
    tree = Calls(lambda tree: [tree.a(), tree.a(), tree.b(), tree.a()], a=reads(), b=reads())
    recoup.weight_noise(tree, ".*", std=lambda step: seen.append(step) or 0.1)

    seen.clear()
    tree(), tree()
    with step(tree):
        tree(), tree()
    with same_draw():
        tree(), tree()
    with torch.no_grad():
        tree()
    assert tree.a.weight is not None  # a read outside of steps is none
    tree.eval()()
    with enabled(tree):
        tree()
    assert applied(set_step(tree.train(), 70))[0].step == 70
    tree()
    # Once in a step for each of two weights, and the same for both.
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 70, 70]


@pytest.mark.filterwarnings("ignore:.*(deprecated|not writable)")  # torch's own
def test_what_is_traced_is_no_sample():
    model = recoup.weight_noise(nn.Linear(6, 6))
    with pytest.raises(RecoupError, match="keep what it is now as a constant"):
        torch.fx.symbolic_trace(model)
    torch.fx.symbolic_trace(model.eval())


def test_a_parametrization_of_torch_beneath_and_the_fast_path_of_attention():
    linear = nn.utils.parametrize.register_parametrization(
        nn.Linear(6, 5, bias=False), "weight", nn.Identity()
    )
    recoup.weight_dropout(linear, r"parametrizations\.weight\.original", p=1.0)
    assert torch.count_nonzero(linear(torch.eye(6))) == 0
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    recoup.weight_dropout(encoder, r"self_attn\.in_proj_weight", mode="always")
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        assert not torch.equal(encoder(x), encoder(x))


def test_parameters_are_raw_within_a_step_and_may_be_replaced_there():
    tree = dropped(Calls(lambda tree: tree.layer(), layer=reads()))
    raw = tree.layer.get_parameter("weight")
    with step(tree):
        first = tree()
        assert torch.equal(functional_call(tree, {"layer.weight": 2 * raw}, ()), 2 * first)
        assert torch.equal(tree(), first)
        want = first.detach() * 4
        with torch.no_grad():
            raw.mul_(4.0)
        assert torch.equal(tree(), want)


@pytest.mark.parametrize("before", [None, "evaluation", "training without a graph"])
def test_hooks_in_backward_may_look_at_the_parameter(before):
    linear, x, seen = dropped(nn.Linear(4, 4)), torch.randn(2, 4), []
    if before:
        with torch.no_grad():
            linear.train(before != "evaluation")(x)
    raw = linear.train().get_parameter("weight")
    raw.register_hook(lambda gradient: seen.append(linear.weight))
    linear(x).sum().backward()
    assert seen[0] is raw


def test_backward_has_the_magnitude_of_forward():
    p = torch.tensor(0.3)
    linear, x = dropped(nn.Linear(6, 5), p=p), torch.randn(4, 6, requires_grad=True)
    with same_draw(1):
        y, weight = linear(x).sum(), linear.weight.detach()
    p.fill_(0.9)
    y.backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 6))
