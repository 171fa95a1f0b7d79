"""Regions, weights and values under torch.compile: what eager code does, and its bytes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.invertible import AdditiveCoupling, Chain, Flip
from recoup.weights import applied, same_draw
from tests.alive import allocated_bytes
from tests.weight_zoo import MORE, OURS, Runs, first_of, looped
from tests.zoo import Fn

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
WIDTH, BATCH = 64, 16
UNIT = 4 * WIDTH * BATCH  # an activation
RANDOM_STATE = 5056
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

# What the compiler does on its own account.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*use_reentrant parameter.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def random_numbers_of_eager_code():
    """Let the optimizing backend draw the numbers that eager code draws."""
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield


def compiled(call, backend="aot_eager", *, fullgraph=True):
    return torch.compile(call, backend=backend, fullgraph=fullgraph)


def step_of(call, x, parameters, seed):
    torch.manual_seed(seed)
    y = call(x)
    wanted = [*([x] if x.requires_grad else []), *parameters]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted), torch.get_rng_state()]


def assert_like_eager(made, call, x, parameters, seeds=(0, 1)):
    """Steps of compiled code leave what those of eager code do; returns their outputs."""
    outputs = []
    for seed in seeds:
        found, want = (step_of(each, x, parameters, seed) for each in (made, call))
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-5)
        outputs.append(found[0])
    return outputs


def an_input():
    return torch.randn(BATCH, WIDTH, requires_grad=True)


def blocks():
    layers = lambda: [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]  # noqa: E731
    return nn.Sequential(*(nn.Sequential(*layers()) for _ in range(6)))


def within_recomputing(fn):
    def call(*args):
        with recoup.recomputing():
            return fn(*args)

    return call


def noisy_linear(make):
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
    noisy = make(lambda: weight + 0.1 * torch.randn_like(weight))
    return lambda x: torch.tanh(F.linear(x, noisy())), [weight]


def of_blocks(build):
    plain = blocks()
    return build(plain), list(plain.parameters())


# What is held: the input and a random state at most; the inputs of the segments, of which the last
# one is not computed again, and which hold their output, too.
HELD = {
    "by a function": (noisy_linear, recoup.recompute, UNIT + RANDOM_STATE),
    "by a block": (noisy_linear, within_recomputing, UNIT + RANDOM_STATE),
    "checkpoint": (of_blocks, lambda plain: partial(recoup.checkpoint, plain), UNIT),
    "inputs": (of_blocks, lambda plain: recoup.Sequential(*plain, memory="inputs"), (5 + 3) * UNIT),
    "sqrt": (of_blocks, lambda plain: recoup.Sequential(*plain, memory="sqrt"), (3 + 3) * UNIT),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("region", HELD)
def test_what_a_graph_holds_of_a_region(region, backend):
    """The bytes that a forward leaves: of its input and of what is held, and not of its output."""
    build, way, most_bytes = HELD[region]
    call, parameters = build(way)
    x, made, left = an_input(), compiled(call, backend), []
    assert_like_eager(made, call, x, parameters)
    held = allocated_bytes(lambda: left.append(made(x.clone())))[1] - left[0].nbytes
    assert held <= most_bytes


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # a first run finds modules
def test_compiled_modules_in_a_chain():
    plain = blocks()
    parts = [compiled(module, fullgraph=False) for module in plain]
    chain = recoup.Sequential(*parts, memory="sqrt")
    assert_like_eager(chain, plain, an_input(), list(plain.parameters()))


@pytest.mark.parametrize("memory", ["log", 2, "1 MiB"])
def test_a_chain_that_no_graph_can_hold_says_the_way_out(memory):
    model = recoup.Sequential(*blocks(), memory=memory)
    with pytest.raises(Exception, match=r'"inputs" and "sqrt"'):
        compiled(model)(an_input())


REGIONS = {
    "checkpoint": lambda layer: lambda x: recoup.checkpoint(layer, x),
    "recompute": recoup.recompute,
    "recomputing": within_recomputing,
    "chain": lambda layer: recoup.Sequential(layer, nn.Tanh(), nn.Tanh(), memory="inputs"),
    "constant": lambda layer: (
        lambda x: Chain(AdditiveCoupling(layer), Flip(), memory="constant")(x)[0]
    ),
}


def breaking(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y.sin()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("region", REGIONS)
def test_around_code_that_breaks_a_graph(region):
    call, layer = REGIONS[region](Fn(breaking)), nn.Linear(WIDTH, WIDTH)

    def linear(x):
        return layer(call(x + torch.randn_like(x))).sin()

    made = compiled(linear, fullgraph=False)
    assert_like_eager(made, linear, an_input(), list(layer.parameters()))


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def checkpointed(x, block, layer):
    """Parts of a tree in checkpoints, one of them twice, and one outside, too."""
    x = layer(x).tanh()
    for part in (block, block, layer):
        x = checkpoint(part, x, use_reentrant=False).tanh()
    return layer(x).tanh()


def broken(x, block, layer):
    x = layer(block(x))
    torch._dynamo.graph_break()
    return layer(block(x))


def recurrent():
    return nn.Sequential(nn.Linear(8, 8), Runs(nn.LSTM(8, 8), first_of), nn.Linear(8, 8))


def tied():
    layers = block()
    layers[2].weight = layers[0].weight
    return recoup.weight_dropout(layers, ".*weight", tied="same")


def stacked_twice():
    layers = [OURS["stacked"](nn.Linear(8, 8)) for _ in range(2)]
    return Fn(lambda x, a, b: b(a(b(a(x)))), *layers)


STACKED = OURS["stacked"]
WHOLE = {  # in one graph
    "dropout": lambda: OURS["dropout"](nn.Linear(8, 8)),
    "stacked": lambda: STACKED(block()),
    "norm": lambda: OURS["norm"](block()),
    "rows": lambda: recoup.weight_dropout(nn.Embedding(16, 8), axes=(1,)),
    "loop": lambda: OURS["dropout"](Runs(nn.GRUCell(8, 8), looped), r".*weight_.."),
    "each its own, twice": stacked_twice,
    "checkpointed": lambda: STACKED(Fn(checkpointed, block(), nn.Linear(8, 8))),
}
MODULES = WHOLE | {
    "broken": lambda: STACKED(Fn(broken, block(), nn.Linear(8, 8))),
    "recurrent": lambda: STACKED(recurrent(), r".*weight.*"),
    "tied": tied,
    "all": lambda: MORE["all"](block()),  # a function and a learned deviation among them
}
BY_INDUCTOR = [(name, "inductor") for name in ("stacked", "checkpointed", "recurrent")]
DRAWN = [(name, "aot_eager") for name in MODULES]
DRAWN += [pytest.param(*each, marks=pytest.mark.slow) for each in BY_INDUCTOR]


@pytest.mark.parametrize(("name", "backend"), DRAWN)
def test_compiled_code_draws_anew_in_each_call_as_eager_code_does(name, backend):
    torch.manual_seed(0)
    module = MODULES[name]()
    x = torch.randint(8, (4, 3)) if isinstance(module, nn.Embedding) else X
    made, steps = compiled(module, backend, fullgraph=name in WHOLE), []

    def counted(run, x):
        before = [entry.step for entry in applied(module)]
        y = run(x)
        steps.append([e.step - n for e, n in zip(applied(module), before, strict=True)])
        return y

    runs, parameters = (partial(counted, run) for run in (made, module)), [*module.parameters()]
    outputs = assert_like_eager(*runs, x, parameters, (0, 1, 0))
    torch.testing.assert_close(outputs[0], outputs[2])
    assert torch.equal(outputs[0], outputs[1]) == (name == "norm")
    assert steps[::2] == steps[1::2]


def test_contexts_around_a_compiled_module_and_a_compiled_part_of_an_eager_tree():
    module = OURS["dropout"](nn.Linear(8, 8))
    made = compiled(module)
    plain = F.linear(X, module.get_parameter("weight"), module.bias)
    with same_draw(seed=1):
        assert torch.equal(made(X), made(X))
        torch.testing.assert_close(made(X), module(X))
    with recoup.weights.step(module):
        torch.testing.assert_close(made(X), made(X))
    with recoup.weights.disabled(module):
        torch.testing.assert_close(made(X), plain)
    module.eval()
    torch.testing.assert_close(made(X), plain)
    with recoup.weights.enabled(module):
        assert not torch.equal(made(X), made(X))
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
        compiled(module.train(is_training), backend)(X)
    assert ["ops.recoup" in graph for graph in graphs] == [False, True]
    exported = torch.export.export(module.eval(), (X,))
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.aten.linear.default) == 2
    assert len(called) == 3
    assert torch.equal(exported.module()(X), module(X))


def test_what_no_graph_can_hold_says_the_way_out():
    with pytest.raises(Exception, match="Leave `fullgraph` out"):
        compiled(MORE["function"](block()))(X)
    with pytest.raises(Exception, match="as_subclass"):
        compiled(torch.sin)(gelu(torch.randn(3, requires_grad=True)))


gelu = recoup.recompute(F.gelu)


def made_within(w):
    with recoup.recomputing():
        return w * 2 + torch.randn_like(w)


def linear(x, w):
    y = F.linear((x * 2).sin(), w() if callable(w) else w)
    return torch.tanh(y).exp()


GIVEN = {
    "an argument": lambda call, x, w: call(gelu(x), w),
    "a tensor": lambda call, x, w: call(gelu(x).as_subclass(torch.Tensor), w),
    "made within": lambda call, x, w: call(x, made_within(w)),
    "made by a call within": lambda call, x, w: call(x, lambda: made_within(w)),
    "recomputed": lambda call, x, w: recoup.recompute(call)(x, w) @ w,
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_graph_breaks_where_it_is_given_a_value(given):
    """The operator that takes it runs as it does elsewhere; the rest is compiled."""
    w, x = torch.randn(8, 8, requires_grad=True), X.clone().requires_grad_()
    graph = compiled(linear, fullgraph=False)
    made, eager = (lambda x, call=call: GIVEN[given](call, x, w) for call in (graph, linear))
    assert_like_eager(made, eager, x, [w])
