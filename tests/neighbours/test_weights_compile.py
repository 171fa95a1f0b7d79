"""Reparametrized weights and values under torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import recoup

BATCH = 4
# What the compiler does on its own account.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_counters(fresh_compiler):
    counters.clear()


class Loop(nn.Module):
    """A cell over time: many reads in one forward."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x):
        h = torch.zeros_like(x)
        for _ in range(4):
            h = self.cell(x, h)
        return h


class Stateful(nn.Module):
    """A cell with a state that is not zero, so that its recurrent weight matters."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x):
        return self.cell(x, (x.sin(), x.cos()))[0]


class Between(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8)
        self.after = nn.Linear(8, 8)

    def forward(self, x):
        return self.after(self.lstm(self.before(x).unsqueeze(0))[0].tanh())


def noisy_norm(**more):
    layer = recoup.weight_norm(recoup.weight_dropout(nn.Linear(8, 8)))
    return recoup.weight_noise(layer, std=0.1, **more)


def tree_of(num_layers):
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))


MODULES = {
    "linear": lambda: recoup.weight_dropout(nn.Linear(8, 8)),
    "noise": lambda: recoup.weight_noise(nn.Linear(8, 8), std=0.1),
    "relative": lambda: noisy_norm(relative=True),
    "stacked": noisy_norm,
    "embedding": lambda: recoup.weight_dropout(nn.Embedding(16, 8), axes=(1,)),
    "cell": lambda: recoup.weight_dropout(Stateful(), r".*weight_hh"),
    "tree": lambda: recoup.weight_dropout(tree_of(3), r"\d.weight"),
    "loop": lambda: recoup.weight_dropout(Loop(), r".*weight_.."),
}  # fmt: skip


def step(module, x, seed):
    torch.manual_seed(seed)
    module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    return y.detach(), [p.grad.clone() for p in module.parameters()], torch.get_rng_state()


def given(name):
    return torch.randint(16, (BATCH, 3)) if name == "embedding" else torch.randn(BATCH, 8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODULES)
def test_a_whole_graph_equals_eager_and_draws_anew_each_call(name):
    torch.manual_seed(0)
    module, x = MODULES[name](), given(name)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    outputs = []
    for seed in range(3):
        got, want = step(compiled, x, seed), step(module, x, seed)
        torch.testing.assert_close(got[0], want[0])
        for a, b in zip(got[1], want[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert torch.equal(got[2], want[2]), "the stream differs"
        outputs.append(got[0])
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(step(compiled, x, 1)[0], outputs[1])


@pytest.mark.slow
def test_the_optimizing_backend_does_not_fold_the_noise():
    module = recoup.weight_dropout(nn.Linear(8, 8))
    compiled, x = torch.compile(module, fullgraph=True), torch.randn(BATCH, 8)
    got, want = step(compiled, x, 0), step(module, x, 0)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    assert not torch.equal(got[0], step(compiled, x, 1)[0])


def test_evaluation_mode_has_nothing_of_ours_in_the_graph():
    graphs = []
    module = recoup.weight_dropout(nn.Linear(8, 8)).eval()

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    torch.compile(module, fullgraph=True, backend=backend)(torch.randn(BATCH, 8))
    assert len(graphs) == 1
    assert "ops.recoup" not in graphs[0]
    module.train()
    torch._dynamo.reset()
    torch.compile(module, fullgraph=True, backend=backend)(torch.randn(BATCH, 8))
    assert "ops.recoup" in graphs[1]


def test_contexts_around_a_compiled_module():
    module, x = recoup.weight_dropout(nn.Linear(8, 8)), torch.randn(BATCH, 8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    plain = nn.functional.linear(x, module.get_parameter("weight"), module.bias)
    with recoup.weights.same_draw(seed=1):
        assert torch.equal(compiled(x), compiled(x))
        torch.testing.assert_close(compiled(x), module(x))
    with recoup.weights.disabled(module):
        torch.testing.assert_close(compiled(x), plain)
    module.eval()
    torch.testing.assert_close(compiled(x), plain)
    with recoup.weights.enabled(module):
        assert not torch.equal(compiled(x), compiled(x))


def test_a_compiled_module_within_an_eager_tree_has_the_draw_of_the_tree():
    layer = nn.Linear(8, 8)
    tree = recoup.weight_dropout(nn.Sequential(layer, layer), r"0.weight")
    x = torch.randn(BATCH, 8)
    torch.manual_seed(0)
    want = tree(x)
    layer.compile(fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    torch.testing.assert_close(tree(x), want)


@pytest.mark.parametrize("recurrent", [Between, lambda: nn.LSTM(8, 8)])
def test_recurrent_layers_break_the_graph_once(recurrent):
    module = recoup.weight_dropout(recurrent(), r".*weight_.*")
    counter = CompileCounter()
    compiled = torch.compile(module, backend=counter)
    x = torch.randn(1, BATCH, 8) if isinstance(module, nn.LSTM) else torch.randn(BATCH, 8)
    for seed in range(3):
        torch.manual_seed(seed)
        got = compiled(x)
        torch.manual_seed(seed)
        want = module(x)
        torch.testing.assert_close(got, want)
        if seed == 0:
            num_frames = counter.frame_count
    assert num_frames <= 2, "code of ours was compiled"
    assert counter.frame_count == num_frames, "it is compiled again in later calls"


def test_many_compiled_layers_share_a_graph():
    layers = [recoup.weight_dropout(nn.Linear(8, 8)) for _ in range(12)]
    counter = CompileCounter()
    x = torch.randn(BATCH, 8)
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)
        layer(x)
    assert counter.frame_count <= len(layers)


def test_a_value_given_to_a_compiled_function():
    w = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(BATCH, 8, requires_grad=True)
    compiled = torch.compile(lambda y: (y @ w).sin(), backend="aot_eager")
    grads = []
    for make in (nn.functional.gelu, recoup.recompute(nn.functional.gelu)):
        y = make(x).as_subclass(torch.Tensor)
        assert type(y) is torch.Tensor
        grads.append(torch.autograd.grad(compiled(y).sum(), (x, w)))
    torch.testing.assert_close(grads[1], grads[0])


def value_as_argument(x, w):
    return lambda call: call(recoup.recompute(nn.functional.gelu)(x), w)


def value_made_within(x, w):
    def made(w):
        with recoup.recomputing():
            return w * 2 + torch.randn_like(w)

    return lambda call: call(x, made(w))


def value_of_a_call_within(x, w):
    def noisy():
        with recoup.recomputing():
            return w * 2 + torch.randn_like(w)

    return lambda call: call(x, noisy)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("give", [value_as_argument, value_made_within, value_of_a_call_within])
def test_a_graph_breaks_where_it_is_given_a_value(give):
    """R3: the operator that takes it runs as it does elsewhere; the rest is compiled."""
    w = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(BATCH, 8, requires_grad=True)

    def linear(x, w):
        y = nn.functional.linear((x * 2).sin(), w() if callable(w) else w)
        return torch.tanh(y).exp()

    grads = []
    for call in (linear, torch.compile(linear, backend="aot_eager")):
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(give(x, w)(call).sum(), (x, w)))
    torch.testing.assert_close(grads[1], grads[0])


def test_a_whole_graph_that_is_given_a_value_says_the_way_out():
    """R3"""
    compiled = torch.compile(torch.sin, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="as_subclass"):
        compiled(recoup.recompute(nn.functional.gelu)(torch.randn(3, requires_grad=True)))


def test_a_compiled_function_recomputed():
    compiled = torch.compile(lambda x: nn.functional.gelu(x).sin(), backend="aot_eager")
    x = torch.randn(BATCH, 8, requires_grad=True)
    w = torch.randn(8, 8, requires_grad=True)
    grads = [
        torch.autograd.grad((make(x) @ w).sum(), (x, w))
        for make in (compiled, recoup.recompute(compiled))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_evaluation_is_exported_as_the_plain_module():
    module, x = recoup.weight_dropout(tree_of(2), r"\d.weight").eval(), torch.randn(BATCH, 8)
    exported = torch.export.export(module, (x,))
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.aten.linear.default] * 2
    assert torch.equal(exported.module()(x), module(x))
    assert torch.equal(torch.fx.symbolic_trace(module)(x), module(x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("before", [nn.LSTM, nn.GRU])
def test_what_was_not_compiled_leaves_others_alone(before):
    """R11: the compiler passes by code objects, and no two classes of ours share one."""
    recurrent = recoup.weight_dropout(before(8, 8), r"weight.*")
    torch.compile(recurrent, backend="aot_eager")(torch.randn(3, BATCH, 8))
    module, x = recoup.weight_dropout(nn.Linear(8, 8)), torch.randn(BATCH, 8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled, x, 0)[0], step(module, x, 0)[0])


@pytest.mark.slow
def test_kinds_of_layers_do_not_share_the_limit_of_compilations():
    """R11: the compiler gives up on a code object that it has compiled eight times."""
    kinds = [type(f"Linear{number}", (nn.Linear,), {}) for number in range(10)]
    x = torch.randn(BATCH, 8)
    for kind in kinds:
        module = recoup.weight_dropout(kind(8, 8))
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(step(compiled, x, 0)[0], step(module, x, 0)[0])


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_schedule_counts_compiled_forwards(num_layers):
    """R4: a forward is one step, however many weights it has."""
    seen = []
    module = recoup.weight_noise(
        tree_of(num_layers), r"\d.weight", std=lambda number: seen.append(number) or 0.1
    )
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(BATCH, 8)
    seen.clear()
    for _ in range(3):
        compiled(x).sum().backward()
    assert seen == [number for number in range(3) for _ in range(num_layers)]
    assert recoup.weights.applied(module)[0].step == 3
    module(x)
    with recoup.weights.step(module):
        compiled(x), compiled(x)
    assert recoup.weights.applied(module)[0].step == 5


class Unrolled(Between):
    """A recurrent layer that runs twice, and a linear one that does so too."""

    def forward(self, x):
        for _ in range(2):
            x = self.after(self.lstm(self.before(x).unsqueeze(0))[0].tanh()).squeeze(0)
        return x


@pytest.mark.slow
def test_a_compiled_forward_that_breaks_is_one_forward():
    """R4: recurrent layers, which are not compiled, have the draw and the step of the tree."""
    seen = []
    module = recoup.weight_noise(
        Unrolled(), r".*weight.*", std=lambda number: seen.append(number) or 0.1
    )
    compiled, x = torch.compile(module, backend="aot_eager"), torch.randn(BATCH, 8)
    for seed in range(2):
        number = recoup.weights.applied(module)[0].step
        seen.clear()
        got = step(compiled, x, seed)
        assert seen == 4 * [number], "asked once for each of four weights"
        torch.testing.assert_close(got, step(module, x, seed))


class Parts(nn.Module):
    """A model whose method and whose forward read the weight of a part."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(8, 8)

    def used(self, x):
        return nn.functional.linear(x, self.part.weight)

    def forward(self, x):
        return self.used(self.part(x))


def multiplied(weight, draw):
    return weight * (1 + 0.3 * draw.normal())


@pytest.mark.parametrize(
    "build",
    [
        lambda: recoup.weights.apply(nn.Linear(8, 8), multiplied),
        lambda: recoup.weights.apply(Between(), multiplied, nn.Linear),
        lambda: recoup.weight_noise(
            recoup.weights.apply(Between(), multiplied, nn.Linear), nn.Linear, std=0.3
        ),
        lambda: recoup.weight_noise(nn.Linear(8, 8), std=0.3, learned="row"),
        lambda: recoup.weight_noise(
            recoup.weight_norm(Between(), nn.Linear), nn.Linear, 0.3, learned="model", relative=True
        ),
    ],
)
def test_a_function_or_a_learned_deviation_of_a_weight_is_outside_of_the_graph(build):
    torch.manual_seed(0)
    model, x = build(), torch.randn(BATCH, 8)
    compiled = torch.compile(model, backend="aot_eager")
    steps = []
    for each in (compiled, model):
        model.zero_grad()
        with recoup.weights.same_draw(seed=2):
            y = each(x)
        y.square().sum().backward()
        steps.append([y.detach(), *(p.grad.clone() for p in model.parameters())])
    for got, want in zip(*steps, strict=True):
        torch.testing.assert_close(got, want)
    assert not torch.equal(compiled(x), compiled(x))
    assert torch.equal(compiled.eval()(x), model(x))


def test_what_no_graph_can_hold_says_the_way_out():
    module = recoup.weights.apply(nn.Linear(8, 8), multiplied)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="Leave `fullgraph` out"):
        compiled(torch.randn(BATCH, 8))


# -- checkpoints of torch within -------------------------------------------------------------------


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Checkpointed(nn.Module):
    """A tree of which parts run in checkpoints, one of them twice, and one outside, too."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = block(), block(), nn.Linear(8, 8)

    def forward(self, x):
        x = self.c(x).tanh()
        for part in (self.a, self.b, self.a):
            x = checkpoint(part, x, use_reentrant=False)
        x = checkpoint(lambda x: self.c(x).tanh(), x, use_reentrant=False)
        return self.c(x).tanh()


class Broken(Checkpointed):
    """A tree with breaks of the graph between reads of the same weights."""

    def forward(self, x):
        x = self.c(self.a(x))
        torch._dynamo.graph_break()
        x = self.b(x)
        torch._dynamo.graph_break()
        return self.c(self.a(x))


def equal_steps(module, call, backend="aot_eager", **more):
    """Compare three steps of compiled code, and their number, with those of eager code."""
    compiled, x = torch.compile(call, backend=backend, **more), torch.randn(BATCH, 8)
    before = recoup.weights.applied(module)[0].step
    for seed in range(3):
        num_steps = [recoup.weights.applied(module)[0].step]
        results = []
        for each in (compiled, call):
            torch.manual_seed(seed)
            module.zero_grad()
            y = each(x)
            y.square().sum().backward()
            gradients = [p.grad.clone() for p in module.parameters()]
            results.append([y.detach(), *gradients, torch.get_rng_state()])
            num_steps.append(recoup.weights.applied(module)[0].step)
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert num_steps[1] - num_steps[0] == num_steps[2] - num_steps[1] > 0
    assert recoup.weights.applied(module)[0].step > before


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_around_a_noisy_module(backend):
    """R2c: one draw a forward, as without the checkpoint."""
    module = recoup.weight_noise(block(), r".*weight", std=0.1)

    def twice(x):
        x = checkpoint(module, x, use_reentrant=False)
        return checkpoint(module, x, use_reentrant=False)

    equal_steps(module, twice, backend, fullgraph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_within_a_noisy_tree_have_its_draw(backend):
    """R2c: the same weight within a checkpoint, in another one, and outside of them."""
    tree = recoup.weight_dropout(Checkpointed(), r".*weight", p=0.2)
    equal_steps(recoup.weight_noise(tree, r".*weight", std=0.1), tree, backend, fullgraph=True)


def test_breaks_within_a_noisy_tree_keep_its_draw():
    tree = recoup.weight_noise(Broken(), r".*weight", std=0.1)
    equal_steps(tree, tree)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_forwards_in_a_graph_have_two_draws(backend):
    """See Rule 9: the compiler takes two calls with the same arguments for one."""
    module = recoup.weight_noise(nn.Linear(8, 8), std=0.3)
    equal_steps(module, lambda x: module(module(x)), backend, fullgraph=True)


def test_a_part_that_trains_within_a_tree_in_evaluation():
    tree = recoup.weight_noise(block(), r".*weight", std=0.1).eval()
    tree[2].train()
    equal_steps(tree, tree, fullgraph=True)
