"""Reparametrized weights and values under torch.compile: what eager code does, in one graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.weights import applied, same_draw
from tests.weight_zoo import MORE, OURS, Runs, Way, first_of

# What the compiler does on its own account.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
WHOLE = {"fullgraph": True}


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Tree(nn.Module):
    """A block and a layer that are run in some way: `run(block, layer, x)`."""

    def __init__(self, run):
        super().__init__()
        self.block, self.layer, self.run = block(), nn.Linear(8, 8), run

    def forward(self, x):
        return self.run(self.block, self.layer, x)


def checkpointed(block, layer, x):
    """Parts of a tree in checkpoints, one of them twice, and one outside, too."""
    x = layer(x).tanh()
    for part in (block, block, layer):
        x = checkpoint(part, x, use_reentrant=False).tanh()
    return layer(x).tanh()


def broken(block, layer, x):
    """A break of the graph between reads of the same weights."""
    x = layer(block(x))
    torch._dynamo.graph_break()
    return layer(block(x))


def recurrent():
    """A recurrent layer, where the graph breaks, between two that do not."""
    return nn.Sequential(nn.Linear(8, 8), Runs(nn.LSTM(8, 8), first_of), nn.Linear(8, 8))


def loop(cell, x):
    """A cell over time: many reads in one forward."""
    h = x.sin()
    for _ in range(3):
        h = cell(x, h)
    return h


def tied():
    tree = Tree(lambda block, layer, x: layer(block(x)))
    tree.layer.weight = tree.block[0].weight
    return recoup.weight_dropout(tree, ".*weight", tied="same")


STACKED = OURS["stacked"]
RELATIVE = Way({}, {"p": 0.5}, {"std": 0.1, "relative": True})
MODULES = {
    "dropout": (lambda: OURS["dropout"](nn.Linear(8, 8)), WHOLE),
    "stacked": (lambda: STACKED(block()), WHOLE),
    "norm": (lambda: OURS["norm"](block()), WHOLE),
    "relative": (lambda: RELATIVE(nn.Linear(8, 8)), WHOLE),
    "rows": (lambda: recoup.weight_dropout(nn.Embedding(16, 8), axes=(1,)), WHOLE),
    "loop": (lambda: OURS["dropout"](Runs(nn.GRUCell(8, 8), loop), r".*weight_.."), WHOLE),
    "each its own": (lambda: nn.Sequential(*[STACKED(nn.Linear(8, 8)) for _ in range(2)]), WHOLE),
    "checkpointed": (lambda: STACKED(Tree(checkpointed)), WHOLE),
    "broken": (lambda: STACKED(Tree(broken)), {}),
    "recurrent": (lambda: STACKED(recurrent(), r".*weight.*"), {}),
    "tied": (tied, {}),
    "function": (lambda: MORE["function"](block()), {}),
    "learned": (lambda: MORE["learned"](block()), {}),
    "all": (lambda: MORE["all"](block()), {}),
}


def results_of(module, call, x, seed):
    before = [entry.step for entry in applied(module)]
    torch.manual_seed(seed)
    module.zero_grad()
    y = call(x)
    y.square().sum().backward()
    num_steps = [entry.step - n for entry, n in zip(applied(module), before, strict=True)]
    gradients = [p.grad.clone() for p in module.parameters()]
    return [y.detach(), *gradients, torch.get_rng_state(), torch.tensor(num_steps)]


def equal_steps(module, call=lambda module: module, backend="aot_eager", **how):
    """Compare steps of compiled code, and their number, with those of eager code."""
    x = torch.randint(8, (4, 3)) if isinstance(module, nn.Embedding) else X
    compiled = torch.compile(call(module), backend=backend, **how)
    outputs = []
    for seed in (0, 1, 0):
        got = results_of(module, compiled, x, seed)
        for a, b in zip(got, results_of(module, call(module), x, seed), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        outputs.append(got[0])
    torch.testing.assert_close(outputs[0], outputs[2])
    return not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("name", MODULES)
def test_compiled_code_draws_anew_in_each_call_as_eager_code_does(name):
    build, how = MODULES[name]
    torch.manual_seed(0)
    assert equal_steps(build(), **how) == (name != "norm")


TOGETHER = {
    "twice": lambda module: lambda x: module(module(x)),
    "in a checkpoint": lambda module: lambda x: checkpoint(module, x, use_reentrant=False),
}


@pytest.mark.parametrize("name", ["stacked", "each its own"])
@pytest.mark.parametrize("call", TOGETHER)
def test_forwards_that_are_compiled_together(call, name):
    assert equal_steps(MODULES[name][0](), TOGETHER[call], fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stacked", "checkpointed", "recurrent"])
def test_the_optimizing_backend_does_not_fold_the_noise(name):
    assert equal_steps(MODULES[name][0](), backend="inductor", **MODULES[name][1])


def test_a_schedule_counts_compiled_forwards():
    seen = []
    module = recoup.weight_noise(block(), std=lambda step: seen.append(step) or 0.1)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    seen.clear()
    for _ in range(3):
        compiled(X).sum().backward()
    assert seen == [0, 0, 1, 1, 2, 2]
    with recoup.weights.step(module):
        torch.testing.assert_close(compiled(X), compiled(X))
    assert applied(module)[0].step == 4


def test_contexts_around_a_compiled_module_and_a_compiled_part_of_an_eager_tree():
    module = OURS["dropout"](nn.Linear(8, 8))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    plain = nn.functional.linear(X, module.get_parameter("weight"), module.bias)
    with same_draw(seed=1):
        assert torch.equal(compiled(X), compiled(X))
        torch.testing.assert_close(compiled(X), module(X))
    with recoup.weights.disabled(module):
        torch.testing.assert_close(compiled(X), plain)
    module.eval()
    torch.testing.assert_close(compiled(X), plain)
    with recoup.weights.enabled(module):
        assert not torch.equal(compiled(X), compiled(X))
    tree, found = OURS["dropout"](nn.Sequential(layer := nn.Linear(8, 8), layer)), []
    for _ in range(2):
        with same_draw(seed=2):
            found.append(tree(X))
        layer.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(*found)


def test_evaluation_has_nothing_of_ours_in_the_graph_and_is_exported_as_the_plain_module():
    graphs, module = [], OURS["dropout"](block())

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    for is_training in (False, True):
        torch._dynamo.reset()
        torch.compile(module.train(is_training), fullgraph=True, backend=backend)(X)
    assert ["ops.recoup" in graph for graph in graphs] == [False, True]
    exported = torch.export.export(module.eval(), (X,))
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.aten.linear.default) == 2
    assert len(called) == 3
    assert torch.equal(exported.module()(X), module(X))


def test_what_no_graph_can_hold_says_the_way_out():
    module = torch.compile(MORE["function"](block()), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="Leave `fullgraph` out"):
        module(X)
    compiled = torch.compile(torch.sin, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="as_subclass"):
        compiled(recoup.recompute(nn.functional.gelu)(torch.randn(3, requires_grad=True)))


def made_within(w):
    with recoup.recomputing():
        return w * 2 + torch.randn_like(w)


def linear(x, w):
    y = nn.functional.linear((x * 2).sin(), w() if callable(w) else w)
    return torch.tanh(y).exp()


GIVEN = {
    "an argument": lambda call, x, w: call(recoup.recompute(nn.functional.gelu)(x), w),
    "a tensor": lambda call, x, w: call(
        recoup.recompute(nn.functional.gelu)(x).as_subclass(torch.Tensor), w
    ),
    "made within": lambda call, x, w: call(x, made_within(w)),
    "made by a call within": lambda call, x, w: call(x, lambda: made_within(w)),
    "recomputed": lambda call, x, w: recoup.recompute(call)(x, w) @ w,
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_graph_breaks_where_it_is_given_a_value(given):
    """The operator that takes it runs as it does elsewhere; the rest is compiled."""
    w, x = torch.randn(8, 8, requires_grad=True), X.clone().requires_grad_()
    found = []
    for call in (linear, torch.compile(linear, backend="aot_eager")):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(GIVEN[given](call, x, w).sum(), (x, w)))
    torch.testing.assert_close(found[1], found[0])
